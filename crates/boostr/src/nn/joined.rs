//! Several projections of the same rows: one product where their weights allow it.

use std::ops::Range;

use super::linear::Linear;
use super::params::Params;
use crate::backend::{Backend, Tensor};
use crate::error::{Error, Result};
use crate::ops::ActivationOps;

/// Linear layers with one input.
///
/// Neighbours whose weights are quantized blocks of one format are joined at load, row under row: for a
/// single token the start of a product costs as much as the product of a small matrix. Float weights stay
/// where they lie in the file.
pub struct Joined<B: Backend> {
    /// Each product, and which of the layers it holds.
    products: Vec<(Linear<B>, Range<usize>)>,
    /// Outputs of each layer.
    widths: Vec<usize>,
}

impl<B: Backend> Joined<B> {
    /// Loads layers of `width` inputs by their names and numbers of outputs, all with a bias or none.
    ///
    /// # Errors
    ///
    /// When a parameter is missing or no float.
    pub fn load(
        params: &Params<'_, B>,
        layers: &[(&str, usize)],
        width: usize,
        bias: bool,
    ) -> Result<Self> {
        let mut formats = Vec::new();
        for (name, _) in layers {
            let layer = params.under(name);
            let is_adapted = layer.has("lora_A.weight");
            formats.push(layer.format("weight")?.filter(|_| !is_adapted));
        }
        let mut products = Vec::new();
        let mut first = 0;
        while first < layers.len() {
            let alike = formats[first..].iter().take_while(|&&format| format == formats[first]);
            let count = if formats[first].is_some() { alike.count() } else { 1 };
            let range = first..first + count;
            let joined = Linear::load_joined(params, &layers[range.clone()], width, bias)?;
            products.push((joined, range));
            first += count;
        }
        Ok(Self { products, widths: layers.iter().map(|(_, out)| *out).collect() })
    }

    /// The same layers, with activations that are not rounded to 8 bits where a weight is quantized.
    #[must_use]
    pub fn precise(self) -> Self {
        let products = self.products.into_iter().map(|(linear, of)| (linear.precise(), of));
        Self { products: products.collect(), ..self }
    }

    /// `[T, in]` to what each layer gives, `[T, out]`, which may be bands of columns of wider tensors.
    ///
    /// # Errors
    ///
    /// When the width disagrees, there are not N layers, or memory is short.
    pub fn forward<const N: usize>(
        &self,
        client: &B::Client,
        x: &Tensor<B>,
    ) -> Result<[Tensor<B>; N]> {
        self.split(Linear::forward_all(client, &self.of(x))?)
    }

    /// Its products of `x`, for [`Linear::forward_all`].
    pub fn of<'a>(&'a self, x: &'a Tensor<B>) -> Vec<(&'a Linear<B>, &'a Tensor<B>)> {
        self.products.iter().map(|(linear, _)| (linear, x)).collect()
    }

    /// What each layer gives, of what its products gave.
    ///
    /// # Errors
    ///
    /// When there are not N layers.
    pub fn split<const N: usize>(
        &self,
        outputs: impl IntoIterator<Item = Tensor<B>>,
    ) -> Result<[Tensor<B>; N]> {
        let mut out = Vec::with_capacity(N);
        // As many outputs as there are products: what comes after them is left.
        for ((_, of), y) in self.products.iter().zip(outputs) {
            let mut column = 0;
            for &width in &self.widths[of.clone()] {
                out.push(y.narrow(1, column, width)?);
                column += width;
            }
        }
        let count = out.len();
        out.try_into().map_err(|_| no_projections(N, count))
    }

    /// What all layers give, side by side: `[T, sum of out]`, of what the products gave.
    ///
    /// # Errors
    ///
    /// When there is no layer, or memory is short.
    pub fn whole(
        &self,
        client: &B::Client,
        outputs: impl IntoIterator<Item = Tensor<B>>,
    ) -> Result<Tensor<B>> {
        let mut outputs = self.products.iter().zip(outputs).map(|(_, y)| y);
        let first = outputs.next().ok_or_else(|| no_projections(1, 0))?;
        outputs.try_fold(first, |left, y| client.concat_columns(&left, &y))
    }

    /// Bytes that a pass over the matrices reads.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.products.iter().map(|(linear, _)| linear.weight().size_in_bytes()).sum()
    }
}

fn no_projections(expected: usize, got: usize) -> Error {
    Error::Shape { name: "projections".into(), expected: vec![expected], got: vec![got] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Cpu, cpu};
    use crate::checkpoint::{Checkpoint, Dtype};
    use crate::nn::{Tensors, synthetic};
    use crate::ops::{self, Format};

    const LAYERS: [(&str, usize); 3] = [("q", 24), ("k", 5), ("v", 11)];

    /// Three projections of 64 inputs, the values of the second of `second`.
    fn outputs(second: Dtype, bias: bool, joined: bool) -> Vec<Vec<f32>> {
        let mut tensors = Tensors::default();
        for (name, rows) in LAYERS {
            tensors.add(format!("{name}.weight"), &[rows, 64]);
            if bias {
                tensors.add(format!("{name}.bias"), &[rows]);
            }
        }
        let [q4_0, other] = [Dtype::Block(Format::Q4_0), second]
            .map(|dtype| synthetic::checkpoint(&tensors, dtype).unwrap());
        let entries = q4_0.iter().map(|(name, entry)| {
            let entry = if name == "k.weight" { other.get(name).unwrap() } else { entry };
            (name.to_owned(), entry.clone())
        });
        let checkpoint = Checkpoint::from_entries("memory", entries.collect());
        let client = cpu();
        let params = Params::<Cpu>::new(&checkpoint, &client);
        let values: Vec<f32> = (0..3 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
        let x = ops::tensor(&client, &values, &[3, 64]).unwrap();
        let y = if joined {
            Joined::load(&params, &LAYERS, 64, bias).unwrap().forward(&client, &x).unwrap()
        } else {
            LAYERS.map(|(name, rows)| {
                Linear::load(&params.under(name), [rows, 64], bias)
                    .unwrap()
                    .forward(&client, &x)
                    .unwrap()
            })
        };
        y.iter().map(|y| ops::to_vec(y).unwrap()).collect()
    }

    #[test]
    fn joined_projections_give_the_bits_of_each_alone() {
        for second in [Dtype::Block(Format::Q4_0), Dtype::Block(Format::Q8_0), Dtype::F32] {
            for bias in [false, true] {
                let (got, expected) = (outputs(second, bias, true), outputs(second, bias, false));
                assert_eq!(got, expected, "{second:?} {bias}");
            }
        }
    }

    #[test]
    fn only_blocks_of_one_format_are_joined() {
        let mut tensors = Tensors::default();
        for name in ["a", "b", "c"] {
            tensors.add(format!("{name}.weight"), &[8, 32]);
        }
        let client = cpu();
        let count = |dtype: Dtype| {
            let checkpoint = synthetic::checkpoint(&tensors, dtype).unwrap();
            let params = Params::<Cpu>::new(&checkpoint, &client);
            Joined::load(&params, &[("a", 8), ("b", 8), ("c", 8)], 32, false)
                .unwrap()
                .products
                .len()
        };
        assert_eq!(count(Dtype::Block(Format::Q8_0)), 1);
        assert_eq!(count(Dtype::BF16), 3);
    }
}
