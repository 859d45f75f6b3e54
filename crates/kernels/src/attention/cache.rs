//! What attention remembers of a sequence: its keys and values, in pages that forks share.

use std::sync::Arc;

use super::page::{KvType, Layout, PAGE, Page, unpack};
use crate::parallel;
use crate::rows::Rows;
use crate::simd::Level;

/// Keys and values of the positions of one sequence.
///
/// A clone is a fork: pages of 64 positions are shared, and the last one is copied when either writes
/// to it. Growing adds pages and moves none.
///
/// ```
/// use boostr_kernels::{Level, Rows};
/// use boostr_kernels::attention::{KvCache, KvType};
/// let mut cache = KvCache::new(Level::detect(), 1, 2, 1, KvType::F32);
/// cache.append(Rows::dense(&[1.0, 2.0], 2), Rows::dense(&[3.0], 1));
/// let fork = cache.clone();
/// cache.append(Rows::dense(&[4.0, 5.0], 2), Rows::dense(&[6.0], 1));
/// assert_eq!((fork.keys(), cache.values()), (vec![1.0, 2.0], vec![3.0, 6.0]));
/// ```
#[derive(Clone)]
pub struct KvCache {
    layout: Layout,
    pages: Vec<Arc<Page>>,
    /// Pages before these, given up.
    forgotten: usize,
    len: usize,
}

impl KvCache {
    /// An empty cache of Hk heads with keys of width `d_k` and values of width `d_v`.
    ///
    /// # Panics
    ///
    /// If a size is 0.
    #[track_caller]
    #[must_use]
    pub fn new(level: Level, nheads_kv: usize, d_k: usize, d_v: usize, kind: KvType) -> Self {
        Self::with_layout(Layout::new(level, nheads_kv, d_k, d_v, kind))
    }

    /// An empty cache of [`latent_attention`](super::latent_attention): one head whose keys are `d_c`
    /// compressed and `d_r` rotated channels, and whose values are the compressed ones, stored once.
    ///
    /// # Panics
    ///
    /// If `d_c` is 0.
    #[track_caller]
    #[must_use]
    pub fn latent(level: Level, d_c: usize, d_r: usize, kind: KvType) -> Self {
        Self::with_layout(Layout::new(level, 1, d_c + d_r, d_c, kind).sharing())
    }

    pub(super) fn with_layout(layout: Layout) -> Self {
        Self { layout, pages: Vec::new(), forgotten: 0, len: 0 }
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Number of positions, forgotten ones too: the position of the next token.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there was no token yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first position that is still held: 0 unless [`forget`](Self::forget) was called.
    #[must_use]
    pub fn first(&self) -> usize {
        self.forgotten * PAGE
    }

    /// `(Hk, d_k, d_v)`
    #[must_use]
    pub fn dims(&self) -> (usize, usize, usize) {
        (self.layout.nheads, self.layout.d_k, self.layout.d_v)
    }

    /// The instruction set that its pages are laid out for.
    #[must_use]
    pub fn level(&self) -> Level {
        self.layout.level
    }

    /// How elements are stored.
    #[must_use]
    pub fn kind(&self) -> KvType {
        self.layout.kind
    }

    /// Bytes of the pages that are held, shared ones too.
    #[must_use]
    pub fn size_in_bytes(&self) -> usize {
        self.pages.len() * self.layout.bytes()
    }

    /// Address and bytes of each page that is held: a page that forks share has one address.
    pub fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        let bytes = self.layout.bytes();
        self.pages.iter().map(move |page| (Arc::as_ptr(page).addr(), bytes))
    }

    /// Bytes that a position takes in a cache of these sizes.
    ///
    /// # Panics
    ///
    /// If a size is 0.
    #[track_caller]
    #[must_use]
    pub fn bytes_per_token(
        level: Level,
        nheads_kv: usize,
        d_k: usize,
        d_v: usize,
        kind: KvType,
    ) -> usize {
        Self::new(level, nheads_kv, d_k, d_v, kind).layout.bytes() / PAGE
    }

    /// Bytes that a position takes in a [`latent`](Self::latent) cache.
    ///
    /// # Panics
    ///
    /// If `d_c` is 0.
    #[track_caller]
    #[must_use]
    pub fn latent_bytes_per_token(level: Level, d_c: usize, d_r: usize, kind: KvType) -> usize {
        Self::latent(level, d_c, d_r, kind).layout.bytes() / PAGE
    }

    /// Appends positions with keys `[T, Hk * d_k]` and values `[T, Hk * d_v]`; a latent cache takes
    /// values of width 0.
    ///
    /// # Panics
    ///
    /// If the lengths disagree.
    #[track_caller]
    pub fn append(&mut self, k: Rows<'_>, v: Rows<'_>) {
        let layout = &self.layout;
        assert_eq!(k.width(), layout.nheads * layout.d_k, "k");
        assert_eq!((v.len(), v.width()), (k.len(), layout.nheads * layout.own_d_v()), "v");
        if k.is_empty() {
            return;
        }
        let (from, to) = (self.len, self.len + k.len());
        self.len = to;
        let (first, end) = (from / PAGE - self.forgotten, to.div_ceil(PAGE) - self.forgotten);
        let write = |(page, i): (&mut Arc<Page>, usize)| {
            let start = (self.forgotten + i) * PAGE;
            let (first, end) = (start.max(from), (start + PAGE).min(to));
            let (k, v) = (k.slice(first - from, end - first), v.slice(first - from, end - first));
            Arc::make_mut(page).write(layout, first - start, k, v);
        };
        self.pages.resize_with(end, || Arc::new(Page::new(layout)));
        let pages = &mut self.pages[first..];
        match pages {
            [page] => write((page, first)),
            pages => {
                let ns = k.len() * (k.width() + v.width());
                parallel::for_each(
                    pages.iter_mut().zip(first..end).collect(),
                    ns,
                    || (),
                    |(), page| write(page),
                );
            }
        }
    }

    /// The same empty cache for a sequence whose positions before `first` are given up: the next is `first`.
    ///
    /// # Panics
    ///
    /// If there are positions already, or `first` is not a multiple of 64.
    #[track_caller]
    #[must_use]
    pub fn starting_at(self, first: usize) -> Self {
        assert!(self.is_empty(), "self: there are {} positions", self.len);
        assert!(first.is_multiple_of(PAGE), "first: {first} is within a page of {PAGE}");
        Self { forgotten: first / PAGE, len: first, ..self }
    }

    /// Goes back to the first `len` positions; nothing happens if there are no more.
    ///
    /// # Panics
    ///
    /// If they end before the [`first`](Self::first) position that is held.
    #[track_caller]
    pub fn truncate(&mut self, len: usize) {
        if len < self.len {
            assert!(len >= self.first(), "len: positions before {} are forgotten", self.first());
            self.len = len;
            self.pages.truncate(len.div_ceil(PAGE) - self.forgotten);
        }
    }

    /// Gives up pages that hold positions before `before` only: of a layer with a window, all
    /// positions that no later token sees.
    pub fn forget(&mut self, before: usize) {
        let pages = (before.min(self.len) / PAGE).saturating_sub(self.forgotten);
        self.pages.drain(..pages);
        self.forgotten += pages;
    }

    /// The keys of positions [`first`](Self::first) on, `[len - first, Hk, d_k]`, as attention sees them.
    #[must_use]
    pub fn keys(&self) -> Vec<f32> {
        self.unpack().0
    }

    /// The values of positions [`first`](Self::first) on, `[len - first, Hk, d_v]`, as attention sees them.
    #[must_use]
    pub fn values(&self) -> Vec<f32> {
        self.unpack().1
    }

    fn unpack(&self) -> (Vec<f32>, Vec<f32>) {
        let Layout { level, nheads, d_k, d_v, .. } = self.layout;
        let held = self.len - self.first();
        let (mut keys, mut values) =
            (vec![0.0; held * nheads * d_k], vec![0.0; held * nheads * d_v]);
        let pages =
            keys.chunks_mut(PAGE * nheads * d_k).zip(values.chunks_mut(PAGE * nheads * d_v));
        for (page, (keys, values)) in self.pages.iter().zip(pages) {
            for head in 0..nheads {
                unpack(level, page, &self.layout, head, keys, values);
            }
        }
        (keys, values)
    }

    /// The pages of positions `from..to`, whole ones, each with its first position.
    pub(super) fn pages(&self, from: usize, to: usize) -> impl Iterator<Item = (usize, &Page)> {
        let pages = from / PAGE..to.min(self.len).div_ceil(PAGE);
        pages.map(|i| (i * PAGE, &*self.pages[i - self.forgotten]))
    }
}

impl std::fmt::Debug for KvCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Layout { kind, nheads, d_k, d_v, .. } = self.layout;
        write!(
            f,
            "KvCache({}, {nheads} heads, d_k {d_k}, d_v {d_v}, {} positions)",
            kind.name(),
            self.len
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Rng;

    fn filled(len: usize, kind: KvType) -> (KvCache, Vec<f32>, Vec<f32>) {
        let mut rng = Rng::new(62);
        let (k, v) = (rng.floats(len * 6), rng.floats(len * 10));
        let mut cache = KvCache::new(Level::detect(), 2, 3, 5, kind);
        cache.append(Rows::dense(&k, 6), Rows::dense(&v, 10));
        (cache, k, v)
    }

    fn pages(cache: &KvCache) -> Vec<*const Page> {
        cache.pages.iter().map(Arc::as_ptr).collect()
    }

    #[test]
    fn holds_what_was_appended_in_any_pieces() {
        for len in [0, 1, 63, 64, 65, 300] {
            let (whole, k, v) = filled(len, KvType::F32);
            assert_eq!((whole.keys(), whole.values()), (k.clone(), v.clone()));
            let mut pieces = KvCache::new(Level::detect(), 2, 3, 5, KvType::F32);
            for first in (0..len).step_by(7) {
                let n = 7.min(len - first);
                let (k, v) = (Rows::dense(&k, 6), Rows::dense(&v, 10));
                pieces.append(k.slice(first, n), v.slice(first, n));
            }
            assert_eq!((pieces.len(), pieces.keys(), pieces.values()), (len, k, v));
        }
    }

    #[test]
    fn growing_moves_no_page() {
        let (mut cache, k, v) = filled(130, KvType::F16);
        let before = pages(&cache);
        for _ in 0..10 {
            cache.append(Rows::dense(&k, 6), Rows::dense(&v, 10));
        }
        assert_eq!(pages(&cache)[..before.len()], before);
        assert_eq!(cache.size_in_bytes(), cache.pages.len() * cache.layout.bytes());
    }

    #[test]
    fn a_fork_shares_all_pages_but_the_last_and_is_independent() {
        let (mut cache, k, v) = filled(130, KvType::Q8_0);
        let (keys, values) = (cache.keys(), cache.values());
        let mut fork = cache.clone();
        assert_eq!(pages(&fork), pages(&cache));
        fork.append(Rows::dense(&k, 6).slice(0, 1), Rows::dense(&v, 10).slice(0, 1));
        assert_eq!(pages(&fork)[..2], pages(&cache)[..2]);
        assert_ne!(pages(&fork)[2], pages(&cache)[2]);
        assert_eq!((cache.keys(), cache.values()), (keys.clone(), values.clone()));
        assert_eq!(fork.keys()[..keys.len()], keys);
        cache.append(Rows::dense(&k, 6).slice(5, 1), Rows::dense(&v, 10).slice(5, 1));
        assert_eq!(fork.values()[values.len()..], values[..10]);
        assert_eq!(cache.values()[values.len()..], values[50..60]);
    }

    #[test]
    fn going_back_and_on_gives_what_going_on_at_once_gives() {
        let (mut cache, k, v) = filled(200, KvType::Q8_0);
        let whole = (cache.keys(), cache.values());
        for len in [199, 130, 128, 127, 3, 0] {
            let fork = cache.clone();
            cache.truncate(len);
            assert_eq!((cache.len(), cache.pages.len()), (len, len.div_ceil(PAGE)));
            assert_eq!(cache.keys(), whole.0[..len * 6]);
            let rest = 200 - len;
            cache.append(Rows::dense(&k, 6).slice(len, rest), Rows::dense(&v, 10).slice(len, rest));
            assert_eq!((cache.keys(), cache.values()), whole);
            assert_eq!((fork.keys(), fork.values()), whole);
        }
        cache.truncate(1000);
        assert_eq!(cache.len(), 200);
    }

    #[test]
    fn forgotten_positions_still_count() {
        let (mut cache, k, v) = filled(200, KvType::F32);
        cache.forget(63);
        assert_eq!((cache.first(), cache.len()), (0, 200));
        cache.forget(130);
        cache.forget(70);
        assert_eq!((cache.first(), cache.len()), (128, 200));
        assert_eq!((cache.keys(), cache.values()), (k[128 * 6..].to_vec(), v[128 * 10..].to_vec()));
        cache.append(Rows::dense(&k, 6).slice(0, 100), Rows::dense(&v, 10).slice(0, 100));
        assert_eq!((cache.len(), cache.keys().len()), (300, 172 * 6));
        cache.truncate(128);
        assert!(cache.keys().is_empty());
        cache.forget(1000);
        assert_eq!((cache.first(), cache.len()), (128, 128));
    }

    #[test]
    fn a_cache_that_starts_later_is_one_that_has_forgotten() {
        for kind in KvType::ALL {
            let (mut cache, k, v) = filled(200, kind);
            cache.forget(130);
            let (keys, values) = (cache.keys(), cache.values());
            let mut later = KvCache::new(Level::detect(), 2, 3, 5, kind).starting_at(128);
            assert_eq!((later.first(), later.len(), later.keys()), (128, 128, vec![]));
            later.append(Rows::dense(&keys, 6), Rows::dense(&values, 10));
            for cache in [&mut cache, &mut later] {
                cache.append(Rows::dense(&k, 6), Rows::dense(&v, 10));
            }
            assert_eq!((later.first(), later.len()), (128, 400));
            assert_eq!((later.keys(), later.values()), (cache.keys(), cache.values()));
        }
    }

    #[test]
    #[should_panic(expected = "first: 65 is within a page of 64")]
    fn starting_within_a_page_panics() {
        let _ = KvCache::new(Level::detect(), 1, 1, 1, KvType::F32).starting_at(65);
    }

    #[test]
    #[should_panic(expected = "len: positions before 128 are forgotten")]
    fn going_back_before_forgotten_positions_panics() {
        let (mut cache, ..) = filled(200, KvType::F32);
        cache.forget(130);
        cache.truncate(127);
    }

    #[test]
    fn types_take_their_bits() {
        for &level in Level::present() {
            let bytes = |kind| KvCache::bytes_per_token(level, 8, 64, 64, kind);
            assert_eq!(KvType::ALL.map(bytes), [4096, 2048, 2048, 1088], "{level}");
        }
    }

    #[test]
    #[should_panic(expected = "v")]
    fn values_of_another_length_panic() {
        let mut cache = KvCache::new(Level::detect(), 1, 1, 1, KvType::F32);
        cache.append(Rows::dense(&[1.0], 1), Rows::dense(&[], 1));
    }
}
