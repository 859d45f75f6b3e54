//! Well-formed fields, some of them replaced, as a GGUF file.
#![no_main]

use std::path::PathBuf;
use std::sync::LazyLock;

use boostr_fuzz::gguf::File;
use libfuzzer_sys::fuzz_target;

/// Where to put the files that the inputs stand for: `GGUF_DUMP=FOLDER ... -runs=0 CORPUS`.
static DUMP: LazyLock<Option<PathBuf>> =
    LazyLock::new(|| std::env::var_os("GGUF_DUMP").map(PathBuf::from));

fuzz_target!(|file: File| {
    let bytes = file.encode();
    if let Some(folder) = &*DUMP {
        let sum =
            bytes.iter().fold(0_u64, |sum, &b| sum.wrapping_mul(0x100_0000_01b3) ^ u64::from(b));
        std::fs::write(folder.join(format!("{sum:016x}.gguf")), &bytes).expect("a folder");
    }
    boostr_fuzz::gguf::check(bytes);
});
