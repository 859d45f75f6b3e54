//! The disk tier of the prefix cache: states that leave memory, in a folder under a limit of bytes.
//!
//! ```text
//! state-MODEL-KEY.safetensors   a state, but for keys and values that are in segments
//! rows-MODEL-KEY.safetensors    keys and values of 256 positions, written once for all states that go that way
//! ```
//!
//! MODEL is a hash of what bits depend on: fingerprint, lengths and times of the files with weights, type of the KV cache,
//! instruction set. KEY is a hash of the scope and of all ids up to there. Both only name files: what is read back must
//! have passed the checks of a state file, and must be of this model, this scope and these ids.
//!
//! A thread of its own writes, reads and removes. The engine asks it, and takes what is done between two steps. Files get
//! their names when they are whole. They are not forced to disk: a file that a power cut tore is found by its checksum.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::backend::Backend;
use crate::checkpoint::{Fnv, PrivateFile, PrivateFolder, try_lock};
use crate::error::{Error, Result, chain};
use crate::models::{Model, State};
use crate::state_file::{self, MAX_IDS, Pieces, SEGMENT, SavedState};
use crate::threads;

use super::job::panicked;

/// Memory of states that wait to be written; one may be larger.
const MAX_WAITING: usize = 64 << 20;
/// Files that are looked into at the start.
const MAX_FILES: usize = 1 << 16;
/// Bytes of a file beside its data, at most: for all of it, and for each of its tensors.
const HEADER: (usize, usize) = (1024, 160);
/// The file whose lock says that a process has the folder.
const LOCK: &str = ".lock";

/// A folder for states that leave the memory of an engine, which this process has alone.
///
/// Its files are their owner's alone. No file is followed that is a link, and none is trusted: what does not pass the
/// checks of a state file is removed, with a line in the log.
pub struct SpillFolder {
    folder: PrivateFolder,
    limit: u64,
    numerics: String,
    log: Log,
    lock: File,
}

/// Is told what should be known of files that were no use.
type Log = Box<dyn Fn(&str) + Send + Sync>;

impl SpillFolder {
    /// Takes the folder at `path`, made if need be, for at most `limit` bytes; `None` when another process has it.
    ///
    /// # Errors
    ///
    /// As [`PrivateFolder::open_of`]; [`Error::Format`] when its lock is a link or no file.
    pub fn open(path: &Path, limit: u64) -> Result<Option<Self>> {
        let folder = PrivateFolder::open_of(path, is_ours)?;
        let Some(lock) = try_lock(&folder.path().join(LOCK))? else { return Ok(None) };
        let (numerics, log): (_, Log) = (String::new(), Box::new(|_| {}));
        Ok(Some(Self { folder, limit, numerics, log, lock }))
    }

    /// States are found again only by an engine of the same `numerics`: by what results differ in their last bits.
    #[must_use]
    pub fn numerics(mut self, numerics: impl Into<String>) -> Self {
        self.numerics = numerics.into();
        self
    }

    /// Tells `log` of files that were no use, a line for each.
    #[must_use]
    pub fn log(mut self, log: impl Fn(&str) + Send + Sync + 'static) -> Self {
        self.log = Box::new(log);
        self
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Why others may see the names of its files, if they may: there are files of others in it. They may not see what is
    /// in them.
    #[must_use]
    pub fn exposed(&self) -> Option<&str> {
        self.folder.exposed()
    }

    /// Bytes that its files may take.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit
    }
}

/// The file of a state that was found in the folder.
pub(super) struct Found {
    name: Name,
    file: PrivateFile,
}

impl Found {
    /// Its bytes, without segments.
    pub(super) fn bytes(&self) -> u64 {
        self.file.len
    }
}

/// What the thread has done.
pub(super) enum Done<B: Backend> {
    /// A state was written, in so many bytes; or not.
    Written { serial: u64, at: usize, bytes: Result<u64, Unwritten> },
    /// A state was read; or its file was no use, or a segment.
    Read { at: usize, state: Result<State<B>, Broken> },
}

/// Which file was no use.
pub(super) enum Broken {
    State,
    Segment(u64),
}

/// Why a state was not written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Unwritten {
    /// It cannot be, as it is.
    State,
    /// The system refused.
    System,
}

/// The files, as the engine knows them.
pub(super) struct Spill<B: Backend> {
    shared: Arc<Shared<B>>,
    worker: Option<JoinHandle<()>>,
    limit: u64,
    /// Bytes of all files, also of those that are about to be written.
    bytes: u64,
    /// Whether states have segments.
    has_segments: bool,
    segments: HashMap<u64, Segment>,
    /// Files of other models, the newest first.
    strangers: Vec<PrivateFile>,
    serial: u64,
}

struct Segment {
    /// States that need it.
    users: usize,
    bytes: u64,
}

/// A state that is to be written: which file and segments it takes, and how many bytes at most.
pub(super) struct Plan<B: Backend> {
    key: u64,
    /// Keys of all its segments, and whether each is there already.
    segments: Vec<(u64, bool)>,
    pieces: Pieces<B>,
    memory: usize,
    /// Bytes of its own file, and of a segment.
    own: u64,
    segment: u64,
}

struct Shared<B: Backend> {
    folder: PrivateFolder,
    model: Arc<dyn AsRef<Model<B>> + Send + Sync>,
    model_key: u64,
    log: Log,
    queue: Mutex<Queue<B>>,
    wake: Condvar,
    /// Held as long as there are files to be written.
    _lock: File,
}

struct Queue<B: Backend> {
    tasks: VecDeque<Task<B>>,
    done: Vec<Done<B>>,
    /// Memory of the states in `tasks`.
    waiting: usize,
    is_busy: bool,
    is_over: bool,
}

enum Task<B: Backend> {
    Write {
        plan: Box<Plan<B>>,
        serial: u64,
        at: usize,
        scope: u64,
        ids: Vec<u32>,
    },
    /// None of its files is longer than `most`.
    Read {
        at: usize,
        scope: u64,
        ids: Vec<u32>,
        most: u64,
    },
    Remove {
        name: String,
    },
}

impl<B: Backend> Spill<B> {
    /// Looks into the folder, and starts the thread; and what was found, the longest unused first.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the folder cannot be read, [`Error::Argument`] when the thread cannot be started,
    /// [`Error::Unsupported`] for a model without a fingerprint.
    pub(super) fn start(
        spill: SpillFolder,
        model: Arc<dyn AsRef<Model<B>> + Send + Sync>,
    ) -> Result<(Self, Vec<Found>)> {
        let SpillFolder { folder, limit, numerics, log, lock } = spill;
        let of = (*model).as_ref();
        let fingerprint = of.fingerprint().ok_or_else(|| Error::Unsupported {
            what: "states on disk of a model whose weights are being trained".into(),
        })?;
        let mut hash = Fnv::default();
        for text in [fingerprint, of.kv_type().name(), &numerics, of.files()] {
            hash.text(text);
        }
        let has_segments = state_file::has_segments(of);
        let shared = Arc::new(Shared {
            folder,
            model,
            model_key: hash.0,
            log,
            queue: Mutex::new(Queue {
                tasks: VecDeque::new(),
                done: Vec::new(),
                waiting: 0,
                is_busy: false,
                is_over: false,
            }),
            wake: Condvar::new(),
            _lock: lock,
        });
        let mut own = Self {
            shared: shared.clone(),
            worker: None,
            limit,
            bytes: 0,
            has_segments,
            segments: HashMap::new(),
            strangers: Vec::new(),
            serial: 0,
        };
        let found = own.look()?;
        let worker = thread::Builder::new().name("spill".into()).spawn(move || shared.work());
        own.worker = Some(worker.map_err(|error| threads::cannot_start(&error))?);
        Ok((own, found))
    }

    /// What is in the folder. Its files are not read here. All segments stay until [`end_look`](Self::end_look).
    fn look(&mut self) -> Result<Vec<Found>> {
        let mut files = self.shared.folder.list()?;
        files.sort_by_key(|file| file.modified);
        let mut found = Vec::new();
        for file in files.into_iter().rev() {
            let Some(name) = Name::parse(&file.name) else { continue };
            self.bytes = self.bytes.saturating_add(file.len);
            let is_ours = name.model == self.shared.model_key
                && found.len() + self.segments.len() < MAX_FILES;
            match (is_ours, name.is_state) {
                (false, _) => self.strangers.push(file),
                (true, true) => found.push(Found { name, file }),
                (true, false) => {
                    self.segments.insert(name.key, Segment { users: 1, bytes: file.len });
                }
            }
        }
        found.reverse();
        Ok(found)
    }

    /// Scope and ids of a state that was found; `None` for a file that is no use, which is gone then.
    pub(super) fn look_into(&mut self, found: &Found) -> Option<(u64, Vec<u32>)> {
        match self.ids_of(found) {
            Ok((scope, ids)) => {
                for key in self.keys(scope, &ids).0 {
                    if let Some(segment) = self.segments.get_mut(&key) {
                        segment.users += 1;
                    }
                }
                Some((scope, ids))
            }
            Err(error) => {
                self.shared.say(&chain(&error));
                self.drop_file(&found.file.name, found.file.len);
                None
            }
        }
    }

    /// Gives up the segments that no state needs, once all were looked into.
    pub(super) fn end_look(&mut self) {
        let keys: Vec<u64> = self.segments.keys().copied().collect();
        self.leave(&keys);
    }

    fn ids_of(&self, Found { name, file }: &Found) -> Result<(u64, Vec<u32>)> {
        let path = self.shared.folder.path().join(&file.name);
        let refuse = |reason: &str| Err(Error::format(&path, reason));
        if file.len > self.limit {
            return refuse("longer than all states on disk may be");
        }
        let seen = state_file::peek(&path, self.shared.folder.file(&file.name)?)?;
        let scope = seen.metadata.get("scope").and_then(|text| u64::from_str_radix(text, 16).ok());
        let Some(scope) = scope else { return refuse("metadata `scope`: expected a number") };
        let (segments, key) = self.keys(scope, &seen.ids);
        if seen.ids.is_empty() || key != name.key {
            return refuse("is a state of other tokens than its name says");
        }
        if segments.iter().any(|key| !self.segments.contains_key(key)) {
            return refuse("keys and values that belong to it are missing");
        }
        Ok((scope, seen.ids))
    }

    /// The keys of the segments of some ids, and of all of them.
    fn keys(&self, scope: u64, ids: &[u32]) -> (Vec<u64>, u64) {
        let (segments, key) = keys(self.shared.model_key, scope, ids);
        (if self.has_segments { segments } else { Vec::new() }, key)
    }

    /// Whether states of the model are rows alone, none of which are ever forgotten.
    pub(super) fn is_rows_alone(&self) -> bool {
        state_file::is_rows_alone((*self.shared.model).as_ref())
    }

    /// Bytes of the files.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn is_over_limit(&self) -> bool {
        self.bytes > self.limit
    }

    /// Gives up the oldest file of another model; `false` when there is none.
    pub(super) fn drop_stranger(&mut self) -> bool {
        let oldest = self.strangers.pop();
        oldest.is_some_and(|file| {
            self.drop_file(&file.name, file.len);
            true
        })
    }

    fn drop_file(&mut self, name: &str, len: u64) {
        self.bytes = self.bytes.saturating_sub(len);
        self.shared.push(Task::Remove { name: name.to_owned() }, 0);
    }

    /// Whether the thread has ended, so that nothing more will be done.
    pub(super) fn is_gone(&self) -> bool {
        self.worker.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Whether a state needs a segment.
    pub(super) fn needs(&self, scope: u64, ids: &[u32], segment: u64) -> bool {
        self.keys(scope, ids).0.contains(&segment)
    }

    /// Whether nothing waits to be written.
    pub(super) fn is_free(&self) -> bool {
        self.shared.lock().waiting == 0
    }

    /// What it takes to write a state; `None` when that is more than there may be, or too much waits already.
    pub(super) fn plan(
        &self,
        scope: u64,
        ids: &[u32],
        state: &State<B>,
        patience: Option<Instant>,
    ) -> Option<Plan<B>> {
        let memory = state.size_in_bytes();
        if 4 * ids.len() > MAX_IDS || !self.shared.has_room(memory, patience) {
            return None;
        }
        let pieces = Pieces::new((*self.shared.model).as_ref(), state.clone()).ok()?;
        let (keys, key) = keys(self.shared.model_key, scope, ids);
        let keys = keys.into_iter().take(pieces.segments());
        let segments: Vec<_> = keys.map(|key| (key, self.segments.contains_key(&key))).collect();
        let (own, segment) = pieces.sizes();
        let header = |tensors: usize| HEADER.0 + HEADER.1 * tensors;
        let tensors = 1 + 2 * state.slots().count();
        let (own, segment) = (
            (own + 4 * ids.len() + header(tensors)) as u64,
            (segment + 4 * ids.len() + header(tensors)) as u64,
        );
        let plan = Plan { key, segments, pieces, memory, own, segment };
        (plan.all_bytes() <= self.limit).then_some(plan)
    }

    /// Counts what is planned as there. Returns the bytes of the state's own file.
    pub(super) fn reserve(&mut self, plan: &Plan<B>) -> u64 {
        self.bytes += plan.own;
        for &(key, _) in &plan.segments {
            let segment = self.segments.entry(key).or_insert_with(|| {
                self.bytes += plan.segment;
                Segment { users: 0, bytes: plan.segment }
            });
            segment.users += 1;
        }
        plan.own
    }

    /// Hands a plan to the thread. Returns its number.
    pub(super) fn write(&mut self, plan: Plan<B>, at: usize, scope: u64, ids: Vec<u32>) -> u64 {
        self.serial += 1;
        let (serial, memory) = (self.serial, plan.memory);
        self.shared.push(Task::Write { plan: Box::new(plan), serial, at, scope, ids }, memory);
        serial
    }

    /// Asks for a state, whose own file takes `bytes`.
    pub(super) fn read(&self, at: usize, scope: u64, ids: Vec<u32>, bytes: u64) {
        let (keys, _) = self.keys(scope, &ids);
        let segments = keys.iter().filter_map(|key| self.segments.get(key));
        let most = segments.map(|segment| segment.bytes).fold(bytes, u64::max);
        self.shared.push(Task::Read { at, scope, ids, most }, 0);
    }

    /// Gives up a state, which took `bytes`, and the segments that no other needs.
    pub(super) fn remove(&mut self, scope: u64, ids: &[u32], bytes: u64) {
        self.forget(scope, ids, bytes);
        let name = self.shared.name(true, self.keys(scope, ids).1);
        self.shared.push(Task::Remove { name }, 0);
    }

    /// The same for one that has no file yet.
    pub(super) fn forget(&mut self, scope: u64, ids: &[u32], bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
        self.leave(&self.keys(scope, ids).0);
    }

    /// Takes a user from each segment, and gives up those that have none.
    fn leave(&mut self, keys: &[u64]) {
        for key in keys {
            let Some(segment) = self.segments.get_mut(key) else { continue };
            segment.users -= 1;
            if segment.users > 0 {
                continue;
            }
            let bytes = segment.bytes;
            self.segments.remove(key);
            let name = self.shared.name(false, *key);
            self.drop_file(&name, bytes);
        }
    }

    /// Counts a state's own file as what it takes, after it was taken for more.
    pub(super) fn recount(&mut self, before: u64, now: u64) {
        self.bytes = self.bytes.saturating_sub(before) + now;
    }

    /// What was done since it was asked for the last time.
    pub(super) fn done(&self) -> Vec<Done<B>> {
        std::mem::take(&mut self.shared.lock().done)
    }

    /// Waits until nothing waits, or the deadline; then ends the thread.
    pub(super) fn close(&mut self, deadline: Instant) {
        let mut queue = self.shared.lock();
        while !queue.tasks.is_empty() || queue.is_busy {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_gone() {
                break;
            }
            let waited = self.shared.wake.wait_timeout(queue, left.min(Duration::from_millis(50)));
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        queue.is_over = true;
        drop(queue);
        self.shared.wake.notify_all();
        if let Some(worker) = self.worker.take() {
            // One that panicked has told.
            let _ = worker.join();
        }
    }
}

impl<B: Backend> Drop for Spill<B> {
    fn drop(&mut self) {
        self.close(Instant::now());
    }
}

impl<B: Backend> Plan<B> {
    /// Bytes of all that it takes, and that must be there with it.
    fn all_bytes(&self) -> u64 {
        self.own + self.segment * self.segments.len() as u64
    }
}

impl<B: Backend> Shared<B> {
    fn lock(&self) -> MutexGuard<'_, Queue<B>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, task: Task<B>, memory: usize) {
        let mut queue = self.lock();
        queue.waiting += memory;
        // A request waits for what is read; but a file that is yet to be written is written before.
        let same = |other: &Task<B>| match (other, &task) {
            (Task::Write { at, .. }, Task::Read { at: wanted, .. }) => at == wanted,
            _ => false,
        };
        if matches!(task, Task::Read { .. }) && !queue.tasks.iter().any(same) {
            queue.tasks.push_front(task);
        } else {
            queue.tasks.push_back(task);
        }
        drop(queue);
        self.wake.notify_all();
    }

    /// Whether a state of so many bytes may wait; waits for that until `patience` ends.
    fn has_room(&self, memory: usize, patience: Option<Instant>) -> bool {
        let mut queue = self.lock();
        loop {
            if queue.waiting == 0 || queue.waiting + memory <= MAX_WAITING {
                return true;
            }
            let left = patience.map(|until| until.saturating_duration_since(Instant::now()));
            let Some(left) = left.filter(|left| !left.is_zero()) else { return false };
            let waited = self.wake.wait_timeout(queue, left.min(Duration::from_millis(50)));
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn say(&self, line: &str) {
        let line = format!("state cache: {line}");
        // Who has no ear for it is not to stop the engine.
        let _ = catch_unwind(AssertUnwindSafe(|| (self.log)(&line)));
    }

    /// Does what is asked, until it is over.
    fn work(&self) {
        let mut has_failed = false;
        loop {
            let mut queue = self.lock();
            queue.is_busy = false;
            while queue.tasks.is_empty() && !queue.is_over {
                self.wake.notify_all();
                queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
            if queue.is_over {
                return;
            }
            let Some(task) = queue.tasks.pop_front() else { continue };
            queue.is_busy = true;
            drop(queue);
            let mut memory = 0;
            let done = match task {
                Task::Write { plan, serial, at, scope, ids } => {
                    memory = plan.memory;
                    let bytes = caught(|| self.write(&plan, scope, &ids));
                    if let Err(error) = &bytes
                        && !std::mem::replace(&mut has_failed, true)
                    {
                        // Once, until it succeeds again: a full disk has this with every state.
                        self.say(&chain(&error));
                    }
                    has_failed &= bytes.is_err();
                    let bytes = bytes.map_err(|error| match error {
                        Error::Io { .. } => Unwritten::System,
                        _ => Unwritten::State,
                    });
                    Some(Done::Written { serial, at, bytes })
                }
                Task::Read { at, scope, ids, most } => {
                    let mut broken = Broken::State;
                    let state = caught(|| self.read(scope, &ids, most, &mut broken));
                    let state = state.map_err(|error| {
                        self.say(&chain(&error));
                        broken
                    });
                    Some(Done::Read { at, state })
                }
                Task::Remove { name } => {
                    if let Err(error) = self.folder.remove(&name) {
                        self.say(&chain(&error));
                    }
                    None
                }
            };
            let mut queue = self.lock();
            queue.waiting = queue.waiting.saturating_sub(memory);
            queue.done.extend(done);
            drop(queue);
            self.wake.notify_all();
        }
    }

    /// Writes what is not there of a state; returns the bytes of its own file.
    fn write(&self, plan: &Plan<B>, scope: u64, ids: &[u32]) -> Result<u64> {
        let model = (*self.model).as_ref();
        for (index, &(key, is_there)) in plan.segments.iter().enumerate() {
            if !is_there {
                let bytes = plan.pieces.segment(model, index, ids)?;
                self.folder.write_soon(&self.name(false, key), &bytes)?;
            }
        }
        let more = [("scope", format!("{scope:016x}"))];
        let bytes = plan.pieces.rest(model, ids, &more)?;
        self.folder.write_soon(&self.name(true, plan.key), &bytes)?;
        Ok(bytes.len() as u64)
    }

    /// Reads a state with all that belongs to it; `broken` is what of it was no use.
    fn read(&self, scope: u64, ids: &[u32], most: u64, broken: &mut Broken) -> Result<State<B>> {
        let (segments, key) = keys(self.model_key, scope, ids);
        let open = |name: &str| {
            let path = self.folder.path().join(name);
            SavedState::from_bytes(&path.display().to_string(), self.folder.read(name, most)?)
        };
        let name = self.name(true, key);
        let rest = open(&name)?;
        if rest.more("scope") != Some(&format!("{scope:016x}")) {
            let path = self.folder.path().join(&name);
            return Err(Error::format(path, "metadata `scope`: another than its name says"));
        }
        let state = state_file::restore((*self.model).as_ref(), ids, &rest, |index| {
            let key = *segments.get(index).ok_or_else(|| Error::format(&name, "segments"))?;
            *broken = Broken::Segment(key);
            open(&self.name(false, key)).inspect(|_| *broken = Broken::State)
        })?;
        // Its age is when it was used last.
        let _ = self.folder.touch(&name);
        Ok(state)
    }

    fn name(&self, is_state: bool, key: u64) -> String {
        Name { is_state, model: self.model_key, key }.to_string()
    }
}

/// What `task` gives. One that panics has failed: who waits for it goes on.
fn caught<T>(task: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(task))
        .unwrap_or_else(|payload| Err(panicked("a state on disk", &*payload)))
}

/// The keys of segments of some ids, and of all of them.
fn keys(model: u64, scope: u64, ids: &[u32]) -> (Vec<u64>, u64) {
    let mut hash = Fnv(model);
    hash.bytes(&scope.to_le_bytes());
    let mut segments = Vec::with_capacity(ids.len() / SEGMENT);
    for segment in ids.chunks(SEGMENT) {
        for id in segment {
            hash.bytes(&id.to_le_bytes());
        }
        if segment.len() == SEGMENT {
            segments.push(hash.0);
        }
    }
    (segments, hash.0)
}

/// Whether a path in the folder is one that a [`SpillFolder`] has there.
fn is_ours(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    path.symlink_metadata().is_ok_and(|found| found.is_file())
        && name.is_some_and(|name| name == LOCK || Name::parse(name).is_some())
}

/// The name of a file.
#[derive(Debug, PartialEq, Eq)]
struct Name {
    is_state: bool,
    model: u64,
    key: u64,
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.is_state { "state" } else { "rows" };
        write!(f, "{kind}-{:016x}-{:016x}.safetensors", self.model, self.key)
    }
}

impl Name {
    /// What a name says that [`Display`](std::fmt::Display) wrote; others are not ours.
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.strip_suffix(".safetensors")?.split('-');
        let (kind, model, key) = (parts.next()?, parts.next()?, parts.next()?);
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let name = Self { is_state: kind == "state", model: hex(model)?, key: hex(key)? };
        (name.to_string() == text).then_some(name)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_name_is_read_as_it_was_written_and_no_other_is_ours() {
        for is_state in [true, false] {
            let name = Name { is_state, model: 7, key: u64::MAX };
            assert_eq!(Name::parse(&name.to_string()), Some(name));
        }
        let zero = "0".repeat(16);
        for other in [
            "model.safetensors".to_owned(),
            format!("state-{zero}.safetensors"),
            format!("state-{zero}-{zero}.safetensors.bak"),
            format!("state-{zero}-{zero}-{zero}.safetensors"),
            format!("other-{zero}-{zero}.safetensors"),
            format!("state-+{}-{zero}.safetensors", "0".repeat(15)),
            format!("state-{}-{zero}.safetensors", "A".repeat(16)),
        ] {
            assert_eq!(Name::parse(&other), None, "{other}");
        }
    }

    #[test]
    fn keys_depend_on_the_model_the_scope_and_each_id() {
        let ids: Vec<u32> = (0..600).collect();
        let (segments, all) = keys(1, 2, &ids);
        assert_eq!(segments.len(), 2);
        assert_eq!(keys(1, 2, &ids[..512]).1, segments[1]);
        let others = [keys(2, 2, &ids), keys(1, 3, &ids), keys(1, 2, &[&[9], &ids[1..]].concat())];
        let mut seen: HashSet<u64> = [all].into();
        for (other, end) in others {
            assert!(other.iter().zip(&segments).all(|(a, b)| a != b));
            assert!(seen.insert(end));
        }
    }
}
