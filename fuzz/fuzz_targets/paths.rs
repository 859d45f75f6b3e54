//! Requests of sessions and of everything else: methods, paths, bodies.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| boostr_fuzz::connection::paths(text));
