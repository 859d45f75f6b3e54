#!/usr/bin/env python3
"""Speed of training by boostr and by PyTorch, run in turn: tokens a second of both, and their ratio.

    cargo build --release && pip install torch==2.15.0
    python scripts/train_pair.py [--threads 1,2] [--shapes 256x4x8,768x8x4] [--rounds 5] [--steps 6] [--json]

A shape is the width, the layers, and the rows of a batch; a row has 512 tokens. Each round runs `boostr train` on the
text of data/corpus, then scripts/train_speed.py: a Mamba-2 of the same sizes, in f32, by AdamW, on as many threads.
The speed of a run is that of its median step, without the first two. The table has the medians of the rounds.
Memory is the peak of the process, in MiB.
"""
import argparse
import json
import lzma
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEQ, VOCAB, STATE, WARMUP = 512, 1024, 64, 2


def run(command, threads):
    """What a command prints, and its peak memory in MiB."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen([str(part) for part in command], stdout=out, stderr=errors, env=environment)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        if child.returncode != 0:
            sys.exit(f"{child.args} ended with {child.returncode}: {errors.read()[-2000:]}")
        return out.read(), usage.ru_maxrss / 1024


def boostr(args, folder, shape, threads):
    """Tokens a second and MiB of one run of `boostr train`."""
    width, layers, rows = shape
    out, tokenizer = Path(folder) / "run", Path(folder) / "tokenizer.json"
    command = [args.boostr, "train", "--data", Path(folder) / "text.txt", "--out", out, "--d-model", width]
    command += ["--n-layer", layers, "--d-state", STATE, "--batch-size", rows, "--seq-len", SEQ]
    command += ["--steps", WARMUP + args.steps, "--threads", threads, "--seed", 1, "--json"]
    command += ["--tokenizer", tokenizer] if tokenizer.exists() else ["--vocab-size", VOCAB]
    _, peak = run(command, threads)
    if not tokenizer.exists():
        tokenizer.write_bytes((out / "tokenizer.json").read_bytes())
    ends = [json.loads(line)["seconds"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [end - start for start, end in pairwise([0.0, *ends])]
    subprocess.run(["rm", "-r", out], check=True)
    return rows * SEQ / statistics.median(steps[WARMUP:]), peak


def pytorch(args, shape, threads):
    """Tokens a second, MiB, and the version of PyTorch of one run of train_speed.py."""
    width, layers, rows = shape
    command = [args.python, ROOT / "scripts/train_speed.py", "--d-model", width, "--layers", layers]
    command += ["--batch", rows, "--seq", SEQ, "--vocab", VOCAB, "--d-state", STATE]
    command += ["--steps", args.steps, "--warmup", WARMUP, "--threads", threads]
    out, peak = run(command, threads)
    report = json.loads(out.splitlines()[-1])
    return report["tokens_per_second"], peak, report["torch"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--shapes", default="256x4x8,768x8x4", help="width x layers x rows of a batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="that are measured, in each run")
    parser.add_argument("--boostr", default=ROOT / "target/release/boostr", help="the program")
    parser.add_argument("--python", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--json", action="store_true", help="one JSON object a row, in place of the table")
    args = parser.parse_args()
    shapes = [tuple(int(size) for size in shape.split("x")) for shape in args.shapes.split(",")]
    if any(len(shape) != 3 for shape in shapes):
        parser.error("--shapes: expected WIDTHxLAYERSxROWS, as 256x4x8")
    if not args.json:
        print("| shape | threads | boostr tok/s | PyTorch tok/s | ratio | boostr MiB | PyTorch MiB |")
        print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        text = lzma.decompress((ROOT / "data/corpus/train.txt.xz").read_bytes())
        (Path(folder) / "text.txt").write_bytes(text[: 1 << 21].decode(errors="ignore").encode())
        for shape in shapes:
            for threads in (int(count) for count in args.threads.split(",")):
                ours, theirs, peaks = [], [], []
                for _ in range(args.rounds):
                    speed, peak = boostr(args, folder, shape, threads)
                    peer_speed, peer_peak, version = pytorch(args, shape, threads)
                    ours.append(speed)
                    theirs.append(peer_speed)
                    peaks.append((peak, peer_peak))
                median, peer = statistics.median(ours), statistics.median(theirs)
                peak, peer_peak = (max(column) for column in zip(*peaks, strict=True))
                name = "x".join(map(str, shape))
                if args.json:
                    print(json.dumps({
                        "shape": name, "threads": threads, "ratio": round(median / peer, 3), "torch": version,
                        "boostr": round(median, 1), "pytorch": round(peer, 1), "boostr_mib": round(peak, 1),
                        "pytorch_mib": round(peer_peak, 1), "boostr_rounds": [round(x, 1) for x in ours],
                        "pytorch_rounds": [round(x, 1) for x in theirs],
                    }), flush=True)  # fmt: skip
                else:
                    row = [name, threads, f"{median:,.0f}", f"{peer:,.0f}", f"**{median / peer:.2f}**"]
                    row += [f"{peak:,.0f}", f"{peer_peak:,.0f}"]
                    print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
