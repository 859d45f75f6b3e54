//! Layers of which each is a Mamba-2 mixer or attention: what Bamba and Granite 4 have in the same form.
//!
//! The two spell it alike in `config.json` (`mamba_*` and a list of layers), keep it under the same names
//! (`mamba`, `self_attn`), and are one architecture of GGUF, whose `attention.head_count_kv` is 0 for
//! a mixer.

use serde_json::{Value, json};

use super::gguf::{Keys, KeysMut, attention_table, mixer_table};
use super::{
    Frame, MAX_SIZE, Names, SILU, expand_of, expect_activation, limit_json, read_limit, shortest,
};
use crate::backend::{Backend, Tensor};
use crate::checkpoint::gguf::Metadata;
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::{Error, Result};
use crate::nn::{
    Attention, AttentionConfig, Batch, LayerSpec, Mamba2Mixer, MixerConfig, Params, Part, Row,
    Tensors,
};

/// What GGUF calls models that have mixers.
pub(super) const ARCH: &str = "granitehybrid";

/// Sizes of a model, but for the feed-forward parts.
#[derive(Debug, Clone, PartialEq)]
pub struct Hybrid {
    /// Ids that the tokenizer may give; the embedding may have more rows.
    pub vocab_size: usize,
    /// Whether the head is the embedding; `None` when the file does not say.
    pub tie_embeddings: Option<bool>,
    /// Added to the mean of squares of norms.
    pub norm_eps: f32,
    /// Longest context that the model was made for.
    pub max_position: usize,
    /// Every mixer.
    pub mixer: MixerConfig,
    /// Every attention.
    pub attention: AttentionConfig,
    /// Which layers are attention; the others are mixers.
    pub is_attention: Vec<bool>,
}

impl Hybrid {
    /// Reads what the families spell alike: attention is left without positions, scaled by `1 / sqrt(D)`.
    /// `norm_eps` is for files that do not say.
    pub(super) fn read(file: &ConfigFile, norm_eps: f32) -> Result<Self> {
        expect_activation(file, "hidden_act", SILU)?;
        let d_model = file.required(&["hidden_size"], 1..=MAX_SIZE)?;
        let n_layer = file.required(&["num_hidden_layers"], 1..=10_000)?;
        let norm_eps = file.float(&["rms_norm_eps"], f32::MIN_POSITIVE..=1.0)?.unwrap_or(norm_eps);
        Ok(Self {
            vocab_size: file.required(&["vocab_size"], 1..=MAX_SIZE)?,
            tie_embeddings: file.bool(&["tie_word_embeddings"])?,
            norm_eps,
            max_position: file.usize(&["max_position_embeddings"], 1..=1 << 40)?.unwrap_or(2048),
            mixer: read_mixer(file, d_model, norm_eps)?,
            attention: read_attention(file, d_model)?,
            is_attention: read_layers(file, n_layer)?,
        })
    }

    pub(super) fn read_gguf(keys: &Keys<'_>, checkpoint: &Checkpoint) -> Result<Self> {
        let n_layer = keys.n_layer()?;
        let (d_model, nheads) =
            (keys.size("embedding_length")?, keys.size("attention.head_count")?);
        let of_layers = keys.per_layer("attention.head_count_kv", n_layer)?;
        let nheads_kv = of_layers.iter().copied().max().filter(|&most| most > 0).unwrap_or(nheads);
        if let Some(other) = of_layers.iter().find(|&&n| n != 0 && n != nheads_kv) {
            let reason = format!("some layers have {other} heads, others {nheads_kv}");
            return Err(keys.error("attention.head_count_kv", reason));
        }
        let is_attention: Vec<bool> = of_layers.iter().map(|&n| n > 0).collect();
        let mixer = match is_attention.iter().position(|is_attention| !is_attention) {
            Some(layer) if keys.arch != ARCH => {
                let reason = format!("layer {layer} has 0 heads, as only layers of {ARCH} have");
                return Err(keys.error("attention.head_count_kv", reason));
            }
            None if keys.arch != ARCH => no_mixer(d_model),
            _ => keys.mixer()?,
        };
        let headdim = keys.optional("attention.key_length")?.unwrap_or(d_model / nheads);
        let rotates = keys.bool("rope.scaling.finetuned")?.unwrap_or(true);
        let scale = keys.float("attention.scale")?.filter(|&scale| scale != 0.0);
        let plain = AttentionConfig::new(d_model, nheads, nheads_kv, headdim);
        let first = is_attention.iter().position(|&is_attention| is_attention).unwrap_or(0);
        let has = |name: &str| checkpoint.get(&format!("blk.{first}.{name}")).is_some();
        Ok(Self {
            vocab_size: keys.vocab_size()?,
            tie_embeddings: None,
            norm_eps: keys.norm_eps()?,
            max_position: keys.optional("context_length")?.filter(|&n| n > 0).unwrap_or(2048),
            attention: AttentionConfig {
                qkv_bias: has("attn_q.bias"),
                out_bias: has("attn_output.bias"),
                rope: rotates.then(|| keys.rope(checkpoint, headdim)).transpose()?,
                scale: scale.unwrap_or(plain.scale),
                ..plain
            },
            mixer,
            is_attention,
        })
    }

    /// Whether any layer is a mixer.
    #[must_use]
    pub fn has_mixers(&self) -> bool {
        self.is_attention.contains(&false)
    }

    /// What stands around the layers, without factors.
    pub(super) fn frame(&self, names: Names) -> Frame {
        Frame {
            names,
            d_model: self.attention.d_model,
            vocab_size: self.vocab_size,
            pad_vocab_size_multiple: 1,
            tie_embeddings: self.tie_embeddings,
            norm_eps: self.norm_eps,
            embedding_scale: 1.0,
            logits_scale: 1.0,
        }
    }

    /// The layers, each with the feed-forward part `ffn`.
    pub(super) fn layers<P: Part + Clone>(&self, ffn: &P) -> Vec<LayerSpec> {
        let layer = |&is_attention: &bool| {
            let mixer = match is_attention {
                true => LayerSpec::of(self.attention.clone()),
                false => LayerSpec::of(self.mixer.clone()),
            };
            mixer.and(ffn.clone())
        };
        self.is_attention.iter().map(layer).collect()
    }

    /// Adds `input_layernorm` and `mamba` or `self_attn` of a layer to `tensors`, under `name`.
    pub(super) fn expect(&self, tensors: &mut Tensors, name: &str, is_attention: bool) {
        tensors.add(format!("{name}.input_layernorm.weight"), &[self.attention.d_model]);
        if is_attention {
            self.attention.expect(tensors, &format!("{name}.self_attn"));
        } else {
            self.mixer.expect(tensors, &format!("{name}.mamba"));
        }
    }

    /// The rows of these parameters.
    pub(super) fn gguf_table(&self) -> Vec<Row> {
        let mut table = attention_table(&self.attention, "model.layers.#.self_attn", true);
        table.extend(mixer_table(&self.mixer, "model.layers.#.mamba"));
        table.push(Row::new("blk.#.attn_norm.weight", "model.layers.#.input_layernorm.weight"));
        table
    }

    /// Writes all but the feed-forward parts under the prefix `arch`.
    pub(super) fn write_gguf<'a>(
        &self,
        metadata: &'a mut Metadata,
        arch: &'static str,
    ) -> Result<KeysMut<'a>> {
        let attention = &self.attention;
        let mut keys = KeysMut::new(metadata, arch);
        for (name, size) in [
            ("context_length", self.max_position),
            ("embedding_length", attention.d_model),
            ("block_count", self.is_attention.len()),
        ] {
            keys.size(name, size);
        }
        let heads = |&is_attention: &bool| if is_attention { attention.nheads_kv } else { 0 };
        let heads: Vec<usize> = self.is_attention.iter().map(heads).collect();
        keys.per_layer("attention.head_count_kv", &heads);
        keys.set("attention.layer_norm_rms_epsilon", self.norm_eps);
        keys.set("rope.scaling.finetuned", attention.rope.is_some());
        keys.attention(attention)?;
        if arch == ARCH {
            keys.mixer(&self.mixer)?;
        }
        Ok(keys)
    }

    /// The fields that both families have, without the list of layers and positions.
    pub(super) fn to_json(&self) -> Result<Value> {
        let Self { mixer, attention, .. } = self;
        let expand = expand_of(mixer)?;
        if attention.qkv_bias != attention.out_bias {
            let what =
                "biases of some projections of attention in transformers, which has all or none";
            return Err(Error::Unsupported { what: what.into() });
        }
        let mut json = json!({
            "hidden_size": mixer.d_model,
            "num_hidden_layers": self.is_attention.len(),
            "num_attention_heads": attention.nheads,
            "num_key_value_heads": attention.nheads_kv,
            "attention_bias": attention.qkv_bias,
            "hidden_act": "silu",
            "rms_norm_eps": shortest(self.norm_eps),
            "max_position_embeddings": self.max_position,
            "mamba_n_heads": mixer.nheads,
            "mamba_d_head": mixer.headdim,
            "mamba_expand": expand,
            "mamba_n_groups": mixer.ngroups,
            "mamba_d_state": mixer.d_state,
            "mamba_d_conv": mixer.d_conv,
            "mamba_conv_bias": mixer.conv_bias,
            "mamba_proj_bias": mixer.in_bias,
            "time_step_limit": limit_json(mixer.dt_limit),
        });
        if attention.headdim * attention.nheads != mixer.d_model {
            json["head_dim"] = json!(attention.headdim);
        }
        Ok(json)
    }
}

/// A mixer for configurations that must have one although no layer is one.
fn no_mixer(d_model: usize) -> MixerConfig {
    MixerConfig::new(d_model, 1, 2 * d_model)
}

fn read_mixer(file: &ConfigFile, d_model: usize, norm_eps: f32) -> Result<MixerConfig> {
    let size = |key: &str, default| -> Result<usize> {
        Ok(file.usize(&[key], 1..=MAX_SIZE)?.unwrap_or(default))
    };
    let d_inner = d_model.saturating_mul(size("mamba_expand", 2)?);
    let nheads = size("mamba_n_heads", 128)?;
    let auto = d_inner / nheads;
    let headdim =
        file.get(&["mamba_d_head"], "\"auto\" or a whole number", |value| match value.as_str() {
            Some("auto") => Some(auto),
            _ => usize::try_from(value.as_u64()?).ok(),
        })?;
    let headdim = headdim.unwrap_or(auto);
    if nheads.saturating_mul(headdim) != d_inner {
        let reason = format!(
            "{nheads} heads of {headdim} are not mamba_expand * hidden_size = {d_inner} channels"
        );
        return Err(file.error("mamba_n_heads", reason));
    }
    let bias = file.bool(&["mamba_proj_bias"])?.unwrap_or(false);
    Ok(MixerConfig {
        ngroups: size("mamba_n_groups", 1)?,
        d_state: size("mamba_d_state", 256)?,
        d_conv: size("mamba_d_conv", 4)?,
        in_bias: bias,
        out_bias: bias,
        conv_bias: file.bool(&["mamba_conv_bias"])?.unwrap_or(true),
        dt_limit: read_limit(file, "time_step_limit")?,
        norm_eps,
        ..MixerConfig::new(d_model, nheads, headdim)
    })
}

fn read_attention(file: &ConfigFile, d_model: usize) -> Result<AttentionConfig> {
    let nheads = file.required(&["num_attention_heads"], 1..=MAX_SIZE)?;
    let nheads_kv = file.usize(&["num_key_value_heads"], 1..=MAX_SIZE)?.unwrap_or(nheads);
    let headdim = file.usize(&["head_dim"], 1..=MAX_SIZE)?.unwrap_or(d_model / nheads);
    let bias = file.bool(&["attention_bias"])?.unwrap_or(false);
    Ok(AttentionConfig {
        qkv_bias: bias,
        out_bias: bias,
        ..AttentionConfig::new(d_model, nheads, nheads_kv, headdim)
    })
}

/// Which layers are attention, by every key that says so; none when no key does.
fn read_layers(file: &ConfigFile, n_layer: usize) -> Result<Vec<bool>> {
    let mut lists: Vec<(&str, Vec<bool>)> = Vec::new();
    for key in ["layer_types", "layers_block_type"] {
        let Some(words) = file.texts(key)? else { continue };
        if words.len() != n_layer {
            let reason = format!("{} layers, but num_hidden_layers is {n_layer}", words.len());
            return Err(file.error(key, reason));
        }
        let is_attention = |word: &&str| match *word {
            "attention" | "full_attention" => Ok(true),
            "mamba" | "linear_attention" => Ok(false),
            other => {
                let reason = format!(
                    "expected mamba or attention (linear_attention or full_attention), found {other:?}"
                );
                Err(file.error(key, reason))
            }
        };
        lists.push((key, words.iter().map(is_attention).collect::<Result<_>>()?));
    }
    let key = "attn_layer_indices";
    if let Some(indices) = file.usizes(key, 0..=MAX_SIZE)?.filter(|list| !list.is_empty()) {
        if let Some(index) = indices.iter().find(|&&index| index >= n_layer) {
            let reason = format!("layer {index}, but num_hidden_layers is {n_layer}");
            return Err(file.error(key, reason));
        }
        lists.push((key, (0..n_layer).map(|layer| indices.contains(&layer)).collect()));
    }
    let key = "attn_layer_period";
    if let Some(period) = file.usize(&[key], 1..=MAX_SIZE)? {
        let offset = file.required(&["attn_layer_offset"], 0..=period - 1)?;
        lists.push((key, (0..n_layer).map(|layer| layer % period == offset).collect()));
    }
    let mut lists = lists.into_iter();
    let Some((first, layers)) = lists.next() else { return Ok(vec![false; n_layer]) };
    if let Some((key, _)) = lists.find(|(_, list)| *list != layers) {
        return Err(file.error(key, format!("other layers are attention than by {first}")));
    }
    Ok(layers)
}

/// The weights of what a layer mixes tokens with.
pub(super) enum TokenMixer<B: Backend> {
    Mamba(Box<Mamba2Mixer<B>>),
    Attention(Box<Attention<B>>),
}

impl<B: Backend> TokenMixer<B> {
    /// Loads it from the `params` of a layer.
    pub(super) fn load(
        config: &Hybrid,
        is_attention: bool,
        params: &Params<'_, B>,
    ) -> Result<Self> {
        if is_attention {
            let params = params.under("self_attn");
            let attention = Attention::load(&config.attention, &params)?;
            return Ok(Self::Attention(Box::new(attention)));
        }
        Ok(Self::Mamba(Box::new(Mamba2Mixer::load(&config.mixer, &params.under("mamba"))?)))
    }

    /// What it makes of `u` `[T, d_model]`, times a factor, added to a residual.
    pub(super) fn forward_onto(
        &self,
        client: &B::Client,
        u: &Tensor<B>,
        onto: (Tensor<B>, f32),
        batch: &mut Batch<B>,
    ) -> Result<Tensor<B>> {
        match self {
            Self::Mamba(mixer) => mixer.forward_onto(client, u, onto, batch),
            Self::Attention(attention) => attention.forward_onto(client, u, onto, batch),
        }
    }

    pub(super) fn weight_bytes(&self) -> usize {
        match self {
            Self::Mamba(mixer) => mixer.weight_bytes(),
            Self::Attention(attention) => attention.weight_bytes(),
        }
    }
}
