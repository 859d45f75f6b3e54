//! Rows of activations as 8-bit integers, made once for a product.
//!
//! Each 32 values of a row have one scale, and an integer each, of one term or of two:
//!
//! ```text
//! one:  scale = max |x| / 127,            x ~= scale * code
//! two:  scale = max |x| / (254 * 127),    x ~= scale * (254 * high + low)
//! ```
//!
//! to the nearest, so |error| <= scale / 2 up to f32 rounding; codes and terms are in -127..=127. Where an
//! instruction set multiplies unsigned by signed integers, codes are also taken apart into sizes and signs.
//! A NaN or an infinity makes the scale NaN, and so every product with it.

use std::cell::RefCell;

use crate::parallel;
use crate::rows::Rows;
use crate::simd::Level;
use crate::simd::int8::{Apart, Int8, Operand, TERM, dispatch_int8};

/// Values that share a scale.
pub(super) const BLOCK: usize = 32;

/// Picoseconds to quantize a value into a term.
const COST: usize = 300;

/// What weights need to know of 32 neighbouring values of a row, beside their codes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct OfBlock {
    pub scale: f32,
    /// For each group of weights, what a sum of products begins with: minus the offset of the weights' codes times
    /// the sum of the values' integers.
    pub first: [i32; 2],
    /// For each group, `scale` times the sum of the integers.
    pub sums: [f32; 2],
}

/// What weights want of the activations.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    /// Terms of an integer, 1 or 2.
    pub terms: usize,
    /// Groups of weights in 32 values, 1 or 2.
    pub groups: usize,
    /// The offset of the weights' codes, as they are multiplied.
    pub offset: i32,
    /// Whether codes are also taken apart.
    pub apart: bool,
}

/// Memory of quantized rows, which may be longer than they are.
#[derive(Default)]
struct Buffers {
    codes: Vec<[i8; BLOCK]>,
    apart: Vec<Apart>,
    scales: Vec<OfBlock>,
}

impl Buffers {
    fn size_in_bytes(&self) -> usize {
        size_of_val(&*self.codes) + size_of_val(&*self.apart) + size_of_val(&*self.scales)
    }
}

thread_local! {
    /// Memory of the last products of this thread. A fresh one would be cleared each time, though all of it is written.
    static SPARE: RefCell<Vec<Buffers>> = RefCell::default();
}

/// So many buffers are kept, the products of one step.
const KEPT: usize = 4;
/// Larger ones go back at once.
const KEPT_BYTES: usize = 8 << 20;

/// Makes a buffer at least so long.
fn grow<T: Clone>(buffer: &mut Vec<T>, len: usize, zero: T) {
    if buffer.len() < len {
        buffer.resize(len, zero);
    }
}

/// Quantized rows.
pub(crate) struct Activations {
    /// `codes`: `[rows, width / 32, terms]`, high terms first. `apart`: the same taken apart, for products that take them
    /// so. `scales`: `[rows, width / 32]`.
    buffers: Buffers,
    wanted: Wanted,
    cells: usize,
}

impl Drop for Activations {
    fn drop(&mut self) {
        if self.buffers.size_in_bytes() <= KEPT_BYTES {
            SPARE.with_borrow_mut(|spare| {
                if spare.len() < KEPT {
                    spare.push(std::mem::take(&mut self.buffers));
                }
            });
        }
    }
}

impl Activations {
    /// Quantizes rows of whole blocks.
    pub(super) fn new(level: Level, x: Rows<'_>, wanted: Wanted) -> Self {
        let (rows, cells) = (x.len(), x.width() / BLOCK);
        let of_row = cells * wanted.terms;
        let mut buffers = SPARE.with_borrow_mut(Vec::pop).unwrap_or_default();
        grow(&mut buffers.codes, rows * of_row, [0; BLOCK]);
        let taken_apart = if wanted.apart { rows * of_row } else { 0 };
        grow(&mut buffers.apart, taken_apart, Apart::ZERO);
        grow(&mut buffers.scales, rows * cells, OfBlock::default());
        let ns = rows * x.width() * wanted.terms * COST / 1000;
        let many = rows.div_ceil(parallel::pieces(ns));
        let mut codes_left = &mut buffers.codes[..rows * of_row];
        let mut apart_left = &mut buffers.apart[..taken_apart];
        let scales = &mut buffers.scales[..rows * cells];
        let blocks = scales.chunks_mut(many * cells).enumerate().map(|(i, scales)| {
            let count = scales.len() / cells * of_row;
            let apart_count = count.min(apart_left.len());
            let (codes, apart);
            (codes, codes_left) = std::mem::take(&mut codes_left).split_at_mut(count);
            (apart, apart_left) = std::mem::take(&mut apart_left).split_at_mut(apart_count);
            (i * many, scales, codes, apart)
        });
        let blocks = blocks.collect();
        parallel::for_each(
            blocks,
            ns,
            || (),
            |(), (first, scales, codes, apart)| {
                let all = codes.chunks_mut(of_row).zip(scales.chunks_mut(cells));
                for (i, (codes, scales)) in all.enumerate() {
                    quantize(level, x.row(first + i), wanted, codes, scales);
                }
                take_apart(level, codes, apart);
            },
        );
        Self { buffers, wanted, cells }
    }

    /// Terms of each integer.
    pub(super) fn terms(&self) -> usize {
        self.wanted.terms
    }

    /// Blocks of 32 values in a row.
    #[inline(always)]
    pub(super) fn cells(&self) -> usize {
        self.cells
    }

    /// The codes of a row, `[width / 32, terms]`.
    #[inline(always)]
    pub(super) fn codes(&self, row: usize) -> &[[i8; BLOCK]] {
        let of_row = self.cells * self.wanted.terms;
        &self.buffers.codes[row * of_row..][..of_row]
    }

    /// The same taken apart; empty where nobody takes them so.
    #[inline(always)]
    pub(super) fn apart(&self, row: usize) -> &[Apart] {
        let of_row = if self.wanted.apart { self.cells * self.wanted.terms } else { 0 };
        &self.buffers.apart[row * of_row..][..of_row]
    }

    /// The scales of a row, `[width / 32]`.
    #[inline(always)]
    pub(super) fn scales(&self, row: usize) -> &[OfBlock] {
        &self.buffers.scales[row * self.cells..][..self.cells]
    }
}

/// One operand of a product, of what [`Activations::codes`] and [`Activations::apart`] give.
#[inline(always)]
pub(super) fn operand<'a>(codes: &'a [[i8; BLOCK]], apart: &'a [Apart], i: usize) -> Operand<'a> {
    // Where nobody takes them apart, there is nothing to give.
    Operand { all: &codes[i], apart: apart.get(i).unwrap_or(const { &Apart::ZERO }) }
}

dispatch_int8! {
    fn quantize = quantize_body(x: &[f32], wanted: Wanted, codes: &mut [[i8; BLOCK]], scales: &mut [OfBlock])
}

#[inline(always)]
fn quantize_body<S: Int8>(
    _simd: S,
    x: &[f32],
    wanted: Wanted,
    codes: &mut [[i8; BLOCK]],
    scales: &mut [OfBlock],
) {
    let x = x.as_chunks::<BLOCK>().0;
    if wanted.terms == 1 {
        for ((x, codes), scale) in x.iter().zip(codes).zip(scales) {
            let (of_block, sums) = quantize_block(x, 127.0, codes, None);
            *scale = described(of_block, sums, wanted);
        }
    } else {
        for ((x, codes), scale) in x.iter().zip(codes.as_chunks_mut::<2>().0).zip(scales) {
            let [high, low] = codes;
            let (of_block, sums) = quantize_block(x, (TERM * 127) as f32, high, Some(low));
            *scale = described(of_block, sums, wanted);
        }
    }
}

/// What weights need of a block, from the sums of its halves.
#[inline(always)]
fn described(scale: f32, [a, b]: [i32; 2], wanted: Wanted) -> OfBlock {
    let sums = if wanted.groups == 1 { [a + b, 0] } else { [a, b] };
    let first = sums.map(|sum| -wanted.offset * sum);
    OfBlock { scale, first, sums: sums.map(|sum| scale * sum as f32) }
}

dispatch_int8! { fn take_apart = take_apart_body(codes: &[[i8; BLOCK]], apart: &mut [Apart]) }

#[inline(always)]
fn take_apart_body<S: Int8>(_simd: S, codes: &[[i8; BLOCK]], apart: &mut [Apart]) {
    for (apart, codes) in apart.iter_mut().zip(codes) {
        *apart = Apart::of(codes);
    }
}

/// Rounds |x| < 2^22 to the nearest integer, ties to even, where it is added and taken away.
const ROUND: f32 = 12_582_912.0;

/// Integers up to `most` of one term, or of two where there is a `low`: the scale, and the sums of both halves.
/// Plain loops, which the compiler makes vectors of.
#[inline(always)]
fn quantize_block(
    x: &[f32; BLOCK],
    most: f32,
    high: &mut [i8; BLOCK],
    mut low: Option<&mut [i8; BLOCK]>,
) -> (f32, [i32; 2]) {
    // Of zeros, and where there is no scale: what was in the memory before is not read.
    let mut clear = || {
        high.fill(0);
        if let Some(low) = &mut low {
            low.fill(0);
        }
    };
    // Without their sign, bits of floats are in the order of the floats; those of NaN come last.
    let mut largest = 0;
    for x in x {
        largest = largest.max(x.to_bits().cast_signed() & i32::MAX);
    }
    let largest = f32::from_bits(largest.cast_unsigned());
    if !largest.is_finite() {
        clear();
        return (f32::NAN, [0; 2]);
    }
    let inverse = most / largest;
    if !inverse.is_finite() {
        // Zeros, or too small for their inverse.
        clear();
        return (0.0, [0; 2]);
    }
    let mut integers = [0; BLOCK];
    for i in 0..BLOCK {
        integers[i] =
            (x[i] * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
    }
    let mut sums = [0; 2];
    for half in 0..2 {
        for i in half * 16..half * 16 + 16 {
            sums[half] += integers[i];
        }
    }
    match low {
        None => {
            for i in 0..BLOCK {
                high[i] = integers[i] as i8;
            }
        }
        Some(low) => {
            for i in 0..BLOCK {
                // |integer / 254| has its nearest integer in reach of an i8, and leaves at most 127.
                let nearest = integers[i] as f32 * (1.0 / TERM as f32) + ROUND;
                let nearest = nearest.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
                high[i] = nearest as i8;
                low[i] = (integers[i] - TERM * nearest) as i8;
            }
        }
    }
    (largest / most, sums)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    const SIGNED: Wanted = Wanted { terms: 1, groups: 2, offset: 3, apart: true };

    #[test]
    fn codes_are_within_half_a_step_on_every_instruction_set() {
        let mut rng = Rng::new(40);
        for (level, terms) in Level::present().iter().flat_map(|level| [(*level, 1), (*level, 2)]) {
            let (smallest, half) = if terms == 1 { (1e-36, 0.5001) } else { (1e-33, 0.505) };
            for size in [smallest, 1e-30, 1.0, 3e38] {
                let x: Vec<f32> = rng.floats(3 * 64).iter().map(|x| x * size).collect();
                let quantized =
                    Activations::new(level, Rows::dense(&x, 64), Wanted { terms, ..SIGNED });
                let most = if terms == 1 { 127.0 } else { 254.0 * 127.0 };
                for (m, row) in x.chunks_exact(64).enumerate() {
                    for (k, x) in row.chunks_exact(BLOCK).enumerate() {
                        let scale = quantized.scales(m)[k];
                        let largest = x.iter().fold(0.0f32, |l, x| l.max(x.abs()));
                        assert_eq!(scale.scale, largest / most);
                        let step = f64::from(scale.scale);
                        let codes = &quantized.codes(m)[k * terms..][..terms];
                        let integer = |i: usize| {
                            let code = |t: usize| i32::from(codes[t][i]);
                            if terms == 1 { code(0) } else { TERM * code(0) + code(1) }
                        };
                        for (i, x) in x.iter().enumerate() {
                            let error = (f64::from(*x) - step * f64::from(integer(i))).abs();
                            assert!(error <= step * half, "{x} is not {} * {step}", integer(i));
                            assert!(codes.iter().all(|codes| codes[i] > -128));
                        }
                        for g in 0..2 {
                            let sum: i32 = (16 * g..16 * g + 16).map(integer).sum();
                            assert_eq!(scale.first[g], -3 * sum);
                            assert_eq!(scale.sums[g], scale.scale * sum as f32);
                        }
                        for (t, codes) in codes.iter().enumerate() {
                            let apart = &quantized.apart(m)[k * terms + t];
                            let mut negative = 0;
                            for (i, &code) in codes.iter().enumerate() {
                                assert_eq!(apart.sizes[i], code.abs());
                                assert_eq!(apart.signs[i], if code < 0 { -1 } else { 0 });
                                negative += i32::from(code.min(0)).abs();
                            }
                            assert_eq!(apart.negative, negative);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn zeros_have_a_scale_of_zero_and_numbers_without_end_none() {
        for &level in Level::present() {
            for terms in [1, 2] {
                let mut x = [0.0; 96];
                x[40] = f32::NAN;
                x[95] = f32::NEG_INFINITY;
                let wanted = Wanted { terms, groups: 1, offset: 0, apart: false };
                let quantized = Activations::new(level, Rows::dense(&x, 96), wanted);
                let scales = quantized.scales(0);
                assert_eq!(scales[0].scale, 0.0);
                assert!(scales[1].scale.is_nan() && scales[2].scale.is_nan());
            }
        }
    }
}
