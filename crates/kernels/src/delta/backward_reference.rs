//! The definition of the backward of the gated delta rule, in f64; all states are kept.

use super::{Delta, recurrence};
use crate::gradcheck::widen;

/// Every gradient, in the layout of what it is the gradient of.
#[derive(Debug, Default)]
pub(super) struct Gradients {
    pub(super) dq: Vec<f64>,
    pub(super) dk: Vec<f64>,
    pub(super) dv: Vec<f64>,
    pub(super) dg: Vec<f64>,
    pub(super) dbeta: Vec<f64>,
    pub(super) dstates: Vec<Vec<f64>>,
}

/// What [`delta_rule_backward`](super::delta_rule_backward) computes, by its definition.
pub(super) fn reference(
    input: &Delta<'_>,
    runs: &[usize],
    states: &[Vec<f32>],
    dout: &[f32],
    dstates: &[Vec<f32>],
) -> Gradients {
    let Delta { key_heads, value_heads, key_dim, value_dim, .. } = *input;
    let (tokens, decays) = (input.v.len(), input.decays());
    let scale = f64::from(input.scale);
    let mut out = Gradients {
        dq: vec![0.0; tokens * key_heads * key_dim],
        dk: vec![0.0; tokens * key_heads * key_dim],
        dv: vec![0.0; tokens * value_heads * value_dim],
        dg: vec![0.0; tokens * value_heads * decays],
        dbeta: vec![0.0; tokens * value_heads],
        dstates: dstates.iter().map(|x| widen(x)).collect(),
    };
    let mut first = 0;
    for (r, &len) in runs.iter().enumerate() {
        // The states before each token and after the last.
        let mut passed = vec![widen(&states[r])];
        for t in first..first + len {
            let token = Delta {
                q: input.q.slice(t, 1),
                k: input.k.slice(t, 1),
                v: input.v.slice(t, 1),
                g: input.g.slice(t, 1),
                beta: input.beta.slice(t, 1),
                ..*input
            };
            let mut state = [passed[t - first].clone()];
            recurrence(&token, &[1], &mut state);
            passed.extend(state);
        }
        for t in (first..first + len).rev() {
            for head in 0..value_heads {
                let key_head = head / (value_heads / key_heads);
                let at_key = (t * key_heads + key_head) * key_dim;
                let at_value = (t * value_heads + head) * value_dim;
                let [q, k] = [input.q, input.k].map(|rows| widen(input.of_key(rows, t, head)));
                let v = widen(input.of_value(input.v, t, head));
                let beta = f64::from(input.beta.row(t)[head]);
                let g = widen(&input.g.row(t)[head * decays..][..decays]);
                let decay = |i: usize| g[if decays == 1 { 0 } else { i }].exp();
                let at = |i: usize, j: usize| (head * key_dim + i) * value_dim + j;
                let (before, after) = (&passed[t - first], &passed[t - first + 1]);
                let ds = &mut out.dstates[r];
                for j in 0..value_dim {
                    let dout = f64::from(dout[at_value + j]);
                    let e = v[j]
                        - (0..key_dim).map(|i| decay(i) * before[at(i, j)] * k[i]).sum::<f64>();
                    let mut du = 0.0;
                    for i in 0..key_dim {
                        out.dq[at_key + i] += scale * after[at(i, j)] * dout;
                        ds[at(i, j)] += scale * q[i] * dout;
                        du += ds[at(i, j)] * k[i];
                    }
                    out.dbeta[t * value_heads + head] += du * e;
                    out.dv[at_value + j] = beta * du;
                    let dr = -beta * du;
                    for i in 0..key_dim {
                        let decayed = decay(i) * before[at(i, j)];
                        out.dk[at_key + i] += ds[at(i, j)] * beta * e + decayed * dr;
                        let of_decayed = ds[at(i, j)] + k[i] * dr;
                        let of_g = if decays == 1 { 0 } else { i };
                        out.dg[(t * value_heads + head) * decays + of_g] += of_decayed * decayed;
                        ds[at(i, j)] = decay(i) * of_decayed;
                    }
                }
            }
        }
        first += len;
    }
    out
}
