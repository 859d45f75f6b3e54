#!/usr/bin/env python3
"""boostr beside ik_llama.cpp, llama.cpp and transformers: one model, every type, one run.

    run.py                                      everything; about 40 minutes
    run.py --types q8_0 --rounds 3 --no-torch   one type, some minutes
    run.py --shape llama --ik ik_llama.cpp/build --types q8_0,q4_k_m --prompts 512
    run.py --model SmolLM2.gguf --prompts 512   a model of your own

Makes a model of a published shape with made-up weights (make_model.py), writes it in every type, and
measures prompts, decoding, the time to the first token and memory. README.md beside this file says what
has to be installed, and what each number is.

Speeds on a shared machine move from one minute to the next. So each of ours is taken next to one of each
peer's, in turn and in changing order, and what is compared is the median of the ratios of such neighbours.
How fast memory is read and matrices are multiplied is measured by `boostr bench` around each of ours.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from make_model import SHAPES
from protocol import FIRST, ids

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# What folders hold; all other types are quantized from bf16.
FOLDERS = ["f32", "bf16"]
DEFAULT_TYPES = [*FOLDERS, "q8_0", "q4_k_m", "q4_0"]
# llama.cpp's numbers of its file types (enum llama_ftype in llama.h).
LLAMA_FTYPES = {
    "q4_0": 2,
    "q4_1": 3,
    "q8_0": 7,
    "q5_0": 8,
    "q5_1": 9,
    "q4_k_m": 15,
    "q5_k_m": 17,
    "q6_k": 18,
    "iq4_nl": 25,
    "iq4_xs": 30,
}
TYPES = [*FOLDERS, *LLAMA_FTYPES]
# boostr with all activations in 8 bits.
EIGHT = "boostr at 8 bits"
# Ids below this are tokens of any model that is measured.
VOCAB = 32000


def main() -> None:
    args = arguments()
    args.dir.mkdir(parents=True, exist_ok=True)
    if args.ik:
        args.ik = ik_library(args)
    make_files(args)
    start, load = time.time(), os.getloadavg()
    samples, rounds = measure(args)
    report = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "minutes": round((time.time() - start) / 60, 1),
        "machine": machine(),
        "load_average": {"before": load, "after": os.getloadavg()},
        "versions": versions(args),
        "rounds": rounds,
        "samples": [dataclasses.asdict(case) | {"values": values} for case, values in samples.items()],
    }
    text = markdown(args, report, samples)
    print(text)
    (args.dir / "results.md").write_text(text + "\n", encoding="utf-8")
    (args.dir / "results.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    def types(text: str) -> list[str]:
        unknown = set(text.split(",")) - set(TYPES)
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(TYPES)}")
        return text.split(",")

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--eight", action="store_true", help="measure boostr with --activations 8 too")
    add_programs(option)
    option("--shape", choices=SHAPES, default="mamba2-130m", help="of the model (%(default)s)")
    option("--model", type=Path, help="measure this GGUF file in place of the made-up model")
    option("--types", type=types, default=DEFAULT_TYPES, help=f"of weights ({','.join(DEFAULT_TYPES)})")
    option("--threads", type=numbers, default=[1, 2], help="numbers of threads (1,2)")
    option("--prompts", type=numbers, default=[512, 2048], help="lengths of prompts (512,2048)")
    option("--decode", type=int, default=128, help="tokens to decode (%(default)s)")
    option("--rounds", type=int, default=5, help="times that everything is measured (%(default)s)")
    option("--torch-rounds", type=int, default=1, help="the same for transformers (%(default)s)")
    option("--no-torch", action="store_true", help="leave transformers out")
    option("--only-llama", action="store_true", help="llama.cpp alone, on files of its own quantizer")
    args = parser.parse_args()
    args.boostr, args.dir = args.boostr.resolve(), args.dir.resolve()
    if args.model:
        args.types = [args.model.stem]
    else:
        args.dir /= args.shape
    has_torch = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    args.torch = has_torch and not args.no_torch and not args.only_llama
    if not args.only_llama and not args.boostr.exists():
        parser.error(f"{args.boostr} does not exist: cargo build --release")
    return args


def add_programs(option: Callable[..., object]) -> None:
    """Options that name the programs, here and in accuracy.py."""
    option("--boostr", type=Path, default=ROOT / "target/release/boostr", help="the program (%(default)s)")
    option("--dir", type=Path, default=ROOT / "target/peers", help="for models and results (%(default)s)")
    option(
        "--ik", type=Path, metavar="BUILD", help="folder that ik_llama.cpp was built in, to measure it too"
    )
    option("--ik-options", default="flash,repack", help="see ik_worker.py (%(default)s)")
    option("--isa", help="level of boostr's instructions; the peers' is that of their builds")
    option("--activations", help="bits of boostr's activations: 8, mixed or 16; the peers have 8")


def us(args: argparse.Namespace) -> list[str]:
    """boostr, once or twice."""
    return [] if args.only_llama else ["boostr", *[EIGHT] * args.eight]


def peers(args: argparse.Namespace) -> list[str]:
    return ["ik_llama.cpp", "llama.cpp"] if args.ik else ["llama.cpp"]


def ours_only(args: argparse.Namespace) -> list[str]:
    """Options of boostr that choose how it computes."""
    given = [("--isa", args.isa), ("--activations", args.activations)]
    return [word for option in given if option[1] for word in option]


# Files.


def gguf(args: argparse.Namespace, kind: str) -> Path:
    if args.model:
        return args.model
    return args.dir / ("by-llama.cpp" if args.only_llama else "by-boostr") / f"{kind}.gguf"


def make_files(args: argparse.Namespace) -> None:
    """The folders and the GGUF files, each where it is not there yet."""
    if args.model:
        return
    for kind in args.types:
        path = gguf(args, kind)
        if path.exists():
            continue
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(".part.gguf")
        source = folder(args, kind if kind in FOLDERS else "bf16")
        if kind in FOLDERS:
            run(args.boostr, "convert", source, part, "-T", kind)
        elif args.only_llama:
            whole = path.with_name("bf16.gguf")
            if not whole.exists():
                run(args.boostr, "convert", source, whole, "-T", "bf16")
            run(sys.executable, "-c", LLAMA_QUANTIZE, whole, part, LLAMA_FTYPES[kind])
        else:
            run(args.boostr, "quantize", source, part, "-T", kind)
        part.rename(path)


def folder(args: argparse.Namespace, kind: str) -> Path:
    path = args.dir / kind
    if not (path / "model.safetensors").exists():
        run(sys.executable, HERE / "make_model.py", path, "--shape", args.shape, "--type", kind)
    return path


LLAMA_QUANTIZE = """
import sys, llama_cpp
source, target, ftype = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = int(ftype)
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), params))
"""


def ik_library(args: argparse.Namespace) -> Path:
    """What ik.cpp becomes, compiled against the sources of this build and linked to its libraries."""
    build = args.ik.resolve()
    cache = build / "CMakeCache.txt"
    if not cache.exists():
        sys.exit(f"--ik {args.ik}: no CMakeCache.txt, which a folder that cmake built in has")
    source = Path(re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cache.read_text(), re.MULTILINE)[1])
    library = args.dir / "ik.so"
    includes = [f"-I{source / folder}" for folder in ("include", "ggml/include")]
    folders = [build / "src", build / "ggml/src"]
    links = [f"-L{folders[0]}", "-lllama", *(f"-Wl,-rpath,{folder}" for folder in folders)]
    run("c++", "-O2", "-shared", "-fPIC", "-std=c++17", *includes, HERE / "ik.cpp", "-o", library, *links)
    return library


def run(*command: object) -> str:
    """What a command writes to stdout; if it fails, everything ends."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"exit code {done.returncode}: {shlex.join(words)[:300]}")
    return done.stdout


# Measurements.


@dataclasses.dataclass(frozen=True)
class Case:
    """What a number is of: who, with which weights, doing what, on how many threads.

    `what` is `prompt N` or `decode N`, in tokens a second; the same with `limit of` before it is the rate
    of the machine at that moment (GFLOP/s of matrix products for prompts, GB/s of reading for decoding),
    with `share of limit in` ours over it; `first token` in seconds; `peak memory`, `state` in bytes.
    """

    who: str
    kind: str
    what: str
    threads: int


Samples = defaultdict[Case, list[float]]


def peer(args: argparse.Namespace, who: str, file: Path, threads: int, ubatches: str = "512") -> "Worker":
    """A worker of this peer, which holds this file."""
    script = ("ik_worker.py", args.ik, args.ik_options) if who == "ik_llama.cpp" else ("llama_worker.py",)
    return Worker(*script, file, threads, ubatches)


class Worker:
    """A process that holds one model and measures what it is asked; see protocol.py."""

    def __init__(self, script: str, *arguments: object) -> None:
        command = [sys.executable, str(HERE / script), *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        # In a session of its own, so that Ctrl-C ends run.py's rounds and no worker.
        self.process = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
        self.start = self.answer()

    def answer(self) -> dict[str, float]:
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"no answer from {shlex.join(self.process.args)}")
        return json.loads(line)

    def ask(self, **request: object) -> dict[str, float]:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def rate(self, test: str, threads: int) -> float:
        what, n = test.split()
        return self.ask(**{what: int(n)}, threads=threads)["rate"]

    def peak(self) -> float:
        """Without what the interpreter and its libraries took before the model was opened."""
        return self.ask(memory=True)["peak"] - self.start["before"]

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def tests(args: argparse.Namespace) -> list[str]:
    return [*(f"prompt {n}" for n in args.prompts), f"decode {args.decode}"]


def measure(args: argparse.Namespace) -> tuple[Samples, int]:
    """All numbers, and the rounds that they are of: fewer than asked for after Ctrl-C."""
    samples = Samples(list)
    for kind in args.types:
        memory(args, kind, samples)
    rounds = 0
    workers = {
        (who, kind): peer(args, who, gguf(args, kind), 1, "512,2048")
        for kind in args.types
        for who in peers(args)
    }
    try:
        for number in range(args.rounds + 1):
            taken = one_round(args, workers, number)
            if number == 0:
                progress("warmed up")
                continue
            for case, values in taken.items():
                samples[case] += values
            rounds = number
            progress(f"round {number} of {args.rounds}")
    except KeyboardInterrupt:
        progress(f"ended after {rounds} rounds")
    for worker in workers.values():
        worker.end()
    if args.torch:
        for kind in args.types:
            if kind in FOLDERS:
                transformers(args, kind, samples)
                progress(f"transformers {kind}")
    return samples, rounds


def one_round(args: argparse.Namespace, workers: dict[tuple[str, str], "Worker"], number: int) -> Samples:
    taken = Samples(list)
    for test in tests(args):
        for threads in args.threads:
            # Types innermost: each of ours has our own f32 rate near it too.
            for kind in args.types:
                neighbours(args, workers, kind, test, threads, taken, number)
    for kind in args.types:
        first_token(args, kind, taken)
    return taken


def neighbours(
    args: argparse.Namespace,
    workers: dict[tuple[str, str], Worker],
    kind: str,
    test: str,
    threads: int,
    samples: Samples,
    number: int,
) -> None:
    """Each once, one after the other; who comes first changes from round to round."""
    turns = [*us(args), *peers(args)]
    first = number % len(turns)
    for who in turns[first:] + turns[:first]:
        if who in us(args):
            ours(args, who, kind, test, threads, samples)
        else:
            samples[Case(who, kind, test, threads)].append(workers[who, kind].rate(test, threads))


def ours(
    args: argparse.Namespace, who: str, kind: str, test: str, threads: int, samples: Samples
) -> None:
    what, n = test.split()
    lengths = ["-p", n, "-g", 0] if what == "prompt" else ["-p", 1, "-g", n]
    bits = ["--activations", 8] if who == EIGHT else []
    options = [*lengths, "-t", threads, "-r", 1, "--json", *ours_only(args), *bits]
    out = run(args.boostr, "bench", gguf(args, kind), *options)
    (row,) = json.loads(out)[what]
    limit = "gemm_gflops" if what == "prompt" else "read_gigabytes_per_second"
    share = "ratio_to_gemm" if what == "prompt" else "ratio_to_read"
    samples[Case(who, kind, test, threads)].append(row["tokens_per_second"])
    samples[Case(who, kind, f"limit of {test}", threads)].append(row[limit])
    samples[Case(who, kind, f"share of limit in {test}", threads)].append(row[share])


def first_token(args: argparse.Namespace, kind: str, samples: Samples) -> None:
    """To the token after a short prompt: ours from the start of the process, theirs from opening the file."""
    threads = max(args.threads)
    for who in peers(args):
        worker = peer(args, who, gguf(args, kind), threads)
        worker.end()
        samples[Case(who, kind, "first token", threads)].append(worker.start["first_token"])
    if not args.only_llama:
        start = time.perf_counter()
        complete(args, kind, FIRST, 1)
        samples[Case("boostr", kind, "first token", threads)].append(time.perf_counter() - start)


def memory(args: argparse.Namespace, kind: str, samples: Samples) -> None:
    """Peaks of a process that runs the longest prompt and decodes."""
    threads, longest = max(args.threads), max(args.prompts)
    for who in peers(args):
        worker = peer(args, who, gguf(args, kind), threads)
        for test in (f"prompt {longest}", f"decode {args.decode}"):
            worker.rate(test, threads)
        samples[Case(who, kind, "peak memory", threads)].append(worker.peak())
        worker.end()
    if not args.only_llama:
        report = complete(args, kind, longest, args.decode)
        samples[Case("boostr", kind, "peak memory", threads)].append(report["peak_memory_bytes"])
        samples[Case("boostr", kind, "state", threads)].append(report["state_bytes"])


def complete(args: argparse.Namespace, kind: str, prompt: int, n: int) -> dict:
    tokens = ",".join(map(str, ids(prompt, VOCAB)))
    options = ["--tokens", tokens, "-n", n, "--temp", 0, "-t", max(args.threads), "--json", *ours_only(args)]
    return json.loads(run(args.boostr, "run", gguf(args, kind), *options))


def transformers(args: argparse.Namespace, kind: str, samples: Samples) -> None:
    """Slow, so once or so, and not in turn with the others."""
    threads = max(args.threads)
    worker = Worker("torch_worker.py", folder(args, kind), threads)
    samples[Case("transformers", kind, "first token", threads)].append(worker.start["first_token"])
    for _ in range(args.torch_rounds):
        for test in tests(args):
            for n in args.threads:
                samples[Case("transformers", kind, test, n)].append(worker.rate(test, n))
    samples[Case("transformers", kind, "peak memory", threads)].append(worker.peak())
    worker.end()


def progress(text: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


# The report.


def machine() -> dict[str, object]:
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.split(": ")[1] for line in info if line.startswith("model name")), "unknown")
    return {"cpu": name, "processors": os.cpu_count(), "system": platform.platform()}


def versions(args: argparse.Namespace) -> dict[str, str]:
    packages = ["llama-cpp-python", *(["transformers", "torch"] if args.torch else [])]
    found = {} if args.only_llama else {"boostr": run(args.boostr, "--version").split()[-1]}
    return found | {name: importlib.metadata.version(name) for name in packages}


def markdown(args: argparse.Namespace, report: dict, samples: Samples) -> str:
    """Two tables: speeds; first token and memory."""

    def values(*case: object) -> list[float]:
        return samples.get(Case(*case), [])

    def median(*case: object) -> float | None:
        return statistics.median(values(*case)) if values(*case) else None

    def ratio(ours: list[float], theirs: list[float]) -> float | None:
        return (
            statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) if ours and theirs else None
        )

    def show(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    def megabytes(bytes: float | None) -> str:
        return "" if bytes is None else f"{bytes / 1e6:.0f}"

    def row(*cells: str) -> str:
        return f"| {' | '.join(cells)} |"

    def heading(text: str) -> list[str]:
        names = text.split(", ")
        return ["", row(*names), row(*["---"] * len(names))]

    sides = [*us(args), *peers(args), *(["transformers"] if args.torch else [])]
    has_f32 = "f32" in args.types
    lines = [
        f"{report['machine']['cpu']}, {report['machine']['processors']} processors. "
        + ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        + f". {report['date'][:10]}, {report['rounds']} rounds. `{report['command']}`",
        *heading(
            ", ".join(
                ["weights, test, threads", *sides, *(f"over {who}" for who in peers(args))]
                + [*(f"8 bits over {who}" for who in peers(args) if args.eight), "of limit"]
                + ["over our f32"] * has_f32
            )
        ),
    ]
    for kind in args.types:
        for test in tests(args):
            for threads in args.threads:
                case = (kind, test, threads)
                ours = values("boostr", *case)
                over_f32 = ratio(ours, values("boostr", "f32", test, threads)) if kind != "f32" else None
                lines.append(
                    row(
                        kind,
                        test,
                        str(threads),
                        *(show(median(side, *case), 1) for side in sides),
                        *(show(ratio(ours, values(who, *case)), 2) for who in peers(args)),
                        *(show(ratio(values(EIGHT, *case), values(who, *case)), 2) for who in peers(args) if args.eight),
                        show(median("boostr", kind, f"share of limit in {test}", threads), 2),
                        *[show(over_f32, 2)] * has_f32,
                    )
                )
    threads = max(args.threads)
    sides = [side for side in sides if side != EIGHT]
    others = ", ".join(sides[1:])
    lines += heading(
        f"weights, file MB, first token s: boostr, {others}, peak MB: boostr, less file and state, {others}"
    )
    for kind in args.types:
        size = gguf(args, kind).stat().st_size
        peaks = [median(side, kind, "peak memory", threads) for side in sides]
        state = median("boostr", kind, "state", threads)
        rest = None if peaks[0] is None or state is None else peaks[0] - size - state
        lines.append(
            row(
                kind,
                megabytes(size),
                *(show(median(side, kind, "first token", threads), 3) for side in sides),
                *(megabytes(bytes) for bytes in (peaks[0], rest, *peaks[1:])),
            )
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
