//! What a sequence remembers.

use std::sync::Arc;

use crate::backend::{Backend, KvCache, Tensor};
use crate::error::{Error, Result};
use crate::nn::{Kept, Slot, Slots};
use crate::ops::KvType;

/// What one sequence remembers of all layers: for each layer the slots that its parts name. Slots of a fixed
/// shape are constant in size; keys and values grow with each token, up to their window where they have one.
///
/// A clone is a fork: it shares memory until one of the two goes on.
#[derive(Debug, Clone)]
pub struct State<B: Backend> {
    layers: Vec<Slots<B>>,
    position: usize,
}

impl<B: Backend> State<B> {
    /// The state of a sequence that has seen nothing, keys and values as `kind`.
    pub(super) fn new(layers: &[Arc<[Slot]>], kind: KvType, client: &B::Client) -> Result<Self> {
        let layers = layers.iter().map(|slots| Slots::new(slots.clone(), kind, client));
        Ok(Self { layers: layers.collect::<Result<_>>()?, position: 0 })
    }

    /// What stands where a state was taken out: one of no model.
    pub(crate) fn nothing() -> Self {
        Self { layers: Vec::new(), position: 0 }
    }

    /// Tokens that this state has seen.
    #[must_use]
    pub fn position(&self) -> usize {
        self.position
    }

    /// Takes this state for one that has seen `position` tokens, as one does that was saved and put together
    /// again; with keys and values, for no other than they say.
    pub fn set_position(&mut self, position: usize) {
        self.position = position;
    }

    /// Bytes of all its tensors.
    #[must_use]
    pub fn size_in_bytes(&self) -> usize {
        self.layers.iter().map(Slots::size_in_bytes).sum()
    }

    /// The pieces of memory that it is made of, each as its address and its bytes: forks share some.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        self.layers.iter().flat_map(Slots::blocks)
    }

    /// Whether [`cut`](Self::cut) gives a state.
    pub(crate) fn can_cut(&self, len: usize) -> bool {
        let layers = &self.layers;
        len <= self.position && layers.iter().all(|slots| slots.can_cut(self.position, len))
    }

    /// A fork that has seen the first `len` tokens alone, to the bit. Only keys and values can be cut back, and with
    /// windows only while those that the next token sees are there: `None` elsewhere.
    pub(crate) fn cut(&self, len: usize) -> Option<Self> {
        let mut cut = self.can_cut(len).then(|| self.clone())?;
        cut.position = len;
        cut.layers.iter_mut().for_each(|slots| slots.cut(len));
        cut.can_cut(len).then_some(cut)
    }

    /// Number of layers.
    #[must_use]
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// The slots of one layer; `None` when there is no such layer.
    #[must_use]
    pub fn layer(&self, layer: usize) -> Option<&Slots<B>> {
        self.layers.get(layer)
    }

    /// All slots: the layer, the slot and what it keeps.
    pub fn slots(&self) -> impl Iterator<Item = (usize, &Slot, &Kept<B>)> {
        let layers = self.layers.iter().enumerate();
        layers.flat_map(|(layer, slots)| slots.iter().map(move |(slot, kept)| (layer, slot, kept)))
    }

    /// One layer's convolution window `[d_conv - 1, conv_dim]`, oldest input first; `None` for a layer
    /// without a mixer.
    #[must_use]
    pub fn conv(&self, layer: usize) -> Option<&Tensor<B>> {
        self.layer(layer)?.tensor("conv")
    }

    /// One layer's SSM state `[H, P, N]`; `None` for a layer without a mixer.
    #[must_use]
    pub fn ssm(&self, layer: usize) -> Option<&Tensor<B>> {
        self.layer(layer)?.tensor("ssm")
    }

    /// One layer's keys and values, without those that its window has left behind; `None` for a layer without attention.
    #[must_use]
    pub fn kv(&self, layer: usize) -> Option<&KvCache<B>> {
        self.layer(layer)?.rows("kv")
    }

    /// Replaces what the slot `name` of a layer keeps. Keys and values may be of another type.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when the layer has no such slot, [`Error::Shape`] when the shape, or heads and
    /// widths, are others.
    pub fn set(&mut self, layer: usize, name: &str, kept: Kept<B>) -> Result<()> {
        let count = self.layers.len();
        if let Some(slots) = self.layers.get_mut(layer)
            && slots.set(name, kept)?
        {
            return Ok(());
        }
        let having = self.layers.iter().filter(|slots| slots.get(name).is_some()).count();
        let reason = format!(
            "expected one of the {having} layers of {count} with a slot `{name}`, found {layer}"
        );
        Err(Error::Argument { name: "layer", reason })
    }

    /// Replaces one layer's convolution window.
    ///
    /// # Errors
    ///
    /// When the layer has none or the shape or type is another.
    pub fn set_conv(&mut self, layer: usize, conv: Tensor<B>) -> Result<()> {
        self.set(layer, "conv", Kept::Tensor(conv))
    }

    /// Replaces one layer's SSM state.
    ///
    /// # Errors
    ///
    /// When the layer has none or the shape or type is another.
    pub fn set_ssm(&mut self, layer: usize, ssm: Tensor<B>) -> Result<()> {
        self.set(layer, "ssm", Kept::Tensor(ssm))
    }

    /// Replaces one layer's keys and values; their type may be another.
    ///
    /// # Errors
    ///
    /// When the layer has none or their heads and widths are others.
    pub fn set_kv(&mut self, layer: usize, cache: KvCache<B>) -> Result<()> {
        self.set(layer, "kv", Kept::Rows(cache))
    }

    /// Checks that this is a state for layers with these slots.
    pub(super) fn check(&self, layers: &[Arc<[Slot]>]) -> Result<()> {
        if self.layers.len() != layers.len() {
            let (expected, got) = (vec![layers.len()], vec![self.layers.len()]);
            return Err(Error::Shape { name: "state layers".into(), expected, got });
        }
        self.layers
            .iter()
            .zip(layers)
            .enumerate()
            .try_for_each(|(i, (own, slots))| own.check(i, slots))
    }

    /// Swaps what is remembered of `layer` with `slots`.
    pub(super) fn swap(&mut self, layer: usize, slots: &mut Slots<B>) {
        std::mem::swap(slots, &mut self.layers[layer]);
    }
}
