//! The options of a run for states.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Where a run begins, and what is kept of it.
#[derive(Debug, Args)]
#[command(next_help_heading = "State")]
pub struct RunStateArgs {
    /// Go on from this state, a name or a file: the prompt comes next, as it is, and nothing before it is
    /// computed again
    #[arg(long, value_name = "NAME")]
    #[arg(conflicts_with_all = ["system", "chat_template", "chat_template_kwargs"])]
    pub state: Option<PathBuf>,
    /// Keep the state after the last token under this name or in this file; it may be that of --state
    #[arg(long, value_name = "NAME")]
    pub save_state: Option<PathBuf>,
    /// Folder of named states
    #[arg(long, value_name = "DIR", env = "BOOSTR_STATES", hide_env = true)]
    pub states: Option<PathBuf>,
    /// What --save-state rounds to; bf16 takes half the bytes, at some loss
    #[arg(long, value_name = "TYPE", value_enum, default_value_t)]
    pub state_type: StateKind,
}

/// A type of saved states.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum StateKind {
    #[default]
    F32,
    Bf16,
}

impl From<StateKind> for boostr::state_file::StateType {
    fn from(kind: StateKind) -> Self {
        match kind {
            StateKind::F32 => Self::F32,
            StateKind::Bf16 => Self::Bf16,
        }
    }
}
