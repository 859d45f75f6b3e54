//! Logs of sessions: lines of which those that begin like JSON become whole records, and the others are bytes.
#![no_main]

use boostr_fuzz::session::check;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| check(text));
