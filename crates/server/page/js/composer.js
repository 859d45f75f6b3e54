// Where a message is written.

import { $ } from './dom.js';

export function setInput(text) {
  $('input').value = text;
  fit();
}

function fit() {
  if (CSS.supports('field-sizing', 'content')) return;
  $('input').style.height = 'auto';
  $('input').style.height = `${$('input').scrollHeight}px`;
}

/** `onText` is called with what is to be sent. */
export function listenToComposer(onText) {
  $('composer').addEventListener('submit', (event) => {
    event.preventDefault();
    const text = $('input').value;
    if (text.trim()) onText(text);
  });
  $('input').addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $('composer').requestSubmit();
    }
  });
  $('input').addEventListener('input', fit);
  $('name').addEventListener('keydown', (event) => {
    if (event.key === 'Enter') $('input').focus();
  });
  $('skip').addEventListener('click', (event) => { event.preventDefault(); $('input').focus(); });
}
