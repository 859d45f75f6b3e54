"""Clients from npm: Codex by the Responses API, Claude Code by Anthropic's, opencode, openai-node in Node and in a browser, the
AI SDK by all three APIs."""

import json
import os
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from checks import check, run

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(os.environ["WORK"]) / "npm"
PACKAGES = ["@openai/codex@0.171.0", "@anthropic-ai/claude-code@2.1.197", "openai@6.49.0",
            "ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.92", "@ai-sdk/anthropic@3.0.140", "zod@4.6.7",
            "opencode-ai@1.18.33"]
NODE = """
import OpenAI from 'openai';
const client = new OpenAI({ baseURL: process.env.URL + '/v1', apiKey: 'none', maxRetries: 0 });
const messages = [{ role: 'user', content: 'What is the sea?' }];
const whole = await client.chat.completions.create({ model: 'demo', messages, temperature: 0 });
let text = '';
for await (const chunk of await client.chat.completions.create({ model: 'demo', messages, temperature: 0, stream: true }))
  text += chunk.choices[0]?.delta.content ?? '';
let items = '';
for await (const event of await client.responses.create({ model: 'demo', input: messages, temperature: 0, stream: true }))
  if (event.type === 'response.output_text.delta') items += event.delta;
const custom = { type: 'custom', name: 'note', format: { type: 'grammar', syntax: 'lark', definition: 'start: /[a-z]{3,8}/ "!"' } };
const called = await client.responses.create({ model: 'demo', input: messages, tools: [custom], tool_choice: { type: 'custom', name: 'note' } });
const [call] = called.output;
if (call.type !== 'custom_tool_call' || !/^[a-z]{3,8}!$/.test(call.input)) throw new Error(JSON.stringify(called));
const output = { type: 'custom_tool_call_output', call_id: call.call_id, output: 'Noted.' };
const after = await client.responses.create({ model: 'demo', input: [output], previous_response_id: called.id });
if (!after.output_text) throw new Error(JSON.stringify(after));
const same = text && text === whole.choices[0].message.content && text === items;
if (!same) throw new Error(JSON.stringify([text, items, whole]));
"""

# The package as it is, imported by a page of another origin, which tells its server what came of it.
PAGE = """<!doctype html><script type="importmap">{"imports": {"openai": "/node_modules/openai/index.mjs"}}</script>
<script type="module">
let result;
try {
  const { default: OpenAI } = await import('openai');
  const client = new OpenAI({ baseURL: 'BOOSTR/v1', apiKey: 'none', dangerouslyAllowBrowser: true, maxRetries: 0 });
  const messages = [{ role: 'user', content: 'What is the sea?' }];
  const ask = { model: 'demo', messages, temperature: 0 };
  const whole = (await client.chat.completions.create(ask)).choices[0].message.content;
  let text = '', items = '';
  for await (const chunk of await client.chat.completions.create({ ...ask, stream: true }))
    text += chunk.choices[0]?.delta.content ?? '';
  for await (const event of await client.responses.create({ model: 'demo', input: messages, temperature: 0, stream: true }))
    if (event.type === 'response.output_text.delta') items += event.delta;
  const first = await client.responses.create({ model: 'demo', input: 'Hi' });
  const ids = [];
  for await (const item of client.responses.inputItems.list(first.id)) ids.push(item.id);
  await client.responses.delete(first.id);
  let refused = '';
  try { await client.responses.retrieve(first.id); } catch (error) { refused = error.code; }
  result = { whole, text, items, ids: ids.length, refused };
} catch (error) { result = { error: String(error) }; }
await fetch('/result', { method: 'POST', body: JSON.stringify(result) });
</script>"""

AI_SDK = """
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateObject, generateText, streamText, tool } from 'ai';
import { z } from 'zod';
const at = { baseURL: process.env.URL + '/v1', apiKey: 'none' };
const models = {
  compatible: createOpenAICompatible({ name: 'boostr', supportsStructuredOutputs: true, ...at })('demo'),
  responses: createOpenAI(at)('demo'),
  messages: createAnthropic(at)('demo'),
};
const schema = z.strictObject({ kind: z.enum(['cat', 'dog']) });
const expect = (is, what) => { if (!is) throw new Error(JSON.stringify(what)); };
for (const [name, model] of Object.entries(models)) {
  const ask = { model, prompt: 'What is the sea?', temperature: 0, maxRetries: 0 };
  const whole = await generateText(ask);
  let text = '';
  for await (const piece of streamText(ask).textStream) text += piece;
  expect(text && text === whole.text, [name, text, whole.text]);
  const tools = { look_up: tool({ description: 'x', inputSchema: schema }) };
  const called = await generateText({ ...ask, tools, toolChoice: 'required' });
  expect(['cat', 'dog'].includes(called.toolCalls[0]?.input.kind), [name, called.toolCalls]);
  const { prompt, ...rest } = ask;
  const user = (content) => ({ role: 'user', content });
  const next = await generateText({ ...rest, messages: [user(prompt), ...whole.response.messages, user('And the land?')] });
  expect(next.text, [name, next]);
  if (name === 'messages') continue; // it forces a tool of its own there, as it knows no model of this name
  const { object } = await generateObject({ ...ask, schema });
  expect(['cat', 'dog'].includes(object.kind), [name, object]);
}
"""


def packages():
    """The folder of the packages, which have their versions in its package.json."""
    WORK.mkdir(exist_ok=True)
    folder = Path(os.environ["NPM"])
    folder.mkdir(exist_ok=True)
    if not (folder / "package.json").exists():
        (folder / "package.json").write_text("{}")
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", *PACKAGES], cwd=folder, check=True)
    return folder


class Pages(SimpleHTTPRequestHandler):
    """Files of the packages, and the page; what the page sends is kept."""

    result, told = None, threading.Event()

    def do_GET(self):
        if self.path != "/":
            return super().do_GET()
        page = PAGE.replace("BOOSTR", URL).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def do_POST(self):
        Pages.result = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Pages.told.set()
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


Pages.extensions_map[".mjs"] = "text/javascript"


def serve(origin):
    """The embedded model, whose answers end with a sentence: an agent takes an answer that is cut off for an error."""
    model = WORK / "model"
    shutil.copytree(ROOT / "models/default", model)
    config = json.loads((model / "generation_config.json").read_text())
    ends = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    config["eos_token_id"] = [0, ends["."]]
    (model / "generation_config.json").write_text(json.dumps(config))
    command = [os.environ["BOOSTR"], "serve", str(model), "--alias", "demo", "--port", "0", "--no-sessions",
               "--cors-origin", origin]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return server, server.stdout.readline().strip()


FOLDER = packages()
PAGES = ThreadingHTTPServer(("127.0.0.1", 0), partial(Pages, directory=FOLDER))
threading.Thread(target=PAGES.serve_forever, daemon=True).start()
ORIGIN = f"http://127.0.0.1:{PAGES.server_port}"
SERVER, URL = serve(ORIGIN)
HOME = WORK / "home"
HOME.mkdir()


def command(arguments, **environment):
    environment = {"PATH": os.environ["PATH"], "HOME": str(HOME), "URL": URL, **environment}
    done = subprocess.run(arguments, cwd=HOME, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, (done.stdout + done.stderr)[-300:]
    return done.stdout


@check("Codex is answered")
def _():
    (HOME / ".codex").mkdir()
    (HOME / ".codex/config.toml").write_text(
        f'model = "demo"\nmodel_provider = "boostr"\n[model_providers.boostr]\nname = "boostr"\nbase_url = "{URL}/v1"\nwire_api = "responses"\n'
    )
    binary = str(FOLDER / "node_modules/.bin/codex")
    assert command([binary, "exec", "--skip-git-repo-check", "Say hello."]).strip()


@check("Claude Code is answered")
def _():
    binary = str(FOLDER / "node_modules/.bin/claude")
    environment = dict(ANTHROPIC_BASE_URL=URL, ANTHROPIC_AUTH_TOKEN="none", ANTHROPIC_MODEL="demo", ANTHROPIC_SMALL_FAST_MODEL="demo")
    assert command([binary, "-p", "Say hello."], CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", **environment).strip()


@check("opencode is answered")
def _():
    at = {"baseURL": f"{URL}/v1", "apiKey": "none"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "boostr", "options": at,
                "models": {"demo": {"name": "demo", "limit": {"context": 100000, "output": 256}}}}
    config = {"model": "boostr/demo", "small_model": "boostr/demo", "autoupdate": False, "share": "disabled",
              "provider": {"boostr": provider}}
    (HOME / "opencode.json").write_text(json.dumps(config))
    binary = str(FOLDER / "node_modules/.bin/opencode")
    off = {f"OPENCODE_DISABLE_{name}": "1" for name in ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD")}
    assert command([binary, "run", "Say hello."], **off).strip()


@check("openai-node in Chromium, from another origin: a chat, whole and as a stream, responses and their items")
def _():
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert browser, "no Chromium is installed; $CHROMIUM names one"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={HOME / 'chromium'}"]
    page = subprocess.Popen([browser, *flags, f"{ORIGIN}/"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert Pages.told.wait(120), "the page told nothing in 120 s"
    finally:
        page.terminate()
        page.wait(timeout=30)
    result = Pages.result
    assert result.get("whole") and result["whole"] == result["text"] == result["items"], result
    assert (result["ids"], result["refused"]) == (1, "response_not_found"), result


@check("openai-node: a chat, whole and as a stream, and a response")
def _():
    (FOLDER / "check.mjs").write_text(NODE)
    command(["node", str(FOLDER / "check.mjs")])


@check("the AI SDK: texts, streams, tools, objects, by chat completions, responses and messages")
def _():
    (FOLDER / "check_ai.mjs").write_text(AI_SDK)
    command(["node", str(FOLDER / "check_ai.mjs")])


try:
    run("npm")
finally:
    SERVER.terminate()
    SERVER.wait(timeout=60)
