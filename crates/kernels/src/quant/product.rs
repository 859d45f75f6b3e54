//! Product `x · Wᵀ` with quantized weights: integers inside a block, floats between blocks.
//!
//! ```text
//! out[t, n] += sum over k of x[t, k] * w[n, k]
//!           ~= sum over blocks of 32 k:   xs * d * (sum over groups of scale * sum of xq * q)
//!                                       - xs * m * (sum over groups of min * sum of xq)
//! ```
//!
//! with `x ~= xs * xq` of [`activations`](super::activations) and `w = d * scale * q - m * min` of the format.
//! What differs from the plain loop, and why:
//!
//! 1. Weights are read as [`Packed`] lays them out, eight outputs to a vector. A cell of 8 outputs and
//!    32 k is unpacked into registers once, and multiplied with up to [`ROWS`] rows of activations. Codes
//!    that are signed (those of q8_0, and what the tables of iq4 give) stay in memory: four cells of them
//!    share what they read of two rows.
//! 2. Sums over 32 k are exact in integers: where codes have an offset, or are moved to be unsigned, the
//!    sums of the activations make up for it, in integers too. AVX2 multiplies signed codes with the
//!    sizes of the activations and takes their signs into the codes.
//! 3. Four cells a quarter of the task apart take turns, so that memory sees four long streams; with one
//!    row, the four also share its loads.
//! 4. Blocks of outputs run in parallel.
//!
//! An output has its floats added in the order of `k`, whatever the number of rows or threads: a row
//! gives the same bits alone and in any batch.
//!
//! # Error
//!
//! Against the product with decoded weights, from the rounding of activations, in each 32 k
//!
//! ```text
//! |error| <= max |x| / 254 * sum of |w|
//! ```
//!
//! and from the rounding of f32, (width / 16 + 8) * 2^-24 of the sum of |x| (|d * scale * q| + |m * min|)
//! over the row. Values of `x` below 127 / `f32::MAX` count as zeros where all their block are.

use std::ops::Range;

use rayon::prelude::*;

use super::activations::{Activations, Block, remainder};
use super::packed::{CELL, LANES, Layout, Packed, Packing, with_packing};
use super::{Format, Values, formats, if_multiplied};
use crate::rows::{Rows, column_blocks};
use crate::simd::Level;
use crate::simd::int8::{Int8, dispatch_int8};

/// Rows that a cell is multiplied with once it is unpacked.
const ROWS: usize = 128;
/// Cells that take turns.
const STREAMS: usize = 4;
/// Cells and rows that are worth a task of their own.
const TASK: usize = 2048;

/// Rows that are computed at once in two terms.
const PRECISE_ROWS: usize = 64;

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
    let (rows, features) = (x.len(), w.features());
    assert!(rows == 0 || x.width() == w.width(), "x: width {} is not {}", x.width(), w.width());
    assert_eq!(out.len(), rows * features, "out");
    if out.is_empty() {
        return;
    }
    // Activations become 8-bit integers once, for all outputs: `[in / 32][rows]` blocks.
    let signed = is_signed(Layout::of(w.format()));
    let x = Activations::new(level, x, signed);
    // A task has whole groups of eight outputs, and a multiple of four of them, so that each has four
    // streams. Small products stay in one task: waking a thread costs more than they do.
    let groups = features.div_ceil(LANES);
    let tasks = groups * (w.width() / CELL) * rows / TASK;
    let tasks = tasks.clamp(1, 4 * rayon::current_num_threads());
    let task = groups.div_ceil(tasks).next_multiple_of(STREAMS) * LANES;
    let mut blocks = column_blocks(out, features, task);
    // The format is known to the compiler inside: one kernel for each format and level.
    with_packing!(w.format(), P => {
        if let [out] = &mut blocks[..] {
            product::<P>(level, &x, w, 0, out);
        } else {
            let blocks = blocks.into_par_iter().enumerate();
            blocks.for_each(|(i, mut out)| product::<P>(level, &x, w, i * task, &mut out));
        }
    });
}

/// As [`linear_quantized`], with activations in two terms of 8 bits: 16 bits, for what amplifies rounding.
///
/// The second term is what rounding to the first leaves. Both meet a weight at once, so that it is read
/// and unpacked once; a row has the same bits in any company.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn linear_quantized_precise(level: Level, x: Rows<'_>, w: &Packed, out: &mut [f32]) {
    let (width, features) = (w.width(), w.features());
    assert!(x.is_empty() || x.width() == width, "x: width {} is not {width}", x.width());
    assert_eq!(out.len(), x.len() * features, "out");
    if out.is_empty() {
        return;
    }
    for (chunk, out) in out.chunks_mut(PRECISE_ROWS * features).enumerate() {
        let rows = out.len() / features;
        let mut terms = vec![0.0; 2 * rows * width];
        // Rows `0..rows` are x rounded to 8 bits, rows `rows..` what that rounding left. As rows of one
        // product they share each unpacked weight.
        let (first, second) = terms.split_at_mut(rows * width);
        let pairs = first.chunks_exact_mut(width).zip(second.chunks_exact_mut(width));
        for (i, (first, second)) in pairs.enumerate() {
            first.copy_from_slice(x.row(chunk * PRECISE_ROWS + i));
            remainder(first, second);
        }
        let mut products = vec![0.0; 2 * rows * features];
        linear_quantized(level, Rows::dense(&terms, width), w, &mut products);
        let (first, second) = products.split_at(rows * features);
        for ((out, first), second) in out.iter_mut().zip(first).zip(second) {
            *out += first + second;
        }
    }
}

dispatch_int8! {
    /// The product with features `first..`, as many as rows of `out` are long.
    fn product<P: Packing> =
        product_body(x: &Activations, w: &Packed, first: usize, out: &mut [&mut [f32]])
}

#[inline(always)]
fn product_body<S: Int8, P: Packing>(
    simd: S,
    x: &Activations,
    w: &Packed,
    first: usize,
    out: &mut [&mut [f32]],
) {
    let groups = out[0].len().div_ceil(LANES);
    let w = w.groups(first / LANES, groups);
    let group = w.len() / groups;
    // The groups of a task are cut in four quarters, and one group of each is computed at a time.
    let quarter = groups.div_ceil(STREAMS);
    let (mut one, mut many) = ([[Sums::ZERO; 1]; STREAMS], [[Sums::ZERO; ROWS]; STREAMS]);
    for (i, out) in out.chunks_mut(ROWS).enumerate() {
        for n in 0..quarter {
            // Where four do not come out even, the first stands in for those missing.
            let count = (groups - n).div_ceil(quarter);
            let mut streams = [&w[n * group..][..group]; STREAMS];
            for i in 1..count {
                streams[i] = &w[(n + i * quarter) * group..][..group];
            }
            // One row and many rows are two instances of `turns`: with one, four groups share its loads.
            if out.len() == 1 {
                turns::<S, P, 1>(simd, x, i * ROWS, 1, streams, &mut one);
                add_sums(&one[..count], n, quarter, out);
            } else {
                turns::<S, P, ROWS>(simd, x, i * ROWS, out.len(), streams, &mut many);
                add_sums(&many[..count], n, quarter, out);
            }
        }
    }
}

/// Sums of eight outputs, so aligned that none lies across cache lines.
#[derive(Clone, Copy)]
#[repr(align(32))]
struct Sums([f32; LANES]);

impl Sums {
    const ZERO: Self = Self([0.0; LANES]);
}

/// Adds sums of groups `n`, `n + quarter`, .. of eight outputs.
#[inline(always)]
fn add_sums<const M: usize>(sums: &[[Sums; M]], n: usize, quarter: usize, out: &mut [&mut [f32]]) {
    for (i, sums) in sums.iter().enumerate() {
        for (out, sums) in out.iter_mut().zip(sums) {
            let out = &mut out[(n + i * quarter) * LANES..];
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
    }
}

/// Products of `rows <= M` rows of `x` from `first` with four groups of eight outputs, cell by cell in
/// turn.
#[inline(always)]
fn turns<S: Int8, P: Packing, const M: usize>(
    simd: S,
    x: &Activations,
    first: usize,
    rows: usize,
    groups: [&[u8]; STREAMS],
    acc: &mut [[Sums; M]; STREAMS],
) {
    let (record, in_record) = (P::LAYOUT.record, P::LAYOUT.block / CELL);
    // Sums of four groups x `rows` rows x eight outputs stay in the first-level cache.
    for acc in &mut *acc {
        acc[..rows].fill(Sums::ZERO);
    }
    let mut looked_up = [[[0; 32]; 8]; STREAMS];
    // Along k: record after record (32 or 256 k of eight outputs), and cell after cell (32 k) in each.
    for block in 0..groups[0].len() / record {
        let mut records = groups;
        for i in 0..STREAMS {
            records[i] = &groups[i][block * record..][..record];
        }
        for c in 0..in_record {
            let k = block * in_record + c;
            // The 32 k of every row, and the scales and minima of the four cells.
            let blocks = &x.column(k)[first..][..rows];
            let mut cells = [Cell::of::<P>(simd, records[0], c); STREAMS];
            for i in 1..STREAMS {
                cells[i] = Cell::of::<P>(simd, records[i], c);
            }
            // Signed codes are read from memory, four cells and two rows at a time.
            if is_signed(P::LAYOUT) {
                let codes = signed_codes::<S, P>(simd, records, c, &mut looked_up);
                signed_cells::<S, P, M>(simd, &cells, codes, x, k, first..first + rows, acc);
            } else if M == 1 {
                // One row: four cells are unpacked and multiplied with the same 32 integers.
                let mut codes = [unpack::<S, P>(simd, records[0], c); STREAMS];
                for i in 1..STREAMS {
                    codes[i] = unpack::<S, P>(simd, records[i], c);
                }
                let codes = [&codes[0], &codes[1], &codes[2], &codes[3]];
                let [a, b, c, d] = &mut *acc;
                let acc = [&mut a[..1], &mut b[..1], &mut c[..1], &mut d[..1]];
                accumulate::<S, P, STREAMS, 1>(simd, &cells, codes, &blocks[..1], acc);
            } else {
                // Many rows: a cell is unpacked into eight registers and multiplied with each of them.
                for i in 0..STREAMS {
                    let cell = [cells[i]];
                    let codes = unpack::<S, P>(simd, records[i], c);
                    let acc = &mut acc[i][..rows];
                    // Two rows hide each other's latency, but 6 bits leave no registers for it.
                    let pairs = if P::LAYOUT.scheme.bits <= 5 { rows / 2 } else { 0 };
                    for m in (0..2 * pairs).step_by(2) {
                        let acc = [&mut acc[m..m + 2]];
                        accumulate::<S, P, 1, 2>(simd, &cell, [&codes], &blocks[m..m + 2], acc);
                    }
                    for m in 2 * pairs..rows {
                        let acc = [&mut acc[m..=m]];
                        accumulate::<S, P, 1, 1>(simd, &cell, [&codes], &blocks[m..=m], acc);
                    }
                }
            }
        }
    }
}

/// Signed codes of cell `c` of each record, those of a table by way of `looked_up`.
#[inline(always)]
fn signed_codes<'a, S: Int8, P: Packing>(
    simd: S,
    records: [&'a [u8]; STREAMS],
    c: usize,
    looked_up: &'a mut [[[u8; 32]; 8]; STREAMS],
) -> [&'a [[u8; 32]; 8]; STREAMS] {
    if let Values::Table(_) = P::LAYOUT.scheme.values {
        // Codes of a table become its signed entries, 8 steps of 32 bytes for each stream.
        for i in 0..STREAMS {
            let cell = cell_bytes(P::LAYOUT, records[i], c);
            for step in 0..8 {
                simd.store(unpack_step::<S, P>(simd, cell, step), &mut looked_up[i][step]);
            }
        }
    }
    let mut codes = [&looked_up[0]; STREAMS];
    for i in 0..STREAMS {
        codes[i] = match P::LAYOUT.scheme.values {
            Values::Table(_) => &looked_up[i],
            _ => {
                let steps = cell_bytes(P::LAYOUT, records[i], c).as_chunks().0;
                steps.first_chunk().expect("eight steps of 32 bytes")
            }
        };
    }
    codes
}

/// Adds the products of four cells of signed codes with column `k` of `rows` of `x`: two rows at a time, which
/// share what they read.
#[inline(always)]
fn signed_cells<S: Int8, P: Packing, const M: usize>(
    simd: S,
    cells: &[Cell<S>; STREAMS],
    codes: [&[[u8; 32]; 8]; STREAMS],
    x: &Activations,
    k: usize,
    rows: Range<usize>,
    acc: &mut [[Sums; M]; STREAMS],
) {
    const { assert!(!is_signed(P::LAYOUT) || P::LAYOUT.scheme.group == CELL, "one group a cell") }
    let [first, second, third, fourth] = &mut *acc;
    let blocks = &x.column(k)[rows.clone()];
    for (pair, blocks) in blocks.chunks(2).enumerate() {
        let (m, row) = (2 * pair..2 * pair + blocks.len(), rows.start + 2 * pair);
        let acc =
            [&mut first[m.clone()], &mut second[m.clone()], &mut third[m.clone()], &mut fourth[m]];
        // Eight sums: four cells x two rows, each of eight outputs.
        if blocks.len() == 2 {
            let sums = simd.dot_signed(codes, [x.codes(k, row), x.codes(k, row + 1)]);
            add_scaled::<S, P, STREAMS, 2>(simd, cells, sums, blocks, acc);
        } else {
            let sums = simd.dot_signed(codes, [x.codes(k, row)]);
            add_scaled::<S, P, STREAMS, 1>(simd, cells, sums, blocks, acc);
        }
    }
}

/// What 32 `k` of eight outputs have but for their codes.
#[derive(Clone, Copy)]
struct Cell<S: Int8> {
    /// `d`, times the scale of the group where one group is the cell.
    scale: S::F,
    /// Scales of both groups, where there are two.
    factors: [S::Factors; 2],
    /// What sums of `x` are multiplied with for the offset of codes.
    offsets: S::Pairs,
    /// Minus what is subtracted, where one group is the cell; else minus `m`.
    min: S::F,
    /// Minima of both groups, where there are two.
    mins: S::Pairs,
}

/// Whether codes are signed when they are multiplied; else they are unsigned, of at most six bits.
#[inline(always)]
const fn is_signed(layout: Layout) -> bool {
    !matches!(layout.scheme.values, Values::Offset(_))
}

/// The offset of codes as they are multiplied.
#[inline(always)]
fn offset<S: Int8>(layout: Layout) -> i32 {
    match layout.scheme.values {
        Values::Offset(offset) => offset,
        Values::Signed | Values::Table(_) => S::SIGNED_OFFSET,
    }
}

#[inline(always)]
fn bytes<const N: usize>(from: &[u8], at: usize) -> &[u8; N] {
    from[at..][..N].try_into().expect("a slice of its length")
}

/// The codes of cell `c`, as they are packed.
#[inline(always)]
fn cell_bytes(layout: Layout, record: &[u8], c: usize) -> &[u8] {
    &record[layout.cells + c * layout.cell..][..layout.cell]
}

impl<S: Int8> Cell<S> {
    #[inline(always)]
    fn of<P: Packing>(simd: S, record: &[u8], c: usize) -> Self {
        let layout = P::LAYOUT;
        let one_group = layout.scheme.group == CELL;
        // Of the cell's one or two groups:
        let of_group = |at: usize, g: usize| {
            let g = c * (CELL / layout.scheme.group) + g * usize::from(!one_group);
            *bytes::<LANES>(record, at + g * LANES)
        };
        let ones = simd.factors([1; LANES]);
        let mut factors = [ones; 2];
        // Eight f16 scales d, and eight f16 factors m of the minima where the format has them.
        let mut scale = simd.load_f16(bytes(record, 0));
        let mut min = simd.splat(0.0);
        if layout.scheme.has_min {
            min = simd.mul(simd.load_f16(bytes(record, 16)), simd.splat(-1.0));
        }
        let mut mins = simd.pairs(0, factors);
        // Scales of groups are bytes, `[groups, 8]`. With one group a cell they join d and m as floats; with two
        // they stay integers, which multiply sums of 16 products.
        if let Some(scales) = layout.scales {
            if one_group {
                scale = simd.mul(scale, simd.load_i8(of_group(scales, 0)));
                if let Some(mins) = layout.mins {
                    min = simd.mul(min, simd.load_i8(of_group(mins, 0)));
                }
            } else {
                let mut both = [of_group(scales, 0), of_group(scales, 1)];
                // Four bits of scale and four of minimum share a byte: both are taken apart eight at a time.
                if layout.mins.is_some() {
                    let [a, b] = [u64::from_le_bytes(both[0]), u64::from_le_bytes(both[1])];
                    let low = 0x0f0f_0f0f_0f0f_0f0f;
                    let high = [(a >> 4 & low).to_le_bytes(), (b >> 4 & low).to_le_bytes()];
                    mins = simd.pairs(1, [simd.factors(high[0]), simd.factors(high[1])]);
                    both = [(a & low).to_le_bytes(), (b & low).to_le_bytes()];
                }
                factors = [simd.factors(both[0]), simd.factors(both[1])];
            }
        }
        // sum of x (q - offset) = sum of x q - offset * sum of x: the second term comes from sums of x alone.
        let offsets = simd.pairs(-offset::<S>(layout) as i16, factors);
        Self { scale, factors, offsets, min, mins }
    }
}

/// Unsigned codes of a cell.
#[inline(always)]
fn unpack<S: Int8, P: Packing>(simd: S, record: &[u8], c: usize) -> [S::Codes; 8] {
    let cell = cell_bytes(P::LAYOUT, record, c);
    let mut codes = [simd.load(&[0; 32]); 8];
    for step in 0..8 {
        codes[step] = unpack_step::<S, P>(simd, cell, step);
    }
    codes
}

#[inline(always)]
fn unpack_step<S: Int8, P: Packing>(simd: S, cell: &[u8], step: usize) -> S::Codes {
    let Layout { low, high, scheme, .. } = P::LAYOUT;
    // Step s has its low bits in vector s % low of the low plane, from bit low * (s / low) on.
    let mut codes = simd.load(bytes(cell, step % low * 32));
    if low < 8 {
        codes = simd.right(codes, (low * (step / low)) as u32, (1u8 << low) - 1);
    }
    // Its high bits are in the high plane in the same way, and are moved to stand above the low ones.
    if high > 0 {
        let mask = ((1u8 << high) - 1) << low;
        let (from, to) = (high * (step / high), low);
        let bits = simd.load(bytes(cell, (low + step % high) * 32));
        let bits = if from > to {
            simd.right(bits, (from - to) as u32, mask)
        } else {
            simd.left(bits, (to - from) as u32, mask)
        };
        codes = simd.or(codes, bits);
    }
    match scheme.values {
        Values::Offset(_) | Values::Signed => codes,
        Values::Table(table) => simd.lookup(table, codes),
    }
}

/// Adds the products of `N` cells with 32 `x` of each of `R` rows.
#[inline(always)]
fn accumulate<S: Int8, P: Packing, const N: usize, const R: usize>(
    simd: S,
    cells: &[Cell<S>; N],
    codes: [&[S::Codes; 8]; N],
    x: &[Block],
    acc: [&mut [Sums]; N],
) {
    let layout = P::LAYOUT;
    let mut integers = [&x[0].codes; R];
    for r in 0..R {
        integers[r] = &x[r].codes;
    }
    // One scale for 32 k: a plain sum of 32 products. Two: each half's sum is multiplied with its own.
    let sums = if layout.scheme.group == CELL {
        simd.dot(layout.scheme.bits, codes, integers)
    } else {
        let mut factors = [cells[0].factors; N];
        for n in 0..N {
            factors[n] = cells[n].factors;
        }
        simd.dot_halves(layout.scheme.bits, codes, integers, factors)
    };
    add_scaled::<S, P, N, R>(simd, cells, sums, x, acc);
}

/// Adds sums of integers, times their scales.
#[inline(always)]
fn add_scaled<S: Int8, P: Packing, const N: usize, const R: usize>(
    simd: S,
    cells: &[Cell<S>; N],
    sums: [[S::Sums; R]; N],
    x: &[Block],
    acc: [&mut [Sums]; N],
) {
    let layout = P::LAYOUT;
    let one_group = layout.scheme.group == CELL;
    for (n, acc) in acc.into_iter().enumerate() {
        let cell = &cells[n];
        for r in 0..R {
            let (x, to, mut sums) = (&x[r], &mut acc[r].0, sums[n][r]);
            // All that is exact in integers comes first: products, then the offset.
            if offset::<S>(layout) != 0 {
                sums = simd.add_pairs(sums, cell.offsets, x.sums);
            }
            // From here on floats, in the order of k: acc += sum * (d * x scale), then the minimum.
            let scale = simd.mul(cell.scale, simd.splat(x.scale));
            let mut acc = simd.mul_add(simd.to_float(sums), scale, simd.load_float(to));
            if layout.scheme.has_min && one_group {
                acc = simd.mul_add(cell.min, simd.splat(x.scaled_sum), acc);
            } else if layout.scheme.has_min {
                let mins = simd.add_pairs(simd.zero_sums(), cell.mins, x.sums);
                let min = simd.mul(cell.min, simd.splat(x.scale));
                acc = simd.mul_add(simd.to_float(mins), min, acc);
            }
            simd.store_float(acc, to);
        }
    }
}

#[cfg(test)]
mod tests {
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
    fn decoded(format: Format, blocks: &[u8], x: &[f32]) -> Bounded {
        let mut w = vec![0.0; x.len()];
        decode(format, blocks, &mut w);
        let rounding = rounded(format, blocks, x).bound;
        let (mut value, mut bound) = (0.0, rounding);
        for (x, w) in x.chunks(CELL).zip(w.chunks(CELL)) {
            let largest = x.iter().fold(0.0f32, |l, x| l.max(x.abs()));
            // The quotient of x and its scale is rounded too: 127 * 2^-23 of a step.
            let half_step = f64::from(largest) / 254.0 * (1.0 + 1e-4);
            for (x, w) in x.iter().zip(w) {
                value += f64::from(*x) * f64::from(*w);
                bound += half_step * f64::from(w.abs());
            }
        }
        Bounded { value, bound }
    }

    /// The same with activations rounded as the product does, plainly: only the rounding of f32 is left.
    fn rounded(format: Format, blocks: &[u8], x: &[f32]) -> Bounded {
        let scheme = scheme(format).unwrap();
        let half = |bits: u16| f64::from(half::f16::from_bits(bits).to_f32());
        let (mut value, mut sizes) = (0.0, 0.0);
        let blocks = blocks.chunks_exact(format.block_bytes());
        for (block, x) in blocks.zip(x.chunks(format.block_len())) {
            let parts = parts(format, block);
            for (c, x) in x.chunks(CELL).enumerate() {
                let largest = x.iter().fold(0.0f32, |l, x| l.max(x.abs()));
                let scale = f64::from(largest / 127.0);
                for (i, x) in x.iter().enumerate() {
                    let (i, inverse) = (c * CELL + i, 127.0 / largest);
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
        Bounded { value, bound: sizes * rounding_of(x.len()) }
    }

    /// Of the sum of sizes: two additions for each cell, and a few roundings of each term.
    fn rounding_of(width: usize) -> f64 {
        (2 * (width / CELL) + 8) as f64 * 2.0f64.powi(-24)
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

    /// [`decoded`] for activations in two terms: rounded in steps of 1/127 of half a step.
    fn decoded_precisely(format: Format, blocks: &[u8], x: &[f32]) -> Bounded {
        let mut w = vec![0.0; x.len()];
        decode(format, blocks, &mut w);
        let mut remainders = vec![0.0; x.len()];
        remainder(x, &mut remainders);
        let both = [x, &remainders].map(|x| rounded(format, blocks, x).bound);
        let (mut value, mut bound) = (0.0, both[0] + both[1]);
        for (x, w) in x.chunks(CELL).zip(w.chunks(CELL)) {
            let largest = x.iter().fold(0.0f32, |l, x| l.max(x.abs()));
            // And what f32 loses of the remainder and of the sum of both.
            let step = f64::from(largest) * (1.01 / (254.0 * 254.0) + 2.0f64.powi(-23));
            for (x, w) in x.iter().zip(w) {
                value += f64::from(*x) * f64::from(*w);
                bound += step * f64::from(w.abs());
            }
        }
        Bounded { value, bound }
    }

    #[test]
    fn two_terms_are_within_their_bound_and_a_row_is_the_same_in_any_company() {
        let mut rng = Rng::new(51);
        for format in formats() {
            for (rows, features, blocks) in [(1, 1, 1usize), (3, 9, 8), (70, 40, 8)] {
                let blocks = if format.block_len() == 256 { blocks.div_ceil(8) } else { blocks };
                let width = blocks * format.block_len();
                let x = activations(&mut rng, rows, width);
                let bytes = random_blocks(&mut rng, format, features * width);
                let w = Packed::new(format, &bytes, width);
                let before = rng.floats(rows * features);
                for &level in Level::present() {
                    let mut out = before.clone();
                    linear_quantized_precise(level, Rows::dense(&x, width), &w, &mut out);
                    for n in 0..features {
                        let m = (n * 7 + features) % rows;
                        let bytes = &bytes[n * bytes.len() / features..][..bytes.len() / features];
                        let want = decoded_precisely(format, bytes, &x[m * width..][..width]);
                        let (got, before) = (out[m * features + n], before[m * features + n]);
                        let value = want.value + f64::from(before);
                        let bound =
                            want.bound + 2.0f64.powi(-23) * (value.abs() + want.value.abs());
                        let error = (f64::from(got) - value).abs();
                        assert!(error <= bound, "{format:?} {rows} {n}: {error} above {bound}");
                    }
                    let last = rows - 1;
                    let mut alone = before[last * features..].to_vec();
                    linear_quantized_precise(
                        level,
                        Rows::dense(&x[last * width..], width),
                        &w,
                        &mut alone,
                    );
                    assert_eq!(alone, out[last * features..], "{format:?} {level:?}");
                }
            }
        }
    }

    #[test]
    fn equals_both_definitions_within_their_bounds_on_every_instruction_set() {
        let mut rng = Rng::new(50);
        let sizes = [(1, 1, 1usize), (3, 8, 2), (2, 9, 64), (40, 70, 3), (5, 37, 8), (131, 33, 1)];
        for format in formats() {
            for (rows, features, blocks) in sizes {
                let blocks = if format.block_len() == 256 { blocks.div_ceil(8) } else { blocks };
                let width = blocks * format.block_len();
                let x = activations(&mut rng, rows, width);
                let bytes = random_blocks(&mut rng, format, features * width);
                let w = Packed::new(format, &bytes, width);
                let before = rng.floats(rows * features);
                for &level in Level::present() {
                    let mut out = before.clone();
                    linear_quantized(level, Rows::dense(&x, width), &w, &mut out);
                    // Each output once, by one of a few rows: definitions are slow.
                    for n in 0..features {
                        let m = (n * 7 + features) % rows;
                        let x = &x[m * width..][..width];
                        let bytes = &bytes[n * bytes.len() / features..][..bytes.len() / features];
                        let (got, before) = (out[m * features + n], before[m * features + n]);
                        for want in [decoded(format, bytes, x), rounded(format, bytes, x)] {
                            let value = want.value + f64::from(before);
                            let error = (f64::from(got) - value).abs();
                            // Once more for the addition to `out`.
                            let bound = want.bound + (value.abs() + 1.0) * 2.0f64.powi(-23);
                            assert!(
                                error <= bound,
                                "{} {level:?} [{rows}, {width}] feature {n}: {got} is not {value} within {bound:e}",
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
            for &level in Level::present() {
                let run = |first: usize, count: usize| {
                    let x = Rows::dense(&x, width).slice(first, count);
                    let mut out = vec![0.5; count * features];
                    linear_quantized(level, x, &w, &mut out);
                    out
                };
                let whole = run(0, rows);
                for (first, count) in [(0, 1), (132, 1), (5, 2), (127, 3), (1, 7), (3, 129)] {
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
        let x = activations(&mut rng, 3, width);
        for format in formats() {
            let w = Packed::new(format, &random_blocks(&mut rng, format, 20 * width), width);
            let fused = Level::present().iter().copied().filter(|l| *l != Level::Baseline);
            let mut outs = fused.map(|level| {
                let mut out = vec![0.0; 3 * 20];
                linear_quantized(level, Rows::dense(&x, width), &w, &mut out);
                out
            });
            if let Some(first) = outs.next() {
                assert!(outs.all(|out| out == first), "{}", format.name());
            }
        }
    }

    #[test]
    fn what_is_not_finite_in_a_row_makes_its_outputs_nan_and_no_others() {
        let mut rng = Rng::new(54);
        for format in formats() {
            let w = Packed::new(format, &random_blocks(&mut rng, format, 9 * 512), 512);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = rng.floats(3 * 512);
                x[512 + 300] = bad;
                let mut out = vec![0.0; 3 * 9];
                linear_quantized(Level::detect(), Rows::dense(&x, 512), &w, &mut out);
                for (i, out) in out.iter().enumerate() {
                    assert_eq!(out.is_nan(), (9..18).contains(&i), "{} {i}", format.name());
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
    }

    #[test]
    #[should_panic(expected = "x: width 64 is not 32")]
    fn a_wrong_width_panics() {
        let w = Packed::new(Format::Q8_0, &[0; 34], 32);
        linear_quantized(Level::detect(), Rows::dense(&[1.0; 64], 64), &w, &mut [0.0]);
    }
}
