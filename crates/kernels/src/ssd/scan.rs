//! The whole operation: the recurrence as it is defined, token by token, with the state in registers.
//!
//! An element of the state costs three instructions a token: the decay, the input, the output. The
//! equal products of matrices (section 6 of the paper) save a quarter of them. But their rounding
//! depends on the cut of a sequence into chunks. Here a token's bits depend only on the tokens before
//! it: not on its call, nor on the number of tokens in it. (If `dt x` is infinite, one call may give
//! the bits of an infinity and another those of NaN.)
//!
//! What makes it fast:
//!
//! 1. Memory: a block of tokens passes while up to 8 vectors of a row of the state stay in registers,
//!    with what decays and comes in and goes out for the block in the first-level cache. Registers hold
//!    no more than the state, one decay, one x and one sum, so that 16 of them do.
//! 2. The sum over N that makes y goes on from one piece of the row to the next, vector after vector:
//!    its order is that of a single token. Only then are lanes added, four rows together.
//! 3. Too few tokens for a block go one by one, each in one pass over the state, which is all the
//!    memory traffic that there is.
//! 4. Heads go in parallel through a piece of the runs whose rows stay in a shared cache; rows lie
//!    pages apart, so those of the next block are prefetched.
//!
//! An infinity or NaN reaches its own token and later ones, never earlier ones.

use super::cumsum::timestep;
use crate::activation::{Activation, gate, gate_row_body};
use crate::aligned::Aligned;
use crate::math::exp;
use crate::parallel;
use crate::rows::{Rows, column_blocks};
use crate::simd::{Level, Simd, dispatch};

/// Most tokens of a block.
const BLOCK: usize = 32;
/// Fewer tokens than this go one by one.
const FEW: usize = 4;
/// Tokens of a run that all heads pass before the next of the run come.
const PIECE: usize = 128;
/// Rows whose sums are added up together.
const ROWS: usize = 4;
/// Picoseconds of an element of the state, for each token.
const COST: usize = 150;

/// Inputs of [`ssd`] for the tokens of all runs, one after another.
#[derive(Debug, Clone, Copy)]
pub struct Ssd<'a> {
    /// The instruction set.
    pub level: Level,
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
    /// `[H]`, none above 0: gradients rely on decays of at most 1
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

    /// One head's x `[P]` of token `t`.
    #[inline(always)]
    fn x(&self, t: usize, head: usize) -> &[f32] {
        &self.x.row(t)[head * self.headdim..][..self.headdim]
    }

    /// The group of a head.
    #[inline(always)]
    pub(super) fn group(&self, head: usize) -> usize {
        head / (self.nheads / self.ngroups)
    }

    /// What a group has in row `t` of b or c: `[N]`.
    #[inline(always)]
    fn of_group<'a>(&self, rows: Rows<'a>, t: usize, group: usize) -> &'a [f32] {
        &rows.row(t)[group * self.dstate..][..self.dstate]
    }

    /// Adds the skip to one head's output `[P]` of token `t`.
    #[inline(always)]
    pub(crate) fn skip(&self, t: usize, head: usize, y: &mut [f32]) {
        let Some(d) = self.d else { return };
        let x = self.x(t, head);
        if d.len() == self.nheads {
            y.iter_mut().zip(x).for_each(|(y, x)| *y += d[head] * x);
        } else {
            let d = &d[head * self.headdim..][..y.len()];
            y.iter_mut().zip(x).zip(d).for_each(|((y, x), d)| *y += d * x);
        }
    }

    /// Gates one head's output `[P]` of token `t`.
    #[inline(always)]
    pub(crate) fn gate<S: Simd>(&self, simd: S, t: usize, head: usize, y: &mut [f32]) {
        if let Some(z) = self.z {
            let z = &z.row(t)[head * self.headdim..][..y.len()];
            gate_row_body(simd, Activation::Silu, y, z);
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
/// A run that is cut anywhere into several calls gives the same bits, whatever other runs are in them.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn ssd(input: &Ssd<'_>, runs: &[usize], states: &mut [&mut [f32]], y: &mut [f32]) {
    let level = input.level;
    input.check(runs);
    let Ssd { nheads, headdim, ngroups, dstate, .. } = *input;
    assert_eq!(states.len(), runs.len(), "states");
    assert!(states.iter().all(|s| s.len() == nheads * headdim * dstate), "states");
    assert_eq!(y.len(), input.x.len() * nheads * headdim, "y");
    // No state: y is the skip, gated.
    if y.is_empty() || dstate == 0 {
        for (t, y) in y.chunks_exact_mut((nheads * headdim).max(1)).enumerate() {
            y.fill(0.0);
            for (head, y) in y.chunks_exact_mut(headdim).enumerate() {
                input.skip(t, head, y);
                if let Some(z) = input.z {
                    gate(level, Activation::Silu, y, &z.row(t)[head * headdim..][..headdim]);
                }
            }
        }
        return;
    }

    // Rows of a head's state are tasks of their own where heads are fewer than threads: as if each part were a head.
    let cut = |parts: usize| headdim.is_multiple_of(parts * ROWS);
    let parts = parallel::parts(runs.len() * nheads, cut);
    let (heads, rows) = (nheads * parts, headdim / parts);
    let d: Option<Vec<f32>> = input.d.filter(|d| parts > 1 && d.len() == nheads).map(|d| {
        let of_head = |&d| std::iter::repeat_n(d, headdim);
        d.iter().flat_map(of_head).collect()
    });
    let input = &Ssd { nheads: heads, headdim: rows, d: d.as_deref().or(input.d), ..*input };
    let call = Call::new(input, parts);
    let row = nheads * headdim;
    // Each run with tokens, its state and its rows of y.
    let mut left = Vec::with_capacity(runs.len());
    let (mut first, mut rest) = (0, y);
    for (&len, state) in runs.iter().zip(states) {
        let (y, after) = rest.split_at_mut(len * row);
        if len > 0 {
            left.push(Run { first, state, y });
        }
        (first, rest) = (first + len, after);
    }
    // Piece after piece: 128 tokens of every run that has some left, so that their rows stay cached.
    while !left.is_empty() {
        let pieces: Vec<Piece<'_>> = left.iter_mut().map(|run| run.next(row)).collect();
        // Not worth its while for single tokens.
        let groups: Vec<Group> = if pieces.iter().all(|piece| piece.len < FEW) {
            Vec::new()
        } else {
            let mut groups = Vec::new();
            groups.resize_with(pieces.len() * ngroups, Group::default);
            let tasks = groups.iter_mut().enumerate().collect();
            let of_group = 2 * dstate * pieces.iter().map(|piece| piece.len).sum::<usize>();
            parallel::for_each(
                tasks,
                of_group * ngroups,
                || (),
                |(), (i, group)| {
                    *group = Group::new(level, input, i % ngroups, &pieces[i / ngroups]);
                },
            );
            groups
        };
        // A task is one head of one piece: its state `[P, N]` and its columns of y, `[len][P]`.
        let mut tasks = Vec::new();
        for (i, piece) in pieces.into_iter().enumerate() {
            let heads = piece.state.chunks_exact_mut(rows * dstate);
            let columns = column_blocks(piece.y, row, rows);
            for (head, (state, y)) in heads.zip(columns).enumerate() {
                let group = groups.get(i * ngroups + input.group(head));
                tasks.push(Task { head, group, first: piece.first, state, y });
            }
        }
        let scan = |block: &mut Block, task| scan(&call, task, block);
        let tokens: usize = tasks.iter().map(|task: &Task<'_>| task.y.len()).sum();
        parallel::for_each(tasks, tokens * rows * dstate * COST / 1000, Block::default, scan);
        left.retain(|run| !run.y.is_empty());
    }
}

/// What is the same for all tasks.
struct Call<'a> {
    input: &'a Ssd<'a>,
    /// Steps `[T, H]`, after their limits.
    dt: Vec<f32>,
    /// `exp(dt a)`, `[T, H]`
    decay: Vec<f32>,
    /// Heads of the input that are one in the two above.
    parts: usize,
}

impl<'a> Call<'a> {
    fn new(input: &'a Ssd<'a>, parts: usize) -> Self {
        // Steps `[T, H]` are dense from here on; the caller's may be columns of a wider matrix.
        let mut dt: Vec<f32> = Vec::with_capacity(input.dt.len() * input.a.len());
        (0..input.dt.len()).for_each(|t| dt.extend_from_slice(input.dt.row(t)));
        timestep(input.level, &mut dt, input.dt_bias, input.dt_softplus, input.dt_limit);
        // exp(dt a) of every token and head: one pass of vectors, outside of the inner loop.
        let rows = dt.chunks_exact(input.a.len());
        let mut decay: Vec<f32> =
            rows.flat_map(|row| row.iter().zip(input.a).map(|(dt, a)| dt * a)).collect();
        exp(input.level, &mut decay);
        Self { input, dt, decay, parts }
    }

    /// Step and decay of a token for a head.
    #[inline(always)]
    fn step(&self, t: usize, head: usize) -> (f32, f32) {
        let at = t * self.input.a.len() + head / self.parts;
        (self.dt[at], self.decay[at])
    }
}

/// What is left of a run.
struct Run<'a> {
    /// Its next token.
    first: usize,
    /// `[H, P, N]`
    state: &'a mut [f32],
    /// `[L, H, P]` of the tokens to come.
    y: &'a mut [f32],
}

impl Run<'_> {
    /// Takes its next tokens; a token is `row` elements of y.
    fn next(&mut self, row: usize) -> Piece<'_> {
        let (first, len) = (self.first, PIECE.min(self.y.len() / row));
        // y is cut off the front, so that pieces of later rounds cannot overlap.
        let (y, after) = std::mem::take(&mut self.y).split_at_mut(len * row);
        (self.first, self.y) = (first + len, after);
        Piece { first, len, state: self.state, y }
    }
}

/// Tokens of a run that all heads pass before its next tokens come.
struct Piece<'a> {
    first: usize,
    len: usize,
    /// `[H, P, N]`
    state: &'a mut [f32],
    /// `[len, H, P]`
    y: &'a mut [f32],
}

/// One head's way through a piece.
struct Task<'a> {
    head: usize,
    /// b and c of its group, laid out, unless all tokens go one by one.
    group: Option<&'a Group>,
    /// The piece's first token.
    first: usize,
    /// `[P, N]`
    state: &'a mut [f32],
    /// The head's columns of y: `[len][P]`
    y: Vec<&'a mut [f32]>,
}

/// Takes one head through the tokens of a piece.
fn scan(call: &Call<'_>, task: Task<'_>, block: &mut Block) {
    let Task { head, group, first, state, mut y } = task;
    let level = call.input.level;
    let (mut first, mut done, mut rest) = (first, 0, &mut y[..]);
    while !rest.is_empty() {
        let (y, after) = rest.split_at_mut(rest.len().min(BLOCK));
        let len = y.len();
        // A block of up to 32 tokens: x, decays and sums of one head, b and c of its group.
        if let Some(group) = group.filter(|_| len >= FEW) {
            prefetch(level, call.input, head, first + len, after);
            block.load(call, head, first, len);
            pass(level, block, &group.blocks[done / BLOCK], state);
            finish(level, call.input, head, first, block, y);
        } else {
            // Too few for a block: the whole state passes once for each token.
            for (i, y) in y.iter_mut().enumerate() {
                token(level, call, head, first + i, state, y);
            }
        }
        (first, done, rest) = (first + len, done + len, after);
    }
}

dispatch! {
    /// Takes one head through one token.
    fn token = token_body(call: &Call<'_>, head: usize, t: usize, state: &mut [f32], y: &mut [f32])
}

#[inline(always)]
fn token_body<S: Simd>(
    simd: S,
    call: &Call<'_>,
    head: usize,
    t: usize,
    state: &mut [f32],
    y: &mut [f32],
) {
    let input = call.input;
    let group = input.group(head);
    // b and c `[N]` as whole vectors and a tail filled up with zeros.
    let (b, b_rest) = S::chunks(input.of_group(input.b, t, group));
    let (c, c_rest) = S::chunks(input.of_group(input.c, t, group));
    let (b_tail, c_tail) = (simd.load(&S::tail(b_rest)), simd.load(&S::tail(c_rest)));
    let (dt, decay) = call.step(t, head);
    let decay = simd.splat(decay);
    // Each row p of the state `[N]` decays, gets dt x[p] b, and gives y[p] = row·c.
    let rows = state.chunks_exact_mut(input.dstate);
    for ((y, x), row) in y.iter_mut().zip(input.x(t, head)).zip(rows) {
        let x = simd.splat(dt * x);
        let mut sum = simd.splat(0.0);
        let (row, row_rest) = S::chunks_mut(row);
        for ((s, b), c) in row.iter_mut().zip(b).zip(c) {
            let new = simd.mul_add(x, simd.load(b), simd.mul(decay, simd.load(s)));
            simd.store(new, s);
            sum = simd.mul_add(new, simd.load(c), sum);
        }
        // The tail's zeros stay zeros and add nothing.
        if !row_rest.is_empty() {
            let mut tail = S::tail(row_rest);
            let new = simd.mul_add(x, b_tail, simd.mul(decay, simd.load(&tail)));
            simd.store(new, &mut tail);
            S::write_tail(&tail, row_rest);
            sum = simd.mul_add(new, c_tail, sum);
        }
        *y = simd.reduce(sum);
    }
    input.skip(t, head, y);
    input.gate(simd, t, head, y);
}

/// b and c of one group for the tokens of a piece, laid out for the inner loop; heads share it.
#[derive(Default)]
struct Group {
    blocks: Vec<[Aligned; 2]>,
}

impl Group {
    /// That of a piece which has blocks.
    fn new(level: Level, input: &Ssd<'_>, group: usize, piece: &Piece<'_>) -> Self {
        let firsts = (0..piece.len).step_by(BLOCK);
        let blocks = firsts.map(|first| (piece.first + first, BLOCK.min(piece.len - first)));
        let blocks = blocks.filter(|(_, len)| *len >= FEW);
        let lay_out = |rows, (first, len)| lay_out(level, input, rows, group, first, len);
        let blocks = blocks.map(|block| [lay_out(input.b, block), lay_out(input.c, block)]);
        Self { blocks: blocks.collect() }
    }
}

dispatch! {
    /// Lays out what a group has in `len` rows of b or c: vector by vector of a row, filled up with zeros, in pieces as
    /// wide as [`width`] says, each `[len, piece]`.
    fn lay_out = lay_out_body(
        input: &Ssd<'_>, rows: Rows<'_>, group: usize, first: usize, len: usize,
    ) -> Aligned
}

#[inline(always)]
fn lay_out_body<S: Simd>(
    _simd: S,
    input: &Ssd<'_>,
    rows: Rows<'_>,
    group: usize,
    first: usize,
    len: usize,
) -> Aligned {
    // Vectors of a row; the last may be partly zeros.
    let vectors = input.dstate.div_ceil(S::LANES);
    let mut out = Aligned::default();
    let to = S::chunks_mut(out.get_mut(vectors * len * S::LANES)).0;
    for i in 0..len {
        // Token i of each piece: its vectors go to `[piece][i]`, where the inner loop reads in order.
        let (whole, rest) = S::chunks(input.of_group(rows, first + i, group));
        let mut v = 0;
        while v < vectors {
            let width = width(vectors - v);
            for (to, v) in to[v * len + i * width..][..width].iter_mut().zip(v..) {
                *to = if let Some(whole) = whole.get(v) { *whole } else { S::tail(rest) };
            }
            v += width;
        }
    }
    out
}

/// What one head has for itself in a block of L tokens; kept from block to block for its memory.
#[derive(Default)]
struct Block {
    /// `[L]`
    decay: Vec<f32>,
    /// `dt x`, `[L, P]`
    x: Vec<f32>,
    /// Sums so far, lanes apart, for each row and token: `[P, L]` of vectors, P filled up to whole `ROWS`.
    sums: Aligned,
    /// y before skip and gate, `[L, P]`, P filled up like that.
    y: Vec<f32>,
}

impl Block {
    /// Takes what a head has in the `len` tokens from `first` on.
    fn load(&mut self, call: &Call<'_>, head: usize, first: usize, len: usize) {
        self.decay.clear();
        self.x.clear();
        for t in first..first + len {
            let (dt, decay) = call.step(t, head);
            self.decay.push(decay);
            self.x.extend(call.input.x(t, head).iter().map(|x| dt * x));
        }
    }
}

/// Vectors of a row of the state that go through registers together, of `left` that have not: a power of 2.
fn width(left: usize) -> usize {
    1 << left.min(8).ilog2()
}

dispatch! {
    /// Asks for what the next block reads first and writes last.
    fn prefetch = prefetch_body(input: &Ssd<'_>, head: usize, first: usize, y: &[&mut [f32]])
}

#[inline(always)]
fn prefetch_body<S: Simd>(simd: S, input: &Ssd<'_>, head: usize, first: usize, y: &[&mut [f32]]) {
    for (i, y) in y.iter().take(BLOCK).enumerate() {
        // Rows are H P floats apart, beyond what the processor prefetches by itself.
        simd.prefetch_slice(input.x(first + i, head));
        simd.prefetch_slice(y);
    }
}

dispatch! {
    /// Takes a head's state `[P, N]` through a block.
    fn pass = pass_body(block: &mut Block, bc: &[Aligned; 2], state: &mut [f32])
}

#[inline(always)]
fn pass_body<S: Simd>(simd: S, block: &mut Block, bc: &[Aligned; 2], state: &mut [f32]) {
    let headdim = block.x.len() / block.decay.len();
    // Pieces of 8, 4, 2 and 1 vectors, widest first: N = 128 is one piece of 8 with AVX-512, two with AVX2.
    let vectors = (state.len() / headdim).div_ceil(S::LANES);
    let mut v = 0;
    while v < vectors {
        let width = width(vectors - v);
        match width {
            1 => pass_columns::<S, 1>(simd, block, bc, v, state),
            2 => pass_columns::<S, 2>(simd, block, bc, v, state),
            4 => pass_columns::<S, 4>(simd, block, bc, v, state),
            _ => pass_columns::<S, 8>(simd, block, bc, v, state),
        }
        v += width;
    }
}

/// Takes `W` vectors of each row, from vector `first` on, through a block; with the last of them come the sums.
#[inline(always)]
fn pass_columns<S: Simd, const W: usize>(
    simd: S,
    block: &mut Block,
    bc: &[Aligned; 2],
    first: usize,
    state: &mut [f32],
) {
    let Block { decay, x, sums, y } = block;
    let len = decay.len();
    let headdim = x.len() / len;
    let n = state.len() / headdim;
    let vectors = n.div_ceil(S::LANES);
    // b and c of this piece of the row: `[len, W]` vectors each. Sums are `[P, len]` vectors.
    let rows = headdim.next_multiple_of(ROWS);
    let [b, c] = bc;
    let size = vectors * len * S::LANES;
    let b = &S::chunks(b.get(size)).0[first * len..].as_chunks::<W>().0[..len];
    let c = &S::chunks(c.get(size)).0[first * len..].as_chunks::<W>().0[..len];
    let sums = S::chunks_mut(sums.get_mut(rows * len * S::LANES)).0;
    y.resize(len * rows, 0.0);
    // Four rows of the state at a time, because their lanes are added together in the end.
    let fours = state.chunks_mut(ROWS * n).zip(sums.chunks_exact_mut(ROWS * len));
    for (at, (state, sums)) in (0..).step_by(ROWS).zip(fours) {
        for (p, (row, sums)) in
            (at..).zip(state.chunks_exact_mut(n).zip(sums.chunks_exact_mut(len)))
        {
            // W vectors of the row stay in registers for the whole block.
            let mut s = load_row::<S, W>(simd, row, first);
            let xs = x.chunks_exact(headdim);
            for ((((decay, x), b), c), sum) in decay.iter().zip(xs).zip(b).zip(c).zip(sums) {
                let (decay, x) = (simd.splat(*decay), simd.splat(x[p]));
                let mut total = if first == 0 { simd.splat(0.0) } else { simd.load(sum) };
                // s = decay s + (dt x) b; the token's sum += s c. The order of both is that of a single token.
                for i in 0..W {
                    s[i] = simd.mul_add(x, simd.load(&b[i]), simd.mul(decay, s[i]));
                    total = simd.mul_add(s[i], simd.load(&c[i]), total);
                }
                simd.store(total, sum);
            }
            store_row::<S, W>(simd, &s, row, first);
        }
        // The last piece of the row: the sums are complete, so their lanes are added, four rows at once.
        if first + W == vectors {
            for (t, y) in y.chunks_exact_mut(rows).enumerate() {
                let mut four = [simd.splat(0.0); ROWS];
                for r in 0..ROWS {
                    four[r] = simd.load(&sums[r * len + t]);
                }
                y[at..][..ROWS].copy_from_slice(&simd.reduce4(four));
            }
        }
    }
}

/// Vectors `first..first + W` of a row, the last filled up with zeros.
#[inline(always)]
fn load_row<S: Simd, const W: usize>(simd: S, row: &[f32], first: usize) -> [S::F; W] {
    let (whole, rest) = S::chunks(row);
    let mut s = [simd.splat(0.0); W];
    if let Some(whole) = whole.get(first..first + W) {
        for i in 0..W {
            s[i] = simd.load(&whole[i]);
        }
    } else {
        for i in 0..W - 1 {
            s[i] = simd.load(&whole[first + i]);
        }
        s[W - 1] = simd.load(&S::tail(rest));
    }
    s
}

/// Puts back what [`load_row`] took.
#[inline(always)]
fn store_row<S: Simd, const W: usize>(simd: S, s: &[S::F; W], row: &mut [f32], first: usize) {
    let (whole, rest) = S::chunks_mut(row);
    if let Some(whole) = whole.get_mut(first..first + W) {
        for i in 0..W {
            simd.store(s[i], &mut whole[i]);
        }
    } else {
        for i in 0..W - 1 {
            simd.store(s[i], &mut whole[first + i]);
        }
        let mut tail = S::ZERO;
        simd.store(s[W - 1], &mut tail);
        S::write_tail(&tail, rest);
    }
}

dispatch! {
    /// Makes the outputs of a block, from `first` on, of its sums.
    fn finish = finish_body(
        input: &Ssd<'_>, head: usize, first: usize, block: &Block, y: &mut [&mut [f32]],
    )
}

#[inline(always)]
fn finish_body<S: Simd>(
    simd: S,
    input: &Ssd<'_>,
    head: usize,
    first: usize,
    block: &Block,
    y: &mut [&mut [f32]],
) {
    let rows = block.y.len() / y.len();
    for (i, (y, sums)) in y.iter_mut().zip(block.y.chunks_exact(rows)).enumerate() {
        // Skip and gate come last, in the order of a single token.
        y.copy_from_slice(&sums[..y.len()]);
        input.skip(first + i, head, y);
        input.gate(simd, first + i, head, y);
    }
}
