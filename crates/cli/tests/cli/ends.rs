//! Where generation ends: at any token that any of a model's files names as an end.

use std::fs;
use std::path::{Path, PathBuf};

use boostr::checkpoint::gguf::Metadata;
use boostr::checkpoint::{Checkpoint, Dtype, gguf};
use boostr::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::common::*;

/// Ids that the model's greedy continuation does not have.
const OTHERS: [u32; 3] = [511, 510, 509];

/// The greedy continuation of a model that was not trained, and how it ended.
fn run(model: &Path) -> Value {
    let line = ["run", model.to_str().unwrap(), "--tokens", "5,17,3", "-n", "20", "--temp", "0"];
    boostr(&[&line[..], &["--json"]].concat()).ok().json()
}

/// A copy of the tiny model whose files name no end.
fn without_ends(name: &str) -> PathBuf {
    let model = copy_of_tiny(name);
    fs::remove_file(model.join("generation_config.json")).unwrap();
    set(&model, "config.json", "eos_token_id", Value::Null);
    model
}

/// Sets a field of a JSON file, which may be new.
fn set(model: &Path, file: &str, field: &str, value: Value) {
    let path = model.join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|_| "{}".to_owned());
    let mut json: Value = serde_json::from_str(&text).unwrap();
    json[field] = value;
    fs::write(path, json.to_string()).unwrap();
}

/// The continuation without an end, the place of a token in it that is new there, and that token.
fn free(model: &Path) -> (Vec<u64>, usize, u64) {
    let json = run(model);
    assert_eq!(json["finish_reason"], "length");
    let all = ids(&json["ids"]);
    assert!(all.len() == 20 && OTHERS.iter().all(|&id| !all.contains(&id.into())), "{all:?}");
    let at = (3..20).find(|&at| !all[..at].contains(&all[at])).unwrap();
    (all.clone(), at, all[at])
}

#[track_caller]
fn ends_before(model: &Path, free: &[u64], at: usize) {
    let json = run(model);
    assert_eq!(json["finish_reason"], "eos", "{}", model.display());
    assert_eq!(ids(&json["ids"]), free[..at], "{}", model.display());
}

#[test]
fn generation_ends_at_any_end_that_a_folder_names() {
    let model = without_ends("ends-folder");
    let (all, at, end) = free(&model);
    let token = Tokenizer::from_file(model.join("tokenizer.json")).unwrap().token(end as u32);
    let [first, .., last] = OTHERS;
    for (file, field, value) in [
        ("generation_config.json", "eos_token_id", json!(end)),
        ("generation_config.json", "eos_token_id", json!([first, end, last])),
        ("config.json", "eos_token_id", json!(end)),
        ("config.json", "eos_token_id", json!([first, end, last])),
        ("config.json", "eos_token_id", json!([OTHERS[0], OTHERS[1], OTHERS[2], end])),
        ("tokenizer_config.json", "eos_token", json!(token)),
        ("tokenizer_config.json", "eos_token", json!({"content": token})),
    ] {
        let model = without_ends("ends-folder-of-one");
        set(&model, file, field, value);
        ends_before(&model, &all, at);
        // The tokenizer's end counts beside those of a list.
        if file == "tokenizer_config.json" {
            set(&model, "generation_config.json", "eos_token_id", json!(OTHERS));
            ends_before(&model, &all, at);
        }
        // A converted model ends where the folder does, and so does one that is converted back.
        let (there, back) = (model.join("there.gguf"), model.join("back"));
        for (from, to) in [(&model, &there), (&there, &back)] {
            boostr(&["convert", from.to_str().unwrap(), to.to_str().unwrap()]).ok();
            ends_before(to, &all, at);
        }
    }
}

#[test]
fn the_ends_of_generation_config_json_replace_those_of_config_json() {
    let model = without_ends("ends-replaced");
    let (all, ..) = free(&model);
    set(&model, "config.json", "eos_token_id", json!(all[0]));
    set(&model, "generation_config.json", "eos_token_id", json!(OTHERS));
    assert_eq!(ids(&run(&model)["ids"]), all);
}

/// Writes a GGUF file again with other metadata.
fn rewritten(from: &Path, to: &Path, edit: impl FnOnce(&mut Metadata)) {
    let file = Checkpoint::open(from, false).unwrap();
    let mut metadata = file.gguf().unwrap().clone();
    edit(&mut metadata);
    let entries: Vec<_> = file.iter().collect();
    let tensors: Vec<(&str, Dtype, &[usize])> =
        entries.iter().map(|(name, t)| (*name, t.dtype, t.shape.as_slice())).collect();
    gguf::write(to, &metadata, &tensors, |index| Ok(entries[index].1.data.clone())).unwrap();
}

#[test]
fn generation_ends_at_any_end_that_a_gguf_file_names() {
    let model = without_ends("ends-gguf");
    let plain = model.join("plain.gguf");
    boostr(&["convert", model.to_str().unwrap(), plain.to_str().unwrap()]).ok();
    let (all, at, end) = free(&plain);
    let keys = ["eos", "eot", "eom"].map(|name| format!("tokenizer.ggml.{name}_token_id"));
    let file = model.join("ends.gguf");
    for one in &keys {
        // All of them are there, and only one matters.
        rewritten(&plain, &file, |metadata| {
            for (key, other) in keys.iter().zip(OTHERS) {
                metadata.set(key.as_str(), if key == one { end as u32 } else { other });
            }
        });
        ends_before(&file, &all, at);
    }
    // A token that is known by its name.
    rewritten(&plain, &file, |metadata| {
        let mut tokens: Vec<String> = metadata
            .strings("tokenizer.ggml.tokens")
            .unwrap()
            .unwrap()
            .into_iter()
            .map(str::to_owned)
            .collect();
        let other = tokens.iter().position(|token| token == "<|im_end|>");
        assert_eq!(other, None);
        tokens[end as usize] = "<|im_end|>".to_owned();
        metadata.set("tokenizer.ggml.tokens", tokens.as_slice());
        // Merges of a token that is gone.
        metadata.set("tokenizer.ggml.merges", [] as [&str; 0]);
        metadata.retain(|key| key != "tokenizer.huggingface.json");
    });
    ends_before(&file, &all, at);
}
