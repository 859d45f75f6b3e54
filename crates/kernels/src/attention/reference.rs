//! The definition of attention, in f64: slow on purpose.

use super::Attention;
use crate::rows::Rows;

/// Attends from the last tokens of one sequence to all of it, by the formula.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `q` | `[T, H * d_k]` | queries of the last T positions |
/// | `keys` | `[L, Hk * d_k]` | of all positions, T <= L |
/// | `values` | `[L, Hk * d_v]` | of all positions |
///
/// Returns `[T, H * d_v]`.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
#[must_use]
pub fn attention_reference(
    kernel: &Attention,
    nheads_kv: usize,
    q: Rows<'_>,
    keys: Rows<'_>,
    values: Rows<'_>,
) -> Vec<f64> {
    assert!(nheads_kv > 0 && kernel.nheads.is_multiple_of(nheads_kv), "nheads_kv");
    assert_eq!(values.len(), keys.len(), "values");
    assert!(q.len() <= keys.len(), "q");
    let (d_k, d_v) = (keys.width() / nheads_kv, values.width() / nheads_kv);
    assert_eq!(q.width(), kernel.nheads * d_k, "q");
    let before = keys.len() - q.len();
    let mut out = Vec::with_capacity(q.len() * kernel.nheads * d_v);
    for t in 0..q.len() {
        let i = before + t;
        let first = kernel.window.map_or(0, |window| (i + 1).saturating_sub(window));
        for head in 0..kernel.nheads {
            let head_kv = head / (kernel.nheads / nheads_kv);
            let q = &q.row(t)[head * d_k..][..d_k];
            let scores: Vec<f64> = (first..=i)
                .map(|j| {
                    let k = &keys.row(j)[head_kv * d_k..][..d_k];
                    let dot: f64 =
                        q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                    let score = f64::from(kernel.scale) * dot;
                    kernel.softcap.map_or(score, |cap| {
                        let cap = f64::from(cap);
                        cap * (score / cap).tanh()
                    })
                })
                .collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            out.extend((0..d_v).map(|d| {
                let terms = weights
                    .iter()
                    .zip(first..)
                    .map(|(weight, j)| weight * f64::from(values.row(j)[head_kv * d_v + d]));
                terms.sum::<f64>() / sum
            }));
        }
    }
    out
}
