//! What a model asks of a device: one trait, so that models write `B: Backend` and nothing else.

/// The tensor library, in the version that boostr is built with.
pub use numr;
use numr::runtime::Runtime;

use crate::ops::{
    self, ActivationOps, AttentionOps, CausalConvOps, DeltaOps, LinearOps, NormOps, SsmKernelOps,
    Tape,
};

pub use numr::dtype::DType;
pub use numr::runtime::RuntimeClient;
pub use numr::runtime::cpu::CpuRuntime as Cpu;

pub use crate::ops::{Activations, CpuClient, KernelClient, Level, UnknownLevel};

/// A tensor of a backend.
pub type Tensor<B> = numr::tensor::Tensor<<B as Backend>::Runtime>;
/// A weight of a backend.
pub type Weight<B> = ops::Weight<<B as Backend>::Runtime>;
/// Keys and values that a backend keeps.
pub type KvCache<B> = ops::KvCache<<B as Backend>::Runtime>;

/// Where a model runs: tensors of a runtime, and a client that has all operations of [`ops`].
pub trait Backend: Clone + Send + Sync + 'static {
    /// Whose tensors they are.
    type Runtime: Runtime<DType = DType>;
    /// What runs operations on them.
    type Client: SsmKernelOps<Self::Runtime>
        + DeltaOps<Self::Runtime>
        + CausalConvOps<Self::Runtime>
        + NormOps<Self::Runtime>
        + LinearOps<Self::Runtime>
        + AttentionOps<Self::Runtime>
        + ActivationOps<Self::Runtime>;
}

impl Backend for Cpu {
    type Runtime = Self;
    type Client = CpuClient;
}

/// The CPU with a recording client: a model on it can be trained.
#[derive(Debug, Clone)]
pub struct Recorded;

impl Backend for Recorded {
    type Runtime = Cpu;
    type Client = Tape;
}

/// The elements of an f32 tensor where they lie, row-major; none for another type, or where they are not
/// contiguous.
///
/// ```
/// use boostr::backend::{cpu, host};
/// let x = boostr::ops::tensor(&cpu(), &[1.0, 2.0, 3.0, 4.0], &[2, 2])?;
/// assert_eq!(host(&x), Some(&[1.0, 2.0, 3.0, 4.0][..]));
/// assert_eq!(host(&x.narrow(1, 0, 1)?), None);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
pub fn host(x: &Tensor<Cpu>) -> Option<&[f32]> {
    ops::host_slice("x", x).ok()
}

/// A client that is of one backend, so that who is given the client need not be told the backend.
pub trait Device: Clone + Send + Sync {
    /// The backend.
    type Backend: Backend<Client = Self>;
}

impl Device for CpuClient {
    type Backend = Cpu;
}

impl Device for Tape {
    type Backend = Recorded;
}

/// A client of the CPU at the best [level](Level) of this machine.
#[must_use]
pub fn cpu() -> CpuClient {
    CpuClient::detected()
}

/// A client of the CPU at a level of this machine.
///
/// Results differ by rounding among levels, so machines that must agree to the bit take one that all
/// have.
///
/// ```
/// use boostr::backend::{Level, cpu_at};
/// for &level in Level::present() {
///     assert!(cpu_at(level)?.numerics().ends_with(level.name()));
/// }
/// # Ok::<(), boostr::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Argument`](crate::Error::Argument) when the machine has not this level, naming those it
/// has.
pub fn cpu_at(level: Level) -> crate::Result<CpuClient> {
    CpuClient::new(level)
}
