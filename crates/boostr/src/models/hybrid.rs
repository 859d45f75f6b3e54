//! Layers that are each a Mamba-2 mixer or attention: the common form of Bamba and Granite 4.
//!
//! The two spell it alike in `config.json` (`mamba_*` and a list of layers) and keep it under the same
//! names (`mamba`, `self_attn`). They are one architecture of GGUF, whose `attention.head_count_kv` is
//! 0 for a mixer.

use super::fields::{Fields, Need::Missing, Need::Or, Need::Required};
use super::gguf::{Keys, KeysMut, attention_table, mixer_table};
use super::groups::{check_heads, layer_kinds, listed_layers, mamba_d_head, refuse};
use super::{Frame, MAX_SIZE, Names, SILU};
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::Result;
use crate::nn::{AttentionConfig, LayerSpec, MixerConfig, Row};

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
    /// The sizes of nothing, to be read into.
    pub(super) fn blank() -> Self {
        Self {
            vocab_size: 0,
            tie_embeddings: None,
            norm_eps: 0.0,
            max_position: 0,
            mixer: MixerConfig::new(0, 0, 0),
            attention: AttentionConfig::new(0, 0, 0, 0),
            is_attention: Vec::new(),
        }
    }

    /// Visits what the families spell alike, without the list of layers and, in JSON, positions. `norm_eps` is for
    /// files that do not say.
    pub(super) fn fields(&mut self, f: &mut Fields<'_>, norm_eps: f32) -> Result<()> {
        if let Some((keys, checkpoint)) = f.gguf() {
            *self = Self::read_gguf(keys, checkpoint)?;
            return Ok(());
        }
        if let Some(keys) = f.gguf_mut() {
            return self.write_gguf(keys);
        }
        let (a, m) = (&mut self.attention, &mut self.mixer);
        let what = "biases of some projections of attention in transformers, which has all or none";
        refuse(&[(f.writes_json() && a.qkv_bias != a.out_bias, what)])?;
        f.size(["hidden_size", ""], &mut a.d_model, Required)?;
        (a.d_in, m.d_model) = (a.d_model, a.d_model);
        let mut n_layer = self.is_attention.len();
        f.n_layer("num_hidden_layers", &mut n_layer)?;
        f.size(["num_attention_heads", ""], &mut a.nheads, Required)?;
        let of_class = f.class_heads_kv(a.nheads)?;
        f.size(["num_key_value_heads", ""], &mut a.nheads_kv, Or(of_class))?;
        f.flag(["attention_bias", ""], &mut a.qkv_bias, Missing(false))?;
        a.out_bias = a.qkv_bias;
        f.activation("hidden_act", SILU)?;
        f.norm_eps("rms_norm_eps", &mut self.norm_eps, norm_eps)?;
        f.context(&mut self.max_position, 2048)?;
        visit_mixer(f, m, self.norm_eps)?;
        if let Some(file) = f.json() {
            // Without layers of attention there may be more heads than channels; with them the check refuses 0.
            let headdim = file.usize(&["head_dim"], 0..=MAX_SIZE)?;
            a.headdim = headdim.unwrap_or(a.d_model / a.nheads);
            a.scale = (a.headdim as f32).sqrt().recip();
            self.is_attention = read_layers(file, n_layer)?;
        }
        if a.headdim * a.nheads != m.d_model {
            f.constant("head_dim", a.headdim);
        }
        f.vocabulary(&mut self.vocab_size, &mut self.tie_embeddings)
    }

    fn read_gguf(keys: &Keys<'_>, checkpoint: &Checkpoint) -> Result<Self> {
        let n_layer = keys.n_layer()?;
        let (d_model, nheads) =
            (keys.size("embedding_length")?, keys.size("attention.head_count")?);
        let (nheads_kv, is_attention) = keys.heads_kv(n_layer, nheads)?;
        let mixer = match is_attention.iter().position(|is_attention| !is_attention) {
            Some(layer) if keys.arch != ARCH => {
                let reason = format!("layer {layer} has 0 heads, as only layers of {ARCH} have");
                return Err(keys.error("attention.head_count_kv", reason));
            }
            // One must be there although no layer is one.
            None if keys.arch != ARCH => MixerConfig::new(d_model, 1, 2 * d_model),
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

    fn write_gguf(&self, keys: &mut KeysMut<'_>) -> Result<()> {
        let attention = &self.attention;
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
        if keys.arch() == ARCH {
            keys.mixer(&self.mixer)?;
        }
        Ok(())
    }

    /// Whether any layer is a mixer.
    #[must_use]
    pub fn has_mixers(&self) -> bool {
        self.is_attention.contains(&false)
    }

    /// What stands around the layers, without factors.
    pub(super) fn frame(&self, names: Names) -> Frame {
        Frame::new(names, self.attention.d_model, self.vocab_size, self.norm_eps)
            .tied(self.tie_embeddings)
    }

    /// The layers without their feed-forward parts; `scale` is the factor of what a mixer or attention gives.
    pub(super) fn layers(&self, scale: f32) -> impl Iterator<Item = LayerSpec> {
        self.is_attention.iter().map(move |&is_attention| {
            let layer = LayerSpec::new(self.attention.d_model, self.norm_eps);
            let layer = layer.norm("input_layernorm");
            let layer = if is_attention {
                layer.and("self_attn", self.attention.clone())
            } else {
                layer.and("mamba", self.mixer.clone())
            };
            layer.scaled(1.0, scale)
        })
    }

    /// The rows of these parameters.
    pub(super) fn gguf_table(&self) -> Vec<Row> {
        let mut table = attention_table(&self.attention, "model.layers.#.self_attn", true);
        table.extend(mixer_table(&self.mixer, "model.layers.#.mamba"));
        table.push(Row::new("blk.#.attn_norm.weight", "model.layers.#.input_layernorm.weight"));
        table
    }
}

/// The mixer in a `config.json`.
fn visit_mixer(f: &mut Fields<'_>, m: &mut MixerConfig, norm_eps: f32) -> Result<()> {
    f.size(["mamba_n_heads", ""], &mut m.nheads, Missing(128))?;
    f.constant("mamba_d_head", m.headdim);
    let d_inner = f.channels("mamba_expand", m)?;
    if let Some(file) = f.json() {
        m.headdim = mamba_d_head(file, "\"auto\" or a whole number", d_inner / m.nheads)?;
        check_heads((file, "mamba_n_heads"), m, ("mamba_expand * hidden_size", d_inner))?;
        m.norm_eps = norm_eps;
    }
    f.size(["mamba_n_groups", ""], &mut m.ngroups, Missing(1))?;
    f.size(["mamba_d_state", ""], &mut m.d_state, Missing(256))?;
    f.size(["mamba_d_conv", ""], &mut m.d_conv, Missing(4))?;
    f.flag(["mamba_conv_bias", ""], &mut m.conv_bias, Or(true))?;
    f.flag(["mamba_proj_bias", ""], &mut m.in_bias, Or(false))?;
    m.out_bias = if f.reads() { m.in_bias } else { m.out_bias };
    f.limits("time_step_limit", &mut m.dt_limit)
}

/// Which layers are attention, by every key that says so; none when no key does.
fn read_layers(file: &ConfigFile, n_layer: usize) -> Result<Vec<bool>> {
    let mut lists: Vec<(&str, Vec<bool>)> = Vec::new();
    for key in ["layer_types", "layers_block_type"] {
        let expected = "mamba or attention (linear_attention or full_attention)";
        let is_attention = |word: &str| match word {
            "attention" | "full_attention" => Some(true),
            "mamba" | "linear_attention" => Some(false),
            _ => None,
        };
        let layers = layer_kinds((file, key), Some(n_layer), is_attention, expected)?;
        lists.extend(layers.map(|layers| (key, layers)));
    }
    let key = "attn_layer_indices";
    // An empty list says nothing.
    let listed = listed_layers((file, key), n_layer)?.filter(|layers| layers.contains(&true));
    lists.extend(listed.map(|layers| (key, layers)));
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
