//! Kimi Linear language models (Moonshot AI, 2025, arXiv 2510.26692): three layers of Kimi Delta Attention to one of
//! latent attention, no positions, a dense feed-forward part in the first layers and experts in the others.
//!
//! ```text
//!                        ┌ Kimi Delta Attention ┐                               ┌ mlp ───────────────────────┐
//! h ─┬─ input_layernorm ─┴ latent attention ────┴─ + ─┬─ post_attention_layernorm ┴ experts + shared experts ─┴─ + ─ ...
//!    └────────────────────────────────────────────────┘└─────────────────────────────────────────────────────────┘
//! ```
//!
//! Loads `KimiLinearForCausalLM`, with the published keys and those of transformers 5, which also has other names in
//! memory; and GGUF (`kimi-linear`), old files with `attn_kv_b` too. The published lists of layers count from 1.
//!
//! Norms within latent attention add 1e-6 to the mean of squares, and so do those of queries and keys of the delta
//! rule, whatever `rms_norm_eps` says. llama.cpp takes that one.

use serde_json::{Value, json};

use super::fields::{Fields, Need::Class, Need::Or, Need::Required};
use super::gguf::{Keys, mlp_table, moe_table};
use super::groups::{layer_kinds, numbers, refuse};
use super::{Family, Frame, MAX_SIZE, Names, SILU};
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::Result;
use crate::nn::{
    DeltaConfig, How, LatentConfig, LayerSpec, Layout, MlpConfig, MoeConfig, MoePart, Routing, Row,
    Tensors,
};

const LAYER: &str = "model.layers.#";
/// Where published files have the sizes of delta layers, and the lists of both kinds.
const LINEAR: &str = "linear_attn_config";
/// Names of both kinds in lists of transformers.
const KINDS: [&str; 2] = ["linear_attention", "full_attention"];
/// Names of both feed-forward parts in lists of transformers.
const PARTS: [&str; 2] = ["dense", "sparse"];

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Ids that the tokenizer may give; the embedding may have more rows.
    pub vocab_size: usize,
    /// Whether the head is the embedding; `None` when the file does not say.
    pub tie_embeddings: Option<bool>,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Added to the mean of squares of norms, but for those within latent attention.
    pub norm_eps: f32,
    /// Longest context that the model was made for.
    pub max_position: usize,
    /// Which layers are latent attention; the others are delta layers.
    pub is_attention: Vec<bool>,
    /// Which layers have experts.
    pub is_sparse: Vec<bool>,
    /// Of delta layers.
    pub delta: DeltaConfig,
    /// Of the other layers.
    pub attention: LatentConfig,
    /// The feed-forward part of layers without experts.
    pub mlp: MlpConfig,
    /// The experts that are chosen from.
    pub moe: MoeConfig,
    /// The ones that every token gets, as one.
    pub shared: Option<MlpConfig>,
}

impl Family for Config {
    fn model_types() -> &'static [&'static str] {
        &["kimi_linear"]
    }

    fn archs() -> &'static [&'static str] {
        &["kimi-linear"]
    }

    fn blank() -> Self {
        let expert = MlpConfig::swiglu(0, 0);
        Self {
            vocab_size: 0,
            tie_embeddings: None,
            d_model: 0,
            norm_eps: 1e-5,
            max_position: 0,
            is_attention: Vec::new(),
            is_sparse: Vec::new(),
            delta: DeltaConfig::by_channel(0, 0, 0),
            attention: LatentConfig::new(0),
            mlp: expert.clone(),
            moe: MoeConfig::new(0, expert, Routing::Sigmoid),
            shared: None,
        }
    }

    fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        if let Some(file) = f.json() {
            check_unsupported(file)?;
        }
        self.check_gguf(f)?;
        f.model("KimiLinearForCausalLM", "kimi_linear");
        f.size(["hidden_size", "embedding_length"], &mut self.d_model, Required)?;
        f.size(["intermediate_size", "feed_forward_length"], &mut self.mlp.d_ff, Required)?;
        let mut n_layer = self.is_attention.len();
        f.n_layer("num_hidden_layers", &mut n_layer)?;
        if let Some((keys, _)) = f.gguf()
            && keys.next_layers()? > 0
        {
            let reason = "layers that predict more than the next token are not supported";
            return Err(keys.error("nextn_predict_layers", reason));
        }
        f.activation("hidden_act", SILU)?;
        f.norm_eps("rms_norm_eps", &mut self.norm_eps, 1e-5)?;
        let names = ["model_max_length|max_position_embeddings", "context_length"];
        f.length(names, &mut self.max_position, 1 << 20)?;
        self.attention.fields(f)?;
        self.mixer(f, n_layer)?;
        self.experts(f, n_layer)?;
        f.vocabulary(&mut self.vocab_size, &mut self.tie_embeddings)?;
        if f.reads() {
            let widths = [
                &mut self.delta.d_model,
                &mut self.attention.d_model,
                &mut self.mlp.d_model,
                &mut self.moe.d_model,
                &mut self.moe.expert.d_model,
            ];
            for width in widths {
                *width = self.d_model;
            }
            self.delta.norm_eps = self.norm_eps;
        }
        Ok(())
    }

    fn frame(&self) -> Frame {
        Frame::new(Names::model("model.norm"), self.d_model, self.vocab_size, self.norm_eps)
            .tied(self.tie_embeddings)
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let layer = |(&is_attention, &is_sparse): (&bool, &bool)| {
            let layer = LayerSpec::new(self.d_model, self.norm_eps).norm("input_layernorm");
            let layer = if is_attention {
                layer.and("self_attn", self.attention.clone())
            } else {
                layer.and("self_attn", self.delta.clone())
            };
            let layer = layer.norm("post_attention_layernorm");
            if !is_sparse {
                return layer.and("mlp", self.mlp.clone());
            }
            let (moe, shared) = (self.moe.clone(), self.shared.clone());
            let layer = layer.and("block_sparse_moe", MoePart { moe, shared: shared.clone() });
            match shared {
                None => layer,
                Some(shared) => layer.beside("block_sparse_moe.shared_experts", shared),
            }
        };
        self.is_attention.iter().zip(&self.is_sparse).map(layer).collect()
    }

    /// | file | parameters |
    /// |---|---|
    /// | `self_attn.kv_b_proj` `[H (d_key + d_value), rank]` | `self_attn.k_b_proj`, `self_attn.v_b_proj` |
    /// | `self_attn.b_proj`, `o_norm`, `o_proj` of delta layers | `self_attn.in_proj_b`, `norm`, `out_proj` |
    /// | `self_attn.A_log` `[1, 1, H, 1]` | `self_attn.A_log` `[H]` |
    /// | `block_sparse_moe.experts.E.w1`, `w3`, `w2` | each expert's `gate_proj`, `up_proj`, `down_proj` |
    fn hf_table(&self) -> Vec<Row> {
        let mixer = |part: &str| format!("{LAYER}.self_attn.{part}");
        let row = |file: &str, part: &str| Row::new(mixer(file), mixer(part));
        let both = ["k_b_proj.weight", "v_b_proj.weight"].map(mixer);
        let mut table = vec![
            Row::joined(mixer("kv_b_proj.weight"), &both).how(How::Latent),
            row("b_proj.weight", "in_proj_b.weight"),
            row("o_norm.weight", "norm.weight"),
            row("o_proj.weight", "out_proj.weight"),
            row("A_log", "A_log").how(How::Padded([2, 1])),
        ];
        let expert = |part: &str| format!("{LAYER}.block_sparse_moe.experts.@.{part}.weight");
        let experts = [("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")];
        table.extend(experts.map(|(file, part)| Row::new(expert(file), expert(part))));
        table
    }

    fn gguf_table(&self) -> Result<Vec<Row>> {
        let row = |file: &str, part: &str| {
            Row::new(format!("blk.#.{file}"), format!("{LAYER}.{part}.weight"))
        };
        let mixer = |file: &str, part: &str| row(file, &format!("self_attn.{part}"));
        let own = |file: &str, part: &str| {
            Row::new(format!("blk.#.{file}"), format!("{LAYER}.self_attn.{part}"))
        };
        let mut table = vec![
            row("attn_norm.weight", "input_layernorm"),
            row("ffn_norm.weight", "post_attention_layernorm"),
            mixer("attn_q.weight", "q_proj"),
            mixer("attn_q_a.weight", "q_a_proj"),
            mixer("attn_q_a_norm.weight", "q_a_layernorm"),
            mixer("attn_q_b.weight", "q_b_proj"),
            mixer("attn_kv_a_mqa.weight", "kv_a_proj_with_mqa"),
            mixer("attn_kv_a_norm.weight", "kv_a_layernorm"),
            mixer("attn_k_b.weight", "k_b_proj"),
            mixer("attn_v_b.weight", "v_b_proj"),
            mixer("attn_output.weight", "o_proj"),
            mixer("attn_k.weight", "k_proj"),
            mixer("attn_v.weight", "v_proj"),
            mixer("attn_output.weight", "out_proj"),
            mixer("ssm_f_a.weight", "f_a_proj"),
            mixer("ssm_f_b.weight", "f_b_proj"),
            mixer("ssm_g_a.weight", "g_a_proj"),
            mixer("ssm_g_b.weight", "g_b_proj"),
            mixer("ssm_beta.weight", "in_proj_b"),
            mixer("ssm_norm.weight", "norm"),
            own("ssm_a", "A_log").how(How::Rates),
            own("ssm_dt.bias", "dt_bias"),
        ];
        let conv = |of: &str| {
            let part = format!("{of}_conv1d");
            mixer(&format!("ssm_conv1d_{of}.weight"), &part).how(How::Padded([1, 0]))
        };
        table.extend(["q", "k", "v"].map(conv));
        table.extend(mlp_table(&format!("{LAYER}.mlp"), ""));
        table.extend(moe_table(&format!("{LAYER}.block_sparse_moe")));
        table.extend(mlp_table(&format!("{LAYER}.block_sparse_moe.shared_experts"), "_shexp"));
        Ok(table)
    }

    /// Names and joined tensors that transformers 5 has in memory become those of published files, and one matrix of
    /// keys and values of old GGUF files becomes two.
    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        let n_layer = self.is_attention.len();
        if checkpoint.gguf().is_some() {
            let both = ["blk.#.attn_k_b.weight", "blk.#.attn_v_b.weight"].map(str::to_owned);
            let old = Row::joined("blk.#.attn_kv_b.weight", &both).how(How::Latent);
            let new = self.gguf_layout(self.vocab_size, true)?.tensors();
            return Layout::new(&new, &[old], n_layer).cut(checkpoint);
        }
        checkpoint.rename(|name| {
            if let Some((layer, part)) = name.split_once(".self_attn.forget_gate.") {
                return Some(format!("{layer}.self_attn.{part}"));
            }
            let (layer, part) = name.split_once(".mlp.")?;
            let first = part.split('.').next()?;
            let is_sparse = ["gate", "experts", "shared_experts"].contains(&first);
            is_sparse.then(|| format!("{layer}.block_sparse_moe.{part}"))
        })?;
        let name = |part: &str| format!("{LAYER}.{part}");
        let conv = ["q", "k", "v"].map(|of| name(&format!("self_attn.{of}_conv1d.weight")));
        let experts = "block_sparse_moe.experts";
        let expert = |part: &str| name(&format!("{experts}.@.{part}.weight"));
        let joined = [
            Row::joined(name("self_attn.conv1d.weight"), &conv),
            Row::joined(name(&format!("{experts}.gate_up_proj")), &[expert("w1"), expert("w3")]),
            Row::new(name(&format!("{experts}.down_proj")), expert("w2")),
        ];
        let published: Tensors = self.hf_layout(self.vocab_size, true)?.tensors();
        Layout::new(&published, &joined, n_layer).cut(checkpoint)
    }
}

/// Refuses what changes the forward and is of no published model.
fn check_unsupported(file: &ConfigFile) -> Result<()> {
    for (key, expected) in [("mla_use_nope", true), ("attention_bias", false)] {
        if file.bool(&[key])?.is_some_and(|found| found != expected) {
            let reason = format!("expected {expected}, found {}: not supported", !expected);
            return Err(file.error(key, reason));
        }
    }
    for (key, expected) in [("moe_layer_freq", 1), ("num_nextn_predict_layers", 0)] {
        if let Some(found) = file.usize(&[key], 0..=MAX_SIZE)?.filter(|&found| found != expected) {
            return Err(
                file.error(key, format!("expected {expected}, found {found}: not supported"))
            );
        }
    }
    let key = "moe_router_activation_func";
    match file.text(key)?.filter(|&found| found != "sigmoid") {
        None => Ok(()),
        Some(found) => Err(file.error(key, format!("expected sigmoid, found {found:?}"))),
    }
}

impl Config {
    /// Refuses what GGUF has no way to say.
    fn check_gguf(&self, f: &mut Fields<'_>) -> Result<()> {
        if f.gguf_mut().is_none() {
            return Ok(());
        }
        let has = |is: &[bool]| is.contains(&true);
        let dense = self.is_sparse.iter().take_while(|is_sparse| !**is_sparse).count();
        let heads = has(&self.is_attention.iter().map(|is| !is).collect::<Vec<_>>())
            && self.delta.nheads != self.attention.nheads;
        refuse(&[
            (heads, "other heads of delta layers than of attention in GGUF, which has one number"),
            (
                self.is_sparse[dense..].contains(&false),
                "a dense layer after one with experts in GGUF",
            ),
            (
                has(&self.is_sparse) && !self.moe.normalized,
                "weights of experts that are not normalized in GGUF, where they always are",
            ),
        ])
    }

    /// The delta layers, and which they are.
    fn mixer(&mut self, f: &mut Fields<'_>, n_layer: usize) -> Result<()> {
        let delta = &mut self.delta;
        if let Some(file) = f.json() {
            let linear = file.object(LINEAR)?;
            let size = |nested: &str, flat: &str, class: usize| -> Result<usize> {
                let nested = linear.usize(&[nested], 1..=MAX_SIZE)?;
                let flat = file.usize(&[flat], 1..=MAX_SIZE)?;
                Ok(nested.or(flat).unwrap_or(class))
            };
            let width = size("head_dim", "linear_head_dim", 128)?;
            let heads = size("num_heads", "linear_num_heads", 32)?;
            let taps = size("short_conv_kernel_size", "linear_conv_kernel_dim", 4)?;
            *delta = DeltaConfig { d_conv: taps, ..DeltaConfig::by_channel(0, heads, width) };
            self.is_attention = read_kinds(file, &linear, n_layer)?;
        }
        if let Some((keys, _)) = f.gguf() {
            let (width, taps) = (keys.size("kda.head_dim")?, keys.size("ssm.conv_kernel")?);
            let heads = self.attention.nheads;
            let delta = DeltaConfig::by_channel(0, heads, width);
            self.delta = DeltaConfig { d_conv: taps, ..delta };
            let heads = keys.per_layer("attention.head_count_kv", n_layer)?;
            self.is_attention = heads.into_iter().map(|heads| heads > 0).collect();
        }
        if let Some(json) = f.json_mut() {
            let is_delta: Vec<bool> = self.is_attention.iter().map(|is| !is).collect();
            let from_one = |layers: Vec<usize>| layers.iter().map(|i| i + 1).collect::<Vec<_>>();
            json.insert(
                LINEAR.to_owned(),
                json!({
                    "head_dim": self.delta.d_key,
                    "num_heads": self.delta.nheads,
                    "short_conv_kernel_size": self.delta.d_conv,
                    "kda_layers": from_one(numbers(&is_delta)),
                    "full_attn_layers": from_one(numbers(&self.is_attention)),
                }),
            );
        }
        if let Some(keys) = f.gguf_mut() {
            keys.size("kda.head_dim", self.delta.d_key);
            keys.size("ssm.conv_kernel", self.delta.d_conv);
            let heads: Vec<usize> = self.is_attention.iter().map(|&is| usize::from(is)).collect();
            keys.per_layer("attention.head_count_kv", &heads);
        }
        Ok(())
    }

    /// The experts, and which layers have them.
    fn experts(&mut self, f: &mut Fields<'_>, n_layer: usize) -> Result<()> {
        let moe = &mut self.moe;
        let is_gguf = f.gguf().is_some();
        // transformers 4 has null for a model without experts.
        let is_none = |file: &ConfigFile| {
            let keys = ["num_experts", "num_local_experts"];
            keys.iter().any(|key| file.states(key)) && !keys.iter().any(|key| file.has(key))
        };
        let experts = if f.json().is_some_and(is_none) || is_gguf { 0 } else { 256 };
        f.count(["num_experts|num_local_experts", "expert_count"], &mut moe.experts, Or(experts))?;
        let mut dense = self.is_sparse.iter().take_while(|is_sparse| !**is_sparse).count();
        let names = ["first_k_dense_replace", "leading_dense_block_count"];
        f.count(names, &mut dense, Or(usize::from(!is_gguf)))?;
        if f.reads() {
            let has_experts = moe.experts > 0;
            self.is_sparse = (0..n_layer).map(|layer| has_experts && layer >= dense).collect();
        }
        if let Some(file) = f.json() {
            let part = |word: &str| PARTS.iter().position(|part| *part == word).map(|i| i == 1);
            let key = (file, "mlp_layer_types");
            if let Some(parts) = layer_kinds(key, Some(n_layer), part, &PARTS.join(", "))? {
                self.is_sparse = parts;
            }
        }
        if self.is_sparse[dense.min(n_layer)..].contains(&false) {
            let word = |&is_sparse: &bool| PARTS[usize::from(is_sparse)];
            f.constant("mlp_layer_types", self.is_sparse.iter().map(word).collect::<Vec<_>>());
        }
        f.constant("moe_layer_freq", 1);
        if !self.is_sparse.contains(&true) {
            return Ok(());
        }
        let class = |size| if is_gguf { Required } else { Class(size) };
        let used = ["num_experts_per_token|num_experts_per_tok", "expert_used_count"];
        f.size(used, &mut moe.used, class(8))?;
        let width = ["moe_intermediate_size", "expert_feed_forward_length"];
        f.size(width, &mut moe.expert.d_ff, class(1024))?;
        let shared = self.shared.as_ref().map_or(0, |mlp| mlp.d_ff);
        let mut count = shared.checked_div(moe.expert.d_ff).unwrap_or(0);
        let names = ["num_shared_experts|n_shared_experts", "expert_shared_count"];
        f.count(names, &mut count, Or(usize::from(!is_gguf)))?;
        if f.reads() {
            let width = moe.expert.d_ff.saturating_mul(count);
            self.shared = (count > 0).then(|| MlpConfig::swiglu(self.d_model, width));
        }
        f.size(["num_expert_group|n_group", "expert_group_count"], &mut moe.ngroups, Or(1))?;
        f.size(["topk_group", "expert_group_used_count"], &mut moe.topk_group, Or(1))?;
        if is_gguf {
            // GGUF says 0 for what there is not, and the groups that are kept without their number.
            moe.ngroups = moe.ngroups.max(1);
            moe.topk_group = if moe.ngroups == 1 { 1 } else { moe.topk_group.max(1) };
        }
        let mut is_grouped = true;
        f.flag(["use_grouped_topk", ""], &mut is_grouped, Or(true))?;
        if let Some(file) = f.json().filter(|_| !is_grouped && moe.ngroups > 1) {
            let reason = format!("expected true with {} groups of experts", moe.ngroups);
            return Err(file.error("use_grouped_topk", reason));
        }
        let names = ["moe_renormalize|norm_topk_prob", "expert_weights_norm"];
        f.flag(names, &mut moe.normalized, Or(true))?;
        if let Some((keys, _)) = f.gguf().filter(|_| !moe.normalized) {
            let reason =
                "expected true, found false: weights of experts sum to 1 in this architecture";
            return Err(keys.error(names[1], reason));
        }
        f.constant("moe_router_activation_func", "sigmoid");
        f.gguf_constant("expert_gating_func", 2u32);
        let scale = if is_gguf { Or(1.0) } else { Class(2.446) };
        f.float(["routed_scaling_factor", "expert_weights_scale"], &mut moe.scale, scale)?;
        if is_gguf && moe.scale == 0.0 {
            moe.scale = 1.0;
        }
        match f.gguf() {
            Some((keys, _)) => keys.check_sigmoid_gating(),
            None => Ok(()),
        }
    }
}

impl LatentConfig {
    /// Visits the fields of latent attention, as DeepSeek's models named them.
    fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        f.size(["num_attention_heads", "attention.head_count"], &mut self.nheads, Required)?;
        let mut heads = self.nheads;
        f.size(["num_key_value_heads", ""], &mut heads, Or(self.nheads))?;
        if let Some(file) = f.json().filter(|_| heads != self.nheads) {
            let reason = format!("expected {}, one for each head, found {heads}", self.nheads);
            return Err(file.error("num_key_value_heads", reason));
        }
        let class = |size| if f.gguf().is_some() { Required } else { Class(size) };
        let [rank, key, shared, value] = [512, 128, 64, 128].map(class);
        f.size(["kv_lora_rank", "attention.kv_lora_rank"], &mut self.rank, rank)?;
        let mut q_rank = self.q_rank.unwrap_or(0);
        f.count(["q_lora_rank", "attention.q_lora_rank"], &mut q_rank, Or(0))?;
        if f.reads() {
            self.q_rank = Some(q_rank).filter(|&rank| rank > 0);
        } else if self.q_rank.is_none() {
            f.constant("q_lora_rank", Value::Null);
        }
        f.size(["qk_rope_head_dim", "rope.dimension_count"], &mut self.d_shared, shared)?;
        f.size(["v_head_dim", "attention.value_length_mla"], &mut self.d_value, value)?;
        match f.gguf() {
            Some((keys, _)) => self.read_widths(keys)?,
            None => f.size(["qk_nope_head_dim", ""], &mut self.d_key, key)?,
        }
        f.constant("mla_use_nope", true);
        if let Some(keys) = f.gguf_mut() {
            keys.size("attention.key_length_mla", self.d_query());
            keys.size("attention.key_length", self.rank + self.d_shared);
            keys.size("attention.value_length", self.rank);
        }
        Ok(())
    }

    /// The width of a head's own part of a key, which GGUF has together with the shared part.
    fn read_widths(&mut self, keys: &Keys<'_>) -> Result<()> {
        let name = "attention.key_length_mla";
        let both = keys.size(name)?;
        self.d_key =
            both.checked_sub(self.d_shared).filter(|&width| width > 0).ok_or_else(|| {
                let reason = format!(
                    "expected more than the {} that heads share, found {both}",
                    self.d_shared
                );
                keys.error(name, reason)
            })?;
        let [latent, rank] = [self.rank.saturating_add(self.d_shared), self.rank];
        for (name, expected) in [("attention.key_length", latent), ("attention.value_length", rank)]
        {
            if let Some(found) = keys.optional(name)?.filter(|&found| found != expected) {
                let reason = format!("expected {expected}, as the latent has, found {found}");
                return Err(keys.error(name, reason));
            }
        }
        Ok(())
    }
}

/// Which layers are attention: by the published lists, which count from 1, or by the list of transformers 5.
fn read_kinds(file: &ConfigFile, linear: &ConfigFile, n_layer: usize) -> Result<Vec<bool>> {
    let kind = |word: &str| KINDS.iter().position(|kind| *kind == word).map(|i| i == 1);
    let named = layer_kinds((file, "layer_types"), Some(n_layer), kind, &KINDS.join(", "))?;
    let keys = ["kda_layers", "full_attn_layers"];
    if !keys.iter().any(|key| linear.has(key)) {
        let missing = || linear.error(keys[0], "missing (looked for layer_types too)");
        return named.ok_or_else(missing);
    }
    let mut kinds = vec![None; n_layer];
    for (key, is_attention) in keys.into_iter().zip([false, true]) {
        for layer in linear.usizes(key, 1..=n_layer)?.unwrap_or_default() {
            let Some(kind) = kinds.get_mut(layer - 1) else { continue };
            if let Some(before) = kind.replace(is_attention) {
                let other = keys[usize::from(before)];
                let reason = format!("layer {layer} (counted from 1) is in {other} already");
                return Err(linear.error(key, reason));
            }
        }
    }
    if let Some(layer) = kinds.iter().position(Option::is_none) {
        let reason =
            format!("layer {} of {n_layer} (counted from 1) is in neither list", layer + 1);
        return Err(linear.error("kda_layers, full_attn_layers", reason));
    }
    let kinds: Vec<bool> = kinds.into_iter().flatten().collect();
    let differs = |named: &Vec<bool>| (0..n_layer).find(|&i| named[i] != kinds[i]);
    if let Some(layer) = named.as_ref().and_then(differs) {
        let [here, there] = [kinds[layer], !kinds[layer]].map(|is| KINDS[usize::from(is)]);
        let reason = format!("layer {layer} (counted from 0) is {there}, by {LINEAR} {here}");
        return Err(file.error("layer_types", reason));
    }
    Ok(kinds)
}
