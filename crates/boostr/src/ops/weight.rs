//! A weight matrix in the type it is stored in, and the bytes it may borrow.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use boostr_kernels::Level;
use boostr_kernels::quant::{self, Format, Packed};
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

/// A matrix `[out, in]` of quantized blocks; each row is whole blocks of one format.
///
/// Blocks run along a row, so rows can be taken anywhere.
///
/// ```
/// use boostr::ops::{Format, QuantTensor};
///
/// let values: Vec<f32> = (0..3 * 64).map(|i| (i as f32).sin()).collect();
/// let w = QuantTensor::encode(&values, Format::Q8_0, [3, 64])?;
/// assert_eq!(w.size_in_bytes(), 3 * 2 * 34);
/// assert_eq!(w.rows(1..3)?.decode(), w.decode()[64..]);
/// # Ok::<(), boostr::Error>(())
/// ```
#[derive(Clone)]
pub struct QuantTensor {
    bytes: HostBytes,
    format: Format,
    shape: [usize; 2],
}

impl QuantTensor {
    /// The blocks of `format` in `bytes` as a matrix of `shape`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when a row is not whole blocks or the bytes are not that many.
    pub fn new(bytes: HostBytes, format: Format, shape: [usize; 2]) -> Result<Self> {
        let expected = size_of_blocks(format, shape)?;
        let found = bytes.as_slice().len();
        if expected != found {
            let reason =
                format!("expected {expected} bytes of {shape:?} {}, found {found}", format.name());
            return Err(Error::Argument { name: "bytes", reason });
        }
        Ok(Self { bytes, format, shape })
    }

    /// Quantizes the rows of `values`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when a row is not whole blocks or the values are not that many,
    /// [`Error::Unsupported`] for a format that is only read.
    pub fn encode(values: &[f32], format: Format, shape: [usize; 2]) -> Result<Self> {
        if !format.can_encode() {
            let what = format!("writing of blocks of type {}", format.name());
            return Err(Error::Unsupported { what });
        }
        let size = size_of_blocks(format, shape)?;
        if Some(values.len()) != shape[0].checked_mul(shape[1]) {
            let reason = format!("expected the values of {shape:?}, found {}", values.len());
            return Err(Error::Argument { name: "values", reason });
        }
        let mut bytes = vec![0; size];
        // The bytes do not depend on the level.
        quant::encode(Level::detect(), format, values, &mut bytes);
        Ok(Self { bytes: HostBytes::new(Arc::new(bytes), 0..size)?, format, shape })
    }

    /// The blocks' format.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// `[out, in]`
    #[must_use]
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Bytes of all blocks.
    #[must_use]
    pub fn size_in_bytes(&self) -> usize {
        self.bytes.as_slice().len()
    }

    /// The blocks, row after row.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.bytes.as_slice()
    }

    /// Some of the rows, sharing the bytes of all.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when there are no such rows.
    pub fn rows(&self, rows: Range<usize>) -> Result<Self> {
        let [features, width] = self.shape;
        if rows.start > rows.end || rows.end > features {
            let reason = format!("expected rows of {features}, found {rows:?}");
            return Err(Error::Argument { name: "rows", reason });
        }
        let row = size_of_blocks(self.format, [1, width])?;
        let first = self.bytes.range.start;
        let range = first + rows.start * row..first + rows.end * row;
        let bytes = HostBytes::new(Arc::clone(&self.bytes.owner), range)?;
        Ok(Self { bytes, format: self.format, shape: [rows.len(), width] })
    }

    /// All values, row after row.
    #[must_use]
    pub fn decode(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.shape[0] * self.shape[1]];
        quant::decode(self.format, self.bytes(), &mut values);
        values
    }
}

/// Bytes of a matrix of blocks.
fn size_of_blocks(format: Format, [features, width]: [usize; 2]) -> Result<usize> {
    let size = format.bytes_of(width).and_then(|row| row.checked_mul(features));
    size.ok_or_else(|| {
        let (len, name) = (format.block_len(), format.name());
        let reason = format!("rows of {width} values are not whole blocks of {len} ({name})");
        Error::Argument { name: "shape", reason }
    })
}

/// A weight `[out, in]`, never written after loading: F32, BF16 or F16, or quantized blocks.
///
/// It may lie in a memory-mapped file, which it keeps open; so it lends its tensor to operations only. A clone
/// shares it.
#[derive(Clone)]
pub struct Weight<R: Runtime> {
    pub(super) storage: Storage<R>,
    shape: Vec<usize>,
}

/// Where the elements are.
#[derive(Clone)]
pub(super) enum Storage<R: Runtime> {
    /// Floats, and what keeps the memory that the tensor points to; dropped after it.
    Dense(Tensor<R>, Option<HostBytes>),
    /// Blocks, in the order in which the CPU's kernel reads them.
    Packed(Arc<PackedBlocks>),
}

/// Looks at bytes that lie in a file before each use. Where they are damaged, it gives the blocks to be packed again, or
/// an error.
pub type Check = Box<dyn Fn(&[u8]) -> Result<Option<QuantTensor>> + Send + Sync>;

/// Packed blocks, of this load or of a file.
pub(super) struct PackedBlocks {
    packed: Packed,
    /// What is to be asked before each use of those of a file, and what serves in their place.
    check: Option<(Check, OnceLock<Packed>)>,
}

impl PackedBlocks {
    /// The blocks; those of a file while their bytes are what was written, else others.
    pub(super) fn get(&self) -> Result<&Packed> {
        let Some((check, again)) = &self.check else { return Ok(&self.packed) };
        if let Some(again) = again.get() {
            return Ok(again);
        }
        Ok(match check(self.packed.bytes())? {
            None => &self.packed,
            Some(blocks) => again.get_or_init(|| packed(&blocks)),
        })
    }
}

/// Blocks in the order in which the CPU's kernel reads them.
fn packed(w: &QuantTensor) -> Packed {
    Packed::new(w.format(), w.bytes(), w.shape()[1])
}

impl<R: Runtime<DType = DType>> Weight<R> {
    pub(super) fn new(tensor: Tensor<R>, owner: Option<HostBytes>) -> Self {
        let shape = tensor.shape().to_vec();
        Self { storage: Storage::Dense(tensor, owner), shape }
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

    /// Blocks as f32 in the device's own memory: the definition, for want of a kernel.
    pub(super) fn decoded(w: &QuantTensor, device: &R::Device) -> Result<Self> {
        Ok(Self::new(Tensor::from_slice(&w.decode(), &w.shape(), device)?, None))
    }

    /// Blocks, repacked for the CPU's kernel.
    pub(super) fn packed(w: &QuantTensor) -> Self {
        let blocks = PackedBlocks { packed: packed(w), check: None };
        Self { storage: Storage::Packed(Arc::new(blocks)), shape: w.shape().to_vec() }
    }

    /// Blocks that were packed before, where they lie.
    pub(super) fn of_packed(
        bytes: HostBytes,
        format: Format,
        shape: [usize; 2],
        check: Check,
    ) -> Result<Self> {
        let (expected, found) = (Packed::size(format, shape), bytes.range.len());
        if expected != Some(found) {
            let name = format.name();
            let reason = format!("expected {expected:?} packed {shape:?} {name}, found {found}");
            return Err(Error::Argument { name: "bytes", reason });
        }
        let packed = Packed::of_bytes(format, shape, bytes.owner, bytes.range);
        let blocks = PackedBlocks { packed, check: Some((check, OnceLock::new())) };
        Ok(Self { storage: Storage::Packed(Arc::new(blocks)), shape: shape.to_vec() })
    }

    /// The bytes of blocks as the backend packed them, for [`LinearOps::of_packed`](super::LinearOps::of_packed);
    /// `None` for floats.
    #[must_use]
    pub fn packed_bytes(&self) -> Option<&[u8]> {
        match &self.storage {
            Storage::Dense(..) => None,
            Storage::Packed(blocks) => Some(blocks.packed.bytes()),
        }
    }

    /// `[out, in]`
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Whether it lies in bytes that somebody else keeps.
    #[must_use]
    pub fn is_borrowed(&self) -> bool {
        match &self.storage {
            Storage::Dense(_, owner) => owner.is_some(),
            Storage::Packed(blocks) => blocks.check.is_some(),
        }
    }

    /// Bytes that a pass over the weight reads.
    #[must_use]
    pub fn size_in_bytes(&self) -> usize {
        match &self.storage {
            Storage::Dense(tensor, _) => tensor.numel() * tensor.dtype().size_in_bytes(),
            Storage::Packed(blocks) => blocks.packed.size_in_bytes(),
        }
    }

    /// The matrix where it is kept as floats; not to be kept longer than the weight, which may borrow its
    /// memory.
    pub(crate) fn floats(&self) -> Option<&Tensor<R>> {
        match &self.storage {
            Storage::Dense(tensor, _) => Some(tensor),
            Storage::Packed(_) => None,
        }
    }

    /// The whole matrix as floats; blocks are decoded to f32.
    pub(super) fn to_tensor(&self, device: &R::Device) -> Result<Tensor<R>> {
        match &self.storage {
            Storage::Dense(tensor, _) => Ok(tensor.clone()),
            Storage::Packed(blocks) => {
                let packed = blocks.get()?;
                let mut values = vec![0.0; packed.features() * packed.width()];
                for (n, row) in values.chunks_exact_mut(packed.width()).enumerate() {
                    packed.row(n, row);
                }
                Ok(Tensor::from_slice(&values, &self.shape, device)?)
            }
        }
    }
}

/// Bytes of a matrix of blocks once it is packed; `None` for a format that products do not read.
pub(crate) fn packed_size(format: Format, shape: [usize; 2]) -> Option<usize> {
    Packed::size(format, shape)
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
