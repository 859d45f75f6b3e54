//! Wrong GGUF files: each is refused with the byte and the expected value. Ids in names:
//! `fixtures/CASES.md`.

use std::time::{Duration, Instant};

use crate::common::{Folder, Random};
use crate::gguf_file::*;
use boostr::checkpoint::gguf::{self, Metadata};
use boostr::checkpoint::{Bytes, Checkpoint, Dtype, NotFinite, not_finite};
use boostr::error::Error;

fn open(file: impl AsRef<[u8]>) -> Result<Checkpoint, Error> {
    let start = Instant::now();
    let result = Checkpoint::from_gguf("t", file.as_ref().to_vec());
    assert!(start.elapsed() < Duration::from_secs(1), "took {:?}", start.elapsed());
    result
}

/// What is wrong with a file, after its name.
#[track_caller]
fn refusal(file: impl AsRef<[u8]>) -> String {
    let text = open(file).expect_err("the file was opened").to_string();
    text.strip_prefix("`t`: ").unwrap_or_else(|| panic!("the file is not named: {text}")).to_owned()
}

/// What is wrong with a file of one key.
#[track_caller]
fn refused_key(key: Vec<u8>) -> String {
    refusal(file(&[key], &[], 0))
}

/// What is wrong with a file of one tensor; its name is at byte 24, its rank at 33.
#[track_caller]
fn refused_tensor(dims: &[u64], number: u32, offset: u64) -> String {
    refusal(file(&[], &[tensor("a", dims, number, offset)], 64))
}

const INCOMPLETE: &str = "the download is probably incomplete";
const DAMAGED: &str = "the file is damaged";

#[test]
fn r_a1_an_empty_file_is_empty() {
    assert_eq!(refusal([]), "byte 0: expected `GGUF`, found ``: the file is empty");
    let folder = Folder::new();
    let path = folder.write("empty.gguf", []);
    let message = Checkpoint::open(&path, false).unwrap_err().to_string();
    assert_eq!(message, format!("`{}`: file is empty (0 bytes)", path.display()));
}

#[test]
fn r_a2_four_bytes_are_an_incomplete_download() {
    let expected = format!("byte 4: header: version needs 4 bytes, found 0; {INCOMPLETE}");
    assert_eq!(refusal(b"GGUF"), expected);
    assert!(refusal(b"GGU").ends_with(&format!("found `GGU`: {INCOMPLETE}")));
}

#[test]
fn r_a3_files_of_other_kinds_are_recognised() {
    for (start, kind) in [
        (&b"<!doctype html>"[..], "this is a web page, download the file itself"),
        (b"\n  <html>", "this is a web page, download the file itself"),
        (b"version https://git-lfs.github.com/spec/v1", "this is a Git LFS pointer, run"),
        (b"PK\x03\x04", "this is a zip file"),
        (b"\x1f\x8b\x08\0", "this is a gzip file, unpack it first"),
        (b"GGML\x01\0\0\0", "this is a file of llama.cpp from before GGUF"),
        (b"lmgg\x01\0\0\0", "this is a file of llama.cpp from before GGUF"),
        (b"tjgg\x03\0\0\0", "this is a file of llama.cpp from before GGUF"),
        (b"FUGG\0\0\0\x03", "this is a big-endian file, little-endian ones are read"),
        (b"\0\0\0\0", "this is another kind of file, or a damaged one"),
    ] {
        let message = refusal(start);
        let first = start[..4].escape_ascii();
        assert!(message.starts_with(&format!("byte 0: expected `GGUF`, found `{first}`: {kind}")));
        // By its name it should have been GGUF.
        let folder = Folder::new();
        let path = folder.write("model.gguf", [start, &[0; 64]].concat());
        let message = Checkpoint::open(&path, true).unwrap_err().to_string();
        assert!(message.contains(kind) || start.starts_with(b"PK"), "{message}");
    }
}

#[test]
fn r_a4_versions_are_two_and_three() {
    for (version, reason) in [
        (0, format!("version is 0, expected 2 or 3; {DAMAGED}")),
        (
            1,
            "version is 1, of 2023, expected 2 or 3; convert the model again with a current \
             llama.cpp"
                .into(),
        ),
        (4, "version is 4, 2 and 3 are read; a newer boostr may read it".into()),
        (99, "version is 99, 2 and 3 are read; a newer boostr may read it".into()),
        (u32::MAX, "version is 4294967295, 2 and 3 are read; a newer boostr may read it".into()),
    ] {
        assert_eq!(refusal(start(version, 0, 0)), format!("byte 4: header: {reason}"));
    }
    for version in [2, 3] {
        assert!(open(start(version, 0, 0)).unwrap().is_empty());
    }
}

#[test]
fn r_a5_a_big_endian_file_is_called_so() {
    let mut file = b"GGUF".to_vec();
    file.extend([3_u32.to_be_bytes(), [0; 4], [0; 4], [0; 4], [0; 4]].concat());
    let expected = "byte 4: header: file is big-endian (version 3), little-endian files are read; \
                    convert it with `gguf-convert-endian FILE little` of the Python package gguf";
    assert_eq!(refusal(file), expected);
}

#[test]
fn r_a6_tensors_that_the_file_has_no_room_for_are_not_counted_on() {
    let message = refusal(start(3, u64::MAX, 0));
    assert_eq!(
        message,
        format!(
            "byte 8: header: number of tensors is 18446744073709551615 of at least 25 bytes, found \
             8 bytes; {DAMAGED}"
        )
    );
    let mut room = start(3, 100_001, 0);
    room.resize(24 + 25 * 100_001, 0);
    let expected = "byte 8: header: number of tensors is 100001, at most 100000 are read";
    assert_eq!(refusal(room), expected);
    assert!(refusal(start(3, 1, 0)).ends_with(INCOMPLETE));
}

#[test]
fn r_a7_keys_that_the_file_has_no_room_for_are_not_counted_on() {
    for keys in [u64::MAX, 1 << 63, 1 << 60] {
        let expected = format!(
            "byte 16: header: number of keys is {keys} of at least 14 bytes, found 0 bytes; \
             {DAMAGED}"
        );
        assert_eq!(refusal(start(3, 0, keys)), expected);
    }
    let expected = "byte 16: header: number of keys is 65537, at most 65536 are read";
    let mut room = start(3, 0, 65_537);
    room.resize(24 + 14 * 65_537, 0);
    assert_eq!(refusal(room), expected);
}

#[test]
fn r_a8_lengths_of_names_are_checked_before_anything_is_read() {
    for length in [u64::MAX, u64::MAX - 7, 1 << 40, 65_536] {
        let file = [start(3, 0, 1), length.to_le_bytes().to_vec(), vec![0; 64]].concat();
        let expected = format!(
            "byte 24: key 1 of 1: name of {length} bytes, at most 65535 are read; {DAMAGED}"
        );
        assert_eq!(refusal(file), expected);
    }
    let file = [start(3, 0, 1), 65_535_u64.to_le_bytes().to_vec(), vec![b'k'; 64]].concat();
    let expected = format!("byte 32: key 1 of 1: name needs 65535 bytes, found 64; {INCOMPLETE}");
    assert_eq!(refusal(file), expected);
    assert!(open(file_with_key_of(65_535)).is_ok());

    let file = [start(3, 0, 1), key("k", STRING, (65_u64 << 20).to_le_bytes())].concat();
    let expected = "text of 68157440 bytes, at most 67108864 are read; the file is damaged";
    assert_eq!(refusal(file), format!("byte 37: key `k`: {expected}"));
    let file = [start(3, 0, 1), key("k", STRING, 9_u64.to_le_bytes())].concat();
    let expected = format!("byte 45: key `k`: text needs 9 bytes, found 0; {INCOMPLETE}");
    assert_eq!(refusal(file), expected);
}

fn file_with_key_of(length: usize) -> Vec<u8> {
    file(&[key("k".repeat(length), U8, [1])], &[], 0)
}

#[test]
fn r_a9_kinds_of_values_are_those_of_the_format() {
    for kind in [13, 99, u32::MAX] {
        let expected =
            format!("byte 33: key `k`: kind of value is {kind}, expected 0 to 12; {DAMAGED}");
        assert_eq!(refused_key(key("k", kind, [0; 8])), expected);
    }
}

#[test]
fn r_a10_kinds_of_elements_are_those_of_the_format() {
    for kind in [13, 77, u32::MAX] {
        let message = refused_key(key("k", ARRAY, array(kind, 1, [0; 8])));
        let expected =
            format!("byte 37: key `k`: kind of elements is {kind}, expected 0 to 12; {DAMAGED}");
        assert_eq!(message, expected);
    }
}

#[test]
fn r_a11_arrays_that_the_file_has_no_room_for_are_not_allocated() {
    for len in [1 << 63, u64::MAX, u64::MAX / 4 + 1] {
        for (kind, size) in [(U8, 1), (U32, 4), (U64, 8), (STRING, 8), (ARRAY, 12), (BOOL, 1)] {
            let bytes = file(&[key("k", ARRAY, array(kind, len, [0; 8]))], &[], 0);
            let rest = bytes.len() - 49;
            let expected = format!(
                "byte 41: key `k`: number of elements is {len} of at least {size} bytes, found \
                 {rest} bytes; {DAMAGED}"
            );
            assert_eq!(refusal(bytes), expected);
        }
    }
    let message = refused_key(key("k", ARRAY, array(U32, 1 << 34, [0; 8])));
    assert!(message.ends_with(INCOMPLETE), "{message}");
}

#[test]
fn r_a12_arrays_are_eight_deep_at_most() {
    let nested = |depth: usize| {
        let inner = array(U32, 1, 7_u32.to_le_bytes());
        (1..depth).fold(inner, |inner, _| array(ARRAY, 1, inner))
    };
    let value = open(file(&[key("k", ARRAY, nested(8))], &[], 0)).unwrap();
    let mut value = value.gguf().unwrap().get("k").unwrap().clone();
    for _ in 0..8 {
        let gguf::Value::Array(array) = value else { panic!("{value}") };
        value = array.iter().next().unwrap();
    }
    assert_eq!(value, gguf::Value::U32(7));

    // The ninth is at 37, after eight starts of 12 bytes.
    let expected =
        format!("byte {}: key `k`: arrays in arrays are more than 8 deep; {DAMAGED}", 37 + 8 * 12);
    assert_eq!(refused_key(key("k", ARRAY, nested(9))), expected);
    let mut chain = array(ARRAY, 1, []).repeat(200_000);
    chain.extend(array(U8, 0, []));
    assert_eq!(refused_key(key("k", ARRAY, chain)), expected);
}

#[test]
fn r_a14_keys_have_names_of_their_own() {
    assert_eq!(refused_key(key("", U8, [0])), "byte 24: key 1 of 1: name is empty");
    let twice = file(&[key("k", U8, [0]), key("k", BOOL, [0])], &[], 0);
    assert_eq!(refusal(twice), "byte 38: key `k`: comes a second time");
    let expected = "byte 33: key 1 of 1: name is not UTF-8";
    assert_eq!(refused_key(key(b"k\xff", U8, [0])), expected);
}

#[test]
fn r_a15_the_alignment_is_a_power_of_two() {
    let with = |kind: u32, value: &[u8]| file(&[key("general.alignment", kind, value)], &[], 0);
    for alignment in [0_u32, 1, 4, 13, 48, 1 << 17, 1 << 31, u32::MAX] {
        let expected = format!(
            "byte 53: key `general.alignment`: expected a power of two from 8 to 65536 (u32), found \
             {alignment} (u32)"
        );
        assert_eq!(refusal(with(U32, &alignment.to_le_bytes())), expected);
    }
    for (kind, value, found) in [
        (I32, 32_i32.to_le_bytes().to_vec(), "32 (i32)"),
        (U64, 32_u64.to_le_bytes().to_vec(), "32 (u64)"),
        (STRING, text("32"), "`32` (string)"),
        (ARRAY, array(U32, 1, 32_u32.to_le_bytes()), "array of 1 u32"),
    ] {
        assert!(refusal(with(kind, &value)).ends_with(&format!("(u32), found {found}")));
    }
    for alignment in [8_u32, 16, 32, 64, 65_536] {
        open(with(U32, &alignment.to_le_bytes())).unwrap();
    }
}

#[test]
fn r_a16_tensors_have_four_dimensions_at_most() {
    for rank in [5, 1 << 31, u32::MAX] {
        let mut bytes = file(&[], &[tensor("a", &[1], TF32, 0)], 64);
        bytes[33..37].copy_from_slice(&rank.to_le_bytes());
        let expected = format!("byte 33: tensor `a`: has {rank} dimensions, at most 4");
        assert_eq!(refusal(bytes), expected);
    }
    let four = open(file(&[], &[tensor("a", &[4, 3, 2, 1], TF32, 0)], 96)).unwrap();
    assert_eq!(four.get("a").unwrap().shape, [1, 2, 3, 4]);
    let none = open(file(&[], &[tensor("a", &[], TF32, 0)], 4)).unwrap();
    assert_eq!(none.get("a").unwrap().shape, [0; 0]);
}

#[test]
fn r_a17_sizes_that_no_memory_has_are_told() {
    for dims in [&[1 << 62][..], &[1 << 32, 1 << 32], &[1 << 20; 4], &[u64::MAX, 1], &[3, 1 << 63]]
    {
        let shape: Vec<_> = dims.iter().rev().collect();
        let expected = format!(
            "byte 37: tensor `a`: F32 of shape {shape:?} is more bytes than memory has; {DAMAGED}"
        );
        assert_eq!(refused_tensor(dims, TF32, 0), expected);
    }
    // Both fit into 64 bits and not into the file; the second is the example of the CVE.
    let bytes = file(&[], &[tensor("a", &[1 << 61], TI8, 0)], 64);
    let end = (1_u64 << 61) + bytes.len() as u64 - 64;
    let size = bytes.len();
    let ends =
        |end| format!("byte 49: tensor `a`: its data ends at byte {end}, the file at {size}");
    assert_eq!(refusal(bytes), format!("{}; {DAMAGED}", ends(end)));
    let end = ((1_u64 << 42) + 1) * 4 + size as u64 - 64;
    let message = refused_tensor(&[(1 << 42) + 1], TF32, 0);
    assert_eq!(message, format!("{}; {DAMAGED}", ends(end)));
    assert!(refused_tensor(&[(1 << 42) + 1, (1 << 20) + 1], TF32, 0).contains("more bytes than"));
}

#[test]
fn r_a18_types_are_known_or_named() {
    let supported = "; supported: f32, f16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, \
                     q6_k, q8_k, iq2_xxs, iq2_xs, iq3_xxs, iq1_s, iq4_nl, iq3_s, iq2_s, iq4_xs, i8, \
                     i16, i32, i64, f64, iq1_m, bf16, tq1_0, tq2_0, mxfp4";
    for (number, reason) in [
        (9999, "unknown type 9999"),
        (u32::MAX, "unknown type 4294967295"),
        (4, "type 4 (q4_2, which ggml removed) is not supported"),
        (9, "type 9 (q8_1, which is no type for files) is not supported"),
        (31, "type 31 (q4_0_4_4, which ggml removed) is not supported"),
        (40, "type 40 (nvfp4) is not supported"),
    ] {
        let expected = format!("byte 45: tensor `a`: {reason}{supported}");
        assert_eq!(refused_tensor(&[32], number, 0), expected);
    }
}

#[test]
fn r_a19_rows_are_whole_blocks() {
    let expected =
        "byte 37: tensor `a`: q4_k of shape [2, 7]: rows are not whole blocks of 256".to_owned();
    assert_eq!(refused_tensor(&[7, 2], TQ4_K, 0), expected);
    assert!(refused_tensor(&[7, 256], TQ4_K, 0).contains("rows are not whole blocks"));
    assert!(refused_tensor(&[], TQ8_0, 0).contains("rows are not whole blocks"));
    let whole = open(file(&[], &[tensor("a", &[256, 2], TQ4_K, 0)], 288)).unwrap();
    let entry = whole.get("a").unwrap();
    assert_eq!((&entry.shape[..], entry.data.len()), (&[2, 256][..], 288));
}

#[test]
fn r_a20_data_lies_inside_of_the_file_at_aligned_offsets() {
    let size = file(&[], &[tensor("a", &[8], TF32, 0)], 64).len() as u128;
    let refused = |offset: u64| refused_tensor(&[8], TF32, offset);
    for offset in [1, 31, 33, u64::MAX] {
        let expected =
            format!("byte 49: tensor `a`: offset is {offset}, expected a multiple of 32");
        assert_eq!(refused(offset), expected);
    }
    for offset in [64, 1 << 20, 1 << 60, u64::MAX - 31] {
        let end = size - 64 + u128::from(offset) + 32;
        let why = if end < 1 << 44 { INCOMPLETE } else { DAMAGED };
        let expected =
            format!("byte 49: tensor `a`: its data ends at byte {end}, the file at {size}; {why}");
        assert_eq!(refused(offset), expected);
    }
    assert!(open(file(&[], &[tensor("a", &[8], TF32, 32)], 64)).is_ok());
    // What is beyond the end is nothing, wherever it is.
    assert!(refused_tensor(&[0], TF32, 1 << 20).contains("its data ends at"));
}

#[test]
fn r_a20_data_of_two_tensors_does_not_overlap() {
    let two = |a: u64, b: u64, len| {
        file(&[], &[tensor("a", &[8], TF32, a), tensor("b", &[len], TF32, b)], 128)
    };
    let start = two(0, 0, 8).len() - 128;
    let reason = format!("tensor `b` begins at byte {start}, tensor `a` ends at {}", start + 32);
    assert_eq!(refusal(two(0, 0, 8)), format!("byte 82: {reason}"));
    assert!(refusal(two(32, 0, 9)).contains("tensor `a` begins at"));
    assert!(open(two(32, 0, 8)).is_ok());
    assert!(open(two(96, 32, 8)).is_ok());
    // Nothing overlaps nothing.
    assert!(open(two(0, 0, 0)).is_ok());
}

#[test]
fn r_a22_tensors_have_names_of_their_own() {
    let two = [tensor("a", &[1], TF32, 0), tensor("a", &[1], TF32, 32)];
    assert_eq!(refusal(file(&[], &two, 64)), "byte 57: tensor `a`: comes a second time");
    let none = file(&[], &[tensor("", &[1], TF32, 0)], 64);
    assert_eq!(refusal(none), "byte 24: tensor 1 of 1: name is empty");
    let long = file(&[], &[tensor("a".repeat(1025), &[1], TF32, 0)], 64);
    assert!(refusal(long).contains("name of 1025 bytes, at most 1024 are read"));
    assert!(open(file(&[], &[tensor("a".repeat(1024), &[1], TF32, 0)], 64)).is_ok());
    let bad = file(&[], &[tensor(b"ab\xc3", &[1], TF32, 0)], 64);
    assert_eq!(refusal(bad), "byte 34: tensor 1 of 1: name is not UTF-8");
    let escape = file(&[], &[tensor("\x1b[2J", &[1, 1, 1, 1], 99, 0)], 64);
    assert!(refusal(escape).contains(r"tensor `\u{1b}[2J`: "));
}

#[test]
fn truth_values_are_zero_or_one_and_texts_utf8() {
    let expected = "byte 37: key `k`: bool is 2, expected 0 or 1";
    assert_eq!(refused_key(key("k", BOOL, [2])), expected);
    let expected = "byte 51: key `k`: bool is 255, expected 0 or 1";
    assert_eq!(refused_key(key("k", ARRAY, array(BOOL, 3, [0, 1, 255]))), expected);
    let expected = "byte 46: key `k`: text is not UTF-8";
    assert_eq!(refused_key(key("k", STRING, text(b"a\xff"))), expected);
    let texts = [text("ab"), text(b"\xf0\x9f")].concat();
    assert_eq!(
        refused_key(key("k", ARRAY, array(STRING, 2, texts))),
        "byte 67: key `k`: text is not UTF-8"
    );
}

#[test]
fn r_a23_every_prefix_of_a_header_is_an_incomplete_download() {
    for name in HEADERS {
        let whole = read(name);
        let first = open(&whole).unwrap().iter().map(|(_, t)| t.data.range().start).min().unwrap();
        for end in 1..=first {
            let text = refusal(&whole[..end]);
            assert!(text.ends_with(INCOMPLETE), "{name} cut to {end}: {text}");
        }
        let mut random = Random(0x5eed_0000 + first as u64);
        let last = open(&whole).unwrap().iter().map(|(_, t)| t.data.range().end).max().unwrap();
        for _ in 0..20 {
            let end = first + random.below(last - first);
            let text = refusal(&whole[..end]);
            let expected = format!("the file at {end}; {INCOMPLETE}");
            assert!(text.ends_with(&expected), "{name}: {text}");
        }
        // Only the padding of the last tensor may be missing.
        open(&whole[..last]).unwrap();
    }
}

/// The metadata of a file of these keys.
fn metadata(keys: &[Vec<u8>]) -> Metadata {
    open(file(keys, &[], 0)).unwrap().gguf().unwrap().clone()
}

#[test]
fn r_a24_a25_a_number_out_of_its_range_or_of_another_kind_is_told() {
    let u32s = |n: u32| n.to_le_bytes();
    for (kind, value, found) in [
        (U32, u32s(0).to_vec(), "0 (u32)"),
        (U32, u32s(1 << 31).to_vec(), "2147483648 (u32)"),
        (I32, (-3_i32).to_le_bytes().to_vec(), "-3 (i32)"),
        (U64, u64::MAX.to_le_bytes().to_vec(), "18446744073709551615 (u64)"),
        (STRING, text("24"), "`24` (string)"),
        (BOOL, vec![1], "true (bool)"),
        (F32, 24_f32.to_le_bytes().to_vec(), "24 (f32)"),
        (ARRAY, array(U32, 1, u32s(24)), "array of 1 u32"),
    ] {
        let keys = metadata(&[key("mamba2.block_count", kind, value)]);
        let message = keys.usize("mamba2.block_count", 1..=10_000).unwrap_err().to_string();
        let expected = format!(
            "`t`: field `mamba2.block_count`: expected a whole number from 1 to 10000, found {found}"
        );
        assert_eq!(message, expected);
    }
    for (kind, value) in [
        (U8, vec![24]),
        (U32, u32s(24).to_vec()),
        (I32, 24_i32.to_le_bytes().to_vec()),
        (U64, 24_u64.to_le_bytes().to_vec()),
    ] {
        let keys = metadata(&[key("n", kind, value)]);
        assert_eq!(keys.usize("n", 1..=24).unwrap(), Some(24));
        assert_eq!(keys.required_usize("n", 1..=24).unwrap(), 24);
    }
    let message = metadata(&[]).required_usize("n", 1..=24).unwrap_err().to_string();
    assert_eq!(message, "`t`: field `n`: missing");
}

#[test]
fn r_a25_a_number_for_each_layer_is_one_number_or_an_array() {
    let ints = |values: &[i32]| values.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>();
    let keys = metadata(&[
        key("one", U32, 2_u32.to_le_bytes()),
        key("each", ARRAY, array(I32, 3, ints(&[0, 8, 0]))),
        key("negative", ARRAY, array(I32, 3, ints(&[0, -8, 0]))),
        key("texts", ARRAY, array(STRING, 3, [text(""), text(""), text("")].concat())),
    ]);
    assert_eq!(keys.per_layer("one", 3, 0..=9).unwrap(), Some(vec![2, 2, 2]));
    assert_eq!(keys.per_layer("each", 3, 0..=9).unwrap(), Some(vec![0, 8, 0]));
    assert_eq!(keys.per_layer("none", 3, 0..=9).unwrap(), None);
    let message = |key, count| keys.per_layer(key, count, 0..=9).unwrap_err().to_string();
    assert_eq!(
        message("each", 4),
        "`t`: field `each`: expected a whole number from 0 to 9, or an array of 4 such numbers, \
         found array of 3 i32"
    );
    assert_eq!(
        message("negative", 3),
        "`t`: field `negative`: element 1: expected a whole number from 0 to 9, found -8 (i32)"
    );
    assert!(
        message("texts", 3)
            .ends_with("element 0: expected a whole number from 0 to 9, found `` (string)")
    );
}

#[test]
fn r_a26_a27_lists_of_another_kind_are_told() {
    let keys = metadata(&[
        key("tokens", ARRAY, array(STRING, 2, [text("a"), text("é")].concat())),
        key("scores", ARRAY, array(F32, 2, [0_f32.to_le_bytes(), (-1_f32).to_le_bytes()].concat())),
        key("types", ARRAY, array(I32, 2, [1_i32.to_le_bytes(), 3_i32.to_le_bytes()].concat())),
        key("huge", ARRAY, array(U64, 1, u64::MAX.to_le_bytes())),
        key("template", STRING, text("{{ x }}")),
        key("add", BOOL, [1]),
        key("eps", F32, 1e-5_f32.to_le_bytes()),
    ]);
    assert_eq!(keys.strings("tokens").unwrap(), Some(vec!["a", "é"]));
    assert_eq!(keys.floats("scores").unwrap(), Some(vec![0.0, -1.0]));
    assert_eq!(keys.ints("types").unwrap(), Some(vec![1, 3]));
    assert_eq!(keys.text("template").unwrap(), Some("{{ x }}"));
    assert_eq!(keys.bool("add").unwrap(), Some(true));
    assert_eq!(keys.float("eps", 0.0..=1.0).unwrap(), Some(1e-5));
    assert_eq!(keys.strings("none").unwrap(), None);
    for (error, expected) in [
        (keys.strings("scores").unwrap_err(), "expected an array of strings, found array of 2 f32"),
        (keys.strings("template").unwrap_err(), "an array of strings, found `{{ x }}` (string)"),
        (keys.floats("types").unwrap_err(), "expected an array of floats, found array of 2 i32"),
        (keys.ints("tokens").unwrap_err(), "an array of whole numbers, found array of 2 string"),
        (keys.ints("huge").unwrap_err(), "an array of whole numbers, found array of 1 u64"),
        (keys.text("tokens").unwrap_err(), "expected a string, found array of 2 string"),
        (keys.bool("eps").unwrap_err(), "expected true or false, found 0.00001 (f32)"),
        (keys.float("eps", 1.0..=2.0).unwrap_err(), "a float from 1 to 2, found 0.00001 (f32)"),
        (keys.float("add", 1.0..=2.0).unwrap_err(), "a float from 1 to 2, found true (bool)"),
    ] {
        assert!(error.to_string().ends_with(expected), "{error}");
    }
}

#[test]
fn r_a29_values_and_scales_that_are_no_numbers_are_found() {
    let mut bytes = file(
        &[],
        &[
            tensor("floats", &[4, 2], TF32, 0),
            tensor("blocks", &[64, 2], TQ8_0, 32),
            tensor("whole", &[8], TI8, 32 + 160),
            tensor("fine", &[32], TQ8_0, 32 + 192),
        ],
        32 + 192 + 64,
    );
    let start = bytes.len() - (32 + 192 + 64);
    // Elements 3 and 6 of the floats, and the scale of the third block of four.
    bytes[start + 12..start + 16].copy_from_slice(&f32::NAN.to_le_bytes());
    bytes[start + 24..start + 28].copy_from_slice(&f32::NEG_INFINITY.to_le_bytes());
    let block = start + 32 + 2 * 34;
    bytes[block..block + 2].copy_from_slice(&[0x00, 0x7c]);
    bytes[block + 2..block + 34].fill(3);
    bytes[start + 32 + 160..start + 32 + 168].fill(0xff);

    let mut steps = Vec::new();
    let found = not_finite(&open(&bytes).unwrap(), |done| steps.push(done)).unwrap();
    assert_eq!(
        found,
        [
            NotFinite {
                name: "blocks".into(),
                nan: 0,
                infinite: 32,
                elements: 64..96,
                byte: block
            },
            NotFinite {
                name: "floats".into(),
                nan: 1,
                infinite: 1,
                elements: 3..4,
                byte: start + 12
            },
        ]
    );
    assert!(steps.is_sorted() && steps.last() == Some(&(32 + 136 + 8 + 34)), "{steps:?}");
    assert_eq!(
        not_finite(&Checkpoint::open(&corpus("mamba2-q4_k_m.gguf"), false).unwrap(), |_| ())
            .unwrap(),
        []
    );
}

/// The list of `tests/test-gguf.cpp` of llama.cpp, and what becomes of each. Where ggml decides
/// otherwise it is said.
#[test]
fn the_bad_files_of_llama_cpp_are_told_apart() {
    let one = |dims: &[u64], number, offset| file(&[], &[tensor("t", dims, number, offset)], 64);
    let align = |kind: u32, value: u32, tensors: &[Vec<u8>]| {
        file(&[key("general.alignment", kind, value.to_le_bytes())], tensors, 256)
    };
    let two = [tensor("a", &[1], TF32, 0), tensor("b", &[1], TF32, 4)];
    let apart = [tensor("a", &[1], TF32, 0), tensor("b", &[1], TF32, 8)];
    let big = 0x7fff_ffff_ffff_ffc0;
    let mem_size = [tensor("a", &[big], TI8, 0), tensor("b", &[big], TI8, big)];
    let good = [tensor("a", &[3, 2], TF32, 0), tensor("b", &[256], TQ4_K, 32)];
    for (case, bytes, expected) in [
        ("HEADER_BAD_MAGIC", [b"FUGG", &start(3, 0, 0)[4..]].concat(), "expected `GGUF`"),
        ("HEADER_BAD_VERSION_0", start(0, 0, 0), "version is 0"),
        ("HEADER_BAD_VERSION_1", start(1, 0, 0), "version is 1"),
        ("HEADER_BAD_VERSION_FUTURE", start(4, 0, 0), "version is 4"),
        ("HEADER_BAD_N_TENSORS", start(3, u64::MAX, 0), "number of tensors is 1844"),
        ("HEADER_BAD_N_KV", start(3, 0, u64::MAX), "number of keys is 1844"),
        ("HEADER_EMPTY", start(3, 0, 0), ""),
        ("KV_BAD_KEY_SIZE", [&start(3, 0, 1)[..], &[0xff; 64]].concat(), "name of 1844"),
        ("KV_EMPTY_KEY", file(&[key("", U8, [0])], &[], 0), "name is empty"),
        ("KV_BAD_TYPE", file(&[key("k", 13, [0])], &[], 0), "kind of value is 13"),
        ("KV_DUPLICATE_KEY", file(&[key("k", U8, [0]), key("k", U8, [0])], &[], 0), "second time"),
        ("KV_BAD_ALIGN", align(U32, 13, &[]), "power of two"),
        ("KV_WRONG_TYPE_ALIGN", align(I32, 32, &[]), "found 32 (i32)"),
        ("KV_SUCCESS", file(&[key("k", U8, [0]), key("l", BOOL, [1])], &[], 0), ""),
        // ggml reads names of up to 63 bytes.
        ("TENSORS_BAD_NAME_SIZE", file(&[], &[tensor("n".repeat(86), &[1], TF32, 0)], 4), ""),
        ("TENSORS_BAD_N_DIMS", one(&[1; 5], TF32, 0), "has 5 dimensions"),
        ("TENSORS_BAD_SHAPE", one(&[u64::MAX, 1], TF32, 0), "more bytes than memory has"),
        ("TENSORS_ZERO_DIM", one(&[8, 0], TF32, 0), ""),
        ("TENSORS_NE_TOO_BIG", one(&[1 << 33, 1 << 33], TF32, 0), "more bytes than memory has"),
        ("TENSORS_NBYTES_TOO_BIG", one(&[1 << 31, 1 << 31], 27, 0), "more bytes than memory has"),
        (
            "TENSORS_NBYTES_PAD_WRAP",
            one(&[4, (1 << 30) - 1, (1 << 30) + 1], TF32, 0),
            "its data ends at byte 18446744073709551",
        ),
        ("TENSORS_BAD_TYPE", one(&[32], 43, 0), "unknown type 43"),
        ("TENSORS_BAD_OFFSET", one(&[1], TF32, u64::MAX), "expected a multiple of 32"),
        (
            "TENSORS_DUPLICATE_NAME",
            file(&[], &[&good[..1], &good[..1]].concat(), 64),
            "second time",
        ),
        ("TENSORS_BAD_ALIGN", align(U32, 13, &two), "power of two"),
        (
            "TENSORS_INCONSISTENT_ALIGN",
            file(&[], &two, 64),
            "offset is 4, expected a multiple of 32",
        ),
        ("TENSORS_SUCCESS", file(&[], &good, 256), ""),
        // ggml accepts 1, 2 and 4 too; the format says a multiple of 8.
        ("TENSORS_CUSTOM_ALIGN", align(U32, 1, &two), "power of two from 8"),
        ("TENSORS_CUSTOM_ALIGN", align(U32, 8, &apart), ""),
        ("DATA_NOT_ENOUGH_DATA", file(&[], &good, 32 + 143), "the file at"),
        ("DATA_BAD_ALIGN", align(U32, 13, &good), "power of two"),
        ("DATA_INCONSISTENT_ALIGN", file(&[], &two, 256), "offset is 4"),
        ("DATA_MEM_SIZE_OVERFLOW", file(&[], &mem_size, 32), "its data ends at byte"),
        ("DATA_SUCCESS", file(&[], &good, 32 + 144), ""),
        ("DATA_CUSTOM_ALIGN", align(U32, 64, &good[..1]), ""),
    ] {
        match open(bytes) {
            Ok(_) => assert_eq!(expected, "", "{case} was opened"),
            Err(error) => {
                let text = error.to_string();
                assert!(!expected.is_empty() && text.contains(expected), "{case}: {text}");
            }
        }
    }
}

/// A vocabulary of a quarter of a million tokens stays where it is until it is asked for.
#[test]
fn large_arrays_are_ranges_of_the_file() {
    let tokens: Vec<u8> = (0..250_000).flat_map(|i| text(format!("token{i}"))).collect();
    let size = tokens.len();
    let bytes = file(&[key("tokens", ARRAY, array(STRING, 250_000, tokens))], &[], 0);
    let bytes = Bytes::new(bytes);
    let (keys, _) = gguf::read("t".as_ref(), &bytes).unwrap();
    let tokens = keys.strings("tokens").unwrap().unwrap();
    assert_eq!((tokens.len(), tokens[249_999]), (250_000, "token249999"));
    let all = bytes.as_ptr_range();
    assert!(tokens.iter().all(|token| all.contains(&token.as_ptr())), "{size} bytes were copied");
}

#[test]
fn types_of_ggml_are_ours() {
    for (number, dtype, size) in [
        (0, Dtype::F32, 4),
        (1, Dtype::F16, 2),
        (24, Dtype::I8, 1),
        (25, Dtype::I16, 2),
        (26, Dtype::I32, 4),
        (27, Dtype::I64, 8),
        (28, Dtype::F64, 8),
        (30, Dtype::BF16, 2),
    ] {
        let entry = open(file(&[], &[tensor("t", &[5], number, 0)], 40)).unwrap();
        let entry = entry.get("t").unwrap();
        assert_eq!((entry.dtype, entry.data.len()), (dtype, 5 * size));
    }
}
