//! `config.json` of any family.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| boostr_fuzz::config::check(text));
