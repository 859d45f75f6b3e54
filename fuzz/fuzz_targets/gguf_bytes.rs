//! Any bytes as a GGUF file.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|file: &[u8]| boostr_fuzz::gguf::check(file.to_vec()));
