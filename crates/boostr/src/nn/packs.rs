//! The file of a model's packed experts: written once, then mapped.
//!
//! Quantized blocks are multiplied in an order that is not the file's (`quant/packed.rs` of the kernels). Most weights
//! are put in it at each load. Of a mixture with many experts that would take the memory of all, though a token reads
//! few. So theirs are written beside the model, where the system reads what is touched.
//!
//! The file is one of safetensors: bytes by the names of weights, and the checksum of each. It is named by the
//! model's fingerprint and the order. It counts only while the files that it was made of have the same length and
//! time of modification. A weight is checked when it is first used, and again when the file was written to since,
//! which each pass through the layers looks at once. Of one that is damaged the blocks are packed again, in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::backend::{Backend, Weight};
use crate::checkpoint::{
    Bytes, Checkpoint, Dtype, TensorEntry, crc32, is_large, safetensors, stamp,
};
use crate::error::{Error, Result};
use crate::ops::{Format, HostBytes, LinearOps, QuantTensor};

/// The end of the file's name.
const EXTENSION: &str = "packed";
/// The tensor of checksums, in the order of the others' names.
const CHECKSUMS: &str = "~crc32";
/// The weights begin at a multiple of it in the file: a cache line. The size of each is one.
const ALIGNMENT: usize = 64;
/// What the file says of itself and what it was made of.
const VERSION: (&str, &str) = ("boostr.packed", "3");
const SOURCES: &str = "sources";

/// A weight that is to be packed: matrices of blocks of one format, row under row.
#[derive(Debug, Clone)]
pub struct Pack {
    name: String,
    parts: Vec<TensorEntry>,
    format: Format,
    shape: [usize; 2],
}

impl Pack {
    /// The weight `name` of these parts; `None` unless they are mapped blocks that products read.
    pub(super) fn new(name: String, parts: Vec<TensorEntry>) -> Option<Self> {
        let first = parts.first()?;
        let (Dtype::Block(format), &[_, width]) = (first.dtype, &first.shape[..]) else {
            return None;
        };
        let mut rows = 0usize;
        for part in &parts {
            let &[features, columns] = &part.shape[..] else { return None };
            if part.dtype != first.dtype || columns != width || !part.data.is_mapped() {
                return None;
            }
            rows = rows.checked_add(features)?;
        }
        let shape = [rows, width];
        crate::ops::packed_size(format, shape)?;
        Some(Self { name, parts, format, shape })
    }

    /// Bytes of its blocks in the model's file.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.parts.iter().map(|part| part.data.len()).sum()
    }

    /// Bytes once it is packed.
    fn size(&self) -> usize {
        crate::ops::packed_size(self.format, self.shape).unwrap_or(0)
    }

    /// The blocks, as the model's file has them.
    fn unpacked(&self) -> Result<QuantTensor> {
        let bytes: Vec<u8> = self.parts.iter().flat_map(|part| part.data.iter().copied()).collect();
        self.parts.iter().for_each(|part| part.data.release());
        let all = 0..bytes.len();
        let bytes = HostBytes::new(Arc::new(bytes), all)?;
        QuantTensor::new(bytes, self.format, self.shape)
    }
}

/// Lines about what went wrong with files since a model was opened.
#[derive(Debug, Default)]
pub struct Notices(Mutex<Vec<String>>);

impl Notices {
    pub(crate) fn add(&self, line: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    /// Those that nobody took yet.
    #[must_use]
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A file of packs that is in use.
struct InUse {
    path: PathBuf,
    /// What files it was made of.
    sources: BTreeSet<String>,
    notices: Arc<Notices>,
    /// Whether damage was told.
    is_told: AtomicBool,
    /// What file was there at the last look.
    seen: Mutex<Option<String>>,
    /// How often another was found there, from 1.
    edition: AtomicU64,
}

impl InUse {
    fn new(path: &Path, sources: BTreeSet<String>, notices: &Arc<Notices>) -> Self {
        Self {
            path: path.to_path_buf(),
            sources,
            notices: notices.clone(),
            is_told: AtomicBool::new(false),
            seen: Mutex::new(stamp(path)),
            edition: AtomicU64::new(1),
        }
    }

    /// Asks the system whether the file was written to, or removed.
    fn look(&self) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let now = stamp(&self.path);
        if *seen != now {
            *seen = now;
            self.edition.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The blocks of a weight whose bytes are damaged, out of the model's file. The file goes, so that the next load
    /// writes it anew.
    fn again(&self, pack: &Pack) -> Result<QuantTensor> {
        let removed = fs::remove_file(&self.path);
        let is_known =
            |part: &TensorEntry| stamp(&part.file).is_some_and(|now| self.sources.contains(&now));
        let name = &pack.name;
        if !pack.parts.iter().all(is_known) {
            let reason = format!(
                "the checksum of `{name}` is another, and the model's file was written to since: \
                 load the model again"
            );
            return Err(Error::damaged(&self.path, reason));
        }
        if !self.is_told.swap(true, Ordering::Relaxed) {
            let next = match removed {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    format!("delete it, and the next load writes it anew ({error})")
                }
                _ => "the next load writes it anew".to_owned(),
            };
            self.notices.add(format!(
                "`{}` is damaged: the checksum of `{name}` is another; damaged experts are read from \
                 the model's file, and {next}",
                self.path.display()
            ));
        }
        pack.unpacked()
    }
}

/// The packed experts of one model.
pub struct Packs {
    file: Arc<InUse>,
    weights: BTreeMap<String, (Bytes, u32)>,
}

impl Packs {
    /// The file beside the model for the experts `list`, by the model's `fingerprint`; `kind` follows the order in its
    /// name. `None` where there are none, or so few that they may as well be in memory.
    #[must_use]
    pub fn path_for<B: Backend>(
        list: &[Pack],
        client: &B::Client,
        kind: &str,
        fingerprint: impl FnOnce() -> String,
    ) -> Option<PathBuf> {
        let order = format!("{}{kind}", client.packing()?);
        let bytes = list.iter().map(Pack::size).fold(0, usize::saturating_add);
        let source = list.first()?.parts.first()?.file.clone();
        let name = source.file_name()?.to_string_lossy().into_owned();
        let file = || format!("{name}.{}.{order}.{EXTENSION}", fingerprint());
        is_large(bytes).then(|| source.with_file_name(file()))
    }

    /// The file at `path`; `None` when it is not there, or of another state of the model's files, or damaged in its
    /// header. Damage that is found later is told to `notices`.
    #[must_use]
    pub fn open(path: &Path, list: &[Pack], notices: &Arc<Notices>) -> Option<Self> {
        let file = Checkpoint::open_safetensors(path).ok()?;
        if *file.metadata() != described(list)? {
            return None;
        }
        let sums = file.get(CHECKSUMS)?.data.as_chunks::<4>().0.to_vec();
        let entries: Vec<_> = file.iter().filter(|(name, _)| *name != CHECKSUMS).collect();
        if sums.len() != entries.len() {
            return None;
        }
        let weight = |((name, entry), sum): ((&str, &TensorEntry), [u8; 4])| {
            (name.to_owned(), (entry.data.clone(), u32::from_le_bytes(sum)))
        };
        let weights: BTreeMap<_, _> = entries.into_iter().zip(sums).map(weight).collect();
        let has = |pack: &Pack| weights.get(&pack.name).is_some_and(|w| w.0.len() == pack.size());
        let sources = file.metadata().get(SOURCES)?.lines().map(str::to_owned).collect();
        let file = || Arc::new(InUse::new(path, sources, notices));
        list.iter().all(has).then(|| Self { file: file(), weights })
    }

    /// Packs `list` and writes it at `path`, or leaves there what was. `taken` hears of each part. Files of models that
    /// were in this one's place are removed.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the system refuses; what `taken` returns.
    pub fn write<B: Backend>(
        path: &Path,
        list: &[Pack],
        client: &B::Client,
        taken: impl Fn(&TensorEntry) -> Result<()>,
    ) -> Result<()> {
        let mut packs: Vec<&Pack> = list.iter().collect();
        packs.sort_by(|a, b| a.name.cmp(&b.name));
        let sizes: Vec<[usize; 1]> = packs.iter().map(|pack| [pack.size()]).collect();
        let sums_size = [4 * packs.len()];
        let mut tensors: Vec<(&str, Dtype, &[usize])> = packs
            .iter()
            .zip(&sizes)
            .map(|(pack, size)| (pack.name.as_str(), Dtype::U8, &size[..]))
            .collect();
        tensors.push((CHECKSUMS, Dtype::U8, &sums_size));
        let metadata = described(list).ok_or_else(|| {
            Error::io(path, std::io::Error::other("the model's files cannot be looked at"))
        })?;
        let mut sums = Vec::new();
        safetensors::write_aligned(path, ALIGNMENT, &tensors, &metadata, |index| {
            let Some(pack) = packs.get(index) else { return Ok(sums.clone()) };
            pack.parts.iter().try_for_each(&taken)?;
            let weight = client.quantized(&pack.unpacked()?)?;
            let bytes = weight.packed_bytes().unwrap_or_default().to_vec();
            sums.extend(crc32(0, &bytes).to_le_bytes());
            Ok(bytes)
        })?;
        remove_others(path);
        Ok(())
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// Looks whether the file was written to. Weights are checked again if it was.
    pub fn look(&self) {
        self.file.look();
    }

    /// A weight where it lies in the file, if it is there.
    pub(super) fn weight<B: Backend>(
        &self,
        pack: &Pack,
        client: &B::Client,
    ) -> Result<Option<Weight<B>>> {
        let Some((data, sum)) = self.weights.get(&pack.name) else { return Ok(None) };
        if data.len() != pack.size() {
            return Ok(None);
        }
        let bytes = HostBytes::new(data.owner().clone(), data.range())?;
        let (file, pack, sum) = (self.file.clone(), pack.clone(), *sum);
        let (format, shape) = (pack.format, pack.shape);
        // The edition whose bytes were found to be right.
        let checked = AtomicU64::new(0);
        let check = move |bytes: &[u8]| {
            let edition = file.edition.load(Ordering::Relaxed);
            if checked.load(Ordering::Relaxed) == edition {
                return Ok(None);
            }
            if crc32(0, bytes) != sum {
                return file.again(&pack).map(Some);
            }
            checked.store(edition, Ordering::Relaxed);
            Ok(None)
        };
        client.of_packed(bytes, format, shape, Box::new(check)).map(Some)
    }
}

/// Removes the files beside `path` of models of the same name and another fingerprint: each is of the size of a model.
fn remove_others(path: &Path) {
    let parts = |path: &Path| {
        let name = path.file_name()?.to_str()?.strip_suffix(EXTENSION)?.strip_suffix('.')?;
        let (rest, order) = name.rsplit_once('.')?;
        let (model, fingerprint) = rest.rsplit_once('.')?;
        Some([model, order, fingerprint].map(str::to_owned))
    };
    let Some([model, order, fingerprint]) = parts(path) else { return };
    let entries = path.parent().and_then(|folder| fs::read_dir(folder).ok());
    for entry in entries.into_iter().flatten().flatten() {
        let is_other = parts(&entry.path()).is_some_and(|it| {
            let is_hex = it[2].len() == fingerprint.len()
                && it[2].bytes().all(|digit| digit.is_ascii_hexdigit());
            it[0] == model && it[1] == order && it[2] != fingerprint && is_hex
        });
        if !is_other || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let (key, _) = VERSION;
        let file = Checkpoint::open_safetensors(&entry.path());
        if file.is_ok_and(|file| file.metadata().contains_key(key)) {
            // One that stays costs room alone.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// What a file of `list` says of itself: lengths and times of the files that it was made of.
fn described(list: &[Pack]) -> Option<BTreeMap<String, String>> {
    let mut sources = BTreeMap::new();
    for part in list.iter().flat_map(|pack| &pack.parts) {
        if sources.contains_key(&part.file) {
            continue;
        }
        sources.insert(part.file.clone(), stamp(&part.file)?);
    }
    let sources = sources.into_values().collect::<Vec<_>>().join("\n");
    let (key, version) = VERSION;
    Some([(key.to_owned(), version.to_owned()), (SOURCES.to_owned(), sources)].into())
}
