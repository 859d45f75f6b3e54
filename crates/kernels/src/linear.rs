//! Dense product `x · Wᵀ` with weights `[out, in]` in the type they are stored in.
//!
//! ```text
//! out[t, n] += sum over k of x[t, k] * w[n, k]
//! ```
//!
//! Rows of `x` and of `w` are both contiguous along `k`, so a vector holds neighbouring `k` and each
//! output owns one vector accumulator. What differs from the plain loop, and why:
//!
//! 1. A tile of 3 x 4 outputs runs together: 12 accumulators hide the latency of the multiply-add,
//!    and 7 loads feed 12 of them. With the registers of AVX-512 it has up to 6 x 4.
//! 2. Long rows are cut along `k` in equal pieces, so that the rows of a tile stay in the first-level cache.
//! 3. With few rows of `x`, weights are read where they lie, once, and 16-bit ones widened in registers; the
//!    four rows of a tile lie far apart, so that memory sees four long streams, not many short ones.
//! 4. With many rows, the weights of a block of outputs are laid out once, as f32, in a panel that
//!    stays in the second-level cache.
//! 5. Blocks of outputs run in parallel.
//!
//! The order in which an output is summed depends on the width of `x` and the instruction set alone:
//! neither on the number of rows nor of threads. A row gives the same bits alone and in any batch.

use std::array;

use crate::products::{Matrix, Product, products};
use crate::rows::Rows;
use crate::simd::{Level, Simd, dispatch};

/// A weight matrix `[out, in]`, row-major, in its stored type.
#[derive(Debug, Clone, Copy)]
pub enum Weights<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// Bits of bfloat16 values.
    Bf16(&'a [u16]),
    /// Bits of IEEE half-precision values.
    F16(&'a [u16]),
}

impl<'a> Weights<'a> {
    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(w) => w.len(),
            Self::Bf16(w) | Self::F16(w) => w.len(),
        }
    }

    /// Whether there is no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes elements `first..` of the matrix as f32 until `to` is full.
    ///
    /// # Panics
    ///
    /// If there are fewer elements than that.
    pub fn widen(&self, first: usize, to: &mut [f32]) {
        match self {
            Self::F32(w) => to.copy_from_slice(&w[first..][..to.len()]),
            Self::Bf16(w) => {
                let from = &w[first..][..to.len()];
                for (to, &bits) in to.iter_mut().zip(from) {
                    *to = f32::from_bits(u32::from(bits) << 16);
                }
            }
            Self::F16(w) => {
                let from = &w[first..][..to.len()];
                for (to, &bits) in to.iter_mut().zip(from) {
                    *to = half::f16::from_bits(bits).to_f32();
                }
            }
        }
    }

    /// Bytes of an element.
    pub(crate) fn size(&self) -> usize {
        match self {
            Self::F32(_) => 4,
            Self::Bf16(_) | Self::F16(_) => 2,
        }
    }

    fn rows(&self, first: usize, count: usize, width: usize) -> Weights<'a> {
        let range = first * width..(first + count) * width;
        match self {
            Self::F32(w) => Weights::F32(&w[range]),
            Self::Bf16(w) => Weights::Bf16(&w[range]),
            Self::F16(w) => Weights::F16(&w[range]),
        }
    }
}

/// Most outputs of a parallel task: their weights fit the second-level cache as f32.
pub(crate) const OUT_BLOCK: usize = 64;
/// Most elements of a row that a tile runs through at once.
const K_BLOCK: usize = 1024;
/// The length at which rows of `width` are cut: equal pieces of whole cache lines.
fn k_block(width: usize) -> usize {
    width.div_ceil(width.div_ceil(K_BLOCK)).next_multiple_of(16)
}

/// Lanes of the widest instruction set.
const MAX_LANES: usize = 16;
/// Most rows of a tile.
const HEIGHT: usize = 6;
/// Up to this many rows, weights are read in place; with more, a panel pays.
const FEW_ROWS: usize = 32;

/// Adds `x · wᵀ` to `out`.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `x` | `[rows, in]` | activations |
/// | `w` | `[out, in]` | weights |
/// | `out` | `[rows, out]` | added to: zeros, a bias or a residual before the call |
///
/// ```
/// use boostr_kernels::{Level, Rows, Weights, linear};
/// let mut out = [0.0; 2];
/// let (x, w) = (Rows::dense(&[1.0, 2.0], 2), Weights::F32(&[3.0, 4.0, 5.0, 6.0]));
/// linear(Level::detect(), x, w, &mut out);
/// assert_eq!(out, [11.0, 17.0]);
/// ```
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn linear(level: Level, x: Rows<'_>, w: Weights<'_>, out: &mut [f32]) {
    products(level, vec![Product { x, w: Matrix::Floats(w), out }]);
}

/// What is made of the rows of a product before its tasks.
pub(crate) fn prepare(x: Rows<'_>) -> Option<Vec<f32>> {
    let (rows, width) = (x.len(), x.width());
    // Beside a panel, rows of `x` too are made whole chunks, which no real model needs.
    let padded = width.next_multiple_of(MAX_LANES);
    if rows <= FEW_ROWS || padded == width {
        return None;
    }
    // Zeros at the end of each row add nothing to a sum.
    let mut copy = vec![0.0; rows * padded];
    for (i, row) in copy.chunks_exact_mut(padded).enumerate() {
        row[..width].copy_from_slice(x.row(i));
    }
    Some(copy)
}

/// Adds the products with features `first..` of `w` `[out, width]`, as many as rows of `out` are long, at most
/// [`OUT_BLOCK`]; `prepared` is of [`prepare`], and `panel` is kept from task to task.
pub(crate) fn task(
    level: Level,
    x: Rows<'_>,
    prepared: Option<&[f32]>,
    w: Weights<'_>,
    first: usize,
    out: &mut [&mut [f32]],
    panel: &mut Vec<f32>,
) {
    let (rows, width) = (x.len(), x.width());
    let w = w.rows(first, out[0].len(), width);
    if rows <= FEW_ROWS {
        in_place(level, x, w, out);
    } else {
        let x = prepared.map_or(x, |copy| Rows::dense(copy, copy.len() / rows));
        in_panels(level, x, w, width, out, panel);
    }
}

/// `x · wᵀ` of few features in one task, added to pieces of rows: for products inside other kernels.
pub(crate) fn linear_rows(level: Level, x: Rows<'_>, w: Weights<'_>, out: &mut [&mut [f32]]) {
    for (i, out) in out.chunks_mut(FEW_ROWS).enumerate() {
        in_place(level, x.slice(i * FEW_ROWS, out.len()), w, out);
    }
}

dispatch! { fn in_place = in_place_body(x: Rows<'_>, w: Weights<'_>, out: &mut [&mut [f32]]) }

#[inline(always)]
fn in_place_body<S: Simd>(simd: S, x: Rows<'_>, w: Weights<'_>, out: &mut [&mut [f32]]) {
    match w {
        Weights::F32(w) => in_place_stored::<S, F32>(simd, x, w, out),
        Weights::Bf16(w) => in_place_stored::<S, Bf16>(simd, x, w, out),
        Weights::F16(w) => in_place_stored::<S, F16>(simd, x, w, out),
    }
}

/// Runs along each row of weights to its end before the next, four rows a quarter of the block apart:
/// four long streams, which the processor fetches ahead of their use.
#[inline(always)]
fn in_place_stored<S: Simd, W: Stored<S>>(
    simd: S,
    x: Rows<'_>,
    w: &[W::Elem],
    out: &mut [&mut [f32]],
) {
    let width = x.width();
    let features = out[0].len();
    let quarter = features / 4;
    let k_block = k_block(width);
    for n in 0..quarter {
        for k in (0..width).step_by(k_block) {
            let len = k_block.min(width - k);
            // Four rows of weights a quarter of the block apart, the same k of each.
            let w = |i: usize| &w[(n + i * quarter) * width + k..][..len];
            let w = [w(0), w(1), w(2), w(3)];
            // All rows of x pass them, a tile after the other: the first brings them from memory.
            // Beside 12 sums, sixteen registers do not hold what widening needs.
            let height = match S::LANES {
                MAX_LANES => HEIGHT,
                _ if W::WIDENED => 2,
                _ => 3,
            };
            for (i, out) in out.chunks_mut(height).enumerate() {
                let x = |m: usize| &x.row(height * i + m)[k..][..len];
                // A tile of `rows` x 4 outputs over at most 1024 k.
                let mut sums = [[0.0; 4]; HEIGHT];
                match out.len() {
                    1 => sums[..1].copy_from_slice(&tile::<S, W, 1, 4>(simd, array::from_fn(x), w)),
                    2 => sums[..2].copy_from_slice(&tile::<S, W, 2, 4>(simd, array::from_fn(x), w)),
                    3 => sums[..3].copy_from_slice(&tile::<S, W, 3, 4>(simd, array::from_fn(x), w)),
                    _ if S::LANES < MAX_LANES => unreachable!("a tile of more than three rows"),
                    4 => sums[..4].copy_from_slice(&tile::<S, W, 4, 4>(simd, array::from_fn(x), w)),
                    5 => sums[..5].copy_from_slice(&tile::<S, W, 5, 4>(simd, array::from_fn(x), w)),
                    _ => sums = tile::<S, W, HEIGHT, 4>(simd, array::from_fn(x), w),
                }
                // Sums of this piece of k are added to the output, so pieces come in order.
                for (out, sums) in out.iter_mut().zip(sums) {
                    for (i, sum) in sums.into_iter().enumerate() {
                        out[n + i * quarter] += sum;
                    }
                }
            }
        }
    }
    // Up to three outputs that make no four.
    for n in 4 * quarter..features {
        for k in (0..width).step_by(k_block) {
            let len = k_block.min(width - k);
            for (m, out) in out.iter_mut().enumerate() {
                let (x, w) = (&x.row(m)[k..][..len], &w[n * width + k..][..len]);
                out[n] += tile::<S, W, 1, 1>(simd, [x], [w])[0][0];
            }
        }
    }
}

dispatch! {
    fn in_panels = in_panels_body(
        x: Rows<'_>, w: Weights<'_>, width: usize, out: &mut [&mut [f32]], panel: &mut Vec<f32>,
    )
}

#[inline(always)]
fn in_panels_body<S: Simd>(
    simd: S,
    x: Rows<'_>,
    w: Weights<'_>,
    width: usize,
    out: &mut [&mut [f32]],
    panel: &mut Vec<f32>,
) {
    match w {
        Weights::F32(w) => in_panels_stored::<S, F32>(simd, x, w, width, out, panel),
        Weights::Bf16(w) => in_panels_stored::<S, Bf16>(simd, x, w, width, out, panel),
        Weights::F16(w) => in_panels_stored::<S, F16>(simd, x, w, width, out, panel),
    }
}

#[inline(always)]
fn in_panels_stored<S: Simd, W: Stored<S>>(
    simd: S,
    x: Rows<'_>,
    w: &[W::Elem],
    width: usize,
    out: &mut [&mut [f32]],
    panel: &mut Vec<f32>,
) {
    let features = out[0].len();
    let k_block = k_block(width);
    panel.resize(OUT_BLOCK * k_block, 0.0);
    for k in (0..width).step_by(k_block) {
        // Weights `[features, k_block]` become f32, and zeros fill rows up to whole vectors.
        let (len, stored) = (k_block.min(x.width() - k), k_block.min(width - k));
        for (n, row) in panel.chunks_exact_mut(k_block).take(features).enumerate() {
            let row = S::chunks_mut(&mut row[..len]).0;
            let (whole, rest) = W::chunks(&w[n * width + k..][..stored]);
            for (from, to) in whole.iter().zip(&mut *row) {
                simd.store(W::load(simd, from), to);
            }
            row[whole.len()..].fill(S::ZERO);
            if !rest.is_empty() {
                simd.store(W::load_tail(simd, rest), &mut row[whole.len()]);
            }
        }
        let w = |n: usize| &panel[n * k_block..][..len];
        let x = |m: usize| &x.row(m)[k..][..len];
        // Every three rows of x pass all outputs of the panel, four at a time.
        for (i, out) in out.chunks_mut(3).enumerate() {
            let m = i * 3;
            for n in (0..features).step_by(4) {
                // The last one to three outputs.
                if n + 4 > features {
                    for n in n..features {
                        for (i, out) in out.iter_mut().enumerate() {
                            out[n] += tile::<S, Panel, 1, 1>(simd, [x(m + i)], [w(n)])[0][0];
                        }
                    }
                    continue;
                }
                let w = [w(n), w(n + 1), w(n + 2), w(n + 3)];
                // A full tile is 3 x 4; the last one or two rows go one by one, with the same sums.
                if let [a, b, c] = out {
                    let sums = tile::<S, Panel, 3, 4>(simd, [x(m), x(m + 1), x(m + 2)], w);
                    add_four(&mut a[n..], sums[0]);
                    add_four(&mut b[n..], sums[1]);
                    add_four(&mut c[n..], sums[2]);
                } else {
                    for (i, out) in out.iter_mut().enumerate() {
                        add_four(&mut out[n..], tile::<S, Panel, 1, 4>(simd, [x(m + i)], w)[0]);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn add_four(out: &mut [f32], sums: [f32; 4]) {
    for (out, sum) in out[..4].iter_mut().zip(sums) {
        *out += sum;
    }
}

/// The products of `M` rows of `x` and `N <= 4` of `w`, all of one length; only `N` of each four count.
#[inline(always)]
fn tile<S: Simd, W: Stored<S>, const M: usize, const N: usize>(
    simd: S,
    x: [&[f32]; M],
    w: [&[W::Elem]; N],
) -> [[f32; 4]; M] {
    let len = x[0].len();
    let whole = len / S::LANES;
    // All rows as whole vectors, of one length that the compiler knows: no checks in the loop.
    let mut xs: [&[S::Chunk]; M] = [&[]; M];
    for m in 0..M {
        xs[m] = &S::chunks(x[m]).0[..whole];
    }
    let mut ws: [&[W::Chunk]; N] = [&[]; N];
    for n in 0..N {
        ws[n] = &W::chunks(w[n]).0[..whole];
    }
    // M x N accumulators, each a vector of neighbouring k; M + N loads feed M N multiply-adds.
    let mut acc = [[simd.splat(0.0); 4]; M];
    for i in 0..whole {
        let mut x = [simd.splat(0.0); M];
        for m in 0..M {
            x[m] = simd.load(&xs[m][i]);
        }
        for n in 0..N {
            let w = W::load(simd, &ws[n][i]);
            for m in 0..M {
                acc[m][n] = simd.mul_add(x[m], w, acc[m][n]);
            }
        }
    }
    // What is left of k is filled up with zeros, unless rows are whole vectors already.
    if W::PADDED {
        debug_assert_eq!(whole * S::LANES, len);
    } else if whole * S::LANES < len {
        for n in 0..N {
            let w = W::load_tail(simd, W::chunks(w[n]).1);
            for m in 0..M {
                let x = simd.load(&S::tail(S::chunks(x[m]).1));
                acc[m][n] = simd.mul_add(x, w, acc[m][n]);
            }
        }
    }
    // Only here are lanes added, four outputs at once.
    let mut sums = [[0.0; 4]; M];
    for m in 0..M {
        sums[m] = simd.reduce4(acc[m]);
    }
    sums
}

/// How a stored type becomes vectors of f32.
trait Stored<S: Simd> {
    /// Whether rows are known to be whole chunks.
    const PADDED: bool = false;
    /// Whether elements are not f32.
    const WIDENED: bool = false;
    type Elem;
    type Chunk;
    fn chunks(w: &[Self::Elem]) -> (&[Self::Chunk], &[Self::Elem]);
    fn load(simd: S, w: &Self::Chunk) -> S::F;
    fn load_tail(simd: S, w: &[Self::Elem]) -> S::F;
}

struct F32;
/// f32 in rows of whole chunks.
struct Panel;
struct Bf16;
struct F16;

macro_rules! stored_f32 {
    ($name:ident, $padded:literal) => {
        impl<S: Simd> Stored<S> for $name {
            const PADDED: bool = $padded;
            type Elem = f32;
            type Chunk = S::Chunk;
            #[inline(always)]
            fn chunks(w: &[f32]) -> (&[S::Chunk], &[f32]) {
                S::chunks(w)
            }
            #[inline(always)]
            fn load(simd: S, w: &S::Chunk) -> S::F {
                simd.load(w)
            }
            #[inline(always)]
            fn load_tail(simd: S, w: &[f32]) -> S::F {
                simd.load(&S::tail(w))
            }
        }
    };
}
stored_f32!(F32, false);
stored_f32!(Panel, true);

macro_rules! stored_half {
    ($name:ident, $load:ident) => {
        impl<S: Simd> Stored<S> for $name {
            const WIDENED: bool = true;
            type Elem = u16;
            type Chunk = S::Half;
            #[inline(always)]
            fn chunks(w: &[u16]) -> (&[S::Half], &[u16]) {
                S::halves(w)
            }
            #[inline(always)]
            fn load(simd: S, w: &S::Half) -> S::F {
                simd.$load(w)
            }
            #[inline(always)]
            fn load_tail(simd: S, w: &[u16]) -> S::F {
                simd.$load(&S::tail_half(w))
            }
        }
    };
}
stored_half!(Bf16, load_bf16);
stored_half!(F16, load_f16);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, close};

    const SIZES: [usize; 10] = [1, 2, 3, 7, 16, 17, 33, 65, 130, 1031];

    fn reference(x: &[f32], w: &[f32], out: &[f32], width: usize) -> Vec<f64> {
        let features = w.len() / width;
        (0..out.len())
            .map(|i| {
                let (t, n) = (i / features, i % features);
                let (x, w) = (&x[t * width..][..width], &w[n * width..][..width]);
                let terms = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
                f64::from(out[i]) + terms.sum::<f64>()
            })
            .collect()
    }

    fn stored(w: &[f32], kind: usize) -> (Vec<u16>, Vec<f32>) {
        let bits: Vec<u16> = match kind {
            1 => w.iter().map(|w| half::bf16::from_f32(*w).to_bits()).collect(),
            _ => w.iter().map(|w| half::f16::from_f32(*w).to_bits()).collect(),
        };
        let mut exact = vec![0.0; w.len()];
        weights(&[], &bits, kind).widen(0, &mut exact);
        (bits, exact)
    }

    fn weights<'a>(w: &'a [f32], bits: &'a [u16], kind: usize) -> Weights<'a> {
        match kind {
            0 => Weights::F32(w),
            1 => Weights::Bf16(bits),
            _ => Weights::F16(bits),
        }
    }

    #[test]
    fn equals_the_definition_for_any_sizes_and_types_on_every_instruction_set() {
        let mut rng = Rng::new(5);
        for (i, &width) in SIZES.iter().enumerate() {
            for features in [1, 3, 4, 66, 131] {
                let rows = SIZES[(i * 3 + features) % 8];
                let x = rng.floats(rows * width);
                let w = rng.floats(features * width);
                let before = rng.floats(rows * features);
                for kind in 0..3 {
                    let (bits, exact) =
                        if kind == 0 { (vec![], w.clone()) } else { stored(&w, kind) };
                    let want = reference(&x, &exact, &before, width);
                    for &level in Level::present() {
                        let mut out = before.clone();
                        linear(level, Rows::dense(&x, width), weights(&w, &bits, kind), &mut out);
                        close(&out, &want, 2e-6 * (width as f64).sqrt());
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_any_batch() {
        let mut rng = Rng::new(6);
        for width in [5, 48, 500, 1031, 2100] {
            let (rows, features) = (2 * FEW_ROWS + 5, 70);
            let (x, w) = (rng.floats(rows * width), rng.floats(features * width));
            for kind in 0..3 {
                let bits = if kind == 0 { vec![] } else { stored(&w, kind).0 };
                for &level in Level::present() {
                    let run = |first: usize, count: usize| {
                        let x = Rows::dense(&x, width).slice(first, count);
                        let mut out = vec![0.5; count * features];
                        linear(level, x, weights(&w, &bits, kind), &mut out);
                        out
                    };
                    let whole = run(0, rows);
                    for count in [1, 2, 3, 4, 5, 6, 7, 11, FEW_ROWS, FEW_ROWS + 1] {
                        for first in (0..=rows - count).step_by(5) {
                            let want = &whole[first * features..(first + count) * features];
                            assert_eq!(run(first, count), want, "{count} rows at {first}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let mut rng = Rng::new(7);
        let (x, w) = (rng.floats(9 * 100), rng.floats(300 * 100));
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut out = vec![0.0; 9 * 300];
            let (x, w) = (Rows::dense(&x, 100), Weights::F32(&w));
            pool.install(|| linear(Level::detect(), x, w, &mut out));
            out
        };
        let one = with(1);
        assert_eq!(with(2), one);
        assert_eq!(with(5), one);
    }

    #[test]
    fn every_half_widens_as_the_half_crate_does() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let mut got = vec![0.0; 1 << 16];
        for &level in Level::present() {
            // Widened in registers: a product with ones of width 1.
            for (kind, want) in [
                (1, all.iter().map(|b| half::bf16::from_bits(*b).to_f32()).collect::<Vec<_>>()),
                (2, all.iter().map(|b| half::f16::from_bits(*b).to_f32()).collect::<Vec<_>>()),
            ] {
                got.fill(0.0);
                linear(level, Rows::dense(&[1.0], 1), weights(&[], &all, kind), &mut got);
                for (got, want) in got.iter().zip(want) {
                    assert!(*got == want || (got.is_nan() && want.is_nan()), "{got} != {want}");
                }
            }
        }
    }
}
