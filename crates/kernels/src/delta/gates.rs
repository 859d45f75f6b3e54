//! The decay gate of the gated delta rule, and its gradients.
//!
//! ```text
//! g[t, c] = -exp(A_log[h]) softplus(a[t, c] + dt_bias[c])        column c belongs to head h
//! ```
//!
//! With as many columns as heads it is Gated DeltaNet's, with Dk columns a head Kimi Delta Attention's.
//! `softplus` loses neither large nor small arguments, and is never below 0: so g is never above 0.

use rayon::prelude::*;

use crate::math::{exp_lanes, softplus_lanes};
use crate::parallel::for_rows;
use crate::rows::Rows;
use crate::simd::{Level, Simd, dispatch};

/// Picoseconds of an element.
const COST: usize = 1500;
/// Rows per parallel task of gradients: theirs of a parameter are one partial sum.
const ROW_BLOCK: usize = 32;

/// Inputs of [`decay_gate`].
#[derive(Debug, Clone, Copy)]
pub struct DecayGate<'a> {
    /// The instruction set.
    pub level: Level,
    /// `[T, W]`, W a multiple of H.
    pub a: Rows<'a>,
    /// Logarithms of the heads' rates, `[H]`.
    pub a_log: &'a [f32],
    /// `[W]`
    pub dt_bias: &'a [f32],
}

impl DecayGate<'_> {
    #[track_caller]
    fn check(&self) {
        let (width, heads) = (self.a.width(), self.a_log.len());
        assert!(width == 0 || (heads > 0 && width.is_multiple_of(heads)), "a_log");
        assert_eq!(self.dt_bias.len(), width, "dt_bias");
    }

    /// `-exp(A_log)` of each column.
    fn rates(&self) -> Vec<f32> {
        let of_head = self.a.width() / self.a_log.len().max(1);
        // In f64 and rounded once, so they do not depend on the instruction set.
        let rates = self.a_log.iter().map(|a_log| (-f64::from(*a_log).exp()) as f32);
        rates.flat_map(|rate| std::iter::repeat_n(rate, of_head)).collect()
    }
}

/// Writes g `[T, W]` to `out`: logarithms of decays, none above 0.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn decay_gate(gate: &DecayGate<'_>, out: &mut [f32]) {
    gate.check();
    let width = gate.a.width();
    assert_eq!(out.len(), gate.a.len() * width, "out");
    if out.is_empty() {
        return;
    }
    let rates = gate.rates();
    for_rows(out, width, COST, |first, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            gate_row(gate.level, gate.a.row(first + i), gate.dt_bias, &rates, out);
        }
    });
}

dispatch! { fn gate_row = gate_row_body(a: &[f32], bias: &[f32], rates: &[f32], out: &mut [f32]) }

#[inline(always)]
fn gate_row_body<S: Simd>(simd: S, a: &[f32], bias: &[f32], rates: &[f32], out: &mut [f32]) {
    let gate = |a: &S::Chunk, bias: &S::Chunk, rate: &S::Chunk| {
        let step = softplus_lanes(simd, simd.add(simd.load(a), simd.load(bias)));
        simd.mul(simd.load(rate), step)
    };
    let (a, a_rest) = S::chunks(a);
    let (bias, bias_rest) = S::chunks(bias);
    let (rates, rates_rest) = S::chunks(rates);
    let (out, out_rest) = S::chunks_mut(out);
    for (((a, bias), rate), out) in a.iter().zip(bias).zip(rates).zip(out) {
        simd.store(gate(a, bias, rate), out);
    }
    let mut tail = S::ZERO;
    simd.store(gate(&S::tail(a_rest), &S::tail(bias_rest), &S::tail(rates_rest)), &mut tail);
    S::write_tail(&tail, out_rest);
}

/// Where the gradients of [`decay_gate_backward`] go: that of `a` is written, those of parameters are
/// added to what is there.
#[derive(Debug)]
pub struct DecayGateGradients<'a> {
    /// `[T, W]`
    pub da: &'a mut [f32],
    /// `[H]`
    pub da_log: &'a mut [f32],
    /// `[W]`
    pub ddt_bias: &'a mut [f32],
}

/// Turns the gradient of what [`decay_gate`] gives, `dg` `[T, W]`, into those of what it was given.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn decay_gate_backward(gate: &DecayGate<'_>, dg: Rows<'_>, out: DecayGateGradients<'_>) {
    gate.check();
    let (tokens, width) = (gate.a.len(), gate.a.width());
    let DecayGateGradients { da, da_log, ddt_bias } = out;
    assert_eq!((dg.len(), dg.width()), (tokens, width), "dg");
    assert_eq!(da.len(), tokens * width, "da");
    assert_eq!(da_log.len(), gate.a_log.len(), "da_log");
    assert_eq!(ddt_bias.len(), width, "ddt_bias");
    if da.is_empty() {
        return;
    }
    let rates = gate.rates();
    // For each block of rows, the sums of `dg g` and of `da` of each column.
    let mut sums = vec![[0.0f64; 2]; tokens.div_ceil(ROW_BLOCK) * width];
    let blocks = da.par_chunks_mut(ROW_BLOCK * width).zip(sums.par_chunks_mut(width));
    let scratch = || vec![0.0; width];
    blocks.enumerate().for_each_init(scratch, |g, (block, (da, sums))| {
        for (i, da) in da.chunks_exact_mut(width).enumerate() {
            let t = block * ROW_BLOCK + i;
            let (a, dg) = (gate.a.row(t), dg.row(t));
            gate_row(gate.level, a, gate.dt_bias, &rates, g);
            slope_row(gate.level, a, gate.dt_bias, &rates, da);
            for c in 0..width {
                da[c] *= dg[c];
                sums[c][0] += f64::from(dg[c]) * f64::from(g[c]);
                sums[c][1] += f64::from(da[c]);
            }
        }
    });
    let of_head = width / gate.a_log.len();
    for sums in sums.chunks_exact(width) {
        for (c, [dg_g, da]) in sums.iter().enumerate() {
            da_log[c / of_head] += *dg_g as f32;
            ddt_bias[c] += *da as f32;
        }
    }
}

dispatch! { fn slope_row = slope_row_body(a: &[f32], bias: &[f32], rates: &[f32], out: &mut [f32]) }

/// The derivative of g by `a`: `rate sigmoid(a + bias)`.
#[inline(always)]
fn slope_row_body<S: Simd>(simd: S, a: &[f32], bias: &[f32], rates: &[f32], out: &mut [f32]) {
    let slope = |a: &S::Chunk, bias: &S::Chunk, rate: &S::Chunk| {
        let x = simd.add(simd.load(a), simd.load(bias));
        let e = exp_lanes(simd, simd.sub(simd.splat(0.0), x));
        simd.div(simd.load(rate), simd.add(simd.splat(1.0), e))
    };
    let (a, a_rest) = S::chunks(a);
    let (bias, bias_rest) = S::chunks(bias);
    let (rates, rates_rest) = S::chunks(rates);
    let (out, out_rest) = S::chunks_mut(out);
    for (((a, bias), rate), out) in a.iter().zip(bias).zip(rates).zip(out) {
        simd.store(slope(a, bias, rate), out);
    }
    let mut tail = S::ZERO;
    simd.store(slope(&S::tail(a_rest), &S::tail(bias_rest), &S::tail(rates_rest)), &mut tail);
    S::write_tail(&tail, out_rest);
}
