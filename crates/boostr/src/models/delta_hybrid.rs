//! Layers that are each a gated delta mixer or attention: the common form of Qwen3-Next and Qwen3.5.
//!
//! The two spell it alike in `config.json` (`linear_*` and a list of layers) and in GGUF, keep it under the same names
//! (`linear_attn`, `self_attn`), and have gated attention and zero-centred norms.

use serde_json::{Value, json};

use super::fields::{Fields, Need::Class, Need::Missing, Need::Required};
use super::gguf::{Keys, attention_table, is_next_layer};
use super::groups::layer_kinds;
use super::mtp::is_of_block;
use super::{Frame, LeftOut, MAX_SIZE, Names, SILU};
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::{Error, Result};
use crate::nn::{AttentionConfig, DeltaConfig, How, LayerSpec, QkNorm, Row};

/// A layer of attention comes after so many others less one, where a file does not say.
const INTERVAL: usize = 4;

/// Sizes of a model, but for the feed-forward parts.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaHybrid {
    /// Ids that the tokenizer may give; the embedding may have more rows.
    pub vocab_size: usize,
    /// Whether the head is the embedding; `None` when the file does not say.
    pub tie_embeddings: Option<bool>,
    /// Added to the mean of squares of norms.
    pub norm_eps: f32,
    /// Longest context that the model was made for.
    pub max_position: usize,
    /// Every mixer.
    pub mixer: DeltaConfig,
    /// Every attention.
    pub attention: AttentionConfig,
    /// Which layers are attention; the others are mixers.
    pub is_attention: Vec<bool>,
}

impl DeltaHybrid {
    /// The sizes of nothing, to be read into.
    pub(super) fn blank() -> Self {
        Self {
            vocab_size: 0,
            tie_embeddings: None,
            norm_eps: 1e-6,
            max_position: 32_768,
            mixer: DeltaConfig::new(0, [0; 2], [0; 2]),
            attention: AttentionConfig::new(0, 0, 0, 0),
            is_attention: Vec::new(),
        }
    }

    /// Visits what the families spell alike.
    pub(super) fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        let (a, m) = (&mut self.attention, &mut self.mixer);
        f.size(["hidden_size", "embedding_length"], &mut a.d_model, Required)?;
        (a.d_in, m.d_model) = (a.d_model, a.d_model);
        let mut n_layer = self.is_attention.len();
        f.n_layer("num_hidden_layers", &mut n_layer)?;
        if let Some((keys, _)) = f.gguf() {
            n_layer -= keys.next_layers()?;
        }
        f.heads(a)?;
        f.activation("hidden_act", SILU)?;
        f.norm_eps("rms_norm_eps", &mut self.norm_eps, 1e-6)?;
        f.context(&mut self.max_position, 32_768)?;
        visit_mixer(f, m)?;
        visit_layers(f, &mut self.is_attention, n_layer)?;
        f.flag(["attention_bias", ""], &mut a.qkv_bias, Missing(false))?;
        if f.reads() {
            a.out_bias = a.qkv_bias;
            if let Some((_, checkpoint)) = f.gguf() {
                let first = self.is_attention.iter().position(|&is| is).unwrap_or(0);
                let has = |name: &str| checkpoint.get(&format!("blk.{first}.{name}")).is_some();
                (a.qkv_bias, a.out_bias) = (has("attn_q.bias"), has("attn_output.bias"));
            }
            a.qk_norm_eps = Some(self.norm_eps);
            (a.qk_norm, a.output_gate) = (QkNorm::HeadZeroCentred, true);
            m.norm_eps = self.norm_eps;
        }
        if let Some(file) = f.json()
            && file.bool(&["attn_output_gate"])? == Some(false)
        {
            return Err(file.error("attn_output_gate", "expected true, found false"));
        }
        f.constant("attn_output_gate", true);
        if let Some(file) = f.json().filter(|file| file.states(SHARE) && !file.has(SHARE)) {
            return Err(file.error(SHARE, "expected a number, found null"));
        }
        f.rope(&mut a.rope, a.headdim, 0.25)?;
        if let Some(json) = f.json_mut() {
            // Transformers 5 takes positions from here only.
            let mut parameters = match json.get("rope_scaling") {
                None | Some(Value::Null) => json!({ "rope_type": "default" }),
                Some(scaling) => scaling.clone(),
            };
            for key in ["rope_theta", "partial_rotary_factor"] {
                parameters[key] = json.get(key).cloned().unwrap_or_default();
            }
            json.insert("rope_parameters".into(), parameters);
        }
        f.vocabulary(&mut self.vocab_size, &mut self.tie_embeddings)
    }

    /// The block for one token more: a layer of attention.
    pub(super) fn next_block(&self) -> Self {
        Self { is_attention: vec![true], ..self.clone() }
    }

    /// What stands around the layers.
    pub(super) fn frame(&self) -> Frame {
        let names = Names::model("model.norm");
        Frame::new(names, self.attention.d_model, self.vocab_size, self.norm_eps)
            .tied(self.tie_embeddings)
            .zero_centred()
    }

    /// The layers without their feed-forward parts.
    pub(super) fn layers(&self) -> impl Iterator<Item = LayerSpec> {
        self.is_attention.iter().map(|&is_attention| {
            let layer = LayerSpec::new(self.attention.d_model, self.norm_eps).zero_centred();
            let layer = layer.norm("input_layernorm");
            if is_attention {
                layer.and("self_attn", self.attention.clone())
            } else {
                layer.and("linear_attn", self.mixer.clone())
            }
        })
    }

    /// The rows of GGUF's table for attention and for norms.
    pub(super) fn gguf_table(&self) -> Vec<Row> {
        let norm = |file: &str, part: &str| {
            let (file, part) =
                (format!("blk.#.{file}.weight"), format!("model.layers.#.{part}.weight"));
            Row::new(file, part).how(How::PlusOne)
        };
        let mut table = attention_table(&self.attention, "model.layers.#.self_attn", false);
        table.extend([
            norm("attn_norm", "input_layernorm"),
            norm("post_attention_norm", "post_attention_layernorm"),
        ]);
        table
    }

    /// Gives the tensors of a file the names under `model`, and drops those that predict more than the next token, and
    /// those of pictures.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] for the layout of MLX, whose norms are other numbers under the same names.
    pub(super) fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        super::gguf::drop_next_layers(checkpoint, self.is_attention.len())?;
        checkpoint.rename(|name| {
            name.strip_prefix("model.language_model.").map(|rest| format!("model.{rest}"))
        })?;
        checkpoint.retain(|name| !is_of_pictures(name) && !is_of_block(name));
        let is_of_mlx = |(name, shape): (&str, &[usize])| {
            name.ends_with(".conv1d.weight")
                && matches!(shape, &[_, taps, 1] if taps == self.mixer.d_conv && taps > 1)
        };
        let mut shapes = checkpoint.iter().map(|(name, entry)| (name, &entry.shape[..]));
        let Some((name, shape)) = shapes.find(|&tensor| is_of_mlx(tensor)) else { return Ok(()) };
        let reason = format!(
            "`{}` {shape:?} is in the layout of MLX, which also changes the norms: take the folder that its author published",
            name.escape_debug()
        );
        Err(Error::Tensors { path: checkpoint.path().into(), reason })
    }

    /// What a tensor of a file is for that the model does without.
    pub(super) fn left_out(&self, name: &str) -> Option<LeftOut> {
        if is_of_pictures(name) {
            return Some(LeftOut::Pictures);
        }
        let is_next = is_of_block(name) || is_next_layer(name, self.is_attention.len());
        is_next.then_some(LeftOut::NextTokens)
    }
}

/// The model's own file of a configuration: that of its text where it sees pictures too. Its head is the embedding if
/// either says so. Its type is that of the family, `model_type`, whatever the file calls this part of it.
pub(super) fn text_config(file: &ConfigFile, model_type: &str) -> Result<ConfigFile> {
    const TIED: &str = "tie_word_embeddings";
    if !file.has("text_config") {
        return Ok(file.clone().with("model_type", model_type));
    }
    let text = file.object("text_config")?;
    let [top, of_text] = [file.bool(&[TIED])?, text.bool(&[TIED])?];
    let tied = if of_text == Some(true) { of_text } else { top.or(of_text) };
    let text = text.with("model_type", model_type);
    Ok(match tied {
        Some(tied) => text.with(TIED, tied),
        None => text,
    })
}

/// The part of a head that rotates.
const SHARE: &str = "partial_rotary_factor";

/// Whether a tensor of a folder is of a tower that sees pictures.
fn is_of_pictures(name: &str) -> bool {
    ["model.visual.", "visual."].iter().any(|prefix| name.starts_with(prefix))
}

/// The mixer but for the width of the model.
fn visit_mixer(f: &mut Fields<'_>, m: &mut DeltaConfig) -> Result<()> {
    f.size(["linear_conv_kernel_dim", "ssm.conv_kernel"], &mut m.d_conv, Class(4))?;
    f.size(["linear_key_head_dim", "ssm.state_size"], &mut m.d_key, Class(128))?;
    f.size(["linear_value_head_dim", ""], &mut m.d_value, Missing(128))?;
    f.size(["linear_num_key_heads", "ssm.group_count"], &mut m.nheads_key, Class(16))?;
    f.size(["linear_num_value_heads", "ssm.time_step_rank"], &mut m.nheads, Class(32))?;
    if let Some((keys, _)) = f.gguf() {
        let inner = keys.size("ssm.inner_size")?;
        if !inner.is_multiple_of(m.nheads) {
            let reason = format!("{} heads do not divide {inner} channels", m.nheads);
            return Err(keys.error("ssm.time_step_rank", reason));
        }
        m.d_value = inner / m.nheads;
    }
    if let Some(keys) = f.gguf_mut() {
        keys.size("ssm.inner_size", m.value_width());
    }
    Ok(())
}

/// Which layers are attention.
fn visit_layers(f: &mut Fields<'_>, is_attention: &mut Vec<bool>, n_layer: usize) -> Result<()> {
    const INTERVAL_KEY: &str = "full_attention_interval";
    let by_interval = |interval: usize| -> Vec<bool> {
        (1..=n_layer).map(|layer| layer.is_multiple_of(interval)).collect()
    };
    if let Some(file) = f.json() {
        *is_attention = match layer_list(file, n_layer)? {
            Some(layers) => layers,
            None => {
                file.not_null(INTERVAL_KEY)?;
                by_interval(file.usize(&[INTERVAL_KEY], 1..=MAX_SIZE)?.unwrap_or(INTERVAL))
            }
        };
    }
    if let Some((keys, _)) = f.gguf() {
        *is_attention = match recurrent_layers(keys, n_layer)? {
            Some(layers) => layers.into_iter().map(|is_recurrent| !is_recurrent).collect(),
            None => {
                by_interval(keys.optional(INTERVAL_KEY)?.filter(|&n| n > 0).unwrap_or(INTERVAL))
            }
        };
    }
    let first = is_attention.iter().position(|&is| is).map(|layer| layer + 1);
    let interval = first.filter(|&interval| by_interval(interval) == *is_attention);
    let kind = |&is: &bool| if is { "full_attention" } else { "linear_attention" };
    f.constant("layer_types", json!(is_attention.iter().map(kind).collect::<Vec<_>>()));
    if let Some(interval) = interval {
        f.constant(INTERVAL_KEY, interval);
    }
    if let Some(keys) = f.gguf_mut() {
        let recurrent: Vec<bool> = is_attention.iter().map(|is| !is).collect();
        keys.set("attention.recurrent_layers", recurrent.as_slice());
        if let Some(interval) = interval {
            keys.size(INTERVAL_KEY, interval);
        }
    }
    Ok(())
}

/// Which layers are attention by the list of a `config.json`, if it has one.
pub(super) fn layer_list(file: &ConfigFile, n_layer: usize) -> Result<Option<Vec<bool>>> {
    let expected = "linear_attention or full_attention";
    let is_attention = |word: &str| match word {
        "full_attention" => Some(true),
        "linear_attention" => Some(false),
        _ => None,
    };
    layer_kinds((file, "layer_types"), Some(n_layer), is_attention, expected)
}

/// Which of the first `n_layer` layers are recurrent by the list of a GGUF file, if it has one; that has a value for
/// layers that predict more than the next token too.
fn recurrent_layers(keys: &Keys<'_>, n_layer: usize) -> Result<Option<Vec<bool>>> {
    const KEY: &str = "attention.recurrent_layers";
    let Some(mut layers) = keys.metadata.bools(&keys.key(KEY))? else { return Ok(None) };
    let (found, blocks) = (layers.len(), keys.n_layer()?);
    if ![n_layer, blocks].contains(&found) {
        let or = if n_layer == blocks { String::new() } else { format!(" or {blocks}") };
        let reason = format!("expected {n_layer}{or} truth values, found {found}");
        return Err(keys.error(KEY, reason));
    }
    layers.truncate(n_layer);
    Ok(Some(layers))
}
