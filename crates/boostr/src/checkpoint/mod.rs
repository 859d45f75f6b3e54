//! Checkpoints: bytes in, named tensors and metadata out.
//!
//! A [`Checkpoint`] is a sorted table of names. Each has a type, a shape and a view into bytes that
//! stay in place: a memory-mapped file, a small file that was read, or an array compiled into the
//! program. Opening converts and copies nothing, except a transposed tensor of a torch file.
//!
//! Every file is taken as hostile. Whatever its bytes, opening returns a checkpoint or an error. The
//! error names the file, the tensor, the expected value and the found one. Opening does not panic, runs
//! nothing, and does not allocate out of proportion to the file.
//!
//! | file | holds |
//! |---|---|
//! | `entry` | [`Dtype`], [`Bytes`], [`TensorEntry`] |
//! | `folder` | the files of a folder that make the checkpoint |
//! | [`ConfigFile`] | the fields of `config.json` |
//! | `map` | files read or mapped, the only unsafe code here |
//! | [`safetensors`], [`gguf`] | those formats, both ways |
//! | `zip`, `pickle`, `values`, `torch` | `pytorch_model.bin`, read without running it |
//! | `finite` | [`not_finite`]: NaN and infinities, which only reading all data finds |
//! | `progress` | [`Progress`]: how far the making of weights is |
//! | `summary` | [`Summary`]: how many parameters and bytes, of which types |
//! | `atomic` | [`atomic_write`] |
//! | `json` | maps in which a repeated key is an error |
//! | `fnv` | a hash; the checksum is [`crc32`] |
//! | `lock` | one writer at a time |

#![deny(unsafe_code)]
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

mod atomic;
mod config;
mod entry;
mod finite;
mod fnv;
mod folder;
pub mod gguf;
mod json;
mod lock;
mod map;
mod pickle;
mod private;
mod progress;
pub mod safetensors;
mod summary;
mod torch;
mod values;
mod zip;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) use crate::files::stamp;
pub use atomic::atomic_write;
pub(crate) use atomic::{clean, create_beside, follow_links, sync_folder};
pub use config::ConfigFile;
pub(crate) use entry::quoted;
pub use entry::{Bytes, Dtype, Owner, TensorEntry};
pub use finite::{NotFinite, not_finite};
pub(crate) use fnv::Fnv;
pub(crate) use folder::snapshots;
pub(crate) use lock::{make_private, open_own, try_lock};
pub(crate) use map::{Access, bytes_of, is_large};
pub(crate) use private::private;
pub use private::{PrivateFile, PrivateFolder};
pub use progress::Progress;
pub use summary::Summary;

use crate::error::{Error, Result};

/// CRC-32, the checksum of zip and gzip, of `bytes` after those whose checksum is `crc`; 0 at the start.
///
/// It finds files that were cut or have rotted, not files that were forged. Up to 32 neighbouring
/// bits that changed are found for certain.
///
/// ```
/// use boostr::checkpoint::crc32;
///
/// assert_eq!(crc32(0, b"123456789"), 0xcbf4_3926);
/// assert_eq!(crc32(crc32(0, b"1234"), b"56789"), 0xcbf4_3926);
/// ```
#[must_use]
pub fn crc32(crc: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(crc);
    hasher.update(bytes);
    hasher.finalize()
}

/// Named tensors of a model, and the metadata of the files they came from.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    tensors: BTreeMap<String, TensorEntry>,
    metadata: BTreeMap<String, String>,
    /// Shared by clones: it may hold a whole `tokenizer.json`.
    gguf: Option<Arc<gguf::Metadata>>,
    path: PathBuf,
    progress: Option<Progress>,
}

/// What one file, or the files of one folder, hold.
#[derive(Debug, Default)]
struct Contents {
    tensors: BTreeMap<String, TensorEntry>,
    metadata: BTreeMap<String, String>,
    gguf: Option<gguf::Metadata>,
}

impl Checkpoint {
    /// Opens a model folder, or one file whatever its name.
    ///
    /// Files of up to 64 MiB are read, larger ones are mapped: while they are, nobody may write to them or cut them
    /// short (to replace them by rename is safe).
    ///
    /// In a folder the first of these is used: `model.safetensors`, `model.safetensors.index.json` with its shards,
    /// all shards by their names (`NAME-00001-of-00002.safetensors`), the only `*.safetensors` there is, the only
    /// `*.gguf` or set of parts of one, `pytorch_model.bin`. A file is told by its first bytes: GGUF, safetensors, or the zip
    /// that `torch.save` writes. Of a GGUF model in parts, `NAME-00001-of-00003.gguf`, any part
    /// stands for all.
    ///
    /// A torch file is a Python pickle, a program. It is refused unless `allow_pickle`, and then
    /// read by an interpreter that knows the few types a weight file needs and executes nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the system refuses a path; [`Error::Format`] when there is no checkpoint
    /// in the folder, a shard is missing, a download is incomplete, or a file breaks its format.
    ///
    /// ```no_run
    /// use boostr::checkpoint::Checkpoint;
    ///
    /// let checkpoint = Checkpoint::open("models/mamba2-130m".as_ref(), false)?;
    /// println!("{} tensors", checkpoint.len());
    /// # Ok::<(), boostr::error::Error>(())
    /// ```
    pub fn open(path: &Path, allow_pickle: bool) -> Result<Self> {
        Self::open_by(path, allow_pickle, Access::Map)
    }

    /// Opens as [`open`](Self::open) does, and reads all files into memory, so that nothing that becomes of them
    /// matters any more.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn read(path: &Path, allow_pickle: bool) -> Result<Self> {
        Self::open_by(path, allow_pickle, Access::Read)
    }

    pub(crate) fn open_by(path: &Path, allow_pickle: bool, access: Access) -> Result<Self> {
        Ok(Self::new(path, folder::read(path, allow_pickle, access)?))
    }

    /// Checks that no mapped file of it was written to since it was opened, see [`Bytes::check_unchanged`].
    ///
    /// # Errors
    ///
    /// [`Error::Format`] with the first file that was.
    pub fn check_unchanged(&self) -> Result<()> {
        let mut seen: Option<&Path> = None;
        for entry in self.tensors.values() {
            // Tensors of one file mostly come together.
            if seen != Some(&*entry.file) {
                entry.data.check_unchanged()?;
                seen = Some(&*entry.file);
            }
        }
        Ok(())
    }

    /// Reads a safetensors file that is already in memory; `name` stands for its path in errors.
    ///
    /// The bytes are kept, and shared by all tensors.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] when the bytes break the format.
    ///
    /// ```
    /// use boostr::checkpoint::Checkpoint;
    ///
    /// let file: &'static [u8] = b"\x02\0\0\0\0\0\0\0{}";
    /// assert!(Checkpoint::from_safetensors("built-in", file)?.is_empty());
    /// # Ok::<(), boostr::error::Error>(())
    /// ```
    pub fn from_safetensors(
        name: &str,
        bytes: impl AsRef<[u8]> + Send + Sync + 'static,
    ) -> Result<Self> {
        let path = Path::new(name);
        Ok(Self::new(path, safetensors::read(path, &Bytes::new(bytes))?))
    }

    /// Reads a GGUF file that is already in memory; `name` stands for its path in errors.
    ///
    /// The bytes are kept, and shared by all tensors.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] when the bytes break the format.
    pub fn from_gguf(name: &str, bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> Result<Self> {
        let path = Path::new(name);
        let (metadata, tensors) = gguf::read(path, &Bytes::new(bytes))?;
        Ok(Self::new(path, Contents { tensors, gguf: Some(metadata), ..Contents::default() }))
    }

    /// Reads a torch zip file that is already in memory; `name` stands for its path in errors.
    ///
    /// The same reader, with the same closed list of types, as [`Checkpoint::open`] with
    /// `allow_pickle`.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] when the bytes are no torch zip, break it, or ask for anything but
    /// tensors.
    pub fn from_torch_zip(
        name: &str,
        bytes: impl AsRef<[u8]> + Send + Sync + 'static,
    ) -> Result<Self> {
        let path = Path::new(name);
        Ok(Self::new(path, torch::read(path, &Bytes::new(bytes))?))
    }

    /// A checkpoint of tensors that are already in memory; `name` stands for its path in errors.
    pub fn from_entries(name: &str, tensors: BTreeMap<String, TensorEntry>) -> Self {
        Self::new(Path::new(name), Contents { tensors, ..Contents::default() })
    }

    /// Opens one safetensors file, whatever its name.
    pub(crate) fn open_safetensors(path: &Path) -> Result<Self> {
        Ok(Self::new(path, safetensors::read(path, &bytes_of(path, Access::Map)?)?))
    }

    fn new(path: &Path, contents: Contents) -> Self {
        let Contents { tensors, metadata, gguf } = contents;
        Self {
            tensors,
            metadata,
            gguf: gguf.map(Arc::new),
            path: path.to_path_buf(),
            progress: None,
        }
    }

    /// The tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(name)
    }

    /// All names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// All tensors with their names, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &TensorEntry)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is no tensor.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The folder or file as it was given to [`Checkpoint::open`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The `__metadata__` of the safetensors files; where shards disagree, the first one's.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The metadata of a GGUF file, that of the first part of several; `None` for other files.
    pub fn gguf(&self) -> Option<&gguf::Metadata> {
        self.gguf.as_deref()
    }

    /// Gives each tensor the name that `new_name` returns, or leaves it where that is `None`.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] when two tensors would have one name; then nothing is renamed.
    ///
    /// ```
    /// # use boostr::checkpoint::Checkpoint;
    /// # let mut checkpoint = Checkpoint::from_safetensors("x", b"\x02\0\0\0\0\0\0\0{}")?;
    /// checkpoint.rename(|name| name.strip_prefix("model.").map(String::from))?;
    /// # Ok::<(), boostr::error::Error>(())
    /// ```
    pub fn rename(&mut self, new_name: impl Fn(&str) -> Option<String>) -> Result<()> {
        let mut renamed = BTreeMap::new();
        for old in self.tensors.keys() {
            match renamed.entry(new_name(old).unwrap_or_else(|| old.clone())) {
                Entry::Vacant(slot) => {
                    slot.insert(old.as_str());
                }
                Entry::Occupied(slot) => {
                    let (first, new) = (quoted(slot.get()), quoted(slot.key()));
                    let reason = format!("tensors {first} and {} are both {new}", quoted(old));
                    return Err(Error::format(&self.path, reason));
                }
            }
        }
        let tensors = renamed
            .into_iter()
            .filter_map(|(new, old)| Some((new, self.tensors.get(old)?.clone())))
            .collect();
        self.tensors = tensors;
        Ok(())
    }

    /// As [`rename`](Self::rename) for weights that a file may have several times: tensors that get one name must be
    /// equal, and are there once.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] when two that get one name are not equal.
    pub fn unite(&mut self, new_name: impl Fn(&str) -> Option<String>) -> Result<()> {
        let mut united: BTreeMap<String, (&str, &TensorEntry)> = BTreeMap::new();
        for (name, entry) in &self.tensors {
            let new = new_name(name).unwrap_or_else(|| name.clone());
            let &mut (first, known) = united.entry(new).or_insert((name, entry));
            let is_same = known.dtype == entry.dtype
                && known.shape == entry.shape
                && *known.data == *entry.data;
            if !is_same {
                let [first, name] = [first, name].map(str::escape_debug);
                let reason = format!("`{first}` and `{name}` are one shared weight, but not equal");
                return Err(Error::Tensors { path: self.path.clone(), reason });
            }
        }
        self.tensors = united.into_iter().map(|(name, (_, entry))| (name, entry.clone())).collect();
        Ok(())
    }

    /// Puts other tensors in place of all.
    pub fn replace(&mut self, tensors: BTreeMap<String, TensorEntry>) {
        self.tensors = tensors;
    }

    /// Adds the tensors of another, in place of those of the same names.
    pub fn add(&mut self, other: &Self) {
        self.tensors
            .extend(other.tensors.iter().map(|(name, entry)| (name.clone(), entry.clone())));
    }

    /// The same, whose `progress` is told of each tensor that a weight is made of.
    #[must_use]
    pub fn with_progress(self, progress: Progress) -> Self {
        progress.restart();
        Self { progress: Some(progress), ..self }
    }

    /// Tells that a weight was made of `entry`.
    ///
    /// # Errors
    ///
    /// [`Error::Interrupted`] when no more is wanted.
    pub(crate) fn taken(&self, entry: &TensorEntry) -> Result<()> {
        let Some(progress) = &self.progress else { return Ok(()) };
        match progress.add(entry.data.len(), || self.bytes()) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Interrupted { path: self.path.clone() }),
        }
    }

    /// Tells that all weights were made.
    pub(crate) fn all_taken(&self) {
        if let Some(progress) = &self.progress {
            progress.finish(self.bytes());
        }
    }

    /// Bytes of all tensors.
    fn bytes(&self) -> usize {
        self.tensors.values().map(|entry| entry.data.len()).sum()
    }

    /// Decodes all quantized tensors to f32, in memory of their own.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] when the blocks are not those of the shape.
    pub fn decode(&mut self) -> Result<()> {
        for entry in self.tensors.values_mut() {
            if matches!(entry.dtype, Dtype::Block(_)) {
                let data = Bytes::new(Dtype::F32.encode(&entry.to_f32()?)?);
                entry.data.release();
                *entry = TensorEntry { dtype: Dtype::F32, data, ..entry.clone() };
            }
        }
        Ok(())
    }

    /// Leaves only the tensors whose names `keep` wants.
    pub fn retain(&mut self, mut keep: impl FnMut(&str) -> bool) {
        self.tensors.retain(|name, _| keep(name));
    }

    /// Gives a tensor another shape of as many elements; a row of blocks must stay whole blocks.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] when there is no such tensor, or its bytes are not those of the shape.
    pub fn reshape(&mut self, name: &str, shape: &[usize]) -> Result<()> {
        let error = |reason| Error::Tensors { path: self.path.clone(), reason };
        let Some(entry) = self.tensors.get_mut(name) else {
            return Err(error(format!("tensor {} is missing", quoted(name))));
        };
        if entry.dtype.bytes_of(shape) != Some(entry.data.len()) {
            let (name, dtype, old) = (quoted(name), entry.dtype.name(), &entry.shape);
            return Err(error(format!("tensor {name}: {dtype} {old:?} cannot be {shape:?}")));
        }
        entry.shape = shape.to_vec();
        Ok(())
    }
}
