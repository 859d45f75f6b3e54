//! The files that fuzzing found telling, and many more damaged ones: each is opened or refused, with
//! hardly any memory and at once. `fuzz/README.md` says how the corpus is made.

use std::fs;
use std::time::{Duration, Instant};

use crate::common::Random;
use crate::counting::{HEAP, alone};
use crate::gguf_file::{HEADERS, corpus, generate, read};
use boostr::checkpoint::{Checkpoint, gguf, not_finite};

const MUTATIONS: usize = 20_000;

/// Memory that a file of `size` bytes may cost: what is decoded of it, and a message.
fn most_memory(size: usize) -> usize {
    (1 << 20) + 32 * size
}

/// Opens a file, and uses what was opened.
fn open(file: &[u8]) -> bool {
    let (before, start) = (HEAP.restart(), Instant::now());
    let result = Checkpoint::from_gguf("fuzz", file.to_vec());
    if let Ok(checkpoint) = &result {
        for (key, value) in checkpoint.gguf().unwrap().iter() {
            assert!(!format!("{key} {value}").is_empty());
            if let gguf::Value::Array(array) = value {
                assert_eq!(array.iter().count(), array.len());
            }
        }
        not_finite(checkpoint, |_| ()).unwrap();
    }
    let (peak, took) = (HEAP.peak() - before, start.elapsed());
    assert!(peak < most_memory(file.len()), "{peak} bytes for {}: {result:?}", file.len());
    assert!(took < Duration::from_secs(1), "{took:?}: {result:?}");
    result.is_ok()
}

#[test]
fn damaged_files_cost_neither_a_panic_nor_memory_nor_time() {
    let _alone = alone();
    let mut opened = 0;
    let mut files = 0;
    for file in fs::read_dir(corpus("fuzz")).unwrap() {
        opened += usize::from(open(&fs::read(file.unwrap().path()).unwrap()));
        files += 1;
    }
    assert!(files > 100 && opened > 10, "{opened} of {files} files of the corpus were opened");

    let headers = HEADERS.map(read);
    let mut random = Random(0x00c0_ffee_5eed_0002);
    let mut opened = 0;
    for i in 0..MUTATIONS {
        let other = generate(&mut random);
        let mut file = if i % 8 == 0 { headers[i / 8 % 5].clone() } else { other.clone() };
        // The data of a large file is not worth a change.
        let header = file.len().min(4096);
        let mut changed = file[..header].to_vec();
        random.mutate(&mut changed, &other);
        file.splice(..header, changed);
        opened += usize::from(open(&file));
    }
    assert!(opened > MUTATIONS / 20, "{opened} of {MUTATIONS} were opened: mutations too rough");
}
