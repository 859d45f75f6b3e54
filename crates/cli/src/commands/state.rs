//! `boostr state`: the contents of a state's file, the distance of two states, and states by name.

mod named;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use boostr::state_file::{LayerNorms, SavedState};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::exit::BadModel;
use crate::options::model::ModelArgs;
use crate::places::{self, StateWord};
use crate::system;
use crate::term::{Style, Term, shown, shown_in_line};

const EXAMPLES: &str = "\
Examples:
  boostr state ls
  boostr state show notes.state --json | jq .position
  boostr state save trip --session trip
  boostr state mix law:0.6 sea:0.4 --out soup -m ./mamba2-370m
  boostr run ./mamba2-370m --state soup -p \"The captain\"";

const NOTES: &str = "\
A NAME without a slash and a dot is a file NAME.safetensors in the folder of states (--states DIR, BOOSTR_STATES, else \
$XDG_STATE_HOME/boostr/states or ~/.local/state/boostr/states); anything else is the path of a file. `run` takes both as \
--state and --save-state.";

/// Saved states: list, copy, mix, compare, remove
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, after_help = NOTES)]
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

pub fn run(args: &StateArgs, term: &Term) -> Result<()> {
    let folder = args.states.as_deref();
    let state = |word: &Path| StateWord::new(word, folder);
    match &args.command {
        StateCommand::Show { file, json } => show(state(file)?.path(), *json, term),
        StateCommand::Diff { a, b, json } => diff(state(a)?.path(), state(b)?.path(), *json, term),
        StateCommand::Ls { json } => named::list(&places::states(folder)?, *json, term),
        StateCommand::Save { name, file: Some(from), force, .. } => {
            named::copy(state(from)?.path(), &state(name)?, *force)
        }
        StateCommand::Save { name, session, sessions, force, .. } => {
            let sessions = places::sessions(sessions.as_deref())?;
            let session = session.as_deref().unwrap_or_default();
            named::copy_of_session(&sessions, session, &state(name)?, *force)
        }
        StateCommand::Load { name: from, file: to, force }
        | StateCommand::Branch { from, to, force } => {
            named::copy(state(from)?.path(), &state(to)?, *force)
        }
        StateCommand::Mix { parts, out, force, model } => {
            named::mix(parts, folder, &state(out)?, *force, model, &term.cpu)
        }
        StateCommand::Rm { names, session, sessions } => {
            names.iter().try_for_each(|name| named::remove(&state(name)?))?;
            let Some(session) = session else { return Ok(()) };
            named::remove_session(&places::sessions(sessions.as_deref())?, session)
        }
    }
}

/// The state in a file; what is wrong with it is what is wrong with a model's file.
pub fn open(path: &Path) -> Result<SavedState, BadModel> {
    SavedState::open(path).map_err(BadModel::from)
}

fn show(path: &Path, as_json: bool, term: &Term) -> Result<()> {
    let saved = open(path)?;
    let norms = saved.norms()?;
    if as_json {
        let mut object = facts(path, &saved);
        object["layers"] = norms.iter().map(layer_json).collect();
        return term.print_json(&object);
    }
    let mut out = io::stdout().lock();
    writeln!(out, "{}", term.on_stdout(Style::Bold, &path.display().to_string()))?;
    let ids = if saved.ids().is_some() { "their ids are there" } else { "without their ids" };
    let mut lines = vec![
        ("model", format!("{} ({})", shown_in_line(saved.model()), shown_in_line(saved.family()))),
        ("fingerprint", shown_in_line(saved.fingerprint())),
        ("position", format!("{} tokens seen, {ids}", saved.position())),
        (
            "size",
            format!("{} ({})", system::bytes(saved.size_in_bytes() as u64), saved.dtype().name()),
        ),
    ];
    if let Some(kind) = saved.kv_type() {
        lines.push(("keys and values", kind.name().to_owned()));
    }
    for (label, value) in lines {
        writeln!(out, "  {label:16}{}", shown(&value))?;
    }
    writeln!(out, "\n  norms of what each layer keeps")?;
    table(&mut out, &norms, |layer, name| layer.total(name).map(number))
}

fn diff(a: &Path, b: &Path, as_json: bool, term: &Term) -> Result<()> {
    let (first, second) = (open(a)?, open(b)?);
    let norms = first.diff(&second).map_err(BadModel::from)?;
    let own = first.norms()?;
    if as_json {
        let layers: Vec<Value> = norms.iter().map(layer_json).collect();
        return term.print_json(&json!({
            "a": facts(a, &first),
            "b": facts(b, &second),
            "layers": layers,
        }));
    }
    let mut out = io::stdout().lock();
    let title = format!("{} - {}", a.display(), b.display());
    writeln!(out, "{}", term.on_stdout(Style::Bold, &title))?;
    let (model, position) = (shown_in_line(first.model()), first.position());
    writeln!(out, "  {:16}{model}", "model")?;
    writeln!(out, "  {:16}{position} and {} tokens seen", "positions", second.position())?;
    drop(out);
    print_differences(&norms, &own)
}

/// The norms of a difference, and those of the first of the two states.
pub fn print_differences(difference: &[LayerNorms], own: &[LayerNorms]) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "\n  norms of the difference, and as shares of the first state's")?;
    table(&mut out, difference, |layer, name| {
        let own = own.iter().find(|own| own.layer == layer.layer)?;
        let (x, own) = layer.total(name).zip(own.total(name))?;
        let share = if x == 0.0 { 0.0 } else { 100.0 * x / own };
        Some(format!("{} {share:5.1} %", number(x)))
    })
}

fn number(x: f64) -> String {
    format!("{x:.4}")
}

/// Layers in lines; in columns the tensors that they keep, in the order in which layers first name them.
fn table(
    out: &mut impl Write,
    layers: &[LayerNorms],
    cell: impl Fn(&LayerNorms, &str) -> Option<String>,
) -> Result<()> {
    let mut names: Vec<&str> = Vec::new();
    for tensor in layers.iter().flat_map(|layer| &layer.tensors) {
        if !names.contains(&&*tensor.name) {
            names.push(&tensor.name);
        }
    }
    let line = |first: &str, cells: Vec<String>| {
        let cells: Vec<String> = cells.iter().map(|cell| format!("{cell:>18}")).collect();
        let cells = cells.concat();
        format!("  {first:>5}{cells}")
    };
    let title = names.iter().map(|name| (*name).to_owned()).collect();
    writeln!(out, "{}", line("layer", title))?;
    for layer in layers {
        let cells = names.iter().map(|name| cell(layer, name).unwrap_or_else(|| "-".to_owned()));
        writeln!(out, "{}", line(&layer.layer.to_string(), cells.collect()))?;
    }
    Ok(())
}

fn facts(path: &Path, saved: &SavedState) -> Value {
    json!({
        "path": path.display().to_string(),
        "model": saved.model(),
        "family": saved.family(),
        "fingerprint": saved.fingerprint(),
        "position": saved.position(),
        "has_ids": saved.ids().is_some(),
        "dtype": saved.dtype().name(),
        "kv_type": saved.kv_type().map(boostr::ops::KvType::name),
        "bytes": saved.size_in_bytes(),
    })
}

/// The norm of each tensor that a layer keeps, or those of its heads.
fn layer_json(layer: &LayerNorms) -> Value {
    let mut object = json!({ "layer": layer.layer });
    for tensor in &layer.tensors {
        if tensor.by_head {
            let singular = tensor.name.strip_suffix('s').unwrap_or(&tensor.name);
            object[format!("{singular}_heads")] = json!(tensor.norms);
        } else {
            object[&tensor.name] = json!(tensor.norms.first());
        }
    }
    object
}
