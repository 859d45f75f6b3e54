//! Nemotron-H language models (NVIDIA, 2025, arXiv 2504.03624): Nemotron-H, Nemotron Nano 2, Nemotron 3.
//!
//! A layer is one thing: a Mamba-2 mixer (`M`), attention without positions (`*`), a feed-forward part
//! with a squared ReLU and no gate (`-`), or a mixture of such experts with one that every token gets
//! (`E`). A pattern of these letters is the model.
//!
//! ```text
//! h ─┬────────────────────────────────────────── + ─ ...   one for each letter of the pattern
//!    │        ┌ M  Mamba-2 ───────────────────┐  │
//!    │        │ *  attention                  │  │
//!    └ norm ──┤ -  up_proj ─ relu² ─ down_proj├──┘
//!             └ E  experts + shared expert ───┘
//!
//! E:  u ─┬ gate ─ sigmoid ─ the best by score + bias, weighted by score ─┐
//!        ├ (fc1_latent_proj) ─ experts ─────────────────────────────────── sum ─ (fc2_latent_proj) ─ + ─
//!        └ shared_experts ──────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Loads transformers' `NemotronHForCausalLM`, with names under `backbone.` or `model.` and experts one by
//! one or stacked, and GGUF. The layers that predict more than the next token (`mtp.*`, GGUF's last blocks
//! by `nextn_predict_layers`) are left out. Models whose layers differ in the sizes of their experts
//! (Puzzle) are not supported.
//!
//! Steps have no limits unless `time_step_limit` says so. transformers 5.24 ignores that field: it takes
//! `time_step_min` as the lower limit in prompts and none in decoding, as no other program does.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::gguf::{
    ARCHITECTURE, Keys, KeysMut, attention_table, mixer_table, mlp_table, moe_table,
};
use super::{
    Decoder, Family, Frame, MAX_SIZE, Names, SILU, expect_activation, limit_json, read_limit,
    shortest,
};
use crate::backend::{Backend, Tensor};
use crate::checkpoint::gguf::{self, Metadata};
use crate::checkpoint::{Checkpoint, ConfigFile, TensorEntry};
use crate::error::{Error, Result};
use crate::nn::{
    Attention, AttentionConfig, Batch, LayerSpec, Mamba2Mixer, MixerConfig, Mlp, MlpConfig, Moe,
    MoeConfig, MoePart, Params, RmsNorm, Routing, Row, Tensors,
};

/// What `config.json` calls this family.
pub(super) const MODEL_TYPES: &[&str] = &["nemotron_h"];
/// What GGUF calls it, without experts and with them.
pub(super) const ARCHS: &[&str] = &["nemotron_h", "nemotron_h_moe"];

const NAMES: Names =
    Names { embeddings: "backbone.embeddings", norm: "backbone.norm_f", head: "lm_head" };
/// The parameters of a layer's one part.
const MIXER: &str = "backbone.layers.#.mixer";
/// Number of GGUF's blocks at the end that predict more than the next token.
const NEXT: &str = "nextn_predict_layers";
const MAX_LAYERS: usize = 10_000;
const PUZZLE: &str = "layers of one kind and different sizes (Puzzle) are not supported";

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Ids that the tokenizer may give; the embedding may have more rows.
    pub vocab_size: usize,
    /// Whether the head is the embedding; `None` when the file does not say.
    pub tie_embeddings: Option<bool>,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Added to the mean of squares of norms.
    pub norm_eps: f32,
    /// Longest context that the model was made for.
    pub max_position: usize,
    /// The layers.
    pub blocks: Vec<Block>,
}

/// What one layer is.
#[derive(Debug, Clone, PartialEq)]
pub enum Block {
    /// `M`
    Mamba2(MixerConfig),
    /// `*`
    Attention(AttentionConfig),
    /// `-`
    Mlp(MlpConfig),
    /// `E`
    Moe {
        /// The experts that are chosen from.
        moe: MoeConfig,
        /// The one that every token gets.
        shared: MlpConfig,
    },
}

/// The letter of each kind of layer in a pattern, and its names in a list, the old one and the new one.
const KINDS: [(char, &[&str]); 4] = [
    ('M', &["mamba", "linear_attention"]),
    ('*', &["attention", "full_attention"]),
    ('-', &["mlp"]),
    ('E', &["moe"]),
];

impl Config {
    pub(super) fn read(file: &ConfigFile) -> Result<Self> {
        if file.has("block_configs") {
            return Err(file.error("block_configs", PUZZLE));
        }
        expect_activation(file, "mamba_hidden_act", SILU)?;
        expect_activation(file, "mlp_hidden_act", &["relu2"])?;
        let d_model = file.required(&["hidden_size"], 1..=MAX_SIZE)?;
        let eps = &["layer_norm_epsilon", "rms_norm_eps"];
        let norm_eps = file.float(eps, f32::MIN_POSITIVE..=1.0)?.unwrap_or(1e-5);
        let kinds = read_kinds(file)?;
        let blocks = kinds.into_iter().map(|kind| Block::read(file, kind, d_model, norm_eps));
        Ok(Self {
            vocab_size: file.required(&["vocab_size"], 1..=MAX_SIZE)?,
            tie_embeddings: file.bool(&["tie_word_embeddings"])?,
            d_model,
            norm_eps,
            max_position: file.usize(&["max_position_embeddings"], 1..=1 << 40)?.unwrap_or(4096),
            blocks: blocks.collect::<Result<_>>()?,
        })
    }

    pub(super) fn read_gguf(keys: &Keys<'_>, checkpoint: &Checkpoint) -> Result<Self> {
        let (all, extra) = (keys.n_layer()?, keys.optional(NEXT)?.unwrap_or(0));
        if extra >= all {
            return Err(keys.error(NEXT, format!("{extra} of {all} blocks leave no layer")));
        }
        let heads = keys.per_layer("attention.head_count_kv", all)?;
        let widths = keys.per_layer("feed_forward_length", all)?;
        let layers = heads.into_iter().zip(widths).take(all - extra).enumerate();
        let blocks = layers.map(|(layer, (nheads_kv, d_ff))| {
            Block::read_gguf(keys, checkpoint, layer, nheads_kv, d_ff)
        });
        let context = keys.metadata.usize(&keys.key("context_length"), 1..=1 << 40)?;
        Ok(Self {
            vocab_size: keys.vocab_size()?,
            tie_embeddings: None,
            d_model: keys.size("embedding_length")?,
            norm_eps: keys.norm_eps()?,
            max_position: context.unwrap_or(4096),
            blocks: blocks.collect::<Result<_>>()?,
        })
    }

    /// What the layers of each kind are.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] when two of a kind differ: files say it once for all.
    fn kinds(&self) -> Result<Kinds<'_>> {
        let mut kinds = Kinds::default();
        for block in &self.blocks {
            let is_alike = match block {
                Block::Mamba2(mixer) => *kinds.mamba2.get_or_insert(mixer) == mixer,
                Block::Attention(attention) => {
                    *kinds.attention.get_or_insert(attention) == attention
                }
                Block::Mlp(mlp) => *kinds.mlp.get_or_insert(mlp) == mlp,
                Block::Moe { moe, shared } => {
                    *kinds.moe.get_or_insert((moe, shared)) == (moe, shared)
                }
            };
            if !is_alike {
                let what = "layers of one kind and different sizes in a file of Nemotron-H".into();
                return Err(Error::Unsupported { what });
            }
        }
        Ok(kinds)
    }

    /// [`Config::kinds`] of a model that GGUF has a place for.
    fn gguf_kinds(&self) -> Result<Kinds<'_>> {
        let kinds = self.kinds()?;
        let lacking = [
            (kinds.mlp.is_some() && kinds.moe.is_some(), "layers with experts beside some without"),
            (kinds.moe.is_some_and(|(_, shared)| shared.bias), "biases of experts"),
        ];
        match lacking.iter().find(|(is_there, _)| *is_there) {
            None => Ok(kinds),
            Some((_, what)) => {
                let what = format!("{what} in GGUF, which has no way to say so");
                Err(Error::Unsupported { what })
            }
        }
    }

    fn is_moe(&self) -> bool {
        self.blocks.iter().any(|block| matches!(block, Block::Moe { .. }))
    }
}

/// What all layers of each kind are.
#[derive(Default)]
struct Kinds<'a> {
    mamba2: Option<&'a MixerConfig>,
    attention: Option<&'a AttentionConfig>,
    mlp: Option<&'a MlpConfig>,
    moe: Option<(&'a MoeConfig, &'a MlpConfig)>,
}

/// The letter of each layer: by a list, which then is all that counts, or by the pattern.
fn read_kinds(file: &ConfigFile) -> Result<Vec<char>> {
    const PATTERN: &str = "hybrid_override_pattern";
    for key in ["layers_block_type", "layer_types"] {
        let Some(words) = file.texts(key)? else { continue };
        if words.len() > MAX_LAYERS {
            let reason = format!("{} layers, at most {MAX_LAYERS} are supported", words.len());
            return Err(file.error(key, reason));
        }
        let letter = |word: &&str| {
            let kind = KINDS.iter().find(|(_, names)| names.contains(word));
            kind.map(|&(letter, _)| letter).ok_or_else(|| {
                let known: Vec<&str> =
                    KINDS.iter().flat_map(|(_, names)| *names).copied().collect();
                file.error(key, format!("expected {}, found {word:?}", known.join(", ")))
            })
        };
        return words.iter().map(letter).collect();
    }
    let Some(pattern) = file.text(PATTERN)? else {
        return Err(file.error(PATTERN, "missing (looked for layers_block_type, layer_types too)"));
    };
    let is_unknown = |letter: &char| KINDS.iter().all(|(known, _)| known != letter);
    let mut unknown: Vec<char> = pattern.chars().filter(is_unknown).collect();
    unknown.sort_unstable();
    unknown.dedup();
    if !unknown.is_empty() {
        let unknown = unknown.iter().take(8).collect::<String>();
        return Err(file.error(PATTERN, format!("expected M, *, - and E, found {unknown:?}")));
    }
    let n_layer = file.usize(&["num_hidden_layers"], 1..=MAX_LAYERS)?;
    match n_layer.unwrap_or(MAX_LAYERS) {
        most if pattern.len() > most || n_layer.is_some_and(|n| n != pattern.len()) => {
            let reason = format!("{} layers, but num_hidden_layers is {most}", pattern.len());
            Err(file.error(PATTERN, reason))
        }
        _ => Ok(pattern.chars().collect()),
    }
}

impl Block {
    /// Reads the sizes of a layer of the kind that `letter` stands for.
    fn read(file: &ConfigFile, letter: char, d_model: usize, norm_eps: f32) -> Result<Self> {
        let required = |keys: &[&str]| file.required(keys, 1..=MAX_SIZE);
        let size = |keys: &[&str], default| -> Result<usize> {
            Ok(file.usize(keys, 1..=MAX_SIZE)?.unwrap_or(default))
        };
        let flag =
            |keys: &[&str], default| -> Result<bool> { Ok(file.bool(keys)?.unwrap_or(default)) };
        let mlp_bias = flag(&["mlp_bias"], false)?;
        Ok(match letter {
            'M' => {
                let limits = ["time_step_limit", "mamba_dt_limit"];
                let limit = limits.into_iter().find(|key| file.has(key)).unwrap_or(limits[0]);
                let nheads = required(&["mamba_num_heads"])?;
                Self::Mamba2(MixerConfig {
                    ngroups: size(&["n_groups", "mamba_n_groups"], 8)?,
                    d_state: size(&["ssm_state_size"], 128)?,
                    d_conv: size(&["conv_kernel", "mamba_d_conv"], 4)?,
                    in_bias: flag(&["use_bias", "mamba_proj_bias"], false)?,
                    out_bias: flag(&["use_bias", "mamba_proj_bias"], false)?,
                    conv_bias: flag(&["use_conv_bias", "mamba_conv_bias"], true)?,
                    dt_limit: read_limit(file, limit)?,
                    norm_eps,
                    ..MixerConfig::new(d_model, nheads, size(&["mamba_head_dim"], 64)?)
                })
            }
            '*' => {
                let nheads = required(&["num_attention_heads"])?;
                let nheads_kv = size(&["num_key_value_heads"], nheads)?;
                let headdim = size(&["head_dim", "attention_head_dim"], 128)?;
                let bias = flag(&["attention_bias"], false)?;
                Self::Attention(AttentionConfig {
                    qkv_bias: bias,
                    out_bias: bias,
                    ..AttentionConfig::new(d_model, nheads, nheads_kv, headdim)
                })
            }
            '-' => {
                let mlp = MlpConfig::relu2(d_model, required(&["intermediate_size"])?);
                Self::Mlp(MlpConfig { bias: mlp_bias, ..mlp })
            }
            _ => {
                let latent = file.usize(&["moe_latent_size"], 1..=MAX_SIZE)?;
                if mlp_bias && latent.is_some() {
                    return Err(file.error("mlp_bias", "not supported with moe_latent_size"));
                }
                let width = required(&["moe_intermediate_size"])?;
                let shared = required(&["moe_shared_expert_intermediate_size"])?;
                let scale = file.float(&["routed_scaling_factor"], f32::MIN..=f32::MAX)?;
                Self::Moe {
                    moe: MoeConfig {
                        expert: MlpConfig::relu2(latent.unwrap_or(d_model), width),
                        experts: required(&["n_routed_experts", "num_local_experts"])?,
                        used: required(&["num_experts_per_tok"])?,
                        routing: Routing::Sigmoid,
                        ngroups: size(&["n_group"], 1)?,
                        topk_group: size(&["topk_group"], 1)?,
                        normalized: flag(&["norm_topk_prob"], true)?,
                        scale: scale.unwrap_or(1.0),
                        d_model,
                    },
                    shared: MlpConfig { bias: mlp_bias, ..MlpConfig::relu2(d_model, shared) },
                }
            }
        })
    }

    /// Reads the sizes of the layer numbered `layer`: a feed-forward part where it is `d_ff` wide, else
    /// attention where there are heads of keys, else a mixer.
    fn read_gguf(
        keys: &Keys<'_>,
        checkpoint: &Checkpoint,
        layer: usize,
        nheads_kv: usize,
        d_ff: usize,
    ) -> Result<Self> {
        let d_model = keys.size("embedding_length")?;
        let has = |name: &str| checkpoint.get(&format!("blk.{layer}.{name}")).is_some();
        if d_ff == 0 && nheads_kv == 0 {
            let conv_bias = has("ssm_conv1d.bias");
            return Ok(Self::Mamba2(MixerConfig { conv_bias, ..keys.mixer()? }));
        }
        if d_ff == 0 {
            let nheads = keys.size("attention.head_count")?;
            let default = d_model / nheads;
            let headdim = keys.optional("attention.key_length")?.unwrap_or(default);
            if let Some(width) = keys.optional("attention.value_length")?.filter(|&w| w != headdim)
            {
                let reason = format!("expected {headdim}, as keys have, found {width}");
                return Err(keys.error("attention.value_length", reason));
            }
            return Ok(Self::Attention(AttentionConfig {
                qkv_bias: has("attn_q.bias"),
                out_bias: has("attn_output.bias"),
                ..AttentionConfig::new(d_model, nheads, nheads_kv, headdim)
            }));
        }
        let experts = keys.optional("expert_count")?.unwrap_or(0);
        if experts == 0 {
            let bias = has("ffn_up.bias");
            return Ok(Self::Mlp(MlpConfig { bias, ..MlpConfig::relu2(d_model, d_ff) }));
        }
        for name in ["expert_used_count", "expert_feed_forward_length"] {
            if let Some(gguf::Value::Array(_)) = keys.metadata.get(&keys.key(name)) {
                return Err(keys.error(name, PUZZLE));
            }
        }
        let used = keys.size("expert_used_count")?;
        // Older files only have the width of all experts of a token together.
        let width = keys.optional("expert_feed_forward_length")?.unwrap_or(d_ff / used);
        let latent = keys.optional("moe_latent_size")?.filter(|&latent| latent > 0);
        let ngroups = keys.optional("expert_group_count")?.filter(|&n| n > 0).unwrap_or(1);
        Ok(Self::Moe {
            moe: MoeConfig {
                expert: MlpConfig::relu2(latent.unwrap_or(d_model), width),
                experts,
                used,
                routing: Routing::Sigmoid,
                ngroups,
                topk_group: if ngroups == 1 { 1 } else { keys.size("expert_group_used_count")? },
                normalized: keys.bool("expert_weights_norm")?.unwrap_or(false),
                scale: keys.float("expert_weights_scale")?.filter(|&x| x != 0.0).unwrap_or(1.0),
                d_model,
            },
            shared: MlpConfig::relu2(d_model, keys.size("expert_shared_feed_forward_length")?),
        })
    }

    fn letter(&self) -> char {
        match self {
            Self::Mamba2(_) => 'M',
            Self::Attention(_) => '*',
            Self::Mlp(_) => '-',
            Self::Moe { .. } => 'E',
        }
    }

    fn spec(&self) -> LayerSpec {
        match self.clone() {
            Self::Mamba2(mixer) => LayerSpec::of(mixer),
            Self::Attention(attention) => LayerSpec::of(attention),
            Self::Mlp(mlp) => LayerSpec::of(mlp),
            Self::Moe { moe, shared } => LayerSpec::of(MoePart { moe, shared: Some(shared) }),
        }
    }

    /// Adds the layer's parameters to `tensors`, under `name`.
    fn expect(&self, tensors: &mut Tensors, name: &str) {
        match self {
            Self::Mamba2(mixer) => mixer.expect(tensors, name),
            Self::Attention(attention) => attention.expect(tensors, name),
            Self::Mlp(mlp) => mlp.expect(tensors, name),
            Self::Moe { moe, shared } => {
                moe.expect(tensors, name);
                shared.expect(tensors, &format!("{name}.shared_experts"));
            }
        }
    }

    /// GGUF's `head_count_kv` and `feed_forward_length`, by which it tells kinds apart.
    fn gguf_sizes(&self) -> (usize, usize) {
        match self {
            Self::Mamba2(_) => (0, 0),
            Self::Attention(attention) => (attention.nheads_kv, 0),
            Self::Mlp(mlp) => (0, mlp.d_ff),
            Self::Moe { moe, .. } => (0, moe.expert.d_ff),
        }
    }
}

struct Layer<B: Backend> {
    norm: RmsNorm<B>,
    mixer: Mixer<B>,
}

/// The weights of what a layer is.
enum Mixer<B: Backend> {
    Mamba2(Box<Mamba2Mixer<B>>),
    Attention(Box<Attention<B>>),
    Mlp(Mlp<B>),
    Moe { moe: Box<Moe<B>>, shared: Mlp<B> },
}

/// The layers of a model.
pub(super) struct NemotronH<B: Backend>(Vec<Layer<B>>);

impl<B: Backend> NemotronH<B> {
    pub(super) fn load(config: &Config, params: &Params<'_, B>) -> Result<Self> {
        let layers = params.under("backbone").under("layers");
        let layers = config.blocks.iter().enumerate().map(|(layer, block)| {
            let params = layers.under(&layer.to_string());
            let norm = RmsNorm::load(&params.under("norm"), config.norm_eps)?;
            let params = params.under("mixer");
            let mixer = match block {
                Block::Mamba2(mixer) => Mixer::Mamba2(Box::new(Mamba2Mixer::load(mixer, &params)?)),
                Block::Attention(attention) => {
                    Mixer::Attention(Box::new(Attention::load(attention, &params)?))
                }
                Block::Mlp(mlp) => Mixer::Mlp(Mlp::load(mlp, &params)?),
                Block::Moe { moe, shared } => Mixer::Moe {
                    moe: Box::new(Moe::load(moe, &params)?),
                    shared: Mlp::load(shared, &params.under("shared_experts"))?,
                },
            };
            Ok(Layer { norm, mixer })
        });
        Ok(Self(layers.collect::<Result<_>>()?))
    }
}

impl<B: Backend> Decoder<B> for NemotronH<B> {
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
        let u = layer.norm.forward(client, &h)?;
        h = match &layer.mixer {
            Mixer::Mamba2(mixer) => mixer.forward_onto(client, &u, (h, 1.0), batch)?,
            Mixer::Attention(attention) => attention.forward_onto(client, &u, (h, 1.0), batch)?,
            Mixer::Mlp(mlp) => mlp.forward_onto(client, &u, h, 1.0)?,
            Mixer::Moe { moe, shared } => {
                let h = moe.forward_onto(client, &u, h, 1.0)?;
                shared.forward_onto(client, &u, h, 1.0)?
            }
        };
        Ok(h)
    }

    fn weight_bytes(&self) -> usize {
        let bytes = |layer: &Layer<B>| match &layer.mixer {
            Mixer::Mamba2(mixer) => mixer.weight_bytes(),
            Mixer::Attention(attention) => attention.weight_bytes(),
            Mixer::Mlp(mlp) => mlp.weight_bytes(),
            Mixer::Moe { moe, shared } => moe.weight_bytes() + shared.weight_bytes(),
        };
        self.0.iter().map(bytes).sum()
    }
}

// Layouts of files

impl Family for Config {
    fn name(&self) -> &'static str {
        "nemotron_h"
    }

    fn arch(&self) -> Option<&'static str> {
        Some(ARCHS[usize::from(self.is_moe())])
    }

    fn frame(&self) -> Frame {
        Frame {
            names: NAMES,
            d_model: self.d_model,
            vocab_size: self.vocab_size,
            pad_vocab_size_multiple: 1,
            tie_embeddings: self.tie_embeddings,
            norm_eps: self.norm_eps,
            embedding_scale: 1.0,
            logits_scale: 1.0,
        }
    }

    fn layers(&self) -> Vec<LayerSpec> {
        self.blocks.iter().map(Block::spec).collect()
    }

    fn parameters(&self, rows: usize, with_head: bool) -> Tensors {
        let mut tensors = Tensors::default();
        NAMES.expect(&mut tensors, rows, self.d_model, with_head);
        for (layer, block) in self.blocks.iter().enumerate() {
            tensors.add(format!("backbone.layers.{layer}.norm.weight"), &[self.d_model]);
            block.expect(&mut tensors, &MIXER.replace('#', &layer.to_string()));
        }
        tensors
    }

    fn gguf_table(&self) -> Result<Vec<Row>> {
        let kinds = self.gguf_kinds()?;
        let mut table = vec![Row::new("blk.#.attn_norm.weight", "backbone.layers.#.norm.weight")];
        if let Some(mixer) = kinds.mamba2 {
            table.extend(mixer_table(mixer, MIXER));
        }
        if let Some(attention) = kinds.attention {
            // As llama.cpp's converter leaves them, although nothing rotates.
            table.extend(attention_table(attention, MIXER, true));
        }
        table.extend(mlp_table(MIXER, ""));
        table.extend(moe_table(MIXER));
        table.extend(mlp_table(&format!("{MIXER}.shared_experts"), "_shexp"));
        Ok(table)
    }

    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        if let Some(metadata) = checkpoint.gguf() {
            let arch = metadata.text(ARCHITECTURE)?.unwrap_or_default();
            let extra = Keys::new(metadata, arch).optional(NEXT)?.unwrap_or(0);
            let first = self.blocks.len();
            let extra: Vec<String> =
                (first..first + extra.min(MAX_LAYERS)).map(|i| format!("blk.{i}.")).collect();
            checkpoint.retain(|name| !extra.iter().any(|block| name.starts_with(block)));
            return Ok(());
        }
        checkpoint.retain(|name| !name.starts_with("mtp."));
        checkpoint.rename(|name| {
            let rest = name.strip_prefix("model.")?;
            let is_whole = rest.starts_with("backbone.") || rest.starts_with("lm_head.");
            Some(if is_whole { rest.to_owned() } else { format!("backbone.{rest}") })
        })?;
        self.unstack_experts(checkpoint);
        Ok(())
    }

    fn write_gguf(&self, metadata: &mut Metadata) -> Result<()> {
        let kinds = self.gguf_kinds()?;
        let mut keys = KeysMut::new(metadata, ARCHS[usize::from(self.is_moe())]);
        for (name, size) in [
            ("context_length", self.max_position),
            ("embedding_length", self.d_model),
            ("block_count", self.blocks.len()),
        ] {
            keys.size(name, size);
        }
        let (nheads_kv, widths): (Vec<_>, Vec<_>) =
            self.blocks.iter().map(Block::gguf_sizes).unzip();
        keys.per_layer("attention.head_count_kv", &nheads_kv);
        keys.per_layer("feed_forward_length", &widths);
        // llama.cpp needs the first, and takes it where the second is missing.
        keys.set("attention.layer_norm_epsilon", self.norm_eps);
        keys.set("attention.layer_norm_rms_epsilon", self.norm_eps);
        match kinds.attention {
            Some(attention) => keys.attention(attention)?,
            None => keys.size("attention.head_count", 0),
        }
        if let Some(mixer) = kinds.mamba2 {
            keys.mixer(mixer)?;
        }
        if let Some((moe, shared)) = kinds.moe {
            for (name, size) in [
                ("expert_count", moe.experts),
                ("expert_used_count", moe.used),
                ("expert_feed_forward_length", moe.expert.d_ff),
                ("expert_shared_count", 1),
                ("expert_shared_feed_forward_length", shared.d_ff),
                ("expert_group_count", moe.ngroups),
                ("expert_group_used_count", moe.topk_group),
            ] {
                keys.size(name, size);
            }
            keys.set("expert_weights_norm", moe.normalized);
            keys.set("expert_weights_scale", moe.scale);
            if moe.expert.d_model != self.d_model {
                keys.size("moe_latent_size", moe.expert.d_model);
            }
        }
        Ok(())
    }

    fn to_json(&self) -> Result<Value> {
        let kinds = self.kinds()?;
        let pattern: String = self.blocks.iter().map(Block::letter).collect();
        let mut json = json!({
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "hidden_size": self.d_model,
            "hybrid_override_pattern": pattern,
            "num_hidden_layers": self.blocks.len(),
            "layer_norm_epsilon": shortest(self.norm_eps),
            "max_position_embeddings": self.max_position,
            "residual_in_fp32": true,
            "mlp_hidden_act": "relu2",
        });
        let mut set = |fields: Value| {
            if let (Value::Object(json), Value::Object(fields)) = (&mut json, fields) {
                json.extend(fields);
            }
        };
        if let Some(mixer) = kinds.mamba2 {
            set(json!({
                "mamba_num_heads": mixer.nheads,
                "mamba_head_dim": mixer.headdim,
                "mamba_hidden_act": "silu",
                "n_groups": mixer.ngroups,
                "ssm_state_size": mixer.d_state,
                "conv_kernel": mixer.d_conv,
                "use_bias": mixer.in_bias,
                "mamba_proj_bias": mixer.in_bias,
                "use_conv_bias": mixer.conv_bias,
                "time_step_limit": limit_json(mixer.dt_limit),
            }));
        }
        if let Some(attention) = kinds.attention {
            set(json!({
                "num_attention_heads": attention.nheads,
                "num_key_value_heads": attention.nheads_kv,
                "head_dim": attention.headdim,
                "attention_bias": attention.qkv_bias,
            }));
        }
        if let Some(mlp) = kinds.mlp {
            set(json!({ "intermediate_size": mlp.d_ff, "mlp_bias": mlp.bias }));
        }
        if let Some((moe, shared)) = kinds.moe {
            let latent = Some(moe.expert.d_model).filter(|&width| width != self.d_model);
            set(json!({
                "n_routed_experts": moe.experts,
                "num_experts_per_tok": moe.used,
                "moe_intermediate_size": moe.expert.d_ff,
                "n_shared_experts": 1,
                "moe_shared_expert_intermediate_size": shared.d_ff,
                "moe_latent_size": latent,
                "n_group": moe.ngroups,
                "topk_group": moe.topk_group,
                "norm_topk_prob": moe.normalized,
                "routed_scaling_factor": shortest(moe.scale),
                "mlp_bias": shared.bias,
            }));
        }
        Ok(json)
    }
}

impl Config {
    /// Gives each expert its own tensors where a file has them stacked, `[experts, out, in]`, as
    /// transformers 5 keeps them in memory.
    fn unstack_experts(&self, checkpoint: &mut Checkpoint) {
        let mut tensors: BTreeMap<String, TensorEntry> = BTreeMap::new();
        let mut stacks = Vec::new();
        for (layer, block) in self.blocks.iter().enumerate() {
            let Block::Moe { moe, .. } = block else { continue };
            let (wide, narrow) = (moe.expert.d_ff, moe.expert.d_model);
            for (part, shape) in [("up_proj", [wide, narrow]), ("down_proj", [narrow, wide])] {
                let experts = format!("backbone.layers.{layer}.mixer.experts");
                let name = format!("{experts}.{part}");
                let Some(stack) = checkpoint.get(&name) else { continue };
                let Some(size) = stack.dtype.bytes_of(&shape) else { continue };
                if stack.shape != [&[moe.experts], &shape[..]].concat() {
                    continue; // which the check of all shapes will find
                }
                for expert in 0..moe.experts {
                    let bytes = expert * size..(expert + 1) * size;
                    let Some(data) = stack.data.slice(bytes) else { continue };
                    let entry = TensorEntry { data, shape: shape.to_vec(), ..stack.clone() };
                    tensors.insert(format!("{experts}.{expert}.{part}.weight"), entry);
                }
                stacks.push(name);
            }
        }
        if !stacks.is_empty() {
            checkpoint.retain(|name| !stacks.iter().any(|stack| stack == name));
            let others = checkpoint.iter().map(|(name, entry)| (name.to_owned(), entry.clone()));
            tensors.extend(others);
            checkpoint.replace(tensors);
        }
    }
}
