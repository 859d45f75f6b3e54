//! Layers that are run again on the way back: the same losses and gradients, to the bit.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{Folder, cpu, models};
use boostr::backend::{self, Cpu, Recorded};
use boostr::load::OpenOptions;
use boostr::models::{Model, Run};
use boostr::ops::{
    self, Activation, ActivationOps, Client, DType, HostBytes, LinearOps, Tape, TensorTree,
};
use boostr::train::data::{Batch, Piece, TokenFile};
use boostr::train::{
    AdamWConfig, Checkpoints, Event, LoraConfig, Parameters, RunConfig, Schedule, TrainRun,
    TrainableModel, Trainer, latest,
};
use boostr::{Error, Result};

fn open(name: &str) -> TrainableModel {
    let models: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    TrainableModel::open(&models.join(name), &OpenOptions::default()).unwrap()
}

fn all(name: &str) -> TrainableModel {
    let mut model = open(name);
    model.unfreeze(|_| true).unwrap();
    model
}

fn ids(count: usize, from: usize) -> Vec<u32> {
    (from..from + count).map(|i| u32::try_from((i * 7919 + 13) % 96).unwrap()).collect()
}

type Losses = Vec<Vec<f32>>;
type Gradients = BTreeMap<String, Vec<f32>>;

/// Losses of calls with runs of these lengths, each going on where the run of its number stopped, and the
/// gradient of their sum.
fn losses_and_gradients(name: &str, calls: &[&[usize]], recomputes: bool) -> (Losses, Gradients) {
    let tape = Tape::new(cpu(), |_| true).recomputing(recomputes);
    let work = |model: &Model<Recorded>| {
        let runs = calls.iter().map(|lengths| lengths.len()).max().unwrap_or(0);
        let mut states = (0..runs).map(|_| model.new_state()).collect::<Result<Vec<_>>>()?;
        let (mut losses, mut first) = (Vec::new(), 0);
        for &lengths in calls {
            let rows: Vec<Vec<u32>> =
                lengths.iter().map(|&len| ids(len + 1, first + len)).collect();
            first += 40;
            let runs = rows.iter().zip(&mut states);
            let mut runs: Vec<_> =
                runs.map(|(row, state)| Run { tokens: &row[..row.len() - 1], state }).collect();
            let targets: Vec<&[u32]> = rows.iter().map(|row| &row[1..]).collect();
            losses.extend(model.losses(&mut runs, &targets, None)?);
        }
        Ok((losses, tape.backward()?))
    };
    all(name).with_model::<Recorded, _>(tape.clone(), work).unwrap()
}

#[track_caller]
fn check_same_bits(name: &str, calls: &[&[usize]]) {
    let plain = losses_and_gradients(name, calls, false);
    let again = losses_and_gradients(name, calls, true);
    assert_eq!(plain.0, again.0, "{name}: losses");
    assert!(plain.1.values().flatten().any(|g| *g != 0.0), "{name}");
    check_same(name, &plain.1, &again.1);
}

#[track_caller]
fn check_same(what: &str, a: &Gradients, b: &Gradients) {
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>(), "{what}");
    for (name, a) in a {
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        assert!(bits(a) == bits(&b[name]), "{what}: {name}");
    }
}

#[test]
fn ragged_runs_and_runs_that_go_on_have_the_same_bits_in_every_family() {
    for name in models() {
        check_same_bits(name, &[&[5, 38, 1, 17], &[20, 1, 0, 9], &[3, 2]]);
    }
}

/// A call cuts it at 512: the second piece's gradient reaches the first through the states.
#[test]
fn a_run_of_two_pieces_in_one_call_has_the_same_bits() {
    for name in ["mamba2-tiny", "falcon-h1-tiny", "zamba2-tiny"] {
        check_same_bits(name, &[&[560, 30]]);
    }
}

fn piece(row: &[u32], slot: usize, is_start: bool) -> Piece {
    let (tokens, targets) = (row[..row.len() - 1].to_vec(), row[1..].to_vec());
    Piece { tokens, targets, slot, is_start, document: slot }
}

/// Losses and parameters of some steps on rows that go on from step to step.
fn steps(model: TrainableModel, carries: bool, recomputes: bool) -> (Vec<f64>, Parameters) {
    let schedule = Schedule { warmup_steps: 0, lr: 1e-2, ..Schedule::default() };
    let mut trainer = Trainer::new(model, AdamWConfig::default(), schedule, 1 << 20, carries)
        .unwrap()
        .checkpointing_layers(recomputes);
    let losses = (0..4).map(|step| {
        let pieces = [21, 8, 3].into_iter().enumerate();
        let pieces = pieces
            .map(|(slot, len)| piece(&ids(len + 1, 60 * step + slot), slot, step == 0 || !carries));
        trainer.step(&Batch { pieces: pieces.collect() }).unwrap().loss
    });
    let losses = losses.collect();
    (losses, trainer.model().parameters().clone())
}

#[test]
fn steps_that_carry_states_and_steps_of_adapters_have_the_same_bits() {
    assert!(steps(all("mamba2-tiny"), true, false) == steps(all("mamba2-tiny"), true, true));
    for name in ["mamba2-tiny", "llama-tiny", "bamba-tiny", "nemotron-h-tiny"] {
        let adapted = || {
            let mut model = open(name);
            let config = LoraConfig { r: 4, alpha: 12.0, ..LoraConfig::default() };
            model.add_adapters(&config, 1).unwrap();
            model
        };
        let plain = steps(adapted(), false, false);
        assert!(plain == steps(adapted(), false, true), "{name}");
        assert_ne!(plain.0[0].to_bits(), plain.0[3].to_bits(), "{name}");
    }
}

#[test]
fn a_run_may_change_to_it_and_goes_on_to_the_bit() {
    let data = || {
        let documents: Vec<Vec<u32>> = (0..9).map(|i| ids(11 + 7 * i, 100 * i)).collect();
        TokenFile::of_documents(&documents, 0, 96).unwrap()
    };
    let after = |changes: bool| {
        let folder = Folder::new();
        let checkpoints = || Checkpoints::open(folder.path(), 2).unwrap();
        let config = RunConfig {
            batch_size: 2,
            seq_len: 24,
            schedule: Schedule { total_steps: 8, warmup_steps: 2, ..Schedule::default() },
            ..RunConfig::default()
        };
        let mut run =
            TrainRun::new(checkpoints(), config.clone(), open("mamba2-tiny"), data(), None)
                .unwrap();
        run.run(&mut |event| match event {
            Event::Step(metrics) if metrics.step == 3 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        })
        .unwrap();
        drop(run);
        let saved = latest(folder.path()).unwrap().unwrap().checkpoint;
        let model = TrainableModel::open(&saved.path, &OpenOptions::default()).unwrap();
        let config = RunConfig { checkpoint_layers: changes, ..config };
        let mut run = TrainRun::resume(checkpoints(), &saved, config, model, data(), None).unwrap();
        run.run(&mut |_| ControlFlow::Continue(())).unwrap();
        run.trainer().model().parameters().clone()
    };
    assert!(after(false) == after(true));
}

type Tensor = backend::Tensor<Cpu>;

#[derive(Clone)]
struct Rows(Vec<Tensor>);

impl TensorTree<Cpu> for Rows {
    fn tensors(&self) -> Vec<&Tensor> {
        self.0.iter().collect()
    }
}

fn weight(tape: &Tape, name: &str, values: [f32; 4]) -> ops::Weight<Cpu> {
    let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_ne_bytes).collect();
    let weight =
        tape.weight(HostBytes::new(Arc::new(bytes), 0..16).unwrap(), DType::F32, &[2, 2]).unwrap();
    tape.parameter(name, &weight);
    weight
}

/// The gradients of a loss on the sum of all that a segment gives, whose input depends on a parameter.
fn of_segment(
    recomputes: bool,
    run: impl Fn(&Tape, Rows, &ops::Weight<Cpu>) -> Result<Rows> + Send + 'static,
) -> Result<Gradients> {
    let tape = Tape::new(cpu(), |_| true).recomputing(recomputes);
    let head = weight(&tape, "head", [0.5, -1.0, 0.25, 2.0]);
    let w = weight(&tape, "w", [1.0, 0.5, -0.75, 1.5]);
    let x = ops::tensor::<Cpu>(&tape, &[1.0, 2.0, -3.0, 0.5], &[2, 2])?;
    let x = tape.linear(&x, &w, None, None)?;
    let of_segment = weight(&tape, "of_segment", [0.3, 0.1, -0.2, 0.7]);
    let out = tape.segment(Rows(vec![x]), move |tape, rows| run(tape, rows, &of_segment))?;
    let mut h = ops::zeros::<Cpu>(&tape, &[2, 2])?;
    for y in &out.0 {
        h = tape.add_scaled(h, y, 0.5)?;
    }
    tape.cross_entropy(&h, &head, 1.0, (&[0, 1], &[1.0, 0.5]), false)?;
    tape.backward()
}

#[test]
fn a_segment_may_give_what_it_was_given_new_tensors_and_constants() {
    let calls = Arc::new(AtomicUsize::new(0));
    let gradients = |recomputes| {
        let calls = calls.clone();
        of_segment(recomputes, move |tape, Rows(mut rows), w| {
            calls.fetch_add(1, Ordering::Relaxed);
            let y = tape.activate(Activation::Silu, &rows[0])?;
            rows.push(tape.linear(&y, w, None, None)?);
            rows.push(y);
            rows.push(ops::tensor::<Cpu>(tape, &[0.1, 0.2, 0.3, 0.4], &[2, 2])?);
            Ok(Rows(rows))
        })
        .unwrap()
    };
    let plain = gradients(false);
    assert_eq!(calls.swap(0, Ordering::Relaxed), 1);
    check_same("segment", &plain, &gradients(true));
    assert_eq!(calls.swap(0, Ordering::Relaxed), 2);
    assert!(plain.values().all(|values| values.iter().any(|g| *g != 0.0)));
}

type Work = fn(&Tape, Vec<Tensor>) -> Result<Vec<Tensor>>;

#[test]
fn losses_in_a_segment_and_segments_that_differ_from_run_to_run_are_errors() {
    let with_loss = |tape: &Tape, Rows(rows): Rows, w: &ops::Weight<Cpu>| {
        tape.cross_entropy(&rows[0], w, 1.0, (&[0, 1], &[1.0, 1.0]), false)?;
        Ok(Rows(vec![tape.activate(Activation::Silu, &rows[0])?]))
    };
    assert!(of_segment(false, with_loss).is_ok());
    let error = of_segment(true, with_loss).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what } if what.contains("loss")), "{error}");

    let others: [Work; 3] = [
        |tape, rows| Ok(vec![tape.activate(Activation::Silu, &rows[0].narrow(0, 0, 1)?)?]),
        |tape, _| Ok(vec![ops::zeros::<Cpu>(tape, &[2, 2])?]),
        |_, _| Ok(vec![]),
    ];
    for other in others {
        let calls = AtomicUsize::new(0);
        let error = of_segment(true, move |tape, Rows(rows), _| {
            Ok(Rows(match calls.fetch_add(1, Ordering::Relaxed) {
                0 => vec![tape.activate(Activation::Silu, &rows[0])?],
                _ => other(tape, rows)?,
            }))
        })
        .unwrap_err();
        assert!(error.to_string().contains("run again"), "{error}");
    }
}
