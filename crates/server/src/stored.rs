//! Answers that later requests may go on from: the least recently used make room. They are in memory, and in files where the
//! server keeps sessions.

mod disk;

use std::collections::{BTreeMap, HashMap};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use boostr::checkpoint::PrivateFolder;
use serde_json::Value;

use crate::app::WorkGuard;
use crate::auth::Scope;

pub(crate) use disk::is_ours;
use disk::{Disk, Left};

/// Most memory of all answers, in bytes.
const MAX_BYTES: usize = 64 << 20;
/// Longest id, in bytes.
const MAX_ID: usize = 64;

/// An answer that is kept.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Stored {
    /// It as its client got it.
    pub(crate) response: Value,
    /// The items of the conversation before it, each with an id.
    pub(crate) input: Vec<Value>,
}

impl Stored {
    /// The items of the conversation with it.
    pub(crate) fn items(&self) -> Vec<Value> {
        let output = self.response["output"].as_array().into_iter().flatten();
        self.input.iter().chain(output).cloned().collect()
    }

    /// The item of its answer with an id.
    pub(crate) fn output(&self, id: &str) -> Option<Value> {
        self.response["output"].as_array()?.iter().find(|item| item["id"] == id).cloned()
    }

    fn bytes(&self) -> usize {
        size(&self.response) + self.input.iter().map(size).sum::<usize>()
    }
}

/// The answers that a server keeps, each for the key that it was made with.
#[derive(Debug)]
pub(crate) struct Responses {
    shelf: Arc<Shelf>,
    /// To the thread that writes files: what became of an answer.
    changes: OnceLock<Sender<(Key, WorkGuard)>>,
}

/// Whose answer it is, and its id.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    scope: u64,
    id: String,
}

impl Key {
    fn new(scope: u64, id: &str) -> Option<Self> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
        let is_id = (1..=MAX_ID).contains(&id.len()) && id.bytes().all(is_plain);
        is_id.then(|| Self { scope, id: id.to_owned() })
    }
}

#[derive(Debug)]
struct Shelf {
    most: usize,
    kept: Mutex<Kept>,
    disk: OnceLock<Disk>,
}

#[derive(Debug, Default)]
struct Kept {
    all: HashMap<Key, Entry>,
    /// Keys by their last use.
    by_use: BTreeMap<u64, Key>,
    uses: u64,
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    /// `None` for one that is on disk and was not asked for yet.
    stored: Option<Arc<Stored>>,
    bytes: usize,
    used: u64,
    /// Bytes of its file; 0 while there is none.
    on_disk: usize,
}

impl Responses {
    /// Room for `most` answers.
    pub(crate) fn new(most: usize) -> Self {
        let shelf = Shelf { most, kept: Mutex::default(), disk: OnceLock::new() };
        Self { shelf: Arc::new(shelf), changes: OnceLock::new() }
    }

    /// From now on answers are kept in files too, as many bytes as `left` says. Those that are there are known.
    ///
    /// # Errors
    ///
    /// When the folder cannot be read, or no thread started.
    pub(crate) fn keep_in(&self, folder: PrivateFolder, left: Left) -> boostr::Result<()> {
        if self.shelf.most == 0 {
            return Ok(());
        }
        let path = folder.path().to_path_buf();
        let disk = Disk::new(folder, left);
        let found = disk.list(self.shelf.most)?;
        let mut dropped = Vec::new();
        {
            let mut kept = self.shelf.lock();
            for (key, bytes) in found {
                kept.add(key, Entry { stored: None, bytes, used: 0, on_disk: bytes });
                dropped.extend(kept.fit(self.shelf.most));
            }
        }
        disk.drop_all(&dropped);
        let (sender, changes) = mpsc::channel::<(Key, WorkGuard)>();
        let shelf = Arc::clone(&self.shelf);
        let write = move || {
            while let Ok((key, _work)) = changes.recv() {
                shelf.settle(&key);
            }
        };
        let thread = thread::Builder::new().name("responses".into()).spawn(write);
        thread.map_err(|source| boostr::Error::Io { path, source })?;
        // Another folder is not taken.
        let _ = self.shelf.disk.set(disk);
        let _ = self.changes.set(sender);
        Ok(())
    }

    /// Whether to look for an answer may take the time of a disk.
    pub(crate) fn is_on_disk(&self) -> bool {
        self.shelf.disk.get().is_some()
    }

    /// Keeps an answer, in place of those that were not used for longest. One that is larger than all may be is not kept.
    /// `work` is under way until it is on disk, if it goes there.
    pub(crate) fn put(&self, scope: Scope, id: &str, stored: Stored, work: impl Fn() -> WorkGuard) {
        let bytes = stored.bytes();
        let Some(key) = Key::new(scope.0, id) else { return };
        if bytes > MAX_BYTES || self.shelf.most == 0 {
            return;
        }
        let mut changed = {
            let mut kept = self.shelf.lock();
            let stored = Some(Arc::new(stored));
            kept.add(key.clone(), Entry { stored, bytes, used: 0, on_disk: 0 });
            kept.fit(self.shelf.most)
        };
        changed.push(key);
        if let Some(sender) = self.changes.get() {
            // A thread that is gone writes nothing: the answer is in memory.
            for key in changed {
                let _ = sender.send((key, work()));
            }
        }
    }

    /// An answer that is still there.
    ///
    /// # Errors
    ///
    /// Why its file cannot be read.
    pub(crate) fn get(&self, scope: Scope, id: &str) -> Result<Option<Arc<Stored>>, String> {
        Key::new(scope.0, id).map_or(Ok(None), |key| self.shelf.get(&key))
    }

    /// Drops an answer, also one whose file cannot be read; `false` when it was not there.
    ///
    /// # Errors
    ///
    /// Why its file stays. The answer is then there as before.
    pub(crate) fn delete(&self, scope: Scope, id: &str) -> Result<bool, String> {
        Key::new(scope.0, id).map_or(Ok(false), |key| self.shelf.delete(&key))
    }

    /// Sessions have grown: answers make room on disk.
    pub(crate) fn make_room(&self) {
        if let Some(disk) = self.shelf.disk.get() {
            let _turn = disk.turn();
            self.shelf.make_room(disk, 0, None);
        }
    }
}

impl Shelf {
    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, key: &Key) -> Result<Option<Arc<Stored>>, String> {
        let Some(disk) = self.disk.get() else { return Ok(self.lock().used(key)) };
        // Before the look into memory: who deletes has the turn for both.
        let _turn = disk.turn();
        if let Some(known) = self.lock().used(key) {
            disk.touch(key);
            return Ok(Some(known));
        }
        // It may be of another server that keeps its answers here.
        let Some((stored, bytes)) = disk.read(key)? else {
            let mut kept = self.lock();
            // What came meanwhile is not on disk yet.
            if kept.all.get(key).is_some_and(|entry| entry.stored.is_none()) {
                kept.remove(key);
            }
            return Ok(kept.used(key));
        };
        disk.touch(key);
        let stored = Arc::new(stored);
        let mut kept = self.lock();
        let (memory, on_disk) = (stored.bytes(), bytes);
        let entry = Entry { stored: Some(stored.clone()), bytes: memory, used: 0, on_disk };
        kept.add(key.clone(), entry);
        let dropped = kept.fit(self.most);
        drop(kept);
        disk.drop_all(&dropped);
        Ok(Some(stored))
    }

    fn delete(&self, key: &Key) -> Result<bool, String> {
        let Some(disk) = self.disk.get() else { return Ok(self.lock().remove(key)) };
        let _turn = disk.turn();
        let was_there = disk.remove(key)?;
        Ok(self.lock().remove(key) || was_there)
    }

    /// Makes the files say of an answer what the memory says.
    fn settle(&self, key: &Key) {
        let Some(disk) = self.disk.get() else { return };
        let _turn = disk.turn();
        let stored = match self.lock().all.get(key) {
            None => None,
            Some(entry) if entry.on_disk > 0 => return,
            Some(entry) => entry.stored.clone(),
        };
        let Some(stored) = stored else { return disk.drop_all(std::slice::from_ref(key)) };
        let text = disk::encode(&stored);
        if self.make_room(disk, text.len(), Some(key)) && disk.write(key, &text) {
            // Where it was dropped meanwhile, who did that waits for a turn to remove the file.
            if let Some(entry) = self.lock().all.get_mut(key) {
                entry.on_disk = text.len();
            }
        }
    }

    /// Drops answers until those on disk and `more` bytes fit, but not `but`; `false` when they do not. For what is larger
    /// than the room of all nothing is dropped, nor where the room is not known.
    fn make_room(&self, disk: &Disk, more: usize, but: Option<&Key>) -> bool {
        let Some(left) = disk.left() else { return false };
        let more = more as u64;
        let can_fit = more <= left;
        let mut dropped = Vec::new();
        let fits = {
            let mut kept = self.lock();
            let on_disk = kept.all.values().map(|entry| entry.on_disk as u64);
            let mut used = if can_fit { more } else { 0 } + on_disk.sum::<u64>();
            while used > left {
                let size = |key: &Key| kept.all.get(key).map_or(0, |entry| entry.on_disk);
                let mut all = kept.by_use.values();
                let Some(oldest) = all.find(|key| but != Some(*key) && size(key) > 0).cloned()
                else {
                    break;
                };
                used -= size(&oldest) as u64;
                kept.remove(&oldest);
                dropped.push(oldest);
            }
            can_fit && used <= left
        };
        disk.drop_all(&dropped);
        if !fits {
            tracing::warn!(
                left,
                bytes = more,
                "an answer is in memory alone: sessions leave no room of the quota"
            );
        }
        fits
    }
}

impl Kept {
    fn next_use(&mut self) -> u64 {
        self.uses += 1;
        self.uses
    }

    /// Adds an answer as the one that was used last.
    fn add(&mut self, key: Key, entry: Entry) {
        self.remove(&key);
        let used = self.next_use();
        self.by_use.insert(used, key.clone());
        self.bytes += entry.bytes;
        self.all.insert(key, Entry { used, ..entry });
    }

    /// Drops the least recently used until there are no more than there may be, and returns which.
    fn fit(&mut self, most: usize) -> Vec<Key> {
        let mut dropped = Vec::new();
        while self.all.len() > most || self.bytes > MAX_BYTES {
            let Some(oldest) = self.by_use.values().next().cloned() else { break };
            self.remove(&oldest);
            dropped.push(oldest);
        }
        dropped
    }

    /// An answer that is in memory, which is used now.
    fn used(&mut self, key: &Key) -> Option<Arc<Stored>> {
        let now = self.next_use();
        let entry = self.all.get_mut(key)?;
        let before = std::mem::replace(&mut entry.used, now);
        let stored = entry.stored.clone();
        self.by_use.remove(&before);
        self.by_use.insert(now, key.clone());
        stored
    }

    fn remove(&mut self, key: &Key) -> bool {
        let Some(entry) = self.all.remove(key) else { return false };
        self.by_use.remove(&entry.used);
        self.bytes -= entry.bytes;
        true
    }
}

/// The memory of a value, about: those of lists and objects may take many times their text.
fn size(value: &Value) -> usize {
    let own = size_of::<Value>();
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => own,
        Value::String(text) => own + text.len(),
        Value::Array(list) => own + list.iter().map(size).sum::<usize>(),
        Value::Object(map) => {
            // A name, its hash, and its place in the order.
            let entry = |(name, value): (&String, &Value)| 64 + name.len() + size(value);
            own + map.iter().map(entry).sum::<usize>()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

    use super::*;
    use crate::app::Work;
    use serde_json::json;

    fn stored(bytes: usize) -> Stored {
        Stored { response: json!({}), input: vec!["x".repeat(bytes).into()] }
    }

    fn put(all: &Responses, scope: u64, id: &str, mut stored: Stored) {
        stored.response["id"] = id.into();
        let work = Work::default();
        all.put(Scope(scope), id, stored, || work.begin());
        // On disk, if it goes there.
        while !work.is_idle() {
            thread::yield_now();
        }
    }

    fn has(all: &Responses, scope: u64, id: &str) -> bool {
        all.get(Scope(scope), id).is_ok_and(|stored| stored.is_some())
    }

    fn deletes(all: &Responses, scope: u64, id: &str) -> bool {
        all.delete(Scope(scope), id).unwrap()
    }

    #[test]
    fn the_answer_that_was_not_used_for_longest_makes_room() {
        let all = Responses::new(2);
        put(&all, 1, "a", stored(1));
        put(&all, 1, "b", stored(1));
        assert!(has(&all, 1, "a"));
        put(&all, 1, "c", stored(1));
        assert_eq!(["a", "b", "c"].map(|id| has(&all, 1, id)), [true, false, true]);
        assert!(!has(&all, 2, "a"), "another key sees it");
        assert!(!deletes(&all, 2, "a") && deletes(&all, 1, "a"));
        assert!(!deletes(&all, 1, "a"));
        put(&all, 1, "c", stored(5));
        let kept = all.shelf.lock();
        let only = kept.all.values().map(|entry| entry.bytes).sum::<usize>();
        assert_eq!((kept.all.len(), kept.by_use.len(), kept.bytes), (1, 1, only));
    }

    #[test]
    fn answers_take_no_more_memory_than_is_allowed() {
        let all = Responses::new(1000);
        for i in 0..20 {
            put(&all, 0, &i.to_string(), stored(MAX_BYTES / 10));
            assert!(all.shelf.lock().bytes <= MAX_BYTES);
        }
        assert_eq!(all.shelf.lock().all.len(), 9);
        put(&all, 0, "large", stored(MAX_BYTES));
        assert!(!has(&all, 0, "large"));
        assert_eq!(all.shelf.lock().all.len(), 9, "what cannot be kept takes no room");
        assert!(has(&all, 0, "19"));
        put(&Responses::new(0), 0, "a", stored(1));
    }

    struct Folder(PathBuf);

    impl Folder {
        fn new() -> Self {
            static NEXT: AtomicUsize = AtomicUsize::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("boostr-responses-{}-{number}", std::process::id());
            Self(std::env::temp_dir().join(name))
        }

        /// Answers as a server has them that starts here.
        fn start(&self, most: usize, left: u64) -> Responses {
            let all = Responses::new(most);
            all.keep_in(PrivateFolder::open(&self.0).unwrap(), Box::new(move || Some(left)))
                .unwrap();
            all
        }

        fn files(&self) -> Vec<String> {
            let entries = std::fs::read_dir(&self.0).unwrap();
            let mut names: Vec<String> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }

        fn path(&self, scope: u64, id: &str) -> PathBuf {
            self.0.join(format!("{scope:016x}-{id}.jsonl"))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    const ENOUGH: u64 = 1 << 40;

    #[test]
    fn answers_are_there_after_a_restart_for_their_key_alone() {
        let folder = Folder::new();
        let one = Stored {
            response: json!({"id": "a", "output": [{"type": "message"}]}),
            input: vec![json!({"role": "user", "content": "H\ni \u{2028}\"ü"})],
        };
        put(&folder.start(10, ENOUGH), 7, "a", one.clone());
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
            assert_eq!((mode(&folder.0), mode(&folder.path(7, "a"))), (0o700, 0o600));
        }
        let all = folder.start(10, ENOUGH);
        assert_eq!(*all.get(Scope(7), "a").unwrap().unwrap(), one);
        assert_eq!(all.get(Scope(7), "a").unwrap().unwrap().items().len(), 2);
        assert!(!has(&all, 8, "a"), "another key sees it");
        // Another server finds what was written meanwhile, and none finds what was deleted.
        let other = folder.start(10, ENOUGH);
        put(&all, 7, "b", one);
        assert!(has(&other, 7, "b"));
        assert!(deletes(&all, 7, "b") && !deletes(&other, 7, "c"));
        assert_eq!(folder.files().len(), 1);
        assert!(!has(&folder.start(10, ENOUGH), 7, "b"));
        for id in ["", "../a", "a/b", ".a", "a\0", &"x".repeat(65)] {
            assert!(!has(&all, 7, id) && !deletes(&all, 7, id), "{id:?}");
        }
    }

    #[test]
    fn the_least_recently_used_leave_the_disk_too() {
        let folder = Folder::new();
        let all = folder.start(2, ENOUGH);
        put(&all, 0, "a", stored(1));
        put(&all, 0, "b", stored(1));
        assert!(has(&all, 0, "a"));
        put(&all, 0, "c", stored(1));
        assert_eq!(folder.files().len(), 2);
        // What was used is known after a restart, and so is what it was used for.
        let old = std::time::SystemTime::UNIX_EPOCH;
        std::fs::File::options()
            .write(true)
            .open(folder.path(0, "c"))
            .unwrap()
            .set_modified(old)
            .unwrap();
        let all = folder.start(2, ENOUGH);
        put(&all, 0, "d", stored(1));
        assert_eq!(["a", "b", "c", "d"].map(|id| has(&all, 0, id)), [true, false, false, true]);
        assert_eq!(folder.start(1, ENOUGH).shelf.lock().all.len(), 1);
        assert_eq!(folder.files().len(), 1);
    }

    #[test]
    fn answers_take_what_sessions_leave_of_the_quota() {
        let folder = Folder::new();
        let left = Arc::new(AtomicU64::new(10_000));
        let all = Responses::new(100);
        let told = left.clone();
        let left_of = Box::new(move || Some(told.load(Ordering::Relaxed)));
        all.keep_in(PrivateFolder::open(&folder.0).unwrap(), left_of).unwrap();
        for i in 0..20 {
            put(&all, 0, &i.to_string(), stored(1500));
            let names = folder.files().into_iter();
            let bytes: u64 = names.map(|name| folder.0.join(name).metadata().unwrap().len()).sum();
            assert!(bytes <= 10_000, "{bytes}");
        }
        assert_eq!(folder.files().len(), 6);
        assert!(has(&all, 0, "19") && !has(&all, 0, "1"));
        left.store(2000, Ordering::Relaxed);
        all.make_room();
        assert_eq!(folder.files(), ["0000000000000000-19.jsonl"]);
        // One that has no room on disk is in memory.
        left.store(0, Ordering::Relaxed);
        put(&all, 0, "20", stored(1500));
        assert!(has(&all, 0, "20") && folder.files().is_empty());
    }

    #[test]
    fn what_is_damaged_is_an_error_that_names_it_and_can_be_deleted() {
        let folder = Folder::new();
        put(&folder.start(10, ENOUGH), 0, "a", stored(100));
        let path = folder.path(0, "a");
        let whole = std::fs::read(&path).unwrap();
        let mut flipped = whole.clone();
        flipped[50] ^= 1;
        let other = [&whole[..], b"\n"].concat();
        for bytes in [&b""[..], b"\xff\xfe", b"00000000\n{}\n", &whole[..60], &flipped, &other] {
            std::fs::write(&path, bytes).unwrap();
            let all = folder.start(10, ENOUGH);
            assert!(all.get(Scope(0), "a").is_err(), "{bytes:?}");
            assert!(deletes(&all, 0, "a") && all.get(Scope(0), "a").unwrap().is_none());
        }
        // Nothing that is no file of its own is followed, waited for or removed with what it leads to.
        std::fs::create_dir(&path).unwrap();
        std::fs::write(folder.0.join("notes.txt"), "mine").unwrap();
        let all = folder.start(10, ENOUGH);
        assert!(all.get(Scope(0), "a").is_err());
        put(&all, 0, "b", stored(1));
        assert_eq!(folder.files().len(), 3);
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(folder.0.join("notes.txt"), folder.path(0, "c")).unwrap();
            assert!(all.get(Scope(0), "c").is_err());
            put(&all, 0, "c", stored(1));
            assert!(has(&folder.start(10, ENOUGH), 0, "c"));
            assert_eq!(std::fs::read_to_string(folder.0.join("notes.txt")).unwrap(), "mine");
        }
    }

    #[test]
    fn a_deletion_says_that_a_file_stays() {
        let folder = Folder::new();
        let all = folder.start(10, ENOUGH);
        put(&all, 0, "a", stored(1));
        // What cannot be removed as a file, whoever asks.
        std::fs::remove_file(folder.path(0, "a")).unwrap();
        std::fs::create_dir(folder.path(0, "a")).unwrap();
        let reason = all.delete(Scope(0), "a").unwrap_err();
        assert!(reason.contains("0000000000000000-a.jsonl") && !reason.contains('/'), "{reason}");
        assert!(has(&all, 0, "a"), "what was not deleted is gone");
        std::fs::remove_dir(folder.path(0, "a")).unwrap();
        assert!(deletes(&all, 0, "a") && !has(&all, 0, "a"));
    }

    #[test]
    fn an_answer_that_comes_while_it_is_looked_for_stays() {
        let folder = Folder::new();
        let all = folder.start(10, ENOUGH);
        // It is in memory, and its file is not written yet.
        let waiting = Responses::new(10);
        let disk = Disk::new(PrivateFolder::open(&folder.0).unwrap(), Box::new(|| Some(ENOUGH)));
        waiting.shelf.disk.set(disk).unwrap();
        let key = Key::new(0, "a").unwrap();
        let entry = Entry { stored: Some(Arc::new(stored(1))), bytes: 1, used: 0, on_disk: 0 };
        waiting.shelf.lock().add(key.clone(), entry);
        assert!(has(&waiting, 0, "a") && folder.files().is_empty());
        // One that is known by its file alone is gone with it.
        put(&all, 0, "b", stored(1));
        let known = folder.start(10, ENOUGH);
        std::fs::remove_file(folder.path(0, "b")).unwrap();
        assert!(!has(&known, 0, "b") && known.shelf.lock().all.is_empty());
        // Who looks and who deletes take turns, so a deleted answer never comes back.
        for round in 0..50 {
            put(&all, 0, "c", stored(1));
            thread::scope(|scope| {
                scope.spawn(|| has(&all, 0, "c"));
                scope.spawn(|| assert!(deletes(&all, 0, "c"), "{round}"));
            });
            assert!(!has(&all, 0, "c") && folder.files().is_empty(), "{round}");
        }
    }

    #[test]
    fn planted_files_are_ignored_and_no_more_are_remembered_than_may_be() {
        let folder = Folder::new();
        put(&folder.start(10, ENOUGH), 0, "a", stored(1));
        let huge = std::fs::File::create(folder.path(0, "huge")).unwrap();
        huge.set_len(1 << 40).unwrap();
        let old = std::time::SystemTime::UNIX_EPOCH;
        for i in 0..30 {
            std::fs::write(folder.path(0, &format!("old{i}")), "x").unwrap();
            let file =
                std::fs::File::options().write(true).open(folder.path(0, &format!("old{i}")));
            file.unwrap().set_modified(old).unwrap();
        }
        std::fs::write(folder.0.join("0-b.jsonl"), "x").unwrap();
        let all = folder.start(3, ENOUGH);
        assert_eq!(all.shelf.lock().all.len(), 3);
        assert!(has(&all, 0, "a"));
        // It takes nothing of the quota, and is neither read nor removed.
        assert!(all.get(Scope(0), "huge").is_err());
        put(&all, 0, "b", stored(1));
        assert!(has(&all, 0, "b") && folder.path(0, "huge").exists());
        assert!(folder.0.join("0-b.jsonl").exists());
        assert_eq!(folder.files().len(), 5);
    }
}
