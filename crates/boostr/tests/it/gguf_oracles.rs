//! Our reading of a GGUF file equals that of two other readers: `gguf-rs-lib`, and the PyPI package
//! gguf.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::Path;
use std::process::Command;

use crate::common::{Folder, Random};
use crate::gguf_file::{HEADERS, generate, read};
use boostr::checkpoint::{Checkpoint, gguf};
use gguf_rs_lib::format::metadata::MetadataValue;
use gguf_rs_lib::prelude::GGUFFileReader;

const FILES: usize = 1000;

/// A file, told in words that do not depend on who read it.
#[derive(Debug, PartialEq)]
struct Told {
    keys: BTreeMap<String, String>,
    /// Dimensions as stored, type by its number or name, and the bytes.
    tensors: BTreeMap<String, (Vec<u64>, String, Vec<u8>)>,
}

fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"))
}

fn ours(file: &[u8]) -> Result<Told, String> {
    let checkpoint = Checkpoint::from_gguf("t", file.to_vec()).map_err(|e| e.to_string())?;
    let keys = checkpoint.gguf().unwrap().iter();
    let tensors = checkpoint.iter().map(|(name, entry)| {
        let dims = entry.shape.iter().rev().map(|&dim| dim as u64).collect();
        let dtype = entry.dtype.name().to_uppercase();
        (name.to_owned(), (dims, dtype, entry.data.to_vec()))
    });
    Ok(Told {
        keys: keys.map(|(key, value)| (key.to_owned(), our_value(value))).collect(),
        tensors: tensors.collect(),
    })
}

fn our_value(value: &gguf::Value) -> String {
    match value {
        gguf::Value::Array(array) => {
            let elements: Vec<_> = array.iter().map(|value| our_value(&value)).collect();
            format!("{} [{}]", array.kind().name(), elements.join(", "))
        }
        gguf::Value::F32(x) => format!("f32 {:08x}", x.to_bits()),
        gguf::Value::F64(x) => format!("f64 {:016x}", x.to_bits()),
        gguf::Value::String(text) => format!("string {}", hex(text)),
        gguf::Value::Bool(truth) => format!("bool {truth}"),
        number => format!("{} {}", number.kind().name(), number.int().unwrap()),
    }
}

fn theirs(file: &[u8]) -> Result<Told, String> {
    let mut reader = GGUFFileReader::new(Cursor::new(file)).map_err(|e| e.to_string())?;
    let keys = reader.metadata().iter().map(|(key, value)| (key.clone(), their_value(value)));
    let keys = keys.collect();
    let infos: Vec<_> = reader.tensor_infos().to_vec();
    let mut tensors = BTreeMap::new();
    for info in infos {
        let name = info.name().to_owned();
        let data = reader.load_tensor_data(&name).map_err(|e| e.to_string())?.unwrap();
        let dtype = format!("{:?}", info.tensor_type()).to_uppercase();
        tensors.insert(name, (info.shape().dims().to_vec(), dtype, data.as_slice().to_vec()));
    }
    Ok(Told { keys, tensors })
}

fn their_value(value: &MetadataValue) -> String {
    match value {
        MetadataValue::U8(n) => format!("u8 {n}"),
        MetadataValue::I8(n) => format!("i8 {n}"),
        MetadataValue::U16(n) => format!("u16 {n}"),
        MetadataValue::I16(n) => format!("i16 {n}"),
        MetadataValue::U32(n) => format!("u32 {n}"),
        MetadataValue::I32(n) => format!("i32 {n}"),
        MetadataValue::U64(n) => format!("u64 {n}"),
        MetadataValue::I64(n) => format!("i64 {n}"),
        MetadataValue::F32(x) => format!("f32 {:08x}", x.to_bits()),
        MetadataValue::F64(x) => format!("f64 {:016x}", x.to_bits()),
        MetadataValue::Bool(truth) => format!("bool {truth}"),
        MetadataValue::String(text) => format!("string {}", hex(text)),
        MetadataValue::Array(array) => {
            let elements: Vec<_> = array.values.iter().map(their_value).collect();
            let kind = format!("{:?}", array.element_type).to_lowercase();
            format!("{kind} [{}]", elements.join(", "))
        }
    }
}

#[test]
fn good_files_are_read_as_gguf_rs_lib_reads_them() {
    let mut random = Random(0x600d_f11e_600d_f11e);
    let generated = (0..FILES).map(|_| generate(&mut random));
    for file in generated.chain(HEADERS.map(read)) {
        assert_eq!(ours(&file), theirs(&file));
    }
}

/// Where the two differ it is for what they ask of a file beyond the format's limits: keys in lower
/// case, no dimension above 10^9 even beside one of 0.
#[test]
fn damaged_files_are_told_apart_as_by_gguf_rs_lib() {
    const STRICTER: [&str; 2] =
        ["must be dot-separated lower_snake_case ASCII", "Tensor dimension too large"];
    let mut random = Random(0x0bad_f11e_0bad_f11e);
    let (mut both, mut neither) = (0, 0);
    for _ in 0..FILES {
        let valid = generate(&mut random);
        let mut file = valid.clone();
        random.mutate(&mut file, &valid);
        match (ours(&file), theirs(&file)) {
            (Ok(ours), Ok(theirs)) => {
                assert_eq!(ours, theirs);
                both += 1;
            }
            (Err(_), Err(_)) => neither += 1,
            (Ok(_), Err(e)) => assert!(STRICTER.iter().any(|s| e.contains(s)), "they refuse: {e}"),
            (Err(e), Ok(_)) => panic!("we refuse: {e}"),
        }
    }
    assert!(both > 300 && neither > 300, "{both} were read by both, {neither} by neither");
}

/// Needs Python with the packages gguf and numpy; `BOOSTR_PYTHON` names another interpreter.
///
/// Of damaged files it refuses fewer, so only those that we read are compared.
#[test]
#[ignore = "needs Python with the package gguf"]
fn files_are_read_as_the_python_package_reads_them() {
    let python = std::env::var("BOOSTR_PYTHON").unwrap_or("python3".into());
    let folder = Folder::new();
    let mut random = Random(0x9999_f11e_600d_f11e);
    let mut files: Vec<_> = (0..FILES).map(|_| generate(&mut random)).collect();
    files.extend(HEADERS.map(read));
    for _ in 0..FILES {
        let valid = generate(&mut random);
        let mut file = valid.clone();
        random.mutate(&mut file, &valid);
        if ours(&file).is_ok() {
            files.push(file);
        }
    }
    for (index, file) in files.iter().enumerate() {
        folder.write(&format!("{index:04}.gguf"), file);
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/gguf/tell.py");
    let output = Command::new(python).arg(script).arg(folder.path()).output().unwrap();
    let told = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(told.lines().count(), files.len());
    for (file, theirs) in files.iter().zip(told.lines()) {
        let Told { keys, tensors } = ours(file).unwrap();
        let mut told = String::new();
        for (key, value) in keys {
            // The package forgets the kind of an empty array, and flattens arrays in arrays.
            let value = match value.as_str() {
                nested if nested.starts_with("array [") && !nested.ends_with("[]") => "nested",
                empty if empty.ends_with(" []") => "empty",
                value => value,
            };
            told += &format!("key {} {value}; ", hex(key));
        }
        for (name, (dims, dtype, data)) in tensors {
            let (name, data) = (hex(name), hex(data));
            told += &format!("tensor {name} {dims:?} {dtype} {data}; ");
        }
        assert_eq!(told, theirs);
    }
}
