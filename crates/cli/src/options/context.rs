//! How long a sequence may be.

use boostr::backend::Cpu;
use boostr::load::OpenOptions;
use boostr::models::{Context, Model};
use clap::Args;

use crate::term::Term;

/// How long a sequence may be.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Context")]
pub struct ContextArgs {
    /// Tokens that a sequence may have; by default those that the model was made for, if its attention keeps them all
    #[arg(short, long, alias = "ctx-size", value_name = "N", conflicts_with = "no_context_limit")]
    pub context: Option<usize>,
    /// Let a sequence grow beyond what the model was made for
    #[arg(long)]
    pub no_context_limit: bool,
}

impl ContextArgs {
    /// The same options of opening a model, with this length. 0 is the model's own, as in llama.cpp.
    pub fn of(&self, options: OpenOptions) -> OpenOptions {
        let context = match self.context {
            _ if self.no_context_limit => Context::Unlimited,
            None | Some(0) => Context::Model,
            Some(tokens) => Context::Tokens(tokens),
        };
        OpenOptions { context, ..options }
    }
}

/// The length in words.
pub fn describe(model: &Model<Cpu>) -> String {
    let made = model.trained_length().map(|tokens| format!("made for {tokens} tokens"));
    match (model.context_limit(), made) {
        (Some(limit), Some(made)) => format!("at most {limit} tokens, {made}"),
        (Some(limit), None) => format!("at most {limit} tokens"),
        (None, Some(made)) => format!("no limit, {made}"),
        (None, None) => "no limit".into(),
    }
}

/// Says that a sequence is longer than the model was made for, where nothing holds it to that.
pub fn note(model: &Model<Cpu>, tokens: usize, term: &Term) {
    if let Some(made) = model.trained_length().filter(|made| tokens > *made) {
        term.say(format!(
            "note: the sequence has {tokens} tokens, and the model was made for {made}: it goes on"
        ));
    }
}
