//! GGUF models in parts and in folders, and what is said of those that are not whole.

use std::fs;
use std::path::Path;

use crate::common::{Folder, safetensors_file};
use crate::gguf_file::*;
use boostr::checkpoint::Checkpoint;

const PARTS: [&str; 3] = [
    "mamba2-split-00001-of-00003.gguf",
    "mamba2-split-00002-of-00003.gguf",
    "mamba2-split-00003-of-00003.gguf",
];

#[track_caller]
fn refusal(path: &Path) -> String {
    Checkpoint::open(path, false).unwrap_err().to_string()
}

/// A folder of these files of the corpus.
fn folder(names: &[&str]) -> Folder {
    let folder = Folder::new();
    for name in names {
        folder.write(name, read(name));
    }
    folder
}

/// A part of a model, with a tensor of its own.
fn part(number: u16, count: u16, tensors: i32) -> Vec<u8> {
    let keys = [
        key("split.no", 2, number.to_le_bytes()),
        key("split.count", 2, count.to_le_bytes()),
        key("split.tensors.count", I32, tensors.to_le_bytes()),
    ];
    file(&keys, &[tensor(format!("t{number}"), &[1], TF32, 0)], 4)
}

#[test]
fn any_part_stands_for_the_whole_model() {
    let mut names = Vec::new();
    for part in PARTS {
        let alone = Checkpoint::from_gguf(part, read(part)).unwrap();
        names.extend(alone.names().map(String::from));
    }
    names.sort();
    for path in PARTS.map(corpus) {
        let whole = Checkpoint::open(&path, false).unwrap();
        assert!(whole.names().eq(names.iter().map(String::as_str)));
        for (_, entry) in whole.iter() {
            assert!(entry.file.to_str().unwrap().contains("mamba2-split-0000"));
            entry.to_f32().unwrap();
        }
        let keys = whole.gguf().unwrap();
        assert_eq!(keys.text("general.architecture").unwrap(), Some("mamba2"));
        assert_eq!(keys.path(), corpus(PARTS[0]));
        // A whole model is not written as a part.
        assert!(!keys.iter().any(|(key, _)| key.starts_with("split.")));
        assert_eq!(keys.len(), keys.iter().filter(|(key, _)| keys.has(key)).count());
    }
}

#[test]
fn missing_parts_are_named() {
    let folder = folder(&PARTS[..1]);
    let path = folder.path().join(PARTS[0]);
    let expected =
        format!("`{}`: 2 of 3 parts are missing: `{}`, `{}`", path.display(), PARTS[1], PARTS[2]);
    assert_eq!(refusal(&path), expected);
    assert_eq!(refusal(folder.path()), expected);
}

#[test]
fn parts_that_do_not_belong_together_are_told() {
    let folder = Folder::new();
    let [a, b] =
        ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"].map(|name| folder.path().join(name));
    let write = |first: Vec<u8>, second: Vec<u8>| {
        fs::write(&a, first).unwrap();
        fs::write(&b, second).unwrap();
    };
    write(part(0, 2, 2), part(1, 2, 2));
    assert_eq!(Checkpoint::open(&b, false).unwrap().len(), 2);

    write(part(0, 2, 2), part(0, 2, 2));
    let at = |path: &Path, reason: &str| format!("`{}`: {reason}", path.display());
    let expected = "field `split.no`: expected 1, found 0 (u16)";
    assert_eq!(refusal(&a), at(&b, expected));
    write(part(0, 2, 2), part(1, 3, 2));
    let expected = "field `split.count`: expected 2, found 3 (u16)";
    assert_eq!(refusal(&a), at(&b, expected));
    write(part(0, 2, 3), part(1, 2, 2));
    let expected = "field `split.tensors.count`: expected 2, found 3 (i32)";
    assert_eq!(refusal(&a), at(&a, expected));
    write(part(0, 2, 2), file(&[], &[tensor("x", &[1], TF32, 0)], 4));
    assert_eq!(refusal(&a), at(&b, "field `split.no`: missing"));
    write(part(0, 2, 2), b"<html>".to_vec());
    assert!(refusal(&a).starts_with(&at(&b, "byte 0: expected `GGUF`")));
    write(part(0, 2, 2), Vec::new());
    assert_eq!(refusal(&a), at(&b, "file is empty (0 bytes)"));

    let twice = [
        key("split.no", U8, [1]),
        key("split.count", U8, [2]),
        key("split.tensors.count", U8, [2]),
    ];
    write(part(0, 2, 2), file(&twice, &[tensor("t0", &[1], TF32, 0)], 4));
    assert_eq!(refusal(&a), at(&b, &format!("tensor `t0` is in `{}` too", a.display())));
}

#[test]
fn a_part_under_another_name_says_what_its_name_must_be() {
    let folder = Folder::new();
    for name in ["model.gguf", "m-00001-of-00003.gguf", "m-00002-of-00002.gguf"] {
        let path = folder.write(name, part(1, 3, 3));
        let expected = format!(
            "`{}`: file is part 2 of 3 of a model: to find the others, its name must be \
             `NAME-00002-of-00003.gguf`",
            path.display()
        );
        assert_eq!(refusal(&path), expected);
    }
    let path = folder.write("m.gguf", part(3, 3, 3));
    assert!(
        refusal(&path).ends_with("`split.no`: expected a whole number from 0 to 2, found 3 (u16)")
    );
    let path = folder.write("m.gguf", part(0, 60_000, 3));
    assert!(refusal(&path).contains("`split.count`: expected a whole number from 0 to 1000"));
    // One part of one is a whole model, whatever it is called.
    let path = folder.write("m.gguf", part(0, 1, 1));
    assert_eq!(Checkpoint::open(&path, false).unwrap().len(), 1);
}

#[test]
fn the_only_model_of_a_folder_is_used() {
    let one = folder(&["mamba2-f32.gguf"]);
    one.write("pytorch_model.bin", "not looked at");
    assert!(Checkpoint::open(one.path(), false).unwrap().gguf().is_some());
    one.write("README.md", "");
    one.write("model.safetensors", safetensors_file("{}", &[]));
    assert!(Checkpoint::open(one.path(), false).unwrap().gguf().is_none());

    let split = folder(&PARTS);
    assert_eq!(Checkpoint::open(split.path(), false).unwrap().len(), 11);
    split.write("other.gguf", read("mamba2-f32.gguf"));
    let expected = format!(
        "`{}`: 4 GGUF files of several models: open one of them by its path (`{}`, `{}`, `{}`, \
         `other.gguf`)",
        split.path().display(),
        PARTS[0],
        PARTS[1],
        PARTS[2]
    );
    assert_eq!(refusal(split.path()), expected);
    // Two models are two, also when each is one file.
    let two = folder(&["mamba2-f32.gguf", "llama-spm.gguf"]);
    assert!(refusal(two.path()).contains("2 GGUF files of several models"));
}

#[test]
fn a_file_is_told_by_its_first_bytes_and_not_by_its_name() {
    let folder = Folder::new();
    for name in ["model", "model.bin", "model.safetensors"] {
        let path = folder.write(name, read("mamba2-f32.gguf"));
        assert!(Checkpoint::open(&path, false).unwrap().gguf().is_some());
    }
    let path = folder.write("model.gguf", safetensors_file("{}", &[]));
    assert!(Checkpoint::open(&path, false).unwrap().gguf().is_none());
}
