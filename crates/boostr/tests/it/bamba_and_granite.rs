//! Bamba and Granite 4: their configurations, their names in files, and the way through GGUF and back.
//! `golden.rs` compares with the originals' outputs. Ids in names: `fixtures/CASES.md`.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};

use crate::common::{Folder, cpu};
use crate::tiny::{close, entry, fixture, message, save, softplus, tokens, widened};
use boostr::backend::Cpu;
use boostr::checkpoint::{Bytes, Checkpoint, ConfigFile, Dtype, TensorEntry, gguf};
use boostr::convert::{Options, Types, convert};
use boostr::load::LanguageModel;
use boostr::models::{Config, Logits, Model, Run, State, bamba, granite_hybrid};
use boostr::nn::{AttentionConfig, LayerSpec, MoePart};
use boostr::ops::{tensor, to_vec};
use serde_json::{Value, json};

const MODELS: [&str; 3] = ["bamba-tiny", "granitehybrid-dense-tiny", "granitehybrid-moe-tiny"];
const MOE: &str = "granitehybrid-moe-tiny";
/// Between two ways of ours to compute the same: rounding only.
const ROUNDING: f64 = 2e-5;

/// The `config.json` of a fixture with some fields changed; null takes one away.
fn config_of(name: &str, changes: &Value) -> String {
    let text = fs::read_to_string(fixture(name).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config.to_string()
}

fn read(text: &str) -> Result<Config, boostr::Error> {
    Config::read(&ConfigFile::parse("config.json", text)?)
}

/// Why a changed configuration is refused.
#[track_caller]
fn refused(name: &str, changes: &Value) -> String {
    message(&read(&config_of(name, changes)).expect_err("the configuration was taken"))
}

/// A folder with a model of random weights, in which nothing is a value that a lazy loader would guess.
fn random_folder(config: &str) -> Folder {
    let folder = Folder::new();
    folder.write("config.json", config);
    save(&folder.path().join("model.safetensors"), &random_weights(&read(config).unwrap()));
    fs::copy(fixture(MOE).join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    folder
}

fn random_weights(config: &Config) -> Checkpoint {
    let frame = config.family().frame();
    let with_head = frame.tie_embeddings == Some(false);
    let tensors = config.family().hf_layout(frame.padded_vocab(), with_head).unwrap().tensors();
    crate::tiny::random(&tensors, 0x5eed)
}

fn open(path: &Path) -> LanguageModel<Cpu> {
    LanguageModel::open(path, &Default::default(), cpu()).unwrap()
}

fn refusal(path: &Path) -> String {
    match LanguageModel::<Cpu>::open(path, &Default::default(), cpu()) {
        Ok(_) => panic!("{} was opened", path.display()),
        Err(error) => message(&error),
    }
}

fn converted(source: &Path, folder: &Folder, name: &str) -> PathBuf {
    let out = folder.path().join(name);
    convert(source, &out, &Options::default(), &mut |_, _| Continue(())).unwrap();
    out
}

/// Logits of every token, fed in pieces of a length.
fn logits(model: &Model<Cpu>, ids: &[u32], piece: usize) -> Vec<f32> {
    logits_from(model, ids, piece, &mut model.new_state().unwrap())
}

fn logits_from(model: &Model<Cpu>, ids: &[u32], piece: usize, state: &mut State<Cpu>) -> Vec<f32> {
    let mut all = Vec::new();
    for tokens in ids.chunks(piece) {
        let mut run = [Run { tokens, state }];
        all.extend(to_vec(&model.forward(&mut run, Logits::All).unwrap()).unwrap());
    }
    all
}

#[track_caller]
fn equal_tensors(before: &Path, after: &Path) {
    let [before, after] = [before, after].map(|path| Checkpoint::open(path, false).unwrap());
    assert_eq!(before.names().collect::<Vec<_>>(), after.names().collect::<Vec<_>>());
    for (name, entry) in before.iter() {
        let other = after.get(name).unwrap();
        assert_eq!((entry.dtype, &entry.shape), (other.dtype, &other.shape), "{name}");
        assert_eq!(*entry.data, *other.data, "{name}");
    }
}

/// A copy of a GGUF file with other metadata and tensors.
fn changed(
    source: &Path,
    folder: &Folder,
    metadata: impl FnOnce(&mut gguf::Metadata),
    tensor: impl Fn(&str, &mut TensorEntry),
) -> PathBuf {
    let file = Checkpoint::open(source, false).unwrap();
    let mut new = file.gguf().unwrap().clone();
    metadata(&mut new);
    let tensors: Vec<(&str, TensorEntry)> = file
        .iter()
        .map(|(name, entry)| {
            let mut entry = entry.clone();
            tensor(name, &mut entry);
            (name, entry)
        })
        .collect();
    let list: Vec<(&str, Dtype, &[usize])> =
        tensors.iter().map(|(name, t)| (*name, t.dtype, t.shape.as_slice())).collect();
    let out = folder.path().join("changed.gguf");
    gguf::write(&out, &new, &list, |i| Ok(tensors[i].1.data.clone())).unwrap();
    out
}

// GGUF

#[test]
fn the_way_through_gguf_and_back_keeps_every_bit_and_the_family() {
    for name in MODELS {
        let folder = Folder::new();
        let before = open(&fixture(name));
        let there = converted(&fixture(name), &folder, "there.gguf");
        let ids = tokens(1, 37, 512);
        let after = open(&there);
        assert_eq!(after.model.family().name(), before.model.family().name());
        for piece in [37, 13, 1] {
            let want = logits(&before.model, &ids, piece);
            assert_eq!(logits(&after.model, &ids, piece), want, "{name}");
        }
        let back = converted(&there, &folder, name);
        equal_tensors(&fixture(name), &back);
        assert_eq!(open(&back).model.config(), before.model.config(), "{name}");
        let again = converted(&back, &folder, "again.gguf");
        assert!(fs::read(&there).unwrap() == fs::read(again).unwrap(), "{name}");
    }
}

#[test]
fn every_option_goes_through_gguf_and_back() {
    let all_attention = json!(["attention", "attention", "attention", "attention"]);
    let rotating = json!({ "position_embedding_type": "rope", "rope_theta": 500.0 });
    let with = |base: &Value, more: Value| {
        let mut all = base.clone();
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    };
    for (name, changes, arch) in [
        (
            "bamba-tiny",
            json!({ "attn_rotary_emb": 4, "partial_rotary_factor": null }),
            "granitehybrid",
        ),
        (
            "bamba-tiny",
            json!({ "attn_rotary_emb": 0, "partial_rotary_factor": null }),
            "granitehybrid",
        ),
        ("bamba-tiny", json!({ "attn_layer_indices": [] }), "granitehybrid"),
        ("bamba-tiny", json!({ "attn_layer_indices": [0, 1, 2, 3] }), "granitehybrid"),
        ("bamba-tiny", json!({ "attention_bias": true, "mlp_bias": true }), "granitehybrid"),
        (
            "bamba-tiny",
            json!({ "mamba_n_groups": 4, "mamba_expand": 3, "mamba_d_head": 24 }),
            "granitehybrid",
        ),
        ("bamba-tiny", json!({ "head_dim": 24, "attn_rotary_emb": null }), "granitehybrid"),
        ("bamba-tiny", json!({ "tie_word_embeddings": true }), "granitehybrid"),
        (
            "bamba-tiny",
            json!({ "rope_scaling": { "rope_type": "linear", "factor": 4.0 } }),
            "granitehybrid",
        ),
        (MOE, rotating.clone(), "granitehybrid"),
        (MOE, json!({ "attention_bias": true, "tie_word_embeddings": false }), "granitehybrid"),
        (MOE, json!({ "num_local_experts": 1, "num_experts_per_tok": 1 }), "granitehybrid"),
        (MOE, with(&rotating, json!({ "layer_types": all_attention })), "granitemoe"),
        (
            "granitehybrid-dense-tiny",
            with(&rotating, json!({ "layer_types": all_attention, "attention_bias": true })),
            "granite",
        ),
        ("granitehybrid-dense-tiny", json!({ "layer_types": all_attention }), "granite"),
        ("granitehybrid-dense-tiny", json!({ "layer_types": null }), "granitehybrid"),
        (
            // Rotates and has no factors but 1: Granite all the same.
            "granitehybrid-dense-tiny",
            with(
                &rotating,
                json!({
                    "attention_multiplier": 0.25, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
                    "logits_scaling": 1.0,
                }),
            ),
            "granitehybrid",
        ),
    ] {
        let shown = format!("{name} {changes}");
        let source = random_folder(&config_of(name, &changes));
        let folder = Folder::new();
        let there = converted(source.path(), &folder, "there.gguf");
        let file = Checkpoint::open(&there, false).unwrap();
        let found = file.gguf().unwrap().text("general.architecture").unwrap();
        assert_eq!(found, Some(arch), "{shown}");
        let (before, after) = (open(source.path()).model, open(&there).model);
        let ids = tokens(2, 30, 512);
        let want = logits(&before, &ids, 30);
        assert!(
            want.iter().all(|x| x.is_finite()) && want.iter().any(|x| x.abs() > 0.1),
            "{shown}"
        );
        let after = logits(&after, &ids, 30);
        let back = converted(&there, &folder, "back");
        equal_tensors(source.path(), &back);
        let back = open(&back).model;
        assert_eq!(after, want, "{shown}");
        assert_eq!(logits(&back, &ids, 30), want, "{shown}");
        let parts = |model: &Model<Cpu>| (model.family().layers(), model.family().frame());
        assert_eq!(parts(&back), parts(&before), "{shown}");
    }
}

#[test]
fn factors_of_frequencies_are_a_tensor_of_the_file() {
    let source = random_folder(&config_of(
        "bamba-tiny",
        &json!({ "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        } }),
    ));
    let folder = Folder::new();
    let there = converted(source.path(), &folder, "there.gguf");
    let ids = tokens(9, 60, 512);
    let want = logits(&open(source.path()).model, &ids, 60);
    // They are quotients, rounded to f32.
    close(&logits(&open(&there).model, &ids, 60), &widened(&want), ROUNDING);
    let plain = random_folder(&config_of("bamba-tiny", &json!({})));
    let plain = logits(&open(plain.path()).model, &ids, 60);
    assert!(plain.iter().zip(&want).any(|(a, b)| (a - b).abs() > 1e-3));
}

#[test]
fn rows_of_queries_and_keys_are_interleaved_where_they_rotate_and_nowhere_else() {
    for (name, rotary_dim) in [("bamba-tiny", 8), (MOE, 16)] {
        let folder = Folder::new();
        let there = converted(&fixture(name), &folder, "there.gguf");
        let [hf, gguf] = [fixture(name), there].map(|path| Checkpoint::open(&path, false).unwrap());
        for (part, file, nheads) in [("q_proj", "attn_q", 4), ("k_proj", "attn_k", 2)] {
            let row = |checkpoint: &Checkpoint, name: &str, row: usize| {
                checkpoint.get(name).unwrap().to_f32().unwrap()[row * 64..(row + 1) * 64].to_vec()
            };
            for head in 0..nheads {
                for i in 0..16 {
                    let from = match i {
                        i if i >= rotary_dim => i,
                        i => i % 2 * (rotary_dim / 2) + i / 2,
                    };
                    let want = row(
                        &hf,
                        &format!("model.layers.2.self_attn.{part}.weight"),
                        head * 16 + from,
                    );
                    let got = row(&gguf, &format!("blk.2.{file}.weight"), head * 16 + i);
                    assert_eq!(got, want, "{name}: {part} row {i} of head {head}");
                }
            }
        }
    }
}

#[test]
fn granites_factors_and_switches_in_gguf_are_honoured() {
    let folder = Folder::new();
    let there = converted(&fixture(MOE), &folder, "there.gguf");
    let file = Checkpoint::open(&there, false).unwrap();
    let keys = file.gguf().unwrap();
    let key = |name: &str| format!("granitehybrid.{name}");
    for (name, want) in [
        ("attention.scale", 0.125),
        ("embedding_scale", 12.0),
        ("residual_scale", 0.22),
        ("logit_scale", 0.25),
    ] {
        assert_eq!(keys.float(&key(name), 0.0..=99.0).unwrap(), Some(want), "{name}");
    }
    assert_eq!(keys.bool(&key("rope.scaling.finetuned")).unwrap(), Some(false));
    let per_layer = keys.per_layer(&key("attention.head_count_kv"), 4, 0..=9).unwrap();
    assert_eq!(per_layer, Some(vec![0, 0, 2, 0]));

    let ids = tokens(3, 20, 512);
    let want = logits(&open(&there).model, &ids, 20);
    let with = |name: &str, value: gguf::Value| {
        let set = |metadata: &mut gguf::Metadata| drop(metadata.set(key(name), value));
        logits(&open(&changed(&there, &folder, set, |_, _| {})).model, &ids, 20)
    };
    let halved = with("logit_scale", 0.5f32.into());
    assert!(halved.iter().zip(&want).all(|(half, whole)| half * 2.0 == *whole));
    for (name, value) in [
        ("attention.scale", 0.5f32.into()),
        ("embedding_scale", 6.0f32.into()),
        ("residual_scale", 0.3f32.into()),
        ("rope.scaling.finetuned", true.into()),
        ("expert_used_count", 1u32.into()),
    ] {
        let other = with(name, value);
        let moved = other.iter().zip(&want).any(|(a, b)| (a - b).abs() > 1e-2);
        assert!(moved, "{name} did nothing");
    }
    // 0 is llama.cpp's word for none: 1 / sqrt(16) for attention, else 1.
    assert_eq!(with("attention.scale", 0.0f32.into()), with("attention.scale", 0.25f32.into()));
    assert_eq!(with("residual_scale", 0.0f32.into()), with("residual_scale", 1.0f32.into()));
}

#[test]
fn the_width_that_llama_cpps_converter_gives_a_dense_granite_is_that_of_its_tensors() {
    // It writes intermediate_size, which no tensor of a dense model has.
    let folder = Folder::new();
    let there = converted(&fixture("granitehybrid-dense-tiny"), &folder, "there.gguf");
    let as_converted = changed(
        &there,
        &folder,
        |metadata| {
            for (key, value) in
                [("feed_forward_length", 48), ("expert_count", 0), ("expert_used_count", 0)]
            {
                metadata.set(format!("granitehybrid.{key}"), value as u32);
            }
        },
        |_, _| {},
    );
    let ids = tokens(4, 9, 512);
    assert_eq!(logits(&open(&as_converted).model, &ids, 9), logits(&open(&there).model, &ids, 9));
}

#[test]
fn a_granite_of_attention_alone_from_gguf_is_one_for_transformers_too() {
    let layers = json!(["attention", "attention", "attention", "attention"]);
    let changes = json!({ "layer_types": layers, "position_embedding_type": "rope" });
    let source = random_folder(&config_of("granitehybrid-dense-tiny", &changes));
    let folder = Folder::new();
    let there = converted(source.path(), &folder, "there.gguf");
    // As files of older models of Granite, which are of this architecture, and do not speak of rotation.
    let older = changed(
        &there,
        &folder,
        |metadata| {
            metadata.retain(|key| {
                !key.ends_with("rope.scaling.finetuned")
                    && !key.ends_with("expert_shared_feed_forward_length")
            });
        },
        |_, _| {},
    );
    let back = converted(&older, &folder, "back");
    let config: Value =
        serde_json::from_str(&fs::read_to_string(back.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["model_type"], "granitemoehybrid");
    assert_eq!(config["position_embedding_type"], "rope");
    assert_eq!(config["layer_types"], layers);
    // Transformers wants the heads of mixers to make up the channels even where there are none.
    assert_eq!((&config["mamba_n_heads"], &config["mamba_d_head"]), (&json!(1), &json!(128)));
    let ids = tokens(5, 9, 512);
    let want = logits(&open(source.path()).model, &ids, 9);
    assert_eq!(logits(&open(&back).model, &ids, 9), want);
}

#[test]
fn case_39_matrices_and_experts_become_blocks_and_what_every_token_depends_on_stays() {
    for name in MODELS {
        let folder = Folder::new();
        let out = folder.path().join("q8_0.gguf");
        let options = Options { types: Types::named("q8_0").unwrap(), ..Options::default() };
        convert(&fixture(name), &out, &options, &mut |_, _| Continue(())).unwrap();
        for (tensor, entry) in Checkpoint::open(&out, false).unwrap().iter() {
            let part =
                tensor.trim_start_matches(|c: char| c.is_ascii_digit() || "blk.".contains(c));
            let kept = [
                "ssm_a",
                "ssm_d",
                "ssm_conv1d",
                "ssm_norm",
                "attn_norm",
                "ffn_norm",
                "output_norm",
                "ffn_gate_inp",
            ];
            let want = match part {
                // Rows of 48 are no whole blocks of 32.
                "ffn_down_exps.weight" => "f16",
                _ if kept.iter().any(|start| part.starts_with(start)) => "f32",
                _ => "q8_0",
            };
            assert_eq!(entry.dtype.name().to_lowercase(), want, "{name}: {tensor}");
        }
        let ids = tokens(10, 37, 512);
        let want = logits(&open(&fixture(name)).model, &ids, 37);
        let got = logits(&open(&out).model, &ids, 37);
        let row = |(a, b): (&[f32], &[f32])| {
            a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
        };
        let mut changes: Vec<f32> = got.chunks(512).zip(want.chunks(512)).map(row).collect();
        changes.sort_by(f32::total_cmp);
        // As docs/performance.md states for q8_0, of logits whose deviation is 1.6; but where the scores of
        // two experts are close, a token gets the other (with llama.cpp too: 1.7 of this model).
        let largest = if name == MOE { changes[18] } else { changes[36] };
        assert!((1e-4..0.5).contains(&largest), "{name}: {changes:?}");
    }
}

#[test]
fn a_convolution_without_a_bias_is_one_with_zeros_in_gguf() {
    let source = random_folder(&config_of("bamba-tiny", &json!({ "mamba_conv_bias": false })));
    let folder = Folder::new();
    let there = converted(source.path(), &folder, "there.gguf");
    let file = Checkpoint::open(&there, false).unwrap();
    let zeros = file.get("blk.0.ssm_conv1d.bias").unwrap().to_f32().unwrap();
    assert!(!zeros.is_empty() && zeros.iter().all(|&x| x == 0.0));
    let back = converted(&there, &folder, "back");
    let ids = tokens(9, 40, 512);
    let want = logits(&open(source.path()).model, &ids, 40);
    for path in [&there, &back] {
        assert_eq!(logits(&open(path).model, &ids, 40), want, "{}", path.display());
    }
}

#[test]
fn what_gguf_cannot_say_is_refused_by_name() {
    let attention = json!(["attention", "attention", "attention", "attention"]);
    for (name, changes, expected) in [
        ("bamba-tiny", json!({ "time_step_limit": [0.01, 0.1] }), "limits of the steps"),
        ("bamba-tiny", json!({ "mamba_proj_bias": true }), "mamba.in_proj.bias"),
        (MOE, json!({ "layer_types": attention }), "granitemoe"),
        (
            "bamba-tiny",
            json!({ "rope_scaling": { "rope_type": "dynamic", "factor": 2.0 } }),
            "NTK scaling",
        ),
    ] {
        let source = random_folder(&config_of(name, &changes));
        let out = source.path().join("out.gguf");
        let result = convert(source.path(), &out, &Options::default(), &mut |_, _| Continue(()));
        let text = message(&result.unwrap_err());
        assert!(text.contains(expected), "{text}");
        assert!(!out.exists());
    }
}

#[test]
fn what_transformers_cannot_say_is_refused_by_name() {
    let folder = Folder::new();
    let there = converted(&fixture(MOE), &folder, "there.gguf");
    let partly = changed(
        &there,
        &folder,
        |metadata| {
            metadata.set("granitehybrid.rope.scaling.finetuned", true);
            metadata.set("granitehybrid.rope.dimension_count", 8u32);
        },
        |_, _| {},
    );
    let out = folder.path().join("out");
    let result = convert(&partly, &out, &Options::default(), &mut |_, _| Continue(()));
    let text = message(&result.unwrap_err());
    assert!(text.contains("8 of 16 dimensions"), "{text}");
}

#[test]
fn gguf_files_that_disagree_with_themselves_are_refused_by_key_or_tensor() {
    let folder = Folder::new();
    let there = converted(&fixture(MOE), &folder, "there.gguf");
    let with = |name: &str, value: gguf::Value| {
        let key = format!("granitehybrid.{name}");
        let set = |metadata: &mut gguf::Metadata| drop(metadata.set(key, value));
        refusal(&changed(&there, &folder, set, |_, _| {}))
    };
    for (name, value, expected) in [
        ("attention.head_count_kv", [0i32, 2].as_slice().into(), ["2", "4"].as_slice()),
        ("attention.head_count_kv", [0i32, 4, 2, 0].as_slice().into(), &["some layers have"]),
        ("attention.head_count_kv", 2u32.into(), &["missing", "blk.0.attn_k.weight"]),
        ("ssm.group_count", 2u32.into(), &["blk.0.ssm_in.weight", "[328, 64]", "[392, 64]"]),
        ("ssm.time_step_rank", 4u32.into(), &["blk.0.ssm_in.weight", "[328, 64]", "[324, 64]"]),
        ("ssm.time_step_rank", 3u32.into(), &["3 heads do not divide 128"]),
        ("expert_used_count", 5u32.into(), &["5 of 4 experts"]),
        ("expert_count", 3u32.into(), &["ffn_gate_exps.weight", "[4, 48, 64]", "[3, 48, 64]"]),
        ("expert_count", 0u32.into(), &["blk.0.ffn_gate.weight", "missing"]),
        ("expert_shared_feed_forward_length", 0u32.into(), &["experts alone are not supported"]),
        ("embedding_scale", f32::NAN.into(), &["granitehybrid.embedding_scale"]),
        ("rope.scaling.finetuned", 1u32.into(), &["granitehybrid.rope.scaling.finetuned"]),
    ] {
        let text = with(name, value);
        assert!(expected.iter().all(|part| text.contains(part)), "{name}: {text}");
    }
    // The shape of the norm of a mixer is that of its groups.
    let text = refusal(&changed(
        &there,
        &folder,
        |_| {},
        |name, entry| {
            if name == "blk.0.ssm_norm.weight" {
                entry.shape = vec![2, 64];
            }
        },
    ));
    assert!(text.contains("ssm_norm.weight") && text.contains("[1, 128]"), "{text}");
    // A is -exp(A_log) already.
    let text = refusal(&changed(
        &there,
        &folder,
        |_| {},
        |name, entry| {
            if name == "blk.3.ssm_a" {
                let values: Vec<f32> = entry.to_f32().unwrap().iter().map(|a| -a).collect();
                entry.data = Bytes::new(Dtype::F32.encode(&values).unwrap());
            }
        },
    ));
    assert!(text.contains("-exp(A_log)"), "{text}");
    // Attention alone is another architecture.
    let text = refusal(&changed(
        &there,
        &folder,
        |metadata| {
            let old: Vec<(String, gguf::Value)> =
                metadata.iter().map(|(key, value)| (key.to_owned(), value.clone())).collect();
            for (key, value) in old {
                metadata.set(key.replace("granitehybrid.", "granite."), value);
            }
            metadata.set("general.architecture", "granite");
        },
        |_, _| {},
    ));
    assert!(text.contains("granite.attention.head_count_kv") && text.contains("layer 0"), "{text}");
}

// Configurations

#[test]
fn case_43_every_way_to_list_the_layers_gives_the_same_list() {
    let old = json!(["mamba", "mamba", "attention", "mamba"]);
    let new = json!(["linear_attention", "linear_attention", "full_attention", "linear_attention"]);
    for (name, key) in [("bamba-tiny", "attn_layer_indices"), (MOE, "layer_types")] {
        let want = read(&config_of(name, &json!({}))).unwrap();
        let kinds: Vec<bool> = want
            .family()
            .layers()
            .iter()
            .map(|layer| layer.part::<AttentionConfig>().is_some())
            .collect();
        assert_eq!(kinds, [false, false, true, false]);
        for list in [
            json!({ "layer_types": old }),
            json!({ "layer_types": new }),
            json!({ "layers_block_type": old }),
            json!({ "layers_block_type": new }),
            json!({ "attn_layer_indices": [2] }),
            json!({ "attn_layer_period": 4, "attn_layer_offset": 2 }),
            json!({ "attn_layer_period": 3, "attn_layer_offset": 2, "attn_layer_indices": [2] }),
        ] {
            let mut changes = json!({ key: null });
            changes.as_object_mut().unwrap().extend(list.as_object().unwrap().clone());
            assert_eq!(read(&config_of(name, &changes)).unwrap(), want, "{list}");
        }
    }
}

#[test]
fn case_43_lists_of_layers_that_do_not_fit_are_refused_with_both_numbers() {
    for (changes, expected) in [
        (json!({ "layer_types": ["mamba", "attention"] }), ["layer_types", "2 layers", "is 4"]),
        (
            json!({ "layers_block_type": vec!["mamba"; 5] }),
            ["layers_block_type", "5 layers", "is 4"],
        ),
        (json!({ "attn_layer_indices": [2, 4] }), ["attn_layer_indices", "layer 4", "is 4"]),
        (
            json!({ "layer_types": ["mamba", "mamba", "moe", "mamba"] }),
            ["layer_types", "linear_attention", "\"moe\""],
        ),
        (
            json!({ "layer_types": vec!["mamba"; 4] }),
            ["attn_layer_indices", "other layers", "layer_types"],
        ),
        (
            json!({ "attn_layer_period": 2, "attn_layer_offset": 2 }),
            ["attn_layer_offset", "from 0 to 1", "found 2"],
        ),
        (json!({ "attn_layer_period": 2 }), ["attn_layer_offset", "missing", ""]),
    ] {
        let text = refused("bamba-tiny", &changes);
        assert!(expected.iter().all(|part| text.contains(part)), "{text}");
    }
}

#[test]
fn case_28_every_spelling_of_an_open_limit_is_the_same() {
    for name in MODELS {
        let text = config_of(name, &json!({}));
        let want = read(&text).unwrap();
        for limit in ["[0.0, Infinity]", r#"[0.0, {"__float__": "Infinity"}]"#, "null"] {
            let text = text.replacen('{', &format!(r#"{{"time_step_limit": {limit},"#), 1);
            assert_eq!(read(&text).unwrap(), want, "{limit}");
        }
        let text = text.replacen('{', r#"{"time_step_limit": [0.5, 0.25],"#, 1);
        let text = message(&read(&text).unwrap_err());
        assert!(text.contains("time_step_limit"), "{text}");
    }
}

#[test]
fn missing_fields_have_the_values_that_transformers_gives_them() {
    // A field is left out where the changes have a null.
    let config_of = |name: &str, changes: &Value| {
        let mut config: Value = serde_json::from_str(&config_of(name, changes)).unwrap();
        let left_out = |key: &str| changes.get(key) == Some(&Value::Null);
        config.as_object_mut().unwrap().retain(|key, _| !left_out(key));
        config.to_string()
    };
    let changes = json!({
        "mamba_d_head": "auto", "mamba_expand": null, "mamba_n_groups": null, "mamba_d_conv": null,
        "mamba_conv_bias": null, "mamba_proj_bias": null, "attention_bias": null, "rope_theta": null,
        "hidden_act": null,
    });
    for name in MODELS {
        let want = read(&config_of(name, &json!({}))).unwrap();
        assert_eq!(read(&config_of(name, &changes)).unwrap(), want, "{name}");
    }
    let bamba = |changes: Value| {
        let config = read(&config_of("bamba-tiny", &changes)).unwrap();
        config.get::<bamba::Config>().unwrap_or_else(|| panic!("{config:?}")).clone()
    };
    let rotary = |changes| bamba(changes).hybrid.attention.rope.unwrap().rotary_dim;
    assert_eq!(rotary(json!({ "attn_rotary_emb": null, "partial_rotary_factor": null })), 8);
    // The class of transformers has half, whatever stands at the top.
    for factor in [json!(0.25), json!(0.5), json!(1.0)] {
        let rotates = rotary(json!({ "attn_rotary_emb": null, "partial_rotary_factor": factor }));
        assert_eq!(rotates, 8, "{factor}");
    }
    assert_eq!(rotary(json!({ "attn_rotary_emb": 12, "partial_rotary_factor": null })), 12);
    let new = json!({ "partial_rotary_factor": 0.25, "rope_theta": 10.0, "rope_type": "default" });
    let config = bamba(json!({ "attn_rotary_emb": null, "rope_parameters": new }));
    let rope = config.hybrid.attention.rope.unwrap();
    assert_eq!((rope.rotary_dim, rope.theta), (4, 10.0));

    let config = read(&config_of(
        MOE,
        &json!({
            "embedding_multiplier": null, "residual_multiplier": null, "attention_multiplier": null,
            "logits_scaling": null, "num_local_experts": null, "position_embedding_type": null,
            "rms_norm_eps": null, "num_experts_per_tok": null,
        }),
    ))
    .unwrap();
    let config = config.get::<granite_hybrid::Config>().unwrap();
    let factors = [config.embedding_scale, config.residual_scale, config.logits_scaling];
    assert_eq!(factors, [1.0; 3]);
    assert_eq!((config.hybrid.attention.scale, config.hybrid.norm_eps), (1.0, 1e-6));
    assert_eq!(config.hybrid.attention.rope, None);
    let moe = config.moe.as_ref().unwrap();
    assert_eq!((moe.experts, moe.used), (8, 2));
}

#[test]
fn layers_are_what_the_configuration_says() {
    let parts = |name: &str| {
        let config = read(&config_of(name, &json!({}))).unwrap();
        config.family().layers().iter().map(LayerSpec::kind).collect::<Vec<_>>()
    };
    let of = |mixer: &str, ffn: &str| format!("{mixer} + {ffn}");
    for (name, ffn) in MODELS.into_iter().zip(["mlp", "mlp", "moe"]) {
        let want = ["mamba2", "mamba2", "attention", "mamba2"].map(|mixer| of(mixer, ffn));
        assert_eq!(parts(name), want, "{name}");
    }
    let config = read(&config_of(MOE, &json!({}))).unwrap();
    for layer in config.family().layers() {
        let MoePart { moe, shared } = layer.part().unwrap();
        assert_eq!((moe.expert.d_ff, shared.as_ref().unwrap().d_ff), (48, 96));
    }
}

#[test]
fn impossible_configurations_are_refused_by_field() {
    for (name, changes, expected) in [
        ("bamba-tiny", json!({ "hidden_act": "gelu" }), ["hidden_act", "\"gelu\""]),
        ("bamba-tiny", json!({ "mamba_n_heads": 6 }), ["mamba_n_heads", "6 heads of 16"]),
        ("bamba-tiny", json!({ "mamba_expand": 3 }), ["mamba_n_heads", "= 192 channels"]),
        (
            "bamba-tiny",
            json!({ "mamba_n_heads": 7, "mamba_d_head": "auto" }),
            ["7 heads of 18", "128"],
        ),
        ("bamba-tiny", json!({ "mamba_d_head": "wide" }), ["mamba_d_head", "\"auto\""]),
        ("bamba-tiny", json!({ "mamba_n_groups": 3 }), ["n_groups", "3 groups do not divide 8"]),
        (
            "bamba-tiny",
            json!({ "num_key_value_heads": 3 }),
            ["num_key_value_heads", "3 do not divide 4"],
        ),
        (
            "bamba-tiny",
            json!({ "attn_rotary_emb": 7, "partial_rotary_factor": null }),
            ["7 of 16", "odd"],
        ),
        (
            MOE,
            json!({ "num_attention_heads": 65, "num_key_value_heads": 65 }),
            ["head_dim", "found 0"],
        ),
        ("bamba-tiny", json!({ "intermediate_size": null }), ["intermediate_size", "missing"]),
        (
            "bamba-tiny",
            json!({ "attn_rotary_emb": 4 }),
            ["attn_rotary_emb", "4 of 16 dimensions, but 8 by partial_rotary_factor"],
        ),
        (
            MOE,
            json!({ "position_embedding_type": "alibi" }),
            ["position_embedding_type", "\"alibi\""],
        ),
        (MOE, json!({ "num_experts_per_tok": 5 }), ["num_experts_per_tok", "5 of 4"]),
        (MOE, json!({ "num_experts_per_tok": 0 }), ["num_experts_per_tok", "found 0"]),
        (MOE, json!({ "logits_scaling": 0.0 }), ["logits_scaling", "found 0"]),
        (MOE, json!({ "residual_multiplier": "all" }), ["residual_multiplier", "\"all\""]),
        (MOE, json!({ "shared_intermediate_size": null }), ["shared_intermediate_size", "missing"]),
        (
            MOE,
            json!({ "position_embedding_type": "rope", "partial_rotary_factor": 0.5 }),
            ["partial_rotary_factor", "expected all 16, found 8"],
        ),
    ] {
        let text = refused(name, &changes);
        assert!(expected.iter().all(|part| text.contains(part)), "{text}");
    }
}

#[test]
fn tensors_of_other_sizes_are_named_with_both_shapes() {
    for (name, changes, expected) in [
        (
            "bamba-tiny",
            json!({ "mamba_d_state": 16 }),
            ["mamba.in_proj.weight", "[328, 64]", "[296, 64]"],
        ),
        (
            "bamba-tiny",
            json!({ "num_key_value_heads": 1 }),
            ["self_attn.k_proj.weight", "[32, 64]", "[16, 64]"],
        ),
        (
            MOE,
            json!({ "intermediate_size": 32 }),
            ["block_sparse_moe.input_linear.weight", "[4, 96, 64]", "[4, 64, 64]"],
        ),
        (
            MOE,
            json!({ "shared_intermediate_size": 48 }),
            ["shared_mlp.input_linear.weight", "[192, 64]", "[96, 64]"],
        ),
    ] {
        let folder = Folder::new();
        folder.write("config.json", config_of(name, &changes));
        let weights = fixture(name).join("model.safetensors");
        fs::copy(weights, folder.path().join("model.safetensors")).unwrap();
        let text = refusal(folder.path());
        assert!(expected.iter().all(|part| text.contains(part)), "{text}");
    }
}

#[test]
fn case_27_the_head_is_the_embedding_or_a_tensor_as_the_configuration_says() {
    for name in MODELS {
        let tensors: BTreeMap<String, TensorEntry> =
            Checkpoint::open(&fixture(name).join("model.safetensors"), false)
                .unwrap()
                .iter()
                .map(|(name, entry)| (name.to_owned(), entry.clone()))
                .collect();
        let load = |tie: Value, head: Option<&TensorEntry>| {
            let mut tensors = tensors.clone();
            tensors.remove("lm_head.weight");
            if let Some(head) = head {
                tensors.insert("lm_head.weight".into(), head.clone());
            }
            let config = read(&config_of(name, &json!({ "tie_word_embeddings": tie }))).unwrap();
            let checkpoint = Checkpoint::from_entries("weights", tensors);
            let model = Model::<Cpu>::load(config, checkpoint, cpu());
            model.map(|model| logits(&model, &[1, 2, 3], 3)).map_err(|error| message(&error))
        };
        let embedding = &tensors["model.embed_tokens.weight"];
        let values: Vec<f32> = embedding.to_f32().unwrap().iter().map(|x| x * 0.5).collect();
        let other = entry(Dtype::F32, &embedding.shape, &values);
        let tied = load(json!(true), None).unwrap();
        assert_eq!(load(Value::Null, None).unwrap(), tied);
        assert_eq!(load(json!(true), Some(embedding)).unwrap(), tied);
        assert_eq!(load(json!(false), Some(embedding)).unwrap(), tied);
        let untied = load(json!(false), Some(&other)).unwrap();
        assert!(untied.iter().zip(&tied).all(|(half, whole)| half * 2.0 == *whole));
        assert_eq!(load(Value::Null, Some(&other)).unwrap(), untied);
        let text = load(json!(false), None).unwrap_err();
        assert!(text.contains("lm_head.weight") && text.contains("missing"), "{text}");
        // One of its own is used, as in transformers.
        assert_eq!(load(json!(true), Some(&other)).unwrap(), untied);
    }
}

#[test]
fn names_that_transformers_5_has_in_memory_are_read_too() {
    let file = Checkpoint::open(&fixture(MOE).join("model.safetensors"), false).unwrap();
    let mut renamed = file.clone();
    renamed
        .rename(|name| {
            let name = name.replace("input_linear.weight", "experts.gate_up_proj");
            let name =
                name.replace("shared_mlp.experts.gate_up_proj", "shared_mlp.input_linear.weight");
            let name = name.replace(
                "block_sparse_moe.output_linear.weight",
                "block_sparse_moe.experts.down_proj",
            );
            Some(name.replace("router.layer.weight", "router.weight"))
        })
        .unwrap();
    assert!(renamed.get("model.layers.0.block_sparse_moe.experts.gate_up_proj").is_some());
    let config = read(&config_of(MOE, &json!({}))).unwrap();
    let [old, new] =
        [file, renamed].map(|file| Model::<Cpu>::load(config.clone(), file, cpu()).unwrap());
    let ids = tokens(6, 9, 512);
    assert_eq!(logits(&new, &ids, 9), logits(&old, &ids, 9));
}

// Numbers

#[test]
fn case_11_steps_of_any_size_decay_the_state_of_a_granite_as_softplus_says() {
    // Projections and convolutions of zero leave a state to decay alone; A is such that it does by e,
    // but where softplus is 0 in f32.
    const STEPS: [f32; 7] = [-200.0, -30.0, -17.0, 0.0, 20.0, 89.0, 1e4];
    let changes =
        json!({ "mamba_n_heads": 7, "mamba_d_head": 32, "mamba_expand": 7, "hidden_size": 32 });
    let config = read(&config_of("granitehybrid-dense-tiny", &changes)).unwrap();
    let a_log = STEPS.map(|x| if x < -100.0 { 0.0 } else { -softplus(x.into()).ln() } as f32);
    let weights = crate::tiny::edited(&random_weights(&config), |name, old| {
        let values = match name.rsplit_once("mamba.").map_or("", |(_, part)| part) {
            "in_proj.weight" | "conv1d.bias" => vec![0.0; old.shape.iter().product()],
            "dt_bias" => STEPS.to_vec(),
            "A_log" => a_log.to_vec(),
            _ => return Some(old.clone()),
        };
        Some(entry(Dtype::F32, &old.shape, &values))
    });
    let model = Model::<Cpu>::load(config, weights, cpu()).unwrap();
    let mut state = model.new_state().unwrap();
    let ones = tensor(&cpu(), &vec![1.0; 7 * 32 * 32], &[7, 32, 32]).unwrap();
    state.set_ssm(0, ones).unwrap();
    let logits = logits_from(&model, &[5], 1, &mut state);
    assert!(logits.iter().all(|x| x.is_finite()));
    let decays: Vec<f64> = STEPS
        .iter()
        .zip(a_log)
        .map(|(&step, a_log)| (-softplus(step.into()) * f64::from(a_log).exp()).exp())
        .collect();
    assert!(
        (decays[0] - 1.0).abs() < 1e-12 && decays[1..].iter().all(|d| (d - 0.3679).abs() < 1e-3)
    );
    let want: Vec<f64> = (0..7 * 32 * 32).map(|i| decays[i / (32 * 32)]).collect();
    close(&to_vec(state.ssm(0).unwrap()).unwrap(), &want, 1e-6);
}

#[test]
fn case_11_a_granite_with_steps_of_thousands_stays_finite_for_long() {
    let config = read(&config_of("granitehybrid-dense-tiny", &json!({}))).unwrap();
    let weights = crate::tiny::with(&random_weights(&config), "dt_bias", |x| 3000.0 * x);
    let model = Model::<Cpu>::load(config, weights, cpu()).unwrap();
    let logits = logits(&model, &tokens(7, 300, 512), 100);
    assert!(logits.iter().all(|x| x.is_finite()));
}

#[test]
fn case_13_sixty_four_steps_equal_one_forward_with_a_limit_and_bf16_weights() {
    for name in MODELS {
        let changes = json!({ "time_step_limit": [0.01, 0.1] });
        let config = read(&config_of(name, &changes)).unwrap();
        let weights = crate::tiny::converted(&random_weights(&config), Dtype::BF16);
        let model = Model::<Cpu>::load(config, weights.clone(), cpu()).unwrap();
        let ids = tokens(8, 64, 512);
        let whole = logits(&model, &ids, 64);
        assert_eq!(logits(&model, &ids, 1), whole);
        assert_eq!(logits(&model, &ids, 7), whole);
        // The limit is active: without it the output is another.
        let free = Model::<Cpu>::load(read(&config_of(name, &json!({}))).unwrap(), weights, cpu());
        let other = logits(&free.unwrap(), &ids, 64);
        assert!(other.iter().zip(&whole).any(|(a, b)| (a - b).abs() > 0.01), "{name}");
    }
}

#[test]
fn a_model_without_attention_may_have_more_heads_than_channels() {
    let read = |text: &str| Config::read(&ConfigFile::parse("config.json", text).unwrap());
    let text = r#"{"model_type": "granitemoehybrid", "hidden_size": 1, "num_attention_heads": 2,
        "num_hidden_layers": 2, "layer_types": ["mamba", "mamba"], "num_local_experts": 2,
        "num_experts_per_tok": 1, "intermediate_size": 8, "shared_intermediate_size": 8, "mamba_n_heads": 2,
        "mamba_d_head": 1, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_expand": 2, "vocab_size": 32}"#;
    let config = read(text).unwrap();
    let mut json = config.family().folder_json().unwrap();
    json["vocab_size"] = 32.into();
    let again = read(&json.to_string()).unwrap();
    let layers = |config: &Config| format!("{:?}", config.family().layers());
    assert_eq!(layers(&again), layers(&config));
    // Attention needs a width.
    let error =
        read(&text.replacen(r#"["mamba","#, r#"["attention","#, 1)).unwrap_err().to_string();
    assert!(error.contains("head_dim") && error.contains("found 0"), "{error}");
}
