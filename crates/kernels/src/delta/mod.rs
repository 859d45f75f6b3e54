//! The gated delta rule, the sequence operation of Gated DeltaNet and of Kimi Delta Attention.
//!
//! ```text
//! S'    = exp(g[t]) S[t-1]             S: [Dk, Dv] for each value head
//! u     = beta[t] (v[t] - S'ᵀ k[t])    what the state has for the key, read after the decay, is replaced
//! S[t]  = S' + k[t] uᵀ
//! o[t]  = scale S[t]ᵀ q[t]             read after the write
//! ```
//!
//! With one `g` for each value head this is Gated DeltaNet; with one for each of its key channels, row i
//! of S decays by `exp(g[i])`: Kimi Delta Attention.
//!
//! Papers: *Gated Delta Networks* (Yang, Kautz and Hatamizadeh, 2024, arXiv 2412.06464), equation 10;
//! *Kimi Linear* (Kimi Team, 2025, arXiv 2510.26692), equation 1.
//!
//! | letter | dimension | word |
//! |---|---|---|
//! | T | tokens of all runs | |
//! | Hk | key heads: q and k | `key_heads` |
//! | Hv | value heads: v, g, beta and states; head h uses key head h / (Hv / Hk) | `value_heads` |
//! | Dk | width of a key head | `key_dim` |
//! | Dv | width of a value head | `value_dim` |
//!
//! [`delta_rule`] is what models call, and [`delta_rule_backward`] gives its gradients; [`recurrence`] is
//! the definition. [`decay_gate`] makes `g` of what a layer projects. Queries and keys are those that
//! [`l2_norm`](crate::l2_norm) gives.

mod backward;
#[cfg(test)]
mod backward_reference;
#[cfg(test)]
mod backward_tests;
mod gates;
mod recurrence;
mod scan;
#[cfg(test)]
mod tests;

pub use backward::{DeltaGradients, delta_rule_backward};
pub use gates::{DecayGate, DecayGateGradients, decay_gate, decay_gate_backward};
pub use recurrence::recurrence;
pub use scan::delta_rule;

use crate::rows::Rows;
use crate::simd::Level;

/// Inputs of [`delta_rule`] for the tokens of all runs, one after another.
#[derive(Debug, Clone, Copy)]
pub struct Delta<'a> {
    /// The instruction set.
    pub level: Level,
    /// Hk, divides Hv
    pub key_heads: usize,
    /// Hv
    pub value_heads: usize,
    /// Dk
    pub key_dim: usize,
    /// Dv
    pub value_dim: usize,
    /// `[T, Hk * Dk]`
    pub q: Rows<'a>,
    /// `[T, Hk * Dk]`, of length 1 or less: longer ones may make the state grow without bound.
    pub k: Rows<'a>,
    /// `[T, Hv * Dv]`
    pub v: Rows<'a>,
    /// Logarithms of decays, not above 0: one a head, `[T, Hv]`, or one a key channel, `[T, Hv * Dk]`.
    pub g: Rows<'a>,
    /// `[T, Hv]`, in 0..=2: the share of what the state has for a key that is replaced.
    pub beta: Rows<'a>,
    /// Factor of the outputs, as a rule `Dk^-0.5`.
    pub scale: f32,
}

impl Delta<'_> {
    #[track_caller]
    fn check(&self, runs: &[usize]) {
        let (tokens, heads) = (self.v.len(), self.value_heads);
        assert!(self.key_heads > 0 && heads.is_multiple_of(self.key_heads), "key_heads");
        assert_eq!((self.q.len(), self.q.width()), (tokens, self.key_heads * self.key_dim), "q");
        assert_eq!((self.k.len(), self.k.width()), (tokens, self.key_heads * self.key_dim), "k");
        assert_eq!(self.v.width(), heads * self.value_dim, "v");
        assert!([heads, heads * self.key_dim].contains(&self.g.width()), "g");
        assert_eq!(self.g.len(), tokens, "g");
        assert_eq!((self.beta.len(), self.beta.width()), (tokens, heads), "beta");
        assert_eq!(runs.iter().sum::<usize>(), tokens, "runs");
    }

    /// Elements of one head's state.
    fn state_len(&self) -> usize {
        self.key_dim * self.value_dim
    }

    /// Decays of a head in a token: 1 or Dk.
    fn decays(&self) -> usize {
        self.g.width() / self.value_heads.max(1)
    }

    /// What the key head of a value head has in row `t` of q or k: `[Dk]`.
    #[inline(always)]
    fn of_key<'b>(&self, rows: Rows<'b>, t: usize, head: usize) -> &'b [f32] {
        let key_head = head / (self.value_heads / self.key_heads);
        &rows.row(t)[key_head * self.key_dim..][..self.key_dim]
    }

    /// What a value head has in row `t` of v or of its like: `[Dv]`.
    #[inline(always)]
    fn of_value<'b>(&self, rows: Rows<'b>, t: usize, head: usize) -> &'b [f32] {
        &rows.row(t)[head * self.value_dim..][..self.value_dim]
    }
}
