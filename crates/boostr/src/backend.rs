//! What a model asks of a device: one trait, so that models write `B: Backend` and nothing else.

use numr::runtime::Runtime;

use crate::ops::{ActivationOps, AttentionOps, CausalConvOps, LinearOps, NormOps, SsmKernelOps};

pub use numr::dtype::DType;
pub use numr::runtime::RuntimeClient;
pub use numr::runtime::cpu::{CpuClient, CpuRuntime as Cpu};
pub use numr::tensor::Tensor;

/// A runtime whose client has all operations of [`ops`](crate::ops).
pub trait Backend:
    Runtime<
        DType = DType,
        Client: SsmKernelOps<Self>
                    + CausalConvOps<Self>
                    + NormOps<Self>
                    + LinearOps<Self>
                    + AttentionOps<Self>
                    + ActivationOps<Self>,
    >
{
}

impl<R> Backend for R where
    R: Runtime<
            DType = DType,
            Client: SsmKernelOps<R>
                        + CausalConvOps<R>
                        + NormOps<R>
                        + LinearOps<R>
                        + AttentionOps<R>
                        + ActivationOps<R>,
        >
{
}

/// A client of the CPU.
///
/// Kernels run on the rayon pool of the calling thread; the client itself holds no threads.
#[must_use]
pub fn cpu() -> CpuClient {
    Cpu::default_client(&Cpu::default_device())
}
