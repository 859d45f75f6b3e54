// The page of boostr's server: a chat over its HTTP interface, with sessions as a tree. Here it starts, and here is what
// its buttons and keys do.
//
//     dom words state memory server     what everything stands on
//     markdown prose answer             what was said, as elements
//     scroll                            where the reader is
//     conversation tree composer        what is shown
//     dialogs settings trouble          what lies over it
//     sessions talk actions             what is done

import { askAnew, begin, branch, copy, copyCode, go, open, refresh, remove, rewind, visit } from './actions.js';
import { listenToComposer } from './composer.js';
import { renderModel } from './conversation.js';
import { closeMenu, isMenuOpen, listenToDialogs } from './dialogs.js';
import { $ } from './dom.js';
import { listenToScroll } from './scroll.js';
import { call } from './server.js';
import { listenToSettings } from './settings.js';
import { page } from './state.js';
import { goOn, send, stop } from './talk.js';
import { listenToTree } from './tree.js';
import { clearTrouble, report } from './trouble.js';

/** What a button with `data-action` does, to its `data-turn`, its `data-session` or beside itself. */
const ACTIONS = {
  open: (_, session) => go(session),
  branch, copy, copyCode, edit: askAnew, goOn, rewind, visit,
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
    const button = event.target.closest('[data-action]');
    const { action, turn, session } = button?.dataset ?? {};
    ACTIONS[action]?.(Number(turn), session, button);
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
  if (!document.hidden && !page.live && page.props?.sessions) refresh().catch(() => {}); // another tab may have changed it
});
window.addEventListener('hashchange', () => { clearTrouble(); open(); });

listenToComposer(send);
listenToDialogs();
listenToScroll();
listenToTree();
listenToSettings(boot);
boot();
