//! What no later token sees through its window is forgotten: memory is bounded, and nothing else changes.

use crate::bodies::{BODIES, Body, laid_out};
use crate::common::{Random, cpu};
use crate::tiny::{floats, message, tokens};
use boostr::Error;
use boostr::backend::Cpu;
use boostr::checkpoint::{ConfigFile, Dtype};
use boostr::models::{Config, Logits, Model, Run};
use boostr::ops::{Attention, KvCache, KvSizes, KvType, to_vec};

const SIZES: KvSizes =
    KvSizes { nheads: 2, d_key: 6, d_value: 4, kind: KvType::F32, latent: false };

/// q, k and v of one sequence of heads 4 and 2.
type Sequence = [Vec<f32>; 3];

fn sequence(seed: u64, len: usize) -> Sequence {
    let random = &mut Random(seed);
    [4 * 6, 2 * 6, 2 * 4].map(|width| floats(random, len * width))
}

/// The next `len` tokens.
fn attend(
    body: Body,
    [q, k, v]: &Sequence,
    len: usize,
    window: Option<usize>,
    cache: &mut KvCache<Cpu>,
) -> boostr::Result<Vec<f32>> {
    let first = cache.len();
    let rows = |x: &[f32], shape: [usize; 2]| {
        let width = shape[0] * shape[1];
        laid_out(0, &x[first * width..][..len * width], &[len, shape[0], shape[1]])
    };
    let (q, k, v) = (rows(q, [4, 6]), rows(k, [2, 6]), rows(v, [2, 4]));
    let input = Attention { q: &q, k: &k, v: &v, scale: 0.4, window, softcap: None };
    to_vec(&body.attention(&input, &[len], &mut [cache])?)
}

#[test]
fn forgetting_changes_no_bit_and_bounds_the_memory() {
    let x = sequence(91, 800);
    for (kind, window) in [
        (KvType::F32, 1),
        (KvType::F32, 2),
        (KvType::Q8_0, 63),
        (KvType::F32, 64),
        (KvType::F32, 65),
        (KvType::Bf16, 130),
        (KvType::F32, 10_000),
    ] {
        let sizes = KvSizes { kind, ..SIZES };
        let [mut kept, mut lean] = [(); 2].map(|()| Body::Kernels.new_cache(sizes).unwrap());
        let mut fork = None;
        let random = &mut Random(92);
        while kept.len() < 800 {
            let len = (1 + random.below(40)).min(800 - kept.len());
            let [full, out] = [&mut kept, &mut lean]
                .map(|cache| attend(Body::Kernels, &x, len, Some(window), cache).unwrap());
            assert_eq!(out, full, "{kind:?}, window {window}, at {}", kept.len());
            let seen = lean.first_seen(Some(window));
            lean.forget(seen);
            assert_eq!(lean.len(), kept.len());
            assert!(lean.first() <= seen && seen - lean.first() < 64);
            assert!(lean.size_in_bytes() <= sizes.bytes(cpu().level(), lean.len(), Some(window)));
            assert_eq!(kept.size_in_bytes(), sizes.bytes(cpu().level(), kept.len(), None));
            if fork.is_none() && lean.len() > 300 {
                fork = Some((lean.clone(), lean.keys().unwrap()));
            }
        }
        let first = lean.first();
        assert_eq!(lean.keys().unwrap(), kept.keys().unwrap()[first * 2 * 6..]);
        assert_eq!(lean.values().unwrap(), kept.values().unwrap()[first * 2 * 4..]);
        // What was forgotten since is still there in a fork, and it goes on as the others did.
        let (mut fork, keys) = fork.unwrap();
        assert_eq!(fork.keys().unwrap(), keys);
        let rest = 800 - fork.len();
        let out = attend(Body::Kernels, &x, rest, Some(window), &mut fork).unwrap();
        let mut whole = Body::Kernels.new_cache(sizes).unwrap();
        let want = attend(Body::Kernels, &x, 800, Some(window), &mut whole).unwrap();
        assert_eq!(out, want[(800 - rest) * 4 * 4..], "{kind:?}, window {window}");
    }
}

#[test]
fn a_cache_of_tensors_keeps_everything() {
    let x = sequence(93, 150);
    let mut cache = Body::Portable.new_cache(SIZES).unwrap();
    for _ in 0..3 {
        attend(Body::Portable, &x, 50, Some(20), &mut cache).unwrap();
        cache.forget(cache.first_seen(Some(20)));
    }
    assert_eq!((cache.first(), cache.len()), (0, 150));
    assert_eq!((cache.keys().unwrap(), cache.values().unwrap()), (x[1].clone(), x[2].clone()));
    assert_eq!(cache.size_in_bytes(), 150 * 4 * 2 * (6 + 4));
}

#[test]
fn a_cache_is_filled_once_with_rows_that_it_can_have() {
    for (sizes, body) in BODIES
        .into_iter()
        .flat_map(|body| [SIZES, KvSizes::latent(4, 2, KvType::F32)].map(|sizes| (sizes, body)))
    {
        let random = &mut Random(90);
        let keys = floats(random, 5 * sizes.nheads * sizes.d_key);
        // Values of a latent cache are channels of its keys.
        let own = if sizes.latent { 0 } else { 5 * sizes.nheads * sizes.d_value };
        let values = floats(random, own);
        let new = || body.new_cache(sizes).unwrap();
        let mut cache = new();
        cache.fill(&cpu(), 0, &keys, &values).unwrap();
        assert_eq!((cache.first(), cache.len(), &cache.keys().unwrap()), (0, 5, &keys));
        let want = if sizes.latent {
            keys.chunks(6).flat_map(|row| row[..4].to_vec()).collect()
        } else {
            values.clone()
        };
        assert_eq!(cache.values().unwrap(), want);
        let error = cache.fill(&cpu(), 0, &keys, &values).unwrap_err();
        assert!(message(&error).contains("expected no tokens, found 5"), "{error}");
        for (first, keys, values) in [
            (3, &keys[..], &values[..]),
            (0, &keys[1..], &values),
            (0, &keys[..0], &[1.0]),
            (0, &keys, &[1.0]),
        ] {
            let mut cache = new();
            let error = cache.fill(&cpu(), first, keys, values).unwrap_err();
            assert!(matches!(error, Error::Argument { .. }) && cache.is_empty(), "{error}");
        }
        let result = new().fill(&cpu(), 64, &keys, &values);
        assert_eq!(result.is_ok(), matches!(body, Body::Kernels));
    }
}

#[test]
fn a_token_that_sees_what_is_forgotten_is_refused() {
    let x = sequence(94, 300);
    let mut cache = Body::Kernels.new_cache(SIZES).unwrap();
    attend(Body::Kernels, &x, 200, Some(70), &mut cache).unwrap();
    cache.forget(cache.first_seen(Some(70)));
    let keys = cache.keys().unwrap();
    for window in [None, Some(74), Some(1000)] {
        let error = attend(Body::Kernels, &x, 10, window, &mut cache).unwrap_err();
        assert!(matches!(error, Error::Argument { name: "caches", .. }));
        assert!(message(&error).contains("positions before 128 are forgotten"), "{error}");
        assert_eq!((cache.len(), cache.keys().unwrap()), (200, keys.clone()));
    }
    // Position 200 sees 128 and on.
    attend(Body::Kernels, &x, 10, Some(73), &mut cache).unwrap();
    for body in BODIES {
        assert_eq!(body.new_cache(SIZES).unwrap().first_seen(None), 0);
    }
}

/// A small Mistral whose layers have a window or not, and the rest of its sizes always the same.
pub fn mistral(window: usize, kinds: &[&str]) -> Model<Cpu> {
    let text = format!(
        r#"{{"model_type": "mistral", "hidden_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 48, "num_hidden_layers": {},
            "vocab_size": 60, "sliding_window": {window}, "layer_types": {kinds:?}}}"#,
        kinds.len()
    );
    let config = Config::read(&ConfigFile::parse("config.json", &text).unwrap()).unwrap();
    Model::synthetic(config, Dtype::F32, cpu()).unwrap()
}

const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";

#[test]
fn the_state_of_layers_with_a_window_is_bounded_over_a_long_run() {
    let model = mistral(100, &[SLIDING, FULL, SLIDING]);
    let layers = model.family().layers();
    let mut state = model.new_state().unwrap();
    let ids = tokens(95, 3000, 60);
    // Prompts, one of them cut by the model itself, and single tokens.
    let pieces = [700, 1, 1, 62, 1, 900, 5].into_iter().chain([1; 330]).chain([1000]);
    let mut done = 0;
    for len in pieces {
        let mut run = [Run { tokens: &ids[done..done + len], state: &mut state }];
        model.forward(&mut run, Logits::None).unwrap();
        done += len;
        let size = |layer: usize| state.kv(layer).unwrap().size_in_bytes();
        let expected = |layer: usize| layers[layer].kv_bytes(cpu().level(), KvType::F32, done);
        assert!(size(0) <= expected(0) && size(2) <= expected(2), "at {done}");
        assert_eq!(size(1), expected(1), "at {done}");
        assert_eq!(state.size_in_bytes(), size(0) + size(1) + size(2));
        assert_eq!(state.kv(0).unwrap().len(), done);
    }
    assert_eq!(done, 3000);
    // A window of 100 lies in 3 pages of 64 at most.
    let page = 64 * 4 * 2 * (2 * 32);
    let expected = |layer: usize| layers[layer].kv_bytes(cpu().level(), KvType::F32, 3000);
    assert_eq!((expected(0), expected(1)), (3 * page, 47 * page));
}

#[test]
fn logits_are_those_of_a_run_that_forgets_nothing() {
    // A prompt of one piece forgets only after its last token.
    let model = mistral(70, &[SLIDING, SLIDING]).with_kv_type(KvType::F16);
    let ids = tokens(96, 512, 60);
    let mut whole = model.new_state().unwrap();
    let want = crate::tiny::run(&model, &ids, &[512], &mut whole);
    let random = &mut Random(97);
    let mut pieces = Vec::new();
    while pieces.iter().sum::<usize>() < 512 {
        let len = if random.below(2) == 0 { 1 } else { 1 + random.below(90) };
        pieces.push(len.min(512 - pieces.iter().sum::<usize>()));
    }
    for pieces in [vec![1; 512], pieces] {
        let mut state = model.new_state().unwrap();
        assert_eq!(crate::tiny::run(&model, &ids, &pieces, &mut state), want, "{pieces:?}");
        for layer in 0..2 {
            let [cache, other] = [&state, &whole].map(|state| state.kv(layer).unwrap());
            assert_eq!((cache.first(), cache.len()), (384, 512));
            assert_eq!(cache.keys().unwrap(), other.keys().unwrap());
            assert_eq!(cache.values().unwrap(), other.values().unwrap());
        }
    }
}

#[test]
fn a_fork_keeps_what_its_parent_forgets() {
    let model = mistral(70, &[SLIDING]);
    let ids = tokens(98, 400, 60);
    let mut parent = model.new_state().unwrap();
    crate::tiny::run(&model, &ids[..200], &[200], &mut parent);
    let mut fork = parent.clone();
    let keys = fork.kv(0).unwrap().keys().unwrap();
    let want = crate::tiny::run(&model, &ids[200..], &[200], &mut parent);
    assert_eq!((parent.kv(0).unwrap().first(), fork.kv(0).unwrap().first()), (320, 128));
    assert_eq!(fork.kv(0).unwrap().keys().unwrap(), keys);
    assert_eq!(crate::tiny::run(&model, &ids[200..], &[1; 200], &mut fork), want);
}

#[test]
fn a_model_that_sees_further_refuses_the_state() {
    let (near, far) = (mistral(70, &[FULL, SLIDING]), mistral(70, &[FULL, FULL]));
    let ids = tokens(99, 300, 60);
    let mut state = near.new_state().unwrap();
    let mut forward = |model: &Model<Cpu>, ids: &[u32]| {
        let result = model.forward(&mut [Run { tokens: ids, state: &mut state }], Logits::None);
        (result.map(drop), state.position())
    };
    assert_eq!(forward(&near, &ids[..200]).1, 200);
    let (error, position) = forward(&far, &ids[200..]);
    let error = message(&error.unwrap_err());
    assert!(error.contains("positions before 128 are forgotten, 0 is seen"), "{error}");
    assert_eq!(position, 200);
    let (result, position) = forward(&near, &ids[200..]);
    assert!(result.is_ok() && position == 300);
}
