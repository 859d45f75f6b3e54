//! A block of attention and a feed-forward part whose weights several layers share, as in Zamba2.
//!
//! ```text
//! h ─ [h | e] ─ input_layernorm ─ self_attn ─ pre_ff_layernorm ─ feed_forward ─ linear ─ + residual
//! ```
//!
//! e are the rows that entered the first layer. A layer's own are `linear`, and low-rank adapters beside the
//! projections to queries, keys, values, gate and up. Letters as in [`Attention`].

use std::sync::Arc;

use super::attention::{Attention, AttentionConfig};
use super::batch::Batch;
use super::linear::{Adapter, Linear, RmsNorm};
use super::mlp::MlpConfig;
use super::params::Params;
use super::part::{Load, Module};
use crate::backend::{Backend, Tensor};
use crate::error::Result;
use crate::ops::ActivationOps;

/// A shared block, as one of its layers has it. The parameters that it is loaded from are those of `linear`.
#[derive(Debug, Clone)]
pub struct SharedBlock {
    /// The whole name that the block's parameters are under, the adapters of all its layers included.
    pub home: String,
    /// The number of the layer's adapters.
    pub index: usize,
    /// Attention, over rows of `[h | e]`.
    pub attention: AttentionConfig,
    /// The feed-forward part, which is gated; gate and up are one projection.
    pub mlp: MlpConfig,
    /// Added to the mean of squares of the norms.
    pub norm_eps: f32,
    /// Width of the adapters between their two matrices.
    pub adapter_rank: usize,
    /// Whether queries, keys and values have adapters; the feed-forward part always has.
    pub attention_adapters: bool,
}

/// What layers share.
struct Shared<B: Backend> {
    input_layernorm: RmsNorm<B>,
    self_attn: Attention<B>,
    pre_ff_layernorm: RmsNorm<B>,
    /// `[2 d_ff, d_model]`: gate, then up
    gate_up_proj: Linear<B>,
    down_proj: Linear<B>,
}

impl<B: Backend> Shared<B> {
    fn load(config: &SharedBlock, params: &Params<'_, B>) -> Result<Self> {
        let MlpConfig { d_model, d_ff, bias, .. } = config.mlp;
        let norm = |name, width| RmsNorm::load(&params.under(name), width, config.norm_eps, false);
        let mlp = params.under("feed_forward");
        let linear = |name, shape| Linear::load(&mlp.under(name), shape, bias);
        Ok(Self {
            input_layernorm: norm("input_layernorm", config.attention.d_in)?,
            self_attn: Attention::load(&config.attention, &params.under("self_attn"))?,
            pre_ff_layernorm: norm("pre_ff_layernorm", d_model)?,
            gate_up_proj: linear("gate_up_proj", [2 * d_ff, d_model])?,
            down_proj: linear("down_proj", [d_model, d_ff])?,
        })
    }
}

/// The weights of a shared block, and a layer's own.
struct Block<B: Backend> {
    config: SharedBlock,
    shared: Arc<Shared<B>>,
    /// Beside the projections to queries, keys and values.
    qkv_adapters: Option<[Adapter<B>; 3]>,
    gate_up_adapter: Adapter<B>,
    linear: Linear<B>,
}

impl Load for SharedBlock {
    fn load<B: Backend>(&self, params: &Params<'_, B>) -> Result<Box<dyn Module<B>>> {
        let shared = params.root().under(&self.home);
        let adapter = |name: &str, out, width| {
            let params = shared.under(name).under(&self.index.to_string());
            Adapter::load(&params, ["0", "1"], [out, self.adapter_rank, width], 1.0)
        };
        let AttentionConfig { d_in, nheads, nheads_kv, headdim, .. } = self.attention;
        let of = |part: &str, nheads| {
            adapter(&format!("self_attn.linear_{part}_adapter_list"), nheads * headdim, d_in)
        };
        let qkv =
            || -> Result<_> { Ok([of("q", nheads)?, of("k", nheads_kv)?, of("v", nheads_kv)?]) };
        let MlpConfig { d_model, d_ff, .. } = self.mlp;
        let gate_up = "feed_forward.gate_up_proj_adapter_list";
        Ok(Box::new(Block {
            config: self.clone(),
            shared: shared.once(|params| Shared::load(self, params))?,
            qkv_adapters: self.attention_adapters.then(qkv).transpose()?,
            gate_up_adapter: adapter(gate_up, 2 * d_ff, d_model)?,
            linear: Linear::load(params, [d_model; 2], false)?,
        }))
    }
}

impl<B: Backend> Module<B> for Block<B> {
    fn add_to(
        &self,
        client: &B::Client,
        h: &Tensor<B>,
        (residual, factor): (Tensor<B>, f32),
        batch: &mut Batch<B>,
    ) -> Result<Tensor<B>> {
        let shared = &self.shared;
        let x = client.concat_columns(h, batch.embeddings())?; // [T, 2 d_model]
        let x = shared.input_layernorm.forward(client, &x)?;
        let mut qkv = shared.self_attn.project(client, &x)?; // [T, H D], twice [T, Hk D]
        if let Some([of_q, of_k, of_v]) = &self.qkv_adapters {
            let [q, k, v] = qkv;
            qkv = [
                of_q.add_to(client, q, &x, 1.0)?,
                of_k.add_to(client, k, &x, 1.0)?,
                of_v.add_to(client, v, &x, 1.0)?,
            ];
        }
        let y = shared.self_attn.attend(client, qkv, batch)?;
        let y = shared.self_attn.output(client, &y)?; // [T, d_model]

        let y = shared.pre_ff_layernorm.forward(client, &y)?;
        let gate_up = shared.gate_up_proj.forward(client, &y)?; // [T, 2 d_ff]
        let gate_up = self.gate_up_adapter.add_to(client, gate_up, &y, 1.0)?;
        let d_ff = self.config.mlp.d_ff;
        let [gate, up] = [gate_up.narrow(1, 0, d_ff)?, gate_up.narrow(1, d_ff, d_ff)?];
        let y = client.glu(self.config.mlp.act, &gate, &up)?;
        let y = shared.down_proj.forward(client, &y)?; // [T, d_model]
        self.linear.forward_onto(client, &y, residual, factor)
    }

    fn weight_bytes(&self) -> usize {
        let Shared { self_attn, gate_up_proj, down_proj, .. } = &*self.shared;
        let adapters = self.qkv_adapters.iter().flatten().chain([&self.gate_up_adapter]);
        let linears = [gate_up_proj, down_proj, &self.linear];
        self_attn.weight_bytes()
            + adapters.map(Adapter::weight_bytes).sum::<usize>()
            + linears.map(|linear| linear.weight().size_in_bytes()).iter().sum::<usize>()
    }
}
