//! Fourth stage: what reaches a token through the state that enters its chunk, and the skip.
//!
//! ```text
//! y[t] = exp(da_cumsum[t]) h[k-1] c[t] + d x[t]          k = t's chunk, h[-1] = 0
//! ```
//!
//! Paper: section 6, step 4 (left factors). Tokens are independent.

use rayon::prelude::*;

use super::Dims;

/// The part of the output that comes from before the token's chunk, plus `d x`.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `x` | `[B, L, H, P]` | inputs |
/// | `states` | `[B, K, H, P, N]` | states after each chunk, by `state_passing` |
/// | `c` | `[B, L, G, N]` | output matrices |
/// | `da_cumsum` | `[B, H, K, Q]` | by `chunk_cumsum` |
/// | `d` | `[H]` or `[H, P]` | skip weights, optional |
/// | returns | `[B, L, H, P]` | |
///
/// # Panics
///
/// If a length disagrees with `dims`.
#[track_caller]
#[must_use]
pub fn chunk_scan(
    dims: Dims,
    x: &[f32],
    states: &[f32],
    c: &[f32],
    da_cumsum: &[f32],
    d: Option<&[f32]>,
) -> Vec<f32> {
    dims.check();
    let Dims { seqlen, nheads, headdim, dstate, chunk_size, .. } = dims;
    assert_eq!(x.len(), dims.x_len(), "x");
    assert_eq!(states.len(), dims.states_len(), "states");
    assert_eq!(c.len(), dims.bc_len(), "c");
    assert_eq!(da_cumsum.len(), dims.cumsum_len(), "da_cumsum");
    assert!(d.is_none_or(|d| d.len() == nheads || d.len() == nheads * headdim), "d");
    let mut y = x.to_vec();
    if y.is_empty() {
        return y;
    }
    y.par_chunks_mut(headdim).enumerate().for_each(|(i, y)| {
        let (bt, head) = (i / nheads, i % nheads);
        let (batch, t) = (bt / seqlen, bt % seqlen);
        let (chunk, q) = (t / chunk_size, t % chunk_size);
        match d {
            None => y.fill(0.0),
            Some(d) if d.len() == nheads => y.iter_mut().for_each(|y| *y *= d[head]),
            Some(d) => y.iter_mut().zip(&d[head * headdim..]).for_each(|(y, d)| *y *= d),
        }
        if chunk > 0 {
            let tile = (batch * dims.nchunks() + chunk - 1) * nheads + head;
            let state = &states[tile * dims.state_len()..][..dims.state_len()];
            let decay = da_cumsum[dims.cumsum_at(batch, head, chunk) + q].exp();
            let c = dims.bc(c, batch, t, head);
            for (y, state) in y.iter_mut().zip(state.chunks_exact(dstate)) {
                *y += decay * state.iter().zip(c).map(|(s, c)| s * c).sum::<f32>();
            }
        }
    });
    y
}
