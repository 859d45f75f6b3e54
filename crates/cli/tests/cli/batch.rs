//! `boostr batch`: in order, resumable, one bad line harms no other; and `run --draft`, which changes nothing.

use std::fs;
use std::time::Duration;

use serde_json::{Value, json};

use crate::common::*;

const QUESTIONS: &str = r#"{"prompt": "It is a truth universally acknowledged", "max_tokens": 12, "temperature": 0}
{"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 8, "temperature": 0}}

{"prompt": "x", "max_tokens": -2}
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
fn tokens_that_the_author_keeps_out_come_in_no_answer_of_run_and_batch() {
    let model = copy_of_tiny("suppressed");
    let path = model.to_str().unwrap();
    let (input, out) = files("batch-suppressed");
    let asked = json!({"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "logprobs": 1});
    let more =
        json!({"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "stream": false, "n": 2});
    fs::write(&input, format!("{asked}\n{more}\n")).unwrap();
    let run = |more: &[&str]| {
        let line = ["run", path, "--tokens", "5,6,7", "-n", "6", "--temp", "0", "--json"];
        ids(&boostr(&[&line[..], more].concat()).ok().json()["ids"])
    };
    let free = run(&[]);
    // Lists that leave nothing are told of, and not used.
    let config = json!({"suppress_tokens": (0..10_000).collect::<Vec<u32>>()});
    fs::write(model.join("generation_config.json"), config.to_string()).unwrap();
    assert_eq!(run(&[]), free);
    let told = boostr(&["run", path, "--tokens", "5,6,7", "-n", "1"]).ok().stderr;
    assert!(told.contains("leave none of") && told.contains("they are not used"), "{told}");
    let config = json!({"suppress_tokens": [free[0]], "bad_words_ids": [[7, free[1]]]});
    fs::write(model.join("generation_config.json"), config.to_string()).unwrap();
    let kept = run(&[]);
    assert!(!kept.contains(&free[0]) && kept[0] != free[1], "{kept:?}, free {free:?}");
    assert_eq!(run(&["--draft", "lookup"]), kept);
    let told = boostr(&["run", path, "--tokens", "5,6,7", "-n", "1", "-v"]).ok().stderr;
    assert!(told.contains("without the tokens that the author suppresses"), "{told}");
    let beam = ["run", path, "--tokens", "5,6,7", "-n", "6", "--beams", "1", "--json"];
    assert_eq!(ids(&boostr(&beam).ok().json()["beams"][0]["ids"]), kept);
    boostr(&["batch", "-m", path, "--in", &input, "--out", &out]).ok();
    let guessed = format!("{out}.guessed");
    boostr(&["batch", path, "--in", &input, "--out", &guessed, "--draft", "lookup"]).ok();
    let texts = |file: &str| -> Vec<Value> {
        lines(file).iter().map(|line| line["response"]["body"]["choices"].clone()).collect()
    };
    assert_eq!(texts(&guessed), texts(&out));
    let line = ["run", path, "--tokens", "5,6,7", "-n", "6", "--temp", "0", "--json"];
    let text = boostr(&line).ok().json()["text"].as_str().unwrap().to_owned();
    for line in lines(&out) {
        for choice in line["response"]["body"]["choices"].as_array().unwrap() {
            assert_eq!(choice["text"], text, "{line}");
        }
    }
}

#[test]
fn answers_are_in_the_order_of_their_lines_and_a_bad_line_is_an_error_of_its_own() {
    let (input, out) = files("batch-order");
    fs::write(&input, QUESTIONS).unwrap();
    let ended = batch(&input, &out).fails(1);
    assert!(ended.stderr.contains("3 of 6 requests failed"), "{}", ended.stderr);
    let answers = lines(&out);
    assert!(answers.iter().all(|line| line["error"] == Value::Null));
    let ids: Vec<&str> = answers.iter().map(|line| line["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["line-1", "line-2", "line-3", "line-4", "line-5", "line-6"]);
    let prompt = "It is a truth universally acknowledged";
    let alone = boostr(&["run", "-p", prompt, "-n", "12", "--temp", "0", "--json"]).ok().json();
    assert_eq!(answers[0]["response"]["body"]["choices"][0]["text"], alone["text"]);
    assert_eq!(answers[1]["custom_id"], "b");
    assert_eq!(answers[1]["response"]["body"]["object"], "chat.completion");
    assert_eq!(answers[4]["response"]["body"]["data"].as_array().unwrap().len(), 2);
    for (i, expected) in [(2, "max_tokens"), (3, "line 4: no JSON"), (5, "`url`")] {
        // As in OpenAI's batch files.
        let response = &answers[i]["response"];
        let error = &response["body"]["error"]["message"];
        assert!(error.as_str().unwrap().contains(expected), "{error}");
        assert_eq!(response["status_code"], 400);
    }
}

#[test]
fn p_batch_custom_id_lost_each_answer_has_its_name_and_failures_are_asked_again() {
    let (input, out) = files("batch-names");
    let body = r#""body": {"prompt": "It was", "max_tokens": 2, "temperature": 0}"#;
    let good =
        |name: &str| format!(r#"{{"custom_id": "{name}", "url": "/v1/completions", {body}}}"#);
    let bad = [
        format!(r#"{{"custom_id": "r2", "url": "/v1/nothing", {body}}}"#),
        format!(r#"{{"custom_id": "r3", "method": "GET", "url": "/v1/completions", {body}}}"#),
        r#"{"custom_id": "r4", "url": "/v1/completions", "body": 7}"#.to_owned(),
        r#"{"custom_id": "r5", "nothing": 1}"#.to_owned(),
        r#"{"custom_id": "r6", "url": "/v1/completions", "body": {"prompt": "x", "n": 1000}}"#
            .to_owned(),
    ];
    let questions = |bad: &[String]| [&[good("r1")], bad, &[good("r7")]].concat().join("\n");
    fs::write(&input, questions(&bad)).unwrap();
    let names = |answers: &[Value]| -> Vec<String> {
        answers.iter().map(|line| line["custom_id"].as_str().unwrap_or("none").to_owned()).collect()
    };
    let failures = |answers: &[Value]| {
        answers.iter().filter(|line| line["response"]["status_code"] != 200).count()
    };
    for _ in 0..2 {
        // The second time nothing is asked, and nothing is well.
        let ended = batch(&input, &out).fails(1);
        assert!(ended.stderr.contains("5 of 7 requests failed"), "{}", ended.stderr);
        assert!(ended.stderr.contains("--retry-failed"), "{}", ended.stderr);
        let answers = lines(&out);
        assert_eq!(names(&answers), ["r1", "r2", "r3", "r4", "r5", "r6", "r7"]);
        assert_eq!(failures(&answers), 5);
    }

    // Answers that were written as failures of a server that had no memory, say.
    fs::write(&input, questions(&["r2", "r3", "r4", "r5", "r6"].map(good))).unwrap();
    let (_, whole) = files("batch-names-whole");
    batch(&input, &whole).ok();
    let want = lines(&whole);
    let failed = |line: &Value, other: bool| {
        let mut line = line.clone();
        let error = json!({"message": "no memory"});
        if other {
            // As earlier versions wrote it.
            (line["response"], line["error"]) = (Value::Null, error);
        } else {
            line["response"] = json!({"status_code": 503, "body": {"error": error}});
        }
        line
    };
    let mut some = want.clone();
    for (i, other) in [(1, false), (4, true), (6, false)] {
        some[i] = failed(&some[i], other);
    }
    let text = |lines: &[Value]| -> String {
        lines.iter().flat_map(|line| [line.to_string(), "\n".into()]).collect()
    };
    fs::write(&out, text(&some)).unwrap();
    let ended = batch(&input, &out).fails(1);
    assert!(ended.stderr.contains("3 of 7 requests failed"), "{}", ended.stderr);
    assert_eq!(fs::read_to_string(&out).unwrap(), text(&some));
    // Half of a second try that was stopped is gone on with.
    fs::write(format!("{out}.retry"), text(&want[..2])).unwrap();
    boostr(&["batch", "--in", &input, "--out", &out, "--retry-failed"]).ok();
    let answers = lines(&out);
    assert_eq!(answers[0], want[0]);
    for (answer, want) in answers.iter().zip(&want) {
        assert_eq!((&answer["id"], &answer["custom_id"]), (&want["id"], &want["custom_id"]));
        let choices = |line: &Value| line["response"]["body"]["choices"].clone();
        assert_eq!(choices(answer), choices(want));
    }
    assert!(!std::path::Path::new(&format!("{out}.retry")).exists());
    boostr(&["batch", "--in", &input, "--out", &out, "--retry-failed"]).ok();

    // A line whose answer failed may be mended before it is asked again; one that was answered may not be another.
    let two = |second: &str| [good("r1"), second.to_owned(), good("r7")].join("\n");
    let (input, out) = files("batch-mended");
    fs::write(&input, two(&bad[2])).unwrap();
    batch(&input, &out).fails(1);
    fs::write(&input, two(&good("r2"))).unwrap();
    let told = batch(&input, &out).fails(1).stderr;
    assert!(told.contains("line 2") && told.contains("--retry-failed asks it again"), "{told}");
    // Also where an earlier retry of it failed and was stopped.
    fs::write(format!("{out}.retry"), fs::read_to_string(&out).unwrap()).unwrap();
    boostr(&["batch", "--in", &input, "--out", &out, "--retry-failed"]).fails(1);
    boostr(&["batch", "--in", &input, "--out", &out, "--retry-failed"]).ok();
    let answers = lines(&out);
    assert_eq!((names(&answers).join(" "), failures(&answers)), ("r1 r2 r7".into(), 0));
    fs::write(&input, two(&good("r2")).replace("r7", "r8")).unwrap();
    let told = boostr(&["batch", "--in", &input, "--out", &out, "--retry-failed"]).fails(1).stderr;
    assert!(told.contains("line 3 is not the answer"), "{told}");

    // Of two lines of one name the second is refused.
    fs::write(&input, [good("a"), good("b"), String::new(), good("a")].join("\n")).unwrap();
    fs::remove_file(&out).unwrap();
    let ended = batch(&input, &out).fails(1);
    let told = "lines 1 and 3 have one `custom_id`, \"a\": the second is refused";
    assert!(ended.stderr.contains(told), "{}", ended.stderr);
    let answers = lines(&out);
    assert_eq!(
        (names(&answers), failures(&answers)),
        (["a", "b", "a"].map(String::from).to_vec(), 1)
    );
    let error = &answers[2]["response"]["body"]["error"]["message"];
    assert!(error.as_str().unwrap().contains("is that of line 1 too"), "{error}");
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
