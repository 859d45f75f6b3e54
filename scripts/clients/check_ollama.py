"""Ollama's own client: chat, generate, streams, tools, schemas, the model's properties."""

import json
from importlib.metadata import version

import ollama
from checks import MODEL, PERSON, URL, check, run

client = ollama.Client(host=URL)
SEA = [{"role": "user", "content": "What is the sea?"}]
SHORT = {"num_predict": 12, "temperature": 0}


@check("a chat, whole and as a stream")
def _():
    whole = client.chat(model=MODEL, messages=SEA, options=SHORT)
    text = "".join(line.message.content or "" for line in client.chat(model=MODEL, messages=SEA, options=SHORT, stream=True))
    assert text and text == whole.message.content
    assert whole.done_reason == "length" and whole.eval_count == 12 and whole.eval_duration > 0


@check("a text goes on, whole and as a stream, and as it is")
def _():
    whole = client.generate(model=MODEL, prompt="The sea was", options=SHORT)
    text = "".join(line.response for line in client.generate(model=MODEL, prompt="The sea was", options=SHORT, stream=True))
    assert text == whole.response
    assert client.generate(model=MODEL, prompt="The sea was", options=SHORT, raw=True).response


@check("an answer follows a schema")
def _():
    done = client.chat(model=MODEL, messages=SEA, format=PERSON)
    assert 0 <= json.loads(done.message.content)["age"] <= 99


@check("a history with tools is read")
def _():
    def look_up(age: int) -> str:
        """Looks up."""

    history = [
        *SEA,
        {"role": "assistant", "tool_calls": [{"function": {"name": "look_up", "arguments": {"age": 1}}}]},
        {"role": "tool", "tool_name": "look_up", "content": "41"},
    ]
    assert client.chat(model=MODEL, messages=history, tools=[look_up], options=SHORT).message.content


@check("the model is listed and shown")
def _():
    assert client.list().models[0].model == MODEL
    shown = client.show(MODEL)
    assert "completion" in shown.capabilities and shown.modelinfo["general.parameter_count"] > 0


@check("errors are errors")
def _():
    try:
        client.chat(model="nobody", messages=SEA)
        raise AssertionError("it was taken")
    except ollama.ResponseError as error:
        assert error.status_code == 404 and "`model`" in error.error


run(f"ollama {version('ollama')}")
