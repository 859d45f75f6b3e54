//! The bytes of files: small ones are read, large ones are mapped, so that their pages come from disk when
//! they are touched and are shared between processes.
//!
//! The only unsafe code of checkpoints. What a map cannot promise is said in [`bytes_of`].

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
#[cfg(unix)]
use memmap2::UncheckedAdvice;

use super::Bytes;
use crate::error::{Error, Result};

/// What becomes of a file that is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Up to [`SMALL`] bytes are read, more are mapped.
    Map,
    /// It is read into memory, whatever its size.
    Read,
}

/// Bytes of a file that is read rather than mapped: reading takes some ten milliseconds, and what is read is
/// safe from whatever becomes of the file.
const SMALL: u64 = 64 << 20;

/// Whether so many bytes of a file would be mapped.
pub(crate) fn is_large(bytes: usize) -> bool {
    bytes as u64 > SMALL
}

/// The bytes of the regular file at `path`, read-only.
///
/// A file that is read is read whole or not at all. A mapped one that another process changes meanwhile changes
/// under us, and one that it cuts short ends this process with SIGBUS, or has zeros where its last page was:
/// [`Bytes::check_unchanged`] notices what did not end the process. Files replaced by rename, as downloaders and
/// [`atomic_write`](super::atomic_write) do, are safe: the map keeps the old file.
///
/// # Errors
///
/// [`Error::Io`] for what the system refuses, a folder, a device or a pipe; [`Error::Format`] for
/// an empty file, for one that changes while it is read, and for a symbolic link to nothing, which is how an
/// interrupted Hugging Face download looks.
pub(crate) fn bytes_of(path: &Path, access: Access) -> Result<Bytes> {
    // Before opening: to open a pipe waits for a writer.
    let metadata = fs::metadata(path).map_err(|e| missing(path, e))?;
    if metadata.is_dir() {
        return Err(Error::io(path, io::ErrorKind::IsADirectory.into()));
    }
    if !metadata.is_file() {
        return Err(Error::io(path, io::Error::other("not a regular file")));
    }
    let file = File::open(path).map_err(|e| Error::io(path, e))?;
    let metadata = file.metadata().map_err(|e| Error::io(path, e))?;
    if metadata.len() == 0 {
        return Err(Error::format(path, "file is empty (0 bytes)"));
    }
    if access == Access::Read || metadata.len() <= SMALL {
        return read(path, &file, &metadata);
    }
    Ok(Bytes::mapped(Map::new(path, file, metadata)?))
}

fn read(path: &Path, file: &File, metadata: &Metadata) -> Result<Bytes> {
    let io_error = |e| Error::io(path, e);
    let mut bytes = Vec::new();
    let len =
        usize::try_from(metadata.len()).map_err(|_| io_error(io::ErrorKind::OutOfMemory.into()))?;
    bytes.try_reserve_exact(len).map_err(|e| io_error(e.into()))?;
    file.take(metadata.len()).read_to_end(&mut bytes).map_err(io_error)?;
    if bytes.len() < len {
        return Err(changed(path, metadata.len(), bytes.len() as u64));
    }
    check_unchanged(path, file, metadata)?;
    Ok(Bytes::new(bytes))
}

/// Checks that an open file is still what it was.
fn check_unchanged(path: &Path, file: &File, before: &Metadata) -> Result<()> {
    let now = file.metadata().map_err(|e| Error::io(path, e))?;
    // A system without times of modification has nothing to compare.
    if now.len() != before.len() || now.modified().ok() != before.modified().ok() {
        return Err(changed(path, before.len(), now.len()));
    }
    Ok(())
}

fn changed(path: &Path, before: u64, now: u64) -> Error {
    let what = if now == before {
        "its content is another".to_owned()
    } else {
        format!("it had {before} bytes and has {now}")
    };
    Error::format(
        path,
        format!("file was changed while it was read: {what} (is it still being written?)"),
    )
}

/// The bytes of a file, and the file, to see whether it changes.
pub(super) struct Map {
    bytes: Mmap,
    file: File,
    path: PathBuf,
    /// When it was mapped.
    metadata: Metadata,
}

impl Map {
    fn new(path: &Path, file: File, metadata: Metadata) -> Result<Self> {
        #[expect(unsafe_code, reason = "std has no memory map")]
        // SAFETY: the map is read-only and never shrinks or moves while it lives; the file is open for
        // reading. That nobody else writes to it is the caller's side of the contract, stated at `bytes_of`: no
        // safe code can check it. Bytes that do change are plain `u8`, valid whatever they are, and
        // every length or offset derived from them is checked against the map, never against the file
        // again.
        let map = unsafe { Mmap::map(&file) };
        let bytes = map.map_err(|e| Error::io(path, e))?;
        Ok(Self { bytes, file, path: path.to_path_buf(), metadata })
    }

    /// Checks that the file has the length, and the time of modification, that it had when it was mapped.
    pub(super) fn check_unchanged(&self) -> Result<()> {
        check_unchanged(&self.path, &self.file, &self.metadata)
    }
}

impl AsRef<[u8]> for Map {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Map {
    /// Gives back the memory of the pages that `range` touches; touching them reads the file again.
    pub(super) fn release(&self, range: Range<usize>) {
        let range = range.start..range.end.min(self.bytes.len());
        #[cfg(unix)]
        if !range.is_empty() {
            #[expect(unsafe_code, reason = "pages must be given back while slices of them live")]
            // SAFETY: the advice loses what was written to a page; this map is read-only and of a
            // file, so the pages come back from it as they were, those of neighbours too, under the
            // contract of `bytes_of`. It is advice: a system that refuses it keeps the pages.
            let _ = unsafe {
                let advice = UncheckedAdvice::DontNeed;
                self.bytes.unchecked_advise_range(advice, range.start, range.len())
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with a whole page and a half, and its bytes.
    fn file(name: &str) -> (PathBuf, Vec<u8>) {
        let path = std::env::temp_dir().join(format!("boostr-map-{}-{name}", std::process::id()));
        let bytes: Vec<u8> = (1..=250).cycle().take(6000).collect();
        fs::write(&path, &bytes).unwrap();
        (path, bytes)
    }

    fn cut(path: &Path, len: u64) {
        File::options().write(true).open(path).unwrap().set_len(len).unwrap();
    }

    fn open(path: &Path) -> (File, Metadata) {
        let file = File::open(path).unwrap();
        let metadata = file.metadata().unwrap();
        (file, metadata)
    }

    #[test]
    fn r_f7_what_was_read_stays_whatever_becomes_of_the_file() {
        for access in [Access::Map, Access::Read] {
            let (path, bytes) = file("read");
            let read = bytes_of(&path, access).unwrap();
            cut(&path, 0);
            assert!(!read.is_mapped() && *read == *bytes);
            read.check_unchanged().unwrap();
            fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn r_f7_a_file_that_is_cut_short_between_opening_and_reading_is_an_error() {
        let (path, _) = file("short");
        for (len, words) in [(5999, "has 5999"), (0, "has 0")] {
            let (file, metadata) = open(&path);
            cut(&path, len);
            let error = read(&path, &file, &metadata).unwrap_err().to_string();
            assert!(
                error.contains("changed while it was read") && error.contains(words),
                "{error}"
            );
            assert!(error.contains("boostr-map-"), "{error}");
            cut(&path, 6000);
        }
        // One that grows, or is written into, is another by the time of its modification.
        let (file, metadata) = open(&path);
        cut(&path, 6001);
        assert!(read(&path, &file, &metadata).unwrap_err().to_string().contains("has 6001"));
        cut(&path, 6000);
        let (file, metadata) = open(&path);
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_modified(std::time::UNIX_EPOCH)
            .unwrap();
        assert!(read(&path, &file, &metadata).unwrap_err().to_string().contains("content"));
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn r_f7_a_mapped_file_that_was_cut_within_its_last_page_is_noticed() {
        let (path, bytes) = file("mapped");
        let (file, metadata) = open(&path);
        let map = Bytes::mapped(Map::new(&path, file, metadata).unwrap());
        assert_eq!(*map, *bytes);
        map.check_unchanged().unwrap();
        // Nothing ends the process: what is gone reads as zeros.
        cut(&path, 5000);
        #[cfg(target_os = "linux")]
        assert_eq!(*map, [&bytes[..5000], &[0; 1000]].concat());
        let error = map.slice(0..10).unwrap().check_unchanged().unwrap_err().to_string();
        assert!(error.contains("had 6000 bytes and has 5000"), "{error}");
        // A file of that name that is another one is none of this one's.
        fs::write(path.with_extension("new"), &bytes).unwrap();
        let (file, metadata) = open(&path.with_extension("new"));
        let map = Map::new(&path, file, metadata).unwrap();
        fs::rename(path.with_extension("new"), &path).unwrap();
        fs::remove_file(&path).unwrap();
        map.check_unchanged().unwrap();
    }
}
