//! The one description of a family. Reading, writing, loading and listing follow from it.

use std::any::{Any, type_name};
use std::fmt;

use serde_json::{Map, Value};

use super::Config;
use super::fields::Fields;
use super::gguf::{self, Keys, KeysMut};
use crate::backend::{Backend, Cpu, cpu};
use crate::checkpoint::gguf::Metadata;
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::{Error, Result};
use crate::nn::{How, LayerSpec, Layout, Params, RmsNorm, Row, Tensors};

/// What tensors of a file are for that a model does without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LeftOut {
    /// To see pictures.
    Pictures,
    /// To predict more than the next token.
    NextTokens,
}

impl LeftOut {
    /// What they are, for people.
    #[must_use]
    pub fn what(self) -> &'static str {
        match self {
            Self::Pictures => "the vision tower",
            Self::NextTokens => "the block for more than the next token",
        }
    }
}

/// A family of models, as the configuration of one of them.
///
/// The list of [fields](Self::fields) reads and writes configurations. [`layers`](Self::layers) says what layers are
/// made of: from it parameters are loaded, listed and made up, and it tells what a sequence remembers.
/// `examples/toy_family.rs` of boostr-server has a whole one.
pub trait Family: fmt::Debug + Send + Sync + Any + FamilyType {
    /// The values of `model_type` that a `config.json` of the family may have.
    fn model_types() -> &'static [&'static str]
    where
        Self: Sized;

    /// The architectures of GGUF that are of the family.
    fn archs() -> &'static [&'static str]
    where
        Self: Sized,
    {
        &[]
    }

    /// The configuration that [`fields`](Self::fields) are read into.
    fn blank() -> Self
    where
        Self: Sized;

    /// Visits the fields of the configuration, in the order in which `config.json` has them.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] that names the field when reading, [`Error::Unsupported`] for what the file has no way to say
    /// when writing.
    fn fields(&mut self, fields: &mut Fields<'_>) -> Result<()>;

    /// Whether a `config.json` with this `model_type` is of the family.
    fn is_json(file: &ConfigFile, model_type: Option<&str>) -> bool
    where
        Self: Sized,
    {
        let _ = file;
        model_type.is_some_and(|kind| Self::model_types().contains(&kind))
    }

    /// Whether a GGUF file is of the family.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] when a key that tells is something else.
    fn is_gguf(keys: &Keys<'_>) -> Result<bool>
    where
        Self: Sized,
    {
        Ok(Self::archs().contains(&keys.arch))
    }

    /// Reads a `config.json`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] that names file and field.
    fn read(file: &ConfigFile) -> Result<Self>
    where
        Self: Sized,
    {
        let mut config = Self::blank();
        config.fields(&mut Fields::from_json(file))?;
        Ok(config)
    }

    /// The `model_type` of transformers; the first of the family's when nothing else is said.
    fn name(&self) -> &'static str {
        self.first_names().0
    }

    /// The architecture of GGUF, `None` where that has none; the first of the family's when nothing else is said.
    fn arch(&self) -> Option<&'static str> {
        self.first_names().1
    }

    /// Embedding, last norm and head.
    fn frame(&self) -> Frame;

    /// What each layer is made of, and how its parameters are called.
    fn layers(&self) -> Vec<LayerSpec>;

    /// The block that predicts one token more, as the only layer of a model; `None` for families that have none.
    fn next_block(&self) -> Option<Config> {
        None
    }

    /// How files of transformers name and join parameters where they differ from the model's own names.
    fn hf_table(&self) -> Vec<Row> {
        Vec::new()
    }

    /// How GGUF names and changes the parameters of the layers.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for what GGUF has no place for.
    fn gguf_table(&self) -> Result<Vec<Row>> {
        let name = self.name();
        let what =
            format!("file: GGUF has no architecture for {name}; it stays a folder, not quantized");
        Err(Error::Unsupported { what })
    }

    /// What GGUF calls the last norm.
    fn gguf_norm(&self) -> &'static str {
        gguf::NORM
    }

    /// Fields that GGUF has no key for, and the values that are taken where a file is of it.
    fn gguf_assumes(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }

    /// Whether GGUF has factors of the configuration in the weights.
    fn gguf_folds(&self) -> bool {
        false
    }

    /// The names that transformers has for a layer: several of one that layers share.
    fn shared_as(&self, layer: &str) -> Vec<String> {
        vec![layer.to_owned()]
    }

    /// Values that GGUF keeps as tensors and a configuration otherwise, by name.
    fn gguf_given(&self) -> Vec<(&'static str, Vec<f32>)> {
        Vec::new()
    }

    /// Factors of embedding and head in GGUF, where it keeps them in the weights.
    fn gguf_table_scales(&self) -> [f32; 2] {
        [1.0; 2]
    }

    /// Gives a file's tensors the names that newer files have, and drops what no forward reads.
    ///
    /// # Errors
    ///
    /// When two tensors would have one name.
    fn normalise(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        let _ = checkpoint;
        Ok(())
    }

    /// What a tensor of a file, by its name there, is for that the model does without; `None` for the model's own.
    fn left_out(&self, name: &str) -> Option<LeftOut> {
        let _ = name;
        None
    }

    /// The `config.json` that transformers reads, without the fields that every family has.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for what transformers cannot run.
    fn to_json(&self) -> Result<Value> {
        let mut json = Map::new();
        self.write_fields(&mut Fields::to_json(&mut json))?;
        Ok(Value::Object(json))
    }

    /// The same for a new folder: a scaling of positions that only GGUF has a name for is written as the settings that
    /// it was made of.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for what transformers cannot run.
    fn folder_json(&self) -> Result<Value> {
        let mut json = Map::new();
        self.write_fields(&mut Fields::to_folder(&mut json))?;
        Ok(Value::Object(json))
    }

    /// Writes the family's own keys of GGUF.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for what GGUF has no key for.
    fn write_gguf(&self, metadata: &mut Metadata) -> Result<()> {
        let Some(arch) = self.arch() else { return self.gguf_table().map(drop) };
        let mut keys = KeysMut::new(metadata, arch);
        self.write_fields(&mut Fields::to_gguf(&mut keys))
    }

    /// All parameters, with an embedding of `rows` rows.
    ///
    /// # Errors
    ///
    /// When a layer cannot be listed.
    fn parameters(&self, rows: usize, with_head: bool) -> Result<Tensors> {
        let frame = self.frame();
        let Frame { names, d_model, .. } = frame;
        Params::<Cpu>::list(&cpu(), |params| {
            params.under(names.embeddings).weight("weight", [rows, d_model])?;
            frame.load_norm(params)?;
            if with_head {
                params.under(names.head).weight("weight", [rows, d_model])?;
            }
            let layers = params.under(names.layers);
            let mut all = self.layers().into_iter().enumerate();
            all.try_for_each(|(i, layer)| layer.load(&layers.under(&i.to_string())).map(drop))
        })
    }

    /// The tensors of a folder.
    ///
    /// # Errors
    ///
    /// When a layer cannot be listed.
    fn hf_layout(&self, rows: usize, with_head: bool) -> Result<Layout> {
        let n_layer = self.layers().len();
        Ok(Layout::new(&self.parameters(rows, with_head)?, &self.hf_table(), n_layer))
    }

    /// The tensors of a GGUF file.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for what GGUF has no place for.
    fn gguf_layout(&self, rows: usize, with_head: bool) -> Result<Layout> {
        let Frame { names, zero_centred, .. } = self.frame();
        let weight = |name: &str| format!("{name}.weight");
        let [embedding, head] = self.gguf_table_scales();
        // A head that is the embedding but for its factor is a tensor of its own there.
        let is_tied = !with_head && embedding != head;
        let head_name = if is_tied { names.embeddings } else { names.head };
        let mut table = vec![
            Row::new(gguf::EMBEDDING, weight(names.embeddings)).how(How::Times(embedding)),
            Row::new(self.gguf_norm(), weight(names.norm)).how(if zero_centred {
                How::PlusOne
            } else {
                How::Same
            }),
            Row::new(gguf::HEAD, weight(head_name)).how(How::Times(head)),
        ];
        table.extend(self.gguf_table()?);
        let parameters = self.parameters(rows, with_head)?;
        let mut layout = Layout::new(&parameters, &table, self.layers().len());
        if let Some(name) = layout.unnamed() {
            let what = format!("parameter `{name}` in GGUF, which has no name for it");
            return Err(Error::Unsupported { what });
        }
        for (name, values) in self.gguf_given() {
            layout.given(name, values);
        }
        Ok(layout)
    }
}

/// What any type of family has by itself, of its description.
pub trait FamilyType {
    /// For the look at the type.
    fn as_any(&self) -> &dyn Any;

    /// The path of the type.
    fn type_name(&self) -> &'static str;

    /// Whether the other is of the same type and equal.
    fn is_equal(&self, other: &dyn Family) -> bool;

    /// The first `model_type` and the first architecture of GGUF that are of the family.
    fn first_names(&self) -> (&'static str, Option<&'static str>);

    /// Visits the fields of a copy, to write them.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for what the file has no way to say.
    fn write_fields(&self, fields: &mut Fields<'_>) -> Result<()>;
}

impl<F: Family + Clone + PartialEq> FamilyType for F {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn type_name(&self) -> &'static str {
        type_name::<F>()
    }

    fn is_equal(&self, other: &dyn Family) -> bool {
        other.as_any().downcast_ref::<F>() == Some(self)
    }

    fn first_names(&self) -> (&'static str, Option<&'static str>) {
        (F::model_types().first().copied().unwrap_or_default(), F::archs().first().copied())
    }

    fn write_fields(&self, fields: &mut Fields<'_>) -> Result<()> {
        self.clone().fields(fields)
    }
}

/// What stands around the layers.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    /// How the parameters are called.
    pub names: Names,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Ids that the tokenizer may give; the embedding may have more rows.
    pub vocab_size: usize,
    /// Rows of the embedding are a multiple of this.
    pub pad_vocab_size_multiple: usize,
    /// Whether the head is the embedding; `None` when the file does not say.
    pub tie_embeddings: Option<bool>,
    /// Added to the mean of squares of norms.
    pub norm_eps: f32,
    /// Whether the last norm's weight is what its factors are above 1.
    pub zero_centred: bool,
    /// Factor of the embeddings.
    pub embedding_scale: f32,
    /// Factor of the logits.
    pub logits_scale: f32,
}

impl Frame {
    /// A frame without factors, whose embedding has as many rows as there are ids.
    #[must_use]
    pub fn new(names: Names, d_model: usize, vocab_size: usize, norm_eps: f32) -> Self {
        Self {
            names,
            d_model,
            vocab_size,
            pad_vocab_size_multiple: 1,
            tie_embeddings: None,
            norm_eps,
            zero_centred: false,
            embedding_scale: 1.0,
            logits_scale: 1.0,
        }
    }

    /// The same, whose head is the embedding or not.
    #[must_use]
    pub fn tied(self, tie_embeddings: Option<bool>) -> Self {
        Self { tie_embeddings, ..self }
    }

    /// The same, whose last norm's weight is what its factors are above 1.
    #[must_use]
    pub fn zero_centred(self) -> Self {
        Self { zero_centred: true, ..self }
    }

    /// The last norm.
    pub(super) fn load_norm<B: Backend>(&self, params: &Params<'_, B>) -> Result<RmsNorm<B>> {
        let norm = params.under(self.names.norm);
        RmsNorm::load(&norm, self.d_model, self.norm_eps, self.zero_centred)
    }

    /// Rows of the embedding by the configuration alone.
    #[must_use]
    pub fn padded_vocab(&self) -> usize {
        self.vocab_size.next_multiple_of(self.pad_vocab_size_multiple.max(1))
    }
}

/// Names of the parameters around the layers, without `.weight`, and what the layers are under.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Names {
    /// `[V, d_model]`
    pub embeddings: &'static str,
    /// Comes before the number of a layer.
    pub layers: &'static str,
    /// `[d_model]`
    pub norm: &'static str,
    /// `[V, d_model]`
    pub head: &'static str,
}

impl Names {
    /// As the first models of Mamba have them.
    pub const BACKBONE: Self = Self {
        embeddings: "backbone.embeddings",
        layers: "backbone.layers",
        norm: "backbone.norm_f",
        head: "lm_head",
    };

    /// As most models of transformers have them, which differ in the name of the last norm.
    #[must_use]
    pub const fn model(norm: &'static str) -> Self {
        Self { embeddings: "model.embed_tokens", layers: "model.layers", norm, head: "lm_head" }
    }

    /// The name under `backbone` of a tensor that some releases and newer versions of transformers have under
    /// `model`; `None` for another.
    pub(super) fn in_backbone(name: &str) -> Option<String> {
        let rest = name.strip_prefix("model.")?;
        let is_whole = rest.starts_with("backbone.") || rest.starts_with("lm_head.");
        Some(if is_whole { rest.to_owned() } else { format!("backbone.{rest}") })
    }
}
