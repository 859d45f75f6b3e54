// What the model said in a turn: its thought, which folds away, and its answer.

import { make } from './dom.js';
import { Prose } from './prose.js';
import { plural } from './words.js';

export class Answer {
  constructor() {
    this.body = make('div', { class: 'answer' });
    this.node = make('div', { class: 'said' }, this.body);
    this.prose = new Prose(this.body);
    this.thoughts = null;
    this.written = { thought: '', text: '' };
  }

  /**
   * Shows what was said so far. `isOpen`: more is to come. A thought is open while it is all there is, and folds when the
   * answer begins if it may (`folds`) and nobody has touched it. `seconds`: how long it took, if that is known.
   */
  write({ thought, text, seconds }, { isOpen = false, folds = true } = {}) {
    const isThinking = isOpen && !text;
    if (thought && !this.thoughts) this.begin(!text);
    if (this.thoughts) {
      const { details, label, prose, isTouched } = this.thoughts;
      if (thought !== this.written.thought || !isThinking) prose.write(thought, isThinking);
      const shown = isThinking ? 'Thinking' : seconds >= 1 ? `Thought for ${plural(Math.round(seconds), 'second')}` : 'Thought';
      if (label.textContent !== shown) label.textContent = shown;
      details.classList.toggle('thinking', isThinking);
      if (text && !this.written.text && folds && !isTouched) details.open = false;
    }
    this.prose.write(text, isOpen);
    this.written = { thought, text };
  }

  begin(isBare) {
    const label = make('span', {});
    const inner = make('div', { class: 'thoughts' });
    const summary = make('summary', {}, label);
    const details = make('details', { class: 'thought', open: isBare }, summary, inner);
    this.thoughts = { details, label, prose: new Prose(inner), isTouched: false };
    summary.addEventListener('click', () => { this.thoughts.isTouched = true; });
    this.node.prepend(details);
  }
}
