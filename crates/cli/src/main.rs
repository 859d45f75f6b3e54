//! The program `boostr`: the library `boostr_cli` on an allocator of its own.

#![deny(unsafe_code)]

use std::process::ExitCode;

// A server holds states for long between buffers that live for a step: the C library's heap grows by
// what is left between them (docs/performance.md, "Memory of a server").
#[cfg(unix)]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    boostr_cli::main(std::env::args_os())
}
