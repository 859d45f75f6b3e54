// What can be done to sessions and turns: open, branch, rewind, ask anew, delete, copy.

import { setInput } from './composer.js';
import { renderChat } from './conversation.js';
import { ask, closeMenu } from './dialogs.js';
import { $, make, say } from './dom.js';
import { remembered } from './memory.js';
import { restorePlace, toEnd } from './scroll.js';
import { call, sessionPath } from './server.js';
import { getSession, listSessions, reload, settled } from './sessions.js';
import { chat, page, take } from './state.js';
import { stop } from './talk.js';
import { renderSidebar } from './tree.js';
import { attempt, report } from './trouble.js';
import { asked, plural, said } from './words.js';

function render() {
  renderChat();
  renderSidebar();
}

const openId = () => {
  try { return decodeURIComponent(location.hash.slice(1)); } catch { return ''; }
};

/** Opens a session by its id, or a new one; the address keeps which. */
export function go(id) {
  closeMenu();
  if (openId() === (id ?? '')) return open();
  location.hash = id ? encodeURIComponent(id) : '';
  return undefined; // `hashchange` opens it
}

let opening = 0;

/** Opens the session that the address names. */
export async function open() {
  await stop();
  const turn = ++opening;
  const id = openId();
  try {
    await listSessions();
    const pending = remembered.get('sessionStorage', 'boostr.pending')?.split('/') ?? [];
    remembered.set('sessionStorage', 'boostr.pending', null);
    const session = !id || !page.props.sessions ? null
      : pending[0] === id ? await settled(id, Number(pending[1])) : await getSession(id);
    if (turn !== opening) return;
    if (session === null || session.id !== chat.info?.id) $('name').value = '';
    if (page.props.sessions) take(session); // without, the conversation is only here
    render();
    restorePlace();
    if (matchMedia('(pointer: fine)').matches) $('input').focus();
  } catch (error) {
    if (turn !== opening) return;
    take(null);
    render();
    if (error.code === 'session_damaged') return void removeNamed(id, 'Delete the damaged session?', error.message);
    if (error.status === 404) error.message = `there is no session “${id}”`;
    report(error, error.passes ? open : null);
  }
}

/** Leaves the open conversation for a new one. */
export async function begin() {
  await stop();
  if (!page.props?.sessions) take(null);
  await go(null);
  $('input').focus();
}

/** Shows what is there now. */
export async function refresh() {
  await reload();
  render();
}

export async function branch(turn) {
  await stop();
  const taken = new Set(page.sessions.map((session) => session.id));
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

export async function rewind(turn) {
  await stop();
  await attempt(async () => {
    if (chat.info) {
      await call('POST', sessionPath(chat.info.id, '/rewind'), { turn });
      await refresh();
    } else {
      chat.head = turn;
      render();
    }
    toEnd();
    closeMenu();
    say(turn ? `Went to turn ${turn}` : 'Went to the start');
    $('input').focus();
  });
}

/** Goes back to before a turn, with its question in the composer. The turn stays in the tree. */
export async function askAnew(turn) {
  const { parent, ...question } = chat.turns.get(turn);
  await rewind(parent);
  setInput(asked(question));
}

export async function remove() {
  const { id, turns } = chat.info;
  await removeNamed(id, 'Delete this session?', `“${id}” with its ${plural(turns, 'turn')} and its state. Branches from it stay. This cannot be undone.`);
}

async function removeNamed(id, title, text) {
  if (!await ask({ title, text, ok: 'Delete', danger: true })) return;
  await stop();
  await attempt(async () => {
    await call('DELETE', sessionPath(id));
    say(`Deleted ${id}`);
    go(null);
  });
}

/** Brings a turn into view. */
export function visit(turn) {
  closeMenu();
  const node = $(`turn-${turn}`);
  node.scrollIntoView({ block: 'start' });
  node.focus({ preventScroll: true });
}

/** Copies the answer of a turn. */
export const copy = (turn) => toClipboard(said(chat.turns.get(turn)).text);

/** Copies the code that a button stands over. */
export async function copyCode(_turn, _session, button) {
  if (!await toClipboard(button.closest('.code').querySelector('code').textContent)) return;
  button.textContent = 'Copied';
  setTimeout(() => { button.textContent = 'Copy'; }, 1500);
}

async function toClipboard(text) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copySelected(text); // not from another machine without TLS
    say('Copied');
    return true;
  } catch {
    report(new Error('The browser does not let this page copy.'));
    return false;
  }
}

function copySelected(text) {
  const focused = document.activeElement;
  const area = make('textarea', { class: 'visually-hidden', readonly: true });
  area.value = text;
  document.body.append(area);
  area.select();
  const isDone = document.execCommand('copy');
  area.remove();
  focused?.focus({ preventScroll: true });
  if (!isDone) throw new Error('refused');
}
