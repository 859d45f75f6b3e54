//! What a state is made of, the same in memory and in a file.

use super::SavedState;
use crate::backend::Backend;
use crate::error::Result;
use crate::models::State;
use crate::ops;

/// One thing that a layer keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// The convolution's window `[d_conv - 1, conv_dim]`.
    Conv,
    /// `[H, P, N]`
    Ssm,
    /// `[n, Hk, d_key]`, of the last n positions.
    Keys,
    /// `[n, Hk, d_value]`
    Values,
}

impl Part {
    pub(super) const ALL: [Self; 4] = [Self::Conv, Self::Ssm, Self::Keys, Self::Values];

    fn word(self) -> &'static str {
        match self {
            Self::Conv => "conv",
            Self::Ssm => "ssm",
            Self::Keys => "keys",
            Self::Values => "values",
        }
    }

    /// The tensor's name in a file.
    pub(super) fn name(self, layer: usize) -> String {
        format!("layers.{layer}.{}", self.word())
    }

    /// Layer and part of a name, if it is spelled as [`name`](Self::name) does.
    pub(super) fn parse(name: &str) -> Option<(usize, Self)> {
        let (layer, word) = name.strip_prefix("layers.")?.split_once('.')?;
        let part = Self::ALL.into_iter().find(|part| part.word() == word)?;
        let layer = layer.parse().ok()?;
        (part.name(layer) == name).then_some((layer, part))
    }

    /// Number of dimensions.
    pub(super) fn rank(self) -> usize {
        if self == Self::Conv { 2 } else { 3 }
    }

    /// Whether it is kept for each position.
    pub(super) fn is_kv(self) -> bool {
        matches!(self, Self::Keys | Self::Values)
    }
}

/// Where parts come from.
pub(super) trait Parts {
    /// Tokens seen.
    fn position(&self) -> usize;

    /// All parts by layer, each with its shape.
    fn parts(&self) -> Vec<(usize, Part, Vec<usize>)>;

    /// The shape of a part; `None` when the layer has none.
    fn shape(&self, layer: usize, part: Part) -> Option<Vec<usize>>;

    /// The elements of a part that is there, row-major.
    fn values(&self, layer: usize, part: Part) -> Result<Vec<f32>>;
}

impl<B: Backend> Parts for State<B> {
    fn position(&self) -> usize {
        State::position(self)
    }

    fn parts(&self) -> Vec<(usize, Part, Vec<usize>)> {
        let all = (0..self.n_layer()).flat_map(|layer| Part::ALL.map(|part| (layer, part)));
        all.filter_map(|(layer, part)| Some((layer, part, self.shape(layer, part)?))).collect()
    }

    fn shape(&self, layer: usize, part: Part) -> Option<Vec<usize>> {
        let kv = |width: fn(ops::KvSizes) -> usize| {
            let cache = self.kv(layer)?;
            let sizes = cache.sizes();
            let count = cache.len().saturating_sub(cache.first());
            Some(vec![count, sizes.nheads, width(sizes)])
        };
        match part {
            Part::Conv => Some(self.conv(layer)?.shape().to_vec()),
            Part::Ssm => Some(self.ssm(layer)?.shape().to_vec()),
            Part::Keys => kv(|sizes| sizes.d_key),
            // Those of a latent cache are channels of its keys.
            Part::Values if self.kv(layer)?.sizes().latent => None,
            Part::Values => kv(|sizes| sizes.d_value),
        }
    }

    fn values(&self, layer: usize, part: Part) -> Result<Vec<f32>> {
        let values = match part {
            Part::Conv => self.conv(layer).map(ops::to_vec),
            Part::Ssm => self.ssm(layer).map(ops::to_vec),
            Part::Keys => self.kv(layer).map(ops::KvCache::keys),
            Part::Values => self.kv(layer).map(ops::KvCache::values),
        };
        values.unwrap_or_else(|| Ok(Vec::new()))
    }
}

impl Parts for SavedState {
    fn position(&self) -> usize {
        self.position
    }

    fn parts(&self) -> Vec<(usize, Part, Vec<usize>)> {
        let all = self.checkpoint.iter();
        let mut parts: Vec<_> = all
            .filter_map(|(name, entry)| {
                let (layer, part) = Part::parse(name)?;
                Some((layer, part, entry.shape.clone()))
            })
            .collect();
        // By name layer 10 comes before layer 2.
        parts.sort_by_key(|&(layer, part, _)| (layer, part));
        parts
    }

    fn shape(&self, layer: usize, part: Part) -> Option<Vec<usize>> {
        Some(self.checkpoint.get(&part.name(layer))?.shape.clone())
    }

    fn values(&self, layer: usize, part: Part) -> Result<Vec<f32>> {
        let entry = self.checkpoint.get(&part.name(layer));
        entry.map_or(Ok(Vec::new()), crate::checkpoint::TensorEntry::to_f32)
    }
}
