//! States as vectors: how long, how far apart, and what lies between.

use super::parts::{Part, Parts};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::models::{Model, State};
use crate::nn::Kept;
use crate::ops;

/// Euclidean norms of the tensors that one layer keeps.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LayerNorms {
    /// The layer.
    pub layer: usize,
    /// The norms of each tensor, by the name that it has in a file, in the order of the layer's slots.
    pub tensors: Vec<TensorNorms>,
}

/// Norms of one tensor of a state.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorNorms {
    /// Its name within the layer: `conv`, `ssm`, `keys`, `values`.
    pub name: String,
    /// Whether there is a norm for each head; else there is one of all.
    pub by_head: bool,
    /// The norms. Those of keys and values are of all positions together, none where there is no position.
    pub norms: Vec<f64>,
}

impl TensorNorms {
    fn total(&self) -> Option<f64> {
        let square: f64 = self.norms.iter().map(|norm| norm * norm).sum();
        (!self.norms.is_empty()).then(|| square.sqrt())
    }
}

impl LayerNorms {
    /// The norms of the tensor `name`, by head where it has heads; empty where the layer has no such tensor.
    #[must_use]
    pub fn of(&self, name: &str) -> &[f64] {
        self.tensor(name).map_or(&[], |tensor| &tensor.norms)
    }

    /// The norm of the tensor `name`, all heads together.
    #[must_use]
    pub fn total(&self, name: &str) -> Option<f64> {
        self.tensor(name)?.total()
    }

    fn tensor(&self, name: &str) -> Option<&TensorNorms> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}

/// Norms of what each layer of a state keeps; layers that keep nothing are left out.
///
/// # Errors
///
/// When memory is short.
pub fn norms<B: Backend>(state: &State<B>) -> Result<Vec<LayerNorms>> {
    norms_of(state)
}

/// Norms of the difference of two states of one model. Of keys and values these are of the positions that
/// both have.
///
/// # Errors
///
/// [`Error::Shape`] or [`Error::Argument`] for states of different models.
pub fn diff<B: Backend>(a: &State<B>, b: &State<B>) -> Result<Vec<LayerNorms>> {
    diff_of(a, b)
}

/// Experimental: the weighted sum of states of one model without attention, as *State Soup* (arXiv 2406.08423) has it.
/// What a model makes of such a state is not known; weights that sum to 1 keep its scale. Its position is the largest.
///
/// # Errors
///
/// [`Error::Argument`] for no states, weights that are not finite or all 0, a mixture that is not finite, and states of
/// different models;
/// [`Error::Unsupported`] for a model with attention, whose keys and values belong to positions.
pub fn mix<B: Backend>(model: &Model<B>, states: &[(&State<B>, f32)]) -> Result<State<B>> {
    let refuse = |reason: String| Error::Argument { name: "states", reason };
    if let Some((i, (_, weight))) = states.iter().enumerate().find(|(_, s)| !s.1.is_finite()) {
        return Err(refuse(format!("weight {i}: expected a finite number, found {weight}")));
    }
    if states.iter().all(|(_, weight)| *weight == 0.0) {
        return Err(refuse(format!("expected a weight other than 0, found {} of 0", states.len())));
    }
    let mut mixed = model.new_state()?;
    for (state, _) in states {
        model.check_state(state)?;
    }
    for (part, shape) in mixed.parts() {
        if part.is_kv() {
            let what = "mixing of states with keys and values (those of Mamba-2 layers alone are)";
            return Err(Error::Unsupported { what: what.into() });
        }
        let mut sum = vec![0.0; shape.iter().product()];
        for (state, weight) in states {
            for (sum, x) in sum.iter_mut().zip(state.values(&part)?) {
                *sum += weight * x;
            }
        }
        if let Some(value) = sum.iter().find(|value| !value.is_finite()) {
            return Err(refuse(format!(
                "tensor `{part}` of the mixture: expected finite numbers, found {value}"
            )));
        }
        let sum = ops::tensor(model.client(), &sum, &shape)?;
        mixed.set(part.layer, &part.name, Kept::Tensor(sum))?;
    }
    mixed.set_position(states.iter().map(|(state, _)| state.position()).max().unwrap_or(0));
    Ok(mixed)
}

pub(super) fn norms_of(state: &impl Parts) -> Result<Vec<LayerNorms>> {
    by_layer(state, |part, shape| Ok(norms_by_head(part, shape, &state.values(part)?)))
}

pub(super) fn diff_of(a: &impl Parts, b: &impl Parts) -> Result<Vec<LayerNorms>> {
    let names = |parts: Vec<(Part, Vec<usize>)>| -> Vec<Part> {
        parts.into_iter().map(|(part, _)| part).collect()
    };
    if names(a.parts()) != names(b.parts()) {
        let reason = "expected states of one model, found other parts in other layers".to_owned();
        return Err(Error::Argument { name: "states", reason });
    }
    by_layer(a, |part, shape| {
        let other = b.shape(part).unwrap_or_default();
        let skipped = usize::from(part.is_kv());
        if shape.iter().skip(skipped).ne(other.iter().skip(skipped)) {
            let (expected, got) = (shape.to_vec(), other);
            return Err(Error::Shape { name: part.to_string(), expected, got });
        }
        let (mut x, mut y) = (a.values(part)?, b.values(part)?);
        if part.is_kv() {
            // Rows are of the last positions of each.
            let row: usize = shape.iter().skip(1).product();
            let ends = [a.position(), b.position()];
            let first = |end: usize, shape: &[usize]| {
                end.saturating_sub(shape.first().copied().unwrap_or(0))
            };
            let firsts = [first(a.position(), shape), first(b.position(), &other)];
            let (from, to) = (firsts[0].max(firsts[1]), ends[0].min(ends[1]));
            for (values, first) in [(&mut x, firsts[0]), (&mut y, firsts[1])] {
                let skipped = from.saturating_sub(first).saturating_mul(row).min(values.len());
                values.drain(..skipped);
                values.truncate(to.saturating_sub(from).saturating_mul(row));
            }
        }
        let difference: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x - y).collect();
        Ok(norms_by_head(part, shape, &difference))
    })
}

/// What `of` makes of each part, by layer.
fn by_layer(
    state: &impl Parts,
    of: impl Fn(&Part, &[usize]) -> Result<TensorNorms>,
) -> Result<Vec<LayerNorms>> {
    let mut all: Vec<LayerNorms> = Vec::new();
    for (part, shape) in state.parts() {
        let norms = of(&part, &shape)?;
        match all.last_mut().filter(|last| last.layer == part.layer) {
            Some(last) => last.tensors.push(norms),
            None => all.push(LayerNorms { layer: part.layer, tensors: vec![norms] }),
        }
    }
    Ok(all)
}

/// The norm of each head of a tensor that has three dimensions, or that of all.
fn norms_by_head(part: &Part, shape: &[usize], values: &[f32]) -> TensorNorms {
    let square = |values: &[f32]| values.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>();
    let squares: Vec<f64> = match *shape {
        [_, heads, width] if part.is_kv() => {
            let row = heads.saturating_mul(width).max(1);
            let mut squares = vec![0.0; heads.min(values.len())];
            for row in values.chunks(row) {
                for (sum, head) in squares.iter_mut().zip(row.chunks(width.max(1))) {
                    *sum += square(head);
                }
            }
            squares
        }
        [_, p, n] => values.chunks(p.saturating_mul(n).max(1)).map(square).collect(),
        _ => vec![square(values)],
    };
    let norms = squares.into_iter().map(f64::sqrt).collect();
    TensorNorms { name: part.name.clone(), by_head: shape.len() == 3, norms }
}
