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

use std::collections::BTreeSet;

use super::fields::{Fields, Need::Class, Need::Missing, Need::Or, Need::Required};
use super::gguf::{
    Keys, attention_table, drop_next_layers, is_next_layer, mixer_table, mlp_table, moe_table,
};
use super::groups::{MAX_LAYERS, PUZZLE, layer_kinds, refuse};
use super::{Family, Frame, LeftOut, Names, SILU};
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::{Error, Result};
use crate::nn::{
    AttentionConfig, LayerSpec, Layout, MixerConfig, MlpConfig, MoeConfig, MoePart, Routing, Row,
};

/// What GGUF calls the family, without experts and with them.
const ARCHS: [&str; 2] = ["nemotron_h", "nemotron_h_moe"];

/// The parameters of a layer's one part.
const MIXER: &str = "backbone.layers.#.mixer";

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
        let letter = |word: &str| {
            KINDS.iter().find(|(_, words)| words.contains(&word)).map(|(letter, _)| *letter)
        };
        let expected = KINDS.map(|(_, words)| words).concat().join(", ");
        if let Some(letters) = layer_kinds((file, key), None, letter, &expected)? {
            return Ok(letters);
        }
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
    let (all, next) = (keys.n_layer()?, keys.next_layers()?);
    let heads = keys.per_layer("attention.head_count_kv", all)?;
    let widths = keys.per_layer("feed_forward_length", all)?;
    Ok(heads.into_iter().zip(widths).take(all - next).collect())
}

impl Block {
    /// A layer of the kind that `letter` stands for, its sizes not yet known.
    fn blank(letter: char, d_model: usize, norm_eps: f32) -> Self {
        let mlp = MlpConfig::relu2(d_model, 0);
        match letter {
            'M' => Self::Mamba2(MixerConfig { norm_eps, ..MixerConfig::new(d_model, 0, 0) }),
            '*' => Self::Attention(AttentionConfig::new(d_model, 0, 0, 0)),
            '-' => Self::Mlp(mlp),
            _ => {
                let moe = MoeConfig::new(d_model, mlp.clone(), Routing::Sigmoid);
                Self::Moe { moe: MoeConfig { normalized: true, ..moe }, shared: mlp }
            }
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
        let is_gguf = f.gguf().is_some();
        let need = if is_gguf { Or(0) } else { Required };
        match self {
            Self::Mamba2(m) => {
                let heads = if is_gguf { Or(0) } else { Class(128) };
                f.size(["mamba_num_heads", ""], &mut m.nheads, heads)?;
                f.size(["mamba_head_dim", ""], &mut m.headdim, Missing(64))?;
                f.constant("mamba_hidden_act", SILU[0]);
                f.size(["n_groups|mamba_n_groups", ""], &mut m.ngroups, Missing(8))?;
                f.size(["ssm_state_size", ""], &mut m.d_state, Missing(128))?;
                f.size(["conv_kernel|mamba_d_conv", ""], &mut m.d_conv, Missing(4))?;
                f.flag(["use_bias|mamba_proj_bias", ""], &mut m.in_bias, Missing(false))?;
                m.out_bias = if f.reads() { m.in_bias } else { m.out_bias };
                f.constant("mamba_proj_bias", m.in_bias);
                f.flag(["use_conv_bias|mamba_conv_bias", ""], &mut m.conv_bias, Missing(true))?;
                f.limits("time_step_limit|mamba_dt_limit", &mut m.dt_limit)?;
                f.gguf_mixer(m)
            }
            Self::Attention(a) => {
                f.size(["num_attention_heads", "attention.head_count"], &mut a.nheads, Required)?;
                let of_class = f.class_heads_kv(a.nheads)?;
                f.size(["num_key_value_heads", ""], &mut a.nheads_kv, Missing(of_class))?;
                let width = if f.gguf().is_some() { a.d_model / a.nheads } else { 128 };
                let names = ["head_dim|attention_head_dim", "attention.key_length"];
                f.size(names, &mut a.headdim, Missing(width))?;
                f.value_length(a.headdim)?;
                f.flag(["attention_bias", ""], &mut a.qkv_bias, Missing(false))?;
                if f.reads() {
                    a.out_bias = a.qkv_bias;
                    a.scale = (a.headdim as f32).sqrt().recip();
                }
                Ok(())
            }
            Self::Mlp(mlp) => {
                f.size(["intermediate_size", ""], &mut mlp.d_ff, need)?;
                f.flag(["mlp_bias", ""], &mut mlp.bias, Missing(false))
            }
            Self::Moe { moe, shared } => f.experts(moe, shared),
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

    /// A layer of this with the norm before it. Experts and the one that every token gets stand side by side.
    fn spec(&self, d_model: usize, norm_eps: f32) -> LayerSpec {
        let layer = LayerSpec::new(d_model, norm_eps).norm("norm");
        match self.clone() {
            Self::Mamba2(mixer) => layer.and("mixer", mixer),
            Self::Attention(attention) => layer.and("mixer", attention),
            Self::Mlp(mlp) => layer.and("mixer", mlp),
            Self::Moe { moe, shared } => layer
                .and("mixer", MoePart { moe, shared: Some(shared.clone()) })
                .beside("mixer.shared_experts", shared),
        }
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
        f.model("NemotronHForCausalLM", "nemotron_h");
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

    fn arch(&self) -> Option<&'static str> {
        let is_moe = self.blocks.iter().any(|block| block.letter() == 'E');
        Some(ARCHS[usize::from(is_moe)])
    }

    fn frame(&self) -> Frame {
        Frame::new(Names::BACKBONE, self.d_model, self.vocab_size, self.norm_eps)
            .tied(self.tie_embeddings)
    }

    fn layers(&self) -> Vec<LayerSpec> {
        self.blocks.iter().map(|block| block.spec(self.d_model, self.norm_eps)).collect()
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

    fn left_out(&self, name: &str) -> Option<LeftOut> {
        let is_next = name.starts_with("mtp.") || is_next_layer(name, self.blocks.len());
        is_next.then_some(LeftOut::NextTokens)
    }

    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        if checkpoint.gguf().is_some() {
            return drop_next_layers(checkpoint, self.blocks.len());
        }
        checkpoint.retain(|name| self.left_out(name).is_none());
        checkpoint.rename(Names::in_backbone)?;
        // Experts in one tensor, `[experts, out, in]`, as transformers 5 keeps them in memory.
        let stack = |part: &str| {
            let experts = format!("{MIXER}.experts");
            Row::new(format!("{experts}.{part}"), format!("{experts}.@.{part}.weight"))
        };
        let parameters = self.parameters(self.vocab_size, true)?;
        let stacks = ["up_proj", "down_proj"].map(stack);
        Layout::new(&parameters, &stacks, self.blocks.len()).cut(checkpoint)
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
        let beside = "layers with experts beside some without in GGUF, which has no way to say so";
        let biases = "biases of experts in GGUF, which has no way to say so";
        refuse(&[
            (is_gguf && has('-') && has('E'), beside),
            (is_gguf && kinds.iter().any(is_biased), biases),
        ])?;
        Ok(kinds)
    }
}
