//! Root-mean-square norms.
//!
//! ```text
//! rms_norm(x) = x / sqrt(mean(x²) + eps) * weight
//! gated, gate first:  rms_norm(y * silu(z))          (Mamba-2's default)
//! gated, norm first:  rms_norm(y) * silu(z)
//! l2_norm(x)  = x / sqrt(sum(x²) + eps)
//! ```
//!
//! The gated norm takes its mean over groups of `width / ngroups` neighbouring channels, `l2_norm` its
//! sum likewise. Each group is its own sum, in an order that depends on its width and the instruction
//! set alone. With eps inside the root `l2_norm` and its gradient are finite for a row of zeros.

use crate::activation::{self, Activation};
use crate::parallel::for_rows;
use crate::rows::Rows;
use crate::simd::{Level, Simd, dispatch};

/// Picoseconds of an element, without a gate and with one.
const COST: usize = 250;
const GATED: usize = 1000;

/// Normalises each row of `x` `[T, width]` to `out` `[T, width]`; `weight` is `[width]`.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn rms_norm(level: Level, x: Rows<'_>, weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = x.width();
    assert_eq!(weight.len(), width, "weight");
    assert_eq!(out.len(), x.len() * width, "out");
    for_rows(out, width, COST, |first, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            out.copy_from_slice(x.row(first + i));
            normalize(level, out, weight, eps);
        }
    });
}

/// How [`gated_rms_norm`] combines its gate and its norm.
#[derive(Debug, Clone, Copy)]
pub struct GatedNorm<'a> {
    /// The instruction set.
    pub level: Level,
    /// `[width]`, or one group's, which all share; `None` multiplies by one.
    pub weight: Option<&'a [f32]>,
    /// Groups of neighbouring channels with a mean of their own; divides the width.
    pub ngroups: usize,
    /// Added to the mean of squares.
    pub eps: f32,
    /// Norm first, then gate; else gate first.
    pub norm_before_gate: bool,
    /// What the gate goes through, silu as a rule.
    pub activation: Activation,
}

impl GatedNorm<'_> {
    /// The width of a group.
    #[track_caller]
    pub(crate) fn group(&self, width: usize) -> usize {
        assert!(self.ngroups > 0 && width.is_multiple_of(self.ngroups), "ngroups");
        let group = width / self.ngroups;
        assert!(self.weight.is_none_or(|w| [width, group].contains(&w.len())), "weight");
        group
    }
}

/// Gates rows of `y` `[T, width]` by `z` `[T, width]` and normalises them by groups, to `out`.
///
/// # Panics
///
/// If the lengths disagree or `ngroups` does not divide the width.
#[track_caller]
pub fn gated_rms_norm(y: Rows<'_>, z: Rows<'_>, norm: GatedNorm<'_>, out: &mut [f32]) {
    let level = norm.level;
    let width = y.width();
    let group = norm.group(width);
    assert_eq!((z.len(), z.width()), (y.len(), width), "z");
    assert_eq!(out.len(), y.len() * width, "out");
    let ones = vec![1.0; if norm.weight.is_none() { group } else { 0 }];
    let weight = norm.weight.unwrap_or(&ones);
    for_rows(out, width, GATED, |first, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            let row = first + i;
            out.copy_from_slice(y.row(row));
            if !norm.norm_before_gate {
                activation::gate(level, norm.activation, out, z.row(row));
            }
            // A weight of one group is that of all.
            let weights = weight.chunks_exact(group).cycle();
            for (out, weight) in out.chunks_exact_mut(group).zip(weights) {
                normalize(level, out, weight, norm.eps);
            }
            if norm.norm_before_gate {
                activation::gate(level, norm.activation, out, z.row(row));
            }
        }
    });
}

/// Divides groups of `group` neighbouring columns of `x` `[T, width]` by their lengths, to `out`.
///
/// # Panics
///
/// If the lengths disagree or `group` does not divide the width.
#[track_caller]
pub fn l2_norm(level: Level, x: Rows<'_>, group: usize, eps: f32, out: &mut [f32]) {
    let width = x.width();
    assert!(group > 0 && width.is_multiple_of(group), "group");
    assert_eq!(out.len(), x.len() * width, "out");
    for_rows(out, width, COST, |first, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            let x = x.row(first + i);
            for (out, x) in out.chunks_exact_mut(group).zip(x.chunks_exact(group)) {
                let length = (dot(level, x, x) + eps).sqrt();
                out.iter_mut().zip(x).for_each(|(out, x)| *out = x / length);
            }
        }
    });
}

dispatch! { pub(crate) fn dot = dot_body(a: &[f32], b: &[f32]) -> f32 }

#[inline(always)]
fn dot_body<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    let (a, a_rest) = S::chunks(a);
    let (b, b_rest) = S::chunks(b);
    let mut sum = simd.mul(simd.load(&S::tail(a_rest)), simd.load(&S::tail(b_rest)));
    for (a, b) in a.iter().zip(b) {
        sum = simd.mul_add(simd.load(a), simd.load(b), sum);
    }
    simd.reduce(sum)
}

dispatch! { pub(crate) fn normalize = normalize_body(x: &mut [f32], weight: &[f32], eps: f32) }

#[inline(always)]
fn normalize_body<S: Simd>(simd: S, x: &mut [f32], weight: &[f32], eps: f32) {
    let width = x.len() as f32;
    let (chunks, rest) = S::chunks_mut(x);
    let mut tail = S::tail(rest);
    let last = simd.load(&tail);
    let mut squares = [simd.mul(last, last), simd.splat(0.0)];
    for (i, chunk) in chunks.iter().enumerate() {
        let x = simd.load(chunk);
        squares[i % 2] = simd.mul_add(x, x, squares[i % 2]);
    }
    let mean = simd.reduce(simd.add(squares[0], squares[1])) / width;
    let scale = simd.splat(1.0 / (mean + eps).sqrt());
    let (weights, weight_rest) = S::chunks(weight);
    for (chunk, weight) in chunks.iter_mut().zip(weights) {
        simd.store(simd.mul(simd.mul(simd.load(chunk), scale), simd.load(weight)), chunk);
    }
    let weight = simd.load(&S::tail(weight_rest));
    simd.store(simd.mul(simd.mul(last, scale), weight), &mut tail);
    S::write_tail(&tail, rest);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, close};

    fn reference(y: &[f32], z: Option<&[f32]>, norm: &GatedNorm<'_>) -> Vec<f64> {
        let sigmoid = |z: f64| 1.0 / (1.0 + (-z).exp());
        let act = |z: f64| match norm.activation {
            Activation::Silu => z * sigmoid(z),
            Activation::Sigmoid => sigmoid(z),
            other => panic!("{other:?}"),
        };
        let gate = |i: usize| z.map_or(1.0, |z| act(z[i].into()));
        let group = y.len() / norm.ngroups;
        let before = |i: usize| f64::from(y[i]) * if norm.norm_before_gate { 1.0 } else { gate(i) };
        (0..y.len())
            .map(|i| {
                let first = i / group * group;
                let mean =
                    (first..first + group).map(|j| before(j).powi(2)).sum::<f64>() / group as f64;
                let weight = norm.weight.map_or(1.0, |w| f64::from(w[i % w.len()]));
                let after = if norm.norm_before_gate { gate(i) } else { 1.0 };
                before(i) / (mean + f64::from(norm.eps)).sqrt() * weight * after
            })
            .collect()
    }

    #[test]
    fn both_orders_equal_the_definition_for_any_width_and_groups() {
        let mut rng = Rng::new(3);
        for &level in Level::present() {
            for (width, ngroups) in [(1, 1), (6, 2), (16, 1), (48, 3), (51, 3), (200, 8)] {
                let all = [false, true].map(|first| {
                    let acts = [Activation::Silu, Activation::Sigmoid];
                    acts.map(|act| [width, width / ngroups].map(|weights| (first, act, weights)))
                });
                for (norm_before_gate, activation, weights) in all.into_iter().flatten().flatten() {
                    let (y, z) = (rng.floats(3 * width), rng.floats(3 * width));
                    let weight = rng.floats(weights);
                    let weight = Some(&weight[..]);
                    let norm = GatedNorm {
                        level,
                        weight,
                        ngroups,
                        eps: 1e-5,
                        norm_before_gate,
                        activation,
                    };
                    let mut out = vec![0.0; 3 * width];
                    let (y, z) = (Rows::dense(&y, width), Rows::dense(&z, width));
                    gated_rms_norm(y, z, norm, &mut out);
                    for (i, out) in out.chunks(width).enumerate() {
                        close(out, &reference(y.row(i), Some(z.row(i)), &norm), 2e-6);
                    }
                }
            }
        }
    }

    #[test]
    fn plain_norm_equals_the_definition() {
        let mut rng = Rng::new(4);
        let (x, weight) = (rng.floats(2 * 37), rng.floats(37));
        for &level in Level::present() {
            let mut out = vec![0.0; 2 * 37];
            rms_norm(level, Rows::dense(&x, 37), &weight, 1e-5, &mut out);
            let weight = Some(&weight[..]);
            let norm = GatedNorm {
                level,
                weight,
                ngroups: 1,
                eps: 1e-5,
                norm_before_gate: false,
                activation: Activation::Silu,
            };
            for (x, out) in x.chunks(37).zip(out.chunks(37)) {
                close(out, &reference(x, None, &norm), 2e-6);
            }
        }
    }

    #[test]
    fn the_l2_norm_equals_the_definition_and_leaves_zeros() {
        let mut rng = Rng::new(5);
        for &level in Level::present() {
            for (width, group) in [(1, 1), (12, 3), (64, 16), (74, 37), (256, 128)] {
                for scale in [0.0, 1e-4, 1.0, 1e6] {
                    let x: Vec<f32> = rng.floats(3 * width).iter().map(|x| scale * x).collect();
                    let mut out = vec![f32::NAN; 3 * width];
                    l2_norm(level, Rows::dense(&x, width), group, 1e-6, &mut out);
                    for (x, out) in x.chunks(group).zip(out.chunks(group)) {
                        let squares: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
                        let length = (squares + 1e-6).sqrt();
                        let want: Vec<f64> = x.iter().map(|x| f64::from(*x) / length).collect();
                        close(out, &want, 1e-6);
                    }
                }
            }
        }
    }

    #[test]
    fn each_group_has_its_own_mean() {
        let y = [1.0, 1.0, 100.0, 100.0];
        let z = [50.0; 4]; // silu(50) = 50, which the norm takes out again
        let level = Level::detect();
        let norm = GatedNorm {
            level,
            weight: None,
            ngroups: 2,
            eps: 1e-5,
            norm_before_gate: false,
            activation: Activation::Silu,
        };
        let mut out = [0.0; 4];
        gated_rms_norm(Rows::dense(&y, 4), Rows::dense(&z, 4), norm, &mut out);
        assert!(out.iter().all(|x| (x - 1.0).abs() < 1e-5), "{out:?}");
    }
}
