//! State-space duality (SSD), the sequence operation of Mamba-2, whole and by stages.
//!
//! ```text
//! dt[t]  = clamp(softplus(dt_raw[t] + dt_bias), dt_limit)
//! S[t]   = exp(dt[t] a) S[t-1] + dt[t] x[t] b[t]ᵀ          S: [P, N] for each head
//! y[t]   = S[t] c[t] + d x[t]                              then * silu(z[t]) if there is a gate
//! ```
//!
//! Paper: *Transformers are SSMs* (Dao and Gu, 2024), sections 3 (recurrence) and 6 (chunks).
//!
//! | letter | dimension | word |
//! |---|---|---|
//! | B | batch | `batch` |
//! | L | sequence length | `seqlen` |
//! | T | tokens of all runs | |
//! | H | heads | `nheads` |
//! | P | head width | `headdim` |
//! | G | groups of heads that share b and c; head h uses group h / (H / G) | `ngroups` |
//! | N | state width | `dstate` |
//! | Q | chunk length | `chunk_size` |
//! | K | chunks, ceil(L / Q) | `nchunks` |
//!
//! [`ssd`] is what models call, and [`ssd_backward`] gives its gradients. The stages ([`chunk_cumsum`],
//! [`chunk_state`], [`state_passing`], [`chunk_scan`], [`chunk_intra`]) are the same computation taken
//! apart on padded batches, for study and as building blocks; [`recurrence`] is the definition, token
//! by token.

mod backward;
#[cfg(test)]
mod backward_reference;
mod backward_team;
#[cfg(test)]
mod backward_tests;
mod chunk_intra;
mod chunk_scan;
mod chunk_state;
mod cumsum;
mod matrix;
mod recurrence;
mod scan;
mod state_passing;
#[cfg(test)]
mod tests;

pub use backward::{SsdGradients, ssd_backward};
pub use chunk_intra::chunk_intra;
pub use chunk_scan::chunk_scan;
pub use chunk_state::chunk_state;
pub use cumsum::{chunk_cumsum, timestep};
pub use recurrence::{Real, recurrence};
pub use scan::{Ssd, ssd};
pub use state_passing::state_passing;

/// Sizes of the staged operations on a padded batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// B
    pub batch: usize,
    /// L
    pub seqlen: usize,
    /// H
    pub nheads: usize,
    /// P
    pub headdim: usize,
    /// G, divides H
    pub ngroups: usize,
    /// N
    pub dstate: usize,
    /// Q, at least 1
    pub chunk_size: usize,
}

impl Dims {
    /// K, the number of chunks: ceil(L / Q).
    #[must_use]
    pub fn nchunks(&self) -> usize {
        self.seqlen.div_ceil(self.chunk_size)
    }

    /// Elements of one head's state: P * N.
    #[must_use]
    pub fn state_len(&self) -> usize {
        self.headdim * self.dstate
    }

    /// The tokens of chunk `chunk`: a range within the sequence.
    pub(crate) fn chunk(&self, chunk: usize) -> std::ops::Range<usize> {
        let first = chunk * self.chunk_size;
        first..self.seqlen.min(first + self.chunk_size)
    }

    /// Offset of `[batch, head, chunk, 0]` in a `[B, H, K, Q]` array.
    pub(crate) fn cumsum_at(&self, batch: usize, head: usize, chunk: usize) -> usize {
        ((batch * self.nheads + head) * self.nchunks() + chunk) * self.chunk_size
    }

    /// Row `[batch, token, head]` of a `[B, L, H, P]` array.
    pub(crate) fn x<'a>(&self, x: &'a [f32], batch: usize, t: usize, head: usize) -> &'a [f32] {
        &x[((batch * self.seqlen + t) * self.nheads + head) * self.headdim..][..self.headdim]
    }

    /// Row `[batch, token, group of head]` of a `[B, L, G, N]` array.
    pub(crate) fn bc<'a>(&self, bc: &'a [f32], batch: usize, t: usize, head: usize) -> &'a [f32] {
        let group = head / (self.nheads / self.ngroups);
        &bc[((batch * self.seqlen + t) * self.ngroups + group) * self.dstate..][..self.dstate]
    }

    #[track_caller]
    pub(crate) fn check(&self) {
        assert!(self.chunk_size > 0, "chunk_size");
        assert!(self.ngroups > 0 && self.nheads.is_multiple_of(self.ngroups), "ngroups");
    }

    pub(crate) fn x_len(&self) -> usize {
        self.batch * self.seqlen * self.nheads * self.headdim
    }

    pub(crate) fn bc_len(&self) -> usize {
        self.batch * self.seqlen * self.ngroups * self.dstate
    }

    pub(crate) fn cumsum_len(&self) -> usize {
        self.batch * self.nheads * self.nchunks() * self.chunk_size
    }

    pub(crate) fn states_len(&self) -> usize {
        self.batch * self.nchunks() * self.nheads * self.state_len()
    }

    /// `(batch, chunk, head)` of tile `i` of a `[B, K, H, ..]` array.
    pub(crate) fn tile(&self, i: usize) -> (usize, usize, usize) {
        let (bk, head) = (i / self.nheads, i % self.nheads);
        (bk / self.nchunks(), bk % self.nchunks(), head)
    }
}
