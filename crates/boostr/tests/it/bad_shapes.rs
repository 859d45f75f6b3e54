//! Arguments that disagree are errors of every operation in both bodies, never a panic. Views that are
//! not contiguous do not disagree.

use std::sync::Arc;

use crate::bodies::{BODIES, Body, Floats, laid_out, weight};
use crate::common::{Random, cpu};
use crate::tiny::{entry, floats};
use boostr::backend::{Cpu, DType, Tensor};
use boostr::checkpoint::Dtype;
use boostr::ops::{
    Activation, CausalConv, Client, Decay, DecayGate, DeltaInput, GatedNorm, HostBytes, LinearOps,
    SsdInput, SsmKernelOps, generic, tensor, to_vec, zeros,
};
use boostr::{Error, Result};

fn f32s(shape: &[usize]) -> Floats {
    zeros(&cpu(), shape).unwrap()
}

/// A tensor of another type than F32.
fn f64s(shape: &[usize]) -> Floats {
    let device = Default::default();
    Tensor::<Cpu>::zeros(shape, DType::F64, &device).unwrap()
}

#[track_caller]
fn refused(what: &str, body: Body, result: Result<Floats>) {
    let error = result.err().unwrap_or_else(|| panic!("{body:?} took {what}"));
    let clear = matches!(error, Error::Shape { .. } | Error::Argument { .. });
    assert!(clear, "{body:?}, {what}: {error:?}");
}

#[test]
fn causal_conv1d_refuses_what_disagrees() {
    let (w, b) = (f32s(&[4, 3]), f32s(&[3]));
    let good = CausalConv { weight: &w, bias: Some(&b), silu: true };
    for body in BODIES {
        let run = |x: &Floats, conv: &CausalConv<'_, Cpu>, runs: &[usize], windows: &[&[usize]]| {
            let mut windows: Vec<_> = windows.iter().map(|shape| f32s(shape)).collect();
            body.conv(x, conv, runs, &mut windows.iter_mut().collect::<Vec<_>>())
        };
        let (x, window) = (f32s(&[5, 3]), &[3, 3][..]);
        let with_weight =
            |weight: &Floats| run(&x, &CausalConv { weight, ..good.clone() }, &[5], &[window]);
        let with_bias = |bias: &Floats| {
            run(&x, &CausalConv { bias: Some(bias), ..good.clone() }, &[5], &[window])
        };
        run(&x, &good, &[5], &[window]).unwrap();
        run(&x, &good, &[2, 0, 3], &[window; 3]).unwrap();
        for shape in [&[5][..], &[5, 3, 1], &[5, 4], &[5, 2], &[3, 5]] {
            refused("x", body, run(&f32s(shape), &good, &[5], &[window]));
        }
        for shape in [&[4][..], &[4, 3, 1], &[4, 4], &[0, 3]] {
            refused("weight", body, with_weight(&f32s(shape)));
        }
        for shape in [&[][..], &[4], &[1, 3]] {
            refused("bias", body, with_bias(&f32s(shape)));
        }
        for runs in [&[4][..], &[6], &[2, 2], &[usize::MAX, 6], &[]] {
            let windows = vec![window; runs.len()];
            refused("runs", body, run(&x, &good, runs, &windows));
        }
        refused("no window", body, run(&x, &good, &[5], &[]));
        refused("two windows", body, run(&x, &good, &[5], &[window; 2]));
        for shape in [&[4, 3][..], &[2, 3], &[3, 4], &[9]] {
            refused("window", body, run(&x, &good, &[5], &[shape]));
        }
        refused("x of F64", body, run(&f64s(&[5, 3]), &good, &[5], &[window]));
        refused("weight of F64", body, with_weight(&f64s(&[4, 3])));
        refused("bias of F64", body, with_bias(&f64s(&[3])));
        refused("window of F64", body, body.conv(&x, &good, &[5], &mut [&mut f64s(&[3, 3])]));
    }
}

#[test]
fn norms_refuse_what_disagrees() {
    let (x, w) = (f32s(&[2, 6]), f32s(&[6]));
    for body in BODIES {
        body.rmsnorm(&x, &w, 1e-5).unwrap();
        for shape in [&[6][..], &[2, 6, 1], &[2, 5], &[6, 2]] {
            refused("x", body, body.rmsnorm(&f32s(shape), &w, 1e-5));
        }
        for shape in [&[][..], &[5], &[1, 6]] {
            refused("weight", body, body.rmsnorm(&x, &f32s(shape), 1e-5));
        }
        refused("weight of F64", body, body.rmsnorm(&x, &f64s(&[6]), 1e-5));
        refused("x of F64", body, body.rmsnorm(&f64s(&[2, 6]), &w, 1e-5));

        let good = GatedNorm {
            weight: &w,
            ngroups: 2,
            eps: 1e-5,
            norm_before_gate: false,
            activation: Activation::Silu,
        };
        body.gated(&x, &x, &good).unwrap();
        for shape in [&[6][..], &[2, 6, 1], &[2, 5], &[3, 6]] {
            refused("y", body, body.gated(&f32s(shape), &x, &good));
            refused("z", body, body.gated(&x, &f32s(shape), &good));
        }
        for ngroups in [0, 4, 7, usize::MAX] {
            refused("ngroups", body, body.gated(&x, &x, &GatedNorm { ngroups, ..good.clone() }));
        }
        let other = f32s(&[5]);
        let norm = GatedNorm { weight: &other, ..good.clone() };
        refused("weight", body, body.gated(&x, &x, &norm));
        refused("y of F64", body, body.gated(&f64s(&[2, 6]), &x, &good));
        refused("z of F64", body, body.gated(&x, &f64s(&[2, 6]), &good));
    }
}

#[test]
fn linear_refuses_what_disagrees() {
    let stored =
        |shape: &[usize]| weight(&entry(Dtype::BF16, shape, &vec![0.0; shape.iter().product()]));
    let (x, w) = (f32s(&[3, 4]), stored(&[5, 4]));
    for body in BODIES {
        body.linear(&x, &w, Some(&f32s(&[5])), Some(f32s(&[3, 5]))).unwrap();
        for shape in [&[4][..], &[3, 4, 1], &[3, 5], &[4, 3]] {
            refused("x", body, body.linear(&f32s(shape), &w, None, None));
        }
        for shape in [&[20][..], &[5, 4, 1], &[4, 5]] {
            refused("w", body, body.linear(&x, &stored(shape), None, None));
        }
        for shape in [&[4][..], &[1, 5]] {
            refused("bias", body, body.linear(&x, &w, Some(&f32s(shape)), None));
        }
        for shape in [&[15][..], &[5, 3], &[3, 4], &[1, 5]] {
            refused("add_to", body, body.linear(&x, &w, None, Some(f32s(shape))));
        }
        refused("x of F64", body, body.linear(&f64s(&[3, 4]), &w, None, None));
        refused("bias of F64", body, body.linear(&x, &w, Some(&f64s(&[5])), None));
        refused("add_to of F64", body, body.linear(&x, &w, None, Some(f64s(&[3, 5]))));
    }
}

#[test]
fn rows_that_are_not_there_are_refused() {
    let w = weight(&entry(Dtype::F16, &[5, 4], &[0.0; 20]));
    let flat = weight(&entry(Dtype::F16, &[20], &[0.0; 20]));
    for body in BODIES {
        for ids in [&[5][..], &[0, 4, 5], &[u32::MAX]] {
            refused("id", body, body.embedding(&w, ids));
        }
        refused("w", body, body.embedding(&flat, &[0]));
        for rows in [&[5][..], &[0, 4, 5], &[usize::MAX]] {
            refused("row", body, body.select_rows(&f32s(&[5, 4]), rows));
        }
        refused("x", body, body.select_rows(&f32s(&[5]), &[0]));
        refused("x of F64", body, body.select_rows(&f64s(&[5, 4]), &[0]));
        assert_eq!(body.embedding(&w, &[]).unwrap().shape(), [0, 4]);
        assert_eq!(body.select_rows(&f32s(&[5, 4]), &[]).unwrap().shape(), [0, 4]);
    }
}

#[test]
fn weights_that_their_bytes_do_not_fill_are_refused() {
    let bytes = || HostBytes::new(Arc::new(vec![0u8; 24]), 0..24).unwrap();
    for (dtype, shape) in [
        (DType::F32, &[2, 4][..]),
        (DType::F16, &[2, 3]),
        (DType::F32, &[]),
        (DType::F32, &[0, 6]),
        (DType::F32, &[usize::MAX, 2]),
        (DType::BF16, &[1 << 62, 1 << 62]),
        (DType::I32, &[2, 3]),
        (DType::F64, &[3]),
    ] {
        assert!(cpu().weight(bytes(), dtype, shape).is_err(), "{dtype:?} {shape:?}");
    }
    assert!(HostBytes::new(Arc::new(vec![0u8; 24]), 0..25).is_err());
    assert!(HostBytes::new(Arc::new(vec![0u8; 24]), usize::MAX - 1..usize::MAX).is_err());
}

/// Names and shapes of the inputs of an SSD call: T 5, H 4, P 3, G 2, N 6.
const SSD: [(&str, &[usize]); 8] = [
    ("x", &[5, 4, 3]),
    ("dt", &[5, 4]),
    ("a", &[4]),
    ("b", &[5, 2, 6]),
    ("c", &[5, 2, 6]),
    ("dt_bias", &[4]),
    ("d", &[4, 3]),
    ("z", &[5, 4, 3]),
];

fn run_ssd(body: Body, t: &[Floats; 8], runs: &[usize], states: &[&[usize]]) -> Result<Floats> {
    let [x, dt, a, b, c, dt_bias, d, z] = t;
    let a = Decay::new(a.clone())?;
    let input = SsdInput::new(x, dt, &a, b, c).dt_bias(dt_bias).d(d).z(z).dt_softplus(true);
    let mut states: Vec<_> = states.iter().map(|shape| f32s(shape)).collect();
    body.ssd(&input, runs, &mut states.iter_mut().collect::<Vec<_>>())
}

#[test]
fn decay_rates_above_zero_and_those_that_are_no_numbers_are_refused() {
    for (bad, name) in [(0.25, "0.25"), (f32::NAN, "NaN")] {
        let error = Decay::new(tensor(&cpu(), &[-1.0, bad], &[2]).unwrap()).err().unwrap();
        let expected = format!("argument `a`: expected no value above 0, found {name}");
        assert_eq!(error.to_string(), expected);
    }
    Decay::new(tensor(&cpu(), &[-1.0, 0.0, f32::NEG_INFINITY], &[3]).unwrap()).unwrap();
}

#[test]
fn ssd_refuses_what_disagrees() {
    let good = || SSD.map(|(_, shape)| f32s(shape));
    let state = &[4, 3, 6][..];
    for body in BODIES {
        run_ssd(body, &good(), &[5], &[state]).unwrap();
        run_ssd(body, &good(), &[1, 0, 4], &[state; 3]).unwrap();
        for (i, (name, shape)) in SSD.into_iter().enumerate() {
            let mut wrong = vec![[shape, &[1]].concat(), shape[1..].to_vec(), Vec::new()];
            for dim in 0..shape.len() {
                for size in [0, shape[dim] - 1, shape[dim] + 1, 7] {
                    let mut other = shape.to_vec();
                    other[dim] = size;
                    wrong.push(other);
                }
            }
            for shape in wrong {
                let mut inputs = good();
                inputs[i] = f32s(&shape);
                let what = format!("{name} {shape:?}");
                refused(&what, body, run_ssd(body, &inputs, &[5], &[state]));
            }
            let mut inputs = good();
            inputs[i] = f64s(shape);
            refused(&format!("{name} of F64"), body, run_ssd(body, &inputs, &[5], &[state]));
        }
        for runs in [&[4][..], &[6], &[2, 2], &[usize::MAX, 6], &[]] {
            refused("runs", body, run_ssd(body, &good(), runs, &vec![state; runs.len()]));
        }
        refused("no state", body, run_ssd(body, &good(), &[5], &[]));
        for shape in [&[4, 3][..], &[4, 3, 5], &[3, 4, 6], &[72]] {
            refused("state", body, run_ssd(body, &good(), &[5], &[shape]));
        }
        // Three groups cannot share four heads.
        let mut inputs = good();
        (inputs[3], inputs[4]) = (f32s(&[5, 3, 6]), f32s(&[5, 3, 6]));
        refused("groups", body, run_ssd(body, &inputs, &[5], &[state]));
        for dt_limit in [(0.2, 0.1), (f32::NAN, 1.0), (0.0, f32::NAN)] {
            let [x, dt, a, b, c, ..] = &good();
            let a = Decay::new(a.clone()).unwrap();
            let input = SsdInput::new(x, dt, &a, b, c).dt_softplus(true).dt_limit(dt_limit);
            refused("dt_limit", body, body.ssd(&input, &[5], &mut [&mut f32s(state)]));
        }
    }
}

/// Inputs of the delta rule: 5 tokens, 2 key heads of 6, 4 value heads of 3; g by heads or by channels.
fn delta(by_channel: bool) -> [(&'static str, Vec<usize>); 5] {
    let g = if by_channel { vec![5, 4, 6] } else { vec![5, 4] };
    [
        ("q", vec![5, 2, 6]),
        ("k", vec![5, 2, 6]),
        ("v", vec![5, 4, 3]),
        ("g", g),
        ("beta", vec![5, 4]),
    ]
}

fn run_delta(
    body: Body,
    by_channel: bool,
    [q, k, v, g, beta]: &[Floats; 5],
    runs: &[usize],
    states: &[&[usize]],
) -> Result<Floats> {
    let input = DeltaInput { q, k, v, g, beta, scale: 0.5 };
    let mut states: Vec<_> = states.iter().map(|shape| f32s(shape)).collect();
    body.delta(&input, by_channel, runs, &mut states.iter_mut().collect::<Vec<_>>())
}

#[test]
fn the_delta_rule_refuses_what_disagrees() {
    let state = &[4, 6, 3][..];
    for (body, by_channel) in BODIES.iter().flat_map(|&body| [(body, false), (body, true)]) {
        let shapes = delta(by_channel);
        let good = || shapes.each_ref().map(|(_, shape)| f32s(shape));
        let run = |inputs: &[Floats; 5], runs: &[usize], states: &[&[usize]]| {
            run_delta(body, by_channel, inputs, runs, states)
        };
        run(&good(), &[5], &[state]).unwrap();
        run(&good(), &[1, 0, 4], &[state; 3]).unwrap();
        for (i, (name, shape)) in shapes.iter().enumerate() {
            let mut wrong = vec![[shape, &[1][..]].concat(), shape[1..].to_vec(), Vec::new()];
            for dim in 0..shape.len() {
                for size in [0, shape[dim] - 1, shape[dim] + 1, 7] {
                    let mut other = shape.clone();
                    other[dim] = size;
                    wrong.push(other);
                }
            }
            for shape in wrong {
                let mut inputs = good();
                inputs[i] = f32s(&shape);
                refused(&format!("{name} {shape:?}"), body, run(&inputs, &[5], &[state]));
            }
            let mut inputs = good();
            inputs[i] = f64s(shape);
            refused(&format!("{name} of F64"), body, run(&inputs, &[5], &[state]));
        }
        for runs in [&[4][..], &[6], &[2, 2], &[usize::MAX, 6], &[]] {
            refused("runs", body, run(&good(), runs, &vec![state; runs.len()]));
        }
        refused("no state", body, run(&good(), &[5], &[]));
        for shape in [&[4, 6][..], &[4, 3, 6], &[3, 6, 4], &[72]] {
            refused("state", body, run(&good(), &[5], &[shape]));
        }
        // Three key heads cannot serve four value heads.
        let mut inputs = good();
        (inputs[0], inputs[1]) = (f32s(&[5, 3, 6]), f32s(&[5, 3, 6]));
        refused("heads", body, run(&inputs, &[5], &[state]));
    }
}

#[test]
fn the_decay_gate_and_the_l2_norm_refuse_what_disagrees() {
    let (a, a_log, dt_bias) = (f32s(&[3, 6]), f32s(&[2]), f32s(&[6]));
    for body in BODIES {
        let gate = |a: &Floats, a_log: &Floats, dt_bias: &Floats| {
            body.decay_gate(&DecayGate { a, a_log, dt_bias })
        };
        gate(&a, &a_log, &dt_bias).unwrap();
        for shape in [&[6][..], &[3, 6, 1], &[3, 5]] {
            refused("a", body, gate(&f32s(shape), &a_log, &dt_bias));
        }
        for shape in [&[][..], &[0], &[4], &[1, 2]] {
            refused("a_log", body, gate(&a, &f32s(shape), &dt_bias));
        }
        refused("dt_bias", body, gate(&a, &a_log, &f32s(&[2])));
        refused("a of F64", body, gate(&f64s(&[3, 6]), &a_log, &dt_bias));
        body.l2norm(&a, 3, 1e-6).unwrap();
        for group in [0, 4, 7, usize::MAX] {
            refused("group", body, body.l2norm(&a, group, 1e-6));
        }
        refused("x", body, body.l2norm(&dt_bias, 3, 1e-6));
        refused("x of F64", body, body.l2norm(&f64s(&[3, 6]), 3, 1e-6));
    }
}

#[test]
fn the_delta_rule_reads_any_layout() {
    for (body, by_channel) in BODIES.iter().flat_map(|&body| [(body, false), (body, true)]) {
        let run = |layout: usize| {
            let shapes = delta(by_channel);
            let mut i = 0;
            let [q, k, v, g, beta] = shapes.map(|(_, shape)| {
                i += 1;
                same(layout + i * layout.min(1), i as u64, &shape)
            });
            let input = DeltaInput { q: &q, k: &k, v: &v, g: &g, beta: &beta, scale: 0.5 };
            let mut state = same(layout, 9, &[4, 6, 3]);
            let out = body.delta(&input, by_channel, &[5], &mut [&mut state]).unwrap();
            (to_vec(&out).unwrap(), to_vec(&state).unwrap())
        };
        let dense = run(0);
        for layout in [1, 2, 3] {
            assert_eq!(run(layout), dense, "{body:?}, layout {layout}");
        }
    }
}

/// The stages on B 2, L 7, H 4, P 3, G 2, N 6 in chunks of 3; `shape` may replace one argument's.
fn run_stages(body: Body, shape: &dyn Fn(&'static str, &[usize]) -> Floats) -> Vec<Result<Floats>> {
    let client = cpu();
    let (x, dt_raw, a) = (shape("x", &[2, 7, 4, 3]), shape("dt_raw", &[2, 7, 4]), shape("a", &[4]));
    let (b, c) = (shape("b", &[2, 7, 2, 6]), shape("c", &[2, 7, 2, 6]));
    let (dt, sums) = (shape("dt", &[2, 4, 3, 3]), shape("sums", &[2, 4, 3, 3]));
    let (states, d) = (shape("states", &[2, 3, 4, 3, 6]), shape("d", &[4]));
    let bias = shape("dt_bias", &[4]);
    match body {
        Body::Portable => vec![
            generic::ssd_chunk_cumsum(client.library(), &dt_raw, &a, Some(&bias), 3, true)
                .map(|x| x.1),
            generic::ssd_chunk_state(client.library(), &x, &b, &dt, &sums),
            generic::ssd_state_passing(client.library(), &states, &sums),
            generic::ssd_chunk_scan(client.library(), &x, &states, &c, &sums, Some(&d)),
            generic::ssd_chunk_intra(client.library(), &x, &b, &c, &dt, &sums),
        ],
        Body::Kernels => vec![
            client.ssd_chunk_cumsum(&dt_raw, &a, Some(&bias), 3, true).map(|x| x.1),
            client.ssd_chunk_state(&x, &b, &dt, &sums),
            client.ssd_state_passing(&states, &sums),
            client.ssd_chunk_scan(&x, &states, &c, &sums, Some(&d)),
            client.ssd_chunk_intra(&x, &b, &c, &dt, &sums),
        ],
    }
}

#[test]
fn stages_of_ssd_refuse_what_disagrees() {
    // Which of the five stages take which argument.
    let uses: [(&str, &[usize]); 10] = [
        ("x", &[1, 3, 4]),
        ("dt_raw", &[0]),
        ("a", &[0]),
        ("dt_bias", &[0]),
        ("b", &[1, 4]),
        ("c", &[3, 4]),
        ("dt", &[1, 4]),
        ("sums", &[1, 2, 3, 4]),
        ("states", &[2, 3]),
        ("d", &[3]),
    ];
    for body in BODIES {
        assert!(run_stages(body, &|_, shape| f32s(shape)).iter().all(Result::is_ok));
        for (name, stages) in uses {
            for change in ["rank", "less", "more", "F64"] {
                let results = run_stages(body, &|argument, shape| {
                    let mut shape = shape.to_vec();
                    if argument == name {
                        match change {
                            "rank" => shape.push(1),
                            // The first dimension of these is batch or heads, known to each stage.
                            "less" => shape[0] -= 1,
                            "more" => shape[0] += 1,
                            _ => return f64s(&shape),
                        }
                    }
                    f32s(&shape)
                });
                for (stage, result) in results.into_iter().enumerate() {
                    // A lone batch of raw steps is a problem of its own.
                    let alone = name == "dt_raw" && matches!(change, "less" | "more");
                    if stages.contains(&stage) && !alone {
                        let what = format!("stage {stage}: {name}, {change}");
                        assert!(result.is_err(), "{body:?} took {what}");
                    }
                }
            }
        }
        // Lengths of b and c that are not x's, by a little and by a chunk.
        for (name, stages) in [("b", [1, 4]), ("c", [3, 4])] {
            for len in [0, 6, 8, 9, 10, 100] {
                let results = run_stages(body, &|argument, shape| {
                    let mut shape = shape.to_vec();
                    if argument == name {
                        shape[1] = len;
                    }
                    f32s(&shape)
                });
                for stage in stages {
                    assert!(
                        results[stage].is_err(),
                        "{body:?}, stage {stage} took {name} of {len}"
                    );
                }
            }
        }
        refused("chunk_size", body, {
            let (dt, a) = (f32s(&[2, 7, 4]), f32s(&[4]));
            match body {
                Body::Portable => {
                    generic::ssd_chunk_cumsum(cpu().library(), &dt, &a, None, 0, true)
                }
                Body::Kernels => cpu().ssd_chunk_cumsum(&dt, &a, None, 0, true),
            }
            .map(|x| x.0)
        });
    }
}

/// Values for each layout, from the same generator.
fn same(layout: usize, seed: u64, shape: &[usize]) -> Floats {
    laid_out(layout, &floats(&mut Random(seed), shape.iter().product()), shape)
}

#[test]
fn parameters_that_are_views_equal_their_copies() {
    for body in BODIES {
        let results = [0, 1, 2].map(|layout| {
            let of = |seed, shape: &[usize]| same(layout, seed, shape);
            let (weight_of_conv, bias) = (of(1, &[4, 6]), of(2, &[6]));
            let conv = CausalConv { weight: &weight_of_conv, bias: Some(&bias), silu: true };
            let (mut window, x) = (of(3, &[3, 6]), of(4, &[5, 6]));
            let norm = GatedNorm {
                weight: &bias,
                ngroups: 2,
                eps: 1e-5,
                norm_before_gate: false,
                activation: Activation::Silu,
            };
            let w = weight(&entry(Dtype::F32, &[6, 6], &floats(&mut Random(5), 36)));
            [
                ("conv", body.conv(&x, &conv, &[5], &mut [&mut window])),
                ("rmsnorm", body.rmsnorm(&x, &bias, 1e-5)),
                ("gated", body.gated(&x, &x, &norm)),
                ("linear", body.linear(&x, &w, Some(&bias), Some(x.clone()))),
            ]
            .map(|(what, result)| {
                let out =
                    result.unwrap_or_else(|e| panic!("{body:?} {what}, layout {layout}: {e}"));
                to_vec(&out).unwrap()
            })
        });
        assert_eq!(results[0], results[1], "{body:?}");
        assert_eq!(results[0], results[2], "{body:?}");
    }
}

/// The tensor library makes tensors of any layout over any storage, and copies what they say.
#[test]
fn layouts_outside_of_their_storage_are_refused() {
    use numr::tensor::{Layout, Tensor};
    let w = f32s(&[4]);
    let outside = [
        Layout::new(vec![4, 4], vec![1, 1_000_000], 0),
        Layout::new(vec![4, 4], vec![4, 1], 8),
        Layout::new(vec![4, 4], vec![4, -1], 0),
        Layout::new(vec![4, 4], vec![isize::MAX, 1], 0),
    ];
    for layout in outside {
        let x: Floats = Tensor::from_parts(f32s(&[16]).storage().clone(), layout);
        for body in BODIES {
            refused("x", body, body.rmsnorm(&x, &w, 1e-5));
        }
        refused("x", Body::Kernels, to_vec(&x).map(|_| f32s(&[1])));
    }
    let layout = Layout::new(vec![1, 4, 4], vec![0, 1, 1_000_000], 0);
    let dt: Floats = Tensor::from_parts(f32s(&[16]).storage().clone(), layout);
    assert!(cpu().ssd_chunk_cumsum(&dt, &w, None, 2, true).is_err());
    assert!(cpu().ssd_chunk_cumsum(&f32s(&[1, 4, 4]), &w, None, 2, true).is_ok());
}
