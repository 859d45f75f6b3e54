//! Zamba2: its definition, its configurations, and weights that layers share.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow::Continue;
use std::path::Path;

use crate::common::{Folder, cpu};
use crate::tiny::{close, edited, entry, fixture, linear, message, mixer, norm, tokens, widened};
use boostr::backend::Cpu;
use boostr::checkpoint::{Checkpoint, ConfigFile, Dtype};
use boostr::convert::{Options, Types, convert};
use boostr::load::LanguageModel;
use boostr::models::zamba2::Config;
use boostr::models::{self, Family, Model};
use boostr::ops::KvType;
use boostr_kernels::Level;

const NAME: &str = "zamba2-tiny";

/// Between f32 and the definition in f64, as a share of the largest logit. Attention of random weights
/// makes much of little: transformers' own f32 is up to 3.7e-5 from its f64 on weights like these.
const TOLERANCE: f64 = 4e-5;

/// Ten layers, of which 2, 5, 6 and 9 are hybrid and share two blocks.
const TEN: &str = r#"{"model_type": "zamba2", "hidden_size": 32, "vocab_size": 40, "num_hidden_layers": 10,
    "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid", "hybrid", "mamba", "mamba",
    "hybrid"], "num_mem_blocks": 2, "num_attention_heads": 4, "intermediate_size": 48, "adapter_rank": 4,
    "use_shared_attention_adapter": true, "use_mem_rope": true, "n_mamba_heads": 4, "mamba_d_state": 8}"#;
/// Its hybrid layers, each with the layer that its block is stored under.
const TURNS: [(usize, usize); 4] = [(2, 2), (5, 5), (6, 2), (9, 5)];

fn read(text: &str) -> Result<Config, String> {
    let file = ConfigFile::parse("config.json", text).unwrap();
    let config = models::Config::read(&file).map_err(|error| message(&error))?;
    Ok(config.get::<Config>().unwrap().clone())
}

/// The configuration with other values of some fields; `null` removes one.
fn changed(text: &str, changes: &str) -> String {
    let parse = |text| serde_json::from_str::<serde_json::Value>(text).unwrap();
    let mut fields = parse(text);
    for (key, value) in parse(changes).as_object().unwrap() {
        fields[key] = value.clone();
    }
    fields.to_string()
}

fn config_of_fixture() -> String {
    fs::read_to_string(fixture(NAME).join("config.json")).unwrap()
}

fn random(config: &Config) -> Checkpoint {
    let tensors =
        config.parameters(config.vocab_size, config.tie_embeddings == Some(false)).unwrap();
    crate::tiny::random(&tensors, 0x5eed)
}

fn load(config: &Config, checkpoint: &Checkpoint) -> Result<Model<Cpu>, String> {
    Model::load(config.clone(), checkpoint.clone(), cpu()).map_err(|error| message(&error))
}

fn logits(model: &Model<Cpu>, ids: &[u32], pieces: &[usize]) -> Vec<f32> {
    crate::tiny::run(model, ids, pieces, &mut model.new_state().unwrap())
}

/// The model as transformers defines it: one token after another, in f64.
struct Definition<'a> {
    config: &'a Config,
    /// Hybrid layers, each with the layer that its block is stored under.
    turns: &'a [(usize, usize)],
    weights: BTreeMap<&'a str, Vec<f64>>,
    /// Window and SSM state of each layer.
    mixers: Vec<[Vec<f64>; 2]>,
    /// Keys and values of each token, of each layer.
    kept: Vec<Vec<[Vec<f64>; 2]>>,
}

impl<'a> Definition<'a> {
    fn new(config: &'a Config, turns: &'a [(usize, usize)], checkpoint: &'a Checkpoint) -> Self {
        let (n_layer, mixer) = (config.hybrid.len(), &config.mixer);
        let zeros = [
            vec![0.0; (mixer.d_conv - 1) * mixer.conv_dim()],
            vec![0.0; mixer.d_inner() * mixer.d_state],
        ];
        let weights = checkpoint.iter().map(|(name, t)| (name, widened(&t.to_f32().unwrap())));
        let (mixers, kept) = (vec![zeros; n_layer], vec![Vec::new(); n_layer]);
        Self { config, turns, weights: weights.collect(), mixers, kept }
    }

    fn weight(&self, name: &str) -> &Vec<f64> {
        self.weights.get(name).unwrap_or_else(|| panic!("{name}"))
    }

    /// `w x + b`, and what the adapter adds where there is one.
    fn project(&self, name: &str, adapter: Option<String>, x: &[f64]) -> Vec<f64> {
        let bias = self.weights.get(format!("{name}.bias").as_str());
        let y = linear(self.weight(&format!("{name}.weight")), bias, x);
        let Some(adapter) = adapter else { return y };
        let narrow = linear(self.weight(&format!("{adapter}.0.weight")), None, x);
        let wide = linear(self.weight(&format!("{adapter}.1.weight")), None, &narrow);
        y.iter().zip(wide).map(|(y, a)| y + a).collect()
    }

    /// Logits after one more token.
    fn step(&mut self, id: u32) -> Vec<f64> {
        let (width, eps) = (self.config.mixer.d_model, self.config.norm_eps.into());
        let e = self.weight("model.embed_tokens.weight")[id as usize * width..][..width].to_vec();
        let mut h = e.clone();
        for layer in 0..self.config.hybrid.len() {
            let mut name = format!("model.layers.{layer}");
            let mut u = h.clone();
            if let Some(index) = self.turns.iter().position(|&(hybrid, _)| hybrid == layer) {
                let t = self.block(index, &[&h[..], &e].concat());
                let t = linear(self.weight(&format!("{name}.linear.weight")), None, &t);
                u.iter_mut().zip(t).for_each(|(u, t)| *u += t);
                name += ".mamba_decoder";
            }
            let u = norm(&u, self.weight(&format!("{name}.input_layernorm.weight")), 1, eps);
            let weights = &self.weights;
            let weight = |part: &str| weights.get(format!("{name}.mamba.{part}").as_str());
            let y = mixer(&self.config.mixer, weight, &mut self.mixers[layer], &u);
            h.iter_mut().zip(y).for_each(|(h, y)| *h += y);
        }
        let h = norm(&h, self.weight("model.final_layernorm.weight"), 1, eps);
        let head = self.weights.get("lm_head.weight");
        linear(head.unwrap_or(self.weight("model.embed_tokens.weight")), None, &h)
    }

    /// What the block of the hybrid layer numbered `index` makes of the stream and the embedding.
    fn block(&mut self, index: usize, x: &[f64]) -> Vec<f64> {
        let (config, (layer, home)) = (self.config, self.turns[index]);
        let eps = config.norm_eps.into();
        let name = |part: &str| format!("model.layers.{home}.shared_transformer.{part}");
        let x = norm(x, self.weight(&name("input_layernorm.weight")), 1, eps);
        let [mut q, mut k, v] = ["q", "k", "v"].map(|of| {
            let adapter = name(&format!("self_attn.linear_{of}_adapter_list.{index}"));
            let adapter = config.attention_adapters.then_some(adapter);
            self.project(&name(&format!("self_attn.{of}_proj")), adapter, &x)
        });
        let attention = &config.attention;
        let width = attention.headdim;
        if let Some(rope) = &attention.rope {
            for head in [&mut q, &mut k].into_iter().flat_map(|x| x.chunks_exact_mut(width)) {
                rotate(head, self.kept[layer].len(), rope.theta);
            }
        }
        self.kept[layer].push([k, v]);
        let mut y = Vec::new();
        for (head, q) in q.chunks_exact(width).enumerate() {
            let of = head / (attention.nheads / attention.nheads_kv) * width;
            let dot = |k: &[f64]| q.iter().zip(&k[of..]).map(|(q, k)| q * k).sum::<f64>();
            let scale = (width as f64 / 2.0).sqrt().recip();
            let shares: Vec<f64> =
                self.kept[layer].iter().map(|[k, _]| (dot(k) * scale).exp()).collect();
            let sum: f64 = shares.iter().sum();
            y.extend((0..width).map(|i| {
                let terms = shares.iter().zip(&self.kept[layer]);
                terms.map(|(share, [_, v])| share / sum * v[of + i]).sum::<f64>()
            }));
        }
        let y = self.project(&name("self_attn.o_proj"), None, &y);
        let y = norm(&y, self.weight(&name("pre_ff_layernorm.weight")), 1, eps);
        let adapter = name(&format!("feed_forward.gate_up_proj_adapter_list.{index}"));
        let both = self.project(&name("feed_forward.gate_up_proj"), Some(adapter), &y);
        let (gate, up) = both.split_at(both.len() / 2);
        let y: Vec<f64> = gate.iter().zip(up).map(|(gate, up)| gelu(*gate) * up).collect();
        self.project(&name("feed_forward.down_proj"), None, &y)
    }
}

/// Turns the pairs `(i, i + D / 2)` of a head.
fn rotate(head: &mut [f64], position: usize, theta: f64) {
    let half = head.len() / 2;
    let (first, second) = head.split_at_mut(half);
    for (i, (x, y)) in first.iter_mut().zip(second).enumerate() {
        let (sin, cos) = (position as f64 / theta.powf(i as f64 / half as f64)).sin_cos();
        (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
    }
}

/// `x (1 + erf(x / sqrt 2)) / 2`, by the series of erf whose terms are all positive.
fn gelu(x: f64) -> f64 {
    let z = x / 2f64.sqrt();
    let (mut sum, mut term) = (0.0, z);
    for n in 1..200 {
        sum += term;
        term *= 2.0 * z * z / f64::from(2 * n + 1);
    }
    x / 2.0 * (1.0 + 2.0 / std::f64::consts::PI.sqrt() * (-z * z).exp() * sum)
}

#[test]
fn gelu_of_the_definition_is_that_of_the_error_function() {
    // erf(1 / sqrt 2) and erf(3 / sqrt 2): the shares within one and three deviations.
    assert!((gelu(1.0) - f64::midpoint(1.0, 0.682_689_492_137_085_9)).abs() < 1e-15);
    assert!((gelu(-3.0) + 3.0 * (1.0 - 0.997_300_203_936_739_8) / 2.0).abs() < 1e-14);
    assert!((gelu(8.0) - 8.0).abs() < 1e-13);
}

#[track_caller]
fn equals_its_definition(text: &str, turns: &[(usize, usize)]) {
    let config = read(text).unwrap();
    let checkpoint = random(&config);
    let model = load(&config, &checkpoint).unwrap();
    let ids = tokens(7, 40, config.vocab_size);
    let mut definition = Definition::new(&config, turns, &checkpoint);
    let want: Vec<f64> = ids.iter().flat_map(|&id| definition.step(id)).collect();
    for pieces in [&[40][..], &[23, 1, 1, 15], &[1; 40]] {
        close(&logits(&model, &ids, pieces), &want, TOLERANCE);
    }
}

#[test]
fn case_25_hybrid_layers_take_turns_and_have_their_own_adapters() {
    equals_its_definition(TEN, &TURNS);
    // The numbers of the layers would give 0, 1, 0, 1 too; these would give 0, 0, 0, 1.
    let even = changed(
        TEN,
        r#"{"layers_block_type": ["hybrid", "mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba", "mamba",
        "mamba", "mamba"]}"#,
    );
    equals_its_definition(&even, &[(0, 0), (2, 2), (4, 0), (5, 2)]);
}

#[test]
fn every_option_is_its_definition() {
    for (changes, turns) in [
        // As the 2.7B has it.
        (r#"{"use_shared_attention_adapter": false, "use_mem_rope": false}"#, &TURNS),
        (r#"{"num_mem_blocks": 1}"#, &[(2, 2), (5, 2), (6, 2), (9, 2)]),
        (
            r#"{"num_mem_blocks": 1, "use_shared_attention_adapter": false, "use_mem_rope": false}"#,
            &[(2, 2), (5, 2), (6, 2), (9, 2)],
        ),
        (r#"{"num_mem_blocks": 3}"#, &[(2, 2), (5, 5), (6, 6), (9, 2)]),
        (r#"{"num_mem_blocks": 9}"#, &[(2, 2), (5, 5), (6, 6), (9, 9)]),
        (r#"{"mamba_ngroups": 2, "add_bias_linear": true, "tie_word_embeddings": false}"#, &TURNS),
        (r#"{"num_key_value_heads": 2, "use_shared_attention_adapter": false}"#, &TURNS),
        (r#"{"rope_theta": 500.0, "time_step_limit": [0.05, 0.1]}"#, &TURNS),
    ] {
        equals_its_definition(&changed(TEN, changes), turns);
    }
}

#[test]
fn every_way_to_say_which_layers_are_hybrid_is_the_same() {
    let before = config_of_fixture();
    let config = read(&before).unwrap();
    assert_eq!(config.hybrid, [false, false, true, false, true, false, true]);
    let types = r#"["linear_attention", "linear_attention", "hybrid", "mamba", "hybrid", "mamba", "hybrid"]"#;
    for changes in [
        format!(r#"{{"layers_block_type": {types}}}"#),
        format!(r#"{{"layers_block_type": {types}, "hybrid_layer_ids": null}}"#),
        format!(r#"{{"layers_block_type": null, "layer_types": {types}}}"#),
        r#"{"layers_block_type": null}"#.into(),
        r#"{"use_shared_attention_adapter": null, "use_shared_attention_lora": true}"#.into(),
        r#"{"adapter_rank": null, "lora_rank": 8}"#.into(),
        r#"{"num_key_value_heads": null, "tie_word_embeddings": null}"#.into(),
        // What follows from others.
        r#"{"attention_head_dim": null, "attention_hidden_size": null, "mamba_headdim": null}"#
            .into(),
    ] {
        assert_eq!(read(&changed(&before, &changes)).unwrap(), config, "{changes}");
    }
}

#[test]
fn what_the_configuration_gets_wrong_is_named() {
    for (changes, parts) in [
        (
            r#"{"num_hidden_layers": 8}"#,
            &["layers_block_type", "7 layers", "num_hidden_layers is 8"][..],
        ),
        (r#"{"hybrid_layer_ids": [2, 4, 5]}"#, &["hybrid_layer_ids", "[2, 4, 5]", "[2, 4, 6]"]),
        (r#"{"hybrid_layer_ids": [2, 4, 7]}"#, &["hybrid_layer_ids", "0 to 6"]),
        (
            r#"{"layers_block_type": null, "hybrid_layer_ids": null}"#,
            &["missing", "layers_block_type", "hybrid_layer_ids"],
        ),
        (
            r#"{"layers_block_type": null, "layer_types": ["mamba", "g", "m", "m", "m", "m", "m"]}"#,
            &["layer_types", "expected mamba, linear_attention or hybrid", "\"g\""],
        ),
        (r#"{"hidden_act": "silu"}"#, &["hidden_act", "expected gelu", "\"silu\""]),
        (r#"{"num_attention_heads": 3}"#, &["num_attention_heads", "3 heads", "128 channels"]),
        (r#"{"num_key_value_heads": 3}"#, &["num_key_value_heads", "3 do not divide 4 heads"]),
        (r#"{"n_mamba_heads": 7}"#, &["n_mamba_heads", "7 heads", "128 channels"]),
        (r#"{"mamba_ngroups": 3}"#, &["n_groups", "3 groups do not divide 8 heads"]),
        (r#"{"num_mem_blocks": 0}"#, &["num_mem_blocks", "1 to"]),
        (r#"{"adapter_rank": 0}"#, &["adapter_rank", "1 to"]),
        (r#"{"hidden_size": 0}"#, &["hidden_size", "1 to"]),
        (r#"{"num_hidden_layers": 0}"#, &["num_hidden_layers", "1 to"]),
        (r#"{"time_step_limit": [1.0, 0.5]}"#, &["time_step_limit", "[low, high]"]),
    ] {
        let text = read(&changed(&config_of_fixture(), changes)).unwrap_err();
        assert!(text.contains("config.json"), "{text}");
        for part in parts {
            assert!(text.contains(part), "{changes}: {text}");
        }
    }
}

#[test]
fn steps_have_no_limit_unless_one_is_given() {
    let limit = |changes| read(&changed(&config_of_fixture(), changes)).unwrap().mixer.dt_limit;
    let none = (0.0, f32::INFINITY);
    // The fixture has `time_step_min`: for initial weights.
    assert_eq!(limit("{}"), none);
    assert_eq!(limit(r#"{"time_step_limit": [0.0, {"__float__": "Infinity"}]}"#), none);
    assert_eq!(limit(r#"{"time_step_limit": [0.001, 0.5]}"#), (0.001, 0.5));
}

#[test]
fn a_long_context_has_another_base_of_rotary_positions() {
    let of = |changes: &str| {
        let config = read(&changed(&config_of_fixture(), changes)).unwrap();
        (config.attention.rope.map(|rope| rope.theta), config.max_position)
    };
    assert_eq!(of("{}"), (Some(1e4), 2048));
    // 32 dimensions: 10000 * 8^(32 / 30).
    let (theta, max) = of(r#"{"use_long_context": true}"#);
    assert!((theta.unwrap() - 91_895.868).abs() < 0.001, "{theta:?}");
    assert_eq!(max, 16384);
    // transformers 5 writes the base that it uses.
    let new = r#"{"use_long_context": true, "rope_parameters": {"rope_theta": 9e4, "rope_type": "default"}}"#;
    assert_eq!(of(new), (Some(9e4), 16384));
    assert_eq!(of(r#"{"use_long_context": true, "use_mem_rope": false}"#), (None, 16384));
    // What we write has the base, and no flag that would change it again.
    let config = read(&changed(&config_of_fixture(), r#"{"use_long_context": true}"#)).unwrap();
    let json = config.to_json().unwrap();
    assert_eq!(json["use_long_context"], false);
    assert_eq!(json["rope_theta"].as_f64(), theta);
    assert_eq!(json["max_position_embeddings"], 16384);
}

#[test]
fn what_is_written_reads_as_the_same_configuration() {
    for changes in [
        "{}",
        r#"{"rope_theta": 12345.5, "rms_norm_eps": 1e-6, "add_bias_linear": true}"#,
        r#"{"use_mem_rope": false, "use_shared_attention_adapter": false, "num_mem_blocks": 1}"#,
        r#"{"time_step_limit": [0.001, Infinity], "mamba_ngroups": 2, "num_key_value_heads": 2}"#,
    ] {
        let text = changes.replace("Infinity", r#"{"__float__": "Infinity"}"#);
        let config = read(&changed(&config_of_fixture(), &text)).unwrap();
        let mut json = config.to_json().unwrap();
        json["vocab_size"] = config.vocab_size.into();
        assert_eq!(read(&json.to_string()).unwrap(), config, "{changes}");
    }
}

#[test]
fn each_hybrid_layer_keeps_keys_and_values_and_every_layer_a_mixers_state() {
    let config = read(TEN).unwrap();
    let model = load(&config, &random(&config)).unwrap();
    let mut state = model.new_state().unwrap();
    crate::tiny::run(&model, &tokens(3, 9, 40), &[9], &mut state);
    let mut keys = Vec::new();
    for layer in 0..10 {
        assert!(state.ssm(layer).is_some() && state.conv(layer).is_some(), "{layer}");
        assert_eq!(
            state.kv(layer).map(boostr::ops::KvCache::len),
            config.hybrid[layer].then_some(9),
            "{layer}"
        );
        keys.extend(state.kv(layer).map(|kv| kv.keys().unwrap()));
    }
    // Layers 2 and 6 share weights, but no keys.
    assert_ne!(keys[0], keys[2]);
    let layers = config.layers();
    assert_eq!(layers[2].kind(), "mamba2 + attention + mlp");
    assert_eq!((layers[3].kind().as_str(), layers[3].parts().count()), ("mamba2", 1));
    // Constant: (4 * 16 * 8 + 3 * (64 + 2 * 8)) floats; each token: keys and values of 4 heads of 16, values
    // in panels of two vectors, which with 16 lanes are wider than a head.
    let mixer = 4 * (4 * 16 * 8 + 3 * 80);
    for &level in Level::present() {
        let is_wide = matches!(level, Level::Avx512 | Level::Avx512Vnni);
        let values = if is_wide { 32 } else { 16 };
        let bytes = |layer: usize| layers[layer].state_bytes(level, KvType::F32);
        assert_eq!(bytes(2), (mixer, 4 * 4 * (16 + values)), "{level}");
        assert_eq!(bytes(3), (mixer, 0), "{level}");
    }
}

/// The checkpoint as a program writes it that knows of no sharing: each block under every layer that has it.
fn unshared(checkpoint: &Checkpoint) -> Checkpoint {
    let mut tensors: BTreeMap<_, _> =
        checkpoint.iter().map(|(name, entry)| (name.to_owned(), entry.clone())).collect();
    for (layer, home) in TURNS {
        let [home, layer] = [home, layer].map(|i| format!("model.layers.{i}.shared_transformer."));
        for (name, entry) in checkpoint.iter() {
            if let Some(part) = name.strip_prefix(&home) {
                tensors.insert(format!("{layer}{part}"), entry.clone());
            }
        }
    }
    Checkpoint::from_entries("unshared", tensors)
}

#[test]
fn a_shared_weight_may_be_stored_once_or_under_every_layer_that_has_it() {
    let config = read(TEN).unwrap();
    let (once, ids) = (random(&config), tokens(3, 20, 40));
    let model = load(&config, &once).unwrap();
    let want = logits(&model, &ids, &[20]);
    let often = unshared(&once);
    assert!(often.len() > once.len());
    // Only under the last layers that have it.
    let late = edited(&often, |name, entry| {
        let is_early = ["model.layers.2.shared", "model.layers.5.shared"];
        (!is_early.iter().any(|early| name.starts_with(early))).then(|| entry.clone())
    });
    assert_eq!(late.len(), once.len());
    for checkpoint in [often, late] {
        let other = load(&config, &checkpoint).unwrap();
        assert_eq!(logits(&other, &ids, &[20]), want);
        assert_eq!(other.parameters(), model.parameters());
    }
    let elements: usize = once.iter().map(|(_, entry)| entry.shape.iter().product::<usize>()).sum();
    assert_eq!(model.parameters(), (elements, elements - 40 * 32));
    // Each token reads a block as often as layers have it.
    let matrices = |part: &str| -> usize {
        let has = |name: &str| name.contains(part) && name.ends_with(".weight");
        let found = once.iter().filter(|(name, entry)| has(name) && entry.shape.len() == 2);
        found.map(|(_, entry)| entry.data.len()).sum()
    };
    let blocks = matrices("shared_transformer") - matrices("adapter_list");
    assert_eq!(model.weight_bytes(), matrices("model.") + blocks);
}

#[test]
fn copies_of_a_shared_weight_that_differ_are_refused() {
    let config = read(TEN).unwrap();
    let often = unshared(&random(&config));
    let name = |layer| format!("model.layers.{layer}.shared_transformer.self_attn.o_proj.weight");
    let other = edited(&often, |at, old| {
        let mut values = old.to_f32().unwrap();
        values[0] += if at == name(6) { 1e-6 } else { 0.0 };
        Some(entry(Dtype::F32, &old.shape, &values))
    });
    let text = load(&config, &other).err().unwrap();
    for part in [&name(2), &name(6), "not equal"] {
        assert!(text.contains(part), "{text}");
    }
    let other = edited(&often, |at, old| {
        let dtype = if at == name(9) { Dtype::BF16 } else { Dtype::F32 };
        Some(entry(dtype, &old.shape, &old.to_f32().unwrap()))
    });
    let text = load(&config, &other).err().unwrap();
    assert!(text.contains(&name(5)) && text.contains(&name(9)), "{text}");
}

#[test]
fn missing_and_misplaced_tensors_are_listed() {
    let config = read(TEN).unwrap();
    let checkpoint = random(&config);
    let part = "shared_transformer.feed_forward.gate_up_proj_adapter_list";
    // The adapter of hybrid layer 2 in the block that layers 1 and 3 have: the blocks of layers' numbers.
    let moved = crate::tiny::renamed(&checkpoint, |name| {
        name.replace(&format!("model.layers.2.{part}.2."), &format!("model.layers.5.{part}.2."))
    });
    let text = load(&config, &moved).err().unwrap();
    assert!(
        text.contains(&format!("2 tensors missing: `model.layers.2.{part}.2.0.weight`")),
        "{text}"
    );
    assert!(
        text.contains(&format!("2 tensors unexpected: `model.layers.5.{part}.2.0.weight`")),
        "{text}"
    );

    let without = edited(&checkpoint, |name, entry| {
        (name != "model.layers.9.linear.weight").then(|| entry.clone())
    });
    let text = load(&config, &without).err().unwrap();
    assert!(text.contains("1 tensors missing: `model.layers.9.linear.weight` [32, 32]"), "{text}");

    // A block under a layer that has none.
    let strayed = crate::tiny::renamed(&checkpoint, |name| {
        name.replace("layers.2.shared", "layers.3.shared")
    });
    let text = load(&config, &strayed).err().unwrap();
    assert!(text.contains("`model.layers.3.shared_transformer"), "{text}");

    let narrow = read(&changed(TEN, r#"{"adapter_rank": 3}"#)).unwrap();
    let text = load(&narrow, &checkpoint).err().unwrap();
    assert!(
        text.contains(&format!("`model.layers.2.{part}.0.0.weight` [4, 32], expected [3, 32]")),
        "{text}"
    );
}

fn written(source: &Path, out: &Path, types: Types) -> Result<(), String> {
    let options = Options { types, ..Options::default() };
    let converted = convert(source, out, &options, &mut |_, _| Continue(()));
    converted.map(drop).map_err(|error| message(&error))
}

#[test]
fn gguf_is_refused_and_leaves_nothing() {
    assert_eq!(read(TEN).unwrap().arch(), None);
    let folder = Folder::new();
    for types in [Types::kept(), Types::named("q8_0").unwrap()] {
        let text = written(&fixture(NAME), &folder.path().join("m.gguf"), types).unwrap_err();
        assert_eq!(
            text,
            "unsupported file: GGUF has no architecture for zamba2; it stays a folder, not quantized"
        );
    }
    assert_eq!(folder.names(), [""; 0]);
    let text = written(&fixture(NAME), &folder.path().join("m"), Types::named("q8_0").unwrap())
        .unwrap_err();
    assert!(text.contains("type q8_0 in a folder"), "{text}");
}

#[test]
fn a_folder_from_a_folder_has_equal_tensors_and_gives_the_same_bits() {
    let folder = Folder::new();
    let copy = folder.path().join("copy");
    written(&fixture(NAME), &copy, Types::kept()).unwrap();
    let [before, after] =
        [&fixture(NAME), &copy].map(|path| Checkpoint::open(path, false).unwrap());
    assert_eq!(before.names().collect::<Vec<_>>(), after.names().collect::<Vec<_>>());
    for (name, entry) in before.iter() {
        let other = after.get(name).unwrap();
        assert_eq!((entry.dtype, &entry.shape), (other.dtype, &other.shape), "{name}");
        assert_eq!(*entry.data, *other.data, "{name}");
    }
    let open = |path: &Path| LanguageModel::<Cpu>::open(path, &Default::default(), cpu()).unwrap();
    let (before, after) = (open(&fixture(NAME)), open(&copy));
    assert_eq!(before.model.config(), after.model.config());
    let ids = tokens(3, 30, 512);
    assert_eq!(logits(&after.model, &ids, &[30]), logits(&before.model, &ids, &[30]));

    // In 16 bits matrices change, and nothing that is small.
    let half = folder.path().join("half");
    written(&fixture(NAME), &half, Types::named("bf16").unwrap()).unwrap();
    for (name, entry) in Checkpoint::open(&half, false).unwrap().iter() {
        let is_matrix = entry.shape.len() == 2;
        let dtype = if is_matrix { Dtype::BF16 } else { Dtype::F32 };
        assert_eq!(entry.dtype, dtype, "{name}");
    }
    assert!(logits(&open(&half).model, &ids, &[30]).iter().all(|x| x.is_finite()));
}
