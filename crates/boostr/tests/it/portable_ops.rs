//! Operations of any shape and layout equal their definition in f64. Portable bodies and CPU kernels
//! are each compared with the definition, not with each other.

use crate::bodies::{BODIES, Body, laid_out, weight};
use crate::common::Random;
use crate::tiny::{close, entry, floats, norm, silu, widened};
use boostr::checkpoint::Dtype;
use boostr::ops::{Activation, CausalConv, Decay, GatedNorm, SsdInput, to_vec};
use boostr_kernels::{Level, Rows, ssd};
use proptest::collection::vec;
use proptest::prelude::*;

/// Rounding of f32 in sums of up to some hundred terms of about 1.
const TOLERANCE: f64 = 1e-5;

const MATRICES: [Dtype; 3] = [Dtype::F32, Dtype::BF16, Dtype::F16];

/// Out `[T, C]` and the windows after it.
fn convolved(
    [x, taps, bias]: [&[f32]; 3],
    apply_silu: bool,
    channels: usize,
    runs: &[usize],
    windows: &[Vec<f32>],
) -> (Vec<f64>, Vec<Vec<f32>>) {
    let ntaps = taps.len() / channels;
    let (mut out, mut after, mut first) = (Vec::new(), Vec::new(), 0);
    for (&len, window) in runs.iter().zip(windows) {
        let input = [window, &x[first * channels..(first + len) * channels]].concat();
        for i in 0..len * channels {
            let (t, c) = (i / channels, i % channels);
            let term = |k: usize| {
                f64::from(taps[k * channels + c]) * f64::from(input[(t + k) * channels + c])
            };
            let sum = (0..ntaps).map(term).sum::<f64>() + bias.get(c).map_or(0.0, |&b| b.into());
            out.push(if apply_silu { silu(sum) } else { sum });
        }
        after.push(input[len * channels..].to_vec());
        first += len;
    }
    (out, after)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn causal_conv1d_is_its_definition(
        seed in 1u64..,
        runs in vec(0usize..20, 1..5),
        channels in 1usize..40,
        taps in 1usize..6,
        with_bias: bool,
        silu: bool,
        layout in 0usize..3,
    ) {
        let mut random = Random(seed);
        let tokens: usize = runs.iter().sum();
        let x = floats(&mut random, tokens * channels);
        let w = floats(&mut random, taps * channels);
        let bias = if with_bias { floats(&mut random, channels) } else { Vec::new() };
        let windows: Vec<Vec<f32>> =
            runs.iter().map(|_| floats(&mut random, (taps - 1) * channels)).collect();
        let (want, after) = convolved([&x, &w, &bias], silu, channels, &runs, &windows);
        for body in BODIES {
            let x = laid_out(layout, &x, &[tokens, channels]);
            let w = laid_out(0, &w, &[taps, channels]);
            let bias = with_bias.then(|| laid_out(0, &bias, &[channels]));
            let mut windows: Vec<_> =
                windows.iter().map(|w| laid_out(layout, w, &[taps - 1, channels])).collect();
            let conv = CausalConv { weight: &w, bias: bias.as_ref(), silu };
            let out = body.conv(&x, &conv, &runs, &mut windows.iter_mut().collect::<Vec<_>>());
            let out = out.unwrap();
            prop_assert_eq!(out.shape(), [tokens, channels]);
            close(&to_vec(&out).unwrap(), &want, TOLERANCE);
            for (window, after) in windows.iter().zip(&after) {
                prop_assert_eq!(&to_vec(window).unwrap(), after);
            }
        }
    }

    #[test]
    fn rmsnorm_is_its_definition(
        seed in 1u64..,
        tokens in 0usize..9,
        width in 1usize..130,
        size in -6i32..6,
        layout in 0usize..3,
    ) {
        let mut random = Random(seed);
        let x: Vec<f32> =
            floats(&mut random, tokens * width).iter().map(|x| x * 10f32.powi(size)).collect();
        let w = floats(&mut random, width);
        let want: Vec<f64> = x
            .chunks_exact(width)
            .flat_map(|row| norm(&widened(row), &widened(&w), 1, f64::from(1e-5f32)))
            .collect();
        for body in BODIES {
            let x = laid_out(layout, &x, &[tokens, width]);
            let out = body.rmsnorm(&x, &laid_out(0, &w, &[width]), 1e-5).unwrap();
            prop_assert_eq!(out.shape(), [tokens, width]);
            close(&to_vec(&out).unwrap(), &want, TOLERANCE);
        }
    }

    #[test]
    fn gated_rmsnorm_is_its_definition_in_both_orders(
        seed in 1u64..,
        tokens in 0usize..9,
        ngroups in 1usize..5,
        group in 1usize..40,
        norm_before_gate: bool,
        layouts in (0usize..3, 0usize..3),
    ) {
        let mut random = Random(seed);
        let width = ngroups * group;
        let [y, z] = [1.0, 6.0].map(|scale| -> Vec<f32> {
            floats(&mut random, tokens * width).iter().map(|x| scale * x).collect()
        });
        let w = floats(&mut random, width);
        let gated = |y: &[f64], z: &[f32]| -> Vec<f64> {
            y.iter().zip(z).map(|(y, &z)| y * silu(z.into())).collect()
        };
        let (wide_w, eps) = (widened(&w), f64::from(1e-5f32));
        let want: Vec<f64> = y
            .chunks_exact(width)
            .zip(z.chunks_exact(width))
            .flat_map(|(y, z)| {
                if norm_before_gate {
                    gated(&norm(&widened(y), &wide_w, ngroups, eps), z)
                } else {
                    norm(&gated(&widened(y), z), &wide_w, ngroups, eps)
                }
            })
            .collect();
        for body in BODIES {
            let weight = laid_out(0, &w, &[width]);
            let activation = Activation::Silu;
            let norm = GatedNorm { weight: &weight, ngroups, eps: 1e-5, norm_before_gate, activation };
            let y = laid_out(layouts.0, &y, &[tokens, width]);
            let z = laid_out(layouts.1, &z, &[tokens, width]);
            let out = body.gated(&y, &z, &norm).unwrap();
            prop_assert_eq!(out.shape(), [tokens, width]);
            close(&to_vec(&out).unwrap(), &want, TOLERANCE);
        }
    }

    #[test]
    fn linear_is_its_definition_in_every_stored_type(
        seed in 1u64..,
        tokens in 0usize..20,
        width in 1usize..150,
        features in 1usize..50,
        with_bias: bool,
        with_residual: bool,
        layouts in (0usize..3, 0usize..3),
    ) {
        let mut random = Random(seed);
        let x = floats(&mut random, tokens * width);
        let w = floats(&mut random, features * width);
        let bias = floats(&mut random, features);
        let residual = floats(&mut random, tokens * features);
        for dtype in MATRICES {
            let w = entry(dtype, &[features, width], &w);
            let stored = w.to_f32().unwrap();
            let want: Vec<f64> = (0..tokens * features)
                .map(|i| {
                    let (t, f) = (i / features, i % features);
                    let product = |k| {
                        f64::from(x[t * width + k]) * f64::from(stored[f * width + k])
                    };
                    (0..width).map(product).sum::<f64>()
                        + if with_bias { f64::from(bias[f]) } else { 0.0 }
                        + if with_residual { f64::from(residual[i]) } else { 0.0 }
                })
                .collect();
            for body in BODIES {
                let x = laid_out(layouts.0, &x, &[tokens, width]);
                let bias = with_bias.then(|| laid_out(0, &bias, &[features]));
                let add_to =
                    with_residual.then(|| laid_out(layouts.1, &residual, &[tokens, features]));
                let shared = add_to.clone();
                let out = body.linear(&x, &weight(&w), bias.as_ref(), add_to).unwrap();
                prop_assert_eq!(out.shape(), [tokens, features]);
                close(&to_vec(&out).unwrap(), &want, TOLERANCE);
                // What was added to is as it was for those who share it.
                if let Some(shared) = shared {
                    prop_assert_eq!(&to_vec(&shared).unwrap(), &residual);
                }
            }
        }
    }

    #[test]
    fn embedding_and_select_rows_are_the_rows(
        seed in 1u64..,
        rows in 1usize..50,
        width in 1usize..40,
        count in 0usize..30,
        layout in 0usize..3,
    ) {
        let mut random = Random(seed);
        let values = floats(&mut random, rows * width);
        let picked: Vec<usize> = (0..count).map(|_| random.below(rows)).collect();
        let ids: Vec<u32> = picked.iter().map(|&row| row as u32).collect();
        let want = |values: &[f32]| -> Vec<f32> {
            picked.iter().flat_map(|row| &values[row * width..][..width]).copied().collect()
        };
        for body in BODIES {
            for dtype in MATRICES {
                let w = entry(dtype, &[rows, width], &values);
                let got = body.embedding(&weight(&w), &ids).unwrap();
                prop_assert_eq!(got.shape(), [count, width]);
                prop_assert_eq!(to_vec(&got).unwrap(), want(&w.to_f32().unwrap()));
            }
            let got = body.select_rows(&laid_out(layout, &values, &[rows, width]), &picked).unwrap();
            prop_assert_eq!(got.shape(), [count, width]);
            prop_assert_eq!(to_vec(&got).unwrap(), want(&values));
        }
    }

    #[test]
    fn ssd_is_its_recurrence(
        seed in 1u64..,
        runs in vec(prop_oneof![0usize..4, 0usize..140], 1..4),
        ngroups in 1usize..4,
        heads_per_group in 1usize..4,
        headdim in 1usize..12,
        dstate in 1usize..20,
        skip in 0usize..3,
        with_gate: bool,
        dt_softplus: bool,
        with_bias: bool,
        limited: bool,
        layout in 0usize..3,
    ) {
        let mut random = Random(seed);
        let nheads = ngroups * heads_per_group;
        let tokens: usize = runs.iter().sum();
        let mut floats = |count: usize| floats(&mut random, count);
        let x = floats(tokens * nheads * headdim);
        let z = floats(tokens * nheads * headdim);
        let b = floats(tokens * ngroups * dstate);
        let c = floats(tokens * ngroups * dstate);
        // Raw steps below zero need softplus, or a limit, or none at all.
        let dt: Vec<f32> = floats(tokens * nheads)
            .iter()
            .map(|x| if dt_softplus { 4.0 * x - 3.0 } else { 0.5 + 0.5 * x })
            .collect();
        let a: Vec<f32> = floats(nheads).iter().map(|x| -(2.0 * x).exp()).collect();
        let a_largest = a.iter().fold(0.0f32, |m, a| m.max(a.abs()));
        let dt_bias: Vec<f32> = floats(nheads).iter().map(|x| 0.5 + 0.5 * x).collect();
        let d = floats(nheads * if skip == 2 { headdim } else { 1 });
        let initial: Vec<Vec<f32>> =
            runs.iter().map(|_| floats(nheads * headdim * dstate)).collect();
        let dt_limit = if limited { (0.05, 0.5) } else { (0.0, f32::INFINITY) };

        let definition = ssd::Ssd {
            level: Level::detect(),
            nheads,
            headdim,
            ngroups,
            dstate,
            x: Rows::dense(&x, nheads * headdim),
            dt: Rows::dense(&dt, nheads),
            a: &a,
            b: Rows::dense(&b, ngroups * dstate),
            c: Rows::dense(&c, ngroups * dstate),
            dt_bias: with_bias.then_some(&dt_bias[..]),
            d: (skip > 0).then_some(&d[..]),
            z: with_gate.then(|| Rows::dense(&z, nheads * headdim)),
            dt_softplus,
            dt_limit,
        };
        let mut after: Vec<Vec<f64>> = initial.iter().map(|s| widened(s)).collect();
        let want = ssd::recurrence(&definition, &runs, &mut after);

        for body in BODIES {
            let x = laid_out(layout, &x, &[tokens, nheads, headdim]);
            let z = with_gate.then(|| laid_out(layout, &z, &[tokens, nheads, headdim]));
            let b = laid_out(layout, &b, &[tokens, ngroups, dstate]);
            let c = laid_out(layout, &c, &[tokens, ngroups, dstate]);
            let dt = laid_out(layout, &dt, &[tokens, nheads]);
            let (a, bias) = (laid_out(layout, &a, &[nheads]), laid_out(layout, &dt_bias, &[nheads]));
            let d = match skip {
                0 => None,
                1 => Some(laid_out(layout, &d, &[nheads])),
                _ => Some(laid_out(layout, &d, &[nheads, headdim])),
            };
            let a = Decay::new(a).unwrap();
            let input = SsdInput::new(&x, &dt, &a, &b, &c)
                .dt_bias(with_bias.then_some(&bias))
                .d(d.as_ref())
                .z(z.as_ref())
                .dt_softplus(dt_softplus)
                .dt_limit(dt_limit);
            let mut states: Vec<_> = initial
                .iter()
                .map(|s| laid_out(layout, s, &[nheads, headdim, dstate]))
                .collect();
            let y = body.ssd(&input, &runs, &mut states.iter_mut().collect::<Vec<_>>()).unwrap();
            prop_assert_eq!(y.shape(), [tokens, nheads, headdim]);
            // The portable body hands sums of exponents on in f32: chunks of 16 steps below 2.5.
            let largest = a_largest * 16.0 * 2.5;
            let tolerance = match body {
                Body::Portable => TOLERANCE + f64::from(f32::EPSILON * largest),
                Body::Kernels => TOLERANCE,
            };
            close(&to_vec(&y).unwrap(), &want, tolerance);
            for (state, after) in states.iter().zip(&after) {
                close(&to_vec(state).unwrap(), after, tolerance);
            }
        }
    }
}
