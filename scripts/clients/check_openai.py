"""OpenAI's own client: chat, responses, streams, tools, parsed answers, prompts with probabilities."""

import json
from typing import Literal

import openai
from checks import MODEL, PERSON, URL, check, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
SEA = [{"role": "user", "content": "What is the sea?"}]


class Answer(BaseModel):
    kind: Literal["cat", "dog"]


@check("a chat, whole and as a stream")
def _():
    whole = client.chat.completions.create(model=MODEL, messages=SEA, max_tokens=12, temperature=0)
    stream = client.chat.completions.create(model=MODEL, messages=SEA, max_tokens=12, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text and text == whole.choices[0].message.content


@check("a chat whose answer is parsed")
def _():
    done = client.chat.completions.parse(model=MODEL, messages=SEA, response_format=Answer, max_tokens=100)
    assert done.choices[0].message.parsed.kind in ("cat", "dog")


@check("a chat that calls a tool")
def _():
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": PERSON}}]
    done = client.chat.completions.create(model=MODEL, messages=SEA, tools=tools, tool_choice="required", max_tokens=200,
                                          parallel_tool_calls=False)
    call = done.choices[0].message.tool_calls[0]
    assert 0 <= json.loads(call.function.arguments)["age"] <= 99


@check("a response, whole and as a stream")
def _():
    whole = client.responses.create(model=MODEL, input="What is the sea?", max_output_tokens=12, temperature=0)
    assert whole.status == "incomplete" and whole.output_text and whole.usage.output_tokens == 12
    with client.responses.stream(model=MODEL, input=SEA, max_output_tokens=12, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    # The helper keeps a final response of completed ones alone.
    assert text == whole.output_text


@check("a response goes on from an earlier one, which is read and deleted")
def _():
    first = client.responses.create(model=MODEL, input="What is the sea?", max_output_tokens=12)
    second = client.responses.create(model=MODEL, input="And?", previous_response_id=first.id, max_output_tokens=12)
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    try:
        client.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
        raise AssertionError("it is still there")
    except openai.NotFoundError as error:
        assert error.code == "previous_response_not_found"


@check("a response that is parsed")
def _():
    done = client.responses.parse(model=MODEL, input="Who?", text_format=Answer, max_output_tokens=100)
    assert done.status == "completed" and done.output_parsed.kind in ("cat", "dog")


@check("a response that calls a function, and one that reads its output")
def _():
    tools = [{"type": "function", "name": "look_up", "parameters": PERSON, "strict": True}]
    ask = dict(model=MODEL, tools=tools, max_output_tokens=200, parallel_tool_calls=False)
    events = list(client.responses.create(input=SEA, tool_choice="required", stream=True, **ask))
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert 0 <= json.loads(done.arguments)["age"] <= 99
    final = events[-1].response
    call = final.output[0]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "41"}
    ask["max_output_tokens"] = 12
    read = client.responses.create(input=[*SEA, call, output], tool_choice="none", **ask)
    assert read.output[0].type == "message"


@check("a prompt with probabilities")
def _():
    done = client.completions.create(model=MODEL, prompt="The sea was calm", echo=True, logprobs=1, max_tokens=0)
    logprobs = done.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None and all(x <= 0 for x in logprobs.token_logprobs[1:])


run(f"openai {openai.__version__}")
