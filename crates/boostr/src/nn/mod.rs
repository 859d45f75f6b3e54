//! Layers that models share: they load their parameters by name and hold no state.

mod attention;
mod batch;
mod gated_delta;
mod joined;
mod latent;
mod layer;
mod layout;
mod linear;
mod mamba2;
mod mlp;
mod moe;
mod packs;
mod params;
mod part;
mod rope;
mod shared_block;
mod short_conv;
mod slots;
pub mod synthetic;

pub use attention::{Attention, AttentionConfig, QkNorm};
pub use batch::Batch;
pub use gated_delta::{DeltaConfig, GatedDelta};
pub use joined::Joined;
pub use latent::{LatentConfig, LatentMixer};
pub use layer::{Layer, LayerSpec};
pub use layout::{Change, How, Layout, Order, Parameter, Row, Stored, layer_of, tiled};
pub use linear::{Adapter, Linear, RmsNorm};
pub use mamba2::{Mamba2Mixer, MixerConfig};
pub use mlp::{Mlp, MlpConfig};
pub use moe::{GatedMixture, Moe, MoeConfig, MoePart, Routing};
pub use packs::{Notices, Pack, Packs};
pub use params::{Params, SharedWeights, Tensors};
pub use part::{Load, Module, Part};
pub use rope::RopeConfig;
pub use shared_block::SharedBlock;
pub use short_conv::{ShortConv, ShortConvConfig};
pub use slots::{Kept, Slot, SlotSize, Slots};

pub use crate::ops::{decay_rate, log_of_rate};
