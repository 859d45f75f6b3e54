//! The files of `torch.save`: a zip with one pickle and one entry for each storage.
//!
//! ```text
//! <prefix>/data.pkl       what there is: names, and tensors as views into storages
//! <prefix>/data/<key>     the bytes of a storage
//! <prefix>/byteorder      "little", in newer files
//! ```
//!
//! A contiguous view stays a range of the map. Others, as a transposed matrix has, are copied to
//! row-major order; all copies of a file together are no larger than the file.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::entry::{MAX_RANK, quoted};
use super::values::{Storage, Tensor, Value, Values};
use super::{Bytes, Contents, TensorEntry, pickle, zip};
use crate::error::{Error, Result};

/// Largest `data.pkl`. A tensor takes about 200 bytes of it.
const MAX_PICKLE: usize = 1 << 24;

/// Most tensors of one file.
const MAX_TENSORS: usize = 100_000;

/// Names under which training code keeps the weights inside a larger dictionary.
const NESTED: [&str; 2] = ["state_dict", "model"];

/// Reads a whole file; the tensors are ranges of `bytes` wherever they can be.
pub(super) fn read(path: &Path, bytes: &Bytes) -> Result<Contents> {
    parse(path, bytes).map_err(|reason| Error::format(path, reason))
}

fn parse(path: &Path, bytes: &Bytes) -> Result<Contents, String> {
    let entries = zip::entries(bytes)?;
    let prefix = find_prefix(&entries)?;
    let entry = |name: &str| entries.get(format!("{prefix}/{name}").as_str());
    let content = |range: &Range<usize>| bytes.get(range.clone()).unwrap_or_default();

    if let Some(order) = entry("byteorder").map(content)
        && order != b"little"
    {
        return Err(format!(
            "byteorder is {}, little is read",
            quoted(&order.escape_ascii().to_string())
        ));
    }
    let pickle = entry("data.pkl").map(content).unwrap_or_default();
    if pickle.len() > MAX_PICKLE {
        return Err(format!("data.pkl has {} bytes, at most {MAX_PICKLE} are read", pickle.len()));
    }
    let values = pickle::run(pickle)?;
    let file: Arc<Path> = path.into();
    let mut rebuild = Rebuild {
        values: &values,
        bytes,
        entry,
        file,
        copies: HashMap::new(),
        budget: bytes.len(),
    };
    let mut tensors = BTreeMap::new();
    for (name, value) in named_tensors(&values)? {
        let tensor = rebuild.tensor(value).map_err(|e| format!("tensor {}: {e}", quoted(name)))?;
        match tensors.entry(name.to_string()) {
            Entry::Vacant(slot) => {
                slot.insert(tensor);
            }
            Entry::Occupied(slot) => {
                return Err(format!("duplicate tensor {}", quoted(slot.key())));
            }
        }
    }
    Ok(Contents { tensors, ..Contents::default() })
}

/// What precedes `/data.pkl` in the archive.
fn find_prefix<'a>(entries: &BTreeMap<&'a str, Range<usize>>) -> Result<&'a str, String> {
    let mut prefixes = entries
        .keys()
        .filter_map(|name| name.strip_suffix("/data.pkl"))
        .filter(|prefix| !prefix.contains('/'));
    match (prefixes.next(), prefixes.next()) {
        (Some(prefix), None) => Ok(prefix),
        (None, _) => Err("zip has no `<name>/data.pkl`: not a torch file".into()),
        (Some(_), Some(_)) => Err("zip has more than one `<name>/data.pkl`".into()),
    }
}

/// The named tensors of the dictionary that the pickle is, and of one in it that holds only
/// tensors.
fn named_tensors<'a>(values: &Values<'a>) -> Result<Vec<(&'a str, Value<'a>)>, String> {
    let top = values.dict(values.root).ok_or("pickle is not a dictionary of tensors")?;
    let is_tensor = |value| values.tensor(value).is_some();
    let mut found = Vec::new();
    let mut nested: Vec<&str> = Vec::new();
    for &(key, value) in top {
        let Value::Str(key) = key else { continue };
        if is_tensor(value) {
            found.push((key, value));
        } else if NESTED.contains(&key)
            && let Some(inner) = values.dict(value)
            && inner.iter().all(|&(key, value)| matches!(key, Value::Str(_)) && is_tensor(value))
        {
            // Once each: a dictionary of a million names for one inner dictionary is no checkpoint.
            if nested.contains(&key) {
                return Err(format!("duplicate key {}", quoted(key)));
            }
            nested.push(key);
            found.extend(inner.iter().filter_map(|&(key, value)| match key {
                Value::Str(key) => Some((key, value)),
                _ => None,
            }));
        }
    }
    if found.len() > MAX_TENSORS {
        return Err(format!("pickle has {} tensors, at most {MAX_TENSORS} are read", found.len()));
    }
    if found.is_empty() {
        return Err("pickle has no tensor, at its top or in `state_dict` or `model`".into());
    }
    Ok(found)
}

/// Turns views into entries.
struct Rebuild<'a, F> {
    values: &'a Values<'a>,
    bytes: &'a Bytes,
    entry: F,
    file: Arc<Path>,
    /// Copies by the number of the tensor: one that has two names is copied once.
    copies: HashMap<usize, Bytes>,
    /// Bytes that may still be copied.
    budget: usize,
}

impl<'a, F: Fn(&str) -> Option<&'a Range<usize>>> Rebuild<'a, F> {
    fn tensor(&mut self, value: Value<'a>) -> Result<TensorEntry, String> {
        let (Some(tensor), Value::Node(id)) = (self.values.tensor(value), value) else {
            return Err("is not a tensor".into());
        };
        let storage = self.storage(&tensor.storage)?;
        let (shape, strides) = self.values.layout(&tensor, MAX_RANK).ok_or_else(|| {
            format!("shape and strides are not equally many counts, up to {MAX_RANK}")
        })?;
        let dtype = tensor.storage.dtype;
        let view = View { tensor: &tensor, shape: &shape, strides: &strides };
        let len =
            dtype.bytes_of(&shape).filter(|_| view.is_inside()).ok_or_else(|| view.outside())?;
        let data = if view.is_contiguous() {
            let range = view.offset_bytes().and_then(|at| Some(at..at.checked_add(len)?));
            range.and_then(|range| storage.slice(range)).ok_or_else(|| view.outside())?
        } else if let Some(copy) = self.copies.get(&id) {
            copy.clone()
        } else {
            self.budget = self.budget.checked_sub(len).ok_or_else(|| {
                format!(
                    "copying strides {strides:?} of shape {shape:?} takes more than the file's size"
                )
            })?;
            let copy = Bytes::new(view.copy(&storage, len).ok_or_else(|| view.outside())?);
            self.copies.insert(id, copy.clone());
            copy
        };
        Ok(TensorEntry { dtype, shape, data, file: Arc::clone(&self.file) })
    }

    fn storage(&self, storage: &Storage<'_>) -> Result<Bytes, String> {
        let key = quoted(storage.key);
        let range = (self.entry)(&format!("data/{}", storage.key))
            .ok_or_else(|| format!("storage {key} is not in the file"))?;
        let bytes = self.bytes.slice(range.clone()).ok_or("storage is outside of the file")?;
        let (dtype, numel) = (storage.dtype, storage.numel);
        if dtype.bytes_of(&[numel]) != Some(bytes.len()) {
            return Err(format!(
                "storage {key} has {} bytes, expected {numel} elements of {}",
                bytes.len(),
                dtype.name()
            ));
        }
        Ok(bytes)
    }
}

/// A tensor with its shape and its strides, of equal length.
struct View<'a> {
    tensor: &'a Tensor<'a>,
    shape: &'a [usize],
    strides: &'a [usize],
}

impl View<'_> {
    /// Whether the last element, and so every other, is in the storage.
    fn is_inside(&self) -> bool {
        let numel = self.tensor.storage.numel;
        if self.shape.contains(&0) {
            return self.tensor.offset <= numel;
        }
        let last =
            self.shape.iter().zip(self.strides).try_fold(self.tensor.offset, |at, (n, stride)| {
                at.checked_add(n.checked_sub(1)?.checked_mul(*stride)?)
            });
        last.is_some_and(|last| last < numel)
    }

    /// Whether the elements lie in row-major order without gaps.
    fn is_contiguous(&self) -> bool {
        let mut step = Some(1usize);
        self.shape.contains(&0)
            || self.shape.iter().zip(self.strides).rev().all(|(&n, &stride)| {
                let fits = n == 1 || Some(stride) == step;
                step = step.and_then(|step| step.checked_mul(n));
                fits
            })
    }

    fn offset_bytes(&self) -> Option<usize> {
        self.tensor.storage.dtype.bytes_of(&[self.tensor.offset])
    }

    /// The elements in row-major order; `None` at the first that is not in the storage.
    fn copy(&self, storage: &[u8], len: usize) -> Option<Vec<u8>> {
        let size = self.tensor.storage.dtype.bytes_of(&[])?;
        let mut out = Vec::with_capacity(len);
        let mut index = vec![0; self.shape.len()];
        let mut at = self.tensor.offset;
        while out.len() < len {
            let start = at.checked_mul(size)?;
            out.extend_from_slice(storage.get(start..start.checked_add(size)?)?);
            // Counts up, innermost dimension first, and moves `at` along.
            for ((i, &n), &stride) in index.iter_mut().zip(self.shape).zip(self.strides).rev() {
                *i = usize::checked_add(*i, 1)?;
                at = at.checked_add(stride)?;
                if *i < n {
                    break;
                }
                at = at.checked_sub(stride.checked_mul(n)?)?;
                *i = 0;
            }
        }
        Some(out)
    }

    fn outside(&self) -> String {
        format!(
            "shape {:?} with strides {:?} from {} reaches outside of its storage of {}",
            self.shape, self.strides, self.tensor.offset, self.tensor.storage.numel
        )
    }
}
