//! Linear layers and norms: parameters and the operation that uses them.

use super::params::Params;
use crate::backend::{Backend, Tensor, Weight};
use crate::error::Result;
use crate::ops::{self, ActivationOps, LinearOps, NormOps, Projection};

/// `x · wᵀ` plus a bias; hides the type that the weight is stored in.
///
/// Where the parameters `lora_A.weight` `[r, in]` and `lora_B.weight` `[out, r]` stand beside the weight,
/// `lora_scale · (x · Aᵀ) · Bᵀ` is added (Hu et al. 2021, *LoRA*): every layer that is one of these can be
/// adapted.
pub struct Linear<B: Backend> {
    weight: Weight<B>,
    bias: Option<Tensor<B>>,
    precise: bool,
    adapter: Option<Box<Adapter<B>>>,
}

/// Two layers in sequence beside another, the first one narrow: `scale · wide(narrow(x))` is added to what that
/// gives.
pub struct Adapter<B: Backend> {
    /// `[r, in]`
    narrow: Linear<B>,
    /// `[out, r]`
    wide: Linear<B>,
    scale: f32,
}

impl<B: Backend> Adapter<B> {
    /// Loads the two layers by their names: `[rank, in]` and `[out, rank]`.
    ///
    /// # Errors
    ///
    /// When a parameter is missing or no float.
    pub fn load(
        params: &Params<'_, B>,
        names: [&str; 2],
        [out, rank, width]: [usize; 3],
        scale: f32,
    ) -> Result<Self> {
        let [narrow, wide] = names.map(|name| params.under(name));
        Ok(Self {
            narrow: Linear::load(&narrow, [rank, width], false)?,
            wide: Linear::load(&wide, [out, rank], false)?,
            scale,
        })
    }

    /// The one beside a weight `[out, in]` under the same name, if there is one.
    ///
    /// # Errors
    ///
    /// When a parameter is missing or no float.
    pub fn beside(params: &Params<'_, B>, [out, width]: [usize; 2]) -> Result<Option<Self>> {
        if !params.has("lora_A.weight") {
            return Ok(None);
        }
        let scale = params.values("lora_scale", &[1])?.first().copied().unwrap_or(1.0);
        let rank = params.shape("lora_A.weight")?.first().copied().unwrap_or(0);
        Self::load(params, ["lora_A", "lora_B"], [out, rank, width], scale).map(Some)
    }

    /// What it makes of `x` `[T, in]`, times `factor`, added to `y` `[T, out]`.
    ///
    /// # Errors
    ///
    /// When a width disagrees or memory is short.
    pub fn add_to(
        &self,
        client: &B::Client,
        y: Tensor<B>,
        x: &Tensor<B>,
        factor: f32,
    ) -> Result<Tensor<B>> {
        let thin = self.narrow.forward(client, x)?; // [T, r]
        self.wide.forward_onto(client, &thin, y, factor * self.scale)
    }

    /// Bytes that a pass over the matrices reads.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.narrow.weight().size_in_bytes() + self.wide.weight().size_in_bytes()
    }
}

impl<B: Backend> Linear<B> {
    /// Loads `weight` `[out, in]` and, where there is to be one, `bias` `[out]`.
    ///
    /// # Errors
    ///
    /// When one is missing or no float.
    pub fn load(params: &Params<'_, B>, shape: [usize; 2], bias: bool) -> Result<Self> {
        let bias = if bias { Some(params.tensor("bias", &shape[..1])?) } else { None };
        let adapter = Adapter::beside(params, shape)?.map(Box::new);
        Ok(Self { weight: params.weight("weight", shape)?, bias, precise: false, adapter })
    }

    /// Loads the layers `names` of so many outputs each as one, the outputs of one after those of the other.
    ///
    /// # Errors
    ///
    /// When a parameter is missing or no float, or several weights are not blocks of one format.
    pub fn load_joined(
        params: &Params<'_, B>,
        layers: &[(&str, usize)],
        width: usize,
        bias: bool,
    ) -> Result<Self> {
        if let [(name, out)] = *layers {
            return Self::load(&params.under(name), [out, width], bias);
        }
        let bias = bias.then(|| -> Result<_> {
            let mut all = Vec::new();
            for (name, out) in layers {
                all.extend(params.under(name).values("bias", &[*out])?);
            }
            ops::tensor(params.client(), &all, &[all.len()])
        });
        let names: Vec<&str> = layers.iter().map(|(name, _)| *name).collect();
        let weight = params.joined_blocks(&names, "weight")?;
        Ok(Self { weight, bias: bias.transpose()?, precise: false, adapter: None })
    }

    /// The same layer, with activations that are not rounded to 8 bits where its weight is quantized.
    #[must_use]
    pub fn precise(self) -> Self {
        Self { precise: true, ..self }
    }

    /// Several layers, each of its own input `[T, in]`, as one step: what each gives.
    ///
    /// # Errors
    ///
    /// When a width disagrees or memory is short.
    pub fn forward_all(
        client: &B::Client,
        layers: &[(&Self, &Tensor<B>)],
    ) -> Result<Vec<Tensor<B>>> {
        let projections: Vec<Projection<'_, B::Runtime>> = layers
            .iter()
            .map(|(layer, x)| Projection {
                x,
                w: &layer.weight,
                bias: layer.bias.as_ref(),
                is_precise: layer.precise,
            })
            .collect();
        let outputs = client.linear_all(&projections)?.into_iter().zip(layers);
        outputs
            .map(|(y, (layer, x))| match &layer.adapter {
                None => Ok(y),
                Some(adapter) => adapter.add_to(client, y, x, 1.0),
            })
            .collect()
    }

    fn product(
        &self,
        client: &B::Client,
        x: &Tensor<B>,
        add_to: Option<Tensor<B>>,
    ) -> Result<Tensor<B>> {
        let bias = self.bias.as_ref();
        let y = if self.precise {
            client.linear_precise(x, &self.weight, bias, add_to)?
        } else {
            client.linear(x, &self.weight, bias, add_to)?
        };
        match &self.adapter {
            None => Ok(y),
            Some(adapter) => adapter.add_to(client, y, x, 1.0),
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
    /// What each column is multiplied with.
    weight: Tensor<B>,
    eps: f32,
}

impl<B: Backend> RmsNorm<B> {
    /// Loads `weight` `[width]`, which in norms that are `zero_centred` is what the factors are above 1.
    ///
    /// # Errors
    ///
    /// When it is missing or no float.
    pub fn load(
        params: &Params<'_, B>,
        width: usize,
        eps: f32,
        zero_centred: bool,
    ) -> Result<Self> {
        if !zero_centred {
            return Ok(Self { weight: params.tensor("weight", &[width])?, eps });
        }
        let offsets = params.offsets("weight", &[width])?;
        let weight = params.computed(|client| {
            let ones = ops::tensor(client, &vec![1.0; width], &[1, width])?;
            let sum = client.add_scaled(ones, &offsets.reshape(&[1, width])?, 1.0)?;
            Ok(sum.reshape(&[width])?)
        })?;
        Ok(Self { weight, eps })
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
