//! Wrong model folders and wrong calls: each gets one clear error at once, never a panic. Ids in names:
//! `fixtures/CASES.md`.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use crate::common::{Folder, cpu, torch_zip};
use crate::tiny::{Tiny, edited, entry, fixture, message, states, with};
use boostr::Error;
use boostr::backend::Cpu;
use boostr::checkpoint::{Checkpoint, ConfigFile, Dtype};
use boostr::engine::{Event, Request, generate};
use boostr::load::{LanguageModel, OpenOptions};
use boostr::models::{Config, Logits, MAX_SIZE, Run, State};
use serde_json::{Value, json};

const NAME: &str = "mamba2-tiny";

fn open(folder: &Folder, allow_pickle: bool) -> Result<LanguageModel<Cpu>, Error> {
    let options = OpenOptions { allow_pickle, ..OpenOptions::default() };
    let mut took = Duration::MAX;
    // A machine that others use may be slow once; what takes long by itself does so each time.
    for _ in 0..3 {
        let start = Instant::now();
        let result = LanguageModel::open(folder.path(), &options, cpu());
        took = took.min(start.elapsed());
        if took < Duration::from_secs(1) {
            return result;
        }
    }
    panic!("took {took:?}");
}

/// The error of opening, which names the file that is wrong.
#[track_caller]
fn refusal(folder: &Folder, file: &str) -> String {
    let text = message(&open(folder, false).err().expect("the model was opened"));
    assert!(text.contains(file), "{file} is not named: {text}");
    text
}

/// A copy of the fixture.
fn copy() -> Folder {
    let folder = Folder::new();
    for name in [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        folder.write(name, fs::read(fixture(NAME).join(name)).unwrap());
    }
    folder
}

fn config() -> String {
    fs::read_to_string(fixture(NAME).join("config.json")).unwrap()
}

/// The refusal of the fixture with one field of config.json set to `value`, as JSON text.
#[track_caller]
fn refused_with(folder: &Folder, key: &str, value: &str) -> String {
    let mut fields: Value = serde_json::from_str(&config()).unwrap();
    fields[key] = json!("@@");
    folder.write("config.json", fields.to_string().replace("\"@@\"", value));
    refusal(folder, "config.json")
}

fn weights() -> Checkpoint {
    Checkpoint::open(&fixture(NAME), false).unwrap()
}

fn replace_weights(folder: &Folder, checkpoint: &Checkpoint) {
    let path = folder.path().join("model.safetensors");
    fs::remove_file(&path).unwrap();
    crate::tiny::save(&path, checkpoint);
}

#[test]
fn r_b8_missing_extra_and_misshapen_tensors_are_listed_five_of_each() {
    let folder = copy();
    let lost = |name: &str| name.contains("layers.1.mixer.");
    replace_weights(&folder, &edited(&weights(), |name, t| (!lost(name)).then(|| t.clone())));
    let text = refusal(&folder, folder.path().to_str().unwrap());
    assert!(text.contains("8 tensors missing: `backbone.layers.1.mixer.A_log` [8], "), "{text}");
    assert!(text.contains("conv1d.weight` [192, 1, 4]") && text.ends_with("and 3 more"), "{text}");

    let mut all: BTreeMap<String, _> =
        weights().iter().map(|(name, t)| (name.to_string(), t.clone())).collect();
    for i in 0..7 {
        all.insert(format!("extra\x1b{i}"), entry(Dtype::F32, &[2, 3], &[0.0; 6]));
    }
    replace_weights(&folder, &Checkpoint::from_entries("extra", all));
    let text = refusal(&folder, folder.path().to_str().unwrap());
    assert!(text.contains(r"7 tensors unexpected: `extra\u{1b}0` [2, 3]"), "{text}");
    assert!(text.ends_with("and 2 more") && !text.contains('\x1b'), "{text}");

    let flat = edited(&weights(), |_, t| {
        let count = t.shape.iter().product();
        Some(entry(Dtype::F32, &[count], &vec![0.0; count]))
    });
    replace_weights(&folder, &flat);
    let text = refusal(&folder, folder.path().to_str().unwrap());
    let shown = "`backbone.embeddings.weight` [32768], expected [512, 64]";
    assert!(text.contains("tensors wrong shape") && text.contains(shown), "{text}");
}

#[test]
fn r_b8_a_tensor_of_integers_is_refused_by_type() {
    for wrong in ["backbone.layers.0.mixer.D", "backbone.embeddings.weight"] {
        let folder = copy();
        let whole = edited(&weights(), |name, t| {
            let dtype = if name == wrong { Dtype::I32 } else { t.dtype };
            Some(boostr::checkpoint::TensorEntry { dtype, ..t.clone() })
        });
        replace_weights(&folder, &whole);
        let text = refusal(&folder, "model.safetensors");
        assert!(text.contains("I32"), "{text}");
    }
}

#[test]
fn r_b9_a_missing_configuration_says_where_to_get_one() {
    let folder = copy();
    fs::remove_file(folder.path().join("config.json")).unwrap();
    let text = refusal(&folder, folder.path().to_str().unwrap());
    assert!(text.contains("no config.json") && text.contains("take it from"), "{text}");
}

#[test]
fn r_b9_an_unknown_model_type_lists_what_is_supported() {
    let folder = copy();
    for value in [r#""gpt2""#, r#""mamba""#, r#""\u001b[31m""#] {
        let text = refused_with(&folder, "model_type", value);
        assert!(text.contains("supported: mamba2") && !text.contains('\x1b'), "{text}");
    }
    let text = refused_with(&folder, "model_type", "null");
    assert!(text.contains("`model_type`") && text.contains("supported: mamba2"), "{text}");
    let text = refused_with(&folder, "model_type", "7");
    assert!(text.contains("expected a string, found 7"), "{text}");
}

#[test]
fn r_b9_impossible_sizes_are_refused_by_field_and_value() {
    let folder = copy();
    // With it the ids of config.json do not count.
    fs::remove_file(folder.path().join("generation_config.json")).unwrap();
    for (key, value) in [
        ("num_hidden_layers", "1000000000"),
        ("num_hidden_layers", "0"),
        ("hidden_size", "0"),
        ("hidden_size", "-64"),
        ("hidden_size", "64.0"),
        ("hidden_size", "64.5"),
        ("hidden_size", "\"64\""),
        ("hidden_size", "1e3"),
        ("hidden_size", "18446744073709551616"),
        ("hidden_size", "[64]"),
        ("num_heads", "4294967297"),
        ("head_dim", "0"),
        ("state_size", "-1"),
        ("n_groups", "0"),
        ("n_groups", "3"),
        ("conv_kernel", "0"),
        ("conv_kernel", "4294967296"),
        ("vocab_size", "0"),
        ("vocab_size", "true"),
        ("layer_norm_epsilon", "NaN"),
        ("layer_norm_epsilon", "Infinity"),
        ("layer_norm_epsilon", "-1e-5"),
        ("layer_norm_epsilon", "\"1e-5\""),
        ("time_step_limit", "[0.1, 0.05]"),
        ("time_step_limit", "[NaN, 1.0]"),
        ("time_step_limit", "[0.0, NaN]"),
        ("time_step_limit", "[0.0]"),
        ("time_step_limit", "0.5"),
        ("tie_word_embeddings", "\"false\""),
        ("use_bias", "1"),
        ("hidden_act", "\"gelu\""),
        ("eos_token_id", "-1"),
        ("eos_token_id", "[2, \"x\"]"),
    ] {
        let text = refused_with(&folder, key, value);
        assert!(text.contains(&format!("field `{key}`")), "{key} {value}: {text}");
        assert!(text.contains("expected") || text.contains("not divide"), "{key} {value}: {text}");
    }
    let text = refused_with(&folder, "n_groups", "3");
    assert!(text.contains("3 groups do not divide 8 heads"), "{text}");
}

#[test]
fn r_b9_giant_sizes_fail_before_any_memory_is_taken() {
    let folder = copy();
    for (key, value) in [
        ("vocab_size", "16777216"),
        ("state_size", "16777216"),
        ("conv_kernel", "16777216"),
        ("n_groups", "8"),
        ("num_hidden_layers", "10000"),
    ] {
        let mut fields: Value = serde_json::from_str(&config()).unwrap();
        fields[key] = value.parse().unwrap();
        folder.write("config.json", fields.to_string());
        let text = refusal(&folder, folder.path().to_str().unwrap());
        let known = ["wrong shape", "missing", "make a state of"];
        assert!(known.iter().any(|reason| text.contains(reason)), "{key}: {text}");
    }
    let giant = r#"{"model_type": "mamba2", "hidden_size": 16777216, "expand": 16777216,
        "num_heads": 16777216, "head_dim": 16777216, "state_size": 16777216, "n_groups": 16777216,
        "num_hidden_layers": 10000, "vocab_size": 16777216, "conv_kernel": 16777216}"#;
    folder.write("config.json", giant);
    refusal(&folder, folder.path().to_str().unwrap());
}

#[test]
fn r_b9_a_configuration_that_is_no_object_is_refused() {
    let folder = copy();
    let deep = "[".repeat(200_000);
    for text in ["", "{", "[]", "null", "\u{feff}{}", "<html>", &deep] {
        folder.write("config.json", text);
        refusal(&folder, "config.json");
    }
    folder.write("config.json", [0xff, 0xfe, b'{', b'}']);
    assert!(refusal(&folder, "config.json").contains("UTF-8"));
    folder.write("config.json", vec![b' '; (16 << 20) + 1]);
    assert!(refusal(&folder, "config.json").contains("longer than"));
    fs::remove_file(folder.path().join("config.json")).unwrap();
    fs::create_dir(folder.path().join("config.json")).unwrap();
    refusal(&folder, "config.json");
}

#[test]
fn r_b10_tied_embeddings_without_a_head_are_valid() {
    assert!(weights().get("lm_head.weight").is_none());
    assert!(open(&copy(), false).is_ok());
}

#[test]
fn a_configuration_of_the_largest_sizes_is_listed_in_a_moment() {
    let size = MAX_SIZE;
    let text = format!(
        r#"{{"model_type": "llama", "hidden_size": {size}, "num_attention_heads": 2, "num_hidden_layers": 10000,
            "intermediate_size": {size}, "vocab_size": {size}}}"#
    );
    let start = Instant::now();
    let config = Config::read(&ConfigFile::parse("config.json", &text).unwrap()).unwrap();
    let layout = config.family().hf_layout(size, true).unwrap();
    assert_eq!(layout.tensors().iter().count(), 9 * 10_000 + 3);
    // Half an hour, where the positions of each layer's heads are computed.
    assert!(start.elapsed() < Duration::from_mins(1), "{:?}", start.elapsed());
}

#[test]
fn r_b9_bad_companions_of_the_configuration_are_named() {
    for (file, text) in [
        ("generation_config.json", r#"{"eos_token_id": -2}"#),
        ("generation_config.json", r#"{"top_p": NaN}"#),
        ("generation_config.json", "{"),
        ("tokenizer_config.json", r#"{"bos_token": 3}"#),
        ("tokenizer_config.json", "[]"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", ""),
    ] {
        let folder = copy();
        folder.write(file, text);
        refusal(&folder, file);
    }
}

#[cfg(unix)]
#[test]
fn r_b11_a_link_to_nothing_is_an_incomplete_download_whatever_the_file() {
    use std::os::unix::fs::symlink;
    for file in [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        let folder = copy();
        let path = folder.path().join(file);
        fs::remove_file(&path).unwrap();
        symlink("../../blobs/0123abcd", &path).unwrap();
        let text = refusal(&folder, file);
        assert!(text.contains("incomplete download"), "{text}");
    }
}

#[cfg(unix)]
#[test]
fn r_b13_a_loop_of_links_is_an_error_of_the_system() {
    use std::os::unix::fs::symlink;
    for file in ["config.json", "generation_config.json", "tokenizer.json"] {
        let folder = copy();
        let path = folder.path().join(file);
        fs::remove_file(&path).unwrap();
        symlink(file, &path).unwrap();
        let error = open(&folder, false).err().unwrap();
        assert!(matches!(&error, Error::Io { path: at, .. } if *at == path), "{error}");
    }
}

#[test]
fn r_b14_a_pickle_is_refused_with_advice_and_never_run() {
    let folder = copy();
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let shell = b"\x80\x02cposix\nsystem\nX\x17\x00\x00\x00touch boostr-was-executed\x85R.";
    folder.write("pytorch_model.bin", torch_zip(shell, &[]));
    let text = refusal(&folder, "pytorch_model.bin");
    assert!(text.contains("Convert it") && text.contains("--allow-pickle"), "{text}");
    let text = message(&open(&folder, true).err().unwrap());
    assert!(text.contains("`posix.system`") && text.contains("nothing was executed"), "{text}");
    assert!(!std::path::Path::new("boostr-was-executed").exists());
}

#[test]
fn r_c1_a_merge_longer_than_any_token_is_refused_on_opening() {
    let folder = copy();
    let path = folder.path().join("tokenizer.json");
    let valid: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    for merge in [format!("{} b", "a".repeat(1000)), "a \u{1f999}".into()] {
        let mut file = valid.clone();
        file["model"]["merges"] = json!([merge]);
        folder.write("tokenizer.json", file.to_string());
        assert!(refusal(&folder, "tokenizer.json").contains("tokenizer: "));
    }
    let mut file = valid;
    file["model"]["continuing_subword_prefix"] = json!("#".repeat(50));
    folder.write("tokenizer.json", file.to_string());
    refusal(&folder, "tokenizer.json");
}

fn generated(tiny: &Tiny, prompt: &[u32], state: &mut State<Cpu>) -> (Result<(), String>, usize) {
    let request = Request { max_tokens: 5, seen: Some(0), ..Request::new(prompt.to_vec(), 80) };
    let mut count = 0;
    let result = generate(&tiny.model, state, request, &mut |event| {
        count += usize::from(matches!(event, Event::Token { .. }));
        ControlFlow::Continue(())
    });
    (result.map(|_| ()).map_err(|e| message(&e)), count)
}

#[test]
fn unknown_ids_and_empty_prompts_are_refused_and_leave_the_state() {
    let tiny = Tiny::m("");
    let mut state = tiny.state();
    tiny.run(&[1, 2, 3], &[3], &mut state);
    let before = states(&state);
    for id in [80, u32::MAX] {
        let mut other = tiny.state();
        let mut runs =
            [Run { tokens: &[4], state: &mut other }, Run { tokens: &[5, id], state: &mut state }];
        let error = tiny.model.forward(&mut runs, Logits::Last).unwrap_err();
        let text = message(&error);
        assert!(text.contains(&format!("token id {id} is not below")), "{text}");
        assert_eq!(other.position(), 0);
        let (result, count) = generated(&tiny, &[1, id], &mut state);
        assert!(result.unwrap_err().contains(&id.to_string()));
        assert_eq!(count, 0);
    }
    assert!(generated(&tiny, &[], &mut state).0.unwrap_err().contains("at least one token"));
    let mut run = [Run { tokens: &[], state: &mut state }];
    assert!(matches!(
        tiny.model.forward(&mut run, Logits::Last),
        Err(Error::Argument { name: "tokens", .. })
    ));
    // Without logits there is nothing wrong with no tokens, nor with no runs.
    let all = tiny.model.forward(&mut run, Logits::All).unwrap();
    assert_eq!(all.shape(), [0, 80]);
    assert_eq!(tiny.model.forward(&mut [], Logits::Last).unwrap().shape(), [0, 80]);
    assert_eq!((states(&state), state.position()), (before, 3));
}

#[test]
fn the_state_of_another_model_is_refused() {
    let tiny = Tiny::m("");
    for changes in [
        r#", "num_hidden_layers": 3"#,
        r#", "state_size": 8"#,
        r#", "num_heads": 8, "head_dim": 16"#,
        r#", "conv_kernel": 3"#,
    ] {
        let mut foreign = Tiny::m(changes).state();
        let mut own = tiny.state();
        let mut runs =
            [Run { tokens: &[1], state: &mut own }, Run { tokens: &[1], state: &mut foreign }];
        let error = tiny.model.forward(&mut runs, Logits::Last).unwrap_err();
        assert!(matches!(&error, Error::Shape { name, .. } if name.contains("state")), "{error}");
        assert_eq!((own.position(), foreign.position()), (0, 0));
    }
}

#[test]
fn weights_of_nan_stop_generation_with_an_error_not_a_token() {
    let tiny = Tiny::m("");
    for (tensor, bad) in [
        ("norm_f.weight", f32::NAN),
        ("layers.0.mixer.D", f32::NAN),
        ("layers.1.mixer.dt_bias", f32::NAN),
        ("layers.1.mixer.conv1d.bias", f32::INFINITY),
        ("layers.0.mixer.out_proj.weight", f32::INFINITY),
        ("embeddings.weight", f32::NAN),
    ] {
        let bad = Tiny::new(tiny.config.clone(), with(&tiny.checkpoint, tensor, |_| bad));
        let (result, count) = generated(&bad, &[1, 2, 3], &mut bad.state());
        let text = result.expect_err(tensor);
        assert!(text.contains("logits") && count == 0, "{tensor}: {text}");
    }
}

#[test]
fn r_b9_a_state_beyond_all_memory_is_refused_before_it_is_made() {
    let json = r#"{"model_type": "mamba2", "hidden_size": 65536, "num_heads": 2048, "head_dim": 64,
        "state_size": 131072, "n_groups": 1, "num_hidden_layers": 4, "vocab_size": 32}"#;
    let file = ConfigFile::parse("config.json", json).unwrap();
    let text = Config::read(&file).unwrap_err().to_string();
    assert!(text.starts_with("`config.json`: field `state_size`: "), "{text}");
    assert!(text.contains("state of") && text.contains("bytes"), "{text}");
}
