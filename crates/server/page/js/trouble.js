// What went wrong, plainly, with a button that may help.

import { $ } from './dom.js';
import { choices } from './memory.js';
import { openSettings } from './settings.js';
import { plural } from './words.js';

/** Shows what went wrong; `again` is what the button does. */
export function report(error, again) {
  const soon = error.wait ? `in ${plural(error.wait, 'second')}` : 'soon';
  let text = error.message;
  let label = again ? 'Try again' : null;
  if (error.status === 401) {
    text = choices.key ? 'The server does not accept this API key.' : 'This server wants an API key.';
    label = 'Enter the key';
    again = () => openSettings('s-key');
  } else if (error.status === 429) text = `The server has too much to do. Try again ${soon}.`;
  else if (error.status === 503) text = `The server is not ready (${error.message}). Try again ${soon}.`;
  else if (error.status) text = `The server says: ${error.message}`;
  $('error-text').textContent = text;
  $('error').hidden = false;
  $('retry').hidden = !label;
  $('retry').textContent = label ?? '';
  $('retry').onclick = () => { clearTrouble(); again(); };
}

export function clearTrouble() { $('error').hidden = true; $('error-text').textContent = ''; }

/** Runs what a button asks for, and reports what it throws. */
export async function attempt(act) {
  clearTrouble();
  try {
    return await act();
  } catch (error) {
    report(error, error.passes ? () => attempt(act) : null);
    return undefined;
  }
}
