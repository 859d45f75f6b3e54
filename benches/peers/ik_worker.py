#!/usr/bin/env python3
"""ik_llama.cpp, through the library that run.py makes of ik.cpp; see protocol.py.

    ik_worker.py LIBRARY OPTION[,OPTION..] MODEL.gguf THREADS UBATCH[,UBATCH..]

Options: `flash` (fused attention), `repack` (rows interleaved while loading, its flag -rtr), `merge` (queries,
keys and values in one matrix), `huge` (large pages), `none`. Its fused delta rule, fused gate and up, and kept
graphs are always on. The rest is as in llama_worker.py.
"""

import ctypes
import sys
from ctypes import POINTER, c_bool, c_char_p, c_int, c_void_p

from protocol import BATCH, CONTEXT, Peer, serve

FLAGS = ("flash", "repack", "merge", "huge")


class Ik(Peer):
    def __init__(self, library: str, options: list[str], path: str, ubatches: list[int]) -> None:
        calls = ctypes.CDLL(library)
        for name, result, *takes in (
            ("peer_open", c_void_p, c_char_p, *[c_bool] * len(FLAGS)),
            ("peer_context", c_void_p, c_void_p, c_int, c_int, c_int, c_bool),
            ("peer_vocab", c_int, c_void_p),
            ("peer_clear", None, c_void_p),
            ("peer_run", c_int, c_void_p, POINTER(c_int), c_int, c_int, c_int, c_void_p),
        ):
            call = getattr(calls, name)
            call.restype, call.argtypes = result, takes
        self.calls, self.flash = calls, "flash" in options
        self.model = calls.peer_open(path.encode(), *(flag in options for flag in FLAGS))
        if not self.model:
            sys.exit(f"{path}: ik_llama.cpp does not load it")
        super().__init__(calls.peer_vocab(self.model), ubatches)

    def make_context(self, ubatch: int) -> int:
        return self.calls.peer_context(self.model, CONTEXT, BATCH, ubatch, self.flash)

    def clear(self) -> None:
        self.calls.peer_clear(self.context)

    def compute(self, ids: list[int], threads: int, rows: int | None) -> int:
        tokens = (c_int * len(ids))(*ids)
        return self.calls.peer_run(self.context, tokens, len(ids), self.at, threads, rows)


def main() -> None:
    library, options, path, threads, ubatches = sys.argv[1:]
    unknown = set(options.split(",")) - {*FLAGS, "none"}
    if unknown:
        sys.exit(f"{', '.join(unknown)}: not one of {', '.join(FLAGS)}, none")
    sizes = [int(ubatch) for ubatch in ubatches.split(",")]
    serve(lambda: Ik(library, options.split(","), path, sizes), int(threads))


if __name__ == "__main__":
    main()
