# Shortcuts; nothing here is needed to build. `just` lists them.

default:
    @just --list

# All that CI checks.
check:
    .ci/run

# Format.
fmt:
    cargo fmt

# Lint as CI does.
clippy:
    cargo clippy --workspace --all-targets -- -D warnings

# Tests.
test:
    cargo test --workspace

# Tests that take minutes.
test-long:
    cargo test --workspace --release -- --ignored

# Build and open the documentation.
doc:
    cargo doc --workspace --no-deps --open

# Measure the SSD operation and a model of random weights.
bench:
    cargo run --release -- bench ssd
    cargo run --release -- bench --synthetic mamba2-130m

# Run the embedded model.
demo *args:
    cargo run --release -- {{ args }}

# OpenAI's client and, where there is chromium, a browser on the built server.
serve-check:
    cargo build --release
    scripts/serve_check.sh target/release/boostr

# Dependencies: licences, advisories, sources (cargo install cargo-deny).
deny:
    cargo deny check
