//! Answers that later requests may go on from: in memory, the least recently used first out.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;

use crate::auth::Scope;

/// Most memory of all answers, by the bytes of their JSON.
const MAX_BYTES: usize = 64 << 20;

/// An answer that is kept.
#[derive(Debug)]
pub(crate) struct Stored {
    /// It as its client got it.
    pub(crate) response: Value,
    /// The conversation up to it, without what instructs the model.
    pub(crate) messages: Vec<Value>,
}

/// The answers that a server keeps, each for the key that it was made with.
#[derive(Debug)]
pub(crate) struct Responses {
    most: usize,
    kept: Mutex<Kept>,
}

type Key = (u64, String);

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
    stored: Arc<Stored>,
    bytes: usize,
    used: u64,
}

impl Responses {
    /// Room for `most` answers.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, kept: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an answer, in place of those that were not used for longest. One that is larger than all may be is not kept.
    pub(crate) fn put(&self, scope: Scope, id: &str, stored: Stored) {
        let bytes = size(&stored.response) + stored.messages.iter().map(size).sum::<usize>();
        if bytes > MAX_BYTES || self.most == 0 {
            return;
        }
        let mut kept = self.lock();
        let key = (scope.0, id.to_owned());
        kept.remove(&key);
        let used = kept.next_use();
        kept.by_use.insert(used, key.clone());
        kept.bytes += bytes;
        kept.all.insert(key, Entry { stored: Arc::new(stored), bytes, used });
        while kept.all.len() > self.most || kept.bytes > MAX_BYTES {
            let Some(oldest) = kept.by_use.values().next().cloned() else { break };
            kept.remove(&oldest);
        }
    }

    /// An answer that is still there.
    pub(crate) fn get(&self, scope: Scope, id: &str) -> Option<Arc<Stored>> {
        let mut kept = self.lock();
        let key = (scope.0, id.to_owned());
        let now = kept.next_use();
        let entry = kept.all.get_mut(&key)?;
        let (before, stored) = (std::mem::replace(&mut entry.used, now), entry.stored.clone());
        kept.by_use.remove(&before);
        kept.by_use.insert(now, key);
        Some(stored)
    }

    /// Drops an answer; `false` when it was not there.
    pub(crate) fn delete(&self, scope: Scope, id: &str) -> bool {
        self.lock().remove(&(scope.0, id.to_owned()))
    }
}

impl Kept {
    fn next_use(&mut self) -> u64 {
        self.uses += 1;
        self.uses
    }

    fn remove(&mut self, key: &Key) -> bool {
        let Some(entry) = self.all.remove(key) else { return false };
        self.by_use.remove(&entry.used);
        self.bytes -= entry.bytes;
        true
    }
}

/// Bytes of a value as JSON.
fn size(value: &Value) -> usize {
    struct Count(usize);
    impl io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    // A counter never fails.
    let _ = serde_json::to_writer(&mut count, value);
    count.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn stored(bytes: usize) -> Stored {
        Stored { response: json!({}), messages: vec!["x".repeat(bytes).into()] }
    }

    #[test]
    fn the_answer_that_was_not_used_for_longest_makes_room() {
        let all = Responses::new(2);
        let mine = Scope(1);
        all.put(mine, "a", stored(1));
        all.put(mine, "b", stored(1));
        assert!(all.get(mine, "a").is_some());
        all.put(mine, "c", stored(1));
        let there = ["a", "b", "c"].map(|id| all.get(mine, id).is_some());
        assert_eq!(there, [true, false, true]);
        assert!(all.get(Scope(2), "a").is_none(), "another key sees it");
        assert!(!all.delete(Scope(2), "a") && all.delete(mine, "a") && !all.delete(mine, "a"));
        all.put(mine, "c", stored(5));
        let kept = all.lock();
        let only = kept.all.values().map(|entry| entry.bytes).sum::<usize>();
        assert_eq!((kept.all.len(), kept.by_use.len(), kept.bytes), (1, 1, only));
    }

    #[test]
    fn answers_take_no_more_memory_than_is_allowed() {
        let all = Responses::new(1000);
        for i in 0..20 {
            all.put(Scope(0), &i.to_string(), stored(MAX_BYTES / 10));
            assert!(all.lock().bytes <= MAX_BYTES);
        }
        assert_eq!(all.lock().all.len(), 9);
        all.put(Scope(0), "large", stored(MAX_BYTES));
        assert!(all.get(Scope(0), "large").is_none());
        assert_eq!(all.lock().all.len(), 9, "what cannot be kept takes no room");
        assert!(all.get(Scope(0), "19").is_some());
        Responses::new(0).put(Scope(0), "a", stored(1));
    }
}
