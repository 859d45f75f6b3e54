#!/usr/bin/env bash
# From text to a quantized model that speaks, in a minute or less: train, stop, resume, run, measure, quantize, tune, merge.
#
#   scripts/train_circle.sh [BOOSTR] [SECONDS]      the program (target/release/boostr) and how long it trains (10)
set -euo pipefail

cd "$(dirname "$0")/.."
boostr="${1:-${CARGO_TARGET_DIR:-target}/release/boostr}"
seconds="${2:-10}"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

say() { printf '\n-- %s\n' "$*"; }
# The text: our own documents.
cat ARCHITECTURE.md README.md CONTRIBUTING.md docs/*.md > "$folder/train.txt"
cat CHANGELOG.md > "$folder/valid.txt"

say "train for $seconds s, then stop as Ctrl-C does"
"$boostr" train --data "$folder/train.txt" --valid "$folder/valid.txt" --out "$folder/a" --preset tiny --steps 100000 \
    --lr 0.003 --eval-every 50 &
trainer=$!
sleep "$seconds"
kill -INT "$trainer"
wait "$trainer" && code=0 || code=$?
[ "$code" = 130 ] || { echo "train ended with $code, not 130" >&2; exit 1; }

say "the loss fell"
python3 - "$folder/a/metrics.jsonl" <<'PY'
import json, sys
losses = [json.loads(line)["loss"] for line in open(sys.argv[1])]
print(f"{len(losses)} steps: {losses[0]:.3f} -> {min(losses):.3f}")
assert min(losses) < 0.9 * losses[0], "the loss did not fall"
PY

say "go on for 2 s"
"$boostr" train --resume "$folder/a" --time 2
say "it speaks"
"$boostr" run "$folder/a" -p "A model" -n 40
say "measured"
"$boostr" eval "$folder/a" --data "$folder/valid.txt"
say "quantized"
"$boostr" quantize "$folder/a" "$folder/a-q8_0.gguf" -T q8_0 --measure "$folder/valid.txt" | tail -n 2
"$boostr" run "$folder/a-q8_0.gguf" -p "A model" -n 20
say "adapters, and the model with them in it"
"$boostr" tune "$folder/a" --data "$folder/valid.txt" --out "$folder/b" --lora 4 --steps 5
"$boostr" tune "$folder/a" --merge "$folder/b" --out "$folder/c"
"$boostr" eval "$folder/c" --data "$folder/valid.txt"
