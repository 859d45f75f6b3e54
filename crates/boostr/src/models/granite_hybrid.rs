//! Granite 4 language models (IBM, 2025): Mamba-2 layers with attention at a few places, or attention alone,
//! each followed by a gated feed-forward part and, in some models, experts beside it.
//!
//! ```text
//!                                                                         ┌ block_sparse_moe ┐
//! h ─┬─ input_layernorm ─ mamba, or self_attn ─ × r + ─┬─ post_attention_layernorm ─┴─── shared_mlp ───┴─ × r + ─ ...   n_layer times
//!    └──────────────────────────────────────────────┘ └───────────────────────────────────────────────────┘
//! ```
//!
//! Four factors belong to the weights: of the embedding, of what each part adds to the residual stream
//! (r), of the products of queries and keys (in place of `1 / sqrt(D)`), and one that logits are divided by.
//! Attention knows no positions unless the configuration says `rope`.
//!
//! Loads transformers' `GraniteMoeHybridForCausalLM`, and GGUF: `granitehybrid` with mixers (but for files of
//! [Bamba](super::bamba)), `granite` and `granitemoe` with attention alone. Older dense models of Granite are
//! `granite` in GGUF too and are this model; their way to a folder makes one of this family.

use serde_json::{Value, json};

use super::gguf::{Keys, mlp_table, moe_table, rope_factors};
use super::hybrid::{self, Hybrid, TokenMixer};
use super::{Decoder, Family, Frame, MAX_SIZE, Names, shortest};
use crate::backend::{Backend, Tensor};
use crate::checkpoint::gguf::Metadata;
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::{Error, Result};
use crate::nn::{
    Batch, LayerSpec, Mlp, MlpConfig, Moe, MoeConfig, MoePart, Params, RmsNorm, RopeConfig,
    Routing, Row, Tensors,
};

/// What `config.json` calls this family.
pub(super) const MODEL_TYPES: &[&str] = &["granitemoehybrid"];
/// What GGUF calls it: with mixers, with attention alone, and that with experts.
pub(super) const ARCHS: &[&str] = &[hybrid::ARCH, DENSE, EXPERTS];

const DENSE: &str = "granite";
const EXPERTS: &str = "granitemoe";

const NAMES: Names =
    Names { embeddings: "model.embed_tokens", norm: "model.norm", head: "lm_head" };

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// All but the feed-forward part.
    pub hybrid: Hybrid,
    /// What every token gets.
    pub shared_mlp: MlpConfig,
    /// The experts beside it.
    pub moe: Option<MoeConfig>,
    /// Factor of the embeddings.
    pub embedding_scale: f32,
    /// Factor of what each part adds to the residual stream.
    pub residual_scale: f32,
    /// What logits are divided by.
    pub logits_scaling: f32,
}

impl Config {
    pub(super) fn read(file: &ConfigFile) -> Result<Self> {
        let mut hybrid = Hybrid::read(file, 1e-6)?;
        let attention = &mut hybrid.attention;
        let (d_model, headdim) = (attention.d_model, attention.headdim);
        attention.scale = factor(file, "attention_multiplier")?;
        attention.rope = match file.text("position_embedding_type")? {
            None | Some("nope") => None,
            Some("rope") => Some(RopeConfig::read(file, headdim, 1.0)?),
            Some(other) => {
                let reason = format!("expected rope or nope, found {other:?}");
                return Err(file.error("position_embedding_type", reason));
            }
        };
        if let Some(rope) = attention.rope.as_ref().filter(|rope| rope.rotary_dim != headdim) {
            let reason = format!("expected all {headdim}, found {}", rope.rotary_dim);
            return Err(file.error("partial_rotary_factor", reason));
        }
        let experts = file.usize(&["num_local_experts"], 0..=MAX_SIZE)?.unwrap_or(8);
        let moe = match experts {
            0 => None,
            _ => {
                let d_ff = file.required(&["intermediate_size"], 1..=MAX_SIZE)?;
                let used = file.usize(&["num_experts_per_tok"], 1..=MAX_SIZE)?.unwrap_or(2);
                Some(moe(d_model, d_ff, experts, used))
            }
        };
        let d_ff = file.required(&["shared_intermediate_size"], 1..=MAX_SIZE)?;
        Ok(Self {
            hybrid,
            shared_mlp: MlpConfig::swiglu(d_model, d_ff),
            moe,
            embedding_scale: factor(file, "embedding_multiplier")?,
            residual_scale: factor(file, "residual_multiplier")?,
            logits_scaling: factor(file, "logits_scaling")?,
        })
    }

    pub(super) fn read_gguf(keys: &Keys<'_>, checkpoint: &Checkpoint) -> Result<Self> {
        let hybrid = Hybrid::read_gguf(keys, checkpoint)?;
        let d_model = hybrid.attention.d_model;
        let d_ff = keys.size("feed_forward_length")?;
        let shared = "expert_shared_feed_forward_length";
        let d_shared = keys.optional(shared)?.filter(|&d_ff| d_ff > 0);
        let (d_shared, moe) = match keys.optional("expert_count")?.unwrap_or(0) {
            // Without experts what they share is all there is, whatever the width of the others.
            0 => (d_shared.unwrap_or(d_ff), None),
            experts => {
                let missing = || keys.error(shared, "missing: experts alone are not supported");
                let used = keys.size("expert_used_count")?;
                (d_shared.ok_or_else(missing)?, Some(moe(d_model, d_ff, experts, used)))
            }
        };
        let factor =
            |name| -> Result<f32> { Ok(keys.float(name)?.filter(|&x| x != 0.0).unwrap_or(1.0)) };
        Ok(Self {
            hybrid,
            shared_mlp: MlpConfig::swiglu(d_model, d_shared),
            moe,
            embedding_scale: factor("embedding_scale")?,
            residual_scale: factor("residual_scale")?,
            logits_scaling: factor("logit_scale")?,
        })
    }

    /// What GGUF calls a model of these sizes.
    fn gguf_arch(&self) -> &'static str {
        match &self.moe {
            _ if self.hybrid.has_mixers() => hybrid::ARCH,
            None => DENSE,
            Some(_) => EXPERTS,
        }
    }
}

/// A factor, 1 when missing; GGUF cannot tell 0 from that.
fn factor(file: &ConfigFile, key: &str) -> Result<f32> {
    let factor = file.float(&[key], f32::MIN..=f32::MAX)?.unwrap_or(1.0);
    if factor == 0.0 {
        return Err(file.error(key, "expected a factor, found 0"));
    }
    Ok(factor)
}

fn moe(d_model: usize, d_ff: usize, experts: usize, used: usize) -> MoeConfig {
    MoeConfig {
        expert: MlpConfig::swiglu(d_model, d_ff),
        experts,
        used,
        routing: Routing::TopKSoftmax,
        ngroups: 1,
        topk_group: 1,
        normalized: false,
        scale: 1.0,
        d_model,
    }
}

struct Layer<B: Backend> {
    input_layernorm: RmsNorm<B>,
    mixer: TokenMixer<B>,
    post_attention_layernorm: RmsNorm<B>,
    block_sparse_moe: Option<Moe<B>>,
    shared_mlp: Mlp<B>,
}

/// The layers of a model.
pub(super) struct GraniteHybrid<B: Backend> {
    layers: Vec<Layer<B>>,
    residual_scale: f32,
}

impl<B: Backend> GraniteHybrid<B> {
    pub(super) fn load(config: &Config, params: &Params<'_, B>) -> Result<Self> {
        let hybrid = &config.hybrid;
        let layers = params.under("model").under("layers");
        let layers = hybrid.is_attention.iter().enumerate().map(|(i, &is_attention)| {
            let params = layers.under(&i.to_string());
            let norm = |name| RmsNorm::load(&params.under(name), hybrid.norm_eps);
            let moe = config.moe.as_ref();
            let moe = moe.map(|moe| Moe::load(moe, &params.under("block_sparse_moe")));
            Ok(Layer {
                input_layernorm: norm("input_layernorm")?,
                mixer: TokenMixer::load(hybrid, is_attention, &params)?,
                post_attention_layernorm: norm("post_attention_layernorm")?,
                block_sparse_moe: moe.transpose()?,
                shared_mlp: Mlp::load(&config.shared_mlp, &params.under("shared_mlp"))?,
            })
        });
        let layers = layers.collect::<Result<_>>()?;
        Ok(Self { layers, residual_scale: config.residual_scale })
    }
}

impl<B: Backend> Decoder<B> for GraniteHybrid<B> {
    fn n_layer(&self) -> usize {
        self.layers.len()
    }

    fn forward_layer(
        &self,
        client: &B::Client,
        i: usize,
        mut h: Tensor<B>,
        batch: &mut Batch<B>,
    ) -> Result<Tensor<B>> {
        let scale = self.residual_scale;
        let layer = &self.layers[i];
        let u = layer.input_layernorm.forward(client, &h)?;
        h = layer.mixer.forward_onto(client, &u, (h, scale), batch)?;
        let u = layer.post_attention_layernorm.forward(client, &h)?;
        if let Some(moe) = &layer.block_sparse_moe {
            h = moe.forward_onto(client, &u, h, scale)?;
        }
        h = layer.shared_mlp.forward_onto(client, &u, h, scale)?;
        Ok(h)
    }

    fn weight_bytes(&self) -> usize {
        let of = |layer: &Layer<B>| {
            let moe = layer.block_sparse_moe.as_ref().map_or(0, Moe::weight_bytes);
            layer.mixer.weight_bytes() + moe + layer.shared_mlp.weight_bytes()
        };
        self.layers.iter().map(of).sum()
    }
}

// Layouts of files

impl Family for Config {
    fn name(&self) -> &'static str {
        "granitemoehybrid"
    }

    fn arch(&self) -> Option<&'static str> {
        Some(self.gguf_arch())
    }

    fn frame(&self) -> Frame {
        Frame {
            embedding_scale: self.embedding_scale,
            logits_scale: self.logits_scaling.recip(),
            ..self.hybrid.frame(NAMES)
        }
    }

    fn layers(&self) -> Vec<LayerSpec> {
        match &self.moe {
            None => self.hybrid.layers(&self.shared_mlp),
            Some(moe) => {
                let shared = Some(self.shared_mlp.clone());
                self.hybrid.layers(&MoePart { moe: moe.clone(), shared })
            }
        }
    }

    fn parameters(&self, rows: usize, with_head: bool) -> Tensors {
        let mut tensors = Tensors::default();
        let width = self.shared_mlp.d_model;
        NAMES.expect(&mut tensors, rows, width, with_head);
        for (layer, &is_attention) in self.hybrid.is_attention.iter().enumerate() {
            let name = format!("model.layers.{layer}");
            self.hybrid.expect(&mut tensors, &name, is_attention);
            tensors.add(format!("{name}.post_attention_layernorm.weight"), &[width]);
            self.shared_mlp.expect(&mut tensors, &format!("{name}.shared_mlp"));
            if let Some(moe) = &self.moe {
                moe.expect(&mut tensors, &format!("{name}.block_sparse_moe"));
            }
        }
        tensors
    }

    /// Gate and up projections are one tensor, experts are stacked:
    ///
    /// | file | parameters |
    /// |---|---|
    /// | `shared_mlp.input_linear` `[2 F, d_model]` | `shared_mlp.gate_proj`, then `up_proj` |
    /// | `shared_mlp.output_linear` | `shared_mlp.down_proj` |
    /// | `block_sparse_moe.input_linear` `[E, 2 F, d_model]` | each expert's `gate_proj`, then `up_proj` |
    /// | `block_sparse_moe.output_linear` `[E, d_model, F]` | each expert's `down_proj` |
    /// | `block_sparse_moe.router.layer` | `block_sparse_moe.gate` |
    fn hf_table(&self) -> Vec<Row> {
        let name = |part: &str| format!("model.layers.#.{part}.weight");
        let both =
            |of: &str| [format!("{of}.gate_proj"), format!("{of}.up_proj")].map(|p| name(&p));
        let experts = "block_sparse_moe.experts.@";
        vec![
            Row::joined(name("shared_mlp.input_linear"), &both("shared_mlp")),
            Row::new(name("shared_mlp.output_linear"), name("shared_mlp.down_proj")),
            Row::joined(name("block_sparse_moe.input_linear"), &both(experts)),
            Row::new(name("block_sparse_moe.output_linear"), name(&format!("{experts}.down_proj"))),
            Row::new(name("block_sparse_moe.router.layer"), name("block_sparse_moe.gate")),
        ]
    }

    fn gguf_table(&self) -> Result<Vec<Row>> {
        let mut table = self.hybrid.gguf_table();
        let suffix = if self.moe.is_some() { "_shexp" } else { "" };
        table.extend(mlp_table("model.layers.#.shared_mlp", suffix));
        table.extend(moe_table("model.layers.#.block_sparse_moe"));
        table.push(Row::new(
            "blk.#.ffn_norm.weight",
            "model.layers.#.post_attention_layernorm.weight",
        ));
        Ok(table)
    }

    fn gguf_given(&self) -> Vec<(&'static str, Vec<f32>)> {
        rope_factors(self.hybrid.attention.rope.as_ref())
    }

    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        checkpoint.rename(|name| {
            let (layer, part) = name.split_once(".block_sparse_moe.")?;
            let part = HF_NAMES.iter().find(|(in_memory, _)| *in_memory == part)?.1;
            Some(format!("{layer}.block_sparse_moe.{part}"))
        })
    }

    fn write_gguf(&self, metadata: &mut Metadata) -> Result<()> {
        let attention = &self.hybrid.attention;
        let arch = self.gguf_arch();
        if arch == EXPERTS && attention.rope.is_none() {
            let what = "attention without positions in GGUF's granitemoe, which has them always";
            return Err(Error::Unsupported { what: what.into() });
        }
        let mut keys = self.hybrid.write_gguf(metadata, arch)?;
        keys.set("attention.scale", attention.scale);
        keys.set("embedding_scale", self.embedding_scale);
        keys.set("residual_scale", self.residual_scale);
        keys.set("logit_scale", self.logits_scaling);
        let d_shared = self.shared_mlp.d_ff;
        keys.size("expert_shared_feed_forward_length", d_shared);
        keys.size("feed_forward_length", self.moe.as_ref().map_or(d_shared, |moe| moe.expert.d_ff));
        if let Some(moe) = &self.moe {
            keys.size("expert_count", moe.experts);
            keys.size("expert_used_count", moe.used);
        }
        Ok(())
    }

    fn to_json(&self) -> Result<Value> {
        let attention = &self.hybrid.attention;
        let moe = self.moe.as_ref();
        let word = |&is_attention: &bool| if is_attention { "attention" } else { "mamba" };
        let fields = json!({
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "layer_types": self.hybrid.is_attention.iter().map(word).collect::<Vec<_>>(),
            "position_embedding_type": if attention.rope.is_some() { "rope" } else { "nope" },
            "attention_multiplier": shortest(attention.scale),
            "embedding_multiplier": shortest(self.embedding_scale),
            "residual_multiplier": shortest(self.residual_scale),
            "logits_scaling": shortest(self.logits_scaling),
            "shared_intermediate_size": self.shared_mlp.d_ff,
            "intermediate_size": moe.map_or(self.shared_mlp.d_ff, |moe| moe.expert.d_ff),
            "num_local_experts": moe.map_or(0, |moe| moe.experts),
            "num_experts_per_tok": moe.map_or(0, |moe| moe.used),
        });
        let mut json = self.hybrid.to_json()?;
        if let (Value::Object(json), Value::Object(fields)) = (&mut json, fields) {
            json.extend(fields);
        }
        if let Some(rope) = &attention.rope {
            if rope.rotary_dim != attention.headdim {
                let what = format!(
                    "{} of {} dimensions that rotate in transformers' {}, where all do",
                    rope.rotary_dim,
                    attention.headdim,
                    self.name()
                );
                return Err(Error::Unsupported { what });
            }
            rope.write_json(&mut json, attention.headdim)?;
        }
        Ok(json)
    }
}

/// Names under `block_sparse_moe` that transformers 5 has in memory, and those of its files.
const HF_NAMES: [(&str, &str); 3] = [
    ("experts.gate_up_proj", "input_linear.weight"),
    ("experts.down_proj", "output_linear.weight"),
    ("router.weight", "router.layer.weight"),
];
