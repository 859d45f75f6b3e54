//! Attention against its definition in f64, over random shapes, and to the bit against itself.

use proptest::prelude::*;

use super::*;
use crate::linear::Weights;
use crate::simd::Level;
use crate::testing::{Rng, close};

/// f32 against f64: rounding of scores, of up to about ten in magnitude, in the exponential.
const TOLERANCE: f64 = 1e-5;

/// Sequences that take turns: every call has a run of each, some of them empty.
#[derive(Debug, Clone)]
struct Problem {
    calls: Vec<Vec<usize>>,
    nheads_kv: usize,
    heads_per_group: usize,
    d_k: usize,
    d_v: usize,
    window: Option<usize>,
    softcap: Option<f32>,
    kind: KvType,
    seed: u64,
}

impl Problem {
    fn kernel(&self, level: Level) -> Attention {
        Attention {
            level,
            nheads: self.nheads_kv * self.heads_per_group,
            scale: 3.0 / (self.d_k as f32).sqrt(),
            window: self.window,
            softcap: self.softcap,
        }
    }

    fn cache(&self, level: Level) -> KvCache {
        KvCache::new(level, self.nheads_kv, self.d_k, self.d_v, self.kind)
    }

    /// Widths of q, k, v and of outputs.
    fn widths(&self) -> [usize; 4] {
        let nheads = self.nheads_kv * self.heads_per_group;
        [nheads * self.d_k, self.nheads_kv * self.d_k, self.nheads_kv * self.d_v, nheads * self.d_v]
    }

    /// q, k and v of a sequence of `len` tokens.
    fn sequence(&self, which: usize, len: usize) -> [Vec<f32>; 3] {
        let mut rng = Rng::new(self.seed.wrapping_add(which as u64));
        let [q, k, v, _] = self.widths();
        [rng.floats(len * q), rng.floats(len * k), rng.floats(len * v)]
    }
}

/// Runs the calls; returns the outputs of each sequence, and its cache.
fn run(problem: &Problem, level: Level, calls: &[Vec<usize>]) -> Vec<(Vec<f32>, KvCache)> {
    let count = calls.first().map_or(0, Vec::len);
    let [q_width, k_width, v_width, out_width] = problem.widths();
    let mut done = vec![0; count];
    let mut results: Vec<(Vec<f32>, KvCache)> =
        (0..count).map(|_| (Vec::new(), problem.cache(level))).collect();
    let totals: Vec<usize> = (0..count).map(|s| calls.iter().map(|runs| runs[s]).sum()).collect();
    let data: Vec<[Vec<f32>; 3]> =
        totals.iter().enumerate().map(|(s, &len)| problem.sequence(s, len)).collect();
    for runs in calls {
        let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
        for (s, &len) in runs.iter().enumerate() {
            q.extend_from_slice(&data[s][0][done[s] * q_width..][..len * q_width]);
            k.extend_from_slice(&data[s][1][done[s] * k_width..][..len * k_width]);
            v.extend_from_slice(&data[s][2][done[s] * v_width..][..len * v_width]);
            done[s] += len;
        }
        let tokens: usize = runs.iter().sum();
        let mut out = vec![f32::NAN; tokens * out_width];
        let mut caches: Vec<&mut KvCache> = results.iter_mut().map(|(_, cache)| cache).collect();
        let (q, k, v) =
            (Rows::dense(&q, q_width), Rows::dense(&k, k_width), Rows::dense(&v, v_width));
        attention(&problem.kernel(level), q, k, v, runs, &mut caches, &mut out);
        let mut rest = &out[..];
        for (s, &len) in runs.iter().enumerate() {
            let (mine, others) = rest.split_at(len * out_width);
            results[s].0.extend_from_slice(mine);
            rest = others;
        }
    }
    results
}

#[track_caller]
fn check(problem: &Problem) {
    let [q_width, k_width, v_width, _] = problem.widths();
    for &level in Level::present() {
        for (s, (out, cache)) in run(problem, level, &problem.calls).into_iter().enumerate() {
            let len = cache.len();
            let [q, ..] = problem.sequence(s, len);
            // The keys and values as they are stored: what storing loses has tests of its own.
            let (keys, values) = (cache.keys(), cache.values());
            let want = attention_reference(
                &problem.kernel(level),
                problem.nheads_kv,
                Rows::dense(&q, q_width),
                Rows::dense(&keys, k_width),
                Rows::dense(&values, v_width),
            );
            close(&out, &want, TOLERANCE);
        }
    }
}

fn problems() -> impl Strategy<Value = Problem> {
    let len = || prop_oneof![3 => 0usize..3, 2 => 5usize..20, 2 => 60usize..70, 1 => 120usize..140];
    let calls = (1usize..4).prop_flat_map(move |sequences| {
        prop::collection::vec(prop::collection::vec(len(), sequences), 1..4)
    });
    let window = prop_oneof![2 => Just(None), 1 => (1usize..100).prop_map(Some)];
    let softcap = prop_oneof![3 => Just(None), 1 => Just(Some(2.0f32))];
    let sizes = (1usize..4, 1usize..9, 1usize..40, 1usize..70);
    (calls, sizes, window, softcap, 0usize..4, any::<u64>()).prop_map(
        |(calls, (nheads_kv, heads_per_group, d_k, d_v), window, softcap, kind, seed)| Problem {
            calls,
            nheads_kv,
            heads_per_group,
            d_k,
            d_v,
            window,
            softcap,
            kind: KvType::ALL[kind],
            seed,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn equals_the_definition_for_any_runs_heads_widths_windows_and_types(problem in problems()) {
        check(&problem);
    }
}

/// One sequence of small heads.
fn small(kind: KvType) -> Problem {
    Problem {
        calls: vec![],
        nheads_kv: 2,
        heads_per_group: 3,
        d_k: 10,
        d_v: 18,
        window: None,
        softcap: None,
        kind,
        seed: 7,
    }
}

#[test]
fn long_contexts_equal_the_definition_across_segments() {
    for (calls, window) in [
        (vec![vec![2 * SEGMENT + 70], vec![1]], None),
        (vec![vec![SEGMENT - 1], vec![1], vec![1], vec![50]], None),
        (vec![vec![SEGMENT + 500], vec![1], vec![7]], Some(1000)),
        (vec![vec![2 * SEGMENT]], Some(5)),
    ] {
        let problem =
            Problem { calls, window, nheads_kv: 1, heads_per_group: 2, ..small(KvType::F32) };
        check(&problem);
    }
}

#[test]
fn models_sizes_equal_the_definition() {
    for (nheads_kv, heads_per_group, d_k, d_v) in
        [(3, 3, 64, 64), (1, 8, 128, 128), (2, 2, 80, 80), (2, 1, 192, 128), (1, 5, 256, 256)]
    {
        for kind in KvType::ALL {
            let calls = vec![vec![70], vec![1], vec![2]];
            check(&Problem { calls, nheads_kv, heads_per_group, d_k, d_v, ..small(kind) });
        }
    }
}

#[test]
fn pieces_of_a_sequence_give_the_bits_of_the_whole() {
    for kind in KvType::ALL {
        for (window, softcap) in [(None, None), (Some(37), Some(3.0))] {
            let problem = Problem { window, softcap, ..small(kind) };
            for &level in Level::present() {
                let len = 150;
                let outputs = |calls: &[Vec<usize>]| run(&problem, level, calls).remove(0).0;
                let whole = outputs(&[vec![len]]);
                assert_eq!(outputs(&vec![vec![1]; len]), whole, "{kind:?}: one by one");
                for cut in [1, 5, 6, 47, 63, 64, 65, 100, 149] {
                    let pieces = outputs(&[vec![cut], vec![0], vec![len - cut]]);
                    assert_eq!(pieces, whole, "{kind:?}: cut at {cut}");
                }
            }
        }
    }
}

#[test]
fn tokens_far_into_a_context_give_the_bits_of_a_prompt() {
    for (kind, window) in [(KvType::F32, None), (KvType::Q8_0, None), (KvType::F16, Some(1030))] {
        let problem = Problem { window, ..small(kind) };
        let level = Level::detect();
        let len = 2 * SEGMENT + 3;
        let whole = run(&problem, level, &[vec![len]]).remove(0).0;
        let calls = [vec![SEGMENT - 1], vec![1], vec![1], vec![1], vec![SEGMENT], vec![1]];
        assert_eq!(run(&problem, level, &calls).remove(0).0, whole, "{kind:?}");
    }
}

#[test]
fn a_sequence_has_the_same_bits_in_any_company() {
    for kind in KvType::ALL {
        let problem = small(kind);
        for &level in Level::present() {
            let calls = [vec![70, 1, 0, 30], vec![1, 1, 5, 0], vec![13, 64, 1, 100]];
            let together = run(&problem, level, &calls);
            for (s, (out, cache)) in together.iter().enumerate() {
                let [q, k, v] = problem.sequence(s, cache.len());
                let mut alone = problem.cache(level);
                let [q_width, k_width, v_width, out_width] = problem.widths();
                let mut want = vec![0.0; cache.len() * out_width];
                attention(
                    &problem.kernel(level),
                    Rows::dense(&q, q_width),
                    Rows::dense(&k, k_width),
                    Rows::dense(&v, v_width),
                    &[cache.len()],
                    &mut [&mut alone],
                    &mut want,
                );
                assert_eq!(*out, want, "{kind:?}: sequence {s}");
            }
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let problem = small(KvType::F16);
    // Few queries far into a context are computed by segments in parallel, a prompt is not.
    let calls = [vec![2 * SEGMENT + 100, 3], vec![1, 0], vec![2, 1]];
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let results = run(&problem, Level::detect(), &calls);
            results.into_iter().map(|(out, cache)| (out, cache.keys())).collect::<Vec<_>>()
        })
    };
    let one = with(1);
    for threads in [2, 3, 7] {
        assert!(with(threads) == one, "{threads} threads");
    }
}

#[test]
fn types_store_keys_and_values_within_their_bounds() {
    let mut rng = Rng::new(60);
    let (heads, d_k, d_v, len) = (2, 40, 70, 67);
    // A block of 32 channels has a largest value anywhere between 1e-4 and 1e4.
    let mut values = |width: usize| -> Vec<f32> {
        let rows: Vec<f32> = (0..len * heads)
            .flat_map(|_| {
                let size = 10f32.powf(4.0 * rng.float());
                rng.floats(width).into_iter().map(move |x| x * size).collect::<Vec<_>>()
            })
            .collect();
        rows
    };
    let (k, v) = (values(d_k), values(d_v));
    for &level in Level::present() {
        for kind in KvType::ALL {
            let mut cache = KvCache::new(level, heads, d_k, d_v, kind);
            cache.append(Rows::dense(&k, heads * d_k), Rows::dense(&v, heads * d_v));
            for (got, want, d) in [(cache.keys(), &k, d_k), (cache.values(), &v, d_v)] {
                for (got, want) in got.chunks(d).zip(want.chunks(d)) {
                    for (got, want) in got.chunks(32).zip(want.chunks(32)) {
                        let largest = want.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                        for (got, want) in got.iter().zip(want) {
                            let bound = match kind {
                                KvType::F32 => 0.0,
                                KvType::F16 => (want.abs() / 2048.0).max(3e-8),
                                KvType::Bf16 => want.abs() / 256.0,
                                // Half a scale, which is rounded to 11 bits.
                                KvType::Q8_0 => (largest / 253.8).max(4e-6),
                            };
                            assert!((got - want).abs() <= bound, "{kind:?}: {want} became {got}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn what_was_stored_is_stored_again_to_the_bit() {
    let mut rng = Rng::new(61);
    let (k, v) = (rng.floats(70 * 40), rng.floats(70 * 33));
    for kind in KvType::ALL {
        let mut cache = KvCache::new(Level::detect(), 1, 40, 33, kind);
        cache.append(Rows::dense(&k, 40), Rows::dense(&v, 33));
        let (keys, values) = (cache.keys(), cache.values());
        let mut again = KvCache::new(Level::detect(), 1, 40, 33, kind);
        again.append(Rows::dense(&keys, 40), Rows::dense(&values, 33));
        assert_eq!((again.keys(), again.values()), (keys, values), "{kind:?}");
    }
}

#[test]
fn what_a_query_must_not_see_does_not_reach_it() {
    for bad in [f32::NAN, f32::INFINITY, f32::MAX] {
        for kind in [KvType::F32, KvType::Bf16] {
            let problem = Problem { window: Some(20), ..small(kind) };
            for &level in Level::present() {
                let len = 90;
                let [q, mut k, mut v] = problem.sequence(0, len);
                let [q_width, k_width, v_width, out_width] = problem.widths();
                let attend = |k: &[f32], v: &[f32]| {
                    let mut cache = problem.cache(level);
                    let mut out = vec![0.0; len * out_width];
                    let (k, v) = (Rows::dense(k, k_width), Rows::dense(v, v_width));
                    let q = Rows::dense(&q, q_width);
                    attention(&problem.kernel(level), q, k, v, &[len], &mut [&mut cache], &mut out);
                    out
                };
                let clean = attend(&k, &v);
                k[50 * k_width..51 * k_width].fill(bad);
                v[50 * v_width..51 * v_width].fill(bad);
                let spoilt = attend(&k, &v);
                let (seen, end) = (50 * out_width, 70 * out_width);
                assert_eq!(spoilt[..seen], clean[..seen], "{kind:?}: before");
                assert_eq!(spoilt[end..], clean[end..], "{kind:?}: past the window");
                assert_ne!(spoilt[seen..end], clean[seen..end]);
            }
        }
    }
}

#[test]
fn large_scores_do_not_overflow() {
    // Scores of -1e30, 1e30 and, past f32, infinities of -1e40.
    for &level in Level::present() {
        let kernel = Attention { level, nheads: 1, scale: 1.0, window: None, softcap: None };
        let mut cache = KvCache::new(level, 1, 1, 1, KvType::F32);
        let mut out = [0.0; 4];
        let rows = |x| Rows::dense(x, 1);
        let (q, k, v) = ([1e30, 1e30, 1e30, 1e10], [-1e10, -1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 5.0]);
        attention(&kernel, rows(&q), rows(&k), rows(&v), &[4], &mut [&mut cache], &mut out);
        assert!(out[0].is_nan(), "a softmax of -infinity alone has no value");
        assert_eq!(out[1..], [2.0, 3.0, 4.0]);
    }
}

#[test]
fn a_window_is_exact() {
    // Equal scores: the mean of the values in the window.
    let len = 200;
    let (q, k) = (vec![0.0; len], vec![1.0; len]);
    let v: Vec<f32> = (0..len).map(|i| (i * i % 101) as f32).collect();
    for &level in Level::present() {
        let kernel = Attention { level, nheads: 1, scale: 1.0, window: Some(3), softcap: None };
        let mut cache = KvCache::new(level, 1, 1, 1, KvType::F32);
        let mut out = vec![0.0; len];
        let rows = |x| Rows::dense(x, 1);
        attention(&kernel, rows(&q), rows(&k), rows(&v), &[len], &mut [&mut cache], &mut out);
        for i in 0..len {
            let seen = &v[i.saturating_sub(2)..=i];
            assert_eq!(out[i], seen.iter().sum::<f32>() / seen.len() as f32, "{i}");
        }
    }
}

#[test]
fn forgetting_what_lies_before_the_window_changes_nothing() {
    let problem = Problem { window: Some(70), ..small(KvType::Q8_0) };
    let [q, k, v] = problem.sequence(0, 300);
    let [q_width, k_width, v_width, out_width] = problem.widths();
    let (mut kept, mut lean) = (problem.cache(Level::detect()), problem.cache(Level::detect()));
    for first in (0..300).step_by(10) {
        let out = [&mut kept, &mut lean].map(|cache| {
            let mut out = vec![0.0; 10 * out_width];
            attention(
                &problem.kernel(Level::detect()),
                Rows::dense(&q, q_width).slice(first, 10),
                Rows::dense(&k, k_width).slice(first, 10),
                Rows::dense(&v, v_width).slice(first, 10),
                &[10],
                &mut [cache],
                &mut out,
            );
            out
        });
        assert_eq!(out[0], out[1], "from {first}");
        lean.forget((lean.len() + 1).saturating_sub(70));
    }
    assert_eq!((lean.len(), lean.first()), (300, 192));
    assert!(lean.size_in_bytes() < kept.size_in_bytes());
    assert_eq!(lean.keys(), kept.keys()[192 * k_width..]);
}

#[test]
#[should_panic(expected = "caches: positions before 64 are forgotten, 31 is seen")]
fn a_query_that_sees_a_forgotten_position_panics() {
    let level = Level::detect();
    let kernel = Attention { level, nheads: 1, scale: 1.0, window: Some(70), softcap: None };
    let mut cache = KvCache::new(level, 1, 1, 1, KvType::F32);
    cache.append(Rows::dense(&[0.0; 100], 1), Rows::dense(&[0.0; 100], 1));
    cache.forget(80);
    let one = Rows::dense(&[0.0], 1);
    attention(&kernel, one, one, one, &[1], &mut [&mut cache], &mut [0.0]);
}

#[test]
#[should_panic(expected = "caches: not all of level")]
fn a_cache_of_another_level_panics() {
    let &[level, .., other] = Level::present() else {
        panic!("caches: not all of level: one level")
    };
    let kernel = Attention { level, nheads: 1, scale: 1.0, window: None, softcap: None };
    let mut cache = KvCache::new(other, 1, 1, 1, KvType::F32);
    let one = Rows::dense(&[0.0], 1);
    attention(&kernel, one, one, one, &[1], &mut [&mut cache], &mut [0.0]);
}

#[test]
fn a_call_without_tokens_does_nothing() {
    let level = Level::detect();
    let kernel = Attention { level, nheads: 2, scale: 1.0, window: None, softcap: None };
    let mut cache = KvCache::new(level, 1, 2, 3, KvType::F32);
    let rows = |width| Rows::new(&[], 0, width, 0, width);
    attention(&kernel, rows(4), rows(2), rows(3), &[0], &mut [&mut cache], &mut []);
    attention(&kernel, rows(4), rows(2), rows(3), &[], &mut [], &mut []);
    assert!(cache.is_empty());
}

/// Sizes and weights of latent attention.
struct Latent {
    nheads: usize,
    d_nope: usize,
    d_c: usize,
    d_r: usize,
    d_v: usize,
    w_uk: Vec<f32>,
    w_uv: Vec<f32>,
}

impl Latent {
    fn new(nheads: usize, d_nope: usize, d_c: usize, d_r: usize, d_v: usize) -> Self {
        let mut rng = Rng::new(70);
        let w_uk = rng.floats(nheads * d_c * d_nope);
        let w_uv = rng.floats(nheads * d_v * d_c);
        Self { nheads, d_nope, d_c, d_r, d_v, w_uk, w_uv }
    }

    fn kernel(&self, level: Level) -> LatentAttention<'_> {
        LatentAttention {
            level,
            nheads: self.nheads,
            scale: 1.0 / ((self.d_nope + self.d_r) as f32).sqrt(),
            w_uk: Weights::F32(&self.w_uk),
            w_uv: Weights::F32(&self.w_uv),
        }
    }

    /// q_nope, q_pe, c and k_pe of `len` tokens.
    fn sequence(&self, len: usize) -> [Vec<f32>; 4] {
        let mut rng = Rng::new(71);
        [self.nheads * self.d_nope, self.nheads * self.d_r, self.d_c, self.d_r]
            .map(|width| rng.floats(len * width))
    }

    fn run(&self, level: Level, kind: KvType, calls: &[usize]) -> (Vec<f32>, KvCache) {
        let len = calls.iter().sum();
        let [q_nope, q_pe, c, k_pe] = self.sequence(len);
        let mut cache = KvCache::latent(level, self.d_c, self.d_r, kind);
        let mut out = vec![f32::NAN; len * self.nheads * self.d_v];
        let mut rest = &mut out[..];
        let mut first = 0;
        for &run in calls {
            let (out, others) = rest.split_at_mut(run * self.nheads * self.d_v);
            rest = others;
            let rows = |x, width| Rows::dense(x, width).slice(first, run);
            let input = LatentInput {
                q_nope: rows(&q_nope, self.nheads * self.d_nope),
                q_pe: rows(&q_pe, self.nheads * self.d_r),
                c: rows(&c, self.d_c),
                k_pe: rows(&k_pe, self.d_r),
            };
            latent_attention(&self.kernel(level), &input, &[run], &mut [&mut cache], out);
            first += run;
        }
        (out, cache)
    }
}

#[test]
fn latent_attention_equals_full_attention_over_expanded_keys_and_values() {
    for (nheads, d_nope, d_c, d_r, d_v) in
        [(1, 1, 1, 1, 1), (3, 7, 20, 6, 9), (16, 16, 48, 8, 16), (2, 5, 33, 2, 40)]
    {
        let problem = Latent::new(nheads, d_nope, d_c, d_r, d_v);
        for &level in Level::present() {
            for kind in KvType::ALL {
                let (out, cache) = problem.run(level, kind, &[70, 1, 20]);
                let [q_nope, q_pe, ..] = problem.sequence(91);
                let (keys, values) = (cache.keys(), cache.values());
                let keys = Rows::dense(&keys, d_c + d_r);
                let want = latent_attention_reference(
                    &problem.kernel(level),
                    Rows::dense(&q_nope, nheads * d_nope),
                    Rows::dense(&q_pe, nheads * d_r),
                    keys.columns(0, d_c),
                    keys.columns(d_c, d_r),
                );
                // Scores and outputs are sums over d_c, of weights not normalised.
                close(&out, &want, TOLERANCE * (d_c as f64).sqrt());
                for (t, value) in values.chunks(d_c).enumerate() {
                    assert_eq!(value, &keys.row(t)[..d_c]);
                }
            }
        }
    }
}

#[test]
fn pieces_of_a_sequence_give_the_bits_of_the_whole_of_latent_attention() {
    let problem = Latent::new(3, 8, 20, 6, 9);
    for kind in KvType::ALL {
        let whole = problem.run(Level::detect(), kind, &[70]).0;
        assert_eq!(problem.run(Level::detect(), kind, &[1; 70]).0, whole, "{kind:?}");
        assert_eq!(problem.run(Level::detect(), kind, &[13, 57]).0, whole, "{kind:?}");
    }
}

#[test]
fn a_latent_cache_holds_each_channel_once() {
    for kind in KvType::ALL {
        let level = Level::detect();
        let (latent, full) = (
            KvCache::latent_bytes_per_token(level, 512, 64, kind),
            KvCache::bytes_per_token(level, 1, 576, 512, kind),
        );
        assert_eq!(latent * (576 + 512), full * 576, "{kind:?}");
    }
}
