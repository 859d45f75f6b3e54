//! The lines of a file of data, and the values of JSON in it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde_json::Value;

use crate::error::{Error, Result};
use crate::files;

/// Longest line of a file of JSON, and longest value of a list, in bytes.
pub const MAX_LINE: usize = 64 << 20;

/// The error for a line of a file.
pub(super) fn at(path: &Path, line: usize, reason: &str) -> Error {
    Error::format(path, format!("line {line}: {reason}"))
}

/// The lines of a file, and where in it we are.
pub(super) struct Lines {
    reader: BufReader<File>,
    buffer: Vec<u8>,
    /// Whether the next byte is the first of a line.
    is_start: bool,
    /// The line that was read last, from 1.
    pub(super) line: usize,
    pub(super) read: u64,
    /// Where in a list we are, once its start was found.
    list: Option<List>,
}

/// Where in a list of values we are.
#[derive(Debug, Clone, Copy)]
struct List {
    /// The line of the next byte, from 1.
    line: usize,
    /// Whether no value was read.
    is_first: bool,
}

/// A line with its end, or a part of one.
#[derive(Clone, Copy)]
pub(super) struct Line<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) is_whole: bool,
}

impl Lines {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let reader = BufReader::with_capacity(1 << 16, files::open(path)?);
        Ok(Self { reader, buffer: Vec::new(), is_start: true, line: 0, read: 0, list: None })
    }

    /// The next line, or of a longer one the next `max` bytes; `None` at the end of the file.
    pub(super) fn next(&mut self, path: &Path, max: usize) -> Result<Option<Line<'_>>> {
        self.buffer.clear();
        let part = self.reader.by_ref().take(max as u64).read_until(b'\n', &mut self.buffer);
        let count = part.map_err(|e| Error::io(path, e))?;
        if count == 0 {
            return Ok(None);
        }
        let starts = self.is_start;
        self.is_start = self.buffer.ends_with(b"\n");
        let is_whole = starts && (self.is_start || count < max);
        let mut bytes = &self.buffer[..];
        if self.read == 0 {
            bytes = files::bytes_without_bom(bytes);
        }
        self.line += usize::from(starts);
        self.read += count as u64;
        Ok(Some(Line { bytes, is_whole }))
    }

    /// The next value: of the next line that is not empty, or of the list that the file is if it starts with a bracket.
    /// `None` at the end of the file.
    pub(super) fn json(&mut self, path: &Path) -> Result<Option<Value>> {
        if self.read == 0 && self.is_list(path)? {
            self.list = Some(List { line: 1, is_first: true });
        }
        if self.list.is_some() {
            return self.element(path);
        }
        loop {
            let Some(Line { bytes, is_whole }) = self.next(path, MAX_LINE)? else {
                return Ok(None);
            };
            let value = match (is_whole, bytes.trim_ascii()) {
                (true, b"") => continue,
                (true, bytes) => serde_json::from_slice(bytes).map_err(|e| reason_of(&e)),
                (false, _) => Err(format!("a line of more than {MAX_LINE} bytes")),
            };
            return value.map(Some).map_err(|reason| at(path, self.line, &reason));
        }
    }

    /// Whether the file starts with a bracket, after white space that fits a buffer.
    fn is_list(&mut self, path: &Path) -> Result<bool> {
        let start = self.reader.fill_buf().map_err(|e| Error::io(path, e))?;
        let start = files::bytes_without_bom(start);
        Ok(start.trim_ascii_start().first() == Some(&b'['))
    }

    /// The next value of a list; `None` after its end, behind which nothing may follow.
    fn element(&mut self, path: &Path) -> Result<Option<Value>> {
        let is_first = self.list.as_mut().is_some_and(|list| std::mem::take(&mut list.is_first));
        let next = if is_first {
            // The byte order mark and the bracket.
            while self.take(path)?.is_some_and(|byte| byte != b'[') {}
            self.after_space(path)?
        } else {
            match self.after_space(path)? {
                Some(b',') => {
                    self.take(path)?;
                    self.after_space(path)?.filter(|&byte| byte != b']')
                }
                Some(b']') => Some(b']'),
                Some(_) => return Err(self.wrong(path, "expected `,` or `]` in a list")),
                None => None,
            }
        };
        self.line = self.list.map_or(0, |list| list.line);
        if next == Some(b']') {
            self.take(path)?;
            return match self.after_space(path)? {
                None => Ok(None),
                Some(_) => Err(self.wrong(path, "expected nothing after the list")),
            };
        }
        self.buffer.clear();
        let (mut depth, mut in_text, mut escaped) = (0_usize, false, false);
        while let Some(byte) = self.peek(path)? {
            let is_outside = depth == 0 && !in_text;
            if is_outside && (matches!(byte, b',' | b']') || byte.is_ascii_whitespace()) {
                break;
            }
            if self.buffer.len() == MAX_LINE {
                let reason = format!("a value of more than {MAX_LINE} bytes");
                return Err(at(path, self.line, &reason));
            }
            self.take(path)?;
            self.buffer.push(byte);
            match byte {
                _ if escaped => escaped = false,
                b'\\' if in_text => escaped = true,
                b'"' => in_text = !in_text,
                b'{' | b'[' if !in_text => depth += 1,
                b'}' | b']' if !in_text => depth = depth.saturating_sub(1),
                _ => {}
            }
        }
        let value = serde_json::from_slice(&self.buffer).map(Some);
        value.map_err(|error| at(path, self.line, &format!("not JSON in a list: {error}")))
    }

    /// The next byte, which stays.
    fn peek(&mut self, path: &Path) -> Result<Option<u8>> {
        Ok(self.reader.fill_buf().map_err(|e| Error::io(path, e))?.first().copied())
    }

    /// The next byte of a list.
    fn take(&mut self, path: &Path) -> Result<Option<u8>> {
        let byte = self.peek(path)?;
        if byte.is_some() {
            self.reader.consume(1);
            self.read += 1;
        }
        if let (Some(b'\n'), Some(list)) = (byte, &mut self.list) {
            list.line += 1;
        }
        Ok(byte)
    }

    /// The next byte of a list that is no white space, which stays.
    fn after_space(&mut self, path: &Path) -> Result<Option<u8>> {
        while self.peek(path)?.is_some_and(|byte| byte.is_ascii_whitespace()) {
            self.take(path)?;
        }
        self.peek(path)
    }

    fn wrong(&self, path: &Path, reason: &str) -> Error {
        at(path, self.list.map_or(self.line, |list| list.line), reason)
    }
}

/// What is wrong with a line of JSON, without the number of the line that the reader counts.
fn reason_of(error: &serde_json::Error) -> String {
    let full = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    let what = full.strip_suffix(&place).unwrap_or(&full);
    format!("not JSON: {what} at byte {} of the line", error.column())
}
