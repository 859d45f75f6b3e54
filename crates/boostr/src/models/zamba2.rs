//! Zamba2 language models (Glorioso et al., 2024, arXiv 2411.15242).
//!
//! Mamba-2 layers, of which some, the hybrid ones, have attention and a feed-forward part before their
//! mixer. Unlike in other hybrids these come from a few blocks that take turns: hybrid layer k, counted
//! among hybrid layers alone, uses block k mod `num_mem_blocks`, whose weights are there once. What is a
//! layer's own are low-rank adapters beside the block's projections, and `linear` behind it.
//!
//! ```text
//! e ─┬──────────────────────────────────────── ...   the embeddings, seen again by each block
//!    │  ┌───────────────────────────────────────────────┐
//! h ─┴─ + ─ block ─ linear ─ + ─ input_layernorm ─ mamba ─ + ─ ...   n_layer times; hybrid layers alone
//!       └────────────────────┘                                      have block and linear
//!
//! block: [h | e] ─ input_layernorm ─ self_attn ─ pre_ff_layernorm ─ feed_forward      nothing is added back
//! ```
//!
//! Loads transformers' `Zamba2ForCausalLM`. GGUF has no architecture for it.

use super::fields::{Fields, Need::Missing, Need::Or, Need::Required};
use super::groups::{MAX_LAYERS, headdim, layer_kinds, numbers};
use super::turns::Turns;
use super::{Family, Frame, Names};
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::Result;
use crate::nn::{AttentionConfig, LayerSpec, MixerConfig, MlpConfig, SharedBlock};
use crate::ops::Activation;

const NAMES: Names = Names::model("model.final_layernorm");
/// What stands between a layer and the parameters of its block.
const SHARED: &str = "shared_transformer";
/// Added to the mean of squares of the gated norms, whatever the other norms have.
const GATED_NORM_EPS: f32 = 1e-5;
/// Tokens that `use_long_context` makes a model for.
const LONG_CONTEXT: usize = 16384;

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Ids that the tokenizer may give; the embedding may have more rows.
    pub vocab_size: usize,
    /// Whether the head is the embedding; `None` when the file does not say.
    pub tie_embeddings: Option<bool>,
    /// Added to the mean of squares of norms, but for the gated ones.
    pub norm_eps: f32,
    /// Longest context that the model was made for.
    pub max_position: usize,
    /// Which layers are hybrid.
    pub hybrid: Vec<bool>,
    /// Blocks that hybrid layers take in turn.
    pub num_mem_blocks: usize,
    /// Width of the adapters between their two matrices.
    pub adapter_rank: usize,
    /// Whether queries, keys and values have adapters; the feed-forward part always has.
    pub attention_adapters: bool,
    /// Every layer's mixer.
    pub mixer: MixerConfig,
    /// Every block's attention.
    pub attention: AttentionConfig,
    /// Every block's feed-forward part.
    pub mlp: MlpConfig,
}

impl Config {
    /// The hybrid layers and the blocks that they take.
    fn turns(&self) -> Turns {
        let users = numbers(&self.hybrid);
        // No more blocks than are used.
        let blocks = users.len().min(self.num_mem_blocks);
        Turns { layers: NAMES.layers, under: SHARED, users, blocks }
    }
}

/// Which layers are hybrid: a word for each layer, or the numbers of those that are.
fn hybrid(file: &ConfigFile) -> Result<Vec<bool>> {
    let n_layer = file.required(&["num_hidden_layers"], 1..=MAX_LAYERS)?;
    let ids = file.usizes("hybrid_layer_ids", 0..=n_layer - 1)?;
    let key = if file.has("layers_block_type") { "layers_block_type" } else { "layer_types" };
    let is_hybrid = |word: &str| match word {
        "mamba" | "linear_attention" => Some(false),
        "hybrid" => Some(true),
        _ => None,
    };
    let expected = "mamba, linear_attention or hybrid";
    let Some(hybrid) = layer_kinds((file, key), Some(n_layer), is_hybrid, expected)? else {
        let missing = "missing (looked for layers_block_type, layer_types, hybrid_layer_ids)";
        let ids = ids.ok_or_else(|| file.error("layers_block_type", missing))?;
        return Ok((0..n_layer).map(|layer| ids.contains(&layer)).collect());
    };
    let named = numbers(&hybrid);
    if let Some(ids) = ids.filter(|ids| *ids != named) {
        let reason = format!("{ids:?}, but by {key} it is {named:?}");
        return Err(file.error("hybrid_layer_ids", reason));
    }
    Ok(hybrid)
}

impl Family for Config {
    fn model_types() -> &'static [&'static str] {
        &["zamba2"]
    }

    fn blank() -> Self {
        Self {
            vocab_size: 0,
            tie_embeddings: None,
            norm_eps: 1e-5,
            max_position: 0,
            hybrid: Vec::new(),
            num_mem_blocks: 1,
            adapter_rank: 128,
            attention_adapters: false,
            mixer: MixerConfig { norm_eps: GATED_NORM_EPS, ..MixerConfig::new(0, 0, 0) },
            attention: AttentionConfig::new(0, 0, 0, 0),
            mlp: MlpConfig { act: Activation::Gelu, ..MlpConfig::swiglu(0, 0) },
        }
    }

    fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        let (m, a, mlp) = (&mut self.mixer, &mut self.attention, &mut self.mlp);
        f.model("Zamba2ForCausalLM", "zamba2");
        f.size(["hidden_size", ""], &mut m.d_model, Required)?;
        if let Some(file) = f.json() {
            self.hybrid = hybrid(file)?;
            (a.d_in, a.d_model, mlp.d_model) = (2 * m.d_model, m.d_model, m.d_model);
        }
        f.constant("num_hidden_layers", self.hybrid.len());
        let kind = |&is_hybrid: &bool| if is_hybrid { "hybrid" } else { "mamba" };
        f.constant("layers_block_type", self.hybrid.iter().map(kind).collect::<Vec<_>>());
        f.constant("hybrid_layer_ids", numbers(&self.hybrid));
        f.size(["num_mem_blocks", ""], &mut self.num_mem_blocks, Missing(1))?;
        let adapters = ["use_shared_attention_adapter|use_shared_attention_lora", ""];
        f.flag(adapters, &mut self.attention_adapters, Missing(false))?;
        f.size(["adapter_rank|lora_rank", ""], &mut self.adapter_rank, Missing(128))?;
        f.size(["num_attention_heads", ""], &mut a.nheads, Missing(32))?;
        f.size(["num_key_value_heads", ""], &mut a.nheads_kv, Or(a.nheads))?;
        if let Some(file) = f.json() {
            let width = ("2 * hidden_size", a.d_in);
            a.headdim = headdim((file, "num_attention_heads"), a.nheads, width)?;
            a.scale = (a.headdim as f32 / 2.0).sqrt().recip();
        }
        f.constant("attention_hidden_size", a.d_in);
        f.constant("attention_head_dim", a.headdim);
        let (mut has_rope, mut is_long) = (a.rope.is_some(), false);
        f.flag(["use_mem_rope", ""], &mut has_rope, Missing(false))?;
        f.flag(["use_long_context", ""], &mut is_long, Missing(false))?;
        f.context(&mut self.max_position, 4096)?;
        self.max_position = if is_long { LONG_CONTEXT } else { self.max_position };
        let wide = m.d_model.saturating_mul(4);
        f.size(["intermediate_size", ""], &mut mlp.d_ff, Or(wide))?;
        f.activation("hidden_act", &["gelu"])?;
        f.flag(["add_bias_linear", ""], &mut mlp.bias, Missing(false))?;
        f.norm_eps("rms_norm_eps", &mut self.norm_eps, 1e-5)?;
        let d_inner = f.channels("mamba_expand", m)?;
        f.size(["n_mamba_heads", ""], &mut m.nheads, Missing(8))?;
        if let Some(file) = f.json() {
            let channels = ("mamba_expand * hidden_size", d_inner);
            m.headdim = headdim((file, "n_mamba_heads"), m.nheads, channels)?;
            (m.in_bias, m.out_bias) = (mlp.bias, mlp.bias);
        }
        f.constant("mamba_headdim", m.headdim);
        f.size(["mamba_ngroups", ""], &mut m.ngroups, Missing(1))?;
        f.size(["mamba_d_state", ""], &mut m.d_state, Missing(64))?;
        f.size(["mamba_d_conv", ""], &mut m.d_conv, Missing(4))?;
        f.constant("use_conv_bias", m.conv_bias);
        f.limits("time_step_limit", &mut m.dt_limit)?;
        if has_rope {
            f.rope(&mut a.rope, a.headdim, 1.0)?;
        }
        // The authors' code and transformers 4 have another base where `use_long_context` is set.
        // transformers 5 does not, and writes the base that it uses into `rope_parameters`.
        let is_old = f.json().is_some_and(|file| !file.has("rope_parameters"));
        if let Some(rope) = a.rope.as_mut().filter(|_| is_long && is_old && a.headdim > 2) {
            let headdim = a.headdim as f64;
            rope.theta *= 8f64.powf(headdim / (headdim - 2.0));
        }
        f.vocabulary(&mut self.vocab_size, &mut self.tie_embeddings)?;
        self.tie_embeddings = self.tie_embeddings.or(Some(true));
        Ok(())
    }

    fn frame(&self) -> Frame {
        Frame::new(NAMES, self.mixer.d_model, self.vocab_size, self.norm_eps)
            .tied(self.tie_embeddings)
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let plain = || LayerSpec::new(self.mixer.d_model, self.norm_eps);
        let mamba = plain().norm("input_layernorm").and("mamba", self.mixer.clone());
        let of_hybrid = plain()
            .norm("mamba_decoder.input_layernorm")
            .and("mamba_decoder.mamba", self.mixer.clone())
            .described(self.attention.clone())
            .described(self.mlp.clone());
        let mut layers = vec![mamba; self.hybrid.len()];
        let turns = self.turns();
        for (index, &layer) in turns.users.iter().enumerate() {
            let block = SharedBlock {
                home: turns.under_home(index),
                index,
                attention: self.attention.clone(),
                mlp: self.mlp.clone(),
                norm_eps: self.norm_eps,
                adapter_rank: self.adapter_rank,
                attention_adapters: self.attention_adapters,
            };
            layers[layer] = of_hybrid.clone().lead("linear", block);
        }
        layers
    }

    /// A layer of a block is one of every hybrid layer that uses it.
    fn shared_as(&self, layer: &str) -> Vec<String> {
        self.turns().names(layer)
    }

    /// Leaves each shared weight once, under the first layer that has it.
    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        let turns = self.turns();
        checkpoint.unite(|name| turns.home(name))
    }
}
