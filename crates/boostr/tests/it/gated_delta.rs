//! Models with gated delta mixers, Qwen3.5 and OLMo-Hybrid: their configurations, their files, what each option does.
//! Ids in names: `fixtures/CASES.md`.

use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};

use crate::common::{Folder, cpu, delta_models};
use crate::golden::states;
use crate::tiny::{
    self, close, edited, entry, fixture, message, renamed, run, save, wide, widened,
};
use boostr::backend::Cpu;
use boostr::checkpoint::{Checkpoint, ConfigFile, Dtype, gguf};
use boostr::convert::{Options, Types, convert};
use boostr::load::{LanguageModel, OpenOptions};
use boostr::models::{self, Logits, Model, Run, State, qwen3_5};
use boostr::nn::AttentionConfig;
use boostr::ops::{RopeScaling, to_vec};
use boostr::threads::Threads;
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
    assert!(ours.names().eq(theirs.names()));
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
    assert!(names.get("blk.4.nextn.eh_proj.weight").is_some());
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
    assert_eq!(kinds(&json!({ "full_attention_interval": 4 })), [false, false, false, true]);
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

/// What a configuration reads as.
fn read(config: &Value) -> boostr::Result<models::Config> {
    models::Config::read(&ConfigFile::parse("config.json", &config.to_string())?)
}

/// OLMo's configuration without what it says of positions and layers, with `changes`.
fn bare_olmo(changes: &Value) -> Value {
    let mut config = config(OLMO);
    let fields = config.as_object_mut().unwrap();
    fields.retain(|key, _| !["rope_parameters", "layer_types"].contains(&key.as_str()));
    fields.extend(changes.as_object().unwrap().clone());
    config
}

#[test]
fn a_null_base_counts_where_it_is_stated_and_is_no_number_for_qwen() {
    let olmo = |changes: Value| {
        let config = read(&bare_olmo(&changes)).unwrap();
        let layers = config.family().layers();
        layers[3].part::<AttentionConfig>().unwrap().rope.as_ref().map(|rope| rope.theta)
    };
    for (changes, theta) in [
        (json!({ "rope_theta": null }), None),
        (json!({ "rope_theta": null, "rope_parameters": { "rope_type": "default" } }), None),
        (json!({ "rope_theta": 5e5, "rope_parameters": { "rope_theta": null } }), None),
        (json!({ "rope_theta": null, "rope_parameters": { "rope_theta": 5e5 } }), Some(5e5)),
        (json!({ "rope_theta": 5e5 }), Some(5e5)),
        (json!({}), Some(10_000.0)),
        (json!({ "partial_rotary_factor": 1.0 }), Some(10_000.0)),
        (json!({ "rope_theta": null, "partial_rotary_factor": 0.5 }), None),
    ] {
        assert_eq!(olmo(changes.clone()), theta, "{changes}");
    }
    for (changes, named) in [
        (json!({ "rope_parameters": { "rope_theta": null } }), "rope_parameters.rope_theta"),
        (json!({ "rope_theta": null, "rope_parameters": null }), "`rope_theta`"),
        (json!({ "rope_theta": null, "rope_parameters": {} }), "`rope_theta`"),
    ] {
        let text = message(&read(&flat(&changes)).unwrap_err());
        assert!(text.contains(named) && text.contains("expected a number"), "{changes}: {text}");
    }
    // A configuration without positions can still be written, and says so.
    let without = read(&config(QWEN)).unwrap();
    let mut without = without.get::<qwen3_5::Config>().unwrap().clone();
    without.hybrid.attention.rope = None;
    let json = models::Config::from(without).family().to_json().unwrap();
    assert_eq!(json["rope_parameters"]["rope_theta"], Value::Null);
}

#[test]
fn olmo_hybrid_rotates_whole_heads_and_has_layers_of_both_kinds() {
    for (changes, named) in [
        (json!({ "partial_rotary_factor": 0.5 }), "`partial_rotary_factor`: expected 1, found 0.5"),
        (
            json!({ "rope_parameters": { "rope_theta": 1e4, "partial_rotary_factor": 0.25 } }),
            "`rope_parameters.partial_rotary_factor`: expected 1, found 0.25",
        ),
        (json!({ "attn_rotary_emb": 4 }), "`attn_rotary_emb`: expected 8, found 4"),
        (json!({ "layer_types": vec!["linear_attention"; 4] }), "one or more of full_attention"),
        (json!({ "layer_types": vec!["full_attention"; 4] }), "one or more of linear_attention"),
        (json!({ "num_hidden_layers": 1 }), "one or more of linear_attention"),
    ] {
        let text = message(&read(&bare_olmo(&changes)).unwrap_err());
        assert!(text.contains(named), "{changes}: {text}");
    }
    for (n_layer, attention) in [(2, vec![1]), (3, vec![2]), (4, vec![3]), (9, vec![3, 7])] {
        let config = read(&bare_olmo(&json!({ "num_hidden_layers": n_layer }))).unwrap();
        let config = config.get::<models::olmo_hybrid::Config>().unwrap();
        let found: Vec<_> = (0..n_layer).filter(|&layer| config.is_attention[layer]).collect();
        assert_eq!(found, attention);
    }
}

#[test]
fn what_a_file_does_not_say_is_that_of_the_family_whatever_its_text_is_called() {
    // The context that a scaling starts from.
    let scaling = json!({ "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4 });
    let start = |mut config: Value, place: &str| {
        let fields = config.pointer_mut(place).unwrap().as_object_mut().unwrap();
        fields.remove("max_position_embeddings");
        fields.insert("rope_parameters".into(), scaling.clone());
        let layers = read(&config).unwrap().family().layers();
        let attention = layers.iter().find_map(|layer| layer.part::<AttentionConfig>()).unwrap();
        match &attention.rope.as_ref().unwrap().scaling {
            RopeScaling::Yarn(yarn) => yarn.original_max,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(start(config(OLMO), ""), 65_536);
    assert_eq!(start(config("qwen3next-tiny"), ""), 32_768);
    assert_eq!(start(config(QWEN), "/text_config"), 32_768);
    assert_eq!(start(config("qwen3_5-moe-tiny"), "/text_config"), 32_768);
    // Heads of keys and values, and the width of a head.
    for text_type in [json!("qwen3_5_text"), Value::Null, json!("qwen2"), json!("qwen3_5_moe_text")]
    {
        let mut config = config(QWEN);
        let text = config["text_config"].as_object_mut().unwrap();
        text.retain(|key, _| !["head_dim", "num_key_value_heads", "model_type"].contains(&&**key));
        text.insert("num_attention_heads".into(), json!(8));
        if !text_type.is_null() {
            text.insert("model_type".into(), text_type.clone());
        }
        let config = read(&config).unwrap();
        let attention = &config.get::<qwen3_5::Config>().unwrap().hybrid.attention;
        assert_eq!((attention.headdim, attention.nheads_kv), (256, 4), "{text_type}");
    }
}

#[test]
fn lists_of_a_gguf_file_have_a_number_for_each_layer_and_pairs_that_there_are() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file =
        Checkpoint::open(&path.join("../../fixtures/gguf/qwen3_5-tiny.gguf"), false).unwrap();
    let with = |key: &str, value: gguf::Value| {
        let mut metadata = file.gguf().unwrap().clone();
        metadata.set(format!("qwen35.{key}"), value);
        models::Config::read_gguf(&file, &metadata)
    };
    let key = "rope.dimension_sections";
    for good in [&[2i32, 1, 1, 0][..], &[0, 4, 0]] {
        let config = with(key, good.into()).unwrap();
        let found = config.get::<qwen3_5::Config>().unwrap().mrope_section;
        assert!(found.iter().zip(good).all(|(&found, &good)| found == good as usize));
    }
    for bad in
        [&[2i32, 2][..], &[4], &[-1, 2, 2, 0], &[5, 0, 0, 0], &[1, 1, 1, 5], &[1, 1, 1, 0, 0]]
    {
        let text = message(&with(key, bad.into()).unwrap_err());
        assert!(text.contains(key) && text.contains("from 0 to 4"), "{bad:?}: {text}");
    }
    let key = "attention.recurrent_layers";
    let layers = [true, true, true, false, true, true];
    let blocks = file.gguf().unwrap().usize("qwen35.block_count", 0..=9).unwrap().unwrap();
    for count in 0..=6 {
        let found = with(key, layers[..count].into());
        if count == 4 || count == blocks {
            let config = found.unwrap();
            let hybrid = &config.get::<qwen3_5::Config>().unwrap().hybrid;
            assert_eq!(hybrid.is_attention, [false, false, false, true]);
        } else {
            let text = message(&found.unwrap_err());
            let said = format!("truth values, found {count}");
            assert!(text.contains(key) && text.contains(&said), "{text}");
        }
    }
}

#[test]
fn a_joined_tensor_of_another_shape_is_named_with_both() {
    let joined = edited(&weights(OLMO), |name, old| {
        let kept = !name.contains("_conv1d.") || name.contains("q_conv1d");
        kept.then(|| old.clone())
    });
    let joined = renamed(&joined, |name| name.replace("q_conv1d", "conv1d"));
    let text = message(&load(&config(OLMO), joined).err().unwrap());
    let said = "linear_attn.conv1d.weight` [32, 1, 4], expected [128, 1, 4]";
    assert!(text.contains(said), "{text}");
}

#[test]
fn a_decay_so_slow_that_its_rate_is_zero_comes_back_from_gguf() {
    let slow = tiny::with(&weights(QWEN), "A_log", |_| -110.0);
    let folder = Folder::new();
    let source = folder.path().join("slow");
    std::fs::create_dir(&source).unwrap();
    for file in ["config.json", "tokenizer.json"] {
        std::fs::copy(fixture(QWEN).join(file), source.join(file)).unwrap();
    }
    save(&source.join("model.safetensors"), &slow);
    let (ids, _) = golden(QWEN);
    let want = logits(&open(&source).model, &ids);
    assert!(want.iter().all(|x| x.is_finite()));
    let file = converted(&source, &folder, "slow.gguf", Types::kept());
    let rates =
        Checkpoint::open(&file, false).unwrap().get("blk.0.ssm_a").unwrap().to_f32().unwrap();
    assert!(rates.iter().all(|rate| *rate == 0.0));
    close(&logits(&open(&file).model, &ids), &widened(&want), TOLERANCE);
    let back = converted(&file, &folder, "back", Types::kept());
    assert_eq!(logits(&open(&back).model, &ids), want);
    // Rates of another program's file, of whose logarithms nothing is kept.
    let rate = boostr::nn::log_of_rate(-0.0);
    assert!(rate.is_finite() && boostr::nn::decay_rate(rate) == 0.0);
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

#[test]
fn d_12_heads_that_share_quantized_blocks_keep_their_order_whole_or_decoded() {
    let folder = Folder::new();
    let source = wide(&folder);
    let ids: Vec<u32> = (0..40).map(|i| i * 37 % 500).collect();
    for (name, bound) in [("q8_0", 0.03), ("q4_k_m", 0.4)] {
        let file =
            converted(&source, &folder, &format!("{name}.gguf"), Types::named(name).unwrap());
        let lm = open(&file);
        let got = logits(&lm.model, &ids);
        let singles = vec![1; ids.len()];
        let mut state = lm.model.new_state().unwrap();
        assert_eq!(run(&lm.model, &ids, &singles, &mut state), got, "{name}");
        // The same blocks decoded, whose columns move to their places.
        let options = OpenOptions { exact: true, ..Default::default() };
        let exact = LanguageModel::<Cpu>::open(&file, &options, cpu()).unwrap();
        let decoded = logits(&exact.model, &ids);
        let back = converted(&file, &folder, &format!("{name}-back"), Types::kept());
        let floats = logits(&open(&back).model, &ids);
        close(&floats, &widened(&decoded), 1e-5);
        // Activations are rounded to 8 bits in each of ten products on the way.
        let largest = decoded.iter().fold(0f32, |most, x| most.max(x.abs()));
        assert!(apart(&got, &decoded) < 0.04 * largest, "{name}: {}", apart(&got, &decoded));
        // What the types themselves lose, whose blocks have codes of 8 and of mostly 4 bits.
        let lost = apart(&logits(&open(&source).model, &ids), &decoded) / largest;
        assert!((bound / 10.0..bound).contains(&lost), "{name}: {lost}");
        let kept = converted(&file, &folder, &format!("{name}-kept.gguf"), Types::kept());
        assert!(logits(&open(&kept).model, &ids) == got, "{name}");
    }
}

/// The bits of a model's logits and of what a sequence leaves, which depend on its ids alone.
#[track_caller]
fn depends_on_ids_alone(path: &Path, what: &str) {
    let ids: Vec<u32> = (0..23).map(|i| i * 37 % 500 + 3).collect();
    let others: [&[u32]; 3] = [&[7], &[9, 8, 7], &[4; 40]];
    let on = |threads: usize| {
        let options =
            OpenOptions { threads: Some(Threads::new(threads).unwrap()), ..Default::default() };
        LanguageModel::<Cpu>::open(path, &options, cpu()).unwrap()
    };
    let lm = on(1);
    let model = &lm.model;
    let mut state = model.new_state().unwrap();
    let want = run(model, &ids, &[ids.len()], &mut state);
    for pieces in [&[1; 23][..], &[22, 1], &[1, 22], &[5, 1, 17], &[2, 2, 2, 16, 1]] {
        let mut cut = model.new_state().unwrap();
        assert!(run(model, &ids, pieces, &mut cut) == want, "{what}: {pieces:?}");
        assert!(states(&cut) == states(&state), "{what}: the state of {pieces:?}");
    }
    for place in 0..=others.len() {
        let mut all: Vec<&[u32]> = others.to_vec();
        all.insert(place, &ids);
        let mut batch: Vec<State<Cpu>> = all.iter().map(|_| model.new_state().unwrap()).collect();
        let mut runs: Vec<Run<'_, Cpu>> =
            all.iter().zip(&mut batch).map(|(tokens, state)| Run { tokens, state }).collect();
        let got = to_vec(&model.forward(&mut runs, Logits::All).unwrap()).unwrap();
        let before: usize = all[..place].iter().map(|ids| ids.len()).sum();
        let vocab = want.len() / ids.len();
        let own = &got[before * vocab..][..want.len()];
        assert!(own == want, "{what}: among others, at {place}");
        assert!(states(&batch[place]) == states(&state), "{what}: the state among others");
    }
    for threads in [2, 3] {
        let lm = on(threads);
        assert!(logits(&lm.model, &ids) == want, "{what}: {threads} threads");
    }
}

#[test]
fn d_18_23_weights_of_each_type_give_bits_that_depend_on_the_ids_alone() {
    let folder = Folder::new();
    for name in delta_models().into_iter().filter(|name| *name != OLMO) {
        for types in ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "bf16", "f16"] {
            let file = format!("{name}-{types}.gguf");
            let file = converted(&fixture(name), &folder, &file, Types::named(types).unwrap());
            depends_on_ids_alone(&file, &format!("{name} {types}"));
        }
    }
    for types in ["bf16", "f16"] {
        let out = format!("olmo-{types}");
        let file = converted(&fixture(OLMO), &folder, &out, Types::named(types).unwrap());
        depends_on_ids_alone(&file, &out);
    }
    let wide = wide(&folder);
    for types in ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "q4_k_m"] {
        let file =
            converted(&wide, &folder, &format!("{types}.gguf"), Types::named(types).unwrap());
        depends_on_ids_alone(&file, types);
    }
}
