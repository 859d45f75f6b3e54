//! Falcon-H1 language models (Falcon LLM team, 2025, arXiv 2507.22448).
//!
//! Every layer has attention and a Mamba-2 mixer side by side, both of one norm, and a gated
//! feed-forward part after them. What other models leave to the size of weights these have as fixed
//! factors, the muP multipliers: of the embeddings, of what each part gets and gives, of the keys, of the
//! five sections of the mixer's projection, of the gate and of the logits. The mixer's norm is optional.
//!
//! ```text
//!                        ┌ mamba ───────────── * ssm_out ───────┐
//! h ─┬─ input_layernorm ─┴ * attention_in ─ self_attn ─ * out ─ + ─┬─ pre_ff_layernorm ─ feed_forward ─ + ─ ...
//!    └──────────────────────────────────────────────────────────┘  └──────────────────────────────────┘
//! ```
//!
//! Loads transformers' `FalconH1ForCausalLM`, and GGUF. That has no place for multipliers: they are in
//! its weights, so a model of a GGUF file, and a folder made of one, has none (all are 1).

use serde_json::{Value, json};

use super::gguf::{Keys, KeysMut, attention_table, mixer_table, mlp_table};
use super::{
    Decoder, Family, Frame, MAX_SIZE, Names, SILU, expect_activation, limit_json, read_limit,
    shortest,
};
use crate::backend::{Backend, Tensor};
use crate::checkpoint::gguf::Metadata;
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::{Error, Result};
use crate::nn::{
    Attention, AttentionConfig, Batch, How, LayerSpec, Mamba2Mixer, MixerConfig, Mlp, MlpConfig,
    Params, RmsNorm, RopeConfig, Row, Tensors,
};
use crate::ops::{self, ActivationOps};

/// What `config.json` calls this family.
pub(super) const MODEL_TYPES: &[&str] = &["falcon_h1"];
/// What GGUF calls it.
pub(super) const ARCHS: &[&str] = &["falcon-h1"];

const NAMES: Names =
    Names { embeddings: "model.embed_tokens", norm: "model.final_layernorm", head: "lm_head" };

/// Sizes of a model, and its multipliers.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Layers.
    pub n_layer: usize,
    /// Ids that the tokenizer may give; the embedding may have more rows.
    pub vocab_size: usize,
    /// Whether the head is the embedding; `None` when the file does not say.
    pub tie_embeddings: Option<bool>,
    /// Added to the mean of squares of norms.
    pub norm_eps: f32,
    /// Longest context that the model was made for.
    pub max_position: usize,
    /// Factor of the embeddings.
    pub embedding_multiplier: f32,
    /// Factor of the logits.
    pub lm_head_multiplier: f32,
    /// Factor of what attention gets.
    pub attention_in_multiplier: f32,
    /// Factor of what attention gives.
    pub attention_out_multiplier: f32,
    /// Factor of what the mixer gives.
    pub ssm_out_multiplier: f32,
    /// Factor of what the feed-forward part gives, the second of `mlp_multipliers`.
    pub down_multiplier: f32,
    /// Every layer's attention, with `key_multiplier`.
    pub attention: AttentionConfig,
    /// Every layer's mixer, with `ssm_in_multiplier` and `ssm_multipliers`.
    pub mixer: MixerConfig,
    /// Every layer's feed-forward part, with the first of `mlp_multipliers`.
    pub mlp: MlpConfig,
}

impl Config {
    pub(super) fn read(file: &ConfigFile) -> Result<Self> {
        expect_activation(file, "hidden_act", SILU)?;
        let size = |key: &str, default| -> Result<usize> {
            Ok(file.usize(&[key], 1..=MAX_SIZE)?.unwrap_or(default))
        };
        let required = |key: &str| file.required(&[key], 1..=MAX_SIZE);
        let is = |key: &str, default| -> Result<bool> { Ok(file.bool(&[key])?.unwrap_or(default)) };
        let factor = |key: &str| -> Result<f32> {
            Ok(file.float(&[key], f32::MIN..=f32::MAX)?.unwrap_or(1.0))
        };
        let (d_model, nheads) = (required("hidden_size")?, required("num_attention_heads")?);
        let nheads_kv = size("num_key_value_heads", nheads)?;
        let headdim = size("head_dim", d_model / nheads)?;
        let eps = file.float(&["rms_norm_eps"], f32::MIN_POSITIVE..=1.0)?.unwrap_or(1e-5);
        let bias = is("attention_bias", false)?;
        let [gate_scale, down_multiplier] = factors(file, "mlp_multipliers")?;
        Ok(Self {
            n_layer: file.required(&["num_hidden_layers"], 1..=10_000)?,
            vocab_size: required("vocab_size")?,
            tie_embeddings: file.bool(&["tie_word_embeddings"])?,
            norm_eps: eps,
            max_position: file.usize(&["max_position_embeddings"], 1..=1 << 40)?.unwrap_or(8192),
            embedding_multiplier: factor("embedding_multiplier")?,
            lm_head_multiplier: factor("lm_head_multiplier")?,
            attention_in_multiplier: factor("attention_in_multiplier")?,
            attention_out_multiplier: factor("attention_out_multiplier")?,
            ssm_out_multiplier: factor("ssm_out_multiplier")?,
            down_multiplier,
            attention: AttentionConfig {
                qkv_bias: bias,
                out_bias: bias,
                rope: Some(RopeConfig::read(file, headdim, 1.0)?),
                key_scale: factor("key_multiplier")?,
                ..AttentionConfig::new(d_model, nheads, nheads_kv, headdim)
            },
            mixer: MixerConfig {
                in_scale: factor("ssm_in_multiplier")?,
                norm_eps: eps,
                ..read_mixer(file, d_model)?
            },
            mlp: MlpConfig {
                bias: is("mlp_bias", false)?,
                gate_scale,
                ..MlpConfig::swiglu(d_model, required("intermediate_size")?)
            },
        })
    }

    pub(super) fn read_gguf(keys: &Keys<'_>, checkpoint: &Checkpoint) -> Result<Self> {
        let (d_model, nheads) =
            (keys.size("embedding_length")?, keys.size("attention.head_count")?);
        let nheads_kv = keys.optional("attention.head_count_kv")?.unwrap_or(nheads);
        let headdim = keys.optional("attention.key_length")?.unwrap_or(d_model / nheads);
        if let Some(width) = keys.optional("attention.value_length")?.filter(|&w| w != headdim) {
            let reason = format!("expected {headdim}, as keys have, found {width}");
            return Err(keys.error("attention.value_length", reason));
        }
        let has = |name: &str| checkpoint.get(name).is_some();
        Ok(Self {
            n_layer: keys.n_layer()?,
            vocab_size: keys.vocab_size()?,
            tie_embeddings: None,
            norm_eps: keys.norm_eps()?,
            max_position: keys
                .metadata
                .usize(&keys.key("context_length"), 1..=1 << 40)?
                .unwrap_or(8192),
            embedding_multiplier: 1.0,
            lm_head_multiplier: 1.0,
            attention_in_multiplier: 1.0,
            attention_out_multiplier: 1.0,
            ssm_out_multiplier: 1.0,
            down_multiplier: 1.0,
            attention: AttentionConfig {
                qkv_bias: has("blk.0.attn_q.bias"),
                out_bias: has("blk.0.attn_output.bias"),
                rope: Some(RopeConfig::read_gguf(keys.metadata, keys.arch, headdim)?),
                ..AttentionConfig::new(d_model, nheads, nheads_kv, headdim)
            },
            mixer: MixerConfig { rms_norm: has("blk.0.ssm_norm.weight"), ..keys.mixer()? },
            mlp: MlpConfig {
                bias: has("blk.0.ffn_up.bias"),
                ..MlpConfig::swiglu(d_model, keys.size("feed_forward_length")?)
            },
        })
    }

    /// A row of GGUF's table with the multipliers in it.
    ///
    /// Where a part's input is scaled, its bias is not; where its output is, both are.
    fn folded(&self, row: Row) -> Row {
        let (key, attention_in) = (self.attention.key_scale, self.attention_in_multiplier);
        let factor = match row.file.trim_start_matches("blk.#.") {
            "attn_q.weight" | "attn_v.weight" => attention_in,
            "attn_k.weight" => key * attention_in,
            "attn_k.bias" => key,
            "attn_output.weight" | "attn_output.bias" => self.attention_out_multiplier,
            "ssm_in.weight" => {
                let mixer = &self.mixer;
                let factors = mixer.section_scales.map(|factor| mixer.in_scale * factor);
                return row.how(How::Scaled(mixer.sections().into_iter().zip(factors).collect()));
            }
            "ssm_out.weight" => self.ssm_out_multiplier,
            "ffn_gate.weight" | "ffn_gate.bias" => self.mlp.gate_scale,
            "ffn_down.weight" | "ffn_down.bias" => self.down_multiplier,
            _ => return row,
        };
        row.how(How::Times(factor))
    }
}

/// The mixer but for what other parts share with it.
fn read_mixer(file: &ConfigFile, d_model: usize) -> Result<MixerConfig> {
    let size = |key: &str, default| -> Result<usize> {
        Ok(file.usize(&[key], 1..=MAX_SIZE)?.unwrap_or(default))
    };
    let is = |key: &str, default| -> Result<bool> { Ok(file.bool(&[key])?.unwrap_or(default)) };
    let nheads = file.required(&["mamba_n_heads"], 1..=MAX_SIZE)?;
    let d_ssm = size("mamba_d_ssm", d_model.saturating_mul(size("mamba_expand", 2)?))?;
    let headdim = file.get(&["mamba_d_head"], "a width or \"auto\"", |value| match value {
        Value::String(text) => (text == "auto").then_some(None),
        width => Some(Some(usize::try_from(width.as_u64()?).ok()?)),
    })?;
    let headdim = headdim.flatten().unwrap_or(d_ssm / nheads);
    if nheads.saturating_mul(headdim) != d_ssm {
        let reason = format!("{nheads} heads of {headdim} are not mamba_d_ssm = {d_ssm} channels");
        return Err(file.error("mamba_n_heads", reason));
    }
    let rms_norm = is("mamba_rms_norm", false)?;
    Ok(MixerConfig {
        ngroups: size("mamba_n_groups", 1)?,
        d_state: size("mamba_d_state", 256)?,
        d_conv: size("mamba_d_conv", 4)?,
        in_bias: is("mamba_proj_bias", false)?,
        out_bias: is("projectors_bias", false)?,
        conv_bias: is("mamba_conv_bias", true)?,
        dt_limit: read_limit(file, "time_step_limit")?,
        rms_norm,
        // Without a norm there is no order, whatever the file says.
        norm_before_gate: is("mamba_norm_before_gate", true)? && rms_norm,
        section_scales: factors(file, "ssm_multipliers")?,
        ..MixerConfig::new(d_model, nheads, headdim)
    })
}

/// A list of N factors; ones when it is missing.
fn factors<const N: usize>(file: &ConfigFile, key: &str) -> Result<[f32; N]> {
    let Some(list) = file.floats(key)? else { return Ok([1.0; N]) };
    match <[f32; N]>::try_from(list.as_slice()) {
        Ok(factors) if factors.iter().all(|factor| factor.is_finite()) => Ok(factors),
        Ok(factors) => Err(file.error(key, format!("expected finite numbers, found {factors:?}"))),
        Err(_) => Err(file.error(key, format!("expected {N} numbers, found {}", list.len()))),
    }
}

struct Layer<B: Backend> {
    input_layernorm: RmsNorm<B>,
    mamba: Mamba2Mixer<B>,
    self_attn: Attention<B>,
    pre_ff_layernorm: RmsNorm<B>,
    feed_forward: Mlp<B>,
}

/// The layers of a model.
pub(super) struct FalconH1<B: Backend> {
    config: Config,
    /// `[d_model]`, all `attention_in_multiplier`; `None` where that is 1.
    attention_in: Option<Tensor<B>>,
    layers: Vec<Layer<B>>,
}

impl<B: Backend> FalconH1<B> {
    pub(super) fn load(config: &Config, params: &Params<'_, B>) -> Result<Self> {
        let layers = params.under("model").under("layers");
        let layers = (0..config.n_layer).map(|layer| {
            let params = layers.under(&layer.to_string());
            let norm = |name| RmsNorm::load(&params.under(name), config.norm_eps);
            Ok(Layer {
                input_layernorm: norm("input_layernorm")?,
                mamba: Mamba2Mixer::load(&config.mixer, &params.under("mamba"))?,
                self_attn: Attention::load(&config.attention, &params.under("self_attn"))?,
                pre_ff_layernorm: norm("pre_ff_layernorm")?,
                feed_forward: Mlp::load(&config.mlp, &params.under("feed_forward"))?,
            })
        });
        let width = config.mixer.d_model;
        let attention_in = (config.attention_in_multiplier != 1.0).then(|| {
            ops::tensor(params.client(), &vec![config.attention_in_multiplier; width], &[width])
        });
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            attention_in: attention_in.transpose()?,
            config: config.clone(),
        })
    }
}

impl<B: Backend> Decoder<B> for FalconH1<B> {
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
        let config = &self.config;
        let layer = &self.layers[i];
        let u = layer.input_layernorm.forward(client, &h)?;
        let onto = (h, config.ssm_out_multiplier);
        h = layer.mamba.forward_onto(client, &u, onto, batch)?;
        let u = match &self.attention_in {
            None => u,
            Some(factors) => client.scale_columns(&u, factors)?,
        };
        let onto = (h, config.attention_out_multiplier);
        h = layer.self_attn.forward_onto(client, &u, onto, batch)?;
        let u = layer.pre_ff_layernorm.forward(client, &h)?;
        h = layer.feed_forward.forward_onto(client, &u, h, config.down_multiplier)?;
        Ok(h)
    }

    fn weight_bytes(&self) -> usize {
        let parts = |layer: &Layer<B>| {
            layer.mamba.weight_bytes()
                + layer.self_attn.weight_bytes()
                + layer.feed_forward.weight_bytes()
        };
        self.layers.iter().map(parts).sum()
    }
}

// Layouts of files

impl Family for Config {
    fn name(&self) -> &'static str {
        "falcon_h1"
    }

    fn arch(&self) -> Option<&'static str> {
        Some("falcon-h1")
    }

    fn gguf_folds(&self) -> bool {
        true
    }

    fn frame(&self) -> Frame {
        Frame {
            names: NAMES,
            d_model: self.mixer.d_model,
            vocab_size: self.vocab_size,
            pad_vocab_size_multiple: 1,
            tie_embeddings: self.tie_embeddings,
            norm_eps: self.norm_eps,
            embedding_scale: self.embedding_multiplier,
            logits_scale: self.lm_head_multiplier,
        }
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let layer = LayerSpec::of(self.mixer.clone());
        let layer = layer.and(self.attention.clone()).and(self.mlp.clone());
        vec![layer; self.n_layer]
    }

    fn parameters(&self, rows: usize, with_head: bool) -> Tensors {
        let mut tensors = Tensors::default();
        let width = self.mixer.d_model;
        NAMES.expect(&mut tensors, rows, width, with_head);
        for layer in 0..self.n_layer {
            let name = format!("model.layers.{layer}");
            for norm in ["input_layernorm", "pre_ff_layernorm"] {
                tensors.add(format!("{name}.{norm}.weight"), &[width]);
            }
            self.mixer.expect(&mut tensors, &format!("{name}.mamba"));
            self.attention.expect(&mut tensors, &format!("{name}.self_attn"));
            self.mlp.expect(&mut tensors, &format!("{name}.feed_forward"));
        }
        tensors
    }

    fn gguf_table(&self) -> Result<Vec<Row>> {
        let mut table = mixer_table(&self.mixer, "model.layers.#.mamba");
        table.extend(attention_table(&self.attention, "model.layers.#.self_attn", false));
        table.extend(mlp_table("model.layers.#.feed_forward", ""));
        table.extend([
            Row::new("blk.#.attn_norm.weight", "model.layers.#.input_layernorm.weight"),
            // The one norm of GGUF without the ending.
            Row::new("blk.#.ffn_norm", "model.layers.#.pre_ff_layernorm.weight"),
        ]);
        Ok(table.into_iter().map(|row| self.folded(row)).collect())
    }

    fn gguf_table_scales(&self) -> [f32; 2] {
        [self.embedding_multiplier, self.lm_head_multiplier]
    }

    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        // Some files keep what follows from the configuration.
        let follows = [".rotary_emb.inv_freq", ".mamba.mup_vector"];
        checkpoint.retain(|name| !follows.iter().any(|end| name.ends_with(end)));
        Ok(())
    }

    fn write_gguf(&self, metadata: &mut Metadata) -> Result<()> {
        let attention = &self.attention;
        if attention.out_bias {
            let what = "a bias of o_proj in GGUF, whose falcon-h1 is run without it".into();
            return Err(Error::Unsupported { what });
        }
        if attention.rope.as_ref().is_some_and(|rope| rope.factors().is_some()) {
            let what =
                "factors of single frequencies in GGUF, whose falcon-h1 is run without them".into();
            return Err(Error::Unsupported { what });
        }
        let mut keys = KeysMut::new(metadata, "falcon-h1");
        for (name, size) in [
            ("context_length", self.max_position),
            ("embedding_length", attention.d_model),
            ("feed_forward_length", self.mlp.d_ff),
            ("attention.head_count_kv", attention.nheads_kv),
            ("block_count", self.n_layer),
        ] {
            keys.size(name, size);
        }
        keys.set("attention.layer_norm_rms_epsilon", self.norm_eps);
        keys.attention(attention)?;
        keys.mixer(&self.mixer)
    }

    fn to_json(&self) -> Result<Value> {
        let (attention, mixer) = (&self.attention, &self.mixer);
        if attention.qkv_bias != attention.out_bias {
            let what =
                "biases of some of attention's projections in transformers, which has all or none";
            return Err(Error::Unsupported { what: what.into() });
        }
        let mut json = json!({
            "architectures": ["FalconH1ForCausalLM"],
            "model_type": "falcon_h1",
            "hidden_size": mixer.d_model,
            "num_hidden_layers": self.n_layer,
            "num_attention_heads": attention.nheads,
            "num_key_value_heads": attention.nheads_kv,
            "head_dim": attention.headdim,
            "intermediate_size": self.mlp.d_ff,
            "hidden_act": "silu",
            "rms_norm_eps": shortest(self.norm_eps),
            "max_position_embeddings": self.max_position,
            "attention_bias": attention.qkv_bias,
            "mlp_bias": self.mlp.bias,
            "projectors_bias": mixer.out_bias,
            "mamba_proj_bias": mixer.in_bias,
            "mamba_conv_bias": mixer.conv_bias,
            "mamba_d_ssm": mixer.d_inner(),
            "mamba_n_heads": mixer.nheads,
            "mamba_d_head": mixer.headdim,
            "mamba_n_groups": mixer.ngroups,
            "mamba_d_state": mixer.d_state,
            "mamba_d_conv": mixer.d_conv,
            "mamba_rms_norm": mixer.rms_norm,
            "mamba_norm_before_gate": mixer.norm_before_gate,
            "time_step_limit": limit_json(mixer.dt_limit),
            "embedding_multiplier": shortest(self.embedding_multiplier),
            "lm_head_multiplier": shortest(self.lm_head_multiplier),
            "key_multiplier": shortest(attention.key_scale),
            "attention_in_multiplier": shortest(self.attention_in_multiplier),
            "attention_out_multiplier": shortest(self.attention_out_multiplier),
            "ssm_in_multiplier": shortest(mixer.in_scale),
            "ssm_multipliers": mixer.section_scales.map(shortest),
            "ssm_out_multiplier": shortest(self.ssm_out_multiplier),
            "mlp_multipliers": [shortest(self.mlp.gate_scale), shortest(self.down_multiplier)],
        });
        if let Some(rope) = &attention.rope {
            rope.write_json(&mut json, attention.headdim)?;
        }
        Ok(json)
    }
}
