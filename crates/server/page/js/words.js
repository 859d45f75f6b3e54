// Numbers, times and messages in words.

export function bytes(count) {
  if (!(count > 0)) return '–';
  const power = Math.min(Math.floor(Math.log10(count) / 3), 3);
  const value = count / 1000 ** power;
  return `${value.toFixed(value < 10 && power > 0 ? 1 : 0)} ${['B', 'kB', 'MB', 'GB'][power]}`;
}

export const count = (value) => Math.round(value).toLocaleString('en');
export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? '' : 's'}`;
export const rate = (value) => (value > 0 && Number.isFinite(value) ? `${value < 10 ? value.toFixed(1) : count(value)} tok/s` : '–');

export function ago(seconds) {
  const format = new Intl.RelativeTimeFormat('en', { numeric: 'auto', style: 'narrow' });
  const passed = Date.now() / 1000 - seconds;
  for (const [unit, size] of [['day', 86400], ['hour', 3600], ['minute', 60]]) {
    if (passed >= size) return format.format(-Math.floor(passed / size), unit);
  }
  return 'just now';
}

/** The text of a message. */
export function textOf(message) {
  if (typeof message.content === 'string') return message.content;
  if (Array.isArray(message.content)) return message.content.map((part) => part.text ?? '').join('');
  return message.tool_calls ? JSON.stringify(message.tool_calls, null, 2) : '';
}

/** The text of a turn's question. */
export const asked = (turn) => turn.messages.filter((message) => message.role === 'user').map(textOf).join('\n');

/** A turn's answer and the thought before it, which a server may have left in the text. */
export function said(turn) {
  const messages = turn.messages.filter((message) => message.role === 'assistant');
  const thought = messages.map((message) => message.reasoning_content ?? '').join('\n');
  const text = messages.map(textOf).join('\n');
  const [whole, inText] = thought ? [] : /^\s*<think>([^]*?)(?:<\/think>\s*|$)/.exec(text) ?? [];
  return whole === undefined ? { thought, text } : { thought: inText.trim(), text: text.slice(whole.length) };
}

/** What a session begins with; a branch begins as its parent does, so it goes by its id. */
export const nameOf = (session) => (session.parent ? '' : session.title) || session.id;

/** An answer in numbers. */
export function summary(timings, finish) {
  const parts = [];
  if (timings) {
    parts.push(`${plural(timings.predicted_n ?? 0, 'token')}, ${rate(timings.predicted_per_second)}`);
    if (timings.cache_n !== undefined) {
      parts.push(`${count(timings.cache_n)} reused from the state, ${count(timings.prompt_n ?? 0)} read`);
    }
  }
  if (finish === 'length') parts.push('cut at the limit');
  if (finish === 'cut') parts.push('cut short');
  if (finish === 'stopped') parts.push('stopped');
  return parts.join(' · ');
}
