//! The prefix cache: a radix tree of the ids of prompts and answers, with snapshots of states at some of its nodes.
//!
//! ```text
//! scope ─ system prompt ─┬─ question A ─ answer ●
//!                        ●
//!                        └─ question B ─ answer ●       ● a snapshot
//! ```
//!
//! The tree knows where a prompt leaves the way of earlier ones, also where no state is kept. So that place can get a
//! snapshot when it is passed for the second time.
//!
//! A node may have a file in place of a snapshot, or beside it ([`Spill`]): what leaves memory goes there. A request that
//! would begin there waits until its state is in memory again.
//!
//! `tree` has the ways, `worth` says what goes first, `files` is the disk tier.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::ControlFlow;

use slab::Slab;

use crate::backend::Backend;
use crate::models::State;

use super::spill::Spill;

mod files;
mod tree;
mod worth;

use tree::Place;
use worth::Standing;

/// Part of the limit that ways without snapshots may take.
const WAYS: usize = 16;
/// Bytes that a node takes beside its ids.
const NODE: usize = 256;
/// Snapshots below a place that are tried for a cut back to it, and nodes that are looked at.
const CUTS: usize = 16;
const LOOKS: usize = 256;

/// Snapshots under a limit of memory.
pub(super) struct Store<B: Backend> {
    nodes: Slab<Node<B>>,
    roots: HashMap<u64, usize>,
    /// How many snapshots have a piece of memory, by its address, and its bytes.
    blocks: HashMap<usize, (usize, usize)>,
    /// Memory of all; what snapshots share is counted once.
    bytes: usize,
    /// The part of it that is nodes and their ids.
    ways: usize,
    limit: usize,
    /// Nodes with a snapshot.
    kept: BTreeSet<usize>,
    clock: u64,
    /// What the last snapshot that was given up was worth: newer ones begin there. The same of files.
    floors: [f64; 2],
    spill: Option<Spill<B>>,
    /// Nodes with a file.
    filed: BTreeSet<usize>,
    /// Nodes whose files are being read.
    reading: BTreeSet<usize>,
    /// States that were read.
    reads: u64,
    /// Writes that the system refused since the last one that succeeded.
    refusals: u32,
}

/// Where a state is kept.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tier {
    Memory,
    Disk,
}

struct Node<B: Backend> {
    parent: Option<usize>,
    scope: u64,
    /// Ids from the parent to here.
    ids: Box<[u32]>,
    /// How many ids lead here.
    depth: usize,
    /// By their first id.
    children: BTreeMap<u32, usize>,
    /// When a request went this way last.
    used: u64,
    snapshot: Option<Snapshot<B>>,
    filed: Option<Filed>,
    /// Requests that wait for its file.
    waiting: usize,
}

impl<B: Backend> Node<B> {
    /// Whether it is no more than a part of the way.
    fn is_bare(&self) -> bool {
        self.snapshot.is_none() && self.filed.is_none() && self.waiting == 0
    }

    fn standing(&self, tier: Tier) -> Option<Standing> {
        match tier {
            Tier::Memory => self.snapshot.as_ref().map(|it| it.standing),
            Tier::Disk => self.filed.as_ref().map(|it| it.standing),
        }
    }

    /// Whether what it has there can be cut back to the first `len` ids.
    fn can_cut(&self, tier: Tier, len: usize) -> bool {
        match tier {
            Tier::Memory => self.snapshot.as_ref().is_some_and(|it| it.state.can_cut(len)),
            Tier::Disk => self.filed.as_ref().is_some_and(|it| it.can_cut),
        }
    }
}

struct Snapshot<B: Backend> {
    state: State<B>,
    /// Logits of what comes next, where a prompt ended.
    logits: Option<Vec<f32>>,
    standing: Standing,
    /// Bytes of all its memory, also of what others share.
    bytes: usize,
    /// Whether it could not be written, so that it is not tried again while there is time, but when it leaves memory.
    is_unfit: bool,
}

/// A file of a state.
struct Filed {
    standing: Standing,
    /// The number of the write that makes it; 0 for one that is there.
    serial: u64,
    /// Bytes that are counted for it, without segments.
    bytes: u64,
    /// Whether the state is rows alone, and all of them are there.
    can_cut: bool,
}

impl<B: Backend> Snapshot<B> {
    /// Pieces of memory, with one that is surely its own.
    fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        let own = self.logits.iter().map(|it| (it.as_ptr().addr(), 4 * it.len()));
        self.state.blocks().chain(own).filter(|&(_, bytes)| bytes > 0)
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
        Self {
            nodes: Slab::new(),
            roots: HashMap::new(),
            blocks: HashMap::new(),
            bytes: 0,
            ways: 0,
            limit,
            kept: BTreeSet::new(),
            clock: 0,
            floors: [0.0; 2],
            spill: None,
            filed: BTreeSet::new(),
            reading: BTreeSet::new(),
            reads: 0,
            refusals: 0,
        }
    }

    /// The state of the longest prefix of `ids`; of all of it only `to_the_end`, with the logits of what comes next.
    pub(super) fn longest(
        &mut self,
        scope: Option<u64>,
        ids: &[u32],
        to_the_end: bool,
    ) -> Option<Known<B>> {
        let place = self.find(*self.roots.get(&scope?)?, ids);
        let best = self.held(&place, ids.len(), to_the_end);
        let seen = best.map_or(0, |at| self.nodes[at].depth);
        if seen < ids.len()
            && let Some((at, state)) = self.cut_back(&place, seen, ids.len() - 1)
        {
            self.refresh(at);
            let seen = state.position();
            return Some(Known { state, seen, logits: Vec::new(), is_snapshot: true });
        }
        let best = best?;
        self.refresh(best);
        let snapshot = self.nodes[best].snapshot.as_ref()?;
        let logits = snapshot.logits.clone().filter(|_| seen == ids.len()).unwrap_or_default();
        Some(Known { state: snapshot.state.clone(), seen, logits, is_snapshot: true })
    }

    /// Whether it keeps anything.
    pub(super) fn keeps(&self) -> bool {
        self.limit > 0
    }

    /// How many of `ids` the state in memory has seen that a request would begin with.
    pub(super) fn known(&self, scope: Option<u64>, ids: &[u32]) -> usize {
        let Some(&root) = scope.and_then(|scope| self.roots.get(&scope)) else { return 0 };
        self.known_at(&self.find(root, ids), ids.len())
    }

    /// The same where `len` ids lead to a place.
    fn known_at(&self, place: &Place, len: usize) -> usize {
        let held = self.held(place, len, true).map_or(0, |at| self.nodes[at].depth);
        let cut = self.cut_back(place, held, len.saturating_sub(1));
        cut.map_or(held, |(_, state)| state.position())
    }

    /// The last node on the way of `len` ids with a snapshot that serves as it is.
    fn held(&self, place: &Place, len: usize, to_the_end: bool) -> Option<usize> {
        let fits = |&at: &usize| {
            let node = &self.nodes[at];
            let goes_on = |it: &Snapshot<B>| node.depth < len || to_the_end && it.logits.is_some();
            node.snapshot.as_ref().is_some_and(goes_on)
        };
        self.way_up(place.node).find(fits)
    }

    /// Where a state is rows alone, one that went further than the way of some ids is cut back to it: a snapshot, and its
    /// state after more than `seen` of them, and at most `most`.
    fn cut_back(&self, place: &Place, seen: usize, most: usize) -> Option<(usize, State<B>)> {
        let mut tried = 0;
        self.beside(place, seen, most, |at, len| {
            let Some(Snapshot { state, .. }) = &self.nodes[at].snapshot else {
                return ControlFlow::Continue(());
            };
            if let Some(state) = state.cut(len) {
                return ControlFlow::Break(Some((at, state)));
            }
            tried += 1;
            if tried >= CUTS || !state.can_cut(state.position()) {
                return ControlFlow::Break(None);
            }
            ControlFlow::Continue(())
        })
    }

    /// What `serve` makes of a node below the way of some ids, and how many of them lead to it, the longest first: more
    /// than `seen`, and at most `most`.
    fn beside<T>(
        &self,
        place: &Place,
        seen: usize,
        most: usize,
        mut serve: impl FnMut(usize, usize) -> ControlFlow<Option<T>>,
    ) -> Option<T> {
        let mut looked = 0;
        let mut below = None;
        let places = place.towards.into_iter().chain(self.way_up(place.node));
        for (i, at) in places.enumerate() {
            let depth = if i == 0 { place.depth } else { self.nodes[at].depth };
            let len = depth.min(most);
            if len <= seen {
                return None;
            }
            // All below, but for what was searched already.
            let mut next = VecDeque::from([at]);
            while let Some(at) = next.pop_front() {
                looked += 1;
                if looked > LOOKS {
                    return None;
                }
                if let ControlFlow::Break(found) = serve(at, len) {
                    return found;
                }
                let children = self.nodes[at].children.values();
                next.extend(children.filter(|&&child| Some(child) != below));
            }
            below = Some(at);
        }
        None
    }

    /// Notes that a request goes the way of `ids`. Returns how many of them an earlier one had.
    pub(super) fn visit(&mut self, scope: Option<u64>, ids: &[u32]) -> usize {
        let Some(scope) = scope.filter(|_| self.limit > 0) else { return 0 };
        let known = self.roots.get(&scope).map_or(0, |&root| self.find(root, ids).depth);
        if NODE + 4 * ids.len() <= self.limit / WAYS {
            self.reach(scope, ids);
            self.fit();
        }
        known
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
        if !self.keeps() || ids.is_empty() {
            return;
        }
        let at = self.reach(scope, ids);
        if let Some(kept) = &self.nodes[at].snapshot {
            if kept.logits.is_some() || logits.is_none() {
                self.refresh(at);
                return;
            }
            self.give_up(at);
        }
        self.hold(at, state.clone(), logits.map(<[f32]>::to_vec));
        // Where it is cut back it serves as those before it do, but for their logits.
        for before in self.way_up(at).skip(1).collect::<Vec<_>>() {
            let node = &self.nodes[before];
            let has_logits = node.snapshot.as_ref().is_none_or(|it| it.logits.is_some());
            if !has_logits && state.can_cut(node.depth) {
                self.give_up(before);
                self.tidy(before);
            }
        }
        self.fit();
    }

    /// Puts a snapshot where there is none.
    fn hold(&mut self, at: usize, state: State<B>, logits: Option<Vec<f32>>) {
        let standing = Standing { floor: self.floors[Tier::Memory as usize], uses: 1 };
        // What is in a file was used as often as that.
        let standing = self.nodes[at]
            .filed
            .as_ref()
            .map_or(standing, |filed| Standing { uses: filed.standing.uses, ..standing });
        let mut snapshot = Snapshot { state, logits, standing, bytes: 0, is_unfit: false };
        snapshot.bytes = snapshot.blocks().map(|(_, bytes)| bytes).sum();
        for (address, bytes) in snapshot.blocks() {
            let (count, _) = self.blocks.entry(address).or_insert((0, bytes));
            *count += 1;
            if *count == 1 {
                self.bytes += bytes;
            }
        }
        self.nodes[at].snapshot = Some(snapshot);
        self.kept.insert(at);
    }

    pub(super) fn len(&self) -> usize {
        self.kept.len()
    }

    /// Memory of all, what they share counted once.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests;
