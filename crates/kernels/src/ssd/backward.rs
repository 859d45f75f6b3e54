//! Gradients of the whole operation, chunk by chunk from a run's end to its start.
//!
//! For a chunk of Q tokens and a head: X, B, C are its rows, dY is the gradient that reaches y before
//! the gate, `cum` the running sum of `dt a`, S the state that enters and S' the one that leaves.
//!
//! ```text
//! e[t] = exp(cum[t])    f[s] = exp(cum[Q-1] - cum[s])    L[t, s] = exp(cum[t] - cum[s]) dt[s]
//! V    = dY Xᵀ          M    = (C Bᵀ) ∘ L                 W = V ∘ L                 s <= t, else 0
//!
//! dX = Mᵀ dY + (f dt) ∘ (B dS'ᵀ) + d dY                   [Q, P]
//! dB = Wᵀ C + (f dt ∘ X) dS'                              [Q, N], summed over the heads of a group
//! dC = W B  + (e ∘ dY) S                                  [Q, N], summed over the heads of a group
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
//! 2. A block of chunks at a time, heads are computed in parallel. What each adds to dB, dC and W is
//!    summed head after head, and the products with W are made once for a group.
//! 3. Heads are taken sixteen at a time, which bounds the memory of the states.
//! 4. All products are those of [`matrix`](super::matrix).
//!
//! A run sees its own tokens alone. Paper: *Transformers are SSMs* (Dao and Gu, 2024), section 6.

use std::ops::Range;

use rayon::prelude::*;

use super::Ssd;
use super::cumsum::{exponent_sums, timestep};
use super::matrix::{
    Matrix, Part, add, add_column_dots, dots, multiply, multiply_transposed, row_dots, scale_rows,
};
use crate::math::exp_lanes;
use crate::norm::gate;
use crate::rows::{Rows, column_blocks};
use crate::simd::{Level, Simd, dispatch};

/// Q: whole vectors of every instruction set.
const CHUNK: usize = 48;
/// Chunks whose parts of dB and dC are kept at once.
const BLOCK_CHUNKS: usize = 4;
/// Most heads whose states are kept at once.
const BLOCK_HEADS: usize = 16;

/// Where the gradients of [`ssd_backward`] go: those of activations are written, those of parameters
/// are added to what is there.
#[derive(Debug)]
pub struct SsdGradients<'a> {
    /// `[T, H, P]`
    pub dx: &'a mut [f32],
    /// Of the raw steps, `[T, H]`.
    pub ddt: &'a mut [f32],
    /// `[T, G, N]`
    pub db: &'a mut [f32],
    /// `[T, G, N]`
    pub dc: &'a mut [f32],
    /// `[T, H, P]`; none where there is no gate.
    pub dz: Option<&'a mut [f32]>,
    /// `[H]`
    pub da: &'a mut [f32],
    /// `[H]`; may be left out.
    pub ddt_bias: Option<&'a mut [f32]>,
    /// `[H]` or `[H, P]`, as `d`; may be left out.
    pub dd: Option<&'a mut [f32]>,
}

/// Turns the gradients of what [`ssd`](super::ssd) returns into those of what it was given.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `input` | see [`Ssd`] | what the forward was given |
/// | `runs` | lengths, sum T | tokens of each sequence; may be 0 |
/// | `states` | a `[H, P, N]` for each run | state before its first token |
/// | `dout` | `[T, H * P]` | gradient of y |
/// | `dstates` | a `[H, P, N]` for each run | gradient of the state after the last token, replaced by that of the state before the first |
/// | `out` | see [`SsdGradients`] | |
///
/// A step that a limit replaces has no gradient. Gradients of activations and states have the same bits
/// whatever runs are in the call; those of parameters are summed run by run.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn ssd_backward(
    input: &Ssd<'_>,
    runs: &[usize],
    states: &[&[f32]],
    dout: Rows<'_>,
    dstates: &mut [&mut [f32]],
    out: SsdGradients<'_>,
) {
    ssd_backward_at(Level::detect(), input, runs, states, dout, dstates, out);
}

#[track_caller]
pub(super) fn ssd_backward_at(
    level: Level,
    input: &Ssd<'_>,
    runs: &[usize],
    states: &[&[f32]],
    dout: Rows<'_>,
    dstates: &mut [&mut [f32]],
    mut out: SsdGradients<'_>,
) {
    input.check(runs);
    let Ssd { nheads, headdim, dstate, .. } = *input;
    let state_len = nheads * headdim * dstate;
    assert_eq!(states.len(), runs.len(), "states");
    assert!(states.iter().all(|s| s.len() == state_len), "states");
    assert_eq!((dout.len(), dout.width()), (input.x.len(), nheads * headdim), "dout");
    assert_eq!(dstates.len(), runs.len(), "dstates");
    assert!(dstates.iter().all(|s| s.len() == state_len), "dstates");
    out.check(input);

    let mut first = 0;
    for ((&len, state), dstate) in runs.iter().zip(states).zip(dstates) {
        if len > 0 {
            let tokens = first..first + len;
            let run = Run::new(level, input, &tokens, dout);
            let mut out = out.tokens(input, &tokens);
            // Enters the thread pool once, not anew for each parallel loop in there.
            rayon::scope(|_| run.backward(state, dstate, &mut out));
        }
        first += len;
    }
}

impl SsdGradients<'_> {
    #[track_caller]
    fn check(&self, input: &Ssd<'_>) {
        let (tokens, heads, groups) = (input.x.len(), input.nheads, input.ngroups);
        assert_eq!(self.dx.len(), tokens * heads * input.headdim, "dx");
        assert_eq!(self.ddt.len(), tokens * heads, "ddt");
        assert_eq!(self.db.len(), tokens * groups * input.dstate, "db");
        assert_eq!(self.dc.len(), tokens * groups * input.dstate, "dc");
        assert_eq!(self.dz.is_some(), input.z.is_some(), "dz");
        assert!(self.dz.as_ref().is_none_or(|dz| dz.len() == self.dx.len()), "dz");
        assert_eq!(self.da.len(), heads, "da");
        assert!(self.ddt_bias.as_ref().is_none_or(|db| db.len() == heads), "ddt_bias");
        assert!(
            self.dd.as_ref().is_none_or(|dd| Some(dd.len()) == input.d.map(<[f32]>::len)),
            "dd"
        );
    }

    /// The same for some of the tokens.
    fn tokens(&mut self, input: &Ssd<'_>, tokens: &Range<usize>) -> SsdGradients<'_> {
        let rows = |width: usize| tokens.start * width..tokens.end * width;
        let (x, bc) = (input.nheads * input.headdim, input.ngroups * input.dstate);
        SsdGradients {
            dx: &mut self.dx[rows(x)],
            ddt: &mut self.ddt[rows(input.nheads)],
            db: &mut self.db[rows(bc)],
            dc: &mut self.dc[rows(bc)],
            dz: self.dz.as_deref_mut().map(|dz| &mut dz[rows(x)]),
            da: self.da,
            ddt_bias: self.ddt_bias.as_deref_mut(),
            dd: self.dd.as_deref_mut(),
        }
    }
}

/// One run: its tokens are all that there is.
struct Run<'a> {
    level: Level,
    input: Ssd<'a>,
    dout: Rows<'a>,
    /// Steps `[L, H]`, after their limits.
    dt: Vec<f32>,
    /// Their derivatives by the raw steps, `[L, H]`.
    slopes: Vec<f32>,
}

/// One head of a run.
struct Head<'a> {
    index: usize,
    /// Skip weights `[P]`, zeros if there are none.
    d: Vec<f32>,
    /// S of every chunk, `[K, P, N]`
    states: Vec<f32>,
    /// dS', `[P, N]`
    dstate: Matrix,
    /// What it adds to the sums over heads, for each chunk of a block.
    parts: Vec<Parts>,
    /// `[L]`
    ddt: Vec<f32>,
    da: f64,
    /// `[P]`
    dd: Vec<f64>,
    /// The caller's `[P, N]`: of the state after the run, in the end of that before.
    dstate_out: &'a mut [f32],
}

/// What is summed over the heads of a group, for one chunk.
struct Parts {
    /// `(f dt ∘ X) dS'`, `[Q, N]`
    db: Matrix,
    /// `(e ∘ dY) S`, `[Q, N]`
    dc: Matrix,
    /// W, `[Q, Q]`
    w: Matrix,
}

/// What the heads of a group share in a chunk.
struct Shared {
    /// `[Q, N]`
    b: Matrix,
    /// `[Q, N]`
    c: Matrix,
    /// `C Bᵀ`, `[Q, Q]`, zeros above the diagonal
    cb: Matrix,
}

/// Buffers of one worker, kept from chunk to chunk.
struct Scratch {
    /// X, `f dt ∘ X`, dY, `e ∘ dY`, dX and one more: each `[Q, P]`
    x: Matrix,
    x_weighted: Matrix,
    dy: Matrix,
    dy_decayed: Matrix,
    dx: Matrix,
    rows: Matrix,
    /// B, `[Q, N]`
    b: Matrix,
    /// M, `[Q, Q]`
    m: Matrix,
    /// S, `[P, N]`
    state: Matrix,
    /// `[P]`
    state_dots: Vec<f32>,
}

impl Parts {
    fn zeros(dstate: usize) -> Self {
        Self {
            db: Matrix::zeros(CHUNK, dstate),
            dc: Matrix::zeros(CHUNK, dstate),
            w: Matrix::zeros(CHUNK, CHUNK),
        }
    }
}

impl Shared {
    fn zeros(dstate: usize) -> Self {
        Self {
            b: Matrix::zeros(CHUNK, dstate),
            c: Matrix::zeros(CHUNK, dstate),
            cb: Matrix::zeros(CHUNK, CHUNK),
        }
    }
}

impl Scratch {
    fn zeros(headdim: usize, dstate: usize) -> Self {
        Self {
            x: Matrix::zeros(CHUNK, headdim),
            x_weighted: Matrix::zeros(CHUNK, headdim),
            dy: Matrix::zeros(CHUNK, headdim),
            dy_decayed: Matrix::zeros(CHUNK, headdim),
            dx: Matrix::zeros(CHUNK, headdim),
            rows: Matrix::zeros(CHUNK, headdim),
            b: Matrix::zeros(CHUNK, dstate),
            m: Matrix::zeros(CHUNK, CHUNK),
            state: Matrix::zeros(headdim, dstate),
            state_dots: vec![0.0; headdim],
        }
    }
}

impl<'a> Run<'a> {
    fn new(level: Level, input: &Ssd<'a>, tokens: &Range<usize>, dout: Rows<'a>) -> Self {
        let slice = |rows: Rows<'a>| rows.slice(tokens.start, tokens.len());
        let input = Ssd {
            x: slice(input.x),
            dt: slice(input.dt),
            b: slice(input.b),
            c: slice(input.c),
            z: input.z.map(slice),
            ..*input
        };
        let mut dt = Vec::with_capacity(tokens.len() * input.nheads);
        (0..tokens.len()).for_each(|t| dt.extend_from_slice(input.dt.row(t)));
        let no_limit = (f32::NEG_INFINITY, f32::INFINITY);
        timestep(&mut dt, input.dt_bias, input.dt_softplus, no_limit);
        let mut slopes = dt.clone();
        timestep(&mut dt, None, false, input.dt_limit);
        for (slope, dt) in slopes.iter_mut().zip(&dt) {
            let limited = *slope < *dt || *slope > *dt;
            *slope = match (limited, input.dt_softplus) {
                (true, _) => 0.0,
                // The sigmoid of what softplus was taken of.
                (false, true) => -(-dt).exp_m1(),
                (false, false) => 1.0,
            };
        }
        Self { level, input, dout: slice(dout), dt, slopes }
    }

    fn len(&self) -> usize {
        self.input.x.len()
    }

    fn nchunks(&self) -> usize {
        self.len().div_ceil(CHUNK)
    }

    fn heads_per_group(&self) -> usize {
        self.input.nheads / self.input.ngroups
    }

    /// Tokens of some chunks.
    fn tokens(&self, chunks: &Range<usize>) -> Range<usize> {
        chunks.start * CHUNK..self.len().min(chunks.end * CHUNK)
    }

    /// One head's columns of `[L, H * P]`.
    fn of_head<'r>(&self, rows: Rows<'r>, head: usize, tokens: &Range<usize>) -> Rows<'r> {
        let p = self.input.headdim;
        rows.slice(tokens.start, tokens.len()).columns(head * p, p)
    }

    /// One group's columns of `[L, G * N]`.
    fn of_group<'r>(&self, rows: Rows<'r>, group: usize, tokens: &Range<usize>) -> Rows<'r> {
        let n = self.input.dstate;
        rows.slice(tokens.start, tokens.len()).columns(group * n, n)
    }

    fn backward(&self, state: &[f32], dstate: &mut [f32], out: &mut SsdGradients<'_>) {
        let Ssd { nheads, headdim, .. } = self.input;
        if nheads * headdim == 0 {
            out.ddt.fill(0.0);
            out.db.fill(0.0);
            out.dc.fill(0.0);
            return;
        }
        // Blocks of equal shares.
        let share = nheads.div_ceil(nheads.div_ceil(BLOCK_HEADS));
        for first in (0..nheads).step_by(share) {
            let range = first..nheads.min(first + share);
            let mut heads = self.split(range, dstate);
            self.block_of_heads(&mut heads, state, out);
            heads.into_iter().for_each(|head| self.finish(head, out));
        }
    }

    /// Some heads, at the end of the run.
    fn split<'s>(&self, range: Range<usize>, dstate: &'s mut [f32]) -> Vec<Head<'s>> {
        let Ssd { nheads, headdim: p, dstate: n, .. } = self.input;
        let mut heads = Vec::with_capacity(range.len());
        let mut rest = &mut dstate[range.start * p * n..];
        for index in range {
            let (dstate_out, after) = rest.split_at_mut(p * n);
            rest = after;
            let mut dstate = Matrix::zeros(p, n);
            dstate.load(Rows::new(dstate_out, p, n, 0, n));
            heads.push(Head {
                index,
                d: match self.input.d {
                    None => vec![0.0; p],
                    Some(d) if d.len() == nheads => vec![d[index]; p],
                    Some(d) => d[index * p..][..p].to_vec(),
                },
                states: Vec::with_capacity(self.nchunks() * p * n),
                dstate,
                parts: (0..BLOCK_CHUNKS).map(|_| Parts::zeros(n)).collect(),
                ddt: vec![0.0; self.len()],
                da: 0.0,
                dd: vec![0.0; p],
                dstate_out,
            });
        }
        heads
    }

    /// Takes some neighbouring heads to the end of the run and back.
    fn block_of_heads(&self, heads: &mut [Head<'_>], state: &[f32], out: &mut SsdGradients<'_>) {
        let Ssd { nheads, headdim: p, dstate: n, .. } = self.input;
        let per_group = self.heads_per_group();
        let head_range = heads[0].index..heads[0].index + heads.len();
        let groups = head_range.start / per_group..head_range.end.div_ceil(per_group);
        heads.par_iter_mut().for_each_init(
            || Scratch::zeros(p, n),
            |scratch, head| {
                self.chunk_states(&state[head.index * p * n..][..p * n], head, scratch);
            },
        );
        let mut shared: Vec<Shared> =
            (0..BLOCK_CHUNKS * groups.len()).map(|_| Shared::zeros(n)).collect();
        for first in (0..self.nchunks()).step_by(BLOCK_CHUNKS).rev() {
            let chunks = first..self.nchunks().min(first + BLOCK_CHUNKS);
            let tokens = self.tokens(&chunks);
            let shared = &mut shared[..chunks.len() * groups.len()];
            shared.par_iter_mut().enumerate().for_each(|(i, shared)| {
                let (chunk, group) = (first + i / groups.len(), groups.start + i % groups.len());
                self.share(&self.tokens(&(chunk..chunk + 1)), group, shared);
            });
            let dx = bands(out.dx, nheads * p, p, &tokens, &head_range);
            let dz: Vec<Option<Vec<&mut [f32]>>> = match out.dz.as_deref_mut() {
                Some(dz) => {
                    let bands = bands(dz, nheads * p, p, &tokens, &head_range);
                    bands.into_iter().map(Some).collect()
                }
                None => head_range.clone().map(|_| None).collect(),
            };
            heads.par_iter_mut().zip(dx).zip(dz).for_each_init(
                || Scratch::zeros(p, n),
                |scratch, ((head, mut dx), mut dz)| {
                    let group = head.index / per_group - groups.start;
                    for (i, chunk) in chunks.clone().enumerate().rev() {
                        let shared = &shared[i * groups.len() + group];
                        let rows = i * CHUNK..dx.len().min((i + 1) * CHUNK);
                        let dz = dz.as_mut().map(|dz| &mut dz[rows.clone()]);
                        self.head_chunk(chunk, i, head, shared, &mut dx[rows], dz, scratch);
                    }
                },
            );
            self.sum_heads(heads, &groups, &tokens, shared, out);
        }
    }

    /// The first pass: fills a head's states from the one before the run on.
    fn chunk_states(&self, first: &[f32], head: &mut Head<'_>, scratch: &mut Scratch) {
        let (level, Ssd { x, b, headdim: p, dstate: n, .. }) = (self.level, self.input);
        let group = head.index / self.heads_per_group();
        scratch.state.load(Rows::new(first, p, n, 0, n));
        for chunk in 0..self.nchunks() {
            let Scratch { x: x_rows, x_weighted, b: b_rows, state, .. } = scratch;
            (0..p).for_each(|i| head.states.extend_from_slice(state.row(i)));
            if chunk + 1 == self.nchunks() {
                break;
            }
            let tokens = self.tokens(&(chunk..chunk + 1));
            let decays = self.decays(head.index, &tokens);
            x_rows.load(self.of_head(x, head.index, &tokens));
            scale_rows(level, x_weighted, x_rows, &decays.weight);
            b_rows.load(self.of_group(b, group, &tokens));
            let through = decays.entered[tokens.len() - 1];
            multiply_transposed(level, state, through, x_weighted, Part::Full, b_rows);
        }
    }

    fn decays(&self, head: usize, tokens: &Range<usize>) -> Decays {
        let mut dt = [0.0; CHUNK];
        for (dt, t) in dt.iter_mut().zip(tokens.clone()) {
            *dt = self.dt[t * self.input.nheads + head];
        }
        decays(self.level, tokens.len(), dt, self.input.a[head])
    }

    fn share(&self, tokens: &Range<usize>, group: usize, shared: &mut Shared) {
        let Shared { b, c, cb } = shared;
        b.load(self.of_group(self.input.b, group, tokens));
        c.load(self.of_group(self.input.c, group, tokens));
        dots(self.level, cb, Part::Lower, c, b);
        for t in 0..tokens.len() {
            cb.whole_row_mut(t)[t + 1..].fill(0.0);
        }
    }

    /// Takes one head back through a chunk, the `i`th of its block.
    #[expect(clippy::too_many_arguments, reason = "one call")]
    fn head_chunk(
        &self,
        chunk: usize,
        i: usize,
        head: &mut Head<'_>,
        shared: &Shared,
        dx_out: &mut [&mut [f32]],
        dz_out: Option<&mut [&mut [f32]]>,
        scratch: &mut Scratch,
    ) {
        let (level, Ssd { headdim: p, dstate: n, .. }) = (self.level, self.input);
        let tokens = self.tokens(&(chunk..chunk + 1));
        let Scratch { x, x_weighted, dy, dy_decayed, dx, rows, m, state, state_dots, .. } = scratch;
        let (Parts { db, dc, w }, Shared { b, c, cb }) = (&mut head.parts[i], shared);
        let decays = self.decays(head.index, &tokens);
        let through = decays.entered[tokens.len() - 1];
        let of_head = |rows| self.of_head(rows, head.index, &tokens);

        x.load(of_head(self.input.x));
        dy.load(of_head(self.dout));
        if let Some(z) = self.input.z.map(of_head) {
            (0..z.len()).for_each(|t| gate(level, dy.row_mut(t), z.row(t)));
        }
        scale_rows(level, x_weighted, x, &decays.weight);
        scale_rows(level, dy_decayed, dy, &decays.entered);
        state.load(Rows::new(&head.states[chunk * p * n..][..p * n], p, n, 0, n));

        // V, which becomes W
        dots(level, w, Part::Lower, dy, x);
        let paths = pairs(level, cb, &decays, m, w);

        // dX
        let mut to_state = [0.0; CHUNK];
        dots(level, rows, Part::Full, b, &head.dstate);
        row_dots(level, &mut to_state, x, rows);
        scale_rows(level, dx, rows, &decays.weight);
        multiply_transposed(level, dx, 1.0, m, Part::Lower, dy);
        for (t, out) in dx_out.iter_mut().enumerate() {
            add_skip(level, dx.row(t), &head.d, dy.row(t), out);
        }

        // This head's parts of dB and dC
        let mut from_state = [0.0; CHUNK];
        multiply(level, db, 0.0, x_weighted, Part::Full, &head.dstate);
        multiply(level, dc, 0.0, dy_decayed, Part::Full, state);
        row_dots(level, &mut from_state, c, dc);

        // dZ
        if let (Some(z), Some(dz)) = (self.input.z.map(of_head), dz_out) {
            let dout = of_head(self.dout);
            dots(level, rows, Part::Full, c, state);
            scale_rows(level, dx, rows, &decays.entered);
            multiply(level, dx, 1.0, m, Part::Lower, x);
            for (t, dz) in dz.iter_mut().enumerate() {
                add_skip(level, dx.row(t), &head.d, x.row(t), dz);
                gate_slope(level, dout.row(t), z.row(t), dz);
            }
        }

        // dS
        row_dots(level, state_dots, &head.dstate, state);
        let past = f64::from(through) * state_dots.iter().copied().map(f64::from).sum::<f64>();
        multiply_transposed(level, &mut head.dstate, through, dy_decayed, Part::Full, c);

        // Gradients of the exponents: what leads to the state after the chunk, past it, and from before.
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
        let a = f64::from(self.input.a[head.index]);
        for (i, t) in tokens.enumerate() {
            let direct = paths.ddt[i] + decays.leaving[i] * to_state[i];
            let slope = self.slopes[t * self.input.nheads + head.index];
            head.ddt[t] = ((f64::from(direct) + a * dexponent[i]) * f64::from(slope)) as f32;
            head.da += dexponent[i] * f64::from(decays.dt[i]);
        }
        add_column_dots(level, &mut head.dd, dy, x);
    }

    /// Writes dB and dC of a block of chunks, or adds to them what more heads of the same group have.
    fn sum_heads(
        &self,
        heads: &[Head<'_>],
        groups: &Range<usize>,
        tokens: &Range<usize>,
        shared: &[Shared],
        out: &mut SsdGradients<'_>,
    ) {
        let (level, Ssd { ngroups, dstate: n, .. }) = (self.level, self.input);
        if n == 0 {
            return;
        }
        let mut db = bands(out.db, ngroups * n, n, tokens, groups);
        let mut dc = bands(out.dc, ngroups * n, n, tokens, groups);
        db.par_iter_mut().zip(&mut dc).zip(groups.clone()).for_each(|((db, dc), group)| {
            let of_group = |head: &&Head<'_>| head.index / self.heads_per_group() == group;
            let heads: Vec<&Head<'_>> = heads.iter().filter(of_group).collect();
            let more = heads[0].index > group * self.heads_per_group();
            let rows = db.par_chunks_mut(CHUNK).zip(dc.par_chunks_mut(CHUNK));
            rows.enumerate().for_each(|(chunk, (db, dc))| {
                let mut sum = Parts::zeros(n);
                for head in &heads {
                    let parts = &head.parts[chunk];
                    add(level, &mut sum.db, &parts.db);
                    add(level, &mut sum.dc, &parts.dc);
                    add(level, &mut sum.w, &parts.w);
                }
                let shared = &shared[chunk * groups.len() + group - groups.start];
                multiply_transposed(level, &mut sum.db, 1.0, &sum.w, Part::Lower, &shared.c);
                multiply(level, &mut sum.dc, 1.0, &sum.w, Part::Lower, &shared.b);
                for (out, sum) in [(db, sum.db), (dc, sum.dc)] {
                    for (t, out) in out.iter_mut().enumerate() {
                        if more {
                            out.iter_mut().zip(sum.row(t)).for_each(|(out, sum)| *out += sum);
                        } else {
                            out.copy_from_slice(sum.row(t));
                        }
                    }
                }
            });
        });
    }

    /// Hands over what a head has at the start of the run.
    fn finish(&self, head: Head<'_>, out: &mut SsdGradients<'_>) {
        let Ssd { nheads, headdim: p, dstate: n, .. } = self.input;
        for i in 0..p {
            head.dstate_out[i * n..][..n].copy_from_slice(head.dstate.row(i));
        }
        for (t, ddt) in head.ddt.iter().enumerate() {
            out.ddt[t * nheads + head.index] = *ddt;
        }
        out.da[head.index] += head.da as f32;
        if let Some(ddt_bias) = out.ddt_bias.as_deref_mut() {
            ddt_bias[head.index] += head.ddt.iter().copied().map(f64::from).sum::<f64>() as f32;
        }
        match out.dd.as_deref_mut() {
            Some(dd) if dd.len() == nheads => dd[head.index] += head.dd.iter().sum::<f64>() as f32,
            Some(dd) => {
                let dd = &mut dd[head.index * p..][..p];
                dd.iter_mut().zip(head.dd).for_each(|(out, dd)| *out += dd as f32);
            }
            None => {}
        }
    }
}

/// Some rows of some bands of `block` columns of a `[rows, width]` matrix.
fn bands<'a>(
    out: &'a mut [f32],
    width: usize,
    block: usize,
    rows: &Range<usize>,
    bands: &Range<usize>,
) -> Vec<Vec<&'a mut [f32]>> {
    let rows = &mut out[rows.start * width..rows.end * width];
    column_blocks(rows, width, block).into_iter().skip(bands.start).take(bands.len()).collect()
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
    /// Fills M, and turns `v` from V to W, from the last row to the first.
    fn pairs = pairs_body(cb: &Matrix, decays: &Decays, m: &mut Matrix, v: &mut Matrix) -> Paths
}

#[inline(always)]
fn pairs_body<S: Simd>(
    simd: S,
    cb: &Matrix,
    decays: &Decays,
    m: &mut Matrix,
    v: &mut Matrix,
) -> Paths {
    let len = decays.len;
    m.set_size(len, len);
    let mut dexponent = [0.0; CHUNK];
    // The sum over the rows so far, by s.
    let mut ddt = [0.0; CHUNK];
    // The steps of the tokens before the row.
    let mut dt_before = decays.dt;
    let dt = S::chunks(&decays.dt).0;
    let (high, low) = (S::chunks(&decays.high).0, S::chunks(&decays.low).0);
    for t in (0..len).rev() {
        m.whole_row_mut(t)[t + 1..].fill(0.0);
        v.whole_row_mut(t)[t + 1..].fill(0.0);
        dt_before[t] = 0.0;
        let cb = S::chunks(cb.whole_row(t)).0;
        let m = S::chunks_mut(m.whole_row_mut(t)).0;
        let v = S::chunks_mut(v.whole_row_mut(t)).0;
        let here = (simd.splat(decays.high[t]), simd.splat(decays.low[t]));
        let (ddt, dt_before) = (S::chunks_mut(&mut ddt).0, S::chunks(&dt_before).0);
        let mut across = simd.splat(0.0);
        for i in 0..=t / S::LANES {
            let exponent = simd
                .add(simd.sub(here.0, simd.load(&high[i])), simd.sub(here.1, simd.load(&low[i])));
            let decay = exp_lanes(simd, simd.min(simd.splat(0.0), exponent));
            let (pair, carried) = (simd.mul(decay, simd.load(&cb[i])), simd.load(&v[i]));
            let step = simd.load(&dt[i]);
            simd.store(simd.mul(pair, step), &mut m[i]);
            simd.store(simd.mul(simd.mul(decay, step), carried), &mut v[i]);
            let sum = simd.mul_add(pair, carried, simd.load(&ddt[i]));
            simd.store(sum, &mut ddt[i]);
            across = simd.mul_add(sum, simd.load(&dt_before[i]), across);
        }
        dexponent[t] = simd.reduce(across);
    }
    Paths { dexponent, ddt }
}

dispatch! { fn add_skip = add_skip_body(a: &[f32], d: &[f32], x: &[f32], out: &mut [f32]) }

/// `out = a + d ∘ x`
#[inline(always)]
fn add_skip_body<S: Simd>(_simd: S, a: &[f32], d: &[f32], x: &[f32], out: &mut [f32]) {
    for (((out, a), d), x) in out.iter_mut().zip(a).zip(d).zip(x) {
        *out = a + d * x;
    }
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
