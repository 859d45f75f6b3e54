//! Groups of fields that families have in common, and what they read alike.

use serde_json::{Value, json};

use super::fields::{Fields, Need::Class, Need::Missing, Need::Or, Need::Required};
use super::{MAX_SIZE, SILU};
use crate::checkpoint::{Checkpoint, ConfigFile, gguf};
use crate::error::{Error, Result};
use crate::nn::{AttentionConfig, MixerConfig, MlpConfig, MoeConfig};

/// Most layers of a model.
pub(super) const MAX_LAYERS: usize = 10_000;
/// Why lists of sizes are refused.
pub(super) const PUZZLE: &str = "layers of one kind and different sizes (Puzzle) are not supported";

impl Fields<'_> {
    /// What transformers calls the model: the class and its family.
    pub fn model(&mut self, class: &str, model_type: &str) {
        self.constant("architectures", vec![class]);
        self.constant("model_type", model_type);
    }

    /// The sizes of layers that are attention and a feed-forward part, and what is around them, under the names that
    /// most families have. `norm_eps` and `max_position` stay what they are where a file does not say.
    ///
    /// # Errors
    ///
    /// As [`size`](Self::size).
    pub fn transformer(
        &mut self,
        (attention, mlp): (&mut AttentionConfig, &mut MlpConfig),
        n_layer: &mut usize,
        norm_eps: &mut f32,
        max_position: &mut usize,
    ) -> Result<()> {
        self.size(["hidden_size", "embedding_length"], &mut attention.d_model, Required)?;
        (attention.d_in, mlp.d_model) = (attention.d_model, attention.d_model);
        self.n_layer("num_hidden_layers", n_layer)?;
        self.heads(attention)?;
        self.size(["intermediate_size", "feed_forward_length"], &mut mlp.d_ff, Required)?;
        self.activation("hidden_act", SILU)?;
        let defaults = (*norm_eps, *max_position);
        self.norm_eps("rms_norm_eps", norm_eps, defaults.0)?;
        self.context(max_position, defaults.1)
    }

    /// Which projections of attention and of the feed-forward part have a bias. `config.json` has one word for all of
    /// attention, `attention` where it does not say.
    ///
    /// # Errors
    ///
    /// As [`size`](Self::size).
    pub fn biases(
        &mut self,
        attention: bool,
        (a, mlp): (&mut AttentionConfig, &mut MlpConfig),
    ) -> Result<()> {
        self.has("attention_bias", "blk.0.attn_q.bias", &mut a.qkv_bias, attention)?;
        if self.reads() {
            let has = |(_, file): (_, &Checkpoint)| file.get("blk.0.attn_output.bias").is_some();
            a.out_bias = self.gguf().map_or(a.qkv_bias, has);
        }
        self.has("mlp_bias", "blk.0.ffn_up.bias", &mut mlp.bias, false)
    }

    /// Each layer's window: one for all in GGUF, in `config.json` one with a list of the layers that have it. Where
    /// `config.json` does not say, it is as in `class`.
    ///
    /// # Errors
    ///
    /// As [`size`](Self::size), [`Error::Unsupported`] for windows of some layers, which GGUF has no way to say.
    pub fn windows(
        &mut self,
        windows: &mut Vec<Option<usize>>,
        n_layer: usize,
        class: &ClassWindow,
    ) -> Result<()> {
        if let Some(file) = self.json() {
            *windows = read_windows(file, n_layer, class)?;
        }
        if let Some((keys, _)) = self.gguf() {
            let window = keys.optional("attention.sliding_window")?.filter(|&window| window > 0);
            *windows = vec![window; n_layer];
        }
        let first = windows.first().copied().flatten();
        if let Some(keys) = self.gguf_mut() {
            let differ = windows.iter().any(|window| *window != first);
            refuse(&[(differ, "windows of some layers in GGUF, which has one for all")])?;
            if let Some(window) = first {
                keys.size("attention.sliding_window", window);
            }
        }
        if let Some(window) = windows.iter().flatten().next() {
            self.constant("sliding_window", *window);
            self.constant("use_sliding_window", true);
            let kind = |window: &Option<usize>| match window {
                Some(_) => "sliding_attention",
                None => "full_attention",
            };
            self.constant("layer_types", json!(windows.iter().map(kind).collect::<Vec<_>>()));
        }
        Ok(())
    }

    /// The channels of a mixer: the width of the model times a whole number, 2 where `config.json` does not say.
    ///
    /// # Errors
    ///
    /// As [`size`](Self::size), [`Error::Unsupported`] when they are to be written and are no such product.
    pub fn channels(&mut self, expand: &str, mixer: &MixerConfig) -> Result<usize> {
        let (inner, width) = (mixer.d_inner(), mixer.d_model);
        let mut factor = 2;
        if self.writes_json() {
            if !inner.is_multiple_of(width) {
                let what = format!(
                    "{inner} channels in transformers, which expands {width} by a whole number"
                );
                return Err(Error::Unsupported { what });
            }
            factor = inner / width;
        }
        self.size([expand, ""], &mut factor, Missing(2))?;
        Ok(width.saturating_mul(factor))
    }

    /// Experts and the one that every token gets, under the names that DeepSeek's models gave them.
    ///
    /// # Errors
    ///
    /// As [`size`](Self::size); for sizes that differ from layer to layer, and biases of experts in a latent space.
    pub fn experts(&mut self, moe: &mut MoeConfig, shared: &mut MlpConfig) -> Result<()> {
        const USED: [&str; 2] = ["num_experts_per_tok", "expert_used_count"];
        const WIDTH: [&str; 2] = ["moe_intermediate_size", "expert_feed_forward_length"];
        const LATENT: &str = "moe_latent_size";
        if let Some((keys, _)) = self.gguf() {
            let value = |name: &str| keys.metadata.get(&keys.key(name));
            let is_list = |name: &&str| matches!(value(name), Some(gguf::Value::Array(_)));
            if let Some(name) = [USED[1], WIDTH[1]].into_iter().find(is_list) {
                return Err(keys.error(name, PUZZLE));
            }
        }
        let expert = &mut moe.expert;
        let experts = ["n_routed_experts|num_local_experts", "expert_count"];
        self.size(experts, &mut moe.experts, Class(8))?;
        self.size(USED, &mut moe.used, Class(2))?;
        let width = if self.gguf().is_some() { Or(0) } else { Class(7688) };
        self.size(WIDTH, &mut expert.d_ff, width)?;
        self.constant("n_shared_experts", 1);
        self.gguf_constant("expert_shared_count", 1u32);
        let names = ["moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length"];
        self.size(names, &mut shared.d_ff, Class(7688))?;
        self.constant(LATENT, Value::Null);
        let latent = if self.reads() || expert.d_model != moe.d_model { LATENT } else { "" };
        self.size([latent; 2], &mut expert.d_model, Or(moe.d_model))?;
        // GGUF says 0 for what there is not.
        expert.d_model = if expert.d_model == 0 { moe.d_model } else { expert.d_model };
        self.routing(moe)?;
        self.flag(["mlp_bias", ""], &mut shared.bias, Missing(false))?;
        match self.json().filter(|file| shared.bias && file.has(LATENT)) {
            None => Ok(()),
            Some(file) => Err(file.error("mlp_bias", "not supported with moe_latent_size")),
        }
    }

    /// How experts are chosen and weighed: groups, and what becomes of the weights.
    ///
    /// # Errors
    ///
    /// As [`size`](Self::size).
    pub fn routing(&mut self, moe: &mut MoeConfig) -> Result<()> {
        self.size(["n_group", "expert_group_count"], &mut moe.ngroups, Missing(1))?;
        self.size(["topk_group", "expert_group_used_count"], &mut moe.topk_group, Missing(1))?;
        let normalized = Missing(self.gguf().is_none());
        self.flag(["norm_topk_prob", "expert_weights_norm"], &mut moe.normalized, normalized)?;
        self.float(
            ["routed_scaling_factor", "expert_weights_scale"],
            &mut moe.scale,
            Missing(1.0),
        )?;
        if let Some((keys, _)) = self.gguf() {
            // GGUF says 0 for what there is not.
            moe.scale = if moe.scale == 0.0 { 1.0 } else { moe.scale };
            moe.ngroups = moe.ngroups.max(1);
            let groups = || keys.size("expert_group_used_count");
            moe.topk_group = if moe.ngroups == 1 { 1 } else { groups()? };
        }
        Ok(())
    }
}

/// The window that transformers' configuration class has where a file does not say.
pub struct ClassWindow {
    /// Its size, if it has one.
    pub size: Option<usize>,
    /// Whether it is in use.
    pub used: bool,
    /// The first layer that has it.
    pub first: usize,
}

/// Each layer's window: `sliding_window` where it is in use; null is no window.
fn read_windows(
    file: &ConfigFile,
    n_layer: usize,
    class: &ClassWindow,
) -> Result<Vec<Option<usize>>> {
    let of_class = class.size.filter(|_| !file.states("sliding_window"));
    let window = file.usize(&["sliding_window"], 1..=1 << 40)?.or(of_class);
    let in_use = file.bool(&["use_sliding_window"])?.unwrap_or(class.used);
    let Some(window) = window.filter(|_| in_use) else { return Ok(vec![None; n_layer]) };
    let kind = |word: &str| Some((word == "sliding_attention").then_some(window));
    if let Some(windows) = layer_kinds((file, "layer_types"), Some(n_layer), kind, "")? {
        return Ok(windows);
    }
    let first = file.usize(&["max_window_layers"], 0..=1 << 40)?.unwrap_or(class.first);
    Ok((0..n_layer).map(|layer| (layer >= first).then_some(window)).collect())
}

/// Refuses the first of these that is so: what a file has no way to say.
pub(super) fn refuse(lacking: &[(bool, &str)]) -> Result<()> {
    match lacking.iter().find(|(is_so, _)| *is_so) {
        None => Ok(()),
        Some((_, what)) => Err(Error::Unsupported { what: (*what).into() }),
    }
}

/// Refuses a mixer whose heads are not the `channels` that the words `of` stand for.
pub(super) fn check_heads(
    (file, key): (&ConfigFile, &str),
    mixer: &MixerConfig,
    (of, channels): (&str, usize),
) -> Result<()> {
    let (heads, headdim) = (mixer.nheads, mixer.headdim);
    if heads.saturating_mul(headdim) == channels {
        return Ok(());
    }
    let reason = format!("{heads} heads of {headdim} are not {of} = {channels} channels");
    Err(file.error(key, reason))
}

/// The width of each of `heads`, which share the `channels` that the words `of` stand for.
pub(super) fn headdim(
    (file, key): (&ConfigFile, &str),
    heads: usize,
    (of, channels): (&str, usize),
) -> Result<usize> {
    if channels.is_multiple_of(heads) {
        return Ok(channels / heads);
    }
    Err(file.error(key, format!("{heads} heads do not divide {of} = {channels} channels")))
}

/// The width of a mixer's heads, `auto` where a file leaves it to their number.
pub(super) fn mamba_d_head(file: &ConfigFile, expected: &str, auto: usize) -> Result<usize> {
    file.not_null("mamba_d_head")?;
    let width = file.get(&["mamba_d_head"], expected, |value| match value.as_str() {
        Some("auto") => Some(auto),
        _ => usize::try_from(value.as_u64()?).ok(),
    })?;
    Ok(width.unwrap_or(auto))
}

/// What each layer is by a list of words under `key`, each one that `kind` knows, and that errors list as `expected`;
/// `None` where there is no list.
pub(super) fn layer_kinds<K>(
    (file, key): (&ConfigFile, &str),
    n_layer: Option<usize>,
    kind: impl Fn(&str) -> Option<K>,
    expected: &str,
) -> Result<Option<Vec<K>>> {
    let Some(words) = file.texts(key)? else { return Ok(None) };
    let found = words.len();
    let reason = match n_layer {
        Some(n_layer) if found != n_layer => {
            format!("{found} layers, but num_hidden_layers is {n_layer}")
        }
        None if found > MAX_LAYERS => {
            format!("{found} layers, at most {MAX_LAYERS} are supported")
        }
        _ => {
            let unknown = |word| file.error(key, format!("expected {expected}, found {word:?}"));
            let kinds = words.iter().map(|word| kind(word).ok_or_else(|| unknown(word)));
            return kinds.collect::<Result<_>>().map(Some);
        }
    };
    Err(file.error(key, reason))
}

/// Which layers a list of their numbers under `key` names; `None` where there is no list.
pub(super) fn listed_layers(
    (file, key): (&ConfigFile, &str),
    n_layer: usize,
) -> Result<Option<Vec<bool>>> {
    let Some(indices) = file.usizes(key, 0..=MAX_SIZE)? else { return Ok(None) };
    if let Some(index) = indices.iter().find(|&&index| index >= n_layer) {
        let reason = format!("layer {index}, but num_hidden_layers is {n_layer}");
        return Err(file.error(key, reason));
    }
    Ok(Some((0..n_layer).map(|layer| indices.contains(&layer)).collect()))
}

/// The numbers of the layers that are so.
pub(super) fn numbers(layers: &[bool]) -> Vec<usize> {
    (0..layers.len()).filter(|&layer| layers[layer]).collect()
}
