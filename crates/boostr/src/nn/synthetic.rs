//! Checkpoints of random weights made in memory: a model of any size for measurements and examples.

use std::path::Path;
use std::sync::Arc;

use super::params::Tensors;
use crate::checkpoint::{Bytes, Checkpoint, Dtype, TensorEntry};
use crate::error::Result;

/// Random values for `tensors`: matrices uniform with variance 1 / columns, `A_log` in 0..2.7, `dt_bias`
/// for steps about 0.01, all else ones. The same for the same names and shapes.
///
/// # Errors
///
/// [`Error::Unsupported`](crate::Error::Unsupported) for a type of `matrix` that cannot be written, and
/// [`Error::Argument`](crate::Error::Argument) when a row is not whole blocks.
pub fn checkpoint(tensors: &Tensors, matrix: Dtype) -> Result<Checkpoint> {
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let file: Arc<Path> = Path::new("synthetic").into();
    let entries = tensors.iter().map(|(name, shape)| {
        let count = shape.iter().product::<usize>();
        let (dtype, values): (Dtype, Vec<f32>) = match shape {
            // A matrix, or the taps of a convolution.
            [_, terms] | [_, _, terms] => {
                let dtype = if shape.len() == 2 { matrix } else { Dtype::F32 };
                let scale = (3.0 / *terms as f32).sqrt();
                (dtype, (0..count).map(|_| scale * random.next()).collect())
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
        let data = Bytes::new(dtype.encode(&values)?);
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
