//! Small steps between products.

use boostr_kernels::{self as kernels, Rows};
use numr::runtime::cpu::CpuRuntime;

use super::{Cpu, Tape};
use crate::error::Result;
use crate::ops::cpu::with_rows;
use crate::ops::{Activation, ActivationOps, ExpertWeights, host, to_vec};

impl ActivationOps<CpuRuntime> for Tape {
    fn glu(&self, act: Activation, gate: &Cpu, up: &Cpu) -> Result<Cpu> {
        let out = self.inner.glu(act, gate, up)?;
        let (level, saved) = (self.level(), [gate.clone(), up.clone()]);
        self.record(&[("gate", gate), ("up", up)], out, move |gradients, dout| {
            let [gate, up] = saved;
            let [mut dgate, mut dup] = [(); 2].map(|()| gradients.buffer(dout.len()));
            let [gate_rows, up_rows] = [with_rows(&gate)?, with_rows(&up)?];
            kernels::activation::glu_backward(
                level,
                act,
                host::rows("gate", &gate_rows)?,
                host::rows("up", &up_rows)?,
                Rows::dense(&dout, gate.shape()[1]),
                &mut dgate,
                &mut dup,
            );
            gradients.keep(dout);
            gradients.give(&gate, dgate)?;
            gradients.give(&up, dup)
        })
    }

    fn activate(&self, act: Activation, x: &Cpu) -> Result<Cpu> {
        let out = self.inner.activate(act, x)?;
        let (level, saved) = (self.level(), x.clone());
        self.record(&[("x", x)], out, move |gradients, dout| {
            let mut dx = gradients.buffer(dout.len());
            let rows = with_rows(&saved)?;
            let of = Rows::dense(&dout, saved.shape()[1]);
            let rows = host::rows("x", &rows)?;
            kernels::activation::activate_backward(level, act, rows, of, &mut dx);
            gradients.keep(dout);
            gradients.give(&saved, dx)
        })
    }

    fn add_scaled(&self, to: Cpu, x: &Cpu, factor: f32) -> Result<Cpu> {
        let saved = [to.clone(), x.clone()];
        let out = self.inner.add_scaled(to, x, factor)?;
        let inputs = [("to", &saved[0]), ("x", &saved[1])];
        let [to, x] = saved.clone();
        self.record(&inputs, out, move |gradients, dout| {
            if gradients.wants(&x) {
                gradients.give(&x, dout.iter().map(|dout| factor * dout).collect())?;
            }
            gradients.give(&to, dout)
        })
    }

    fn scale_columns(&self, x: &Cpu, factors: &Cpu) -> Result<Cpu> {
        let out = self.inner.scale_columns(x, factors)?;
        let (level, saved) = (self.level(), [x.clone(), factors.clone()]);
        self.record(&[("x", x), ("factors", factors)], out, move |gradients, dout| {
            let [x, factors] = saved;
            let of = Rows::dense(&dout, factors.numel());
            if let Some(dfactors) = gradients.of(&factors) {
                let rows = with_rows(&x)?;
                kernels::column_dots(level, of, host::rows("x", &rows)?, dfactors);
            }
            let mut dx = gradients.buffer(x.numel());
            let factors = host::contiguous("factors", &factors)?;
            let factors = host::slice("factors", &factors)?;
            kernels::activation::scale_columns(of, factors, &mut dx);
            gradients.keep(dout);
            gradients.give(&x, dx)
        })
    }

    fn add_rows(&self, to: Cpu, x: &Cpu, rows: &[usize], factors: &Cpu) -> Result<Cpu> {
        let saved = [to.clone(), x.clone(), factors.clone()];
        let out = self.inner.add_rows(to, x, rows, factors)?;
        let inputs = [("to", &saved[0]), ("x", &saved[1]), ("factors", &saved[2])];
        let ([to, x, factors], rows) = (saved.clone(), rows.to_vec());
        self.record(&inputs, out, move |gradients, dout| {
            let width = x.shape()[1];
            let (values, scales) = (to_vec(&x)?, to_vec(&factors)?);
            let (mut dx, mut dfactors) = (vec![0.0; values.len()], vec![0.0; scales.len()]);
            for (i, &row) in rows.iter().enumerate() {
                let dout = &dout[row * width..][..width];
                let of = i * width..(i + 1) * width;
                for (dx, dout) in dx[of.clone()].iter_mut().zip(dout) {
                    *dx = scales[i] * dout;
                }
                dfactors[i] = values[of].iter().zip(dout).map(|(x, dout)| x * dout).sum();
            }
            gradients.give(&x, dx)?;
            gradients.give(&factors, dfactors)?;
            gradients.give(&to, dout)
        })
    }

    fn expert_weights(
        &self,
        scores: &Cpu,
        chosen: &[usize],
        weights: ExpertWeights,
    ) -> Result<Cpu> {
        let out = self.inner.expert_weights(scores, chosen, weights)?;
        let (saved, chosen) = (scores.clone(), chosen.to_vec());
        self.record(&[("scores", scores)], out, move |gradients, dout| {
            let &[tokens, experts] = saved.shape() else { return Ok(()) };
            let used = (chosen.len() / tokens.max(1)).max(1);
            let scores = to_vec(&saved)?;
            let rows = scores.chunks_exact(experts).zip(chosen.chunks_exact(used));
            let rows = rows.zip(dout.chunks_exact(used));
            let dscores =
                rows.flat_map(|((scores, chosen), dout)| weights.backward(scores, chosen, dout));
            let dscores = dscores.collect();
            gradients.give(&saved, dscores)
        })
    }

    fn concat_columns(&self, x: &Cpu, y: &Cpu) -> Result<Cpu> {
        let out = self.inner.concat_columns(x, y)?;
        let saved = [x.clone(), y.clone()];
        self.record(&[("x", x), ("y", y)], out, move |gradients, dout| {
            let [left, right] = [saved[0].shape()[1], saved[1].shape()[1]];
            let rows = Rows::dense(&dout, left + right);
            for (x, (first, width)) in saved.iter().zip([(0, left), (left, right)]) {
                let part = rows.columns(first, width);
                let mut dx = Vec::with_capacity(part.len() * width);
                (0..part.len()).for_each(|t| dx.extend_from_slice(part.row(t)));
                gradients.give(x, dx)?;
            }
            Ok(())
        })
    }
}
