// What the page knows: the server's properties, its sessions, and one conversation.
//
// A conversation is a tree of turns and a head, of which the path from the root to the head is shown. With sessions the
// server keeps the tree and this page asks for it after each change; without, the page keeps it itself.

export const page = {
  props: null, // of GET /props
  sessions: [], // of GET /v1/sessions
  live: null, // the answer that is being written, of `talk.js`
};

/** The open conversation; `info` is its session: null when there is none yet, or no sessions at all. */
export const chat = { info: null, turns: new Map(), head: 0 };

const numbers = new Map(); // "session/turn" -> { timings, finish }, for the turns of this visit
const turnKey = (turn) => `${chat.info?.id ?? ''}/${turn}`;

/** The numbers of a turn, if it was answered in this visit. */
export const numbersOf = (turn) => numbers.get(turnKey(turn));
export const keepNumbers = (turn, of) => numbers.set(turnKey(turn), of);

/** The turns from the first to the head. */
export function path() {
  const turns = [];
  for (let turn = chat.turns.get(chat.head); turn; turn = chat.turns.get(turn.parent)) turns.unshift(turn);
  return turns;
}

/** Makes a session, or none, the open conversation. */
export function take(session) {
  chat.info = session;
  chat.turns = new Map((session?.tree ?? []).map((turn) => [turn.id, turn]));
  chat.head = session?.head ?? 0;
}
