//! The disk tier of the prefix cache: what leaves memory comes back to the bit, and files are never trusted.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};

use crate::common::{Folder, Random, cpu};
use crate::sealed::Sealed;
use crate::tiny::{fixture, tokens};
use boostr::backend::Cpu;
use boostr::engine::{
    Engine, EngineConfig, Event, Outcome, Request, STEP_PIECE, SpillFolder, Timings,
};
use boostr::load::{LanguageModel, OpenOptions};
use boostr::models::{Model, State};
use boostr::ops::{KvType, to_vec};
use boostr::threads::Threads;

/// No limit that a test reaches.
const ROOMY: u64 = 1 << 30;

fn model(name: &str) -> Arc<Model<Cpu>> {
    LanguageModel::<Cpu>::open(&fixture(name), &OpenOptions::default(), cpu()).unwrap().model
}

/// Keeps no states but those at ends.
fn config(snapshot_bytes: usize) -> EngineConfig {
    let threads = Some(Threads::new(1).unwrap());
    EngineConfig { snapshot_bytes, snapshot_every: 0, threads, ..EngineConfig::default() }
}

/// What is done to a file.
type Fault<'a> = Box<dyn Fn(&Path) + 'a>;

/// Lines of a log.
type Lines = Arc<Mutex<Vec<String>>>;

fn start(
    model: &Arc<Model<Cpu>>,
    config: EngineConfig,
    folder: &Path,
    limit: u64,
) -> (Engine<Cpu>, Lines) {
    let lines = Lines::default();
    let log = lines.clone();
    let spill = SpillFolder::open(folder, limit).unwrap().expect("nobody else has it");
    let spill = spill.log(move |line| log.lock().unwrap().push(line.to_owned()));
    (Engine::start_with_disk(model.clone(), config, spill).unwrap(), lines)
}

/// Leaves in a folder what an engine had of some prompts when it ended.
fn spilled(model: &Arc<Model<Cpu>>, folder: &Path, prompts: &[&[u32]]) {
    let (engine, _) = start(model, config(1 << 28), folder, ROOMY);
    for prompt in prompts {
        ask(&engine, model, prompt, 0);
    }
    engine.stop();
}

/// An engine without a disk, and without memory of anything.
fn forgetful(model: &Arc<Model<Cpu>>) -> Engine<Cpu> {
    Engine::start(model.clone(), config(0)).unwrap()
}

/// A model whose states of one prompt are in a folder, a prompt that goes on from there, and what it gives.
fn spilled_and_longer(folder: &Path) -> (Arc<Model<Cpu>>, Vec<u32>, Got) {
    let model = model("bamba-tiny");
    let ids = tokens(5, 300, model.vocab_limit());
    spilled(&model, folder, &[&ids]);
    let longer = [&ids[..], &[1, 2]].concat();
    let want = ask(&forgetful(&model), &model, &longer, 0);
    (model, longer, want)
}

/// What a request gives: tokens, their log probabilities, the state after it, and where time went.
#[derive(Debug)]
struct Got {
    ids: Vec<u32>,
    logprobs: Vec<f32>,
    state: State<Cpu>,
    timings: Timings,
}

impl Got {
    #[track_caller]
    fn is(&self, other: &Self) {
        assert_eq!((&self.ids, &self.logprobs), (&other.ids, &other.logprobs));
        assert_eq!(self.state.position(), other.state.position());
        assert!(everything(&self.state) == everything(&other.state), "states differ");
    }
}

/// The bits of all that a state holds.
fn everything(state: &State<Cpu>) -> Vec<u32> {
    let caches = (0..state.n_layer()).filter_map(|layer| state.kv(layer));
    let kv = caches.flat_map(|cache| [cache.keys().unwrap(), cache.values().unwrap()].concat());
    let tensors = (0..state.n_layer()).flat_map(|layer| [state.conv(layer), state.ssm(layer)]);
    let fixed = tensors.flatten().flat_map(|x| to_vec(x).unwrap());
    fixed.chain(kv).map(f32::to_bits).collect()
}

fn ask(engine: &Engine<Cpu>, model: &Model<Cpu>, prompt: &[u32], scope: u64) -> Got {
    let (sender, events) = mpsc::channel();
    let listener = move |event: Event<Cpu>| {
        let _ = sender.send(event);
        ControlFlow::Continue(())
    };
    let request = Request {
        max_tokens: 3,
        logprobs: Some(0),
        scope: Some(scope),
        ..Request::new(prompt.to_vec(), model.vocab_limit())
    };
    engine.submit(request, Box::new(listener)).unwrap();
    let mut logprobs = Vec::new();
    for event in events {
        match event {
            Event::Token { logprob, .. } => logprobs.push(logprob),
            Event::Finished { outcome, .. } => {
                let Outcome { ids, state, timings, .. } = outcome;
                return Got { ids, logprobs, state: state.unwrap(), timings };
            }
            Event::Failed { error } => panic!("{error}"),
            Event::Prompt { .. } => {}
        }
    }
    panic!("the request ended without an end");
}

fn size(folder: &Path) -> u64 {
    // A file may go while they are counted.
    fs::read_dir(folder).unwrap().filter_map(|file| Some(file.ok()?.metadata().ok()?.len())).sum()
}

/// Files of states, or of segments, by name.
fn files(folder: &Path, kind: &str) -> Vec<PathBuf> {
    let names = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    let is_one = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with(kind);
    let mut names: Vec<_> = names.filter(is_one).collect();
    names.sort();
    names
}

#[test]
fn states_of_every_family_come_back_after_a_restart_to_the_bit() {
    for (name, len) in [
        ("bamba-tiny", 600),
        ("falcon-h1-tiny", 150),
        ("granitehybrid-moe-tiny", 150),
        ("llama-tiny", 600),
        ("mamba2-tiny", 300),
        ("nemotron-h-tiny", 150),
        ("zamba2-tiny", 300),
    ] {
        let model = model(name);
        let folder = Folder::new();
        let ids = tokens(5, len, model.vocab_limit());
        let (engine, _) = start(&model, config(1 << 28), folder.path(), ROOMY);
        let first = ask(&engine, &model, &ids, 0);
        engine.stop();
        drop(engine);
        let longer = [&ids[..], &first.ids, &[3, 1, 4]].concat();
        let (engine, lines) = start(&model, config(1 << 28), folder.path(), ROOMY);
        assert!(engine.stats().file_reads == 0);
        let got = ask(&engine, &model, &longer, 0);
        assert!(got.timings.is_from_disk, "{name}: {:?}", lines.lock().unwrap());
        assert!(got.timings.cached >= len, "{name}: {:?}", got.timings);
        assert_eq!(got.timings.shared, got.timings.cached, "{name}");
        got.is(&ask(&forgetful(&model), &model, &longer, 0));
        // Another time it is in memory.
        let again = ask(&engine, &model, &longer, 0);
        assert!(!again.timings.is_from_disk);
        again.is(&got);
        assert_eq!(engine.stats().file_reads, 1, "{name}");
        // Others see nothing of it.
        assert_eq!(ask(&engine, &model, &longer, 1).timings.cached, 0, "{name}");
        assert_eq!(*lines.lock().unwrap(), [""; 0], "{name}");
    }
}

#[test]
fn a_history_of_keys_and_values_is_cut_back_from_disk_anywhere() {
    let model = model("llama-tiny");
    let folder = Folder::new();
    let ids = tokens(5, 700, model.vocab_limit());
    spilled(&model, folder.path(), &[&ids]);
    for len in [40, 255, 256, 257, 512, 640, 699] {
        let (engine, _) = start(&model, config(1 << 28), folder.path(), ROOMY);
        let other = [&ids[..len], &[1, 2, 3]].concat();
        let got = ask(&engine, &model, &other, 0);
        let shared = ids.iter().zip(&other).take_while(|(a, b)| a == b).count();
        assert_eq!(got.timings.cached, shared, "{len}");
        got.is(&ask(&forgetful(&model), &model, &other, 0));
        engine.stop();
    }
}

#[test]
fn conversations_that_do_not_fit_in_memory_are_read_back_each_in_its_turn() {
    for name in ["mamba2-tiny", "bamba-tiny", "llama-tiny"] {
        let model = model(name);
        let folder = Folder::new();
        let (engine, lines) = start(&model, config(1 << 28), folder.path(), ROOMY);
        let one = ask(&engine, &model, &tokens(1, 70, model.vocab_limit()), 9);
        let memory = 2 * one.state.size_in_bytes() + (16 << 10);
        engine.stop();
        let (engine, lines_after) = start(&model, config(memory), folder.path(), ROOMY);
        let clean = forgetful(&model);
        let mut chats: Vec<Vec<u32>> =
            (0..6).map(|i| tokens(20 + i, 70, model.vocab_limit())).collect();
        for turn in 0..4 {
            for (i, chat) in chats.iter_mut().enumerate() {
                let got = ask(&engine, &model, chat, 0);
                got.is(&ask(&clean, &model, chat, 0));
                if turn > 0 {
                    let new = chat.len() - got.timings.cached;
                    assert!(new <= 42, "{name}: turn {turn} of {i} computed {new}");
                }
                chat.extend(&got.ids);
                chat.extend(tokens(100 + turn, 39, model.vocab_limit()));
            }
        }
        let stats = engine.stats();
        assert!(stats.file_reads >= 12 && stats.snapshot_bytes <= memory, "{name}: {stats:?}");
        assert_eq!((lines.lock().unwrap().len(), lines_after.lock().unwrap().len()), (0, 0));
    }
}

#[test]
fn random_histories_under_small_limits_are_right_and_the_folder_stays_under_its() {
    for (name, disk) in [("mamba2-tiny", 6), ("bamba-tiny", 8), ("llama-tiny", 4)] {
        let model = model(name);
        let folder = Folder::new();
        let state = ask(&forgetful(&model), &model, &tokens(1, 300, model.vocab_limit()), 0).state;
        let one = state.size_in_bytes();
        let limit = (disk * (one + 20_000)) as u64;
        let memory = 2 * one + (20 << 10);
        let mut random = Random(7);
        let clean = forgetful(&model);
        let mut asked: Vec<Vec<u32>> = vec![tokens(3, 280, model.vocab_limit())];
        let mut reads = 0;
        for _ in 0..4 {
            let (engine, lines) = start(&model, config(memory), folder.path(), limit);
            for _ in 0..12 {
                let from = asked[random.below(asked.len())].clone();
                let cut = random.below(from.len()) + 1;
                let more = tokens(random.next(), 1 + random.below(50), model.vocab_limit());
                let ids = [&from[..cut], &more].concat();
                ask(&engine, &model, &ids, 0).is(&ask(&clean, &model, &ids, 0));
                asked.push(ids);
                assert!(size(folder.path()) <= limit, "{name}: {} of {limit}", size(folder.path()));
            }
            reads += engine.stats().file_reads;
            engine.stop();
            assert_eq!(*lines.lock().unwrap(), [""; 0], "{name}");
            assert!(size(folder.path()) <= limit, "{name}");
        }
        assert!(reads > 3, "{name}: {reads}");
    }
}

#[test]
fn pages_of_a_common_beginning_are_written_once() {
    for name in ["llama-tiny", "bamba-tiny"] {
        let model = model(name);
        let folder = Folder::new();
        let (engine, _) = start(&model, config(1 << 28), folder.path(), ROOMY);
        let text = tokens(5, 512, model.vocab_limit());
        for i in 0..5 {
            let ids = [&text[..], &tokens(50 + i, 20, model.vocab_limit())].concat();
            ask(&engine, &model, &ids, 0);
        }
        engine.stop();
        assert_eq!(files(folder.path(), "rows-").len(), 2, "{name}");
        assert!(files(folder.path(), "state-").len() >= 5, "{name}");
        // What none needs any more is removed with the last that did.
        let small = size(folder.path()) / 100;
        let (engine, _) = start(&model, config(1 << 28), folder.path(), small);
        engine.stop();
        assert!(files(folder.path(), "rows-").is_empty(), "{name}");
        assert!(size(folder.path()) <= small, "{name}");
    }
}

#[test]
fn files_that_are_torn_foreign_swapped_or_forged_are_no_use_and_do_no_harm() {
    let model = model("bamba-tiny");
    let vocab = model.vocab_limit();
    let (a, b) = (tokens(5, 300, vocab), tokens(6, 300, vocab));
    let clean = forgetful(&model);
    let [a_more, b_more] = [&a, &b].map(|ids| [&ids[..], &[1, 2]].concat());
    let want = [ask(&clean, &model, &a_more, 0), ask(&clean, &model, &b_more, 0)];
    let seal = |path: &Path, change: &dyn Fn(&mut Sealed)| {
        let mut sealed = Sealed::read(&fs::read(path).unwrap());
        change(&mut sealed);
        sealed.seal();
        fs::write(path, sealed.bytes()).unwrap();
    };
    let nan = |sealed: &mut Sealed| {
        let mut tensors = sealed.tensors.iter_mut().filter(|(name, _)| name.starts_with("layers"));
        let (_, (_, _, data)) = tensors.next().unwrap();
        data[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    };
    let other_ids = |sealed: &mut Sealed| sealed.tensors.get_mut("ids").unwrap().2[0] ^= 1;
    let typed_ids = |sealed: &mut Sealed| sealed.tensors.get_mut("ids").unwrap().0 = "I32".into();
    let many_ids = |sealed: &mut Sealed| {
        let count = 5 << 20;
        let ids = ("U32".into(), vec![count], vec![0; 4 * count]);
        sealed.tensors.insert("ids".into(), ids);
    };
    let other_model = |sealed: &mut Sealed| {
        sealed.metadata.insert("fingerprint".into(), "0123456789abcdef".into()).unwrap();
    };
    let other_kind = |sealed: &mut Sealed| {
        sealed.metadata.insert("kv_type".into(), "q8_0".into()).unwrap();
    };
    let faults: Vec<(&str, Fault<'_>)> = vec![
        (
            "torn",
            Box::new(|path| {
                let bytes = fs::read(path).unwrap();
                fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
            }),
        ),
        ("empty", Box::new(|path| fs::write(path, b"").unwrap())),
        (
            "longer",
            Box::new(|path| {
                let bytes = fs::read(path).unwrap();
                fs::write(path, [&bytes[..], b"more"].concat()).unwrap();
            }),
        ),
        (
            "a bit",
            Box::new(|path| {
                let mut bytes = fs::read(path).unwrap();
                let last = bytes.len() - 9;
                bytes[last] ^= 4;
                fs::write(path, bytes).unwrap();
            }),
        ),
        ("a long header", Box::new(|path| fs::write(path, u64::MAX.to_le_bytes()).unwrap())),
        ("NaN", Box::new(|path| seal(path, &nan))),
        ("other ids", Box::new(|path| seal(path, &other_ids))),
        ("ids of another type", Box::new(|path| seal(path, &typed_ids))),
        (
            "too many ids",
            Box::new(|path| {
                let mut sealed = Sealed::read(&fs::read(path).unwrap());
                many_ids(&mut sealed);
                fs::write(path, sealed.bytes()).unwrap();
            }),
        ),
        ("another model", Box::new(|path| seal(path, &other_model))),
        ("another cache", Box::new(|path| seal(path, &other_kind))),
        (
            "no tensors",
            Box::new(|path| seal(path, &|sealed| sealed.tensors.retain(|name, _| name == "ids"))),
        ),
        ("missing", Box::new(|path| fs::remove_file(path).unwrap())),
        (
            "a link",
            Box::new(|path| {
                let elsewhere = path.with_file_name("elsewhere");
                fs::rename(path, &elsewhere).unwrap();
                #[cfg(unix)]
                std::os::unix::fs::symlink(&elsewhere, path).unwrap();
            }),
        ),
        (
            "a folder",
            Box::new(|path| {
                fs::remove_file(path).unwrap();
                fs::create_dir(path).unwrap();
            }),
        ),
    ];
    for kind in ["state-", "rows-"] {
        for (fault, change) in &faults {
            let folder = Folder::new();
            folder.write("notes.txt", "of the user");
            let (engine, _) = start(&model, config(1 << 28), folder.path(), ROOMY);
            ask(&engine, &model, &a, 0);
            engine.stop();
            for path in files(folder.path(), kind) {
                change(&path);
            }
            let (engine, lines) = start(&model, config(1 << 28), folder.path(), ROOMY);
            let got = ask(&engine, &model, &a_more, 0);
            got.is(&want[0]);
            // The state near the end of the prompt needs no segment.
            let cached = if kind == "rows-" { 300 - STEP_PIECE } else { 0 };
            assert_eq!(got.timings.cached, cached, "{kind} {fault}");
            engine.stop();
            let said = lines.lock().unwrap().clone();
            let is_silent = kind == "state-" && ["missing", "a link", "a folder"].contains(fault);
            assert_eq!(said.is_empty(), is_silent, "{kind} {fault}: {said:?}");
            assert_eq!(fs::read(folder.path().join("notes.txt")).unwrap(), b"of the user");
        }
    }
    // Two files whose names were exchanged.
    for kind in ["state-", "rows-"] {
        let folder = Folder::new();
        let (engine, _) = start(&model, config(1 << 28), folder.path(), ROOMY);
        ask(&engine, &model, &a, 0);
        ask(&engine, &model, &b, 0);
        engine.stop();
        let paths = files(folder.path(), kind);
        let bytes: Vec<_> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
        for (path, bytes) in paths.iter().zip(bytes.iter().cycle().skip(1)) {
            fs::write(path, bytes).unwrap();
        }
        let (engine, lines) = start(&model, config(1 << 28), folder.path(), ROOMY);
        ask(&engine, &model, &a_more, 0).is(&want[0]);
        ask(&engine, &model, &b_more, 0).is(&want[1]);
        engine.stop();
        assert!(!lines.lock().unwrap().is_empty(), "{kind}");
    }
}

#[test]
fn states_of_another_scope_type_or_instruction_set_are_not_taken() {
    let lm = |kind| {
        let options = OpenOptions { kv_type: Some(kind), ..OpenOptions::default() };
        LanguageModel::<Cpu>::open(&fixture("bamba-tiny"), &options, cpu()).unwrap().model
    };
    let (model, other) = (lm(KvType::F32), lm(KvType::F16));
    let folder = Folder::new();
    let ids = tokens(5, 300, model.vocab_limit());
    let (engine, _) = start(&model, config(1 << 28), folder.path(), ROOMY);
    ask(&engine, &model, &ids, 7);
    engine.stop();
    let longer = [&ids[..], &[1, 2]].concat();
    let (engine, lines) = start(&model, config(1 << 28), folder.path(), ROOMY);
    assert_eq!(ask(&engine, &model, &longer, 8).timings.cached, 0);
    engine.stop();
    let (engine, lines_other) = start(&other, config(1 << 28), folder.path(), ROOMY);
    assert_eq!(ask(&engine, &other, &longer, 7).timings.cached, 0);
    engine.stop();
    let spill = SpillFolder::open(folder.path(), ROOMY).unwrap().unwrap().numerics("another");
    let engine = Engine::start_with_disk(model.clone(), config(1 << 28), spill).unwrap();
    assert_eq!(ask(&engine, &model, &longer, 7).timings.cached, 0);
    engine.stop();
    // They are there still for whom they are.
    let (engine, _) = start(&model, config(1 << 28), folder.path(), ROOMY);
    assert!(ask(&engine, &model, &longer, 7).timings.is_from_disk);
    assert_eq!((lines.lock().unwrap().len(), lines_other.lock().unwrap().len()), (0, 0));
}

#[test]
fn files_of_other_models_go_first_where_there_is_no_room() {
    let (model, other) = (model("mamba2-tiny"), model("bamba-tiny"));
    let folder = Folder::new();
    let (engine, _) = start(&other, config(1 << 28), folder.path(), ROOMY);
    ask(&engine, &other, &tokens(5, 300, other.vocab_limit()), 0);
    engine.stop();
    let before = files(folder.path(), "");
    let limit = size(folder.path());
    let ids = tokens(6, 100, model.vocab_limit());
    let (engine, _) = start(&model, config(1 << 28), folder.path(), limit);
    ask(&engine, &model, &ids, 0);
    engine.stop();
    assert!(size(folder.path()) <= limit);
    assert!(before.iter().any(|path| !path.exists()));
    let (engine, _) = start(&model, config(1 << 28), folder.path(), limit);
    assert!(ask(&engine, &model, &[&ids[..], &[1, 2]].concat(), 0).timings.is_from_disk);
}

#[test]
fn two_engines_do_not_have_one_folder_and_it_is_its_owners_alone() {
    let model = model("mamba2-tiny");
    let folder = Folder::new();
    let (engine, _) = start(&model, config(1 << 28), folder.path(), ROOMY);
    assert!(SpillFolder::open(folder.path(), ROOMY).unwrap().is_none());
    ask(&engine, &model, &tokens(5, 100, model.vocab_limit()), 0);
    engine.stop();
    drop(engine);
    assert!(SpillFolder::open(folder.path(), ROOMY).unwrap().is_some());
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(folder.path()), 0o700);
        assert!(files(folder.path(), "state-").iter().all(|path| mode(path) == 0o600));
        // A link in place of the lock is not followed.
        let lock = folder.path().join(".lock");
        fs::remove_file(&lock).unwrap();
        let target = folder.write("target", "mine");
        std::os::unix::fs::symlink(&target, &lock).unwrap();
        assert!(SpillFolder::open(folder.path(), ROOMY).is_err());
        assert_eq!(fs::read(&target).unwrap(), b"mine");
        fs::remove_file(&lock).unwrap();
        // One with files of others keeps its mode, and says so; else it is closed.
        let open =
            || fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        open();
        let exposed = |spill: &SpillFolder| spill.exposed().map(str::to_owned);
        let why = exposed(&SpillFolder::open(folder.path(), ROOMY).unwrap().unwrap()).unwrap();
        assert!(why.contains("target") && why.contains("0755"), "{why}");
        assert_eq!(mode(folder.path()), 0o755);
        fs::remove_file(&target).unwrap();
        let spill = SpillFolder::open(folder.path(), ROOMY).unwrap().unwrap();
        assert_eq!((exposed(&spill), mode(folder.path())), (None, 0o700));
    }
}

#[test]
fn states_of_weights_that_were_replaced_are_not_taken() {
    let (folder, states) = (Folder::new(), Folder::new());
    for file in fs::read_dir(fixture("mamba2-tiny")).unwrap().map(|file| file.unwrap().path()) {
        fs::copy(&file, folder.path().join(file.file_name().unwrap())).unwrap();
    }
    let open = || {
        let options = OpenOptions::default();
        LanguageModel::<Cpu>::open(folder.path(), &options, cpu()).unwrap().model
    };
    let model = open();
    let ids = tokens(5, 100, model.vocab_limit());
    let longer = [&ids[..], &[1, 2]].concat();
    let (engine, _) = start(&model, config(1 << 28), states.path(), ROOMY);
    ask(&engine, &model, &ids, 0);
    engine.stop();
    let fingerprint = model.fingerprint().unwrap().to_owned();
    drop((engine, model));
    let weights = folder.path().join("model.safetensors");
    let time = fs::metadata(&weights).unwrap().modified().unwrap();
    let late = time + std::time::Duration::from_micros(1);
    for (time, cached) in [(time, 100), (late, 0), (time, 100)] {
        fs::File::options().write(true).open(&weights).unwrap().set_modified(time).unwrap();
        let model = open();
        // The fingerprint looks at parts of each tensor alone.
        assert_eq!(model.fingerprint(), Some(&*fingerprint));
        let (engine, _) = start(&model, config(1 << 28), states.path(), ROOMY);
        assert_eq!(ask(&engine, &model, &longer, 0).timings.cached, cached);
        engine.stop();
    }
}

#[test]
fn a_state_over_the_limit_of_memory_is_read_and_the_last_one_of_them_stays() {
    let folder = Folder::new();
    let (model, longer, want) = spilled_and_longer(folder.path());
    let sizes = files(folder.path(), "state-");
    let small = sizes.iter().map(|path| fs::metadata(path).unwrap().len()).min().unwrap();
    for limit in [small as usize / 2, 1 << 28] {
        let (engine, lines) = start(&model, config(limit), folder.path(), ROOMY);
        let got = ask(&engine, &model, &longer, 0);
        got.is(&want);
        assert!(got.timings.is_from_disk);
        let stats = engine.stats();
        assert!(stats.snapshot_bytes <= limit || stats.snapshots == 1);
        engine.stop();
        assert!(lines.lock().unwrap().is_empty());
    }
}

#[test]
fn with_a_segment_that_is_no_use_all_states_go_that_need_it() {
    let model = model("bamba-tiny");
    let vocab = model.vocab_limit();
    let common = tokens(5, 260, vocab);
    let ways = [6, 7].map(|seed| [&common[..], &tokens(seed, 40, vocab)].concat());
    let folder = Folder::new();
    spilled(&model, folder.path(), &[&ways[0], &ways[1]]);
    let rows = files(folder.path(), "rows-");
    assert_eq!(rows.len(), 1);
    let mut bytes = fs::read(&rows[0]).unwrap();
    let last = bytes.len() - 9;
    bytes[last] ^= 4;
    fs::write(&rows[0], bytes).unwrap();
    let (clean, longer) = (forgetful(&model), ways.map(|ids| [&ids[..], &[1, 2]].concat()));
    for (turn, lines) in [1, 0].into_iter().enumerate() {
        let (engine, said) = start(&model, config(1 << 28), folder.path(), ROOMY);
        for ids in &longer {
            let got = ask(&engine, &model, ids, 0);
            got.is(&ask(&clean, &model, ids, 0));
            assert!(turn == 0 || got.timings.is_from_disk);
        }
        engine.stop();
        assert_eq!(said.lock().unwrap().len(), lines, "{:?}", said.lock().unwrap());
    }
}

#[test]
fn a_request_that_is_cancelled_while_its_state_is_read_ends_and_others_go_on() {
    let folder = Folder::new();
    let (model, longer, want) = spilled_and_longer(folder.path());
    for _ in 0..10 {
        let (engine, _) = start(&model, config(1 << 28), folder.path(), ROOMY);
        let request =
            || Request { max_tokens: 3, ..Request::new(longer.clone(), model.vocab_limit()) };
        let (sender, ends) = mpsc::channel();
        let listener = move |event: Event<Cpu>| {
            if let Event::Finished { outcome, .. } = event {
                let _ = sender.send(outcome.finish);
            }
            ControlFlow::Continue(())
        };
        let ticket = engine.submit(request(), Box::new(listener)).unwrap();
        ticket.cancel();
        ask(&engine, &model, &longer, 0).is(&want);
        assert_eq!(ends.iter().count(), 1);
        engine.stop();
    }
}
