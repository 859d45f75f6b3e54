// Markdown as descriptions of elements: `{ tag, props, children, key }`, where a child is a description or a text. Two with one
// key are alike; the last of several has none, as more may come to it. A lexer reads the blocks and what is in them; here is
// what each of its tokens becomes. Markup of HTML is text, an image is a link, and a link
// leads to http, https or mailto.
//
// Hostile text is bounded: what is nested deeper, longer, or takes longer than the limits here stays text.

import { Lexer, Tokenizer } from '../vendor/marked.esm.js';

/** Deepest nesting of lists and quotes, and of emphasis and links. */
const MOST_DEPTH = 16;
/** Longest paragraph, heading or cell in which emphasis, links and code are looked for, in UTF-16 units. */
const MOST_INLINE = 20_000;
/** Most runs of emphasis' marks in one of these. */
const MOST_MARKS = 1000;
/** The longest of a word without spaces, as addresses have them. */
const LONG_WORD = /[\w.!#$%&'*+/=?^`{|}~-]{2000}/;
/** After so many milliseconds the rest of a text is not read as Markdown. */
const MOST_TIME = 500;

/** Without markup of HTML. */
class Plain extends Tokenizer {
  html() { return undefined; }
  tag() { return undefined; }
}

class Bounded extends Lexer {
  constructor(links) {
    super({ gfm: true, tokenizer: new Plain() });
    Object.assign(this.tokens.links, links);
    this.depth = 0;
    this.end = performance.now() + MOST_TIME;
  }

  blockTokens(source, tokens = [], clipped = false) {
    return this.within(source, tokens, true, () => super.blockTokens(source, tokens, clipped));
  }

  inlineTokens(source, tokens = []) {
    const fits = source.length <= MOST_INLINE && !LONG_WORD.test(source) && (source.match(/[*_~]+/g)?.length ?? 0) <= MOST_MARKS;
    return this.within(source, tokens, fits, () => super.inlineTokens(source, tokens));
  }

  within(source, tokens, fits, read) {
    if (!fits || this.depth >= MOST_DEPTH || performance.now() > this.end) {
      if (source) tokens.push({ type: 'text', raw: source, text: source });
      return tokens;
    }
    this.depth += 1;
    try {
      return read();
    } finally {
      this.depth -= 1;
    }
  }
}

/** A last line of nothing but marks: not before more comes is it known what they begin. */
const MARKS = /^(?:[-*+=_~#>`|:[\]! ]{1,1000}|\d{1,9}[.)]?)$/;

/**
 * The blocks of a text, and the links that are defined in it. `isOpen`: more of it is to come, so what its last block begins is
 * taken as ended. `links` are those that were defined before it.
 */
export function blocks(source, isOpen = false, links = {}) {
  let text = source;
  if (isOpen) {
    const line = source.lastIndexOf('\n') + 1;
    if (MARKS.test(source.slice(line).trim())) text = source.slice(0, line);
  }
  let lexer = read(text, isOpen, links);
  const columns = isOpen ? columnsBegun(lexer.tokens.at(-1)) : 0;
  if (columns) lexer = read(`${text.trimEnd()}\n${'|-'.repeat(columns)}|`, false, links);
  return { tokens: lexer.tokens, links: lexer.tokens.links };
}

function read(text, isOpen, links) {
  const lexer = new Bounded(links);
  lexer.blockTokens(text, lexer.tokens);
  const queue = lexer.inlineQueue;
  const end = isOpen && endOf(lexer.tokens);
  const last = end && queue.findLast(({ tokens }) => tokens === end);
  if (last) last.src = closed(last.src);
  for (const { src, tokens } of queue) lexer.inlineTokens(src, tokens);
  return lexer;
}

/** The place of the last of some tokens that is not only space. */
export const lastOf = (tokens) => tokens.findLastIndex((token) => token.type !== 'space');

/** Where what is in the last block goes; nothing, if that is code. */
function endOf(tokens) {
  const token = tokens[lastOf(tokens)];
  switch (token?.type) {
    case 'list': return endOf(token.items.at(-1).tokens);
    case 'blockquote': return endOf(token.tokens);
    case 'table': return [...token.header, ...(token.rows.at(-1) ?? [])].findLast((cell) => cell.text)?.tokens;
    default: return token?.tokens;
  }
}

/** Columns of a table of which there is only the first line; 0 where none begins. */
function columnsBegun(token) {
  if (token?.type !== 'paragraph' || token.raw.length > MOST_INLINE) return 0;
  const lines = token.raw.trimEnd().split('\n').map((line) => line.trim());
  const line = lines.at(-1);
  if (!line.startsWith('|') || lines.at(-2)?.startsWith('|')) return 0;
  const cells = line.replaceAll('\\|', '').slice(1).replace(/\|$/, '').split('|').length;
  return line.indexOf('|', 1) > 0 ? cells : 0;
}

/** A text whose emphasis, code and link are closed where they are open at its end. */
export function closed(text) {
  if (text.length > MOST_INLINE) return text;
  const open = [];
  for (const { 0: mark, index } of text.matchAll(/\\.|`+|\*{1,3}|_{1,3}|~~/gs)) {
    const isInCode = open.at(-1)?.[0] === '`';
    const before = text[index - 1] ?? ' ';
    const after = text[index + mark.length] ?? ' ';
    if (mark[0] === '\\') continue;
    if (isInCode || mark[0] === '`') {
      if (open.at(-1) === mark) open.pop();
      else if (!isInCode) open.push(mark);
    } else if (open.at(-1)?.[0] === mark[0] && /\S/.test(before)) {
      // One may end several, or a part of one: `***both* bold**`.
      for (let rest = mark.length; rest > 0 && open.at(-1)?.[0] === mark[0];) {
        const begun = open.pop();
        if (begun.length > rest) open.push(begun.slice(rest));
        rest -= begun.length;
      }
    } else if ( /[\s\p{P}]/u.test(before) && (mark[1] ? /\S/ : /[\p{L}\p{N}"'“‘([*_`]/u).test(after)) open.push(mark);
  }
  let shown = text;
  if (open.at(-1)?.[0] === '`') {
    // One that has just begun, or a part of its end.
    const [mark] = /`*$/.exec(text.slice(-100));
    if (mark === open.at(-1)) open.pop();
    shown = text.slice(0, text.length - mark.length);
  } else {
    shown = shown
      .replace(/!?\[([^[\]]*)\]\([^()\s]*(?:\s{1,9}(?:"[^"]*"?)?)?$/, '$1')
      .replace(/!?\[([^[\]]*)$/, '$1')
      .replace(/(^|\s)(?:\*{1,3}|_{1,3}|~~?)$/, '$1');
    if (open.at(-1) === '~~' && /[^~]~$/.test(shown)) shown = shown.slice(0, -1);
  }
  const words = shown.trimEnd();
  return words + open.reverse().join('') + shown.slice(words.length);
}

const TITLES = ['h2', 'h3', 'h4', 'h5', 'h6', 'h6']; // the page has the first

/** What a block becomes; nothing, for those that are not shown. `isLast`: more may come to it. */
export function block(token, isLast = true, isTop = true) {
  const dir = isTop ? { dir: 'auto' } : {};
  const of = (tag, props, children) => ({ tag, props, children, key: isLast ? undefined : token.raw });
  switch (token.type) {
    case 'paragraph': return of('p', dir, inlines(token.tokens));
    case 'heading': return of(TITLES[token.depth - 1], dir, inlines(token.tokens));
    case 'hr': return of('hr', {}, []);
    case 'code': return of('div', { class: 'code', dir: 'ltr' }, code(token));
    case 'blockquote': return of('blockquote', dir, blocksOf(token.tokens));
    case 'list': return of(token.ordered ? 'ol' : 'ul', { ...dir, ...from(token) }, items(token));
    case 'table': return of('div', { class: 'table', tabindex: 0, ...dir }, [table(token)]);
    case 'text': return isTop ? of('p', dir, inlines(token.tokens ?? [token])) : null;
    default: return null; // spaces and definitions of links
  }
}

function blocksOf(tokens) {
  const last = lastOf(tokens);
  return tokens.flatMap((token, i) => blockOf(token, i === last));
}

function blockOf(token, isLast) {
  if (token.type === 'text') return inlines(token.tokens ?? [token]);
  if (token.type === 'checkbox') return inlines([token]);
  return block(token, isLast, false) ?? [];
}

function code({ text, lang }) {
  const name = lang?.match(/^[^\s{,]{1,32}/)?.[0];
  return [
    { tag: 'div', props: { class: 'code-head' }, children: [
      { tag: 'span', props: {}, children: name ? [name] : [] },
      { tag: 'button', props: { type: 'button', 'data-action': 'copyCode' }, children: ['Copy'] },
    ] },
    { tag: 'pre', props: { tabindex: 0 }, children: [{ tag: 'code', props: {}, children: text ? [text] : [] }] },
  ];
}

/** The number that a list begins with. */
const from = ({ ordered, start }) => (ordered && start !== 1 && Number.isSafeInteger(start) ? { start } : {});

const items = (list) => list.items.map((item, i) => ({
  tag: 'li', props: item.task ? { class: 'task' } : {}, children: blocksOf(item.tokens),
  key: i === list.items.length - 1 ? undefined : `${item.raw}${list.loose ? '\n' : ''}`,
}));

const ALIGNED = { center: 'center', right: 'end' };

function table({ header, rows, align }) {
  const cell = (tag) => ({ tokens }, i) => ({
    tag, props: { ...(ALIGNED[align[i]] && { class: ALIGNED[align[i]] }), ...(tag === 'th' && { scope: 'col' }) }, children: inlines(tokens),
  });
  const row = (cells, i) => ({
    tag: 'tr', props: {}, children: cells.map(cell('td')), key: i === rows.length - 1 ? undefined : cells.map(({ text }) => text).join('\n'),
  });
  return { tag: 'table', props: {}, children: [
    { tag: 'thead', props: {}, children: [{ tag: 'tr', props: {}, children: header.map(cell('th')) }] },
    { tag: 'tbody', props: {}, children: rows.map(row) },
  ] };
}

function inlines(tokens = []) {
  const parts = tokens.flatMap(inline);
  // One text beside another is one.
  return parts.reduce((all, part) => {
    if (typeof part === 'string' && typeof all.at(-1) === 'string') all.push(all.pop() + part);
    else if (part !== '') all.push(part);
    return all;
  }, []);
}

function inline(token) {
  const of = (tag, props, children) => ({ tag, props, children });
  switch (token.type) {
    case 'strong': return of('strong', {}, inlines(token.tokens));
    case 'em': return of('em', {}, inlines(token.tokens));
    case 'del': return token.raw.startsWith('~~') ? of('del', {}, inlines(token.tokens)) : ['~', ...inlines(token.tokens), '~'];
    case 'codespan': return of('code', {}, token.text ? [token.text] : []);
    case 'br': return of('br', {}, []);
    case 'checkbox': return of('input', { type: 'checkbox', disabled: true, checked: token.checked, 'aria-label': token.checked ? 'done' : 'to do' }, []);
    case 'link': return link(token, inlines(token.tokens));
    case 'image': return link(token, [entities(token.text) || entities(token.href)]);
    case 'escape': return token.text;
    case 'text': return token.tokens ? inlines(token.tokens) : entities(token.text);
    default: return token.raw;
  }
}

const SCHEMES = new Set(['http:', 'https:', 'mailto:']);

/** A link, or its source where it leads elsewhere. */
function link({ type, href, title, raw }, children) {
  let url;
  try { url = new URL(entities(href)); } catch { /* it leads nowhere by itself */ }
  if (!SCHEMES.has(url?.protocol)) return raw;
  const props = { href: url.href, target: '_blank', rel: 'noopener noreferrer nofollow', title: title ? entities(title) : null, class: type === 'image' ? 'image' : null };
  return { tag: 'a', props, children: unlinked(children) };
}

/** A link has no other in it. */
const unlinked = (children) => children.flatMap((child) => {
  if (!child.tag) return child || [];
  return child.tag === 'a' ? child.children : { ...child, children: unlinked(child.children) };
});

const NAMED = {
  amp: '&', lt: '<', gt: '>', quot: '"', apos: "'", nbsp: '\u00a0', copy: '©', reg: '®', trade: '™', hellip: '…', mdash: '—', ndash: '–', lsquo: '‘',
  rsquo: '’', ldquo: '“', rdquo: '”', laquo: '«', raquo: '»', bull: '•', middot: '·', times: '×', divide: '÷', plusmn: '±', deg: '°', micro: 'µ', para: '¶',
  sect: '§', euro: '€', pound: '£', yen: '¥', cent: '¢', larr: '←', rarr: '→', uarr: '↑', darr: '↓', harr: '↔', rArr: '⇒', ne: '≠', le: '≤', ge: '≥',
  asymp: '≈', infin: '∞', sum: '∑', radic: '√', minus: '−', frac12: '½', frac14: '¼', frac34: '¾', sup2: '²', sup3: '³', pi: 'π', alpha: 'α', beta: 'β',
  gamma: 'γ', delta: 'δ', lambda: 'λ', mu: 'μ', sigma: 'σ', omega: 'ω', ensp: '\u2002', emsp: '\u2003', thinsp: '\u2009', shy: '\u00ad', zwj: '\u200d', zwnj: '\u200c',
};

/** A text in which names and numbers of characters are these characters. */
function entities(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(\w{2,8}));/g, (source, decimal, hex, name) => {
    if (name) return Object.hasOwn(NAMED, name) ? NAMED[name] : source;
    const point = decimal ? Number(decimal) : Number.parseInt(hex, 16);
    const isNone = point === 0 || point > 0x10ffff || (point >= 0xd800 && point < 0xe000);
    return isNone ? '\ufffd' : String.fromCodePoint(point);
  });
}
