//! Checkpoints of random weights made in memory: a model of any size for measurements and examples.

use std::path::Path;
use std::sync::Arc;

use half::{bf16, f16};

use super::params::Tensors;
use crate::backend::DType;
use crate::checkpoint::{Bytes, Checkpoint, Dtype, TensorEntry};
use crate::error::{Error, Result};

/// Random values for `tensors`: matrices uniform with variance 1 / columns, `A_log` in 0..2.7, `dt_bias`
/// for steps about 0.01, all else ones. The same for the same names and shapes.
///
/// # Errors
///
/// [`Error::Unsupported`] for another `dtype` than F32, BF16 and F16.
pub fn checkpoint(tensors: &Tensors, dtype: DType) -> Result<Checkpoint> {
    let matrix = match dtype {
        DType::F32 => Dtype::F32,
        DType::BF16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        other => {
            let what = format!("weight type {other:?} (supported: F32, BF16, F16)");
            return Err(Error::Unsupported { what });
        }
    };
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    let file: Arc<Path> = Path::new("synthetic").into();
    let entries = tensors.iter().map(|(name, shape)| {
        let count = shape.iter().product::<usize>();
        let (dtype, bytes) = match shape {
            // A matrix, or the taps of a convolution.
            [_, terms] | [_, _, terms] => {
                let dtype = if shape.len() == 2 { matrix } else { Dtype::F32 };
                let scale = (3.0 / *terms as f32).sqrt();
                (dtype, encoded(dtype, (0..count).map(|_| scale * random.next())))
            }
            _ => {
                let values = (0..count).map(|i| match name.rsplit('.').next() {
                    Some("A_log") => 2.7 * i as f32 / count as f32,
                    Some("dt_bias") => -4.6 + random.next(),
                    _ => 1.0,
                });
                (Dtype::F32, encoded(Dtype::F32, values))
            }
        };
        let data = Bytes::new(bytes);
        (name.to_string(), TensorEntry { dtype, shape: shape.to_vec(), data, file: file.clone() })
    });
    Ok(Checkpoint::from_entries("synthetic", entries.collect()))
}

fn encoded(dtype: Dtype, values: impl Iterator<Item = f32>) -> Vec<u8> {
    match dtype {
        Dtype::BF16 => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
        Dtype::F16 => values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        _ => values.flat_map(f32::to_le_bytes).collect(),
    }
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
