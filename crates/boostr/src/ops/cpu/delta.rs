//! The gated delta rule on the CPU.

use boostr_kernels::Level;
use boostr_kernels::delta;
use numr::runtime::cpu::CpuRuntime;

use super::{Cpu, KernelClient, contiguous, slices_mut, with_rows};
use crate::error::Result;
use crate::ops::delta::DeltaDims;
use crate::ops::{DecayGate, DeltaInput, DeltaOps, host};

impl<C: KernelClient> DeltaOps<CpuRuntime> for C {
    fn gated_delta(
        &self,
        input: &DeltaInput<'_, CpuRuntime>,
        runs: &[usize],
        states: &mut [&mut Cpu],
    ) -> Result<Cpu> {
        rule(self, input, false, runs, states)
    }

    fn kda(
        &self,
        input: &DeltaInput<'_, CpuRuntime>,
        runs: &[usize],
        states: &mut [&mut Cpu],
    ) -> Result<Cpu> {
        rule(self, input, true, runs, states)
    }

    fn decay_gate(&self, gate: &DecayGate<'_, CpuRuntime>) -> Result<Cpu> {
        let (tokens, width, _) = gate.check()?;
        let arguments = GateArguments::new(gate)?;
        let mut out = host::zeros(&[tokens, width])?;
        let to = host::slice_mut("out", &mut out)?;
        delta::decay_gate(&arguments.kernel(self.level())?, to);
        Ok(out)
    }
}

fn rule(
    client: &impl KernelClient,
    input: &DeltaInput<'_, CpuRuntime>,
    by_channel: bool,
    runs: &[usize],
    states: &mut [&mut Cpu],
) -> Result<Cpu> {
    let dims = input.dims(by_channel, runs, states)?;
    let arguments = DeltaArguments::new(input, dims)?;
    let mut out = host::zeros(&[dims.tokens, dims.value_heads, dims.value_dim])?;
    let mut states = slices_mut("states", states)?;
    let to = host::slice_mut("out", &mut out)?;
    delta::delta_rule(&arguments.kernel(client.level())?, runs, &mut states, to);
    Ok(out)
}

/// What the kernels of the rule read, in memory that they can read; checked before by [`DeltaInput::dims`].
pub(in crate::ops) struct DeltaArguments {
    dims: DeltaDims,
    q: Cpu,
    k: Cpu,
    v: Cpu,
    g: Cpu,
    beta: Cpu,
    scale: f32,
}

impl DeltaArguments {
    pub(in crate::ops) fn new(input: &DeltaInput<'_, CpuRuntime>, dims: DeltaDims) -> Result<Self> {
        Ok(Self {
            dims,
            q: with_rows(input.q)?,
            k: with_rows(input.k)?,
            v: with_rows(input.v)?,
            g: with_rows(input.g)?,
            beta: with_rows(input.beta)?,
            scale: input.scale,
        })
    }

    pub(in crate::ops) fn kernel(&self, level: Level) -> Result<delta::Delta<'_>> {
        let DeltaDims { key_heads, value_heads, key_dim, value_dim, .. } = self.dims;
        Ok(delta::Delta {
            level,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            q: host::rows("q", &self.q)?,
            k: host::rows("k", &self.k)?,
            v: host::rows("v", &self.v)?,
            g: host::rows("g", &self.g)?,
            beta: host::rows("beta", &self.beta)?,
            scale: self.scale,
        })
    }
}

/// What the kernels of the gate read; checked before by [`DecayGate::check`].
pub(in crate::ops) struct GateArguments {
    a: Cpu,
    a_log: Cpu,
    dt_bias: Cpu,
}

impl GateArguments {
    pub(in crate::ops) fn new(gate: &DecayGate<'_, CpuRuntime>) -> Result<Self> {
        let [a_log, dt_bias] = contiguous([gate.a_log, gate.dt_bias])?;
        Ok(Self { a: with_rows(gate.a)?, a_log, dt_bias })
    }

    pub(in crate::ops) fn kernel(&self, level: Level) -> Result<delta::DecayGate<'_>> {
        Ok(delta::DecayGate {
            level,
            a: host::rows("a", &self.a)?,
            a_log: host::slice("a_log", &self.a_log)?,
            dt_bias: host::slice("dt_bias", &self.dt_bias)?,
        })
    }
}
