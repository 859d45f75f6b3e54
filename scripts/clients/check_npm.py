"""Clients from npm: Codex by the Responses API, Claude Code by Anthropic's, openai-node, the AI SDK by all three APIs."""

import json
import os
import shutil
import subprocess
from pathlib import Path

from checks import check, run

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(os.environ["WORK"]) / "npm"
PACKAGES = ["@openai/codex@0.171.0", "@anthropic-ai/claude-code@2.1.197", "openai@6.49.0",
            "ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.92", "@ai-sdk/anthropic@3.0.140", "zod@4.6.7"]
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
const same = text && text === whole.choices[0].message.content && text === items;
if (!same) throw new Error(JSON.stringify([text, items, whole]));
"""

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
  if (name === 'messages') continue; // it forces a tool of its own there, as it knows no model of this name
  const { object } = await generateObject({ ...ask, schema });
  expect(['cat', 'dog'].includes(object.kind), [name, object]);
}
"""


def packages():
    WORK.mkdir(exist_ok=True)
    if (kept := os.environ.get("CLIENTS_NPM")) is not None:
        return Path(kept)
    (WORK / "package.json").write_text("{}")
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", *PACKAGES], cwd=WORK, check=True)
    return WORK


def serve():
    """The embedded model, whose answers end with a sentence: an agent takes an answer that is cut off for an error."""
    model = WORK / "model"
    shutil.copytree(ROOT / "models/default", model)
    config = json.loads((model / "generation_config.json").read_text())
    ends = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    config["eos_token_id"] = [0, ends["."]]
    (model / "generation_config.json").write_text(json.dumps(config))
    command = [os.environ["BOOSTR"], "serve", str(model), "--alias", "demo", "--port", "0", "--no-sessions"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return server, server.stdout.readline().strip()


FOLDER = packages()
SERVER, URL = serve()
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
