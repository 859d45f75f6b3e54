//! Files of this program's own: opened without following a link or waiting for another process; and a lock
//! that says that this process alone writes something.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::path::Path;

use crate::error::{Error, Result};

/// Opens a regular file at `path` as `options` say. One that is made is its owner's alone. A link is not followed,
/// and a pipe or a device is not waited for: they are errors.
pub(crate) fn open_own(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let not_regular = |kind: fs::FileType| {
        let found = if kind.is_symlink() { "a link" } else { "not a regular file" };
        io::Error::other(format!("expected a file, found {found}"))
    };
    // Looked at first for a clear message; what counts is the file that was opened.
    if let Ok(found) = fs::symlink_metadata(path)
        && !found.is_file()
    {
        return Err(not_regular(found.file_type()));
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    }
    let file = options.open(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() { Ok(file) } else { Err(not_regular(kind)) }
}

/// Takes the rights of all others from a file or folder, where they have some.
///
/// # Errors
///
/// When it is another user's.
#[cfg(unix)]
pub(crate) fn make_private(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    const OTHERS: u32 = 0o077;
    let found = fs::metadata(path)?;
    let mode = found.permissions().mode();
    if mode & OTHERS != 0 {
        fs::set_permissions(path, fs::Permissions::from_mode(mode & !OTHERS))?;
    }
    Ok(())
}

/// Elsewhere a file has the rights of its folder.
#[cfg(not(unix))]
pub(crate) fn make_private(_path: &Path) -> io::Result<()> {
    Ok(())
}

/// Locks the file at `path`, made where there is none, until what is returned is dropped; `None` when another
/// process has it. Some network file systems have no locks: there everybody gets it.
///
/// The file stays: to remove it would let two processes lock two files of one name.
///
/// # Errors
///
/// [`Error::Format`] naming the lock when it is a link or no file; [`Error::Io`] when the system refuses.
pub(crate) fn try_lock(path: &Path) -> Result<Option<File>> {
    // What somebody else keeps under that name is left as it is.
    let file = open_own(path, OpenOptions::new().create(true).truncate(false).write(true));
    let file = file.map_err(|error| match error.kind() {
        ErrorKind::Other => Error::format(path, error.to_string()),
        _ => Error::io(path, error),
    })?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(e)) if e.kind() == ErrorKind::Unsupported => Ok(Some(file)),
        Err(TryLockError::Error(e)) => Err(Error::io(path, e)),
    }
}
