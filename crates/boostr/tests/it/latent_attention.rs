//! Latent attention equals its definition in f64, which makes the keys and values explicitly. Portable
//! body and CPU kernel are each compared with the definition, not with each other.

use crate::bodies::{BODIES, Body, Floats, laid_out, weight};
use crate::common::Random;
use crate::common::cpu;
use crate::tiny::{close, entry, floats};
use boostr::Error;
use boostr::backend::Cpu;
use boostr::checkpoint::{Dtype, TensorEntry};
use boostr::ops::{
    Attention, AttentionOps, KvCache, KvSizes, KvType, LatentAttention, LinearOps, Tape, Weight,
    tensor, to_vec,
};
use proptest::collection::vec;
use proptest::prelude::*;

/// Rounding of f32 in sums of up to some hundred terms of about 1.
const TOLERANCE: f64 = 1e-5;

/// Weights, and the widths that follow from them.
struct Problem {
    nheads: usize,
    d_nope: usize,
    d_c: usize,
    d_r: usize,
    d_v: usize,
    w_uk: TensorEntry,
    w_uv: TensorEntry,
    /// The same for operations.
    weights: [Weight<Cpu>; 2],
}

/// q_nope, q_pe, c and k_pe of the tokens of one sequence.
type Sequence = [Vec<f32>; 4];

impl Problem {
    fn new(random: &mut Random, dtype: Dtype, [nheads, d_nope, d_c, d_r, d_v]: [usize; 5]) -> Self {
        // Keys and values are then of about 1, as c is.
        let mut w = |shape: [usize; 3]| {
            let scale = (3.0 / d_c as f32).sqrt();
            let values = floats(random, shape.iter().product());
            entry(dtype, &shape, &values.iter().map(|x| scale * x).collect::<Vec<_>>())
        };
        let (w_uk, w_uv) = (w([nheads, d_c, d_nope]), w([nheads, d_v, d_c]));
        let weights = [weight(&w_uk), weight(&w_uv)];
        Self { nheads, d_nope, d_c, d_r, d_v, w_uk, w_uv, weights }
    }

    fn scale(&self) -> f32 {
        ((self.d_nope + self.d_r) as f32).sqrt().recip()
    }

    fn sizes(&self, kind: KvType) -> KvSizes {
        KvSizes::latent(self.d_c, self.d_r, kind)
    }

    /// Shape of a row of each part of a sequence.
    fn rows(&self) -> [Vec<usize>; 4] {
        let Self { nheads, d_nope, d_c, d_r, .. } = *self;
        [vec![nheads, d_nope], vec![nheads, d_r], vec![d_c], vec![d_r]]
    }

    fn sequence(&self, random: &mut Random, len: usize) -> Sequence {
        self.rows().map(|row| floats(random, len * row.iter().product::<usize>()))
    }

    /// `[L, H, d_v]` of a sequence, all of whose tokens are here.
    fn definition(&self, [q_nope, q_pe, c, k_pe]: &Sequence) -> Vec<f64> {
        let Self { nheads, d_nope, d_c, d_r, d_v, .. } = *self;
        let wide = |x: &[f32]| -> Vec<f64> { x.iter().copied().map(f64::from).collect() };
        let [q_nope, q_pe, c, k_pe] = [q_nope, q_pe, c, k_pe].map(|x| wide(x));
        let [w_uk, w_uv] = [&self.w_uk, &self.w_uv].map(|w| wide(&w.to_f32().unwrap()));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let len = c.len() / d_c;
        let mut out = vec![0.0; len * nheads * d_v];
        for head in 0..nheads {
            let compressed = |j: usize| &c[j * d_c..][..d_c];
            // W_UK[n, i] is w_uk[i, n].
            let key = |j: usize, n: usize| -> f64 {
                (0..d_c).map(|i| w_uk[(head * d_c + i) * d_nope + n] * compressed(j)[i]).sum()
            };
            let keys: Vec<Vec<f64>> = (0..len)
                .map(|j| {
                    let key = (0..d_nope).map(|n| key(j, n));
                    key.chain(k_pe[j * d_r..][..d_r].iter().copied()).collect()
                })
                .collect();
            let values: Vec<Vec<f64>> = (0..len)
                .map(|j| {
                    let rows = (0..d_v).map(|v| &w_uv[(head * d_v + v) * d_c..][..d_c]);
                    rows.map(|row| dot(row, compressed(j))).collect()
                })
                .collect();
            for i in 0..len {
                let row = i * nheads + head;
                let q = [&q_nope[row * d_nope..][..d_nope], &q_pe[row * d_r..][..d_r]].concat();
                let scale = f64::from(self.scale());
                let weights: Vec<f64> =
                    keys[..=i].iter().map(|key| (scale * dot(&q, key)).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for v in 0..d_v {
                    let terms = weights.iter().zip(&values).map(|(w, value)| w * value[v]);
                    out[row * d_v + v] = terms.sum::<f64>() / sum;
                }
            }
        }
        out
    }

    /// Outputs of each sequence, and its cache, where call by call the next `calls[call][i]` tokens of
    /// sequence i come.
    fn run(
        &self,
        body: Body,
        (kind, layout): (KvType, usize),
        sequences: &[Sequence],
        calls: &[Vec<usize>],
    ) -> (Vec<Vec<f32>>, Vec<KvCache<Cpu>>) {
        let mut caches: Vec<_> =
            sequences.iter().map(|_| body.new_cache(self.sizes(kind)).unwrap()).collect();
        let mut outs = vec![Vec::new(); sequences.len()];
        let mut done = vec![0; sequences.len()];
        for runs in calls {
            let tokens = runs.iter().sum();
            let [q_nope, q_pe, c, k_pe] = [0, 1, 2, 3].map(|part| {
                let row = &self.rows()[part];
                let width = row.iter().product::<usize>();
                let rows = sequences.iter().zip(&done).zip(runs);
                let rows: Vec<f32> = rows
                    .flat_map(|((x, done), len)| &x[part][done * width..(done + len) * width])
                    .copied()
                    .collect();
                let layout = if rows.is_empty() { 0 } else { layout };
                laid_out(layout, &rows, &[&[tokens], &row[..]].concat())
            });
            let input = self.input([&q_nope, &q_pe, &c, &k_pe]);
            let mut borrowed: Vec<_> = caches.iter_mut().collect();
            let out = body.latent_attention(&input, runs, &mut borrowed).unwrap();
            assert_eq!(out.shape(), [tokens, self.nheads, self.d_v]);
            let out = to_vec(&out).unwrap();
            let mut rest = &out[..];
            for (i, len) in runs.iter().enumerate() {
                let (own, others) = rest.split_at(len * self.nheads * self.d_v);
                outs[i].extend_from_slice(own);
                rest = others;
                done[i] += len;
            }
        }
        (outs, caches)
    }

    fn input<'a>(&'a self, [q_nope, q_pe, c, k_pe]: [&'a Floats; 4]) -> LatentAttention<'a, Cpu> {
        let [w_uk, w_uv] = &self.weights;
        LatentAttention { q_nope, q_pe, c, k_pe, w_uk, w_uv, scale: self.scale() }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn latent_attention_is_its_definition_however_the_sequences_come(
        seed in 1u64..,
        lens in vec(prop_oneof![3 => 0usize..20, 1 => 60usize..70, 1 => 120usize..140], 1..4),
        (nheads, d_nope, d_v) in (1usize..5, 1usize..20, 1usize..20),
        (d_c, d_r) in (1usize..40, 0usize..12),
        dtype in prop_oneof![Just(Dtype::F32), Just(Dtype::BF16), Just(Dtype::F16)],
        layout in 0usize..3,
    ) {
        let random = &mut Random(seed);
        let problem = Problem::new(random, dtype, [nheads, d_nope, d_c, d_r, d_v]);
        let sequences: Vec<_> = lens.iter().map(|&len| problem.sequence(random, len)).collect();
        // Each sequence in three calls, cut anywhere; some runs are empty.
        let mut left = lens.clone();
        let mut calls: Vec<Vec<usize>> = (0..2)
            .map(|_| {
                let runs: Vec<usize> = left.iter().map(|len| random.below(len + 1)).collect();
                left.iter_mut().zip(&runs).for_each(|(left, len)| *left -= len);
                runs
            })
            .collect();
        calls.push(left);
        for body in BODIES {
            let (outs, caches) = problem.run(body, (KvType::F32, layout), &sequences, &calls);
            for ((out, cache), sequence) in outs.iter().zip(&caches).zip(&sequences) {
                close(out, &problem.definition(sequence), TOLERANCE);
                let [_, _, c, k_pe] = sequence;
                let keys: Vec<f32> = (0..cache.len())
                    .flat_map(|t| [&c[t * d_c..][..d_c], &k_pe[t * d_r..][..d_r]].concat())
                    .collect();
                prop_assert_eq!(&cache.keys().unwrap(), &keys);
                prop_assert_eq!(&cache.values().unwrap(), c);
                let bytes = match body {
                    Body::Portable => 4 * keys.len(),
                    Body::Kernels => cache.sizes().bytes(cpu().level(), cache.len(), None),
                };
                prop_assert_eq!(cache.size_in_bytes(), bytes);
                if matches!(body, Body::Kernels) {
                    let one = std::slice::from_ref(sequence);
                    let alone = problem.run(body, (KvType::F32, 0), one, &[vec![cache.len()]]);
                    prop_assert_eq!(&alone.0[0], out);
                }
            }
        }
    }
}

#[test]
fn what_other_types_keep_is_attended_to_with_the_same_bits_in_any_pieces() {
    let random = &mut Random(83);
    let problem = Problem::new(random, Dtype::BF16, [3, 8, 40, 6, 10]);
    let sequences = [150, 70].map(|len| problem.sequence(random, len));
    for kind in KvType::ALL {
        let run = |calls: &[Vec<usize>]| problem.run(Body::Kernels, (kind, 0), &sequences, calls);
        let (outs, caches) = run(&[vec![150, 70]]);
        let pieces = run(&[vec![1, 69], vec![63, 0], vec![1, 1], vec![85, 0]]);
        assert_eq!(pieces.0, outs, "{kind:?}");
        for ((out, cache), sequence) in outs.iter().zip(&caches).zip(&sequences) {
            // What storing loses has tests of its own.
            let [mut c, mut k_pe] = [Vec::new(), Vec::new()];
            for key in cache.keys().unwrap().chunks_exact(46) {
                c.extend_from_slice(&key[..40]);
                k_pe.extend_from_slice(&key[40..]);
            }
            assert_eq!(cache.values().unwrap(), c);
            let [q_nope, q_pe, ..] = sequence.clone();
            close(out, &problem.definition(&[q_nope, q_pe, c, k_pe]), TOLERANCE);
            assert_eq!(
                cache.size_in_bytes(),
                cache.sizes().bytes(cpu().level(), cache.len(), None)
            );
        }
    }
    let problem = Problem::new(random, Dtype::F32, [1; 5]);
    let half = problem.sizes(KvType::F16);
    assert!(matches!(Body::Portable.new_cache(half), Err(Error::Unsupported { .. })));
}

#[test]
fn bad_arguments_are_refused_and_leave_caches_as_they_are() {
    let random = &mut Random(84);
    let problem = Problem::new(random, Dtype::F32, [2, 3, 5, 4, 6]);
    let x = |shape: &[usize]| laid_out(0, &vec![0.5; shape.iter().product()], shape);
    let w = |shape: &[usize]| {
        weight(&entry(Dtype::F32, shape, &vec![0.5; shape.iter().product::<usize>()]))
    };
    let parts = [x(&[3, 2, 3]), x(&[3, 2, 4]), x(&[3, 5]), x(&[3, 4])];
    for body in BODIES {
        let [q_nope, q_pe, c, k_pe] = &parts;
        let good = problem.input([q_nope, q_pe, c, k_pe]);
        let mut cache = body.new_cache(problem.sizes(KvType::F32)).unwrap();
        body.latent_attention(&good, &[3], &mut [&mut cache]).unwrap();
        let mut refuse = |name: &str, bad: &LatentAttention<'_, Cpu>, runs: &[usize]| {
            let error = body.latent_attention(bad, runs, &mut [&mut cache]).unwrap_err();
            let named = match &error {
                Error::Shape { name, .. } => name.as_ref(),
                Error::Argument { name, .. } => *name,
                _ => panic!("{body:?} {name}: {error}"),
            };
            assert_eq!(named, name, "{body:?}: {error}");
            assert_eq!(cache.len(), 3);
        };
        for shape in [&[3, 6][..], &[2, 2, 3], &[4, 2, 3]] {
            let q_nope = &x(shape);
            let name = if shape.len() == 3 { "q_pe" } else { "q_nope" };
            refuse(name, &LatentAttention { q_nope, ..good.clone() }, &[3]);
        }
        for shape in [&[3, 8][..], &[3, 2, 3], &[3, 1, 4], &[2, 2, 4]] {
            let q_pe = &x(shape);
            refuse("q_pe", &LatentAttention { q_pe, ..good.clone() }, &[3]);
        }
        for shape in [&[15][..], &[2, 5], &[3, 1, 5]] {
            let c = &x(shape);
            refuse("c", &LatentAttention { c, ..good.clone() }, &[3]);
        }
        for shape in [&[12][..], &[2, 4], &[3, 1, 4]] {
            let k_pe = &x(shape);
            refuse("k_pe", &LatentAttention { k_pe, ..good.clone() }, &[3]);
        }
        for shape in [&[10, 3][..], &[2, 3, 5], &[1, 5, 3], &[2, 5, 4]] {
            let w_uk = &w(shape);
            refuse("w_uk", &LatentAttention { w_uk, ..good.clone() }, &[3]);
        }
        for shape in [&[12, 5][..], &[2, 5, 6], &[3, 6, 5], &[2, 6, 4]] {
            let w_uv = &w(shape);
            refuse("w_uv", &LatentAttention { w_uv, ..good.clone() }, &[3]);
        }
        let (no_heads, no_heads_pe) = (&x(&[3, 0, 3]), &x(&[3, 0, 4]));
        let none = LatentAttention { q_nope: no_heads, q_pe: no_heads_pe, ..good.clone() };
        refuse("w_uk", &none, &[3]);
        refuse("runs", &good, &[2]);
        refuse("states", &good, &[1, 2]);
        // Other widths fit each other, but not the cache.
        let (narrow, narrow_pe) = (&x(&[3, 3]), &x(&[3, 2, 3]));
        let other = LatentAttention { k_pe: narrow, q_pe: narrow_pe, ..good.clone() };
        refuse("caches", &other, &[3]);
    }
}

#[test]
fn caches_of_another_operation_or_device_are_refused() {
    let random = &mut Random(85);
    let problem = Problem::new(random, Dtype::F32, [1, 3, 5, 4, 6]);
    let x = |shape: &[usize]| laid_out(0, &vec![0.5; shape.iter().product()], shape);
    let [q_nope, q_pe, c, k_pe] = &[x(&[2, 1, 3]), x(&[2, 1, 4]), x(&[2, 5]), x(&[2, 4])];
    let latent = problem.input([q_nope, q_pe, c, k_pe]);
    let (q, v) = (&x(&[2, 1, 9]), &x(&[2, 1, 5]));
    let full = Attention { q, k: q, v, scale: 1.0, window: None, softcap: None };
    let sizes = problem.sizes(KvType::F32);
    for (body, other) in [(Body::Portable, Body::Kernels), (Body::Kernels, Body::Portable)] {
        let mut cache = body.new_cache(KvSizes { latent: false, ..sizes }).unwrap();
        let error = body.latent_attention(&latent, &[2], &mut [&mut cache]).unwrap_err();
        assert!(error.to_string().contains("expected latent ones"), "{body:?}: {error}");
        let mut cache = body.new_cache(sizes).unwrap();
        let error = body.attention(&full, &[2], &mut [&mut cache]).unwrap_err();
        assert!(error.to_string().contains("found latent ones"), "{body:?}: {error}");
        let error = other.latent_attention(&latent, &[2], &mut [&mut cache]).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{other:?}: {error}");
        assert!(cache.is_empty());
    }
}

/// What three calls with two sequences give, by a client and its weights.
fn outputs<C: AttentionOps<Cpu>>(
    client: &C,
    problem: &Problem,
    sequences: &[Sequence; 2],
    [w_uk, w_uv]: [&Weight<Cpu>; 2],
) -> Vec<Floats> {
    let mut caches = [0, 1].map(|_| client.new_cache(problem.sizes(KvType::F32)).unwrap());
    let (mut outs, mut done) = (Vec::new(), [0; 2]);
    for runs in [[3, 2], [0, 1], [4, 3]] {
        let parts = [0, 1, 2, 3].map(|part| {
            let row = &problem.rows()[part];
            let width = row.iter().product::<usize>();
            let rows = sequences.iter().zip(done).zip(runs);
            let rows: Vec<f32> = rows
                .flat_map(|((x, done), len)| &x[part][done * width..(done + len) * width])
                .copied()
                .collect();
            tensor::<Cpu>(client, &rows, &[&[runs[0] + runs[1]], &row[..]].concat()).unwrap()
        });
        let [q_nope, q_pe, c, k_pe] = &parts;
        let input = LatentAttention { q_nope, q_pe, c, k_pe, w_uk, w_uv, scale: problem.scale() };
        let mut borrowed: Vec<_> = caches.iter_mut().collect();
        outs.push(client.latent_attention(&input, &runs, &mut borrowed).unwrap());
        done = [done[0] + runs[0], done[1] + runs[1]];
    }
    outs
}

/// What an element of an output counts in the loss.
fn factor(i: usize) -> f32 {
    (i as f32 * 0.7).sin()
}

#[test]
fn a_tape_computes_the_bits_of_any_client_and_gives_the_slopes_to_both_weights() {
    let random = &mut Random(86);
    let mut problem = Problem::new(random, Dtype::F32, [2, 3, 5, 2, 4]);
    let sequences = [7, 6].map(|len| problem.sequence(random, len));
    let tape = Tape::new(cpu(), |_| true);
    let [w_uk, w_uv] = &problem.weights;
    tape.parameter("w_uk", w_uk);
    tape.parameter("w_uv", w_uv);
    let outs = outputs(&tape, &problem, &sequences, [w_uk, w_uv]);
    for (out, plain) in outs.iter().zip(outputs(&cpu(), &problem, &sequences, [w_uk, w_uv])) {
        assert_eq!(to_vec(out).unwrap(), to_vec(&plain).unwrap());
    }
    // The loss of each output as one row: -ln softmax([s, 0])[0] = ln(1 + exp(-s)), s by factors of its elements.
    for out in &outs {
        let width: usize = out.shape().iter().product();
        let factors: Vec<f32> = (0..width).map(factor).chain(vec![0.0; width]).collect();
        let head = weight(&entry(Dtype::F32, &[2, width], &factors));
        tape.parameter("head", &head);
        let row = out.reshape(&[1, width]).unwrap();
        tape.cross_entropy(&row, &head, 1.0, (&[0], &[1.0]), false).unwrap();
    }
    let gradients = tape.backward().unwrap();
    let loss = |problem: &Problem| -> f64 {
        let [w_uk, w_uv] = &problem.weights;
        let of = |out: Floats| {
            let values = to_vec(&out).unwrap();
            let terms = values.iter().enumerate();
            let s: f64 = terms.map(|(i, x)| f64::from(*x) * f64::from(factor(i))).sum();
            (-s).exp().ln_1p()
        };
        outputs(&cpu(), problem, &sequences, [w_uk, w_uv]).into_iter().map(of).sum()
    };
    let step = 1.0f32 / 64.0;
    for (which, name) in ["w_uk", "w_uv"].into_iter().enumerate() {
        let own = [&problem.w_uk, &problem.w_uv][which].clone();
        let values = own.to_f32().unwrap();
        for i in 0..values.len() {
            let mut at = |step: f32| {
                let mut moved = values.clone();
                moved[i] += step;
                problem.weights[which] = weight(&entry(Dtype::F32, &own.shape, &moved));
                loss(&problem)
            };
            let slope = (at(step) - at(-step)) / f64::from(2.0 * step);
            let got = f64::from(gradients[name][i]);
            assert!((got - slope).abs() < 1e-3, "{name} {i}: {got}, not {slope}");
        }
        problem.weights[which] = weight(&own);
    }
}
