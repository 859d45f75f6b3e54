//! The prefix cache against lists of everything, and its files against a disk that refuses.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::files::REFUSALS;
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
    let (spared, bytes) = store.spared();
    assert!(spared.len() < 2);
    assert!(store.bytes() <= store.limit + bytes || kept == 0);
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
fn of_states_over_the_limit_the_last_one_stays_beside_those_under_it() {
    let model = model(true);
    let mut small = model.new_state().unwrap();
    small.set_position(3);
    let bytes = |state: &State<Cpu>| state.blocks().map(|(_, bytes)| bytes).sum::<usize>();
    let mut store = Store::<Cpu>::new(bytes(&small) - 1);
    let ways = |i: u32| [i, 1, 2];
    for i in 0..3 {
        store.keep(Some(0), &ways(i), &small, None);
        check(&store);
    }
    // All are over the limit: the last one is there, and serves.
    assert_eq!(store.len(), 1);
    let goes_on = [&ways(2)[..], &[7]].concat();
    assert_eq!(store.longest(Some(0), &goes_on, true).unwrap().seen, 3);
    assert!(store.longest(Some(0), &[1, 1, 2, 7], true).is_none());
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
    let fresh = |it: &&usize| store.nodes[**it].snapshot.as_ref().is_some_and(|it| !it.is_unfit);
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
