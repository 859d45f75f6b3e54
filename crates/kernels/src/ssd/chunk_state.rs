//! Second stage: what each chunk alone adds to the state by its end.
//!
//! ```text
//! own[k] = sum over s in chunk k of exp(da_cumsum[k, Q-1] - da_cumsum[s]) dt[s] x[s] b[s]ᵀ
//! ```
//!
//! Paper: section 6, step 2 (right factors). Chunks and heads are independent and run in parallel.

use rayon::prelude::*;

use super::Dims;

/// Each chunk's own final state, from zero.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `x` | `[B, L, H, P]` | inputs |
/// | `b` | `[B, L, G, N]` | input matrices |
/// | `dt`, `da_cumsum` | `[B, H, K, Q]` | by `chunk_cumsum` |
/// | returns | `[B, K, H, P, N]` | states |
///
/// # Panics
///
/// If a length disagrees with `dims`.
#[track_caller]
#[must_use]
pub fn chunk_state(dims: Dims, x: &[f32], b: &[f32], dt: &[f32], da_cumsum: &[f32]) -> Vec<f32> {
    dims.check();
    assert_eq!(x.len(), dims.x_len(), "x");
    assert_eq!(b.len(), dims.bc_len(), "b");
    assert_eq!(dt.len(), dims.cumsum_len(), "dt");
    assert_eq!(da_cumsum.len(), dims.cumsum_len(), "da_cumsum");
    let mut states = vec![0.0; dims.states_len()];
    if states.is_empty() {
        return states;
    }
    states.par_chunks_mut(dims.state_len()).enumerate().for_each(|(i, state)| {
        let (batch, chunk, head) = dims.tile(i);
        let row = dims.cumsum_at(batch, head, chunk);
        let end = da_cumsum[row + dims.chunk_size - 1];
        for (q, t) in dims.chunk(chunk).enumerate() {
            let weight = (end - da_cumsum[row + q]).min(0.0).exp() * dt[row + q];
            let b = dims.bc(b, batch, t, head);
            for (state, x) in state.chunks_exact_mut(dims.dstate).zip(dims.x(x, batch, t, head)) {
                let x = weight * x;
                for (state, b) in state.iter_mut().zip(b) {
                    *state += x * b;
                }
            }
        }
    });
    states
}
