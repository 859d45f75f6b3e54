//! Root-mean-square norms, plain, gated and grouped, and L2 norms.

use numr::dtype::DType;
use numr::runtime::Runtime;
use numr::tensor::Tensor;

use super::tensor::{expect, shape_error};
use super::{Activation, Client, generic};
use crate::error::{Error, Result};

/// Options of [`NormOps::gated_rmsnorm`].
#[derive(Debug, Clone)]
pub struct GatedNorm<'a, R: Runtime> {
    /// `[width]`, or `[width / ngroups]`, which all groups share.
    pub weight: &'a Tensor<R>,
    /// Groups of neighbouring channels with a mean of their own; divides the width.
    pub ngroups: usize,
    /// Added to the mean of squares.
    pub eps: f32,
    /// Norm first, then gate; else gate first.
    pub norm_before_gate: bool,
    /// What the gate goes through, silu as a rule.
    pub activation: Activation,
}

impl<R: Runtime<DType = DType>> GatedNorm<'_, R> {
    /// `(T, width)` of inputs that fit.
    pub(super) fn check(&self, y: &Tensor<R>, z: &Tensor<R>) -> Result<(usize, usize)> {
        let &[tokens, width] = y.shape() else {
            return Err(shape_error("y", &[0, 0], y.shape()));
        };
        expect("y", y, &[tokens, width])?;
        expect("z", z, &[tokens, width])?;
        if self.ngroups == 0 || !width.is_multiple_of(self.ngroups) {
            let reason = format!("{} groups do not divide width {width}", self.ngroups);
            return Err(Error::Argument { name: "ngroups", reason });
        }
        if self.weight.shape() == [width / self.ngroups] {
            expect("weight", self.weight, &[width / self.ngroups])?;
        } else {
            expect("weight", self.weight, &[width])?;
        }
        Ok((tokens, width))
    }
}

/// `(T, width)` of rows of whole groups.
pub(super) fn check_groups<R: Runtime<DType = DType>>(
    x: &Tensor<R>,
    group: usize,
) -> Result<(usize, usize)> {
    let &[tokens, width] = x.shape() else {
        return Err(shape_error("x", &[0, 0], x.shape()));
    };
    expect("x", x, &[tokens, width])?;
    if group == 0 || !width.is_multiple_of(group) {
        let reason = format!("groups of {group} do not fill width {width}");
        return Err(Error::Argument { name: "group", reason });
    }
    Ok((tokens, width))
}

/// Root-mean-square norms of rows.
pub trait NormOps<R: Runtime<DType = DType>>: Client<R> {
    /// `x / sqrt(mean(x²) + eps) * weight` for each row of `[T, width]`.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn rmsnorm(&self, x: &Tensor<R>, weight: &Tensor<R>, eps: f32) -> Result<Tensor<R>> {
        generic::rmsnorm(self.library(), x, weight, eps)
    }

    /// Gates rows of `y` `[T, width]` by `activation(z)` and normalises them by groups.
    ///
    /// # Errors
    ///
    /// When arguments disagree.
    fn gated_rmsnorm(
        &self,
        y: &Tensor<R>,
        z: &Tensor<R>,
        norm: &GatedNorm<'_, R>,
    ) -> Result<Tensor<R>> {
        generic::gated_rmsnorm(self.library(), y, z, norm)
    }

    /// `x / sqrt(sum(x²) + eps)` for each `group` of neighbouring columns of `[T, width]`.
    ///
    /// With eps inside the root, zeros stay zeros and their gradient is finite.
    ///
    /// # Errors
    ///
    /// When `group` is 0 or does not divide the width.
    fn l2norm(&self, x: &Tensor<R>, group: usize, eps: f32) -> Result<Tensor<R>> {
        generic::l2norm(self.library(), x, group, eps)
    }
}
