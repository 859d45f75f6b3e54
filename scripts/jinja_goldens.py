#!/usr/bin/env python3
"""Runs templates in jinja2: what crates/boostr/tests/it/jinja.rs compares with.

    pip install jinja2==3.1.6
    python scripts/jinja_goldens.py

Reads the templates of crates/boostr/tests/data/jinja.txt, one a line with its line ends spelled `⏎`, and writes
jinja.jsonl beside it: each template with its text, or null where jinja2 fails. The environment is that of
scripts/chat_goldens.py.
"""

import json
from pathlib import Path

from chat_goldens import environment, prepared

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "crates/boostr/tests/data"
REQUEST = json.loads((DATA / "people/template-python-arguments/request.json").read_text("utf-8"))


def rendered(template):
    try:
        return environment().from_string(template).render(
            messages=[prepared(message) for message in REQUEST["messages"]],
            tools=REQUEST["tools"],
            documents=None,
            add_generation_prompt=False,
        )
    except Exception:
        return None


def main():
    lines = (DATA / "jinja.txt").read_text("utf-8").split("\n")
    templates = [line.replace("⏎", "\n") for line in lines if line and not line.startswith("#:")]
    with (DATA / "jinja.jsonl").open("w", encoding="utf-8") as out:
        for template in templates:
            case = {"template": template, "jinja2": rendered(template)}
            out.write(json.dumps(case, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
