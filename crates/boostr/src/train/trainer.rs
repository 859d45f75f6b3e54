//! One step of training after another.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::data::{Batch, Piece};
use super::{AdamWConfig, Gradients, NamedTensor, Optimizer, Schedule, TrainableModel};
use crate::backend::Recorded;
use crate::error::{Error, Result};
use crate::models::{Run, State};
use crate::nn::Kept;
use crate::ops::{IGNORE, Tape, to_vec};

/// Streams that a batch can have.
const MAX_STREAMS: usize = 1 << 20;

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// Mean loss of the predicted tokens, in nats, before the step.
    pub loss: f64,
    /// Tokens that were predicted.
    pub predicted: usize,
    /// Tokens that were read.
    pub tokens: usize,
    /// Length of the gradient before clipping.
    pub grad_norm: f64,
    /// The learning rate.
    pub lr: f64,
}

/// A model, how it is moved, and what its sequences remember from one batch to the next.
///
/// A step is three calls, which loops of one's own can make by hand: [`leaves`](Self::leaves),
/// [`gradients_of`](Self::gradients_of) and [`apply`](Self::apply). They give the bits of
/// [`step`](Self::step).
///
/// ```
/// use boostr::train::data::{Batches, Packing, TokenFile, Truncate};
/// use boostr::train::{AdamWConfig, Schedule, Shape, Trainer, TrainableModel};
///
/// # let tokenizer = std::fs::read_to_string(concat!(
/// #     env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny/tokenizer.json"))?;
/// let shape = Shape { d_model: 32, n_layer: 1, d_state: 8, headdim: 16, ..Shape::default() };
/// let model = TrainableModel::new(&shape.to_config(96, 0), tokenizer, 0)?;
/// let schedule = Schedule { warmup_steps: 0, total_steps: 10, ..Schedule::default() };
/// let mut trainer = Trainer::new(model, AdamWConfig::default(), schedule, 8, false)?;
///
/// let file = TokenFile::of_documents(&[vec![5, 6, 7, 8, 9], vec![5, 6, 7]], 0, 96)?;
/// let mut batches = Batches::new(&file, Packing::Documents(Truncate::Split), 2, 8, 42)?;
/// let first = trainer.step(&batches.next())?;
///
/// let batch = batches.next();
/// let weight = 1.0 / batch.counted() as f32;
/// let leaves = trainer.leaves(&batch);
/// let gradients = trainer.gradients_of(&batch, 0..leaves, weight)?;
/// let second = trainer.apply(&gradients, 1.0)?;
/// assert_eq!((trainer.steps(), second.tokens), (2, first.tokens));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Trainer {
    model: TrainableModel,
    optimizer: Optimizer,
    schedule: Schedule,
    /// Tokens that are run forward and back at once; the memory of a step is that of so many.
    tokens_at_once: usize,
    /// Whether states go on from batch to batch, gradients cut between.
    carries: bool,
    /// Whether the way back runs each layer again.
    checkpoints_layers: bool,
    /// The states of carried streams, by slot.
    carried: Vec<Option<State<Recorded>>>,
}

impl Trainer {
    /// A trainer that has made no step; `tokens_at_once` bounds what is in memory at a time, in tokens, and
    /// with `carries` states go on from batch to batch.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] for settings out of range, or a model of which nothing is to be trained.
    pub fn new(
        model: TrainableModel,
        optimizer: AdamWConfig,
        schedule: Schedule,
        tokens_at_once: usize,
        carries: bool,
    ) -> Result<Self> {
        schedule.validate()?;
        if model.parameters().is_empty() {
            let reason = "expected parameters that are trained, found none".into();
            return Err(Error::Argument { name: "model", reason });
        }
        let optimizer = Optimizer::new(optimizer, model.parameters())?;
        let tokens_at_once = tokens_at_once.max(1);
        let carried = Vec::new();
        let checkpoints_layers = false;
        Ok(Self {
            model,
            optimizer,
            schedule,
            tokens_at_once,
            carries,
            checkpoints_layers,
            carried,
        })
    }

    /// The same trainer; where `checkpoints_layers`, a step keeps of each layer only what enters it and runs the
    /// layer again on the way back. Steps have the same bits.
    #[must_use]
    pub fn checkpointing_layers(self, checkpoints_layers: bool) -> Self {
        Self { checkpoints_layers, ..self }
    }

    /// The model as it is.
    #[must_use]
    pub fn model(&self) -> &TrainableModel {
        &self.model
    }

    /// The model, to be run.
    pub fn model_mut(&mut self) -> &mut TrainableModel {
        &mut self.model
    }

    /// Gives the model up.
    #[must_use]
    pub fn into_model(self) -> TrainableModel {
        self.model
    }

    /// The optimizer and what it remembers.
    #[must_use]
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// The optimizer, to be restored.
    pub fn optimizer_mut(&mut self) -> &mut Optimizer {
        &mut self.optimizer
    }

    /// Steps made.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.optimizer.steps()
    }

    /// What carried streams remember, by names that begin with `prefix`: the slots of fixed shape of each
    /// layer.
    ///
    /// # Errors
    ///
    /// When memory is short.
    pub fn states(&self, prefix: &str) -> Result<Vec<NamedTensor<'static>>> {
        let mut tensors = Vec::new();
        for (slot, state) in self.carried.iter().enumerate() {
            let Some(state) = state else { continue };
            // Exact as floats in two halves.
            let position = state.position();
            tensors.push(NamedTensor {
                name: format!("{prefix}{slot}.position"),
                shape: vec![2],
                values: vec![(position >> 20) as f32, (position & 0xf_ffff) as f32].into(),
            });
            for (layer, of, kept) in state.slots() {
                let Kept::Tensor(x) = kept else { continue };
                tensors.push(NamedTensor {
                    name: format!("{prefix}{slot}.{layer}.{}", of.name()),
                    shape: x.shape().to_vec(),
                    values: to_vec(x)?.into(),
                });
            }
        }
        Ok(tensors)
    }

    /// Takes up what [`states`](Self::states) gave.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when a tensor is of no layer of the model, [`Error::Shape`] for another shape.
    pub fn restore_states(&mut self, tensors: &[NamedTensor<'_>], prefix: &str) -> Result<()> {
        let client = Tape::new(self.model.client().clone(), |_| false);
        let carried = &mut self.carried;
        self.model.with_model::<Recorded, _>(client.clone(), |model| {
            for tensor in tensors {
                let bad = || Error::Argument {
                    name: "states",
                    reason: format!("`{}` is of no stream", tensor.name),
                };
                let name = tensor.name.strip_prefix(prefix).ok_or_else(bad)?;
                let parts: Vec<&str> = name.split('.').collect();
                let number = |part: &str| part.parse::<usize>().map_err(|_| bad());
                let slot = number(parts[0])?;
                if slot >= MAX_STREAMS {
                    return Err(bad());
                }
                if carried.len() <= slot {
                    carried.resize_with(slot + 1, || None);
                }
                let state = match &mut carried[slot] {
                    Some(state) => state,
                    none => none.insert(model.new_state()?),
                };
                let values = || crate::ops::tensor(&client, &tensor.values, &tensor.shape);
                match (&parts[1..], &tensor.values[..]) {
                    (["position"], &[high, low]) => {
                        state.set_position(((high as usize) << 20) | low as usize);
                    }
                    ([layer, slot], _) => {
                        state.set(number(layer)?, slot, Kept::Tensor(values()?))?;
                    }
                    _ => return Err(bad()),
                }
            }
            Ok(())
        })
    }

    /// Makes one step on `batch`: the gradient of the mean loss of all its predicted tokens.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] for a batch that predicts nothing or has an unknown token, for a loss or a
    /// gradient that is not finite, naming the step; parameters are then as they were.
    pub fn step(&mut self, batch: &Batch) -> Result<StepReport> {
        let (gradients, ..) = self.gradients(batch)?;
        self.apply(&gradients, 1.0)
    }

    /// Reads a batch in which nothing is to be predicted. Parameters stay, and no step is made; carried states go on.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] for an unknown token.
    pub fn pass_over(&mut self, batch: &Batch) -> Result<()> {
        if self.carries {
            self.gradients_of(batch, 0..self.leaves(batch), 0.0)?;
        }
        Ok(())
    }

    /// The gradient of the mean loss of `batch`, that loss, and the number of predicted tokens.
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step).
    pub fn gradients(&mut self, batch: &Batch) -> Result<(Gradients, f64, usize)> {
        let predicted = batch.counted();
        if predicted == 0 {
            let reason = "expected tokens to predict, found none".into();
            return Err(Error::Argument { name: "batch", reason });
        }
        let weight = (1.0 / predicted as f64) as f32;
        let gradients = self.gradients_of(batch, 0..self.leaves(batch), weight)?;
        let loss = gradients.loss();
        Ok((gradients, loss, predicted))
    }

    /// Number of leaves of `batch`: groups of whole pieces that are run forward and back at once.
    ///
    /// The cut depends on the batch and on `tokens_at_once` alone.
    #[must_use]
    pub fn leaves(&self, batch: &Batch) -> usize {
        self.cut(batch).len()
    }

    /// Gradients of `weight` times the losses of some leaves of `batch`, summed in the order of the leaves.
    ///
    /// Workers that share a batch give each leaf the weight `1 / batch.counted()`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] for leaves that the batch does not have, and for an unknown token.
    pub fn gradients_of(
        &mut self,
        batch: &Batch,
        leaves: Range<usize>,
        weight: f32,
    ) -> Result<Gradients> {
        let cut = self.cut(batch);
        let Some(cut) = cut.get(leaves.clone()) else {
            let reason = format!("expected some of 0..{}, found {leaves:?}", cut.len());
            return Err(Error::Argument { name: "leaves", reason });
        };
        let mut gradients = Gradients::default();
        for leaf in cut {
            let pieces = &batch.pieces[leaf.clone()];
            let (own, nats) = self.leaf(pieces, weight)?;
            gradients.add(own);
            gradients.nats += nats;
            for piece in pieces {
                gradients.tokens += piece.tokens.len();
                gradients.predicted += piece.targets.iter().filter(|&&id| id != IGNORE).count();
            }
        }
        if cut.is_empty() {
            gradients = Gradients::zeros(self.model.parameters());
        }
        self.model.hold_rows(&mut gradients);
        Ok(gradients)
    }

    /// Moves the parameters one step by `gradients / divisor`. The report is of the tokens that they are of.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] for a loss or a gradient that is not finite, naming the step; parameters are then
    /// as they were.
    pub fn apply(&mut self, gradients: &Gradients, divisor: f64) -> Result<StepReport> {
        let (loss, step) = (gradients.loss(), self.steps() + 1);
        if !loss.is_finite() {
            let reason = format!("loss {loss} at step {step}");
            return Err(Error::Argument { name: "loss", reason });
        }
        let lr = self.schedule.lr(self.steps());
        let grad_norm = self.optimizer.step(self.model.parameters_mut(), gradients, divisor, lr)?;
        let Gradients { predicted, tokens, .. } = *gradients;
        Ok(StepReport { loss, predicted, tokens, grad_norm, lr })
    }

    /// The pieces of each leaf.
    fn cut(&self, batch: &Batch) -> Vec<Range<usize>> {
        let mut leaves = Vec::new();
        let mut start = 0;
        while let Some(first) = batch.pieces.get(start) {
            let mut tokens = first.tokens.len();
            let mut end = start + 1;
            while let Some(next) = batch.pieces.get(end) {
                tokens += next.tokens.len();
                // A stream's pieces follow one another: one at a time.
                let is_stream = |piece: &Piece| !next.is_start && piece.slot == next.slot;
                if tokens > self.tokens_at_once || batch.pieces[start..end].iter().any(is_stream) {
                    break;
                }
                end += 1;
            }
            leaves.push(start..end);
            start = end;
        }
        leaves
    }

    /// Gradients of `weight` times the losses of some pieces, and the sum of the losses.
    fn leaf(&mut self, pieces: &[Piece], weight: f32) -> Result<(BTreeMap<String, Vec<f32>>, f64)> {
        let names: BTreeSet<String> = self.model.parameters().keys().cloned().collect();
        let tape = Tape::new(self.model.client().clone(), move |name| names.contains(name))
            .recomputing(self.checkpoints_layers);
        let (carries, carried) = (self.carries, &mut self.carried);
        let slots = pieces.iter().map(|piece| piece.slot + 1).max().unwrap_or(0);
        if carried.len() < slots {
            carried.resize_with(slots, || None);
        }
        self.model.with_model::<Recorded, _>(tape.clone(), |model| {
            let mut states = Vec::with_capacity(pieces.len());
            for piece in pieces {
                let kept = carried[piece.slot].take().filter(|_| !piece.is_start);
                states.push(match kept {
                    Some(state) => state,
                    None => model.new_state()?,
                });
            }
            let mut runs: Vec<Run<'_, Recorded>> = pieces
                .iter()
                .zip(&mut states)
                .map(|(piece, state)| Run { tokens: &piece.tokens, state })
                .collect();
            let targets: Vec<&[u32]> = pieces.iter().map(|piece| &piece.targets[..]).collect();
            let weights: Vec<Vec<f32>> =
                pieces.iter().map(|piece| vec![weight; piece.tokens.len()]).collect();
            let weights: Vec<&[f32]> = weights.iter().map(Vec::as_slice).collect();
            let losses = model.losses(&mut runs, &targets, Some(&weights))?;
            for (piece, state) in pieces.iter().zip(states).filter(|_| carries) {
                carried[piece.slot] = Some(state);
            }
            let sum = losses.iter().flatten().map(|&loss| f64::from(loss)).sum();
            Ok((tape.backward()?, sum))
        })
    }
}
