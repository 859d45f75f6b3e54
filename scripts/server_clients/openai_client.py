#!/usr/bin/env python3
"""Talks to a server with OpenAI's own Python client, one check a line; exits with 1 where one fails.

    pip install openai==3.57.0
    python scripts/server_clients/openai_client.py http://127.0.0.1:8080 [--key KEY] [--only WORDS]

The model may be any, also a tiny one that makes no sense: only what a server answers for is checked. With --key the
server must want that key.
"""

import json
import math
from argparse import ArgumentParser

import openai

COLOURS = ["red", "green", "blue"]
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": COLOURS},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "bright": {"type": "boolean"},
    },
    "required": ["colour", "count", "bright"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "paint", "description": "Paints the wall.", "parameters": SCHEMA},
}
ASK = [{"role": "user", "content": "The sea was calm and the boat"}]
GREEDY = {"temperature": 0, "max_tokens": 16}

CHECKS = []


def check(sentence: str):
    def add(function):
        CHECKS.append((sentence, function))
        return function

    return add


class Skipped(Exception):
    pass


class Client:
    def __init__(self, url: str, key: str | None):
        self.url, self.key = url.rstrip("/") + "/v1", key
        self.api = self.with_key(key or "none")
        self.model = self.api.models.list().data[0].id

    def with_key(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=120)

    def chat(self, **more):
        return self.api.chat.completions.create(**{"model": self.model, "messages": ASK, **GREEDY, **more})

    def complete(self, **more):
        return self.api.completions.create(**{"model": self.model, "prompt": "The sea was", **GREEDY, **more})

    def refuses(self, kind, param: str | None, call, **more):
        """The call fails with this error, whose body is of OpenAI's form and names the parameter."""
        try:
            found = call(**more)
        except kind as error:
            body = error.body
            assert isinstance(body, dict), f"no error object: {error}"
            assert body.get("message") and body.get("type"), f"message and type in {body}"
            assert "param" in body and "code" in body, f"param and code in {body}"
            if param:
                assert param in (body["param"] or "") or param in body["message"], f"`{param}` in {body}"
            return error
        raise AssertionError(f"expected an error for {more}, found {found}")


# Models


@check("models are listed, and each is found by its id")
def _(c: Client):
    listed = c.api.models.list()
    assert listed.object == "list"
    for model in listed.data:
        assert model.object == "model" and model.created > 0 and model.owned_by
        assert c.api.models.retrieve(model.id).id == model.id
    c.refuses(openai.NotFoundError, None, lambda: c.api.models.retrieve("nobody"))


# Chat


@check("a chat is answered, with usage and timings")
def _(c: Client):
    answer = c.chat()
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.created > 1.7e9
    assert answer.model == c.model and answer.system_fingerprint
    [choice] = answer.choices
    assert choice.index == 0 and choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= 16
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 <= usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens
    timings = answer.model_extra["timings"]
    for name in ("cache_n", "prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second", "state_bytes", "position"):
        assert timings[name] >= 0, f"{name} in {timings}"
    assert timings["cache_n"] + timings["prompt_n"] == usage.prompt_tokens, f"{timings} {usage}"
    assert timings["predicted_n"] == usage.completion_tokens


@check("a stream has the same text as the whole answer, and usage where it is asked for")
def _(c: Client):
    whole = c.chat()
    chunks = list(c.chat(stream=True, stream_options={"include_usage": True}))
    assert all(chunk.object == "chat.completion.chunk" and chunk.id == chunks[0].id for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    with_choices = [chunk for chunk in chunks if chunk.choices]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in with_choices)
    assert text == whole.choices[0].message.content, f"{text!r} and {whole.choices[0].message.content!r}"
    assert [chunk.choices[0].finish_reason for chunk in with_choices].count(None) == len(with_choices) - 1
    assert with_choices[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert with_choices[-1].model_extra["timings"]["predicted_n"] == whole.usage.completion_tokens
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    plain = list(c.chat(stream=True))
    assert all(chunk.usage is None for chunk in plain) and all(chunk.choices for chunk in plain)


@check("the first tokens of a second turn are reused")
def _(c: Client):
    # With a template that a longer chat extends, the messages so far are a prefix of the next prompt's ids.
    first = c.chat(max_tokens=8)
    messages = [*ASK, {"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "And then?"}]
    usage = c.chat(messages=messages, max_tokens=8).usage
    again = c.chat(messages=messages, max_tokens=8).usage
    assert again.prompt_tokens_details.cached_tokens > 0, f"the same prompt again: {again}"
    assert usage.prompt_tokens_details.cached_tokens > 0, f"a longer one: {usage}"


@check("n continuations, of which a seed makes each the same again")
def _(c: Client):
    first, second = (c.chat(n=3, temperature=1.0, seed=5) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1, f"all the same: {texts}"
    assert texts == [choice.message.content for choice in second.choices]
    streamed = {}
    for chunk in c.chat(n=3, temperature=1.0, seed=5, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert [streamed[i] for i in range(3)] == texts, f"{streamed} and {texts}"


@check("a stop string ends an answer and is no part of it, whole or streamed")
def _(c: Client):
    text = c.chat(max_tokens=24).choices[0].message.content
    words = text.split()
    stop = words[len(words) // 2]
    expected = text[: text.index(stop)]
    for given in (stop, [stop, "never to be found"]):
        choice = c.chat(max_tokens=24, stop=given).choices[0]
        assert choice.finish_reason == "stop" and choice.message.content == expected, f"{stop!r}: {choice.message.content!r}, expected {expected!r}"
    chunks = [chunk.choices[0] for chunk in c.chat(max_tokens=24, stop=stop, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].finish_reason == "stop"


@check("logprobs come for each token, with the likeliest")
def _(c: Client):
    answer = c.chat(logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == answer.choices[0].message.content
    for entry in content:
        assert entry.logprob <= 0 and math.isfinite(entry.logprob) and len(entry.top_logprobs) == 3
        tops = [top.logprob for top in entry.top_logprobs]
        assert tops == sorted(tops, reverse=True)
        assert entry.logprob == tops[0], "the greedy token is the likeliest"
    streamed = [entry for chunk in c.chat(logprobs=True, top_logprobs=3, stream=True) for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert c.chat().choices[0].logprobs is None


@check("a token that is a part of a character has its own bytes, and no broken text is sent")
def _(c: Client):
    wave = "🌊"
    for id in c.api.post("/../tokenize", body={"content": wave, "add_special": False}, cast_to=object)["tokens"]:
        answer = c.chat(max_tokens=1, logprobs=True, logit_bias={str(id): 100}).choices[0]
        [entry] = answer.logprobs.content
        assert bytes(entry.bytes) and bytes(entry.bytes).strip() in wave.encode(), f"token {id}: {entry}"
        streamed = list(c.chat(max_tokens=1, logit_bias={str(id): 100}, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == (answer.message.content or "")


@check("max_completion_tokens counts as max_tokens does")
def _(c: Client):
    answer = c.chat(max_tokens=openai.omit, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3 and answer.choices[0].finish_reason == "length"


@check("logit_bias forbids a token")
def _(c: Client):
    free = c.chat(max_tokens=1, logprobs=True).choices[0].message.content
    ids = c.api.post("/../tokenize", body={"content": free}, cast_to=object)["tokens"]
    bound = c.chat(max_tokens=1, logit_bias={str(id): -100 for id in ids}).choices[0].message.content
    assert bound != free, f"{free!r} although its ids {ids} are forbidden"


@check("a JSON schema is kept to, whole, streamed and parsed")
def _(c: Client):
    form = {"type": "json_schema", "json_schema": {"name": "wall", "strict": True, "schema": SCHEMA}}

    def holds(text: str):
        value = json.loads(text)
        assert set(value) == set(SCHEMA["required"]) and value["colour"] in COLOURS and 1 <= value["count"] <= 9 and isinstance(value["bright"], bool), value

    for more in ({}, {"temperature": 1.0, "seed": 3}):
        choice = c.chat(response_format=form, max_tokens=200, **more).choices[0]
        assert choice.finish_reason == "stop", f"{choice}"
        holds(choice.message.content)
    holds("".join(chunk.choices[0].delta.content or "" for chunk in c.chat(response_format=form, max_tokens=200, stream=True)))
    for choice in c.chat(response_format=form, max_tokens=200, n=3, temperature=1.0).choices:
        holds(choice.message.content)


@check("json_object makes an object")
def _(c: Client):
    choice = c.chat(response_format={"type": "json_object"}, max_tokens=400, temperature=0.7, seed=2).choices[0]
    if choice.finish_reason == "length":
        raise Skipped("the model did not come to an end within 400 tokens")
    assert isinstance(json.loads(choice.message.content), dict)


@check("tools: a required call comes with arguments that fit")
def _(c: Client):
    for wanted in ("required", {"type": "function", "function": {"name": "paint"}}):
        try:
            answer = c.chat(tools=[TOOL], tool_choice=wanted, parallel_tool_calls=False, max_tokens=200)
        except openai.BadRequestError as error:
            if "tool" in str(error):
                raise Skipped(f"the model has no tools: {error.body['message']}") from error
            raise
        [choice] = answer.choices
        assert choice.finish_reason in ("tool_calls", "stop"), choice.finish_reason
        [call] = choice.message.tool_calls
        assert call.type == "function" and call.id and call.function.name == "paint"
        arguments = json.loads(call.function.arguments)
        assert arguments["colour"] in COLOURS and 1 <= arguments["count"] <= 9, arguments
        name, streamed = "", ""
        for chunk in c.chat(tools=[TOOL], tool_choice=wanted, parallel_tool_calls=False, max_tokens=200, stream=True):
            for piece in chunk.choices[0].delta.tool_calls or []:
                name += piece.function.name or ""
                streamed += piece.function.arguments or ""
        assert name == "paint" and json.loads(streamed) == arguments, f"{name} {streamed}"
    result = [*ASK, choice.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "painted"}]
    assert c.chat(messages=result, tools=[TOOL], tool_choice="none").choices[0].message.content is not None


@check("tools: a call that is cut off is no text")
def _(c: Client):
    try:
        answer = c.chat(tools=[TOOL], tool_choice="required", max_tokens=12)
    except openai.BadRequestError as error:
        raise Skipped("the model has no tools") from error
    [choice] = answer.choices
    assert choice.finish_reason == "length" and not (choice.message.content or "").strip(), f"{choice}"


@check("tools: without need there may be none, and `none` makes none")
def _(c: Client):
    for wanted in ("auto", "none"):
        try:
            choice = c.chat(tools=[TOOL], tool_choice=wanted).choices[0]
        except openai.BadRequestError as error:
            if "tool" in str(error) and wanted == "auto":
                continue
            raise
        assert wanted == "auto" or not choice.message.tool_calls


# Completions


@check("a text is completed; echo gives it back; n, stop and logprobs as integers")
def _(c: Client):
    answer = c.complete()
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    text = answer.choices[0].text
    assert text and answer.usage.completion_tokens <= 16
    assert c.complete(echo=True).choices[0].text == "The sea was" + text
    assert len(c.complete(n=2).choices) == 2
    assert "".join(chunk.choices[0].text for chunk in c.complete(stream=True) if chunk.choices) == text
    logprobs = c.complete(logprobs=2).choices[0].logprobs
    assert "".join(logprobs.tokens) == text and len(logprobs.token_logprobs) == len(logprobs.tokens) == len(logprobs.text_offset)
    stop = text.split()[-1]
    assert c.complete(stop=stop).choices[0].text == text[: text.index(stop)]


@check("a chat and a completion of the same text agree with themselves, run after run")
def _(c: Client):
    assert len({c.complete().choices[0].text for _ in range(5)}) == 1
    assert len({c.chat().choices[0].message.content for _ in range(5)}) == 1


# Embeddings


@check("embeddings: one or more, as floats or base64, the same alone and in company")
def _(c: Client):
    one = c.api.embeddings.create(model=c.model, input="The sea")
    assert one.object == "list" and one.usage.prompt_tokens > 0
    alone = one.data[0].embedding
    assert len(alone) > 8 and all(math.isfinite(value) for value in alone)
    two = c.api.embeddings.create(model=c.model, input=["A boat went out past the light house", "The sea"], encoding_format="float")
    assert [entry.index for entry in two.data] == [0, 1]
    plain = two.data[1].embedding
    assert max(abs(a - b) for a, b in zip(alone, plain, strict=True)) < 1e-6
    norm = math.sqrt(sum(value * value for value in alone))
    assert abs(norm - 1) < 1e-3, f"length {norm}"
    c.refuses(openai.BadRequestError, "input", c.api.embeddings.create, model=c.model, input=[])


# Errors


@check("wrong values are a 400 that names the field")
def _(c: Client):
    wrong = {
        "temperature": ["hot", -1, 9], "top_p": [2], "max_tokens": [-2, 1.5], "n": [0, 10**9], "stop": [[1]], "seed": ["x"],
        "presence_penalty": [3], "frequency_penalty": [-3], "logit_bias": [{"1": 500}], "stream": ["yes"], "messages": [[], "text"],
    }
    for name, values in wrong.items():
        for value in values:
            c.refuses((openai.BadRequestError, openai.UnprocessableEntityError), name, c.chat, **{name: value})
    c.refuses(openai.BadRequestError, "min_p", c.chat, extra_body={"min_p": 2})
    c.refuses(openai.BadRequestError, "role", c.chat, messages=[{"role": "wizard", "content": "a"}])
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    c.refuses(openai.BadRequestError, "image", c.chat, messages=[{"role": "user", "content": image}])
    c.refuses(openai.BadRequestError, "suffix", c.complete, suffix="x")


@check("a schema that cannot be kept to is refused, and the server lives")
def _(c: Client):
    for schema in ("text", {"$ref": "http://example.com/a.json"}, {"$ref": "file:///etc/passwd"}, {"type": "string", "pattern": "(?<=a)b"}, {"type": "nothing"}):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        c.refuses((openai.BadRequestError, openai.UnprocessableEntityError), None, c.chat, response_format=form)
    assert c.chat().choices


@check("an unknown model is a 404 that says which there are")
def _(c: Client):
    error = c.refuses(openai.NotFoundError, None, c.chat, model="nobody")
    assert c.model in error.body["message"], error.body
    c.refuses(openai.NotFoundError, None, c.complete, model="nobody")


@check("a missing or wrong key is a 401")
def _(c: Client):
    if not c.key:
        raise Skipped("no --key")
    for key in ("wrong", "x" * 5000):
        error = c.refuses(openai.AuthenticationError, None, c.with_key(key).models.list)
        assert error.response.headers["www-authenticate"].startswith("Bearer")


@check("unknown fields are ignored")
def _(c: Client):
    assert c.chat(extra_body={"mystery": 1, "user": "someone"}).choices[0].message.content == c.chat().choices[0].message.content


def main():
    options = ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("url")
    options.add_argument("--key")
    options.add_argument("--only", default="")
    arguments = options.parse_args()
    client = Client(arguments.url, arguments.key)
    failed = 0
    for sentence, run in CHECKS:
        if arguments.only not in sentence:
            continue
        try:
            run(client)
            print(f"ok    {sentence}", flush=True)
        except Skipped as reason:
            print(f"skip  {sentence}: {reason}", flush=True)
        except (AssertionError, openai.OpenAIError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            failed += 1
            print(f"FAIL  {sentence}: {type(error).__name__}: {error}", flush=True)
    print(f"{failed} failed" if failed else "all passed")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
