//! Stages and the whole against the definition in f64, over random shapes.

use proptest::prelude::*;

use super::*;
use crate::rows::Rows;
use crate::simd::Level;
use crate::testing::{Rng, close};

/// f32 against f64: rounding of sums over a few thousand terms.
const TOLERANCE: f64 = 1e-5;

#[derive(Debug, Clone)]
struct Problem {
    runs: Vec<usize>,
    ngroups: usize,
    heads_per_group: usize,
    headdim: usize,
    dstate: usize,
    seed: u64,
}

impl Problem {
    fn tokens(&self) -> usize {
        self.runs.iter().sum()
    }
    fn nheads(&self) -> usize {
        self.ngroups * self.heads_per_group
    }
    fn state_len(&self) -> usize {
        self.nheads() * self.headdim * self.dstate
    }
}

fn problems() -> impl Strategy<Value = Problem> {
    let len = prop_oneof![0usize..9, 10usize..20, 28usize..70, 120usize..140, 190usize..200];
    (prop::collection::vec(len, 1..4), 1usize..3, 1usize..4, 1usize..40, 1usize..80, any::<u64>())
        .prop_map(|(runs, ngroups, heads_per_group, headdim, dstate, seed)| Problem {
            runs,
            ngroups,
            heads_per_group,
            headdim,
            dstate,
            seed,
        })
}

struct Data {
    x: Vec<f32>,
    dt: Vec<f32>,
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
    bias: Vec<f32>,
    d: Vec<f32>,
    z: Vec<f32>,
    states: Vec<Vec<f32>>,
}

impl Data {
    fn new(p: &Problem) -> Self {
        let mut rng = Rng::new(p.seed);
        let (t, h) = (p.tokens(), p.nheads());
        Self {
            x: rng.floats(t * h * p.headdim),
            dt: rng.floats(t * h),
            a: (0..h).map(|_| -(3.0 * rng.float()).exp()).collect(),
            b: rng.floats(t * p.ngroups * p.dstate),
            c: rng.floats(t * p.ngroups * p.dstate),
            bias: rng.floats(h).iter().map(|b| 2.0 * b - 1.0).collect(),
            d: rng.floats(if p.seed.is_multiple_of(2) { h } else { h * p.headdim }),
            z: rng.floats(t * h * p.headdim),
            states: p.runs.iter().map(|_| rng.floats(p.state_len())).collect(),
        }
    }

    fn input(&self, p: &Problem) -> Ssd<'_> {
        let dense = |data, width| Rows::new(data, p.tokens(), width, 0, width);
        Ssd {
            level: Level::detect(),
            nheads: p.nheads(),
            headdim: p.headdim,
            ngroups: p.ngroups,
            dstate: p.dstate,
            x: dense(&self.x, p.nheads() * p.headdim),
            dt: dense(&self.dt, p.nheads()),
            a: &self.a,
            b: dense(&self.b, p.ngroups * p.dstate),
            c: dense(&self.c, p.ngroups * p.dstate),
            dt_bias: (!p.seed.is_multiple_of(3)).then_some(&self.bias),
            d: (!p.seed.is_multiple_of(5)).then_some(&self.d),
            z: (p.seed % 7 > 2).then(|| dense(&self.z, p.nheads() * p.headdim)),
            dt_softplus: p.seed % 11 > 1,
            dt_limit: if p.seed.is_multiple_of(4) { (0.05, 0.6) } else { (0.0, f32::INFINITY) },
        }
    }
}

fn run(
    level: Level,
    input: &Ssd<'_>,
    runs: &[usize],
    states: &[Vec<f32>],
) -> (Vec<f32>, Vec<Vec<f32>>) {
    let mut states = states.to_vec();
    let mut y = vec![f32::NAN; input.x.len() * input.x.width()];
    let mut views: Vec<&mut [f32]> = states.iter_mut().map(Vec::as_mut_slice).collect();
    ssd(&Ssd { level, ..*input }, runs, &mut views, &mut y);
    (y, states)
}

/// `len` tokens from `first` on.
fn part<'a>(input: &Ssd<'a>, first: usize, len: usize) -> Ssd<'a> {
    Ssd {
        x: input.x.slice(first, len),
        dt: input.dt.slice(first, len),
        b: input.b.slice(first, len),
        c: input.c.slice(first, len),
        z: input.z.map(|z| z.slice(first, len)),
        ..*input
    }
}

fn in_f64(input: &Ssd<'_>, runs: &[usize], states: &[Vec<f32>]) -> (Vec<f64>, Vec<Vec<f64>>) {
    let widen = |s: &Vec<f32>| s.iter().copied().map(f64::from).collect();
    let mut states: Vec<Vec<f64>> = states.iter().map(widen).collect();
    let y = recurrence(input, runs, &mut states);
    (y, states)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn the_whole_equals_the_recurrence_on_every_instruction_set(p in problems()) {
        let data = Data::new(&p);
        let input = data.input(&p);
        let (want, want_states) = in_f64(&input, &p.runs, &data.states);
        for &level in Level::present() {
            let (y, states) = run(level, &input, &p.runs, &data.states);
            close(&y, &want, TOLERANCE);
            for (state, want) in states.iter().zip(&want_states) {
                close(state, want, TOLERANCE);
            }
        }
    }

    #[test]
    fn runs_together_have_the_bits_of_each_alone(p in problems()) {
        let data = Data::new(&p);
        let input = data.input(&p);
        let (y, states) = run(Level::detect(), &input, &p.runs, &data.states);
        let mut first = 0;
        for (r, &len) in p.runs.iter().enumerate() {
            let alone = part(&input, first, len);
            let (one, one_state) = run(Level::detect(), &alone, &[len], &data.states[r..=r]);
            let row = input.x.width();
            prop_assert_eq!(&y[first * row..(first + len) * row], &one[..]);
            prop_assert_eq!(&states[r], &one_state[0]);
            first += len;
        }
    }

    #[test]
    fn a_run_cut_anywhere_has_the_bits_of_the_whole_on_every_instruction_set(
        p in problems(),
        cuts in prop::collection::vec(0.0f64..1.0, 1..6),
    ) {
        let data = Data::new(&p);
        let input = data.input(&p);
        let len = p.tokens();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| (cut * (len + 1) as f64) as usize).collect();
        cuts.push(len);
        cuts.sort_unstable();
        for &level in Level::present() {
            let (want, want_state) = run(level, &input, &[len], &data.states[..1]);
            let (mut y, mut state, mut first) = (Vec::new(), data.states[..1].to_vec(), 0);
            for &cut in &cuts {
                let (more, after) = run(level, &part(&input, first, cut - first), &[cut - first], &state);
                y.extend(more);
                (state, first) = (after, cut);
            }
            prop_assert_eq!(&y, &want, "{:?}", cuts);
            prop_assert_eq!(&state, &want_state, "{:?}", cuts);
        }
    }

    #[test]
    fn the_chain_of_stages_equals_the_recurrence_for_any_chunk_size(
        p in problems(),
        batch in 1usize..3,
        chunk_size in prop_oneof![Just(1usize), 2usize..9, Just(16), Just(64), Just(256)],
    ) {
        let p = Problem { runs: vec![p.runs[0].max(1); batch], ..p };
        let data = Data::new(&p);
        let input = Ssd {
            z: None, dt_limit: (0.0, f32::INFINITY), ..data.input(&p)
        };
        let zeros = vec![vec![0.0; p.state_len()]; batch];
        let (want, want_states) = in_f64(&input, &p.runs, &zeros);
        let dims = Dims {
            batch,
            seqlen: p.runs[0],
            nheads: p.nheads(),
            headdim: p.headdim,
            ngroups: p.ngroups,
            dstate: p.dstate,
            chunk_size,
        };
        let (dt, da_cumsum) =
            chunk_cumsum(Level::detect(), dims, &data.dt, &data.a, input.dt_bias, input.dt_softplus);
        let own = chunk_state(dims, &data.x, &data.b, &dt, &da_cumsum);
        let passed = state_passing(dims, &own, &da_cumsum);
        let mut y = chunk_scan(dims, &data.x, &passed, &data.c, &da_cumsum, input.d);
        let intra = chunk_intra(dims, &data.x, &data.b, &data.c, &dt, &da_cumsum);
        y.iter_mut().zip(intra).for_each(|(y, intra)| *y += intra);
        // Sums handed on in f32 are known to half a unit in the last place, and so are exponents.
        let largest = da_cumsum.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let tolerance = TOLERANCE + f64::from(f32::EPSILON * largest);
        close(&y, &want, tolerance);
        let row = p.state_len();
        for (batch, want) in want_states.iter().enumerate() {
            let last = (batch + 1) * dims.nchunks() * row;
            close(&passed[last - row..last], want, tolerance);
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    // Heads of 20 rows are never cut, those of 24 in two and those of 32 in four.
    for headdim in [20, 24, 32] {
        let runs = vec![300, 1, 17, 1];
        let p = Problem { runs, ngroups: 2, heads_per_group: 3, headdim, dstate: 24, seed: 9 };
        let data = Data::new(&p);
        let input = data.input(&p);
        for &level in Level::present() {
            let with = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| run(level, &input, &p.runs, &data.states))
            };
            let one = with(1);
            for threads in [2, 3, 7, 64] {
                assert_eq!(with(threads), one, "{threads} threads, heads of {headdim}");
            }
        }
    }
}

/// Steps from 1e-9 to 1e3 and decays down to -1e4 a step, strong and weak in turn.
#[test]
fn extreme_steps_and_decays_stay_finite_and_exact() {
    for (kind, decays) in
        [[-50.0f32, -50.0], [-1e-4, -1e3], [-1e4, -1e4], [-1e-6, -1e-6], [-0.0, -1e4]]
            .into_iter()
            .enumerate()
    {
        let p = Problem {
            runs: vec![200],
            ngroups: 1,
            heads_per_group: 2,
            headdim: 9,
            dstate: 17,
            seed: 13 + kind as u64,
        };
        let mut data = Data::new(&p);
        // a = -1, so that the steps are the decays; a second head with dt 1e3 and weak decay.
        data.a = vec![-1.0, -1e-5];
        for (t, dt) in data.dt.chunks_mut(2).enumerate() {
            dt[0] = -decays[t % 2];
            dt[1] = if t % 3 == 0 { 1e3 } else { 1e-9 };
        }
        let input = Ssd {
            dt_softplus: false,
            dt_bias: None,
            dt_limit: (0.0, f32::INFINITY),
            z: None,
            ..data.input(&p)
        };
        let (want, want_states) = in_f64(&input, &p.runs, &data.states);
        for &level in Level::present() {
            let (y, states) = run(level, &input, &p.runs, &data.states);
            assert!(y.iter().chain(&states[0]).all(|x| x.is_finite()));
            close(&y, &want, TOLERANCE);
            close(&states[0], &want_states[0], TOLERANCE);
        }
    }
}

#[test]
fn what_is_no_number_reaches_no_token_before_it() {
    let p =
        Problem { runs: vec![70], ngroups: 1, heads_per_group: 2, headdim: 5, dstate: 11, seed: 4 };
    let mut data = Data::new(&p);
    for &level in Level::present() {
        for bad in [f32::NAN, f32::INFINITY] {
            let (want, _) = run(level, &data.input(&p), &p.runs, &data.states);
            let kept = std::mem::replace(&mut data.x[41 * 10 + 2], bad);
            let (y, state) = run(level, &data.input(&p), &p.runs, &data.states);
            data.x[41 * 10 + 2] = kept;
            assert_eq!(y[..41 * 10], want[..41 * 10]);
            assert!(!y[41 * 10 + 2].is_finite() && !state[0][2 * 11].is_finite());
        }
    }
}

/// Exponents whose sums leave the range of f32: decays are 0, not NaN.
#[test]
fn exponents_beyond_the_range_of_floats_decay_to_nothing() {
    let p =
        Problem { runs: vec![80], ngroups: 1, heads_per_group: 1, headdim: 3, dstate: 5, seed: 21 };
    let mut data = Data::new(&p);
    data.a = vec![-1.65e38];
    data.dt = vec![20.0; 80];
    let input = Ssd { dt_bias: None, dt_softplus: false, ..data.input(&p) };
    let (want, _) = in_f64(&input, &p.runs, &data.states);
    for &level in Level::present() {
        let (y, states) = run(level, &input, &p.runs, &data.states);
        assert!(states[0].iter().all(|x| x.is_finite()));
        close(&y, &want, TOLERANCE);
    }
}

#[test]
fn a_step_that_is_no_number_is_not_hidden_by_a_limit() {
    let mut dt = [f32::NAN, 5.0, -1.0];
    timestep(Level::detect(), &mut dt, None, false, (0.0, 1.0));
    assert!(dt[0].is_nan());
    assert_eq!(dt[1..], [1.0, 0.0]);
}

#[test]
fn stages_of_no_heads_or_no_tokens_are_empty() {
    for (seqlen, nheads) in [(4, 0), (0, 2)] {
        let dims =
            Dims { batch: 1, seqlen, nheads, headdim: 3, ngroups: 1, dstate: 4, chunk_size: 2 };
        let (dt, a, bias) = (vec![0.0; seqlen * nheads], vec![-1.0; nheads], vec![0.0; nheads]);
        let (dt, sums) = chunk_cumsum(Level::detect(), dims, &dt, &a, Some(&bias), true);
        assert!(dt.is_empty());
        assert!(state_passing(dims, &[], &sums).is_empty());
    }
}

#[test]
fn bias_comes_before_softplus() {
    let mut dt = [0.0];
    timestep(Level::detect(), &mut dt, Some(&[-4.6]), true, (0.0, f32::INFINITY));
    assert!((dt[0] - 0.010_002).abs() < 1e-5, "{}", dt[0]);
}

#[test]
fn heads_use_the_group_of_their_block() {
    // G = 2, H = 4, distinct b: heads 0 and 1 see group 0, heads 2 and 3 group 1.
    let input = Ssd {
        level: Level::detect(),
        nheads: 4,
        headdim: 1,
        ngroups: 2,
        dstate: 1,
        x: Rows::dense(&[1.0; 4], 4),
        dt: Rows::dense(&[1.0; 4], 4),
        a: &[0.0; 4],
        b: Rows::dense(&[1.0, 10.0], 2),
        c: Rows::dense(&[1.0, 1.0], 2),
        dt_bias: None,
        d: None,
        z: None,
        dt_softplus: false,
        dt_limit: (0.0, f32::INFINITY),
    };
    let (y, _) = run(Level::detect(), &input, &[1], &[vec![0.0; 4]]);
    assert_eq!(y, [1.0, 1.0, 10.0, 10.0]);
}
