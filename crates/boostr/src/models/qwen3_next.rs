//! Qwen3-Next language models (Alibaba, 2025): gated delta mixers, each fourth layer gated attention, each followed by
//! a mixture of experts with one for all beside them.
//!
//! ```text
//!                                                                                            ┌ experts ─────────────┐
//! h ─┬─ input_layernorm ─ linear_attn, or self_attn ─ + ─┬─ post_attention_layernorm ─ mlp ─┤                      ├─ + ─ ...
//!    └─────────────────────────────────────────────────┘ │                                  └ shared_expert x gate ┘  │
//!                                                        └────────────────────────────────────────────────────────────┘
//! ```
//!
//! Layers that `mlp_only_layers` and `decoder_sparse_step` name have one feed-forward part instead. GGUF has no way to say
//! so.
//!
//! Loads transformers' `Qwen3NextForCausalLM`, with experts one by one or stacked, and GGUF.
//!
//! # Names
//!
//! Folders have queries, keys, values and gates of one key head side by side, then those of the next. So do `b` and `a`,
//! in GGUF too. Old GGUF files have the former in one tensor, `ssm_in`, as folders have it.

use super::delta_hybrid::DeltaHybrid;
use super::fields::{Fields, Need::Class, Need::Missing, Need::Or};
use super::gated_experts::GatedExperts;
use super::gguf::{delta_table, rope_factors};
use super::groups::{numbers, refuse};
use super::{Family, Frame, LeftOut, MAX_SIZE};
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::Result;
use crate::nn::{LayerSpec, Layout, MlpConfig, Order, Row, Tensors};

/// The parameters of a mixer.
const MIXER: &str = "model.layers.#.linear_attn";

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// All but the feed-forward parts.
    pub hybrid: DeltaHybrid,
    /// The feed-forward part of layers without experts.
    pub mlp: MlpConfig,
    /// That of the others.
    pub experts: GatedExperts,
    /// Which layers have no experts.
    pub is_dense: Vec<bool>,
}

impl Family for Config {
    fn model_types() -> &'static [&'static str] {
        &["qwen3_next"]
    }

    fn archs() -> &'static [&'static str] {
        &["qwen3next"]
    }

    fn blank() -> Self {
        Self {
            hybrid: DeltaHybrid::blank(),
            mlp: MlpConfig::swiglu(0, 0),
            experts: GatedExperts::blank(),
            is_dense: Vec::new(),
        }
    }

    fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        f.model("Qwen3NextForCausalLM", "qwen3_next");
        self.hybrid.fields(f)?;
        let n_layer = self.hybrid.is_attention.len();
        self.mlp.d_model = self.hybrid.attention.d_model;
        // GGUF's files have a width that no layer has.
        let width = if f.gguf().is_some() { Or(5632) } else { Class(5632) };
        f.size(["intermediate_size", "feed_forward_length"], &mut self.mlp.d_ff, width)?;
        if let Some(file) = f.json() {
            self.is_dense = dense_layers(file, n_layer)?;
        } else if f.reads() {
            self.is_dense = vec![false; n_layer];
        }
        f.constant("mlp_only_layers", numbers(&self.is_dense));
        f.constant("decoder_sparse_step", 1);
        let has_experts = self.is_dense.contains(&false);
        self.experts.fields(f, self.hybrid.attention.d_model, [512, 10], has_experts)?;
        let normalized = &mut self.experts.moe.normalized;
        f.flag(["norm_topk_prob", ""], normalized, Missing(true))
    }

    fn frame(&self) -> Frame {
        self.hybrid.frame()
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let feed_forward = |(layer, &is_dense): (LayerSpec, &bool)| {
            let layer = layer.norm("post_attention_layernorm");
            if is_dense { layer.and("mlp", self.mlp.clone()) } else { self.experts.add_to(layer) }
        };
        self.hybrid.layers().zip(&self.is_dense).map(feed_forward).collect()
    }

    fn next_block(&self) -> Option<super::Config> {
        let (hybrid, is_dense) = (self.hybrid.next_block(), vec![self.experts.moe.experts == 0]);
        Some(Self { hybrid, is_dense, ..self.clone() }.into())
    }

    fn hf_table(&self) -> Vec<Row> {
        let parts = ["in_proj_qkv", "in_proj_z"].map(|part| format!("{MIXER}.{part}.weight"));
        vec![
            self.heads(format!("{MIXER}.in_proj_qkvz.weight"), &parts),
            self.rates("in_proj_ba", MIXER),
        ]
    }

    fn gguf_table(&self) -> Result<Vec<Row>> {
        let [is_dense, is_sum] = [self.is_dense.contains(&true), self.experts.moe.normalized];
        refuse(&[
            (is_dense, "layers without experts in GGUF's qwen3next, which has them in all"),
            (!is_sum, "weights of experts that do not sum to 1 in GGUF's qwen3next"),
        ])?;
        let mut table = self.hybrid.gguf_table();
        let mut mixer = delta_table(&self.hybrid.mixer, MIXER, false);
        mixer.retain(|row| {
            !["blk.#.ssm_beta.weight", "blk.#.ssm_alpha.weight"].contains(&&*row.file)
        });
        table.extend(mixer);
        table.push(self.rates("ssm_ba", "blk.#"));
        table.extend(GatedExperts::gguf_table());
        Ok(table)
    }

    fn gguf_given(&self) -> Vec<(&'static str, Vec<f32>)> {
        rope_factors(self.hybrid.attention.rope.as_ref())
    }

    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        self.hybrid.normalise(checkpoint)?;
        let n_layer = self.hybrid.is_attention.len();
        if checkpoint.gguf().is_some() {
            return self.old_gguf().cut(checkpoint);
        }
        GatedExperts::normalise(checkpoint)?;
        let parameters = self.parameters(self.hybrid.vocab_size, true)?;
        Layout::new(&parameters, &GatedExperts::stacks(), n_layer).cut(checkpoint)
    }

    fn left_out(&self, name: &str) -> Option<LeftOut> {
        self.hybrid.left_out(name)
    }
}

impl Config {
    /// The row of queries, keys, values and gates, key head by key head.
    fn heads(&self, file: String, parts: &[String]) -> Row {
        let m = &self.hybrid.mixer;
        let values = m.nheads / m.nheads_key.max(1) * m.d_value;
        Row::joined(file, parts).order(Order::rows(m.nheads_key, &[(2, m.d_key), (2, values)]))
    }

    /// The row of `b` and `a`, key head by key head.
    fn rates(&self, file: &str, under: &str) -> Row {
        let m = &self.hybrid.mixer;
        let copies = m.nheads / m.nheads_key.max(1);
        let parts = ["in_proj_b", "in_proj_a"].map(|part| format!("{MIXER}.{part}.weight"));
        let row = Row::joined(format!("{under}.{file}.weight"), &parts);
        row.order(Order::rows(m.nheads_key, &[(2, copies)]))
    }

    /// The tensors of old GGUF files that newer ones have in two.
    fn old_gguf(&self) -> Layout {
        let m = &self.hybrid.mixer;
        let is_attention = &self.hybrid.is_attention;
        let mut tensors = Tensors::default();
        for layer in (0..is_attention.len()).filter(|&layer| !is_attention[layer]) {
            tensors.add(format!("blk.{layer}.attn_qkv.weight"), &[m.conv_dim(), m.d_model]);
            tensors.add(format!("blk.{layer}.attn_gate.weight"), &[m.value_width(), m.d_model]);
        }
        let parts = ["attn_qkv", "attn_gate"].map(|part| format!("blk.#.{part}.weight"));
        let row = self.heads("blk.#.ssm_in.weight".into(), &parts);
        Layout::new(&tensors, &[row], is_attention.len())
    }
}

/// Which layers have no experts: those of a list, and of others all but each so-manieth.
fn dense_layers(file: &ConfigFile, n_layer: usize) -> Result<Vec<bool>> {
    const LIST: &str = "mlp_only_layers";
    const STEP: &str = "decoder_sparse_step";
    file.not_null(STEP)?;
    let step = file.usize(&[STEP], 1..=MAX_SIZE)?.unwrap_or(1);
    let mut is_dense: Vec<bool> = (1..=n_layer).map(|layer| !layer.is_multiple_of(step)).collect();
    for layer in file.usizes(LIST, 0..=MAX_SIZE)?.unwrap_or_default() {
        let Some(is_dense) = is_dense.get_mut(layer) else {
            return Err(file.error(LIST, format!("layer {layer} of {n_layer}")));
        };
        *is_dense = true;
    }
    if file.usize(&["num_experts"], 0..=MAX_SIZE)? == Some(0) {
        return Ok(vec![true; n_layer]);
    }
    Ok(is_dense)
}
