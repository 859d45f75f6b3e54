//! The backward of one run for a team of heads that share b and c, chunk by chunk from its end.
//!
//! For a chunk of Q tokens and a head: X, B, C are its rows, dY is the gradient that reaches y before
//! the gate, `cum` the running sum of `dt a`, S the state that enters and S' the one that leaves.
//!
//! ```text
//! e[t] = exp(cum[t])    f[s] = exp(cum[Q-1] - cum[s])    L[t, s] = exp(cum[t] - cum[s]) dt[s]
//! V    = dY Xᵀ          M    = (C Bᵀ) ∘ L                 W = V ∘ L                 s <= t, else 0
//!
//! dX = Mᵀ dY + (f dt) ∘ (B dS'ᵀ) + d dY                   [Q, P]
//! dB = Wᵀ C + (f dt ∘ X) dS'                              [Q, N], summed over heads
//! dC = W B  + (e ∘ dY) S                                  [Q, N], summed over heads
//! dS = e[Q-1] dS' + (e ∘ dY)ᵀ C                           [P, N]
//! ```
//!
//! The exponent `dt[u] a` stands in the decay of every path that leads from before u to u or past it, so
//! its gradient is the sum of what all these paths carry, over pairs, from S, to S' and through:
//!
//! ```text
//! sum of (V ∘ M)[t, s] for s < u <= t  +  sum of c[t]·dC_S[t] for t >= u
//!     +  sum of x[s]·dX_S[s] for s < u  +  e[Q-1] <dS', S>
//! ```
//!
//! with `_S` for the second terms above. No term is taken back: the shorter form that subtracts what
//! starts from what ends (`y·dy - dt ddt`) cancels where decays are strong.
//!
//! 1. A first pass over the run leaves the states that enter its chunks; nothing else is kept from it.
//! 2. Heads take turns in each chunk, so that B, C and the sums over heads stay in the cache. W is
//!    summed too, and multiplied once.
//! 3. All products are those of [`matrix`](super::matrix).
//!
//! Paper: *Transformers are SSMs* (Dao and Gu, 2024), section 6.

use std::ops::Range;

use super::backward::Call;
use super::cumsum::exponent_sums;
use super::matrix::{
    Matrix, Part, add, add_column_dots, dots, multiply, multiply_transposed, row_dots, scale_rows,
};
use crate::math::exp_lanes;
use crate::norm::gate;
use crate::rows::Rows;
use crate::simd::{Simd, dispatch};

/// Q: whole vectors of every instruction set.
const CHUNK: usize = 48;

/// One run and one team, with their pieces of the outputs: rows are those of the run's tokens.
pub(super) struct Task<'a> {
    pub(super) tokens: Range<usize>,
    pub(super) heads: Range<usize>,
    /// State before the run, `[heads, P, N]`
    pub(super) state: &'a [f32],
    /// Gradient of the state after the run, in the end of that before, `[heads, P, N]`
    pub(super) dstate: &'a mut [f32],
    /// `[L][heads * P]`
    pub(super) dx: Vec<&'a mut [f32]>,
    /// `[L][heads]`
    pub(super) ddt: Vec<&'a mut [f32]>,
    /// `[L][heads * P]`, if there is a gate
    pub(super) dz: Option<Vec<&'a mut [f32]>>,
    /// The team's part, `[L, N]`
    pub(super) db: &'a mut [f32],
    /// The team's part, `[L, N]`
    pub(super) dc: &'a mut [f32],
}

/// What a task has for parameters: sums over the tokens of its run.
pub(super) struct Sums {
    /// `[heads]`
    pub(super) da: Vec<f64>,
    /// `[heads]`
    pub(super) ddt_bias: Vec<f64>,
    /// `[heads * P]`
    pub(super) dd: Vec<f64>,
}

/// Memory of one worker, kept from task to task.
pub(super) struct Worker {
    /// S of every chunk and head, `[K, heads, P, N]`
    states: Vec<f32>,
    /// What goes from chunk to chunk, of each head: S on the way to the end, dS on the way back.
    carried: Vec<Matrix>,
    /// B and C, `[Q, N]`
    b: Matrix,
    c: Matrix,
    /// `C Bᵀ`, `[Q, Q]`, zeros above the diagonal
    cb: Matrix,
    /// Sums over heads: dB and dC `[Q, N]`, and W `[Q, Q]`
    db: Matrix,
    dc: Matrix,
    w: Matrix,
    /// One head's S `[P, N]`, X, dY and dX `[Q, P]`, V and M `[Q, Q]`, and its term of dC `[Q, N]`
    state: Matrix,
    x: Matrix,
    dy: Matrix,
    dx: Matrix,
    v: Matrix,
    m: Matrix,
    head_dc: Matrix,
    /// `<dS', S>` by rows, `[P]`
    through: Vec<f32>,
}

impl Worker {
    pub(super) fn new(team: usize, headdim: usize, dstate: usize) -> Self {
        let rows = |width| Matrix::zeros(CHUNK, width);
        let state = || Matrix::zeros(headdim, dstate);
        Self {
            states: Vec::new(),
            carried: (0..team).map(|_| state()).collect(),
            b: rows(dstate),
            c: rows(dstate),
            cb: rows(CHUNK),
            db: rows(dstate),
            dc: rows(dstate),
            w: rows(CHUNK),
            state: state(),
            x: rows(headdim),
            dy: rows(headdim),
            dx: rows(headdim),
            v: rows(CHUNK),
            m: rows(CHUNK),
            head_dc: rows(dstate),
            through: vec![0.0; headdim],
        }
    }

    pub(super) fn run(&mut self, call: &Call<'_>, mut task: Task<'_>) -> Sums {
        let (p, n) = (call.input.headdim, call.input.dstate);
        let heads = task.heads.len();
        let mut sums =
            Sums { da: vec![0.0; heads], ddt_bias: vec![0.0; heads], dd: vec![0.0; heads * p] };
        let nchunks = task.dx.len().div_ceil(CHUNK);
        self.states.resize(nchunks * heads * p * n, 0.0);
        let carried = |data, i| Rows::new(data, heads * p, n, 0, n).slice(i * p, p);
        for i in 0..heads {
            self.carried[i].load(carried(task.state, i));
        }
        for chunk in 0..nchunks {
            self.keep_states(call, &task, chunk, chunk + 1 < nchunks);
        }
        for i in 0..heads {
            self.carried[i].load(carried(task.dstate, i));
        }
        for chunk in (0..nchunks).rev() {
            self.chunk(call, &mut task, chunk, &mut sums);
        }
        for i in 0..heads * p {
            task.dstate[i * n..][..n].copy_from_slice(self.carried[i / p].row(i % p));
        }
        sums
    }

    /// Keeps the states that enter a chunk, and takes them through it if there is another.
    fn keep_states(&mut self, call: &Call<'_>, task: &Task<'_>, chunk: usize, go_on: bool) {
        let (level, p, n) = (call.level, call.input.headdim, call.input.dstate);
        let tokens = task.chunk(chunk);
        self.b.load(call.of_group(call.input.b, task.heads.start, &tokens));
        let mut kept = &mut self.states[chunk * task.heads.len() * p * n..];
        for (head, state) in task.heads.clone().zip(&mut self.carried) {
            for i in 0..p {
                let (row, rest) = kept.split_at_mut(n);
                row.copy_from_slice(state.row(i));
                kept = rest;
            }
            if go_on {
                let decays = call.decays(head, &tokens);
                self.x.load(call.of_head(call.input.x, head, &tokens));
                scale_rows(level, &mut self.x, &decays.weight);
                let through = decays.entered[tokens.len() - 1];
                multiply_transposed(level, state, through, &self.x, Part::Full, &self.b);
            }
        }
    }

    /// Takes all heads back through a chunk.
    fn chunk(&mut self, call: &Call<'_>, task: &mut Task<'_>, chunk: usize, sums: &mut Sums) {
        let (level, n) = (call.level, call.input.dstate);
        let tokens = task.chunk(chunk);
        let len = tokens.len();
        self.b.load(call.of_group(call.input.b, task.heads.start, &tokens));
        self.c.load(call.of_group(call.input.c, task.heads.start, &tokens));
        dots(level, &mut self.cb, Part::Lower, &self.c, &self.b);
        self.cb.clear_above_diagonal();
        self.db.clear(len, n);
        self.dc.clear(len, n);
        self.w.clear(len, len);
        for i in 0..task.heads.len() {
            self.head(call, task, chunk, i, sums);
        }
        multiply_transposed(level, &mut self.db, 1.0, &self.w, Part::Lower, &self.c);
        multiply(level, &mut self.dc, 1.0, &self.w, Part::Lower, &self.b);
        for t in 0..len {
            let row = (chunk * CHUNK + t) * n;
            task.db[row..row + n].copy_from_slice(self.db.row(t));
            task.dc[row..row + n].copy_from_slice(self.dc.row(t));
        }
    }

    /// Takes the team's head `i` back through a chunk.
    fn head(
        &mut self,
        call: &Call<'_>,
        task: &mut Task<'_>,
        chunk: usize,
        i: usize,
        sums: &mut Sums,
    ) {
        let (level, input) = (call.level, call.input);
        let (p, n, head) = (input.headdim, input.dstate, task.heads.start + i);
        let tokens = task.chunk(chunk);
        let (rows, channels) = (chunk * CHUNK..chunk * CHUNK + tokens.len(), i * p..(i + 1) * p);
        let of_head = |rows| call.of_head(rows, head, &tokens);
        let z = input.z.map(of_head);
        let decays = call.decays(head, &tokens);
        let Self { state, x, dy, dx, v, m, b, c, .. } = self;
        let dstate = &mut self.carried[i];

        let kept = &self.states[(chunk * task.heads.len() + i) * p * n..][..p * n];
        state.load(Rows::new(kept, p, n, 0, n));
        x.load(of_head(input.x));
        dy.load(of_head(call.dout));
        if let Some(z) = z {
            (0..z.len()).for_each(|t| gate(level, dy.row_mut(t), z.row(t)));
        }
        add_column_dots(level, &mut sums.dd[channels.clone()], dy, x);

        // M, W
        dots(level, v, Part::Lower, dy, x);
        v.clear_above_diagonal();
        let paths = pairs(level, &self.cb, &decays, v, m, &mut self.w);

        // dX
        let mut to_state = [0.0; CHUNK];
        dots(level, dx, Part::Full, b, dstate);
        row_dots(level, &mut to_state, x, dx);
        scale_rows(level, dx, &decays.weight);
        multiply_transposed(level, dx, 1.0, m, Part::Lower, dy);
        for (t, out) in task.dx[rows.clone()].iter_mut().enumerate() {
            out[channels.clone()].copy_from_slice(dx.row(t));
            input.add_skip(head, dy.row(t), &mut out[channels.clone()]);
        }

        // dZ
        if let (Some(z), Some(dz)) = (z, &mut task.dz) {
            let dout = of_head(call.dout);
            dots(level, dx, Part::Full, c, state);
            scale_rows(level, dx, &decays.entered);
            multiply(level, dx, 1.0, m, Part::Lower, x);
            for (t, dz) in dz[rows.clone()].iter_mut().enumerate() {
                let dz = &mut dz[channels.clone()];
                dz.copy_from_slice(dx.row(t));
                input.add_skip(head, x.row(t), dz);
                gate_slope(level, dout.row(t), z.row(t), dz);
            }
        }

        // dB, dC
        let mut from_state = [0.0; CHUNK];
        scale_rows(level, x, &decays.weight);
        multiply(level, &mut self.db, 1.0, x, Part::Full, dstate);
        scale_rows(level, dy, &decays.entered);
        multiply(level, &mut self.head_dc, 0.0, dy, Part::Full, state);
        row_dots(level, &mut from_state, c, &self.head_dc);
        add(level, &mut self.dc, &self.head_dc);

        // dS
        let end = decays.entered[tokens.len() - 1];
        row_dots(level, &mut self.through, dstate, state);
        let past = f64::from(end) * self.through.iter().copied().map(f64::from).sum::<f64>();
        multiply_transposed(level, dstate, end, dy, Part::Full, c);

        // Exponents: paths past the chunk, to its end, from its start, and within.
        let mut dexponent = [past; CHUNK];
        let mut sum = 0.0;
        for t in 0..tokens.len() {
            dexponent[t] += sum;
            sum += f64::from(decays.weight[t] * to_state[t]);
        }
        sum = 0.0;
        for t in (0..tokens.len()).rev() {
            sum += f64::from(from_state[t]);
            dexponent[t] += sum + f64::from(paths.dexponent[t]);
        }
        for (t, ddt) in task.ddt[rows].iter_mut().enumerate() {
            let direct = f64::from(paths.ddt[t] + decays.leaving[t] * to_state[t]);
            let slope = call.slopes[(tokens.start + t) * input.nheads + head];
            let raw = (direct + f64::from(input.a[head]) * dexponent[t]) * f64::from(slope);
            ddt[i] = raw as f32;
            sums.ddt_bias[i] += raw;
            sums.da[i] += dexponent[t] * f64::from(decays.dt[t]);
        }
    }
}

impl Task<'_> {
    /// Tokens of a chunk.
    fn chunk(&self, chunk: usize) -> Range<usize> {
        let first = self.tokens.start + chunk * CHUNK;
        first..self.tokens.end.min(first + CHUNK)
    }
}

impl Call<'_> {
    /// One head's columns of `[T, H * P]`.
    fn of_head<'r>(&self, rows: Rows<'r>, head: usize, tokens: &Range<usize>) -> Rows<'r> {
        let p = self.input.headdim;
        rows.slice(tokens.start, tokens.len()).columns(head * p, p)
    }

    /// The columns of `[T, G * N]` that a head uses.
    fn of_group<'r>(&self, rows: Rows<'r>, head: usize, tokens: &Range<usize>) -> Rows<'r> {
        let (n, group) = (self.input.dstate, head / (self.input.nheads / self.input.ngroups));
        rows.slice(tokens.start, tokens.len()).columns(group * n, n)
    }

    fn decays(&self, head: usize, tokens: &Range<usize>) -> Decays {
        let mut dt = [0.0; CHUNK];
        for (dt, t) in dt.iter_mut().zip(tokens.clone()) {
            *dt = self.dt[t * self.input.nheads + head];
        }
        decays(self.level, tokens.len(), dt, self.input.a[head])
    }
}

/// Steps and decays of one head in a chunk, zeros past its end.
struct Decays {
    len: usize,
    dt: [f32; CHUNK],
    /// `cum`, as pairs of f32
    high: [f32; CHUNK],
    low: [f32; CHUNK],
    /// e
    entered: [f32; CHUNK],
    /// f
    leaving: [f32; CHUNK],
    /// `f dt`
    weight: [f32; CHUNK],
}

dispatch! { fn decays = decays_body(len: usize, dt: [f32; CHUNK], a: f32) -> Decays }

#[inline(always)]
fn decays_body<S: Simd>(simd: S, len: usize, dt: [f32; CHUNK], a: f32) -> Decays {
    let [mut high, mut low, mut entered, mut leaving, mut weight] = [[0.0; CHUNK]; 5];
    exponent_sums(&dt[..len], a, &mut high, &mut low);
    let end = (simd.splat(high[len - 1]), simd.splat(low[len - 1]));
    for first in (0..len).step_by(S::LANES) {
        let high = simd.load(&S::chunks(&high[first..]).0[0]);
        let low = simd.load(&S::chunks(&low[first..]).0[0]);
        simd.store(exp_lanes(simd, high), &mut S::chunks_mut(&mut entered[first..]).0[0]);
        let rest = simd.add(simd.sub(end.0, high), simd.sub(end.1, low));
        let rest = exp_lanes(simd, simd.min(simd.splat(0.0), rest));
        simd.store(rest, &mut S::chunks_mut(&mut leaving[first..]).0[0]);
    }
    for t in 0..len {
        weight[t] = leaving[t] * dt[t];
    }
    Decays { len, dt, high, low, entered, leaving, weight }
}

/// What paths within a chunk carry.
struct Paths {
    /// By the exponents of the tokens that they lead across: the sum of `(V ∘ M)[t, s]` for `s < u <= t`.
    dexponent: [f32; CHUNK],
    /// By the step that they start with: the sum of `(V ∘ M)[t, s] / dt[s]` over t.
    ddt: [f32; CHUNK],
}

dispatch! {
    /// Fills M and adds to W, from V and `C Bᵀ` that are 0 above the diagonal.
    fn pairs = pairs_body(cb: &Matrix, decays: &Decays, v: &Matrix, m: &mut Matrix, w: &mut Matrix) -> Paths
}

#[inline(always)]
fn pairs_body<S: Simd>(
    simd: S,
    cb: &Matrix,
    decays: &Decays,
    v: &Matrix,
    m: &mut Matrix,
    w: &mut Matrix,
) -> Paths {
    let len = decays.len;
    m.clear(len, len);
    let mut dexponent = [0.0; CHUNK];
    // The sum over the rows from the last to this one, by s.
    let mut ddt = [0.0; CHUNK];
    // The steps of the tokens before this row's.
    let mut dt_before = decays.dt;
    let dt = S::chunks(&decays.dt).0;
    let (high, low) = (S::chunks(&decays.high).0, S::chunks(&decays.low).0);
    for t in (0..len).rev() {
        dt_before[t] = 0.0;
        let (cb, v) = (S::chunks(cb.whole_row(t)).0, S::chunks(v.whole_row(t)).0);
        let m = S::chunks_mut(m.whole_row_mut(t)).0;
        let w = S::chunks_mut(w.whole_row_mut(t)).0;
        let here = (simd.splat(decays.high[t]), simd.splat(decays.low[t]));
        let (ddt, dt_before) = (S::chunks_mut(&mut ddt).0, S::chunks(&dt_before).0);
        let mut across = simd.splat(0.0);
        for i in 0..=t / S::LANES {
            let high = simd.sub(here.0, simd.load(&high[i]));
            let low = simd.sub(here.1, simd.load(&low[i]));
            let decay = exp_lanes(simd, simd.min(simd.splat(0.0), simd.add(high, low)));
            let (pair, carried) = (simd.mul(decay, simd.load(&cb[i])), simd.load(&v[i]));
            let step = simd.load(&dt[i]);
            simd.store(simd.mul(pair, step), &mut m[i]);
            let sum = simd.mul_add(simd.mul(decay, step), carried, simd.load(&w[i]));
            simd.store(sum, &mut w[i]);
            let sum = simd.mul_add(pair, carried, simd.load(&ddt[i]));
            simd.store(sum, &mut ddt[i]);
            across = simd.mul_add(sum, simd.load(&dt_before[i]), across);
        }
        dexponent[t] = simd.reduce(across);
    }
    Paths { dexponent, ddt }
}

dispatch! { fn gate_slope = gate_slope_body(dout: &[f32], z: &[f32], dz: &mut [f32]) }

/// Turns y in `dz` into the gradient of the gate, `dout y silu'(z)`.
#[inline(always)]
fn gate_slope_body<S: Simd>(simd: S, dout: &[f32], z: &[f32], dz: &mut [f32]) {
    let (dout, dout_rest) = S::chunks(dout);
    let (z, z_rest) = S::chunks(z);
    let (dz, dz_rest) = S::chunks_mut(dz);
    for ((dout, z), dz) in dout.iter().zip(z).zip(dz) {
        let y = simd.mul(simd.load(dout), simd.load(dz));
        simd.store(simd.mul(y, silu_slope(simd, simd.load(z))), dz);
    }
    let mut tail = S::tail(dz_rest);
    let y = simd.mul(simd.load(&S::tail(dout_rest)), simd.load(&tail));
    simd.store(simd.mul(y, silu_slope(simd, simd.load(&S::tail(z_rest)))), &mut tail);
    S::write_tail(&tail, dz_rest);
}

/// `s (1 + z (1 - s))` with the sigmoid s of z.
#[inline(always)]
fn silu_slope<S: Simd>(simd: S, z: S::F) -> S::F {
    let one = simd.splat(1.0);
    let e = exp_lanes(simd, simd.sub(simd.splat(0.0), z));
    let s = simd.div(one, simd.add(one, e));
    simd.mul(s, simd.mul_add(z, simd.sub(one, s), one))
}
