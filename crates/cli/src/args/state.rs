//! The options of `boostr state`, and of `boostr run` for states.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::ModelArgs;

pub const EXAMPLES: &str = "\
Examples:
  boostr state ls
  boostr state show notes.state --json | jq .position
  boostr state save trip --session trip
  boostr state mix law:0.6 sea:0.4 --out soup -m ./mamba2-370m
  boostr run ./mamba2-370m --state soup -p \"The captain\"";

pub const NOTES: &str = "\
A NAME without a slash and a dot is a file NAME.safetensors in the folder of states (--states DIR, BOOSTR_STATES, else \
$XDG_STATE_HOME/boostr/states or ~/.local/state/boostr/states); anything else is the path of a file. `run` takes both as \
--state and --save-state.";

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

/// Arguments of `boostr state`.
#[derive(Debug, Args)]
pub struct StateArgs {
    #[command(subcommand)]
    pub command: StateCommand,
    /// Folder of named states
    #[arg(long, global = true, value_name = "DIR", env = "BOOSTR_STATES", hide_env = true)]
    pub states: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum StateCommand {
    /// Whose state it is, how far it has come, and the norm of what each layer keeps
    Show {
        /// Name or file
        file: PathBuf,
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
    /// How far two states of one model are apart, layer by layer
    Diff {
        /// Name or file
        a: PathBuf,
        /// Another
        b: PathBuf,
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
    /// The named states
    Ls {
        /// One JSON object
        #[arg(long)]
        json: bool,
    },
    /// A file, or where a conversation stands, under a name
    Save {
        /// The name
        name: PathBuf,
        /// A file of a state
        #[arg(required_unless_present = "session", conflicts_with = "session")]
        file: Option<PathBuf>,
        /// A conversation of `boostr chat`
        #[arg(long, value_name = "NAME")]
        session: Option<String>,
        /// Folder of conversations
        #[arg(long, value_name = "DIR", env = "BOOSTR_SESSIONS", hide_env = true)]
        sessions: Option<PathBuf>,
        /// Replace what is there
        #[arg(long)]
        force: bool,
    },
    /// A named state as a file
    Load {
        /// The name
        name: PathBuf,
        /// The file to write
        file: PathBuf,
        /// Replace what is there
        #[arg(long)]
        force: bool,
    },
    /// A copy of a state under another name
    Branch {
        /// Name or file
        from: PathBuf,
        /// Name or file of the copy
        to: PathBuf,
        /// Replace what is there
        #[arg(long)]
        force: bool,
    },
    /// Experimental: the weighted sum of states of a model without attention
    Mix {
        /// Names or files, each with its weight
        #[arg(value_name = "NAME:WEIGHT", required = true)]
        parts: Vec<String>,
        /// Name or file of the mixture
        #[arg(short, long, value_name = "NAME")]
        out: PathBuf,
        /// Replace what is there
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        model: ModelArgs,
    },
    /// Remove states, or a conversation with all of its own
    Rm {
        /// Names or files
        #[arg(required_unless_present = "session")]
        names: Vec<PathBuf>,
        /// A conversation of `boostr chat`
        #[arg(long, value_name = "NAME")]
        session: Option<String>,
        /// Folder of conversations
        #[arg(long, value_name = "DIR", env = "BOOSTR_SESSIONS", hide_env = true)]
        sessions: Option<PathBuf>,
    },
}
