//! A weight matrix in the type it is stored in, and the bytes it may borrow.

use std::ops::Range;
use std::sync::Arc;

use numr::dtype::DType;
use numr::runtime::Runtime;
use numr::tensor::Tensor;

use crate::error::{Error, Result};

/// A range of the bytes of a shared owner: a memory map, a vector, a static array.
#[derive(Clone)]
pub struct HostBytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl HostBytes {
    /// Bytes `range` of `owner`, whose `as_ref` must return the same slice each time.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when the owner has no such range.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>, range: Range<usize>) -> Result<Self> {
        if (*owner).as_ref().get(range.clone()).is_none() {
            let reason = format!("expected a range of its bytes, found {range:?}");
            return Err(Error::Argument { name: "range", reason });
        }
        Ok(Self { owner, range })
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        (*self.owner).as_ref().get(self.range.clone()).unwrap_or(&[])
    }
}

/// A weight `[out, in]` of F32, BF16 or F16, never written after loading.
///
/// It may lie in a memory-mapped file, which it keeps open; so it lends its tensor to operations only.
pub struct Weight<R: Runtime> {
    tensor: Tensor<R>,
    /// Keeps the memory that `tensor` points to; dropped after it.
    _owner: Option<HostBytes>,
}

impl<R: Runtime<DType = DType>> Weight<R> {
    pub(super) fn new(tensor: Tensor<R>, owner: Option<HostBytes>) -> Self {
        Self { tensor, _owner: owner }
    }

    /// A weight in the device's own memory.
    pub(super) fn copied(
        bytes: &HostBytes,
        dtype: DType,
        shape: &[usize],
        device: &R::Device,
    ) -> Result<Self> {
        check(bytes, dtype, shape)?;
        Ok(Self::new(Tensor::from_bytes(bytes.as_slice(), shape, dtype, device)?, None))
    }

    /// `[out, in]`
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        self.tensor.shape()
    }

    /// The stored type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    /// Bytes that a pass over the weight reads.
    #[must_use]
    pub fn size_in_bytes(&self) -> usize {
        self.tensor.numel() * self.tensor.dtype().size_in_bytes()
    }

    pub(super) fn tensor(&self) -> &Tensor<R> {
        &self.tensor
    }
}

/// Checks that `bytes` are `shape`'s elements of a type that weights can have.
pub(super) fn check(bytes: &HostBytes, dtype: DType, shape: &[usize]) -> Result<()> {
    if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
        let what = format!("weight type {dtype:?} (supported: F32, BF16, F16)");
        return Err(Error::Unsupported { what });
    }
    let size = dtype.size_in_bytes();
    let expected = shape.iter().try_fold(size, |n, &dim| n.checked_mul(dim));
    let found = bytes.as_slice().len();
    if expected != Some(found) {
        let reason = format!("expected the bytes of {shape:?} {dtype:?}, found {found}");
        return Err(Error::Argument { name: "bytes", reason });
    }
    Ok(())
}
