//! Parts of layers. Each describes itself, so nothing else has to know the kinds of parts.

use std::any::Any;
use std::fmt;

use serde_json::{Map, Value};

use super::batch::Batch;
use super::params::Params;
use super::slots::Slot;
use crate::backend::{Backend, Tensor};
use crate::error::Result;

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

/// What has weights, which it loads for any backend: most parts, and what stands beside a part.
pub trait Load: fmt::Debug + Send + Sync + Any {
    /// The weights, whose parameters are `params`.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`](crate::Error::Tensors) when a parameter is missing or of a type that it cannot have.
    fn load<B: Backend>(&self, params: &Params<'_, B>) -> Result<Box<dyn Module<B>>>;
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

/// The [`Module`] of weights whose own `forward_onto` takes these arguments, and the [`Load`] of their configuration.
macro_rules! module {
    ($type:ident of $config:ty, |$self:ident, $client:ident, $u:ident, $onto:ident, $batch:pat_param| $forward:expr) => {
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

        impl $crate::nn::Load for $config {
            fn load<B: Backend>(
                &self,
                params: &Params<'_, B>,
            ) -> Result<Box<dyn $crate::nn::Module<B>>> {
                Ok(Box::new($type::load(self, params)?))
            }
        }
    };
}
pub(super) use module;
