// What the server keeps: asking for it, and being asked to wait for it.

import { call, sessionPath } from './server.js';
import { chat, page, take } from './state.js';

/** The answer to `path` with all pages of its list `field`. */
async function whole(path, field) {
  const answer = await call('GET', path);
  for (let part = answer; part.has_more;) {
    part = await call('GET', `${path}?after=${encodeURIComponent(part[field].at(-1).id)}`);
    answer[field].push(...part[field]);
  }
  return answer;
}

/** A session with all its turns. */
export const getSession = (id) => whole(sessionPath(id), 'tree');

/** Asks for the list of sessions. */
export async function listSessions() {
  if (page.props?.sessions) page.sessions = (await whole('/v1/sessions', 'data')).data;
}

/** Asks again for the list and for the open session. */
export async function reload() {
  await listSessions();
  if (chat.info) take(await getSession(chat.info.id));
}

/** The session once a turn that was cut off is in it: its head is no longer `head`, or nothing came for two seconds. */
export async function settled(id, head) {
  for (let wait = 50; ; wait *= 2) {
    const session = await getSession(id);
    if (session.head !== head || wait > 1000) return session;
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}
