//! LFM2 and LFM2.5 language models (Liquid AI, 2025): gated short convolutions with attention at a few places, each
//! followed by a gated feed-forward part, or by experts (LFM2-MoE) after the first layers.
//!
//! ```text
//! h ─┬─ operator_norm ─ conv, or self_attn ─ + ─┬─ ffn_norm ─ feed_forward, or experts ─ + ─ ...   n_layer times
//!    └──────────────────────────────────────────┘ └─────────────────────────────────────┘
//! ```
//!
//! The last norm is called `embedding_norm`. Queries and keys have a norm of each head. A router's bias chooses experts
//! and does not weigh them.
//!
//! Loads transformers' `Lfm2ForCausalLM` and `Lfm2MoeForCausalLM`, and GGUF. In older configurations the width of the
//! feed-forward part is computed of `block_ff_dim`; files written here state it.

use super::fields::{Fields, Need::Class, Need::Missing, Need::Or, Need::Required};
use super::gguf::{attention_table, mlp_table, moe_table, rope_factors};
use super::groups::{layer_kinds, listed_layers, refuse};
use super::{Family, Frame, MAX_SIZE, Names};
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::{Error, Result};
use crate::nn::{
    AttentionConfig, How, LayerSpec, Layout, MlpConfig, MoeConfig, MoePart, Routing, Row,
    ShortConvConfig,
};

const LAYER: &str = "model.layers.#";
/// Names of both mixers in lists of transformers.
const KINDS: [&str; 2] = ["conv", "full_attention"];
/// What transformers adds to the sum of a token's weights of experts.
const SUM_EPS: f32 = 1e-6;
/// The last norm in GGUF.
const NORM: &str = "token_embd_norm.weight";

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Ids that the tokenizer may give; the embedding may have more rows.
    pub vocab_size: usize,
    /// Whether the head is the embedding; `None` when the file does not say.
    pub tie_embeddings: Option<bool>,
    /// Added to the mean of squares of norms.
    pub norm_eps: f32,
    /// Longest context that the model was made for.
    pub max_position: usize,
    /// Which layers are attention; the others are convolutions.
    pub is_attention: Vec<bool>,
    /// Every convolution.
    pub conv: ShortConvConfig,
    /// Every attention.
    pub attention: AttentionConfig,
    /// The feed-forward part of layers without experts.
    pub mlp: MlpConfig,
    /// The experts of the other layers, if there are any.
    pub moe: Option<MoeConfig>,
    /// Layers at the start that have no experts, where there are any.
    pub dense: usize,
}

impl Family for Config {
    fn model_types() -> &'static [&'static str] {
        &["lfm2", "lfm2_moe"]
    }

    fn archs() -> &'static [&'static str] {
        &["lfm2", "lfm2moe"]
    }

    fn blank() -> Self {
        Self {
            vocab_size: 0,
            tie_embeddings: None,
            norm_eps: 1e-5,
            max_position: 0,
            is_attention: Vec::new(),
            conv: ShortConvConfig { d_model: 0, d_conv: 0, bias: false },
            attention: AttentionConfig::new(0, 0, 0, 0),
            mlp: MlpConfig::swiglu(0, 0),
            moe: None,
            dense: 0,
        }
    }

    fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        let has_experts = match (f.json(), f.gguf()) {
            (Some(file), _) => file.text("model_type")? == Some("lfm2_moe"),
            (_, Some((keys, _))) => keys.arch == "lfm2moe",
            _ => self.moe.is_some(),
        };
        if has_experts {
            f.model("Lfm2MoeForCausalLM", "lfm2_moe");
        } else {
            f.model("Lfm2ForCausalLM", "lfm2");
        }
        let a = &mut self.attention;
        f.size(["hidden_size", "embedding_length"], &mut a.d_model, Required)?;
        let width = a.d_model;
        (a.d_in, self.mlp.d_model, self.conv.d_model) = (width, width, width);
        let mut n_layer = self.is_attention.len();
        f.n_layer("num_hidden_layers", &mut n_layer)?;
        f.norm_eps("norm_eps", &mut self.norm_eps, 1e-5)?;
        f.context(&mut self.max_position, 128_000)?;
        self.mixers(f, n_layer)?;
        self.feed_forward(f, has_experts)?;
        f.vocabulary(&mut self.vocab_size, &mut self.tie_embeddings)?;
        if let Some(file) = f.json() {
            let own = file.bool(&["tie_embedding"])?;
            self.tie_embeddings = own.or(self.tie_embeddings).or(Some(true));
        }
        if let Some(keys) = f.gguf_mut() {
            keys.size("vocab_size", self.vocab_size);
        }
        Ok(())
    }

    fn name(&self) -> &'static str {
        if self.moe.is_some() { "lfm2_moe" } else { "lfm2" }
    }

    fn arch(&self) -> Option<&'static str> {
        Some(if self.moe.is_some() { "lfm2moe" } else { "lfm2" })
    }

    fn frame(&self) -> Frame {
        let names = Names::model("model.embedding_norm");
        Frame::new(names, self.attention.d_model, self.vocab_size, self.norm_eps)
            .tied(self.tie_embeddings)
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let layer = |(i, &is_attention): (usize, &bool)| {
            let layer = LayerSpec::new(self.attention.d_model, self.norm_eps).norm("operator_norm");
            let layer = if is_attention {
                layer.and("self_attn", self.attention.clone())
            } else {
                layer.and("conv", self.conv.clone())
            };
            let layer = layer.norm("ffn_norm");
            match &self.moe {
                Some(moe) if i >= self.dense => {
                    layer.and("feed_forward", MoePart { moe: moe.clone(), shared: None })
                }
                _ => layer.and("feed_forward", self.mlp.clone()),
            }
        };
        self.is_attention.iter().enumerate().map(layer).collect()
    }

    /// | file | parameters |
    /// |---|---|
    /// | `self_attn.out_proj`, `q_layernorm`, `k_layernorm` | `self_attn.o_proj`, `q_norm`, `k_norm` |
    /// | `feed_forward.w1`, `w3`, `w2`, also of experts | `gate_proj`, `up_proj`, `down_proj` |
    /// | `feed_forward.expert_bias` | the router's bias |
    fn hf_table(&self) -> Vec<Row> {
        let row =
            |file: &str, part: &str| Row::new(format!("{LAYER}.{file}"), format!("{LAYER}.{part}"));
        let mut table = vec![
            row("self_attn.out_proj.weight", "self_attn.o_proj.weight"),
            row("self_attn.q_layernorm.weight", "self_attn.q_norm.weight"),
            row("self_attn.k_layernorm.weight", "self_attn.k_norm.weight"),
            row("feed_forward.expert_bias", "feed_forward.gate.e_score_correction_bias"),
        ];
        for (file, part) in [("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")] {
            for under in ["feed_forward", "feed_forward.experts.@"] {
                let [file, part] = [file, part].map(|name| format!("{under}.{name}.weight"));
                table.push(row(&file, &part));
            }
        }
        table
    }

    fn gguf_table(&self) -> Result<Vec<Row>> {
        let moe = self.moe.as_ref();
        let is = |what: &dyn Fn(&MoeConfig) -> bool| moe.is_some_and(what);
        refuse(&[
            (self.conv.bias, "`conv_bias`: GGUF has no biases of convolutions of LFM2"),
            (
                is(&|moe| !moe.normalized),
                "`norm_topk_prob` false in GGUF's lfm2moe, where it is true",
            ),
            (
                is(&|moe| moe.scale != 1.0),
                "`routed_scaling_factor` that is not 1 in GGUF's lfm2moe, which has no key for it",
            ),
        ])?;
        let row = |file: &str, part: &str| {
            Row::new(format!("blk.#.{file}.weight"), format!("{LAYER}.{part}.weight"))
        };
        let mut table = vec![
            row("attn_norm", "operator_norm"),
            row("ffn_norm", "ffn_norm"),
            row("shortconv.in_proj", "conv.in_proj"),
            row("shortconv.conv", "conv.conv").how(How::Taps),
            row("shortconv.out_proj", "conv.out_proj"),
        ];
        table.extend(attention_table(&self.attention, &format!("{LAYER}.self_attn"), false));
        table.extend(mlp_table(&format!("{LAYER}.feed_forward"), ""));
        table.extend(moe_table(&format!("{LAYER}.feed_forward")));
        Ok(table)
    }

    fn gguf_norm(&self) -> &'static str {
        NORM
    }

    fn gguf_given(&self) -> Vec<(&'static str, Vec<f32>)> {
        rope_factors(self.attention.rope.as_ref())
    }

    /// llama.cpp knows no factor of the weights of experts.
    fn gguf_assumes(&self) -> Vec<(&'static str, String)> {
        let moe = self.moe.iter();
        moe.map(|moe| ("routed_scaling_factor", moe.scale.to_string())).collect()
    }

    /// Experts that transformers has in memory in two tensors become those of published files.
    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        if checkpoint.gguf().is_some() || self.moe.is_none() {
            return Ok(());
        }
        let experts = format!("{LAYER}.feed_forward.experts");
        let expert = |part: &str| format!("{experts}.@.{part}.weight");
        let joined = [
            Row::joined(format!("{experts}.gate_up_proj"), &[expert("w1"), expert("w3")]),
            Row::new(format!("{experts}.down_proj"), expert("w2")),
        ];
        let published = self.hf_layout(self.vocab_size, true)?.tensors();
        Layout::new(&published, &joined, self.is_attention.len()).cut(checkpoint)
    }
}

impl Config {
    /// Convolutions and attention, and which layers are which.
    fn mixers(&mut self, f: &mut Fields<'_>, n_layer: usize) -> Result<()> {
        let a = &mut self.attention;
        f.size(["conv_L_cache", "shortconv.l_cache"], &mut self.conv.d_conv, Class(3))?;
        f.flag(["conv_bias", ""], &mut self.conv.bias, Missing(false))?;
        f.size(["num_attention_heads", "attention.head_count"], &mut a.nheads, Class(32))?;
        if let Some((keys, checkpoint)) = f.gguf() {
            (a.nheads_kv, self.is_attention) = keys.heads_kv(n_layer, a.nheads)?;
            let width = keys.optional("attention.key_length")?;
            a.headdim = width.unwrap_or(a.d_model / a.nheads);
            a.window = keys.optional("attention.sliding_window")?.filter(|&window| window > 0);
            a.rope = Some(keys.rope(checkpoint, a.headdim)?);
        } else if let Some(keys) = f.gguf_mut() {
            let heads = |&is: &bool| if is { a.nheads_kv } else { 0 };
            let heads: Vec<usize> = self.is_attention.iter().map(heads).collect();
            keys.per_layer("attention.head_count_kv", &heads);
            if let Some(window) = a.window {
                keys.size("attention.sliding_window", window);
            }
            a.rope.as_ref().map_or(Ok(()), |rope| keys.rope(rope))?;
        } else {
            let window = "a window of LFM2's attention in `config.json`, which has no key for it";
            refuse(&[(a.window.is_some(), window)])?;
            f.size(["num_key_value_heads", ""], &mut a.nheads_kv, Class(8))?;
            let headdim = a.d_model / a.nheads.max(1);
            f.size(["head_dim", ""], &mut a.headdim, Or(headdim))?;
            f.rope(&mut a.rope, a.headdim, 1.0)?;
        }
        if let Some(file) = f.json() {
            self.is_attention = read_kinds(file, n_layer)?;
            let [old, new] = [file.object("rope_scaling")?, file.object("rope_parameters")?];
            let says = [file, &old, &new].iter().any(|part| part.has("rope_theta"));
            if let Some(rope) = a.rope.as_mut().filter(|_| !says) {
                rope.theta = 1e6;
            }
        }
        if f.reads() {
            a.scale = (a.headdim as f32).sqrt().recip();
            a.qk_norm_eps = Some(self.norm_eps);
        }
        let kind = |&is_attention: &bool| KINDS[usize::from(is_attention)];
        f.constant("layer_types", self.is_attention.iter().map(kind).collect::<Vec<_>>());
        Ok(())
    }

    /// Feed-forward parts, and from which layer on there are experts.
    fn feed_forward(&mut self, f: &mut Fields<'_>, has_experts: bool) -> Result<()> {
        let d_ff = &mut self.mlp.d_ff;
        match f.json().filter(|_| !has_experts) {
            Some(file) => *d_ff = read_width(file)?,
            None => f.size(["intermediate_size", "feed_forward_length"], d_ff, Class(7168))?,
        }
        f.constant("block_auto_adjust_ff_dim", false);
        if !has_experts {
            return Ok(());
        }
        let d_model = self.attention.d_model;
        let expert = MlpConfig::swiglu(d_model, 0);
        let blank = MoeConfig {
            normalized: true,
            sum_eps: SUM_EPS,
            ..MoeConfig::new(d_model, expert, Routing::Sigmoid)
        };
        let moe = self.moe.get_or_insert(blank);
        f.size(["num_experts", "expert_count"], &mut moe.experts, Class(32))?;
        f.size(["num_experts_per_tok", "expert_used_count"], &mut moe.used, Class(4))?;
        let width = ["moe_intermediate_size", "expert_feed_forward_length"];
        f.size(width, &mut moe.expert.d_ff, Class(1792))?;
        let dense = ["num_dense_layers", "leading_dense_block_count"];
        f.count(dense, &mut self.dense, if f.gguf().is_some() { Or(0) } else { Missing(2) })?;
        f.flag(["norm_topk_prob", ""], &mut moe.normalized, Missing(true))?;
        f.flag(["use_expert_bias", ""], &mut moe.biased, Missing(true))?;
        f.float(["routed_scaling_factor", ""], &mut moe.scale, Missing(1.0))?;
        f.gguf_constant("expert_gating_func", 2u32);
        let Some((keys, checkpoint)) = f.gguf() else { return Ok(()) };
        moe.biased = checkpoint.names().any(|name| name.ends_with(".exp_probs_b.bias"));
        keys.check_sigmoid_gating()
    }
}

/// Which layers are attention: those of either list, all where there is none.
fn read_kinds(file: &ConfigFile, n_layer: usize) -> Result<Vec<bool>> {
    let kind = |word: &str| KINDS.iter().position(|kind| *kind == word).map(|i| i == 1);
    let key = (file, "layer_types");
    if let Some(kinds) = layer_kinds(key, Some(n_layer), kind, &KINDS.join(" or "))? {
        return Ok(kinds);
    }
    let listed = listed_layers((file, "full_attn_idxs"), n_layer)?;
    Ok(listed.unwrap_or_else(|| vec![true; n_layer]))
}

/// The width of the feed-forward part, which older files have transformers compute: two thirds of the width that they
/// state, times a factor, up to a multiple. A factor that is null leaves out both.
fn read_width(file: &ConfigFile) -> Result<usize> {
    const FACTOR: &str = "block_ffn_dim_multiplier";
    let stated = file.usize(&["block_ff_dim"], 1..=MAX_SIZE)?;
    let width = match stated {
        Some(width) => width,
        None => file.usize(&["intermediate_size"], 1..=MAX_SIZE)?.unwrap_or(12_288),
    };
    if !file.bool(&["block_auto_adjust_ff_dim"])?.unwrap_or(true) {
        return Ok(width);
    }
    let width = 2 * width / 3;
    if file.states(FACTOR) && !file.has(FACTOR) {
        return Ok(width);
    }
    let factor = file.double(&[FACTOR], 0.0..=1e6)?.unwrap_or(1.0);
    let multiple = file.usize(&["block_multiple_of"], 1..=MAX_SIZE)?.unwrap_or(256);
    let width = (factor * width as f64) as usize;
    match width.checked_next_multiple_of(multiple).filter(|width| (1..=MAX_SIZE).contains(width)) {
        Some(width) => Ok(width),
        None => {
            let reason = format!("makes a width of {width}, expected 1 to {MAX_SIZE}");
            Err::<_, Error>(file.error(FACTOR, reason))
        }
    }
}
