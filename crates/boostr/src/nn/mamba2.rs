//! The Mamba-2 mixer: one implementation for all families that have it.
//!
//! ```text
//! u ─ in_proj ─┬ z ──────────────────────────────────┐
//!              ├ x b c ─ conv1d, silu ─ x b c ┐      │
//!              └ dt ──────────────────────── ssd ── gated norm ─ out_proj ─ + residual
//! ```
//!
//! Rows of `in_proj` are `[z (H P) | x (H P) | b (G N) | c (G N) | dt (H)]`. Paper: *Transformers are
//! SSMs* (Dao and Gu, 2024), section 7. Letters as in [`SsdInput`].

use std::ops::Range;

use serde_json::{Map, Value};

use super::batch::Batch;
use super::linear::Linear;
use super::params::Params;
use super::part::{Part, module};
use super::slots::Slot;
use crate::backend::{Backend, Tensor};
use crate::error::Result;
use crate::ops::{
    self, Activation, ActivationOps, CausalConv, CausalConvOps, Decay, GatedNorm, LinearOps,
    NormOps, SsdInput, SsmKernelOps, split_last,
};

/// Sizes and options of a mixer.
#[derive(Debug, Clone, PartialEq)]
pub struct MixerConfig {
    /// Width of the residual stream.
    pub d_model: usize,
    /// H
    pub nheads: usize,
    /// P
    pub headdim: usize,
    /// G, divides H
    pub ngroups: usize,
    /// N
    pub d_state: usize,
    /// Taps of the convolution, at least 1.
    pub d_conv: usize,
    /// Whether in_proj has a bias.
    pub in_bias: bool,
    /// Whether out_proj has a bias.
    pub out_bias: bool,
    /// Whether conv1d has a bias.
    pub conv_bias: bool,
    /// Bounds of dt after softplus; `(0, infinity)` for all published Mamba-2 checkpoints.
    pub dt_limit: (f32, f32),
    /// Order of the gated norm; gate first by default.
    pub norm_before_gate: bool,
    /// Added to the gated norm's mean of squares.
    pub norm_eps: f32,
    /// Whether there is a gated norm; else y is gated alone.
    pub rms_norm: bool,
    /// Factor of the input.
    pub in_scale: f32,
    /// Factors of the sections z, x, b, c, dt of what in_proj gives.
    pub section_scales: [f32; 5],
}

impl MixerConfig {
    /// Names of the sections of in_proj's rows, in their order.
    pub const SECTIONS: [&str; 5] = ["z", "x", "b", "c", "dt"];

    /// A mixer of `nheads` heads of `headdim`, its options as the first published models have them.
    #[must_use]
    pub fn new(d_model: usize, nheads: usize, headdim: usize) -> Self {
        Self {
            d_model,
            nheads,
            headdim,
            ngroups: 1,
            d_state: 128,
            d_conv: 4,
            in_bias: false,
            out_bias: false,
            conv_bias: true,
            dt_limit: (0.0, f32::INFINITY),
            norm_before_gate: false,
            norm_eps: 1e-5,
            rms_norm: true,
            in_scale: 1.0,
            section_scales: [1.0; 5],
        }
    }

    /// Widths of the sections z, x, b, c, dt of in_proj's rows.
    #[must_use]
    pub fn sections(&self) -> [usize; 5] {
        let groups = self.ngroups * self.d_state;
        [self.d_inner(), self.d_inner(), groups, groups, self.nheads]
    }

    /// The rows of in_proj that each section is.
    #[must_use]
    pub fn section_rows(&self) -> [Range<usize>; 5] {
        let mut end = 0;
        self.sections().map(|width| {
            end += width;
            end - width..end
        })
    }

    /// H P
    #[must_use]
    pub fn d_inner(&self) -> usize {
        self.nheads * self.headdim
    }

    /// Channels of the convolution: x, b and c.
    #[must_use]
    pub fn conv_dim(&self) -> usize {
        self.d_inner() + 2 * self.ngroups * self.d_state
    }

    /// Rows of in_proj.
    #[must_use]
    pub fn d_in_proj(&self) -> usize {
        self.d_inner() + self.conv_dim() + self.nheads
    }
}

impl Part for MixerConfig {
    fn kind(&self) -> &'static str {
        "mamba2"
    }

    /// `conv`, the last inputs of the convolution, oldest first: `[d_conv - 1, conv_dim]`; and `ssm`
    /// `[H, P, N]`.
    fn slots(&self) -> Vec<Slot> {
        vec![
            Slot::fixed("conv", vec![self.d_conv - 1, self.conv_dim()]),
            Slot::fixed("ssm", vec![self.nheads, self.headdim, self.d_state]),
        ]
    }

    fn sizes(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("num_heads", self.nheads),
            ("head_dim", self.headdim),
            ("n_groups", self.ngroups),
            ("state_size", self.d_state),
            ("conv_kernel", self.d_conv),
        ]
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        if self.nheads.is_multiple_of(self.ngroups) {
            return Ok(());
        }
        Err(("n_groups", format!("{} groups do not divide {} heads", self.ngroups, self.nheads)))
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        vec![
            ("heads", format!("{} of {}", self.nheads, self.headdim)),
            ("groups", self.ngroups.to_string()),
            ("state width", self.d_state.to_string()),
            ("convolution", format!("{} taps", self.d_conv)),
        ]
    }

    fn to_json(&self) -> Map<String, Value> {
        let sizes = [
            ("d_inner", self.d_inner()),
            ("nheads", self.nheads),
            ("headdim", self.headdim),
            ("ngroups", self.ngroups),
            ("d_state", self.d_state),
            ("d_conv", self.d_conv),
        ];
        sizes.into_iter().map(|(name, size)| (name.to_owned(), size.into())).collect()
    }

    fn work_width(&self) -> usize {
        self.d_in_proj() + self.conv_dim() + 2 * self.d_inner()
    }
}

/// The layer's weights.
pub struct Mamba2Mixer<B: Backend> {
    config: MixerConfig,
    in_proj: Linear<B>,
    /// `[d_conv, conv_dim]`: taps first, unlike the checkpoint
    conv1d_weight: Tensor<B>,
    conv1d_bias: Option<Tensor<B>>,
    /// `[H]`
    dt_bias: Tensor<B>,
    /// `-exp(A_log)` `[H]`
    a: Decay<B::Runtime>,
    /// `[H]`
    d: Tensor<B>,
    /// `[H P]`; `None` where y is gated alone
    norm: Option<Tensor<B>>,
    out_proj: Linear<B>,
    /// Factors of the input `[d_model]` and of what in_proj gives `[d_in_proj]`, where they are not 1.
    scales: [Option<Tensor<B>>; 2],
}

impl<B: Backend> Mamba2Mixer<B> {
    /// Loads the mixer; A_log, D, dt_bias and the convolution become f32 whatever their type.
    ///
    /// # Errors
    ///
    /// When a parameter is missing, is no float, or A_log is not finite.
    pub fn load(config: &MixerConfig, params: &Params<'_, B>) -> Result<Self> {
        let (heads, d_inner) = (config.nheads, config.d_inner());
        let (channels, taps) = (config.conv_dim(), config.d_conv);
        let conv = params.tensor("conv1d.weight", &[channels, 1, taps])?;
        let conv = params.computed(|client| client.transpose(&conv.reshape(&[channels, taps])?))?;
        let sections: Vec<(usize, f32)> =
            config.sections().into_iter().zip(config.section_scales).collect();
        let conv_bias = || params.tensor("conv1d.bias", &[channels]);
        let norm = || params.tensor("norm.weight", &[d_inner]);
        let [in_proj, out_proj] = [[config.d_in_proj(), config.d_model], [config.d_model, d_inner]];
        Ok(Self {
            scales: [
                params.factors(&[(config.d_model, config.in_scale)])?,
                params.factors(&sections)?,
            ],
            in_proj: Linear::load(&params.under("in_proj"), in_proj, config.in_bias)?,
            conv1d_weight: conv,
            conv1d_bias: config.conv_bias.then(conv_bias).transpose()?,
            dt_bias: params.tensor("dt_bias", &[heads])?,
            a: decay_rates(params, heads)?,
            d: params.tensor("D", &[heads])?,
            norm: config.rms_norm.then(norm).transpose()?,
            out_proj: Linear::load(&params.under("out_proj"), out_proj, config.out_bias)?,
            config: config.clone(),
        })
    }

    /// `residual + factor * mixer(u)` for the tokens `[T, d_model]` of all runs.
    ///
    /// # Errors
    ///
    /// When shapes disagree or memory is short.
    pub fn forward_onto(
        &self,
        client: &B::Client,
        u: &Tensor<B>,
        (residual, factor): (Tensor<B>, f32),
        batch: &mut Batch<B>,
    ) -> Result<Tensor<B>> {
        let config = &self.config;
        let (d_inner, heads) = (config.d_inner(), [config.nheads, config.headdim]);
        let groups = [config.ngroups, config.d_state];
        let width = config.ngroups * config.d_state;

        let [in_scale, section_scales] = &self.scales;
        let zxbcdt = match in_scale {
            None => self.in_proj.forward(client, u)?, // [T, d_in_proj]
            Some(factors) => self.in_proj.forward(client, &client.scale_columns(u, factors)?)?,
        };
        let zxbcdt = match section_scales {
            None => zxbcdt,
            Some(factors) => client.scale_columns(&zxbcdt, factors)?,
        };
        let z = zxbcdt.narrow(1, 0, d_inner)?;
        let xbc = zxbcdt.narrow(1, d_inner, config.conv_dim())?;
        let dt = zxbcdt.narrow(1, d_inner + config.conv_dim(), config.nheads)?;

        let conv =
            CausalConv { weight: &self.conv1d_weight, bias: self.conv1d_bias.as_ref(), silu: true };
        let (runs, mut windows) = batch.tensors("conv")?;
        let xbc = client.causal_conv1d(&xbc, &conv, runs, &mut windows)?; // [T, conv_dim]

        let gate = match self.norm {
            None => Some(split_last(&z, &heads)?), // [T, H, P]
            Some(_) => None,
        };
        let input = SsdInput {
            x: &split_last(&xbc.narrow(1, 0, d_inner)?, &heads)?, // [T, H, P]
            b: &split_last(&xbc.narrow(1, d_inner, width)?, &groups)?, // [T, G, N]
            c: &split_last(&xbc.narrow(1, d_inner + width, width)?, &groups)?,
            dt: &dt,
            a: &self.a,
            dt_bias: Some(&self.dt_bias),
            d: Some(&self.d),
            z: gate.as_ref(),
            dt_softplus: true,
            dt_limit: config.dt_limit,
        };
        let (runs, mut ssm) = batch.tensors("ssm")?;
        let y = client.ssd(&input, runs, &mut ssm)?; // [T, H, P]
        let y = y.reshape(&[y.shape()[0], d_inner])?;

        let y = match &self.norm {
            None => y,
            Some(weight) => {
                let norm = GatedNorm {
                    weight,
                    ngroups: config.ngroups,
                    eps: config.norm_eps,
                    norm_before_gate: config.norm_before_gate,
                    activation: Activation::Silu,
                };
                client.gated_rmsnorm(&y, &z, &norm)?
            }
        };
        self.out_proj.forward_onto(client, &y, residual, factor)
    }

    /// Bytes that a pass over the layer's matrices reads.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.in_proj.weight().size_in_bytes() + self.out_proj.weight().size_in_bytes()
    }
}

module!(Mamba2Mixer of MixerConfig, |self, client, u, onto, batch| self.forward_onto(client, u, onto, batch));

/// A `[H]`, finite and not above 0: GGUF stores it as it is, other files as `A_log`.
fn decay_rates<B: Backend>(params: &Params<'_, B>, heads: usize) -> Result<Decay<B::Runtime>> {
    let name = if params.has("A") { "A" } else { "A_log" };
    let parameter = params.tensor(name, &[heads])?;
    let rates = params.computed(|client| {
        let a = match name {
            "A" => parameter.clone(),
            _ => client.decay_rates(&parameter)?,
        };
        let [stored, rates] = [ops::to_vec(&parameter)?, ops::to_vec(&a)?];
        let is_bad = |i: usize| !stored[i].is_finite() || !rates[i].is_finite() || rates[i] > 0.0;
        match (0..rates.len()).find(|&i| is_bad(i)) {
            None => Ok(a),
            Some(head) => {
                let hint = if name == "A" { " (expected -exp(A_log), not above 0)" } else { "" };
                let reason = format!("gives no decay rate: head {head} has {}{hint}", stored[head]);
                Err(params.error(name, &reason))
            }
        }
    })?;
    Decay::new(rates)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::backend::{Cpu, cpu};
    use crate::checkpoint::{Bytes, Checkpoint, Dtype, TensorEntry};
    use crate::nn::{Slots, Tensors, synthetic};
    use crate::ops::KvType;

    const WIDTH: usize = 8;

    /// Two groups, so that b and c have bands of more than one group.
    fn config(rms_norm: bool, bias: bool) -> MixerConfig {
        MixerConfig {
            ngroups: 2,
            d_state: 3,
            in_bias: bias,
            rms_norm,
            ..MixerConfig::new(WIDTH, 4, 5)
        }
    }

    fn tensors(config: &MixerConfig) -> Tensors {
        let client = cpu();
        let load =
            |params: &Params<'_, Cpu>| Mamba2Mixer::load(config, &params.under("m")).map(drop);
        Params::list(&client, load).unwrap()
    }

    /// What the mixer gives for five tokens, added to nothing.
    fn forward(config: &MixerConfig, checkpoint: &Checkpoint) -> Vec<f32> {
        let client = cpu();
        let params = Params::<Cpu>::new(checkpoint, &client);
        let mixer = Mamba2Mixer::load(config, &params.under("m")).unwrap();
        let input: Vec<f32> = (0..5 * WIDTH).map(|i| (i as f32 * 0.7).sin()).collect();
        let u = ops::tensor(&client, &input, &[5, WIDTH]).unwrap();
        let zeros = ops::zeros(&client, &[5, WIDTH]).unwrap();
        let mut batch = Batch::new(&[5], &[0], u.clone());
        batch.slots_mut()[0] = Slots::new(config.slots().into(), KvType::F32, &client).unwrap();
        let y = mixer.forward_onto(&client, &u, (zeros, 1.0), &mut batch).unwrap();
        ops::to_vec(&y).unwrap()
    }

    #[test]
    fn sections_are_all_rows_of_in_proj_in_its_order() {
        let config = config(true, false);
        assert_eq!(config.sections(), [20, 20, 6, 6, 4]);
        assert_eq!(config.sections().iter().sum::<usize>(), config.d_in_proj());
        assert_eq!(config.section_rows(), [0..20, 20..40, 40..46, 46..52, 52..56]);
        assert_eq!(config.conv_dim(), 32);
    }

    #[test]
    fn each_projection_has_a_bias_or_not() {
        for (in_bias, out_bias) in [(false, false), (false, true), (true, false), (true, true)] {
            let tensors = tensors(&MixerConfig { in_bias, out_bias, ..config(true, false) });
            assert_eq!(tensors.get("m.in_proj.bias"), in_bias.then_some(&[56][..]));
            assert_eq!(tensors.get("m.out_proj.bias"), out_bias.then_some(&[WIDTH][..]));
        }
    }

    #[test]
    fn factors_of_sections_are_those_of_the_rows_and_biases_of_in_proj() {
        for (rms_norm, bias) in [(false, false), (true, true), (false, true)] {
            let plain = config(rms_norm, bias);
            let scales = [0.5, 1.5, -0.75, 1.25, 0.25];
            let scaled = MixerConfig { in_scale: 1.75, section_scales: scales, ..plain.clone() };
            let checkpoint = synthetic::checkpoint(&tensors(&plain), Dtype::F32).unwrap();
            let factors: Vec<f32> =
                plain.sections().iter().zip(scales).flat_map(|(&n, x)| vec![x; n]).collect();
            let folded: BTreeMap<String, TensorEntry> = checkpoint
                .iter()
                .map(|(name, entry)| {
                    let mut values = entry.to_f32().unwrap();
                    let (width, input) = match name {
                        "m.in_proj.weight" => (WIDTH, 1.75),
                        "m.in_proj.bias" => (1, 1.0),
                        _ => return (name.to_owned(), entry.clone()),
                    };
                    for (values, factor) in values.chunks_exact_mut(width).zip(&factors) {
                        for x in values {
                            *x *= factor * input;
                        }
                    }
                    let data = Bytes::new(Dtype::F32.encode(&values).unwrap());
                    (name.to_owned(), TensorEntry { data, ..entry.clone() })
                })
                .collect();
            let folded = forward(&plain, &Checkpoint::from_entries("folded", folded));
            let got = forward(&scaled, &checkpoint);
            let unscaled = forward(&plain, &checkpoint);
            let far = |a: &[f32], b: &[f32]| {
                a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
            };
            // Rounding of products in another order, on values of about 1.
            assert!(far(&got, &folded) < 1e-5, "{rms_norm} {bias}: {}", far(&got, &folded));
            assert!(far(&got, &unscaled) > 1e-2, "{rms_norm} {bias}");
        }
    }
}
