//! The block of a model that predicts one token more: multi-token prediction (MTP), here a draft.
//!
//! ```text
//! embedding of token t + 1 ─ norm ─┐
//! hidden state of token t ── norm ─┴─ fc ─ layer ─ norm ─ head of the model ─ logits of token t + 2
//! ```
//!
//! The hidden state is what the model's head sees. What the block gives before the head may stand for the hidden state
//! of the next token, so that guesses go on. Its keys and values are not in a model's [`State`], nor in a state's file.
//!
//! Gloeckle et al. 2024, *Better & Faster Large Language Models via Multi-token Prediction*; DeepSeek-V3, section 2.2.

use std::sync::Arc;

use super::gguf;
use super::{Config, Model, State};
use crate::backend::{Backend, Tensor};
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::nn::{Batch, Layer, Linear, Params, RmsNorm, Slot, Tensors};
use crate::ops::{self, ActivationOps, KvType};

/// What a folder's tensors of the block are under.
const PREFIXES: [&str; 2] = ["mtp.", "model.mtp."];

/// Whether a tensor of a folder is of the block.
pub(super) fn is_of_block(name: &str) -> bool {
    PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// What the embedding's name ends with, after its prefix.
const EMBEDDING: &str = "embed_tokens.weight";

/// The block's weights.
pub struct Mtp<B: Backend> {
    /// Of the embedding and of the hidden state.
    norms: [RmsNorm<B>; 2],
    /// `[d_model, 2 d_model]`: of the embedding, then of the hidden state
    fc: Linear<B>,
    layer: Layer<B>,
    slots: [Arc<[Slot]>; 1],
    norm: RmsNorm<B>,
    kv_type: KvType,
    width: usize,
}

impl<B: Backend> Mtp<B> {
    /// Takes the block for `model` out of its file; `None` when the family has none, or the file has none.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] when its tensors are not those of the configuration, [`Error::Unsupported`] for one with an
    /// embedding of its own.
    pub fn load(model: &Model<B>, mut checkpoint: Checkpoint) -> Result<Option<Self>> {
        let Some(config) = model.family().next_block() else { return Ok(None) };
        let is_gguf = checkpoint.gguf().is_some();
        let names = if is_gguf {
            of_gguf(&mut checkpoint, model.family().layers().len())?
        } else {
            of_folder(&mut checkpoint)?
        };
        let Some(names) = names else { return Ok(None) };
        let mut joint = checkpoint.clone();
        joint.retain(|name| names.iter().any(|own| own == name));
        checkpoint.retain(|name| !names.iter().any(|own| own == name));
        Self::of_parts(model, &config, checkpoint, &joint, &names).map(Some)
    }

    fn of_parts(
        model: &Model<B>,
        config: &Config,
        mut checkpoint: Checkpoint,
        joint: &Checkpoint,
        names: &[String; 3],
    ) -> Result<Self> {
        let client = model.client();
        let family = config.family();
        let frame = family.frame();
        // The weights of zero-centred norms have the one in them in GGUF.
        let zero_centred = frame.zero_centred && joint.gguf().is_none();
        config.prepare(&mut checkpoint)?;
        let (params, width) = (Params::<B>::new(joint, client), frame.d_model);
        let mut expected = Tensors::default();
        for (name, shape) in names.iter().zip([&[width, 2 * width][..], &[width], &[width]]) {
            expected.add(name, shape);
        }
        expected.check(joint)?;
        let [fc, embedding, hidden] = names.each_ref().map(|name| params.under(stem(name)));
        let norm =
            |params: &Params<'_, B>| RmsNorm::load(params, width, frame.norm_eps, zero_centred);
        let block = Params::<B>::new(&checkpoint, client);
        let slots = family.layers().iter().map(|layer| layer.slots().into()).collect::<Vec<_>>();
        let mut layers = config.load(&block)?;
        let (Some(layer), Ok(slots)) = (layers.pop(), slots.try_into()) else {
            let what = format!("a block of {} that is not one layer", family.name());
            return Err(Error::Unsupported { what });
        };
        Ok(Self {
            norms: [norm(&embedding)?, norm(&hidden)?],
            fc: Linear::load(&fc, [width, 2 * width], false)?,
            layer,
            slots,
            norm: frame.load_norm(&block)?,
            kv_type: model.kv_type(),
            width,
        })
    }

    /// What the block remembers of a sequence of which it has seen nothing.
    ///
    /// # Errors
    ///
    /// When memory is short.
    pub fn new_state(&self, model: &Model<B>) -> Result<State<B>> {
        State::new(&self.slots, self.kv_type, model.client())
    }

    /// What the model's head sees after each of `tokens`, each of which follows a row of `hidden` `[T, d_model]`: the
    /// hidden states of the tokens that the block's logits predict from, `[T, d_model]`. Moves `state` on.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] when there are not as many rows as tokens; as [`Model::forward`].
    pub fn forward(
        &self,
        model: &Model<B>,
        state: &mut State<B>,
        hidden: &Tensor<B>,
        tokens: &[u32],
    ) -> Result<Tensor<B>> {
        let client = model.client();
        ops::expect("hidden", hidden, &[tokens.len(), self.width])?;
        model.awake(|| {
            let [of_embedding, of_hidden] = &self.norms;
            let embedded = of_embedding.forward(client, &model.embed(tokens)?)?;
            let hidden = of_hidden.forward(client, hidden)?;
            let both = client.concat_columns(&embedded, &hidden)?; // [T, 2 d_model]
            let h = self.fc.forward(client, &both)?;
            let mut batch = Batch::new(&[tokens.len()], &[state.position()], h.clone());
            state.swap(0, &mut batch.slots_mut()[0]);
            let h = self.layer.forward(client, h, &mut batch);
            state.swap(0, &mut batch.slots_mut()[0]);
            let h = h?;
            state.set_position(state.position() + tokens.len());
            self.norm.forward(client, &h)
        })
    }

    /// Bytes that a pass over the block's matrices reads.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.layer.weight_bytes() + self.fc.weight().size_in_bytes()
    }
}

/// A name without `.weight`.
fn stem(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

/// Refuses an embedding under what the block is under: the model's own serves.
fn refuse_own_embedding(checkpoint: &Checkpoint, prefix: &str) -> Result<()> {
    if checkpoint.get(&format!("{prefix}{EMBEDDING}")).is_none() {
        return Ok(());
    }
    let what = "a block for more than the next token with an embedding of its own".into();
    Err(Error::Unsupported { what })
}

/// Leaves in a checkpoint of a folder the block as the only layer of a model, and returns the names of fc and of the norms
/// before it; `None` if there is no block.
fn of_folder(checkpoint: &mut Checkpoint) -> Result<Option<[String; 3]>> {
    let fc = PREFIXES.map(|prefix| format!("{prefix}fc.weight"));
    let Some(at) = fc.iter().position(|name| checkpoint.get(name).is_some()) else {
        return Ok(None);
    };
    let prefix = PREFIXES[at];
    refuse_own_embedding(checkpoint, prefix)?;
    let embedding = checkpoint.names().find(|name| !is_of_block(name) && name.ends_with(EMBEDDING));
    let trunk =
        embedding.and_then(|name| name.strip_suffix(EMBEDDING)).unwrap_or("model.").to_owned();
    let kept = [format!("{trunk}{EMBEDDING}"), "lm_head.weight".to_owned()];
    checkpoint.retain(|name| is_of_block(name) || kept.iter().any(|own| own == name));
    let names = ["fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden"]
        .map(|part| format!("{prefix}{part}.weight"));
    checkpoint.rename(|name| {
        let part = name.strip_prefix(prefix)?;
        let is_of_layer = part.starts_with("layers.") || part.starts_with("norm.");
        is_of_layer.then(|| format!("{trunk}{part}"))
    })?;
    Ok(Some(names))
}

/// The same for a GGUF file, in which the block comes after the `n_layer` layers.
fn of_gguf(checkpoint: &mut Checkpoint, n_layer: usize) -> Result<Option<[String; 3]>> {
    let block = format!("blk.{n_layer}.");
    let next = format!("{block}nextn.");
    if checkpoint.get(&format!("{next}eh_proj.weight")).is_none() {
        return Ok(None);
    }
    refuse_own_embedding(checkpoint, &next)?;
    let around = [gguf::EMBEDDING, gguf::HEAD];
    checkpoint.retain(|name| name.starts_with(&block) || around.contains(&name));
    let norm = format!("{next}shared_head_norm.weight");
    checkpoint.rename(|name| match name.strip_prefix(&block) {
        Some(_) if name == norm => Some(gguf::NORM.to_owned()),
        Some(part) if !part.starts_with("nextn.") => Some(format!("blk.0.{part}")),
        _ => None,
    })?;
    Ok(Some(["eh_proj", "enorm", "hnorm"].map(|part| format!("{next}{part}.weight"))))
}
