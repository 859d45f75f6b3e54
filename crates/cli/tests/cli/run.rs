//! `boostr run`: text and ids, where prompts come from, and what ends a text.

use std::fs;

use serde_json::Value;

use crate::common::*;

const PROMPT: &str = "It is a truth universally acknowledged";

#[test]
fn greedy_text_is_that_of_the_original() {
    let expected = expected();
    let text = expected["greedy_text"].as_str().unwrap();
    let run = boostr(&["run", "-p", PROMPT, "--temp", "0", "-n", "24"]).ok();
    assert_eq!(run.stdout, format!("{text}\n"));
    assert_eq!(run.stderr, "");
    let run = boostr(&["run", &demo(), PROMPT, "--temperature", "0", "--n-predict", "24"]).ok();
    assert_eq!(run.stdout, format!("{text}\n"));
}

#[test]
fn ids_in_give_ids_out() {
    let expected = expected();
    let prompt = joined(&expected["prompt_ids"], ",");
    let run = boostr(&["run", "--tokens", &prompt, "--temp", "0", "-n", "24"]).ok();
    assert_eq!(run.stdout, format!("{}\n", joined(&expected["greedy_ids"], " ")));
    let spaced = joined(&expected["prompt_ids"], " ");
    let run = boostr_with_stdin(&["run", "--tokens", "-", "--temp", "0", "-n", "24"], &spaced);
    assert_eq!(run.ok().stdout, format!("{}\n", joined(&expected["greedy_ids"], " ")));
}

#[test]
fn json_is_one_object_with_text_ids_and_timings() {
    let expected = expected();
    let run = boostr(&["run", "-p", PROMPT, "--temp", "0", "-n", "24", "--json"]).ok();
    assert_eq!(run.stdout.lines().count(), 1);
    let json = run.json();
    assert_eq!(json["text"], expected["greedy_text"]);
    assert_eq!(json["ids"], expected["greedy_ids"]);
    assert_eq!(json["prompt_tokens"], 15);
    assert_eq!(json["finish_reason"], "length");
    assert_eq!(json["model"], "demo-mamba2");
    // Five layers of an SSM state [8, 64, 64] and a window [3, 640], in f32.
    assert_eq!(json["state_bytes"], 5 * 4 * (8 * 64 * 64 + 3 * 640));
    assert_eq!(json["timings"]["prompt_n"], 15);
    assert_eq!(json["timings"]["predicted_n"], 24);
    for field in ["prompt_ms", "prompt_per_second", "predicted_ms", "predicted_per_second"] {
        assert!(json["timings"][field].as_f64().unwrap() > 0.0, "{field}");
    }
}

#[test]
fn one_beam_is_greedy_and_of_several_the_likeliest_is_shown() {
    let text = expected()["greedy_text"].clone();
    let ask = |more: &[&str]| boostr(&[&["run", "-p", PROMPT, "-n", "24"], more].concat());
    assert_eq!(ask(&["--beams", "1"]).ok().stdout, format!("{}\n", text.as_str().unwrap()));
    let beams = ask(&["--beams", "3", "--json"]).ok().json()["beams"].clone();
    let beams = beams.as_array().unwrap();
    let logprob = |i: usize| beams[i]["logprob"].as_f64().unwrap();
    assert!(beams.len() == 3 && logprob(0) >= logprob(1) && logprob(1) >= logprob(2));
    let shown = ask(&["--beams", "3"]).ok().stdout;
    assert_eq!(shown.trim_end(), beams[0]["text"].as_str().unwrap().trim_end());
    for wrong in [&["--beams", "0"][..], &["--beams", "2", "--top-k", "5"]] {
        ask(wrong).fails(2);
    }
}

#[test]
fn a_seed_makes_a_run_repeatable_and_is_told_when_it_was_not_given() {
    let first = boostr(&["run", "-p", "The whale", "-n", "40", "--json"]).ok().json();
    let seed = first["seed"].to_string();
    let again = boostr(&["run", "-p", "The whale", "-n", "40", "-s", &seed]).ok();
    assert_eq!(again.stdout.trim_end(), first["text"].as_str().unwrap().trim_end());
    let other = boostr(&["run", "-p", "The whale", "-n", "40", "-s", "7"]).ok().stdout;
    let third = boostr(&["run", "-p", "The whale", "-n", "40", "-s", "8"]).ok().stdout;
    assert!(other != third || other != again.stdout);
}

#[test]
fn threads_do_not_change_the_text() {
    let args = ["run", "-p", PROMPT, "-n", "32", "-s", "3"];
    let one = boostr(&[&args[..], &["-t", "1"]].concat()).ok().stdout;
    let three = boostr(&[&args[..], &["--threads", "3"]].concat()).ok().stdout;
    assert_eq!(one, three);
}

#[test]
fn threads_that_are_bound_to_processors_do_not_change_the_text() {
    let args = ["run", "-p", PROMPT, "-n", "32", "-s", "3"];
    let pinned = boostr(&[&args[..], &["--threads", "3", "--pin"]].concat());
    if cfg!(target_os = "linux") {
        assert_eq!(pinned.ok().stdout, boostr(&args).ok().stdout);
    } else {
        let refused = pinned.fails(1);
        assert!(refused.stderr.contains("bound to processors"), "{}", refused.stderr);
    }
}

#[test]
fn the_steps_of_a_token_are_shown_for_each_number_of_threads() {
    let args = ["bench", "--steps", "-g", "2", "-t", "1,3", "--json"];
    let small = ["--synthetic", "mamba2-130m", "--layers", "2", "--dtype", "q8_0"];
    let json = boostr(&[&args[..], &small[..]].concat()).ok().json();
    let tokens = json["tokens"].as_array().unwrap();
    let regions = |i: usize| {
        let steps = tokens[i]["steps"].as_array().unwrap();
        steps.iter().filter(|step| step["is_region"] == true).count()
    };
    assert_eq!(tokens[0]["threads"], 1);
    assert_eq!(tokens[1]["threads"], 3);
    // Three a layer, one of the head, and maybe one that clears the logits.
    assert_eq!(regions(0), 0);
    assert!((7..=8).contains(&regions(1)), "{}", regions(1));
}

#[test]
fn a_prompt_may_come_from_a_word_an_option_a_file_or_stdin() {
    let file = folder("prompt-file").join("prompt.txt");
    fs::write(&file, format!("{PROMPT}\n")).unwrap();
    let file = file.to_str().unwrap();
    let greedy = ["--temp", "0", "-n", "12"];
    let run = |args: &[&str]| boostr(&[args, &greedy[..]].concat()).ok().stdout;
    let want = run(&["run", "-p", PROMPT]);
    assert_eq!(run(&["-p", PROMPT]), want);
    assert_eq!(run(&["generate", "-f", file]), want);
    assert_eq!(run(&["-m", &demo(), PROMPT]), want);
    assert_eq!(run(&[&demo(), PROMPT]), want);
    let piped = |args: &[&str], stdin: &str| {
        boostr_with_stdin(&[args, &greedy[..]].concat(), stdin).ok().stdout
    };
    assert_eq!(piped(&["run"], &format!("{PROMPT}\n")), want);
    assert_eq!(piped(&["-p", "-"], PROMPT), want);
    assert_eq!(piped(&[&demo()], PROMPT), want);
}

#[test]
fn alone_it_runs_the_built_in_model_and_ends_with_a_line_about_it() {
    let run = boostr(&[]).ok();
    assert!(run.stdout.split_whitespace().count() > 20, "{}", run.stdout);
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
    assert!(run.stderr.contains("a demo") && run.stderr.contains("tokens/s"), "{}", run.stderr);
    assert!(run.stderr.contains("next:"), "{}", run.stderr);
    assert_eq!(boostr(&["-q"]).ok().stderr, "");
}

#[test]
fn alone_it_does_not_wait_for_stdin() {
    let mut command = command(&[]);
    command.stdin(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let pipe = child.stdin.take();
    assert!(child.wait().unwrap().success());
    drop(pipe);
}

#[test]
fn timings_are_on_stderr_when_asked_for() {
    let run = boostr(&["run", &demo(), "-p", PROMPT, "-n", "8", "-v", "-s", "11"]).ok();
    for label in [
        "load time:",
        "prompt eval rate:",
        "eval rate:",
        "time to first token:",
        "state:",
        "constant (position 23)",
        "seed 11",
        "2.68 M params, bf16",
    ] {
        assert!(run.stderr.contains(label), "{label}: {}", run.stderr);
    }
    assert!(!run.stdout.contains("eval rate"));
}

#[test]
fn text_ends_before_a_stop_string() {
    let args = ["-p", PROMPT, "--temp", "0", "-n", "24"];
    let run = boostr(&[&args[..], &["--stop", "the Government"]].concat()).ok();
    assert_eq!(run.stdout, " that it is not to be expected that \n");
    let stops = ["--stop", "never", "--stop", "expected", "--json"];
    let json = boostr(&[&args[..], &stops[..]].concat()).ok().json();
    assert_eq!(json["text"], " that it is not to be ");
    assert_eq!(json["finish_reason"], "stop");
}

#[test]
fn generation_ends_at_the_models_end_token() {
    // This model was not trained; greedily it ends nowhere, so its end token is made a likely one.
    let model = copy_of_tiny("eos");
    let path = model.to_str().unwrap();
    let args = ["run", path, "--tokens", "5,17,3", "-n", "20", "--json"];
    let json = boostr(&args).ok().json();
    let third = json["ids"][2].clone();
    let defaults = serde_json::json!({ "eos_token_id": [third] });
    fs::write(model.join("generation_config.json"), defaults.to_string()).unwrap();
    let ended = boostr(&args).ok().json();
    assert_eq!(ended["finish_reason"], "eos");
    let until = ids(&json["ids"]).iter().position(|&id| Some(id) == third.as_u64()).unwrap();
    assert_eq!(ids(&ended["ids"]), ids(&json["ids"])[..until]);
}

#[test]
fn the_number_of_tokens_is_128_or_the_models_own() {
    let json = boostr(&["-p", PROMPT, "--json", "--temp", "0", "--repeat-penalty", "1.3"]);
    assert_eq!(json.ok().json()["timings"]["predicted_n"], 128);
    let model = copy_of_tiny("max-new-tokens");
    fs::write(model.join("generation_config.json"), r#"{"max_new_tokens": 3}"#).unwrap();
    let path = model.to_str().unwrap();
    let json = boostr(&["run", path, "--tokens", "5", "--json"]).ok().json();
    assert_eq!(json["ids"].as_array().unwrap().len(), 3);
    let json = boostr(&["run", path, "--tokens", "5", "--json", "-n", "0"]).ok().json();
    assert_eq!(json["ids"], Value::Array(Vec::new()));
}

#[test]
fn options_win_over_variables_and_these_over_the_models_defaults() {
    let run = |args: &[&str], variables: &[(&str, &str)]| {
        let mut command = command(&[&["-p", "Call me", "-n", "2", "--json"], args].concat());
        command.envs(variables.iter().copied());
        end(command, "").ok().json()["sampling"].clone()
    };
    assert_eq!(run(&[], &[])["temperature"], 0.7);
    assert_eq!(run(&[], &[])["top_p"], 0.95);
    assert_eq!(run(&[], &[("BOOSTR_TEMP", "0.3")])["temperature"], 0.3);
    assert_eq!(run(&["--temp", "0.2"], &[("BOOSTR_TEMP", "0.3")])["temperature"], 0.2);
}

#[test]
fn the_variable_names_the_model_unless_the_line_does() {
    let model = |args: &[&str]| {
        let mut command = command(&[args, &["--tokens", "5", "-n", "1", "--json"]].concat());
        command.env("BOOSTR_MODEL", tiny());
        end(command, "").ok().json()["model"].clone()
    };
    assert_eq!(model(&["run"]), "mamba2-tiny");
    assert_eq!(model(&["run", &demo()]), "default");
    assert_eq!(model(&["-m", &demo()]), "default");
}

#[test]
fn p_context_overflow_silent_a_length_of_context_holds() {
    let prompt = ["-p", "Call me Ishmael. Some years ago - never mind how long precisely"];
    for option in ["-c", "--context", "--ctx-size"] {
        let long = boostr(&[&[option, "4"], &prompt[..]].concat()).fails(2);
        assert!(long.stderr.contains("maximum context length"), "{}", long.stderr);
        assert!(long.stderr.contains("--no-context-limit"), "{}", long.stderr);
    }
    let run = boostr(&[&["-c", "30", "-n", "-1", "--json"], &prompt[..]].concat()).ok().json();
    let tokens = run["timings"]["prompt_n"].as_u64().unwrap()
        + run["timings"]["predicted_n"].as_u64().unwrap();
    assert_eq!((&run["finish_reason"], tokens), (&serde_json::json!("length"), 30), "{run}");
    assert_eq!(boostr(&["--ctx-size", "0", "-p", "Call me", "-n", "2", "-q"]).ok().stderr, "");
}

#[test]
fn p_context_overflow_silent_a_text_beyond_the_trained_length_is_told_of() {
    let model = root().join("fixtures/models/llama-tiny");
    let model = model.to_str().unwrap();
    let folder = folder("beyond");
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let tokens = |count: usize| vec!["5"; count].join(",");
    fs::write(path("long.txt"), "It is a truth. ".repeat(400)).unwrap();
    fs::write(path("short.txt"), "It is a truth.").unwrap();
    let note = "the model was made for 2048: it goes on";
    for (line, is_told) in [
        (vec!["eval", model, "--data", &path("long.txt")], true),
        (vec!["eval", model, "--data", &path("short.txt")], false),
        (vec!["logits", model, "--tokens", &tokens(2050), "--out", &path("a.st")], true),
        (vec!["logits", model, "--tokens", &tokens(9), "--out", &path("b.st")], false),
    ] {
        let run = boostr(&line).ok();
        assert_eq!(run.stderr.contains(note), is_told, "{line:?}: {}", run.stderr);
    }
}

#[test]
fn an_empty_prompt_starts_with_the_token_that_starts_a_text() {
    let json = boostr(&["-p", "", "-n", "4", "--json"]).ok().json();
    assert_eq!(json["prompt_tokens"], 1);
}

#[test]
fn a_text_under_a_schema_is_json_and_one_under_an_expression_matches() {
    let schema = r#"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["name", "age"],
        "additionalProperties": false}"#;
    let folder = folder("schema");
    let write = |name: &str, text: &str| {
        fs::write(folder.join(name), text).unwrap();
        folder.join(name).to_str().unwrap().to_owned()
    };
    for given in [schema, &write("schema.json", schema)] {
        for seed in ["1", "2", "3"] {
            let run = boostr(&[
                "run",
                "-p",
                "Him: ",
                "--json-schema",
                given,
                "-s",
                seed,
                "--temp",
                "1",
                "-n",
                "200",
                "--json",
            ]);
            let run = run.ok().json();
            assert_eq!(run["finish_reason"], "eos");
            let value: Value = serde_json::from_str(run["text"].as_str().unwrap()).unwrap();
            assert!(value["name"].is_string() && value["age"].as_u64().unwrap() <= 99, "{value}");
        }
    }
    let run = boostr(&["run", "-p", "In the year ", "--regex", "1[0-9]{3}", "-s", "1"]).ok();
    let text = run.stdout.trim_end();
    assert!(text.len() == 4 && text.starts_with('1'), "{text}");
    let rules = write("rules.lark", "start: \"yes\" | \"no\"\n");
    let run = boostr(&["run", "-p", "Is it? ", "--grammar", &rules, "-s", "1"]).ok();
    assert!(["yes\n", "no\n"].contains(&run.stdout.as_str()), "{}", run.stdout);
}

#[test]
fn grammars_that_cannot_be_are_wrong_usage() {
    for (args, expected) in [
        (["--json-schema", "{\"type\": "], "is not JSON"),
        (["--json-schema", "{\"$ref\": \"http://example.com\"}"], "argument `json_schema`"),
        (["--json-schema", "{\"$ref\": \"#\"}"], "refers to itself"),
        (["--regex", "(unclosed"], "argument `regex`"),
    ] {
        let run = boostr(&[&["run", "-p", "a"][..], &args].concat()).fails(2);
        assert!(run.stderr.contains(expected), "{}", run.stderr);
    }
    let run = boostr(&["run", "-p", "a", "--grammar", "no/such/file"]).fails(1);
    assert!(run.stderr.contains("no/such/file"), "{}", run.stderr);
}
