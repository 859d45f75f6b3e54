//! Safetensors files and their index.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| boostr_fuzz::safetensors::check(text));
