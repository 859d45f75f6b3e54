//! Files of models that people have: heads, names and types that are not those of the configuration. Ids in
//! names: `fixtures/CASES.md`.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};

use crate::common::{Folder, cpu};
use crate::tiny::{entry, message};
use boostr::Result;
use boostr::backend::Cpu;
use boostr::checkpoint::gguf::{self, Metadata};
use boostr::checkpoint::{Bytes, Checkpoint, Dtype, TensorEntry, safetensors};
use boostr::convert::{Options, convert};
use boostr::load::LanguageModel;
use boostr::models::{Logits, Run};
use boostr::ops::to_vec;
use boostr::sample::{Constraint, TokenSet};
use serde_json::{Value, json};

const IDS: [u32; 8] = [5, 9, 30, 2, 17, 11, 8, 25];

fn people(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/people").join(name)
}

fn open(path: &Path) -> Result<LanguageModel<Cpu>> {
    LanguageModel::open(path, &Default::default(), cpu())
}

fn logits(path: &Path) -> Vec<f32> {
    let lm = open(path).unwrap();
    let mut state = lm.model.new_state().unwrap();
    let mut run = [Run { tokens: &IDS, state: &mut state }];
    to_vec(&lm.model.forward(&mut run, Logits::All).unwrap()).unwrap()
}

#[track_caller]
fn close(got: &[f32], expected: &Path) {
    let want = Checkpoint::open(expected, false).unwrap();
    let want = want.get("logits").unwrap().to_f32().unwrap();
    assert_eq!(got.len(), want.len());
    let far = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far < 1e-5, "{far}");
}

/// A folder with a configuration of `people`, changed, and the tensors that `edit` makes of its own.
fn folder(
    of: &str,
    changes: &Value,
    edit: impl Fn(String, TensorEntry) -> Vec<(String, TensorEntry)>,
) -> Folder {
    let folder = Folder::new();
    let config = fs::read(people(of).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    folder.write("config.json", config.to_string());
    let file = Checkpoint::open(&people(of).join("model.safetensors"), false).unwrap();
    let tensors: BTreeMap<String, TensorEntry> =
        file.iter().flat_map(|(name, entry)| edit(name.to_owned(), entry.clone())).collect();
    let tensors: Vec<(&str, Dtype, &[usize], &[u8])> = tensors
        .iter()
        .map(|(name, e)| (name.as_str(), e.dtype, e.shape.as_slice(), &*e.data))
        .collect();
    let path = folder.path().join("model.safetensors");
    safetensors::write(&path, &tensors, &BTreeMap::new()).unwrap();
    folder
}

const HEAD: &str = "lm_head.weight";

#[test]
fn p_tied_head_of_its_own_is_used() {
    let own = people("tied-head");
    close(&logits(&own), &own.join("expected.safetensors"));
    let warnings = open(&own).unwrap().warnings;
    assert!(warnings.iter().any(|w| w.contains("tie_word_embeddings")), "{warnings:?}");
    let folder = Folder::new();
    let out = folder.path().join("out.gguf");
    convert(&own, &out, &Options::default(), &mut |_, _| Continue(())).unwrap();
    close(&logits(&out), &own.join("expected.safetensors"));
}

#[test]
fn p_tied_head_of_the_same_values_in_another_type_is_the_embedding() {
    let own = Checkpoint::open(&people("tied-head/model.safetensors"), false).unwrap();
    let embedding = own.get("model.embed_tokens.weight").unwrap();
    // Values that half precision has.
    let values: Vec<f32> =
        embedding.to_f32().unwrap().iter().map(|x| (x * 64.0).round() / 64.0).collect();
    let of = |dtype: Option<Dtype>| {
        let (values, shape) = (values.clone(), embedding.shape.clone());
        folder("tied-head", &json!({}), move |name, old| match (name.as_str(), dtype) {
            ("model.embed_tokens.weight", _) => vec![(name, entry(Dtype::F32, &shape, &values))],
            (HEAD, None) => Vec::new(),
            (HEAD, Some(dtype)) => vec![(name, entry(dtype, &shape, &values))],
            _ => vec![(name, old)],
        })
    };
    let want = logits(of(None).path());
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F64] {
        let folder = of(Some(dtype));
        assert_eq!(logits(folder.path()), want, "{dtype:?}");
    }
}

#[test]
fn names_without_the_prefix_of_the_model_get_it() {
    let bare = |changes: Value, keep_head: bool| {
        folder("llama", &changes, move |name, entry| match name.strip_prefix("model.") {
            Some(name) => vec![(name.to_owned(), entry)],
            None if keep_head => vec![(name, entry)],
            None => Vec::new(),
        })
    };
    let with_head = bare(json!({}), true);
    close(&logits(with_head.path()), &people("llama/expected.safetensors"));
    let tied = bare(json!({ "tie_word_embeddings": true }), false);
    assert!(logits(tied.path()).iter().all(|x| x.is_finite()));
    let error = message(&open(bare(json!({}), false).path()).err().unwrap());
    assert!(error.contains("missing") && error.contains(HEAD), "{error}");
}

/// The model of `llama` as a GGUF file with other metadata.
fn gguf_with(edit: impl FnOnce(&mut Metadata)) -> Folder {
    let folder = Folder::new();
    let plain = folder.path().join("plain.gguf");
    convert(&people("llama"), &plain, &Options::default(), &mut |_, _| Continue(())).unwrap();
    let file = Checkpoint::open(&plain, false).unwrap();
    let mut metadata = file.gguf().unwrap().clone();
    edit(&mut metadata);
    let entries: Vec<_> = file.iter().collect();
    let tensors: Vec<(&str, Dtype, &[usize])> =
        entries.iter().map(|(name, entry)| (*name, entry.dtype, &entry.shape[..])).collect();
    let mut data = |i: usize| -> Result<Bytes> { Ok(entries[i].1.data.clone()) };
    gguf::write(&folder.path().join("m.gguf"), &metadata, &tensors, &mut data).unwrap();
    folder
}

#[test]
fn arrays_of_equal_numbers_are_one_number_for_all_layers() {
    let of = |heads: &[i32]| {
        gguf_with(|metadata| {
            metadata.set("llama.attention.head_count_kv", heads);
            metadata.set("llama.attention.head_count", [2i32].as_slice());
            metadata.set("llama.feed_forward_length", [32i32].as_slice());
        })
    };
    let folder = of(&[1]);
    close(&logits(&folder.path().join("m.gguf")), &people("llama/expected.safetensors"));
    let folder = of(&[1, 1]);
    let error = message(&open(&folder.path().join("m.gguf")).err().unwrap());
    assert!(error.contains("llama.attention.head_count_kv"), "{error}");
}

#[test]
fn the_way_in_which_weights_are_quantized_is_named() {
    let of = |changes: &Value| {
        folder("llama", changes, |name, entry| match name.as_str() {
            "model.layers.0.mlp.up_proj.weight" => {
                vec![("model.layers.0.mlp.up_proj.qweight".to_owned(), entry)]
            }
            _ => vec![(name, entry)],
        })
    };
    for (changes, way) in [
        (json!({ "quantization_config": { "quant_method": "gptq", "bits": 4 } }), "`gptq`"),
        (json!({ "quantization_config": { "quant_method": "fp8" } }), "`fp8`"),
        (json!({ "quantization": { "group_size": 64, "bits": 4 } }), "MLX, 4 bits"),
    ] {
        let folder = of(&changes);
        let out = folder.path().join("out.gguf");
        let converted = convert(folder.path(), &out, &Options::default(), &mut |_, _| Continue(()));
        for error in [open(folder.path()).err().unwrap(), converted.unwrap_err()] {
            let error = message(&error);
            assert!(error.contains(&format!("quantized by {way}")), "{error}");
        }
    }
    // A note that is left in a model that loads is no reason to refuse it.
    let note = json!({ "quantization_config": { "quant_method": "fp8" } });
    let whole = folder("llama", &note, |name, entry| vec![(name, entry)]);
    close(&logits(whole.path()), &people("llama/expected.safetensors"));
    let error = message(&open(of(&json!({})).path()).err().unwrap());
    assert!(error.contains("up_proj.qweight"), "{error}");
}

#[test]
fn a_configuration_in_place_of_weights_is_named() {
    let folder = folder("llama", &json!({}), |name, entry| vec![(name, entry)]);
    let error = message(&open(&folder.path().join("config.json")).err().unwrap());
    assert!(error.contains("config.json`: expected a file of weights"), "{error}");
}

/// A text of one token again and again.
#[derive(Clone)]
struct Only(u32);

impl Constraint for Only {
    fn allowed(&mut self) -> Result<TokenSet> {
        let mut set = TokenSet::new(1 << 10, false);
        set.allow(self.0);
        Ok(set)
    }

    fn accept(&mut self, _: u32) -> Result<()> {
        Ok(())
    }

    fn is_complete(&self) -> bool {
        false
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// What is asked of an answer.
type Check<'a> = &'a dyn Fn(&[u32]) -> bool;

#[test]
fn tokens_that_are_kept_out_do_not_come_and_what_is_not_acted_on_is_a_warning() {
    let folder = folder("llama", &json!({}), |name, entry| vec![(name, entry)]);
    let text = r#"{"stop_strings": ["x"], "min_new_tokens": 3, "top_k": -1, "eos_token_id": -1}"#;
    folder.write("generation_config.json", text);
    let lm = open(folder.path()).unwrap();
    for field in ["stop_strings", "min_new_tokens"] {
        assert!(lm.warnings.iter().any(|w| w.contains(field)), "{:?}", lm.warnings);
    }
    // The end of config.json counts where the file names none.
    assert_eq!((lm.eos, lm.defaults.top_k), (vec![2], Some(0)));
    let answer = |fields: Value| {
        folder.write("generation_config.json", fields.to_string());
        let lm = open(folder.path()).unwrap();
        let ids = lm.complete_ids(vec![5, 6, 7]).max_tokens(6).run().unwrap().ids;
        let asked = lm.complete_ids(vec![5, 6, 7]).max_tokens(6);
        let beams = asked.beams(1, |_| Continue(())).unwrap();
        assert_eq!(beams[0].ids, ids, "one beam is the greedy answer");
        (ids, lm.warnings)
    };
    let (free, _) = answer(json!({}));
    let [first, second] = [free[0], free[1]];
    assert_ne!(first, second);
    let cases: [(Value, Check<'_>); 7] = [
        (json!({ "suppress_tokens": [first] }), &|ids: &[u32]| !ids.contains(&first)),
        (json!({ "begin_suppress_tokens": [first] }), &|ids: &[u32]| ids[0] != first),
        (json!({ "begin_suppress_tokens": [second] }), &|ids: &[u32]| ids == free),
        (json!({ "bad_words_ids": [[first]] }), &|ids: &[u32]| !ids.contains(&first)),
        (json!({ "bad_words_ids": [[first, second]] }), &|ids: &[u32]| {
            ids[0] == first && ids[1] != second
        }),
        (json!({ "bad_words_ids": [[6, 7, first]] }), &|ids: &[u32]| ids[0] != first),
        (json!({ "bad_words_ids": [[5, 7, first]] }), &|ids: &[u32]| ids == free),
    ];
    for (fields, is_kept_out) in cases {
        let (ids, warnings) = answer(fields.clone());
        assert!(is_kept_out(&ids), "{fields}: {ids:?}, free {free:?}");
        assert!(warnings.is_empty(), "{warnings:?}");
    }
    // A GGUF file that is made of the folder keeps them.
    let (kept, _) = answer(json!({ "suppress_tokens": [first] }));
    let gguf = folder.path().join("kept.gguf");
    convert(folder.path(), &gguf, &Options::default(), &mut |_, _| Continue(())).unwrap();
    let lm = open(&gguf).unwrap();
    assert_eq!(lm.complete_ids(vec![5, 6, 7]).max_tokens(6).run().unwrap().ids, kept);
    fs::remove_file(gguf).unwrap();
    // What is no token is named and left out; the rest counts.
    let (ids, warnings) = answer(json!({
        "suppress_tokens": [first, 99_999], "bad_words_ids": [[1, 88_888], [77_777]]
    }));
    assert!(!ids.contains(&first));
    assert!(warnings.iter().any(|w| w.contains("left out 77777 and 2 more: ")), "{warnings:?}");
    // Nothing is left: a warning, and the lists are not used. Of a constraint's tokens: the constraint wins.
    let all: Vec<u32> = (0..lm.vocab_limit() as u32).collect();
    folder.write("generation_config.json", json!({ "suppress_tokens": all }).to_string());
    let lm = open(folder.path()).unwrap();
    let asked = || lm.complete_ids(vec![5, 6, 7]).max_tokens(2);
    assert_eq!(asked().run().unwrap().ids, free[..2]);
    let warnings = lm.warnings.join(" ");
    assert!(warnings.contains("suppress_tokens") && warnings.contains("leave none"), "{warnings}");
    let only = || Box::new(Only(9)) as Box<dyn Constraint>;
    assert_eq!(asked().constraint(only()).run().unwrap().ids, [9, 9]);
}
