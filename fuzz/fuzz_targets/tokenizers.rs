//! `tokenizer.json` and the files beside it.
#![no_main]

use boostr_fuzz::{caught, let_panics_be_caught, tokenizer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(init: let_panics_be_caught(), |text: &str| caught(|| tokenizer::check(text)));
