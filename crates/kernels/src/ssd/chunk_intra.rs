//! Fifth stage: what reaches a token from the tokens of its own chunk.
//!
//! ```text
//! y[t] = sum over s <= t of t's chunk of (c[t]·b[s]) exp(da_cumsum[t] - da_cumsum[s]) dt[s] x[s]
//! ```
//!
//! Paper: section 6, step 1 (diagonal blocks): attention inside the chunk, with the decay as its
//! mask. Tokens are independent.

use rayon::prelude::*;

use super::Dims;

/// The part of the output that comes from the token's own chunk.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `x` | `[B, L, H, P]` | inputs |
/// | `b`, `c` | `[B, L, G, N]` | input and output matrices |
/// | `dt`, `da_cumsum` | `[B, H, K, Q]` | by `chunk_cumsum` |
/// | returns | `[B, L, H, P]` | |
///
/// # Panics
///
/// If a length disagrees with `dims`.
#[track_caller]
#[must_use]
pub fn chunk_intra(
    dims: Dims,
    x: &[f32],
    b: &[f32],
    c: &[f32],
    dt: &[f32],
    da_cumsum: &[f32],
) -> Vec<f32> {
    dims.check();
    assert_eq!(x.len(), dims.x_len(), "x");
    assert_eq!(b.len(), dims.bc_len(), "b");
    assert_eq!(c.len(), dims.bc_len(), "c");
    assert_eq!(dt.len(), dims.cumsum_len(), "dt");
    assert_eq!(da_cumsum.len(), dims.cumsum_len(), "da_cumsum");
    let mut y = vec![0.0; x.len()];
    if y.is_empty() {
        return y;
    }
    y.par_chunks_mut(dims.headdim).enumerate().for_each(|(i, y)| {
        let (bt, head) = (i / dims.nheads, i % dims.nheads);
        let (batch, t) = (bt / dims.seqlen, bt % dims.seqlen);
        let chunk = t / dims.chunk_size;
        let row = dims.cumsum_at(batch, head, chunk);
        let here = da_cumsum[row + t % dims.chunk_size];
        let c = dims.bc(c, batch, t, head);
        for (q, s) in (chunk * dims.chunk_size..=t).enumerate() {
            let b = dims.bc(b, batch, s, head);
            let cb: f32 = c.iter().zip(b).map(|(c, b)| c * b).sum();
            let weight = cb * (here - da_cumsum[row + q]).min(0.0).exp() * dt[row + q];
            for (y, x) in y.iter_mut().zip(dims.x(x, batch, s, head)) {
                *y += weight * x;
            }
        }
    });
    y
}
