//! What the fuzz targets do with an input: read it as hostile, and use all that was read.

pub mod adapter;
pub mod calls;
pub mod config;
pub mod connection;
pub mod gguf;
pub mod grammar;
pub mod request;
pub mod safetensors;
pub mod server;
pub mod session;
pub mod state;
pub mod template;
pub mod tokenizer;
pub mod torch;
pub mod training;

#[path = "../../crates/boostr/tests/it/weight_files.rs"]
#[allow(dead_code, reason = "tests use the rest")]
mod weight_files;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

/// What the last panic said.
static LAST: Mutex<String> = Mutex::new(String::new());

/// Before the first input of a target whose library turns panics of another library into errors: a panic then does not end
/// the process at once.
pub fn let_panics_be_caught() {
    std::panic::set_hook(Box::new(|info| {
        *LAST.lock().unwrap_or_else(PoisonError::into_inner) = info.to_string();
    }));
}

/// Runs `check`; a panic that nobody in it catches ends the process.
pub fn caught(check: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(check)).is_err() {
        eprintln!("{}", LAST.lock().unwrap_or_else(PoisonError::into_inner));
        std::process::abort();
    }
}
