//! Which families there are: a value, so that a program may have its own beside the built-in ones.

use super::{Config, Family, Fields, Keys};
use super::{
    bamba, falcon_h1, gguf, granite_hybrid, kimi_linear, lfm2, llama, mamba2, nemotron_h,
    olmo_hybrid,
};
use super::{qwen3_5, qwen3_5_moe, qwen3_next, zamba2};
use crate::checkpoint::gguf::Metadata;
use crate::checkpoint::{Checkpoint, ConfigFile};
use crate::error::{Error, Result};

/// The families that files are read as.
///
/// ```
/// use boostr::models::Families;
///
/// assert!(Families::builtin().model_types().any(|name| name == "mamba2"));
/// ```
#[derive(Debug, Clone)]
pub struct Families(Vec<Entry>);

/// One family among others: how its files are told apart, and how they are read.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    model_types: &'static [&'static str],
    archs: &'static [&'static str],
    is_json: fn(&ConfigFile, Option<&str>) -> bool,
    is_gguf: fn(&Keys<'_>) -> Result<bool>,
    read: fn(&ConfigFile) -> Result<Config>,
    read_gguf: fn(&Keys<'_>, &Checkpoint) -> Result<Config>,
}

impl Entry {
    /// The entry of a family.
    #[must_use]
    pub fn of<F: Family>() -> Self {
        Self {
            model_types: F::model_types(),
            archs: F::archs(),
            is_json: F::is_json,
            is_gguf: F::is_gguf,
            read: |file| Ok(F::read(file)?.into()),
            read_gguf: |keys, checkpoint| {
                let mut config = F::blank();
                config.fields(&mut Fields::from_gguf(keys, checkpoint))?;
                Ok(config.into())
            },
        }
    }
}

impl Default for Families {
    fn default() -> Self {
        Self::builtin()
    }
}

impl Families {
    /// Those that the library has.
    #[must_use]
    pub fn builtin() -> Self {
        Self(vec![
            Entry::of::<mamba2::Config>(),
            Entry::of::<llama::Config>(),
            Entry::of::<bamba::Config>(),
            Entry::of::<granite_hybrid::Config>(),
            Entry::of::<falcon_h1::Config>(),
            Entry::of::<nemotron_h::Config>(),
            Entry::of::<zamba2::Config>(),
            Entry::of::<qwen3_5::Config>(),
            Entry::of::<qwen3_5_moe::Config>(),
            Entry::of::<qwen3_next::Config>(),
            Entry::of::<olmo_hybrid::Config>(),
            Entry::of::<kimi_linear::Config>(),
            Entry::of::<lfm2::Config>(),
        ])
    }

    /// These and one more, which is asked before them.
    #[must_use]
    pub fn with(mut self, family: Entry) -> Self {
        self.0.insert(0, family);
        self
    }

    /// The values of `model_type` that are known.
    pub fn model_types(&self) -> impl Iterator<Item = &'static str> {
        self.0.iter().flat_map(|family| family.model_types).copied()
    }

    /// Reads a `config.json`.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] that names file and field, [`Error::Unsupported`] for another architecture,
    /// with those that are supported.
    pub fn read(&self, file: &ConfigFile) -> Result<Config> {
        let supported = self.model_types().collect::<Vec<_>>().join(", ");
        let kind = file.text("model_type")?;
        let Some(family) = self.0.iter().find(|family| (family.is_json)(file, kind)) else {
            let Some(kind) = kind else {
                return Err(file.error("model_type", format!("missing (supported: {supported})")));
            };
            let (kind, path) = (kind.escape_debug(), file.path().display());
            let what = format!("model_type `{kind}` in `{path}` (supported: {supported})");
            return Err(Error::Unsupported { what });
        };
        let config = (family.read)(file)?;
        config.check(|field, reason| file.error(&field, reason))?;
        // A family that needs it has read it, and refused what is none.
        let stated = |file: &ConfigFile| {
            file.usize(&["max_position_embeddings", "model_max_length"], 1..=1 << 40).ok().flatten()
        };
        // Models that see pictures too say it of their text.
        let of_text = || stated(&file.object("text_config").ok()?);
        Ok(config.trained_for(stated(file).or_else(of_text)))
    }

    /// Reads the metadata of a GGUF file.
    ///
    /// Tokens of type unused at the end of the vocabulary are padding: never sampled.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] that names file and key, [`Error::Unsupported`] for another architecture, with
    /// those that are supported.
    pub fn read_gguf(&self, checkpoint: &Checkpoint, metadata: &Metadata) -> Result<Config> {
        let arch = metadata.required(gguf::ARCHITECTURE, metadata.text(gguf::ARCHITECTURE)?)?;
        let keys = Keys::new(metadata, arch);
        for family in &self.0 {
            if (family.is_gguf)(&keys)? {
                let config = (family.read_gguf)(&keys, checkpoint)?;
                config.check(|field, reason| metadata.error(&field, reason))?;
                let stated = metadata.usize(&keys.key("context_length"), 1..=1 << 40);
                return Ok(config.trained_for(stated.ok().flatten()));
            }
        }
        let supported: Vec<&str> = self.0.iter().flat_map(|family| family.archs).copied().collect();
        let also = if arch == "mamba" { ", which is Mamba-1," } else { "" };
        let what = format!(
            "architecture `{}`{also} in `{}` (supported: {})",
            arch.escape_debug(),
            metadata.path().display(),
            supported.join(", ")
        );
        Err(Error::Unsupported { what })
    }
}
