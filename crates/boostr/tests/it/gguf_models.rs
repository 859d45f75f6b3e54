//! Models in GGUF files: llama.cpp's, ours, and broken ones. Ids in names: `fixtures/CASES.md`.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::ControlFlow::{Break, Continue};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::{Folder, cpu, models};
use crate::tiny::{fixture, message};
use boostr::backend::{Activations, Cpu};
use boostr::chat;
use boostr::checkpoint::{Bytes, Checkpoint, Dtype, gguf};
use boostr::convert::{Options, Types, Written, convert};
use boostr::load::{LanguageModel, OpenOptions};
use boostr::models::{Config, Logits, Model, Run};
use boostr::ops::{Format, to_vec};

const MODELS: [&str; 3] = ["mamba2-tiny", "mamba2-tiny-g2", "llama-tiny"];

fn made_by_llama_cpp(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/gguf").join(name)
}

fn open(path: &Path) -> LanguageModel<Cpu> {
    LanguageModel::open(path, &Default::default(), cpu()).unwrap()
}

/// Converts a model to `folder`/`name` with matrices of the type called `dtype`, or as they are.
fn converted(source: &Path, folder: &Folder, name: &str, dtype: Option<&str>) -> PathBuf {
    convert_to(source, folder, name, dtype).0
}

fn convert_to(
    source: &Path,
    folder: &Folder,
    name: &str,
    dtype: Option<&str>,
) -> (PathBuf, Vec<Written>) {
    let out = folder.path().join(name);
    let types = dtype.map_or_else(Types::kept, |name| Types::named(name).unwrap());
    let options = Options { types, ..Options::default() };
    let converted = convert(source, &out, &options, &mut |_, _| Continue(())).unwrap();
    assert_eq!(converted.warnings, [""; 0]);
    (out, converted.tensors)
}

struct Golden {
    ids: Vec<u32>,
    logits: Vec<f64>,
}

fn golden(model: &str) -> Golden {
    let file = Checkpoint::open(&fixture(model).join("golden.safetensors"), false).unwrap();
    let data = |name| file.get(name).unwrap().data.as_chunks::<8>().0.to_vec();
    Golden {
        ids: data("input_ids").into_iter().map(|b| i64::from_le_bytes(b) as u32).collect(),
        logits: data("logits_f64").into_iter().map(f64::from_le_bytes).collect(),
    }
}

fn logits(lm: &LanguageModel<Cpu>, ids: &[u32], pieces: usize) -> Vec<f32> {
    let mut state = lm.model.new_state().unwrap();
    let mut all = Vec::new();
    for tokens in ids.chunks(ids.len().div_ceil(pieces)) {
        let mut run = [Run { tokens, state: &mut state }];
        all.extend(to_vec(&lm.model.forward(&mut run, Logits::All).unwrap()).unwrap());
    }
    all
}

/// The largest difference to the original's logits, and the mean of what is lost in nats.
fn distance(lm: &LanguageModel<Cpu>, golden: &Golden) -> (f64, f64) {
    let got = logits(lm, &golden.ids, 1);
    assert_eq!(got.len(), golden.logits.len());
    let differences = got.iter().zip(&golden.logits).map(|(a, b)| (f64::from(*a) - b).abs());
    let vocab = golden.logits.len() / golden.ids.len();
    let mut divergence = 0.0;
    for (got, want) in got.chunks_exact(vocab).zip(golden.logits.chunks_exact(vocab)) {
        let total = |row: &[f64]| row.iter().map(|x| x.exp()).sum::<f64>().ln();
        let got: Vec<f64> = got.iter().copied().map(f64::from).collect();
        let (got_total, want_total) = (total(&got), total(want));
        for (got, want) in got.iter().zip(want) {
            divergence += (want - want_total).exp() * ((want - want_total) - (got - got_total));
        }
    }
    (differences.fold(0.0, f64::max), divergence / golden.ids.len() as f64)
}

#[test]
fn case_17_files_made_by_llama_cpp_give_the_logits_of_the_original() {
    for (file, model, bound) in [
        ("mamba2-tiny-f32.gguf", "mamba2-tiny", 1e-5),
        ("mamba2-tiny-g2-f16.gguf", "mamba2-tiny-g2", 1e-2),
        ("mamba2-tiny-q8_0.gguf", "mamba2-tiny", 0.25),
    ] {
        let lm = open(&made_by_llama_cpp(file));
        let golden = golden(model);
        let (largest, divergence) = distance(&lm, &golden);
        assert!(largest <= bound, "{file}: {largest}");
        assert!(divergence.abs() < 2e-3, "{file}: {divergence}");
        let text = "It was a dark and stormy night.";
        let folder = open(&fixture(model));
        assert_eq!(lm.encode(text).unwrap(), folder.encode(text).unwrap(), "{file}");
        assert_eq!(lm.eos, folder.eos, "{file}");
        assert_eq!(lm.vocab_limit(), folder.vocab_limit(), "{file}");
    }
}

#[test]
fn case_17_a_model_gives_the_same_bits_from_a_folder_and_from_gguf() {
    let folder = Folder::new();
    for model in MODELS {
        let (before, golden) = (open(&fixture(model)), golden(model));
        let out = converted(&fixture(model), &folder, &format!("{model}.gguf"), None);
        let after = open(&out);
        for pieces in [1, 3, golden.ids.len()] {
            let want = logits(&before, &golden.ids, pieces);
            assert_eq!(logits(&after, &golden.ids, pieces), want, "{model}");
        }
        assert_eq!(after.eos, before.eos);
        assert_eq!(after.vocab_limit(), before.vocab_limit());
        for text in ["Call me Ishmael.", "<s> is no <pad>", "naïve — 漢字 🦀\n\n  x"] {
            assert_eq!(after.encode(text).unwrap(), before.encode(text).unwrap(), "{text}");
        }
    }
}

#[test]
fn each_type_changes_the_logits_by_no_more_than_is_stated() {
    // docs/performance.md states these: largest change of a logit (their deviation is 1.6), nats lost.
    let folder = Folder::new();
    for (dtype, largest, nats) in [
        ("bf16", 0.1, 1e-4),
        ("f16", 0.01, 1e-5),
        ("q8_0", 0.5, 2e-3),
        ("q5_1", 1.3, 3e-2),
        ("q5_0", 1.3, 3e-2),
        ("iq4_nl", 3.0, 0.12),
        ("q4_1", 3.0, 0.12),
        ("q4_0", 3.0, 0.12),
        // Rows of 64 and 128 are no whole blocks of 256: types of 32 stand in.
        ("q6_k", 0.5, 2e-3),
        ("q5_k_m", 1.3, 3e-2),
        ("q4_k_m", 1.3, 3e-2),
    ] {
        let name = format!("{dtype}.gguf");
        let out = converted(&fixture("mamba2-tiny"), &folder, &name, Some(dtype));
        let (d, n) = distance(&open(&out), &golden("mamba2-tiny"));
        println!("{dtype}: {d:.4} {n:.2e}");
        assert!(d <= largest && n.abs() <= nats, "{dtype}: {d} {n}");
    }
}

#[test]
fn the_fewer_bits_activations_have_the_further_logits_are_from_exact_ones() {
    let folder = Folder::new();
    let path = converted(&fixture("llama-tiny"), &folder, "q8_0.gguf", Some("q8_0"));
    let ids = golden("llama-tiny").ids;
    let options = OpenOptions { exact: true, ..Default::default() };
    let exact = LanguageModel::open(&path, &options, cpu()).unwrap();
    let exact = logits(&exact, &ids, 1);
    let mut before = 0.0;
    for activations in [Activations::Sixteen, Activations::Mixed, Activations::Eight] {
        let client = cpu().with_activations(activations);
        let lm = LanguageModel::open(&path, &Default::default(), client).unwrap();
        let got = logits(&lm, &ids, 1);
        let squares: f32 = got.iter().zip(&exact).map(|(a, b)| (a - b) * (a - b)).sum();
        assert!(squares > 1.5 * before, "{activations:?}: {squares} after {before}");
        assert_eq!(logits(&lm, &ids, 3), got, "{activations:?} in pieces");
        if activations == Activations::Mixed {
            assert_eq!(logits(&open(&path), &ids, 1), got, "the default");
        }
        before = squares;
    }
}

#[test]
fn there_and_back_again_tensors_are_equal() {
    let folder = Folder::new();
    for model in MODELS {
        let there = converted(&fixture(model), &folder, &format!("{model}.gguf"), None);
        let back = converted(&there, &folder, model, None);
        let [before, after] =
            [&fixture(model), &back].map(|path| Checkpoint::open(path, false).unwrap());
        assert_eq!(before.names().collect::<Vec<_>>(), after.names().collect::<Vec<_>>());
        for (name, entry) in before.iter() {
            let other = after.get(name).unwrap();
            assert_eq!((entry.dtype, &entry.shape), (other.dtype, &other.shape), "{name}");
            assert_eq!(*entry.data, *other.data, "{name}");
        }
        let again = converted(&back, &folder, &format!("{model}-again.gguf"), None);
        assert_eq!(std::fs::read(&there).unwrap(), std::fs::read(again).unwrap(), "{model}");
        let (lm, golden) = (open(&back), golden(model));
        let want = logits(&open(&fixture(model)), &golden.ids, 1);
        assert_eq!(logits(&lm, &golden.ids, 1), want);
    }
}

#[test]
fn a_file_of_llama_cpp_goes_to_a_folder_and_keeps_its_decay_rates() {
    let folder = Folder::new();
    let source = made_by_llama_cpp("mamba2-tiny-f32.gguf");
    let out = converted(&source, &folder, "folder", None);
    let golden = golden("mamba2-tiny");
    let (largest, _) = distance(&open(&out), &golden);
    assert!(largest < 1e-5, "{largest}");
    // ln(exp(x)) may be one bit off; nothing else may.
    let [before, after] =
        [fixture("mamba2-tiny"), out].map(|p| Checkpoint::open(&p, false).unwrap());
    for (name, entry) in before.iter() {
        let [old, new] = [entry, after.get(name).unwrap()].map(|entry| entry.to_f32().unwrap());
        if name.ends_with("A_log") {
            assert!(old.iter().zip(&new).all(|(a, b)| (a - b).abs() <= 3e-7 * a.abs().max(1.0)));
        } else {
            assert_eq!(old, new, "{name}");
        }
    }
}

#[test]
fn case_39_what_every_token_depends_on_is_never_narrowed() {
    let folder = Folder::new();
    for dtype in ["q4_0", "q4_k_m", "bf16"] {
        let name = format!("{dtype}.gguf");
        let (out, written) = convert_to(&fixture("mamba2-tiny-g2"), &folder, &name, Some(dtype));
        let file = Checkpoint::open(&out, false).unwrap();
        let mut narrow = 0;
        for (name, entry) in file.iter() {
            let is_small = entry.shape.len() == 1
                || ["conv1d", "ssm_a", "ssm_d", "norm"].iter().any(|part| name.contains(part));
            assert_eq!(is_small, entry.dtype == Dtype::F32, "{dtype}: {name}");
            narrow += usize::from(!is_small);
        }
        assert_eq!(written.iter().filter(|w| w.error > 0.0).count(), narrow);
        assert!(written.iter().all(|w| w.error < 0.15), "{written:?}");
    }
}

#[test]
fn a_rule_chooses_the_type_of_the_tensors_it_names() {
    let folder = Folder::new();
    let types = Types::named("q4_0").unwrap().with("ssm_in", Dtype::Block(Format::Q8_0)).unwrap();
    let options = Options { types, ..Options::default() };
    let out = folder.path().join("ruled.gguf");
    convert(&fixture("mamba2-tiny"), &out, &options, &mut |_, _| Continue(())).unwrap();
    let file = Checkpoint::open(&out, false).unwrap();
    let of = |name| file.get(name).unwrap().dtype;
    assert_eq!(of("blk.1.ssm_in.weight"), Dtype::Block(Format::Q8_0));
    assert_eq!(of("blk.1.ssm_out.weight"), Dtype::Block(Format::Q4_0));

    let types = Types::named("q4_0").unwrap().with("ssm_inn", Dtype::F16).unwrap();
    let options = Options { types, ..Options::default() };
    let error =
        convert(&fixture("mamba2-tiny"), &folder.path().join("x.gguf"), &options, &mut |_, _| {
            Continue(())
        });
    let text = message(&error.unwrap_err());
    assert!(text.contains("ssm_inn") && text.contains("no matrix"), "{text}");
    assert_eq!(folder.names(), ["ruled.gguf"]);
}

#[test]
fn what_is_there_is_not_written_over() {
    let folder = Folder::new();
    let source = fixture("mamba2-tiny");
    let file = folder.write("there.gguf", "precious");
    let error = convert(&source, &file, &Options::default(), &mut |_, _| Continue(())).unwrap_err();
    assert!(message(&error).contains("there.gguf"), "{error}");
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    let options = Options { overwrite: true, ..Options::default() };
    convert(&source, &file, &options, &mut |_, _| Continue(())).unwrap();
    open(&file);

    let full = folder.path().join("full");
    std::fs::create_dir(&full).unwrap();
    std::fs::write(full.join("precious"), "x").unwrap();
    let error = convert(&source, &full, &options, &mut |_, _| Continue(())).unwrap_err();
    assert!(message(&error).contains("full"), "{error}");
    assert_eq!(folder.names(), ["full", "there.gguf"]);
}

#[test]
fn no_file_of_the_model_is_written_over_whatever_the_options() {
    let folder = Folder::new();
    let only = converted(&fixture("mamba2-tiny"), &folder, "only.gguf", None);
    let before = std::fs::read(&only).unwrap();
    let options = Options { overwrite: true, ..Options::default() };
    for source in [folder.path(), &only] {
        let error = convert(source, &only, &options, &mut |_, _| Continue(())).unwrap_err();
        assert!(message(&error).contains("the model itself"), "{error}");
    }
    assert_eq!(std::fs::read(&only).unwrap(), before);
}

#[test]
fn a_conversion_that_is_ended_leaves_nothing() {
    let folder = Folder::new();
    for name in ["x.gguf", "x"] {
        let out = folder.path().join(name);
        let mut stop = |done, _| if done == 3 { Break(()) } else { Continue(()) };
        let error =
            convert(&fixture("mamba2-tiny"), &out, &Options::default(), &mut stop).unwrap_err();
        assert!(matches!(error, boostr::Error::Interrupted { .. }), "{error}");
        assert_eq!(folder.names(), [""; 0]);
    }
}

#[test]
fn end_tokens_and_defaults_of_generation_go_there_and_back() {
    let folder = Folder::new();
    let source = folder.path().join("mamba2-1.3b");
    std::fs::create_dir(&source).unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixture("mamba2-tiny").join(file), source.join(file)).unwrap();
    }
    let generation = r#"{"eos_token_id": [2, 7], "do_sample": true, "temperature": 0.25}"#;
    std::fs::write(source.join("generation_config.json"), generation).unwrap();
    std::fs::write(source.join("chat_template.jinja"), "{{ messages }}").unwrap();
    let there = converted(&source, &folder, "there.gguf", None);
    let back = converted(&there, &folder, "back", None);
    let before = open(&source);
    for path in [&there, &back] {
        let lm = open(path);
        assert_eq!((&lm.eos, &lm.defaults), (&before.eos, &before.defaults), "{}", path.display());
    }
    let file = Checkpoint::open(&there, false).unwrap();
    let metadata = file.gguf().unwrap();
    assert_eq!(metadata.text("general.name").unwrap(), Some("mamba2-1.3b"));
    assert_eq!(metadata.text("tokenizer.chat_template").unwrap(), Some("{{ messages }}"));

    std::fs::write(source.join("generation_config.json"), r#"{"eos_token_id": 9999}"#).unwrap();
    let out = folder.path().join("bad.gguf");
    let error = convert(&source, &out, &Options::default(), &mut |_, _| Continue(())).unwrap_err();
    assert!(message(&error).contains("9999"), "{error}");
}

/// A copy of mamba2-tiny without its files beside the weights.
fn bare_copy(folder: &Folder, name: &str) -> PathBuf {
    let source = folder.path().join(name);
    std::fs::create_dir(&source).unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(fixture("mamba2-tiny").join(file), source.join(file)).unwrap();
    }
    source
}

#[test]
fn all_chat_templates_go_there_and_back() {
    let folder = Folder::new();
    let list = r#"{"bos_token": "<s>", "chat_template": [{"name": "rag", "template": "r"},
        {"name": "default", "template": "{{ bos_token }}d"}, {"name": "tool_use", "template": "t"}]}"#;
    let in_config = bare_copy(&folder, "in-config");
    std::fs::write(in_config.join("tokenizer_config.json"), list).unwrap();
    // In files of their own, as transformers 5 writes them; what the configuration has does not count then.
    let in_files = bare_copy(&folder, "in-files");
    let config = r#"{"bos_token": "<s>", "chat_template": "old"}"#;
    std::fs::write(in_files.join("tokenizer_config.json"), config).unwrap();
    std::fs::create_dir(in_files.join("additional_chat_templates")).unwrap();
    for (file, text) in [
        ("chat_template.jinja", "{{ bos_token }}d"),
        ("additional_chat_templates/tool_use.jinja", "t"),
        ("additional_chat_templates/rag.jinja", "r"),
        ("additional_chat_templates/readme.txt", "{% no template %}"),
    ] {
        std::fs::write(in_files.join(file), text).unwrap();
    }
    for source in [in_config, in_files] {
        let name = source.file_name().unwrap().to_string_lossy().into_owned();
        let file = converted(&source, &folder, &format!("{name}.gguf"), None);
        let back = converted(&file, &folder, &format!("{name}-back"), None);
        let copy = converted(&source, &folder, &format!("{name}-copy"), None);
        let again = converted(&back, &folder, &format!("{name}-again.gguf"), None);
        for path in [&source, &file, &back, &copy, &again] {
            let lm = open(path);
            let chat = lm.chat_template.as_ref().unwrap();
            let mut templates = chat.templates.clone();
            templates.sort();
            let expected = [("default", "{{ bos_token }}d"), ("rag", "r"), ("tool_use", "t")];
            let expected = expected.map(|(name, text)| (name.to_owned(), text.to_owned()));
            assert_eq!(templates, expected, "{}", path.display());
            let template = chat.compile().unwrap();
            let render =
                |tools| template.render(&[], &chat::Options { tools, ..Default::default() });
            assert_eq!(render(None).unwrap(), "<s>d", "{}", path.display());
            assert_eq!(render(Some(vec![])).unwrap(), "t", "{}", path.display());
        }
    }
}

#[test]
fn values_that_a_type_cannot_hold_are_refused() {
    let folder = Folder::new();
    let source = folder.path().join("model");
    std::fs::create_dir(&source).unwrap();
    std::fs::copy(fixture("mamba2-tiny").join("config.json"), source.join("config.json")).unwrap();
    let good = Checkpoint::open(&fixture("mamba2-tiny"), false).unwrap();
    let bad = crate::tiny::with(&good, "layers.1.mixer.out_proj.weight", |_| 1e9);
    crate::tiny::save(&source.join("model.safetensors"), &bad);
    let out = folder.path().join("x.gguf");
    let options = Options { types: Types::named("f16").unwrap(), ..Options::default() };
    let text = message(&convert(&source, &out, &options, &mut |_, _| Continue(())).unwrap_err());
    assert!(text.contains("blk.1.ssm_out.weight") && text.contains("F16"), "{text}");

    let positive = changed(
        &folder,
        |_| {},
        |name, _, _, data| {
            if name == "blk.0.ssm_a" {
                *data = Bytes::new(
                    [0.5f32; 8].into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>(),
                );
            }
        },
    );
    for name in ["y.gguf", "y"] {
        let out = folder.path().join(name);
        let error =
            convert(&positive, &out, &Options::default(), &mut |_, _| Continue(())).unwrap_err();
        assert!(message(&error).contains("blk.0.ssm_a"), "{error}");
    }
}

#[test]
fn a_given_tokenizer_helps_where_that_of_the_file_cannot_be_used() {
    let folder = Folder::new();
    let path = changed(&folder, |m| drop(m.set("tokenizer.ggml.pre", "martian")), |_, _, _, _| {});
    assert!(refused(&path).contains("martian"));
    let tokenizer = Some(fixture("mamba2-tiny").join("tokenizer.json"));
    let options = OpenOptions { tokenizer, ..Default::default() };
    let lm = LanguageModel::<Cpu>::open(&path, &options, cpu()).unwrap();
    assert!(!lm.encode("x").unwrap().is_empty());
}

#[test]
fn a_weight_that_is_not_finite_is_not_quantized() {
    let folder = Folder::new();
    let source = folder.path().join("model");
    std::fs::create_dir(&source).unwrap();
    std::fs::copy(fixture("mamba2-tiny").join("config.json"), source.join("config.json")).unwrap();
    let good = Checkpoint::open(&fixture("mamba2-tiny"), false).unwrap();
    let bad = crate::tiny::with(&good, "layers.1.mixer.out_proj.weight", |_| f32::NAN);
    crate::tiny::save(&source.join("model.safetensors"), &bad);
    let out = folder.path().join("x.gguf");
    let options = Options { types: Types::named("q8_0").unwrap(), ..Options::default() };
    let text = message(&convert(&source, &out, &options, &mut |_, _| Continue(())).unwrap_err());
    assert!(text.contains("blk.1.ssm_out.weight") && text.contains("NaN"), "{text}");
    assert_eq!(folder.names(), ["model"]);
}

/// The tiny model as GGUF with other metadata, and other tensors.
fn changed(
    folder: &Folder,
    metadata: impl FnOnce(&mut gguf::Metadata),
    tensor: impl Fn(&str, &mut Dtype, &mut Vec<usize>, &mut Bytes),
) -> PathBuf {
    let file = Checkpoint::open(&made_by_llama_cpp("mamba2-tiny-f32.gguf"), false).unwrap();
    let mut new = file.gguf().unwrap().clone();
    metadata(&mut new);
    let mut tensors = Vec::new();
    for (name, entry) in file.iter() {
        let (mut dtype, mut shape) = (entry.dtype, entry.shape.clone());
        let mut data = entry.data.clone();
        tensor(name, &mut dtype, &mut shape, &mut data);
        tensors.push((name, dtype, shape, data));
    }
    let list: Vec<(&str, Dtype, &[usize])> =
        tensors.iter().map(|(name, dtype, shape, _)| (*name, *dtype, shape.as_slice())).collect();
    let out = folder.path().join("changed.gguf");
    gguf::write(&out, &new, &list, |i| Ok(tensors[i].3.clone())).unwrap();
    out
}

fn refused(path: &Path) -> String {
    match LanguageModel::<Cpu>::open(path, &Default::default(), cpu()) {
        Ok(_) => panic!("{} was opened", path.display()),
        Err(error) => message(&error),
    }
}

fn refused_with(key: &str, value: impl Into<gguf::Value>) -> String {
    let folder = Folder::new();
    let text =
        refused(&changed(&folder, |metadata| drop(metadata.set(key, value)), |_, _, _, _| {}));
    assert!(text.contains("changed.gguf"), "{text}");
    text
}

#[test]
fn another_architecture_is_named_with_those_supported() {
    for (arch, expected) in [("mamba", "Mamba-1"), ("gpt2", "gpt2"), ("\u{1b}[31m", "u{1b}")] {
        let text = refused_with("general.architecture", arch);
        assert!(text.contains(expected) && text.contains("supported: mamba2"), "{text}");
    }
}

#[test]
fn r_a24_a_number_of_layers_that_cannot_be_is_refused() {
    for value in [gguf::Value::U32(0), (1u32 << 31).into(), "2".into(), gguf::Value::F32(2.0)] {
        let text = refused_with("mamba2.block_count", value);
        assert!(text.contains("mamba2.block_count") && text.contains("expected"), "{text}");
    }
    let text = refused_with("mamba2.block_count", 3u32);
    assert!(text.contains("missing") && text.contains("blk.2."), "{text}");
}

#[test]
fn an_epsilon_that_the_file_lacks_is_no_default_of_ours() {
    const KEY: &str = "mamba2.attention.layer_norm_rms_epsilon";
    let folder = Folder::new();
    let text =
        refused(&changed(&folder, |metadata| metadata.retain(|key| key != KEY), |_, _, _, _| {}));
    assert!(text.contains(KEY) && text.contains("missing"), "{text}");
}

#[test]
fn r_a25_ssm_sizes_that_disagree_are_refused_with_both_numbers() {
    for (key, value, expected) in [
        ("mamba2.ssm.conv_kernel", 0, "found 0"),
        ("mamba2.ssm.conv_kernel", u32::MAX, "found 4294967295"),
        ("mamba2.ssm.conv_kernel", 5, "[192, 4], expected [192, 5]"),
        ("mamba2.ssm.state_size", 0, "found 0"),
        ("mamba2.ssm.state_size", 16, "expected"),
        ("mamba2.ssm.inner_size", 127, "8 heads do not divide 127 channels"),
        ("mamba2.ssm.group_count", 0, "found 0"),
        ("mamba2.ssm.group_count", 3, "3 groups do not divide 8 heads"),
        ("mamba2.ssm.group_count", 2, "expected"),
        ("mamba2.ssm.time_step_rank", 0, "found 0"),
        ("mamba2.ssm.time_step_rank", 16, "[8], expected [16]"),
        ("mamba2.embedding_length", 63, "[64], expected [63]"),
    ] {
        let text = refused_with(key, value);
        assert!(text.contains(expected), "{key} = {value}: {text}");
    }
}

#[test]
fn r_a26_a_vocabulary_of_another_size_than_the_embedding_is_refused() {
    let folder = Folder::new();
    let path = changed(
        &folder,
        |metadata| {
            let tokens = metadata.strings("tokenizer.ggml.tokens").unwrap().unwrap();
            let fewer: Vec<String> = tokens[..500].iter().map(ToString::to_string).collect();
            let fewer: Vec<&str> = fewer.iter().map(String::as_str).collect();
            metadata.set("tokenizer.ggml.tokens", fewer.as_slice());
            metadata.set("tokenizer.ggml.token_type", [1i32; 500]);
            metadata.retain(|key| key != "tokenizer.ggml.merges");
            metadata.set("tokenizer.ggml.merges", ["i n"]);
        },
        |_, _, _, _| {},
    );
    let text = refused(&path);
    assert!(text.contains("500") && text.contains("512"), "{text}");
}

#[test]
fn r_a26_a_file_without_tokens_runs_on_ids() {
    let folder = Folder::new();
    let path = changed(
        &folder,
        |metadata| {
            metadata.retain(|key| !key.starts_with("tokenizer."));
            metadata.set("mamba2.vocab_size", 512u32);
        },
        |_, _, _, _| {},
    );
    let lm = open(&path);
    assert!(lm.tokenizer.is_none());
    let text = message(&lm.encode("x").unwrap_err());
    assert!(text.contains("--tokens"), "{text}");
    assert_eq!(lm.vocab_limit(), 512);
}

#[test]
fn r_a27_special_ids_outside_of_the_vocabulary_are_refused() {
    for key in ["bos", "eos", "padding", "unknown"] {
        let key = format!("tokenizer.ggml.{key}_token_id");
        let text = refused_with(&key, 512u32);
        assert!(text.contains(&key) && text.contains("512"), "{text}");
    }
}

#[test]
fn case_17_decay_rates_above_zero_are_refused() {
    let folder = Folder::new();
    let path = changed(
        &folder,
        |_| {},
        |name, _, _, data| {
            if name == "blk.1.ssm_a" {
                let floats = data.as_chunks::<4>().0.iter().map(|&b| -f32::from_le_bytes(b));
                *data = Bytes::new(floats.flat_map(f32::to_le_bytes).collect::<Vec<u8>>());
            }
        },
    );
    let text = refused(&path);
    assert!(text.contains("-exp(A_log)") && text.contains("head 0"), "{text}");
}

#[test]
fn unit_dimensions_of_small_tensors_do_not_matter() {
    let folder = Folder::new();
    let path = changed(
        &folder,
        |_| {},
        |name, _, shape, _| {
            if name.contains("ssm_a") || name.contains("ssm_d") && !name.contains("dt") {
                *shape = vec![8];
            }
        },
    );
    let golden = golden("mamba2-tiny");
    assert!(distance(&open(&path), &golden).0 < 1e-5);
}

#[test]
fn a_matrix_of_a_type_that_is_only_decoded_is_what_it_decodes_to() {
    // MXFP4: a power of two (around 2^-4 here), then 32 codes of 4 bits.
    let blocks: Vec<u8> = (0..512 * 2usize)
        .flat_map(|block| {
            let codes = (0..16).map(move |i| (block * 31 + i * 7) as u8 ^ (block >> 3) as u8);
            std::iter::once(122 + (block % 3) as u8).chain(codes)
        })
        .collect();
    let folders = [Folder::new(), Folder::new()];
    let replaced = |folder: &Folder, new_dtype: Dtype, new_data: Vec<u8>| {
        let new_data = Bytes::new(new_data);
        changed(
            folder,
            |_| {},
            |name, dtype, _, data| {
                if name == "token_embd.weight" {
                    (*dtype, *data) = (new_dtype, new_data.clone());
                }
            },
        )
    };
    let narrow = replaced(&folders[0], Dtype::Block(Format::Mxfp4), blocks);
    let file = Checkpoint::open(&narrow, false).unwrap();
    let values = file.get("token_embd.weight").unwrap().to_f32().unwrap();
    let wide = values.into_iter().flat_map(f32::to_le_bytes).collect();
    let wide = replaced(&folders[1], Dtype::F32, wide);
    let ids = golden("mamba2-tiny").ids;
    assert_eq!(logits(&open(&narrow), &ids, 2), logits(&open(&wide), &ids, 2));
}

#[test]
fn a_file_in_memory_goes_once_its_blocks_are_packed() {
    struct Owner(Vec<u8>, #[expect(dead_code, reason = "it is counted")] Arc<()>);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    let folder = Folder::new();
    let types = Types::named("q8_0").unwrap().with("token_embd", Dtype::F16).unwrap();
    for (types, is_kept) in [(types, false), (Types::named("f16").unwrap(), true)] {
        let options = Options { types, overwrite: true, ..Options::default() };
        let path = folder.path().join("m.gguf");
        convert(&fixture("mamba2-tiny"), &path, &options, &mut |_, _| Continue(())).unwrap();
        let counted = Arc::new(());
        let file = Owner(std::fs::read(&path).unwrap(), counted.clone());
        let checkpoint = Checkpoint::from_gguf("m", file).unwrap();
        let config = Config::read_gguf(&checkpoint, checkpoint.gguf().unwrap()).unwrap();
        let model: Model<Cpu> = Model::load(config, checkpoint, cpu()).unwrap();
        // Floats alone stay where they are.
        assert_eq!(Arc::strong_count(&counted) > 1, is_kept);
        assert_eq!(model.vocab_rows(), 512);
    }
}

#[test]
fn synthetic_weights_of_a_mix_have_the_types_of_a_quantized_file() {
    let folder = Folder::new();
    for name in models() {
        for mix in ["q4_k_m", "q5_k_m", "q8_0", "bf16"] {
            let types = Types::named(mix).unwrap();
            let asked = RefCell::new(BTreeMap::new());
            let of = |name: &str, shape: &[usize]| {
                let dtype = types.of(name, shape).unwrap();
                asked.borrow_mut().insert(name.to_owned(), dtype);
                dtype
            };
            let lm = LanguageModel::<Cpu>::open(fixture(name), &Default::default(), cpu()).unwrap();
            let model = Model::<Cpu>::synthetic_as(lm.model.config().clone(), of, cpu()).unwrap();
            let mut run = [Run { tokens: &[1, 2, 3], state: &mut model.new_state().unwrap() }];
            let logits = to_vec(&model.forward(&mut run, Logits::Last).unwrap()).unwrap();
            assert!(logits.iter().all(|x| x.is_finite()), "{name}");
            let out = folder.path().join(format!("{name}-{mix}.gguf"));
            let options = Options { types: types.clone(), ..Options::default() };
            let Ok(written) = convert(&fixture(name), &out, &options, &mut |_, _| Continue(()))
            else {
                // GGUF has no architecture for it, so names are those of folders.
                continue;
            };
            let asked = asked.into_inner();
            let written: BTreeMap<&str, Dtype> =
                written.tensors.iter().map(|w| (w.name.as_str(), w.to)).collect();
            assert!(asked.len() > 5, "{name}");
            for (tensor, dtype) in &asked {
                assert_eq!(written.get(tensor.as_str()), Some(dtype), "{name} {mix}: {tensor}");
            }
        }
    }
}
