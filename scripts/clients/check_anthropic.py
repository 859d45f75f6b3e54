"""Anthropic's own client: messages, streams, tools, counts, errors."""

import anthropic
from checks import MODEL, PERSON, URL, check, run

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
GREEDY = {"temperature": 0}  # the client has no argument for it
SEA = [{"role": "user", "content": "What is the sea?"}]
TOOLS = [{"name": "look_up", "description": "Looks up.", "input_schema": PERSON}]


@check("a message, whole and as a stream")
def _():
    whole = client.messages.create(model=MODEL, max_tokens=12, system="Be brief.", messages=SEA, extra_body=GREEDY)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 12
    with client.messages.stream(model=MODEL, max_tokens=12, system="Be brief.", messages=SEA, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text and text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 12


@check("a stop sequence is named")
def _():
    whole = client.messages.create(model=MODEL, max_tokens=24, messages=SEA, extra_body=GREEDY)
    stop = whole.content[0].text.split()[1]
    cut = client.messages.create(model=MODEL, max_tokens=24, messages=SEA, extra_body=GREEDY, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


@check("a tool is used, and what it gives is read")
def _():
    ask = dict(model=MODEL, max_tokens=200, tools=TOOLS)
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(messages=SEA, tool_choice=choice, **ask) as stream:
        final = stream.get_final_message()
    block = final.content[0]
    assert final.stop_reason == "tool_use" and 0 <= block.input["age"] <= 99
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "41"}
    history = [*SEA, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    ask["max_tokens"] = 12
    read = client.messages.create(messages=history, tool_choice={"type": "none"}, **ask)
    assert read.content[0].type == "text"


@check("tokens are counted")
def _():
    counted = client.messages.count_tokens(model=MODEL, messages=SEA, system="Be brief.")
    whole = client.messages.create(model=MODEL, max_tokens=1, messages=SEA, system="Be brief.")
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


@check("the model is listed")
def _():
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL) and model.created_at.year >= 2026
    assert client.models.retrieve(MODEL).id == MODEL


@check("errors are of their classes")
def _():
    for kind, fields in ((anthropic.NotFoundError, {"model": "nobody"}), (anthropic.BadRequestError, {"messages": []})):
        try:
            client.messages.create(**{"model": MODEL, "max_tokens": 1, "messages": SEA, **fields})
            raise AssertionError(f"{fields} was taken")
        except kind as error:
            assert error.body["type"] == "error" and error.body["error"]["message"]


run(f"anthropic {anthropic.__version__}")
