#!/usr/bin/env python3
"""Words a sentence: of each Markdown file, of each `//!` header of a Rust file, and of all of them.

Only prose counts: code blocks, tables, headings, HTML and the targets of links are left out, and a piece
of inline code is one word. A sentence ends at `.`, `!` or `?`, and with its paragraph or list item. A colon
or a semicolon ends none.

  scripts/sentences.py                 a line for each file, the longest means last
  scripts/sentences.py --max 18        only what is above 18: a Markdown file, the mean of all; then exit 1
  scripts/sentences.py --long 30       also print each sentence of 30 words or more
  scripts/sentences.py PATH ..         only these files, by paths from the root of the repository
"""

import argparse
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Folders of builds and packages, and documents of others that stand here as data.
LEFT_OUT = {"target", "node_modules", "people", "vendor"}
LIST_ITEM = re.compile(r"\s*([-*+]|\d+[.)])\s+")
LINK_TARGET = re.compile(r"\[[^\]]+\]:\s")
SENTENCE_END = re.compile(r"(?<=[.!?])[)\"*_]*\s+(?=[^a-z\s]|boostr\b|numr\b|llama\.cpp)")
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|vs|cf|etc|Fig|Sec)\.\s")


def paragraphs(markdown):
    """The paragraphs and list items of a Markdown text, each on one line."""
    lines, fenced = [], False
    for line in markdown.splitlines():
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
            line = ""
        elif fenced or line.lstrip().startswith(("|", "#", "<")) or LINK_TARGET.match(line):
            line = ""
        elif line.startswith("    ") and not lines:  # a code block by indentation
            line = ""
        if not line.strip():
            if lines:
                yield " ".join(lines)
            lines = []
            continue
        if LIST_ITEM.match(line):
            if lines:
                yield " ".join(lines)
            lines = []
            line = LIST_ITEM.sub("", line, count=1)
        lines.append(line.strip())
    if lines:
        yield " ".join(lines)


def sentences(markdown):
    for text in paragraphs(markdown):
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)  # links: their text alone
        text = re.sub(r"``[^`]+``|`[^`]*`", "CODE", text)
        text = ABBREVIATIONS.sub(r"\1 ", text)
        for sentence in SENTENCE_END.split(text):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if words:
                yield len(words), sentence


def header(source):
    """The `//!` lines that a Rust file begins with."""
    return "\n".join(line[3:].removeprefix(" ") for line in source.splitlines() if line.startswith("//!"))


def files():
    """All Markdown and Rust files, by their paths from the root."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT and not name.startswith("."))
        for name in sorted(names):
            if name.endswith((".md", ".rs")):
                yield str((Path(folder) / name).relative_to(ROOT))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files; default: all that git tracks")
    parser.add_argument("--max", type=float, metavar="WORDS", help="fail above this mean")
    parser.add_argument("--long", type=int, metavar="WORDS", help="print sentences of this length or more")
    options = parser.parse_args()

    paths = options.paths or list(files())
    rows, failures = [], []
    for path in paths:
        text = (ROOT / path).read_text(encoding="utf-8")
        found = list(sentences(text if path.endswith(".md") else header(text)))
        if found:
            rows.append((sum(n for n, _ in found) / len(found), len(found), path, found))
    for mean, count, path, found in sorted(rows):
        if not options.max:
            print(f"{mean:5.1f}  {count:4} sentences  {path}")
        for words, sentence in found:
            if options.long and words >= options.long:
                print(f"         {words}: {sentence}")
        if options.max and path.endswith(".md") and mean > options.max:
            failures.append(f"{path}: {mean:.1f} words a sentence")
    count = sum(row[1] for row in rows)
    mean = sum(row[0] * row[1] for row in rows) / max(count, 1)
    print(f"{mean:5.1f}  {count:4} sentences  in all")
    if options.max and mean > options.max:
        failures.append(f"all together: {mean:.1f} words a sentence")
    for failure in failures:
        print(f"error: {failure}, expected at most {options.max:g}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
