//! The tensors of a state, the same in memory and in a file.

use std::fmt;

use super::SavedState;
use crate::backend::Backend;
use crate::error::Result;
use crate::models::State;
use crate::nn::Kept;
use crate::ops;

/// What keys and values are called; every other name is that of a slot of a fixed shape.
pub(super) const KEYS: &str = "keys";
/// See [`KEYS`].
pub(super) const VALUES: &str = "values";

/// Longest name of a slot.
const MAX_NAME: usize = 32;

/// One tensor of a state: its layer and its name there. In a file it is `layers.I.NAME`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    pub layer: usize,
    pub name: String,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layers.{}.{}", self.layer, self.name)
    }
}

impl Part {
    pub(super) fn new(layer: usize, name: &str) -> Self {
        Self { layer, name: name.to_owned() }
    }

    /// The part that a name in a file is spelled for, as [`Display`](fmt::Display) does.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (layer, name) = text.strip_prefix("layers.")?.split_once('.')?;
        let part = Self::new(layer.parse().ok()?, name);
        let is_word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        let is_name = (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(is_word);
        (is_name && name != "layer" && part.to_string() == text).then_some(part)
    }

    /// Whether it is kept for each position.
    pub(super) fn is_kv(&self) -> bool {
        [KEYS, VALUES].contains(&&*self.name)
    }
}

/// Where parts come from.
pub(super) trait Parts {
    /// Tokens seen.
    fn position(&self) -> usize;

    /// All parts by layer, each with its shape.
    fn parts(&self) -> Vec<(Part, Vec<usize>)>;

    /// The shape of a part; `None` when the layer has none.
    fn shape(&self, part: &Part) -> Option<Vec<usize>> {
        self.parts().into_iter().find(|(own, _)| own == part).map(|(_, shape)| shape)
    }

    /// The elements of a part that is there, row-major.
    fn values(&self, part: &Part) -> Result<Vec<f32>>;
}

impl<B: Backend> Parts for State<B> {
    fn position(&self) -> usize {
        State::position(self)
    }

    fn parts(&self) -> Vec<(Part, Vec<usize>)> {
        let mut parts = Vec::new();
        for (layer, slot, kept) in self.slots() {
            match kept {
                Kept::Tensor(x) => parts.push((Part::new(layer, slot.name()), x.shape().to_vec())),
                Kept::Rows(cache) => {
                    let sizes = cache.sizes();
                    let count = cache.len().saturating_sub(cache.first());
                    let rows = |width| vec![count, sizes.nheads, width];
                    parts.push((Part::new(layer, KEYS), rows(sizes.d_key)));
                    // Those of a latent cache are channels of its keys.
                    if !sizes.latent {
                        parts.push((Part::new(layer, VALUES), rows(sizes.d_value)));
                    }
                }
            }
        }
        parts
    }

    fn values(&self, part: &Part) -> Result<Vec<f32>> {
        let mut slots = self.slots().filter(|(layer, ..)| *layer == part.layer);
        let values = slots.find_map(|(_, slot, kept)| match kept {
            Kept::Tensor(x) => (slot.name() == part.name).then(|| ops::to_vec(x)),
            Kept::Rows(cache) if part.name == KEYS => Some(cache.keys()),
            Kept::Rows(cache) if part.name == VALUES => Some(cache.values()),
            Kept::Rows(_) => None,
        });
        values.unwrap_or_else(|| Ok(Vec::new()))
    }
}

impl Parts for SavedState {
    fn position(&self) -> usize {
        self.position
    }

    fn parts(&self) -> Vec<(Part, Vec<usize>)> {
        let all = self.checkpoint.iter();
        let mut parts: Vec<_> = all
            .filter_map(|(name, entry)| Some((Part::parse(name)?, entry.shape.clone())))
            .collect();
        // By name layer 10 comes before layer 2; what grows is the last of a layer.
        parts.sort_by_cached_key(|(part, _)| (part.layer, part.is_kv(), part.name.clone()));
        parts
    }

    fn shape(&self, part: &Part) -> Option<Vec<usize>> {
        Some(self.checkpoint.get(&part.to_string())?.shape.clone())
    }

    fn values(&self, part: &Part) -> Result<Vec<f32>> {
        let entry = self.checkpoint.get(&part.to_string());
        entry.map_or(Ok(Vec::new()), crate::checkpoint::TensorEntry::to_f32)
    }
}
