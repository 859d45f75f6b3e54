//! The states of a session: a few files, any of which may be missing.

use std::fs;
use std::path::{Path, PathBuf};

use super::prompt::Assistant;
use super::tree::{Tree, TurnId};
use crate::backend::Backend;
use crate::checkpoint::make_private;
use crate::error::{Error, Result};
use crate::load::LanguageModel;
use crate::models::State;
use crate::state_file::{self, About, SavedState, StateType};

/// Most states that a session keeps in files: that after its head, and those after the newest turns. Back to any other turn
/// its tokens are run again, from the nearest of these before it.
pub const STATES: usize = 4;

/// The file of the state after a turn.
pub(super) fn path(folder: &Path, turn: TurnId) -> PathBuf {
    folder.join(format!("state-{turn}.safetensors"))
}

/// The turns that a folder has states of, ascending.
fn kept(folder: &Path) -> Vec<TurnId> {
    let turn = |name: &str| {
        let number = name.strip_prefix("state-")?.strip_suffix(".safetensors")?;
        number.parse::<TurnId>().ok().filter(|turn| turn.to_string() == number)
    };
    // A link is none: what it leads to is not the session's.
    let is_file = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_file());
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().filter(is_file);
    let mut turns: Vec<TurnId> =
        entries.filter_map(|entry| turn(entry.file_name().to_str()?)).collect();
    turns.sort_unstable();
    turns
}

/// The files of the states that a folder has.
pub(super) fn all(folder: &Path) -> Vec<PathBuf> {
    kept(folder).into_iter().map(|turn| path(folder, turn)).collect()
}

/// Removes the states of turns that are not there, and the oldest of too many.
pub(super) fn prune(folder: &Path, tree: &Tree) {
    let mut left = STATES;
    // The head's counts first.
    let mut turns = kept(folder);
    turns.sort_unstable_by_key(|&turn| (turn == tree.head, turn));
    for turn in turns.into_iter().rev() {
        if tree.get(turn).is_some() && left > 0 {
            left = left.saturating_sub(1);
        } else {
            // A file too many does no harm.
            let _ = fs::remove_file(path(folder, turn));
        }
    }
}

/// Gives a branch the states of some turns. Files of states are replaced, never written into, so two names may share one.
pub(super) fn link(
    from: &Path,
    to: &Path,
    turns: impl Iterator<Item = TurnId>,
) -> Result<(), Error> {
    let kept = kept(from);
    for turn in turns.filter(|turn| kept.contains(turn)) {
        let (from, to) = (path(from, turn), path(to, turn));
        let copy = || fs::File::open(&to)?.sync_all();
        if fs::hard_link(&from, &to).is_err() {
            fs::copy(&from, &to).and_then(|_| copy()).map_err(|error| Error::io(&from, error))?;
        }
    }
    Ok(())
}

/// Writes the state after a turn.
pub(super) fn save<B: Backend>(
    folder: &Path,
    tree: &Tree,
    assistant: &Assistant<'_, B>,
    turn: TurnId,
    state: &State<B>,
) -> Result<()> {
    let ids = tree.ids(turn);
    let about =
        About { model: assistant.name, ids: ids.get(..state.position()), dtype: StateType::F32 };
    let path = path(folder, turn);
    if fs::symlink_metadata(&path).is_ok_and(|found| found.is_symlink()) {
        // It would be followed.
        fs::remove_file(&path).map_err(|error| Error::io(&path, error))?;
    }
    state_file::write(&path, &assistant.lm.model, state, &about)?;
    make_private(&path).map_err(|error| Error::io(&path, error))
}

/// Of the states that are kept the one that has seen the longest beginning of `ids`, and no more than `most` of them. A
/// file that is broken, of another model or of other ids is as good as none.
pub(super) fn longest<B: Backend>(
    tree: &Tree,
    folder: &Path,
    recent: Option<&(TurnId, State<B>)>,
    lm: &LanguageModel<B>,
    ids: &[u32],
    most: usize,
) -> Option<State<B>> {
    let fingerprint = lm.model.fingerprint();
    let is_its_own =
        |turn: TurnId| tree.get(turn).is_some_and(|turn| Some(&*turn.fingerprint) == fingerprint);
    let begins = |seen: &[u32]| (1..=most).contains(&seen.len()) && ids.starts_with(seen);
    let mut best = recent
        .filter(|(turn, state)| {
            is_its_own(*turn) && tree.ids(*turn).get(..state.position()).is_some_and(begins)
        })
        .map(|(_, state)| state.clone());
    let mut files: Vec<(usize, TurnId)> = kept(folder)
        .into_iter()
        .filter(|&turn| is_its_own(turn))
        .map(|turn| (common(&tree.ids(turn), ids), turn))
        .collect();
    files.sort_unstable();
    for (len, turn) in files.into_iter().rev() {
        if best.as_ref().is_some_and(|state| state.position() >= len) {
            break;
        }
        let Ok(saved) = SavedState::open(&path(folder, turn)) else { continue };
        let is_longer = best.as_ref().is_none_or(|state| state.position() < saved.position());
        if is_longer && saved.ids().is_some_and(begins) {
            best = saved.restore(&lm.model).ok().or(best);
        }
    }
    best
}

/// Length of the longest beginning that both have.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}
