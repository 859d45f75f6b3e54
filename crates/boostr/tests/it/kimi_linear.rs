//! Kimi Linear: its configurations in all their spellings, its files in both layouts, and its delta layers over
//! thousands of tokens. `golden.rs` compares the model with the original. Ids in names: `fixtures/CASES.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::{Folder, cpu};
use crate::tiny::{
    close, config_with, converted as of_type, edited, entry, fixture, linear, message, norm,
    random, renamed, run, save, silu, softplus, tokens, widened, with,
};
use boostr::Error;
use boostr::backend::{Cpu, Tensor};
use boostr::checkpoint::{Checkpoint, ConfigFile, Dtype, TensorEntry};
use boostr::convert::{Options, Types, convert};
use boostr::load::{LanguageModel, OpenOptions};
use boostr::models::kimi_linear::Config;
use boostr::models::{self, Family, Logits, Model, Run, State};
use boostr::nn::Kept;
use boostr::ops::{KvType, to_vec};
use boostr::train::{LoraConfig, TrainableModel};
use serde_json::{Value, json};

const NAME: &str = "kimi-linear-tiny";
const VOCAB: usize = 512;
/// Rounding of f32 over thousands of steps, of the largest entry of a state.
const DRIFT: f64 = 1e-3;

/// The configuration of the fixture with `changes`; null takes a field away.
fn json(changes: Value) -> Value {
    config_with(NAME, changes)
}

fn read(json: &Value) -> Result<Config, Error> {
    let file = ConfigFile::parse("config.json", &json.to_string())?;
    Ok(models::Config::read(&file)?.get::<Config>().unwrap().clone())
}

fn config(changes: Value) -> Config {
    read(&json(changes)).unwrap()
}

#[track_caller]
fn refused(changes: Value, parts: &[&str]) {
    let shown = changes.to_string();
    let text = message(&read(&json(changes)).expect_err(&shown));
    for part in parts {
        assert!(text.contains(part), "{shown}: {text}");
    }
}

fn open(path: &Path) -> Arc<Model<Cpu>> {
    LanguageModel::open(path, &Default::default(), cpu()).unwrap().model
}

fn weights() -> Checkpoint {
    Checkpoint::open(&fixture(NAME).join("model.safetensors"), false).unwrap()
}

/// Logits of a prompt and of a few tokens more.
fn logits(model: &Model<Cpu>) -> Vec<f32> {
    run(model, &tokens(7, 26, VOCAB), &[20, 1, 1, 4], &mut model.new_state().unwrap())
}

/// A folder with the model.
fn saved(json: &Value, checkpoint: &Checkpoint) -> Folder {
    let folder = Folder::new();
    folder.write("config.json", json.to_string());
    let tokenizer = "tokenizer.json";
    std::fs::copy(fixture(NAME).join(tokenizer), folder.path().join(tokenizer)).unwrap();
    save(&folder.path().join("model.safetensors"), checkpoint);
    folder
}

/// A folder with random weights of a configuration, in the layout of published files.
fn made_up(changes: Value) -> Folder {
    let json = json(changes);
    let config = read(&json).unwrap();
    saved(&json, &random(&config.hf_layout(VOCAB, true).unwrap().tensors(), 0x5eed))
}

fn converted_by(source: &Path, out: PathBuf, types: Types) -> PathBuf {
    let options = Options { types, ..Options::default() };
    let converted = convert(source, &out, &options, &mut |_, _| Continue(())).unwrap();
    assert_eq!(converted.warnings, [""; 0]);
    out
}

fn converted(source: &Path, out: PathBuf) -> PathBuf {
    converted_by(source, out, Types::kept())
}

fn not_converted(source: &Path) -> String {
    let folder = Folder::new();
    let out = folder.path().join("refused.gguf");
    let error = convert(source, &out, &Options::default(), &mut |_, _| Continue(())).unwrap_err();
    assert!(!out.exists());
    message(&error)
}

/// Every tensor with its type, shape and bytes.
fn contents(path: &Path) -> BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
    let file = Checkpoint::open(path, false).unwrap();
    let tensor = |(name, t): (&str, &TensorEntry)| {
        (name.to_owned(), (t.dtype, t.shape.clone(), t.data.to_vec()))
    };
    file.iter().map(tensor).collect()
}

fn gguf_fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/gguf/kimi-linear-tiny.gguf")
}

fn state_of(state: &State<Cpu>, layer: usize, name: &str) -> Vec<f32> {
    match state.layer(layer).unwrap().get(name) {
        Some(Kept::Tensor(x)) => to_vec(x).unwrap(),
        other => panic!("layer {layer} `{name}`: {other:?}"),
    }
}

/// All that a state keeps.
fn bits(state: &State<Cpu>) -> Vec<f32> {
    let of = |kept: &Kept<Cpu>| match kept {
        Kept::Tensor(x) => to_vec(x).unwrap(),
        Kept::Rows(rows) => rows.keys().unwrap(),
    };
    state.slots().flat_map(|(_, _, kept)| of(kept)).collect()
}

#[test]
fn published_keys_and_those_of_transformers_5_are_one_model() {
    let published = config(json!({}));
    assert_eq!(published.is_attention, [false, false, false, true, false]);
    assert_eq!(published.is_sparse, [false, true, true, true, true]);
    let five = json!({
        "linear_attn_config": null, "linear_head_dim": 16, "linear_num_heads": 2,
        "linear_conv_kernel_dim": 4, "first_k_dense_replace": null, "num_expert_group": null,
        "n_group": 1, "num_experts_per_token": null, "num_experts_per_tok": 2,
        "moe_renormalize": null, "norm_topk_prob": true, "num_experts": null,
        "num_local_experts": 6, "num_shared_experts": null, "n_shared_experts": 1,
        "model_max_length": null, "max_position_embeddings": 2048,
        "layer_types": [
            "linear_attention", "linear_attention", "linear_attention", "full_attention",
            "linear_attention"
        ],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
    });
    assert_eq!(config(five), published);
    // Both lists together, as a re-saved file may have them.
    let kinds =
        ["linear", "linear", "linear", "full", "linear"].map(|kind| format!("{kind}_attention"));
    assert_eq!(config(json!({ "layer_types": kinds })), published);
    let file = ConfigFile::parse("config.json", &published.to_json().unwrap().to_string()).unwrap();
    assert_eq!(Config { vocab_size: VOCAB, tie_embeddings: Some(false), ..published.clone() }, {
        let mut json = published.to_json().unwrap();
        json["vocab_size"] = VOCAB.into();
        json["tie_word_embeddings"] = false.into();
        read(&json).unwrap()
    });
    assert_eq!(file.usize(&["model_max_length"], 0..=4096).unwrap(), Some(2048));
    // The context is that of the published key.
    assert_eq!(published.max_position, 2048);
}

#[test]
fn a_layer_in_no_list_or_in_two_is_named_and_so_is_what_changes_the_forward() {
    let lists = |kda: Value, full: Value| {
        let mut linear = json(json!({}))["linear_attn_config"].clone();
        linear["kda_layers"] = kda;
        linear["full_attn_layers"] = full;
        json!({ "linear_attn_config": linear })
    };
    refused(lists(json!([1, 2, 3]), json!([4])), &["layer 5 of 5", "counted from 1", "neither"]);
    refused(lists(json!([2, 3, 5]), json!([4])), &["layer 1 of 5", "neither"]);
    refused(
        lists(json!([1, 2, 3, 5]), json!([4, 5])),
        &["full_attn_layers", "layer 5", "kda_layers"],
    );
    refused(lists(json!([1, 2, 2, 3, 5]), json!([4])), &["kda_layers", "layer 2"]);
    refused(lists(json!([0, 1, 2, 3]), json!([4])), &["linear_attn_config.kda_layers"]);
    refused(lists(json!([1, 2, 3, 5, 6]), json!([4])), &["linear_attn_config.kda_layers"]);
    refused(json!({ "linear_attn_config": null }), &["kda_layers", "missing", "layer_types"]);
    let mut kinds = vec!["linear_attention"; 5];
    refused(json!({ "layer_types": kinds }), &["layer_types", "layer 3", "linear_attn_config"]);
    kinds.truncate(4);
    refused(json!({ "layer_types": kinds }), &["layer_types", "4 layers", "5"]);
    refused(json!({ "mla_use_nope": false }), &["mla_use_nope", "expected true"]);
    refused(json!({ "attention_bias": true }), &["attention_bias", "expected false"]);
    refused(json!({ "hidden_act": "gelu" }), &["hidden_act", "silu", "gelu"]);
    refused(
        json!({ "moe_router_activation_func": "softmax" }),
        &["moe_router", "sigmoid", "softmax"],
    );
    refused(json!({ "moe_layer_freq": 2 }), &["moe_layer_freq", "expected 1", "2"]);
    refused(json!({ "num_nextn_predict_layers": 1 }), &["num_nextn_predict_layers", "expected 0"]);
    refused(json!({ "num_key_value_heads": 1 }), &["num_key_value_heads", "expected 2", "found 1"]);
    refused(json!({ "use_grouped_topk": false, "num_expert_group": 2 }), &["use_grouped_topk"]);
    refused(json!({ "num_expert_group": 4, "topk_group": 2 }), &["n_group", "4", "6"]);
    refused(json!({ "kv_lora_rank": 0 }), &["kv_lora_rank"]);
}

#[test]
fn a_width_that_contradicts_a_tensor_is_an_error_with_both() {
    for (changes, parts) in [
        (json!({ "kv_lora_rank": 12 }), ["kv_b_proj", "[64, 16]", "[64, 12]"]),
        (json!({ "v_head_dim": 8 }), ["kv_b_proj", "[64, 16]", "[48, 16]"]),
        (json!({ "intermediate_size": 32 }), ["mlp.gate_proj", "[64, 32]", "[32, 32]"]),
    ] {
        let error = Model::<Cpu>::load(config(changes), weights(), cpu()).err().unwrap();
        let text = message(&error);
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}

#[test]
fn names_and_joined_tensors_of_transformers_5_are_read() {
    let published = weights();
    let renamed = renamed(&published, |name| {
        let name = name.replace(".block_sparse_moe.", ".mlp.");
        let own = ["f_a_proj.", "f_b_proj.", "dt_bias", "A_log"];
        if own.iter().any(|part| name.contains(&format!(".self_attn.{part}"))) {
            return name.replace(".self_attn.", ".self_attn.forget_gate.");
        }
        name
    });
    let mut tensors: BTreeMap<String, TensorEntry> = BTreeMap::new();
    let mut values: BTreeMap<String, (Vec<f32>, Vec<usize>)> = BTreeMap::new();
    // In the order of their names: q before k before v, w1 before w3 of each expert.
    let mut parts: Vec<(&str, &TensorEntry)> = renamed.iter().collect();
    let order =
        |name: &str| ["q_conv1d", "k_conv1d", "v_conv1d"].iter().position(|of| name.contains(of));
    parts.sort_by_key(|(name, _)| (order(name), name.replace("w2", "w4")));
    for (name, part) in parts {
        let (layer, _) = name.split_once(".mlp.experts.").unwrap_or((name, ""));
        let joined = if name.contains("_conv1d") {
            let (layer, _) = name.split_once(".self_attn.").unwrap();
            (format!("{layer}.self_attn.conv1d.weight"), vec![96, 1, 4])
        } else if name.contains(".w1.") || name.contains(".w3.") {
            (format!("{layer}.mlp.experts.gate_up_proj"), vec![6, 32, 32])
        } else if name.contains(".w2.") {
            (format!("{layer}.mlp.experts.down_proj"), vec![6, 32, 16])
        } else {
            tensors.insert(name.to_owned(), part.clone());
            continue;
        };
        let to = values.entry(joined.0).or_insert_with(|| (Vec::new(), joined.1));
        to.0.extend(part.to_f32().unwrap());
    }
    for (name, (values, shape)) in values {
        tensors.insert(name, entry(Dtype::F32, &shape, &values));
    }
    let five = Checkpoint::from_entries("five", tensors);
    assert!(five.get("model.layers.4.mlp.experts.gate_up_proj").is_some());
    let model = Model::<Cpu>::load(config(json!({})), five, cpu()).unwrap();
    assert_eq!(logits(&model), logits(&open(&fixture(NAME))));
}

#[test]
fn d_12_what_llama_cpp_makes_of_a_folder_gives_the_logits_of_the_original() {
    let golden = Checkpoint::open(&fixture(NAME).join("golden.safetensors"), false).unwrap();
    let data = |name| golden.get(name).unwrap().data.as_chunks::<8>().0.to_vec();
    let ids = data("input_ids").into_iter().map(|b| i64::from_le_bytes(b) as u32);
    let ids: Vec<u32> = ids.collect();
    let want: Vec<f64> = data("logits_f64").into_iter().map(f64::from_le_bytes).collect();
    let model = open(&gguf_fixture());
    let got = run(&model, &ids, &[ids.len()], &mut model.new_state().unwrap());
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(&want) {
        assert!((f64::from(*got) - want).abs() < 2e-4, "{got} is not {want}");
    }
    // Its tensors are those of the folder: keys of heads are turned back, and three convolutions are three.
    let out = Folder::new();
    let back = converted(&gguf_fixture(), out.path().join("folder"));
    let [mut ours, mut theirs] =
        [&back, &fixture(NAME)].map(|path| contents(&path.join("model.safetensors")));
    let is_rounded = |name: &String| name.ends_with("A_log");
    ours.retain(|name, _| !is_rounded(name));
    theirs.retain(|name, _| !is_rounded(name));
    assert!(ours == theirs);
}

#[test]
fn d_12_a_gguf_file_has_the_same_logits_and_gives_the_folder_back() {
    let groups = json!({ "num_expert_group": 3, "topk_group": 2, "num_experts_per_token": 3 });
    let other = json!({
        "q_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 20,
        "kv_lora_rank": 24, "num_shared_experts": 2, "first_k_dense_replace": 2,
    });
    let dense = json!({ "first_k_dense_replace": 5 });
    let none = json!({ "num_shared_experts": 0 });
    let mut sources = vec![(None, fixture(NAME))];
    for changes in [groups, other, dense, none] {
        let folder = made_up(changes);
        let path = folder.path().to_owned();
        sources.push((Some(folder), path));
    }
    for (i, (_folder, source)) in sources.iter().enumerate() {
        let out = Folder::new();
        let file = converted(source, out.path().join("model.gguf"));
        let (before, after) = (open(source), open(&file));
        assert_eq!(logits(&before), logits(&after), "model {i}");
        let gguf = Checkpoint::open(&file, false).unwrap();
        let arch = gguf.gguf().unwrap().text("general.architecture").unwrap();
        assert_eq!(arch, Some("kimi-linear"));
        let back = converted(&file, out.path().join("folder"));
        let [ours, theirs] = [&back, source].map(|path| contents(&path.join("model.safetensors")));
        assert!(ours == theirs, "model {i}");
        let text = std::fs::read_to_string(back.join("config.json")).unwrap();
        let again = read(&serde_json::from_str(&text).unwrap()).unwrap();
        let before = before.config().get::<Config>().unwrap();
        assert_eq!(again, Config { tie_embeddings: Some(false), ..before.clone() }, "model {i}");
    }
}

#[test]
fn a_written_gguf_file_has_the_tensors_and_keys_of_llama_cpps() {
    let out = Folder::new();
    let file = converted(&fixture(NAME), out.path().join("model.gguf"));
    let [ours, theirs] =
        [&file, &gguf_fixture()].map(|path| Checkpoint::open(path, false).unwrap());
    let shapes = |file: &Checkpoint| -> Vec<(String, Vec<usize>)> {
        // ggml takes dimensions of 1 after the others as given.
        let shape = |shape: &[usize]| shape.iter().copied().skip_while(|&dim| dim == 1).collect();
        file.iter().map(|(name, t)| (name.to_owned(), shape(&t.shape))).collect()
    };
    assert_eq!(shapes(&ours), shapes(&theirs));
    let [ours, theirs] = [ours.gguf().unwrap(), theirs.gguf().unwrap()];
    for (key, value) in theirs.iter().filter(|(key, _)| key.starts_with("kimi-linear.")) {
        // Nothing rotates.
        if key != "kimi-linear.rope.freq_base" {
            assert_eq!(ours.get(key), Some(value), "{key}");
        }
    }
}

#[test]
fn old_gguf_files_with_one_matrix_of_keys_and_values_are_read() {
    let file = Checkpoint::open(&gguf_fixture(), false).unwrap();
    let published = weights();
    for dtype in [Dtype::F32, Dtype::BF16] {
        let whole = published.get("model.layers.3.self_attn.kv_b_proj.weight").unwrap();
        let whole = entry(dtype, &whole.shape, &whole.to_f32().unwrap());
        let mut old = file.clone();
        old.retain(|name| !["blk.3.attn_k_b.weight", "blk.3.attn_v_b.weight"].contains(&name));
        let mut tensors: BTreeMap<String, TensorEntry> =
            old.iter().map(|(name, entry)| (name.to_owned(), entry.clone())).collect();
        tensors.insert("blk.3.attn_kv_b.weight".into(), whole.clone());
        old.replace(tensors);
        let config = models::Config::read_gguf(&old, old.gguf().unwrap()).unwrap();
        let model = Model::<Cpu>::load(config, old, cpu()).unwrap();
        let expected = edited(&published, |name, entry| {
            let is_own = name.ends_with("kv_b_proj.weight");
            Some(if is_own { whole.clone() } else { entry.clone() })
        });
        let expected = Model::<Cpu>::load(self::config(json!({})), expected, cpu()).unwrap();
        let [got, expected] = [logits(&model), logits(&expected)];
        // Rates of decays were rounded in GGUF.
        close(&got, &widened(&expected), 2e-5);
    }
}

#[test]
fn quantized_files_are_read_with_their_matrices_of_heads_as_floats() {
    // Without experts: a choice between two that are near would be another.
    let widths = json!({
        "hidden_size": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "first_k_dense_replace": 5,
    });
    let source = made_up(widths);
    let out = Folder::new();
    let q8_0 = boostr::convert::type_named("q8_0").unwrap();
    let heads = Types::kept().with("attn_[kv]_b", q8_0).unwrap();
    let all = Types::named("q8_0").unwrap();
    for (types, name, other) in [(heads, "heads", "F32"), (all, "all", "q8_0")] {
        let file = converted_by(source.path(), out.path().join(format!("{name}.gguf")), types);
        let types = contents(&file);
        let of = |tensor: &str| types[&format!("blk.3.{tensor}.weight")].0.name();
        assert_eq!(["attn_k_b", "attn_v_b", "attn_q"].map(of), ["q8_0", "q8_0", other]);
        // The folder of it has what the blocks say as floats.
        let folder = converted(&file, out.path().join(name));
        let [got, want] = [&file, &folder].map(|path| logits(&open(path)));
        if other == "F32" {
            assert!(got == want);
            continue;
        }
        // Activations are rounded to 8 bits beside blocks, and random layers amplify that.
        let size = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        let error: Vec<f32> = got.iter().zip(&want).map(|(a, b)| a - b).collect();
        assert!(size(&error) < 0.15 * size(&want), "{} of {}", size(&error), size(&want));
    }
}

#[test]
fn gguf_files_whose_weights_of_experts_do_not_sum_to_1_are_refused_by_name() {
    let file = Checkpoint::open(&gguf_fixture(), false).unwrap();
    let with = |is: bool| {
        let mut metadata = file.gguf().unwrap().clone();
        metadata.set("kimi-linear.expert_weights_norm", is);
        models::Config::read_gguf(&file, &metadata)
    };
    with(true).unwrap();
    let text = message(&with(false).unwrap_err());
    assert!(text.contains("kimi-linear.expert_weights_norm") && text.contains("expected true"));
}

#[test]
fn what_gguf_cannot_say_is_refused() {
    let linear = |heads: usize| {
        let mut linear = json(json!({}))["linear_attn_config"].clone();
        linear["num_heads"] = heads.into();
        linear
    };
    for (changes, part) in [
        (json!({ "linear_attn_config": linear(4) }), "heads of delta layers"),
        (json!({ "moe_renormalize": false }), "not normalized"),
        (
            json!({ "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"] }),
            "dense layer after one with experts",
        ),
    ] {
        let folder = made_up(changes.clone());
        let text = not_converted(folder.path());
        assert!(text.contains(part), "{text}");
        // As a folder it is fine, and the same model again.
        let before = config(changes);
        let mut json = before.to_json().unwrap();
        json["vocab_size"] = VOCAB.into();
        json["tie_word_embeddings"] = false.into();
        assert_eq!(read(&json).unwrap(), before);
        logits(&open(folder.path()));
    }
}

#[test]
fn the_latent_of_every_type_is_kept_forked_cut_and_saved() {
    let ids = tokens(3, 90, VOCAB);
    for kind in KvType::ALL {
        let lm = LanguageModel::<Cpu>::open(&fixture(NAME), &Default::default(), cpu()).unwrap();
        let model = Arc::into_inner(lm.model).unwrap().with_kv_type(kind);
        let mut state = model.new_state().unwrap();
        run(&model, &ids[..70], &[64, 6], &mut state);
        let before = bits(&state);
        let mut fork = state.clone();
        run(&model, &ids[70..], &[20], &mut fork);
        assert_eq!(bits(&state), before, "{kind:?}");
        run(&model, &ids[70..], &[1, 19], &mut state);
        assert_eq!(bits(&state), bits(&fork), "{kind:?}");
        let cache = state.kv(3).unwrap();
        assert_eq!((cache.len(), cache.sizes().latent), (90, true));
        assert_eq!(cache.keys().unwrap().len(), 90 * 24);
    }
}

#[test]
fn adapters_of_all_projections_have_the_published_names_and_one_of_kv_b_proj_is_refused() {
    let folder = Folder::new();
    let mut model = TrainableModel::open(&fixture(NAME), &OpenOptions::default()).unwrap();
    let targets = [
        "q_proj",
        "out_proj",
        "o_proj",
        "in_proj_b",
        "f_a_proj",
        "f_b_proj",
        "g_a_proj",
        "g_b_proj",
        "kv_a_proj_with_mqa",
    ];
    let config = LoraConfig { targets: targets.map(String::from).into(), ..LoraConfig::of_rank(2) };
    model.add_adapters(&config, 1).unwrap();
    for (name, b) in model.parameters_mut() {
        if name.contains("lora_B") {
            b.values.iter_mut().enumerate().for_each(|(i, x)| *x = 0.05 * (i as f32).sin());
        }
    }
    model.write_adapters(folder.path(), "base", &config).unwrap();
    let path = folder.path().join("adapter_model.safetensors");
    let file = Checkpoint::open(&path, false).unwrap();
    let layers: BTreeSet<&str> =
        file.names().filter_map(|name| name.split(".lora_").next()).collect();
    for part in
        ["0.self_attn.o_proj", "0.self_attn.b_proj", "4.self_attn.f_b_proj", "3.self_attn.o_proj"]
    {
        assert!(
            layers.contains(&format!("base_model.model.model.layers.{part}")[..]),
            "{layers:?}"
        );
    }
    assert!(layers.iter().all(|name| !name.contains("out_proj") && !name.contains("in_proj")));
    let with = |folder: &Path| {
        let options = OpenOptions { adapter: Some(folder.into()), ..OpenOptions::default() };
        LanguageModel::<Cpu>::open(&fixture(NAME), &options, cpu())
    };
    let beside = logits(&with(folder.path()).unwrap().model);
    let want = model.with_model::<Cpu, _>(cpu(), |model| Ok(logits(model))).unwrap();
    close(&beside, &widened(&want), 1e-5);
    assert!(beside != logits(&open(&fixture(NAME))));

    let part = "base_model.model.model.layers.3.self_attn.kv_b_proj";
    let tensors = [
        (format!("{part}.lora_A.weight"), entry(Dtype::F32, &[2, 16], &[0.1; 32])),
        (format!("{part}.lora_B.weight"), entry(Dtype::F32, &[64, 2], &[0.1; 128])),
    ];
    save(&path, &Checkpoint::from_entries("adapter", BTreeMap::from(tensors)));
    let text = message(&with(folder.path()).err().unwrap());
    assert!(text.contains("kv_b_proj") && text.contains("heads"), "{text}");
}

#[test]
fn d_1_a_prompt_token_by_token_leaves_the_state_of_the_whole_prompt() {
    let model = open(&fixture(NAME));
    let ids = tokens(11, 200, VOCAB);
    let state = |pieces: &[usize]| {
        let mut state = model.new_state().unwrap();
        let logits = run(&model, &ids, pieces, &mut state);
        (logits, bits(&state))
    };
    let whole = state(&[200]);
    assert!(state(&[1; 200]) == whole);
    assert!(state(&[1, 2, 3, 63, 64, 67]) == whole);
}

#[test]
fn d_5_packed_documents_shorter_than_the_convolution_have_the_logits_of_each_alone() {
    let model = open(&fixture(NAME));
    let lengths = [1, 2, 37, 1, 3, 2, 64, 1];
    let prompts: Vec<Vec<u32>> =
        lengths.iter().zip(20..).map(|(&len, seed)| tokens(seed, len, VOCAB)).collect();
    let mut states: Vec<State<Cpu>> = prompts.iter().map(|_| model.new_state().unwrap()).collect();
    let mut runs: Vec<Run<'_, Cpu>> =
        prompts.iter().zip(&mut states).map(|(tokens, state)| Run { tokens, state }).collect();
    let packed = to_vec(&model.forward(&mut runs, Logits::All).unwrap()).unwrap();
    let mut rest = &packed[..];
    for (prompt, packed) in prompts.iter().zip(&states) {
        let mut state = model.new_state().unwrap();
        let alone = run(&model, prompt, &[prompt.len()], &mut state);
        let (own, others) = rest.split_at(alone.len());
        assert!(own == alone && bits(packed) == bits(&state), "{}", prompt.len());
        rest = others;
    }
}

#[test]
fn d_21_finished_sequences_of_a_batch_stay_as_they_are_and_change_nothing() {
    let model = open(&fixture(NAME));
    let prompts: Vec<Vec<u32>> =
        (0..8).map(|i| tokens(40 + i, 3 + 5 * i as usize, VOCAB)).collect();
    let is_finished = |i: usize| [1, 4, 6].contains(&i);
    let mut states: Vec<State<Cpu>> = Vec::new();
    for prompt in &prompts {
        let mut state = model.new_state().unwrap();
        run(&model, prompt, &[prompt.len()], &mut state);
        states.push(state);
    }
    let before: Vec<Vec<f32>> = states.iter().map(bits).collect();
    let mut alone = states.clone();
    for step in 0..4u32 {
        let next: Vec<Vec<u32>> = (0..8)
            .map(|i| if is_finished(i) { Vec::new() } else { vec![step * 8 + i as u32] })
            .collect();
        let mut runs: Vec<Run<'_, Cpu>> =
            next.iter().zip(&mut states).map(|(tokens, state)| Run { tokens, state }).collect();
        let got: Tensor<Cpu> = model.forward(&mut runs, Logits::All).unwrap();
        let got = to_vec(&got).unwrap();
        let mut rows = got.chunks_exact(VOCAB);
        for i in (0..8).filter(|&i| !is_finished(i)) {
            let want = run(&model, &next[i], &[1], &mut alone[i]);
            assert!(rows.next().unwrap() == want, "step {step}, sequence {i}");
        }
    }
    for i in 0..8 {
        let expected = if is_finished(i) { before[i].clone() } else { bits(&alone[i]) };
        assert!(bits(&states[i]) == expected, "sequence {i}");
    }
}

/// The first layer's delta rule by its definition in f64: its state depends on the tokens alone.
struct Rule {
    weights: BTreeMap<String, Vec<f64>>,
    /// The last three inputs of each convolution, oldest first.
    windows: [Vec<Vec<f64>>; 3],
    /// `[H, D, D]`
    state: Vec<f64>,
}

const HEADS: usize = 2;
const WIDTH: usize = 16;

impl Rule {
    fn new(checkpoint: &Checkpoint) -> Self {
        let own = |name: &str| {
            let layer = name.strip_prefix("model.layers.0.");
            layer
                .map(|part| part.replace("self_attn.", ""))
                .or_else(|| (name == "model.embed_tokens.weight").then(|| "embeddings".to_owned()))
        };
        let weights = checkpoint
            .iter()
            .filter_map(|(name, t)| Some((own(name)?, widened(&t.to_f32().unwrap()))))
            .collect();
        let windows = [(); 3].map(|()| vec![vec![0.0; HEADS * WIDTH]; 3]);
        Self { weights, windows, state: vec![0.0; HEADS * WIDTH * WIDTH] }
    }

    fn step(&mut self, id: u32) {
        let Self { weights, windows, state } = self;
        let weight = |name: &str| &weights[name];
        let product = |name: &str, x: &[f64]| linear(weight(&format!("{name}.weight")), None, x);
        let x = &weight("embeddings")[id as usize * 32..][..32];
        let u = norm(x, weight("input_layernorm.weight"), 1, 1e-5);
        let mut mixed = ["q", "k", "v"].into_iter().zip(windows).map(|(of, window)| {
            window.push(product(&format!("{of}_proj"), &u));
            let taps = weight(&format!("{of}_conv1d.weight"));
            let out: Vec<f64> = (0..HEADS * WIDTH)
                .map(|c| silu((0..4).map(|tap| taps[c * 4 + tap] * window[tap][c]).sum()))
                .collect();
            window.remove(0);
            out
        });
        let [_, k, v] = [(); 3].map(|()| mixed.next().unwrap());
        let a = product("f_b_proj", &product("f_a_proj", &u));
        let beta = product("b_proj", &u);
        for head in 0..HEADS {
            let at = head * WIDTH;
            let k = &k[at..at + WIDTH];
            let length = (k.iter().map(|k| k * k).sum::<f64>() + 1e-6).sqrt();
            let rate = weight("A_log")[head].exp();
            let beta = 1.0 / (1.0 + (-beta[head]).exp());
            let rows = &mut state[at * WIDTH..(at + WIDTH) * WIDTH];
            for (i, row) in rows.chunks_exact_mut(WIDTH).enumerate() {
                let g = -rate * softplus(a[at + i] + weight("dt_bias")[at + i]);
                for s in row {
                    *s *= g.exp();
                }
            }
            for j in 0..WIDTH {
                let read: f64 = (0..WIDTH).map(|i| rows[i * WIDTH + j] * k[i] / length).sum();
                let write = beta * (v[at + j] - read);
                (0..WIDTH).for_each(|i| rows[i * WIDTH + j] += k[i] / length * write);
            }
        }
    }
}

#[track_caller]
fn check_rule(checkpoint: &Checkpoint, ids: &[u32], pieces: &[usize]) {
    let model = Model::<Cpu>::load(config(json!({})), checkpoint.clone(), cpu()).unwrap();
    let mut rule = Rule::new(checkpoint);
    for &id in ids {
        rule.step(id);
    }
    let mut state = model.new_state().unwrap();
    let mut first = 0;
    for &len in pieces {
        let tokens = &ids[first..first + len];
        model.forward(&mut [Run { tokens, state: &mut state }], Logits::None).unwrap();
        first += len;
    }
    assert_eq!(first, ids.len());
    let largest = rule.state.iter().fold(0f64, |most, x| most.max(x.abs()));
    for (got, want) in state_of(&state, 0, "delta").iter().zip(&rule.state) {
        assert!((f64::from(*got) - want).abs() < DRIFT * largest, "{got} is not {want}");
    }
}

#[test]
fn d_26_after_2000_decoded_tokens_the_state_is_that_of_the_rule_and_no_decay_is_clamped() {
    let ids = tokens(26, 2000, VOCAB);
    check_rule(&weights(), &ids, &[1; 2000]);
    // A memory of thousands of tokens, and one that some channels lose at once.
    for shift in [-9.0, 40.0] {
        check_rule(&with(&weights(), "layers.0.self_attn.dt_bias", |x| x + shift), &ids, &[2000]);
    }
    let mixed = edited(&weights(), |name, old| {
        let is_own = name.ends_with("layers.0.self_attn.dt_bias");
        let values = old.to_f32().unwrap();
        let values = values.iter().enumerate().map(|(i, x)| x + [-9.0, 0.0, 60.0][i % 3]);
        let values: Vec<f32> = values.collect();
        Some(if is_own { entry(Dtype::F32, &old.shape, &values) } else { old.clone() })
    });
    check_rule(&mixed, &ids, &[2000]);
}

#[test]
fn d_16_with_weights_in_bf16_the_state_of_4096_tokens_is_that_of_the_rule() {
    let pieces = [&[1; 1000][..], &[3096]].concat();
    check_rule(&of_type(&weights(), Dtype::BF16), &tokens(16, 4096, VOCAB), &pieces);
}
