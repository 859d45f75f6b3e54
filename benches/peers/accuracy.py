#!/usr/bin/env python3
"""How far each program's next token is from exact arithmetic on the same file.

    accuracy.py MODEL.gguf [--types q4_1,q8_0] [--ik BUILD] [--positions 2000]

Runs a text through the model in every program: boostr, llama.cpp, and ik_llama.cpp where it is given. The
reference is `boostr logits --exact` on the same file: weights decoded to f32, activations in f32. Of each position the
Kullback-Leibler divergence of the program's distribution from the exact one is taken, in nats. The table has its
mean, its 99th and 99.9th percentile, and how often the likeliest token is the exact one's.

Types other than the file's own are quantized from it first, by `boostr quantize`. The text is the start of
data/corpus/valid.txt.xz, which no program has seen in this form. Needs numpy; README.md names the rest.
"""

import argparse
import json
import lzma
import struct
import sys
from pathlib import Path

import numpy as np

from run import ROOT, add_programs, ik_library, ours_only, peer, peers, run

# Rows that are compared at once.
ROWS = 100
# Bytes of the text: enough for any number of positions that fits the peers' contexts.
TEXT = 1 << 16


def main() -> None:
    args = arguments()
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.ik:
        args.ik = ik_library(args)
    tokens = text_ids(args)
    lines = [
        f"{len(tokens)} positions of {args.text.name}, {args.model.name}.",
        "",
        "| weights | program | mean KL | 99 % | 99.9 % | same first |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind in args.types or [None]:
        file = quantized(args, kind)
        exact = ours(args, file, tokens, "--exact")
        for name, logits in programs(args, file, tokens):
            divergence, same = compare(exact, logits)
            cells = [divergence.mean(), *np.percentile(divergence, [99, 99.9])]
            numbers = " | ".join(f"{cell:.2e}" for cell in cells)
            lines.append(f"| {kind or file.stem} | {name} | {numbers} | {same:.4f} |")
            print(lines[-1], file=sys.stderr, flush=True)
            del logits
    print("\n".join(lines))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("model", type=Path, help="a GGUF file with its tokenizer")
    option("--types", type=lambda text: text.split(","), help="to quantize it to; its own by default")
    option(
        "--text",
        type=Path,
        default=ROOT / "data/corpus/valid.txt.xz",
        help="text, or text in xz (%(default)s)",
    )
    option("--positions", type=int, default=2000, help="tokens of the text (%(default)s)")
    option("--threads", type=int, default=2, help="(%(default)s)")
    add_programs(option)
    args = parser.parse_args()
    args.boostr, args.dir, args.model = args.boostr.resolve(), args.dir.resolve(), args.model.resolve()
    return args


def text_ids(args: argparse.Namespace) -> list[int]:
    open_text = lzma.open if args.text.suffix == ".xz" else open
    with open_text(args.text, "rt", encoding="utf-8") as file:
        text = file.read(TEXT)
    start = args.dir / "accuracy.txt"
    start.write_text(text, encoding="utf-8")
    answer = json.loads(run(args.boostr, "tokenizer", "encode", "-m", args.model, "-f", start, "--json"))
    return answer["ids"][: args.positions]


def quantized(args: argparse.Namespace, kind: str | None) -> Path:
    """The file in that type; the file itself where it says so in its name."""
    if kind is None or args.model.stem.lower().endswith(kind):
        return args.model
    path = args.dir / f"{args.model.stem}-{kind}.gguf"
    if not path.exists():
        run(args.boostr, "quantize", args.model, path, "-T", kind)
    return path


def programs(args: argparse.Namespace, file: Path, tokens: list[int]):
    """Name and logits of each program."""
    yield "boostr", ours(args, file, tokens)
    if not args.activations:
        for bits in ["8", "16"]:
            yield f"boostr --activations {bits}", ours(args, file, tokens, "--activations", bits)
    out = args.dir / "accuracy.f32"
    for who in peers(args):
        worker = peer(args, who, file, args.threads)
        worker.ask(logits=tokens, to=str(out), threads=args.threads)
        worker.end()
        yield who, np.fromfile(out, np.float32).reshape(len(tokens), -1)
    out.unlink()


def ours(args: argparse.Namespace, file: Path, tokens: list[int], *options: str) -> np.ndarray:
    out = args.dir / "accuracy.safetensors"
    given = ["--tokens", ",".join(map(str, tokens)), "--out", out, "-t", args.threads, *ours_only(args), *options]
    run(args.boostr, "logits", "-m", file, *given)
    with out.open("rb") as saved:
        (size,) = struct.unpack("<Q", saved.read(8))
        shape = json.loads(saved.read(size))["logits"]["shape"]
    logits = np.fromfile(out, np.float32, offset=8 + size).reshape(shape)
    out.unlink()
    return logits


def compare(exact: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, float]:
    """The divergence at each position, and the share of positions with the same likeliest token."""
    if exact.shape != logits.shape:
        sys.exit(f"logits of shape {logits.shape}, expected {exact.shape}")
    divergence = np.empty(len(exact))
    for at in range(0, len(exact), ROWS):
        rows = slice(at, at + ROWS)
        p, q = log_softmax(exact[rows]), log_softmax(logits[rows])
        divergence[rows] = (np.exp(p) * (p - q)).sum(axis=1)
    return divergence, float((exact.argmax(axis=1) == logits.argmax(axis=1)).mean())


def log_softmax(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))


if __name__ == "__main__":
    main()
