//! The configuration of a model, of any family.

use std::fmt;
use std::sync::Arc;

use super::{Families, Family, Frame, MAX_SIZE, gguf};
use crate::backend::Backend;
use crate::checkpoint::gguf::Metadata;
use crate::checkpoint::{Checkpoint, ConfigFile, TensorEntry};
use crate::error::{Error, Result};
use crate::nn::{AttentionConfig, Layer, LayerSpec, Pack, Params, Part, Slot, SlotSize};

/// Most bytes of one sequence's state that do not depend on its length: twelve times that of the largest
/// published model.
const MAX_STATE: usize = 4 << 30;
/// Most experts of all layers together: twice those of the largest published model.
const MAX_EXPERTS: usize = 1 << 17;

/// Sizes and options of a model, of any family: a shared value that never changes.
#[derive(Clone)]
pub struct Config {
    family: Arc<dyn Family>,
    /// Tokens of the longest context, where the file says so. No default of a family takes its place, and no
    /// fingerprint knows of it.
    trained: Option<usize>,
}

impl<F: Family> From<F> for Config {
    fn from(family: F) -> Self {
        Self { family: Arc::new(family), trained: None }
    }
}

impl PartialEq for Config {
    fn eq(&self, other: &Self) -> bool {
        self.family.is_equal(&*other.family)
    }
}

/// The last module of the type's path in the form of a type's name, and the family's own view:
/// `FalconH1(Config { .. })`.
impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let module = self.family.type_name().rsplit("::").nth(1).unwrap_or_default();
        for word in module.split('_') {
            let (first, rest) = word.split_at(word.len().min(1));
            write!(f, "{}{rest}", first.to_uppercase())?;
        }
        write!(f, "(")?;
        self.family.fmt(f)?;
        write!(f, ")")
    }
}

impl Config {
    /// The family's own view.
    #[must_use]
    pub fn family(&self) -> &dyn Family {
        &*self.family
    }

    /// Tokens of the longest context that the model was made for, if its file says so.
    #[must_use]
    pub fn trained_length(&self) -> Option<usize> {
        self.trained
    }

    /// Tokens that a sequence may have: those that the file states, where a layer keeps keys of all positions.
    ///
    /// A scaling of positions that reaches further counts: YaRN's factor times its original context, and a linear or
    /// dynamic factor times the length that is stated. `None` for recurrent models, for those whose attention has
    /// windows only, and for files that state no length.
    ///
    /// ```
    /// use boostr::checkpoint::ConfigFile;
    /// use boostr::models::Config;
    ///
    /// let config = |more: &str| Config::read(&ConfigFile::parse("config.json", &format!(r#"{{
    ///     "model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
    ///     "intermediate_size": 8, "vocab_size": 32 {more}
    /// }}"#))?);
    /// assert_eq!(config(r#", "max_position_embeddings": 4096"#)?.context_limit(), Some(4096));
    /// assert_eq!(config("")?.context_limit(), None);
    /// # Ok::<(), boostr::Error>(())
    /// ```
    #[must_use]
    pub fn context_limit(&self) -> Option<usize> {
        let trained = self.trained?;
        let layers = self.family.layers();
        let keeps_all = |slot: &Slot| matches!(slot.size(), SlotSize::Rows { window: None, .. });
        if !layers.iter().flat_map(LayerSpec::slots).any(|slot| keeps_all(&slot)) {
            return None;
        }
        let ropes =
            layers.iter().filter_map(|layer| layer.part::<AttentionConfig>()?.rope.as_ref());
        Some(ropes.map(|rope| rope.reach(trained)).fold(trained, usize::max))
    }

    /// The same, of a file that states a length.
    pub(super) fn trained_for(self, length: Option<usize>) -> Self {
        Self { trained: length, ..self }
    }

    /// The configuration of a family, if it is of that.
    #[must_use]
    pub fn get<F: Family>(&self) -> Option<&F> {
        self.family.as_any().downcast_ref()
    }

    /// Reads a `config.json` of transformers or mamba_ssm, or a `params.json` of Codestral, of one of the
    /// [built-in families](Families::builtin).
    ///
    /// # Errors
    ///
    /// As [`Families::read`].
    ///
    /// ```
    /// use boostr::checkpoint::ConfigFile;
    /// use boostr::models::Config;
    /// use boostr::nn::MixerConfig;
    ///
    /// let file = ConfigFile::parse("config.json", r#"{
    ///     "d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"},
    ///     "pad_vocab_size_multiple": 16, "tie_embeddings": true
    /// }"#)?;
    /// let config = Config::read(&file)?;
    /// assert_eq!(config.family().layers()[0].part::<MixerConfig>().unwrap().nheads, 24);
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn read(file: &ConfigFile) -> Result<Self> {
        Families::builtin().read(file)
    }

    /// Reads the metadata of a GGUF file of one of the [built-in families](Families::builtin).
    ///
    /// # Errors
    ///
    /// As [`Families::read_gguf`].
    pub fn read_gguf(checkpoint: &Checkpoint, metadata: &Metadata) -> Result<Self> {
        Families::builtin().read_gguf(checkpoint, metadata)
    }

    /// The layers with the weights of `params`.
    pub(crate) fn load<B: Backend>(&self, params: &Params<'_, B>) -> Result<Vec<Layer<B>>> {
        let (params, layers) =
            (params.under(self.family.frame().names.layers), self.family.layers());
        params.each(layers.len(), |i| layers[i].load(&params.under(&i.to_string())))
    }

    /// The tensors of a checkpoint that the model reads: without [what it leaves out](super::LeftOut); a weight that layers
    /// share once, however often a folder has it; without a head that is a copy of the embedding.
    #[must_use]
    pub fn own(&self, checkpoint: &Checkpoint) -> Checkpoint {
        let mut own = checkpoint.clone();
        own.retain(|name| self.family.left_out(name).is_none());
        if own.gguf().is_none() {
            // What is wrong with them is told by who loads them.
            let _ = self.family.normalise(&mut own);
            let Frame { names, tie_embeddings, .. } = self.family.frame();
            let [head, embedding] = [names.head, names.embeddings].map(|it| format!("{it}.weight"));
            let is_there = own.get(&embedding).is_some();
            let is_copy = tie_embeddings == Some(true)
                && is_there
                && are_equal(own.get(&head), own.get(&embedding)).unwrap_or(false);
            own.retain(|name| !is_copy || name != head);
        }
        own
    }

    /// A line for each field that GGUF has no key for, with the value that is taken.
    #[must_use]
    pub fn gguf_assumes(&self) -> Vec<String> {
        let fields = self.family.gguf_assumes().into_iter();
        fields
            .map(|(name, value)| format!("GGUF has no key for `{name}`: {value} is taken"))
            .collect()
    }

    /// The blocks of the experts in a checkpoint with the model's own names, perhaps all `under` another, as loading asks
    /// for them.
    pub(crate) fn packs<B: Backend>(
        &self,
        checkpoint: &Checkpoint,
        client: &B::Client,
        under: Option<&str>,
    ) -> Result<Vec<Pack>> {
        if !self.family.layers().iter().flat_map(LayerSpec::parts).any(|part| part.experts() > 0) {
            return Ok(Vec::new());
        }
        Params::<B>::list_packs(checkpoint, client, |params| match under {
            None => self.load(params).map(drop),
            Some(name) => self.load(&params.under(name)).map(drop),
        })
    }

    /// Refuses sizes that are impossible, by an `error` made of the field and the reason.
    pub(crate) fn check(&self, error: impl Fn(String, String) -> Error) -> Result<()> {
        let family = self.family();
        let frame = family.frame();
        let layers = family.layers();
        let mut sizes = vec![
            ("num_hidden_layers", layers.len()),
            ("vocab_size", frame.vocab_size),
            ("pad_vocab_size_multiple", frame.pad_vocab_size_multiple),
            ("hidden_size", frame.d_model),
        ];
        let parts = || layers.iter().flat_map(LayerSpec::parts);
        sizes.extend(parts().flat_map(Part::sizes));
        for (field, size) in sizes {
            if !(1..=MAX_SIZE).contains(&size) {
                let reason = format!("expected 1 to {MAX_SIZE}, found {size}");
                return Err(error(field.into(), reason));
            }
        }
        for part in parts() {
            part.check().map_err(|(field, reason)| error(field.into(), reason))?;
        }
        let experts = parts().map(Part::experts).fold(0, usize::saturating_add);
        if experts > MAX_EXPERTS {
            let reason = format!("{experts} in all layers, at most {MAX_EXPERTS} are supported");
            return Err(error("num_experts".into(), reason));
        }
        let slots: Vec<Slot> = layers.iter().flat_map(LayerSpec::slots).collect();
        let mut bytes = slots.iter().map(Slot::fixed_bytes);
        let bytes = bytes.try_fold(0usize, |sum, bytes| sum.checked_add(bytes?));
        if bytes.is_some_and(|bytes| bytes <= MAX_STATE) {
            return Ok(());
        }
        let by_head = slots.iter().find_map(|slot| match slot.size() {
            SlotSize::Fixed(shape) => <[usize; 3]>::try_from(&shape[..]).ok(),
            SlotSize::Rows { .. } => None,
        });
        let [heads, p, n] = by_head.unwrap_or_default();
        let bytes = bytes.map_or_else(|| "more than can be counted".into(), |b| b.to_string());
        let reason = format!(
            "{heads} heads of {p} x {n} in {} layers make a state of {bytes} bytes for each sequence, at \
             most {MAX_STATE} are supported",
            layers.len()
        );
        Err(error("state_size".into(), reason))
    }

    /// Gives the tensors of any supported layout the model's names and shapes, once they are found to
    /// be all there; returns whether the embedding is the head. A head with other values than the embedding is used
    /// whatever the configuration says. Tensors of a model that was saved without what stands around it, and so without
    /// `model.` before their names, get it.
    ///
    /// What stays different is GGUF's `A`, which is `-exp(A_log)`.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] when the tensors are not those of the configuration, [`Error::Config`] when
    /// the configuration is impossible.
    pub fn prepare(&self, checkpoint: &mut Checkpoint) -> Result<bool> {
        let path = checkpoint.path().to_path_buf();
        self.check(|field, reason| Error::Config { path: path.clone(), field, reason })?;
        if let Some((name, entry)) = checkpoint.iter().find(|(_, entry)| entry.dtype.is_f8()) {
            let (name, dtype, path) = (name.escape_debug(), entry.dtype.name(), path.display());
            let what = format!(
                "weights of 8 bits in `{path}`: `{name}` is {dtype}; take the model as its author trained it, or its \
                 GGUF file"
            );
            return Err(Error::Unsupported { what });
        }
        let family = self.family();
        let frame = family.frame();
        let is_gguf = checkpoint.gguf().is_some();
        if !is_gguf {
            with_prefix(checkpoint, frame.names.embeddings)?;
        }
        family.normalise(checkpoint)?;
        let weight = |name: &str| format!("{name}.weight");
        let [embedding, head] = if is_gguf {
            [gguf::EMBEDDING.to_owned(), gguf::HEAD.to_owned()]
        } else {
            [weight(frame.names.embeddings), weight(frame.names.head)]
        };
        let rows = match checkpoint.get(&embedding).map(|entry| &entry.shape[..]) {
            Some(&[rows, _]) if rows >= frame.vocab_size => rows,
            _ => frame.padded_vocab(),
        };
        if let Some(metadata) = checkpoint.gguf() {
            let tokens = metadata.array_len(gguf::TOKENS)?.unwrap_or(rows);
            if tokens != rows {
                let reason = format!("{tokens} tokens, but `{embedding}` has {rows} rows");
                return Err(metadata.error(gguf::TOKENS, reason));
            }
        }
        let with_head = checkpoint.get(&head).is_some() || frame.tie_embeddings == Some(false);
        let layout = if is_gguf {
            family.gguf_layout(rows, with_head)?
        } else {
            family.hf_layout(rows, with_head)?
        };
        layout.read(checkpoint)?;
        let tied = frame.tie_embeddings.unwrap_or(!with_head);
        if with_head && tied {
            // A head of its own is used whatever the configuration says, as in transformers.
            let [head, embedding] = [frame.names.head, frame.names.embeddings].map(weight);
            return are_equal(checkpoint.get(&head), checkpoint.get(&embedding));
        }
        Ok(tied)
    }
}

/// Puts before all names but the head's what stands before that of the embedding, where the file has none of that: as
/// transformers saves the part of a model below its head.
fn with_prefix(checkpoint: &mut Checkpoint, embeddings: &str) -> Result<()> {
    let Some((prefix, bare)) = embeddings.split_once('.') else { return Ok(()) };
    let lacks = !checkpoint.names().any(|name| name.starts_with(&format!("{prefix}.")));
    if !lacks || checkpoint.get(&format!("{bare}.weight")).is_none() {
        return Ok(());
    }
    checkpoint.rename(|name| (!name.starts_with("lm_head.")).then(|| format!("{prefix}.{name}")))
}

/// Whether two matrices have the same values, whatever their types.
fn are_equal(head: Option<&TensorEntry>, embedding: Option<&TensorEntry>) -> Result<bool> {
    /// Values that are compared at once.
    const PIECE: usize = 1 << 20;
    let (Some(head), Some(embedding)) = (head, embedding) else { return Ok(true) };
    if head.dtype == embedding.dtype {
        return Ok(*head.data == *embedding.data);
    }
    let count = head.shape.iter().product::<usize>();
    let values = |entry: &TensorEntry, range: std::ops::Range<usize>| -> Result<Vec<f32>> {
        let bytes = |count: usize| entry.dtype.bytes_of(&[count]).unwrap_or(0);
        match entry.data.slice(bytes(range.start)..bytes(range.end)) {
            Some(data) => TensorEntry { data, shape: vec![range.len()], ..entry.clone() }.to_f32(),
            None => Ok(Vec::new()),
        }
    };
    for first in (0..count).step_by(PIECE) {
        let range = first..(first + PIECE).min(count);
        if values(head, range.clone())? != values(embedding, range)? {
            return Ok(false);
        }
    }
    Ok(true)
}
