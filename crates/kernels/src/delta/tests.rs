//! The whole and the gate against the definition in f64, over random shapes.

use proptest::prelude::*;

use super::*;
use crate::gradcheck::{assert_threads_do_not_matter, numeric_gradient, widen};
use crate::norm::l2_norm;
use crate::testing::{Rng, close};

/// f32 against f64: rounding of sums over some hundred terms, carried over some hundred tokens.
const TOLERANCE: f64 = 1e-5;

#[derive(Debug, Clone)]
pub(super) struct Problem {
    pub(super) runs: Vec<usize>,
    pub(super) key_heads: usize,
    pub(super) shares: usize,
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
    /// A decay for each key channel.
    pub(super) by_channel: bool,
    pub(super) seed: u64,
}

impl Problem {
    pub(super) fn tokens(&self) -> usize {
        self.runs.iter().sum()
    }
    pub(super) fn heads(&self) -> usize {
        self.key_heads * self.shares
    }
    pub(super) fn state_len(&self) -> usize {
        self.heads() * self.key_dim * self.value_dim
    }
}

pub(super) fn problems() -> impl Strategy<Value = Problem> {
    let len = prop_oneof![0usize..6, 6usize..20, 28usize..70];
    let dim = || prop_oneof![1usize..20, Just(32), 33usize..70];
    let heads = (1usize..3, 1usize..4);
    (prop::collection::vec(len, 1..4), heads, dim(), dim(), any::<bool>(), any::<u64>()).prop_map(
        |(runs, (key_heads, shares), key_dim, value_dim, by_channel, seed)| Problem {
            runs,
            key_heads,
            shares,
            key_dim,
            value_dim,
            by_channel,
            seed,
        },
    )
}

pub(super) struct Data {
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
    pub(super) g: Vec<f32>,
    pub(super) beta: Vec<f32>,
    pub(super) states: Vec<Vec<f32>>,
}

impl Data {
    pub(super) fn new(p: &Problem) -> Self {
        let mut rng = Rng::new(p.seed);
        let (t, h) = (p.tokens(), p.heads());
        let mut keys = || {
            let x = rng.floats(t * p.key_heads * p.key_dim);
            let mut out = vec![0.0; x.len()];
            if x.is_empty() {
                return out;
            }
            let rows = Rows::dense(&x, p.key_heads * p.key_dim);
            l2_norm(Level::Baseline, rows, p.key_dim, 1e-6, &mut out);
            out
        };
        let (q, k) = (keys(), keys());
        let gates = t * h * if p.by_channel { p.key_dim } else { 1 };
        Self {
            q,
            k,
            v: rng.floats(t * h * p.value_dim),
            // Decays from none to complete.
            g: (0..gates).map(|_| -(6.0 * rng.float() - 2.0).exp()).collect(),
            beta: rng.floats(t * h).iter().map(|b| 1.0 + b).collect(),
            states: p.runs.iter().map(|_| rng.floats(p.state_len())).collect(),
        }
    }

    pub(super) fn input(&self, p: &Problem) -> Delta<'_> {
        let dense = |data, width| Rows::new(data, p.tokens(), width, 0, width);
        Delta {
            level: Level::detect(),
            key_heads: p.key_heads,
            value_heads: p.heads(),
            key_dim: p.key_dim,
            value_dim: p.value_dim,
            q: dense(&self.q, p.key_heads * p.key_dim),
            k: dense(&self.k, p.key_heads * p.key_dim),
            v: dense(&self.v, p.heads() * p.value_dim),
            g: dense(&self.g, p.heads() * if p.by_channel { p.key_dim } else { 1 }),
            beta: dense(&self.beta, p.heads()),
            scale: (p.key_dim as f32).sqrt().recip(),
        }
    }
}

fn run(
    level: Level,
    input: &Delta<'_>,
    runs: &[usize],
    states: &[Vec<f32>],
) -> (Vec<f32>, Vec<Vec<f32>>) {
    let mut states = states.to_vec();
    let mut out = vec![f32::NAN; input.v.len() * input.v.width()];
    let mut views: Vec<&mut [f32]> = states.iter_mut().map(Vec::as_mut_slice).collect();
    delta_rule(&Delta { level, ..*input }, runs, &mut views, &mut out);
    (out, states)
}

fn in_f64(input: &Delta<'_>, runs: &[usize], states: &[Vec<f32>]) -> (Vec<f64>, Vec<Vec<f64>>) {
    let mut states: Vec<Vec<f64>> = states.iter().map(|x| widen(x)).collect();
    let out = recurrence(input, runs, &mut states);
    (out, states)
}

/// Tokens `first..first + len`.
fn part<'a>(input: &Delta<'a>, first: usize, len: usize) -> Delta<'a> {
    Delta {
        q: input.q.slice(first, len),
        k: input.k.slice(first, len),
        v: input.v.slice(first, len),
        g: input.g.slice(first, len),
        beta: input.beta.slice(first, len),
        ..*input
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_whole_equals_the_definition_on_every_instruction_set(p in problems()) {
        let data = Data::new(&p);
        let input = data.input(&p);
        let (want, want_states) = in_f64(&input, &p.runs, &data.states);
        for &level in Level::present() {
            let (out, states) = run(level, &input, &p.runs, &data.states);
            close(&out, &want, TOLERANCE);
            for (state, want) in states.iter().zip(&want_states) {
                close(state, want, TOLERANCE);
            }
        }
    }

    #[test]
    fn runs_together_have_the_bits_of_each_alone(p in problems()) {
        let data = Data::new(&p);
        let input = data.input(&p);
        let (out, states) = run(Level::detect(), &input, &p.runs, &data.states);
        let mut first = 0;
        for (r, &len) in p.runs.iter().enumerate() {
            let alone = part(&input, first, len);
            let (one, one_state) = run(Level::detect(), &alone, &[len], &data.states[r..=r]);
            let row = input.v.width();
            prop_assert_eq!(&out[first * row..(first + len) * row], &one[..]);
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
            let (mut out, mut state, mut first) = (Vec::new(), data.states[..1].to_vec(), 0);
            for &cut in &cuts {
                let (more, after) = run(level, &part(&input, first, cut - first), &[cut - first], &state);
                out.extend(more);
                (state, first) = (after, cut);
            }
            prop_assert_eq!(&out, &want, "{:?}", cuts);
            prop_assert_eq!(&state, &want_state, "{:?}", cuts);
        }
    }
}

fn problem(
    runs: &[usize],
    heads: (usize, usize),
    dims: (usize, usize),
    by_channel: bool,
) -> Problem {
    let ((key_heads, shares), (key_dim, value_dim)) = (heads, dims);
    Problem { runs: runs.to_vec(), key_heads, shares, key_dim, value_dim, by_channel, seed: 7 }
}

#[test]
fn the_sizes_of_published_models_equal_the_definition() {
    for (heads, dims, by_channel) in [
        ((1, 2), (128, 128), false),
        ((1, 1), (96, 192), false),
        ((1, 1), (128, 128), true),
        ((2, 3), (1, 3), false),
        ((1, 1), (3, 1), true),
    ] {
        let p = problem(&[40, 1], heads, dims, by_channel);
        let data = Data::new(&p);
        let input = data.input(&p);
        let (want, want_states) = in_f64(&input, &p.runs, &data.states);
        for &level in Level::present() {
            let (out, states) = run(level, &input, &p.runs, &data.states);
            close(&out, &want, TOLERANCE);
            states.iter().zip(&want_states).for_each(|(got, want)| close(got, want, TOLERANCE));
        }
    }
}

#[test]
fn tokens_one_by_one_have_the_bits_of_the_prompt() {
    for by_channel in [false, true] {
        let p = problem(&[23], (2, 2), (24, 130), by_channel);
        let data = Data::new(&p);
        let input = data.input(&p);
        for &level in Level::present() {
            let (want, want_state) = run(level, &input, &[23], &data.states);
            let (mut out, mut state) = (Vec::new(), data.states.clone());
            for t in 0..23 {
                let (more, after) = run(level, &part(&input, t, 1), &[1], &state);
                out.extend(more);
                state = after;
            }
            assert_eq!((out, state), (want, want_state), "{level}");
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    // Of the widths, heads of 70 are never cut, those of 96 in two and those of 128 in four.
    for (width, by_channel) in [(70, true), (96, false), (128, true), (128, false)] {
        let p = problem(&[37, 0, 2, 100], (2, 3), (20, width), by_channel);
        let data = Data::new(&p);
        let input = data.input(&p);
        for &level in Level::present() {
            assert_threads_do_not_matter(|| run(level, &input, &p.runs, &data.states));
        }
    }
}

#[test]
fn inputs_may_be_columns_of_wider_rows() {
    let p = problem(&[9], (1, 2), (5, 7), false);
    let data = Data::new(&p);
    let input = data.input(&p);
    let mut wide = Vec::new();
    for t in 0..9 {
        for rows in [input.q, input.k, input.v, input.g, input.beta] {
            wide.extend_from_slice(rows.row(t));
        }
    }
    let (mut first, width) = (0, wide.len() / 9);
    let mut band = |rows: Rows<'_>| {
        first += rows.width();
        (first - rows.width(), rows.width())
    };
    let [q, k, v, g, beta] = [input.q, input.k, input.v, input.g, input.beta]
        .map(&mut band)
        .map(|(offset, len)| Rows::new(&wide, 9, width, offset, len));
    let banded = Delta { q, k, v, g, beta, ..input };
    let of = |input| run(Level::detect(), input, &p.runs, &data.states);
    assert_eq!(of(&banded), of(&input));
}

#[test]
fn tokens_after_a_token_do_not_change_its_bits() {
    for by_channel in [false, true] {
        let p = problem(&[70], (1, 2), (16, 40), by_channel);
        let (mut data, other) = (Data::new(&p), Data::new(&Problem { seed: 8, ..p.clone() }));
        let row = p.heads() * p.value_dim;
        let (want, _) = run(Level::detect(), &data.input(&p), &p.runs, &data.states);
        let tail = |to: &mut Vec<f32>, from: &[f32]| {
            let first = to.len() / 70 * 40;
            to[first..].copy_from_slice(&from[first..]);
        };
        tail(&mut data.q, &other.q);
        tail(&mut data.k, &other.k);
        tail(&mut data.v, &other.v);
        tail(&mut data.g, &other.g);
        tail(&mut data.beta, &other.beta);
        let (got, _) = run(Level::detect(), &data.input(&p), &p.runs, &data.states);
        assert_eq!(got[..40 * row], want[..40 * row]);
        assert_ne!(got[40 * row..], want[40 * row..]);
    }
}

#[test]
fn the_state_stays_bounded_over_thousands_of_tokens() {
    for by_channel in [false, true] {
        let p = problem(&[4096], (1, 1), (16, 16), by_channel);
        let mut data = Data::new(&p);
        // The slowest decays and the widest writes.
        data.g.iter_mut().for_each(|g| *g = -1e-4);
        data.beta.iter_mut().for_each(|beta| *beta = 2.0);
        let input = data.input(&p);
        let (want, want_states) = in_f64(&input, &p.runs, &data.states);
        for &level in Level::present() {
            let (out, states) = run(level, &input, &p.runs, &data.states);
            // Reflections keep errors: they add up over the tokens.
            close(&out, &want, 1e-3);
            close(&states[0], &want_states[0], 1e-3);
            assert!(states[0].iter().all(|s| s.abs() < 100.0));
        }
    }
}

#[test]
fn edges_of_gates_and_keys_give_numbers_and_the_right_ones() {
    for by_channel in [false, true] {
        let p = problem(&[60], (1, 2), (8, 20), by_channel);
        let mut data = Data::new(&p);
        let betas = [0.0, 1e-7, 1.0 - 1e-6, 1.0, 2.0];
        data.beta.iter_mut().zip(betas.iter().cycle()).for_each(|(to, beta)| *to = *beta);
        let decays = [-2000.0, -1e-4, 0.0, -104.0, -88.0, -1e30, f32::NEG_INFINITY];
        data.g.iter_mut().zip(decays.iter().cycle()).for_each(|(to, g)| *to = *g);
        // Zero keys, and the same key again and again.
        let width = p.key_heads * p.key_dim;
        let key = data.k[..width].to_vec();
        for (t, k) in data.k.chunks_exact_mut(width).enumerate() {
            match t % 4 {
                0 => k.fill(0.0),
                1 => {}
                _ => k.copy_from_slice(&key),
            }
        }
        let input = data.input(&p);
        let (want, want_states) = in_f64(&input, &p.runs, &data.states);
        assert!(want.iter().all(|x| x.is_finite()));
        for &level in Level::present() {
            let (out, states) = run(level, &input, &p.runs, &data.states);
            close(&out, &want, TOLERANCE);
            close(&states[0], &want_states[0], TOLERANCE);
        }
    }
}

#[test]
fn sizes_of_zero_are_no_panic() {
    for (runs, dims) in [(&[0usize, 0][..], (4, 4)), (&[3], (0, 4)), (&[3], (4, 0)), (&[], (4, 4))]
    {
        let p = problem(runs, (1, 2), dims, false);
        let data = Data::new(&p);
        let (out, states) = run(Level::detect(), &data.input(&p), &p.runs, &data.states);
        assert!(out.iter().all(|x| *x == 0.0));
        assert_eq!(states, data.states);
    }
}

#[test]
#[should_panic(expected = "states")]
fn a_state_of_another_size_panics() {
    let p = problem(&[1], (1, 1), (4, 6), false);
    let data = Data::new(&p);
    let mut out = vec![0.0; 6];
    delta_rule(&data.input(&p), &[1], &mut [&mut [0.0; 23]], &mut out);
}

/// `(g, its derivative by a)` by definition.
fn gate(a: f32, a_log: f32, dt_bias: f32) -> (f64, f64) {
    let (x, rate) = (f64::from(a) + f64::from(dt_bias), -f64::from(a_log).exp());
    (rate * (x.max(0.0) + (-x.abs()).exp().ln_1p()), rate / (1.0 + (-x).exp()))
}

#[test]
fn the_decay_gate_equals_its_definition_from_the_smallest_to_the_largest_steps() {
    let mut rng = Rng::new(9);
    for (heads, of_head) in [(1, 1), (3, 1), (2, 4), (3, 17), (20, 1)] {
        let (tokens, width) = (70, heads * of_head);
        let sizes = [1.0, 30.0, 200.0, 1e4];
        let a: Vec<f32> = (0..tokens * width).map(|i| sizes[i % 4] * rng.float()).collect();
        let (a_log, dt_bias) = (rng.floats(heads), rng.floats(width));
        for &level in Level::present() {
            let rows = Rows::dense(&a, width);
            let kernel = DecayGate { level, a: rows, a_log: &a_log, dt_bias: &dt_bias };
            let mut out = vec![f32::NAN; a.len()];
            decay_gate(&kernel, &mut out);
            for (i, got) in out.iter().enumerate() {
                let (c, got) = (i % width, f64::from(*got));
                let (want, _) = gate(a[i], a_log[c / of_head], dt_bias[c]);
                // The sum with the bias is rounded: an error of the argument.
                let bound = 1e-5 * want.abs() + 1e-37;
                assert!((got - want).abs() <= bound && got <= 0.0, "{} gives {got}", a[i]);
            }
        }
    }
}

#[test]
fn the_gradients_of_the_decay_gate_are_its_slopes() {
    let mut rng = Rng::new(10);
    for (heads, of_head) in [(3, 1), (2, 5), (1, 16)] {
        let (tokens, width) = (37, heads * of_head);
        let a: Vec<f32> = rng.floats(tokens * width).iter().map(|a| 8.0 * a).collect();
        let (a_log, dt_bias, dg) =
            (rng.floats(heads), rng.floats(width), rng.floats(tokens * width));
        let value = |a_log: &[f64], dt_bias: &[f64]| -> f64 {
            (0..a.len())
                .map(|i| {
                    let (x, c) = (f64::from(a[i]) + dt_bias[i % width], i % width);
                    let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
                    -a_log[c / of_head].exp() * softplus * f64::from(dg[i])
                })
                .sum()
        };
        let (log, bias) = (widen(&a_log), widen(&dt_bias));
        let want_log = numeric_gradient(&log, |log| value(log, &bias));
        let want_bias = numeric_gradient(&bias, |bias| value(&log, bias));
        let want: Vec<f64> = (0..a.len())
            .map(|i| {
                let c = i % width;
                f64::from(dg[i]) * gate(a[i], a_log[c / of_head], dt_bias[c]).1
            })
            .collect();
        for &level in Level::present() {
            let rows = Rows::dense(&a, width);
            let kernel = DecayGate { level, a: rows, a_log: &a_log, dt_bias: &dt_bias };
            let (mut da, mut da_log) = (vec![f32::NAN; a.len()], vec![1.0; heads]);
            let mut ddt_bias = vec![1.0; width];
            let (da_to, log_to, bias_to) = (&mut da[..], &mut da_log[..], &mut ddt_bias[..]);
            let out = DecayGateGradients { da: da_to, da_log: log_to, ddt_bias: bias_to };
            decay_gate_backward(&kernel, Rows::dense(&dg, width), out);
            close(&da, &want, 1e-5);
            // Parameters' gradients are added to what is there: 1.
            let plus_one = |x: &[f64]| x.iter().map(|x| x + 1.0).collect::<Vec<_>>();
            close(&da_log, &plus_one(&want_log), 1e-5);
            close(&ddt_bias, &plus_one(&want_bias), 1e-5);
        }
    }
}
