//! One file a command, with its arguments, help, examples and code.

pub mod batch;
pub mod bench;
pub mod chat;
pub mod completions;
pub mod convert;
pub mod doctor;
pub mod eval;
pub mod imatrix;
pub mod list;
pub mod logits;
pub mod quantize;
pub mod run;
pub mod serve;
pub mod show;
pub mod state;
pub mod tokenizer;
pub mod train;
pub mod tune;
pub mod verify;
