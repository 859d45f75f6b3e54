//! Gradients of all parameters in one buffer, so that workers can exchange them as one slice.

use std::collections::BTreeMap;
use std::ops::{Index, Range};

use rayon::prelude::*;

use super::Parameters;

/// The sum of the gradients of some leaves of a batch, and the losses that they are of.
///
/// All gradients lie in one buffer, in the order of their parameters' names. So the buffers of two
/// workers with the same parameters can be added element by element.
///
/// ```
/// use boostr::train::Gradients;
///
/// let mut gradients: Gradients = [("b".into(), vec![3.0]), ("a".into(), vec![1.0, 2.0])].into();
/// assert_eq!(gradients.values(), [1.0, 2.0, 3.0]);
/// assert_eq!((&gradients["b"], gradients.places()["b"].clone()), (&[3.0][..], 2..3));
/// gradients.values_mut()[2] = 4.0;
/// assert_eq!(gradients.get("b"), Some(&[4.0][..]));
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Gradients {
    values: Vec<f32>,
    places: BTreeMap<String, Range<usize>>,
    /// Sum of the losses of the predicted tokens, in nats, without a weight.
    pub nats: f64,
    /// Tokens that were predicted.
    pub predicted: usize,
    /// Tokens that were read.
    pub tokens: usize,
}

impl Gradients {
    /// Zeros for each of `parameters`, of no tokens.
    #[must_use]
    pub fn zeros(parameters: &Parameters) -> Self {
        let zeros =
            |(name, p): (&String, &super::Parameter)| (name.clone(), vec![0.0; p.values.len()]);
        parameters.iter().map(zeros).collect()
    }

    /// All gradients, one parameter's after another's.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// All gradients, to be changed.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Where in [`values`](Self::values) the gradient of each parameter lies.
    #[must_use]
    pub fn places(&self) -> &BTreeMap<String, Range<usize>> {
        &self.places
    }

    /// The gradient of a parameter, with the elements in the parameter's order.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&[f32]> {
        self.values.get(self.places.get(name)?.clone())
    }

    /// The gradient of a parameter, to be changed.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut [f32]> {
        self.values.get_mut(self.places.get(name)?.clone())
    }

    /// The gradient of each parameter, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[f32])> {
        self.places.iter().map(|(name, place)| (name.as_str(), &self.values[place.clone()]))
    }

    /// Mean loss of the predicted tokens, in nats.
    #[must_use]
    pub fn loss(&self) -> f64 {
        self.nats / self.predicted as f64
    }

    /// Adds the next leaf's gradients; those of the first leaf are taken as they are.
    pub(super) fn add(&mut self, leaf: BTreeMap<String, Vec<f32>>) {
        if self.places.is_empty() {
            let Self { nats, predicted, tokens, .. } = *self;
            *self = Self { nats, predicted, tokens, ..Self::from(leaf) };
            return;
        }
        for (name, values) in leaf {
            let sums = self.get_mut(&name).unwrap_or_default();
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
    }
}

impl Index<&str> for Gradients {
    type Output = [f32];

    /// # Panics
    ///
    /// If there is no parameter of that name.
    fn index(&self, name: &str) -> &[f32] {
        &self.values[self.places[name].clone()]
    }
}

impl From<BTreeMap<String, Vec<f32>>> for Gradients {
    fn from(gradients: BTreeMap<String, Vec<f32>>) -> Self {
        let values = vec![0.0; gradients.values().map(Vec::len).sum()];
        let mut all = Self { values, ..Self::default() };
        let (mut pieces, mut rest, mut start) = (Vec::new(), &mut all.values[..], 0);
        for (name, values) in gradients {
            let piece;
            (piece, rest) = rest.split_at_mut(values.len());
            all.places.insert(name, start..start + values.len());
            start += values.len();
            pieces.push((piece, values));
        }
        pieces.into_par_iter().for_each(|(piece, values)| piece.copy_from_slice(&values));
        all
    }
}

impl<const N: usize> From<[(String, Vec<f32>); N]> for Gradients {
    fn from(gradients: [(String, Vec<f32>); N]) -> Self {
        BTreeMap::from(gradients).into()
    }
}

impl FromIterator<(String, Vec<f32>)> for Gradients {
    fn from_iter<I: IntoIterator<Item = (String, Vec<f32>)>>(gradients: I) -> Self {
        gradients.into_iter().collect::<BTreeMap<_, _>>().into()
    }
}
