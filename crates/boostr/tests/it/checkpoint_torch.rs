//! Torch files: what `torch.save` writes is read as it is, and nothing in a file can run.
//!
//! `data/make_pickle.py` writes the valid files. The hostile ones are put together here,
//! instruction by instruction.

use std::path::Path;

use crate::common::weight_files::zip;
use crate::common::{Folder, torch_zip};
use boostr::checkpoint::{Checkpoint, Dtype};

fn data(name: &str) -> Checkpoint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    Checkpoint::open(&path, true).unwrap()
}

fn open(file: Vec<u8>) -> Result<Checkpoint, String> {
    Checkpoint::from_torch_zip("t", file).map_err(|e| e.to_string())
}

#[track_caller]
fn refusal(file: Vec<u8>) -> String {
    open(file).unwrap_err()
}

fn values(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    checkpoint.get(name).unwrap().to_f32().unwrap()
}

/// A pickle of protocol 2 with this body.
fn pickle(body: impl AsRef<[u8]>) -> Vec<u8> {
    [b"\x80\x02", body.as_ref(), b"."].concat()
}

/// A short text.
fn text(text: &str) -> Vec<u8> {
    [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
}

/// An integer of 64 bits.
fn int(n: i64) -> Vec<u8> {
    [&[0x8a, 8], &n.to_le_bytes()[..]].concat()
}

/// `torch._utils._rebuild_tensor_v2` of the F32 storage "0" with these arguments.
fn tensor(numel: i64, offset: i64, shape: &[i64], strides: &[i64]) -> Vec<u8> {
    let tuple = |items: &[i64]| {
        [b"(".to_vec(), items.iter().flat_map(|&n| int(n)).collect(), b"t".to_vec()].concat()
    };
    [
        &b"ctorch._utils\n_rebuild_tensor_v2\n(("[..],
        &text("storage"),
        b"ctorch\nFloatStorage\n",
        &text("0"),
        &text("cpu"),
        &int(numel),
        b"tQ",
        &int(offset),
        &tuple(shape),
        &tuple(strides),
        b"\x89}tR",
    ]
    .concat()
}

/// A file of one tensor "a" over a storage of the floats 0, 1, 2, ...
fn one_tensor(numel: usize, offset: i64, shape: &[i64], strides: &[i64]) -> Vec<u8> {
    let storage: Vec<u8> = (0..numel).flat_map(|n| (n as f32).to_le_bytes()).collect();
    let body =
        [b"}".to_vec(), text("a"), tensor(numel as i64, offset, shape, strides), b"s".to_vec()];
    torch_zip(&pickle(body.concat()), &[&storage])
}

#[test]
fn every_type_is_read() {
    let checkpoint = data("types.bin");
    for name in ["Double", "Float", "Half", "BFloat16"] {
        assert_eq!(values(&checkpoint, name), [1.0, 2.0], "{name}");
    }
    for (name, dtype, bytes) in [
        ("Long", Dtype::I64, &[1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0][..]),
        ("Int", Dtype::I32, &[1, 0, 0, 0, 2, 0, 0, 0]),
        ("Short", Dtype::I16, &[1, 0, 2, 0]),
        ("Char", Dtype::I8, &[1, 2]),
        ("Byte", Dtype::U8, &[1, 2]),
        ("Bool", Dtype::Bool, &[1, 0]),
    ] {
        let entry = checkpoint.get(name).unwrap();
        assert_eq!((entry.dtype, &*entry.shape, &*entry.data), (dtype, &[2][..], bytes), "{name}");
    }
    assert!(checkpoint.get("scalar").unwrap().shape.is_empty());
    assert_eq!(values(&checkpoint, "scalar"), [3.5]);
    assert_eq!(checkpoint.get("empty").unwrap().shape, [0, 4]);
    assert_eq!(checkpoint.len(), 12);
}

#[test]
fn views_are_row_major_whatever_their_strides() {
    let checkpoint = data("views.bin");
    let all: Vec<f32> = (0..12u8).map(f32::from).collect();
    assert_eq!(values(&checkpoint, "matrix"), all);
    assert_eq!(values(&checkpoint, "row"), [4.0, 5.0, 6.0, 7.0]);
    assert_eq!(values(&checkpoint, "column"), [1.0, 5.0, 9.0]);
    assert_eq!(checkpoint.get("transposed").unwrap().shape, [4, 3]);
    let transposed = [0.0, 4.0, 8.0, 1.0, 5.0, 9.0, 2.0, 6.0, 10.0, 3.0, 7.0, 11.0];
    assert_eq!(values(&checkpoint, "transposed"), transposed);
    let cube = [0.0, 3.0, 1.0, 4.0, 2.0, 5.0, 6.0, 9.0, 7.0, 10.0, 8.0, 11.0];
    assert_eq!(values(&checkpoint, "cube"), cube);
    assert_eq!(values(&checkpoint, "one"), [5.0]);
}

#[test]
fn contiguous_views_share_the_file_and_tied_tensors_their_bytes() {
    let checkpoint = data("views.bin");
    let range = |name: &str| checkpoint.get(name).unwrap().data.range();
    let start = range("matrix").start;
    assert_eq!(start % 64, 0, "as torch aligns it");
    assert_eq!(range("tied"), start..start + 48);
    assert_eq!(range("row"), start + 16..start + 32);
    assert_eq!(range("one"), start + 20..start + 24);
    let owner = |name: &str| (**checkpoint.get(name).unwrap().data.owner()).as_ref().as_ptr();
    assert_eq!(owner("matrix"), owner("row"));
    assert_ne!(owner("matrix"), owner("transposed"));
}

#[test]
fn a_state_dict_is_read_with_its_parameters_and_without_its_attributes() {
    let checkpoint = data("state_dict.bin");
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a.weight", "b.weight"]);
    assert_eq!(values(&checkpoint, "b.weight"), [8.0, 9.0, 10.0, 11.0]);
}

#[test]
fn weights_inside_a_training_checkpoint_are_found() {
    for name in ["nested.bin", "protocol4.bin"] {
        let checkpoint = data(name);
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a.weight", "b.weight"], "{name}");
        assert_eq!(values(&checkpoint, "b.weight"), [8.0, 9.0, 10.0, 11.0], "{name}");
    }
}

#[test]
fn a_tensor_at_the_top_and_in_state_dict_is_a_duplicate() {
    let inner = [&b"}"[..], &text("a"), b"h\x00s"].concat();
    let top = [b"}".to_vec(), text("a"), tensor(1, 0, &[], &[]), b"q\x00s".to_vec()].concat();
    let both = pickle([top, text("state_dict"), inner, b"s".to_vec()].concat());
    assert_eq!(refusal(torch_zip(&both, &[&[0; 4]])), "`t`: duplicate tensor `a`");
}

#[test]
fn big_endian_files_are_refused() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/big_endian.bin");
    let message = Checkpoint::open(&path, true).unwrap_err().to_string();
    assert!(message.ends_with("byteorder is `big`, little is read"), "{message}");
}

#[test]
fn r_b14_a_pickle_that_calls_the_shell_is_refused_by_name_and_not_executed() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/os_system.bin");
    let message = Checkpoint::open(&path, true).unwrap_err().to_string();
    let expected = "global `posix.system` is not among those of weights; nothing was executed";
    assert!(message.ends_with(expected), "{message}");
    assert!(!Path::new("boostr-executed-a-pickle").exists());
}

#[test]
fn r_b14_no_spelling_of_a_foreign_global_is_let_through() {
    for body in [
        &b"cposix\nsystem\n"[..],
        b"(X\x02\x00\x00\x00lsiposix\nsystem\n",
        b"X\x05\x00\x00\x00posixX\x06\x00\x00\x00system\x93",
        b"X\x05\x00\x00\x00posixq\x00X\x06\x00\x00\x00systemq\x010h\x00h\x01\x93",
    ] {
        let message = refusal(torch_zip(&pickle(body), &[]));
        let named = message.contains("`posix.system`") || message.contains("instruction 0x30");
        assert!(named && message.ends_with("nothing was executed"), "{message}");
    }
    for name in [
        "builtins\neval",
        "builtins\ngetattr",
        "torch\n_utils._rebuild_tensor_v2",
        "torch._utils\n_rebuild_tensor_v2.__globals__",
        "torch._utils\n_rebuild_tensor",
        "torch.storage\nUntypedStorage",
        "torch\nFloatStorage.__init__",
        "collections\nOrderedDict ",
        "numpy.core.multiarray\n_reconstruct",
        "\n",
    ] {
        let message = refusal(torch_zip(&pickle(format!("c{name}\n")), &[]));
        let global = format!("global `{}` is not among", name.replacen('\n', ".", 1));
        assert!(message.contains(&global), "{message}");
    }
}

#[test]
fn r_b14_only_the_instructions_of_weights_are_known() {
    const KNOWN: &[u8] =
        b"\x80\x95.(]})t\x85\x86\x87N\x88\x89KMJ\x8aGXBC\x8cae\x73uqrhj\x94c\x93QRbi";
    for opcode in 0..=u8::MAX {
        let message = refusal(torch_zip(&pickle([opcode]), &[]));
        let unknown = message.contains(&format!("instruction 0x{opcode:02x} is not among"));
        // PROTO is known, but only as the first one.
        assert_eq!(unknown, opcode == 0x80 || !KNOWN.contains(&opcode), "{message}");
    }
}

#[test]
fn r_b14_globals_are_not_functions() {
    for (body, expected) in [
        (&b"X\x01\x00\x00\x00a)R"[..], "calls something that is not a global"),
        (b"ctorch\nFloatStorage\n)R", "calls Storage(F32) with other arguments"),
        (b"ccollections\nOrderedDict\nK\x01\x85R", "calls OrderedDict with other arguments"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n)R", "calls RebuildTensor with other arguments"),
        (b"ctorch._utils\n_rebuild_parameter\n}\x88}\x87R", "calls RebuildParameter with other"),
        (b"ccollections\nOrderedDict\n]R", "something else where a tuple belongs"),
        (b"K\x01Q", "something else where a tuple belongs"),
        (b")Q", "refers to something that is not a storage"),
        (b"]}b", "sets attributes of something else"),
    ] {
        let message = refusal(torch_zip(&pickle(body), &[]));
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn r_b14_broken_stacks_are_errors() {
    for (body, expected) in [
        (&b""[..], "takes from an empty stack"),
        (b"K\x01K\x02", "left over at its end"),
        (b"}.", "left over at its end"),
        (b"(}", "left over at its end"),
        (b"t", "closes a mark that is not open"),
        (b"K\x01(a", "takes from an empty stack"),
        (b"](K\x01a", "takes from an empty stack"),
        (b"K\x01K\x02a", "fills something that is not a container"),
        (b"}K\x01a", "appends to something that is not a list"),
        (b"]K\x01K\x02s", "sets items of something that is not a dictionary"),
        (b"}(K\x01u", "sets a key without a value"),
        (b"h\x05", "recalls value 5, which it did not remember"),
        (b"X\xff\xff\xff\xffabc", "is cut short"),
        (b"X\x01\x00\x00\x00\xff", "text that is not UTF-8"),
        (b"K\x01K\x02\x93", "a global whose name is not text"),
        (b"ctorch", "is cut short"),
    ] {
        let message = refusal(torch_zip(&pickle(body), &[]));
        assert!(
            message.starts_with("`t`: pickle, before byte ") && message.contains(expected),
            "{message}"
        );
    }
    assert!(refusal(torch_zip(b"}.", &[])).contains("does not start with its protocol"));
    assert!(refusal(torch_zip(b"\x80\x05}.", &[])).contains("protocol 5, 2 to 4 are read"));
    assert!(refusal(torch_zip(b"", &[])).contains("is cut short"));
}

#[test]
fn r_b14_depth_size_and_cycles_end_in_an_error() {
    let deep = [b"]".to_vec(), b"\x85".repeat(500_000)].concat();
    assert!(refusal(torch_zip(&pickle(deep), &[])).contains("is not a dictionary"));
    let marks = b"(".repeat(2000);
    assert!(refusal(torch_zip(&pickle(marks), &[])).contains("nested deeper than 1000"));
    let stack = b"N".repeat(200_000);
    assert!(
        refusal(torch_zip(&pickle(stack), &[])).contains("more than 131072 values on its stack")
    );
    let values = [b"]".to_vec(), b")a".repeat(600_000)].concat();
    assert!(refusal(torch_zip(&pickle(values), &[])).contains("makes more than 1048576 values"));
    let memo: Vec<u8> =
        (0..600_000u32).flat_map(|i| [&b"r"[..], &i.to_le_bytes()].concat()).collect();
    let memo = [b"N".to_vec(), memo].concat();
    assert!(refusal(torch_zip(&pickle(memo), &[])).contains("remembers more than 524288 values"));
    let list = b"]q\x00h\x00a";
    assert!(refusal(torch_zip(&pickle(list), &[])).contains("is not a dictionary"));
    let dict = [&b"}q\x00"[..], &text("state_dict"), b"h\x00s"].concat();
    assert!(refusal(torch_zip(&pickle(dict), &[])).contains("has no tensor"));
    let large = vec![b'N'; (1 << 24) + 1];
    assert!(
        refusal(torch_zip(&large, &[])).contains("data.pkl has 16777217 bytes, at most 16777216")
    );
}

#[test]
fn r_b14_views_outside_of_their_storage_are_errors() {
    for (offset, shape, strides) in [
        (0, &[7][..], &[1][..]),
        (1, &[6], &[1]),
        (7, &[], &[]),
        (7, &[0], &[1]),
        (0, &[2, 4], &[4, 1]),
        (0, &[2, 2], &[1, 5]),
        (i64::MAX, &[1], &[1]),
        (0, &[2], &[i64::MAX]),
        (i64::MAX, &[2], &[i64::MAX]),
        (0, &[i64::MAX, i64::MAX], &[1, 1]),
        (0, &[i64::MAX], &[0]),
        (0, &[1 << 62, 4], &[0, 0]),
    ] {
        let message = refusal(one_tensor(6, offset, shape, strides));
        assert!(
            message.contains("tensor `a`: shape ")
                && message.contains("outside of its storage of 6"),
            "{message}"
        );
    }
    for (offset, shape, strides) in
        [(0, &[-1][..], &[1][..]), (0, &[1], &[-1]), (0, &[1, 1], &[1]), (0, &[1; 17], &[1; 17])]
    {
        let message = refusal(one_tensor(6, offset, shape, strides));
        assert!(message.contains("not equally many counts, up to 16"), "{message}");
    }
    assert!(refusal(one_tensor(6, -1, &[1], &[1])).contains("offset is not a count"));
    assert!(open(one_tensor(6, 6, &[0], &[1])).is_ok());
    assert!(open(one_tensor(6, 5, &[], &[])).is_ok());
}

#[test]
fn r_b14_a_size_one_dimension_may_have_any_stride() {
    let checkpoint = open(one_tensor(6, 4, &[1, 2, 1], &[i64::MAX, 1, i64::MAX])).unwrap();
    assert_eq!(values(&checkpoint, "a"), [4.0, 5.0]);
    let checkpoint = open(one_tensor(6, 0, &[1, 3, 1], &[i64::MAX, 2, i64::MAX])).unwrap();
    assert_eq!(values(&checkpoint, "a"), [0.0, 2.0, 4.0]);
}

#[test]
fn r_b14_an_expanded_view_may_not_outgrow_the_file() {
    let checkpoint = open(one_tensor(2, 0, &[3, 2], &[0, 1])).unwrap();
    assert_eq!(values(&checkpoint, "a"), [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]);
    let message = refusal(one_tensor(1, 0, &[1 << 40], &[0]));
    assert!(message.contains("takes more than the file's size"), "{message}");
}

#[test]
fn r_b14_copies_share_one_budget_and_a_tied_copy_is_one() {
    let storage: Vec<u8> = (0..400u16).flat_map(|n| f32::from(n).to_le_bytes()).collect();
    let transposed = tensor(400, 0, &[20, 20], &[1, 20]);
    let mut tied = [&b"}"[..], &text("a"), &transposed, b"q\x00s"].concat();
    let mut copied = tied.clone();
    for i in 0..10 {
        let name = text(&format!("b{i}"));
        tied.extend([&name[..], b"h\x00s"].concat());
        copied.extend([&name[..], &transposed, b"s"].concat());
    }
    let checkpoint = open(torch_zip(&pickle(tied), &[&storage])).unwrap();
    let address = |name: &str| checkpoint.get(name).unwrap().data.as_ptr();
    assert_eq!(address("a"), address("b9"));
    let message = refusal(torch_zip(&pickle(copied), &[&storage]));
    assert!(message.contains("takes more than the file's size"), "{message}");
}

#[test]
fn r_b14_storages_that_are_missing_or_of_another_length_are_named() {
    let body = pickle([b"}".to_vec(), text("a"), tensor(2, 0, &[2], &[1]), b"s".to_vec()].concat());
    assert!(refusal(torch_zip(&body, &[])).contains("tensor `a`: storage `0` is not in the file"));
    let message = refusal(torch_zip(&body, &[&[0; 7]]));
    assert!(message.contains("storage `0` has 7 bytes, expected 2 elements of F32"), "{message}");
    let traversal = body.clone();
    let at = traversal.windows(6).position(|w| w == b"X\x01\0\0\x000").unwrap();
    let key = text("../../../../etc/passwd");
    let traversal = [&traversal[..at], &key, &traversal[at + 6..]].concat();
    let message = refusal(torch_zip(&traversal, &[&[0; 8]]));
    assert!(message.contains("storage `../../../../etc/passwd` is not in the file"), "{message}");
}

#[test]
fn r_b14_a_pickle_without_weights_says_so() {
    for body in [&b"}"[..], b"}X\x01\x00\x00\x00aK\x01s", b"}X\x05\x00\x00\x00model}s"] {
        assert!(refusal(torch_zip(&pickle(body), &[])).contains("pickle has no tensor"));
    }
    assert!(refusal(torch_zip(&pickle(b"]"), &[])).contains("is not a dictionary of tensors"));
}

#[test]
fn r_b14_an_inner_dictionary_under_many_equal_names_is_refused() {
    let inner = [&b"}"[..], &text("a"), &tensor(1, 0, &[], &[]), b"sq\x00"].concat();
    let again = [text("model"), b"h\x00s".to_vec()].concat();
    let body = [b"}".to_vec(), text("model"), inner, b"s".to_vec(), again.repeat(1000)].concat();
    assert_eq!(refusal(torch_zip(&pickle(body), &[&[0; 4]])), "`t`: duplicate key `model`");
}

/// Where the last of these bytes is in the file.
fn last(file: &[u8], bytes: &[u8]) -> usize {
    file.windows(bytes.len()).rposition(|window| window == bytes).unwrap()
}

#[test]
fn r_b14_a_zip_bomb_is_refused_before_anything_is_unpacked() {
    let mut file = one_tensor(6, 0, &[6], &[1]);
    let record = last(&file, b"PK\x01\x02");
    file[record + 10] = 8;
    let expected =
        "`t`: zip entry `m/data/0`: is compressed (method 8), torch stores entries as they are";
    assert_eq!(refusal(file.clone()), expected);
    file[record + 10] = 0;
    file[record + 24] = 0xff;
    assert_eq!(refusal(file.clone()), "`t`: zip entry `m/data/0`: stores 255 bytes in 24");
    file[record + 24] = 24;
    file[record + 8] = 1;
    assert_eq!(refusal(file), "`t`: zip entry `m/data/0`: is encrypted");
}

#[test]
fn r_b14_a_zip_of_too_many_entries_is_refused() {
    let names: Vec<_> = (0..10_001).map(|i| format!("m/data/{i}")).collect();
    let entries: Vec<_> = names.iter().map(|name| (name.as_str(), &b""[..])).collect();
    assert_eq!(refusal(zip(&entries)), "`t`: zip has 10001 entries, at most 10000 are read");
    assert!(refusal(zip(&entries[1..])).contains("not a torch file"));
}

#[test]
fn r_b14_a_zip_that_contradicts_itself_is_refused() {
    let valid = one_tensor(6, 0, &[6], &[1]);
    assert!(open(valid.clone()).is_ok());
    let record = last(&valid, b"PK\x01\x02");
    let end = last(&valid, b"PK\x05\x06");
    let local = last(&valid, b"PK\x03\x04");
    for (at, value, expected) in [
        (end + 4, 1, "one of several volumes"),
        (end + 8, 1, "one of several volumes"),
        (end + 12, 0, "zip directory"),
        (end + 16, 0, "zip directory is cut short or damaged"),
        (end + 19, 0xff, "does not fit"),
        (record, 0, "zip directory is cut short or damaged"),
        (record + 45, 0xff, "starts at"),
        (record + 42, 1, "has no local header"),
        (record + 46, 0xff, "name is not UTF-8"),
        (local, 0, "has no local header"),
        (local + 8, 8, "has a local header that disagrees"),
        (local + 18, 25, "has a local header that disagrees"),
        (local + 30, b'n', "has a local header that disagrees"),
        (local + 26, 0xff, "zip record is cut short"),
    ] {
        let mut file = valid.clone();
        file[at] = value;
        let message = refusal(file);
        assert!(message.contains(expected), "{at}: {message}");
    }
    let mut file = valid.clone();
    for size in [record + 20, record + 24, local + 18, local + 22] {
        file[size..size + 4].copy_from_slice(&9999u32.to_le_bytes());
    }
    assert!(refusal(file).contains("has 9999 bytes at "));
    let twice = zip(&[("m/data.pkl", b""), ("m/data.pkl", b"")]);
    assert_eq!(refusal(twice), "`t`: zip entry `m/data.pkl` comes twice");
    let two = zip(&[("m/data.pkl", b""), ("n/data.pkl", b"")]);
    assert!(refusal(two).contains("more than one `<name>/data.pkl`"));
    assert!(refusal(zip(&[("data.pkl", b"")])).contains("no `<name>/data.pkl`"));
}

#[test]
fn r_b14_two_end_records_that_disagree_are_refused() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/views.bin");
    let valid = std::fs::read(path).unwrap();
    let twin = last(&valid, b"PK\x06\x06");
    for field in [32, 40, 48] {
        let mut file = valid.clone();
        file[twin + field] ^= 1;
        assert!(refusal(file).contains("two end records that disagree"));
    }
    let mut file = valid.clone();
    let locator = last(&valid, b"PK\x06\x07");
    file[locator + 8] ^= 1;
    assert!(refusal(file.clone()).contains("zip64 end record is not where it should be"));
    file[locator + 15] = 0xff;
    assert!(refusal(file).contains("zip64 end record is outside of the file"));
}

#[test]
fn sizes_and_offsets_of_64_bits_are_read() {
    // The 32-bit fields of the last record give way to a zip64 extra field, as beyond 4 GiB.
    let valid = one_tensor(6, 0, &[6], &[1]);
    let (record, end) = (last(&valid, b"PK\x01\x02"), last(&valid, b"PK\x05\x06"));
    let local = last(&valid, b"PK\x03\x04") as u64;
    let mut file = valid[..end].to_vec();
    file[record + 20..record + 28].fill(0xff);
    file[record + 42..record + 46].fill(0xff);
    file[record + 30] = 28;
    file.extend(
        [
            &b"\x01\x00\x18\x00"[..],
            &24u64.to_le_bytes(),
            &24u64.to_le_bytes(),
            &local.to_le_bytes(),
        ]
        .concat(),
    );
    let mut tail = valid[end..].to_vec();
    tail[12] += 28;
    file.extend(tail);
    assert_eq!(values(&open(file).unwrap(), "a"), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
}

#[test]
fn every_prefix_of_a_torch_file_is_an_error() {
    for name in ["views.bin", "nested.bin"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
        let file = std::fs::read(path).unwrap();
        for len in 0..file.len() {
            assert!(open(file[..len].to_vec()).is_err(), "{name} {len}");
        }
    }
}

#[test]
fn every_prefix_of_a_pickle_is_an_error() {
    let body =
        pickle([b"}".to_vec(), text("a"), tensor(6, 0, &[2, 3], &[3, 1]), b"s".to_vec()].concat());
    for len in 0..body.len() {
        assert!(open(torch_zip(&body[..len], &[&[0; 24]])).is_err(), "{len}");
    }
    assert!(open(torch_zip(&body, &[&[0; 24]])).is_ok());
}

#[test]
fn a_torch_file_in_a_folder_is_read_when_it_is_allowed() {
    let folder = Folder::new();
    folder.write("pytorch_model.bin", one_tensor(6, 0, &[6], &[1]));
    assert!(Checkpoint::open(folder.path(), false).is_err());
    let checkpoint = Checkpoint::open(folder.path(), true).unwrap();
    assert_eq!(checkpoint.get("a").unwrap().shape, [6]);
}
