//! Which files of a folder are opened, and what is said of folders that are not checkpoints.

use std::fs;
use std::path::Path;

use crate::common::{Folder, safetensors_file, torch_zip};
use boostr::checkpoint::Checkpoint;
use boostr::error::Error;

/// A file with one-byte tensors of these names.
fn file(names: &[&str]) -> Vec<u8> {
    let fields: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(i, name)| {
            format!(r#""{name}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{}]}}"#, i + 1)
        })
        .collect();
    safetensors_file(format!("{{{}}}", fields.join(",")), &vec![7; names.len()])
}

fn names(path: &Path) -> Vec<String> {
    Checkpoint::open(path, false).unwrap().names().map(String::from).collect()
}

#[track_caller]
fn refusal(path: &Path) -> String {
    Checkpoint::open(path, false).unwrap_err().to_string()
}

fn index(map: &[(&str, &str)]) -> String {
    let map: Vec<_> = map.iter().map(|(name, shard)| format!("{name:?}:{shard:?}")).collect();
    format!(r#"{{"metadata":{{"total_size":2}},"weight_map":{{{}}}}}"#, map.join(","))
}

const INDEX: &str = "model.safetensors.index.json";

#[test]
fn the_first_kind_of_checkpoint_in_a_folder_is_used() {
    let folder = Folder::new();
    folder.write("pytorch_model.bin", "not looked at");
    folder.write("consolidated.safetensors", file(&["only"]));
    assert_eq!(names(folder.path()), ["only"]);
    folder.write("model-1.safetensors", file(&["a", "b"]));
    folder.write("model-2.safetensors", file(&["c"]));
    folder.write(INDEX, index(&[("a", "model-1.safetensors"), ("c", "model-2.safetensors")]));
    assert_eq!(names(folder.path()), ["a", "b", "c"]);
    folder.write("model.safetensors", file(&["single"]));
    assert_eq!(names(folder.path()), ["single"]);
}

#[test]
fn p_stale_index_beside_a_whole_file_is_not_looked_at() {
    let folder = Folder::new();
    folder.write(INDEX, index(&[("a", "model-00001-of-00002.safetensors")]));
    folder.write("model.safetensors", file(&["single"]));
    assert_eq!(names(folder.path()), ["single"]);
    folder.write(INDEX, "{");
    assert_eq!(names(folder.path()), ["single"]);
}

#[test]
fn shards_are_told_by_their_names_where_there_is_no_index() {
    let folder = Folder::new();
    let shard = |i: usize| format!("model-{i:05}-of-00002.safetensors");
    folder.write(&shard(2), file(&["b"]));
    let message = refusal(folder.path());
    let expected = "1 of 2 shards are missing: `model-00001-of-00002.safetensors`";
    assert!(message.ends_with(expected), "{message}");
    folder.write(&shard(1), file(&["a"]));
    assert_eq!(names(folder.path()), ["a", "b"]);
    folder.write(&shard(2), file(&["a"]));
    assert!(refusal(folder.path()).contains("tensor `a` is in "));
    folder.write("other.safetensors", file(&["c"]));
    assert!(refusal(folder.path()).contains("3 safetensors files but no "));
}

#[test]
fn a_folder_of_the_hubs_cache_says_where_its_models_are() {
    let folder = Folder::new();
    let snapshot = folder.path().join("snapshots/0123abcd");
    fs::create_dir_all(&snapshot).unwrap();
    let message = refusal(folder.path());
    assert!(message.contains(&format!("`{}`", snapshot.display())), "{message}");
}

#[test]
fn each_tensor_knows_its_file_and_the_checkpoint_its_folder() {
    let folder = Folder::new();
    let one = folder.write("1.safetensors", file(&["a"]));
    let two = folder.write("2.safetensors", file(&["b"]));
    folder.write(INDEX, index(&[("a", "1.safetensors"), ("b", "2.safetensors")]));
    let checkpoint = Checkpoint::open(folder.path(), false).unwrap();
    assert_eq!(&*checkpoint.get("a").unwrap().file, one);
    assert_eq!(&*checkpoint.get("b").unwrap().file, two);
    assert_eq!(checkpoint.path(), folder.path());
}

#[test]
fn a_file_is_opened_for_its_content_not_its_name() {
    let folder = Folder::new();
    let path = folder.write("weights.bin", file(&["a"]));
    assert_eq!(names(&path), ["a"]);
    let path = folder.write("weights.safetensors", torch_zip(b"", &[]));
    assert!(refusal(&path).contains("is a Python pickle"));
}

#[test]
fn several_files_without_an_index_are_listed() {
    let folder = Folder::new();
    for name in ["b", "a"] {
        folder.write(&format!("{name}.safetensors"), file(&["x"]));
    }
    let message = refusal(folder.path());
    let expected = "2 safetensors files but no model.safetensors.index.json: open one of them by \
                    its path (`a.safetensors`, `b.safetensors`)";
    assert!(message.ends_with(expected), "{message}");
}

#[test]
fn r_b7_a_missing_shard_is_named() {
    let folder = Folder::new();
    folder.write("1.safetensors", file(&["a"]));
    folder.write(INDEX, index(&[("a", "1.safetensors"), ("b", "2.safetensors")]));
    let message = refusal(folder.path());
    assert!(message.ends_with("1 of 2 shards are missing: `2.safetensors`"), "{message}");
}

#[test]
fn r_b7_a_shard_name_with_a_separator_is_refused() {
    let folder = Folder::new();
    folder.write("passwd", file(&["a"]));
    for name in
        ["../../etc/passwd", "/etc/passwd", "..", "sub/passwd", "sub\\passwd", "C:passwd", ""]
    {
        folder.write(INDEX, index(&[("a", name)]));
        let message = refusal(folder.path());
        let expected = format!(
            "shard `{}` of tensor `a` is not a plain file name",
            name.replace('\\', "\\\\")
        );
        assert!(message.ends_with(&expected), "{message}");
    }
}

#[test]
fn r_b7_a_tensor_that_its_shard_lacks_is_named() {
    let folder = Folder::new();
    folder.write("1.safetensors", file(&["a"]));
    folder.write(INDEX, index(&[("a", "1.safetensors"), ("b", "1.safetensors")]));
    let message = refusal(folder.path());
    assert!(message.ends_with("shard `1.safetensors` lacks 1 tensors: `b`"), "{message}");
}

#[test]
fn r_b7_a_tensor_in_two_shards_is_named() {
    let folder = Folder::new();
    folder.write("1.safetensors", file(&["a", "b"]));
    folder.write("2.safetensors", file(&["b", "c"]));
    folder.write(INDEX, index(&[("a", "1.safetensors"), ("c", "2.safetensors")]));
    let message = refusal(folder.path());
    assert!(
        message.contains("tensor `b` is in `") && message.ends_with("again in `2.safetensors`"),
        "{message}"
    );
}

#[test]
fn r_b7_a_damaged_index_is_named() {
    let folder = Folder::new();
    for (text, expected) in [
        ("{", "EOF"),
        ("{}", "missing field `weight_map`"),
        (r#"{"weight_map":{}}"#, "lists no tensor"),
        (r#"{"weight_map":{"a":1}}"#, "key `a`: invalid type"),
        (r#"{"weight_map":{"a":"x","a":"y"}}"#, "duplicate key `a`"),
        (r#"{"weight_map":{"a":"x"},"weight_map":{"b":"x"}}"#, "duplicate field `weight_map`"),
    ] {
        folder.write(INDEX, text);
        let message = refusal(folder.path());
        assert!(message.contains(INDEX) && message.contains(expected), "{message}");
    }
    folder.write(INDEX, format!(r#"{{"other":{}"#, "[".repeat(1_000_000)));
    assert!(refusal(folder.path()).contains(INDEX));
}

#[test]
fn a_folder_without_a_checkpoint_says_what_was_looked_for() {
    let folder = Folder::new();
    folder.write("README.md", "x");
    let expected = format!(
        "`{}`: no checkpoint in this folder: looked for model.safetensors, \
         model.safetensors.index.json, *.safetensors, *.gguf, pytorch_model.bin",
        folder.path().display()
    );
    assert_eq!(refusal(folder.path()), expected);
}

#[test]
fn a_path_to_nothing_is_an_error_of_the_system() {
    let error = Checkpoint::open("no/such/model".as_ref(), false).unwrap_err();
    assert!(matches!(error, Error::Io { path, .. } if path == Path::new("no/such/model")));
}

#[test]
fn an_empty_file_is_named() {
    let folder = Folder::new();
    let path = folder.write("model.safetensors", "");
    let expected = format!("`{}`: file is empty (0 bytes)", path.display());
    assert_eq!(refusal(folder.path()), expected);
    assert_eq!(refusal(&path), expected);
}

#[test]
fn r_b13_a_folder_where_a_file_belongs_is_an_error_of_the_system() {
    let folder = Folder::new();
    fs::create_dir(folder.path().join("model.safetensors")).unwrap();
    let error = Checkpoint::open(folder.path(), false).unwrap_err();
    let Error::Io { path, source } = error else { panic!("{error}") };
    assert_eq!(path, folder.path().join("model.safetensors"));
    assert_eq!(source.kind(), std::io::ErrorKind::IsADirectory);
}

#[test]
fn r_b14_a_pickle_is_refused_with_the_command_that_converts_it() {
    let folder = Folder::new();
    folder.write("pytorch_model.bin", torch_zip(b"\x80\x02}.", &[]));
    let message = refusal(folder.path());
    assert!(message.contains("pytorch_model.bin`: file is a Python pickle"), "{message}");
    let command = "python3 -c \"import torch,safetensors.torch as s; \
        s.save_file({k:v.contiguous().clone() for k,v in \
        torch.load('pytorch_model.bin',map_location='cpu',weights_only=True).items()},\
        'model.safetensors')\"";
    assert!(message.contains(command), "{message}");
    assert!(
        message.contains("--allow-pickle, which knows a closed list of types and runs nothing")
    );
}

#[test]
fn r_b14_a_file_from_before_torch_1_6_is_named() {
    // The first bytes of such a file: a pickled magic number.
    let folder = Folder::new();
    let legacy = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e\x80";
    let path = folder.write("old.pth", legacy);
    let message = Checkpoint::open(&path, true).unwrap_err().to_string();
    assert!(message.contains("torch's format from before 1.6"), "{message}");
    assert!(message.contains("torch.load('old.pth',"), "{message}");
    assert!(refusal(&path).contains("is a Python pickle"));
}

#[cfg(unix)]
mod unix {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    #[test]
    fn r_b11_a_link_to_a_blob_that_is_not_there_is_an_incomplete_download() {
        let folder = Folder::new();
        let link = folder.path().join("model.safetensors");
        symlink("../../blobs/0123abcd", &link).unwrap();
        let expected = format!(
            "`{}`: incomplete download: the link leads to `../../blobs/0123abcd`, \
             which is not there",
            link.display()
        );
        assert_eq!(refusal(folder.path()), expected);
        assert_eq!(refusal(&link), expected);
    }

    #[test]
    fn r_b11_a_shard_or_index_that_links_to_nothing_is_an_incomplete_download() {
        let folder = Folder::new();
        symlink("gone", folder.path().join("1.safetensors")).unwrap();
        let index_path = folder.write(INDEX, index(&[("a", "1.safetensors")]));
        assert!(refusal(folder.path()).contains("1.safetensors`: incomplete download"));
        fs::remove_file(&index_path).unwrap();
        symlink("gone", &index_path).unwrap();
        assert!(refusal(folder.path()).contains("index.json`: incomplete download"));
    }

    #[test]
    fn r_b11_links_to_blobs_that_are_there_are_followed() {
        let folder = Folder::new();
        folder.write("blob", file(&["a"]));
        symlink("blob", folder.path().join("model.safetensors")).unwrap();
        assert_eq!(names(folder.path()), ["a"]);
    }

    #[test]
    fn r_b13_a_loop_of_links_is_an_error_of_the_system() {
        let folder = Folder::new();
        let link = folder.path().join("model.safetensors");
        symlink("model.safetensors", &link).unwrap();
        for path in [folder.path(), &link] {
            let error = Checkpoint::open(path, false).unwrap_err();
            assert!(matches!(&error, Error::Io { path, .. } if *path == link), "{error}");
        }
    }

    #[test]
    fn r_b13_an_unreadable_file_is_an_error_of_the_system() {
        let folder = Folder::new();
        let path = folder.write("model.safetensors", file(&["a"]));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
        // Root may read it all the same.
        if fs::File::open(&path).is_err() {
            let error = Checkpoint::open(folder.path(), false).unwrap_err();
            assert!(matches!(&error, Error::Io { path: p, .. } if *p == path), "{error}");
        }
    }

    #[test]
    fn r_b13_devices_and_sockets_are_not_waited_for() {
        let folder = Folder::new();
        let path = folder.path().join("model.safetensors");
        let _socket = UnixListener::bind(&path).unwrap();
        for path in [&path, Path::new("/dev/zero")] {
            let error = Checkpoint::open(path, false).unwrap_err();
            assert!(matches!(error, Error::Io { .. }), "{error}");
        }
    }
}
