//! A block of queries against a segment of a cache, by online softmax, and putting segments together.
//!
//! Each query keeps the largest score m, the sum l of its weights and the weighted sum o of values; a
//! page with scores s and values v moves them on:
//!
//! ```text
//! m' = max(m, max s)      p = exp(s - m')
//! l' = exp(m - m') l + sum p
//! o' = exp(m - m') o + p v
//! ```
//!
//! A page is read twice: first its keys meet every query of the block, six at a time, then its values.
//! Positions that a query must not see get a weight of 0 and their values are not read for it: where
//! the queries of a tile see different ends of a page, those ends are added query by query.

use std::ops::Range;

use super::Attention;
use super::cache::KvCache;
use super::page::PAGE;
use crate::math::exp_lanes;
use crate::rows::Rows;
use crate::simd::{Simd, dispatch};

/// Queries of the micro-kernel.
const TILE: usize = 6;

/// Queries of neighbouring tokens that use one KV head.
pub(super) struct Queries<'a> {
    pub kernel: Attention,
    pub cache: &'a KvCache,
    /// The KV head.
    pub head: usize,
    /// `[tokens, H / Hk * d_k]`
    pub q: Rows<'a>,
    /// Position of the first token.
    pub first: usize,
    /// The first position that any of them sees.
    pub seen: usize,
}

impl Queries<'_> {
    fn heads(&self) -> usize {
        self.q.width() / self.cache.layout().d_k
    }

    /// Number of queries: those of a token are neighbours.
    pub(super) fn rows(&self) -> usize {
        self.q.len() * self.heads()
    }

    /// The slots that query `row` sees of the page that starts at position `start`.
    #[inline(always)]
    fn slots(&self, row: usize, start: usize, heads: usize) -> Range<usize> {
        let end = self.first + row / heads + 1;
        let first = self.kernel.window.map_or(0, |window| end.saturating_sub(window));
        first.saturating_sub(start).min(PAGE)..end.saturating_sub(start).min(PAGE)
    }
}

/// m, l and o of a block of queries.
#[derive(Default)]
pub(super) struct Online {
    max: Vec<f32>,
    sum: Vec<f32>,
    /// `[rows, width]`
    out: Vec<f32>,
    width: usize,
}

impl Online {
    /// Makes it that of `rows` queries that have seen nothing.
    pub(super) fn reset(&mut self, rows: usize, width: usize) {
        self.max.clear();
        self.max.resize(rows, f32::NEG_INFINITY);
        self.sum.clear();
        self.sum.resize(rows, 0.0);
        self.out.clear();
        self.out.resize(rows * width, 0.0);
        self.width = width;
    }

    /// Adds what the same queries have seen of later positions.
    pub(super) fn add(&mut self, later: &Self) {
        let rows = self.out.chunks_exact_mut(self.width).zip(later.out.chunks_exact(self.width));
        for (row, (out, later_out)) in rows.enumerate() {
            let max = self.max[row].max(later.max[row]);
            // With no score yet, or only -infinity, any finite number serves.
            let finite = if max == f32::NEG_INFINITY { 0.0 } else { max };
            let scale = (self.max[row] - finite).exp();
            let later_scale = (later.max[row] - finite).exp();
            self.max[row] = max;
            self.sum[row] = self.sum[row] * scale + later.sum[row] * later_scale;
            for (out, later) in out.iter_mut().zip(later_out) {
                *out = *out * scale + later * later_scale;
            }
        }
    }

    /// Writes the first channels of a query's output.
    pub(super) fn write(&self, row: usize, out: &mut [f32]) {
        let sum = self.sum[row];
        for (out, x) in out.iter_mut().zip(&self.out[row * self.width..]) {
            *out = x / sum;
        }
    }
}

/// Buffers of one worker.
#[derive(Default)]
pub(super) struct Scratch {
    /// Scaled queries `[rows, d_k]`.
    q: Vec<f32>,
    /// Scores, then weights: `[rows, 64]`.
    weights: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

dispatch! {
    pub(super) fn attend_segment = attend_segment_body(
        queries: &Queries<'_>, positions: Range<usize>, scratch: &mut Scratch, online: &mut Online,
    )
}

/// Fills `online` with what the queries see of `positions`, which are whole pages.
#[inline(always)]
fn attend_segment_body<S: Simd>(
    simd: S,
    queries: &Queries<'_>,
    positions: Range<usize>,
    scratch: &mut Scratch,
    online: &mut Online,
) {
    let (cache, layout) = (queries.cache, queries.cache.layout());
    let (d_k, rows, heads) = (layout.d_k, queries.rows(), queries.heads());
    let width = layout.padded_d_v();
    online.reset(rows, width);
    let Scratch { q, weights, keys, values } = scratch;
    q.clear();
    for token in 0..queries.q.len() {
        q.extend(queries.q.row(token).iter().map(|q| q * queries.kernel.scale));
    }
    weights.resize(rows * PAGE, 0.0);

    let from = positions.start.max(queries.seen);
    let to = positions.end.min(queries.first + queries.q.len());
    for (start, page) in cache.pages(from, to) {
        let keys = page.keys(simd, layout, queries.head, keys);
        for first in (0..rows).step_by(TILE) {
            let count = TILE.min(rows - first);
            let mut slots = [const { 0..0 }; TILE];
            for row in 0..count {
                slots[row] = queries.slots(first + row, start, heads);
            }
            let q = &q[first * d_k..][..count * d_k];
            let weights = &mut weights[first * PAGE..][..count * PAGE];
            let seen = score_tile(simd, q, keys, &slots[..count], weights);
            for row in 0..count {
                if slots[row].is_empty() {
                    continue;
                }
                let weights = &mut weights[row * PAGE..][..PAGE];
                let seen_weights = &mut weights[seen.clone()];
                if let Some(cap) = queries.kernel.softcap {
                    cap_scores(simd, cap, seen_weights);
                }
                weights[seen.start..slots[row].start].fill(f32::NEG_INFINITY);
                weights[slots[row].end..seen.end].fill(f32::NEG_INFINITY);
                let row = first + row;
                let (max, sum) = (&mut online.max[row], &mut online.sum[row]);
                let out = &mut online.out[row * width..][..width];
                soften(simd, &mut weights[seen.clone()], max, sum, out);
            }
        }
        let values = page.values(simd, layout, queries.head, keys, values);
        for first in (0..rows).step_by(TILE) {
            let count = TILE.min(rows - first);
            let mut slots = [const { 0..0 }; TILE];
            for row in 0..count {
                slots[row] = queries.slots(first + row, start, heads);
            }
            let weights = &weights[first * PAGE..][..count * PAGE];
            let out = &mut online.out[first * width..][..count * width];
            value_tile(simd, weights, values, &slots[..count], out);
        }
    }
}

/// Scores of at most six queries `[count, d_k]`; returns the slots, whole panels, that were computed.
#[inline(always)]
fn score_tile<S: Simd>(
    simd: S,
    q: &[f32],
    keys: &[f32],
    slots: &[Range<usize>],
    scores: &mut [f32],
) -> Range<usize> {
    let width = 2 * S::LANES;
    let (mut first, mut end) = (PAGE, 0);
    for slots in slots {
        if !slots.is_empty() {
            first = first.min(slots.start);
            end = end.max(slots.end);
        }
    }
    if first >= end {
        return 0..0;
    }
    let panels = first / width..end.div_ceil(width);
    match slots.len() {
        1 => score_panels::<S, 1, 4>(simd, q, keys, panels.clone(), scores),
        2 => score_panels::<S, 2, 2>(simd, q, keys, panels.clone(), scores),
        3 => score_panels::<S, 3, 2>(simd, q, keys, panels.clone(), scores),
        4 => score_panels::<S, 4, 1>(simd, q, keys, panels.clone(), scores),
        5 => score_panels::<S, 5, 1>(simd, q, keys, panels.clone(), scores),
        _ => score_panels::<S, 6, 1>(simd, q, keys, panels.clone(), scores),
    }
    panels.start * width..panels.end * width
}

/// Scores of `R` queries with the positions of `panels`, `P` panels at a time.
#[inline(always)]
fn score_panels<S: Simd, const R: usize, const P: usize>(
    simd: S,
    q: &[f32],
    keys: &[f32],
    panels: Range<usize>,
    scores: &mut [f32],
) {
    let d_k = q.len() / R;
    let mut rows: [&[f32]; R] = [&[]; R];
    for r in 0..R {
        rows[r] = &q[r * d_k..][..d_k];
    }
    let mut panel = panels.start;
    while panel + P <= panels.end {
        score_panel::<S, R, P>(simd, rows, keys, panel, scores);
        panel += P;
    }
    while panel < panels.end {
        score_panel::<S, R, 1>(simd, rows, keys, panel, scores);
        panel += 1;
    }
}

#[inline(always)]
fn score_panel<S: Simd, const R: usize, const P: usize>(
    simd: S,
    q: [&[f32]; R],
    keys: &[f32],
    panel: usize,
    scores: &mut [f32],
) {
    let d_k = q[0].len();
    let keys = S::chunks(keys).0.as_chunks::<2>().0;
    let mut right: [&[[S::Chunk; 2]]; P] = [&[]; P];
    for p in 0..P {
        right[p] = &keys[(panel + p) * d_k..][..d_k];
    }
    let acc = add_product(simd, [[[simd.splat(0.0); 2]; P]; R], q, right);
    let scores = S::chunks_mut(scores).0.as_chunks_mut::<2>().0;
    let page = PAGE / (2 * S::LANES);
    for r in 0..R {
        for p in 0..P {
            let to = &mut scores[r * page + panel + p];
            simd.store(acc[r][p][0], &mut to[0]);
            simd.store(acc[r][p][1], &mut to[1]);
        }
    }
}

/// `cap * tanh(x / cap)`, within 3e-7 of `cap`.
#[inline(always)]
fn cap_scores<S: Simd>(simd: S, cap: f32, x: &mut [f32]) {
    let (one, two) = (simd.splat(1.0), simd.splat(2.0));
    for x in S::chunks_mut(x).0 {
        // tanh(y) = 1 - 2 / (exp(2 y) + 1)
        let e = exp_lanes(simd, simd.mul(simd.load(x), simd.splat(2.0 / cap)));
        let tanh = simd.sub(one, simd.div(two, simd.add(e, one)));
        simd.store(simd.mul(tanh, simd.splat(cap)), x);
    }
}

/// Turns scores of one query, whole vectors, into weights, and moves its m, l and o on but for the values.
#[inline(always)]
fn soften<S: Simd>(simd: S, x: &mut [f32], max: &mut f32, sum: &mut f32, out: &mut [f32]) {
    let x = S::chunks_mut(x).0;
    let mut largest = simd.splat(f32::NEG_INFINITY);
    for x in &*x {
        largest = simd.max(largest, simd.load(x));
    }
    let mut lanes = [f32::NEG_INFINITY; 16];
    simd.store(largest, &mut S::chunks_mut(&mut lanes).0[0]);
    let mut new = *max;
    for lane in &lanes[..S::LANES] {
        new = new.max(*lane);
    }
    // Where all scores are -infinity, any finite number serves.
    let finite = if new == f32::NEG_INFINITY { 0.0 } else { new };
    let mut added = simd.splat(0.0);
    for x in x {
        let weight = exp_lanes(simd, simd.sub(simd.load(x), simd.splat(finite)));
        added = simd.add(added, weight);
        simd.store(weight, x);
    }
    if new > *max {
        let scale = exp_lanes(simd, simd.splat(*max - finite));
        simd.store(scale, &mut S::chunks_mut(&mut lanes).0[0]);
        *sum *= lanes[0];
        for out in S::chunks_mut(out).0 {
            simd.store(simd.mul(simd.load(out), scale), out);
        }
        *max = new;
    }
    *sum += simd.reduce(added);
}

/// Adds weighted values to the outputs `[count, width]` of at most six queries.
#[inline(always)]
fn value_tile<S: Simd>(
    simd: S,
    weights: &[f32],
    values: &[f32],
    slots: &[Range<usize>],
    out: &mut [f32],
) {
    let width = out.len() / slots.len();
    // What all of them see.
    let (mut first, mut end) = (0, PAGE);
    for slots in slots {
        first = first.max(slots.start);
        end = end.min(slots.end);
    }
    end = end.max(first);
    let rows = weights.chunks_exact(PAGE).zip(out.chunks_exact_mut(width)).zip(slots);
    for ((weights, out), slots) in rows {
        let slots = slots.start..slots.end.min(first);
        if !slots.is_empty() {
            value_panels::<S, 1, 4>(simd, weights, values, slots, out);
        }
    }
    if first < end {
        match slots.len() {
            1 => value_panels::<S, 1, 4>(simd, weights, values, first..end, out),
            2 => value_panels::<S, 2, 2>(simd, weights, values, first..end, out),
            3 => value_panels::<S, 3, 2>(simd, weights, values, first..end, out),
            4 => value_panels::<S, 4, 1>(simd, weights, values, first..end, out),
            5 => value_panels::<S, 5, 1>(simd, weights, values, first..end, out),
            _ => value_panels::<S, 6, 1>(simd, weights, values, first..end, out),
        }
    }
    let rows = weights.chunks_exact(PAGE).zip(out.chunks_exact_mut(width)).zip(slots);
    for ((weights, out), slots) in rows {
        let slots = slots.start.max(end)..slots.end;
        if !slots.is_empty() {
            value_panels::<S, 1, 4>(simd, weights, values, slots, out);
        }
    }
}

/// Adds the weighted values of `slots` to the outputs of `R` queries, `P` panels at a time.
#[inline(always)]
fn value_panels<S: Simd, const R: usize, const P: usize>(
    simd: S,
    weights: &[f32],
    values: &[f32],
    slots: Range<usize>,
    out: &mut [f32],
) {
    let panels = out.len() / R / (2 * S::LANES);
    let mut rows: [&[f32]; R] = [&[]; R];
    for r in 0..R {
        rows[r] = &weights[r * PAGE..][slots.clone()];
    }
    let mut panel = 0;
    while panel + P <= panels {
        value_panel::<S, R, P>(simd, rows, values, slots.start, panel, out);
        panel += P;
    }
    while panel < panels {
        value_panel::<S, R, 1>(simd, rows, values, slots.start, panel, out);
        panel += 1;
    }
}

#[inline(always)]
fn value_panel<S: Simd, const R: usize, const P: usize>(
    simd: S,
    weights: [&[f32]; R],
    values: &[f32],
    first: usize,
    panel: usize,
    out: &mut [f32],
) {
    let values = S::chunks(values).0.as_chunks::<2>().0;
    let out = S::chunks_mut(out).0.as_chunks_mut::<2>().0;
    let panels = out.len() / R;
    let mut right: [&[[S::Chunk; 2]]; P] = [&[]; P];
    for p in 0..P {
        right[p] = &values[(panel + p) * PAGE + first..][..weights[0].len()];
    }
    let mut acc = [[[simd.splat(0.0); 2]; P]; R];
    for r in 0..R {
        for p in 0..P {
            let out = &out[r * panels + panel + p];
            acc[r][p] = [simd.load(&out[0]), simd.load(&out[1])];
        }
    }
    let acc = add_product(simd, acc, weights, right);
    for r in 0..R {
        for p in 0..P {
            let out = &mut out[r * panels + panel + p];
            simd.store(acc[r][p][0], &mut out[0]);
            simd.store(acc[r][p][1], &mut out[1]);
        }
    }
}

/// The micro-kernel: `acc[r][p] += sum over k of left[r][k] * right[p][k]`, in the order of k.
#[inline(always)]
fn add_product<S: Simd, const R: usize, const P: usize>(
    simd: S,
    mut acc: [[[S::F; 2]; P]; R],
    left: [&[f32]; R],
    right: [&[[S::Chunk; 2]]; P],
) -> [[[S::F; 2]; P]; R] {
    // One length, so that bounds are checked once.
    let len = right[0].len();
    let (mut rows, mut panels) = (left, right);
    for r in 0..R {
        rows[r] = &left[r][..len];
    }
    for p in 0..P {
        panels[p] = &right[p][..len];
    }
    for k in 0..len {
        let mut vectors = [[simd.splat(0.0); 2]; P];
        for p in 0..P {
            vectors[p] = [simd.load(&panels[p][k][0]), simd.load(&panels[p][k][1])];
        }
        for r in 0..R {
            let x = simd.splat(rows[r][k]);
            for p in 0..P {
                acc[r][p][0] = simd.mul_add(x, vectors[p][0], acc[r][p][0]);
                acc[r][p][1] = simd.mul_add(x, vectors[p][1], acc[r][p][1]);
            }
        }
    }
    acc
}
