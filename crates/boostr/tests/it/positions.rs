//! Scalings of rotary positions: what files say of them, against values of others. Ids in names:
//! `fixtures/CASES.md`.

use std::fs;
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};

use crate::common::{Folder, cpu};
use crate::tiny::message;
use boostr::Result;
use boostr::backend::Cpu;
use boostr::checkpoint::gguf::{self, Metadata};
use boostr::checkpoint::{Checkpoint, ConfigFile};
use boostr::convert::{Options, convert};
use boostr::load::LanguageModel;
use boostr::models::{Config, Logits, Run};
use boostr::nn::RopeConfig;
use boostr::ops::{RopeScaling, to_vec};
use serde_json::{Value, json};

/// Between f32 and values in f64, for logits of about 6.
const CLOSE: f64 = 2e-5;

fn people(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/people").join(name)
}

/// The 48 tokens of the cases.
fn ids() -> Vec<u32> {
    let period = [5, 9, 30, 2, 17, 11, 8, 25, 21, 3];
    (0..48).map(|i| period[i % period.len()]).collect()
}

fn logits(path: &Path) -> Vec<f32> {
    let lm: LanguageModel<Cpu> = LanguageModel::open(path, &Default::default(), cpu()).unwrap();
    let mut state = lm.model.new_state().unwrap();
    let mut run = [Run { tokens: &ids(), state: &mut state }];
    to_vec(&lm.model.forward(&mut run, Logits::All).unwrap()).unwrap()
}

#[track_caller]
fn close(got: &[f32], expected: &str) {
    let file = Checkpoint::open(&people(expected), false).unwrap();
    let want = file.get("logits").unwrap().to_f32().unwrap();
    assert_eq!(got.len(), want.len());
    let pairs = got.iter().zip(&want);
    let most = pairs.map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs()).fold(0.0, f64::max);
    assert!(most < CLOSE, "{most} from {expected}");
}

/// A folder with the weights of the cases and their configuration with `changes`.
fn folder(changes: &Value) -> Folder {
    let folder = Folder::new();
    fs::copy(people("rope/model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let mut config: Value =
        serde_json::from_slice(&fs::read(people("rope/config.json")).unwrap()).unwrap();
    config.as_object_mut().unwrap().remove("original_max_position_embeddings");
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    folder.write("config.json", config.to_string());
    folder
}

fn to(source: &Path, out: &Path) -> Result<()> {
    let written = convert(source, out, &Options::default(), &mut |_, _| Continue(()));
    written.map(drop)
}

/// The rotation of a `llama` GGUF file with these keys, heads of 16 and a context of 128.
fn of_gguf(keys: &[(&str, gguf::Value)], factors: Option<Vec<f32>>) -> Result<RopeConfig> {
    let mut metadata = Metadata::new("m.gguf");
    metadata.set("llama.context_length", 128u32);
    for (key, value) in keys {
        metadata.set(format!("llama.{key}"), value.clone());
    }
    RopeConfig::read_gguf(&metadata, "llama", 16, factors)
}

/// The definition of llama.cpp: frequencies and the factor of queries and keys, of `factor`, how much YaRN there is,
/// the original context, and the factor of the file.
fn by_definition(factor: f64, yarn: bool, original: f64, own: f64) -> (Vec<f64>, f64) {
    let (d, base) = (16.0, 10_000f64);
    let pair =
        |turns: f64| d * (original / (turns * std::f64::consts::TAU)).ln() / (2.0 * base.ln());
    let (low, high) = (pair(32.0).floor().max(0.0), pair(1.0).ceil().min(d - 1.0));
    let frequencies = (0..8).map(|i| {
        let plain = base.powf(-2.0 * f64::from(i) / d);
        let kept = 1.0 - ((f64::from(i) - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
        let kept = if yarn { kept } else { 0.0 };
        plain * (kept + (1.0 - kept) / factor)
    });
    let growth = if yarn && factor > 1.0 { 1.0 + 0.1 * factor.ln() } else { 1.0 };
    (frequencies.collect(), growth * own)
}

#[track_caller]
fn equals(rope: &RopeConfig, (frequencies, factor): (Vec<f64>, f64)) {
    let rope = rope.rope();
    for (got, want) in rope.frequencies().iter().zip(&frequencies) {
        assert!(
            (got - want).abs() <= 1e-9 * want,
            "{:?} is not {frequencies:?}",
            rope.frequencies()
        );
    }
    let got = rope.attention_factor();
    assert!((got - factor).abs() <= 1e-7 * factor, "{got} is not {factor}");
}

#[test]
fn p_gguf_rope_keys_are_read_as_llama_cpp_reads_them() {
    for name in
        ["factor-without-type", "yarn-attn_factor-1", "yarn-attn_factor-0.878", "attn_factor-alone"]
    {
        let file = people(&format!("gguf-rope-keys/{name}.gguf"));
        close(&logits(&file), &format!("gguf-rope-keys/{name}.expected.safetensors"));
    }
}

#[test]
fn p_gguf_rope_keys_have_the_defaults_of_llama_cpp() {
    let (kind, factor) = ("rope.scaling.type", "rope.scaling.factor");
    let (old, original) = ("rope.scale_linear", "rope.scaling.original_context_length");
    let attention = "rope.scaling.attn_factor";
    let f = |x: f32| gguf::Value::from(x);
    let n = |x: u32| gguf::Value::from(x);
    for (keys, want) in [
        (vec![], (1.0, false, 128.0, 1.0)),
        (vec![(factor, f(4.0))], (4.0, false, 128.0, 1.0)),
        (vec![(old, f(4.0))], (4.0, false, 128.0, 1.0)),
        (vec![(old, f(8.0)), (factor, f(4.0))], (4.0, false, 128.0, 1.0)),
        (vec![(old, f(8.0)), (factor, f(0.0))], (1.0, false, 128.0, 1.0)),
        (vec![(kind, "linear".into()), (old, f(4.0))], (4.0, false, 128.0, 1.0)),
        (vec![(kind, "linear".into())], (1.0, false, 128.0, 1.0)),
        (vec![(kind, "none".into()), (factor, f(4.0))], (1.0, false, 128.0, 1.0)),
        (vec![(kind, "yarn".into()), (factor, f(4.0))], (4.0, true, 128.0, 1.0)),
        (vec![(kind, "yarn".into()), (factor, f(4.0)), (original, n(0))], (4.0, true, 128.0, 1.0)),
        (vec![(kind, "yarn".into()), (factor, f(4.0)), (original, n(32))], (4.0, true, 32.0, 1.0)),
        (vec![(kind, "yarn".into()), (old, f(4.0)), (original, n(32))], (4.0, true, 32.0, 1.0)),
        (vec![(kind, "yarn".into()), (original, n(32))], (1.0, true, 32.0, 1.0)),
        (vec![(attention, f(1.25))], (1.0, false, 128.0, 1.25)),
        (vec![(kind, "none".into()), (attention, f(1.25))], (1.0, false, 128.0, 1.25)),
        (vec![(factor, f(4.0)), (attention, f(1.25))], (4.0, false, 128.0, 1.25)),
        (
            vec![(kind, "yarn".into()), (factor, f(4.0)), (original, n(32)), (attention, f(1.25))],
            (4.0, true, 32.0, 1.25),
        ),
        // Of other architectures.
        (
            vec![
                (kind, "yarn".into()),
                (factor, f(4.0)),
                ("rope.scaling.yarn_beta_fast", f(8.0)),
                ("rope.scaling.yarn_ext_factor", f(0.5)),
                ("rope.scaling.yarn_attn_factor", f(2.0)),
                ("rope.scaling.yarn_log_multiplier", f(0.1)),
            ],
            (4.0, true, 128.0, 1.0),
        ),
    ] {
        let (factor, yarn, original, own) = want;
        let rope = of_gguf(&keys, None).unwrap();
        equals(&rope, by_definition(factor, yarn, original, own));
        // Factors of single pairs are beside any of them.
        let factors: Vec<f32> = (0..8).map(|i| 1.0 + i as f32).collect();
        let rope = of_gguf(&keys, Some(factors.clone())).unwrap();
        let (frequencies, all) = by_definition(factor, yarn, original, own);
        let divided = frequencies.iter().zip(&factors).map(|(x, f)| x / f64::from(*f)).collect();
        equals(&rope, (divided, all));
        assert_eq!(rope.factors(), Some(factors));
    }
    let error = message(&of_gguf(&[(kind, "longrope".into())], None).unwrap_err());
    assert!(error.contains("llama.rope.scaling.type") && error.contains("longrope"), "{error}");
    let mut bare = Metadata::new("m.gguf");
    bare.set("llama.rope.scaling.type", "yarn");
    let error = message(&RopeConfig::read_gguf(&bare, "llama", 16, None).unwrap_err());
    assert!(error.contains("`llama.context_length`: missing"), "{error}");
}

fn yarn(more: &Value) -> Value {
    let mut scaling = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
    });
    scaling.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({ "rope_scaling": scaling })
}

#[test]
fn p_yarn_lost_in_convert_is_kept_or_refused() {
    for (more, expected) in [
        (json!({ "mscale": 1.0, "mscale_all_dim": 1.0 }), Some("rope/yarn-mscale.safetensors")),
        (json!({ "mscale": 0.5, "mscale_all_dim": 1.0 }), None),
        (json!({ "mscale": 0.0, "mscale_all_dim": 1.0 }), None),
        (json!({ "mscale": 0.707 }), None),
        (json!({ "attention_factor": 0.9 }), None),
        (json!({ "attention_factor": 0.9, "factor": 0.5 }), None),
        (json!({}), None),
    ] {
        let source = folder(&yarn(&more));
        let (there, back) = (source.path().join("there.gguf"), source.path().join("back"));
        let want = logits(source.path());
        if let Some(expected) = expected {
            close(&want, expected);
        }
        to(source.path(), &there).unwrap();
        to(&there, &back).unwrap();
        for path in [&there, &back] {
            let got = logits(path);
            let pairs = got.iter().zip(&want).map(|(a, b)| (a - b).abs());
            assert!(pairs.fold(0.0, f32::max) < 2e-5, "{more}: {}", path.display());
        }
    }
    for more in
        [json!({ "truncate": false }), json!({ "beta_fast": 16.0 }), json!({ "beta_slow": 2.0 })]
    {
        let source = folder(&yarn(&more));
        if more.get("truncate").is_some() {
            close(&logits(source.path()), "rope/yarn-truncate.safetensors");
        }
        let out = source.path().join("there.gguf");
        let error = message(&to(source.path(), &out).unwrap_err());
        let key = more.as_object().unwrap().keys().next().unwrap();
        assert!(error.contains("GGUF") && error.contains(key), "{error}");
        assert!(!out.exists());
    }
}

#[test]
fn p_yarn_attention_factor_written_is_what_comes_on_top_of_the_scaling() {
    for (factor, more, want) in [
        (4.0, json!({ "attention_factor": 1.0 }), Some(1.0 / (1.0 + 0.1 * 4f64.ln()))),
        (4.0, json!({ "mscale": 1.0, "mscale_all_dim": 1.0 }), Some(1.0 / (1.0 + 0.1 * 4f64.ln()))),
        (4.0, json!({}), None),
    ] {
        let mut config = yarn(&more);
        config["rope_scaling"]["factor"] = json!(factor);
        let source = folder(&config);
        let out = source.path().join("there.gguf");
        to(source.path(), &out).unwrap();
        let file = Checkpoint::open(&out, false).unwrap();
        let key = "llama.rope.scaling.attn_factor";
        let got = file.gguf().unwrap().float(key, 0.0..=9.0).unwrap();
        assert_eq!(got, want.map(|want| want as f32), "{more}");
    }
}

#[test]
fn p_original_context_at_top_is_that_of_the_scaling() {
    let of_yarn = json!({ "rope_type": "yarn", "factor": 4.0 });
    let expected = "rope/original-context-at-top.safetensors";
    let at_top = json!({ "rope_scaling": of_yarn, "original_max_position_embeddings": 32 });
    close(&logits(folder(&at_top).path()), expected);
    close(&logits(folder(&yarn(&json!({}))).path()), expected);
    // The top wins, as in transformers.
    let both = json!({
        "original_max_position_embeddings": 32,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        },
    });
    close(&logits(folder(&both).path()), expected);
}

#[test]
fn p_dynamic_original_context_does_not_count() {
    let dynamic = |original: Value| {
        json!({ "rope_scaling": {
            "rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": original,
        } })
    };
    let source = folder(&dynamic(json!(32)));
    let got = logits(source.path());
    close(&got, "rope/dynamic-original-context.safetensors");
    assert_eq!(got, logits(folder(&dynamic(Value::Null)).path()));
    let short = json!({
        "max_position_embeddings": 32, "rope_scaling": { "rope_type": "dynamic", "factor": 4.0 },
    });
    assert_ne!(got, logits(folder(&short).path()));
}

fn read(text: &Value) -> Result<Config> {
    let mut config = json!({
        "model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2,
        "intermediate_size": 32, "vocab_size": 32,
    });
    config.as_object_mut().unwrap().extend(text.as_object().unwrap().clone());
    Config::read(&ConfigFile::parse("config.json", &config.to_string()).unwrap())
}

fn rope_of(config: &Config) -> RopeConfig {
    let layers = config.family().layers();
    layers[0].part::<boostr::nn::AttentionConfig>().unwrap().rope.clone().unwrap()
}

#[test]
fn p_float_original_context_is_a_whole_number() {
    for kind in ["yarn", "llama3"] {
        let of = |original: Value| {
            read(&json!({ "rope_scaling": {
                "rope_type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            } }))
        };
        let [float, whole] = [json!(32.0), json!(32)].map(|n| rope_of(&of(n).unwrap()));
        assert_eq!(float, whole);
        for bad in [json!(32.5), json!(0.0), json!(-32.0), json!("32"), json!(1e300)] {
            let error = message(&of(bad).unwrap_err());
            let field = "`rope_scaling.original_max_position_embeddings`";
            assert!(error.contains(field) && error.contains("a whole number"), "{error}");
        }
    }
}

#[test]
fn of_two_places_for_positions_the_one_counts_that_transformers_takes() {
    let yarn =
        json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64 });
    let with = |key: &str, value: Value| {
        let mut yarn = yarn.clone();
        yarn[key] = value;
        yarn
    };
    let plain = json!({ "rope_type": "default", "rope_theta": 500.0 });
    let of = |text: Value| rope_of(&read(&text).unwrap());
    let want = of(json!({ "rope_scaling": yarn, "rope_theta": 500.0 }));
    assert!(matches!(want.scaling, RopeScaling::Yarn(_)) && want.theta == 500.0);
    for same in [
        json!({ "rope_parameters": with("rope_theta", json!(500.0)) }),
        json!({ "rope_parameters": with("rope_theta", json!(500.0)), "rope_theta": 7.0 }),
        json!({ "rope_parameters": yarn, "rope_theta": 500.0 }),
        json!({ "rope_scaling": with("rope_theta", json!(500.0)), "rope_theta": 7.0 }),
        // YaRN that is put into the file of a model that newer transformers saved.
        json!({ "rope_scaling": yarn, "rope_parameters": plain }),
        json!({ "rope_scaling": yarn, "rope_parameters": plain, "rope_theta": 500.0 }),
        json!({ "rope_scaling": {}, "rope_parameters": with("rope_theta", json!(500.0)) }),
        json!({ "rope_scaling": null, "rope_parameters": with("rope_theta", json!(500.0)) }),
        json!({ "rope_theta": 500.0, "rope_parameters": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64 } }),
    ] {
        assert_eq!(of(same.clone()), want, "{same}");
    }
    let half = of(json!({ "rope_scaling": with("partial_rotary_factor", json!(0.5)) }));
    assert_eq!(half.rotary_dim, 8);
    for key in ["rope_parameters", "rope_scaling"] {
        let nested = json!({ key: { "full_attention": yarn, "sliding_attention": plain } });
        let error = message(&read(&nested).unwrap_err());
        assert!(error.contains(&format!("`{key}.full_attention`")), "{error}");
    }
}

#[test]
fn a_scaling_starts_from_the_context_of_the_class_where_no_file_says_one() {
    for (kind, want) in
        [("llama", 2048), ("mistral", 131_072), ("qwen2", 32_768), ("qwen3", 32_768)]
    {
        let config = read(&json!({
            "model_type": kind, "num_key_value_heads": 2, "head_dim": 16,
            "rope_scaling": { "rope_type": "dynamic", "factor": 2.0 },
        }));
        let scaling = rope_of(&config.unwrap()).scaling;
        assert_eq!(scaling, RopeScaling::Dynamic { factor: 2.0, original_max: want }, "{kind}");
    }
}

#[test]
fn a_size_that_a_file_leaves_out_is_that_of_the_class_of_transformers() {
    for (fixture, class) in [
        ("falcon-h1-tiny", json!({ "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_head": 8 })),
        ("falcon-h1-tiny", json!({ "mamba_d_ssm": 1024, "mamba_n_heads": 128 })),
        (
            "nemotron-h-moe-tiny",
            json!({
                "mamba_num_heads": 128, "n_routed_experts": 8, "num_experts_per_tok": 2,
                "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
            }),
        ),
        (
            "granitehybrid-moe-tiny",
            json!({ "shared_intermediate_size": 1024, "num_local_experts": 8, "num_experts_per_tok": 2 }),
        ),
    ] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"));
        let path = path.join("../../fixtures/models").join(fixture).join("config.json");
        let mut stated: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        let mut absent = stated.clone();
        let fields = class.as_object().unwrap();
        stated.as_object_mut().unwrap().extend(fields.clone());
        if !fields.contains_key("mamba_d_head") && fixture.starts_with("falcon") {
            stated["mamba_d_head"] = json!("auto");
            absent["mamba_d_head"] = json!("auto");
        }
        absent.as_object_mut().unwrap().retain(|key, _| !fields.contains_key(key));
        let [stated, absent] = [stated, absent].map(|json| {
            let file = ConfigFile::parse("config.json", &json.to_string()).unwrap();
            Config::read(&file).unwrap().family().to_json().unwrap()
        });
        assert_eq!(absent, stated, "{fixture}");
    }
    // A null is what follows from the width of the model.
    let path = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = path.join("../../fixtures/models/falcon-h1-tiny/config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    for (key, value) in
        [("mamba_d_ssm", Value::Null), ("mamba_n_heads", json!(8)), ("mamba_d_head", json!("auto"))]
    {
        config[key] = value;
    }
    let file = ConfigFile::parse("config.json", &config.to_string()).unwrap();
    let json = Config::read(&file).unwrap().family().to_json().unwrap();
    assert_eq!((&json["mamba_d_ssm"], &json["mamba_d_head"]), (&json!(128), &json!(16)));
}

#[test]
fn the_limit_of_a_context_is_what_the_file_states_where_keys_of_all_positions_are_kept() {
    for (changes, trained, limit) in [
        (json!({}), None, None),
        (json!({ "max_position_embeddings": 4096 }), Some(4096), Some(4096)),
        (
            json!({ "max_position_embeddings": 4096, "model_type": "mistral", "sliding_window": 64 }),
            Some(4096),
            None,
        ),
        (
            json!({
                "max_position_embeddings": 4096, "model_type": "qwen2", "sliding_window": 64,
                "use_sliding_window": true, "max_window_layers": 1,
            }),
            Some(4096),
            Some(4096),
        ),
        (
            json!({
                "max_position_embeddings": 4096,
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096,
                },
            }),
            Some(4096),
            Some(16_384),
        ),
        (
            json!({
                "max_position_embeddings": 4096,
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024,
                },
            }),
            Some(4096),
            Some(4096),
        ),
        (
            json!({
                "max_position_embeddings": 4096,
                "rope_scaling": { "rope_type": "dynamic", "factor": 2.0 },
            }),
            Some(4096),
            Some(8192),
        ),
    ] {
        let config = read(&changes).unwrap();
        assert_eq!(
            (config.trained_length(), config.context_limit()),
            (trained, limit),
            "{changes}"
        );
        // No state file knows of it.
        assert!(!format!("{config:?}").contains("trained"));
    }
    let recurrent = json!({
        "model_type": "mamba2", "num_heads": 2, "head_dim": 32, "n_groups": 1,
        "max_position_embeddings": 4096,
    });
    let config = read(&recurrent).unwrap();
    assert_eq!((config.trained_length(), config.context_limit()), (Some(4096), None));
    let file = people("gguf-rope-keys/factor-without-type.gguf");
    let lm: LanguageModel<Cpu> = LanguageModel::open(&file, &Default::default(), cpu()).unwrap();
    assert_eq!(lm.model.trained_length(), Some(128));
    // Linear positions, by 4.
    assert_eq!(lm.model.context_limit(), Some(512));
}

#[test]
fn p_kv_f16_overflow_is_an_error_that_names_the_option() {
    use boostr::load::OpenOptions;
    use boostr::ops::KvType;

    let folder = people("kv-f16-overflow");
    let tokens = [5, 9, 30, 2, 17, 11, 8, 25];
    let run = |kind: KvType| {
        let options = OpenOptions { kv_type: Some(kind), ..OpenOptions::default() };
        let lm: LanguageModel<Cpu> = LanguageModel::open(&folder, &options, cpu()).unwrap();
        let mut state = lm.model.new_state().unwrap();
        let mut run = [Run { tokens: &tokens, state: &mut state }];
        to_vec(&lm.model.forward(&mut run, Logits::All)?)
    };
    let file = Checkpoint::open(&folder.join("expected.safetensors"), false).unwrap();
    let want = file.get("logits").unwrap().to_f32().unwrap();
    for (kind, most) in [(KvType::F32, 1e-5), (KvType::Bf16, 0.02), (KvType::Q8_0, 0.05)] {
        let got = run(kind).unwrap();
        let far = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(far < most, "{kind:?}: {far}");
    }
    let error = message(&run(KvType::F16).unwrap_err());
    assert!(error.contains("--kv-type") && error.contains("f16"), "{error}");
}

#[test]
fn keys_that_a_type_holds_to_its_end_stay_finite() {
    use boostr::ops::{AttentionOps, KvSizes, KvType};

    let client = cpu();
    for (kind, largest, beyond) in [
        (KvType::F16, 65_519.0, Some(65_520.0)),
        (KvType::Bf16, 3.395e38, Some(3.4e38)),
        (KvType::Q8_0, 8.3e6, Some(8.4e6)),
        (KvType::F32, 3.4e38, None),
    ] {
        let sizes = KvSizes { nheads: 1, d_key: 32, d_value: 32, kind, latent: false };
        let rows = |x: f32| vec![x; 32];
        let mut cache = client.new_cache(sizes).unwrap();
        cache.fill(&client, 0, &rows(largest), &rows(-largest)).unwrap();
        assert!(cache.keys().unwrap().iter().all(|x| x.is_finite()), "{kind:?}");
        assert!(cache.values().unwrap().iter().all(|x| x.is_finite()), "{kind:?}");
        for (keys, values) in beyond.into_iter().flat_map(|x| [(x, 0.0), (0.0, -x)]) {
            let mut cache = client.new_cache(sizes).unwrap();
            let error = cache.fill(&client, 0, &rows(keys), &rows(values)).unwrap_err();
            assert!(message(&error).contains("--kv-type"), "{kind:?}");
        }
    }
}

#[test]
fn p_llama3_gguf_to_folder_has_the_settings_of_the_factors() {
    for (factor, original, theta) in
        [(8.0, 32, 10_000.0), (32.0, 8192, 500_000.0), (8.0, 8192, 500_000.0), (7.0, 100, 10_000.0)]
    {
        let scaling = json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": original,
        });
        let source = folder(&json!({ "rope_theta": theta, "rope_scaling": scaling }));
        let (there, back) = (source.path().join("there.gguf"), source.path().join("back"));
        to(source.path(), &there).unwrap();
        to(&there, &back).unwrap();
        assert_eq!(logits(&back), logits(source.path()), "{factor} {original}");
        let text = fs::read_to_string(back.join("config.json")).unwrap();
        let config: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(config["rope_scaling"]["rope_type"], "llama3");
        assert_eq!(config["rope_scaling"]["factor"], json!(factor));
    }
    // Factors that are none of these settings.
    let other = RopeConfig {
        theta: 1e4,
        rotary_dim: 8,
        scaling: RopeScaling::PerDim { factors: vec![1.0, 3.0, 2.0, 8.0] },
    };
    assert_eq!(other.llama3(), None);
}
