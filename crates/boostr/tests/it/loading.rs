//! What a loader of Mamba-2 must accept, and what it must refuse: one test for each known trap.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use crate::common::{Folder, cpu, torch_zip};
use crate::tiny::{Tiny, close, config, converted, fixture, message, renamed, tokens};
use boostr::backend::Cpu;
use boostr::checkpoint::{Checkpoint, ConfigFile, Dtype};
use boostr::engine::{Finish, Outcome, Request, generate};
use boostr::load::{LanguageModel, OpenOptions};
use boostr::models::{Family, Logits, Model, Run};
use boostr::ops;
use boostr::sample::SamplerConfig;

const FIXTURES: [&str; 2] = ["mamba2-tiny", "mamba2-tiny-g2"];

/// The configuration of mamba2-tiny as mamba_ssm writes it.
const MAMBA_SSM: &str = r#"{"d_model": 64, "d_intermediate": 0, "n_layer": 2, "vocab_size": 509,
    "ssm_cfg": {"layer": "Mamba2", "d_state": 32, "headdim": 16}, "attn_layer_idx": [],
    "attn_cfg": {}, "rms_norm": true, "residual_in_fp32": true, "fused_add_norm": true,
    "pad_vocab_size_multiple": 16, "tie_embeddings": true}"#;

fn open(folder: &Folder) -> Result<LanguageModel<Cpu>, String> {
    LanguageModel::open(folder.path(), &OpenOptions::default(), cpu()).map_err(|e| message(&e))
}

#[track_caller]
fn refusal(folder: &Folder) -> String {
    open(folder).err().expect("the model was opened")
}

fn weights(name: &str) -> Checkpoint {
    Checkpoint::open(&fixture(name), false).unwrap()
}

fn config_of(name: &str) -> String {
    fs::read_to_string(fixture(name).join("config.json")).unwrap()
}

/// A folder with this configuration and these weights, and nothing else.
fn folder(config: &str, weights: &Checkpoint) -> Folder {
    let folder = Folder::new();
    folder.write("config.json", config);
    crate::tiny::save(&folder.path().join("model.safetensors"), weights);
    folder
}

fn logits(model: &Model<Cpu>) -> Vec<f32> {
    let ids = tokens(1, 70, 500);
    crate::tiny::run(model, &ids, &[60, 10], &mut model.new_state().unwrap())
}

/// Logits of the fixture as it is.
fn original(name: &str) -> Vec<f32> {
    logits(&LanguageModel::open(&fixture(name), &OpenOptions::default(), cpu()).unwrap().model)
}

fn generated(model: &Model<Cpu>, eos: &[u32], sampler: SamplerConfig) -> Outcome<Cpu> {
    let vocab_limit = model.vocab_limit();
    let eos = eos.to_vec();
    let request =
        Request { max_tokens: 40, eos, sampler, ..Request::new(vec![5, 6, 7], vocab_limit) };
    let mut state = model.new_state().unwrap();
    generate(model, &mut state, request, &mut |_| ControlFlow::Continue(())).unwrap()
}

#[test]
fn case_28_every_spelling_of_infinity_is_the_same_limit() {
    let infinity = (0.0, f32::INFINITY);
    assert_eq!(crate::tiny::m("").mixer.dt_limit, infinity);
    for text in [
        "[0.0, Infinity]",
        r#"[0.0, {"__float__": "Infinity"}]"#,
        r#"[0, "Infinity"]"#,
        r#"[{"__float__": "0.0"}, Infinity]"#,
        "null",
    ] {
        let file = ConfigFile::parse("config.json", &format!(r#"{{"time_step_limit": {text}}}"#));
        // Only names of floats that JSON lacks are spelled as text.
        if text.contains("0.0\"") {
            assert!(file.unwrap().floats("time_step_limit").is_err());
            continue;
        }
        let changed = crate::tiny::m(&format!(r#", "time_step_limit": {text}"#));
        assert_eq!(changed.mixer.dt_limit, infinity, "{text}");
    }
    assert_eq!(crate::tiny::m(r#", "time_step_limit": [0.25, 0.5]"#).mixer.dt_limit, (0.25, 0.5));
}

#[test]
fn old_and_new_keys_give_the_same_configuration() {
    let new = r#"{"model_type": "mamba2", "hidden_size": 64, "num_heads": 4, "head_dim": 32,
        "n_groups": 2, "num_hidden_layers": 3, "vocab_size": 80, "layer_norm_epsilon": 1e-6}"#;
    let old = new
        .replace("hidden_size", "d_model")
        .replace("num_hidden_layers", "n_layer")
        .replace("layer_norm_epsilon", "rms_norm_eps");
    assert_eq!(config(new), config(&old));
    // A null is as good as no value beside another name of the field.
    assert_eq!(config(new), config(&old.replace('}', r#", "hidden_size": null}"#)));
    assert_eq!(config(new).norm_eps, 1e-6);
}

#[test]
fn the_configuration_of_transformers_5_loads_as_the_older_one() {
    for name in FIXTURES {
        let text = fs::read_to_string(fixture(name).join("config.hf5.json")).unwrap();
        assert_eq!(config(&text), config(&config_of(name)), "{name}");
        let model = open(&folder(&text, &weights(name))).unwrap().model;
        assert_eq!(logits(&model), original(name), "{name}");
    }
}

#[test]
fn layers_that_are_not_mamba2_are_refused_by_their_field() {
    for (from, to, field) in [
        (r#""attn_layer_idx": []"#, r#""attn_layer_idx": [1]"#, "attn_layer_idx"),
        (r#""d_intermediate": 0"#, r#""d_intermediate": 128"#, "d_intermediate"),
        (r#""rms_norm": true"#, r#""rms_norm": false"#, "rms_norm"),
        (r#""layer": "Mamba2", "#, r#""layer": "Mamba1", "#, "Mamba1"),
        (r#""layer": "Mamba2", "#, "", "Mamba1"),
        (r#""d_state": 32"#, r#""d_ssm": 64"#, "ssm_cfg.d_ssm"),
    ] {
        let changed = MAMBA_SSM.replace(from, to);
        assert_ne!(changed, MAMBA_SSM);
        let text = refusal(&folder(&changed, &weights("mamba2-tiny")));
        assert!(text.contains(field), "{text}");
    }
}

#[test]
fn a_width_that_the_weights_do_not_have_names_tensor_and_both_shapes() {
    let text = config_of("mamba2-tiny");
    // Heads that are not expand * hidden_size channels contradict the file itself.
    let refused = refusal(&folder(
        &text.replace(r#""expand": 2"#, r#""expand": 3"#),
        &weights("mamba2-tiny"),
    ));
    assert!(refused.contains("num_heads") && refused.contains("192 channels"), "{refused}");
    // 16 heads of 8 are as many channels as 8 of 16, but dt has another width.
    let heads = text
        .replace(r#""num_heads": 8"#, r#""num_heads": 16"#)
        .replace(r#""head_dim": 16"#, r#""head_dim": 8"#);
    let refused = refusal(&folder(&heads, &weights("mamba2-tiny")));
    let tensor = "`backbone.layers.0.mixer.in_proj.weight` [328, 64], expected [336, 64]";
    assert!(refused.contains(tensor), "{refused}");
}

#[test]
fn case_27_four_ways_of_tying_the_head() {
    let tied = config_of("mamba2-tiny");
    let absent = tied.replace(r#""tie_word_embeddings": true,"#, "");
    let untied = config_of("mamba2-tiny-g2");
    let absent_untied = untied.replace(r#""tie_word_embeddings": false,"#, "");
    assert!(absent != tied && absent_untied != untied);
    // 1. no head, flag true or absent: the embedding serves.
    for text in [&tied, &absent] {
        let lm = open(&folder(text, &weights("mamba2-tiny"))).unwrap();
        assert_eq!(logits(&lm.model), original("mamba2-tiny"));
    }
    // 2. no head, flag false: an error that names the tensor.
    let not_tied = tied.replace("\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false");
    let text = refusal(&folder(&not_tied, &weights("mamba2-tiny")));
    assert!(text.contains("`lm_head.weight` [512, 64]"), "{text}");
    // 3. a head, flag false or absent: the head serves.
    for text in [&untied, &absent_untied] {
        let lm = open(&folder(text, &weights("mamba2-tiny-g2"))).unwrap();
        assert_eq!(logits(&lm.model), original("mamba2-tiny-g2"));
    }
    // 4. a head, flag true: the head serves, be it the embedding or not.
    let tied_g2 = untied.replace("\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    let lm = open(&folder(&tied_g2, &weights("mamba2-tiny-g2"))).unwrap();
    assert_eq!(logits(&lm.model), original("mamba2-tiny-g2"));
    let own = weights("mamba2-tiny");
    let embedding = own.get("backbone.embeddings.weight").unwrap().clone();
    let mut all: std::collections::BTreeMap<_, _> =
        own.iter().map(|(name, t)| (name.to_string(), t.clone())).collect();
    all.insert("lm_head.weight".into(), embedding);
    let lm = open(&folder(&tied, &Checkpoint::from_entries("both", all))).unwrap();
    assert_eq!(logits(&lm.model), original("mamba2-tiny"));
}

#[test]
fn every_prefix_of_names_is_the_same_model() {
    for name in FIXTURES {
        let own = weights(name);
        let dialects: [fn(&str) -> String; 4] = [
            |name| format!("model.{name}"),
            |name| name.replace("backbone.embeddings.", "backbone.embedding."),
            |name| format!("model.{name}").replace(".embeddings.", ".embedding."),
            |name| name.replace("backbone.", "model."),
        ];
        for dialect in dialects {
            let lm = open(&folder(&config_of(name), &renamed(&own, dialect))).unwrap();
            assert_eq!(logits(&lm.model), original(name));
        }
    }
}

#[test]
fn case_26_the_format_of_mamba_ssm_with_a_tokenizer_from_elsewhere() {
    let own = renamed(&weights("mamba2-tiny"), |name| name.replace("embeddings", "embedding"));
    let folder = folder(MAMBA_SSM, &own);
    let lm = open(&folder).unwrap();
    assert_eq!(logits(&lm.model), original("mamba2-tiny"));
    assert_eq!((lm.model.vocab_rows(), lm.vocab_limit()), (512, 509));
    let text = message(&lm.encode("a text").unwrap_err());
    assert!(text.contains("tokenizer.json") && text.contains("--tokenizer FILE"), "{text}");

    let tokenizer = fixture("mamba2-tiny").join("tokenizer.json");
    let options = OpenOptions { tokenizer: Some(tokenizer), ..OpenOptions::default() };
    let lm = LanguageModel::<Cpu>::open(folder.path(), &options, cpu()).unwrap();
    let whole =
        LanguageModel::<Cpu>::open(&fixture("mamba2-tiny"), &Default::default(), cpu()).unwrap();
    assert_eq!(lm.encode("a text").unwrap(), whole.encode("a text").unwrap());

    fs::remove_file(folder.path().join("config.json")).unwrap();
    let text = refusal(&folder);
    assert!(text.contains("no config.json") && text.contains("take it from"), "{text}");
    folder.write("config.json", MAMBA_SSM);
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let text = refusal(&folder);
    assert!(text.contains("model.safetensors") && text.contains("pytorch_model.bin"), "{text}");
}

#[test]
fn the_original_names_of_codestral_are_read() {
    let params = r#"{"dim": 64, "n_layers": 2, "vocab_size": 96, "n_groups": 2,
        "tie_embeddings": false, "model_type": "mamba"}"#;
    let config = config(params);
    let sizes = [config.mixer.nheads, config.mixer.headdim, config.mixer.d_state];
    assert_eq!((sizes, config.mixer.ngroups), ([2, 64, 128], 2));
    let tiny = Tiny::new(config.clone(), crate::tiny::checkpoint(&config, 9));
    let folder = Folder::new();
    folder.write("params.json", params);
    let names = renamed(&tiny.checkpoint, |name| format!("model.{name}"));
    crate::tiny::save(&folder.path().join("consolidated.safetensors"), &names);
    let lm = open(&folder).unwrap();
    let ids = tokens(2, 20, 96);
    let got = crate::tiny::run(&lm.model, &ids, &[20], &mut lm.model.new_state().unwrap());
    close(&got, &tiny.oracle(&ids).0, crate::tiny::F32);
}

#[test]
fn padding_ids_are_never_sampled_though_their_logits_are_the_largest() {
    let ssm = r#""ssm_cfg": {"layer": "Mamba2"}, "pad_vocab_size_multiple": 16"#;
    let large = config(&format!(r#"{{"d_model": 64, "n_layer": 1, "vocab_size": 50277, {ssm}}}"#));
    assert_eq!(large.frame().padded_vocab(), 50288);

    let config = config(&format!(
        r#"{{"d_model": 64, "n_layer": 1, "vocab_size": 50, "tie_embeddings": false, {ssm}}}"#
    ));
    let own = crate::tiny::checkpoint(&config, 3);
    // The 14 rows of padding hold pairs of opposite directions: one of a pair is always large.
    let loud = crate::tiny::edited(&own, |name, t| {
        let mut values = t.to_f32().unwrap();
        if name == "lm_head.weight" {
            for row in 50..64 {
                let sign = if row % 2 == 0 { 1000.0 } else { -1000.0 };
                values[row * 64..][..64].iter_mut().for_each(|x| *x = 0.0);
                values[row * 64 + row / 2] = sign;
            }
        }
        Some(crate::tiny::entry(Dtype::F32, &t.shape, &values))
    });
    let model = Tiny::new(config, loud).model;
    assert_eq!((model.vocab_rows(), model.vocab_limit()), (64, 50));
    for sampler in [
        SamplerConfig::greedy(),
        SamplerConfig { seed: 1, ..SamplerConfig::default() },
        SamplerConfig { seed: 2, temperature: 100.0, top_p: 0.9, ..SamplerConfig::default() },
    ] {
        let out = generated(&model, &[], sampler);
        assert_eq!((out.ids.len(), out.finish), (40, Finish::Length));
        assert!(out.ids.iter().all(|&id| id < 50), "{:?}", out.ids);
        let ids = [&[5, 6, 7], &out.ids[..]].concat();
        let logits = crate::tiny::run(&model, &ids, &[43], &mut model.new_state().unwrap());
        for row in logits.chunks_exact(64) {
            let best = (0..64).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
            assert!(best >= 50, "padding was not the largest");
        }
    }
}

#[test]
fn sixteen_bit_files_give_the_logits_of_their_rounded_weights() {
    for (name, dtype) in
        FIXTURES.into_iter().flat_map(|n| [Dtype::BF16, Dtype::F16, Dtype::F64].map(|d| (n, d)))
    {
        let rounded = converted(&weights(name), dtype);
        let lm = open(&folder(&config_of(name), &rounded)).unwrap();
        // By definition in f64: A_log, D and dt_bias in half precision anywhere would show.
        let tiny = Tiny::new(config(&config_of(name)), rounded);
        let ids = tokens(4, 70, 500);
        let got = crate::tiny::run(&lm.model, &ids, &[60, 10], &mut lm.model.new_state().unwrap());
        close(&got, &tiny.oracle(&ids).0, crate::tiny::F32);
        assert_eq!(got == logits_of_f32(name, &ids), dtype == Dtype::F64, "{dtype:?} was not used");
    }
}

fn logits_of_f32(name: &str, ids: &[u32]) -> Vec<f32> {
    let tiny = Tiny::new(config(&config_of(name)), weights(name));
    tiny.run(ids, &[60, 10], &mut tiny.state())
}

#[test]
fn shards_with_an_index_are_one_model() {
    for name in FIXTURES {
        let own = weights(name);
        let folder = Folder::new();
        folder.write("config.json", config_of(name));
        let shard = |i: usize| format!("model-0000{}-of-00003.safetensors", i + 1);
        let place = |name: &str| name.len() % 3;
        for i in 0..3 {
            let part = crate::tiny::edited(&own, |name, t| (place(name) == i).then(|| t.clone()));
            crate::tiny::save(&folder.path().join(shard(i)), &part);
        }
        let map: Vec<String> =
            own.names().map(|name| format!("\"{name}\": \"{}\"", shard(place(name)))).collect();
        let index = format!(r#"{{"metadata": {{}}, "weight_map": {{{}}}}}"#, map.join(", "));
        folder.write("model.safetensors.index.json", index);
        assert_eq!(logits(&open(&folder).unwrap().model), original(name));
    }
}

/// A torch file of a whole checkpoint in F32, one storage for each tensor.
fn torch_file(checkpoint: &Checkpoint) -> Vec<u8> {
    let text =
        |text: &str| [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
    let int = |n: usize| [b"J", &(n as u32).to_le_bytes()[..]].concat();
    let tuple = |items: &[usize]| {
        [b"(".to_vec(), items.iter().flat_map(|&n| int(n)).collect(), b"t".to_vec()].concat()
    };
    let mut pickle = b"\x80\x02}".to_vec();
    for (key, (name, t)) in checkpoint.iter().enumerate() {
        let strides: Vec<usize> =
            (0..t.shape.len()).map(|i| t.shape[i + 1..].iter().product()).collect();
        pickle.extend(text(name));
        pickle.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        pickle.extend([text("storage"), b"ctorch\nFloatStorage\n".to_vec()].concat());
        pickle.extend([text(&key.to_string()), text("cpu"), int(t.data.len() / 4)].concat());
        pickle.extend([b"tQ".to_vec(), int(0), tuple(&t.shape), tuple(&strides)].concat());
        pickle.extend(b"\x89}tRs");
    }
    pickle.push(b'.');
    let storages: Vec<&[u8]> = checkpoint.iter().map(|(_, t)| &*t.data).collect();
    torch_zip(&pickle, &storages)
}

#[test]
fn a_torch_file_is_read_when_it_is_allowed() {
    let own = renamed(&weights("mamba2-tiny"), |name| name.replace("embeddings", "embedding"));
    let folder = Folder::new();
    folder.write("config.json", MAMBA_SSM);
    let file = folder.write("pytorch_model.bin", torch_file(&own));
    let text = refusal(&folder);
    assert!(text.contains("--allow-pickle"), "{text}");
    let options = OpenOptions { allow_pickle: true, ..OpenOptions::default() };
    for path in [folder.path(), &file] {
        let lm = LanguageModel::<Cpu>::open(path, &options, cpu()).unwrap();
        assert_eq!(logits(&lm.model), original("mamba2-tiny"));
    }
}

#[test]
fn generation_ends_at_any_id_of_the_list() {
    let text = config_of("mamba2-tiny");
    let folder = folder(&text, &weights("mamba2-tiny"));
    // From config.json, unless generation_config.json speaks; one id or a list.
    assert_eq!(open(&folder).unwrap().eos, [2]);
    folder.write("config.json", text.replace(r#""eos_token_id": 2"#, r#""eos_token_id": [2, 7]"#));
    assert_eq!(open(&folder).unwrap().eos, [2, 7]);
    folder.write("generation_config.json", r#"{"eos_token_id": [11, 2, 300]}"#);
    let lm = open(&folder).unwrap();
    assert_eq!(lm.eos, [11, 2, 300]);
    // With neither, the tokenizer's own.
    folder.write("generation_config.json", "{}");
    folder.write("config.json", text.replace(r#""eos_token_id": 2,"#, ""));
    assert!(open(&folder).unwrap().eos.is_empty());
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        folder.write(name, fs::read(fixture("mamba2-tiny").join(name)).unwrap());
    }
    assert_eq!(open(&folder).unwrap().eos, [2]);

    let free = generated(&lm.model, &[], SamplerConfig::greedy());
    assert_eq!((free.ids.len(), free.finish), (40, Finish::Length));
    for at in [0, 3, 17] {
        let end = free.ids[at];
        let first = free.ids.iter().position(|&id| id == end).unwrap();
        let out = generated(&lm.model, &[511, end, 510], SamplerConfig::greedy());
        assert_eq!((out.ids, out.finish), (free.ids[..first].to_vec(), Finish::Eos));
    }
}

#[test]
fn a_weight_file_stands_for_its_folder() {
    let file = fixture("mamba2-tiny").join("model.safetensors");
    let lm = LanguageModel::<Cpu>::open(&file, &Default::default(), cpu()).unwrap();
    assert!(lm.tokenizer.is_some());
    assert_eq!(logits(&lm.model), original("mamba2-tiny"));
}

#[test]
fn weights_stay_in_the_type_of_their_file() {
    let sizes = [Dtype::F32, Dtype::BF16, Dtype::F16].map(|dtype| {
        let weights = converted(&weights("mamba2-tiny"), dtype);
        open(&folder(&config_of("mamba2-tiny"), &weights)).unwrap().model.weight_bytes()
    });
    assert_eq!(sizes, [sizes[1] * 2, sizes[1], sizes[1]]);
}

#[test]
fn the_head_makes_logits_of_the_hidden_states() {
    let lm = LanguageModel::<Cpu>::open(&fixture("mamba2-tiny"), &OpenOptions::default(), cpu());
    let model = lm.unwrap().model;
    let weights = weights("mamba2-tiny");
    let (_, table) = weights.iter().find(|(name, _)| name.ends_with("embeddings.weight")).unwrap();
    let table = table.to_f32().unwrap();
    let ids = tokens(1, 600, 500); // longer than a piece
    let mut states = [model.new_state().unwrap(), model.new_state().unwrap()];
    let [first, second] = &mut states;
    let mut runs = [Run { tokens: &ids, state: first }, Run { tokens: &ids[..3], state: second }];
    let hidden = model.hidden(&mut runs).unwrap();
    assert_eq!(hidden.shape(), [603, model.width()]);
    let hidden = ops::to_vec(&hidden).unwrap();
    let of = |row: usize| -> Vec<f32> {
        let row = &hidden[row * model.width()..][..model.width()];
        let rows = table.chunks(model.width());
        rows.map(|w| w.iter().zip(row).map(|(w, x)| f64::from(w * x)).sum::<f64>() as f32).collect()
    };
    let mut state = model.new_state().unwrap();
    let mut run = [Run { tokens: &ids, state: &mut state }];
    let logits = ops::to_vec(&model.forward(&mut run, Logits::All).unwrap()).unwrap();
    for row in [0, 2, 511, 512, 599] {
        let width = model.vocab_rows();
        let (want, got) = (&logits[row * width..][..width], of(row));
        for (want, got) in want.iter().zip(&got) {
            // Sums of a few dozen products, in another order and in f64.
            assert!((want - got).abs() < 1e-4 * want.abs().max(1.0), "{want} {got}");
        }
    }
    // The other run is as if it were alone.
    let mut state = model.new_state().unwrap();
    let alone = model.hidden(&mut [Run { tokens: &ids[..3], state: &mut state }]).unwrap();
    assert_eq!(hidden[600 * model.width()..], ops::to_vec(&alone).unwrap());
}

fn cut(path: &Path, len: u64) {
    fs::File::options().write(true).open(path).unwrap().set_len(len).unwrap();
}

#[test]
fn r_f7_a_model_may_be_cut_short_before_while_or_after_it_is_loaded() {
    for (name, no_mmap) in [("mamba2-tiny", false), ("mamba2-tiny-g2", true)] {
        let folder = folder(&config_of(name), &weights(name));
        let options = OpenOptions { no_mmap, ..OpenOptions::default() };
        let open = || LanguageModel::<Cpu>::open(folder.path(), &options, cpu());
        let path = folder.path().join("model.safetensors");
        let whole = fs::read(&path).unwrap();
        let lm = open().unwrap();
        // After: all of it was read.
        for len in [whole.len() as u64 - 1, 5000, 0] {
            cut(&path, len);
            assert_eq!(logits(&lm.model), original(name));
            // Before: an error that names the file, wherever it ends.
            let error = message(&open().err().unwrap());
            assert!(error.contains("model.safetensors"), "{error}");
        }
        // Between the opening and the making of the model.
        fs::write(&path, &whole).unwrap();
        let checkpoint = Checkpoint::open(folder.path(), false).unwrap();
        cut(&path, 5000);
        let file = ConfigFile::parse("config.json", &config_of(name)).unwrap();
        let config = boostr::models::Config::read(&file).unwrap();
        let model = Model::<Cpu>::load(config, checkpoint, cpu()).unwrap();
        assert_eq!(logits(&model), original(name));
    }
}

#[test]
fn r_f7_a_large_file_is_mapped_unless_it_is_to_be_read() {
    let folder = Folder::new();
    let path = folder.path().join("large.safetensors");
    let bytes = 65_u64 << 20;
    let header =
        format!(r#"{{"x":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()).unwrap();
    let len = 8 + header.len() as u64 + bytes;
    // A hole.
    cut(&path, len);
    let mapped = Checkpoint::open(&path, false).unwrap();
    let read = Checkpoint::read(&path, false).unwrap();
    mapped.check_unchanged().unwrap();
    // Within its last page, so that no byte of it is out of reach.
    cut(&path, len - 1);
    let error = message(&mapped.check_unchanged().unwrap_err());
    for part in ["large.safetensors", "changed while it was read", &len.to_string()] {
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
    cut(&path, 0);
    read.check_unchanged().unwrap();
    let x = &read.get("x").unwrap().data;
    assert!(x.len() as u64 == bytes && x.iter().step_by(511).all(|&byte| byte == 0));
}
