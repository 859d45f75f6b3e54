//! Attention: causal products of queries with the keys and values that a sequence has kept, and rotary
//! positions.

use numr::dtype::DType;
use numr::runtime::Runtime;
use numr::tensor::Tensor;

pub use boostr_kernels::attention::KvType;
pub use boostr_kernels::{Rope, RopeScaling, RopeStyle, Yarn};

use super::{Client, check_runs, expect, generic, shape_error};
use crate::error::{Error, Result};

/// Keys and values that one sequence keeps for one layer; grows by a row for each token.
///
/// A clone is a fork: it shares what is there.
#[derive(Clone)]
pub struct KvCache<R: Runtime> {
    pub(super) storage: KvStorage<R>,
    sizes: KvSizes,
}

/// Sizes of a [`KvCache`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvSizes {
    /// Hk, heads of keys and values.
    pub nheads: usize,
    /// Width of a head's keys.
    pub d_key: usize,
    /// Width of a head's values.
    pub d_value: usize,
    /// What the elements are kept as.
    pub kind: KvType,
}

impl KvSizes {
    /// Bytes that each token adds.
    #[must_use]
    pub fn bytes_per_token(self) -> usize {
        boostr_kernels::attention::KvCache::bytes_per_token(
            self.nheads,
            self.d_key,
            self.d_value,
            self.kind,
        )
    }
}

/// Where the rows are.
#[derive(Clone)]
pub(super) enum KvStorage<R: Runtime> {
    /// Keys `[L, Hk, d_key]` and values `[L, Hk, d_value]`, f32; `None` before the first token.
    Tensors(Option<[Tensor<R>; 2]>),
    /// In pages, in the order in which the CPU's kernel reads them.
    Pages(boostr_kernels::attention::KvCache),
}

impl<R: Runtime<DType = DType>> KvCache<R> {
    /// A cache in the device's own memory.
    pub(super) fn tensors(sizes: KvSizes) -> Result<Self> {
        if sizes.kind != KvType::F32 {
            let what = format!("keys and values of type {} on this device", sizes.kind.name());
            return Err(Error::Unsupported { what });
        }
        Ok(Self { storage: KvStorage::Tensors(None), sizes })
    }

    /// A cache in pages of the CPU's kernel.
    pub(super) fn pages(sizes: KvSizes) -> Self {
        let KvSizes { nheads, d_key, d_value, kind } = sizes;
        let pages = boostr_kernels::attention::KvCache::new(nheads, d_key, d_value, kind);
        Self { storage: KvStorage::Pages(pages), sizes }
    }

    /// Heads, widths and type.
    #[must_use]
    pub fn sizes(&self) -> KvSizes {
        self.sizes
    }

    /// Tokens seen.
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

    /// Bytes that it takes.
    #[must_use]
    pub fn size_in_bytes(&self) -> usize {
        match &self.storage {
            KvStorage::Tensors(rows) => rows.iter().flatten().map(|x| 4 * x.numel()).sum(),
            KvStorage::Pages(pages) => pages.size_in_bytes(),
        }
    }

    /// Keys `[L, Hk, d_key]`, row-major.
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

    /// Values `[L, Hk, d_value]`, row-major.
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
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
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
        if nheads_kv == 0 || !nheads.is_multiple_of(nheads_kv) {
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
        check_runs(runs, tokens, caches.len())?;
        let found =
            |cache: &KvCache<R>| (cache.sizes.nheads, cache.sizes.d_key, cache.sizes.d_value);
        let expected = (nheads_kv, d_key, d_value);
        for cache in caches {
            if found(cache) != expected {
                let (h, k, v) = found(cache);
                return Err(shape_error("caches", &[nheads_kv, d_key, d_value], &[h, k, v]));
            }
        }
        let kind = caches.first().map_or(KvType::F32, |cache| cache.sizes.kind);
        let sizes = KvSizes { nheads: nheads_kv, d_key, d_value, kind };
        Ok(AttentionDims { tokens, nheads, sizes })
    }
}

/// Causal attention with carried keys and values, and rotary positions.
///
/// ```
/// use boostr::ops::{Attention, AttentionOps, KvSizes, KvType};
/// use numr::prelude::*;
///
/// let device = CpuDevice::new();
/// let client = CpuRuntime::default_client(&device);
/// let x = |data: &[f32]| Tensor::<CpuRuntime>::from_slice(data, &[2, 1, 1], &device);
/// let (q, k, v) = (x(&[1.0, 1.0])?, x(&[0.0, 0.0])?, x(&[2.0, 4.0])?);
/// let input = Attention { q: &q, k: &k, v: &v, scale: 1.0, window: None, softcap: None };
/// let sizes = KvSizes { nheads: 1, d_key: 1, d_value: 1, kind: KvType::F32 };
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
    /// [`Error::Unsupported`] for a type of elements that the device does not keep.
    fn new_cache(&self, sizes: KvSizes) -> Result<KvCache<R>> {
        generic::new_cache(sizes)
    }

    /// Appends keys and values of each run to its cache; each query then sees those up to its own:
    /// `softmax(scale q · k) v`, `[T, H, d_value]`.
    ///
    /// A token gives the same bits alone and in any company.
    ///
    /// # Errors
    ///
    /// When arguments disagree; caches are then as they were.
    fn attention(
        &self,
        input: &Attention<'_, R>,
        runs: &[usize],
        caches: &mut [&mut KvCache<R>],
    ) -> Result<Tensor<R>> {
        generic::attention(self.library(), input, runs, caches)
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
