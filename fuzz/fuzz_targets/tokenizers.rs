//! Tokenizers, with the files beside them.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| boostr_fuzz::tokenizer::check(text));
