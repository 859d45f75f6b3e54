//! Operations on tensors, as traits over the clients of the tensor library.
//!
//! | trait | operations |
//! |---|---|
//! | [`SsmKernelOps`] | SSD by stages and whole |
//! | [`CausalConvOps`] | depthwise convolution with a carried window |
//! | [`NormOps`] | RMS norm, gated and grouped |
//! | [`LinearOps`] | weights, products with them, rows of them |
//! | [`AttentionOps`] | causal attention with carried keys and values, latent attention, rotary positions |
//! | [`ActivationOps`] | activations, gates, factors, sums of chosen rows, columns side by side |
//!
//! [`Tape`] is a client that has them all and takes gradients of what it ran.
//!
//! Every method has a portable body composed of the tensor library's own operations (`generic`), so a
//! backend without kernels of its own is one `impl` line. `cpu` overrides them with `boostr-kernels`
//! on the tensors' memory. Only this module, `backend` and `error` name the tensor library.
//!
//! Activations are ragged, never padded: the tokens of several runs (sequences) are the rows of one
//! `[T, width]` tensor, one run after another; `runs` holds their lengths. What a sequence must
//! remember between calls is a tensor for each run, replaced by the call. A state that is shared with
//! a clone is copied before it is written; one that is not is updated in place.

mod activation;
mod attention;
mod cpu;
pub mod generic;
mod host;
mod routing;
mod tape;
mod weight;

use numr::ops::{ScalarOps, ShapeOps, TensorOps};
use numr::runtime::{Runtime, RuntimeClient};
use numr::tensor::Tensor;
use rayon::prelude::*;

pub use numr::dtype::DType;

pub use activation::{Activation, ActivationOps};
pub use attention::{
    Attention, AttentionOps, KvCache, KvSizes, KvType, LatentAttention, Rope, RopeScaling,
    RopeStyle, Yarn,
};
pub use boostr_kernels::Level;
pub use boostr_kernels::quant::Format;
pub use cpu::{CpuClient, KernelClient};
pub use routing::{ExpertWeights, Routing, sigmoid, softmax};
pub use tape::Tape;
pub use weight::{HostBytes, QuantTensor, Weight};

use crate::error::{Error, Result};

/// What the portable bodies need of a client; every client of the tensor library has it.
pub trait TensorClient<R: Runtime<DType = DType>>:
    RuntimeClient<R> + TensorOps<R> + ScalarOps<R>
{
}

impl<R, C> TensorClient<R> for C
where
    R: Runtime<DType = DType>,
    C: RuntimeClient<R> + TensorOps<R> + ScalarOps<R>,
{
}

/// A client that runs operations: the tensor library's own, or one that stands before it.
pub trait Client<R: Runtime<DType = DType>>: Clone + Send + Sync {
    /// The tensor library's client.
    type Library: TensorClient<R>;

    /// The tensor library's client, of whose operations the portable bodies are composed.
    fn library(&self) -> &Self::Library;

    /// Hears of a tensor that is made of values: of a parameter with its name, of a constant without.
    fn made(&self, name: Option<&str>, x: &Tensor<R>) {
        let _ = (name, x);
    }

    /// What `run` makes of `input`: a part of a model, whose operations are called on the client that it is
    /// given.
    ///
    /// A client that records may keep `input` and `run` in place of what it records of the part, to record
    /// it when it is needed. So `run` computes the same each time, no losses, and its tensors from those of
    /// `input` and the model's weights.
    ///
    /// # Errors
    ///
    /// What `run` returns.
    fn segment<S: TensorTree<R>>(
        &self,
        input: S,
        run: impl Fn(&Self, S) -> Result<S> + Send + 'static,
    ) -> Result<S> {
        run(self, input)
    }
}

/// A value with tensors in it; a clone shares their memory.
pub trait TensorTree<R: Runtime<DType = DType>>: Clone + Send + 'static {
    /// Its tensors, in an order that is the same for values that were made alike.
    fn tensors(&self) -> Vec<&Tensor<R>>;
}

impl<R, C> Client<R> for C
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    type Library = C;

    fn library(&self) -> &C {
        self
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
    /// `[H]`, negative; 0 is no decay.
    pub a: &'a Tensor<R>,
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
        expect("a", self.a, &[nheads])?;
        expect("b", self.b, &[tokens, ngroups, dstate])?;
        expect("c", self.c, &[tokens, ngroups, dstate])?;
        // Gradients and chunks rely on decays of at most 1.
        if let Some(a) = to_vec(self.a)?.into_iter().find(|a| a.is_nan() || *a > 0.0) {
            let reason = format!("expected no value above 0, found {a}");
            return Err(Error::Argument { name: "a", reason });
        }
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
/// use boostr::ops::{SsdInput, SsmKernelOps};
/// use numr::prelude::*;
///
/// let device = CpuDevice::new();
/// let client = CpuRuntime::default_client(&device);
/// let ones = |shape: &[usize]| Tensor::<CpuRuntime>::ones(shape, DType::F32, &device);
/// let (x, dt, b, c) = (ones(&[3, 1, 2])?, ones(&[3, 1])?, ones(&[3, 1, 4])?, ones(&[3, 1, 4])?);
/// let a = Tensor::from_slice(&[-0.5f32], &[1], &device)?;
/// let input = SsdInput {
///     x: &x, dt: &dt, a: &a, b: &b, c: &c,
///     dt_bias: None, d: None, z: None, dt_softplus: false, dt_limit: (0.0, f32::INFINITY),
/// };
/// // Two sequences, of two tokens and of one; each brings its state and takes it on.
/// let mut first = Tensor::zeros(&[1, 2, 4], DType::F32, &device)?;
/// let mut second = first.clone();
/// let y = client.ssd(&input, &[2, 1], &mut [&mut first, &mut second])?;
/// let y: Vec<f32> = y.to_vec();
/// assert_eq!(y[..2], [4.0, 4.0]);
/// assert_eq!(y[4..], [4.0, 4.0]);
/// assert!((y[2] - 4.0 * (1.0 + (-0.5f32).exp())).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
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

/// Weights of a causal depthwise convolution.
#[derive(Debug, Clone)]
pub struct CausalConv<'a, R: Runtime> {
    /// Taps `[K, C]`, oldest first, K >= 1.
    pub weight: &'a Tensor<R>,
    /// `[C]`
    pub bias: Option<&'a Tensor<R>>,
    /// Whether silu follows.
    pub silu: bool,
}

/// Causal depthwise convolution.
pub trait CausalConvOps<R: Runtime<DType = DType>>: Client<R> {
    /// Convolves the rows `[T, C]` of each run along time.
    ///
    /// `windows` holds a `[K - 1, C]` tensor for each run: the last inputs before its first token,
    /// oldest first (zeros for a new sequence), replaced by the last inputs of the run.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn causal_conv1d(
        &self,
        x: &Tensor<R>,
        conv: &CausalConv<'_, R>,
        runs: &[usize],
        windows: &mut [&mut Tensor<R>],
    ) -> Result<Tensor<R>> {
        generic::causal_conv1d(self.library(), x, conv, runs, windows)
    }
}

/// Options of [`NormOps::gated_rmsnorm`].
#[derive(Debug, Clone)]
pub struct GatedNorm<'a, R: Runtime> {
    /// `[width]`
    pub weight: &'a Tensor<R>,
    /// Groups of neighbouring channels with a mean of their own; divides the width.
    pub ngroups: usize,
    /// Added to the mean of squares.
    pub eps: f32,
    /// Norm first, then gate; else gate first.
    pub norm_before_gate: bool,
}

/// Root-mean-square norms of rows.
pub trait NormOps<R: Runtime<DType = DType>>: Client<R> {
    /// `x / sqrt(mean(x²) + eps) * weight` for each row of `[T, width]`.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn rmsnorm(&self, x: &Tensor<R>, weight: &Tensor<R>, eps: f32) -> Result<Tensor<R>> {
        generic::rmsnorm(self.library(), x, weight, eps)
    }

    /// Gates rows of `y` `[T, width]` by `silu(z)` and normalises them by groups.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn gated_rmsnorm(
        &self,
        y: &Tensor<R>,
        z: &Tensor<R>,
        norm: &GatedNorm<'_, R>,
    ) -> Result<Tensor<R>> {
        generic::gated_rmsnorm(self.library(), y, z, norm)
    }
}

/// Products with weight matrices `[out, in]`, kept in the type they are stored in.
pub trait LinearOps<R: Runtime<DType = DType>>: Client<R> {
    /// A weight over bytes that somebody else keeps: `shape`'s elements of `dtype`, little-endian.
    ///
    /// A backend that can use them where they lie keeps `bytes` and copies nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when the bytes are not that many; [`Error::Unsupported`] for other types
    /// than F32, BF16 and F16.
    fn weight(&self, bytes: HostBytes, dtype: DType, shape: &[usize]) -> Result<Weight<R>> {
        Weight::copied(&bytes, dtype, shape, self.library().device())
    }

    /// A weight of quantized blocks.
    ///
    /// A backend with a kernel for the format keeps it as dense as it is and multiplies with
    /// activations that it rounds to 8 bits ([`boostr_kernels::quant`]); others decode it to f32.
    ///
    /// # Errors
    ///
    /// When memory is short.
    fn quantized(&self, w: &QuantTensor) -> Result<Weight<R>> {
        Weight::decoded(w, self.library().device())
    }

    /// `x · wᵀ` plus a bias, added to `add_to` where given: `[T, in]` to `[T, out]`.
    ///
    /// A row gives the same bits whatever other rows there are.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn linear(
        &self,
        x: &Tensor<R>,
        w: &Weight<R>,
        bias: Option<&Tensor<R>>,
        add_to: Option<Tensor<R>>,
    ) -> Result<Tensor<R>> {
        generic::linear(self.library(), x, w, bias, add_to)
    }

    /// As [`linear`](Self::linear), where rounding of activations matters most: a backend that rounds them
    /// for quantized weights keeps 16 bits of them in place of 8.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn linear_precise(
        &self,
        x: &Tensor<R>,
        w: &Weight<R>,
        bias: Option<&Tensor<R>>,
        add_to: Option<Tensor<R>>,
    ) -> Result<Tensor<R>> {
        self.linear(x, w, bias, add_to)
    }

    /// Rows `ids` of a weight `[vocab, width]`, as f32 `[ids, width]`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when an id is not a row.
    fn embedding(&self, w: &Weight<R>, ids: &[u32]) -> Result<Tensor<R>> {
        generic::embedding(self.library(), w, ids)
    }

    /// Rows of `x` `[T, width]`, in the order of `rows`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when there is no such row.
    fn select_rows(&self, x: &Tensor<R>, rows: &[usize]) -> Result<Tensor<R>> {
        generic::select_rows(self.library(), x, rows)
    }

    /// Rows of several tensors `[T, width]`, one after another.
    ///
    /// # Errors
    ///
    /// When widths disagree or there is none.
    fn concat_rows(&self, parts: &[Tensor<R>]) -> Result<Tensor<R>> {
        Ok(self.library().cat(&parts.iter().collect::<Vec<_>>(), 0)?)
    }

    /// What each row of `h` `[T, width]` loses on its target: `-ln softmax(scale * h · headᵀ)[target]`,
    /// `[T]`, and 0 where the target is [`IGNORE`].
    ///
    /// A backend that records takes the gradient of `sum of weights[t] * loss[t]`. The `[T, V]` logits
    /// are never there at once. `is_precise` is for [`linear_precise`](Self::linear_precise).
    ///
    /// # Errors
    ///
    /// When arguments disagree or a target is no row of `head`.
    fn cross_entropy(
        &self,
        h: &Tensor<R>,
        head: &Weight<R>,
        scale: f32,
        (targets, weights): (&[u32], &[f32]),
        is_precise: bool,
    ) -> Result<Tensor<R>> {
        generic::check_targets(h, head, targets, weights)?;
        cross_entropy_by_rows(self, h, head, scale, targets, is_precise)
    }

    /// `a = -exp(a_log)` `[H]`, rounded once: the same wherever it is computed.
    ///
    /// # Errors
    ///
    /// When the argument is not f32.
    fn decay_rates(&self, a_log: &Tensor<R>) -> Result<Tensor<R>> {
        let rates: Vec<f32> = to_vec(a_log)?.into_iter().map(decay_rate).collect();
        tensor(self, &rates, a_log.shape())
    }

    /// `[width, T]` from `[T, width]`.
    ///
    /// # Errors
    ///
    /// When the argument is no f32 matrix.
    fn transpose(&self, x: &Tensor<R>) -> Result<Tensor<R>> {
        let &[rows, width] = x.shape() else {
            return Err(shape_error("x", &[0, 0], x.shape()));
        };
        let values = to_vec(x)?;
        let turned: Vec<f32> =
            (0..values.len()).map(|i| values[i % rows * width + i / rows]).collect();
        tensor(self, &turned, &[width, rows])
    }
}

/// A target that counts for nothing.
pub const IGNORE: u32 = u32::MAX;
/// Rows whose logits are there at once.
const LOSS_ROWS: usize = 64;

/// `-exp(a_log)`, rounded once.
#[must_use]
pub fn decay_rate(a_log: f32) -> f32 {
    (-f64::from(a_log).exp()) as f32
}

/// Losses by the logits of a few rows at a time, whatever the head's type.
fn cross_entropy_by_rows<R: Runtime<DType = DType>, C: LinearOps<R>>(
    client: &C,
    h: &Tensor<R>,
    head: &Weight<R>,
    scale: f32,
    targets: &[u32],
    is_precise: bool,
) -> Result<Tensor<R>> {
    let mut losses = Vec::with_capacity(targets.len());
    for first in (0..targets.len()).step_by(LOSS_ROWS) {
        let rows = h.narrow(0, first, LOSS_ROWS.min(targets.len() - first))?;
        let logits = if is_precise {
            client.linear_precise(&rows, head, None, None)?
        } else {
            client.linear(&rows, head, None, None)?
        };
        let logits = to_vec(&logits)?;
        let rows = logits.par_chunks_exact(head.shape()[0].max(1)).zip(&targets[first..]);
        losses.par_extend(rows.map(|(row, &id)| loss(row, scale, id)));
    }
    tensor(client, &losses, &[losses.len()])
}

/// `-ln softmax(scale * logits)[target]`
fn loss(logits: &[f32], scale: f32, target: u32) -> f32 {
    let Some(&logit) = logits.get(target as usize) else { return 0.0 };
    let scale = f64::from(scale);
    let max = logits.iter().map(|&x| scale * f64::from(x)).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|&x| (scale * f64::from(x) - max).exp()).sum();
    (max + sum.ln() - scale * f64::from(logit)) as f32
}

/// A view with the last dimension of `x` split into `sizes`, whatever the strides of the others.
///
/// # Errors
///
/// [`Error::Shape`] when the last dimension is not contiguous or not their product.
pub fn split_last<R: Runtime<DType = DType>>(x: &Tensor<R>, sizes: &[usize]) -> Result<Tensor<R>> {
    let (&width, outer) = x.shape().split_last().unwrap_or((&1, &[]));
    let product = sizes.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
    if product != Some(width) || (width > 1 && x.strides().last() != Some(&1)) {
        return Err(shape_error("x", sizes, x.shape()));
    }
    let mut shape = outer.to_vec();
    let mut strides = x.strides()[..outer.len()].to_vec();
    let mut inner = width.max(1);
    for &size in sizes {
        inner /= size.max(1);
        shape.push(size);
        strides.push(inner.cast_signed());
    }
    let layout = numr::tensor::Layout::new(shape, strides, x.offset());
    Ok(Tensor::from_parts(x.storage().clone(), layout))
}

/// A new f32 tensor of `shape` that holds `data`.
///
/// # Errors
///
/// When the sizes disagree or memory is short.
pub fn tensor<R: Runtime<DType = DType>>(
    client: &impl Client<R>,
    data: &[f32],
    shape: &[usize],
) -> Result<Tensor<R>> {
    let x = Tensor::from_slice(data, shape, client.library().device())?;
    client.made(None, &x);
    Ok(x)
}

/// A new f32 tensor of zeros.
///
/// # Errors
///
/// When memory is short.
pub fn zeros<R: Runtime<DType = DType>>(
    client: &impl Client<R>,
    shape: &[usize],
) -> Result<Tensor<R>> {
    let len = shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim));
    let mut data: Vec<f32> = Vec::new();
    if len.is_none_or(|len| data.try_reserve_exact(len).is_err()) {
        let what = format!("tensor of {shape:?} f32: there is not so much memory");
        return Err(Error::Unsupported { what });
    }
    data.resize(len.unwrap_or(0), 0.0);
    tensor(client, &data, shape)
}

/// The elements of an f32 tensor, row-major, whatever its strides.
///
/// # Errors
///
/// [`Error::Argument`] for another type.
pub fn to_vec<R: Runtime<DType = DType>>(x: &Tensor<R>) -> Result<Vec<f32>> {
    expect("x", x, x.shape())?;
    Ok(x.contiguous()?.try_to_vec()?)
}

/// Where a tensor's storage is, and its bytes: clones and views share one.
pub(crate) fn block<R: Runtime<DType = DType>>(x: &Tensor<R>) -> (usize, usize) {
    (x.storage().ptr() as usize, x.storage().size_in_bytes())
}

/// Checks that `x` has the type and shape of `like`.
pub(crate) fn check_like<R: Runtime<DType = DType>>(
    name: &'static str,
    x: &Tensor<R>,
    like: &Tensor<R>,
) -> Result<()> {
    expect(name, x, like.shape())
}

pub(crate) fn shape_error(name: &str, expected: &[usize], got: &[usize]) -> Error {
    Error::Shape { name: name.into(), expected: expected.to_vec(), got: got.to_vec() }
}

/// Checks that a layout stays inside its storage, which the tensor library believes unseen.
pub(crate) fn check_layout<R: Runtime<DType = DType>>(
    name: &'static str,
    x: &Tensor<R>,
) -> Result<()> {
    let (mut low, mut high) = (x.offset().cast_signed(), x.offset().cast_signed());
    for (&size, &stride) in x.shape().iter().zip(x.strides()) {
        let reach = size.saturating_sub(1).cast_signed().saturating_mul(stride);
        low = low.saturating_add(reach.min(0));
        high = high.saturating_add(reach.max(0));
    }
    let len = x.storage().len();
    if x.shape().contains(&0) || (low >= 0 && high.unsigned_abs() < len) {
        return Ok(());
    }
    let reason = format!("layout reaches from {low} to {high} in a storage of {len} elements");
    Err(Error::Argument { name, reason })
}

/// Checks type, shape and layout of an argument.
pub(crate) fn expect<R: Runtime<DType = DType>>(
    name: &'static str,
    x: &Tensor<R>,
    shape: &[usize],
) -> Result<()> {
    if x.dtype() != DType::F32 {
        let reason = format!("expected F32, found {:?}", x.dtype());
        return Err(Error::Argument { name, reason });
    }
    if x.shape() != shape {
        return Err(shape_error(name, shape, x.shape()));
    }
    check_layout(name, x)
}

pub(crate) fn check_runs(runs: &[usize], tokens: usize, states: usize) -> Result<()> {
    let sum = runs.iter().try_fold(0usize, |sum, &len| sum.checked_add(len));
    if sum != Some(tokens) {
        let reason = format!("expected lengths that sum to {tokens} tokens, found {runs:?}");
        return Err(Error::Argument { name: "runs", reason });
    }
    if states != runs.len() {
        let reason = format!("expected one for each of {} runs, found {states}", runs.len());
        return Err(Error::Argument { name: "states", reason });
    }
    Ok(())
}
