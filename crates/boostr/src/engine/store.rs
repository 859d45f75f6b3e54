//! Snapshots: states of prefixes that a later request may begin with.

use std::collections::HashMap;

use crate::backend::Backend;
use crate::models::State;

/// Snapshots under a limit of memory.
pub(super) struct Store<B: Backend> {
    entries: Vec<Entry<B>>,
    /// How many snapshots have a piece of memory, by its address, and its bytes.
    blocks: HashMap<usize, (usize, usize)>,
    bytes: usize,
    limit: usize,
    clock: u64,
}

struct Entry<B: Backend> {
    scope: u64,
    ids: Vec<u32>,
    state: State<B>,
    /// Logits of what comes next, where a prompt ended.
    logits: Option<Vec<f32>>,
    used: u64,
}

impl<B: Backend> Entry<B> {
    /// Pieces of memory, with one that is surely its own.
    fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        let own = 4 * (self.ids.len() + self.logits.as_ref().map_or(0, Vec::len));
        let blocks = self.state.blocks().chain([(self.ids.as_ptr().addr(), own)]);
        blocks.filter(|&(_, bytes)| bytes > 0)
    }
}

/// What a request may begin with.
pub(super) struct Known<B: Backend> {
    pub(super) state: State<B>,
    /// How many of its tokens the state has seen.
    pub(super) seen: usize,
    /// Logits of what comes next, if it is known to its end; else empty.
    pub(super) logits: Vec<f32>,
    pub(super) is_snapshot: bool,
}

impl<B: Backend> Store<B> {
    pub(super) fn new(limit: usize) -> Self {
        Self { entries: Vec::new(), blocks: HashMap::new(), bytes: 0, limit, clock: 0 }
    }

    /// The state of the longest prefix of `ids`; of all of it only `to_the_end`, with the logits of what comes next.
    pub(super) fn longest(
        &mut self,
        scope: Option<u64>,
        ids: &[u32],
        to_the_end: bool,
    ) -> Option<Known<B>> {
        let scope = scope?;
        let fits = |entry: &&mut Entry<B>| {
            let len = entry.ids.len();
            let goes_on = len < ids.len() || to_the_end && entry.logits.is_some();
            entry.scope == scope && goes_on && ids.starts_with(&entry.ids)
        };
        let best = self.entries.iter_mut().filter(fits).max_by_key(|entry| entry.ids.len())?;
        self.clock += 1;
        best.used = self.clock;
        let (state, seen) = (best.state.clone(), best.ids.len());
        let logits = best.logits.clone().filter(|_| seen == ids.len()).unwrap_or_default();
        Some(Known { state, seen, logits, is_snapshot: true })
    }

    /// Keeps the state of `ids`; one that is kept already is used once more.
    pub(super) fn keep(
        &mut self,
        scope: Option<u64>,
        ids: &[u32],
        state: &State<B>,
        logits: Option<&[f32]>,
    ) {
        debug_assert_eq!(ids.len(), state.position());
        let Some(scope) = scope else { return };
        if self.limit == 0 || ids.is_empty() {
            return;
        }
        self.clock += 1;
        let mut entries = self.entries.iter();
        if let Some(i) = entries.position(|entry| entry.scope == scope && entry.ids == ids) {
            if self.entries[i].logits.is_some() || logits.is_none() {
                self.entries[i].used = self.clock;
                return;
            }
            self.give_up(i);
        }
        let logits = logits.map(<[f32]>::to_vec);
        let entry =
            Entry { scope, ids: ids.to_vec(), state: state.clone(), logits, used: self.clock };
        for (address, bytes) in entry.blocks() {
            let (count, _) = self.blocks.entry(address).or_insert((0, bytes));
            *count += 1;
            if *count == 1 {
                self.bytes += bytes;
            }
        }
        self.entries.push(entry);
        while self.bytes > self.limit
            && let Some((i, _)) = self.entries.iter().enumerate().min_by_key(|(_, it)| it.used)
        {
            self.give_up(i);
        }
    }

    fn give_up(&mut self, i: usize) {
        let entry = self.entries.swap_remove(i);
        for (address, _) in entry.blocks() {
            if let Some((count, bytes)) = self.blocks.get_mut(&address) {
                *count -= 1;
                if *count == 0 {
                    self.bytes -= *bytes;
                    self.blocks.remove(&address);
                }
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Memory of all, what they share counted once.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}
