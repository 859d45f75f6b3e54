//! What a sequence remembers.

use std::sync::Arc;

use crate::backend::{Backend, KvCache, Tensor};
use crate::error::{Error, Result};
use crate::nn::{AttentionConfig, MixerConfig, MixerState};
use crate::ops::{self, AttentionOps, KvSizes, KvType, TensorTree};

use super::LayerSpec;

/// What one sequence remembers of all layers: what Mamba-2 mixers keep is constant in size, what
/// attention keeps grows with each token, up to its window where it has one.
///
/// A clone is a fork: it shares memory until one of the two goes on.
#[derive(Debug, Clone)]
pub struct State<B: Backend> {
    layers: Vec<LayerState<B>>,
    position: usize,
}

/// What one layer keeps; both are there where attention and mixer stand side by side.
#[derive(Debug, Clone)]
pub(super) struct LayerState<B: Backend> {
    mixer: Option<MixerState<B>>,
    cache: Option<KvCache<B>>,
}

impl<B: Backend> State<B> {
    /// The state of a sequence that has seen nothing.
    pub(super) fn new(layers: &[LayerSpec], kind: KvType, client: &B::Client) -> Result<Self> {
        let layers = layers.iter().map(|layer| {
            let mixer = layer.mixer.as_ref().map(|config| MixerState::new(config, client));
            let cache = layer.attention.as_ref().map(|config| client.new_cache(config.cache(kind)));
            Ok(LayerState { mixer: mixer.transpose()?, cache: cache.transpose()? })
        });
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
        let mixers = self.layers.iter().filter_map(|layer| layer.mixer.as_ref());
        let caches = self.layers.iter().filter_map(|layer| layer.cache.as_ref());
        mixers.map(|s| 4 * (s.conv.numel() + s.ssm.numel())).sum::<usize>()
            + caches.map(ops::KvCache::size_in_bytes).sum::<usize>()
    }

    /// The pieces of memory that it is made of, each as its address and its bytes: forks share some.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        self.layers.iter().flat_map(|layer| {
            let mixer = layer.mixer.iter().flat_map(|mixer| [&mixer.conv, &mixer.ssm]);
            let cache = layer.cache.iter().flat_map(ops::KvCache::blocks);
            mixer.map(ops::block).chain(cache)
        })
    }

    /// Number of layers.
    #[must_use]
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// One layer's convolution window `[d_conv - 1, conv_dim]`, oldest input first; `None` for a layer
    /// without a mixer.
    #[must_use]
    pub fn conv(&self, layer: usize) -> Option<&Tensor<B>> {
        Some(&self.layers.get(layer)?.mixer.as_ref()?.conv)
    }

    /// One layer's SSM state `[H, P, N]`; `None` for a layer without a mixer.
    #[must_use]
    pub fn ssm(&self, layer: usize) -> Option<&Tensor<B>> {
        Some(&self.layers.get(layer)?.mixer.as_ref()?.ssm)
    }

    /// One layer's keys and values, without those that its window has left behind; `None` for a layer without attention.
    #[must_use]
    pub fn kv(&self, layer: usize) -> Option<&KvCache<B>> {
        self.layers.get(layer)?.cache.as_ref()
    }

    /// Replaces one layer's convolution window.
    ///
    /// # Errors
    ///
    /// When the layer has none or the shape or type is another.
    pub fn set_conv(&mut self, layer: usize, conv: Tensor<B>) -> Result<()> {
        let state = self.mixer_mut(layer)?;
        ops::check_like("conv", &conv, &state.conv)?;
        state.conv = conv;
        Ok(())
    }

    /// Replaces one layer's SSM state.
    ///
    /// # Errors
    ///
    /// When the layer has none or the shape or type is another.
    pub fn set_ssm(&mut self, layer: usize, ssm: Tensor<B>) -> Result<()> {
        let state = self.mixer_mut(layer)?;
        ops::check_like("ssm", &ssm, &state.ssm)?;
        state.ssm = ssm;
        Ok(())
    }

    /// Replaces one layer's keys and values; their type may be another.
    ///
    /// # Errors
    ///
    /// When the layer has none or their heads and widths are others.
    pub fn set_kv(&mut self, layer: usize, cache: KvCache<B>) -> Result<()> {
        let caches = self.layers.iter().filter(|layer| layer.cache.is_some()).count();
        let count = self.layers.len();
        let old = self.layers.get_mut(layer).and_then(|layer| layer.cache.as_mut());
        let Some(old) = old else {
            let reason =
                format!("expected one of the {caches} attentions of {count} layers, found {layer}");
            return Err(Error::Argument { name: "layer", reason });
        };
        check_sizes(old.sizes(), cache.sizes())?;
        *old = cache;
        Ok(())
    }

    fn mixer_mut(&mut self, layer: usize) -> Result<&mut MixerState<B>> {
        let mixers = self.layers.iter().filter(|layer| layer.mixer.is_some()).count();
        let count = self.layers.len();
        self.layers.get_mut(layer).and_then(|layer| layer.mixer.as_mut()).ok_or_else(|| {
            let reason =
                format!("expected one of the {mixers} mixers of {count} layers, found {layer}");
            Error::Argument { name: "layer", reason }
        })
    }

    /// Checks that this is a state for `layers`.
    pub(super) fn check(&self, layers: &[LayerSpec]) -> Result<()> {
        if self.layers.len() != layers.len() {
            let (expected, got) = (vec![layers.len()], vec![self.layers.len()]);
            return Err(Error::Shape { name: "state layers".into(), expected, got });
        }
        let is_other = |i: usize| -> Error {
            let what = format!("state of another model: layer {i} keeps something else");
            Error::Unsupported { what }
        };
        for (i, (state, spec)) in self.layers.iter().zip(layers).enumerate() {
            match (&state.mixer, &spec.mixer) {
                (None, None) => {}
                (Some(mixer), Some(config)) => check_mixer(mixer, config)?,
                _ => return Err(is_other(i)),
            }
            match (&state.cache, &spec.attention) {
                (None, None) => {}
                (Some(cache), Some(config)) => check_cache::<B>(cache, config)?,
                _ => return Err(is_other(i)),
            }
        }
        Ok(())
    }
}

fn check_mixer<B: Backend>(state: &MixerState<B>, config: &MixerConfig) -> Result<()> {
    let [conv, ssm] = MixerState::<B>::shapes(config);
    ops::expect("state conv", &state.conv, &conv)?;
    ops::expect("state ssm", &state.ssm, &ssm)
}

fn check_cache<B: Backend>(cache: &KvCache<B>, config: &AttentionConfig) -> Result<()> {
    let found = cache.sizes();
    check_sizes(config.cache(found.kind), found)?;
    cache.check_window(config.window)
}

/// Checks that keys and values are of the expected sizes, whatever their type.
fn check_sizes(expected: KvSizes, found: KvSizes) -> Result<()> {
    if found == (KvSizes { kind: found.kind, ..expected }) {
        return Ok(());
    }
    let shape = |sizes: KvSizes| vec![sizes.nheads, sizes.d_key, sizes.d_value];
    let (expected, got) = (shape(expected), shape(found));
    Err(Error::Shape { name: "state kv".into(), expected, got })
}

/// The rows that a forward takes through a layer: where they belong, and what their sequences remember of it.
///
/// A clone is a fork, as one of a [`State`] is.
#[derive(Clone)]
pub struct Batch<B: Backend> {
    /// Length of each run; they sum to T.
    runs: Arc<[usize]>,
    /// Position of each row in its sequence, `[T]`.
    positions: Arc<[usize]>,
    embeddings: Tensor<B>,
    /// What each run's sequence remembers of the layer that is run; nothing between two layers.
    layers: Vec<LayerState<B>>,
}

impl<B: Backend> Batch<B> {
    pub(super) fn new(runs: &[usize], states: &[&mut State<B>], embeddings: Tensor<B>) -> Self {
        let rows = states.iter().zip(runs).map(|(s, &len)| s.position..s.position + len);
        let nothing = |_| LayerState { mixer: None, cache: None };
        Self {
            runs: runs.into(),
            positions: rows.flatten().collect(),
            embeddings,
            layers: states.iter().map(nothing).collect(),
        }
    }

    /// Brings in what `states` remember of `layer`, or takes it back to them.
    pub(super) fn swap(&mut self, layer: usize, states: &mut [&mut State<B>]) {
        for (own, state) in self.layers.iter_mut().zip(states) {
            std::mem::swap(own, &mut state.layers[layer]);
        }
    }

    /// What entered the first layer: `[T, d_model]`.
    pub(super) fn embeddings(&self) -> &Tensor<B> {
        &self.embeddings
    }

    /// Length of each run, and what its mixer remembers.
    pub(super) fn mixers(&mut self) -> (&[usize], Vec<&mut MixerState<B>>) {
        let layers = self.layers.iter_mut();
        (&self.runs, layers.filter_map(|layer| layer.mixer.as_mut()).collect())
    }

    /// Length of each run, positions, and what its attention keeps.
    pub(super) fn caches(&mut self) -> (&[usize], &[usize], Vec<&mut KvCache<B>>) {
        let caches = self.layers.iter_mut().filter_map(|layer| layer.cache.as_mut()).collect();
        (&self.runs, &self.positions, caches)
    }
}

/// Rows `[T, d_model]` before or after a layer, and what they come with.
impl<B: Backend> TensorTree<B::Runtime> for (Tensor<B>, Batch<B>) {
    fn tensors(&self) -> Vec<&Tensor<B>> {
        let (h, batch) = self;
        let mut tensors = vec![h];
        for layer in &batch.layers {
            tensors.extend(layer.mixer.iter().flat_map(|mixer| [&mixer.conv, &mixer.ssm]));
            tensors.extend(layer.cache.iter().flat_map(ops::KvCache::rows));
        }
        tensors
    }
}
