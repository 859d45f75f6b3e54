//! A file whose lock says that this process alone writes something.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::path::Path;

use crate::error::{Error, Result};

/// Locks the file at `path`, made where there is none, until what is returned is dropped; `None` when another
/// process has it. Some network file systems have no locks: there everybody gets it.
///
/// The file stays: to remove it would let two processes lock two files of one name.
///
/// # Errors
///
/// [`Error::Io`] when the system refuses.
pub(crate) fn try_lock(path: &Path) -> Result<Option<File>> {
    // What somebody else keeps under that name is left as it is.
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path);
    let file = file.map_err(|e| Error::io(path, e))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(e)) if e.kind() == ErrorKind::Unsupported => Ok(Some(file)),
        Err(TryLockError::Error(e)) => Err(Error::io(path, e)),
    }
}
