//! The block for one token more: its logits, and what it guesses.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use boostr::backend::{Cpu, Tensor};
use boostr::checkpoint::{Bytes, Checkpoint, ConfigFile, Dtype, TensorEntry};
use boostr::convert::{Converted, Options, Types, convert};
use boostr::engine::{Draft, EngineConfig, Event, Outcome, Request, Scheduler, generate};
use boostr::load::LanguageModel;
use boostr::models::{Config, Logits, Model, Mtp, Run};
use boostr::ops::{self, Format};
use boostr::sample::SamplerConfig;

use crate::common::{Folder, cpu};
use crate::tiny::save;

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

/// What the block says after each of `ids` but the last, in calls that end at `cuts`.
fn said(model: &Model<Cpu>, block: &Mtp<Cpu>, ids: &[u32], cuts: &[usize]) -> Vec<f32> {
    let mut state = model.new_state().unwrap();
    let hidden = model.hidden(&mut [Run { tokens: ids, state: &mut state }]).unwrap();
    let mut state = block.new_state(model).unwrap();
    let ends = cuts.iter().copied().chain([ids.len() - 1]);
    let mut first = 0;
    let mut all = Vec::new();
    for end in ends {
        let part = rows(&hidden, first..end);
        let next = &ids[first + 1..=end];
        let given = block.forward(model, &mut state, &part, next).unwrap();
        all.extend(ops::to_vec(&model.logits(&given).unwrap()).unwrap());
        first = end;
    }
    all
}

/// What the block of a model's file says after each of `ids` but the last.
fn said_by(lm: &LanguageModel<Cpu>, ids: &[u32]) -> Vec<f32> {
    said(&lm.model, &lm.mtp().unwrap().expect("a block"), ids, &[])
}

fn apart(a: &[f32], b: impl IntoIterator<Item = f64>) -> f64 {
    a.iter().zip(b).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
}

#[test]
fn the_block_gives_the_logits_of_the_golden_from_a_folder_and_from_gguf_however_it_is_cut() {
    let (ids, want) = golden();
    for name in [TINY, TINY_GGUF] {
        let lm = open(name);
        let block = lm.mtp().unwrap().unwrap();
        let whole = said(&lm.model, &block, &ids, &[]);
        assert_eq!(whole.len(), want.len(), "{name}");
        let far = apart(&whole, want.iter().copied());
        assert!(far <= 2e-4, "{name}: {far:e}");
        for cut in 1..ids.len() - 1 {
            assert!(said(&lm.model, &block, &ids, &[cut]) == whole, "{name}, cut at {cut}");
        }
    }
}

fn written(source: &Path, out: &Path, types: Types) -> Converted {
    let options = Options { types, ..Options::default() };
    convert(source, out, &options, &mut |_, _| ControlFlow::Continue(())).unwrap()
}

fn open_at(path: &Path) -> LanguageModel<Cpu> {
    LanguageModel::open(path, &Default::default(), cpu()).unwrap()
}

/// The output is the same with and without the block's guesses.
fn guesses_change_nothing(lm: &LanguageModel<Cpu>) {
    let draft = Draft::Mtp(Arc::new(lm.mtp().unwrap().expect("a block")));
    assert_eq!(answers(&lm.model, Some(&draft)), answers(&lm.model, None), "{}", lm.path.display());
}

#[test]
fn the_block_is_in_what_is_written_of_folders_and_of_gguf_and_gives_the_goldens_logits() {
    let (ids, want) = golden();
    let folder = Folder::new();
    for source in [TINY, TINY_GGUF] {
        // To one, from there to the other, and so on.
        let mut from = fixtures().join(source);
        for name in ["a.gguf", "b", "c", "d.gguf", "e.gguf"] {
            let out = folder.path().join(format!("{}-{name}", source.len()));
            let warnings = written(&from, &out, Types::kept()).warnings;
            assert!(!warnings.iter().any(|text| text.contains("next token")), "{warnings:?}");
            let lm = open_at(&out);
            let far = apart(&said_by(&lm, &ids), want.iter().copied());
            assert!(far <= 2e-4, "{}: {far:e}", out.display());
            guesses_change_nothing(&lm);
            from = out;
        }
    }
    let names = |path: &Path| -> Vec<String> {
        Checkpoint::open(path, false).unwrap().names().map(str::to_owned).collect()
    };
    let theirs = fixtures().join(TINY_GGUF);
    let ours = folder.path().join(format!("{}-a.gguf", TINY.len()));
    assert_eq!(names(&ours), names(&theirs));
    let [ours, theirs] = [&ours, &theirs].map(|path| Checkpoint::open(path, false).unwrap());
    for key in ["block_count", "nextn_predict_layers", "attention.recurrent_layers"] {
        let of = |file: &Checkpoint| {
            file.gguf().unwrap().get(&format!("qwen35.{key}")).map(|value| format!("{value:?}"))
        };
        assert!(of(&ours).is_some() && of(&ours) == of(&theirs), "{key}");
    }
    let back = folder.path().join(format!("{}-b", TINY.len()));
    assert!(names(&back).iter().any(|name| name == "mtp.layers.0.self_attn.q_proj.weight"));
    let config = std::fs::read_to_string(back.join("config.json")).unwrap();
    assert!(config.contains("\"mtp_num_hidden_layers\": 1"), "{config}");
}

#[test]
fn a_quantized_file_has_the_block_in_its_types_and_guesses_are_exact() {
    let (ids, want) = golden();
    let whole = open(TINY);
    let folder = Folder::new();
    let trunk = |lm: &LanguageModel<Cpu>| {
        let mut state = lm.model.new_state().unwrap();
        let mut run = [Run { tokens: &ids, state: &mut state }];
        ops::to_vec(&lm.model.forward(&mut run, Logits::All).unwrap()).unwrap()
    };
    let of_trunk = trunk(&whole);
    for (source, kind) in [(TINY, "f16"), (TINY, "q8_0"), (TINY, "q4_k_m"), (TINY_GGUF, "q8_0")] {
        let out = folder.path().join(format!("{}-{kind}.gguf", source.len()));
        written(&fixtures().join(source), &out, Types::named(kind).unwrap());
        let file = Checkpoint::open(&out, false).unwrap();
        for name in ["nextn.eh_proj", "attn_q", "attn_output", "ffn_down"] {
            let [own, others] =
                ["blk.4", "blk.3"].map(|block| file.get(&format!("{block}.{name}.weight")));
            let own = own.unwrap().dtype;
            // Rows of 32 are no blocks of 256.
            let narrow = [Format::Q8_0, Format::Q5_0, Format::Q5_1].map(Dtype::Block);
            assert!(own == Dtype::F16 || narrow.contains(&own), "{kind}: {name} in {}", own.name());
            assert!(others.is_none_or(|other| other.dtype == own), "{kind}: {name}");
        }
        let lm = open_at(&out);
        guesses_change_nothing(&lm);
        // The tiny model blows a change of weights up; the block does so no more than the layers.
        let lost = apart(&said_by(&lm, &ids), want.iter().copied());
        let of_layers = apart(&trunk(&lm), of_trunk.iter().copied().map(f64::from));
        assert!(lost < 2.0 * of_layers && lost > 2e-4, "{kind}: {lost}, the layers {of_layers}");
        assert!(kind != "f16" || lost < 0.1, "{lost}");
        // What is decoded into a folder has the block too.
        let back = folder.path().join(format!("{}-{kind}", source.len()));
        written(&out, &back, Types::named("f32").unwrap());
        guesses_change_nothing(&open_at(&back));
    }
}

#[test]
fn a_block_with_experts_is_written_and_says_the_same_there_and_back() {
    let (ids, _) = golden();
    for name in ["models/qwen3_5-moe-tiny", "models/qwen3next-tiny"] {
        let folder = Folder::new();
        let source = folder.path().join("source");
        std::fs::create_dir(&source).unwrap();
        save(&source.join("model.safetensors"), &with_block_of_experts(name));
        for file in ["config.json", "tokenizer.json"] {
            std::fs::copy(fixtures().join(name).join(file), source.join(file)).unwrap();
        }
        let want = said_by(&open_at(&source), &ids);
        let mut from = source;
        for out in ["a.gguf", "b", "c.gguf"] {
            let out = folder.path().join(out);
            written(&from, &out, Types::kept());
            let lm = open_at(&out);
            let far = apart(&said_by(&lm, &ids), want.iter().copied().map(f64::from));
            assert!(far < 1e-4, "{}: {far}", out.display());
            from = out;
        }
        guesses_change_nothing(&open_at(&from));
        let quantized = folder.path().join("q8_0.gguf");
        written(&from, &quantized, Types::named("q8_0").unwrap());
        guesses_change_nothing(&open_at(&quantized));
    }
}

#[test]
fn a_block_that_cannot_be_read_is_left_out_of_what_is_written_and_a_line_says_why() {
    let folder = Folder::new();
    let source = folder.path().join("source");
    std::fs::create_dir(&source).unwrap();
    for file in ["config.json", "tokenizer.json"] {
        std::fs::copy(fixtures().join(TINY).join(file), source.join(file)).unwrap();
    }
    let whole = Checkpoint::open(&fixtures().join(TINY), false).unwrap();
    let norm = whole.get("mtp.norm.weight").unwrap();
    let cases = [
        ("mtp.fc.weight", "wrong shape: `mtp.fc.weight`"),
        ("mtp.embed_tokens.weight", "embedding of its own"),
        ("mtp.layers.1.input_layernorm.weight", "layers.1.input_layernorm.weight"),
    ];
    for (i, (name, reason)) in cases.into_iter().enumerate() {
        let mut tensors: BTreeMap<String, TensorEntry> =
            whole.iter().map(|(name, entry)| (name.to_owned(), entry.clone())).collect();
        tensors.insert(name.to_owned(), norm.clone());
        save(&source.join("model.safetensors"), &Checkpoint::from_entries("edited", tensors));
        for out in [format!("{i}.gguf"), format!("{i}")] {
            let out = folder.path().join(out);
            let warnings = written(&source, &out, Types::kept()).warnings;
            let of_block: Vec<_> =
                warnings.iter().filter(|text| text.contains("more than the next token")).collect();
            let [line] = of_block[..] else { panic!("{warnings:?}") };
            assert!(line.contains("are left out: ") && line.contains(reason), "{line}");
            assert!(!line.contains('\n'), "{line}");
            let lm = open_at(&out);
            assert!(lm.mtp().unwrap().is_none());
        }
    }
    let pictures = |warnings: &[String]| {
        warnings.iter().any(|text| text.contains("tensors of the vision tower are left out"))
    };
    assert!(pictures(&written(&source, &folder.path().join("p"), Types::kept()).warnings));
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

/// The weights of a fixture, in which a layer of attention stands for the block too.
fn with_block_of_experts(name: &str) -> Checkpoint {
    let mut checkpoint = Checkpoint::open(&fixtures().join(name), false).unwrap();
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
    checkpoint
}

#[test]
fn a_block_with_experts_is_taken_from_either_family_and_changes_no_output() {
    for name in ["models/qwen3_5-moe-tiny", "models/qwen3next-tiny"] {
        let checkpoint = with_block_of_experts(name);
        let model = Model::load(config(name), checkpoint.clone(), cpu()).unwrap();
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

#[test]
fn a_tensor_that_the_block_lacks_is_named_as_the_file_names_it() {
    for (name, start) in [(TINY, "mtp."), (TINY_GGUF, "blk.4.")] {
        let model = open(name).model;
        let whole = Checkpoint::open(&fixtures().join(name), false).unwrap();
        let of_block: Vec<String> =
            whole.names().filter(|name| name.starts_with(start)).map(str::to_owned).collect();
        assert!(of_block.len() > 10, "{name}");
        for lacking in of_block {
            let mut checkpoint = whole.clone();
            checkpoint.retain(|name| name != lacking);
            let found = Mtp::load(&model, checkpoint);
            let error = found.err().unwrap().to_string();
            assert!(error.contains(&format!("lacks `{lacking}`")), "{error}");
        }
    }
}

#[test]
fn what_is_wrong_with_a_tensor_of_the_block_is_told_by_its_name_in_the_file() {
    let changed = |name: &str, of: &str, entry: &dyn Fn(&TensorEntry) -> TensorEntry| {
        let model = open(name).model;
        let mut checkpoint = Checkpoint::open(&fixtures().join(name), false).unwrap();
        let mut tensors: BTreeMap<String, TensorEntry> =
            checkpoint.iter().map(|(name, entry)| (name.to_owned(), entry.clone())).collect();
        let new = entry(&tensors[of]);
        tensors.insert(of.to_owned(), new);
        checkpoint.replace(tensors);
        let told = boostr::models::next_block(model.config(), &checkpoint);
        let error = Mtp::load(&model, checkpoint).err().unwrap().to_string();
        assert_eq!(told.map_err(|error| error.to_string()), Err(error.clone()), "{of}");
        assert!(error.contains(&format!("`{of}`")), "{of}: {error}");
        error
    };
    let shorter = |entry: &TensorEntry| {
        let data = entry.data.slice(0..entry.data.len() / entry.shape[0]).unwrap();
        let shape = [&[1], &entry.shape[1..]].concat();
        TensorEntry { shape, data, ..entry.clone() }
    };
    for (name, of) in [
        (TINY, "mtp.norm.weight"),
        (TINY, "mtp.layers.0.mlp.gate_proj.weight"),
        (TINY_GGUF, "blk.4.attn_norm.weight"),
        (TINY_GGUF, "blk.4.nextn.shared_head_norm.weight"),
    ] {
        assert!(changed(name, of, &shorter).contains("wrong shape"), "{of}");
    }
    let whole = |entry: &TensorEntry| TensorEntry { dtype: Dtype::I32, ..entry.clone() };
    for (name, of) in [(TINY, "mtp.fc.weight"), (TINY_GGUF, "blk.4.nextn.eh_proj.weight")] {
        assert!(changed(name, of, &whole).contains("is I32, expected floats"), "{of}");
    }
}

#[test]
fn a_head_of_the_blocks_own_is_refused() {
    let model = open(TINY).model;
    let mut checkpoint = Checkpoint::open(&fixtures().join(TINY), false).unwrap();
    let mut tensors: BTreeMap<String, TensorEntry> =
        checkpoint.iter().map(|(name, entry)| (name.to_owned(), entry.clone())).collect();
    let head = tensors["model.language_model.embed_tokens.weight"].clone();
    tensors.insert("mtp.lm_head.weight".into(), head);
    checkpoint.replace(tensors);
    let error = Mtp::load(&model, checkpoint).err().unwrap().to_string();
    assert!(error.contains("a head of its own, `mtp.lm_head.weight`"), "{error}");
}

#[test]
fn layers_that_a_gguf_file_counts_to_the_block_but_are_the_models_are_an_error() {
    let folder = Folder::new();
    let bytes = std::fs::read(fixtures().join(TINY_GGUF)).unwrap();
    let key = b"qwen35.nextn_predict_layers";
    let at = bytes.windows(key.len()).position(|part| part == key).unwrap() + key.len() + 4;
    assert_eq!(bytes[at], 1);
    for (count, block) in [(2_u8, 3), (4, 1)] {
        let mut bytes = bytes.clone();
        bytes[at] = count;
        let path = folder.path().join("more.gguf");
        std::fs::write(&path, bytes).unwrap();
        let found = LanguageModel::<Cpu>::open(&path, &Default::default(), cpu());
        let error = crate::tiny::message(&found.err().unwrap());
        assert!(error.contains("qwen35.nextn_predict_layers"), "{error}");
        assert!(error.contains(&format!("block {block} has no tensor")), "{error}");
    }
}

#[test]
fn a_list_is_no_count_of_layers_after_the_models() {
    let file = Checkpoint::open(&fixtures().join(TINY_GGUF), false).unwrap();
    let mut metadata = file.gguf().unwrap().clone();
    metadata.set("qwen35.nextn_predict_layers", [1u32; 5]);
    let error = crate::tiny::message(&Config::read_gguf(&file, &metadata).err().unwrap());
    assert!(error.contains("`qwen35.nextn_predict_layers`: expected"), "{error}");
}

#[test]
fn a_second_block_is_refused_in_a_folder_and_in_gguf() {
    for (name, of, to) in
        [(TINY, "mtp.layers.0.", "mtp.layers.1."), (TINY_GGUF, "blk.4.", "blk.5.")]
    {
        let model = open(name).model;
        let mut checkpoint = Checkpoint::open(&fixtures().join(name), false).unwrap();
        let mut tensors: BTreeMap<String, TensorEntry> =
            checkpoint.iter().map(|(name, entry)| (name.to_owned(), entry.clone())).collect();
        for (name, entry) in tensors.clone() {
            if let Some(part) = name.strip_prefix(of) {
                tensors.insert(format!("{to}{part}"), entry);
            }
        }
        checkpoint.replace(tensors);
        let error = Mtp::load(&model, checkpoint).err().unwrap().to_string();
        assert!(error.contains("second block") || error.contains("layers.1."), "{error}");
    }
}
