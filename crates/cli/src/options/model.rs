//! Which model, and how to open it.

use std::path::{Path, PathBuf};

use anyhow::Result;
use boostr::load::OpenOptions;
use clap::{Args, ValueEnum};

use crate::exit::usage;
use crate::model::Source;

/// Which model, and how to open it.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Folder with config.json and weights, weight file in one, or GGUF file [env: BOOSTR_MODEL]
    #[arg(short, long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Use this tokenizer.json in place of the model's
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Read pytorch_model.bin, with a closed list of types and without running it
    #[arg(long)]
    pub allow_pickle: bool,
    /// Read all of the model into memory, so that nothing that becomes of its files matters; by default files of more
    /// than 64 MiB are mapped
    #[arg(long)]
    pub no_mmap: bool,
    /// Whether the quantized experts of a large mixture are written once to a file beside the model, in the order that
    /// products read, and mapped from there; off keeps them in memory
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = Switch::On)]
    pub pack_cache: Switch,
    /// What attention keeps keys and values as
    #[arg(long, value_name = "TYPE", value_enum, default_value_t)]
    pub kv_type: KvKind,
    /// Adapters beside the model: a folder of `boostr tune --lora` or PEFT. That folder in place of a model
    /// stands for the model that it names, with them
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// Decode quantized weights to f32 first: slower, four to eight times the memory, nothing rounded
    #[arg(long)]
    pub exact: bool,
}

/// Whether something is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    On,
    Off,
}

/// A type of kept keys and values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum KvKind {
    #[default]
    F32,
    F16,
    Bf16,
    #[value(name = "q8_0")]
    Q8_0,
}

impl From<KvKind> for boostr::ops::KvType {
    fn from(kind: KvKind) -> Self {
        match kind {
            KvKind::F32 => Self::F32,
            KvKind::F16 => Self::F16,
            KvKind::Bf16 => Self::Bf16,
            KvKind::Q8_0 => Self::Q8_0,
        }
    }
}

impl ModelArgs {
    /// The model that a command line names, and what the library needs to know to open it. Adapters without a
    /// model are beside the one that they name.
    pub fn source(&self, named: Option<&Path>) -> Result<(Source, OpenOptions)> {
        let source = match (Source::named(named), &self.adapter) {
            (None, Some(folder)) => Source::Path(folder.clone()),
            (Some(source), _) => source,
            (None, None) => Source::of(None)?,
        };
        let (source, named) = source.with_adapter()?;
        let adapter = match (named, &self.adapter) {
            (Some(of), Some(other)) if of != *other => {
                let of = of.display();
                let reason = format!("--adapter: `{of}` is adapters itself, not a model");
                return Err(usage(reason));
            }
            (named, given) => named.or_else(|| given.clone()),
        };
        let options = OpenOptions {
            allow_pickle: self.allow_pickle,
            tokenizer: self.tokenizer.clone(),
            kv_type: Some(self.kv_type.into()),
            exact: self.exact,
            no_mmap: self.no_mmap,
            no_pack_cache: self.pack_cache == Switch::Off,
            adapter,
            ..OpenOptions::default()
        };
        Ok((source, options))
    }
}
