//! The gated delta rule, with gradients that go through the states of sequences.

use boostr_kernels::{Rows, delta};
use numr::runtime::cpu::CpuRuntime;

use super::ssm::{Carried, slices, slices_mut};
use super::{Cpu, Tape};
use crate::error::Result;
use crate::ops::cpu::delta::{DeltaArguments, GateArguments};
use crate::ops::{DecayGate, DeltaInput, DeltaOps};

impl DeltaOps<CpuRuntime> for Tape {
    fn gated_delta(
        &self,
        input: &DeltaInput<'_, CpuRuntime>,
        runs: &[usize],
        states: &mut [&mut Cpu],
    ) -> Result<Cpu> {
        self.rule(input, false, runs, states)
    }

    fn kda(
        &self,
        input: &DeltaInput<'_, CpuRuntime>,
        runs: &[usize],
        states: &mut [&mut Cpu],
    ) -> Result<Cpu> {
        self.rule(input, true, runs, states)
    }

    fn decay_gate(&self, gate: &DecayGate<'_, CpuRuntime>) -> Result<Cpu> {
        let out = self.inner.decay_gate(gate)?;
        let inputs = [("a", gate.a), ("a_log", gate.a_log), ("dt_bias", gate.dt_bias)];
        let [a, a_log, dt_bias] = inputs.map(|(_, x)| x.clone());
        let level = self.level();
        self.record(&inputs, out, move |gradients, dg| {
            let gate = DecayGate { a: &a, a_log: &a_log, dt_bias: &dt_bias };
            let arguments = GateArguments::new(&gate)?;
            let zeros = |x: &Cpu| vec![0.0; x.numel()];
            let [mut da, mut da_log, mut ddt_bias] = [&a, &a_log, &dt_bias].map(zeros);
            let out = delta::DecayGateGradients {
                da: &mut da,
                da_log: &mut da_log,
                ddt_bias: &mut ddt_bias,
            };
            let width = dt_bias.numel();
            let dg = Rows::new(&dg, a.shape()[0], width, 0, width);
            delta::decay_gate_backward(&arguments.kernel(level)?, dg, out);
            for (x, dx) in [(&a, da), (&a_log, da_log), (&dt_bias, ddt_bias)] {
                gradients.give(x, dx)?;
            }
            Ok(())
        })
    }
}

impl Tape {
    fn rule(
        &self,
        input: &DeltaInput<'_, CpuRuntime>,
        by_channel: bool,
        runs: &[usize],
        states: &mut [&mut Cpu],
    ) -> Result<Cpu> {
        let dims = input.dims(by_channel, runs, states)?;
        let before = Carried::before(states);
        let out = if by_channel {
            self.inner.kda(input, runs, states)?
        } else {
            self.inner.gated_delta(input, runs, states)?
        };
        let carried = Carried::new(before, states);
        let inputs =
            [("q", input.q), ("k", input.k), ("v", input.v), ("g", input.g), ("beta", input.beta)];
        let [q, k, v, g, beta] = inputs.map(|(_, x)| x.clone());
        let (level, scale, runs) = (self.level(), input.scale, runs.to_vec());
        self.record_carried(&inputs, carried, out, move |gradients, dout, carried| {
            let input = DeltaInput { q: &q, k: &k, v: &v, g: &g, beta: &beta, scale };
            let arguments = DeltaArguments::new(&input, dims)?;
            let values = carried.values()?;
            let mut dstates = carried.take(gradients);
            let zeros = |x: &Cpu| vec![0.0; x.numel()];
            let [mut dq, mut dk, mut dv, mut dg, mut dbeta] = [&q, &k, &v, &g, &beta].map(zeros);
            let width = dims.value_heads * dims.value_dim;
            delta::delta_rule_backward(
                &arguments.kernel(level)?,
                &runs,
                &slices(&values)?,
                Rows::new(&dout, dims.tokens, width, 0, width),
                &mut slices_mut(&mut dstates),
                delta::DeltaGradients {
                    dq: &mut dq,
                    dk: &mut dk,
                    dv: &mut dv,
                    dg: &mut dg,
                    dbeta: &mut dbeta,
                },
            );
            for (x, dx) in [(&q, dq), (&k, dk), (&v, dv), (&g, dg), (&beta, dbeta)] {
                gradients.give(x, dx)?;
            }
            carried.give(gradients, dstates)
        })
    }
}
