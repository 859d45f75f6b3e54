//! How the program behaves as a process: help, codes, pipes, signals, colours.

use std::io::Read;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::*;

#[test]
fn the_help_is_what_it_was() {
    let help = include_str!("../../src/help.txt").replace("{version}", env!("CARGO_PKG_VERSION"));
    for args in [&["--help"][..], &["-h"], &["help"]] {
        let run = boostr(args).ok();
        assert_eq!(run.stdout.trim_end(), help.trim_end());
        assert_eq!(run.stderr, "");
    }
    let version = boostr(&["--version"]).ok().stdout;
    assert_eq!(version, format!("boostr {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn each_command_has_help_that_starts_with_examples() {
    let all = boostr(&["--help-all"]).ok().stdout;
    for command in
        ["run", "serve", "show", "verify", "bench", "logits", "tokenizer", "doctor", "completions"]
    {
        let run = boostr(&[command, "-h"]).ok();
        assert!(run.stdout.starts_with("Examples:\n  boostr "), "{command}: {}", run.stdout);
        assert!(all.contains(&format!("\nboostr {command}\n")), "{command}");
    }
}

#[test]
fn wrong_usage_ends_with_2_and_a_suggestion() {
    let run = boostr(&["run", "--tmp", "0"]).fails(2);
    assert!(run.stderr.contains("'--temp'"), "{}", run.stderr);
    let run = boostr(&["-p", "x", "--max-token", "3"]).fails(2);
    assert!(run.stderr.contains("'--max-tokens'"), "{}", run.stderr);
    for args in [
        &["-p", "x", "--temp", "-1"][..],
        &["-p", "x", "--top-p", "1.5"],
        &["-p", "x", "--temp", "warm"],
        &["-p", "x", "-t", "0"],
        &["-p", "x", "-n", "-2"],
        &["-p", "x", "--stop", ""],
        &["-p", "x", "--tokens", "1"],
        &["--tokens", "1,x"],
        &["--tokens", ""],
        &["--tokens", "5000"],
        &["-v", "-q"],
        &["completions", "tcsh"],
        &["logits", "--tokens", "1"],
    ] {
        boostr(args).fails(2);
    }
    boostr(&["run", &tiny()]).fails(2);
}

#[test]
fn other_failures_end_with_1() {
    let run = boostr(&["run", "-f", "/no/such/file"]).fails(1);
    assert!(run.stderr.starts_with("error: `/no/such/file`: No such file"), "{}", run.stderr);
    let mut command = command(&["run"]);
    let binary = folder("not-text").join("binary");
    std::fs::write(&binary, b"a\xff").unwrap();
    command.stdin(std::fs::File::open(&binary).unwrap());
    assert!(end(command, "").fails(1).stderr.contains("byte 1"));
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    let bench = ["bench", "-p", "8", "-g", "0", "-r", "1", "-t", "1"];
    for args in
        [&["-p", "x", "-n", "400"][..], &["show", "--tensors"], &["completions", "bash"], &bench]
    {
        let mut child = command(args).spawn().unwrap();
        let mut stdout = child.stdout.take().unwrap();
        stdout.read_exact(&mut [0]).unwrap();
        drop(stdout);
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert_eq!((child.wait().unwrap().code(), stderr.as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn an_interrupt_ends_the_text_and_the_code_is_130() {
    let child = command(&["-p", "The sea", "-n", "-1", "--json"]).spawn().unwrap();
    wait_until_caught(child.id());
    interrupt(child.id());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["finish_reason"], "interrupted");
    assert_eq!(output.stderr, b"");

    let mut child = command(&["-p", "The sea", "-n", "-1"]).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 20]).unwrap();
    interrupt(child.id());
    let start = Instant::now();
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(rest.ends_with('\n'), "{rest}");
    assert!(start.elapsed() < Duration::from_secs(5));
}

/// The first one lets what runs end, so that the second one is seen.
#[cfg(target_os = "linux")]
#[test]
fn a_second_signal_of_any_kind_ends_a_long_command_at_once() {
    let folder = folder("process-signals");
    let (input, out) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
    let [input, out] = [&input, &out].map(|path| path.to_str().unwrap());
    let ask = |tokens: u32| {
        format!(
            "{{\"prompt\": \"The sea\", \"max_tokens\": {tokens}, \"logit_bias\": {{\"0\": -100}}}}\n"
        )
    };
    std::fs::write(input, ask(1) + &ask(10_000_000)).unwrap();
    for [first, second] in [["TERM", "TERM"], ["INT", "TERM"], ["TERM", "INT"]] {
        let _ = std::fs::remove_file(out);
        let mut child =
            command(&["batch", "--in", input, "--out", out, "--no-context-limit"]).spawn().unwrap();
        let start = Instant::now();
        while std::fs::metadata(out).map_or(0, |file| file.len()) == 0 {
            assert!(start.elapsed() < Duration::from_mins(1), "no line was answered");
            thread::sleep(Duration::from_millis(5));
        }
        signal(child.id(), first);
        // Of `timeout` the group of processes gets it once more.
        signal(child.id(), first);
        thread::sleep(Duration::from_millis(400));
        assert_eq!(child.try_wait().unwrap(), None, "{first} ended it at once");
        signal(child.id(), second);
        assert_eq!(child.wait().unwrap().code(), Some(130), "{first}, {second}");
        assert!(start.elapsed() < Duration::from_secs(70));
    }
    std::fs::remove_dir_all(folder).unwrap();
}

/// A file that is half written is no file.
#[cfg(target_os = "linux")]
#[test]
fn a_signal_to_end_leaves_nothing_of_a_conversion() {
    for name in ["TERM", "INT", "HUP"] {
        let folder = folder("process-convert");
        let out = folder.join("out.gguf");
        // One that ends before the signal comes is no failure.
        let child = command(&["convert", &demo(), out.to_str().unwrap()]).spawn().unwrap();
        wait_until_caught(child.id());
        signal(child.id(), name);
        let ended = child.wait_with_output().unwrap();
        let code = ended.status.code();
        let left: Vec<_> =
            std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        match code {
            Some(0) => assert_eq!(left, ["out.gguf"], "{name}"),
            _ => assert_eq!((code, left.len()), (Some(130), 0), "{name}: {left:?}"),
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}

/// Waits until the process has a handler of its own for the signal, which is 2.
fn wait_until_caught(process: u32) {
    let start = Instant::now();
    let is_caught = || {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"))?;
        Some(u64::from_str_radix(mask.trim(), 16).ok()? & 2 != 0)
    };
    while is_caught() == Some(false) && start.elapsed() < Duration::from_secs(10) {
        thread::sleep(Duration::from_millis(5));
    }
}

fn interrupt(process: u32) {
    signal(process, "INT");
}

fn signal(process: u32, name: &str) {
    let status =
        Command::new("kill").args([&format!("-{name}"), &process.to_string()]).status().unwrap();
    assert!(status.success());
}

#[test]
fn a_pipe_gets_no_colours_unless_they_are_forced() {
    let has_colours = |text: &str| text.contains('\x1b');
    for args in [&["-p", "x", "-n", "2", "-v"][..], &["show"], &["doctor"], &["show", "/no"]] {
        let run = boostr(args);
        assert!(!has_colours(&run.stdout) && !has_colours(&run.stderr), "{args:?}");
    }
    let colours = |args: &[&str], variables: &[(&str, &str)]| {
        let mut command = command(&[&["doctor"], args].concat());
        command.envs(variables.iter().copied());
        has_colours(&end(command, "").ok().stdout)
    };
    assert!(colours(&["--color", "on"], &[]));
    assert!(colours(&[], &[("CLICOLOR_FORCE", "1")]));
    assert!(!colours(&[], &[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]));
    assert!(!colours(&["--color=off"], &[("CLICOLOR_FORCE", "1")]));
}

#[test]
fn completions_are_there_for_five_shells() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let run = boostr(&["completions", shell]).ok();
        assert!(run.stdout.contains("boostr") && run.stdout.contains("logits"), "{shell}");
    }
}
