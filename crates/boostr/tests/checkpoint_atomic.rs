//! Files that are replaced whole or not at all.

mod common;

use std::fs;
use std::io;
use std::path::Path;

use boostr::checkpoint::atomic_write;
use boostr::error::Error;
use common::Folder;

#[test]
fn a_new_file_holds_what_was_written_and_nothing_else_is_left() {
    let folder = Folder::new();
    let path = folder.path().join("new");
    atomic_write(&path, |out| {
        out.write_all(b"one ")?;
        out.write_all(&vec![b'x'; 1 << 19])
    })
    .unwrap();
    assert_eq!(fs::read(path).unwrap(), [b"one ", &vec![b'x'; 1 << 19][..]].concat());
    assert_eq!(folder.names(), ["new"]);
}

#[test]
fn a_failure_at_any_write_leaves_the_old_file_and_no_other() {
    let folder = Folder::new();
    let path = folder.write("file", "old");
    for fail_at in 0..5 {
        let error = atomic_write(&path, |out| {
            for i in 0..5 {
                if i == fail_at {
                    return Err(io::ErrorKind::StorageFull.into());
                }
                // Large enough that each reaches the file.
                out.write_all(&vec![b'n'; 1 << 19])?;
            }
            Ok(())
        })
        .unwrap_err();
        let Error::Io { path: named, source } = error else { panic!("{error}") };
        assert_eq!((named, source.kind()), (path.clone(), io::ErrorKind::StorageFull));
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(folder.names(), ["file"]);
    }
}

#[test]
fn a_panic_while_writing_leaves_the_old_file_and_no_other() {
    let folder = Folder::new();
    let path = folder.write("file", "old");
    let result = std::panic::catch_unwind(|| {
        atomic_write(&path, |out| {
            out.write_all(b"new")?;
            std::panic::resume_unwind(Box::new(()));
        })
    });
    assert!(result.is_err());
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(folder.names(), ["file"]);
}

#[test]
fn a_reader_that_has_the_old_file_open_keeps_it() {
    use std::io::Read;
    let folder = Folder::new();
    let path = folder.write("file", "old");
    let mut reader = fs::File::open(&path).unwrap();
    atomic_write(&path, |out| out.write_all(b"new")).unwrap();
    let mut seen = String::new();
    reader.read_to_string(&mut seen).unwrap();
    assert_eq!((seen.as_str(), fs::read(&path).unwrap()), ("old", b"new".to_vec()));
}

#[test]
fn folders_and_paths_without_a_name_or_folder_are_errors_of_the_system() {
    let folder = Folder::new();
    let missing = folder.path().join("no/such/file");
    for path in [folder.path(), &missing, Path::new("/"), Path::new("")] {
        let error = atomic_write(path, |_| panic!("not reached")).unwrap_err();
        assert!(matches!(&error, Error::Io { path: named, .. } if named == path), "{error}");
    }
    assert!(folder.names().is_empty());
}

#[test]
fn a_name_of_the_greatest_length_can_be_written() {
    let folder = Folder::new();
    for name in ["x".repeat(255), "é".repeat(127)] {
        atomic_write(&folder.path().join(&name), |out| out.write_all(b"x")).unwrap();
    }
    assert_eq!(folder.names().len(), 2);
}

#[cfg(unix)]
mod unix {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    #[test]
    fn a_new_file_gets_the_mode_of_any_new_file_and_a_replaced_one_keeps_its_own() {
        let folder = Folder::new();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        let plain = folder.write("plain", "");
        let path = folder.path().join("new");
        atomic_write(&path, |out| out.write_all(b"1")).unwrap();
        assert_eq!(mode(&path), mode(&plain));

        for kept in [0o600, 0o640, 0o444] {
            fs::set_permissions(&path, fs::Permissions::from_mode(kept)).unwrap();
            atomic_write(&path, |out| out.write_all(b"2")).unwrap();
            assert_eq!(mode(&path), kept);
        }
    }

    #[test]
    fn a_private_file_is_never_readable_by_others_while_it_is_replaced() {
        let folder = Folder::new();
        let path = folder.write("key", "old");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        atomic_write(&path, |_| {
            let temp =
                folder.names().into_iter().find(|name| name.starts_with(".key.tmp-")).unwrap();
            assert_eq!(fs::metadata(folder.path().join(temp)).unwrap().mode() & 0o777, 0o600);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn links_are_followed_to_a_target_that_exists_or_not() {
        let folder = Folder::new();
        fs::create_dir(folder.path().join("sub")).unwrap();
        symlink("sub/link", folder.path().join("link")).unwrap();
        symlink("target", folder.path().join("sub/link")).unwrap();
        for content in ["first", "second"] {
            let link = folder.path().join("link");
            atomic_write(&link, |out| out.write_all(content.as_bytes())).unwrap();
            assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
            assert_eq!(fs::read_to_string(folder.path().join("sub/target")).unwrap(), content);
        }
        assert_eq!(folder.names(), ["link", "sub"]);
    }

    #[test]
    fn a_loop_of_links_is_an_error_of_the_system() {
        let folder = Folder::new();
        let path = folder.path().join("loop");
        symlink("loop", &path).unwrap();
        let error = atomic_write(&path, |_| panic!("not reached")).unwrap_err();
        assert!(matches!(error, Error::Io { .. }));
        assert_eq!(folder.names(), ["loop"]);
    }
}
