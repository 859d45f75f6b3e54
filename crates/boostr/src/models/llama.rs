//! Llama language models (Touvron et al., 2023, arXiv 2302.13971 and 2307.09288), and models that
//! differ from them by an option: Mistral, Qwen2, Qwen3, SmolLM.
//!
//! All layers are attention with rotary positions and a gated feed-forward part. The state of a
//! sequence grows with its length. Qwen2 has biases on queries, keys and values. Qwen3 has a norm on
//! each head's query and key. Mistral may see only a window of the past.
//!
//! ```text
//! h ─┬─ input_layernorm ─ self_attn ─ + ─┬─ post_attention_layernorm ─ mlp ─ + ─ ...   n_layer times
//!    └────────────────────────────────┘ └─────────────────────────────────┘
//! ```
//!
//! Loads transformers' `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM` and
//! `Qwen3ForCausalLM`, and GGUF.

use serde_json::json;

use super::fields::{Fields, Need::Required};
use super::gguf::{attention_table, mlp_table, rope_factors};
use super::{Family, Frame, Layer, Names, SILU};
use crate::backend::{Backend, Tensor};
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::{Error, Result};
use crate::nn::{
    Attention, AttentionConfig, Batch, LayerSpec, Mlp, MlpConfig, Params, RmsNorm, Row,
};

const MODEL_TYPES: [&str; 4] = ["llama", "mistral", "qwen2", "qwen3"];

const NAMES: Names = Names {
    embeddings: "model.embed_tokens",
    layers: "model.layers",
    norm: "model.norm",
    head: "lm_head",
};

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// One of `llama`, `mistral`, `qwen2`, `qwen3`.
    pub model_type: &'static str,
    /// Ids that the tokenizer may give; the embedding may have more rows.
    pub vocab_size: usize,
    /// Whether the head is the embedding; `None` when the file does not say.
    pub tie_embeddings: Option<bool>,
    /// Added to the mean of squares of norms.
    pub norm_eps: f32,
    /// Longest context that the model was made for.
    pub max_position: usize,
    /// Every layer's attention, but for its window.
    pub attention: AttentionConfig,
    /// Each layer's window.
    pub windows: Vec<Option<usize>>,
    /// Every layer's feed-forward part.
    pub mlp: MlpConfig,
}

/// Each layer's window: `sliding_window` where it is in use. Where the file has no such key, it is that of
/// transformers' class; null is no window.
fn windows(file: &ConfigFile, model_type: &str, n_layer: usize) -> Result<Vec<Option<usize>>> {
    let of_class = (model_type != "llama" && !file.states("sliding_window")).then_some(4096);
    let window = file.usize(&["sliding_window"], 1..=1 << 40)?.or(of_class);
    let in_use = file.bool(&["use_sliding_window"])?.unwrap_or(model_type == "mistral");
    let Some(window) = window.filter(|_| in_use) else { return Ok(vec![None; n_layer]) };
    if let Some(types) = file.texts("layer_types")? {
        if types.len() != n_layer {
            let reason = format!("{} layers, but num_hidden_layers is {n_layer}", types.len());
            return Err(file.error("layer_types", reason));
        }
        let of = |kind: &&str| (*kind == "sliding_attention").then_some(window);
        return Ok(types.iter().map(of).collect());
    }
    let of_class = if model_type.starts_with("qwen") { 28 } else { 0 };
    let first = file.usize(&["max_window_layers"], 0..=1 << 40)?.unwrap_or(of_class);
    Ok((0..n_layer).map(|layer| (layer >= first).then_some(window)).collect())
}

struct Block<B: Backend> {
    input_layernorm: RmsNorm<B>,
    self_attn: Attention<B>,
    post_attention_layernorm: RmsNorm<B>,
    mlp: Mlp<B>,
}

impl<B: Backend> Layer<B> for Block<B> {
    fn forward(&self, client: &B::Client, h: Tensor<B>, batch: &mut Batch<B>) -> Result<Tensor<B>> {
        let u = self.input_layernorm.forward(client, &h)?;
        let h = self.self_attn.forward_onto(client, &u, (h, 1.0), batch)?;
        let u = self.post_attention_layernorm.forward(client, &h)?;
        self.mlp.forward_onto(client, &u, h, 1.0)
    }

    fn weight_bytes(&self) -> usize {
        self.self_attn.weight_bytes() + self.mlp.weight_bytes()
    }
}

impl Family for Config {
    fn model_types() -> &'static [&'static str] {
        &MODEL_TYPES
    }

    fn archs() -> &'static [&'static str] {
        &["llama", "qwen2", "qwen3"]
    }

    fn blank() -> Self {
        Self {
            model_type: "llama",
            vocab_size: 0,
            tie_embeddings: None,
            norm_eps: 1e-6,
            max_position: 0,
            attention: AttentionConfig::new(0, 0, 0, 0),
            windows: Vec::new(),
            mlp: MlpConfig::swiglu(0, 0),
        }
    }

    fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        let (a, mlp) = (&mut self.attention, &mut self.mlp);
        let named = match (f.json(), f.gguf()) {
            (Some(file), _) => file.text("model_type")?.unwrap_or("llama"),
            (_, Some((keys, _))) => keys.arch,
            _ => self.model_type,
        };
        self.model_type = MODEL_TYPES.into_iter().find(|kind| *kind == named).unwrap_or("llama");
        if let Some((keys, _)) = f.gguf()
            && keys.optional("expert_count")?.unwrap_or(0) > 0
        {
            return Err(keys.error("expert_count", "experts are not supported"));
        }
        let class = match self.model_type {
            "mistral" => "MistralForCausalLM",
            "qwen2" => "Qwen2ForCausalLM",
            "qwen3" => "Qwen3ForCausalLM",
            _ => "LlamaForCausalLM",
        };
        f.constant("architectures", vec![class]);
        f.constant("model_type", self.model_type);
        f.size(["hidden_size", "embedding_length"], &mut a.d_model, Required)?;
        a.d_in = a.d_model;
        let mut n_layer = self.windows.len();
        f.n_layer("num_hidden_layers", &mut n_layer)?;
        f.heads(a)?;
        f.size(["intermediate_size", "feed_forward_length"], &mut mlp.d_ff, Required)?;
        mlp.d_model = a.d_model;
        f.activation("hidden_act", SILU)?;
        f.norm_eps("rms_norm_eps", &mut self.norm_eps, 1e-6)?;
        f.context(&mut self.max_position, 2048)?;
        let is_qwen2 = self.model_type == "qwen2";
        f.has("attention_bias", "blk.0.attn_q.bias", &mut a.qkv_bias, is_qwen2)?;
        f.has("mlp_bias", "blk.0.ffn_up.bias", &mut mlp.bias, false)?;
        if f.reads() {
            let mut normed = self.model_type == "qwen3";
            a.out_bias = a.qkv_bias && !is_qwen2;
            if let Some((_, checkpoint)) = f.gguf() {
                a.out_bias = checkpoint.get("blk.0.attn_output.bias").is_some();
                normed = checkpoint.get("blk.0.attn_q_norm.weight").is_some();
            }
            a.qk_norm_eps = normed.then_some(self.norm_eps);
        }
        f.rope(&mut a.rope, a.headdim, 1.0)?;
        self.visit_windows(f, n_layer)?;
        f.vocabulary(&mut self.vocab_size, &mut self.tie_embeddings)
    }

    fn name(&self) -> &'static str {
        self.model_type
    }

    fn arch(&self) -> Option<&'static str> {
        Some(if self.model_type == "mistral" { "llama" } else { self.model_type })
    }

    fn frame(&self) -> Frame {
        Frame {
            tie_embeddings: self.tie_embeddings,
            ..Frame::new(NAMES, self.attention.d_model, self.vocab_size, self.norm_eps)
        }
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let layer = |&window: &Option<usize>| {
            LayerSpec::of(AttentionConfig { window, ..self.attention.clone() })
                .and(self.mlp.clone())
        };
        self.windows.iter().map(layer).collect()
    }

    fn layer<B: Backend>(&self, i: usize, params: &Params<'_, B>) -> Result<Box<dyn Layer<B>>> {
        let norm = |name| RmsNorm::load(&params.under(name), self.mlp.d_model, self.norm_eps);
        let attention = AttentionConfig { window: self.windows[i], ..self.attention.clone() };
        Ok(Box::new(Block {
            input_layernorm: norm("input_layernorm")?,
            self_attn: Attention::load(&attention, &params.under("self_attn"))?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: Mlp::load(&self.mlp, &params.under("mlp"))?,
        }))
    }

    fn gguf_table(&self) -> Result<Vec<Row>> {
        let interleaved = self.arch() == Some("llama");
        let mut table = attention_table(&self.attention, "model.layers.#.self_attn", interleaved);
        table.extend(mlp_table("model.layers.#.mlp", ""));
        table.extend([
            Row::new("blk.#.attn_norm.weight", "model.layers.#.input_layernorm.weight"),
            Row::new("blk.#.ffn_norm.weight", "model.layers.#.post_attention_layernorm.weight"),
        ]);
        Ok(table)
    }

    fn gguf_given(&self) -> Vec<(&'static str, Vec<f32>)> {
        rope_factors(self.attention.rope.as_ref())
    }

    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        // Older files keep what follows from the configuration.
        checkpoint.retain(|name| !name.ends_with(".rotary_emb.inv_freq"));
        Ok(())
    }
}

impl Config {
    /// Each layer's window: one for all in GGUF, in JSON one with a list of the layers that have it.
    fn visit_windows(&mut self, f: &mut Fields<'_>, n_layer: usize) -> Result<()> {
        if let Some(file) = f.json() {
            self.windows = windows(file, self.model_type, n_layer)?;
        }
        if let Some((keys, _)) = f.gguf() {
            let window = keys.optional("attention.sliding_window")?.filter(|&window| window > 0);
            self.windows = vec![window; n_layer];
        }
        let first = self.windows.first().copied().flatten();
        if let Some(keys) = f.gguf_mut() {
            if self.windows.iter().any(|window| *window != first) {
                let what = "windows of some layers in GGUF, which has one for all".into();
                return Err(Error::Unsupported { what });
            }
            if let Some(window) = first {
                keys.size("attention.sliding_window", window);
            }
        }
        if let Some(window) = self.windows.iter().flatten().next() {
            f.constant("sliding_window", *window);
            f.constant("use_sliding_window", true);
            let kind = |window: &Option<usize>| match window {
                Some(_) => "sliding_attention",
                None => "full_attention",
            };
            f.constant("layer_types", json!(self.windows.iter().map(kind).collect::<Vec<_>>()));
        }
        Ok(())
    }
}
