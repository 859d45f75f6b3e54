//! State-space duality: its inputs, their checks, and the operation by stages and whole.

use numr::dtype::DType;
use numr::runtime::Runtime;
use numr::tensor::Tensor;

use super::tensor::{check_runs, expect, shape_error, to_vec};
use super::{Client, generic};
use crate::error::{Error, Result};

/// Decay rates `a` `[H]` of SSD: none is above 0, and 0 is no decay.
///
/// They are checked once, where they are made; a clone shares them.
#[derive(Debug, Clone)]
pub struct Decay<R: Runtime> {
    rates: Tensor<R>,
}

impl<R: Runtime<DType = DType>> Decay<R> {
    /// The rates `a`, one for each head.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] for another type than F32, and for a rate above 0 or NaN.
    pub fn new(a: Tensor<R>) -> Result<Self> {
        expect("a", &a, a.shape())?;
        // Gradients and chunks rely on decays of at most 1.
        match to_vec(&a)?.into_iter().find(|a| a.is_nan() || *a > 0.0) {
            None => Ok(Self { rates: a }),
            Some(a) => {
                let reason = format!("expected no value above 0, found {a}");
                Err(Error::Argument { name: "a", reason })
            }
        }
    }

    /// `[H]`
    #[must_use]
    pub fn rates(&self) -> &Tensor<R> {
        &self.rates
    }
}

/// Inputs of [`SsmKernelOps::ssd`]: the tokens of all runs, one after another.
///
/// Letters: T tokens, H heads, P head width, G groups (head h uses group h / (H / G)), N state width.
#[derive(Debug, Clone)]
pub struct SsdInput<'a, R: Runtime> {
    /// `[T, H, P]`
    pub x: &'a Tensor<R>,
    /// Raw steps `[T, H]`.
    pub dt: &'a Tensor<R>,
    /// Of H heads.
    pub a: &'a Decay<R>,
    /// `[T, G, N]`
    pub b: &'a Tensor<R>,
    /// `[T, G, N]`
    pub c: &'a Tensor<R>,
    /// `[H]`, added to `dt` before softplus.
    pub dt_bias: Option<&'a Tensor<R>>,
    /// Skip weights, `[H]` or `[H, P]`.
    pub d: Option<&'a Tensor<R>>,
    /// Gate `[T, H, P]`: y becomes `y * silu(z)`.
    pub z: Option<&'a Tensor<R>>,
    /// Whether steps go through softplus.
    pub dt_softplus: bool,
    /// Bounds of the steps after softplus, not below 0; `(0, infinity)` does nothing to them.
    pub dt_limit: (f32, f32),
}

impl<'a, R: Runtime<DType = DType>> SsdInput<'a, R> {
    /// Steps as they are, no skip and no gate: what the methods below add.
    #[must_use]
    pub fn new(
        x: &'a Tensor<R>,
        dt: &'a Tensor<R>,
        a: &'a Decay<R>,
        b: &'a Tensor<R>,
        c: &'a Tensor<R>,
    ) -> Self {
        let (dt_bias, d, z) = (None, None, None);
        let dt_limit = (0.0, f32::INFINITY);
        Self { x, dt, a, b, c, dt_bias, d, z, dt_softplus: false, dt_limit }
    }

    /// With a bias of the steps, `[H]`.
    #[must_use]
    pub fn dt_bias(self, dt_bias: impl Into<Option<&'a Tensor<R>>>) -> Self {
        Self { dt_bias: dt_bias.into(), ..self }
    }

    /// With skip weights, `[H]` or `[H, P]`.
    #[must_use]
    pub fn d(self, d: impl Into<Option<&'a Tensor<R>>>) -> Self {
        Self { d: d.into(), ..self }
    }

    /// With a gate `[T, H, P]`.
    #[must_use]
    pub fn z(self, z: impl Into<Option<&'a Tensor<R>>>) -> Self {
        Self { z: z.into(), ..self }
    }

    /// With steps that go through softplus, or not.
    #[must_use]
    pub fn dt_softplus(self, dt_softplus: bool) -> Self {
        Self { dt_softplus, ..self }
    }

    /// With bounds of the steps after softplus.
    #[must_use]
    pub fn dt_limit(self, dt_limit: (f32, f32)) -> Self {
        Self { dt_limit, ..self }
    }
}

/// Sizes of an SSD call, read off its tensors and found to agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SsdDims {
    pub(crate) tokens: usize,
    pub(crate) nheads: usize,
    pub(crate) headdim: usize,
    pub(crate) ngroups: usize,
    pub(crate) dstate: usize,
}

impl<R: Runtime<DType = DType>> SsdInput<'_, R> {
    pub(crate) fn dims(&self, runs: &[usize], states: &[&mut Tensor<R>]) -> Result<SsdDims> {
        let &[tokens, nheads, headdim] = self.x.shape() else {
            return Err(shape_error("x", &[0, 0, 0], self.x.shape()));
        };
        let &[_, ngroups, dstate] = self.b.shape() else {
            return Err(shape_error("b", &[tokens, 0, 0], self.b.shape()));
        };
        if ngroups == 0 || !nheads.is_multiple_of(ngroups) {
            let reason = format!("{ngroups} groups do not divide {nheads} heads");
            return Err(Error::Argument { name: "b", reason });
        }
        expect("x", self.x, &[tokens, nheads, headdim])?;
        expect("dt", self.dt, &[tokens, nheads])?;
        expect("a", self.a.rates(), &[nheads])?;
        expect("b", self.b, &[tokens, ngroups, dstate])?;
        expect("c", self.c, &[tokens, ngroups, dstate])?;
        if let Some(bias) = self.dt_bias {
            expect("dt_bias", bias, &[nheads])?;
        }
        if let Some(d) = self.d.filter(|d| d.shape() != [nheads]) {
            expect("d", d, &[nheads, headdim])?;
        }
        if let Some(z) = self.z {
            expect("z", z, &[tokens, nheads, headdim])?;
        }
        let (low, high) = self.dt_limit;
        if low.is_nan() || high.is_nan() || low < 0.0 || low > high {
            let reason = format!("expected 0 <= low <= high, found ({low}, {high})");
            return Err(Error::Argument { name: "dt_limit", reason });
        }
        check_runs(runs, tokens, states.len())?;
        for state in states {
            expect("states", state, &[nheads, headdim, dstate])?;
        }
        Ok(SsdDims { tokens, nheads, headdim, ngroups, dstate })
    }
}

/// State-space duality, the sequence operation of Mamba-2.
///
/// The four stages from [`ssd_chunk_cumsum`](Self::ssd_chunk_cumsum) to
/// [`ssd_chunk_scan`](Self::ssd_chunk_scan) leave out how tokens of one chunk reach each other; that is
/// [`ssd_chunk_intra`](Self::ssd_chunk_intra), and scan plus intra is the output. Models call
/// [`ssd`](Self::ssd). Letters: B batch, L length, Q chunk length, K chunks, others as in [`SsdInput`].
/// All tensors are f32.
///
/// ```
/// use boostr::backend::{Cpu, cpu};
/// use boostr::ops::{Decay, SsdInput, SsmKernelOps, tensor, to_vec, zeros};
///
/// let client = cpu();
/// let ones = |shape: &[usize]| {
///     tensor::<Cpu>(&client, &vec![1.0; shape.iter().product()], shape)
/// };
/// let (x, dt, b, c) = (ones(&[3, 1, 2])?, ones(&[3, 1])?, ones(&[3, 1, 4])?, ones(&[3, 1, 4])?);
/// let a = Decay::new(tensor(&client, &[-0.5], &[1])?)?;
/// // Two sequences, of two tokens and of one; each brings its state and takes it on.
/// let (mut first, mut second) = (zeros(&client, &[1, 2, 4])?, zeros(&client, &[1, 2, 4])?);
/// let input = SsdInput::new(&x, &dt, &a, &b, &c);
/// let y = to_vec(&client.ssd(&input, &[2, 1], &mut [&mut first, &mut second])?)?;
/// assert_eq!(y[..2], [4.0, 4.0]);
/// assert_eq!(y[4..], [4.0, 4.0]);
/// assert!((y[2] - 4.0 * (1.0 + (-0.5f32).exp())).abs() < 1e-6);
/// # Ok::<(), boostr::Error>(())
/// ```
pub trait SsmKernelOps<R: Runtime<DType = DType>>: Client<R> {
    /// Time steps and their cumulative decay: `(dt_out, da_cumsum)`, both `[B, H, K, Q]`.
    ///
    /// `dt` `[B, L, H]`, `a` `[H]`, `dt_bias` `[H]`. Bias first, then softplus, then the inclusive sum of
    /// `dt * a` inside each chunk. Positions past L are 0: they neither decay nor add.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] or [`Error::Argument`] when arguments disagree; so for all methods here.
    fn ssd_chunk_cumsum(
        &self,
        dt: &Tensor<R>,
        a: &Tensor<R>,
        dt_bias: Option<&Tensor<R>>,
        chunk_size: usize,
        dt_softplus: bool,
    ) -> Result<(Tensor<R>, Tensor<R>)> {
        generic::ssd_chunk_cumsum(self.library(), dt, a, dt_bias, chunk_size, dt_softplus)
    }

    /// Each chunk's own final state, from zero: `[B, K, H, P, N]`.
    ///
    /// `x` `[B, L, H, P]`, `b` `[B, L, G, N]`, `dt` and `da_cumsum` as returned by
    /// [`ssd_chunk_cumsum`](Self::ssd_chunk_cumsum).
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn ssd_chunk_state(
        &self,
        x: &Tensor<R>,
        b: &Tensor<R>,
        dt: &Tensor<R>,
        da_cumsum: &Tensor<R>,
    ) -> Result<Tensor<R>> {
        generic::ssd_chunk_state(self.library(), x, b, dt, da_cumsum)
    }

    /// The state after each chunk, `[B, K, H, P, N]`, from the chunks' own ones.
    ///
    /// `h[k] = exp(da_cumsum[k, last]) h[k-1] + own[k]` with `h[-1] = 0`.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn ssd_state_passing(&self, states: &Tensor<R>, da_cumsum: &Tensor<R>) -> Result<Tensor<R>> {
        generic::ssd_state_passing(self.library(), states, da_cumsum)
    }

    /// What reaches each token through the state that enters its chunk, plus `d * x`: `[B, L, H, P]`.
    ///
    /// `states` are those after each chunk, by [`ssd_state_passing`](Self::ssd_state_passing); `c`
    /// `[B, L, G, N]`; `d` `[H]` or `[H, P]`.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn ssd_chunk_scan(
        &self,
        x: &Tensor<R>,
        states: &Tensor<R>,
        c: &Tensor<R>,
        da_cumsum: &Tensor<R>,
        d: Option<&Tensor<R>>,
    ) -> Result<Tensor<R>> {
        generic::ssd_chunk_scan(self.library(), x, states, c, da_cumsum, d)
    }

    /// What reaches each token from the tokens of its own chunk: `[B, L, H, P]`.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn ssd_chunk_intra(
        &self,
        x: &Tensor<R>,
        b: &Tensor<R>,
        c: &Tensor<R>,
        dt: &Tensor<R>,
        da_cumsum: &Tensor<R>,
    ) -> Result<Tensor<R>> {
        generic::ssd_chunk_intra(self.library(), x, b, c, dt, da_cumsum)
    }

    /// The whole operation over ragged runs: y `[T, H, P]`.
    ///
    /// `runs` are the lengths of the sequences, which sum to T and may be 0 or 1. `states` holds an
    /// `[H, P, N]` tensor for each: what the sequence remembers before its first token here, replaced
    /// by what it remembers after its last. A run gives the same bits alone and in any company.
    ///
    /// # Errors
    ///
    /// When arguments disagree; states are then as they were. A failed allocation may leave some of
    /// them moved on.
    fn ssd(
        &self,
        input: &SsdInput<'_, R>,
        runs: &[usize],
        states: &mut [&mut Tensor<R>],
    ) -> Result<Tensor<R>> {
        generic::ssd(self.library(), input, runs, states)
    }
}
