//! Small steps between products: activations, gates, factors, sums of chosen rows, columns side by side.

use numr::dtype::DType;
use numr::runtime::Runtime;
use numr::tensor::Tensor;

pub use boostr_kernels::activation::Activation;

use super::{Client, ExpertWeights, expect, generic, shape_error, tensor, to_vec};
use crate::error::{Error, Result};

/// Elementwise operations on rows `[T, width]`.
pub trait ActivationOps<R: Runtime<DType = DType>>: Client<R> {
    /// `act(gate) * up`
    ///
    /// # Errors
    ///
    /// When arguments disagree; so for all methods here.
    fn glu(&self, act: Activation, gate: &Tensor<R>, up: &Tensor<R>) -> Result<Tensor<R>> {
        generic::glu(self.library(), act, gate, up)
    }

    /// `act(x)`
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn activate(&self, act: Activation, x: &Tensor<R>) -> Result<Tensor<R>> {
        generic::activate(self.library(), act, x)
    }

    /// `to + factor * x`
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn add_scaled(&self, to: Tensor<R>, x: &Tensor<R>, factor: f32) -> Result<Tensor<R>> {
        generic::add_scaled(self.library(), to, x, factor)
    }

    /// Each column times its factor, `factors` `[width]`.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn scale_columns(&self, x: &Tensor<R>, factors: &Tensor<R>) -> Result<Tensor<R>> {
        generic::scale_columns(self.library(), x, factors)
    }

    /// `to` with `factors[i] * x[i]` added to row `rows[i]`, in the order of i; `factors` `[rows, 1]`.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn add_rows(
        &self,
        to: Tensor<R>,
        x: &Tensor<R>,
        rows: &[usize],
        factors: &Tensor<R>,
    ) -> Result<Tensor<R>> {
        generic::add_rows(self.library(), to, x, rows, factors)
    }

    /// Weights of the chosen experts `[T, used]`, from the router's `scores` `[T, experts]`; `chosen` are
    /// the numbers of each row's experts, one row after another.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn expert_weights(
        &self,
        scores: &Tensor<R>,
        chosen: &[usize],
        weights: ExpertWeights,
    ) -> Result<Tensor<R>> {
        let (tokens, experts, used) = check_experts(scores, chosen)?;
        let scores = to_vec(scores)?;
        let rows = scores.chunks_exact(experts.max(1)).zip(chosen.chunks_exact(used.max(1)));
        let of: Vec<f32> = rows.flat_map(|(scores, chosen)| weights.of(scores, chosen)).collect();
        tensor(self, &of, &[tokens, used])
    }

    /// The columns of `x` `[T, width]`, then those of `y`, which has as many rows.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn concat_columns(&self, x: &Tensor<R>, y: &Tensor<R>) -> Result<Tensor<R>> {
        generic::concat_columns(self.library(), x, y)
    }
}

/// `(T, width)` of two tensors of one shape.
pub(super) fn check_pair<R: Runtime<DType = DType>>(
    names: [&'static str; 2],
    x: &Tensor<R>,
    y: &Tensor<R>,
) -> Result<(usize, usize)> {
    let &[tokens, width] = x.shape() else {
        return Err(shape_error(names[0], &[0, 0], x.shape()));
    };
    expect(names[0], x, &[tokens, width])?;
    expect(names[1], y, &[tokens, width])?;
    Ok((tokens, width))
}

/// T and the widths of two tensors with as many rows.
pub(super) fn check_columns<R: Runtime<DType = DType>>(
    x: &Tensor<R>,
    y: &Tensor<R>,
) -> Result<(usize, [usize; 2])> {
    let &[tokens, left] = x.shape() else {
        return Err(shape_error("x", &[0, 0], x.shape()));
    };
    let &[_, right] = y.shape() else {
        return Err(shape_error("y", &[tokens, 0], y.shape()));
    };
    expect("x", x, &[tokens, left])?;
    expect("y", y, &[tokens, right])?;
    Ok((tokens, [left, right]))
}

/// T, the number of experts, and of those that each row uses.
pub(super) fn check_experts<R: Runtime<DType = DType>>(
    scores: &Tensor<R>,
    chosen: &[usize],
) -> Result<(usize, usize, usize)> {
    let &[tokens, experts] = scores.shape() else {
        return Err(shape_error("scores", &[0, 0], scores.shape()));
    };
    expect("scores", scores, &[tokens, experts])?;
    let used = chosen.len() / tokens.max(1);
    let is_bad = chosen.iter().any(|&expert| expert >= experts);
    if is_bad || used * tokens != chosen.len() {
        let reason = format!("{} of {experts} experts for {tokens} rows", chosen.len());
        return Err(Error::Argument { name: "chosen", reason });
    }
    Ok((tokens, experts, used))
}

/// The width of rows that can be added to rows of `to`.
pub(super) fn check_add_rows<R: Runtime<DType = DType>>(
    to: &Tensor<R>,
    x: &Tensor<R>,
    rows: &[usize],
    factors: &Tensor<R>,
) -> Result<usize> {
    let &[tokens, width] = to.shape() else {
        return Err(shape_error("to", &[0, 0], to.shape()));
    };
    expect("to", to, &[tokens, width])?;
    expect("x", x, &[rows.len(), width])?;
    expect("factors", factors, &[rows.len(), 1])?;
    if let Some(row) = rows.iter().find(|&&row| row >= tokens) {
        let reason = format!("row {row} is not one of {tokens}");
        return Err(Error::Argument { name: "rows", reason });
    }
    Ok(width)
}
