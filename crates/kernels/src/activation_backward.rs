//! Gradients of activations, gated or not.
//!
//! ```text
//! silu'(x)      = s + x s (1 - s),                  s = 1 / (1 + exp(-x))
//! gelu'(x)      = Phi(x) + x phi(x),                phi(x) = exp(-x² / 2) / sqrt(2 pi)
//! gelu_tanh'(x) = s + x s (1 - s) 2 u',             s = 1 / (1 + exp(-2 u))
//! relu2'(x)     = 2 max(x, 0)
//! sigmoid'(x)   = s (1 - s)
//! ```
//!
//! with `Phi` and `u` of the forward. Arguments are clamped where the derivative is 0 or 1 to the last bit,
//! so that no `exp` overflows, and `1 - s = exp(-x) s` has no cancellation.

use rayon::prelude::*;

use crate::activation::{
    Activation, Gelu, GeluTanh, Identity, Relu2, Sigmoid, Silu, TASK, normal_tail,
};
use crate::math::exp_lanes;
use crate::rows::Rows;
use crate::simd::{Level, Simd, dispatch};

/// Largest error of a derivative at any finite x, as a share of the larger of 1 and the derivative.
pub const ACTIVATION_DERIVATIVE_MAX_ERROR: f64 = 4e-7;

/// The gradients of [`glu`](crate::activation::glu), whose output is `activation(gate) * up`.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `gate`, `up` | `[T, width]` | inputs of the forward |
/// | `dout` | `[T, width]` | gradient of the output |
/// | `dgate`, `dup` | `[T, width]` | written |
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn glu_backward(
    level: Level,
    activation: Activation,
    gate: Rows<'_>,
    up: Rows<'_>,
    dout: Rows<'_>,
    dgate: &mut [f32],
    dup: &mut [f32],
) {
    let (len, width) = (gate.len(), gate.width());
    assert_eq!((up.len(), up.width()), (len, width), "up");
    assert_eq!((dout.len(), dout.width()), (len, width), "dout");
    assert_eq!(dgate.len(), len * width, "dgate");
    assert_eq!(dup.len(), len * width, "dup");
    if dgate.is_empty() {
        return;
    }
    let rows = (TASK / width).max(1);
    let tasks = dgate.par_chunks_mut(rows * width).zip(dup.par_chunks_mut(rows * width));
    tasks.enumerate().for_each(|(task, (dgate, dup))| {
        let pairs = dgate.chunks_exact_mut(width).zip(dup.chunks_exact_mut(width));
        for (i, (dgate, dup)) in pairs.enumerate() {
            let t = task * rows + i;
            glu_row_backward(level, activation, gate.row(t), up.row(t), dout.row(t), dgate, dup);
        }
    });
}

/// The gradient of [`activate`](crate::activation::activate): writes `dout * activation'(x)`; `x`, `dout`
/// and `dx` are `[T, width]`.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn activate_backward(
    level: Level,
    activation: Activation,
    x: Rows<'_>,
    dout: Rows<'_>,
    dx: &mut [f32],
) {
    let (len, width) = (x.len(), x.width());
    assert_eq!((dout.len(), dout.width()), (len, width), "dout");
    assert_eq!(dx.len(), len * width, "dx");
    if dx.is_empty() {
        return;
    }
    let rows = (TASK / width).max(1);
    dx.par_chunks_mut(rows * width).enumerate().for_each(|(task, dx)| {
        for (i, dx) in dx.chunks_exact_mut(width).enumerate() {
            let t = task * rows + i;
            activate_row_backward(level, activation, x.row(t), dout.row(t), dx);
        }
    });
}

dispatch! {
    /// Writes the gradients of a row of `activation(gate) * up`; all slices have one length.
    pub(crate) fn glu_row_backward = glu_row_backward_body(
        activation: Activation, gate: &[f32], up: &[f32], dout: &[f32], dgate: &mut [f32], dup: &mut [f32],
    )
}

#[inline(always)]
fn glu_row_backward_body<S: Simd>(
    simd: S,
    activation: Activation,
    gate: &[f32],
    up: &[f32],
    dout: &[f32],
    dgate: &mut [f32],
    dup: &mut [f32],
) {
    match activation {
        Activation::Silu => glu_row::<S, Silu>(simd, gate, up, dout, dgate, dup),
        Activation::Gelu => glu_row::<S, Gelu>(simd, gate, up, dout, dgate, dup),
        Activation::GeluTanh => glu_row::<S, GeluTanh>(simd, gate, up, dout, dgate, dup),
        Activation::Relu2 => glu_row::<S, Relu2>(simd, gate, up, dout, dgate, dup),
        Activation::Sigmoid => glu_row::<S, Sigmoid>(simd, gate, up, dout, dgate, dup),
        Activation::Identity => glu_row::<S, Identity>(simd, gate, up, dout, dgate, dup),
    }
}

#[inline(always)]
fn glu_row<S: Simd, F: Differentiable>(
    simd: S,
    gate: &[f32],
    up: &[f32],
    dout: &[f32],
    dgate: &mut [f32],
    dup: &mut [f32],
) {
    let (gates, gate) = S::chunks(gate);
    let (ups, up) = S::chunks(up);
    let (douts, dout) = S::chunks(dout);
    let (dgates, dgate) = S::chunks_mut(dgate);
    let (dups, dup) = S::chunks_mut(dup);
    for ((((gate, up), dout), dgate), dup) in gates.iter().zip(ups).zip(douts).zip(dgates).zip(dups)
    {
        let (value, slope) = F::value_and_derivative(simd, simd.load(gate));
        let dout = simd.load(dout);
        simd.store(simd.mul(simd.mul(dout, simd.load(up)), slope), dgate);
        simd.store(simd.mul(dout, value), dup);
    }
    let (value, slope) = F::value_and_derivative(simd, simd.load(&S::tail(gate)));
    let (dout, mut tail) = (simd.load(&S::tail(dout)), S::tail(up));
    simd.store(simd.mul(simd.mul(dout, simd.load(&tail)), slope), &mut tail);
    S::write_tail(&tail, dgate);
    simd.store(simd.mul(dout, value), &mut tail);
    S::write_tail(&tail, dup);
}

dispatch! {
    /// Writes `dout * activation'(x)` for a row; all slices have one length.
    pub(crate) fn activate_row_backward = activate_row_backward_body(
        activation: Activation, x: &[f32], dout: &[f32], dx: &mut [f32],
    )
}

#[inline(always)]
fn activate_row_backward_body<S: Simd>(
    simd: S,
    activation: Activation,
    x: &[f32],
    dout: &[f32],
    dx: &mut [f32],
) {
    match activation {
        Activation::Silu => activate_row::<S, Silu>(simd, x, dout, dx),
        Activation::Gelu => activate_row::<S, Gelu>(simd, x, dout, dx),
        Activation::GeluTanh => activate_row::<S, GeluTanh>(simd, x, dout, dx),
        Activation::Relu2 => activate_row::<S, Relu2>(simd, x, dout, dx),
        Activation::Sigmoid => activate_row::<S, Sigmoid>(simd, x, dout, dx),
        Activation::Identity => activate_row::<S, Identity>(simd, x, dout, dx),
    }
}

#[inline(always)]
fn activate_row<S: Simd, F: Differentiable>(simd: S, x: &[f32], dout: &[f32], dx: &mut [f32]) {
    let (xs, x) = S::chunks(x);
    let (douts, dout) = S::chunks(dout);
    let (dxs, dx) = S::chunks_mut(dx);
    for ((x, dout), dx) in xs.iter().zip(douts).zip(dxs) {
        let (_, slope) = F::value_and_derivative(simd, simd.load(x));
        simd.store(simd.mul(simd.load(dout), slope), dx);
    }
    let (_, slope) = F::value_and_derivative(simd, simd.load(&S::tail(x)));
    let mut tail = S::tail(dout);
    simd.store(simd.mul(simd.load(&tail), slope), &mut tail);
    S::write_tail(&tail, dx);
}

/// A function of each lane with its derivative.
trait Differentiable {
    fn value_and_derivative<S: Simd>(simd: S, x: S::F) -> (S::F, S::F);
}

/// x where exp(-x) is finite, exp(-x), and the sigmoid of x.
#[inline(always)]
fn sigmoid_parts<S: Simd>(simd: S, x: S::F) -> (S::F, S::F, S::F) {
    let one = simd.splat(1.0);
    let x = simd.max(simd.splat(-87.0), x);
    let e = exp_lanes(simd, simd.sub(simd.splat(0.0), x));
    (x, e, simd.div(one, simd.add(one, e)))
}

impl Differentiable for Silu {
    #[inline(always)]
    fn value_and_derivative<S: Simd>(simd: S, x: S::F) -> (S::F, S::F) {
        let (x, e, s) = sigmoid_parts(simd, x);
        let value = simd.mul(x, s);
        (value, simd.mul_add(value, simd.mul(e, s), s))
    }
}

impl Differentiable for Gelu {
    #[inline(always)]
    fn value_and_derivative<S: Simd>(simd: S, x: S::F) -> (S::F, S::F) {
        let (half, one) = (simd.splat(0.5), simd.splat(1.0));
        let (negative, tail, e) = normal_tail(simd, x);
        let value = simd.mul_add(negative, tail, simd.max(simd.splat(0.0), x));
        // Phi(-a) - a phi(a), where x is -a; one less that, where x is a.
        let below = simd.mul_add(negative, simd.mul(e, simd.splat(0.398_942_3)), tail);
        let sign = simd.max(simd.splat(-1.0), simd.min(one, simd.mul(x, simd.splat(1e38))));
        let step = simd.mul_add(sign, half, half);
        (value, simd.sub(step, simd.mul(sign, below)))
    }
}

impl Differentiable for GeluTanh {
    #[inline(always)]
    fn value_and_derivative<S: Simd>(simd: S, x: S::F) -> (S::F, S::F) {
        let one = simd.splat(1.0);
        let above = simd.max(simd.splat(-10.0), x);
        let x = simd.min(simd.splat(10.0), above);
        let square = simd.mul(x, x);
        // -2 u / x and 2 u', as in the forward
        let ratio = simd.mul_add(square, simd.splat(-0.071_354_814), simd.splat(-1.595_769));
        let slope = simd.mul_add(square, simd.splat(0.214_064_44), simd.splat(1.595_769));
        let e = exp_lanes(simd, simd.mul(x, ratio));
        let s = simd.div(one, simd.add(one, e));
        let rise = simd.mul(simd.mul(x, s), simd.mul(e, s));
        (simd.mul(above, s), simd.mul_add(rise, slope, s))
    }
}

impl Differentiable for Relu2 {
    #[inline(always)]
    fn value_and_derivative<S: Simd>(simd: S, x: S::F) -> (S::F, S::F) {
        let x = simd.max(simd.splat(0.0), x);
        (simd.mul(x, x), simd.add(x, x))
    }
}

impl Differentiable for Sigmoid {
    #[inline(always)]
    fn value_and_derivative<S: Simd>(simd: S, x: S::F) -> (S::F, S::F) {
        let (_, e, s) = sigmoid_parts(simd, x);
        (s, simd.mul(s, simd.mul(e, s)))
    }
}

impl Differentiable for Identity {
    #[inline(always)]
    fn value_and_derivative<S: Simd>(simd: S, x: S::F) -> (S::F, S::F) {
        (x, simd.splat(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gradcheck::{
        assert_gradient, assert_threads_do_not_matter, dot, numeric_gradient, widen,
    };
    use crate::testing::Rng;

    const ALL: [Activation; 6] = [
        Activation::Silu,
        Activation::Gelu,
        Activation::GeluTanh,
        Activation::Relu2,
        Activation::Sigmoid,
        Activation::Identity,
    ];

    /// `erf`, by its series: within 1e-15 for |x| <= 3, which are added without loss.
    fn erf(x: f64) -> f64 {
        if x.abs() > 3.0 {
            // The continued fraction of the rest.
            let a = x.abs();
            let tail = (1..80).rev().fold(a, |tail, n| a + f64::from(n) / 2.0 / tail);
            let rest = (-a * a).exp() / std::f64::consts::PI.sqrt() / tail;
            return (1.0 - rest).copysign(x);
        }
        let (mut term, mut sum) = (x, x);
        for n in 1..100 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        2.0 / std::f64::consts::PI.sqrt() * sum
    }

    /// The function, in f64.
    fn value(activation: Activation, x: f64) -> f64 {
        match activation {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::Gelu => x * 0.5 * (1.0 + erf(x / 2f64.sqrt())),
            Activation::GeluTanh => {
                let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
                x * 0.5 * (1.0 + u.tanh())
            }
            Activation::Relu2 => x.max(0.0).powi(2),
            Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Activation::Identity => x,
        }
    }

    /// The definition of the derivative, in f64.
    fn derivative(activation: Activation, x: f64) -> f64 {
        match activation {
            Activation::Silu => {
                // exp(-x) beyond 700 is infinite, and the derivative 0.
                let s = 1.0 / (1.0 + (-x.max(-700.0)).exp());
                s + x.max(-700.0) * s * (1.0 - s)
            }
            Activation::Gelu => {
                let density = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
                // 0 times a large x
                let slope = if density == 0.0 { 0.0 } else { x * density };
                0.5 * (1.0 + erf(x / 2f64.sqrt())) + slope
            }
            Activation::GeluTanh => {
                let root = (2.0 / std::f64::consts::PI).sqrt();
                let u = root * (x + 0.044_715 * x.powi(3));
                let du = root * (1.0 + 3.0 * 0.044_715 * x * x);
                let fall = 1.0 - u.tanh().powi(2);
                let slope = if fall == 0.0 { 0.0 } else { 0.5 * x * fall * du };
                0.5 * (1.0 + u.tanh()) + slope
            }
            Activation::Relu2 => 2.0 * x.max(0.0),
            Activation::Sigmoid => {
                let s = 1.0 / (1.0 + (-x.abs()).exp());
                s * (1.0 - s)
            }
            Activation::Identity => 1.0,
        }
    }

    #[test]
    fn the_definition_is_the_derivative_of_the_function() {
        let x: Vec<f64> = (-160..160).map(|i| f64::from(i) * 0.05 + 0.01).collect();
        let ones = vec![1.0; x.len()];
        for activation in ALL {
            let objective = |x: &[f64]| {
                let y: Vec<f64> = x.iter().map(|x| value(activation, *x)).collect();
                dot(&y, &ones)
            };
            let got: Vec<f64> = x.iter().map(|x| derivative(activation, *x)).collect();
            assert_gradient(&format!("{activation:?}"), &got, &numeric_gradient(&x, objective));
        }
    }

    #[test]
    fn every_derivative_is_within_its_bound_on_every_instruction_set() {
        // Dense where something happens, and floats of every exponent.
        let mut x: Vec<f32> = (-200_000..200_000).map(|i| i as f32 * 1e-4).collect();
        x.extend((0..=u32::MAX).step_by(99_991).map(f32::from_bits).filter(|x| x.is_finite()));
        let ones = vec![1.0; x.len()];
        let (mut dx, mut dup) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        let mut dgate = vec![0.0; x.len()];
        for &level in Level::present() {
            for activation in ALL {
                activate_row_backward(level, activation, &x, &ones, &mut dx);
                glu_row_backward(level, activation, &x, &ones, &ones, &mut dgate, &mut dup);
                assert_eq!(dgate, dx, "{activation:?}");
                for ((x, dx), dup) in x.iter().zip(&dx).zip(&dup) {
                    let wide = f64::from(*x);
                    let want = derivative(activation, wide);
                    let error = (f64::from(*dx) - want).abs();
                    if want > f64::from(f32::MAX) {
                        assert_eq!(*dx, f32::INFINITY);
                        continue;
                    }
                    let bound = ACTIVATION_DERIVATIVE_MAX_ERROR * want.abs().max(1.0);
                    assert!(error <= bound, "{activation:?}'({x}) = {dx}, not {want}");
                    // What the gate lets through is the forward's own value.
                    let want = value(activation, wide);
                    if want > f64::from(f32::MAX) {
                        assert_eq!(*dup, f32::INFINITY);
                        continue;
                    }
                    let bound = 4e-7 * want.abs().max(wide.abs());
                    let error = (f64::from(*dup) - want).abs();
                    assert!(error <= bound + 1e-35, "{activation:?}({x}) = {dup}, not {want}");
                }
            }
        }
    }

    #[test]
    fn not_a_number_stays_one() {
        for &level in Level::present() {
            for activation in ALL {
                let mut dx = [0.0; 9];
                activate_row_backward(level, activation, &[f32::NAN; 9], &[1.0; 9], &mut dx);
                // The derivative of x is 1 everywhere.
                let is_right = |x: &f32| match activation {
                    Activation::Identity => *x == 1.0,
                    _ => x.is_nan(),
                };
                assert!(dx.iter().all(is_right), "{activation:?}");
            }
        }
    }

    #[test]
    fn gates_meet_their_own_element_at_any_number_of_threads() {
        let mut rng = Rng::new(81);
        // Enough rows for several tasks, and a stride.
        let (rows, width) = (50, 1001);
        let wide = rng.floats(rows * 3 * width);
        let band = |i: usize| Rows::new(&wide, rows, 3 * width, i * width, width);
        let (gate, up, dout) = (band(0), band(1), band(2));
        let run = || {
            let empty = || vec![f32::NAN; rows * width];
            let (mut dgate, mut dup, mut dx) = (empty(), empty(), empty());
            glu_backward(Level::detect(), Activation::Gelu, gate, up, dout, &mut dgate, &mut dup);
            activate_backward(Level::detect(), Activation::Gelu, gate, dout, &mut dx);
            (dgate, dup, dx)
        };
        let (dgate, dup, dx) = run();
        for t in 0..rows {
            let (gate, up, dout) = (widen(gate.row(t)), widen(up.row(t)), widen(dout.row(t)));
            for c in 0..width {
                let (i, slope) = (t * width + c, derivative(Activation::Gelu, gate[c]));
                assert!((f64::from(dgate[i]) - dout[c] * up[c] * slope).abs() < 1e-6);
                assert!(
                    (f64::from(dup[i]) - dout[c] * value(Activation::Gelu, gate[c])).abs() < 1e-6
                );
                assert!((f64::from(dx[i]) - dout[c] * slope).abs() < 1e-6);
            }
        }
        assert_threads_do_not_matter(run);
    }

    #[test]
    #[should_panic(expected = "dout")]
    fn a_gradient_of_another_width_panics() {
        let x = [0.0; 6];
        activate_backward(
            Level::detect(),
            Activation::Silu,
            Rows::dense(&x, 3),
            Rows::dense(&x, 2),
            &mut [0.0; 6],
        );
    }
}
