"""Traces of requests, made from a seed: what a client sends, turn by turn.

A trace yields (conversation, request body). A message whose content is OWN stands for what the server itself
answered to the conversation's last request, as a chat client sends it back.
"""

import random
from collections.abc import Iterator

OWN = object()
WORDS = (
    "the of and a to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know get through back "
    "server state model token layer cache memory page file error value check build test branch merge queue thread lock"
).split()

# A name, and what is asked: a body, a list of bodies at once, or None for a restart.
Trace = Iterator[tuple[str, dict | list | None]]


class Writer:
    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def words(self, count: int) -> str:
        text = " ".join(self.random.choice(WORDS) for _ in range(count))
        return text[0].upper() + text[1:] + "."

    def text(self, count: int) -> str:
        """Paragraphs of `count` words together."""
        parts = []
        while count > 0:
            size = min(count, self.random.randint(40, 90))
            parts.append(self.words(size))
            count -= size
        return "\n\n".join(parts)

    def code(self, lines: int) -> str:
        line = lambda i: f"{i:4}  let {self.random.choice(WORDS)}_{i} = {self.random.choice(WORDS)}({self.random.randint(0, 9999)});"
        return "\n".join(line(i) for i in range(lines))


def tool(writer: Writer, name: str) -> dict:
    properties = {word: {"type": "string", "description": writer.words(8)} for word in writer.random.sample(WORDS, 3)}
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": writer.words(25), "parameters": parameters}}


def call(writer: Writer, number: int) -> dict:
    arguments = {"path": f"src/{writer.random.choice(WORDS)}.rs", "line": number}
    function = {"name": writer.random.choice(["read", "edit", "run", "search"]), "arguments": arguments}
    return {"id": f"call{number}", "type": "function", "function": function}


def ask(messages: list, **more: object) -> dict:
    return {"messages": list(messages), "max_tokens": 4, "temperature": 0, **more}


def agent() -> Trace:
    """A coding agent: 30 tools first, 60 turns, thoughts that are dropped when the user speaks again."""
    writer = Writer("agent")
    names = ["read", "edit", "run", "search", *(f"tool_{i}" for i in range(26))]
    tools = [tool(writer, name) for name in names]
    messages = [{"role": "system", "content": writer.text(400)}]
    for turn in range(60):
        if turn % 6 == 0:
            messages.append({"role": "user", "content": writer.words(writer.random.randint(20, 60))})
        else:
            messages.append({"role": "tool", "tool_call_id": f"call{turn - 1}", "content": writer.code(writer.random.randint(5, 25))})
        yield "agent", ask(messages, tools=tools)
        answer = {"role": "assistant", "reasoning_content": writer.words(writer.random.randint(30, 90)), "content": writer.words(12)}
        if turn % 6 != 5:
            answer["tool_calls"] = [call(writer, turn)]
        messages.append(answer)


def document() -> Trace:
    """A long document, and 40 questions about it, each in one message with it."""
    writer = Writer("document")
    text = writer.text(14_500)
    for _ in range(40):
        yield "document", ask([{"role": "user", "content": f"{text}\n\nQuestion: {writer.words(writer.random.randint(8, 24))}"}])


def system() -> Trace:
    """A long system prompt whose last line is new each time (a date), before short chats."""
    writer = Writer("system")
    text = writer.text(1_500)
    for i in range(30):
        system = {"role": "system", "content": f"{text}\n\nIt is day {i} of the year, {writer.words(3)}"}
        yield "system", ask([system, {"role": "user", "content": writer.words(20)}])


def chats() -> Trace:
    """Ten chats, 300 turns in an order without rule, each answer sent back as it came."""
    writer = Writer("chats")
    histories: dict[str, list] = {f"chat{i}": [] for i in range(10)}
    for _ in range(300):
        name = writer.random.choice(list(histories))
        messages = histories[name]
        if messages:
            messages.append({"role": "assistant", "content": OWN})
        messages.append({"role": "user", "content": writer.words(writer.random.randint(10, 60))})
        yield name, ask(messages, max_tokens=16)


def edited() -> Trace:
    """A chat of 40 turns; every tenth an earlier message is changed, and what follows is asked again from there."""
    writer = Writer("edited")
    messages: list = []
    for turn in range(40):
        if turn % 10 == 9:
            at = 2 * writer.random.randint(turn // 4, turn // 3)
            del messages[at:]
        messages.append({"role": "user", "content": writer.words(writer.random.randint(20, 60))})
        yield "edited", ask(messages)
        messages.append({"role": "assistant", "content": writer.words(writer.random.randint(30, 80))})


def compacted() -> Trace:
    """An agent whose history is replaced by a summary each time that it is long; the system prompt stays."""
    writer = Writer("compacted")
    system = {"role": "system", "content": writer.text(800)}
    messages = [system]
    for turn in range(60):
        if turn % 15 == 14:
            messages = [system, {"role": "user", "content": "Summary: " + writer.text(150)}, *messages[-2:]]
        messages.append({"role": "user", "content": writer.words(writer.random.randint(20, 80))})
        yield "compacted", ask(messages)
        messages.append({"role": "assistant", "content": writer.words(writer.random.randint(30, 90))})


def together() -> Trace:
    """An agent that sends eight helpers at once, ten times: one history, another task for each at its end."""
    writer = Writer("together")
    messages: list = [{"role": "system", "content": writer.text(1_500)}]
    for _ in range(10):
        task = writer.text(60)
        said = [f"{task}\n\nTask: {writer.words(writer.random.randint(10, 30))}" for _ in range(8)]
        yield "together", [ask([*messages, {"role": "user", "content": text}]) for text in said]
        messages += [{"role": "user", "content": said[0]}, {"role": "assistant", "content": writer.words(40)}]


def restart() -> Trace:
    """Four chats of 10 turns; the server restarts in the middle (a body of None)."""
    writer = Writer("restart")
    histories = {f"chat{i}": [{"role": "system", "content": writer.text(200)}] for i in range(4)}
    for turn in range(10):
        if turn == 5:
            yield "", None
        for name, messages in histories.items():
            messages.append({"role": "user", "content": writer.words(writer.random.randint(20, 60))})
            yield name, ask(messages)
            messages.append({"role": "assistant", "content": writer.words(writer.random.randint(20, 60))})


ALL = {it.__name__: it for it in (agent, document, system, chats, edited, compacted, together, restart)}
