//! The file of a session: records one after another, of which only the last can be torn.
//!
//! | bytes | value |
//! |---|---|
//! | 4 | length of the JSON, little-endian |
//! | 4 | CRC-32 of these four bytes and the JSON, little-endian |
//! | length | the record as a JSON object; the last one has the summary of the session, as `stand` |
//!
//! A record is written by one call and forced to disk before it counts. A killed process may leave a
//! part of one at the end of the file. The next process that opens the file to write moves it to
//! `log.torn` beside. A file without one whole record is no log, and is left alone. A broken record
//! with whole ones after it was not torn but damaged, and is an error.
//!
//! JSON has no byte below 0x20 (`serde_json` escapes them), and the length of a record under 512 MiB
//! has one as its last byte. So a record lies around one of these bytes, and to look for records takes
//! as long as the file is.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::summary::LogSummary;
use super::tree::Record;
use crate::checkpoint::{crc32, open_own};
use crate::error::{Error, Result};

/// Longest log that is read, in bytes.
const MAX_LOG: u64 = 1 << 30;

/// Bytes before the JSON of a record.
const HEAD: usize = 8;

/// Bytes at the end of a log among which its last record is looked for first.
const TAIL: u64 = 4 << 10;

/// What is written of a record. Readers of records pass over the summary.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    record: &'a Record,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "stand")]
    summary: Option<&'a LogSummary>,
}

/// What a list reads of one.
#[derive(Deserialize)]
struct LastLine {
    #[serde(rename = "stand")]
    summary: Option<LogSummary>,
}

/// A log that is open to be written.
#[derive(Debug)]
pub(super) struct Log {
    path: PathBuf,
    file: File,
    /// Bytes of its whole records.
    len: u64,
}

impl Log {
    /// A new log of some records, on disk, with the session's summary after them.
    pub(super) fn create(path: &Path, records: &[Record], summary: &LogSummary) -> Result<()> {
        let mut bytes = Vec::new();
        let mut records = records.iter().peekable();
        while let Some(record) = records.next() {
            let summary = records.peek().is_none().then_some(summary);
            bytes.extend(encode(path, &Line { record, summary })?);
        }
        let write = || {
            let mut file = open_own(path, OpenOptions::new().write(true).create_new(true))?;
            file.write_all(&bytes)?;
            file.sync_all()
        };
        write().map_err(|error| Error::io(path, error))
    }

    /// Opens a log to go on with it, with what `make` makes of its records. What is torn at its end moves to `log.torn`,
    /// once that is made: a log that is refused stays as it is.
    pub(super) fn open<T>(
        path: &Path,
        make: impl FnOnce(&Path, Vec<Record>) -> Result<T>,
    ) -> Result<(Self, T)> {
        let (records, len) = read(path)?;
        if records.is_empty() {
            let reason = "no log of a session: it begins with no whole record";
            return Err(Error::damaged(path, reason));
        }
        let made = make(path, records)?;
        let open = || -> io::Result<File> {
            let mut file = open_own(path, OpenOptions::new().read(true).write(true))?;
            if file.metadata()?.len() != len {
                file.seek(SeekFrom::Start(len))?;
                set_aside(&mut file, &path.with_extension("torn"))?;
                file.set_len(len)?;
                file.sync_all()?;
            }
            Ok(file)
        };
        let file = open().map_err(|error| error_of(path, error))?;
        Ok((Self { path: path.to_path_buf(), file, len }, made))
    }

    /// Bytes of its whole records.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Adds a record, with the session's summary after it. When this returns it is on disk; when it fails the log is
    /// as it was.
    pub(super) fn append(&mut self, record: &Record, summary: &LogSummary) -> Result<()> {
        let bytes = encode(&self.path, &Line { record, summary: Some(summary) })?;
        let len = self.len.saturating_add(bytes.len() as u64);
        if len > MAX_LOG {
            let reason = format!("a session of more than {MAX_LOG} bytes");
            return Err(Error::format(&self.path, reason));
        }
        let mut write = || {
            self.file.seek(SeekFrom::Start(self.len))?;
            self.file.write_all(&bytes)?;
            self.file.sync_data()
        };
        if let Err(error) = write() {
            // What cannot be cut now is cut when the log is opened again.
            let _ = self.file.set_len(self.len);
            return Err(Error::io(&self.path, error));
        }
        self.len = len;
        Ok(())
    }
}

/// Adds the rest of a file to that at `path`, on disk. What was set aside before makes room once it is a log's length.
fn set_aside(rest: &mut File, path: &Path) -> io::Result<()> {
    let mut aside = open_own(path, OpenOptions::new().create(true).append(true))?;
    if aside.metadata()?.len() >= MAX_LOG {
        aside.set_len(0)?;
    }
    io::copy(rest, &mut aside)?;
    aside.sync_all()
}

/// The session's summary by the last record of its log, of which little more than that is read. `None` where the log is torn
/// there, or that record does not say.
pub(super) fn summary(path: &Path) -> Result<Option<LogSummary>> {
    let read = || -> io::Result<Option<LogSummary>> {
        let (mut file, len) = open(path)?;
        let mut size = TAIL.min(len);
        loop {
            file.seek(SeekFrom::Start(len.saturating_sub(size)))?;
            let mut bytes = Vec::new();
            (&mut file).take(size).read_to_end(&mut bytes)?;
            if let Some(json) = last(&bytes) {
                let line = serde_json::from_slice::<LastLine>(json);
                return Ok(line.ok().and_then(|line| line.summary));
            }
            if size == len.min(MAX_LOG) {
                return Ok(None);
            }
            size = size.saturating_mul(4).min(len).min(MAX_LOG);
        }
    };
    read().map_err(|error| error_of(path, error))
}

/// What is no file is no log; the rest is the system's.
fn error_of(path: &Path, error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::Other => Error::damaged(path, error.to_string()),
        _ => Error::io(path, error),
    }
}

/// The JSON of the record that ends where `bytes` do, if it is whole and all of it is there.
fn last(bytes: &[u8]) -> Option<&[u8]> {
    let control = bytes.iter().rposition(|&byte| is_control(byte))?;
    let ends =
        |at: &usize| at.saturating_add(HEAD).saturating_add(length(bytes, *at)) == bytes.len();
    around(control).filter(ends).find_map(|at| payload(bytes, at))
}

/// Where the first whole record after a byte begins.
fn whole_after(bytes: &[u8], after: usize) -> Option<usize> {
    let controls = bytes.iter().enumerate().skip(after).filter(|(_, byte)| is_control(**byte));
    let mut controls = controls.map(|(at, _)| at).peekable();
    while let Some(control) = controls.next() {
        let end = controls.peek().copied().unwrap_or(bytes.len());
        // Its JSON ends before the next such byte.
        let bytes = bytes.get(..end)?;
        let is_later =
            |at: &usize| *at > after && bytes.get(at.saturating_add(HEAD)) == Some(&b'{');
        if let Some(at) = around(control).filter(is_later).find(|&at| payload(bytes, at).is_some())
        {
            return Some(at);
        }
    }
    None
}

/// Where a record may begin of whose head the byte at `control` is the last that is no character: that of the length,
/// or one of the four of the checksum.
fn around(control: usize) -> impl Iterator<Item = usize> {
    (3..HEAD).filter_map(move |byte| control.checked_sub(byte))
}

fn is_control(byte: u8) -> bool {
    byte < b' '
}

/// The length that stands at a byte.
fn length(bytes: &[u8], at: usize) -> usize {
    let len = bytes.get(at..).and_then(|rest| rest.first_chunk::<4>());
    len.map_or(0, |len| u32::from_le_bytes(*len) as usize)
}

/// A log that is open to be read, and its length.
fn open(path: &Path) -> io::Result<(File, u64)> {
    let file = open_own(path, OpenOptions::new().read(true))?;
    let len = file.metadata()?.len();
    Ok((file, len))
}

/// The whole records of a log, and the bytes that they take.
pub(super) fn read(path: &Path) -> Result<(Vec<Record>, u64)> {
    let read = || -> io::Result<Vec<u8>> {
        let (file, _) = open(path)?;
        let mut bytes = Vec::new();
        file.take(MAX_LOG.saturating_add(1)).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|error| error_of(path, error))?;
    if bytes.len() as u64 > MAX_LOG {
        return Err(Error::format(path, format!("expected at most {MAX_LOG} bytes, found more")));
    }
    let (mut records, mut at) = (Vec::new(), 0_usize);
    while let Some(json) = payload(&bytes, at) {
        let record = serde_json::from_slice(json).map_err(|error| {
            Error::damaged(path, format!("record at byte {at} is none of a session: {error}"))
        })?;
        records.push(record);
        at = at.saturating_add(HEAD).saturating_add(json.len());
    }
    if let Some(next) = whole_after(&bytes, at) {
        let reason = format!("record at byte {at} is damaged, and a whole one follows at {next}");
        return Err(Error::damaged(path, reason));
    }
    Ok((records, at as u64))
}

/// The JSON of the record at a byte, if there is a whole one.
fn payload(bytes: &[u8], at: usize) -> Option<&[u8]> {
    let rest = bytes.get(at..)?;
    let (len, rest) = rest.split_first_chunk::<4>()?;
    let (sum, rest) = rest.split_first_chunk::<4>()?;
    let json = rest.get(..u32::from_le_bytes(*len) as usize)?;
    let is_whole = json.starts_with(b"{") && sum_of(*len, json) == u32::from_le_bytes(*sum);
    is_whole.then_some(json)
}

fn encode(path: &Path, line: &Line<'_>) -> Result<Vec<u8>> {
    let json = serde_json::to_vec(line).map_err(|error| Error::io(path, error.into()))?;
    let len = u32::try_from(json.len())
        .map_err(|_| Error::format(path, "a record of more than 4 GiB"))?
        .to_le_bytes();
    Ok([&len[..], &sum_of(len, &json).to_le_bytes(), &json].concat())
}

fn sum_of(len: [u8; 4], json: &[u8]) -> u32 {
    crc32(crc32(0, &len), json)
}
