#!/usr/bin/env bash
# Lets libFuzzer run each target for so many minutes on one core, from the committed corpora. A line for each run: executions,
# minutes, executions a second, inputs that it kept, the slowest input in seconds, the most memory in MB, crashes.
#
#     scripts/fuzz.sh [--pack] MINUTES [TARGET ...]        # all targets of fuzz/fuzz_targets
#
# templates and grammars run twice: with small inputs, and with up to 64 KiB and 5 s for each. With --pack the smallest set of
# inputs that reaches the same code becomes the committed corpus. Exit code 1: an input crashed or took too long or too
# much memory, and its path is said. Exit code 2: cargo-fuzz is not there.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! cargo +nightly fuzz --version >/dev/null 2>&1; then
    echo "error: cargo-fuzz and a nightly toolchain are needed: rustup toolchain install nightly && cargo install cargo-fuzz" >&2
    exit 2
fi
pack=
[ "${1:-}" != --pack ] || { pack=1; shift; }
case "${1:-}" in
    '' | *[!0-9.]*) sed -n '/^#   /p' "$0" >&2; exit 2 ;;
esac
seconds=$(awk "BEGIN { print int($1 * 60) }")
shift
targets=("$@")
[ ${#targets[@]} -gt 0 ] || for file in fuzz/fuzz_targets/*.rs; do targets+=("$(basename "$file" .rs)"); done

cargo +nightly fuzz build -s none
programs=fuzz/target/$(rustc +nightly -vV | sed -n 's/^host: //p')/release
library=crates/boostr/tests/corpus
# Targets write their files there.
[ ! -w /dev/shm ] || export TMPDIR=/dev/shm
crashed=0

# corpus_of TARGET: the committed corpus, and how its inputs are written.
corpus_of() {
    case $1 in
        gguf_bytes) echo "$library/gguf/fuzz" ;;
        requests | paths) echo "crates/server/tests/corpus/$1.jsonl" ;;
        heads) echo "crates/server/tests/corpus/$1.jsonl --bytes" ;;
        torch) echo "$library/$1.jsonl --bytes" ;;
        states | gguf_fields) echo "fuzz/corpora/$1.jsonl --bytes" ;;
        *) echo "$library/$1.jsonl" ;;
    esac
}

# options_of TARGET: the longest input, the longest time in seconds, the most memory in MB.
options_of() {
    case $1 in
        gguf_bytes) echo "-max_len=6500 -timeout=1 -rss_limit_mb=1024" ;;
        gguf_fields) echo "-max_len=1024 -timeout=1 -rss_limit_mb=1024" ;;
        states) echo "-max_len=512 -timeout=1 -rss_limit_mb=1024" ;;
        tokenizers) echo "-max_len=4000 -timeout=5 -rss_limit_mb=2048" ;;
        configs | torch | heads) echo "-max_len=4000 -timeout=1 -rss_limit_mb=1024" ;;
        *) echo "-max_len=1000 -timeout=1 -rss_limit_mb=1024" ;;
    esac
}

unpack() {
    local target=$1 file how
    read -r file how <<<"$(corpus_of "$target")"
    mkdir -p "fuzz/corpus/$target" "fuzz/artifacts/$target"
    if [ "$target" = gguf_bytes ]; then
        cp "$file"/* "$library"/gguf/*.gguf "fuzz/corpus/$target"
    elif [ -e "$file" ]; then
        # shellcheck disable=SC2086 # `how` may be nothing
        fuzz/corpus.py unpack $how "$file" "fuzz/corpus/$target"
    fi
}

# run TARGET TITLE OPTION ...: lets it run, and prints its line.
run() {
    local target=$1 title=$2 log begin took status=0 dictionary=()
    shift 2
    log=$(mktemp)
    [ ! -e "fuzz/dictionaries/$target.dict" ] || dictionary=("-dict=fuzz/dictionaries/$target.dict")
    begin=$(date +%s.%N)
    # shellcheck disable=SC2046 # several options
    "$programs/$target" $(options_of "$target") "$@" "${dictionary[@]}" -max_total_time="$seconds" -print_final_stats=1 \
        -artifact_prefix="fuzz/artifacts/$target/" "fuzz/corpus/$target" >"$log" 2>&1 || status=$?
    took=$(awk "BEGIN { print $(date +%s.%N) - $begin }")
    stat() { sed -n "s/^stat::$1: *//p" "$log"; }
    local executions
    executions=$(stat number_of_executed_units)
    printf '%-16s %10s %8.1f %9.0f %6s %8s %8s %7s\n' "$title" "${executions:-0}" "$(awk "BEGIN { print $took / 60 }")" \
        "$(awk "BEGIN { print ${executions:-0} / $took }")" "$(stat new_units_added)" "$(stat slowest_unit_time_sec)" \
        "$(stat peak_rss_mb)" "$((status != 0))"
    if [ $status -ne 0 ]; then
        crashed=1
        sed -n 's/^.*Test unit written to /    input: /p' "$log"
        echo "    log: $log"
    else
        rm "$log"
    fi
}

# pack TARGET: the smallest set of inputs that reaches what all reach, as the committed corpus.
pack() {
    local target=$1 file how least
    read -r file how <<<"$(corpus_of "$target")"
    least=$(mktemp -d)
    # The files that the other target of GGUF stands for count too.
    [ "$target" != gguf_bytes ] || GGUF_DUMP=fuzz/corpus/$target "$programs/gguf_fields" -runs=0 fuzz/corpus/gguf_fields \
        >/dev/null 2>&1
    # shellcheck disable=SC2046 # several options
    "$programs/$target" $(options_of "$target") -timeout=20 -set_cover_merge=1 -use_counters=0 "$least" \
        "fuzz/corpus/$target" >"$least.log" 2>&1 ||
        { echo "error: $target could not be made smaller, see $least.log" >&2; exit 1; }
    if [ "$target" = gguf_bytes ]; then
        rm "$file"/*
        cp "$least"/* "$file"
    else
        mkdir -p "$(dirname "$file")"
        # shellcheck disable=SC2086
        fuzz/corpus.py pack $how "$least" "$file"
    fi
    echo "    $(find "$least" -type f | wc -l) inputs in $file"
    rm -r "$least" "$least.log"
}

printf '%-16s %10s %8s %9s %6s %8s %8s %7s\n' target executions minutes 'a second' kept slowest memory crashes
for target in "${targets[@]}"; do
    [ -x "$programs/$target" ] || { echo "error: there is no target $target: see fuzz/README.md" >&2; exit 2; }
    unpack "$target"
    [ "$target" != gguf_bytes ] || unpack gguf_fields
    run "$target" "$target"
    case $target in
        templates | grammars) run "$target" "$target, 64 KiB" -max_len=65536 -timeout=5 -len_control=0 ;;
    esac
    [ -z "$pack" ] || pack "$target"
done
exit $crashed
