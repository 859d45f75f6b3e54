//! Feed-forward layers: two projections with an activation between, gated or not.

use serde_json::{Map, Value, json};

use super::joined::Joined;
use super::linear::Linear;
use super::params::Params;
use super::part::{Part, module};
use crate::backend::{Backend, Tensor};
use crate::error::Result;
use crate::ops::{Activation, ActivationOps};

/// Sizes and options of a feed-forward layer.
#[derive(Debug, Clone, PartialEq)]
pub struct MlpConfig {
    /// Width of input and output.
    pub d_model: usize,
    /// Width between.
    pub d_ff: usize,
    /// `down(act(gate(x)) * up(x))`; else `down(act(up(x)))`.
    pub gated: bool,
    /// The activation.
    pub act: Activation,
    /// Whether the projections have a bias.
    pub bias: bool,
    /// Factor of the gate before its activation.
    pub gate_scale: f32,
}

impl MlpConfig {
    /// `down(silu(gate(x)) * up(x))`
    #[must_use]
    pub fn swiglu(d_model: usize, d_ff: usize) -> Self {
        Self { d_model, d_ff, gated: true, act: Activation::Silu, bias: false, gate_scale: 1.0 }
    }

    /// `down(relu(up(x))²)`
    #[must_use]
    pub fn relu2(d_model: usize, d_ff: usize) -> Self {
        Self { gated: false, act: Activation::Relu2, ..Self::swiglu(d_model, d_ff) }
    }
}

impl Part for MlpConfig {
    fn kind(&self) -> &'static str {
        "mlp"
    }

    fn sizes(&self) -> Vec<(&'static str, usize)> {
        vec![("intermediate_size", self.d_ff)]
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        vec![("feed-forward", format!("width {}", self.d_ff))]
    }

    fn to_json(&self) -> Map<String, Value> {
        [("feed_forward".to_owned(), json!({ "width": self.d_ff }))].into_iter().collect()
    }

    fn work_width(&self) -> usize {
        3 * self.d_ff
    }
}

/// The layer's weights.
pub struct Mlp<B: Backend> {
    act: Activation,
    gated: bool,
    /// gate_proj where there is one, and up_proj.
    wide_proj: Joined<B>,
    down_proj: Linear<B>,
    /// The factor of the gate, `[d_ff]`; `None` where it is 1.
    gate_scale: Option<Tensor<B>>,
}

impl<B: Backend> Mlp<B> {
    /// Loads the layer.
    ///
    /// # Errors
    ///
    /// When a parameter is missing or no float.
    pub fn load(config: &MlpConfig, params: &Params<'_, B>) -> Result<Self> {
        let (d_model, d_ff) = (config.d_model, config.d_ff);
        let wide: &[(&str, usize)] = &[("gate_proj", d_ff), ("up_proj", d_ff)];
        let wide = if config.gated { wide } else { &wide[1..] };
        let down = Linear::load(&params.under("down_proj"), [d_model, d_ff], config.bias)?;
        Ok(Self {
            act: config.act,
            gated: config.gated,
            wide_proj: Joined::load(params, wide, d_model, config.bias)?,
            // Products of gate and up have outliers.
            down_proj: down.precise(),
            gate_scale: params.factors(&[(d_ff, config.gate_scale)])?,
        })
    }

    /// `[T, d_model]` to `[T, d_model]`.
    ///
    /// # Errors
    ///
    /// When the width disagrees or memory is short.
    pub fn forward(&self, client: &B::Client, x: &Tensor<B>) -> Result<Tensor<B>> {
        self.down_proj.forward(client, &self.hidden(client, x)?)
    }

    /// The same times `factor`, added to `residual` `[T, d_model]`.
    ///
    /// # Errors
    ///
    /// When a width disagrees or memory is short.
    pub fn forward_onto(
        &self,
        client: &B::Client,
        x: &Tensor<B>,
        residual: Tensor<B>,
        factor: f32,
    ) -> Result<Tensor<B>> {
        self.down_proj.forward_onto(client, &self.hidden(client, x)?, residual, factor)
    }

    /// What the last projection gets: `[T, d_ff]`.
    fn hidden(&self, client: &B::Client, x: &Tensor<B>) -> Result<Tensor<B>> {
        self.between(client, Linear::forward_all(client, &self.wide(x))?)
    }

    /// The first products, of `x` `[T, d_model]`, for [`Linear::forward_all`].
    pub(super) fn wide<'a>(&'a self, x: &'a Tensor<B>) -> Vec<(&'a Linear<B>, &'a Tensor<B>)> {
        self.wide_proj.of(x)
    }

    /// What the last projection gets, `[T, d_ff]`, of what the first products gave.
    pub(super) fn between(
        &self,
        client: &B::Client,
        outputs: impl IntoIterator<Item = Tensor<B>>,
    ) -> Result<Tensor<B>> {
        if !self.gated {
            let [up] = self.wide_proj.split(outputs)?;
            return client.activate(self.act, &up);
        }
        let [gate, up] = self.wide_proj.split(outputs)?;
        match &self.gate_scale {
            None => client.glu(self.act, &gate, &up),
            Some(factors) => client.glu(self.act, &client.scale_columns(&gate, factors)?, &up),
        }
    }

    /// The last projection, of what is [`between`](Self::between).
    pub(super) fn down(&self) -> &Linear<B> {
        &self.down_proj
    }

    /// Bytes that a pass over the layer's matrices reads.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.wide_proj.weight_bytes() + self.down_proj.weight().size_in_bytes()
    }
}

module!(Mlp of MlpConfig, |self, client, u, onto, _| self.forward_onto(client, u, onto.0, onto.1));
