//! GGUF files: using all that a file gave, and files made of well-formed fields.

use std::fs;
use std::path::PathBuf;

use arbitrary::Arbitrary;
use boostr::checkpoint::{Bytes, Checkpoint, gguf, not_finite};

/// Opens `file` and uses what was opened; of some files also what is written of it.
pub fn check(file: Vec<u8>) {
    // Writing is slow, a file system's work.
    let sum = file.iter().fold(0_u8, |sum, &byte| sum.wrapping_mul(31).wrapping_add(byte));
    if let Some(checkpoint) = open(file)
        && sum == 0
    {
        round_trip(&checkpoint);
    }
}

/// Opens `file`, and uses every value and tensor of what was opened.
fn open(file: Vec<u8>) -> Option<Checkpoint> {
    let len = file.len();
    let checkpoint = Checkpoint::from_gguf("fuzz", file).ok()?;
    let metadata = checkpoint.gguf().expect("a GGUF file has metadata");
    for (key, value) in metadata.iter() {
        assert!(metadata.has(key));
        let _ = (metadata.text(key), metadata.bool(key), metadata.float(key, -1.0..=1.0));
        let _ = (metadata.usize(key, 1..=9), metadata.per_layer(key, 3, 0..=9));
        let _ = (metadata.ints(key), metadata.floats(key), metadata.strings(key));
        if let gguf::Value::Array(array) = value {
            assert_eq!(array.iter().count(), array.len());
        }
    }
    for (_, entry) in checkpoint.iter() {
        assert_eq!(entry.dtype.bytes_of(&entry.shape), Some(entry.data.len()));
        assert!(entry.data.range().end <= len);
    }
    not_finite(&checkpoint, |_| {}).expect("all tensors are whole");
    Some(checkpoint)
}

/// Writes what was opened and reads it again; names that ggml does not read may be refused.
fn round_trip(checkpoint: &Checkpoint) {
    let metadata = checkpoint.gguf().expect("a GGUF file has metadata");
    let tensors: Vec<_> =
        checkpoint.iter().map(|(name, t)| (name, t.dtype, t.shape.as_slice())).collect();
    let data: Vec<_> = checkpoint.iter().map(|(_, t)| t.data.clone()).collect();
    let path = PathBuf::from(format!("/dev/shm/boostr-fuzz-{}.gguf", std::process::id()));
    match gguf::write(&path, metadata, &tensors, |index| Ok(data[index].clone())) {
        Ok(()) => {
            // Not `Checkpoint::open`, which would look for the other parts of a part.
            let file = Bytes::new(fs::read(&path).expect("it is there"));
            fs::remove_file(&path).expect("it is there");
            let (keys, back) = gguf::read(&path, &file).expect("what was written is read");
            let shown = |keys: &gguf::Metadata| -> Vec<String> {
                keys.iter().map(|(key, value)| format!("{key:?} {value:?}")).collect()
            };
            assert_eq!(shown(&keys), shown(metadata));
            assert!(back.values().map(|t| &*t.data).eq(data.iter().map(|data| &**data)));
        }
        Err(error) => {
            assert!(
                tensors.iter().any(|(name, ..)| name.len() > 63),
                "what was read is not written: {error}"
            );
        }
    }
}

/// A file whose fields are well formed, and then some of its bytes replaced.
#[derive(Arbitrary, Debug)]
pub struct File {
    version: u8,
    alignment: Option<u8>,
    keys: Vec<(Name, Val)>,
    tensors: Vec<Tensor>,
    patches: Vec<Patch>,
    cut: Option<u16>,
}

/// A short name: one of a few that mean something, or any text.
#[derive(Arbitrary, Debug)]
enum Name {
    Known(u8),
    Any(String),
}

#[derive(Arbitrary, Debug)]
enum Val {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    Text(String),
    Bytes(Vec<u8>),
    Floats(Vec<f32>),
    Ints(Vec<i32>),
    Texts(Vec<String>),
    Bools(Vec<bool>),
    /// Arrays in arrays, so deep.
    Deep(u8, Vec<u16>),
}

#[derive(Arbitrary, Debug)]
struct Tensor {
    name: Name,
    dims: Vec<u8>,
    kind: u8,
    /// Where it does not belong.
    offset: Option<u32>,
}

#[derive(Arbitrary, Debug)]
struct Patch {
    at: u16,
    size: u8,
    value: Extreme,
}

#[derive(Arbitrary, Debug)]
enum Extreme {
    Any(u64),
    Power(u8),
    BelowPower(u8),
    Minus(u8),
}

const KNOWN: [&str; 8] = [
    "general.alignment",
    "general.architecture",
    "split.no",
    "split.count",
    "split.tensors.count",
    "tokenizer.ggml.tokens",
    "mamba2.block_count",
    "token_embd.weight",
];

impl Name {
    fn text(&self) -> &str {
        match self {
            Self::Known(index) => KNOWN[usize::from(*index) % KNOWN.len()],
            Self::Any(text) => text,
        }
    }
}

fn text(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn array(kind: u32, len: usize, out: &mut Vec<u8>) {
    out.extend(kind.to_le_bytes());
    out.extend((len as u64).to_le_bytes());
}

impl Val {
    fn encode(&self, out: &mut Vec<u8>) {
        let kind = |kind: u32, out: &mut Vec<u8>| out.extend(kind.to_le_bytes());
        match self {
            Self::U8(n) => (kind(0, out), out.push(*n)).1,
            Self::I8(n) => (kind(1, out), out.extend(n.to_le_bytes())).1,
            Self::U16(n) => (kind(2, out), out.extend(n.to_le_bytes())).1,
            Self::I16(n) => (kind(3, out), out.extend(n.to_le_bytes())).1,
            Self::U32(n) => (kind(4, out), out.extend(n.to_le_bytes())).1,
            Self::I32(n) => (kind(5, out), out.extend(n.to_le_bytes())).1,
            Self::F32(n) => (kind(6, out), out.extend(n.to_le_bytes())).1,
            Self::Bool(n) => (kind(7, out), out.push(u8::from(*n))).1,
            Self::Text(s) => (kind(8, out), text(s, out)).1,
            Self::U64(n) => (kind(10, out), out.extend(n.to_le_bytes())).1,
            Self::I64(n) => (kind(11, out), out.extend(n.to_le_bytes())).1,
            Self::F64(n) => (kind(12, out), out.extend(n.to_le_bytes())).1,
            Self::Bytes(v) => {
                kind(9, out);
                array(0, v.len(), out);
                out.extend(v);
            }
            Self::Floats(v) => {
                kind(9, out);
                array(6, v.len(), out);
                v.iter().for_each(|n| out.extend(n.to_le_bytes()));
            }
            Self::Ints(v) => {
                kind(9, out);
                array(5, v.len(), out);
                v.iter().for_each(|n| out.extend(n.to_le_bytes()));
            }
            Self::Texts(v) => {
                kind(9, out);
                array(8, v.len(), out);
                v.iter().for_each(|s| text(s, out));
            }
            Self::Bools(v) => {
                kind(9, out);
                array(7, v.len(), out);
                v.iter().for_each(|&n| out.push(n.into()));
            }
            Self::Deep(depth, v) => {
                kind(9, out);
                (0..depth % 10).for_each(|_| array(9, 1, out));
                array(2, v.len(), out);
                v.iter().for_each(|n| out.extend(n.to_le_bytes()));
            }
        }
    }
}

impl File {
    /// The file's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(u32::from(2 + self.version % 2).to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        let keys = self.keys.len() + usize::from(self.alignment.is_some());
        out.extend((keys as u64).to_le_bytes());
        let mut alignment = 32;
        if let Some(power) = self.alignment {
            text("general.alignment", &mut out);
            let value = 1u32 << (power % 18);
            Val::U32(value).encode(&mut out);
            alignment = value as usize;
        }
        for (name, value) in &self.keys {
            text(name.text(), &mut out);
            value.encode(&mut out);
        }
        let mut offset = 0;
        for Tensor { name, dims, kind, offset: other } in &self.tensors {
            text(name.text(), &mut out);
            let dims = &dims[..dims.len().min(5)];
            // The first dimension in blocks of 32 for half of the types, in 256 for some.
            let scale = [1u64, 1, 32, 256][usize::from(kind / 64)];
            let dims: Vec<u64> = (0..)
                .zip(dims)
                .map(|(i, &n)| u64::from(n % 9) * if i == 0 { scale } else { 1 })
                .collect();
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|n| out.extend(n.to_le_bytes()));
            let number = u32::from(kind % 48);
            out.extend(number.to_le_bytes());
            let place = other.map_or(offset as u64, u64::from);
            out.extend(place.to_le_bytes());
            // At least what any type takes.
            let most = dims.iter().product::<u64>() as usize * 8;
            offset += most.next_multiple_of(alignment);
        }
        let header = out.len();
        out.resize(header.next_multiple_of(alignment) + offset.min(1 << 16), 0x3c);
        for Patch { at, size, value } in &self.patches {
            let at = usize::from(*at) % header;
            let value = match *value {
                Extreme::Any(n) => n,
                Extreme::Power(n) => 1 << (n % 64),
                Extreme::BelowPower(n) => (1 << (n % 64)) - 1,
                Extreme::Minus(n) => u64::MAX - u64::from(n),
            };
            let value = value.to_le_bytes();
            let size = [1, 2, 4, 8][usize::from(size % 4)];
            out.iter_mut().skip(at).zip(&value[..size]).for_each(|(byte, new)| *byte = *new);
        }
        if let Some(cut) = self.cut {
            out.truncate(usize::from(cut));
        }
        out
    }
}
