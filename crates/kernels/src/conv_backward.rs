//! Gradients of the causal convolution over ragged runs, through the windows at both ends of each.
//!
//! With `in[i]` the rows of a run's window, then those of its tokens (so that tap k of token t meets
//! `in[t + k]`), and `dpre = dout * silu'(pre)` the gradient before silu:
//!
//! ```text
//! din[i, c]     = sum over k of weight[k, c] * dpre[i - k, c]   + dafter[i - L, c]
//! dweight[k, c] = sum over t of dpre[t, c] * in[t + k, c]
//! dbias[c]      = sum over t of dpre[t, c]
//! ```
//!
//! Terms outside a run's L tokens, or outside the window that it leaves, are zero. The first K - 1 rows
//! of `din` belong to the window before, the rest are dx. A run shorter than its window leaves part of
//! the window before. So gradients of the window after reach the one before.
//!
//! Blocks of tokens run in parallel: each computes `pre` again, and `dpre` of K - 1 tokens of the next
//! block too. Each adds up its own gradients of weights, and those of all blocks are then summed in
//! their order.

use rayon::prelude::*;

use crate::activation::Activation;
use crate::activation_backward::activate_row_backward;
use crate::conv::{Conv1d, Inputs, add_products, convolve};
use crate::linear_backward::column_sums;
use crate::rows::Rows;
use crate::simd::Level;

/// Tokens per parallel task, whose gradients of weights are one partial sum.
const ROW_BLOCK: usize = 64;

/// Where the gradients of [`conv1d_backward`] go: that of the input is written, those of parameters are
/// added to what is there.
#[derive(Debug)]
pub struct Conv1dGradients<'a> {
    /// `[T, C]`
    pub dx: &'a mut [f32],
    /// `[K, C]`
    pub dweight: &'a mut [f32],
    /// `[C]`; may be left out.
    pub dbias: Option<&'a mut [f32]>,
}

/// The gradients of [`conv1d`](crate::conv1d).
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `conv`, `x`, `runs` | | as in the forward |
/// | `windows` | a `[K - 1, C]` for each run | as they were before the forward |
/// | `dout` | `[T, C]` | gradient of the output |
/// | `dwindows` | a `[K - 1, C]` for each run | gradient of the window that the run leaves; becomes that of the window that it found |
/// | `out` | see [`Conv1dGradients`] | |
///
/// A run has the same bits in `dx` and `dwindows` alone and in any company.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn conv1d_backward(
    conv: &Conv1d<'_>,
    x: Rows<'_>,
    runs: &[usize],
    windows: &[&[f32]],
    dout: Rows<'_>,
    dwindows: &mut [&mut [f32]],
    out: Conv1dGradients<'_>,
) {
    let Conv1d { level, weight, bias, silu } = *conv;
    let Conv1dGradients { dx, dweight, dbias } = out;
    let channels = x.width();
    assert!(channels > 0, "x: no channels");
    let taps = weight.len() / channels;
    assert!(taps >= 1 && weight.len() == taps * channels, "weight");
    assert!(bias.is_none_or(|b| b.len() == channels), "bias");
    assert_eq!(runs.iter().sum::<usize>(), x.len(), "runs");
    assert_eq!(windows.len(), runs.len(), "windows");
    assert!(windows.iter().all(|w| w.len() == (taps - 1) * channels), "windows");
    assert_eq!((dout.len(), dout.width()), (x.len(), channels), "dout");
    assert_eq!(dwindows.len(), runs.len(), "dwindows");
    assert!(dwindows.iter().all(|w| w.len() == (taps - 1) * channels), "dwindows");
    assert_eq!(dx.len(), x.len() * channels, "dx");
    assert_eq!(dweight.len(), weight.len(), "dweight");
    assert!(dbias.as_ref().is_none_or(|b| b.len() == channels), "dbias");

    // Of each block, `[K, C]` of weights and `[C]` of the bias.
    let width = (taps + 1) * channels;
    let blocks: usize = runs.iter().map(|len| len.div_ceil(ROW_BLOCK)).sum();
    let mut sums = vec![0.0; blocks * width];
    let mut parts = Vec::with_capacity(runs.len());
    let (mut first, mut dx_rest, mut sums_rest) = (0, dx, sums.as_mut_slice());
    for ((&len, before), dwindow) in runs.iter().zip(windows).zip(dwindows) {
        let (dx, sums);
        (dx, dx_rest) = dx_rest.split_at_mut(len * channels);
        (sums, sums_rest) = sums_rest.split_at_mut(len.div_ceil(ROW_BLOCK) * width);
        let inputs = Inputs { before, x: x.slice(first, len) };
        let run = Run { inputs, dout: dout.slice(first, len), weight, bias, silu };
        parts.push((run, dwindow, dx, sums));
        first += len;
    }
    parts.into_par_iter().for_each(|(run, dwindow, dx, sums)| {
        let dafter: &[f32] = dwindow;
        let blocks = dx.par_chunks_mut(ROW_BLOCK * channels).zip(sums.par_chunks_mut(width));
        blocks.enumerate().for_each_init(Vec::new, |dpre, (block, (dx, sums))| {
            run.block(level, block * ROW_BLOCK, dafter, dpre, dx, sums);
        });
        run.window(level, dwindow);
    });
    let sums = Rows::dense(&sums, width);
    column_sums(level, sums.columns(0, taps * channels), dweight);
    if let Some(dbias) = dbias {
        column_sums(level, sums.columns(taps * channels, channels), dbias);
    }
}

/// A run's part of the arguments.
#[derive(Clone, Copy)]
struct Run<'a> {
    inputs: Inputs<'a>,
    dout: Rows<'a>,
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    silu: bool,
}

impl Run<'_> {
    /// The gradients that the tokens from `start` make: of as many inputs as `dx` has rows, and, added to
    /// `sums`, of the taps and the bias.
    fn block(
        &self,
        level: Level,
        start: usize,
        dafter: &[f32],
        dpre: &mut Vec<f32>,
        dx: &mut [f32],
        sums: &mut [f32],
    ) {
        let (len, channels) = (self.dout.len(), self.dout.width());
        let kept = self.weight.len() / channels - 1;
        let end = len.min(start + dx.len() / channels + kept);
        self.before_silu(level, start, end, dpre);
        let (dweight, dbias) = sums.split_at_mut(self.weight.len());
        for (i, dx) in dx.chunks_exact_mut(channels).enumerate() {
            let t = start + i;
            match (t + kept).checked_sub(len) {
                Some(i) => dx.copy_from_slice(&dafter[i * channels..][..channels]),
                None => dx.fill(0.0),
            }
            // Tap K - 1 of this token, K - 2 of the next, and so on.
            let dpre = &dpre[i * channels..];
            let taps = self.weight.chunks_exact(channels).rev();
            for (tap, dpre) in taps.zip(dpre.chunks_exact(channels)) {
                add_products(level, tap, dpre, dx);
            }
            let dpre = &dpre[..channels];
            for (k, dtap) in dweight.chunks_exact_mut(channels).enumerate() {
                add_products(level, dpre, self.inputs.row(t + k), dtap);
            }
            for (dbias, dpre) in dbias.iter_mut().zip(dpre) {
                *dbias += dpre;
            }
        }
    }

    /// Turns the gradient of the window after the run into that of the window before it.
    fn window(&self, level: Level, dwindow: &mut [f32]) {
        let (len, channels) = (self.dout.len(), self.dout.width());
        let kept = dwindow.len() / channels;
        let mut dpre = Vec::new();
        self.before_silu(level, 0, len.min(kept), &mut dpre);
        // Row i takes what stood in row i - L: those below are still as they were.
        for i in (0..kept).rev() {
            match i.checked_sub(len) {
                Some(from) => {
                    dwindow.copy_within(from * channels..(from + 1) * channels, i * channels);
                }
                None => dwindow[i * channels..][..channels].fill(0.0),
            }
            let row = &mut dwindow[i * channels..][..channels];
            for (t, dpre) in dpre.chunks_exact(channels).enumerate().take(i + 1) {
                add_products(level, &self.weight[(i - t) * channels..][..channels], dpre, row);
            }
        }
    }

    /// Writes the gradient before silu of the tokens `start..end`.
    fn before_silu(&self, level: Level, start: usize, end: usize, dpre: &mut Vec<f32>) {
        let channels = self.dout.width();
        dpre.resize((end - start) * channels, 0.0);
        let mut pre = vec![0.0; channels];
        for (t, dpre) in (start..end).zip(dpre.chunks_exact_mut(channels)) {
            if self.silu {
                convolve(level, self.inputs, t, self.weight, self.bias, &mut pre);
                activate_row_backward(level, Activation::Silu, &pre, self.dout.row(t), dpre);
            } else {
                dpre.copy_from_slice(self.dout.row(t));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::gradcheck::{
        assert_gradient, assert_threads_do_not_matter, dot, numeric_gradient, widen,
    };
    use crate::testing::{Rng, close};

    /// f32 against f64: a sum over a few hundred tokens, and the derivative of silu.
    const TOLERANCE: f64 = 4e-6;

    /// One channel of one run, in f64: outputs, then the window after. `inputs` is the window before,
    /// then the tokens.
    fn forward(inputs: &[f64], weight: &[f64], bias: f64, silu: bool) -> Vec<f64> {
        let taps = weight.len();
        let len = inputs.len() + 1 - taps;
        let out = (0..len).map(|t| {
            let pre = dot(weight, &inputs[t..][..taps]) + bias;
            if silu { pre / (1.0 + (-pre).exp()) } else { pre }
        });
        out.chain(inputs[len..].iter().copied()).collect()
    }

    /// The definition for one channel of one run, in f64: gradients of inputs, taps and bias, from those of
    /// what `forward` returns.
    fn reference(
        inputs: &[f64],
        weight: &[f64],
        bias: f64,
        silu: bool,
        dout: &[f64],
    ) -> (Vec<f64>, Vec<f64>, f64) {
        let taps = weight.len();
        let len = inputs.len() + 1 - taps;
        let (mut dinputs, mut dweight, mut dbias) = (vec![0.0; inputs.len()], vec![0.0; taps], 0.0);
        for t in 0..len {
            let pre = dot(weight, &inputs[t..][..taps]) + bias;
            let s = 1.0 / (1.0 + (-pre).exp());
            let dpre = dout[t] * if silu { s * (1.0 + pre * (1.0 - s)) } else { 1.0 };
            for k in 0..taps {
                dinputs[t + k] += weight[k] * dpre;
                dweight[k] += inputs[t + k] * dpre;
            }
            dbias += dpre;
        }
        for i in len..inputs.len() {
            dinputs[i] += dout[i];
        }
        (dinputs, dweight, dbias)
    }

    #[test]
    fn the_definition_is_the_gradient_of_the_convolution() {
        let mut rng = Rng::new(30);
        for (len, taps) in [(0, 4), (1, 4), (2, 4), (3, 4), (9, 4), (5, 1), (6, 2)] {
            for silu in [false, true] {
                let (inputs, weight) =
                    (widen(&rng.floats(len + taps - 1)), widen(&rng.floats(taps)));
                let (bias, dout) = (widen(&rng.floats(1)), widen(&rng.floats(len + taps - 1)));
                let (dinputs, dweight, dbias) = reference(&inputs, &weight, bias[0], silu, &dout);
                let of = |inputs: &[f64], weight: &[f64], bias: &[f64]| {
                    dot(&forward(inputs, weight, bias[0], silu), &dout)
                };
                let numeric = numeric_gradient(&inputs, |x| of(x, &weight, &bias));
                assert_gradient("dinputs", &dinputs, &numeric);
                let numeric = numeric_gradient(&weight, |x| of(&inputs, x, &bias));
                assert_gradient("dweight", &dweight, &numeric);
                let numeric = numeric_gradient(&bias, |x| of(&inputs, &weight, x));
                assert_gradient("dbias", &[dbias], &numeric);
            }
        }
    }

    #[derive(Debug, Clone)]
    struct Problem {
        runs: Vec<usize>,
        channels: usize,
        taps: usize,
        bias: bool,
        silu: bool,
        seed: u64,
    }

    fn problems() -> impl Strategy<Value = Problem> {
        let len = prop_oneof![0usize..6, 60usize..70, 120usize..140];
        let runs = prop::collection::vec(len, 1..5);
        (runs, 1usize..40, 1usize..6, any::<bool>(), any::<bool>(), any::<u64>()).prop_map(
            |(runs, channels, taps, bias, silu, seed)| Problem {
                runs,
                channels,
                taps,
                bias,
                silu,
                seed,
            },
        )
    }

    /// Operands of a problem; `dafter` and what parameters' gradients are added to are operands too.
    struct Data {
        x: Vec<f32>,
        dout: Vec<f32>,
        weight: Vec<f32>,
        bias: Vec<f32>,
        windows: Vec<Vec<f32>>,
        dafter: Vec<Vec<f32>>,
        dweight: Vec<f32>,
        dbias: Vec<f32>,
    }

    impl Data {
        fn new(p: &Problem) -> Self {
            let mut rng = Rng::new(p.seed);
            let (total, kept) = (p.runs.iter().sum::<usize>(), (p.taps - 1) * p.channels);
            Self {
                x: rng.floats(total * p.channels),
                dout: rng.floats(total * p.channels),
                weight: rng.floats(p.taps * p.channels),
                bias: rng.floats(p.channels),
                windows: p.runs.iter().map(|_| rng.floats(kept)).collect(),
                dafter: p.runs.iter().map(|_| rng.floats(kept)).collect(),
                dweight: rng.floats(p.taps * p.channels),
                dbias: rng.floats(p.channels),
            }
        }
    }

    #[derive(Debug, PartialEq)]
    struct Gradients {
        dx: Vec<f32>,
        dwindows: Vec<Vec<f32>>,
        dweight: Vec<f32>,
        dbias: Vec<f32>,
    }

    /// The runs `range` of a problem.
    fn run(level: Level, p: &Problem, data: &Data, range: std::ops::Range<usize>) -> Gradients {
        let first: usize = p.runs[..range.start].iter().sum();
        let runs = &p.runs[range.clone()];
        let total: usize = runs.iter().sum();
        let rows =
            |x| Rows::new(x, p.runs.iter().sum(), p.channels, 0, p.channels).slice(first, total);
        let windows: Vec<&[f32]> = data.windows[range.clone()].iter().map(Vec::as_slice).collect();
        let mut dwindows = data.dafter[range].to_vec();
        let mut views: Vec<&mut [f32]> = dwindows.iter_mut().map(Vec::as_mut_slice).collect();
        let mut dx = vec![f32::NAN; total * p.channels];
        let (mut dweight, mut dbias) = (data.dweight.clone(), data.dbias.clone());
        let bias = p.bias.then_some(&data.bias[..]);
        let conv = Conv1d { level, weight: &data.weight, bias, silu: p.silu };
        let out = Conv1dGradients {
            dx: &mut dx,
            dweight: &mut dweight,
            dbias: p.bias.then_some(&mut dbias),
        };
        let (x, dout) = (rows(&data.x), rows(&data.dout));
        conv1d_backward(&conv, x, runs, &windows, dout, &mut views, out);
        Gradients { dx, dwindows, dweight, dbias }
    }

    /// Every `channels`th element from `c`.
    fn channel(x: &[f32], c: usize, channels: usize) -> Vec<f64> {
        x.iter().skip(c).step_by(channels).copied().map(f64::from).collect()
    }

    fn magnitudes(x: &[f64]) -> Vec<f64> {
        x.iter().map(|x| x.abs()).collect()
    }

    /// Whether a sum of terms, whose magnitudes add up to `size`, is what it should be.
    #[track_caller]
    fn close_sum(got: f32, want: f64, size: f64) {
        let bound = TOLERANCE * (1.0 + want.abs()) + f64::from(f32::EPSILON) * size;
        let error = (f64::from(got) - want).abs();
        assert!(error <= bound, "{got} is not {want} within {bound:e}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        #[test]
        fn equals_the_definition_on_every_instruction_set(p in problems()) {
            let data = Data::new(&p);
            let channels = p.channels;
            let results: Vec<Gradients> =
                Level::present().iter().map(|l| run(*l, &p, &data, 0..p.runs.len())).collect();
            for c in 0..channels {
                let weight = channel(&data.weight, c, channels);
                let bias = if p.bias { f64::from(data.bias[c]) } else { 0.0 };
                let mut dweight = channel(&data.dweight, c, channels);
                let mut dbias = f64::from(data.dbias[c]);
                // Sums of the magnitudes of all terms: rounding is a share of them, however the terms cancel.
                let (mut weight_sizes, mut bias_size) = (vec![0.0; p.taps], 0.0);
                let mut first = 0;
                for (r, len) in p.runs.iter().enumerate() {
                    let tokens = first * channels..(first + len) * channels;
                    first += len;
                    let mut inputs = channel(&data.windows[r], c, channels);
                    inputs.extend(channel(&data.x[tokens.clone()], c, channels));
                    let mut dout = channel(&data.dout[tokens.clone()], c, channels);
                    dout.extend(channel(&data.dafter[r], c, channels));
                    let (dinputs, dtaps, db) = reference(&inputs, &weight, bias, p.silu, &dout);
                    for got in &results {
                        let mut row: Vec<f32> = got.dwindows[r].clone();
                        row.extend(&got.dx[tokens.clone()]);
                        let row: Vec<f32> = row.into_iter().skip(c).step_by(channels).collect();
                        close(&row, &dinputs, TOLERANCE);
                    }
                    for (sum, dtap) in dweight.iter_mut().zip(dtaps) {
                        *sum += dtap;
                    }
                    dbias += if p.bias { db } else { 0.0 };
                    let (inputs, dout) = (magnitudes(&inputs), magnitudes(&dout));
                    let (_, sizes, size) = reference(&inputs, &weight, bias, false, &dout);
                    for (sum, size) in weight_sizes.iter_mut().zip(sizes) {
                        *sum += size;
                    }
                    bias_size += size;
                }
                for got in &results {
                    let row = got.dweight.iter().skip(c).step_by(channels);
                    for ((got, want), size) in row.zip(&dweight).zip(&weight_sizes) {
                        close_sum(*got, *want, *size);
                    }
                    close_sum(got.dbias[c], dbias, bias_size);
                }
            }
        }

        #[test]
        fn runs_together_have_the_bits_of_each_alone(p in problems()) {
            let data = Data::new(&p);
            let whole = run(Level::detect(), &p, &data, 0..p.runs.len());
            let mut first = 0;
            for (r, len) in p.runs.iter().enumerate() {
                let alone = run(Level::detect(), &p, &data, r..r + 1);
                prop_assert_eq!(&alone.dx[..], &whole.dx[first * p.channels..][..len * p.channels]);
                prop_assert_eq!(&alone.dwindows[0], &whole.dwindows[r]);
                first += len;
            }
        }
    }

    /// Cut anywhere, the second part's gradient of its window being what the first part leaves, a run has the
    /// gradients of the whole.
    #[test]
    fn gradients_flow_through_windows_of_runs_that_are_cut() {
        let whole =
            Problem { runs: vec![7], channels: 5, taps: 4, bias: true, silu: true, seed: 31 };
        let data = Data::new(&whole);
        let want = run(Level::detect(), &whole, &data, 0..1);
        let kept = (whole.taps - 1) * whole.channels;
        let (level, bias) = (Level::detect(), Some(&data.bias[..]));
        let conv = Conv1d { level, weight: &data.weight, bias, silu: true };
        let inputs = [&data.windows[0][..], &data.x].concat();
        for cut in 0..=7 {
            let (mut dwindow, mut dx) = (data.dafter[0].clone(), vec![0.0; data.x.len()]);
            for (first, len) in [(cut, 7 - cut), (0, cut)] {
                let range = first * whole.channels..(first + len) * whole.channels;
                let out = Conv1dGradients {
                    dx: &mut dx[range],
                    dweight: &mut vec![0.0; data.weight.len()],
                    dbias: None,
                };
                conv1d_backward(
                    &conv,
                    Rows::dense(&data.x, whole.channels).slice(first, len),
                    &[len],
                    &[&inputs[first * whole.channels..][..kept]],
                    Rows::dense(&data.dout, whole.channels).slice(first, len),
                    &mut [&mut dwindow],
                    out,
                );
            }
            close(&dx, &widen(&want.dx), 1e-6);
            close(&dwindow, &widen(&want.dwindows[0]), 1e-6);
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let p = Problem {
            runs: vec![200, 1, 0, 333],
            channels: 37,
            taps: 4,
            bias: true,
            silu: true,
            seed: 32,
        };
        let data = Data::new(&p);
        assert_threads_do_not_matter(|| run(Level::detect(), &p, &data, 0..4));
    }
}
