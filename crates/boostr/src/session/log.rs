//! The file of a session: records one after another, of which only the last can be torn.
//!
//! | bytes | value |
//! |---|---|
//! | 4 | length of the JSON, little-endian |
//! | 4 | CRC-32 of these four bytes and the JSON, little-endian |
//! | length | the record as a JSON object; the last one has the summary of the session, as `stand` |
//!
//! A record is written by one call and forced to disk before it counts. A killed process may leave a
//! part of one at the end of the file. The next process that opens the file to write cuts it off. A
//! broken record with whole ones after it was not torn but damaged, and is an error.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::summary::LogSummary;
use super::tree::Record;
use crate::checkpoint::crc32;
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
            let mut file = File::create_new(path)?;
            file.write_all(&bytes)?;
            file.sync_all()
        };
        write().map_err(|error| Error::io(path, error))
    }

    /// Opens a log to go on with it, and cuts off what is torn at its end.
    pub(super) fn open(path: &Path) -> Result<(Self, Vec<Record>)> {
        let (records, len) = read(path)?;
        let open = || -> io::Result<File> {
            let file = OpenOptions::new().read(true).write(true).open(path)?;
            if file.metadata()?.len() != len {
                file.set_len(len)?;
                file.sync_all()?;
            }
            Ok(file)
        };
        let file = open().map_err(|error| Error::io(path, error))?;
        Ok((Self { path: path.to_path_buf(), file, len }, records))
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
    read().map_err(|error| Error::io(path, error))
}

/// The JSON of the record that ends where `bytes` do, if it is whole and all of it is there. Inside of JSON there is no
/// record: the length before it would have to be spelled in printable characters.
fn last(bytes: &[u8]) -> Option<&[u8]> {
    let ends = |at: usize| {
        let len = bytes.get(at..)?.first_chunk::<4>()?;
        let end = at.checked_add(HEAD)?.checked_add(u32::from_le_bytes(*len) as usize)?;
        (end == bytes.len()).then(|| payload(bytes, at))?
    };
    (0..bytes.len()).rev().find_map(ends)
}

/// A log that is open to be read, and its length.
fn open(path: &Path) -> io::Result<(File, u64)> {
    // Before opening: to open a pipe waits for a writer.
    if fs::metadata(path)?.is_file() {
        let file = File::open(path)?;
        let len = file.metadata()?.len();
        Ok((file, len))
    } else {
        Err(io::Error::other("not a regular file"))
    }
}

/// The whole records of a log, and the bytes that they take.
pub(super) fn read(path: &Path) -> Result<(Vec<Record>, u64)> {
    let read = || -> io::Result<Vec<u8>> {
        let (file, _) = open(path)?;
        let mut bytes = Vec::new();
        file.take(MAX_LOG.saturating_add(1)).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|error| Error::io(path, error))?;
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
    let after = at.saturating_add(1)..bytes.len();
    if let Some(next) = after.into_iter().find(|&next| payload(&bytes, next).is_some()) {
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
