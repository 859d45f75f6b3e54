//! Numeric kernels of state-space language models on plain slices.
//!
//! No tensor library, no files, no global state. A wrong length is a bug of the caller: kernels panic
//! and name the argument. Every kernel is tested against its plain definition, on every instruction
//! set that the processor has ([`Level`]); results do not depend on the number of threads.

pub mod activation;
mod activation_backward;
mod adamw;
mod aligned;
pub mod attention;
mod awake;
mod conv;
mod conv_backward;
pub mod cross_entropy;
pub mod delta;
#[cfg(test)]
mod gradcheck;
mod linear;
mod linear_backward;
pub mod math;
mod norm;
mod norm_backward;
pub mod parallel;
pub mod probe;
mod product;
mod products;
pub mod quant;
mod rope;
mod rows;
mod simd;
pub mod ssd;
#[cfg(test)]
mod testing;

pub use adamw::{AdamW, adamw, sum_of_squares};
pub use awake::awake;
pub use conv::{Conv1d, conv1d};
pub use conv_backward::{Conv1dGradients, conv1d_backward};
pub use linear::{Weights, linear};
pub use linear_backward::{
    column_dots, column_sums, linear_backward_input, linear_backward_weight, transpose,
};
pub use norm::{GatedNorm, gated_rms_norm, l2_norm, rms_norm};
pub use norm_backward::{gated_rms_norm_backward, l2_norm_backward, rms_norm_backward};
pub use products::{Matrix, Product, products};
pub use rope::{Rope, RopeScaling, RopeStyle, Yarn, rope, rope_backward};
pub use rows::Rows;
pub use simd::{Level, UnknownLevel};
