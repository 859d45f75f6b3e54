//! Qwen3-Next and Qwen3.5 with experts: their configurations, their files in every layout. `golden.rs` compares the
//! models with the original. Ids in names: `fixtures/CASES.md`.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};

use crate::common::{Folder, cpu};
use crate::tiny::{fixture, message, random, save};
use boostr::Error;
use boostr::backend::Cpu;
use boostr::checkpoint::{Bytes, Checkpoint, ConfigFile, Dtype, TensorEntry};
use boostr::convert::{Options, Types, convert};
use boostr::load::{LanguageModel, OpenOptions};
use boostr::models::{Config, Logits, Run, qwen3_5_moe, qwen3_next};
use boostr::ops::to_vec;
use serde_json::{Value, json};

const MODELS: [&str; 2] = ["qwen3next-tiny", "qwen3_5-moe-tiny"];
/// The bound that the fixtures suggest for f32.
const TOLERANCE: f64 = 2e-4;

type Tensors = BTreeMap<String, TensorEntry>;

fn made_by_llama_cpp(model: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/gguf");
    folder.join(format!("{model}.gguf"))
}

fn open(path: &Path) -> LanguageModel<Cpu> {
    LanguageModel::open(path, &OpenOptions::default(), cpu()).unwrap()
}

fn golden(model: &str) -> (Vec<u32>, Vec<f64>) {
    let file = Checkpoint::open(&fixture(model).join("golden.safetensors"), false).unwrap();
    let data = |name| file.get(name).unwrap().data.as_chunks::<8>().0.to_vec();
    let ids = data("input_ids").into_iter().map(|b| i64::from_le_bytes(b) as u32).collect();
    (ids, data("logits_f64").into_iter().map(f64::from_le_bytes).collect())
}

fn logits(lm: &LanguageModel<Cpu>, ids: &[u32]) -> Vec<f32> {
    let mut state = lm.model.new_state().unwrap();
    let mut run = [Run { tokens: ids, state: &mut state }];
    to_vec(&lm.model.forward(&mut run, Logits::All).unwrap()).unwrap()
}

/// The largest difference to the original's logits.
fn distance(lm: &LanguageModel<Cpu>, model: &str) -> f64 {
    let (ids, want) = golden(model);
    let got = logits(lm, &ids);
    got.iter()
        .zip(want)
        .fold(0.0, |most, (got, want)| f64::max(most, (f64::from(*got) - want).abs()))
}

fn config_of(model: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(fixture(model).join("config.json")).unwrap()).unwrap()
}

fn tensors_of(path: &Path) -> Tensors {
    entries(&Checkpoint::open(path, false).unwrap())
}

fn entries(file: &Checkpoint) -> Tensors {
    file.iter().map(|(name, entry)| (name.to_owned(), entry.clone())).collect()
}

fn weights_of(model: &str) -> Tensors {
    tensors_of(&fixture(model).join("model.safetensors"))
}

/// A folder of a configuration and tensors.
fn folder(config: &Value, tensors: Tensors) -> Folder {
    let folder = Folder::new();
    folder.write("config.json", config.to_string());
    let tokenizer = fixture(MODELS[0]).join("tokenizer.json");
    fs::copy(tokenizer, folder.path().join("tokenizer.json")).unwrap();
    let checkpoint = Checkpoint::from_entries("changed", tensors);
    save(&folder.path().join("model.safetensors"), &checkpoint);
    folder
}

fn refused(folder: &Folder) -> String {
    message(&LanguageModel::open(folder.path(), &OpenOptions::default(), cpu()).err().unwrap())
}

fn converted(source: &Path, out: PathBuf) -> PathBuf {
    try_converted(source, &out).unwrap();
    out
}

fn try_converted(source: &Path, out: &Path) -> Result<(), Error> {
    let options = Options { types: Types::kept(), ..Options::default() };
    convert(source, out, &options, &mut |_, _| Continue(())).map(drop)
}

/// Every tensor with its type, its shape but for dimensions of 1, and its bytes.
fn contents(tensors: &Tensors) -> BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
    let tensor = |(name, t): (&String, &TensorEntry)| {
        let shape = t.shape.iter().copied().filter(|&dim| dim != 1).collect();
        (name.clone(), (t.dtype, shape, t.data.to_vec()))
    };
    tensors.iter().map(tensor).collect()
}

/// A stack of matrices, and each of them.
fn unstacked(entry: &TensorEntry) -> Vec<TensorEntry> {
    let [count, rows, columns] = entry.shape[..] else { panic!("{:?}", entry.shape) };
    let size = entry.data.len() / count;
    let one = |i: usize| TensorEntry {
        shape: vec![rows, columns],
        data: entry.data.slice(i * size..(i + 1) * size).unwrap(),
        ..entry.clone()
    };
    (0..count).map(one).collect()
}

fn stacked(parts: &[TensorEntry]) -> TensorEntry {
    let data: Vec<u8> = parts.iter().flat_map(|part| part.data.to_vec()).collect();
    let shape = [&[parts.len()], &parts[0].shape[..]].concat();
    TensorEntry { shape, data: Bytes::new(data), ..parts[0].clone() }
}

fn joined(a: &TensorEntry, b: &TensorEntry) -> TensorEntry {
    let data = [a.data.to_vec(), b.data.to_vec()].concat();
    let shape = vec![a.shape[0] + b.shape[0], a.shape[1]];
    TensorEntry { shape, data: Bytes::new(data), ..a.clone() }
}

/// The same tensors with experts stacked, under names with this end.
fn with_stacks(tensors: &Tensors, end: &str) -> Tensors {
    let mut out = tensors.clone();
    out.retain(|name, _| !name.contains(".experts."));
    for layer in 0..4 {
        let prefix = format!("model.layers.{layer}.mlp.experts");
        let of = |part: &str, i: usize| tensors[&format!("{prefix}.{i}.{part}.weight")].clone();
        let both: Vec<TensorEntry> =
            (0..5).map(|i| joined(&of("gate_proj", i), &of("up_proj", i))).collect();
        let down: Vec<TensorEntry> = (0..5).map(|i| of("down_proj", i)).collect();
        out.insert(format!("{prefix}.gate_up_proj{end}"), stacked(&both));
        out.insert(format!("{prefix}.down_proj{end}"), stacked(&down));
    }
    out
}

/// The same tensors with experts one by one.
fn without_stacks(tensors: &Tensors) -> Tensors {
    let mut out = Tensors::new();
    for (name, entry) in tensors {
        if let Some(prefix) = name.strip_suffix(".gate_up_proj") {
            for (i, both) in unstacked(entry).into_iter().enumerate() {
                let (rows, half) = (both.shape[0] / 2, both.data.len() / 2);
                for (part, from) in [("gate_proj", 0), ("up_proj", half)] {
                    let data = both.data.slice(from..from + half).unwrap();
                    let shape = vec![rows, both.shape[1]];
                    let one = TensorEntry { data, shape, ..both.clone() };
                    out.insert(format!("{prefix}.{i}.{part}.weight"), one);
                }
            }
        } else if let Some(prefix) = name.strip_suffix(".experts.down_proj") {
            for (i, one) in unstacked(entry).into_iter().enumerate() {
                out.insert(format!("{prefix}.experts.{i}.down_proj.weight"), one);
            }
        } else {
            out.insert(name.clone(), entry.clone());
        }
    }
    out
}

#[test]
fn experts_stacked_and_one_by_one_are_the_same_model() {
    let one_by_one = weights_of(MODELS[0]);
    let ids = golden(MODELS[0]).0;
    let want = logits(&open(&fixture(MODELS[0])), &ids);
    for end in ["", ".weight"] {
        let folder = folder(&config_of(MODELS[0]), with_stacks(&one_by_one, end));
        assert_eq!(logits(&open(folder.path()), &ids), want, "{end}");
    }
    let stacked = weights_of(MODELS[1]);
    let ids = golden(MODELS[1]).0;
    let want = logits(&open(&fixture(MODELS[1])), &ids);
    let with_end = stacked.iter().map(|(name, entry)| {
        let is_stack = name.ends_with("_proj");
        (if is_stack { format!("{name}.weight") } else { name.clone() }, entry.clone())
    });
    for tensors in [with_end.collect(), without_stacks(&stacked)] {
        let folder = folder(&config_of(MODELS[1]), tensors);
        assert_eq!(logits(&open(folder.path()), &ids), want);
    }
    // Half of a stack is none.
    let mut half = without_stacks(&stacked);
    half.retain(|name, _| !name.ends_with("layers.2.mlp.experts.4.up_proj.weight"));
    let text = refused(&folder(&config_of(MODELS[1]), half));
    assert!(
        text.contains("missing") && text.contains("layers.2.mlp.experts.gate_up_proj"),
        "{text}"
    );
}

#[test]
fn nested_flat_and_unprefixed_files_are_the_same_model() {
    let (nested, tensors) = (config_of(MODELS[1]), weights_of(MODELS[1]));
    let ids = golden(MODELS[1]).0;
    let want = logits(&open(&fixture(MODELS[1])), &ids);
    let mut flat = nested["text_config"].clone();
    flat["tie_word_embeddings"] = false.into();
    for (kind, prefix) in
        [("qwen3_5_moe_text", "model."), ("qwen3_5_moe", "model."), ("qwen3_5_moe_text", "")]
    {
        flat["model_type"] = kind.into();
        let text = tensors.iter().filter(|(name, _)| !name.contains("visual"));
        let renamed = text.map(|(name, entry)| {
            (name.replacen("model.language_model.", prefix, 1), entry.clone())
        });
        let folder = folder(&flat, renamed.collect());
        assert_eq!(logits(&open(folder.path()), &ids), want, "{kind} {prefix:?}");
    }
}

#[test]
fn d_6_a_block_for_more_tokens_changes_no_logits_there_and_back() {
    for model in MODELS {
        let ids = golden(model).0;
        let want = logits(&open(&fixture(model)), &ids);
        let mut tensors = weights_of(model);
        // A block as the trunk's layers of attention are, under the names of the block.
        let layer = tensors.keys().find_map(|name| name.split_once(".self_attn.q_proj"));
        let layer = layer.map(|(layer, _)| format!("{layer}.")).unwrap();
        let block: Vec<_> = tensors
            .iter()
            .filter_map(|(name, entry)| {
                Some((format!("mtp.layers.0.{}", name.strip_prefix(&layer)?), entry.clone()))
            })
            .collect();
        assert!(block.len() > 5, "{model}");
        tensors.extend(block);
        let is_norm = |name: &str| name.ends_with(".norm.weight") && !name.contains("layers");
        let norm = tensors.iter().find(|(name, _)| is_norm(name)).unwrap().1.clone();
        for name in ["norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"] {
            tensors.insert(format!("mtp.{name}.weight"), norm.clone());
        }
        let with = folder(&config_of(model), tensors);
        assert!(logits(&open(with.path()), &ids) == want, "{model}");
        let there = converted(with.path(), with.path().join("m.gguf"));
        assert!(logits(&open(&there), &ids) == want, "{model} in GGUF");
        let back = converted(&there, with.path().join("back"));
        assert!(logits(&open(&back), &ids) == want, "{model} and back");
        let again = converted(&back, with.path().join("again.gguf"));
        assert_eq!(contents(&tensors_of(&again)), contents(&tensors_of(&there)), "{model}");
    }
}

#[test]
fn d_9_weights_of_a_tokens_experts_sum_to_1_unless_a_file_that_may_says_otherwise() {
    let weights = |folder: &Folder| open(folder.path()).model.config().clone();
    let moe = |config: &Config| config.get::<qwen3_5_moe::Config>().unwrap().experts.moe.clone();
    // Files of Qwen3.5 have no such key, and its class looks at none.
    let mut json = config_of(MODELS[1]);
    assert_eq!(json["text_config"]["norm_topk_prob"], Value::Null);
    for said in [Value::Null, json!(false), json!(true)] {
        json["text_config"]["norm_topk_prob"] = said;
        let folder = folder(&json, weights_of(MODELS[1]));
        assert!(moe(&weights(&folder)).normalized);
        assert!(distance(&open(folder.path()), MODELS[1]) < TOLERANCE);
    }
    let mut json = config_of(MODELS[0]);
    json.as_object_mut().unwrap().remove("norm_topk_prob");
    assert!(distance(&open(folder(&json, weights_of(MODELS[0])).path()), MODELS[0]) < TOLERANCE);
    json["norm_topk_prob"] = false.into();
    let plain = folder(&json, weights_of(MODELS[0]));
    assert!(distance(&open(plain.path()), MODELS[0]) > 0.1);
    let text = message(&try_converted(plain.path(), &plain.path().join("m.gguf")).unwrap_err());
    assert!(text.contains("do not sum to 1"), "{text}");
}

#[test]
fn d_10_a_part_of_each_head_rotates_whatever_else_is_said_of_positions() {
    let dims = |lm: &LanguageModel<Cpu>| {
        let layers = lm.model.family().layers();
        let of = layers.iter().find_map(|l| l.part::<boostr::nn::AttentionConfig>().cloned());
        let of = of.unwrap();
        (of.rope.unwrap().rotary_dim, of.headdim)
    };
    for (model, rotary_dim) in [(MODELS[0], 4), (MODELS[1], 8)] {
        assert_eq!(dims(&open(&fixture(model))), (rotary_dim, 16), "{model}");
        assert_eq!(dims(&open(&made_by_llama_cpp(model))), (rotary_dim, 16), "{model}");
        let mut json = config_of(model);
        let path = if model == MODELS[0] { "" } else { "/text_config/rope_parameters" };
        json.pointer_mut(path).unwrap()["partial_rotary_factor"] = json!(1.0);
        let whole = folder(&json, weights_of(model));
        assert!(distance(&open(whole.path()), model) > 0.1, "{model}");
    }
}

#[test]
fn d_11_a_width_that_contradicts_a_tensor_is_an_error_with_both_shapes() {
    for (model, key, value, words) in [
        (MODELS[0], "linear_num_value_heads", 6, ["in_proj_qkvz", "[192, 32]", "[256, 32]"]),
        (
            MODELS[0],
            "shared_expert_intermediate_size",
            64,
            ["shared_expert", "[32, 32]", "[64, 32]"],
        ),
        (MODELS[1], "num_experts", 6, ["experts", "[5, 32, 32]", "[6, 32, 32]"]),
        (MODELS[1], "moe_intermediate_size", 16, ["gate_up_proj", "[5, 64, 32]", "[5, 32, 32]"]),
    ] {
        let mut json = config_of(model);
        let path = if model == MODELS[0] { "" } else { "/text_config" };
        json.pointer_mut(path).unwrap()[key] = value.into();
        let error = refused(&folder(&json, weights_of(model)));
        assert!(words.iter().all(|word| error.contains(word)), "{model} {key}: {error}");
    }
    let mut json = config_of(MODELS[0]);
    json["linear_num_value_heads"] = 3.into();
    let error = refused(&folder(&json, weights_of(MODELS[0])));
    assert!(error.contains("linear_num_value_heads") && error.contains("multiple"), "{error}");
}

#[test]
fn d_12_files_of_llama_cpps_converter_are_the_model_and_what_we_write_is_what_they_are() {
    for model in MODELS {
        let lm = open(&made_by_llama_cpp(model));
        assert!(distance(&lm, model) < TOLERANCE, "{model}");
        let folder = Folder::new();
        let out = converted(&fixture(model), folder.path().join("m.gguf"));
        let ids = golden(model).0;
        let want = logits(&open(&fixture(model)), &ids);
        assert_eq!(logits(&open(&out), &ids), want, "{model}");
        let [ours, theirs] =
            [&out, &made_by_llama_cpp(model)].map(|path| contents(&tensors_of(path)));
        assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>(), "{model}");
        for (name, (dtype, shape, bytes)) in &theirs {
            let own = &ours[name];
            assert_eq!((own.0, &own.1), (*dtype, shape), "{model} {name}");
            if name.ends_with("ssm_a") {
                continue; // exp() of another library
            }
            assert_eq!(&own.2, bytes, "{model} {name}");
        }
        let metadata = |path: &Path| {
            let file = Checkpoint::open(path, false).unwrap();
            let of = file.gguf().unwrap().clone();
            let all: BTreeMap<String, String> = of
                .iter()
                .filter(|(key, _)| key.starts_with("qwen3"))
                .map(|(key, value)| (key.to_owned(), format!("{value:?}")))
                .collect();
            all
        };
        let (ours, theirs) = (metadata(&out), metadata(&made_by_llama_cpp(model)));
        // That program writes an interval of 4 whatever the list says.
        for (key, value) in theirs.iter().filter(|(key, _)| !key.ends_with("interval")) {
            assert_eq!(ours.get(key), Some(value), "{model} {key}");
        }
    }
}

#[test]
fn d_12_a_folder_through_gguf_and_back_has_the_same_bytes() {
    for model in MODELS {
        let folder = Folder::new();
        let there = converted(&fixture(model), folder.path().join("m.gguf"));
        let back = converted(&there, folder.path().join("back"));
        let mut before = weights_of(model);
        before.retain(|name, _| !name.contains("visual"));
        let before: Tensors = before
            .into_iter()
            .map(|(name, entry)| (name.replacen("model.language_model.", "model.", 1), entry))
            .collect();
        let mut after = tensors_of(&back);
        for (name, entry) in &before {
            let got = after.remove(name).unwrap_or_else(|| panic!("{model} {name}"));
            assert_eq!((got.dtype, &got.shape), (entry.dtype, &entry.shape), "{model} {name}");
            if name.ends_with("A_log")
                || name.ends_with("norm.weight") && !name.contains("linear_attn")
            {
                let pairs = got.to_f32().unwrap().into_iter().zip(entry.to_f32().unwrap());
                assert!(
                    pairs.into_iter().all(|(a, b)| (a - b).abs() <= 3e-7 * (1.0 + b.abs())),
                    "{name}"
                );
            } else {
                assert_eq!(*got.data, *entry.data, "{model} {name}");
            }
        }
        assert_eq!(after.keys().collect::<Vec<_>>(), [""; 0], "{model}");
        assert_eq!(open(&back).model.config(), open(&fixture(model)).model.config(), "{model}");
        // A folder of a folder, and one in 16 bits.
        let again = converted(&back, folder.path().join("again"));
        assert_eq!(contents(&tensors_of(&again)), contents(&tensors_of(&back)), "{model}");
        let options = Options { types: Types::named("bf16").unwrap(), ..Options::default() };
        let small = folder.path().join("small");
        convert(&back, &small, &options, &mut |_, _| Continue(())).unwrap();
        let experts = tensors_of(&small);
        let experts = experts.iter().filter(|(name, _)| name.contains(".experts."));
        for (name, entry) in experts {
            assert_eq!(entry.dtype, Dtype::BF16, "{model} {name}");
        }
        open(&small);
    }
}

#[test]
fn old_gguf_files_with_one_tensor_for_queries_keys_values_and_gates_are_the_same_model() {
    let path = made_by_llama_cpp(MODELS[0]);
    let mut file = Checkpoint::open(&path, false).unwrap();
    let rows = weights_of(MODELS[0]);
    let mut tensors = tensors_of(&path);
    for layer in 0..3 {
        for part in ["attn_qkv", "attn_gate"] {
            tensors.remove(&format!("blk.{layer}.{part}.weight")).unwrap();
        }
        let grouped =
            rows[&format!("model.layers.{layer}.linear_attn.in_proj_qkvz.weight")].clone();
        tensors.insert(format!("blk.{layer}.ssm_in.weight"), grouped);
    }
    file.replace(tensors);
    let metadata = file.gguf().unwrap().clone();
    let config = Config::read_gguf(&file, &metadata).unwrap();
    let model = boostr::models::Model::<Cpu>::load(config, file, cpu()).unwrap();
    let ids = golden(MODELS[0]).0;
    let mut state = model.new_state().unwrap();
    let mut run = [Run { tokens: &ids, state: &mut state }];
    let got = to_vec(&model.forward(&mut run, Logits::All).unwrap()).unwrap();
    assert_eq!(got, logits(&open(&path), &ids));
}

#[test]
fn layers_without_experts_are_those_that_a_list_and_a_step_name() {
    let dense = |changes: Value| {
        let mut json = config_of(MODELS[0]);
        json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let file = ConfigFile::parse("config.json", &json.to_string()).unwrap();
        Config::read(&file)
            .map(|config| config.get::<qwen3_next::Config>().unwrap().is_dense.clone())
    };
    assert_eq!(dense(json!({})).unwrap(), [false; 4]);
    assert_eq!(dense(json!({ "mlp_only_layers": [1] })).unwrap(), [false, true, false, false]);
    assert_eq!(dense(json!({ "decoder_sparse_step": 2 })).unwrap(), [true, false, true, false]);
    let text = message(&dense(json!({ "mlp_only_layers": [4] })).unwrap_err());
    assert!(text.contains("mlp_only_layers") && text.contains("layer 4 of 4"), "{text}");

    // Without experts there are none, and no sizes of them are asked for.
    let none = json!({ "num_experts": 0, "num_experts_per_tok": 0, "moe_intermediate_size": 0 });
    assert_eq!(dense(none.clone()).unwrap(), [true; 4]);
    let mut json = config_of(MODELS[0]);
    json.as_object_mut().unwrap().extend(none.as_object().unwrap().clone());
    let read = |json: &Value| {
        Config::read(&ConfigFile::parse("config.json", &json.to_string()).unwrap()).unwrap()
    };
    let before = read(&json);
    let mut written = before.family().to_json().unwrap();
    written["vocab_size"] = json!(512);
    written["tie_word_embeddings"] = json!(false);
    assert_eq!(read(&written), before);
    let layout = before.family().hf_layout(512, true).unwrap();
    let folder_of_none = folder(&json, entries(&random(&layout.tensors(), 3)));
    let lm = open(folder_of_none.path());
    assert!(logits(&lm, &golden(MODELS[0]).0).iter().all(|x| x.is_finite()));
    let text = message(&dense(json!({ "num_experts_per_tok": 0 })).unwrap_err());
    assert!(text.contains("num_experts_per_tok"), "{text}");

    // Such a layer has the sizes of `intermediate_size`; a folder keeps it, GGUF refuses it.
    let mut json = config_of(MODELS[0]);
    json["mlp_only_layers"] = json!([1]);
    let mut tensors = weights_of(MODELS[0]);
    tensors.retain(|name, _| !name.starts_with("model.layers.1.mlp."));
    let (wide, other) = (
        tensors["model.layers.0.mlp.shared_expert.gate_proj.weight"].clone(),
        weights_of(MODELS[0]),
    );
    let wide = joined(&wide, &other["model.layers.1.mlp.shared_expert.gate_proj.weight"]);
    tensors.insert("model.layers.1.mlp.gate_proj.weight".into(), wide.clone());
    tensors.insert("model.layers.1.mlp.up_proj.weight".into(), wide.clone());
    let down = TensorEntry { shape: vec![32, 64], ..wide };
    tensors.insert("model.layers.1.mlp.down_proj.weight".into(), down);
    let folder = folder(&json, tensors);
    let lm = open(folder.path());
    let ids = golden(MODELS[0]).0;
    let want = logits(&lm, &ids);
    assert!(want.iter().all(|x| x.is_finite()));
    let back = converted(folder.path(), folder.path().join("back"));
    assert_eq!(logits(&open(&back), &ids), want);
    let text = message(&try_converted(folder.path(), &folder.path().join("m.gguf")).unwrap_err());
    assert!(text.contains("layers without experts"), "{text}");
}
