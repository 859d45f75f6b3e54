// The elements of a text in Markdown, brought in line with it while it grows.
//
//     text   [ settled blocks | open end .......... ]
//     page   [ never touched  | compared and patched ]
//
// A block is settled once another begins after it that is known to be one. So a step costs what the last blocks cost that no
// empty line divides, however long the text is. Elements whose source is the same stay the same, with their selection and their focus.

import { make } from './dom.js';
import { block, blocks, lastOf } from './markdown.js';

/** A text that is longer, in UTF-16 units, is read as Markdown up to a line's end before here; the rest is text. */
const MOST_TEXT = 256 << 10;

/** What is no mark that a block may begin with. */
const WORDS = /[^\s\d*+_=~#>`|:.)[\]!-]|\S[^\n]*\n/;

export class Prose {
  /** The text becomes the children of `root`. */
  constructor(root) {
    this.root = root;
    this.restart();
  }

  restart() {
    this.settled = 0; // of the text, and of the elements
    this.fixed = 0;
    this.shown = []; // what the other elements show
    this.links = {};
    this.root.replaceChildren();
  }

  /** Shows the text so far, which begins with what was shown before. */
  write(text, isOpen = true) {
    const whole = text.replace(/\r\n?/g, '\n').replace(/^\s+/, '');
    // A link may be defined after it is used.
    if (!isOpen && Object.keys(this.links).length > 0) this.restart();
    const end = whole.length > MOST_TEXT ? whole.lastIndexOf('\n', MOST_TEXT) + 1 || MOST_TEXT : whole.length;
    const source = whole.slice(this.settled, end);
    const { tokens, links } = blocks(source, isOpen && end === whole.length, this.links);
    this.links = links;
    const last = lastOf(tokens);
    const next = tokens.map((token, i) => block(token, i === last)).filter(Boolean);
    if (end < whole.length) next.push({ tag: 'p', props: { dir: 'auto' }, children: [whole.slice(end)] });
    patchChildren(this.root, this.shown, next, this.fixed);
    this.shown = next;
    if (isOpen && end === whole.length) this.settle(source, tokens);
  }

  /** Leaves alone from now on what can change no more. */
  settle(source, tokens) {
    const last = lastOf(tokens);
    if (last < 1 || !WORDS.test(tokens[last].raw)) return;
    // Blocks without an empty line between them may still become one.
    const end = tokens.findLastIndex(({ type }, i) => i < last && ['space', 'heading', 'hr'].includes(type));
    const before = tokens.slice(0, end + 1);
    const length = before.reduce((sum, token) => sum + token.raw.length, 0);
    if (!source.startsWith(before.map((token) => token.raw).join(''))) return;
    const count = before.filter((token) => block(token)).length;
    this.settled += length;
    this.fixed += count;
    this.shown.splice(0, count);
  }
}

/** Makes the children of `parent` from the `from`-th on, which show `old`, show `next`. */
function patchChildren(parent, old, next, from = 0) {
  let node = parent.childNodes[from] ?? null;
  for (let i = 0; i < Math.max(old.length, next.length); i += 1) {
    const after = node?.nextSibling ?? null;
    if (i >= next.length) node.remove();
    else if (i >= old.length) parent.append(nodeOf(next[i]));
    else patch(node, old[i], next[i]);
    node = after;
  }
}

function patch(node, old, next) {
  if (old.key !== undefined && old.key === next.key && isAlike(old, next)) return;
  if (typeof old === 'string' && typeof next === 'string') {
    if (next === old) return;
    if (next.startsWith(old)) node.appendData(next.slice(old.length));
    else node.data = next;
  } else if (isAlike(old, next)) patchChildren(node, old.children, next.children);
  else node.replaceWith(nodeOf(next));
}

/** Whether one becomes the other by its children alone. */
const isAlike = (a, b) => a.tag !== undefined && a.tag === b.tag && JSON.stringify(a.props) === JSON.stringify(b.props);

function nodeOf(part) {
  return typeof part === 'string' ? document.createTextNode(part) : make(part.tag, part.props, ...part.children.map(nodeOf));
}
