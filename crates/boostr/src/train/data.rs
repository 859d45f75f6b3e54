//! Training data: from files to batches.
//!
//! ```text
//! DataFile ─ Documents ─ Encoder ─ TokenFile ─ Batches ─ Batch: pieces of documents with their targets
//! ```
//!
//! Documents are read as a stream, tokenized by all threads, and written once to a [`TokenFile`]. That
//! is mapped: no step needs memory for more than a few megabytes of text. [`Batches`] reads it in an
//! order that depends on a seed alone.
//!
//! A document's tokens are inputs, each with the token after it as target. The last one's target is the
//! end-of-text token, which is no input. So in an epoch each token but the first of each document is a
//! target exactly once. [`Truncate`] may leave out parts of long documents.
//!
//! | file | holds |
//! |---|---|
//! | `documents` | [`DataFile`], [`Documents`]: the contents of the files, and their places |
//! | `encode` | [`Encoder`]: a document as ids, and those of them that count |
//! | `tokens` | [`TokenFile`]: the tokens of all documents, mapped |
//! | `rows` | [`Truncate`]: rows in which documents stand whole |
//! | `batches` | [`Batches`]: pieces of documents, and a cursor to resume from |
//! | `pairs` | [`read_pairs`]: contexts with continuations, for evaluation |

mod batches;
mod documents;
mod encode;
mod lines;
mod pairs;
mod rows;
mod tokens;

pub use batches::{Batch, Batches, Cursor, Packing, Pass, Piece};
pub use documents::{Content, DataFile, Document, Documents, Kind, PIECE};
pub use encode::{Encoded, Encoder};
pub use lines::MAX_LINE;
pub use pairs::{Pair, read_pairs};
pub use rows::Truncate;
pub use tokens::TokenFile;

pub(super) use documents::pieces;
