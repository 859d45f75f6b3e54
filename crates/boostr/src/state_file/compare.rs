//! States as vectors: how long, how far apart, and what lies between.

use super::parts::{Part, Parts};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::models::{Model, State};
use crate::ops;

/// Euclidean norms of what one layer keeps; empty where it keeps no such thing, or that of no position.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LayerNorms {
    /// The layer.
    pub layer: usize,
    /// Of the convolution's window.
    pub conv: Option<f64>,
    /// Of each head's SSM state.
    pub ssm: Vec<f64>,
    /// Of each head's keys, all positions together.
    pub keys: Vec<f64>,
    /// Of each head's values.
    pub values: Vec<f64>,
}

impl LayerNorms {
    /// The norm of all heads of a part together.
    #[must_use]
    pub fn total(heads: &[f64]) -> f64 {
        heads.iter().map(|norm| norm * norm).sum::<f64>().sqrt()
    }

    fn set(&mut self, part: Part, norms: Vec<f64>) {
        match part {
            Part::Conv => self.conv = norms.first().copied(),
            Part::Ssm => self.ssm = norms,
            Part::Keys => self.keys = norms,
            Part::Values => self.values = norms,
        }
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
/// [`Error::Argument`] for no states, weights that are not finite or all 0, and states of different models;
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
    for (layer, part, shape) in mixed.parts() {
        if part.is_kv() {
            let what = "mixing of states with keys and values (those of Mamba-2 layers alone are)";
            return Err(Error::Unsupported { what: what.into() });
        }
        let mut sum = vec![0.0; shape.iter().product()];
        for (state, weight) in states {
            for (sum, x) in sum.iter_mut().zip(state.values(layer, part)?) {
                *sum += weight * x;
            }
        }
        let sum = ops::tensor(model.client(), &sum, &shape)?;
        match part {
            Part::Conv => mixed.set_conv(layer, sum)?,
            _ => mixed.set_ssm(layer, sum)?,
        }
    }
    mixed.set_position(states.iter().map(|(state, _)| state.position()).max().unwrap_or(0));
    Ok(mixed)
}

pub(super) fn norms_of(state: &impl Parts) -> Result<Vec<LayerNorms>> {
    by_layer(state, |layer, part, shape| Ok(head_norms(part, shape, &state.values(layer, part)?)))
}

pub(super) fn diff_of(a: &impl Parts, b: &impl Parts) -> Result<Vec<LayerNorms>> {
    let names = |parts: Vec<(usize, Part, Vec<usize>)>| -> Vec<(usize, Part)> {
        parts.into_iter().map(|(layer, part, _)| (layer, part)).collect()
    };
    if names(a.parts()) != names(b.parts()) {
        let reason = "expected states of one model, found other parts in other layers".to_owned();
        return Err(Error::Argument { name: "states", reason });
    }
    by_layer(a, |layer, part, shape| {
        let other = b.shape(layer, part).unwrap_or_default();
        let skipped = usize::from(part.is_kv());
        if shape.iter().skip(skipped).ne(other.iter().skip(skipped)) {
            let (expected, got) = (shape.to_vec(), other);
            return Err(Error::Shape { name: part.name(layer), expected, got });
        }
        let (mut x, mut y) = (a.values(layer, part)?, b.values(layer, part)?);
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
        Ok(head_norms(part, shape, &difference))
    })
}

/// What `of` makes of each part, by layer.
fn by_layer(
    state: &impl Parts,
    of: impl Fn(usize, Part, &[usize]) -> Result<Vec<f64>>,
) -> Result<Vec<LayerNorms>> {
    let mut all: Vec<LayerNorms> = Vec::new();
    for (layer, part, shape) in state.parts() {
        let norms = of(layer, part, &shape)?;
        match all.last_mut().filter(|last| last.layer == layer) {
            Some(last) => last.set(part, norms),
            None => {
                let mut new = LayerNorms { layer, ..LayerNorms::default() };
                new.set(part, norms);
                all.push(new);
            }
        }
    }
    Ok(all)
}

/// The norm of each head, of the window as a whole.
fn head_norms(part: Part, shape: &[usize], values: &[f32]) -> Vec<f64> {
    let square = |values: &[f32]| values.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>();
    let squares: Vec<f64> = match (part, shape) {
        (Part::Ssm, &[_, p, n]) => values.chunks(p.saturating_mul(n).max(1)).map(square).collect(),
        (Part::Keys | Part::Values, &[_, heads, width]) => {
            let row = heads.saturating_mul(width).max(1);
            let mut squares = vec![0.0; heads.min(values.len())];
            for row in values.chunks(row) {
                for (sum, head) in squares.iter_mut().zip(row.chunks(width.max(1))) {
                    *sum += square(head);
                }
            }
            squares
        }
        _ => vec![square(values)],
    };
    squares.into_iter().map(f64::sqrt).collect()
}
