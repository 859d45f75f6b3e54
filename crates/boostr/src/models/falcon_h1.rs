//! Falcon-H1 language models (Falcon LLM team, 2025, arXiv 2507.22448).
//!
//! Every layer has attention and a Mamba-2 mixer side by side, both of one norm, and a gated
//! feed-forward part after them. Fixed factors, the muP multipliers, scale where other models leave the
//! size to the weights. They are of the embeddings, of the input and output of each part, of the keys,
//! of the five sections of the mixer's projection, of the gate and of the logits. The mixer's norm is
//! optional.
//!
//! ```text
//!                        ┌ mamba ───────────── * ssm_out ───────┐
//! h ─┬─ input_layernorm ─┴ * attention_in ─ self_attn ─ * out ─ + ─┬─ pre_ff_layernorm ─ feed_forward ─ + ─ ...
//!    └──────────────────────────────────────────────────────────┘  └──────────────────────────────────┘
//! ```
//!
//! Loads transformers' `FalconH1ForCausalLM`, and GGUF. GGUF has no place for multipliers: they are in
//! its weights. So a model of a GGUF file, and a folder made of one, has none (all are 1).

use serde_json::Value;

use super::fields::{Fields, Need::Or, Need::Required};
use super::gguf::{attention_table, mixer_table, mlp_table};
use super::{Family, Frame, Layer, Names, SILU};
use crate::backend::{Backend, Tensor};
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::{Error, Result};
use crate::nn::{
    Attention, AttentionConfig, Batch, How, LayerSpec, Mamba2Mixer, MixerConfig, Mlp, MlpConfig,
    Params, RmsNorm, RopeConfig, Row,
};
use crate::ops::ActivationOps;

const NAMES: Names = Names {
    embeddings: "model.embed_tokens",
    layers: "model.layers",
    norm: "model.final_layernorm",
    head: "lm_head",
};

/// Sizes of a model, and its multipliers.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Layers.
    pub n_layer: usize,
    /// Ids that the tokenizer may give; the embedding may have more rows.
    pub vocab_size: usize,
    /// Whether the head is the embedding; `None` when the file does not say.
    pub tie_embeddings: Option<bool>,
    /// Added to the mean of squares of norms.
    pub norm_eps: f32,
    /// Longest context that the model was made for.
    pub max_position: usize,
    /// Factor of the embeddings.
    pub embedding_multiplier: f32,
    /// Factor of the logits.
    pub lm_head_multiplier: f32,
    /// Factor of what attention gets.
    pub attention_in_multiplier: f32,
    /// Factor of what attention gives.
    pub attention_out_multiplier: f32,
    /// Factor of what the mixer gives.
    pub ssm_out_multiplier: f32,
    /// Factor of what the feed-forward part gives, the second of `mlp_multipliers`.
    pub down_multiplier: f32,
    /// Every layer's attention, with `key_multiplier`.
    pub attention: AttentionConfig,
    /// Every layer's mixer, with `ssm_in_multiplier` and `ssm_multipliers`.
    pub mixer: MixerConfig,
    /// Every layer's feed-forward part, with the first of `mlp_multipliers`.
    pub mlp: MlpConfig,
}

struct Block<B: Backend> {
    input_layernorm: RmsNorm<B>,
    mamba: Mamba2Mixer<B>,
    self_attn: Attention<B>,
    pre_ff_layernorm: RmsNorm<B>,
    feed_forward: Mlp<B>,
    /// `[d_model]`, all `attention_in_multiplier`; `None` where that is 1.
    attention_in: Option<Tensor<B>>,
    /// Factors of what mixer, attention and feed-forward part give.
    out_scales: [f32; 3],
}

impl<B: Backend> Layer<B> for Block<B> {
    fn forward(&self, client: &B::Client, h: Tensor<B>, batch: &mut Batch<B>) -> Result<Tensor<B>> {
        let [of_mamba, of_attention, of_mlp] = self.out_scales;
        let u = self.input_layernorm.forward(client, &h)?;
        let h = self.mamba.forward_onto(client, &u, (h, of_mamba), batch)?;
        let u = match &self.attention_in {
            None => u,
            Some(factors) => client.scale_columns(&u, factors)?,
        };
        let h = self.self_attn.forward_onto(client, &u, (h, of_attention), batch)?;
        let u = self.pre_ff_layernorm.forward(client, &h)?;
        self.feed_forward.forward_onto(client, &u, h, of_mlp)
    }

    fn weight_bytes(&self) -> usize {
        let mixers = self.mamba.weight_bytes() + self.self_attn.weight_bytes();
        mixers + self.feed_forward.weight_bytes()
    }
}

impl Family for Config {
    fn model_types() -> &'static [&'static str] {
        &["falcon_h1"]
    }

    fn archs() -> &'static [&'static str] {
        &["falcon-h1"]
    }

    fn blank() -> Self {
        Self {
            n_layer: 0,
            vocab_size: 0,
            tie_embeddings: None,
            norm_eps: 1e-5,
            max_position: 0,
            embedding_multiplier: 1.0,
            lm_head_multiplier: 1.0,
            attention_in_multiplier: 1.0,
            attention_out_multiplier: 1.0,
            ssm_out_multiplier: 1.0,
            down_multiplier: 1.0,
            attention: AttentionConfig::new(0, 0, 0, 0),
            mixer: MixerConfig::new(0, 0, 0),
            mlp: MlpConfig::swiglu(0, 0),
        }
    }

    fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        let (a, m, mlp) = (&mut self.attention, &mut self.mixer, &mut self.mlp);
        if f.writes_json() && a.qkv_bias != a.out_bias {
            let what =
                "biases of some of attention's projections in transformers, which has all or none";
            return Err(Error::Unsupported { what: what.into() });
        }
        if f.gguf_mut().is_some() {
            let factors = a.rope.as_ref().and_then(RopeConfig::factors);
            let lacking = [
                (a.out_bias, "a bias of o_proj in GGUF, whose falcon-h1 is run without it"),
                (
                    factors.is_some(),
                    "factors of single frequencies in GGUF, whose falcon-h1 is run without them",
                ),
            ];
            if let Some((_, what)) = lacking.iter().find(|(is_there, _)| *is_there) {
                return Err(Error::Unsupported { what: (*what).into() });
            }
        }
        f.constant("architectures", vec!["FalconH1ForCausalLM"]);
        f.constant("model_type", "falcon_h1");
        f.size(["hidden_size", "embedding_length"], &mut a.d_model, Required)?;
        (a.d_in, mlp.d_model) = (a.d_model, a.d_model);
        f.n_layer("num_hidden_layers", &mut self.n_layer)?;
        f.heads(a)?;
        f.size(["intermediate_size", "feed_forward_length"], &mut mlp.d_ff, Required)?;
        f.activation("hidden_act", SILU)?;
        f.norm_eps("rms_norm_eps", &mut self.norm_eps, 1e-5)?;
        f.context(&mut self.max_position, 8192)?;
        f.has("attention_bias", "blk.0.attn_q.bias", &mut a.qkv_bias, false)?;
        if f.reads() {
            let of_gguf = |(_, checkpoint): (_, &Checkpoint)| {
                checkpoint.get("blk.0.attn_output.bias").is_some()
            };
            a.out_bias = f.gguf().map_or(a.qkv_bias, of_gguf);
            m.d_model = a.d_model;
        }
        f.has("mlp_bias", "blk.0.ffn_up.bias", &mut mlp.bias, false)?;
        visit_mixer(f, m, self.norm_eps)?;
        f.float(["embedding_multiplier", ""], &mut self.embedding_multiplier, Or(1.0))?;
        f.float(["lm_head_multiplier", ""], &mut self.lm_head_multiplier, Or(1.0))?;
        f.float(["key_multiplier", ""], &mut a.key_scale, Or(1.0))?;
        f.float(["attention_in_multiplier", ""], &mut self.attention_in_multiplier, Or(1.0))?;
        f.float(["attention_out_multiplier", ""], &mut self.attention_out_multiplier, Or(1.0))?;
        f.float(["ssm_in_multiplier", ""], &mut m.in_scale, Or(1.0))?;
        f.factors("ssm_multipliers", &mut m.section_scales)?;
        f.float(["ssm_out_multiplier", ""], &mut self.ssm_out_multiplier, Or(1.0))?;
        let mut of_mlp = [mlp.gate_scale, self.down_multiplier];
        f.factors("mlp_multipliers", &mut of_mlp)?;
        [mlp.gate_scale, self.down_multiplier] = of_mlp;
        f.rope(&mut a.rope, a.headdim, 1.0)?;
        f.vocabulary(&mut self.vocab_size, &mut self.tie_embeddings)
    }

    fn name(&self) -> &'static str {
        "falcon_h1"
    }

    fn arch(&self) -> Option<&'static str> {
        Some("falcon-h1")
    }

    fn frame(&self) -> Frame {
        Frame {
            tie_embeddings: self.tie_embeddings,
            embedding_scale: self.embedding_multiplier,
            logits_scale: self.lm_head_multiplier,
            ..Frame::new(NAMES, self.mixer.d_model, self.vocab_size, self.norm_eps)
        }
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let layer = LayerSpec::of(self.mixer.clone());
        vec![layer.and(self.attention.clone()).and(self.mlp.clone()); self.n_layer]
    }

    fn layer<B: Backend>(&self, _: usize, params: &Params<'_, B>) -> Result<Box<dyn Layer<B>>> {
        let width = self.mixer.d_model;
        let norm = |name| RmsNorm::load(&params.under(name), width, self.norm_eps);
        Ok(Box::new(Block {
            input_layernorm: norm("input_layernorm")?,
            mamba: Mamba2Mixer::load(&self.mixer, &params.under("mamba"))?,
            self_attn: Attention::load(&self.attention, &params.under("self_attn"))?,
            pre_ff_layernorm: norm("pre_ff_layernorm")?,
            feed_forward: Mlp::load(&self.mlp, &params.under("feed_forward"))?,
            attention_in: params.factors(&[(width, self.attention_in_multiplier)])?,
            out_scales: [
                self.ssm_out_multiplier,
                self.attention_out_multiplier,
                self.down_multiplier,
            ],
        }))
    }

    fn gguf_folds(&self) -> bool {
        true
    }

    fn gguf_table(&self) -> Result<Vec<Row>> {
        let mut table = mixer_table(&self.mixer, "model.layers.#.mamba");
        table.extend(attention_table(&self.attention, "model.layers.#.self_attn", false));
        table.extend(mlp_table("model.layers.#.feed_forward", ""));
        table.extend([
            Row::new("blk.#.attn_norm.weight", "model.layers.#.input_layernorm.weight"),
            // The one norm of GGUF without the ending.
            Row::new("blk.#.ffn_norm", "model.layers.#.pre_ff_layernorm.weight"),
        ]);
        Ok(table.into_iter().map(|row| self.folded(row)).collect())
    }

    fn gguf_table_scales(&self) -> [f32; 2] {
        [self.embedding_multiplier, self.lm_head_multiplier]
    }

    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        // Some files keep what follows from the configuration.
        let follows = [".rotary_emb.inv_freq", ".mamba.mup_vector"];
        checkpoint.retain(|name| !follows.iter().any(|end| name.ends_with(end)));
        Ok(())
    }
}

impl Config {
    /// A row of GGUF's table with the multipliers in it.
    ///
    /// Where a part's input is scaled, its bias is not; where its output is, both are.
    fn folded(&self, row: Row) -> Row {
        let (key, attention_in) = (self.attention.key_scale, self.attention_in_multiplier);
        let factor = match row.file.trim_start_matches("blk.#.") {
            "attn_q.weight" | "attn_v.weight" => attention_in,
            "attn_k.weight" => key * attention_in,
            "attn_k.bias" => key,
            "attn_output.weight" | "attn_output.bias" => self.attention_out_multiplier,
            "ssm_in.weight" => {
                let mixer = &self.mixer;
                let factors = mixer.section_scales.map(|factor| mixer.in_scale * factor);
                return row.how(How::Scaled(mixer.sections().into_iter().zip(factors).collect()));
            }
            "ssm_out.weight" => self.ssm_out_multiplier,
            "ffn_gate.weight" | "ffn_gate.bias" => self.mlp.gate_scale,
            "ffn_down.weight" | "ffn_down.bias" => self.down_multiplier,
            _ => return row,
        };
        row.how(How::Times(factor))
    }
}

/// The mixer but for its factors and the width of the model.
fn visit_mixer(f: &mut Fields<'_>, m: &mut MixerConfig, norm_eps: f32) -> Result<()> {
    let (mut d_ssm, d_model) = (m.d_inner(), m.d_model);
    f.flag(["projectors_bias", ""], &mut m.out_bias, Or(false))?;
    f.flag(["mamba_proj_bias", ""], &mut m.in_bias, Or(false))?;
    f.flag(["mamba_conv_bias", ""], &mut m.conv_bias, Or(true))?;
    if let Some(file) = f.json() {
        let mut expand = 0;
        f.size(["mamba_expand", ""], &mut expand, Or(2))?;
        f.size(["mamba_d_ssm", ""], &mut d_ssm, Or(d_model.saturating_mul(expand)))?;
        f.size(["mamba_n_heads", ""], &mut m.nheads, Required)?;
        m.headdim = headdim(file)?.unwrap_or(d_ssm / m.nheads);
        if m.nheads.saturating_mul(m.headdim) != d_ssm {
            let [heads, headdim] = [m.nheads, m.headdim];
            let reason =
                format!("{heads} heads of {headdim} are not mamba_d_ssm = {d_ssm} channels");
            return Err(file.error("mamba_n_heads", reason));
        }
    }
    f.constant("mamba_d_ssm", d_ssm);
    f.constant("mamba_n_heads", m.nheads);
    f.constant("mamba_d_head", m.headdim);
    f.size(["mamba_n_groups", ""], &mut m.ngroups, Or(1))?;
    f.size(["mamba_d_state", ""], &mut m.d_state, Or(256))?;
    f.size(["mamba_d_conv", ""], &mut m.d_conv, Or(4))?;
    f.gguf_mixer(m)?;
    f.has("mamba_rms_norm", "blk.0.ssm_norm.weight", &mut m.rms_norm, false)?;
    f.flag(["mamba_norm_before_gate", ""], &mut m.norm_before_gate, Or(f.json().is_some()))?;
    // Without a norm there is no order, whatever the file says.
    m.norm_before_gate &= m.rms_norm;
    f.limits("time_step_limit", &mut m.dt_limit)?;
    if f.json().is_some() {
        m.norm_eps = norm_eps;
    }
    Ok(())
}

/// The width of a head, which a file may leave to the number of heads.
fn headdim(file: &ConfigFile) -> Result<Option<usize>> {
    let width = file.get(&["mamba_d_head"], "a width or \"auto\"", |value| match value {
        Value::String(text) => (text == "auto").then_some(None),
        width => Some(Some(usize::try_from(width.as_u64()?).ok()?)),
    })?;
    Ok(width.flatten())
}
