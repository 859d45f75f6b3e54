//! Convolution and SSD, with gradients that go through the states of sequences.

use boostr_kernels::{self as kernels, Rows, ssd};
use numr::runtime::cpu::CpuRuntime;

use super::gradients::Gradients;
use super::{Cpu, Tape};
use crate::error::Result;
use crate::ops::cpu::{SsdArguments, optional, with_rows};
use crate::ops::{CausalConv, CausalConvOps, SsdInput, SsmKernelOps, host};

/// Gradients of what sequences remember, before and after.
pub(super) struct Carried {
    before: Vec<Cpu>,
    after: Vec<Cpu>,
}

impl Carried {
    /// What is there before an operation.
    pub(super) fn before(states: &[&mut Cpu]) -> Vec<Cpu> {
        states.iter().map(|state| (**state).clone()).collect()
    }

    pub(super) fn new(before: Vec<Cpu>, states: &[&mut Cpu]) -> Self {
        Self { before, after: Self::before(states) }
    }

    /// Gradients of the states after, to be turned into those of the states before.
    pub(super) fn take(&self, gradients: &mut Gradients) -> Vec<Vec<f32>> {
        self.after.iter().map(|state| gradients.take_or_zeros(state)).collect()
    }

    pub(super) fn give(&self, gradients: &mut Gradients, states: Vec<Vec<f32>>) -> Result<()> {
        self.before.iter().zip(states).try_for_each(|(state, dx)| gradients.give(state, dx))
    }

    /// Values of the states before.
    pub(super) fn values(&self) -> Result<Vec<Cpu>> {
        self.before.iter().map(|state| host::contiguous("state", state)).collect()
    }
}

pub(super) fn slices(tensors: &[Cpu]) -> Result<Vec<&[f32]>> {
    tensors.iter().map(|x| host::slice("state", x)).collect()
}

pub(super) fn slices_mut(parts: &mut [Vec<f32>]) -> Vec<&mut [f32]> {
    parts.iter_mut().map(Vec::as_mut_slice).collect()
}

impl Tape {
    /// Adds an operation with an output and states; `backward` gets the output's gradient and `carried`.
    pub(super) fn record_carried(
        &self,
        inputs: &[(&'static str, &Cpu)],
        carried: Carried,
        out: Cpu,
        backward: impl FnOnce(&mut Gradients, Vec<f32>, Carried) -> Result<()> + Send + 'static,
    ) -> Result<Cpu> {
        let is_carried = carried.before.iter().any(|state| self.is_carried(state));
        let mut outputs = vec![out.clone()];
        outputs.extend(carried.after.iter().cloned());
        let outputs: Vec<&Cpu> = outputs.iter().collect();
        if !self.is_needed(inputs)? && !is_carried {
            self.add_constants(&outputs);
            return Ok(out);
        }
        let of = out.clone();
        self.add_step(&outputs, move |gradients| {
            let is_idle = !gradients.has(&of) && !carried.after.iter().any(|x| gradients.has(x));
            if is_idle {
                return Ok(());
            }
            let dout = gradients.take_or_zeros(&of);
            backward(gradients, dout, carried)
        });
        Ok(out)
    }
}

impl SsmKernelOps<CpuRuntime> for Tape {
    fn ssd(
        &self,
        input: &SsdInput<'_, CpuRuntime>,
        runs: &[usize],
        states: &mut [&mut Cpu],
    ) -> Result<Cpu> {
        let before = Carried::before(states);
        let y = self.inner.ssd(input, runs, states)?;
        let carried = Carried::new(before, states);
        let mut inputs = vec![
            ("x", input.x),
            ("dt", input.dt),
            ("a", input.a.rates()),
            ("b", input.b),
            ("c", input.c),
        ];
        inputs.extend(input.dt_bias.map(|x| ("dt_bias", x)));
        inputs.extend(input.d.map(|x| ("d", x)));
        inputs.extend(input.z.map(|x| ("z", x)));
        let [x, dt, b, c] = [input.x, input.dt, input.b, input.c].map(Clone::clone);
        let a = input.a.clone();
        let [dt_bias, d, z] = [input.dt_bias, input.d, input.z].map(Option::<&Cpu>::cloned);
        let (dt_softplus, dt_limit) = (input.dt_softplus, input.dt_limit);
        let (level, runs) = (self.level(), runs.to_vec());
        self.record_carried(&inputs, carried, y, move |gradients, dout, carried| {
            let input = SsdInput::new(&x, &dt, &a, &b, &c)
                .dt_bias(dt_bias.as_ref())
                .d(d.as_ref())
                .z(z.as_ref())
                .dt_softplus(dt_softplus)
                .dt_limit(dt_limit);
            let arguments = SsdArguments::new(&input)?;
            let values = carried.values()?;
            let mut dstates = carried.take(gradients);
            // Those of tokens are overwritten, those of parameters are added to zeros.
            let [mut dx, mut ddt, mut db, mut dc] =
                [&x, &dt, &b, &c].map(|x| gradients.buffer(x.numel()));
            let mut dz = z.as_ref().map(|z| gradients.buffer(z.numel()));
            let zeros = |x: &Cpu| vec![0.0; x.numel()];
            let mut da = zeros(a.rates());
            let [mut ddt_bias, mut dd] = [&dt_bias, &d].map(|x| x.as_ref().map(zeros));
            ssd::ssd_backward(
                &arguments.kernel(level)?,
                &runs,
                &slices(&values)?,
                Rows::dense(&dout, x.shape()[1] * x.shape()[2]),
                &mut slices_mut(&mut dstates),
                ssd::SsdGradients {
                    dx: &mut dx,
                    ddt: &mut ddt,
                    db: &mut db,
                    dc: &mut dc,
                    dz: dz.as_deref_mut(),
                    da: &mut da,
                    ddt_bias: ddt_bias.as_deref_mut(),
                    dd: dd.as_deref_mut(),
                },
            );
            gradients.keep(dout);
            for (x, dx) in [(&x, dx), (&dt, ddt), (a.rates(), da), (&b, db), (&c, dc)] {
                gradients.give(x, dx)?;
            }
            for (x, dx) in [(z, dz), (dt_bias, ddt_bias), (d, dd)] {
                if let (Some(x), Some(dx)) = (x, dx) {
                    gradients.give(&x, dx)?;
                }
            }
            carried.give(gradients, dstates)
        })
    }
}

impl CausalConvOps<CpuRuntime> for Tape {
    fn causal_conv1d(
        &self,
        x: &Cpu,
        conv: &CausalConv<'_, CpuRuntime>,
        runs: &[usize],
        windows: &mut [&mut Cpu],
    ) -> Result<Cpu> {
        let before = Carried::before(windows);
        let out = self.inner.causal_conv1d(x, conv, runs, windows)?;
        let carried = Carried::new(before, windows);
        let mut inputs = vec![("x", x), ("weight", conv.weight)];
        inputs.extend(conv.bias.map(|bias| ("bias", bias)));
        let (x, weight, bias) = (x.clone(), conv.weight.clone(), conv.bias.cloned());
        let (level, silu, runs) = (self.level(), conv.silu, runs.to_vec());
        self.record_carried(&inputs, carried, out, move |gradients, dout, carried| {
            let channels = x.shape()[1];
            let values = carried.values()?;
            let mut dwindows = carried.take(gradients);
            let rows = with_rows(&x)?;
            let mut dx = gradients.buffer(dout.len());
            let mut dweight = vec![0.0; weight.numel()];
            let mut dbias = bias.as_ref().map(|bias| vec![0.0; bias.numel()]);
            if channels > 0 {
                let (taps, bias) =
                    (host::slice("weight", &weight)?, optional("bias", bias.as_ref())?);
                kernels::conv1d_backward(
                    &kernels::Conv1d { level, weight: taps, bias, silu },
                    host::rows("x", &rows)?,
                    &runs,
                    &slices(&values)?,
                    Rows::dense(&dout, channels),
                    &mut slices_mut(&mut dwindows),
                    kernels::Conv1dGradients {
                        dx: &mut dx,
                        dweight: &mut dweight,
                        dbias: dbias.as_deref_mut(),
                    },
                );
            }
            gradients.keep(dout);
            gradients.give(&x, dx)?;
            gradients.give(&weight, dweight)?;
            if let (Some(bias), Some(dbias)) = (bias, dbias) {
                gradients.give(&bias, dbias)?;
            }
            carried.give(gradients, dwindows)
        })
    }
}
