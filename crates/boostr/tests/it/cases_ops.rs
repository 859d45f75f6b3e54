//! Bugs that users of other implementations reported, as properties of single operations. Portable
//! bodies and CPU kernels are each compared with the definition in f64. Ids in names:
//! `fixtures/CASES.md`.

use crate::bodies::{BODIES, Body};
use crate::common::{Random, cpu};
use crate::tiny::{close, floats, softplus, widened};
use boostr::backend::{Cpu, Tensor};
use boostr::ops::{
    Activation, Client, Decay, GatedNorm, SsdInput, SsmKernelOps, generic, tensor, to_vec,
};
use boostr_kernels::{Level, Rows, ssd};

/// Steps that have gone through softplus, and all other inputs of one sequence.
struct Problem {
    /// H, P, G, N
    sizes: [usize; 4],
    x: Vec<f32>,
    dt: Vec<f32>,
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
    state: Vec<f32>,
}

impl Problem {
    fn new(seed: u64, len: usize, sizes: [usize; 4]) -> Self {
        let [nheads, headdim, ngroups, dstate] = sizes;
        let mut random = Random(seed);
        let mut floats = |count| floats(&mut random, count);
        Self {
            sizes,
            x: floats(len * nheads * headdim),
            dt: floats(len * nheads).iter().map(|x| 0.11 + 0.1 * x).collect(),
            a: floats(nheads).iter().map(|x| -1.1 - x).collect(),
            b: floats(len * ngroups * dstate),
            c: floats(len * ngroups * dstate),
            state: floats(nheads * headdim * dstate),
        }
    }

    /// y and the state after, by definition.
    fn definition(&self) -> (Vec<f64>, Vec<f64>) {
        let [nheads, headdim, ngroups, dstate] = self.sizes;
        let input = ssd::Ssd {
            level: Level::detect(),
            nheads,
            headdim,
            ngroups,
            dstate,
            x: Rows::dense(&self.x, nheads * headdim),
            dt: Rows::dense(&self.dt, nheads),
            a: &self.a,
            b: Rows::dense(&self.b, ngroups * dstate),
            c: Rows::dense(&self.c, ngroups * dstate),
            dt_bias: None,
            d: None,
            z: None,
            dt_softplus: false,
            dt_limit: (0.0, f32::INFINITY),
        };
        let mut states = [widened(&self.state)];
        let y = ssd::recurrence(&input, &[self.dt.len() / nheads], &mut states);
        let [state] = states;
        (y, state)
    }

    /// The same by one of ours, with `pad` more rows of NaN in memory behind each input.
    fn run(&self, body: Body, pad: usize) -> (Vec<f32>, Vec<f32>) {
        let [nheads, headdim, ngroups, dstate] = self.sizes;
        let client = cpu();
        let len = self.dt.len() / nheads;
        let padded = |values: &[f32], inner: &[usize]| {
            let more = pad * inner.iter().product::<usize>();
            let values = [values, &vec![f32::NAN; more]].concat();
            let all = tensor(&client, &values, &[&[len + pad], inner].concat()).unwrap();
            all.narrow(0, 0, len).unwrap()
        };
        let (x, dt) = (padded(&self.x, &[nheads, headdim]), padded(&self.dt, &[nheads]));
        let (b, c) = (padded(&self.b, &[ngroups, dstate]), padded(&self.c, &[ngroups, dstate]));
        let a = Decay::new(tensor(&client, &self.a, &[nheads]).unwrap()).unwrap();
        let input = SsdInput::new(&x, &dt, &a, &b, &c);
        let mut state = tensor(&client, &self.state, &[nheads, headdim, dstate]).unwrap();
        let y = body.ssd(&input, &[len], &mut [&mut state]).unwrap();
        (to_vec(&y).unwrap(), to_vec(&state).unwrap())
    }
}

#[test]
fn case_9_heads_belong_to_groups_by_blocks() {
    // Group 0 says 1, group 1 says 10; without any other state or decay that is what a head sees.
    let problem = Problem {
        sizes: [4, 1, 2, 1],
        x: vec![1.0; 4],
        dt: vec![1.0; 4],
        a: vec![-1.0; 4],
        b: vec![1.0, 10.0],
        c: vec![1.0, 1.0],
        state: vec![0.0; 4],
    };
    for body in BODIES {
        assert_eq!(problem.run(body, 0).0, [1.0, 1.0, 10.0, 10.0], "{body:?}");
        for (seed, sizes) in [(1, [4, 8, 2, 16]), (2, [6, 4, 3, 5]), (3, [4, 2, 4, 8])] {
            let problem = Problem::new(seed, 30, sizes);
            let (want, want_state) = problem.definition();
            let (y, state) = problem.run(body, 0);
            close(&y, &want, 1e-5);
            close(&state, &want_state, 1e-5);
        }
    }
}

#[test]
fn case_9_the_gated_norm_is_over_each_group_alone() {
    let client = cpu();
    let y = tensor(&client, &[1.0, 1.0, 100.0, 100.0], &[1, 4]).unwrap();
    let z = tensor(&client, &[20.0; 4], &[1, 4]).unwrap();
    let weight = tensor(&client, &[1.0; 4], &[4]).unwrap();
    let norm = GatedNorm {
        weight: &weight,
        ngroups: 2,
        eps: 1e-5,
        norm_before_gate: false,
        activation: Activation::Silu,
    };
    for body in BODIES {
        let out = body.gated(&y, &z, &norm).unwrap();
        close(&to_vec(&out).unwrap(), &[1.0; 4], 1e-5);
    }
}

#[test]
fn case_10_extreme_decay_gives_numbers_and_the_right_ones() {
    let len = 300;
    for (what, decay) in [
        ("-50 each step", (|_| -50.0) as fn(usize) -> f32),
        ("alternating", |t| if t % 2 == 0 { -1e-4 } else { -1e3 }),
        ("one in a hundred", |t| if t % 100 == 99 { -1e4 } else { -1e-6 }),
        ("none", |_| 0.0),
    ] {
        let mut problem = Problem::new(10, len, [4, 8, 2, 16]);
        problem.a = vec![-1.0, -10.0, -0.5, -1.0];
        problem.dt = (0..len * 4).map(|i| decay(i / 4) / problem.a[i % 4]).collect();
        let (want, want_state) = problem.definition();
        for body in BODIES {
            let (y, state) = problem.run(body, 0);
            assert!(y.iter().chain(&state).all(|x| x.is_finite()), "{body:?}: {what}");
            close(&y, &want, 1e-4);
            close(&state, &want_state, 1e-4);
        }
    }
}

/// Steps `[1, L, 1]` through bias and softplus.
fn steps(body: Body, raw: &[f32], bias: f32) -> Vec<f32> {
    let client = cpu();
    let dt = tensor(&client, raw, &[1, raw.len(), 1]).unwrap();
    let one = |x: f32| -> Tensor<Cpu> { tensor(&client, &[x], &[1]).unwrap() };
    let (a, bias) = (one(-1.0), one(bias));
    let (steps, _) = match body {
        Body::Portable => {
            generic::ssd_chunk_cumsum(client.library(), &dt, &a, Some(&bias), raw.len(), true)
        }
        Body::Kernels => client.ssd_chunk_cumsum(&dt, &a, Some(&bias), raw.len(), true),
    }
    .unwrap();
    to_vec(&steps).unwrap()
}

#[test]
fn case_11_softplus_neither_overflows_nor_loses_small_steps() {
    let raw = [-200.0, -87.0, -30.0, -17.0, -16.0, -1.0, 0.0, 1.0, 20.0, 20.5, 89.0, 1e4];
    for body in BODIES {
        let got = steps(body, &raw, 0.0);
        assert!((0.0..1e-37).contains(&got[0]), "{body:?}: {}", got[0]);
        for (&raw, &got) in raw.iter().zip(&got).skip(1) {
            let want = softplus(raw.into());
            let error = (f64::from(got) - want).abs() / want;
            assert!(error < 1e-6, "{body:?}: softplus({raw}) is {want}, not {got}");
        }
    }
}

#[test]
fn case_38_the_bias_is_added_before_softplus() {
    for body in BODIES {
        let got = f64::from(steps(body, &[0.0], -4.6)[0]);
        assert!((got - softplus(f64::from(-4.6f32))).abs() < 1e-8, "{body:?}: {got}");
        assert!((got - 0.01).abs() < 1e-4, "{body:?}: {got}");
    }
}

#[test]
fn case_30_any_remainder_of_a_chunk_leaves_the_sequential_state() {
    // 32 and 128 are the kernels' block and piece, 16 the portable body's chunk; memory behind the tokens is NaN.
    for len in (1..=70).chain(119..=129).chain(179..=193) {
        let problem = Problem::new(len as u64, len, [2, 6, 1, 8]);
        let (want, want_state) = problem.definition();
        for body in BODIES {
            let (y, state) = problem.run(body, 66);
            close(&y, &want, 1e-5);
            close(&state, &want_state, 1e-5);
        }
    }
}
