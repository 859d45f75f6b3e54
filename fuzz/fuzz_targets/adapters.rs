//! Folders of adapters: the text of `adapter_config.json`, and after a line `---` the header of the weights' file.
#![no_main]

use boostr_fuzz::adapter::check;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| check(text));
