//! Where sessions and named states are kept.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use boostr::session::check_name;
use boostr::state_file::StateFile;

use crate::exit::usage;

/// How the files of named states end.
pub const STATE: &str = ".safetensors";

/// The folder of all sessions.
pub fn sessions(named: Option<&Path>) -> Result<PathBuf> {
    let Some(path) = named else { return in_state_home("sessions", "--sessions") };
    // It would be closed to all others where nothing else is in it.
    let is_home = env::home_dir().and_then(|home| fs::canonicalize(home).ok());
    if is_home.is_some() && is_home == fs::canonicalize(path).ok() {
        let path = path.display();
        return Err(usage(format!("--sessions {path}: a home folder: name one of its own in it")));
    }
    Ok(path.to_path_buf())
}

/// The folder of all sessions of a server. It is another, for who reaches the server reads them.
pub fn served_sessions() -> Result<PathBuf> {
    in_state_home("served", "--sessions")
}

/// The folder of states that left the memory of a server.
pub fn state_cache() -> Result<PathBuf> {
    in_state_home("state-cache", "--state-cache-dir")
}

/// The folder of named states.
pub fn states(named: Option<&Path>) -> Result<PathBuf> {
    named.map_or_else(|| in_state_home("states", "--states"), |path| Ok(path.to_path_buf()))
}

/// What a word on the command line means.
#[derive(Debug, PartialEq, Eq)]
pub enum StateWord {
    /// A name, and its file in the folder of named states.
    Name(PathBuf),
    /// A file somewhere.
    File(PathBuf),
}

impl StateWord {
    /// A word without a separator and a dot is a name.
    pub fn new(word: &Path, states_folder: Option<&Path>) -> Result<Self> {
        let is_name = |word: &&str| !word.is_empty() && !word.contains(['/', '\\', '.']);
        let Some(name) = word.to_str().filter(is_name) else {
            return Ok(Self::File(word.to_path_buf()));
        };
        check_name(name).map_err(|_| {
            let name = name.escape_debug();
            usage(format!("`{name}`: expected a path, or a name of 1 to 64 of A-Z a-z 0-9 _ -"))
        })?;
        Ok(Self::Name(states(states_folder)?.join(format!("{name}{STATE}"))))
    }

    pub fn path(&self) -> &Path {
        let (Self::Name(path) | Self::File(path)) = self;
        path
    }

    /// Claims the file to write it. A named state is this user's alone, and so is the folder of them where it is made.
    pub fn lock(&self) -> Result<StateFile> {
        if let Self::Name(path) = self
            && let Some(folder) = path.parent()
        {
            let mut builder = fs::DirBuilder::new();
            builder.recursive(true);
            #[cfg(unix)]
            std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
            builder.create(folder).with_context(|| format!("`{}`", folder.display()))?;
        }
        let file = StateFile::lock(self.path())?;
        Ok(if matches!(self, Self::Name(_)) { file.private() } else { file })
    }
}

/// A folder of ours in that for what programs keep.
fn in_state_home(name: &str, option: &str) -> Result<PathBuf> {
    let variable = |name| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let home = variable("XDG_STATE_HOME")
        .or_else(|| variable("HOME").map(|home| home.join(".local/state")))
        .or_else(|| variable("LOCALAPPDATA"));
    let home = home.ok_or_else(|| {
        usage(format!(
            "{option} DIR: expected one, for neither XDG_STATE_HOME nor HOME is a folder"
        ))
    })?;
    Ok(home.join("boostr").join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_without_separator_and_dot_is_a_name() {
        let word = |word: &str| StateWord::new(Path::new(word), Some(Path::new("/states")));
        let trip = Path::new("/states/trip-2.safetensors").to_path_buf();
        assert_eq!(word("trip-2").unwrap(), StateWord::Name(trip));
        for path in ["./trip", "a/b", "trip.state", "/x", "..", ".x", "trip.safetensors", ""] {
            assert_eq!(word(path).unwrap(), StateWord::File(path.into()));
        }
        for wrong in ["tríp", "a b", "a\u{202e}", &"x".repeat(65)] {
            assert!(word(wrong).is_err(), "{wrong}");
        }
    }
}
