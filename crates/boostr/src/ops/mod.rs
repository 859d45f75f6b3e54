//! Operations on tensors, as traits over the clients of the tensor library.
//!
//! | trait | operations |
//! |---|---|
//! | [`SsmKernelOps`] | SSD by stages and whole |
//! | [`DeltaOps`] | gated delta rule, with a decay a head or a key channel, and its decay gate |
//! | [`CausalConvOps`] | depthwise convolution with a carried window |
//! | [`NormOps`] | RMS norm, plain, gated and grouped; L2 norm of groups |
//! | [`LinearOps`] | weights, products with them, rows of them |
//! | [`AttentionOps`] | causal attention with carried keys and values, latent attention, rotary positions |
//! | [`ActivationOps`] | activations, gates, factors, sums of chosen rows, columns side by side |
//!
//! [`Tape`] is a client that has them all and takes gradients of what it ran.
//!
//! Every method has a portable body composed of the tensor library's own operations (`generic`), so a
//! backend without kernels of its own is one `impl` line for each trait. `cpu` overrides them with `boostr-kernels`
//! on the tensors' memory. Only this module, `backend` and `error` name the tensor library.
//!
//! Activations are ragged, never padded: the tokens of several runs (sequences) are the rows of one
//! `[T, width]` tensor, one run after another; `runs` holds their lengths. What a sequence must
//! remember between calls is a tensor for each run, replaced by the call. A state that is shared with
//! a clone is copied before it is written; one that is not is updated in place.

mod activation;
mod attention;
mod conv;
mod cpu;
mod delta;
pub mod generic;
mod host;
mod linear;
mod norm;
mod routing;
mod ssd;
mod tape;
mod tensor;
mod weight;

use numr::ops::{ScalarOps, TensorOps};
use numr::runtime::{Runtime, RuntimeClient};
use numr::tensor::Tensor;

pub use numr::dtype::DType;

pub use activation::{Activation, ActivationOps};
pub use attention::{
    Attention, AttentionOps, KvCache, KvSizes, KvType, LatentAttention, Rope, RopeScaling,
    RopeStyle, Yarn,
};
pub use boostr_kernels::quant::Format;
pub use boostr_kernels::{Level, UnknownLevel};
pub use conv::{CausalConv, CausalConvOps};
pub use cpu::{CpuClient, KernelClient};
pub use delta::{DecayGate, DeltaInput, DeltaOps};
pub use linear::{IGNORE, LinearOps, Projection, decay_rate, log_of_rate};
pub use norm::{GatedNorm, NormOps};
pub use routing::{ExpertWeights, Routing, sigmoid, softmax};
pub use ssd::{Decay, SsdInput, SsmKernelOps};
pub use tape::{Inputs, Mark, Tape};
pub use tensor::{split_last, tensor, to_vec, zeros};
pub use weight::{Check, HostBytes, QuantTensor, Weight};

pub(crate) use host::slice as host_slice;
pub(crate) use tensor::{block, check_layout, check_runs, expect, shape_error};
pub(crate) use weight::packed_size;

use crate::error::Result;

/// What the portable bodies need of a client; every client of the tensor library has it.
pub trait TensorClient<R: Runtime<DType = DType>>:
    RuntimeClient<R> + TensorOps<R> + ScalarOps<R>
{
}

impl<R, C> TensorClient<R> for C
where
    R: Runtime<DType = DType>,
    C: RuntimeClient<R> + TensorOps<R> + ScalarOps<R>,
{
}

/// A client that runs operations: the tensor library's own, or one that stands before it.
pub trait Client<R: Runtime<DType = DType>>: Clone + Send + Sync {
    /// The tensor library's client.
    type Library: TensorClient<R>;

    /// The tensor library's client, of whose operations the portable bodies are composed.
    fn library(&self) -> &Self::Library;

    /// Hears of a tensor that is made of values: of a parameter with its name, of a constant without.
    fn made(&self, name: Option<&str>, x: &Tensor<R>) {
        let _ = (name, x);
    }

    /// What `run` makes of `input`: a part of a model, whose operations are called on the client that it is
    /// given.
    ///
    /// A client that records may keep `input` and `run` in place of what it records of the part, to record
    /// it when it is needed. So `run` computes the same each time, no losses, and its tensors from those of
    /// `input` and the model's weights.
    ///
    /// # Errors
    ///
    /// What `run` returns.
    fn segment<S: TensorTree<R>>(
        &self,
        input: S,
        run: impl Fn(&Self, S) -> Result<S> + Send + 'static,
    ) -> Result<S> {
        run(self, input)
    }
}

/// A value with tensors in it; a clone shares their memory.
pub trait TensorTree<R: Runtime<DType = DType>>: Clone + Send + 'static {
    /// Its tensors, in an order that is the same for values that were made alike.
    fn tensors(&self) -> Vec<&Tensor<R>>;
}

impl<R, C> Client<R> for C
where
    R: Runtime<DType = DType>,
    C: TensorClient<R>,
{
    type Library = C;

    fn library(&self) -> &C {
        self
    }
}
