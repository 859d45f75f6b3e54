// The open conversation as it is shown: turns, the title, and the gauges.

import { $, make, tool } from './dom.js';
import { showDefaults } from './settings.js';
import { chat, numbersOf, page, path } from './state.js';
import { bytes, count, nameOf, rate, said, summary, textOf } from './words.js';

/** Text as paragraphs and, between lines of three backticks, blocks of code. */
function prose(text) {
  const parts = text.split(/^[ \t]*```.*\n?/m);
  const nodes = parts.map((part, i) => {
    const code = i % 2 === 1;
    const shown = code ? part.replace(/\n$/, '') : part.trim();
    return shown && make(code ? 'pre' : 'p', { text: shown });
  });
  return nodes.filter(Boolean);
}

function turnNode(turn) {
  const known = numbersOf(turn.id);
  const asked = turn.messages.filter((message) => message.role !== 'assistant');
  const label = `turn ${turn.id}`;
  return make('article', { class: 'turn', id: `turn-${turn.id}`, tabindex: -1, 'aria-label': label },
    ...asked.map((message) => make('div', { class: message.role === 'user' ? 'user' : 'aside', text: textOf(message) })),
    make('div', { class: 'answer' }, ...prose(said(turn, 'assistant'))),
    make('div', { class: 'meta' },
      make('span', { class: 'numbers', text: summary(known?.timings, known?.finish) }),
      make('span', { class: 'tools' },
        navigator.clipboard && tool('copy', `Copy the answer of ${label}`, 'copy', turn.id),
        tool('edit', `Ask ${label} anew`, 'edit', turn.id),
        turn.id !== chat.head && tool('rewind', `Rewind to ${label}`, 'rewind', turn.id),
        page.props?.sessions && tool('branch', `Branch from ${label}`, 'branch', turn.id))));
}

export function renderChat(follow = true) {
  const turns = path();
  $('log').replaceChildren(...turns.map(turnNode));
  $('empty').hidden = turns.length > 0 || page.live !== null;
  $('name-field').hidden = !page.props?.sessions || chat.info !== null;
  const title = chat.info ? nameOf(chat.info) : turns.length ? textOf(turns[0].messages[0]) : 'New session';
  $('title').textContent = title;
  $('title').title = chat.info?.id ?? '';
  document.title = chat.info ? `${title} · boostr` : 'boostr';
  $('delete').hidden = chat.info === null;
  const last = numbersOf(chat.head)?.timings;
  gauges(last?.predicted_per_second, chat.info?.position ?? last?.position ?? 0, chat.info?.state_bytes || last?.state_bytes || page.props?.state_bytes);
  if (follow) scrollDown();
}

export function gauges(speed, position, state) {
  $('speed').textContent = rate(speed);
  $('position').textContent = count(position);
  $('state').textContent = bytes(state);
}

export function scrollDown() { $('scroll').scrollTop = $('scroll').scrollHeight; }

/** Whether the end of the conversation is in view: who has scrolled up is left there. */
export function atEnd() {
  const { scrollTop, scrollHeight, clientHeight } = $('scroll');
  return scrollHeight - scrollTop - clientHeight < 80;
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
