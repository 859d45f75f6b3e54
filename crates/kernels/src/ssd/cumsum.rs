//! First stage: the time steps and how far each token's decay has run inside its chunk.
//!
//! ```text
//! dt_out[t]    = clamp(softplus(dt[t] + dt_bias), dt_limit)     0 past the end of the sequence
//! da_cumsum[t] = sum of dt_out[s] * a over the tokens s <= t of t's chunk
//! ```
//!
//! Paper: section 6, the cumulative sums that every other stage exponentiates differences of.

use rayon::prelude::*;

use super::Dims;
use crate::math::softplus;
use crate::simd::Level;

/// Turns raw steps into time steps in place: rows of `[H]`, bias first, then softplus, then the clamp.
///
/// # Panics
///
/// If `dt` is not whole rows of `dt_bias`.
#[track_caller]
pub fn timestep(
    level: Level,
    dt: &mut [f32],
    dt_bias: Option<&[f32]>,
    dt_softplus: bool,
    limit: (f32, f32),
) {
    if let Some(bias) = dt_bias.filter(|_| !dt.is_empty()) {
        assert!(!bias.is_empty() && dt.len().is_multiple_of(bias.len()), "dt_bias");
        for row in dt.chunks_exact_mut(bias.len()) {
            for (dt, bias) in row.iter_mut().zip(bias) {
                *dt += bias;
            }
        }
    }
    if dt_softplus {
        softplus(level, dt);
    }
    if limit != (0.0, f32::INFINITY) || !dt_softplus {
        for dt in dt {
            // By comparison: NaN stays NaN, and a limit out of order is no panic.
            if *dt < limit.0 {
                *dt = limit.0;
            } else if *dt > limit.1 {
                *dt = limit.1;
            }
        }
    }
}

/// Below this a step's exponent adds nothing: `exp` is 0 long before. Sums of it stay far from infinity,
/// whose differences would be NaN.
const LEAST_EXPONENT: f64 = -1e30;

/// `dt a`, bounded below; NaN stays NaN.
#[inline(always)]
fn decay_exponent(dt: f32, a: f32) -> f64 {
    let exponent = f64::from(dt) * f64::from(a);
    if exponent < LEAST_EXPONENT { LEAST_EXPONENT } else { exponent }
}

/// Running sums of `dt a`, each as a pair of f32, so that their differences stay exact where they matter.
#[inline(always)]
pub(super) fn exponent_sums(dt: &[f32], a: f32, high: &mut [f32], low: &mut [f32]) {
    let mut sum = 0.0f64;
    for ((dt, high), low) in dt.iter().zip(high).zip(low) {
        sum += decay_exponent(*dt, a);
        *high = sum as f32;
        *low = (sum - f64::from(*high)) as f32;
    }
}

/// Time steps and their cumulative decay exponents by chunk.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `dt` | `[B, L, H]` | raw steps |
/// | `a` | `[H]` | negative |
/// | `dt_bias` | `[H]` | optional |
/// | returns | two of `[B, H, K, Q]` | `dt_out`, `da_cumsum` |
///
/// The sums are rounded to f32, so what other stages make of their differences has a relative error of
/// up to `f32::EPSILON * max |da_cumsum|`: long chunks of strong decay are better left to
/// [`ssd`](super::ssd), which keeps more.
///
/// With `dt_softplus` off, steps are taken as they are but never below 0.
///
/// # Panics
///
/// If a length disagrees with `dims`.
#[track_caller]
#[must_use]
pub fn chunk_cumsum(
    level: Level,
    dims: Dims,
    dt: &[f32],
    a: &[f32],
    dt_bias: Option<&[f32]>,
    dt_softplus: bool,
) -> (Vec<f32>, Vec<f32>) {
    dims.check();
    let Dims { batch, seqlen, nheads, chunk_size, .. } = dims;
    assert_eq!(dt.len(), batch * seqlen * nheads, "dt");
    assert_eq!(a.len(), nheads, "a");
    assert!(dt_bias.is_none_or(|b| b.len() == nheads), "dt_bias");
    let mut steps = dt.to_vec();
    timestep(level, &mut steps, dt_bias, dt_softplus, (0.0, f32::INFINITY));

    let mut dt_out = vec![0.0; dims.cumsum_len()];
    let mut da_cumsum = vec![0.0; dims.cumsum_len()];
    let rows = dt_out.par_chunks_mut(chunk_size).zip(da_cumsum.par_chunks_mut(chunk_size));
    rows.enumerate().for_each(|(row, (dt_out, da_cumsum))| {
        let (bh, chunk) = (row / dims.nchunks(), row % dims.nchunks());
        let (batch, head) = (bh / nheads, bh % nheads);
        for (dt_out, t) in dt_out.iter_mut().zip(dims.chunk(chunk)) {
            *dt_out = steps[(batch * seqlen + t) * nheads + head];
        }
        // In f64: stages exponentiate differences of these sums, which cancel.
        let mut sum = 0.0f64;
        for (da_cumsum, dt) in da_cumsum.iter_mut().zip(dt_out) {
            sum += decay_exponent(*dt, a[head]);
            *da_cumsum = sum as f32;
        }
    });
    (dt_out, da_cumsum)
}
