//! Batches: pieces of documents in an order that depends on a seed alone.
//!
//! [`Packing`] says how rows of at most `seq_len` tokens are filled. Documents are whole in their rows
//! (`rows.rs`), or rows are cut from the inputs of all documents, one after another in a shuffled
//! order. In the second case a row that reaches the end of an epoch continues in the next, so every
//! batch has `batch_size * seq_len` tokens. Rows that carry nothing to each other are shuffled too. A
//! batch then has parts of long documents from anywhere, not one after another.
//!
//! The seed and the epoch's number give the order of an epoch. The room of earlier rows gives the
//! contents of a row. So a cursor is one number.

use std::ops::Deref;

use serde::{Deserialize, Serialize};

use super::rows::{Rows, Truncate};
use super::tokens::TokenFile;
use crate::error::{Error, Result};
use crate::ops::IGNORE;
use crate::sample::SplitMix64;

/// Most tokens that a cursor may say were read: no sum of it with an epoch or a batch overflows.
const MAX_READ: u64 = 1 << 61;

/// Orders of epochs that are kept: streams may be in two at a time.
const ORDERS: usize = 2;

/// How rows are filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// Each document stands whole in a row, beside others that fit, and nothing passes from one to
    /// another. A document that is longer than a row is treated as [`Truncate`] says.
    Documents(Truncate),
    /// Each row of a batch goes on where the same row of the batch before stopped, with its state. These streams are
    /// equal shares of the epoch; a state starts afresh where a document starts, and where a share does. Gradients
    /// end at the start of a row: back-propagation through time, truncated.
    Carried,
}

/// A part of a document, as an input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// What the model reads, at least one token.
    pub tokens: Vec<u32>,
    /// What it is to predict after each of them; [`IGNORE`] where nothing counts.
    pub targets: Vec<u32>,
    /// The row that it stands in: with [`Packing::Carried`], whose state it goes on from and leaves its own to.
    pub slot: usize,
    /// Whether it starts with a fresh state.
    pub is_start: bool,
    /// Its document in the [`TokenFile`].
    pub document: usize,
}

/// The pieces of one step, row by row.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// Those of one row stand together, in their order.
    pub pieces: Vec<Piece>,
}

impl Batch {
    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.pieces.iter().map(|piece| piece.tokens.len()).sum()
    }

    /// Number of targets that count.
    pub fn counted(&self) -> usize {
        let targets = self.pieces.iter().flat_map(|piece| &piece.targets);
        targets.filter(|&&id| id != IGNORE).count()
    }
}

/// Where batches go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Tokens that the rows given so far have room for, `seq_len` each, filled or not.
    pub read: u64,
    /// Inputs of the file that they came from: those of an epoch.
    pub inputs: u64,
    /// Its documents.
    pub documents: u64,
    /// Checksum of its tokens; runs of earlier versions did not keep it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksum: Option<u32>,
}

/// Batches without end, epoch after epoch, of a [`TokenFile`] that is borrowed or in an `Arc`.
///
/// ```
/// use boostr::train::data::{Batches, Packing, TokenFile, Truncate};
///
/// let file = TokenFile::of_documents(&[vec![5, 6, 7], vec![8]], 0, 16)?;
/// let packing = Packing::Documents(Truncate::Split);
/// let mut batches = Batches::new(&file, packing, 1, 4, 42)?;
/// let first = batches.next();
/// assert_eq!(first.tokens(), 4);
///
/// let cursor = batches.cursor();
/// let second = batches.next();
/// batches.seek(cursor)?;
/// assert_eq!(batches.next(), second);
/// # Ok::<(), boostr::Error>(())
/// ```
pub struct Batches<F> {
    file: F,
    packing: Packing,
    batch_size: usize,
    seq_len: usize,
    /// `None` for one pass in the order of the file.
    seed: Option<u64>,
    read: u64,
    orders: Vec<Order>,
    /// Rows of an epoch, where documents stand in them whole.
    rows: u64,
}

impl<F: Deref<Target = TokenFile>> Batches<F> {
    /// Batches of `batch_size` rows of `seq_len` tokens, from the start of the first epoch.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when there are no rows, no tokens in them, for [`Packing::Carried`] fewer inputs than
    /// rows, for [`Truncate::Refuse`] a document longer than a row, for [`Truncate::Drop`] no other.
    pub fn new(
        file: F,
        packing: Packing,
        batch_size: usize,
        seq_len: usize,
        seed: u64,
    ) -> Result<Self> {
        for (name, value) in [("batch_size", batch_size), ("seq_len", seq_len)] {
            if value == 0 {
                return Err(Error::Argument {
                    name,
                    reason: "expected at least 1, found 0".into(),
                });
            }
        }
        if batch_size.checked_mul(seq_len).is_none_or(|tokens| tokens > u32::MAX as usize) {
            let reason = format!("{batch_size} rows of {seq_len} tokens are more than 2^32 - 1");
            return Err(Error::Argument { name: "batch_size", reason });
        }
        if packing == Packing::Carried && batch_size > file.inputs() {
            let reason = format!("{batch_size} streams, but the data has {} tokens", file.inputs());
            return Err(Error::Argument { name: "batch_size", reason });
        }
        let seed = Some(seed);
        let mut batches =
            Self { file, packing, batch_size, seq_len, seed, read: 0, orders: Vec::new(), rows: 0 };
        if let Some(truncate) = batches.whole() {
            truncate.check(&batches.file, seq_len)?;
            batches.rows = batches.order(0).whole.count() as u64;
        }
        Ok(batches)
    }

    /// The next batch, of `batch_size` rows of at most `seq_len` tokens.
    #[expect(clippy::should_implement_trait, reason = "there is always a next one")]
    pub fn next(&mut self) -> Batch {
        let mut pieces = Vec::new();
        for slot in 0..self.batch_size {
            self.row(slot, &mut pieces);
        }
        self.read += self.batch_tokens();
        Batch { pieces }
    }

    /// Where the next batch begins.
    pub fn cursor(&self) -> Cursor {
        let (inputs, documents) = (self.file.inputs() as u64, self.file.documents() as u64);
        Cursor { read: self.read, inputs, documents, checksum: Some(self.file.checksum()) }
    }

    /// Goes on from a cursor of the same data, in batches of the same shape: gives the batches that followed it.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when it is of other data or no number of whole batches.
    pub fn seek(&mut self, cursor: Cursor) -> Result<()> {
        let own = self.cursor();
        let refuse = |reason| Err(Error::Argument { name: "cursor", reason });
        if (cursor.documents, cursor.inputs) != (own.documents, own.inputs) {
            return refuse(format!(
                "it is of data of {} documents with {} tokens, `{}` has {} with {}",
                cursor.documents,
                cursor.inputs,
                self.file.path().display(),
                own.documents,
                own.inputs
            ));
        }
        if cursor.checksum.is_some_and(|checksum| Some(checksum) != own.checksum) {
            let path = self.file.path().display();
            return refuse(format!(
                "it is of other data: the tokens in `{path}` have another checksum than those that the run was \
                 started with"
            ));
        }
        if cursor.read > MAX_READ {
            return refuse(format!(
                "expected at most {MAX_READ} tokens read, found {}",
                cursor.read
            ));
        }
        if !cursor.read.is_multiple_of(self.batch_tokens()) {
            let (read, batch) = (cursor.read, self.batch_tokens());
            return refuse(format!("{read} tokens are no whole number of batches of {batch}"));
        }
        self.read = cursor.read;
        Ok(())
    }

    /// Epochs so far: 1.5 in the middle of the second.
    pub fn epochs(&self) -> f64 {
        self.read as f64 / self.room() as f64
    }

    /// Batches in which an epoch ends at the latest.
    pub(in crate::train) fn an_epoch(&self) -> u64 {
        self.room().div_ceil(self.batch_tokens())
    }

    /// Tokens that the rows of an epoch have room for.
    fn room(&self) -> u64 {
        match self.whole() {
            Some(_) => self.rows * self.seq_len as u64,
            None => self.file.inputs() as u64,
        }
    }

    /// What becomes of longer documents, where those that fit stand whole in a row.
    fn whole(&self) -> Option<Truncate> {
        match self.packing {
            Packing::Documents(Truncate::Anywhere) | Packing::Carried => None,
            Packing::Documents(truncate) => Some(truncate),
        }
    }

    fn batch_tokens(&self) -> u64 {
        self.batch_size as u64 * self.seq_len as u64
    }

    /// Adds the pieces of row `slot` of the next batch.
    fn row(&mut self, slot: usize, pieces: &mut Vec<Piece>) {
        if self.whole().is_some() {
            return self.whole_documents(slot, pieces);
        }
        let inputs = self.file.inputs() as u64;
        let (rows, row) = (self.batch_size as u64, slot as u64);
        // The share of each epoch that this row's stream reads, and how much of it was read.
        let (share, mut read) = match self.packing {
            Packing::Documents(_) => {
                let seq_len = self.seq_len as u64;
                (0..inputs, self.shuffled(self.read / seq_len + row) * seq_len)
            }
            Packing::Carried => {
                (part(inputs, row, rows)..part(inputs, row + 1, rows), self.read / rows)
            }
        };
        let len = share.end - share.start;
        let mut left = self.seq_len as u64;
        while left > 0 {
            let (epoch, at) = (read / len, share.start + read % len);
            if epoch > 0 && self.seed.is_none() {
                break;
            }
            let (document, offset) = self.order(epoch).find(at);
            let rest = self.file.len(document) as u64 - 1 - offset;
            let count = left.min(rest).min(share.end - at);
            let is_start = self.packing != Packing::Carried || offset == 0 || at == share.start;
            pieces.push(self.piece(document, offset as usize, count as usize, slot, is_start));
            read += count;
            left -= count;
        }
    }

    /// Adds the documents in row `slot` of the next batch.
    fn whole_documents(&mut self, slot: usize, pieces: &mut Vec<Piece>) {
        let row = self.read / self.seq_len as u64 + slot as u64;
        let (epoch, row) = (row / self.rows, row % self.rows);
        if epoch > 0 && self.seed.is_none() {
            return;
        }
        let spans = self.order(epoch).whole.row(row as usize).to_vec();
        for span in spans {
            let (offset, count) = (span.offset as usize, span.len as usize);
            pieces.push(self.piece(span.document as usize, offset, count, slot, true));
        }
    }

    /// The row that stands in place of row `row` of all, counted from the start: rows that lie in one epoch change
    /// places with each other.
    fn shuffled(&mut self, row: u64) -> u64 {
        let (inputs, seq_len) = (self.file.inputs() as u64, self.seq_len as u64);
        let epoch = row * seq_len / inputs;
        let first = (epoch * inputs).div_ceil(seq_len);
        let order = self.order(epoch);
        order.rows.get((row - first) as usize).map_or(row, |&row| first + u64::from(row))
    }

    fn piece(
        &self,
        document: usize,
        offset: usize,
        count: usize,
        slot: usize,
        is_start: bool,
    ) -> Piece {
        let words: Vec<(u32, bool)> = self.file.words(document, offset, count + 1).collect();
        let tokens = words[..count].iter().map(|&(id, _)| id).collect();
        let target = |&(id, counts): &(u32, bool)| if counts { id } else { IGNORE };
        let targets = words[1..].iter().map(target).collect();
        Piece { tokens, targets, slot, is_start, document }
    }

    /// The order of an epoch.
    fn order(&mut self, epoch: u64) -> &Order {
        let found = self.orders.iter().position(|order| order.epoch == epoch);
        let index = found.unwrap_or_else(|| {
            let oldest = (0..self.orders.len()).min_by_key(|&i| self.orders[i].epoch);
            if let Some(oldest) = oldest.filter(|_| self.orders.len() >= ORDERS) {
                self.orders.swap_remove(oldest);
            }
            let order = Order::new(&self.file, self.seq_len, self.whole(), self.seed, epoch);
            self.orders.push(order);
            self.orders.len() - 1
        });
        &self.orders[index]
    }
}

/// Where share `row` of `rows` nearly equal ones begins.
fn part(inputs: u64, row: u64, rows: u64) -> u64 {
    (u128::from(inputs) * u128::from(row) / u128::from(rows)) as u64
}

/// Batches that end: every input once, in the order of the file.
///
/// With [`Packing::Carried`] a row that has read its share is missing from the last batch, or shorter.
pub struct Pass<F> {
    batches: Batches<F>,
}

impl<F: Deref<Target = TokenFile>> Pass<F> {
    /// Batches of `batch_size` rows of `seq_len` tokens.
    ///
    /// # Errors
    ///
    /// As [`Batches::new`].
    pub fn new(file: F, packing: Packing, batch_size: usize, seq_len: usize) -> Result<Self> {
        let batches = Batches::new(file, packing, batch_size, seq_len, 0)?;
        Ok(Self { batches: Batches { seed: None, orders: Vec::new(), ..batches } })
    }
}

impl<F: Deref<Target = TokenFile>> Iterator for Pass<F> {
    type Item = Batch;

    fn next(&mut self) -> Option<Batch> {
        Some(self.batches.next()).filter(|batch| !batch.pieces.is_empty())
    }
}

/// The order of an epoch.
struct Order {
    epoch: u64,
    documents: Vec<u32>,
    /// Inputs before each of them.
    starts: Vec<u64>,
    /// The order of the rows that lie in the epoch.
    rows: Vec<u32>,
    /// In place of all these, rows of whole documents.
    whole: Rows,
}

impl Order {
    /// The order of the file, or one by numbers from the seed and the epoch.
    fn new(
        file: &TokenFile,
        seq_len: usize,
        whole: Option<Truncate>,
        seed: Option<u64>,
        epoch: u64,
    ) -> Self {
        let mut documents: Vec<u32> = (0..file.documents() as u32).collect();
        let mut random = seed.map(|seed| {
            let mut random = SplitMix64(seed);
            // Epochs of one seed are steps of its generator, each the seed of another.
            random.0 = random.next().wrapping_add(epoch);
            SplitMix64(random.next())
        });
        let mut shuffle = |items: &mut [u32]| {
            if let Some(random) = &mut random {
                shuffle(random, items);
            }
        };
        shuffle(&mut documents);
        if let Some(truncate) = whole {
            let whole = Rows::pack(file, &documents, seq_len, truncate, shuffle);
            return Self {
                epoch,
                documents: Vec::new(),
                starts: Vec::new(),
                rows: Vec::new(),
                whole,
            };
        }
        let (inputs, seq_len) = (file.inputs() as u64, seq_len as u64);
        let mut rows = Vec::new();
        if seed.is_some() {
            let (first, end) = ((epoch * inputs).div_ceil(seq_len), (epoch + 1) * inputs / seq_len);
            rows.extend(0..end.saturating_sub(first) as u32);
            shuffle(&mut rows);
        }
        let starts = documents.iter().scan(0, |inputs, &document| {
            let start = *inputs;
            *inputs += file.len(document as usize) as u64 - 1;
            Some(start)
        });
        let starts = starts.collect();
        Self { epoch, documents, starts, rows, whole: Rows::default() }
    }

    /// The document that input `at` is in, and how many of its inputs are before it.
    fn find(&self, at: u64) -> (usize, u64) {
        let index = self.starts.partition_point(|&start| start <= at) - 1;
        (self.documents[index] as usize, at - self.starts[index])
    }
}

/// By Fisher and Yates.
fn shuffle(random: &mut SplitMix64, items: &mut [u32]) {
    for i in (1..items.len()).rev() {
        // Below i + 1, even to 1 part in 2^32.
        let other = (u128::from(random.next()) * (i as u128 + 1)) >> 64;
        items.swap(i, other as usize);
    }
}
