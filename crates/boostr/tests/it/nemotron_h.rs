//! Nemotron-H: its configurations in all their spellings, its files in both layouts. `golden.rs`
//! compares the models with the original. Ids in names: `fixtures/CASES.md`.

use std::collections::BTreeMap;
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::{Folder, Random, cpu};
use crate::tiny::{close, edited, entry, fixture, floats, message, run, save, tokens, widened};
use boostr::Error;
use boostr::backend::Cpu;
use boostr::checkpoint::gguf::Metadata;
use boostr::checkpoint::{Checkpoint, ConfigFile, Dtype, gguf};
use boostr::convert::{Options, Types, convert};
use boostr::load::LanguageModel;
use boostr::models::nemotron_h::{Block, Config};
use boostr::models::{self, Family, Model};
use serde_json::{Value, json};

const MODELS: [&str; 2] = ["nemotron-h-tiny", "nemotron-h-moe-tiny"];
/// Between two ways of ours to compute the same: rounding only.
const ROUNDING: f64 = 2e-5;
const VOCAB: usize = 512;

/// A configuration with a layer of each kind and with `changes`; null takes a field away.
fn json(changes: Value) -> Value {
    let mut json = json!({
        "model_type": "nemotron_h", "hidden_size": 64, "vocab_size": VOCAB, "tie_word_embeddings": false,
        "hybrid_override_pattern": "M-*EM", "num_hidden_layers": 5, "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
        "conv_kernel": 4, "expand": 2, "use_conv_bias": true, "use_bias": false,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 96, "mlp_hidden_act": "relu2",
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": true
    });
    let Value::Object(changes) = changes else { panic!("no object: {changes}") };
    json.as_object_mut().unwrap().extend(changes);
    json
}

fn read(json: &Value) -> Result<Config, Error> {
    let file = ConfigFile::parse("config.json", &json.to_string())?;
    Ok(models::Config::read(&file)?.get::<Config>().unwrap().clone())
}

fn config(changes: Value) -> Config {
    read(&json(changes)).unwrap()
}

fn refused(changes: Value) -> String {
    message(&read(&json(changes)).unwrap_err())
}

/// Random weights in which nothing is what a lazy loader would guess: D and norms are not 1.
fn checkpoint(config: &Config) -> Checkpoint {
    let mut random = Random(0x5eed);
    let tensors = config.parameters(VOCAB, true).unwrap();
    let entries = tensors.iter().map(|(name, shape)| {
        let (center, spread) = match (name.rsplit('.').next().unwrap(), shape) {
            ("A_log", _) => (1.0, 1.5),
            ("dt_bias", _) => (-2.0, 2.0),
            ("bias" | "e_score_correction_bias", _) => (0.0, 0.3),
            (_, [_, columns] | [_, _, columns]) => (0.0, (3.0 / *columns as f32).sqrt()),
            _ => (1.0, 0.5),
        };
        let values = floats(&mut random, shape.iter().product());
        let values: Vec<f32> = values.iter().map(|x| center + spread * x).collect();
        (name.to_owned(), entry(Dtype::F32, shape, &values))
    });
    Checkpoint::from_entries("random", entries.collect())
}

fn load(config: &Config, checkpoint: &Checkpoint) -> Model<Cpu> {
    Model::load(config.clone(), checkpoint.clone(), cpu()).unwrap()
}

fn open(path: &Path) -> Arc<Model<Cpu>> {
    LanguageModel::open(path, &Default::default(), cpu()).unwrap().model
}

/// Logits of a prompt and of a few tokens more.
fn logits(model: &Model<Cpu>) -> Vec<f32> {
    run(model, &tokens(7, 26, VOCAB), &[20, 1, 1, 4], &mut model.new_state().unwrap())
}

/// A folder with the model.
fn saved(json: &Value, checkpoint: &Checkpoint) -> Folder {
    let folder = Folder::new();
    folder.write("config.json", json.to_string());
    std::fs::copy(fixture(MODELS[0]).join("tokenizer.json"), folder.path().join("tokenizer.json"))
        .unwrap();
    save(&folder.path().join("model.safetensors"), checkpoint);
    folder
}

fn converted(source: &Path, out: PathBuf) -> PathBuf {
    converted_with(source, out, &[])
}

/// Converts a model, of which these lines are said.
fn converted_with(source: &Path, out: PathBuf, lines: &[&str]) -> PathBuf {
    let options = Options { types: Types::kept(), ..Options::default() };
    let converted = convert(source, &out, &options, &mut |_, _| Continue(())).unwrap();
    assert_eq!(converted.warnings, lines);
    out
}

fn not_converted(source: &Path, folder: &Folder) -> String {
    let out = folder.path().join("refused.gguf");
    let error = convert(source, &out, &Options::default(), &mut |_, _| Continue(())).unwrap_err();
    assert!(!out.exists());
    message(&error)
}

/// Every tensor with its type, shape and bytes.
fn contents(path: &Path) -> BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
    let file = Checkpoint::open(path, false).unwrap();
    let tensor = |(name, t): (&str, &boostr::checkpoint::TensorEntry)| {
        (name.to_owned(), (t.dtype, t.shape.clone(), t.data.to_vec()))
    };
    file.iter().map(tensor).collect()
}

#[test]
fn case_43_a_pattern_and_lists_of_old_and_new_words_are_the_same_layers() {
    let pattern = config(json!({ "hybrid_override_pattern": "M-*EM" }));
    let letters = pattern.blocks.iter().map(|block| match block {
        Block::Mamba2(_) => 'M',
        Block::Attention(_) => '*',
        Block::Mlp(_) => '-',
        Block::Moe { .. } => 'E',
    });
    assert_eq!(letters.collect::<String>(), "M-*EM");
    let old = json!(["mamba", "mlp", "attention", "moe", "mamba"]);
    let new = json!(["linear_attention", "mlp", "full_attention", "moe", "linear_attention"]);
    for list in [old, new] {
        for key in ["layers_block_type", "layer_types"] {
            // A list is all that counts.
            for (pattern_too, count) in
                [(Value::Null, json!(5)), (json!("**"), json!(99)), (json!("x"), Value::Null)]
            {
                let changes = json!({
                    "hybrid_override_pattern": pattern_too, "num_hidden_layers": count, key: list,
                });
                assert_eq!(config(changes), pattern, "{key}");
            }
        }
    }
    assert_eq!(config(json!({ "num_hidden_layers": null })), pattern);
}

#[test]
fn case_43_what_is_no_layer_is_named_and_so_are_two_counts_that_differ() {
    for (changes, parts) in [
        (json!({ "hybrid_override_pattern": "M|*X|" }), ["M, *, - and E", "\"X|\""]),
        (json!({ "hybrid_override_pattern": "M*é" }), ["hybrid_override_pattern", "\"é\""]),
        (json!({ "hybrid_override_pattern": "MM*" }), ["3 layers", "num_hidden_layers is 5"]),
        (json!({ "hybrid_override_pattern": "" }), ["0 layers", "num_hidden_layers is 5"]),
        (json!({ "hybrid_override_pattern": null }), ["hybrid_override_pattern", "missing"]),
        (json!({ "hybrid_override_pattern": 5 }), ["hybrid_override_pattern", "a string"]),
        (json!({ "layers_block_type": ["mamba", "conv"] }), ["layers_block_type", "\"conv\""]),
        (json!({ "layers_block_type": ["moe", "Mamba"] }), ["linear_attention", "\"Mamba\""]),
        (json!({ "layers_block_type": [] }), ["num_hidden_layers", "found 0"]),
        (json!({ "layers_block_type": vec!["mlp"; 10_001] }), ["10001 layers", "at most 10000"]),
        (
            json!({ "hybrid_override_pattern": "-".repeat(10_001), "num_hidden_layers": null }),
            ["10001 layers", "10000"],
        ),
    ] {
        let message = refused(changes);
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
}

#[test]
fn every_alias_of_a_field_is_that_field() {
    let own = json!({
        "n_groups": 3, "conv_kernel": 3, "use_conv_bias": false, "use_bias": true, "head_dim": 24,
        "time_step_limit": [0.5, 2.0], "n_routed_experts": 6
    });
    let want = config(own.clone());
    assert_ne!(want, config(json!({})));
    for (key, alias) in [
        ("n_groups", "mamba_n_groups"),
        ("conv_kernel", "mamba_d_conv"),
        ("use_conv_bias", "mamba_conv_bias"),
        ("use_bias", "mamba_proj_bias"),
        ("head_dim", "attention_head_dim"),
        ("time_step_limit", "mamba_dt_limit"),
        ("n_routed_experts", "num_local_experts"),
        ("layer_norm_epsilon", "rms_norm_eps"),
    ] {
        let mut changes = own.clone();
        changes[alias] = changes.get(key).unwrap_or(&json!(1e-5)).clone();
        changes[key] = Value::Null;
        assert_eq!(config(changes), want, "{alias}");
    }
}

#[test]
fn channels_are_heads_times_their_width_whatever_expand_says() {
    let narrow = config(json!({ "expand": 7 }));
    assert_eq!(narrow, config(json!({ "expand": null })));
    let Block::Mamba2(mixer) = &narrow.blocks[0] else { panic!("{narrow:?}") };
    assert_eq!((mixer.d_inner(), mixer.d_in_proj()), (96, 96 + 96 + 2 * 2 * 16 + 6));
}

#[test]
fn sizes_and_options_that_cannot_be_are_refused_by_name() {
    for (changes, parts) in [
        (json!({ "mlp_hidden_act": "silu" }), ["mlp_hidden_act", "relu2, found \"silu\""]),
        (json!({ "mamba_hidden_act": "gelu" }), ["mamba_hidden_act", "silu, found \"gelu\""]),
        (json!({ "block_configs": [] }), ["block_configs", "Puzzle"]),
        (json!({ "mamba_num_heads": null }), ["mamba_num_heads", "missing"]),
        (json!({ "mamba_num_heads": 5 }), ["n_groups", "2 groups do not divide 5 heads"]),
        (json!({ "num_key_value_heads": 3 }), ["num_key_value_heads", "3 do not divide 4"]),
        (json!({ "intermediate_size": null }), ["intermediate_size", "missing"]),
        (json!({ "moe_intermediate_size": 0 }), ["moe_intermediate_size", "found 0"]),
        (json!({ "num_experts_per_tok": 9 }), ["num_experts_per_tok", "9 of 8 experts"]),
        (json!({ "n_group": 3 }), ["n_group", "3 groups do not divide 8 experts"]),
        (json!({ "n_group": 2, "topk_group": 3 }), ["topk_group", "3 of 2 groups"]),
        (
            json!({ "n_group": 4, "topk_group": 1 }),
            ["num_experts_per_tok", "3 of 2 experts of the best 1 groups"],
        ),
        (json!({ "n_routed_experts": 1 << 20 }), ["num_experts", "1048576 in all layers"]),
        (json!({ "mlp_bias": true, "moe_latent_size": 8 }), ["mlp_bias", "moe_latent_size"]),
        (json!({ "time_step_limit": [0.5] }), ["time_step_limit", "expected [low, high]"]),
    ] {
        let message = refused(changes);
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    }
    // What no layer needs is not asked for.
    let changes = json!({
        "hybrid_override_pattern": "*", "num_hidden_layers": 1, "mamba_num_heads": null,
        "intermediate_size": null, "n_routed_experts": null,
    });
    assert_eq!(config(changes).blocks.len(), 1);
}

#[test]
fn case_32_limits_of_the_steps_act_alike_in_prompts_and_in_decoding() {
    let plain = config(json!({}));
    assert_eq!(config(json!({ "time_step_limit": [0.0, { "__float__": "Infinity" }] })), plain);
    // These are for the first values of training, not limits.
    assert_eq!(config(json!({ "time_step_min": 0.4, "time_step_max": 0.5 })), plain);
    let checkpoint = checkpoint(&plain);
    let limited = config(json!({ "time_step_limit": [0.05, 0.06] }));
    let ids = tokens(3, 40, VOCAB);
    let with = |config: &Config, pieces: &[usize]| {
        let model = load(config, &checkpoint);
        run(&model, &ids, pieces, &mut model.new_state().unwrap())
    };
    let (prompt, steps) = (with(&limited, &[40]), with(&limited, &[1; 40]));
    close(&steps, &widened(&prompt), ROUNDING);
    let free = with(&plain, &[40]);
    let change = prompt.iter().zip(&free).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(change > 0.01, "{change}");
}

/// Configurations that no fixture has.
fn variants() -> Vec<Value> {
    let dense = json!({
        "hybrid_override_pattern": "M-*-M", "attention_bias": true, "mlp_bias": true,
        "n_routed_experts": null, "layer_norm_epsilon": 1e-6, "head_dim": 24, "n_groups": 3,
    });
    let experts = json!({
        "hybrid_override_pattern": "ME*EM", "n_group": 4, "topk_group": 2, "norm_topk_prob": false,
        "routed_scaling_factor": 1.25,
    });
    let latent = json!({ "hybrid_override_pattern": "EM*ME", "moe_latent_size": 32 });
    [dense, experts, latent].map(json).into()
}

#[test]
fn a_gguf_file_has_the_same_logits_and_gives_the_folder_back() {
    let mut sources: Vec<(Option<Folder>, PathBuf)> =
        MODELS.iter().map(|name| (None, fixture(name))).collect();
    for json in variants() {
        let folder = saved(&json, &checkpoint(&read(&json).unwrap()));
        let path = folder.path().to_owned();
        sources.push((Some(folder), path));
    }
    for (i, (_folder, source)) in sources.iter().enumerate() {
        let out = Folder::new();
        let file = converted(source, out.path().join("model.gguf"));
        let (before, after) = (open(source), open(&file));
        assert_eq!(logits(&before), logits(&after), "model {i}");
        let [before, after] =
            [&before, &after].map(|model| model.config().get::<Config>().unwrap().clone());
        assert_eq!(after, Config { tie_embeddings: None, ..before.clone() }, "model {i}");
        let arch = if i == 0 || i == 2 { "nemotron_h" } else { "nemotron_h_moe" };
        let gguf = Checkpoint::open(&file, false).unwrap();
        assert_eq!(gguf.gguf().unwrap().text("general.architecture").unwrap(), Some(arch));
        let back = converted(&file, out.path().join("folder"));
        let [ours, theirs] = [&back, source].map(|path| contents(&path.join("model.safetensors")));
        assert!(ours == theirs, "model {i}");
        let text = std::fs::read_to_string(back.join("config.json")).unwrap();
        assert_eq!(read(&serde_json::from_str(&text).unwrap()).unwrap(), before, "model {i}");
    }
}

#[test]
fn what_llama_cpp_makes_of_a_folder_gives_the_logits_of_the_original() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/gguf/nemotron-h-moe-tiny-f32.gguf");
    let golden = Checkpoint::open(&fixture(MODELS[1]).join("golden.safetensors"), false).unwrap();
    let data = |name| golden.get(name).unwrap().data.as_chunks::<8>().0.to_vec();
    let ids = data("input_ids").into_iter().map(|b| i64::from_le_bytes(b) as u32);
    let ids: Vec<u32> = ids.collect();
    let want: Vec<f64> = data("noclamp.logits_f64").into_iter().map(f64::from_le_bytes).collect();
    let model = open(&file);
    let logits = run(&model, &ids, &[ids.len()], &mut model.new_state().unwrap());
    for (got, want) in logits.iter().zip(&want) {
        assert!((f64::from(*got) - want).abs() < 2e-4, "{got} is not {want}");
    }
    assert_eq!(logits.len(), want.len());
    // Its tensors are those of the folder: the rows of queries and keys are put back in their order.
    let out = Folder::new();
    let back = converted(&file, out.path().join("folder"));
    let [mut ours, mut theirs] =
        [&back, &fixture(MODELS[1])].map(|path| contents(&path.join("model.safetensors")));
    let is_rounded = |name: &String| name.ends_with("A_log");
    ours.retain(|name, _| !is_rounded(name));
    theirs.retain(|name, _| !is_rounded(name));
    assert!(ours == theirs);
}

#[test]
fn layers_are_told_by_the_sizes_that_gguf_has_for_each() {
    let out = Folder::new();
    for (name, nheads_kv, widths) in [
        (MODELS[0], [0, 0, 0, 2, 0], [0, 160, 0, 0, 160]),
        (MODELS[1], [0, 0, 0, 2, 0], [0, 48, 0, 0, 48]),
    ] {
        let file = converted(&fixture(name), out.path().join(format!("{name}.gguf")));
        let file = Checkpoint::open(&file, false).unwrap();
        let metadata = file.gguf().unwrap();
        let arch = metadata.text("general.architecture").unwrap().unwrap();
        let ints = |key: &str| metadata.ints(&format!("{arch}.{key}")).unwrap().unwrap();
        assert_eq!(ints("attention.head_count_kv"), nheads_kv);
        assert_eq!(ints("feed_forward_length"), widths);
    }
}

#[test]
fn names_under_model_stacked_experts_and_layers_that_predict_further_are_read() {
    let json = json(json!({ "moe_latent_size": 32, "num_nextn_predict_layers": 1 }));
    let config = read(&json).unwrap();
    let plain = checkpoint(&config);
    let want = logits(&load(&config, &plain));
    for prefix in ["model.", "model.backbone."] {
        let renamed = crate::tiny::renamed(&plain, |name| match name.strip_prefix("backbone.") {
            Some(rest) => format!("{prefix}{rest}"),
            None if prefix == "model." => name.to_owned(),
            None => format!("model.{name}"),
        });
        assert_eq!(logits(&load(&config, &renamed)), want, "{prefix}");
    }

    let mut tensors: BTreeMap<_, _> =
        plain.iter().map(|(name, entry)| (name.to_owned(), entry.clone())).collect();
    tensors.insert("mtp.layers.0.enorm.weight".into(), entry(Dtype::F32, &[2], &[1.0, 2.0]));
    for part in ["up_proj", "down_proj"] {
        let experts = "backbone.layers.3.mixer.experts";
        let mut stack = Vec::new();
        let mut shape = Vec::new();
        for expert in 0..8 {
            let one = tensors.remove(&format!("{experts}.{expert}.{part}.weight")).unwrap();
            shape = [&[8], &one.shape[..]].concat();
            stack.extend(one.to_f32().unwrap());
        }
        tensors.insert(format!("{experts}.{part}"), entry(Dtype::F32, &shape, &stack));
    }
    let stacked = Checkpoint::from_entries("stacked", tensors);
    assert_eq!(logits(&load(&config, &stacked)), want);

    let short = edited(&stacked, |name, old| {
        let is_stack = name.ends_with("experts.up_proj");
        let shape = [7, 24, 32];
        let values = old.to_f32().unwrap();
        Some(if is_stack { entry(Dtype::F32, &shape, &values[..7 * 24 * 32]) } else { old.clone() })
    });
    let error = Model::<Cpu>::load(config, short, cpu()).err().unwrap();
    let error = message(&error);
    assert!(error.contains("experts.up_proj` [7, 24, 32], expected [8, 24, 32]"), "{error}");
}

/// Writes a GGUF file again, with other keys and tensors.
fn rewritten(
    source: &Path,
    out: &Path,
    edit: impl FnOnce(&mut Metadata),
    more: &[(&str, &[usize])],
) {
    let file = Checkpoint::open(source, false).unwrap();
    let mut metadata = file.gguf().unwrap().clone();
    edit(&mut metadata);
    let old: Vec<_> = file.iter().collect();
    let mut tensors: Vec<(&str, Dtype, &[usize])> =
        old.iter().map(|(name, t)| (*name, t.dtype, &t.shape[..])).collect();
    tensors.extend(more.iter().map(|(name, shape)| (*name, Dtype::F32, *shape)));
    gguf::write(out, &metadata, &tensors, |i| {
        Ok(match old.get(i) {
            Some((_, t)) => t.data.clone(),
            None => {
                let shape = more[i - old.len()].1;
                entry(Dtype::F32, shape, &vec![1.0; shape.iter().product()]).data
            }
        })
    })
    .unwrap();
}

#[test]
fn blocks_of_a_gguf_file_that_predict_further_are_left_out_of_a_new_one_too() {
    let out = Folder::new();
    let plain = converted(&fixture(MODELS[1]), out.path().join("plain.gguf"));
    let more = out.path().join("more.gguf");
    let edit = |metadata: &mut Metadata| {
        metadata.set("nemotron_h_moe.nextn_predict_layers", 1u32);
        metadata.set("nemotron_h_moe.block_count", 6u32);
        metadata.set("nemotron_h_moe.attention.head_count_kv", &[0, 0, 0, 2, 0, 2][..]);
        metadata.set("nemotron_h_moe.feed_forward_length", &[0, 48, 0, 0, 48, 48][..]);
    };
    rewritten(
        &plain,
        &more,
        edit,
        &[("blk.5.nextn.enorm.weight", &[64]), ("blk.5.attn_norm.weight", &[64])],
    );
    let want = logits(&open(&plain));
    assert_eq!(logits(&open(&more)), want);
    let line = "2 tensors of the block for more than the next token are left out";
    let again = converted_with(&more, out.path().join("again.gguf"), &[line]);
    assert_eq!(logits(&open(&again)), want);
    assert!(contents(&again) == contents(&plain));
    let file = Checkpoint::open(&again, false).unwrap();
    let count = file.gguf().unwrap().usize("nemotron_h_moe.block_count", 0..=99).unwrap();
    assert_eq!(
        (count, file.gguf().unwrap().has("nemotron_h_moe.nextn_predict_layers")),
        (Some(5), false)
    );
    // Without the key such a block is one too many.
    let stray = out.path().join("stray.gguf");
    rewritten(&plain, &stray, |_| {}, &[("blk.5.attn_norm.weight", &[64])]);
    let error = LanguageModel::<Cpu>::open(&stray, &Default::default(), cpu()).err().unwrap();
    assert!(message(&error).contains("unexpected: `blk.5.attn_norm.weight`"), "{error}");
}

#[test]
fn keys_of_gguf_that_cannot_be_are_refused_by_name() {
    let out = Folder::new();
    let plain = converted(&fixture(MODELS[1]), out.path().join("plain.gguf"));
    let broken = out.path().join("broken.gguf");
    for (key, value, part) in [
        // Each layer its own sizes: Puzzle.
        ("expert_feed_forward_length", gguf::Value::from(&[0, 48, 0, 0, 24][..]), "Puzzle"),
        ("expert_used_count", gguf::Value::from(&[0, 2, 0, 0, 1][..]), "Puzzle"),
        ("nextn_predict_layers", 5u32.into(), "leave no layer"),
        ("attention.head_count_kv", gguf::Value::from(&[0, 0, 2][..]), "an array of 5"),
        ("expert_group_count", 2u32.into(), "expert_group_used_count"),
        ("attention.value_length", 8u32.into(), "expected 16, as keys have, found 8"),
        ("expert_used_count", 5u32.into(), "5 of 4 experts"),
    ] {
        let name = format!("nemotron_h_moe.{key}");
        let edit = |metadata: &mut Metadata| {
            metadata.set(name.clone(), value);
            if key == "expert_group_count" {
                metadata.retain(|key| !key.ends_with("expert_group_used_count"));
            }
        };
        rewritten(&plain, &broken, edit, &[]);
        let error = LanguageModel::<Cpu>::open(&broken, &Default::default(), cpu()).err().unwrap();
        let error = message(&error);
        assert!(error.contains(part), "{key}: {error}");
    }
}

#[test]
fn what_gguf_has_no_place_for_is_refused() {
    for (changes, part) in [
        (json!({ "hybrid_override_pattern": "M-*EM" }), "experts beside some without"),
        (json!({ "hybrid_override_pattern": "ME*EM", "mlp_bias": true }), "biases of experts"),
        (
            json!({ "hybrid_override_pattern": "M-*-M", "use_bias": true }),
            "mixer.in_proj.bias` in GGUF",
        ),
        (json!({ "hybrid_override_pattern": "M-*-M", "time_step_limit": [0.1, 1.0] }), "limits"),
    ] {
        let json = json(changes);
        let folder = saved(&json, &checkpoint(&read(&json).unwrap()));
        let message = not_converted(folder.path(), &folder);
        assert!(message.contains(part), "{message}");
    }
}
