//! Llama language models (Touvron et al., 2023, arXiv 2302.13971 and 2307.09288) and what differs from
//! them by an option: Mistral, Qwen2, Qwen3, SmolLM.
//!
//! All layers are attention with rotary positions and a gated feed-forward part; what a sequence
//! keeps grows with its length. Qwen2 has biases on queries, keys and values, Qwen3 a norm on each
//! head's query and key, Mistral may see only a window of the past.
//!
//! ```text
//! h ─┬─ input_layernorm ─ self_attn ─ + ─┬─ post_attention_layernorm ─ mlp ─ + ─ ...   n_layer times
//!    └────────────────────────────────┘ └─────────────────────────────────┘
//! ```
//!
//! Loads transformers' `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM` and
//! `Qwen3ForCausalLM`, and GGUF.

use serde_json::{Value, json};

use super::gguf::{Keys, KeysMut, attention_table, mlp_table, rope_factors};
use super::{Decoder, Family, Frame, MAX_SIZE, Names, SILU, expect_activation, shortest};
use crate::backend::{Backend, Tensor};
use crate::checkpoint::gguf::Metadata;
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::{Error, Result};
use crate::nn::{
    Attention, AttentionConfig, Batch, LayerSpec, Mlp, MlpConfig, Params, RmsNorm, RopeConfig, Row,
    Tensors,
};

/// What `config.json` calls this family.
pub(super) const MODEL_TYPES: &[&str] = &["llama", "mistral", "qwen2", "qwen3"];
/// What GGUF calls it.
pub(super) const ARCHS: &[&str] = &["llama", "qwen2", "qwen3"];

const NAMES: Names =
    Names { embeddings: "model.embed_tokens", norm: "model.norm", head: "lm_head" };

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

impl Config {
    pub(super) fn read(file: &ConfigFile) -> Result<Self> {
        let named = file.text("model_type")?.unwrap_or("llama");
        let model_type = MODEL_TYPES.iter().find(|kind| **kind == named).unwrap_or(&"llama");
        expect_activation(file, "hidden_act", SILU)?;
        let d_model = file.required(&["hidden_size"], 1..=MAX_SIZE)?;
        let nheads = file.required(&["num_attention_heads"], 1..=MAX_SIZE)?;
        let nheads_kv = file.usize(&["num_key_value_heads"], 1..=MAX_SIZE)?.unwrap_or(nheads);
        let headdim = file.usize(&["head_dim"], 1..=MAX_SIZE)?.unwrap_or(d_model / nheads);
        let eps = file.float(&["rms_norm_eps"], f32::MIN_POSITIVE..=1.0)?.unwrap_or(1e-6);
        let bias = file.bool(&["attention_bias"])?.unwrap_or(*model_type == "qwen2");
        let n_layer = file.required(&["num_hidden_layers"], 1..=10_000)?;
        let attention = AttentionConfig {
            qkv_bias: bias,
            out_bias: bias && *model_type != "qwen2",
            qk_norm_eps: (*model_type == "qwen3").then_some(eps),
            rope: Some(RopeConfig::read(file, headdim, 1.0)?),
            ..AttentionConfig::new(d_model, nheads, nheads_kv, headdim)
        };
        Ok(Self {
            model_type,
            vocab_size: file.required(&["vocab_size"], 1..=MAX_SIZE)?,
            tie_embeddings: file.bool(&["tie_word_embeddings"])?,
            norm_eps: eps,
            max_position: file.usize(&["max_position_embeddings"], 1..=1 << 40)?.unwrap_or(2048),
            windows: windows(file, model_type, n_layer)?,
            mlp: MlpConfig {
                bias: file.bool(&["mlp_bias"])?.unwrap_or(false),
                ..MlpConfig::swiglu(d_model, file.required(&["intermediate_size"], 1..=MAX_SIZE)?)
            },
            attention,
        })
    }

    pub(super) fn read_gguf(keys: &Keys<'_>, checkpoint: &Checkpoint) -> Result<Self> {
        let model_type = ARCHS.iter().find(|arch| **arch == keys.arch).unwrap_or(&"llama");
        if keys.optional("expert_count")?.unwrap_or(0) > 0 {
            return Err(keys.error("expert_count", "experts are not supported"));
        }
        let (d_model, nheads) =
            (keys.size("embedding_length")?, keys.size("attention.head_count")?);
        let nheads_kv = keys.optional("attention.head_count_kv")?.unwrap_or(nheads);
        let headdim = keys.optional("attention.key_length")?.unwrap_or(d_model / nheads);
        if let Some(width) = keys.optional("attention.value_length")?.filter(|&w| w != headdim) {
            let reason = format!("expected {headdim}, as keys have, found {width}");
            return Err(keys.error("attention.value_length", reason));
        }
        let eps = keys.norm_eps()?;
        let has = |name: &str| checkpoint.get(name).is_some();
        let attention = AttentionConfig {
            qkv_bias: has("blk.0.attn_q.bias"),
            out_bias: has("blk.0.attn_output.bias"),
            qk_norm_eps: has("blk.0.attn_q_norm.weight").then_some(eps),
            rope: Some(keys.rope(checkpoint, headdim)?),
            ..AttentionConfig::new(d_model, nheads, nheads_kv, headdim)
        };
        let window = keys.optional("attention.sliding_window")?.filter(|&window| window > 0);
        Ok(Self {
            model_type,
            vocab_size: keys.vocab_size()?,
            tie_embeddings: None,
            norm_eps: eps,
            max_position: keys
                .metadata
                .usize(&keys.key("context_length"), 1..=1 << 40)?
                .unwrap_or(2048),
            windows: vec![window; keys.n_layer()?],
            mlp: MlpConfig {
                bias: has("blk.0.ffn_up.bias"),
                ..MlpConfig::swiglu(d_model, keys.size("feed_forward_length")?)
            },
            attention,
        })
    }
}

/// Each layer's window: `sliding_window` where it is in use.
fn windows(file: &ConfigFile, model_type: &str, n_layer: usize) -> Result<Vec<Option<usize>>> {
    let window = file.usize(&["sliding_window"], 1..=1 << 40)?;
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
    let first = file.usize(&["max_window_layers"], 0..=1 << 40)?.unwrap_or(0);
    Ok((0..n_layer).map(|layer| (layer >= first).then_some(window)).collect())
}

struct Layer<B: Backend> {
    input_layernorm: RmsNorm<B>,
    self_attn: Attention<B>,
    post_attention_layernorm: RmsNorm<B>,
    mlp: Mlp<B>,
}

/// The layers of a model.
pub(super) struct Llama<B: Backend>(Vec<Layer<B>>);

impl<B: Backend> Llama<B> {
    pub(super) fn load(config: &Config, params: &Params<'_, B>) -> Result<Self> {
        let layers = params.under("model").under("layers");
        let layers = config.windows.iter().enumerate().map(|(i, &window)| {
            let params = layers.under(&i.to_string());
            let norm = |name| RmsNorm::load(&params.under(name), config.norm_eps);
            let attention = AttentionConfig { window, ..config.attention.clone() };
            Ok(Layer {
                input_layernorm: norm("input_layernorm")?,
                self_attn: Attention::load(&attention, &params.under("self_attn"))?,
                post_attention_layernorm: norm("post_attention_layernorm")?,
                mlp: Mlp::load(&config.mlp, &params.under("mlp"))?,
            })
        });
        Ok(Self(layers.collect::<Result<_>>()?))
    }
}

impl<B: Backend> Decoder<B> for Llama<B> {
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
        h = layer.self_attn.forward_onto(client, &u, (h, 1.0), batch)?;
        let u = layer.post_attention_layernorm.forward(client, &h)?;
        h = layer.mlp.forward_onto(client, &u, h, 1.0)?;
        Ok(h)
    }

    fn weight_bytes(&self) -> usize {
        self.0.iter().map(|layer| layer.self_attn.weight_bytes() + layer.mlp.weight_bytes()).sum()
    }
}

// Layouts of files

impl Family for Config {
    fn name(&self) -> &'static str {
        self.model_type
    }

    fn arch(&self) -> Option<&'static str> {
        Some(if self.model_type == "mistral" { "llama" } else { self.model_type })
    }

    fn frame(&self) -> Frame {
        Frame {
            names: NAMES,
            d_model: self.attention.d_model,
            vocab_size: self.vocab_size,
            pad_vocab_size_multiple: 1,
            tie_embeddings: self.tie_embeddings,
            norm_eps: self.norm_eps,
            embedding_scale: 1.0,
            logits_scale: 1.0,
        }
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let layer = |&window: &Option<usize>| {
            LayerSpec::of(AttentionConfig { window, ..self.attention.clone() })
                .and(self.mlp.clone())
        };
        self.windows.iter().map(layer).collect()
    }

    fn parameters(&self, rows: usize, with_head: bool) -> Tensors {
        let mut tensors = Tensors::default();
        let width = self.attention.d_model;
        NAMES.expect(&mut tensors, rows, width, with_head);
        for layer in 0..self.windows.len() {
            let name = format!("model.layers.{layer}");
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                tensors.add(format!("{name}.{norm}.weight"), &[width]);
            }
            self.attention.expect(&mut tensors, &format!("{name}.self_attn"));
            self.mlp.expect(&mut tensors, &format!("{name}.mlp"));
        }
        tensors
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

    fn write_gguf(&self, metadata: &mut Metadata) -> Result<()> {
        let attention = &self.attention;
        let mut keys = KeysMut::new(metadata, self.arch().unwrap_or("llama"));
        for (name, size) in [
            ("context_length", self.max_position),
            ("embedding_length", attention.d_model),
            ("feed_forward_length", self.mlp.d_ff),
            ("attention.head_count_kv", attention.nheads_kv),
            ("block_count", self.windows.len()),
        ] {
            keys.size(name, size);
        }
        keys.set("attention.layer_norm_rms_epsilon", self.norm_eps);
        keys.attention(attention)?;
        match self.windows.as_slice() {
            [first, rest @ ..] if rest.iter().all(|window| window == first) => {
                if let Some(window) = first {
                    keys.size("attention.sliding_window", *window);
                }
                Ok(())
            }
            _ => {
                let what = "windows of some layers in GGUF, which has one for all".into();
                Err(Error::Unsupported { what })
            }
        }
    }

    fn to_json(&self) -> Result<Value> {
        let attention = &self.attention;
        let class = match self.model_type {
            "mistral" => "MistralForCausalLM",
            "qwen2" => "Qwen2ForCausalLM",
            "qwen3" => "Qwen3ForCausalLM",
            _ => "LlamaForCausalLM",
        };
        let mut json = json!({
            "architectures": [class],
            "model_type": self.model_type,
            "hidden_size": attention.d_model,
            "num_hidden_layers": self.windows.len(),
            "num_attention_heads": attention.nheads,
            "num_key_value_heads": attention.nheads_kv,
            "head_dim": attention.headdim,
            "intermediate_size": self.mlp.d_ff,
            "hidden_act": "silu",
            "rms_norm_eps": shortest(self.norm_eps),
            "max_position_embeddings": self.max_position,
            "attention_bias": attention.qkv_bias,
            "mlp_bias": self.mlp.bias,
        });
        if let Some(rope) = &attention.rope {
            rope.write_json(&mut json, attention.headdim)?;
        }
        if let Some(window) = self.windows.iter().flatten().next() {
            json["sliding_window"] = json!(window);
            json["use_sliding_window"] = json!(true);
            let kind = |window: &Option<usize>| match window {
                Some(_) => "sliding_attention",
                None => "full_attention",
            };
            json["layer_types"] = self.windows.iter().map(kind).collect();
        }
        Ok(json)
    }
}
