//! Segments that the backward pass runs again.
//!
//! The tape keeps only the inputs and outputs of a segment. The backward pass runs it once more, on a
//! tape of its own that is lent the gradients. There parameters and inputs are known by the same memory
//! as before. The new outputs take over the gradients of the old ones, and the backward steps of the
//! segment follow. So each gradient is a sum of the same terms in the same order as without
//! recomputing, and has the same bits.

use std::sync::{Arc, Mutex};

use numr::runtime::cpu::CpuRuntime;

use super::{Cpu, Recording, Tape, TensorTree, go_back};
use crate::error::{Error, Result};

impl Tape {
    pub(super) fn recompute<S: TensorTree<CpuRuntime>>(
        &self,
        input: S,
        run: impl Fn(&Self, S) -> Result<S> + Send + 'static,
    ) -> Result<S> {
        let mark = self.lock().mark();
        let before = input.clone();
        let after = run(self, input)?;
        let Made { outputs, constants } = self.lock().forget_after(&mark, &after)?;
        self.add_constants(&constants.iter().collect::<Vec<_>>());
        if outputs.is_empty() {
            return Ok(after);
        }
        let tensors: Vec<Cpu> = outputs.iter().map(|(_, out)| out.clone()).collect();
        let tensors: Vec<&Cpu> = tensors.iter().collect();
        // A clone of the tape would hold the recording, which holds this step.
        let (inner, trains, recomputes) =
            (self.inner.clone(), self.trains.clone(), self.recomputes);
        self.add_step(&tensors, move |gradients| {
            let douts: Vec<_> = outputs
                .into_iter()
                .filter_map(|(place, out)| Some((place, gradients.take(&out)?)))
                .collect();
            if douts.is_empty() {
                return Ok(());
            }
            let known = gradients.len();
            let lent = Recording { gradients: std::mem::take(gradients), ..Recording::default() };
            let recording = Arc::new(Mutex::new(lent));
            // What its products meet was observed the first time.
            let tape = Self { inner, trains, recomputes, recording, observed: None };
            let again = run(&tape, before)?;
            let Recording { gradients: returned, steps, held, .. } =
                std::mem::take(&mut *tape.lock());
            *gradients = returned;
            let tensors = again.tensors();
            for (place, dout) in douts {
                let out = tensors.get(place);
                out.and_then(|out| gradients.put(out, dout)).ok_or_else(|| {
                    let what = "a segment that gives other tensors when it is run again".into();
                    Error::Unsupported { what }
                })?;
            }
            drop(again);
            go_back(steps, gradients)?;
            drop(held);
            gradients.truncate(known);
            Ok(())
        });
        Ok(after)
    }
}

/// How much a recording has.
struct Mark {
    steps: usize,
    held: usize,
    known: usize,
    losses: usize,
}

/// What left a segment and was made in it.
#[derive(Default)]
struct Made {
    /// Tensors that have a gradient, by their places among all that left.
    outputs: Vec<(usize, Cpu)>,
    constants: Vec<Cpu>,
}

impl Recording {
    fn mark(&self) -> Mark {
        let Self { gradients, steps, held, losses } = self;
        Mark { steps: steps.len(), held: held.len(), known: gradients.len(), losses: *losses }
    }

    /// Forgets what was recorded since `mark`; returns what `after` has of it.
    fn forget_after(&mut self, mark: &Mark, after: &impl TensorTree<CpuRuntime>) -> Result<Made> {
        if self.losses != mark.losses {
            let what = "a loss in a segment that is run again: its gradient would count twice";
            return Err(Error::Unsupported { what: what.into() });
        }
        let mut made = Made::default();
        for (place, x) in after.tensors().into_iter().enumerate() {
            if !self.gradients.is_after(mark.known, x) {
                continue;
            }
            if self.gradients.wants(x) {
                made.outputs.push((place, x.clone()));
            } else {
                made.constants.push(x.clone());
            }
        }
        self.steps.truncate(mark.steps);
        self.held.truncate(mark.held);
        self.gradients.truncate(mark.known);
        Ok(made)
    }
}
