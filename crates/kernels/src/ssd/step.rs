//! The recurrence on vectors, for runs too short to gain from chunks: one pass over a head's state.
//!
//! For one token, the state is read and written once, which is all the memory traffic there is.

use super::Ssd;
use crate::simd::{Simd, dispatch};

dispatch! {
    /// Runs one head through tokens `first..first + y.len()`.
    ///
    /// `dt` holds the time steps `[T, H]`, `state` is `[P, N]`, `y` has a `[P]` for each token.
    pub(crate) fn steps = steps_body(
        input: &Ssd<'_>, dt: &[f32], head: usize, first: usize, state: &mut [f32], y: &mut [&mut [f32]],
    )
}

#[inline(always)]
fn steps_body<S: Simd>(
    simd: S,
    input: &Ssd<'_>,
    dt: &[f32],
    head: usize,
    first: usize,
    state: &mut [f32],
    y: &mut [&mut [f32]],
) {
    let group = head / (input.nheads / input.ngroups);
    for (i, y) in y.iter_mut().enumerate() {
        let t = first + i;
        let x = &input.x.row(t)[head * input.headdim..][..input.headdim];
        let (b, b_rest) = S::chunks(&input.b.row(t)[group * input.dstate..][..input.dstate]);
        let (c, c_rest) = S::chunks(&input.c.row(t)[group * input.dstate..][..input.dstate]);
        let (b_tail, c_tail) = (simd.load(&S::tail(b_rest)), simd.load(&S::tail(c_rest)));
        let dt = dt[t * input.nheads + head];
        let decay = simd.splat((dt * input.a[head]).exp());
        let rows = state.chunks_exact_mut(input.dstate);
        for ((y, &x), row) in y.iter_mut().zip(x).zip(rows) {
            let x = simd.splat(dt * x);
            let (row, row_rest) = S::chunks_mut(row);
            let mut sums = [simd.splat(0.0); 2];
            for (n, ((row, b), c)) in row.iter_mut().zip(b).zip(c).enumerate() {
                let s = simd.mul_add(x, simd.load(b), simd.mul(decay, simd.load(row)));
                simd.store(s, row);
                sums[n % 2] = simd.mul_add(s, simd.load(c), sums[n % 2]);
            }
            if !row_rest.is_empty() {
                let mut tail = S::tail(row_rest);
                let s = simd.mul_add(x, b_tail, simd.mul(decay, simd.load(&tail)));
                simd.store(s, &mut tail);
                S::write_tail(&tail, row_rest);
                sums[0] = simd.mul_add(s, c_tail, sums[0]);
            }
            *y = simd.reduce(simd.add(sums[0], sums[1]));
        }
        input.skip(t, head, y);
        input.gate(simd, t, head, y);
    }
}
