//! Causal attention over a cache of keys and values that each sequence keeps.
//!
//! ```text
//! s[i, j] = scale q[i]·k[j]                         then cap tanh(s / cap) if there is a softcap
//! out[i]  = sum over j of softmax(s[i, ..])[j] v[j]     j <= i, and i - j < window if there is one
//! ```
//!
//! with i and j positions of one sequence. Query head h uses KV head h / (H / Hk): grouped-query
//! attention, of which multi-head (Hk = H) and multi-query (Hk = 1) attention are the ends.
//!
//! | letter | dimension | word |
//! |---|---|---|
//! | T | tokens of all runs | |
//! | L | positions of a sequence | |
//! | H | query heads | `nheads` |
//! | Hk | heads of keys and values, divides H | `nheads_kv` |
//! | | width of a head's keys and values | `d_k`, `d_v` |
//!
//! What differs from the formula, and why:
//!
//! 1. The softmax is computed online, page by page of the cache, so no L x L matrix exists
//!    (*FlashAttention*, arXiv 2205.14135, algorithm 1). Pages that no query of a block sees are
//!    skipped.
//! 2. Keys lie with neighbouring positions in a vector, so scores need no sums across lanes; values
//!    with neighbouring channels. Both products run in one micro-kernel of up to six queries.
//! 3. Long contexts are computed by segments of 1024 positions, each from scratch, and combined at the
//!    end. Segments of a single token's query run in parallel.
//! 4. Tokens of this call are read back from the cache, so what a query sees of a token does not depend
//!    on the call in which that token came.
//!
//! Pages and segments lie at fixed positions, and each query sums its own positions in their order. So
//! its result has the same bits for any cut of the sequence into calls, in any batch, on any number of
//! threads. No query reads a key or value that it must not see.
//!
//! [`latent_attention`] is multi-head latent attention over a cache of compressed keys;
//! [`attention_reference`] and [`latent_attention_reference`] are the definitions.
//! [`attention_backward`] computes gradients, and [`attention_backward_reference`] is its definition;
//! [`latent_attention_backward`] computes those of latent attention, which tests compare with slopes.

mod backward;
mod backward_reference;
#[cfg(test)]
mod backward_tests;
mod cache;
mod mla;
mod mla_backward;
mod online;
mod page;
mod reference;
#[cfg(test)]
mod tests;

pub use backward::{AttentionGradients, AttentionInput, attention_backward};
pub use backward_reference::attention_backward_reference;
pub use cache::KvCache;
pub use mla::{LatentAttention, LatentInput, latent_attention, latent_attention_reference};
pub use mla_backward::{LatentGradients, latent_attention_backward};
pub use page::{KvType, PAGE};
pub use reference::attention_reference;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::parallel;
use crate::rows::{Rows, column_blocks};
use crate::simd::Level;
use online::{Online, Queries, Scratch, TILE, attend_segment};

/// Queries that meet a page while it is in the cache of the processor: as many tokens as make about this many.
const BLOCK_ROWS: usize = 48;
/// Positions of a segment, whole pages: long enough that putting segments together costs little.
const SEGMENT: usize = 1024;
/// Picoseconds of an element of a key or a value: to read it, and for each query.
const COST: usize = 50;

/// What [`attention`] computes, but for the sizes that its cache knows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention {
    /// The instruction set, which is that of the caches.
    pub level: Level,
    /// H, a multiple of the cache's Hk
    pub nheads: usize,
    /// Factor of the scores, usually `d_k^-0.5`.
    pub scale: f32,
    /// A token sees itself and those before it, this many in all; at least 1.
    pub window: Option<usize>,
    /// Scores become `cap * tanh(score / cap)`; above 0.
    pub softcap: Option<f32>,
}

/// Appends the keys and values of each run to its cache and attends from each token to all before it.
///
/// | argument | shape | meaning |
/// |---|---|---|
/// | `q` | `[T, H * d_k]` | queries |
/// | `k` | `[T, Hk * d_k]` | keys |
/// | `v` | `[T, Hk * d_v]` | values |
/// | `runs` | lengths, sum T | tokens of each sequence; may be 0 |
/// | `caches` | one for each run | what came before; the run is appended |
/// | `out` | `[T, H * d_v]` | overwritten |
///
/// ```
/// use boostr_kernels::{Level, Rows};
/// use boostr_kernels::attention::{Attention, KvCache, KvType, attention};
/// let level = Level::detect();
/// let kernel = Attention { level, nheads: 1, scale: 1.0, window: None, softcap: None };
/// let mut cache = KvCache::new(level, 1, 1, 1, KvType::F32);
/// let (q, k, v) = ([0.0, 0.0], [1.0, 2.0], [3.0, 5.0]);
/// let rows = |x| Rows::dense(x, 1);
/// let mut out = [0.0; 2];
/// attention(&kernel, rows(&q), rows(&k), rows(&v), &[2], &mut [&mut cache], &mut out);
/// assert_eq!(out, [3.0, 4.0]); // equal scores: means of the values so far
/// assert_eq!(cache.len(), 2);
/// ```
///
/// # Panics
///
/// If the lengths disagree, or a query sees a position that its cache was told to forget.
#[track_caller]
pub fn attention(
    kernel: &Attention,
    q: Rows<'_>,
    k: Rows<'_>,
    v: Rows<'_>,
    runs: &[usize],
    caches: &mut [&mut KvCache],
    out: &mut [f32],
) {
    assert_eq!(runs.iter().sum::<usize>(), q.len(), "runs");
    assert_eq!(k.len(), q.len(), "k");
    assert_eq!(v.len(), q.len(), "v");
    assert_eq!(caches.len(), runs.len(), "caches");
    let mut first = 0;
    for (&len, cache) in runs.iter().zip(caches.iter_mut()) {
        cache.append(k.slice(first, len), v.slice(first, len));
        first += len;
    }
    let caches: Vec<&KvCache> = caches.iter().map(|cache| &**cache).collect();
    attend(kernel, q, runs, &caches, out);
}

/// Queries of a block of tokens, and where their outputs go: the columns of their heads, for each token.
struct Task<'a> {
    queries: Queries<'a>,
    out: Vec<&'a mut [f32]>,
}

/// Attends from the last tokens of each cache: those of its run.
#[track_caller]
fn attend(kernel: &Attention, q: Rows<'_>, runs: &[usize], caches: &[&KvCache], out: &mut [f32]) {
    let Some(cache) = caches.first() else { return };
    let (nheads_kv, d_k, d_v) = cache.dims();
    assert!(caches.iter().all(|c| c.dims() == (nheads_kv, d_k, d_v)), "caches: of unequal sizes");
    let level = kernel.level;
    assert!(caches.iter().all(|c| c.layout().level == level), "caches: not all of level {level}");
    let nheads = kernel.nheads;
    assert!(
        nheads > 0 && nheads.is_multiple_of(nheads_kv),
        "nheads: not a multiple of {nheads_kv}"
    );
    assert!(kernel.window != Some(0), "window");
    assert!(kernel.softcap.is_none_or(|cap| cap > 0.0), "softcap");
    assert_eq!(q.width(), nheads * d_k, "q");
    assert_eq!(out.len(), q.len() * nheads * d_v, "out");

    let heads_per_group = nheads / nheads_kv;
    let block = (BLOCK_ROWS / heads_per_group).max(1);
    let first_seen =
        |position: usize| kernel.window.map_or(0, |window| (position + 1).saturating_sub(window));
    let threads = rayon::current_num_threads();
    // Few queries read more than they compute: then a task has as many heads, which are neighbours in
    // memory, as leave something for every thread.
    let mut heads = 1;
    if runs.iter().all(|len| len * heads_per_group <= TILE) {
        let segments =
            runs.iter().zip(caches).filter(|(len, _)| **len > 0).map(|(len, cache)| {
                (cache.len() - first_seen(cache.len() - len)).div_ceil(SEGMENT)
            });
        heads = (segments.sum::<usize>() * nheads_kv / (2 * threads)).clamp(1, nheads_kv);
    }
    let mut tasks = Vec::new();
    let (mut done, mut rest) = (0, out);
    for (&len, &cache) in runs.iter().zip(caches) {
        let (out, after) = rest.split_at_mut(len * nheads * d_v);
        rest = after;
        let q = q.slice(done, len);
        done += len;
        let before = cache.len() - len;
        for (i, out) in out.chunks_mut(block * nheads * d_v).enumerate() {
            let tokens = out.len() / (nheads * d_v);
            let first = before + i * block;
            let seen = first_seen(first);
            assert!(
                seen >= cache.first(),
                "caches: positions before {} are forgotten, {seen} is seen",
                cache.first()
            );
            let columns = column_blocks(out, nheads * d_v, heads * heads_per_group * d_v);
            tasks.extend(columns.into_iter().enumerate().map(|(i_heads, out)| {
                let heads = i_heads * heads..nheads_kv.min((i_heads + 1) * heads);
                let width = heads_per_group * d_k;
                let q = q.slice(i * block, tokens);
                let q = q.columns(heads.start * width, heads.len() * width);
                Task { queries: Queries { kernel: *kernel, cache, heads, q, first, seen }, out }
            }));
        }
    }
    let ns = tasks.iter().map(Task::ns).sum();
    if tasks.len() >= parallel::PIECES * threads
        || tasks.iter().all(|task| task.segments().len() < 2)
    {
        return parallel::for_each(tasks, ns, Default::default, |(scratch, part), task| {
            let mut total = task.nothing();
            for segment in task.segments() {
                attend_segment(level, &task.queries, positions(segment), scratch, part);
                total.add(part);
            }
            task.write(&total);
        });
    }
    // Tasks are too few for the threads: their segments go one by one.
    let tasks: Vec<Parted<'_>> = tasks.into_iter().map(Parted::new).collect();
    let segments = tasks.iter().flat_map(|task| (0..task.parts.len()).map(move |i| (task, i)));
    parallel::for_each(segments.collect(), ns, Default::default, |scratch, (task, i)| {
        task.run(level, i, scratch);
    });
}

/// The positions of a segment.
fn positions(segment: usize) -> Range<usize> {
    segment * SEGMENT..(segment + 1) * SEGMENT
}

impl Task<'_> {
    /// The segments that hold what its queries see.
    fn segments(&self) -> Range<usize> {
        let end = self.queries.first + self.out.len();
        self.queries.seen / SEGMENT..end.div_ceil(SEGMENT)
    }

    /// Nanoseconds that it takes one core, about.
    fn ns(&self) -> usize {
        let queries = &self.queries;
        let (_, d_k, d_v) = queries.cache.dims();
        let keys = queries.first + self.out.len() - queries.seen;
        (queries.heads.len() + queries.rows()) * keys * (d_k + d_v) * COST / 1000
    }

    /// What its queries have of no segment.
    fn nothing(&self) -> Online {
        let mut total = Online::default();
        total.reset(self.queries.rows(), self.queries.cache.layout().padded_d_v());
        total
    }

    fn write(self, total: &Online) {
        let (_, _, d_v) = self.queries.cache.dims();
        for (token, out) in self.out.into_iter().enumerate() {
            for (head, out) in out.chunks_exact_mut(d_v).enumerate() {
                total.write(self.queries.row(token, head), out);
            }
        }
    }
}

/// A task whose segments are computed apart; whoever has the last adds them all, in their order.
struct Parted<'a> {
    queries: Queries<'a>,
    out: Mutex<Vec<&'a mut [f32]>>,
    first: usize,
    parts: Vec<Mutex<Online>>,
    left: AtomicUsize,
}

impl<'a> Parted<'a> {
    fn new(task: Task<'a>) -> Self {
        let segments = task.segments();
        Self {
            first: segments.start,
            parts: segments.clone().map(|_| Mutex::default()).collect(),
            left: AtomicUsize::new(segments.len()),
            queries: task.queries,
            out: Mutex::new(task.out),
        }
    }

    /// Attends to segment `i` of its own.
    fn run(&self, level: Level, i: usize, scratch: &mut Scratch) {
        let mut part = Online::default();
        attend_segment(level, &self.queries, positions(self.first + i), scratch, &mut part);
        *self.parts[i].lock().unwrap_or_else(PoisonError::into_inner) = part;
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
            let task = Task { queries: self.queries.clone(), out: std::mem::take(&mut *out) };
            let mut total = task.nothing();
            for part in &self.parts {
                total.add(&part.lock().unwrap_or_else(PoisonError::into_inner));
            }
            task.write(&total);
        }
    }
}
