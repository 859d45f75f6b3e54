//! GGUF, the file of ggml and llama.cpp: metadata and tensors in one file, or in several parts.
//!
//! ```text
//! "GGUF", version (u32, 2 or 3), number of tensors (u64), number of keys (u64)
//! each key       name, kind (u32), value
//! each tensor    name, rank (u32), dimensions (u64, innermost first), type (u32), offset (u64)
//! zeros          up to a multiple of the alignment: `general.alignment`, or 32
//! the data       each tensor at its offset, a multiple of the alignment counted from here
//! ```
//!
//! Numbers are little-endian. A text is its length (u64) and UTF-8; an array is the kind of its
//! elements (u32), their number (u64) and the elements. Shapes are turned around on the way in and
//! out: ours are outermost first, and the same bytes in row-major order. Facts: `docs/gguf.md` of
//! ggml-org/ggml, and ggml's own reader.
//!
//! Stricter than ggml: truth values are 0 or 1, text is UTF-8, tensors have a name, the alignment is
//! 8 to 65536. More lenient: tensors may come in any order with gaps between them, the last one may
//! lack its padding, names may have 1024 bytes, arrays may hold arrays.
//!
//! | file | holds |
//! |---|---|
//! | `value` | [`Kind`], [`Value`], [`Array`] |
//! | `metadata` | [`Metadata`], with a getter for each use |
//! | `types` | the numbers of tensor types |
//! | `cursor` | reading fields, each failure with its byte |
//! | `read`, `write` | whole files |
//! | `split` | the parts of a model, the GGUF of a folder |

mod cursor;
mod metadata;
mod read;
mod split;
mod types;
mod value;
mod write;

use std::path::Path;

pub use metadata::Metadata;
pub use read::read;
pub use value::{Array, Kind, Value};
pub use write::write;

pub(super) use split::{only_model, open};

/// Whether a file is meant to be GGUF by its name: it ends in `.gguf`, in whatever case.
pub fn is_name(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"))
}

/// Longest key, as in ggml.
const MAX_KEY: usize = 65_535;

/// Longest text. The longest of real files, chat templates, are a thousandth.
const MAX_TEXT: usize = 64 << 20;

/// Longest name of a tensor that is read.
const MAX_NAME: usize = 1024;

/// Dimensions of a tensor, as in ggml.
const MAX_DIMS: usize = 4;

/// Arrays within arrays.
const MAX_DEPTH: usize = 8;

/// Keys and tensors of one file. Real ones have a few dozen keys and some thousand tensors.
const MAX_KEYS: u64 = 65_536;
const MAX_TENSORS: u64 = 100_000;

const MAGIC: &[u8] = b"GGUF";

const ALIGNMENT: &str = "general.alignment";
const DEFAULT_ALIGNMENT: usize = 32;
const MAX_ALIGNMENT: usize = 65_536;
