//! Dense product `a · b`, whose right operand is read by rows.
//!
//! ```text
//! out[i, j] += sum over k of a[i, k] * b[k, j]
//! ```
//!
//! [`linear`](crate::linear) takes its weights the other way round, as rows along `k`, and has to sum
//! within vectors. Gradients need this one. It differs from the plain loop in two points:
//!
//! 1. A tile of 6 rows by two vectors of columns runs together: for each `k` six factors meet two
//!    vectors, in 12 accumulators, and nothing is summed within a vector.
//! 2. The sum is cut in pieces, and what a piece needs of `b` for a tile's columns is laid out once, in
//!    a panel that stays in the first-level cache while all rows of `a` pass.
//!
//! The order of a sum depends on its length alone: on no other size, nor on the instruction set except
//! for its multiply-add.

use rayon::prelude::*;

use crate::rows::Rows;
use crate::simd::{Level, Simd, dispatch};

/// Rows of a tile.
const HEIGHT: usize = 6;
/// Most rows of a parallel task: enough that laying out a panel costs little.
const ROW_BLOCK: usize = 16 * HEIGHT;
/// Terms that are summed before the sum is added to the output.
pub(crate) const DEPTH: usize = 256;
/// Columns of a tile on the widest instruction set.
const MAX_WIDTH: usize = 32;

/// A piece of `b`, on cache lines.
#[repr(align(64))]
struct Panel<T>([[T; 2]; DEPTH]);

/// Cuts `out` `[rows, width]` in blocks of rows, of about equal work for each thread, and runs `task` with the
/// number of each block's first row and the block.
pub(crate) fn for_row_blocks(
    out: &mut [f32],
    width: usize,
    task: impl Fn(usize, &mut [f32]) + Sync,
) {
    let rows = out.len() / width;
    let count = rows.div_ceil(ROW_BLOCK).next_multiple_of(rayon::current_num_threads());
    let block = rows.div_ceil(count).next_multiple_of(HEIGHT);
    let blocks = out.par_chunks_mut(block * width).enumerate();
    blocks.for_each(|(i, out)| task(i * block, out));
}

/// Adds `a · b` to `out`, in one task.
///
/// | argument | shape |
/// |---|---|
/// | `a` | `[rows, depth]` |
/// | `b` | `[depth, columns]` |
/// | `out` | `[rows, columns]` |
#[track_caller]
pub(crate) fn add_product(level: Level, a: Rows<'_>, b: Rows<'_>, out: &mut [f32]) {
    assert_eq!(a.width(), b.len(), "b");
    assert_eq!(out.len(), a.len() * b.width(), "out");
    if !out.is_empty() {
        add_product_on(level, a, b, out);
    }
}

dispatch! { fn add_product_on = add_product_body(a: Rows<'_>, b: Rows<'_>, out: &mut [f32]) }

#[inline(always)]
fn add_product_body<S: Simd>(simd: S, a: Rows<'_>, b: Rows<'_>, out: &mut [f32]) {
    let columns = b.width();
    let mut panel = Panel([[S::ZERO; 2]; DEPTH]);
    for first in (0..b.len()).step_by(DEPTH) {
        let depth = DEPTH.min(b.len() - first);
        let panel = &mut panel.0[..depth];
        for j in (0..columns).step_by(2 * S::LANES) {
            let width = columns.min(j + 2 * S::LANES) - j;
            for k in 0..depth {
                panel[k] = read_pair::<S>(&b.row(first + k)[j..][..width]);
            }
            for i in (0..a.len()).step_by(HEIGHT) {
                // A tile past the last row repeats it, and leaves out what that gives.
                let mut left: [&[f32]; HEIGHT] = [&[]; HEIGHT];
                for r in 0..HEIGHT {
                    left[r] = &a.row((i + r).min(a.len() - 1))[first..][..depth];
                }
                let sums = tile(simd, left, panel);
                for (r, sums) in sums.iter().enumerate().take(a.len() - i) {
                    add_pair(simd, sums, &mut out[(i + r) * columns + j..][..width]);
                }
            }
        }
    }
}

#[inline(always)]
fn tile<S: Simd>(
    simd: S,
    left: [&[f32]; HEIGHT],
    panel: &[[S::Chunk; 2]],
) -> [[S::Chunk; 2]; HEIGHT] {
    for r in 0..HEIGHT {
        assert!(left[r].len() == panel.len());
    }
    let mut acc = [[simd.splat(0.0); 2]; HEIGHT];
    for k in 0..panel.len() {
        let right = [simd.load(&panel[k][0]), simd.load(&panel[k][1])];
        for r in 0..HEIGHT {
            acc[r] = add_scaled(simd, acc[r], left[r][k], right);
        }
    }
    let mut sums = [[S::ZERO; 2]; HEIGHT];
    for r in 0..HEIGHT {
        simd.store(acc[r][0], &mut sums[r][0]);
        simd.store(acc[r][1], &mut sums[r][1]);
    }
    sums
}

/// `acc + factor * x`
#[inline(always)]
pub(crate) fn add_scaled<S: Simd>(simd: S, acc: [S::F; 2], factor: f32, x: [S::F; 2]) -> [S::F; 2] {
    let factor = simd.splat(factor);
    [simd.mul_add(factor, x[0], acc[0]), simd.mul_add(factor, x[1], acc[1])]
}

/// Up to two vectors of a row, filled up with zeros.
#[inline(always)]
fn read_pair<S: Simd>(row: &[f32]) -> [S::Chunk; 2] {
    let (whole, rest) = S::chunks(row);
    match whole {
        [a, b] => [*a, *b],
        [a] => [*a, S::tail(rest)],
        _ => [S::tail(rest), S::ZERO],
    }
}

/// Adds as much of two vectors as the row has.
#[inline(always)]
fn add_pair<S: Simd>(simd: S, sums: &[S::Chunk; 2], out: &mut [f32]) {
    if let ([a, b], _) = S::chunks_mut(out) {
        simd.store(simd.add(simd.load(a), simd.load(&sums[0])), a);
        simd.store(simd.add(simd.load(b), simd.load(&sums[1])), b);
        return;
    }
    let mut floats = [0.0; MAX_WIDTH];
    S::write_tail(&sums[0], &mut floats[..S::LANES]);
    S::write_tail(&sums[1], &mut floats[S::LANES..2 * S::LANES]);
    for (out, sum) in out.iter_mut().zip(floats) {
        *out += sum;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{Rng, close};

    /// Random operands of one size, within wider matrices, against the definition on every instruction set.
    fn check([rows, depth, columns]: [usize; 3], seed: u64) {
        let mut rng = Rng::new(seed);
        let (wide_a, wide_b) = (rng.floats(rows * (depth + 3)), rng.floats(depth * (columns + 1)));
        let a = Rows::new(&wide_a, rows, depth + 3, 2, depth);
        let b = Rows::new(&wide_b, depth, columns + 1, 1, columns);
        let before = rng.floats(rows * columns);
        let mut want: Vec<f64> = before.iter().map(|x| f64::from(*x)).collect();
        for i in 0..rows {
            for j in 0..columns {
                for k in 0..depth {
                    want[i * columns + j] += f64::from(a.row(i)[k]) * f64::from(b.row(k)[j]);
                }
            }
        }
        for &level in Level::present() {
            let mut out = before.clone();
            add_product(level, a, b, &mut out);
            close(&out, &want, 2e-6 * (depth as f64).sqrt().max(1.0));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        #[test]
        fn equals_the_definition_on_every_instruction_set(
            rows in 0usize..20, depth in 0usize..40, columns in 0usize..70, seed in any::<u64>(),
        ) {
            check([rows, depth, columns], seed);
        }
    }

    #[test]
    fn sums_of_more_than_one_piece_equal_the_definition() {
        check([7, 2 * DEPTH + 1, 35], 1);
        check([13, DEPTH, 16], 2);
    }

    #[test]
    fn blocks_cover_all_rows_once_for_any_number_of_threads() {
        for threads in 1..5 {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for rows in [1, 5, 6, 7, 95, 96, 97, 200, 1000] {
                let mut out = vec![0.0; rows * 3];
                pool.install(|| {
                    for_row_blocks(&mut out, 3, |first, out| {
                        for (i, row) in out.chunks_exact_mut(3).enumerate() {
                            for x in row {
                                *x += (first + i) as f32 + 1.0;
                            }
                        }
                    });
                });
                let want: Vec<f32> = (0..rows).flat_map(|i| [i as f32 + 1.0; 3]).collect();
                assert_eq!(out, want, "{rows} rows, {threads} threads");
            }
        }
    }

    #[test]
    fn what_is_no_number_stays_in_its_row_and_column() {
        for &level in Level::present() {
            let (mut a, mut b) = (vec![1.0; 7 * 5], vec![1.0; 5 * 19]);
            a[6 * 5] = f32::NAN;
            b[4 * 19 + 18] = f32::INFINITY;
            let mut out = vec![0.0; 7 * 19];
            add_product(level, Rows::dense(&a, 5), Rows::dense(&b, 19), &mut out);
            for (i, row) in out.chunks_exact(19).enumerate() {
                for (j, x) in row.iter().enumerate() {
                    assert_eq!(*x == 5.0, i != 6 && j != 18, "{level:?} {i} {j}: {x}");
                }
            }
        }
    }
}
