// The page of boostr's server: a chat over its HTTP interface, with sessions as a tree.
//
// One conversation is open at a time: a tree of turns and a head, of which the path from the root to the head is
// shown. With sessions the server keeps the tree and this page asks for it after each change; without, the page
// keeps it itself and sends the whole path each time. Text of a model or a user only ever becomes text nodes.

'use strict';

const $ = (id) => document.getElementById(id);

/** An element with properties (`class`, `text`, attributes, `on...` listeners) and children. */
function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === 'text') node.textContent = value;
    else if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.filter(Boolean));
  return node;
}

function icon(name) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  const use = document.createElementNS('http://www.w3.org/2000/svg', 'use');
  use.setAttribute('href', `#i-${name}`);
  svg.setAttribute('aria-hidden', 'true');
  svg.append(use);
  return svg;
}

// What is remembered. A browser may forbid its storage; then nothing is.

const remembered = {
  get(storage, key) {
    try { return window[storage].getItem(key); } catch { return null; }
  },
  set(storage, key, value) {
    try {
      if (value === null) window[storage].removeItem(key);
      else window[storage].setItem(key, value);
    } catch { /* the setting holds until the page is left */ }
  },
};

const NUMBERS = ['temperature', 'top_p', 'top_k', 'max_tokens', 'seed'];
let settings = {};
try { settings = JSON.parse(remembered.get('localStorage', 'boostr.settings')) || {}; } catch { /* damaged: start anew */ }
let key = remembered.get('sessionStorage', 'boostr.key') || '';

// The server

class Failure extends Error {
  constructor(status, message, wait) {
    super(message);
    this.status = status; // 0: no answer at all
    this.wait = wait; // seconds, from Retry-After
  }
  get passes() { return [0, 429, 503].includes(this.status); }
}

async function request(method, path, body, signal) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers['Content-Type'] = 'application/json';
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Failure(0, 'The server does not answer.');
  }
  if (response.ok) return response;
  const failure = await response.json().catch(() => null);
  const message = failure?.error?.message || response.statusText || `status ${response.status}`;
  throw new Failure(response.status, message, Number(response.headers.get('Retry-After')) || undefined);
}

async function call(method, path, body) {
  return (await request(method, path, body)).json();
}

const sessionPath = (id, verb = '') => `/v1/sessions/${encodeURIComponent(id)}${verb}`;

/** The lines of a stream of server-sent events: `{ data }` or `{ comment }`. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split('\n');
      rest = lines.pop();
      for (const line of lines.map((line) => line.replace(/\r$/, ''))) {
        if (line.startsWith('data:')) yield { data: line.slice(5).trimStart() };
        else if (line.startsWith(':')) yield { comment: line.slice(1).trim() };
      }
    }
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Failure(0, 'The connection broke in the middle of the answer.');
  } finally {
    reader.cancel().catch(() => {});
  }
}

// What is shown

let props = null; // of GET /props
let sessions = []; // of GET /v1/sessions
const chat = { info: null, turns: new Map(), head: 0 }; // `info`: the open session; null: none yet, or no sessions at all
let live = null; // the answer that is being written
const numbers = new Map(); // "session/turn" -> timings, for the turns of this visit

const turnKey = (turn) => `${chat.info?.id ?? ''}/${turn}`;

/** The turns from the first to the head. */
function path() {
  const turns = [];
  for (let turn = chat.turns.get(chat.head); turn; turn = chat.turns.get(turn.parent)) turns.unshift(turn);
  return turns;
}

function show(session) {
  chat.info = session;
  chat.turns = new Map((session?.tree ?? []).map((turn) => [turn.id, turn]));
  chat.head = session?.head ?? 0;
}

function say(text) { $('status').textContent = text; }

function bytes(count) {
  if (!(count > 0)) return '–';
  const power = Math.min(Math.floor(Math.log10(count) / 3), 3);
  const value = count / 1000 ** power;
  return `${value.toFixed(value < 10 && power > 0 ? 1 : 0)} ${['B', 'kB', 'MB', 'GB'][power]}`;
}

const count = (value) => Math.round(value).toLocaleString('en');
const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? '' : 's'}`;
const rate = (value) => (value > 0 && Number.isFinite(value) ? `${value < 10 ? value.toFixed(1) : count(value)} tok/s` : '–');

function ago(seconds) {
  const format = new Intl.RelativeTimeFormat('en', { numeric: 'auto', style: 'narrow' });
  const passed = Date.now() / 1000 - seconds;
  for (const [unit, size] of [['day', 86400], ['hour', 3600], ['minute', 60]]) {
    if (passed >= size) return format.format(-Math.floor(passed / size), unit);
  }
  return 'just now';
}

function textOf(message) {
  if (typeof message.content === 'string') return message.content;
  if (Array.isArray(message.content)) return message.content.map((part) => part.text ?? '').join('');
  return message.tool_calls ? JSON.stringify(message.tool_calls, null, 2) : '';
}

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

function tool(name, label, act) {
  return make('button', { class: 'icon', title: label, 'aria-label': label, onclick: act }, icon(name));
}

function summary(timings, finish) {
  const parts = [];
  if (timings) {
    parts.push(`${plural(timings.predicted_n ?? 0, 'token')}, ${rate(timings.predicted_per_second)}`);
    if (timings.cache_n !== undefined) {
      parts.push(`${count(timings.cache_n)} reused from the state, ${count(timings.prompt_n ?? 0)} read`);
    }
  }
  if (finish === 'length') parts.push('cut at the limit');
  if (finish === 'stopped') parts.push('stopped');
  return parts.join(' · ');
}

function turnNode(turn) {
  const known = numbers.get(turnKey(turn.id));
  const said = turn.messages.filter((message) => message.role !== 'assistant');
  const answered = turn.messages.filter((message) => message.role === 'assistant').map(textOf).join('\n');
  const label = `turn ${turn.id}`;
  return make('article', { class: 'turn', id: `turn-${turn.id}`, tabindex: -1, 'aria-label': label },
    ...said.map((message) => make('div', { class: message.role === 'user' ? 'user' : 'aside', text: textOf(message) })),
    make('div', { class: 'answer' }, ...prose(answered)),
    make('div', { class: 'meta' },
      make('span', { class: 'numbers', text: summary(known?.timings, known?.finish) }),
      make('span', { class: 'tools' },
        navigator.clipboard && tool('copy', `Copy the answer of ${label}`, () => copy(answered)),
        tool('edit', `Ask ${label} anew`, () => askAnew(turn)),
        turn.id !== chat.head && tool('rewind', `Rewind to ${label}`, () => rewind(turn.id)),
        props?.sessions && tool('branch', `Branch from ${label}`, () => branch(turn.id)))));
}

function renderChat(follow = true) {
  const turns = path();
  $('log').replaceChildren(...turns.map(turnNode));
  $('empty').hidden = turns.length > 0 || live !== null;
  $('name-field').hidden = !props?.sessions || chat.info !== null;
  const title = chat.info ? nameOf(chat.info) : turns.length ? textOf(turns[0].messages[0]) : 'New session';
  $('title').textContent = title;
  $('title').title = chat.info?.id ?? '';
  document.title = chat.info ? `${title} · boostr` : 'boostr';
  $('delete').hidden = chat.info === null;
  const last = numbers.get(turnKey(chat.head))?.timings;
  gauges(last?.predicted_per_second, chat.info?.position ?? last?.position ?? 0, chat.info?.state_bytes || last?.state_bytes || props?.state_bytes);
  if (follow) scrollDown();
}

function gauges(speed, position, state) {
  $('speed').textContent = rate(speed);
  $('position').textContent = count(position);
  $('state').textContent = bytes(state);
}

function scrollDown() { $('scroll').scrollTop = $('scroll').scrollHeight; }

/** Whether the end of the conversation is in view: who has scrolled up is left there. */
function atEnd() {
  const { scrollTop, scrollHeight, clientHeight } = $('scroll');
  return scrollHeight - scrollTop - clientHeight < 80;
}

/** What it begins with; a branch begins as its parent does, so it goes by its id. */
const nameOf = (session) => (session.parent ? '' : session.title) || session.id;

/** The turns of the open conversation: a chain stays at one depth, a fork opens another. */
function turnTree() {
  const children = new Map();
  for (const turn of [...chat.turns.values()].sort((a, b) => a.id - b.id)) {
    children.set(turn.parent, [...(children.get(turn.parent) ?? []), turn]);
  }
  const shown = new Set(path().map((turn) => turn.id));
  const chain = (list, turn) => {
    for (let next = [turn]; next.length === 1;) {
      const [here] = next;
      const first = here.messages.find((message) => message.role === 'user') ?? here.messages[0];
      const item = make('li', {}, make('button', {
        class: shown.has(here.id) ? 'turn-link' : 'turn-link other',
        'aria-current': here.id === chat.head ? 'step' : undefined,
        title: shown.has(here.id) ? `Turn ${here.id}` : `Go to turn ${here.id}`,
        onclick: () => (shown.has(here.id) ? visit(here.id) : rewind(here.id)),
        text: (first ? textOf(first) : '').slice(0, 80) || `turn ${here.id}`,
      }));
      list.append(item);
      next = children.get(here.id) ?? [];
      if (next.length > 1) item.append(...next.map((turn) => chain(make('ul'), turn)));
    }
    return list;
  };
  const roots = children.get(0) ?? [];
  if (roots.length === 1) return chain(make('ul', { class: 'turns', 'aria-label': 'Turns' }), roots[0]);
  return make('ul', { class: 'turns', 'aria-label': 'Turns' }, ...roots.map((turn) => make('li', {}, chain(make('ul'), turn))));
}

function renderSidebar() {
  const focused = document.activeElement?.dataset?.session;
  const known = new Map(sessions.map((session) => [session.id, session]));
  const children = new Map();
  for (const session of [...sessions].sort((a, b) => b.updated - a.updated || (a.id < b.id ? -1 : 1))) {
    const parent = known.has(session.parent?.session) ? session.parent.session : null;
    children.set(parent, [...(children.get(parent) ?? []), session]);
  }
  const list = (parent, seen) => make('ul', { class: parent === null ? 'sessions' : undefined },
    ...(children.get(parent) ?? []).filter((session) => !seen.has(session.id)).map((session) => {
      const open = session.id === chat.info?.id;
      return make('li', {},
        make('button', {
          class: 'session', 'data-session': session.id, 'aria-current': open ? 'page' : undefined,
          title: session.parent ? `From ${session.parent.session}, turn ${session.parent.turn}` : undefined,
          onclick: () => go(session.id),
        },
          make('span', { class: 'name', text: nameOf(session) }),
          make('small', { text: [session.parent ? `from turn ${session.parent.turn}` : session.title && session.id, plural(session.turns, 'turn'), ago(session.updated)].filter(Boolean).join(' · ') })),
        open && chat.turns.size > 0 && turnTree(),
        children.has(session.id) && list(session.id, new Set([...seen, session.id])));
    }));
  const nodes = [];
  if (!props.sessions) {
    nodes.push(make('p', { class: 'small', text: 'This server keeps no sessions: a conversation lasts as long as this page.' }));
    if (chat.turns.size) nodes.push(turnTree());
  } else if (!sessions.length) nodes.push(make('p', { class: 'small', text: 'Sessions are kept here, each with its state: a turn only costs what is new in it.' }));
  else nodes.push(list(null, new Set()));
  $('sessions').replaceChildren(...nodes);
  if (focused) $('sessions').querySelector(`[data-session="${CSS.escape(focused)}"]`)?.focus();
  $('sessions').querySelector('[aria-current=step]')?.scrollIntoView({ block: 'nearest' });
}

function render(follow) {
  renderChat(follow);
  renderSidebar();
}

function renderModel() {
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
  for (const name of NUMBERS) {
    const value = props.defaults?.[name];
    if (value !== undefined && value !== null) $(`s-${name}`).placeholder = String(value);
  }
}

// Errors, plainly

/** Shows what went wrong; `again` is what the button does. */
function report(error, again) {
  let text = error.message;
  let label = again ? 'Try again' : null;
  if (error.status === 401) {
    text = key ? 'The server does not accept this API key.' : 'This server wants an API key.';
    label = 'Enter the key';
    again = () => openSettings('s-key');
  } else if (error.status === 429) text = `The server has too much to do. Try again ${error.wait ? `in ${plural(error.wait, 'second')}` : 'soon'}.`;
  else if (error.status === 503) text = `The server is not ready (${error.message}). Try again ${error.wait ? `in ${plural(error.wait, 'second')}` : 'soon'}.`;
  else if (error.status === 0) text = error.message;
  else if (error.status) text = `The server says: ${error.message}`;
  $('error-text').textContent = text;
  $('error').hidden = false;
  $('retry').hidden = !label;
  $('retry').textContent = label ?? '';
  $('retry').onclick = () => { clearError(); again(); };
}

function clearError() { $('error').hidden = true; $('error-text').textContent = ''; }

/** Runs what a button asks for, and reports what it throws. */
async function attempt(act) {
  clearError();
  try {
    return await act();
  } catch (error) {
    report(error, error.passes ? () => attempt(act) : null);
    return undefined;
  }
}

// Sessions

const openId = () => {
  try { return decodeURIComponent(location.hash.slice(1)); } catch { return ''; }
};

/** Opens a session by its id, or a new one; the address keeps which. */
function go(id) {
  closeMenu();
  if (openId() === (id ?? '')) return open();
  location.hash = id ? encodeURIComponent(id) : '';
  return undefined; // `hashchange` opens it
}

async function listSessions() {
  if (props?.sessions) sessions = (await call('GET', '/v1/sessions')).data;
}

let opening = 0;
async function open() {
  await stop();
  const turn = ++opening;
  const id = openId();
  try {
    await listSessions();
    const pending = remembered.get('sessionStorage', 'boostr.pending')?.split('/') ?? [];
    remembered.set('sessionStorage', 'boostr.pending', null);
    const session = !id || !props.sessions ? null
      : pending[0] === id ? await settled(id, Number(pending[1])) : await call('GET', sessionPath(id));
    if (turn !== opening) return;
    if (session === null || session.id !== chat.info?.id) $('name').value = '';
    if (props.sessions) show(session); // without, the conversation is only here
    render();
    if (matchMedia('(pointer: fine)').matches) $('input').focus();
  } catch (error) {
    if (turn !== opening) return;
    show(null);
    render();
    if (error.status === 404) error.message = `there is no session “${id}”`;
    report(error, error.passes ? open : null);
  }
}

/** Asks again for the open session and the list. */
async function refresh(follow) {
  await listSessions();
  if (chat.info) show(await call('GET', sessionPath(chat.info.id)));
  render(follow);
}

/** The session once a turn that was cut off is in it: its head is no longer `head`, or nothing came for two seconds. */
async function settled(id, head) {
  for (let wait = 50; ; wait *= 2) {
    const session = await call('GET', sessionPath(id));
    if (session.head !== head || wait > 1000) return session;
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

async function branch(turn) {
  await stop();
  const taken = new Set(sessions.map((session) => session.id));
  const base = chat.info.id.slice(0, 58);
  let suffix = 2;
  while (taken.has(`${base}-${suffix}`)) suffix += 1;
  const name = await ask({
    title: `Branch from turn ${turn}`,
    text: 'A new session that knows everything up to here. This one stays as it is.',
    field: `${base}-${suffix}`,
    ok: 'Branch',
  });
  if (!name) return;
  await attempt(async () => {
    const made = await call('POST', sessionPath(chat.info.id, '/branch'), { id: name, turn });
    say(`Branched to ${made.id}`);
    go(made.id);
  });
}

async function rewind(turn) {
  await stop();
  await attempt(async () => {
    if (chat.info) {
      await call('POST', sessionPath(chat.info.id, '/rewind'), { turn });
      await refresh();
    } else {
      chat.head = turn;
      render();
    }
    closeMenu();
    say(turn ? `Went to turn ${turn}` : 'Went to the start');
    $('input').focus();
  });
}

/** Goes back to before a turn, with its question in the composer. The turn stays in the tree. */
async function askAnew(turn) {
  const question = turn.messages.filter((message) => message.role === 'user').map(textOf).join('\n');
  await rewind(turn.parent);
  setInput(question);
}

async function remove() {
  const { id, turns } = chat.info;
  const sure = await ask({
    title: 'Delete this session?',
    text: `“${id}” with its ${plural(turns, 'turn')} and its state. Branches from it stay. This cannot be undone.`,
    ok: 'Delete',
    danger: true,
  });
  if (!sure) return;
  await stop();
  await attempt(async () => {
    await call('DELETE', sessionPath(id));
    say(`Deleted ${id}`);
    go(null);
  });
}

function visit(turn) {
  closeMenu();
  const node = $(`turn-${turn}`);
  node.scrollIntoView({ block: 'start' });
  node.focus({ preventScroll: true });
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    say('Copied');
  } catch {
    report(new Error('The browser does not let this page copy.'));
  }
}

// A turn

function body(text) {
  const request = { model: props.model, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if (typeof settings[name] === 'number') request[name] = settings[name];
  const user = { role: 'user', content: text };
  if (chat.info) return { ...request, session: chat.info.id, messages: [user] };
  const system = settings.system ? [{ role: 'system', content: settings.system }] : [];
  return { ...request, messages: [...system, ...path().flatMap((turn) => turn.messages), user] };
}

/** Makes the session that the first message goes to. */
async function begin() {
  const name = $('name').value.trim();
  const session = await call('POST', '/v1/sessions', { ...(name && { id: name }), ...(settings.system && { system: settings.system }) });
  show({ ...session, tree: [] });
  history.pushState(null, '', `#${encodeURIComponent(session.id)}`); // no `hashchange`: it is open already
}

async function send(text) {
  if (live || !props) return;
  clearError();
  if (props.sessions && !chat.info && !$('name').reportValidity()) return;
  const answer = document.createTextNode('');
  const waiting = make('span', { class: 'waiting', text: 'reading' });
  const node = make('article', { class: 'turn live', 'aria-busy': 'true' },
    make('div', { class: 'user', text }), make('div', { class: 'answer' }, make('p', {}, answer, waiting)));
  let over;
  live = {
    controller: new AbortController(), answer, waiting, node, text: '', pieces: 0, first: 0,
    done: new Promise((resolve) => { over = resolve; }),
  };
  setInput('');
  busy(true);
  $('empty').hidden = true;
  $('log').append(node);
  scrollDown();
  let failure = null;
  const stopped = () => live.controller.signal.aborted;
  try {
    if (props.sessions && !chat.info) await begin();
    remembered.set('sessionStorage', 'boostr.pending', chat.info && `${chat.info.id}/${chat.head}`);
    await read(await request('POST', '/v1/chat/completions', body(text), live.controller.signal));
  } catch (error) {
    if (error.name !== 'AbortError' && !stopped()) failure = error;
  }
  const { timings, finish, text: written } = live;
  const before = chat.head;
  const cut = stopped();
  try {
    if (chat.info) {
      const left = written && (cut || failure);
      show(left || cut ? await settled(chat.info.id, before) : await call('GET', sessionPath(chat.info.id)));
      await listSessions();
    } else if (written || live.finish) {
      const id = Math.max(0, ...chat.turns.keys()) + 1;
      chat.turns.set(id, { id, parent: before, messages: [{ role: 'user', content: text }, { role: 'assistant', content: written }] });
      chat.head = id;
    }
  } catch (error) {
    failure ??= error;
  }
  const kept = chat.head !== before;
  if (kept) numbers.set(turnKey(chat.head), { timings, finish: cut ? 'stopped' : finish });
  remembered.set('sessionStorage', 'boostr.pending', null);
  live = null;
  busy(false);
  render(atEnd());
  if (!kept && !$('input').value) setInput(text);
  if (failure) report(failure, failure.passes && !kept ? () => { setInput(''); send(text); } : null);
  say(failure ? '' : cut ? 'Stopped' : `Answered: ${summary(timings, finish)}`);
  over();
}

/** Reads an answer as it comes. Throws what the server reports in the middle of it. */
async function read(response) {
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
    if (chunk.error) throw new Failure(chunk.error.code === 503 ? 503 : 500, chunk.error.message);
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
  if (!live) return;
  live.frame = null;
  const follow = atEnd();
  live.waiting.remove();
  live.answer.appendData(live.text.slice(live.answer.length));
  const seconds = (performance.now() - live.first) / 1000;
  gauges(live.pieces > 3 ? live.pieces / seconds : 0, (live.prompt ?? chat.info?.position ?? 0) + live.pieces, chat.info?.state_bytes || props.state_bytes);
  if (follow) scrollDown();
}

/** Stops the answer that is being written, if any, and waits until it is put away. */
async function stop() {
  if (!live) return;
  live.controller.abort();
  await live.done;
}

function busy(yes) {
  const focused = [$('send'), $('stop')].includes(document.activeElement);
  $('send').hidden = yes;
  $('stop').hidden = !yes;
  if (focused) $('input').focus();
  if (yes) say('Answering');
}

// The composer, the menu, dialogs

function setInput(text) {
  $('input').value = text;
  fit();
}

function fit() {
  if (CSS.supports('field-sizing', 'content')) return;
  $('input').style.height = 'auto';
  $('input').style.height = `${$('input').scrollHeight}px`;
}

function openMenu() {
  document.body.classList.add('menu-open');
  $('menu').setAttribute('aria-expanded', 'true');
  $('close-menu').focus();
}

function closeMenu() {
  if (!document.body.classList.contains('menu-open')) return;
  document.body.classList.remove('menu-open');
  $('menu').setAttribute('aria-expanded', 'false');
  $('menu').focus();
}

/** A question in a dialog: the name that was given, true without a field, or null. */
function ask({ title, text, field, ok, danger = false }) {
  $('ask-title').textContent = title;
  $('ask-text').textContent = text;
  $('ask-field').hidden = field === undefined;
  $('ask-input').disabled = field === undefined;
  $('ask-input').value = field ?? '';
  $('ask-ok').textContent = ok;
  $('ask-ok').classList.toggle('danger', danger);
  $('ask').returnValue = '';
  $('ask').showModal();
  if (field === undefined) $('ask-cancel').focus();
  else $('ask-input').select();
  return new Promise((resolve) => {
    $('ask').onclose = () => resolve($('ask').returnValue !== 'ok' ? null : field === undefined ? true : $('ask-input').value);
  });
}

function openSettings(focus) {
  closeMenu();
  fillSettings(settings);
  $('s-key').value = key;
  $('settings').showModal();
  $(focus ?? 's-system').focus();
}

function fillSettings(values) {
  $('s-system').value = values.system ?? '';
  for (const name of NUMBERS) $(`s-${name}`).value = values[name] ?? '';
}

async function saveSettings() {
  settings = {};
  if ($('s-system').value.trim()) settings.system = $('s-system').value;
  for (const name of NUMBERS) if ($(`s-${name}`).value !== '') settings[name] = $(`s-${name}`).valueAsNumber;
  remembered.set('localStorage', 'boostr.settings', JSON.stringify(settings));
  const before = key;
  key = $('s-key').value.trim();
  remembered.set('sessionStorage', 'boostr.key', key || null);
  $('settings').close();
  if (key !== before) await boot();
}

const darkSystem = matchMedia('(prefers-color-scheme: dark)');
function theme(choice = remembered.get('localStorage', 'boostr.theme')) {
  if (choice) document.documentElement.dataset.theme = choice;
  else delete document.documentElement.dataset.theme;
  $('theme').setAttribute('aria-pressed', String(choice ? choice === 'dark' : darkSystem.matches));
}

function switchTheme() {
  const dark = $('theme').getAttribute('aria-pressed') !== 'true';
  const choice = dark === darkSystem.matches ? null : dark ? 'dark' : 'light'; // as the system: follow it from now on
  remembered.set('localStorage', 'boostr.theme', choice);
  theme(choice);
}

// Start

let again; // of a server that is still loading
async function boot() {
  clearTimeout(again);
  clearError();
  try {
    props = await call('GET', '/props');
  } catch (error) {
    report(error, boot);
    if (error.status === 503) again = setTimeout(boot, 2000);
    return;
  }
  renderModel();
  await open();
}

$('composer').addEventListener('submit', (event) => {
  event.preventDefault();
  const text = $('input').value;
  if (text.trim()) send(text);
});
$('input').addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $('composer').requestSubmit();
  }
});
$('input').addEventListener('input', fit);
$('name').addEventListener('keydown', (event) => {
  if (event.key === 'Enter') $('input').focus();
});
$('stop').addEventListener('click', stop);
$('new').addEventListener('click', async () => {
  await stop();
  clearError();
  if (!props?.sessions) show(null);
  await go(null);
  $('input').focus();
});
$('delete').addEventListener('click', remove);
$('menu').addEventListener('click', openMenu);
$('close-menu').addEventListener('click', closeMenu);
$('backdrop').addEventListener('click', closeMenu);
$('dismiss').addEventListener('click', () => { clearError(); $('input').focus(); });
$('skip').addEventListener('click', (event) => { event.preventDefault(); $('input').focus(); });
$('theme').addEventListener('click', switchTheme);
darkSystem.addEventListener('change', () => theme());
$('settings-button').addEventListener('click', () => openSettings());
$('settings-reset').addEventListener('click', () => fillSettings({}));
$('settings-form').addEventListener('submit', (event) => { event.preventDefault(); saveSettings(); });
$('ask-form').addEventListener('submit', (event) => { event.preventDefault(); $('ask').close('ok'); });
$('ask-cancel').addEventListener('click', () => $('ask').close());
$('sessions').addEventListener('keydown', (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  const buttons = [...$('sessions').querySelectorAll('button')];
  buttons[buttons.indexOf(document.activeElement) + step]?.focus();
  event.preventDefault();
});
document.addEventListener('keydown', (event) => {
  if (event.key !== 'Escape' || event.isComposing || document.querySelector('dialog[open]')) return;
  if (document.body.classList.contains('menu-open')) closeMenu();
  else stop();
});
document.addEventListener('visibilitychange', () => {
  if (!document.hidden && !live && props?.sessions) refresh(atEnd()).catch(() => {}); // another tab may have changed it
});
window.addEventListener('hashchange', () => { clearError(); open(); });

theme();
boot();
