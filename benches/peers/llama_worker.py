#!/usr/bin/env python3
"""llama.cpp, called as a C library through the `llama-cpp-python` package; see protocol.py.

    llama_worker.py MODEL.gguf THREADS UBATCH[,UBATCH..]

Everything is llama.cpp's default (memory-mapped file, prompts in pieces of at most 2048 tokens) except
what a benchmark must set: the threads, no timing by the library itself, and how many tokens are computed
at once (n_ubatch; 512 is the default). Where several are given, a prompt that is longer than the first is
tried with each, and goes on with the fastest. Nothing is sampled.
"""

import sys
from ctypes import c_int32

import llama_cpp as llama

from protocol import seconds, serve

# Prompts and what is decoded after them may be this long.
CONTEXT = 1 << 12


class Llama:
    def __init__(self, path: str, ubatches: list[int]) -> None:
        self.model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        if not self.model:
            sys.exit(f"{path}: llama.cpp does not load it")
        self.vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.ubatches = ubatches
        self.contexts: dict[int, llama.llama_context_p] = {}
        self.choice: dict[tuple[int, int], int] = {}
        self.use(ubatches[0])

    def use(self, ubatch: int) -> None:
        """Goes on, from an empty state, with the context that computes so many tokens at once."""
        if ubatch not in self.contexts:
            params = llama.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, 2048, ubatch
            params.no_perf = True
            self.contexts[ubatch] = llama.llama_init_from_model(self.model, params)
            if not self.contexts[ubatch]:
                sys.exit("llama.cpp makes no context")
        self.context = self.contexts[ubatch]
        self.restart()

    def decode(self, ids: list[int], threads: int) -> None:
        llama.llama_set_n_threads(self.context, threads, threads)
        for at in range(0, len(ids), 2048):
            tokens = (llama.llama_token * len(ids[at : at + 2048]))(*ids[at : at + 2048])
            status = llama.llama_decode(self.context, llama.llama_batch_get_one(tokens, c_int32(len(tokens))))
            if status != 0:
                sys.exit(f"llama_decode answers {status}")
        llama.llama_get_logits_ith(self.context, -1)  # waits for them

    def prompt(self, ids: list[int], threads: int) -> None:
        self.use(self.ubatch(ids, threads))
        self.decode(ids, threads)

    def ubatch(self, ids: list[int], threads: int) -> int:
        """The best of the sizes that were given."""
        if len(ids) <= self.ubatches[0] or len(self.ubatches) == 1:
            return self.ubatches[0]
        case = (len(ids), threads)
        if case not in self.choice:
            times = {}
            for ubatch in self.ubatches:
                self.use(ubatch)
                self.decode(ids, threads)  # warms up
                self.restart()
                times[ubatch] = seconds(lambda: self.decode(ids, threads))
            self.choice[case] = min(times, key=times.get)
            print(f"{case}: {times}", file=sys.stderr)
        return self.choice[case]

    def restart(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def step(self, id: int, threads: int) -> None:
        self.decode([id], threads)


def main() -> None:
    path, threads, ubatches = sys.argv[1:]

    @llama.llama_log_callback
    def quiet(level: int, text: bytes, _: object) -> None:
        pass

    llama.llama_log_set(quiet, None)
    llama.llama_backend_init()
    serve(lambda: Llama(path, [int(ubatch) for ubatch in ubatches.split(",")]), int(threads))


if __name__ == "__main__":
    main()
