#!/usr/bin/env bash
# Runs the kernels' tests for 64-bit Arm (levels neon and neon-dotprod) by qemu-user, on a machine of
# any kind. Says what is missing where it cannot; not part of .ci/run.
set -euo pipefail
cd "$(dirname "$0")/.."

target=aarch64-unknown-linux-gnu
missing=()
[ -d "$(rustc --print sysroot)/lib/rustlib/$target" ] ||
    missing+=("the Rust target: rustup target add $target")
command -v aarch64-linux-gnu-gcc >/dev/null ||
    missing+=("a linker, aarch64-linux-gnu-gcc: Debian's gcc-aarch64-linux-gnu and libc6-dev-arm64-cross")
command -v qemu-aarch64 >/dev/null || missing+=("qemu-aarch64: Debian's qemu-user")
if [ ${#missing[@]} -gt 0 ]; then
    printf 'missing: %s\n' "${missing[@]}" >&2
    exit 1
fi

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
cargo test -p boostr-kernels --target "$target" "$@"
