//! One list of a family's fields, run in four directions: `config.json` and GGUF's metadata, in and out.
//!
//! A family visits its fields in the order in which its `config.json` has them. Reading fills each value in, so a
//! default may be computed of what was read before it.

use serde_json::{Map, Value, json};

use super::MAX_SIZE;
use super::gguf::{Keys, KeysMut};
use crate::checkpoint::{Checkpoint, ConfigFile, gguf};
use crate::error::Result;
use crate::nn::{AttentionConfig, MixerConfig, RopeConfig};

/// Where the fields of a configuration come from, or go to.
pub struct Fields<'a> {
    way: Way<'a>,
    /// Whether what has no name in a `config.json` is written as what it is likely to have been.
    is_folder: bool,
}

enum Way<'a> {
    FromJson(&'a ConfigFile),
    FromGguf(&'a Keys<'a>, &'a Checkpoint),
    ToJson(&'a mut Map<String, Value>),
    ToGguf(&'a mut KeysMut<'a>),
}

/// What is to be done when a file does not have a field.
#[derive(Debug, Clone, Copy)]
pub enum Need<T> {
    /// It is an error.
    Required,
    /// This is taken, in `config.json` for a null too; a flag that is null is false, as in Python.
    Or(T),
    /// This is taken; in `config.json` a null is an error, as for transformers.
    Missing(T),
    /// In `config.json` what the configuration class of transformers has is taken, but for a null; in GGUF it is an
    /// error.
    Class(T),
}

/// A field's names: in `config.json`, where `a|b` is written as `a` and read as either, and in GGUF under the prefix
/// of the architecture. An empty name is that of no field: reading takes the default, and nothing is written.
pub type Names<'n> = [&'n str; 2];

/// How one kind of field is read and written.
struct Kind<T> {
    json: fn(&ConfigFile, &[&str]) -> Result<Option<T>>,
    gguf: fn(&Keys<'_>, &str) -> Result<Option<T>>,
    to_json: fn(T) -> Value,
    to_gguf: fn(T) -> gguf::Value,
}

const SIZE: Kind<usize> = Kind {
    json: |file, keys| file.usize(keys, 1..=MAX_SIZE),
    gguf: |keys, name| keys.optional(name),
    to_json: |size| json!(size),
    to_gguf: |size| (size as u32).into(),
};
const COUNT: Kind<usize> = Kind { json: |file, keys| file.usize(keys, 0..=MAX_SIZE), ..SIZE };
const LENGTH: Kind<usize> = Kind {
    json: |file, keys| file.usize(keys, 1..=1 << 40),
    gguf: |keys, name| keys.metadata.usize(&keys.key(name), 1..=1 << 40),
    ..SIZE
};
const FLOAT: Kind<f32> = Kind {
    json: |file, keys| file.float(keys, f32::MIN..=f32::MAX),
    gguf: |keys, name| keys.float(name),
    to_json: |x| json!(shortest(x)),
    to_gguf: Into::into,
};
const EPSILON: Kind<f32> =
    Kind { json: |file, keys| file.float(keys, f32::MIN_POSITIVE..=1.0), ..FLOAT };
const FLAG: Kind<bool> = Kind {
    json: ConfigFile::bool,
    gguf: |keys, name| keys.bool(name),
    to_json: |is| json!(is),
    to_gguf: Into::into,
};

impl<'a> Fields<'a> {
    /// Fields that are read from a `config.json`.
    #[must_use]
    pub fn from_json(file: &'a ConfigFile) -> Self {
        Self::of(Way::FromJson(file))
    }

    /// Fields that are read from GGUF's metadata; some are told by the tensors that there are.
    #[must_use]
    pub fn from_gguf(keys: &'a Keys<'a>, checkpoint: &'a Checkpoint) -> Self {
        Self::of(Way::FromGguf(keys, checkpoint))
    }

    /// Fields that are written to a `config.json`.
    pub fn to_json(json: &'a mut Map<String, Value>) -> Self {
        Self::of(Way::ToJson(json))
    }

    /// Fields that are written to the `config.json` of a new folder: the same, and where that has no name for a
    /// scaling of positions, the settings that it was made of.
    pub fn to_folder(json: &'a mut Map<String, Value>) -> Self {
        Self { is_folder: true, ..Self::to_json(json) }
    }

    fn of(way: Way<'a>) -> Self {
        Self { way, is_folder: false }
    }

    /// Fields that are written to GGUF's metadata.
    pub fn to_gguf(keys: &'a mut KeysMut<'a>) -> Self {
        Self::of(Way::ToGguf(keys))
    }

    /// The `config.json` that is read.
    #[must_use]
    pub fn json(&self) -> Option<&'a ConfigFile> {
        match self.way {
            Way::FromJson(file) => Some(file),
            _ => None,
        }
    }

    /// The GGUF file that is read.
    #[must_use]
    pub fn gguf(&self) -> Option<(&'a Keys<'a>, &'a Checkpoint)> {
        match self.way {
            Way::FromGguf(keys, checkpoint) => Some((keys, checkpoint)),
            _ => None,
        }
    }

    /// The `config.json` that is written.
    pub fn json_mut(&mut self) -> Option<&mut Map<String, Value>> {
        match &mut self.way {
            Way::ToJson(json) => Some(json),
            _ => None,
        }
    }

    /// The metadata that are written.
    pub fn gguf_mut(&mut self) -> Option<&mut KeysMut<'a>> {
        match &mut self.way {
            Way::ToGguf(keys) => Some(keys),
            _ => None,
        }
    }

    /// Whether a `config.json` is written.
    #[must_use]
    pub fn writes_json(&self) -> bool {
        matches!(self.way, Way::ToJson(_))
    }

    /// Whether values are filled in.
    #[must_use]
    pub fn reads(&self) -> bool {
        matches!(self.way, Way::FromJson(_) | Way::FromGguf(..))
    }

    fn field<T: Copy>(
        &mut self,
        [json, gguf]: Names<'_>,
        value: &mut T,
        need: Need<T>,
        kind: &Kind<T>,
    ) -> Result<()> {
        let names: Vec<&str> = json.split('|').filter(|name| !name.is_empty()).collect();
        let null = self.json().and_then(|file| names.iter().find(|key| file.states(key)));
        let is_json = self.json().is_some();
        let default = |missing: &dyn Fn() -> crate::error::Error| match need {
            Need::Or(default) => Ok(default),
            Need::Class(default) if is_json && null.is_none() => Ok(default),
            Need::Missing(default) if null.is_none() => Ok(default),
            Need::Required | Need::Class(_) | Need::Missing(_) => Err(missing()),
        };
        match &mut self.way {
            Way::FromJson(file) => {
                let first = names.first().copied().unwrap_or_default();
                let missing = || match null {
                    Some(null) => file.error(null, "a value is missing: it is null"),
                    None => file.error(first, format!("missing (looked for {})", names.join(", "))),
                };
                *value = match (kind.json)(file, &names)? {
                    Some(found) => found,
                    None => default(&missing)?,
                };
            }
            Way::FromGguf(keys, _) => {
                let found = if gguf.is_empty() { None } else { (kind.gguf)(keys, gguf)? };
                *value = match found {
                    Some(found) => found,
                    None => default(&|| keys.error(gguf, "missing"))?,
                };
            }
            Way::ToJson(json) => {
                if let Some(name) = names.first() {
                    json.insert((*name).to_owned(), (kind.to_json)(*value));
                }
            }
            Way::ToGguf(keys) if !gguf.is_empty() => keys.set(gguf, (kind.to_gguf)(*value)),
            Way::ToGguf(_) => {}
        }
        Ok(())
    }

    /// A size, 1 to [`MAX_SIZE`].
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) that names the field, for what is something else, or missing.
    pub fn size(&mut self, names: Names<'_>, value: &mut usize, need: Need<usize>) -> Result<()> {
        if let (Some((keys, _)), Need::Required | Need::Class(_)) = (self.gguf(), need) {
            *value = keys.size(names[1])?;
            return Ok(());
        }
        self.field(names, value, need, &SIZE)
    }

    /// A number that may be 0.
    ///
    /// # Errors
    ///
    /// As [`size`](Self::size).
    pub fn count(&mut self, names: Names<'_>, value: &mut usize, need: Need<usize>) -> Result<()> {
        self.field(names, value, need, &COUNT)
    }

    /// Tokens that a model was made for.
    ///
    /// # Errors
    ///
    /// As [`size`](Self::size).
    pub fn context(&mut self, value: &mut usize, default: usize) -> Result<()> {
        let names = ["max_position_embeddings", "context_length"];
        self.field(names, value, Need::Missing(default), &LENGTH)
    }

    /// The same under other names.
    ///
    /// # Errors
    ///
    /// As [`size`](Self::size).
    pub fn length(&mut self, names: Names<'_>, value: &mut usize, default: usize) -> Result<()> {
        self.field(names, value, Need::Or(default), &LENGTH)
    }

    /// A finite number.
    ///
    /// # Errors
    ///
    /// As [`size`](Self::size).
    pub fn float(&mut self, names: Names<'_>, value: &mut f32, need: Need<f32>) -> Result<()> {
        self.field(names, value, need, &FLOAT)
    }

    /// Whether something is so.
    ///
    /// # Errors
    ///
    /// As [`size`](Self::size).
    pub fn flag(&mut self, names: Names<'_>, value: &mut bool, need: Need<bool>) -> Result<()> {
        let file = self.json().filter(|_| matches!(need, Need::Or(_)));
        let keys = || names[0].split('|');
        if file
            .is_some_and(|file| keys().any(|it| file.states(it)) && !keys().any(|it| file.has(it)))
        {
            *value = false;
            return Ok(());
        }
        self.field(names, value, need, &FLAG)
    }

    /// Whether a part has a bias, or another parameter: a field in JSON, in GGUF the tensor that is there.
    ///
    /// # Errors
    ///
    /// As [`size`](Self::size).
    pub fn has(&mut self, json: &str, tensor: &str, value: &mut bool, default: bool) -> Result<()> {
        if let Some((_, checkpoint)) = self.gguf() {
            *value = checkpoint.get(tensor).is_some();
            return Ok(());
        }
        self.flag([json, ""], value, Need::Missing(default))
    }

    /// What is added to the mean of squares of norms.
    ///
    /// # Errors
    ///
    /// As [`size`](Self::size).
    pub fn norm_eps(&mut self, json: &str, value: &mut f32, default: f32) -> Result<()> {
        if let Some((keys, _)) = self.gguf() {
            *value = keys.norm_eps()?;
            return Ok(());
        }
        let names = [json, "attention.layer_norm_rms_epsilon"];
        self.field(names, value, Need::Missing(default), &EPSILON)
    }

    /// Number of layers, 1 to 10,000.
    ///
    /// # Errors
    ///
    /// As [`size`](Self::size).
    pub fn n_layer(&mut self, json: &str, value: &mut usize) -> Result<()> {
        const LAYERS: Kind<usize> =
            Kind { json: |file, keys| file.usize(keys, 1..=10_000), ..SIZE };
        if let Some((keys, _)) = self.gguf() {
            *value = keys.n_layer()?;
            return Ok(());
        }
        self.field([json, "block_count"], value, Need::Required, &LAYERS)
    }

    /// The ids that the tokenizer may give, and whether the head is the embedding. Both are read here; who writes a
    /// file knows them better than a configuration.
    ///
    /// # Errors
    ///
    /// As [`size`](Self::size).
    pub fn vocabulary(&mut self, size: &mut usize, tied: &mut Option<bool>) -> Result<()> {
        if let Some(file) = self.json() {
            *size = file.required(&["vocab_size"], 1..=MAX_SIZE)?;
            *tied = file.bool(&["tie_word_embeddings"])?;
        }
        if let Some((keys, _)) = self.gguf() {
            (*size, *tied) = (keys.vocab_size()?, None);
        }
        Ok(())
    }

    /// Something that `config.json` says of every model of the family.
    pub fn constant(&mut self, name: &str, value: impl Into<Value>) {
        if let Some(json) = self.json_mut() {
            json.insert(name.to_owned(), value.into());
        }
    }

    /// Something that GGUF's metadata say of every model of the family.
    pub fn gguf_constant(&mut self, name: &str, value: impl Into<gguf::Value>) {
        if let Some(keys) = self.gguf_mut() {
            keys.set(name, value);
        }
    }

    /// An activation by its names, of which the first is written and any is read; no other is supported.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) for another activation.
    pub fn activation(&mut self, json: &str, names: &[&str]) -> Result<()> {
        let file = self.json();
        file.map_or(Ok(()), |file| file.not_null(json))?;
        let found = file.map(|file| file.text(json)).transpose()?.flatten();
        if let (Some(file), Some(act)) = (file, found.filter(|act| !names.contains(act))) {
            return Err(file.error(json, format!("expected {}, found {act:?}", names[0])));
        }
        self.constant(json, names[0]);
        Ok(())
    }

    /// Bounds of steps, `[low, high]`, under names as [`Names`] has them; `(0, infinity)` when missing.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) for what is no such pair.
    pub fn limits(&mut self, json: &str, value: &mut (f32, f32)) -> Result<()> {
        let (first, _) = json.split_once('|').unwrap_or((json, ""));
        if let Some(file) = self.json() {
            let there = json.split('|').find(|key| file.has(key));
            *value = read_limits(file, there.unwrap_or(first))?;
        }
        let (low, high) = *value;
        let high = if high.is_finite() {
            json!(shortest(high))
        } else {
            json!({ "__float__": "Infinity" })
        };
        self.constant(first, json!([shortest(low), high]));
        Ok(())
    }

    /// A list of N factors; ones when it is missing.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) for a list of another length, or of what is not finite.
    pub fn factors<const N: usize>(&mut self, json: &str, value: &mut [f32; N]) -> Result<()> {
        if self.reads() {
            *value = [1.0; N];
        }
        if let Some(file) = self.json()
            && let Some(list) = file.floats(json)?
        {
            *value = match <[f32; N]>::try_from(list.as_slice()) {
                Ok(factors) if factors.iter().all(|factor| factor.is_finite()) => factors,
                Ok(factors) => {
                    let reason = format!("expected finite numbers, found {factors:?}");
                    return Err(file.error(json, reason));
                }
                Err(_) => {
                    let reason = format!("expected {N} numbers, found {}", list.len());
                    return Err(file.error(json, reason));
                }
            };
        }
        self.constant(json, value.map(shortest).to_vec());
        Ok(())
    }

    /// Heads of queries, heads of keys and values, and their width, under the names that all families have; and the
    /// scale that follows from the width. What a `config.json` does not have is as in transformers' class of the
    /// model, where that fits the heads of queries.
    ///
    /// # Errors
    ///
    /// As [`size`](Self::size); when values have another width than keys.
    pub fn heads(&mut self, attention: &mut AttentionConfig) -> Result<()> {
        let a = attention;
        let nheads = ["num_attention_heads", "attention.head_count"];
        self.size(nheads, &mut a.nheads, Need::Required)?;
        let nheads_kv = ["num_key_value_heads", "attention.head_count_kv"];
        let kind = self.json().map(|file| file.text("model_type")).transpose()?.flatten();
        let of_class = self.class_heads_kv(a.nheads)?;
        let need = match kind {
            Some(kind) if is_qwen_delta(kind) => Need::Missing(of_class),
            _ => Need::Or(of_class),
        };
        self.size(nheads_kv, &mut a.nheads_kv, need)?;
        let need = match kind {
            Some("qwen3") => Need::Missing(128),
            Some(kind) if is_qwen_delta(kind) => Need::Missing(256),
            _ => Need::Or(a.d_model.checked_div(a.nheads).unwrap_or(0)),
        };
        self.size(["head_dim", "attention.key_length"], &mut a.headdim, need)?;
        self.value_length(a.headdim)?;
        if self.reads() {
            a.scale = (a.headdim as f32).sqrt().recip();
        }
        Ok(())
    }

    /// Heads of keys and values of a model of `nheads` heads whose file does not say.
    pub(super) fn class_heads_kv(&self, nheads: usize) -> Result<usize> {
        let Some(file) = self.json().filter(|file| !file.states("num_key_value_heads")) else {
            return Ok(nheads);
        };
        let of_class = match file.text("model_type")? {
            Some("mistral" | "bamba" | "falcon_h1" | "nemotron_h") => 8,
            Some("qwen2" | "qwen3") => 32,
            Some("qwen3_5" | "qwen3_5_text") => 4,
            Some(kind) if is_qwen_delta(kind) => 2,
            _ => nheads,
        };
        Ok(if nheads.is_multiple_of(of_class) { of_class } else { nheads })
    }

    /// The width of values, which is that of keys.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) when it is another.
    pub fn value_length(&mut self, headdim: usize) -> Result<()> {
        let mut width = headdim;
        self.count(["", "attention.value_length"], &mut width, Need::Or(headdim))?;
        if let Some((keys, _)) = self.gguf().filter(|_| width != headdim) {
            let reason = format!("expected {headdim}, as keys have, found {width}");
            return Err(keys.error("attention.value_length", reason));
        }
        Ok(())
    }

    /// Rotary positions of heads of `headdim`, of which the share `partial` rotates where a file does not say.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) for an impossible value,
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a scaling that the file has no name for.
    pub fn rope(
        &mut self,
        rope: &mut Option<RopeConfig>,
        headdim: usize,
        partial: f32,
    ) -> Result<()> {
        match &mut self.way {
            Way::FromJson(file) => *rope = Some(RopeConfig::read(file, headdim, partial)?),
            Way::FromGguf(keys, checkpoint) => *rope = Some(keys.rope(checkpoint, headdim)?),
            Way::ToJson(json) => {
                if let Some(rope) = rope {
                    let known = if self.is_folder { rope.llama3() } else { None };
                    known.as_ref().unwrap_or(rope).write_json(json, headdim)?;
                }
            }
            Way::ToGguf(keys) => {
                if let Some(rope) = rope {
                    keys.rope(rope)?;
                }
            }
        }
        Ok(())
    }

    /// The Mamba-2 mixer that GGUF's `ssm.*` describe, but for the width of the model, which is read before; nothing
    /// of a `config.json`, which has another name for each of its sizes in every family.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) when a key is missing or impossible,
    /// [`Error::Unsupported`](crate::Error::Unsupported) for what GGUF has no key for.
    pub fn gguf_mixer(&mut self, mixer: &mut MixerConfig) -> Result<()> {
        match &mut self.way {
            Way::FromGguf(keys, _) => *mixer = keys.mixer()?,
            Way::ToGguf(keys) => keys.mixer(mixer)?,
            _ => {}
        }
        Ok(())
    }
}

/// Whether a model of this type is one of Qwen's with gated delta mixers.
fn is_qwen_delta(model_type: &str) -> bool {
    model_type == "qwen3_next" || model_type.starts_with("qwen3_5")
}

/// A pair of bounds in order, the upper one possibly infinite; `(0, infinity)` when missing.
pub(super) fn read_limits(file: &ConfigFile, key: &str) -> Result<(f32, f32)> {
    match file.floats(key)?.as_deref() {
        None => Ok((0.0, f32::INFINITY)),
        Some(&[low, high]) if low <= high && low.is_finite() => Ok((low, high)),
        Some(other) => Err(file.error(key, format!("expected [low, high], found {other:?}"))),
    }
}

/// The double that people write for this float: 1e-5, not 9.999999747378752e-6.
pub(super) fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or_else(|_| f64::from(x))
}
