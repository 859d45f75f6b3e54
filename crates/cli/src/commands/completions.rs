//! `boostr completions`: the script that teaches a shell our words.

use std::io::{self, Write};

use anyhow::Result;
use clap::{Args, CommandFactory};

use crate::cli::Cli;

const EXAMPLES: &str = "\
Examples:
  boostr completions bash > ~/.local/share/bash-completion/completions/boostr
  boostr completions fish > ~/.config/fish/completions/boostr.fish";

/// Completions of a shell
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct CompletionsArgs {
    /// The shell
    pub shell: clap_complete::Shell,
}

pub fn run(args: &CompletionsArgs) -> Result<()> {
    // Into memory first: the generator panics when its writer fails.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "boostr", &mut script);
    Ok(io::stdout().lock().write_all(&script)?)
}
