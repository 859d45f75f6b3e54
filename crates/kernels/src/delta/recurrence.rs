//! The definition of the gated delta rule: one token after another, every head by itself.
//!
//! Slow on purpose; all other code of this module is tested against it in f64.

use super::Delta;
use crate::ssd::Real;

/// Computes what [`delta_rule`](super::delta_rule) computes, by its definition.
///
/// `states` holds a `[Hv, Dk, Dv]` for each run, updated; returns o `[T, Hv, Dv]`.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn recurrence<R: Real>(input: &Delta<'_>, runs: &[usize], states: &mut [Vec<R>]) -> Vec<R> {
    input.check(runs);
    assert_eq!(states.len(), runs.len(), "states");
    let Delta { value_heads, key_dim, value_dim, .. } = *input;
    let from = R::from_f32;
    let mut out = vec![R::ZERO; input.v.len() * value_heads * value_dim];
    let mut t = 0;
    for (&len, state) in runs.iter().zip(states) {
        for _ in 0..len {
            for head in 0..value_heads {
                let [q, k] = [input.q, input.k].map(|rows| input.of_key(rows, t, head));
                let v = input.of_value(input.v, t, head);
                let g = &input.g.row(t)[head * input.decays()..][..input.decays()];
                let beta = from(input.beta.row(t)[head]);
                let state = &mut state[head * input.state_len()..][..input.state_len()];
                for (i, row) in state.chunks_exact_mut(value_dim.max(1)).enumerate() {
                    let decay = from(g[if g.len() == 1 { 0 } else { i }]).exp();
                    for s in row {
                        *s = decay * *s;
                    }
                }
                for j in 0..value_dim {
                    let mut read = R::ZERO;
                    for i in 0..key_dim {
                        read = read + state[i * value_dim + j] * from(k[i]);
                    }
                    let u = beta * (from(v[j]) - read);
                    let mut sum = R::ZERO;
                    for i in 0..key_dim {
                        let s = &mut state[i * value_dim + j];
                        *s = *s + from(k[i]) * u;
                        sum = sum + *s * from(q[i]);
                    }
                    out[(t * value_heads + head) * value_dim + j] = from(input.scale) * sum;
                }
            }
            t += 1;
        }
    }
    out
}
