//! Bodies of requests, each behind a byte for its path.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| boostr_fuzz::request::check(text));
