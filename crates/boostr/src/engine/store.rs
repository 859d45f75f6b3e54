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

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use slab::Slab;

use crate::backend::Backend;
use crate::models::State;

use super::spill::{Broken, Done, Found, Spill, Unwritten};

/// Part of the limit that ways without snapshots may take.
const WAYS: usize = 16;
/// Bytes that a node takes beside its ids.
const NODE: usize = 256;
/// What a snapshot is worth that another continues on its only way: an earlier history is asked for again less often
/// than the latest.
const PASSED: f64 = 0.125;
/// Uses of a snapshot that count.
const MOST_USES: u32 = 16;
/// Snapshots below a place that are tried for a cut back to it, and nodes that are looked at.
const CUTS: usize = 16;
const LOOKS: usize = 256;
/// Tokens that a state in a file must save, to be read.
const MIN_READ: usize = 32;
/// Writes that the system refuses one after another before it is not asked again until there was a request.
const REFUSALS: u32 = 3;
/// How long the end may take to write what is in memory.
const END: Duration = Duration::from_secs(5);

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

/// What counts for the worth of a state.
#[derive(Clone, Copy)]
struct Standing {
    /// The floor when it was used last.
    floor: f64,
    /// How often it was used, at most [`MOST_USES`], and once for being new.
    uses: u32,
}

impl Standing {
    fn refresh(&mut self, floor: f64) {
        (self.floor, self.uses) = (floor, MOST_USES.min(self.uses + 1));
    }
}

/// What a state is worth.
struct Worth {
    at: usize,
    value: f64,
    /// When a request went there last.
    used: u64,
    /// Whether another continues it on its only way.
    is_passed: bool,
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

/// How far some ids are in the tree.
struct Place {
    /// The last node that they lead to.
    node: usize,
    /// The child of it that they lead towards.
    towards: Option<usize>,
    /// How many of them that is.
    depth: usize,
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
        if self.limit == 0 || ids.is_empty() {
            return;
        }
        let own: usize = state.blocks().map(|(_, bytes)| bytes).sum();
        if own + 4 * ids.len() > self.limit {
            return; // It would push out all others, and then itself.
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
        let snapshot = Snapshot { state, logits, standing, is_unfit: false };
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

    // Worth

    /// Gives up what is worth the least, while all is over the limit.
    fn fit(&mut self) {
        self.drop_ways();
        while self.bytes > self.limit
            && let Some((at, worth)) = self.least(Tier::Memory)
        {
            let floor = &mut self.floors[Tier::Memory as usize];
            *floor = floor.max(worth);
            self.file(at, None);
            self.give_up(at);
            self.tidy(at);
            self.drop_ways();
        }
    }

    /// The state that is worth the least there, and its worth.
    fn least(&self, tier: Tier) -> Option<(usize, f64)> {
        let order = |a: &Worth, b: &Worth| a.value.total_cmp(&b.value).then(a.used.cmp(&b.used));
        let least = self.worths(tier).into_iter().min_by(order);
        least.map(|it| (it.at, it.value))
    }

    /// What each state is worth there, but those that are waited for: the tokens that would be computed again without it,
    /// as often as it was used, above the floor at its last use (GreedyDual-Size with Frequency, Cherkasova 1998).
    fn worths(&self, tier: Tier) -> Vec<Worth> {
        let all = match tier {
            Tier::Memory => &self.kept,
            Tier::Disk => &self.filed,
        };
        // How many children of a node lead to states.
        let mut below = HashMap::new();
        for &at in all {
            for before in self.way_up(at).skip(1) {
                let count = below.entry(before).or_insert(0);
                *count += 1;
                if *count > 1 {
                    break;
                }
            }
        }
        let branches = |at: usize| below.get(&at).copied().unwrap_or(0);
        let worth = |&at: &usize| {
            let node = &self.nodes[at];
            let standing = node.standing(tier).filter(|_| node.waiting == 0)?;
            // What another could be cut back to is not lost.
            let others = |before: usize| {
                branches(before) > 1 && node.can_cut(tier, self.nodes[before].depth)
            };
            let serves = |&at: &usize| self.nodes[at].standing(tier).is_some() || others(at);
            let from = self.way_up(at).skip(1).find(serves).map_or(0, |at| self.nodes[at].depth);
            // Others left its way, at it or at the next node.
            let parts = |at: usize| self.nodes[at].children.len() > 1;
            let has_parted = parts(at) || node.children.values().any(|&child| parts(child));
            let is_passed = branches(at) == 1 && !has_parted;
            let weight = if is_passed { PASSED } else { 1.0 };
            let lost = f64::from(standing.uses) * weight * (node.depth - from) as f64;
            Some(Worth { at, value: standing.floor + lost, used: node.used, is_passed })
        };
        all.iter().filter_map(worth).collect()
    }

    fn refresh(&mut self, at: usize) {
        self.clock += 1;
        let [memory, disk] = self.floors;
        let node = &mut self.nodes[at];
        node.used = self.clock;
        if let Some(snapshot) = &mut node.snapshot {
            snapshot.standing.refresh(memory);
        }
        if let Some(filed) = &mut node.filed {
            filed.standing.refresh(disk);
        }
    }

    fn give_up(&mut self, at: usize) {
        let Some(snapshot) = self.nodes[at].snapshot.take() else { return };
        self.kept.remove(&at);
        for (address, _) in snapshot.blocks() {
            if let Some((count, bytes)) = self.blocks.get_mut(&address) {
                *count -= 1;
                if *count == 0 {
                    self.bytes -= *bytes;
                    self.blocks.remove(&address);
                }
            }
        }
    }

    // Files

    /// Lets states that leave memory go to files, and those that were found there be read.
    pub(super) fn spill_to(&mut self, spill: Spill<B>, found: Vec<Found>) {
        let can_cut = spill.is_rows_alone();
        self.spill = Some(spill);
        // One by one, so that no more ids are in memory than there is room for.
        for found in found {
            let looked = self.spill.as_mut().and_then(|spill| spill.look_into(&found));
            let Some((scope, ids)) = looked else { continue };
            let at = self.reach(scope, &ids);
            let (standing, bytes) = (Standing { floor: 0.0, uses: 1 }, found.bytes());
            self.nodes[at].filed = Some(Filed { standing, serial: 0, bytes, can_cut });
            self.filed.insert(at);
            self.drop_ways();
        }
        if let Some(spill) = &mut self.spill {
            spill.end_look();
        }
        self.fit_files();
        self.fit();
    }

    /// States in files, bytes of all files, and how often one was read.
    pub(super) fn files(&self) -> (usize, u64, u64) {
        (self.filed.len(), self.spill.as_ref().map_or(0, Spill::bytes), self.reads)
    }

    /// The ids that lead to a node.
    fn ids_to(&self, at: usize) -> Vec<u32> {
        let mut parts: Vec<&[u32]> = self.way_up(at).map(|at| &*self.nodes[at].ids).collect();
        parts.reverse();
        parts.concat()
    }

    /// Gives the snapshot of a node a file too, unless it is worth less than all that is there. Where others are still to
    /// be written, it does not wait, or not beyond `patience`. `false` when it cannot have one.
    fn file(&mut self, at: usize, patience: Option<Instant>) -> bool {
        let node = &self.nodes[at];
        let (Some(_), Some(snapshot), None) = (&self.spill, &node.snapshot, &node.filed) else {
            return false;
        };
        let (scope, standing) = (node.scope, snapshot.standing);
        let can_cut = snapshot.state.can_cut(0);
        let ids = self.ids_to(at);
        let Some(spill) = &mut self.spill else { return false };
        let Some(snapshot) = &self.nodes[at].snapshot else { return false };
        let Some(plan) = spill.plan(scope, &ids, &snapshot.state, patience) else { return false };
        let bytes = spill.reserve(&plan);
        let standing = Standing { floor: self.floors[Tier::Disk as usize], ..standing };
        self.nodes[at].filed = Some(Filed { standing, serial: u64::MAX, bytes, can_cut });
        self.filed.insert(at);
        self.fit_files();
        let (Some(filed), Some(spill)) = (&mut self.nodes[at].filed, &mut self.spill) else {
            return true;
        };
        filed.serial = spill.write(plan, at, scope, ids);
        if can_cut {
            // Cut back, it serves as those before it do.
            for before in self.way_up(at).skip(1).collect::<Vec<_>>() {
                if self.nodes[before].can_cut(Tier::Disk, 0) && self.nodes[before].waiting == 0 {
                    self.drop_file(before);
                    self.tidy(before);
                }
            }
        }
        true
    }

    /// Gives up files that are worth the least, while all are over the limit.
    fn fit_files(&mut self) {
        while let Some(spill) = self.spill.as_mut().filter(|spill| spill.is_over_limit()) {
            if spill.drop_stranger() {
                continue;
            }
            let Some((at, worth)) = self.least(Tier::Disk) else { return };
            let floor = &mut self.floors[Tier::Disk as usize];
            *floor = floor.max(worth);
            self.drop_file(at);
            self.tidy(at);
        }
    }

    fn drop_file(&mut self, at: usize) {
        let Some(filed) = self.nodes[at].filed.take() else { return };
        self.filed.remove(&at);
        let (scope, ids) = (self.nodes[at].scope, self.ids_to(at));
        let Some(spill) = &mut self.spill else { return };
        if filed.serial == u64::MAX {
            spill.forget(scope, &ids, filed.bytes);
        } else {
            spill.remove(scope, &ids, filed.bytes);
        }
    }

    /// Begins to read a file, if one has seen more of `ids` than the snapshots and `covered` of them. Returns its node,
    /// which stays until the request [has it no more](Self::release).
    pub(super) fn fetch(
        &mut self,
        scope: Option<u64>,
        ids: &[u32],
        covered: usize,
    ) -> Option<usize> {
        self.spill.as_ref()?;
        let place = self.find(*self.roots.get(&scope?)?, ids);
        let most = ids.len().checked_sub(1)?;
        let held = self.held(&place, ids.len(), true).map_or(0, |at| self.nodes[at].depth);
        let cut = self.cut_back(&place, held, most).map_or(0, |(_, state)| state.position());
        let seen = held.max(cut).max(covered) + MIN_READ - 1;
        // One that memory does not hold would push out all others, and then itself.
        let fits = |at: usize| {
            let (node, ids) = (&self.nodes[at], self.ids_to(at));
            let files = self.spill.as_ref().zip(node.filed.as_ref());
            let size = files.map(|(spill, filed)| spill.size(node.scope, &ids, filed.bytes));
            size.is_some_and(|size| size <= self.limit as u64)
        };
        let whole = |&at: &usize| {
            let node = &self.nodes[at];
            node.filed.is_some() && node.depth <= most && (node.snapshot.is_some() || fits(at))
        };
        let whole = self.way_up(place.node).find(whole);
        let whole = whole.map(|at| (at, self.nodes[at].depth)).filter(|&(_, len)| len > seen);
        let longest = whole.map_or(seen, |(_, len)| len);
        let cut = self.beside(&place, longest, most, |at, _| {
            let node = &self.nodes[at];
            if node.can_cut(Tier::Disk, 0) && (node.snapshot.is_some() || fits(at)) {
                return ControlFlow::Break(Some(at));
            }
            ControlFlow::Continue(())
        });
        let at = cut.or(whole.map(|(at, _)| at))?;
        self.nodes[at].waiting += 1;
        if self.nodes[at].snapshot.is_none() && self.reading.insert(at) {
            let (scope, ids) = (self.nodes[at].scope, self.ids_to(at));
            let bytes = self.nodes[at].filed.as_ref()?.bytes;
            self.spill.as_ref()?.read(at, scope, ids, bytes);
            // The reader has it too: it stays whoever is gone until then.
            self.nodes[at].waiting += 1;
        }
        Some(at)
    }

    /// Whether the file of a node is being read.
    pub(super) fn is_reading(&self, at: usize) -> bool {
        self.reading.contains(&at)
    }

    /// Whether a node has a snapshot.
    pub(super) fn is_held(&self, at: usize) -> bool {
        self.nodes[at].snapshot.is_some()
    }

    /// Says that a request that waited for a node does so no more.
    pub(super) fn release(&mut self, at: usize) {
        self.nodes[at].waiting -= 1;
        self.tidy(at);
        self.fit();
    }

    /// Takes what was read and written since. What was read stays in memory until its request begins.
    pub(super) fn settle(&mut self) {
        let Some(spill) = &self.spill else { return };
        let is_gone = spill.is_gone();
        for done in spill.done() {
            match done {
                Done::Written { serial, at, bytes } => self.note_written(serial, at, bytes),
                Done::Read { at, state } => {
                    self.reading.remove(&at);
                    match state {
                        Ok(state) => {
                            self.reads += 1;
                            let bytes: usize = state.blocks().map(|(_, bytes)| bytes).sum();
                            if bytes > self.limit {
                                self.drop_file(at);
                            } else if self.nodes[at].snapshot.is_none() {
                                self.hold(at, state, None);
                            }
                        }
                        Err(broken) => {
                            if let Broken::Segment(key) = broken {
                                self.drop_segment(key);
                            }
                            self.drop_file(at);
                        }
                    }
                    self.nodes[at].waiting -= 1;
                    self.tidy(at);
                }
            }
        }
        if is_gone {
            // Its thread is no more: who waits for it goes on without.
            self.spill = None;
            for at in std::mem::take(&mut self.reading) {
                self.nodes[at].waiting -= 1;
                self.tidy(at);
            }
            for at in std::mem::take(&mut self.filed) {
                self.nodes[at].filed = None;
                self.tidy(at);
            }
        }
        self.fit();
    }

    /// Gives up all files of states that need a segment which was no use, and it with them.
    fn drop_segment(&mut self, key: u64) {
        let Some(spill) = &self.spill else { return };
        let needs = |at: &&usize| spill.needs(self.nodes[**at].scope, &self.ids_to(**at), key);
        for at in self.filed.iter().filter(needs).copied().collect::<Vec<_>>() {
            self.drop_file(at);
            self.tidy(at);
        }
    }

    fn note_written(&mut self, serial: u64, at: usize, bytes: Result<u64, Unwritten>) {
        match bytes {
            Ok(_) => self.refusals = 0,
            Err(why) => self.refusals += u32::from(why == Unwritten::System),
        }
        let node = self.nodes.get_mut(at);
        let filed = node.and_then(|node| node.filed.as_mut());
        let (Some(filed), Some(spill)) = (filed.filter(|it| it.serial == serial), &mut self.spill)
        else {
            return;
        };
        if let Ok(bytes) = bytes {
            spill.recount(filed.bytes, bytes);
            filed.bytes = bytes;
        } else {
            self.drop_file(at);
            self.set_unfit(at);
            self.tidy(at);
        }
    }

    fn set_unfit(&mut self, at: usize) {
        if let Some(snapshot) = &mut self.nodes[at].snapshot {
            snapshot.is_unfit = true;
        }
    }

    /// Writes the snapshot that is worth the most of those that have no file, that no other continues and that can be
    /// written; `false` when there is none, or the system refuses.
    pub(super) fn file_one(&mut self) -> bool {
        self.settle();
        let Some(spill) = &self.spill else { return false };
        if !spill.is_free() {
            return true;
        }
        if self.refusals >= REFUSALS {
            // After the next request one more is tried.
            self.refusals = REFUSALS - 1;
            return false;
        }
        let fresh = |it: &Worth| {
            let node = &self.nodes[it.at];
            let can_be = node.snapshot.as_ref().is_some_and(|it| !it.is_unfit);
            !it.is_passed && node.filed.is_none() && can_be
        };
        let mut worths: Vec<_> = self.worths(Tier::Memory).into_iter().filter(fresh).collect();
        worths.sort_by(|a, b| b.value.total_cmp(&a.value));
        for Worth { at, .. } in worths {
            if self.file(at, None) {
                return self.nodes[at].filed.is_some();
            }
            self.set_unfit(at);
        }
        false
    }

    /// Writes what is in memory, that which is worth the most first, for a time.
    pub(super) fn end(&mut self) {
        if self.spill.is_none() {
            return;
        }
        let deadline = Instant::now() + END;
        self.settle();
        let mut worths = self.worths(Tier::Memory);
        worths.sort_by(|a, b| b.value.total_cmp(&a.value));
        for Worth { at, .. } in worths {
            if Instant::now() < deadline
                && self.nodes.get(at).is_some_and(|it| it.snapshot.is_some())
            {
                self.file(at, Some(deadline));
            }
        }
        if let Some(mut spill) = self.spill.take() {
            spill.close(deadline);
        }
    }

    // The tree

    /// A node and those before it.
    fn way_up(&self, node: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(node), |&at| self.nodes[at].parent)
    }

    /// Follows `ids` from `root`.
    fn find(&self, root: usize, ids: &[u32]) -> Place {
        let mut place = Place { node: root, towards: None, depth: 0 };
        while let Some(&first) = ids.get(place.depth)
            && let Some(&child) = self.nodes[place.node].children.get(&first)
        {
            let (edge, rest) = (&self.nodes[child].ids, &ids[place.depth..]);
            let alike = edge.iter().zip(rest).take_while(|(a, b)| a == b).count();
            place.depth += alike;
            if alike < edge.len() {
                place.towards = Some(child);
                break;
            }
            place.node = child;
        }
        place
    }

    /// The node that `ids` lead to, made if there is none.
    fn reach(&mut self, scope: u64, ids: &[u32]) -> usize {
        self.clock += 1;
        let root = match self.roots.get(&scope) {
            Some(&root) => root,
            None => {
                let root = self.add(None, scope, Box::default());
                self.roots.insert(scope, root);
                root
            }
        };
        let place = self.find(root, ids);
        let mut at = place.node;
        if let Some(child) = place.towards {
            at = self.split(child, place.depth);
        }
        if place.depth < ids.len() {
            at = self.add(Some(at), scope, ids[place.depth..].into());
        }
        self.nodes[at].used = self.clock;
        at
    }

    fn add(&mut self, parent: Option<usize>, scope: u64, ids: Box<[u32]>) -> usize {
        let depth = parent.map_or(0, |at| self.nodes[at].depth) + ids.len();
        let (first, size) = (ids.first().copied(), NODE + 4 * ids.len());
        let (children, used) = (BTreeMap::new(), self.clock);
        let (snapshot, filed, waiting) = (None, None, 0);
        let node = Node { parent, scope, ids, depth, children, used, snapshot, filed, waiting };
        let at = self.nodes.insert(node);
        if let (Some(parent), Some(first)) = (parent, first) {
            self.nodes[parent].children.insert(first, at);
        }
        self.ways += size;
        self.bytes += size;
        at
    }

    /// Puts a node on the way to `child`, where `depth` ids lead.
    fn split(&mut self, child: usize, depth: usize) -> usize {
        let node = &mut self.nodes[child];
        let (parent, scope, used) = (node.parent, node.scope, node.used);
        // Each part in memory of its own: neither keeps what was one.
        let (head, rest) = node.ids.split_at(depth + node.ids.len() - node.depth);
        let (ids, first) = (head.into(), rest[0]);
        node.ids = rest.into();
        let middle = self.add(parent, scope, ids);
        let moved = 4 * self.nodes[middle].ids.len();
        self.ways -= moved;
        self.bytes -= moved;
        self.nodes[middle].used = used;
        self.nodes[middle].children.insert(first, child);
        self.nodes[child].parent = Some(middle);
        middle
    }

    /// Gives up the ways that were gone the longest ago and have no snapshot, if they take more than their part; some
    /// more than that, so that it is done seldom.
    fn drop_ways(&mut self) {
        let part = self.limit / WAYS;
        if self.ways <= part {
            return;
        }
        loop {
            let is_end = |node: &Node<B>| node.is_bare() && node.children.is_empty();
            let ends = self.nodes.iter().filter(|(_, node)| is_end(node));
            let mut ends: Vec<_> = ends.map(|(at, node)| (node.used, at)).collect();
            ends.sort_unstable();
            let count = ends.len();
            for (_, at) in ends {
                if self.ways <= part - part / 8 {
                    return;
                }
                self.remove(at);
            }
            if count == 0 {
                // Ids that lead to files take memory as well.
                match self.least(Tier::Disk) {
                    Some((at, _)) if self.ways > 2 * part => {
                        self.drop_file(at);
                        self.tidy(at);
                    }
                    _ => return,
                }
            }
        }
    }

    /// Removes an end of the tree, and what then is no use.
    fn remove(&mut self, at: usize) {
        let node = self.nodes.remove(at);
        let size = NODE + 4 * node.ids.len();
        self.ways -= size;
        self.bytes -= size;
        match (node.parent, node.ids.first()) {
            (Some(parent), Some(first)) => {
                self.nodes[parent].children.remove(first);
                self.tidy(parent);
            }
            _ => {
                self.roots.remove(&node.scope);
            }
        }
    }

    /// Joins a node with its only child where it says nothing, and removes a root that leads nowhere.
    fn tidy(&mut self, at: usize) {
        let node = &self.nodes[at];
        if !node.is_bare() || node.children.len() > 1 {
            return;
        }
        let only = node.children.values().next().copied();
        match (node.parent, only) {
            (None, None) => self.remove(at),
            (Some(parent), Some(child)) => {
                let node = self.nodes.remove(at);
                self.nodes[parent].children.insert(node.ids[0], child);
                let child = &mut self.nodes[child];
                child.ids = [&*node.ids, &*child.ids].concat().into();
                child.parent = Some(parent);
                self.ways -= NODE;
                self.bytes -= NODE;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::sync::Arc;

    use super::*;
    use crate::backend::{self, Cpu};
    use crate::checkpoint::{ConfigFile, Dtype};
    use crate::engine::spill::SpillFolder;
    use crate::models::{Config, Model};

    /// A model of one layer: recurrent, or with keys and values alone.
    fn model(is_recurrent: bool) -> Model<Cpu> {
        let json = if is_recurrent {
            r#"{"model_type": "mamba2", "hidden_size": 8, "num_heads": 2, "head_dim": 8,
                "state_size": 4, "n_groups": 1, "num_hidden_layers": 1, "vocab_size": 32}"#
        } else {
            r#"{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "head_dim": 4,
                "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 32}"#
        };
        let config = Config::read(&ConfigFile::parse("config.json", json).unwrap()).unwrap();
        Model::synthetic(config, Dtype::F32, backend::cpu()).unwrap()
    }

    /// A generator of numbers below `n`.
    struct Random(u64);

    impl Random {
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (self.0 >> 33) as usize % n
        }

        /// Ids of few values, so that many lists begin alike.
        fn ids(&mut self) -> Vec<u32> {
            (0..=self.below(9)).map(|_| self.below(3) as u32).collect()
        }
    }

    /// All that the tree promises of itself.
    fn check(store: &Store<Cpu>) {
        let (mut ways, mut kept, mut blocks) = (0, 0, HashMap::new());
        for (at, node) in &store.nodes {
            ways += NODE + 4 * node.ids.len();
            let before = node.parent.map_or(0, |parent| {
                assert_eq!(store.nodes[parent].children[&node.ids[0]], at);
                assert_eq!(store.nodes[parent].scope, node.scope);
                store.nodes[parent].depth
            });
            assert_eq!(node.depth, before + node.ids.len());
            assert_eq!(node.parent.is_none(), store.roots.get(&node.scope) == Some(&at));
            for (first, &child) in &node.children {
                assert_eq!(store.nodes[child].ids[0], *first);
                assert_eq!(store.nodes[child].parent, Some(at));
            }
            if let Some(snapshot) = &node.snapshot {
                assert_eq!(snapshot.state.position(), node.depth);
                assert!(store.kept.contains(&at));
                kept += 1;
                for (address, bytes) in snapshot.blocks() {
                    blocks.insert(address, bytes);
                }
            }
        }
        assert_eq!((store.ways, store.len()), (ways, kept));
        assert_eq!(store.bytes(), ways + blocks.values().sum::<usize>());
        assert!(store.bytes() <= store.limit || kept == 0);
    }

    fn alike(a: &[u32], b: &[u32]) -> usize {
        a.iter().zip(b).take_while(|(a, b)| a == b).count()
    }

    #[test]
    fn finds_what_a_list_of_everything_finds() {
        let model = model(true);
        let mut random = Random(5);
        for limit in [usize::MAX / 2, 40_000] {
            let mut store = Store::<Cpu>::new(limit);
            let mut seen: Vec<(u64, Vec<u32>)> = Vec::new();
            let mut kept: Vec<(u64, Vec<u32>)> = Vec::new();
            for _ in 0..600 {
                let (scope, ids) = (random.below(2) as u64, random.ids());
                let longest = |all: &[(u64, Vec<u32>)]| {
                    let own = all.iter().filter(|(its, _)| *its == scope);
                    own.map(|(_, its)| its.clone()).collect::<Vec<_>>()
                };
                let known = store.visit(Some(scope), &ids);
                let want = longest(&seen).iter().map(|it| alike(it, &ids)).max().unwrap_or(0);
                if limit > 40_000 {
                    assert_eq!(known, want);
                }
                assert!(known <= want);
                let found = store.longest(Some(scope), &ids, true).map_or(0, |it| it.seen);
                let is_prefix = |it: &Vec<u32>| ids.starts_with(it) && it.len() < ids.len();
                let want = longest(&kept).iter().filter(|it| is_prefix(it)).map(Vec::len).max();
                if limit > 40_000 {
                    assert_eq!(found, want.unwrap_or(0));
                }
                assert!(found <= want.unwrap_or(0));
                seen.push((scope, ids.clone()));
                if random.below(2) == 0 {
                    let ids = ids[..=random.below(ids.len())].to_vec();
                    let mut state = model.new_state().unwrap();
                    state.set_position(ids.len());
                    store.keep(Some(scope), &ids, &state, None);
                    kept.push((scope, ids));
                }
                check(&store);
            }
            assert_eq!(limit == 40_000, store.len() < 100, "{}", store.len());
        }
    }

    #[test]
    fn ways_without_snapshots_stay_under_their_part_of_the_limit() {
        let mut store = Store::<Cpu>::new(1 << 16);
        for i in 0..1000 {
            let ids: Vec<u32> = (0..50).map(|k| i * (k % 7) + k).collect();
            store.visit(Some(u64::from(i % 5)), &ids);
            check(&store);
            assert!(store.ways <= (1 << 16) / WAYS);
        }
        assert!(store.nodes.len() > 5);
        let mut none = Store::<Cpu>::new(0);
        assert_eq!(none.visit(Some(0), &[1, 2]) + none.visit(Some(0), &[1, 2]), 0);
        assert_eq!((none.bytes(), none.nodes.len()), (0, 0));
    }

    #[test]
    fn the_place_where_many_left_is_kept_before_what_each_did_alone() {
        let model = model(true);
        let one = model.new_state().unwrap().size_in_bytes();
        let mut store = Store::<Cpu>::new(4 * one + (4 << 10));
        let keep = |store: &mut Store<Cpu>, ids: &[u32]| {
            let mut state = model.new_state().unwrap();
            state.set_position(ids.len());
            store.keep(Some(0), ids, &state, None);
        };
        let text: Vec<u32> = (0..200).map(|i| i % 31).collect();
        for i in 0..20 {
            let ids = [&text[..], &[i % 32, (i * 7) % 32, 3]].concat();
            store.visit(Some(0), &ids);
            let seen = store.longest(Some(0), &ids, false).map_or(0, |it| it.seen);
            assert_eq!(seen, if i == 0 { 0 } else { 200 });
            if i == 0 {
                keep(&mut store, &text);
            }
            keep(&mut store, &ids);
            check(&store);
        }
    }

    /// A folder of this test's own, and a store that spills there.
    fn spilling(name: &str, model: &Arc<Model<Cpu>>, limits: [usize; 2]) -> (Store<Cpu>, PathBuf) {
        let name = format!("boostr-store-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let folder = SpillFolder::open(&path, limits[1] as u64).unwrap().unwrap();
        let (spill, found) = Spill::start(folder, model.clone()).unwrap();
        let mut store = Store::new(limits[0]);
        store.spill_to(spill, found);
        (store, path)
    }

    /// Keeps a state of some ids.
    fn keep(store: &mut Store<Cpu>, model: &Model<Cpu>, ids: &[u32]) {
        let mut state = model.new_state().unwrap();
        let run = crate::models::Run { tokens: ids, state: &mut state };
        model.forward(&mut [run], crate::models::Logits::None).unwrap();
        store.keep(Some(0), ids, &state, None);
    }

    /// What an idle server does; the number of times.
    fn idle(store: &mut Store<Cpu>) -> usize {
        let mut turns = 0;
        while store.file_one() {
            turns += 1;
            assert!(turns < 10_000, "it has no end");
            std::thread::sleep(Duration::from_millis(1));
        }
        turns
    }

    #[test]
    fn an_idle_writer_ends_where_the_system_refuses_and_tries_what_comes_later() {
        let model = Arc::new(model(true));
        let (mut store, path) = spilling("refused", &model, [1 << 24, 1 << 24]);
        for i in 0..10 {
            keep(&mut store, &model, &[i, 1, 2]);
        }
        fs::remove_dir_all(&path).unwrap();
        idle(&mut store);
        assert_eq!((store.files().0, store.files().1), (0, 0));
        let fresh =
            |it: &&usize| store.nodes[**it].snapshot.as_ref().is_some_and(|it| !it.is_unfit);
        assert_eq!(store.kept.iter().filter(fresh).count(), 10 - REFUSALS as usize);
        // One more with each time that it is idle, as long as it is refused.
        idle(&mut store);
        fs::create_dir(&path).unwrap();
        idle(&mut store);
        idle(&mut store);
        assert_eq!(store.files().0, 10 - REFUSALS as usize - 1);
        keep(&mut store, &model, &[11, 1, 2]);
        idle(&mut store);
        assert_eq!(store.files().0, 10 - REFUSALS as usize);
        fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn a_state_that_is_too_large_for_the_disk_holds_up_no_other() {
        let model = Arc::new(model(false));
        let ids: Vec<u32> = (0..600).map(|i| i % 31).collect();
        let (mut store, path) = spilling("large", &model, [1 << 24, 12 << 10]);
        keep(&mut store, &model, &ids);
        keep(&mut store, &model, &[3, 1, 2]);
        idle(&mut store);
        let filed: Vec<_> = store.filed.iter().map(|&at| store.nodes[at].depth).collect();
        assert_eq!(filed, [3]);
        fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn nobody_waits_for_a_reader_that_is_gone() {
        let model = Arc::new(model(true));
        let ids: Vec<u32> = (0..100).map(|i| i % 31).collect();
        let (mut store, path) = spilling("gone", &model, [1 << 24, 1 << 24]);
        keep(&mut store, &model, &ids);
        store.end();
        let (mut store, _) = spilling("gone", &model, [1 << 24, 1 << 24]);
        // It ends before it can read.
        let shared = store.spill.as_mut().unwrap();
        shared.close(Instant::now());
        let longer = [&ids[..], &[1, 2]].concat();
        let at = store.fetch(Some(0), &longer, 0).unwrap();
        assert!(store.is_reading(at));
        store.settle();
        assert!(!store.is_reading(at) && !store.is_held(at));
        store.release(at);
        assert_eq!(store.fetch(Some(0), &longer, 0), None);
        assert_eq!((store.files().0, idle(&mut store)), (0, 0));
        check(&store);
        fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn of_states_that_can_be_cut_back_the_longest_serves_all() {
        let model = model(false);
        let mut store = Store::<Cpu>::new(1 << 20);
        let mut state = model.new_state().unwrap();
        let ids: Vec<u32> = (0..90).map(|i| i % 30).collect();
        for len in 1..=90 {
            let run = crate::models::Run { tokens: &ids[len - 1..len], state: &mut state };
            model.forward(&mut [run], crate::models::Logits::None).unwrap();
            store.keep(Some(0), &ids[..len], &state, None);
            assert_eq!(store.len(), 1);
            check(&store);
        }
        for len in 1..90 {
            let other = [&ids[..len], &[31, 31]].concat();
            let known = store.longest(Some(0), &other, true).unwrap();
            assert_eq!((known.seen, known.state.position()), (len, len));
            assert_eq!(known.state.kv(0).unwrap().len(), len);
        }
        assert_eq!(store.longest(Some(0), &ids[..1], true).map_or(0, |it| it.seen), 0);
    }
}
