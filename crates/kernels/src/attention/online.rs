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
//! A page is read twice. First its keys meet every query of the block, six at a time, then its values.
//! Positions that a query must not see get a weight of 0, and their values are not read for it. If the
//! queries of a tile see different ends of a page, those ends are added query by query.

use std::ops::Range;

use super::Attention;
use super::cache::KvCache;
use super::page::{Buffers, PAGE, Page, Stored, with_keys, with_panels, with_values};
use super::panels::{Bf16, Code, Elements, F16, F32, PanelRows, Panels, ScaledKeys, ScaledValues};
use crate::math::exp_lanes;
use crate::rows::Rows;
use crate::simd::{Simd, Step, dispatch};

/// Queries of the micro-kernel.
pub(super) const TILE: usize = 6;

/// Queries of neighbouring tokens that use the same KV heads.
#[derive(Clone)]
pub(super) struct Queries<'a> {
    pub kernel: Attention,
    pub cache: &'a KvCache,
    /// The KV heads.
    pub heads: Range<usize>,
    /// `[tokens, heads, H / Hk, d_k]`
    pub q: Rows<'a>,
    /// Position of the first token.
    pub first: usize,
    /// The first position that any of them sees.
    pub seen: usize,
}

impl Queries<'_> {
    /// H / Hk
    #[inline(always)]
    fn heads_per_group(&self) -> usize {
        self.q.width() / self.cache.layout().d_k / self.heads.len()
    }

    /// Number of queries.
    pub(super) fn rows(&self) -> usize {
        self.q.len() * self.q.width() / self.cache.layout().d_k
    }

    /// The row of a query head of a token: `[heads, tokens, H / Hk]`.
    #[inline(always)]
    pub(super) fn row(&self, token: usize, head: usize) -> usize {
        let group = self.heads_per_group();
        (head / group * self.q.len() + token) * group + head % group
    }

    /// The slots of the page that starts at position `start` which a token sees.
    #[inline(always)]
    fn slots(&self, token: usize, start: usize) -> Range<usize> {
        let end = self.first + token + 1;
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
            // Both sides are brought to the larger maximum, then added.
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
    /// Scaled queries, in tiles: see [`pack`].
    q: Vec<f32>,
    /// Scores of one KV head, then weights: `[rows, 64]`.
    weights: Vec<f32>,
    /// Panels that many queries share, as floats.
    panels: Vec<f32>,
    buffers: Buffers,
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
    online.reset(queries.rows(), layout.padded_d_v());
    pack(queries, &mut scratch.q);
    // Of the segment, the positions from the first that any query sees to the last token's own.
    let from = positions.start.max(queries.seen);
    let to = positions.end.min(queries.first + queries.q.len());
    for (start, page) in cache.pages(from, to) {
        for head in queries.heads.clone() {
            attend_page(simd, queries, head, (start, page), scratch, online);
        }
    }
}

/// Packs scaled queries: for each KV head tiles of at most six rows, each `[d_k / 64, count, 64]`.
#[inline(always)]
fn pack(queries: &Queries<'_>, q: &mut Vec<f32>) {
    let d_k = queries.cache.layout().d_k;
    let padded = d_k.next_multiple_of(PAGE);
    let rows = queries.rows() / queries.heads.len();
    q.resize(queries.rows() * padded, 0.0);
    for token in 0..queries.q.len() {
        for (head, from) in queries.q.row(token).chunks_exact(d_k).enumerate() {
            let row = queries.row(token, head);
            // A row's place in its tile; the last tile of a head may have fewer than six rows.
            let in_tile = row % rows % TILE;
            let first = row - in_tile;
            let count = TILE.min(rows - first % rows);
            let tile = &mut q[first * padded..][..count * padded];
            for (block, from) in tile.chunks_exact_mut(count * PAGE).zip(from.chunks(PAGE)) {
                for (to, x) in block[in_tile * PAGE..].iter_mut().zip(from) {
                    *to = x * queries.kernel.scale;
                }
            }
        }
    }
}

/// Moves the queries of one KV head on by a page.
#[inline(always)]
fn attend_page<S: Simd>(
    simd: S,
    queries: &Queries<'_>,
    head: usize,
    (start, page): (usize, &Page),
    scratch: &mut Scratch,
    online: &mut Online,
) {
    let layout = queries.cache.layout();
    let rows = queries.q.len() * queries.heads_per_group();
    let Scratch { q, weights, panels, buffers } = scratch;
    weights.resize(rows * PAGE, 0.0);
    let block = Block { queries, start, rows, top: (head - queries.heads.start) * rows };
    // First pass, keys: every weight of the page. Several tiles share floats that are made once.
    let mut keys = page.keys(layout, head);
    if rows > TILE {
        keys = keys.widened(simd, panels);
    }
    let block = &block;
    with_keys!(S, keys, layout.d_k, keys => simd.apart(Weigh { block, keys, q, weights, online }));
    // Second pass, values: outputs `[rows, d_v]`.
    let mut values = page.values(simd, layout, head, buffers);
    if rows > TILE {
        values = values.widened(simd, panels);
    }
    with_values!(S, values, values => simd.apart(AddValues { block, values, weights, online }));
}

/// [`Block::weigh`] of one type of keys.
struct Weigh<'a, K> {
    block: &'a Block<'a>,
    keys: K,
    q: &'a [f32],
    weights: &'a mut [f32],
    online: &'a mut Online,
}

impl<S: Simd, K: Panels<S>> Step<S> for Weigh<'_, K> {
    #[inline(always)]
    fn run(self, simd: S) {
        self.block.weigh(simd, self.keys, self.q, self.weights, self.online);
    }
}

/// [`Block::add_values`] of one type of values.
struct AddValues<'a, V> {
    block: &'a Block<'a>,
    values: V,
    weights: &'a [f32],
    online: &'a mut Online,
}

impl<S: Simd, V: Panels<S>> Step<S> for AddValues<'_, V> {
    #[inline(always)]
    fn run(self, simd: S) {
        self.block.add_values(simd, self.values, self.weights, self.online);
    }
}

/// The queries of one KV head before one page.
struct Block<'a> {
    queries: &'a Queries<'a>,
    /// The first position of the page.
    start: usize,
    /// How many queries there are, and the first of them among those of all heads.
    rows: usize,
    top: usize,
}

impl Block<'_> {
    /// The slots that each query of a tile sees, and how many queries it has.
    #[inline(always)]
    fn tile_slots(&self, first: usize) -> ([Range<usize>; TILE], usize) {
        let (group, count) = (self.queries.heads_per_group(), TILE.min(self.rows - first));
        let mut slots = [const { 0..0 }; TILE];
        for row in 0..count {
            slots[row] = self.queries.slots((first + row) / group, self.start);
        }
        (slots, count)
    }

    /// Fills `weights` `[rows, 64]`, six queries at a time against all 64 positions, and moves their m, l and o on but
    /// for the values.
    #[inline(always)]
    fn weigh<S: Simd, K: Panels<S>>(
        &self,
        simd: S,
        keys: K,
        q: &[f32],
        weights: &mut [f32],
        online: &mut Online,
    ) {
        let layout = self.queries.cache.layout();
        let (d_k, width) = (layout.d_k, layout.padded_d_v());
        let padded = d_k.next_multiple_of(PAGE);
        for first in (0..self.rows).step_by(TILE) {
            let (slots, count) = self.tile_slots(first);
            // The tile's scaled queries, and its rows of scores.
            let q = &q[(self.top + first) * padded..][..count * padded];
            let weights = &mut weights[first * PAGE..][..count * PAGE];
            let seen = score_tile(simd, d_k, q, keys, &slots[..count], weights);
            for row in 0..count {
                if slots[row].is_empty() {
                    continue;
                }
                let weights = &mut weights[row * PAGE..][..PAGE];
                // The softcap comes before the mask, so that masked scores stay -infinity.
                if let Some(cap) = self.queries.kernel.softcap {
                    cap_scores(simd, cap, &mut weights[seen.clone()]);
                }
                // What another query of the tile sees and this one does not.
                weights[seen.start..slots[row].start].fill(f32::NEG_INFINITY);
                weights[slots[row].end..seen.end].fill(f32::NEG_INFINITY);
                let row = self.top + first + row;
                let (max, sum) = (&mut online.max[row], &mut online.sum[row]);
                let out = &mut online.out[row * width..][..width];
                softmax_step(simd, &mut weights[seen.clone()], max, sum, out);
            }
        }
    }

    /// Adds the weighted values of the page to the queries' outputs.
    #[inline(always)]
    fn add_values<S: Simd, V: Panels<S>>(
        &self,
        simd: S,
        values: V,
        weights: &[f32],
        online: &mut Online,
    ) {
        let width = online.width;
        for first in (0..self.rows).step_by(TILE) {
            let (slots, count) = self.tile_slots(first);
            let weights = &weights[first * PAGE..][..count * PAGE];
            let out = &mut online.out[(self.top + first) * width..][..count * width];
            value_tile(simd, weights, values, &slots[..count], out);
        }
    }
}

/// Scores of a tile of queries; returns the slots, whole panels, that were computed.
#[inline(always)]
pub(super) fn score_tile<S: Simd, K: Panels<S>>(
    simd: S,
    d_k: usize,
    q: &[f32],
    keys: K,
    slots: &[Range<usize>],
    scores: &mut [f32],
) -> Range<usize> {
    let width = 2 * S::LANES;
    // The slots that any query of the tile sees.
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
    // Keys lie in panels of two vectors of positions.
    let panels = first / width..end.div_ceil(width);
    match slots.len() {
        1 => score_panels::<S, K, 1>(simd, d_k, q, keys, panels.clone(), scores),
        2 => score_panels::<S, K, 2>(simd, d_k, q, keys, panels.clone(), scores),
        3 => score_panels::<S, K, 3>(simd, d_k, q, keys, panels.clone(), scores),
        4 => score_panels::<S, K, 4>(simd, d_k, q, keys, panels.clone(), scores),
        5 => score_panels::<S, K, 5>(simd, d_k, q, keys, panels.clone(), scores),
        _ => score_panels::<S, K, 6>(simd, d_k, q, keys, panels.clone(), scores),
    }
    panels.start * width..panels.end * width
}

/// Scores of `R` queries with the positions of `panels`.
///
/// One panel at a time: memory is then read from one end to the other, and the processor sees it coming.
#[inline(always)]
fn score_panels<S: Simd, K: Panels<S>, const R: usize>(
    simd: S,
    d_k: usize,
    q: &[f32],
    keys: K,
    panels: Range<usize>,
    scores: &mut [f32],
) {
    let scores = S::chunks_mut(scores).0.as_chunks_mut::<2>().0;
    let page = PAGE / (2 * S::LANES);
    for panel in panels {
        // R queries x two vectors of positions, along d_k in blocks of 64 channels.
        let mut acc = [[simd.splat(0.0); 2]; R];
        for (block, q) in q.chunks_exact(R * PAGE).enumerate() {
            let channels = block * PAGE..d_k.min((block + 1) * PAGE);
            for first in channels.clone().step_by(K::SPAN) {
                let rows = keys.rows(panel, first..channels.end.min(first + K::SPAN));
                let at = first - channels.start;
                let Some(scales) = keys.lane_scales(simd, panel, first) else {
                    acc = add_product(simd, acc, q, at, rows);
                    continue;
                };
                let part = add_product(simd, [[simd.splat(0.0); 2]; R], q, at, rows);
                for r in 0..R {
                    for i in 0..2 {
                        acc[r][i] = simd.mul_add(scales[i], part[r][i], acc[r][i]);
                    }
                }
            }
        }
        for r in 0..R {
            let to = &mut scores[r * page + panel];
            simd.store(acc[r][0], &mut to[0]);
            simd.store(acc[r][1], &mut to[1]);
        }
    }
}

/// `cap * tanh(x / cap)`, within 3e-7 of `cap`.
#[inline(always)]
pub(super) fn cap_scores<S: Simd>(simd: S, cap: f32, x: &mut [f32]) {
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
fn softmax_step<S: Simd>(simd: S, x: &mut [f32], max: &mut f32, sum: &mut f32, out: &mut [f32]) {
    let x = S::chunks_mut(x).0;
    // The new maximum: over the page's scores and what came before.
    let mut largest = simd.splat(f32::NEG_INFINITY);
    for x in &*x {
        largest = simd.max(largest, simd.load(x));
    }
    let mut lanes = [f32::NEG_INFINITY; 16];
    simd.store(largest, &mut S::chunks_mut(&mut lanes).0[0]);
    let mut half = S::LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = lanes[i].max(lanes[i + half]);
        }
        half /= 2;
    }
    let new = max.max(lanes[0]);
    // Where all scores are -infinity, any finite number serves.
    let finite = if new == f32::NEG_INFINITY { 0.0 } else { new };
    // Scores become weights exp(s - m'), and their sum is kept in lanes.
    let mut added = simd.splat(0.0);
    for x in x {
        let weight = exp_not_above_one(simd, simd.sub(simd.load(x), simd.splat(finite)));
        added = simd.add(added, weight);
        simd.store(weight, x);
    }
    // A larger maximum: what was summed before shrinks by exp(m - m').
    if new > *max {
        let scale = exp_not_above_one(simd, simd.splat(*max - finite));
        simd.store(scale, &mut S::chunks_mut(&mut lanes).0[0]);
        *sum *= lanes[0];
        for out in S::chunks_mut(out).0 {
            simd.store(simd.mul(simd.load(out), scale), out);
        }
        *max = new;
    }
    *sum += simd.reduce(added);
}

/// `exp` of numbers not above 0, within 3e-7 of the result; 0 below -87.7.
///
/// As [`exp_lanes`] but for what only other numbers need; the polynomial is fitted to |r| <= ln 2 / 2, within 1.1e-7.
#[inline(always)]
pub(super) fn exp_not_above_one<S: Simd>(simd: S, x: S::F) -> S::F {
    // At -88, n is -127, whose power of two comes out as 0; NaN passes, being the second operand.
    let x = simd.max(simd.splat(-88.0), x);
    let n = simd.round(simd.mul(x, simd.splat(std::f32::consts::LOG2_E)));
    let r = simd.mul_add(n, simd.splat(-355.0 / 512.0), x);
    let r = simd.mul_add(n, simd.splat(2.121_944_4e-4), r);
    let mut p = simd.splat(0.008_312_526);
    p = simd.mul_add(p, r, simd.splat(0.041_890_116));
    p = simd.mul_add(p, r, simd.splat(0.166_671_15));
    p = simd.mul_add(p, r, simd.splat(0.499_992_3));
    p = simd.mul_add(p, r, simd.splat(1.0));
    p = simd.mul_add(p, r, simd.splat(1.0));
    simd.mul(p, simd.exp2i(n))
}

/// Adds weighted values to the outputs `[count, width]` of at most six queries.
#[inline(always)]
pub(super) fn value_tile<S: Simd, V: Panels<S>>(
    simd: S,
    weights: &[f32],
    values: V,
    slots: &[Range<usize>],
    out: &mut [f32],
) {
    let width = out.len() / slots.len();
    // Slots first..end are common to the tile; what is before or after them differs by query.
    let (mut first, mut end) = (0, PAGE);
    for slots in slots {
        first = first.max(slots.start);
        end = end.min(slots.end);
    }
    end = end.max(first);
    let rows = weights.chunks_exact(PAGE).zip(out.chunks_exact_mut(width)).zip(slots);
    for ((weights, out), slots) in rows {
        // Before the common slots: a window that starts earlier for the first queries.
        let slots = slots.start..slots.end.min(first);
        if !slots.is_empty() {
            value_panels::<S, V, 1>(simd, weights, values, slots, out);
        }
    }
    // The common slots, with as many queries in registers as the tile has.
    if first < end {
        match slots.len() {
            1 => value_panels::<S, V, 1>(simd, weights, values, first..end, out),
            2 => value_panels::<S, V, 2>(simd, weights, values, first..end, out),
            3 => value_panels::<S, V, 3>(simd, weights, values, first..end, out),
            4 => value_panels::<S, V, 4>(simd, weights, values, first..end, out),
            5 => value_panels::<S, V, 5>(simd, weights, values, first..end, out),
            _ => value_panels::<S, V, 6>(simd, weights, values, first..end, out),
        }
    }
    let rows = weights.chunks_exact(PAGE).zip(out.chunks_exact_mut(width)).zip(slots);
    for ((weights, out), slots) in rows {
        // After them: later queries see more of the page.
        let slots = slots.start.max(end)..slots.end;
        if !slots.is_empty() {
            value_panels::<S, V, 1>(simd, weights, values, slots, out);
        }
    }
}

/// Adds the weighted values of `slots` to the outputs of `R` queries, one panel at a time.
#[inline(always)]
fn value_panels<S: Simd, V: Panels<S>, const R: usize>(
    simd: S,
    weights: &[f32],
    values: V,
    slots: Range<usize>,
    out: &mut [f32],
) {
    let out = S::chunks_mut(out).0.as_chunks_mut::<2>().0;
    let panels = out.len() / R;
    for panel in 0..panels {
        // The outputs so far stay in registers while the slots pass.
        let mut acc = [[simd.splat(0.0); 2]; R];
        for r in 0..R {
            let out = &out[r * panels + panel];
            acc[r] = [simd.load(&out[0]), simd.load(&out[1])];
        }
        let rows = values.rows(panel, slots.clone());
        acc = match values.row_scales(panel) {
            None => add_product(simd, acc, weights, slots.start, rows),
            Some(scales) => {
                let weights = scaled::<S, R>(simd, weights, scales);
                add_product(simd, acc, weights.as_flattened(), slots.start, rows)
            }
        };
        for r in 0..R {
            let out = &mut out[r * panels + panel];
            simd.store(acc[r][0], &mut out[0]);
            simd.store(acc[r][1], &mut out[1]);
        }
    }
}

/// Weights `[R, 64]` times the factors of their slots.
#[inline(always)]
fn scaled<S: Simd, const R: usize>(simd: S, weights: &[f32], scales: &[f32]) -> [[f32; PAGE]; R] {
    let mut scaled = [[0.0; PAGE]; R];
    for (to, weights) in scaled.iter_mut().zip(weights.chunks_exact(PAGE)) {
        let factors = S::chunks(weights).0.iter().zip(S::chunks(scales).0);
        for (to, (weights, scales)) in S::chunks_mut(to).0.iter_mut().zip(factors) {
            simd.store(simd.mul(simd.load(weights), simd.load(scales)), to);
        }
    }
    scaled
}

/// The micro-kernel: `acc[r] += sum over k of left[r][first + k] * right[k]`, in the order of k.
///
/// `left` is a `[R, 64]`: with rows at fixed distances one register addresses them all.
#[inline(always)]
fn add_product<S: Simd, W: PanelRows<S>, const R: usize>(
    simd: S,
    mut acc: [[S::F; 2]; R],
    left: &[f32],
    first: usize,
    right: W,
) -> [[S::F; 2]; R] {
    // One length, so that bounds are checked once.
    let len = right.len();
    let left = &left[..R * PAGE];
    let mut rows: [&[f32]; R] = [&[]; R];
    for r in 0..R {
        rows[r] = &left[r * PAGE..][..PAGE][first..][..len];
    }
    // For each k: two vectors of the right side, and R broadcast numbers of the left.
    for k in 0..len {
        let vectors = right.row(simd, k);
        for r in 0..R {
            let x = simd.splat(rows[r][k]);
            acc[r][0] = simd.mul_add(x, vectors[0], acc[r][0]);
            acc[r][1] = simd.mul_add(x, vectors[1], acc[r][1]);
        }
    }
    acc
}
