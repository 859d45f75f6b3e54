//! Sizes of a new model, and the file that describes a run.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::RunConfig;
use crate::error::{Error, Result};

/// The largest width, and the most layers, that a configuration of a model may have.
const MAX_WIDTH: usize = 1 << 24;
const MAX_LAYERS: usize = 10_000;

/// Sizes of a new Mamba-2 model. The fields are the keys of a configuration file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Shape {
    /// Width of the residual stream.
    pub d_model: usize,
    /// Layers.
    pub n_layer: usize,
    /// N
    pub d_state: usize,
    /// P; divides `expand * d_model`.
    pub headdim: usize,
    /// G
    pub ngroups: usize,
    /// Width of the mixers, in widths of the stream.
    pub expand: usize,
    /// Taps of the convolution.
    pub d_conv: usize,
    /// Tokens of the tokenizer.
    pub vocab_size: usize,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            d_model: 192,
            n_layer: 4,
            d_state: 32,
            headdim: 64,
            ngroups: 1,
            expand: 2,
            d_conv: 4,
            vocab_size: 1024,
        }
    }
}

impl Shape {
    /// Shapes by name: `tiny` learns something in a minute, `small` speaks after an hour on a laptop.
    #[must_use]
    pub fn preset(name: &str) -> Option<Self> {
        match name {
            "tiny" => Some(Self { d_model: 128, n_layer: 2, vocab_size: 512, ..Self::default() }),
            "small" => Some(Self::default()),
            "medium" => Some(Self {
                d_model: 384,
                n_layer: 8,
                d_state: 64,
                vocab_size: 4096,
                ..Self::default()
            }),
            _ => None,
        }
    }

    /// Names of [`preset`](Self::preset).
    pub const PRESETS: [&'static str; 3] = ["tiny", "small", "medium"];

    /// Checks every size's range, but for that of the tokenizer.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] with the name of the first field that is out of range.
    pub fn validate(&self) -> Result<()> {
        let Self { d_model, n_layer, d_state, headdim, ngroups, expand, d_conv, .. } = *self;
        for (name, value, most) in [
            ("n_layer", n_layer, MAX_LAYERS),
            ("d_state", d_state, MAX_WIDTH),
            ("headdim", headdim, MAX_WIDTH),
            ("ngroups", ngroups, MAX_WIDTH),
            ("expand", expand, MAX_WIDTH),
            ("d_conv", d_conv, MAX_WIDTH),
            ("d_model", d_model, MAX_WIDTH / expand.max(1)),
        ] {
            if !(1..=most).contains(&value) {
                let reason = format!("expected a whole number from 1 to {most}, found {value}");
                return Err(Error::Argument { name, reason });
            }
        }
        if !(expand * d_model).is_multiple_of(headdim) {
            let reason = format!(
                "expected a width whose {expand}-fold is a multiple of {headdim}, a head's, found {d_model}"
            );
            return Err(Error::Argument { name: "d_model", reason });
        }
        let heads = expand * d_model / headdim;
        if !heads.is_multiple_of(ngroups) {
            let reason = format!("expected a divisor of the {heads} heads, found {ngroups}");
            return Err(Error::Argument { name: "ngroups", reason });
        }
        Ok(())
    }

    /// The `config.json` of such a model, whose texts end with token `eos`.
    #[must_use]
    pub fn to_config(&self, vocab_size: usize, eos: u32) -> Value {
        json!({
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "hidden_size": self.d_model,
            "num_hidden_layers": self.n_layer,
            "num_heads": self.expand * self.d_model / self.headdim.max(1),
            "head_dim": self.headdim,
            "state_size": self.d_state,
            "n_groups": self.ngroups,
            "expand": self.expand,
            "conv_kernel": self.d_conv,
            "vocab_size": vocab_size,
            "tie_word_embeddings": true,
            "use_bias": false,
            "use_conv_bias": true,
            "hidden_act": "silu",
            "layer_norm_epsilon": 1e-5,
            "residual_in_fp32": true,
            "rms_norm": true,
            "eos_token_id": eos,
        })
    }
}

/// What a TOML file of a run says: tables `model` and `run`, all keys optional.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainFile {
    /// The new model.
    pub model: Shape,
    /// How it is trained.
    pub run: RunConfig,
}
