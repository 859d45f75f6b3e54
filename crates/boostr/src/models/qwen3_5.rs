//! Qwen3.5, 3.6 and 3.8 language models, the dense ones (Alibaba, 2026): gated delta mixers, each fourth layer gated
//! attention, each followed by a gated feed-forward part.
//!
//! ```text
//! h ─┬─ input_layernorm ─ linear_attn, or self_attn ─ + ─┬─ post_attention_layernorm ─ mlp ─ + ─ ...   n_layer times
//!    └─────────────────────────────────────────────────┘ └─────────────────────────────────┘
//! ```
//!
//! Norms are zero-centred: their factors are one more than their weights, but for those of the mixers' outputs. A part
//! of each head's dimensions rotates with the position. Three equal rows of positions, as text has, make the published
//! interleaved rotation the plain one.
//!
//! Loads transformers' `Qwen3_5ForConditionalGeneration` without its vision tower, `Qwen3_5ForCausalLM` and
//! `Qwen3_5TextModel`, and GGUF. Folders are written as `Qwen3_5ForCausalLM`.
//!
//! # GGUF
//!
//! Weights of zero-centred norms have the one in them. The value heads of one key head lie apart: the first of each key
//! head, then the second of each.

use serde_json::json;

use super::delta_hybrid::{DeltaHybrid, text_config};
use super::fields::{Fields, Need::Class};
use super::gguf::{delta_table, mlp_table, rope_factors};
use super::{Family, Frame, LeftOut};
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::Result;
use crate::nn::{LayerSpec, MlpConfig, Row};

/// What transformers calls the model's part for text.
const TYPE: &str = "qwen3_5_text";

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// All but the feed-forward part.
    pub hybrid: DeltaHybrid,
    /// Every layer's feed-forward part.
    pub mlp: MlpConfig,
    /// Pairs of dimensions that rotate with the time, the height and the width of a picture; one position for text.
    pub mrope_section: [usize; 3],
}

impl Family for Config {
    fn model_types() -> &'static [&'static str] {
        &[TYPE, "qwen3_5"]
    }

    fn archs() -> &'static [&'static str] {
        &["qwen35"]
    }

    fn blank() -> Self {
        let mlp = MlpConfig::swiglu(0, 0);
        Self { hybrid: DeltaHybrid::blank(), mlp, mrope_section: [0; 3] }
    }

    fn read(file: &ConfigFile) -> Result<Self> {
        let mut config = Self::blank();
        config.fields(&mut Fields::from_json(&text_config(file, TYPE)?))?;
        Ok(config)
    }

    fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        f.model("Qwen3_5ForCausalLM", TYPE);
        self.hybrid.fields(f)?;
        self.mlp.d_model = self.hybrid.attention.d_model;
        let d_ff = ["intermediate_size", "feed_forward_length"];
        f.size(d_ff, &mut self.mlp.d_ff, Class(12_288))?;
        sections(f, &mut self.mrope_section, &self.hybrid)
    }

    fn frame(&self) -> Frame {
        self.hybrid.frame()
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let feed_forward =
            |layer: LayerSpec| layer.norm("post_attention_layernorm").and("mlp", self.mlp.clone());
        self.hybrid.layers().map(feed_forward).collect()
    }

    fn next_block(&self) -> Option<super::Config> {
        Some(Self { hybrid: self.hybrid.next_block(), ..self.clone() }.into())
    }

    fn gguf_table(&self) -> Result<Vec<Row>> {
        let mut table = self.hybrid.gguf_table();
        table.extend(delta_table(&self.hybrid.mixer, "model.layers.#.linear_attn", true));
        table.extend(mlp_table("model.layers.#.mlp", ""));
        Ok(table)
    }

    fn gguf_given(&self) -> Vec<(&'static str, Vec<f32>)> {
        rope_factors(self.hybrid.attention.rope.as_ref())
    }

    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        self.hybrid.normalise(checkpoint)
    }

    fn left_out(&self, name: &str) -> Option<LeftOut> {
        self.hybrid.left_out(name)
    }
}

/// How the pairs of dimensions that rotate are shared out among the positions of pictures.
pub(super) fn sections(
    f: &mut Fields<'_>,
    sections: &mut [usize; 3],
    hybrid: &DeltaHybrid,
) -> Result<()> {
    const KEY: &str = "mrope_section";
    const GGUF_KEY: &str = "rope.dimension_sections";
    let pairs = hybrid.attention.rope.as_ref().map_or(0, |rope| rope.rotary_dim / 2);
    if f.reads() {
        *sections = [0, 1, 2].map(|i| (pairs + 2 - i) / 3);
    }
    if let Some(file) = f.json() {
        let parameters = file.object("rope_parameters")?;
        if let Some(list) = parameters.usizes(KEY, 0..=pairs)? {
            *sections = list.as_slice().try_into().map_err(|_| {
                parameters.error(KEY, format!("expected 3 numbers, found {}", list.len()))
            })?;
        }
    }
    if let Some((keys, _)) = f.gguf()
        && let Some(list) = keys.metadata.ints(&keys.key(GGUF_KEY))?
    {
        let of = |&n: &i64| usize::try_from(n).ok().filter(|&n| n <= pairs);
        let found: Option<Vec<usize>> = list.iter().map(of).collect();
        // The fourth is that of no position.
        let (Some(&[a, b, c] | &[a, b, c, _]), 3..=4) = (found.as_deref(), list.len()) else {
            let reason = format!("expected 3 or 4 whole numbers from 0 to {pairs}, found {list:?}");
            return Err(keys.error(GGUF_KEY, reason));
        };
        *sections = [a, b, c];
    }
    if let Some(json) = f.json_mut() {
        json["rope_parameters"][KEY] = json!(sections);
        json["rope_parameters"]["mrope_interleaved"] = true.into();
    }
    if let Some(keys) = f.gguf_mut() {
        let [a, b, c] = sections.map(|n| n as i32);
        keys.set(GGUF_KEY, [a, b, c, 0].as_slice());
    }
    Ok(())
}
