//! `train`, `tune` and `eval` as a user runs them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::*;

/// Some kilobytes of text, the same each time.
fn text(folder: &Path) -> String {
    let subjects = ["The sea", "A ship", "The captain", "Every sailor", "The wind"];
    let rest = ["was calm", "went home", "sang at night", "knew the way", "turned north"];
    let lines =
        (0..400).map(|i| format!("{} {}.\n", subjects[i * 7 % 5], rest[(i * i + i % 3) % 5]));
    let path = folder.join("text.txt");
    fs::write(&path, lines.collect::<String>()).unwrap();
    path.to_str().unwrap().to_owned()
}

fn path(folder: &Path, name: &str) -> String {
    folder.join(name).to_str().unwrap().to_owned()
}

/// Sizes of a model that is trained in a second.
const SMALL: [&str; 12] = [
    "--d-model",
    "64",
    "--n-layer",
    "1",
    "--d-state",
    "16",
    "--vocab-size",
    "300",
    "--seq-len",
    "32",
    "--batch-size",
    "2",
];

fn train(data: &str, out: &str, more: &[&str]) -> Ended {
    let line = ["train", "--data", data, "--valid", data, "--out", out, "--seed", "1"];
    boostr(&[&line[..], &SMALL, more].concat())
}

#[test]
fn a_model_is_trained_resumed_run_measured_quantized_tuned_and_merged() {
    let folder = folder("training");
    let (data, run) = (text(&folder), path(&folder, "run"));
    let first = train(&data, &run, &["--steps", "12", "--lr", "0.01", "--json"]).ok().json();
    assert_eq!((first["steps"].as_u64(), first["of_steps"].as_u64()), (Some(12), Some(12)));
    assert!(first["bits_per_byte"].as_f64().unwrap() > 0.0);
    let lines = fs::read_to_string(folder.join("run/metrics.jsonl")).unwrap();
    let losses: Vec<f64> = lines
        .lines()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64().unwrap()
        })
        .collect();
    assert_eq!(losses.len(), 12);
    assert!(losses[11] < 0.9 * losses[0], "{losses:?}");
    assert!(fs::read_to_string(folder.join("run/loss.svg")).unwrap().starts_with("<svg"));

    // The folder of a run is a model.
    assert!(!boostr(&["run", &run, "-p", "The", "-n", "8"]).ok().stdout.trim().is_empty());
    let eval = boostr(&["eval", &run, "--data", &data, "--json"]).ok().json();
    let bits = eval["bits_per_byte"].as_f64().unwrap();
    assert!((bits / first["bits_per_byte"].as_f64().unwrap() - 1.0).abs() < 0.02, "{bits}");
    let quantized = path(&folder, "run-q8_0.gguf");
    boostr(&["quantize", &run, &quantized, "-T", "q8_0"]).ok();
    boostr(&["run", &quantized, "-p", "The", "-n", "4"]).ok();

    // A run is not written over, and only what fits it goes on.
    let again = train(&data, &run, &["--steps", "12"]).fails(2);
    let told = format!("`boostr train --resume {run}` goes on with it");
    assert!(again.stderr.contains(&told), "{}", again.stderr);
    let done = boostr(&["train", "--resume", &run]).ok();
    assert!(done.stderr.contains("all 12 steps are made"), "{}", done.stderr);
    let more = boostr(&["train", "--resume", &run, "--steps", "14"]).ok();
    assert!(more.stderr.contains("14 steps in all, 12 until now"), "{}", more.stderr);
    let fewer = boostr(&["train", "--resume", &run, "--steps", "13"]).fails(2);
    assert!(fewer.stderr.contains("--steps: expected at least the 14 steps"), "{}", fewer.stderr);
    assert!(!fewer.stderr.contains("total_steps"), "{}", fewer.stderr);
    assert!(fewer.stderr.contains("at least the 14 steps"), "{}", fewer.stderr);
    let other = boostr(&["train", "--resume", &run, "--lr", "0.5"]).fails(2);
    assert!(other.stderr.contains("`--lr` was 0.01, is 0.5"), "{}", other.stderr);
    assert!(!other.stderr.contains("schedule"), "{}", other.stderr);

    // Adapters beside it, and in it.
    let (tuned, merged) = (path(&folder, "tuned"), path(&folder, "merged"));
    let line = ["tune", &run, "--data", &data, "--out", &tuned, "--lora", "2", "--steps", "3"];
    boostr(&[&line[..], &["--seq-len", "32", "--batch-size", "2"]].concat()).ok();
    assert!(folder.join("tuned/adapter_model.safetensors").is_file());
    let again = boostr(&[&line[..], &["--seq-len", "32", "--batch-size", "2"]].concat()).fails(2);
    let told = format!("`boostr tune --resume {tuned}` goes on with it");
    assert!(again.stderr.contains(&told), "{}", again.stderr);
    boostr(&["tune", &run, "--merge", &tuned, "--out", &merged]).ok();
    boostr(&["run", &merged, "-p", "The", "-n", "4"]).ok();

    // Without merging: beside the model, or by their folder, which names it.
    let nats = |line: &[&str]| {
        let line = [&["eval"], line, &["--data", &data, "--json"]].concat();
        boostr(&line).ok().json()["nats_per_token"].as_f64().unwrap()
    };
    let beside = nats(&[&run, "--adapter", &tuned]);
    assert!(beside != nats(&[&run]) && (beside / nats(&[&merged]) - 1.0).abs() < 1e-5);
    assert!(beside == nats(&[&tuned]) && beside == nats(&["--adapter", &tuned]));
    let text = |line: &[&str]| {
        boostr(&[&["run"], line, &["-p", "The", "-n", "8", "--temp", "0"]].concat()).ok().stdout
    };
    assert_eq!(text(&[&tuned]), text(&[&run, "--adapter", &tuned]));
    let shown = boostr(&["show", &tuned]).ok().stdout;
    assert!(shown.contains("rank 2, alpha 4") && shown.contains("1 in_proj"), "{shown}");
    assert_eq!(boostr(&["show", &tuned, "--json"]).ok().json()["adapter"]["r"], 2);
    assert!(boostr(&["verify", &tuned]).ok().stdout.contains("adapters"));
    boostr(&["tokenizer", "count", &tuned, "The"]).ok();
    let other = boostr(&["run", &demo(), "--adapter", &tuned, "-p", "The"]).fails(3);
    assert!(other.stderr.contains("adapters of another model?"), "{}", other.stderr);
    let twice = boostr(&["run", &tuned, "--adapter", &run, "-p", "The"]).fails(2);
    assert!(twice.stderr.contains("adapters itself"), "{}", twice.stderr);
    fs::rename(folder.join("run"), folder.join("moved")).unwrap();
    let alone = boostr(&["run", &tuned, "-p", "The"]).fails(3);
    assert!(alone.stderr.contains("--adapter") && alone.stderr.contains("not there"));
    let moved = path(&folder, "moved");
    assert!(beside == nats(&[&moved, "--adapter", &tuned]));
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn ctrl_c_saves_and_the_run_goes_on_to_where_it_would_have_been() {
    let folder = folder("training-stopped");
    let (data, run, whole) = (text(&folder), path(&folder, "run"), path(&folder, "whole"));
    let steps = ["--steps", "60"];
    let line = ["train", "--data", &data, "--valid", &data, "--out", &run, "--seed", "1"];
    let mut child = command(&[&line[..], &SMALL, &steps].concat()).spawn().unwrap();
    let metrics = PathBuf::from(&run).join("metrics.jsonl");
    let start = Instant::now();
    while fs::read_to_string(&metrics).unwrap_or_default().lines().count() < 5 {
        assert!(start.elapsed() < Duration::from_mins(1), "no step was made");
        sleep(Duration::from_millis(5));
    }
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    // What takes less memory changes no bit.
    boostr(&["train", "--resume", &run, "--checkpoint-layers"]).ok();
    let saved = fs::read_to_string(Path::new(&run).join("step-000060/trainer.json")).unwrap();
    let saved: serde_json::Value = serde_json::from_str(&saved).unwrap();
    assert_eq!(saved["config"]["checkpoint_layers"], true);
    train(&data, &whole, &steps).ok();
    let weights = |run: &str| fs::read(Path::new(run).join("model.safetensors")).unwrap();
    assert!(weights(&run) == weights(&whole));
    fs::remove_dir_all(folder).unwrap();
}

/// Starts a run that takes longer than anybody waits, and waits for its first steps.
fn started(data: &str, out: &str) -> std::process::Child {
    let line = ["train", "--data", data, "--out", out, "--seed", "1", "--steps", "1000000"];
    let line = [&line[..], &SMALL, &["--save-every", "1000000"]].concat();
    let child = command(&line).spawn().unwrap();
    let (metrics, start) = (Path::new(out).join("metrics.jsonl"), Instant::now());
    while fs::read_to_string(&metrics).unwrap_or_default().lines().count() < 3 {
        assert!(start.elapsed() < Duration::from_mins(1), "no step was made");
        sleep(Duration::from_millis(5));
    }
    child
}

fn signal(child: &std::process::Child, name: &str) {
    Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
}

#[test]
fn p_train_sigterm_loses_no_signal_to_end_loses_steps() {
    let folder = folder("training-signals");
    let data = text(&folder);
    for name in ["-TERM", "-HUP"] {
        let out = path(&folder, name);
        let mut child = started(&data, &out);
        // A terminal that is closed says so twice.
        signal(&child, name);
        signal(&child, name);
        assert_eq!(child.wait().unwrap().code(), Some(130), "{name}");
        let steps = boostr(&["train", "--resume", &out, "--time", "0"]).ok();
        let on = steps.stderr.lines().find(|line| line.contains("on from step")).unwrap();
        assert!(!on.contains("step 0 "), "{on}");
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn p_g9_second_trainer_replaces_tokens_a_refused_one_changes_nothing() {
    let folder = folder("training-twice");
    let (data, out, other) = (text(&folder), path(&folder, "run"), path(&folder, "other.txt"));
    fs::write(&other, "Call me Ishmael. Some years ago, never mind how long.\n".repeat(300))
        .unwrap();
    let mut child = started(&data, &out);
    let tokens = fs::read(Path::new(&out).join("train.tokens")).unwrap();
    for command in [
        &["train", "--data", &other, "--out", &out, "--steps", "5"][..],
        &["tune", &tiny(), "--data", &other, "--out", &out, "--lora", "2", "--steps", "5"],
        &["train", "--resume", &out],
    ] {
        let refused = boostr(command).fails(2);
        let told = ["another process trains", "has no checkpoint to go on from"];
        assert!(told.iter().any(|told| refused.stderr.contains(told)), "{}", refused.stderr);
        assert!(fs::read(Path::new(&out).join("train.tokens")).unwrap() == tokens);
    }
    signal(&child, "-INT");
    assert_eq!(child.wait().unwrap().code(), Some(130));
    boostr(&["train", "--resume", &out, "--time", "0"]).ok();

    // Other tokens, as many: noticed, and told.
    let path = Path::new(&out).join("train.tokens");
    let mut swapped = tokens.clone();
    for i in 0..4 {
        swapped.swap(60 + i, 64 + i);
    }
    assert!(swapped != tokens);
    fs::write(&path, swapped).unwrap();
    let refused = boostr(&["train", "--resume", &out, "--time", "0"]).fails(2);
    assert!(refused.stderr.contains("train.tokens"), "{}", refused.stderr);
    assert!(refused.stderr.contains("another checksum"), "{}", refused.stderr);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn documents_that_are_longer_than_a_row_are_told() {
    let folder = folder("training-longer");
    let (data, out) = (path(&folder, "d.jsonl"), path(&folder, "run"));
    let long = "The sea was calm and the men were tired of waiting. ".repeat(9);
    let lines = [format!("{{\"text\": \"{long}\"}}"), "{\"text\": \"Short.\"}".to_owned()];
    fs::write(&data, lines.join("\n")).unwrap();
    let tune = |how: &str| {
        let _ = fs::remove_dir_all(&out);
        let line = ["tune", &tiny(), "--data", &data, "--out", &out, "--lora", "2", "--steps", "1"];
        boostr(&[&line[..], &["--seq-len", "16", "--truncate", how]].concat())
    };
    for (how, told) in [
        ("split", "cut into parts"),
        ("keep-start", "their first tokens"),
        ("keep-end", "their last tokens"),
        ("drop", "left out"),
    ] {
        let said = tune(how).ok().stderr;
        assert!(
            said.contains("1 of 2 documents are longer than a row of 16") && said.contains(told),
            "{said}"
        );
    }
    assert!(!tune("anywhere").ok().stderr.contains("longer than a row"));
    let refused = tune("refuse").fails(2);
    assert!(refused.stderr.contains("document 1 of 2 has"), "{}", refused.stderr);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn continuations_are_measured_and_choices_counted() {
    let folder = folder("eval-pairs");
    let data = path(&folder, "pairs.jsonl");
    let lines = [
        r#"{"context": "It is a truth", "continuation": " universally"}"#,
        r#"{"context": "It is a truth", "continuation": " xylophone"}"#,
        r#"{"context": "She was", "continuation": " not"}"#,
    ];
    fs::write(&data, lines.join("\n")).unwrap();
    let found = boostr(&["eval", &demo(), "--data", &data, "--json"]).ok().json();
    assert_eq!(found["contexts"].as_u64(), Some(2));
    assert_eq!(found["choice_accuracy"].as_f64(), Some(1.0));
    assert!(found["nats_per_token"].as_f64().unwrap() > 0.0);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_setting_that_is_wrong_or_does_not_apply_is_named_as_it_was_given() {
    let folder = folder("training-options");
    let (data, out, toml) = (text(&folder), path(&folder, "run"), path(&folder, "run.toml"));
    let train = ["train", "--data", &data, "--out", &out, "--preset", "tiny"];
    let cases: [(&[&str], &str); 14] = [
        (&["--lr", "-1"], "--lr: expected a finite number > 0, found -1"),
        (&["--lr", "nan"], "--lr: "),
        (&["--warmup", "100", "--steps", "10"], "--warmup: expected at most the 10 steps in all"),
        (&["--steps", "0"], "--steps: expected at least 1 step"),
        (&["--batch-size", "0"], "--batch-size: expected at least 1"),
        (&["--seq-len", "0"], "--seq-len: expected at least 1"),
        (&["--ema", "2"], "--ema: expected a number >= 0 and < 1, found 2"),
        (&["--truncate", "refuse", "--seq-len", "2"], "--truncate: document 1"),
        (&["--d-model", "7"], "--d-model: expected a width whose 2-fold is a multiple of 64"),
        (&["--d-model", "18446744073709551615"], "--d-model: expected a whole number from 1 to"),
        (&["--n-layer", "0"], "--n-layer: expected a whole number from 1 to 10000"),
        (&["--d-state", "0"], "--d-state: "),
        (&["--vocab-size", "3"], "--vocab-size: expected 257"),
        (&["--config", &toml], "settings: argument `lr`: expected a finite number > 0"),
    ];
    fs::write(&toml, "[run.schedule]\nlr = -1.0\n").unwrap();
    for (options, told) in cases {
        let ended = boostr(&[&train[..], options].concat()).fails(2);
        assert!(ended.stderr.contains(told), "{options:?}: {}", ended.stderr);
        fs::remove_dir_all(folder.join("run")).ok();
    }
    // What a run has already is not given anew.
    for options in [
        &["train", "--resume", &out, "--preset", "tiny"][..],
        &["train", "--resume", &out, "--d-model", "64"],
        &["train", "--resume", &out, "--tokenizer", &data],
        &["train", "--resume", &out, "--separator", "-"],
        &["tune", "--resume", &out, "--lora", "4"],
        &["tune", &demo(), "--merge", &out, "--out", &toml, "--lr", "1"],
        &["train", "--data", &data, "--out", &out, "--model-config", &toml, "--n-layer", "1"],
    ] {
        let ended = boostr(options).fails(2);
        let option = options.iter().rfind(|word| word.starts_with("--")).unwrap();
        assert!(ended.stderr.contains(option), "{options:?}: {}", ended.stderr);
        assert!(ended.stderr.contains("cannot be used with"), "{options:?}: {}", ended.stderr);
    }
    let tune = ["tune", &demo(), "--data", &data, "--out", &out, "--steps", "1"];
    let small = ["--batch-size", "1", "--seq-len", "8"];
    for (options, told) in [
        (&["--lora", "0"][..], "--lora: expected a rank from 1 to"),
        (&["--lora", "99999999999"], "--lora: expected a rank from 1 to"),
        (&["--lora", "2", "--alpha", "nan"], "--alpha: expected a finite number"),
        (&["--lora", "2", "--targets", "no_such"], "--targets: the model has no `no_such`"),
    ] {
        let ended = boostr(&[&tune[..], &small, options].concat()).fails(2);
        assert!(ended.stderr.contains(told), "{options:?}: {}", ended.stderr);
        fs::remove_dir_all(folder.join("run")).ok();
    }
    boostr(&[&tune[..], &small, &["--lora", "2"]].concat()).ok();
    boostr(&["tune", &demo(), "--resume", &out]).ok();
    let other = boostr(&["tune", &data, "--resume", &out]).fails(2);
    assert!(other.stderr.contains("MODEL: the run in "), "{}", other.stderr);
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn what_cannot_be_trained_on_is_an_error_that_names_it() {
    let folder = folder("training-bad");
    let (data, out) = (text(&folder), path(&folder, "run"));
    let (table, toml) = (path(&folder, "table.csv"), path(&folder, "bad.toml"));
    fs::write(&table, "a,b\n").unwrap();
    fs::write(&toml, "[run]\nsteps = 3\n").unwrap();
    let cases: [(&[&str], i32, &str); 6] = [
        (&["train", "--out", &out], 2, "--data"),
        (&["train", "--data", &data], 2, "--out"),
        (&["train", "--data", &table, "--out", &out], 2, "table.csv"),
        (&["train", "--data", &data, "--out", &out, "--config", &toml], 2, "steps"),
        (&["train", "--resume", &out], 2, "no checkpoint"),
        (&["train", "--data", "/no/such.txt", "--out", &out], 1, "/no/such.txt"),
    ];
    for (line, code, what) in cases {
        let ended = boostr(line).fails(code);
        assert!(ended.stderr.contains(what), "{line:?}: {}", ended.stderr);
    }
    fs::remove_dir_all(folder).unwrap();
}
