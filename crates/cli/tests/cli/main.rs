//! The program as a user runs it: real processes, their output, and how they end.
//!
//! Most of it runs the built-in model, so a build without that has none of these tests.

#![cfg(feature = "demo")]

mod batch;
mod chat;
mod common;
mod ends;
mod faults;
mod files;
mod gguf;
mod models;
mod process;
mod run;
mod serve;
mod state;
mod talk;
#[cfg(unix)]
mod terminal;
mod tokenizer;
#[cfg(target_os = "linux")]
mod traced;
mod training;
