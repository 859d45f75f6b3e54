//! Mamba-2 language models (Dao and Gu, 2024, arXiv 2405.21060).
//!
//! Unlike Mamba-1, each head has one scalar decay, b and c come straight from the input projection and
//! are shared by groups of heads, so the sequence is computed by matrix products; and a gated norm
//! stands before the output projection.
//!
//! ```text
//! ids ─ embeddings ─ h ─┬────────────── + ─ ... ─ norm_f ─ lm_head ─ logits
//!                       └ norm ─ mixer ─┘
//!                         n_layer times
//! ```
//!
//! Loads transformers' `Mamba2ForCausalLM`, the layout of mamba_ssm (`state-spaces/mamba2-*`), the
//! original release of Mamba-Codestral, and GGUF; see the tables at the foot of the file.

use serde_json::{Value, json};

use super::gguf::{Keys, KeysMut, mixer_table};
use super::{
    Decoder, Family, Frame, MAX_SIZE, Names, SILU, expand_of, expect_activation, limit_json,
    read_limit, shortest,
};
use crate::backend::{Backend, Tensor};
use crate::checkpoint::gguf::Metadata;
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::{Error, Result};
use crate::nn::{Batch, LayerSpec, Mamba2Mixer, MixerConfig, Params, RmsNorm, Row, Tensors};

/// What `config.json` calls this family; files of mamba_ssm and Codestral do not say.
pub(super) const MODEL_TYPES: &[&str] = &["mamba2"];
/// What GGUF calls it.
pub(super) const ARCHS: &[&str] = &["mamba2"];

const NAMES: Names =
    Names { embeddings: "backbone.embeddings", norm: "backbone.norm_f", head: "lm_head" };

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

/// Whether this is the configuration of a release that has no `model_type` of its own.
pub(super) fn is_other_dialect(file: &ConfigFile) -> bool {
    file.has("dim") || file.has("ssm_cfg") || file.has("d_model")
}

impl Config {
    pub(super) fn read(file: &ConfigFile) -> Result<Self> {
        match file.text("model_type")? {
            Some("mamba2") => Self::read_hf(file),
            _ if file.has("dim") => Self::read_codestral(file),
            _ => Self::read_mamba_ssm(file),
        }
    }

    fn read_hf(file: &ConfigFile) -> Result<Self> {
        expect_activation(file, "hidden_act", SILU)?;
        let size = |keys: &[&str], default| -> Result<usize> {
            Ok(file.usize(keys, 1..=MAX_SIZE)?.unwrap_or(default))
        };
        let d_model = file.required(&["hidden_size", "d_model"], 1..=MAX_SIZE)?;
        let d_inner = d_model.saturating_mul(size(&["expand"], 2)?);
        let headdim = size(&["head_dim"], 64)?;
        let nheads = size(&["num_heads"], d_inner / headdim)?;
        if nheads.saturating_mul(headdim) != d_inner {
            let reason = format!(
                "{nheads} heads of {headdim} are not expand * hidden_size = {d_inner} channels"
            );
            return Err(file.error("num_heads", reason));
        }
        let bias = file.bool(&["use_bias"])?.unwrap_or(false);
        let eps = file.float(&["layer_norm_epsilon", "rms_norm_eps"], f32::MIN_POSITIVE..=1.0)?;
        Ok(Self {
            n_layer: file.required(&["num_hidden_layers", "n_layer"], 1..=10_000)?,
            vocab_size: file.required(&["vocab_size"], 1..=MAX_SIZE)?,
            tie_embeddings: file.bool(&["tie_word_embeddings"])?,
            norm_eps: eps.unwrap_or(1e-5),
            pad_vocab_size_multiple: 1,
            mixer: MixerConfig {
                ngroups: size(&["n_groups"], 8)?,
                d_state: size(&["state_size"], 128)?,
                d_conv: size(&["conv_kernel"], 4)?,
                in_bias: bias,
                out_bias: bias,
                conv_bias: file.bool(&["use_conv_bias"])?.unwrap_or(true),
                dt_limit: read_limit(file, "time_step_limit")?,
                norm_before_gate: file.bool(&["norm_before_gate"])?.unwrap_or(false),
                norm_eps: eps.unwrap_or(1e-5),
                ..MixerConfig::new(d_model, nheads, headdim)
            },
        })
    }

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
        if !d_inner.is_multiple_of(headdim) {
            let reason = format!("heads of {headdim} do not divide {d_inner} channels");
            return Err(ssm.error("headdim", reason));
        }
        Ok(Self {
            n_layer: file.required(&["n_layer"], 1..=10_000)?,
            vocab_size: file.required(&["vocab_size"], 1..=MAX_SIZE)?,
            tie_embeddings: Some(file.bool(&["tie_embeddings"])?.unwrap_or(true)),
            norm_eps: 1e-5,
            pad_vocab_size_multiple: file
                .usize(&["pad_vocab_size_multiple"], 1..=MAX_SIZE)?
                .unwrap_or(8),
            mixer: MixerConfig {
                ngroups: size(&["ngroups"], 1)?,
                d_state: size(&["d_state"], 128)?,
                d_conv: size(&["d_conv"], 4)?,
                in_bias: bias,
                out_bias: bias,
                conv_bias: ssm.bool(&["conv_bias"])?.unwrap_or(true),
                dt_limit: read_limit(&ssm, "dt_limit")?,
                norm_before_gate: ssm.bool(&["norm_before_gate"])?.unwrap_or(false),
                ..MixerConfig::new(d_model, d_inner / headdim, headdim)
            },
        })
    }

    fn read_codestral(file: &ConfigFile) -> Result<Self> {
        let d_model = file.required(&["dim"], 1..=MAX_SIZE)?;
        let (d_inner, headdim) = (d_model.saturating_mul(2), 64);
        if !d_inner.is_multiple_of(headdim) {
            let reason = format!("heads of {headdim} do not divide {d_inner} channels");
            return Err(file.error("dim", reason));
        }
        Ok(Self {
            n_layer: file.required(&["n_layers"], 1..=10_000)?,
            vocab_size: file.required(&["vocab_size"], 1..=MAX_SIZE)?,
            tie_embeddings: Some(file.bool(&["tie_embeddings"])?.unwrap_or(false)),
            norm_eps: 1e-5,
            pad_vocab_size_multiple: file
                .usize(&["pad_vocab_size_multiple"], 1..=MAX_SIZE)?
                .unwrap_or(1),
            mixer: MixerConfig {
                ngroups: file.usize(&["n_groups"], 1..=MAX_SIZE)?.unwrap_or(8),
                ..MixerConfig::new(d_model, d_inner / headdim, headdim)
            },
        })
    }

    pub(super) fn read_gguf(keys: &Keys<'_>) -> Result<Self> {
        Ok(Self {
            n_layer: keys.n_layer()?,
            vocab_size: keys.vocab_size()?,
            tie_embeddings: None,
            norm_eps: keys.norm_eps()?,
            pad_vocab_size_multiple: 1,
            mixer: keys.mixer()?,
        })
    }
}

struct Layer<B: Backend> {
    norm: RmsNorm<B>,
    mixer: Mamba2Mixer<B>,
}

/// The layers of a model.
pub(super) struct Mamba2<B: Backend>(Vec<Layer<B>>);

impl<B: Backend> Mamba2<B> {
    pub(super) fn load(config: &Config, params: &Params<'_, B>) -> Result<Self> {
        let layers = params.under("backbone").under("layers");
        let layers = (0..config.n_layer).map(|layer| {
            let params = layers.under(&layer.to_string());
            Ok(Layer {
                norm: RmsNorm::load(&params.under("norm"), config.norm_eps)?,
                mixer: Mamba2Mixer::load(&config.mixer, &params.under("mixer"))?,
            })
        });
        Ok(Self(layers.collect::<Result<_>>()?))
    }
}

impl<B: Backend> Decoder<B> for Mamba2<B> {
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
        h = layer.mixer.forward_onto(client, &u, (h, 1.0), batch)?;
        Ok(h)
    }

    fn weight_bytes(&self) -> usize {
        self.0.iter().map(|layer| layer.mixer.weight_bytes()).sum()
    }
}

// Layouts of files

impl Family for Config {
    fn name(&self) -> &'static str {
        "mamba2"
    }

    fn arch(&self) -> Option<&'static str> {
        Some("mamba2")
    }

    fn frame(&self) -> Frame {
        Frame {
            names: NAMES,
            d_model: self.mixer.d_model,
            vocab_size: self.vocab_size,
            pad_vocab_size_multiple: self.pad_vocab_size_multiple,
            tie_embeddings: self.tie_embeddings,
            norm_eps: self.norm_eps,
            embedding_scale: 1.0,
            logits_scale: 1.0,
        }
    }

    fn layers(&self) -> Vec<LayerSpec> {
        vec![LayerSpec::of(self.mixer.clone()); self.n_layer]
    }

    fn parameters(&self, rows: usize, with_head: bool) -> Tensors {
        let mut tensors = Tensors::default();
        let width = self.mixer.d_model;
        NAMES.expect(&mut tensors, rows, width, with_head);
        for layer in 0..self.n_layer {
            tensors.add(format!("backbone.layers.{layer}.norm.weight"), &[width]);
            self.mixer.expect(&mut tensors, &format!("backbone.layers.{layer}.mixer"));
        }
        tensors
    }

    fn gguf_table(&self) -> Result<Vec<Row>> {
        let mut table = mixer_table(&self.mixer, "backbone.layers.#.mixer");
        table.push(Row::new("blk.#.attn_norm.weight", "backbone.layers.#.norm.weight"));
        Ok(table)
    }

    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        checkpoint.rename(hf_name)
    }

    fn write_gguf(&self, metadata: &mut Metadata) -> Result<()> {
        let mut keys = KeysMut::new(metadata, "mamba2");
        for (name, size) in [
            ("context_length", 1 << 20), // as llama.cpp writes: the state has no limit
            ("embedding_length", self.mixer.d_model),
            ("feed_forward_length", 0),
            ("attention.head_count", 0),
            ("block_count", self.n_layer),
        ] {
            keys.size(name, size);
        }
        keys.mixer(&self.mixer)?;
        keys.set("attention.layer_norm_rms_epsilon", self.mixer.norm_eps);
        Ok(())
    }

    fn to_json(&self) -> Result<Value> {
        let mixer = &self.mixer;
        if mixer.in_bias != mixer.out_bias {
            let what =
                "a bias of one of the mixer's projections in transformers, which has both or none";
            return Err(Error::Unsupported { what: what.into() });
        }
        let expand = expand_of(mixer)?;
        Ok(json!({
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "hidden_size": mixer.d_model,
            "num_hidden_layers": self.n_layer,
            "num_heads": mixer.nheads,
            "head_dim": mixer.headdim,
            "expand": expand,
            "n_groups": mixer.ngroups,
            "state_size": mixer.d_state,
            "conv_kernel": mixer.d_conv,
            "use_bias": mixer.in_bias,
            "use_conv_bias": mixer.conv_bias,
            "hidden_act": "silu",
            "layer_norm_epsilon": shortest(mixer.norm_eps),
            "residual_in_fp32": true,
            "rms_norm": true,
            "time_step_limit": limit_json(mixer.dt_limit),
            "norm_before_gate": mixer.norm_before_gate,
        }))
    }
}

/// Names of other dialects in transformers' names:
///
/// | dialect | name | here |
/// |---|---|---|
/// | Codestral's release | `model.backbone.*`, `model.lm_head.*` | without `model.` |
/// | saved again by a newer transformers | `model.layers.*`, `model.norm_f.*` | `backbone.*` |
/// | mamba_ssm, older transformers | `backbone.embedding.weight` | `backbone.embeddings.weight` |
fn hf_name(name: &str) -> Option<String> {
    let new = match name.strip_prefix("model.") {
        Some(rest) if rest.starts_with("backbone.") || rest.starts_with("lm_head.") => rest.into(),
        Some(rest) => format!("backbone.{rest}"),
        None => name.to_string(),
    };
    let new = match new.as_str() {
        "backbone.embedding.weight" => "backbone.embeddings.weight".into(),
        _ => new,
    };
    (new != name).then_some(new)
}
