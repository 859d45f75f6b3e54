// A turn: a message is sent, its answer read as it comes, stopped, and put away.

import { setInput } from './composer.js';
import { atEnd, gauges, renderChat, scrollDown } from './conversation.js';
import { $, make, say } from './dom.js';
import { choices, NUMBERS, remembered } from './memory.js';
import { call, events, Failure, request } from './server.js';
import { getSession, listSessions, settled } from './sessions.js';
import { chat, keepNumbers, page, path, take } from './state.js';
import { renderSidebar } from './tree.js';
import { clearTrouble, report } from './trouble.js';
import { summary } from './words.js';

/** The request for an answer: with a session the message alone, without one all that was said. */
function body(text) {
  const { settings } = choices;
  const fields = { model: page.props.model, stream: true, stream_options: { include_usage: true }, reasoning_format: 'none' };
  for (const name of NUMBERS) if (typeof settings[name] === 'number') fields[name] = settings[name];
  const user = { role: 'user', content: text };
  if (chat.info) return { ...fields, session: chat.info.id, messages: [user] };
  const system = settings.system ? [{ role: 'system', content: settings.system }] : [];
  return { ...fields, messages: [...system, ...path().flatMap((turn) => turn.messages), user] };
}

/** Makes the session that the first message goes to. */
async function begin() {
  const name = $('name').value.trim();
  const { system } = choices.settings;
  const session = await call('POST', '/v1/sessions', { ...(name && { id: name }), ...(system && { system }) });
  take({ ...session, tree: [] });
  history.pushState(null, '', `#${encodeURIComponent(session.id)}`); // no `hashchange`: it is open already
}

export async function send(text) {
  if (page.live || !page.props) return;
  clearTrouble();
  if (page.props.sessions && !chat.info && !$('name').reportValidity()) return;
  const live = show(text);
  let failure = null;
  const stopped = () => live.controller.signal.aborted;
  try {
    if (page.props.sessions && !chat.info) await begin();
    remembered.set('sessionStorage', 'boostr.pending', chat.info && `${chat.info.id}/${chat.head}`);
    await read(live, await request('POST', '/v1/chat/completions', body(text), live.controller.signal));
  } catch (error) {
    if (error.name !== 'AbortError' && !stopped()) failure = error;
  }
  const { timings, finish, text: written } = live;
  const before = chat.head;
  const cut = stopped();
  try {
    if (chat.info) {
      const left = written && (cut || failure);
      take(left || cut ? await settled(chat.info.id, before) : await getSession(chat.info.id));
      await listSessions();
    } else if (written || finish) {
      const id = Math.max(0, ...chat.turns.keys()) + 1;
      chat.turns.set(id, { id, parent: before, messages: [{ role: 'user', content: text }, { role: 'assistant', content: written }] });
      chat.head = id;
    }
  } catch (error) {
    failure ??= error;
  }
  const kept = chat.head !== before;
  if (kept) keepNumbers(chat.head, { timings, finish: cut ? 'stopped' : finish });
  remembered.set('sessionStorage', 'boostr.pending', null);
  page.live = null;
  busy(false);
  renderChat(atEnd());
  renderSidebar();
  if (!kept && !$('input').value) setInput(text);
  if (failure) report(failure, failure.passes && !kept ? () => { setInput(''); send(text); } : null);
  say(failure ? '' : cut ? 'Stopped' : `Answered: ${summary(timings, finish)}`);
  live.over();
}

/** Shows a message that waits for its answer. */
function show(text) {
  const answer = document.createTextNode('');
  const waiting = make('span', { class: 'waiting', text: 'reading' });
  const node = make('article', { class: 'turn live', 'aria-busy': 'true' },
    make('div', { class: 'user', text }), make('div', { class: 'answer' }, make('p', {}, answer, waiting)));
  const live = { controller: new AbortController(), answer, waiting, text: '', pieces: 0, first: 0 };
  live.done = new Promise((resolve) => { live.over = resolve; });
  page.live = live;
  setInput('');
  busy(true);
  $('empty').hidden = true;
  $('log').append(node);
  scrollDown();
  return live;
}

/** Reads an answer as it comes. Throws what the server reports in the middle of it. */
async function read(live, response) {
  for await (const event of events(response)) {
    if (event.comment !== undefined) {
      const progress = event.comment.match(/^prefill (\d+)\/(\d+)/);
      if (progress) {
        live.waiting.textContent = `reading ${progress[1]} of ${progress[2]}`;
        live.prompt = Number(progress[2]);
      }
      continue;
    }
    if (event.data === '[DONE]') return;
    const chunk = JSON.parse(event.data);
    if (chunk.error) throw new Failure(chunk.error.type === 'unavailable_error' ? 503 : 500, chunk.error.message);
    if (chunk.timings) live.timings = chunk.timings;
    const [choice] = chunk.choices ?? [];
    if (choice?.finish_reason) live.finish = choice.finish_reason;
    if (choice?.delta?.content) {
      live.first ||= performance.now();
      live.pieces += 1;
      live.text += choice.delta.content;
      live.frame ??= requestAnimationFrame(paint);
    }
  }
  if (!live.finish) throw new Failure(0, 'The answer ended too early.');
}

/** Once a frame: what came since the last, and the gauges. */
function paint() {
  const { live } = page;
  if (!live) return;
  live.frame = null;
  const follow = atEnd();
  live.waiting.remove();
  live.answer.appendData(live.text.slice(live.answer.length));
  const seconds = (performance.now() - live.first) / 1000;
  gauges(live.pieces > 3 ? live.pieces / seconds : 0, (live.prompt ?? chat.info?.position ?? 0) + live.pieces, chat.info?.state_bytes || page.props.state_bytes);
  if (follow) scrollDown();
}

/** Stops the answer that is being written, if any, and waits until it is put away. */
export async function stop() {
  if (!page.live) return;
  page.live.controller.abort();
  await page.live.done;
}

function busy(yes) {
  const focused = [$('send'), $('stop')].includes(document.activeElement);
  $('send').hidden = yes;
  $('stop').hidden = !yes;
  if (focused) $('input').focus();
  if (yes) say('Answering');
}
