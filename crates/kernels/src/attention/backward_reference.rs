//! The definition of attention's gradients, in f64: slow on purpose.

use super::Attention;
use crate::rows::Rows;

/// The gradients of `sum(dout * attention)` for the last tokens of one sequence, by the formulas.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `q` | `[T, H * d_k]` | queries of the last T positions |
/// | `keys` | `[L, Hk * d_k]` | of all positions, T <= L |
/// | `values` | `[L, Hk * d_v]` | of all positions |
/// | `dout` | `[T, H * d_v]` | gradient of the result |
///
/// Returns those of `q`, `keys` and `values`, each of its shape.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
#[must_use]
pub fn attention_backward_reference(
    kernel: &Attention,
    nheads_kv: usize,
    q: Rows<'_>,
    keys: Rows<'_>,
    values: Rows<'_>,
    dout: Rows<'_>,
) -> [Vec<f64>; 3] {
    assert!(nheads_kv > 0 && kernel.nheads.is_multiple_of(nheads_kv), "nheads_kv");
    assert_eq!(values.len(), keys.len(), "values");
    assert!(q.len() <= keys.len(), "q");
    let (d_k, d_v) = (keys.width() / nheads_kv, values.width() / nheads_kv);
    assert_eq!(q.width(), kernel.nheads * d_k, "q");
    assert_eq!((dout.len(), dout.width()), (q.len(), kernel.nheads * d_v), "dout");
    let before = keys.len() - q.len();
    let scale = f64::from(kernel.scale);
    let mut dq = vec![0.0; q.len() * q.width()];
    let mut dk = vec![0.0; keys.len() * keys.width()];
    let mut dv = vec![0.0; values.len() * values.width()];
    for t in 0..q.len() {
        let i = before + t;
        let first = kernel.window.map_or(0, |window| (i + 1).saturating_sub(window));
        for head in 0..kernel.nheads {
            let head_kv = head / (kernel.nheads / nheads_kv);
            let (at_q, at_k, at_v) = (head * d_k, head_kv * d_k, head_kv * d_v);
            let q = &q.row(t)[at_q..][..d_k];
            let dout = &dout.row(t)[head * d_v..][..d_v];
            let raw: Vec<f64> =
                (first..=i).map(|j| scale * dot(q, &keys.row(j)[at_k..][..d_k])).collect();
            let capped = |s: f64| {
                kernel.softcap.map_or(s, |cap| f64::from(cap) * (s / f64::from(cap)).tanh())
            };
            let slope = |s: f64| {
                kernel.softcap.map_or(1.0, |cap| 1.0 - (s / f64::from(cap)).tanh().powi(2))
            };
            let max = raw.iter().map(|s| capped(*s)).fold(f64::NEG_INFINITY, f64::max);
            let exps: Vec<f64> = raw.iter().map(|s| (capped(*s) - max).exp()).collect();
            let sum: f64 = exps.iter().sum();
            // The gradient of each weight of the softmax, and their mean.
            let dp: Vec<f64> =
                (first..=i).map(|j| dot(dout, &values.row(j)[at_v..][..d_v])).collect();
            let mean = exps.iter().zip(&dp).map(|(e, dp)| e / sum * dp).sum::<f64>();
            for (n, j) in (first..=i).enumerate() {
                let p = exps[n] / sum;
                let ds = p * (dp[n] - mean) * slope(raw[n]) * scale;
                for d in 0..d_v {
                    dv[j * values.width() + at_v + d] += p * f64::from(dout[d]);
                }
                for d in 0..d_k {
                    dq[t * kernel.nheads * d_k + at_q + d] += ds * f64::from(keys.row(j)[at_k + d]);
                    dk[j * keys.width() + at_k + d] += ds * f64::from(q[d]);
                }
            }
        }
    }
    [dq, dk, dv]
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

#[cfg(test)]
mod tests {
    use super::super::attention_reference;
    use super::*;
    use crate::gradcheck::slopes;
    use crate::testing::{Rng, close};

    #[test]
    fn the_formulas_are_the_slopes_of_the_definition() {
        let (nheads_kv, tokens, len, d_k, d_v) = (2, 4, 7, 3, 5);
        for (window, softcap) in [(None, None), (Some(3), None), (None, Some(1.5))] {
            let level = crate::simd::Level::Baseline;
            let kernel = Attention { level, nheads: 4, scale: 1.3, window, softcap };
            let mut rng = Rng::new(80);
            let q = rng.floats(tokens * 4 * d_k);
            let keys = rng.floats(len * nheads_kv * d_k);
            let values = rng.floats(len * nheads_kv * d_v);
            let dout = rng.floats(tokens * 4 * d_v);
            let loss = |q: &[f32], keys: &[f32], values: &[f32]| -> f64 {
                let out = attention_reference(
                    &kernel,
                    nheads_kv,
                    Rows::dense(q, 4 * d_k),
                    Rows::dense(keys, nheads_kv * d_k),
                    Rows::dense(values, nheads_kv * d_v),
                );
                out.iter().zip(&dout).map(|(out, dout)| out * f64::from(*dout)).sum()
            };
            let [dq, dk, dv] = attention_backward_reference(
                &kernel,
                nheads_kv,
                Rows::dense(&q, 4 * d_k),
                Rows::dense(&keys, nheads_kv * d_k),
                Rows::dense(&values, nheads_kv * d_v),
                Rows::dense(&dout, 4 * d_v),
            );
            // The slopes are rounded to f32.
            close(&slopes(&q, |q| loss(q, &keys, &values)), &dq, 1e-7);
            close(&slopes(&keys, |keys| loss(&q, keys, &values)), &dk, 1e-7);
            close(&slopes(&values, |values| loss(&q, &keys, values)), &dv, 1e-7);
        }
    }
}
