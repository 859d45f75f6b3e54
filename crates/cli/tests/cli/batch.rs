//! `boostr batch`: in order, resumable, one bad line harms no other; and `run --draft`, which changes nothing.

use std::fs;
use std::time::Duration;

use serde_json::{Value, json};

use crate::common::*;

const QUESTIONS: &str = r#"{"prompt": "It is a truth universally acknowledged", "max_tokens": 12, "temperature": 0}
{"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 8, "temperature": 0}}

{"prompt": "x", "max_tokens": -1}
nonsense
{"input": ["a", "b"]}
{"url": "/metrics", "body": {}}
"#;

fn lines(path: &str) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Paths of an input and an output in a fresh folder.
fn files(name: &str) -> (String, String) {
    let folder = folder(name);
    let path = |name| folder.join(name).to_str().unwrap().to_owned();
    (path("q.jsonl"), path("a.jsonl"))
}

fn batch(input: &str, out: &str) -> Ended {
    boostr(&["batch", "--in", input, "--out", out])
}

#[test]
fn answers_are_in_the_order_of_their_lines_and_a_bad_line_is_an_error_of_its_own() {
    let (input, out) = files("batch-order");
    fs::write(&input, QUESTIONS).unwrap();
    let ended = batch(&input, &out).fails(1);
    assert!(ended.stderr.contains("3 of 6 requests failed"), "{}", ended.stderr);
    let answers = lines(&out);
    let ids: Vec<&str> = answers.iter().map(|line| line["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["line-1", "line-2", "line-3", "line-4", "line-5", "line-6"]);
    let prompt = "It is a truth universally acknowledged";
    let alone = boostr(&["run", "-p", prompt, "-n", "12", "--temp", "0", "--json"]).ok().json();
    assert_eq!(answers[0]["response"]["body"]["choices"][0]["text"], alone["text"]);
    assert_eq!(answers[1]["custom_id"], "b");
    assert_eq!(answers[1]["response"]["body"]["object"], "chat.completion");
    assert_eq!(answers[4]["response"]["body"]["data"].as_array().unwrap().len(), 2);
    for (i, expected) in [(2, "max_tokens"), (3, "line 4: no JSON"), (5, "`url`")] {
        let error = &answers[i]["error"]["message"];
        assert!(error.as_str().unwrap().contains(expected), "{error}");
        assert_eq!(answers[i]["response"], Value::Null);
    }
}

#[test]
fn a_run_that_was_cut_anywhere_goes_on_to_the_same_file() {
    let (input, out) = files("batch-resume");
    let question = |i| json!({"prompt": format!("Chapter {i}"), "max_tokens": 5, "temperature": 0});
    let questions: Vec<String> = (0..12).map(|i| question(i).to_string()).collect();
    fs::write(&input, questions.join("\n")).unwrap();
    batch(&input, &out).ok();
    // What differs from run to run: ids and times.
    let essence = |path: &str| -> Vec<Value> {
        let of = |line: &Value| json!([line["id"], line["response"]["body"]["choices"]]);
        lines(path).iter().map(of).collect()
    };
    let whole = fs::read(&out).unwrap();
    let want = essence(&out);
    for cut in [0, 1, whole.len() / 3, whole.len() / 2, whole.len() - 1] {
        fs::write(&out, &whole[..cut]).unwrap();
        batch(&input, &out).ok();
        assert_eq!(essence(&out), want, "cut after {cut} bytes");
    }
    assert!(batch(&input, &out).ok().stderr.contains("12 of 12 lines are answered already"));
    // Another input is noticed, and its answers are not mixed in.
    fs::write(&input, "{\"prompt\": \"other\"}\n").unwrap();
    let before = fs::read(&out).unwrap();
    let ended = batch(&input, &out).fails(1);
    assert!(ended.stderr.contains("line 1 is not the answer"), "{}", ended.stderr);
    assert_eq!(fs::read(&out).unwrap(), before);
}

#[test]
fn r_f1_a_killed_run_leaves_whole_lines_or_one_that_is_cut_off() {
    let (input, out) = files("batch-kill");
    let question = json!({"prompt": "It was", "max_tokens": 30, "temperature": 0}).to_string();
    fs::write(&input, format!("{question}\n").repeat(200)).unwrap();
    for i in 0..4 {
        let mut child = command(&["batch", "--in", &input, "--out", &out]).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(150 + 100 * i));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    batch(&input, &out).ok();
    let answers = lines(&out);
    assert_eq!(answers.len(), 200);
    for (i, line) in answers.iter().enumerate() {
        assert_eq!(line["id"], format!("line-{}", i + 1));
        assert_eq!(line["response"]["body"]["choices"], answers[0]["response"]["body"]["choices"]);
    }
}

#[test]
fn guesses_change_no_text_and_are_counted() {
    let text = "one two three four one two three four one two three four one two";
    let run = |more: &[&str]| {
        let args = [&["run", "-p", text, "-n", "60", "--temp", "0", "--json"], more].concat();
        boostr(&args).ok().json()
    };
    let plain = run(&[]);
    assert_eq!(plain["timings"]["draft_n"], 0);
    for draft in ["lookup", &demo()] {
        let drafted = run(&["--draft", draft]);
        assert_eq!(drafted["ids"], plain["ids"], "{draft}");
        assert!(drafted["timings"]["draft_n"].as_u64().unwrap() > 0, "{draft}");
    }
    let ended = boostr(&["run", "-p", text, "--draft", &tiny()]).fails(2);
    assert!(ended.stderr.contains("cannot guess for each other"), "{}", ended.stderr);
}
