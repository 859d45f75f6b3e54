//! Saved states, changed and sealed again.
#![no_main]

use boostr_fuzz::state::{State, check};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|state: State| check(state.encode()));
