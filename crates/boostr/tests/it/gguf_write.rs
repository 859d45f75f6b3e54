//! The GGUF writer: a written file reads back equal, and other readers find the same. Contents that the
//! format cannot hold are refused before anything is written.

use std::fs;

use crate::common::Folder;
use crate::gguf_file::*;
use boostr::checkpoint::gguf::{self, Array, Kind, Metadata, Value};
use boostr::checkpoint::{Bytes, Checkpoint, Dtype, safetensors};
use boostr::error::Error;
use boostr::ops::Format;
use proptest::prelude::*;

/// Writes tensors of zeros.
fn write_zeros(metadata: &Metadata, tensors: &[(&str, Dtype, &[usize])]) -> Result<(), Error> {
    let folder = Folder::new();
    let path = folder.path().join("m.gguf");
    let result = gguf::write(&path, metadata, tensors, |index| {
        let (_, dtype, shape) = tensors[index];
        Ok(Bytes::new(vec![0; dtype.bytes_of(shape).unwrap()]))
    });
    assert_eq!(folder.names().len(), usize::from(result.is_ok()), "a part of a file was left");
    result
}

#[track_caller]
fn refusal(metadata: &Metadata, tensors: &[(&str, Dtype, &[usize])]) -> String {
    write_zeros(metadata, tensors).unwrap_err().to_string()
}

fn no_keys() -> Metadata {
    Metadata::new("m.gguf")
}

#[test]
fn a_file_is_laid_out_as_ggml_writes_it() {
    let folder = Folder::new();
    let path = folder.path().join("m.gguf");
    let mut metadata = no_keys();
    metadata.set("general.alignment", 64_u32);
    metadata.set("a", ["x", ""]);
    let tensors: [(&str, Dtype, &[usize]); 3] =
        [("two", Dtype::F32, &[2, 3]), ("one", Dtype::I8, &[5]), ("none", Dtype::F16, &[0, 4])];
    let data = [vec![1; 24], vec![2; 5], vec![]];
    gguf::write(&path, &metadata, &tensors, |index| Ok(Bytes::new(data[index].clone()))).unwrap();

    let keys = [
        key("general.alignment", U32, 64_u32.to_le_bytes()),
        key("a", ARRAY, array(STRING, 2, [text("x"), text("")].concat())),
    ];
    // Dimensions innermost first; each offset after the data before it, padded to 64.
    let infos = [
        tensor("two", &[3, 2], TF32, 0),
        tensor("one", &[5], TI8, 64),
        tensor("none", &[4, 0], 1, 128),
    ];
    let mut expected = [start(3, 3, 2), keys.concat(), infos.concat()].concat();
    for data in data {
        expected.resize(expected.len().next_multiple_of(64), 0);
        expected.extend(data);
    }
    expected.resize(expected.len().next_multiple_of(64), 0);
    assert_eq!(fs::read(&path).unwrap(), expected);
}

#[test]
fn a_file_of_the_python_package_is_written_to_the_byte() {
    let folder = Folder::new();
    for name in ["mamba2-f32.gguf", "mamba2-q4_k_m.gguf", "llama-gpt2.gguf", "llama-spm.gguf"] {
        let checkpoint = Checkpoint::open(&corpus(name), false).unwrap();
        let mut tensors: Vec<_> = checkpoint.iter().collect();
        tensors.sort_by_key(|(_, entry)| entry.data.range().start);
        let infos: Vec<_> =
            tensors.iter().map(|(name, t)| (*name, t.dtype, t.shape.as_slice())).collect();
        let path = folder.path().join(name);
        let metadata = checkpoint.gguf().unwrap();
        let data = |index: usize| Ok(tensors[index].1.data.clone());
        gguf::write(&path, metadata, &infos, data).unwrap();
        assert!(fs::read(&path).unwrap() == read(name), "{name}");
    }
}

#[test]
fn data_is_asked_for_one_tensor_after_the_other() {
    let folder = Folder::new();
    let path = folder.write("m.gguf", "old");
    let tensors: [(&str, Dtype, &[usize]); 2] = [("b", Dtype::F32, &[1]), ("a", Dtype::F32, &[1])];
    let mut asked = Vec::new();
    gguf::write(&path, &no_keys(), &tensors, |index| {
        asked.push(index);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        Ok(Bytes::new([index as u8; 4]))
    })
    .unwrap();
    assert_eq!(asked, [0, 1]);
    let back = Checkpoint::open(&path, false).unwrap();
    assert_eq!(*back.get("a").unwrap().data, [1; 4]);
}

#[test]
fn a_failure_of_the_data_is_returned_and_the_old_file_left() {
    let folder = Folder::new();
    let path = folder.write("m.gguf", "old");
    let tensors: [(&str, Dtype, &[usize]); 2] = [("a", Dtype::F32, &[1]), ("b", Dtype::F32, &[2])];
    let fail = |index| match index {
        0 => Ok(Bytes::new([0; 4])),
        _ => Err(Error::Unsupported { what: "moon".into() }),
    };
    let error = gguf::write(&path, &no_keys(), &tensors, fail).unwrap_err();
    assert!(matches!(error, Error::Unsupported { what } if what == "moon"));
    let short = |_| Ok(Bytes::new([0; 4]));
    let error = gguf::write(&path, &no_keys(), &tensors, short).unwrap_err();
    assert_eq!(error.to_string(), "argument `tensors`: tensor `b`: 4 bytes are given, it takes 8");
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(folder.names(), ["m.gguf"]);
}

#[test]
fn what_cannot_be_in_a_file_is_refused() {
    let long = "n".repeat(64);
    let q4_k = Dtype::Block(Format::Q4K);
    for (tensors, reason) in [
        (&[("", Dtype::F32, &[1][..])][..], "tensor ``: expected a name of its own"),
        (&[(&long, Dtype::F32, &[1])], "expected a name of its own, of 1 to 63 bytes"),
        (
            &[("a", Dtype::F32, &[1]), ("a", Dtype::F32, &[1])],
            "tensor `a`: expected a name of its own",
        ),
        (&[("a", Dtype::U8, &[1])], "tensor `a`: GGUF has no type U8; it has f32, f16, q4_0"),
        (&[("a", Dtype::Bool, &[1])], "tensor `a`: GGUF has no type BOOL"),
        (&[("a", q4_k, &[256, 3])], "tensor `a`: q4_k [256, 3] is no whole number of bytes"),
        (&[("a", Dtype::F32, &[usize::MAX])], "is no whole number of bytes"),
        (&[("a", Dtype::F32, &[1; 5])], "tensor `a`: has 5 dimensions, at most 4"),
    ] {
        let folder = Folder::new();
        let path = folder.path().join("m.gguf");
        let data = |_| panic!("data was asked for");
        let text = gguf::write(&path, &no_keys(), tensors, data).unwrap_err().to_string();
        assert!(text.contains(reason), "{text}");
        assert!(folder.names().is_empty());
    }
    let with = |key: &str, value: Value| {
        let mut metadata = no_keys();
        metadata.set(key, value);
        metadata
    };
    assert!(refusal(&with("", 1_u8.into()), &[]).contains("key 1 of 1: name is empty"));
    let long = "k".repeat(65_536);
    assert!(refusal(&with(&long, 1_u8.into()), &[]).contains("at most 65535 are read"));
    for alignment in [0_u32, 4, 1 << 31] {
        let text = refusal(&with("general.alignment", alignment.into()), &[]);
        assert!(text.starts_with("`m.gguf`: field `general.alignment`: expected a power of two"));
    }
    assert!(refusal(&with("general.alignment", 32_i32.into()), &[]).contains("found 32 (i32)"));
    let deep = (0..8).fold(Array::from(&[1_u8][..]), |inner, _| Array::from(&[inner][..]));
    assert!(refusal(&with("deep", Value::Array(deep)), &[]).contains("more than 8 deep"));
}

#[test]
fn blocks_are_not_written_as_safetensors() {
    let folder = Folder::new();
    let path = folder.path().join("m.safetensors");
    let tensor = ("a", Dtype::Block(Format::Q8_0), &[32][..], &[0; 34][..]);
    let error = safetensors::write(&path, &[tensor], &Default::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "argument `tensors`: tensor `a`: safetensors has no type q8_0, write it as a float or as \
         GGUF"
    );
    assert!(folder.names().is_empty());
}

#[test]
fn metadata_keeps_its_order() {
    let mut metadata = no_keys();
    assert!(metadata.is_empty());
    assert_eq!(metadata.set("b", 1_u32), None);
    assert_eq!(metadata.set("a", true), None);
    assert_eq!(metadata.set("c", "x"), None);
    assert_eq!(metadata.set("b", 2.5_f32), Some(Value::U32(1)));
    let keys = |metadata: &Metadata| -> Vec<String> {
        metadata.iter().map(|(key, value)| format!("{key} = {value}")).collect()
    };
    assert_eq!(keys(&metadata), ["b = 2.5 (f32)", "a = true (bool)", "c = `x` (string)"]);
    metadata.retain(|key| key != "a");
    assert_eq!(keys(&metadata), ["b = 2.5 (f32)", "c = `x` (string)"]);
    assert_eq!(metadata.set("c", [1_i64, 2]), Some("x".into()));
    assert_eq!(keys(&metadata), ["b = 2.5 (f32)", "c = array of 2 i64"]);
    assert_eq!((metadata.len(), metadata.get("a")), (2, None));
}

#[test]
fn a_file_of_version_two_is_read_as_one_of_three() {
    for name in HEADERS {
        let three = read(name);
        let mut two = three.clone();
        two[4] = 2;
        let [two, three] = [two, three].map(|file| Checkpoint::from_gguf("t", file).unwrap());
        assert_eq!(two.gguf(), three.gguf());
        assert!(two.iter().zip(three.iter()).all(|((a, x), (b, y))| a == b && *x.data == *y.data));
    }
}

/// Values of every kind.
fn values() -> impl Strategy<Value = Value> {
    let single = prop_oneof![
        any::<u8>().prop_map(Value::from),
        any::<i8>().prop_map(Value::from),
        any::<u16>().prop_map(Value::from),
        any::<i16>().prop_map(Value::from),
        any::<u32>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f32>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        ".{0,20}".prop_map(Value::from),
    ];
    prop_oneof![single, arrays().prop_map(Value::Array)]
}

fn arrays() -> impl Strategy<Value = Array> {
    let flat = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..9).prop_map(|v| Array::from(v.as_slice())),
        prop::collection::vec(any::<i32>(), 0..9).prop_map(|v| Array::from(v.as_slice())),
        prop::collection::vec(any::<u64>(), 0..9).prop_map(|v| Array::from(v.as_slice())),
        prop::collection::vec(any::<f32>(), 0..9).prop_map(|v| Array::from(v.as_slice())),
        prop::collection::vec(any::<f64>(), 0..9).prop_map(|v| Array::from(v.as_slice())),
        prop::collection::vec(any::<bool>(), 0..9).prop_map(|v| Array::from(v.as_slice())),
        prop::collection::vec(".{0,9}", 0..9).prop_map(|v| Array::from(v.as_slice())),
    ];
    flat.prop_recursive(4, 24, 4, |inner| {
        prop::collection::vec(inner, 0..4).prop_map(|v| Array::from(v.as_slice()))
    })
}

/// A type, the last dimension of its tensors in blocks, and the others.
fn tensors() -> impl Strategy<Value = (Dtype, Vec<usize>)> {
    let dtypes = [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F64, Dtype::I8, Dtype::I64];
    let blocks = Format::ALL.map(Dtype::Block);
    let dtype = prop::sample::select([&dtypes[..], &blocks].concat());
    (dtype, prop::collection::vec(0_usize..4, 1..5)).prop_map(|(dtype, mut shape)| {
        *shape.last_mut().unwrap() *= dtype.block_len();
        (dtype, shape)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    #[test]
    fn what_was_written_is_read(
        keys in prop::collection::vec((".{1,12}", values()), 0..8),
        tensors in prop::collection::vec(tensors(), 0..5),
        alignment in prop::option::of(3_u32..10),
        seed in any::<u8>(),
    ) {
        let mut metadata = no_keys();
        for (key, value) in keys {
            metadata.set(key, value);
        }
        if let Some(power) = alignment {
            metadata.set("general.alignment", 1_u32 << power);
        }
        let names: Vec<String> = (0..tensors.len()).map(|i| format!("t{i}")).collect();
        let infos: Vec<_> = names
            .iter()
            .zip(&tensors)
            .map(|(name, (dtype, shape))| (name.as_str(), *dtype, shape.as_slice()))
            .collect();
        let data: Vec<Vec<u8>> = tensors
            .iter()
            .map(|(dtype, shape)| {
                let size = dtype.bytes_of(shape).unwrap();
                (0..size).map(|i| (i as u8).wrapping_mul(31) ^ seed).collect()
            })
            .collect();
        let folder = Folder::new();
        let path = folder.path().join("m.gguf");
        gguf::write(&path, &metadata, &infos, |index| Ok(Bytes::new(data[index].clone()))).unwrap();

        let back = Checkpoint::open(&path, false).unwrap();
        prop_assert_eq!(back.len(), infos.len());
        for ((name, dtype, shape), data) in infos.iter().zip(&data) {
            let entry = back.get(name).unwrap();
            prop_assert_eq!((&entry.dtype, entry.shape.as_slice()), (dtype, *shape));
            prop_assert!(*entry.data == **data);
        }
        // As text: NaN is not equal to itself.
        let told = |metadata: &Metadata| format!("{:?}", metadata.iter().collect::<Vec<_>>());
        prop_assert_eq!(told(back.gguf().unwrap()), told(&metadata));
        for ((_, a), (_, b)) in back.gguf().unwrap().iter().zip(metadata.iter()) {
            if let (Value::Array(a), Value::Array(b)) = (a, b) {
                prop_assert_eq!(a, b);
                prop_assert!(a.kind() != Kind::String || a.strings() == b.strings());
            }
        }
    }
}
