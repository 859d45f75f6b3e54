// A turn: a message is sent, its answer read as it comes, stopped, and put away; and an answer that was cut goes on.

import { Answer } from './answer.js';
import { setInput } from './composer.js';
import { adopt, answerOf, gauges, liveAgain, liveNode, renderChat } from './conversation.js';
import { $, make, say } from './dom.js';
import { choices, NUMBERS, remembered } from './memory.js';
import { growing, isFollowing, keeping, toEnd } from './scroll.js';
import { call, events, Failure, request } from './server.js';
import { getSession, listSessions, settled } from './sessions.js';
import { chat, keepNumbers, page, path, take } from './state.js';
import { renderSidebar } from './tree.js';
import { clearTrouble, report } from './trouble.js';
import { said, summary } from './words.js';

/** The part of the time that may go into showing an answer while it comes. */
const SHARE = 0.25;

/** The request for an answer: with a session what is new alone, without one all that was said. `goesOn`: the last answer does. */
function body(messages, goesOn) {
  const { settings } = choices;
  const fields = { model: page.props.model, stream: true, reasoning_format: "auto", stream_options: { include_usage: true } };
  if (goesOn) fields.continue_final_message = true;
  for (const name of NUMBERS) if (typeof settings[name] === 'number') fields[name] = settings[name];
  if (chat.info) return { ...fields, session: chat.info.id, messages };
  const system = settings.system ? [{ role: 'system', content: settings.system }] : [];
  return { ...fields, messages: [...system, ...path().flatMap((turn) => turn.messages), ...messages] };
}

/** Makes the session that the first message goes to. */
async function begin() {
  const name = $('name').value.trim();
  const { system } = choices.settings;
  const session = await call('POST', '/v1/sessions', { ...(name && { id: name }), ...(system && { system }) });
  take({ ...session, tree: [] });
  history.pushState(null, '', `#${encodeURIComponent(session.id)}`); // no `hashchange`: it is open already
}

/** Sends a message. */
export async function send(text) {
  if (page.live || !page.props) return;
  clearTrouble();
  if (page.props.sessions && !chat.info && !$('name').reportValidity()) return;
  const user = { role: 'user', content: text };
  const live = start(new Answer(), { thought: '', text: '' });
  setInput('');
  $('empty').hidden = true;
  $('log').append(liveNode([make('div', { class: 'user', dir: 'auto', text })], live.answer, live.waiting));
  toEnd();
  const { isKept, failure } = await run(live, [user], { parent: chat.head, messages: [user] });
  if (!isKept && !$('input').value) setInput(text);
  if (failure) report(failure, failure.passes && !isKept ? () => { setInput(''); send(text); } : null);
  live.over();
}

/** Goes on with the answer of the last turn, which was cut: the text is then as if it had never ended there. */
export async function goOn() {
  const turn = chat.turns.get(chat.head);
  if (page.live || !page.props || !turn) return;
  clearTrouble();
  const live = start(answerOf(turn), said(turn));
  keeping(() => $('log').lastElementChild.replaceWith(liveAgain(turn, live.waiting)));
  const messages = turn.messages.slice(0, -1);
  const { failure } = await run(live, [], { parent: turn.parent, messages, continues: turn.id });
  if (failure) report(failure, failure.passes ? goOn : null);
  live.over();
}

/** An answer that is about to be written, after what there is of it. */
function start(answer, { thought, text }) {
  const waiting = make('p', { class: 'waiting', text: 'reading' });
  const live = { controller: new AbortController(), answer, waiting, thought, text, pieces: 0, first: 0, ready: 0 };
  live.done = new Promise((resolve) => { live.over = resolve; });
  page.live = live;
  busy(true);
  return live;
}

/** Asks for an answer, reads it and puts it away; without sessions as the turn that begins with `turn`. */
async function run(live, messages, turn) {
  const before = { ...live };
  let failure = null;
  const stopped = () => live.controller.signal.aborted;
  try {
    if (page.props.sessions && !chat.info) await begin();
    remembered.set('sessionStorage', 'boostr.pending', chat.info && `${chat.info.id}/${chat.head}`);
    await read(live, await request('POST', '/v1/chat/completions', body(messages, turn.continues !== undefined), live.controller.signal));
  } catch (error) {
    if (error.name !== 'AbortError' && !stopped()) failure = error;
  }
  const { timings, finish, text, thought } = live;
  const head = chat.head;
  const isCut = stopped();
  try {
    const isWritten = text !== before.text || thought !== before.thought;
    if (chat.info) {
      const isLeft = isWritten && (isCut || failure);
      take(isLeft || isCut ? await settled(chat.info.id, head) : await getSession(chat.info.id));
      await listSessions();
    } else if (isWritten || finish) {
      const id = Math.max(0, ...chat.turns.keys()) + 1;
      const answer = { role: 'assistant', content: text, ...(thought && { reasoning_content: thought }) };
      chat.turns.set(id, { ...turn, id, messages: [...turn.messages, answer], is_cut: finish !== 'stop' });
      chat.head = id;
    }
  } catch (error) {
    failure ??= error;
  }
  const isKept = chat.head !== head;
  const seconds = secondsOf(live);
  cancelAnimationFrame(live.frame);
  clearTimeout(live.timer);
  live.waiting.remove();
  if (isKept) {
    keepNumbers(chat.head, { timings, finish: isCut ? 'stopped' : finish, seconds });
    live.answer.write({ thought, text, seconds }, { folds: isFollowing() });
    adopt(chat.head, live.answer);
  }
  remembered.set('sessionStorage', 'boostr.pending', null);
  page.live = null;
  busy(false);
  renderChat();
  renderSidebar();
  say(failure ? '' : isCut ? 'Stopped' : `Answered, ${summary(timings, finish)}: ${live.answer.body.textContent.slice(0, 300)}`);
  return { isKept, failure };
}

/** How long an answer was thought about; nothing, if it was not or not all of that was seen. */
function secondsOf(live) {
  return live.thinking ? ((live.spoke ?? performance.now()) - live.thinking) / 1000 : undefined;
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
    const { content, reasoning_content: thought } = choice?.delta ?? {};
    if (thought) {
      if (!live.thought) live.thinking = performance.now();
      live.thought += thought;
    }
    if (content) {
      live.spoke ??= performance.now();
      live.text += content;
    }
    if (thought || content) {
      live.first ||= performance.now();
      live.pieces += 1;
      soon(live);
    }
  }
  if (!live.finish) throw new Failure(0, 'The answer ended too early.');
}

/** Shows what came at the next frame, or later where showing takes long. */
function soon(live) {
  if (live.frame || live.timer) return;
  const wait = live.ready - performance.now();
  if (wait > 16) live.timer = setTimeout(() => { live.timer = null; live.frame = requestAnimationFrame(paint); }, wait - 16);
  else live.frame = requestAnimationFrame(paint);
}

/** What came since the last time, and the gauges. */
function paint() {
  const { live } = page;
  if (!live) return;
  live.frame = null;
  const began = performance.now();
  growing((folds) => {
    live.waiting.remove();
    live.answer.write({ thought: live.thought, text: live.text, seconds: secondsOf(live) }, { isOpen: true, folds });
  });
  const seconds = (began - live.first) / 1000;
  gauges(live.pieces > 3 ? live.pieces / seconds : 0, (live.prompt ?? chat.info?.position ?? 0) + live.pieces, chat.info?.state_bytes || page.props.state_bytes);
  const end = performance.now();
  live.ready = end + (end - began) * (1 / SHARE - 1);
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
