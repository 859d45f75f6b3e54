"""Cuts gpt-neox-20b's tokenizer.json to what the golden texts need, with unchanged ids.

A merge that no step of encoding these texts chooses can go without changing any step: each step takes the
best-ranked pair present. Usage: make_neox_subset.py gpt-neox-20b.json neox-golden.jsonl OUT
Needs: regex.
"""

import json
import sys
import unicodedata

import regex

SPLIT = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def byte_characters():
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


def main(source, golden, out):
    data = json.load(open(source))
    merges = [m.split(" ") if isinstance(m, str) else m for m in data["model"]["merges"]]
    rank = {tuple(pair): n for n, pair in enumerate(merges)}
    characters = byte_characters()
    runs = sorted((t["content"] for t in data["added_tokens"] if not t["special"]), key=len)
    pieces = regex.compile("|".join(regex.escape(r) for r in reversed(runs)))
    used = set()
    for line in open(golden):
        text = unicodedata.normalize("NFC", json.loads(line)["text"])
        for piece in pieces.split(text):
            for word in SPLIT.findall(piece):
                symbols = [characters[b] for b in word.encode()]
                while True:
                    pairs = [p for p in zip(symbols, symbols[1:]) if p in rank]
                    if not pairs:
                        break
                    best = min(pairs, key=rank.get)
                    used.add(best)
                    merged, n = [], 0
                    while n < len(symbols):
                        if tuple(symbols[n : n + 2]) == best:
                            merged.append("".join(best))
                            n += 2
                        else:
                            merged.append(symbols[n])
                            n += 1
                    symbols = merged
    kept = set(characters.values()) | {"".join(p) for p in used} | {s for p in used for s in p}
    ids = {t: n for t, n in data["model"]["vocab"].items() if t in kept}
    # In the vocabulary too, so that they keep their ids above the gap.
    ids |= {t["content"]: t["id"] for t in data["added_tokens"]}
    data["model"]["vocab"] = dict(sorted(ids.items(), key=lambda item: item[1]))
    data["model"]["merges"] = [" ".join(m) for m in merges if tuple(m) in used]
    json.dump(data, open(out, "w"), ensure_ascii=False, indent=1)


main(*sys.argv[1:])
