//! Gradients of the dense product, and sums by column, of which gradients of biases and factors are
//! made.
//!
//! ```text
//! out[t, n] += sum over k of x[t, k] * w[n, k]        the forward: rows meet rows
//!
//! dx[t, k]   = sum over n of dout[t, n] * w[n, k]     = linear(dout, wᵀ)
//! dw[n, k]  += sum over t of dout[t, n] * x[t, k]     = linear(doutᵀ, xᵀ)
//! ```
//!
//! Both are products whose right operand is read by rows, where it lies; `doutᵀ` is copied piece by
//! piece. Rows of the results are shared out among threads.
//!
//! The order of a sum depends on its length alone (`out` for dx, T for dw), not on the number of
//! threads. A row of dx has the same bits alone and in any batch.

use rayon::prelude::*;

use crate::linear::Weights;
use crate::product::{DEPTH, add_product, for_row_blocks};
use crate::rows::Rows;
use crate::simd::{Level, Simd, dispatch};

/// Rows of 16-bit weights that are widened at once.
const WIDENED: usize = 4 * DEPTH;
/// Columns that a task transposes.
const BAND: usize = 64;
/// Side of the squares in which it does: floats of a cache line.
const TILE: usize = 16;
/// Columns that a task sums.
const COLUMN_BLOCK: usize = 128;
/// Rows that are summed in f32 before their sum is added to a total in f64.
const SUM_BLOCK: usize = 64;

/// Writes `xᵀ`: `x` is `[rows, width]`, `out` is `[width, rows]`.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn transpose(x: Rows<'_>, out: &mut [f32]) {
    let (rows, width) = (x.len(), x.width());
    assert_eq!(out.len(), rows * width, "out");
    out.par_chunks_mut(BAND * rows.max(1)).enumerate().for_each(|(i, out)| {
        transpose_to(x, i * BAND, out);
    });
}

/// Writes the gradient of the input of [`linear`](crate::linear).
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `dout` | `[T, out]` | gradient of the output |
/// | `w` | `[out, in]` | the weights of the forward |
/// | `dx` | `[T, in]` | overwritten |
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn linear_backward_input(level: Level, dout: Rows<'_>, w: Weights<'_>, dx: &mut [f32]) {
    let features = dout.width();
    let width = w.len().checked_div(features).unwrap_or(0);
    assert_eq!(w.len(), features * width, "w: not {features} rows");
    assert!(features == 0 || dx.len() == dout.len() * width, "dx");
    if dx.is_empty() || features == 0 {
        dx.fill(0.0);
        return;
    }
    let mut add = |dout: Rows<'_>, w: &[f32], is_first: bool| {
        for_row_blocks(dx, width, |first, dx| {
            // Cleared where it is added to next, so that it is in the cache.
            if is_first {
                dx.fill(0.0);
            }
            let dout = dout.slice(first, dx.len() / width);
            add_product(level, dout, Rows::dense(w, width), dx);
        });
    };
    if let Weights::F32(w) = w {
        return add(dout, w, true);
    }
    let mut widened = vec![0.0; WIDENED.min(features) * width];
    for first in (0..features).step_by(WIDENED) {
        let count = WIDENED.min(features - first);
        let widened = &mut widened[..count * width];
        widened.par_chunks_mut(width).enumerate().for_each(|(n, row)| {
            w.widen((first + n) * width, row);
        });
        add(dout.columns(first, count), widened, first == 0);
    }
}

/// Adds to `dw` the gradient of the weights of [`linear`](crate::linear).
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `dout` | `[T, out]` | gradient of the output |
/// | `x` | `[T, in]` | the input of the forward |
/// | `dw` | `[out, in]` | added to |
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn linear_backward_weight(level: Level, dout: Rows<'_>, x: Rows<'_>, dw: &mut [f32]) {
    let (rows, features, width) = (x.len(), dout.width(), x.width());
    assert_eq!(dout.len(), rows, "dout");
    assert_eq!(dw.len(), features * width, "dw");
    if dw.is_empty() {
        return;
    }
    for_row_blocks(dw, width, |block, dw| {
        let count = dw.len() / width;
        let mut transposed = vec![0.0; count * DEPTH.min(rows)];
        for first in (0..rows).step_by(DEPTH) {
            let len = DEPTH.min(rows - first);
            let transposed = &mut transposed[..count * len];
            transpose_to(dout.slice(first, len), block, transposed);
            add_product(level, Rows::dense(transposed, len), x.slice(first, len), dw);
        }
    });
}

/// [`transpose`] in one task, of as many columns of `x` from `first` on as `out` has rows.
///
/// Down `x`, and along its rows within: what is read in order is many times longer than a line, and a line
/// that is written, being far from the one before, is written at once. Squares are read whole where `x` is
/// wide enough, also past the last column that is wanted.
fn transpose_to(x: Rows<'_>, first: usize, out: &mut [f32]) {
    let rows = x.len();
    let mut tile = [[0.0; TILE]; TILE];
    for t in (0..rows).step_by(TILE) {
        for (band, out) in out.chunks_mut(TILE * rows).enumerate() {
            for (i, tile) in tile.iter_mut().enumerate().take(rows - t) {
                let row = &x.row(t + i)[first + band * TILE..];
                match row.first_chunk() {
                    Some(row) => *tile = *row,
                    None => tile[..row.len()].copy_from_slice(row),
                }
            }
            for (j, out) in out.chunks_exact_mut(rows).enumerate() {
                let mut column = [0.0; TILE];
                for i in 0..TILE {
                    column[i] = tile[i][j];
                }
                let out = &mut out[t..];
                match out.first_chunk_mut() {
                    Some(out) => *out = column,
                    None => out.copy_from_slice(&column[..out.len()]),
                }
            }
        }
    }
}

/// `out[c] += sum over t of x[t, c]`: `x` is `[T, width]`, `out` is `[width]`. The gradient of a bias.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn column_sums(level: Level, x: Rows<'_>, out: &mut [f32]) {
    add_columns(level, x, None, out);
}

/// `out[c] += sum over t of x[t, c] * y[t, c]`: `x` and `y` are `[T, width]`, `out` is `[width]`. With
/// the gradient of its output as `x`, the gradient of the factors of
/// [`scale_columns`](crate::activation::scale_columns).
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn column_dots(level: Level, x: Rows<'_>, y: Rows<'_>, out: &mut [f32]) {
    assert_eq!((y.len(), y.width()), (x.len(), x.width()), "y");
    add_columns(level, x, Some(y), out);
}

#[track_caller]
fn add_columns(level: Level, x: Rows<'_>, y: Option<Rows<'_>>, out: &mut [f32]) {
    assert_eq!(out.len(), x.width(), "out");
    out.par_chunks_mut(COLUMN_BLOCK).enumerate().for_each(|(i, out)| {
        let (first, width) = (i * COLUMN_BLOCK, out.len());
        let x = x.columns(first, width);
        let y = y.map(|y| y.columns(first, width));
        let mut totals = [0.0; COLUMN_BLOCK];
        for t in (0..x.len()).step_by(SUM_BLOCK) {
            let count = SUM_BLOCK.min(x.len() - t);
            let mut sums = [0.0; COLUMN_BLOCK];
            let y = y.map(|y| y.slice(t, count));
            sum_rows(level, x.slice(t, count), y, &mut sums[..width]);
            for (total, sum) in totals.iter_mut().zip(sums) {
                *total += f64::from(sum);
            }
        }
        for (out, total) in out.iter_mut().zip(totals) {
            *out = (f64::from(*out) + total) as f32;
        }
    });
}

dispatch! { fn sum_rows = sum_rows_body(x: Rows<'_>, y: Option<Rows<'_>>, sums: &mut [f32]) }

#[inline(always)]
fn sum_rows_body<S: Simd>(_simd: S, x: Rows<'_>, y: Option<Rows<'_>>, sums: &mut [f32]) {
    for t in 0..x.len() {
        let x = x.row(t);
        match y {
            Some(y) => {
                for ((sum, x), y) in sums.iter_mut().zip(x).zip(y.row(t)) {
                    *sum += x * y;
                }
            }
            None => {
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum += x;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::gradcheck::{
        assert_gradient, assert_threads_do_not_matter, dot, numeric_gradient, widen,
    };
    use crate::testing::{Rng, close};

    /// f32 against f64: rounding of a sum of some terms of size 1.
    fn tolerance(terms: usize) -> f64 {
        2e-6 * (terms as f64).sqrt()
    }

    /// The forward `[T, out]`, in f64.
    fn forward(x: &[f64], w: &[f64], width: usize) -> Vec<f64> {
        x.chunks(width).flat_map(|x| w.chunks(width).map(|w| dot(x, w))).collect()
    }

    /// The definition, in f64: dx `[T, in]` and what is added to dw `[out, in]`.
    fn reference(dout: &[f64], x: &[f64], w: &[f64], width: usize) -> (Vec<f64>, Vec<f64>) {
        let (rows, features) = (x.len() / width, w.len() / width);
        let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; w.len()]);
        for t in 0..rows {
            for n in 0..features {
                for k in 0..width {
                    dx[t * width + k] += dout[t * features + n] * w[n * width + k];
                    dw[n * width + k] += dout[t * features + n] * x[t * width + k];
                }
            }
        }
        (dx, dw)
    }

    #[test]
    fn the_definition_is_the_gradient_of_the_product() {
        let mut rng = Rng::new(20);
        let (rows, features, width) = (3, 4, 5);
        let dout = widen(&rng.floats(rows * features));
        let (x, w) = (widen(&rng.floats(rows * width)), widen(&rng.floats(features * width)));
        let (dx, dw) = reference(&dout, &x, &w, width);
        let numeric = numeric_gradient(&x, |x| dot(&forward(x, &w, width), &dout));
        assert_gradient("dx", &dx, &numeric);
        let numeric = numeric_gradient(&w, |w| dot(&forward(&x, w, width), &dout));
        assert_gradient("dw", &dw, &numeric);
    }

    /// Random operands of one size, against the definition on every instruction set.
    fn check(rows: usize, features: usize, width: usize, seed: u64) {
        let mut rng = Rng::new(seed);
        // Of wider matrices, so that rows are not adjacent.
        let (wide_dout, wide_x) =
            (rng.floats(rows * (features + 3)), rng.floats(rows * (width + 1)));
        let dout = Rows::new(&wide_dout, rows, features + 3, 2, features);
        let x = Rows::new(&wide_x, rows, width + 1, 1, width);
        let dense = |x: Rows<'_>| (0..rows).flat_map(|t| widen(x.row(t))).collect::<Vec<f64>>();
        let before_dw = rng.floats(features * width);
        let add = |a: &[f32], b: Vec<f64>| -> Vec<f64> {
            a.iter().zip(b).map(|(a, b)| f64::from(*a) + b).collect()
        };
        let w = rng.floats(features * width);
        let bf16: Vec<u16> = w.iter().map(|w| half::bf16::from_f32(*w).to_bits()).collect();
        let f16: Vec<u16> = w.iter().map(|w| half::f16::from_f32(*w).to_bits()).collect();
        for w in [Weights::F32(&w), Weights::Bf16(&bf16), Weights::F16(&f16)] {
            let mut exact = vec![0.0; features * width];
            w.widen(0, &mut exact);
            let (want_dx, want_dw) = reference(&dense(dout), &dense(x), &widen(&exact), width);
            for &level in Level::present() {
                let mut dx = vec![f32::NAN; rows * width];
                linear_backward_input(level, dout, w, &mut dx);
                close(&dx, &want_dx, tolerance(features));
            }
            if let Weights::F32(_) = w {
                let want_dw = add(&before_dw, want_dw);
                for &level in Level::present() {
                    let mut dw = before_dw.clone();
                    linear_backward_weight(level, dout, x, &mut dw);
                    close(&dw, &want_dw, tolerance(rows));
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        #[test]
        fn products_equal_the_definition_on_every_instruction_set(
            rows in 0usize..50, features in 1usize..70, width in 1usize..70, seed in any::<u64>(),
        ) {
            check(rows, features, width, seed);
        }

        #[test]
        fn a_transpose_exchanges_indices(
            rows in 0usize..70, width in 0usize..70, seed in any::<u64>(),
        ) {
            let wide = Rng::new(seed).floats(rows * (width + 2));
            let x = Rows::new(&wide, rows, width + 2, 1, width);
            let mut out = vec![f32::NAN; rows * width];
            transpose(x, &mut out);
            for t in 0..rows {
                for c in 0..width {
                    prop_assert_eq!(out[c * rows + t], x.row(t)[c]);
                }
            }
        }

        #[test]
        fn sums_by_column_equal_the_definition(
            rows in 0usize..200, width in 1usize..300, seed in any::<u64>(),
        ) {
            let mut rng = Rng::new(seed);
            let (x, y, before) = (rng.floats(rows * width), rng.floats(rows * width), rng.floats(width));
            let (x, y) = (Rows::dense(&x, width), Rows::dense(&y, width));
            let sum = |c: usize, y: &dyn Fn(usize) -> f32| {
                let terms = (0..rows).map(|t| f64::from(x.row(t)[c]) * f64::from(y(t)));
                f64::from(before[c]) + terms.sum::<f64>()
            };
            let sums: Vec<f64> = (0..width).map(|c| sum(c, &|_| 1.0)).collect();
            let dots: Vec<f64> = (0..width).map(|c| sum(c, &|t| y.row(t)[c])).collect();
            for &level in Level::present() {
                for (y, want) in [(None, &sums), (Some(y), &dots)] {
                    let mut out = before.clone();
                    add_columns(level, x, y, &mut out);
                    close(&out, want, 1e-6);
                }
            }
        }
    }

    #[test]
    fn sums_longer_than_a_piece_and_more_rows_than_a_block_equal_the_definition() {
        // 1100 is two pieces of widened weights, and five of a product.
        check(300, 1100, 20, 21);
        check(1100, 300, 20, 22);
        check(1030, 5, 33, 23);
    }

    #[test]
    fn a_million_equal_terms_by_column_keep_their_digits() {
        let x = vec![0.1f32; 1 << 20];
        let mut sum = [0.0];
        column_sums(Level::detect(), Rows::dense(&x, 1), &mut sum);
        let want = f64::from(0.1f32) * f64::from(1 << 20);
        assert!((f64::from(sum[0]) / want - 1.0).abs() < 1e-6, "{} is not {want}", sum[0]);
    }

    #[test]
    fn a_row_of_dx_has_the_same_bits_in_any_batch() {
        let mut rng = Rng::new(24);
        let (rows, features, width) = (270, 77, 35);
        let (dout, w) = (rng.floats(rows * features), rng.floats(features * width));
        let run = |first: usize, count: usize| {
            let mut dx = vec![f32::NAN; count * width];
            let dout = Rows::dense(&dout, features).slice(first, count);
            linear_backward_input(Level::detect(), dout, Weights::F32(&w), &mut dx);
            dx
        };
        let whole = run(0, rows);
        for (first, count) in [(0, 1), (255, 2), (100, 170), (269, 1)] {
            assert_eq!(run(first, count), whole[first * width..(first + count) * width]);
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let mut rng = Rng::new(25);
        let (rows, features, width) = (1100, 600, 130);
        let (x, dout) = (rng.floats(rows * width), rng.floats(rows * features));
        let w = rng.floats(features * width);
        let (x, dout) = (Rows::dense(&x, width), Rows::dense(&dout, features));
        assert_threads_do_not_matter(|| {
            let (mut dx, mut dw) = (vec![0.0; rows * width], vec![0.0; features * width]);
            linear_backward_input(Level::detect(), dout, Weights::F32(&w), &mut dx);
            linear_backward_weight(Level::detect(), dout, x, &mut dw);
            let (mut sums, mut dots) = (vec![0.0; width], vec![0.0; width]);
            column_sums(Level::detect(), x, &mut sums);
            column_dots(Level::detect(), x, x, &mut dots);
            (dx, dw, sums, dots)
        });
    }

    #[test]
    #[should_panic(expected = "dx")]
    fn a_gradient_of_another_length_panics() {
        let dout = [0.0; 6];
        let w = Weights::F32(&[0.0; 12]);
        linear_backward_input(Level::detect(), Rows::dense(&dout, 3), w, &mut [0.0; 7]);
    }
}
