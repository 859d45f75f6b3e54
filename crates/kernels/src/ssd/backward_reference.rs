//! The definition of the backward of SSD: the adjoint of each token's step, from the last to the first.
//!
//! ```text
//! dS     += dy[t] c[t]ᵀ                     dS that arrives from the tokens after t
//! dc[t]   = S[t]ᵀ dy[t]
//! db[t]   = dt[t] dSᵀ x[t]
//! dx[t]   = dt[t] dS b[t] + d dy[t]
//! ddt[t]  = x[t]·dS b[t] + a de[t]          de[t] = exp(dt[t] a) <dS, S[t-1]>
//! da     += dt[t] de[t]
//! dS      = exp(dt[t] a) dS                 dS that arrives at the tokens before t
//! ```
//!
//! Slow on purpose, in f64; all states are kept.

use super::{Ssd, recurrence};

/// Every gradient, in the layout of what it is the gradient of.
#[derive(Debug, Default)]
pub(super) struct Gradients {
    pub(super) dx: Vec<f64>,
    pub(super) ddt: Vec<f64>,
    pub(super) db: Vec<f64>,
    pub(super) dc: Vec<f64>,
    pub(super) dz: Vec<f64>,
    pub(super) da: Vec<f64>,
    pub(super) ddt_bias: Vec<f64>,
    pub(super) dd: Vec<f64>,
    pub(super) dstates: Vec<Vec<f64>>,
}

/// A step, from its raw value, and the derivative of the one by the other.
fn step(input: &Ssd<'_>, t: usize, head: usize) -> (f64, f64) {
    let raw = f64::from(input.dt.row(t)[head]) + input.dt_bias.map_or(0.0, |b| b[head].into());
    let (step, slope) = if input.dt_softplus {
        (raw.max(0.0) + (-raw.abs()).exp().ln_1p(), 1.0 / (1.0 + (-raw).exp()))
    } else {
        (raw, 1.0)
    };
    let (least, most) = (input.dt_limit.0.into(), input.dt_limit.1.into());
    if step < least {
        (least, 0.0)
    } else if step > most {
        (most, 0.0)
    } else {
        (step, slope)
    }
}

/// What [`ssd_backward`](super::ssd_backward) computes, by its definition.
pub(super) fn reference(
    input: &Ssd<'_>,
    runs: &[usize],
    states: &[Vec<f32>],
    dout: &[f32],
    dstates: &[Vec<f32>],
) -> Gradients {
    let Ssd { nheads, headdim, ngroups, dstate, .. } = *input;
    let tokens = input.x.len();
    let widen = |x: &Vec<f32>| -> Vec<f64> { x.iter().copied().map(f64::from).collect() };
    let mut out = Gradients {
        dx: vec![0.0; tokens * nheads * headdim],
        ddt: vec![0.0; tokens * nheads],
        db: vec![0.0; tokens * ngroups * dstate],
        dc: vec![0.0; tokens * ngroups * dstate],
        dz: vec![0.0; tokens * nheads * headdim],
        da: vec![0.0; nheads],
        ddt_bias: vec![0.0; nheads],
        dd: vec![0.0; input.d.map_or(0, <[f32]>::len)],
        dstates: dstates.iter().map(widen).collect(),
    };
    let mut first = 0;
    for (r, &len) in runs.iter().enumerate() {
        // The states before each token and after the last, and y before the gate.
        let mut passed = vec![widen(&states[r])];
        let mut y = Vec::new();
        for t in first..first + len {
            let token = Ssd {
                x: input.x.slice(t, 1),
                dt: input.dt.slice(t, 1),
                b: input.b.slice(t, 1),
                c: input.c.slice(t, 1),
                z: None,
                ..*input
            };
            let mut state = [passed[t - first].clone()];
            y.extend(recurrence(&token, &[1], &mut state));
            passed.extend(state);
        }
        let ds = &mut out.dstates[r];
        for t in (first..first + len).rev() {
            for head in 0..nheads {
                let group = head / (nheads / ngroups);
                let (dt, slope) = step(input, t, head);
                let a = f64::from(input.a[head]);
                let decay = (dt * a).exp();
                let (mut ddt, mut de) = (0.0, 0.0);
                for p in 0..headdim {
                    let channel = head * headdim + p;
                    let at = t * nheads * headdim + channel;
                    let x = f64::from(input.x.row(t)[channel]);
                    let mut dy = f64::from(dout[at]);
                    if let Some(z) = input.z {
                        let z = f64::from(z.row(t)[channel]);
                        let sigmoid = 1.0 / (1.0 + (-z).exp());
                        let y = y[(t - first) * nheads * headdim + channel];
                        out.dz[at] = dy * y * sigmoid * (1.0 + z * (1.0 - sigmoid));
                        dy *= z * sigmoid;
                    }
                    if let Some(d) = input.d {
                        let i = if d.len() == nheads { head } else { channel };
                        out.dx[at] += dy * f64::from(d[i]);
                        out.dd[i] += dy * x;
                    }
                    for n in 0..dstate {
                        let bc = (t * ngroups + group) * dstate + n;
                        let b = f64::from(input.b.row(t)[group * dstate + n]);
                        let c = f64::from(input.c.row(t)[group * dstate + n]);
                        let i = channel * dstate + n;
                        let (before, after) = (passed[t - first][i], passed[t - first + 1][i]);
                        let ds = &mut ds[i];
                        *ds += dy * c;
                        out.dc[bc] += dy * after;
                        out.db[bc] += dt * x * *ds;
                        out.dx[at] += dt * b * *ds;
                        ddt += x * b * *ds;
                        de += decay * *ds * before;
                        *ds *= decay;
                    }
                }
                out.da[head] += dt * de;
                out.ddt[t * nheads + head] = (ddt + a * de) * slope;
                out.ddt_bias[head] += out.ddt[t * nheads + head];
            }
        }
        first += len;
    }
    out
}
