//! One architecture, one file. Models open no file and hold no state of a sequence.
//!
//! | family | `model_type` | GGUF |
//! |---|---|---|
//! | [`mamba2`] | `mamba2`, files of mamba_ssm and Codestral | `mamba2` |
//! | [`llama`] | `llama`, `mistral`, `qwen2`, `qwen3` | `llama`, `qwen2`, `qwen3` |
//! | [`bamba`] | `bamba` | `granitehybrid` |
//! | [`granite_hybrid`] | `granitemoehybrid` | `granitehybrid`, `granite`, `granitemoe` |
//! | [`falcon_h1`] | `falcon_h1` | `falcon-h1` |
//! | [`nemotron_h`] | `nemotron_h` | `nemotron_h`, `nemotron_h_moe` |
//! | [`zamba2`] | `zamba2` | none |
//!
//! A family says what it is made of ([`Family`]) and takes rows through its layers ([`Decoder`]); what is
//! the same for all stands once, in [`Model`].

pub mod bamba;
pub mod falcon_h1;
mod fingerprint;
mod gguf;
pub mod granite_hybrid;
mod hybrid;
pub mod llama;
pub mod mamba2;
mod model;
pub mod nemotron_h;
mod state;
pub mod zamba2;

use std::fmt;

use serde_json::Value;

pub(crate) use fingerprint::Fingerprint;
pub use gguf::Keys;
pub use hybrid::Hybrid;
pub use model::{Decoder, Logits, Model, PIECE, Run};
pub use state::{Batch, State};

use std::sync::Arc;

use crate::backend::{Backend, Cpu};
use crate::checkpoint::gguf::Metadata;
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::{Error, Result};
use crate::nn::{
    AttentionConfig, How, Layout, MixerConfig, MixerState, MlpConfig, MoeConfig, Params, Row,
    Tensors,
};
use crate::ops::{KvType, Level};

/// Largest size that a configuration may name.
pub const MAX_SIZE: usize = 1 << 24;
/// Most bytes of one sequence's state that do not depend on its length: twelve times that of the largest
/// published model.
const MAX_STATE: usize = 4 << 30;
/// Most experts of all layers together: twice those of the largest published model.
const MAX_EXPERTS: usize = 1 << 17;

/// The families: how a configuration is told apart, and what it makes.
macro_rules! families {
    ($($variant:ident = $module:ident, $decoder:ident;)*) => {
        /// Sizes and options of a model, of any family.
        #[derive(Debug, Clone, PartialEq)]
        pub enum Config {
            $(#[doc = concat!("See [`", stringify!($module), "`].")] $variant($module::Config),)*
        }

        $(impl From<$module::Config> for Config {
            fn from(config: $module::Config) -> Self {
                Self::$variant(config)
            }
        })*

        /// The types that `config.json` names, and the architectures that GGUF names, of each family.
        const FAMILIES: &[(&[&str], &[&str])] = &[$(($module::MODEL_TYPES, $module::ARCHS)),*];

        impl Config {
            /// The family's own view.
            #[must_use]
            pub fn family(&self) -> &dyn Family {
                match self {
                    $(Self::$variant(config) => config,)*
                }
            }

            /// The family's layers with the weights of `params`.
            pub(crate) fn decoder<B: Backend>(
                &self,
                params: &Params<'_, B>,
            ) -> Result<Arc<dyn Decoder<B>>> {
                Ok(match self {
                    $(Self::$variant(config) => Arc::new($module::$decoder::load(config, params)?),)*
                })
            }

            /// Reads the configuration of a `model_type`; `None` when no family has it.
            fn read_type(kind: &str, file: &ConfigFile) -> Result<Option<Self>> {
                $(if $module::MODEL_TYPES.contains(&kind) {
                    return Ok(Some(Self::$variant($module::Config::read(file)?)));
                })*
                Ok(None)
            }
        }
    };
}

families! {
    Mamba2 = mamba2, Mamba2;
    Llama = llama, Llama;
    Bamba = bamba, Bamba;
    GraniteHybrid = granite_hybrid, GraniteHybrid;
    FalconH1 = falcon_h1, FalconH1;
    NemotronH = nemotron_h, NemotronH;
    Zamba2 = zamba2, Zamba2;
}

impl Config {
    /// Reads a `config.json` of transformers or mamba_ssm, or a `params.json` of Codestral.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] that names file and field, [`Error::Unsupported`] for another architecture,
    /// with those that are supported.
    ///
    /// ```
    /// use boostr::checkpoint::ConfigFile;
    /// use boostr::models::Config;
    ///
    /// let file = ConfigFile::parse("config.json", r#"{
    ///     "d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"},
    ///     "pad_vocab_size_multiple": 16, "tie_embeddings": true
    /// }"#)?;
    /// let config = Config::read(&file)?;
    /// assert_eq!(config.family().layers()[0].mixer.as_ref().unwrap().nheads, 24);
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn read(file: &ConfigFile) -> Result<Self> {
        let supported: Vec<&str> = FAMILIES.iter().flat_map(|family| family.0).copied().collect();
        let supported = supported.join(", ");
        let kind = match file.text("model_type")? {
            None | Some("mamba") if mamba2::is_other_dialect(file) => "mamba2",
            Some(kind) => kind,
            None => {
                return Err(file.error("model_type", format!("missing (supported: {supported})")));
            }
        };
        let Some(config) = Self::read_type(kind, file)? else {
            let (kind, path) = (kind.escape_debug(), file.path().display());
            let what = format!("model_type `{kind}` in `{path}` (supported: {supported})");
            return Err(Error::Unsupported { what });
        };
        config.check(|field, reason| file.error(&field, reason))?;
        Ok(config)
    }

    /// Reads the metadata of a GGUF file.
    ///
    /// Tokens of type unused at the end of the vocabulary are padding: never sampled.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] that names file and key, [`Error::Unsupported`] for another architecture, with
    /// those that are supported.
    pub fn read_gguf(checkpoint: &Checkpoint, metadata: &Metadata) -> Result<Self> {
        let arch = metadata.required(gguf::ARCHITECTURE, metadata.text(gguf::ARCHITECTURE)?)?;
        let keys = Keys::new(metadata, arch);
        let is = |archs: &[&str]| archs.contains(&arch);
        let config: Self = match () {
            () if is(mamba2::ARCHS) => mamba2::Config::read_gguf(&keys)?.into(),
            () if is(llama::ARCHS) => llama::Config::read_gguf(&keys, checkpoint)?.into(),
            () if bamba::is_gguf_of(&keys)? => bamba::Config::read_gguf(&keys, checkpoint)?.into(),
            () if is(granite_hybrid::ARCHS) => {
                granite_hybrid::Config::read_gguf(&keys, checkpoint)?.into()
            }
            () if is(falcon_h1::ARCHS) => falcon_h1::Config::read_gguf(&keys, checkpoint)?.into(),
            () if is(nemotron_h::ARCHS) => nemotron_h::Config::read_gguf(&keys, checkpoint)?.into(),
            () => {
                let supported: Vec<&str> =
                    FAMILIES.iter().flat_map(|family| family.1).copied().collect();
                let also = if arch == "mamba" { ", which is Mamba-1," } else { "" };
                let what = format!(
                    "architecture `{}`{also} in `{}` (supported: {})",
                    arch.escape_debug(),
                    metadata.path().display(),
                    supported.join(", ")
                );
                return Err(Error::Unsupported { what });
            }
        };
        config.check(|field, reason| metadata.error(&field, reason))?;
        Ok(config)
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
        for layer in &layers {
            if let Some(mixer) = &layer.mixer {
                sizes.extend([
                    ("num_heads", mixer.nheads),
                    ("head_dim", mixer.headdim),
                    ("n_groups", mixer.ngroups),
                    ("state_size", mixer.d_state),
                    ("conv_kernel", mixer.d_conv),
                ]);
            }
            if let Some(attention) = &layer.attention {
                sizes.extend([
                    ("num_attention_heads", attention.nheads),
                    ("num_key_value_heads", attention.nheads_kv),
                    ("head_dim", attention.headdim),
                ]);
            }
            match &layer.ffn {
                Ffn::None => {}
                Ffn::Mlp(mlp) => sizes.push(("intermediate_size", mlp.d_ff)),
                Ffn::Moe { moe, .. } => sizes.extend([
                    ("num_experts", moe.experts),
                    ("num_experts_per_tok", moe.used),
                    ("n_group", moe.ngroups),
                    ("topk_group", moe.topk_group),
                    ("expert intermediate_size", moe.expert.d_ff),
                ]),
            }
        }
        for (field, size) in sizes {
            if !(1..=MAX_SIZE).contains(&size) {
                let reason = format!("expected 1 to {MAX_SIZE}, found {size}");
                return Err(error(field.into(), reason));
            }
        }
        for layer in &layers {
            if let Some(mixer) =
                layer.mixer.as_ref().filter(|m| !m.nheads.is_multiple_of(m.ngroups))
            {
                let reason =
                    format!("{} groups do not divide {} heads", mixer.ngroups, mixer.nheads);
                return Err(error("n_groups".into(), reason));
            }
            let attention = layer.attention.as_ref();
            if let Some(a) = attention.filter(|a| !a.nheads.is_multiple_of(a.nheads_kv)) {
                let reason = format!("{} do not divide {} heads", a.nheads_kv, a.nheads);
                return Err(error("num_key_value_heads".into(), reason));
            }
            if let Ffn::Moe { moe, .. } = &layer.ffn
                && let Err((field, reason)) = moe.check()
            {
                return Err(error(field.into(), reason));
            }
        }
        let experts = |layer: &LayerSpec| match &layer.ffn {
            Ffn::Moe { moe, .. } => moe.experts,
            _ => 0,
        };
        let experts: usize = layers.iter().map(experts).sum();
        if experts > MAX_EXPERTS {
            let reason = format!("{experts} in all layers, at most {MAX_EXPERTS} are supported");
            return Err(error("num_experts".into(), reason));
        }
        let bytes = state_bytes(&layers);
        if bytes.is_some_and(|bytes| bytes <= MAX_STATE) {
            return Ok(());
        }
        let mixer = layers.iter().find_map(|layer| layer.mixer.as_ref());
        let (heads, p, n) = mixer.map_or((0, 0, 0), |m| (m.nheads, m.headdim, m.d_state));
        let bytes = bytes.map_or_else(|| "more than can be counted".into(), |b| b.to_string());
        let reason = format!(
            "{heads} heads of {p} x {n} in {} layers make a state of {bytes} bytes for each sequence, at \
             most {MAX_STATE} are supported",
            layers.len()
        );
        Err(error("state_size".into(), reason))
    }

    /// Gives the tensors of any supported layout the model's names and shapes, once they are found to
    /// be all there; returns whether the embedding is the head.
    ///
    /// What stays different is GGUF's `A`, which is `-exp(A_log)`.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] when the tensors are not those of the configuration, [`Error::Config`] when
    /// the configuration is impossible.
    pub fn adopt(&self, checkpoint: &mut Checkpoint) -> Result<bool> {
        let path = checkpoint.path().to_path_buf();
        self.check(|field, reason| Error::Config { path: path.clone(), field, reason })?;
        let family = self.family();
        let frame = family.frame();
        let is_gguf = checkpoint.gguf().is_some();
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
            family.hf_layout(rows, with_head)
        };
        layout.read(checkpoint)?;
        let tied = frame.tie_embeddings.unwrap_or(!with_head);
        if with_head && tied {
            check_tied(checkpoint, &weight(frame.names.head), &weight(frame.names.embeddings))?;
        }
        Ok(tied)
    }
}

/// Bytes of one sequence's mixers; `None` when that is more than a `usize` counts.
fn state_bytes(layers: &[LayerSpec]) -> Option<usize> {
    let mixers = layers.iter().filter_map(|layer| layer.mixer.as_ref());
    mixers
        .flat_map(MixerState::<Cpu>::shapes)
        .map(|shape| shape.iter().try_fold(4usize, |n, &dim| n.checked_mul(dim)))
        .try_fold(0usize, |sum, bytes| sum.checked_add(bytes?))
}

/// A head that is stored although it is tied must be the embedding.
fn check_tied(checkpoint: &Checkpoint, head_name: &str, embedding_name: &str) -> Result<()> {
    let [head, embedding] = [head_name, embedding_name].map(|name| checkpoint.get(name));
    if let (Some(head), Some(embedding)) = (head, embedding)
        && (head.dtype != embedding.dtype || *head.data != *embedding.data)
    {
        let reason = format!(
            "the head is tied by the configuration, but `{head_name}` is not equal to \
             `{embedding_name}`: set tie_word_embeddings to false, or remove one"
        );
        return Err(Error::Tensors { path: checkpoint.path().to_path_buf(), reason });
    }
    Ok(())
}

/// What a family is made of.
pub trait Family: fmt::Debug + Send + Sync {
    /// The `model_type` of transformers.
    fn name(&self) -> &'static str;

    /// The architecture of GGUF; `None` where that has none.
    fn arch(&self) -> Option<&'static str>;

    /// Embedding, last norm and head.
    fn frame(&self) -> Frame;

    /// What each layer is made of.
    fn layers(&self) -> Vec<LayerSpec>;

    /// All parameters, with an embedding of `rows` rows.
    fn parameters(&self, rows: usize, with_head: bool) -> Tensors;

    /// How files of transformers name and join parameters where they differ from the model's own names.
    fn hf_table(&self) -> Vec<Row> {
        Vec::new()
    }

    /// How GGUF names and changes the parameters of the layers.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for what GGUF has no place for.
    fn gguf_table(&self) -> Result<Vec<Row>>;

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

    /// Writes the family's own keys of GGUF.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for what GGUF has no key for.
    fn write_gguf(&self, metadata: &mut Metadata) -> Result<()>;

    /// The `config.json` that transformers reads, without the fields that every family has.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for what transformers cannot run.
    fn to_json(&self) -> Result<Value>;

    /// The tensors of a folder.
    fn hf_layout(&self, rows: usize, with_head: bool) -> Layout {
        let n_layer = self.layers().len();
        Layout::new(&self.parameters(rows, with_head), &self.hf_table(), n_layer)
    }

    /// The tensors of a GGUF file.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for what GGUF has no place for.
    fn gguf_layout(&self, rows: usize, with_head: bool) -> Result<Layout> {
        let names = self.frame().names;
        let weight = |name: &str| format!("{name}.weight");
        let [embedding, head] = self.gguf_table_scales();
        // A head that is the embedding but for its factor is a tensor of its own there.
        let is_tied = !with_head && embedding != head;
        let head_name = if is_tied { names.embeddings } else { names.head };
        let mut table = vec![
            Row::new(gguf::EMBEDDING, weight(names.embeddings)).how(How::Times(embedding)),
            Row::new(gguf::NORM, weight(names.norm)),
            Row::new(gguf::HEAD, weight(head_name)).how(How::Times(head)),
        ];
        table.extend(self.gguf_table()?);
        let parameters = self.parameters(rows, with_head);
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

/// What stands around the layers.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    /// How its parameters are called.
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
    /// Factor of the embeddings.
    pub embedding_scale: f32,
    /// Factor of the logits.
    pub logits_scale: f32,
}

impl Frame {
    /// Rows of the embedding by the configuration alone.
    #[must_use]
    pub fn padded_vocab(&self) -> usize {
        self.vocab_size.next_multiple_of(self.pad_vocab_size_multiple.max(1))
    }
}

/// Names of the parameters around the layers, without `.weight`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Names {
    /// `[V, d_model]`
    pub embeddings: &'static str,
    /// `[d_model]`
    pub norm: &'static str,
    /// `[V, d_model]`
    pub head: &'static str,
}

impl Names {
    /// Adds the parameters to `tensors`.
    pub fn expect(&self, tensors: &mut Tensors, rows: usize, d_model: usize, with_head: bool) {
        tensors.add(format!("{}.weight", self.embeddings), &[rows, d_model]);
        tensors.add(format!("{}.weight", self.norm), &[d_model]);
        if with_head {
            tensors.add(format!("{}.weight", self.head), &[rows, d_model]);
        }
    }
}

/// What one layer is made of.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// The Mamba-2 mixer, if it has one.
    pub mixer: Option<MixerConfig>,
    /// The attention, if it has any.
    pub attention: Option<AttentionConfig>,
    /// The feed-forward part.
    pub ffn: Ffn,
}

/// The feed-forward part of a layer.
#[derive(Debug, Clone, PartialEq)]
pub enum Ffn {
    /// There is none.
    None,
    /// One for all tokens.
    Mlp(MlpConfig),
    /// Experts, of which each token gets a few.
    Moe {
        /// Those that are chosen from.
        moe: MoeConfig,
        /// The one that every token gets.
        shared: Option<MlpConfig>,
    },
}

impl LayerSpec {
    /// What the layer is, in a word for each part.
    #[must_use]
    pub fn kind(&self) -> String {
        let mixer = self.mixer.as_ref().map(|_| "mamba2");
        let attention = self.attention.as_ref().map(|_| "attention");
        let ffn = match self.ffn {
            Ffn::None => None,
            Ffn::Mlp(_) => Some("mlp"),
            Ffn::Moe { .. } => Some("moe"),
        };
        [mixer, attention, ffn].into_iter().flatten().collect::<Vec<_>>().join(" + ")
    }

    /// Bytes of a sequence's state of this layer: the constant part, and what each token adds, up to the
    /// window if there is one.
    #[must_use]
    pub fn state_bytes(&self, level: Level, kind: KvType) -> (usize, usize) {
        let constant = state_bytes(std::slice::from_ref(self)).unwrap_or(usize::MAX);
        let growing = self.attention.as_ref().map_or(0, |a| a.cache(kind).bytes_per_token(level));
        (constant, growing)
    }

    /// Bytes of the growing part after `tokens`, at most.
    #[must_use]
    pub fn kv_bytes(&self, level: Level, kind: KvType, tokens: usize) -> usize {
        self.attention.as_ref().map_or(0, |a| a.cache(kind).bytes(level, tokens, a.window))
    }
}

/// A pair of bounds in order, the upper one possibly infinite; `(0, infinity)` when missing.
fn read_limit(file: &ConfigFile, key: &str) -> Result<(f32, f32)> {
    match file.floats(key)?.as_deref() {
        None => Ok((0.0, f32::INFINITY)),
        Some(&[low, high]) if low <= high && low.is_finite() => Ok((low, high)),
        Some(other) => Err(file.error(key, format!("expected [low, high], found {other:?}"))),
    }
}

/// The same for a `config.json`.
fn limit_json((low, high): (f32, f32)) -> Value {
    let high = if high.is_finite() {
        serde_json::json!(shortest(high))
    } else {
        serde_json::json!({ "__float__": "Infinity" })
    };
    serde_json::json!([shortest(low), high])
}

/// The double that people write for this float: 1e-5, not 9.999999747378752e-6.
fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or_else(|_| f64::from(x))
}

/// Names of the activation that most families have.
const SILU: &[&str] = &["silu", "swish"];

/// Refuses an activation under `key` that is none of the `allowed`, which are names of one.
fn expect_activation(file: &ConfigFile, key: &str, allowed: &[&str]) -> Result<()> {
    match file.text(key)?.filter(|act| !allowed.contains(act)) {
        None => Ok(()),
        Some(act) => Err(file.error(key, format!("expected {}, found {act:?}", allowed[0]))),
    }
}

/// By what transformers multiplies the width for the channels of a mixer.
fn expand_of(mixer: &MixerConfig) -> Result<usize> {
    let (inner, width) = (mixer.d_inner(), mixer.d_model);
    if !inner.is_multiple_of(width) {
        let what =
            format!("{inner} channels in transformers, which expands {width} by a whole number");
        return Err(Error::Unsupported { what });
    }
    Ok(inner / width)
}
