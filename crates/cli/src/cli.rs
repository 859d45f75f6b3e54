//! The command line's grammar.
//!
//! `boostr MODEL ...` and `boostr -p ...` mean `boostr run ...`: [`parse`] puts the word in before
//! clap reads the rest, so that the grammar itself has no special case.

use std::ffi::OsString;

use boostr::backend::{self, CpuClient, Level, UnknownLevel};
use clap::{Args, ColorChoice, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};

use crate::commands::batch;
use crate::commands::bench;
use crate::commands::chat;
use crate::commands::completions;
use crate::commands::convert;
use crate::commands::doctor;
use crate::commands::eval;
use crate::commands::imatrix;
use crate::commands::list;
use crate::commands::logits;
use crate::commands::quantize;
use crate::commands::run;
use crate::commands::serve;
use crate::commands::show;
use crate::commands::state;
use crate::commands::tokenizer;
use crate::commands::train;
use crate::commands::tune;
use crate::commands::verify;

/// Reads a command line, the program's name first; also tells whether it is `boostr` alone.
pub fn parse(mut line: Vec<OsString>) -> Result<(Cli, bool), clap::Error> {
    let mut command = Cli::command();
    if line.windows(2).any(|pair| pair[0] == "--color" && pair[1] == "off")
        || line.iter().any(|word| word == "--color=off")
    {
        command = command.color(ColorChoice::Never);
    }
    if line.get(1).is_some_and(|word| word == "--help-all") {
        return Err(help_all(&mut command));
    }
    let at = skip_common(&line);
    let bare = at == line.len();
    let first = line.get(at).and_then(|word| word.to_str()).unwrap_or_default();
    let is_known = ["help", "-h", "--help", "-V", "--version"].contains(&first)
        || command
            .get_subcommands()
            .any(|c| c.get_name() == first || c.get_all_aliases().any(|alias| alias == first));
    if !is_known {
        line.insert(at, "run".into());
    }
    let matches = command.try_get_matches_from_mut(line)?;
    Ok((Cli::from_arg_matches(&matches).map_err(|e| e.format(&mut command))?, bare))
}

/// The help of every command, one after another, as clap's way to end with a text.
fn help_all(command: &mut clap::Command) -> clap::Error {
    command.build();
    let mut text = command.render_long_help().to_string();
    for command in command.get_subcommands_mut().filter(|command| command.get_name() != "help") {
        text.push_str(&format!("\n\nboostr {}\n", command.get_name()));
        text.push_str(&command.render_long_help().to_string());
    }
    // clap puts `error:` before a text that is not the help of a command.
    let all = clap::Command::new("boostr").override_help(text);
    match all.try_get_matches_from(["boostr", "--help"]) {
        Err(help) => help,
        Ok(_) => clap::Error::new(clap::error::ErrorKind::DisplayHelp),
    }
}

/// Index of the first word that is no common option.
fn skip_common(line: &[OsString]) -> usize {
    let mut at = 1.min(line.len());
    while let Some(word) = line.get(at).and_then(|word| word.to_str()) {
        match word {
            "-t" | "--threads" | "--isa" | "--color" => at += 2,
            "--pin" | "--verbose" | "--quiet" => at += 1,
            _ if ["--threads=", "--isa=", "--color="].iter().any(|o| word.starts_with(o)) => {
                at += 1;
            }
            _ if word.len() > 2 && word.starts_with("-t") => at += 1,
            _ if word.len() > 1 && word.trim_end_matches(['v', 'q']) == "-" => at += 1,
            _ => break,
        }
    }
    at.min(line.len())
}

/// Mamba-2 language models on your CPU.
#[derive(Debug, Parser)]
#[command(name = "boostr", version, help_template = include_str!("help.txt"))]
pub struct Cli {
    #[command(flatten)]
    pub common: Common,
    #[command(subcommand)]
    pub command: Command,
}

/// What every command takes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Common options")]
pub struct Common {
    /// Threads; all processors by default. `bench` takes several: 1,2
    #[arg(short, long, global = true, value_name = "N", env = "BOOSTR_THREADS", hide_env = true)]
    #[arg(value_parser = parse_threads, value_delimiter = ',')]
    pub threads: Vec<usize>,
    /// Binds each thread to a processor (Linux): for machines whose memory is in several parts
    #[arg(long, global = true)]
    pub pin: bool,
    /// Instruction set, as baseline or avx2; the best of this machine by default
    #[arg(long, global = true, value_name = "LEVEL", env = "BOOSTR_ISA", hide_env = true)]
    #[arg(value_parser = parse_isa)]
    pub isa: Option<CpuClient>,
    /// Timings and choices on stderr
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Only errors on stderr
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Colours; NO_COLOR and CLICOLOR_FORCE are honoured
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub color: Color,
}

/// When to use colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// At a terminal
    Auto,
    /// Always
    On,
    /// Never
    Off,
}

/// What there is to do. Help, examples and options of a command stand in its file.
#[derive(Debug, Subcommand)]
pub enum Command {
    Run(Box<run::RunArgs>),
    Chat(Box<chat::ChatArgs>),
    Serve(Box<serve::ServeArgs>),
    Batch(batch::BatchArgs),
    List(list::ListArgs),
    Show(show::ShowArgs),
    Verify(verify::VerifyArgs),
    Tokenizer(tokenizer::TokenizerArgs),
    Logits(logits::LogitsArgs),
    Convert(convert::ConvertArgs),
    Quantize(quantize::QuantizeArgs),
    Imatrix(imatrix::ImatrixArgs),
    Train(Box<train::TrainArgs>),
    Tune(Box<tune::TuneArgs>),
    State(state::StateArgs),
    Eval(eval::EvalArgs),
    Bench(bench::BenchArgs),
    Doctor(doctor::DoctorArgs),
    Completions(completions::CompletionsArgs),
}

fn parse_threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(threads @ 1..=1024) => Ok(threads),
        _ => Err("expected a number from 1 to 1024".into()),
    }
}

fn parse_isa(name: &str) -> Result<CpuClient, String> {
    let level: Level = name.parse().map_err(|error: UnknownLevel| error.to_string())?;
    backend::cpu_at(level).map_err(|error| error.to_string())
}

pub fn parse_max_tokens(text: &str) -> Result<usize, String> {
    match text {
        "-1" => Ok(usize::MAX),
        _ => text.parse().map_err(|_| "expected a number, or -1 for no limit".into()),
    }
}

/// Names of the commands, for suggestions.
pub fn command_names() -> Vec<String> {
    Cli::command().get_subcommands().map(|c| c.get_name().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> (Cli, bool) {
        parse(line.split_whitespace().map(OsString::from).collect()).unwrap()
    }

    #[test]
    fn the_grammar_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_line_without_a_command_runs() {
        for (line, alone) in [
            ("boostr", true),
            ("boostr -v --threads 2 --color=off", true),
            ("boostr -t2 -q", true),
            ("boostr models/default", false),
            ("boostr -n 5", false),
            ("boostr --isa baseline --color=off", true),
            ("boostr --isa=baseline -p hi", false),
            ("boostr -t 2 -v -p hi", false),
            ("boostr run", false),
            ("boostr generate", false),
        ] {
            let (cli, bare) = parsed(line);
            assert!(matches!(cli.command, Command::Run(_)), "{line}");
            assert_eq!(bare, alone, "{line}");
        }
        assert!(matches!(parsed("boostr -t 2 show").0.command, Command::Show(_)));
        assert!(matches!(parsed("boostr inspect").0.command, Command::Show(_)));
    }

    #[test]
    fn a_level_that_is_unknown_or_absent_is_refused_with_those_of_the_machine() {
        let (cli, _) = parsed("boostr show --isa baseline");
        assert_eq!(cli.common.isa.map(|cpu| cpu.level()), Some(Level::Baseline));
        let absent = Level::ALL.into_iter().find(|level| !level.is_present());
        for name in ["avx3", absent.map_or("", Level::name)] {
            let line = ["boostr", "--isa", name].map(OsString::from).to_vec();
            let error = parse(line).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(error.contains("--isa <LEVEL>") && error.contains("(baseline"), "{error}");
            assert!(error.contains(&format!("found `{name}`")), "{error}");
        }
    }

    #[test]
    fn the_help_fits_a_screen_and_names_every_command() {
        let help = Cli::command().render_help().to_string();
        assert!(help.lines().count() <= 40);
        assert!(help.lines().all(|line| line.chars().count() <= 100));
        for command in Cli::command().get_subcommands() {
            let name = command.get_name();
            assert!(help.lines().any(|line| line.trim_start().starts_with(name)), "{name}");
        }
    }

    #[test]
    fn the_help_of_each_command_starts_with_two_examples() {
        for mut command in Cli::command().get_subcommands().cloned() {
            let help = command.render_help().to_string();
            let lines: Vec<&str> = help.lines().take(3).collect();
            assert_eq!(lines[0], "Examples:", "{}", command.get_name());
            assert!(lines[1..].iter().all(|line| line.starts_with("  boostr ")), "{lines:?}");
        }
    }
}
