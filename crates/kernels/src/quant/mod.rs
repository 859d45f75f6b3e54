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
pub(crate) mod product;
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
mod tile;
mod tq1_0;
mod tq2_0;
mod unpack;

#[cfg(test)]
mod tests;

pub use packed::Packed;
pub use product::{linear_quantized, linear_quantized_precise};

use crate::simd::{Level, Simd, dispatch};
use fit::Integers;
pub(crate) use parts::{Parts, Scheme, Values};

/// The block formats, one row each: the variant of [`Format`], ggml's name, the module, and for those that
/// products read the search that encodes them. Calls the macro `$table` with what follows, then the rows.
macro_rules! formats {
    ($table:ident $($more:tt)*) => {
        $table! {
            $($more)*
            { Q4_0 "q4_0" q4_0 fit::scaled::<S, Integers<-8, 7, 8>, 32> }
            { Q4_1 "q4_1" q4_1 fit::shifted::<S, Integers<0, 15, 0>, 32> }
            { Q5_0 "q5_0" q5_0 fit::scaled::<S, Integers<-16, 15, 16>, 32> }
            { Q5_1 "q5_1" q5_1 fit::shifted::<S, Integers<0, 31, 0>, 32> }
            { Q8_0 "q8_0" q8_0 fit::scaled::<S, Integers<-127, 127, 0>, 32> }
            { Q2K "q2_k" q2_k fit::shifted_groups::<S, Integers<0, 3, 0>, 16, 15> }
            { Q3K "q3_k" q3_k fit::scaled_groups::<S, Integers<-4, 3, 4>, 16, -32, 31> }
            { Q4K "q4_k" q4_k fit::shifted_groups::<S, Integers<0, 15, 0>, 32, 63> }
            { Q5K "q5_k" q5_k fit::shifted_groups::<S, Integers<0, 31, 0>, 32, 63> }
            { Q6K "q6_k" q6_k fit::scaled_groups::<S, Integers<-32, 31, 32>, 16, -128, 127> }
            { Q8K "q8_k" q8_k }
            { Iq4Nl "iq4_nl" iq4_nl fit::scaled::<S, iq4_nl::Uneven, 32> }
            { Iq4Xs "iq4_xs" iq4_xs fit::scaled_groups::<S, iq4_nl::Uneven, 32, -32, 31> }
            { Iq2Xxs "iq2_xxs" iq2_xxs }
            { Iq2Xs "iq2_xs" iq2_xs }
            { Iq2S "iq2_s" iq2_s }
            { Iq3Xxs "iq3_xxs" iq3_xxs }
            { Iq3S "iq3_s" iq3_s }
            { Iq1S "iq1_s" iq1_s }
            { Iq1M "iq1_m" iq1_m }
            { Tq1_0 "tq1_0" tq1_0 }
            { Tq2_0 "tq2_0" tq2_0 }
            { Mxfp4 "mxfp4" mxfp4 }
        }
    };
}
pub(crate) use formats;

/// `$yes` for a row with a search, which products read; else `$no`.
macro_rules! if_multiplied {
    ({} $yes:expr, $no:expr) => {
        $no
    };
    ({ $($fit:tt)+ } $yes:expr, $no:expr) => {
        $yes
    };
}
pub(crate) use if_multiplied;

macro_rules! define_formats {
    ($({ $format:ident $name:literal $module:ident $($fit:tt)* })*) => {
        /// A block format.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[expect(missing_docs, reason = "the names are ggml's; each has a file of its own")]
        pub enum Format {
            $($format,)*
        }

        impl Format {
            /// Every format.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$format),*];

            /// Name, values and bytes of a block.
            const fn facts(self) -> (&'static str, usize, usize) {
                match self {
                    $(Self::$format => ($name, $module::LEN, $module::BYTES),)*
                }
            }
        }

        /// How codes are laid out and read; none for formats that are only decoded.
        pub(crate) const fn scheme(format: Format) -> Option<Scheme> {
            match format {
                $(Format::$format => if_multiplied!({ $($fit)* } Some($module::SCHEME), None),)*
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
                $(Format::$format => if_multiplied!(
                    { $($fit)* } $module::parts(block), panic!("format: {} has no parts", $name)
                ),)*
            }
        }

        /// What decodes a block of the format.
        fn decoder(format: Format) -> fn(&[u8], &mut [f32]) {
            match format {
                $(Format::$format => if_multiplied!(
                    { $($fit)* }
                    |block, out| $module::parts(block).decode($module::SCHEME, out),
                    $module::decode
                ),)*
            }
        }

        #[inline(always)]
        fn encode_body<S: Simd>(simd: S, format: Format, x: &[f32], w: &[f32], blocks: &mut [u8]) {
            match format {
                $(Format::$format => if_multiplied!(
                    { $($fit)* }
                    {
                        let blocks = blocks.chunks_exact_mut($module::BYTES);
                        for (i, block) in blocks.enumerate() {
                            let values = $module::LEN * i..$module::LEN * (i + 1);
                            let w = if w.is_empty() { w } else { &w[values.clone()] };
                            $module::pack(&($($fit)*(simd, &x[values], w)), block);
                        }
                    },
                    unreachable!("checked by encode")
                ),)*
            }
        }
    };
}
formats! { define_formats }

impl Format {
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
        scheme(self).is_some()
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
    let decode_block = decoder(format);
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
    encode_weighted(level, format, x, &[], blocks);
}

/// The same with as little weighted squared error: `w` has a weight for each value, or none, which are all alike.
///
/// Only ratios of weights within a block count. What is no finite number above 0 is a weight of 0.
///
/// # Panics
///
/// As [`encode`]; if there are weights, and not one for each value.
#[track_caller]
pub fn encode_weighted(level: Level, format: Format, x: &[f32], w: &[f32], blocks: &mut [u8]) {
    assert!(format.can_encode(), "format: {} is not written", format.name());
    let count = x.len() / format.block_len();
    assert_eq!(x.len(), count * format.block_len(), "x: not whole blocks of {}", format.name());
    assert!(w.is_empty() || w.len() == x.len(), "w: {} weights of {} values", w.len(), x.len());
    assert_eq!(blocks.len(), count * format.block_bytes(), "blocks: {count} of {}", format.name());
    encode_blocks(level, format, x, w, blocks);
}

dispatch! {
    fn encode_blocks = encode_body(format: Format, x: &[f32], w: &[f32], blocks: &mut [u8])
}
