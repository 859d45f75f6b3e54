//! Latent attention without positions: one implementation for all families that have it.
//!
//! ```text
//! u ─┬ q_proj, or q_a_proj ─ q_a_layernorm ─ q_b_proj ─ q ──────────────────┐
//!    └ kv_a_proj_with_mqa ─┬ latent ─ kv_a_layernorm ─ c ─┐                 │
//!                          └ shared key ──────────────────┴ latent attention ─ o_proj ─ + residual
//! ```
//!
//! A sequence keeps c and the shared key of each token: `rank + d_shared` numbers, whatever the number of heads.
//! `k_b_proj` makes keys of c and `v_b_proj` values; the operation has them on the side of queries and of the output
//! (*DeepSeek-V2*, arXiv 2405.04434, section 2.1). That form serves prefill, decode and training alike, so bits do
//! not depend on the cut of a sequence. Nothing rotates.
//!
//! Files of transformers have both matrices as `kv_b_proj` ([`How::Latent`](super::How::Latent)).
//!
//! Letters: T tokens, H heads.

use serde_json::{Map, Value, json};

use super::batch::Batch;
use super::joined::Joined;
use super::linear::{Linear, RmsNorm};
use super::params::Params;
use super::part::{Part, module};
use super::slots::Slot;
use crate::backend::{Backend, Tensor, Weight};
use crate::error::Result;
use crate::ops::{AttentionOps, KvSizes, KvType, LatentAttention, split_last};

/// Sizes and options of latent attention.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentConfig {
    /// Width of the residual stream.
    pub d_model: usize,
    /// H
    pub nheads: usize,
    /// Width between two projections of queries; `None` where there is one projection.
    pub q_rank: Option<usize>,
    /// Width of what keys and values are made of.
    pub rank: usize,
    /// Width of a head's own part of a key.
    pub d_key: usize,
    /// Width of the part of a key that all heads share.
    pub d_shared: usize,
    /// Width of a head's values.
    pub d_value: usize,
    /// Added to the mean of squares of the norms within.
    pub norm_eps: f32,
}

impl LatentConfig {
    /// What the norms within add to the mean of squares in every published model, whatever the model's own norms add.
    pub const NORM_EPS: f32 = 1e-6;

    /// Latent attention over `d_model`, its sizes not yet known.
    #[must_use]
    pub fn new(d_model: usize) -> Self {
        let norm_eps = Self::NORM_EPS;
        let (q_rank, rank, nheads) = (None, 0, 0);
        Self { d_model, nheads, q_rank, rank, d_key: 0, d_shared: 0, d_value: 0, norm_eps }
    }

    /// Width of a head's query and key.
    #[must_use]
    pub fn d_query(&self) -> usize {
        self.d_key.saturating_add(self.d_shared)
    }

    /// Factor of the products of queries and keys.
    #[must_use]
    pub fn scale(&self) -> f32 {
        (self.d_query() as f32).sqrt().recip()
    }
}

impl Part for LatentConfig {
    fn kind(&self) -> &'static str {
        "latent attention"
    }

    /// `kv`, the latent and the shared key of each token.
    fn slots(&self) -> Vec<Slot> {
        vec![Slot::rows("kv", KvSizes::latent(self.rank, self.d_shared, KvType::F32), None)]
    }

    fn sizes(&self) -> Vec<(&'static str, usize)> {
        let mut sizes = vec![
            ("num_attention_heads", self.nheads),
            ("kv_lora_rank", self.rank),
            ("qk_nope_head_dim", self.d_key),
            ("qk_rope_head_dim", self.d_shared),
            ("v_head_dim", self.d_value),
        ];
        sizes.extend(self.q_rank.map(|rank| ("q_lora_rank", rank)));
        sizes
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let Self { nheads, rank, d_key, d_shared, d_value, .. } = self;
        let text = format!(
            "{nheads} heads of {d_key} + {d_shared}, values of {d_value}, latent of {rank}, no positions"
        );
        vec![("attention", text)]
    }

    fn to_json(&self) -> Map<String, Value> {
        let attention = json!({
            "nheads": self.nheads,
            "q_rank": self.q_rank,
            "rank": self.rank,
            "d_key": self.d_key,
            "d_shared": self.d_shared,
            "d_value": self.d_value,
        });
        [("latent_attention".to_owned(), attention)].into_iter().collect()
    }

    fn work_width(&self) -> usize {
        let per_head = self.d_query() + 2 * self.rank + self.d_shared + self.d_value;
        self.nheads * per_head + self.q_rank.unwrap_or(0) + 2 * (self.rank + self.d_shared)
    }
}

/// The layer's weights.
pub struct LatentMixer<B: Backend> {
    config: LatentConfig,
    /// q_proj or q_a_proj, and kv_a_proj_with_mqa
    narrow_proj: Joined<B>,
    /// q_a_layernorm and q_b_proj
    q_b: Option<(RmsNorm<B>, Linear<B>)>,
    kv_norm: RmsNorm<B>,
    /// `[H, rank, d_key]`
    k_b_proj: Weight<B>,
    /// `[H, d_value, rank]`
    v_b_proj: Weight<B>,
    o_proj: Linear<B>,
}

impl<B: Backend> LatentMixer<B> {
    /// Loads the layer. Matrices of keys and values that are quantized become f32.
    ///
    /// # Errors
    ///
    /// When a parameter is missing or no float.
    pub fn load(config: &LatentConfig, params: &Params<'_, B>) -> Result<Self> {
        let &LatentConfig { d_model, nheads, q_rank, rank, d_key, d_value, .. } = config;
        let q_width = nheads * config.d_query();
        let kv = ("kv_a_proj_with_mqa", rank + config.d_shared);
        let q = q_rank.map_or(("q_proj", q_width), |rank| ("q_a_proj", rank));
        let norm = |name, width| RmsNorm::load(&params.under(name), width, config.norm_eps, false);
        let q_b = |rank| -> Result<_> {
            let q_b = Linear::load(&params.under("q_b_proj"), [q_width, rank], false)?;
            Ok((norm("q_a_layernorm", rank)?, q_b.precise()))
        };
        let out = [d_model, nheads * d_value];
        Ok(Self {
            // Scores amplify what rounding changes of their input.
            narrow_proj: Joined::load(params, &[q, kv], d_model, false)?.precise(),
            q_b: q_rank.map(q_b).transpose()?,
            kv_norm: norm("kv_a_layernorm", rank)?,
            k_b_proj: params.matrices("k_b_proj.weight", [nheads, rank, d_key])?,
            v_b_proj: params.matrices("v_b_proj.weight", [nheads, d_value, rank])?,
            o_proj: Linear::load(&params.under("o_proj"), out, false)?,
            config: config.clone(),
        })
    }

    /// What attention of the tokens `u` `[T, d_model]` of all runs gives, times `factor`, added to `residual`.
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
        let &LatentConfig { nheads, rank, d_key, d_shared, d_value, .. } = &self.config;
        let [q, kv] = self.narrow_proj.forward(client, u)?;
        let q = match &self.q_b {
            Some((norm, q_b)) => q_b.forward(client, &norm.forward(client, &q)?)?,
            None => q,
        };
        let q = split_last(&q, &[nheads, d_key + d_shared])?; // [T, H, d_key + d_shared]
        let input = LatentAttention {
            q_nope: &q.narrow(2, 0, d_key)?,
            q_pe: &q.narrow(2, d_key, d_shared)?,
            c: &self.kv_norm.forward(client, &kv.narrow(1, 0, rank)?)?,
            k_pe: &kv.narrow(1, rank, d_shared)?,
            w_uk: &self.k_b_proj,
            w_uv: &self.v_b_proj,
            scale: self.config.scale(),
        };
        let (runs, positions, mut caches) = batch.rows("kv")?;
        let y = client.latent_attention(&input, runs, &mut caches)?; // [T, H, d_value]
        let y = y.reshape(&[positions.len(), nheads * d_value])?;
        self.o_proj.forward_onto(client, &y, residual, factor)
    }

    /// Bytes that a pass over the layer's matrices reads.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        let q_b = self.q_b.as_ref().map_or(0, |(_, q_b)| q_b.weight().size_in_bytes());
        let of_heads = self.k_b_proj.size_in_bytes() + self.v_b_proj.size_in_bytes();
        self.narrow_proj.weight_bytes() + q_b + of_heads + self.o_proj.weight().size_in_bytes()
    }
}

module!(LatentMixer of LatentConfig, |self, client, u, onto, batch| self.forward_onto(client, u, onto, batch));
