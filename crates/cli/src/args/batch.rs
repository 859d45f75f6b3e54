//! The options of `boostr batch`.

use std::path::PathBuf;

use clap::Args;

use super::ModelArgs;

pub const EXAMPLES: &str = "\
Examples:
  boostr batch model.gguf --in questions.jsonl --out answers.jsonl
  boostr batch ./mamba2-370m --in prompts.jsonl --out texts.jsonl --parallel 16";

pub const NOTES: &str = "\
A line of the input is the body of a request to the server, {\"messages\": [..], \"max_tokens\": 64} or {\"prompt\": ..} \
or {\"input\": ..}, or a line of OpenAI's batch files with custom_id, url and body. Answers are in the order of the lines. \
The same command goes on where a run was stopped, killed or not.";

#[derive(Debug, Args)]
pub struct BatchArgs {
    /// The model, unless -m names it
    #[arg(value_name = "MODEL")]
    pub first: Option<PathBuf>,
    /// Requests, one JSON object a line
    #[arg(long = "in", value_name = "FILE", required = true)]
    pub input: PathBuf,
    /// Answers; what is there already is gone on with
    #[arg(long, value_name = "FILE", required = true)]
    pub out: PathBuf,
    /// Requests that are computed at once
    #[arg(long, value_name = "N", default_value_t = 8)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub parallel: u16,
    #[command(flatten)]
    pub model: ModelArgs,
}
