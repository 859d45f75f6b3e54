//! Rows of activations as 8-bit integers, made once for a product.
//!
//! Each 32 values of a row have one scale:
//!
//! ```text
//! scale = max |x| / 127,    code = x / scale to the nearest integer,    |x - scale * code| <= scale / 2
//! ```
//!
//! (up to f32 rounding). Where an instruction set multiplies unsigned by signed integers, codes are also
//! taken apart into sizes and signs. A NaN or an infinity makes the scale NaN, and so every product with it.

use rayon::prelude::*;

use crate::rows::Rows;
use crate::simd::Level;
use crate::simd::int8::{Apart, Int8, Operand, dispatch_int8};

/// Values that share a scale.
pub(super) const BLOCK: usize = 32;

/// With fewer values, one thread quantizes them.
const FEW: usize = 1 << 14;

/// 32 neighbouring values of a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    /// In -127..=127.
    pub codes: [i8; BLOCK],
    pub scale: f32,
    /// `scale` times the sum of all codes.
    pub scaled_sum: f32,
    /// Sums of the first 16 codes and of the others.
    pub sums: [i16; 2],
}

impl Block {
    const ZERO: Self = Self { codes: [0; BLOCK], scale: 0.0, scaled_sum: 0.0, sums: [0; 2] };
}

/// Quantized rows, stored as `[width / 32, rows]` blocks: the order in which a product reads them.
pub(super) struct Activations {
    blocks: Vec<Block>,
    /// Their codes taken apart, for products that take them so.
    apart: Vec<Apart>,
    rows: usize,
}

impl Activations {
    /// Quantizes rows of whole blocks; for signed codes, as the level takes them.
    pub(super) fn new(level: Level, x: Rows<'_>, signed: bool) -> Self {
        let rows = x.len();
        let mut blocks = vec![Block::ZERO; x.width() / BLOCK * rows];
        let mut apart =
            vec![Apart::ZERO; if signed && level.takes_apart() { blocks.len() } else { 0 }];
        if blocks.len() * BLOCK < FEW {
            for (k, blocks) in blocks.chunks_exact_mut(rows).enumerate() {
                quantize(level, x, k, blocks);
            }
            take_apart(level, &blocks, &mut apart);
        } else {
            let columns = blocks.par_chunks_exact_mut(rows).enumerate();
            columns.for_each(|(k, blocks)| quantize(level, x, k, blocks));
            let columns = blocks.par_chunks_exact(rows).zip(apart.par_chunks_exact_mut(rows));
            columns.for_each(|(blocks, apart)| take_apart(level, blocks, apart));
        }
        Self { blocks, apart, rows }
    }

    /// Values `32 k..32 k + 32` of every row.
    #[inline(always)]
    pub(super) fn column(&self, k: usize) -> &[Block] {
        &self.blocks[k * self.rows..][..self.rows]
    }

    /// The codes of values `32 k..32 k + 32` of a row, for a product with signed ones.
    #[inline(always)]
    pub(super) fn codes(&self, k: usize, row: usize) -> Operand<'_> {
        let i = k * self.rows + row;
        // Where nobody takes them apart, there is nothing to give.
        let apart = self.apart.get(i).unwrap_or(&Apart::ZERO);
        Operand { all: &self.blocks[i].codes, apart }
    }
}

dispatch_int8! { fn quantize = quantize_body(x: Rows<'_>, k: usize, blocks: &mut [Block]) }

#[inline(always)]
fn quantize_body<S: Int8>(_simd: S, x: Rows<'_>, k: usize, blocks: &mut [Block]) {
    for m in 0..blocks.len() {
        blocks[m] = quantize_block(&x.row(m).as_chunks().0[k]);
    }
}

dispatch_int8! { fn take_apart = take_apart_body(blocks: &[Block], apart: &mut [Apart]) }

#[inline(always)]
fn take_apart_body<S: Int8>(_simd: S, blocks: &[Block], apart: &mut [Apart]) {
    for (apart, block) in apart.iter_mut().zip(blocks) {
        *apart = Apart::of(&block.codes);
    }
}

/// What rounding leaves of a row of whole blocks: `x - scale * code`.
pub(super) fn remainder(x: &[f32], out: &mut [f32]) {
    let blocks = x.as_chunks::<BLOCK>().0.iter().zip(out.as_chunks_mut::<BLOCK>().0);
    for (x, out) in blocks {
        let Block { codes, scale, .. } = quantize_block(x);
        for ((out, x), code) in out.iter_mut().zip(x).zip(codes) {
            *out = x - scale * f32::from(code);
        }
    }
}

/// Rounds |x| < 2^22 to the nearest integer, ties to even, where it is added and taken away.
const ROUND: f32 = 12_582_912.0;

/// Plain loops, which the compiler makes vectors of.
#[inline(always)]
fn quantize_block(x: &[f32; BLOCK]) -> Block {
    // Without their sign, bits of floats are in the order of the floats; those of NaN come last.
    let mut largest = 0;
    for x in x {
        largest = largest.max(x.to_bits().cast_signed() & i32::MAX);
    }
    let largest = f32::from_bits(largest.cast_unsigned());
    if !largest.is_finite() {
        return Block { scale: f32::NAN, scaled_sum: f32::NAN, ..Block::ZERO };
    }
    let inverse = 127.0 / largest;
    if !inverse.is_finite() {
        // Zeros, or too small for their inverse.
        return Block::ZERO;
    }
    let mut codes = [0; BLOCK];
    let mut sums = [0; 2];
    for half in 0..2 {
        let mut sum = 0;
        for i in half * 16..half * 16 + 16 {
            let code = (x[i] * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i8;
            codes[i] = code;
            sum += i16::from(code);
        }
        sums[half] = sum;
    }
    let scale = largest / 127.0;
    let scaled_sum = scale * f32::from(sums[0] + sums[1]);
    Block { codes, scale, scaled_sum, sums }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    #[test]
    fn codes_are_within_half_a_step_on_every_instruction_set() {
        let mut rng = Rng::new(40);
        for &level in Level::present() {
            for size in [1e-36, 1e-30, 1.0, 3e38] {
                let x: Vec<f32> = rng.floats(3 * 64).iter().map(|x| x * size).collect();
                let quantized = Activations::new(level, Rows::dense(&x, 64), true);
                for (m, row) in x.chunks_exact(64).enumerate() {
                    for (k, x) in row.chunks_exact(BLOCK).enumerate() {
                        let block = quantized.column(k)[m];
                        let largest = x.iter().fold(0.0f32, |l, x| l.max(x.abs()));
                        assert_eq!(block.scale, largest / 127.0);
                        let step = f64::from(block.scale);
                        for (x, code) in x.iter().zip(block.codes) {
                            let error = (f64::from(*x) - step * f64::from(code)).abs();
                            assert!(error <= step * 0.5001, "{x} is not {code} * {step}");
                        }
                        let sum = |codes: &[i8]| codes.iter().map(|c| i16::from(*c)).sum::<i16>();
                        assert_eq!(block.sums, [sum(&block.codes[..16]), sum(&block.codes[16..])]);
                        let sum = f32::from(block.sums[0] + block.sums[1]);
                        assert_eq!(block.scaled_sum, block.scale * sum);
                        if !level.takes_apart() {
                            continue;
                        }
                        let apart = quantized.codes(k, m).apart;
                        let mut negative = 0;
                        for (i, code) in block.codes.into_iter().enumerate() {
                            assert_eq!(apart.sizes[i], code.unsigned_abs());
                            assert_eq!(apart.signs[i], if code < 0 { -1 } else { 0 });
                            negative += i32::from(code.min(0)).abs();
                        }
                        assert_eq!(apart.negative, negative);
                    }
                }
            }
        }
    }

    #[test]
    fn zeros_have_a_scale_of_zero_and_numbers_without_end_none() {
        for &level in Level::present() {
            let mut x = [0.0; 96];
            x[40] = f32::NAN;
            x[95] = f32::NEG_INFINITY;
            let quantized = Activations::new(level, Rows::dense(&x, 96), false);
            assert_eq!(quantized.column(0)[0].scale, 0.0);
            assert!(quantized.column(1)[0].scale.is_nan());
            assert!(quantized.column(2)[0].scale.is_nan());
        }
    }
}
