//! Conversations by name, in a folder: branched and rewound, and continued by the next process, however
//! the last one ended.
//!
//! A session is a folder with a log and a few states. The log has all messages and all ids, is forced
//! to disk at each turn, and is enough to continue from. The ids that a state has not seen are run
//! again. States only make that fast.
//!
//! ```
//! use boostr::chat::{ChatTemplate, Options};
//! use boostr::session::{Sessions, Assistant};
//! use boostr::{backend, load::LanguageModel};
//! use boostr::models::{Logits, Run};
//! use serde_json::json;
//!
//! # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny");
//! let lm = LanguageModel::open(path, &Default::default(), backend::cpu())?;
//! let template = ChatTemplate::plain()?;
//! let assistant = Assistant { lm: &lm, template: &template, name: "tiny" };
//!
//! let folder = std::env::temp_dir().join(format!("boostr-doc-sessions-{}", std::process::id()));
//! let sessions = Sessions::open(&folder)?;
//! let session = sessions.create("trip", Some("You know Paris."))?;
//! let user = json!({"role": "user", "content": "Where is it?"});
//! let mut prompt = session.prompt(&assistant, &[user], &Options::default())?;
//!
//! // What an engine does: the rest of the prompt, then the answer, token by token.
//! let mut state = prompt.state.take().map_or_else(|| lm.model.new_state(), Ok)?;
//! let tokens = &prompt.ids[state.position()..];
//! lm.model.forward(&mut [Run { tokens, state: &mut state }], Logits::Last)?;
//! let answer = json!({"role": "assistant", "content": "In"});
//! let ids = lm.tokenizer()?.encode("In", false)?;
//! let turn = session.commit(&assistant, prompt, answer, &ids, Some(state), false)?.turn;
//!
//! sessions.branch(&session, "other-trip", turn)?;
//! session.rewind(0)?;
//! assert_eq!((session.head(), sessions.list()?.len()), (0, 2));
//! # drop(session);
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | in the folder | what |
//! |---|---|
//! | `NAME/log` | records, see `log.rs`; `log.torn` has what killed processes left half written |
//! | `NAME/state-TURN.safetensors` | states after turns as [`state_file`](crate::state_file) has them: the head's and the newest, [`STATES`] in all |
//! | `.NAME.lock` | held by the process that has the session open |
//!
//! All of it is its owner's alone, files and folders, whatever was there before. A folder that holds other things too
//! keeps its mode.
//!
//! The ids of a turn are those that its model saw, so they are kept. When the next turn's text begins
//! with that of the turns before, its own text is encoded alone. A template may write earlier turns in
//! another form (for instance without thoughts), or another model may continue. Then ids from there on
//! are made anew.

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

mod log;
mod name;
mod prompt;
mod sizes;
mod states;
mod summary;
mod tree;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::backend::Backend;
use crate::checkpoint::{PrivateFolder, clean, create_beside, make_private, private, sync_folder};
use crate::error::Error;
use crate::models::{Logits, Run, State};
use log::Log;
use name::Lock;
use sizes::Sizes;
use summary::LogSummary;
use tree::{Record, Tree};

pub use name::check_name;
pub use prompt::{Assistant, Prompt};
pub use states::STATES;
pub use summary::Summary;
pub use tree::{Origin, Turn, TurnId};

const LOG: &str = "log";

/// A folder that a server has beside sessions, none of which has such a name.
pub const RESPONSES: &str = ".responses";

/// Why a session does not do what it is asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// No session can have this name.
    #[error(
        "session name `{}`: expected 1 to 64 of `A-Z a-z 0-9 . _ -`, the first no dot", name.escape_debug()
    )]
    Name {
        /// The name, or its beginning.
        name: String,
    },
    /// There is no session of this name.
    #[error("there is no session `{name}`")]
    Missing {
        /// The name.
        name: String,
    },
    /// There is one already.
    #[error("there is a session `{name}` already")]
    Exists {
        /// The name.
        name: String,
    },
    /// There are as many as there may be.
    #[error("there are {count} sessions of at most {most}: delete some")]
    Full {
        /// How many there are.
        count: usize,
        /// How many there may be.
        most: usize,
    },
    /// They take as much of the disk as they may.
    #[error("the sessions take {used} bytes on disk of at most {most}: delete some")]
    Quota {
        /// The bytes that they take.
        used: u64,
        /// The bytes that they may take.
        most: u64,
    },
    /// Another process has it open.
    #[error("session `{name}` is in use by another process")]
    Busy {
        /// The name.
        name: String,
    },
    /// The session has no such turn.
    #[error("session `{name}` has no turn {turn}")]
    Turn {
        /// The session.
        name: String,
        /// The turn.
        turn: TurnId,
    },
    /// Messages that cannot be said.
    #[error("message {index}: {reason}")]
    Message {
        /// Its place among those that were given, from 0.
        index: usize,
        /// What was expected and what was found.
        reason: String,
    },
    /// Whatever else.
    #[error(transparent)]
    Other(#[from] Error),
}

/// Result with a [`SessionError`].
pub type Result<T, E = SessionError> = std::result::Result<T, E>;

/// The sessions in a folder. May be shared by threads; processes share the folder.
#[derive(Debug)]
pub struct Sessions<B: Backend> {
    folder: PathBuf,
    exposed: Option<String>,
    /// How many there may be.
    most: usize,
    /// How many bytes they may take on disk.
    quota: u64,
    open: Mutex<HashMap<String, Weak<Inner<B>>>>,
    sizes: Arc<Sizes>,
}

/// A session that this process has open, and no other. A clone is the same one.
#[derive(Debug)]
pub struct Session<B: Backend> {
    inner: Arc<Inner<B>>,
}

impl<B: Backend> Clone for Session<B> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

#[derive(Debug)]
struct Inner<B: Backend> {
    name: String,
    folder: PathBuf,
    live: Mutex<Live<B>>,
    sizes: Arc<Sizes>,
}

/// What changes of an open session.
#[derive(Debug)]
struct Live<B: Backend> {
    log: Log,
    tree: Tree,
    /// The state that was used last, and its turn.
    recent: Option<(TurnId, State<B>)>,
    /// Says that it is this process's; `None` when it was deleted.
    lock: Option<Lock>,
}

/// What became of a turn.
#[derive(Debug)]
pub struct Committed {
    /// Its number. It is on disk.
    pub turn: TurnId,
    /// Why its state is not: then the next process runs its tokens again.
    pub unsaved: Option<Error>,
}

impl<B: Backend> Sessions<B> {
    /// The sessions in `folder`, which is made if need be, for this user alone. One that is there gets mode 0700, unless
    /// it is not this user's or something else is in it, see [`exposed`](Self::exposed).
    ///
    /// # Errors
    ///
    /// As [`PrivateFolder::open_of`].
    pub fn open(folder: &Path) -> Result<Self> {
        let folder = PrivateFolder::open_of(folder, is_ours)?;
        let sessions = Self {
            folder: folder.path().to_path_buf(),
            exposed: folder.exposed().map(str::to_owned),
            most: usize::MAX,
            quota: u64::MAX,
            open: Mutex::default(),
            sizes: Arc::default(),
        };
        sessions.clean_locks();
        if sessions.exposed.is_some() {
            for name in sessions.names()? {
                let path = sessions.folder.join(name);
                make_private(&path).map_err(|error| Error::io(&path, error))?;
            }
        }
        Ok(sessions)
    }

    /// Why others may see the names of sessions, if they may. They may not see what is in them.
    #[must_use]
    pub fn exposed(&self) -> Option<&str> {
        self.exposed.as_deref()
    }

    /// The same, where no session is made once there are so many.
    #[must_use]
    pub fn at_most(self, most: usize) -> Self {
        Self { most, ..self }
    }

    /// The same, where nothing is made once they take so many bytes on disk.
    #[must_use]
    pub fn within(self, quota: u64) -> Self {
        Self { quota, ..self }
    }

    /// Checks that they take fewer bytes on disk than they may. A turn that is begun then may end beyond that.
    ///
    /// # Errors
    ///
    /// [`SessionError::Quota`]; [`Error::Io`] when the folder cannot be read.
    pub fn check_quota(&self) -> Result<()> {
        if self.quota == u64::MAX {
            return Ok(());
        }
        let used = self.size()?;
        if used < self.quota { Ok(()) } else { Err(SessionError::Quota { used, most: self.quota }) }
    }

    /// Bytes of the quota that the sessions leave.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the folder cannot be read.
    pub fn left(&self) -> Result<u64> {
        Ok(self.quota.saturating_sub(self.size()?))
    }

    /// The bytes of all files of sessions. One that several share, as branches do, counts for each. What other processes
    /// change is seen a little later.
    fn size(&self) -> Result<u64, Error> {
        self.sizes.sum(&self.folder, || self.names())
    }

    /// Bytes of the log of a session, which need not be open.
    ///
    /// # Errors
    ///
    /// [`SessionError::Name`], [`SessionError::Missing`].
    pub fn log_size(&self, name: &str) -> Result<u64> {
        let file = fs::metadata(self.folder_of(name)?.join(LOG));
        let missing = |_| SessionError::Missing { name: name.to_owned() };
        file.map(|file| file.len()).map_err(missing)
    }

    /// Removes the locks that killed processes left of sessions that are not there.
    fn clean_locks(&self) {
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let name = name.to_str().and_then(|name| name.strip_prefix('.')?.strip_suffix(".lock"));
            let Some(name) = name.filter(|name| check_name(name).is_ok()) else { continue };
            if !self.folder.join(name).exists() {
                // Who has it is about to make the session.
                drop(Lock::new(&self.folder, name));
            }
        }
    }

    /// The folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// How many there are.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the folder cannot be read.
    pub fn count(&self) -> Result<usize> {
        Ok(self.names()?.len())
    }

    /// The names of folders with a log.
    fn names(&self) -> Result<Vec<String>, Error> {
        let read = || -> io::Result<Vec<String>> {
            let mut names = Vec::new();
            for entry in fs::read_dir(&self.folder)? {
                let entry = entry?;
                if entry.path().join(LOG).is_file() {
                    names.extend(entry.file_name().into_string().ok());
                }
            }
            names.retain(|name| check_name(name).is_ok());
            Ok(names)
        };
        read().map_err(|error| Error::io(&self.folder, error))
    }

    /// All sessions whose last record can be read, the one that was used last first. Those that are open are among
    /// them. Takes as long for a session of many turns as for one of few.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the folder cannot be read.
    pub fn list(&self) -> Result<Vec<Summary>> {
        let names = self.names()?;
        let mut all: Vec<Summary> =
            names.iter().filter_map(|name| self.summary(name).ok()).collect();
        all.sort_by(|a, b| b.updated.cmp(&a.updated).then_with(|| a.id.cmp(&b.id)));
        Ok(all)
    }

    /// What there is to say of a session, which may be open, in this process or another. Of its log the last record is
    /// read alone, unless that is torn.
    ///
    /// # Errors
    ///
    /// [`SessionError::Name`], [`SessionError::Missing`]; [`Error::Damaged`] for a log that is damaged there.
    pub fn summary(&self, name: &str) -> Result<Summary> {
        let folder = self.folder_of(name)?;
        let path = folder.join(LOG);
        if !path.exists() {
            return Err(SessionError::Missing { name: name.to_owned() });
        }
        let summary = match log::summary(&path)? {
            Some(summary) => summary,
            None => LogSummary::of(&tree_of(&path, log::read(&path)?.0)?),
        };
        Ok(Summary::new(name, summary, &folder))
    }

    /// Opens a session. What a killed process left half written of its last turn is removed.
    ///
    /// # Errors
    ///
    /// [`SessionError::Name`], [`SessionError::Missing`], [`SessionError::Busy`]; [`Error::Damaged`] for a log that is damaged.
    pub fn get(&self, name: &str) -> Result<Session<B>> {
        self.get_in(&mut self.lock(), name)
    }

    /// A new session without turns, in which the model is told `system` before everything.
    ///
    /// # Errors
    ///
    /// [`SessionError::Name`], [`SessionError::Exists`], [`SessionError::Full`], [`SessionError::Quota`], [`SessionError::Busy`];
    /// [`Error::Io`] when the system refuses.
    pub fn create(&self, name: &str, system: Option<&str>) -> Result<Session<B>> {
        let created = now();
        let system = system.map(|text| Record::System { created, content: Some(text.to_owned()) });
        let records: Vec<Record> =
            [Record::session(created, None)].into_iter().chain(system).collect();
        self.make(&mut self.lock(), name, &records, |_| Ok(()))
    }

    /// A new session that stands after a turn of another, with the turns before it and their states. 0 is the
    /// beginning.
    ///
    /// # Errors
    ///
    /// [`SessionError::Turn`], and as [`create`](Self::create).
    pub fn branch(&self, from: &Session<B>, name: &str, turn: TurnId) -> Result<Session<B>> {
        // The folder is taken before a session in it, here as everywhere.
        let mut open = self.lock();
        let live = from.live()?;
        from.check_turn(&live.tree, turn)?;
        let origin = Origin { session: from.inner.name.clone(), turn };
        let records = live.tree.branch(turn, now(), origin);
        let session = self.make(&mut open, name, &records, |folder| {
            let path = live.tree.path(turn).map(|turn| turn.id);
            states::link(&from.inner.folder, folder, path)
        })?;
        if let Some((_, state)) = live.recent.as_ref().filter(|(of, _)| *of == turn) {
            session.live()?.recent = Some((turn, state.clone()));
        }
        Ok(session)
    }

    /// Removes a session and all that is of it. Those who have it open find it gone. Of a session that is a link only
    /// the link is removed; what it leads to stays as it is.
    ///
    /// # Errors
    ///
    /// [`SessionError::Name`], [`SessionError::Missing`], [`SessionError::Busy`]; [`Error::Io`] when the system refuses.
    pub fn delete(&self, name: &str) -> Result<()> {
        let folder = self.folder_of(name)?;
        let mut open = self.lock();
        let is_link = fs::symlink_metadata(&folder).is_ok_and(|found| found.is_symlink());
        let is_open = open.get(name).is_some_and(|inner| inner.strong_count() > 0);
        // The log is not read: it may be damaged, or long.
        let session = if is_open {
            Ok(self.get_in(&mut open, name)?)
        } else {
            // A link that leads nowhere keeps others from its name.
            let is_there = || is_link && !folder.exists() || folder.join(LOG).exists();
            let missing = || SessionError::Missing { name: name.to_owned() };
            if !is_there() {
                return Err(missing());
            }
            let lock = self.lock_of(name, open.contains_key(name))?;
            if !is_there() {
                return Err(missing());
            }
            Err(lock)
        };
        let live = session.as_ref().ok().map(Session::live).transpose()?;
        let remove = || {
            if is_link {
                // Where links to folders are folders, `remove_file` refuses.
                fs::remove_file(&folder).or_else(|_| fs::remove_dir(&folder))?;
                return sync_folder(&self.folder);
            }
            // In one step out of sight, and then piece by piece.
            let (gone, (), _claim) = create_beside(&folder, |path| fs::create_dir(path))?;
            fs::rename(&folder, &gone)?;
            sync_folder(&self.folder)?;
            fs::remove_dir_all(&gone)
        };
        let removed = remove().map_err(|error| Error::io(&folder, error));
        self.sizes.changed(&self.folder, name);
        removed?;
        if let Some(mut live) = live {
            live.lock = None;
        }
        open.remove(name);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Weak<Inner<B>>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn folder_of(&self, name: &str) -> Result<PathBuf> {
        check_name(name)?;
        Ok(self.folder.join(name))
    }

    /// The session of a name; the same one if this process has it open.
    fn get_in(&self, open: &mut HashMap<String, Weak<Inner<B>>>, name: &str) -> Result<Session<B>> {
        let folder = self.folder_of(name)?;
        let known = open.get(name);
        if let Some(inner) = known.and_then(Weak::upgrade) {
            return Ok(Session { inner });
        }
        let path = folder.join(LOG);
        let missing = || SessionError::Missing { name: name.to_owned() };
        if !path.exists() {
            return Err(missing());
        }
        let lock = self.lock_of(name, known.is_some())?;
        if !path.exists() {
            return Err(missing());
        }
        clean(&folder);
        let (log, tree) = Log::open(&path, tree_of)?;
        states::prune(&folder, &tree);
        let states = states::all(&folder);
        for path in [folder, path].into_iter().chain(states) {
            make_private(&path).map_err(|error| Error::io(&path, error))?;
        }
        Ok(self.add(open, name, lock, log, tree))
    }

    fn add(
        &self,
        open: &mut HashMap<String, Weak<Inner<B>>>,
        name: &str,
        lock: Lock,
        log: Log,
        tree: Tree,
    ) -> Session<B> {
        let live = Mutex::new(Live { log, tree, recent: None, lock: Some(lock) });
        let (folder, sizes) = (self.folder.join(name), Arc::clone(&self.sizes));
        let inner = Arc::new(Inner { name: name.to_owned(), folder, live, sizes });
        open.retain(|_, inner| inner.strong_count() > 0);
        open.insert(name.to_owned(), Arc::downgrade(&inner));
        Session { inner }
    }

    /// The lock of a name. Another thread that is just closing the session has it for a moment longer.
    fn lock_of(&self, name: &str, was_open: bool) -> Result<Lock> {
        let mut attempts = if was_open { 0..200 } else { 0..0 };
        loop {
            match Lock::new(&self.folder, name) {
                Err(SessionError::Busy { .. }) if attempts.next().is_some() => {
                    thread::sleep(Duration::from_millis(1));
                }
                locked => return locked,
            }
        }
    }

    /// Makes a session of records and whatever else `fill` puts beside them; it is there as a whole or not at all.
    fn make(
        &self,
        open: &mut HashMap<String, Weak<Inner<B>>>,
        name: &str,
        records: &[Record],
        fill: impl FnOnce(&Path) -> Result<(), Error>,
    ) -> Result<Session<B>> {
        let folder = self.folder_of(name)?;
        let exists = || SessionError::Exists { name: name.to_owned() };
        if fs::symlink_metadata(&folder).is_ok() {
            return Err(exists());
        }
        let count = if self.most < usize::MAX { self.count()? } else { 0 };
        if count >= self.most {
            return Err(SessionError::Full { count, most: self.most });
        }
        self.check_quota()?;
        let lock = self.lock_of(name, open.contains_key(name))?;
        if fs::symlink_metadata(&folder).is_ok() {
            return Err(exists());
        }
        let summary = LogSummary::of(&tree_of(&folder, records.to_vec())?);
        let io = |error| Error::io(&folder, error);
        let (made, (), _claim) =
            create_beside(&folder, |path| private().create(path)).map_err(io)?;
        let finish = || -> Result<(), Error> {
            Log::create(&made.join(LOG), records, &summary)?;
            fill(&made)?;
            sync_folder(&made).map_err(io)?;
            fs::rename(&made, &folder).map_err(io)
        };
        if let Err(error) = finish() {
            // The first error is the one to report.
            let _ = fs::remove_dir_all(&made);
            return Err(error.into());
        }
        self.sizes.changed(&self.folder, name);
        sync_folder(&self.folder).map_err(io)?;
        let path = folder.join(LOG);
        let (log, tree) = Log::open(&path, tree_of)?;
        Ok(self.add(open, name, lock, log, tree))
    }
}

impl<B: Backend> Session<B> {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// The turn that the next one goes on from; 0 at the beginning.
    #[must_use]
    pub fn head(&self) -> TurnId {
        self.any().tree.head
    }

    /// What there is to say of it.
    #[must_use]
    pub fn summary(&self) -> Summary {
        Summary::new(&self.inner.name, LogSummary::of(&self.any().tree), &self.inner.folder)
    }

    /// All turns by their numbers, those too that were rewound.
    #[must_use]
    pub fn turns(&self) -> Vec<Turn> {
        self.any().tree.turns().cloned().collect()
    }

    /// Those of them after the turn `after`, by their numbers: at most `count`, and no more once their messages take
    /// `bytes` of JSON. And whether there are more.
    #[must_use]
    pub fn turns_after(&self, after: TurnId, count: usize, bytes: usize) -> (Vec<Turn>, bool) {
        let live = self.any();
        let mut rest = live.tree.turns().skip_while(|turn| turn.id <= after).peekable();
        let (mut turns, mut size) = (Vec::new(), 0_usize);
        while turns.len() < count && (turns.is_empty() || size < bytes) {
            let Some(turn) = rest.next() else { break };
            let json = serde_json::to_string(&turn.messages).unwrap_or_default();
            size = size.saturating_add(json.len());
            if size > bytes && !turns.is_empty() {
                return (turns, true);
            }
            turns.push(turn.clone());
        }
        (turns, rest.peek().is_some())
    }

    /// Bytes of its log.
    #[must_use]
    pub fn log_size(&self) -> u64 {
        self.any().log.len()
    }

    /// The messages up to the head, what the model is told before everything first.
    #[must_use]
    pub fn messages(&self) -> Vec<Value> {
        let live = self.any();
        live.tree.messages(live.tree.head)
    }

    /// The ids of the sequence after the head: what its model saw and made.
    #[must_use]
    pub fn ids(&self) -> Vec<u32> {
        let live = self.any();
        live.tree.ids(live.tree.head)
    }

    /// What the model is told before everything.
    #[must_use]
    pub fn system(&self) -> Option<String> {
        self.any().tree.system.clone()
    }

    /// Tells the model something else before everything, or nothing; all that was said is then run again.
    ///
    /// # Errors
    ///
    /// [`SessionError::Missing`] when it was deleted, [`Error::Io`] when the system refuses.
    pub fn set_system(&self, text: Option<&str>) -> Result<()> {
        let record = Record::System { created: now(), content: text.map(str::to_owned) };
        let added = self.live()?.add(&self.inner.folder, record);
        self.changed();
        added
    }

    /// Goes back, or aside, to after a turn; the next one goes on from there. 0 is the beginning. Nothing is lost: all turns
    /// stay in the tree.
    ///
    /// # Errors
    ///
    /// [`SessionError::Turn`]; [`SessionError::Missing`] when it was deleted, [`Error::Io`] when the system refuses.
    pub fn rewind(&self, turn: TurnId) -> Result<()> {
        let mut live = self.live()?;
        self.check_turn(&live.tree, turn)?;
        if turn == live.tree.head {
            return Ok(());
        }
        let added = live.add(&self.inner.folder, Record::Head { created: now(), turn });
        self.changed();
        added
    }

    /// The turn that is `count` before the head, 0 where there are no more.
    #[must_use]
    pub fn before_head(&self, count: usize) -> TurnId {
        let live = self.any();
        live.tree.path(live.tree.head).nth(count).map_or(0, |turn| turn.id)
    }

    /// What is to be run to answer `messages` after the head: all ids, and the longest state that has seen a beginning of them.
    ///
    /// The end of a text that asks for an answer is always wanted of the template, and its clock stands at the session's
    /// beginning unless `options` say otherwise, so that a text is the same the next day.
    ///
    /// # Errors
    ///
    /// [`SessionError::Message`] for messages that are none, [`SessionError::Missing`] when it was deleted; as
    /// [`ChatTemplate::encode`](crate::chat::ChatTemplate::encode).
    pub fn prompt(
        &self,
        assistant: &Assistant<'_, B>,
        messages: &[Value],
        options: &crate::chat::Options,
    ) -> Result<Prompt<B>> {
        let live = self.live()?;
        prompt::make(
            &live.tree,
            &self.inner.folder,
            live.recent.as_ref(),
            assistant,
            messages,
            options,
        )
    }

    /// What is to be run to go on with the answer of the head, as if it had never ended: the ids that its model saw and
    /// made. Of the prompt's ids the last [`begun`](Prompt::begun) are the answer's.
    ///
    /// The answer that is committed then is the whole one. Its turn stands beside the head, with the same parent.
    ///
    /// # Errors
    ///
    /// [`SessionError::Message`] at the beginning, after an answer without tokens, and for another model than made it;
    /// [`SessionError::Missing`] when it was deleted.
    pub fn go_on(&self, assistant: &Assistant<'_, B>) -> Result<Prompt<B>> {
        let live = self.live()?;
        prompt::go_on(&live.tree, &self.inner.folder, live.recent.as_ref(), assistant)
    }

    /// Takes an answer to `prompt` into the session: a turn, which is the head then. `generated` are its ids, all of
    /// them, and `answer` is their text as a message. `state` has seen the ids of the prompt and of the answer, the last
    /// or the last few excepted. `is_cut` says that the answer was ended before its own end.
    ///
    /// When this returns the turn is on disk.
    ///
    /// # Errors
    ///
    /// [`SessionError::Message`] for an answer that is no message, [`Error::Argument`] for a state that has seen more than there
    /// is; [`SessionError::Missing`] when it was deleted; [`Error::Io`] when the system refuses. The session is then as it was.
    pub fn commit(
        &self,
        assistant: &Assistant<'_, B>,
        prompt: Prompt<B>,
        answer: Value,
        generated: &[u32],
        state: Option<State<B>>,
        is_cut: bool,
    ) -> Result<Committed> {
        let mut live = self.live()?;
        let turn = prompt.into_turn(&live.tree, assistant, answer, generated, is_cut, now())?;
        if let Some(state) = state.as_ref().filter(|state| state.position() > turn.position) {
            let (expected, found) = (turn.position, state.position());
            let reason = format!("expected one that has seen at most {expected}, found {found}");
            return Err(Error::Argument { name: "state", reason }.into());
        }
        let id = turn.id;
        live.add(&self.inner.folder, Record::Turn(turn))?;
        let saved = state.map(|state| live.keep(&self.inner.folder, assistant, id, state));
        states::prune(&self.inner.folder, &live.tree);
        self.changed();
        Ok(Committed { turn: id, unsaved: saved.and_then(Result::err) })
    }

    /// The state after the head: it has seen [`ids`](Self::ids), the last or the last few excepted. `None` at the beginning, and
    /// where it is not kept.
    #[must_use]
    pub fn state(&self, assistant: &Assistant<'_, B>) -> Option<State<B>> {
        let live = self.any();
        let Live { tree, recent, .. } = &*live;
        let ids = tree.ids(tree.head);
        let folder = &self.inner.folder;
        let state = states::longest(tree, folder, recent.as_ref(), assistant.lm, &ids, ids.len())?;
        let before = tree.get(tree.head).map_or(0, |turn| tree.position(turn.base));
        (state.position() > before).then_some(state)
    }

    /// The state after the head, which where it is not kept is made by running ids again from the nearest that is. It has
    /// seen all of them, or all but the last that was generated. `None` at the beginning.
    ///
    /// # Errors
    ///
    /// As [`Model::forward`](crate::models::Model::forward).
    pub fn replayed_state(&self, assistant: &Assistant<'_, B>) -> Result<Option<State<B>>> {
        let (mut ids, end, nearest) = {
            let live = self.any();
            let Live { tree, recent, .. } = &*live;
            let Some(turn) = tree.get(tree.head) else { return Ok(None) };
            let end = turn.position.saturating_sub(usize::from(turn.generated > 0));
            let ids = tree.ids(tree.head);
            let (folder, recent) = (&self.inner.folder, recent.as_ref());
            let nearest = states::longest(tree, folder, recent, assistant.lm, &ids, ids.len());
            (ids, end, nearest)
        };
        ids.truncate(end);
        let model = &assistant.lm.model;
        let mut state = nearest.map_or_else(|| model.new_state(), Ok)?;
        if let Some(tokens) = ids.get(state.position()..).filter(|tokens| !tokens.is_empty()) {
            model.forward(&mut [Run { tokens, state: &mut state }], Logits::None)?;
        }
        Ok(Some(state))
    }

    /// Takes another state for the one after the head, such as a mixture of some, and saves it. What is said next goes on from it
    /// as long as it is kept; where it is lost, the ids are run again and it is as it was.
    ///
    /// # Errors
    ///
    /// [`SessionError::Turn`] at the beginning; as [`StateFile::save`](crate::state_file::StateFile::save).
    pub fn set_state(&self, assistant: &Assistant<'_, B>, mut state: State<B>) -> Result<()> {
        let mut live = self.live()?;
        let head = live.tree.head;
        let Some(turn) = live.tree.get(head) else {
            return Err(SessionError::Turn { name: self.inner.name.clone(), turn: head });
        };
        state.set_position(turn.position.saturating_sub(usize::from(turn.generated > 0)));
        let kept = live.keep(&self.inner.folder, assistant, head, state);
        self.changed();
        Ok(kept?)
    }

    /// The file with the state after the head, if there is one.
    #[must_use]
    pub fn state_file(&self) -> Option<PathBuf> {
        let path = states::path(&self.inner.folder, self.head());
        path.is_file().then_some(path)
    }

    /// Files of the session have changed.
    fn changed(&self) {
        if let Some(folder) = self.inner.folder.parent() {
            self.inner.sizes.changed(folder, &self.inner.name);
        }
    }

    fn any(&self) -> MutexGuard<'_, Live<B>> {
        self.inner.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn live(&self) -> Result<MutexGuard<'_, Live<B>>> {
        let live = self.any();
        let missing = || SessionError::Missing { name: self.inner.name.clone() };
        if live.lock.is_some() { Ok(live) } else { Err(missing()) }
    }

    fn check_turn(&self, tree: &Tree, turn: TurnId) -> Result<()> {
        if turn == 0 || tree.get(turn).is_some() {
            return Ok(());
        }
        Err(SessionError::Turn { name: self.inner.name.clone(), turn })
    }
}

impl<B: Backend> Live<B> {
    /// Writes a record, and only then takes it for true.
    fn add(&mut self, folder: &Path, record: Record) -> Result<()> {
        self.log.append(&record, &LogSummary::after(&self.tree, &record))?;
        self.tree.apply(record).map_err(|reason| Error::damaged(folder, reason))?;
        Ok(())
    }

    /// Keeps the state after a turn, in memory and in a file.
    fn keep(
        &mut self,
        folder: &Path,
        assistant: &Assistant<'_, B>,
        turn: TurnId,
        state: State<B>,
    ) -> Result<(), Error> {
        let saved = states::save(folder, &self.tree, assistant, turn, &state);
        self.recent = Some((turn, state));
        saved
    }
}

/// Whether something in the folder is a session's, or a server's beside them.
fn is_ours(path: &Path) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    match name.strip_prefix('.') {
        Some(hidden) => {
            let lock = hidden.strip_suffix(".lock");
            name == RESPONSES || lock.is_some_and(|name| check_name(name).is_ok())
        }
        None => check_name(name).is_ok() && path.join(LOG).is_file(),
    }
}

fn tree_of(path: &Path, records: Vec<Record>) -> Result<Tree, Error> {
    Tree::of(records).map_err(|reason| Error::damaged(path, reason))
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
