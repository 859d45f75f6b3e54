//! Causal depthwise convolution over ragged runs, with the window that carries a run on, and silu.
//!
//! ```text
//! out[t, c] = silu(bias[c] + sum over k of weight[k, c] * in[t - (K - 1) + k, c])
//! ```
//!
//! where `in` before a run's first token is the run's window: the last K - 1 inputs of what came
//! before, zeros for a new sequence. Tap K - 1 meets the current token. Weights are `[K, C]`, taps
//! first, so that a vector holds neighbouring channels.

use crate::math::silu;
use crate::parallel;
use crate::rows::Rows;
use crate::simd::{Level, Simd, dispatch};

/// Most rows of a parallel task.
const ROW_BLOCK: usize = 16;
/// Picoseconds of an element.
const COST: usize = 1000;

/// A causal depthwise convolution of C channels with K taps.
#[derive(Debug, Clone, Copy)]
pub struct Conv1d<'a> {
    /// The instruction set.
    pub level: Level,
    /// Taps `[K, C]`, oldest first; K >= 1.
    pub weight: &'a [f32],
    /// `[C]`
    pub bias: Option<&'a [f32]>,
    /// Whether silu follows.
    pub silu: bool,
}

/// Convolves each run and moves its window on.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `conv` | see [`Conv1d`] | taps, bias, silu |
/// | `x` | `[T, C]` | inputs of all runs, one after another |
/// | `runs` | lengths, sum T | tokens of each sequence; may be 0 |
/// | `windows` | a `[K - 1, C]` for each run | last inputs, oldest first; updated |
/// | `out` | `[T, C]` | overwritten |
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn conv1d(
    conv: &Conv1d<'_>,
    x: Rows<'_>,
    runs: &[usize],
    windows: &mut [&mut [f32]],
    out: &mut [f32],
) {
    let Conv1d { level, weight, bias, silu: is_silu } = *conv;
    let channels = x.width();
    assert!(channels > 0, "x: no channels");
    let taps = weight.len() / channels;
    assert!(taps >= 1 && weight.len() == taps * channels, "weight");
    assert!(bias.is_none_or(|b| b.len() == channels), "bias");
    assert_eq!(runs.iter().sum::<usize>(), x.len(), "runs");
    assert_eq!(windows.len(), runs.len(), "windows");
    assert!(windows.iter().all(|w| w.len() == (taps - 1) * channels), "windows");
    assert_eq!(out.len(), x.len() * channels, "out");

    let ns = out.len().saturating_mul(COST) / 1000;
    let mut tasks = Vec::new();
    let (mut first, mut rest) = (0, out);
    for (&len, window) in runs.iter().zip(windows.iter()) {
        let (out, others) = rest.split_at_mut(len * channels);
        let inputs = Inputs { before: window, x: x.slice(first, len) };
        let blocks = out.chunks_mut(ROW_BLOCK * channels).enumerate();
        tasks.extend(blocks.map(|(block, out)| (inputs, block * ROW_BLOCK, out)));
        (first, rest) = (first + len, others);
    }
    parallel::for_each(
        tasks,
        ns,
        || (),
        |(), (inputs, first, out)| {
            for (i, out) in out.chunks_exact_mut(channels).enumerate() {
                convolve(level, inputs, first + i, weight, bias, out);
                if is_silu {
                    silu(level, out);
                }
            }
        },
    );
    let mut first = 0;
    for (&len, window) in runs.iter().zip(windows) {
        let x = x.slice(first, len);
        first += len;
        let kept = taps - 1;
        if len < kept {
            window.copy_within(len * channels.., 0);
        }
        for i in kept.saturating_sub(len)..kept {
            window[i * channels..][..channels].copy_from_slice(x.row(len + i - kept));
        }
    }
}

/// What a run's taps meet: its window, then its tokens.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    /// `[K - 1, C]`
    pub(crate) before: &'a [f32],
    /// `[L, C]`
    pub(crate) x: Rows<'a>,
}

impl<'a> Inputs<'a> {
    /// Row `i`, counted from the window's first.
    #[inline]
    pub(crate) fn row(&self, i: usize) -> &'a [f32] {
        let channels = self.x.width();
        match (i * channels).checked_sub(self.before.len()) {
            Some(past) => self.x.row(past / channels),
            None => &self.before[i * channels..][..channels],
        }
    }
}

/// Token `t` of a run before silu.
pub(crate) fn convolve(
    level: Level,
    inputs: Inputs<'_>,
    t: usize,
    weight: &[f32],
    bias: Option<&[f32]>,
    out: &mut [f32],
) {
    match bias {
        Some(bias) => out.copy_from_slice(bias),
        None => out.fill(0.0),
    }
    for (k, tap) in weight.chunks_exact(out.len()).enumerate() {
        add_products(level, tap, inputs.row(t + k), out);
    }
}

dispatch! { pub(crate) fn add_products = add_products_body(a: &[f32], b: &[f32], out: &mut [f32]) }

/// `out += a * b`
#[inline(always)]
fn add_products_body<S: Simd>(simd: S, a: &[f32], b: &[f32], out: &mut [f32]) {
    let (a, a_rest) = S::chunks(a);
    let (b, b_rest) = S::chunks(b);
    let (out, out_rest) = S::chunks_mut(out);
    for ((a, b), out) in a.iter().zip(b).zip(out) {
        simd.store(simd.mul_add(simd.load(a), simd.load(b), simd.load(out)), out);
    }
    let (a, b, mut out) = (S::tail(a_rest), S::tail(b_rest), S::tail(out_rest));
    simd.store(simd.mul_add(simd.load(&a), simd.load(&b), simd.load(&out)), &mut out);
    S::write_tail(&out, out_rest);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Rng, close};

    /// The definition, in f64: one channel's inputs with the window before them.
    fn reference(inputs: &[f32], weight: &[f32], bias: f32, silu: bool) -> Vec<f64> {
        let taps = weight.len();
        (0..inputs.len() + 1 - taps)
            .map(|t| {
                let sum: f64 =
                    (0..taps).map(|k| f64::from(weight[k]) * f64::from(inputs[t + k])).sum::<f64>()
                        + f64::from(bias);
                if silu { sum / (1.0 + (-sum).exp()) } else { sum }
            })
            .collect()
    }

    #[test]
    fn equals_the_definition_for_any_width_runs_and_channels() {
        for &level in Level::present() {
            let mut rng = Rng::new(1);
            for taps in [1, 2, 3, 4, 7] {
                for channels in [1, 3, 8, 17, 40] {
                    for silu in [false, true] {
                        let runs = [0, 1, 2, 5, 40];
                        let total: usize = runs.iter().sum();
                        let x = rng.floats(total * channels);
                        let weight = rng.floats(taps * channels);
                        let bias = rng.floats(channels);
                        let before: Vec<Vec<f32>> =
                            runs.iter().map(|_| rng.floats((taps - 1) * channels)).collect();
                        let mut windows = before.clone();
                        let mut windows: Vec<&mut [f32]> =
                            windows.iter_mut().map(Vec::as_mut_slice).collect();
                        let mut out = vec![f32::NAN; total * channels];
                        let rows = Rows::dense(&x, channels);
                        let conv = Conv1d { level, weight: &weight, bias: Some(&bias), silu };
                        conv1d(&conv, rows, &runs, &mut windows, &mut out);
                        let mut first = 0;
                        for (r, &len) in runs.iter().enumerate() {
                            for c in 0..channels {
                                let mut inputs: Vec<f32> =
                                    before[r].iter().skip(c).step_by(channels).copied().collect();
                                inputs.extend((first..first + len).map(|t| rows.row(t)[c]));
                                let w: Vec<f32> =
                                    weight.iter().skip(c).step_by(channels).copied().collect();
                                let got: Vec<f32> =
                                    (first..first + len).map(|t| out[t * channels + c]).collect();
                                if len > 0 {
                                    close(&got, &reference(&inputs, &w, bias[c], silu), 1e-6);
                                }
                                let window: Vec<f32> =
                                    windows[r].iter().skip(c).step_by(channels).copied().collect();
                                assert_eq!(window, inputs[inputs.len() - (taps - 1)..]);
                            }
                            first += len;
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn pieces_of_a_run_give_the_bits_of_the_whole() {
        let mut rng = Rng::new(2);
        let (channels, len, taps) = (13, 11, 4);
        let x = rng.floats(len * channels);
        let weight = rng.floats(taps * channels);
        let conv = Conv1d { level: Level::detect(), weight: &weight, bias: None, silu: true };
        let run = |pieces: &[usize]| {
            let mut window = vec![0.0; (taps - 1) * channels];
            let mut out = Vec::new();
            let mut first = 0;
            for &piece in pieces {
                let rows = Rows::dense(&x, channels).slice(first, piece);
                let mut y = vec![0.0; piece * channels];
                conv1d(&conv, rows, &[piece], &mut [&mut window], &mut y);
                out.extend(y);
                first += piece;
            }
            (out, window)
        };
        let whole = run(&[len]);
        for cut in 0..=len {
            assert_eq!(run(&[cut, len - cut]), whole, "cut at {cut}");
        }
        assert_eq!(run(&[1; 11]), whole);
    }
}
