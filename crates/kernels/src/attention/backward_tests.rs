//! Gradients of attention against their definition in f64, over random shapes, and to the bit against themselves.

use proptest::prelude::*;

use super::{
    Attention, AttentionGradients, AttentionInput, attention_backward,
    attention_backward_reference, attention_reference,
};
use crate::rows::Rows;
use crate::simd::Level;
use crate::testing::{Rng, close};

/// f32 against f64: sums of up to some hundred terms, and scores of up to about ten in an exponential.
const TOLERANCE: f64 = 1e-5;

/// Runs with what each carries from before, and sizes.
#[derive(Debug, Clone)]
struct Problem {
    runs: Vec<usize>,
    carried: Vec<usize>,
    nheads_kv: usize,
    group: usize,
    d_k: usize,
    d_v: usize,
    window: Option<usize>,
    softcap: Option<f32>,
    seed: u64,
}

/// Inputs of one run: q, keys, values, dout, and the forward's result.
struct Data {
    q: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    dout: Vec<f32>,
    out: Vec<f32>,
}

impl Problem {
    fn kernel(&self, level: Level) -> Attention {
        Attention {
            level,
            nheads: self.nheads_kv * self.group,
            scale: 3.0 / (self.d_k as f32).sqrt(),
            window: self.window,
            softcap: self.softcap,
        }
    }

    /// Widths of q, keys, values and out.
    fn widths(&self) -> [usize; 4] {
        let nheads = self.nheads_kv * self.group;
        [nheads * self.d_k, self.nheads_kv * self.d_k, self.nheads_kv * self.d_v, nheads * self.d_v]
    }

    fn data(&self) -> Vec<Data> {
        let [q_width, k_width, v_width, out_width] = self.widths();
        let runs = self.runs.iter().zip(&self.carried).enumerate();
        runs.map(|(run, (&len, carried))| {
            let mut rng = Rng::new(self.seed.wrapping_add(run as u64));
            let positions = len + carried;
            let q = rng.floats(len * q_width);
            let keys = rng.floats(positions * k_width);
            let values = rng.floats(positions * v_width);
            let dout = rng.floats(len * out_width);
            let out = attention_reference(
                &self.kernel(Level::Baseline),
                self.nheads_kv,
                Rows::new(&q, len, q_width, 0, q_width),
                Rows::new(&keys, positions, k_width, 0, k_width),
                Rows::new(&values, positions, v_width, 0, v_width),
            );
            let out = out.into_iter().map(|x| x as f32).collect();
            Data { q, keys, values, dout, out }
        })
        .collect()
    }

    /// dq of all runs, dk and dv of each.
    fn gradients(&self, level: Level, data: &[Data]) -> (Vec<f32>, Vec<Vec<f32>>, Vec<Vec<f32>>) {
        let [q_width, k_width, v_width, out_width] = self.widths();
        let (mut q, mut out, mut dout) = (Vec::new(), Vec::new(), Vec::new());
        for data in data {
            q.extend_from_slice(&data.q);
            out.extend_from_slice(&data.out);
            dout.extend_from_slice(&data.dout);
        }
        let runs: Vec<usize> = data.iter().map(|data| data.q.len() / q_width).collect();
        let tokens = runs.iter().sum();
        let rows = |x, width| Rows::dense(x, width);
        let keys: Vec<Rows<'_>> = data.iter().map(|data| rows(&data.keys, k_width)).collect();
        let values: Vec<Rows<'_>> = data.iter().map(|data| rows(&data.values, v_width)).collect();
        let nan = |x: &Vec<f32>| vec![f32::NAN; x.len()];
        let mut dq = nan(&q);
        let mut dk: Vec<Vec<f32>> = data.iter().map(|data| nan(&data.keys)).collect();
        let mut dv: Vec<Vec<f32>> = data.iter().map(|data| nan(&data.values)).collect();
        let input = AttentionInput {
            nheads_kv: self.nheads_kv,
            q: Rows::new(&q, tokens, q_width, 0, q_width),
            keys: &keys,
            values: &values,
            out: Rows::new(&out, tokens, out_width, 0, out_width),
        };
        let gradients = AttentionGradients {
            dq: &mut dq,
            dk: &mut dk.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
            dv: &mut dv.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>(),
        };
        let dout = Rows::new(&dout, tokens, out_width, 0, out_width);
        attention_backward(&self.kernel(level), &input, &runs, dout, gradients);
        (dq, dk, dv)
    }
}

#[track_caller]
fn check(problem: &Problem) {
    let [q_width, k_width, v_width, out_width] = problem.widths();
    let data = problem.data();
    let wanted: Vec<[Vec<f64>; 3]> = data
        .iter()
        .map(|data| {
            attention_backward_reference(
                &problem.kernel(Level::Baseline),
                problem.nheads_kv,
                Rows::dense(&data.q, q_width),
                Rows::dense(&data.keys, k_width),
                Rows::dense(&data.values, v_width),
                Rows::dense(&data.dout, out_width),
            )
        })
        .collect();
    for &level in Level::present() {
        let (dq, dk, dv) = problem.gradients(level, &data);
        let mut rest = &dq[..];
        for (run, [want_q, want_k, want_v]) in wanted.iter().enumerate() {
            let (dq, after) = rest.split_at(want_q.len());
            rest = after;
            close(dq, want_q, TOLERANCE);
            close(&dk[run], want_k, TOLERANCE);
            close(&dv[run], want_v, TOLERANCE);
        }
    }
}

fn problems() -> impl Strategy<Value = Problem> {
    let len = || prop_oneof![3 => 0usize..4, 2 => 5usize..20, 2 => 45usize..70, 1 => 120usize..140];
    let runs = prop::collection::vec((len(), len()), 1..4);
    let window = prop_oneof![2 => Just(None), 1 => (1usize..100).prop_map(Some)];
    let softcap = prop_oneof![2 => Just(None), 1 => Just(Some(2.0f32))];
    let sizes = (1usize..4, 1usize..9, 1usize..40, 1usize..70);
    (runs, sizes, window, softcap, any::<u64>()).prop_map(
        |(runs, (nheads_kv, group, d_k, d_v), window, softcap, seed)| {
            let (runs, carried) = runs.into_iter().unzip();
            Problem { runs, carried, nheads_kv, group, d_k, d_v, window, softcap, seed }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn equals_the_definition_for_any_runs_heads_widths_and_windows(problem in problems()) {
        check(&problem);
    }
}

fn small() -> Problem {
    Problem {
        runs: vec![70, 1, 0, 130],
        carried: vec![3, 66, 5, 0],
        nheads_kv: 2,
        group: 3,
        d_k: 10,
        d_v: 18,
        window: None,
        softcap: None,
        seed: 81,
    }
}

#[test]
fn models_sizes_equal_the_definition() {
    for (nheads_kv, group, d_k, d_v) in
        [(3, 3, 64, 64), (1, 8, 128, 128), (2, 2, 80, 80), (2, 1, 192, 128), (1, 71, 64, 64)]
    {
        let (runs, carried) = (vec![70, 2], vec![0, 65]);
        check(&Problem { runs, carried, nheads_kv, group, d_k, d_v, ..small() });
    }
}

#[test]
fn long_runs_equal_the_definition_with_and_without_a_window() {
    for window in [None, Some(5), Some(300)] {
        let (runs, carried) = (vec![700], vec![90]);
        check(&Problem { runs, carried, window, nheads_kv: 1, group: 2, ..small() });
    }
}

#[test]
fn a_run_has_the_same_bits_in_any_company_and_on_any_number_of_threads() {
    let problem = Problem { window: Some(60), softcap: Some(3.0), ..small() };
    let data = problem.data();
    for &level in Level::present() {
        let with = |threads, data: &[Data]| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| problem.gradients(level, data))
        };
        let together = with(1, &data);
        assert_eq!(with(2, &data), together);
        assert_eq!(with(3, &data), together);
        let mut rest = &together.0[..];
        for run in 0..data.len() {
            let (dq, dk, dv) = with(1, &data[run..=run]);
            let (mine, after) = rest.split_at(dq.len());
            rest = after;
            assert_eq!(mine, dq, "run {run}");
            assert_eq!((&together.1[run], &together.2[run]), (&dk[0], &dv[0]), "run {run}");
        }
    }
}

#[test]
fn what_one_run_cannot_compute_stays_in_that_run() {
    let problem = small();
    let mut data = problem.data();
    let alone = problem.gradients(Level::detect(), &data[3..]);
    data[0].q.fill(f32::NAN);
    data[0].keys.fill(f32::NAN);
    data[1].values.fill(f32::NAN);
    data[1].dout.fill(f32::NAN);
    let (dq, dk, dv) = problem.gradients(Level::detect(), &data);
    assert_eq!(dq[dq.len() - alone.0.len()..], alone.0);
    assert_eq!((&dk[3], &dv[3]), (&alone.1[0], &alone.2[0]));
}

#[test]
fn positions_that_no_query_sees_get_nothing() {
    let problem = Problem { runs: vec![2, 0], carried: vec![200, 7], window: Some(3), ..small() };
    let (_, dk, dv) = problem.gradients(Level::detect(), &problem.data());
    let [_, k_width, v_width, _] = problem.widths();
    assert!(dk[0][..198 * k_width].iter().chain(&dv[0][..198 * v_width]).all(|x| *x == 0.0));
    assert!(dv[0][198 * v_width..].iter().all(|x| *x != 0.0));
    assert!(dk[1].iter().chain(&dv[1]).all(|x| *x == 0.0));
}

#[test]
fn a_call_without_runs_does_nothing() {
    let level = Level::detect();
    let kernel = Attention { level, nheads: 2, scale: 1.0, window: None, softcap: None };
    let none = |width| Rows::new(&[], 0, width, 0, width);
    let (q, out) = (none(4), none(6));
    let input = AttentionInput { nheads_kv: 1, q, keys: &[], values: &[], out };
    let gradients = AttentionGradients { dq: &mut [], dk: &mut [], dv: &mut [] };
    attention_backward(&kernel, &input, &[], out, gradients);
}

#[test]
#[should_panic(expected = "keys")]
fn fewer_keys_than_tokens_panic() {
    let level = Level::detect();
    let kernel = Attention { level, nheads: 1, scale: 1.0, window: None, softcap: None };
    let (one, two) = (Rows::dense(&[0.0], 1), Rows::dense(&[0.0; 2], 1));
    let (keys, values) = (&[one][..], &[one][..]);
    let input = AttentionInput { nheads_kv: 1, q: two, keys, values, out: two };
    let gradients = AttentionGradients {
        dq: &mut [0.0; 2],
        dk: &mut [&mut [0.0; 1]],
        dv: &mut [&mut [0.0; 1]],
    };
    attention_backward(&kernel, &input, &[2], two, gradients);
}
