//! Importance matrices: files of llama.cpp, what they change, and those that are made here.

use std::fs;
use std::ops::ControlFlow::Continue;
use std::path::{Path, PathBuf};

use crate::common::{Folder, Random, cpu};
use crate::tiny::{fixture, message};
use boostr::checkpoint::gguf::{self, Metadata};
use boostr::checkpoint::{Bytes, Checkpoint, Dtype, safetensors};
use boostr::convert::{Importance, Options, Types, Written, collect, convert};
use boostr::{Error, Result};

/// The bytes of an older file: entries of a name, calls and values.
fn old(entries: &[(&str, i32, &[f32])]) -> Vec<u8> {
    let mut bytes = (entries.len() as i32).to_le_bytes().to_vec();
    for (name, calls, values) in entries {
        bytes.extend((name.len() as i32).to_le_bytes());
        bytes.extend(name.as_bytes());
        for number in [*calls, values.len() as i32] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(values.iter().flat_map(|x| x.to_le_bytes()));
    }
    // What llama.cpp adds: the last chunk, and the text's name.
    bytes.extend(7i32.to_le_bytes());
    bytes.extend(4i32.to_le_bytes());
    bytes.extend(b"text");
    bytes
}

/// A GGUF file of sums and counts.
fn new(path: &Path, entries: &[(&str, Vec<f32>, Vec<f32>)]) {
    let mut metadata = Metadata::new("metadata");
    metadata.set("general.type", "imatrix");
    let tensors: Vec<(String, Vec<usize>, &Vec<f32>)> = entries
        .iter()
        .flat_map(|(name, sums, counts)| {
            let shape = vec![counts.len(), sums.len() / counts.len()];
            [
                (format!("{name}.in_sum2"), shape, sums),
                (format!("{name}.counts"), vec![counts.len(), 1], counts),
            ]
        })
        .collect();
    let table: Vec<(&str, Dtype, &[usize])> =
        tensors.iter().map(|(name, shape, _)| (name.as_str(), Dtype::F32, &shape[..])).collect();
    let mut data = |i: usize| -> Result<Bytes> { Ok(Bytes::new(Dtype::F32.encode(tensors[i].2)?)) };
    gguf::write(path, &metadata, &table, &mut data).unwrap();
}

fn quantized(
    source: &Path,
    folder: &Folder,
    name: &str,
    importance: Option<Importance>,
) -> (Vec<Written>, Vec<String>) {
    let out = folder.path().join(name);
    let types = Types::named("q4_0").unwrap();
    let options = Options { types, importance, ..Options::default() };
    let converted = convert(source, &out, &options, &mut |_, _| Continue(())).unwrap();
    (converted.tensors, converted.warnings)
}

/// The square inputs of a model, as a file of the older kind has them.
fn weights(random: &mut Random, columns: usize) -> Vec<f32> {
    (0..columns).map(|_| 1.0 + random.below(1000) as f32).collect()
}

#[test]
fn both_kinds_of_file_lower_the_weighted_error_alike() {
    let folder = Folder::new();
    let source = fixture("llama-tiny");
    let name = "blk.0.attn_q.weight";
    let (plain, _) = quantized(&source, &folder, "plain.gguf", None);
    let columns = plain.iter().find(|w| w.name == name).unwrap().shape[1];
    let sums = weights(&mut Random(5), columns);
    let eight: Vec<f32> = sums.iter().map(|x| 8.0 * x).collect();
    let before = folder.write("old.imatrix", old(&[(name, 8, &eight)]));
    let after = folder.path().join("new.gguf");
    new(&after, &[(name, eight.clone(), vec![8.0])]);
    let mut files = Vec::new();
    for (i, path) in [before, after].into_iter().enumerate() {
        let importance = Importance::read(&path).unwrap();
        assert_eq!(importance.names().collect::<Vec<_>>(), [name]);
        let out = format!("{i}.gguf");
        let (written, warnings) = quantized(&source, &folder, &out, Some(importance));
        let own = written.iter().find(|w| w.name == name).unwrap();
        let [without, with] = own.weighted.unwrap();
        assert!(0.0 < with && with < without, "{with} with weights, {without} without");
        assert!(written.iter().filter(|w| w.weighted.is_some()).count() == 1);
        assert!(warnings.iter().any(|w| w.contains("has nothing of")), "{warnings:?}");
        let layers = |w: &String| w.contains("has nothing of") && w.contains(".{0,1");
        assert!(warnings.iter().any(layers), "the blocks are named: {warnings:?}");
        files.push(fs::read(folder.path().join(out)).unwrap());
    }
    assert!(files[0] == files[1]);
    assert!(files[0] != fs::read(folder.path().join("plain.gguf")).unwrap());
}

#[test]
fn broken_importance_matrices_are_named() {
    let folder = Folder::new();
    let whole = old(&[("blk.0.attn_q.weight", 1, &[1.0, 2.0]), ("b", 0, &[3.0])]);
    let is_whole = |len: usize| whole.len() - 12 <= len;
    for len in 0..whole.len() {
        let path = folder.write("cut", &whole[..len]);
        let read = Importance::read(&path);
        assert_eq!(read.is_ok(), is_whole(len), "{len}");
        if let Err(error) = read {
            assert!(message(&error).contains("cut"), "{error}");
        }
    }
    for (bytes, expected) in [
        (old(&[]), "the count of entries is 0"),
        (old(&[("a", 1, &[-1.0])]), "`a` has a weight of -1"),
        (old(&[("a", 1, &[f32::NAN])]), "`a` has a weight of NaN"),
        (old(&[("a", -1, &[1.0])]), "a number of calls is -1"),
        (b"\xff\xff\xff\x7f\xff\xff\xff\x7f".to_vec(), "the length of a name is 2147483647"),
    ] {
        let error = message(&Importance::read(&folder.write("bad", bytes)).unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
    let error = Importance::read(&fixture("llama-tiny/model.safetensors")).unwrap_err();
    assert!(matches!(error, Error::Format { .. }), "{error}");
    // Of another model.
    let wrong = folder.write("wrong", old(&[("blk.0.attn_q.weight", 1, &[1.0; 3])]));
    let importance = Some(Importance::read(&wrong).unwrap());
    let options =
        Options { types: Types::named("q4_0").unwrap(), importance, ..Options::default() };
    let out = folder.path().join("out.gguf");
    let error = convert(&fixture("llama-tiny"), &out, &options, &mut |_, _| Continue(()));
    assert!(message(&error.unwrap_err()).contains("3 weights"), "of another model");
    assert!(!out.exists());
}

fn made(model: &str, folder: &Folder, ids: &[u32], chunk: usize) -> PathBuf {
    let out = folder.path().join(format!("{model}-{chunk}.imatrix.gguf"));
    let open = Default::default();
    let text = (ids, "a text");
    let path = fixture(model);
    collect(&path, &open, text, chunk, &out, &cpu(), &mut |_, _| Continue(())).unwrap();
    out
}

#[test]
fn what_is_made_here_are_the_sums_of_squares_of_the_inputs() {
    let folder = Folder::new();
    let ids: Vec<u32> = (0..24).map(|i| (i * 37 + 11) % 512).collect();
    let file = Checkpoint::open(&made("llama-tiny", &folder, &ids, 8), false).unwrap();
    let floats = |name: &str| file.get(name).unwrap().to_f32().unwrap();
    let model = Checkpoint::open(&fixture("llama-tiny"), false).unwrap();
    let of = |name: &str| model.get(name).unwrap().to_f32().unwrap();
    let (table, norm) =
        (of("model.embed_tokens.weight"), of("model.layers.0.input_layernorm.weight"));
    let width = norm.len();
    let mut want = vec![0f64; width];
    for &id in &ids {
        let row = &table[id as usize * width..][..width];
        let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
        for ((sum, x), w) in want.iter_mut().zip(row).zip(&norm) {
            *sum += (f64::from(*x) * f64::from(*w)).powi(2) / (mean + 1e-5);
        }
    }
    let got = floats("blk.0.attn_q.weight.in_sum2");
    for (got, want) in got.iter().zip(&want) {
        assert!((f64::from(*got) - want).abs() <= 1e-2 * want + 1e-9, "{got} is not {want}");
    }
    assert_eq!(floats("blk.0.attn_q.weight.counts"), [24.0]);
    // Projections of one input meet the same.
    for other in ["attn_k", "attn_v"] {
        assert_eq!(floats(&format!("blk.0.{other}.weight.in_sum2")), got);
    }
}

#[test]
fn a_model_that_gives_no_numbers_gives_no_importance_matrix() {
    let folder = Folder::new();
    let source = Checkpoint::open(&fixture("llama-tiny"), false).unwrap();
    let config = fs::read(fixture("llama-tiny").join("config.json")).unwrap();
    folder.write("config.json", config);
    for value in [f32::NAN, f32::INFINITY, 1e38] {
        let broken = value.to_le_bytes().repeat(64);
        let table: Vec<(&str, Dtype, &[usize], &[u8])> = source
            .iter()
            .map(|(name, t)| {
                let is_broken = name == "model.layers.1.input_layernorm.weight";
                (name, t.dtype, &t.shape[..], if is_broken { &broken[..] } else { &t.data[..] })
            })
            .collect();
        let path = folder.path().join("model.safetensors");
        safetensors::write(&path, &table, &Default::default()).unwrap();
        let out = folder.path().join("out.gguf");
        let text = (&[5, 9, 30, 2][..], "a text");
        let open = Default::default();
        let ended = collect(folder.path(), &open, text, 4, &out, &cpu(), &mut |_, _| Continue(()));
        let error = message(&ended.unwrap_err());
        assert!(error.contains("`blk.1.") && error.contains("not finite"), "{error}");
        assert!(!out.exists());
    }
}

#[test]
fn every_matrix_of_the_layers_is_there_and_lowers_its_weighted_error() {
    for model in ["mamba2-tiny", "llama-tiny", "granitehybrid-moe-tiny", "nemotron-h-moe-tiny"] {
        let folder = Folder::new();
        let ids: Vec<u32> = (0..64).map(|i| (i * 37 + 11) % 512).collect();
        let importance = Importance::read(&made(model, &folder, &ids, 32)).unwrap();
        let (written, warnings) = quantized(&fixture(model), &folder, "q.gguf", Some(importance));
        let weighted: Vec<&Written> = written.iter().filter(|w| w.weighted.is_some()).collect();
        assert!(!weighted.is_empty(), "{model}");
        for warning in warnings.iter().filter(|w| w.contains("has nothing of")) {
            let rest = warning.split_once(": ").unwrap().1;
            let known = ["token_embd.weight", "output.weight"];
            assert!(rest.split(", ").all(|kind| known.contains(&kind)), "{model}: {warning}");
        }
        let sum =
            |which: usize| weighted.iter().map(|w| w.weighted.unwrap()[which].powi(2)).sum::<f64>();
        assert!(sum(1) < sum(0), "{model}: {} with weights, {} without", sum(1), sum(0));
    }
}
