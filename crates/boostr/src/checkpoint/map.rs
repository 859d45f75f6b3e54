//! Memory-mapped files: pages come from disk when they are touched and are shared between
//! processes.
//!
//! The only unsafe code of checkpoints. What a map cannot promise is said in [`map`].

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::Path;

use memmap2::Mmap;
#[cfg(unix)]
use memmap2::UncheckedAdvice;

use super::Bytes;
use crate::error::{Error, Result};

/// The bytes of the regular file at `path`, read-only.
///
/// A file that another process changes meanwhile changes under us, and one that it cuts short ends
/// this process with SIGBUS. Files replaced by rename, as downloaders and
/// [`atomic_write`](super::atomic_write) do, are safe: the map keeps the old file.
///
/// # Errors
///
/// [`Error::Io`] for what the system refuses, a folder, a device or a pipe; [`Error::Format`] for
/// an empty file and for a symbolic link to nothing, which is how an interrupted Hugging Face
/// download looks.
pub(crate) fn map(path: &Path) -> Result<Bytes> {
    // Before opening: to open a pipe waits for a writer.
    let metadata = fs::metadata(path).map_err(|e| missing(path, e))?;
    if metadata.is_dir() {
        return Err(Error::io(path, io::ErrorKind::IsADirectory.into()));
    }
    if !metadata.is_file() {
        return Err(Error::io(path, io::Error::other("not a regular file")));
    }
    let file = File::open(path).map_err(|e| Error::io(path, e))?;
    if file.metadata().map_err(|e| Error::io(path, e))?.len() == 0 {
        return Err(Error::format(path, "file is empty (0 bytes)"));
    }
    #[expect(unsafe_code, reason = "std has no memory map")]
    // SAFETY: the map is read-only and never shrinks or moves while it lives; the file is open for
    // reading. That nobody else writes to it is the caller's side of the contract, stated above: no
    // safe code can check it. Bytes that do change are plain `u8`, valid whatever they are, and
    // every length or offset derived from them is checked against the map, never against the file
    // again.
    let map = unsafe { Mmap::map(&file) };
    Ok(Bytes::mapped(Map(map.map_err(|e| Error::io(path, e))?)))
}

/// The bytes of a file.
pub(super) struct Map(Mmap);

impl AsRef<[u8]> for Map {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Map {
    /// Gives back the memory of the pages that `range` touches; touching them reads the file again.
    pub(super) fn release(&self, range: Range<usize>) {
        let range = range.start..range.end.min(self.0.len());
        #[cfg(unix)]
        if !range.is_empty() {
            #[expect(unsafe_code, reason = "pages must be given back while slices of them live")]
            // SAFETY: the advice loses what was written to a page; this map is read-only and of a
            // file, so the pages come back from it as they were, those of neighbours too, under the
            // contract of `map`. It is advice: a system that refuses it keeps the pages.
            let _ = unsafe {
                let advice = UncheckedAdvice::DontNeed;
                self.0.unchecked_advise_range(advice, range.start, range.len())
            };
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

/// The error for a `path` that could not be looked at.
pub(super) fn missing(path: &Path, error: io::Error) -> Error {
    let dangling = error.kind() == io::ErrorKind::NotFound
        && fs::symlink_metadata(path).is_ok_and(|link| link.is_symlink());
    if dangling {
        let target = fs::read_link(path).unwrap_or_default();
        let target = target.display();
        let reason =
            format!("incomplete download: the link leads to `{target}`, which is not there");
        return Error::format(path, reason);
    }
    Error::io(path, error)
}
