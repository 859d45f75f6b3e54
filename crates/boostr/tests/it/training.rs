//! Training against PyTorch, and what must not matter: packing, splits, threads, being stopped.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use boostr::backend::{Cpu, Recorded};
use boostr::checkpoint::Checkpoint;
use boostr::load::OpenOptions;
use boostr::models::{Logits, Model, Run};
use boostr::ops::{IGNORE, Tape, to_vec};
use boostr::train::data::{Batch, Batches, DataFile, Encoder, Packing, Piece, TokenFile, Truncate};
use boostr::train::{
    AdamWConfig, Checkpoints, Event, Gradients, LoraConfig, Method, RunConfig, Schedule,
    ScheduleKind, TrainRun, TrainableModel, Trainer, decays, latest,
};

use crate::common::{cpu, delta_models};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn open(name: &str) -> TrainableModel {
    let path = fixtures().join("models").join(name);
    TrainableModel::open(&path, &OpenOptions::default()).unwrap()
}

fn all(name: &str) -> TrainableModel {
    let mut model = open(name);
    model.unfreeze(|_| true).unwrap();
    model
}

/// As fast all the time.
pub fn constant(lr: f64) -> Schedule {
    Schedule {
        kind: ScheduleKind::Linear,
        lr,
        warmup_steps: 0,
        total_steps: 1000,
        floor: 1.0,
        ..Schedule::default()
    }
}

/// A row that is predicted token by token.
pub fn piece(row: &[u32], slot: usize) -> Piece {
    let (tokens, targets) = (row[..row.len() - 1].to_vec(), row[1..].to_vec());
    Piece { tokens, targets, slot, is_start: true, document: slot }
}

fn trainer(model: TrainableModel, optimizer: AdamWConfig, lr: f64) -> Trainer {
    Trainer::new(model, optimizer, constant(lr), 1 << 20, false).unwrap()
}

struct Golden(Checkpoint);

impl Golden {
    fn open(name: &str) -> Self {
        let path = fixtures().join("train").join(format!("{name}.safetensors"));
        Self(Checkpoint::open(&path, false).unwrap())
    }

    fn ids(&self, name: &str) -> Option<Vec<u32>> {
        let data = &self.0.get(name)?.data;
        let words = data.as_chunks::<8>().0.iter();
        Some(words.map(|b| u32::try_from(i64::from_le_bytes(*b)).unwrap()).collect())
    }

    fn losses(&self) -> Vec<f64> {
        let data = &self.0.get("losses").unwrap().data;
        data.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
    }

    /// The rows of step `step`.
    fn batch(&self, step: usize) -> Batch {
        let rows = (0..).map_while(|row| self.ids(&format!("ids.{step}.{row}")));
        let pieces = rows.enumerate().map(|(slot, row)| piece(&row, slot)).collect();
        Batch { pieces }
    }

    /// Compares with the tensors whose names begin with `kind`: their rows, and sums over columns where
    /// rows are left out.
    #[track_caller]
    fn compare(
        &self,
        kind: &str,
        got: &BTreeMap<String, (Vec<usize>, Vec<f32>)>,
        most: f64,
        rms: f64,
    ) {
        let every = self.ids("every").unwrap()[0] as usize;
        for (name, (shape, values)) in got {
            let golden = self.0.get(&format!("{kind}.{name}"));
            let want = golden.unwrap_or_else(|| panic!("{kind}.{name}")).to_f32().unwrap();
            let width = *shape.last().unwrap_or(&1);
            let is_cut = want.len() < values.len();
            let step = if is_cut { every } else { 1 };
            let row = if shape.len() > 2 { shape[1..].iter().product() } else { width };
            let row = if shape.len() == 1 { 1 } else { row };
            let rows: Vec<f32> =
                values.chunks_exact(row).step_by(step).flatten().copied().collect();
            close(&rows, &want, most, rms, &format!("{kind} {name}"));
            if is_cut {
                let sums = self.0.get(&format!("{kind}_sum.{name}")).unwrap().to_f32().unwrap();
                let mut own = vec![0.0f64; row];
                for values in values.chunks_exact(row) {
                    own.iter_mut().zip(values).for_each(|(sum, x)| *sum += f64::from(*x));
                }
                let own: Vec<f32> = own.into_iter().map(|sum| sum as f32).collect();
                let count = (values.len() / row) as f64;
                // Errors of the rows add up.
                close(&own, &sums, most * count, rms * count, &format!("{kind} sums of {name}"));
            }
        }
    }
}

#[track_caller]
fn close(got: &[f32], want: &[f32], most: f64, rms: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let errors = got.iter().zip(want).map(|(x, y)| f64::from(x - y).abs());
    let worst = errors.clone().fold(0.0, f64::max);
    let mean = (errors.map(|e| e * e).sum::<f64>() / got.len().max(1) as f64).sqrt();
    assert!(worst <= most && mean <= rms, "{what}: worst {worst:e}, rms {mean:e}");
}

fn with_shapes(
    model: &TrainableModel,
    gradients: &Gradients,
) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let shapes = model.parameters();
    gradients
        .iter()
        .map(|(name, values)| {
            let shape = shapes[name].shape.clone();
            (name.to_owned(), (shape, values.to_vec()))
        })
        .collect()
}

#[test]
fn losses_gradients_and_three_steps_are_those_of_pytorch() {
    for name in ["mamba2-tiny", "nemotron-h-moe-tiny"] {
        let golden = Golden::open(name);
        let config =
            AdamWConfig { weight_decay: 0.1, max_grad_norm: 0.0, ..AdamWConfig::default() };
        let mut trainer = trainer(all(name), config, 1e-3);
        let (gradients, loss, _) = trainer.gradients(&golden.batch(0)).unwrap();
        let losses = golden.losses();
        assert!((loss - losses[0]).abs() < 1e-5, "{name}: {loss} {}", losses[0]);
        golden.compare("grad", &with_shapes(trainer.model(), &gradients), 4e-6, 1e-6);
        for (step, want) in losses.into_iter().enumerate() {
            let report = trainer.step(&golden.batch(step)).unwrap();
            assert!((report.loss - want).abs() < 1e-5, "{name} {step}: {} {want}", report.loss);
        }
        let after = trainer.model().parameters().iter();
        let after = after.map(|(name, p)| (name.clone(), (p.shape.clone(), p.values.clone())));
        golden.compare("after", &after.collect(), 2e-5, 1e-6);
    }
}

fn ids(count: usize, from: usize) -> Vec<u32> {
    (from..from + count).map(|i| u32::try_from((i * 7919 + 13) % 96).unwrap()).collect()
}

fn norm(gradients: &Gradients) -> f64 {
    gradients.values().iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt()
}

#[track_caller]
fn same(a: &Gradients, b: &Gradients, what: &str) {
    assert_eq!(a.places(), b.places());
    let most = 1e-5 * norm(a);
    for (name, a) in a.iter() {
        for (x, y) in a.iter().zip(&b[name]) {
            assert!(f64::from((x - y).abs()) < most, "{what} {name}: {x} {y}");
        }
    }
}

/// Asserts that the loss and the gradients of documents in one batch are the sums of those of each alone.
#[track_caller]
fn packed_as_alone(name: &str, lengths: &[usize]) {
    let mut trainer = trainer(all(name), AdamWConfig::default(), 1e-3);
    let mut first = 0;
    let of = |(slot, &len): (usize, &usize)| {
        first += len + 1;
        piece(&ids(len + 1, first), slot)
    };
    let pieces: Vec<Piece> = lengths.iter().enumerate().map(of).collect();
    let total: usize = lengths.iter().sum();
    let (packed, loss, predicted) = trainer.gradients(&Batch { pieces: pieces.clone() }).unwrap();
    assert_eq!(predicted, total);
    // One after another in one row.
    let in_a_row = pieces.iter().cloned().map(|piece| Piece { slot: 0, ..piece }).collect();
    assert!(
        trainer.gradients(&Batch { pieces: in_a_row }).unwrap() == (packed.clone(), loss, total)
    );
    let (mut apart, mut sum) = (BTreeMap::new(), 0.0);
    for piece in pieces {
        let share = piece.tokens.len() as f64 / total as f64;
        let (own, loss, _) = trainer.gradients(&Batch { pieces: vec![piece] }).unwrap();
        sum += share * loss;
        for (name, values) in own.iter() {
            let to = apart.entry(name.to_owned()).or_insert_with(|| vec![0.0; values.len()]);
            to.iter_mut().zip(values).for_each(|(to, x)| *to += share as f32 * x);
        }
    }
    assert!((loss - sum).abs() < 1e-6 * sum, "{name}: {loss} {sum}");
    same(&packed, &apart.into(), name);
}

#[test]
fn case_19_packed_documents_give_the_losses_and_gradients_of_each_alone() {
    for (name, lengths) in [
        ("mamba2-tiny", &[5, 3, 8, 1, 15][..]),
        ("nemotron-h-tiny", &[5, 3, 8, 1, 15]),
        ("zamba2-tiny", &[2, 40, 1, 7]),
        ("granitehybrid-moe-tiny", &[9, 1, 1, 20]),
    ] {
        packed_as_alone(name, lengths);
    }
}

#[test]
fn d_5_gradients_of_packed_documents_are_those_of_each_alone() {
    for name in delta_models() {
        packed_as_alone(name, &[1, 2, 3, 30, 5]);
    }
}

#[test]
fn case_24_two_halves_with_a_carried_state_give_the_gradient_of_one_sequence() {
    let others = ["mamba2-tiny", "llama-tiny", "falcon-h1-tiny", "zamba2-tiny"];
    for name in others.into_iter().chain(delta_models()) {
        let mut model = all(name);
        let row = ids(34, 5);
        let mut gradients = |cut: usize| {
            let tape = Tape::new(cpu(), |_| true);
            model
                .with_model::<Recorded, _>(tape.clone(), |model| {
                    let mut state = model.new_state()?;
                    for range in [0..cut, cut..33] {
                        let targets: Vec<u32> = range.clone().map(|t| row[t + 1]).collect();
                        let mut runs = [Run { tokens: &row[range], state: &mut state }];
                        model.losses(&mut runs, &[&targets], None)?;
                    }
                    tape.backward().map(Gradients::from)
                })
                .unwrap()
        };
        let whole = gradients(0);
        for cut in [1, 16, 31] {
            same(&whole, &gradients(cut), name);
        }
    }
}

#[test]
fn gradients_have_the_same_bits_on_any_number_of_threads() {
    for name in ["mamba2-tiny", "nemotron-h-moe-tiny"] {
        let batch = Batch { pieces: (0..4).map(|i| piece(&ids(50, 60 * i), i)).collect() };
        let with = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                trainer(all(name), AdamWConfig::default(), 1e-3).gradients(&batch).unwrap().0
            })
        };
        let one = with(1);
        assert!(one == with(2) && one == with(3), "{name}");
    }
}

#[test]
fn a_step_by_its_parts_has_the_bits_of_the_step() {
    let pieces = (0..5).map(|i| piece(&ids(8 + 3 * i, 60 * i), i)).collect();
    let batch = Batch { pieces };
    let new = || {
        let schedule = Schedule { warmup_steps: 0, ..Schedule::default() };
        Trainer::new(all("mamba2-tiny"), AdamWConfig::default(), schedule, 30, false).unwrap()
    };
    let (mut whole, mut parts) = (new(), new());
    let report = whole.step(&batch).unwrap();

    let leaves = parts.leaves(&batch);
    assert!(leaves >= 2, "{leaves}");
    let weight = (1.0 / batch.counted() as f64) as f32;
    // As two workers do, of which the second has one leaf: the same order of the sum.
    let mut sum = parts.gradients_of(&batch, 0..leaves - 1, weight).unwrap();
    let last = parts.gradients_of(&batch, leaves - 1..leaves, weight).unwrap();
    assert_eq!(sum.places(), last.places());
    sum.values_mut().iter_mut().zip(last.values()).for_each(|(sum, x)| *sum += x);
    sum.nats += last.nats;
    sum.predicted += last.predicted;
    sum.tokens += last.tokens;
    assert_eq!(parts.apply(&sum, 1.0).unwrap(), report);
    assert_eq!(parts.model().parameters(), whole.model().parameters());

    let none = parts.gradients_of(&batch, 0..0, weight).unwrap();
    assert!(none.places() == sum.places() && none.values().iter().all(|&g| g == 0.0));
    let error = parts.gradients_of(&batch, 0..leaves + 1, weight).unwrap_err().to_string();
    let range = format!("expected some of 0..{leaves}, found 0..{}", leaves + 1);
    assert_eq!(error, format!("argument `leaves`: {range}"));
}

#[test]
fn parameters_are_back_after_work_that_panics() {
    let mut model = all("mamba2-tiny");
    let before = model.parameters().clone();
    let work = std::panic::AssertUnwindSafe(|| {
        model.with_model::<Cpu, ()>(cpu(), |_| panic!("of the caller"))
    });
    assert!(std::panic::catch_unwind(work).is_err());
    assert_eq!(*model.parameters(), before);
}

fn logits(model: &mut TrainableModel, tokens: &[u32]) -> Vec<f32> {
    model
        .with_model::<Cpu, _>(cpu(), |model: &Model<Cpu>| {
            let mut state = model.new_state()?;
            let logits = model.forward(&mut [Run { tokens, state: &mut state }], Logits::All)?;
            to_vec(&logits)
        })
        .unwrap()
}

/// in_proj, out_proj and the others take an adapter in every family that has them.
#[test]
fn case_20_adapters_learn_are_saved_as_peft_saves_them_and_merge_into_the_same_model() {
    for name in ["mamba2-tiny", "llama-tiny", "bamba-tiny", "qwen3_5-tiny", "olmo-hybrid-tiny"] {
        let folder =
            std::env::temp_dir().join(format!("boostr-lora-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut model = open(name);
        let tokens = ids(20, 3);
        let before = logits(&mut model, &tokens);
        let config = LoraConfig { r: 4, alpha: 12.0, ..LoraConfig::default() };
        model.add_adapters(&config, 1).unwrap();
        assert_eq!(logits(&mut model, &tokens), before, "{name}: adapters begin as nothing");
        assert!(model.parameters().keys().all(|name| name.contains(".lora_")));
        let mut trainer = trainer(model, AdamWConfig::default(), 1e-2);
        let batch = Batch { pieces: vec![piece(&tokens, 0)] };
        let (gradients, ..) = trainer.gradients(&batch).unwrap();
        for (name, gradient) in gradients.iter() {
            // A meets B's zeros; B's gradient is there at once.
            let is_zero = gradient.iter().all(|g| *g == 0.0);
            assert_eq!(is_zero, name.contains("lora_A"), "{name}");
        }
        let first = trainer.step(&batch).unwrap().loss;
        for _ in 0..10 {
            trainer.step(&batch).unwrap();
        }
        assert!(trainer.step(&batch).unwrap().loss < 0.9 * first, "{name} learns");
        trainer.model().write_adapters(&folder, "base", &config).unwrap();
        let mut unmerged = trainer.into_model();
        let want = logits(&mut unmerged, &tokens);

        let mut read = open(name);
        assert_eq!(read.read_adapters(&folder).unwrap().r, 4);
        assert_eq!(logits(&mut read, &tokens), want, "{name}: read back");
        read.merge_adapters().unwrap();
        let most = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for (x, y) in logits(&mut read, &tokens).iter().zip(&want) {
            assert!((x - y).abs() < 1e-5 * (1.0 + most), "{name}: merged {x}, beside {y}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

fn temporary(what: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("boostr-{what}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn lora(targets: &[&str]) -> LoraConfig {
    LoraConfig { targets: targets.iter().map(|x| (*x).into()).collect(), ..LoraConfig::default() }
}

/// Rows of an in_proj `[z | x | b | c | dt]`, by the sizes of the parameters beside it.
fn rows_of(model: &TrainableModel, in_proj: &str, section: &str) -> std::ops::Range<usize> {
    let tensors = model.tensors();
    let mixer = in_proj.strip_suffix(".in_proj").unwrap();
    let size = |name: &str, dim: usize| tensors.get(&format!("{mixer}.{name}")).unwrap()[dim];
    let (all, inner) = (size("in_proj.weight", 0), size("out_proj.weight", 1));
    match section {
        "x" => inner..2 * inner,
        "dt" => all - size("A_log", 0)..all,
        other => panic!("{other}"),
    }
}

#[test]
fn adapters_of_rows_of_in_proj_move_those_rows_alone_and_are_adapters_like_others() {
    let tokens = ids(24, 3);
    let names = ["mamba2-tiny", "mamba2-tiny-g2", "bamba-tiny", "falcon-h1-tiny"];
    let more = ["granitehybrid-moe-tiny", "nemotron-h-tiny", "zamba2-tiny"];
    for (name, sections) in names
        .iter()
        .chain(&more)
        .flat_map(|name| [&["dt"][..], &["x", "dt"]].map(|sections| (*name, sections)))
    {
        let what = format!("{name} {sections:?}");
        let folder = temporary(&format!("rows-{name}-{}", sections.len()));
        let targets: Vec<String> = sections.iter().map(|of| format!("in_proj.{of}")).collect();
        let config = LoraConfig { targets, ..LoraConfig::default() };
        let mut model = open(name);
        model.add_adapters(&config, 1).unwrap();
        // Decay and averages too leave the other rows as they are.
        let adamw = AdamWConfig { weight_decay: 0.5, ema_decay: 0.9, ..AdamWConfig::default() };
        let mut trainer = trainer(model, adamw, 1e-2);
        let batch = Batch { pieces: vec![piece(&tokens, 0)] };
        let first = trainer.step(&batch).unwrap().loss;
        trainer.step(&batch).unwrap();
        assert!(trainer.step(&batch).unwrap().loss < first, "{what} learns");
        let of_b = trainer.model().parameters().iter().filter(|(name, _)| name.contains("lora_B"));
        for (name, b) in of_b {
            let layer = name.strip_suffix(".lora_B.weight").unwrap();
            let rows: Vec<_> =
                sections.iter().map(|of| rows_of(trainer.model(), layer, of)).collect();
            let average = trainer.optimizer().average(name).unwrap();
            for values in [&b.values[..], average] {
                for (i, row) in values.chunks_exact(config.r).enumerate() {
                    let moved = rows.iter().any(|rows| rows.contains(&i));
                    assert_eq!(row.iter().any(|x| *x != 0.0), moved, "{what}: {name}, row {i}");
                }
            }
        }
        trainer.model().write_adapters(&folder, "base", &config).unwrap();
        let about = std::fs::read_to_string(folder.join("adapter_config.json")).unwrap();
        let about: serde_json::Value = serde_json::from_str(&about).unwrap();
        assert_eq!(about["target_modules"], serde_json::json!(["in_proj"]));

        let mut beside = trainer.into_model();
        let mut read = open(name);
        read.read_adapters(&folder).unwrap();
        assert_eq!(read.parameters(), beside.parameters(), "{what}: read back");
        let want = logits(&mut beside, &tokens);
        read.merge_adapters().unwrap();
        let most = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for (x, y) in logits(&mut read, &tokens).iter().zip(&want) {
            assert!((x - y).abs() < 1e-5 * (1.0 + most), "{what}: merged {x}, beside {y}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

#[test]
fn targets_that_a_model_does_not_have_are_refused_with_those_that_it_has() {
    for (name, targets, told) in [
        ("llama-tiny", &["in_proj.x"][..], "no `in_proj.x`, it has down_proj, gate_proj, k_proj"),
        ("llama-tiny", &["q_proj", "in_proj"], "no `in_proj`, it has"),
        (
            "mamba2-tiny",
            &["in_proj.y"],
            "no `in_proj.y`, it has in_proj, in_proj.b, in_proj.c, in_proj.dt",
        ),
        ("mamba2-tiny", &["x"], "in_proj.x, in_proj.z, out_proj"),
        ("mamba2-tiny", &["embeddings"], "no `embeddings`"),
        ("zamba2-tiny", &["0"], "no `0`"),
    ] {
        let error = open(name).add_adapters(&lora(targets), 0).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    }
}

fn config() -> RunConfig {
    RunConfig {
        batch_size: 2,
        seq_len: 24,
        save_every: 7,
        eval_every: 10,
        schedule: Schedule { total_steps: 20, warmup_steps: 3, ..Schedule::default() },
        ..RunConfig::default()
    }
}

fn checkpoints(folder: &Path) -> Checkpoints {
    Checkpoints::open(folder, 2).unwrap()
}

fn data() -> TokenFile {
    let documents: Vec<Vec<u32>> = (0..9).map(|i| ids(11 + 7 * i, 100 * i)).collect();
    TokenFile::of_documents(&documents, 0, 96).unwrap()
}

/// Losses of all steps of a run that is stopped after each number of steps in `stops`, and its parameters.
fn losses(name: &str, config: &RunConfig, stops: &[u64]) -> (Vec<f64>, Vec<Vec<f32>>) {
    let kind = match (&config.method, config.carry_state) {
        (Method::Lora(_), _) => "adapters",
        (Method::Full, true) => "carried",
        (Method::Full, false) => "packed",
    };
    let folder = temporary(&format!("run-{kind}-{}", stops.len()));
    let mut losses = Vec::new();
    let mut values = Vec::new();
    for (i, stop) in stops.iter().chain([&u64::MAX]).enumerate() {
        let mut run = if i == 0 {
            TrainRun::new(checkpoints(&folder), config.clone(), open(name), data(), Some(data()))
                .unwrap()
        } else {
            let saved = latest(&folder).unwrap().unwrap().checkpoint;
            let model = match config.method {
                Method::Full => TrainableModel::open(&saved.path, &OpenOptions::default()).unwrap(),
                Method::Lora(_) => open(name),
            };
            let valid = Some(data());
            TrainRun::resume(checkpoints(&folder), &saved, config.clone(), model, data(), valid)
                .unwrap()
        };
        run.run(&mut |event| {
            if let Event::Step(metrics) = event {
                losses.push(metrics.loss);
                if metrics.step == *stop {
                    return ControlFlow::Break(());
                }
            }
            ControlFlow::Continue(())
        })
        .unwrap();
        values = run.trainer().model().parameters().values().map(|p| p.values.clone()).collect();
    }
    std::fs::remove_dir_all(&folder).unwrap();
    (losses, values)
}

#[test]
fn a_run_that_was_stopped_goes_on_to_the_bit() {
    let adapters = |targets: &[&str]| RunConfig { method: Method::Lora(lora(targets)), ..config() };
    for (name, config) in [
        ("mamba2-tiny", config()),
        ("mamba2-tiny", RunConfig { carry_state: true, ..config() }),
        ("mamba2-tiny", adapters(&["in_proj.dt", "out_proj"])),
        // Layers that a folder for others has as one.
        ("granitehybrid-dense-tiny", adapters(&["gate_proj", "up_proj"])),
    ] {
        let whole = losses(name, &config, &[]);
        assert_eq!(whole.0.len(), 20);
        let stopped = losses(name, &config, &[1, 6, 13]);
        assert!(whole == stopped, "{name} {config:?}");
    }
}

#[test]
fn what_a_run_leaves_is_a_model_that_opens() {
    let folder = std::env::temp_dir().join(format!("boostr-left-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    let mut run =
        TrainRun::new(checkpoints(&folder), config(), open("mamba2-tiny"), data(), None).unwrap();
    run.run(&mut |_| ControlFlow::Continue(())).unwrap();
    let lm =
        boostr::load::LanguageModel::<Cpu>::open(&folder, &OpenOptions::default(), cpu()).unwrap();
    let tokens = ids(9, 1);
    let mut state = lm.model.new_state().unwrap();
    let mut runs = [Run { tokens: &tokens, state: &mut state }];
    let got = to_vec(&lm.model.forward(&mut runs, Logits::All).unwrap()).unwrap();
    drop(run);
    let mut saved = TrainableModel::open(&folder, &OpenOptions::default()).unwrap();
    assert_eq!(got, logits(&mut saved, &tokens));
    for file in ["metrics.jsonl", "loss.svg", "config.json"] {
        assert!(folder.join(file).is_file(), "{file}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn bad_batches_and_settings_are_errors_that_change_nothing() {
    let mut trainer = trainer(all("mamba2-tiny"), AdamWConfig::default(), 1e-3);
    let before = trainer.model().parameters().clone();
    let mut unknown = piece(&ids(5, 0), 0);
    unknown.targets[2] = 5000;
    let mut ignored = piece(&ids(5, 0), 0);
    ignored.targets.fill(IGNORE);
    for pieces in [vec![], vec![unknown], vec![ignored]] {
        assert!(trainer.step(&Batch { pieces }).is_err());
    }
    assert_eq!(trainer.model().parameters(), &before);
    assert!(
        Trainer::new(open("mamba2-tiny"), AdamWConfig::default(), constant(1e-3), 1, false)
            .is_err()
    );
    assert!(decays("lm_head.weight", &[2, 2]));
    let method = Method::Lora(LoraConfig { r: 0, ..LoraConfig::default() });
    let folder = std::env::temp_dir().join(format!("boostr-bad-{}", std::process::id()));
    let config = RunConfig { method, ..config() };
    assert!(
        TrainRun::new(checkpoints(&folder), config, open("mamba2-tiny"), data(), None).is_err()
    );
}

#[test]
fn p_tune_packing_cuts_documents_the_length_of_a_row_changes_no_loss() {
    // Documents of 21 inputs each; all are read in a step, whatever the row.
    let documents: Vec<Vec<u32>> = (0..12).map(|i| ids(21, 100 * i)).collect();
    let data = || TokenFile::of_documents(&documents, 0, 96).unwrap();
    let loss = |seq_len, batch_size, truncate| {
        let packing = Packing::Documents(truncate);
        let data = data();
        let batch = Batches::new(&data, packing, batch_size, seq_len, 3).unwrap().next();
        trainer(all("mamba2-tiny"), AdamWConfig::default(), 1e-9).step(&batch).unwrap()
    };
    let whole = loss(4096, 1, Truncate::Split);
    assert_eq!((whole.tokens, whole.predicted), (12 * 21, 12 * 21));
    for (seq_len, batch_size) in [(21, 12), (30, 12), (42, 6), (50, 6), (63, 4)] {
        let packed = loss(seq_len, batch_size, Truncate::Split);
        assert_eq!(packed.predicted, whole.predicted, "rows of {seq_len}");
        assert!((packed.loss - whole.loss).abs() < 1e-6, "{} for {}", packed.loss, whole.loss);
    }
    // What is cut anywhere is another loss.
    assert!((loss(28, 9, Truncate::Anywhere).loss - whole.loss).abs() > 1e-3);
}

#[test]
fn p_tune_batch_without_targets_it_counts_nothing_and_the_run_goes_on() {
    // Of every third document nothing counts but the end, of the others all.
    let folder = temporary("run-without-targets");
    let path = folder.join("x.tokens");
    let prompt = "Say it again and again and again, as often as you can say it. ".repeat(3);
    let lines: String = (0..9)
        .map(|i| match i % 3 {
            0 => format!("{}\n", serde_json::json!({"prompt": prompt, "completion": "x"})),
            _ => format!("{}\n", serde_json::json!({"prompt": "Hi.", "completion": "Hello."})),
        })
        .collect();
    std::fs::create_dir_all(&folder).unwrap();
    let text = folder.join("x.jsonl");
    std::fs::write(&text, lines).unwrap();
    let lm = boostr::load::LanguageModel::<Cpu>::open(
        fixtures().join("models/mamba2-tiny"),
        &OpenOptions::default(),
        cpu(),
    )
    .unwrap();
    let encoder = Encoder::new(lm.tokenizer().unwrap(), 0).unwrap();
    let files = [DataFile::new(&text).unwrap()];
    let data = || TokenFile::prepare(&path, &files, &encoder, |_, _| {}).unwrap();
    for carry_state in [false, true] {
        let config = RunConfig {
            carry_state,
            batch_size: 1,
            seq_len: 16,
            schedule: Schedule { total_steps: 12, warmup_steps: 0, ..Schedule::default() },
            ..RunConfig::default()
        };
        let run = |stop: u64| {
            let folder = folder.join(format!("{carry_state}-{stop}"));
            let mut losses = Vec::new();
            let mut passed_over = 0;
            for stop in [stop, u64::MAX] {
                let mut run = match latest(&folder).ok().flatten() {
                    None => TrainRun::new(
                        checkpoints(&folder),
                        config.clone(),
                        open("mamba2-tiny"),
                        data(),
                        None,
                    ),
                    Some(found) => TrainRun::resume(
                        checkpoints(&folder),
                        &found.checkpoint,
                        config.clone(),
                        TrainableModel::open(&found.checkpoint.path, &OpenOptions::default())
                            .unwrap(),
                        data(),
                        None,
                    ),
                }
                .unwrap();
                run.run(&mut |event| match event {
                    Event::Step(metrics) => {
                        losses.push(metrics.loss);
                        if metrics.step == stop {
                            return ControlFlow::Break(());
                        }
                        ControlFlow::Continue(())
                    }
                    _ => ControlFlow::Continue(()),
                })
                .unwrap();
                assert!(stop == u64::MAX || run.steps().0 == stop);
                passed_over += run.passed_over();
            }
            (losses, passed_over)
        };
        let (losses, passed_over) = run(5);
        assert_eq!(losses.len(), 12);
        assert!(losses.iter().all(|loss| loss.is_finite() && *loss > 0.0), "{losses:?}");
        assert!(passed_over > 0, "every batch had a target");
        assert_eq!((losses, passed_over), run(9));
    }

    // Where all that is to be learnt is left out, the run says so.
    let config = RunConfig {
        truncate: Truncate::KeepStart,
        batch_size: 1,
        seq_len: 2,
        ..RunConfig::default()
    };
    let mut run =
        TrainRun::new(checkpoints(&folder.join("none")), config, open("mamba2-tiny"), data(), None)
            .unwrap();
    let none = run.run(&mut |_| ControlFlow::Continue(())).unwrap_err().to_string();
    assert!(none.contains("expected tokens to predict, found none in an epoch"), "{none}");
    drop(run);
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_finished_run_is_given_more_steps_but_not_fewer() {
    let folder = temporary("run-extended");
    let with = |total_steps| RunConfig {
        schedule: Schedule { total_steps, ..config().schedule },
        ..config()
    };
    TrainRun::new(checkpoints(&folder), with(4), open("mamba2-tiny"), data(), None)
        .unwrap()
        .run(&mut |_| ControlFlow::Continue(()))
        .unwrap();
    let resume = |total_steps| {
        let saved = latest(&folder).unwrap().unwrap().checkpoint;
        let model = TrainableModel::open(&saved.path, &OpenOptions::default()).unwrap();
        TrainRun::resume(checkpoints(&folder), &saved, with(total_steps), model, data(), None)
    };
    let fewer = resume(3).err().unwrap().to_string();
    assert!(fewer.contains("at least the 4 steps that were made, found 3"), "{fewer}");
    let mut run = resume(6).unwrap();
    let mut rates = Vec::new();
    run.run(&mut |event| {
        if let Event::Step(metrics) = event {
            rates.push(metrics.lr);
        }
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(run.steps(), (6, 6));
    assert_eq!(rates, [4, 5].map(|step| with(6).schedule.lr(step)));
    drop(run);
    assert_eq!(latest(&folder).unwrap().unwrap().checkpoint.state.step, 6);
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_run_of_a_version_before_whole_documents_goes_on_as_it_was() {
    let folder = temporary("run-of-before");
    let cut = RunConfig { truncate: Truncate::Anywhere, ..config() };
    TrainRun::new(checkpoints(&folder), cut.clone(), open("mamba2-tiny"), data(), None)
        .unwrap()
        .run(&mut |event| match event {
            Event::Step(metrics) if metrics.step == 3 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        })
        .unwrap();
    let mut saved = latest(&folder).unwrap().unwrap().checkpoint;
    saved.state.config.as_object_mut().unwrap().remove("truncate").unwrap();
    saved.state.cursor.as_object_mut().unwrap().remove("checksum").unwrap();
    assert_eq!(RunConfig::of_checkpoint(&saved).unwrap(), cut);
    let resume = |config, data| {
        let model = TrainableModel::open(&saved.path, &OpenOptions::default()).unwrap();
        TrainRun::resume(checkpoints(&folder), &saved, config, model, data, None)
    };
    let other = resume(config(), data()).err().unwrap().to_string();
    assert!(other.contains("`truncate` was \"anywhere\", is \"split\""), "{other}");
    assert_eq!(resume(cut, data()).unwrap().steps(), (3, 20));
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn p_g9_second_trainer_replaces_tokens_a_run_knows_its_data_by_a_checksum() {
    let folder = temporary("run-other-data");
    TrainRun::new(checkpoints(&folder), config(), open("mamba2-tiny"), data(), None)
        .unwrap()
        .run(&mut |event| match event {
            Event::Step(metrics) if metrics.step == 3 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        })
        .unwrap();
    // As many documents and tokens, in another order.
    let mut documents: Vec<Vec<u32>> = (0..9).map(|i| ids(11 + 7 * i, 100 * i)).collect();
    documents[8].swap(0, 1);
    let other = TokenFile::of_documents(&documents, 0, 96).unwrap();
    let saved = latest(&folder).unwrap().unwrap().checkpoint;
    let model = TrainableModel::open(&saved.path, &OpenOptions::default()).unwrap();
    let error = TrainRun::resume(checkpoints(&folder), &saved, config(), model, other, None);
    let error = error.err().unwrap().to_string();
    assert!(error.contains("other data") && error.contains("checksum"), "{error}");
    std::fs::remove_dir_all(&folder).unwrap();
}
