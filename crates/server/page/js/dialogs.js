// What lies over the page: questions, and on a narrow window the menu.

import { $ } from './dom.js';

/** A question in a dialog: the name that was given, true without a field, or null. */
export function ask({ title, text, field, ok, danger = false }) {
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

export const isMenuOpen = () => document.body.classList.contains('menu-open');

export function openMenu() {
  document.body.classList.add('menu-open');
  $('menu').setAttribute('aria-expanded', 'true');
  $('close-menu').focus();
}

export function closeMenu() {
  if (!isMenuOpen()) return;
  document.body.classList.remove('menu-open');
  $('menu').setAttribute('aria-expanded', 'false');
  $('menu').focus();
}

export function listenToDialogs() {
  $('menu').addEventListener('click', openMenu);
  $('close-menu').addEventListener('click', closeMenu);
  $('backdrop').addEventListener('click', closeMenu);
  $('ask-form').addEventListener('submit', (event) => { event.preventDefault(); $('ask').close('ok'); });
  $('ask-cancel').addEventListener('click', () => $('ask').close());
}
