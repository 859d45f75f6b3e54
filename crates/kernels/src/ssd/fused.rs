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
//! 1. `C Bᵀ` belongs to a group: its lower triangle is computed once for the heads that share it. So
//!    are the packed copies of C and Bᵀ.
//! 2. All products run in one micro-kernel of 6 rows by two vectors of columns. Its left operand is
//!    packed in tiles, six rows interleaved, the last tile filled up with zeros; its right operand
//!    lies in panels of two vectors.
//! 3. Sᵀ stays in panels from a run's first chunk to its last.
//! 4. M takes few exponentials: left of the tiles on its diagonal, the decay from s to t is that from
//!    s to the first token of t's tile times that from there to t. Both are at most 1.
//! 5. A skip weight that a head has for itself is added to M's diagonal: it costs nothing there.
//! 6. The sums `cum` are kept as pairs of f32, so that their differences stay exact where they matter.
//! 7. X is packed once a chunk, and becomes w ∘ X in place when Y has used it. Its rows, and those of
//!    Y, lie pages apart: they are prefetched while the chunk before is computed.
//! 8. Long runs go chunk block by chunk block, heads in parallel; short runs go token by token. What
//!    is shared in a block and one head's state fit the second-level cache together.
//!
//! Every run is computed by itself: its result depends on its own tokens and state alone. Of finite
//! inputs, that is: an infinity or NaN in x also reaches the up to five tokens before it in its tile,
//! where it is multiplied by zero.

use rayon::prelude::*;

use super::cumsum::{exponent_sums, timestep};
use super::step::steps;
use crate::linear::{Weights, linear_rows};
use crate::math::exp_lanes;
use crate::norm::{gate, gate_body};
use crate::rows::{Rows, column_blocks};
use crate::simd::{Level, Simd, dispatch};

/// Q: the chunk length of the fused path, a multiple of `TILE`. Short, because M's cost for a token
/// grows with Q, but long enough for Sᵀ to be read and written seldom.
const CHUNK: usize = 36;
/// Chunks whose shared products are kept at once.
const BLOCK_CHUNKS: usize = 5;
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
    /// `[H]`, none above 0: chunks rely on decays of at most 1
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
    /// Bounds of the steps after softplus, not below 0; `(0, infinity)` does nothing.
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
    pub(crate) fn gate<S: Simd>(&self, simd: S, t: usize, head: usize, y: &mut [f32]) {
        if let Some(z) = self.z {
            gate_body(simd, y, &z.row(t)[head * self.headdim..][..y.len()]);
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
                if let Some(z) = input.z {
                    gate(level, y, &z.row(t)[head * headdim..][..headdim]);
                }
            }
        }
        return;
    }

    let mut dt: Vec<f32> = Vec::with_capacity(input.dt.len() * nheads);
    (0..input.dt.len()).for_each(|t| dt.extend_from_slice(input.dt.row(t)));
    timestep(&mut dt, input.dt_bias, input.dt_softplus, input.dt_limit);

    let row = nheads * headdim;
    let mut short = Vec::new();
    let (mut first, mut rest) = (0, y);
    for (&len, state) in runs.iter().zip(states) {
        let (y, after) = rest.split_at_mut(len * row);
        if len >= LONG {
            // Enters the thread pool once, not anew for each parallel loop in there.
            rayon::scope(|_| by_chunks(level, input, &dt, first, state, y));
        } else if len > 0 {
            let heads = state.chunks_exact_mut(headdim * dstate);
            let columns = column_blocks(y, row, headdim);
            short.extend(heads.zip(columns).enumerate().map(|(head, task)| (head, first, task)));
        }
        (first, rest) = (first + len, after);
    }
    short.into_par_iter().for_each(|(head, first, (state, mut y))| {
        steps(level, input, &dt, head, first, state, &mut y);
    });
}

/// One head of a long run.
struct Head<'a> {
    /// S `[P, N]`
    state: &'a mut [f32],
    /// Sᵀ in panels `[P / W][N][W]`, N filled up to whole tiles
    panels: Aligned,
}

/// What the heads of a group share in a chunk of `len` tokens.
#[derive(Default)]
struct Shared {
    len: usize,
    /// B `[len, N]`
    b: Vec<f32>,
    /// C `[len, N]` in tiles `[len / 6][N][6]`
    c: Vec<[f32; TILE]>,
    /// Bᵀ `[N, len]` in tiles `[N / 6][len][6]`
    bt: Vec<[f32; TILE]>,
    /// C Bᵀ `[len, len]` in tiles `[len / 6][Q][6]`, zeros above the diagonal
    cb: Vec<[f32; TILE]>,
}

/// Computes one long run, whose tokens start at `first`.
fn by_chunks(
    level: Level,
    input: &Ssd<'_>,
    dt: &[f32],
    first: usize,
    state: &mut [f32],
    y: &mut [f32],
) {
    let Ssd { nheads, headdim, ngroups, dstate, .. } = *input;
    let mut heads: Vec<Head<'_>> = state
        .chunks_exact_mut(headdim * dstate)
        .map(|state| Head { state, panels: Aligned::default() })
        .collect();
    heads.par_iter_mut().for_each(|head| load_state(level, dstate, head));
    let mut shared: Vec<Shared> = Vec::new();
    let mut done = 0;
    for y in y.chunks_mut(BLOCK_CHUNKS * CHUNK * nheads * headdim) {
        let (first, len) = (first + done, y.len() / (nheads * headdim));
        done += len;
        shared.resize_with(len.div_ceil(CHUNK) * ngroups, Shared::default);
        shared.par_iter_mut().enumerate().for_each(|(i, shared)| {
            let (chunk, group) = (i / ngroups, i % ngroups);
            let tokens = CHUNK.min(len - chunk * CHUNK);
            share(level, input, first + chunk * CHUNK, tokens, group, shared);
        });
        let columns = column_blocks(y, nheads * headdim, headdim);
        heads.par_iter_mut().zip(columns).enumerate().for_each_init(
            Scratch::default,
            |scratch, (head, (state, mut y))| {
                let group = head / (nheads / ngroups);
                let shared: Vec<&Shared> = shared.iter().skip(group).step_by(ngroups).collect();
                let state = &mut state.panels;
                head_block(level, input, dt, head, first, &shared, state, &mut y, scratch);
            },
        );
    }
    heads.par_iter_mut().for_each(|head| store_state(level, dstate, head));
}

/// Fills `shared` for one group's chunk of `len` tokens from `first` on.
fn share(
    level: Level,
    input: &Ssd<'_>,
    first: usize,
    len: usize,
    group: usize,
    shared: &mut Shared,
) {
    let n = input.dstate;
    let (c_rows, b_rows) = (
        input.c.slice(first, len).columns(group * n, n),
        input.b.slice(first, len).columns(group * n, n),
    );
    shared.len = len;
    let Shared { b, c, bt, cb, .. } = shared;
    b.clear();
    zeros(c, len.div_ceil(TILE) * n);
    zeros(bt, n.div_ceil(TILE) * len);
    zeros(cb, len.div_ceil(TILE) * CHUNK);
    for t in 0..len {
        b.extend_from_slice(b_rows.row(t));
        for (tile, c) in c[t / TILE * n..][..n].iter_mut().zip(c_rows.row(t)) {
            tile[t % TILE] = *c;
        }
        for (i, b) in b_rows.row(t).chunks(TILE).enumerate() {
            bt[i * len + t][..b.len()].copy_from_slice(b);
        }
    }
    let mut products = [0.0; TILE * CHUNK];
    for (first, cb) in (0..len).step_by(TILE).zip(cb.chunks_exact_mut(CHUNK)) {
        let reach = len.min(first + TILE);
        let products = &mut products[..(reach - first) * reach];
        products.fill(0.0);
        let mut rows: Vec<&mut [f32]> = products.chunks_exact_mut(reach).collect();
        let c_rows = c_rows.slice(first, reach - first);
        linear_rows(level, c_rows, Weights::F32(&b[..reach * n]), &mut rows);
        for (i, row) in rows.iter().enumerate() {
            for (tile, product) in cb.iter_mut().zip(&row[..=first + i]) {
                tile[i] = *product;
            }
        }
    }
}

/// Makes `buffer` `len` tiles of zeros.
fn zeros(buffer: &mut Vec<[f32; TILE]>, len: usize) {
    buffer.clear();
    buffer.resize(len, [0.0; TILE]);
}

/// Floats that start on a cache line, so that no vector straddles two.
#[derive(Default)]
struct Aligned(Vec<f32>);

impl Aligned {
    /// The first `len` floats: what they were when last asked for the same length, zeros at first.
    fn get(&mut self, len: usize) -> &mut [f32] {
        const LINE: usize = 16;
        self.0.resize(len + LINE, 0.0);
        let start = self.0.as_ptr().align_offset(LINE * size_of::<f32>()).min(LINE);
        &mut self.0[start..][..len]
    }
}

/// Elements of Sᵀ in panels, for P = `p` and N = `n`.
#[inline(always)]
fn panels_len<S: Simd>(p: usize, n: usize) -> usize {
    p.next_multiple_of(2 * S::LANES) * n.next_multiple_of(TILE)
}

dispatch! { fn load_state = load_state_body(n: usize, head: &mut Head<'_>) }

/// Fills a head's panels from its state.
#[inline(always)]
fn load_state_body<S: Simd>(_simd: S, n: usize, head: &mut Head<'_>) {
    let (width, rows) = (2 * S::LANES, n.next_multiple_of(TILE));
    let panels = head.panels.get(panels_len::<S>(head.state.len() / n, n));
    for (i, row) in head.state.chunks_exact(n).enumerate() {
        let panel = &mut panels[i / width * rows * width..][..n * width];
        for (to, from) in panel.chunks_exact_mut(width).zip(row) {
            to[i % width] = *from;
        }
    }
}

dispatch! { fn store_state = store_state_body(n: usize, head: &mut Head<'_>) }

/// Fills a head's state from its panels.
#[inline(always)]
fn store_state_body<S: Simd>(_simd: S, n: usize, head: &mut Head<'_>) {
    let (width, rows) = (2 * S::LANES, n.next_multiple_of(TILE));
    let panels = head.panels.get(panels_len::<S>(head.state.len() / n, n));
    for (i, row) in head.state.chunks_exact_mut(n).enumerate() {
        let panel = &panels[i / width * rows * width..][..n * width];
        for (from, to) in panel.chunks_exact(width).zip(row) {
            *to = from[i % width];
        }
    }
}

/// Buffers of one worker, kept from head to head.
#[derive(Default)]
struct Scratch {
    /// M in tiles `[len / 6][Q][6]`
    m: Vec<[f32; TILE]>,
    /// X in panels `[P / W][len][W]`, each made w ∘ X in place when Y has been computed from it
    x: Aligned,
    /// `dt`, the pairs of `cum`, `exp(cum)`, `w`: each `[Q]`
    dt: Vec<f32>,
    cum_high: Vec<f32>,
    cum_low: Vec<f32>,
    decay: Vec<f32>,
    w: Vec<f32>,
    /// `exp(cum[first] - cum[s]) dt[s]` of the tokens s before a tile: `[Q]`
    to_first: Vec<f32>,
    /// `exp(cum[t] - cum[s])` in the tiles on the diagonal: `[len / 6][6][6]`
    within: Vec<f32>,
}

dispatch! {
    fn head_block = head_block_body(
        input: &Ssd<'_>,
        dt: &[f32],
        head: usize,
        first: usize,
        shared: &[&Shared],
        state: &mut Aligned,
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
    state: &mut Aligned,
    y: &mut [&mut [f32]],
    scratch: &mut Scratch,
) {
    let (p, n) = (input.headdim, input.dstate);
    let width = 2 * S::LANES;
    let npanels = p.div_ceil(width);
    let rows = n.next_multiple_of(TILE);
    let state = state.get(panels_len::<S>(p, n));
    let skip_by_channel = input.d.is_some_and(|d| d.len() != input.nheads);
    let skip = input.d.filter(|d| d.len() == input.nheads).map_or(0.0, |d| d[head]);
    let mut done = 0;
    for shared in shared {
        let len = shared.len;
        let from = first + done;
        let (y, next_y) = y[done..].split_at_mut(len);
        let next_len = next_y.len().min(CHUNK);
        done += len;
        sums(simd, input, dt, head, from, len, scratch);
        masked(simd, shared, skip, scratch);
        let Scratch { m, x, decay, w, .. } = &mut *scratch;
        let x = x.get(npanels * len * width);
        pack::<S>(input, head, from, len, x);
        let through = decay[len - 1];

        for panel in 0..npanels {
            let state = &mut state[panel * rows * width..][..rows * width];
            let x = &mut x[panel * len * width..][..len * width];
            let columns = panel * width..p.min((panel + 1) * width);
            for t in (0..len).step_by(TILE) {
                let c = &shared.c[t / TILE * n..][..n];
                let reach = len.min(t + TILE);
                let m = &m[t / TILE * CHUNK..][..reach];
                let y = &mut y[t..reach];
                output_tile(simd, c, state, &decay[t..][..TILE], m, x, y, &columns);
            }
            scale_rows(simd, w, x);
            let tiles = shared.bt.chunks_exact(len).zip(state.chunks_exact_mut(TILE * width));
            for (i, (bt, state)) in tiles.enumerate() {
                // One row of the next chunk with each tile, so that they do not wait in line.
                let t = panel * rows / TILE + i;
                if t < next_len {
                    simd.prefetch_slice(&input.x.row(from + len + t)[head * p..][..p]);
                    simd.prefetch_slice(&*next_y[t]);
                }
                state_tile(simd, bt, through, x, state);
            }
        }
        for (i, y) in y.iter_mut().enumerate() {
            if skip_by_channel {
                input.skip(from + i, head, y);
            }
            input.gate(simd, from + i, head, y);
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
    let padded = len.next_multiple_of(TILE).next_multiple_of(S::LANES);
    let Scratch { dt: steps, cum_high, cum_low, decay, w, .. } = scratch;
    for buffer in [&mut *steps, &mut *cum_high, &mut *cum_low, &mut *decay, &mut *w] {
        buffer.clear();
        buffer.resize(padded, 0.0);
    }
    for t in 0..len {
        steps[t] = dt[(first + t) * input.nheads + head];
    }
    exponent_sums(&steps[..len], input.a[head], cum_high, cum_low);
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

/// Fills M plus `skip` on its diagonal; above the diagonal its tiles stay zero.
#[inline(always)]
fn masked<S: Simd>(simd: S, shared: &Shared, skip: f32, scratch: &mut Scratch) {
    let len = shared.len;
    let Scratch { m, dt, cum_high, cum_low, to_first, within, .. } = scratch;
    m.resize(CHUNK.div_ceil(TILE) * CHUNK, [0.0; TILE]);
    to_first.resize(CHUNK.next_multiple_of(S::LANES), 0.0);
    decays_within(simd, len, cum_high, cum_low, within);
    let (steps, high, low) = (S::chunks(dt).0, S::chunks(cum_high).0, S::chunks(cum_low).0);
    for first in (0..len).step_by(TILE) {
        let at = first / TILE * CHUNK;
        let (m, m_diagonal) = m[at..][..first + TILE].split_at_mut(first);
        let (cb, cb_diagonal) = shared.cb[at..][..first + TILE].split_at(first);
        let within = &within[first / TILE * TILE * TILE..][..TILE * TILE];

        let here = (simd.splat(cum_high[first]), simd.splat(cum_low[first]));
        let weights = S::chunks_mut(to_first).0;
        for i in 0..first.div_ceil(S::LANES) {
            let weight = pair_weight(simd, here, &high[i], &low[i], &steps[i]);
            simd.store(weight, &mut weights[i]);
        }
        let mut from_first = [0.0; TILE];
        for i in 0..TILE {
            from_first[i] = within[i * TILE];
        }
        for ((m, cb), weight) in m.iter_mut().zip(cb).zip(&*to_first) {
            for i in 0..TILE {
                m[i] = cb[i] * (weight * from_first[i]);
            }
        }
        for (s, dt) in dt[first..len.min(first + TILE)].iter().enumerate() {
            for i in s..TILE {
                m_diagonal[s][i] = cb_diagonal[s][i] * (within[i * TILE + s] * dt);
            }
            m_diagonal[s][s] += skip;
        }
    }
}

/// Fills `within` with `exp(cum[t] - cum[s])` for the t and s of each tile on the diagonal; above it
/// with any finite numbers.
#[inline(always)]
fn decays_within<S: Simd>(simd: S, len: usize, high: &[f32], low: &[f32], within: &mut Vec<f32>) {
    let filled = len.div_ceil(TILE) * TILE * TILE;
    within.resize(filled.next_multiple_of(S::LANES), 0.0);
    for (tile, first) in within.chunks_exact_mut(TILE * TILE).zip((0..len).step_by(TILE)) {
        let (high, low) = (&high[first..][..TILE], &low[first..][..TILE]);
        for t in 0..TILE {
            for s in 0..TILE {
                tile[t * TILE + s] = (high[t] - high[s]) + (low[t] - low[s]);
            }
        }
    }
    for decay in S::chunks_mut(within).0 {
        let exponent = simd.min(simd.splat(0.0), simd.load(decay));
        simd.store(exp_lanes(simd, exponent), decay);
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

/// Packs one head's X into panels, their last columns filled up with zeros.
#[inline(always)]
fn pack<S: Simd>(input: &Ssd<'_>, head: usize, first: usize, len: usize, x: &mut [f32]) {
    let p = input.headdim;
    let x = S::chunks_mut(x).0.as_chunks_mut::<2>().0;
    for t in 0..len {
        let (row, rest) = S::chunks(&input.x.row(first + t)[head * p..][..p]);
        let (pairs, single) = row.as_chunks::<2>();
        for (panel, pair) in pairs.iter().enumerate() {
            x[panel * len + t] = *pair;
        }
        if !single.is_empty() || !rest.is_empty() {
            let rest = S::tail(rest);
            let last = if let [single] = single { [*single, rest] } else { [rest, S::ZERO] };
            x[pairs.len() * len + t] = last;
        }
    }
}

/// Multiplies each row of a panel by its weight.
#[inline(always)]
fn scale_rows<S: Simd>(simd: S, w: &[f32], x: &mut [f32]) {
    for (x, w) in S::chunks_mut(x).0.as_chunks_mut::<2>().0.iter_mut().zip(w) {
        let w = simd.splat(*w);
        let scaled = [simd.mul(w, simd.load(&x[0])), simd.mul(w, simd.load(&x[1]))];
        simd.store(scaled[0], &mut x[0]);
        simd.store(scaled[1], &mut x[1]);
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
    for i in 0..TILE {
        let decay = simd.splat(decay[i]);
        acc[i] = [simd.mul(acc[i][0], decay), simd.mul(acc[i][1], decay)];
    }
    acc = add_product(simd, acc, m, x);
    for i in 0..TILE {
        let Some(y) = y.get_mut(i) else { break };
        let acc = acc[i];
        match S::chunks_mut(&mut y[columns.clone()]) {
            ([y0, y1], _) => {
                simd.store(acc[0], y0);
                simd.store(acc[1], y1);
            }
            (whole, rest) => {
                let mut last = S::ZERO;
                if let [y0] = whole {
                    simd.store(acc[0], y0);
                    simd.store(acc[1], &mut last);
                } else {
                    simd.store(acc[0], &mut last);
                }
                S::write_tail(&last, rest);
            }
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
