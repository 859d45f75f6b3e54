//! What the fuzz targets do with an input: read it as hostile, and use all that was read.

pub mod adapter;
pub mod calls;
pub mod gguf;
pub mod grammar;
pub mod request;
pub mod session;
pub mod state;
pub mod template;
pub mod tokenizer;
pub mod training;
