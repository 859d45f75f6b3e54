//! Linear layers and norms: parameters and the operation that uses them.

use super::params::Params;
use crate::backend::{Backend, Tensor};
use crate::error::Result;
use crate::ops::{ActivationOps, LinearOps, NormOps, Weight};

/// `x · wᵀ` plus a bias; hides the type that the weight is stored in.
pub struct Linear<B: Backend> {
    weight: Weight<B>,
    bias: Option<Tensor<B>>,
}

impl<B: Backend> Linear<B> {
    /// Loads `weight` `[out, in]` and, where there is to be one, `bias` `[out]`.
    ///
    /// # Errors
    ///
    /// When one is missing or no float.
    pub fn load(params: &Params<'_, B>, bias: bool) -> Result<Self> {
        let bias = if bias { Some(params.tensor("bias")?) } else { None };
        Ok(Self { weight: params.weight("weight")?, bias })
    }

    /// `[T, in]` to `[T, out]`.
    ///
    /// # Errors
    ///
    /// When the width disagrees or memory is short.
    pub fn forward(&self, client: &B::Client, x: &Tensor<B>) -> Result<Tensor<B>> {
        client.linear(x, &self.weight, self.bias.as_ref(), None)
    }

    /// The same times `factor`, added to `residual` `[T, out]`.
    ///
    /// # Errors
    ///
    /// When a width disagrees or memory is short.
    pub fn forward_onto(
        &self,
        client: &B::Client,
        x: &Tensor<B>,
        residual: Tensor<B>,
        factor: f32,
    ) -> Result<Tensor<B>> {
        if factor == 1.0 {
            return client.linear(x, &self.weight, self.bias.as_ref(), Some(residual));
        }
        client.add_scaled(residual, &self.forward(client, x)?, factor)
    }

    /// The weight matrix.
    #[must_use]
    pub fn weight(&self) -> &Weight<B> {
        &self.weight
    }
}

/// Root-mean-square norm with its weight in f32.
pub struct RmsNorm<B: Backend> {
    weight: Tensor<B>,
    eps: f32,
}

impl<B: Backend> RmsNorm<B> {
    /// Loads `weight` `[width]`.
    ///
    /// # Errors
    ///
    /// When it is missing or no float.
    pub fn load(params: &Params<'_, B>, eps: f32) -> Result<Self> {
        Ok(Self { weight: params.tensor("weight")?, eps })
    }

    /// Normalises each row of `[T, width]`.
    ///
    /// # Errors
    ///
    /// When the width disagrees or memory is short.
    pub fn forward(&self, client: &B::Client, x: &Tensor<B>) -> Result<Tensor<B>> {
        client.rmsnorm(x, &self.weight, self.eps)
    }
}
