#!/usr/bin/env bash
# Starts `boostr serve` on a free port, lets clients from outside check it, and ends it as a supervisor would.
#
#     scripts/serve_check.sh target/release/boostr        # OpenAI's client (by pip); the page in chromium, which CI must have
set -euo pipefail
cd "$(dirname "$0")/.."
boostr=$(realpath "$1")
work=$(mktemp -d)
pid=
trap '[ -z "$pid" ] || kill -9 "$pid" 2>/dev/null || true; rm -rf "$work"' EXIT

python3 -m pip install --quiet --disable-pip-version-check --target "$work/python" openai==3.57.0

"$boostr" serve --port 0 --sessions "$work/sessions" --state-cache 16MiB >"$work/address" 2>"$work/log" &
pid=$!
for _ in $(seq 100); do
    [ -s "$work/address" ] && break
    sleep 0.1
done
url=$(head -n 1 "$work/address")
[ -n "$url" ] || { cat "$work/log" >&2; echo "error: the server did not say its address in 10 s" >&2; exit 1; }
python3 -c "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())" "$url/health"

PYTHONPATH="$work/python" python3 scripts/server_clients/openai_client.py "$url"

browser=${CHROMIUM:-$(command -v chromium || true)}
if [ -n "$browser" ] && command -v npm >/dev/null; then
    (cd scripts/page_test && npm ci --silent && CHROMIUM=$browser node page_test.mjs --url "$url" --shots "$work/shots")
elif [ "${CI:-}" = true ]; then
    echo "error: no chromium or no npm: the page cannot be driven" >&2
    exit 1
else
    echo "no chromium or no npm here: the page is not driven"
fi

kill -TERM "$pid"
wait "$pid" || { echo "error: the server did not end with 0 after SIGTERM" >&2; exit 1; }
pid=
echo "the server ended"
