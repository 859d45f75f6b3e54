"""Checks of one client: each is a function with a sentence, and prints one line."""

import sys
import traceback

URL, MODEL = sys.argv[1].rstrip("/"), sys.argv[2]
CHECKS = []

PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}


def check(sentence):
    def keep(function):
        CHECKS.append((sentence, function))
        return function

    return keep


def run(client):
    failed = 0
    for sentence, function in CHECKS:
        try:
            function()
            print(f"ok    {client}: {sentence}", flush=True)
        except Exception as error:  # whatever a client throws is a failed check
            failed += 1
            print(f"FAIL  {client}: {sentence}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            where = traceback.extract_tb(error.__traceback__)[0:3]
            print("".join(f"      {frame.filename}:{frame.lineno}: {frame.line}\n" for frame in where), end="", file=sys.stderr)
    raise SystemExit(1 if failed else 0)
