//! Gradients of the gated delta rule: the adjoint of each token's step, from the last to the first.
//!
//! ```text
//! dS     += scale q doᵀ                    dS that arrives from the tokens after t
//! du      = dSᵀ k,   dbeta = du·e          e = v - S'ᵀ k, u = beta e
//! dv      = beta du, dr = -dv
//! dq      = scale S do
//! dk      = dS u + S' dr
//! dS'     = dS + k drᵀ
//! dg      = sum of dS' S'                  over the head, or over each row
//! dS      = exp(g) dS'                     dS that arrives at the tokens before t
//! ```
//!
//! No state is divided by its decay: states are computed again from the state that enters. That is done
//! for 16 tokens at a time, from states that a first pass keeps at their starts.
//!
//! Every run and every value head is a task of its own, which goes through one block of columns after
//! another. The gradients of q and k are then summed over the value heads of a key head, in their order.
//! So no result depends on threads or on company.
//!
//! Memory beyond the outputs: two `[T, Hv, Dk]` where key heads are shared, and for each worker the states
//! of 16 tokens and of every 16th, each of a block of columns.

use rayon::prelude::*;

use super::Delta;
use super::scan::{Call, load};
use crate::aligned::Aligned;
use crate::rows::{Rows, column_blocks};
use crate::simd::{Simd, dispatch};

/// Tokens whose states are kept at a time.
const CHUNK: usize = 16;
/// Rows of a parallel task that sums over value heads.
const ROW_BLOCK: usize = 16;

/// Where the gradients of [`delta_rule_backward`] go; all are written.
#[derive(Debug)]
pub struct DeltaGradients<'a> {
    /// `[T, Hk, Dk]`
    pub dq: &'a mut [f32],
    /// `[T, Hk, Dk]`
    pub dk: &'a mut [f32],
    /// `[T, Hv, Dv]`
    pub dv: &'a mut [f32],
    /// `[T, Hv]` or `[T, Hv, Dk]`, as g
    pub dg: &'a mut [f32],
    /// `[T, Hv]`
    pub dbeta: &'a mut [f32],
}

/// Turns the gradients of what [`delta_rule`](super::delta_rule) returns into those of what it was given.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `input` | see [`Delta`] | what the forward was given |
/// | `runs` | lengths, sum T | tokens of each sequence; may be 0 |
/// | `states` | a `[Hv, Dk, Dv]` for each run | state before its first token |
/// | `dout` | `[T, Hv * Dv]` | gradient of o |
/// | `dstates` | a `[Hv, Dk, Dv]` for each run | gradient of the state after the last token, replaced by that of the state before the first |
/// | `out` | see [`DeltaGradients`] | |
///
/// Gradients have the same bits whatever runs are in the call.
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn delta_rule_backward(
    input: &Delta<'_>,
    runs: &[usize],
    states: &[&[f32]],
    dout: Rows<'_>,
    dstates: &mut [&mut [f32]],
    out: DeltaGradients<'_>,
) {
    input.check(runs);
    let (tokens, heads) = (input.v.len(), input.value_heads);
    let state_len = heads * input.state_len();
    assert_eq!(states.len(), runs.len(), "states");
    assert!(states.iter().all(|s| s.len() == state_len), "states");
    assert_eq!((dout.len(), dout.width()), (tokens, input.v.width()), "dout");
    assert_eq!(dstates.len(), runs.len(), "dstates");
    assert!(dstates.iter().all(|s| s.len() == state_len), "dstates");
    let DeltaGradients { dq, dk, dv, dg, dbeta } = out;
    assert_eq!(dq.len(), tokens * input.q.width(), "dq");
    assert_eq!(dk.len(), tokens * input.k.width(), "dk");
    assert_eq!(dv.len(), tokens * input.v.width(), "dv");
    assert_eq!(dg.len(), tokens * input.g.width(), "dg");
    assert_eq!(dbeta.len(), tokens * heads, "dbeta");
    for all in [&mut *dq, &mut *dk, &mut *dv, &mut *dg, &mut *dbeta] {
        all.fill(0.0);
    }
    if state_len == 0 {
        return;
    }
    let call = Call::new(input);
    let by_head = heads * input.key_dim;
    let mut parts = vec![0.0; if heads == input.key_heads { 0 } else { 2 * tokens * by_head }];
    if parts.is_empty() {
        let own = Parts { dq: &mut *dq, dk: &mut *dk, dv, dg, dbeta };
        run_tasks(&call, runs, states, dout, dstates, own);
        return;
    }
    let (dq_parts, dk_parts) = parts.split_at_mut(tokens * by_head);
    let own = Parts { dq: dq_parts, dk: dk_parts, dv, dg, dbeta };
    run_tasks(&call, runs, states, dout, dstates, own);
    sum_heads(input, &parts[..tokens * by_head], dq);
    sum_heads(input, &parts[tokens * by_head..], dk);
}

/// Gradients by value head.
struct Parts<'a> {
    /// `[T, Hv, Dk]`
    dq: &'a mut [f32],
    /// `[T, Hv, Dk]`
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    dg: &'a mut [f32],
    dbeta: &'a mut [f32],
}

/// Adds up the value heads of each key head: `[T, Hv, Dk]` to `[T, Hk, Dk]`.
fn sum_heads(input: &Delta<'_>, parts: &[f32], out: &mut [f32]) {
    let (width, by_head) = (input.q.width(), input.value_heads * input.key_dim);
    let shares = input.value_heads / input.key_heads;
    let blocks = out.par_chunks_mut(ROW_BLOCK * width).zip(parts.par_chunks(ROW_BLOCK * by_head));
    blocks.for_each(|(out, parts)| {
        let heads = out.chunks_exact_mut(input.key_dim);
        for (out, parts) in heads.zip(parts.chunks_exact(shares * input.key_dim)) {
            for part in parts.chunks_exact(input.key_dim) {
                out.iter_mut().zip(part).for_each(|(out, part)| *out += part);
            }
        }
    });
}

/// Runs the task of every run and value head.
fn run_tasks(
    call: &Call<'_>,
    runs: &[usize],
    states: &[&[f32]],
    dout: Rows<'_>,
    dstates: &mut [&mut [f32]],
    parts: Parts<'_>,
) {
    let input = call.input;
    let Parts { mut dq, mut dk, mut dv, mut dg, mut dbeta } = parts;
    let mut tasks = Vec::with_capacity(runs.len() * input.value_heads);
    let mut first = 0;
    for ((&len, state), dstate) in runs.iter().zip(states).zip(dstates) {
        let mut bands = [(); 5].map(|()| Vec::new().into_iter());
        let widths = [input.key_dim, input.key_dim, input.value_dim, input.decays(), 1];
        let outs = [&mut dq, &mut dk, &mut dv, &mut dg, &mut dbeta];
        for ((bands, width), out) in bands.iter_mut().zip(widths).zip(outs) {
            let row = input.value_heads * width;
            let (piece, rest) = std::mem::take(out).split_at_mut(len * row);
            *bands = column_blocks(piece, row, width).into_iter();
            *out = rest;
        }
        let [dq, dk, dv, dg, dbeta] = bands;
        let outs = dq.zip(dk).zip(dv).zip(dg).zip(dbeta);
        let heads = state.chunks_exact(input.state_len());
        let heads = heads.zip(dstate.chunks_exact_mut(input.state_len()));
        for (head, ((state, dstate), ((((dq, dk), dv), dg), dbeta))) in heads.zip(outs).enumerate()
        {
            let of = Outputs { dstate, dq, dk, dv, dg, dbeta };
            tasks.push(Task { head, first, len, state, of });
        }
        first += len;
    }
    let run = |worker: &mut Worker, task: Task<'_>| go_back(input.level, call, dout, task, worker);
    tasks.into_par_iter().for_each_init(Worker::default, run);
}

/// One head's way back through a run.
struct Task<'a> {
    head: usize,
    /// The run's first token.
    first: usize,
    len: usize,
    /// `[Dk, Dv]`, before the first token.
    state: &'a [f32],
    of: Outputs<'a>,
}

/// What a task writes: one row for each token, and the gradient of the state.
struct Outputs<'a> {
    dstate: &'a mut [f32],
    dq: Vec<&'a mut [f32]>,
    dk: Vec<&'a mut [f32]>,
    dv: Vec<&'a mut [f32]>,
    dg: Vec<&'a mut [f32]>,
    dbeta: Vec<&'a mut [f32]>,
}

/// Blocks of columns of states, whole vectors wide.
#[derive(Default)]
struct Worker {
    state: Aligned,
    /// States at the starts of chunks.
    starts: Aligned,
    /// States before the tokens of a chunk.
    before: Aligned,
    dstate: Aligned,
    /// e and u of the tokens of a chunk.
    written: Aligned,
}

dispatch! {
    /// Takes one head back through a run.
    fn go_back = go_back_body(call: &Call<'_>, dout: Rows<'_>, task: Task<'_>, worker: &mut Worker)
}

#[inline(always)]
fn go_back_body<S: Simd>(
    simd: S,
    call: &Call<'_>,
    dout: Rows<'_>,
    mut task: Task<'_>,
    worker: &mut Worker,
) {
    let vectors = call.input.value_dim.div_ceil(S::LANES);
    let mut v = 0;
    while v < vectors {
        let width = 1 << (vectors - v).min(4).ilog2();
        match width {
            1 => columns::<S, 1>(simd, call, dout, &mut task, v, worker),
            2 => columns::<S, 2>(simd, call, dout, &mut task, v, worker),
            _ => columns::<S, 4>(simd, call, dout, &mut task, v, worker),
        }
        v += width;
    }
}

/// Takes `W` vectors of columns, from vector `first` on, back through a run.
#[inline(always)]
fn columns<S: Simd, const W: usize>(
    simd: S,
    call: &Call<'_>,
    dout: Rows<'_>,
    task: &mut Task<'_>,
    first: usize,
    worker: &mut Worker,
) {
    let input = call.input;
    let whole = W * S::LANES;
    let size = input.key_dim * whole;
    let from = first * S::LANES;
    let len = whole.min(input.value_dim - from);
    let block = Block { from, len, whole };
    let state = worker.state.get_mut(size);
    let starts = worker.starts.get_mut(task.len.div_ceil(CHUNK) * size);
    let before = worker.before.get_mut(CHUNK.min(task.len) * size);
    let dstate = worker.dstate.get_mut(size);
    let written = worker.written.get_mut(2 * CHUNK * whole);
    block.take(task.state, input.value_dim, state);
    block.take(task.of.dstate, input.value_dim, dstate);

    // Forward, keeping the state at the start of each chunk.
    for (chunk, start) in starts.chunks_exact_mut(size).enumerate() {
        start.copy_from_slice(state);
        for i in chunk * CHUNK..task.len.min((chunk + 1) * CHUNK) {
            advance::<S, W>(simd, call, task.head, task.first + i, &block, state);
        }
    }
    // Back, chunk after chunk: forward again through the chunk, then back token by token.
    for (chunk, start) in starts.chunks_exact(size).enumerate().rev() {
        let tokens = chunk * CHUNK..task.len.min((chunk + 1) * CHUNK);
        state.copy_from_slice(start);
        let steps = before.chunks_exact_mut(size).zip(written.chunks_exact_mut(2 * whole));
        for (i, (before, written)) in tokens.clone().zip(steps) {
            before.copy_from_slice(state);
            let (e, u) = advance::<S, W>(simd, call, task.head, task.first + i, &block, state);
            for (to, x) in S::chunks_mut(written).0.iter_mut().zip(e.iter().chain(&u)) {
                simd.store(*x, to);
            }
        }
        for i in tokens.rev() {
            let before = &before[i % CHUNK * size..][..size];
            let written = S::chunks(&written[i % CHUNK * 2 * whole..][..2 * whole]).0;
            let (mut e, mut u) = ([simd.splat(0.0); W], [simd.splat(0.0); W]);
            for j in 0..W {
                (e[j], u[j]) = (simd.load(&written[j]), simd.load(&written[W + j]));
            }
            token::<S, W>(simd, call, dout, task, i, &block, (before, &e, &u), dstate);
        }
    }
    block.put(dstate, input.value_dim, task.of.dstate);
}

/// Columns `from..from + len` of a state, in rows of `whole` vectors.
struct Block {
    from: usize,
    len: usize,
    whole: usize,
}

impl Block {
    /// Copies the columns of rows of `width` to whole vectors, filled up with zeros.
    #[inline(always)]
    fn take(&self, state: &[f32], width: usize, to: &mut [f32]) {
        for (to, row) in to.chunks_exact_mut(self.whole).zip(state.chunks_exact(width)) {
            to[..self.len].copy_from_slice(&row[self.from..][..self.len]);
            to[self.len..].fill(0.0);
        }
    }

    /// Copies them back.
    #[inline(always)]
    fn put(&self, from: &[f32], width: usize, state: &mut [f32]) {
        for (from, row) in from.chunks_exact(self.whole).zip(state.chunks_exact_mut(width)) {
            row[self.from..][..self.len].copy_from_slice(&from[..self.len]);
        }
    }
}

/// The decay of row `i`.
#[inline(always)]
fn of_row(decay: &[f32], i: usize) -> f32 {
    decay[if decay.len() == 1 { 0 } else { i }]
}

/// Moves the state over token `t`; returns its e and u.
#[inline(always)]
fn advance<S: Simd, const W: usize>(
    simd: S,
    call: &Call<'_>,
    head: usize,
    t: usize,
    block: &Block,
    state: &mut [f32],
) -> ([S::F; W], [S::F; W]) {
    let input = call.input;
    let (k, decay) = (input.of_key(input.k, t, head), call.decay(t, head));
    let mut read = [simd.splat(0.0); W];
    for (i, row) in state.chunks_exact(block.whole).enumerate() {
        let k = simd.splat(k[i] * of_row(decay, i));
        let row = S::chunks(row).0;
        for j in 0..W {
            read[j] = simd.mul_add(k, simd.load(&row[j]), read[j]);
        }
    }
    let beta = simd.splat(input.beta.row(t)[head]);
    let v = load::<S, W>(simd, &input.of_value(input.v, t, head)[block.from..][..block.len]);
    let (mut e, mut u) = ([simd.splat(0.0); W], [simd.splat(0.0); W]);
    for j in 0..W {
        e[j] = simd.sub(v[j], read[j]);
        u[j] = simd.mul(beta, e[j]);
    }
    for (i, row) in state.chunks_exact_mut(block.whole).enumerate() {
        let (k, decay) = (simd.splat(k[i]), simd.splat(of_row(decay, i)));
        let row = S::chunks_mut(row).0;
        for j in 0..W {
            let s = simd.mul_add(k, u[j], simd.mul(decay, simd.load(&row[j])));
            simd.store(s, &mut row[j]);
        }
    }
    (e, u)
}

/// Takes columns back over token `i` of the run: `before` is the state before it.
#[inline(always)]
#[allow(
    clippy::too_many_arguments,
    reason = "what a token has, and what its gradients are added to"
)]
fn token<S: Simd, const W: usize>(
    simd: S,
    call: &Call<'_>,
    dout: Rows<'_>,
    task: &mut Task<'_>,
    i: usize,
    block: &Block,
    (before, e, u): (&[f32], &[S::F; W], &[S::F; W]),
    dstate: &mut [f32],
) {
    let input = call.input;
    let (t, head) = (task.first + i, task.head);
    let (q, k) = (input.of_key(input.q, t, head), input.of_key(input.k, t, head));
    let decay = call.decay(t, head);
    let zero = simd.splat(0.0);
    let dout = load::<S, W>(simd, &input.of_value(dout, t, head)[block.from..][..block.len]);

    // dS += scale q doᵀ, du = dSᵀ k
    let mut du = [zero; W];
    for (i, row) in dstate.chunks_exact_mut(block.whole).enumerate() {
        let (q, k) = (simd.splat(input.scale * q[i]), simd.splat(k[i]));
        let row = S::chunks_mut(row).0;
        for j in 0..W {
            let ds = simd.mul_add(q, dout[j], simd.load(&row[j]));
            simd.store(ds, &mut row[j]);
            du[j] = simd.mul_add(k, ds, du[j]);
        }
    }
    let beta = simd.splat(input.beta.row(t)[head]);
    let (mut dbeta, mut dr) = (zero, [zero; W]);
    let mut dv = S::ZERO;
    for j in 0..W {
        dbeta = simd.mul_add(du[j], e[j], dbeta);
        let of_v = simd.mul(beta, du[j]);
        dr[j] = simd.sub(zero, of_v);
        simd.store(of_v, &mut dv);
        let to = &mut task.of.dv[i][block.from..][..block.len];
        let from = (j * S::LANES).min(to.len());
        let to = &mut to[from..];
        let count = to.len().min(S::LANES);
        S::write_tail(&dv, &mut to[..count]);
    }
    task.of.dbeta[i][0] += simd.reduce(dbeta);

    let [dq, dk, dg] = [&mut task.of.dq, &mut task.of.dk, &mut task.of.dg].map(|x| &mut *x[i]);
    let rows = before.chunks_exact(block.whole).zip(dstate.chunks_exact_mut(block.whole));
    for (i, (before, row)) in rows.enumerate() {
        let (k, decay) = (simd.splat(k[i]), simd.splat(of_row(decay, i)));
        let (before, row) = (S::chunks(before).0, S::chunks_mut(row).0);
        let (mut of_q, mut of_k, mut of_g) = (zero, zero, zero);
        for j in 0..W {
            let decayed = simd.mul(decay, simd.load(&before[j]));
            let after = simd.mul_add(k, u[j], decayed);
            let ds = simd.load(&row[j]);
            of_q = simd.mul_add(after, dout[j], of_q);
            of_k = simd.mul_add(ds, u[j], simd.mul_add(decayed, dr[j], of_k));
            let ds = simd.mul_add(k, dr[j], ds);
            of_g = simd.mul_add(ds, decayed, of_g);
            simd.store(simd.mul(decay, ds), &mut row[j]);
        }
        let [of_q, of_k, of_g, _] = simd.reduce4([of_q, of_k, of_g, zero]);
        dq[i] += input.scale * of_q;
        dk[i] += of_k;
        let of = if dg.len() == 1 { 0 } else { i };
        dg[of] += of_g;
    }
}
