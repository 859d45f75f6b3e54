//! Weights, norms, losses: what has parameters and looks at each row by itself.

use boostr_kernels::{self as kernels, Rows, cross_entropy as loss};
use numr::runtime::cpu::CpuRuntime;

use super::gradients::Gradients;
use super::{Cpu, Tape};
use crate::error::Result;
use crate::ops::cpu::{elements, with_rows};
use crate::ops::weight::Storage;
use crate::ops::{
    Check, DType, Format, GatedNorm, HostBytes, Level, LinearOps, NormOps, QuantTensor, Weight,
    generic, host, to_vec,
};

impl Tape {
    /// Makes a weight known as the parameter `name`.
    pub fn parameter(&self, name: &str, w: &Weight<CpuRuntime>) {
        if let Some(floats) = w.floats() {
            super::Client::made(self, Some(name), floats);
        }
    }

    fn product(
        &self,
        x: &Cpu,
        w: &Weight<CpuRuntime>,
        bias: Option<&Cpu>,
        add_to: Option<Cpu>,
        is_precise: bool,
    ) -> Result<Cpu> {
        if let Some(floats) = w.floats() {
            self.observe(floats, x)?;
        }
        let onto = add_to.clone();
        let out = if is_precise {
            self.inner.linear_precise(x, w, bias, add_to)?
        } else {
            self.inner.linear(x, w, bias, add_to)?
        };
        let mut inputs = vec![("x", x)];
        inputs.extend(w.floats().map(|w| ("w", w)));
        inputs.extend(bias.map(|bias| ("bias", bias)));
        inputs.extend(onto.as_ref().map(|onto| ("add_to", onto)));
        let (x, w, bias) = (x.clone(), w.clone(), bias.cloned());
        let (saved_onto, level) = (onto.clone(), self.level());
        self.record(&inputs, out, move |gradients, dout| {
            let features = w.shape()[0];
            let rows = Rows::dense(&dout, features);
            if let Some(bias) = bias.as_ref().and_then(|bias| gradients.of(bias)) {
                kernels::column_sums(level, rows, bias);
            }
            if let Some(dw) = w.floats().and_then(|w| gradients.of(w)) {
                let x = with_rows(&x)?;
                kernels::linear_backward_weight(level, rows, host::rows("x", &x)?, dw);
            }
            if gradients.wants(&x) {
                let mut dx = gradients.buffer(rows.len() * w.shape()[1]);
                input_gradient(level, rows, &w, &mut dx)?;
                gradients.give(&x, dx)?;
            }
            match saved_onto {
                Some(onto) => gradients.give(&onto, dout)?,
                None => gradients.keep(dout),
            }
            Ok(())
        })
    }
}

/// Writes `dout · w` to `dx`.
fn input_gradient(
    level: Level,
    dout: Rows<'_>,
    w: &Weight<CpuRuntime>,
    dx: &mut [f32],
) -> Result<()> {
    match &w.storage {
        Storage::Dense(w, _) => kernels::linear_backward_input(level, dout, elements(w)?, dx),
        Storage::Packed(blocks) => {
            let w = decoded(blocks.get()?);
            kernels::linear_backward_input(level, dout, kernels::Weights::F32(&w), dx);
        }
    }
    Ok(())
}

fn decoded(packed: &kernels::quant::Packed) -> Vec<f32> {
    let mut values = vec![0.0; packed.features() * packed.width()];
    for (n, row) in values.chunks_exact_mut(packed.width()).enumerate() {
        packed.row(n, row);
    }
    values
}

/// All of a weight as f32.
fn floats(w: &Weight<CpuRuntime>) -> Result<Vec<f32>> {
    match &w.storage {
        Storage::Dense(w, _) => {
            let mut values = vec![0.0; w.numel()];
            elements(w)?.widen(0, &mut values);
            Ok(values)
        }
        Storage::Packed(blocks) => Ok(decoded(blocks.get()?)),
    }
}

impl LinearOps<CpuRuntime> for Tape {
    fn weight(
        &self,
        bytes: HostBytes,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Weight<CpuRuntime>> {
        self.inner.weight(bytes, dtype, shape)
    }

    fn quantized(&self, w: &QuantTensor) -> Result<Weight<CpuRuntime>> {
        self.inner.quantized(w)
    }

    fn packing(&self) -> Option<&'static str> {
        self.inner.packing()
    }

    fn of_packed(
        &self,
        bytes: HostBytes,
        format: Format,
        shape: [usize; 2],
        check: Check,
    ) -> Result<Weight<CpuRuntime>> {
        self.inner.of_packed(bytes, format, shape, check)
    }

    fn linear(
        &self,
        x: &Cpu,
        w: &Weight<CpuRuntime>,
        bias: Option<&Cpu>,
        add_to: Option<Cpu>,
    ) -> Result<Cpu> {
        self.product(x, w, bias, add_to, false)
    }

    fn linear_precise(
        &self,
        x: &Cpu,
        w: &Weight<CpuRuntime>,
        bias: Option<&Cpu>,
        add_to: Option<Cpu>,
    ) -> Result<Cpu> {
        self.product(x, w, bias, add_to, true)
    }

    fn embedding(&self, w: &Weight<CpuRuntime>, ids: &[u32]) -> Result<Cpu> {
        let out = self.inner.embedding(w, ids)?;
        let Some(floats) = w.floats() else {
            self.add_constants(&[&out]);
            return Ok(out);
        };
        let (saved, ids) = (w.clone(), ids.to_vec());
        self.record(&[("w", floats)], out, move |gradients, dout| {
            let Some(w) = saved.floats() else { return Ok(()) };
            let width = saved.shape()[1];
            if let Some(dw) = gradients.of(w) {
                let rows = ids.iter().map(|&id| id as usize);
                add_to_rows(dw, rows.zip(dout.chunks_exact(width.max(1))));
            }
            gradients.keep(dout);
            Ok(())
        })
    }

    fn select_rows(&self, x: &Cpu, rows: &[usize]) -> Result<Cpu> {
        let out = self.inner.select_rows(x, rows)?;
        let (saved, rows) = (x.clone(), rows.to_vec());
        self.record(&[("x", x)], out, move |gradients, dout| {
            let mut dx = gradients.zeros(saved.numel());
            let width = saved.shape()[1].max(1);
            add_to_rows(&mut dx, rows.into_iter().zip(dout.chunks_exact(width)));
            gradients.keep(dout);
            gradients.give(&saved, dx)
        })
    }

    fn concat_rows(&self, parts: &[Cpu]) -> Result<Cpu> {
        let out = self.inner.concat_rows(parts)?;
        let inputs: Vec<(&'static str, &Cpu)> = parts.iter().map(|part| ("parts", part)).collect();
        let parts = parts.to_vec();
        self.record(&inputs, out, move |gradients, dout| {
            let mut rest = &dout[..];
            for part in &parts {
                let (dpart, after) = rest.split_at(part.numel());
                gradients.give(part, dpart.to_vec())?;
                rest = after;
            }
            Ok(())
        })
    }

    fn cross_entropy(
        &self,
        h: &Cpu,
        head: &Weight<CpuRuntime>,
        scale: f32,
        (targets, weights): (&[u32], &[f32]),
        _: bool,
    ) -> Result<Cpu> {
        generic::check_targets(h, head, targets, weights)?;
        let mut inputs = vec![("h", h)];
        inputs.extend(head.floats().map(|w| ("head", w)));
        let is_needed = self.is_needed(&inputs)?;
        let mut losses = host::zeros(&[targets.len()])?;
        let of = host::slice_mut("losses", &mut losses)?;
        let decoded;
        let weight = match &head.storage {
            Storage::Dense(w, _) if w.dtype() == DType::F32 => host::slice("head", w)?,
            _ => {
                decoded = floats(head)?;
                &decoded
            }
        };
        let kernel = loss::Head { level: self.level(), weight, scale };
        let rows = with_rows(h)?;
        let rows = host::rows("h", &rows)?;
        if is_needed {
            // The gradient is made here, where the logits are, and kept until the way back begins.
            let mut scratch = Vec::new();
            let mut recording = self.lock();
            recording.losses += 1;
            let gradients = &mut recording.gradients;
            let mut dh = gradients.buffer(h.numel());
            let dw = match head.floats() {
                Some(w) => gradients.of_or(w, &mut scratch),
                None => {
                    scratch.resize(weight.len(), 0.0);
                    &mut scratch
                }
            };
            loss::cross_entropy_backward(rows, &kernel, targets, weights, of, &mut dh, dw);
            gradients.give(h, dh)?;
        } else {
            loss::cross_entropy(rows, &kernel, targets, of);
        }
        self.add_constants(&[&losses]);
        Ok(losses)
    }

    fn decay_rates(&self, a_log: &Cpu) -> Result<Cpu> {
        let out = self.inner.decay_rates(a_log)?;
        let (saved, a) = (a_log.clone(), to_vec(&out)?);
        self.record(&[("a_log", a_log)], out, move |gradients, mut dout| {
            dout.iter_mut().zip(a).for_each(|(dout, a)| *dout *= a);
            gradients.give(&saved, dout)
        })
    }

    fn transpose(&self, x: &Cpu) -> Result<Cpu> {
        let out = self.inner.transpose(x)?;
        let saved = x.clone();
        self.record(&[("x", x)], out, move |gradients, dout| {
            let mut dx = gradients.buffer(dout.len());
            kernels::transpose(Rows::dense(&dout, saved.shape()[0]), &mut dx);
            gradients.keep(dout);
            gradients.give(&saved, dx)
        })
    }
}

/// Adds rows to the rows of a matrix that they are numbered for, in their order.
fn add_to_rows<'a>(to: &mut [f32], rows: impl Iterator<Item = (usize, &'a [f32])>) {
    for (row, x) in rows {
        let to = &mut to[row * x.len()..][..x.len()];
        to.iter_mut().zip(x).for_each(|(to, x)| *to += x);
    }
}

impl NormOps<CpuRuntime> for Tape {
    fn rmsnorm(&self, x: &Cpu, weight: &Cpu, eps: f32) -> Result<Cpu> {
        let out = self.inner.rmsnorm(x, weight, eps)?;
        let (level, saved, w) = (self.level(), x.clone(), weight.clone());
        self.record(&[("x", x), ("weight", weight)], out, move |gradients, dout| {
            let (mut dx, mut scratch) = (gradients.buffer(dout.len()), Vec::new());
            let rows = with_rows(&saved)?;
            kernels::rms_norm_backward(
                level,
                host::rows("x", &rows)?,
                host::slice("weight", &w)?,
                eps,
                Rows::dense(&dout, w.numel()),
                &mut dx,
                gradients.of_or(&w, &mut scratch),
            );
            gradients.keep(dout);
            gradients.give(&saved, dx)
        })
    }

    fn gated_rmsnorm(&self, y: &Cpu, z: &Cpu, norm: &GatedNorm<'_, CpuRuntime>) -> Result<Cpu> {
        let out = self.inner.gated_rmsnorm(y, z, norm)?;
        let inputs = [("y", y), ("z", z), ("weight", norm.weight)];
        let (y, z, w) = (y.clone(), z.clone(), norm.weight.clone());
        let level = self.level();
        let (ngroups, eps, norm_before_gate) = (norm.ngroups, norm.eps, norm.norm_before_gate);
        let activation = norm.activation;
        self.record(&inputs, out, move |gradients: &mut Gradients, dout| {
            let [mut dy, mut dz] = [(); 2].map(|()| gradients.buffer(dout.len()));
            let [y_rows, z_rows] = [with_rows(&y)?, with_rows(&z)?];
            let weight = Some(host::slice("weight", &w)?);
            kernels::gated_rms_norm_backward(
                host::rows("y", &y_rows)?,
                host::rows("z", &z_rows)?,
                kernels::GatedNorm { level, weight, ngroups, eps, norm_before_gate, activation },
                Rows::dense(&dout, y.shape()[1]),
                &mut dy,
                &mut dz,
                gradients.of(&w),
            );
            gradients.keep(dout);
            gradients.give(&y, dy)?;
            gradients.give(&z, dz)
        })
    }

    fn l2norm(&self, x: &Cpu, group: usize, eps: f32) -> Result<Cpu> {
        let out = self.inner.l2norm(x, group, eps)?;
        let (level, saved) = (self.level(), x.clone());
        self.record(&[("x", x)], out, move |gradients, dout| {
            let mut dx = gradients.buffer(dout.len());
            let rows = with_rows(&saved)?;
            let rows = host::rows("x", &rows)?;
            let of = Rows::dense(&dout, saved.shape()[1]);
            kernels::l2_norm_backward(level, rows, group, eps, of, &mut dx);
            gradients.keep(dout);
            gradients.give(&saved, dx)
        })
    }
}
