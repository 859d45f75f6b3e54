//! Mamba-2 and its relatives: load, run and take apart, exactly and fast on CPU.
//!
//! ```
//! use boostr::models::{Config, Logits, Model, Run};
//! use boostr::{backend, checkpoint::{ConfigFile, Dtype}};
//!
//! // Random weights; `load::LanguageModel::open` takes a folder's.
//! let config = Config::read(&ConfigFile::parse("config.json", r#"{
//!     "model_type": "mamba2", "hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 8,
//!     "n_groups": 1, "num_hidden_layers": 2, "vocab_size": 64
//! }"#)?)?;
//! let model = Model::<backend::Cpu>::synthetic(config, Dtype::F32, backend::cpu())?;
//!
//! // Two sequences of different lengths in one call; each state is a value of its own.
//! let (mut a, mut b) = (model.new_state()?, model.new_state()?);
//! let mut runs = [
//!     Run { tokens: &[1, 2, 3], state: &mut a },
//!     Run { tokens: &[4], state: &mut b },
//! ];
//! let logits = model.forward(&mut runs, Logits::Last)?;
//! assert_eq!(logits.shape(), [2, 64]);
//!
//! // A fork is a clone.
//! let mut fork = a.clone();
//! model.forward(&mut [Run { tokens: &[5], state: &mut fork }], Logits::Last)?;
//! assert_eq!((a.position(), fork.position()), (3, 4));
//! # Ok::<(), boostr::Error>(())
//! ```
//!
//! Text in, text out is [`text`]: `lm.complete("Once upon a time").max_tokens(64).run()?.text`.
//!
//! | module | holds |
//! |---|---|
//! | [`ops`] | operations on tensors, among them SSD, with portable bodies and CPU kernels |
//! | [`backend`] | what a model asks of a device |
//! | [`checkpoint`] | safetensors and torch files, read as hostile |
//! | [`tokenizer`], [`generation_config`] | text to ids and back, defaults of generation |
//! | [`chat`] | a conversation as text, by the model's chat template |
//! | [`nn`] | layers that models share |
//! | [`models`] | one architecture, one file |
//! | [`state_file`] | a sequence's state in a file |
//! | [`sample`], [`grammar`] | choosing tokens, among those that a grammar allows |
//! | [`load`], [`engine`] | opening a model folder, continuing ids |
//! | [`text`] | prompts, conversations and sessions, answered as text |
//! | [`session`] | conversations in a folder: kept, branched, rewound |
//! | [`train`] | from text to a model |

pub mod backend;
pub mod chat;
pub mod checkpoint;
pub mod convert;
pub mod engine;
pub mod error;
pub mod evaluate;
pub mod files;
pub mod generation_config;
pub mod grammar;
pub mod load;
pub mod models;
pub mod nn;
pub mod ops;
pub mod sample;
pub mod session;
pub mod state_file;
pub mod text;
pub mod threads;
pub mod tokenizer;
pub mod train;

pub use backend::numr;
pub use error::{Error, Result};

/// The programs of the README compile.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
