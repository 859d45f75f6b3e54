//! Small matrices that stay in a worker's cache, and their three products.
//!
//! | function | result | inner loop |
//! |---|---|---|
//! | [`multiply`] | `A B` | 6 rows by two vectors of columns, one row of B after another |
//! | [`multiply_transposed`] | `Aᵀ B` | the same |
//! | [`dots`] | `A Bᵀ` | 3 by 4 dot products along the rows |
//!
//! So an operand is read by rows whichever product it enters, and nothing is ever transposed. Rows and
//! columns are filled up to whole tiles, so that products have no edges. What a product leaves in the
//! filling has no meaning; [`Matrix::load`] leaves zeros beside its columns, which [`dots`] relies on.
//! No other function mixes filling into a result.

use crate::aligned::{LINE, start};
use crate::product::add_scaled;
use crate::rows::Rows;
use crate::simd::{Simd, dispatch};

/// Rows of a tile of [`multiply`] and [`multiply_transposed`].
const TILE: usize = 6;
/// Rows and columns of a tile of [`dots`].
const DOTS_HEIGHT: usize = 3;
const DOTS_WIDTH: usize = 4;
/// Rows are filled up to a multiple of this: whole tiles of each product.
const WHOLE_ROWS: usize = 12;
/// Columns are filled up to a multiple of this: two vectors of the widest instruction set.
const WHOLE_COLUMNS: usize = 32;

/// A `[rows, cols]` matrix whose rows start on cache lines.
pub(super) struct Matrix {
    data: Vec<f32>,
    /// Where the first row starts.
    start: usize,
    rows: usize,
    cols: usize,
    /// From row to row: an odd number of cache lines, so that a column does not fall into few sets
    /// of the cache.
    stride: usize,
}

/// A matrix to be read.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    /// From the first row on.
    data: &'a [f32],
    rows: usize,
    cols: usize,
    stride: usize,
}

/// Copies of matrices of one size, one after another.
#[derive(Default)]
pub(super) struct Stack {
    data: Vec<f32>,
    start: usize,
}

/// Which entries of a product's left operand, or of the result of [`dots`], count.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// All.
    Full,
    /// Those not above the diagonal; of an operand the others are 0, of a result they are anything.
    Lower,
}

impl Matrix {
    /// A matrix of zeros, with room for `rows` rows.
    pub(super) fn zeros(rows: usize, cols: usize) -> Self {
        let stride = cols.next_multiple_of(WHOLE_COLUMNS) + LINE;
        // One row more, so that a tile of columns can be cut from its first float on in whole strides.
        let len = (rows.next_multiple_of(WHOLE_ROWS) + 1) * stride;
        let data = vec![0.0; len + LINE];
        let start = start(&data);
        Self { data, start, rows, cols, stride }
    }

    /// Makes this a `[rows, cols]` matrix of those entries, which there must be room for.
    pub(super) fn set_size(&mut self, rows: usize, cols: usize) {
        assert!((rows.next_multiple_of(WHOLE_ROWS) + 1) * self.stride <= self.data.len(), "rows");
        assert!(cols <= self.stride - LINE, "cols");
        (self.rows, self.cols) = (rows, cols);
    }

    /// Becomes a copy of `from`.
    pub(super) fn load(&mut self, from: Rows<'_>) {
        self.set_size(from.len(), from.width());
        for i in 0..from.len() {
            let (row, filling) = self.whole_row_mut(i).split_at_mut(from.width());
            row.copy_from_slice(from.row(i));
            filling.fill(0.0);
        }
    }

    /// Becomes a `[rows, cols]` matrix of zeros.
    pub(super) fn clear(&mut self, rows: usize, cols: usize) {
        self.set_size(rows, cols);
        (0..rows).for_each(|i| self.whole_row_mut(i).fill(0.0));
    }

    /// Puts zeros above the diagonal, and beside it.
    pub(super) fn clear_above_diagonal(&mut self) {
        for i in 0..self.rows {
            self.whole_row_mut(i)[i + 1..].fill(0.0);
        }
    }

    /// Row `i`.
    #[inline(always)]
    pub(super) fn row(&self, i: usize) -> &[f32] {
        &self.data[self.start + i * self.stride..][..self.cols]
    }

    /// Row `i`.
    #[inline(always)]
    pub(super) fn row_mut(&mut self, i: usize) -> &mut [f32] {
        let cols = self.cols;
        &mut self.at_mut(i, 0)[..cols]
    }

    /// Row `i` with its filling.
    #[inline(always)]
    pub(super) fn whole_row_mut(&mut self, i: usize) -> &mut [f32] {
        let width = self.stride - LINE;
        &mut self.at_mut(i, 0)[..width]
    }

    #[inline(always)]
    pub(super) fn view(&self) -> View<'_> {
        let data = &self.data[self.start..];
        View { data, rows: self.rows, cols: self.cols, stride: self.stride }
    }

    /// Everything from row `i`, column `j` on.
    #[inline(always)]
    fn at_mut(&mut self, i: usize, j: usize) -> &mut [f32] {
        &mut self.data[self.start + i * self.stride + j..]
    }
}

impl<'a> View<'a> {
    /// Row `i`.
    #[inline(always)]
    pub(super) fn row(self, i: usize) -> &'a [f32] {
        &self.at(i, 0)[..self.cols]
    }

    /// Row `i` with its filling.
    #[inline(always)]
    pub(super) fn whole_row(self, i: usize) -> &'a [f32] {
        &self.at(i, 0)[..self.stride - LINE]
    }

    /// Everything from row `i`, column `j` on.
    #[inline(always)]
    fn at(self, i: usize, j: usize) -> &'a [f32] {
        &self.data[i * self.stride + j..]
    }
}

impl Stack {
    /// Empties the stack, and makes room for `count` matrices like `matrix`.
    pub(super) fn reset(&mut self, count: usize, matrix: &Matrix) {
        self.data.clear();
        self.data.reserve_exact(LINE + count * Self::len(matrix) + matrix.stride);
        self.start = start(&self.data);
        self.data.resize(self.start, 0.0);
    }

    /// Puts a copy of `matrix` on top.
    pub(super) fn push(&mut self, matrix: &Matrix) {
        self.data.extend_from_slice(&matrix.data[matrix.start..][..Self::len(matrix)]);
    }

    /// Matrix `i`, which has the size of `like`.
    pub(super) fn get(&self, i: usize, like: &Matrix) -> View<'_> {
        View { data: &self.data[self.start + i * Self::len(like)..], ..like.view() }
    }

    /// Floats of a matrix and its filling, as far as products read it.
    fn len(matrix: &Matrix) -> usize {
        (matrix.rows.next_multiple_of(DOTS_WIDTH) + 1) * matrix.stride
    }
}

dispatch! {
    /// `out = keep * out + a b`; with a `keep` of 0 it does not matter what `out` holds.
    pub(super) fn multiply = multiply_body(out: &mut Matrix, keep: f32, a: View<'_>, part: Part, b: View<'_>)
}

#[inline(always)]
fn multiply_body<S: Simd>(
    simd: S,
    out: &mut Matrix,
    keep: f32,
    a: View<'_>,
    part: Part,
    b: View<'_>,
) {
    debug_assert_eq!(a.cols, b.rows);
    out.set_size(a.rows, b.cols);
    for j in (0..b.cols).step_by(2 * S::LANES) {
        for i in (0..a.rows).step_by(TILE) {
            let depth = if part == Part::Lower { b.rows.min(i + TILE) } else { b.rows };
            let mut left: [&[f32]; TILE] = [&[]; TILE];
            for r in 0..TILE {
                left[r] = &a.at(i + r, 0)[..depth];
            }
            let mut acc = load_tile(simd, keep, out, i, j);
            for (k, right) in (0..depth).zip(b.at(0, j).chunks_exact(b.stride)) {
                let right = load_pair(simd, right);
                for r in 0..TILE {
                    acc[r] = add_scaled(simd, acc[r], left[r][k], right);
                }
            }
            store_tile(simd, &acc, out, i, j);
        }
    }
}

dispatch! {
    /// `out = keep * out + aᵀ b`; with a `keep` of 0 it does not matter what `out` holds.
    pub(super) fn multiply_transposed = multiply_transposed_body(
        out: &mut Matrix, keep: f32, a: View<'_>, part: Part, b: View<'_>,
    )
}

#[inline(always)]
fn multiply_transposed_body<S: Simd>(
    simd: S,
    out: &mut Matrix,
    keep: f32,
    a: View<'_>,
    part: Part,
    b: View<'_>,
) {
    debug_assert_eq!(a.rows, b.rows);
    out.set_size(a.cols, b.cols);
    for j in (0..b.cols).step_by(2 * S::LANES) {
        for i in (0..a.cols).step_by(TILE) {
            let first = if part == Part::Lower { a.rows.min(i) } else { 0 };
            let left = a.at(first, i).chunks_exact(a.stride);
            let right = b.at(first, j).chunks_exact(b.stride);
            let mut acc = load_tile(simd, keep, out, i, j);
            for ((left, right), _) in left.zip(right).zip(first..a.rows) {
                let left = &left[..TILE];
                let right = load_pair(simd, right);
                for r in 0..TILE {
                    acc[r] = add_scaled(simd, acc[r], left[r], right);
                }
            }
            store_tile(simd, &acc, out, i, j);
        }
    }
}

dispatch! {
    /// `out = a bᵀ`; the filling of one of the two must be zeros, and of the other no infinity or NaN.
    pub(super) fn dots = dots_body(out: &mut Matrix, part: Part, a: View<'_>, b: View<'_>)
}

#[inline(always)]
fn dots_body<S: Simd>(simd: S, out: &mut Matrix, part: Part, a: View<'_>, b: View<'_>) {
    debug_assert_eq!(a.cols, b.cols);
    out.set_size(a.rows, b.rows);
    let width = a.cols.next_multiple_of(S::LANES);
    for j in (0..b.rows).step_by(DOTS_WIDTH) {
        let mut right: [&[S::Chunk]; DOTS_WIDTH] = [&[]; DOTS_WIDTH];
        for c in 0..DOTS_WIDTH {
            right[c] = S::chunks(&b.at(j + c, 0)[..width]).0;
        }
        // The first tile of rows that reaches the diagonal.
        let first = if part == Part::Lower { j / DOTS_HEIGHT * DOTS_HEIGHT } else { 0 };
        for i in (first..a.rows).step_by(DOTS_HEIGHT) {
            let mut left: [&[S::Chunk]; DOTS_HEIGHT] = [&[]; DOTS_HEIGHT];
            for r in 0..DOTS_HEIGHT {
                left[r] = S::chunks(&a.at(i + r, 0)[..width]).0;
            }
            let mut acc = [[simd.splat(0.0); DOTS_WIDTH]; DOTS_HEIGHT];
            for k in 0..width / S::LANES {
                let mut rows = [simd.splat(0.0); DOTS_HEIGHT];
                for r in 0..DOTS_HEIGHT {
                    rows[r] = simd.load(&left[r][k]);
                }
                for c in 0..DOTS_WIDTH {
                    let column = simd.load(&right[c][k]);
                    for r in 0..DOTS_HEIGHT {
                        acc[r][c] = simd.mul_add(rows[r], column, acc[r][c]);
                    }
                }
            }
            for r in 0..DOTS_HEIGHT {
                out.at_mut(i + r, j)[..DOTS_WIDTH].copy_from_slice(&simd.reduce4(acc[r]));
            }
        }
    }
}

dispatch! {
    /// Multiplies row i of `a` by `factors[i]`.
    pub(super) fn scale_rows = scale_rows_body(a: &mut Matrix, factors: &[f32])
}

#[inline(always)]
fn scale_rows_body<S: Simd>(simd: S, a: &mut Matrix, factors: &[f32]) {
    for (i, factor) in (0..a.rows).zip(factors) {
        let factor = simd.splat(*factor);
        for x in S::chunks_mut(a.whole_row_mut(i)).0 {
            simd.store(simd.mul(factor, simd.load(x)), x);
        }
    }
}

dispatch! {
    /// `out[i]` becomes the dot product of rows i of `a` and `b`.
    pub(super) fn row_dots = row_dots_body(out: &mut [f32], a: View<'_>, b: View<'_>)
}

#[inline(always)]
fn row_dots_body<S: Simd>(simd: S, out: &mut [f32], a: View<'_>, b: View<'_>) {
    debug_assert_eq!((a.rows, a.cols), (b.rows, b.cols));
    for (i, out) in out[..a.rows].iter_mut().enumerate() {
        let (a, a_rest) = S::chunks(a.row(i));
        let (b, b_rest) = S::chunks(b.row(i));
        let mut sum = simd.mul(simd.load(&S::tail(a_rest)), simd.load(&S::tail(b_rest)));
        for (a, b) in a.iter().zip(b) {
            sum = simd.mul_add(simd.load(a), simd.load(b), sum);
        }
        *out = simd.reduce(sum);
    }
}

dispatch! {
    /// Adds to `out[j]` the dot product of columns j of `a` and `b`.
    pub(super) fn add_column_dots = add_column_dots_body(out: &mut [f64], a: View<'_>, b: View<'_>)
}

#[inline(always)]
fn add_column_dots_body<S: Simd>(simd: S, out: &mut [f64], a: View<'_>, b: View<'_>) {
    debug_assert_eq!((a.rows, a.cols), (b.rows, b.cols));
    for (j, out) in out.chunks_mut(S::LANES).enumerate() {
        let mut sum = simd.splat(0.0);
        for i in 0..a.rows {
            let a = simd.load(&S::chunks(a.whole_row(i)).0[j]);
            let b = simd.load(&S::chunks(b.whole_row(i)).0[j]);
            sum = simd.mul_add(a, b, sum);
        }
        let mut sums = S::ZERO;
        simd.store(sum, &mut sums);
        let mut floats = [0.0; LINE];
        S::write_tail(&sums, &mut floats[..S::LANES]);
        for (out, sum) in out.iter_mut().zip(floats) {
            *out += f64::from(sum);
        }
    }
}

dispatch! {
    /// Adds to column j of `out` column j of `a` times `factors[j]`.
    pub(super) fn add_scaled_columns = add_scaled_columns_body(
        out: &mut Matrix, a: View<'_>, factors: &[f32],
    )
}

#[inline(always)]
fn add_scaled_columns_body<S: Simd>(_simd: S, out: &mut Matrix, a: View<'_>, factors: &[f32]) {
    for i in 0..a.rows {
        for ((out, a), factor) in out.row_mut(i).iter_mut().zip(a.row(i)).zip(factors) {
            *out += factor * a;
        }
    }
}

dispatch! {
    /// `out += a`
    pub(super) fn add = add_body(out: &mut Matrix, a: View<'_>)
}

#[inline(always)]
fn add_body<S: Simd>(_simd: S, out: &mut Matrix, a: View<'_>) {
    debug_assert_eq!((out.rows, out.cols), (a.rows, a.cols));
    for i in 0..a.rows {
        for (out, a) in out.row_mut(i).iter_mut().zip(a.row(i)) {
            *out += a;
        }
    }
}

/// The first two vectors of a row.
#[inline(always)]
fn load_pair<S: Simd>(simd: S, row: &[f32]) -> [S::F; 2] {
    let (pair, _) = S::chunks(&row[..2 * S::LANES]);
    [simd.load(&pair[0]), simd.load(&pair[1])]
}

#[inline(always)]
fn load_tile<S: Simd>(
    simd: S,
    keep: f32,
    out: &mut Matrix,
    i: usize,
    j: usize,
) -> [[S::F; 2]; TILE] {
    let mut acc = [[simd.splat(0.0); 2]; TILE];
    if keep != 0.0 {
        let keep = simd.splat(keep);
        for r in 0..TILE {
            let pair = load_pair(simd, out.at_mut(i + r, j));
            acc[r] = [simd.mul(keep, pair[0]), simd.mul(keep, pair[1])];
        }
    }
    acc
}

#[inline(always)]
fn store_tile<S: Simd>(simd: S, acc: &[[S::F; 2]; TILE], out: &mut Matrix, i: usize, j: usize) {
    for r in 0..TILE {
        let (pair, _) = S::chunks_mut(&mut out.at_mut(i + r, j)[..2 * S::LANES]);
        simd.store(acc[r][0], &mut pair[0]);
        simd.store(acc[r][1], &mut pair[1]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Level;
    use crate::testing::{Rng, close};

    fn matrix(rng: &mut Rng, rows: usize, cols: usize, part: Part) -> Matrix {
        let mut data = rng.floats(rows * cols);
        for i in 0..rows {
            for j in (0..cols).filter(|j| part == Part::Lower && *j > i) {
                data[i * cols + j] = 0.0;
            }
        }
        let mut matrix = Matrix::zeros(rows, cols);
        matrix.load(Rows::new(&data, rows, cols, 0, cols));
        matrix
    }

    /// Whether `got[i, j]` is the sum over k of `term(i, j, k)` plus `keep * old[i, j]`.
    fn check(
        got: &Matrix,
        part: Part,
        keep: f32,
        old: &[Vec<f32>],
        depth: usize,
        term: impl Fn(usize, usize, usize) -> f32,
    ) {
        for (i, old) in old.iter().enumerate() {
            let cols = if part == Part::Lower { got.cols.min(i + 1) } else { got.cols };
            let want: Vec<f64> = (0..cols)
                .map(|j| {
                    let sum: f64 = (0..depth).map(|k| f64::from(term(i, j, k))).sum();
                    sum + if keep == 0.0 { 0.0 } else { f64::from(keep * old[j]) }
                })
                .collect();
            close(&got.row(i)[..cols], &want, 1e-5);
        }
    }

    #[test]
    fn products_equal_their_definitions_for_any_size_and_part() {
        let mut rng = Rng::new(5);
        let sizes = [(1, 1, 1), (5, 7, 3), (6, 16, 12), (13, 33, 20), (36, 64, 36), (48, 20, 80)];
        for &level in Level::present() {
            for (m, n, depth) in sizes {
                for part in [Part::Full, Part::Lower] {
                    for keep in [0.0, 1.0, 0.5] {
                        let mut out = matrix(&mut rng, m, n, Part::Full);
                        if keep == 0.0 {
                            out.data.fill(f32::NAN);
                        }
                        let old: Vec<Vec<f32>> = (0..m).map(|i| out.row(i).to_vec()).collect();
                        let b = matrix(&mut rng, depth, n, Part::Full);
                        let a = matrix(&mut rng, m, depth, part);
                        multiply(level, &mut out, keep, a.view(), part, b.view());
                        check(&out, Part::Full, keep, &old, depth, |i, j, k| {
                            a.row(i)[k] * b.row(k)[j]
                        });

                        for (i, old) in old.iter().enumerate() {
                            out.row_mut(i).copy_from_slice(old);
                        }
                        let a = matrix(&mut rng, depth, m, part);
                        multiply_transposed(level, &mut out, keep, a.view(), part, b.view());
                        check(&out, Part::Full, keep, &old, depth, |i, j, k| {
                            a.row(k)[i] * b.row(k)[j]
                        });
                    }
                    let old = vec![vec![0.0; n]; m];
                    let a = matrix(&mut rng, m, depth, Part::Full);
                    let b = matrix(&mut rng, n, depth, Part::Full);
                    let mut out = Matrix::zeros(m, n);
                    dots(level, &mut out, part, a.view(), b.view());
                    check(&out, part, 0.0, &old, depth, |i, j, k| a.row(i)[k] * b.row(j)[k]);
                }
            }
        }
    }

    #[test]
    fn operations_on_rows_and_columns_equal_their_definitions() {
        let mut rng = Rng::new(6);
        for &level in Level::present() {
            for (rows, cols) in [(1, 1), (5, 7), (9, 16), (20, 35)] {
                let a = matrix(&mut rng, rows, cols, Part::Full);
                let b = matrix(&mut rng, rows, cols, Part::Full);
                let product = |i: usize, j: usize| f64::from(a.row(i)[j] * b.row(i)[j]);
                let mut dots = vec![f32::NAN; rows + 1];
                row_dots(level, &mut dots, a.view(), b.view());
                let want: Vec<f64> =
                    (0..rows).map(|i| (0..cols).map(|j| product(i, j)).sum()).collect();
                close(&dots[..rows], &want, 1e-6);

                let mut dots = vec![1.0; cols];
                add_column_dots(level, &mut dots, a.view(), b.view());
                for (j, dot) in dots.into_iter().enumerate() {
                    let want = 1.0 + (0..rows).map(|i| product(i, j)).sum::<f64>();
                    assert!((dot - want).abs() < 1e-5, "{dot} is not {want}");
                }

                let factors = rng.floats(rows.max(cols));
                let mut out = Matrix::zeros(rows, cols);
                add(level, &mut out, a.view());
                scale_rows(level, &mut out, &factors);
                add_scaled_columns(level, &mut out, b.view(), &factors);
                for i in 0..rows {
                    for j in 0..cols {
                        let want = a.row(i)[j] * factors[i] + b.row(i)[j] * factors[j];
                        assert!((out.row(i)[j] - want).abs() < 1e-6);
                    }
                }
            }
        }
    }

    #[test]
    fn a_stack_gives_back_what_was_pushed() {
        let mut rng = Rng::new(7);
        let matrices: Vec<Matrix> = (0..3).map(|_| matrix(&mut rng, 7, 5, Part::Full)).collect();
        let (mut stack, like) = (Stack::default(), Matrix::zeros(7, 5));
        for _ in 0..2 {
            stack.reset(3, &like);
            for matrix in &matrices {
                stack.push(matrix);
            }
            for (k, matrix) in matrices.iter().enumerate() {
                let got = stack.get(k, &like);
                (0..7).for_each(|i| assert_eq!(got.row(i), matrix.row(i)));
            }
        }
    }

    #[test]
    fn a_matrix_of_no_columns_is_a_matrix() {
        let (mut out, none) = (Matrix::zeros(4, 5), Matrix::zeros(4, 0));
        out.row_mut(3).fill(7.0);
        for &level in Level::present() {
            dots(level, &mut out, Part::Full, none.view(), Matrix::zeros(5, 0).view());
            assert_eq!(out.row(3), [0.0; 5]);
            let mut product = Matrix::zeros(5, 0);
            multiply_transposed(level, &mut product, 1.0, out.view(), Part::Full, none.view());
        }
    }

    #[test]
    #[should_panic(expected = "rows")]
    fn more_rows_than_there_is_room_for_panic() {
        Matrix::zeros(12, 3).set_size(13, 3);
    }
}
