// Drives the page of a boostr server in headless Chromium, one check a line; exits with 1 where one fails.
//
//     node page_test.mjs --url http://127.0.0.1:8080 [--serve "COMMAND"] [--key KEY] [--shots FOLDER] [--only WORDS] [--page FOLDER]
//
// --serve: starts the server, stops it at the end, and restarts it in between (SIGTERM) to see that sessions stay.
// --page: the page's files, in place of those that are built into the server. --key: what the server wants as an API key. --shots: where screenshots go (./shots). $CHROMIUM: the browser.

import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { mkdirSync, readFileSync, readdirSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { chromium } from 'playwright-core';
import answerSteps from './answers.mjs';
import placeSteps from './places.mjs';

const { values: options } = parseArgs({ options: {
  url: { type: 'string', default: 'http://127.0.0.1:8123' }, serve: { type: 'string' }, key: { type: 'string' },
  shots: { type: 'string', default: 'shots' }, only: { type: 'string' }, page: { type: 'string' },
} });
const base = options.url.replace(/\/$/, '');
const CSP = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const HOSTILE = '<script>window.hurt = 1</script><img src=x onerror="window.hurt = 2">\n```\n<b>bold</b>\n```\n<svg onload="window.hurt=3">';
mkdirSync(options.shots, { recursive: true });

// The server

let server = null;
async function start() {
  server = spawn(`exec ${options.serve}`, { shell: true, stdio: ['ignore', 'ignore', 'inherit'] });
  for (let i = 0; i < 300; i += 1) {
    if (server.exitCode !== null) throw new Error(`the server ended with ${server.exitCode}`);
    if (await fetch(`${base}/health`).then((response) => response.ok, () => false)) return;
    await sleep(100);
  }
  throw new Error(`no answer from ${base}/health in 30 s`);
}
async function end() {
  if (!server) return;
  const over = new Promise((resolve) => { server.on('exit', resolve); });
  server.kill('SIGTERM');
  await over;
}
const api = async (path, method = 'GET') => {
  const response = await fetch(base + path, { method, headers: options.key ? { Authorization: `Bearer ${options.key}` } : {} });
  return response.json();
};

// The browser

const problems = []; // what no step expects: errors on the console, requests to elsewhere
let page;
async function watch(opened) {
  opened.on('pageerror', (error) => problems.push(error.message));
  opened.on('console', (message) => {
    if (message.type() === 'error' && !/Failed to load resource/.test(message.text())) problems.push(message.text());
  });
  await opened.exposeFunction('violated', (what) => problems.push(`against the policy: ${what}`));
  await opened.addInitScript(() => document.addEventListener('securitypolicyviolation', (event) => window.violated(`${event.violatedDirective} ${event.blockedURI}`)));
  opened.on('request', (request) => { if (!request.url().startsWith(`${base}/`)) problems.push(`request to ${request.url()}`); });
}

const shot = (name) => page.screenshot({ path: `${options.shots}/${name}.png` });
const text = (selector) => page.locator(selector).innerText();
const count = (selector) => page.locator(selector).count();
const hash = () => decodeURIComponent(new URL(page.url()).hash.slice(1));
const idle = () => page.locator('#send').waitFor({ timeout: 60_000 });
const turns = () => page.locator('#log .turn:not(.live)');
const answers = () => page.locator('#log .answer').allInnerTexts();
const inTree = (name) => page.locator('.turn-link', { hasText: name });

async function until(what, check, limit = 5000) {
  const start = Date.now();
  for (;;) {
    if (await check()) return;
    if (Date.now() - start > limit) throw new Error(`not within ${limit} ms: ${what}`);
    await sleep(25);
  }
}
async function settle(n) { await until(`${n} turns are shown`, async () => (await turns().count()) === n); }
async function write(message) {
  await page.fill('#input', message);
  await page.press('#input', 'Enter');
  await page.locator('#stop').waitFor();
}
/** Sends a message and waits for the answer. */
async function say(message) {
  const before = await turns().count();
  await page.fill('#input', message);
  await page.press('#input', 'Enter');
  await settleAnswer(before + 1);
}
async function settleAnswer(n) {
  await until(`the answer of turn ${n}`, async () => (await turns().count()) === n && (await page.locator('#send').isVisible()), 60_000);
}
async function set(values) {
  await page.click('#settings-button');
  for (const [name, value] of Object.entries(values)) await page.fill(`#s-${name}`, String(value));
  await page.click('#settings .primary');
}
async function fresh() {
  await page.click('#new');
  await settle(0);
}
async function click(label) { await page.locator(`[aria-label="${label}"]`).click({ force: true }); }
const stream = (...chunks) => ({ status: 200, headers: { 'Content-Type': 'text/event-stream' }, body: chunks.map((chunk) => `data: ${typeof chunk === 'string' ? chunk : JSON.stringify(chunk)}\r\n\r\n`).join('') });
const piece = (content, finish_reason = null) => ({ choices: [{ index: 0, delta: { content }, finish_reason }] });
/** Answers the next chat requests in the server's place. */
async function instead(answer, act, route = '**/v1/chat/completions') {
  await page.route(route, answer);
  try { await act(); } finally { await page.unroute(route); }
}

const steps = [];
const step = (name, run) => steps.push({ name, run });

step('the page comes whole from the server, under a strict policy', async () => {
  const response = await page.goto(base);
  assert.equal(response.headers()['content-security-policy'], CSP);
  assert.match(response.headers()['content-type'], /^text\/html/);
  for (const [path, type] of [['/js/app.js', /javascript/], ['/js/talk.js', /javascript/], ['/style.css', /css/], ['/icon.svg', /svg/]]) {
    assert.match((await page.request.get(base + path)).headers()['content-type'], type);
  }
  const source = await response.text();
  assert.match(source, /<meta http-equiv="x-dns-prefetch-control" content="off">/, 'a link would be looked up before it is clicked');
  assert.doesNotMatch(source, /<script(?![^>]* src=)|\sstyle=|\son\w+=|https?:\/\/(?!www\.w3\.org)/);
});

step('a server that wants a key is given one', async () => {
  if (!options.key) return 'no --key';
  await page.locator('#error').waitFor();
  assert.match(await text('#error'), /wants an API key/);
  await shot('key');
  await page.click('#retry');
  assert.equal(await page.evaluate(() => document.activeElement.id), 's-key');
  await page.fill('#s-key', 'wrong');
  await page.press('#s-key', 'Enter');
  await until('the wrong key is refused', async () => /does not accept/.test(await text('#error-text').catch(() => '')));
  await page.click('#retry');
  await page.fill('#s-key', options.key);
  await page.press('#s-key', 'Enter');
  await until('the key is accepted', async () => /parameters/.test(await text('#model')) && !(await page.locator('#error').isVisible()));
  assert.equal(await page.evaluate(() => JSON.stringify(localStorage).includes(sessionStorage.getItem('boostr.key'))), false);
});

step('it says what the model is', async () => {
  const props = await api('/props');
  await until('the model is named', async () => (await text('#model')).includes(props.model));
  assert.equal(props.sessions, true, 'this test wants a server with sessions');
  if (props.model.startsWith('demo-')) {
    assert.match(await text('#note'), /a demo, not an assistant/);
    assert.match(await text('#disclaimer'), /a demo, not an assistant/i);
  }
  await shot('empty');
});

step('a message is answered as a stream, with its numbers', async () => {
  await set({ max_tokens: 64, temperature: 0 });
  await page.evaluate(() => {
    window.lengths = new Set();
    new MutationObserver(() => window.lengths.add(document.querySelector('.live .answer')?.innerText.length))
      .observe(document.getElementById('log'), { subtree: true, childList: true, characterData: true });
  });
  await write('It was a dark and stormy night');
  await until('text comes', async () => ((await answers())[0] ?? '').length > 10);
  await shot('stream');
  await settleAnswer(1);
  assert.ok((await page.evaluate(() => window.lengths.size)) >= 3, 'the text came in one piece');
  assert.match(await text('.numbers'), /^\d+ tokens?, [\d.,]+ tok\/s · 0 reused from the state, [1-9]\d* read/);
  assert.match(await text('#speed'), /tok\/s/);
  assert.match(await text('#state'), /^[\d.]+ [kM]B$/);
  const session = await api(`/v1/sessions/${hash()}`);
  assert.equal(Number((await text('#position')).replace(',', '')), session.position);
  assert.equal((await answers())[0], session.tree[0].messages.at(-1).content.trim());
});

step('the next turn reads only what is new', async () => {
  await say('The boat came in');
  assert.match(await page.locator('.numbers').nth(1).innerText(), / [1-9]\d* reused from the state/);
  await shot('two-turns');
});

step('who scrolled up to read is left there', async () => {
  await page.setViewportSize({ width: 1280, height: 360 });
  const before = await turns().count();
  await set({ max_tokens: 2000 });
  await write('Go on');
  await until('text comes', async () => (await page.locator('.live .answer:not(:has(.waiting))').innerText().catch(() => '')).length > 10);
  await page.evaluate(() => { document.getElementById('scroll').scrollTop = 0; });
  await sleep(200);
  assert.equal(await page.evaluate(() => document.getElementById('scroll').scrollTop), 0);
  await page.keyboard.press('Escape');
  await settleAnswer(before + 1);
  assert.equal(await page.evaluate(() => document.getElementById('scroll').scrollTop), 0);
  await set({ max_tokens: 64 });
  await click(`Rewind to turn ${before}`);
  await settle(before);
  await page.setViewportSize({ width: 1280, height: 800 });
});

step('a reload keeps the session open', async () => {
  const [before, id] = [await answers(), hash()];
  await page.reload();
  await settle(2);
  assert.equal(hash(), id);
  assert.deepEqual(await answers(), before);
  assert.equal(await page.evaluate(() => document.activeElement.id), 'input');
});

for (const [how, act] of [['Escape', () => page.keyboard.press('Escape')], ['the button', () => page.click('#stop')]]) {
  step(`an answer is stopped by ${how}, and what was written stays`, async () => {
    await set({ max_tokens: 4000 });
    const before = await turns().count();
    await write('And so');
    await until('text comes', async () => (await page.locator('.live .answer:not(:has(.waiting))').innerText().catch(() => '')).length > 10);
    const started = Date.now();
    await act();
    await idle();
    assert.ok(Date.now() - started < 3000, 'stopping took longer than 3 s');
    await settle(before + 1);
    assert.match(await page.locator('.numbers').last().innerText(), /stopped/);
    const shown = await answers();
    assert.ok(shown.at(-1).length > 5);
    assert.equal(await page.evaluate(() => document.activeElement.id), 'input');
    await page.reload();
    await settle(before + 1);
    assert.deepEqual(await answers(), shown);
    await set({ max_tokens: 64 });
  });
}

step('a reload in the middle of an answer keeps what was written', async () => {
  const before = hash();
  await fresh();
  await set({ max_tokens: 4000 });
  await write('Once upon a time');
  await until('text comes', async () => (await page.locator('.live .answer:not(:has(.waiting))').innerText().catch(() => '')).length > 10);
  await page.reload();
  await settle(1);
  assert.ok((await answers())[0].length > 5);
  await set({ max_tokens: 64 });
  await page.click(`[data-session="${before}"]`);
  await settle(4);
});

step('rewinding goes back, and the other turns stay in the tree', async () => {
  const first = (await answers())[0];
  await click('Rewind to turn 1');
  await settle(1);
  assert.deepEqual(await answers(), [first]);
  assert.equal(await count('.turn-link.other'), 4);
  await say('Another way');
  assert.equal(await count('.turn-link'), 6);
  await shot('tree');
  for (const elsewhere of ['The boat came in', 'Another way']) {
    await inTree(elsewhere).click();
    await until(`the turn “${elsewhere}” is shown`, async () => (await text('.turn:last-child .user')) === elsewhere);
    await settle(2);
  }
});

step('a question is asked anew from its place', async () => {
  await click('Ask turn 1 anew');
  await settle(0);
  assert.equal(await page.inputValue('#input'), 'It was a dark and stormy night');
  await page.fill('#input', '');
  await inTree('Another way').click();
  await settle(2);
});

step('a branch is a session of its own, under the one it came from', async () => {
  const origin = hash();
  await click('Branch from turn 1');
  await page.locator('#ask').waitFor();
  await shot('branch');
  const name = `branch-${Date.now()}`;
  await page.fill('#ask-input', '../etc');
  await page.press('#ask-input', 'Enter');
  assert.ok(await page.locator('#ask').isVisible(), 'a name with a slash was taken');
  await page.fill('#ask-input', name);
  await page.press('#ask-input', 'Enter');
  await until('the branch is open', async () => hash() === name);
  await settle(1);
  await say('Only here');
  assert.match(await page.locator('.numbers').last().innerText(), / [1-9]\d* reused from the state/);
  const nested = page.locator(`li:has(> [data-session="${origin}"]) [data-session="${name}"]`);
  assert.equal(await nested.count(), 1);
  assert.deepEqual((await api(`/v1/sessions/${name}`)).parent, { session: origin, turn: 1 });
  assert.equal(JSON.stringify(await api(`/v1/sessions/${origin}`)).includes('Only here'), false);
  await shot('branched');
  await page.goBack();
  await until('the address leads back', async () => hash() === origin);
  await settle(2);
});

step('a session has the name that it is given; a bad or taken one is refused plainly', async () => {
  const name = `named-${Date.now()}`;
  await fresh();
  await page.fill('#name', '.hidden');
  await page.fill('#input', 'Hello');
  await page.press('#input', 'Enter');
  await sleep(200);
  assert.equal(await turns().count(), 0);
  await page.fill('#name', name);
  await say('Hello');
  assert.equal(hash(), name);
  await fresh();
  await page.fill('#name', name);
  await page.fill('#input', 'Hello again');
  await page.press('#input', 'Enter');
  await page.locator('#error').waitFor();
  assert.match(await text('#error'), new RegExp(name));
  assert.equal(await page.inputValue('#input'), 'Hello again');
  await shot('taken');
  await page.click('#dismiss');
  await page.fill('#input', '');
});

step('a session is deleted only when that is confirmed', async () => {
  await fresh();
  await say('To be deleted');
  const id = hash();
  await page.click('#delete');
  await page.locator('#ask').waitFor();
  await shot('delete');
  await page.keyboard.press('Escape');
  assert.equal((await api(`/v1/sessions/${id}`)).id, id);
  await page.click('#delete');
  await page.click('#ask-ok');
  await until('it is gone', async () => hash() === '' && (await count(`[data-session="${id}"]`)) === 0);
  assert.ok((await api(`/v1/sessions/${id}`)).error);
  await page.goto(`${base}/#${id}`);
  await page.locator('#error').waitFor();
  assert.match(await text('#error'), /there is no session/);
  await page.click('#dismiss');
});

step('markup in a message or an answer is only text', async () => {
  await fresh();
  await say(HOSTILE);
  const session = await api(`/v1/sessions/${hash()}`);
  session.tree[0].messages.at(-1).content = HOSTILE;
  session.title = HOSTILE;
  await instead((route) => route.fulfill({ json: session }), async () => {
    await page.reload();
    await settle(1);
    await instead((route) => route.fulfill(stream(piece(HOSTILE.slice(0, 20)), piece(HOSTILE.slice(20)), piece('', 'stop'), '[DONE]')), async () => {
      await page.fill('#input', HOSTILE);
      await page.press('#input', 'Enter');
      await idle();
    });
  }, `**/v1/sessions/${session.id}`);
  assert.equal(await count('#log :is(script, img, b, svg[onload]), #sessions :is(script, img, b), h1 *'), 0);
  assert.match(await text('.answer'), /<script>window.hurt = 1<\/script>/);
  assert.equal(await text('.answer pre'), '<b>bold</b>');
  assert.equal(await page.evaluate(() => window.hurt), undefined);
  await shot('inert');
  await page.fill('#input', '');
});

step('an answer reads the same wherever the network cuts it', async () => {
  await fresh();
  const answer = 'naïve 海 🌊 ende';
  await page.evaluate(({ answer, body }) => {
    window.realFetch = window.fetch;
    window.fetch = (path, init) => {
      if (!path.endsWith('/chat/completions')) return window.realFetch(path, init);
      const bytes = new TextEncoder().encode(body);
      return Promise.resolve(new Response(new ReadableStream({
        async start(controller) {
          for (const byte of bytes) { controller.enqueue(Uint8Array.of(byte)); await null; }
          controller.close();
        },
      })));
    };
    window.seen = new Set();
    new MutationObserver(() => {
      const shown = document.querySelector('.live .answer:not(:has(.waiting))')?.textContent;
      if (shown) window.seen.add(answer.startsWith(shown));
    }).observe(document.getElementById('log'), { subtree: true, childList: true, characterData: true });
    document.getElementById('input').value = 'Hello';
    document.getElementById('composer').requestSubmit();
  }, { answer, body: stream(...[...answer].map((letter) => piece(letter)), { error: { message: 'on purpose' } }).body.replaceAll('data: ', ': prefill 3/4\r\n\r\ndata:') });
  await page.locator('#error').waitFor();
  assert.match(await text('#error'), /on purpose/);
  assert.deepEqual(await page.evaluate(() => { window.fetch = window.realFetch; return [...window.seen]; }), [true]);
  await page.click('#dismiss');
  await page.fill('#input', '');
});

step('settings are sent, and outlive a reload', async () => {
  await fresh();
  await set({ temperature: 0.5, top_p: 0.9, top_k: 7, max_tokens: 5, seed: 11, system: 'Be brief.' });
  const sent = [];
  const listen = (request) => { if (request.method() === 'POST') sent.push([new URL(request.url()).pathname, request.postDataJSON()]); };
  page.on('request', listen);
  await page.reload();
  await say('Hello');
  page.off('request', listen);
  const [made, asked] = sent.map(([, body]) => body);
  assert.equal(made.system, 'Be brief.');
  assert.deepEqual([asked.temperature, asked.top_p, asked.top_k, asked.max_tokens, asked.seed, asked.stream], [0.5, 0.9, 7, 5, 11, true]);
  assert.deepEqual(asked.messages, [{ role: 'user', content: 'Hello' }]);
  await page.click('#settings-button');
  await shot('settings');
  await page.click('#settings-reset');
  await page.fill('#s-temperature', '9');
  await page.click('#settings .primary');
  assert.ok(await page.locator('#settings').isVisible(), 'a temperature of 9 was taken');
  await page.fill('#s-temperature', '0');
  await page.fill('#s-max_tokens', '64');
  await page.click('#settings .primary');
});

step('errors are said plainly, and can be tried again', async () => {
  await fresh();
  const refuse = (status, message, headers = {}) => (route) => route.fulfill({ status, headers: { 'Content-Type': 'application/json', ...headers }, body: JSON.stringify({ error: { message, type: 'x', param: null, code: null } }) });
  const expect = async (answer, pattern, retry) => {
    await instead(answer, async () => {
      await page.fill('#input', 'Is anyone there?');
      await page.press('#input', 'Enter');
      await page.locator('#error').waitFor();
    });
    assert.match(await text('#error-text'), pattern);
    assert.equal(await page.locator('#retry').isVisible(), retry);
    assert.equal(await page.inputValue('#input'), 'Is anyone there?');
    assert.equal(await turns().count(), 0);
    if (!retry) await page.click('#dismiss');
  };
  await expect(refuse(429, 'full', { 'Retry-After': '3' }), /too much to do. Try again in 3 seconds/, true);
  await shot('busy');
  await expect(refuse(503, 'draining', { 'Retry-After': '1' }), /not ready \(draining\)/, true);
  await expect(refuse(400, 'prompt: 9000 tokens, at most 8192'), /The server says: prompt: 9000 tokens/, false);
  await expect(refuse(500, 'request 17 failed'), /request 17 failed/, false);
  await expect((route) => route.abort(), /does not answer/, true);
  await expect((route) => route.fulfill(stream(piece('Once'), { error: { message: 'shutting down' } })), /shutting down/, false);
  await expect((route) => route.fulfill(stream(piece('Once upon'))), /ended too early/, true);
  await page.click('#retry');
  await settleAnswer(1);
  assert.equal(await page.locator('#error').isVisible(), false);
  assert.equal(await page.inputValue('#input'), '');
});

step('it works with the keyboard alone', async () => {
  await fresh();
  await page.focus('#input');
  await page.keyboard.type('one');
  await page.keyboard.press('Shift+Enter');
  await page.keyboard.type('two');
  assert.equal(await page.inputValue('#input'), 'one\ntwo');
  await page.keyboard.press('Enter');
  await settleAnswer(1);
  assert.equal(await text('.user'), 'one\ntwo');
  const nameless = await page.evaluate(() => [...document.querySelectorAll('button')].filter((button) => !button.ariaLabel && !button.textContent.trim() && button.id !== 'retry' && button.id !== 'ask-ok').length);
  assert.equal(nameless, 0);
  await page.evaluate(() => document.activeElement.blur());
  const reached = [];
  for (let i = 0; i < 60; i += 1) {
    await page.keyboard.press('Tab');
    const [name, outline] = await page.evaluate(() => {
      const focused = document.activeElement;
      const around = focused.id === 'input' ? focused.form : focused;
      const style = getComputedStyle(around);
      return [focused.id || focused.ariaLabel || focused.className, style.outlineStyle !== 'none' || focused.id === 'input'];
    });
    assert.ok(outline || name === '', `no visible focus on ${name}`);
    reached.push(name);
  }
  for (const name of ['new', 'session', 'turn-link', 'settings-button', 'theme', 'delete', 'input', 'send', 'Branch from turn 1']) assert.ok(reached.includes(name), `Tab does not reach ${name}`);
  await page.locator('.session').first().focus();
  await page.keyboard.press('ArrowDown');
  assert.match(await page.evaluate(() => document.activeElement.className), /turn-link|session/);
  await page.locator('#settings-button').focus();
  await page.keyboard.press('Enter');
  await page.locator('#settings').waitFor();
  await page.keyboard.press('Escape');
  assert.equal(await page.evaluate(() => document.activeElement.id), 'settings-button');
  assert.match(await text('#status'), /Answered/);
});

const lightness = () => page.evaluate(() => {
  const context = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, 1, 1);
  return context.getImageData(0, 0, 1, 1).data[1];
});

step('light and dark follow the system, until they are switched', async () => {
  await page.emulateMedia({ colorScheme: 'dark' });
  assert.ok((await lightness()) < 60);
  await shot('dark');
  await page.click('#theme');
  assert.ok((await lightness()) > 200);
  await page.reload();
  assert.ok((await lightness()) > 200);
  await page.click('#theme');
  assert.ok((await lightness()) < 60);
  await page.emulateMedia({ colorScheme: 'light' });
  assert.ok((await lightness()) > 200, 'after switching back the system is followed again');
});

step('on a phone the side bar is a drawer and nothing is wider than the screen', async () => {
  await page.setViewportSize({ width: 360, height: 720 });
  const wide = () => page.evaluate(() => [...document.querySelectorAll('main *, #sidebar *')].filter((node) => node.checkVisibility({ visibilityProperty: true }) && node.getBoundingClientRect().right > innerWidth + 0.5 && !node.closest('.answer pre')).map((node) => node.id || node.className));
  await until('the drawer is shut', async () => !(await page.locator('#sidebar').isVisible()));
  assert.deepEqual(await wide(), []);
  await shot('phone');
  await page.click('#menu');
  await sleep(300);
  assert.equal(await page.evaluate(() => document.activeElement.id), 'close-menu');
  assert.deepEqual(await wide(), []);
  await shot('phone-menu');
  await page.keyboard.press('Escape');
  assert.equal(await page.evaluate(() => document.activeElement.id), 'menu');
  await page.click('#menu');
  await page.locator('.session').last().click();
  await until('the drawer closes', async () => !(await page.locator('#sidebar').isVisible()));
  await page.setViewportSize({ width: 1280, height: 800 });
});

step('without sessions it is a chat whose history the page sends', async () => {
  const props = await api('/props');
  await instead((route) => route.fulfill({ json: { ...props, sessions: false } }), async () => {
    await page.goto(`${base}/#`);
    await page.reload();
    await until('it says so', async () => /keeps no sessions/.test(await text('#sessions')));
    const sent = [];
    const listen = (request) => { if (request.url().endsWith('/chat/completions')) sent.push(request.postDataJSON()); };
    page.on('request', listen);
    await say('First');
    await say('Second');
    await click('Rewind to turn 1');
    await settle(1);
    await say('Third');
    page.off('request', listen);
    assert.equal(sent.length, 3);
    assert.ok(sent.every((body) => body.session === undefined));
    assert.deepEqual(sent[2].messages.map((message) => message.role), ['user', 'assistant', 'user']);
    assert.equal(sent[2].messages[2].content, 'Third');
    assert.equal(await count('.turn-link'), 3);
    assert.equal(await count('[aria-label^="Branch"]'), 0);
    await shot('stateless');
  }, '**/props');
  await page.reload();
});

step('sessions outlive a restart of the server', async () => {
  if (!server) return 'no --serve';
  await fresh();
  await say('Before the restart');
  const [before, id] = [await answers(), hash()];
  await end();
  await page.fill('#input', 'Is anyone there?');
  await page.press('#input', 'Enter');
  await page.locator('#error').waitFor();
  assert.match(await text('#error'), /does not answer/);
  await shot('server-gone');
  await start();
  await page.click('#retry');
  await settleAnswer(2);
  assert.match(await page.locator('.numbers').last().innerText(), / [1-9]\d* reused from the state/);
  assert.deepEqual((await answers()).slice(0, 1), before);
  await page.reload();
  await settle(2);
  assert.equal(hash(), id);
});

/** Runs `act` on a page without sessions, whose conversations are its own. */
async function offline(act) {
  const props = await api('/props');
  await page.route('**/props', (route) => route.fulfill({ json: { ...props, sessions: false } }));
  await page.goto(`${base}/#`);
  await page.reload();
  await until('it keeps no sessions', async () => /keeps no sessions/.test(await text('#sessions')));
  try {
    await act();
  } finally {
    await page.unroute('**/props');
    await page.setViewportSize({ width: 1280, height: 800 });
    await page.reload();
    await until('it keeps sessions', async () => !/keeps no sessions/.test(await text('#sessions')));
  }
}

/**
 * Asks, and answers in the server's place: a thought and a text, four letters a token. `every`: a pause after so many tokens; `hold`:
 * after the thought it waits for `window.release()`; `goesOn`: it is no answer, but more of the last one. What was asked is in
 * `window.asked`.
 */
async function tell(content, { thought = '', every = 0, hold = null, finish = 'stop', goesOn = false } = {}) {
  const before = await turns().count();
  await page.evaluate(({ content, thought, every, hold, finish, goesOn }) => {
    window.asked ??= [];
    window.realFetch ??= window.fetch;
    const released = new Promise((resolve) => { window.release = resolve; });
    const pause = (ms) => new Promise((resolve) => { setTimeout(resolve, ms); });
    window.fetch = (path, init) => {
      if (!path.endsWith('/chat/completions')) return window.realFetch(path, init);
      window.asked.push(JSON.parse(init.body));
      window.fetch = window.realFetch;
      const encoder = new TextEncoder();
      const piece = (delta, reason = null) => encoder.encode(`data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: reason }] })}\n\n`);
      const cut = (text) => text.match(/[^]{1,4}/gu) ?? [];
      return Promise.resolve(new Response(new ReadableStream({
        async start(controller) {
          for (const part of cut(thought)) controller.enqueue(piece({ reasoning_content: part }));
          if (hold) await released;
          for (const [i, part] of cut(content).entries()) { controller.enqueue(piece({ content: part })); if (every && i % every === 0) await pause(4); }
          controller.enqueue(piece({}, finish));
          controller.close();
        },
      })));
    };
    if (goesOn) {
      document.querySelector('.go-on').click();
      return;
    }
    document.getElementById('input').value = 'Tell me';
    document.getElementById('composer').requestSubmit();
  }, { content, thought, every, hold, finish, goesOn });
  await settleAnswer(before + (goesOn ? 0 : 1));
}

const tools = { step, page: () => page, offline, tell, instead, options, base, shot, text, count, say, set, fresh, until, settle, settleAnswer, answers, hash, api, turns };
answerSteps(tools);
placeSteps(tools);

// Run

if (options.serve) await start();
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', args: ['--no-sandbox'] });
let failed = 0;
try {
  page = await (await browser.newContext({ viewport: { width: 1280, height: 800 }, colorScheme: 'light' })).newPage();
  page.setDefaultTimeout(10_000);
  await watch(page);
  if (options.page) {
    const scripts = ['js', 'vendor'].flatMap((folder) => readdirSync(`${options.page}/${folder}`).map((name) => `${folder}/${name}`));
    const types = { html: 'text/html', css: 'text/css', svg: 'image/svg+xml', js: 'text/javascript' };
    for (const name of ['index.html', 'style.css', 'icon.svg', ...scripts]) {
      const headers = { 'Content-Type': `${types[name.split('.').pop()] ?? 'text/plain'}; charset=utf-8`, 'Content-Security-Policy': CSP };
      await page.route(`${base}/${name.replace('index.html', '')}`, (route) => route.fulfill({ headers, body: readFileSync(`${options.page}/${name}`) }));
    }
  }
  await page.goto(base);
  for (const { name, run } of steps.filter((other) => !options.only || other.name.includes(options.only))) {
    const began = Date.now();
    try {
      const skipped = await run();
      assert.deepEqual(problems, [], 'on the console or the network');
      console.log(skipped ? `skip  ${name}: ${skipped}` : `ok    ${name} (${Date.now() - began} ms)`);
    } catch (error) {
      failed += 1;
      console.log(`FAIL  ${name}: ${error.message}`);
      await shot(`failed-${failed}`).catch(() => {});
      problems.length = 0;
    }
  }
} finally {
  await browser.close();
  await end();
}
console.log(failed ? `${failed} of ${steps.length} failed` : `all ${steps.length} passed; screenshots in ${options.shots}`);
process.exit(failed ? 1 : 0);
