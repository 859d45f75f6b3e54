#!/usr/bin/env python3
"""What drafts by a model's own block for one token more (MTP) gain, on a model whose text is planted.

    mtp.py [--noise 0,6,8] [-n 128]

The model has the geometry of Qwen3.5-0.8B. Mixers and MLPs of the trunk give zero, so the next token depends on
the present one alone: the head, which is not tied here, has the embedding of each token at the row of the next.
The MTP block passes the embedding on, so that it guesses right. Noise in its projection, relative to what it passes
on, makes guesses wrong. Speed depends on neither: all products are computed as for any weights, here in bf16.

Prints tokens a second without and with `--draft mtp`, in turn, the share of guesses that were right, and passes over
the trunk that were saved. Ends with an error when a draft changes a single token.
"""

import argparse
import itertools
import json
import shutil
import statistics
import sys
from pathlib import Path

import numpy as np

from make_model import SEED, Random, Shape, Tensor, constant, matrix, mlp, qwen3_5_0_8b, write_folder
from run import ROOT, run

# The next of token i is STEP * i + 1; STEP has no factor in common with the vocabulary.
STEP = 100_003
VOCAB = 248_320


def planted(noise: float) -> Shape:
    config, tensors = qwen3_5_0_8b()
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config["head_dim"]
    zero = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    for name, tensor in tensors.items():
        if name.endswith(zero):
            tensors[name] = constant(0, *tensor.shape)

    def embedding(_: Random, shape: tuple[int, ...]) -> np.ndarray:
        own = np.random.Generator(np.random.PCG64(SEED))
        return own.standard_normal(shape, np.float32) * np.float32(0.02)

    def successors(random: Random, shape: tuple[int, ...]) -> np.ndarray:
        rows = np.empty(shape, np.float32)
        rows[(STEP * np.arange(VOCAB) + 1) % VOCAB] = embedding(random, shape)
        return rows

    def pass_on(random: Random, shape: tuple[int, ...]) -> np.ndarray:
        of_embedding = random.standard_normal((width, width), np.float32) * np.float32(noise * width**-0.5)
        of_embedding += np.eye(width, dtype=np.float32)
        return np.hstack([of_embedding, np.zeros_like(of_embedding)])

    tensors["model.embed_tokens.weight"] = Tensor((VOCAB, width), embedding)
    tensors["lm_head.weight"] = Tensor((VOCAB, width), successors)
    layer = {
        "input_layernorm.weight": constant(0, width),
        "self_attn.q_proj.weight": matrix(2 * heads * head, width),
        "self_attn.k_proj.weight": matrix(kv_heads * head, width),
        "self_attn.v_proj.weight": matrix(kv_heads * head, width),
        "self_attn.q_norm.weight": constant(0, head),
        "self_attn.k_norm.weight": constant(0, head),
        "self_attn.o_proj.weight": constant(0, width, heads * head),
        "post_attention_layernorm.weight": constant(0, width),
        **mlp(width, inner, 0),
    }
    tensors |= {f"mtp.layers.0.{name}": tensor for name, tensor in layer.items()}
    tensors |= {
        "mtp.fc.weight": Tensor((width, 2 * width), pass_on),
        "mtp.pre_fc_norm_embedding.weight": constant(0, width),
        "mtp.pre_fc_norm_hidden.weight": constant(0, width),
        "mtp.norm.weight": constant(0, width),
    }
    return config | {"tie_word_embeddings": False, "mtp_num_hidden_layers": 1}, tensors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--boostr", type=Path, default=ROOT / "target/release/boostr", help="the program (%(default)s)")
    option(
        "--dir", type=Path, default=ROOT / "target/peers", help="for the model, which is 2 GB (%(default)s)"
    )
    option("--noise", type=lambda text: [float(word) for word in text.split(",")], default=[0, 6, 8])
    option("--threads", type=int, default=2, help="(%(default)s)")
    option("-n", type=int, default=128, help="tokens (%(default)s)")
    option("--rounds", type=int, default=3, help="(%(default)s)")
    args = parser.parse_args()
    print("| noise | without, tok/s | with, tok/s | ratio | guesses right | passes saved |")
    print("| --- | --- | --- | --- | --- | --- |")
    for noise in args.noise:
        print(row(args, noise), flush=True)


def row(args: argparse.Namespace, noise: float) -> str:
    model = args.dir / "planted"
    write_folder(model, planted(noise), "bf16")
    pairs = []
    for round in range(args.rounds):
        pair = {}
        for draft in [(), ("--draft", "mtp")] if round % 2 else [("--draft", "mtp"), ()]:
            options = ["--tokens", "1,2,3", "-n", args.n, "--temp", 0, "-t", args.threads, "--json", *draft]
            pair[draft != ()] = json.loads(run(args.boostr, "run", "-m", model, *options))
        if pair[False]["ids"] != pair[True]["ids"]:
            sys.exit(f"noise {noise:g}: the draft changes the tokens")
        pairs.append((pair[False]["timings"], pair[True]["timings"]))
    shutil.rmtree(model)
    ids = pair[False]["ids"]
    if any(next != (STEP * id + 1) % VOCAB for id, next in itertools.pairwise(ids)):
        sys.exit("the text is not the planted one")
    rates = [[timings["predicted_per_second"] for timings in side] for side in zip(*pairs, strict=True)]
    ratio = statistics.median(b / a for a, b in zip(*rates, strict=True))
    last = pairs[-1][1]
    right, saved = last["draft_n_accepted"] / max(last["draft_n"], 1), last["draft_n_accepted"]
    without, with_draft = map(statistics.median, rates)
    return (
        f"| {noise:g} | {without:.1f} | {with_draft:.1f} | {ratio:.2f} | {right:.0%} of {last['draft_n']} "
        f"| {saved} of {last['predicted_n']} |"
    )


if __name__ == "__main__":
    main()
