//! Granite 4 language models (IBM, 2025): Mamba-2 layers with attention at a few places, or attention
//! alone. A gated feed-forward part follows each, in some models with experts beside it.
//!
//! ```text
//!                                                                         ┌ block_sparse_moe ┐
//! h ─┬─ input_layernorm ─ mamba, or self_attn ─ × r + ─┬─ post_attention_layernorm ─┴─── shared_mlp ───┴─ × r + ─ ...   n_layer times
//!    └──────────────────────────────────────────────┘ └───────────────────────────────────────────────────┘
//! ```
//!
//! Four factors belong to the weights: of the embedding, of each part's output (r), of the products of
//! queries and keys (in place of `1 / sqrt(D)`), and a divisor of logits. Attention knows no positions
//! unless the configuration says `rope`.
//!
//! Loads transformers' `GraniteMoeHybridForCausalLM`, and GGUF: `granitehybrid` with mixers (except
//! files of [Bamba](super::bamba)), `granite` and `granitemoe` with attention alone. Older dense models
//! of Granite are `granite` in GGUF too, and are this model. Converting one to a folder makes one of
//! this family.

use super::fields::{Fields, Need::Class, Need::Missing, Need::Required};
use super::gguf::{mlp_table, moe_table, rope_factors};
use super::groups::refuse;
use super::hybrid::{self, Hybrid};
use super::{Family, Frame, MAX_SIZE, Names};
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::{Error, Result};
use crate::nn::{LayerSpec, MlpConfig, MoeConfig, MoePart, Routing, Row};

/// What GGUF calls models with attention alone, and those with experts.
const DENSE: &str = "granite";
const EXPERTS: &str = "granitemoe";

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// All but the feed-forward part.
    pub hybrid: Hybrid,
    /// What every token gets.
    pub shared_mlp: MlpConfig,
    /// The experts beside it.
    pub moe: Option<MoeConfig>,
    /// Factor of the embeddings.
    pub embedding_scale: f32,
    /// Factor of what each part adds to the residual stream.
    pub residual_scale: f32,
    /// What logits are divided by.
    pub logits_scaling: f32,
}

impl Family for Config {
    fn model_types() -> &'static [&'static str] {
        &["granitemoehybrid"]
    }

    fn archs() -> &'static [&'static str] {
        &[hybrid::ARCH, DENSE, EXPERTS]
    }

    fn blank() -> Self {
        Self {
            hybrid: Hybrid::blank(),
            shared_mlp: MlpConfig::swiglu(0, 0),
            moe: None,
            embedding_scale: 1.0,
            residual_scale: 1.0,
            logits_scaling: 1.0,
        }
    }

    fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        let arch = self.gguf_arch();
        let is_lacking = arch == EXPERTS && self.hybrid.attention.rope.is_none();
        let what = "attention without positions in GGUF's granitemoe, which has them always";
        refuse(&[(f.gguf_mut().is_some() && is_lacking, what)])?;
        self.hybrid.fields(f, 1e-6)?;
        f.model("GraniteMoeHybridForCausalLM", "granitemoehybrid");
        let word = |&is_attention: &bool| if is_attention { "attention" } else { "mamba" };
        let words: Vec<&str> = self.hybrid.is_attention.iter().map(word).collect();
        f.constant("layer_types", words);
        let a = &mut self.hybrid.attention;
        let rotates = match f.json() {
            Some(file) => rotates(file)?,
            None => a.rope.is_some(),
        };
        f.constant("position_embedding_type", if rotates { "rope" } else { "nope" });
        factor(f, ["attention_multiplier", "attention.scale"], &mut a.scale)?;
        factor(f, ["embedding_multiplier", "embedding_scale"], &mut self.embedding_scale)?;
        factor(f, ["residual_multiplier", "residual_scale"], &mut self.residual_scale)?;
        factor(f, ["logits_scaling", "logit_scale"], &mut self.logits_scaling)?;
        self.feed_forward(f)?;
        let a = &mut self.hybrid.attention;
        if rotates && f.gguf().is_none() && f.gguf_mut().is_none() {
            let of_file = a.rope.as_ref().map(|rope| rope.rotary_dim);
            if let Some(rotary_dim) = of_file.filter(|&n| f.writes_json() && n != a.headdim) {
                let what = format!(
                    "{rotary_dim} of {} dimensions that rotate in transformers' granitemoehybrid, \
                     where all do",
                    a.headdim
                );
                return Err(Error::Unsupported { what });
            }
            f.rope(&mut a.rope, a.headdim, 1.0)?;
        }
        let rotary_dim = a.rope.as_ref().map_or(a.headdim, |rope| rope.rotary_dim);
        match f.json().filter(|_| rotary_dim != a.headdim) {
            None => Ok(()),
            Some(file) => {
                let reason = format!("expected all {}, found {rotary_dim}", a.headdim);
                Err(file.error("partial_rotary_factor", reason))
            }
        }
    }

    fn arch(&self) -> Option<&'static str> {
        Some(self.gguf_arch())
    }

    fn frame(&self) -> Frame {
        Frame {
            embedding_scale: self.embedding_scale,
            logits_scale: self.logits_scaling.recip(),
            ..self.hybrid.frame(Names::model("model.norm"))
        }
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let (shared, scale) = (&self.shared_mlp, self.residual_scale);
        let feed_forward = |layer: LayerSpec| {
            let layer = layer.norm("post_attention_layernorm");
            let layer = match self.moe.clone() {
                None => layer.and("shared_mlp", shared.clone()),
                Some(moe) => layer
                    .and("block_sparse_moe", MoePart { moe, shared: Some(shared.clone()) })
                    .scaled(1.0, scale)
                    .beside("shared_mlp", shared.clone()),
            };
            layer.scaled(1.0, scale)
        };
        self.hybrid.layers(scale).map(feed_forward).collect()
    }

    /// Gate and up projections are one tensor, experts are stacked:
    ///
    /// | file | parameters |
    /// |---|---|
    /// | `shared_mlp.input_linear` `[2 F, d_model]` | `shared_mlp.gate_proj`, then `up_proj` |
    /// | `shared_mlp.output_linear` | `shared_mlp.down_proj` |
    /// | `block_sparse_moe.input_linear` `[E, 2 F, d_model]` | each expert's `gate_proj`, then `up_proj` |
    /// | `block_sparse_moe.output_linear` `[E, d_model, F]` | each expert's `down_proj` |
    /// | `block_sparse_moe.router.layer` | `block_sparse_moe.gate` |
    fn hf_table(&self) -> Vec<Row> {
        let name = |part: &str| format!("model.layers.#.{part}.weight");
        let both =
            |of: &str| [format!("{of}.gate_proj"), format!("{of}.up_proj")].map(|p| name(&p));
        let experts = "block_sparse_moe.experts.@";
        vec![
            Row::joined(name("shared_mlp.input_linear"), &both("shared_mlp")),
            Row::new(name("shared_mlp.output_linear"), name("shared_mlp.down_proj")),
            Row::joined(name("block_sparse_moe.input_linear"), &both(experts)),
            Row::new(name("block_sparse_moe.output_linear"), name(&format!("{experts}.down_proj"))),
            Row::new(name("block_sparse_moe.router.layer"), name("block_sparse_moe.gate")),
        ]
    }

    fn gguf_table(&self) -> Result<Vec<Row>> {
        let mut table = self.hybrid.gguf_table();
        let suffix = if self.moe.is_some() { "_shexp" } else { "" };
        table.extend(mlp_table("model.layers.#.shared_mlp", suffix));
        table.extend(moe_table("model.layers.#.block_sparse_moe"));
        table.push(Row::new(
            "blk.#.ffn_norm.weight",
            "model.layers.#.post_attention_layernorm.weight",
        ));
        Ok(table)
    }

    fn gguf_given(&self) -> Vec<(&'static str, Vec<f32>)> {
        rope_factors(self.hybrid.attention.rope.as_ref())
    }

    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        checkpoint.rename(|name| {
            let (layer, part) = name.split_once(".block_sparse_moe.")?;
            let part = HF_NAMES.iter().find(|(in_memory, _)| *in_memory == part)?.1;
            Some(format!("{layer}.block_sparse_moe.{part}"))
        })
    }
}

impl Config {
    /// The widths of what every token gets and of the experts, and how many there are of them.
    fn feed_forward(&mut self, f: &mut Fields<'_>) -> Result<()> {
        let d_model = self.hybrid.attention.d_model;
        let of = |moe: Option<&MoeConfig>| {
            moe.map_or([0; 3], |moe| [moe.expert.d_ff, moe.experts, moe.used])
        };
        let [mut d_ff, mut experts, mut used] = of(self.moe.as_ref());
        let shared = ["shared_intermediate_size", "expert_shared_feed_forward_length"];
        let mut d_shared = self.shared_mlp.d_ff;
        if let Some((keys, _)) = f.gguf() {
            d_ff = keys.size("feed_forward_length")?;
            experts = keys.optional("expert_count")?.unwrap_or(0);
            let found = keys.optional(shared[1])?.filter(|&d_ff| d_ff > 0);
            let missing = || keys.error(shared[1], "missing: experts alone are not supported");
            if experts > 0 {
                used = keys.size("expert_used_count")?;
            }
            // Without experts what they share is all there is, whatever the width of the others.
            d_shared =
                if experts == 0 { found.unwrap_or(d_ff) } else { found.ok_or_else(missing)? };
        } else {
            f.size(shared, &mut d_shared, Class(1024))?;
            let is_moe = match f.json() {
                Some(file) => file.usize(&["num_local_experts"], 0..=MAX_SIZE)? != Some(0),
                None => experts > 0,
            };
            // Files of models without experts have the other width here.
            d_ff = if is_moe { d_ff } else { d_shared };
            if is_moe || !f.reads() {
                f.size(["intermediate_size", "feed_forward_length"], &mut d_ff, Required)?;
            }
            let gguf = |name| if is_moe { name } else { "" };
            f.count(["num_local_experts", gguf("expert_count")], &mut experts, Missing(8))?;
            if is_moe || !f.reads() {
                f.size(["num_experts_per_tok", gguf("expert_used_count")], &mut used, Missing(2))?;
            }
        }
        self.shared_mlp = MlpConfig::swiglu(d_model, d_shared);
        self.moe = (experts > 0).then(|| {
            let expert = MlpConfig::swiglu(d_model, d_ff);
            MoeConfig { experts, used, ..MoeConfig::new(d_model, expert, Routing::TopKSoftmax) }
        });
        Ok(())
    }

    /// What GGUF calls a model of these sizes.
    fn gguf_arch(&self) -> &'static str {
        match &self.moe {
            _ if self.hybrid.has_mixers() => hybrid::ARCH,
            None => DENSE,
            Some(_) => EXPERTS,
        }
    }
}

/// Whether positions rotate.
fn rotates(file: &ConfigFile) -> Result<bool> {
    match file.text("position_embedding_type")? {
        None | Some("nope") => Ok(false),
        Some("rope") => Ok(true),
        Some(other) => {
            let reason = format!("expected rope or nope, found {other:?}");
            Err(file.error("position_embedding_type", reason))
        }
    }
}

/// A factor, 1 when missing; GGUF cannot tell 0 from that.
fn factor(f: &mut Fields<'_>, names: [&str; 2], value: &mut f32) -> Result<()> {
    let default = match (names[0], f.gguf()) {
        ("attention_multiplier", Some(_)) => *value,
        _ => 1.0,
    };
    f.float(names, value, Missing(default))?;
    if *value == 0.0 {
        if let Some(file) = f.json() {
            return Err(file.error(names[0], "expected a factor, found 0"));
        }
        *value = default;
    }
    Ok(())
}

/// Names under `block_sparse_moe` that transformers 5 has in memory, and those of its files.
const HF_NAMES: [(&str, &str); 3] = [
    ("experts.gate_up_proj", "input_linear.weight"),
    ("experts.down_proj", "output_linear.weight"),
    ("router.weight", "router.layer.weight"),
];
