//! Gradients of the root-mean-square norms.
//!
//! With `r = 1 / sqrt(mean(x²) + eps)` and `g = dout * weight`:
//!
//! ```text
//! dx      = r * (g - x * r² * mean(g * x))
//! dweight = sum over rows of dout * x * r
//! ```
//!
//! The gate before or after it is a gated linear unit with silu, and has that one's gradients. What the
//! forward computed is computed again: two passes over a row that is in the cache. Each block of rows
//! adds up its own gradient of the weight, and those of all blocks are then summed in their order.

use rayon::prelude::*;

use crate::activation::gate;
use crate::activation_backward::glu_row_backward;
use crate::linear_backward::column_sums;
use crate::norm::{GatedNorm, dot, normalize};
use crate::rows::Rows;
use crate::simd::{Level, Simd, dispatch};

/// Rows per parallel task, whose gradients of the weight are one partial sum.
const ROW_BLOCK: usize = 32;

/// The gradients of [`rms_norm`](crate::rms_norm).
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `x`, `weight`, `eps` | `[T, width]`, `[width]` | as in the forward |
/// | `dout` | `[T, width]` | gradient of the output |
/// | `dx` | `[T, width]` | written |
/// | `dweight` | `[width]` | added to |
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn rms_norm_backward(
    level: Level,
    x: Rows<'_>,
    weight: &[f32],
    eps: f32,
    dout: Rows<'_>,
    dx: &mut [f32],
    dweight: &mut [f32],
) {
    let width = x.width();
    assert_eq!(weight.len(), width, "weight");
    assert_eq!((dout.len(), dout.width()), (x.len(), width), "dout");
    assert_eq!(dx.len(), x.len() * width, "dx");
    assert_eq!(dweight.len(), width, "dweight");
    if dx.is_empty() {
        return;
    }
    let mut sums = vec![0.0; x.len().div_ceil(ROW_BLOCK) * width];
    let blocks = dx.par_chunks_mut(ROW_BLOCK * width).zip(sums.par_chunks_mut(width));
    blocks.enumerate().for_each(|(block, (dx, sums))| {
        for (i, dx) in dx.chunks_exact_mut(width).enumerate() {
            let row = block * ROW_BLOCK + i;
            normalize_backward(level, x.row(row), weight, eps, dout.row(row), dx, sums);
        }
    });
    column_sums(level, Rows::dense(&sums, width), dweight);
}

/// The gradients of [`gated_rms_norm`](crate::gated_rms_norm).
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `y`, `z`, `norm` | `[T, width]` | as in the forward |
/// | `dout` | `[T, width]` | gradient of the output |
/// | `dy`, `dz` | `[T, width]` | written |
/// | `dweight` | as the weight | optional; added to |
///
/// # Panics
///
/// If the lengths disagree, `ngroups` does not divide the width, or there is a `dweight` without a weight.
#[track_caller]
pub fn gated_rms_norm_backward(
    y: Rows<'_>,
    z: Rows<'_>,
    norm: GatedNorm<'_>,
    dout: Rows<'_>,
    dy: &mut [f32],
    dz: &mut [f32],
    dweight: Option<&mut [f32]>,
) {
    let (len, width) = (y.len(), y.width());
    let group = norm.group(width);
    assert_eq!((z.len(), z.width()), (len, width), "z");
    assert_eq!((dout.len(), dout.width()), (len, width), "dout");
    assert_eq!(dy.len(), len * width, "dy");
    assert_eq!(dz.len(), len * width, "dz");
    let wanted = dweight.as_ref().map(|w| w.len());
    assert!(wanted.is_none_or(|len| norm.weight.is_some_and(|w| w.len() == len)), "dweight");
    if dy.is_empty() {
        return;
    }
    let ones = vec![1.0; if norm.weight.is_none() { group } else { 0 }];
    let kernel = Kernel { norm, weight: norm.weight.unwrap_or(&ones) };
    let mut sums = vec![0.0; len.div_ceil(ROW_BLOCK) * width];
    let grads = dy.par_chunks_mut(ROW_BLOCK * width).zip(dz.par_chunks_mut(ROW_BLOCK * width));
    let blocks = grads.zip(sums.par_chunks_mut(width)).enumerate();
    blocks.for_each_init(
        || (vec![0.0; width], vec![0.0; width]),
        |scratch, (block, ((dy, dz), sums))| {
            let rows = dy.chunks_exact_mut(width).zip(dz.chunks_exact_mut(width));
            for (i, (dy, dz)) in rows.enumerate() {
                let row = block * ROW_BLOCK + i;
                let inputs = Inputs { y: y.row(row), z: z.row(row), dout: dout.row(row) };
                let out = Gradients { dy, dz, dweight: sums };
                kernel.row(inputs, out, scratch);
            }
        },
    );
    if let Some(dweight) = dweight {
        // Of a weight that groups share, each group is a row.
        column_sums(norm.level, Rows::dense(&sums, dweight.len()), dweight);
    }
}

/// The gradient of [`l2_norm`](crate::l2_norm): with y its output, `dx = (dout - y (y·dout)) / sqrt(sum(x²) + eps)`.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `x`, `group`, `eps` | `[T, width]` | as in the forward |
/// | `dout` | `[T, width]` | gradient of the output |
/// | `dx` | `[T, width]` | written |
///
/// # Panics
///
/// If the lengths disagree or `group` does not divide the width.
#[track_caller]
pub fn l2_norm_backward(
    level: Level,
    x: Rows<'_>,
    group: usize,
    eps: f32,
    dout: Rows<'_>,
    dx: &mut [f32],
) {
    let width = x.width();
    assert!(group > 0 && width.is_multiple_of(group), "group");
    assert_eq!((dout.len(), dout.width()), (x.len(), width), "dout");
    assert_eq!(dx.len(), x.len() * width, "dx");
    dx.par_chunks_mut(ROW_BLOCK * width.max(1)).enumerate().for_each(|(block, dx)| {
        for (i, dx) in dx.chunks_exact_mut(width).enumerate() {
            let row = block * ROW_BLOCK + i;
            let groups = x.row(row).chunks_exact(group).zip(dout.row(row).chunks_exact(group));
            for (dx, (x, dout)) in dx.chunks_exact_mut(group).zip(groups) {
                let square = dot(level, x, x) + eps;
                let (length, share) = (square.sqrt(), dot(level, x, dout) / square);
                for (dx, (x, dout)) in dx.iter_mut().zip(x.iter().zip(dout)) {
                    *dx = (dout - x * share) / length;
                }
            }
        }
    });
}

/// A row of each input, `[width]`.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    y: &'a [f32],
    z: &'a [f32],
    dout: &'a [f32],
}

/// Where a row's gradients go, `[width]`: written, but for the weight's, which is added to.
struct Gradients<'a> {
    dy: &'a mut [f32],
    dz: &'a mut [f32],
    dweight: &'a mut [f32],
}

/// What all rows share.
#[derive(Clone, Copy)]
struct Kernel<'a> {
    norm: GatedNorm<'a>,
    weight: &'a [f32],
}

impl Kernel<'_> {
    fn row(
        &self,
        inputs: Inputs<'_>,
        out: Gradients<'_>,
        (between, dbetween): &mut (Vec<f32>, Vec<f32>),
    ) {
        let Inputs { y, z, dout } = inputs;
        let Gradients { dy, dz, dweight } = out;
        let Self { norm, weight } = *self;
        let level = norm.level;
        let group = y.len() / norm.ngroups;
        between.copy_from_slice(y);
        if norm.norm_before_gate {
            let weights = weight.chunks_exact(group).cycle();
            for (y, weight) in between.chunks_exact_mut(group).zip(weights) {
                normalize(level, y, weight, norm.eps);
            }
            glu_row_backward(level, norm.activation, z, between, dout, dz, dbetween);
            self.groups(y, dbetween, dy, dweight);
        } else {
            gate(level, norm.activation, between, z);
            self.groups(between, dout, dbetween, dweight);
            glu_row_backward(level, norm.activation, z, y, dbetween, dz, dy);
        }
    }

    /// The gradients of the norm alone, group by group.
    fn groups(&self, x: &[f32], dout: &[f32], dx: &mut [f32], dweight: &mut [f32]) {
        let group = x.len() / self.norm.ngroups;
        for first in (0..x.len()).step_by(group) {
            let range = first..first + group;
            normalize_backward(
                self.norm.level,
                &x[range.clone()],
                &self.weight[first % self.weight.len()..][..group],
                self.norm.eps,
                &dout[range.clone()],
                &mut dx[range.clone()],
                &mut dweight[range],
            );
        }
    }
}

dispatch! {
    fn normalize_backward = normalize_backward_body(
        x: &[f32], weight: &[f32], eps: f32, dout: &[f32], dx: &mut [f32], dweight: &mut [f32],
    )
}

/// Writes dx of one mean and adds to dweight; all slices have one length.
#[inline(always)]
fn normalize_backward_body<S: Simd>(
    simd: S,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    dout: &[f32],
    dx: &mut [f32],
    dweight: &mut [f32],
) {
    let width = x.len() as f32;
    let (xs, x_rest) = S::chunks(x);
    let (weights, weight_rest) = S::chunks(weight);
    let (douts, dout_rest) = S::chunks(dout);
    let (dxs, dx_rest) = S::chunks_mut(dx);
    let (dweights, dweight_rest) = S::chunks_mut(dweight);
    let x_last = simd.load(&S::tail(x_rest));
    let dout_last = simd.load(&S::tail(dout_rest));
    let g_last = simd.mul(dout_last, simd.load(&S::tail(weight_rest)));

    let (mut squares, mut dots) = (simd.mul(x_last, x_last), simd.mul(g_last, x_last));
    for ((x, weight), dout) in xs.iter().zip(weights).zip(douts) {
        let x = simd.load(x);
        let g = simd.mul(simd.load(dout), simd.load(weight));
        squares = simd.mul_add(x, x, squares);
        dots = simd.mul_add(g, x, dots);
    }
    let r = 1.0 / (simd.reduce(squares) / width + eps).sqrt();
    let pull = simd.splat(-r * (r * simd.reduce(dots) / width));
    let r = simd.splat(r);

    let rows = xs.iter().zip(weights).zip(douts).zip(dxs).zip(dweights);
    for ((((x, weight), dout), dx), dweight) in rows {
        let (x, dout) = (simd.load(x), simd.load(dout));
        let g = simd.mul(dout, simd.load(weight));
        simd.store(simd.mul(r, simd.mul_add(x, pull, g)), dx);
        simd.store(simd.mul_add(dout, simd.mul(x, r), simd.load(dweight)), dweight);
    }
    let mut tail = S::tail(dweight_rest);
    simd.store(simd.mul_add(dout_last, simd.mul(x_last, r), simd.load(&tail)), &mut tail);
    S::write_tail(&tail, dweight_rest);
    simd.store(simd.mul(r, simd.mul_add(x_last, pull, g_last)), &mut tail);
    S::write_tail(&tail, dx_rest);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::activation::Activation;
    use crate::gradcheck::{
        assert_gradient, assert_threads_do_not_matter, dot, numeric_gradient, widen,
    };
    use crate::testing::{Rng, close};

    const EPS: f64 = 1e-5;
    /// f32 against f64: sums over a few hundred terms, and the derivative of silu.
    const TOLERANCE: f64 = 4e-6;

    /// How a row is gated: not at all, before its norm, or after it.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Gate {
        None,
        First,
        Last,
    }

    fn sigmoid(z: f64) -> f64 {
        1.0 / (1.0 + (-z).exp())
    }

    /// What a gate goes through, and its derivative.
    fn value_and_slope(act: Activation, z: f64) -> (f64, f64) {
        let s = sigmoid(z);
        match act {
            Activation::Silu => (z * s, s * (1.0 + z * (1.0 - s))),
            Activation::Sigmoid => (s, s * (1.0 - s)),
            other => panic!("{other:?}"),
        }
    }

    /// One row by definition, in f64.
    fn forward(
        y: &[f64],
        z: &[f64],
        weight: &[f64],
        ngroups: usize,
        gate: Gate,
        act: Activation,
    ) -> Vec<f64> {
        let group = y.len() / ngroups;
        let silu = |i: usize| value_and_slope(act, z[i]).0;
        let before = |i: usize| y[i] * if gate == Gate::First { silu(i) } else { 1.0 };
        let out = |i: usize| {
            let first = i / group * group;
            let mean =
                (first..first + group).map(|j| before(j).powi(2)).sum::<f64>() / group as f64;
            let after = if gate == Gate::Last { silu(i) } else { 1.0 };
            before(i) / (mean + EPS).sqrt() * weight[i] * after
        };
        (0..y.len()).map(out).collect()
    }

    /// The definition, in f64: gradients of y, z and weight, of one row.
    fn reference(
        y: &[f64],
        z: &[f64],
        weight: &[f64],
        ngroups: usize,
        gate: Gate,
        act: Activation,
        dout: &[f64],
    ) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let group = y.len() / ngroups;
        let n = group as f64;
        let (mut dy, mut dz, mut dweight) = (dout.to_vec(), vec![0.0; y.len()], dout.to_vec());
        for first in (0..y.len()).step_by(group) {
            let all = first..first + group;
            let silu = |i: usize| value_and_slope(act, z[i]).0;
            let slope = |i: usize| value_and_slope(act, z[i]).1;
            let x = |i: usize| y[i] * if gate == Gate::First { silu(i) } else { 1.0 };
            let dn = |i: usize| dout[i] * if gate == Gate::Last { silu(i) } else { 1.0 };
            let scale = 1.0 / (all.clone().map(|i| x(i).powi(2)).sum::<f64>() / n + EPS).sqrt();
            let mean = all.clone().map(|i| dn(i) * weight[i] * x(i)).sum::<f64>() / n;
            for i in all {
                dweight[i] = dn(i) * x(i) * scale;
                let dx = scale * dn(i) * weight[i] - scale.powi(3) * mean * x(i);
                (dy[i], dz[i]) = match gate {
                    Gate::None => (dx, 0.0),
                    Gate::First => (dx * silu(i), dx * y[i] * slope(i)),
                    Gate::Last => (dx, dout[i] * x(i) * scale * weight[i] * slope(i)),
                };
            }
        }
        (dy, dz, dweight)
    }

    #[test]
    fn the_definition_is_the_gradient_of_the_norm() {
        let mut rng = Rng::new(50);
        let acts = [Activation::Silu, Activation::Sigmoid];
        for (gate, act) in
            [Gate::None, Gate::First, Gate::Last].map(|g| acts.map(|a| (g, a))).as_flattened()
        {
            let (gate, act) = (*gate, *act);
            for (width, ngroups) in [(1, 1), (6, 2), (12, 1)] {
                let (y, z) = (widen(&rng.floats(width)), widen(&rng.floats(width)));
                let (weight, dout) = (widen(&rng.floats(width)), widen(&rng.floats(width)));
                let (dy, dz, dweight) = reference(&y, &z, &weight, ngroups, gate, act, &dout);
                let of = |y: &[f64], z: &[f64], weight: &[f64]| {
                    dot(&forward(y, z, weight, ngroups, gate, act), &dout)
                };
                assert_gradient("dy", &dy, &numeric_gradient(&y, |y| of(y, &z, &weight)));
                assert_gradient("dz", &dz, &numeric_gradient(&z, |z| of(&y, z, &weight)));
                let numeric = numeric_gradient(&weight, |weight| of(&y, &z, weight));
                assert_gradient("dweight", &dweight, &numeric);
            }
        }
    }

    /// Random rows of one width, against the definition on every instruction set.
    fn check(
        (rows, width, ngroups): (usize, usize, usize),
        gate: Gate,
        act: Activation,
        weights: Option<usize>,
        seed: u64,
    ) {
        let mut rng = Rng::new(seed);
        let weighted = weights.is_some();
        let count = weights.unwrap_or(width);
        let wide = rng.floats(rows * 3 * width);
        let band = |i: usize| Rows::new(&wide, rows, 3 * width, i * width, width);
        let (y, z, dout) = (band(0), band(1), band(2));
        let weight = if weighted { rng.floats(count) } else { vec![1.0; count] };
        let tiled = widen(&weight.repeat(width / count));
        let before = rng.floats(count);
        let (mut want_dy, mut want_dz) = (vec![], vec![]);
        let mut want_dweight = widen(&before);
        for t in 0..rows {
            let (y, z, dout) = (widen(y.row(t)), widen(z.row(t)), widen(dout.row(t)));
            let (dy, dz, dweight) = reference(&y, &z, &tiled, ngroups, gate, act, &dout);
            want_dy.extend(dy);
            want_dz.extend(dz);
            for (c, dweight) in dweight.into_iter().enumerate() {
                want_dweight[c % count] += dweight;
            }
        }
        for &level in Level::present() {
            let (mut dy, mut dz) = (vec![f32::NAN; rows * width], vec![f32::NAN; rows * width]);
            let mut dweight = before.clone();
            if gate == Gate::None {
                rms_norm_backward(level, y, &weight, EPS as f32, dout, &mut dy, &mut dweight);
            } else {
                let norm = GatedNorm {
                    level,
                    weight: weighted.then_some(&weight),
                    ngroups,
                    eps: EPS as f32,
                    norm_before_gate: gate == Gate::Last,
                    activation: act,
                };
                let dweight = weighted.then_some(&mut dweight[..]);
                gated_rms_norm_backward(y, z, norm, dout, &mut dy, &mut dz, dweight);
                close(&dz, &want_dz, TOLERANCE);
            }
            close(&dy, &want_dy, TOLERANCE);
            if weighted {
                close(&dweight, &want_dweight, TOLERANCE);
            }
        }
    }

    #[test]
    fn both_orders_and_none_equal_the_definition_for_any_rows_width_and_groups() {
        let widths = [(1, 1), (6, 2), (16, 1), (48, 3), (51, 3), (200, 8), (97, 1)];
        for (i, (width, ngroups)) in widths.into_iter().enumerate() {
            for rows in [0, 1, 3, 33, 100] {
                for gate in [Gate::None, Gate::First, Gate::Last] {
                    let ngroups = if gate == Gate::None { 1 } else { ngroups };
                    for act in [Activation::Silu, Activation::Sigmoid] {
                        for weights in [None, Some(width), Some(width / ngroups)] {
                            let weights = weights.or((gate == Gate::None).then_some(width));
                            let seed = (i * 1000 + rows) as u64;
                            check((rows, width, ngroups), gate, act, weights, seed);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn rows_of_zeros_and_of_large_numbers_have_finite_gradients() {
        for size in [0.0, 1e-30, 1e15] {
            let (x, dout) = ([size; 24], [1.0; 24]);
            let (mut dx, mut dweight) = ([f32::NAN; 24], [0.0; 24]);
            let rows = Rows::dense(&x, 24);
            let dout = Rows::dense(&dout, 24);
            rms_norm_backward(Level::detect(), rows, &[1.0; 24], 1e-5, dout, &mut dx, &mut dweight);
            assert!(dx.iter().chain(&dweight).all(|x| x.is_finite()), "{size}: {dx:?}");
        }
    }

    #[test]
    fn the_gradient_of_the_l2_norm_is_its_slope_also_at_zero() {
        let mut rng = Rng::new(52);
        let eps = 1e-2;
        for &level in Level::present() {
            for (width, group) in [(1, 1), (12, 3), (34, 17), (64, 64)] {
                for scale in [0.0f32, 1.0] {
                    let x: Vec<f32> = rng.floats(2 * width).iter().map(|x| x * scale).collect();
                    let dout = rng.floats(2 * width);
                    let wide = widen(&dout);
                    let numeric = numeric_gradient(&widen(&x), |x| {
                        let groups = x.chunks(group).zip(wide.chunks(group));
                        let of = |(x, dout): (&[f64], &[f64])| {
                            dot(x, dout) / (dot(x, x) + f64::from(eps)).sqrt()
                        };
                        groups.map(of).sum()
                    });
                    let mut dx = vec![f32::NAN; 2 * width];
                    let [x, dout] = [&x, &dout].map(|x| Rows::dense(x, width));
                    l2_norm_backward(level, x, group, eps, dout, &mut dx);
                    close(&dx, &numeric, TOLERANCE);
                }
            }
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let mut rng = Rng::new(51);
        let (rows, width) = (200, 96);
        let (y, z) = (rng.floats(rows * width), rng.floats(rows * width));
        let (dout, weight) = (rng.floats(rows * width), rng.floats(width));
        let rows_of = |x| Rows::dense(x, width);
        assert_threads_do_not_matter(|| {
            let (mut dy, mut dz) = (vec![0.0; rows * width], vec![0.0; rows * width]);
            let (mut dx, mut dweight) = (dy.clone(), vec![0.0; width]);
            let (level, weight) = (Level::detect(), &weight[..]);
            let norm = GatedNorm {
                level,
                weight: Some(weight),
                ngroups: 4,
                eps: 1e-5,
                norm_before_gate: false,
                activation: Activation::Silu,
            };
            let (y, z, dout) = (rows_of(&y), rows_of(&z), rows_of(&dout));
            gated_rms_norm_backward(y, z, norm, dout, &mut dy, &mut dz, Some(&mut dweight));
            rms_norm_backward(level, y, weight, 1e-5, dout, &mut dx, &mut dweight);
            (dy, dz, dx, dweight)
        });
    }

    #[test]
    #[should_panic(expected = "dweight")]
    fn a_gradient_for_a_weight_that_is_not_there_panics() {
        let x = [1.0; 4];
        let x = Rows::dense(&x, 4);
        let level = Level::detect();
        let activation = Activation::Silu;
        let (ngroups, eps, norm_before_gate) = (1, 1e-5, false);
        let norm = GatedNorm { level, weight: None, ngroups, eps, norm_before_gate, activation };
        let (mut dy, mut dz) = ([0.0; 4], [0.0; 4]);
        gated_rms_norm_backward(x, x, norm, x, &mut dy, &mut dz, Some(&mut [0.0; 4]));
    }
}
