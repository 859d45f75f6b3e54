//! `boostr completions`: the script that teaches a shell our words.

use std::io::{self, Write};

use anyhow::Result;
use clap::CommandFactory;

use crate::args::{Cli, CompletionsArgs};

pub fn run(args: &CompletionsArgs) -> Result<()> {
    // Into memory first: the generator panics when its writer fails.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "boostr", &mut script);
    Ok(io::stdout().lock().write_all(&script)?)
}
