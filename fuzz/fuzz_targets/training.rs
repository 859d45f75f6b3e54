//! What training reads: `D` and lines of data, `T` and the words of a file of tokens, `C` and the `trainer.json` of a
#![no_main]

use boostr_fuzz::training::check;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| check(text));
