//! The fuzzer's corpora of texts, once more: no panic, and none takes long.
//! `fuzz/README.md` says how the files are made.

#[path = "../../../../fuzz/src/adapter.rs"]
mod adapter;
#[path = "../../../../fuzz/src/calls.rs"]
mod calls;
#[path = "../../../../fuzz/src/config.rs"]
mod config;
#[path = "../../../../fuzz/src/grammar.rs"]
mod grammar;
#[path = "../../../../fuzz/src/safetensors.rs"]
mod safetensors;
#[path = "../../../../fuzz/src/session.rs"]
mod session;
#[path = "../../../../fuzz/src/template.rs"]
mod template;
#[path = "../../../../fuzz/src/tokenizer.rs"]
mod tokenizer;
#[path = "../../../../fuzz/src/torch.rs"]
mod torch;
#[path = "../../../../fuzz/src/training.rs"]
mod training;

use std::time::{Duration, Instant};

use crate::common as weight_files;

/// Checks each line, a text as JSON.
fn replay(lines: &str, check: fn(&str)) {
    let texts: Vec<String> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(texts.len() > 50, "{}", texts.len());
    for text in texts {
        let start = Instant::now();
        check(&text);
        assert!(start.elapsed() < Duration::from_secs(5), "{:?} for {text}", start.elapsed());
    }
}

#[test]
fn grammars_of_the_fuzzer_are_refused_or_followed() {
    replay(include_str!("../corpus/grammars.jsonl"), grammar::check);
}

#[test]
fn templates_of_the_fuzzer_are_refused_or_run() {
    replay(include_str!("../corpus/templates.jsonl"), template::check);
}

#[test]
fn tokenizers_of_the_fuzzer_are_refused_or_used() {
    replay(include_str!("../corpus/tokenizers.jsonl"), tokenizer::check);
}

#[test]
fn calls_of_the_fuzzer_are_the_same_however_they_are_cut() {
    replay(include_str!("../corpus/calls.jsonl"), calls::check);
}

#[test]
fn logs_of_the_fuzzer_are_refused_as_they_are_or_kept_whole() {
    replay(include_str!("../corpus/sessions.jsonl"), session::check);
}

#[test]
fn training_data_of_the_fuzzer_are_refused_or_read_once() {
    replay(include_str!("../corpus/training.jsonl"), training::check);
}

#[test]
fn adapters_of_the_fuzzer_are_refused_or_merged() {
    replay(include_str!("../corpus/adapters.jsonl"), adapter::check);
}

#[test]
fn configurations_of_the_fuzzer_are_refused_or_run() {
    replay(include_str!("../corpus/configs.jsonl"), config::check);
}

#[test]
fn safetensors_of_the_fuzzer_are_refused_or_written_again() {
    replay(include_str!("../corpus/safetensors.jsonl"), safetensors::check);
}

#[test]
fn torch_files_of_the_fuzzer_are_refused_or_used() {
    // A letter for each byte.
    let check = |text: &str| {
        torch::check(&text.chars().map(|c| u8::try_from(c).unwrap()).collect::<Vec<_>>());
    };
    replay(include_str!("../corpus/torch.jsonl"), check);
}
