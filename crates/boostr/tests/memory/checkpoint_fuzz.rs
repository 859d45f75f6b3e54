//! Tens of thousands of damaged files. Each is an error or a checkpoint that can be used. None is a
//! panic, and all together take hardly any memory.

use std::fs;
use std::path::Path;

use crate::common::{Random, safetensors_file, torch_zip};
use crate::counting::{HEAP, alone};
use boostr::checkpoint::{Checkpoint, Dtype};

const MUTATIONS: usize = 20_000;

/// Most bytes at once. The files are of a few thousand bytes; a single length or count that was
/// believed would ask for gigabytes.
const MAX_GROWTH: usize = 4 << 20;

/// Uses every tensor, so that a bad range would show.
fn touch(checkpoint: &Checkpoint) {
    for (_, entry) in checkpoint.iter() {
        let len = entry.dtype.bytes_of(&entry.shape).unwrap();
        assert_eq!(entry.data.len(), len);
        let float = matches!(entry.dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16);
        assert_eq!(entry.to_f32().is_ok(), float);
    }
}

fn data(name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)).unwrap()
}

fn safetensors() {
    let header = br#"{"__metadata__":{"format":"pt"},
"a.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
"b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]},
"c":{"dtype":"I64","shape":[0,7],"data_offsets":[26,26]}}"#;
    let valid = safetensors_file(header, &[5; 26]);
    let mut random = Random(0x00c0_ffee_1234_5678);
    let mut accepted = 0;
    for i in 0..MUTATIONS {
        let mut file = valid.clone();
        if i % 2 == 0 {
            random.mutate(&mut file, &valid);
        } else {
            let mut header = header.to_vec();
            random.mutate(&mut header, &valid);
            file = safetensors_file(header, &[5; 26]);
        }
        if let Ok(checkpoint) = Checkpoint::from_safetensors("fuzz", file) {
            touch(&checkpoint);
            accepted += 1;
        }
    }
    assert!(accepted > 100, "{accepted} of {MUTATIONS} were accepted: mutations too rough");
}

/// The pickle and the storages of a torch file that `make_pickle.py` wrote.
fn parts(file: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let at = file.windows(2).position(|w| w == [0x80, 2] || w == [0x80, 4]).unwrap();
    let end = file.windows(3).position(|w| w == b".PK").unwrap() + 1;
    (file[at..end].to_vec(), (0..12u8).flat_map(|n| f32::from(n).to_le_bytes()).collect())
}

fn torch() {
    let files = ["views.bin", "state_dict.bin", "nested.bin", "protocol4.bin"].map(data);
    let mut random = Random(0x0dd_ba11_5eed_0001);
    let mut accepted = 0;
    for i in 0..MUTATIONS {
        let valid = &files[random.below(files.len())];
        let mut file = valid.clone();
        if i % 4 == 0 {
            random.mutate(&mut file, valid);
        } else {
            // The zip stays whole, so that every mutation reaches the machine.
            let (mut pickle, storage) = parts(valid);
            let other = pickle.clone();
            random.mutate(&mut pickle, &other);
            file = torch_zip(&pickle, &[&storage]);
        }
        if let Ok(checkpoint) = Checkpoint::from_torch_zip("fuzz", file) {
            touch(&checkpoint);
            accepted += 1;
        }
    }
    assert!(accepted > 100, "{accepted} of {MUTATIONS} were accepted: mutations too rough");
}

#[test]
fn damaged_files_cost_neither_a_panic_nor_memory() {
    let _alone = alone();
    let before = HEAP.restart();
    safetensors();
    torch();
    let growth = HEAP.peak() - before;
    assert!(growth < MAX_GROWTH, "{growth} bytes at once");
}
