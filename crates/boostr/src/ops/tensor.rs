//! Tensors from values and back, views, and the checks of arguments.

use numr::dtype::DType;
use numr::runtime::{Runtime, RuntimeClient};
use numr::tensor::Tensor;

use super::Client;
use crate::error::{Error, Result};

/// A view with the last dimension of `x` split into `sizes`, whatever the strides of the others.
///
/// # Errors
///
/// [`Error::Shape`] when the last dimension is not contiguous or not their product.
pub fn split_last<R: Runtime<DType = DType>>(x: &Tensor<R>, sizes: &[usize]) -> Result<Tensor<R>> {
    let (&width, outer) = x.shape().split_last().unwrap_or((&1, &[]));
    let product = sizes.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
    if product != Some(width) || (width > 1 && x.strides().last() != Some(&1)) {
        return Err(shape_error("x", sizes, x.shape()));
    }
    let mut shape = outer.to_vec();
    let mut strides = x.strides()[..outer.len()].to_vec();
    let mut inner = width.max(1);
    for &size in sizes {
        inner /= size.max(1);
        shape.push(size);
        strides.push(inner.cast_signed());
    }
    let layout = numr::tensor::Layout::new(shape, strides, x.offset());
    Ok(Tensor::from_parts(x.storage().clone(), layout))
}

/// A new f32 tensor of `shape` that holds `data`.
///
/// # Errors
///
/// When the sizes disagree or memory is short.
pub fn tensor<R: Runtime<DType = DType>>(
    client: &impl Client<R>,
    data: &[f32],
    shape: &[usize],
) -> Result<Tensor<R>> {
    let x = Tensor::from_slice(data, shape, client.library().device())?;
    client.made(None, &x);
    Ok(x)
}

/// A new f32 tensor of zeros.
///
/// # Errors
///
/// When memory is short.
pub fn zeros<R: Runtime<DType = DType>>(
    client: &impl Client<R>,
    shape: &[usize],
) -> Result<Tensor<R>> {
    let len = shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim));
    let mut data: Vec<f32> = Vec::new();
    if len.is_none_or(|len| data.try_reserve_exact(len).is_err()) {
        let what = format!("tensor of {shape:?} f32: there is not so much memory");
        return Err(Error::Unsupported { what });
    }
    data.resize(len.unwrap_or(0), 0.0);
    tensor(client, &data, shape)
}

/// The elements of an f32 tensor, row-major, whatever its strides.
///
/// # Errors
///
/// [`Error::Argument`] for another type.
pub fn to_vec<R: Runtime<DType = DType>>(x: &Tensor<R>) -> Result<Vec<f32>> {
    expect("x", x, x.shape())?;
    Ok(x.contiguous()?.try_to_vec()?)
}

/// Where a tensor's storage is, and its bytes: clones and views share one.
pub(crate) fn block<R: Runtime<DType = DType>>(x: &Tensor<R>) -> (usize, usize) {
    (x.storage().ptr() as usize, x.storage().size_in_bytes())
}

pub(crate) fn shape_error(name: &str, expected: &[usize], got: &[usize]) -> Error {
    Error::Shape { name: name.into(), expected: expected.to_vec(), got: got.to_vec() }
}

/// Checks that a layout stays inside its storage, which the tensor library believes unseen.
pub(crate) fn check_layout<R: Runtime<DType = DType>>(
    name: &'static str,
    x: &Tensor<R>,
) -> Result<()> {
    let (mut low, mut high) = (x.offset().cast_signed(), x.offset().cast_signed());
    for (&size, &stride) in x.shape().iter().zip(x.strides()) {
        let reach = size.saturating_sub(1).cast_signed().saturating_mul(stride);
        low = low.saturating_add(reach.min(0));
        high = high.saturating_add(reach.max(0));
    }
    let len = x.storage().len();
    if x.shape().contains(&0) || (low >= 0 && high.unsigned_abs() < len) {
        return Ok(());
    }
    let reason = format!("layout reaches from {low} to {high} in a storage of {len} elements");
    Err(Error::Argument { name, reason })
}

/// Checks type, shape and layout of an argument.
pub(crate) fn expect<R: Runtime<DType = DType>>(
    name: &'static str,
    x: &Tensor<R>,
    shape: &[usize],
) -> Result<()> {
    if x.dtype() != DType::F32 {
        let reason = format!("expected F32, found {:?}", x.dtype());
        return Err(Error::Argument { name, reason });
    }
    if x.shape() != shape {
        return Err(shape_error(name, shape, x.shape()));
    }
    check_layout(name, x)
}

pub(crate) fn check_runs(runs: &[usize], tokens: usize, states: usize) -> Result<()> {
    let sum = runs.iter().try_fold(0usize, |sum, &len| sum.checked_add(len));
    if sum != Some(tokens) {
        let reason = format!("expected lengths that sum to {tokens} tokens, found {runs:?}");
        return Err(Error::Argument { name: "runs", reason });
    }
    if states != runs.len() {
        let reason = format!("expected one for each of {} runs, found {states}", runs.len());
        return Err(Error::Argument { name: "states", reason });
    }
    Ok(())
}
