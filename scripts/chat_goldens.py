#!/usr/bin/env python3
"""Renders chat templates as transformers does: what crates/boostr/tests/it/chat_templates.rs compares with.

    pip install jinja2==3.1.6
    python scripts/chat_goldens.py [FOLDER]

For each FOLDER/NAME.jinja (by default in fixtures/templates) writes FOLDER/NAME.json: its special tokens, and for
each conversation of conversations.json the text, the words of `raise_exception`, or that Python fails otherwise.
The environment, the treatment of messages and the variables are those of transformers 5.24.0
(utils/chat_template_utils.py), with a clock that stands still. But lists may change, as in jinja2's plain sandbox:
the templates of Kimi K2 append to a list of their own.
"""

import json
import sys
from datetime import datetime
from pathlib import Path

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

ROOT = Path(__file__).resolve().parent.parent
NOW = datetime(2026, 3, 9, 14, 5, 7)
# Tokens that start and end a text, by the start of a template's name; from the models' tokenizer_config.json.
SPECIAL = {
    "google-gemma": ("<bos>", "<eos>"),
    "meta-llama": ("<|begin_of_text|>", "<|eot_id|>"),
    "fireworks-ai": ("<|begin_of_text|>", "<|eot_id|>"),
    "meetkai": ("<|begin_of_text|>", "<|eot_id|>"),
    "NousResearch": ("<|begin_of_text|>", "<|im_end|>"),
    "mistralai": ("<s>", "</s>"),
    "Mistral": ("<s>", "</s>"),
    "unsloth-mistral": ("<s>", "</s>"),
    "microsoft": ("<s>", "<|endoftext|>"),
    "deepseek-ai": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "LFM2": ("<|startoftext|>", "<|im_end|>"),
    "HuggingFaceTB-SmolLM2": ("<|im_start|>", "<|im_end|>"),
    "NVIDIA": ("<s>", "<|im_end|>"),
    "CohereForAI": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "openai": ("<|startoftext|>", "<|return|>"),
}


class Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, with lists that may change."""

    def is_safe_attribute(self, obj, attr, value):
        of = SandboxedEnvironment if isinstance(obj, list) else ImmutableSandboxedEnvironment
        return of.is_safe_attribute(self, obj, attr, value)


class Raised(jinja2.exceptions.TemplateError):
    """What a template says by `raise_exception`."""


class Generation(Extension):
    """`{% generation %}`: marks what the assistant says, and shows it."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller):
        return caller()


def raise_exception(message):
    raise Raised(message)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


def prepared(message):
    """A message without keys that are null, its reasoning under both names in use."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in ("reasoning_content", "thinking", "reasoning") if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def rendered(template, special, conversation, tools):
    options = conversation["options"]
    try:
        return template.render(
            messages=[prepared(message) for message in conversation["messages"]],
            tools=tools[options["tools"]] if "tools" in options else None,
            documents=options.get("documents"),
            add_generation_prompt=options.get("add_generation_prompt", False),
            **{**special, **options.get("kwargs", {})},
        )
    except Raised as error:
        return {"raises": str(error)}
    except Exception as error:
        return {"fails": f"{type(error).__name__}: {error}"}


def special_of(name):
    for start, (bos, eos) in SPECIAL.items():
        if name.startswith(start):
            return {"bos_token": bos, "eos_token": eos}
    return {}


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "fixtures/templates"
    inputs = ROOT / "fixtures/templates"
    conversations = json.loads((inputs / "conversations.json").read_text("utf-8"))
    tools = json.loads((inputs / "tools.json").read_text("utf-8"))
    for path in sorted(folder.glob("*.jinja")):
        special = special_of(path.name)
        try:
            template = environment().from_string(path.read_bytes().decode("utf-8"))
        except jinja2.TemplateSyntaxError as error:
            print(f"{path.name}: no template for Python: {error}")
            continue
        texts = {c["name"]: rendered(template, special, c, tools) for c in conversations}
        text = json.dumps({"special": special, "rendered": texts}, ensure_ascii=False, indent=1)
        path.with_suffix(".json").write_text(text + "\n", "utf-8")
        counts = [sum(isinstance(t, dict) and kind in t for t in texts.values()) for kind in ("raises", "fails")]
        print(f"{path.name}: {len(texts)} conversations, {counts[0]} refused, {counts[1]} failed")


if __name__ == "__main__":
    main()
