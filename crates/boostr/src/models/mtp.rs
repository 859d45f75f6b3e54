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
//! Its parameters are called `mtp.fc`, `mtp.pre_fc_norm_embedding` and `mtp.pre_fc_norm_hidden`. Those of its layer and
//! of its last norm are called as if it were a model of one layer, under `mtp`: `mtp.model.layers.0`, `mtp.model.norm`.
//!
//! Gloeckle et al. 2024, *Better & Faster Large Language Models via Multi-token Prediction*; DeepSeek-V3, section 2.2.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::gguf::{self, Keys, KeysMut};
use super::{Config, Model, State};
use crate::backend::{Backend, Tensor};
use crate::checkpoint::gguf::Metadata;
use crate::checkpoint::{Checkpoint, Dtype, TensorEntry};
use crate::error::{Error, Result};
use crate::nn::{
    Batch, How, Layer, Layout, Linear, Pack, Packs, Params, RmsNorm, Row, Slot, Tensors,
};
use crate::ops::{self, ActivationOps, KvType};

/// What a folder's tensors of the block are under.
const PREFIXES: [&str; 3] = ["mtp.", "model.mtp.", "model.language_model.mtp."];

/// Whether a tensor of a folder is of the block.
pub(super) fn is_of_block(name: &str) -> bool {
    PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// What the embedding's name ends with, after its prefix.
const EMBEDDING: &str = "embed_tokens.weight";

/// What a head is called, in a folder and in GGUF.
const HEAD: &str = "lm_head.weight";
const HEAD_GGUF: &str = "shared_head_head.weight";

/// What the parameters are under.
const PREFIX: &str = "mtp.";
/// The parameters before the layer.
const JOINT: [&str; 3] =
    ["mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"];
/// What GGUF calls them.
const JOINT_GGUF: [&str; 3] = ["eh_proj.weight", "enorm.weight", "hnorm.weight"];
/// What GGUF calls the last norm.
const NORM_GGUF: &str = "shared_head_norm.weight";

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
    /// Bytes of the weights that lie in files, and of those in memory.
    placed: [usize; 2],
    /// The file of packed experts.
    packs: Option<Arc<Packs>>,
}

impl<B: Backend> Mtp<B> {
    /// Takes the block for `model` out of its file; `None` when the family has none, or the file has none.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] when its tensors are not those of the configuration, [`Error::Unsupported`] for one with an
    /// embedding or a head of its own, and for a second block.
    pub fn load(model: &Model<B>, checkpoint: Checkpoint) -> Result<Option<Self>> {
        let Some(checkpoint) = parameters(model.config(), checkpoint)? else { return Ok(None) };
        Self::of(model, &checkpoint, None).map(Some)
    }

    /// The blocks of the experts among its [`parameters`].
    pub(crate) fn packs(model: &Model<B>, parameters: &Checkpoint) -> Result<Vec<Pack>> {
        let packs =
            |config: Config| config.packs::<B>(parameters, model.client(), Some(stem(PREFIX)));
        model.family().next_block().map_or_else(|| Ok(Vec::new()), packs)
    }

    /// The block of these parameters, whose experts may be in `packs`.
    pub(crate) fn of(
        model: &Model<B>,
        checkpoint: &Checkpoint,
        packs: Option<Arc<Packs>>,
    ) -> Result<Self> {
        let Some(config) = model.family().next_block() else {
            let what = format!("a block for one token more of {}", model.family().name());
            return Err(Error::Unsupported { what });
        };
        let client = model.client();
        let family = config.family();
        let frame = family.frame();
        let width = frame.d_model;
        let root = Params::<B>::new(checkpoint, client).packed_in(packs.as_deref());
        let block = root.under(stem(PREFIX));
        let norm = |params: &Params<'_, B>| {
            RmsNorm::load(params, width, frame.norm_eps, frame.zero_centred)
        };
        let slots = family.layers().iter().map(|layer| layer.slots().into()).collect::<Vec<_>>();
        let mut layers = config.load(&block)?;
        let (Some(layer), Ok(slots)) = (layers.pop(), slots.try_into()) else {
            let what = format!("a block of {} that is not one layer", family.name());
            return Err(Error::Unsupported { what });
        };
        let [fc, embedding, hidden] = JOINT.map(|name| root.under(stem(name)));
        let fc = Linear::load(&fc, [width, 2 * width], false)?;
        let (norms, norm) = ([norm(&embedding)?, norm(&hidden)?], frame.load_norm(&block)?);
        let (kv_type, placed) = (model.kv_type(), root.placed());
        Ok(Self { norms, fc, layer, slots, norm, kv_type, width, placed, packs })
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
        if let Some(packs) = &self.packs {
            packs.look();
        }
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

    /// Bytes of the matrices that lie in files, and of those in memory, as [`Model::placed`].
    #[must_use]
    pub fn placed(&self) -> [usize; 2] {
        self.placed
    }

    /// Bytes that a pass over the block's matrices reads.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.layer.weight_bytes() + self.fc.weight().size_in_bytes()
    }
}

/// A name without `.weight`, and a prefix without its point.
fn stem(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name).trim_end_matches('.')
}

/// The block's parameters, out of the file of a model; `None` when the family has none, or the file has none.
///
/// # Errors
///
/// As [`Mtp::load`].
pub(crate) fn parameters(
    config: &Config,
    mut checkpoint: Checkpoint,
) -> Result<Option<Checkpoint>> {
    let Some(block) = config.family().next_block() else { return Ok(None) };
    let is_gguf = checkpoint.gguf().is_some();
    let n_layer = config.family().layers().len();
    check_types(&checkpoint, n_layer)?;
    let there: BTreeSet<String> = checkpoint.names().map(str::to_owned).collect();
    let names =
        if is_gguf { of_gguf(&mut checkpoint, n_layer)? } else { of_folder(&mut checkpoint)? };
    let Some(names) = names else { return Ok(None) };
    let prefix = names[0].strip_suffix("fc.weight").filter(|_| !is_gguf);
    missing(config, &checkpoint, &there, prefix)?;
    let mut joint = checkpoint.clone();
    joint.retain(|name| names.iter().any(|own| own == name));
    checkpoint.retain(|name| !names.iter().any(|own| own == name));
    joint_layout(&block, &names, is_gguf).read(&mut joint)?;
    let prepared = block.prepare(&mut checkpoint);
    prepared.map_err(|error| as_in_file(error, prefix, n_layer))?;
    let around = around(&block);
    checkpoint.retain(|name| !around.contains(&stem(name)));
    checkpoint.rename(|name| Some(format!("{PREFIX}{name}")))?;
    checkpoint.add(&joint);
    Ok(Some(checkpoint))
}

/// Whether the file of a model has its block for one token more, whole, as far as names tell; `false` where there is none.
///
/// # Errors
///
/// As [`Mtp::load`].
pub fn next_block(config: &Config, checkpoint: &Checkpoint) -> Result<bool> {
    parameters(config, checkpoint.clone()).map(|found| found.is_some())
}

/// Refuses tensors of a block that are no floats.
fn check_types(checkpoint: &Checkpoint, n_layer: usize) -> Result<()> {
    let is_gguf = checkpoint.gguf().is_some();
    let is_own = |name: &str| {
        if is_gguf { gguf::is_next_layer(name, n_layer) } else { is_of_block(name) }
    };
    let is_number = |entry: &TensorEntry| {
        matches!(entry.dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::Block(_))
    };
    match checkpoint.iter().find(|(name, entry)| is_own(name) && !is_number(entry)) {
        None => Ok(()),
        Some((name, entry)) => {
            let reason = format!("`{name}` is {}, expected floats", entry.dtype.name());
            Err(Error::Tensors { path: checkpoint.path().to_path_buf(), reason })
        }
    }
}

/// An error that calls the block's tensors as those of a model of one layer, with the names that they have in the file.
fn as_in_file(error: Error, prefix: Option<&str>, n_layer: usize) -> Error {
    let Error::Tensors { path, reason } = error else { return error };
    let reason = match prefix {
        Some(prefix) => ["model.language_model.", "model."].iter().fold(reason, |text, trunk| {
            let text = text.replace(&format!("`{trunk}layers."), &format!("`{prefix}layers."));
            text.replace(&format!("`{trunk}norm."), &format!("`{prefix}norm."))
        }),
        None => {
            let norm = format!("`blk.{n_layer}.nextn.{NORM_GGUF}`");
            let text = reason.replace("`blk.0.", &format!("`blk.{n_layer}."));
            text.replace(&format!("`{}`", gguf::NORM), &norm)
        }
    };
    Error::Tensors { path, reason }
}

/// Refuses a block of which a tensor is missing, by the name that it has in the file. Experts come in several forms, so
/// they are left to who loads them.
fn missing(
    config: &Config,
    checkpoint: &Checkpoint,
    there: &BTreeSet<String>,
    prefix: Option<&str>,
) -> Result<()> {
    let stored = layout(config, prefix.is_none())?.0.into_iter().map(|stored| match prefix {
        Some(prefix) => stored.name.replacen(PREFIX, prefix, 1),
        None => stored.name,
    });
    let is_experts = |name: &str| name.contains(".experts.") || name.contains("_exps.");
    let is_missing = |name: &String| !there.contains(name) && !is_experts(name);
    let missing: Vec<String> =
        stored.filter(is_missing).map(|name| format!("`{name}`")).take(5).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(lacks(checkpoint, &missing))
}

/// The error of a block without some tensors.
fn lacks(checkpoint: &Checkpoint, names: &[String]) -> Error {
    let reason = format!("the block for one token more lacks {}", names.join(", "));
    Error::Tensors { path: checkpoint.path().to_path_buf(), reason }
}

/// The embedding and the head, which are the model's.
fn around(block: &Config) -> [&'static str; 2] {
    let names = block.family().frame().names;
    [names.embeddings, names.head]
}

/// The tensors before the layer, which a file calls `names`.
fn joint_layout(block: &Config, names: &[String; 3], is_gguf: bool) -> Layout {
    let frame = block.family().frame();
    let width = frame.d_model;
    let mut parameters = Tensors::default();
    for (name, shape) in JOINT.iter().zip([&[width, 2 * width][..], &[width], &[width]]) {
        parameters.add(*name, shape);
    }
    // The weights of zero-centred norms have the one in them in GGUF.
    let norm = if frame.zero_centred && is_gguf { How::PlusOne } else { How::Same };
    let rows = names.iter().zip(JOINT).zip([How::Same, norm.clone(), norm]);
    let rows: Vec<Row> =
        rows.map(|((file, parameter), how)| Row::new(file.as_str(), parameter).how(how)).collect();
    Layout::new(&parameters, &rows, 0)
}

/// The tensors of the block in the file of a model; empty when the family has none.
///
/// # Errors
///
/// [`Error::Unsupported`] for what GGUF has no place for.
pub(crate) fn layout(config: &Config, to_gguf: bool) -> Result<Layout> {
    let Some(block) = config.family().next_block() else { return Ok(Layout::default()) };
    let family = block.family();
    let after = format!("blk.{}.", config.family().layers().len());
    let next = format!("{after}nextn.");
    let mut layout =
        if to_gguf { family.gguf_layout(1, false)? } else { family.hf_layout(1, false)? };
    let around = around(&block);
    let is_own = |name: &str| !around.contains(&stem(name));
    // What no parameter holds stands in the file once.
    layout.0.retain(|stored| stored.parts.first().is_some_and(|part| is_own(&part.name)));
    for stored in &mut layout.0 {
        for part in &mut stored.parts {
            part.name.insert_str(0, PREFIX);
        }
        stored.name = match &stored.name {
            name if name == gguf::NORM => format!("{next}{NORM_GGUF}"),
            name if to_gguf => name.replacen("blk.0.", &after, 1),
            name => name.replacen("model.", PREFIX, 1),
        };
    }
    let names = if to_gguf {
        JOINT_GGUF.map(|name| format!("{next}{name}"))
    } else {
        JOINT.map(str::to_owned)
    };
    layout.0.extend(joint_layout(&block, &names, to_gguf).0);
    Ok(layout)
}

/// Writes into the metadata of a GGUF file of `config` that the block comes after its layers.
///
/// # Errors
///
/// As for any key that is something else.
pub(crate) fn write_gguf(config: &Config, metadata: &mut Metadata) -> Result<()> {
    const RECURRENT: &str = "attention.recurrent_layers";
    let family = config.family();
    let Some(arch) = family.arch() else { return Ok(()) };
    let n_layer = family.layers().len();
    let recurrent = metadata.bools(&Keys::new(metadata, arch).key(RECURRENT))?;
    let mut keys = KeysMut::new(metadata, arch);
    keys.size("block_count", n_layer + 1);
    keys.size(gguf::NEXT, 1);
    if let Some(mut recurrent) = recurrent {
        recurrent.resize(n_layer + 1, false);
        keys.set(RECURRENT, recurrent.as_slice());
    }
    Ok(())
}

/// Refuses an embedding or a head under what the block is under: the model's own serve.
fn refuse_own_tables(checkpoint: &Checkpoint, prefix: &str) -> Result<()> {
    let own = [(EMBEDDING, "an embedding"), (HEAD, "a head"), (HEAD_GGUF, "a head")];
    let mut own = own.into_iter();
    let is_there = |(name, _): &(&str, &str)| checkpoint.get(&format!("{prefix}{name}")).is_some();
    match own.find(is_there) {
        None => Ok(()),
        Some((name, of)) => {
            let what = format!(
                "a block for more than the next token with {of} of its own, `{prefix}{name}`"
            );
            Err(Error::Unsupported { what })
        }
    }
}

/// Leaves in a checkpoint of a folder the block as the only layer of a model, and returns the names of fc and of the norms
/// before it; `None` if there is no block.
fn of_folder(checkpoint: &mut Checkpoint) -> Result<Option<[String; 3]>> {
    let fc = PREFIXES.map(|prefix| format!("{prefix}fc.weight"));
    let Some(at) = fc.iter().position(|name| checkpoint.get(name).is_some()) else {
        let prefix =
            PREFIXES.iter().find(|it| checkpoint.names().any(|name| name.starts_with(**it)));
        return prefix.map_or(Ok(None), |it| Err(lacks(checkpoint, &[format!("`{it}fc.weight`")])));
    };
    let prefix = PREFIXES[at];
    refuse_own_tables(checkpoint, prefix)?;
    let embedding = checkpoint.names().find(|name| !is_of_block(name) && name.ends_with(EMBEDDING));
    let trunk =
        embedding.and_then(|name| name.strip_suffix(EMBEDDING)).unwrap_or("model.").to_owned();
    let kept = [format!("{trunk}{EMBEDDING}"), "lm_head.weight".to_owned()];
    checkpoint.retain(|name| is_of_block(name) || kept.iter().any(|own| own == name));
    let names = JOINT.map(|name| name.replacen(PREFIX, prefix, 1));
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
    let fc = format!("{next}{}", JOINT_GGUF[0]);
    if checkpoint.get(&fc).is_none() {
        let is_there = checkpoint.names().any(|name| name.starts_with(&next));
        return if is_there { Err(lacks(checkpoint, &[format!("`{fc}`")])) } else { Ok(None) };
    }
    refuse_own_tables(checkpoint, &next)?;
    let second = format!("blk.{}.nextn.", n_layer + 1);
    if checkpoint.names().any(|name| name.starts_with(&second)) {
        let what = "a second block for more than the next token".into();
        return Err(Error::Unsupported { what });
    }
    let around = [gguf::EMBEDDING, gguf::HEAD];
    checkpoint.retain(|name| name.starts_with(&block) || around.contains(&name));
    let norm = format!("{next}{NORM_GGUF}");
    checkpoint.rename(|name| match name.strip_prefix(&block) {
        Some(_) if name == norm => Some(gguf::NORM.to_owned()),
        Some(part) if !part.starts_with("nextn.") => Some(format!("blk.0.{part}")),
        _ => None,
    })?;
    Ok(Some(JOINT_GGUF.map(|part| format!("{next}{part}"))))
}
