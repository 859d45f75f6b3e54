//! States by name: files in one folder.

use std::fs;
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result};
use boostr::backend::{Cpu, CpuClient};
use boostr::models::State;
use boostr::session::Sessions;
use boostr::state_file::{self, About, SavedState};
use serde_json::{Value, json};

use super::{facts, open};
use crate::commands::chat::refused;
use crate::commands::chat::words::weights;
use crate::exit::{BadModel, usage};
use crate::options::model::ModelArgs;
use crate::places::{STATE, StateWord};
use crate::system;
use crate::term::{Style, Term, shown, shown_in_line};

/// All named states. One that is broken is shown as that.
pub fn list(folder: &Path, as_json: bool, term: &Term) -> Result<()> {
    let mut names: Vec<String> = match fs::read_dir(folder) {
        Ok(entries) => entries
            .flatten()
            .filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(STATE)?.to_owned()))
            .filter(|name| !name.starts_with('.'))
            .collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error).with_context(|| format!("`{}`", folder.display())),
    };
    names.sort();
    let states = names.iter().map(|name| {
        let path = folder.join(format!("{name}{STATE}"));
        (name, SavedState::open(&path), path)
    });
    if as_json {
        let states: Vec<Value> = states
            .map(|(name, saved, path)| match saved {
                Ok(saved) => {
                    let mut object = facts(&path, &saved);
                    object["name"] = name.as_str().into();
                    object["modified"] = modified(&path).into();
                    object
                }
                Err(error) => json!({"name": name, "error": error.to_string()}),
            })
            .collect();
        return term.print_json(&json!({"folder": folder.display().to_string(), "states": states}));
    }
    let mut out = io::stdout().lock();
    for (name, saved, _) in states {
        match saved {
            Ok(saved) => writeln!(
                out,
                "{}  {:>8} tokens  {:>8}  {} ({})",
                term.on_stdout(Style::Bold, &format!("{name:20}")),
                saved.position(),
                system::bytes(saved.size_in_bytes() as u64),
                shown_in_line(saved.model()),
                shown_in_line(saved.family()),
            )?,
            Err(error) => {
                let (name, error) = (shown(name), error.to_string());
                let word = term.on_stdout(Style::Bad, "broken");
                writeln!(out, "{name:20}  {word}: {}", shown(&error))?;
            }
        }
    }
    if names.is_empty() {
        term.say(format_args!("no states in `{}`", folder.display()));
    }
    Ok(())
}

/// Seconds since 1970.
fn modified(path: &Path) -> Option<u64> {
    let time = fs::metadata(path).ok()?.modified().ok()?;
    Some(time.duration_since(UNIX_EPOCH).ok()?.as_secs())
}

/// Copies a state, once it was found to be whole.
pub fn copy(from: &Path, to: &StateWord, force: bool) -> Result<()> {
    check_free(to, force)?;
    let mut bytes = Vec::new();
    let mut file = boostr::files::open(from)?;
    file.read_to_end(&mut bytes).with_context(|| format!("`{}`", from.display()))?;
    let name = from.display().to_string();
    SavedState::from_bytes(&name, bytes.clone()).map_err(BadModel::from)?;
    let lock = to.lock()?;
    // Another may have come in between.
    check_free(to, force)?;
    Ok(lock.copy_of(&bytes)?)
}

/// Copies the state in which a conversation is.
pub fn copy_of_session(sessions: &Path, name: &str, to: &StateWord, force: bool) -> Result<()> {
    let session = Sessions::<Cpu>::open(sessions).and_then(|sessions| sessions.get(name));
    let file = session.map_err(refused)?.state_file();
    let none =
        || usage(format!("session `{name}` keeps no state where it stands: talk in it first"));
    copy(&file.ok_or_else(none)?, to, force)
}

/// Removes a conversation.
pub fn remove_session(sessions: &Path, name: &str) -> Result<()> {
    Sessions::<Cpu>::open(sessions).and_then(|sessions| sessions.delete(name)).map_err(refused)
}

/// Writes the weighted sum of states.
pub fn mix(
    parts: &[String],
    folder: Option<&Path>,
    to: &StateWord,
    force: bool,
    model: &ModelArgs,
    cpu: &CpuClient,
) -> Result<()> {
    let parts = weights(parts.iter().map(String::as_str))?;
    check_free(to, force)?;
    let saved =
        parts.iter().map(|(word, _)| Ok(open(StateWord::new(Path::new(word), folder)?.path())?));
    let saved: Vec<SavedState> = saved.collect::<Result<_>>()?;
    let (source, options) = model.source(model.model.as_deref())?;
    source.check_exists()?;
    let lm = source.open(&options, cpu)?;
    let states = saved.iter().map(|saved| Ok(saved.restore(&lm.model).map_err(BadModel::from)?));
    let states: Vec<State<Cpu>> = states.collect::<Result<_>>()?;
    let weighted: Vec<(&State<Cpu>, f32)> =
        states.iter().zip(&parts).map(|(state, (_, weight))| (state, *weight)).collect();
    let mixed = state_file::mix(&lm.model, &weighted)?;
    let lock = to.lock()?;
    check_free(to, force)?;
    Ok(lock.save(&lm.model, &mixed, &About::new(&source.name()))?)
}

/// Removes a state, and nothing else: a path must lead to one, a name may lead to a broken one.
pub fn remove(state: &StateWord) -> Result<()> {
    let path = state.path();
    match (SavedState::open(path), state) {
        (Err(error @ boostr::Error::Io { .. }), _) => return Err(error.into()),
        (Err(error), StateWord::File(_)) => return Err(BadModel::from(error).into()),
        _ => {}
    }
    let lock = state.lock()?;
    fs::remove_file(path).with_context(|| format!("`{}`", path.display()))?;
    drop(lock);
    Ok(())
}

fn check_free(to: &StateWord, force: bool) -> Result<()> {
    let path = to.path();
    if force || fs::symlink_metadata(path).is_err() {
        return Ok(());
    }
    Err(usage(format!("`{}` is there already; --force replaces it", path.display())))
}
