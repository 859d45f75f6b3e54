//! Qwen3.5, 3.6 and 3.8 language models with experts (Alibaba, 2026): the layers of [Qwen3.5](super::qwen3_5), each with
//! a mixture of experts in place of the one feed-forward part, and one for all beside them.
//!
//! ```text
//!                                                                                            ┌ experts ─────────────┐
//! h ─┬─ input_layernorm ─ linear_attn, or self_attn ─ + ─┬─ post_attention_layernorm ─ mlp ─┤                      ├─ + ─ ...
//!    └─────────────────────────────────────────────────┘ │                                  └ shared_expert x gate ┘  │
//!                                                        └────────────────────────────────────────────────────────────┘
//! ```
//!
//! The weights of a token's experts always sum to 1: files have no `norm_topk_prob`, and transformers looks at none.
//!
//! Loads transformers' `Qwen3_5MoeForConditionalGeneration` without its vision tower, `Qwen3_5MoeForCausalLM` and
//! `Qwen3_5MoeTextModel`, with experts stacked or one by one, and GGUF, as [Qwen3.5](super::qwen3_5) has it. Folders are
//! written as `Qwen3_5MoeForCausalLM`, with stacked experts.

use super::delta_hybrid::{DeltaHybrid, text_config};
use super::fields::Fields;
use super::gated_experts::GatedExperts;
use super::gguf::{delta_table, rope_factors};
use super::qwen3_5::sections;
use super::{Family, Frame, LeftOut};
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::Result;
use crate::nn::{LayerSpec, Row};

/// What transformers calls the model's part for text.
const TYPE: &str = "qwen3_5_moe_text";

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// All but the feed-forward part.
    pub hybrid: DeltaHybrid,
    /// Every layer's feed-forward part.
    pub experts: GatedExperts,
    /// Pairs of dimensions that rotate with the time, the height and the width of a picture; one position for text.
    pub mrope_section: [usize; 3],
}

impl Family for Config {
    fn model_types() -> &'static [&'static str] {
        &[TYPE, "qwen3_5_moe"]
    }

    fn archs() -> &'static [&'static str] {
        &["qwen35moe"]
    }

    fn blank() -> Self {
        let experts = GatedExperts::blank();
        Self { hybrid: DeltaHybrid::blank(), experts, mrope_section: [0; 3] }
    }

    fn read(file: &ConfigFile) -> Result<Self> {
        let mut config = Self::blank();
        config.fields(&mut Fields::from_json(&text_config(file, TYPE)?))?;
        Ok(config)
    }

    fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        f.model("Qwen3_5MoeForCausalLM", TYPE);
        self.hybrid.fields(f)?;
        self.experts.fields(f, self.hybrid.attention.d_model, [256, 8], true)?;
        sections(f, &mut self.mrope_section, &self.hybrid)
    }

    fn frame(&self) -> Frame {
        self.hybrid.frame()
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let feed_forward =
            |layer: LayerSpec| self.experts.add_to(layer.norm("post_attention_layernorm"));
        self.hybrid.layers().map(feed_forward).collect()
    }

    fn next_block(&self) -> Option<super::Config> {
        Some(Self { hybrid: self.hybrid.next_block(), ..self.clone() }.into())
    }

    /// `mlp.experts.gate_up_proj` `[E, 2 F, d_model]` is each expert's `gate_proj`, then its `up_proj`;
    /// `mlp.experts.down_proj` `[E, d_model, F]` each expert's `down_proj`.
    fn hf_table(&self) -> Vec<Row> {
        GatedExperts::stacks()
    }

    fn gguf_table(&self) -> Result<Vec<Row>> {
        let mut table = self.hybrid.gguf_table();
        table.extend(delta_table(&self.hybrid.mixer, "model.layers.#.linear_attn", true));
        table.extend(GatedExperts::gguf_table());
        Ok(table)
    }

    fn gguf_given(&self) -> Vec<(&'static str, Vec<f32>)> {
        rope_factors(self.hybrid.attention.rope.as_ref())
    }

    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        self.hybrid.normalise(checkpoint)?;
        GatedExperts::normalise(checkpoint)
    }

    fn left_out(&self, name: &str) -> Option<LeftOut> {
        self.hybrid.left_out(name)
    }
}
