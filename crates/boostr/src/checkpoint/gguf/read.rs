//! Reading a whole file: the header field by field, then where each tensor lies.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;
use std::sync::Arc;

use super::cursor::{Cursor, DAMAGED, What, why};
use super::value::Value;
use super::{
    ALIGNMENT, DEFAULT_ALIGNMENT, MAGIC, MAX_ALIGNMENT, MAX_DIMS, MAX_KEY, MAX_KEYS, MAX_NAME,
    MAX_TENSORS, Metadata, types,
};
use crate::checkpoint::entry::quoted;
use crate::checkpoint::{Bytes, Dtype, TensorEntry};
use crate::error::{Error, Result};

/// Bytes of the smallest key: one letter and a `u8`.
const MIN_KEY: usize = 8 + 1 + 4 + 1;

/// Bytes of the smallest tensor in the header: one letter and no dimension.
const MIN_TENSOR: usize = 8 + 1 + 4 + 4 + 8;

/// Reads a file, or one part of a model in several; the tensors are ranges of `bytes`.
///
/// # Errors
///
/// [`Error::Format`] when the bytes are no GGUF file or break the format.
pub fn read(path: &Path, bytes: &Bytes) -> Result<(Metadata, BTreeMap<String, TensorEntry>)> {
    parse(path, bytes).map_err(|reason| Error::format(path, reason))
}

fn parse(path: &Path, bytes: &Bytes) -> Result<(Metadata, BTreeMap<String, TensorEntry>), String> {
    let Header { metadata, tensors, start } = Header::read(path, bytes)?;
    check_overlaps(&tensors, start)?;
    let file: Arc<Path> = path.into();
    let entries = tensors.into_iter().map(|(name, place)| {
        let data = place.data(name, start, bytes)?;
        let Place { dtype, shape, .. } = place;
        Ok((name.to_owned(), TensorEntry { dtype, shape, data, file: Arc::clone(&file) }))
    });
    Ok((metadata, entries.collect::<Result<_, String>>()?))
}

/// All before the data.
pub(super) struct Header<'a> {
    pub(super) metadata: Metadata,
    tensors: BTreeMap<&'a str, Place>,
    /// Where the data starts.
    start: usize,
}

/// A tensor as the header has it.
struct Place {
    dtype: Dtype,
    /// Outermost first.
    shape: Vec<usize>,
    /// Bytes of the data.
    len: usize,
    /// From the start of the data.
    offset: u64,
    /// Where in the header the offset is.
    at: usize,
}

impl<'a> Header<'a> {
    pub(super) fn read(path: &Path, bytes: &'a Bytes) -> Result<Self, String> {
        if !bytes.starts_with(MAGIC) {
            return Err(not_gguf(bytes));
        }
        let mut cursor = Cursor::new(bytes, What::Header);
        cursor.at = MAGIC.len();
        let version = cursor.u32("version")?;
        check_version(version).map_err(|reason| cursor.error(MAGIC.len(), reason))?;
        let tensors = cursor.count("number of tensors", MIN_TENSOR, MAX_TENSORS)?;
        let keys = cursor.count("number of keys", MIN_KEY, MAX_KEYS)?;

        let mut metadata = Metadata::new(path);
        let mut alignment = DEFAULT_ALIGNMENT;
        for index in 0..keys {
            cursor.what = What::Key { index, count: keys };
            let at = cursor.at;
            let key = cursor.text("name", MAX_KEY)?;
            if key.is_empty() {
                return Err(cursor.error(at, "name is empty"));
            }
            cursor.what = What::Value(key);
            if metadata.has(key) {
                return Err(cursor.error(at, "comes a second time"));
            }
            let kind = cursor.kind("kind of value")?;
            let at = cursor.at;
            let value = cursor.value(kind, 0)?;
            if key == ALIGNMENT {
                alignment = check_alignment(&value).map_err(|reason| cursor.error(at, reason))?;
            }
            metadata.set(key, value);
        }
        let tensors = read_tensors(&mut cursor, tensors, alignment)?;
        let start = cursor.at.checked_next_multiple_of(alignment).ok_or(DAMAGED)?;
        Ok(Self { metadata, tensors, start })
    }
}

fn read_tensors<'a>(
    cursor: &mut Cursor<'a>,
    count: u64,
    alignment: usize,
) -> Result<BTreeMap<&'a str, Place>, String> {
    let mut tensors = BTreeMap::new();
    for index in 0..count {
        cursor.what = What::Name { index, count };
        let at = cursor.at;
        let name = cursor.text("name", MAX_NAME)?;
        if name.is_empty() {
            return Err(cursor.error(at, "name is empty"));
        }
        cursor.what = What::Tensor(name);
        match tensors.entry(name) {
            Entry::Vacant(slot) => {
                slot.insert(read_place(cursor, alignment)?);
            }
            Entry::Occupied(_) => return Err(cursor.error(at, "comes a second time")),
        }
    }
    Ok(tensors)
}

fn read_place(cursor: &mut Cursor<'_>, alignment: usize) -> Result<Place, String> {
    let at = cursor.at;
    let rank = cursor.u32("number of dimensions")?;
    if rank as usize > MAX_DIMS {
        return Err(cursor.error(at, format_args!("has {rank} dimensions, at most {MAX_DIMS}")));
    }
    let dims_at = cursor.at;
    let mut dims = Vec::with_capacity(rank as usize);
    for _ in 0..rank {
        dims.push(cursor.u64("dimension")?);
    }
    dims.reverse();
    let at = cursor.at;
    let number = cursor.u32("type")?;
    let dtype = types::from_number(number).map_err(|reason| cursor.error(at, reason))?;
    let shape: Option<Vec<usize>> = dims.iter().map(|&dim| usize::try_from(dim).ok()).collect();
    let (name, block) = (dtype.name(), dtype.block_len());
    if !dims.last().unwrap_or(&1).is_multiple_of(block as u64) {
        let reason = format!("{name} of shape {dims:?}: rows are not whole blocks of {block}");
        return Err(cursor.error(dims_at, reason));
    }
    let sized = shape.and_then(|shape| Some((dtype.bytes_of(&shape)?, shape)));
    let Some((len, shape)) = sized else {
        let reason = format!("{name} of shape {dims:?} is more bytes than memory has; {DAMAGED}");
        return Err(cursor.error(dims_at, reason));
    };
    let at = cursor.at;
    let offset = cursor.u64("offset")?;
    if !offset.is_multiple_of(alignment as u64) {
        let reason = format!("offset is {offset}, expected a multiple of {alignment}");
        return Err(cursor.error(at, reason));
    }
    Ok(Place { dtype, shape, len, offset, at })
}

impl Place {
    /// Where the data begins and ends, counted from the start of all data.
    fn span(&self) -> (u128, u128) {
        let begin = u128::from(self.offset);
        (begin, begin.saturating_add(self.len as u128))
    }

    /// The data, which `start` precedes.
    fn data(&self, name: &str, start: usize, bytes: &Bytes) -> Result<Bytes, String> {
        let [begin, end] =
            <[u128; 2]>::from(self.span()).map(|at| at.saturating_add(start as u128));
        let range = usize::try_from(begin).ok().zip(usize::try_from(end).ok());
        range.and_then(|(begin, end)| bytes.slice(begin..end)).ok_or_else(|| {
            let (at, size) = (self.at, bytes.len());
            format!(
                "byte {at}: tensor {}: its data ends at byte {end}, the file at {size}; {}",
                quoted(name),
                why(end)
            )
        })
    }
}

/// No two tensors may share a byte.
fn check_overlaps(tensors: &BTreeMap<&str, Place>, start: usize) -> Result<(), String> {
    let mut in_order: Vec<(&str, &Place)> = tensors
        .iter()
        .map(|(name, place)| (*name, place))
        .filter(|(_, place)| place.len > 0)
        .collect();
    in_order.sort_by_key(|(_, place)| place.span());
    for ((first, before), (second, after)) in in_order.iter().zip(in_order.iter().skip(1)) {
        let ((_, end), (begin, _)) = (before.span(), after.span());
        if begin < end {
            let [begin, end] = [begin, end].map(|at| at.saturating_add(start as u128));
            let [first, second] = [first, second].map(|name| quoted(name));
            let at = after.at;
            return Err(format!(
                "byte {at}: tensor {second} begins at byte {begin}, tensor {first} ends at {end}"
            ));
        }
    }
    Ok(())
}

fn check_version(version: u32) -> Result<(), String> {
    match version {
        2 | 3 => Ok(()),
        0 => Err(format!("version is 0, expected 2 or 3; {DAMAGED}")),
        1 => Err("version is 1, of 2023, expected 2 or 3; convert the model again with a current \
                  llama.cpp"
            .into()),
        // Small numbers the other way around.
        _ if version.trailing_zeros() >= 16 => Err(format!(
            "file is big-endian (version {}), little-endian files are read; convert it with \
             `gguf-convert-endian FILE little` of the Python package gguf",
            version.swap_bytes()
        )),
        _ => Err(format!("version is {version}, 2 and 3 are read; a newer boostr may read it")),
    }
}

pub(super) fn check_alignment(value: &Value) -> Result<usize, String> {
    let alignment = match *value {
        Value::U32(alignment) => usize::try_from(alignment).ok(),
        _ => None,
    };
    let allowed = |n: &usize| n.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(n);
    alignment.filter(allowed).ok_or_else(|| {
        format!("expected a power of two from 8 to {MAX_ALIGNMENT} (u32), found {value}")
    })
}

/// The message for a file that does not start as GGUF does.
fn not_gguf(bytes: &[u8]) -> String {
    let seems = match bytes.trim_ascii_start() {
        [] => "the file is empty",
        [b'<', ..] => "this is a web page, download the file itself",
        [b'P', b'K', 3, 4, ..] => "this is a zip file",
        [0x1f, 0x8b, ..] => "this is a gzip file, unpack it first",
        [b'F', b'U', b'G', b'G', ..] => "this is a big-endian file, little-endian ones are read",
        rest if rest.starts_with(b"version https://git-lfs") => {
            "this is a Git LFS pointer, run `git lfs pull`"
        }
        rest if [b"GGML", b"lmgg", b"fmgg", b"tjgg", b"algg"]
            .iter()
            .any(|&m| rest.starts_with(m)) =>
        {
            "this is a file of llama.cpp from before GGUF (August 2023), convert the model again"
        }
        rest if MAGIC.starts_with(rest) => "the download is probably incomplete",
        _ => "this is another kind of file, or a damaged one",
    };
    let start = bytes.get(..bytes.len().min(MAGIC.len())).unwrap_or_default();
    format!("byte 0: expected `GGUF`, found `{}`: {seems}", start.escape_ascii())
}
