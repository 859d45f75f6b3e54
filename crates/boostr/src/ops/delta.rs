//! The gated delta rule: its inputs, their checks, the two operations and their decay gate.

use numr::dtype::DType;
use numr::runtime::Runtime;
use numr::tensor::Tensor;

use super::tensor::{check_runs, expect, shape_error};
use super::{Client, generic};
use crate::error::{Error, Result};

/// Inputs of [`DeltaOps::gated_delta`] and [`DeltaOps::kda`]: the tokens of all runs, one after another.
///
/// Letters: T tokens, Hk key heads, Hv value heads (value head h uses key head h / (Hv / Hk)), Dk and Dv
/// widths of a key and of a value head. All tensors are f32.
#[derive(Debug, Clone)]
pub struct DeltaInput<'a, R: Runtime> {
    /// `[T, Hk, Dk]`, normalised by [`l2norm`](super::NormOps::l2norm) as a rule.
    pub q: &'a Tensor<R>,
    /// `[T, Hk, Dk]`, normalised likewise: keys longer than 1 may make a state grow without bound.
    pub k: &'a Tensor<R>,
    /// `[T, Hv, Dv]`
    pub v: &'a Tensor<R>,
    /// Logarithms of decays, not above 0: `[T, Hv]` for `gated_delta`, `[T, Hv, Dk]` for `kda`.
    pub g: &'a Tensor<R>,
    /// `[T, Hv]`, in 0..=2: the share of what the state has for a key that is replaced.
    pub beta: &'a Tensor<R>,
    /// Factor of what the query reads, `Dk^-0.5` as a rule.
    pub scale: f32,
}

/// Sizes of a call, read off its tensors and found to agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeltaDims {
    pub(crate) tokens: usize,
    pub(crate) key_heads: usize,
    pub(crate) value_heads: usize,
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
}

impl<R: Runtime<DType = DType>> DeltaInput<'_, R> {
    /// The sizes; `by_channel` where g has a decay for each key channel.
    pub(crate) fn dims(
        &self,
        by_channel: bool,
        runs: &[usize],
        states: &[&mut Tensor<R>],
    ) -> Result<DeltaDims> {
        let &[tokens, value_heads, value_dim] = self.v.shape() else {
            return Err(shape_error("v", &[0, 0, 0], self.v.shape()));
        };
        let &[_, key_heads, key_dim] = self.k.shape() else {
            return Err(shape_error("k", &[tokens, 0, 0], self.k.shape()));
        };
        if key_heads == 0 || !value_heads.is_multiple_of(key_heads) {
            let reason = format!("{key_heads} key heads do not divide {value_heads} value heads");
            return Err(Error::Argument { name: "k", reason });
        }
        expect("v", self.v, &[tokens, value_heads, value_dim])?;
        expect("q", self.q, &[tokens, key_heads, key_dim])?;
        expect("k", self.k, &[tokens, key_heads, key_dim])?;
        if by_channel {
            expect("g", self.g, &[tokens, value_heads, key_dim])?;
        } else {
            expect("g", self.g, &[tokens, value_heads])?;
        }
        expect("beta", self.beta, &[tokens, value_heads])?;
        check_runs(runs, tokens, states.len())?;
        for state in states {
            expect("states", state, &[value_heads, key_dim, value_dim])?;
        }
        Ok(DeltaDims { tokens, key_heads, value_heads, key_dim, value_dim })
    }
}

/// Inputs of [`DeltaOps::decay_gate`].
#[derive(Debug, Clone)]
pub struct DecayGate<'a, R: Runtime> {
    /// `[T, W]`, W a multiple of the H heads.
    pub a: &'a Tensor<R>,
    /// Logarithms of the heads' rates, `[H]`.
    pub a_log: &'a Tensor<R>,
    /// `[W]`
    pub dt_bias: &'a Tensor<R>,
}

impl<R: Runtime<DType = DType>> DecayGate<'_, R> {
    /// `(T, W, H)`
    pub(crate) fn check(&self) -> Result<(usize, usize, usize)> {
        let &[tokens, width] = self.a.shape() else {
            return Err(shape_error("a", &[0, 0], self.a.shape()));
        };
        let &[heads] = self.a_log.shape() else {
            return Err(shape_error("a_log", &[0], self.a_log.shape()));
        };
        expect("a", self.a, &[tokens, width])?;
        expect("a_log", self.a_log, &[heads])?;
        expect("dt_bias", self.dt_bias, &[width])?;
        if heads == 0 || !width.is_multiple_of(heads) {
            let reason = format!("{heads} heads do not divide {width} columns of a");
            return Err(Error::Argument { name: "a_log", reason });
        }
        Ok((tokens, width, heads))
    }
}

/// The gated delta rule, the sequence operation of Gated DeltaNet and of Kimi Delta Attention.
///
/// ```text
/// S'    = exp(g[t]) S[t-1]             S: [Dk, Dv] for each value head
/// u     = beta[t] (v[t] - S'ᵀ k[t])    what the state has for the key, read after the decay, is replaced
/// S[t]  = S' + k[t] uᵀ
/// o[t]  = scale S[t]ᵀ q[t]             read after the write
/// ```
///
/// Papers: *Gated Delta Networks* (arXiv 2412.06464) and *Kimi Linear* (arXiv 2510.26692).
///
/// ```
/// use boostr::backend::{Cpu, cpu};
/// use boostr::ops::{DeltaInput, DeltaOps, tensor, to_vec, zeros};
///
/// let client = cpu();
/// let new = |data: &[f32], shape: &[usize]| tensor::<Cpu>(&client, data, shape);
/// // One head, keys of width 2. The second token has the key of the first, and replaces its value.
/// let k = new(&[1.0, 0.0, 1.0, 0.0], &[2, 1, 2])?;
/// let v = new(&[5.0, 7.0], &[2, 1, 1])?;
/// let (g, beta) = (new(&[0.0, 0.0], &[2, 1])?, new(&[1.0, 1.0], &[2, 1])?);
/// let mut state = zeros(&client, &[1, 2, 1])?;
/// let input = DeltaInput { q: &k, k: &k, v: &v, g: &g, beta: &beta, scale: 1.0 };
/// let o = client.gated_delta(&input, &[2], &mut [&mut state])?;
/// assert_eq!(to_vec(&o)?, [5.0, 7.0]);
/// assert_eq!(to_vec(&state)?, [7.0, 0.0]);
/// # Ok::<(), boostr::Error>(())
/// ```
pub trait DeltaOps<R: Runtime<DType = DType>>: Client<R> {
    /// The rule with one decay for each value head (Gated DeltaNet), over ragged runs: o `[T, Hv, Dv]`.
    ///
    /// `runs` are the lengths of the sequences, which sum to T and may be 0 or 1. `states` holds an
    /// `[Hv, Dk, Dv]` tensor for each: what the sequence remembers before its first token here, replaced
    /// by what it remembers after its last. On the CPU a token has the same bits however its sequence is
    /// cut into calls, and in any company.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] or [`Error::Argument`] when arguments disagree; states are then as they were. A
    /// failed allocation may leave some of them moved on.
    fn gated_delta(
        &self,
        input: &DeltaInput<'_, R>,
        runs: &[usize],
        states: &mut [&mut Tensor<R>],
    ) -> Result<Tensor<R>> {
        generic::gated_delta(self.library(), input, runs, states)
    }

    /// The rule with a decay for each key channel (Kimi Delta Attention): row i of a head's state decays
    /// by `exp(g[.., i])`. Else as [`gated_delta`](Self::gated_delta).
    ///
    /// # Errors
    ///
    /// As there.
    fn kda(
        &self,
        input: &DeltaInput<'_, R>,
        runs: &[usize],
        states: &mut [&mut Tensor<R>],
    ) -> Result<Tensor<R>> {
        generic::kda(self.library(), input, runs, states)
    }

    /// Logarithms of decays, `-exp(a_log) softplus(a + dt_bias)`: `[T, W]`, none above 0.
    ///
    /// Each head has W / H neighbouring columns: one for `gated_delta`, Dk for `kda`.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn decay_gate(&self, gate: &DecayGate<'_, R>) -> Result<Tensor<R>> {
        generic::decay_gate(self.library(), gate)
    }
}
