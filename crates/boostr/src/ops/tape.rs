//! A client that records its operations, and takes their gradients.
//!
//! A model is written once, for any [`Backend`](crate::backend::Backend). On
//! [`Recorded`](crate::backend::Recorded) its operations run on the CPU as ever, and each leaves its
//! gradient function behind. So training runs the very forward that generates later, and a family's
//! file knows nothing of training.
//!
//! - Tensors are known by their memory: a view shares the gradient of its base.
//! - An operation writes to new memory. Its inputs are held, so nothing is updated in place. One
//!   gradient, as large as the storage, is then enough for each.
//! - The inputs of an operation must come from the tape itself. A copy made behind its back would lose
//!   its gradient, and is an error.
//!
//! Gradients are exact derivatives of the operations as they are computed in f32. Sums over tokens are
//! in a fixed order, so they have the same bits on any number of threads.

mod activation;
mod attention;
mod delta;
mod gradients;
mod linear;
mod segment;
mod ssm;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use numr::runtime::cpu::{self, CpuRuntime};
use numr::tensor::Tensor;

use self::gradients::Gradients;
use super::{Client, CpuClient, Level, TensorTree};
use crate::error::{Error, Result};

type Cpu = Tensor<CpuRuntime>;
type Backward = Box<dyn FnOnce(&mut Gradients) -> Result<()> + Send>;

/// Runs operations on the CPU and records how gradients go back through them.
///
/// Clones share what is recorded.
///
/// ```
/// use std::sync::Arc;
/// use boostr::backend::Cpu;
/// use boostr::ops::{self, Client, HostBytes, LinearOps, Tape};
///
/// let tape = Tape::new(boostr::backend::cpu(), |name| name == "head");
/// let bytes: Vec<u8> = [1.0f32, 0.0, 0.0, 1.0].into_iter().flat_map(f32::to_ne_bytes).collect();
/// let head = tape.weight(HostBytes::new(Arc::new(bytes), 0..16)?, ops::DType::F32, &[2, 2])?;
/// tape.parameter("head", &head);
/// let h = ops::tensor::<Cpu>(&tape, &[0.0, 0.0], &[1, 2])?;
/// let loss = tape.cross_entropy(&h, &head, 1.0, (&[1], &[1.0]), false)?;
/// assert_eq!(ops::to_vec(&loss)?, [2f32.ln()]);
/// let gradients = tape.backward()?;
/// assert_eq!(gradients["head"], [0.0; 4]); // softmax is (1/2, 1/2), but h is zero
/// # Ok::<(), boostr::Error>(())
/// ```
#[derive(Clone)]
pub struct Tape {
    inner: CpuClient,
    trains: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    /// Whether segments are run again on the way back.
    recomputes: bool,
    recording: Arc<Mutex<Recording>>,
    observed: Option<Arc<Mutex<Observed>>>,
}

/// A place in the recording of a [`Tape`].
#[derive(Debug, Clone, Copy)]
pub struct Mark {
    known: usize,
    held: usize,
    steps: usize,
    losses: usize,
}

/// What met the columns of a weight.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Inputs {
    /// Sums of squares, one for each column.
    pub squares: Vec<f64>,
    /// Rows that were multiplied.
    pub rows: usize,
}

/// The weights by the address of their memory, and what met them.
#[derive(Default)]
struct Observed {
    names: BTreeMap<usize, String>,
    inputs: BTreeMap<String, Inputs>,
}

#[derive(Default)]
struct Recording {
    gradients: Gradients,
    steps: Vec<Backward>,
    /// Keeps the memory of constants from becoming that of something else.
    held: Vec<Cpu>,
    /// How many losses gave gradients.
    losses: usize,
}

impl Tape {
    /// A tape that takes gradients of the parameters that `trains` names.
    #[must_use]
    pub fn new(inner: CpuClient, trains: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        let (trains, recording) = (Arc::new(trains), Arc::default());
        Self { inner, trains, recomputes: false, recording, observed: None }
    }

    /// The same tape; where `recomputes`, it keeps of each [segment](Client::segment) only what enters and
    /// leaves it, and runs it again on the way back.
    ///
    /// So a model's layers need memory one at a time, and a forward more of time. Gradients have the
    /// same bits.
    #[must_use]
    pub fn recomputing(self, recomputes: bool) -> Self {
        Self { recomputes, ..self }
    }

    /// The same tape, which also sums the squares of what the weights of its products meet.
    #[must_use]
    pub fn observing(self) -> Self {
        Self { observed: Some(Arc::default()), ..self }
    }

    /// What the weights of products met since the last call, by the names of parameters.
    #[must_use]
    pub fn observed(&self) -> BTreeMap<String, Inputs> {
        let observed = self.observed.as_ref();
        let take = |of: &Arc<Mutex<Observed>>| {
            std::mem::take(&mut of.lock().unwrap_or_else(PoisonError::into_inner).inputs)
        };
        observed.map(take).unwrap_or_default()
    }

    /// Adds the rows `x` to what the weight at this memory met.
    fn observe(&self, w: &Cpu, x: &Cpu) -> Result<()> {
        let Some(observed) = &self.observed else { return Ok(()) };
        let rows = super::to_vec(x)?;
        let mut observed = observed.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(name) = observed.names.get(&super::block(w).0).cloned() else { return Ok(()) };
        let columns = w.shape().last().copied().unwrap_or(1).max(1);
        let inputs = observed.inputs.entry(name).or_default();
        inputs.squares.resize(columns, 0.0);
        for row in rows.chunks_exact(columns) {
            inputs.rows += 1;
            for (sum, &x) in inputs.squares.iter_mut().zip(row) {
                *sum += f64::from(x) * f64::from(x);
            }
        }
        Ok(())
    }

    /// Gradients of the sum of all losses since the last call ([`cross_entropy`], each times its weight), by
    /// the names of parameters. What was recorded is forgotten.
    ///
    /// [`cross_entropy`]: super::LinearOps::cross_entropy
    ///
    /// # Errors
    ///
    /// When memory is short.
    pub fn backward(&self) -> Result<BTreeMap<String, Vec<f32>>> {
        let Recording { mut gradients, steps, held, .. } = std::mem::take(&mut *self.lock());
        boostr_kernels::awake(|| go_back(steps, &mut gradients))?;
        drop(held);
        Ok(gradients.into_parameters())
    }

    /// Where the recording is, to go [back](Self::back_to) to.
    #[must_use]
    pub fn mark(&self) -> Mark {
        let recording = self.lock();
        Mark {
            known: recording.gradients.len(),
            held: recording.held.len(),
            steps: recording.steps.len(),
            losses: recording.losses,
        }
    }

    /// Forgets what was recorded since `mark`. What the tape knew then it knows still: the parameters of a model, for
    /// instance, which can be run again.
    pub fn back_to(&self, mark: Mark) {
        let mut recording = self.lock();
        recording.steps.truncate(mark.steps);
        recording.gradients.truncate(mark.known);
        recording.held.truncate(mark.held);
        recording.losses = mark.losses;
    }

    /// The instruction set of its kernels.
    fn level(&self) -> Level {
        self.inner.level()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Recording> {
        self.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether any of `inputs` has a gradient; an error for one that the tape does not know.
    fn is_needed(&self, inputs: &[(&'static str, &Cpu)]) -> Result<bool> {
        let recording = self.lock();
        let mut is_needed = false;
        for (name, x) in inputs {
            match recording.gradients.needs(x) {
                Some(needs) => is_needed |= needs,
                None => {
                    let reason = "was not made by the tape: its gradient would be lost".into();
                    return Err(Error::Argument { name, reason });
                }
            }
        }
        Ok(is_needed)
    }

    /// Whether a gradient is wanted of a tensor that may be of before the recording.
    fn is_carried(&self, x: &Cpu) -> bool {
        self.lock().gradients.needs(x) == Some(true)
    }

    /// Adds outputs that have no gradient.
    fn add_constants(&self, outputs: &[&Cpu]) {
        let mut recording = self.lock();
        for out in outputs {
            recording.gradients.add(out, false, None);
            recording.held.push((*out).clone());
        }
    }

    /// Adds `outputs`, and the step that gives their gradients on.
    fn add_step(
        &self,
        outputs: &[&Cpu],
        backward: impl FnOnce(&mut Gradients) -> Result<()> + Send + 'static,
    ) {
        let mut recording = self.lock();
        for out in outputs {
            recording.gradients.add(out, true, None);
        }
        recording.steps.push(Box::new(backward));
    }

    /// Adds the one output of an operation on `inputs`: as a constant where none of them has a gradient.
    fn record(
        &self,
        inputs: &[(&'static str, &Cpu)],
        out: Cpu,
        backward: impl FnOnce(&mut Gradients, Vec<f32>) -> Result<()> + Send + 'static,
    ) -> Result<Cpu> {
        if !self.is_needed(inputs)? {
            self.add_constants(&[&out]);
            return Ok(out);
        }
        let of = out.clone();
        self.add_step(&[&out], move |gradients| match gradients.take(&of) {
            Some(dout) => backward(gradients, dout),
            None => Ok(()),
        });
        Ok(out)
    }
}

/// Takes `steps` from the last to the first; each forgets what it needed.
fn go_back(mut steps: Vec<Backward>, gradients: &mut Gradients) -> Result<()> {
    while let Some(step) = steps.pop() {
        step(gradients)?;
    }
    Ok(())
}

impl std::fmt::Debug for Tape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tape").field("steps", &self.lock().steps.len()).finish_non_exhaustive()
    }
}

impl Client<CpuRuntime> for Tape {
    type Library = cpu::CpuClient;

    fn library(&self) -> &cpu::CpuClient {
        self.inner.library()
    }

    fn made(&self, name: Option<&str>, x: &Cpu) {
        if let (Some(observed), Some(name)) = (&self.observed, name) {
            let mut observed = observed.lock().unwrap_or_else(PoisonError::into_inner);
            observed.names.insert(super::block(x).0, name.to_owned());
        }
        let name = name.filter(|name| (self.trains)(name));
        let mut recording = self.lock();
        recording.gradients.add(x, name.is_some(), name);
        // Borrowed memory is a weight's, which outlives the recording.
        if x.owns_memory() {
            recording.held.push(x.clone());
        }
    }

    fn segment<S: TensorTree<CpuRuntime>>(
        &self,
        input: S,
        run: impl Fn(&Self, S) -> Result<S> + Send + 'static,
    ) -> Result<S> {
        if self.recomputes { self.recompute(input, run) } else { run(self, input) }
    }
}
