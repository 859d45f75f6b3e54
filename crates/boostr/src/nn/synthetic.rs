//! Checkpoints of random weights made in memory: a model of any size for measurements and examples.

use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use super::params::Tensors;
use crate::checkpoint::{Bytes, Checkpoint, Dtype, TensorEntry};
use crate::error::Result;

/// Values that are encoded at once.
const PIECE: usize = 1 << 16;

/// Random values for `tensors`: matrices uniform with variance 1 / columns, `A_log` in 0..2.7, `dt_bias`
/// for steps about 0.01, all else ones. The same for the same names and shapes.
///
/// # Errors
///
/// [`Error::Unsupported`](crate::Error::Unsupported) for a type of `matrix` that cannot be written, and
/// [`Error::Argument`](crate::Error::Argument) when a row is not whole blocks.
pub fn checkpoint(tensors: &Tensors, matrix: Dtype) -> Result<Checkpoint> {
    let is_matrix = |shape: &[usize]| shape.len() == 2;
    checkpoint_as(tensors, |_, shape| if is_matrix(shape) { matrix } else { Dtype::F32 })
}

/// The same; `types` says of each matrix, of each stack of matrices and of the taps of each convolution which type it
/// has.
///
/// # Errors
///
/// As [`checkpoint`].
pub fn checkpoint_as(
    tensors: &Tensors,
    types: impl Fn(&str, &[usize]) -> Dtype,
) -> Result<Checkpoint> {
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let file: Arc<Path> = Path::new("synthetic").into();
    let entries = tensors.iter().map(|(name, shape)| {
        let count = shape.iter().product::<usize>();
        let (dtype, values): (Dtype, Vec<f32>) = match shape {
            [_, terms] | [_, _, terms] => {
                let scale = (3.0 / *terms as f32).sqrt();
                (types(name, shape), (0..count).map(|_| scale * random.next()).collect())
            }
            _ => {
                let values = (0..count).map(|i| match name.rsplit('.').next() {
                    Some("A_log") => 2.7 * i as f32 / count as f32,
                    Some("dt_bias") => -4.6 + random.next(),
                    _ => 1.0,
                });
                (Dtype::F32, values.collect())
            }
        };
        let columns = shape.last().copied().unwrap_or(1).max(1);
        let rows_at_once = PIECE.div_ceil(columns);
        let pieces = values.par_chunks(rows_at_once * columns).map(|rows| dtype.encode(rows));
        let data = Bytes::new(pieces.collect::<Result<Vec<_>>>()?.concat());
        let entry = TensorEntry { dtype, shape: shape.to_vec(), data, file: file.clone() };
        Ok((name.to_string(), entry))
    });
    Ok(Checkpoint::from_entries("synthetic", entries.collect::<Result<_>>()?))
}

/// Xorshift64, uniform in -1..1.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}
