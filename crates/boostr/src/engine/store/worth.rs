//! What states are worth, and which of them go first.

use std::collections::HashMap;

use crate::backend::Backend;

use super::{Store, Tier};

/// What a snapshot is worth that another continues on its only way: an earlier history is asked for again less often
/// than the latest.
const PASSED: f64 = 0.125;
/// Uses of a snapshot that count.
const MOST_USES: u32 = 16;

/// What counts for the worth of a state.
#[derive(Clone, Copy)]
pub(super) struct Standing {
    /// The floor when it was used last.
    pub(super) floor: f64,
    /// How often it was used, at most [`MOST_USES`], and once for being new.
    pub(super) uses: u32,
}

impl Standing {
    pub(super) fn refresh(&mut self, floor: f64) {
        (self.floor, self.uses) = (floor, MOST_USES.min(self.uses + 1));
    }
}

/// What a state is worth.
pub(super) struct Worth {
    pub(super) at: usize,
    pub(super) value: f64,
    /// When a request went there last.
    pub(super) used: u64,
    /// Whether another continues it on its only way.
    pub(super) is_passed: bool,
}

impl<B: Backend> Store<B> {
    /// Gives up what is worth the least, while all is over the limit. Of states that are over it alone, the one that was
    /// used last stays beside the others, so that a history of any length is kept.
    pub(super) fn fit(&mut self) {
        self.drop_ways();
        loop {
            let (spared, bytes) = self.spared();
            if self.bytes <= self.limit.saturating_add(bytes) {
                return;
            }
            let large = self.large().find(|at| !spared.contains(at)).map(|at| (at, 0.0));
            let Some((at, worth)) = large.or_else(|| self.least(Tier::Memory, &spared)) else {
                return;
            };
            let floor = &mut self.floors[Tier::Memory as usize];
            *floor = floor.max(worth);
            self.file(at, None);
            self.give_up(at);
            self.tidy(at);
            self.drop_ways();
        }
    }

    /// Snapshots that are over the limit alone.
    fn large(&self) -> impl Iterator<Item = usize> {
        let is_large = |at: &usize| {
            let snapshot = self.nodes[*at].snapshot.as_ref();
            snapshot.is_some_and(|it| it.bytes > self.limit)
        };
        self.kept.iter().copied().filter(is_large)
    }

    /// Those of them that stay, one or what is waited for, and their bytes.
    pub(super) fn spared(&self) -> (Vec<usize>, usize) {
        let last = self.large().max_by_key(|&at| self.nodes[at].used);
        let spared: Vec<usize> =
            self.large().filter(|&at| Some(at) == last || self.nodes[at].waiting > 0).collect();
        let bytes = |&at: &usize| self.nodes[at].snapshot.as_ref().map_or(0, |it| it.bytes);
        let bytes = spared.iter().map(bytes).sum();
        (spared, bytes)
    }

    /// The state that is worth the least there but for some, and its worth.
    pub(super) fn least(&self, tier: Tier, spared: &[usize]) -> Option<(usize, f64)> {
        let order = |a: &Worth, b: &Worth| a.value.total_cmp(&b.value).then(a.used.cmp(&b.used));
        let others = self.worths(tier).into_iter().filter(|it| !spared.contains(&it.at));
        let least = others.min_by(order);
        least.map(|it| (it.at, it.value))
    }

    /// What each state is worth there, but those that are waited for: the tokens that would be computed again without it,
    /// as often as it was used, above the floor at its last use (GreedyDual-Size with Frequency, Cherkasova 1998).
    pub(super) fn worths(&self, tier: Tier) -> Vec<Worth> {
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

    pub(super) fn refresh(&mut self, at: usize) {
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

    pub(super) fn give_up(&mut self, at: usize) {
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
}
