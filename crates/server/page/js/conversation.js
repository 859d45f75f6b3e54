// The open conversation as it is shown: turns, the title, and the gauges.

import { Answer } from './answer.js';
import { $, make, tool } from './dom.js';
import { keeping, toEnd } from './scroll.js';
import { showDefaults } from './settings.js';
import { chat, numbersOf, page, path } from './state.js';
import { bytes, count, nameOf, rate, said, summary, textOf } from './words.js';

/** What is shown of the answers of the open conversation, by the numbers of turns. */
let answers = new Map();
let conversation = null; // whose they are

/** A turn's answer; the same elements as long as it says the same. */
export function answerOf(turn) {
  const known = answers.get(turn.id);
  const { thought, text } = said(turn);
  if (known?.written.text === text && known.written.thought === thought) return known;
  const answer = new Answer();
  answer.write({ thought, text, seconds: numbersOf(turn.id)?.seconds });
  answers.set(turn.id, answer);
  return answer;
}

/** Makes an answer that has just been written that of a turn. */
export function adopt(turn, answer) { answers.set(turn, answer); }

const asked = (turn) => turn.messages.filter((message) => message.role !== 'assistant')
  .map((message) => make('div', { class: message.role === 'user' ? 'user' : 'aside', dir: 'auto', text: textOf(message) }));

function turnNode(turn) {
  const known = numbersOf(turn.id);
  const label = `turn ${turn.id}`;
  const isLast = turn.id === chat.head;
  return make('article', { class: 'turn', id: `turn-${turn.id}`, tabindex: -1, 'aria-label': label },
    ...asked(turn),
    answerOf(turn).node,
    isLast && turn.is_cut && (page.props?.sessions || said(turn).text || said(turn).thought) && make('button', { class: 'go-on', 'data-action': 'goOn', 'data-turn': turn.id, text: 'Go on' }),
    make('div', { class: 'meta' },
      make('span', { class: 'numbers', text: summary(known?.timings, known?.finish ?? (turn.is_cut ? 'cut' : null)) }),
      make('span', { class: 'tools' },
        tool('copy', `Copy the answer of ${label}`, 'copy', turn.id),
        tool('edit', `Ask ${label} anew`, 'edit', turn.id),
        !isLast && tool('rewind', `Rewind to ${label}`, 'rewind', turn.id),
        page.props?.sessions && tool('branch', `Branch from ${label}`, 'branch', turn.id))));
}

/** A turn whose answer is being written. */
export function liveNode(questions, answer, waiting) {
  return make('article', { class: 'turn live', 'aria-busy': 'true' }, ...questions, answer.node, waiting);
}

/** The same for a turn that goes on. */
export function liveAgain(turn, waiting) {
  return liveNode(asked(turn), answerOf(turn), waiting);
}

/** Shows the conversation as it is now; the reader stays in place, or is taken to the end. */
export function renderChat(isNew = false) {
  const turns = path();
  if (conversation !== (chat.info?.id ?? null)) answers = new Map();
  conversation = chat.info?.id ?? null;
  keeping(() => {
    $('log').replaceChildren(...turns.map(turnNode));
    const shown = new Set(turns.map((turn) => turn.id));
    for (const id of answers.keys()) if (!shown.has(id)) answers.delete(id);
  });
  $('empty').hidden = turns.length > 0 || page.live !== null;
  $('name-field').hidden = !page.props?.sessions || chat.info !== null;
  const title = chat.info ? nameOf(chat.info) : turns.length ? textOf(turns[0].messages[0]) : 'New session';
  $('title').textContent = title;
  $('title').title = chat.info?.id ?? '';
  document.title = chat.info ? `${title} · boostr` : 'boostr';
  $('delete').hidden = chat.info === null;
  const last = numbersOf(chat.head)?.timings;
  gauges(last?.predicted_per_second, chat.info?.position ?? last?.position ?? 0, chat.info?.state_bytes || last?.state_bytes || page.props?.state_bytes);
  if (isNew) toEnd();
}

export function gauges(speed, position, state) {
  $('speed').textContent = rate(speed);
  $('position').textContent = count(position);
  $('state').textContent = bytes(state);
}

/** Says which model answers. */
export function renderModel() {
  const { props } = page;
  const size = props.parameters >= 1e9 ? `${(props.parameters / 1e9).toFixed(1)} B` : `${(props.parameters / 1e6).toFixed(1)} M`;
  $('model').textContent = `${props.model} · ${size} parameters`;
  $('model').title = props.version ? `boostr ${props.version}` : '';
  const demo = /^demo-/.test(props.model);
  $('note').textContent = demo
    ? `${props.model} is a demo, not an assistant: it goes on in the manner of old novels and speeches, answers no questions and knows nothing.`
    : props.has_chat_template ? '' : `${props.model} was not made for chat: it goes on with your text.`;
  $('empty-title').textContent = props.has_chat_template ? 'What shall we talk about?' : 'Begin a text; the model goes on with it.';
  $('disclaimer').textContent = demo ? 'A demo, not an assistant.' : 'A model may be wrong.';
  $('system-hint').textContent = props.sessions ? 'Given to new sessions; one that has begun keeps its own.' : 'Sent before every conversation.';
  showDefaults(props.defaults);
}
