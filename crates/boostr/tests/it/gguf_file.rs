//! GGUF files field by field, so that any of them can be wrong.

use std::fs;
use std::path::PathBuf;

use crate::common::Random;

pub const U8: u32 = 0;
pub const U32: u32 = 4;
pub const I32: u32 = 5;
pub const F32: u32 = 6;
pub const BOOL: u32 = 7;
pub const STRING: u32 = 8;
pub const ARRAY: u32 = 9;
pub const U64: u32 = 10;

/// Types of tensors.
pub const TF32: u32 = 0;
pub const TQ8_0: u32 = 8;
pub const TQ4_K: u32 = 12;
pub const TI8: u32 = 24;

pub fn text(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

/// A key whose value is of that kind and these bytes.
pub fn key(name: impl AsRef<[u8]>, kind: u32, value: impl AsRef<[u8]>) -> Vec<u8> {
    [&text(name), &kind.to_le_bytes()[..], value.as_ref()].concat()
}

/// An array: the kind of its elements, how many it says there are, and their bytes.
pub fn array(kind: u32, len: u64, elements: impl AsRef<[u8]>) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &len.to_le_bytes(), elements.as_ref()].concat()
}

/// A tensor of the header; dimensions innermost first.
pub fn tensor(name: impl AsRef<[u8]>, dims: &[u64], number: u32, offset: u64) -> Vec<u8> {
    let rank = (dims.len() as u32).to_le_bytes();
    let dims: Vec<u8> = dims.iter().flat_map(|dim| dim.to_le_bytes()).collect();
    [&text(name), &rank[..], &dims, &number.to_le_bytes(), &offset.to_le_bytes()].concat()
}

/// The first 24 bytes.
pub fn start(version: u32, tensors: u64, keys: u64) -> Vec<u8> {
    let counts = [tensors.to_le_bytes(), keys.to_le_bytes()].concat();
    [b"GGUF", &version.to_le_bytes(), &counts[..]].concat()
}

/// A file of version 3 with these keys and tensors, and so many bytes of data.
pub fn file(keys: &[Vec<u8>], tensors: &[Vec<u8>], data: usize) -> Vec<u8> {
    let start = start(3, tensors.len() as u64, keys.len() as u64);
    let mut file = [start, keys.concat(), tensors.concat()].concat();
    file.resize(file.len().next_multiple_of(32) + data, 0);
    file
}

/// A file that `tests/corpus/gguf/make.py` wrote.
pub fn corpus(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/gguf").join(name)
}

pub fn read(name: &str) -> Vec<u8> {
    fs::read(corpus(name)).unwrap()
}

/// One file of each sort of header: two of mamba2, two vocabularies, a part of a model.
pub const HEADERS: [&str; 5] = [
    "mamba2-f32.gguf",
    "mamba2-q4_k_m.gguf",
    "llama-gpt2.gguf",
    "llama-spm.gguf",
    "mamba2-split-00001-of-00003.gguf",
];

/// A good file of a few random keys of every kind and a few random tensors of every type.
pub fn generate(random: &mut Random) -> Vec<u8> {
    let keys: Vec<_> = (0..random.below(8))
        .map(|i| {
            let (kind, value) = random_value(random, 0);
            key(format!("general.{i}.{}", word(random)), kind, value)
        })
        .collect();
    let mut data = 0;
    let tensors: Vec<_> = (0..random.below(5))
        .map(|i| {
            let (number, block, bytes) = TYPES[random.below(TYPES.len())];
            let mut dims: Vec<u64> = (0..=random.below(4)).map(|_| 1 + random.next() % 5).collect();
            dims[0] *= block;
            let size = dims.iter().product::<u64>() / block * bytes;
            let entry = tensor(format!("blk.{i}.{}", word(random)), &dims, number, data);
            data += size.next_multiple_of(32);
            entry
        })
        .collect();
    let mut file = file(&keys, &tensors, 0);
    file.extend((0..data).map(|_| random.next() as u8));
    file
}

/// Types of tensors, with the values and the bytes of a block.
const TYPES: [(u32, u64, u64); 20] = [
    (0, 1, 4),
    (1, 1, 2),
    (2, 32, 18),
    (3, 32, 20),
    (6, 32, 22),
    (7, 32, 24),
    (8, 32, 34),
    (10, 256, 84),
    (11, 256, 110),
    (12, 256, 144),
    (13, 256, 176),
    (14, 256, 210),
    (20, 32, 18),
    (23, 256, 136),
    (24, 1, 1),
    (25, 1, 2),
    (26, 1, 4),
    (27, 1, 8),
    (28, 1, 8),
    (30, 1, 2),
];

fn word(random: &mut Random) -> String {
    (0..=random.below(12)).map(|_| char::from(b'a' + random.below(26) as u8)).collect()
}

/// The kind and the bytes of a value inside of `depth` arrays.
fn random_value(random: &mut Random, depth: usize) -> (u32, Vec<u8>) {
    let kind = random.below(13) as u32;
    if kind == ARRAY && depth == 2 {
        return (BOOL, vec![1]);
    }
    (kind, random_bytes(random, kind, depth))
}

fn random_bytes(random: &mut Random, kind: u32, depth: usize) -> Vec<u8> {
    let number = random.next().to_le_bytes();
    match kind {
        0 | 1 => number[..1].to_vec(),
        2 | 3 => number[..2].to_vec(),
        4 | 5 => number[..4].to_vec(),
        // Halves of small integers: NaN would not be equal to itself.
        F32 => (f32::from(number[0]) * 0.5).to_le_bytes().to_vec(),
        12 => (f64::from(number[0]) * 0.5).to_le_bytes().to_vec(),
        BOOL => vec![number[0] & 1],
        STRING => text(format!("{} é ▁", word(random))),
        10 | 11 => number.to_vec(),
        _ => {
            let len = random.below(6);
            let (kind, first) = random_value(random, depth + 1);
            let mut elements = first;
            for _ in 1..len {
                elements.extend(random_bytes(random, kind, depth + 1));
            }
            let elements = if len == 0 { Vec::new() } else { elements };
            array(kind, len as u64, elements)
        }
    }
}
