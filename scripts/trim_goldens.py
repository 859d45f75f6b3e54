#!/usr/bin/env python3
"""The tensors of a golden.safetensors that the tests read, in a file of their own.

    trim_goldens.py FULL_FOLDER OUT_FOLDER

Copies a model folder; of golden.safetensors it keeps what tests/golden.rs names.
"""
import json
import shutil
import sys
from pathlib import Path

KEEP = {"input_ids", "logits_f64", "logits", "greedy_ids", "greedy_logits", "b2_right_ids", "b2_greedy_ids",
        "b2_logits_row1", "noclamp.logits_f64", "noclamp.greedy_ids", "noclamp.greedy_logits"}
PREFIXES = ("prefill.", "noclamp.prefill.")


def main() -> None:
    full, out = map(Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "config.hf5.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                 "tokenizer_config.json"):
        if (full / name).exists():
            shutil.copyfile(full / name, out / name)
    data = (full / "golden.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    body = data[8 + size:]
    clamped = "noclamp.logits_f64" in header
    new, parts, offset = {}, [], 0
    for name, entry in header.items():
        kept = name in KEEP or name.startswith(PREFIXES)
        if name == "logits" and not clamped or name == "logits_f64" and clamped:
            kept = False  # one of the two is enough
        if not kept:
            continue
        begin, end = entry["data_offsets"]
        parts.append(body[begin:end])
        new[name] = {**entry, "data_offsets": [offset, offset + end - begin]}
        offset += end - begin
    text = json.dumps(new).encode()
    text += b" " * (-len(text) % 8)
    (out / "golden.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


if __name__ == "__main__":
    main()
