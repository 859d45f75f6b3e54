//! `exp`, `softplus` and `silu` on slices, with stated error bounds.
//!
//! Method of `exp`:
//!
//! 1. `n = round(x / ln 2)`, `r = x - n ln 2` with `ln 2` in two parts, so that `|r| <= ln 2 / 2`.
//! 2. `exp(r)` by its Taylor polynomial of degree 7, whose truncation error there is below 1e-8.
//! 3. Times `2^n` in two factors, so that the largest and the subnormal results come out right.
//!
//! `softplus(x) = max(x, 0) + log1p(u)` with `u = exp(-|x|)`, and `log1p(u) = 2 atanh(s)` with
//! `s = u / (2 + u) <= 1/3`: a series in `s²` that keeps its relative precision as `u` goes to zero.

use crate::simd::{Level, Simd, dispatch};

/// Largest error of [`exp`] in units in the last place of a normal result.
pub const EXP_MAX_ULP: u32 = 2;
/// Largest error of [`softplus`] in units in the last place of a normal result.
pub const SOFTPLUS_MAX_ULP: u32 = 3;
/// Largest error of [`silu`] in units in the last place of a result above 1e-35 in magnitude; smaller
/// ones may become 0.
pub const SILU_MAX_ULP: u32 = 4;

/// Replaces each element by its exponential.
///
/// Within [`EXP_MAX_ULP`]; 0 below -104, infinite above 88.73; NaN stays NaN.
pub fn exp(level: Level, x: &mut [f32]) {
    map(level, Function::Exp, x);
}

/// Replaces each element by `ln(1 + exp(x))`.
///
/// Within [`SOFTPLUS_MAX_ULP`] for any input: neither overflows nor loses small results.
///
/// ```
/// let mut x = [-17.0, 0.0, 89.0, 1e4];
/// boostr_kernels::math::softplus(boostr_kernels::Level::detect(), &mut x);
/// assert_eq!(x[2..], [89.0, 1e4]);
/// assert!((x[0] - 4.139_937e-8).abs() < 1e-13);
/// ```
pub fn softplus(level: Level, x: &mut [f32]) {
    map(level, Function::Softplus, x);
}

/// Replaces each element by `x / (1 + exp(-x))`.
///
/// Within [`SILU_MAX_ULP`].
pub fn silu(level: Level, x: &mut [f32]) {
    map(level, Function::Silu, x);
}

#[derive(Debug, Clone, Copy)]
enum Function {
    Exp,
    Softplus,
    Silu,
}

dispatch! { fn map = map_body(function: Function, x: &mut [f32]) }

#[inline(always)]
fn map_body<S: Simd>(simd: S, function: Function, x: &mut [f32]) {
    let (chunks, rest) = S::chunks_mut(x);
    for chunk in chunks {
        let y = apply(simd, function, simd.load(chunk));
        simd.store(y, chunk);
    }
    let mut tail = S::tail(rest);
    let y = apply(simd, function, simd.load(&tail));
    simd.store(y, &mut tail);
    S::write_tail(&tail, rest);
}

#[inline(always)]
fn apply<S: Simd>(simd: S, function: Function, x: S::F) -> S::F {
    match function {
        Function::Exp => exp_lanes(simd, x),
        Function::Softplus => softplus_lanes(simd, x),
        Function::Silu => silu_lanes(simd, x),
    }
}

/// `exp` of each lane.
#[inline(always)]
pub(crate) fn exp_lanes<S: Simd>(simd: S, x: S::F) -> S::F {
    // Beyond these the result is 0 or infinite anyway; NaN passes, being the second operand.
    let x = simd.min(simd.splat(90.0), simd.max(simd.splat(-105.0), x));
    let n = simd.round(simd.mul(x, simd.splat(std::f32::consts::LOG2_E)));
    // 355/512 times n is exact for |n| < 2^15.
    let r = simd.mul_add(n, simd.splat(-355.0 / 512.0), x);
    let r = simd.mul_add(n, simd.splat(2.121_944_4e-4), r);
    let mut p = simd.splat(1.0 / 5040.0);
    p = simd.mul_add(p, r, simd.splat(1.0 / 720.0));
    p = simd.mul_add(p, r, simd.splat(1.0 / 120.0));
    p = simd.mul_add(p, r, simd.splat(1.0 / 24.0));
    p = simd.mul_add(p, r, simd.splat(1.0 / 6.0));
    p = simd.mul_add(p, r, simd.splat(0.5));
    p = simd.mul_add(p, r, simd.splat(1.0));
    p = simd.mul_add(p, r, simd.splat(1.0));
    let half = simd.round(simd.mul(n, simd.splat(0.5)));
    simd.mul(simd.mul(p, simd.exp2i(half)), simd.exp2i(simd.sub(n, half)))
}

/// `softplus` of each lane.
#[inline(always)]
pub(crate) fn softplus_lanes<S: Simd>(simd: S, x: S::F) -> S::F {
    let zero = simd.splat(0.0);
    let negative_magnitude = simd.min(simd.sub(zero, x), x);
    let u = exp_lanes(simd, negative_magnitude);
    let s = simd.div(u, simd.add(simd.splat(2.0), u));
    let q = simd.mul(s, s);
    let mut p = simd.splat(1.0 / 15.0);
    p = simd.mul_add(p, q, simd.splat(1.0 / 13.0));
    p = simd.mul_add(p, q, simd.splat(1.0 / 11.0));
    p = simd.mul_add(p, q, simd.splat(1.0 / 9.0));
    p = simd.mul_add(p, q, simd.splat(1.0 / 7.0));
    p = simd.mul_add(p, q, simd.splat(1.0 / 5.0));
    p = simd.mul_add(p, q, simd.splat(1.0 / 3.0));
    let s2 = simd.add(s, s);
    let log1p = simd.mul_add(simd.mul(p, q), s2, s2);
    simd.add(simd.max(zero, x), log1p)
}

/// `silu` of each lane.
#[inline(always)]
pub(crate) fn silu_lanes<S: Simd>(simd: S, x: S::F) -> S::F {
    let e = exp_lanes(simd, simd.sub(simd.splat(0.0), x));
    simd.div(x, simd.add(simd.splat(1.0), e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(function: Function, x: f32) -> f32 {
        let x = f64::from(x);
        (match function {
            Function::Exp => x.exp(),
            Function::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
            Function::Silu => x / (1.0 + (-x).exp()),
        }) as f32
    }

    /// Distance in units in the last place; results under `smallest` count absolutely.
    fn ulp(got: f32, want: f32, smallest: f32) -> u32 {
        if got == want || (got.is_nan() && want.is_nan()) {
            return 0;
        }
        if want.abs() < smallest {
            return ((got - want).abs() / smallest).ceil() as u32;
        }
        got.to_bits().abs_diff(want.to_bits())
    }

    fn worst(function: Function, step: usize) -> (u32, f32) {
        let mut worst = (0, 0.0);
        let smallest = if matches!(function, Function::Silu) { 1e-35 } else { f32::MIN_POSITIVE };
        for &level in Level::present() {
            for start in (0..=u32::MAX - 4096).step_by(step) {
                let x: Vec<f32> = (start..start + 19).map(f32::from_bits).collect();
                let mut y = x.clone();
                map(level, function, &mut y);
                for (x, y) in x.into_iter().zip(y) {
                    let error = ulp(y, reference(function, x), smallest);
                    if error > worst.0 {
                        worst = (error, x);
                    }
                }
            }
        }
        worst
    }

    #[test]
    fn functions_are_within_their_bounds_over_all_floats() {
        for (function, bound) in [
            (Function::Exp, EXP_MAX_ULP),
            (Function::Softplus, SOFTPLUS_MAX_ULP),
            (Function::Silu, SILU_MAX_ULP),
        ] {
            let (error, x) = worst(function, 65_537);
            assert!(error <= bound, "{function:?}({x}) is {error} units off");
        }
    }

    #[test]
    #[ignore = "every 19th float takes minutes"]
    fn functions_are_within_their_bounds_over_every_float() {
        for (function, bound) in [
            (Function::Exp, EXP_MAX_ULP),
            (Function::Softplus, SOFTPLUS_MAX_ULP),
            (Function::Silu, SILU_MAX_ULP),
        ] {
            let (error, x) = worst(function, 19);
            assert!(error <= bound, "{function:?}({x}) is {error} units off");
        }
    }

    #[test]
    fn softplus_neither_overflows_nor_vanishes() {
        let mut x = [-200.0, -30.0, -17.0, 0.0, 20.0, 89.0, 1e4];
        softplus(Level::detect(), &mut x);
        let want = [0.0, 9.357_623e-14, 4.139_937_6e-8, std::f32::consts::LN_2, 20.0, 89.0, 1e4];
        for (x, want) in x.into_iter().zip(want) {
            assert!((x - want).abs() <= 1e-6 * want + 1e-38, "{x} != {want}");
        }
    }
}
