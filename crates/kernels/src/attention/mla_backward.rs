//! Gradients of latent attention, in the absorbed form that the forward has.
//!
//! ```text
//! q = [W_UKᵀ q_nope | q_pe]      m = attention(q, [c | k_pe], c)      out = W_UV m
//! ```
//!
//! The gradient goes back through these three steps: both products head by head, and between them
//! [`attention_backward`]. q and m are computed once more, as in the forward. What a compressed row gets
//! as a key and as a value is added.

use rayon::prelude::*;

use super::cache::KvCache;
use super::mla::{LatentAttention, LatentInput, Sizes, head_of, joined};
use super::page::KvType;
use super::{Attention, AttentionGradients, AttentionInput, attend, attention_backward};
use crate::linear_backward::{linear_backward_input, linear_backward_weight};
use crate::rows::Rows;

/// Where the gradients of [`latent_attention_backward`] go: those of weights are added to what is there, the
/// others overwritten.
#[derive(Debug)]
pub struct LatentGradients<'a> {
    /// `[T, H * d_nope]`
    pub dq_nope: &'a mut [f32],
    /// `[T, H * d_r]`
    pub dq_pe: &'a mut [f32],
    /// Of c and then of k_pe, `[L, d_c + d_r]`
    pub dkeys: &'a mut [f32],
    /// `[H, d_c, d_nope]`; `None` where it is not wanted
    pub dw_uk: Option<&'a mut [f32]>,
    /// `[H, d_v, d_c]`; `None` where it is not wanted
    pub dw_uv: Option<&'a mut [f32]>,
}

/// The gradients of `sum(dout * out)`, where `out` is what
/// [`latent_attention`](super::latent_attention) computed for the last tokens of one sequence.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `kernel` | see [`LatentAttention`] | as in the forward |
/// | `input` | see [`LatentInput`] | queries of the last T positions; c and k_pe of all L of them |
/// | `dout` | `[T, H * d_v]` | gradient of the result |
/// | `gradients` | see [`LatentGradients`] | |
///
/// They have the same bits on any number of threads.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn latent_attention_backward(
    kernel: &LatentAttention<'_>,
    input: &LatentInput<'_>,
    dout: Rows<'_>,
    gradients: LatentGradients<'_>,
) {
    let LatentInput { q_nope, q_pe, c, k_pe } = *input;
    let LatentGradients { dq_nope, dq_pe, dkeys, dw_uk, dw_uv } = gradients;
    let Sizes { d_nope, d_c, d_r, d_v } = kernel.sizes(q_nope, q_pe, c, k_pe);
    let LatentAttention { level, nheads, scale, w_uk, w_uv } = *kernel;
    let (d_k, tokens, positions) = (d_c + d_r, q_nope.len(), c.len());
    assert_eq!((q_pe.len(), k_pe.len()), (tokens, positions), "q_pe and k_pe");
    assert!(tokens <= positions, "c: fewer positions than queries");
    assert_eq!((dout.len(), dout.width()), (tokens, nheads * d_v), "dout");
    assert_eq!(dq_nope.len(), tokens * nheads * d_nope, "dq_nope");
    assert_eq!(dq_pe.len(), tokens * nheads * d_r, "dq_pe");
    assert_eq!(dkeys.len(), positions * d_k, "dkeys");
    assert!(dw_uk.as_ref().is_none_or(|dw| dw.len() == w_uk.len()), "dw_uk");
    assert!(dw_uv.as_ref().is_none_or(|dw| dw.len() == w_uv.len()), "dw_uv");
    if tokens == 0 {
        dkeys.fill(0.0);
        return;
    }

    let keys = joined(c, k_pe);
    let keys = Rows::dense(&keys, d_k);
    let values = keys.columns(0, d_c);
    let q = kernel.absorbed(q_nope, q_pe, d_c);
    let q = Rows::dense(&q, nheads * d_k);
    let attention = Attention { level, nheads, scale, window: None, softcap: None };
    let mut cache = KvCache::latent(level, d_c, d_r, KvType::F32);
    cache.append(keys, Rows::new(&[], positions, 0, 0, 0));
    let mut mixed = vec![0.0; tokens * nheads * d_c]; // [T, H * d_c]
    attend(&attention, q, &[tokens], &[&cache], &mut mixed);
    let mixed = Rows::dense(&mixed, nheads * d_c);

    if let Some(dw_uv) = dw_uv {
        dw_uv.par_chunks_mut(d_v * d_c).enumerate().for_each(|(head, dw)| {
            let dout = dout.columns(head * d_v, d_v);
            linear_backward_weight(level, dout, mixed.columns(head * d_c, d_c), dw);
        });
    }
    let dmixed = by_head(nheads, tokens, d_c, |head, dmixed| {
        let dout = dout.columns(head * d_v, d_v);
        linear_backward_input(level, dout, head_of(w_uv, head, nheads), dmixed);
    });

    let mut dq = vec![0.0; tokens * nheads * d_k];
    let mut dvalues = vec![0.0; positions * d_c];
    let inner = AttentionInput { nheads_kv: 1, q, keys: &[keys], values: &[values], out: mixed };
    let to = AttentionGradients { dq: &mut dq, dk: &mut [&mut *dkeys], dv: &mut [&mut dvalues] };
    attention_backward(&attention, &inner, &[tokens], Rows::dense(&dmixed, nheads * d_c), to);
    for (dkey, dvalue) in dkeys.chunks_exact_mut(d_k).zip(dvalues.chunks_exact(d_c)) {
        dkey.iter_mut().zip(dvalue).for_each(|(dkey, dvalue)| *dkey += dvalue);
    }

    let dq = Rows::dense(&dq, nheads * d_k);
    if let Some(dw_uk) = dw_uk {
        dw_uk.par_chunks_mut(d_c * d_nope).enumerate().for_each(|(head, dw)| {
            let dabsorbed = dq.columns(head * d_k, d_c);
            linear_backward_weight(level, dabsorbed, q_nope.columns(head * d_nope, d_nope), dw);
        });
    }
    dq_nope.copy_from_slice(&by_head(nheads, tokens, d_nope, |head, dq_nope| {
        let dabsorbed = dq.columns(head * d_k, d_c);
        linear_backward_input(level, dabsorbed, head_of(w_uk, head, nheads), dq_nope);
    }));
    for (t, to) in dq_pe.chunks_exact_mut((nheads * d_r).max(1)).enumerate() {
        for (head, to) in to.chunks_exact_mut(d_r).enumerate() {
            to.copy_from_slice(&dq.row(t)[head * d_k + d_c..][..d_r]);
        }
    }
}

/// `[T, H * width]` of what `make` writes for each head, `[T, width]`.
fn by_head(
    nheads: usize,
    tokens: usize,
    width: usize,
    make: impl Fn(usize, &mut [f32]) + Sync,
) -> Vec<f32> {
    let heads: Vec<Vec<f32>> = (0..nheads)
        .into_par_iter()
        .map(|head| {
            let mut out = vec![0.0; tokens * width];
            make(head, &mut out);
            out
        })
        .collect();
    let row = |t: usize| heads.iter().flat_map(move |head| &head[t * width..(t + 1) * width]);
    (0..tokens).flat_map(row).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::latent_attention_reference;
    use crate::gradcheck::{assert_threads_do_not_matter, slopes};
    use crate::linear::Weights;
    use crate::simd::Level;
    use crate::testing::{Rng, close};

    /// f32 against slopes of f64: sums of some tens of terms.
    const TOLERANCE: f64 = 2e-5;

    /// Queries, keys, weights and the gradient of the result, and their widths.
    struct Problem {
        sizes: [usize; 5],
        parts: [Vec<f32>; 7],
    }

    impl Problem {
        /// `[H, d_nope, d_c, d_r, d_v]`, T queries at the end of L positions.
        fn new(sizes: [usize; 5], tokens: usize, positions: usize) -> Self {
            let [nheads, d_nope, d_c, d_r, d_v] = sizes;
            let mut rng = Rng::new(90);
            let parts = [
                tokens * nheads * d_nope,
                tokens * nheads * d_r,
                positions * d_c,
                positions * d_r,
                nheads * d_c * d_nope,
                nheads * d_v * d_c,
                tokens * nheads * d_v,
            ];
            Self { sizes, parts: parts.map(|len| rng.floats(len)) }
        }

        fn with<T>(
            &self,
            level: Level,
            parts: &[&[f32]; 6],
            f: impl FnOnce(&LatentAttention<'_>, &LatentInput<'_>) -> T,
        ) -> T {
            let [nheads, d_nope, d_c, d_r, _] = self.sizes;
            let [q_nope, q_pe, c, k_pe, w_uk, w_uv] = *parts;
            let rows = |x, count, width| Rows::new(x, count, width, 0, width);
            let (tokens, positions) = (q_nope.len() / (nheads * d_nope), c.len() / d_c);
            let kernel = LatentAttention {
                level,
                nheads,
                scale: 0.7,
                w_uk: Weights::F32(w_uk),
                w_uv: Weights::F32(w_uv),
            };
            let input = LatentInput {
                q_nope: rows(q_nope, tokens, nheads * d_nope),
                q_pe: rows(q_pe, tokens, nheads * d_r),
                c: rows(c, positions, d_c),
                k_pe: rows(k_pe, positions, d_r),
            };
            f(&kernel, &input)
        }

        fn parts(&self) -> [&[f32]; 6] {
            [0, 1, 2, 3, 4, 5].map(|part| &self.parts[part][..])
        }

        /// The number whose gradients are asked for, in f64.
        fn loss(&self, parts: &[&[f32]; 6]) -> f64 {
            let out = self.with(Level::Baseline, parts, |kernel, input| {
                let LatentInput { q_nope, q_pe, c, k_pe } = *input;
                latent_attention_reference(kernel, q_nope, q_pe, c, k_pe)
            });
            out.iter().zip(&self.parts[6]).map(|(out, dout)| out * f64::from(*dout)).sum()
        }

        /// dq_nope, dq_pe, dc, dk_pe, dw_uk and dw_uv.
        fn gradients(&self, level: Level) -> [Vec<f32>; 6] {
            let [nheads, _, d_c, d_r, d_v] = self.sizes;
            let nan = |part: usize| vec![f32::NAN; self.parts[part].len()];
            let mut dkeys = vec![f32::NAN; self.parts[2].len() / d_c * (d_c + d_r)];
            let [mut dq_nope, mut dq_pe] = [nan(0), nan(1)];
            let [mut dw_uk, mut dw_uv] = [4, 5].map(|part| vec![1.0; self.parts[part].len()]);
            self.with(level, &self.parts(), |kernel, input| {
                let gradients = LatentGradients {
                    dq_nope: &mut dq_nope,
                    dq_pe: &mut dq_pe,
                    dkeys: &mut dkeys,
                    dw_uk: Some(&mut dw_uk),
                    dw_uv: Some(&mut dw_uv),
                };
                let dout = Rows::dense(&self.parts[6], nheads * d_v);
                latent_attention_backward(kernel, input, dout, gradients);
            });
            // They are added to what is there.
            dw_uk.iter_mut().chain(&mut dw_uv).for_each(|dw| *dw -= 1.0);
            let columns = |first: usize, width: usize| -> Vec<f32> {
                dkeys
                    .chunks(d_c + d_r)
                    .flat_map(|row| &row[first..first + width])
                    .copied()
                    .collect()
            };
            [dq_nope, dq_pe, columns(0, d_c), columns(d_c, d_r), dw_uk, dw_uv]
        }
    }

    #[test]
    fn gradients_of_latent_attention_are_the_slopes_of_its_definition() {
        for (sizes, tokens, positions) in [
            ([1, 1, 1, 1, 1], 1, 1),
            ([2, 3, 5, 2, 4], 4, 7),
            ([3, 4, 6, 0, 2], 5, 5),
            ([2, 5, 9, 3, 7], 3, 70),
        ] {
            let problem = Problem::new(sizes, tokens, positions);
            let wanted: Vec<Vec<f64>> = (0..6)
                .map(|part| {
                    let slopes = slopes(&problem.parts[part], |x| {
                        let mut parts = problem.parts();
                        parts[part] = x;
                        problem.loss(&parts)
                    });
                    slopes.into_iter().map(f64::from).collect()
                })
                .collect();
            for &level in Level::present() {
                for (got, want) in problem.gradients(level).iter().zip(&wanted) {
                    close(got, want, TOLERANCE);
                }
            }
        }
    }

    #[test]
    fn gradients_of_latent_attention_have_the_same_bits_on_any_number_of_threads() {
        let problem = Problem::new([3, 8, 20, 4, 9], 50, 130);
        assert_threads_do_not_matter(|| problem.gradients(Level::detect()));
    }
}
