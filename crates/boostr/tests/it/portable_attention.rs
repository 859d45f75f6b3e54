//! Attention, rotary positions and elementwise steps equal their definition in f64. Portable bodies and
//! CPU kernels are each compared with the definition, not with each other.

use crate::bodies::{BODIES, laid_out};
use crate::common::Random;
use crate::tiny::{close, floats, silu};
use boostr::ops::{
    Activation, Attention, KvSizes, KvType, Rope, RopeScaling, RopeStyle, Yarn, to_vec,
};
use proptest::collection::vec;
use proptest::prelude::*;

/// Rounding of f32 in sums of up to some hundred terms of about 1.
const TOLERANCE: f64 = 1e-5;

/// The sizes of one call.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    nheads: usize,
    nheads_kv: usize,
    d_key: usize,
    d_value: usize,
}

/// `softmax(scale q · k) v` of one sequence, all of whose tokens are here: `[L, H, d_value]`.
fn attended(
    sizes: Sizes,
    [q, k, v]: [&[f32]; 3],
    scale: f64,
    window: Option<usize>,
    softcap: Option<f32>,
) -> Vec<f64> {
    let Sizes { nheads, nheads_kv, d_key, d_value } = sizes;
    let len = q.len() / (nheads * d_key);
    let mut out = Vec::new();
    for i in 0..len {
        for head in 0..nheads {
            let of = head / (nheads / nheads_kv);
            let first = window.map_or(0, |window| (i + 1).saturating_sub(window));
            let score = |j: usize| {
                let q = &q[(i * nheads + head) * d_key..][..d_key];
                let k = &k[(j * nheads_kv + of) * d_key..][..d_key];
                let dot: f64 = q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                let score = scale * dot;
                softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
            };
            let exps: Vec<f64> = (first..=i).map(|j| score(j).exp()).collect();
            let total: f64 = exps.iter().sum();
            for channel in 0..d_value {
                let value = |j: usize| f64::from(v[(j * nheads_kv + of) * d_value + channel]);
                out.push((first..=i).zip(&exps).map(|(j, e)| e / total * value(j)).sum());
            }
        }
    }
    out
}

/// Each head of each token turned by its position.
fn turned(x: &[f32], nheads: usize, headdim: usize, positions: &[usize], rope: &Rope) -> Vec<f64> {
    let pairs = rope.rotary_dim() / 2;
    let mut out: Vec<f64> = x.iter().copied().map(f64::from).collect();
    for (token, &position) in positions.iter().enumerate() {
        for head in 0..nheads {
            let first = (token * nheads + head) * headdim;
            for (pair, frequency) in rope.frequencies().iter().enumerate() {
                let (i, j) = match rope.style() {
                    RopeStyle::Half => (first + pair, first + pair + pairs),
                    RopeStyle::Interleaved => (first + 2 * pair, first + 2 * pair + 1),
                };
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                let (a, b) = (f64::from(x[i]), f64::from(x[j]));
                out[i] = rope.attention_factor() * (a * cos - b * sin);
                out[j] = rope.attention_factor() * (a * sin + b * cos);
            }
        }
    }
    out
}

fn activated(act: Activation, x: f32) -> f64 {
    let x = f64::from(x);
    match act {
        Activation::Silu => silu(x),
        // The integral of the normal density by Simpson's rule.
        Activation::Gelu => {
            let steps = 2000;
            let h = x / f64::from(steps);
            let density = |t: f64| (-t * t / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
            let weight = |i: i32| match i {
                0 => 1.0,
                i if i == steps => 1.0,
                i if i % 2 == 1 => 4.0,
                _ => 2.0,
            };
            let sum: f64 = (0..=steps).map(|i| weight(i) * density(h * f64::from(i))).sum();
            x * (0.5 + sum * h / 3.0)
        }
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::Relu2 => x.max(0.0) * x.max(0.0),
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Activation::Identity => x,
    }
}

const ACTIVATIONS: [Activation; 5] = [
    Activation::Silu,
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::Relu2,
    Activation::Sigmoid,
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn attention_is_its_definition_however_the_sequences_come(
        seed in 1u64..,
        lens in vec(0usize..40, 1..4),
        (nheads_kv, per_kv) in (1usize..4, 1usize..4),
        (d_key, d_value) in (1usize..40, 1usize..40),
        window in proptest::option::of(1usize..30),
        softcap in proptest::option::of(1.0f32..30.0),
        layout in 0usize..3,
    ) {
        let mut random = Random(seed);
        let sizes = Sizes { nheads: nheads_kv * per_kv, nheads_kv, d_key, d_value };
        let scale = (d_key as f32).sqrt().recip();
        let sequences: Vec<[Vec<f32>; 3]> = lens
            .iter()
            .map(|len| {
                [sizes.nheads * d_key, nheads_kv * d_key, nheads_kv * d_value]
                    .map(|width| floats(&mut random, len * width))
            })
            .collect();
        let want: Vec<Vec<f64>> = sequences
            .iter()
            .map(|[q, k, v]| attended(sizes, [q, k, v], scale.into(), window, softcap))
            .collect();
        // Each sequence in two calls, cut anywhere.
        let cuts: Vec<usize> = lens.iter().map(|len| random.below(len + 1)).collect();
        for body in BODIES {
            let kind = KvType::F32;
            let kv = KvSizes { nheads: nheads_kv, d_key, d_value, kind, latent: false };
            let mut caches: Vec<_> = lens.iter().map(|_| body.new_cache(kv).unwrap()).collect();
            let mut got = vec![Vec::new(); lens.len()];
            for half in 0..2 {
                let ranges: Vec<_> = lens
                    .iter()
                    .zip(&cuts)
                    .map(|(&len, &cut)| if half == 0 { 0..cut } else { cut..len })
                    .collect();
                let runs: Vec<usize> = ranges.iter().map(ExactSizeIterator::len).collect();
                let tokens = runs.iter().sum();
                let joined = |which: usize, shape: [usize; 2]| {
                    let width = shape[0] * shape[1];
                    let rows = sequences.iter().zip(&ranges).flat_map(|(sequence, range)| {
                        &sequence[which][range.start * width..range.end * width]
                    });
                    let rows: Vec<f32> = rows.copied().collect();
                    laid_out(if tokens == 0 { 0 } else { layout }, &rows, &[tokens, shape[0], shape[1]])
                };
                let q = joined(0, [sizes.nheads, d_key]);
                let (k, v) = (joined(1, [nheads_kv, d_key]), joined(2, [nheads_kv, d_value]));
                let input = Attention { q: &q, k: &k, v: &v, scale, window, softcap };
                let mut borrowed: Vec<_> = caches.iter_mut().collect();
                let out = body.attention(&input, &runs, &mut borrowed).unwrap();
                prop_assert_eq!(out.shape(), [tokens, sizes.nheads, d_value]);
                let out = to_vec(&out).unwrap();
                let mut rest = &out[..];
                for (got, run) in got.iter_mut().zip(&runs) {
                    let (own, others) = rest.split_at(run * sizes.nheads * d_value);
                    got.extend_from_slice(own);
                    rest = others;
                }
            }
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                close(got, want, TOLERANCE);
                prop_assert_eq!(caches[i].len(), lens[i]);
                if window.is_none() {
                    prop_assert_eq!(&caches[i].keys().unwrap(), &sequences[i][1]);
                    prop_assert_eq!(&caches[i].values().unwrap(), &sequences[i][2]);
                }
            }
        }
    }

    #[test]
    fn rope_is_its_definition(
        seed in 1u64..,
        tokens in 0usize..9,
        nheads in 1usize..4,
        (pairs, rest) in (0usize..20, 0usize..9),
        scaling in 0usize..5,
        interleaved: bool,
        layout in 0usize..3,
    ) {
        let mut random = Random(seed);
        let headdim = 2 * pairs + rest + 1;
        let scaling = match scaling {
            0 => RopeScaling::None,
            1 => RopeScaling::Linear { factor: 4.0 },
            2 => RopeScaling::Llama3 {
                factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max: 8192,
            },
            3 => RopeScaling::Yarn(Yarn::new(4.0, 2048)),
            _ => RopeScaling::PerDim { factors: (0..pairs).map(|i| 1.0 + i as f32).collect() },
        };
        let style = if interleaved { RopeStyle::Interleaved } else { RopeStyle::Half };
        let rope = Rope::new(2 * pairs, 10_000.0, &scaling, style);
        let positions: Vec<usize> = (0..tokens).map(|_| random.below(1 << 20)).collect();
        let x = floats(&mut random, tokens * nheads * headdim);
        let want = turned(&x, nheads, headdim, &positions, &rope);
        for body in BODIES {
            let layout = if tokens == 0 { 0 } else { layout };
            let x = laid_out(layout, &x, &[tokens, nheads, headdim]);
            let got = body.rope(&x, &positions, &rope).unwrap();
            prop_assert_eq!(got.shape(), [tokens, nheads, headdim]);
            close(&to_vec(&got).unwrap(), &want, TOLERANCE);
        }
    }

    #[test]
    fn elementwise_steps_are_their_definitions(
        seed in 1u64..,
        tokens in 1usize..6,
        width in 1usize..70,
        layout in 0usize..3,
    ) {
        let mut random = Random(seed);
        let mut made = || -> Vec<f32> {
            floats(&mut random, tokens * width).iter().map(|x| 4.0 * x).collect()
        };
        let (a, b) = (made(), made());
        let factors = floats(&mut random, width);
        for body in BODIES {
            let at = |values: &[f32]| laid_out(layout, values, &[tokens, width]);
            for act in ACTIVATIONS {
                let got = to_vec(&body.activate(act, &at(&a)).unwrap()).unwrap();
                let want: Vec<f64> = a.iter().map(|&x| activated(act, x)).collect();
                close(&got, &want, TOLERANCE);
                let got = to_vec(&body.glu(act, &at(&a), &at(&b)).unwrap()).unwrap();
                let want: Vec<f64> = want.iter().zip(&b).map(|(x, &y)| x * f64::from(y)).collect();
                close(&got, &want, 4.0 * TOLERANCE);
            }
            let pairs = || a.iter().zip(&b).map(|(&x, &y)| (f64::from(x), f64::from(y)));
            let got = to_vec(&body.add_scaled(at(&a), &at(&b), -0.75).unwrap()).unwrap();
            close(&got, &pairs().map(|(x, y)| x - 0.75 * y).collect::<Vec<_>>(), TOLERANCE);
            let columns = laid_out(0, &factors, &[width]);
            let got = to_vec(&body.scale_columns(&at(&a), &columns).unwrap()).unwrap();
            let want: Vec<f64> = (0..a.len())
                .map(|i| f64::from(a[i]) * f64::from(factors[i % width]))
                .collect();
            close(&got, &want, TOLERANCE);
        }
    }

    #[test]
    fn chosen_rows_are_added_with_their_factors(
        seed in 1u64..,
        tokens in 1usize..6,
        chosen in vec(0usize..6, 0..9),
        width in 1usize..40,
    ) {
        let mut random = Random(seed);
        let rows: Vec<usize> = chosen.into_iter().map(|row| row % tokens).collect();
        let (to, x) = (floats(&mut random, tokens * width), floats(&mut random, rows.len() * width));
        let factors = floats(&mut random, rows.len());
        let mut want: Vec<f64> = to.iter().copied().map(f64::from).collect();
        for (i, &row) in rows.iter().enumerate() {
            for column in 0..width {
                want[row * width + column] += f64::from(factors[i]) * f64::from(x[i * width + column]);
            }
        }
        for body in BODIES {
            let sum = body.add_rows(
                laid_out(0, &to, &[tokens, width]),
                &laid_out(0, &x, &[rows.len(), width]),
                &rows,
                &factors,
            );
            close(&to_vec(&sum.unwrap()).unwrap(), &want, TOLERANCE);
        }
    }

    #[test]
    fn columns_stand_side_by_side(
        seed in 1u64..,
        tokens in 0usize..6,
        [left, right] in [1usize..40, 1usize..40],
        layouts in (0usize..3, 0usize..3),
    ) {
        let mut random = Random(seed);
        let (x, y) = (floats(&mut random, tokens * left), floats(&mut random, tokens * right));
        let want: Vec<f32> = x
            .chunks_exact(left)
            .zip(y.chunks_exact(right))
            .flat_map(|(x, y)| [x, y].concat())
            .collect();
        for body in BODIES {
            let x = laid_out(layouts.0, &x, &[tokens, left]);
            let y = laid_out(layouts.1, &y, &[tokens, right]);
            let got = body.concat_columns(&x, &y).unwrap();
            prop_assert_eq!(got.shape(), [tokens, left + right]);
            prop_assert_eq!(&to_vec(&got).unwrap(), &want);
        }
    }
}

#[test]
fn bad_arguments_are_refused_and_leave_caches_as_they_are() {
    for body in BODIES {
        let kv = KvSizes { nheads: 2, d_key: 4, d_value: 4, kind: KvType::F32, latent: false };
        let mut cache = body.new_cache(kv).unwrap();
        let x = |shape: &[usize]| laid_out(0, &vec![0.5; shape.iter().product()], shape);
        let (q, k) = (x(&[3, 4, 4]), x(&[3, 2, 4]));
        let good = Attention { q: &q, k: &k, v: &k, scale: 0.5, window: None, softcap: None };
        body.attention(&good, &[3], &mut [&mut cache]).unwrap();
        let (three, narrow, short) = (x(&[3, 3, 4]), x(&[3, 2, 3]), x(&[2, 2, 4]));
        let none = x(&[3, 0, 4]);
        for (bad, runs) in [
            (Attention { k: &three, v: &three, ..good.clone() }, &[3usize][..]),
            (Attention { k: &narrow, ..good.clone() }, &[3]),
            (Attention { v: &narrow, ..good.clone() }, &[3]),
            (Attention { v: &short, ..good.clone() }, &[3]),
            (Attention { q: &none, ..good.clone() }, &[3]),
            (Attention { window: Some(0), ..good.clone() }, &[3]),
            (Attention { softcap: Some(0.0), ..good.clone() }, &[3]),
            (Attention { softcap: Some(f32::NAN), ..good.clone() }, &[3]),
            (good.clone(), &[2]),
            (good.clone(), &[1, 2]),
        ] {
            assert!(body.attention(&bad, runs, &mut [&mut cache]).is_err(), "{body:?} {bad:?}");
            assert_eq!(cache.len(), 3);
        }
        for bad in [
            KvSizes { nheads: 0, ..kv },
            KvSizes { d_key: 0, ..kv },
            KvSizes { d_value: 0, ..kv },
            KvSizes { latent: true, ..kv },
            KvSizes { nheads: 1, d_value: 5, latent: true, ..kv },
        ] {
            assert!(body.new_cache(bad).is_err(), "{body:?} {bad:?}");
        }
        let rope = Rope::new(4, 1e4, &RopeScaling::None, RopeStyle::Half);
        assert!(body.rope(&x(&[2, 1, 4]), &[0], &rope).is_err());
        assert!(body.rope(&x(&[1, 1, 3]), &[0], &rope).is_err());
        assert!(body.glu(Activation::Silu, &x(&[2, 3]), &x(&[3, 2])).is_err());
        assert!(body.add_rows(x(&[2, 3]), &x(&[1, 3]), &[2], &[1.0]).is_err());
        assert!(body.add_rows(x(&[2, 3]), &x(&[1, 3]), &[1], &[]).is_err());
        assert!(body.scale_columns(&x(&[2, 3]), &x(&[2])).is_err());
        assert!(body.concat_columns(&x(&[2, 3]), &x(&[1, 3])).is_err());
        assert!(body.concat_columns(&x(&[2, 3]), &x(&[6])).is_err());
        for (left, right) in [(0, 3), (3, 0), (0, 0)] {
            let both = body.concat_columns(&x(&[2, left]), &x(&[2, right])).unwrap();
            assert_eq!(both.shape(), [2, left + right]);
        }
    }
}
