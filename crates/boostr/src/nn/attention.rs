//! The attention layer: one implementation for all families that have it.
//!
//! ```text
//! u ─┬ q_proj ─ (q_norm) ─ rope ─┐
//!    ├ k_proj ─ (k_norm) ─ rope ─┼ attention with what the sequence keeps ─ o_proj ─ + residual
//!    └ v_proj ───────────────────┘
//! ```
//!
//! Letters: T tokens, H heads of queries, Hk heads of keys and values, D the width of a head.

use serde_json::{Map, Value, json};

use super::batch::Batch;
use super::joined::Joined;
use super::linear::{Linear, RmsNorm};
use super::params::Params;
use super::part::{Part, module};
use super::rope::RopeConfig;
use super::slots::Slot;
use crate::backend::{Backend, Tensor};
use crate::error::Result;
use crate::ops::{self, ActivationOps, AttentionOps, KvSizes, KvType, Rope, split_last};

/// Sizes and options of an attention layer.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionConfig {
    /// Width of the input.
    pub d_in: usize,
    /// Width of the output.
    pub d_model: usize,
    /// H
    pub nheads: usize,
    /// Hk, divides H
    pub nheads_kv: usize,
    /// D
    pub headdim: usize,
    /// Whether q_proj, k_proj and v_proj have a bias.
    pub qkv_bias: bool,
    /// Whether o_proj has a bias.
    pub out_bias: bool,
    /// Added to the mean of squares of the norms of each head's query and key; `None` without norms.
    pub qk_norm_eps: Option<f32>,
    /// Rotary positions; `None` for attention that knows no positions.
    pub rope: Option<RopeConfig>,
    /// Factor of the products of queries and keys.
    pub scale: f32,
    /// How many tokens a token sees, itself included.
    pub window: Option<usize>,
    /// Bound of the scores.
    pub softcap: Option<f32>,
    /// Factor of the keys, before they rotate.
    pub key_scale: f32,
}

impl AttentionConfig {
    /// Attention over `d_model`, as most models have it: rotary positions, scale `1 / sqrt(D)`.
    #[must_use]
    pub fn new(d_model: usize, nheads: usize, nheads_kv: usize, headdim: usize) -> Self {
        Self {
            d_in: d_model,
            d_model,
            nheads,
            nheads_kv,
            headdim,
            qkv_bias: false,
            out_bias: false,
            qk_norm_eps: None,
            rope: None,
            scale: (headdim as f32).sqrt().recip(),
            window: None,
            softcap: None,
            key_scale: 1.0,
        }
    }

    /// Sizes of what a sequence keeps, its elements of type `kind`.
    #[must_use]
    pub fn cache(&self, kind: KvType) -> KvSizes {
        let (nheads, headdim) = (self.nheads_kv, self.headdim);
        KvSizes { nheads, d_key: headdim, d_value: headdim, kind, latent: false }
    }
}

impl Part for AttentionConfig {
    fn kind(&self) -> &'static str {
        "attention"
    }

    /// `kv`, a key and a value of each head for each token within the window.
    fn slots(&self) -> Vec<Slot> {
        vec![Slot::rows("kv", self.cache(KvType::F32), self.window)]
    }

    fn sizes(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("num_attention_heads", self.nheads),
            ("num_key_value_heads", self.nheads_kv),
            ("head_dim", self.headdim),
        ]
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        if self.nheads.is_multiple_of(self.nheads_kv) {
            return Ok(());
        }
        let reason = format!("{} do not divide {} heads", self.nheads_kv, self.nheads);
        Err(("num_key_value_heads", reason))
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let Self { nheads, nheads_kv, headdim, .. } = self;
        let positions = match &self.rope {
            None => "no positions".to_owned(),
            Some(rope) if rope.rotary_dim == *headdim => format!("rotary, base {}", rope.theta),
            Some(rope) => format!("rotary, base {}, {} of {headdim}", rope.theta, rope.rotary_dim),
        };
        let window = self.window.map_or_else(String::new, |w| format!(", window {w}"));
        let kv = format!("{nheads_kv} of keys and values");
        vec![("attention", format!("{nheads} heads of {headdim}, {kv}, {positions}{window}"))]
    }

    fn to_json(&self) -> Map<String, Value> {
        let attention = json!({
            "nheads": self.nheads,
            "nheads_kv": self.nheads_kv,
            "headdim": self.headdim,
            "rope_theta": self.rope.as_ref().map(|rope| rope.theta),
            "rotary_dim": self.rope.as_ref().map(|rope| rope.rotary_dim),
            "window": self.window,
        });
        [("attention".to_owned(), attention)].into_iter().collect()
    }

    fn work_width(&self) -> usize {
        (3 * self.nheads + 3 * self.nheads_kv) * self.headdim
    }
}

/// The layer's weights.
pub struct Attention<B: Backend> {
    config: AttentionConfig,
    /// q_proj, k_proj, v_proj
    qkv_proj: Joined<B>,
    /// Weights `[D]` of the norms of queries and keys.
    qk_norm: Option<[RmsNorm<B>; 2]>,
    o_proj: Linear<B>,
    rope: Option<Rope>,
    /// `[Hk D]`, all `key_scale`; `None` where that is 1.
    key_scale: Option<Tensor<B>>,
}

impl<B: Backend> Attention<B> {
    /// Loads the layer.
    ///
    /// # Errors
    ///
    /// When a parameter is missing or no float.
    pub fn load(config: &AttentionConfig, params: &Params<'_, B>) -> Result<Self> {
        let (q, kv) = (config.nheads * config.headdim, config.nheads_kv * config.headdim);
        let norm = |name, eps| RmsNorm::load(&params.under(name), config.headdim, eps);
        let norms = |eps| -> Result<_> { Ok([norm("q_norm", eps)?, norm("k_norm", eps)?]) };
        let qkv = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)];
        let out = [config.d_model, q];
        Ok(Self {
            // Scores amplify what rounding changes of their input, most of all in models with outliers.
            qkv_proj: Joined::load(params, &qkv, config.d_in, config.qkv_bias)?.precise(),
            qk_norm: config.qk_norm_eps.map(norms).transpose()?,
            o_proj: Linear::load(&params.under("o_proj"), out, config.out_bias)?,
            rope: config.rope.as_ref().and_then(|rope| params.when_loaded(|| rope.rope())),
            key_scale: params.factors(&[(kv, config.key_scale)])?,
            config: config.clone(),
        })
    }

    /// What attention of the tokens `u` `[T, d_in]` of all runs gives, times `factor`,
    /// added to `residual` `[T, d_model]`.
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
        let qkv = self.project(client, u)?;
        let y = self.attend(client, qkv, batch)?;
        self.o_proj.forward_onto(client, &y, residual, factor)
    }

    /// Queries `[T, H D]`, keys and values `[T, Hk D]` of the tokens `u` `[T, d_in]`.
    ///
    /// # Errors
    ///
    /// When shapes disagree or memory is short.
    pub fn project(&self, client: &B::Client, u: &Tensor<B>) -> Result<[Tensor<B>; 3]> {
        self.qkv_proj.forward(client, u)
    }

    /// The output `[T, d_model]` of what [`Attention::attend`] gives, where nothing is added to it.
    ///
    /// # Errors
    ///
    /// When shapes disagree or memory is short.
    pub fn output(&self, client: &B::Client, y: &Tensor<B>) -> Result<Tensor<B>> {
        self.o_proj.forward(client, y)
    }

    /// Everything between the projections: `[T, H D]`. Caches then forget what no later token sees.
    ///
    /// # Errors
    ///
    /// When shapes disagree or memory is short.
    pub fn attend(
        &self,
        client: &B::Client,
        [q, k, v]: [Tensor<B>; 3],
        batch: &mut Batch<B>,
    ) -> Result<Tensor<B>> {
        let config = &self.config;
        let (runs, positions, mut caches) = batch.rows("kv")?;
        let tokens = positions.len();
        let k = match &self.key_scale {
            Some(factors) => client.scale_columns(&k, factors)?,
            None => k,
        };
        let mut q = split_last(&q, &[config.nheads, config.headdim])?; // [T, H, D]
        let mut k = split_last(&k, &[config.nheads_kv, config.headdim])?; // [T, Hk, D]
        let v = split_last(&v, &[config.nheads_kv, config.headdim])?;
        if let Some([q_norm, k_norm]) = &self.qk_norm {
            for (x, norm) in [(&mut q, q_norm), (&mut k, k_norm)] {
                let shape = x.shape().to_vec();
                let heads = x.contiguous()?.reshape(&[shape[0] * shape[1], config.headdim])?; // [T H, D]
                *x = norm.forward(client, &heads)?.reshape(&shape)?;
            }
        }
        if let Some(rope) = &self.rope {
            q = client.rope(&q, positions, rope)?;
            k = client.rope(&k, positions, rope)?;
        }
        let input = ops::Attention {
            q: &q,
            k: &k,
            v: &v,
            scale: config.scale,
            window: config.window,
            softcap: config.softcap,
        };
        let y = client.attention(&input, runs, &mut caches)?; // [T, H, D]
        for cache in caches {
            cache.forget(cache.first_seen(config.window));
        }
        Ok(y.reshape(&[tokens, config.nheads * config.headdim])?)
    }

    /// Bytes that a pass over the layer's matrices reads.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.qkv_proj.weight_bytes() + self.o_proj.weight().size_in_bytes()
    }
}

module!(Attention of AttentionConfig, |self, client, u, onto, batch| self.forward_onto(client, u, onto, batch));
