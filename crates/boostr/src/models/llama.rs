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

use super::fields::Fields;
use super::gguf::{attention_table, mlp_table, rope_factors};
use super::groups::ClassWindow;
use super::{Family, Frame, Names};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::nn::{AttentionConfig, LayerSpec, MlpConfig, Row};

const MODEL_TYPES: [&str; 4] = ["llama", "mistral", "qwen2", "qwen3"];

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
            max_position: 2048,
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
        f.model(class, self.model_type);
        let mut n_layer = self.windows.len();
        f.transformer((a, mlp), &mut n_layer, &mut self.norm_eps, &mut self.max_position)?;
        let is_qwen2 = self.model_type == "qwen2";
        f.biases(is_qwen2, (a, mlp))?;
        if f.reads() {
            a.out_bias &= f.json().is_none() || !is_qwen2;
            let normed = match f.gguf() {
                Some((_, checkpoint)) => checkpoint.get("blk.0.attn_q_norm.weight").is_some(),
                None => self.model_type == "qwen3",
            };
            a.qk_norm_eps = normed.then_some(self.norm_eps);
        }
        f.rope(&mut a.rope, a.headdim, 1.0)?;
        let class = match self.model_type {
            "llama" => ClassWindow { size: None, used: false, first: 0 },
            "mistral" => ClassWindow { size: Some(4096), used: true, first: 0 },
            _ => ClassWindow { size: Some(4096), used: false, first: 28 },
        };
        f.windows(&mut self.windows, n_layer, &class)?;
        f.vocabulary(&mut self.vocab_size, &mut self.tie_embeddings)
    }

    fn name(&self) -> &'static str {
        self.model_type
    }

    fn arch(&self) -> Option<&'static str> {
        Some(if self.model_type == "mistral" { "llama" } else { self.model_type })
    }

    fn frame(&self) -> Frame {
        let names = Names::model("model.norm");
        Frame::new(names, self.attention.d_model, self.vocab_size, self.norm_eps)
            .tied(self.tie_embeddings)
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let layer = |&window: &Option<usize>| {
            LayerSpec::new(self.attention.d_model, self.norm_eps)
                .norm("input_layernorm")
                .and("self_attn", AttentionConfig { window, ..self.attention.clone() })
                .norm("post_attention_layernorm")
                .and("mlp", self.mlp.clone())
        };
        self.windows.iter().map(layer).collect()
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
