//! The block formats of ggml: what each holds, decoding and encoding.
//!
//! A tensor is cut along its rows into blocks of 32 or 256 values; a block is a few bytes of codes and
//! scales. One file per format gives the layout; [`Format`] names them. Layouts are ggml's to the bit,
//! decoded values those of PyPI's `gguf` (`gguf.quants`) to the bit; encoders are our own.

mod activations;
mod fit;
mod grids;
mod iq1_m;
mod iq1_s;
mod iq2_s;
mod iq2_xs;
mod iq2_xxs;
mod iq3_s;
mod iq3_xxs;
mod iq4_nl;
mod iq4_xs;
mod mxfp4;
mod packed;
mod parts;
mod product;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod q8_k;
mod tq1_0;
mod tq2_0;

#[cfg(test)]
mod tests;

pub use packed::Packed;
pub use product::{linear_quantized, linear_quantized_precise};

use crate::simd::{Level, Simd, dispatch};
use fit::Integers;
pub(crate) use parts::{Grid, Parts, Values};

/// A block format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names are ggml's; each has a file of its own")]
pub enum Format {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Q8K,
    Iq4Nl,
    Iq4Xs,
    Iq2Xxs,
    Iq2Xs,
    Iq2S,
    Iq3Xxs,
    Iq3S,
    Iq1S,
    Iq1M,
    Tq1_0,
    Tq2_0,
    Mxfp4,
}

impl Format {
    /// Every format.
    pub const ALL: [Self; 23] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Q8K,
        Self::Iq4Nl,
        Self::Iq4Xs,
        Self::Iq2Xxs,
        Self::Iq2Xs,
        Self::Iq2S,
        Self::Iq3Xxs,
        Self::Iq3S,
        Self::Iq1S,
        Self::Iq1M,
        Self::Tq1_0,
        Self::Tq2_0,
        Self::Mxfp4,
    ];

    /// Name, values and bytes of a block.
    const fn facts(self) -> (&'static str, usize, usize) {
        match self {
            Self::Q4_0 => ("q4_0", q4_0::LEN, q4_0::BYTES),
            Self::Q4_1 => ("q4_1", q4_1::LEN, q4_1::BYTES),
            Self::Q5_0 => ("q5_0", q5_0::LEN, q5_0::BYTES),
            Self::Q5_1 => ("q5_1", q5_1::LEN, q5_1::BYTES),
            Self::Q8_0 => ("q8_0", q8_0::LEN, q8_0::BYTES),
            Self::Q2K => ("q2_k", q2_k::LEN, q2_k::BYTES),
            Self::Q3K => ("q3_k", q3_k::LEN, q3_k::BYTES),
            Self::Q4K => ("q4_k", q4_k::LEN, q4_k::BYTES),
            Self::Q5K => ("q5_k", q5_k::LEN, q5_k::BYTES),
            Self::Q6K => ("q6_k", q6_k::LEN, q6_k::BYTES),
            Self::Q8K => ("q8_k", q8_k::LEN, q8_k::BYTES),
            Self::Iq4Nl => ("iq4_nl", iq4_nl::LEN, iq4_nl::BYTES),
            Self::Iq4Xs => ("iq4_xs", iq4_xs::LEN, iq4_xs::BYTES),
            Self::Iq2Xxs => ("iq2_xxs", iq2_xxs::LEN, iq2_xxs::BYTES),
            Self::Iq2Xs => ("iq2_xs", iq2_xs::LEN, iq2_xs::BYTES),
            Self::Iq2S => ("iq2_s", iq2_s::LEN, iq2_s::BYTES),
            Self::Iq3Xxs => ("iq3_xxs", iq3_xxs::LEN, iq3_xxs::BYTES),
            Self::Iq3S => ("iq3_s", iq3_s::LEN, iq3_s::BYTES),
            Self::Iq1S => ("iq1_s", iq1_s::LEN, iq1_s::BYTES),
            Self::Iq1M => ("iq1_m", iq1_m::LEN, iq1_m::BYTES),
            Self::Tq1_0 => ("tq1_0", tq1_0::LEN, tq1_0::BYTES),
            Self::Tq2_0 => ("tq2_0", tq2_0::LEN, tq2_0::BYTES),
            Self::Mxfp4 => ("mxfp4", mxfp4::LEN, mxfp4::BYTES),
        }
    }

    /// ggml's name, in lower case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.facts().0
    }

    /// The format of a name, in any case.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name().eq_ignore_ascii_case(name))
    }

    /// Values of a block.
    #[must_use]
    pub const fn block_len(self) -> usize {
        self.facts().1
    }

    /// Bytes of a block.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        self.facts().2
    }

    /// Bytes that hold so many values; none unless they are whole blocks and the product fits.
    #[must_use]
    pub const fn bytes_of(self, values: usize) -> Option<usize> {
        if values.is_multiple_of(self.block_len()) {
            (values / self.block_len()).checked_mul(self.block_bytes())
        } else {
            None
        }
    }

    /// Whether [`encode`] writes it.
    #[must_use]
    pub const fn can_encode(self) -> bool {
        self.can_multiply()
    }

    /// Whether products read it; the others are decoded first.
    #[must_use]
    pub const fn can_multiply(self) -> bool {
        grid(self).is_some()
    }
}

/// How codes are laid out and read; none for formats that are only decoded.
pub(crate) const fn grid(format: Format) -> Option<Grid> {
    match format {
        Format::Q4_0 => Some(q4_0::GRID),
        Format::Q4_1 => Some(q4_1::GRID),
        Format::Q5_0 => Some(q5_0::GRID),
        Format::Q5_1 => Some(q5_1::GRID),
        Format::Q8_0 => Some(q8_0::GRID),
        Format::Q2K => Some(q2_k::GRID),
        Format::Q3K => Some(q3_k::GRID),
        Format::Q4K => Some(q4_k::GRID),
        Format::Q5K => Some(q5_k::GRID),
        Format::Q6K => Some(q6_k::GRID),
        Format::Iq4Nl => Some(iq4_nl::GRID),
        Format::Iq4Xs => Some(iq4_xs::GRID),
        _ => None,
    }
}

/// Takes a block apart.
///
/// # Panics
///
/// If the format cannot be multiplied, or `block` is not one block.
#[track_caller]
#[inline(always)]
pub(crate) fn parts(format: Format, block: &[u8]) -> Parts {
    match format {
        Format::Q4_0 => q4_0::parts(block),
        Format::Q4_1 => q4_1::parts(block),
        Format::Q5_0 => q5_0::parts(block),
        Format::Q5_1 => q5_1::parts(block),
        Format::Q8_0 => q8_0::parts(block),
        Format::Q2K => q2_k::parts(block),
        Format::Q3K => q3_k::parts(block),
        Format::Q4K => q4_k::parts(block),
        Format::Q5K => q5_k::parts(block),
        Format::Q6K => q6_k::parts(block),
        Format::Iq4Nl => iq4_nl::parts(block),
        Format::Iq4Xs => iq4_xs::parts(block),
        _ => panic!("format: {} has no parts", format.name()),
    }
}

/// Decodes whole blocks.
///
/// # Panics
///
/// If `blocks` are not whole blocks, or `out` does not hold just their values.
#[track_caller]
pub fn decode(format: Format, blocks: &[u8], out: &mut [f32]) {
    let count = blocks.len() / format.block_bytes();
    assert_eq!(blocks.len(), count * format.block_bytes(), "blocks: not whole {}", format.name());
    assert_eq!(out.len(), count * format.block_len(), "out: values of {count} blocks");
    let decode_block: fn(&[u8], &mut [f32]) = match format {
        Format::Q4_0 => |block, out| q4_0::parts(block).decode(q4_0::GRID, out),
        Format::Q4_1 => |block, out| q4_1::parts(block).decode(q4_1::GRID, out),
        Format::Q5_0 => |block, out| q5_0::parts(block).decode(q5_0::GRID, out),
        Format::Q5_1 => |block, out| q5_1::parts(block).decode(q5_1::GRID, out),
        Format::Q8_0 => |block, out| q8_0::parts(block).decode(q8_0::GRID, out),
        Format::Q2K => |block, out| q2_k::parts(block).decode(q2_k::GRID, out),
        Format::Q3K => |block, out| q3_k::parts(block).decode(q3_k::GRID, out),
        Format::Q4K => |block, out| q4_k::parts(block).decode(q4_k::GRID, out),
        Format::Q5K => |block, out| q5_k::parts(block).decode(q5_k::GRID, out),
        Format::Q6K => |block, out| q6_k::parts(block).decode(q6_k::GRID, out),
        Format::Iq4Nl => |block, out| iq4_nl::parts(block).decode(iq4_nl::GRID, out),
        Format::Iq4Xs => |block, out| iq4_xs::parts(block).decode(iq4_xs::GRID, out),
        Format::Q8K => q8_k::decode,
        Format::Iq2Xxs => iq2_xxs::decode,
        Format::Iq2Xs => iq2_xs::decode,
        Format::Iq2S => iq2_s::decode,
        Format::Iq3Xxs => iq3_xxs::decode,
        Format::Iq3S => iq3_s::decode,
        Format::Iq1S => iq1_s::decode,
        Format::Iq1M => iq1_m::decode,
        Format::Tq1_0 => tq1_0::decode,
        Format::Tq2_0 => tq2_0::decode,
        Format::Mxfp4 => mxfp4::decode,
    };
    let blocks = blocks.chunks_exact(format.block_bytes());
    for (block, out) in blocks.zip(out.chunks_exact_mut(format.block_len())) {
        decode_block(block, out);
    }
}

/// Encodes whole blocks, with as little squared error as a short search finds.
///
/// NaN is encoded as 0 and infinity as the largest finite value. Scales are finite: values beyond what
/// the largest f16 scale reaches are clamped to that. The bytes do not depend on the level.
///
/// ```
/// use boostr_kernels::Level;
/// use boostr_kernels::quant::{Format, decode, encode};
/// let x: Vec<f32> = (0..32).map(|i| i as f32).collect();
/// let mut blocks = [0; 34];
/// encode(Level::detect(), Format::Q8_0, &x, &mut blocks);
/// let mut y = [0.0; 32];
/// decode(Format::Q8_0, &blocks, &mut y);
/// assert!(x.iter().zip(&y).all(|(x, y)| (x - y).abs() < 0.15));
/// ```
///
/// # Panics
///
/// If the format cannot be encoded, `x` is not whole blocks, or `blocks` does not hold just these.
#[track_caller]
pub fn encode(level: Level, format: Format, x: &[f32], blocks: &mut [u8]) {
    assert!(format.can_encode(), "format: {} is not written", format.name());
    let count = x.len() / format.block_len();
    assert_eq!(x.len(), count * format.block_len(), "x: not whole blocks of {}", format.name());
    assert_eq!(blocks.len(), count * format.block_bytes(), "blocks: {count} of {}", format.name());
    encode_blocks(level, format, x, blocks);
}

dispatch! {
    fn encode_blocks = encode_body(format: Format, x: &[f32], blocks: &mut [u8])
}

#[inline(always)]
fn encode_body<S: Simd>(simd: S, format: Format, x: &[f32], blocks: &mut [u8]) {
    macro_rules! each {
        ($format:ident, $fit:expr) => {
            for (x, block) in
                x.chunks_exact($format::LEN).zip(blocks.chunks_exact_mut($format::BYTES))
            {
                $format::pack(&$fit(simd, x), block);
            }
        };
    }
    match format {
        Format::Q4_0 => each!(q4_0, fit::scaled::<S, Integers<-8, 7, 8>, 32>),
        Format::Q4_1 => each!(q4_1, fit::shifted::<S, Integers<0, 15, 0>, 32>),
        Format::Q5_0 => each!(q5_0, fit::scaled::<S, Integers<-16, 15, 16>, 32>),
        Format::Q5_1 => each!(q5_1, fit::shifted::<S, Integers<0, 31, 0>, 32>),
        Format::Q8_0 => each!(q8_0, fit::scaled::<S, Integers<-127, 127, 0>, 32>),
        Format::Q2K => each!(q2_k, fit::shifted_groups::<S, Integers<0, 3, 0>, 16, 15>),
        Format::Q3K => each!(q3_k, fit::scaled_groups::<S, Integers<-4, 3, 4>, 16, -32, 31>),
        Format::Q4K => each!(q4_k, fit::shifted_groups::<S, Integers<0, 15, 0>, 32, 63>),
        Format::Q5K => each!(q5_k, fit::shifted_groups::<S, Integers<0, 31, 0>, 32, 63>),
        Format::Q6K => each!(q6_k, fit::scaled_groups::<S, Integers<-32, 31, 32>, 16, -128, 127>),
        Format::Iq4Nl => each!(iq4_nl, fit::scaled::<S, iq4_nl::Uneven, 32>),
        Format::Iq4Xs => each!(iq4_xs, fit::scaled_groups::<S, iq4_nl::Uneven, 32, -32, 31>),
        _ => unreachable!("checked by encode"),
    }
}
