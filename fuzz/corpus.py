#!/usr/bin/env python3
"""Folders of small text files, as libFuzzer keeps them, from and to one file with a JSON string on each line.

    corpus.py pack FOLDER FILE.jsonl
    corpus.py unpack FILE.jsonl FOLDER
"""

import json
import sys
from pathlib import Path


def pack(folder: Path, file: Path) -> None:
    texts = set()
    for path in folder.iterdir():
        data = path.read_bytes()
        try:
            texts.add(data.decode())
        except UnicodeDecodeError as error:
            texts.add(data[: error.start].decode())  # So much of it is a target given.
    lines = sorted(json.dumps(text, ensure_ascii=True) for text in texts)
    file.write_text("\n".join(lines) + "\n")


def unpack(file: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, line in enumerate(file.read_text().splitlines()):
        (folder / f"{number:05}").write_bytes(json.loads(line).encode())


if __name__ == "__main__":
    commands = {"pack": pack, "unpack": unpack}
    if len(sys.argv) != 4 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
