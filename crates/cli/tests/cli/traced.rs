//! System calls that fail, one after another, by strace. The disk has the old file or the new one,
//! whole, and the error names the file.
//!
//! Where no process may trace another, as in some containers, these tests fail and say so.
//! `cargo test -- --skip traced::` leaves them out.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use boostr::backend::Cpu;
use boostr::session::Sessions;

use crate::common::*;

/// The calls by which files are written; some are unknown to some processors, which the mark allows.
const CALLS: &str = "openat,write,fsync,fdatasync,?rename,?renameat,?renameat2,ftruncate";

/// Most calls of one kind that a test makes fail, where a command makes many of them.
const MOST: usize = 3;

/// A call that fails: the `n`-th of its name, from 1, in each thread.
#[derive(Debug, Clone)]
struct Fault {
    call: String,
    n: usize,
    /// What it was about when it did not fail.
    line: String,
}

impl Fault {
    fn is_sync(&self) -> bool {
        ["fsync", "fdatasync"].contains(&&*self.call)
    }

    fn error(&self) -> &'static str {
        if self.is_sync() { "EIO" } else { "ENOSPC" }
    }
}

/// What a command is to write, and how to look at it.
struct Scenario {
    args: Vec<String>,
    stdin: &'static str,
    /// All that it writes is in here.
    folder: PathBuf,
    /// A part of the name of what is written, which each error has.
    name: &'static str,
    /// What it says at the end, and only then.
    done: &'static str,
    /// What is there, in a form that two equal runs agree in.
    look: fn(&Path) -> Contents,
}

type Contents = BTreeMap<String, Vec<u8>>;

/// A run under strace, and the calls that touched the folder or failed.
fn run(scenario: &Scenario, fault: Option<&Fault>) -> (Ended, Vec<String>) {
    let log = scenario.folder.with_extension("strace");
    let mut command = command_under("strace", &["-f", "-y", "-qq", "-s", "0", "-o"]);
    command.arg(&log).arg("-e").arg(format!("trace={CALLS}"));
    if let Some(fault) = fault {
        let (call, error, n) = (&fault.call, fault.error(), fault.n);
        command.args(["-e", &format!("inject={call}:error={error}:when={n}")]);
    }
    command.arg(env!("CARGO_BIN_EXE_boostr")).args(&scenario.args).arg("-t1");
    command.stdin(std::process::Stdio::piped());
    let ended = end(command, scenario.stdin);
    let lines = fs::read_to_string(log).unwrap().lines().map(str::to_owned).collect();
    (ended, lines)
}

/// All calls of a run about its folder.
fn faults(scenario: &Scenario, lines: &[String]) -> Vec<Fault> {
    let folder = scenario.folder.to_str().unwrap();
    let mut counts = BTreeMap::new();
    let mut faults = Vec::new();
    for line in lines {
        let Some((thread, rest)) = line.split_once(' ') else { continue };
        let Some((call, what)) = rest.trim_start().split_once('(') else { continue };
        // The end of a call that was shown before.
        if call.starts_with('<') {
            continue;
        }
        let n = counts.entry((thread, call)).or_insert(0);
        *n += 1;
        if what.contains(folder) {
            faults.push(Fault { call: call.to_owned(), n: *n, line: line.clone() });
        }
    }
    faults
}

/// The first, the last, and some in between of each kind.
fn some_of(faults: Vec<Fault>) -> Vec<Fault> {
    let mut kinds: BTreeMap<String, Vec<Fault>> = BTreeMap::new();
    for fault in faults {
        kinds.entry(fault.call.clone()).or_default().push(fault);
    }
    let some = |of: Vec<Fault>| -> Vec<Fault> {
        let taken = of.len().min(MOST);
        (0..taken).map(|i| of[i * (of.len() - 1) / (taken - 1).max(1)].clone()).collect()
    };
    kinds.into_values().flat_map(some).collect()
}

/// Runs a scenario from its beginning with each of its calls failing that `wanted` wants; returns their names.
fn survives(scenario: &Scenario, wanted: impl Fn(&Fault) -> bool) -> Vec<String> {
    check_strace();
    let Scenario { folder, look, .. } = scenario;
    let start = folder.with_extension("start");
    let _ = fs::remove_dir_all(&start);
    copy(folder, &start);
    let old = look(folder);
    let (clean, lines) = run(scenario, None);
    let clean = clean.ok();
    assert!(clean.stdout.contains(scenario.done), "{}", clean.stdout);
    let new = look(folder);
    assert_ne!(old, new);
    let faults = some_of(faults(scenario, &lines).into_iter().filter(wanted).collect());
    for fault in &faults {
        fs::remove_dir_all(folder).unwrap();
        copy(&start, folder);
        let (ended, lines) = run(scenario, Some(fault));
        let path = folder.to_str().unwrap();
        let is_about = |line: &&String| line.contains(path);
        let failed: Vec<&String> = lines.iter().filter(|l| l.ends_with("(INJECTED)")).collect();
        assert!(failed.iter().any(is_about), "{fault:?} was not met: {lines:#?}");
        // A thread that says what is wrong may fail at that.
        let is_told = failed.iter().all(is_about);
        assert_eq!(temporary(folder), [""; 0], "{fault:?}");
        let found = look(folder);
        if ended.code == Some(0) {
            // What cannot be opened may be a folder to tidy up; all else is told, were it no part of what must be kept.
            let is_told = fault.call == "openat" || ended.stderr.contains("os error");
            assert!(is_told && found == new, "{fault:?}: success, and it is not there");
            continue;
        }
        assert_eq!(ended.code, Some(1), "{fault:?}: {}", ended.stderr);
        let said = format!("{}{}", ended.stdout, ended.stderr);
        for word in ["saved", scenario.done] {
            assert!(word.is_empty() || !said.contains(word), "{fault:?}: {said}");
        }
        if is_told {
            let error = ended.fails(1).stderr;
            let is_named = error.contains(scenario.name) && error.contains("os error");
            assert!(is_named, "{fault:?}: no `{}` in: {error}", scenario.name);
        }
        // The name is there already when its folder is forced to disk, the very last step.
        let is_last =
            fault.line.contains(&format!("{path}>")) || fault.line.contains(&format!("\"{path}\""));
        assert!(found == old || (is_last && found == new), "{fault:?}: neither old nor new");
    }
    faults.into_iter().map(|fault| fault.call).collect()
}

fn check_strace() {
    let traced = Command::new("strace").args(["-f", "-o", "/dev/null", "true"]).output();
    let traced = traced.expect("strace is not there: install it (apt-get install strace)");
    let why = String::from_utf8_lossy(&traced.stderr).into_owned();
    assert!(
        traced.status.success(),
        "strace may not trace here (allow ptrace, or leave these tests out with `-- --skip traced::`): {why}"
    );
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &to);
        } else {
            fs::copy(&path, &to).unwrap();
        }
    }
}

/// All files under a folder by their paths in it, but for locks.
fn files(folder: &Path) -> Contents {
    let mut all = Contents::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            all.insert(name.clone(), Vec::new());
            all.extend(
                files(&path).into_iter().map(|(under, bytes)| (format!("{name}/{under}"), bytes)),
            );
        } else if path.extension().is_none_or(|ending| ending != "lock") {
            all.insert(name, fs::read(path).unwrap());
        }
    }
    all
}

/// What nobody would want to find.
fn temporary(folder: &Path) -> Vec<String> {
    files(folder).into_keys().filter(|name| name.contains(".tmp-")).collect()
}

/// What was said in the conversation `a`, which must open.
fn turns(folder: &Path) -> Contents {
    let session = Sessions::<Cpu>::open(folder).unwrap().get("a").unwrap();
    let turns = session.turns().into_iter();
    turns.map(|turn| (turn.id.to_string(), format!("{:?}", turn.messages).into())).collect()
}

fn words(args: &[&str]) -> Vec<String> {
    args.iter().map(|&word| word.to_owned()).collect()
}

/// All that writes something somebody would miss, each in a folder with something older in it.
fn scenarios(test: &str) -> [Scenario; 5] {
    let work = folder(test);
    let place = |name: &str| {
        let folder = work.join(name);
        fs::create_dir(&folder).unwrap();
        folder
    };
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let tiny = tiny();

    let folder = place("run");
    let state = text(&folder.join("kept.state"));
    boostr(&["run", &tiny, "--tokens", "4,5", "-n", "0", "--save-state", &state]).ok();
    let args = words(&["run", &tiny, "--tokens", "1,2,3", "-n", "0", "--save-state", &state]);
    let run = Scenario { args, stdin: "", folder, name: "kept.state", done: "", look: files };

    let folder = place("copy");
    let to = text(&folder.join("copy.state"));
    let other = text(&work.join("other.state"));
    boostr(&["run", &tiny, "--tokens", "6", "-n", "0", "--save-state", &other]).ok();
    fs::copy(&state, &to).unwrap();
    let args = words(&["state", "branch", &other, &to, "--force"]);
    let copy = Scenario { args, stdin: "", folder, name: "copy.state", done: "", look: files };

    let folder = place("quantized");
    let model = text(&folder.join("small.gguf"));
    boostr(&["convert", &tiny, &model]).ok();
    let args = words(&["quantize", &tiny, &model, "-T", "q8_0", "--force"]);
    let done = "20 tensors, ";
    let quantized = Scenario { args, stdin: "", folder, name: "small.gguf", done, look: files };

    let folder = place("converted");
    let args = words(&["convert", &tiny, &text(&folder.join("whole")), "--type", "f16"]);
    let converted = Scenario { args, stdin: "", folder, name: "whole", done, look: files };

    let folder = place("talk");
    let talking = copy_of_tiny(&format!("{test}-talking"));
    let template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}";
    fs::write(talking.join("chat_template.jinja"), template).unwrap();
    let (talking, sessions) = (text(&talking), text(&folder));
    let args =
        ["chat", &talking, "--sessions", &sessions, "--session", "a", "--temp", "0", "-n", "3"];
    boostr_with_stdin(&args, "Hi\n").ok();
    let args = words(&args);
    let talk = Scenario { args, stdin: "And?\n", folder, name: "talk/a", done: "", look: turns };

    [run, copy, quantized, converted, talk]
}

#[test]
fn r_f2_whatever_call_fails_the_old_or_the_new_is_there() {
    for scenario in scenarios("traced-f2") {
        let calls = survives(&scenario, |fault| !fault.is_sync());
        let count = |name: &str| calls.iter().filter(|call| call.starts_with(name)).count();
        let counts = [count("openat"), count("write"), count("rename")];
        assert!(counts.into_iter().all(|count| count > 0), "{counts:?} of {calls:?}");
    }
}

#[test]
fn r_f3_what_cannot_be_forced_to_disk_is_not_called_saved() {
    for scenario in scenarios("traced-f3") {
        let calls = survives(&scenario, Fault::is_sync);
        assert!(calls.len() > 1, "{calls:?}");
    }
}
