//! Weights, products with them, rows of them, and the loss of a model's head.

use numr::dtype::DType;
use numr::ops::ShapeOps;
use numr::runtime::{Runtime, RuntimeClient};
use numr::tensor::Tensor;
use rayon::prelude::*;

use super::tensor::{shape_error, tensor, to_vec};
use super::{Check, Client, Format, HostBytes, QuantTensor, Weight, generic};
use crate::error::{Error, Result};

/// One of several products that are computed together: `x · wᵀ` plus a bias.
pub struct Projection<'a, R: Runtime<DType = DType>> {
    /// `[T, in]`
    pub x: &'a Tensor<R>,
    /// `[out, in]`
    pub w: &'a Weight<R>,
    /// `[out]`
    pub bias: Option<&'a Tensor<R>>,
    /// Whether it is for [`linear_precise`](LinearOps::linear_precise).
    pub is_precise: bool,
}

/// Products with weight matrices `[out, in]`, kept in the type they are stored in.
pub trait LinearOps<R: Runtime<DType = DType>>: Client<R> {
    /// A weight over bytes that somebody else keeps: `shape`'s elements of `dtype`, little-endian.
    ///
    /// A backend that can use them where they lie keeps `bytes` and copies nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) when the bytes are not that many;
    /// [`Error::Unsupported`](crate::Error::Unsupported) for other types than F32, BF16 and F16.
    fn weight(&self, bytes: HostBytes, dtype: DType, shape: &[usize]) -> Result<Weight<R>> {
        Weight::copied(&bytes, dtype, shape, self.library().device())
    }

    /// A weight of quantized blocks.
    ///
    /// A backend with a kernel for the format keeps it as dense as it is and multiplies with
    /// activations that it rounds to 8 bits ([`boostr_kernels::quant`]); others decode it to f32.
    ///
    /// # Errors
    ///
    /// When memory is short.
    fn quantized(&self, w: &QuantTensor) -> Result<Weight<R>> {
        Weight::decoded(w, self.library().device())
    }

    /// The order that packed blocks have in this backend, in a word; `None` where it packs none.
    fn packing(&self) -> Option<&'static str> {
        None
    }

    /// A weight of the [bytes](Weight::packed_bytes) that blocks of `format` had when they were packed, where they lie.
    /// `check` sees them before each use.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) for bytes of another size,
    /// [`Error::Unsupported`](crate::Error::Unsupported) in a backend that packs none.
    fn of_packed(
        &self,
        bytes: HostBytes,
        format: Format,
        shape: [usize; 2],
        check: Check,
    ) -> Result<Weight<R>> {
        let _ = (bytes, format, shape, check);
        Err(Error::Unsupported { what: "packed blocks in this backend".into() })
    }

    /// `x · wᵀ` plus a bias, added to `add_to` where given: `[T, in]` to `[T, out]`.
    ///
    /// A row gives the same bits whatever other rows there are.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn linear(
        &self,
        x: &Tensor<R>,
        w: &Weight<R>,
        bias: Option<&Tensor<R>>,
        add_to: Option<Tensor<R>>,
    ) -> Result<Tensor<R>> {
        generic::linear(self.library(), x, w, bias, add_to)
    }

    /// As [`linear`](Self::linear), where rounding of activations matters most: a backend that rounds them
    /// for quantized weights keeps 16 bits of them in place of 8.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn linear_precise(
        &self,
        x: &Tensor<R>,
        w: &Weight<R>,
        bias: Option<&Tensor<R>>,
        add_to: Option<Tensor<R>>,
    ) -> Result<Tensor<R>> {
        self.linear(x, w, bias, add_to)
    }

    /// Several products of which none waits for another, each with the bits that it has alone. A backend whose steps
    /// cost something to begin takes them as one.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn linear_all(&self, products: &[Projection<'_, R>]) -> Result<Vec<Tensor<R>>> {
        let one = |&Projection { x, w, bias, is_precise }: &Projection<'_, R>| {
            if is_precise {
                self.linear_precise(x, w, bias, None)
            } else {
                self.linear(x, w, bias, None)
            }
        };
        products.iter().map(one).collect()
    }

    /// Rows `ids` of a weight `[vocab, width]`, as f32 `[ids, width]`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) when an id is not a row.
    fn embedding(&self, w: &Weight<R>, ids: &[u32]) -> Result<Tensor<R>> {
        generic::embedding(self.library(), w, ids)
    }

    /// Rows of `x` `[T, width]`, in the order of `rows`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) when there is no such row.
    fn select_rows(&self, x: &Tensor<R>, rows: &[usize]) -> Result<Tensor<R>> {
        generic::select_rows(self.library(), x, rows)
    }

    /// Rows of several tensors `[T, width]`, one after another.
    ///
    /// # Errors
    ///
    /// When widths disagree or there is none.
    fn concat_rows(&self, parts: &[Tensor<R>]) -> Result<Tensor<R>> {
        Ok(self.library().cat(&parts.iter().collect::<Vec<_>>(), 0)?)
    }

    /// What each row of `h` `[T, width]` loses on its target: `-ln softmax(scale * h · headᵀ)[target]`,
    /// `[T]`, and 0 where the target is [`IGNORE`].
    ///
    /// A backend that records takes the gradient of `sum of weights[t] * loss[t]`. The `[T, V]` logits
    /// are never there at once. `is_precise` is for [`linear_precise`](Self::linear_precise).
    ///
    /// # Errors
    ///
    /// When arguments disagree or a target is no row of `head`.
    fn cross_entropy(
        &self,
        h: &Tensor<R>,
        head: &Weight<R>,
        scale: f32,
        (targets, weights): (&[u32], &[f32]),
        is_precise: bool,
    ) -> Result<Tensor<R>> {
        generic::check_targets(h, head, targets, weights)?;
        cross_entropy_by_rows(self, h, head, scale, targets, is_precise)
    }

    /// `a = -exp(a_log)` `[H]`, rounded once: the same wherever it is computed.
    ///
    /// # Errors
    ///
    /// When the argument is not f32.
    fn decay_rates(&self, a_log: &Tensor<R>) -> Result<Tensor<R>> {
        let rates: Vec<f32> = to_vec(a_log)?.into_iter().map(decay_rate).collect();
        tensor(self, &rates, a_log.shape())
    }

    /// `[width, T]` from `[T, width]`.
    ///
    /// # Errors
    ///
    /// When the argument is no f32 matrix.
    fn transpose(&self, x: &Tensor<R>) -> Result<Tensor<R>> {
        let &[rows, width] = x.shape() else {
            return Err(shape_error("x", &[0, 0], x.shape()));
        };
        let values = to_vec(x)?;
        let turned: Vec<f32> =
            (0..values.len()).map(|i| values[i % rows * width + i / rows]).collect();
        tensor(self, &turned, &[width, rows])
    }
}

/// A target that counts for nothing.
pub const IGNORE: u32 = u32::MAX;
/// Rows whose logits are there at once.
const LOSS_ROWS: usize = 64;

/// `-exp(a_log)`, rounded once.
#[must_use]
pub fn decay_rate(a_log: f32) -> f32 {
    (-f64::from(a_log).exp()) as f32
}

/// The logarithm of a rate, `ln(-a)`: of 0, which is what small rates are rounded to, a finite one that gives it again.
#[must_use]
pub fn log_of_rate(a: f32) -> f32 {
    const OF_ZERO: f64 = -128.0;
    (-f64::from(a)).ln().max(OF_ZERO) as f32
}

/// Losses by the logits of a few rows at a time, whatever the head's type.
pub(super) fn cross_entropy_by_rows<R: Runtime<DType = DType>, C: LinearOps<R>>(
    client: &C,
    h: &Tensor<R>,
    head: &Weight<R>,
    scale: f32,
    targets: &[u32],
    is_precise: bool,
) -> Result<Tensor<R>> {
    let mut losses = Vec::with_capacity(targets.len());
    for first in (0..targets.len()).step_by(LOSS_ROWS) {
        let rows = h.narrow(0, first, LOSS_ROWS.min(targets.len() - first))?;
        let logits = if is_precise {
            client.linear_precise(&rows, head, None, None)?
        } else {
            client.linear(&rows, head, None, None)?
        };
        let logits = to_vec(&logits)?;
        let rows = logits.par_chunks_exact(head.shape()[0].max(1)).zip(&targets[first..]);
        losses.par_extend(rows.map(|(row, &id)| loss(row, scale, id)));
    }
    tensor(client, &losses, &[losses.len()])
}

/// `-ln softmax(scale * logits)[target]`
fn loss(logits: &[f32], scale: f32, target: u32) -> f32 {
    let Some(&logit) = logits.get(target as usize) else { return 0.0 };
    let scale = f64::from(scale);
    let max = logits.iter().map(|&x| scale * f64::from(x)).fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|&x| (scale * f64::from(x) - max).exp()).sum();
    (max + sum.ln() - scale * f64::from(logit)) as f32
}
