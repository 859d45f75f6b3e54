//! The program `boostr`: the library `boostr_cli` on an allocator of its own.

#![deny(unsafe_code)]

use std::process::ExitCode;

// A server holds states for long between buffers that live for a step: the C library's heap grows by
// what is left between them (docs/performance.md, "Memory of a server").
#[cfg(unix)]
#[allow(unsafe_code, reason = "an allocator, and the name under which jemalloc finds its settings")]
mod allocator;

#[cfg(unix)]
#[global_allocator]
static ALLOCATOR: allocator::Allocator = allocator::Allocator;

fn main() -> ExitCode {
    boostr_cli::main(std::env::args_os())
}
