//! Mamba-2 and its relatives: load, run and take apart, exactly and fast.
#![warn(missing_docs)]

pub mod backend;
pub mod checkpoint;
pub mod error;
pub mod generation_config;
pub mod ops;
pub mod sample;
pub mod tokenizer;

pub use error::{Error, Result};
