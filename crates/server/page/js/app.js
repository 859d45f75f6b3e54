// The page of boostr's server: a chat over its HTTP interface, with sessions as a tree. Here it starts, and here is what
// its buttons and keys do.
//
//     dom words state memory server     what everything stands on
//     conversation tree composer        what is shown
//     dialogs settings trouble          what lies over it
//     sessions talk actions             what is done

import { askAnew, begin, branch, copy, go, open, refresh, remove, rewind, visit } from './actions.js';
import { listenToComposer } from './composer.js';
import { atEnd, renderModel } from './conversation.js';
import { closeMenu, isMenuOpen, listenToDialogs } from './dialogs.js';
import { $ } from './dom.js';
import { call } from './server.js';
import { listenToSettings } from './settings.js';
import { page } from './state.js';
import { send, stop } from './talk.js';
import { listenToTree } from './tree.js';
import { clearTrouble, report } from './trouble.js';

/** What a button with `data-action` does, to its `data-turn` or `data-session`. */
const ACTIONS = {
  open: (_, session) => go(session),
  branch, copy, edit: askAnew, rewind, visit,
};

let again; // of a server that is still loading
async function boot() {
  clearTimeout(again);
  clearTrouble();
  try {
    page.props = await call('GET', '/props');
  } catch (error) {
    report(error, boot);
    if (error.status === 503) again = setTimeout(boot, 2000);
    return;
  }
  renderModel();
  await open();
}

for (const place of ['log', 'sessions']) {
  $(place).addEventListener('click', (event) => {
    const { action, turn, session } = event.target.closest('[data-action]')?.dataset ?? {};
    ACTIONS[action]?.(Number(turn), session);
  });
}
$('stop').addEventListener('click', stop);
$('new').addEventListener('click', () => { clearTrouble(); begin(); });
$('delete').addEventListener('click', remove);
$('dismiss').addEventListener('click', () => { clearTrouble(); $('input').focus(); });
document.addEventListener('keydown', (event) => {
  if (event.key !== 'Escape' || event.isComposing || document.querySelector('dialog[open]')) return;
  if (isMenuOpen()) closeMenu();
  else stop();
});
document.addEventListener('visibilitychange', () => {
  if (!document.hidden && !page.live && page.props?.sessions) refresh(atEnd()).catch(() => {}); // another tab may have changed it
});
window.addEventListener('hashchange', () => { clearTrouble(); open(); });

listenToComposer(send);
listenToDialogs();
listenToTree();
listenToSettings(boot);
boot();
