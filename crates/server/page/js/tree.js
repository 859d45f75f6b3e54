// The side bar: sessions as a tree of branches, and in the open one its turns.

import { $, make } from './dom.js';
import { chat, page, path } from './state.js';
import { ago, nameOf, plural, textOf } from './words.js';

/** The turns of the open conversation: a chain stays at one depth, a fork opens another. */
function turnTree() {
  const children = new Map();
  // Of an answer that went on only the longer one is there, unless the shorter was gone on from otherwise.
  const turns = [...chat.turns.values()].sort((a, b) => a.id - b.id);
  const parents = new Set(turns.map((turn) => turn.parent));
  const longer = new Set(turns.map((turn) => turn.continues));
  for (const turn of turns.filter(({ id }) => !longer.has(id) || parents.has(id) || id === chat.head)) {
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
        'data-action': shown.has(here.id) ? 'visit' : 'rewind',
        'data-turn': here.id,
        dir: 'auto',
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

function sessionButton(session, open) {
  const about = [session.parent ? `from turn ${session.parent.turn}` : session.title && session.id, plural(session.turns, 'turn'), ago(session.updated)];
  return make('button', {
    class: 'session', 'data-session': session.id, 'data-action': 'open', 'aria-current': open ? 'page' : undefined,
    title: session.parent ? `From ${session.parent.session}, turn ${session.parent.turn}` : undefined,
  },
    make('span', { class: 'name', dir: 'auto', text: nameOf(session) }),
    make('small', { text: about.filter(Boolean).join(' · ') }));
}

/** All sessions, the branches of one below it, the one that was used last first. */
function sessionTree() {
  const known = new Set(page.sessions.map((session) => session.id));
  const children = new Map();
  for (const session of [...page.sessions].sort((a, b) => b.updated - a.updated || (a.id < b.id ? -1 : 1))) {
    const parent = known.has(session.parent?.session) ? session.parent.session : null;
    children.set(parent, [...(children.get(parent) ?? []), session]);
  }
  const list = (parent, seen) => make('ul', { class: parent === null ? 'sessions' : undefined },
    ...(children.get(parent) ?? []).filter((session) => !seen.has(session.id)).map((session) => {
      const open = session.id === chat.info?.id;
      return make('li', {},
        sessionButton(session, open),
        open && chat.turns.size > 0 && turnTree(),
        children.has(session.id) && list(session.id, new Set([...seen, session.id])));
    }));
  return list(null, new Set());
}

export function renderSidebar() {
  const focused = document.activeElement?.dataset?.session;
  const nodes = [];
  if (!page.props.sessions) {
    nodes.push(make('p', { class: 'small', text: 'This server keeps no sessions: a conversation lasts as long as this page.' }));
    if (chat.turns.size) nodes.push(turnTree());
  } else if (!page.sessions.length) nodes.push(make('p', { class: 'small', text: 'Sessions are kept here, each with its state: a turn only costs what is new in it.' }));
  else nodes.push(sessionTree());
  $('sessions').replaceChildren(...nodes);
  if (focused) $('sessions').querySelector(`[data-session="${CSS.escape(focused)}"]`)?.focus();
  $('sessions').querySelector('[aria-current=step]')?.scrollIntoView({ block: 'nearest' });
}

/** Up and down go from one to the next. */
export function listenToTree() {
  $('sessions').addEventListener('keydown', (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const buttons = [...$('sessions').querySelectorAll('button')];
    buttons[buttons.indexOf(document.activeElement) + step]?.focus();
    event.preventDefault();
  });
}
