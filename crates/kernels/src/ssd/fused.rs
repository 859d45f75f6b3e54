//! The whole operation in one pass, as matrix products on chunks.
//!
//! For each chunk of Q tokens and each head, with `cum` the running sum of `dt a` in the chunk and
//! `Sᵀ` `[N, P]` the transposed state that enters it:
//!
//! ```text
//! M[t, s] = (c[t]·b[s]) exp(cum[t] - cum[s]) dt[s]       s <= t
//! Y       = exp(cum) ∘ (C Sᵀ) + M X                      [Q, P]
//! Sᵀ      = exp(cum[Q-1]) Sᵀ + Bᵀ (w ∘ X)                w[s] = exp(cum[Q-1] - cum[s]) dt[s]
//! ```
//!
//! What differs from the stages, and why:
//!
//! 1. `C Bᵀ` belongs to a group: it is computed once for the heads that share it. So are the packed
//!    copies of C and Bᵀ.
//! 2. All products run in one micro-kernel of 6 rows by two vectors of columns. Its left operand is
//!    packed in tiles, six rows interleaved, the last tile filled up with zeros; its right operand
//!    lies in panels of two vectors.
//! 3. Sᵀ stays in panels from a run's first chunk to its last.
//! 4. A skip weight that a head has for itself is added to M's diagonal: it costs nothing there.
//! 5. The sums `cum` are kept as pairs of f32, so that their differences stay exact where they matter.
//! 6. Long runs go chunk block by chunk block, heads in parallel; short runs go token by token.
//!
//! Every run is computed by itself: its result depends on its own tokens and state alone.

use rayon::prelude::*;

use super::cumsum::timestep;
use super::step::steps;
use crate::linear::{Weights, linear_rows};
use crate::math::exp_lanes;
use crate::norm::gate;
use crate::rows::{Rows, column_blocks};
use crate::simd::{Level, Simd, dispatch};

/// Q: the chunk length of the fused path, a multiple of `TILE`.
const CHUNK: usize = 60;
/// Chunks whose shared products are kept at once.
const BLOCK_CHUNKS: usize = 8;
/// Rows of the micro-kernel.
const TILE: usize = 6;
/// Runs from this length on are computed by chunks.
const LONG: usize = 16;

/// Inputs of [`ssd`] for the tokens of all runs, one after another.
#[derive(Debug, Clone, Copy)]
pub struct Ssd<'a> {
    /// H
    pub nheads: usize,
    /// P
    pub headdim: usize,
    /// G, divides H
    pub ngroups: usize,
    /// N
    pub dstate: usize,
    /// `[T, H * P]`
    pub x: Rows<'a>,
    /// Raw steps `[T, H]`.
    pub dt: Rows<'a>,
    /// `[H]`, negative
    pub a: &'a [f32],
    /// `[T, G * N]`
    pub b: Rows<'a>,
    /// `[T, G * N]`
    pub c: Rows<'a>,
    /// `[H]`, added to `dt` before softplus
    pub dt_bias: Option<&'a [f32]>,
    /// Skip weights, `[H]` or `[H, P]`.
    pub d: Option<&'a [f32]>,
    /// Gate `[T, H * P]`: y becomes `y * silu(z)`.
    pub z: Option<Rows<'a>>,
    /// Whether steps go through softplus.
    pub dt_softplus: bool,
    /// Bounds of the steps after softplus; `(0, infinity)` does nothing.
    pub dt_limit: (f32, f32),
}

impl Ssd<'_> {
    #[track_caller]
    pub(crate) fn check(&self, runs: &[usize]) {
        let (tokens, heads) = (self.x.len(), self.nheads);
        assert!(self.ngroups > 0 && heads.is_multiple_of(self.ngroups), "ngroups");
        assert_eq!(self.x.width(), heads * self.headdim, "x");
        assert_eq!((self.dt.len(), self.dt.width()), (tokens, heads), "dt");
        assert_eq!(self.a.len(), heads, "a");
        assert_eq!((self.b.len(), self.b.width()), (tokens, self.ngroups * self.dstate), "b");
        assert_eq!((self.c.len(), self.c.width()), (tokens, self.ngroups * self.dstate), "c");
        assert!(self.dt_bias.is_none_or(|b| b.len() == heads), "dt_bias");
        assert!(self.d.is_none_or(|d| d.len() == heads || d.len() == heads * self.headdim), "d");
        assert!(self.z.is_none_or(|z| (z.len(), z.width()) == (tokens, heads * self.headdim)), "z");
        assert_eq!(runs.iter().sum::<usize>(), tokens, "runs");
    }

    /// Adds the skip to one head's output `[P]` of token `t`.
    #[inline(always)]
    pub(crate) fn skip(&self, t: usize, head: usize, y: &mut [f32]) {
        let Some(d) = self.d else { return };
        let first = head * self.headdim;
        let x = &self.x.row(t)[first..][..y.len()];
        if d.len() == self.nheads {
            y.iter_mut().zip(x).for_each(|(y, x)| *y += d[head] * x);
        } else {
            let d = &d[first..][..y.len()];
            y.iter_mut().zip(x).zip(d).for_each(|((y, x), d)| *y += d * x);
        }
    }

    /// Gates one head's output `[P]` of token `t`.
    #[inline(always)]
    pub(crate) fn gate(&self, t: usize, head: usize, y: &mut [f32]) {
        if let Some(z) = self.z {
            gate(Level::detect(), y, &z.row(t)[head * self.headdim..][..y.len()]);
        }
    }
}

/// Runs each sequence's tokens through the state-space model and moves its state on.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `input` | see [`Ssd`] | tokens of all runs, one after another |
/// | `runs` | lengths, sum T | tokens of each sequence; may be 0 |
/// | `states` | a `[H, P, N]` for each run | state before its first token, updated to after its last |
/// | `y` | `[T, H, P]` | overwritten |
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn ssd(input: &Ssd<'_>, runs: &[usize], states: &mut [&mut [f32]], y: &mut [f32]) {
    ssd_at(Level::detect(), input, runs, states, y);
}

#[track_caller]
pub(super) fn ssd_at(
    level: Level,
    input: &Ssd<'_>,
    runs: &[usize],
    states: &mut [&mut [f32]],
    y: &mut [f32],
) {
    input.check(runs);
    let Ssd { nheads, headdim, dstate, .. } = *input;
    assert_eq!(states.len(), runs.len(), "states");
    assert!(states.iter().all(|s| s.len() == nheads * headdim * dstate), "states");
    assert_eq!(y.len(), input.x.len() * nheads * headdim, "y");
    if y.is_empty() || dstate == 0 {
        for (t, y) in y.chunks_exact_mut((nheads * headdim).max(1)).enumerate() {
            y.fill(0.0);
            for (head, y) in y.chunks_exact_mut(headdim).enumerate() {
                input.skip(t, head, y);
                input.gate(t, head, y);
            }
        }
        return;
    }

    let mut dt: Vec<f32> = Vec::with_capacity(input.dt.len() * nheads);
    (0..input.dt.len()).for_each(|t| dt.extend_from_slice(input.dt.row(t)));
    timestep(&mut dt, input.dt_bias, input.dt_softplus, input.dt_limit);

    // For each head its column of y, cut where a run ends.
    let mut columns: Vec<std::vec::IntoIter<&mut [f32]>> =
        column_blocks(y, nheads * headdim, headdim).into_iter().map(Vec::into_iter).collect();
    let mut short = Vec::new();
    let mut first = 0;
    for (&len, state) in runs.iter().zip(states) {
        let heads = state.chunks_exact_mut(headdim * dstate).zip(&mut columns).enumerate();
        let tasks = heads.map(|(head, (state, column))| {
            let y: Vec<&mut [f32]> = column.by_ref().take(len).collect();
            Task { head, first, state, y }
        });
        if len < LONG {
            short.extend(tasks.filter(|task| !task.y.is_empty()));
        } else {
            by_chunks(level, input, &dt, tasks.collect());
        }
        first += len;
    }
    short.into_par_iter().for_each(|mut task| {
        steps(level, input, &dt, task.head, task.first, task.state, &mut task.y);
    });
}

/// One head of one run: its tokens start at `first`, there is a `[P]` of `y` for each.
struct Task<'a> {
    head: usize,
    first: usize,
    state: &'a mut [f32],
    y: Vec<&'a mut [f32]>,
}

/// What the heads of a group share in a chunk of `len` tokens.
struct Shared {
    len: usize,
    /// C `[len, N]` in tiles `[len / 6][N][6]`
    c: Vec<[f32; TILE]>,
    /// Bᵀ `[N, len]` in tiles `[N / 6][len][6]`
    bt: Vec<[f32; TILE]>,
    /// C Bᵀ `[len, len]`
    cb: Vec<f32>,
}

/// Computes one long run, whose heads are `tasks`.
fn by_chunks(level: Level, input: &Ssd<'_>, dt: &[f32], mut tasks: Vec<Task<'_>>) {
    let (first, len) = (tasks[0].first, tasks[0].y.len());
    let heads_per_group = input.nheads / input.ngroups;
    for block in (0..len).step_by(BLOCK_CHUNKS * CHUNK) {
        let block_len = (BLOCK_CHUNKS * CHUNK).min(len - block);
        let nchunks = block_len.div_ceil(CHUNK);
        let shared: Vec<Shared> = (0..nchunks * input.ngroups)
            .into_par_iter()
            .map(|i| {
                let (chunk, group) = (i / input.ngroups, i % input.ngroups);
                let tokens = CHUNK.min(block_len - chunk * CHUNK);
                share(level, input, first + block + chunk * CHUNK, tokens, group)
            })
            .collect();
        tasks.par_iter_mut().for_each_init(Scratch::default, |scratch, task| {
            let group = task.head / heads_per_group;
            let shared: Vec<&Shared> = shared.iter().skip(group).step_by(input.ngroups).collect();
            let y = &mut task.y[block..block + block_len];
            head_block(level, input, dt, task.head, first + block, &shared, task.state, y, scratch);
        });
    }
}

fn share(level: Level, input: &Ssd<'_>, first: usize, len: usize, group: usize) -> Shared {
    let n = input.dstate;
    let (c_rows, b_rows) = (
        input.c.slice(first, len).columns(group * n, n),
        input.b.slice(first, len).columns(group * n, n),
    );
    let mut b = Vec::with_capacity(len * n);
    let mut c = vec![[0.0; TILE]; len.div_ceil(TILE) * n];
    let mut bt = vec![[0.0; TILE]; n.div_ceil(TILE) * len];
    for t in 0..len {
        b.extend_from_slice(b_rows.row(t));
        for (tile, c) in c[t / TILE * n..][..n].iter_mut().zip(c_rows.row(t)) {
            tile[t % TILE] = *c;
        }
        for (i, b) in b_rows.row(t).chunks(TILE).enumerate() {
            bt[i * len + t][..b.len()].copy_from_slice(b);
        }
    }
    let mut cb = vec![0.0; len * len];
    let mut cb_rows: Vec<&mut [f32]> = cb.chunks_exact_mut(len).collect();
    linear_rows(level, c_rows, Weights::F32(&b), &mut cb_rows);
    Shared { len, c, bt, cb }
}

/// Buffers of one worker, kept from head to head.
#[derive(Default)]
struct Scratch {
    /// Sᵀ in panels `[P / W][N][W]`, N filled up to whole tiles
    state: Vec<f32>,
    /// A row of M, and M in tiles `[len / 6][Q][6]`
    row: Vec<f32>,
    m: Vec<[f32; TILE]>,
    /// X and w ∘ X in panels `[P / W][len][W]`
    x: Vec<f32>,
    xw: Vec<f32>,
    /// `dt`, the pairs of `cum`, `exp(cum)`, `w`: each `[Q]`
    dt: Vec<f32>,
    cum_high: Vec<f32>,
    cum_low: Vec<f32>,
    decay: Vec<f32>,
    w: Vec<f32>,
}

dispatch! {
    fn head_block = head_block_body(
        input: &Ssd<'_>,
        dt: &[f32],
        head: usize,
        first: usize,
        shared: &[&Shared],
        state: &mut [f32],
        y: &mut [&mut [f32]],
        scratch: &mut Scratch,
    )
}

/// Takes one head through the chunks of a block; `y` has a `[P]` for each token from `first` on.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "a macro calls it")]
fn head_block_body<S: Simd>(
    simd: S,
    input: &Ssd<'_>,
    dt: &[f32],
    head: usize,
    first: usize,
    shared: &[&Shared],
    state: &mut [f32],
    y: &mut [&mut [f32]],
    scratch: &mut Scratch,
) {
    let (p, n) = (input.headdim, input.dstate);
    let width = 2 * S::LANES;
    let npanels = p.div_ceil(width);
    let rows = n.next_multiple_of(TILE);
    scratch.state.clear();
    scratch.state.resize(npanels * rows * width, 0.0);
    for (i, row) in state.chunks_exact(n).enumerate() {
        let panel = &mut scratch.state[i / width * rows * width..][..n * width];
        for (to, from) in panel.chunks_exact_mut(width).zip(row) {
            to[i % width] = *from;
        }
    }

    let skip_by_channel = input.d.is_some_and(|d| d.len() != input.nheads);
    let mut done = 0;
    for shared in shared {
        let len = shared.len;
        let from = first + done;
        let y = &mut y[done..done + len];
        done += len;
        sums(simd, input, dt, head, from, len, scratch);
        let skip = input.d.filter(|d| d.len() == input.nheads).map_or(0.0, |d| d[head]);
        masked(simd, shared, skip, scratch);
        let Scratch { state, m, x, xw, decay, w, .. } = &mut *scratch;
        pack(input, head, from, len, width, npanels, w, x, xw);
        let through = decay[len - 1];

        for panel in 0..npanels {
            let state = &mut state[panel * rows * width..][..rows * width];
            let x = &x[panel * len * width..][..len * width];
            let xw = &xw[panel * len * width..][..len * width];
            let columns = panel * width..p.min((panel + 1) * width);
            for t in (0..len).step_by(TILE) {
                let c = &shared.c[t / TILE * n..][..n];
                let reach = len.min(t + TILE);
                let m = &m[t / TILE * CHUNK..][..reach];
                let y = &mut y[t..reach];
                output_tile(simd, c, state, &decay[t..reach], m, x, y, &columns);
            }
            for (bt, state) in shared.bt.chunks_exact(len).zip(state.chunks_exact_mut(TILE * width))
            {
                state_tile(simd, bt, through, xw, state);
            }
        }
        for (i, y) in y.iter_mut().enumerate() {
            if skip_by_channel {
                input.skip(from + i, head, y);
            }
            input.gate(from + i, head, y);
        }
    }

    for (i, row) in state.chunks_exact_mut(n).enumerate() {
        let panel = &scratch.state[i / width * rows * width..][..n * width];
        for (from, to) in panel.chunks_exact(width).zip(row) {
            *to = from[i % width];
        }
    }
}

/// Fills `dt`, `cum`, `decay` and `w` for one head's chunk of `len` tokens from `first` on.
#[inline(always)]
fn sums<S: Simd>(
    simd: S,
    input: &Ssd<'_>,
    dt: &[f32],
    head: usize,
    first: usize,
    len: usize,
    scratch: &mut Scratch,
) {
    let padded = len.next_multiple_of(S::LANES);
    let Scratch { dt: steps, cum_high, cum_low, decay, w, .. } = scratch;
    for buffer in [&mut *steps, &mut *cum_high, &mut *cum_low, &mut *decay, &mut *w] {
        buffer.clear();
        buffer.resize(padded, 0.0);
    }
    let a = f64::from(input.a[head]);
    let mut sum = 0.0f64;
    for t in 0..len {
        steps[t] = dt[(first + t) * input.nheads + head];
        sum += f64::from(steps[t]) * a;
        cum_high[t] = sum as f32;
        cum_low[t] = (sum - f64::from(cum_high[t])) as f32;
    }
    let (end_high, end_low) = (simd.splat(cum_high[len - 1]), simd.splat(cum_low[len - 1]));
    let zero = simd.splat(0.0);
    let (steps, high, low) = (S::chunks(steps).0, S::chunks(cum_high).0, S::chunks(cum_low).0);
    let (decay, w) = (S::chunks_mut(decay).0, S::chunks_mut(w).0);
    for i in 0..w.len() {
        let (high, low) = (simd.load(&high[i]), simd.load(&low[i]));
        simd.store(exp_lanes(simd, high), &mut decay[i]);
        let rest = simd.add(simd.sub(end_high, high), simd.sub(end_low, low));
        let rest = exp_lanes(simd, simd.min(zero, rest));
        simd.store(simd.mul(rest, simd.load(&steps[i])), &mut w[i]);
    }
}

/// Fills M plus `skip` on its diagonal; tiles hold all s up to their last token, zeros where s > t.
#[inline(always)]
fn masked<S: Simd>(simd: S, shared: &Shared, skip: f32, scratch: &mut Scratch) {
    let len = shared.len;
    let Scratch { row, m, dt, cum_high, cum_low, .. } = scratch;
    m.resize(CHUNK.div_ceil(TILE) * CHUNK, [0.0; TILE]);
    row.resize(CHUNK.next_multiple_of(S::LANES), 0.0);
    let (dt, high, low) = (S::chunks(dt).0, S::chunks(cum_high).0, S::chunks(cum_low).0);
    for (t, cb) in shared.cb.chunks_exact(len).enumerate() {
        let here = (simd.splat(cum_high[t]), simd.splat(cum_low[t]));
        let (cb, cb_rest) = S::chunks(cb);
        let to = S::chunks_mut(&mut *row).0;
        for i in 0..=t / S::LANES {
            let cb = if i < cb.len() { simd.load(&cb[i]) } else { simd.load(&S::tail(cb_rest)) };
            let weight = pair_weight(simd, here, &high[i], &low[i], &dt[i]);
            simd.store(simd.mul(cb, weight), &mut to[i]);
        }
        row[t] += skip;
        let first = t / TILE * TILE;
        let tile = &mut m[t / TILE * CHUNK..][..first + TILE];
        for (tile, value) in tile[..=t].iter_mut().zip(&row[..=t]) {
            tile[t % TILE] = *value;
        }
        for tile in &mut tile[t + 1..] {
            tile[t % TILE] = 0.0;
        }
    }
}

/// `exp(cum[t] - cum[s]) dt[s]` for a vector of s; never an exponential of more than 0.
#[inline(always)]
fn pair_weight<S: Simd>(
    simd: S,
    here: (S::F, S::F),
    high: &S::Chunk,
    low: &S::Chunk,
    dt: &S::Chunk,
) -> S::F {
    let high = simd.sub(here.0, simd.load(high));
    let low = simd.sub(here.1, simd.load(low));
    let decay = exp_lanes(simd, simd.min(simd.splat(0.0), simd.add(high, low)));
    simd.mul(decay, simd.load(dt))
}

/// Packs one head's X and w ∘ X into panels.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one call")]
fn pack(
    input: &Ssd<'_>,
    head: usize,
    first: usize,
    len: usize,
    width: usize,
    npanels: usize,
    w: &[f32],
    x: &mut Vec<f32>,
    xw: &mut Vec<f32>,
) {
    let p = input.headdim;
    for buffer in [&mut *x, &mut *xw] {
        buffer.clear();
        buffer.resize(npanels * len * width, 0.0);
    }
    for (t, w) in w[..len].iter().enumerate() {
        let row = &input.x.row(first + t)[head * p..][..p];
        for (panel, from) in row.chunks(width).enumerate() {
            let at = (panel * len + t) * width;
            let (x, xw) = (&mut x[at..][..from.len()], &mut xw[at..][..from.len()]);
            for ((x, xw), from) in x.iter_mut().zip(xw).zip(from) {
                *x = *from;
                *xw = w * from;
            }
        }
    }
}

/// The outputs of a tile of tokens, at most six, in the columns of one panel.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "one call")]
fn output_tile<S: Simd>(
    simd: S,
    c: &[[f32; TILE]],
    state: &[f32],
    decay: &[f32],
    m: &[[f32; TILE]],
    x: &[f32],
    y: &mut [&mut [f32]],
    columns: &std::ops::Range<usize>,
) {
    let mut acc = add_product(simd, [[simd.splat(0.0); 2]; TILE], c, state);
    for (acc, decay) in acc.iter_mut().zip(decay) {
        let decay = simd.splat(*decay);
        *acc = [simd.mul(acc[0], decay), simd.mul(acc[1], decay)];
    }
    acc = add_product(simd, acc, m, x);
    for (acc, y) in acc.iter().zip(y) {
        let (whole, rest) = S::chunks_mut(&mut y[columns.clone()]);
        for (acc, to) in acc.iter().zip(&mut *whole) {
            simd.store(*acc, to);
        }
        if !rest.is_empty() {
            let mut tail = S::ZERO;
            simd.store(acc[whole.len()], &mut tail);
            S::write_tail(&tail, rest);
        }
    }
}

/// Moves six rows of Sᵀ, in one panel, past the chunk.
#[inline(always)]
fn state_tile<S: Simd>(simd: S, bt: &[[f32; TILE]], through: f32, xw: &[f32], state: &mut [f32]) {
    let through = simd.splat(through);
    let (state, _) = S::chunks_mut(state).0.as_chunks_mut::<2>();
    let mut acc = [[simd.splat(0.0); 2]; TILE];
    for (acc, state) in acc.iter_mut().zip(&*state) {
        *acc = [simd.mul(through, simd.load(&state[0])), simd.mul(through, simd.load(&state[1]))];
    }
    acc = add_product(simd, acc, bt, xw);
    for (acc, state) in acc.iter().zip(state) {
        simd.store(acc[0], &mut state[0]);
        simd.store(acc[1], &mut state[1]);
    }
}

/// The micro-kernel: `acc[i] += sum over k of left[k][i] * right[k]`, `right` in rows of two vectors.
#[inline(always)]
fn add_product<S: Simd>(
    simd: S,
    mut acc: [[S::F; 2]; TILE],
    left: &[[f32; TILE]],
    right: &[f32],
) -> [[S::F; 2]; TILE] {
    let (right, _) = S::chunks(right).0.as_chunks::<2>();
    for (left, right) in left.iter().zip(right) {
        let (r0, r1) = (simd.load(&right[0]), simd.load(&right[1]));
        for i in 0..TILE {
            let left = simd.splat(left[i]);
            acc[i][0] = simd.mul_add(left, r0, acc[i][0]);
            acc[i][1] = simd.mul_add(left, r1, acc[i][1]);
        }
    }
    acc
}
