//! One architecture, one file. Models open no file and hold no state of a sequence.
//!
//! | family | `model_type` | GGUF |
//! |---|---|---|
//! | [`mamba2`] | `mamba2`, files of mamba_ssm and Codestral | `mamba2` |
//! | [`llama`] | `llama`, `mistral`, `qwen2`, `qwen3` | `llama`, `qwen2`, `qwen3` |
//! | [`bamba`] | `bamba` | `granitehybrid` |
//! | [`granite_hybrid`] | `granitemoehybrid` | `granitehybrid`, `granite`, `granitemoe` |
//! | [`falcon_h1`] | `falcon_h1` | `falcon-h1` |
//! | [`nemotron_h`] | `nemotron_h` | `nemotron_h`, `nemotron_h_moe` |
//! | [`zamba2`] | `zamba2` | none |
//!
//! A family is one description ([`Family`]): its fields, its layers and how they load, its names in files. It takes
//! rows through a [`Layer`]; what is the same for all stands once, in [`Model`]. Which families there are is a
//! value, [`Families`], to which a program may add its own.

pub mod bamba;
mod config;
pub mod falcon_h1;
mod families;
mod family;
pub mod fields;
mod fingerprint;
mod gguf;
pub mod granite_hybrid;
mod hybrid;
pub mod llama;
pub mod mamba2;
mod model;
pub mod nemotron_h;
mod state;
pub mod zamba2;

pub use config::Config;
pub use families::{Entry, Families};
pub use family::{Family, Frame, Names};
pub use fields::Fields;
pub(crate) use fingerprint::Fingerprint;
pub use gguf::{Keys, KeysMut, attention_table, mixer_table, mlp_table, moe_table, rope_factors};
pub use hybrid::Hybrid;
pub use model::{Context, Layer, Logits, Model, PIECE, Run};
pub use state::State;

use crate::error::{Error, Result};
use crate::nn::MixerConfig;

/// Largest size that a configuration may name.
pub const MAX_SIZE: usize = 1 << 24;

/// Names of the activation that most families have.
const SILU: &[&str] = &["silu", "swish"];

/// By what transformers multiplies the width for the channels of a mixer.
fn expand_of(mixer: &MixerConfig) -> Result<usize> {
    let (inner, width) = (mixer.d_inner(), mixer.d_model);
    if !inner.is_multiple_of(width) {
        let what =
            format!("{inner} channels in transformers, which expands {width} by a whole number");
        return Err(Error::Unsupported { what });
    }
    Ok(inner / width)
}
