//! The block for one token more: its logits, and what it guesses.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use boostr::backend::{Cpu, Tensor};
use boostr::checkpoint::{Bytes, Checkpoint, ConfigFile, Dtype, TensorEntry};
use boostr::engine::{Draft, EngineConfig, Event, Outcome, Request, Scheduler, generate};
use boostr::load::LanguageModel;
use boostr::models::{Config, Model, Mtp, Run};
use boostr::ops;
use boostr::sample::SamplerConfig;

use crate::common::cpu;

const TINY: &str = "models/qwen3_5-tiny";
const TINY_GGUF: &str = "gguf/qwen3_5-tiny.gguf";

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn open(name: &str) -> LanguageModel<Cpu> {
    LanguageModel::open(fixtures().join(name), &Default::default(), cpu()).unwrap()
}

fn config(name: &str) -> Config {
    let path = fixtures().join(name).join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    Config::read(&ConfigFile::parse(path, &text).unwrap()).unwrap()
}

fn rows(values: &Tensor<Cpu>, count: std::ops::Range<usize>) -> Tensor<Cpu> {
    values.narrow(0, count.start, count.len()).unwrap().contiguous().unwrap()
}

/// The golden's prompt, and what the block says after each of its tokens but the last.
fn golden() -> (Vec<u32>, Vec<f64>) {
    let file = Checkpoint::open(&fixtures().join(TINY).join("golden.safetensors"), false).unwrap();
    let ids = file.get("input_ids").unwrap().data.as_chunks::<8>().0.to_vec();
    let logits = file.get("mtp_logits_f64").unwrap().data.as_chunks::<8>().0.to_vec();
    let ids = ids.into_iter().map(|b| u32::try_from(i64::from_le_bytes(b)).unwrap());
    (ids.collect(), logits.into_iter().map(f64::from_le_bytes).collect())
}

#[test]
fn the_block_gives_the_logits_of_the_golden_from_a_folder_and_from_gguf_however_it_is_cut() {
    let (ids, want) = golden();
    for name in [TINY, TINY_GGUF] {
        let lm = open(name);
        let block = lm.mtp().unwrap().unwrap();
        let mut state = lm.model.new_state().unwrap();
        let hidden = lm.model.hidden(&mut [Run { tokens: &ids, state: &mut state }]).unwrap();
        let count = ids.len() - 1;
        let said = |cuts: &[usize]| -> Vec<f32> {
            let mut state = block.new_state(&lm.model).unwrap();
            let ends = cuts.iter().copied().chain([count]);
            let mut first = 0;
            let mut all = Vec::new();
            for end in ends {
                let part = rows(&hidden, first..end);
                let next = &ids[first + 1..=end];
                let given = block.forward(&lm.model, &mut state, &part, next).unwrap();
                all.extend(ops::to_vec(&lm.model.logits(&given).unwrap()).unwrap());
                first = end;
            }
            all
        };
        let whole = said(&[]);
        assert_eq!(whole.len(), want.len(), "{name}");
        let far =
            whole.iter().zip(&want).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
        assert!(far <= 2e-4, "{name}: {far:e}");
        for cut in 1..count {
            assert!(said(&[cut]) == whole, "{name}, cut at {cut}");
        }
    }
}

#[test]
fn a_model_without_the_block_has_none_and_its_absence_changes_nothing() {
    assert!(open("models/llama-tiny").mtp().unwrap().is_none());
    assert!(open("models/olmo-hybrid-tiny").mtp().unwrap().is_none());
    // d_6: the same model with and without the block.
    let path = fixtures().join(TINY);
    let config = config(TINY);
    let mut bare = Checkpoint::open(&path, false).unwrap();
    bare.retain(|name| !name.starts_with("mtp."));
    let without = Model::<Cpu>::load(config, bare.clone(), cpu()).unwrap();
    assert!(Mtp::load(&without, bare).unwrap().is_none());
    let (ids, _) = golden();
    let logits = |model: &Model<Cpu>| {
        let mut state = model.new_state().unwrap();
        let mut run = [Run { tokens: &ids, state: &mut state }];
        ops::to_vec(&model.hidden(&mut run).unwrap()).unwrap()
    };
    assert!(logits(&without) == logits(&open(TINY).model));
}

fn with_prompt(model: &Model<Cpu>, prompt: &[u32], seed: u64) -> Request<Cpu> {
    let sampler = match seed {
        0 => SamplerConfig::greedy(),
        seed => SamplerConfig { temperature: 0.4, seed, ..SamplerConfig::default() },
    };
    let logprobs = Some(2);
    Request {
        max_tokens: 40,
        sampler,
        logprobs,
        ..Request::new(prompt.to_vec(), model.vocab_limit())
    }
}

type Said = Vec<(u32, f32)>;

/// What requests get that run together, and then once more, from the prefix cache.
fn answers(model: &Model<Cpu>, draft: Option<&Draft<Cpu>>) -> Vec<Said> {
    let (ids, _) = golden();
    let mut scheduler = Scheduler::new(model, EngineConfig::default());
    let mut all = Vec::new();
    for _ in 0..2 {
        let receivers: Vec<_> = (0..4)
            .map(|seed| {
                let (sender, receiver) = mpsc::channel();
                let prompt = &ids[..20 + seed as usize];
                let request = Request { draft: draft.cloned(), ..with_prompt(model, prompt, seed) };
                let listener = move |event: Event<Cpu>| {
                    if let Event::Token { id, logprob, .. } = event {
                        sender.send((id, logprob)).ok();
                    }
                    ControlFlow::Continue(())
                };
                scheduler.submit(request, Box::new(listener)).unwrap();
                receiver
            })
            .collect();
        while scheduler.step() {}
        all.extend(receivers.into_iter().map(|receiver| receiver.iter().collect()));
    }
    all
}

#[test]
fn guesses_of_the_block_change_no_output_alone_together_or_after_a_cache_hit() {
    for name in [TINY, TINY_GGUF] {
        let lm = open(name);
        let draft = Draft::Mtp(Arc::new(lm.mtp().unwrap().unwrap()));
        assert_eq!(answers(&lm.model, Some(&draft)), answers(&lm.model, None), "{name}");
    }
}

/// The tiny model, but that the next token depends on the present one alone: mixers and feed-forward parts give zeros. Its
/// block computes the same, with `noise` in it.
fn planted(noise: f32) -> (Model<Cpu>, Mtp<Cpu>) {
    let path = fixtures().join(TINY);
    let config = config(TINY);
    let mut checkpoint = Checkpoint::open(&path, false).unwrap();
    let mut tensors: BTreeMap<String, TensorEntry> =
        checkpoint.iter().map(|(name, entry)| (name.to_owned(), entry.clone())).collect();
    let entry = |shape: &[usize], values: Vec<f32>, like: &TensorEntry| TensorEntry {
        dtype: Dtype::F32,
        shape: shape.to_vec(),
        data: Bytes::new(values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()),
        ..like.clone()
    };
    for (name, tensor) in &mut tensors {
        let ends = ["out_proj.weight", "o_proj.weight", "down_proj.weight"];
        if ends.iter().any(|end| name.ends_with(end)) && !name.contains("visual") {
            let count = tensor.shape.iter().product();
            *tensor = entry(&tensor.shape.clone(), vec![0.0; count], tensor);
        }
    }
    let embedding = tensors["model.language_model.embed_tokens.weight"].clone();
    let &[vocab, width] = &embedding.shape[..] else { panic!() };
    // The head's row of a token is another's embedding, so that one follows the other.
    let table = embedding.to_f32().unwrap();
    let head: Vec<f32> =
        (0..vocab).flat_map(|id| table[(5 * id + 3) % vocab * width..][..width].to_vec()).collect();
    tensors.insert("lm_head.weight".into(), entry(&[vocab, width], head, &embedding));
    let fc: Vec<f32> = (0..width * 2 * width)
        .map(|i| {
            let (row, column) = (i / (2 * width), i % (2 * width));
            let scattered = ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
            f32::from(u8::from(row == column)) + noise * scattered
        })
        .collect();
    tensors.insert("mtp.fc.weight".into(), entry(&[width, 2 * width], fc, &embedding));
    let zeros = entry(&[width], vec![0.0; width], &embedding);
    tensors.insert("mtp.pre_fc_norm_embedding.weight".into(), zeros);
    let norm = tensors["model.language_model.norm.weight"].clone();
    tensors.insert("mtp.norm.weight".into(), norm);
    checkpoint.replace(tensors);
    let model = Model::load(config, checkpoint.clone(), cpu()).unwrap();
    let block = Mtp::load(&model, checkpoint).unwrap().unwrap();
    (model, block)
}

#[test]
fn a_block_that_is_right_saves_most_passes_and_one_with_noise_fewer_at_the_same_output() {
    let mut shares = Vec::new();
    for noise in [0.0, 0.3, 3.0] {
        let (model, block) = planted(noise);
        let draft = Draft::Mtp(Arc::new(block));
        let answer = |draft: Option<Draft<Cpu>>| -> (Outcome<Cpu>, usize) {
            let mut state = model.new_state().unwrap();
            let request = Request { draft, max_tokens: 64, ..with_prompt(&model, &[7, 3, 11], 0) };
            let out = generate(&model, &mut state, request, &mut |_| ControlFlow::Continue(()));
            let out = out.unwrap();
            let passes = out.ids.len() - out.accepted;
            (out, passes)
        };
        let ((plain, all), (drafted, passes)) = (answer(None), answer(Some(draft)));
        assert_eq!(plain.ids, drafted.ids, "{noise}");
        assert_eq!((all, plain.drafted), (64, 0));
        if noise == 0.0 {
            assert_eq!(drafted.accepted, drafted.drafted, "all guesses are right");
            assert!(passes <= 12, "{passes} passes for 64 tokens");
        }
        shares.push(passes);
    }
    assert!(shares[0] < shares[1] && shares[1] <= shares[2], "{shares:?}");
}

#[test]
fn a_block_with_experts_is_taken_from_either_family_and_changes_no_output() {
    for name in ["models/qwen3_5-moe-tiny", "models/qwen3next-tiny"] {
        let config = config(name);
        let mut checkpoint = Checkpoint::open(&fixtures().join(name), false).unwrap();
        // A layer of attention stands for the block.
        let layer = checkpoint.names().find_map(|name| {
            let (layer, _) = name.split_once("self_attn.q_proj.weight")?;
            Some(layer.to_owned())
        });
        let layer = layer.unwrap();
        let mut tensors: BTreeMap<String, TensorEntry> =
            checkpoint.iter().map(|(name, entry)| (name.to_owned(), entry.clone())).collect();
        for (name, entry) in checkpoint.iter() {
            if let Some(part) = name.strip_prefix(&layer) {
                tensors.insert(format!("mtp.layers.0.{part}"), entry.clone());
            }
        }
        let norm = tensors[&format!("{layer}input_layernorm.weight")].clone();
        for part in ["norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"] {
            tensors.insert(format!("mtp.{part}.weight"), norm.clone());
        }
        let width = norm.shape[0];
        let fc = (0..2 * width * width).flat_map(|i| ((i as f32).sin() * 0.1).to_le_bytes());
        let data = Bytes::new(fc.collect::<Vec<u8>>());
        let fc = TensorEntry { dtype: Dtype::F32, shape: vec![width, 2 * width], data, ..norm };
        tensors.insert("mtp.fc.weight".into(), fc);
        checkpoint.replace(tensors);
        let model = Model::load(config, checkpoint.clone(), cpu()).unwrap();
        let block = Mtp::load(&model, checkpoint).unwrap().unwrap();
        let draft = Draft::Mtp(Arc::new(block));
        assert_eq!(answers(&model, Some(&draft)), answers(&model, None), "{name}");
    }
}

#[test]
fn a_block_of_another_shape_is_named_and_a_draft_that_fails_ends_no_request() {
    let path = fixtures().join(TINY);
    let model = open(TINY).model;
    let mut checkpoint = Checkpoint::open(&path, false).unwrap();
    let mut tensors: BTreeMap<String, TensorEntry> =
        checkpoint.iter().map(|(name, entry)| (name.to_owned(), entry.clone())).collect();
    let norm = tensors["mtp.norm.weight"].clone();
    tensors.insert("mtp.fc.weight".into(), norm);
    checkpoint.replace(tensors);
    let error = Mtp::load(&model, checkpoint).err().unwrap().to_string();
    assert!(error.contains("wrong shape: `mtp.fc.weight` [32], expected [32, 64]"), "{error}");

    let guess = |_: &[u32], _: usize| -> Vec<u32> { panic!("a guess that fails") };
    let draft = Draft::With(Arc::new(guess));
    assert_eq!(answers(&model, Some(&draft)), answers(&model, None));
}
