//! The heart of a quantized product: some rows of activations by some times sixteen outputs, all along `k`.
//!
//! ```text
//! acc[r, n] = sum over groups of 16 or 32 k:   scale_x * scale_w * (sum of x * q) - scale_x * (sum of x) * min_w
//! ```
//!
//! One function has every sum of floats, so an output has the same bits in a tile of any shape, whether its
//! weights come from a [`Panel`](super::unpack::Panel) or straight from where they are packed.

use super::activations::{Activations, operand};
use super::packed::{LANES, Layout};
use crate::simd::int8::{Int8, Steps};

/// What a tile needs to know of a format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kind {
    /// Bits of a code; 8 where it is signed.
    pub bits: u32,
    /// Groups of 32 `k`, 1 or 2.
    pub groups: usize,
    /// Whether something is subtracted.
    pub has_min: bool,
}

impl Kind {
    pub(super) const fn of(layout: Layout) -> Self {
        let bits = if layout.is_signed() { 8 } else { layout.scheme.bits };
        Self { bits, groups: layout.groups(), has_min: layout.scheme.has_min }
    }
}

/// Weights of some times sixteen outputs, 32 `k` after 32 `k`.
pub(super) trait Cells<S: Int8> {
    type Cell: Cell<S>;
    /// `k` in `32 c..32 c + 32`.
    fn cell(&self, simd: S, c: usize) -> Self::Cell;
}

/// The weights of 32 `k`: codes, and what turns sums of products into floats.
pub(super) trait Cell<S: Int8>: Steps<S> {
    /// What group `g` of outputs `16 v..` is multiplied with.
    fn scale(&self, simd: S, v: usize, g: usize) -> S::F;
    /// Minus what is subtracted from it.
    fn min(&self, simd: S, v: usize, g: usize) -> S::F;
}

/// Sums of sixteen outputs, on a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Sums(pub [f32; LANES]);

impl Sums {
    pub(super) const ZERO: Self = Self([0.0; LANES]);
}

/// The products of rows `first..first + R` of `x` with `V` times sixteen outputs. `T` is the rows, or twice the rows
/// where integers have two terms.
#[inline(always)]
pub(super) fn tile<S: Int8, C: Cells<S>, const V: usize, const R: usize, const T: usize>(
    simd: S,
    kind: Kind,
    cells: &C,
    x: &Activations,
    first: usize,
) -> [[Sums; R]; V] {
    const { assert!(T == R || T == 2 * R, "one term or two") };
    let terms = T / R;
    // Each row's codes, `[cells, terms]`, and scales, `[cells]`.
    let (mut codes, mut apart) = ([x.codes(first); R], [x.apart(first); R]);
    let mut scales = [x.scales(first); R];
    for r in 1..R {
        codes[r] = x.codes(first + r);
        apart[r] = x.apart(first + r);
        scales[r] = x.scales(first + r);
    }
    let count = x.cells();
    for r in 0..R {
        codes[r] = &codes[r][..count * terms];
        scales[r] = &scales[r][..count];
    }
    let mut acc = [[simd.splat(0.0); R]; V];
    for c in 0..count {
        let cell = cells.cell(simd, c);
        // High terms of all rows, then low ones; sums of the last term begin with what the offset of codes takes.
        let mut operands = [operand(codes[0], apart[0], c * terms); T];
        for t in 1..T {
            operands[t] = operand(codes[t % R], apart[t % R], c * terms + t / R);
        }
        for g in 0..kind.groups {
            let mut begin = [0; T];
            for r in 0..R {
                begin[T - R + r] = scales[r][c].first[g];
            }
            // Integers: V x T sums of 16 or 32 products, exact.
            let sums: [[S::Sums; T]; V] = if kind.groups == 1 {
                simd.dot::<_, 8, V, T>(kind.bits, &cell, 0, operands, begin)
            } else {
                simd.dot::<_, 4, V, T>(kind.bits, &cell, 4 * g, operands, begin)
            };
            // Floats, in the order of k.
            for v in 0..V {
                let of_group = cell.scale(simd, v, g);
                for r in 0..R {
                    let sum =
                        if T > R { simd.join(sums[v][r], sums[v][T - R + r]) } else { sums[v][r] };
                    let scale = simd.mul(of_group, simd.splat(scales[r][c].scale));
                    acc[v][r] = simd.mul_add(simd.to_float(sum), scale, acc[v][r]);
                }
                if kind.has_min {
                    let min = cell.min(simd, v, g);
                    for r in 0..R {
                        let sum = simd.splat(scales[r][c].sums[g]);
                        acc[v][r] = simd.mul_add(min, sum, acc[v][r]);
                    }
                }
            }
        }
    }
    let mut out = [[Sums::ZERO; R]; V];
    for v in 0..V {
        for r in 0..R {
            simd.store_float(acc[v][r], &mut out[v][r].0);
        }
    }
    out
}
