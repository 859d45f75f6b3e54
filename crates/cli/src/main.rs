//! The command line of boostr: one file per command, and no arithmetic of its own.
//!
//! Answers go to stdout, everything else to stderr. A run ends with one of these codes:
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done, also when whoever read the output went away |
//! | 1 | failure |
//! | 2 | wrong usage |
//! | 3 | bad model file |
//! | 4 | more memory than there is |
//! | 130 | interrupted |

#![deny(unsafe_code)]

// A server holds states for long between buffers that live for a step: the C library's heap grows by
// what is left between them (docs/performance.md, "Memory of a server").
#[cfg(unix)]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

mod args;
mod batch;
mod bench;
mod chat;
mod chat_prompt;
mod checks;
mod completions;
mod convert;
mod doctor;
mod draft;
mod eval;
mod exit;
mod grammar;
mod logits;
mod model;
mod places;
mod prompt;
mod run;
mod sampling;
mod serve;
mod show;
mod state;
mod stream;
mod system;
mod term;
mod tokenizer;
mod train;
mod verify;

use std::process::ExitCode;

use anyhow::Context;

use args::{Cli, Command};
use term::Term;

/// Workers get the stack that a main thread has: they run the whole command.
const STACK: usize = 8 << 20;

fn main() -> ExitCode {
    let (cli, bare) = match args::parse(std::env::args_os().collect()) {
        Ok(parsed) => parsed,
        Err(error) => {
            // Help and errors go where clap wants them; a reader that left is no failure.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(exit::FAILURE));
        }
    };
    let term = Term::new(&cli.common);
    match dispatch(cli, bare, &term) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error, &term),
    }
}

/// Runs the command inside a pool of the wished number of threads.
fn dispatch(cli: Cli, bare: bool, term: &Term) -> anyhow::Result<()> {
    if let Command::Bench(args) = &cli.command {
        return bench::run(args, &cli.common.threads);
    }
    let threads = match cli.common.threads[..] {
        [] => 0,
        [threads] => threads,
        _ => return Err(exit::usage("--threads: only `boostr bench` takes several numbers")),
    };
    if let Command::Serve(args) = &cli.command {
        return serve::run(args, threads, term);
    }
    if let Command::Batch(args) = &cli.command {
        return batch::run(args, threads, term);
    }
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .stack_size(STACK)
        .build()
        .context("starting threads")?;
    pool.install(|| match cli.command {
        Command::Run(args) => run::run(&args, bare, term),
        Command::Chat(args) => chat::run(&args, term),
        Command::Show(args) => show::run(&args, term),
        Command::Verify(args) => verify::run(&args, term),
        Command::Tokenizer(args) => tokenizer::run(&args, term),
        Command::Logits(args) => logits::run(&args, term),
        Command::Convert(args) => convert::run(&args, term),
        Command::Quantize(args) => convert::quantize(&args, term),
        Command::Train(args) => train::run(&args, term),
        Command::Tune(args) => train::tune(&args, term),
        Command::State(args) => state::run(&args, term),
        Command::Eval(args) => eval::run(&args, term),
        Command::Batch(_) | Command::Bench(_) | Command::Serve(_) => Ok(()),
        Command::Doctor(args) => doctor::run(&args, term),
        Command::Completions(args) => completions::run(&args),
    })
}
