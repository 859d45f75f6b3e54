//! Falcon-H1 and the contents of its files. Its multipliers act in their place and once, from any file
//! (`case_14`).

use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};

use crate::common::{Folder, Random, cpu};
use crate::tiny::{close, entry, fixture, floats, message, widened};
use boostr::backend::Cpu;
use boostr::checkpoint::gguf::Metadata;
use boostr::checkpoint::{Checkpoint, ConfigFile, Dtype};
use boostr::convert::{Options, Types, convert};
use boostr::load::LanguageModel;
use boostr::models::falcon_h1::Config;
use boostr::models::{self, Family, Logits, Model, Run};
use boostr::ops::to_vec;
use serde_json::{Value, json};

const MODELS: [&str; 2] = ["falcon-h1-tiny", "falcon-h1-rms-tiny"];
/// The bound that the fixtures suggest for f32.
const TOLERANCE: f64 = 2e-4;
/// Between two ways of ours to compute the same: rounding only, relative to the largest logit.
const ROUNDING: f64 = 2e-5;

fn open(path: &Path) -> LanguageModel<Cpu> {
    LanguageModel::open(path, &Default::default(), cpu()).unwrap()
}

fn converted(source: &Path, folder: &Folder, name: &str, types: Types) -> PathBuf {
    let out = folder.path().join(name);
    let options = Options { types, ..Options::default() };
    let converted = convert(source, &out, &options, &mut |_, _| Continue(())).unwrap();
    assert_eq!(converted.warnings, [""; 0]);
    out
}

fn falcon(config: &models::Config) -> Config {
    config.get::<Config>().unwrap_or_else(|| panic!("{config:?}")).clone()
}

/// The configuration of a fixture with `changes`.
fn changed(model: &str, changes: &Value) -> Value {
    let text = std::fs::read_to_string(fixture(model).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    config
}

fn read(config: &Value) -> boostr::Result<Config> {
    let file = ConfigFile::parse("config.json", &config.to_string()).unwrap();
    models::Config::read(&file).map(|config| falcon(&config))
}

/// A folder like the fixture's with another configuration and other weights.
fn folder_of(folder: &Folder, name: &str, config: &Value, weights: &Checkpoint) -> PathBuf {
    let out = folder.path().join(name);
    std::fs::create_dir(&out).unwrap();
    std::fs::copy(fixture(MODELS[0]).join("tokenizer.json"), out.join("tokenizer.json")).unwrap();
    std::fs::write(out.join("config.json"), config.to_string()).unwrap();
    crate::tiny::save(&out.join("model.safetensors"), weights);
    out
}

fn golden(model: &str) -> (Vec<u32>, Vec<f64>) {
    let file = Checkpoint::open(&fixture(model).join("golden.safetensors"), false).unwrap();
    let data = |name| file.get(name).unwrap().data.as_chunks::<8>().0.to_vec();
    let ids = data("input_ids").into_iter().map(|b| i64::from_le_bytes(b) as u32).collect();
    (ids, data("logits_f64").into_iter().map(f64::from_le_bytes).collect())
}

fn logits(model: &Model<Cpu>, ids: &[u32]) -> Vec<f32> {
    let mut state = model.new_state().unwrap();
    let mut run = [Run { tokens: ids, state: &mut state }];
    to_vec(&model.forward(&mut run, Logits::All).unwrap()).unwrap()
}

fn weights(model: &str) -> Checkpoint {
    Checkpoint::open(&fixture(model), false).unwrap()
}

/// All multipliers, by the names of `config.json`.
fn multipliers(config: &Config) -> Value {
    let json = config.to_json().unwrap();
    let is_one = |(key, _): &(&String, &Value)| key.contains("multiplier");
    json.as_object().unwrap().iter().filter(is_one).map(|(k, v)| (k.clone(), v.clone())).collect()
}

fn ones() -> Value {
    json!({
        "embedding_multiplier": 1.0, "lm_head_multiplier": 1.0, "key_multiplier": 1.0,
        "attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0,
        "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 1.0], "ssm_out_multiplier": 1.0,
        "mlp_multipliers": [1.0, 1.0],
    })
}

#[track_caller]
fn assert_same_tensors(a: &Path, b: &Path) {
    let [a, b] = [a, b].map(|path| Checkpoint::open(path, false).unwrap());
    assert_eq!(a.names().collect::<Vec<_>>(), b.names().collect::<Vec<_>>());
    for (name, entry) in a.iter() {
        let other = b.get(name).unwrap();
        assert_eq!((entry.dtype, &entry.shape), (other.dtype, &other.shape), "{name}");
        assert_eq!(*entry.data, *other.data, "{name}");
    }
}

#[test]
fn case_14_multipliers_go_into_the_weights_of_gguf_and_are_never_applied_again() {
    for model in MODELS {
        let (ids, want) = golden(model);
        let folder = Folder::new();
        let there = converted(&fixture(model), &folder, "there.gguf", Types::kept());
        let back = converted(&there, &folder, "back", Types::kept());
        let again = converted(&back, &folder, "again.gguf", Types::kept());
        let folded = logits(&open(&there).model, &ids);
        close(&folded, &want, TOLERANCE);
        for path in [&there, &back, &again] {
            let lm = open(path);
            assert_eq!(multipliers(&falcon(lm.model.config())), ones(), "{}", path.display());
            assert_eq!(logits(&lm.model, &ids), folded, "{}", path.display());
        }
        assert_same_tensors(&there, &again);
        let twice = converted(&there, &folder, "twice.gguf", Types::kept());
        assert_eq!(std::fs::read(&there).unwrap(), std::fs::read(twice).unwrap(), "{model}");
    }
}

#[test]
fn case_14_without_any_one_multiplier_the_logits_are_others() {
    let (ids, want) = golden(MODELS[1]);
    let all = multipliers(&read(&changed(MODELS[1], &json!({}))).unwrap());
    let mut singles = Vec::new();
    for (key, value) in all.as_object().unwrap() {
        match value.as_array() {
            None => singles.push(json!({ key: 1.0 })),
            Some(list) => singles.extend((0..list.len()).map(|i| {
                let mut list = list.clone();
                list[i] = json!(1.0);
                json!({ key: list })
            })),
        }
    }
    assert_eq!(singles.len(), 14);
    for single in singles {
        let config = read(&changed(MODELS[1], &single)).unwrap();
        let model =
            Model::<Cpu>::load(models::Config::from(config), weights(MODELS[1]), cpu()).unwrap();
        let got = logits(&model, &ids);
        let largest =
            got.iter().zip(&want).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
        assert!(largest > 10.0 * TOLERANCE, "{single}: {largest}");
    }
}

/// The factor of each row of a parameter, by the formulas of transformers' model.
fn factor(config: &Config, name: &str, row: usize) -> f32 {
    let mixer = &config.mixer;
    let section = || {
        let mut end = 0;
        let ends = mixer.sections().map(|width| {
            end += width;
            end
        });
        mixer.section_scales[ends.iter().position(|&end| row < end).unwrap()]
    };
    let parts: Vec<&str> = name.rsplitn(3, '.').collect();
    match (parts[1], parts[0]) {
        ("embed_tokens", _) => config.embedding_multiplier,
        ("lm_head", _) => config.lm_head_multiplier,
        ("q_proj" | "v_proj", "weight") => config.attention_in_multiplier,
        ("k_proj", "weight") => config.attention_in_multiplier * config.attention.key_scale,
        ("k_proj", "bias") => config.attention.key_scale,
        ("o_proj", _) => config.attention_out_multiplier,
        ("in_proj", "weight") => mixer.in_scale * section(),
        ("in_proj", "bias") => section(),
        ("out_proj", _) => config.ssm_out_multiplier,
        ("gate_proj", _) => config.mlp.gate_scale,
        ("down_proj", _) => config.down_multiplier,
        _ => 1.0,
    }
}

#[test]
fn case_14_multipliers_of_an_input_leave_its_bias_and_those_of_an_output_do_not() {
    let biases = json!({
        "attention_bias": true, "mlp_bias": true, "projectors_bias": true, "mamba_proj_bias": true,
    });
    let mut plain = biases.clone();
    plain.as_object_mut().unwrap().extend(ones().as_object().unwrap().clone());
    let (ids, _) = golden(MODELS[1]);
    for model in MODELS {
        let config = read(&changed(model, &biases)).unwrap();
        let mut random = Random(14);
        let parameters = config.parameters(512, true).unwrap();
        let entries = parameters.iter().map(|(name, shape)| {
            let (center, spread) = match (name.rsplit('.').next().unwrap(), shape) {
                ("A_log", _) => (1.0, 1.0),
                ("dt_bias", _) => (-2.0, 2.0),
                ("bias", _) => (0.0, 0.5),
                (_, [_, columns] | [_, _, columns]) => (0.0, (3.0 / *columns as f32).sqrt()),
                _ => (1.0, 0.5),
            };
            let values = floats(&mut random, shape.iter().product());
            let values: Vec<f32> = values.iter().map(|x| center + spread * x).collect();
            (name.to_owned(), entry(Dtype::F32, shape, &values))
        });
        let scaled = Checkpoint::from_entries("random", entries.collect());
        let folded = crate::tiny::edited(&scaled, |name, old| {
            let mut values = old.to_f32().unwrap();
            let width = values.len() / old.shape[0];
            for (row, values) in values.chunks_exact_mut(width).enumerate() {
                let factor = factor(&config, name, row);
                for x in values {
                    *x *= factor;
                }
            }
            Some(entry(Dtype::F32, &old.shape, &values))
        });
        let load = |config: Config, weights| {
            Model::<Cpu>::load(models::Config::from(config), weights, cpu()).unwrap()
        };
        let want = logits(&load(read(&changed(model, &plain)).unwrap(), folded), &ids);
        close(&logits(&load(config, scaled), &ids), &widened(&want), ROUNDING);
    }
}

#[test]
fn biases_that_gguf_can_hold_go_there_with_their_multipliers() {
    let folder = Folder::new();
    let config = changed(MODELS[0], &json!({ "mlp_bias": true }));
    let mut random = Random(3);
    let good = weights(MODELS[0]);
    let all = read(&config).unwrap().parameters(512, true).unwrap();
    let entries = all.iter().map(|(name, shape)| {
        let biased = || entry(Dtype::F32, shape, &floats(&mut random, shape[0]));
        (name.to_owned(), good.get(name).cloned().unwrap_or_else(biased))
    });
    let weights = Checkpoint::from_entries("biased", entries.collect());
    let source = folder_of(&folder, "source", &config, &weights);
    let there = converted(&source, &folder, "there.gguf", Types::kept());
    let (ids, _) = golden(MODELS[0]);
    let want = widened(&logits(&open(&source).model, &ids));
    close(&logits(&open(&there).model, &ids), &want, ROUNDING);
}

#[test]
fn a_tied_head_with_a_factor_of_its_own_is_written_as_a_tensor_of_its_own() {
    let (ids, _) = golden(MODELS[0]);
    let tied = crate::tiny::edited(&weights(MODELS[0]), |name, entry| {
        (name != "lm_head.weight").then(|| entry.clone())
    });
    for (lm_head, stands_alone) in [(0.8, true), (1.25, false)] {
        let folder = Folder::new();
        let changes = json!({ "tie_word_embeddings": true, "lm_head_multiplier": lm_head });
        let source = folder_of(&folder, "source", &changed(MODELS[0], &changes), &tied);
        let there = converted(&source, &folder, "there.gguf", Types::kept());
        let back = converted(&there, &folder, "back", Types::kept());
        let again = converted(&back, &folder, "again.gguf", Types::kept());
        let want = widened(&logits(&open(&source).model, &ids));
        for path in [&there, &back, &again] {
            close(&logits(&open(path).model, &ids), &want, ROUNDING);
        }
        assert_same_tensors(&there, &again);
        let file = Checkpoint::open(&there, false).unwrap();
        assert_eq!(file.get("output.weight").is_some(), stands_alone);

        let types = Types::kept().with("^token_embd", Dtype::F16).unwrap();
        let file = converted(&source, &folder, "typed.gguf", types);
        let file = Checkpoint::open(&file, false).unwrap();
        let types = ["token_embd.weight", "output.weight"].map(|name| Some(file.get(name)?.dtype));
        assert_eq!(types, [Some(Dtype::F16), stands_alone.then_some(Dtype::F32)]);
    }
}

#[test]
fn quantized_weights_of_gguf_go_on_byte_by_byte() {
    let folder = Folder::new();
    let types = Types::named("q8_0").unwrap();
    let there = converted(&fixture(MODELS[1]), &folder, "there.gguf", types);
    let again = converted(&there, &folder, "again.gguf", Types::kept());
    assert_same_tensors(&there, &again);
}

#[test]
fn case_14_a_file_of_llama_cpp_gives_the_logits_of_the_original() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/gguf/falcon-h1-rms-tiny-f32.gguf");
    let (ids, want) = golden("falcon-h1-rms-tiny");
    let lm = open(&path);
    close(&logits(&lm.model, &ids), &want, TOLERANCE);
    assert_eq!(multipliers(&falcon(lm.model.config())), ones());
    // Ours has the same tensors, but for rounding of the products of factors.
    let folder = Folder::new();
    let ours = converted(&fixture("falcon-h1-rms-tiny"), &folder, "ours.gguf", Types::kept());
    let [ours, theirs] = [ours, path].map(|path| Checkpoint::open(&path, false).unwrap());
    assert_eq!(ours.names().collect::<Vec<_>>(), theirs.names().collect::<Vec<_>>());
    for (name, entry) in ours.iter() {
        let other = theirs.get(name).unwrap();
        assert_eq!(entry.shape, other.shape, "{name}");
        close(&entry.to_f32().unwrap(), &widened(&other.to_f32().unwrap()), 1e-6);
    }
}

#[test]
fn sizes_of_gguf_are_those_of_the_mixer_and_of_attention_each() {
    let folder = Folder::new();
    let config = changed(MODELS[0], &json!({ "rope_theta": 1e11 }));
    let source = folder_of(&folder, "source", &config, &weights(MODELS[0]));
    let there = converted(&source, &folder, "there.gguf", Types::kept());
    let file = Checkpoint::open(&there, false).unwrap();
    let metadata = file.gguf().unwrap();
    for (key, size) in [
        ("ssm.time_step_rank", 6),
        ("ssm.inner_size", 96),
        ("ssm.group_count", 1),
        ("ssm.state_size", 32),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("rope.dimension_count", 16),
        ("feed_forward_length", 160),
        ("vocab_size", 512),
    ] {
        let found = metadata.usize(&format!("falcon-h1.{key}"), 0..=1 << 20).unwrap();
        assert_eq!(found, Some(size), "{key}");
    }
    assert!(file.get("blk.0.ffn_norm").is_some() && file.get("blk.0.ssm_norm.weight").is_none());
    let back = converted(&there, &folder, "back", Types::kept());
    for path in [&source, &there, &back] {
        let config = falcon(open(path).model.config());
        assert_eq!(config.attention.rope.unwrap().theta, 1e11, "{}", path.display());
        assert!(!config.mixer.rms_norm && config.mixer.nheads == 6);
    }
}

#[test]
fn a_mixer_is_described_in_more_than_one_way() {
    let want = read(&changed(MODELS[0], &json!({}))).unwrap();
    for changes in [
        json!({ "mamba_d_head": "auto" }),
        json!({ "mamba_d_ssm": null, "mamba_expand": 1, "hidden_size": 96 }),
        // Without a norm there is nothing before or after it.
        json!({ "mamba_norm_before_gate": true }),
        json!({ "mamba_norm_before_gate": null }),
        json!({ "time_step_limit": [0.0, "inf"] }),
    ] {
        let config = read(&changed(MODELS[0], &changes)).unwrap();
        let d_model = config.mixer.d_model;
        let mixer = boostr::nn::MixerConfig { d_model: want.mixer.d_model, ..config.mixer };
        assert_eq!(mixer, want.mixer, "{changes}");
        assert_eq!(d_model, changes["hidden_size"].as_u64().unwrap_or(64) as usize);
    }
    let plain = json!({ "ssm_multipliers": null, "mlp_multipliers": null });
    let config = read(&changed(MODELS[0], &plain)).unwrap();
    assert_eq!((config.mixer.section_scales, config.down_multiplier), ([1.0; 5], 1.0));
    let before = json!({ "mamba_norm_before_gate": null });
    // As in Python, where it is neither true.
    assert!(!read(&changed(MODELS[1], &before)).unwrap().mixer.norm_before_gate);
}

#[test]
fn what_a_configuration_cannot_mean_is_refused_by_field_and_numbers() {
    for (changes, texts) in [
        (json!({ "mamba_n_heads": 5 }), ["mamba_n_heads", "5 heads of 16", "96"]),
        (json!({ "mamba_d_head": 32 }), ["mamba_n_heads", "6 heads of 32", "96"]),
        (json!({ "mamba_d_head": "wide" }), ["mamba_d_head", "auto", "wide"]),
        (json!({ "mamba_d_head": null }), ["mamba_d_head", "missing", "null"]),
        (json!({ "mamba_d_head": u64::MAX }), ["mamba_n_heads", "6 heads of", "96"]),
        (json!({ "ssm_multipliers": [1, 1, 1, 1] }), ["ssm_multipliers", "expected 5", "found 4"]),
        (json!({ "mlp_multipliers": [1, 1, 1] }), ["mlp_multipliers", "expected 2", "found 3"]),
        (json!({ "mlp_multipliers": [1, "NaN"] }), ["mlp_multipliers", "finite", "NaN"]),
        (json!({ "key_multiplier": "Infinity" }), ["key_multiplier", "a number", "Infinity"]),
        (json!({ "hidden_act": "gelu" }), ["hidden_act", "silu", "gelu"]),
        (json!({ "num_key_value_heads": 3 }), ["num_key_value_heads", "3", "4 heads"]),
        (json!({ "mamba_n_groups": 4 }), ["n_groups", "4 groups", "6 heads"]),
        (json!({ "mamba_d_conv": 0 }), ["mamba_d_conv", "1", "0"]),
        (json!({ "mamba_n_heads": null }), ["mamba_n_heads", "missing", "config.json"]),
    ] {
        let text = message(&read(&changed(MODELS[0], &changes)).unwrap_err());
        assert!(texts.iter().all(|part| text.contains(part)), "{changes}: {text}");
    }
}

#[test]
fn what_gguf_or_its_readers_cannot_do_is_refused_by_name() {
    let write = |changes: &Value| {
        let config = read(&changed(MODELS[1], changes)).unwrap();
        config.gguf_layout(512, true).and_then(|_| config.write_gguf(&mut Metadata::new("m")))
    };
    for (changes, text) in [
        (json!({ "attention_bias": true }), "o_proj"),
        (json!({ "projectors_bias": true }), "out_proj.bias"),
        (json!({ "mamba_proj_bias": true }), "in_proj.bias"),
        (json!({ "mamba_norm_before_gate": true }), "before the gate"),
        (json!({ "time_step_limit": [0.001, "inf"] }), "limits of the steps"),
        (
            json!({ "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            } }),
            "single frequencies",
        ),
        (json!({ "rope_scaling": { "rope_type": "dynamic", "factor": 2.0 } }), "NTK"),
    ] {
        let error = message(&write(&changes).unwrap_err());
        assert!(error.contains(text) && error.contains("GGUF"), "{changes}: {error}");
    }
    let linear = json!({ "rope_scaling": { "rope_type": "linear", "factor": 2.0 } });
    assert!(write(&linear).is_ok() && write(&json!({})).is_ok());
    let some = Config {
        attention: boostr::nn::AttentionConfig {
            out_bias: true,
            ..read(&changed(MODELS[0], &json!({}))).unwrap().attention
        },
        ..read(&changed(MODELS[0], &json!({}))).unwrap()
    };
    assert!(message(&some.to_json().unwrap_err()).contains("all or none"));
}

#[test]
fn weights_of_another_shape_are_named_with_both_shapes() {
    let config = read(&changed(MODELS[0], &json!({ "mamba_d_state": 16 }))).unwrap();
    let error = Model::<Cpu>::load(models::Config::from(config), weights(MODELS[0]), cpu());
    let text = message(&error.err().unwrap());
    let expected = "`model.layers.0.mamba.conv1d.bias` [160], expected [128]";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn what_follows_from_the_configuration_may_be_in_the_file() {
    let mut more = weights(MODELS[0]);
    let mut tensors: std::collections::BTreeMap<_, _> =
        more.iter().map(|(name, entry)| (name.to_owned(), entry.clone())).collect();
    for name in ["model.layers.1.mamba.mup_vector", "model.rotary_emb.inv_freq"] {
        tensors.insert(name.into(), entry(Dtype::F32, &[3], &[7.0; 3]));
    }
    more.replace(tensors);
    let config = models::Config::from(read(&changed(MODELS[0], &json!({}))).unwrap());
    let (ids, want) = golden(MODELS[0]);
    let model = Model::<Cpu>::load(config, more, cpu()).unwrap();
    close(&logits(&model, &ids), &want, TOLERANCE);
}
