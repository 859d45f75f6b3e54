//! `boostr run` with a model that has a chat template.

use std::fs;
use std::path::{Path, PathBuf};

use boostr::tokenizer::{Part, Tokenizer};

use crate::common::*;

const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}\
    {% if m.role == 'system' and m.content == 'no' %}{{ raise_exception('no such system') }}{% endif %}\
    {{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ you or 'bot' }}:{% endif %}";

/// A copy of the tiny model with a chat template, which names the tokenizer's tokens.
fn with_template(name: &str, template: &str) -> PathBuf {
    let folder = copy_of_tiny(name);
    let config = r#"{"bos_token": "<s>", "eos_token": {"content": "</s>"}}"#;
    fs::write(folder.join("tokenizer_config.json"), config).unwrap();
    fs::write(folder.join("chat_template.jinja"), template).unwrap();
    folder
}

fn run(model: &Path, more: &[&str]) -> Ended {
    let model = model.to_str().unwrap();
    boostr(&[&["run", model, "-n", "12", "--temp", "0", "--json"], more].concat())
}

/// What the model says after the ids of these parts.
fn after(model: &Path, parts: &[Part]) -> serde_json::Value {
    let tokenizer = Tokenizer::from_file(model.join("tokenizer.json")).unwrap();
    let ids: Vec<String> =
        tokenizer.encode_parts(parts, false).unwrap().iter().map(u32::to_string).collect();
    let json = run(model, &["--tokens", &ids.join(",")]).ok().json();
    assert_eq!((&json["prompt_tokens"], &json["chat"]), (&ids.len().into(), &false.into()));
    json["ids"].clone()
}

#[test]
fn a_prompt_is_a_message_and_starts_with_one_bos() {
    let model = with_template("chat-message", TEMPLATE);
    let json = run(&model, &["-p", "Hi"]).ok().json();
    assert_eq!(json["chat"], true);
    let parts = [Part::Control("<s>user: "), Part::Text("Hi"), Part::Control("</s>bot:")];
    assert_eq!(json["ids"], after(&model, &parts));
    // From a file or stdin it is the same.
    let path = model.to_str().unwrap();
    let line = ["run", path, "-n", "12", "--temp", "0", "--json"];
    assert_eq!(boostr_with_stdin(&line, "Hi\n").ok().json()["ids"], json["ids"]);
}

#[test]
fn raw_text_is_completed_as_without_a_template() {
    let model = with_template("chat-raw", TEMPLATE);
    let raw = run(&model, &["-p", "Hi", "--raw"]).ok().json();
    let plain = run(Path::new(&tiny()), &["-p", "Hi"]).ok().json();
    assert_eq!((&raw["ids"], &raw["chat"]), (&plain["ids"], &false.into()));
    assert_eq!(raw["prompt_tokens"], plain["prompt_tokens"]);
}

#[test]
fn a_system_message_and_variables_go_into_the_template() {
    let model = with_template("chat-system", TEMPLATE);
    let json =
        run(&model, &["-p", "Hi", "--system", "Be", "--chat-template-kwargs", r#"{"you": "I"}"#])
            .ok()
            .json();
    let parts = [Part::Control("<s>system: Be</s>user: Hi</s>I:")];
    assert_eq!(json["ids"], after(&model, &parts));
}

#[test]
fn control_tokens_in_a_prompt_are_text() {
    let model = with_template("chat-control", TEMPLATE);
    let json = run(&model, &["-p", "a</s>b"]).ok().json();
    let parts = [
        Part::Control("<s>user: a"),
        Part::Text("</s>"),
        Part::Control("b"),
        Part::Control("</s>bot:"),
    ];
    assert_eq!(json["ids"], after(&model, &parts));
}

#[test]
fn a_template_in_a_file_is_used_in_place_of_the_models() {
    let model = with_template("chat-file", "{{ raise_exception('not this one') }}");
    let file = model.join("other.jinja");
    fs::write(&file, "{{ bos_token }}{{ messages[-1].content }}").unwrap();
    let json = run(&model, &["-p", "Hi", "--chat-template", file.to_str().unwrap()]).ok().json();
    assert_eq!(json["ids"], after(&model, &[Part::Control("<s>Hi")]));
    let json = run(Path::new(&tiny()), &["-p", "Hi", "--chat-template", file.to_str().unwrap()]);
    assert_eq!(json.ok().json()["chat"], true);
}

#[test]
fn a_converted_model_keeps_its_template() {
    let model = with_template("chat-gguf", TEMPLATE);
    let file = model.join("model.gguf");
    boostr(&["convert", model.to_str().unwrap(), file.to_str().unwrap()]).ok();
    let expected = run(&model, &["-p", "Hi"]).ok().json();
    let json = run(&file, &["-p", "Hi"]).ok().json();
    assert_eq!((&json["ids"], &json["chat"]), (&expected["ids"], &true.into()));
}

#[test]
fn what_the_template_refuses_is_wrong_usage_in_its_words() {
    let model = with_template("chat-refused", TEMPLATE);
    let run = run(&model, &["-p", "Hi", "--system", "no"]).fails(2);
    assert!(run.stderr.contains("no such system"), "{}", run.stderr);
}

#[test]
fn messages_without_a_template_are_wrong_usage() {
    for more in [&["--system", "x"], &["--chat-template-kwargs", "{}"]] {
        let run = run(Path::new(&tiny()), &[&["-p", "Hi"], &more[..]].concat()).fails(2);
        assert!(run.stderr.contains("--chat-template FILE"), "{}", run.stderr);
    }
    let model = with_template("chat-usage", TEMPLATE);
    for more in [
        &["-p", "Hi", "--chat-template-kwargs", "[1]"][..],
        &["-p", "Hi", "--raw", "--system", "x"],
        &["--tokens", "5", "--system", "x"],
    ] {
        run(&model, more).fails(2);
    }
}

#[test]
fn a_broken_template_is_a_bad_model_that_still_completes_raw_text() {
    let model = with_template("chat-broken", "one\n{% if %}");
    let broken = run(&model, &["-p", "Hi"]).fails(3);
    for words in ["chat_template.jinja", "line 2", "--raw"] {
        assert!(broken.stderr.contains(words), "{words}: {}", broken.stderr);
    }
    run(&model, &["-p", "Hi", "--raw"]).ok();
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    fs::write(model.join("chat_template.jinja"), endless).unwrap();
    assert!(run(&model, &["-p", "Hi"]).fails(3).stderr.contains("steps"));
    run(&model, &["-p", "Hi", "--chat-template", "/no/such/file"]).fails(1);
}
