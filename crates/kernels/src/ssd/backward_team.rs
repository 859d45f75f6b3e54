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

use super::Ssd;
use super::cumsum::{exponent_sums, timestep};
use super::matrix::{
    Matrix, Part, Stack, View, add, add_column_dots, add_scaled_columns, dots, multiply,
    multiply_transposed, row_dots, scale_rows,
};
use crate::activation::{Activation, gate};
use crate::math::exp_lanes;
use crate::rows::Rows;
use crate::simd::{Simd, dispatch};

/// Q: whole vectors of every instruction set, and whole tiles of every product.
const CHUNK: usize = 48;

/// What is the same for all tasks.
pub(super) struct Call<'a> {
    input: &'a Ssd<'a>,
    dout: Rows<'a>,
    /// Steps `[T, H]`, after their limits.
    dt: Vec<f32>,
    /// Their derivatives by the raw steps, `[T, H]`.
    slopes: Vec<f32>,
}

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
    /// The team's part, `[L][N]`; no rows if N is 0
    pub(super) db: Vec<&'a mut [f32]>,
    /// The team's part, `[L][N]`; no rows if N is 0
    pub(super) dc: Vec<&'a mut [f32]>,
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
    /// Skip weights, `[heads * P]`
    d: Vec<f32>,
    /// S of every chunk and head, `[K, heads]` of `[P, N]`
    states: Stack,
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
    /// One head's X, dY and dX `[Q, P]`, V and M `[Q, Q]`, and its term of dC `[Q, N]`
    x: Matrix,
    dy: Matrix,
    dx: Matrix,
    v: Matrix,
    m: Matrix,
    head_dc: Matrix,
    /// `<dS', S>` by rows, `[P]`
    past: Vec<f32>,
}

impl Worker {
    pub(super) fn new(team: usize, headdim: usize, dstate: usize) -> Self {
        let rows = |width| Matrix::zeros(CHUNK, width);
        Self {
            d: vec![0.0; team * headdim],
            states: Stack::default(),
            carried: (0..team).map(|_| Matrix::zeros(headdim, dstate)).collect(),
            b: rows(dstate),
            c: rows(dstate),
            cb: rows(CHUNK),
            db: rows(dstate),
            dc: rows(dstate),
            w: rows(CHUNK),
            x: rows(headdim),
            dy: rows(headdim),
            dx: rows(headdim),
            v: rows(CHUNK),
            m: rows(CHUNK),
            head_dc: rows(dstate),
            past: vec![0.0; headdim],
        }
    }

    /// Takes the heads of a task to the end of their run and back.
    pub(super) fn run(&mut self, call: &Call<'_>, mut task: Task<'_>) -> Sums {
        let Ssd { nheads, headdim: p, dstate: n, .. } = *call.input;
        let heads = task.heads.len();
        let first = task.heads.start;
        // Skip weights of the team's channels, `[heads * P]`, whatever form the caller gave.
        match call.input.d {
            None => self.d.fill(0.0),
            Some(d) if d.len() == nheads => {
                (0..heads).for_each(|i| self.d[i * p..][..p].fill(d[first + i]));
            }
            Some(d) => self.d.copy_from_slice(&d[first * p..][..heads * p]),
        }
        let of_head = |data, i| Rows::new(data, heads * p, n, 0, n).slice(i * p, p);
        let nchunks = task.dx.len().div_ceil(CHUNK);
        // Forwards: S at the start of each chunk is kept, `[K, heads]` of `[P, N]`. The last chunk's end is not
        // needed.
        for i in 0..heads {
            self.carried[i].load(of_head(task.state, i));
        }
        self.states.reset(nchunks * heads, &self.carried[0]);
        for chunk in 0..nchunks {
            self.carried.iter().for_each(|state| self.states.push(state));
            if chunk + 1 < nchunks {
                self.next_states(call, &task, chunk);
            }
        }
        // Backwards: `carried` now has dS at the end of the chunk, and leaves it at its start.
        for i in 0..heads {
            self.carried[i].load(of_head(task.dstate, i));
        }
        let mut sums =
            Sums { da: vec![0.0; heads], ddt_bias: vec![0.0; heads], dd: vec![0.0; heads * p] };
        for chunk in (0..nchunks).rev() {
            self.chunk(call, &mut task, chunk, &mut sums);
        }
        // What is left is the gradient of the state before the run.
        for i in 0..heads * p {
            task.dstate[i * n..][..n].copy_from_slice(self.carried[i / p].row(i % p));
        }
        sums
    }

    /// Takes the states of all heads through a chunk.
    fn next_states(&mut self, call: &Call<'_>, task: &Task<'_>, chunk: usize) {
        let Self { b, x, carried, .. } = self;
        let tokens = task.chunk(chunk);
        b.load(call.of_group(call.input.b, task.heads.start, &tokens));
        for (head, state) in task.heads.clone().zip(carried) {
            let decays = call.decays(head, &tokens);
            x.load(call.of_head(call.input.x, head, &tokens));
            // S' = e[last] S + (f dt X)ᵀ B, where f decays each token to the chunk's end.
            scale_rows(call.input.level, x, &decays.weight);
            let end = decays.entered[tokens.len() - 1];
            multiply_transposed(call.input.level, state, end, x.view(), Part::Full, b.view());
        }
    }

    /// Takes all heads back through a chunk.
    fn chunk(&mut self, call: &Call<'_>, task: &mut Task<'_>, chunk: usize, sums: &mut Sums) {
        let (level, n) = (call.input.level, call.input.dstate);
        let tokens = task.chunk(chunk);
        let len = tokens.len();
        self.b.load(call.of_group(call.input.b, task.heads.start, &tokens));
        self.c.load(call.of_group(call.input.c, task.heads.start, &tokens));
        // C Bᵀ `[Q, Q]` is the same for all heads of the group: it is made once a chunk.
        dots(level, &mut self.cb, Part::Lower, self.c.view(), self.b.view());
        self.cb.clear_above_diagonal();
        self.db.clear(len, n);
        self.dc.clear(len, n);
        self.w.clear(len, len);
        // Each head adds to dB, dC and W; what passes through W is multiplied once, after all heads.
        for i in 0..task.heads.len() {
            self.head(call, task, chunk, i, sums);
        }
        let (b, c, w) = (self.b.view(), self.c.view(), self.w.view());
        multiply_transposed(level, &mut self.db, 1.0, w, Part::Lower, c);
        multiply(level, &mut self.dc, 1.0, w, Part::Lower, b);
        for (out, sum) in [(&mut task.db, &self.db), (&mut task.dc, &self.dc)] {
            for (t, out) in out.iter_mut().skip(chunk * CHUNK).take(len).enumerate() {
                out.copy_from_slice(sum.row(t));
            }
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
        let (level, input) = (call.input.level, call.input);
        let (p, head) = (input.headdim, task.heads.start + i);
        let tokens = task.chunk(chunk);
        let (rows, channels) = (chunk * CHUNK..chunk * CHUNK + tokens.len(), i * p..(i + 1) * p);
        let of_head = |rows| call.of_head(rows, head, &tokens);
        let z = input.z.map(of_head);
        let decays = call.decays(head, &tokens);
        let end = decays.entered[tokens.len() - 1];
        let Self { x, dy, dx, v, m, head_dc, .. } = self;
        let (b, c, d) = (self.b.view(), self.c.view(), &self.d[channels.clone()]);
        let dstate = &mut self.carried[i];
        let state = self.states.get(chunk * task.heads.len() + i, dstate);

        // <dS', e S>: what the decay across the whole chunk is worth.
        row_dots(level, &mut self.past, dstate.view(), state);
        let past = f64::from(end) * self.past.iter().copied().map(f64::from).sum::<f64>();

        // X, dY
        x.load(of_head(input.x));
        dy.load(of_head(call.dout));
        if let Some(z) = z {
            (0..z.len()).for_each(|t| gate(level, Activation::Silu, dy.row_mut(t), z.row(t)));
        }
        add_column_dots(level, &mut sums.dd[channels.clone()], dy.view(), x.view());

        // M, W
        dots(level, v, Part::Lower, dy.view(), x.view());
        v.clear_above_diagonal();
        let paths = pairs(level, self.cb.view(), &decays, v.view(), m, &mut self.w);

        // dX
        // Through the state at the end: B dS'ᵀ `[Q, P]`, decayed. Its products with X are kept for the exponents.
        // Then through the chunk: Mᵀ dY. Then the skip.
        let mut to_state = [0.0; CHUNK];
        dots(level, dx, Part::Full, b, dstate.view());
        row_dots(level, &mut to_state, x.view(), dx.view());
        scale_rows(level, dx, &decays.weight);
        multiply_transposed(level, dx, 1.0, m.view(), Part::Lower, dy.view());
        add_scaled_columns(level, dx, dy.view(), d);
        for (t, out) in task.dx[rows.clone()].iter_mut().enumerate() {
            out[channels.clone()].copy_from_slice(dx.row(t));
        }

        // dZ
        // The gate needs y before the gate, which is computed again: C Sᵀ decayed, plus M X, plus the skip.
        if let (Some(z), Some(dz)) = (z, &mut task.dz) {
            let dout = of_head(call.dout);
            dots(level, dx, Part::Full, c, state);
            scale_rows(level, dx, &decays.entered);
            multiply(level, dx, 1.0, m.view(), Part::Lower, x.view());
            add_scaled_columns(level, dx, x.view(), d);
            for (t, dz) in dz[rows.clone()].iter_mut().enumerate() {
                gate_slope(level, dx.row(t), dout.row(t), z.row(t), &mut dz[channels.clone()]);
            }
        }

        // dB, dC
        // dB gets (f dt X) dS'; dC gets (e dY) S. Products with C are kept for the exponents.
        let mut from_state = [0.0; CHUNK];
        scale_rows(level, x, &decays.weight);
        multiply(level, &mut self.db, 1.0, x.view(), Part::Full, dstate.view());
        scale_rows(level, dy, &decays.entered);
        multiply(level, head_dc, 0.0, dy.view(), Part::Full, state);
        row_dots(level, &mut from_state, c, head_dc.view());
        add(level, &mut self.dc, head_dc.view());

        // dS
        // dS = e[last] dS' + (e dY)ᵀ C; dY is scaled already.
        multiply_transposed(level, dstate, end, dy.view(), Part::Full, c);

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

impl<'a> Call<'a> {
    pub(super) fn new(input: &'a Ssd<'a>, dout: Rows<'a>) -> Self {
        let level = input.level;
        let mut dt = Vec::with_capacity(input.dt.len() * input.nheads);
        (0..input.dt.len()).for_each(|t| dt.extend_from_slice(input.dt.row(t)));
        let no_limit = (f32::NEG_INFINITY, f32::INFINITY);
        timestep(level, &mut dt, input.dt_bias, false, no_limit);
        let mut slopes = vec![1.0; dt.len()];
        if input.dt_softplus {
            slopes.copy_from_slice(&dt);
            sigmoid(level, &mut slopes);
        }
        timestep(level, &mut dt, None, input.dt_softplus, no_limit);
        for (slope, dt) in slopes.iter_mut().zip(&dt) {
            if *dt < input.dt_limit.0 || *dt > input.dt_limit.1 {
                *slope = 0.0;
            }
        }
        timestep(level, &mut dt, None, false, input.dt_limit);
        Self { input, dout, dt, slopes }
    }

    /// One head's columns of `[T, H * P]`.
    fn of_head<'r>(&self, rows: Rows<'r>, head: usize, tokens: &Range<usize>) -> Rows<'r> {
        let p = self.input.headdim;
        rows.slice(tokens.start, tokens.len()).columns(head * p, p)
    }

    /// The columns of `[T, G * N]` that a head uses.
    fn of_group<'r>(&self, rows: Rows<'r>, head: usize, tokens: &Range<usize>) -> Rows<'r> {
        let (n, group) = (self.input.dstate, self.input.group(head));
        rows.slice(tokens.start, tokens.len()).columns(group * n, n)
    }

    fn decays(&self, head: usize, tokens: &Range<usize>) -> Decays {
        let mut dt = [0.0; CHUNK];
        for (dt, t) in dt.iter_mut().zip(tokens.clone()) {
            *dt = self.dt[t * self.input.nheads + head];
        }
        decays(self.input.level, tokens.len(), dt, self.input.a[head])
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
    let [mut high, mut low, entered, leaving, weight] = [[0.0; CHUNK]; 5];
    exponent_sums(&dt[..len], a, &mut high, &mut low);
    let mut decays = Decays { len, dt, high, low, entered, leaving, weight };
    // Vector by vector: e = exp(cum), f = exp(cum[last] - cum), both at most 1.
    for i in 0..len.div_ceil(S::LANES) {
        let cum = simd.load(&S::chunks(&decays.high).0[i]);
        simd.store(exp_lanes(simd, cum), &mut S::chunks_mut(&mut decays.entered).0[i]);
        let rest = decays.to_token(simd, len - 1, i);
        simd.store(rest, &mut S::chunks_mut(&mut decays.leaving).0[i]);
    }
    for t in 0..len {
        decays.weight[t] = decays.leaving[t] * decays.dt[t];
    }
    decays
}

impl Decays {
    /// The decays to token t from those of vector `i`; 1 from those after t.
    #[inline(always)]
    fn to_token<S: Simd>(&self, simd: S, t: usize, i: usize) -> S::F {
        let high = simd.sub(simd.splat(self.high[t]), simd.load(&S::chunks(&self.high).0[i]));
        let low = simd.sub(simd.splat(self.low[t]), simd.load(&S::chunks(&self.low).0[i]));
        exp_lanes(simd, simd.min(simd.splat(0.0), simd.add(high, low)))
    }
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
    ///
    /// A tile is as many rows as a vector has lanes. Left of the tile on the diagonal, the decay from s to
    /// t is that from s to the tile's first token times that from there to t: both are at most 1. Above
    /// the tiles on the diagonal M holds the zeros that it was made with.
    fn pairs = pairs_body(
        cb: View<'_>, decays: &Decays, v: View<'_>, m: &mut Matrix, w: &mut Matrix,
    ) -> Paths
}

#[inline(always)]
fn pairs_body<S: Simd>(
    simd: S,
    cb: View<'_>,
    decays: &Decays,
    v: View<'_>,
    m: &mut Matrix,
    w: &mut Matrix,
) -> Paths {
    let len = decays.len;
    m.set_size(len, len);
    let mut dexponent = [0.0; CHUNK];
    // The sum over the rows from the last to this one, by s.
    let mut ddt = [0.0; CHUNK];
    // The steps of the tokens before this row's.
    let mut dt_before = decays.dt;
    let (mut to_first, mut within) = ([0.0; CHUNK], S::ZERO);
    let dt = S::chunks(&decays.dt).0;
    // Tiles of rows from the last to the first, so that `ddt` holds sums over later rows.
    for tile in (0..len.div_ceil(S::LANES)).rev() {
        let first = tile * S::LANES;
        // Decays from every earlier token to the tile's first: one exponential for a tile, not for a row.
        for i in 0..tile {
            simd.store(decays.to_token(simd, first, i), &mut S::chunks_mut(&mut to_first).0[i]);
        }
        for t in (first..len.min(first + S::LANES)).rev() {
            dt_before[t] = 0.0;
            let (cb, v) = (S::chunks(cb.whole_row(t)).0, S::chunks(v.whole_row(t)).0);
            let m = S::chunks_mut(m.whole_row_mut(t)).0;
            let w = S::chunks_mut(w.whole_row_mut(t)).0;
            let (ddt, dt_before) = (S::chunks_mut(&mut ddt).0, S::chunks(&dt_before).0);
            let to_first = S::chunks(&to_first).0;
            simd.store(decays.to_token(simd, t, tile), &mut within);
            // The decay from the tile's first token to this row.
            let mut from_first = [0.0];
            S::write_tail(&within, &mut from_first);
            let from_first = simd.splat(from_first[0]);
            let mut across = simd.splat(0.0);
            // Along s, a vector at a time: M = decay cb dt, W += decay dt V, and the two sums of V ∘ M.
            for i in 0..=tile {
                let decay = if i < tile {
                    simd.mul(from_first, simd.load(&to_first[i]))
                } else {
                    simd.load(&within)
                };
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
    }
    Paths { dexponent, ddt }
}

dispatch! {
    /// The gradient of the gate, `dout y silu'(z)`.
    fn gate_slope = gate_slope_body(y: &[f32], dout: &[f32], z: &[f32], dz: &mut [f32])
}

#[inline(always)]
fn gate_slope_body<S: Simd>(simd: S, y: &[f32], dout: &[f32], z: &[f32], dz: &mut [f32]) {
    let (y, y_rest) = S::chunks(y);
    let (dout, dout_rest) = S::chunks(dout);
    let (z, z_rest) = S::chunks(z);
    let (dz, dz_rest) = S::chunks_mut(dz);
    for (((y, dout), z), dz) in y.iter().zip(dout).zip(z).zip(dz) {
        let dgate = simd.mul(simd.load(y), simd.load(dout));
        simd.store(simd.mul(dgate, silu_slope(simd, simd.load(z))), dz);
    }
    let dgate = simd.mul(simd.load(&S::tail(y_rest)), simd.load(&S::tail(dout_rest)));
    let mut tail = S::ZERO;
    simd.store(simd.mul(dgate, silu_slope(simd, simd.load(&S::tail(z_rest)))), &mut tail);
    S::write_tail(&tail, dz_rest);
}

/// `s (1 + z (1 - s))` with the sigmoid s of z.
#[inline(always)]
fn silu_slope<S: Simd>(simd: S, z: S::F) -> S::F {
    let (one, s) = (simd.splat(1.0), sigmoid_lanes(simd, z));
    simd.mul(s, simd.mul_add(z, simd.sub(one, s), one))
}

dispatch! {
    /// Replaces each element by `1 / (1 + exp(-x))`.
    fn sigmoid = sigmoid_body(x: &mut [f32])
}

#[inline(always)]
fn sigmoid_body<S: Simd>(simd: S, x: &mut [f32]) {
    let (chunks, rest) = S::chunks_mut(x);
    for chunk in chunks {
        simd.store(sigmoid_lanes(simd, simd.load(chunk)), chunk);
    }
    let mut tail = S::tail(rest);
    simd.store(sigmoid_lanes(simd, simd.load(&tail)), &mut tail);
    S::write_tail(&tail, rest);
}

#[inline(always)]
fn sigmoid_lanes<S: Simd>(simd: S, x: S::F) -> S::F {
    let one = simd.splat(1.0);
    simd.div(one, simd.add(one, exp_lanes(simd, simd.sub(simd.splat(0.0), x))))
}
