//! Activations of feed-forward layers, gated or not, and two small fused steps beside them.
//!
//! ```text
//! silu(x)      = x / (1 + exp(-x))
//! gelu(x)      = x Phi(x),  Phi the normal distribution: (1 + erf(x / sqrt 2)) / 2
//! gelu_tanh(x) = x (1 + tanh u) / 2 = x / (1 + exp(-2 u)),  u = sqrt(2 / pi) (x + 0.044715 x³)
//! relu2(x)     = max(x, 0)²
//! sigmoid(x)   = 1 / (1 + exp(-x))
//! identity(x)  = x
//! ```
//!
//! `gelu(x) = max(x, 0) - |x| Phi(-|x|)` has no cancellation. `Phi(-a) = exp(-a² / 2) g(a)`, where g falls from 1/2
//! like 1 / a: it is a polynomial in `1 / (1 + a / 4)`, fitted so that Phi is within 2e-9.

pub use crate::activation_backward::{
    ACTIVATION_DERIVATIVE_MAX_ERROR, activate_backward, glu_backward,
};
use crate::math::{exp_lanes, silu_lanes};
use crate::parallel::for_rows;
use crate::rows::Rows;
use crate::simd::{Level, Simd, dispatch};

/// Picoseconds of an element.
const COST: usize = 500;
/// Elements per parallel task of gradients, about.
pub(crate) const TASK: usize = 1 << 14;

/// A function of one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + exp(-x))`
    Silu,
    /// `x Phi(x)`, by the error function.
    Gelu,
    /// The approximation of `Gelu` by tanh.
    GeluTanh,
    /// `max(x, 0)²`
    Relu2,
    /// `1 / (1 + exp(-x))`
    Sigmoid,
    /// `x`: a gate without a function is a product.
    Identity,
}

/// Largest error of [`activate`] at any finite x, as a share of the larger of |x| and the result.
pub const ACTIVATION_MAX_ERROR: f64 = 3e-7;

/// Writes `activation(gate) * up`: `gate`, `up` and `out` are `[T, width]`.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn glu(level: Level, activation: Activation, gate: Rows<'_>, up: Rows<'_>, out: &mut [f32]) {
    assert_eq!((up.len(), up.width()), (gate.len(), gate.width()), "up");
    by_rows(gate, out, |gate, t, out| {
        activate_row(level, activation, gate, out);
        multiply(level, up.row(t), out);
    });
}

/// Writes `activation(x)`: `x` and `out` are `[T, width]`.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn activate(level: Level, activation: Activation, x: Rows<'_>, out: &mut [f32]) {
    by_rows(x, out, |x, _, out| activate_row(level, activation, x, out));
}

/// `out += factor * x`: `x` and `out` are `[T, width]`.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn add_scaled(out: &mut [f32], x: Rows<'_>, factor: f32) {
    by_rows(x, out, |x, _, out| {
        for (out, x) in out.iter_mut().zip(x) {
            *out += factor * x;
        }
    });
}

/// Writes `x[t, c] * factors[c]`: `x` and `out` are `[T, width]`, `factors` is `[width]`.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn scale_columns(x: Rows<'_>, factors: &[f32], out: &mut [f32]) {
    assert_eq!(factors.len(), x.width(), "factors");
    by_rows(x, out, |x, _, out| {
        for ((out, x), factor) in out.iter_mut().zip(x).zip(factors) {
            *out = x * factor;
        }
    });
}

/// Calls `row(x, t, out)` for each row, in parallel if there is enough to do.
#[track_caller]
fn by_rows(x: Rows<'_>, out: &mut [f32], row: impl Fn(&[f32], usize, &mut [f32]) + Sync) {
    let width = x.width();
    assert_eq!(out.len(), x.len() * width, "out");
    for_rows(out, width, COST, |first, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            let t = first + i;
            row(x.row(t), t, out);
        }
    });
}

dispatch! {
    /// `y *= activation(z)`; both have one length.
    pub(crate) fn gate = gate_row_body(activation: Activation, y: &mut [f32], z: &[f32])
}

#[inline(always)]
pub(crate) fn gate_row_body<S: Simd>(simd: S, activation: Activation, y: &mut [f32], z: &[f32]) {
    match activation {
        Activation::Silu => gate_by::<S, Silu>(simd, y, z),
        Activation::Gelu => gate_by::<S, Gelu>(simd, y, z),
        Activation::GeluTanh => gate_by::<S, GeluTanh>(simd, y, z),
        Activation::Relu2 => gate_by::<S, Relu2>(simd, y, z),
        Activation::Sigmoid => gate_by::<S, Sigmoid>(simd, y, z),
        Activation::Identity => gate_by::<S, Identity>(simd, y, z),
    }
}

#[inline(always)]
fn gate_by<S: Simd, F: Function>(simd: S, y: &mut [f32], z: &[f32]) {
    let (chunks, rest) = S::chunks_mut(y);
    let (gates, gate_rest) = S::chunks(z);
    for (chunk, gate) in chunks.iter_mut().zip(gates) {
        simd.store(simd.mul(simd.load(chunk), F::lanes(simd, simd.load(gate))), chunk);
    }
    let mut tail = S::tail(rest);
    let gate = F::lanes(simd, simd.load(&S::tail(gate_rest)));
    simd.store(simd.mul(simd.load(&tail), gate), &mut tail);
    S::write_tail(&tail, rest);
}

dispatch! { fn activate_row = activate_row_body(activation: Activation, x: &[f32], out: &mut [f32]) }

#[inline(always)]
fn activate_row_body<S: Simd>(simd: S, activation: Activation, x: &[f32], out: &mut [f32]) {
    match activation {
        Activation::Silu => map::<S, Silu>(simd, x, out),
        Activation::Gelu => map::<S, Gelu>(simd, x, out),
        Activation::GeluTanh => map::<S, GeluTanh>(simd, x, out),
        Activation::Relu2 => map::<S, Relu2>(simd, x, out),
        Activation::Sigmoid => map::<S, Sigmoid>(simd, x, out),
        Activation::Identity => map::<S, Identity>(simd, x, out),
    }
}

#[inline(always)]
fn map<S: Simd, F: Function>(simd: S, x: &[f32], out: &mut [f32]) {
    let (x, x_rest) = S::chunks(x);
    let (out, out_rest) = S::chunks_mut(out);
    for (x, out) in x.iter().zip(out) {
        simd.store(F::lanes(simd, simd.load(x)), out);
    }
    let mut tail = S::tail(x_rest);
    simd.store(F::lanes(simd, simd.load(&tail)), &mut tail);
    S::write_tail(&tail, out_rest);
}

dispatch! { fn multiply = multiply_body(x: &[f32], out: &mut [f32]) }

#[inline(always)]
fn multiply_body<S: Simd>(_simd: S, x: &[f32], out: &mut [f32]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out *= x;
    }
}

/// A function of each lane.
trait Function {
    fn lanes<S: Simd>(simd: S, x: S::F) -> S::F;
}

pub(crate) struct Silu;
pub(crate) struct Gelu;
pub(crate) struct GeluTanh;
pub(crate) struct Relu2;
pub(crate) struct Sigmoid;
pub(crate) struct Identity;

impl Function for Silu {
    #[inline(always)]
    fn lanes<S: Simd>(simd: S, x: S::F) -> S::F {
        silu_lanes(simd, x)
    }
}

impl Function for Gelu {
    #[inline(always)]
    fn lanes<S: Simd>(simd: S, x: S::F) -> S::F {
        let (negative, phi, _) = normal_tail(simd, x);
        simd.mul_add(negative, phi, simd.max(simd.splat(0.0), x))
    }
}

/// `-a`, `Phi(-a)` and `exp(-a² / 2)` for `a = |x|`, at most 20: beyond, both are 0.
#[inline(always)]
pub(crate) fn normal_tail<S: Simd>(simd: S, x: S::F) -> (S::F, S::F, S::F) {
    let (zero, one) = (simd.splat(0.0), simd.splat(1.0));
    let negative = simd.max(simd.splat(-20.0), simd.min(simd.sub(zero, x), x));
    let t = simd.div(one, simd.mul_add(negative, simd.splat(-0.25), one));
    let mut g = simd.splat(-0.086_452_244);
    g = simd.mul_add(g, t, simd.splat(0.315_463));
    g = simd.mul_add(g, t, simd.splat(-0.211_941_56));
    g = simd.mul_add(g, t, simd.splat(0.219_671_17));
    g = simd.mul_add(g, t, simd.splat(0.063_220_4));
    g = simd.mul_add(g, t, simd.splat(0.099_478_91));
    g = simd.mul_add(g, t, simd.splat(0.100_560_33));
    let e = exp_lanes(simd, simd.mul(negative, simd.mul(negative, simd.splat(-0.5))));
    (negative, simd.mul(e, simd.mul(g, t)), e)
}

impl Function for GeluTanh {
    #[inline(always)]
    fn lanes<S: Simd>(simd: S, x: S::F) -> S::F {
        // -2 u = x (-2 sqrt(2 / pi) - 2 sqrt(2 / pi) 0.044715 x²)
        let square = simd.mul(x, x);
        let slope = simd.mul_add(square, simd.splat(-0.071_354_814), simd.splat(-1.595_769));
        let e = exp_lanes(simd, simd.mul(x, slope));
        simd.div(x, simd.add(simd.splat(1.0), e))
    }
}

impl Function for Relu2 {
    #[inline(always)]
    fn lanes<S: Simd>(simd: S, x: S::F) -> S::F {
        let x = simd.max(simd.splat(0.0), x);
        simd.mul(x, x)
    }
}

impl Function for Sigmoid {
    #[inline(always)]
    fn lanes<S: Simd>(simd: S, x: S::F) -> S::F {
        let one = simd.splat(1.0);
        simd.div(one, simd.add(one, exp_lanes(simd, simd.sub(simd.splat(0.0), x))))
    }
}

impl Function for Identity {
    #[inline(always)]
    fn lanes<S: Simd>(_simd: S, x: S::F) -> S::F {
        x
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    const ALL: [Activation; 6] = [
        Activation::Silu,
        Activation::Gelu,
        Activation::GeluTanh,
        Activation::Relu2,
        Activation::Sigmoid,
        Activation::Identity,
    ];

    /// `erfc` for x >= 0, in f64: the series of erf below 3, the continued fraction of erfc above.
    fn erfc(x: f64) -> f64 {
        let root = std::f64::consts::PI.sqrt();
        if x < 3.0 {
            let (mut term, mut sum) = (x, x);
            for n in 1..100 {
                term *= -x * x / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            1.0 - 2.0 / root * sum
        } else {
            let tail = (1..60).rev().fold(x, |tail, n| x + f64::from(n) / 2.0 / tail);
            (-x * x).exp() / root / tail
        }
    }

    fn reference(activation: Activation, x: f32) -> f64 {
        let x = f64::from(x);
        match activation {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::Gelu => {
                let tail = erfc(x.abs() / 2f64.sqrt()) / 2.0;
                if x > 0.0 { x * (1.0 - tail) } else { x * tail }
            }
            Activation::GeluTanh => {
                let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                x * 0.5 * (1.0 + u.tanh())
            }
            Activation::Relu2 => x.max(0.0).powi(2),
            Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Activation::Identity => x,
        }
    }

    #[test]
    fn the_error_function_of_the_tests_is_right() {
        // Abramowitz and Stegun, table 7.1 and 7.3
        for (x, want) in
            [(0.5, 0.479_500_122_187), (2.0, 0.004_677_734_981), (3.5, 7.430_983_723e-7)]
        {
            assert!((erfc(x) / want - 1.0).abs() < 1e-9, "erfc({x}) = {}", erfc(x));
        }
    }

    #[test]
    fn every_function_is_within_its_bound_on_every_instruction_set() {
        // Dense where something happens, and floats of every exponent.
        let mut x: Vec<f32> = (-200_000..200_000).map(|i| i as f32 * 1e-4).collect();
        x.extend((0..=u32::MAX).step_by(99_991).map(f32::from_bits).filter(|x| x.is_finite()));
        let mut out = vec![0.0; x.len()];
        for &level in Level::present() {
            for activation in ALL {
                activate_row(level, activation, &x, &mut out);
                for (x, got) in x.iter().zip(&out) {
                    let want = reference(activation, *x);
                    if want > f64::from(f32::MAX) {
                        assert_eq!(*got, f32::INFINITY);
                        continue;
                    }
                    let bound = ACTIVATION_MAX_ERROR * want.abs().max(f64::from(x.abs())) + 1e-44;
                    let error = (f64::from(*got) - want).abs();
                    assert!(error <= bound, "{activation:?}({x}) = {got}, not {want}");
                }
            }
        }
    }

    #[test]
    fn not_a_number_stays_one() {
        for &level in Level::present() {
            for activation in ALL {
                let mut out = [0.0; 9];
                activate_row(level, activation, &[f32::NAN; 9], &mut out);
                assert!(out.iter().all(|x| x.is_nan()), "{activation:?}");
            }
        }
    }

    #[test]
    fn gates_and_factors_meet_their_own_element() {
        let mut rng = Rng::new(80);
        // Enough rows for several tasks, and a stride.
        let (rows, width) = (50, 1001);
        let wide = rng.floats(rows * 2 * width);
        let gate = Rows::new(&wide, rows, 2 * width, 0, width);
        let up = Rows::new(&wide, rows, 2 * width, width, width);
        let mut activated = vec![0.0; rows * width];
        activate(Level::detect(), Activation::Silu, gate, &mut activated);
        let mut gated = vec![f32::NAN; rows * width];
        glu(Level::detect(), Activation::Silu, gate, up, &mut gated);
        let factors = rng.floats(width);
        let mut scaled = vec![f32::NAN; rows * width];
        scale_columns(up, &factors, &mut scaled);
        let mut added = activated.clone();
        add_scaled(&mut added, up, 0.5);
        for t in 0..rows {
            for c in 0..width {
                let (i, up) = (t * width + c, up.row(t)[c]);
                let silu = reference(Activation::Silu, gate.row(t)[c]);
                assert!((f64::from(activated[i]) - silu).abs() < 1e-6);
                assert_eq!(gated[i], activated[i] * up);
                assert_eq!(scaled[i], up * factors[c]);
                assert_eq!(added[i], activated[i] + 0.5 * up);
            }
        }
    }

    #[test]
    #[should_panic(expected = "up")]
    fn a_gate_of_another_width_panics() {
        let x = [0.0; 6];
        glu(
            Level::detect(),
            Activation::Silu,
            Rows::dense(&x, 3),
            Rows::dense(&x, 2),
            &mut [0.0; 6],
        );
    }
}
