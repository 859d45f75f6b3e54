//! The command line of boostr, and no arithmetic of its own.
//!
//! | folder | holds |
//! |---|---|
//! | `commands` | one file a command: its arguments, help, examples and code |
//! | `options` | groups of options that several commands share, and what each means |
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

mod checks;
mod cli;
mod commands;
mod exit;
mod model;
mod options;
mod places;
mod prompt;
mod stream;
mod system;
mod term;
mod training;

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Context;
use clap::CommandFactory;

use cli::{Cli, Command};
use commands::{
    batch, bench, chat, completions, convert, doctor, eval, imatrix, list, logits, quantize, run,
    serve, show, state, tokenizer, train, tune, verify,
};
use term::Term;

/// Workers get the stack that a main thread has: they run the whole command.
const STACK: usize = 8 << 20;

/// The grammar of the command line, for man pages and completions.
#[must_use]
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the command line `args`, the program's name first, and says how it ended.
///
/// Answers go to stdout and everything else to stderr. Ctrl-C is caught while a command runs long.
#[must_use]
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let (cli, bare) = match cli::parse(args.into_iter().collect()) {
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
        return bench::run(args, &cli.common.threads, cli.common.pin, &term.cpu);
    }
    let threads = match cli.common.threads[..] {
        [] => 0,
        [threads] => threads,
        _ => return Err(exit::usage("--threads: only `boostr bench` takes several numbers")),
    };
    if let Command::Serve(args) = &cli.command {
        return serve::run(args, threads, cli.common.pin, term);
    }
    if let Command::Batch(args) = &cli.command {
        return batch::run(args, threads, cli.common.pin, term);
    }
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .stack_size(STACK)
        .build()
        .context("starting threads")?;
    if cli.common.pin {
        pool.install(boostr::threads::pin)?;
    }
    pool.install(|| match cli.command {
        Command::Run(args) => run::run(&args, bare, term),
        Command::Chat(args) => chat::run(&args, term),
        Command::List(args) => list::run(&args, term),
        Command::Show(args) => show::run(&args, term),
        Command::Verify(args) => verify::run(&args, term),
        Command::Tokenizer(args) => tokenizer::run(&args, term),
        Command::Logits(args) => logits::run(&args, term),
        Command::Convert(args) => convert::run(&args, term),
        Command::Quantize(args) => quantize::run(&args, term),
        Command::Imatrix(args) => imatrix::run(&args, term),
        Command::Train(args) => train::run(&args, term),
        Command::Tune(args) => tune::run(&args, term),
        Command::State(args) => state::run(&args, term),
        Command::Eval(args) => eval::run(&args, term),
        Command::Batch(_) | Command::Bench(_) | Command::Serve(_) => Ok(()),
        Command::Doctor(args) => doctor::run(&args, term),
        Command::Completions(args) => completions::run(&args),
    })
}
