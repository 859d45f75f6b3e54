//! What options read: regular files of a bounded length, and texts with or without a byte order mark.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::common::{boostr, boostr_with_stdin, folder, tiny};

/// Each option that takes a file, with what it stands among. `FILE` is the file, `DIR` a folder for outputs.
const OPTIONS: [&[&str]; 22] = [
    &["run", "-p", "x", "-n", "1", "--json-schema", "FILE"],
    &["run", "-p", "x", "-n", "1", "--grammar", "FILE"],
    &["run", "-n", "1", "-f", "FILE"],
    &["run", "-p", "x", "-n", "1", "--chat-template", "FILE"],
    &["run", "-p", "x", "-n", "1", "--tokenizer", "FILE"],
    &["run", "-p", "x", "-n", "1", "--state", "FILE"],
    &["tokenizer", "encode", "--tokenizer", "FILE", "x"],
    &["tokenizer", "count", "-f", "FILE"],
    &["serve", "--port", "0", "--api-key-file", "FILE"],
    &["train", "--out", "DIR/run", "--data", "DIR/data.txt", "--config", "FILE"],
    &["train", "--out", "DIR/run", "--data", "DIR/data.txt", "--tokenizer", "FILE"],
    &["train", "--out", "DIR/run", "--data", "FILE"],
    &["train", "--out", "DIR/run", "--data", "DIR/data.txt", "--valid", "FILE"],
    &["quantize", "TINY", "DIR/out.gguf", "--measure", "FILE"],
    &["eval", "--data", "FILE"],
    &["batch", "--in", "FILE", "--out", "DIR/out.jsonl"],
    &["batch", "--in", "DIR/data.txt", "--out", "FILE"],
    &["show", "FILE"],
    &["quantize", "TINY", "DIR/out.gguf", "--imatrix", "FILE"],
    &["imatrix", "TINY", "--text", "FILE", "--out", "DIR/out.gguf"],
    &["train", "--out", "DIR/run", "--data", "DIR/data.txt", "--model-config", "FILE"],
    &["state", "show", "FILE"],
];

#[cfg(unix)]
#[track_caller]
fn is_refused(name: &str, file: &Path) {
    let dir = folder(name);
    fs::write(dir.join("data.txt"), "a text to train on ".repeat(100)).unwrap();
    let (file, dir, tiny) = (file.to_str().unwrap(), dir.to_str().unwrap(), tiny());
    for option in OPTIONS {
        let words = option.iter().map(|word| match *word {
            "TINY" => tiny.clone(),
            "FILE" => file.to_owned(),
            word => word.replace("DIR", dir),
        });
        let words: Vec<String> = words.collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let run = boostr(&words);
        assert!(matches!(run.code, Some(1..=3)), "{option:?}: {:?} {}", run.code, run.stderr);
        assert!(run.stderr.contains(file), "{option:?}: {}", run.stderr);
        let known = ["regular file", "should end in .txt"];
        assert!(known.iter().any(|what| run.stderr.contains(what)), "{option:?}: {}", run.stderr);
    }
}

#[cfg(unix)]
#[test]
fn p_option_files_dev_zero_is_refused_by_every_option() {
    is_refused("files-zero", Path::new("/dev/zero"));
}

#[cfg(unix)]
fn fifo(name: &str) -> std::path::PathBuf {
    let path = folder(name).join("pipe.txt");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    path
}

#[cfg(unix)]
#[test]
fn p_batch_in_fifo_hangs_no_option_waits_for_a_writer() {
    is_refused("files-fifo-out", &fifo("files-fifo"));
}

#[test]
fn an_option_file_that_is_too_long_is_refused() {
    let path = folder("files-long").join("schema.json");
    fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
    let path = path.to_str().unwrap();
    for option in ["--json-schema", "--grammar"] {
        let run = boostr(&["run", "-p", "x", "-n", "1", option, path]).fails(1);
        assert!(run.stderr.contains("longer than 16777216 bytes"), "{}", run.stderr);
    }
}

/// A text in a file of this name, after a byte order mark, and the same without one.
fn marked(folder: &Path, name: &str, text: &str) -> [String; 2] {
    [("with", "\u{feff}"), ("without", "")].map(|(kind, mark)| {
        let path = folder.join(format!("{kind}-{name}"));
        fs::write(&path, format!("{mark}{text}")).unwrap();
        path.to_str().unwrap().to_owned()
    })
}

#[test]
fn p_batch_bom_before_the_first_line_is_no_part_of_it() {
    let folder = folder("files-bom-batch");
    let lines = "{\"prompt\": \"It is\", \"max_tokens\": 4, \"temperature\": 0}\n".repeat(2);
    let answers = marked(&folder, "q.jsonl", &lines).map(|input| {
        let out = input.replace("q.jsonl", "a.jsonl");
        boostr(&["batch", "--in", &input, "--out", &out]).ok();
        let out = fs::read_to_string(out).unwrap();
        let texts = out.lines().map(|line| {
            let line: Value = serde_json::from_str(line).unwrap();
            line["response"]["body"]["choices"][0]["text"].clone()
        });
        texts.collect::<Vec<_>>()
    });
    assert_eq!(answers[0].len(), 2);
    assert_eq!(answers[0], answers[1]);
}

#[test]
fn p_batch_bom_is_no_part_of_any_text_that_is_read() {
    let folder = folder("files-bom");
    let run = |more: &[&str]| {
        boostr(&[&["run", "-n", "6", "--temp", "0", "--json"], more].concat()).ok().json()["text"]
            .clone()
    };
    // A prompt in a file, and on stdin.
    let [with, without] =
        marked(&folder, "prompt.txt", "It is a truth\n").map(|path| run(&["-f", &path]));
    assert_eq!(with, without);
    let ids = |stdin: &str| boostr_with_stdin(&["tokenizer", "encode"], stdin).ok().stdout;
    assert_eq!(ids("\u{feff}It is"), ids("It is"));
    let text = |stdin: &str| boostr_with_stdin(&["tokenizer", "decode"], stdin).ok().stdout;
    assert_eq!(text("\u{feff}40 41"), text("40,41"));
    // A schema, and rules.
    let schema = json!({"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]});
    let schemas = marked(&folder, "schema.json", &schema.to_string());
    let [with, without] = schemas.map(|path| run(&["-p", "x", "--json-schema", &path]));
    assert_eq!(with, without);
    let rules = marked(&folder, "rules.lark", "start: \"abc\"\n");
    let [with, without] = rules.map(|path| run(&["-p", "x", "--grammar", &path]));
    assert_eq!((with.as_str(), without.as_str()), (Some("abc"), Some("abc")));
    // The files of a model.
    let model = folder.join("model");
    fs::create_dir(&model).unwrap();
    for file in fs::read_dir(tiny()).unwrap() {
        let (from, name) = {
            let file = file.unwrap();
            (file.path(), file.file_name())
        };
        let mut bytes = fs::read(&from).unwrap();
        if from.extension().is_some_and(|ending| ending == "json") {
            bytes.splice(..0, *b"\xef\xbb\xbf");
        }
        fs::write(model.join(name), bytes).unwrap();
    }
    let encoded = |model: &str| boostr(&["tokenizer", "encode", model, "It is"]).ok().stdout;
    let model = model.to_str().unwrap();
    assert_eq!(encoded(model), encoded(&tiny()));
    assert_eq!(run(&["-m", model, "-p", "It is"]), run(&["-m", &tiny(), "-p", "It is"]));
    boostr(&["verify", model]).ok();
    // A run's settings.
    let settings = marked(&folder, "run.toml", "[run]\nseed = 1\nnonsense = 2\n");
    let [with, without] = settings.map(|path| {
        let out = folder.join("run");
        let words = ["train", "--out", out.to_str().unwrap(), "--data", "x.txt", "--config", &path];
        boostr(&words).fails(2).stderr.replace(&path, "")
    });
    assert_eq!(with, without);
}

#[test]
fn p_batch_bom_before_the_first_key_is_no_part_of_it() {
    let keys = boostr_server::Keys::from_lines("\u{feff}# a comment\n");
    assert!(keys.is_empty());
}

#[test]
fn ids_with_nothing_between_two_commas_are_wrong_usage() {
    for ids in ["5,,3", "5,", ",5", "[5", ""] {
        let run = boostr(&["run", "--tokens", ids, "-n", "1"]).fails(2);
        assert!(run.stderr.contains("expected token ids like 5,17,3"), "{}", run.stderr);
    }
    boostr(&["run", "--tokens", "[5, 17 3]", "-n", "1"]).ok();
}
