//! Rows in which documents stand whole: best-fit packing.
//!
//! The longest documents come first. Each is put into the row with the least room that it fits in, or
//! into a new one. Rows are few then, and hold a few documents each. Which documents stand together
//! depends on the order that they are given in, but not the number of rows.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::tokens::TokenFile;
use crate::error::{Error, Result};

/// What becomes of a document that is longer than a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Truncate {
    /// It is cut into parts of a row each, and a shorter last one. Each starts afresh, as if it were a
    /// document.
    #[default]
    Split,
    /// Its first tokens are kept, a row of them.
    KeepStart,
    /// Its last tokens are kept, a row of them.
    KeepEnd,
    /// It is left out.
    Drop,
    /// It is an error.
    Refuse,
    /// Documents are cut wherever a row ends, those that would fit into one too: all rows are full.
    /// Runs of versions before this choice go on so.
    Anywhere,
}

impl Truncate {
    /// Refuses data that make no rows.
    pub(super) fn check(self, file: &TokenFile, seq_len: usize) -> Result<()> {
        let is_longer = |&document: &usize| file.len(document) - 1 > seq_len;
        let refuse = |reason| Err(Error::Argument { name: "truncate", reason });
        match self {
            Self::Refuse => match (0..file.documents()).find(is_longer) {
                Some(document) => refuse(format!(
                    "document {} of {} has {} tokens, a row has {seq_len}",
                    document + 1,
                    file.documents(),
                    file.len(document) - 1
                )),
                None => Ok(()),
            },
            Self::Drop if (0..file.documents()).all(|document| is_longer(&document)) => {
                refuse(format!(
                    "all {} documents are longer than a row of {seq_len} tokens",
                    file.documents()
                ))
            }
            _ => Ok(()),
        }
    }
}

/// Inputs of a document that stand together in a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub document: u32,
    /// Inputs of the document before them.
    pub offset: u64,
    /// Their number, at least 1.
    pub len: u32,
}

/// The rows of an epoch.
#[derive(Debug, Default)]
pub(super) struct Rows {
    spans: Vec<Span>,
    /// Of each row, the number of spans up to its end.
    ends: Vec<usize>,
}

impl Rows {
    /// Packs documents in the order of `documents`; `shuffle` gives the order of the rows.
    pub fn pack(
        file: &TokenFile,
        documents: &[u32],
        seq_len: usize,
        truncate: Truncate,
        mut shuffle: impl FnMut(&mut [u32]),
    ) -> Self {
        let mut spans = Vec::with_capacity(documents.len());
        for &document in documents {
            let inputs = file.len(document as usize) as u64 - 1;
            add(&mut spans, document, inputs, seq_len as u64, truncate);
        }
        spans.sort_by_key(|span| Reverse(span.len));
        // Rows by the room that is left in them.
        let mut rooms: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        let mut count = 0;
        let rows: Vec<u32> = spans
            .iter()
            .map(|span| {
                let fitting = rooms.range_mut(span.len..).next();
                let (room, row) =
                    match fitting.map(|(&room, rows)| (room, rows.pop(), rows.is_empty())) {
                        Some((room, Some(row), is_last)) => {
                            if is_last {
                                rooms.remove(&room);
                            }
                            (room, row)
                        }
                        _ => {
                            count += 1;
                            (seq_len as u32, count - 1)
                        }
                    };
                if room > span.len {
                    rooms.entry(room - span.len).or_default().push(row);
                }
                row
            })
            .collect();
        let mut places: Vec<u32> = (0..count).collect();
        shuffle(&mut places);
        // By counting: where the spans of each place begin, then each to its own.
        let mut ends = vec![0; count as usize];
        for &row in &rows {
            ends[places[row as usize] as usize] += 1;
        }
        let mut next: Vec<usize> = Vec::with_capacity(ends.len());
        let mut end = 0;
        for count in &mut ends {
            next.push(end);
            end += *count;
            *count = end;
        }
        let mut placed = spans.clone();
        for (span, &row) in spans.iter().zip(&rows) {
            let next = &mut next[places[row as usize] as usize];
            placed[*next] = *span;
            *next += 1;
        }
        Self { spans: placed, ends }
    }

    /// Number of rows.
    pub fn count(&self) -> usize {
        self.ends.len()
    }

    /// What stands in a row, at least one span.
    pub fn row(&self, index: usize) -> &[Span] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.spans[start..self.ends[index]]
    }
}

/// Adds what is read of a document of `inputs` inputs.
fn add(spans: &mut Vec<Span>, document: u32, inputs: u64, seq_len: u64, truncate: Truncate) {
    let span = |offset, len: u64| Span { document, offset, len: len as u32 };
    match truncate {
        _ if inputs <= seq_len => spans.push(span(0, inputs)),
        Truncate::KeepStart => spans.push(span(0, seq_len)),
        Truncate::KeepEnd => spans.push(span(inputs - seq_len, seq_len)),
        Truncate::Drop => {}
        Truncate::Split | Truncate::Refuse | Truncate::Anywhere => {
            let offsets = (0..inputs).step_by(seq_len as usize);
            spans.extend(offsets.map(|offset| span(offset, seq_len.min(inputs - offset))));
        }
    }
}
