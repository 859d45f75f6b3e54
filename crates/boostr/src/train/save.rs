//! Checkpoints of a run: all that a run needs to resume, in a folder that is whole or absent.
//!
//! ```text
//! runs/a/step-000500/   the model's files as transformers reads them
//!                       optimizer.safetensors    steps taken, moments, averages
//!                       trainer.json             where the run stands: see TrainerState
//!                       manifest.json            size and CRC-32 of every other file
//! runs/a/step-000400/   the one before; the last K are kept
//! runs/a/.lock          held by the process that trains, so that there is one
//! ```
//!
//! A checkpoint is written under a temporary name, and every file and folder of it is forced to disk.
//! It takes its name in one step, and the folder above is forced to disk. So whatever kills the process
//! or the machine, a folder called `step-N` is whole.
//!
//! The manifest is for later damage: a copy that was cut short, a disk that rots, a hand that deletes.
//! The newest checkpoint is found by looking, and is taken only if every file is the one that was
//! saved. A file `latest` would be one more thing that can be wrong.
//!
//! Only then are old checkpoints removed. They lose their name first, so an interrupted removal leaves
//! no half of one. A checkpoint of a step that exists already takes the old one's place. The old one is
//! called `step-N.old` until the new one has its name, and counts as long as there is no new one.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::schedule::Schedule;
use crate::checkpoint::{
    Checkpoint, Dtype, atomic_write, crc32, create_beside, safetensors, try_lock,
};
use crate::convert::in_new_folder;
use crate::error::{Error, Result};
use crate::files;

const OPTIMIZER: &str = "optimizer.safetensors";
const TRAINER: &str = "trainer.json";
const MANIFEST: &str = "manifest.json";
const LOCK: &str = ".lock";

/// Version of what a checkpoint holds, in its manifest.
const FORMAT: u64 = 1;

/// Longest `trainer.json` or `manifest.json` that is read.
const MAX_JSON: u64 = 16 << 20;

/// Characters of a value that a message shows.
const MAX_SHOWN: usize = 60;

/// A tensor of an optimizer's state.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedTensor<'a> {
    /// Its name in the file.
    pub name: String,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// The elements, row-major.
    pub values: Cow<'a, [f32]>,
}

/// Where a run stands, beside its weights and its optimizer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Steps done.
    pub step: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Seconds of training, over all resumptions.
    pub seconds: f64,
    /// What all random numbers come from.
    pub seed: u64,
    /// State of the random numbers.
    pub rng: u64,
    /// Where the data stand.
    pub cursor: Value,
    /// The learning rates.
    pub schedule: Schedule,
    /// The configuration that the run was started with.
    pub config: Value,
}

/// A checkpoint that was written.
#[derive(Debug)]
pub struct Written {
    /// Its folder.
    pub path: PathBuf,
    /// Why older ones could not be removed, if so; they take room, and nothing else.
    pub warnings: Vec<Error>,
}

/// The checkpoints of a run, which this process alone writes as long as it has this.
///
/// ```
/// use boostr::train::{AdamWConfig, Checkpoints, Optimizer, Schedule, TrainerState, latest};
/// use serde_json::json;
///
/// # let folder = std::env::temp_dir().join(format!("boostr-doc-save-{}", std::process::id()));
/// let mut checkpoints = Checkpoints::open(&folder, 2)?;
/// let optimizer = Optimizer::new(AdamWConfig::default(), &Default::default())?;
/// let state = TrainerState {
///     step: 500, tokens: 2_048_000, seconds: 61.5, seed: 1, rng: 42,
///     cursor: json!({"epoch": 0}), schedule: Schedule::default(), config: json!({"batch_size": 8}),
/// };
/// checkpoints.save(&state, &optimizer.tensors(), |model| {
///     std::fs::write(model.join("config.json"), "{}").map_err(|e| boostr::Error::io(model, e))
/// })?;
///
/// let found = latest(&folder)?.expect("one was saved").checkpoint;
/// assert_eq!((found.path, found.state), (folder.join("step-000500"), state));
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
    /// Locked until it is closed.
    _lock: File,
}

impl Checkpoints {
    /// Opens the folder of a run for writing, making it where there is none, and removes what killed
    /// processes left half written. The last `keep` checkpoints are kept.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when `keep` is 0 or another process trains in this folder; [`Error::Io`] when
    /// the system refuses.
    pub fn open(folder: &Path, keep: usize) -> Result<Self> {
        check_keep(keep)?;
        fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
        let path = folder.join(LOCK);
        let Some(lock) = try_lock(&path)? else {
            let reason = format!("another process trains in `{}`", folder.display());
            return Err(Error::Argument { name: "folder", reason });
        };
        let checkpoints = Self { folder: folder.to_path_buf(), keep, _lock: lock };
        checkpoints.remove_stale()?;
        Ok(checkpoints)
    }

    /// Where they are.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The same checkpoints, of which the last `keep` are kept from now on.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when `keep` is 0.
    pub fn keeping(self, keep: usize) -> Result<Self> {
        check_keep(keep)?;
        Ok(Self { keep, ..self })
    }

    /// Writes the checkpoint of `state.step`; `write_model` fills the folder that it is given with the
    /// model's files. Then older checkpoints than the last ones are removed.
    ///
    /// # Errors
    ///
    /// Whatever `write_model` returns, and [`Error::Io`] when the system refuses, as when the disk is full:
    /// nothing is left of the new checkpoint, the old ones are as they were, and the next call may succeed.
    pub fn save(
        &mut self,
        state: &TrainerState,
        optimizer: &[NamedTensor<'_>],
        write_model: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Written> {
        self.remove_stale()?;
        let path = self.folder.join(name_of(state.step));
        let old = path.with_extension("old");
        let written = in_new_folder(&path, |folder| {
            write_model(folder)?;
            write_tensors(&folder.join(OPTIMIZER), optimizer)?;
            write_state(&folder.join(TRAINER), state)?;
            seal(folder)?;
            set_aside(&path, &old)
        });
        if let Err(error) = written {
            // Only if the new one did not get the name: a folder that is not empty is not replaced.
            let _ = fs::rename(&old, &path);
            return Err(error);
        }
        let warnings = self.remove_older(state.step).err().into_iter().collect();
        Ok(Written { path, warnings })
    }

    /// Removes all checkpoints after `step`, as a run does that goes on from there.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the system refuses.
    pub fn forget_after(&mut self, step: u64) -> Result<()> {
        let later = list(&self.folder)?.into_iter().filter(|found| found.step > step);
        later.into_iter().try_for_each(|found| discard(&found.path))
    }

    /// Removes all but the last checkpoints up to `step`, of which there is one. Later ones stay: they are of
    /// another course of the run, and [`forget_after`](Self::forget_after) was not called.
    fn remove_older(&self, step: u64) -> Result<()> {
        let mut kept = 0;
        let mut result = Ok(());
        for found in list(&self.folder)?.into_iter().filter(|found| found.step <= step) {
            // Its new one has its name by now.
            let is_replaced = found.is_old && self.folder.join(name_of(found.step)).exists();
            if !is_replaced && kept < self.keep {
                kept += 1;
            } else {
                result = result.and(discard(&found.path));
            }
        }
        result
    }

    /// Removes temporary folders. No other process writes here, so they belong to none.
    fn remove_stale(&self) -> Result<()> {
        let folder = &self.folder;
        for entry in fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
            let entry = entry.map_err(|e| Error::io(folder, e))?;
            let path = entry.path();
            let is_folder = entry.file_type().map_err(|e| Error::io(&path, e))?.is_dir();
            if is_folder && entry.file_name().to_str().is_some_and(is_temporary) {
                fs::remove_dir_all(&path).map_err(|e| Error::io(&path, e))?;
            }
        }
        Ok(())
    }
}

fn check_keep(keep: usize) -> Result<()> {
    if keep == 0 {
        let reason = "expected at least 1 checkpoint, found 0".to_owned();
        return Err(Error::Argument { name: "keep", reason });
    }
    Ok(())
}

/// A checkpoint that is whole.
#[derive(Debug)]
pub struct Saved {
    /// Its folder, which is also the model's.
    pub path: PathBuf,
    /// Where the run stood.
    pub state: TrainerState,
}

impl Saved {
    /// Opens a checkpoint after reading all of it, to see that it is what was saved.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] when a file is missing or was changed, [`Error::Format`] when it is of a newer version; [`Error::Io`] when
    /// the system refuses.
    pub fn open(path: &Path) -> Result<Self> {
        check(path)?;
        let state = read_json(&path.join(TRAINER))?;
        Ok(Self { path: path.to_path_buf(), state })
    }

    /// The state of the optimizer, for [`Optimizer::restore`](super::Optimizer::restore).
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::open`]; [`Error::Format`] when a tensor is not of f32.
    pub fn optimizer(&self) -> Result<Vec<NamedTensor<'static>>> {
        read_tensors(&self.path.join(OPTIMIZER))
    }

    /// Refuses a configuration that differs from the one that the run was started with, other than in the
    /// keys of `may_change` (`"log_every"`, `"data.path"`) and what is below them.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] with all keys that differ, and both values of each.
    pub fn check_config(&self, config: &Value, may_change: &[&str]) -> Result<()> {
        self.check_config_of(&self.state.config, config, may_change)
    }

    /// The same; `own` is what the run was started with, in the keys of this version.
    pub(super) fn check_config_of(
        &self,
        own: &Value,
        config: &Value,
        may_change: &[&str],
    ) -> Result<()> {
        let may_change = |key: &str| {
            let is_or_holds = |allowed: &&str| {
                key.strip_prefix(*allowed)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            };
            may_change.iter().any(is_or_holds)
        };
        let all = differences(own, config);
        let refused: Vec<String> = all
            .into_iter()
            .filter(|found| !may_change(&found.key))
            .map(|Difference { key, was, is }| {
                format!("`{key}` was {}, is {}", shown(was), shown(is))
            })
            .collect();
        if refused.is_empty() {
            return Ok(());
        }
        let reason = format!(
            "the run in `{}` has other values: {}",
            self.path.display(),
            refused.join("; ")
        );
        Err(Error::Argument { name: "config", reason })
    }
}

/// The newest checkpoint that is whole.
#[derive(Debug)]
pub struct Latest {
    /// The checkpoint.
    pub checkpoint: Saved,
    /// What is wrong with newer ones, the newest first.
    pub broken: Vec<Error>,
}

/// Whether there is a checkpoint in a folder, whole or not; none where there is no folder.
///
/// # Errors
///
/// [`Error::Io`] when the system refuses.
pub fn has_checkpoints(folder: &Path) -> Result<bool> {
    match list(folder) {
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(false),
        all => Ok(!all?.is_empty()),
    }
}

/// Finds the newest checkpoint of a run that is whole; `None` when there is no checkpoint at all.
///
/// # Errors
///
/// [`Error::Format`] when there are some and none is whole; [`Error::Io`] when the system refuses.
pub fn latest(folder: &Path) -> Result<Option<Latest>> {
    let all = match list(folder) {
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Vec::new(),
        all => all?,
    };
    let mut broken = Vec::new();
    for found in &all {
        match Saved::open(&found.path) {
            Ok(checkpoint) => return Ok(Some(Latest { checkpoint, broken })),
            Err(error) => broken.push(error),
        }
    }
    let Some(newest) = broken.first() else { return Ok(None) };
    let reason = format!("none of {} checkpoints is whole; the newest: {newest}", all.len());
    Err(Error::format(folder, reason))
}

/// The keys in which two configurations differ, sorted, those of tables within joined by dots
/// (`optimizer.beta2`). A list counts as one value; 1 and 1.0 are the same.
///
/// ```
/// use boostr::train::differing_keys;
/// use serde_json::json;
///
/// let (a, b) = (json!({"seed": 1, "data": {"seq_len": 512}}), json!({"seed": 1, "data": {"seq_len": 256}}));
/// assert_eq!(differing_keys(&a, &b), ["data.seq_len"]);
/// ```
#[must_use]
pub fn differing_keys(a: &Value, b: &Value) -> Vec<String> {
    differences(a, b).into_iter().map(|found| found.key).collect()
}

/// A key with both values; `None` where there is none.
struct Difference<'a> {
    key: String,
    was: Option<&'a Value>,
    is: Option<&'a Value>,
}

fn differences<'a>(was: &'a Value, is: &'a Value) -> Vec<Difference<'a>> {
    let mut found = Vec::new();
    compare("", Some(was), Some(is), &mut found);
    found.sort_by(|a, b| a.key.cmp(&b.key));
    found
}

fn compare<'a>(
    key: &str,
    was: Option<&'a Value>,
    is: Option<&'a Value>,
    found: &mut Vec<Difference<'a>>,
) {
    let are_equal = match (was, is) {
        (Some(Value::Object(a)), Some(Value::Object(b))) => {
            let only_b = b.keys().filter(|name| !a.contains_key(*name));
            for name in a.keys().chain(only_b) {
                let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                compare(&key, a.get(name), b.get(name), found);
            }
            return;
        }
        (Some(Value::Number(a)), Some(Value::Number(b))) if a.is_f64() != b.is_f64() => {
            a.as_f64() == b.as_f64()
        }
        (a, b) => a == b,
    };
    if !are_equal {
        found.push(Difference { key: key.to_owned(), was, is });
    }
}

fn shown(value: Option<&Value>) -> String {
    let Some(value) = value else { return "not set".to_owned() };
    let text = value.to_string();
    let cut: String = text.chars().take(MAX_SHOWN).collect();
    if cut.len() < text.len() { cut + "..." } else { text }
}

fn name_of(step: u64) -> String {
    format!("step-{step:06}")
}

/// Whether a name is that of a folder that was to become a checkpoint, or to be removed.
fn is_temporary(name: &str) -> bool {
    let Some((target, id)) = name.strip_prefix('.').and_then(|name| name.split_once(".tmp-"))
    else {
        return false;
    };
    let is_id = id.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-');
    parse_name(target).is_some() && is_id
}

/// The step in the name of a checkpoint, and whether it is one that was about to be replaced.
fn parse_name(name: &str) -> Option<(u64, bool)> {
    let (plain, is_old) = match name.strip_suffix(".old") {
        Some(plain) => (plain, true),
        None => (name, false),
    };
    let step = plain.strip_prefix("step-")?.parse().ok()?;
    (name_of(step) == plain).then_some((step, is_old))
}

/// A folder with the name of a checkpoint.
struct Found {
    step: u64,
    is_old: bool,
    path: PathBuf,
}

/// All of them, the newest first; one about to be replaced comes after what replaces it.
fn list(folder: &Path) -> Result<Vec<Found>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
        let entry = entry.map_err(|e| Error::io(folder, e))?;
        let name = entry.file_name();
        if let Some((step, is_old)) = name.to_str().and_then(parse_name) {
            let path = entry.path();
            // A link to a folder on another disk counts as one.
            if path.is_dir() {
                all.push(Found { step, is_old, path });
            }
        }
    }
    all.sort_by_key(|found| (std::cmp::Reverse(found.step), found.is_old));
    Ok(all)
}

/// Takes the name from a checkpoint, then removes it.
fn discard(path: &Path) -> Result<()> {
    let io_error = |e| Error::io(path, e);
    let (temporary, (), _claim) =
        create_beside(path, |temporary| fs::rename(path, temporary)).map_err(io_error)?;
    fs::remove_dir_all(temporary).map_err(io_error)
}

/// Makes the name `path` free for a new checkpoint.
fn set_aside(path: &Path, old: &Path) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    if old.exists() {
        // From a process that was killed after its new checkpoint had got the name.
        discard(old)?;
    }
    fs::rename(path, old).map_err(|e| Error::io(path, e))
}

fn write_tensors(path: &Path, tensors: &[NamedTensor<'_>]) -> Result<()> {
    let infos: Vec<(&str, Dtype, &[usize])> =
        tensors.iter().map(|t| (t.name.as_str(), Dtype::F32, t.shape.as_slice())).collect();
    let about = BTreeMap::new();
    safetensors::write_each(path, &infos, &about, |i| Dtype::F32.encode(&tensors[i].values))
}

fn read_tensors(path: &Path) -> Result<Vec<NamedTensor<'static>>> {
    let file = Checkpoint::open(path, false)?;
    let read = file.iter().map(|(name, entry)| {
        if entry.dtype != Dtype::F32 {
            let reason = format!("tensor `{name}` is of {}, expected F32", entry.dtype.name());
            return Err(Error::format(path, reason));
        }
        let values = Cow::Owned(entry.to_f32()?);
        Ok(NamedTensor { name: name.to_owned(), shape: entry.shape.clone(), values })
    });
    read.collect()
}

fn write_state(path: &Path, state: &TrainerState) -> Result<()> {
    #[derive(Serialize)]
    struct Signed<'a> {
        /// The version that wrote it, for people.
        boostr: &'a str,
        #[serde(flatten)]
        state: &'a TrainerState,
    }
    write_json(path, &Signed { boostr: env!("CARGO_PKG_VERSION"), state })
}

/// What every file of a checkpoint but the manifest itself must be, by its path with `/` between names.
#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    format: u64,
    files: BTreeMap<String, Sum>,
}

/// Size and checksum of a file.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Sum {
    bytes: u64,
    crc32: u32,
}

/// Forces all files in a folder to disk, and the folders within, and writes the manifest.
fn seal(folder: &Path) -> Result<()> {
    let mut files = BTreeMap::new();
    sync_below(folder, "", &mut files)?;
    write_json(&folder.join(MANIFEST), &Manifest { format: FORMAT, files })
}

fn sync_below(folder: &Path, prefix: &str, files: &mut BTreeMap<String, Sum>) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
        let entry = entry.map_err(|e| Error::io(folder, e))?;
        let path = entry.path();
        let kind = entry.file_type().map_err(|e| Error::io(&path, e))?;
        let name = entry.file_name();
        let Some(name) = name.to_str().map(|name| format!("{prefix}{name}")) else {
            return Err(Error::format(&path, "name is not UTF-8"));
        };
        if kind.is_dir() {
            sync_below(&path, &format!("{name}/"), files)?;
            if cfg!(unix) {
                File::open(&path)
                    .and_then(|folder| folder.sync_all())
                    .map_err(|e| Error::io(&path, e))?;
            }
        } else if kind.is_file() {
            let sum = sum_of(&path, true)?;
            files.insert(name, sum);
        } else {
            return Err(Error::format(&path, "neither a file nor a folder"));
        }
    }
    Ok(())
}

/// Reads a file for its size and checksum; `sync` forces it to disk.
fn sum_of(path: &Path, sync: bool) -> Result<Sum> {
    let read = || -> io::Result<Sum> {
        // Windows wants to be able to write what it is to force to disk.
        let mut file = OpenOptions::new().read(true).write(sync && !cfg!(unix)).open(path)?;
        let mut sum = Sum { bytes: 0, crc32: 0 };
        let mut buffer = vec![0; 1 << 18];
        loop {
            match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => {
                    sum =
                        Sum { bytes: sum.bytes + n as u64, crc32: crc32(sum.crc32, &buffer[..n]) };
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        if sync {
            file.sync_all()?;
        }
        Ok(sum)
    };
    read().map_err(|e| Error::io(path, e))
}

/// Checks a checkpoint against its manifest. Files that the manifest does not name are not looked at.
fn check(folder: &Path) -> Result<()> {
    let manifest: Manifest = read_json(&folder.join(MANIFEST))?;
    let refuse = |path: &Path, reason: String| Err(Error::format(path, reason));
    let damaged = |path: &Path, reason: String| Err(Error::damaged(path, reason));
    if manifest.format != FORMAT {
        let reason = format!("format is {}, this version reads {FORMAT}", manifest.format);
        return refuse(&folder.join(MANIFEST), reason);
    }
    for (name, saved) in &manifest.files {
        let relative = Path::new(name);
        // The manifest may come from anywhere.
        let is_inside = relative.components().all(|part| matches!(part, Component::Normal(_)));
        if name.is_empty() || !is_inside {
            return refuse(
                &folder.join(MANIFEST),
                format!("{name:?} is not a file of this folder"),
            );
        }
        let path = folder.join(relative);
        let found = match fs::metadata(&path) {
            Ok(found) if found.is_file() => found.len(),
            Ok(_) => return damaged(&path, "not a file, but one was saved".to_owned()),
            Err(e) if e.kind() == ErrorKind::NotFound => {
                return damaged(&path, "missing, but it was saved".to_owned());
            }
            Err(e) => return Err(Error::io(path, e)),
        };
        // Before a byte of it is read.
        if found != saved.bytes {
            return damaged(&path, format!("has {found} bytes, {} were saved", saved.bytes));
        }
        if sum_of(&path, false)? != *saved {
            return damaged(
                &path,
                "was changed since it was saved: its checksum is another".to_owned(),
            );
        }
    }
    for name in [OPTIMIZER, TRAINER] {
        if !manifest.files.contains_key(name) {
            return refuse(&folder.join(MANIFEST), format!("`{name}` is not listed"));
        }
    }
    Ok(())
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    atomic_write(path, |out| {
        serde_json::to_writer_pretty(&mut *out, value)?;
        out.write_all(b"\n")
    })
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    let file = files::open(path).map_err(|error| match error {
        Error::Io { source, .. } if source.kind() == ErrorKind::NotFound => {
            Error::damaged(path, "missing: this is not a whole checkpoint")
        }
        error => error,
    })?;
    let mut text = Vec::new();
    file.take(MAX_JSON + 1).read_to_end(&mut text).map_err(|e| Error::io(path, e))?;
    if text.len() as u64 > MAX_JSON {
        return Err(Error::format(path, format!("more than the {MAX_JSON} bytes that are read")));
    }
    serde_json::from_slice(&text).map_err(|e| Error::format(path, e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn keys_that_differ_are_named_with_their_tables() {
        let run = json!({
            "seed": 7, "lr": 1.0, "kind": "cosine", "betas": [0.9, 0.95], "gone": true,
            "data": {"path": "a.txt", "pack": {"seq_len": 512}}, "same": {"x": null}
        });
        assert_eq!(differing_keys(&run, &run), [""; 0]);
        let other = json!({
            "seed": 8, "lr": 1, "kind": "cosine", "betas": [0.9, 0.99], "new": 1,
            "data": {"path": "a.txt", "pack": {"seq_len": 256}}, "same": {"x": null}
        });
        let both = ["betas", "data.pack.seq_len", "gone", "new", "seed"];
        assert_eq!(differing_keys(&run, &other), both);
        assert_eq!(differing_keys(&other, &run), both);
        assert_eq!(differing_keys(&json!({"a": {"b": 1}}), &json!({"a": 1})), ["a"]);
        assert_eq!(differing_keys(&json!({"a": u64::MAX}), &json!({"a": u64::MAX - 1})), ["a"]);
        assert_eq!(differing_keys(&json!({"a": 1}), &json!({"a": 1.5})), ["a"]);
    }

    #[test]
    fn only_names_of_checkpoints_are_taken_for_such() {
        for (name, want) in [
            ("step-000500", Some((500, false))),
            ("step-000500.old", Some((500, true))),
            ("step-1234567", Some((1_234_567, false))),
            ("step-500", None),
            ("step-0000500", None),
            ("step-+00500", None),
            ("step-", None),
            ("xstep-000500", None),
            ("step-000500.bak", None),
            (".step-000500", None),
        ] {
            assert_eq!(parse_name(name), want, "{name}");
        }
        assert_eq!(parse_name(&name_of(u64::MAX)), Some((u64::MAX, false)));
        assert!(is_temporary(".step-000500.tmp-12-0123456789abcdef"));
        assert!(is_temporary(".step-000500.old.tmp-12-0123456789abcdef"));
        for name in
            ["step-000500", ".step-000500", ".notes.tmp-12-0a", ".step-000500.tmp-mine", ".lock"]
        {
            assert!(!is_temporary(name), "{name}");
        }
    }
}
