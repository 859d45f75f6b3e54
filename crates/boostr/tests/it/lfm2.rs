//! LFM2 with and without experts: its configurations in all their spellings, its files in both layouts, and the short
//! convolution between runs. `golden.rs` compares the models with the original. Ids in names: `fixtures/CASES.md`.

use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::{Folder, cpu};
use crate::tiny::{config_with as json, fixture, message, random, run, save, tokens};
use boostr::Error;
use boostr::backend::Cpu;
use boostr::checkpoint::{Bytes, Checkpoint, ConfigFile, Dtype, TensorEntry};
use boostr::convert::{Options, Types, convert};
use boostr::load::{LanguageModel, OpenOptions};
use boostr::models::lfm2::Config;
use boostr::models::{self, Family, Logits, Model, Run};
use boostr::nn::{Kept, MoeConfig};
use boostr::ops::to_vec;
use serde_json::{Value, json};

const DENSE: &str = "lfm2-tiny";
const MOE: &str = "lfm2-moe-tiny";
const VOCAB: usize = 512;
/// The bound that the fixtures suggest for f32.
const TOLERANCE: f64 = 2e-4;

fn read(json: &Value) -> Result<Config, Error> {
    let file = ConfigFile::parse("config.json", &json.to_string())?;
    Ok(models::Config::read(&file)?.get::<Config>().unwrap().clone())
}

fn config(name: &str, changes: Value) -> Config {
    read(&json(name, changes)).unwrap()
}

#[track_caller]
fn refused(name: &str, changes: Value, parts: &[&str]) {
    let shown = changes.to_string();
    let text = message(&read(&json(name, changes)).expect_err(&shown));
    for part in parts {
        assert!(text.contains(part), "{shown}: {text}");
    }
}

fn made_by_llama_cpp(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/gguf");
    folder.join(format!("{name}.gguf"))
}

/// With the tokenizer of the folder: the merges in llama.cpp's files are none of their tokens.
fn open(path: &Path) -> LanguageModel<Cpu> {
    let tokenizer = Some(fixture(DENSE).join("tokenizer.json"));
    let options = OpenOptions { tokenizer, ..OpenOptions::default() };
    LanguageModel::open(path, &options, cpu()).unwrap()
}

/// Logits of a prompt and of a few tokens more.
fn logits(model: &Model<Cpu>) -> Vec<f32> {
    run(model, &tokens(7, 26, VOCAB), &[20, 1, 1, 4], &mut model.new_state().unwrap())
}

/// A folder with these weights.
fn saved(json: &Value, checkpoint: &Checkpoint) -> Folder {
    let folder = Folder::new();
    folder.write("config.json", json.to_string());
    let tokenizer = "tokenizer.json";
    std::fs::copy(fixture(DENSE).join(tokenizer), folder.path().join(tokenizer)).unwrap();
    save(&folder.path().join("model.safetensors"), checkpoint);
    folder
}

fn weights(name: &str) -> Checkpoint {
    Checkpoint::open(&fixture(name).join("model.safetensors"), false).unwrap()
}

fn try_converted(source: &Path, out: &Path) -> Result<(), Error> {
    let options = Options { types: Types::kept(), ..Options::default() };
    convert(source, out, &options, &mut |_, _| Continue(())).map(drop)
}

#[test]
fn files_of_llama_cpps_converter_are_the_models() {
    let golden = Checkpoint::open(&fixture(DENSE).join("golden.safetensors"), false).unwrap();
    let i64s = golden.get("input_ids").unwrap().data.as_chunks::<8>().0.to_vec();
    let ids: Vec<u32> = i64s.into_iter().map(|b| i64::from_le_bytes(b) as u32).collect();
    let f64s = golden.get("logits_f64").unwrap().data.as_chunks::<8>().0.to_vec();
    let model = open(&made_by_llama_cpp(DENSE)).model;
    let got = run(&model, &ids, &[ids.len()], &mut model.new_state().unwrap());
    for (got, want) in got.iter().zip(f64s.into_iter().map(f64::from_le_bytes)) {
        assert!((f64::from(*got) - want).abs() < TOLERANCE, "{got} is not {want}");
    }
    // Experts have no factor there.
    let lm = open(&made_by_llama_cpp(MOE));
    assert!(lm.warnings.iter().any(|line| line.contains("`routed_scaling_factor`: 1 is taken")));
    let plain = saved(&json(MOE, json!({"routed_scaling_factor": 1.0})), &weights(MOE));
    assert_eq!(logits(&lm.model), logits(&open(plain.path()).model));
    assert_ne!(logits(&lm.model), logits(&open(&fixture(MOE)).model));
}

#[test]
fn g_24_folders_become_gguf_and_back_and_what_gguf_cannot_hold_is_refused_by_name() {
    let out = Folder::new();
    for (name, changes) in [(DENSE, json!({})), (MOE, json!({"routed_scaling_factor": 1.0}))] {
        let source = saved(&json(name, changes), &weights(name));
        let (file, back) = (out.path().join(format!("{name}.gguf")), out.path().join(name));
        try_converted(source.path(), &file).unwrap();
        try_converted(&file, &back).unwrap();
        let names = |path: &Path| -> Vec<String> {
            Checkpoint::open(path, false).unwrap().names().map(str::to_owned).collect()
        };
        assert_eq!(names(&file), names(&made_by_llama_cpp(name)));
        let wanted = logits(&open(source.path()).model);
        for path in [&file, &back, &made_by_llama_cpp(name)] {
            assert!(logits(&open(path).model) == wanted, "{}", path.display());
        }
        assert_eq!(names(&back), names(source.path()));
        let config = |path: &Path| open(path).model.config().clone();
        assert_eq!(config(&back), config(source.path()));
    }
    let refused = |name: &str, changes: Value, field: &str| {
        let parameters = config(name, changes.clone()).hf_layout(VOCAB, false).unwrap().tensors();
        let source = saved(&json(name, changes), &random(&parameters, 3));
        let text = message(&try_converted(source.path(), &out.path().join("no.gguf")).unwrap_err());
        assert!(text.contains(field), "{field}: {text}");
        assert!(!out.path().join("no.gguf").exists());
    };
    refused(MOE, json!({}), "routed_scaling_factor");
    refused(MOE, json!({"norm_topk_prob": false}), "norm_topk_prob");
    refused(DENSE, json!({"conv_bias": true}), "conv_bias");
}

#[test]
fn the_feed_forward_width_is_computed_as_transformers_computes_it() {
    let width = |changes| config(DENSE, changes).mlp.d_ff;
    // 80 * 2 / 3 = 53, up to a multiple of 16.
    assert_eq!(width(json!({})), 64);
    assert_eq!(width(json!({"block_multiple_of": null})), 256);
    assert_eq!(width(json!({"block_auto_adjust_ff_dim": false})), 80);
    assert_eq!(width(json!({"block_auto_adjust_ff_dim": null})), 64);
    assert_eq!(width(json!({"block_ffn_dim_multiplier": 1.3})), 80);
    assert_eq!(width(json!({"intermediate_size": 999})), 64);
    assert_eq!(width(json!({"block_ff_dim": null, "intermediate_size": 90})), 64);
    let mut null = json(DENSE, json!({}));
    null["block_ffn_dim_multiplier"] = Value::Null;
    assert_eq!(read(&null).unwrap().mlp.d_ff, 53);
    refused(DENSE, json!({"block_ffn_dim_multiplier": 0.0}), &["block_ffn_dim_multiplier"]);
    refused(
        DENSE,
        json!({"block_ffn_dim_multiplier": 1e5, "block_ff_dim": 16_000_000}),
        &["width"],
    );
    // Experts' dense layers have the width that the file states.
    assert_eq!(config(MOE, json!({})).mlp.d_ff, 64);
}

#[test]
fn layers_are_named_by_either_list_and_all_are_attention_without_one() {
    let kinds = |changes| config(DENSE, changes).is_attention;
    let named = [false, false, true, false, true];
    assert_eq!(kinds(json!({})), named);
    let words = ["conv", "conv", "full_attention", "conv", "full_attention"];
    assert_eq!(kinds(json!({"full_attn_idxs": null, "layer_types": words})), named);
    assert_eq!(kinds(json!({"full_attn_idxs": null})), [true; 5]);
    refused(DENSE, json!({"full_attn_idxs": [5]}), &["full_attn_idxs", "layer 5"]);
    refused(DENSE, json!({"layer_types": ["conv"]}), &["layer_types", "1 layers"]);
    refused(DENSE, json!({"layer_types": vec!["mamba"; 5]}), &["layer_types", "mamba"]);
}

#[test]
fn the_old_name_of_the_tied_head_wins_and_defaults_are_those_of_the_class() {
    let tied = |changes| config(DENSE, changes).tie_embeddings;
    assert_eq!(tied(json!({})), Some(true));
    assert_eq!(tied(json!({"tie_word_embeddings": false})), Some(false));
    let both = json!({"tie_embedding": true, "tie_word_embeddings": false});
    assert_eq!(tied(both), Some(true));
    let theta = |changes| config(DENSE, changes).attention.rope.unwrap().theta;
    assert_eq!(theta(json!({"rope_theta": null})), 1e6);
    assert_eq!(theta(json!({"rope_theta": 5e5})), 5e5);
    let new =
        json!({"rope_theta": null, "rope_parameters": {"rope_theta": 3e4, "rope_type": "default"}});
    assert_eq!(theta(new), 3e4);
    assert_eq!(config(DENSE, json!({"conv_L_cache": null})).conv.d_conv, 3);
}

#[test]
fn g_4_5_a_routers_bias_chooses_and_does_not_weigh_and_large_scores_are_no_trouble() {
    let moe: MoeConfig = config(MOE, json!({})).moe.unwrap();
    assert_eq!((moe.experts, moe.used, moe.scale, moe.biased), (4, 2, 1.5, true));
    // A router whose scores are far from 0, so that sigmoids are 0 or 1 and equal: the lowest numbers win.
    for sign in [-1.0_f32, 1.0] {
        let mut checkpoint = weights(MOE);
        let mut tensors: Vec<(String, TensorEntry)> =
            checkpoint.iter().map(|(name, entry)| (name.to_owned(), entry.clone())).collect();
        for (name, entry) in &mut tensors {
            let values = if name.ends_with("feed_forward.gate.weight") {
                entry.to_f32().unwrap().iter().map(|x| sign * 1e5 * x.abs()).collect::<Vec<_>>()
            } else if name.ends_with("expert_bias") {
                vec![0.0; 4]
            } else {
                continue;
            };
            let data = Bytes::new(values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
            *entry = TensorEntry { dtype: Dtype::F32, data, ..entry.clone() };
        }
        checkpoint.replace(tensors.into_iter().collect());
        let config = models::Config::from(config(MOE, json!({})));
        let model = Model::load(config, checkpoint, cpu()).unwrap();
        assert!(logits(&model).iter().all(|x| x.is_finite()), "{sign}");
    }
    // Without a bias the file has none.
    let changes = json!({"use_expert_bias": false});
    let family = config(MOE, changes);
    let parameters = family.hf_layout(VOCAB, false).unwrap().tensors();
    assert!(!parameters.iter().any(|(name, _)| name.contains("expert_bias")));
    let config = models::Config::from(family);
    let model = Model::<Cpu>::load(config, random(&parameters, 5), cpu()).unwrap();
    assert!(logits(&model).iter().all(|x| x.is_finite()));
}

#[test]
fn g_2_a_second_prompt_and_a_guess_that_was_wrong_leave_what_one_pass_leaves() {
    for name in [DENSE, MOE] {
        let model = open(&fixture(name)).model;
        let ids = tokens(3, 24, VOCAB);
        let mut clean = model.new_state().unwrap();
        let whole = run(&model, &ids, &[24], &mut clean);
        let mut state = model.new_state().unwrap();
        run(&model, &ids[..9], &[9], &mut state);
        let mut guess = state.clone();
        run(&model, &[1, 2, 3], &[3], &mut guess);
        let rest = run(&model, &ids[9..], &[1, 1, 13], &mut state);
        assert!(rest == whole[9 * VOCAB..], "{name}");
        let windows = |state: &models::State<Cpu>| -> Vec<f32> {
            let kept = state.slots().filter_map(|(_, _, kept)| match kept {
                Kept::Tensor(tensor) => Some(to_vec(tensor).unwrap()),
                Kept::Rows(_) => None,
            });
            kept.flatten().collect()
        };
        assert_eq!(windows(&state), windows(&clean), "{name}");
    }
}

#[test]
fn g_3_6_17_runs_shorter_than_the_window_in_one_call_equal_each_alone() {
    for name in [DENSE, MOE] {
        let model = open(&fixture(name)).model;
        let lengths = [1usize, 2, 1, 3, 29, 1];
        let all = tokens(11, lengths.iter().sum(), VOCAB);
        let mut states: Vec<_> = lengths.iter().map(|_| model.new_state().unwrap()).collect();
        let mut first = 0;
        let mut runs: Vec<Run<'_, Cpu>> = Vec::new();
        for (state, len) in states.iter_mut().zip(lengths) {
            runs.push(Run { tokens: &all[first..first + len], state });
            first += len;
        }
        let together = to_vec(&model.forward(&mut runs, Logits::All).unwrap()).unwrap();
        let mut first = 0;
        for (state, len) in states.iter().zip(lengths) {
            let mut alone = model.new_state().unwrap();
            let ids = &all[first..first + len];
            let want = run(&model, ids, &[len], &mut alone);
            assert!(together[first * VOCAB..(first + len) * VOCAB] == want, "{name}");
            // A fork of a token or two leaves its parent as it was.
            let mut fork = state.clone();
            run(&model, &[5, 6], &[2], &mut fork);
            let goes_on = |state: &models::State<Cpu>| run(&model, &[9], &[1], &mut state.clone());
            assert_eq!(goes_on(state), goes_on(&alone), "{name}");
            first += len;
        }
    }
}

#[test]
fn g_21_odd_widths_of_experts_and_heads_run() {
    let changes = json!({"moe_intermediate_size": 26, "hidden_size": 36, "num_attention_heads": 3,
        "num_key_value_heads": 1});
    let family = config(MOE, changes);
    assert_eq!(family.attention.headdim, 12);
    let parameters = family.hf_layout(VOCAB, false).unwrap().tensors();
    let config = models::Config::from(family);
    let model = Arc::new(Model::<Cpu>::load(config, random(&parameters, 7), cpu()).unwrap());
    let ids = tokens(5, 12, VOCAB);
    let whole = run(&model, &ids, &[12], &mut model.new_state().unwrap());
    assert!(run(&model, &ids, &[5, 1, 6], &mut model.new_state().unwrap()) == whole);
}
