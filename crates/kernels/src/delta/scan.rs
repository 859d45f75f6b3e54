//! The whole operation: the recurrence as it is defined, token by token, a block of columns at a time.
//!
//! Columns of the state do not see each other: u and o of a column come of that column alone, and of k
//! and q, which all share. A sum over the rows goes from the first to the last, whatever else is
//! computed beside it. So a token's bits depend only on the tokens before it: not on its call, its
//! company, or the number of tokens in it.
//!
//! What makes it fast:
//!
//! 1. One pass over the state a token. While a row is in registers it decays, takes what is written,
//!    gives its part of what the query reads, and of what the next token's key will read.
//! 2. A block of up to 8 vectors of columns goes through all tokens of a run before the next block does.
//!    It is copied to adjacent memory for that, and stays in the cache.
//! 3. Few tokens go through the state where it lies: then each pass is from memory.
//! 4. Heads go in parallel. Rows of tokens lie pages apart, so those of the next tokens are prefetched.

use super::Delta;
use crate::aligned::{Aligned, LINE};
use crate::math::exp;
use crate::parallel;
use crate::rows::column_blocks;
use crate::simd::{Simd, dispatch};

/// A part of a head's columns is a multiple of so many.
const PART: usize = 16;
/// Fewer tokens than this go through the state where it lies.
const FEW: usize = 4;
/// Picoseconds of an element of the state, for each token; and of an exponential.
const COST: usize = 300;
const EXP: usize = 1000;
/// How many tokens ahead rows are prefetched.
const AHEAD: usize = 2;
/// How many rows of a state ahead the first read of it prefetches.
const STREAM: usize = 8;

/// Runs each sequence's tokens through the gated delta rule and moves its state on.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `input` | see [`Delta`] | tokens of all runs, one after another |
/// | `runs` | lengths, sum T | tokens of each sequence; may be 0 |
/// | `states` | a `[Hv, Dk, Dv]` for each run | state before its first token, updated to after its last |
/// | `out` | `[T, Hv, Dv]` | overwritten |
///
/// A run that is cut anywhere into several calls gives the same bits, whatever other runs are in them.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn delta_rule(input: &Delta<'_>, runs: &[usize], states: &mut [&mut [f32]], out: &mut [f32]) {
    input.check(runs);
    let Delta { value_heads, key_dim, value_dim, .. } = *input;
    assert_eq!(states.len(), runs.len(), "states");
    assert!(states.iter().all(|s| s.len() == value_heads * input.state_len()), "states");
    assert_eq!(out.len(), input.v.len() * value_heads * value_dim, "out");
    if out.is_empty() || key_dim == 0 {
        return out.fill(0.0);
    }
    let call = Call::new(input);
    let row = value_heads * value_dim;
    // Columns of a head are tasks of their own where heads are fewer than threads.
    let parts = parallel::parts(runs.len() * value_heads, |n| value_dim.is_multiple_of(n * PART));
    let columns = value_dim / parts;
    let mut tasks = Vec::with_capacity(runs.len() * value_heads * parts);
    let (mut first, mut rest) = (0, out);
    for (&len, state) in runs.iter().zip(states) {
        let (out, after) = rest.split_at_mut(len * row);
        let heads = state.chunks_exact_mut(input.state_len());
        let states = heads.flat_map(|state| match parts {
            1 => vec![State::Whole(state, value_dim)],
            _ => column_blocks(state, value_dim, columns).into_iter().map(State::Rows).collect(),
        });
        let states = states.zip(column_blocks(out, row, columns)).enumerate();
        tasks.extend(states.filter(|_| len > 0).map(|(i, (state, out))| {
            let (head, column) = (i / parts, i % parts * columns);
            Task { head, first, column, state, out }
        }));
        (first, rest) = (first + len, after);
    }
    let run = |block: &mut Aligned, task: Task<'_>| scan(input.level, &call, task, block);
    let ns = call.input.v.len() * value_heads * input.state_len() * COST / 1000;
    parallel::for_each(tasks, ns, Aligned::default, run);
}

/// What is the same for all tasks.
pub(super) struct Call<'a> {
    pub(super) input: &'a Delta<'a>,
    /// `exp(g)`, as g.
    decay: Vec<f32>,
}

impl<'a> Call<'a> {
    pub(super) fn new(input: &'a Delta<'a>) -> Self {
        let (rows, width) = (input.g.len(), input.g.width());
        let mut decay = vec![0.0; rows * width];
        parallel::for_rows(&mut decay, width, EXP, |first, decay| {
            for (i, decay) in decay.chunks_exact_mut(width).enumerate() {
                decay.copy_from_slice(input.g.row(first + i));
            }
            exp(input.level, decay);
        });
        Self { input, decay }
    }

    /// Decays of a head in a token: 1 or Dk.
    #[inline(always)]
    pub(super) fn decay(&self, t: usize, head: usize) -> &[f32] {
        let count = self.input.decays();
        &self.decay[(t * self.input.value_heads + head) * count..][..count]
    }
}

/// The way of one head, or of some of its columns, through a run.
struct Task<'a> {
    head: usize,
    /// The run's first token.
    first: usize,
    /// The first of the columns.
    column: usize,
    state: State<'a>,
    /// These columns of the output: `[len][columns]`
    out: Vec<&'a mut [f32]>,
}

/// The state of a task's columns.
enum State<'a> {
    /// `[Dk, Dv]`, and Dv
    Whole(&'a mut [f32], usize),
    /// `[Dk][columns]`
    Rows(Vec<&'a mut [f32]>),
}

impl State<'_> {
    fn row(&mut self, i: usize) -> &mut [f32] {
        match self {
            Self::Whole(state, width) => &mut state[i * *width..][..*width],
            Self::Rows(rows) => rows[i],
        }
    }
}

dispatch! {
    /// Takes one head through a run.
    fn scan = scan_body(call: &Call<'_>, task: Task<'_>, block: &mut Aligned)
}

#[inline(always)]
fn scan_body<S: Simd>(simd: S, call: &Call<'_>, mut task: Task<'_>, block: &mut Aligned) {
    let vectors = task.out[0].len().div_ceil(S::LANES);
    let mut v = 0;
    while v < vectors {
        let width = width(vectors - v);
        match width {
            1 => columns::<S, 1>(simd, call, &mut task, v, block),
            2 => columns::<S, 2>(simd, call, &mut task, v, block),
            4 => columns::<S, 4>(simd, call, &mut task, v, block),
            _ => columns::<S, 8>(simd, call, &mut task, v, block),
        }
        v += width;
    }
}

/// Vectors of a row that go together, of `left` that have not: a power of 2. No bits depend on it.
fn width(left: usize) -> usize {
    1 << left.min(8).ilog2()
}

/// Takes `W` vectors of columns, from vector `first` on, through a run.
#[inline(always)]
fn columns<S: Simd, const W: usize>(
    simd: S,
    call: &Call<'_>,
    task: &mut Task<'_>,
    first: usize,
    block: &mut Aligned,
) {
    let Task { head, first: token, column, state, out } = task;
    let from = first * S::LANES;
    let len = (W * S::LANES).min(out[0].len() - from);
    let of = (*head, *token, *column);
    if len == W * S::LANES
        && out.len() < FEW
        && let State::Whole(state, width) = state
    {
        return tokens::<S, W>(simd, call, of, (from, len), &mut state[from..], *width, out);
    }
    // Whole vectors, adjacent; what fills up the last stays zero.
    let whole = W * S::LANES;
    let block = block.get_mut(call.input.key_dim * whole);
    for (i, block) in block.chunks_exact_mut(whole).enumerate() {
        block[..len].copy_from_slice(&state.row(i)[from..][..len]);
        block[len..].fill(0.0);
    }
    tokens::<S, W>(simd, call, of, (from, len), block, whole, out);
    for (i, block) in block.chunks_exact(whole).enumerate() {
        state.row(i)[from..][..len].copy_from_slice(&block[..len]);
    }
}

/// Takes columns of a head, of which the task's begin at `column`, through a run: `len` of the task's, from `from`
/// on, at the head of rows of `stride`.
#[inline(always)]
fn tokens<S: Simd, const W: usize>(
    simd: S,
    call: &Call<'_>,
    of: (usize, usize, usize),
    (from, len): (usize, usize),
    state: &mut [f32],
    stride: usize,
    out: &mut [&mut [f32]],
) {
    if call.input.decays() == 1 {
        tokens_of::<S, W, false>(simd, call, of, (from, len), state, stride, out);
    } else {
        tokens_of::<S, W, true>(simd, call, of, (from, len), state, stride, out);
    }
}

/// As [`tokens`], with a decay for each row if `BY_ROW`, else with one.
#[inline(always)]
fn tokens_of<S: Simd, const W: usize, const BY_ROW: bool>(
    simd: S,
    call: &Call<'_>,
    (head, first, column): (usize, usize, usize),
    (from, len): (usize, usize),
    state: &mut [f32],
    stride: usize,
    out: &mut [&mut [f32]],
) {
    let input = call.input;
    let columns = column + from..column + from + len;
    let token = |t: usize| Token {
        q: input.of_key(input.q, t, head),
        k: input.of_key(input.k, t, head),
        decay: call.decay(t, head),
    };
    let mut now = token(first);
    let mut read = read::<S, W, BY_ROW>(simd, now, state, stride);
    let tokens = out.len();
    for (i, out) in out.iter_mut().enumerate() {
        let t = first + i;
        if i + AHEAD < tokens {
            prefetch(simd, input, t + AHEAD, head, columns.clone());
        }
        // u = beta (v - S'ᵀ k)
        let beta = simd.splat(input.beta.row(t)[head]);
        let v = load::<S, W>(simd, &input.of_value(input.v, t, head)[columns.clone()]);
        let mut u = [simd.splat(0.0); W];
        for i in 0..W {
            u[i] = simd.mul(beta, simd.sub(v[i], read[i]));
        }
        let sums;
        if i + 1 < tokens {
            let next = token(t + 1);
            (sums, read) = step::<S, W, BY_ROW, true>(simd, now, next, &u, state, stride);
            now = next;
        } else {
            (sums, _) = step::<S, W, BY_ROW, false>(simd, now, now, &u, state, stride);
        }
        store::<S, W>(simd, simd.splat(input.scale), &sums, &mut out[from..][..len]);
    }
}

/// What all columns of a head share in a token.
#[derive(Clone, Copy)]
struct Token<'a> {
    /// `[Dk]`
    q: &'a [f32],
    /// `[Dk]`
    k: &'a [f32],
    /// `[1]` or `[Dk]`
    decay: &'a [f32],
}

impl Token<'_> {
    /// The factor of row `i` in what the key reads: of the state before its decay.
    #[inline(always)]
    fn reads<const BY_ROW: bool>(&self, i: usize) -> f32 {
        self.k[i] * self.decay[if BY_ROW { i } else { 0 }]
    }
}

/// `S'ᵀ k` of the state before a token.
#[inline(always)]
fn read<S: Simd, const W: usize, const BY_ROW: bool>(
    simd: S,
    token: Token<'_>,
    state: &[f32],
    stride: usize,
) -> [S::F; W] {
    let mut read = [simd.splat(0.0); W];
    for (i, row) in state.chunks(stride).enumerate() {
        let k = simd.splat(token.reads::<BY_ROW>(i));
        // Whole rows are one stream, which the processor's own prefetcher leaves at each page.
        if stride == W * S::LANES {
            for i in (0..stride).step_by(LINE) {
                simd.prefetch(row.as_ptr().wrapping_add(STREAM * stride + i).cast());
            }
        }
        let row = S::chunks(&row[..W * S::LANES]).0;
        for i in 0..W {
            read[i] = simd.mul_add(k, simd.load(&row[i]), read[i]);
        }
    }
    read
}

/// Moves the state over a token: `(Sᵀ q, what the next token's key reads)`, the second if there is a `NEXT`.
#[inline(always)]
fn step<S: Simd, const W: usize, const BY_ROW: bool, const NEXT: bool>(
    simd: S,
    token: Token<'_>,
    next: Token<'_>,
    u: &[S::F; W],
    state: &mut [f32],
    stride: usize,
) -> ([S::F; W], [S::F; W]) {
    let (mut sums, mut read) = ([simd.splat(0.0); W], [simd.splat(0.0); W]);
    let mut decay = simd.splat(token.decay[0]);
    for (i, row) in state.chunks_mut(stride).enumerate() {
        if BY_ROW {
            decay = simd.splat(token.decay[i]);
        }
        let (k, q) = (simd.splat(token.k[i]), simd.splat(token.q[i]));
        let reads = simd.splat(if NEXT { next.reads::<BY_ROW>(i) } else { 0.0 });
        let row = S::chunks_mut(&mut row[..W * S::LANES]).0;
        for i in 0..W {
            let s = simd.mul_add(k, u[i], simd.mul(decay, simd.load(&row[i])));
            simd.store(s, &mut row[i]);
            sums[i] = simd.mul_add(q, s, sums[i]);
            if NEXT {
                read[i] = simd.mul_add(reads, s, read[i]);
            }
        }
    }
    (sums, read)
}

/// Asks for a token's q, k and columns of v.
#[inline(always)]
fn prefetch<S: Simd>(
    simd: S,
    input: &Delta<'_>,
    t: usize,
    head: usize,
    columns: std::ops::Range<usize>,
) {
    simd.prefetch_slice(input.of_key(input.q, t, head));
    simd.prefetch_slice(input.of_key(input.k, t, head));
    simd.prefetch_slice(&input.of_value(input.v, t, head)[columns]);
}

/// `W` vectors, the last filled up with zeros.
#[inline(always)]
pub(super) fn load<S: Simd, const W: usize>(simd: S, x: &[f32]) -> [S::F; W] {
    let (whole, rest) = S::chunks(x);
    let mut out = [simd.splat(0.0); W];
    for i in 0..W {
        out[i] = simd.load(&whole.get(i).copied().unwrap_or_else(|| S::tail(rest)));
    }
    out
}

/// Puts back `scale` times what [`load`] took.
#[inline(always)]
fn store<S: Simd, const W: usize>(simd: S, scale: S::F, x: &[S::F; W], to: &mut [f32]) {
    let (whole, rest) = S::chunks_mut(to);
    for (to, x) in whole.iter_mut().zip(x) {
        simd.store(simd.mul(scale, *x), to);
    }
    if whole.len() < W {
        let mut tail = S::ZERO;
        simd.store(simd.mul(scale, x[W - 1]), &mut tail);
        S::write_tail(&tail, rest);
    }
}
