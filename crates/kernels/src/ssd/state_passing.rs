//! Third stage: carry the state from chunk to chunk.
//!
//! A chunk's own state assumes that it started from zero. With `decay[k] = exp(da_cumsum[k, Q-1])`,
//!
//! ```text
//! passed[k] = decay[k] * passed[k-1] + own[k]         passed[-1] = 0
//! ```
//!
//! is the state after chunk `k`. Paper: section 6, step 3 (the recurrence between chunks), which is
//! sequential; batch and heads are independent.

use super::Dims;

/// The state after each chunk.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `states` | `[B, K, H, P, N]` | each chunk's own, by `chunk_state` |
/// | `da_cumsum` | `[B, H, K, Q]` | by `chunk_cumsum` |
/// | returns | `[B, K, H, P, N]` | states after each chunk |
///
/// # Panics
///
/// If a length disagrees with `dims`.
#[track_caller]
#[must_use]
pub fn state_passing(dims: Dims, states: &[f32], da_cumsum: &[f32]) -> Vec<f32> {
    dims.check();
    assert_eq!(states.len(), dims.states_len(), "states");
    assert_eq!(da_cumsum.len(), dims.cumsum_len(), "da_cumsum");
    let mut passed = states.to_vec();
    let (tile, row) = (dims.state_len(), dims.nheads * dims.state_len());
    if row == 0 {
        return passed;
    }
    for (batch, passed) in passed.chunks_exact_mut(row * dims.nchunks().max(1)).enumerate() {
        for chunk in 1..dims.nchunks() {
            let (before, now) = passed.split_at_mut(chunk * row);
            let before = &before[(chunk - 1) * row..];
            for head in 0..dims.nheads {
                let end = dims.cumsum_at(batch, head, chunk) + dims.chunk_size - 1;
                let decay = da_cumsum[end].exp();
                let range = head * tile..(head + 1) * tile;
                for (now, before) in now[range.clone()].iter_mut().zip(&before[range]) {
                    *now += decay * before;
                }
            }
        }
    }
    passed
}
