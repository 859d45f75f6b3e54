//! Mamba-2 language models (Dao and Gu, 2024, arXiv 2405.21060).
//!
//! Unlike Mamba-1, each head has one scalar decay. b and c come straight from the input projection, and
//! groups of heads share them. A gated norm stands before the output projection.
//!
//! ```text
//! ids ─ embeddings ─ h ─┬────────────── + ─ ... ─ norm_f ─ lm_head ─ logits
//!                       └ norm ─ mixer ─┘
//!                         n_layer times
//! ```
//!
//! Loads transformers' `Mamba2ForCausalLM`, the layout of mamba_ssm (`state-spaces/mamba2-*`), the
//! original release of Mamba-Codestral, and GGUF.

use super::fields::{Fields, Need::Missing, Need::Required, read_limits};
use super::gguf::mixer_table;
use super::groups::{MAX_LAYERS, check_heads, refuse};
use super::{Family, Frame, MAX_SIZE, Names, SILU};
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::{Error, Result};
use crate::nn::{LayerSpec, MixerConfig, Row};

/// Sizes of a model.
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
    /// Rows of the embedding are a multiple of this.
    pub pad_vocab_size_multiple: usize,
    /// Every layer's mixer.
    pub mixer: MixerConfig,
}

impl Family for Config {
    fn model_types() -> &'static [&'static str] {
        &["mamba2"]
    }

    fn archs() -> &'static [&'static str] {
        &["mamba2"]
    }

    fn blank() -> Self {
        Self {
            n_layer: 0,
            vocab_size: 0,
            tie_embeddings: None,
            norm_eps: 1e-5,
            pad_vocab_size_multiple: 1,
            mixer: MixerConfig::new(0, 0, 0),
        }
    }

    fn fields(&mut self, f: &mut Fields<'_>) -> Result<()> {
        let m = &mut self.mixer;
        let what =
            "a bias of one of the mixer's projections in transformers, which has both or none";
        refuse(&[(f.writes_json() && m.in_bias != m.out_bias, what)])?;
        f.model("Mamba2ForCausalLM", "mamba2");
        f.gguf_constant("context_length", 1u32 << 20); // as llama.cpp writes: the state has no limit
        f.size(["hidden_size|d_model", "embedding_length"], &mut m.d_model, Required)?;
        f.gguf_constant("feed_forward_length", 0u32);
        f.gguf_constant("attention.head_count", 0u32);
        f.n_layer("num_hidden_layers|n_layer", &mut self.n_layer)?;
        f.size(["num_heads", ""], &mut m.nheads, Missing(0))?;
        f.size(["head_dim", ""], &mut m.headdim, Missing(64))?;
        let d_inner = f.channels("expand", m)?;
        if let Some(file) = f.json() {
            m.nheads = if m.nheads == 0 { d_inner / m.headdim } else { m.nheads };
            check_heads((file, "num_heads"), m, ("expand * hidden_size", d_inner))?;
        }
        f.size(["n_groups", ""], &mut m.ngroups, Missing(8))?;
        f.size(["state_size", ""], &mut m.d_state, Missing(128))?;
        f.size(["conv_kernel", ""], &mut m.d_conv, Missing(4))?;
        f.flag(["use_bias", ""], &mut m.in_bias, Missing(false))?;
        m.out_bias = if f.reads() { m.in_bias } else { m.out_bias };
        f.flag(["use_conv_bias", ""], &mut m.conv_bias, Missing(true))?;
        f.activation("hidden_act", SILU)?;
        f.norm_eps("layer_norm_epsilon|rms_norm_eps", &mut m.norm_eps, 1e-5)?;
        f.constant("residual_in_fp32", true);
        f.constant("rms_norm", true);
        f.limits("time_step_limit", &mut m.dt_limit)?;
        f.flag(["norm_before_gate", ""], &mut m.norm_before_gate, Missing(false))?;
        f.gguf_mixer(m)?;
        self.norm_eps = m.norm_eps;
        f.vocabulary(&mut self.vocab_size, &mut self.tie_embeddings)
    }

    /// Releases of mamba_ssm and Codestral have no `model_type` of their own.
    fn is_json(file: &ConfigFile, model_type: Option<&str>) -> bool {
        let is_other_dialect = file.has("dim") || file.has("ssm_cfg") || file.has("d_model");
        match model_type {
            None | Some("mamba") => is_other_dialect,
            Some(kind) => kind == "mamba2",
        }
    }

    fn read(file: &ConfigFile) -> Result<Self> {
        match file.text("model_type")? {
            Some("mamba2") => {
                let mut config = Self::blank();
                config.fields(&mut Fields::from_json(file))?;
                Ok(config)
            }
            _ if file.has("dim") => Self::read_codestral(file),
            _ => Self::read_mamba_ssm(file),
        }
    }

    fn frame(&self) -> Frame {
        let frame = Frame::new(Names::BACKBONE, self.mixer.d_model, self.vocab_size, self.norm_eps);
        let pad_vocab_size_multiple = self.pad_vocab_size_multiple;
        Frame { pad_vocab_size_multiple, ..frame.tied(self.tie_embeddings) }
    }

    fn layers(&self) -> Vec<LayerSpec> {
        let layer = LayerSpec::new(self.mixer.d_model, self.norm_eps);
        vec![layer.norm("norm").and("mixer", self.mixer.clone()); self.n_layer]
    }

    fn gguf_table(&self) -> Result<Vec<Row>> {
        let mut table = mixer_table(&self.mixer, "backbone.layers.#.mixer");
        table.push(Row::new("blk.#.attn_norm.weight", "backbone.layers.#.norm.weight"));
        Ok(table)
    }

    /// Names of other dialects in transformers' names:
    ///
    /// | dialect | name | here |
    /// |---|---|---|
    /// | Codestral's release | `model.backbone.*`, `model.lm_head.*` | without `model.` |
    /// | saved again by a newer transformers | `model.layers.*`, `model.norm_f.*` | `backbone.*` |
    /// | mamba_ssm, older transformers | `backbone.embedding.weight` | `backbone.embeddings.weight` |
    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        checkpoint.rename(|name| {
            let new = Names::in_backbone(name);
            match new.as_deref().unwrap_or(name) {
                "backbone.embedding.weight" => Some("backbone.embeddings.weight".into()),
                _ => new,
            }
        })
    }
}

// Other dialects

impl Config {
    fn read_mamba_ssm(file: &ConfigFile) -> Result<Self> {
        let ssm = file.object("ssm_cfg")?;
        match ssm.text("layer")? {
            Some("Mamba2") => {}
            other => {
                let found = other.unwrap_or("nothing, which means Mamba1");
                let what = format!(
                    "layer type {} in `{}` (supported: Mamba2)",
                    found.escape_debug(),
                    file.path().display()
                );
                return Err(Error::Unsupported { what });
            }
        }
        if file.list_len("attn_layer_idx")?.unwrap_or(0) > 0 {
            return Err(file.error("attn_layer_idx", "attention layers are not supported"));
        }
        if file.usize(&["d_intermediate"], 0..=MAX_SIZE)?.unwrap_or(0) > 0 {
            return Err(file.error("d_intermediate", "MLP layers are not supported"));
        }
        if file.bool(&["rms_norm"])? == Some(false) {
            return Err(file.error("rms_norm", "layers with LayerNorm are not supported"));
        }
        let size = |keys: &[&str], default| -> Result<usize> {
            Ok(ssm.usize(keys, 1..=MAX_SIZE)?.unwrap_or(default))
        };
        let d_model = file.required(&["d_model"], 1..=MAX_SIZE)?;
        let d_inner = d_model.saturating_mul(size(&["expand"], 2)?);
        if let Some(d_ssm) = ssm.usize(&["d_ssm"], 1..=MAX_SIZE)?.filter(|&d| d != d_inner) {
            let reason = format!("expected expand * d_model = {d_inner}, found {d_ssm}");
            return Err(ssm.error("d_ssm", reason));
        }
        let bias = ssm.bool(&["bias"])?.unwrap_or(false);
        let headdim = size(&["headdim"], 64)?;
        let mixer = MixerConfig {
            ngroups: size(&["ngroups"], 1)?,
            d_state: size(&["d_state"], 128)?,
            d_conv: size(&["d_conv"], 4)?,
            in_bias: bias,
            out_bias: bias,
            conv_bias: ssm.bool(&["conv_bias"])?.unwrap_or(true),
            dt_limit: read_limits(&ssm, "dt_limit")?,
            norm_before_gate: ssm.bool(&["norm_before_gate"])?.unwrap_or(false),
            ..MixerConfig::new(d_model, nheads((&ssm, "headdim"), d_inner, headdim)?, headdim)
        };
        Self::of_release(file, "n_layer", mixer, (true, 8))
    }

    fn read_codestral(file: &ConfigFile) -> Result<Self> {
        let d_model = file.required(&["dim"], 1..=MAX_SIZE)?;
        let (d_inner, headdim) = (d_model.saturating_mul(2), 64);
        let mixer = MixerConfig {
            ngroups: file.usize(&["n_groups"], 1..=MAX_SIZE)?.unwrap_or(8),
            ..MixerConfig::new(d_model, nheads((file, "dim"), d_inner, headdim)?, headdim)
        };
        Self::of_release(file, "n_layers", mixer, (false, 1))
    }

    /// What stands around the mixers; `tied` and `pad` are for files that do not say.
    fn of_release(
        file: &ConfigFile,
        n_layer: &str,
        mixer: MixerConfig,
        (tied, pad): (bool, usize),
    ) -> Result<Self> {
        let multiple = file.usize(&["pad_vocab_size_multiple"], 1..=MAX_SIZE)?;
        Ok(Self {
            n_layer: file.required(&[n_layer], 1..=MAX_LAYERS)?,
            vocab_size: file.required(&["vocab_size"], 1..=MAX_SIZE)?,
            tie_embeddings: Some(file.bool(&["tie_embeddings"])?.unwrap_or(tied)),
            pad_vocab_size_multiple: multiple.unwrap_or(pad),
            mixer,
            ..Self::blank()
        })
    }
}

/// How many heads of `headdim` the channels make.
fn nheads((file, key): (&ConfigFile, &str), d_inner: usize, headdim: usize) -> Result<usize> {
    if d_inner.is_multiple_of(headdim) {
        return Ok(d_inner / headdim);
    }
    Err(file.error(key, format!("heads of {headdim} do not divide {d_inner} channels")))
}
