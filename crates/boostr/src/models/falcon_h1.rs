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

use super::fields::{Fields, Need::Class, Need::Missing, Need::Or};
use super::gguf::{attention_table, mixer_table, mlp_table};
use super::groups::{check_heads, mamba_d_head, refuse};
use super::{Family, Frame, Names};
use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::nn::{AttentionConfig, How, LayerSpec, MixerConfig, MlpConfig, RopeConfig, Row};

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
            max_position: 8192,
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
        let (to_json, to_gguf) = (f.writes_json(), f.gguf_mut().is_some());
        let factors = a.rope.as_ref().and_then(RopeConfig::factors);
        refuse(&[
            (
                to_json && a.qkv_bias != a.out_bias,
                "biases of some of attention's projections in transformers, which has all or none",
            ),
            (to_gguf && a.out_bias, "a bias of o_proj in GGUF, whose falcon-h1 is run without it"),
            (
                to_gguf && factors.is_some(),
                "factors of single frequencies in GGUF, whose falcon-h1 is run without them",
            ),
        ])?;
        f.model("FalconH1ForCausalLM", "falcon_h1");
        let (norm_eps, context) = (&mut self.norm_eps, &mut self.max_position);
        f.transformer((a, mlp), &mut self.n_layer, norm_eps, context)?;
        f.biases(false, (a, mlp))?;
        m.d_model = a.d_model;
        visit_mixer(f, m, self.norm_eps)?;
        f.float(["embedding_multiplier", ""], &mut self.embedding_multiplier, Missing(1.0))?;
        f.float(["lm_head_multiplier", ""], &mut self.lm_head_multiplier, Missing(1.0))?;
        f.float(["key_multiplier", ""], &mut a.key_scale, Missing(1.0))?;
        f.float(["attention_in_multiplier", ""], &mut self.attention_in_multiplier, Missing(1.0))?;
        f.float(
            ["attention_out_multiplier", ""],
            &mut self.attention_out_multiplier,
            Missing(1.0),
        )?;
        f.float(["ssm_in_multiplier", ""], &mut m.in_scale, Missing(1.0))?;
        f.factors("ssm_multipliers", &mut m.section_scales)?;
        f.float(["ssm_out_multiplier", ""], &mut self.ssm_out_multiplier, Missing(1.0))?;
        let mut of_mlp = [mlp.gate_scale, self.down_multiplier];
        f.factors("mlp_multipliers", &mut of_mlp)?;
        [mlp.gate_scale, self.down_multiplier] = of_mlp;
        f.rope(&mut a.rope, a.headdim, 1.0)?;
        f.vocabulary(&mut self.vocab_size, &mut self.tie_embeddings)
    }

    fn frame(&self) -> Frame {
        let names = Names::model("model.final_layernorm");
        Frame {
            embedding_scale: self.embedding_multiplier,
            logits_scale: self.lm_head_multiplier,
            ..Frame::new(names, self.mixer.d_model, self.vocab_size, self.norm_eps)
                .tied(self.tie_embeddings)
        }
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let layer = LayerSpec::new(self.mixer.d_model, self.norm_eps)
            .norm("input_layernorm")
            .and("mamba", self.mixer.clone())
            .scaled(1.0, self.ssm_out_multiplier)
            .and("self_attn", self.attention.clone())
            .scaled(self.attention_in_multiplier, self.attention_out_multiplier)
            .norm("pre_ff_layernorm")
            .and("feed_forward", self.mlp.clone())
            .scaled(1.0, self.down_multiplier);
        vec![layer; self.n_layer]
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
    let mut d_ssm = m.d_inner();
    f.flag(["projectors_bias", ""], &mut m.out_bias, Or(false))?;
    f.flag(["mamba_proj_bias", ""], &mut m.in_bias, Or(false))?;
    f.flag(["mamba_conv_bias", ""], &mut m.conv_bias, Or(true))?;
    if let Some(file) = f.json() {
        let channels = f.channels("mamba_expand", m)?;
        // Null is what follows from the width; a file without it has that of the class.
        let default = if file.states("mamba_d_ssm") { channels } else { 1024 };
        f.size(["mamba_d_ssm", ""], &mut d_ssm, Or(default))?;
        f.size(["mamba_n_heads", ""], &mut m.nheads, Class(128))?;
        m.headdim = mamba_d_head(file, "a width or \"auto\"", d_ssm / m.nheads)?;
        check_heads((file, "mamba_n_heads"), m, ("mamba_d_ssm", d_ssm))?;
    }
    f.constant("mamba_d_ssm", d_ssm);
    f.constant("mamba_n_heads", m.nheads);
    f.constant("mamba_d_head", m.headdim);
    f.size(["mamba_n_groups", ""], &mut m.ngroups, Missing(1))?;
    f.size(["mamba_d_state", ""], &mut m.d_state, Missing(256))?;
    f.size(["mamba_d_conv", ""], &mut m.d_conv, Missing(4))?;
    f.gguf_mixer(m)?;
    if f.gguf().is_some() {
        f.has("mamba_rms_norm", "blk.0.ssm_norm.weight", &mut m.rms_norm, false)?;
    } else {
        f.flag(["mamba_rms_norm", ""], &mut m.rms_norm, Or(false))?;
    }
    f.flag(["mamba_norm_before_gate", ""], &mut m.norm_before_gate, Or(f.json().is_some()))?;
    // Without a norm there is no order, whatever the file says.
    m.norm_before_gate &= m.rms_norm;
    f.limits("time_step_limit", &mut m.dt_limit)?;
    if f.json().is_some() {
        m.norm_eps = norm_eps;
    }
    Ok(())
}
