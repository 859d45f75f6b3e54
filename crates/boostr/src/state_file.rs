//! A sequence's state as a file: a text is read once, and the next process continues from there.
//!
//! ```
//! use boostr::models::{Config, Logits, Model, Run};
//! use boostr::state_file::{About, SavedState, StateFile};
//! use boostr::{backend, checkpoint::{ConfigFile, Dtype}};
//!
//! # let config = Config::read(&ConfigFile::parse("config.json", r#"{
//! #     "model_type": "mamba2", "hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4,
//! #     "n_groups": 1, "num_hidden_layers": 1, "vocab_size": 32
//! # }"#)?)?;
//! # let model = Model::<backend::Cpu>::synthetic(config, Dtype::F32, backend::cpu())?;
//! # let path = std::env::temp_dir().join(format!("boostr-doc-{}.state", std::process::id()));
//! let mut state = model.new_state()?;
//! model.forward(&mut [Run { tokens: &[5, 17, 3], state: &mut state }], Logits::None)?;
//! let about = About { ids: Some(&[5, 17, 3]), ..About::new("my-model") };
//! StateFile::lock(&path)?.save(&model, &state, &about)?;
//!
//! let saved = SavedState::open(&path)?;
//! let prompt = [5, 17, 3, 9];
//! let rest = saved.rest_of(&prompt).expect("the prompt continues the state");
//! let mut state = saved.restore(&model)?;
//! model.forward(&mut [Run { tokens: rest, state: &mut state }], Logits::Last)?;
//! assert_eq!((rest, state.position()), (&[9][..], 4));
//! # std::fs::remove_file(&path)?;
//! # std::fs::remove_file(path.with_file_name(format!(".{}.lock", path.file_name().unwrap().display())))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The file is safetensors, and its metadata identify the state:
//!
//! | metadata | value |
//! |---|---|
//! | `format`, `version` | `boostr.state`, `1` |
//! | `model`, `family` | the model's name, for people; its family |
//! | `fingerprint` | [`Model::fingerprint`] |
//! | `dtype` | `f32`, or `bf16` where the state was rounded |
//! | `kv_type` | type of the KV cache: `f32`, `f16`, `bf16`, `q8_0`; absent without attention |
//! | `position` | tokens seen |
//! | `checksum` | CRC-32 of all other metadata and all tensors, in 8 hexadecimal digits |
//!
//! | tensor | shape | type |
//! |---|---|---|
//! | `layers.I.conv` | `[d_conv - 1, conv_dim]` | `dtype` |
//! | `layers.I.ssm` | `[H, P, N]` | `dtype` |
//! | `layers.I.keys` | `[n, Hk, d_key]`, the last n positions | `kv_type` if that is a 16-bit float, else `dtype` |
//! | `layers.I.values` | `[n, Hk, d_value]` | the same; none where values are channels of the keys |
//! | `ids` | `[position]` | U32; may be absent |
//!
//! The checksum covers the metadata: for each key in order the key, a zero byte, the value and a zero
//! byte. Then it covers each tensor by name: the name, a zero byte, the type, a zero byte, the
//! dimensions with commas between them, a zero byte, and the data.
//!
//! A state saved as f32 has the same bits when it comes back, whatever the type of its KV cache. As
//! bf16 it takes half the space, and a continuation differs: see [`StateType::Bf16`].
//!
//! A file is taken as hostile, like a checkpoint. A file that opens has passed all checks that need no
//! model. [`SavedState::restore`] makes the rest before it makes a tensor.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects
    )
)]

mod compare;
mod parts;
mod pieces;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::backend::{Backend, KvCache};
use crate::checkpoint::{
    Checkpoint, Dtype, TensorEntry, atomic_write, crc32, follow_links, make_private, not_finite,
    quoted, safetensors, try_lock,
};
use crate::error::{Error, Result};
use crate::models::{Model, State};
use crate::nn::{Kept, SlotSize};
use crate::ops::{self, AttentionOps, KvSizes, KvType};

pub use compare::{LayerNorms, TensorNorms, diff, mix, norms};
use parts::{KEYS, Part, Parts, VALUES};
pub(crate) use pieces::{MAX_IDS, Pieces, SEGMENT, has_segments, is_rows_alone, peek, restore};

const FORMAT: &str = "boostr.state";
const VERSION: &str = "1";
const IDS: &str = "ids";
const CHECKSUM: &str = "checksum";

/// Largest position that a file may name: so much that no sum of it with a length overflows.
const MAX_POSITION: usize = usize::MAX / 2;

/// Most names that the tensors of a file's layers have.
const MAX_NAMES: usize = 32;

/// What the elements of a saved state are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum StateType {
    /// As they are in memory.
    #[default]
    F32,
    /// Rounded to 8 bits of precision, in half the bytes. What follows then differs: see `docs/state.md` for how much.
    Bf16,
}

impl StateType {
    /// Both types.
    pub const ALL: [Self; 2] = [Self::F32, Self::Bf16];

    /// The name that options and files use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }

    fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
        }
    }

    /// What the elements of a part are in a file. 16-bit keys and values are exact as what they are.
    fn of(self, part: &Part, kind: Option<KvType>) -> Dtype {
        match kind.filter(|_| part.is_kv()) {
            Some(KvType::F16) => Dtype::F16,
            Some(KvType::Bf16) => Dtype::BF16,
            _ => self.dtype(),
        }
    }
}

/// What a file says of its state beside the tensors.
#[derive(Debug, Clone, Copy)]
pub struct About<'a> {
    /// Name of the model, for people.
    pub model: &'a str,
    /// All tokens that the state has seen, so that a prompt that begins with them can be told; `None` when they are
    /// not known, or nobody else is to know them.
    pub ids: Option<&'a [u32]>,
    /// What the elements are rounded to.
    pub dtype: StateType,
}

impl<'a> About<'a> {
    /// A state of the model called `model`, unrounded, without its tokens.
    #[must_use]
    pub fn new(model: &'a str) -> Self {
        Self { model, ids: None, dtype: StateType::F32 }
    }
}

/// The file of a state, which this process alone writes as long as it has this.
///
/// Beside it is `.NAME.lock`, which stays.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
    lock: File,
    is_private: bool,
}

impl Drop for StateFile {
    fn drop(&mut self) {
        // Closing it would not do while a process that is just being started has a copy.
        let _ = self.lock.unlock();
    }
}

impl StateFile {
    /// Claims the file at `path`, which need not be there yet. Reading needs no lock: a reader finds the old file or
    /// the new one.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when another process has it or the path names no file, [`Error::Io`] when the system
    /// refuses.
    pub fn lock(path: &Path) -> Result<Self> {
        let refuse = |reason| Error::Argument { name: "path", reason };
        let is_folder = fs::metadata(path).is_ok_and(|metadata| metadata.is_dir());
        // The same file by another name has the same lock, though it is not there yet.
        let path = follow_links(path).map_err(|error| Error::io(path, error))?;
        let path = match (path.parent(), path.file_name()) {
            (Some(folder), Some(name)) => {
                let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
                fs::canonicalize(folder).map_or(path.clone(), |folder| folder.join(name))
            }
            _ => path,
        };
        let Some(name) = path.file_name().filter(|_| !is_folder) else {
            return Err(refuse(format!("`{}` is a folder, expected a file", path.display())));
        };
        let lock = path.with_file_name(format!(".{}.lock", name.display()));
        match try_lock(&lock) {
            Ok(Some(lock)) => Ok(Self { path, lock, is_private: false }),
            Ok(None) => {
                let reason = format!("another process is about to write `{}`", path.display());
                Err(refuse(reason))
            }
            Err(Error::Io { source, .. }) => Err(Error::io(&path, source)),
            Err(other) => Err(other),
        }
    }

    /// The same file, which is to be its owner's alone, whoever could read the one before.
    #[must_use]
    pub fn private(mut self) -> Self {
        self.is_private = true;
        self
    }

    /// Writes the state of a sequence of `model`: the old file is there as it was until the new one is whole.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when the state's keys and values, or the ids, are not as many as its position says, its
    /// layers keep them as different types, or it has values that are not finite; [`Error::Unsupported`] for a model without a fingerprint; as
    /// [`Model::check_state`]; [`Error::Io`] when the system refuses.
    pub fn save<B: Backend>(
        &self,
        model: &Model<B>,
        state: &State<B>,
        about: &About<'_>,
    ) -> Result<()> {
        write(&self.path, model, state, about)?;
        self.finish()
    }

    /// Writes the bytes of another such file.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the system refuses.
    pub fn copy_of(&self, bytes: &[u8]) -> Result<()> {
        atomic_write(&self.path, |out| out.write_all(bytes))?;
        self.finish()
    }

    fn finish(&self) -> Result<()> {
        if self.is_private {
            make_private(&self.path).map_err(|error| Error::io(&self.path, error))?;
        }
        Ok(())
    }
}

/// Writes the file of a state, as [`StateFile::save`] does, for a caller that knows that nobody else writes it.
pub(crate) fn write<B: Backend>(
    path: &Path,
    model: &Model<B>,
    state: &State<B>,
    about: &About<'_>,
) -> Result<()> {
    model.check_state(state)?;
    file_of(model, state, about, &Extent::default(), |tensors, metadata, data| {
        safetensors::write_each(path, tensors, metadata, data)
    })
}

/// The bytes of the file that [`StateFile::save`] writes, for a store that has rules of its own. What
/// [`SavedState::from_bytes`] makes of them is the same state.
///
/// # Errors
///
/// As [`StateFile::save`], but for the system.
///
/// ```
/// # use boostr::models::{Config, Model};
/// # use boostr::state_file::{About, SavedState, to_bytes};
/// # use boostr::{backend, checkpoint::{ConfigFile, Dtype}};
/// # let config = Config::read(&ConfigFile::parse("config.json", r#"{
/// #     "model_type": "mamba2", "hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4,
/// #     "n_groups": 1, "num_hidden_layers": 1, "vocab_size": 32
/// # }"#)?)?;
/// # let model = Model::<backend::Cpu>::synthetic(config, Dtype::F32, backend::cpu())?;
/// let bytes = to_bytes(&model, &model.new_state()?, &About::new("my-model"))?;
/// let state = SavedState::from_bytes("a store", bytes)?.restore(&model)?;
/// assert_eq!(state.position(), 0);
/// # Ok::<(), boostr::Error>(())
/// ```
pub fn to_bytes<B: Backend>(
    model: &Model<B>,
    state: &State<B>,
    about: &About<'_>,
) -> Result<Vec<u8>> {
    model.check_state(state)?;
    file_of(model, state, about, &Extent::default(), |tensors, metadata, data| {
        safetensors::to_bytes(tensors, metadata, data)
    })
}

/// Hands `write` the file of a state of the model: name, type and shape of each tensor, the metadata, the bytes of a
/// tensor.
fn file_of<B: Backend, T>(
    model: &Model<B>,
    state: &State<B>,
    about: &About<'_>,
    extent: &Extent<'_>,
    write: impl FnOnce(
        &[(&str, Dtype, &[usize])],
        &BTreeMap<String, String>,
        &mut dyn FnMut(usize) -> Result<Vec<u8>>,
    ) -> Result<T>,
) -> Result<T> {
    let fingerprint = fingerprint_of(model)?;
    let position = state.position();
    let refuse = |name, reason| Err(Error::Argument { name, reason });
    if position > MAX_POSITION {
        return refuse("state", format!("expected at most {MAX_POSITION}, found {position}"));
    }
    if let Some(ids) = about.ids.filter(|ids| ids.len() != position) {
        let reason = format!("expected {position}, as the state has seen, found {}", ids.len());
        return refuse("ids", reason);
    }
    let mut kind = None;
    for (layer, _, kept) in state.slots() {
        let Kept::Rows(cache) = kept else { continue };
        if cache.len() != position {
            let len = cache.len();
            let reason = format!("layer {layer} has seen {len} tokens, the state {position}");
            return refuse("state", reason);
        }
        let found = cache.sizes().kind;
        if *kind.get_or_insert(found) != found {
            return refuse("state", "layers keep keys and values as different types".into());
        }
    }

    let mut tensors: Vec<Tensor> = state
        .parts()
        .into_iter()
        .filter(|(part, _)| extent.layers.is_none_or(|of| part.is_kv() && of.contains(&part.layer)))
        .map(|(part, shape)| Tensor {
            name: part.to_string(),
            dtype: about.dtype.of(&part, kind),
            shape,
            part: Some(part),
        })
        .collect();
    if about.ids.is_some() {
        let (name, shape) = (IDS.to_owned(), vec![position]);
        tensors.push(Tensor { name, dtype: Dtype::U32, shape, part: None });
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let data = |tensor: &Tensor| -> Result<Vec<u8>> {
        match &tensor.part {
            Some(part) => {
                let values = state.values(part)?;
                check_finite(part, &values)?;
                tensor.dtype.encode(&values)
            }
            None => Ok(about.ids.unwrap_or(&[]).iter().flat_map(|id| id.to_le_bytes()).collect()),
        }
    };

    let mut metadata: BTreeMap<String, String> = [
        ("format", FORMAT),
        ("version", VERSION),
        ("model", about.model),
        ("family", model.family().name()),
        ("fingerprint", fingerprint),
        ("dtype", about.dtype.name()),
        ("position", &position.to_string()),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .into();
    metadata.extend(kind.map(|kind| ("kv_type".to_owned(), kind.name().to_owned())));
    metadata.extend(extent.more.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
    // Twice the work, so that one tensor is in memory at a time.
    let mut sum = Sum::of(&metadata);
    for tensor in &tensors {
        sum.tensor(&tensor.name, tensor.dtype, &tensor.shape, &data(tensor)?);
    }
    metadata.insert(CHECKSUM.to_owned(), sum.text());

    let infos: Vec<(&str, Dtype, &[usize])> =
        tensors.iter().map(|tensor| (&*tensor.name, tensor.dtype, &*tensor.shape)).collect();
    write(&infos, &metadata, &mut |i| tensors.get(i).map_or(Ok(Vec::new()), data))
}

/// What of a state a file has, and what it says beside that.
#[derive(Default)]
struct Extent<'a> {
    /// Keys and values of these layers alone; all of the state when `None`.
    layers: Option<&'a [usize]>,
    /// More metadata.
    more: &'a [(&'a str, String)],
}

/// Refuses to write what nothing can go on from.
fn check_finite(part: &Part, values: &[f32]) -> Result<()> {
    let Some(value) = values.iter().find(|value| !value.is_finite()) else { return Ok(()) };
    let reason = format!("tensor `{part}`: expected finite numbers, found {value}");
    Err(Error::Argument { name: "state", reason })
}

/// A tensor that is to be written.
struct Tensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    /// `None` for the ids.
    part: Option<Part>,
}

/// The checksum of a file, as the documentation of the module has it.
struct Sum(u32);

impl Sum {
    fn of(metadata: &BTreeMap<String, String>) -> Self {
        let mut sum = Self(0);
        for (key, value) in metadata.iter().filter(|(key, _)| *key != CHECKSUM) {
            sum.text_and_zero(key);
            sum.text_and_zero(value);
        }
        sum
    }

    fn text_and_zero(&mut self, text: &str) {
        self.0 = crc32(crc32(self.0, text.as_bytes()), &[0]);
    }

    /// The next tensor, by name.
    fn tensor(&mut self, name: &str, dtype: Dtype, shape: &[usize], data: &[u8]) {
        self.text_and_zero(name);
        self.text_and_zero(dtype.name());
        let shape: Vec<String> = shape.iter().map(usize::to_string).collect();
        self.text_and_zero(&shape.join(","));
        self.0 = crc32(self.0, data);
    }

    fn text(&self) -> String {
        format!("{:08x}", self.0)
    }
}

fn fingerprint_of<B: Backend>(model: &Model<B>) -> Result<&str> {
    model.fingerprint().ok_or_else(|| {
        let what =
            "state file of a model whose weights are being trained (one that was loaded has a fingerprint)";
        Error::Unsupported { what: what.into() }
    })
}

/// Keys and values of a layer, which `read` finds.
fn rows_of<'a>(
    layer: usize,
    sizes: KvSizes,
    read: &mut impl FnMut(&Part, &[Option<usize>]) -> Result<&'a TensorEntry>,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let heads = Some(sizes.nheads);
    let rows = read(&Part::new(layer, KEYS), &[None, heads, Some(sizes.d_key)])?;
    let count = rows.shape.first().copied();
    let values = if sizes.latent {
        Vec::new()
    } else {
        let values = Part::new(layer, VALUES);
        read(&values, &[count, heads, Some(sizes.d_value)])?.to_f32()?
    };
    Ok((rows.to_f32()?, values))
}

/// A state as it lies in its file, which was found to be whole.
#[derive(Debug, Clone)]
pub struct SavedState {
    checkpoint: Checkpoint,
    model: String,
    family: String,
    fingerprint: String,
    dtype: StateType,
    kv_type: Option<KvType>,
    position: usize,
    ids: Option<Vec<u32>>,
}

impl SavedState {
    /// Opens a file and checks all of it that needs no model. The file is mapped, and its data are read once.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the system refuses, [`Error::Format`] for what is no state, of another version or not finite,
    /// [`Error::Damaged`] for another checksum, with the field, what was expected and what was found.
    pub fn open(path: &Path) -> Result<Self> {
        if fs::metadata(path).is_ok_and(|metadata| metadata.is_dir()) {
            return Err(Error::format(path, "is a folder, expected the file of a state"));
        }
        Self::new(Checkpoint::open(path, false)?)
    }

    /// The same of bytes that are already in memory; `name` stands for their path in errors.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] and [`Error::Damaged`] as [`open`](Self::open).
    pub fn from_bytes(name: &str, bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> Result<Self> {
        Self::new(Checkpoint::from_safetensors(name, bytes)?)
    }

    fn new(checkpoint: Checkpoint) -> Result<Self> {
        let path = checkpoint.path().to_path_buf();
        let refuse = |field: &str, expected: &str, found: Option<&str>| {
            let found = found.map_or_else(|| "none".to_owned(), quoted);
            let reason = format!("metadata `{field}`: expected {expected}, found {found}");
            Error::format(&path, reason)
        };
        let field = |key: &str| checkpoint.metadata().get(key).map(String::as_str);
        let text = |key: &str, expected: &str| {
            field(key).ok_or_else(|| refuse(key, expected, None)).map(str::to_owned)
        };
        if field("format") != Some(FORMAT) {
            let expected = format!("`{FORMAT}`, as a file of a state has");
            return Err(refuse("format", &expected, field("format")));
        }
        if field("version") != Some(VERSION) {
            let expected = format!("`{VERSION}`, which this version of boostr reads");
            return Err(refuse("version", &expected, field("version")));
        }
        // Before all else, so that what is wrong from here on was written so.
        let mut sum = Sum::of(checkpoint.metadata());
        for (name, entry) in checkpoint.iter() {
            sum.tensor(name, entry.dtype, &entry.shape, &entry.data);
        }
        if field(CHECKSUM) != Some(&sum.text()) {
            let expected = format!("`{}`, that of what is there (damaged file?)", sum.text());
            let found = field(CHECKSUM).map_or_else(|| "none".to_owned(), quoted);
            let reason = format!("metadata `{CHECKSUM}`: expected {expected}, found {found}");
            return Err(Error::damaged(path, reason));
        }

        let position = field("position").and_then(|text| text.parse::<usize>().ok());
        let position = position.filter(|&position| position <= MAX_POSITION).ok_or_else(|| {
            refuse("position", &format!("0 to {MAX_POSITION}"), field("position"))
        })?;
        let is = |kind: Option<&str>, name| kind == Some(name);
        let dtype = StateType::ALL.into_iter().find(|t| is(field("dtype"), t.name()));
        let dtype = dtype.ok_or_else(|| refuse("dtype", "f32 or bf16", field("dtype")))?;
        let kv_type = KvType::ALL.into_iter().find(|t| is(field("kv_type"), t.name()));
        if kv_type.is_none() && field("kv_type").is_some() {
            return Err(refuse("kv_type", "f32, f16, bf16 or q8_0", field("kv_type")));
        }
        let mut saved = Self {
            model: text("model", "a name")?,
            family: text("family", "a name")?,
            fingerprint: text("fingerprint", "16 hexadecimal digits")?,
            dtype,
            kv_type,
            position,
            ids: None,
            checkpoint,
        };
        saved.check_tensors()?;
        if let Some(found) = not_finite(&saved.checkpoint, |_| {})?.first() {
            let (name, nan, infinite) = (quoted(&found.name), found.nan, found.infinite);
            return Err(saved.error(format!(
                "tensor {name}: expected finite numbers, found {nan} that are NaN and {infinite} that are infinite"
            )));
        }
        saved.ids = saved.read_ids();
        Ok(saved)
    }

    fn error(&self, reason: impl Into<String>) -> Error {
        Error::format(self.checkpoint.path(), reason)
    }

    fn of_another_model(&self, reason: String) -> Error {
        Error::StateOfAnotherModel { path: self.checkpoint.path().to_path_buf(), reason }
    }

    /// Checks names, types and shapes among themselves.
    fn check_tensors(&self) -> Result<()> {
        let position = self.position;
        let mut names = BTreeSet::new();
        for (name, entry) in self.checkpoint.iter() {
            let (shape, found) = (&entry.shape, entry.dtype);
            let expect = |what: &str, expected: &str, found: &str| {
                let name = quoted(name);
                Err(self
                    .error(format!("tensor {name}: {what}: expected {expected}, found {found}")))
            };
            if name == IDS {
                if found != Dtype::U32 {
                    return expect("type", "U32", found.name());
                }
                if *shape != [position] {
                    let expected = format!("[{position}], the position");
                    return expect("shape", &expected, &format!("{shape:?}"));
                }
                continue;
            }
            let Some(part) = Part::parse(name) else {
                return Err(self.error(format!("tensor {}: no part of a state", quoted(name))));
            };
            names.insert(part.name.clone());
            if names.len() > MAX_NAMES {
                let reason = format!("expected at most {MAX_NAMES} kinds of tensors, found more");
                return Err(self.error(reason));
            }
            if part.is_kv() && self.kv_type.is_none() {
                let reason = "metadata `kv_type`: expected one, as there are keys, found none";
                return Err(self.error(reason));
            }
            let expected = self.dtype.of(&part, self.kv_type);
            if found != expected {
                return expect("type", expected.name(), found.name());
            }
            if part.is_kv() && shape.len() != 3 {
                return expect("shape", "3 dimensions", &format!("{shape:?}"));
            }
            if part.is_kv() && shape.first().is_none_or(|&count| count > position) {
                let expected = format!("at most {position} positions");
                return expect("shape", &expected, &format!("{shape:?}"));
            }
        }
        Ok(())
    }

    fn read_ids(&self) -> Option<Vec<u32>> {
        let data = &self.checkpoint.get(IDS)?.data;
        Some(data.as_chunks().0.iter().map(|&id| u32::from_le_bytes(id)).collect())
    }

    /// The model's name as it was given to [`StateFile::save`].
    #[must_use]
    pub fn model(&self) -> &str {
        &self.model
    }

    /// What else its metadata say.
    pub(crate) fn more(&self, key: &str) -> Option<&String> {
        self.checkpoint.metadata().get(key)
    }

    /// The model's family.
    #[must_use]
    pub fn family(&self) -> &str {
        &self.family
    }

    /// The model's [fingerprint](Model::fingerprint).
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// What the elements were rounded to.
    #[must_use]
    pub fn dtype(&self) -> StateType {
        self.dtype
    }

    /// What attention keeps keys and values as; `None` without attention.
    #[must_use]
    pub fn kv_type(&self) -> Option<KvType> {
        self.kv_type
    }

    /// Tokens seen.
    #[must_use]
    pub fn position(&self) -> usize {
        self.position
    }

    /// The tokens seen, if the file has them.
    #[must_use]
    pub fn ids(&self) -> Option<&[u32]> {
        self.ids.as_deref()
    }

    /// Bytes of the tensors.
    #[must_use]
    pub fn size_in_bytes(&self) -> usize {
        self.checkpoint
            .iter()
            .fold(0, |sum: usize, (_, entry)| sum.saturating_add(entry.data.len()))
    }

    /// What of `prompt` the state has not seen yet, where it has seen the beginning and nothing else; `None` when the
    /// prompt goes another way or the file does not say what was seen.
    #[must_use]
    pub fn rest_of<'a>(&self, prompt: &'a [u32]) -> Option<&'a [u32]> {
        prompt.strip_prefix(self.ids()?)
    }

    /// The state, for the model that it was saved from; its keys and values are of the file's type, not of the
    /// model's.
    ///
    /// # Errors
    ///
    /// [`Error::StateOfAnotherModel`], naming both; [`Error::Format`] for tensors that are not those of this one;
    /// [`Error::Unsupported`] for a model without a fingerprint; when memory is short.
    pub fn restore<B: Backend>(&self, model: &Model<B>) -> Result<State<B>> {
        self.restore_onto(model, &mut BTreeMap::new())
    }

    /// Refuses a file of another model.
    fn check_model<B: Backend>(&self, model: &Model<B>) -> Result<()> {
        let (family, fingerprint) = (model.family().name(), fingerprint_of(model)?);
        if self.fingerprint == fingerprint {
            return Ok(());
        }
        let [name, of, print] = [&self.model, &self.family, &self.fingerprint].map(|x| quoted(x));
        Err(self.of_another_model(format!(
            "state of another model: expected one of this `{family}` with fingerprint \
             `{fingerprint}`, found one of {name}, a {of} with fingerprint {print}"
        )))
    }

    /// The state, where keys and values before those of the file are in `before`, by layer.
    fn restore_onto<B: Backend>(
        &self,
        model: &Model<B>,
        before: &mut BTreeMap<usize, KvCache<B>>,
    ) -> Result<State<B>> {
        self.check_model(model)?;
        let client = model.client();
        let mut state = model.new_state()?;
        let parts = state.parts();
        let is_known = |part: &Part| parts.iter().any(|(own, _)| own.name == part.name);
        let mut left: BTreeSet<&str> =
            self.checkpoint.names().filter(|name| *name != IDS).collect();
        let is_foreign = |name: &&&str| Part::parse(name).is_none_or(|part| !is_known(&part));
        if let Some(name) = left.iter().find(is_foreign) {
            return Err(self.error(format!("tensor {}: no part of a state", quoted(name))));
        }
        let mut read = |part: &Part, expected: &[Option<usize>]| {
            let name = part.to_string();
            left.remove(&*name);
            self.read(&name, expected)
        };
        // Sizes by the slots of the new state, rows of as many positions as the file has.
        let layers = model.family().layers();
        for (layer, slot) in layers
            .iter()
            .enumerate()
            .flat_map(|(i, spec)| spec.slots().into_iter().map(move |slot| (i, slot)))
        {
            let kept = match slot.size() {
                SlotSize::Fixed(shape) => {
                    let exactly: Vec<_> = shape.iter().copied().map(Some).collect();
                    let entry = read(&Part::new(layer, slot.name()), &exactly)?;
                    Kept::Tensor(ops::tensor(client, &entry.to_f32()?, shape)?)
                }
                SlotSize::Rows { sizes, window } => {
                    let sizes = KvSizes { kind: self.kv_type.unwrap_or(KvType::F32), ..*sizes };
                    let (rows, values) = rows_of(layer, sizes, &mut read)?;
                    let of_keys = |error| match error {
                        Error::Argument { reason, .. } => {
                            self.error(format!("tensor `{}`: {reason}", Part::new(layer, KEYS)))
                        }
                        other => other,
                    };
                    let cache = match before.remove(&layer) {
                        Some(mut cache) => cache.extend(&rows, &values).map(|()| cache),
                        None => {
                            let width = sizes.nheads.saturating_mul(sizes.d_key);
                            let count = rows.len().checked_div(width).unwrap_or(0);
                            let first = self.position.saturating_sub(count);
                            let mut cache = client.new_cache(sizes)?;
                            cache.fill(client, first, &rows, &values).map(|()| cache)
                        }
                    };
                    let cache = cache.map_err(of_keys)?;
                    cache.check_window(*window).map_err(of_keys)?;
                    if cache.len() != self.position {
                        let reason = format!("expected to end at {}", self.position);
                        return Err(self.error(format!(
                            "tensor `{}`: {reason}, found {}",
                            Part::new(layer, KEYS),
                            cache.len()
                        )));
                    }
                    Kept::Rows(cache)
                }
            };
            state.set(layer, slot.name(), kept)?;
        }
        if let Some(name) = left.first() {
            let reason = format!("tensor {}: this model has no such part", quoted(name));
            return Err(self.error(reason));
        }
        state.set_position(self.position);
        Ok(state)
    }

    /// The tensor called `name`, if it has the expected dimensions, of which `None` is any.
    fn read(&self, name: &str, expected: &[Option<usize>]) -> Result<&TensorEntry> {
        let entry = self.checkpoint.get(name);
        let entry = entry.ok_or_else(|| self.error(format!("tensor `{name}` is missing")))?;
        if entry.shape.len() != expected.len() {
            let (rank, found) = (expected.len(), &entry.shape);
            let reason =
                format!("tensor `{name}`: shape: expected {rank} dimensions, found {found:?}");
            return Err(self.error(reason));
        }
        let is_so =
            entry.shape.iter().zip(expected).all(|(&n, want)| want.is_none_or(|want| n == want));
        if is_so {
            return Ok(entry);
        }
        let word = |n: &Option<usize>| n.map_or_else(|| "n".to_owned(), |n| n.to_string());
        let expected: Vec<String> = expected.iter().map(word).collect();
        let (expected, found) = (expected.join(", "), &entry.shape);
        Err(self.error(format!("tensor `{name}`: shape: expected [{expected}], found {found:?}")))
    }

    /// Norms of what each layer keeps.
    ///
    /// # Errors
    ///
    /// When the file was cut short since it was opened.
    pub fn norms(&self) -> Result<Vec<LayerNorms>> {
        compare::norms_of(self)
    }

    /// Norms of the difference to another state of the same model, as [`diff`].
    ///
    /// # Errors
    ///
    /// [`Error::StateOfAnotherModel`], naming both.
    pub fn diff(&self, other: &Self) -> Result<Vec<LayerNorms>> {
        if self.fingerprint != other.fingerprint {
            let [a, b] =
                [self, other].map(|s| format!("{} ({})", quoted(&s.model), quoted(&s.fingerprint)));
            let reason = format!("state of another model: expected {a}, found {b}");
            return Err(other.of_another_model(reason));
        }
        compare::diff_of(self, other)
    }
}
