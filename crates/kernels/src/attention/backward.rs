//! Gradients of attention.
//!
//! With s the scaled scores, after the softcap if there is one, p their softmax along each row, and
//! `dout` the gradient of the result:
//!
//! ```text
//! dv[j]    = sum over i of p[i, j] dout[i]
//! ds[i, j] = p[i, j] (dout[i]·v[j] - delta[i])          delta[i] = dout[i]·out[i]
//! dq[i]    = scale sum over j of ds[i, j] k[j]          ds times 1 - (s / cap)² with a softcap
//! dk[j]    = scale sum over i of ds[i, j] q[i]
//! ```
//!
//! where dk and dv also sum over the query heads that share a head of keys and values. delta is
//! `sum over j of p[i, j] (dout[i]·v[j])`, the mean that a softmax's gradient loses (*FlashAttention*,
//! arXiv 2205.14135, appendix B.2).
//!
//! What differs from the formulas, and why:
//!
//! 1. A block of queries at a time (*FlashAttention-2*, arXiv 2307.08691, algorithm 2, with its loops
//!    exchanged). The block's scores are computed again and kept until its gradients are made. So each
//!    takes one exponential, and the forward has nothing to remember. 48 x L scores are kept, never L x
//!    L.
//! 2. Positions come in pages of 64, as in the forward. Its micro-kernels make both products with keys
//!    and the product with values. Pages that no query of a block sees are skipped. On the diagonal and
//!    at the window's edge, unseen tiles of a page are skipped too.
//! 3. dk and dv are products with the transposed matrices of weights, of six positions by two vectors.
//!    The weights of six positions for one query are neighbours, so nothing is transposed. Both sums
//!    stay in panels from the first block of queries to the last.
//!
//! Each head of keys and values of each run is computed by itself, in one order: its bits depend
//! neither on the other runs nor on the number of threads.

use std::ops::Range;

use rayon::prelude::*;

use super::Attention;
use super::online::{TILE, cap_scores, exp_not_above_one, score_tile, value_tile};
use super::page::{PAGE, put_key};
use super::panels::{Elements, F32};
use crate::rows::{Rows, column_blocks};
use crate::simd::{Simd, dispatch};

/// Queries of a block: as many tokens as make about this many.
const BLOCK_ROWS: usize = 48;

/// What [`attention_backward`] takes of the forward.
///
/// The keys and values of a run are all that its queries may see: what was carried from before, then the
/// run's own. So L is at least the run's length, and its queries are those of the last positions.
#[derive(Debug, Clone, Copy)]
pub struct AttentionInput<'a> {
    /// Hk
    pub nheads_kv: usize,
    /// Queries, `[T, H * d_k]`
    pub q: Rows<'a>,
    /// Of all positions, a `[L, Hk * d_k]` for each run.
    pub keys: &'a [Rows<'a>],
    /// Of all positions, a `[L, Hk * d_v]` for each run.
    pub values: &'a [Rows<'a>],
    /// The forward's result, `[T, H * d_v]`
    pub out: Rows<'a>,
}

/// Where the gradients of [`attention_backward`] go: all are overwritten.
#[derive(Debug)]
pub struct AttentionGradients<'a, 'b> {
    /// `[T, H * d_k]`
    pub dq: &'a mut [f32],
    /// A `[L, Hk * d_k]` for each run.
    pub dk: &'a mut [&'b mut [f32]],
    /// A `[L, Hk * d_v]` for each run.
    pub dv: &'a mut [&'b mut [f32]],
}

/// The gradients of `sum(dout * out)`, where `out` is what [`attention`](super::attention) computed.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `kernel` | see [`Attention`] | as in the forward |
/// | `input` | see [`AttentionInput`] | |
/// | `runs` | lengths, sum T | tokens of each sequence; may be 0 |
/// | `dout` | `[T, H * d_v]` | gradient of the result |
/// | `gradients` | see [`AttentionGradients`] | |
///
/// ```
/// use boostr_kernels::attention::{
///     Attention, AttentionGradients, AttentionInput, attention_backward,
/// };
/// use boostr_kernels::{Level, Rows};
/// let kernel =
///     Attention { level: Level::detect(), nheads: 1, scale: 1.0, window: None, softcap: None };
/// let rows = |x| Rows::dense(x, 1);
/// let (q, k, v) = ([0.0, 0.0], [1.0, 2.0], [3.0, 5.0]);
/// let (out, dout) = ([3.0, 4.0], [0.0, 1.0]); // of the second token, the mean of both values
/// let (keys, values) = ([rows(&k)], [rows(&v)]);
/// let input =
///     AttentionInput { nheads_kv: 1, q: rows(&q), keys: &keys, values: &values, out: rows(&out) };
/// let (mut dq, mut dk, mut dv) = ([0.0; 2], [0.0; 2], [0.0; 2]);
/// let gradients =
///     AttentionGradients { dq: &mut dq, dk: &mut [&mut dk], dv: &mut [&mut dv] };
/// attention_backward(&kernel, &input, &[2], rows(&dout), gradients);
/// assert_eq!(dv, [0.5, 0.5]);
/// assert_eq!(dq, [0.0, 0.5]); // a larger query weighs the second key, and so the larger value, more
/// assert_eq!(dk, [0.0, 0.0]);
/// ```
///
/// # Panics
///
/// If the lengths disagree.
#[track_caller]
pub fn attention_backward(
    kernel: &Attention,
    input: &AttentionInput<'_>,
    runs: &[usize],
    dout: Rows<'_>,
    gradients: AttentionGradients<'_, '_>,
) {
    let AttentionInput { nheads_kv, q, keys, values, out } = *input;
    let AttentionGradients { dq, dk, dv } = gradients;
    let nheads = kernel.nheads;
    assert!(nheads_kv > 0, "nheads_kv");
    assert!(
        nheads > 0 && nheads.is_multiple_of(nheads_kv),
        "nheads: not a multiple of {nheads_kv}"
    );
    assert!(kernel.window != Some(0), "window");
    assert!(kernel.softcap.is_none_or(|cap| cap > 0.0), "softcap");
    // Widths follow from the rows; every other argument must agree.
    let (d_k, d_v) = (q.width() / nheads, out.width() / nheads);
    assert!(d_k > 0 && q.width() == nheads * d_k, "q");
    assert!(d_v > 0 && out.width() == nheads * d_v, "out");
    assert_eq!(runs.iter().sum::<usize>(), q.len(), "runs");
    assert_eq!(out.len(), q.len(), "out");
    assert_eq!((dout.len(), dout.width()), (q.len(), nheads * d_v), "dout");
    assert_eq!(dq.len(), q.len() * nheads * d_k, "dq");
    assert_eq!(keys.len(), runs.len(), "keys");
    assert_eq!(values.len(), runs.len(), "values");
    assert_eq!(dk.len(), runs.len(), "dk");
    assert_eq!(dv.len(), runs.len(), "dv");

    // A task is one KV head of one run, with its columns of every argument and gradient.
    let group = nheads / nheads_kv;
    let mut tasks = Vec::with_capacity(runs.len() * nheads_kv);
    let (mut first, mut rest) = (0, dq);
    for (run, (dk, dv)) in dk.iter_mut().zip(dv).enumerate() {
        let (len, keys, values) = (runs[run], keys[run], values[run]);
        assert!(keys.len() >= len && keys.width() == nheads_kv * d_k, "keys");
        assert_eq!((values.len(), values.width()), (keys.len(), nheads_kv * d_v), "values");
        assert_eq!(dk.len(), keys.len() * nheads_kv * d_k, "dk");
        assert_eq!(dv.len(), keys.len() * nheads_kv * d_v, "dv");
        let (dq, after) = rest.split_at_mut(len * nheads * d_k);
        rest = after;
        // The run's rows, then its columns by KV head: dq, dk and dv of tasks do not overlap.
        let [q, out, dout] = [q, out, dout].map(|rows| rows.slice(first, len));
        first += len;
        let dq = column_blocks(dq, nheads * d_k, group * d_k);
        let dk = column_blocks(dk, nheads_kv * d_k, d_k);
        let dv = column_blocks(dv, nheads_kv * d_v, d_v);
        for (head, ((dq, dk), dv)) in dq.into_iter().zip(dk).zip(dv).enumerate() {
            tasks.push(Task {
                kernel: *kernel,
                group,
                q: q.columns(head * group * d_k, group * d_k),
                keys: keys.columns(head * d_k, d_k),
                values: values.columns(head * d_v, d_v),
                out: out.columns(head * group * d_v, group * d_v),
                dout: dout.columns(head * group * d_v, group * d_v),
                dq,
                dk,
                dv,
            });
        }
    }
    tasks.into_par_iter().for_each_init(Scratch::default, |scratch, mut task| {
        // Buffers are as long as what is seen, so a window bounds them.
        task.leave_out_what_no_query_sees();
        if task.q.is_empty() {
            return;
        }
        backward(kernel.level, &mut task, scratch);
    });
}

/// One head of keys and values of one run, with the query heads that use it.
struct Task<'a> {
    kernel: Attention,
    /// H / Hk
    group: usize,
    /// `[T, H / Hk * d_k]`
    q: Rows<'a>,
    /// `[L, d_k]`
    keys: Rows<'a>,
    /// `[L, d_v]`
    values: Rows<'a>,
    /// `[T, H / Hk * d_v]`
    out: Rows<'a>,
    dout: Rows<'a>,
    /// The columns of these heads: for each token
    dq: Vec<&'a mut [f32]>,
    /// for each position
    dk: Vec<&'a mut [f32]>,
    dv: Vec<&'a mut [f32]>,
}

impl Task<'_> {
    /// Writes the zeros of positions before all that a query sees, and forgets these positions.
    fn leave_out_what_no_query_sees(&mut self) {
        let len = self.keys.len();
        // Positions that even the first query's window leaves out.
        let first_end = len - self.q.len() + 1;
        let unseen = match self.kernel.window {
            _ if self.q.is_empty() => len,
            Some(window) => first_end.saturating_sub(window),
            None => 0,
        };
        for gradient in self.dk.drain(..unseen).chain(self.dv.drain(..unseen)) {
            gradient.fill(0.0);
        }
        self.keys = self.keys.slice(unseen, len - unseen);
        self.values = self.values.slice(unseen, len - unseen);
    }
}

/// A block of neighbouring tokens, whose queries are rows `[tokens, H / Hk]`.
#[derive(Clone, Copy)]
struct Block {
    /// The first token, and its position.
    token: usize,
    position: usize,
    tokens: usize,
    group: usize,
    window: Option<usize>,
}

impl Block {
    #[inline(always)]
    fn rows(&self) -> usize {
        self.tokens * self.group
    }

    /// The pages that hold a position which a query sees.
    #[inline(always)]
    fn pages(&self) -> Range<usize> {
        let first = match self.window {
            Some(window) => (self.position + 1).saturating_sub(window),
            None => 0,
        };
        first / PAGE..(self.position + self.tokens).div_ceil(PAGE)
    }

    /// The slots of the page that starts at position `start` which a row sees.
    #[inline(always)]
    fn slots(&self, row: usize, start: usize) -> Range<usize> {
        let end = self.position + row / self.group + 1;
        let first = match self.window {
            Some(window) => end.saturating_sub(window),
            None => 0,
        };
        first.saturating_sub(start).min(PAGE)..end.saturating_sub(start).min(PAGE)
    }

    /// [`slots`](Self::slots) of the `count` rows from `first` on.
    #[inline(always)]
    fn tile_slots(&self, first: usize, count: usize, start: usize) -> [Range<usize>; TILE] {
        let mut slots = [const { 0..0 }; TILE];
        for row in 0..count {
            slots[row] = self.slots(first + row, start);
        }
        slots
    }

    /// The rows that see any of `count` positions from `position` on: neighbours.
    #[inline(always)]
    fn seeing(&self, position: usize, count: usize) -> Range<usize> {
        let first = position.saturating_sub(self.position).min(self.tokens);
        let end = match self.window {
            Some(window) => (position + count - 1).saturating_add(window),
            None => usize::MAX,
        };
        let end = end.saturating_sub(self.position).clamp(first, self.tokens);
        first * self.group..end * self.group
    }
}

/// Buffers of one worker, with W two vectors and a width padded to whole panels of W.
#[derive(Default)]
struct Scratch {
    /// Of each page: kᵀ `[64 / W][d_k, W]`, vᵀ `[64 / W][d_v, W]`, k `[d_k / W][64, W]`
    keys_t: Vec<f32>,
    values_t: Vec<f32>,
    keys: Vec<f32>,
    /// Sums, of each page `[d / W][64, W]`
    dk: Vec<f32>,
    dv: Vec<f32>,
    /// Scaled queries and dout of a block: left operands, see [`pack`]
    q_left: Vec<f32>,
    dout_left: Vec<f32>,
    /// and right operands `[d / W][rows, W]`
    q_right: Vec<f32>,
    dout_right: Vec<f32>,
    /// `[rows, d_k]`
    dq: Vec<f32>,
    /// Of each page that a block sees `[rows, 64]`: scores, then their exponentials, then p
    weights: Vec<f32>,
    /// 1 - (s / cap)², if there is a softcap
    slopes: Vec<f32>,
    /// Of one page: dout·v, then ds
    ds: Vec<f32>,
    /// Of each row
    max: Vec<f32>,
    sum: Vec<f32>,
    delta: Vec<f32>,
}

/// Makes `buffer` `len` zeros.
#[inline(always)]
fn zeros(buffer: &mut Vec<f32>, len: usize) {
    buffer.clear();
    buffer.resize(len, 0.0);
}

dispatch! { fn backward = backward_body(task: &mut Task<'_>, scratch: &mut Scratch) }

#[inline(always)]
fn backward_body<S: Simd>(simd: S, task: &mut Task<'_>, scratch: &mut Scratch) {
    let (len, tokens, group) = (task.keys.len(), task.q.len(), task.group);
    pack_positions::<S>(task, scratch);
    let most = (BLOCK_ROWS / group).max(1);
    for token in (0..tokens).step_by(most) {
        let block = Block {
            token,
            position: len - tokens + token,
            tokens: most.min(tokens - token),
            group,
            window: task.kernel.window,
        };
        pack_block::<S>(task, &block, scratch);
        weigh(simd, task, &block, scratch);
        for page in block.pages() {
            score_gradients(simd, task, &block, page, scratch);
            add_page(simd, task, &block, page, scratch);
        }
        let d_k = task.keys.width();
        let scale = task.kernel.scale;
        let rows = scratch.dq.chunks_exact(d_k.next_multiple_of(2 * S::LANES));
        let heads = task.dq[token..].iter_mut().flat_map(|dq| dq.chunks_exact_mut(d_k));
        for (to, row) in heads.zip(rows) {
            for (to, x) in to.iter_mut().zip(row) {
                *to = scale * x;
            }
        }
    }
    unpack(2 * S::LANES, &scratch.dk, &mut task.dk);
    unpack(2 * S::LANES, &scratch.dv, &mut task.dv);
}

/// Lays out keys and values in pages, and clears the sums of their gradients.
#[inline(always)]
fn pack_positions<S: Simd>(task: &Task<'_>, scratch: &mut Scratch) {
    let (d_k, d_v, width) = (task.keys.width(), task.values.width(), 2 * S::LANES);
    let (padded_k, padded_v) = (d_k.next_multiple_of(width), d_v.next_multiple_of(width));
    // Whole pages: slots past the last position are zeros, and weigh nothing.
    let pages = task.keys.len().div_ceil(PAGE);
    zeros(&mut scratch.keys_t, pages * PAGE * d_k);
    zeros(&mut scratch.values_t, pages * PAGE * d_v);
    zeros(&mut scratch.keys, pages * PAGE * padded_k);
    zeros(&mut scratch.dk, pages * PAGE * padded_k);
    zeros(&mut scratch.dv, pages * PAGE * padded_v);
    // Keys go in twice: by columns for scores, by rows for dq. Values go in by columns, for dout·v.
    for position in 0..task.keys.len() {
        let (page, slot) = (position / PAGE, position % PAGE);
        let (k, v) = (task.keys.row(position), task.values.row(position));
        put_key(&mut scratch.keys_t[page * PAGE * d_k..][..PAGE * d_k], d_k, width, slot, k);
        put_key(&mut scratch.values_t[page * PAGE * d_v..][..PAGE * d_v], d_v, width, slot, v);
        let keys = &mut scratch.keys[page * PAGE * padded_k..][..PAGE * padded_k];
        put_row(keys, PAGE, width, slot, k, 1.0);
    }
}

/// Writes gradients of positions from their panels.
fn unpack(width: usize, panels: &[f32], to: &mut [&mut [f32]]) {
    let Some(padded) = to.first().map(|row| row.len().next_multiple_of(width)) else { return };
    for (to, page) in to.chunks_mut(PAGE).zip(panels.chunks_exact(PAGE * padded)) {
        for (slot, to) in to.iter_mut().enumerate() {
            for (to, panel) in to.chunks_mut(width).zip(page.chunks_exact(PAGE * width)) {
                to.copy_from_slice(&panel[slot * width..][..to.len()]);
            }
        }
    }
}

/// Writes `factor * x` as a row of panels `[x / W][rows, W]`.
#[inline(always)]
fn put_row(panels: &mut [f32], rows: usize, width: usize, row: usize, x: &[f32], factor: f32) {
    for (panel, x) in panels.chunks_exact_mut(rows * width).zip(x.chunks(width)) {
        for (to, x) in panel[row * width..][..x.len()].iter_mut().zip(x) {
            *to = factor * x;
        }
    }
}

/// Lays out the queries of a block and what belongs to them.
#[inline(always)]
fn pack_block<S: Simd>(task: &Task<'_>, block: &Block, scratch: &mut Scratch) {
    let (d_k, d_v, width) = (task.keys.width(), task.values.width(), 2 * S::LANES);
    let (q, out, dout) = (
        task.q.slice(block.token, block.tokens),
        task.out.slice(block.token, block.tokens),
        task.dout.slice(block.token, block.tokens),
    );
    let scale = task.kernel.scale;
    // Queries and dout, each as left operand of scores and as right operand of dk and dv.
    pack(q, d_k, scale, width, &mut scratch.q_left, &mut scratch.q_right);
    pack(dout, d_v, 1.0, width, &mut scratch.dout_left, &mut scratch.dout_right);
    scratch.delta.clear();
    // delta = dout·out for each row, in f64: it is subtracted from numbers of its size.
    for token in 0..block.tokens {
        let heads = out.row(token).chunks_exact(d_v).zip(dout.row(token).chunks_exact(d_v));
        for (out, dout) in heads {
            let mut delta = 0.0f64;
            for (out, dout) in out.iter().zip(dout) {
                delta += f64::from(*out) * f64::from(*dout);
            }
            scratch.delta.push(delta as f32);
        }
    }
    // dq is summed over pages; weights of all pages are kept until their gradients are made.
    zeros(&mut scratch.dq, block.rows() * d_k.next_multiple_of(width));
    let rows = block.pages().len() * block.rows();
    scratch.weights.resize(rows * PAGE, 0.0);
    scratch.slopes.resize(if task.kernel.softcap.is_some() { rows * PAGE } else { 0 }, 0.0);
    scratch.ds.resize(block.rows() * PAGE, 0.0);
    scratch.max.clear();
    scratch.max.resize(block.rows(), f32::NEG_INFINITY);
    zeros(&mut scratch.sum, block.rows());
}

/// Packs rows of width `d`, times `factor`, for both micro-kernels.
///
/// `left` in tiles of at most six rows, each `[d / 64, count, 64]`; `right` in panels `[d / W][rows, W]`.
#[inline(always)]
fn pack(
    x: Rows<'_>,
    d: usize,
    factor: f32,
    width: usize,
    left: &mut Vec<f32>,
    right: &mut Vec<f32>,
) {
    let group = x.width() / d;
    let rows = x.len() * group;
    let padded = d.next_multiple_of(PAGE);
    left.resize(rows * padded, 0.0);
    zeros(right, rows * d.next_multiple_of(width));
    for row in 0..rows {
        let x = &x.row(row / group)[row % group * d..][..d];
        put_row(right, rows, width, row, x, factor);
        // Left operands are tiles of up to six rows, whose numbers the micro-kernel broadcasts.
        let first = row / TILE * TILE;
        let count = TILE.min(rows - first);
        let tile = &mut left[first * padded..][..count * padded];
        for (block, x) in tile.chunks_exact_mut(count * PAGE).zip(x.chunks(PAGE)) {
            for (to, x) in block[(row - first) * PAGE..].iter_mut().zip(x) {
                *to = factor * x;
            }
        }
    }
}

/// Fills `weights` with the exponentials of a block's scores, and `sum` with their sums.
#[inline(always)]
fn weigh<S: Simd>(simd: S, task: &Task<'_>, block: &Block, scratch: &mut Scratch) {
    let (rows, d_k) = (block.rows(), task.keys.width());
    let padded = d_k.next_multiple_of(PAGE);
    let Scratch { q_left, keys_t, weights, slopes, max, sum, .. } = scratch;
    // Scores of all pages `[pages][rows, 64]`, and the largest of each row.
    for (page, weights) in block.pages().zip(weights.chunks_exact_mut(rows * PAGE)) {
        let start = page * PAGE;
        let keys = &keys_t[start * d_k..][..PAGE * d_k];
        for first in (0..rows).step_by(TILE) {
            let count = TILE.min(rows - first);
            let slots = block.tile_slots(first, count, start);
            let q = &q_left[first * padded..][..count * padded];
            let scores = &mut weights[first * PAGE..][..count * PAGE];
            // Scores of a tile, then the softcap with its slope, then the mask: as in the forward.
            let keys = Elements::<S, F32>::new(S::chunks(keys), d_k);
            let seen = score_tile(simd, d_k, q, keys, &slots[..count], scores);
            for row in 0..count {
                let scores = &mut scores[row * PAGE..][..PAGE];
                if let Some(cap) = task.kernel.softcap {
                    cap_scores(simd, cap, &mut scores[seen.clone()]);
                    let at = ((page - block.pages().start) * rows + first + row) * PAGE;
                    cap_slopes(simd, cap, scores, &mut slopes[at..][..PAGE]);
                }
                scores[..slots[row].start].fill(f32::NEG_INFINITY);
                scores[slots[row].end..].fill(f32::NEG_INFINITY);
                largest(simd, scores, &mut max[first + row]);
            }
        }
    }
    // With the maximum of all pages known, each score takes one exponential.
    for weights in weights.chunks_exact_mut(rows * PAGE) {
        for (row, weights) in weights.chunks_exact_mut(PAGE).enumerate() {
            let max = simd.splat(max[row]);
            let mut added = simd.splat(0.0);
            for weight in S::chunks_mut(weights).0 {
                let exp = exp_not_above_one(simd, simd.sub(simd.load(weight), max));
                added = simd.add(added, exp);
                simd.store(exp, weight);
            }
            sum[row] += simd.reduce(added);
        }
    }
}

/// Moves `max` up to the largest of whole vectors of scores.
#[inline(always)]
fn largest<S: Simd>(simd: S, scores: &[f32], max: &mut f32) {
    let mut largest = simd.splat(f32::NEG_INFINITY);
    for score in S::chunks(scores).0 {
        largest = simd.max(largest, simd.load(score));
    }
    let mut lanes = [f32::NEG_INFINITY; 16];
    simd.store(largest, &mut S::chunks_mut(&mut lanes).0[0]);
    for lane in &lanes[..S::LANES] {
        *max = max.max(*lane);
    }
}

/// `1 - (s / cap)²` of capped scores: the slope of the cap, within 1e-6.
#[inline(always)]
fn cap_slopes<S: Simd>(simd: S, cap: f32, scores: &[f32], slopes: &mut [f32]) {
    for (score, slope) in S::chunks(scores).0.iter().zip(S::chunks_mut(slopes).0) {
        let tanh = simd.mul(simd.load(score), simd.splat(1.0 / cap));
        simd.store(simd.sub(simd.splat(1.0), simd.mul(tanh, tanh)), slope);
    }
}

/// Turns a page's exponentials into p, and fills `ds`.
#[inline(always)]
fn score_gradients<S: Simd>(
    simd: S,
    task: &Task<'_>,
    block: &Block,
    page: usize,
    scratch: &mut Scratch,
) {
    // Where the page's weights lie among those of the block's pages.
    let (rows, d_v) = (block.rows(), task.values.width());
    let (start, padded) = (page * PAGE, d_v.next_multiple_of(PAGE));
    let at = (page - block.pages().start) * rows * PAGE;
    let Scratch { dout_left, values_t, weights, slopes, ds, sum, delta, .. } = scratch;
    let weights = &mut weights[at..][..rows * PAGE];
    let values = &values_t[start * d_v..][..PAGE * d_v];
    for first in (0..rows).step_by(TILE) {
        let count = TILE.min(rows - first);
        let slots = block.tile_slots(first, count, start);
        let dout = &dout_left[first * padded..][..count * padded];
        let ds = &mut ds[first * PAGE..][..count * PAGE];
        // dout·v `[count, 64]`, by the micro-kernel of scores with values in place of keys.
        let values = Elements::<S, F32>::new(S::chunks(values), d_v);
        let seen = score_tile(simd, d_v, dout, values, &slots[..count], ds);
        for row in 0..count {
            let ds = &mut ds[row * PAGE..][..PAGE];
            let (inverse, delta) =
                (simd.splat(1.0 / sum[first + row]), simd.splat(delta[first + row]));
            let weights = &mut weights[(first + row) * PAGE..][..PAGE][seen.clone()];
            for (weight, ds) in
                S::chunks_mut(weights).0.iter_mut().zip(S::chunks_mut(&mut ds[seen.clone()]).0)
            {
                // p = exp / sum, and ds = p (dout·v - delta).
                let p = simd.mul(simd.load(weight), inverse);
                simd.store(p, weight);
                simd.store(simd.mul(p, simd.sub(simd.load(ds), delta)), ds);
            }
            // Through the softcap: its slope at each score.
            if task.kernel.softcap.is_some() {
                let slopes = &slopes[at + (first + row) * PAGE..][..PAGE][seen.clone()];
                for (slope, ds) in
                    S::chunks(slopes).0.iter().zip(S::chunks_mut(&mut ds[seen.clone()]).0)
                {
                    simd.store(simd.mul(simd.load(slope), simd.load(ds)), ds);
                }
            }
            // What the row does not see gives nothing to dk, dv or dq.
            ds[..slots[row].start].fill(0.0);
            ds[slots[row].end..].fill(0.0);
        }
    }
}

/// Adds what a page gives to dq, and what a block gives to the page's dk and dv.
#[inline(always)]
fn add_page<S: Simd>(simd: S, task: &Task<'_>, block: &Block, page: usize, scratch: &mut Scratch) {
    let (rows, start) = (block.rows(), page * PAGE);
    let padded_k = task.keys.width().next_multiple_of(2 * S::LANES);
    let padded_v = task.values.width().next_multiple_of(2 * S::LANES);
    let at = (page - block.pages().start) * rows * PAGE;
    let Scratch { q_right, dout_right, keys, dk, dv, dq, weights, ds, .. } = scratch;
    let weights = &weights[at..][..rows * PAGE];
    // dv += pᵀ dout and dk += dsᵀ q, `[64, d]` each; then dq += ds k.
    let dv = &mut dv[start * padded_v..][..PAGE * padded_v];
    add_transposed(simd, block, start, weights, dout_right, dv);
    let dk = &mut dk[start * padded_k..][..PAGE * padded_k];
    add_transposed(simd, block, start, ds, q_right, dk);
    let keys = &keys[start * padded_k..][..PAGE * padded_k];
    for first in (0..rows).step_by(TILE) {
        let count = TILE.min(rows - first);
        let slots = block.tile_slots(first, count, start);
        let ds = &ds[first * PAGE..][..count * PAGE];
        let dq = &mut dq[first * padded_k..][..count * padded_k];
        let keys = Elements::<S, F32>::new(S::chunks(keys), PAGE);
        value_tile(simd, ds, keys, &slots[..count], dq);
    }
}

/// Adds `leftᵀ right` to the panels of the page that starts at position `start`: `left` is `[rows, 64]`,
/// zero where a row does not see a position, `right` `[d / W][rows, W]` and `to` `[d / W][64, W]`.
#[inline(always)]
fn add_transposed<S: Simd>(
    simd: S,
    block: &Block,
    start: usize,
    left: &[f32],
    right: &[f32],
    to: &mut [f32],
) {
    // Panels of two vectors: `right` gives rows of them, `to` has a page of them.
    let left = left.as_chunks::<PAGE>().0;
    let right = S::chunks(right).0.as_chunks::<2>().0;
    let to = S::chunks_mut(to).0.as_chunks_mut::<2>().0;
    for (right, to) in right.chunks_exact(block.rows()).zip(to.chunks_exact_mut(PAGE)) {
        for slot in (0..PAGE).step_by(TILE) {
            let count = TILE.min(PAGE - slot);
            // Only rows that see any of the six positions; the others' weights are zeros.
            let rows = block.seeing(start + slot, count);
            let (left, right) = (&left[rows.clone()], &right[rows]);
            let to = &mut to[slot..][..count];
            if count == TILE {
                transposed_tile::<S, TILE>(simd, left, slot, right, to);
            } else {
                transposed_tile::<S, { PAGE % TILE }>(simd, left, slot, right, to);
            }
        }
    }
}

/// The micro-kernel: `to[i] += sum over k of left[k][slot + i] * right[k]`, in the order of k.
#[inline(always)]
fn transposed_tile<S: Simd, const R: usize>(
    simd: S,
    left: &[[f32; PAGE]],
    slot: usize,
    right: &[[S::Chunk; 2]],
    to: &mut [[S::Chunk; 2]],
) {
    // One check of bounds before the loop.
    assert!(slot + R <= PAGE);
    let to = &mut to[..R];
    // Six positions by two vectors: 12 accumulators, as in the forward's micro-kernel.
    let mut acc = [[simd.splat(0.0); 2]; R];
    for i in 0..R {
        acc[i] = [simd.load(&to[i][0]), simd.load(&to[i][1])];
    }
    for (left, right) in left.iter().zip(right) {
        let left = &left[slot..slot + R];
        let (r0, r1) = (simd.load(&right[0]), simd.load(&right[1]));
        for i in 0..R {
            let left = simd.splat(left[i]);
            acc[i][0] = simd.mul_add(left, r0, acc[i][0]);
            acc[i][1] = simd.mul_add(left, r1, acc[i][1]);
        }
    }
    for i in 0..R {
        simd.store(acc[i][0], &mut to[i][0]);
        simd.store(acc[i][1], &mut to[i][1]);
    }
}
