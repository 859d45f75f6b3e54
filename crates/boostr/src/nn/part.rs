//! Parts of layers. Each describes itself, so nothing else has to know the kinds of parts.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::batch::Batch;
use super::slots::Slot;
use crate::backend::{Backend, Tensor};
use crate::error::Result;
use crate::ops::{KvType, Level};

/// The configuration of one part of a layer: a mixer, attention, a feed-forward part.
///
/// All that the library does with states, sizes and descriptions of layers goes through these methods: a
/// new kind of part is a type that implements them, its kernel and its weights.
pub trait Part: fmt::Debug + Send + Sync + Any + PartOfLayer {
    /// A word for it, as `show` prints it: `attention`.
    fn kind(&self) -> &'static str;

    /// What a sequence remembers of it; nothing by default.
    fn slots(&self) -> Vec<Slot> {
        Vec::new()
    }

    /// Its sizes by the name of the field that errors give them; each must be 1 to
    /// [`MAX_SIZE`](crate::models::MAX_SIZE).
    fn sizes(&self) -> Vec<(&'static str, usize)>;

    /// Refuses sizes that do not fit each other.
    ///
    /// # Errors
    ///
    /// The field and the reason.
    fn check(&self) -> Result<(), (&'static str, String)> {
        Ok(())
    }

    /// Lines for people: a name and a text each.
    fn describe(&self) -> Vec<(&'static str, String)>;

    /// The same as fields of a JSON object.
    fn to_json(&self) -> Map<String, Value>;

    /// Floats of one row that it keeps at once while it computes.
    fn work_width(&self) -> usize;

    /// Feed-forward parts that are chosen from for each token; 0 where there is no choice.
    fn experts(&self) -> usize {
        0
    }
}

/// What any type of part has by itself.
pub trait PartOfLayer {
    /// For the look at the type.
    fn as_any(&self) -> &dyn Any;
    /// Whether the other is of the same type and equal.
    fn is_equal(&self, other: &dyn Part) -> bool;
}

impl<T: Part + PartialEq> PartOfLayer for T {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn is_equal(&self, other: &dyn Part) -> bool {
        other.as_any().downcast_ref::<T>() == Some(self)
    }
}

/// The weights of a part, whatever the part is.
pub trait Module<B: Backend>: Send + Sync {
    /// What the part makes of the rows `u` `[T, d_model]`, times a factor, added to a residual `[T, d_model]`. What
    /// the sequences remember of it is in `batch`.
    ///
    /// # Errors
    ///
    /// When shapes disagree or memory is short.
    fn add_to(
        &self,
        client: &B::Client,
        u: &Tensor<B>,
        onto: (Tensor<B>, f32),
        batch: &mut Batch<B>,
    ) -> Result<Tensor<B>>;

    /// Bytes of matrices that one token's pass reads.
    fn weight_bytes(&self) -> usize;
}

/// The [`Module`] of a type whose own `forward_onto` takes these arguments.
macro_rules! module {
    ($type:ident, |$self:ident, $client:ident, $u:ident, $onto:ident, $batch:pat_param| $forward:expr) => {
        impl<B: Backend> $crate::nn::Module<B> for $type<B> {
            fn add_to(
                &$self,
                $client: &B::Client,
                $u: &Tensor<B>,
                $onto: (Tensor<B>, f32),
                $batch: &mut $crate::nn::Batch<B>,
            ) -> Result<Tensor<B>> {
                $forward
            }

            fn weight_bytes(&$self) -> usize {
                $type::weight_bytes($self)
            }
        }
    };
}
pub(super) use module;

/// What one layer is made of: its parts, in the order in which rows pass them.
///
/// ```
/// use boostr::nn::{AttentionConfig, LayerSpec, MlpConfig};
///
/// let layer = LayerSpec::of(AttentionConfig::new(64, 4, 2, 16)).and(MlpConfig::swiglu(64, 128));
/// assert_eq!(layer.kind(), "attention + mlp");
/// assert_eq!(layer.part::<MlpConfig>().unwrap().d_ff, 128);
/// assert_eq!(layer.slots()[0].name(), "kv");
/// ```
#[derive(Debug, Clone, Default)]
pub struct LayerSpec(Vec<Arc<dyn Part>>);

impl PartialEq for LayerSpec {
    fn eq(&self, other: &Self) -> bool {
        let is_equal = |(a, b): (&Arc<dyn Part>, &Arc<dyn Part>)| a.is_equal(&**b);
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(is_equal)
    }
}

impl LayerSpec {
    /// A layer of one part.
    #[must_use]
    pub fn of(part: impl Part) -> Self {
        Self::default().and(part)
    }

    /// The same layer with one part more.
    #[must_use]
    pub fn and(mut self, part: impl Part) -> Self {
        self.0.push(Arc::new(part));
        self
    }

    /// The parts.
    pub fn parts(&self) -> impl Iterator<Item = &dyn Part> {
        self.0.iter().map(|part| &**part)
    }

    /// The first part of a type.
    #[must_use]
    pub fn part<T: Part>(&self) -> Option<&T> {
        self.parts().find_map(|part| part.as_any().downcast_ref())
    }

    /// What the layer is, in a word for each part.
    #[must_use]
    pub fn kind(&self) -> String {
        self.parts().map(Part::kind).collect::<Vec<_>>().join(" + ")
    }

    /// What a sequence remembers of the layer, part by part.
    #[must_use]
    pub fn slots(&self) -> Vec<Slot> {
        self.parts().flat_map(Part::slots).collect()
    }

    /// Bytes of a sequence's state of this layer: the constant part, and what each token adds, up to the
    /// window if there is one.
    #[must_use]
    pub fn state_bytes(&self, level: Level, kind: KvType) -> (usize, usize) {
        let slots = self.slots();
        let constant = slots.iter().map(|slot| slot.fixed_bytes().unwrap_or(usize::MAX));
        let growing = slots.iter().map(|slot| slot.bytes_per_token(level, kind));
        (constant.fold(0, usize::saturating_add), growing.fold(0, usize::saturating_add))
    }

    /// Bytes of the growing part after `tokens`, at most.
    #[must_use]
    pub fn kv_bytes(&self, level: Level, kind: KvType, tokens: usize) -> usize {
        let slots = self.slots();
        slots.iter().map(|slot| slot.row_bytes(level, kind, tokens)).fold(0, usize::saturating_add)
    }

    /// Whether a sequence's state of the layer grows with each token.
    #[must_use]
    pub fn grows(&self) -> bool {
        self.slots().iter().any(Slot::grows)
    }

    /// Floats of one row that the layer keeps at once while it computes.
    #[must_use]
    pub fn work_width(&self) -> usize {
        self.parts().map(Part::work_width).max().unwrap_or(0)
    }
}
