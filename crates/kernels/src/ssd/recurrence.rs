//! The definition of SSD: one token after another, every head by itself.
//!
//! Slow on purpose; all other code of this module is tested against it in f64.

use std::ops::{Add, Mul, Sub};

use super::Ssd;

/// A float that the definition can be computed in.
pub trait Real: Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> {
    /// Zero.
    const ZERO: Self;
    /// Exact.
    #[must_use]
    fn from_f32(x: f32) -> Self;
    /// e^x
    #[must_use]
    fn exp(self) -> Self;
    /// ln(1 + e^x)
    #[must_use]
    fn softplus(self) -> Self;
    /// x / (1 + e^-x)
    #[must_use]
    fn silu(self) -> Self;
    /// The nearest value between two bounds.
    #[must_use]
    fn between(self, low: f32, high: f32) -> Self;
}

macro_rules! real {
    ($t:ty) => {
        impl Real for $t {
            const ZERO: Self = 0.0;
            fn from_f32(x: f32) -> Self {
                x.into()
            }
            fn exp(self) -> Self {
                self.exp()
            }
            fn softplus(self) -> Self {
                self.max(0.0) + (-self.abs()).exp().ln_1p()
            }
            fn silu(self) -> Self {
                self / (1.0 + (-self).exp())
            }
            fn between(self, low: f32, high: f32) -> Self {
                let (low, high): (Self, Self) = (low.into(), high.into());
                if self < low {
                    low
                } else if self > high {
                    high
                } else {
                    self
                }
            }
        }
    };
}
real!(f32);
real!(f64);

/// Computes what [`ssd`](super::ssd) computes, by its definition.
///
/// `states` holds a `[H, P, N]` for each run, updated; returns y `[T, H, P]`.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn recurrence<R: Real>(input: &Ssd<'_>, runs: &[usize], states: &mut [Vec<R>]) -> Vec<R> {
    input.check(runs);
    assert_eq!(states.len(), runs.len(), "states");
    let Ssd { nheads, headdim, ngroups, dstate, .. } = *input;
    let from = R::from_f32;
    let mut y = vec![R::ZERO; input.x.len() * nheads * headdim];
    let mut t = 0;
    for (&len, state) in runs.iter().zip(states) {
        for _ in 0..len {
            for head in 0..nheads {
                let group = head / (nheads / ngroups);
                let mut dt = from(input.dt.row(t)[head]);
                if let Some(bias) = input.dt_bias {
                    dt = dt + from(bias[head]);
                }
                if input.dt_softplus {
                    dt = dt.softplus();
                }
                let dt = dt.between(input.dt_limit.0, input.dt_limit.1);
                let decay = (dt * from(input.a[head])).exp();
                let b = &input.b.row(t)[group * dstate..][..dstate];
                let c = &input.c.row(t)[group * dstate..][..dstate];
                for p in 0..headdim {
                    let channel = head * headdim + p;
                    let x = from(input.x.row(t)[channel]);
                    let state = &mut state[channel * dstate..][..dstate];
                    let mut sum = R::ZERO;
                    for ((s, &b), &c) in state.iter_mut().zip(b).zip(c) {
                        *s = decay * *s + dt * x * from(b);
                        sum = sum + *s * from(c);
                    }
                    if let Some(d) = input.d {
                        let d = if d.len() == nheads { d[head] } else { d[channel] };
                        sum = sum + from(d) * x;
                    }
                    if let Some(z) = input.z {
                        sum = sum * from(z.row(t)[channel]).silu();
                    }
                    y[t * nheads * headdim + channel] = sum;
                }
            }
            t += 1;
        }
    }
    y
}
