//! The radix tree of ids: ways, and the nodes at which they part or end.

use std::collections::BTreeMap;

use crate::backend::Backend;

use super::{NODE, Node, Store, Tier, WAYS};

/// How far some ids are in the tree.
pub(super) struct Place {
    /// The last node that they lead to.
    pub(super) node: usize,
    /// The child of it that they lead towards.
    pub(super) towards: Option<usize>,
    /// How many of them that is.
    pub(super) depth: usize,
}

impl<B: Backend> Store<B> {
    /// A node and those before it.
    pub(super) fn way_up(&self, node: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(node), |&at| self.nodes[at].parent)
    }

    /// Follows `ids` from `root`.
    pub(super) fn find(&self, root: usize, ids: &[u32]) -> Place {
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
    pub(super) fn reach(&mut self, scope: u64, ids: &[u32]) -> usize {
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

    pub(super) fn add(&mut self, parent: Option<usize>, scope: u64, ids: Box<[u32]>) -> usize {
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
    pub(super) fn split(&mut self, child: usize, depth: usize) -> usize {
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
    pub(super) fn drop_ways(&mut self) {
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
                match self.least(Tier::Disk, &[]) {
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
    pub(super) fn remove(&mut self, at: usize) {
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
    pub(super) fn tidy(&mut self, at: usize) {
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
