#!/usr/bin/env python3
"""Folders of small files, as libFuzzer keeps them, from and to one file with a JSON string on each line.

    corpus.py pack [--bytes] FOLDER FILE.jsonl
    corpus.py unpack [--bytes] FILE.jsonl FOLDER

With --bytes a string has a letter for each byte, U+0000 to U+00FF; else it is the file's text.
"""

import hashlib
import json
import sys
from pathlib import Path


def text_of(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        return data[: error.start].decode(encoding)  # So much of it is a target given.


def pack(folder: Path, file: Path, encoding: str) -> None:
    texts = {text_of(path.read_bytes(), encoding) for path in folder.iterdir()}
    lines = sorted(json.dumps(text, ensure_ascii=True) for text in texts)
    file.write_text("\n".join(lines) + "\n")


def unpack(file: Path, folder: Path, encoding: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for line in file.read_text().splitlines():
        data = json.loads(line).encode(encoding)
        # The name that libFuzzer would give it.
        (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)


if __name__ == "__main__":
    commands = {"pack": pack, "unpack": unpack}
    words = [word for word in sys.argv[1:] if word != "--bytes"]
    if len(words) != 3 or words[0] not in commands:
        sys.exit(__doc__)
    encoding = "latin-1" if "--bytes" in sys.argv else "utf-8"
    commands[words[0]](Path(words[1]), Path(words[2]), encoding)
