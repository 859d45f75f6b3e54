//! Product `x · Wᵀ` with quantized weights: integers inside a group, floats between groups.
//!
//! ```text
//! out[t, n] += sum over k of x[t, k] * w[n, k]
//!           ~= sum over groups of 16 or 32 k:   xs * d * scale * (sum of xq * q) - xs * m * min * (sum of xq)
//! ```
//!
//! with `x ~= xs * xq` of [`activations`](super::activations) and `w = d * scale * q - m * min` of the format.
//! What differs from the plain loop, and why:
//!
//! 1. Weights are read as [`Packed`] lays them out, sixteen outputs to a vector.
//! 2. Few rows read them as they are packed, and unpack them in registers. Several groups of sixteen outputs,
//!    each of another part of the task, take turns, so that memory sees long streams, and share loads of rows.
//! 3. For many rows, a panel of weights is unpacked once, to bytes and floats that stay in the first two
//!    caches, and multiplied with some rows at a time ([`tile`](super::tile)): sums stay in registers.
//! 4. Sums over a group are exact in integers: where codes have an offset, or are moved to be unsigned, sums
//!    begin with what the activations make up for it. AVX2 multiplies signed codes with the sizes of the
//!    activations and takes their signs into the codes.
//! 5. Blocks of outputs run in parallel ([`products`]).
//!
//! An output has its floats added in the order of `k`, whatever the number of rows or threads: a row
//! gives the same bits alone and in any batch.
//!
//! # Error
//!
//! Against the product with decoded weights, from the rounding of activations, in each 32 k
//!
//! ```text
//! |error| <= max |x| / 254 * sum of |w|                    one term
//! |error| <= max |x| / (2 * 254 * 127) * sum of |w|        two terms
//! ```
//!
//! and from the rounding of f32, (2 * groups + 8) * 2^-24 of the sum of |x| (|d * scale * q| + |m * min|)
//! over the row. Values of `x` below 127 / `f32::MAX` count as zeros where all their block are (254 times that
//! with two terms).

pub(crate) use super::activations::Activations;
use super::activations::Wanted;
use super::packed::{LANES, Layout, Packed, Packing, with_packing};
use super::tile::{Cells, Kind, Sums, tile};
pub(crate) use super::unpack::Panel;
use super::unpack::{Records, Unpacked, unpack};
use super::{Format, Values, formats, if_multiplied};
use crate::products::{Matrix, Product, products};
use crate::rows::Rows;
use crate::simd::Level;
use crate::simd::int8::{Int8, dispatch_int8};

/// Up to so many rows read weights as they are packed.
const FEW_ROWS: usize = 8;

/// Adds `x · wᵀ` to `out`.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `x` | `[rows, in]` | activations, each 32 rounded to 8 bits |
/// | `w` | `[out, in]` | weights |
/// | `out` | `[rows, out]` | added to: zeros, a bias or a residual before the call |
///
/// An output is NaN if an `x` of its row is not finite.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn linear_quantized(level: Level, x: Rows<'_>, w: &Packed, out: &mut [f32]) {
    products(level, vec![Product { x, w: Matrix::Quantized(w), out }]);
}

/// As [`linear_quantized`], with activations in two terms of 8 bits: nearly 16, for what amplifies rounding.
///
/// Both terms meet a weight at once, so that it is read and unpacked once, and are joined in integers; a row has
/// the same bits in any company.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn linear_quantized_precise(level: Level, x: Rows<'_>, w: &Packed, out: &mut [f32]) {
    products(level, vec![Product { x, w: Matrix::Precise(w), out }]);
}

/// What is made of the rows of a product before its tasks: integers of `terms` terms, for all outputs.
pub(crate) fn prepare(level: Level, x: Rows<'_>, w: &Packed, terms: usize) -> Activations {
    let layout = Layout::of(w.format());
    let offset = match layout.scheme.values {
        Values::Offset(offset) => offset,
        Values::Signed | Values::Table(_) => level.signed_offset(),
    };
    let apart = layout.is_signed() && level.takes_apart();
    Activations::new(level, x, Wanted { terms, groups: layout.groups(), offset, apart })
}

/// Adds the products with features `first..`, a multiple of sixteen, as many as rows of `out` are long. `panel` is kept
/// from task to task.
pub(crate) fn task(
    level: Level,
    x: &Activations,
    w: &Packed,
    first: usize,
    out: &mut [&mut [f32]],
    panel: &mut Panel,
) {
    // The format is known to the compiler inside: one way to unpack for each format and level.
    with_packing!(w.format(), P => task_of::<P>(level, x, w, first, out, panel));
}

/// The product with features `first..`, as many as rows of `out` are long.
fn task_of<P: Packing>(
    level: Level,
    x: &Activations,
    w: &Packed,
    first: usize,
    out: &mut [&mut [f32]],
    panel: &mut Panel,
) {
    let groups = out[0].len().div_ceil(LANES);
    let records = w.groups(first / LANES, groups);
    if out.len() <= FEW_ROWS {
        few_rows::<P>(level, x, records, out);
        return;
    }
    let group = records.len() / groups;
    let outputs = if level.is_wide() { 2 } else { 1 };
    panel.reset(P::LAYOUT, x.cells(), outputs);
    for n in (0..groups).step_by(outputs) {
        for v in 0..outputs {
            // Where the last is alone, it stands in for the one that is missing.
            let records = &records[(n + v).min(groups - 1) * group..][..group];
            unpack::<P>(level, records, x.cells(), panel, v, outputs);
        }
        many_rows(level, Kind::of(P::LAYOUT), x, panel, n, out);
    }
}

dispatch_int8! {
    fn few_rows<P: Packing> = few_rows_body(x: &Activations, records: &[u8], out: &mut [&mut [f32]])
}

#[inline(always)]
fn few_rows_body<S: Int8, P: Packing>(
    simd: S,
    x: &Activations,
    records: &[u8],
    out: &mut [&mut [f32]],
) {
    if S::WIDE {
        in_turns::<S, P, 4>(simd, x, records, out);
    } else {
        in_turns::<S, P, 2>(simd, x, records, out);
    }
}

/// Cuts the groups of a task in `V` parts, and computes one group of each at a time: with one row, then with the
/// next, while they are in the cache.
#[inline(always)]
fn in_turns<S: Int8, P: Packing, const V: usize>(
    simd: S,
    x: &Activations,
    records: &[u8],
    out: &mut [&mut [f32]],
) {
    let groups = out[0].len().div_ceil(LANES);
    let group = records.len() / groups;
    let part = groups.div_ceil(V);
    for n in 0..part {
        // Where they do not come out even, the first stands in for those missing.
        let count = (groups - n).div_ceil(part);
        let mut streams = [&records[n * group..][..group]; V];
        for v in 1..count {
            streams[v] = &records[(n + v * part) * group..][..group];
        }
        let streams = Records::<P, V>::new(streams);
        let (kind, to) = (Kind::of(P::LAYOUT), (n, part));
        if x.terms() == 1 {
            let first = tiles::<S, _, V, 2, 2>(simd, kind, &streams, x, to, out, 0);
            tiles::<S, _, V, 1, 1>(simd, kind, &streams, x, to, out, first);
        } else {
            let first = tiles::<S, _, V, 2, 4>(simd, kind, &streams, x, to, out, 0);
            tiles::<S, _, V, 1, 2>(simd, kind, &streams, x, to, out, first);
        }
    }
}

/// Tiles of `R` rows from `first` on while there are so many, added to groups `n`, `n + part`, .. of sixteen outputs: the
/// first row that is left.
#[inline(always)]
fn tiles<S: Int8, C: Cells<S>, const V: usize, const R: usize, const T: usize>(
    simd: S,
    kind: Kind,
    cells: &C,
    x: &Activations,
    (n, part): (usize, usize),
    out: &mut [&mut [f32]],
    mut first: usize,
) -> usize {
    while out.len() - first >= R {
        let sums = tile::<S, C, V, R, T>(simd, kind, cells, x, first);
        for (v, sums) in sums.iter().enumerate() {
            for (r, sums) in sums.iter().enumerate() {
                add_sums(sums, &mut *out[first + r], n + v * part);
            }
        }
        first += R;
    }
    first
}

/// Adds sums of group `n` of sixteen outputs, as many as there are: none of a group that only stands in.
#[inline(always)]
fn add_sums(sums: &Sums, out: &mut [f32], n: usize) {
    let Some(out) = out.get_mut(n * LANES..) else { return };
    if let Some(out) = out.first_chunk_mut::<LANES>() {
        for lane in 0..LANES {
            out[lane] += sums.0[lane];
        }
    } else {
        for (out, sum) in out.iter_mut().zip(sums.0) {
            *out += sum;
        }
    }
}

dispatch_int8! {
    /// Adds the products of all rows with a panel to groups `n`.. of sixteen outputs.
    fn many_rows =
        many_rows_body(kind: Kind, x: &Activations, panel: &Panel, n: usize, out: &mut [&mut [f32]])
}

#[inline(always)]
fn many_rows_body<S: Int8>(
    simd: S,
    kind: Kind,
    x: &Activations,
    panel: &Panel,
    n: usize,
    out: &mut [&mut [f32]],
) {
    /// One instance for each kind that there is: what it says is known to the compiler inside.
    macro_rules! kinds {
        ($($bits:pat => $as:literal, $groups:literal, $has_min:literal;)*) => {
            match (kind.bits, kind.groups, kind.has_min) {
                $(($bits, $groups, $has_min) => {
                    let kind = Kind { bits: $as, groups: $groups, has_min: $has_min };
                    rows::<S, $groups>(simd, kind, x, panel, n, out);
                })*
                _ => unreachable!("{kind:?} is of no format"),
            }
        };
    }
    if S::COUNTS_BITS {
        kinds! {
            2..=4 => 4, 1, false;
            5 => 5, 1, false;
            8 => 8, 1, false;
            2..=4 => 4, 1, true;
            5 => 5, 1, true;
            2..=4 => 4, 2, false;
            6 => 6, 2, false;
            2..=4 => 4, 2, true;
        }
    } else {
        kinds! {
            _ => 8, 1, false;
            _ => 8, 1, true;
            _ => 8, 2, false;
            _ => 8, 2, true;
        }
    }
}

/// All rows, some at a time: as many as their sums leave registers for weights.
#[inline(always)]
fn rows<S: Int8, const G: usize>(
    simd: S,
    kind: Kind,
    x: &Activations,
    panel: &Panel,
    n: usize,
    out: &mut [&mut [f32]],
) {
    let to = (n, 1);
    if S::WIDE {
        let cells = Unpacked::<2, G>(panel);
        if x.terms() == 1 {
            let first = tiles::<S, _, 2, 6, 6>(simd, kind, &cells, x, to, out, 0);
            let first = tiles::<S, _, 2, 2, 2>(simd, kind, &cells, x, to, out, first);
            tiles::<S, _, 2, 1, 1>(simd, kind, &cells, x, to, out, first);
        } else {
            let first = tiles::<S, _, 2, 4, 8>(simd, kind, &cells, x, to, out, 0);
            let first = tiles::<S, _, 2, 2, 4>(simd, kind, &cells, x, to, out, first);
            tiles::<S, _, 2, 1, 2>(simd, kind, &cells, x, to, out, first);
        }
    } else {
        let cells = Unpacked::<1, G>(panel);
        if x.terms() == 1 {
            let first = tiles::<S, _, 1, 3, 3>(simd, kind, &cells, x, to, out, 0);
            tiles::<S, _, 1, 1, 1>(simd, kind, &cells, x, to, out, first);
        } else {
            let first = tiles::<S, _, 1, 2, 4>(simd, kind, &cells, x, to, out, 0);
            tiles::<S, _, 1, 1, 2>(simd, kind, &cells, x, to, out, first);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::packed::CELL;
    use super::super::packed::tests::{formats, random_blocks};
    use super::super::{decode, parts, scheme};
    use super::*;
    use crate::testing::Rng;

    /// What an output should be, and how far it may be from it.
    struct Bounded {
        value: f64,
        bound: f64,
    }

    /// The definition: decoded weights, sums in f64; bounded by the rounding of activations and of f32.
    fn decoded(format: Format, blocks: &[u8], x: &[f32], most: f32) -> Bounded {
        let mut w = vec![0.0; x.len()];
        decode(format, blocks, &mut w);
        let rounding = rounded(format, blocks, x, most).bound;
        let (mut value, mut bound) = (0.0, rounding);
        for (x, w) in x.chunks(CELL).zip(w.chunks(CELL)) {
            let largest = x.iter().fold(0.0f32, |l, x| l.max(x.abs()));
            // The quotient of x and its scale is rounded too: `most` * 2^-23 of a step.
            let half_step =
                f64::from(largest / (2.0 * most)) + f64::from(largest) * 2.0f64.powi(-23);
            for (x, w) in x.iter().zip(w) {
                value += f64::from(*x) * f64::from(*w);
                bound += half_step * f64::from(w.abs());
            }
        }
        Bounded { value, bound }
    }

    /// The same with activations rounded as the product does, plainly: only the rounding of f32 is left.
    fn rounded(format: Format, blocks: &[u8], x: &[f32], most: f32) -> Bounded {
        let scheme = scheme(format).unwrap();
        let half = |bits: u16| f64::from(half::f16::from_bits(bits).to_f32());
        let (mut value, mut sizes) = (0.0, 0.0);
        let blocks = blocks.chunks_exact(format.block_bytes());
        for (block, x) in blocks.zip(x.chunks(format.block_len())) {
            let parts = parts(format, block);
            for (c, x) in x.chunks(CELL).enumerate() {
                let largest = x.iter().fold(0.0f32, |l, x| l.max(x.abs()));
                let scale = f64::from(largest / most);
                for (i, x) in x.iter().enumerate() {
                    let (i, inverse) = (c * CELL + i, most / largest);
                    let x = if largest == 0.0 { 0.0 } else { (x * inverse).round_ties_even() };
                    let x = scale * f64::from(x);
                    let g = i / scheme.group;
                    let q = f64::from(scheme.values.of(parts.codes[i]));
                    let w = half(parts.d) * f64::from(parts.scales[g]) * q;
                    let min = half(parts.m) * f64::from(parts.mins[g]);
                    value += x * (w - min);
                    sizes += x.abs() * (w.abs() + min.abs());
                }
            }
        }
        Bounded { value, bound: sizes * rounding_of(x.len() / scheme.group) }
    }

    /// Of the sum of sizes: two additions for each group, and a few roundings of each term.
    fn rounding_of(groups: usize) -> f64 {
        (2 * groups + 8) as f64 * 2.0f64.powi(-24)
    }

    fn activations(rng: &mut Rng, rows: usize, width: usize) -> Vec<f32> {
        let mut x = rng.floats(rows * width);
        for (i, x) in x.chunks_mut(CELL).enumerate() {
            // Blocks of different sizes, one of zeros, and single values far out.
            let size = [1.0, 1e-3, 40.0, 0.0, 3.0][(rng.next() % 5) as usize];
            for x in x.iter_mut() {
                *x *= size;
            }
            x[i % CELL] *= 8.0;
        }
        x
    }

    /// Both products, of one term and of two, each with its largest integer.
    type Product = fn(Level, Rows<'_>, &Packed, &mut [f32]);
    const PRODUCTS: [(Product, f32); 2] =
        [(linear_quantized, 127.0), (linear_quantized_precise, 254.0 * 127.0)];

    #[test]
    fn equals_both_definitions_within_their_bounds_on_every_instruction_set() {
        let mut rng = Rng::new(50);
        let sizes = [(1, 1, 1usize), (3, 16, 2), (2, 9, 64), (40, 70, 3), (5, 37, 8), (131, 33, 1)];
        for format in formats() {
            for (rows, features, blocks) in sizes {
                let blocks = if format.block_len() == 256 { blocks.div_ceil(8) } else { blocks };
                let width = blocks * format.block_len();
                let x = activations(&mut rng, rows, width);
                let bytes = random_blocks(&mut rng, format, features * width);
                let w = Packed::new(format, &bytes, width);
                let before = rng.floats(rows * features);
                for (&level, (product, most)) in
                    Level::present().iter().flat_map(|level| PRODUCTS.map(|p| (level, p)))
                {
                    let mut out = before.clone();
                    product(level, Rows::dense(&x, width), &w, &mut out);
                    // Each output once, by one of a few rows: definitions are slow.
                    for n in 0..features {
                        let m = (n * 7 + features) % rows;
                        let x = &x[m * width..][..width];
                        let bytes = &bytes[n * bytes.len() / features..][..bytes.len() / features];
                        let (got, before) = (out[m * features + n], before[m * features + n]);
                        for want in [decoded, rounded].map(|of| of(format, bytes, x, most)) {
                            let value = want.value + f64::from(before);
                            let error = (f64::from(got) - value).abs();
                            // Once more for the addition to `out`.
                            let bound = want.bound + (value.abs() + 1.0) * 2.0f64.powi(-23);
                            assert!(
                                error <= bound,
                                "{} {level:?} [{rows}, {width}] up to {most}, feature {n}: {got} is not {value} within {bound:e}",
                                format.name()
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_any_batch() {
        let mut rng = Rng::new(51);
        for format in formats() {
            let (rows, features, width) = (133, 77, 512);
            let x = activations(&mut rng, rows, width);
            let w = Packed::new(format, &random_blocks(&mut rng, format, features * width), width);
            for (&level, (product, _)) in
                Level::present().iter().flat_map(|level| PRODUCTS.map(|p| (level, p)))
            {
                let run = |first: usize, count: usize| {
                    let x = Rows::dense(&x, width).slice(first, count);
                    let mut out = vec![0.5; count * features];
                    product(level, x, &w, &mut out);
                    out
                };
                let whole = run(0, rows);
                for (first, count) in [(0, 1), (132, 1), (5, 2), (127, 3), (1, 7), (9, 4), (3, 129)]
                {
                    let want = &whole[first * features..(first + count) * features];
                    assert_eq!(run(first, count), want, "{} {count} at {first}", format.name());
                }
            }
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let mut rng = Rng::new(52);
        let (rows, features, width) = (9, 1003, 768);
        let x = rng.floats(rows * width);
        let w = Packed::new(
            Format::Q4K,
            &random_blocks(&mut rng, Format::Q4K, features * width),
            width,
        );
        let with = |threads, rows| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut out = vec![0.0; rows * features];
            let x = Rows::dense(&x, width).slice(0, rows);
            pool.install(|| linear_quantized(Level::detect(), x, &w, &mut out));
            out
        };
        for rows in [1, rows] {
            let one = with(1, rows);
            assert_eq!(with(2, rows), one);
            assert_eq!(with(5, rows), one);
        }
    }

    #[test]
    fn instruction_sets_that_fuse_agree_to_the_bit() {
        let mut rng = Rng::new(53);
        let width = 512;
        // Few rows, and as many as have a panel.
        for rows in [3, FEW_ROWS + 3] {
            let x = activations(&mut rng, rows, width);
            for format in formats() {
                let w = Packed::new(format, &random_blocks(&mut rng, format, 20 * width), width);
                for (product, _) in PRODUCTS {
                    let fused = Level::present().iter().filter(|l| **l != Level::Baseline);
                    let mut outs = fused.map(|&level| {
                        let mut out = vec![0.0; rows * 20];
                        product(level, Rows::dense(&x, width), &w, &mut out);
                        out
                    });
                    if let Some(first) = outs.next() {
                        assert!(outs.all(|out| out == first), "{}", format.name());
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_in_a_row_makes_its_outputs_nan_and_no_others() {
        let mut rng = Rng::new(54);
        for format in formats() {
            let w = Packed::new(format, &random_blocks(&mut rng, format, 9 * 512), 512);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for (rows, (product, _)) in
                    [3, FEW_ROWS + 3].into_iter().flat_map(|rows| PRODUCTS.map(|p| (rows, p)))
                {
                    let mut x = rng.floats(rows * 512);
                    x[512 + 300] = bad;
                    let mut out = vec![0.0; rows * 9];
                    product(Level::detect(), Rows::dense(&x, 512), &w, &mut out);
                    for (i, out) in out.iter().enumerate() {
                        assert_eq!(out.is_nan(), (9..18).contains(&i), "{} {i}", format.name());
                    }
                }
            }
        }
    }

    #[test]
    fn without_rows_or_features_nothing_happens() {
        let w = Packed::new(Format::Q8_0, &[], 32);
        assert_eq!(w.features(), 0);
        linear_quantized(Level::detect(), Rows::dense(&[1.0; 64], 32), &w, &mut []);
        let w = Packed::new(Format::Q8_0, &[0; 34], 32);
        linear_quantized(Level::detect(), Rows::dense(&[], 32), &w, &mut []);
        // Sums of nothing.
        let w = Packed::of_bytes(Format::Q8_0, [3, 0], std::sync::Arc::new([0u8; 0]), 0..0);
        for (product, _) in PRODUCTS {
            let mut out = [1.0; 6];
            product(Level::detect(), Rows::new(&[], 2, 0, 0, 0), &w, &mut out);
            assert_eq!(out, [1.0; 6]);
        }
    }

    #[test]
    #[should_panic(expected = "x: width 64 is not 32")]
    fn a_wrong_width_panics() {
        let w = Packed::new(Format::Q8_0, &[0; 34], 32);
        linear_quantized(Level::detect(), Rows::dense(&[1.0; 64], 64), &w, &mut [0.0]);
    }
}
