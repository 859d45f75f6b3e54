#!/usr/bin/env bash
# Sends requests made from /openapi.json to a server: none may be answered with a 5xx.
#
#     pip install schemathesis==4.32.0
#     scripts/server_clients/schemathesis.sh http://127.0.0.1:8080 [--key KEY] [--requests 2000] [--seed 1] [-- MORE OPTIONS]
#
# Exits with 1 where a request was answered with a 5xx or by no valid HTTP, or where fewer than asked for were sent.
set -euo pipefail

url=${1:?usage: schemathesis.sh URL [--key KEY] [--requests N] [--seed N]}
shift
key='' requests=2000 seed=1
while [ $# -gt 0 ]; do
    case $1 in
        --key) key=$2; shift 2 ;;
        --requests) requests=$2; shift 2 ;;
        --seed) seed=$2; shift 2 ;;
        --) shift; break ;;
        *) printf 'unknown option %s\n' "$1" >&2; exit 2 ;;
    esac
done
command -v schemathesis >/dev/null || { echo 'error: no schemathesis: pip install schemathesis==4.32.0' >&2; exit 2; }

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" # its caches stay here
curl --fail --silent --show-error ${key:+-H "Authorization: Bearer $key"} "$url/openapi.json" >openapi.json
operations=$(python3 -c '
import json
methods = {"get", "post", "put", "delete", "patch", "head", "options"}
print(sum(len(methods & set(path)) for path in json.load(open("openapi.json"))["paths"].values()))')
each=$((requests / operations + 1))

status=0
seen=0
# One pass may find fewer different requests than it was asked for: further ones, with other seeds, make up for it.
for ((pass = 0; seen < requests && pass < 12 && status == 0; pass++)); do
    schemathesis run "$url/openapi.json" --url "$url" ${key:+-H "Authorization: Bearer $key"} \
        --checks not_a_server_error --max-examples "$each" --seed $((seed + pass)) --phases examples,coverage,fuzzing \
        --max-failures 20 --request-timeout 60 --workers 2 --report ndjson --report-ndjson-path "report-$pass.ndjson" "$@" \
        >"out-$pass.txt" 2>&1 || status=$?
    seen=$(cat report-*.ndjson | python3 -c '
import json, sys
count = 0
for line in sys.stdin:
    try: event = json.loads(line)
    except ValueError: continue
    finished = event.get("ScenarioFinished")
    if finished: count += len(finished.get("recorder", {}).get("interactions", {}))
print(count)')
    echo "pass $((pass + 1)): $seen requests so far to $operations operations, schemathesis ended with $status"
done
[ $status -eq 0 ] || { cat "out-$((pass - 1)).txt"; echo "FAIL  schemathesis ended with $status"; exit 1; }
[ "$seen" -ge "$requests" ] || { echo "FAIL  only $seen of $requests requests"; exit 1; }
echo "ok    $seen requests, none answered with a 5xx"
