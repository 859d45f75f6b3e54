//! The operations on the CPU: `boostr-kernels` on the tensors' own memory.

mod attention;
pub(super) mod delta;

use boostr_kernels::{self as kernels, Level, Matrix, Product, Rows, Weights, ssd};
use numr::dtype::DType;
use numr::runtime::cpu::{self, CpuRuntime};
use numr::runtime::{Runtime, RuntimeClient};
use numr::tensor::Tensor;

use super::norm::check_groups;
use super::weight::{self, Check, HostBytes, QuantTensor, Storage};
use super::{
    CausalConv, CausalConvOps, Client, Format, GatedNorm, LinearOps, NormOps, Projection, SsdInput,
    SsmKernelOps, Weight, expect, host, shape_error, tensor,
};
use crate::error::{Error, Result};

pub(super) use attention::per_head;

type Cpu = Tensor<CpuRuntime>;

/// A client whose operations on the CPU are kernels of one level.
pub trait KernelClient: Client<CpuRuntime, Library = cpu::CpuClient> {
    /// The instruction set that the kernels use.
    fn level(&self) -> Level;
}

/// A client of the CPU: the tensor library's, and the instruction set that kernels use.
///
/// It holds no threads: kernels run on the rayon pool of the calling thread.
#[derive(Debug, Clone)]
pub struct CpuClient {
    library: cpu::CpuClient,
    level: Level,
}

/// Raised when kernels sum in another order than before, which changes last bits.
const SUMS: u32 = 2;

impl CpuClient {
    /// A client at a level that this processor has.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when the processor has not this level, naming those it has.
    pub fn new(level: Level) -> Result<Self> {
        if !level.is_present() {
            let names: Vec<&str> = Level::present().iter().map(|level| level.name()).collect();
            let names = names.join(", ");
            let reason = format!("expected one that this machine has ({names}), found `{level}`");
            return Err(Error::Argument { name: "level", reason });
        }
        Ok(Self::unchecked(level))
    }

    /// A client at the best level of this processor.
    pub(crate) fn detected() -> Self {
        Self::unchecked(Level::detect())
    }

    fn unchecked(level: Level) -> Self {
        Self { library: CpuRuntime::default_client(&CpuRuntime::default_device()), level }
    }

    /// The instruction set that the kernels use.
    #[must_use]
    pub fn level(&self) -> Level {
        self.level
    }

    /// What the bits of results depend on: the version of boostr, the target and the level.
    ///
    /// Machines whose strings are equal compute the same bits.
    ///
    /// ```
    /// let text = boostr::backend::cpu().numerics();
    /// assert!(text.starts_with("boostr "), "{text}");
    /// ```
    #[must_use]
    pub fn numerics(&self) -> String {
        use std::env::consts::{ARCH, OS};
        // The C library has `exp`, `sin`, `cos` and `pow`.
        let libc = match () {
            () if cfg!(target_env = "gnu") => "-gnu",
            () if cfg!(target_env = "musl") => "-musl",
            () if cfg!(target_env = "msvc") => "-msvc",
            () => "",
        };
        let version = env!("CARGO_PKG_VERSION");
        format!("boostr {version} sums-{SUMS} {ARCH}-{OS}{libc} {}", self.level)
    }
}

impl Client<CpuRuntime> for CpuClient {
    type Library = cpu::CpuClient;

    fn library(&self) -> &cpu::CpuClient {
        &self.library
    }
}

impl KernelClient for CpuClient {
    fn level(&self) -> Level {
        self.level
    }
}

/// The tensor library's own client has the operations too, at the best level.
impl KernelClient for cpu::CpuClient {
    fn level(&self) -> Level {
        Level::detect()
    }
}

/// A tensor whose rows are contiguous: itself, or a copy.
pub(super) fn with_rows(x: &Cpu) -> Result<Cpu> {
    if host::rows("x", x).is_ok() { Ok(x.clone()) } else { host::contiguous("x", x) }
}

pub(super) fn optional<'a>(name: &'static str, x: Option<&'a Cpu>) -> Result<Option<&'a [f32]>> {
    x.map(|x| host::slice(name, x)).transpose()
}

/// The mutable slices of one tensor for each run.
fn slices_mut<'a>(name: &'static str, tensors: &'a mut [&mut Cpu]) -> Result<Vec<&'a mut [f32]>> {
    tensors.iter_mut().map(|x| host::slice_mut(name, x)).collect()
}

/// Sizes of the staged operations, from x or b/c and the cumulative sums.
fn dims(x: [usize; 4], bc: Option<[usize; 4]>, da_cumsum: &Cpu) -> Result<ssd::Dims> {
    let [batch, seqlen, nheads, headdim] = x;
    let [_, _, ngroups, dstate] = bc.unwrap_or([batch, seqlen, 1, 0]);
    let &[b, h, nchunks, chunk_size] = da_cumsum.shape() else {
        return Err(shape_error("da_cumsum", &[batch, nheads, 0, 0], da_cumsum.shape()));
    };
    let dims = ssd::Dims { batch, seqlen, nheads, headdim, ngroups, dstate, chunk_size };
    if chunk_size == 0 || (b, h, nchunks) != (batch, nheads, dims.nchunks()) {
        let expected = [batch, nheads, seqlen.div_ceil(chunk_size.max(1)), chunk_size];
        return Err(shape_error("da_cumsum", &expected, da_cumsum.shape()));
    }
    if ngroups == 0 || !nheads.is_multiple_of(ngroups) {
        let reason = format!("{ngroups} groups do not divide {nheads} heads");
        return Err(Error::Argument { name: "b", reason });
    }
    Ok(dims)
}

fn four(name: &'static str, x: &Cpu) -> Result<[usize; 4]> {
    x.shape().try_into().map_err(|_| shape_error(name, &[0; 4], x.shape()))
}

impl<C: KernelClient> SsmKernelOps<CpuRuntime> for C {
    fn ssd_chunk_cumsum(
        &self,
        dt: &Cpu,
        a: &Cpu,
        dt_bias: Option<&Cpu>,
        chunk_size: usize,
        dt_softplus: bool,
    ) -> Result<(Cpu, Cpu)> {
        let &[batch, seqlen, nheads] = dt.shape() else {
            return Err(shape_error("dt", &[0, 0, 0], dt.shape()));
        };
        if chunk_size == 0 {
            let reason = "expected at least 1, found 0".into();
            return Err(Error::Argument { name: "chunk_size", reason });
        }
        expect("a", a, &[nheads])?;
        if let Some(bias) = dt_bias {
            expect("dt_bias", bias, &[nheads])?;
        }
        let dims =
            ssd::Dims { batch, seqlen, nheads, headdim: 0, ngroups: 1, dstate: 0, chunk_size };
        let [dt, a] = contiguous([dt, a])?;
        let dt_bias = dt_bias.map(|x| host::contiguous("dt_bias", x)).transpose()?;
        let (dt, da_cumsum) = ssd::chunk_cumsum(
            self.level(),
            dims,
            host::slice("dt", &dt)?,
            host::slice("a", &a)?,
            optional("dt_bias", dt_bias.as_ref())?,
            dt_softplus,
        );
        let shape = [batch, nheads, dims.nchunks(), chunk_size];
        Ok((tensor(self, &dt, &shape)?, tensor(self, &da_cumsum, &shape)?))
    }

    fn ssd_chunk_state(&self, x: &Cpu, b: &Cpu, dt: &Cpu, da_cumsum: &Cpu) -> Result<Cpu> {
        let dims = dims(four("x", x)?, Some(four("b", b)?), da_cumsum)?;
        expect("b", b, &[dims.batch, dims.seqlen, dims.ngroups, dims.dstate])?;
        expect("dt", dt, da_cumsum.shape())?;
        let [x, b, dt, da_cumsum] = contiguous([x, b, dt, da_cumsum])?;
        let states = ssd::chunk_state(
            dims,
            host::slice("x", &x)?,
            host::slice("b", &b)?,
            host::slice("dt", &dt)?,
            host::slice("da_cumsum", &da_cumsum)?,
        );
        tensor(self, &states, &[dims.batch, dims.nchunks(), dims.nheads, dims.headdim, dims.dstate])
    }

    fn ssd_state_passing(&self, states: &Cpu, da_cumsum: &Cpu) -> Result<Cpu> {
        let &[batch, nchunks, nheads, headdim, dstate] = states.shape() else {
            return Err(shape_error("states", &[0; 5], states.shape()));
        };
        let chunk_size = da_cumsum.shape().last().copied().unwrap_or(0);
        expect("da_cumsum", da_cumsum, &[batch, nheads, nchunks, chunk_size])?;
        if chunk_size == 0 {
            return Err(shape_error("da_cumsum", &[batch, nheads, nchunks, 1], da_cumsum.shape()));
        }
        let seqlen = nchunks * chunk_size;
        let dims = ssd::Dims { batch, seqlen, nheads, headdim, ngroups: 1, dstate, chunk_size };
        let [own, da_cumsum] = contiguous([states, da_cumsum])?;
        let passed = ssd::state_passing(
            dims,
            host::slice("states", &own)?,
            host::slice("da_cumsum", &da_cumsum)?,
        );
        tensor(self, &passed, states.shape())
    }

    fn ssd_chunk_scan(
        &self,
        x: &Cpu,
        states: &Cpu,
        c: &Cpu,
        da_cumsum: &Cpu,
        d: Option<&Cpu>,
    ) -> Result<Cpu> {
        let shape = x.shape();
        let dims = dims(four("x", x)?, Some(four("c", c)?), da_cumsum)?;
        expect("c", c, &[dims.batch, dims.seqlen, dims.ngroups, dims.dstate])?;
        expect(
            "states",
            states,
            &[dims.batch, dims.nchunks(), dims.nheads, dims.headdim, dims.dstate],
        )?;
        if let Some(d) = d.filter(|d| d.shape() != [dims.nheads]) {
            expect("d", d, &[dims.nheads, dims.headdim])?;
        }
        let [x, states, c, da_cumsum] = contiguous([x, states, c, da_cumsum])?;
        let d = d.map(|x| host::contiguous("d", x)).transpose()?;
        let y = ssd::chunk_scan(
            dims,
            host::slice("x", &x)?,
            host::slice("states", &states)?,
            host::slice("c", &c)?,
            host::slice("da_cumsum", &da_cumsum)?,
            optional("d", d.as_ref())?,
        );
        tensor(self, &y, shape)
    }

    fn ssd_chunk_intra(&self, x: &Cpu, b: &Cpu, c: &Cpu, dt: &Cpu, da_cumsum: &Cpu) -> Result<Cpu> {
        let shape = x.shape();
        let dims = dims(four("x", x)?, Some(four("b", b)?), da_cumsum)?;
        let bc = [dims.batch, dims.seqlen, dims.ngroups, dims.dstate];
        expect("b", b, &bc)?;
        expect("c", c, &bc)?;
        expect("dt", dt, da_cumsum.shape())?;
        let [x, b, c, dt, da_cumsum] = contiguous([x, b, c, dt, da_cumsum])?;
        let y = ssd::chunk_intra(
            dims,
            host::slice("x", &x)?,
            host::slice("b", &b)?,
            host::slice("c", &c)?,
            host::slice("dt", &dt)?,
            host::slice("da_cumsum", &da_cumsum)?,
        );
        tensor(self, &y, shape)
    }

    fn ssd(
        &self,
        input: &SsdInput<'_, CpuRuntime>,
        runs: &[usize],
        states: &mut [&mut Cpu],
    ) -> Result<Cpu> {
        let dims = input.dims(runs, states)?;
        let arguments = SsdArguments::new(input)?;
        let mut y = host::zeros(&[dims.tokens, dims.nheads, dims.headdim])?;
        let mut states = slices_mut("states", states)?;
        ssd::ssd(
            &arguments.kernel(self.level())?,
            runs,
            &mut states,
            host::slice_mut("y", &mut y)?,
        );
        Ok(y)
    }
}

/// What the SSD kernels read, in memory that they can read; checked before by [`SsdInput::dims`].
pub(super) struct SsdArguments {
    x: Cpu,
    dt: Cpu,
    a: Cpu,
    b: Cpu,
    c: Cpu,
    dt_bias: Option<Cpu>,
    d: Option<Cpu>,
    z: Option<Cpu>,
    dt_softplus: bool,
    dt_limit: (f32, f32),
}

impl SsdArguments {
    pub(super) fn new(input: &SsdInput<'_, CpuRuntime>) -> Result<Self> {
        let [a] = contiguous([input.a.rates()])?;
        Ok(Self {
            x: with_rows(input.x)?,
            dt: with_rows(input.dt)?,
            a,
            b: with_rows(input.b)?,
            c: with_rows(input.c)?,
            dt_bias: input.dt_bias.map(|x| host::contiguous("dt_bias", x)).transpose()?,
            d: input.d.map(|x| host::contiguous("d", x)).transpose()?,
            z: input.z.map(with_rows).transpose()?,
            dt_softplus: input.dt_softplus,
            dt_limit: input.dt_limit,
        })
    }

    pub(super) fn kernel(&self, level: Level) -> Result<ssd::Ssd<'_>> {
        let (x, b) = (self.x.shape(), self.b.shape());
        let (&[_, nheads, headdim], &[_, ngroups, dstate]) = (x, b) else {
            return Err(shape_error("x", &[0, 0, 0], x));
        };
        Ok(ssd::Ssd {
            level,
            nheads,
            headdim,
            ngroups,
            dstate,
            x: host::rows("x", &self.x)?,
            dt: host::rows("dt", &self.dt)?,
            a: host::slice("a", &self.a)?,
            b: host::rows("b", &self.b)?,
            c: host::rows("c", &self.c)?,
            dt_bias: optional("dt_bias", self.dt_bias.as_ref())?,
            d: optional("d", self.d.as_ref())?,
            z: self.z.as_ref().map(|z| host::rows("z", z)).transpose()?,
            dt_softplus: self.dt_softplus,
            dt_limit: self.dt_limit,
        })
    }
}

fn contiguous<const N: usize>(tensors: [&Cpu; N]) -> Result<[Cpu; N]> {
    let mut out = tensors.map(Clone::clone);
    for x in &mut out {
        *x = host::contiguous("tensor", x)?;
    }
    Ok(out)
}

impl<C: KernelClient> CausalConvOps<CpuRuntime> for C {
    fn causal_conv1d(
        &self,
        x: &Cpu,
        conv: &CausalConv<'_, CpuRuntime>,
        runs: &[usize],
        windows: &mut [&mut Cpu],
    ) -> Result<Cpu> {
        let (tokens, channels) = conv.check(x, runs, windows)?;
        let x = with_rows(x)?;
        let [weight] = contiguous([conv.weight])?;
        let bias = conv.bias.map(|x| host::contiguous("bias", x)).transpose()?;
        let mut out = host::zeros(&[tokens, channels])?;
        if channels > 0 {
            let kernel = kernels::Conv1d {
                level: self.level(),
                weight: host::slice("weight", &weight)?,
                bias: optional("bias", bias.as_ref())?,
                silu: conv.silu,
            };
            let mut windows = slices_mut("windows", windows)?;
            let to = host::slice_mut("out", &mut out)?;
            kernels::conv1d(&kernel, host::rows("x", &x)?, runs, &mut windows, to);
        }
        Ok(out)
    }
}

impl<C: KernelClient> NormOps<CpuRuntime> for C {
    fn rmsnorm(&self, x: &Cpu, weight: &Cpu, eps: f32) -> Result<Cpu> {
        let &[tokens, width] = x.shape() else {
            return Err(shape_error("x", &[0, 0], x.shape()));
        };
        expect("weight", weight, &[width])?;
        let x = with_rows(x)?;
        let [weight] = contiguous([weight])?;
        let mut out = host::zeros(&[tokens, width])?;
        kernels::rms_norm(
            self.level(),
            host::rows("x", &x)?,
            host::slice("weight", &weight)?,
            eps,
            host::slice_mut("out", &mut out)?,
        );
        Ok(out)
    }

    fn gated_rmsnorm(&self, y: &Cpu, z: &Cpu, norm: &GatedNorm<'_, CpuRuntime>) -> Result<Cpu> {
        let (tokens, width) = norm.check(y, z)?;
        let (y, z) = (with_rows(y)?, with_rows(z)?);
        let [weight] = contiguous([norm.weight])?;
        let mut out = host::zeros(&[tokens, width])?;
        let kernel = kernels::GatedNorm {
            level: self.level(),
            weight: Some(host::slice("weight", &weight)?),
            ngroups: norm.ngroups,
            eps: norm.eps,
            norm_before_gate: norm.norm_before_gate,
            activation: norm.activation,
        };
        kernels::gated_rms_norm(
            host::rows("y", &y)?,
            host::rows("z", &z)?,
            kernel,
            host::slice_mut("out", &mut out)?,
        );
        Ok(out)
    }

    fn l2norm(&self, x: &Cpu, group: usize, eps: f32) -> Result<Cpu> {
        let (tokens, width) = check_groups(x, group)?;
        let x = with_rows(x)?;
        let mut out = host::zeros(&[tokens, width])?;
        let to = host::slice_mut("out", &mut out)?;
        kernels::l2_norm(self.level(), host::rows("x", &x)?, group, eps, to);
        Ok(out)
    }
}

/// The elements of a weight of floats, in their type.
pub(super) fn elements(w: &Cpu) -> Result<Weights<'_>> {
    Ok(match w.dtype() {
        DType::BF16 => Weights::Bf16(host::bits_slice("w", w)?),
        DType::F16 => Weights::F16(host::bits_slice("w", w)?),
        _ => Weights::F32(host::slice("w", w)?),
    })
}

/// The products as one step, each added to its tensor where given.
fn products<'a>(
    level: Level,
    products: impl IntoIterator<Item = (Projection<'a, CpuRuntime>, Option<Cpu>)>,
) -> Result<Vec<Cpu>> {
    let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
    for (product, add_to) in products {
        let Projection { x, w, bias, is_precise } = product;
        let (tokens, features) = super::generic::check_linear(x, w, bias, add_to.as_ref())?;
        let mut out = match add_to {
            Some(out) => out,
            None => host::zeros(&[tokens, features])?,
        };
        let bias = bias.map(|x| host::contiguous("bias", x)).transpose()?;
        if let Some(bias) = optional("bias", bias.as_ref())? {
            for row in host::slice_mut("add_to", &mut out)?.chunks_exact_mut(features.max(1)) {
                row.iter_mut().zip(bias).for_each(|(to, bias)| *to += bias);
            }
        }
        let matrix = match &w.storage {
            Storage::Dense(w, _) => Matrix::Floats(elements(w)?),
            Storage::Packed(w) if is_precise => Matrix::Precise(w.get()?),
            Storage::Packed(w) => Matrix::Quantized(w.get()?),
        };
        inputs.push((with_rows(x)?, matrix));
        outputs.push(out);
    }
    let list = inputs.iter().zip(&mut outputs).map(|((x, w), out)| {
        Ok(Product { x: host::rows("x", x)?, w: *w, out: host::slice_mut("add_to", out)? })
    });
    kernels::products(level, list.collect::<Result<_>>()?);
    Ok(outputs)
}

/// `x · wᵀ` plus a bias, added to `add_to`.
fn product(level: Level, product: Projection<'_, CpuRuntime>, add_to: Option<Cpu>) -> Result<Cpu> {
    let mut outputs = products(level, [(product, add_to)])?;
    Ok(outputs.swap_remove(0))
}

impl<C: KernelClient> LinearOps<CpuRuntime> for C {
    fn weight(
        &self,
        bytes: HostBytes,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Weight<CpuRuntime>> {
        weight::check(&bytes, dtype, shape)?;
        match host::borrowed(&bytes, dtype, shape) {
            Some(tensor) => Ok(Weight::new(tensor, Some(bytes))),
            None => Weight::copied(&bytes, dtype, shape, self.library().device()),
        }
    }

    fn quantized(&self, w: &QuantTensor) -> Result<Weight<CpuRuntime>> {
        if w.format().can_multiply() && w.shape()[1] > 0 {
            Ok(Weight::packed(w))
        } else {
            Weight::decoded(w, self.library().device())
        }
    }

    fn packing(&self) -> Option<&'static str> {
        Some(self.level().name())
    }

    fn of_packed(
        &self,
        bytes: HostBytes,
        format: Format,
        shape: [usize; 2],
        check: Check,
    ) -> Result<Weight<CpuRuntime>> {
        Weight::of_packed(bytes, format, shape, check)
    }

    fn linear(
        &self,
        x: &Cpu,
        w: &Weight<CpuRuntime>,
        bias: Option<&Cpu>,
        add_to: Option<Cpu>,
    ) -> Result<Cpu> {
        product(self.level(), Projection { x, w, bias, is_precise: false }, add_to)
    }

    fn linear_precise(
        &self,
        x: &Cpu,
        w: &Weight<CpuRuntime>,
        bias: Option<&Cpu>,
        add_to: Option<Cpu>,
    ) -> Result<Cpu> {
        product(self.level(), Projection { x, w, bias, is_precise: true }, add_to)
    }

    fn linear_all(&self, list: &[Projection<'_, CpuRuntime>]) -> Result<Vec<Cpu>> {
        products(self.level(), list.iter().map(|product| (Projection { ..*product }, None)))
    }

    fn cross_entropy(
        &self,
        h: &Cpu,
        head: &Weight<CpuRuntime>,
        scale: f32,
        (targets, weights): (&[u32], &[f32]),
        is_precise: bool,
    ) -> Result<Cpu> {
        super::generic::check_targets(h, head, targets, weights)?;
        let weight = match &head.storage {
            Storage::Dense(w, _) if w.dtype() == DType::F32 => host::slice("head", w)?,
            _ => {
                return super::linear::cross_entropy_by_rows(
                    self, h, head, scale, targets, is_precise,
                );
            }
        };
        let h = with_rows(h)?;
        let mut losses = host::zeros(&[targets.len()])?;
        let kernel = kernels::cross_entropy::Head { level: self.level(), weight, scale };
        let to = host::slice_mut("losses", &mut losses)?;
        kernels::cross_entropy::cross_entropy(host::rows("h", &h)?, &kernel, targets, to);
        Ok(losses)
    }

    fn embedding(&self, w: &Weight<CpuRuntime>, ids: &[u32]) -> Result<Cpu> {
        let width = super::generic::check_ids(w, ids)?;
        let mut out = host::zeros(&[ids.len(), width])?;
        if width > 0 {
            let rows = host::slice_mut("out", &mut out)?.chunks_exact_mut(width);
            let rows = rows.zip(ids.iter().map(|&id| id as usize));
            match &w.storage {
                Storage::Dense(w, _) => {
                    let elements = elements(w)?;
                    rows.for_each(|(row, id)| elements.widen(id * width, row));
                }
                Storage::Packed(w) => {
                    let w = w.get()?;
                    rows.for_each(|(row, id)| w.row(id, row));
                }
            }
        }
        Ok(out)
    }

    fn select_rows(&self, x: &Cpu, rows: &[usize]) -> Result<Cpu> {
        let width = super::generic::check_rows(x, rows)?;
        let x = with_rows(x)?;
        let from: Rows<'_> = host::rows("x", &x)?;
        let mut out = host::zeros(&[rows.len(), width])?;
        if width > 0 {
            let to = host::slice_mut("out", &mut out)?.chunks_exact_mut(width);
            to.zip(rows).for_each(|(to, &row)| to.copy_from_slice(from.row(row)));
        }
        Ok(out)
    }
}
