//! The backward against its definition, and that against differences of the forward's definition.

use proptest::prelude::*;

use super::backward_reference::{Gradients, reference};
use super::tests::{Data, Problem, problems};
use super::*;
use crate::gradcheck::{assert_threads_do_not_matter, dot, slopes, widen};
use crate::testing::{Rng, close};

/// f32 against f64: sums over the columns of a head, and states that were computed in f32.
const TOLERANCE: f64 = 2e-5;

/// Random gradients of what the forward returns: of o, and of the states after.
fn arriving(p: &Problem) -> (Vec<f32>, Vec<Vec<f32>>) {
    let mut rng = Rng::new(!p.seed);
    let dout = rng.floats(p.tokens() * p.heads() * p.value_dim);
    (dout, p.runs.iter().map(|_| rng.floats(p.state_len())).collect())
}

/// Gradients of q, k, v, g, beta, and of the states before.
type All = ([Vec<f32>; 5], Vec<Vec<f32>>);

fn backward(
    level: Level,
    input: &Delta<'_>,
    runs: &[usize],
    states: &[Vec<f32>],
    dout: Rows<'_>,
    dstates: &[Vec<f32>],
) -> All {
    let nan = |rows: Rows<'_>| vec![f32::NAN; rows.len() * rows.width()];
    let mut all = [input.q, input.k, input.v, input.g, input.beta].map(nan);
    let mut dstates = dstates.to_vec();
    let [dq, dk, dv, dg, dbeta] = &mut all;
    let out = DeltaGradients { dq, dk, dv, dg, dbeta };
    let states: Vec<&[f32]> = states.iter().map(Vec::as_slice).collect();
    let mut of: Vec<&mut [f32]> = dstates.iter_mut().map(Vec::as_mut_slice).collect();
    delta_rule_backward(&Delta { level, ..*input }, runs, &states, dout, &mut of, out);
    (all, dstates)
}

fn check(p: &Problem) {
    let data = Data::new(p);
    let input = data.input(p);
    let (dout, dstates) = arriving(p);
    let Gradients { dq, dk, dv, dg, dbeta, dstates: want_states } =
        reference(&input, &p.runs, &data.states, &dout, &dstates);
    let width = input.v.width();
    let rows = Rows::new(&dout, p.tokens(), width, 0, width);
    for &level in Level::present() {
        let (all, of_states) = backward(level, &input, &p.runs, &data.states, rows, &dstates);
        for (got, want) in all.iter().zip([&dq, &dk, &dv, &dg, &dbeta]) {
            close(got, want, TOLERANCE);
        }
        for (got, want) in of_states.iter().zip(&want_states) {
            close(got, want, TOLERANCE);
        }
    }
}

fn rows(x: &[f32], tokens: usize, width: usize) -> Rows<'_> {
    Rows::new(x, tokens, width, 0, width)
}

#[test]
fn the_definition_is_the_gradient_of_the_definition_of_the_forward() {
    for (by_channel, key_heads, shares) in [(false, 1, 2), (true, 2, 1), (true, 1, 2)] {
        let (key_dim, value_dim, seed) = (3, 2, 21);
        let runs = vec![3, 0, 1];
        let p = Problem { runs, key_heads, shares, key_dim, value_dim, by_channel, seed };
        let mut data = Data::new(&p);
        data.g.iter_mut().for_each(|g| *g = g.max(-1.0));
        let (dout, dstates) = arriving(&p);
        let (wide, wide_states) = (widen(&dout), dstates.iter().map(|x| widen(x)));
        let wide_states: Vec<Vec<f64>> = wide_states.collect();
        let value = |input: &Delta<'_>, states: &[Vec<f32>]| {
            let mut states: Vec<Vec<f64>> = states.iter().map(|x| widen(x)).collect();
            let out = recurrence(input, &p.runs, &mut states);
            let of_states = states.iter().zip(&wide_states).map(|(s, d)| dot(s, d));
            dot(&out, &wide) + of_states.sum::<f64>()
        };
        let input = data.input(&p);
        let want = reference(&input, &p.runs, &data.states, &dout, &dstates);
        let tokens = p.tokens();
        // `slopes` moves f32 by exact steps of 2^-9; these differences are of the fourth order.
        let near = |name: &str, got: &[f64], numeric: Vec<f32>| {
            let numeric = widen(&numeric);
            assert_eq!(got.len(), numeric.len(), "{name}");
            for (got, numeric) in got.iter().zip(numeric) {
                assert!(
                    (got - numeric).abs() <= 1e-6 * (1.0 + numeric.abs()),
                    "{name}: {got} {numeric}"
                );
            }
        };
        let (q, k) = (input.q.width(), input.k.width());
        let of = |x: &[f32]| value(&Delta { q: rows(x, tokens, q), ..input }, &data.states);
        near("dq", &want.dq, slopes(&data.q, of));
        let of = |x: &[f32]| value(&Delta { k: rows(x, tokens, k), ..input }, &data.states);
        near("dk", &want.dk, slopes(&data.k, of));
        let of = |x: &[f32]| {
            value(&Delta { v: rows(x, tokens, input.v.width()), ..input }, &data.states)
        };
        near("dv", &want.dv, slopes(&data.v, of));
        let of = |x: &[f32]| {
            value(&Delta { g: rows(x, tokens, input.g.width()), ..input }, &data.states)
        };
        near("dg", &want.dg, slopes(&data.g, of));
        let of = |x: &[f32]| {
            value(&Delta { beta: rows(x, tokens, input.beta.width()), ..input }, &data.states)
        };
        near("dbeta", &want.dbeta, slopes(&data.beta, of));
        for r in 0..p.runs.len() {
            let of = |x: &[f32]| {
                let mut states = data.states.clone();
                states[r] = x.to_vec();
                value(&input, &states)
            };
            near("dstate", &want.dstates[r], slopes(&data.states[r], of));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn gradients_equal_the_definition_on_every_instruction_set(p in problems()) {
        check(&p);
    }
}

#[test]
fn gradients_of_the_sizes_of_published_models_equal_the_definition() {
    for (dims, by_channel) in [((128, 128), false), ((96, 192), true)] {
        let (key_dim, value_dim) = dims;
        let runs = vec![33, 1];
        check(&Problem { runs, key_heads: 1, shares: 1, key_dim, value_dim, by_channel, seed: 31 });
    }
}

#[test]
fn a_run_has_the_same_gradients_in_any_company_and_at_any_number_of_threads() {
    let runs = vec![20, 0, 3, 50];
    let (key_heads, shares, key_dim, value_dim) = (2, 2, 9, 21);
    let p = Problem { runs, key_heads, shares, key_dim, value_dim, by_channel: true, seed: 41 };
    let data = Data::new(&p);
    let input = data.input(&p);
    let (dout, dstates) = arriving(&p);
    let rows = Rows::dense(&dout, input.v.width());
    let level = Level::detect();
    let together =
        assert_threads_and(|| backward(level, &input, &p.runs, &data.states, rows, &dstates));
    let mut first = 0;
    for (r, &len) in p.runs.iter().enumerate() {
        let alone = Delta {
            q: input.q.slice(first, len),
            k: input.k.slice(first, len),
            v: input.v.slice(first, len),
            g: input.g.slice(first, len),
            beta: input.beta.slice(first, len),
            ..input
        };
        let rows = rows.slice(first, len);
        let (all, state) =
            backward(level, &alone, &[len], &data.states[r..=r], rows, &dstates[r..=r]);
        for (got, want) in all.iter().zip(&together.0) {
            let row = want.len() / p.tokens();
            assert_eq!(got[..], want[first * row..][..len * row]);
        }
        assert_eq!(state[0], together.1[r]);
        first += len;
    }
}

/// What `f` returns, on any number of threads.
fn assert_threads_and(f: impl Fn() -> All + Sync) -> All {
    assert_threads_do_not_matter(&f);
    f()
}

#[test]
fn complete_decays_and_zero_keys_have_finite_gradients() {
    for by_channel in [false, true] {
        let (key_dim, value_dim, seed) = (8, 20, 51);
        let runs = vec![40];
        let p = Problem { runs, key_heads: 1, shares: 2, key_dim, value_dim, by_channel, seed };
        let mut data = Data::new(&p);
        let decays = [-2000.0, -1e-4, 0.0, -104.0];
        data.g.iter_mut().zip(decays.iter().cycle()).for_each(|(to, g)| *to = *g);
        data.k.iter_mut().step_by(3).for_each(|k| *k = 0.0);
        data.k[..key_dim].fill(0.0);
        let input = data.input(&p);
        let (dout, dstates) = arriving(&p);
        let want = reference(&input, &p.runs, &data.states, &dout, &dstates);
        for &level in Level::present() {
            let rows = Rows::dense(&dout, input.v.width());
            let (all, _) = backward(level, &input, &p.runs, &data.states, rows, &dstates);
            for (got, want) in all.iter().zip([&want.dq, &want.dk, &want.dv, &want.dg, &want.dbeta])
            {
                close(got, want, TOLERANCE);
            }
        }
    }
}
