//! Which model a command line means, and opening it.

use std::env;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Result;
use boostr::backend::{Cpu, CpuClient};
use boostr::checkpoint::Checkpoint;
use boostr::load::{self, LanguageModel, OpenOptions, adapters};
use boostr::models::Config;

use crate::cli;
use crate::exit::{BadModel, usage};

/// Names that an error suggests.
const MAX_NEAR: usize = 3;
/// Similarity from which on a name is suggested, from 0 to 1.
const NEAR: f64 = 0.75;

/// Where a model comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The model that is part of this program.
    Embedded,
    /// A folder, or a weight file in one.
    Path(PathBuf),
}

/// The model that is part of this program.
#[cfg(feature = "demo")]
pub mod demo {
    use boostr::load::Embedded;
    use serde::Deserialize;

    macro_rules! model_file {
        ($include:ident, $name:literal) => {
            $include!(concat!("../../../models/default/", $name))
        };
    }

    pub const FILES: Embedded = Embedded {
        name: "demo-mamba2",
        config: model_file!(include_str, "config.json"),
        weights: model_file!(include_bytes, "model.safetensors"),
        tokenizer: model_file!(include_str, "tokenizer.json"),
        tokenizer_config: model_file!(include_str, "tokenizer_config.json"),
        generation_config: model_file!(include_str, "generation_config.json"),
    };

    /// What `boostr` alone completes.
    pub const PROMPT: &str = "It is a truth universally acknowledged";

    /// A greedy continuation by the original implementation.
    #[derive(Debug, Deserialize)]
    pub struct Expected {
        pub prompt: String,
        pub prompt_ids: Vec<u32>,
        pub greedy_ids: Vec<u32>,
    }

    pub fn expected() -> serde_json::Result<Expected> {
        serde_json::from_str(model_file!(include_str, "expected.json"))
    }
}

impl Source {
    /// The model named on the command line, else by `BOOSTR_MODEL`.
    pub fn named(named: Option<&Path>) -> Option<Self> {
        named.map(Path::to_path_buf).or_else(from_env).map(Self::Path)
    }

    /// The same, else the built-in one.
    pub fn of(named: Option<&Path>) -> Result<Self> {
        match Self::named(named) {
            Some(source) => Ok(source),
            None if cfg!(feature = "demo") => Ok(Self::Embedded),
            None => Err(usage("this build has no built-in model: name one, as `boostr MODEL`")),
        }
    }

    /// Whether there is something at the path.
    ///
    /// # Errors
    ///
    /// With names that may have been meant, when there is nothing.
    pub fn check_exists(&self) -> Result<(), BadModel> {
        match self {
            Self::Embedded => Ok(()),
            Self::Path(path) => match fs::metadata(path) {
                Ok(_) => Ok(()),
                Err(error) => Err(bad(path, boostr::Error::io(path, error))),
            },
        }
    }

    /// For a folder of adapters the model that they are of, and the folder.
    pub fn with_adapter(self) -> Result<(Self, Option<PathBuf>), BadModel> {
        match &self {
            Self::Path(path) if adapters::is_adapter(path)? => {
                Ok((Self::Path(adapters::base_of(path)?), Some(path.clone())))
            }
            _ => Ok((self, None)),
        }
    }

    /// A short name for people.
    pub fn name(&self) -> String {
        let path = match self {
            #[cfg(feature = "demo")]
            Self::Embedded => return demo::FILES.name.to_owned(),
            #[cfg(not(feature = "demo"))]
            Self::Embedded => return String::new(),
            Self::Path(path) => path,
        };
        let full = fs::canonicalize(path).unwrap_or_else(|_| path.clone());
        let name = full.file_name().unwrap_or(full.as_os_str()).to_string_lossy();
        match (name.as_ref(), full.parent().and_then(Path::file_name)) {
            ("model.safetensors" | "pytorch_model.bin", Some(folder)) => {
                folder.to_string_lossy().into_owned()
            }
            _ => name.into_owned(),
        }
    }

    /// The folder that holds the configuration; `None` for the built-in model.
    pub fn folder(&self) -> Option<&Path> {
        match self {
            Self::Embedded => None,
            Self::Path(path) if path.is_dir() => Some(path),
            Self::Path(path) => {
                Some(path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")))
            }
        }
    }

    /// The weights as they lie in the file.
    pub fn checkpoint(&self, allow_pickle: bool) -> Result<Checkpoint, BadModel> {
        match self {
            #[cfg(feature = "demo")]
            Self::Embedded => {
                Ok(Checkpoint::from_safetensors(demo::FILES.name, demo::FILES.weights)?)
            }
            #[cfg(not(feature = "demo"))]
            Self::Embedded => Err(no_demo()),
            Self::Path(path) => Checkpoint::open(path, allow_pickle).map_err(|e| bad(path, e)),
        }
    }

    /// The configuration that is for this checkpoint, or for one that cannot be opened.
    pub fn config(&self, checkpoint: Option<&Checkpoint>) -> Result<Config, BadModel> {
        match self {
            #[cfg(feature = "demo")]
            Self::Embedded => {
                let file =
                    boostr::checkpoint::ConfigFile::parse("config.json", demo::FILES.config)?;
                Ok(Config::read(&file)?)
            }
            #[cfg(not(feature = "demo"))]
            Self::Embedded => Err(no_demo()),
            Self::Path(path) => {
                load::read_config(path, checkpoint).map_err(|error| bad(path, error))
            }
        }
    }

    /// Opens the whole model.
    pub fn open(
        &self,
        options: &OpenOptions,
        cpu: &CpuClient,
    ) -> Result<LanguageModel<Cpu>, BadModel> {
        match self {
            #[cfg(feature = "demo")]
            Self::Embedded => {
                let mut lm = LanguageModel::embedded(demo::FILES, cpu.clone())?;
                if let Some(path) = &options.tokenizer {
                    lm.tokenizer = Some(boostr::tokenizer::Tokenizer::from_file(path)?);
                }
                lm.model = lm.model.with_context(options.context);
                Ok(lm)
            }
            #[cfg(not(feature = "demo"))]
            Self::Embedded => Err(no_demo()),
            Self::Path(path) => {
                LanguageModel::open(path, options, cpu.clone()).map_err(|e| bad(path, e))
            }
        }
    }
}

#[cfg(not(feature = "demo"))]
fn no_demo() -> BadModel {
    boostr::Error::Unsupported { what: "built-in model (this build has none)".into() }.into()
}

fn from_env() -> Option<PathBuf> {
    env::var_os("BOOSTR_MODEL").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// An error about the model at `path`, with names that may have been meant.
pub fn bad(path: &Path, error: boostr::Error) -> BadModel {
    let is_missing = matches!(
        &error,
        boostr::Error::Io { path: at, source }
            if at == path && source.kind() == ErrorKind::NotFound
    );
    let help = if is_missing {
        help_for_missing(path)
    } else if path.is_dir() && !path.join("config.json").exists() {
        let inside: Vec<String> = entries(path)
            .filter(|entry| entry.join("config.json").exists())
            .map(|entry| format!("`{}`", entry.display()))
            .collect();
        (!inside.is_empty()).then(|| format!("models in this folder: {}", first(inside)))
    } else {
        None
    };
    BadModel { error, help }
}

/// What a path to nothing may have been meant to be.
fn help_for_missing(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_string_lossy().to_lowercase();
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
    let mut lines = Vec::new();
    if folder.is_none() {
        let commands = cli::command_names();
        if let Some(command) = nearest(&name, commands.iter().map(String::as_str)).first() {
            lines.push(format!("did you mean the command `boostr {command}`?"));
        }
    }
    let here: Vec<PathBuf> = entries(folder.unwrap_or(Path::new("."))).collect();
    let names: Vec<String> =
        here.iter().filter_map(|p| Some(p.file_name()?.to_str()?.to_owned())).collect();
    let near: Vec<String> = nearest(&name, names.iter().map(String::as_str))
        .into_iter()
        .map(|near| format!("`{}`", folder.unwrap_or(Path::new("")).join(near).display()))
        .collect();
    if !near.is_empty() {
        lines.push(format!("near names: {}", first(near)));
    } else if let Some(folder) = folder.filter(|folder| !folder.exists()) {
        lines.push(format!("there is no folder `{}` either", folder.display()));
    }
    if name.contains(char::is_whitespace) {
        lines.push("to complete a text, give it as -p TEXT".to_owned());
    }
    (!lines.is_empty()).then(|| lines.join("\n"))
}

/// Paths of what is in a folder, sorted; none when it cannot be read.
fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let read = fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<PathBuf> = read.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths.into_iter()
}

/// The names most like `name`, best first.
fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut near: Vec<(f64, &str)> = names
        .map(|other| (strsim::jaro(name, &other.to_lowercase()), other))
        .filter(|&(score, _)| score >= NEAR)
        .collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0));
    near.into_iter().map(|(_, other)| other).take(MAX_NEAR).collect()
}

fn first(names: Vec<String>) -> String {
    let more = names.len().saturating_sub(MAX_NEAR);
    let shown = names.into_iter().take(MAX_NEAR).collect::<Vec<_>>().join(", ");
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}
