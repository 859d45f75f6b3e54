"""What the workers share: requests in, answers out, token ids, and memory as the kernel counts it.

A worker is a process that holds one model. It reads one JSON object a line from stdin and answers each
with one on stdout:

    {"prompt": 512, "threads": 2}   ->  {"rate": tokens a second}
    {"decode": 128, "threads": 2}   ->  {"rate": tokens a second, the median of pieces of DECODE_STEP}
    {"memory": true}                ->  {"peak": bytes}

Before the first request it says {"first_token": seconds from opening the file to the logits after a
prompt of FIRST tokens, "before": bytes of memory at most until then}.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Protocol

# Tokens of the prompt before the first token.
FIRST = 16
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
        else:
            answer(peak=peak_memory())


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
