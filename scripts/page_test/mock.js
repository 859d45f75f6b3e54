// A server in memory with boostr's HTTP interface and no model, for work on the page and on the clients.
//
//     node mock.js [--port 8123] [--key KEY] [--no-sessions] [--delay MS] [--store FILE] [--model NAME] [--queue N]
//
// A token is a word; an answer depends on the conversation alone, so the same greedy request gets the same answer. A message that
// begins with the line `Say:` is answered with its other lines, four letters a token; `<think>` and `</think>` divide off a thought.
// --delay: between tokens (20). --store: sessions survive a restart in it. --queue: more answers at once are refused (1000).

import { createServer } from 'node:http';
import { existsSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { createHash, randomUUID } from 'node:crypto';
import { parseArgs } from 'node:util';

const { values: options } = parseArgs({ options: {
  port: { type: 'string', default: '8123' }, key: { type: 'string' }, store: { type: 'string' },
  'no-sessions': { type: 'boolean' }, queue: { type: 'string', default: '1000' },
  delay: { type: 'string', default: '20' }, model: { type: 'string', default: 'demo-mamba2' },
} });
const PAGE = new URL('../../crates/server/page/', import.meta.url);
const FILES = { '/': ['index.html', 'text/html'], '/style.css': ['style.css', 'text/css'], '/icon.svg': ['icon.svg', 'image/svg+xml'] };
for (const folder of ['js', 'vendor']) {
  for (const name of readdirSync(new URL(`${folder}/`, PAGE))) FILES[`/${folder}/${name}`] = [`${folder}/${name}`, name.endsWith('.js') ? 'text/javascript' : 'text/plain'];
}
const CSP = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const STATE_BYTES = 694_272;
const WORDS = 'the sea was calm and a small boat went out past the old light house where nobody had lived since the great storm of that winter'.split(' ');
const NAME = /^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$/;

class Refusal extends Error {
  constructor(status, message, { param = null, headers = {} } = {}) {
    super(message);
    Object.assign(this, { status, param, headers });
  }
}

const now = () => Math.floor(Date.now() / 1000);
const tokens = (text) => text.match(/\s*\S+|\s+$/g) ?? [];
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Sessions

const sessions = new Map();
if (options.store && existsSync(options.store)) {
  for (const session of JSON.parse(readFileSync(options.store, 'utf8'))) sessions.set(session.id, session);
}

function keep() {
  if (options.store) writeFileSync(options.store, JSON.stringify([...sessions.values()]));
}

function pathOf(session, turn = session.head) {
  const turns = [];
  for (let id = turn; id; id = turns[0].parent) turns.unshift(session.tree.find((other) => other.id === id));
  return turns;
}

function view(session, tree = false) {
  const turns = pathOf(session);
  const title = turns[0]?.messages.find((message) => message.role === 'user')?.content.slice(0, 80) ?? '';
  return {
    id: session.id, object: 'session', created: session.created, updated: session.updated, model: options.model, title,
    turns: turns.length, head: session.head, position: turns.at(-1)?.position ?? 0,
    state_bytes: turns.length ? STATE_BYTES : 0, parent: session.parent, ...(tree && { tree: session.tree }),
  };
}

function find(id) {
  const session = sessions.get(id);
  if (!session) throw new Refusal(404, `no session \`${id}\``, { param: 'session' });
  return session;
}

function create(id, fields) {
  if (id !== undefined && !NAME.test(id)) throw new Refusal(400, `session name \`${id}\`: expected 1 to 64 of A-Z a-z 0-9 . _ -`, { param: 'id' });
  const name = id ?? `s-${randomUUID().slice(0, 8)}`;
  if (sessions.has(name)) throw new Refusal(409, `session \`${name}\` exists`, { param: 'id' });
  const session = { id: name, created: now(), updated: now(), head: 0, parent: null, tree: [], ...fields };
  sessions.set(name, session);
  keep();
  return session;
}

function commit(session, turn) {
  const id = Math.max(0, ...session.tree.map((other) => other.id)) + 1;
  session.tree.push({ id, parent: session.head, created: now(), ...turn });
  session.head = id;
  session.updated = now();
  keep();
  return id;
}

const SESSION_ROUTES = {
  'GET ': () => [200, { object: 'list', data: [...sessions.values()].map((session) => view(session)) }],
  'POST ': (_, body) => [201, view(create(body.id, { system: body.system }))],
  'GET id': (id) => [200, view(find(id), true)],
  'DELETE id': (id) => { find(id); sessions.delete(id); keep(); return [200, { id, object: 'session.deleted', deleted: true }]; },
  'POST branch': (id, body) => {
    const from = find(id);
    const turn = body.turn ?? from.head;
    const turns = pathOf(from, turn);
    return [201, view(create(body.id, { system: from.system, tree: turns, head: turn, parent: { session: id, turn } }))];
  },
  'POST rewind': (id, body) => {
    const session = find(id);
    const back = pathOf(session).at(-(body.turns ?? 0))?.parent ?? 0;
    const turn = body.turn ?? back;
    if (turn !== 0 && !session.tree.some((other) => other.id === turn)) throw new Refusal(400, `no turn ${turn}`, { param: 'turn' });
    session.head = turn;
    keep();
    return [200, view(session)];
  },
  'POST save': (id) => [200, { ...view(find(id)), file: 'state.safetensors' }],
};

// Answers

function continuation(text, limit, index = 0) {
  const [, script] = /(?:^|\n)Say:\n([^]*)$/.exec(text) ?? [];
  if (script !== undefined) return (script.match(/<think>|<\/think>|[^]{1,4}?(?=<\/?think>)|[^]{1,4}/gu) ?? []).slice(0, limit);
  const start = createHash('sha256').update(text).digest().readUInt32LE() + index;
  const last = text.trim().split('\n').at(-1);
  const opening = tokens(`You wrote: ${last}`).slice(0, 40);
  return Array.from({ length: limit }, (_, i) => opening[i] ?? ` ${WORDS[(start + i) % WORDS.length]}`);
}

/** Pieces of an answer as what each adds: to a thought, to the text, or nothing. */
function divided(pieces) {
  let thinks = false;
  return pieces.map((piece) => {
    if (piece === '<think>' || piece === '</think>') {
      thinks = piece === '<think>';
      return {};
    }
    return thinks ? { reasoning_content: piece } : { content: piece };
  });
}

const sumOf = (deltas, field) => deltas.map((delta) => delta[field] ?? '').join('');

/** The smallest instance of a schema without references. */
function instance(schema) {
  if (schema.const !== undefined) return schema.const;
  if (schema.enum) return schema.enum[0];
  switch (schema.type) {
    case 'object': return Object.fromEntries(Object.entries(schema.properties ?? {}).map(([name, value]) => [name, instance(value)]));
    case 'array': return Array.from({ length: schema.minItems ?? 0 }, () => instance(schema.items ?? {}));
    case 'integer': case 'number': return schema.minimum ?? 0;
    case 'boolean': return true;
    case 'string': return 'text'.padEnd(schema.minLength ?? 0, '.');
    default: return null;
  }
}

function check(body) {
  const within = (name, low, high, whole) => {
    const value = body[name];
    if (value === undefined || value === null) return;
    if (typeof value !== 'number' || !(value >= low && value <= high) || (whole && !Number.isInteger(value))) {
      throw new Refusal(400, `${name}: expected ${whole ? 'an integer' : 'a number'} from ${low} to ${high}, found \`${JSON.stringify(value)}\``, { param: name });
    }
  };
  within('temperature', 0, 2);
  within('top_p', 0, 1);
  within('min_p', 0, 1);
  within('top_k', 0, 1e9, true);
  within('max_tokens', 1, 8192, true);
  within('max_completion_tokens', 1, 8192, true);
  within('seed', 0, Number.MAX_SAFE_INTEGER, true);
  within('n', 1, 8, true);
  if ([body.stop ?? []].flat().some((stop) => typeof stop !== 'string')) throw new Refusal(400, 'stop: expected a string or strings', { param: 'stop' });
  if (body.model && body.model !== options.model) throw new Refusal(404, `no model \`${body.model}\`; there is: ${options.model}`, { param: 'model' });
}

let running = 0;
async function complete(body, chat, request, response) {
  if (running >= Number(options.queue)) throw new Refusal(429, `the queue is full: ${running} wait`, { headers: { 'Retry-After': '1' } });
  running += 1;
  try {
    return await answer(body, chat, request, response);
  } finally {
    running -= 1;
  }
}

async function answer(body, chat, request, response) {
  check(body);
  if (chat && !Array.isArray(body.messages)) throw new Refusal(400, 'messages: expected an array', { param: 'messages' });
  const goesOn = chat && body.continue_final_message === true;
  if (chat && !goesOn && !body.messages.length) throw new Refusal(400, 'messages: expected at least one', { param: 'messages' });
  for (const message of body.messages ?? []) {
    if (!['system', 'developer', 'user', 'assistant', 'tool'].includes(message?.role)) throw new Refusal(400, `messages: unknown role \`${message?.role}\``, { param: 'messages' });
  }
  if (!chat && typeof body.prompt !== 'string') throw new Refusal(400, 'prompt: expected a string', { param: 'prompt' });
  const session = body.session === undefined ? null : find(body.session);
  const turn = goesOn && session ? pathOf(session).at(-1) : null; // the one whose answer goes on
  const parent = turn?.parent ?? session?.head;
  const old = session ? [session.system ?? '', ...pathOf(session, parent).flatMap((turn) => turn.messages.map((message) => message.content))] : [];
  const asked = turn ? turn.messages.slice(0, -1) : goesOn ? body.messages.slice(0, -1) : body.messages;
  const text = chat ? [...old, ...asked.map((message) => message.content ?? '')].join('\n') : body.prompt;
  const begun = turn ? turn.made : goesOn ? tokens(body.messages.at(-1).content).length : 0;
  const limit = begun + (body.max_completion_tokens ?? body.max_tokens ?? 48);
  const stops = [body.stop ?? []].flat();
  const cached = session ? pathOf(session).at(-1)?.position ?? 0 : 0;
  const total = Math.max(tokens(text).length, cached + 1);
  const started = performance.now();
  const forced = body.tools && body.tool_choice !== 'none' && body.tool_choice !== undefined && body.tool_choice !== 'auto';

  const answers = Array.from({ length: body.n ?? 1 }, (_, i) => {
    let pieces = continuation(text, limit, i);
    let finish = pieces.length < limit ? 'stop' : 'length';
    if (body.response_format?.json_schema) { pieces = [JSON.stringify(instance(body.response_format.json_schema.schema))]; finish = 'stop'; }
    else if (body.response_format?.type === 'json_object') { pieces = ['{}']; finish = 'stop'; }
    const whole = pieces.join('');
    const cut = Math.min(...stops.map((stop) => whole.indexOf(stop)).filter((at) => at >= 0), Infinity);
    if (cut !== Infinity) { pieces = tokens(whole.slice(0, cut)); finish = 'stop'; }
    const message = { role: 'assistant', content: sumOf(divided(pieces), 'content') };
    if (forced) {
      const called = body.tools.find((tool) => tool.function.name === body.tool_choice.function?.name) ?? body.tools[0];
      const call = { id: `call_${i}`, type: 'function', function: { name: called.function.name, arguments: JSON.stringify(instance(called.function.parameters)) } };
      Object.assign(message, { content: null, tool_calls: [call] });
      [pieces, finish] = [[], 'tool_calls'];
    }
    return { pieces, finish, message };
  });
  const logprobs = body.logprobs === undefined || body.logprobs === false ? null : {
    chat: (pieces) => ({ content: pieces.map((token) => ({ token, logprob: -0.5, bytes: [...Buffer.from(token)], top_logprobs: Array.from({ length: body.top_logprobs ?? 0 }, (_, i) => ({ token, logprob: -0.5 - i, bytes: [...Buffer.from(token)] })) })) }),
    text: (pieces) => ({ tokens: pieces, token_logprobs: pieces.map(() => -0.5), top_logprobs: pieces.map((token) => ({ [token]: -0.5 })), text_offset: pieces.map((_, i) => pieces.slice(0, i).join('').length) }),
  };
  const whole = answers.map(({ pieces }) => divided(pieces));
  for (const answer of answers) answer.pieces.splice(0, begun);
  const made = answers.reduce((sum, answer) => sum + answer.pieces.length, 0);
  const usage = { prompt_tokens: total, completion_tokens: made, total_tokens: total + made, prompt_tokens_details: { cached_tokens: cached } };
  const base = { id: `${chat ? 'chatcmpl' : 'cmpl'}-${randomUUID()}`, created: now(), model: options.model, system_fingerprint: 'mock' };
  const timings = (n) => {
    const ms = Math.max(performance.now() - started, 0.1);
    return { cache_n: cached, prompt_n: total - cached, prompt_ms: 1, prompt_per_second: 1000 * (total - cached), predicted_n: n, predicted_ms: ms, predicted_per_second: (1000 * n) / ms, state_bytes: STATE_BYTES, position: total + n };
  };
  const store = (count, isCut) => {
    if (!session) return null;
    const said = whole[0].slice(0, begun + count);
    const thought = sumOf(said, 'reasoning_content');
    const answer = { role: 'assistant', content: sumOf(said, 'content'), ...(thought && { reasoning_content: thought }) };
    const made = { parent, messages: [...asked, answer], position: total + said.length, made: said.length, is_cut: isCut, ...(turn && { continues: turn.id }) };
    return { id: session.id, turn: commit(session, made) };
  };

  if (!body.stream) {
    if (Number(options.delay)) await sleep(Number(options.delay) * made);
    const choices = answers.map(({ pieces, finish, message }, index) => (chat
      ? { index, message, logprobs: logprobs?.chat(pieces) ?? null, finish_reason: finish }
      : { index, text: (body.echo ? text : '') + pieces.join(''), logprobs: logprobs?.text(pieces) ?? null, finish_reason: finish }));
    return [200, { ...base, object: chat ? 'chat.completion' : 'text_completion', choices, usage, timings: timings(made), ...(session && { session: store(made, answers[0].finish === 'length') }) }];
  }

  response.writeHead(200, { 'Content-Type': 'text/event-stream', 'Cache-Control': 'no-cache', 'X-Accel-Buffering': 'no' });
  const object = chat ? 'chat.completion.chunk' : 'text_completion';
  const chunk = (choices, more = {}) => response.write(`data: ${JSON.stringify({ ...base, object, choices, ...more })}\n\n`);
  let gone = false;
  response.on('close', () => { gone = true; });
  response.write(`: prefill ${cached}/${total}\n\n: prefill ${total}/${total}\n\n`);
  let count = 0;
  for (const [index, { pieces, message, finish }] of answers.entries()) {
    if (chat) chunk([{ index, delta: { role: 'assistant', content: '' }, logprobs: null, finish_reason: null }]);
    if (message.tool_calls) chunk([{ index, delta: { tool_calls: message.tool_calls.map((call, i) => ({ index: i, ...call })) }, finish_reason: null }]);
    for (const [i, piece] of pieces.entries()) {
      if (Number(options.delay)) await sleep(Number(options.delay));
      if (gone) break;
      if (index === 0) count += 1;
      chunk([chat ? { index, delta: whole[index][begun + i], logprobs: logprobs?.chat([piece]) ?? null, finish_reason: null } : { index, text: piece, logprobs: logprobs?.text([piece]) ?? null, finish_reason: null }]);
    }
    if (gone) break;
    const last = index === answers.length - 1;
    const stored = last ? store(count, finish === 'length') : null;
    chunk([{ index, ...(chat ? { delta: {} } : { text: '' }), logprobs: null, finish_reason: finish }], last ? { timings: timings(made), ...(stored && { session: stored }) } : {});
  }
  if (gone) { if (count) store(count, true); return null; }
  if (body.stream_options?.include_usage) chunk([], { usage });
  response.end('data: [DONE]\n\n');
  return null;
}

function embeddings(body) {
  check(body);
  const inputs = typeof body.input === 'string' ? [body.input] : body.input;
  if (!Array.isArray(inputs) || !inputs.length) throw new Refusal(400, 'input: expected a string or an array of strings', { param: 'input' });
  const vectors = inputs.map((text) => {
    const raw = [...createHash('sha256').update(String(text)).digest()].map((byte) => byte - 127.5);
    const norm = Math.hypot(...raw);
    return Float32Array.from(raw, (value) => value / norm);
  });
  const shown = (vector) => (body.encoding_format === 'base64' ? Buffer.from(vector.buffer).toString('base64') : [...vector]);
  const used = inputs.reduce((sum, text) => sum + tokens(String(text)).length, 0);
  return [200, { object: 'list', model: options.model, data: vectors.map((vector, index) => ({ object: 'embedding', index, embedding: shown(vector) })), usage: { prompt_tokens: used, total_tokens: used } }];
}

// Routes

const json = (properties, required) => ({ required: true, content: { 'application/json': { schema: { type: 'object', properties, required } } } });
const OPENAPI = {
  openapi: '3.1.0', info: { title: 'mock', version: '0' },
  paths: {
    '/v1/models': { get: { responses: { 200: { description: 'models' } } } },
    '/tokenize': { post: { requestBody: json({ content: { type: 'string' } }, ['content']), responses: { 200: { description: 'ids' } } } },
    '/v1/completions': { post: { requestBody: json({ prompt: { type: 'string' }, max_tokens: { type: 'integer', minimum: 1, maximum: 8 } }, ['prompt']), responses: { 200: { description: 'text' } } } },
  },
};
const model = () => ({ id: options.model, object: 'model', created: 1_780_000_000, owned_by: 'boostr' });
const vocabulary = [];
const ROUTES = {
  'GET /health': () => [200, { status: 'ok' }],
  'GET /livez': () => [200, { status: 'ok' }],
  'GET /openapi.json': () => [200, OPENAPI],
  'GET /v1/models': () => [200, { object: 'list', data: [model()] }],
  'GET /props': () => [200, {
    model: options.model, parameters: 2_680_000, state_bytes: STATE_BYTES, has_chat_template: false, vocab: 2048,
    defaults: { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05, max_tokens: 512 }, version: '0.1.0', sessions: !options['no-sessions'],
  }],
  'POST /v1/chat/completions': (body, request, response) => complete(body, true, request, response),
  'POST /v1/completions': (body, request, response) => complete(body, false, request, response),
  'POST /v1/embeddings': embeddings,
  'POST /tokenize': (body) => {
    const text = body.content ?? body.prompt;
    if (typeof text !== 'string') throw new Refusal(400, 'content: expected a string', { param: 'content' });
    const ids = tokens(text).map((token) => { if (!vocabulary.includes(token)) vocabulary.push(token); return vocabulary.indexOf(token); });
    return [200, { tokens: ids, count: ids.length }];
  },
  'POST /detokenize': (body) => [200, { content: (body.tokens ?? []).map((id) => vocabulary[id] ?? '').join('') }],
  'POST /apply-template': (body) => [200, { prompt: (body.messages ?? []).map((message) => message.content).join('\n') }],
};

function authorised(request) {
  const given = request.headers['x-api-key'] ?? request.headers.authorization?.replace(/^Bearer /, '');
  return !options.key || given === options.key;
}

async function read(request) {
  let text = '';
  request.setEncoding('utf8');
  for await (const part of request) {
    text += part;
    if (text.length > 4 << 20) throw new Refusal(413, 'body: longer than 4 MiB');
  }
  if (request.method !== 'POST') return {};
  if (!/^application\/json\b/.test(request.headers['content-type'] ?? '')) throw new Refusal(415, 'content-type: expected application/json');
  if (!text && /\/save$/.test(request.url)) return {};
  try {
    const value = JSON.parse(text);
    if (value === null || typeof value !== 'object' || Array.isArray(value)) throw new Error('expected an object');
    return value;
  } catch (error) {
    throw new Refusal(400, `body: ${error.message}`);
  }
}

async function route(request, response) {
  if (!/^(127\.0\.0\.1|localhost)(:\d+)?$/.test(request.headers.host ?? '')) throw new Refusal(403, `host \`${request.headers.host}\` is not this server`);
  const url = new URL(request.url, 'http://mock');
  const file = request.method === 'GET' && FILES[url.pathname];
  if (file) {
    response.writeHead(200, { 'Content-Type': `${file[1]}; charset=utf-8`, 'Content-Security-Policy': CSP, 'X-Content-Type-Options': 'nosniff', 'Cache-Control': 'no-cache' });
    response.end(readFileSync(new URL(file[0], PAGE)));
    return null;
  }
  if (!['/health', '/livez'].includes(url.pathname) && !authorised(request)) throw new Refusal(401, 'API key: missing or wrong', { headers: { 'WWW-Authenticate': 'Bearer' } });
  const handler = ROUTES[`${request.method} ${url.pathname}`];
  if (handler) return handler(await read(request), request, response);
  const [, id, verb] = url.pathname.match(/^\/v1\/sessions(?:\/([^/]+))?(?:\/([a-z]+))?$/) ?? [];
  if (url.pathname.startsWith('/v1/sessions') && !options['no-sessions']) {
    const act = SESSION_ROUTES[`${request.method} ${verb ?? (id ? 'id' : '')}`];
    const body = await read(request);
    if (act) return id ? act(decodeURIComponent(id), body) : act(null, body);
  }
  const known = Object.keys(ROUTES).some((name) => name.endsWith(` ${url.pathname}`));
  throw new Refusal(known ? 405 : 404, known ? `method ${request.method} is not allowed here` : `no such path: ${url.pathname}`);
}

const TYPES = { 401: 'authentication_error', 404: 'not_found_error', 429: 'rate_limit_error' };
const server = createServer({ headersTimeout: 8000, connectionsCheckingInterval: 1000 }, async (request, response) => {
  let answer;
  try {
    answer = await route(request, response);
  } catch (error) {
    if (!(error instanceof Refusal) && error.code !== 'ECONNRESET') console.error(error);
    const status = error.status ?? 500;
    answer = [status, { error: { message: error.message, type: TYPES[status] ?? (status < 500 ? 'invalid_request_error' : 'server_error'), param: error.param ?? null, code: null } }, error.headers];
  }
  if (answer && !response.headersSent) {
    response.writeHead(answer[0], { 'Content-Type': 'application/json', ...answer[2] });
    response.end(JSON.stringify(answer[1]));
  }
});
server.listen(Number(options.port), '127.0.0.1', () => console.log(`http://127.0.0.1:${options.port}`));
for (const signal of ['SIGTERM', 'SIGINT']) process.on(signal, () => { server.closeAllConnections(); server.close(() => process.exit(0)); });
