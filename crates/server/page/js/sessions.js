// What the server keeps: asking for it, and being asked to wait for it.

import { call, sessionPath } from './server.js';
import { chat, page, take } from './state.js';

/** Asks for the list of sessions. */
export async function listSessions() {
  if (page.props?.sessions) page.sessions = (await call('GET', '/v1/sessions')).data;
}

/** Asks again for the list and for the open session. */
export async function reload() {
  await listSessions();
  if (chat.info) take(await call('GET', sessionPath(chat.info.id)));
}

/** The session once a turn that was cut off is in it: its head is no longer `head`, or nothing came for two seconds. */
export async function settled(id, head) {
  for (let wait = 50; ; wait *= 2) {
    const session = await call('GET', sessionPath(id));
    if (session.head !== head || wait > 1000) return session;
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}
