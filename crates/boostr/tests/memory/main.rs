//! How much memory there is at once. One test runs at a time, so that what is counted is its own.

#[path = "../it/common.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod common;
#[path = "../it/gguf_file.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod gguf_file;
#[path = "../it/sealed.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod sealed;
#[path = "../it/tiny.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod tiny;

mod checkpoint_fuzz;
mod counting;
mod experts;
mod folders;
mod gguf_corpus;
mod large;
mod prompts;
mod states;
mod training;
