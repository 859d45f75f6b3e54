//! Checkpoints of a run, its metrics and its plot: what must survive kills, full disks and other hands.

use std::fs;
use std::io::{self, BufRead, BufReader, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use crate::common::{Folder, Random, test_name};
use boostr::checkpoint::atomic_write;
use boostr::train::{
    AdamWConfig, Checkpoints, Metrics, MetricsLog, NamedTensor, Optimizer, Parameter, Parameters,
    Saved, Scale, Schedule, TrainerState, Written, latest, read_metrics, write_loss_svg,
};
use boostr::{Error, Result};
use serde_json::json;

/// Elements of the trained tensor: a model of 256 KiB.
const SIZE: usize = 1 << 16;

/// A state that tells which step it is of, with numbers that JSON must keep to the bit.
fn state(step: u64) -> TrainerState {
    TrainerState {
        step,
        tokens: step * 4096,
        seconds: step as f64 / 7.0,
        seed: u64::MAX - 1,
        rng: step.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        cursor: json!({"epoch": step / 10, "streams": [step, u64::MAX]}),
        schedule: Schedule { lr: 1.0 / (3.0 + step as f64), ..Schedule::default() },
        config: json!({"seed": 1, "data": {"seq_len": 512}}),
    }
}

/// A tensor whose every element tells the step.
fn values(step: u64) -> Vec<f32> {
    (0..SIZE as u64).map(|i| ((i * 31 + step * 1009) % 65_536) as f32 / 7.0).collect()
}

fn optimizer(step: u64) -> Optimizer {
    let weight = Parameter { shape: vec![SIZE / 64, 64], values: values(step) };
    let mut parameters: Parameters = [("in_proj.weight".to_owned(), weight)].into();
    let mut optimizer = Optimizer::new(AdamWConfig::default(), &parameters).unwrap();
    let gradients = [("in_proj.weight".to_owned(), values(step + 1))].into();
    optimizer.step(&mut parameters, &gradients, 1.0, 1e-3).unwrap();
    optimizer
}

fn weights(step: u64) -> Vec<u8> {
    values(step).iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// What stands for the model's files: one small, one large, one in a folder.
fn write_model(folder: &Path, step: u64) -> Result<()> {
    fs::create_dir(folder.join("adapter")).map_err(|e| Error::io(folder.join("adapter"), e))?;
    for (name, bytes) in [
        ("config.json", format!("{{\"step\": {step}}}").into_bytes()),
        ("model.safetensors", weights(step)),
        ("adapter/weights", step.to_le_bytes().to_vec()),
    ] {
        atomic_write(&folder.join(name), |out| out.write_all(&bytes))?;
    }
    Ok(())
}

fn save(checkpoints: &mut Checkpoints, step: u64) -> Result<Written> {
    checkpoints.save(&state(step), &optimizer(step).tensors(), |folder| write_model(folder, step))
}

/// Checks that a checkpoint is in all parts the one of its step.
fn check_whole(saved: &Saved) {
    let step = saved.state.step;
    assert_eq!(saved.state, state(step));
    let config = fs::read_to_string(saved.path.join("config.json")).unwrap();
    assert_eq!(config, format!("{{\"step\": {step}}}"));
    assert!(fs::read(saved.path.join("model.safetensors")).unwrap() == weights(step));
    assert_eq!(fs::read(saved.path.join("adapter/weights")).unwrap(), step.to_le_bytes());
    let mut restored = Optimizer::new(
        AdamWConfig::default(),
        &[(
            "in_proj.weight".to_owned(),
            Parameter { shape: vec![SIZE / 64, 64], values: values(0) },
        )]
        .into(),
    )
    .unwrap();
    restored.restore(saved.optimizer().unwrap()).unwrap();
    assert!(restored.tensors() == optimizer(step).tensors());
}

/// The newest checkpoint, which must be the one of `step` without a broken one after it.
#[track_caller]
fn assert_latest(folder: &Path, step: u64) {
    let found = latest(folder).unwrap().unwrap();
    assert_eq!(found.checkpoint.state.step, step);
    assert!(found.broken.is_empty(), "{:?}", found.broken);
    check_whole(&found.checkpoint);
}

mod checkpoints {
    use super::*;

    #[test]
    fn the_last_ones_are_kept_and_found() {
        let folder = Folder::new();
        let run = folder.path().join("runs/a");
        assert!(latest(&run).unwrap().is_none());
        let mut checkpoints = Checkpoints::open(&run, 2).unwrap();
        assert!(latest(&run).unwrap().is_none());
        for step in [5, 10, 1_000_000, 1_000_005] {
            let Written { path, warnings } = save(&mut checkpoints, step).unwrap();
            assert_eq!(path, run.join(format!("step-{step:06}")));
            assert!(warnings.is_empty());
            assert_latest(&run, step);
        }
        assert_eq!(names(&run), [".lock", "step-1000000", "step-1000005"]);
        let files = [
            "adapter",
            "config.json",
            "manifest.json",
            "model.safetensors",
            "optimizer.safetensors",
            "trainer.json",
        ];
        assert_eq!(names(&run.join("step-1000000")), files);
    }

    #[test]
    fn a_step_that_is_saved_again_replaces_what_was_there() {
        let folder = Folder::new();
        let mut checkpoints = Checkpoints::open(folder.path(), 1).unwrap();
        save(&mut checkpoints, 7).unwrap();
        fs::write(folder.path().join("step-000007/config.json"), "another").unwrap();
        save(&mut checkpoints, 7).unwrap();
        assert_latest(folder.path(), 7);
        assert_eq!(folder.names(), [".lock", "step-000007"]);
    }

    #[test]
    fn one_that_was_about_to_be_replaced_counts_until_it_is() {
        let folder = Folder::new();
        let mut checkpoints = Checkpoints::open(folder.path(), 1).unwrap();
        save(&mut checkpoints, 7).unwrap();
        // As a process leaves it that is killed between the two names.
        let (plain, old) =
            (folder.path().join("step-000007"), folder.path().join("step-000007.old"));
        fs::rename(&plain, &old).unwrap();
        assert_latest(folder.path(), 7);
        // And one that is killed after them.
        fs::create_dir(&plain).unwrap();
        for file in ["config.json", "manifest.json"] {
            fs::copy(old.join(file), plain.join(file)).unwrap();
        }
        assert_eq!(latest(folder.path()).unwrap().unwrap().checkpoint.path, old);
        save(&mut checkpoints, 7).unwrap();
        assert_latest(folder.path(), 7);
        assert_eq!(folder.names(), [".lock", "step-000007"]);
        fs::rename(&plain, &old).unwrap();
        save(&mut checkpoints, 8).unwrap();
        assert_eq!(folder.names(), [".lock", "step-000008"]);
    }

    #[test]
    fn a_failure_of_the_model_leaves_what_was_there_and_the_next_save_succeeds() {
        let folder = Folder::new();
        let mut checkpoints = Checkpoints::open(folder.path(), 1).unwrap();
        save(&mut checkpoints, 1).unwrap();
        // The same step too: its old folder must not have moved.
        for step in [1, 2] {
            let error = checkpoints
                .save(&state(step), &[], |folder| {
                    write_model(folder, step)?;
                    let full = |out: &mut dyn Write| {
                        out.write_all(b"half")?;
                        Err(io::ErrorKind::StorageFull.into())
                    };
                    atomic_write(&folder.join("tokenizer.json"), full)
                })
                .unwrap_err();
            let Error::Io { path, source } = error else { panic!("{error}") };
            // Not by the temporary name, which nobody knows.
            assert_eq!(path, folder.path().join(format!("step-{step:06}/tokenizer.json")));
            assert_eq!(source.kind(), io::ErrorKind::StorageFull);
            assert_eq!(folder.names(), [".lock", "step-000001"]);
            assert_latest(folder.path(), 1);
        }
        save(&mut checkpoints, 2).unwrap();
        assert_latest(folder.path(), 2);
    }

    #[test]
    fn a_checkpoint_that_other_hands_have_changed_is_passed_over_and_named() {
        let folder = Folder::new();
        let mut checkpoints = Checkpoints::open(folder.path(), 2).unwrap();
        save(&mut checkpoints, 1).unwrap();
        save(&mut checkpoints, 2).unwrap();
        let newest = folder.path().join("step-000002");
        let backup = folder.path().join("backup");
        copy(&newest, &backup);
        let flip = |name: &str| {
            let mut bytes = fs::read(newest.join(name)).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(newest.join(name), bytes).unwrap();
        };
        let cut = |name: &str| {
            let bytes = fs::read(newest.join(name)).unwrap();
            fs::write(newest.join(name), &bytes[..bytes.len() - 2]).unwrap();
        };
        let remove = |name: &str| fs::remove_file(newest.join(name)).unwrap();
        let mut files = names(&newest);
        files.retain(|name| name != "adapter");
        files.push("adapter/weights".to_owned());
        for name in &files {
            for (damage, want) in
                [(&flip as &dyn Fn(&str), "checksum"), (&cut, "bytes, "), (&remove, "missing")]
            {
                damage(name);
                let found = latest(folder.path()).unwrap().unwrap();
                assert_eq!(found.checkpoint.state.step, 1, "{name}");
                let [error] = &found.broken[..] else { panic!("{:?}", found.broken) };
                let message = error.to_string();
                assert!(message.contains("step-000002"), "{message}");
                assert!(
                    name == "manifest.json"
                        || message.contains(want) && message.contains(name.as_str()),
                    "{message}"
                );
                fs::remove_dir_all(&newest).unwrap();
                copy(&backup, &newest);
                assert_latest(folder.path(), 2);
            }
        }
        for step in [1, 2] {
            fs::remove_file(folder.path().join(format!("step-00000{step}/trainer.json"))).unwrap();
        }
        let message = latest(folder.path()).unwrap_err().to_string();
        assert!(
            message.contains("none of 2 checkpoints is whole") && message.contains("step-000002"),
            "{message}"
        );
    }

    #[test]
    fn no_byte_of_a_manifest_or_state_makes_a_panic() {
        let folder = Folder::new();
        let mut checkpoints = Checkpoints::open(folder.path(), 2).unwrap();
        // Small, for it is read again and again.
        checkpoints.save(&state(1), &[], |_| Ok(())).unwrap();
        let newest = folder.path().join("step-000001");
        let mut random = Random(5);
        for name in ["manifest.json", "trainer.json"] {
            let path = newest.join(name);
            let good = fs::read(&path).unwrap();
            for _ in 0..300 {
                let mut bytes = good.clone();
                random
                    .mutate(&mut bytes, b"../../etc/passwd 1e999 -1 18446744073709551616 \\u0000");
                fs::write(&path, &bytes).unwrap();
                let _ = latest(folder.path());
            }
            fs::write(&path, &good).unwrap();
        }
        for (hostile, want) in [
            (
                r#"{"format": 1, "files": {"../x": {"bytes": 1, "crc32": 0}}}"#,
                "not a file of this folder",
            ),
            (
                r#"{"format": 1, "files": {"/etc/passwd": {"bytes": 1, "crc32": 0}}}"#,
                "not a file of this folder",
            ),
            (
                r#"{"format": 1, "files": {"": {"bytes": 1, "crc32": 0}}}"#,
                "not a file of this folder",
            ),
            (r#"{"format": 1, "files": {}}"#, "`optimizer.safetensors` is not listed"),
            (r#"{"format": 1}"#, "missing field `files`"),
            (r#"{"format": 0, "files": {}}"#, "format is 0"),
        ] {
            fs::write(newest.join("manifest.json"), hostile).unwrap();
            let message = Saved::open(&newest).unwrap_err().to_string();
            assert!(message.contains(want), "{message}");
        }
    }

    #[test]
    fn a_run_that_goes_on_from_an_earlier_step_forgets_the_later_ones() {
        let folder = Folder::new();
        let mut checkpoints = Checkpoints::open(folder.path(), 3).unwrap();
        for step in [1, 2, 3] {
            save(&mut checkpoints, step).unwrap();
        }
        checkpoints.forget_after(3).unwrap();
        assert_latest(folder.path(), 3);
        checkpoints.forget_after(1).unwrap();
        assert_eq!(folder.names(), [".lock", "step-000001"]);
    }

    #[test]
    fn later_checkpoints_do_not_push_out_the_one_just_saved() {
        let folder = Folder::new();
        let mut checkpoints = Checkpoints::open(folder.path(), 2).unwrap();
        for step in [8, 9, 3] {
            save(&mut checkpoints, step).unwrap();
        }
        assert_eq!(folder.names(), [".lock", "step-000003", "step-000008", "step-000009"]);
    }

    #[test]
    fn other_files_of_the_run_stay() {
        let folder = Folder::new();
        let stale = ".step-000003.tmp-4194305-0123456789abcdef";
        for name in [stale, "step-notes", ".step-000003.tmp-mine", "step-000001"] {
            fs::create_dir(folder.path().join(name)).unwrap();
            folder.write(&format!("{name}/file"), "x");
        }
        for name in ["metrics.jsonl", "step-000002", ".step-000004.tmp-1-0123456789abcdef"] {
            folder.write(name, "x");
        }
        let mut checkpoints = Checkpoints::open(folder.path(), 1).unwrap();
        save(&mut checkpoints, 5).unwrap();
        let left = [
            ".lock",
            ".step-000003.tmp-mine",
            ".step-000004.tmp-1-0123456789abcdef",
            "metrics.jsonl",
            "step-000002",
            "step-000005",
            "step-notes",
        ];
        assert_eq!(folder.names(), left);
    }

    #[test]
    fn two_processes_do_not_train_in_one_folder() {
        let folder = Folder::new();
        let first = Checkpoints::open(folder.path(), 1).unwrap();
        let message = Checkpoints::open(folder.path(), 1).unwrap_err().to_string();
        assert!(message.contains("another process trains in"), "{message}");
        drop(first);
        Checkpoints::open(folder.path(), 1).unwrap();
        let message = Checkpoints::open(folder.path(), 0).unwrap_err().to_string();
        assert_eq!(message, "argument `keep`: expected at least 1 checkpoint, found 0");
    }

    #[test]
    fn a_changed_configuration_is_refused_with_all_its_keys() {
        let folder = Folder::new();
        let mut checkpoints = Checkpoints::open(folder.path(), 1).unwrap();
        let path = save(&mut checkpoints, 1).unwrap().path;
        let saved = Saved::open(&path).unwrap();
        saved.check_config(&json!({"data": {"seq_len": 512.0}, "seed": 1}), &[]).unwrap();
        let other = json!({"data": {"seq_len": 256, "path": "x"}, "log_every": 5, "logs": 1});
        let message = saved.check_config(&other, &[]).unwrap_err().to_string();
        let want = format!(
            "argument `config`: the run in `{}` has other values: `data.path` was not set, is \"x\"; \
             `data.seq_len` was 512, is 256; `log_every` was not set, is 5; `logs` was not set, is 1; \
             `seed` was 1, is not set",
            path.display()
        );
        assert_eq!(message, want);
        // Keys that may change, alone or with all below them, but no key that only begins like one.
        let message =
            saved.check_config(&other, &["data", "log", "log_every", "seed"]).unwrap_err();
        assert!(
            message.to_string().ends_with("other values: `logs` was not set, is 1"),
            "{message}"
        );
        saved.check_config(&other, &["data", "log_every", "logs", "seed"]).unwrap();
    }

    #[test]
    fn a_newer_format_is_refused_by_its_number() {
        let folder = Folder::new();
        let mut checkpoints = Checkpoints::open(folder.path(), 1).unwrap();
        let path = checkpoints.save(&state(1), &[], |_| Ok(())).unwrap().path;
        let file = path.join("manifest.json");
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, text.replace("\"format\": 1", "\"format\": 2")).unwrap();
        let message = latest(folder.path()).unwrap_err().to_string();
        assert!(
            message.ends_with("manifest.json`: format is 2, this version reads 1"),
            "{message}"
        );
    }

    #[cfg(unix)]
    #[test]
    fn what_is_no_file_is_not_saved_and_links_to_checkpoints_are_only_names() {
        let (folder, elsewhere) = (Folder::new(), Folder::new());
        let mut checkpoints = Checkpoints::open(folder.path(), 1).unwrap();
        let error = checkpoints
            .save(&state(1), &[], |model| {
                std::os::unix::fs::symlink("/etc/passwd", model.join("link")).unwrap();
                Ok(())
            })
            .unwrap_err();
        assert!(error.to_string().contains("neither a file nor a folder"), "{error}");
        assert_eq!(folder.names(), [".lock"]);

        save(&mut checkpoints, 1).unwrap();
        let moved = elsewhere.path().join("moved");
        copy(&folder.path().join("step-000001"), &moved);
        fs::remove_dir_all(folder.path().join("step-000001")).unwrap();
        std::os::unix::fs::symlink(&moved, folder.path().join("step-000001")).unwrap();
        assert_latest(folder.path(), 1);
        save(&mut checkpoints, 2).unwrap();
        assert_eq!(folder.names(), [".lock", "step-000002"]);
        assert_eq!(names(&moved).len(), 6);
    }

    fn copy(from: &Path, to: &Path) {
        fs::create_dir(to).unwrap();
        for name in names(from) {
            let (from, to) = (from.join(&name), to.join(&name));
            if from.is_dir() {
                copy(&from, &to);
            } else {
                fs::copy(from, to).unwrap();
            }
        }
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Processes that save, and are killed or refused room.
#[cfg(unix)]
mod processes {
    use super::*;

    /// The folder that another test asks this process to save into, in a line on its standard input.
    fn asked() -> Option<PathBuf> {
        let mut line = String::new();
        if !io::stdin().is_terminal() {
            io::stdin().read_line(&mut line).unwrap();
        }
        Some(line.trim_end()).filter(|line| !line.is_empty()).map(PathBuf::from)
    }

    /// Starts this very program with one of the tests below, after `command` and its arguments.
    fn start(command: &[&str], test: &str, folder: &Path) -> Child {
        let program = std::env::current_exe().unwrap();
        let mut words: Vec<&std::ffi::OsStr> = command.iter().map(std::ffi::OsStr::new).collect();
        words.push(program.as_os_str());
        let mut child = Command::new(words[0])
            .args(&words[1..])
            .args(["--ignored", "--exact", &test_name(module_path!(), test), "--nocapture"])
            .arg("--test-threads=1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        writeln!(child.stdin.take().unwrap(), "{}", folder.display()).unwrap();
        child
    }

    #[test]
    #[ignore = "a process that another test starts and kills; does nothing by itself"]
    fn saves_until_it_is_killed() {
        let Some(folder) = asked() else { return };
        let mut step = latest(&folder).unwrap().unwrap().checkpoint.state.step;
        let mut checkpoints = Checkpoints::open(&folder, 2).unwrap();
        println!("\nsaving");
        loop {
            step += 1;
            // The same step twice: the second replaces the first.
            save(&mut checkpoints, step).unwrap();
            save(&mut checkpoints, step).unwrap();
        }
    }

    #[test]
    #[ignore = "a process that another test starts with a limit; does nothing by itself"]
    fn saves_once() {
        let Some(folder) = asked() else { return };
        let mut checkpoints = Checkpoints::open(&folder, 1).unwrap();
        match save(&mut checkpoints, 2) {
            Ok(_) => println!("\nsaved"),
            Err(Error::Io { path, source }) => println!("\n{}: {source}", path.display()),
            Err(error) => println!("\nnot an error of the system: {error}"),
        }
    }

    /// Kills a process that saves all the time, again and again, at any moment.
    fn kill(times: u32) {
        let folder = Folder::new();
        let run = folder.path();
        let started = Instant::now();
        save(&mut Checkpoints::open(run, 2).unwrap(), 1).unwrap();
        save(&mut Checkpoints::open(run, 2).unwrap(), 1).unwrap();
        let one_step = started.elapsed();

        let mut random = Random(0x5eed);
        let (mut step, mut interrupted) = (1, 0);
        for _ in 0..times {
            let mut child = start(&[], "saves_until_it_is_killed", run);
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            assert!(lines.any(|line| line.unwrap() == "saving"), "the process did not start");
            std::thread::sleep(one_step.mul_f64(random.below(2000) as f64 / 1000.0));
            child.kill().unwrap();
            child.wait().unwrap();

            let found = latest(run).unwrap().unwrap();
            assert!(found.broken.is_empty(), "{:?}", found.broken);
            assert!(found.checkpoint.state.step >= step);
            step = found.checkpoint.state.step;
            check_whole(&found.checkpoint);

            let is_left = |name: &&String| name.starts_with(".step-") || name.contains(".old");
            interrupted += u32::from(names(run).iter().any(|name| is_left(&name)));
            drop(Checkpoints::open(run, 2).unwrap());
            assert!(!names(run).iter().any(|name| name.starts_with(".step-")));
            // Two that are kept, and two that were to be removed.
            assert!(names(run).len() <= 1 + 4, "{:?}", names(run));
        }
        println!("{interrupted} of {times} kills were inside of a save; {step} steps");
        assert!(interrupted > 0 && step > 1);
        let mut checkpoints = Checkpoints::open(run, 2).unwrap();
        save(&mut checkpoints, step + 1).unwrap();
        assert!(names(run).len() <= 1 + 2, "{:?}", names(run));
    }

    #[test]
    fn a_killed_process_leaves_a_whole_checkpoint() {
        kill(20);
    }

    #[test]
    #[ignore = "minutes of kills"]
    fn two_hundred_killed_processes_leave_a_whole_checkpoint() {
        kill(200);
    }

    /// Files may not grow above a limit, which fails every write beyond it as a full disk does.
    #[test]
    fn a_save_that_finds_no_room_changes_nothing() {
        let folder = Folder::new();
        save(&mut Checkpoints::open(folder.path(), 1).unwrap(), 1).unwrap();
        let run = |blocks: &str| {
            // Blocks of 512 bytes. The signal would end the process before it could see the error.
            let limited = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"");
            let child = start(&["sh", "-c", &limited], "saves_once", folder.path());
            String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
        };
        for (blocks, failing) in
            [("0", "config.json"), ("100", "model.safetensors"), ("600", "optimizer.safetensors")]
        {
            let output = run(blocks);
            let path = folder.path().join("step-000002").join(failing);
            assert!(output.contains(&format!("\n{}: ", path.display())), "{output}");
            assert_eq!(folder.names(), [".lock", "step-000001"]);
            assert_latest(folder.path(), 1);
        }
        assert!(run("unlimited").contains("\nsaved\n"));
        assert_latest(folder.path(), 2);
    }
}

mod metrics {
    use super::*;

    fn line(step: u64) -> Metrics {
        Metrics {
            step,
            tokens: step * 4096,
            seconds: step as f64 / 3.0,
            loss: 1.0 + 1.0 / step as f64,
            grad_norm: 0.1,
            lr: 1e-3,
            tokens_per_second: 12_345.6,
            memory: 1 << 30,
            ..Metrics::default()
        }
    }

    #[test]
    fn lines_come_back_with_the_same_bits() {
        let folder = Folder::new();
        let path = folder.path().join("metrics.jsonl");
        let mut log = MetricsLog::create(&path).unwrap();
        let mut lines: Vec<Metrics> = (1..50).map(line).collect();
        lines[9].valid_loss = Some(0.1 + 0.2);
        lines[9].bits_per_byte = Some(1.0 / 3.0);
        for (i, line) in lines.iter().enumerate() {
            log.append(line).unwrap();
            // Each is there at once.
            assert_eq!(read_metrics(&path).unwrap(), lines[..=i]);
        }
        let text = fs::read_to_string(&path).unwrap();
        let first = r#"{"step":1,"tokens":4096,"seconds":0.3333333333333333,"loss":2.0,"grad_norm":0.1,"lr":0.001,"tokens_per_second":12345.6,"memory":1073741824}"#;
        assert_eq!(text.lines().next().unwrap(), first);
    }

    #[test]
    fn a_resumed_run_drops_what_came_after_its_checkpoint() {
        let folder = Folder::new();
        let path = folder.path().join("metrics.jsonl");
        let mut log = MetricsLog::resume(&path, 0).unwrap();
        (1..=10).for_each(|step| log.append(&line(step)).unwrap());
        let whole = fs::read(&path).unwrap();
        // With the half line that a power cut may leave.
        fs::write(&path, [&whole[..], b"{\"step\":11,\"lo"].concat()).unwrap();

        let mut log = MetricsLog::resume(&path, 7).unwrap();
        assert_eq!(read_metrics(&path).unwrap(), (1..=7).map(line).collect::<Vec<_>>());
        assert!(whole.starts_with(&fs::read(&path).unwrap()));
        log.append(&line(8)).unwrap();
        assert_eq!(read_metrics(&path).unwrap(), (1..=8).map(line).collect::<Vec<_>>());
        drop(MetricsLog::create(&path).unwrap());
        assert_eq!(read_metrics(&path).unwrap(), []);
        assert_eq!(folder.names(), ["metrics.jsonl"]);
    }

    #[test]
    fn any_half_of_a_last_line_is_left_out() {
        let folder = Folder::new();
        let path = folder.path().join("metrics.jsonl");
        let mut log = MetricsLog::create(&path).unwrap();
        (1..=3).for_each(|step| log.append(&line(step)).unwrap());
        let whole = fs::read(&path).unwrap();
        let ends: Vec<usize> = (0..whole.len()).filter(|&i| whole[i] == b'\n').collect();
        for len in 0..=whole.len() {
            fs::write(&path, &whole[..len]).unwrap();
            let count = ends.iter().filter(|&&end| end < len).count();
            assert_eq!(read_metrics(&path).unwrap().len(), count, "{len} bytes");
        }
    }

    #[test]
    fn a_line_that_is_none_is_named_and_nothing_is_lost() {
        let folder = Folder::new();
        let good = serde_json::to_string(&line(1)).unwrap();
        for (bad, want) in [
            ("{\"step\":2}", "line 2, column 10: missing field `tokens`"),
            ("", "line 2, column 0: EOF while parsing a value"),
            ("step 2", "line 2, column 1: expected value"),
            ("{\"step\":-2}", "line 2, column 10: invalid value: integer `-2`, expected u64"),
            ("\0\0", "line 2, column 1: expected value"),
        ] {
            let text = format!("{good}\n{bad}\n{good}\n");
            let path = folder.write("metrics.jsonl", &text);
            for message in [
                read_metrics(&path).unwrap_err().to_string(),
                MetricsLog::resume(&path, 9).unwrap_err().to_string(),
            ] {
                assert_eq!(message, format!("`{}`: {want}", path.display()));
            }
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
    }

    #[test]
    fn a_number_that_json_cannot_say_is_refused() {
        let folder = Folder::new();
        let path = folder.path().join("metrics.jsonl");
        let mut log = MetricsLog::create(&path).unwrap();
        let bad = Metrics { valid_loss: Some(f64::NAN), ..line(1) };
        let message = log.append(&bad).unwrap_err().to_string();
        assert_eq!(message, "argument `metrics`: `valid_loss` is not a finite number");
        log.append(&line(1)).unwrap();
        assert_eq!(read_metrics(&path).unwrap(), [line(1)]);
    }

    #[test]
    fn what_others_leave_at_the_end_or_cut_away_does_not_spoil_later_lines() {
        let folder = Folder::new();
        let path = folder.path().join("metrics.jsonl");
        let mut log = MetricsLog::create(&path).unwrap();
        log.append(&line(1)).unwrap();
        // As a write that failed half way, and could not be taken back.
        let mut half = fs::read(&path).unwrap();
        half.extend_from_slice(&[b'x'; 1000]);
        fs::write(&path, half).unwrap();
        log.append(&line(2)).unwrap();
        assert_eq!(read_metrics(&path).unwrap(), [line(1), line(2)]);
        fs::write(&path, "").unwrap();
        log.append(&line(3)).unwrap();
        assert_eq!(read_metrics(&path).unwrap(), [line(3)]);
    }

    #[test]
    fn the_plot_of_a_log_is_written_whole() {
        let folder = Folder::new();
        let path = folder.path().join("loss.svg");
        let lines: Vec<Metrics> = (1..500).map(line).collect();
        for scale in [Scale::Linear, Scale::Log] {
            write_loss_svg(&path, "runs/a", &lines, scale).unwrap();
            assert!(fs::read_to_string(&path).unwrap().ends_with("</svg>\n"));
        }
        assert_eq!(folder.names(), ["loss.svg"]);
    }
}

#[test]
fn tensors_of_any_bits_come_back_through_a_file() {
    let folder = Folder::new();
    let mut checkpoints = Checkpoints::open(folder.path(), 1).unwrap();
    let odd = [f32::NAN, f32::from_bits(0x7fa0_0001), -0.0, f32::MIN_POSITIVE / 8.0, f32::INFINITY];
    let tensors = [
        NamedTensor { name: "a".into(), shape: vec![5], values: odd[..].into() },
        NamedTensor { name: "b".into(), shape: vec![], values: vec![3.0].into() },
        NamedTensor { name: "c".into(), shape: vec![0, 7], values: vec![].into() },
    ];
    let path = checkpoints.save(&state(1), &tensors, |_| Ok(())).unwrap().path;
    let read = Saved::open(&path).unwrap().optimizer().unwrap();
    for (read, written) in read.iter().zip(&tensors) {
        assert_eq!((&read.name, &read.shape), (&written.name, &written.shape));
        let bits = |tensor: &NamedTensor<'_>| {
            tensor.values.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(bits(read), bits(written));
    }
    assert_eq!(read.len(), 3);
}
