//! Low-rank adapters beside a model, in the files of PEFT.
//!
//! ```text
//! adapter_config.json         r, lora_alpha, base_model_name_or_path, ..
//! adapter_model.safetensors   base_model.model.NAME.lora_A.weight [r, in], base_model.model.NAME.lora_B.weight [out, r]
//! ```
//!
//! NAME is that of a layer in transformers, which [`Adapters::beside`] turns into the model's own.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use regex::Regex;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{is_gguf, read_text};
use crate::checkpoint::{Access, Bytes, Checkpoint, Dtype, TensorEntry};
use crate::error::{Error, Result};
use crate::models::Config;
use crate::nn::{Layout, Stored};

/// What stands before the names of a PEFT file.
pub const PREFIX: &str = "base_model.model.";
/// What adapters are, in JSON.
pub const CONFIG: &str = "adapter_config.json";
/// Their matrices.
pub const WEIGHTS: &str = "adapter_model.safetensors";

/// A change of a weight `[out, in]` by `scale · b · a`.
#[derive(Debug, Clone)]
pub struct Adapter {
    /// `[r, in]`
    pub a: TensorEntry,
    /// `[out, r]`
    pub b: TensorEntry,
    /// alpha / r
    pub scale: f32,
}

/// The adapters of a folder.
#[derive(Debug, Clone)]
pub struct Adapters {
    folder: PathBuf,
    about: About,
    /// The matrices a, the matrices b, and their factors `[1]`, called as the weights that they change.
    matrices: [Checkpoint; 3],
}

/// What `adapter_config.json` says.
#[derive(Debug, Clone, Deserialize)]
struct About {
    peft_type: String,
    base_model_name_or_path: Option<String>,
    r: usize,
    lora_alpha: f64,
    bias: Option<String>,
    modules_to_save: Option<Vec<String>>,
    /// Other ranks, by regular expressions of layers' names.
    rank_pattern: Option<Map<String, Value>>,
    /// Other values of alpha, by the same.
    alpha_pattern: Option<Map<String, Value>>,
    use_rslora: Option<bool>,
    /// How the adapters began. Some ways change the model's weights too, see [`CHANGES_THE_MODEL`].
    init_lora_weights: Option<Value>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Fields of PEFT that make more of an adapter than its two products, when they are there and not off.
const OTHER_KINDS: [&str; 9] = [
    "alora_invocation_tokens",
    "arrow_config",
    "layer_replication",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
];

/// Beginnings that take from the model's own weights what they give the adapters.
const CHANGES_THE_MODEL: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

/// Values for the layers whose names regular expressions fit, in the order of the file.
struct Patterns<T>(Vec<(Regex, T)>);

impl<T: Copy> Patterns<T> {
    /// Those of a `field` of the file at `path`.
    ///
    /// A key is a regular expression of the end of a layer's name, after a dot or from its start, as PEFT has it.
    fn read(
        path: &Path,
        field: &str,
        patterns: Option<&Map<String, Value>>,
        expected: &str,
        value: impl Fn(&Value) -> Option<T>,
    ) -> Result<Self> {
        let read = |(key, found): (&String, &Value)| {
            let error = |reason: String| Error::Config {
                path: path.to_path_buf(),
                field: format!("{field}.{}", key.escape_debug()),
                reason,
            };
            let value =
                value(found).ok_or_else(|| error(format!("expected {expected}, found {found}")))?;
            let regex = Regex::new(&format!(r"^(.*\.)?({key})$")).map_err(|e| {
                let e = e.to_string().replace('\n', " ");
                error(format!("expected a regular expression that is supported: {e}"))
            })?;
            Ok((regex, value))
        };
        patterns.into_iter().flatten().map(read).collect::<Result<_>>().map(Self)
    }

    /// The first that fits the name of the layer.
    fn of(&self, layer: &str) -> Option<T> {
        self.0.iter().find(|(name, _)| name.is_match(layer)).map(|(_, value)| *value)
    }
}

impl About {
    fn read(path: &Path) -> Result<Self> {
        let missing = || Error::io(path, ErrorKind::NotFound.into());
        let text = read_text(path)?.ok_or_else(missing)?;
        let about: Self =
            serde_json::from_str(&text).map_err(|e| Error::format(path, e.to_string()))?;
        let refused = match &about {
            Self { peft_type, .. } if peft_type != "LORA" => format!("peft_type {peft_type:?}"),
            Self { bias: Some(bias), .. } if bias != "none" => format!("bias {bias:?}"),
            Self { modules_to_save: Some(names), .. } if !names.is_empty() => {
                format!("modules_to_save {names:?}")
            }
            Self { init_lora_weights: Some(Value::String(way)), .. }
                if CHANGES_THE_MODEL.iter().any(|it| way.to_lowercase().starts_with(it)) =>
            {
                format!("init_lora_weights {way:?}, which changes the model's own weights")
            }
            Self { r: 0, .. } => "r of 0".to_owned(),
            about => match OTHER_KINDS.iter().find(|field| is_on(about.others.get(**field))) {
                Some(field) if *field == "target_parameters" => {
                    let names = about.others.get(*field).unwrap_or(&Value::Null);
                    format!("target_parameters {names}: adapters of stacked experts")
                }
                Some(field) => (*field).to_owned(),
                None => return Ok(about.clone()),
            },
        };
        Err(Error::format(path, format!("expected plain LoRA, found {refused}")))
    }

    /// The ranks that some layers have of their own.
    fn ranks(&self, path: &Path) -> Result<Patterns<usize>> {
        let rank = |value: &Value| usize::try_from(value.as_u64()?).ok().filter(|&r| r > 0);
        let patterns = self.rank_pattern.as_ref();
        Patterns::read(path, "rank_pattern", patterns, "a whole number above 0", rank)
    }

    /// The values of alpha that some layers have of their own.
    fn alphas(&self, path: &Path) -> Result<Patterns<f64>> {
        let patterns = self.alpha_pattern.as_ref();
        Patterns::read(path, "alpha_pattern", patterns, "a number", Value::as_f64)
    }

    /// The factor of an adapter of rank `r` of the layer.
    fn scale(&self, alphas: &Patterns<f64>, layer: &str, r: usize) -> f32 {
        let alpha = alphas.of(layer).unwrap_or(self.lora_alpha);
        let r = r as f64;
        (alpha / if self.use_rslora == Some(true) { r.sqrt() } else { r }) as f32
    }
}

/// Whether a field is there, and neither false, 0 nor empty.
fn is_on(field: Option<&Value>) -> bool {
    match field {
        None | Some(Value::Null) => false,
        Some(Value::Bool(truth)) => *truth,
        Some(Value::Number(number)) => number.as_f64() != Some(0.0),
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Array(list)) => !list.is_empty(),
        Some(Value::Object(object)) => !object.is_empty(),
    }
}

/// Whether a layer is all experts of a layer in one: a tensor of them, or the module that has it.
fn is_stack(layer: &str, layout: &Layout) -> bool {
    let is_it = |stored: &Stored| {
        let several = stored.shape.len() > 2 && stored.parts.len() > 1;
        several && stored.name.trim_end_matches(".weight") == layer
    };
    let is_module = |(_, rest): (&str, &str)| match rest.strip_prefix('.') {
        Some(part) => !part.starts_with(|c: char| c.is_ascii_digit()),
        None => rest.is_empty(),
    };
    layer.rsplit_once(".experts").is_some_and(is_module) || layout.0.iter().any(is_it)
}

/// Whether there are adapters in a folder, and no model.
///
/// # Errors
///
/// [`Error::Format`] for links to nothing.
pub fn is_adapter(path: &Path) -> Result<bool> {
    let has = |name| super::present(&path.join(name));
    Ok(path.is_dir() && has(CONFIG)? && !has("config.json")? && !has("params.json")?)
}

/// The model that the adapters in a folder are of: where they say, seen from here or from their folder.
///
/// # Errors
///
/// [`Error::Format`] when there is no model.
pub fn base_of(folder: &Path) -> Result<PathBuf> {
    let path = folder.join(CONFIG);
    let about = About::read(&path)?;
    let Some(base) = about.base_model_name_or_path.filter(|base| !base.is_empty()) else {
        let reason = "names no base model: name it, with these adapters as --adapter";
        return Err(Error::format(path, reason));
    };
    let places = [PathBuf::from(&base), folder.join(&base)];
    places.into_iter().find(|place| place.exists()).ok_or_else(|| {
        let reason = format!(
            "its base model `{base}` is not there: name the folder or file, with these adapters as --adapter"
        );
        Error::format(path, reason)
    })
}

impl Adapters {
    /// Reads what PEFT or boostr wrote.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when a file is missing, [`Error::Format`] for another kind of adapter,
    /// [`Error::Tensors`] for matrices that are none of LoRA's, or do not fit each other.
    pub fn read(folder: &Path) -> Result<Self> {
        Self::read_by(folder, Access::Map)
    }

    /// Checks that their file was not written to since it was opened.
    pub(crate) fn check_unchanged(&self) -> Result<()> {
        self.matrices.iter().try_for_each(Checkpoint::check_unchanged)
    }

    pub(super) fn read_by(folder: &Path, access: Access) -> Result<Self> {
        let config = folder.join(CONFIG);
        let about = About::read(&config)?;
        let (ranks, alphas) = (about.ranks(&config)?, about.alphas(&config)?);
        let path = folder.join(WEIGHTS);
        let file = Checkpoint::open_by(&path, false, access)?;
        let bad = |reason: String| Error::Tensors { path: path.clone(), reason };
        let mut matrices = [BTreeMap::new(), BTreeMap::new()];
        for (name, entry) in file.iter() {
            let layer = name.strip_prefix(PREFIX).unwrap_or(name);
            let ends = [".lora_A.weight", ".lora_B.weight"];
            let of = ends.iter().position(|end| layer.ends_with(end));
            let Some(of) = of.filter(|_| entry.shape.len() == 2) else {
                let shape = &entry.shape;
                return Err(bad(format!("tensor `{name}` {shape:?} is no matrix of LoRA")));
            };
            let layer = &layer[..layer.len() - ends[of].len()];
            matrices[of].insert(format!("{layer}.weight"), entry.clone());
        }
        let [a, b] = &matrices;
        let apart = a.keys().find(|name| !b.contains_key(*name));
        if let Some(name) = apart.or_else(|| b.keys().find(|name| !a.contains_key(*name))) {
            let layer = name.trim_end_matches(".weight");
            return Err(bad(format!("expected lora_A and lora_B of `{layer}`, found one of them")));
        }
        for (name, a) in a {
            let (a, b) = (&a.shape, &b[name].shape);
            let layer = name.trim_end_matches(".weight");
            if a[0] == 0 || a[0] != b[1] {
                let reason = format!("`{layer}` has lora_A {a:?} and lora_B {b:?} of other ranks");
                return Err(bad(reason));
            }
            let (field, rank) = match ranks.of(layer) {
                Some(rank) => ("rank_pattern", rank),
                None => ("r", about.r),
            };
            if a[0] != rank {
                let (config, found) = (config.display(), a[0]);
                return Err(bad(format!(
                    "`{layer}` has rank {found}, but `{field}` in `{config}` says {rank}"
                )));
            }
        }
        let mut scales = BTreeMap::new();
        for (name, a) in a {
            let layer = name.strip_suffix(".weight").unwrap_or(name);
            let scale = about.scale(&alphas, layer, a.shape.first().copied().unwrap_or(0));
            if !scale.is_finite() {
                let reason = format!("the factor of `{layer}` is {scale}: alpha is too large");
                return Err(Error::format(&config, reason));
            }
            let data = Bytes::new(Dtype::F32.encode(&[scale])?);
            let entry = TensorEntry { dtype: Dtype::F32, shape: vec![1], data, ..a.clone() };
            scales.insert(name.clone(), entry);
        }
        let at = path.display().to_string();
        let [a, b] = matrices;
        let matrices = [a, b, scales].map(|entries| Checkpoint::from_entries(&at, entries));
        Ok(Self { folder: folder.to_path_buf(), about, matrices })
    }

    /// Their folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// r and alpha.
    #[must_use]
    pub fn rank(&self) -> (usize, f64) {
        (self.about.r, self.about.lora_alpha)
    }

    /// Parameters of all adapters.
    #[must_use]
    pub fn parameters(&self) -> usize {
        let entries = self.matrices.iter().take(2).flat_map(Checkpoint::iter);
        entries.map(|(_, entry)| entry.shape.iter().product::<usize>()).sum()
    }

    /// The layers that are adapted, by the last parts of their names, and how many there are of each.
    #[must_use]
    pub fn layers(&self) -> BTreeMap<String, usize> {
        let mut layers = BTreeMap::new();
        for name in self.matrices[0].names() {
            let last = name.trim_end_matches(".weight").rsplit('.').next().unwrap_or_default();
            *layers.entry(last.to_owned()).or_default() += 1;
        }
        layers
    }

    /// The adapters by the names of the layers of a model whose `weights` have the model's own names. One of
    /// a tensor that the model has as several weights is as many: they share a, and each has its rows of b.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] for an adapter of no layer of the model, or of one of another shape;
    /// [`Error::Unsupported`] for weights with multipliers folded in, when the adapters were trained on unfolded
    /// weights, and the reverse; and for adapters of experts that are stacked in one tensor.
    pub fn beside(
        &self,
        config: &Config,
        weights: &Checkpoint,
    ) -> Result<BTreeMap<String, Adapter>> {
        let family = config.family();
        let base = self.about.base_model_name_or_path.as_deref().unwrap_or_default();
        let of_gguf = is_gguf(Path::new(base)).unwrap_or(false);
        if family.gguf_folds() && weights.gguf().is_some() != of_gguf {
            let [of, with] =
                if of_gguf { ["GGUF file", "folder"] } else { ["folder", "GGUF file"] };
            let what = format!(
                "adapters of a {of} (`{}`) with a {with}: GGUF files of {} have its factors in their weights",
                self.folder.display(),
                family.name(),
            );
            return Err(Error::Unsupported { what });
        }
        let layout = family.hf_layout(family.frame().padded_vocab(), true)?;
        let layers = self.matrices[0].names().map(|name| name.trim_end_matches(".weight"));
        if let Some(layer) = layers.into_iter().find(|layer| is_stack(layer, &layout)) {
            let (folder, layer) = (self.folder.display(), layer.escape_debug());
            let what = format!(
                "adapters of the stacked experts `{layer}` (`{folder}`): those of single experts \
                 (`.experts.0.`) are read"
            );
            return Err(Error::Unsupported { what });
        }
        let [mut a, mut b, mut scales] = self.matrices.clone();
        for tensors in [&mut a, &mut b, &mut scales] {
            family.normalise(tensors)?;
        }
        let bad = |reason: String| Error::Tensors { path: a.path().to_path_buf(), reason };
        let mut adapters = BTreeMap::new();
        for (name, a) in a.iter() {
            let (Some(b), Some(scale)) = (b.get(name), scales.get(name)) else { continue };
            let stored = layout.0.iter().find(|stored| stored.name == name);
            let parts = match weights.get(name) {
                Some(weight) => vec![(name.to_owned(), weight.shape.clone())],
                None => {
                    let parts = stored.into_iter().flat_map(|stored| &stored.parts);
                    parts.map(|part| (part.name.clone(), part.shape.clone())).collect()
                }
            };
            let order = stored.and_then(|stored| Some((stored, stored.order.as_ref()?.columns)));
            let (a, b) = match order {
                None => (a.clone(), b.clone()),
                Some((stored, true)) => (stored.in_model_order(a)?, b.clone()),
                Some((stored, false)) => (a.clone(), stored.in_model_order(b)?),
            };
            let layer = name.trim_end_matches(".weight");
            let other = "adapters of another model?";
            if parts.is_empty() {
                return Err(bad(format!("`{layer}` is no layer of the model: {other}")));
            }
            let (r, out) = (a.shape[0], b.shape[0]);
            let rows: usize = parts.iter().map(|(_, shape)| shape[0]).sum();
            let is_of = |shape: &[usize]| matches!(shape, &[_, width] if width == a.shape[1]);
            if parts.iter().any(|(_, shape)| shape.len() > 2) {
                let what =
                    format!("adapters of `{layer}`, whose heads act apart on queries and output");
                return Err(Error::Unsupported { what });
            }
            if rows != out || !parts.iter().all(|(_, shape)| is_of(shape)) {
                let (of, shapes) = ([out, a.shape[1]], parts.iter().map(|part| &part.1));
                let shapes: Vec<_> = shapes.collect();
                let reason = format!(
                    "`{layer}` is changed as {of:?}, but the model has {shapes:?}: {other}"
                );
                return Err(bad(reason));
            }
            let scale = scale.to_f32()?.first().copied().unwrap_or(1.0);
            let mut row = 0;
            for (name, shape) in parts {
                let [before, own] = [row, shape[0]].map(|rows| b.dtype.bytes_of(&[rows, r]));
                let (before, own) = (before.unwrap_or(0), own.unwrap_or(0));
                let Some(data) = b.data.slice(before..before + own) else { continue };
                let b = TensorEntry { shape: vec![shape[0], r], data, ..b.clone() };
                let layer = name.trim_end_matches(".weight").to_owned();
                adapters.insert(layer, Adapter { a: a.clone(), b, scale });
                row += shape[0];
            }
        }
        Ok(adapters)
    }

    /// Puts the adapters beside the weights of a model.
    ///
    /// # Errors
    ///
    /// As [`beside`](Self::beside).
    pub fn put_beside(&self, config: &Config, weights: &mut Checkpoint) -> Result<()> {
        let adapters = self.beside(config, weights)?;
        let entries = weights.iter().map(|(name, entry)| (name.to_owned(), entry.clone()));
        let mut tensors: BTreeMap<String, TensorEntry> = entries.collect();
        let file: Arc<Path> = self.folder.as_path().into();
        for (layer, Adapter { a, b, scale }) in adapters {
            let data = Bytes::new(Dtype::F32.encode(&[scale])?);
            let scale = TensorEntry { dtype: Dtype::F32, shape: vec![1], data, file: file.clone() };
            tensors.insert(format!("{layer}.lora_A.weight"), a);
            tensors.insert(format!("{layer}.lora_B.weight"), b);
            tensors.insert(format!("{layer}.lora_scale"), scale);
        }
        weights.replace(tensors);
        Ok(())
    }
}
