#!/usr/bin/env bash
# Starts `boostr serve` on a free port and lets clients from PyPI and npm use it, each through its own API. A line for each check.
#
#     scripts/clients.sh target/debug/boostr [CHECK ...]        # names of scripts/clients/check_*.py; all of them
#
# Packages come into a scratch folder, or into $CLIENTS_ENV, a folder that is kept for the next run, with those of npm in
# $CLIENTS_ENV-npm. Chromium has to be there, by that name or as $CHROMIUM.
set -euo pipefail
cd "$(dirname "$0")/.."
boostr=$(realpath "$1")
shift
checks=("$@")
[ ${#checks[@]} -gt 0 ] || checks=(openai agents anthropic ollama litellm lm_eval langchain pydantic_ai instructor npm)
work=$(mktemp -d)
pid=
trap '[ -z "$pid" ] || kill -9 "$pid" 2>/dev/null || true; rm -rf "$work"' EXIT

packages=(openai==3.57.0 openai-agents==0.24.0 anthropic==2.14.0 ollama==0.6.3 litellm==1.110.2
    'lm-eval[api]==0.4.13' transformers==5.24.0)
# These want an older package of OpenAI than the others.
older=(langchain-openai==1.7.4 'pydantic-ai-slim[openai]==2.38.0' instructor==1.17.0)
environment=${CLIENTS_ENV:-$work/env}
install() {
    local folder=$1
    shift
    [ -d "$folder" ] || python3 -m venv "$folder"
    "$folder/bin/pip" install --quiet --disable-pip-version-check "$@"
}
install "$environment" "${packages[@]}"
install "$environment-older" "${older[@]}"

"$boostr" serve --port 0 --alias demo --no-sessions --state-cache 16MiB >"$work/address" 2>"$work/log" &
pid=$!
for _ in $(seq 300); do
    [ -s "$work/address" ] && break
    sleep 0.1
done
url=$(head -n 1 "$work/address")
[ -n "$url" ] || { cat "$work/log" >&2; echo "error: the server did not say its address in 30 s" >&2; exit 1; }

status=0
for check in "${checks[@]}"; do
    case $check in
        langchain | pydantic_ai | instructor) python=$environment-older/bin/python ;;
        *) python=$environment/bin/python ;;
    esac
    BOOSTR=$boostr WORK=$work NPM=$environment-npm HF_HUB_OFFLINE=1 LITELLM_LOCAL_MODEL_COST_MAP=True \
        "$python" "scripts/clients/check_$check.py" "$url" demo 2>"$work/$check.log" && continue
    status=1
    tail -n 20 "$work/$check.log"
done
kill -TERM "$pid"
wait "$pid" || { echo "error: the server did not end with 0 after SIGTERM" >&2; exit 1; }
pid=
exit $status
