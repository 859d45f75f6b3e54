//! Bytes over a connection to the server.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| boostr_fuzz::connection::heads(bytes));
