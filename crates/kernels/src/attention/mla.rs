//! Multi-head latent attention: one compressed key for all heads, which is also their value.
//!
//! ```text
//! k[h, j] = [W_UK[h] c[j] | k_pe[j]]      v[h, j] = W_UV[h] c[j]      then attention, head by head
//! ```
//!
//! (*DeepSeek-V2*, arXiv 2405.04434, section 2.1), computed without making k and v: both matrices move
//! to the other side of their product, W_UK to the query and W_UV to the output,
//!
//! ```text
//! s[h, i, j] = scale (W_UK[h]ᵀ q_nope[h, i] · c[j] + q_pe[h, i] · k_pe[j])
//! out[h, i]  = W_UV[h] (sum over j of softmax(s[h, i, ..])[j] c[j])
//! ```
//!
//! which is multi-query attention with keys `[c | k_pe]` and values c: the cache holds `d_c + d_r` numbers a
//! position, whatever the number of heads.

use super::cache::KvCache;
use super::{Attention, attend};
use crate::linear::{Weights, linear_rows};
use crate::parallel;
use crate::rows::{Rows, column_blocks};
use crate::simd::Level;

/// Picoseconds of an element of a matrix: to read it, and for each token.
const COST: usize = 100;

/// The heads of [`latent_attention`].
///
/// Checkpoints of DeepSeek keep both matrices in `kv_b_proj.weight`, for each head `d_nope` rows of
/// W_UK and then `d_v` rows of W_UV; GGUF files have `attn_k_b`, transposed as here, and `attn_v_b`.
#[derive(Debug, Clone, Copy)]
pub struct LatentAttention<'a> {
    /// The instruction set, which is that of the caches.
    pub level: Level,
    /// H
    pub nheads: usize,
    /// Factor of the scores, usually `(d_nope + d_r)^-0.5`.
    pub scale: f32,
    /// W_UKᵀ of each head, `[H, d_c, d_nope]`
    pub w_uk: Weights<'a>,
    /// W_UV of each head, `[H, d_v, d_c]`
    pub w_uv: Weights<'a>,
}

/// The tokens of [`latent_attention`].
#[derive(Debug, Clone, Copy)]
pub struct LatentInput<'a> {
    /// Queries without position, `[T, H * d_nope]`
    pub q_nope: Rows<'a>,
    /// Queries with position, rotated, `[T, H * d_r]`
    pub q_pe: Rows<'a>,
    /// Compressed keys and values, normalised, `[T, d_c]`
    pub c: Rows<'a>,
    /// Keys with position, rotated, the same for all heads, `[T, d_r]`
    pub k_pe: Rows<'a>,
}

/// Appends the compressed tokens of each run to its cache and attends from each to all before it.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `kernel` | see [`LatentAttention`] | heads and their matrices |
/// | `input` | see [`LatentInput`] | tokens of all runs, one after another |
/// | `runs` | lengths, sum T | tokens of each sequence; may be 0 |
/// | `caches` | a [`KvCache::latent`] for each run | what came before; the run is appended |
/// | `out` | `[T, H * d_v]` | overwritten |
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn latent_attention(
    kernel: &LatentAttention<'_>,
    input: &LatentInput<'_>,
    runs: &[usize],
    caches: &mut [&mut KvCache],
    out: &mut [f32],
) {
    let LatentInput { q_nope, q_pe, c, k_pe } = *input;
    let Sizes { d_c, d_r, d_v, .. } = kernel.sizes(q_nope, q_pe, c, k_pe);
    let (nheads, d_k, tokens) = (kernel.nheads, d_c + d_r, q_nope.len());
    assert_eq!((c.len(), q_pe.len(), k_pe.len()), (tokens, tokens, tokens), "c, q_pe and k_pe");
    assert_eq!(runs.iter().sum::<usize>(), tokens, "runs");
    assert_eq!(caches.len(), runs.len(), "caches");
    assert_eq!(out.len(), tokens * nheads * d_v, "out");
    let level = kernel.level;

    let keys = joined(c, k_pe);
    let keys = Rows::new(&keys, tokens, d_k, 0, d_k); // [T, d_c + d_r]
    let mut first = 0;
    for (&len, cache) in runs.iter().zip(caches.iter_mut()) {
        assert!(cache.layout().own_d_v() == 0, "caches: not latent");
        cache.append(keys.slice(first, len), Rows::new(&[], len, 0, 0, 0));
        first += len;
    }

    let q = kernel.absorbed(q_nope, q_pe, d_c);
    let q = Rows::new(&q, tokens, nheads * d_k, 0, nheads * d_k);
    let attention = Attention { level, nheads, scale: kernel.scale, window: None, softcap: None };
    let mut mixed = vec![0.0; tokens * nheads * d_c]; // [T, H * d_c]
    let caches: Vec<&KvCache> = caches.iter().map(|cache| &**cache).collect();
    attend(&attention, q, runs, &caches, &mut mixed);

    out.fill(0.0);
    let mixed = Rows::new(&mixed, tokens, nheads * d_c, 0, nheads * d_c);
    let columns = column_blocks(out, nheads * d_v, d_v);
    let ns = (tokens + 1) * kernel.w_uv.len() * COST / 1000;
    parallel::for_each(
        columns.into_iter().enumerate().collect(),
        ns,
        || (),
        |(), (head, mut out)| {
            let w = head_of(kernel.w_uv, head, nheads);
            linear_rows(level, mixed.columns(head * d_c, d_c), w, &mut out);
        },
    );
}

#[expect(clippy::struct_field_names, reason = "they are the paper's")]
pub(super) struct Sizes {
    pub(super) d_nope: usize,
    pub(super) d_c: usize,
    pub(super) d_r: usize,
    pub(super) d_v: usize,
}

/// Rows `[c | k_pe]`.
pub(super) fn joined(c: Rows<'_>, k_pe: Rows<'_>) -> Vec<f32> {
    let mut keys = Vec::with_capacity(c.len() * (c.width() + k_pe.width()));
    for t in 0..c.len() {
        keys.extend_from_slice(c.row(t));
        keys.extend_from_slice(k_pe.row(t));
    }
    keys
}

impl LatentAttention<'_> {
    /// The sizes that widths of rows and weights say.
    #[track_caller]
    pub(super) fn sizes(
        &self,
        q_nope: Rows<'_>,
        q_pe: Rows<'_>,
        c: Rows<'_>,
        k_pe: Rows<'_>,
    ) -> Sizes {
        let (d_c, d_r) = (c.width(), k_pe.width());
        assert!(self.nheads > 0 && q_nope.width().is_multiple_of(self.nheads), "q_nope");
        let d_nope = q_nope.width() / self.nheads;
        assert_eq!(q_pe.width(), self.nheads * d_r, "q_pe");
        assert_eq!(self.w_uk.len(), self.nheads * d_c * d_nope, "w_uk");
        assert!(d_c > 0 && self.w_uv.len().is_multiple_of(self.nheads * d_c), "w_uv");
        Sizes { d_nope, d_c, d_r, d_v: self.w_uv.len() / (self.nheads * d_c) }
    }

    /// The queries that meet rows `[c | k_pe]`: `[T, H * (d_c + d_r)]`.
    pub(super) fn absorbed(&self, q_nope: Rows<'_>, q_pe: Rows<'_>, d_c: usize) -> Vec<f32> {
        let nheads = self.nheads;
        let (d_nope, d_r) = (q_nope.width() / nheads, q_pe.width() / nheads);
        let d_k = d_c + d_r;
        let mut q = vec![0.0; q_nope.len() * nheads * d_k];
        let ns = (q_nope.len() + 1) * self.w_uk.len() * COST / 1000;
        let heads = column_blocks(&mut q, nheads * d_k, d_k).into_iter().enumerate().collect();
        parallel::for_each(
            heads,
            ns,
            || (),
            |(), (head, q): (usize, Vec<&mut [f32]>)| {
                let (mut absorbed, rotated): (Vec<_>, Vec<_>) =
                    q.into_iter().map(|q| q.split_at_mut(d_c)).unzip();
                let w = head_of(self.w_uk, head, nheads);
                linear_rows(self.level, q_nope.columns(head * d_nope, d_nope), w, &mut absorbed);
                for (t, to) in rotated.into_iter().enumerate() {
                    to.copy_from_slice(&q_pe.row(t)[head * d_r..][..d_r]);
                }
            },
        );
        q
    }
}

/// The part of one head.
pub(super) fn head_of(w: Weights<'_>, head: usize, nheads: usize) -> Weights<'_> {
    let len = w.len() / nheads;
    let range = head * len..(head + 1) * len;
    match w {
        Weights::F32(w) => Weights::F32(&w[range]),
        Weights::Bf16(w) => Weights::Bf16(&w[range]),
        Weights::F16(w) => Weights::F16(&w[range]),
    }
}

/// Attends from the last tokens of one sequence to all of it by the definition, in f64.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `q_nope`, `q_pe` | `[T, H * d_nope]`, `[T, H * d_r]` | queries of the last T positions |
/// | `c`, `k_pe` | `[L, d_c]`, `[L, d_r]` | of all positions, T <= L |
///
/// Returns `[T, H * d_v]`.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
#[must_use]
pub fn latent_attention_reference(
    kernel: &LatentAttention<'_>,
    q_nope: Rows<'_>,
    q_pe: Rows<'_>,
    c: Rows<'_>,
    k_pe: Rows<'_>,
) -> Vec<f64> {
    let Sizes { d_nope, d_c, d_r, d_v } = kernel.sizes(q_nope, q_pe, c, k_pe);
    let (nheads, tokens, before) = (kernel.nheads, q_nope.len(), c.len() - q_nope.len());
    let mut w_uk = vec![0.0; kernel.w_uk.len()];
    kernel.w_uk.widen(0, &mut w_uk);
    let mut w_uv = vec![0.0; kernel.w_uv.len()];
    kernel.w_uv.widen(0, &mut w_uv);
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let mut out = vec![0.0; tokens * nheads * d_v];
    for head in 0..nheads {
        // [L, d_nope] and [L, d_v]
        let keys: Vec<Vec<f64>> = (0..c.len())
            .map(|j| {
                let column = |n: usize| {
                    (0..d_c).map(move |i| (head * d_c + i) * d_nope + n).map(|at| w_uk[at])
                };
                let sum = |n: usize| {
                    let terms = column(n).zip(c.row(j));
                    terms.map(|(w, c)| f64::from(w) * f64::from(*c)).sum()
                };
                (0..d_nope).map(sum).collect()
            })
            .collect();
        let values: Vec<Vec<f64>> = (0..c.len())
            .map(|j| {
                let w = &w_uv[head * d_v * d_c..][..d_v * d_c];
                w.chunks_exact(d_c).map(|w| dot(w, c.row(j))).collect()
            })
            .collect();
        for t in 0..tokens {
            let q = &q_nope.row(t)[head * d_nope..][..d_nope];
            let q_pe = &q_pe.row(t)[head * d_r..][..d_r];
            let scores: Vec<f64> = (0..=before + t)
                .map(|j| {
                    let nope: f64 = q.iter().zip(&keys[j]).map(|(q, k)| f64::from(*q) * k).sum();
                    f64::from(kernel.scale) * (nope + dot(q_pe, k_pe.row(j)))
                })
                .collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for (d, out) in out[(t * nheads + head) * d_v..][..d_v].iter_mut().enumerate() {
                *out = weights.iter().zip(&values).map(|(w, v)| w * v[d]).sum::<f64>() / sum;
            }
        }
    }
    out
}
