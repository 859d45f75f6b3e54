//! States kept in files: `run --save-state`, `run --state`, `boostr state`.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::common::*;

const GREEDY: [&str; 4] = ["--temp", "0", "--json", "-n"];

fn greedy(args: &[&str], tokens: &str) -> Value {
    boostr(&[&["run"], args, &GREEDY[..], &[tokens]].concat()).ok().json()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn list(ids: impl Iterator<Item = u32>) -> String {
    ids.map(|id| id.to_string()).collect::<Vec<_>>().join(",")
}

#[test]
fn a_run_goes_on_in_another_process_and_evaluates_only_what_is_new() {
    let folder = folder("state-on");
    let file = folder.join("a.state");
    // Five hundred ids, and one more.
    let seen = list((0..500).map(|i| 7 + i * 13 % 500));
    let whole = greedy(&["--tokens", &format!("{seen},42")], "20");
    let saved = greedy(&["--tokens", &seen, "--save-state", text(&file)], "0");
    assert_eq!((&saved["position"], &saved["timings"]["cache_n"]), (&500.into(), &0.into()));
    let on = greedy(&["--tokens", "42", "--state", text(&file)], "20");
    assert_eq!(on["ids"], whole["ids"]);
    assert_eq!((&on["timings"]["prompt_n"], &on["timings"]["cache_n"]), (&1.into(), &500.into()));
    assert_eq!(on["position"], whole["position"]);
    // The file is as it was: a second run is the same.
    assert_eq!(greedy(&["--tokens", "42", "--state", text(&file)], "20")["ids"], whole["ids"]);
    let told = boostr(&["run", "--tokens", "42", "--state", text(&file), "-n", "2", "-v"]).ok();
    assert!(told.stderr.contains("(1 tokens, 500 more reused from the state)"), "{}", told.stderr);
}

#[test]
fn what_was_generated_is_part_of_the_state_to_the_last_token() {
    let folder = folder("state-generated");
    let file = folder.join("a.state");
    let prompt = ["-p", "It is a truth universally acknowledged"];
    let whole = greedy(&prompt, "30");
    let first = greedy(&[&prompt[..], &["--save-state", text(&file)]].concat(), "12");
    let prompt_n = first["prompt_tokens"].as_u64().unwrap();
    assert_eq!(first["position"], prompt_n + 12);
    let ids = ids(&whole["ids"]);
    let next = list(ids[12..13].iter().map(|&id| id as u32));
    // Back into its own file: text goes on in turns, and its ids with it.
    let second =
        greedy(&["--tokens", &next, "--state", text(&file), "--save-state", text(&file)], "17");
    assert_eq!(crate::common::ids(&second["ids"]), ids[13..]);
    let shown = boostr(&["state", "show", text(&file), "--json"]).ok().json();
    assert_eq!((&shown["position"], &shown["has_ids"]), (&(prompt_n + 30).into(), &true.into()));
    let model = boostr(&["show", "--json"]).ok().json();
    for (of_state, of_model) in [("model", "model"), ("family", "architecture")] {
        assert_eq!(shown[of_state], model[of_model]);
    }
    assert_eq!(shown["layers"].as_array().unwrap().len() as u64, model["n_layer"]);
    assert_eq!(shown["layers"][0]["ssm_heads"].as_array().unwrap().len() as u64, model["nheads"]);

    // Text that comes next is text: no token that begins one, and the penalty knows what was before.
    let penalty = ["--repeat-penalty", "1.3"];
    let all = list(ids[..12].iter().map(|&id| id as u32));
    let count = boostr(&["tokenizer", "count", &demo(), " the end"]).ok();
    let on = greedy(&["-p", " the end", "--state", text(&file)], "1");
    assert_eq!(on["prompt_tokens"].to_string(), count.stdout.trim());
    let want = greedy(&[&["--tokens", &format!("9,8,7,{all}")], &penalty[..]].concat(), "12");
    greedy(&["--tokens", "9,8,7", "--save-state", text(&file)], "0");
    let got = greedy(&[&["--tokens", &all, "--state", text(&file)], &penalty[..]].concat(), "12");
    assert_eq!(got["ids"], want["ids"]);
}

#[test]
fn states_are_shown_and_compared() {
    let folder = folder("state-show");
    let (a, b) = (folder.join("a.state"), folder.join("b.state"));
    let model = root().join("fixtures/models/bamba-tiny");
    let run = |tokens: &str, file: &Path, more: &[&str]| {
        let args = [text(&model), "--tokens", tokens, "--save-state", text(file)];
        greedy(&[&args[..], more].concat(), "0");
    };
    run("1,2,3,4", &a, &["--kv-type", "f16"]);
    run("1,2,3,4,5", &b, &["--kv-type", "f16", "--state-type", "bf16"]);
    let shown = boostr(&["state", "show", text(&a)]).ok().stdout;
    for part in
        ["bamba-tiny (bamba)", "4 tokens seen, their ids are there", "(f32)", "f16", "layer"]
    {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert_eq!(shown.lines().count(), 1 + 5 + 2 + 1 + 4, "{shown}");
    let size = |file: &Path| fs::metadata(file).unwrap().len();
    assert!(size(&b) < size(&a) * 6 / 10, "{} {}", size(&a), size(&b));
    let apart = boostr(&["state", "diff", text(&a), text(&b)]).ok().stdout;
    assert!(apart.contains("4 and 5 tokens seen") && apart.contains('%'), "{apart}");
    let apart = boostr(&["state", "diff", text(&a), text(&b), "--json"]).ok().json();
    assert_eq!((&apart["a"]["dtype"], &apart["b"]["dtype"]), (&"f32".into(), &"bf16".into()));
    // Four positions are in both, kept as they were; the mixers have moved on.
    assert_eq!(apart["layers"][2]["key_heads"], serde_json::json!([0.0, 0.0]));
    assert!(apart["layers"][0]["ssm_heads"][0].as_f64().unwrap() > 0.0);
}

#[test]
fn what_is_no_state_of_this_model_is_refused() {
    let folder = folder("state-bad");
    let file = folder.join("a.state");
    let saved = greedy(&["--tokens", "1,2,3", "--save-state", text(&file)], "0");
    let own = saved["model"].as_str().unwrap();
    let on = |model: &str, file: &str| {
        boostr(&["run", model, "--tokens", "4", "--state", file, "-n", "1"])
    };
    let error = on(&tiny(), text(&file)).fails(3).stderr;
    assert!(error.contains("another model") && error.contains(own), "{error}");
    assert!(on(&demo(), "none.state").fails(3).stderr.contains("none.state"));
    let mut bytes = fs::read(&file).unwrap();
    let at = bytes.len() - 9;
    bytes[at] ^= 4;
    let damaged = folder.join("damaged.state");
    fs::write(&damaged, bytes).unwrap();
    for args in
        [&["state", "show", text(&damaged)][..], &["state", "diff", text(&file), text(&damaged)]]
    {
        let error = boostr(args).fails(3).stderr;
        assert!(error.contains("damaged.state") && error.contains("`checksum`"), "{error}");
    }
    // Wrong usage, and places where nothing can be written.
    for args in [
        &["run", "--state", text(&file)][..],
        &["run", "--state", text(&file), "-p", ""],
        &["run", "--state", text(&file), "-p", "x", "--system", "y"],
        &["state"],
    ] {
        assert_eq!(boostr(args).code, Some(2), "{args:?}");
    }
    let nowhere = folder.join("none/a.state");
    let error = boostr(&["run", "--tokens", "1", "--save-state", text(&nowhere)]).fails(1).stderr;
    assert!(error.contains("none/a.state"), "{error}");
    let mut names: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, [".a.state.lock", "a.state", "damaged.state"]);
}

#[test]
fn the_commands_of_the_documentation_run() {
    let folder = folder("state-docs");
    // One after another, on the built-in model.
    let docs = fs::read_to_string(root().join("docs/state.md")).unwrap();
    let commands: Vec<&str> =
        docs.lines().filter_map(|line| line.strip_prefix("    boostr ")).collect();
    assert!(commands.len() >= 5, "{commands:?}");
    for line in commands {
        let line = line.split(" #").next().unwrap();
        let mut words = Vec::new();
        for (i, part) in line.split('"').enumerate() {
            if i % 2 == 1 {
                words.push(part.to_owned());
            } else {
                words.extend(part.split_whitespace().map(str::to_owned));
            }
        }
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut command = command(&words);
        command.current_dir(&folder).env("XDG_STATE_HOME", &folder);
        end(command, "").ok();
    }
}
