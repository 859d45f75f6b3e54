//! Calls of tools in an answer that comes in pieces.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| boostr_fuzz::calls::check(text));
