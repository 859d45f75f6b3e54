//! Layers that models share: they load their parameters by name and hold no state.

mod linear;
mod mamba2;
mod params;
pub mod synthetic;

pub use linear::{Linear, RmsNorm};
pub use mamba2::{Mamba2Mixer, MixerConfig, MixerState, decay_rate};
pub use params::{Params, Tensors};
