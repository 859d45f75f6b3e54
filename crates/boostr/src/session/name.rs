//! Names of sessions, and who may write one.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::{Result, SessionError};
use crate::checkpoint::try_lock;
use crate::error::Error;

/// Longest name, in bytes.
const MAX_NAME: usize = 64;

/// Characters of a wrong name that an error shows.
const SHOWN: usize = 80;

/// Checks that a name is one that a session may have: 1 to 64 of `A-Z a-z 0-9 . _ -`, of which the first is no dot. So
/// it is one file in one folder, and looks like no other.
///
/// # Errors
///
/// [`SessionError::Name`].
///
/// ```
/// use boostr::session::check_name;
///
/// assert!(check_name("trip-2.b").is_ok());
/// for name in ["", ".", "../trip", "a/b", "tríp", "a\0", ".hidden"] {
///     assert!(check_name(name).is_err());
/// }
/// ```
pub fn check_name(name: &str) -> Result<()> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let is_name = (1..=MAX_NAME).contains(&name.len())
        && name.bytes().all(is_plain)
        && !name.starts_with('.');
    if is_name {
        return Ok(());
    }
    Err(SessionError::Name { name: name.chars().take(SHOWN).collect() })
}

/// Says that this process alone has the session of a name.
#[derive(Debug)]
pub(super) struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Takes the lock of a name that was checked.
    pub(super) fn new(folder: &Path, name: &str) -> Result<Self> {
        let path = folder.join(format!(".{name}.lock"));
        let busy = || SessionError::Busy { name: name.to_owned() };
        loop {
            let file = try_lock(&path)?.ok_or_else(busy)?;
            if is_at(&file, &path).map_err(|error| Error::io(&path, error))? {
                return Ok(Self { file, path });
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Only who holds it may remove it, and who finds it removed takes the next.
        #[cfg(unix)]
        let _ = fs::remove_file(&self.path);
        // Closing it would not do while a process that is just being started has a copy.
        let _ = self.file.unlock();
    }
}

/// Whether the file that was locked is still the one at the path.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> std::io::Result<bool> {
    use std::os::unix::fs::MetadataExt;

    let own = file.metadata()?;
    let there = match fs::symlink_metadata(path) {
        Ok(there) => there,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    Ok((own.dev(), own.ino()) == (there.dev(), there.ino()))
}

/// Elsewhere nobody removes it.
#[cfg(not(unix))]
fn is_at(_file: &File, _path: &Path) -> std::io::Result<bool> {
    Ok(true)
}
