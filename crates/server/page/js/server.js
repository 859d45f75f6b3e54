// Requests to the server, and what goes wrong with them.

import { choices } from './memory.js';

export class Failure extends Error {
  constructor(status, message, wait, code) {
    super(message);
    this.status = status; // 0: no answer at all
    this.code = code;
    this.wait = wait; // seconds, from Retry-After
  }
  /** Whether another try may succeed. */
  get passes() { return [0, 429, 503].includes(this.status); }
}

export async function request(method, path, body, signal) {
  const headers = {};
  if (choices.key) headers.Authorization = `Bearer ${choices.key}`;
  if (body !== undefined) headers['Content-Type'] = 'application/json';
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Failure(0, 'The server does not answer.');
  }
  if (response.ok) return response;
  const failure = await response.json().catch(() => null);
  const message = failure?.error?.message || response.statusText || `status ${response.status}`;
  throw new Failure(response.status, message, Number(response.headers.get('Retry-After')) || undefined, failure?.error?.code);
}

export async function call(method, path, body) {
  return (await request(method, path, body)).json();
}

export const sessionPath = (id, verb = '') => `/v1/sessions/${encodeURIComponent(id)}${verb}`;

/** The lines of a stream of server-sent events: `{ data }` or `{ comment }`. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split('\n');
      rest = lines.pop();
      for (const line of lines.map((line) => line.replace(/\r$/, ''))) {
        if (line.startsWith('data:')) yield { data: line.slice(5).trimStart() };
        else if (line.startsWith(':')) yield { comment: line.slice(1).trim() };
      }
    }
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Failure(0, 'The connection broke in the middle of the answer.');
  } finally {
    reader.cancel().catch(() => {});
  }
}
