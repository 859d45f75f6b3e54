"""What the workers share: requests in, answers out, token ids, and memory as the kernel counts it.

A worker is a process that holds one model. It reads one JSON object a line from stdin and answers each
with one on stdout:

    {"prompt": 512, "threads": 2}   ->  {"rate": tokens a second}
    {"decode": 128, "threads": 2}   ->  {"rate": tokens a second, the median of pieces of DECODE_STEP}
    {"memory": true}                ->  {"peak": bytes}
    {"logits": [ids], "to": file, "threads": 2}  ->  {}; the file has a row of float32 for each token

Before the first request it says {"first_token": seconds from opening the file to the logits after a
prompt of FIRST tokens, "before": bytes of memory at most until then}.
"""

import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from ctypes import addressof, c_char
from typing import Protocol

# Tokens of the prompt before the first token.
FIRST = 16
# Prompts and what is decoded after them may be this long.
CONTEXT = 1 << 12
# Tokens that a peer is given at once.
BATCH = 2048
# Tokens that are timed together in decoding, as in `boostr bench`.
DECODE_STEP = 8


class Model(Protocol):
    """A loaded model; each call ends when its logits are there."""

    vocab: int

    def prompt(self, ids: list[int], threads: int) -> None:
        """Runs a prompt from an empty state, for the logits of its last token."""

    def restart(self) -> None:
        """Empties the state."""

    def step(self, id: int, threads: int) -> None:
        """Runs one token on."""


class Peer:
    """A model in a C library of llama.cpp's kind, with a context for each number of tokens computed at once.

    Where several such numbers are given, a prompt that is longer than the first is tried with each, and goes on
    with the fastest.
    """

    def __init__(self, vocab: int, ubatches: list[int]) -> None:
        self.vocab, self.ubatches = vocab, ubatches
        self.contexts: dict[int, object] = {}
        self.choice: dict[tuple[int, int], int] = {}
        self.use(ubatches[0])

    def make_context(self, ubatch: int) -> object:
        """A context that computes so many tokens at once, or what is false."""
        raise NotImplementedError

    def clear(self) -> None:
        """Empties the state of `self.context`."""
        raise NotImplementedError

    def compute(self, ids: list[int], threads: int, rows: int | None) -> int:
        """Runs at most BATCH tokens on from `self.at`; 0, or the library's error.

        The logits of all go to the address `rows`, if there is one.
        """
        raise NotImplementedError

    def use(self, ubatch: int) -> None:
        """Goes on, from an empty state, with the context that computes so many tokens at once."""
        if ubatch not in self.contexts:
            self.contexts[ubatch] = self.make_context(ubatch)
            if not self.contexts[ubatch]:
                sys.exit("no context")
        self.context = self.contexts[ubatch]
        self.restart()

    def restart(self) -> None:
        self.clear()
        self.at = 0

    def run(self, ids: list[int], threads: int, rows: int | None = None) -> None:
        for start in range(0, len(ids), BATCH):
            piece = ids[start : start + BATCH]
            status = self.compute(piece, threads, rows and rows + 4 * start * self.vocab)
            if status != 0:
                sys.exit(f"the library answers {status}")
            self.at += len(piece)

    def prompt(self, ids: list[int], threads: int) -> None:
        self.use(self.ubatch(ids, threads))
        self.run(ids, threads)

    def step(self, id: int, threads: int) -> None:
        self.run([id], threads)

    def ubatch(self, ids: list[int], threads: int) -> int:
        """The best of the sizes that were given."""
        if len(ids) <= self.ubatches[0] or len(self.ubatches) == 1:
            return self.ubatches[0]
        case = (len(ids), threads)
        if case not in self.choice:
            times = {}
            for ubatch in self.ubatches:
                self.use(ubatch)
                self.run(ids, threads)  # warms up
                self.restart()
                times[ubatch] = seconds(lambda: self.run(ids, threads))
            self.choice[case] = min(times, key=times.get)
            print(f"{case}: {times}", file=sys.stderr)
        return self.choice[case]


def ids(n: int, vocab: int) -> list[int]:
    """Token ids that jump about, the same as those of `boostr bench`."""
    return [(i * 2_654_435_761) % 2**32 % vocab for i in range(n)]


def peak_memory() -> int:
    """The most memory that this process has had in RAM, mapped files included, in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        (line,) = (line for line in status if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def serve(open_model: Callable[[], Model], threads: int) -> None:
    """Opens the model with that many threads and answers requests until stdin ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no answer

    def answer(**values: float) -> None:
        print(json.dumps(values), file=answers, flush=True)

    before, start = peak_memory(), time.perf_counter()
    model = open_model()
    model.prompt(ids(FIRST, model.vocab), threads)
    answer(first_token=time.perf_counter() - start, before=before)
    for line in sys.stdin:
        request = json.loads(line)
        if "prompt" in request:
            answer(rate=prompt_rate(model, request["prompt"], request["threads"]))
        elif "decode" in request:
            answer(rate=decode_rate(model, request["decode"], request["threads"]))
        elif "logits" in request:
            write_logits(model, request["logits"], request["threads"], request["to"])
            answer()
        else:
            answer(peak=peak_memory())


def write_logits(model: Peer, tokens: list[int], threads: int, path: str) -> None:
    """The logits of every token from an empty state, float32, row by row."""
    with open(path, "w+b") as file:
        file.truncate(4 * len(tokens) * model.vocab)
        with mmap.mmap(file.fileno(), 0) as rows:
            start = c_char.from_buffer(rows)
            model.restart()
            model.run(tokens, threads, addressof(start))
            del start  # or the map cannot be closed


def prompt_rate(model: Model, n: int, threads: int) -> float:
    tokens = ids(n, model.vocab)
    return n / seconds(lambda: model.prompt(tokens, threads))


def decode_rate(model: Model, n: int, threads: int) -> float:
    tokens = ids(DECODE_STEP, model.vocab)

    def piece() -> None:
        for token in tokens:
            model.step(token, threads)

    model.restart()
    piece()  # warms up
    return DECODE_STEP / statistics.median(seconds(piece) for _ in range(-(-n // DECODE_STEP)))
