//! Bamba language models (IBM, Princeton, CMU and UIUC, 2024): Mamba-2 layers with attention at a few
//! places, each followed by a gated feed-forward part.
//!
//! ```text
//! h ─┬─ input_layernorm ─ mamba, or self_attn ─ + ─┬─ pre_ff_layernorm ─ feed_forward ─ + ─ ...   n_layer times
//!    └──────────────────────────────────────────┘ └──────────────────────────────────┘
//! ```
//!
//! Half of each head's dimensions rotate with the position. Loads transformers' `BambaForCausalLM`, and GGUF.
//!
//! # GGUF
//!
//! Bamba shares the architecture `granitehybrid` with Granite. A file is Bamba's when its positions rotate
//! and it has none of Granite's factors, which a Granite file always has.
//!
//! The runtime of llama.cpp rotates neighbouring rows, so rows of queries and keys lie interleaved. Files
//! written here have that for the rows that rotate, and give the right logits here and there. The converter
//! of llama.cpp (as of autumn 2026) interleaves whole heads: its files give the same wrong logits here
//! as there (0.8 off for the test model), and nothing in them tells so. Convert from the folder instead.

use serde_json::{Value, json};

use super::gguf::{Keys, mlp_table, rope_factors};
use super::hybrid::{self, Hybrid, TokenMixer};
use super::{Decoder, Family, Frame, MAX_SIZE, Names};
use crate::backend::{Backend, Tensor};
use crate::checkpoint::gguf::Metadata;
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::Result;
use crate::nn::{Batch, LayerSpec, Mlp, MlpConfig, Params, RmsNorm, RopeConfig, Row, Tensors};

/// What `config.json` calls this family.
pub(super) const MODEL_TYPES: &[&str] = &["bamba"];
/// GGUF calls it as it calls Granite: see [`is_gguf_of`].
pub(super) const ARCHS: &[&str] = &[];

const NAMES: Names =
    Names { embeddings: "model.embed_tokens", norm: "model.final_layernorm", head: "lm_head" };

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// All but the feed-forward part.
    pub hybrid: Hybrid,
    /// Every layer's feed-forward part.
    pub mlp: MlpConfig,
}

impl Config {
    pub(super) fn read(file: &ConfigFile) -> Result<Self> {
        let mut hybrid = Hybrid::read(file, 1e-5)?;
        let attention = &mut hybrid.attention;
        attention.rope = Some(RopeConfig::read(file, attention.headdim, 0.5)?);
        let d_ff = file.required(&["intermediate_size"], 1..=MAX_SIZE)?;
        let mlp = MlpConfig {
            bias: file.bool(&["mlp_bias"])?.unwrap_or(false),
            ..MlpConfig::swiglu(attention.d_model, d_ff)
        };
        Ok(Self { hybrid, mlp })
    }

    pub(super) fn read_gguf(keys: &Keys<'_>, checkpoint: &Checkpoint) -> Result<Self> {
        let hybrid = Hybrid::read_gguf(keys, checkpoint)?;
        let mlp = MlpConfig {
            bias: checkpoint.get("blk.0.ffn_up.bias").is_some(),
            ..MlpConfig::swiglu(hybrid.attention.d_model, keys.size("feed_forward_length")?)
        };
        Ok(Self { hybrid, mlp })
    }
}

/// Whether a GGUF file is of this family and not Granite's.
pub(super) fn is_gguf_of(keys: &Keys<'_>) -> Result<bool> {
    let of_granite =
        ["attention.scale", "embedding_scale", "residual_scale", "logit_scale", "expert_count"];
    let rotates = keys.bool("rope.scaling.finetuned")?.unwrap_or(true);
    Ok(keys.arch == hybrid::ARCH
        && rotates
        && !of_granite.iter().any(|name| keys.metadata.has(&keys.key(name))))
}

struct Layer<B: Backend> {
    input_layernorm: RmsNorm<B>,
    mixer: TokenMixer<B>,
    pre_ff_layernorm: RmsNorm<B>,
    feed_forward: Mlp<B>,
}

/// The layers of a model.
pub(super) struct Bamba<B: Backend>(Vec<Layer<B>>);

impl<B: Backend> Bamba<B> {
    pub(super) fn load(config: &Config, params: &Params<'_, B>) -> Result<Self> {
        let Config { hybrid, mlp } = config;
        let layers = params.under("model").under("layers");
        let layers = hybrid.is_attention.iter().enumerate().map(|(i, &is_attention)| {
            let params = layers.under(&i.to_string());
            let norm = |name| RmsNorm::load(&params.under(name), hybrid.norm_eps);
            Ok(Layer {
                input_layernorm: norm("input_layernorm")?,
                mixer: TokenMixer::load(hybrid, is_attention, &params)?,
                pre_ff_layernorm: norm("pre_ff_layernorm")?,
                feed_forward: Mlp::load(mlp, &params.under("feed_forward"))?,
            })
        });
        Ok(Self(layers.collect::<Result<_>>()?))
    }
}

impl<B: Backend> Decoder<B> for Bamba<B> {
    fn n_layer(&self) -> usize {
        self.0.len()
    }

    fn forward_layer(
        &self,
        client: &B::Client,
        i: usize,
        mut h: Tensor<B>,
        batch: &mut Batch<B>,
    ) -> Result<Tensor<B>> {
        let layer = &self.0[i];
        let u = layer.input_layernorm.forward(client, &h)?;
        h = layer.mixer.forward_onto(client, &u, (h, 1.0), batch)?;
        let u = layer.pre_ff_layernorm.forward(client, &h)?;
        h = layer.feed_forward.forward_onto(client, &u, h, 1.0)?;
        Ok(h)
    }

    fn weight_bytes(&self) -> usize {
        self.0
            .iter()
            .map(|layer| layer.mixer.weight_bytes() + layer.feed_forward.weight_bytes())
            .sum()
    }
}

// Layouts of files

impl Family for Config {
    fn name(&self) -> &'static str {
        "bamba"
    }

    fn arch(&self) -> Option<&'static str> {
        Some(hybrid::ARCH)
    }

    fn frame(&self) -> Frame {
        self.hybrid.frame(NAMES)
    }

    fn layers(&self) -> Vec<LayerSpec> {
        self.hybrid.layers(&self.mlp)
    }

    fn parameters(&self, rows: usize, with_head: bool) -> Tensors {
        let mut tensors = Tensors::default();
        let width = self.mlp.d_model;
        NAMES.expect(&mut tensors, rows, width, with_head);
        for (layer, &is_attention) in self.hybrid.is_attention.iter().enumerate() {
            let name = format!("model.layers.{layer}");
            self.hybrid.expect(&mut tensors, &name, is_attention);
            tensors.add(format!("{name}.pre_ff_layernorm.weight"), &[width]);
            self.mlp.expect(&mut tensors, &format!("{name}.feed_forward"));
        }
        tensors
    }

    fn gguf_table(&self) -> Result<Vec<Row>> {
        let mut table = self.hybrid.gguf_table();
        table.extend(mlp_table("model.layers.#.feed_forward", ""));
        table.push(Row::new("blk.#.ffn_norm.weight", "model.layers.#.pre_ff_layernorm.weight"));
        Ok(table)
    }

    fn gguf_given(&self) -> Vec<(&'static str, Vec<f32>)> {
        rope_factors(self.hybrid.attention.rope.as_ref())
    }

    fn write_gguf(&self, metadata: &mut Metadata) -> Result<()> {
        let mut keys = self.hybrid.write_gguf(metadata, hybrid::ARCH)?;
        keys.size("feed_forward_length", self.mlp.d_ff);
        Ok(())
    }

    fn to_json(&self) -> Result<Value> {
        let attention = &self.hybrid.attention;
        let mut json = self.hybrid.to_json()?;
        json["architectures"] = json!(["BambaForCausalLM"]);
        json["model_type"] = json!("bamba");
        json["intermediate_size"] = json!(self.mlp.d_ff);
        json["mlp_bias"] = json!(self.mlp.bias);
        let layers = self.hybrid.is_attention.iter().enumerate();
        json["attn_layer_indices"] =
            layers.filter(|(_, is_attention)| **is_attention).map(|(layer, _)| layer).collect();
        if let Some(rope) = &attention.rope {
            rope.write_json(&mut json, attention.headdim)?;
            json["attn_rotary_emb"] = json!(rope.rotary_dim);
            // Transformers 5 takes the part that rotates from here only, and half when it is not here.
            let mut parameters = match &json["rope_scaling"] {
                Value::Null => json!({ "rope_type": "default" }),
                scaling => scaling.clone(),
            };
            for key in ["rope_theta", "partial_rotary_factor"] {
                parameters[key] = json[key].clone();
            }
            json["rope_parameters"] = parameters;
        }
        Ok(json)
    }
}
