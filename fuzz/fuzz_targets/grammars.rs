//! JSON schemas, regular expressions and Lark grammars, each behind a byte for its kind.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| boostr_fuzz::grammar::check(text));
