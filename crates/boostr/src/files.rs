//! Files that people name: regular ones, of a bounded length, and texts without the mark that some editors put first.
//!
//! To open a pipe waits for a writer, and a device may have no end, so what a path leads to is asked before it is opened.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::time::UNIX_EPOCH;

use crate::error::{Error, Result};

/// The mark that some editors put before a text in UTF-8.
pub const BOM: &str = "\u{feff}";

/// Longest text of a configuration, in bytes.
pub const MAX_CONFIG: u64 = 16 << 20;

/// A text without the mark before it.
///
/// ```
/// assert_eq!(boostr::files::without_bom("\u{feff}{}"), "{}");
/// assert_eq!(boostr::files::without_bom("{}\u{feff}"), "{}\u{feff}");
/// ```
#[must_use]
pub fn without_bom(text: &str) -> &str {
    text.strip_prefix(BOM).unwrap_or(text)
}

/// The same for bytes.
#[must_use]
pub fn bytes_without_bom(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(BOM.as_bytes()).unwrap_or(bytes)
}

/// The name, length in bytes and time of modification in nanoseconds of a file: another once it was replaced. `None`
/// where there is no such file.
pub(crate) fn stamp(path: &Path) -> Option<String> {
    let metadata = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    let modified = metadata.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let modified = modified.map_or(0, |at| at.as_nanos());
    let name = path.file_name()?.to_string_lossy().into_owned();
    Some(format!("{name} {} {modified}", metadata.len()))
}

/// Opens a regular file.
///
/// # Errors
///
/// [`Error::Io`] for what the system refuses, and for a folder, a device, a pipe or a socket.
///
/// ```
/// # #[cfg(unix)]
/// assert!(boostr::files::open("/dev/zero").is_err());
/// ```
pub fn open(path: impl AsRef<Path>) -> Result<File> {
    let path = path.as_ref();
    let metadata = fs::metadata(path).map_err(|e| Error::io(path, e))?;
    if metadata.is_dir() {
        return Err(Error::io(path, io::ErrorKind::IsADirectory.into()));
    }
    if !metadata.is_file() && !is_open_pipe(path, &metadata) {
        let reason = "expected a regular file, found a pipe or a device";
        return Err(Error::io(path, io::Error::other(reason)));
    }
    File::open(path).map_err(|e| Error::io(path, e))
}

/// Whether it is the end of a pipe that the process was started with: `<(command)` of a shell.
#[cfg(unix)]
fn is_open_pipe(path: &Path, metadata: &fs::Metadata) -> bool {
    use std::os::unix::fs::FileTypeExt;

    let given = ["/dev/fd/", "/dev/stdin", "/proc/self/fd/"];
    metadata.file_type().is_fifo()
        && path.to_str().is_some_and(|path| given.iter().any(|of| path.starts_with(of)))
}

#[cfg(not(unix))]
fn is_open_pipe(_: &Path, _: &fs::Metadata) -> bool {
    false
}

/// All bytes of a regular file of at most `most`.
///
/// # Errors
///
/// As [`open`]; [`Error::Format`] when it is longer.
pub fn read(path: impl AsRef<Path>, most: u64) -> Result<Vec<u8>> {
    let path = path.as_ref();
    read_from(open(path)?, path, most)
}

/// All bytes of a reader; `name` stands in errors.
///
/// # Errors
///
/// [`Error::Io`]; [`Error::Format`] when there are more than `most`.
pub fn read_from(reader: impl Read, name: impl AsRef<Path>, most: u64) -> Result<Vec<u8>> {
    let name = name.as_ref();
    let mut bytes = Vec::new();
    reader.take(most + 1).read_to_end(&mut bytes).map_err(|e| Error::io(name, e))?;
    if bytes.len() as u64 > most {
        return Err(Error::format(name, format!("file is longer than {most} bytes")));
    }
    Ok(bytes)
}

/// The text of a regular file of at most `most` bytes, without a mark before it.
///
/// # Errors
///
/// As [`read`]; [`Error::Format`] when it is not UTF-8, with the place.
///
/// ```
/// use boostr::files;
///
/// let path = std::env::temp_dir().join(format!("boostr-doc-bom-{}", std::process::id()));
/// std::fs::write(&path, "\u{feff}a text")?;
/// assert_eq!(files::read_text(&path, 100)?, "a text");
/// assert!(files::read_text(&path, 5).is_err());
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn read_text(path: impl AsRef<Path>, most: u64) -> Result<String> {
    let path = path.as_ref();
    text_of(read(path, most)?, path)
}

/// Bytes as text, without a mark before it; `name` stands in errors.
///
/// # Errors
///
/// [`Error::Format`] when they are not UTF-8, with the place.
pub fn text_of(bytes: Vec<u8>, name: impl AsRef<Path>) -> Result<String> {
    utf8(bytes).map_err(|reason| Error::format(name, reason))
}

/// Bytes as text, without a mark before it.
///
/// # Errors
///
/// When they are not UTF-8: why, with the place.
pub fn utf8(bytes: Vec<u8>) -> Result<String, String> {
    if bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff") {
        return Err("expected UTF-8 text, found UTF-16".to_owned());
    }
    let mut text = String::from_utf8(bytes).map_err(|error| {
        format!("not UTF-8 text: byte {} is wrong", error.utf8_error().valid_up_to())
    })?;
    if text.starts_with(BOM) {
        text.drain(..BOM.len());
    }
    Ok(text)
}
