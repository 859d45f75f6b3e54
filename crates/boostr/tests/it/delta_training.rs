//! A small Qwen3.5 learns a text, whole and by adapters, and what it learnt stands in its files.

use std::fs;
use std::ops::ControlFlow::Continue;
use std::path::Path;

use boostr::backend::Cpu;
use boostr::convert::{Options, convert};
use boostr::load::{LanguageModel, OpenOptions};
use boostr::models::{Logits, Model, Run};
use boostr::ops::to_vec;
use boostr::train::data::Batch;
use boostr::train::{AdamWConfig, LoraConfig, TrainableModel, Trainer};
use serde_json::{Value, json};

use crate::common::{Folder, cpu};
use crate::tiny::fixture;
use crate::training::{constant, piece};

/// What is learnt first, and what is learnt after it.
const FIRST: &str =
    "The state of a sequence is a value: copy it, keep it, change it, go back to it.";
const SECOND: &str =
    "The value of a state is a sequence: go back to it, change it, keep it, copy it.";

/// A model of two layers, one of each kind, as new.
fn new_model() -> TrainableModel {
    let source = fixture("qwen3_5-tiny");
    let text = fs::read_to_string(source.join("config.json")).unwrap();
    let mut config = serde_json::from_str::<Value>(&text).unwrap()["text_config"].take();
    let changes = json!({
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    });
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    let tokenizer = fs::read_to_string(source.join("tokenizer.json")).unwrap();
    TrainableModel::new(&config, tokenizer, 11).unwrap()
}

fn ids(model: &TrainableModel, text: &str) -> Vec<u32> {
    model.tokenizer().unwrap().encode(text, false).unwrap()
}

/// Trains on one text for as many steps; the first loss and the last.
fn learn(model: TrainableModel, text: &str, steps: usize, lr: f64) -> (TrainableModel, [f64; 2]) {
    let batch = Batch { pieces: vec![piece(&ids(&model, text), 0)] };
    let mut trainer =
        Trainer::new(model, AdamWConfig::default(), constant(lr), 1 << 20, false).unwrap();
    let losses: Vec<f64> = (0..steps).map(|_| trainer.step(&batch).unwrap().loss).collect();
    (trainer.into_model(), [losses[0], losses[steps - 1]])
}

/// How a text goes on whose first ids are given, token by token.
fn goes_on(model: &Model<Cpu>, start: &[u32], count: usize) -> Vec<u32> {
    let mut state = model.new_state().unwrap();
    let mut ids = start.to_vec();
    let mut next = start.to_vec();
    for _ in 0..count {
        let mut run = [Run { tokens: &next, state: &mut state }];
        let logits = to_vec(&model.forward(&mut run, Logits::Last).unwrap()).unwrap();
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
        next = vec![best as u32];
        ids.extend(&next);
    }
    ids
}

/// Whether a model says a text whose first four ids it is given.
#[track_caller]
fn says(model: &Model<Cpu>, want: &[u32], what: &str) {
    assert_eq!(goes_on(model, &want[..4], want.len() - 4), want, "{what}");
}

fn opened(path: &Path, adapter: Option<&Path>) -> LanguageModel<Cpu> {
    let options = OpenOptions { adapter: adapter.map(Path::to_path_buf), ..OpenOptions::default() };
    LanguageModel::open(path, &options, cpu()).unwrap()
}

#[test]
fn a_qwen3_5_of_two_layers_learns_a_text_by_heart_and_another_by_adapters() {
    let folder = Folder::new();
    let [base, adapters, file] =
        ["base", "adapters", "base.gguf"].map(|name| folder.path().join(name));
    let (model, [first, last]) = learn(new_model(), FIRST, 60, 5e-3);
    assert!(first > 5.0 && last < 0.05, "{first} {last}");
    let (told, other) = (ids(&model, FIRST), ids(&model, SECOND));
    model.write_new(&base).unwrap();
    convert(&base, &file, &Options::default(), &mut |_, _| Continue(())).unwrap();
    says(&opened(&base, None).model, &told, "folder");
    says(&opened(&file, None).model, &told, "GGUF file");

    let mut model = TrainableModel::open(&base, &OpenOptions::default()).unwrap();
    let targets = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"];
    let more = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    let targets = targets.iter().chain(&more).map(|name| (*name).to_owned()).collect();
    let config = LoraConfig { r: 16, alpha: 32.0, targets };
    model.add_adapters(&config, 5).unwrap();
    let (model, [first, last]) = learn(model, SECOND, 150, 1e-2);
    assert!(first > 2.0 && last < 0.05, "{first} {last}");
    assert!(model.parameters().keys().all(|name| name.contains(".lora_")));
    fs::create_dir(&adapters).unwrap();
    model.write_adapters(&adapters, &base.display().to_string(), &config).unwrap();
    for path in [&base, &file] {
        says(&opened(path, Some(&adapters)).model, &other, "with adapters");
        says(&opened(path, None).model, &told, "without");
    }
}
