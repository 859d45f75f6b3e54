"""litellm through each of its doors: OpenAI's two, Anthropic's, Ollama's."""

import asyncio
from importlib.metadata import version

import litellm
from checks import MODEL, PERSON, URL, check, run

litellm.suppress_debug_info = True
SEA = [{"role": "user", "content": "What is the sea?"}]
DOORS = {
    "openai": {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none"},
    "ollama": {"model": f"ollama_chat/{MODEL}", "api_base": URL},
}


def answers(door):
    ask = dict(messages=SEA, max_tokens=12, temperature=0, num_retries=0, **DOORS[door])
    whole = litellm.completion(**ask).choices[0].message.content
    stream = litellm.completion(stream=True, **ask)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text and text == whole, (text, whole)


@check("chats by OpenAI's API")
def _():
    answers("openai")


@check("chats by Anthropic's API")
def _():
    answers("anthropic")


@check("chats by Ollama's API")
def _():
    answers("ollama")


@check("a tool that has to be called, by OpenAI's and Anthropic's APIs")
def _():
    tools = [{"type": "function", "function": {"name": "look_up", "description": "x", "parameters": PERSON}}]
    for door in ("openai", "anthropic"):
        ask = dict(messages=SEA, tools=tools, tool_choice="required", max_tokens=200, num_retries=0, **DOORS[door])
        calls = litellm.completion(**ask).choices[0].message.tool_calls
        assert calls[0].function.name == "look_up", door


@check("responses")
def _():
    done = litellm.responses(input="What is the sea?", max_output_tokens=12, **DOORS["openai"])
    assert done.output[0].content[0].text
    second = litellm.responses(input="And?", max_output_tokens=12, **DOORS["openai"])
    assert second.id != done.id


run(f"litellm {version('litellm')}")
