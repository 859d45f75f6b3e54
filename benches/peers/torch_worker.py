#!/usr/bin/env python3
"""transformers on torch, on the CPU; see protocol.py.

    torch_worker.py FOLDER THREADS

The type is that of the folder's weights. Without a GPU, transformers runs Mamba-2 by its own formulas in
torch operations, not by fused kernels; this is what a person gets who runs the published example there.
"""

import sys

import torch
from transformers import AutoModelForCausalLM

from protocol import serve


class Torch:
    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        self.vocab = self.model.config.vocab_size
        self.restart()

    def run(self, ids: list[int], threads: int) -> None:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            out = self.model(torch.tensor([ids]), cache=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.cache

    def prompt(self, ids: list[int], threads: int) -> None:
        self.restart()
        self.run(ids, threads)

    def restart(self) -> None:
        self.cache = None

    def step(self, id: int, threads: int) -> None:
        self.run([id], threads)


def main() -> None:
    folder, threads = sys.argv[1:]
    serve(lambda: Torch(folder), int(threads))


if __name__ == "__main__":
    main()
