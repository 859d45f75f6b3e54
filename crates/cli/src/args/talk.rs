//! The options of `boostr chat`.

use std::path::PathBuf;

use clap::Args;

use super::{ChatArgs, DraftArgs, ModelArgs, SamplingArgs, parse_max_tokens};

pub const EXAMPLES: &str = "\
Examples:
  boostr chat smollm2-instruct.gguf
  boostr chat smollm2-instruct.gguf --session trip --system \"You know Paris.\"
  boostr chat smollm2-instruct.gguf --session trip < questions.txt";

pub const NOTES: &str = "\
A conversation is on disk after each answer, so the next chat in --session NAME goes on where this one ended, however it \
ended, and evaluates only what is new. Without --session it is kept as `last` until the next one without. /help at \
the prompt lists what can be done: save, load, branch, rewind, mix, diff. Lines come from a pipe as well: then the first \
command that fails ends the chat. Sessions are in $XDG_STATE_HOME/boostr/sessions, or ~/.local/state/boostr/sessions; more: \
docs/chat.md.";

/// Arguments of `boostr chat`.
#[derive(Debug, Args)]
pub struct TalkArgs {
    /// The model; the built-in one by default
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub path: Option<PathBuf>,
    /// The conversation to go on with, or to begin
    #[arg(long, value_name = "NAME")]
    pub session: Option<String>,
    /// Folder of all conversations
    #[arg(long, value_name = "DIR", env = "BOOSTR_SESSIONS", hide_env = true)]
    pub sessions: Option<PathBuf>,
    /// Most tokens of an answer; -1 for no limit
    #[arg(short = 'n', long, alias = "n-predict", value_name = "N", allow_negative_numbers = true)]
    #[arg(env = "BOOSTR_MAX_TOKENS", hide_env = true, value_parser = parse_max_tokens)]
    pub max_tokens: Option<usize>,
    /// End an answer before this text; may be given several times
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub chat: ChatArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}
