#!/usr/bin/env python3
"""llama.cpp, called as a C library through the `llama-cpp-python` package; see protocol.py.

    llama_worker.py MODEL.gguf THREADS UBATCH[,UBATCH..]

Everything is llama.cpp's default (memory-mapped file, prompts in pieces of at most 2048 tokens) except
what a benchmark must set: the threads, no timing by the library itself, and how many tokens are computed
at once (n_ubatch; 512 is the default). Where several are given, a prompt that is longer than the first is
tried with each, and goes on with the fastest. Nothing is sampled.
"""

import ctypes
import sys

import llama_cpp as llama

from protocol import BATCH, CONTEXT, Peer, serve


class Llama(Peer):
    def __init__(self, path: str, ubatches: list[int]) -> None:
        self.model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        if not self.model:
            sys.exit(f"{path}: llama.cpp does not load it")
        super().__init__(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model)), ubatches)

    def make_context(self, ubatch: int) -> llama.llama_context_p:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, BATCH, ubatch
        params.no_perf = True
        return llama.llama_init_from_model(self.model, params)

    def clear(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def compute(self, ids: list[int], threads: int, rows: int | None) -> int:
        llama.llama_set_n_threads(self.context, threads, threads)
        if rows is None:
            tokens = (llama.llama_token * len(ids))(*ids)
            status = llama.llama_decode(self.context, llama.llama_batch_get_one(tokens, len(ids)))
            llama.llama_get_logits_ith(self.context, -1)  # waits for them
            return status
        batch = llama.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, id in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = id, self.at + i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        status = llama.llama_decode(self.context, batch)
        llama.llama_batch_free(batch)
        size = 4 * self.vocab
        for i in range(len(ids) if status == 0 else 0):
            ctypes.memmove(rows + i * size, llama.llama_get_logits_ith(self.context, i), size)
        return status


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
