// What is remembered of the user's choices. A browser may forbid its storage; then nothing is.

export const remembered = {
  get(storage, key) {
    try { return window[storage].getItem(key); } catch { return null; }
  },
  set(storage, key, value) {
    try {
      if (value === null) window[storage].removeItem(key);
      else window[storage].setItem(key, value);
    } catch { /* the setting holds until the page is left */ }
  },
};

/** `settings`: `system` and those of `NUMBERS` that are set. `key`: of the API, for this tab alone. */
export const choices = { settings: {}, key: remembered.get('sessionStorage', 'boostr.key') || '' };
try {
  choices.settings = JSON.parse(remembered.get('localStorage', 'boostr.settings')) || {};
} catch { /* damaged: start anew */ }

export const NUMBERS = ['temperature', 'top_p', 'top_k', 'max_tokens', 'seed'];

export function keepChoices({ settings, key }) {
  Object.assign(choices, { settings, key });
  remembered.set('localStorage', 'boostr.settings', JSON.stringify(settings));
  remembered.set('sessionStorage', 'boostr.key', key || null);
}
