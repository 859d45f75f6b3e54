//! Views of CPU tensors as slices, and of borrowed bytes as tensors: all the unsafe code of `ops`.
//!
//! The tensor library trusts given shapes and hands out no slices. Here a layout is checked against its
//! storage before a slice is made of it.

use boostr_kernels::{Rows, parallel};
use numr::dtype::DType;
use numr::runtime::cpu::{CpuDevice, CpuRuntime};
use numr::tensor::{Storage, Tensor};

use super::check_layout;
use super::weight::HostBytes;
use crate::error::{Error, Result};

type Cpu = Tensor<CpuRuntime>;

fn refuse(name: &'static str, reason: impl Into<String>) -> Error {
    Error::Argument { name, reason: reason.into() }
}

/// Elements `offset..offset + len` of the tensor's storage, if it has them.
fn check_extent(name: &'static str, x: &Cpu, len: usize) -> Result<()> {
    let end = x.offset().checked_add(len);
    if end.is_none_or(|end| end > x.storage().len()) {
        let reason = format!(
            "layout of {len} elements from {} on is outside its storage of {}",
            x.offset(),
            x.storage().len()
        );
        return Err(refuse(name, reason));
    }
    Ok(())
}

/// A contiguous tensor of the same elements: itself, or a copy.
pub(super) fn contiguous(name: &'static str, x: &Cpu) -> Result<Cpu> {
    check_layout(name, x)?;
    if x.is_contiguous() { Ok(x.clone()) } else { Ok(x.contiguous()?) }
}

fn check_type(name: &'static str, x: &Cpu, dtype: DType) -> Result<()> {
    if x.dtype() != dtype {
        return Err(refuse(name, format!("expected {dtype:?}, found {:?}", x.dtype())));
    }
    Ok(())
}

/// The elements of a contiguous f32 tensor.
pub(crate) fn slice<'a>(name: &'static str, x: &'a Cpu) -> Result<&'a [f32]> {
    check_type(name, x, DType::F32)?;
    if !x.is_contiguous() {
        return Err(refuse(name, "expected a contiguous tensor"));
    }
    storage_slice(name, x, x.numel())
}

fn storage_slice<'a>(name: &'static str, x: &'a Cpu, len: usize) -> Result<&'a [f32]> {
    if len == 0 {
        return Ok(&[]);
    }
    check_extent(name, x, len)?;
    // SAFETY: the extent lies within the storage's allocation, whose elements are f32 (checked by the
    // callers), and `x` keeps the storage alive for 'a. Two gaps are the tensor library's own: its safe
    // `Tensor::empty` makes tensors without values, and its safe `_into` functions write to storages
    // that are shared; of our own code, `slice_mut` alone writes, and demands sole ownership.
    Ok(unsafe { std::slice::from_raw_parts(x.ptr() as *const f32, len) })
}

/// The elements of a 16-bit tensor as bits.
pub(super) fn bits_slice<'a>(name: &'static str, x: &'a Cpu) -> Result<&'a [u16]> {
    if !matches!(x.dtype(), DType::BF16 | DType::F16) || !x.is_contiguous() {
        return Err(refuse(name, "expected a contiguous 16-bit float tensor"));
    }
    if x.numel() == 0 {
        return Ok(&[]);
    }
    check_extent(name, x, x.numel())?;
    // SAFETY: as in `storage_slice`; any bits are a valid u16.
    Ok(unsafe { std::slice::from_raw_parts(x.ptr() as *const u16, x.numel()) })
}

/// An f32 tensor `[T, ..]` as `T` rows, which may be bands of wider rows.
///
/// The dimensions after the first must be contiguous among themselves.
pub(super) fn rows<'a>(name: &'static str, x: &'a Cpu) -> Result<Rows<'a>> {
    check_type(name, x, DType::F32)?;
    let (&count, inner) = x.shape().split_first().unwrap_or((&1, &[]));
    let width = inner
        .iter()
        .try_fold(1usize, |width, &size| width.checked_mul(size))
        .ok_or_else(|| refuse(name, "rows reach past the address space"))?;
    let mut expected = 1isize;
    for (&size, &stride) in inner.iter().zip(&x.strides()[x.ndim() - inner.len()..]).rev() {
        if size != 1 && stride != expected {
            return Err(refuse(name, "expected contiguous rows"));
        }
        expected = expected.saturating_mul(size.cast_signed());
    }
    let stride = match (count, x.strides().first()) {
        (0 | 1, _) | (_, None) => width,
        (_, Some(&stride)) => usize::try_from(stride)
            .ok()
            .filter(|&stride| stride >= width)
            .ok_or_else(|| refuse(name, "expected rows that do not overlap"))?,
    };
    let len = match count {
        0 => Some(0),
        _ => (count - 1).checked_mul(stride).and_then(|len| len.checked_add(width)),
    }
    .ok_or_else(|| refuse(name, "rows reach past the address space"))?;
    Ok(Rows::new(storage_slice(name, x, len)?, count, stride, 0, width))
}

/// The elements of an f32 tensor for writing; first copied where they are shared or not contiguous.
pub(super) fn slice_mut<'a>(name: &'static str, x: &'a mut Cpu) -> Result<&'a mut [f32]> {
    check_type(name, x, DType::F32)?;
    let whole = x.is_contiguous() && x.offset() == 0 && x.storage().len() == x.numel();
    if !whole || x.ref_count() != 1 || !x.owns_memory() {
        let mut copy = uninitialised(x.shape())?;
        let source = contiguous(name, x)?;
        let from = slice(name, &source)?;
        // SAFETY: a fresh allocation of as many elements as `from`, which it does not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr(), copy.ptr() as *mut f32, from.len());
        }
        std::mem::swap(x, &mut copy);
    }
    if x.numel() == 0 {
        return Ok(&mut []);
    }
    // The count of references is read without order: what another thread did before it dropped its
    // clone must come before our writes.
    std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
    // SAFETY: the storage is owned, has exactly these elements, all initialised, and `x`, borrowed
    // mutably for 'a, is its only reference.
    Ok(unsafe { std::slice::from_raw_parts_mut(x.ptr() as *mut f32, x.numel()) })
}

fn uninitialised(shape: &[usize]) -> Result<Cpu> {
    Ok(Tensor::empty(shape, DType::F32, &CpuDevice::new())?)
}

/// A new tensor of zeros, without the copies that the tensor library makes.
///
/// First touching fresh memory costs as much as a pass over it, so large ones are shared among threads.
pub(super) fn zeros(shape: &[usize]) -> Result<Cpu> {
    const PART: usize = 1 << 16;
    let x = uninitialised(shape)?;
    let (address, len) = (x.ptr() as usize, x.numel());
    let clear = |first: usize| {
        let count = PART.min(len - first);
        // SAFETY: the fresh allocation has `len` f32, for which all-zero bytes are 0.0; parts do not
        // overlap, and nobody else knows the address yet.
        unsafe { std::ptr::write_bytes((address as *mut f32).add(first), 0, count) };
    };
    if len <= PART {
        clear(0);
    } else {
        let parts = (0..len.div_ceil(PART)).collect();
        parallel::for_each(parts, len / 8, || (), |(), part: usize| clear(part * PART));
    }
    Ok(x)
}

/// A tensor over borrowed bytes, where they lie; `None` when they are not aligned for their type.
///
/// The caller keeps `bytes` alive as long as the tensor and all its views: [`Weight`](super::Weight)
/// owns both and gives no view away.
pub(super) fn borrowed(bytes: &HostBytes, dtype: DType, shape: &[usize]) -> Option<Cpu> {
    let data = bytes.as_slice();
    let align = dtype.size_in_bytes();
    if !(data.as_ptr() as usize).is_multiple_of(align) || cfg!(target_endian = "big") {
        return None;
    }
    let len = data.len() / align;
    // SAFETY: `len` aligned elements of a type for which all bits are valid, never written through
    // this storage: `slice_mut` refuses memory that is not owned. Its life is the caller's duty above.
    let storage = unsafe { Storage::from_ptr(data.as_ptr() as u64, len, dtype, &CpuDevice::new()) };
    Some(Tensor::from_storage_contiguous(storage, shape))
}
