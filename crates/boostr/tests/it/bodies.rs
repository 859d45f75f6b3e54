//! Every operation in its two bodies: the portable one and the CPU's.

use boostr::Result;
use boostr::backend::{Cpu, DType, Tensor};
use boostr::checkpoint::TensorEntry;
use boostr::ops::{
    Activation, ActivationOps, Attention, AttentionOps, CausalConv, CausalConvOps, Client,
    DecayGate, DeltaInput, DeltaOps, GatedNorm, HostBytes, KvCache, KvSizes, LatentAttention,
    LinearOps, NormOps, Rope, SsdInput, SsmKernelOps, Weight, generic, tensor,
};

use crate::common::cpu;

pub type Floats = Tensor<Cpu>;

#[derive(Debug, Clone, Copy)]
pub enum Body {
    Portable,
    Kernels,
}

pub const BODIES: [Body; 2] = [Body::Portable, Body::Kernels];

impl Body {
    pub fn ssd(
        self,
        input: &SsdInput<'_, Cpu>,
        runs: &[usize],
        states: &mut [&mut Floats],
    ) -> Result<Floats> {
        match self {
            Self::Portable => generic::ssd(cpu().library(), input, runs, states),
            Self::Kernels => cpu().ssd(input, runs, states),
        }
    }

    /// The gated delta rule; `by_channel` with a decay for each key channel.
    pub fn delta(
        self,
        input: &DeltaInput<'_, Cpu>,
        by_channel: bool,
        runs: &[usize],
        states: &mut [&mut Floats],
    ) -> Result<Floats> {
        match (self, by_channel) {
            (Self::Portable, false) => generic::gated_delta(cpu().library(), input, runs, states),
            (Self::Portable, true) => generic::kda(cpu().library(), input, runs, states),
            (Self::Kernels, false) => cpu().gated_delta(input, runs, states),
            (Self::Kernels, true) => cpu().kda(input, runs, states),
        }
    }

    pub fn decay_gate(self, gate: &DecayGate<'_, Cpu>) -> Result<Floats> {
        match self {
            Self::Portable => generic::decay_gate(cpu().library(), gate),
            Self::Kernels => cpu().decay_gate(gate),
        }
    }

    pub fn l2norm(self, x: &Floats, group: usize, eps: f32) -> Result<Floats> {
        match self {
            Self::Portable => generic::l2norm(cpu().library(), x, group, eps),
            Self::Kernels => cpu().l2norm(x, group, eps),
        }
    }

    pub fn conv(
        self,
        x: &Floats,
        conv: &CausalConv<'_, Cpu>,
        runs: &[usize],
        windows: &mut [&mut Floats],
    ) -> Result<Floats> {
        match self {
            Self::Portable => generic::causal_conv1d(cpu().library(), x, conv, runs, windows),
            Self::Kernels => cpu().causal_conv1d(x, conv, runs, windows),
        }
    }

    pub fn rmsnorm(self, x: &Floats, weight: &Floats, eps: f32) -> Result<Floats> {
        match self {
            Self::Portable => generic::rmsnorm(cpu().library(), x, weight, eps),
            Self::Kernels => cpu().rmsnorm(x, weight, eps),
        }
    }

    pub fn gated(self, y: &Floats, z: &Floats, norm: &GatedNorm<'_, Cpu>) -> Result<Floats> {
        match self {
            Self::Portable => generic::gated_rmsnorm(cpu().library(), y, z, norm),
            Self::Kernels => cpu().gated_rmsnorm(y, z, norm),
        }
    }

    pub fn linear(
        self,
        x: &Floats,
        w: &Weight<Cpu>,
        bias: Option<&Floats>,
        add_to: Option<Floats>,
    ) -> Result<Floats> {
        match self {
            Self::Portable => generic::linear(cpu().library(), x, w, bias, add_to),
            Self::Kernels => cpu().linear(x, w, bias, add_to),
        }
    }

    pub fn embedding(self, w: &Weight<Cpu>, ids: &[u32]) -> Result<Floats> {
        match self {
            Self::Portable => generic::embedding(cpu().library(), w, ids),
            Self::Kernels => cpu().embedding(w, ids),
        }
    }

    pub fn new_cache(self, sizes: KvSizes) -> Result<KvCache<Cpu>> {
        match self {
            Self::Portable => generic::new_cache(sizes),
            Self::Kernels => cpu().new_cache(sizes),
        }
    }

    pub fn attention(
        self,
        input: &Attention<'_, Cpu>,
        runs: &[usize],
        caches: &mut [&mut KvCache<Cpu>],
    ) -> Result<Floats> {
        match self {
            Self::Portable => generic::attention(cpu().library(), input, runs, caches),
            Self::Kernels => cpu().attention(input, runs, caches),
        }
    }

    pub fn latent_attention(
        self,
        input: &LatentAttention<'_, Cpu>,
        runs: &[usize],
        caches: &mut [&mut KvCache<Cpu>],
    ) -> Result<Floats> {
        match self {
            Self::Portable => generic::latent_attention(cpu().library(), input, runs, caches),
            Self::Kernels => cpu().latent_attention(input, runs, caches),
        }
    }

    pub fn rope(self, x: &Floats, positions: &[usize], rope: &Rope) -> Result<Floats> {
        match self {
            Self::Portable => generic::rope(cpu().library(), x, positions, rope),
            Self::Kernels => cpu().rope(x, positions, rope),
        }
    }

    pub fn glu(self, act: Activation, gate: &Floats, up: &Floats) -> Result<Floats> {
        match self {
            Self::Portable => generic::glu(cpu().library(), act, gate, up),
            Self::Kernels => cpu().glu(act, gate, up),
        }
    }

    pub fn activate(self, act: Activation, x: &Floats) -> Result<Floats> {
        match self {
            Self::Portable => generic::activate(cpu().library(), act, x),
            Self::Kernels => cpu().activate(act, x),
        }
    }

    pub fn add_scaled(self, to: Floats, x: &Floats, factor: f32) -> Result<Floats> {
        match self {
            Self::Portable => generic::add_scaled(cpu().library(), to, x, factor),
            Self::Kernels => cpu().add_scaled(to, x, factor),
        }
    }

    pub fn scale_columns(self, x: &Floats, factors: &Floats) -> Result<Floats> {
        match self {
            Self::Portable => generic::scale_columns(cpu().library(), x, factors),
            Self::Kernels => cpu().scale_columns(x, factors),
        }
    }

    pub fn add_rows(
        self,
        to: Floats,
        x: &Floats,
        rows: &[usize],
        factors: &[f32],
    ) -> Result<Floats> {
        let factors = &tensor(&cpu(), factors, &[factors.len(), 1])?;
        match self {
            Self::Portable => generic::add_rows(cpu().library(), to, x, rows, factors),
            Self::Kernels => cpu().add_rows(to, x, rows, factors),
        }
    }

    pub fn concat_columns(self, x: &Floats, y: &Floats) -> Result<Floats> {
        match self {
            Self::Portable => generic::concat_columns(cpu().library(), x, y),
            Self::Kernels => cpu().concat_columns(x, y),
        }
    }

    pub fn select_rows(self, x: &Floats, rows: &[usize]) -> Result<Floats> {
        match self {
            Self::Portable => generic::select_rows(cpu().library(), x, rows),
            Self::Kernels => cpu().select_rows(x, rows),
        }
    }
}

/// A weight over the bytes of a checkpoint's tensor.
pub fn weight(entry: &TensorEntry) -> Weight<Cpu> {
    use boostr::checkpoint::Dtype;
    let dtype = match entry.dtype {
        Dtype::BF16 => DType::BF16,
        Dtype::F16 => DType::F16,
        _ => DType::F32,
    };
    let bytes = HostBytes::new(entry.data.owner().clone(), entry.data.range()).unwrap();
    cpu().weight(bytes, dtype, &entry.shape).unwrap()
}

/// These values as a tensor, in one of three layouts: dense, a band of wider rows whose margins are NaN,
/// or stored with its dimensions in reverse.
pub fn laid_out(layout: usize, values: &[f32], shape: &[usize]) -> Floats {
    let client = cpu();
    let (&width, outer) = shape.split_last().unwrap();
    match layout % 3 {
        0 => tensor(&client, values, shape).unwrap(),
        1 => {
            let rows = outer.iter().product::<usize>();
            let mut wide = vec![f32::NAN; rows * (width + 5)];
            for row in 0..rows {
                let from = &values[row * width..][..width];
                wide[row * (width + 5) + 2..][..width].copy_from_slice(from);
            }
            let shape = [outer, &[width + 5]].concat();
            let wide = tensor(&client, &wide, &shape).unwrap();
            wide.narrow(-1, 2, width).unwrap()
        }
        _ => {
            let reversed: Vec<usize> = shape.iter().rev().copied().collect();
            let mut stored = vec![0.0; values.len()];
            for (i, &value) in values.iter().enumerate() {
                // Digits of i in the shape's base are the index; reversed, they are the place.
                let (mut rest, mut place, mut step) = (i, 0, values.len());
                for &size in shape.iter().rev() {
                    step /= size;
                    place += rest % size * step;
                    rest /= size;
                }
                stored[place] = value;
            }
            let order: Vec<usize> = (0..shape.len()).rev().collect();
            tensor(&client, &stored, &reversed).unwrap().permute(&order).unwrap()
        }
    }
}
