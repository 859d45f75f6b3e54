//! The gated short convolution of LFM2 (Liquid AI, 2025): a mixer whose state is a few tokens of each channel.
//!
//! ```text
//! n ─ in_proj ─┬ B ─┐
//!              ├ x ─ * ─ causal conv1d, K taps ─┐
//!              └ C ──────────────────────────── * ─ out_proj ─ + residual
//! ```
//!
//! Rows of `in_proj` are `[B | C | x]`, each of d_model. Nothing is activated.

use serde_json::{Map, Value, json};

use super::batch::Batch;
use super::linear::Linear;
use super::params::Params;
use super::part::{Part, module};
use super::slots::Slot;
use crate::backend::{Backend, Tensor};
use crate::error::Result;
use crate::ops::{Activation, ActivationOps, CausalConv, CausalConvOps, LinearOps};

/// Sizes and options of a gated short convolution.
#[derive(Debug, Clone, PartialEq)]
pub struct ShortConvConfig {
    /// Channels: the width of the residual stream.
    pub d_model: usize,
    /// Taps, at least 1.
    pub d_conv: usize,
    /// Whether both projections and the convolution have a bias.
    pub bias: bool,
}

impl Part for ShortConvConfig {
    fn kind(&self) -> &'static str {
        "short convolution"
    }

    /// `conv`, the last inputs of the convolution, oldest first: `[d_conv - 1, d_model]`.
    fn slots(&self) -> Vec<Slot> {
        vec![Slot::fixed("conv", vec![self.d_conv.saturating_sub(1), self.d_model])]
    }

    fn sizes(&self) -> Vec<(&'static str, usize)> {
        vec![("conv_L_cache", self.d_conv)]
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        vec![("convolution", format!("{} taps, gated twice", self.d_conv))]
    }

    fn to_json(&self) -> Map<String, Value> {
        [("d_conv".to_owned(), json!(self.d_conv))].into_iter().collect()
    }

    fn work_width(&self) -> usize {
        6 * self.d_model
    }
}

/// The mixer's weights.
pub struct ShortConv<B: Backend> {
    width: usize,
    /// `[3 d_model, d_model]`
    in_proj: Linear<B>,
    /// `[d_conv, d_model]`: taps first, unlike the checkpoint
    taps: Tensor<B>,
    /// `[d_model]`
    bias: Option<Tensor<B>>,
    out_proj: Linear<B>,
}

impl<B: Backend> ShortConv<B> {
    /// Loads the mixer; the convolution becomes f32 whatever its type.
    ///
    /// # Errors
    ///
    /// When a parameter is missing or no float.
    pub fn load(config: &ShortConvConfig, params: &Params<'_, B>) -> Result<Self> {
        let &ShortConvConfig { d_model, d_conv, bias } = config;
        let conv = params.under("conv");
        let taps = conv.tensor("weight", &[d_model, 1, d_conv])?;
        let of_conv = || conv.tensor("bias", &[d_model]);
        Ok(Self {
            width: d_model,
            in_proj: Linear::load(&params.under("in_proj"), [3 * d_model, d_model], bias)?,
            taps: params.computed(|client| client.transpose(&taps.reshape(&[d_model, d_conv])?))?,
            bias: bias.then(of_conv).transpose()?,
            out_proj: Linear::load(&params.under("out_proj"), [d_model, d_model], bias)?,
        })
    }

    /// `residual + factor * mixer(u)` for the tokens `[T, d_model]` of all runs.
    ///
    /// # Errors
    ///
    /// When shapes disagree or memory is short.
    pub fn forward_onto(
        &self,
        client: &B::Client,
        u: &Tensor<B>,
        (residual, factor): (Tensor<B>, f32),
        batch: &mut Batch<B>,
    ) -> Result<Tensor<B>> {
        let all = self.in_proj.forward(client, u)?; // [T, 3 d_model]
        let [b, c, x] = [0, 1, 2].map(|at| all.narrow(1, at * self.width, self.width));
        let times = |gate: &Tensor<B>, x: &Tensor<B>| client.glu(Activation::Identity, gate, x);
        let conv = CausalConv { weight: &self.taps, bias: self.bias.as_ref(), silu: false };
        let (runs, mut windows) = batch.tensors("conv")?;
        let y = client.causal_conv1d(&times(&b?, &x?)?, &conv, runs, &mut windows)?;
        self.out_proj.forward_onto(client, &times(&c?, &y)?, residual, factor)
    }

    /// Bytes that a pass over the layer's matrices reads.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.in_proj.weight().size_in_bytes() + self.out_proj.weight().size_in_bytes()
    }
}

module!(ShortConv of ShortConvConfig, |self, client, u, onto, batch| self.forward_onto(client, u, onto, batch));
