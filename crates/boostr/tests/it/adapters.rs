//! Adapters beside a model, in the names of transformers. They are found from their folder, and refused
//! if they do not fit.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use boostr::Error;
use boostr::backend::Cpu;
use boostr::checkpoint::Checkpoint;
use boostr::convert::{Options, Types, convert};
use boostr::load::adapters::{Adapters, base_of, is_adapter};
use boostr::load::{LanguageModel, OpenOptions};
use boostr::models::{Logits, Model, Run};
use boostr::ops::to_vec;
use boostr::train::{LoraConfig, Random, TrainableModel};
use serde_json::{Value, json};

use crate::common::{Folder, cpu, delta_models, models};
use crate::tiny::wide;

/// Of the largest logit: products of other ranks round otherwise.
const MOST: f32 = 1e-5;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

fn temporary(what: &str) -> PathBuf {
    let folder =
        std::env::temp_dir().join(format!("boostr-adapters-{what}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn logits(model: &Model<Cpu>) -> boostr::Result<Vec<f32>> {
    let tokens: Vec<u32> = (0..30).map(|i| 3 + 7 * i).collect();
    let mut state = model.new_state()?;
    to_vec(&model.forward(&mut [Run { tokens: &tokens, state: &mut state }], Logits::All)?)
}

fn opened(path: &Path, adapter: Option<&Path>) -> boostr::Result<Vec<f32>> {
    let options = OpenOptions { adapter: adapter.map(Path::to_path_buf), ..OpenOptions::default() };
    logits(&LanguageModel::<Cpu>::open(path, &options, cpu())?.model)
}

#[track_caller]
fn close(got: &[f32], want: &[f32], what: &str) {
    let most = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    for (x, y) in got.iter().zip(want) {
        assert!((x - y).abs() <= MOST * (1.0 + most), "{what}: {x}, expected {y}");
    }
}

/// A model with adapters that change it, and those saved to a folder of their own.
fn adapted(base: &Path, targets: &[&str], folder: &Path) -> (TrainableModel, LoraConfig) {
    let targets = targets.iter().map(|x| (*x).to_owned()).collect();
    adapted_as(base, LoraConfig { r: 3, alpha: 4.5, targets }, folder)
}

fn adapted_as(base: &Path, config: LoraConfig, folder: &Path) -> (TrainableModel, LoraConfig) {
    let mut model = TrainableModel::open(base, &OpenOptions::default()).unwrap();
    model.add_adapters(&config, 1).unwrap();
    let mut random = Random::new(2);
    for (_, b) in model.parameters_mut().iter_mut().filter(|(name, _)| name.contains("lora_B")) {
        b.values.iter_mut().for_each(|x| *x = random.between(-0.2, 0.2) as f32);
    }
    model.write_adapters(folder, &base.display().to_string(), &config).unwrap();
    (model, config)
}

fn change(folder: &Path, key: &str, value: Value) {
    let path = folder.join("adapter_config.json");
    let mut about: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    about[key] = value;
    fs::write(&path, about.to_string()).unwrap();
}

#[test]
fn adapters_beside_every_family_are_those_that_were_trained() {
    for name in [
        "mamba2-tiny",
        "llama-tiny",
        "bamba-tiny",
        "falcon-h1-tiny",
        "granitehybrid-dense-tiny",
        "granitehybrid-moe-tiny",
        "nemotron-h-moe-tiny",
        "zamba2-tiny",
        "kimi-linear-tiny",
        "qwen3_5-tiny",
        "qwen3_5-moe-tiny",
        "qwen3next-tiny",
        "olmo-hybrid-tiny",
    ] {
        let (base, folder) = (fixture(name), temporary(name));
        let (mut model, _) = adapted(&base, &[], &folder);
        let want = model.with_model::<Cpu, _>(cpu(), logits).unwrap();
        let plain = opened(&base, None).unwrap();
        assert!(plain.iter().zip(&want).any(|(x, y)| (x - y).abs() > 1e-2), "{name}: a change");
        let beside = opened(&base, Some(&folder)).unwrap();
        close(&beside, &want, name);
        assert!(is_adapter(&folder).unwrap() && !is_adapter(&base).unwrap());
        assert_eq!(opened(&folder, None).unwrap(), beside, "{name}: their folder alone");
        let mut merged = TrainableModel::open(&base, &OpenOptions::default()).unwrap();
        merged.read_adapters(&folder).unwrap();
        merged.merge_adapters().unwrap();
        close(&merged.with_model::<Cpu, _>(cpu(), logits).unwrap(), &want, name);
        fs::remove_dir_all(folder).unwrap();
    }
}

/// What targets can be called of a model: the last parts of the names of its matrices.
fn targets_of(base: &Path) -> Vec<String> {
    let mut model = TrainableModel::open(base, &OpenOptions::default()).unwrap();
    let none = LoraConfig { targets: vec!["?".into()], ..LoraConfig::default() };
    let error = model.add_adapters(&none, 0).unwrap_err().to_string();
    let (_, list) = error.split_once("it has ").unwrap();
    list.split(", ").map(str::to_owned).collect()
}

#[test]
fn each_target_of_each_family_changes_its_model_and_comes_back_from_its_file() {
    for name in models() {
        let (base, folder) = (fixture(name), temporary(&format!("each-{name}")));
        let plain = opened(&base, None).unwrap();
        for target in targets_of(&base) {
            let what = format!("{name} {target}");
            let (mut model, _) = adapted(&base, &[&target], &folder);
            let want = model.with_model::<Cpu, _>(cpu(), logits).unwrap();
            let changes = plain.iter().zip(&want).any(|(x, y)| (x - y).abs() > 1e-4);
            assert!(changes, "{what} changes nothing");
            close(&opened(&base, Some(&folder)).unwrap(), &want, &what);
        }
        fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn d_12_adapters_of_a_folder_beside_its_gguf_file_are_those_of_the_folder() {
    let progress = &mut |_, _| ControlFlow::Continue(());
    for name in delta_models() {
        let (base, folder) = (fixture(name), temporary(&format!("through-{name}")));
        let file = folder.join("model.gguf");
        if let Err(error) = convert(&base, &file, &Options::default(), progress) {
            let said = error.to_string();
            assert!(name.starts_with("olmo") && said.contains("GGUF has no arch"), "{said}");
            continue;
        }
        for target in targets_of(&base) {
            adapted(&base, &[&target], &folder);
            let want = opened(&base, Some(&folder)).unwrap();
            close(&opened(&file, Some(&folder)).unwrap(), &want, &format!("{name} {target}"));
        }
        fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn adapters_beside_blocks_of_several_heads_are_those_of_the_folder_of_the_same_weights() {
    let folder = Folder::new();
    let progress = &mut |_, _| ControlFlow::Continue(());
    let source = wide(&folder);
    for types in ["q8_0", "q4_k_m"] {
        let file = folder.path().join(format!("{types}.gguf"));
        let options = Options { types: Types::named(types).unwrap(), ..Options::default() };
        convert(&source, &file, &options, progress).unwrap();
        let floats = folder.path().join(types);
        convert(&file, &floats, &Options::default(), progress).unwrap();
        let adapters = folder.path().join(format!("{types}-adapters"));
        fs::create_dir(&adapters).unwrap();
        for targets in [&["out_proj"][..], &["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"]] {
            adapted(&floats, targets, &adapters);
            let want = opened(&floats, Some(&adapters)).unwrap();
            let exact = OpenOptions {
                adapter: Some(adapters.clone()),
                exact: true,
                ..OpenOptions::default()
            };
            let exact = LanguageModel::<Cpu>::open(&file, &exact, cpu()).unwrap();
            close(&logits(&exact.model).unwrap(), &want, types);
            // Trained beside the blocks, they are those of the folder too. Activations are rounded there.
            let (mut model, _) = adapted(&file, targets, &adapters);
            let trained = model.with_model::<Cpu, _>(cpu(), logits).unwrap();
            assert_eq!(opened(&file, Some(&adapters)).unwrap(), trained, "{types} {targets:?}");
            let want = opened(&floats, Some(&adapters)).unwrap();
            let largest = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            for (x, y) in trained.iter().zip(&want) {
                assert!((x - y).abs() < 0.06 * largest, "{types} {targets:?}: {x}, expected {y}");
            }
            let refused = model.merge_adapters().unwrap_err().to_string();
            assert!(refused.contains("in quantized blocks"), "{refused}");
        }
    }
}

#[test]
fn adapters_beside_an_open_model_give_the_bits_of_opening_both() {
    for name in ["mamba2-tiny", "llama-tiny", "zamba2-tiny", "kimi-linear-tiny"] {
        let (base, folder) = (fixture(name), temporary(&format!("open-{name}")));
        adapted(&base, &[], &folder);
        let lm = LanguageModel::open(&base, &OpenOptions::default(), cpu()).unwrap();
        let plain = logits(&lm.model).unwrap();
        let with = lm.with_adapters(&folder).unwrap();
        let options = OpenOptions { adapter: Some(folder.clone()), ..OpenOptions::default() };
        let want = LanguageModel::open(&base, &options, cpu()).unwrap();
        assert_eq!(logits(&with.model).unwrap(), logits(&want.model).unwrap(), "{name}");
        assert_eq!(with.model.fingerprint(), want.model.fingerprint(), "{name}");
        assert_eq!(logits(&lm.model).unwrap(), plain, "{name}: the model is as it was");
        // Others in their place, and from a model that was opened with some.
        assert_eq!(
            logits(&want.with_adapters(&folder).unwrap().model).unwrap(),
            logits(&want.model).unwrap()
        );
        fs::remove_dir_all(folder).unwrap();
    }
}

#[test]
fn a_model_that_was_changed_since_takes_no_adapters() {
    let folder = temporary("changed");
    let (base, adapters) = (folder.join("model"), folder.join("adapters"));
    fs::create_dir(&base).unwrap();
    fs::create_dir(&adapters).unwrap();
    for file in fs::read_dir(fixture("mamba2-tiny")).unwrap().flatten() {
        fs::copy(file.path(), base.join(file.file_name())).unwrap();
    }
    adapted(&base, &[], &adapters);
    let lm = LanguageModel::open(&base, &OpenOptions::default(), cpu()).unwrap();
    assert!(lm.with_adapters(&adapters).is_ok());
    let weights = base.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let half = bytes.len() / 2;
    bytes[half..].iter_mut().for_each(|byte| *byte ^= 1);
    fs::write(&weights, bytes).unwrap();
    let error = lm.with_adapters(&adapters).err().unwrap();
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn layers_that_transformers_joins_or_shares_are_saved_as_it_has_them() {
    let folder = temporary("names");
    adapted(&fixture("granitehybrid-dense-tiny"), &["gate_proj", "up_proj", "in_proj"], &folder);
    let about = fs::read_to_string(folder.join("adapter_config.json")).unwrap();
    let about: Value = serde_json::from_str(&about).unwrap();
    assert_eq!(about["target_modules"], json!(["in_proj", "shared_mlp.input_linear"]));
    assert_eq!(about["rank_pattern"], json!({ "shared_mlp.input_linear": 6 }));
    assert_eq!(about["alpha_pattern"], json!({ "shared_mlp.input_linear": 9.0 }));
    let file = Checkpoint::open(&folder.join("adapter_model.safetensors"), false).unwrap();
    let name = "base_model.model.model.layers.0.shared_mlp.input_linear.lora_B.weight";
    let b = file.get(name).unwrap();
    let (values, gate) = (b.to_f32().unwrap(), b.shape[0] / 2);
    assert_eq!(b.shape[1], 6);
    for (i, row) in values.chunks_exact(6).enumerate() {
        let (own, other) = if i < gate { row.split_at(3) } else { (&row[3..], &row[..3]) };
        assert!(own.iter().all(|x| *x != 0.0) && other.iter().all(|x| *x == 0.0), "row {i}");
    }

    adapted(&fixture("zamba2-tiny"), &["q_proj"], &folder);
    let file = Checkpoint::open(&folder.join("adapter_model.safetensors"), false).unwrap();
    let of = |layer: usize| {
        let name = format!("base_model.model.model.layers.{layer}.shared_transformer.self_attn");
        file.get(&format!("{name}.q_proj.lora_B.weight")).map(|b| b.to_f32().unwrap())
    };
    let config = fs::read_to_string(fixture("zamba2-tiny").join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let kinds =
        config["layers_block_type"].as_array().or(config["layer_types"].as_array()).unwrap();
    let hybrid: Vec<usize> = (0..kinds.len()).filter(|&i| kinds[i] == "hybrid").collect();
    let blocks = usize::try_from(config["num_mem_blocks"].as_u64().unwrap()).unwrap();
    assert!(hybrid.len() > blocks, "a block is used twice");
    assert_eq!(file.len(), 2 * hybrid.len());
    for (i, &layer) in hybrid.iter().enumerate() {
        assert_eq!(of(layer).unwrap(), of(hybrid[i % blocks]).unwrap(), "layer {layer}");
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn rows_that_transformers_has_head_by_head_are_saved_in_its_order() {
    let base = fixture("qwen3next-tiny");
    let folder = temporary("grouped");
    for targets in [&["in_proj_z"][..], &["in_proj_qkv", "in_proj_a"], &["in_proj_b", "in_proj_a"]]
    {
        let (mut model, _) = adapted(&base, targets, &folder);
        let want = model.with_model::<Cpu, _>(cpu(), logits).unwrap();
        close(&opened(&base, Some(&folder)).unwrap(), &want, &targets.join(", "));
    }
    // Two key heads of two value heads each: b, b, a, a of one, then of the other.
    let file = Checkpoint::open(&folder.join("adapter_model.safetensors"), false).unwrap();
    let b = file.get("base_model.model.model.layers.0.linear_attn.in_proj_ba.lora_B.weight");
    let b = b.unwrap();
    assert_eq!(b.shape, [8, 6]);
    for (row, values) in b.to_f32().unwrap().chunks_exact(6).enumerate() {
        let (own, other) =
            if row % 4 < 2 { values.split_at(3) } else { (&values[3..], &values[..3]) };
        assert!(own.iter().all(|x| *x != 0.0) && other.iter().all(|x| *x == 0.0), "row {row}");
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn alpha_of_a_layer_and_rank_stabilised_factors_are_pefts() {
    let (base, folder) = (fixture("mamba2-tiny"), temporary("factors"));
    adapted(&base, &["in_proj", "out_proj"], &folder);
    let weights = TrainableModel::open(&base, &OpenOptions::default()).unwrap();
    let path = base.join("model.safetensors");
    let file = Checkpoint::open(&path, false).unwrap();
    let scales = || {
        let adapters = Adapters::read(&folder).unwrap();
        let beside = adapters.beside(weights.config(), &file).unwrap();
        let of = |name: &str| beside[&format!("backbone.layers.1.mixer.{name}")].scale;
        [of("in_proj"), of("out_proj")]
    };
    assert_eq!(scales(), [1.5, 1.5]);
    change(&folder, "alpha_pattern", json!({ "out_proj": 9.0, "proj": 1.0 }));
    assert_eq!(scales(), [1.5, 3.0]);
    change(&folder, "use_rslora", json!(true));
    assert_eq!(scales(), [4.5, 9.0].map(|alpha| (alpha / 3f64.sqrt()) as f32));
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn keys_of_alpha_pattern_are_regular_expressions_of_which_the_first_that_fits_counts() {
    let (base, folder) = (fixture("mamba2-tiny"), temporary("patterns"));
    adapted(&base, &["in_proj", "out_proj"], &folder);
    let weights = TrainableModel::open(&base, &OpenOptions::default()).unwrap();
    let file = Checkpoint::open(&base.join("model.safetensors"), false).unwrap();
    let scales = || {
        let beside = Adapters::read(&folder)?.beside(weights.config(), &file)?;
        let of = |name: &str| beside[&format!("backbone.layers.1.mixer.{name}")].scale;
        Ok::<_, Error>([of("in_proj"), of("out_proj")])
    };
    for (patterns, want) in [
        (json!({ r"layers\.1\.mixer\.out_proj": 9.0 }), [1.5, 3.0]),
        (json!({ r"layers\.0\.mixer\.out_proj": 9.0 }), [1.5, 1.5]),
        (json!({ "(in|out)_proj": 9.0 }), [3.0, 3.0]),
        (json!({ "in_proj|x": 9.0 }), [3.0, 1.5]),
        (json!({ r"layers\.[01]\.mixer\.in_proj": 9.0, "in_proj": 1.5 }), [3.0, 1.5]),
        (json!({ "in_proj": 1.5, r"layers\.[01]\.mixer\.in_proj": 9.0 }), [0.5, 1.5]),
        (json!({ ".*_proj": 9.0 }), [3.0, 3.0]),
        (json!({ r"^backbone\.layers\.\d+\.mixer\.in_proj": 9.0 }), [3.0, 1.5]),
        (json!({ "in_pro": 9.0, "n_proj": 9.0 }), [1.5, 1.5]),
    ] {
        change(&folder, "alpha_pattern", patterns.clone());
        change(&folder, "use_rslora", json!(false));
        assert_eq!(scales().unwrap(), want, "{patterns}");
        change(&folder, "use_rslora", json!(true));
        let by_root = want.map(|scale: f32| (f64::from(scale) * 3.0 / 3f64.sqrt()) as f32);
        assert_eq!(scales().unwrap(), by_root, "{patterns}");
    }
    for bad in [json!({ "in_pro[j": 9.0 }), json!({ "(?!in)_proj": 9.0 }), json!({ "x": "9" })] {
        change(&folder, "alpha_pattern", bad.clone());
        let error = scales().unwrap_err().to_string();
        let key = bad.as_object().unwrap().keys().next().unwrap();
        assert!(error.contains(&format!("alpha_pattern.{key}")), "{error}");
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_rank_of_the_file_and_one_of_the_matrices_that_differ_are_both_named() {
    let (base, folder) = (fixture("mamba2-tiny"), temporary("ranks"));
    adapted(&base, &["in_proj", "out_proj"], &folder);
    let plain = opened(&base, Some(&folder)).unwrap();
    // The general rank is of no layer, if each has one of its own; the factor is alpha by the own one.
    change(&folder, "r", json!(64));
    for fits in [
        json!({ "in_proj": 3, "out_proj": 3 }),
        json!({ r"layers\.\d+\.mixer\.(in|out)_proj": 3 }),
        json!({ "in_proj": 3, ".*": 3, "out_proj": 9 }),
    ] {
        change(&folder, "rank_pattern", fits);
        assert_eq!(opened(&base, Some(&folder)).unwrap(), plain);
    }
    for (patterns, said) in [
        (json!({ "in_proj": 3 }), "out_proj` has rank 3, but `r` in `"),
        (json!({ "in_proj": 4, ".*": 3 }), "in_proj` has rank 3, but `rank_pattern` in `"),
        (
            json!({ "in_proj": 0 }),
            "`rank_pattern.in_proj`: expected a whole number above 0, found 0",
        ),
        (json!({ "in_proj": 2.5 }), "`rank_pattern.in_proj`: expected a whole number above 0"),
        (json!({ "in_pro[j": 3 }), "`rank_pattern.in_pro[j`: expected a regular expression"),
    ] {
        change(&folder, "rank_pattern", patterns);
        let error = opened(&base, Some(&folder)).unwrap_err().to_string();
        assert!(error.contains(said), "expected {said:?}, found {error}");
    }
    for none in [json!({}), Value::Null] {
        change(&folder, "r", json!(3));
        change(&folder, "use_rslora", Value::Null);
        change(&folder, "rank_pattern", none);
        assert_eq!(opened(&base, Some(&folder)).unwrap(), plain);
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn adapters_that_do_not_fit_are_errors_that_say_what_is_wrong() {
    let (base, folder) = (fixture("mamba2-tiny"), temporary("refused"));
    adapted(&base, &["in_proj"], &folder);
    let told = |path: &Path, adapter: Option<&Path>, expected: &str| {
        let error = opened(path, adapter).unwrap_err();
        let error = format!("{error}: {:?}", std::error::Error::source(&error));
        assert!(error.contains(expected), "expected {expected:?}, found {error}");
    };
    for other in ["llama-tiny", "bamba-tiny"] {
        told(&fixture(other), Some(&folder), "no layer of the model: adapters of another model?");
    }
    told(&fixture("mamba2-tiny-g2"), Some(&folder), "but the model has [[");
    told(&folder, Some(&folder), "expected a model, found adapters");
    told(&base, Some(&base), "adapter_config.json");
    let out = folder.join("out");
    let progress = &mut |_, _| ControlFlow::Continue(());
    let error = convert(&folder, &out, &Options::default(), progress).unwrap_err().to_string();
    assert!(error.contains("adapters beside a model") && error.contains("--merge"), "{error}");
    let open = OpenOptions { adapter: Some(folder.clone()), ..OpenOptions::default() };
    let options = Options { open, ..Options::default() };
    let error = convert(&base, &out, &options, progress).unwrap_err().to_string();
    assert!(error.contains("merge them into it first"), "{error}");

    // The base is found from here or from the folder of the adapters.
    change(&folder, "base_model_name_or_path", json!("./base"));
    told(&folder, None, "its base model `./base` is not there");
    fs::create_dir(folder.join("base")).unwrap();
    assert_eq!(base_of(&folder).unwrap(), folder.join("./base"));
    fs::remove_dir(folder.join("base")).unwrap();
    change(&folder, "base_model_name_or_path", Value::Null);
    told(&folder, None, "names no base model");
    opened(&base, Some(&folder)).unwrap();

    let about = fs::read_to_string(folder.join("adapter_config.json")).unwrap();
    for (key, value, expected) in [
        ("peft_type", json!("IA3"), "plain LoRA, found peft_type \"IA3\""),
        ("use_dora", json!(true), "found use_dora"),
        ("layer_replication", json!([[0, 2]]), "found layer_replication"),
        ("alora_invocation_tokens", json!([5]), "found alora_invocation_tokens"),
        ("lora_bias", json!(true), "found lora_bias"),
        ("init_lora_weights", json!("pissa_niter_4"), "which changes the model's own weights"),
        ("r", json!(4), "has rank 3, but `r` in `"),
        ("lora_alpha", json!(1e300), "alpha is too large"),
        ("bias", json!("all"), "found bias \"all\""),
        ("modules_to_save", json!(["lm_head"]), "found modules_to_save"),
        ("r", json!(0), "found r of 0"),
        ("r", json!("many"), "adapter_config.json"),
    ] {
        change(&folder, key, value);
        told(&base, Some(&folder), expected);
        fs::write(folder.join("adapter_config.json"), &about).unwrap();
    }
    fs::remove_file(folder.join("adapter_model.safetensors")).unwrap();
    told(&base, Some(&folder), "adapter_model.safetensors");
    fs::write(folder.join("adapter_config.json"), "{").unwrap();
    told(&base, Some(&folder), "adapter_config.json");
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn adapters_of_stacked_experts_are_refused_by_the_name_of_the_module() {
    use boostr::checkpoint::{Dtype, safetensors};
    let folder = temporary("stacked");
    for (name, module) in [
        ("qwen3_5-moe-tiny", "model.language_model.layers.0.mlp.experts.gate_up_proj"),
        ("qwen3_5-moe-tiny", "model.language_model.layers.0.mlp.experts.down_proj"),
        ("qwen3_5-moe-tiny", "model.language_model.layers.1.mlp.experts"),
        ("qwen3next-tiny", "model.layers.1.mlp.experts.base_layer"),
        ("kimi-linear-tiny", "model.layers.1.block_sparse_moe.experts.down_proj"),
        ("granitehybrid-moe-tiny", "model.layers.0.block_sparse_moe.input_linear"),
        ("nemotron-h-moe-tiny", "backbone.layers.1.mixer.experts.up_proj"),
    ] {
        let base = fixture(name);
        adapted(&base, &[&targets_of(&base)[0]], &folder);
        change(&folder, "r", json!(2));
        let names = ["A", "B"].map(|of| format!("base_model.model.{module}.lora_{of}.weight"));
        let bytes = vec![0u8; 4 * 2 * 64];
        let shapes: [&[usize]; 2] = [&[2, 64], &[64, 2]];
        let tensors: Vec<_> = names
            .iter()
            .zip(shapes)
            .map(|(name, shape)| (name.as_str(), Dtype::F32, shape, &bytes[..]))
            .collect();
        let path = folder.join("adapter_model.safetensors");
        safetensors::write(&path, &tensors, &Default::default()).unwrap();
        let error = opened(&base, Some(&folder)).unwrap_err().to_string();
        let said = format!("adapters of the stacked experts `{module}`");
        assert!(error.contains(&said), "{name}: {error}");
        change(&folder, "target_parameters", json!(["mlp.experts.gate_up_proj"]));
        let error = opened(&base, Some(&folder)).unwrap_err();
        let error = format!("{error}: {:?}", std::error::Error::source(&error));
        assert!(error.contains("target_parameters [\"mlp.experts.gate_up_proj\"]"), "{error}");
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn matrices_that_are_no_pairs_are_errors_that_name_them() {
    use boostr::checkpoint::{Dtype, safetensors};
    let (base, folder) = (fixture("mamba2-tiny"), temporary("pairs"));
    adapted(&base, &["in_proj"], &folder);
    change(&folder, "r", json!(4));
    let layer = "base_model.model.backbone.layers.0.mixer.in_proj";
    let bytes = vec![0u8; 4 * 64 * 4];
    for (names, shapes, expected) in [
        (&["lora_A.weight"][..], &[[4, 64]][..], "found one of them"),
        (&["lora_B.weight"], &[[64, 4]], "found one of them"),
        (&["lora_A.weight", "lora_B.weight"], &[[4, 64], [128, 2]], "of other ranks"),
        (&["lora_A.weight", "lora_B.weight"], &[[4, 64], [64, 4]], "but the model has"),
        (&["lora_embedding_A"], &[[4, 64]], "is no matrix of LoRA"),
    ] {
        let names: Vec<String> = names.iter().map(|name| format!("{layer}.{name}")).collect();
        let tensors: Vec<(&str, Dtype, &[usize], &[u8])> = names
            .iter()
            .zip(shapes)
            .map(|(name, shape)| (name.as_str(), Dtype::F32, &shape[..], &bytes[..]))
            .collect();
        let path = folder.join("adapter_model.safetensors");
        safetensors::write(&path, &tensors, &Default::default()).unwrap();
        let error = opened(&base, Some(&folder)).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("in_proj"), "{error}");
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn adapters_go_with_quantized_weights_but_not_with_weights_that_have_other_factors() {
    let folder = temporary("gguf");
    let progress = &mut |_, _| ControlFlow::Continue(());
    for name in ["mamba2-tiny", "falcon-h1-tiny"] {
        let (base, file) = (fixture(name), folder.join(format!("{name}.gguf")));
        convert(&base, &file, &Options::default(), progress).unwrap();
        let adapters = folder.join(name);
        fs::create_dir(&adapters).unwrap();
        adapted(&base, &["in_proj"], &adapters);
        let of_folder = opened(&base, Some(&adapters)).unwrap();
        if name == "mamba2-tiny" {
            close(&opened(&file, Some(&adapters)).unwrap(), &of_folder, name);
            continue;
        }
        let error = opened(&file, Some(&adapters)).unwrap_err().to_string();
        assert!(error.contains("adapters of a folder") && error.contains("falcon_h1"), "{error}");
        adapted(&file, &["in_proj"], &adapters);
        opened(&file, Some(&adapters)).unwrap();
        let error = opened(&base, Some(&adapters)).unwrap_err().to_string();
        assert!(error.contains("adapters of a GGUF file"), "{error}");
    }
    fs::remove_dir_all(folder).unwrap();
}
