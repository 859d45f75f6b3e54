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
//! | [`qwen3_5`] | `qwen3_5`, `qwen3_5_text` | `qwen35` |
//! | [`qwen3_5_moe`] | `qwen3_5_moe`, `qwen3_5_moe_text` | `qwen35moe` |
//! | [`qwen3_next`] | `qwen3_next` | `qwen3next` |
//! | [`olmo_hybrid`] | `olmo_hybrid` | none |
//! | [`lfm2`] | `lfm2`, `lfm2_moe` | `lfm2`, `lfm2moe` |
//! | [`kimi_linear`] | `kimi_linear` | `kimi-linear` |
//!
//! A family is one description ([`Family`]): its fields, what its layers are made of, its names in files. What is the
//! same for all stands once, in [`Model`]. Which families there are is a value, [`Families`], to which a program may
//! add its own.

pub mod bamba;
mod config;
mod delta_hybrid;
pub mod falcon_h1;
mod families;
mod family;
pub mod fields;
mod fingerprint;
mod gated_experts;
mod gguf;
pub mod granite_hybrid;
mod groups;
mod hybrid;
pub mod kimi_linear;
pub mod lfm2;
pub mod llama;
pub mod mamba2;
mod model;
pub(crate) mod mtp;
pub mod nemotron_h;
pub mod olmo_hybrid;
pub mod qwen3_5;
pub mod qwen3_5_moe;
pub mod qwen3_next;
mod state;
mod turns;
pub mod zamba2;

pub use config::Config;
pub use delta_hybrid::DeltaHybrid;
pub use families::{Entry, Families};
pub use family::{Family, Frame, LeftOut, Names};
pub use fields::Fields;
pub(crate) use fingerprint::Fingerprint;
pub use gated_experts::GatedExperts;
pub use gguf::{
    Keys, KeysMut, attention_table, delta_table, mixer_table, mlp_table, moe_table, rope_factors,
};
pub use hybrid::Hybrid;
pub use model::{Context, Logits, Model, PIECE, Run};
pub use mtp::{Mtp, next_block};
pub use state::State;

/// Largest size that a configuration may name.
pub const MAX_SIZE: usize = 1 << 24;

/// Names of the activation that most families have.
const SILU: &[&str] = &["silu", "swish"];
