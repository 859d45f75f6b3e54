//! Models with gated delta mixers, Qwen3.5 and OLMo-Hybrid: their configurations, their files, what each option does.
//! Ids in names: `fixtures/CASES.md`.

use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};

use crate::common::{Folder, cpu, delta_models};
use crate::tiny::{self, close, edited, entry, fixture, message, random, renamed, run, save};
use boostr::backend::Cpu;
use boostr::checkpoint::{Checkpoint, ConfigFile, Dtype};
use boostr::convert::{Options, Types, convert};
use boostr::load::{LanguageModel, OpenOptions};
use boostr::models::{self, Model, qwen3_5};
use boostr::nn::AttentionConfig;
use serde_json::{Value, json};

const QWEN: &str = "qwen3_5-tiny";
const OLMO: &str = "olmo-hybrid-tiny";
/// The bound that the fixtures suggest for f32.
const TOLERANCE: f64 = 2e-4;

fn open(path: &Path) -> LanguageModel<Cpu> {
    LanguageModel::open(path, &Default::default(), cpu()).unwrap()
}

fn converted(source: &Path, folder: &Folder, name: &str, types: Types) -> PathBuf {
    let out = folder.path().join(name);
    let options = Options { types, ..Options::default() };
    convert(source, &out, &options, &mut |_, _| Continue(())).unwrap();
    out
}

fn config(model: &str) -> Value {
    let text = std::fs::read_to_string(fixture(model).join("config.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The configuration of a fixture with `changes`.
fn changed(model: &str, changes: &Value) -> Value {
    let mut config = config(model);
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    config
}

/// Qwen's flat configuration with `changes`.
fn flat(changes: &Value) -> Value {
    let mut config = config(QWEN)["text_config"].clone();
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    config
}

fn weights(model: &str) -> Checkpoint {
    Checkpoint::open(&fixture(model).join("model.safetensors"), false).unwrap()
}

fn load(config: &Value, weights: Checkpoint) -> boostr::Result<Model<Cpu>> {
    let file = ConfigFile::parse("config.json", &config.to_string())?;
    Model::load(models::Config::read(&file)?, weights, cpu())
}

fn golden(model: &str) -> (Vec<u32>, Vec<f64>) {
    let file = Checkpoint::open(&fixture(model).join("golden.safetensors"), false).unwrap();
    let data = |name| file.get(name).unwrap().data.as_chunks::<8>().0.to_vec();
    let ids = data("input_ids").into_iter().map(|b| i64::from_le_bytes(b) as u32).collect();
    (ids, data("logits_f64").into_iter().map(f64::from_le_bytes).collect())
}

fn logits(model: &Model<Cpu>, ids: &[u32]) -> Vec<f32> {
    run(model, ids, &[ids.len()], &mut model.new_state().unwrap())
}

/// The largest difference between two models' logits.
fn apart(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |most, (a, b)| most.max((a - b).abs()))
}

/// The parameters of a file under the model's own names.
fn parameters(path: &Path) -> Checkpoint {
    let file = open(path);
    let mut checkpoint = Checkpoint::open(path, false).unwrap();
    file.model.config().prepare(&mut checkpoint).unwrap();
    checkpoint
}

#[test]
fn d_12_files_of_llama_cpp_have_the_originals_logits_and_so_have_ours() {
    let (ids, want) = golden(QWEN);
    let theirs =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/gguf/qwen3_5-tiny.gguf");
    let from_folder = logits(&open(&fixture(QWEN)).model, &ids);
    close(&logits(&open(&theirs).model, &ids), &want, TOLERANCE);

    let folder = Folder::new();
    let there = converted(&fixture(QWEN), &folder, "there.gguf", Types::kept());
    let back = converted(&there, &folder, "back", Types::kept());
    let again = converted(&back, &folder, "again.gguf", Types::kept());
    close(&logits(&open(&there).model, &ids), &want, TOLERANCE);
    assert!(logits(&open(&back).model, &ids) == from_folder);
    let [ours, twice, theirs] =
        [&there, &again, &theirs].map(|path| Checkpoint::open(path, false).unwrap());
    for (name, entry) in ours.iter() {
        let [twice, theirs] =
            [&twice, &theirs].map(|file| file.get(name).unwrap_or_else(|| panic!("{name}")));
        assert_eq!((entry.dtype, &entry.shape), (theirs.dtype, &theirs.shape), "{name}");
        assert_eq!((entry.dtype, &*entry.data), (twice.dtype, &*twice.data), "{name}");
        // Rates are computed; all else is moved, or one more.
        if name.ends_with("ssm_a") {
            let theirs: Vec<f64> = theirs.to_f32().unwrap().into_iter().map(f64::from).collect();
            close(&entry.to_f32().unwrap(), &theirs, 1e-6);
        } else {
            assert_eq!(*entry.data, *theirs.data, "{name}");
        }
    }
    // Norms lose the bits that one more has no room for; all else comes back.
    let [first, last] = [&fixture(QWEN), &back].map(|path| parameters(path));
    assert_eq!(first.names().collect::<Vec<_>>(), last.names().collect::<Vec<_>>());
    for (name, entry) in first.iter() {
        let last = last.get(name).unwrap();
        if name.ends_with("norm.weight") && !name.ends_with("linear_attn.norm.weight") {
            assert!(apart(&entry.to_f32().unwrap(), &last.to_f32().unwrap()) < 1e-7, "{name}");
        } else {
            assert_eq!(*entry.data, *last.data, "{name}");
        }
    }
}

#[test]
fn d_6_tensors_that_predict_more_than_the_next_token_change_no_logits() {
    let (ids, _) = golden(QWEN);
    let file = weights(QWEN);
    let want = logits(&load(&config(QWEN), file.clone()).unwrap(), &ids);
    assert!(file.names().any(|name| name.starts_with("mtp.")));
    let without = edited(&file, |name, entry| (!name.starts_with("mtp.")).then(|| entry.clone()));
    assert!(logits(&load(&config(QWEN), without.clone()).unwrap(), &ids) == want);
    let no_pictures =
        edited(&without, |name, entry| (!name.contains(".visual.")).then(|| entry.clone()));
    assert!(logits(&load(&config(QWEN), no_pictures).unwrap(), &ids) == want);
    // In GGUF it is a block more.
    let gguf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/gguf/qwen3_5-tiny.gguf");
    let theirs = open(&gguf);
    assert_eq!(theirs.model.family().layers().len(), 4);
    let folder = Folder::new();
    let kept = converted(&gguf, &folder, "kept.gguf", Types::kept());
    assert!(logits(&open(&kept).model, &ids) == logits(&theirs.model, &ids));
    let names = Checkpoint::open(&kept, false).unwrap();
    assert!(names.names().all(|name| !name.starts_with("blk.4.")));
}

#[test]
fn a_line_tells_of_the_tensors_of_pictures_and_none_where_there_are_none() {
    let warnings = open(&fixture(QWEN)).warnings;
    let line = "4 tensors of the vision tower are not read: text only";
    assert_eq!(warnings.iter().filter(|warning| *warning == line).count(), 1, "{warnings:?}");
    assert!(open(&fixture(OLMO)).warnings.iter().all(|line| !line.contains("vision")));
}

#[test]
fn d_10_a_part_of_each_head_rotates_also_with_sections_for_pictures() {
    let (ids, want) = golden(QWEN);
    let with = |partial: f32| {
        let mut config = config(QWEN);
        config["text_config"]["rope_parameters"]["partial_rotary_factor"] = json!(partial);
        let sections = json!([2, 1, 1]);
        config["text_config"]["rope_parameters"]["mrope_section"] = sections;
        load(&config, weights(QWEN)).unwrap()
    };
    let model = with(0.25);
    let layers = model.family().layers();
    let attention = layers[3].part::<AttentionConfig>().unwrap();
    assert_eq!((attention.headdim, attention.rope.as_ref().unwrap().rotary_dim), (32, 8));
    close(&logits(&model, &ids), &want, TOLERANCE);
    let whole: Vec<f32> = want.iter().map(|&x| x as f32).collect();
    assert!(apart(&logits(&with(1.0), &ids), &whole) > 0.1);
}

#[test]
fn d_11_flat_and_nested_configurations_are_one_model_under_any_prefix() {
    let (ids, _) = golden(QWEN);
    let nested = load(&config(QWEN), weights(QWEN)).unwrap();
    let want = logits(&nested, &ids);
    let text = edited(&weights(QWEN), |name, entry| {
        name.starts_with("model.language_model.").then(|| entry.clone())
    });
    for prefix in ["model.language_model.", "model.", ""] {
        let weights = renamed(&text, |name| name.replace("model.language_model.", prefix));
        for config in [config(QWEN), flat(&json!({})), flat(&json!({ "model_type": "qwen3_5" }))] {
            let model = load(&config, weights.clone()).unwrap();
            assert_eq!(model.config(), nested.config());
            assert!(logits(&model, &ids) == want, "{prefix:?}");
        }
    }
    assert_eq!(nested.trained_length(), Some(2048));
    // The flag that ties stands at the top, in the text's part, or in both.
    for (top, of_text) in [(true, false), (false, true), (true, true)] {
        let mut config = changed(QWEN, &json!({ "tie_word_embeddings": top }));
        config["text_config"]["tie_word_embeddings"] = json!(of_text);
        assert!(logits(&load(&config, text.clone()).unwrap(), &ids) == want);
    }
    let error = load(&flat(&json!({ "tie_word_embeddings": false })), text).err().unwrap();
    assert!(message(&error).contains("missing: `lm_head.weight`"), "{}", message(&error));
}

#[test]
fn d_11_a_width_that_contradicts_a_tensor_is_named_with_both_shapes() {
    for (changes, expected) in [
        (json!({ "linear_num_value_heads": 4 }), "A_log` [6], expected [4]"),
        (json!({ "linear_value_head_dim": 8 }), "[160, 1, 4], expected [112, 1, 4]"),
        (
            json!({ "linear_conv_kernel_dim": 3 }),
            "conv1d.weight` [160, 1, 4], expected [160, 1, 3]",
        ),
        (json!({ "head_dim": 16 }), "k_norm.weight` [32], expected [16]"),
        (json!({ "linear_num_value_heads": 5 }), "5 value heads are no multiple of 2 key heads"),
        (json!({ "linear_num_value_heads": null }), "linear_num_value_heads"),
        (json!({ "attn_output_gate": false }), "attn_output_gate"),
        (json!({ "hidden_act": "gelu" }), "hidden_act"),
        (json!({ "attention_bias": true }), "missing"),
        (json!({ "layer_types": ["full_attention"] }), "1 layers, but num_hidden_layers is 4"),
        (json!({ "layer_types": ["full_attention", "mamba", "mamba", "mamba"] }), "\"mamba\""),
    ] {
        let text = message(&load(&flat(&changes), weights(QWEN)).err().unwrap());
        assert!(text.contains(expected), "{changes}: {text}");
    }
}

#[test]
fn the_layout_of_mlx_is_refused_by_name() {
    let mlx = edited(&weights(QWEN), |name, old| {
        let mut entry = old.clone();
        if name.ends_with("conv1d.weight") {
            entry.shape = vec![160, 4, 1];
        }
        Some(entry)
    });
    let text = message(&load(&config(QWEN), mlx).err().unwrap());
    assert!(text.contains("conv1d.weight` [160, 4, 1] is in the layout of MLX"), "{text}");
}

#[test]
fn layers_follow_their_list_or_an_interval() {
    let kinds = |changes: &Value| -> Vec<bool> {
        let mut config = flat(changes);
        config
            .as_object_mut()
            .unwrap()
            .retain(|key, _| key != "layer_types" || changes.get(key).is_some());
        let file = ConfigFile::parse("config.json", &config.to_string()).unwrap();
        let config = models::Config::read(&file).unwrap();
        config.get::<qwen3_5::Config>().unwrap().hybrid.is_attention.clone()
    };
    assert_eq!(kinds(&json!({ "full_attention_interval": null })), [false, false, false, true]);
    assert_eq!(kinds(&json!({ "full_attention_interval": 2 })), [false, true, false, true]);
    let list = ["full_attention", "linear_attention", "linear_attention", "full_attention"];
    assert_eq!(kinds(&json!({ "layer_types": list })), [true, false, false, true]);
}

#[test]
fn d_19_negative_eigenvalues_are_allowed_or_not() {
    let (ids, want) = golden(OLMO);
    let of = |allowed: bool| {
        let config = changed(OLMO, &json!({ "linear_allow_neg_eigval": allowed }));
        logits(&load(&config, weights(OLMO)).unwrap(), &ids)
    };
    close(&of(true), &want, TOLERANCE);
    assert!(apart(&of(true), &of(false)) > 0.1);
}

#[test]
fn d_20_a_base_of_positions_is_null_missing_or_a_number() {
    let (ids, want) = golden(OLMO);
    let of = |parameters: Option<Value>| {
        let mut config = config(OLMO);
        let fields = config.as_object_mut().unwrap();
        fields.remove("rope_parameters");
        fields.extend(parameters.map(|value| ("rope_parameters".to_owned(), value)));
        load(&config, weights(OLMO)).unwrap()
    };
    let theta = |model: &Model<Cpu>| {
        let layers = model.family().layers();
        layers[3].part::<AttentionConfig>().unwrap().rope.as_ref().map(|rope| rope.theta)
    };
    let none = of(Some(json!({ "rope_theta": null })));
    assert_eq!(theta(&none), None);
    close(&logits(&none, &ids), &want, TOLERANCE);
    for absent in [None, Some(Value::Null)] {
        let model = of(absent);
        assert_eq!(theta(&model), Some(10_000.0));
        assert!(apart(&logits(&model, &ids), &logits(&none, &ids)) > 0.1);
    }
    assert_eq!(theta(&of(Some(json!({ "rope_theta": 5e5, "rope_type": "default" })))), Some(5e5));
    // What is written says the same.
    for model in [none, of(None)] {
        let written = model.family().to_json().unwrap();
        let mut all = written.as_object().unwrap().clone();
        all.extend([
            ("vocab_size".to_owned(), json!(512)),
            ("tie_word_embeddings".to_owned(), json!(false)),
        ]);
        let again = load(&Value::Object(all), weights(OLMO)).unwrap();
        assert_eq!(again.config(), model.config());
    }
}

#[test]
fn olmo_hybrid_as_transformers_5_saves_it_is_the_same_model_and_has_no_gguf() {
    let (ids, want) = golden(OLMO);
    let file = weights(OLMO);
    let joined = |layer: &str| {
        let parts = ["q", "k", "v"].map(|part| {
            let name = format!("model.layers.{layer}.linear_attn.{part}_conv1d.weight");
            file.get(&name).unwrap().to_f32().unwrap()
        });
        entry(Dtype::F32, &[128, 1, 4], &parts.concat())
    };
    let tensors = file.iter().filter_map(|(name, tensor)| {
        let mixer = |name: &str| {
            ["0", "1", "2"].into_iter().find(|i| name.starts_with(&format!("model.layers.{i}.")))
        };
        let Some(layer) = mixer(name) else { return Some((name.to_owned(), tensor.clone())) };
        if name.ends_with("q_conv1d.weight") {
            return Some((name.replace("q_conv1d", "conv1d"), joined(layer)));
        }
        let name = name
            .replace("attention_layer_norm", "input_layernorm")
            .replace("feedforward_layer_norm", "post_attention_layernorm");
        (!name.contains("_conv1d")).then(|| (name, tensor.clone()))
    });
    let saved = Checkpoint::from_entries("saved", tensors.collect());
    let model = load(&config(OLMO), saved).unwrap();
    close(&logits(&model, &ids), &want, TOLERANCE);

    let folder = Folder::new();
    let out = folder.path().join("m.gguf");
    let refused = convert(&fixture(OLMO), &out, &Options::default(), &mut |_, _| Continue(()));
    let text = message(&refused.err().unwrap());
    assert!(text.contains("GGUF has no architecture for olmo_hybrid"), "{text}");
    let copy = converted(&fixture(OLMO), &folder, "copy", Types::kept());
    assert!(logits(&open(&copy).model, &ids) == logits(&open(&fixture(OLMO)).model, &ids));
    let [first, copy] = [&fixture(OLMO), &copy]
        .map(|path| Checkpoint::open(&path.join("model.safetensors"), false).unwrap());
    for (name, entry) in first.iter() {
        assert_eq!(*entry.data, *copy.get(name).unwrap_or_else(|| panic!("{name}")).data, "{name}");
    }
}

#[test]
fn d_25_weights_of_16_bits_run_as_those_of_32() {
    for name in delta_models() {
        let (ids, _) = golden(name);
        for dtype in [Dtype::BF16, Dtype::F16] {
            let rounded = tiny::converted(&weights(name), dtype);
            let widened = tiny::converted(&rounded, Dtype::F32);
            let [narrow, wide] = [rounded, widened].map(|all| load(&config(name), all).unwrap());
            let whole = logits(&narrow, &ids);
            let want: Vec<f64> = logits(&wide, &ids).into_iter().map(f64::from).collect();
            close(&whole, &want, TOLERANCE);
            let (singles, mut state) = (vec![1; ids.len()], narrow.new_state().unwrap());
            assert!(run(&narrow, &ids, &singles, &mut state) == whole, "{name}");
        }
    }
}

/// A model of two layers of width 256, whose value heads of 128 share blocks of 256 in pairs.
fn wide(folder: &Folder) -> PathBuf {
    let config = flat(&json!({
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2,
        "head_dim": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }));
    let file = ConfigFile::parse("config.json", &config.to_string()).unwrap();
    let read = models::Config::read(&file).unwrap();
    let tensors = read.family().parameters(512, false).unwrap();
    let out = folder.path().join("wide");
    std::fs::create_dir(&out).unwrap();
    std::fs::write(out.join("config.json"), config.to_string()).unwrap();
    std::fs::copy(fixture(QWEN).join("tokenizer.json"), out.join("tokenizer.json")).unwrap();
    save(&out.join("model.safetensors"), &random(&tensors, 77));
    out
}

#[test]
fn d_12_heads_that_share_quantized_blocks_keep_their_order_whole_or_decoded() {
    let folder = Folder::new();
    let source = wide(&folder);
    let ids: Vec<u32> = (0..40).map(|i| i * 37 % 500).collect();
    let largest = |all: &[f32]| all.iter().fold(0f32, |most, x| most.max(x.abs()));
    let want = logits(&open(&source).model, &ids);
    for (name, bound) in [("q8_0", 0.15), ("q4_k_m", 0.6)] {
        let file =
            converted(&source, &folder, &format!("{name}.gguf"), Types::named(name).unwrap());
        let lm = open(&file);
        let got = logits(&lm.model, &ids);
        assert!(apart(&got, &want) < bound * largest(&want), "{name}: {}", apart(&got, &want));
        let singles = vec![1; ids.len()];
        assert_eq!(
            run(&lm.model, &ids, &singles, &mut lm.model.new_state().unwrap()),
            got,
            "{name}"
        );
        // The same blocks decoded, whose columns move to their places.
        let options = OpenOptions { exact: true, ..Default::default() };
        let exact = LanguageModel::<Cpu>::open(&file, &options, cpu()).unwrap();
        let decoded = logits(&exact.model, &ids);
        assert!(apart(&got, &decoded) < 0.1 * largest(&want), "{name}: {}", apart(&got, &decoded));
        let back = converted(&file, &folder, &format!("{name}-back"), Types::kept());
        assert!(
            apart(&logits(&open(&back).model, &ids), &decoded) < 1e-3 * largest(&want),
            "{name}"
        );
        let kept = converted(&file, &folder, &format!("{name}-kept.gguf"), Types::kept());
        assert!(logits(&open(&kept).model, &ids) == got, "{name}");
    }
}
