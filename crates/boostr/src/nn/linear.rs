//! Linear layers and norms: parameters and the operation that uses them.

use super::params::Params;
use crate::backend::{Backend, Tensor, Weight};
use crate::error::Result;
use crate::ops::{self, ActivationOps, LinearOps, NormOps};

/// `x · wᵀ` plus a bias; hides the type that the weight is stored in.
pub struct Linear<B: Backend> {
    weight: Weight<B>,
    bias: Option<Tensor<B>>,
    precise: bool,
}

impl<B: Backend> Linear<B> {
    /// Loads `weight` `[out, in]` and, where there is to be one, `bias` `[out]`.
    ///
    /// # Errors
    ///
    /// When one is missing or no float.
    pub fn load(params: &Params<'_, B>, bias: bool) -> Result<Self> {
        let bias = if bias { Some(params.tensor("bias")?) } else { None };
        Ok(Self { weight: params.weight("weight")?, bias, precise: false })
    }

    /// Loads the layers `names` as one, the outputs of one after those of the other.
    ///
    /// # Errors
    ///
    /// When a parameter is missing or no float, or several weights are not blocks of one format.
    pub fn load_joined(params: &Params<'_, B>, names: &[&str], bias: bool) -> Result<Self> {
        if let [name] = names {
            return Self::load(&params.under(name), bias);
        }
        let bias = bias.then(|| -> Result<_> {
            let mut all = Vec::new();
            for name in names {
                all.extend(params.under(name).values("bias")?);
            }
            ops::tensor(params.client(), &all, &[all.len()])
        });
        let weight = params.joined_blocks(names, "weight")?;
        Ok(Self { weight, bias: bias.transpose()?, precise: false })
    }

    /// The same layer, with activations that are not rounded to 8 bits where its weight is quantized.
    #[must_use]
    pub fn precise(self) -> Self {
        Self { precise: true, ..self }
    }

    fn product(
        &self,
        client: &B::Client,
        x: &Tensor<B>,
        add_to: Option<Tensor<B>>,
    ) -> Result<Tensor<B>> {
        let bias = self.bias.as_ref();
        if self.precise {
            client.linear_precise(x, &self.weight, bias, add_to)
        } else {
            client.linear(x, &self.weight, bias, add_to)
        }
    }

    /// `[T, in]` to `[T, out]`.
    ///
    /// # Errors
    ///
    /// When the width disagrees or memory is short.
    pub fn forward(&self, client: &B::Client, x: &Tensor<B>) -> Result<Tensor<B>> {
        self.product(client, x, None)
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
            return self.product(client, x, Some(residual));
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
