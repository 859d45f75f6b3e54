//! Files of `torch.save`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| boostr_fuzz::torch::check(bytes));
