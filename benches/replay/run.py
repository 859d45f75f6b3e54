#!/usr/bin/env python3
"""Replays traces of requests, and counts the tokens of prompts that a server computed beside those that it had to.

    run.py target/release/boostr [--traces agent,chats] [--models pure] [--memory 8,default]
    run.py target/release/boostr --llama-server build/bin/llama-server

A token had to be computed if it comes after the longest prefix that the prompt shares with an earlier prompt.
Answers are not counted as known: a server that keeps their states may compute less than that. Models and results
go to target/replay (results.json, results.md). Needs Python alone.
"""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import traces

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "target/replay"


def shared(a: bytes, b: bytes) -> int:
    """How many ids of four bytes two lists begin with alike."""
    low, high = 0, min(len(a), len(b)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[: 4 * middle] == b[: 4 * middle] else (low, middle - 1)
    return low


@dataclass
class Server:
    """A server's process and its address."""

    command: list[str]
    log: Path
    url: str = ""
    process: subprocess.Popen | None = field(default=None, repr=False)

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = re.findall(r"http://127\.0\.0\.1:\d+", self.log.read_text())
            try:
                self.url = found[-1]
                urllib.request.urlopen(self.url + "/health").close()
                return
            except (IndexError, OSError):
                time.sleep(0.1)
            if self.process.poll() is not None:
                break
        sys.exit(f"error: {self.command[0]} did not start; see {self.log}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def post(self, path: str, body: dict) -> dict:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def kept(self) -> float:
        """Bytes of the states that it keeps, where it tells."""
        if "serve" not in self.command:
            return 0.0
        name = "snapshot_bytes"
        text = urllib.request.urlopen(self.url + "/metrics").read().decode()
        found = re.search(rf"^boostr_{name} (\S+)$", text, re.M)
        return float(found[1]) if found else sys.exit(f"error: no metric boostr_{name}")


def own_answers(messages: list, answers: list[str]) -> list:
    """The messages with what the server answered in the places where it is wanted."""
    left = iter(answers)
    return [{**it, "content": next(left)} if it.get("content") is traces.OWN else it for it in messages]


def replay(server: Server, trace) -> dict:
    prompts: list[bytes] = []
    answers: dict[str, list[str]] = {}
    row = {"requests": 0, "prompt": 0, "needed": 0, "computed": 0, "hits": 0, "longest": 0}
    kept, began = 0.0, time.monotonic()
    for name, body in trace():
        if body is None:
            server.stop()
            server.start()
            continue
        own = answers.setdefault(name, [])
        bodies = [{**one, "messages": own_answers(one["messages"], own)} for one in (body if isinstance(body, list) else [body])]
        sizes = []
        for one in bodies:
            question = {key: one[key] for key in ("messages", "tools") if key in one}
            text = server.post("/apply-template", question)["prompt"]
            found = server.post("/tokenize", {"content": text, "add_special": False, "parse_special": True})
            ids = array("I", found["tokens"]).tobytes()
            known = max((shared(ids, other) for other in prompts), default=0)
            prompts.append(ids)
            sizes.append((len(ids) // 4, known))
        with ThreadPoolExecutor(len(bodies)) as pool:
            got = list(pool.map(lambda one: server.post("/v1/chat/completions", {**one, "cache_prompt": True}), bodies))
        for answer, (size, known) in zip(got, sizes, strict=True):
            own.append(answer["choices"][0]["message"].get("content") or "")
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            if usage["prompt_tokens"] != size:
                sys.exit(f"error: the prompt has {usage['prompt_tokens']} tokens, and {size} by /tokenize")
            row["requests"] += 1
            row["prompt"] += size
            row["needed"] += size - known
            row["computed"] += size - cached
            row["hits"] += cached > 0
            row["longest"] = max(row["longest"], size)
            if os.environ.get("REPLAY_VERBOSE"):
                print(f"  {name}: {size} ids, {known} shared, {cached} cached", file=sys.stderr)
        kept = max(kept, server.kept())
    return {**row, "kept": kept, "seconds": time.monotonic() - began}


def state_sizes(boostr: str, model: Path) -> tuple[int, int]:
    """Bytes of a state without its keys, and of a token's keys and values."""
    shown = json.loads(subprocess.check_output([boostr, "show", str(model), "--json"], stderr=subprocess.DEVNULL))
    return shown["state_bytes"], shown["state_bytes_per_token"]


def llama_server(args: argparse.Namespace, model: Path) -> list[str]:
    """llama-server's command on the same weights, with its defaults, and a context for the longest trace."""
    gguf = model.with_suffix(".gguf")
    if not gguf.exists():
        subprocess.run([args.boostr, "convert", model, gguf], check=True, stdout=subprocess.DEVNULL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [args.llama_server, "-m", str(gguf), "--port", str(port), "-c", "32768", *args.options.split()]


def cell(row: dict) -> str:
    ratio = row["computed"] / max(row["needed"], 1)
    return f"{row['computed']:,} / {row['needed']:,} = **{ratio:.2f}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("boostr")
    parser.add_argument("--traces", default=",".join(traces.ALL))
    parser.add_argument("--models", default="pure,hybrid,attention")
    parser.add_argument("--memory", default="8,default", help="states, with the pages of the longest history; or default")
    parser.add_argument("--options", default="", help="more options of the server, in one word")
    parser.add_argument("--llama-server", help="this program in place of boostr serve, with its own defaults")
    args = parser.parse_args()
    models = WORK / "models"
    if not (models / "attention/model.safetensors").exists():
        subprocess.run([sys.executable, Path(__file__).with_name("make_models.py"), models], check=True)
    results = []
    for model in args.models.split(","):
        for trace in args.traces.split(","):
            for memory in ["default"] if args.llama_server else args.memory.split(","):
                folder = WORK / "runs" / f"{model}-{trace}-{memory}"
                subprocess.run(["rm", "-rf", folder], check=True)
                folder.mkdir(parents=True)
                command = [args.boostr, "serve", str(models / model), "--port", "0", *args.options.split()]
                command += ["--sessions", str(folder / "sessions"), "--state-cache-dir", str(folder / "states")]
                if memory != "default":
                    state, per_token = state_sizes(args.boostr, models / model)
                    longest = {"document": 26_000, "agent": 28_000}.get(trace, 8_000)
                    command += ["--state-cache", str(int(memory) * state * 21 // 20 + longest * per_token)]
                if args.llama_server:
                    command = llama_server(args, models / model)
                server = Server(command, folder / "log")
                server.start()
                try:
                    row = replay(server, traces.ALL[trace])
                finally:
                    server.stop()
                results.append({"server": Path(command[0]).name, "model": model, "trace": trace, "memory": memory, **row})
                print(f"{model:10} {trace:10} {memory:8} {cell(row)}  hits {row['hits']}/{row['requests']}, longest {row['longest']:,}, "
                      f"kept {row['kept'] / 2**20:.1f} MiB, {row['seconds']:.0f} s", flush=True)
    (WORK / "results.json").write_text(json.dumps(results, indent=1))
    lines = ["| model | trace | memory | computed / needed | hits | kept, MiB |", "|---|---|---|---|---|---|"]
    lines += [f"| {it['model']} | {it['trace']} | {it['memory']} | {cell(it)} | {it['hits']}/{it['requests']} | {it['kept'] / 2**20:.1f} |" for it in results]
    (WORK / "results.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
