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

use super::fields::{Fields, Need::Required};
use super::gguf::{Keys, mlp_table, rope_factors};
use super::groups::numbers;
use super::hybrid::{self, Hybrid};
use super::{Family, Frame, Names};
use crate::checkpoint::ConfigFile;
use crate::error::Result;
use crate::nn::{LayerSpec, MlpConfig, Row};

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// All but the feed-forward part.
    pub hybrid: Hybrid,
    /// Every layer's feed-forward part.
    pub mlp: MlpConfig,
}

impl Family for Config {
    fn model_types() -> &'static [&'static str] {
        &["bamba"]
    }

    fn blank() -> Self {
        Self { hybrid: Hybrid::blank(), mlp: MlpConfig::swiglu(0, 0) }
    }

    /// GGUF calls it as it calls Granite. A file is Bamba's when its positions rotate and it has none of Granite's
    /// factors.
    fn is_gguf(keys: &Keys<'_>) -> Result<bool> {
        let of_granite =
            ["attention.scale", "embedding_scale", "residual_scale", "logit_scale", "expert_count"];
        let rotates = keys.bool("rope.scaling.finetuned")?.unwrap_or(true);
        Ok(keys.arch == hybrid::ARCH
            && rotates
            && !of_granite.iter().any(|name| keys.metadata.has(&keys.key(name))))
    }

    fn read(file: &ConfigFile) -> Result<Self> {
        // Half of each head rotates whatever the file says here, as in transformers; what `rope_parameters` and
        // `attn_rotary_emb` say counts.
        let is_said = file.has("attn_rotary_emb");
        let file =
            if is_said { file.clone() } else { file.clone().without("partial_rotary_factor") };
        let mut config = Self::blank();
        config.fields(&mut Fields::from_json(&file))?;
        Ok(config)
    }

    fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        self.hybrid.fields(f, 1e-5)?;
        let a = &mut self.hybrid.attention;
        self.mlp.d_model = a.d_model;
        f.model("BambaForCausalLM", "bamba");
        let d_ff = ["intermediate_size", "feed_forward_length"];
        f.size(d_ff, &mut self.mlp.d_ff, Required)?;
        f.has("mlp_bias", "blk.0.ffn_up.bias", &mut self.mlp.bias, false)?;
        f.constant("attn_layer_indices", numbers(&self.hybrid.is_attention));
        if f.json().is_some() || f.writes_json() {
            f.rope(&mut a.rope, a.headdim, 0.5)?;
        }
        if let (Some(rope), Some(json)) = (&a.rope, f.json_mut()) {
            json.insert("attn_rotary_emb".into(), json!(rope.rotary_dim));
            // Transformers 5 takes the part that rotates from here only, and half when it is not here.
            let mut parameters = match &json["rope_scaling"] {
                Value::Null => json!({ "rope_type": "default" }),
                scaling => scaling.clone(),
            };
            for key in ["rope_theta", "partial_rotary_factor"] {
                parameters[key] = json[key].clone();
            }
            json.insert("rope_parameters".into(), parameters);
        }
        Ok(())
    }

    fn arch(&self) -> Option<&'static str> {
        Some(hybrid::ARCH)
    }

    fn frame(&self) -> Frame {
        self.hybrid.frame(Names::model("model.final_layernorm"))
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let feed_forward =
            |layer: LayerSpec| layer.norm("pre_ff_layernorm").and("feed_forward", self.mlp.clone());
        self.hybrid.layers(1.0).map(feed_forward).collect()
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
}
