//! GGUF files field by field, so that any of them can be wrong.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::fs;
use std::path::PathBuf;

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
