//! Files that are replaced whole or not at all.

use std::fs;
use std::io;
use std::path::Path;

use crate::common::Folder;
use boostr::checkpoint::atomic_write;
use boostr::error::Error;

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

#[cfg(target_os = "linux")]
mod abandoned {
    use super::*;
    use boostr::convert::{Options, convert};
    use std::ops::ControlFlow::Continue;

    /// Linux numbers processes up to 2^22.
    const DEAD: u32 = (1 << 22) + 1;

    fn temporary(name: &str, pid: u32) -> String {
        format!(".{name}.tmp-{pid}-0123456789abcdef")
    }

    #[test]
    fn what_dead_processes_left_goes_with_the_next_write_to_the_same_path() {
        let folder = Folder::new();
        let (file, inner) = (temporary("model", DEAD), temporary("model", u32::MAX));
        folder.write(&file, "half");
        fs::create_dir(folder.path().join(&inner)).unwrap();
        folder.write(&format!("{inner}/config.json"), "{}");
        let other = temporary("other", DEAD);
        folder.write(&other, "half");

        atomic_write(&folder.path().join("model"), |out| out.write_all(b"new")).unwrap();
        assert_eq!(folder.names(), [other.as_str(), "model"]);
    }

    #[test]
    fn a_model_folder_that_was_half_written_goes_when_it_is_written_again() {
        let folder = Folder::new();
        let half = temporary("model", DEAD);
        fs::create_dir(folder.path().join(&half)).unwrap();
        folder.write(&format!("{half}/model.safetensors"), "half");
        let source =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/mamba2-tiny");
        let options = Options::default();
        convert(&source, &folder.path().join("model"), &options, &mut |_, _| Continue(())).unwrap();
        assert_eq!(folder.names(), ["model"]);
    }

    #[test]
    fn what_a_live_process_writes_stays() {
        let folder = Folder::new();
        let parent = temporary("file", std::os::unix::process::parent_id());
        folder.write(&parent, "half");
        let path = folder.path().join("file");
        atomic_write(&path, |out| {
            out.write_all(b"outer")?;
            atomic_write(&path, |out| out.write_all(b"inner")).unwrap();
            assert_eq!(folder.names().len(), 3);
            Ok(())
        })
        .unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"outer");
        assert_eq!(folder.names(), [parent.as_str(), "file"]);
    }

    #[test]
    fn what_an_earlier_process_of_the_same_number_left_goes() {
        // The first process of a container has the number 1 each time.
        let folder = Folder::new();
        let own = temporary("file", std::process::id());
        folder.write(&own, "half");
        let inner = own.replace("abcdef", "fedcba");
        fs::create_dir(folder.path().join(&inner)).unwrap();
        folder.write(&format!("{inner}/log"), "half");
        atomic_write(&folder.path().join("file"), |out| out.write_all(b"new")).unwrap();
        assert_eq!(folder.names(), ["file"]);
        // In a folder of ours it goes when that is opened, whatever its name was to be.
        folder.write(&own, "half");
        folder.write(&temporary("other", std::process::id()), "half");
        boostr::session::Sessions::<boostr::backend::Cpu>::open(folder.path()).unwrap();
        assert_eq!(folder.names(), ["file"]);
    }

    #[test]
    fn what_a_process_elsewhere_makes_stays() {
        // It shares the folder and not the numbers of processes, so its own seems to be dead.
        let folder = Folder::new();
        let made = temporary("file", DEAD);
        folder.write(&made, "half");
        let claim = fs::File::open(folder.path().join(&made)).unwrap();
        claim.lock().unwrap();
        let write = || atomic_write(&folder.path().join("file"), |_| Ok(())).unwrap();
        write();
        assert_eq!(folder.names(), [made.as_str(), "file"]);
        drop(claim);
        write();
        assert_eq!(folder.names(), ["file"]);
    }

    #[test]
    fn similar_names_stay() {
        let folder = Folder::new();
        let ours = temporary("file", DEAD);
        let mut similar = vec![
            ours[1..].to_string(),
            format!("{ours}.gguf"),
            format!("x{ours}"),
            ours.to_uppercase(),
            ours.replace("abcdef", "abcdeg"),
            ours.replace("abcdef", "ABCDEF"),
            ours.replace("0123", "012"),
            temporary("file", 0),
            ours.replace("tmp-", "tmp-+"),
            ours.replace("tmp-", "tmp-0"),
            ours.replace("tmp-", "tmp--"),
            format!(".file.tmp-{DEAD}"),
            format!(".file.tmp-{}-0123456789abcdef", u64::MAX),
            ".file.tmp-notes".to_string(),
            temporary("file2", DEAD),
        ];
        for name in &similar {
            folder.write(name, "mine");
        }
        atomic_write(&folder.path().join("file"), |_| Ok(())).unwrap();
        similar.push("file".to_string());
        similar.sort();
        assert_eq!(folder.names(), similar);
    }

    #[test]
    fn links_stay_and_so_does_what_they_lead_to() {
        let (folder, elsewhere) = (Folder::new(), Folder::new());
        elsewhere.write("weights", "mine");
        let (file, inner) = (temporary("file", DEAD), temporary("file", DEAD + 1));
        let link = |to: &Path, name: &str| {
            std::os::unix::fs::symlink(to, folder.path().join(name)).unwrap();
        };
        link(&elsewhere.path().join("weights"), &file);
        link(elsewhere.path(), &inner);
        // A link inside a folder that goes is only a name.
        let half = temporary("file", DEAD + 2);
        fs::create_dir(folder.path().join(&half)).unwrap();
        link(elsewhere.path(), &format!("{half}/link"));

        atomic_write(&folder.path().join("file"), |_| Ok(())).unwrap();
        assert_eq!(folder.names(), [file.as_str(), inner.as_str(), "file"]);
        assert_eq!(elsewhere.names(), ["weights"]);
    }
}
