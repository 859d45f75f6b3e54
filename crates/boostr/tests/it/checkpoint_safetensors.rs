//! The safetensors reader and writer, against the rules of the format and against its own library.

use std::collections::{BTreeMap, HashMap};
use std::fs;

use crate::common::{Folder, Random, safetensors_file};
use boostr::checkpoint::{Checkpoint, Dtype, safetensors as format};
use boostr::error::Error;
use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype as Theirs, TensorView, serialize};

fn open(file: Vec<u8>) -> Result<Checkpoint, Error> {
    Checkpoint::from_safetensors("t", file)
}

/// The message for a file of this header and so many bytes of data.
#[track_caller]
fn refusal(header: &str, len: usize) -> String {
    open(safetensors_file(header, &vec![0; len])).unwrap_err().to_string()
}

/// A header of F32 tensors `(name, shape, begin, end)`.
fn header(tensors: &[(&str, &str, usize, usize)]) -> String {
    let fields: Vec<_> = tensors
        .iter()
        .map(|(name, shape, begin, end)| {
            format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
        })
        .collect();
    format!("{{{}}}", fields.join(","))
}

#[test]
fn r_b1_a_header_length_beyond_the_limit_is_named() {
    for length in [u64::MAX, 1 << 63, 100_000_001] {
        let file = [&length.to_le_bytes()[..], b"{}"].concat();
        let message = open(file).unwrap_err().to_string();
        let expected =
            format!("`t`: safetensors header length is {length}, at most 100000000 is allowed");
        assert_eq!(message, expected);
    }
}

#[test]
fn r_b1_a_header_longer_than_the_file_is_named() {
    let file = [&100u64.to_le_bytes()[..], b"{}"].concat();
    let expected =
        "`t`: safetensors header length is 100, but only 2 bytes follow (truncated file?)";
    assert_eq!(open(file).unwrap_err().to_string(), expected);
}

#[test]
fn r_b1_a_file_too_short_for_a_header_length_is_named() {
    for len in 0..8 {
        let message = open(vec![0; len]).unwrap_err().to_string();
        assert!(message.starts_with(&format!("`t`: file has {len} bytes")), "{message}");
    }
}

#[test]
fn files_of_other_kinds_are_recognised() {
    for (start, kind) in [
        (&b"PK\x03\x04\x14\0\0\0\x08\0\0\0"[..], "a zip file"),
        (b"GGUF\x03\0\0\0\xff\xff\xff\xff", "a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1", "a Git LFS pointer: incomplete download"),
        (b"<!doctype html><html>", "a web page"),
    ] {
        let message = open(start.to_vec()).unwrap_err().to_string();
        assert!(message.contains(&format!("it looks like {kind}")), "{message}");
    }
}

#[test]
fn a_header_starts_with_its_brace() {
    for (text, found) in [(" {}", "byte 0x20"), ("[]", "byte 0x5b"), ("", "nothing")] {
        let expected = format!("`t`: safetensors header: expected `{{` at byte 8, found {found}");
        assert_eq!(refusal(text, 0), expected);
    }
}

#[test]
fn a_header_may_end_in_spaces_but_in_nothing_else() {
    assert!(open(safetensors_file("{}   ", b"")).unwrap().is_empty());
    assert!(refusal("{}\0\0", 0).contains("trailing characters"));
    assert!(refusal("{} {}", 0).contains("trailing characters"));
    assert!(refusal("{", 0).contains("EOF"));
    assert!(refusal("{\"a\u{1}\":0}", 0).contains("control character"));
}

#[test]
fn r_b3_a_duplicate_tensor_is_named() {
    let message = refusal(&header(&[("a", "[1]", 0, 4), ("a", "[1]", 4, 8)]), 8);
    assert_eq!(message, "`t`: safetensors header: duplicate tensor `a` at line 1 column 57");
}

#[test]
fn r_b3_a_duplicate_field_or_key_is_named() {
    let twice = r#"{"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}"#;
    assert!(refusal(twice, 4).contains("tensor `a`: duplicate field `shape`"));
    let twice = r#"{"__metadata__":{},"__metadata__":{}}"#;
    assert!(refusal(twice, 0).contains("duplicate key `__metadata__`"));
    let twice = r#"{"__metadata__":{"k":"1","k":"2"}}"#;
    assert!(refusal(twice, 0).contains("key `__metadata__`: duplicate key `k`"));
}

#[test]
fn r_b4_a_hole_between_tensors_is_named() {
    let message = refusal(&header(&[("a", "[1]", 0, 4), ("b", "[1]", 8, 12)]), 12);
    assert_eq!(message, "`t`: hole: tensor `a` ends at 4, tensor `b` begins at 8");
    let message = refusal(&header(&[("a", "[1]", 4, 8)]), 8);
    assert_eq!(message, "`t`: hole: the start of the data ends at 0, tensor `a` begins at 4");
}

#[test]
fn r_b4_an_overlap_of_tensors_is_named() {
    let message = refusal(&header(&[("a", "[2]", 0, 8), ("b", "[1]", 4, 8)]), 8);
    assert_eq!(message, "`t`: overlap: tensor `a` ends at 8, tensor `b` begins at 4");
}

#[test]
fn r_b4_trailing_bytes_are_named() {
    let message = refusal(&header(&[("a", "[1]", 0, 4)]), 6);
    assert_eq!(message, "`t`: trailing bytes: tensor `a` ends at 4, the data at 6");
    assert!(refusal("{}", 1).contains("trailing bytes: the start of the data ends at 0"));
}

#[test]
fn r_b4_data_cut_short_is_named() {
    let message = refusal(&header(&[("a", "[2]", 0, 8)]), 7);
    assert_eq!(message, "`t`: tensor `a` ends at 8, the data at 7 (truncated file?)");
}

#[test]
fn r_b4_offsets_that_run_backwards_are_named() {
    let message = refusal(&header(&[("a", "[1]", 4, 0)]), 4);
    assert_eq!(message, "`t`: tensor `a`: data_offsets [4, 0] run backwards");
}

#[test]
fn r_b6_a_dimension_that_is_no_count_is_named() {
    for (shape, found) in
        [("[-1]", "-1"), ("[1.5]", "1.5"), ("[1e2]", "100.0"), ("[\"1\"]", "\"1\"")]
    {
        let message = refusal(&header(&[("a", shape, 0, 4)]), 4);
        assert!(message.contains("tensor `a`: invalid ") && message.contains(found), "{message}");
    }
    assert!(refusal(&header(&[("a", "7", 0, 4)]), 4).contains("expected a list of dimensions"));
}

#[test]
fn r_b6_an_unsupported_dtype_is_named() {
    for dtype in ["F8_E4M3FNUZ", "F4", "C64", "f32", ""] {
        let text = format!(r#"{{"a":{{"dtype":"{dtype}","shape":[1],"data_offsets":[0,4]}}}}"#);
        let message = refusal(&text, 4);
        assert!(
            message.contains(&format!("tensor `a`: unsupported dtype `{dtype}` (BOOL, ")),
            "{message}"
        );
    }
}

#[test]
fn r_b6_a_shape_that_disagrees_with_the_bytes_shows_both() {
    let message = refusal(&header(&[("a", "[2,3]", 0, 20)]), 20);
    assert_eq!(message, "`t`: tensor `a`: F32 [2, 3] is 24 bytes, data_offsets [0, 20] have 20");
}

#[test]
fn r_b6_shapes_that_overflow_are_errors() {
    for shape in ["[18446744073709551615]", "[4294967296,4294967296]", "[4611686018427387905]"] {
        let message = refusal(&header(&[("a", shape, 0, 4)]), 4);
        assert!(message.contains("is more bytes than memory has"), "{message}");
    }
    let past_64_bits = refusal(&header(&[("a", "[18446744073709551616]", 0, 4)]), 4);
    assert!(past_64_bits.contains("tensor `a`: invalid"), "{past_64_bits}");
}

#[test]
fn r_b6_a_tensor_has_its_three_fields_and_no_other() {
    let missing = refusal(r#"{"a":{"dtype":"F32","shape":[1]}}"#, 4);
    assert!(missing.contains("tensor `a`: missing field `data_offsets`"), "{missing}");
    let more = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"scale":2}}"#;
    assert!(refusal(more, 4).contains("tensor `a`: unknown field `scale`"));
    let list = refusal(r#"{"a":["F32",[1],[0,4]]}"#, 4);
    assert!(list.contains("expected an object with dtype, shape and data_offsets"), "{list}");
    let offsets = refusal(r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}}"#, 4);
    assert!(offsets.contains("tensor `a`: "), "{offsets}");
}

#[test]
fn r_b6_more_than_sixteen_dimensions_are_refused() {
    let shape = |rank: usize| format!("[{}]", vec!["1"; rank].join(","));
    assert!(open(safetensors_file(header(&[("a", &shape(16), 0, 4)]), &[0; 4])).is_ok());
    let message = refusal(&header(&[("a", &shape(17), 0, 4)]), 4);
    assert!(message.contains("tensor `a`: shape has more than 16 dimensions"), "{message}");
}

#[test]
fn r_b6_deep_json_is_an_error_not_a_stack_overflow() {
    let deep = format!("{{\"a\":{}", "[".repeat(1_000_000));
    assert!(refusal(&deep, 0).contains("tensor `a`"));
    let deep = format!("{{\"a\":{}", "{\"shape\":".repeat(200_000));
    assert!(refusal(&deep, 0).contains("tensor `a`"));
}

#[test]
fn metadata_is_text_for_text() {
    let file = safetensors_file(r#"{"__metadata__":{"format":"pt","":""}}"#, b"");
    let metadata = open(file).unwrap().metadata().clone();
    assert_eq!(
        metadata,
        BTreeMap::from([("format".into(), "pt".into()), (String::new(), String::new())])
    );
    let number = refusal(r#"{"__metadata__":{"k":1}}"#, 0);
    assert!(number.contains("key `__metadata__`: key `k`: invalid type: integer `1`"), "{number}");
}

#[test]
fn long_and_hostile_names_leave_messages_short_and_plain() {
    let name = format!("\\u001b[31m{}", "x".repeat(100_000));
    let message = refusal(&header(&[(&name, "[1]", 4, 8)]), 8);
    assert!(message.len() < 300 && !message.contains('\x1b'), "{message}");
    let value = format!(r#"{{"a":"{}"}}"#, "y".repeat(100_000));
    assert!(refusal(&value, 0).len() < 500);
}

#[test]
fn tensors_without_elements_and_without_dimensions_are_tensors() {
    let text = header(&[("none", "[0,5]", 0, 0), ("one", "[]", 0, 4), ("end", "[3,0]", 4, 4)]);
    let checkpoint = open(safetensors_file(text, &1.5f32.to_le_bytes())).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["end", "none", "one"]);
    assert_eq!(checkpoint.get("none").unwrap().shape, [0, 5]);
    assert!(checkpoint.get("end").unwrap().to_f32().unwrap().is_empty());
    let one = checkpoint.get("one").unwrap();
    assert!(one.shape.is_empty());
    assert_eq!(one.to_f32().unwrap(), [1.5]);
}

#[test]
fn tensors_are_views_into_the_bytes_that_were_given() {
    static FILE: &[u8] =
        b"\x35\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}abc";
    let checkpoint = Checkpoint::from_safetensors("built-in", FILE).unwrap();
    let data = &checkpoint.get("a").unwrap().data;
    assert_eq!(data.as_ptr(), FILE[61..].as_ptr());
    assert_eq!((data.range(), (**data.owner()).as_ref().len()), (61..64, 64));
}

#[test]
fn names_change_all_at_once_or_not_at_all() {
    let text = header(&[("model.a", "[1]", 0, 4), ("a", "[1]", 4, 8), ("model.b", "[1]", 8, 12)]);
    let mut checkpoint = open(safetensors_file(text, &[0; 12])).unwrap();
    let strip = |name: &str| name.strip_prefix("model.").map(String::from);
    let message = checkpoint.rename(strip).unwrap_err().to_string();
    assert_eq!(message, "`t`: tensors `a` and `model.a` are both `a`");
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "model.a", "model.b"]);

    checkpoint.rename(|name| Some(format!("x.{name}"))).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["x.a", "x.model.a", "x.model.b"]);
    assert_eq!(checkpoint.get("x.a").unwrap().data.range().len(), 4);
}

#[test]
fn every_prefix_of_a_file_is_an_error() {
    let text = header(&[("a", "[2]", 0, 8), ("b", "[]", 8, 12)]);
    let file = safetensors_file(text, &[1; 12]);
    for len in 0..file.len() {
        assert!(open(file[..len].to_vec()).is_err(), "{len}");
    }
    assert!(open(file).is_ok());
}

#[test]
fn writing_refuses_what_reading_would() {
    let folder = Folder::new();
    let path = folder.path().join("x");
    let write = |tensors: &[(&str, Dtype, &[usize], &[u8])]| {
        format::write(&path, tensors, &BTreeMap::new()).unwrap_err().to_string()
    };
    let a: (&str, Dtype, &[usize], &[u8]) = ("a", Dtype::U8, &[1], &[0]);
    assert_eq!(write(&[a, a]), "argument `tensors`: the name `a` is taken");
    let reserved = ("__metadata__", Dtype::U8, &[1][..], &[0][..]);
    assert_eq!(write(&[reserved]), "argument `tensors`: the name `__metadata__` is taken");
    let short = ("b", Dtype::F32, &[2, 2][..], &[0; 12][..]);
    assert_eq!(
        write(&[short]),
        "argument `tensors`: tensor `b`: 12 bytes are given for F32 [2, 2]"
    );
    assert!(folder.names().is_empty());
}

#[test]
fn every_tensor_written_is_aligned_to_its_type() {
    let folder = Folder::new();
    let path = folder.path().join("x");
    let tensors: [(&str, Dtype, &[usize], &[u8]); 4] = [
        ("a", Dtype::U8, &[3], &[0; 3]),
        ("b", Dtype::F64, &[1], &[0; 8]),
        ("c", Dtype::BF16, &[1], &[0; 2]),
        ("d", Dtype::F32, &[1], &[0; 4]),
    ];
    format::write(&path, &tensors, &BTreeMap::new()).unwrap();
    let checkpoint = Checkpoint::open(&path, false).unwrap();
    for (name, entry) in checkpoint.iter() {
        assert_eq!(entry.data.range().start % entry.dtype.bytes_of(&[]).unwrap(), 0, "{name}");
    }
}

const DTYPES: [(Dtype, Theirs); 16] = [
    (Dtype::Bool, Theirs::BOOL),
    (Dtype::U8, Theirs::U8),
    (Dtype::I8, Theirs::I8),
    (Dtype::I16, Theirs::I16),
    (Dtype::U16, Theirs::U16),
    (Dtype::F16, Theirs::F16),
    (Dtype::BF16, Theirs::BF16),
    (Dtype::I32, Theirs::I32),
    (Dtype::U32, Theirs::U32),
    (Dtype::F32, Theirs::F32),
    (Dtype::F64, Theirs::F64),
    (Dtype::I64, Theirs::I64),
    (Dtype::U64, Theirs::U64),
    (Dtype::F8E5M2, Theirs::F8_E5M2),
    (Dtype::F8E4M3, Theirs::F8_E4M3),
    (Dtype::F8E8M0, Theirs::F8_E8M0),
];

type Case = BTreeMap<String, (usize, Vec<usize>, Vec<u8>)>;

/// Up to six tensors: any name, an index into `DTYPES`, a shape and its bytes.
fn tensors() -> impl Strategy<Value = Case> {
    let tensor = (0..DTYPES.len(), prop::collection::vec(0usize..4, 0..4)).prop_flat_map(
        |(dtype, shape)| {
            let len = DTYPES[dtype].0.bytes_of(&shape).unwrap();
            (Just(dtype), Just(shape), prop::collection::vec(any::<u8>(), len))
        },
    );
    prop::collection::btree_map(any::<String>(), tensor, 0..6)
}

fn write_theirs(case: &Case, metadata: Option<HashMap<String, String>>) -> Vec<u8> {
    let views = case.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(DTYPES[*dtype].1, shape.clone(), data).unwrap())
    });
    serialize(views, metadata).unwrap()
}

/// Panics unless both readers see the same tensors.
fn assert_same(ours: &Checkpoint, theirs: &SafeTensors<'_>) {
    assert_eq!(ours.len(), theirs.len());
    for (name, view) in theirs.iter() {
        let entry = ours.get(name).unwrap();
        assert_eq!(entry.dtype.name(), view.dtype().to_string());
        assert_eq!(entry.shape, view.shape());
        assert_eq!(&*entry.data, view.data());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_we_write_is_byte_for_byte_what_the_library_writes(
        case in tensors(),
        value in prop::option::of(any::<String>()),
    ) {
        let folder = Folder::new();
        let path = folder.path().join("x.safetensors");
        let tensors: Vec<_> = case
            .iter()
            .rev()
            .map(|(name, (dtype, shape, data))| (&**name, DTYPES[*dtype].0, &**shape, &**data))
            .collect();
        let metadata: Option<HashMap<_, _>> = value.map(|v| HashMap::from([("k".to_string(), v)]));
        let sorted = metadata.clone().unwrap_or_default().into_iter().collect();
        format::write(&path, &tensors, &sorted).unwrap();
        let file = fs::read(&path).unwrap();
        prop_assert_eq!(&file, &write_theirs(&case, metadata.clone()));

        let back = Checkpoint::open(&path, false).unwrap();
        assert_same(&back, &SafeTensors::deserialize(&file).unwrap());
        prop_assert_eq!(back.metadata().get("k"), metadata.as_ref().and_then(|map| map.get("k")));
    }
}

/// Why we may refuse a file that the library accepts.
const STRICTER: [&str; 6] = [
    "expected `{` at byte 8",
    "duplicate ",
    "unknown field ",
    "unsupported dtype ",
    "expected an object with dtype, shape and data_offsets",
    "more than 16 dimensions",
];

/// Changes of a header that leave it JSON, and often a header.
const REWRITES: [(&str, &str); 12] = [
    ("{", " {"),
    ("{", "{\"none\":{\"dtype\":\"U8\",\"shape\":[0,4],\"data_offsets\":[38,38]},"),
    ("{\"dtype\"", "{\"shape\":[3],\"dtype\""),
    ("{\"dtype\"", "{\"x\":1,\"dtype\""),
    ("\"U8\"", "\"F4\""),
    ("{\"dtype\":\"U8\",\"shape\":[0,4],\"data_offsets\":[38,38]}", "[\"U8\",[0,4],[38,38]]"),
    ("[0,4]", "[0,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]"),
    ("[0,4]", "[4,0,9999999999]"),
    ("\"F32\"", "\"I32\""),
    ("[2,3]", "[3,2]"),
    ("\"pt\"", "null"),
    ("{\"format\":\"pt\"}", "null"),
];

#[test]
fn mutated_files_are_accepted_only_if_the_library_does_and_refused_only_for_listed_rules() {
    let case = |dtype: usize, shape: &[usize]| {
        let len = DTYPES[dtype].0.bytes_of(shape).unwrap();
        (dtype, shape.to_vec(), vec![0; len])
    };
    let case = Case::from([
        ("layers.0.weight".to_string(), case(9, &[2, 3])),
        ("layers.0.bias".to_string(), case(6, &[3])),
        ("scale".to_string(), case(10, &[])),
        ("none".to_string(), case(1, &[0, 4])),
    ]);
    let valid = write_theirs(&case, Some(HashMap::from([("format".into(), "pt".into())])));
    let header_len = u64::from_le_bytes(valid[..8].try_into().unwrap()) as usize;
    let (header, data) = valid[8..].split_at(header_len);
    let header = str::from_utf8(header).unwrap();

    let mut random = Random(0x5afe_7e45_0123_4567);
    let (mut accepted, mut refused) = (0, 0);
    let mut stricter = [0; STRICTER.len()];
    for _ in 0..20_000 {
        let mut file = valid.clone();
        // Most with a length that fits, or nearly all would fail at the first check.
        match random.below(4) {
            0 => random.mutate(&mut file, &valid),
            1 | 2 => {
                let mut header = header.as_bytes().to_vec();
                random.mutate(&mut header, &valid);
                file = safetensors_file(header, data);
            }
            _ => {
                let (from, to) = REWRITES[random.below(REWRITES.len())];
                file = safetensors_file(header.replacen(from, to, 1 + random.below(3)), data);
            }
        }
        match (Checkpoint::from_safetensors("t", file.clone()), SafeTensors::deserialize(&file)) {
            (Ok(ours), Ok(theirs)) => {
                assert_same(&ours, &theirs);
                accepted += 1;
            }
            (Err(_), Err(_)) => refused += 1,
            (Err(ours), Ok(_)) => {
                let message = ours.to_string();
                let rule = STRICTER.iter().position(|rule| message.contains(rule));
                stricter[rule.unwrap_or_else(|| panic!("{message}"))] += 1;
            }
            (Ok(_), Err(theirs)) => panic!("accepted what the library refuses: {theirs}"),
        }
    }
    assert!(accepted > 1000 && refused > 1000, "{accepted} accepted, {refused} refused");
    assert!(stricter.iter().all(|&count| count > 0), "each rule is met: {stricter:?}");
}
