//! `boostr tokenizer` on every kind of model, and what is said about odd files of text.

use std::fs;
use std::path::{Path, PathBuf};

use boostr::state_file::SavedState;

use crate::common::{boostr, copy_of_tiny, demo, folder, root, tiny};

const TEXT: &str = "it's 12345 don't we'll";

/// A llama of one layer as GGUF, with (`named`) and without (`model`) the name of its rules for words.
fn gguf(name: &str) -> PathBuf {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/people/gguf-without-pre");
    data.join(format!("{name}.gguf"))
}

/// The ids that `boostr run` gives a text.
fn ids_of_run(model: &str, text: &str) -> String {
    let state = folder("tokenizer-ids").join("s.state");
    let state = state.to_str().unwrap();
    boostr(&["run", model, "--raw", "-p", text, "-n", "0", "--save-state", state]).ok();
    let saved = SavedState::from_bytes("s.state", fs::read(state).unwrap()).unwrap();
    let words: Vec<String> = saved.ids().unwrap().iter().map(u32::to_string).collect();
    words.join(" ") + "\n"
}

#[test]
fn p_gguf_tokenizer_command_takes_every_model_that_run_takes() {
    let tiny = tiny();
    let file = gguf("named");
    let file = file.to_str().unwrap();
    let fixture = root().join("fixtures/gguf/mamba2-tiny-f32.gguf");
    let weights = format!("{tiny}/model.safetensors");
    for model in [&*tiny, &weights, &demo(), file, fixture.to_str().unwrap()] {
        let encoded = boostr(&["tokenizer", "encode", model, TEXT]).ok().stdout;
        assert_eq!(encoded, ids_of_run(model, TEXT), "{model}");
        let count = boostr(&["tokenizer", "count", "-m", model, "-p", TEXT]).ok().stdout;
        assert_eq!(count.trim().parse(), Ok(encoded.split_whitespace().count()));
        let decoded = boostr(&["tokenizer", "decode", model, encoded.trim()]).ok().stdout;
        assert!(decoded.contains(TEXT), "{decoded}");
    }
    // A folder with one GGUF file.
    let alone = folder("tokenizer-gguf-folder");
    fs::copy(file, alone.join("model.gguf")).unwrap();
    let encoded = boostr(&["tokenizer", "encode", alone.to_str().unwrap(), TEXT]).ok().stdout;
    assert_eq!(encoded, boostr(&["tokenizer", "encode", file, TEXT]).ok().stdout);
    let help = boostr(&["tokenizer", "encode", "--help"]).ok().stdout;
    assert!(help.contains("Any model that `boostr run` takes"), "{help}");
}

#[test]
fn p_tokenizer_command_gguf_reads_the_tokenizer_in_the_file() {
    let beside = folder("tokenizer-beside");
    let model = beside.join("model.gguf");
    fs::copy(gguf("named"), &model).unwrap();
    // That of another model.
    fs::copy(Path::new(&demo()).join("tokenizer.json"), beside.join("tokenizer.json")).unwrap();
    let (model, own) = (model.to_str().unwrap(), gguf("named"));
    let encoded = boostr(&["tokenizer", "encode", model, "Hello"]).ok().stdout;
    assert_eq!(
        encoded,
        boostr(&["tokenizer", "encode", own.to_str().unwrap(), "Hello"]).ok().stdout
    );
    let named = beside.join("tokenizer.json");
    let named = ["tokenizer", "encode", model, "Hello", "--tokenizer", named.to_str().unwrap()];
    assert_eq!(boostr(&named).code, Some(2), "two texts");
    let named = beside.join("tokenizer.json");
    let named =
        ["tokenizer", "encode", "-m", model, "Hello", "--tokenizer", named.to_str().unwrap()];
    let other = boostr(&["tokenizer", "encode", &demo(), "Hello"]).ok().stdout;
    assert_eq!(boostr(&named).ok().stdout, other);
}

#[test]
fn p_gguf_without_pre_warns_in_each_command() {
    let [model, named] = ["model", "named"].map(|name| gguf(name).to_str().unwrap().to_owned());
    let warning = "`tokenizer.ggml.pre` is missing";
    let run = |model: &str| boostr(&["run", model, "--raw", "-p", TEXT, "-n", "0"]).ok().stderr;
    let show = |model: &str| boostr(&["show", model]).ok().stderr;
    let verify = |model: &str| boostr(&["verify", model]).ok().stdout;
    let count = |model: &str| boostr(&["tokenizer", "count", model, TEXT]).ok().stderr;
    for said in [run(&model), show(&model), verify(&model), count(&model)] {
        assert_eq!(said.matches(warning).count(), 1, "{said}");
    }
    for said in [run(&named), show(&named), verify(&named), count(&named)] {
        assert!(!said.contains("tokenizer.ggml.pre"), "{said}");
    }
    let shown = boostr(&["show", &model, "--json"]).ok().json();
    assert!(shown["warnings"][0].as_str().unwrap().contains(warning), "{shown}");
}

#[test]
fn p_eos_beyond_vocabulary_is_said_by_verify_and_run() {
    let model = copy_of_tiny("tokenizer-eos");
    fs::write(model.join("generation_config.json"), r#"{"eos_token_id": 99999}"#).unwrap();
    let model = model.to_str().unwrap();
    let says = "generation_config.json`: `eos_token_id`: 99999 never ends an answer";
    let verified = boostr(&["verify", model]).ok().stdout;
    assert!(verified.contains("warn") && verified.contains(says), "{verified}");
    let run = boostr(&["run", model, "--raw", "-p", "a", "-n", "1"]).ok().stderr;
    assert!(run.contains(says), "{run}");
}
