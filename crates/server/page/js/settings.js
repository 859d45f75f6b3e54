// The dialog of settings, and light or dark.

import { closeMenu } from './dialogs.js';
import { $ } from './dom.js';
import { choices, keepChoices, NUMBERS, remembered } from './memory.js';

export function openSettings(focus) {
  closeMenu();
  fill(choices.settings);
  $('s-key').value = choices.key;
  $('settings').showModal();
  $(focus ?? 's-system').focus();
}

function fill(values) {
  $('s-system').value = values.system ?? '';
  for (const name of NUMBERS) $(`s-${name}`).value = values[name] ?? '';
}

function save() {
  const settings = {};
  if ($('s-system').value.trim()) settings.system = $('s-system').value;
  for (const name of NUMBERS) if ($(`s-${name}`).value !== '') settings[name] = $(`s-${name}`).valueAsNumber;
  keepChoices({ settings, key: $('s-key').value.trim() });
  $('settings').close();
}

/** Shows what the server does where a field is empty. */
export function showDefaults(defaults) {
  for (const name of NUMBERS) {
    const value = defaults?.[name];
    if (value !== undefined && value !== null) $(`s-${name}`).placeholder = String(value);
  }
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

/** `onKey` is called when there is another key. */
export function listenToSettings(onKey) {
  theme();
  darkSystem.addEventListener('change', () => theme());
  $('theme').addEventListener('click', switchTheme);
  $('settings-button').addEventListener('click', () => openSettings());
  $('settings-reset').addEventListener('click', () => fill({}));
  $('settings-form').addEventListener('submit', (event) => {
    event.preventDefault();
    const before = choices.key;
    save();
    if (choices.key !== before) onKey();
  });
}
