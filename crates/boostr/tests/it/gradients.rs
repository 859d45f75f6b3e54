//! Gradients of whole models: against differences of their losses, over every parameter of every family.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::common::{cpu, models};
use boostr::backend::{Cpu, Recorded};
use boostr::checkpoint::{Bytes, Checkpoint, ConfigFile, Dtype, TensorEntry};
use boostr::models::{Config, Model, Run};
use boostr::ops::{IGNORE, Tape};

type Values = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A model's parameters as f32, and what it takes to make the model of them.
struct Parameters {
    config: Config,
    tied: bool,
    values: Values,
}

impl Parameters {
    fn open(name: &str) -> Self {
        let folder: PathBuf =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name);
        let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
        let config = Config::read(&ConfigFile::parse("config.json", &text).unwrap()).unwrap();
        let mut checkpoint = Checkpoint::open(&folder.join("model.safetensors"), false).unwrap();
        let tied = config.prepare(&mut checkpoint).unwrap();
        let values = checkpoint
            .iter()
            .map(|(name, entry)| (name.to_owned(), (entry.shape.clone(), entry.to_f32().unwrap())));
        Self { values: values.collect(), config, tied }
    }

    fn checkpoint(&self) -> Checkpoint {
        let file: std::sync::Arc<Path> = Path::new("memory").into();
        let entries = self.values.iter().map(|(name, (shape, values))| {
            let data = Bytes::new(Dtype::F32.encode(values).unwrap());
            let entry =
                TensorEntry { dtype: Dtype::F32, shape: shape.clone(), data, file: file.clone() };
            (name.clone(), entry)
        });
        Checkpoint::from_entries("memory", entries.collect())
    }

    /// The sum of weighted losses of two runs, the first of them in two pieces.
    fn loss(&self) -> f64 {
        let model = Model::<Cpu>::from_parameters(
            self.config.clone(),
            &self.checkpoint(),
            self.tied,
            cpu(),
        )
        .unwrap();
        run(&model, self.config.family().frame().vocab_size)
    }

    fn gradients(&self) -> (f64, BTreeMap<String, Vec<f32>>) {
        let tape = Tape::new(cpu(), |_| true);
        let checkpoint = self.checkpoint();
        let model = Model::<Recorded>::from_parameters(
            self.config.clone(),
            &checkpoint,
            self.tied,
            tape.clone(),
        )
        .unwrap();
        let loss = run(&model, self.config.family().frame().vocab_size);
        (loss, tape.backward().unwrap())
    }
}

fn run<B: boostr::backend::Backend>(model: &Model<B>, vocab: usize) -> f64 {
    let id = |i: usize| u32::try_from((i * 7919 + 13) % vocab).unwrap();
    let first: Vec<u32> = (0..43).map(id).collect();
    let second: Vec<u32> = (50..57).map(id).collect();
    let weights: Vec<f32> = (0..43).map(|i| 0.02 + 0.001 * i as f32).collect();
    let (mut a, mut b) = (model.new_state().unwrap(), model.new_state().unwrap());
    let mut sum = 0.0;
    let mut targets: Vec<u32> = first[1..].to_vec();
    targets.push(IGNORE);
    // The second piece's losses reach the first through what the state keeps.
    let mut runs =
        [Run { tokens: &first[..38], state: &mut a }, Run { tokens: &second[..6], state: &mut b }];
    let of_runs = [&targets[..38], &second[1..]];
    let factors = [&weights[..38], &weights[..6]];
    let losses = model.losses(&mut runs, &of_runs, Some(&factors)).unwrap();
    let mut add = |losses: &[f32], weights: &[f32]| {
        let terms = losses.iter().zip(weights);
        sum += terms.map(|(loss, weight)| f64::from(*loss) * f64::from(*weight)).sum::<f64>();
    };
    add(&losses[0], &weights[..38]);
    add(&losses[1], &weights[..6]);
    let mut runs = [Run { tokens: &first[38..], state: &mut a }];
    let losses = model.losses(&mut runs, &[&targets[38..]], Some(&[&weights[38..]])).unwrap();
    assert_eq!(losses[0].last(), Some(&0.0), "an ignored target");
    add(&losses[0], &weights[38..]);
    sum
}

#[test]
fn a_recorded_model_computes_what_any_model_computes() {
    for name in models() {
        let parameters = Parameters::open(name);
        let (recorded, plain) = (parameters.gradients().0, parameters.loss());
        assert!((recorded - plain).abs() < 1e-6 * plain, "{name}: {recorded} {plain}");
    }
}

#[test]
fn along_each_parameters_gradient_the_loss_changes_by_its_length() {
    for name in models() {
        let mut parameters = Parameters::open(name);
        let (_, gradients) = parameters.gradients();
        let layers = parameters.config.family().layers();
        let is_mixture = layers.iter().any(|layer| layer.parts().any(|part| part.experts() > 0));
        // That bias is moved by how often an expert is chosen, not by a gradient.
        let is_trained = |name: &&String| !name.ends_with("e_score_correction_bias");
        let names: Vec<&String> = parameters.values.keys().filter(is_trained).collect();
        assert_eq!(gradients.keys().collect::<Vec<_>>(), names, "{name}");
        for (parameter, gradient) in gradients {
            let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            assert!(norm.is_finite(), "{name} {parameter}");
            let size = parameters.values[&parameter].1.iter().map(|x| f64::from(*x).powi(2));
            let size = size.sum::<f64>().sqrt();
            // A step that changes the loss by 0.002, if it is not too long for the parameter.
            let step = (1e-3 / norm).min(0.01 * size + 1e-3);
            if norm == 0.0 {
                continue;
            }
            let mut at = |step: f64| {
                let (_, values) = parameters.values.get_mut(&parameter).unwrap();
                let before = values.clone();
                for (x, g) in values.iter_mut().zip(&gradient) {
                    *x = (f64::from(*x) + step * f64::from(*g) / norm) as f32;
                }
                let loss = parameters.loss();
                parameters.values.get_mut(&parameter).unwrap().1 = before;
                loss
            };
            // The loss jumps where another expert is chosen: a shorter step does not get there.
            let shorter = if is_mixture { 3 } else { 1 };
            let steps = (0..shorter).map(|times| step / f64::from(4u32.pow(times)));
            let slopes: Vec<(f64, f64)> =
                steps.map(|step| (step, (at(step) - at(-step)) / (2.0 * step))).collect();
            // Losses are sums of f32: what they are off by, over the step.
            let fits =
                |&(step, slope): &(f64, f64)| (slope - norm).abs() < 0.02 * norm + 4e-7 / step;
            assert!(
                slopes.iter().any(fits),
                "{name} {parameter}: gradient {norm}, steps and slopes {slopes:?}"
            );
        }
    }
}
