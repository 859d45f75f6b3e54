//! NaN and infinities, which opening a file does not look for.
//!
//! Every format has its scale in every product. So a block whose scale is NaN or infinite decodes to
//! values that are not finite, whatever its codes.

use std::ops::Range;

use super::{Checkpoint, Dtype, TensorEntry};
use crate::error::Result;

/// Elements that are decoded at once; a multiple of every block.
const CHUNK: usize = 1 << 16;

/// A tensor of a checkpoint that holds NaN or infinities.
#[derive(Debug, Clone, PartialEq)]
pub struct NotFinite {
    /// The tensor's name.
    pub name: String,
    /// Values that are NaN.
    pub nan: usize,
    /// Values that are infinite.
    pub infinite: usize,
    /// Elements of the first value, in row-major order: one, or those of its block.
    pub elements: Range<usize>,
    /// Where in its file the first value is, or its block.
    pub byte: usize,
}

/// Reads all data and returns the tensors with values that are not finite, NaN or infinite.
///
/// Integers are passed over. `progress` is called with the bytes read so far, every few hundred
/// kilobytes.
///
/// # Errors
///
/// Those of [`TensorEntry::to_f32`].
pub fn not_finite(
    checkpoint: &Checkpoint,
    mut progress: impl FnMut(usize),
) -> Result<Vec<NotFinite>> {
    let mut found = Vec::new();
    let mut done = 0usize;
    for (name, entry) in checkpoint.iter() {
        let before = done;
        let step = |bytes| progress(before.saturating_add(bytes));
        found.extend(in_tensor(name, entry, step)?);
        done = done.saturating_add(entry.data.len());
        progress(done);
    }
    Ok(found)
}

fn in_tensor(
    name: &str,
    entry: &TensorEntry,
    mut progress: impl FnMut(usize),
) -> Result<Option<NotFinite>> {
    let dtype = entry.dtype;
    let is_float =
        matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::Block(_));
    let block = dtype.block_len();
    let (Some(block_bytes), Some(step)) = (dtype.bytes_of(&[block]), dtype.bytes_of(&[CHUNK]))
    else {
        return Ok(None);
    };
    let mut found: Option<NotFinite> = None;
    if !is_float {
        return Ok(found);
    }
    for start in (0..entry.data.len()).step_by(step) {
        let end = start.saturating_add(step).min(entry.data.len());
        let Some(data) = entry.data.slice(start..end) else { break };
        let blocks = data.len().checked_div(block_bytes).unwrap_or_default();
        let shape = vec![blocks.saturating_mul(block)];
        let values = TensorEntry { shape, data, ..entry.clone() }.to_f32()?;
        // By the largest exponent, which vectorizes.
        let largest = values.iter().fold(0, |max: u32, x| max.max(x.abs().to_bits()));
        if largest < f32::INFINITY.to_bits() {
            progress(end);
            continue;
        }
        for (index, value) in values.iter().enumerate().filter(|(_, value)| !value.is_finite()) {
            let found = found.get_or_insert_with(|| {
                let in_chunk = index.checked_div(block).unwrap_or_default();
                let before = start.checked_div(block_bytes).unwrap_or_default();
                let first = before.saturating_add(in_chunk);
                let element = first.saturating_mul(block);
                let offset = first.saturating_mul(block_bytes);
                NotFinite {
                    name: name.to_owned(),
                    nan: 0,
                    infinite: 0,
                    elements: element..element.saturating_add(block),
                    byte: entry.data.range().start.saturating_add(offset),
                }
            });
            let count = if value.is_nan() { &mut found.nan } else { &mut found.infinite };
            *count = count.saturating_add(1);
        }
        progress(end);
    }
    Ok(found)
}
