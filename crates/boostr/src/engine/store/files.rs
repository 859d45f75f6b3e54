//! The files of the tree: what leaves memory goes there, and comes back when a request would begin there.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use crate::backend::Backend;
use crate::engine::spill::{Broken, Done, Found, Spill, Unwritten};

use super::worth::{Standing, Worth};
use super::{Filed, Store, Tier};

/// Tokens that a state in a file must save, to be read.
const MIN_READ: usize = 32;
/// Writes that the system refuses one after another before it is not asked again until there was a request.
pub(super) const REFUSALS: u32 = 3;
/// How long the end may take to write what is in memory.
const END: Duration = Duration::from_secs(5);

impl<B: Backend> Store<B> {
    /// Lets states that leave memory go to files, and those that were found there be read.
    pub(in crate::engine) fn spill_to(&mut self, spill: Spill<B>, found: Vec<Found>) {
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
    pub(in crate::engine) fn files(&self) -> (usize, u64, u64) {
        (self.filed.len(), self.spill.as_ref().map_or(0, Spill::bytes), self.reads)
    }

    /// The ids that lead to a node.
    pub(super) fn ids_to(&self, at: usize) -> Vec<u32> {
        let mut parts: Vec<&[u32]> = self.way_up(at).map(|at| &*self.nodes[at].ids).collect();
        parts.reverse();
        parts.concat()
    }

    /// Gives the snapshot of a node a file too, unless it is worth less than all that is there. Where others are still to
    /// be written, it does not wait, or not beyond `patience`. `false` when it cannot have one.
    pub(super) fn file(&mut self, at: usize, patience: Option<Instant>) -> bool {
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
    pub(super) fn fit_files(&mut self) {
        while let Some(spill) = self.spill.as_mut().filter(|spill| spill.is_over_limit()) {
            if spill.drop_stranger() {
                continue;
            }
            let Some((at, worth)) = self.least(Tier::Disk, &[]) else { return };
            let floor = &mut self.floors[Tier::Disk as usize];
            *floor = floor.max(worth);
            self.drop_file(at);
            self.tidy(at);
        }
    }

    pub(super) fn drop_file(&mut self, at: usize) {
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
    pub(in crate::engine) fn fetch(
        &mut self,
        scope: Option<u64>,
        ids: &[u32],
        covered: usize,
    ) -> Option<usize> {
        self.spill.as_ref()?;
        let place = self.find(*self.roots.get(&scope?)?, ids);
        let most = ids.len().checked_sub(1)?;
        let seen = self.known_at(&place, ids.len()).max(covered) + MIN_READ - 1;
        let whole = |&at: &usize| {
            let node = &self.nodes[at];
            node.filed.is_some() && node.depth <= most
        };
        let whole = self.way_up(place.node).find(whole);
        let whole = whole.map(|at| (at, self.nodes[at].depth)).filter(|&(_, len)| len > seen);
        let longest = whole.map_or(seen, |(_, len)| len);
        let cut = self.beside(&place, longest, most, |at, _| {
            if self.nodes[at].can_cut(Tier::Disk, 0) {
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
    pub(in crate::engine) fn is_reading(&self, at: usize) -> bool {
        self.reading.contains(&at)
    }

    /// Whether a node has a snapshot.
    pub(in crate::engine) fn is_held(&self, at: usize) -> bool {
        self.nodes[at].snapshot.is_some()
    }

    /// Says that a request that waited for a node does so no more.
    pub(in crate::engine) fn release(&mut self, at: usize) {
        self.nodes[at].waiting -= 1;
        self.tidy(at);
        self.fit();
    }

    /// Takes what was read and written since. What was read stays in memory until its request begins.
    pub(in crate::engine) fn settle(&mut self) {
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
                            if self.nodes[at].snapshot.is_none() {
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
    pub(super) fn drop_segment(&mut self, key: u64) {
        let Some(spill) = &self.spill else { return };
        let needs = |at: &&usize| spill.needs(self.nodes[**at].scope, &self.ids_to(**at), key);
        for at in self.filed.iter().filter(needs).copied().collect::<Vec<_>>() {
            self.drop_file(at);
            self.tidy(at);
        }
    }

    pub(super) fn note_written(&mut self, serial: u64, at: usize, bytes: Result<u64, Unwritten>) {
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

    pub(super) fn set_unfit(&mut self, at: usize) {
        if let Some(snapshot) = &mut self.nodes[at].snapshot {
            snapshot.is_unfit = true;
        }
    }

    /// Writes the snapshot that is worth the most of those that have no file, that no other continues and that can be
    /// written; `false` when there is none, or the system refuses.
    pub(in crate::engine) fn file_one(&mut self) -> bool {
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
    pub(in crate::engine) fn end(&mut self) {
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
}
