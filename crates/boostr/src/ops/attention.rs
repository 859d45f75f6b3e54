//! Attention: causal products of queries with the keys and values of a sequence, latent attention, and
//! rotary positions.

use boostr_kernels::attention::{self as kernels, PAGE};
use boostr_kernels::{Level, Rows};
use numr::dtype::DType;
use numr::runtime::Runtime;
use numr::tensor::Tensor;

pub use boostr_kernels::attention::KvType;
pub use boostr_kernels::{Rope, RopeScaling, RopeStyle, Yarn};

use super::{Client, Weight, check_runs, expect, generic, shape_error};
use crate::error::{Error, Result};

/// Keys and values that one sequence keeps for one layer; grows by a row for each token.
///
/// A clone is a fork: it shares what is there, and neither notices what the other appends or forgets.
#[derive(Clone)]
pub struct KvCache<R: Runtime> {
    pub(super) storage: KvStorage<R>,
    sizes: KvSizes,
}

/// Sizes of a [`KvCache`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvSizes {
    /// Hk, heads of keys and values; 1 in a latent cache.
    pub nheads: usize,
    /// Width of a head's keys.
    pub d_key: usize,
    /// Width of a head's values.
    pub d_value: usize,
    /// What the elements are kept as.
    pub kind: KvType,
    /// Whether values are the first `d_value` channels of the keys and kept once, for
    /// [`latent_attention`](AttentionOps::latent_attention).
    pub latent: bool,
}

impl KvSizes {
    /// Of a cache for [`latent_attention`](AttentionOps::latent_attention): `d_c` compressed channels, and
    /// `d_r` rotated ones.
    #[must_use]
    pub fn latent(d_c: usize, d_r: usize, kind: KvType) -> Self {
        Self { nheads: 1, d_key: d_c.saturating_add(d_r), d_value: d_c, kind, latent: true }
    }

    /// Bytes that each token adds on a CPU of this level.
    #[must_use]
    pub fn bytes_per_token(self, level: Level) -> usize {
        let Self { nheads, d_key, d_value, kind, latent } = self;
        if latent {
            kernels::KvCache::latent_bytes_per_token(level, d_value, d_key - d_value, kind)
        } else {
            kernels::KvCache::bytes_per_token(level, nheads, d_key, d_value, kind)
        }
    }

    /// Bytes that `tokens` take at most between two calls, in pages of 64, where a token sees `window` of
    /// them and what none will see is forgotten.
    #[must_use]
    pub fn bytes(self, level: Level, tokens: usize, window: Option<usize>) -> usize {
        let pages = tokens.div_ceil(PAGE);
        // The window may begin with the last position of a page and end with the first of another.
        let kept = window.map_or(pages, |window| pages.min(window.div_ceil(PAGE) + 1));
        kept.saturating_mul(PAGE).saturating_mul(self.bytes_per_token(level))
    }

    /// Refuses sizes that no cache has.
    fn check(self) -> Result<()> {
        let Self { nheads, d_key, d_value, latent, .. } = self;
        let reason = if [nheads, d_key, d_value].contains(&0) {
            "expected at least 1 of each"
        } else if latent && (nheads > 1 || d_value > d_key) {
            "expected one head whose values are channels of its keys"
        } else {
            return Ok(());
        };
        let reason = format!("{reason}, found {nheads} heads of {d_key} and {d_value}");
        Err(Error::Argument { name: "sizes", reason })
    }
}

/// Where the rows are.
#[derive(Clone)]
pub(super) enum KvStorage<R: Runtime> {
    /// Keys `[L, Hk, d_key]` and values `[L, Hk, d_value]`, f32; `None` before the first token. In a latent
    /// cache values are a view of the keys.
    Tensors(Option<[Tensor<R>; 2]>),
    /// In pages, in the order in which the CPU's kernel reads them.
    Pages(kernels::KvCache),
}

impl<R: Runtime<DType = DType>> KvCache<R> {
    /// A cache in the device's own memory.
    pub(super) fn tensors(sizes: KvSizes) -> Result<Self> {
        sizes.check()?;
        if sizes.kind != KvType::F32 {
            let what = format!("keys and values of type {} on this device", sizes.kind.name());
            return Err(Error::Unsupported { what });
        }
        Ok(Self { storage: KvStorage::Tensors(None), sizes })
    }

    /// A cache in pages of the CPU's kernel for this level.
    pub(super) fn pages(level: Level, sizes: KvSizes) -> Result<Self> {
        sizes.check()?;
        let KvSizes { nheads, d_key, d_value, kind, latent } = sizes;
        let pages = if latent {
            kernels::KvCache::latent(level, d_value, d_key - d_value, kind)
        } else {
            kernels::KvCache::new(level, nheads, d_key, d_value, kind)
        };
        Ok(Self { storage: KvStorage::Pages(pages), sizes })
    }

    /// Heads, widths and type.
    #[must_use]
    pub fn sizes(&self) -> KvSizes {
        self.sizes
    }

    /// Tokens seen, forgotten ones too: the position of the next.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.storage {
            KvStorage::Tensors(rows) => rows.as_ref().map_or(0, |[keys, _]| keys.shape()[0]),
            KvStorage::Pages(pages) => pages.len(),
        }
    }

    /// Whether no token was seen.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first position whose key and value are there: 0 until some were [forgotten](Self::forget).
    #[must_use]
    pub fn first(&self) -> usize {
        match &self.storage {
            KvStorage::Tensors(_) => 0,
            KvStorage::Pages(pages) => pages.first(),
        }
    }

    /// The first position that the next token sees, where it sees `window` of them, itself included.
    #[must_use]
    pub fn first_seen(&self, window: Option<usize>) -> usize {
        window.map_or(0, |window| (self.len() + 1).saturating_sub(window))
    }

    /// Gives up keys and values of positions before `before`, which no later token may see.
    ///
    /// On the CPU these are whole pages of 64 positions, so some before `before` may stay. A cache of tensors
    /// keeps all: other ways to sum round otherwise, and what none sees must change no bit.
    ///
    /// ```
    /// use boostr::ops::{Attention, AttentionOps, KvSizes, KvType};
    /// use boostr::numr::prelude::*;
    ///
    /// let device = CpuDevice::new();
    /// let client = CpuRuntime::default_client(&device);
    /// let x = Tensor::<CpuRuntime>::ones(&[200, 1, 1], DType::F32, &device)?;
    /// let input = Attention { q: &x, k: &x, v: &x, scale: 1.0, window: Some(70), softcap: None };
    /// let sizes = KvSizes { nheads: 1, d_key: 1, d_value: 1, kind: KvType::F32, latent: false };
    /// let mut cache = client.new_cache(sizes)?;
    /// client.attention(&input, &[200], &mut [&mut cache])?;
    /// // Position 200 sees 131 and on; 128 is the first of the page that 131 is in.
    /// cache.forget(cache.first_seen(input.window));
    /// assert_eq!((cache.first(), cache.len(), cache.keys()?.len()), (128, 200, 72));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn forget(&mut self, before: usize) {
        if let KvStorage::Pages(pages) = &mut self.storage {
            pages.forget(before);
        }
    }

    /// Whether the first `len` positions are there, as far as the next token sees them through `window`.
    pub(crate) fn can_cut(&self, len: usize, window: Option<usize>) -> bool {
        let seen = window.map_or(0, |window| (len + 1).saturating_sub(window));
        len <= self.len() && self.first() <= seen.min(len)
    }

    /// Goes back to the first `len` positions, which [can be done](Self::can_cut).
    pub(crate) fn cut(&mut self, len: usize) {
        match &mut self.storage {
            KvStorage::Tensors(rows) if len == 0 => *rows = None,
            KvStorage::Tensors(Some(rows)) => {
                for x in rows {
                    if let Ok(cut) = x.narrow(0, 0, len) {
                        *x = cut;
                    }
                }
            }
            KvStorage::Tensors(None) => {}
            KvStorage::Pages(pages) => pages.truncate(len),
        }
    }

    /// Fills an empty cache with positions from `first` on, by what [`keys`](Self::keys) and
    /// [`values`](Self::values) of another gave; a latent cache takes no values.
    ///
    /// Both caches then have the same bits: a value that was rounded is not changed by rounding it again.
    ///
    /// ```
    /// use boostr::ops::{AttentionOps, KvSizes, KvType};
    /// use boostr::numr::prelude::*;
    ///
    /// let client = CpuRuntime::default_client(&CpuDevice::new());
    /// let sizes = KvSizes { nheads: 1, d_key: 2, d_value: 1, kind: KvType::F32, latent: false };
    /// let mut cache = client.new_cache(sizes)?;
    /// cache.fill(&client, 64, &[1.0, 2.0], &[3.0])?;
    /// assert_eq!((cache.first(), cache.len(), cache.keys()?), (64, 65, vec![1.0, 2.0]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when the cache is not empty, lengths disagree, or positions before `first` cannot
    /// have been [forgotten](Self::forget): on the CPU it is a multiple of 64, in a cache of tensors 0.
    pub fn fill(
        &mut self,
        client: &impl Client<R>,
        first: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<()> {
        let KvSizes { nheads, d_key, d_value, latent, .. } = self.sizes;
        let refuse = |name, reason| Err(Error::Argument { name, reason });
        if !self.is_empty() {
            return refuse("self", format!("expected no tokens, found {}", self.len()));
        }
        let [count, k_width, v_width] = self.count_of(keys, values)?;
        if first.checked_add(count).is_none() {
            return refuse("first", format!("{first} and {count} are past all positions"));
        }
        for (what, rows) in [("keys", keys), ("values", values)] {
            check_bound(self.sizes.kind, what, rows)?;
        }
        match &mut self.storage {
            KvStorage::Pages(_) if !first.is_multiple_of(PAGE) => {
                refuse("first", format!("expected a multiple of {PAGE}, found {first}"))
            }
            KvStorage::Pages(pages) => {
                *pages = pages.clone().starting_at(first);
                let values = Rows::new(values, count, v_width, 0, v_width);
                pages.append(Rows::dense(keys, k_width), values);
                Ok(())
            }
            KvStorage::Tensors(_) if first > 0 => {
                refuse("first", format!("a cache of tensors keeps all: expected 0, found {first}"))
            }
            KvStorage::Tensors(_) if count == 0 => Ok(()),
            KvStorage::Tensors(rows) => {
                let keys = super::tensor(client, keys, &[count, nheads, d_key])?;
                let values = if latent {
                    keys.narrow(2, 0, d_value)?
                } else {
                    super::tensor(client, values, &[count, nheads, d_value])?
                };
                *rows = Some([keys, values]);
                Ok(())
            }
        }
    }

    /// How many rows some keys and values are, and how wide each.
    fn count_of(&self, keys: &[f32], values: &[f32]) -> Result<[usize; 3]> {
        let KvSizes { nheads, d_key, d_value, latent, .. } = self.sizes;
        let refuse = |name, reason| Err(Error::Argument { name, reason });
        let k_width = nheads.saturating_mul(d_key);
        let count = keys.len().checked_div(k_width).unwrap_or(0);
        if count.checked_mul(k_width) != Some(keys.len()) {
            return refuse("keys", format!("expected rows of {k_width}, found {}", keys.len()));
        }
        let v_width = if latent { 0 } else { nheads.saturating_mul(d_value) };
        let v_len = count.saturating_mul(v_width);
        if values.len() != v_len {
            return refuse("values", format!("expected {v_len}, found {}", values.len()));
        }
        Ok([count, k_width, v_width])
    }

    /// Appends positions to what a cache [was filled](Self::fill) with, by what [`keys`](Self::keys) and
    /// [`values`](Self::values) of another gave. A cache of tensors takes none.
    pub(crate) fn extend(&mut self, keys: &[f32], values: &[f32]) -> Result<()> {
        let [count, k_width, v_width] = self.count_of(keys, values)?;
        for (what, rows) in [("keys", keys), ("values", values)] {
            check_bound(self.sizes.kind, what, rows)?;
        }
        let KvStorage::Pages(pages) = &mut self.storage else {
            let what = "keys and values in pieces on this device".to_owned();
            return Err(Error::Unsupported { what });
        };
        let values = Rows::new(values, count, v_width, 0, v_width);
        pages.append(Rows::dense(keys, k_width), values);
        Ok(())
    }

    /// The tensors of keys and values, where they are such; of a latent cache the keys, which are both.
    pub(crate) fn rows(&self) -> &[Tensor<R>] {
        match &self.storage {
            KvStorage::Tensors(Some([keys, _])) if self.sizes.latent => std::slice::from_ref(keys),
            KvStorage::Tensors(Some(rows)) => rows,
            _ => &[],
        }
    }

    /// Refuses a next token that sees what is forgotten.
    pub(crate) fn check_window(&self, window: Option<usize>) -> Result<()> {
        let (first, seen) = (self.first(), self.first_seen(window));
        if seen >= first {
            return Ok(());
        }
        let reason = format!("positions before {first} are forgotten, {seen} is seen");
        Err(Error::Argument { name: "caches", reason })
    }

    /// Bytes of what is there: on the CPU whole pages, those that forks share in each of them.
    #[must_use]
    pub fn size_in_bytes(&self) -> usize {
        match &self.storage {
            KvStorage::Tensors(None) => 0,
            KvStorage::Tensors(Some([keys, _])) if self.sizes.latent => 4 * keys.numel(),
            KvStorage::Tensors(Some(rows)) => rows.iter().map(|x| 4 * x.numel()).sum(),
            KvStorage::Pages(pages) => pages.size_in_bytes(),
        }
    }

    /// The pieces of memory that it holds, each as its address and its bytes: forks share some.
    pub(crate) fn blocks(&self) -> Vec<(usize, usize)> {
        match &self.storage {
            KvStorage::Tensors(_) => self.rows().iter().map(super::block).collect(),
            KvStorage::Pages(pages) => pages.blocks().collect(),
        }
    }

    /// Keys of positions [`first`](Self::first) on, `[len - first, Hk, d_key]`, row-major.
    ///
    /// # Errors
    ///
    /// When memory is short.
    pub fn keys(&self) -> Result<Vec<f32>> {
        match &self.storage {
            KvStorage::Tensors(None) => Ok(Vec::new()),
            KvStorage::Tensors(Some([keys, _])) => super::to_vec(keys),
            KvStorage::Pages(pages) => Ok(pages.keys()),
        }
    }

    /// Values of positions [`first`](Self::first) on, `[len - first, Hk, d_value]`, row-major.
    ///
    /// # Errors
    ///
    /// When memory is short.
    pub fn values(&self) -> Result<Vec<f32>> {
        match &self.storage {
            KvStorage::Tensors(None) => Ok(Vec::new()),
            KvStorage::Tensors(Some([_, values])) => super::to_vec(values),
            KvStorage::Pages(pages) => Ok(pages.values()),
        }
    }
}

impl<R: Runtime<DType = DType>> std::fmt::Debug for KvCache<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KvCache")
            .field("sizes", &self.sizes)
            .field("first", &self.first())
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

/// Refuses finite keys or values that a type of cache makes infinite.
pub(super) fn check_bound(kind: KvType, what: &str, rows: &[f32]) -> Result<()> {
    let bound = kind.bound();
    let is_beyond = |x: &&f32| x.is_finite() && x.abs() >= bound;
    let Some(x) = rows.iter().find(is_beyond).filter(|_| bound.is_finite()) else { return Ok(()) };
    let reason = format!(
        "{what} reach {x}, and {} holds magnitudes below {bound}: choose another type (--kv-type)",
        kind.name()
    );
    Err(Error::Argument { name: "kv_type", reason })
}

/// The same of the rows that each run adds to its cache.
pub(super) fn check_bounds<R: Runtime<DType = DType>>(
    caches: &[&mut KvCache<R>],
    runs: &[usize],
    added: &[(&str, Rows<'_>)],
) -> Result<()> {
    let mut first = 0;
    for (cache, len) in caches.iter().zip(runs) {
        let kind = cache.sizes.kind;
        if kind != KvType::F32 {
            for (what, rows) in added {
                (first..first + len).try_for_each(|t| check_bound(kind, what, rows.row(t)))?;
            }
        }
        first += len;
    }
    Ok(())
}

/// Inputs of [`AttentionOps::attention`]: the tokens of all runs, one after another.
#[derive(Debug, Clone)]
pub struct Attention<'a, R: Runtime> {
    /// Queries `[T, H, d_key]`; head h meets keys and values of head h / (H / Hk).
    pub q: &'a Tensor<R>,
    /// `[T, Hk, d_key]`
    pub k: &'a Tensor<R>,
    /// `[T, Hk, d_value]`
    pub v: &'a Tensor<R>,
    /// Factor of the products of queries and keys.
    pub scale: f32,
    /// How many tokens a token sees, itself included; all where `None`.
    pub window: Option<usize>,
    /// Bound of the scores: `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
}

/// Sizes of a call, read off its tensors and found to agree.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionDims {
    pub(super) tokens: usize,
    pub(super) nheads: usize,
    pub(super) sizes: KvSizes,
}

impl<R: Runtime<DType = DType>> Attention<'_, R> {
    pub(super) fn dims(&self, runs: &[usize], caches: &[&mut KvCache<R>]) -> Result<AttentionDims> {
        let &[tokens, nheads, d_key] = self.q.shape() else {
            return Err(shape_error("q", &[0, 0, 0], self.q.shape()));
        };
        let &[_, nheads_kv, d_value] = self.v.shape() else {
            return Err(shape_error("v", &[tokens, 0, 0], self.v.shape()));
        };
        if nheads == 0 || nheads_kv == 0 || !nheads.is_multiple_of(nheads_kv) {
            let reason = format!("{nheads_kv} heads of keys do not divide {nheads} of queries");
            return Err(Error::Argument { name: "k", reason });
        }
        expect("q", self.q, &[tokens, nheads, d_key])?;
        expect("k", self.k, &[tokens, nheads_kv, d_key])?;
        expect("v", self.v, &[tokens, nheads_kv, d_value])?;
        if self.window == Some(0) {
            let reason = "expected at least 1, found 0".into();
            return Err(Error::Argument { name: "window", reason });
        }
        if let Some(cap) = self.softcap.filter(|cap| cap.is_nan() || *cap <= 0.0) {
            let reason = format!("expected above 0, found {cap}");
            return Err(Error::Argument { name: "softcap", reason });
        }
        check_runs(runs, tokens, caches.len())?;
        let kind = caches.first().map_or(KvType::F32, |cache| cache.sizes.kind);
        let sizes = KvSizes { nheads: nheads_kv, d_key, d_value, kind, latent: false };
        check_caches(caches, sizes, self.window)?;
        Ok(AttentionDims { tokens, nheads, sizes })
    }
}

/// Checks that caches are of `sizes`, of any type, and hold what the next token sees.
fn check_caches<R: Runtime<DType = DType>>(
    caches: &[&mut KvCache<R>],
    sizes: KvSizes,
    window: Option<usize>,
) -> Result<()> {
    for cache in caches {
        let found = cache.sizes;
        if found.latent != sizes.latent {
            let word = |latent| if latent { "latent ones" } else { "keys and values" };
            let reason = format!("expected {}, found {}", word(sizes.latent), word(found.latent));
            return Err(Error::Argument { name: "caches", reason });
        }
        let shape = |sizes: KvSizes| [sizes.nheads, sizes.d_key, sizes.d_value];
        if shape(found) != shape(sizes) {
            return Err(shape_error("caches", &shape(sizes), &shape(found)));
        }
        cache.check_window(window)?;
    }
    Ok(())
}

/// Inputs of [`AttentionOps::latent_attention`]: the tokens of all runs, one after another.
///
/// Letters: T tokens, H heads; widths as the paper has them: `d_c` compressed channels, `d_nope` and `d_r`
/// channels of a head's query without and with position, `d_v` of its output.
#[derive(Clone)]
pub struct LatentAttention<'a, R: Runtime> {
    /// Queries without position `[T, H, d_nope]`.
    pub q_nope: &'a Tensor<R>,
    /// Queries with position, rotated, `[T, H, d_r]`; `d_r` may be 0.
    pub q_pe: &'a Tensor<R>,
    /// Compressed keys and values, normalised, `[T, d_c]`.
    pub c: &'a Tensor<R>,
    /// Keys with position, rotated, `[T, d_r]`: the same for all heads.
    pub k_pe: &'a Tensor<R>,
    /// What makes keys of compressed ones, transposed for each head: `[H, d_c, d_nope]`.
    pub w_uk: &'a Weight<R>,
    /// What makes values of compressed ones, for each head: `[H, d_v, d_c]`.
    pub w_uv: &'a Weight<R>,
    /// Factor of the products of queries and keys, usually `(d_nope + d_r)^-0.5`.
    pub scale: f32,
}

/// Sizes of a call, read off its tensors and found to agree.
#[derive(Debug, Clone, Copy)]
pub(super) struct LatentDims {
    pub(super) tokens: usize,
    pub(super) nheads: usize,
    pub(super) d_value: usize,
    pub(super) sizes: KvSizes,
}

impl<R: Runtime<DType = DType>> LatentAttention<'_, R> {
    pub(super) fn dims(&self, runs: &[usize], caches: &[&mut KvCache<R>]) -> Result<LatentDims> {
        let &[tokens, nheads, d_nope] = self.q_nope.shape() else {
            return Err(shape_error("q_nope", &[0, 0, 0], self.q_nope.shape()));
        };
        let &[_, d_c] = self.c.shape() else {
            return Err(shape_error("c", &[tokens, 0], self.c.shape()));
        };
        let &[_, d_r] = self.k_pe.shape() else {
            return Err(shape_error("k_pe", &[tokens, 0], self.k_pe.shape()));
        };
        let &[_, d_value, _] = self.w_uv.shape() else {
            return Err(shape_error("w_uv", &[nheads, 0, d_c], self.w_uv.shape()));
        };
        expect("q_nope", self.q_nope, &[tokens, nheads, d_nope])?;
        expect("q_pe", self.q_pe, &[tokens, nheads, d_r])?;
        expect("c", self.c, &[tokens, d_c])?;
        expect("k_pe", self.k_pe, &[tokens, d_r])?;
        for (name, w, shape) in [
            ("w_uk", self.w_uk, [nheads, d_c, d_nope]),
            ("w_uv", self.w_uv, [nheads, d_value, d_c]),
        ] {
            if w.shape() != shape {
                return Err(shape_error(name, &shape, w.shape()));
            }
            if shape.contains(&0) {
                let reason = format!("expected at least 1 of each size, found {shape:?}");
                return Err(Error::Argument { name, reason });
            }
        }
        check_runs(runs, tokens, caches.len())?;
        let kind = caches.first().map_or(KvType::F32, |cache| cache.sizes.kind);
        let sizes = KvSizes::latent(d_c, d_r, kind);
        check_caches(caches, sizes, None)?;
        Ok(LatentDims { tokens, nheads, d_value, sizes })
    }
}

/// Causal attention with carried keys and values, full or latent, and rotary positions.
///
/// ```
/// use boostr::ops::{Attention, AttentionOps, KvSizes, KvType};
/// use boostr::numr::prelude::*;
///
/// let device = CpuDevice::new();
/// let client = CpuRuntime::default_client(&device);
/// let x = |data: &[f32]| Tensor::<CpuRuntime>::from_slice(data, &[2, 1, 1], &device);
/// let (q, k, v) = (x(&[1.0, 1.0])?, x(&[0.0, 0.0])?, x(&[2.0, 4.0])?);
/// let input = Attention { q: &q, k: &k, v: &v, scale: 1.0, window: None, softcap: None };
/// let sizes = KvSizes { nheads: 1, d_key: 1, d_value: 1, kind: KvType::F32, latent: false };
/// let mut cache = client.new_cache(sizes)?;
/// let y = client.attention(&input, &[2], &mut [&mut cache])?;
/// // The second token sees both, with equal weights.
/// assert_eq!(y.to_vec::<f32>(), [2.0, 3.0]);
/// assert_eq!(cache.len(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait AttentionOps<R: Runtime<DType = DType>>: Client<R> {
    /// A cache that holds no token.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a type of elements that the device does not keep, [`Error::Argument`] for
    /// sizes that no cache has.
    fn new_cache(&self, sizes: KvSizes) -> Result<KvCache<R>> {
        generic::new_cache(sizes)
    }

    /// Refuses a cache whose layout this client does not read.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] with the layout that was expected, and the one that was found.
    fn check_cache(&self, cache: &KvCache<R>) -> Result<()> {
        let _ = cache;
        Ok(())
    }

    /// Appends keys and values of each run to its cache; each query then sees those up to its own:
    /// `softmax(scale q · k) v`, `[T, H, d_value]`.
    ///
    /// A token gives the same bits alone and in any company.
    ///
    /// # Errors
    ///
    /// When arguments disagree or a query sees what its cache has forgotten; caches are then as they were.
    fn attention(
        &self,
        input: &Attention<'_, R>,
        runs: &[usize],
        caches: &mut [&mut KvCache<R>],
    ) -> Result<Tensor<R>> {
        generic::attention(self.library(), input, runs, caches)
    }

    /// Multi-head latent attention: appends compressed tokens of each run to its cache; each query then sees
    /// those up to its own. Returns `[T, H, d_v]`.
    ///
    /// ```text
    /// k[h, j] = [W_UK[h] c[j] | k_pe[j]]      v[h, j] = W_UV[h] c[j]
    /// out[h, i] = sum over j <= i of softmax(scale [q_nope | q_pe][h, i] · k[h, ..])[j] v[h, j]
    /// ```
    ///
    /// (*DeepSeek-V2*, arXiv 2405.04434, section 2.1), in the absorbed form: W_UK moves to the query and W_UV
    /// to the output, so that a token is kept as the `d_c + d_r` numbers of c and k_pe, whatever the number
    /// of heads. Checkpoints have both matrices in `kv_b_proj.weight`: for each head `d_nope` rows of W_UK,
    /// which are columns of `w_uk`, then `d_v` rows of W_UV.
    ///
    /// A token gives the same bits alone and in any company.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use boostr::ops::{AttentionOps, HostBytes, KvSizes, KvType, LatentAttention, LinearOps};
    /// use boostr::numr::prelude::*;
    ///
    /// let device = CpuDevice::new();
    /// let client = CpuRuntime::default_client(&device);
    /// let bytes = HostBytes::new(Arc::new(3f32.to_le_bytes()), 0..4)?;
    /// let w = client.weight(bytes, DType::F32, &[1, 1, 1])?; // one head, all widths 1
    /// let x = |data: &[f32], shape: &[usize]| Tensor::<CpuRuntime>::from_slice(data, shape, &device);
    /// let (q, c) = (x(&[0.0, 0.0], &[2, 1, 1])?, x(&[2.0, 4.0], &[2, 1])?);
    /// let input = LatentAttention {
    ///     q_nope: &q, q_pe: &q, c: &c, k_pe: &c, w_uk: &w, w_uv: &w, scale: 1.0,
    /// };
    /// let mut cache = client.new_cache(KvSizes::latent(1, 1, KvType::F32))?;
    /// let y = client.latent_attention(&input, &[2], &mut [&mut cache])?;
    /// // Equal scores: means of the values, which are 3 c.
    /// assert_eq!(y.to_vec::<f32>(), [6.0, 9.0]);
    /// assert_eq!(cache.keys()?, [2.0, 2.0, 4.0, 4.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// When arguments disagree; caches are then as they were.
    fn latent_attention(
        &self,
        input: &LatentAttention<'_, R>,
        runs: &[usize],
        caches: &mut [&mut KvCache<R>],
    ) -> Result<Tensor<R>> {
        generic::latent_attention(self.library(), input, runs, caches)
    }

    /// Rotates the heads of `x` `[T, H, D]`, row t by the angles of `positions[t]`.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn rope(&self, x: &Tensor<R>, positions: &[usize], rope: &Rope) -> Result<Tensor<R>> {
        generic::rope(self.library(), x, positions, rope)
    }
}

/// `(T, H, D)` of what can be rotated.
pub(super) fn check_rope<R: Runtime<DType = DType>>(
    x: &Tensor<R>,
    positions: &[usize],
    rope: &Rope,
) -> Result<(usize, usize, usize)> {
    let &[tokens, nheads, headdim] = x.shape() else {
        return Err(shape_error("x", &[positions.len(), 0, 0], x.shape()));
    };
    expect("x", x, &[positions.len(), nheads, headdim])?;
    if rope.rotary_dim() > headdim {
        let reason = format!("rotates {} of {headdim}", rope.rotary_dim());
        return Err(Error::Argument { name: "rope", reason });
    }
    Ok((tokens, nheads, headdim))
}
