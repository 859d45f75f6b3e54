// Where in the conversation the reader is. While an answer is written the view follows its end, but only for a reader who
// is there. The place outlives a reload, and a window or a screen that changes its shape.

import { $ } from './dom.js';
import { remembered } from './memory.js';
import { chat } from './state.js';

const NEAR = 8; // pixels from the end that are the end

let follows = true;
let top = 0; // where it was scrolled to
let place = null; // what is there, for a reader who is elsewhere than at the end
let width = 0;

/** Whether the reader is at the end, and wants to see what comes. */
export const isFollowing = () => follows;

const fromEnd = () => $('scroll').scrollHeight - $('scroll').scrollTop - $('scroll').clientHeight;

export function toEnd() {
  follows = true;
  $('scroll').scrollTop = $('scroll').scrollHeight;
  look();
}

/** Changes what is shown, and leaves the reader where they are: at the end, or at the words that they read. */
export function keeping(change) {
  look(); // the browser says it later
  const before = place;
  change();
  if (before) goTo(before);
  else if (follows) toEnd();
  look();
}

/** Writes more at the end; `write` is told whether the reader is there. */
export function growing(write) {
  look();
  write(follows);
  if (follows) toEnd();
  else look();
}

/** What a turn is made of, as far as one can be at it. */
const parts = (turn) => [...turn.querySelectorAll(':scope > .user, :scope > .aside, .answer > *, .thoughts > *, :scope > .meta')].filter((part) => part.getClientRects().length > 0);

/** The words at the upper edge: a turn by its number in the conversation, a part of it, and how much of that is above. */
function here() {
  const edge = $('scroll').getBoundingClientRect().top;
  const isBelow = (node) => node.getBoundingClientRect().bottom > edge + 1;
  const turns = [...$('log').children];
  const turn = turns.findIndex(isBelow);
  if (turn < 0) return null;
  const all = parts(turns[turn]);
  const part = Math.max(0, all.findIndex(isBelow));
  const box = (all[part] ?? turns[turn]).getBoundingClientRect();
  const above = edge - box.top;
  return { turn, part, above: above > 0 ? above / box.height : 0, gap: Math.max(0, -above) };
}

function goTo({ turn, part, above, gap }) {
  const node = $('log').children[turn];
  if (!node) return;
  const box = (parts(node)[part] ?? node).getBoundingClientRect();
  const edge = $('scroll').getBoundingClientRect().top;
  $('scroll').scrollTop += box.top + above * box.height - gap - edge;
  top = $('scroll').scrollTop;
  follows = fromEnd() < NEAR;
}

/** Takes note of where the reader is now. */
function look() {
  const now = $('scroll').scrollTop;
  follows = fromEnd() < NEAR || (follows && now >= top);
  top = now;
  place = follows ? null : here();
  const isAway = fromEnd() > 80;
  if (!isAway && document.activeElement === $('to-end')) $('scroll').focus({ preventScroll: true });
  $('to-end').hidden = !isAway;
}

const KEY = 'boostr.place';

/** After a reload: to where the reader was in this conversation, or to its end. */
export function restorePlace() {
  let kept = null;
  try { kept = JSON.parse(remembered.get('sessionStorage', KEY)); } catch { /* damaged: to the end */ }
  if (chat.info && kept?.session === chat.info.id && kept.place) {
    follows = false;
    goTo(kept.place);
    look();
  } else toEnd();
}

function keepPlace() {
  remembered.set('sessionStorage', KEY, chat.info && JSON.stringify({ session: chat.info.id, place }));
}

/** A keyboard on the screen may lie over the page: then the page is as high as what is left. */
function fitScreen() {
  const { height, scale } = window.visualViewport;
  if (scale > 1.01) return; // a reader who looks closely
  const { style } = document.documentElement;
  if (height < window.innerHeight - 1) style.setProperty('--height', `${Math.round(height)}px`);
  else style.removeProperty('--height');
  window.scrollTo(0, 0);
}

export function listenToScroll() {
  let frame = null;
  let later = null;
  $('scroll').addEventListener('scroll', () => {
    frame ??= requestAnimationFrame(() => { frame = null; look(); });
    clearTimeout(later);
    later = setTimeout(keepPlace, 200);
  }, { passive: true });
  $('to-end').addEventListener('click', toEnd);
  window.addEventListener('pagehide', keepPlace);
  new ResizeObserver(() => {
    const isTurned = $('scroll').clientWidth !== width;
    width = $('scroll').clientWidth;
    if (follows) toEnd();
    else if (isTurned && place) goTo(place);
    look();
  }).observe($('scroll'));
  window.visualViewport?.addEventListener('resize', fitScreen);
}
