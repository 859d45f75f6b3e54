#!/usr/bin/env python3
"""What the original implementation makes of the embedded model: writes models/default/expected.json.

    pip install torch transformers
    python scripts/demo_golden.py

transformers itself loads the folder that `boostr train` wrote, and continues a prompt greedily on the CPU in f32.
`boostr doctor` and the tests compare ids. The smallest lead of a chosen id over the next best is printed: far above
rounding, it makes the comparison a fair one.
"""
import json
from pathlib import Path

import torch
import transformers

PROMPT = "It is a truth universally acknowledged"
COUNT = 24
FOLDER = Path(__file__).resolve().parent.parent / "models/default"


def main():
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    prompt = tokenizer.encode(PROMPT, add_special_tokens=False)
    ids, lead = [], float("inf")
    with torch.no_grad():
        for _ in range(COUNT):
            logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0, -1]
            best, second = logits.topk(2).values.tolist()
            lead = min(lead, best - second)
            ids.append(int(logits.argmax()))
    expected = {
        "prompt": PROMPT,
        "prompt_ids": prompt,
        "greedy_ids": ids,
        "greedy_text": tokenizer.decode(ids),
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]} CPU f32",
    }
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(f"{expected['greedy_text']!r}, smallest lead {lead:.3f}")


if __name__ == "__main__":
    main()
