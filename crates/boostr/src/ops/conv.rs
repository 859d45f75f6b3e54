//! Causal depthwise convolution with a carried window.

use numr::dtype::DType;
use numr::runtime::Runtime;
use numr::tensor::Tensor;

use super::tensor::{check_runs, expect, shape_error};
use super::{Client, generic};
use crate::error::Result;

/// Weights of a causal depthwise convolution.
#[derive(Debug, Clone)]
pub struct CausalConv<'a, R: Runtime> {
    /// Taps `[K, C]`, oldest first, K >= 1.
    pub weight: &'a Tensor<R>,
    /// `[C]`
    pub bias: Option<&'a Tensor<R>>,
    /// Whether silu follows.
    pub silu: bool,
}

impl<R: Runtime<DType = DType>> CausalConv<'_, R> {
    /// `(T, C)` of an input that fits.
    pub(super) fn check(
        &self,
        x: &Tensor<R>,
        runs: &[usize],
        windows: &[&mut Tensor<R>],
    ) -> Result<(usize, usize)> {
        let (&[tokens, channels], &[taps, _]) = (x.shape(), self.weight.shape()) else {
            return Err(shape_error("x", &[0, 0], x.shape()));
        };
        expect("x", x, x.shape())?;
        expect("weight", self.weight, &[taps.max(1), channels])?;
        if let Some(bias) = self.bias {
            expect("bias", bias, &[channels])?;
        }
        check_runs(runs, tokens, windows.len())?;
        for window in windows {
            expect("windows", window, &[taps - 1, channels])?;
        }
        Ok((tokens, channels))
    }
}

/// Causal depthwise convolution.
pub trait CausalConvOps<R: Runtime<DType = DType>>: Client<R> {
    /// Convolves the rows `[T, C]` of each run along time.
    ///
    /// `windows` holds a `[K - 1, C]` tensor for each run: the last inputs before its first token,
    /// oldest first (zeros for a new sequence), replaced by the last inputs of the run.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn causal_conv1d(
        &self,
        x: &Tensor<R>,
        conv: &CausalConv<'_, R>,
        runs: &[usize],
        windows: &mut [&mut Tensor<R>],
    ) -> Result<Tensor<R>> {
        generic::causal_conv1d(self.library(), x, conv, runs, windows)
    }
}
