//! The gated delta mixer: one implementation for all families that have it.
//!
//! ```text
//! u ─┬ in_proj_qkv ─ conv1d, silu ─ q k v ┐      q and k normalised by head
//!    ├ in_proj_a ─ decay ───────────────  gated_delta ─ norm by head, * act(z) ─ out_proj ─ + residual
//!    ├ in_proj_b ─ sigmoid ───────────────┘               │
//!    └ in_proj_z ─────────────────────────────────────────┘
//! ```
//!
//! In Kimi Delta Attention each channel of a key decays by itself (`kda`), and decay and gate are pairs of projections,
//! the first no wider than a head: `f_a_proj` and `f_b_proj` for `in_proj_a`, `g_a_proj` and `g_b_proj` for `in_proj_z`
//! (*Kimi Linear*, Moonshot AI, 2025, arXiv 2510.26692).
//!
//! Rows of `in_proj_qkv` are `[q (Hk Dk) | k (Hk Dk) | v (Hv Dv)]`. Value head h uses key head h / (Hv / Hk). Paper:
//! *Gated Delta Networks* (Yang, Kautz and Hatamizadeh, 2024, arXiv 2412.06464). Letters as in [`DeltaInput`].

use serde_json::{Map, Value};

use super::batch::Batch;
use super::joined::Joined;
use super::linear::{Adapter, Linear};
use super::params::Params;
use super::part::{Part, module};
use super::slots::Slot;
use crate::backend::{Backend, Tensor};
use crate::error::{Error, Result};
use crate::ops::{
    self, Activation, ActivationOps, CausalConv, CausalConvOps, DecayGate, DeltaInput, DeltaOps,
    GatedNorm, LinearOps, NormOps, split_last,
};

/// Added to the sum of squares of a query and of a key, whatever a model's norms add.
const QK_EPS: f32 = 1e-6;

/// Sizes and options of a mixer.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaConfig {
    /// Width of the residual stream.
    pub d_model: usize,
    /// Hk, divides Hv
    pub nheads_key: usize,
    /// Hv
    pub nheads: usize,
    /// Dk
    pub d_key: usize,
    /// Dv
    pub d_value: usize,
    /// Taps of the convolution, at least 1.
    pub d_conv: usize,
    /// Upper bound of beta: 1, or 2 where what the state has for a key may change its sign.
    pub beta_scale: f32,
    /// Added to the mean of squares of the gated norm.
    pub norm_eps: f32,
    /// What the gate goes through.
    pub gate: Activation,
    /// Whether queries, keys and values have projections and convolutions of their own: `q_proj`, `q_conv1d` and so on
    /// in place of `in_proj_qkv` and `conv1d`.
    pub separate: bool,
    /// Whether each channel of a key decays by itself, as in Kimi Delta Attention; else each head.
    pub by_channel: bool,
}

impl DeltaConfig {
    /// A mixer of `nheads_key` heads of width `d_key` and `nheads` of width `d_value`, its options as most models have
    /// them.
    #[must_use]
    pub fn new(
        d_model: usize,
        [nheads_key, nheads]: [usize; 2],
        [d_key, d_value]: [usize; 2],
    ) -> Self {
        Self {
            d_model,
            nheads_key,
            nheads,
            d_key,
            d_value,
            d_conv: 4,
            beta_scale: 1.0,
            norm_eps: 1e-6,
            gate: Activation::Silu,
            separate: false,
            by_channel: false,
        }
    }

    /// A mixer of Kimi Delta Attention: `nheads` heads whose keys and values are `width` wide.
    #[must_use]
    pub fn by_channel(d_model: usize, nheads: usize, width: usize) -> Self {
        Self {
            gate: Activation::Sigmoid,
            separate: true,
            by_channel: true,
            ..Self::new(d_model, [nheads; 2], [width; 2])
        }
    }

    /// Decays of a token: one for each head, or one for each channel of its key.
    #[must_use]
    pub fn decays(&self) -> usize {
        self.nheads * if self.by_channel { self.d_key } else { 1 }
    }

    /// Hk Dk
    #[must_use]
    pub fn key_width(&self) -> usize {
        self.nheads_key * self.d_key
    }

    /// Hv Dv
    #[must_use]
    pub fn value_width(&self) -> usize {
        self.nheads * self.d_value
    }

    /// Channels of the convolution: queries, keys and values.
    #[must_use]
    pub fn conv_dim(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// The projections that go through the convolution, and their outputs.
    fn qkv(&self) -> Vec<(&'static str, usize)> {
        if self.separate {
            let (key, value) = (self.key_width(), self.value_width());
            vec![("q_proj", key), ("k_proj", key), ("v_proj", value)]
        } else {
            vec![("in_proj_qkv", self.conv_dim())]
        }
    }

    /// The convolutions, and their channels.
    fn convs(&self) -> Vec<(&'static str, usize)> {
        if self.separate {
            let (key, value) = (self.key_width(), self.value_width());
            vec![("q_conv1d", key), ("k_conv1d", key), ("v_conv1d", value)]
        } else {
            vec![("conv1d", self.conv_dim())]
        }
    }
}

impl Part for DeltaConfig {
    fn kind(&self) -> &'static str {
        "gated delta"
    }

    /// `conv`, the last inputs of the convolution, oldest first: `[d_conv - 1, conv_dim]`; and `delta` `[Hv, Dk, Dv]`.
    fn slots(&self) -> Vec<Slot> {
        vec![
            Slot::fixed("conv", vec![self.d_conv - 1, self.conv_dim()]),
            Slot::fixed("delta", vec![self.nheads, self.d_key, self.d_value]),
        ]
    }

    fn sizes(&self) -> Vec<(&'static str, usize)> {
        vec![
            ("linear_num_key_heads", self.nheads_key),
            ("linear_num_value_heads", self.nheads),
            ("linear_key_head_dim", self.d_key),
            ("linear_value_head_dim", self.d_value),
            ("linear_conv_kernel_dim", self.d_conv),
        ]
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        if self.nheads.is_multiple_of(self.nheads_key) {
            return Ok(());
        }
        let reason =
            format!("{} value heads are no multiple of {} key heads", self.nheads, self.nheads_key);
        Err(("linear_num_value_heads", reason))
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        vec![
            ("heads", format!("{} of {}", self.nheads, self.d_value)),
            ("key heads", format!("{} of {}", self.nheads_key, self.d_key)),
            ("convolution", format!("{} taps", self.d_conv)),
        ]
    }

    fn to_json(&self) -> Map<String, Value> {
        let sizes = [
            ("nheads_key", self.nheads_key),
            ("nheads", self.nheads),
            ("d_key", self.d_key),
            ("d_value", self.d_value),
            ("d_conv", self.d_conv),
        ];
        sizes.into_iter().map(|(name, size)| (name.to_owned(), size.into())).collect()
    }

    fn work_width(&self) -> usize {
        let gates = 2 * self.decays() + 2 * self.nheads;
        2 * self.conv_dim() + 2 * self.key_width() + 3 * self.value_width() + gates
    }
}

/// The layer's weights.
pub struct GatedDelta<B: Backend> {
    config: DeltaConfig,
    /// Of queries, keys and values.
    qkv_proj: Joined<B>,
    gates: Gates<B>,
    /// `[d_conv, conv_dim]`: taps first, unlike the checkpoint
    conv1d_weight: Tensor<B>,
    /// `[Hv]`
    a_log: Tensor<B>,
    /// `[Hv]`, or `[Hv Dk]` where each channel decays by itself
    dt_bias: Tensor<B>,
    /// `[Hv]`, all `beta_scale`; `None` where that is 1.
    beta_scale: Option<Tensor<B>>,
    /// `[Dv]`, which all heads share
    norm: Tensor<B>,
    out_proj: Linear<B>,
    /// The value head of each head of out_proj's columns, where those have another order.
    tiles: Option<Tiles<B>>,
}

/// Projections of the decay, of beta and of the gate.
struct Gates<B: Backend> {
    /// in_proj_a and in_proj_b; or f_a_proj, in_proj_b and g_a_proj
    first: Joined<B>,
    /// f_b_proj, where each channel decays by itself
    decay: Option<Joined<B>>,
    /// in_proj_z or g_b_proj
    gate: Joined<B>,
}

/// What the rule reads of the tokens of all runs, and the gate of its output.
struct Inputs<B: Backend> {
    /// `[T, Hk, Dk]`, normalised
    q: Tensor<B>,
    /// `[T, Hk, Dk]`, normalised
    k: Tensor<B>,
    /// `[T, Hv, Dv]`
    v: Tensor<B>,
    /// `[T, Hv]`, or `[T, Hv, Dk]`
    g: Tensor<B>,
    /// `[T, Hv]`
    beta: Tensor<B>,
    /// `[T, Hv Dv]`
    z: Tensor<B>,
}

/// What stands where the columns of out_proj are in the order of the file.
struct Tiles<B: Backend> {
    /// The head of each place in a row.
    heads: Vec<usize>,
    /// The adapter of out_proj, whose columns are in the model's order.
    adapter: Option<Adapter<B>>,
}

impl<B: Backend> GatedDelta<B> {
    /// Loads the mixer; A_log, dt_bias, the norm and the convolution become f32 whatever their type.
    ///
    /// # Errors
    ///
    /// When a parameter is missing, is no float, or A_log is not finite.
    pub fn load(config: &DeltaConfig, params: &Params<'_, B>) -> Result<Self> {
        let (heads, width, d_model) = (config.nheads, config.value_width(), config.d_model);
        let taps = config.convs().into_iter().map(|(name, channels)| {
            let shape = [channels, 1, config.d_conv];
            Ok((params.under(name).tensor("weight", &shape)?, channels))
        });
        let taps: Vec<(Tensor<B>, usize)> = taps.collect::<Result<_>>()?;
        let conv1d_weight = params.computed(|client| {
            let rows =
                taps.iter().map(|(taps, channels)| taps.reshape(&[*channels, config.d_conv]));
            let rows: Vec<Tensor<B>> = rows.collect::<Result<_, _>>()?;
            match &rows[..] {
                [all] => client.transpose(all),
                several => client.transpose(&client.concat_rows(several)?),
            }
        })?;
        // Columns of GGUF whose heads share quantized blocks: the first head of each key head, then the second of each.
        let is_tiled = params.has("out_proj_tiled.weight");
        let out_proj = params.under(if is_tiled { "out_proj_tiled" } else { "out_proj" });
        let copies = heads / config.nheads_key.max(1);
        let head = |i| i % config.nheads_key * copies + i / config.nheads_key;
        let tiles = || -> Result<_> {
            let adapter = Adapter::beside(&params.under("out_proj"), [d_model, width])?;
            Ok(Tiles { heads: (0..heads).map(head).collect(), adapter })
        };
        Ok(Self {
            qkv_proj: Joined::load(params, &config.qkv(), d_model, false)?,
            gates: Gates::load(config, params)?,
            conv1d_weight,
            a_log: a_log(params, heads)?,
            dt_bias: params.tensor("dt_bias", &[config.decays()])?,
            beta_scale: params.factors(&[(heads, config.beta_scale)])?,
            norm: params.tensor("norm.weight", &[config.d_value])?,
            out_proj: Linear::load(&out_proj, [d_model, width], false)?,
            tiles: is_tiled.then(tiles).transpose()?,
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
        let inputs = self.inputs(client, u, batch)?;
        let o = self.rule(client, &inputs, batch)?;
        let norm = GatedNorm {
            weight: &self.norm,
            ngroups: self.config.nheads,
            eps: self.config.norm_eps,
            norm_before_gate: true,
            activation: self.config.gate,
        };
        let y = client.gated_rmsnorm(&o, &inputs.z, &norm)?;
        let Some(Tiles { heads, adapter }) = &self.tiles else {
            return self.out_proj.forward_onto(client, &y, residual, factor);
        };
        let (tokens, nheads) = (y.shape()[0], heads.len());
        let of_token = |t: usize| heads.iter().map(move |head| t * nheads + head);
        let rows: Vec<usize> = (0..tokens).flat_map(of_token).collect();
        let by_head = y.reshape(&[tokens * nheads, self.config.d_value])?;
        let moved = client.select_rows(&by_head, &rows)?.reshape(y.shape())?;
        let sum = self.out_proj.forward_onto(client, &moved, residual, factor)?;
        match adapter {
            None => Ok(sum),
            Some(adapter) => adapter.add_to(client, sum, &y, factor),
        }
    }

    /// Everything before the rule.
    fn inputs(&self, client: &B::Client, u: &Tensor<B>, batch: &mut Batch<B>) -> Result<Inputs<B>> {
        let config = &self.config;
        let (qkv, [a, b, z]) = self.project(client, u)?;
        let conv = CausalConv { weight: &self.conv1d_weight, bias: None, silu: true };
        let (runs, mut windows) = batch.tensors("conv")?;
        let qkv = client.causal_conv1d(&qkv, &conv, runs, &mut windows)?;

        let (width, heads) = (config.key_width(), [config.nheads_key, config.d_key]);
        let qk = client.l2norm(&qkv.narrow(1, 0, 2 * width)?, config.d_key, QK_EPS)?;
        let v = qkv.narrow(1, 2 * width, config.value_width())?;

        let decay = DecayGate { a: &a, a_log: &self.a_log, dt_bias: &self.dt_bias };
        let g = client.decay_gate(&decay)?;
        let beta = client.activate(Activation::Sigmoid, &b)?;
        Ok(Inputs {
            q: split_last(&qk.narrow(1, 0, width)?, &heads)?,
            k: split_last(&qk.narrow(1, width, width)?, &heads)?,
            v: split_last(&v, &[config.nheads, config.d_value])?,
            g: if config.by_channel { split_last(&g, &[config.nheads, config.d_key])? } else { g },
            beta: match &self.beta_scale {
                None => beta,
                Some(factors) => client.scale_columns(&beta, factors)?,
            },
            z,
        })
    }

    /// What enters the convolution, `[T, conv_dim]`; and the decay, beta and the gate before their functions.
    fn project(&self, client: &B::Client, u: &Tensor<B>) -> Result<(Tensor<B>, [Tensor<B>; 3])> {
        let Gates { first, decay, gate } = &self.gates;
        let mut layers = [self.qkv_proj.of(u), first.of(u)].concat();
        if decay.is_none() {
            layers.extend(gate.of(u));
        }
        let mut outputs = Linear::forward_all(client, &layers)?.into_iter();
        let qkv = self.qkv_proj.whole(client, &mut outputs)?;
        let Some(decay) = decay else {
            let ([a, b], [z]) = (first.split(&mut outputs)?, gate.split(&mut outputs)?);
            return Ok((qkv, [a, b, z]));
        };
        let [f, b, g] = first.split(&mut outputs)?;
        let layers = [decay.of(&f), gate.of(&g)].concat();
        let mut outputs = Linear::forward_all(client, &layers)?.into_iter();
        let ([a], [z]) = (decay.split(&mut outputs)?, gate.split(&mut outputs)?);
        Ok((qkv, [a, b, z]))
    }

    /// What the queries read, `[T, Hv Dv]`.
    fn rule(
        &self,
        client: &B::Client,
        inputs: &Inputs<B>,
        batch: &mut Batch<B>,
    ) -> Result<Tensor<B>> {
        let Inputs { q, k, v, g, beta, .. } = inputs;
        let scale = (self.config.d_key as f32).sqrt().recip();
        let (runs, mut states) = batch.tensors("delta")?;
        let input = DeltaInput { q, k, v, g, beta, scale };
        let o = if self.config.by_channel {
            client.kda(&input, runs, &mut states)?
        } else {
            client.gated_delta(&input, runs, &mut states)?
        }; // [T, Hv, Dv]
        Ok(o.reshape(&[o.shape()[0], self.config.value_width()])?)
    }

    /// Bytes that a pass over the layer's matrices reads.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        let out = self.out_proj.weight().size_in_bytes();
        self.qkv_proj.weight_bytes() + self.gates.weight_bytes() + out
    }
}

impl<B: Backend> Gates<B> {
    fn load(config: &DeltaConfig, params: &Params<'_, B>) -> Result<Self> {
        let &DeltaConfig { d_model, nheads, d_key, d_value, .. } = config;
        let joined = |layers: &[_], width| Joined::load(params, layers, width, false);
        let width = config.value_width();
        // What decays is multiplied token after token.
        let (first, gate) = if config.by_channel {
            let first = [("f_a_proj", d_key), ("in_proj_b", nheads), ("g_a_proj", d_value)];
            (first.to_vec(), joined(&[("g_b_proj", width)], d_value)?)
        } else {
            let first = [("in_proj_a", nheads), ("in_proj_b", nheads)];
            (first.to_vec(), joined(&[("in_proj_z", width)], d_model)?)
        };
        let decay = || Ok::<_, Error>(joined(&[("f_b_proj", config.decays())], d_key)?.precise());
        Ok(Self {
            first: Joined::load(params, &first, d_model, false)?.precise(),
            decay: config.by_channel.then(decay).transpose()?,
            gate,
        })
    }

    fn weight_bytes(&self) -> usize {
        let decay = self.decay.as_ref().map_or(0, Joined::weight_bytes);
        self.first.weight_bytes() + decay + self.gate.weight_bytes()
    }
}

module!(GatedDelta of DeltaConfig, |self, client, u, onto, batch| self.forward_onto(client, u, onto, batch));

/// Logarithms of the heads' rates `[H]`, of finite rates, 0 or more: GGUF stores `A`, minus the rates, other files `A_log`.
fn a_log<B: Backend>(params: &Params<'_, B>, heads: usize) -> Result<Tensor<B>> {
    let name = if params.has("A") { "A" } else { "A_log" };
    let parameter = params.tensor(name, &[heads])?;
    params.computed(|client| {
        let stored = ops::to_vec(&parameter)?;
        let is_good = |&x: &f32| match name {
            "A" => x.is_finite() && x <= 0.0,
            _ => x.is_finite() && x.exp().is_finite(),
        };
        if let Some(head) = stored.iter().position(|x| !is_good(x)) {
            let hint = if name == "A" { " (expected -exp(A_log), not above 0)" } else { "" };
            let reason = format!("gives no decay rate: head {head} has {}{hint}", stored[head]);
            return Err(params.error(name, &reason));
        }
        if name == "A_log" {
            return Ok(parameter.clone());
        }
        let logs: Vec<f32> = stored.iter().map(|&a| ops::log_of_rate(a)).collect();
        ops::tensor(client, &logs, &[heads])
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::linear::RmsNorm;
    use super::*;
    use crate::backend::{Cpu, cpu};
    use crate::checkpoint::{Bytes, Checkpoint, Dtype, TensorEntry};
    use crate::nn::Slots;
    use crate::ops::KvType;

    /// The first mixer of a model, what the original computes there, and the norm before it.
    struct First {
        mixer: GatedDelta<Cpu>,
        norm: RmsNorm<Cpu>,
        golden: Checkpoint,
    }

    impl First {
        fn open(name: &str, dtype: Dtype) -> Self {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
            let open = |file| Checkpoint::open(&folder.join(name).join(file), false).unwrap();
            let is_qwen = name == "qwen3_5-tiny";
            let (config, norm, eps) = match name {
                "qwen3_5-tiny" => (DeltaConfig::new(32, [2, 6], [16, 16]), "input_layernorm", 1e-6),
                "kimi-linear-tiny" => (DeltaConfig::by_channel(32, 2, 16), "input_layernorm", 1e-5),
                _ => {
                    let config = DeltaConfig::new(32, [4, 4], [8, 16]);
                    let config =
                        DeltaConfig { beta_scale: 2.0, norm_eps: 1e-5, separate: true, ..config };
                    (config, "attention_layer_norm", 1e-6)
                }
            };
            let own_name = |name: &str| {
                const NAMES: [(&str, &str); 7] = [
                    ("layers.0.self_attn.", "layers.0.linear_attn."),
                    ("linear_attn.a_proj", "linear_attn.in_proj_a"),
                    ("linear_attn.b_proj", "linear_attn.in_proj_b"),
                    ("linear_attn.g_proj", "linear_attn.in_proj_z"),
                    ("linear_attn.o_norm", "linear_attn.norm"),
                    ("linear_attn.o_proj", "linear_attn.out_proj"),
                    ("model.language_model.", "model."),
                ];
                let rename = |name: String, (from, to): &(&str, &str)| name.replace(from, to);
                NAMES.iter().fold(name.to_owned(), rename)
            };
            let mut file = open("model.safetensors");
            file.retain(|name| name.contains("layers.0."));
            let rounded = file.iter().map(|(name, entry)| {
                let data = Bytes::new(dtype.encode(&entry.to_f32().unwrap()).unwrap());
                (own_name(name), TensorEntry { dtype, data, ..entry.clone() })
            });
            let mut weights = Checkpoint::from_entries("memory", rounded.collect());
            weights.reshape("model.layers.0.linear_attn.A_log", &[config.nheads]).unwrap();
            let client = cpu();
            let params = Params::<Cpu>::new(&weights, &client).under("model.layers.0");
            let norm = RmsNorm::load(&params.under(norm), config.d_model, eps, is_qwen);
            Self {
                mixer: GatedDelta::load(&config, &params.under("linear_attn")).unwrap(),
                norm: norm.unwrap(),
                golden: open("golden.safetensors"),
            }
        }

        fn batch(&self, rows: &Tensor<Cpu>) -> Batch<Cpu> {
            let mut batch = Batch::new(&[rows.shape()[0]], &[0], rows.clone());
            let slots = Slots::new(self.mixer.config.slots().into(), KvType::F32, &cpu());
            batch.slots_mut()[0] = slots.unwrap();
            batch
        }

        fn golden(&self, name: &str) -> Vec<f32> {
            self.golden.get(name).unwrap_or_else(|| panic!("{name}")).to_f32().unwrap()
        }
    }

    #[track_caller]
    fn close(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
        assert_eq!(got.len(), want.len(), "{what}");
        let bound = want.iter().fold(1f32, |most, x| most.max(x.abs())) * tolerance;
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            assert!((got - want).abs() <= bound, "{what}, element {i}: {got} is not {want}");
        }
    }

    /// The last has a decay for each channel.
    const MODELS: [&str; 3] = ["qwen3_5-tiny", "olmo-hybrid-tiny", "kimi-linear-tiny"];

    #[test]
    fn stages_of_the_first_mixer_are_those_of_the_original() {
        for name in MODELS {
            let first = First::open(name, Dtype::F32);
            let client = cpu();
            let width = first.mixer.config.d_model;
            let hidden = first.golden("hidden.0");
            let rows = ops::tensor(&client, &hidden, &[hidden.len() / width, width]).unwrap();
            let u = first.norm.forward(&client, &rows).unwrap();
            let mut batch = first.batch(&rows);
            let conv_in = first.mixer.project(&client, &u).unwrap().0;
            let inputs = first.mixer.inputs(&client, &u, &mut batch).unwrap();
            let o = first.mixer.rule(&client, &inputs, &mut batch).unwrap();
            let Inputs { q, k, v, g, beta, z } = &inputs;
            let stages = [("conv_in", &conv_in), ("q", q), ("k", k), ("v", v), ("g", g)];
            for (stage, got) in stages.into_iter().chain([("beta", beta), ("z", z), ("o", &o)]) {
                let want = first.golden(&format!("stage.0.{stage}"));
                close(&format!("{name}: {stage}"), &ops::to_vec(got).unwrap(), &want, 2e-5);
            }
            let y =
                first.mixer.forward_onto(&client, &u, (rows.clone(), 1.0), &mut first.batch(&rows));
            assert_eq!(y.unwrap().shape(), rows.shape());
        }
    }

    /// The rule in f64, from the mixer's own inputs: the state after all tokens.
    fn by_definition(config: &DeltaConfig, inputs: &Inputs<Cpu>) -> Vec<f32> {
        let of = |x: &Tensor<Cpu>| -> Vec<f64> {
            ops::to_vec(x).unwrap().into_iter().map(f64::from).collect()
        };
        let [k, v, g, beta] = [&inputs.k, &inputs.v, &inputs.g, &inputs.beta].map(of);
        let (dk, dv, heads) = (config.d_key, config.d_value, config.nheads);
        let copies = heads / config.nheads_key;
        let mut state = vec![0f64; heads * dk * dv];
        // Decays of a head: one, or one for each channel of the key.
        let decays = config.decays() / heads;
        for t in 0..beta.len() / heads {
            for head in 0..heads {
                let key = &k[(t * config.nheads_key + head / copies) * dk..][..dk];
                let value = &v[(t * heads + head) * dv..][..dv];
                let state = &mut state[head * dk * dv..][..dk * dv];
                let g = &g[(t * heads + head) * decays..][..decays];
                for (i, row) in state.chunks_exact_mut(dv).enumerate() {
                    for s in row {
                        *s *= g[i % decays].exp();
                    }
                }
                for j in 0..dv {
                    let known: f64 = (0..dk).map(|i| state[i * dv + j] * key[i]).sum();
                    let new = beta[t * heads + head] * (value[j] - known);
                    (0..dk).for_each(|i| state[i * dv + j] += key[i] * new);
                }
            }
        }
        state.iter().map(|&s| s as f32).collect()
    }

    #[test]
    fn d_8_16_states_of_4096_tokens_one_by_one_from_16_bit_weights_are_those_in_f64() {
        const TOKENS: usize = 4096;
        for (name, dtype) in MODELS.into_iter().zip([Dtype::BF16, Dtype::F16, Dtype::BF16]) {
            let first = First::open(name, dtype);
            let client = cpu();
            let width = first.mixer.config.d_model;
            let mut seed = 7u32;
            let rows: Vec<f32> = (0..TOKENS * width)
                .map(|_| {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
                })
                .collect();
            let rows = ops::tensor(&client, &rows, &[TOKENS, width]).unwrap();
            let u = first.norm.forward(&client, &rows).unwrap();
            let whole = first.mixer.inputs(&client, &u, &mut first.batch(&rows)).unwrap();
            let want = by_definition(&first.mixer.config, &whole);

            let mut batch = first.batch(&rows.narrow(0, 0, 1).unwrap());
            for t in 0..TOKENS {
                let u = u.narrow(0, t, 1).unwrap();
                let inputs = first.mixer.inputs(&client, &u, &mut batch).unwrap();
                first.mixer.rule(&client, &inputs, &mut batch).unwrap();
            }
            let (_, states) = batch.tensors("delta").unwrap();
            let got = ops::to_vec(states[0]).unwrap();
            let largest = want.iter().fold(0f32, |most, x| most.max(x.abs()));
            assert!(largest < 1e3, "{name}: a state grew to {largest}");
            close(name, &got, &want, 1e-4);
        }
    }
}
