//! The backward against its definition, and the definition against differences of the forward's.

use proptest::prelude::*;

use super::backward_reference::{Gradients, reference};
use super::*;
use crate::rows::Rows;
use crate::simd::Level;
use crate::testing::{Rng, close};

/// f32 against f64: rounding of sums over a few thousand terms.
const TOLERANCE: f64 = 1e-4;

/// Everything that a call needs, owned.
#[derive(Debug, Clone)]
struct Problem {
    nheads: usize,
    headdim: usize,
    ngroups: usize,
    dstate: usize,
    runs: Vec<usize>,
    x: Vec<f32>,
    dt: Vec<f32>,
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
    dt_bias: Option<Vec<f32>>,
    d: Option<Vec<f32>>,
    z: Option<Vec<f32>>,
    dt_softplus: bool,
    dt_limit: (f32, f32),
    states: Vec<Vec<f32>>,
    dout: Vec<f32>,
    dstates: Vec<Vec<f32>>,
}

/// Sizes of a problem: `[H, P, G, N]`.
type Sizes = [usize; 4];

impl Problem {
    /// Random values; with skip weights of a head, and nothing else that may be left out.
    fn new([nheads, headdim, ngroups, dstate]: Sizes, runs: &[usize], seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let tokens: usize = runs.iter().sum();
        let states = |rng: &mut Rng| -> Vec<Vec<f32>> {
            runs.iter().map(|_| rng.floats(nheads * headdim * dstate)).collect()
        };
        Self {
            nheads,
            headdim,
            ngroups,
            dstate,
            runs: runs.to_vec(),
            x: rng.floats(tokens * nheads * headdim),
            dt: rng.floats(tokens * nheads),
            a: (0..nheads).map(|_| -(3.0 * rng.float()).exp()).collect(),
            b: rng.floats(tokens * ngroups * dstate),
            c: rng.floats(tokens * ngroups * dstate),
            dt_bias: None,
            d: Some(rng.floats(nheads)),
            z: None,
            dt_softplus: true,
            dt_limit: (0.0, f32::INFINITY),
            states: states(&mut rng),
            dout: rng.floats(tokens * nheads * headdim),
            dstates: states(&mut rng),
        }
    }

    /// Chooses what may be left out by the bits of `choices`.
    fn with(mut self, choices: u64) -> Self {
        let mut rng = Rng::new(choices);
        let channels = self.nheads * self.headdim;
        self.d = match choices % 3 {
            0 => None,
            1 => self.d,
            _ => Some(rng.floats(channels)),
        };
        self.dt_bias = (choices & 4 == 0).then(|| rng.floats(self.nheads));
        self.z = (choices & 8 == 0).then(|| rng.floats(self.dout.len()));
        self.dt_softplus = choices & 16 == 0;
        if choices & 32 == 0 {
            self.dt_limit = (0.4, 0.9);
        }
        self
    }

    fn tokens(&self) -> usize {
        self.runs.iter().sum()
    }

    fn input(&self, level: Level) -> Ssd<'_> {
        let rows = |data, width| Rows::new(data, self.tokens(), width, 0, width);
        Ssd {
            level,
            nheads: self.nheads,
            headdim: self.headdim,
            ngroups: self.ngroups,
            dstate: self.dstate,
            x: rows(&self.x, self.nheads * self.headdim),
            dt: rows(&self.dt, self.nheads),
            a: &self.a,
            b: rows(&self.b, self.ngroups * self.dstate),
            c: rows(&self.c, self.ngroups * self.dstate),
            dt_bias: self.dt_bias.as_deref(),
            d: self.d.as_deref(),
            z: self.z.as_deref().map(|z| rows(z, self.nheads * self.headdim)),
            dt_softplus: self.dt_softplus,
            dt_limit: self.dt_limit,
        }
    }

    fn reference(&self) -> Gradients {
        reference(&self.input(Level::Baseline), &self.runs, &self.states, &self.dout, &self.dstates)
    }

    /// The same of one run alone.
    fn alone(&self, run: usize) -> Self {
        let first: usize = self.runs[..run].iter().sum();
        let part = |data: &[f32]| {
            let width = data.len() / self.tokens().max(1);
            data[first * width..(first + self.runs[run]) * width].to_vec()
        };
        Self {
            runs: vec![self.runs[run]],
            x: part(&self.x),
            dt: part(&self.dt),
            b: part(&self.b),
            c: part(&self.c),
            z: self.z.as_deref().map(part),
            dout: part(&self.dout),
            states: vec![self.states[run].clone()],
            dstates: vec![self.dstates[run].clone()],
            ..self.clone()
        }
    }

    fn run(&self, level: Level) -> Fast {
        let none = |len: usize| vec![f32::NAN; len];
        let mut out = Fast {
            dx: none(self.x.len()),
            ddt: none(self.dt.len()),
            db: none(self.b.len()),
            dc: none(self.c.len()),
            dz: self.z.as_ref().map(|z| none(z.len())),
            da: vec![0.0; self.nheads],
            ddt_bias: vec![0.0; self.nheads],
            dd: self.d.as_ref().map(|d| vec![0.0; d.len()]),
            dstates: self.dstates.clone(),
        };
        let states: Vec<&[f32]> = self.states.iter().map(Vec::as_slice).collect();
        let mut dstates: Vec<&mut [f32]> = out.dstates.iter_mut().map(Vec::as_mut_slice).collect();
        let width = self.nheads * self.headdim;
        let dout = Rows::new(&self.dout, self.tokens(), width, 0, width);
        let gradients = SsdGradients {
            dx: &mut out.dx,
            ddt: &mut out.ddt,
            db: &mut out.db,
            dc: &mut out.dc,
            dz: out.dz.as_deref_mut(),
            da: &mut out.da,
            ddt_bias: Some(&mut out.ddt_bias),
            dd: out.dd.as_deref_mut(),
        };
        let input = self.input(level);
        ssd_backward(&input, &self.runs, &states, dout, &mut dstates, gradients);
        out
    }

    #[track_caller]
    fn check(&self) {
        let want = self.reference();
        for &level in Level::present() {
            let got = self.run(level);
            close(&got.dx, &want.dx, TOLERANCE);
            close(&got.ddt, &want.ddt, TOLERANCE);
            close(&got.db, &want.db, TOLERANCE);
            close(&got.dc, &want.dc, TOLERANCE);
            close(&got.da, &want.da, TOLERANCE);
            close(&got.ddt_bias, &want.ddt_bias, TOLERANCE);
            got.dz.iter().for_each(|dz| close(dz, &want.dz, TOLERANCE));
            got.dd.iter().for_each(|dd| close(dd, &want.dd, TOLERANCE));
            for (got, want) in got.dstates.iter().zip(&want.dstates) {
                close(got, want, TOLERANCE);
            }
        }
    }
}

/// What the kernel returned.
#[derive(Debug, Clone, PartialEq)]
struct Fast {
    dx: Vec<f32>,
    ddt: Vec<f32>,
    db: Vec<f32>,
    dc: Vec<f32>,
    dz: Option<Vec<f32>>,
    da: Vec<f32>,
    ddt_bias: Vec<f32>,
    dd: Option<Vec<f32>>,
    dstates: Vec<Vec<f32>>,
}

fn problems() -> impl Strategy<Value = Problem> {
    let len = prop::sample::select(vec![0usize, 1, 2, 35, 36, 37, 47, 48, 49, 72, 113, 200]);
    let heads = (1usize..4, prop::sample::select(vec![1usize, 2, 3])).prop_flat_map(|(g, per)| {
        // G of 1, of some, and of H
        prop::sample::select(vec![(g * per, g), (per, 1), (g, g)])
    });
    (prop::collection::vec(len, 1..4), heads, 1usize..40, 1usize..40, any::<u64>()).prop_map(
        |(runs, (nheads, ngroups), headdim, dstate, seed)| {
            Problem::new([nheads, headdim, ngroups, dstate], &runs, seed).with(seed)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn gradients_equal_the_definition_on_every_instruction_set(p in problems()) {
        p.check();
    }

    #[test]
    fn a_run_has_the_same_bits_alone_and_in_company(p in problems()) {
        let together = p.run(Level::detect());
        let mut first = 0;
        for (r, &len) in p.runs.iter().enumerate() {
            let alone = p.alone(r).run(Level::detect());
            let part = |all: &[f32]| {
                let width = all.len() / p.tokens().max(1);
                all[first * width..(first + len) * width].to_vec()
            };
            prop_assert_eq!(&part(&together.dx), &alone.dx);
            prop_assert_eq!(&part(&together.ddt), &alone.ddt);
            prop_assert_eq!(&part(&together.db), &alone.db);
            prop_assert_eq!(&part(&together.dc), &alone.dc);
            prop_assert_eq!(&together.dz.as_deref().map(part), &alone.dz);
            prop_assert_eq!(&together.dstates[r], &alone.dstates[0]);
            first += len;
        }
    }
}

/// The loss whose gradients these are: `<y, dout>` plus the products of final states and `dstates`.
fn loss(p: &Problem) -> f64 {
    let widen = |s: &Vec<f32>| s.iter().copied().map(f64::from).collect();
    let mut states: Vec<Vec<f64>> = p.states.iter().map(widen).collect();
    let y: Vec<f64> = recurrence(&p.input(Level::detect()), &p.runs, &mut states);
    let dot =
        |a: &[f64], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| a * f64::from(*b)).sum() };
    let of_states = states.iter().zip(&p.dstates).map(|(state, d)| dot(state, d));
    dot(&y, &p.dout) + of_states.sum::<f64>()
}

/// The central difference of the loss by one value.
fn slope(p: &mut Problem, value: impl Fn(&mut Problem) -> &mut f32) -> f64 {
    let before = *value(p);
    let mut at = |x: f32| {
        *value(p) = x;
        loss(p)
    };
    let (high, low) = (before + 1e-3, before - 1e-3);
    let difference = at(high) - at(low);
    *value(p) = before;
    difference / (f64::from(high) - f64::from(low))
}

/// The values of one input.
type Values = fn(&mut Problem) -> &mut [f32];

#[test]
fn case_23_the_definition_equals_differences_of_the_loss() {
    for choices in 0..64 {
        let mut p = Problem::new([4, 2, 2, 3], &[3, 0, 1], 100 + choices).with(choices);
        // Far from the bends at the limits, on all sides of them.
        let spread = [-2.0, 0.05, 0.6, 2.0];
        p.dt.iter_mut().zip(spread.iter().cycle()).for_each(|(dt, x)| *dt = 0.2 * *dt + x);
        let want = p.reference();
        let checks: [(&str, &[f64], Values); 9] = [
            ("x", &want.dx, |p| &mut p.x),
            ("dt", &want.ddt, |p| &mut p.dt),
            ("b", &want.db, |p| &mut p.b),
            ("c", &want.dc, |p| &mut p.c),
            ("a", &want.da, |p| &mut p.a),
            ("z", &want.dz, |p| p.z.as_deref_mut().unwrap_or_default()),
            ("dt_bias", &want.ddt_bias, |p| p.dt_bias.as_deref_mut().unwrap_or_default()),
            ("d", &want.dd, |p| p.d.as_deref_mut().unwrap_or_default()),
            ("state", &want.dstates[2], |p| &mut p.states[2]),
        ];
        for (name, want, values) in checks {
            for i in 0..values(&mut p).len() {
                let got = slope(&mut p, |p| &mut values(p)[i]);
                let bound = 1e-5 * (1.0 + want[i].abs());
                assert!((got - want[i]).abs() < bound, "{name} {i}: {} is not {got}", want[i]);
            }
        }
        // And the fast one equals it over the ends of two chunks of 48.
        Problem::new([4, 2, 2, 3], &[2 * 48 + 3, 4], 200 + choices).with(choices).check();
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let p = Problem::new([6, 20, 2, 24], &[300, 1, 17, 1], 9).with(8 + 64);
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| p.run(Level::detect()))
    };
    let one = with(1);
    for threads in [2, 3, 7] {
        assert_eq!(with(threads), one, "{threads} threads");
    }
}

#[test]
fn teams_of_heads_add_up() {
    // Two teams of 6 for each of two groups, two of 5, two of 2, seven of 1, one of 3 for each of three
    // groups.
    for (nheads, ngroups) in [(24, 2), (10, 1), (4, 1), (7, 1), (9, 3)] {
        Problem::new([nheads, 5, ngroups, 7], &[113, 60], 31).check();
    }
}

/// Steps from 1e-9 to 1e3 and decays down to -1e4 a step, strong and weak in turn.
#[test]
fn case_10_extreme_steps_and_decays_stay_finite_and_exact() {
    for (kind, decays) in
        [[-50.0f32, -50.0], [-1e-4, -1e3], [-1e4, -1e4], [-1e-6, -1e-6], [-0.0, -1e4]]
            .into_iter()
            .enumerate()
    {
        let mut p = Problem::new([2, 9, 1, 17], &[200], 13 + kind as u64);
        // a = -1, so that the steps are the decays; a second head with dt 1e3 and weak decay.
        p.a = vec![-1.0, -1e-5];
        for (t, dt) in p.dt.chunks_mut(2).enumerate() {
            dt[0] = -decays[t % 2];
            dt[1] = if t % 3 == 0 { 1e3 } else { 1e-9 };
        }
        p.dt_softplus = false;
        for gated in [false, true] {
            p.z = gated.then(|| p.dout.clone());
            p.check();
        }
        // The decay itself, with steps around 1.
        p.a = vec![decays[0], decays[1]];
        p.dt.fill(1.0);
        p.check();
    }
}

#[test]
fn exponents_beyond_the_range_of_floats_have_no_gradient() {
    let mut p = Problem::new([1, 3, 1, 5], &[80], 21);
    (p.a, p.dt, p.dt_softplus) = (vec![-1.65e38], vec![20.0; 80], false);
    p.check();
    assert_eq!(p.run(Level::detect()).da, [0.0]);
}

#[test]
fn a_step_at_its_limit_has_no_gradient_and_one_inside_has() {
    let mut p = Problem::new([1, 2, 1, 2], &[6], 3);
    (p.dt, p.dt_softplus, p.dt_limit) = (vec![0.05, 0.1, 0.5, 1.0, 1.5, -3.0], false, (0.1, 1.0));
    let zeros: Vec<bool> = p.run(Level::detect()).ddt.iter().map(|ddt| *ddt == 0.0).collect();
    assert_eq!(zeros, [true, false, false, false, true, true]);
}

#[test]
fn the_slope_of_softplus_holds_far_out() {
    // exp(-40) = 4.2e-18 below, 1 - 2e-18 above.
    for (raw, want) in [(-40.0, 4.248_354e-18), (-1.0, 0.268_941_4), (25.0, 1.0), (1e3, 1.0)] {
        let mut p = Problem::new([1, 1, 1, 1], &[1], 5);
        (p.dt, p.a) = (vec![raw], vec![0.0]);
        (p.x, p.b, p.c, p.dout) = (vec![1.0], vec![1.0], vec![1.0], vec![1.0]);
        p.dstates = vec![vec![0.0]];
        let ddt = p.run(Level::detect()).ddt[0];
        assert!((ddt - want).abs() <= 1e-6 * want, "{raw}: {ddt}");
    }
}

#[test]
fn what_is_no_number_stays_in_its_run() {
    // Few workers, whose memory goes from longer runs to shorter ones.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let runs = [60, 5].repeat(4);
    let clean = Problem::new([3, 7, 1, 5], &runs, 41).with(64 + 16);
    let want = pool.install(|| clean.run(Level::detect()));
    for bad in [f32::NAN, f32::INFINITY] {
        let mut p = clean.clone();
        for pair in 0..4 {
            let tokens = pair * 65 * 21..(pair * 65 + 60) * 21;
            p.x[tokens.clone()].fill(bad);
            p.dout[tokens].fill(bad);
        }
        let got = pool.install(|| p.run(Level::detect()));
        for pair in 0..4 {
            let rows = |width: usize| (pair * 65 + 60) * width..(pair * 65 + 65) * width;
            assert_eq!(got.dx[rows(21)], want.dx[rows(21)]);
            assert_eq!(got.ddt[rows(3)], want.ddt[rows(3)]);
            assert_eq!(got.db[rows(5)], want.db[rows(5)]);
            assert_eq!(got.dc[rows(5)], want.dc[rows(5)]);
            assert_eq!(got.dstates[2 * pair + 1], want.dstates[2 * pair + 1]);
            assert!(got.dx[pair * 65 * 21].is_nan());
        }
    }
}

#[test]
fn gradients_of_parameters_are_added_and_those_of_activations_written() {
    let p = Problem::new([2, 3, 1, 4], &[50], 6).with(4 + 1);
    let alone = p.run(Level::detect());
    let mut out = alone.clone();
    let states: Vec<&[f32]> = p.states.iter().map(Vec::as_slice).collect();
    out.dstates.clone_from(&p.dstates);
    let mut dstates: Vec<&mut [f32]> = out.dstates.iter_mut().map(Vec::as_mut_slice).collect();
    let gradients = SsdGradients {
        dx: &mut out.dx,
        ddt: &mut out.ddt,
        db: &mut out.db,
        dc: &mut out.dc,
        dz: out.dz.as_deref_mut(),
        da: &mut out.da,
        ddt_bias: Some(&mut out.ddt_bias),
        dd: out.dd.as_deref_mut(),
    };
    let dout = Rows::dense(&p.dout, 6);
    ssd_backward(&p.input(Level::detect()), &p.runs, &states, dout, &mut dstates, gradients);
    let twice = |x: &[f32]| x.iter().map(|x| x + x).collect::<Vec<f32>>();
    assert_eq!(out.da, twice(&alone.da));
    assert_eq!(out.ddt_bias, twice(&alone.ddt_bias));
    assert_eq!(out.dd, alone.dd.as_deref().map(twice));
    assert_eq!((out.dx, out.ddt, out.db, out.dc), (alone.dx, alone.ddt, alone.db, alone.dc));
    assert_eq!((out.dz, out.dstates), (alone.dz, alone.dstates));
}

#[test]
fn problems_of_no_heads_no_channels_no_state_or_no_tokens_are_fine() {
    for (sizes, runs) in [
        ([0, 3, 1, 4], &[3][..]),
        ([2, 0, 1, 4], &[3]),
        ([2, 3, 1, 0], &[50, 2]),
        ([2, 3, 1, 4], &[0, 0]),
        ([2, 3, 1, 4], &[]),
    ] {
        for choices in [0, 2, 8] {
            Problem::new(sizes, runs, 7).with(choices).check();
        }
    }
}

#[test]
#[should_panic(expected = "dz")]
fn a_gate_without_room_for_its_gradient_panics() {
    let p = Problem::new([1, 2, 1, 2], &[2], 3);
    let input = Ssd { z: Some(Rows::dense(&p.x, 2)), ..p.input(Level::detect()) };
    let [mut dx, mut ddt, mut db, mut dc, mut da] = [4, 2, 4, 4, 1].map(|len| vec![0.0; len]);
    let gradients = SsdGradients {
        dx: &mut dx,
        ddt: &mut ddt,
        db: &mut db,
        dc: &mut dc,
        dz: None,
        da: &mut da,
        ddt_bias: None,
        dd: None,
    };
    let dout = Rows::dense(&p.dout, 2);
    let dstate = &mut p.dstates[0].clone()[..];
    ssd_backward(&input, &p.runs, &[&p.states[0]], dout, &mut [dstate], gradients);
}
