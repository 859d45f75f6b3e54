//! The tokens of all documents in one file, written once and mapped.
//!
//! ```text
//! bytes
//!    8   "boostrTK"
//!    4   version of the format, 1
//!    4   id of the end-of-text token
//!    4   size of the vocabulary: every id is below it
//!    4   0
//!    8   fingerprint of what made the ids: tokenizer, start and end of a text, chat template
//!    8   fingerprint of the input files: names, kinds, sizes, times of modification
//!  4 T   tokens, a word each: bits 0-23 the id, bit 31 whether it counts, bit 30 whether a document ends
//!        with it, the others 0
//!    8   number of documents
//!    8   number of tokens, T
//!    8   bytes of text that the tokens were made of
//! ```
//!
//! Numbers are little-endian. The counts are last, since the file is written in one stream, which is longer than
//! memory may be. A document is at least one token and the end-of-text token.

use std::fmt;
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use rayon::prelude::*;

use super::documents::{DataFile, Document, Documents};
use super::encode::{Encoded, Encoder};
use super::lines::at;
use crate::checkpoint::{Access, Bytes, Fnv, atomic_write, bytes_of, crc32};
use crate::error::{Error, Result};
use crate::tokenizer::MAX_TOKEN_ID;

const MAGIC: &[u8; 8] = b"boostrTK";
const VERSION: u32 = 1;
const HEADER: usize = 40;
const TRAILER: usize = 24;

const COUNTS: u32 = 1 << 31;
const ENDS: u32 = 1 << 30;

/// Text that is tokenized at once, in bytes, and documents.
const BLOCK: usize = 4 << 20;
const BLOCK_DOCUMENTS: usize = 4096;

/// Words that one thread checks at once.
const CHECKED: usize = 1 << 18;

/// The tokens of documents, in a mapped file.
///
/// ```
/// use boostr::train::data::TokenFile;
///
/// // Two documents, each ended by token 0.
/// let tokens = TokenFile::of_documents(&[vec![5, 6], vec![7]], 0, 8)?;
/// assert_eq!((tokens.documents(), tokens.tokens(), tokens.inputs()), (2, 5, 3));
/// assert_eq!(tokens.document(0), [5, 6, 0]);
/// # Ok::<(), boostr::Error>(())
/// ```
pub struct TokenFile {
    path: PathBuf,
    words: Bytes,
    header: Header,
    /// Of each document, the number of tokens up to its end.
    ends: Vec<usize>,
    counted: usize,
    checksum: u32,
    bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    end: u32,
    vocab_size: u32,
    encoder: u64,
    inputs: u64,
}

impl fmt::Debug for TokenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenFile")
            .field("path", &self.path)
            .field("documents", &self.documents())
            .field("tokens", &self.tokens())
            .finish_non_exhaustive()
    }
}

impl TokenFile {
    /// The tokens of `files`: those that the file at `path` holds when it was made of the same files by the same
    /// encoder, else made anew. `progress` is told `(done, total)` bytes of the files.
    ///
    /// The same files give the same bytes. Files that changed are known by name, size and time of modification.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] naming file and line for what cannot be read or tokenized, when there is no document, or when
    /// at `path` is a file of another kind, which is left alone; [`Error::Io`].
    pub fn prepare(
        path: &Path,
        files: &[DataFile],
        encoder: &Encoder,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Self> {
        let (inputs, total) = fingerprint(files)?;
        let header = Header {
            end: encoder.end(),
            vocab_size: encoder.vocab_size(),
            encoder: encoder.fingerprint()?,
            inputs,
        };
        if is_there(path)?
            && let Ok(found) = Self::open(path)
            && found.header == header
        {
            return Ok(found);
        }
        let mut failed = None;
        let written = atomic_write(path, |out| {
            write_all(out, header, files, encoder, &mut |done| progress(done, total)).map_err(
                |error| match error {
                    Failure::Write(error) => error,
                    Failure::Input(error) => {
                        failed = Some(error);
                        io::Error::other("bad input")
                    }
                },
            )
        });
        if let Some(error) = failed {
            return Err(error);
        }
        written?;
        if fingerprint(files)?.0 != inputs {
            // What was written carries the old fingerprint and will be made again.
            return Err(Error::format(
                path,
                "the data files changed while they were read: try again",
            ));
        }
        Self::open(path)
    }

    /// Reads a file of tokens, all of which are checked.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], and [`Error::Format`] when it breaks the format.
    pub fn open(path: &Path) -> Result<Self> {
        Self::read(path, &bytes_of(path, Access::Map)?)
    }

    /// Reads the bytes of such a file; `name` stands for its path in errors.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] when they break the format.
    pub fn from_bytes(name: &str, bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> Result<Self> {
        Self::read(Path::new(name), &Bytes::new(bytes))
    }

    /// Documents that are in memory; `end` is added to those that do not end with it. All tokens count.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when an id is not below `vocab_size` or a document has no token but `end`;
    /// [`Error::Format`] when there is no document.
    pub fn of_documents(documents: &[Vec<u32>], end: u32, vocab_size: u32) -> Result<Self> {
        let refuse = |reason| Err(Error::Argument { name: "documents", reason });
        if let Some(id) = documents.iter().flatten().find(|&&id| id >= vocab_size) {
            return refuse(format!("expected ids below {vocab_size}, found {id}"));
        }
        if let Some(index) = documents
            .iter()
            .position(|ids| matches!(ids[..], [] | [_]) && ids.iter().all(|&id| id == end))
        {
            return refuse(format!("document {index} has no token but its end"));
        }
        let mut bytes = Vec::new();
        let header = Header { end, vocab_size, encoder: 0, inputs: 0 };
        write_documents(&mut bytes, header, documents).map_err(|e| Error::io("memory", e))?;
        Self::from_bytes("memory", bytes)
    }

    fn read(path: &Path, bytes: &Bytes) -> Result<Self> {
        parse(bytes)
            .map(|parsed| Self { path: path.to_path_buf(), ..parsed })
            .map_err(|reason| Error::format(path, reason))
    }

    /// Number of documents, at least 1.
    pub fn documents(&self) -> usize {
        self.ends.len()
    }

    /// Number of tokens, the end of each document among them.
    pub fn tokens(&self) -> usize {
        self.words.len() / 4
    }

    /// Number of tokens that are inputs: all but the ends.
    pub fn inputs(&self) -> usize {
        self.tokens() - self.documents()
    }

    /// Number of tokens that count: that are to be predicted.
    pub fn counted(&self) -> usize {
        self.counted
    }

    /// Checksum of the tokens: other tokens have another one.
    pub fn checksum(&self) -> u32 {
        self.checksum
    }

    /// Number of documents that are longer than a row of `seq_len` tokens.
    pub fn longer_than(&self, seq_len: usize) -> usize {
        (0..self.documents()).filter(|&document| self.len(document) - 1 > seq_len).count()
    }

    /// Bytes of text that the tokens were made of.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The token that ends a document.
    pub fn end(&self) -> u32 {
        self.header.end
    }

    /// Every id is below it.
    pub fn vocab_size(&self) -> u32 {
        self.header.vocab_size
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The ids of a document, its end among them.
    ///
    /// # Panics
    ///
    /// When there is no document `index`.
    pub fn document(&self, index: usize) -> Vec<u32> {
        self.words(index, 0, self.len(index)).map(|(id, _)| id).collect()
    }

    /// Number of tokens of a document, its end among them: at least 2.
    pub(super) fn len(&self, index: usize) -> usize {
        self.ends[index] - self.first(index)
    }

    fn first(&self, index: usize) -> usize {
        if index == 0 { 0 } else { self.ends[index - 1] }
    }

    /// Of `count` tokens of a document from its token `from`, the id and whether it counts.
    pub(super) fn words(
        &self,
        index: usize,
        from: usize,
        count: usize,
    ) -> impl Iterator<Item = (u32, bool)> {
        assert!(
            from + count <= self.len(index),
            "document {index} has no tokens up to {from} + {count}"
        );
        let first = self.first(index) + from;
        let words = &self.words.as_chunks::<4>().0[first..first + count];
        words.iter().map(|word| {
            let word = u32::from_le_bytes(*word);
            (word & MAX_TOKEN_ID, word & COUNTS != 0)
        })
    }
}

// Reading

fn parse(bytes: &Bytes) -> Result<TokenFile, String> {
    let Some(len) = bytes.len().checked_sub(HEADER + TRAILER) else {
        return Err(format!(
            "file has {} bytes, a file of tokens has at least {}",
            bytes.len(),
            HEADER + TRAILER
        ));
    };
    let u32_at = |at| u32::from_le_bytes(array(bytes, at));
    let u64_at = |at| u64::from_le_bytes(array(bytes, at));
    if array(bytes, 0) != *MAGIC {
        return Err("no file of tokens: it does not start with `boostrTK`".into());
    }
    if u32_at(8) != VERSION {
        return Err(format!("version is {}, expected {VERSION}", u32_at(8)));
    }
    let (end, vocab_size) = (u32_at(12), u32_at(16));
    if !(1..=MAX_TOKEN_ID + 1).contains(&vocab_size) {
        return Err(format!("vocabulary is {vocab_size}, expected 1 to 2^24"));
    }
    if end >= vocab_size {
        return Err(format!("end-of-text token is {end}, the vocabulary has {vocab_size}"));
    }
    if u32_at(20) != 0 {
        return Err(format!("bytes 20 to 23 are {}, expected 0", u32_at(20)));
    }
    let header = Header { end, vocab_size, encoder: u64_at(24), inputs: u64_at(32) };

    let trailer = HEADER + len;
    let (documents, tokens, text) = (u64_at(trailer), u64_at(trailer + 8), u64_at(trailer + 16));
    if tokens.checked_mul(4) != Some(len as u64) {
        return Err(format!(
            "number of tokens is {tokens}, but there are {len} bytes of them, 4 each"
        ));
    }
    let words = bytes.slice(HEADER..trailer).ok_or("tokens are outside of the file")?;
    let Checked { ends, counted, checksum } = check(&words, header)?;
    if documents != ends.len() as u64 {
        return Err(format!("number of documents is {documents}, but {} end", ends.len()));
    }
    if u32::try_from(documents).is_err() {
        return Err(format!("number of documents is {documents}, at most 2^32 - 1 are supported"));
    }
    let path = PathBuf::new();
    Ok(TokenFile { path, words, header, ends, counted, checksum, bytes: text })
}

/// The `N` bytes at `at`, which are there.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    *bytes[at..].first_chunk().expect("the length was checked")
}

/// What is found out of some words.
struct Checked {
    /// Where documents end.
    ends: Vec<usize>,
    /// How many tokens count.
    counted: usize,
    checksum: u32,
}

/// Checks every word.
fn check(words: &[u8], Header { end, vocab_size, .. }: Header) -> Result<Checked, String> {
    let words = words.as_chunks::<4>().0;
    let parts: Vec<Result<Checked, String>> = words
        .par_chunks(CHECKED)
        .enumerate()
        .map(|(part, words)| {
            let checksum = crc32(0, words.as_flattened());
            let mut ends = Vec::new();
            let mut counted = 0;
            for (i, word) in words.iter().enumerate() {
                let word = u32::from_le_bytes(*word);
                let (id, at) = (word & MAX_TOKEN_ID, part * CHECKED + i);
                if word & !(COUNTS | ENDS | MAX_TOKEN_ID) != 0 {
                    return Err(format!("token {at} is 0x{word:08x}: bits 24 to 29 should be 0"));
                }
                if id >= vocab_size {
                    return Err(format!("token {at} has id {id}, the vocabulary has {vocab_size}"));
                }
                counted += usize::from(word & COUNTS != 0);
                if word & ENDS != 0 {
                    if id != end {
                        return Err(format!("token {at} ends a document, but is {id}, not {end}"));
                    }
                    ends.push(at + 1);
                }
            }
            Ok(Checked { ends, counted, checksum })
        })
        .collect();
    let (mut ends, mut counted, mut checksum) = (Vec::new(), 0, 0);
    for part in parts {
        let part = part?;
        ends.extend(part.ends);
        counted += part.counted;
        checksum = crc32(checksum, &part.checksum.to_le_bytes());
    }
    if ends.last() != Some(&words.len()) {
        let found = if words.is_empty() { "there is none" } else { "the last one does not end" };
        return Err(format!("expected whole documents, {found}"));
    }
    let firsts = std::iter::once(&0).chain(&ends);
    if let Some(index) = firsts.zip(&ends).position(|(first, end)| end - first < 2) {
        return Err(format!("document {index} has no token but its end"));
    }
    Ok(Checked { ends, counted, checksum })
}

// Writing

/// What ends writing: the file that is written, or those that are read.
enum Failure {
    Write(io::Error),
    Input(Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Input(error)
    }
}

fn write_all(
    out: &mut dyn Write,
    header: Header,
    files: &[DataFile],
    encoder: &Encoder,
    progress: &mut dyn FnMut(u64),
) -> Result<(), Failure> {
    let mut writer = Writer::new(out, header)?;
    let mut documents = Documents::new(files);
    loop {
        let block = next_block(&mut documents)?;
        if block.is_empty() {
            break;
        }
        let encoded: Vec<Result<Encoded>> = block
            .par_iter()
            .map(|document| {
                let encoded = encoder.encode(&document.content);
                encoded.map_err(|error| at(&document.path, document.line, &reason(&error)))
            })
            .collect();
        for (document, encoded) in block.iter().zip(encoded) {
            writer.add(&encoded?, document.content.is_last())?;
        }
        progress(documents.bytes_read());
    }
    if writer.documents == 0 {
        let names: Vec<String> =
            files.iter().map(|file| format!("`{}`", file.path.display())).collect();
        let reason = format!("expected files with text, found none in [{}]", names.join(", "));
        return Err(Error::Argument { name: "files", reason }.into());
    }
    Ok(writer.finish()?)
}

fn write_documents(out: &mut dyn Write, header: Header, documents: &[Vec<u32>]) -> io::Result<()> {
    let mut writer = Writer::new(out, header)?;
    for ids in documents {
        let counts = vec![true; ids.len()];
        writer.add(&Encoded { ids: ids.clone(), counts, bytes: 0 }, true)?;
    }
    writer.finish()
}

/// An error and what caused it, in one line.
fn reason(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

/// The next documents, as many as are tokenized at once.
fn next_block(documents: &mut Documents<'_>) -> Result<Vec<Document>> {
    let (mut block, mut bytes) = (Vec::new(), 0);
    while bytes < BLOCK && block.len() < BLOCK_DOCUMENTS {
        let Some(document) = documents.next().transpose()? else { break };
        bytes += document.content.texts().iter().map(|text| text.len()).sum::<usize>();
        block.push(document);
    }
    Ok(block)
}

/// Writes documents one after another.
struct Writer<'a> {
    out: &'a mut dyn Write,
    header: Header,
    /// The last word, which may turn out to be that of its document's end.
    held: Option<u32>,
    /// Tokens of the document that is being written, `held` among them.
    len: usize,
    documents: u64,
    tokens: u64,
    bytes: u64,
}

impl<'a> Writer<'a> {
    fn new(out: &'a mut dyn Write, header: Header) -> io::Result<Self> {
        let Header { end, vocab_size, encoder, inputs } = header;
        out.write_all(MAGIC)?;
        for field in [VERSION, end, vocab_size, 0] {
            out.write_all(&field.to_le_bytes())?;
        }
        for field in [encoder, inputs] {
            out.write_all(&field.to_le_bytes())?;
        }
        Ok(Self { out, header, held: None, len: 0, documents: 0, tokens: 0, bytes: 0 })
    }

    /// Writes a document, or a piece of one. One without a token but its end is left out.
    fn add(&mut self, encoded: &Encoded, is_last: bool) -> io::Result<()> {
        for (&id, &counts) in encoded.ids.iter().zip(&encoded.counts) {
            self.release()?;
            self.held = Some(id | if counts { COUNTS } else { 0 });
            self.len += 1;
        }
        self.bytes += encoded.bytes as u64;
        if !is_last {
            return Ok(());
        }
        let end = self.header.end;
        let (last, len) = (self.held.take(), std::mem::take(&mut self.len));
        let Some(last) = last.filter(|&word| len > 1 || word & MAX_TOKEN_ID != end) else {
            return Ok(());
        };
        if last & MAX_TOKEN_ID == end {
            self.word(last | ENDS)?;
        } else {
            self.word(last)?;
            self.word(end | last & COUNTS | ENDS)?;
        }
        self.documents += 1;
        Ok(())
    }

    fn release(&mut self) -> io::Result<()> {
        self.held.take().map_or(Ok(()), |word| self.word(word))
    }

    fn word(&mut self, word: u32) -> io::Result<()> {
        self.tokens += 1;
        self.out.write_all(&word.to_le_bytes())
    }

    fn finish(self) -> io::Result<()> {
        for count in [self.documents, self.tokens, self.bytes] {
            self.out.write_all(&count.to_le_bytes())?;
        }
        Ok(())
    }
}

/// What tells whether files changed, and their bytes.
fn fingerprint(files: &[DataFile]) -> Result<(u64, u64)> {
    let mut hash = Fnv::default();
    let mut total = 0;
    for DataFile { path, kind } in files {
        let metadata = fs::metadata(path).map_err(|e| Error::io(path, e))?;
        let modified = metadata.modified().map_err(|e| Error::io(path, e))?;
        // Before 1970 or after: the distance and the side.
        let (side, distance) = match modified.duration_since(UNIX_EPOCH) {
            Ok(distance) => ('+', distance),
            Err(error) => ('-', error.duration()),
        };
        hash.bytes(&(path.as_os_str().len() as u64).to_le_bytes());
        hash.bytes(path.as_os_str().as_encoded_bytes());
        hash.text(&format!("{kind:?} {} {side}{}", metadata.len(), distance.as_nanos()));
        total += metadata.len();
    }
    Ok((hash.0, total))
}

/// Whether at `path` is a file of tokens, whole or not.
fn is_there(path: &Path) -> Result<bool> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(Error::io(path, error)),
        Ok(metadata) if !metadata.is_file() => {
            return Err(Error::io(path, io::Error::other("not a regular file")));
        }
        Ok(_) => {}
    }
    let mut start = Vec::new();
    let file = fs::File::open(path).map_err(|e| Error::io(path, e))?;
    file.take(MAGIC.len() as u64).read_to_end(&mut start).map_err(|e| Error::io(path, e))?;
    if MAGIC.starts_with(&start) {
        return Ok(true);
    }
    let reason =
        "this is no file of tokens, so it is not replaced by one: give another path or remove it";
    Err(Error::format(path, reason))
}
