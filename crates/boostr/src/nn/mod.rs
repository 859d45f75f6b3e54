//! Layers that models share: they load their parameters by name and hold no state.

mod attention;
mod joined;
mod layout;
mod linear;
mod mamba2;
mod mlp;
mod params;
mod rope;
pub mod synthetic;

pub use attention::{Attention, AttentionConfig};
pub use joined::Joined;
pub use layout::{Change, How, Layout, Part, Row, Stored};
pub use linear::{Adapter, Linear, RmsNorm};
pub use mamba2::{Mamba2Mixer, MixerConfig, MixerState};
pub use mlp::{Mlp, MlpConfig, Moe, MoeConfig, Routing};
pub use params::{Params, SharedWeights, Tensors};
pub use rope::RopeConfig;

pub use crate::ops::decay_rate;
