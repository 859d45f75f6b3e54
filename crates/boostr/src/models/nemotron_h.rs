//! Nemotron-H language models (NVIDIA, 2025, arXiv 2504.03624): Nemotron-H, Nemotron Nano 2, Nemotron
//! 3.
//!
//! A layer is one thing:
//!
//! - `M`: a Mamba-2 mixer;
//! - `*`: attention without positions;
//! - `-`: a feed-forward part with a squared ReLU and no gate;
//! - `E`: a mixture of such experts, with one that every token gets.
//!
//! A pattern of these letters is the model.
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
//! Loads transformers' `NemotronHForCausalLM`, with names under `backbone.` or `model.` and experts one
//! by one or stacked, and GGUF. Layers that predict more than the next token are left out (`mtp.*`;
//! GGUF's last blocks by `nextn_predict_layers`). Models whose layers differ in the sizes of their
//! experts (Puzzle) are not supported.
//!
//! Steps have no limits unless `time_step_limit` says so. transformers 5.24 ignores that field. It
//! takes `time_step_min` as the lower limit in prefill and none in decoding, as no other program does.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::fields::{Fields, Need::Or, Need::Required};
use super::gguf::{ARCHITECTURE, Keys, attention_table, mixer_table, mlp_table, moe_table};
use super::{Family, Frame, Layer, Names, SILU};
use crate::backend::{Backend, Tensor};
use crate::checkpoint::{Checkpoint, ConfigFile, TensorEntry, gguf};
use crate::error::{Error, Result};
use crate::nn::{
    Attention, AttentionConfig, Batch, LayerSpec, Mamba2Mixer, MixerConfig, Mlp, MlpConfig, Module,
    Moe, MoeConfig, MoePart, Params, RmsNorm, Routing, Row,
};

/// What GGUF calls the family, without experts and with them.
const ARCHS: [&str; 2] = ["nemotron_h", "nemotron_h_moe"];

const NAMES: Names = Names {
    embeddings: "backbone.embeddings",
    layers: "backbone.layers",
    norm: "backbone.norm_f",
    head: "lm_head",
};
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
                let known = KINDS.map(|(_, names)| names).concat().join(", ");
                file.error(key, format!("expected {known}, found {word:?}"))
            })
        };
        return words.iter().map(letter).collect();
    }
    let Some(pattern) = file.text(PATTERN)? else {
        return Err(file.error(PATTERN, "missing (looked for layers_block_type, layer_types too)"));
    };
    let is_unknown = |letter: &char| KINDS.iter().all(|(known, _)| known != letter);
    let unknown: BTreeSet<char> = pattern.chars().filter(is_unknown).collect();
    if !unknown.is_empty() {
        let unknown: String = unknown.into_iter().take(8).collect();
        return Err(file.error(PATTERN, format!("expected M, *, - and E, found {unknown:?}")));
    }
    let n_layer = file.usize(&["num_hidden_layers"], 1..=MAX_LAYERS)?;
    let (found, expected) = (pattern.len(), n_layer.unwrap_or(pattern.len().min(MAX_LAYERS)));
    if found != expected {
        let reason = format!("{found} layers, but num_hidden_layers is {expected}");
        return Err(file.error(PATTERN, reason));
    }
    Ok(pattern.chars().collect())
}

/// Heads of keys and width of the feed-forward part of each layer, by which GGUF tells kinds apart.
fn read_sizes(keys: &Keys<'_>) -> Result<Vec<(usize, usize)>> {
    let (all, extra) = (keys.n_layer()?, keys.optional(NEXT)?.unwrap_or(0));
    if extra >= all {
        return Err(keys.error(NEXT, format!("{extra} of {all} blocks leave no layer")));
    }
    let heads = keys.per_layer("attention.head_count_kv", all)?;
    let widths = keys.per_layer("feed_forward_length", all)?;
    Ok(heads.into_iter().zip(widths).take(all - extra).collect())
}

impl Block {
    /// A layer of the kind that `letter` stands for, its sizes not yet known.
    fn blank(letter: char, d_model: usize, norm_eps: f32) -> Self {
        let mlp = MlpConfig::relu2(d_model, 0);
        match letter {
            'M' => Self::Mamba2(MixerConfig { norm_eps, ..MixerConfig::new(d_model, 0, 0) }),
            '*' => Self::Attention(AttentionConfig::new(d_model, 0, 0, 0)),
            '-' => Self::Mlp(mlp),
            _ => Self::Moe {
                moe: MoeConfig {
                    expert: mlp.clone(),
                    experts: 0,
                    used: 0,
                    routing: Routing::Sigmoid,
                    ngroups: 1,
                    topk_group: 1,
                    normalized: true,
                    scale: 1.0,
                    d_model,
                },
                shared: mlp,
            },
        }
    }

    fn letter(&self) -> char {
        match self {
            Self::Mamba2(_) => 'M',
            Self::Attention(_) => '*',
            Self::Mlp(_) => '-',
            Self::Moe { .. } => 'E',
        }
    }

    /// Visits the fields of all layers of this kind.
    fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        // GGUF has some in lists, or by other numbers.
        let need = if f.gguf().is_some() { Or(0) } else { Required };
        match self {
            Self::Mamba2(m) => {
                f.size(["mamba_num_heads", ""], &mut m.nheads, need)?;
                f.size(["mamba_head_dim", ""], &mut m.headdim, Or(64))?;
                f.constant("mamba_hidden_act", SILU[0]);
                f.size(["n_groups|mamba_n_groups", ""], &mut m.ngroups, Or(8))?;
                f.size(["ssm_state_size", ""], &mut m.d_state, Or(128))?;
                f.size(["conv_kernel|mamba_d_conv", ""], &mut m.d_conv, Or(4))?;
                f.flag(["use_bias|mamba_proj_bias", ""], &mut m.in_bias, Or(false))?;
                m.out_bias = if f.reads() { m.in_bias } else { m.out_bias };
                f.constant("mamba_proj_bias", m.in_bias);
                f.flag(["use_conv_bias|mamba_conv_bias", ""], &mut m.conv_bias, Or(true))?;
                let mut limits = ["time_step_limit", "mamba_dt_limit"].into_iter();
                let limits = limits.find(|key| f.json().is_some_and(|file| file.has(key)));
                f.limits(limits.unwrap_or("time_step_limit"), &mut m.dt_limit)?;
                f.gguf_mixer(m)
            }
            Self::Attention(a) => {
                f.size(["num_attention_heads", "attention.head_count"], &mut a.nheads, Required)?;
                let of_class = f.class_heads_kv(a.nheads)?;
                f.size(["num_key_value_heads", ""], &mut a.nheads_kv, Or(of_class))?;
                let width = if f.gguf().is_some() { a.d_model / a.nheads } else { 128 };
                let names = ["head_dim|attention_head_dim", "attention.key_length"];
                f.size(names, &mut a.headdim, Or(width))?;
                f.value_length(a.headdim)?;
                f.flag(["attention_bias", ""], &mut a.qkv_bias, Or(false))?;
                if f.reads() {
                    a.out_bias = a.qkv_bias;
                    a.scale = (a.headdim as f32).sqrt().recip();
                }
                Ok(())
            }
            Self::Mlp(mlp) => {
                f.size(["intermediate_size", ""], &mut mlp.d_ff, need)?;
                f.flag(["mlp_bias", ""], &mut mlp.bias, Or(false))
            }
            Self::Moe { moe, shared } => moe_fields(f, moe, shared),
        }
    }

    /// Reads what GGUF has for each layer: sizes in lists, and biases by the tensors that there are.
    fn read_gguf(
        &mut self,
        (keys, checkpoint): (&Keys<'_>, &Checkpoint),
        layer: usize,
        (nheads_kv, d_ff): (usize, usize),
    ) -> Result<()> {
        let has = |name: &str| checkpoint.get(&format!("blk.{layer}.{name}")).is_some();
        match self {
            Self::Mamba2(mixer) => mixer.conv_bias = has("ssm_conv1d.bias"),
            Self::Attention(attention) => {
                attention.nheads_kv = nheads_kv;
                attention.qkv_bias = has("attn_q.bias");
                attention.out_bias = has("attn_output.bias");
            }
            Self::Mlp(mlp) => (mlp.d_ff, mlp.bias) = (d_ff, has("ffn_up.bias")),
            Self::Moe { moe, .. } => {
                // Older files only have the width of all experts of a token together.
                let width = keys.optional("expert_feed_forward_length")?;
                moe.expert.d_ff = width.unwrap_or(d_ff / moe.used);
            }
        }
        Ok(())
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

    fn spec(&self) -> LayerSpec {
        match self.clone() {
            Self::Mamba2(mixer) => LayerSpec::of(mixer),
            Self::Attention(attention) => LayerSpec::of(attention),
            Self::Mlp(mlp) => LayerSpec::of(mlp),
            Self::Moe { moe, shared } => LayerSpec::of(MoePart { moe, shared: Some(shared) }),
        }
    }
}

/// Visits the fields of layers with experts.
fn moe_fields(f: &mut Fields<'_>, moe: &mut MoeConfig, shared: &mut MlpConfig) -> Result<()> {
    const USED: [&str; 2] = ["num_experts_per_tok", "expert_used_count"];
    const WIDTH: [&str; 2] = ["moe_intermediate_size", "expert_feed_forward_length"];
    const LATENT: &str = "moe_latent_size";
    if let Some((keys, _)) = f.gguf() {
        let is_list =
            |name: &&str| matches!(keys.metadata.get(&keys.key(name)), Some(gguf::Value::Array(_)));
        if let Some(name) = [USED[1], WIDTH[1]].into_iter().find(is_list) {
            return Err(keys.error(name, PUZZLE));
        }
    }
    let expert = &mut moe.expert;
    let experts = ["n_routed_experts|num_local_experts", "expert_count"];
    f.size(experts, &mut moe.experts, Required)?;
    f.size(USED, &mut moe.used, Required)?;
    let width = if f.gguf().is_some() { Or(0) } else { Required };
    f.size(WIDTH, &mut expert.d_ff, width)?;
    f.constant("n_shared_experts", 1);
    f.gguf_constant("expert_shared_count", 1u32);
    let names = ["moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length"];
    f.size(names, &mut shared.d_ff, Required)?;
    f.constant(LATENT, Value::Null);
    let latent = if f.reads() || expert.d_model != moe.d_model { LATENT } else { "" };
    f.size([latent; 2], &mut expert.d_model, Or(moe.d_model))?;
    f.size(["n_group", "expert_group_count"], &mut moe.ngroups, Or(1))?;
    f.size(["topk_group", "expert_group_used_count"], &mut moe.topk_group, Or(1))?;
    let normalized = Or(f.gguf().is_none());
    f.flag(["norm_topk_prob", "expert_weights_norm"], &mut moe.normalized, normalized)?;
    f.float(["routed_scaling_factor", "expert_weights_scale"], &mut moe.scale, Or(1.0))?;
    f.flag(["mlp_bias", ""], &mut shared.bias, Or(false))?;
    if let Some(file) = f.json().filter(|file| shared.bias && file.has(LATENT)) {
        return Err(file.error("mlp_bias", "not supported with moe_latent_size"));
    }
    if let Some((keys, _)) = f.gguf() {
        // GGUF says 0 for what there is not.
        expert.d_model = if expert.d_model == 0 { moe.d_model } else { expert.d_model };
        moe.scale = if moe.scale == 0.0 { 1.0 } else { moe.scale };
        moe.ngroups = moe.ngroups.max(1);
        moe.topk_group = if moe.ngroups == 1 { 1 } else { keys.size("expert_group_used_count")? };
    }
    Ok(())
}

/// A layer: a norm, and its part. Experts and the one that every token gets stand side by side.
struct Normed<B: Backend> {
    norm: RmsNorm<B>,
    parts: Vec<Box<dyn Module<B>>>,
}

impl<B: Backend> Layer<B> for Normed<B> {
    fn forward(&self, client: &B::Client, h: Tensor<B>, batch: &mut Batch<B>) -> Result<Tensor<B>> {
        let u = self.norm.forward(client, &h)?;
        self.parts.iter().try_fold(h, |h, part| part.add_to(client, &u, (h, 1.0), batch))
    }

    fn weight_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.weight_bytes()).sum()
    }
}

impl Family for Config {
    fn model_types() -> &'static [&'static str] {
        &["nemotron_h"]
    }

    fn archs() -> &'static [&'static str] {
        &ARCHS
    }

    fn blank() -> Self {
        Self {
            vocab_size: 0,
            tie_embeddings: None,
            d_model: 0,
            norm_eps: 1e-5,
            max_position: 0,
            blocks: Vec::new(),
        }
    }

    fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        if let Some(file) = f.json() {
            if file.has("block_configs") {
                return Err(file.error("block_configs", PUZZLE));
            }
            f.activation("mamba_hidden_act", SILU)?;
        }
        f.constant("architectures", vec!["NemotronHForCausalLM"]);
        f.constant("model_type", "nemotron_h");
        f.size(["hidden_size", "embedding_length"], &mut self.d_model, Required)?;
        let pattern: String = self.blocks.iter().map(Block::letter).collect();
        f.constant("hybrid_override_pattern", pattern);
        f.constant("num_hidden_layers", self.blocks.len());
        f.norm_eps("layer_norm_epsilon|rms_norm_eps", &mut self.norm_eps, 1e-5)?;
        // llama.cpp needs this one, and takes it where the other is missing.
        f.gguf_constant("attention.layer_norm_epsilon", self.norm_eps);
        f.context(&mut self.max_position, 4096)?;
        f.constant("residual_in_fp32", true);
        f.activation("mlp_hidden_act", &["relu2"])?;
        self.visit_blocks(f)?;
        f.vocabulary(&mut self.vocab_size, &mut self.tie_embeddings)
    }

    fn name(&self) -> &'static str {
        "nemotron_h"
    }

    fn arch(&self) -> Option<&'static str> {
        let is_moe = self.blocks.iter().any(|block| block.letter() == 'E');
        Some(ARCHS[usize::from(is_moe)])
    }

    fn frame(&self) -> Frame {
        Frame {
            tie_embeddings: self.tie_embeddings,
            ..Frame::new(NAMES, self.d_model, self.vocab_size, self.norm_eps)
        }
    }

    fn layers(&self) -> Vec<LayerSpec> {
        self.blocks.iter().map(Block::spec).collect()
    }

    fn layer<B: Backend>(&self, i: usize, params: &Params<'_, B>) -> Result<Box<dyn Layer<B>>> {
        let norm = RmsNorm::load(&params.under("norm"), self.d_model, self.norm_eps)?;
        let params = params.under("mixer");
        let parts: Vec<Box<dyn Module<B>>> = match &self.blocks[i] {
            Block::Mamba2(mixer) => vec![Box::new(Mamba2Mixer::load(mixer, &params)?)],
            Block::Attention(of) => vec![Box::new(Attention::load(of, &params)?)],
            Block::Mlp(mlp) => vec![Box::new(Mlp::load(mlp, &params)?)],
            Block::Moe { moe, shared } => vec![
                Box::new(Moe::load(moe, &params)?),
                Box::new(Mlp::load(shared, &params.under("shared_experts"))?),
            ],
        };
        Ok(Box::new(Normed { norm, parts }))
    }

    fn gguf_table(&self) -> Result<Vec<Row>> {
        let mut table = vec![Row::new("blk.#.attn_norm.weight", "backbone.layers.#.norm.weight")];
        for kind in self.kinds(true)? {
            match &kind {
                Block::Mamba2(mixer) => table.extend(mixer_table(mixer, MIXER)),
                // As llama.cpp's converter leaves them, although nothing rotates.
                Block::Attention(of) => table.extend(attention_table(of, MIXER, true)),
                Block::Mlp(_) => table.extend(mlp_table(MIXER, "")),
                Block::Moe { .. } => {
                    table.extend(moe_table(MIXER));
                    table.extend(mlp_table(&format!("{MIXER}.shared_experts"), "_shexp"));
                }
            }
        }
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
}

impl Config {
    /// Visits the layers: which there are, and the sizes of each kind.
    fn visit_blocks(&mut self, f: &mut Fields<'_>) -> Result<()> {
        let (mut letters, mut sizes) = (Vec::new(), Vec::new());
        if let Some(file) = f.json() {
            letters = read_kinds(file)?;
        }
        if let Some((keys, _)) = f.gguf() {
            sizes = read_sizes(keys)?;
            let wide = if keys.optional("expert_count")?.unwrap_or(0) > 0 { 'E' } else { '-' };
            let letter = |&size: &(usize, usize)| match size {
                (0, 0) => 'M',
                (_, 0) => '*',
                _ => wide,
            };
            letters = sizes.iter().map(letter).collect();
        }
        if f.reads() {
            let blank = |letter| Block::blank(letter, self.d_model, self.norm_eps);
            self.blocks = letters.into_iter().map(blank).collect();
        }
        let kinds = self.kinds(f.gguf_mut().is_some())?;
        if let Some(keys) = f.gguf_mut() {
            let sizes = self.blocks.iter().map(Block::gguf_sizes);
            let (heads, widths): (Vec<_>, Vec<_>) = sizes.unzip();
            keys.size("block_count", self.blocks.len());
            keys.per_layer("attention.head_count_kv", &heads);
            keys.per_layer("feed_forward_length", &widths);
            keys.size("attention.head_count", 0); // where no attention says more
        }
        for mut kind in kinds {
            kind.fields(f)?;
            let alike = self.blocks.iter_mut().filter(|block| block.letter() == kind.letter());
            alike.for_each(|block| block.clone_from(&kind));
        }
        for (i, (block, sizes)) in self.blocks.iter_mut().zip(sizes).enumerate() {
            f.gguf().map_or(Ok(()), |file| block.read_gguf(file, i, sizes))?;
        }
        Ok(())
    }

    /// One layer of each kind that there is, in the order of [`KINDS`], for a file of GGUF or another.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] when two of a kind differ, as files say it once for all, and for what GGUF has no
    /// place for.
    fn kinds(&self, is_gguf: bool) -> Result<Vec<Block>> {
        let mut kinds = Vec::new();
        for (letter, _) in KINDS {
            let mut alike = self.blocks.iter().filter(|block| block.letter() == letter);
            let Some(first) = alike.next() else { continue };
            if alike.any(|block| block != first) {
                let what = "layers of one kind and different sizes in a file of Nemotron-H".into();
                return Err(Error::Unsupported { what });
            }
            kinds.push(first.clone());
        }
        let has = |letter| kinds.iter().any(|kind| kind.letter() == letter);
        let is_biased = |kind: &Block| matches!(kind, Block::Moe { shared, .. } if shared.bias);
        let lacking = [
            (has('-') && has('E'), "layers with experts beside some without"),
            (kinds.iter().any(is_biased), "biases of experts"),
        ];
        match lacking.iter().find(|(is_there, _)| is_gguf && *is_there) {
            None => Ok(kinds),
            Some((_, what)) => {
                let what = format!("{what} in GGUF, which has no way to say so");
                Err(Error::Unsupported { what })
            }
        }
    }

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
