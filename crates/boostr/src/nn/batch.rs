//! The rows that a forward takes through a layer, and what their sequences remember of it.

use std::sync::Arc;

use super::slots::Slots;
use crate::backend::{Backend, KvCache, Tensor};
use crate::error::{Error, Result};
use crate::ops::TensorTree;

/// The rows that a forward takes through a layer: where they belong, and what their sequences remember of it.
///
/// A clone is a fork: it shares memory until one of the two goes on.
#[derive(Clone)]
pub struct Batch<B: Backend> {
    /// Length of each run; they sum to T.
    runs: Arc<[usize]>,
    /// Position of each row in its sequence, `[T]`.
    positions: Arc<[usize]>,
    embeddings: Tensor<B>,
    /// What each run's sequence remembers of the layer that is run; nothing between two layers.
    slots: Vec<Slots<B>>,
}

impl<B: Backend> Batch<B> {
    /// Runs of `lengths` whose sequences have seen as many tokens as `positions` says; `embeddings`
    /// `[T, d_model]` entered the first layer.
    pub(crate) fn new(lengths: &[usize], positions: &[usize], embeddings: Tensor<B>) -> Self {
        let rows = positions.iter().zip(lengths).map(|(&first, &len)| first..first + len);
        Self {
            runs: lengths.into(),
            positions: rows.flatten().collect(),
            embeddings,
            slots: lengths.iter().map(|_| Slots::nothing()).collect(),
        }
    }

    /// What each run's sequence remembers of the layer that is run, to be swapped in and out.
    pub(crate) fn slots_mut(&mut self) -> &mut [Slots<B>] {
        &mut self.slots
    }

    /// What entered the first layer: `[T, d_model]`.
    #[must_use]
    pub fn embeddings(&self) -> &Tensor<B> {
        &self.embeddings
    }

    /// Length of each run.
    #[must_use]
    pub fn runs(&self) -> &[usize] {
        &self.runs
    }

    /// Position of each row in its sequence, `[T]`.
    #[must_use]
    pub fn positions(&self) -> &[usize] {
        &self.positions
    }

    /// Length of each run, and the tensor that its sequence has in the slot `name`: what an operation
    /// replaces by that after the run.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when the layer has no such slot of a fixed shape.
    pub fn tensors(&mut self, name: &'static str) -> Result<(&[usize], Vec<&mut Tensor<B>>)> {
        let tensors = self.slots.iter_mut().map(|slots| slots.tensor_mut(name));
        let tensors: Option<Vec<_>> = tensors.collect();
        Ok((&self.runs, tensors.ok_or_else(|| missing(name))?))
    }

    /// Length of each run, positions, and the keys and values that its sequence has in the slot `name`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when the layer has no such slot of rows.
    #[expect(clippy::type_complexity, reason = "three lists that belong together for one call")]
    pub fn rows(
        &mut self,
        name: &'static str,
    ) -> Result<(&[usize], &[usize], Vec<&mut KvCache<B>>)> {
        let caches = self.slots.iter_mut().map(|slots| slots.rows_mut(name));
        let caches: Option<Vec<_>> = caches.collect();
        Ok((&self.runs, &self.positions, caches.ok_or_else(|| missing(name))?))
    }
}

fn missing(slot: &'static str) -> Error {
    let reason = format!("the layer keeps no slot `{slot}` of this kind: do its parts name it?");
    Error::Argument { name: "batch", reason }
}

/// Rows `[T, d_model]` before or after a layer, and what they come with.
impl<B: Backend> TensorTree<B::Runtime> for (Tensor<B>, Batch<B>) {
    fn tensors(&self) -> Vec<&Tensor<B>> {
        let (h, batch) = self;
        std::iter::once(h).chain(batch.slots.iter().flat_map(Slots::tensors)).collect()
    }
}
