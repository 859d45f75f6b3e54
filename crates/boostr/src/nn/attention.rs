//! The attention layer: one implementation for all families that have it.
//!
//! ```text
//! u ─┬ q_proj ─ (q_norm) ─ rope ─┐
//!    ├ k_proj ─ (k_norm) ─ rope ─┼ attention with what the sequence keeps ─ (* sigmoid(gate)) ─ o_proj ─ + residual
//!    └ v_proj ───────────────────┘
//! ```
//!
//! Where the output is gated, the rows of q_proj are `[query (D) | gate (D)]` for each head.
//!
//! Letters: T tokens, H heads of queries, Hk heads of keys and values, D the width of a head.

use std::fmt;

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
use crate::ops::{
    self, Activation, ActivationOps, AttentionOps, KvSizes, KvType, Rope, split_last,
};

/// Sizes and options of an attention layer.
#[derive(Clone, PartialEq)]
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
    /// Added to the mean of squares of the norms of queries and keys; `None` without norms.
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
    /// What the norms of queries and keys are of.
    pub qk_norm: QkNorm,
    /// Whether each head's output is gated; then there are norms of each head.
    pub output_gate: bool,
}

/// What the norms of queries and keys are of, where attention has them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head, which all share one weight.
    #[default]
    Head,
    /// Each head; the weight is what the factors are above 1.
    HeadZeroCentred,
    /// The whole projection.
    Whole,
}

/// As a derived one, without options that attention does not have: fingerprints of models know this text.
impl fmt::Debug for AttentionConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("AttentionConfig");
        text.field("d_in", &self.d_in)
            .field("d_model", &self.d_model)
            .field("nheads", &self.nheads)
            .field("nheads_kv", &self.nheads_kv)
            .field("headdim", &self.headdim)
            .field("qkv_bias", &self.qkv_bias)
            .field("out_bias", &self.out_bias)
            .field("qk_norm_eps", &self.qk_norm_eps)
            .field("rope", &self.rope)
            .field("scale", &self.scale)
            .field("window", &self.window)
            .field("softcap", &self.softcap)
            .field("key_scale", &self.key_scale);
        if self.qk_norm != QkNorm::Head {
            text.field("qk_norm", &self.qk_norm);
        }
        if self.output_gate {
            text.field("output_gate", &true);
        }
        text.finish()
    }
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
            qk_norm: QkNorm::Head,
            output_gate: false,
        }
    }

    /// Rows of q_proj.
    #[must_use]
    pub fn query_rows(&self) -> usize {
        self.nheads * self.headdim * if self.output_gate { 2 } else { 1 }
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
        if self.output_gate && (self.qk_norm_eps.is_none() || self.qk_norm == QkNorm::Whole) {
            let reason = "a gate without norms of each head's query is not supported".into();
            return Err(("attn_output_gate", reason));
        }
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
        let gate = if self.output_gate { ", gated" } else { "" };
        vec![("attention", format!("{nheads} heads of {headdim}, {kv}, {positions}{window}{gate}"))]
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
        (3 * self.nheads + 3 * self.nheads_kv) * self.headdim + self.query_rows()
            - self.nheads * self.headdim
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
        let norms = |eps| -> Result<_> {
            let norm = |name, width| {
                let width = if config.qk_norm == QkNorm::Whole { width } else { config.headdim };
                let zero_centred = config.qk_norm == QkNorm::HeadZeroCentred;
                RmsNorm::load(&params.under(name), width, eps, zero_centred)
            };
            Ok([norm("q_norm", q)?, norm("k_norm", kv)?])
        };
        let qkv = [("q_proj", config.query_rows()), ("k_proj", kv), ("v_proj", kv)];
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

    /// What q_proj gives of the tokens `u` `[T, d_in]`, keys and values `[T, Hk D]`.
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
        let (nheads, headdim) = (config.nheads, config.headdim);
        let (q, gate) = if config.output_gate {
            let heads = by_head::<B>(&q, 2 * headdim)?;
            (heads.narrow(1, 0, headdim)?, Some(heads.narrow(1, headdim, headdim)?)) // [T H, D]
        } else {
            (q, None)
        };
        let [q, k] = match &self.qk_norm {
            None => [q, k],
            Some([q_norm, k_norm]) => match config.qk_norm {
                QkNorm::Whole => [q_norm.forward(client, &q)?, k_norm.forward(client, &k)?],
                QkNorm::Head | QkNorm::HeadZeroCentred => {
                    let [q, k] = [by_head::<B>(&q, headdim)?, by_head::<B>(&k, headdim)?];
                    let [q, k] = [q_norm.forward(client, &q)?, k_norm.forward(client, &k)?];
                    let whole = |x: Tensor<B>, n| x.reshape(&[tokens, n * headdim]);
                    [whole(q, nheads)?, whole(k, config.nheads_kv)?]
                }
            },
        };
        let mut q = split_last(&q, &[nheads, headdim])?; // [T, H, D]
        let mut k = split_last(&k, &[config.nheads_kv, headdim])?; // [T, Hk, D]
        let v = split_last(&v, &[config.nheads_kv, headdim])?;
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
        let y = match gate {
            None => y,
            Some(gate) => client.glu(Activation::Sigmoid, &gate, &by_head::<B>(&y, headdim)?)?,
        };
        Ok(y.reshape(&[tokens, nheads * headdim])?)
    }

    /// Bytes that a pass over the layer's matrices reads.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.qkv_proj.weight_bytes() + self.o_proj.weight().size_in_bytes()
    }
}

/// Rows `[T, H width]`, or `[T, H, width]`, as rows of one head each, `[T H, width]`.
fn by_head<B: Backend>(x: &Tensor<B>, width: usize) -> Result<Tensor<B>> {
    if x.shape().last() == Some(&width) && x.shape().len() == 2 {
        return Ok(x.clone()); // Rows of single heads, which may be bands of wider ones.
    }
    let rows = x.numel() / width.max(1);
    Ok(x.contiguous()?.reshape(&[rows, width])?)
}

module!(Attention of AttentionConfig, |self, client, u, onto, batch| self.forward_onto(client, u, onto, batch));
