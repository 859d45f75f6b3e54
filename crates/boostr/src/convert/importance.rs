//! Importance matrices: how much each column of a matrix matters, by the inputs that it meets.
//!
//! The sum of squares of what a column is multiplied by, over a text, is its weight in the error of a quantized
//! matrix. Two kinds of file hold such sums, both made by llama.cpp:
//!
//! - GGUF with `general.type` `imatrix`: for each matrix `NAME.in_sum2` `[matrices, columns]` and `NAME.counts`
//!   `[matrices, 1]`, where an expert is a matrix of its own.
//! - The older one (`.dat`, `.imatrix`), in little-endian: a count of entries; for each the length of its name, the
//!   name, the number of calls, the number of values, and these as f32.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use super::ModelFiles;
use crate::backend::{CpuClient, Recorded};
use crate::checkpoint::gguf::{self, Metadata};
use crate::checkpoint::{Access, Bytes, Checkpoint, Dtype, bytes_of};
use crate::error::{Error, Result};
use crate::load::OpenOptions;
use crate::models::{Model, Run};
use crate::ops::{Inputs, Tape};

/// Longest name of a matrix.
const MAX_NAME: usize = 1024;
/// Endings of the tensors of one matrix.
const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";

/// The weights of columns, by the names that GGUF has for matrices.
#[derive(Debug, Clone, Default)]
pub struct Importance {
    matrices: BTreeMap<String, Vec<f32>>,
}

impl Importance {
    /// Reads a file of either kind.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when it cannot be read; [`Error::Format`] when it is neither, is cut short, or has a weight that is
    /// no finite number from 0 on.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = bytes_of(path, Access::Read)?;
        let matrices = match *bytes {
            [b'G', b'G', b'U', b'F', ..] => of_gguf(path)?,
            _ => of_old(&bytes).map_err(|reason| {
                let reason = format!("expected an importance matrix, as llama.cpp makes: {reason}");
                Error::format(path, reason)
            })?,
        };
        for (name, weights) in &matrices {
            if let Some(bad) = weights.iter().find(|w| !w.is_finite() || **w < 0.0) {
                let name = name.escape_debug();
                let reason = format!("`{name}` has a weight of {bad}: expected numbers from 0 on");
                return Err(Error::format(path, reason));
            }
        }
        Ok(Self { matrices })
    }

    /// Names of the matrices.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.matrices.keys().map(String::as_str)
    }

    /// A weight for each value of the rows from `first` on of a matrix of `shape`, whose last dimension is columns, the
    /// one before rows, and one before that matrices; `None` for a matrix that the file does not have.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when the file is of other columns.
    pub(super) fn of_rows(
        &self,
        name: &str,
        shape: &[usize],
        first: usize,
        rows: usize,
    ) -> Result<Option<Vec<f32>>> {
        let Some(weights) = self.matrices.get(name) else { return Ok(None) };
        let columns = shape.last().copied().unwrap_or(1);
        let per_matrix = shape.iter().rev().nth(1).copied().unwrap_or(1).max(1);
        let count: usize = shape.iter().product::<usize>() / (columns * per_matrix).max(1);
        if weights.len() != columns && weights.len() != columns * count {
            let name = name.escape_debug();
            let found = weights.len();
            let reason = format!(
                "`{name}` has {count} matrices of {columns} columns, the importance matrix {found} weights: it is of \
                 another model"
            );
            return Err(Error::Argument { name: "importance", reason });
        }
        let own = |row: usize| match row / per_matrix * columns {
            start if weights.len() > columns => &weights[start..start + columns],
            _ => &weights[..],
        };
        Ok(Some((first..first + rows).flat_map(|row| own(row).iter().copied()).collect()))
    }
}

/// Runs the model at `source` through `ids`, `chunk` of them at once and each chunk from an empty state, and writes
/// what its matrices met to the GGUF file `out`; `text` names where the ids are from. The embedding, which multiplies
/// nothing, and the head are not among them.
///
/// `progress` is told `(done, total)` tokens and ends it by `Break`. Ids after the last whole chunk are left out, unless
/// there is none.
///
/// # Errors
///
/// As [`convert`](super::convert()); [`Error::Argument`] for no ids, a chunk of none, or an id that the model lacks;
/// [`Error::Unsupported`] for a family that GGUF has no names for; [`Error::Interrupted`] after `Break`.
pub fn collect(
    source: &Path,
    options: &OpenOptions,
    (ids, text): (&[u32], &str),
    chunk: usize,
    out: &Path,
    client: &CpuClient,
    progress: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<usize> {
    if ids.is_empty() || chunk == 0 {
        let reason = format!("expected at least one in chunks of one, found {}", ids.len());
        return Err(Error::Argument { name: "ids", reason });
    }
    let mut files = ModelFiles::open(source, options)?;
    files.checkpoint.decode()?;
    let rows = files.rows();
    let layout = files.config.family().gguf_layout(rows, !files.tied)?;
    let whole = (ids.len() / chunk).max(1) * chunk;
    let ids = &ids[..whole.min(ids.len())];
    let mut met: BTreeMap<String, Inputs> = BTreeMap::new();
    let mut done = 0;
    let tape = Tape::new(client.clone(), |_| false).observing();
    let model = Model::<Recorded>::of_params(
        files.config.clone(),
        &files.checkpoint,
        files.tied,
        tape.clone(),
        (None, None),
    )?;
    let built = tape.mark();
    for tokens in ids.chunks(chunk) {
        let mut state = model.new_state()?;
        model.hidden(&mut [Run { tokens, state: &mut state }])?;
        for (name, inputs) in tape.observed() {
            let sums = met.entry(name).or_default();
            sums.squares.resize(inputs.squares.len(), 0.0);
            sums.squares.iter_mut().zip(&inputs.squares).for_each(|(sum, more)| *sum += more);
            sums.rows += inputs.rows;
        }
        tape.back_to(built);
        done += tokens.len();
        if progress(done, ids.len()).is_break() {
            return Err(Error::Interrupted { path: out.to_path_buf() });
        }
    }
    let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
    for stored in &layout.0 {
        let matrices = if let [count, _, _] = stored.shape[..] { count } else { 1 };
        let each = stored.parts.len() / matrices.max(1);
        // Parts of one matrix meet the same.
        let firsts = stored.parts.iter().step_by(each.max(1)).take(matrices);
        let found: Vec<Option<&Inputs>> = firsts.map(|part| met.get(&part.name)).collect();
        let columns = stored.shape.last().copied().unwrap_or(1);
        if !found.iter().flatten().any(|inputs| inputs.squares.len() == columns) {
            continue;
        }
        let is_wrong = |inputs: &&Inputs| inputs.squares.iter().any(|&x| !(x as f32).is_finite());
        if found.iter().flatten().any(is_wrong) {
            let reason = format!(
                "`{}` meets values that are not finite, or whose squares are not: `boostr verify MODEL --values` looks for the cause",
                stored.name
            );
            return Err(Error::format(source, reason));
        }
        let mut sums = Vec::with_capacity(columns * matrices);
        for inputs in &found {
            match inputs {
                Some(inputs) => sums.extend(inputs.squares.iter().map(|&x| x as f32)),
                None => sums.extend(vec![0.0; columns]),
            }
        }
        let counts = found.iter().map(|inputs| inputs.map_or(0, |inputs| inputs.rows) as f32);
        let counts: Vec<f32> = counts.collect();
        tensors.push((format!("{}{SUMS}", stored.name), vec![matrices, columns], sums));
        tensors.push((format!("{}{COUNTS}", stored.name), vec![matrices, 1], counts));
    }
    let mut metadata = Metadata::new("metadata");
    metadata.set("general.type", "imatrix");
    metadata.set("imatrix.datasets", [text].as_slice());
    metadata.set("imatrix.chunk_count", ids.len().div_ceil(chunk) as u32);
    metadata.set("imatrix.chunk_size", chunk.min(ids.len()) as u32);
    let table: Vec<(&str, Dtype, &[usize])> = tensors
        .iter()
        .map(|(name, shape, _)| (name.as_str(), Dtype::F32, shape.as_slice()))
        .collect();
    let mut data = |i: usize| -> Result<Bytes> {
        Ok(Bytes::new(Dtype::F32.encode(tensors.get(i).map_or(&[][..], |t| &t.2))?))
    };
    gguf::write(out, &metadata, &table, &mut data)?;
    Ok(tensors.len() / 2)
}

/// The tensors of a GGUF file.
fn of_gguf(path: &Path) -> Result<BTreeMap<String, Vec<f32>>> {
    let file = Checkpoint::open_by(path, false, Access::Read)?;
    let kind = file.gguf().map(|metadata| metadata.text("general.type")).transpose()?.flatten();
    if kind != Some("imatrix") {
        let reason = format!("expected general.type imatrix, found {kind:?}");
        return Err(Error::format(path, reason));
    }
    let mut matrices = BTreeMap::new();
    for (name, sums) in file.iter() {
        let Some(matrix) = name.strip_suffix(SUMS) else { continue };
        let bad =
            |reason: String| Error::format(path, format!("`{}`: {reason}", name.escape_debug()));
        let counts = file.get(&format!("{matrix}{COUNTS}"));
        let counts = counts.ok_or_else(|| bad(format!("expected counts beside it, `{COUNTS}`")))?;
        let (sums, counts) = (sums.to_f32()?, counts.to_f32()?);
        if counts.is_empty() || !sums.len().is_multiple_of(counts.len()) {
            return Err(bad(format!("{} sums of {} matrices", sums.len(), counts.len())));
        }
        let columns = sums.len() / counts.len();
        let mut weights = Vec::with_capacity(sums.len());
        for (sums, &count) in sums.chunks(columns.max(1)).zip(&counts) {
            // What was never met is not known to matter less.
            weights.extend(sums.iter().map(|&sum| if count > 0.0 { sum / count } else { 1.0 }));
        }
        matrices.insert(matrix.to_owned(), weights);
    }
    if matrices.is_empty() {
        return Err(Error::format(path, format!("no tensor with the ending {SUMS}")));
    }
    Ok(matrices)
}

/// The entries of the older kind.
fn of_old(bytes: &[u8]) -> Result<BTreeMap<String, Vec<f32>>, String> {
    let mut reader = Reader(bytes);
    let mut matrices = BTreeMap::new();
    for _ in 0..reader.number("the count of entries", 1, usize::MAX)? {
        let len = reader.number("the length of a name", 1, MAX_NAME)?;
        let name = reader.take("a name", len)?;
        let name = std::str::from_utf8(name).map_err(|_| "a name is not UTF-8".to_owned())?;
        let calls = reader.number("a number of calls", 0, usize::MAX)?;
        let count = reader.number("a number of values", 1, usize::MAX)?;
        let values = reader.take("values", count.saturating_mul(4))?;
        let values = values.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
        let per_call = if calls > 0 { 1.0 / calls as f32 } else { 1.0 };
        matrices.insert(name.to_owned(), values.map(|sum| sum * per_call).collect());
    }
    Ok(matrices)
}

/// What is left of a file.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, what: &str, count: usize) -> Result<&'a [u8], String> {
        let ends = || format!("the file ends within {what}");
        let (taken, rest) = self.0.split_at_checked(count).ok_or_else(ends)?;
        self.0 = rest;
        Ok(taken)
    }

    fn number(&mut self, what: &str, least: usize, most: usize) -> Result<usize, String> {
        let taken = self.take(what, 4)?;
        let number = i32::from_le_bytes(taken.try_into().unwrap_or_default());
        let found = usize::try_from(number).ok().filter(|found| (least..=most).contains(found));
        found.ok_or_else(|| format!("{what} is {number}"))
    }
}
