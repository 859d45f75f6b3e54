//! All fixtures of the gated delta rule and of what stands around it (float64, by definition) on the
//! traits: portable bodies and CPU kernels, gradients by kernels and by the tape.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use boostr::Result;
use boostr::backend::{Cpu, CpuClient, DType, Tensor, Weight};
use boostr::checkpoint::Checkpoint;
use boostr::ops::{
    Activation, ActivationOps, CausalConv, CausalConvOps, DecayGate, DeltaInput, DeltaOps,
    GatedNorm, HostBytes, LinearOps, NormOps, Tape, split_last, tensor, to_vec, zeros,
};
use boostr_kernels::delta::{self, DeltaGradients, delta_rule_backward};
use boostr_kernels::{Rows, l2_norm_backward};

use crate::bodies::{BODIES, Body, Floats};
use crate::common::cpu;

/// The bounds that the issue asks for: |got - want| <= bound (1 + max |want|).
const TOLERANCE: f64 = 1e-5;
const GRADIENT_TOLERANCE: f64 = 1e-4;

const RULES: [&str; 24] = [
    "gdn_beta_edge",
    "gdn_beta_one",
    "gdn_grouped",
    "gdn_model_like",
    "gdn_neg_eigen",
    "gdn_no_decay",
    "gdn_one_token",
    "gdn_one_token_state",
    "gdn_packed",
    "gdn_same_key",
    "gdn_short",
    "gdn_strong_decay",
    "gdn_three_chunks",
    "gdn_wide_values",
    "gdn_zero_key",
    "kda_mixed_channels",
    "kda_model_like",
    "kda_no_decay",
    "kda_one_token",
    "kda_packed",
    "kda_plain",
    "kda_short",
    "kda_strong_decay",
    "kda_three_chunks",
];

/// A fixture's file.
struct File {
    name: &'static str,
    file: Checkpoint,
}

impl File {
    fn open(name: &'static str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/delta");
        let path = folder.join(format!("{name}.safetensors"));
        Self { name, file: Checkpoint::open(&path, false).unwrap() }
    }

    fn has(&self, name: &str) -> bool {
        self.file.get(name).is_some()
    }

    fn shape(&self, name: &str) -> Vec<usize> {
        self.file.get(name).unwrap_or_else(|| panic!("{}: no {name}", self.name)).shape.clone()
    }

    fn input(&self, name: &str) -> Vec<f32> {
        self.file.get(name).unwrap().to_f32().unwrap()
    }

    /// The values, in another shape.
    fn tensor(&self, name: &str, shape: &[usize]) -> Floats {
        tensor(&cpu(), &self.input(name), shape).unwrap()
    }

    fn want(&self, name: &str) -> Vec<f64> {
        let entry = self.file.get(name).unwrap();
        entry.data.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
    }

    #[track_caller]
    fn check(&self, what: &str, got: &[f32], tolerance: f64) {
        let want = self.want(what);
        assert_eq!(got.len(), want.len(), "{}: {what}", self.name);
        let bound = tolerance * (1.0 + want.iter().fold(0.0f64, |m, w| m.max(w.abs())));
        for (i, (&got, want)) in got.iter().zip(&want).enumerate() {
            let error = (f64::from(got) - want).abs();
            assert!(error <= bound, "{}: {what}[{i}] = {got}, not {want}", self.name);
        }
    }
}

/// A fixture of the rule, its rows one after another.
struct Rule {
    file: File,
    by_channel: bool,
    eps: Option<f32>,
    scale: f32,
    runs: Vec<usize>,
    /// Hk, Hv, Dk, Dv
    sizes: [usize; 4],
}

impl Rule {
    fn open(name: &'static str) -> Self {
        let file = File::open(name);
        let meta = file.file.metadata().clone();
        let (keys, values) = (file.shape("in.k"), file.shape("in.v"));
        let runs = file.file.get("in.runs").map(|entry| {
            let lengths = entry.data.as_chunks::<4>().0.iter();
            lengths.map(|b| usize::try_from(i32::from_le_bytes(*b)).unwrap()).collect()
        });
        Self {
            by_channel: meta["kind"] == "kda",
            eps: meta["qk_l2norm_eps"].parse().ok(),
            scale: meta["scale"].parse().unwrap(),
            runs: runs.unwrap_or_else(|| vec![values[1]; values[0]]),
            sizes: [keys[2], values[2], keys[3], values[3]],
            file,
        }
    }

    fn tokens(&self) -> usize {
        self.runs.iter().sum()
    }

    /// The shape of an input of all tokens.
    fn shape(&self, name: &str) -> Vec<usize> {
        let [key_heads, heads, key_dim, value_dim] = self.sizes;
        let inner = match name {
            "in.q" | "in.k" => vec![key_heads, key_dim],
            "in.v" => vec![heads, value_dim],
            "in.g" if self.by_channel => vec![heads, key_dim],
            _ => vec![heads],
        };
        [&[self.tokens()], &inner[..]].concat()
    }

    fn states(&self) -> Vec<Vec<f32>> {
        let [_, heads, key_dim, value_dim] = self.sizes;
        let len = heads * key_dim * value_dim;
        let all = if self.file.has("in.initial_state") {
            self.file.input("in.initial_state")
        } else {
            vec![0.0; self.runs.len() * len]
        };
        all.chunks(len).map(<[f32]>::to_vec).collect()
    }

    /// q, k, v, g and beta, the first two normalised where the fixture says so.
    fn inputs(&self, body: Body) -> [Floats; 5] {
        ["in.q", "in.k", "in.v", "in.g", "in.beta"].map(|name| {
            let shape = self.shape(name);
            let x = self.file.tensor(name, &shape);
            let Some(eps) = self.eps.filter(|_| name == "in.q" || name == "in.k") else { return x };
            let flat = x.reshape(&[shape[0], shape[1] * shape[2]]).unwrap();
            body.l2norm(&flat, shape[2], eps).unwrap().reshape(&shape).unwrap()
        })
    }

    /// All runs in one call: o, and the states after.
    fn run(&self, body: Body) -> (Vec<f32>, Vec<f32>) {
        let [_, heads, key_dim, value_dim] = self.sizes;
        let [q, k, v, g, beta] = &self.inputs(body);
        let states = self.states();
        let mut states: Vec<Floats> = states
            .iter()
            .map(|x| tensor(&cpu(), x, &[heads, key_dim, value_dim]).unwrap())
            .collect();
        let input = DeltaInput { q, k, v, g, beta, scale: self.scale };
        let mut views: Vec<&mut Floats> = states.iter_mut().collect();
        let out = body.delta(&input, self.by_channel, &self.runs, &mut views).unwrap();
        assert_eq!(out.shape(), [self.tokens(), heads, value_dim]);
        let states = states.iter().flat_map(|state| to_vec(state).unwrap()).collect();
        (to_vec(&out).unwrap(), states)
    }
}

#[test]
fn the_rule_equals_its_definition_in_both_bodies() {
    for name in RULES {
        let case = Rule::open(name);
        for body in BODIES {
            let (out, states) = case.run(body);
            case.file.check("out.o", &out, TOLERANCE);
            case.file.check("out.final_state", &states, TOLERANCE);
        }
    }
}

#[test]
fn gradients_are_those_of_the_definition() {
    let mut tested = 0;
    for name in RULES {
        let case = Rule::open(name);
        if !case.file.has("grad.q") {
            continue;
        }
        tested += 1;
        let [key_heads, value_heads, key_dim, value_dim] = case.sizes;
        let inputs = case.inputs(Body::Kernels).map(|x| to_vec(&x).unwrap());
        let rows = |i: usize| Rows::dense(&inputs[i], inputs[i].len() / case.tokens());
        let kernel = delta::Delta {
            level: cpu().level(),
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            q: rows(0),
            k: rows(1),
            v: rows(2),
            g: rows(3),
            beta: rows(4),
            scale: case.scale,
        };
        let states = case.states();
        let states: Vec<&[f32]> = states.iter().map(Vec::as_slice).collect();
        let mut dstates = case.file.input("in.grad_final_state");
        let mut of: Vec<&mut [f32]> = dstates.chunks_mut(states[0].len()).collect();
        let dout = case.file.input("in.grad_o");
        let dout = Rows::dense(&dout, value_heads * value_dim);
        let mut all = [0, 1, 2, 3, 4].map(|i: usize| vec![0.0; inputs[i].len()]);
        let [dq, dk, dv, dg, dbeta] = &mut all;
        let out = DeltaGradients { dq, dk, dv, dg, dbeta };
        delta_rule_backward(&kernel, &case.runs, &states, dout, &mut of, out);
        for (name, dx) in ["q", "k", "v", "g", "beta"].into_iter().zip(&all) {
            let what = format!("grad.{name}");
            let Some(eps) = case.eps.filter(|_| name == "q" || name == "k") else {
                case.file.check(&what, dx, GRADIENT_TOLERANCE);
                continue;
            };
            // Back through the normalisation.
            let (x, width) = (case.file.input(&format!("in.{name}")), key_heads * key_dim);
            let mut before = vec![0.0; x.len()];
            let [x, dx] = [&x, dx].map(|x| Rows::dense(x, width));
            l2_norm_backward(cpu().level(), x, key_dim, eps, dx, &mut before);
            case.file.check(&what, &before, GRADIENT_TOLERANCE);
        }
        if case.file.has("grad.initial_state") {
            case.file.check("grad.initial_state", &dstates, GRADIENT_TOLERANCE);
        }
    }
    assert!(tested >= 6, "only {tested} fixtures hold gradients");
}

#[test]
fn d_22_the_decay_gate_and_the_write_gate_equal_their_definitions() {
    let file = File::open("gates_gdn");
    let [tokens, heads] = file.shape("in.a")[..] else { panic!("in.a") };
    let a = file.tensor("in.a", &[tokens, heads]);
    let a_log = file.tensor("in.A_log", &[heads]);
    let dt_bias = file.tensor("in.dt_bias", &[heads]);
    let b = file.tensor("in.b", &[tokens, heads]);
    let two = tensor(&cpu(), &vec![2.0; heads], &[heads]).unwrap();
    for body in BODIES {
        let gate = DecayGate { a: &a, a_log: &a_log, dt_bias: &dt_bias };
        file.check("out.g", &to_vec(&body.decay_gate(&gate).unwrap()).unwrap(), TOLERANCE);
        let beta = body.activate(Activation::Sigmoid, &b).unwrap();
        file.check("out.beta", &to_vec(&beta).unwrap(), TOLERANCE);
        let doubled = body.scale_columns(&beta, &two).unwrap();
        file.check("out.beta_doubled", &to_vec(&doubled).unwrap(), TOLERANCE);
    }
    let file = File::open("gates_kda");
    let [tokens, heads, key_dim] = file.shape("out.g")[..] else { panic!("out.g") };
    let a = file.tensor("in.a", &[tokens, heads * key_dim]);
    let a_log = file.tensor("in.A_log", &[heads]);
    let dt_bias = file.tensor("in.dt_bias", &[heads * key_dim]);
    for body in BODIES {
        let gate = DecayGate { a: &a, a_log: &a_log, dt_bias: &dt_bias };
        file.check("out.g", &to_vec(&body.decay_gate(&gate).unwrap()).unwrap(), TOLERANCE);
    }
}

#[test]
fn d_8_zero_small_and_large_keys_are_normalised_by_their_definition() {
    let file = File::open("l2norm");
    let [rows, width] = file.shape("in.x")[..] else { panic!("in.x") };
    let x = file.tensor("in.x", &[rows, width]);
    for body in BODIES {
        for (what, eps) in [("out.y_eps1e-6", 1e-6), ("out.y_eps1e-5", 1e-5)] {
            file.check(what, &to_vec(&body.l2norm(&x, width, eps).unwrap()).unwrap(), TOLERANCE);
        }
    }
}

#[test]
fn the_gated_norm_with_one_weight_for_all_heads_equals_its_definition() {
    let file = File::open("gated_norm");
    let [tokens, heads, width] = file.shape("in.o")[..] else { panic!("in.o") };
    let shape = [tokens, heads * width];
    let (o, z) = (file.tensor("in.o", &shape), file.tensor("in.z", &shape));
    let weight = &file.tensor("in.weight", &[width]);
    for body in BODIES {
        for (what, eps, activation) in [
            ("out.silu_eps1e-6", 1e-6, Activation::Silu),
            ("out.silu_eps1e-5", 1e-5, Activation::Silu),
            ("out.sigmoid_eps1e-5", 1e-5, Activation::Sigmoid),
        ] {
            let norm =
                GatedNorm { weight, ngroups: heads, eps, norm_before_gate: true, activation };
            file.check(what, &to_vec(&body.gated(&o, &z, &norm).unwrap()).unwrap(), TOLERANCE);
        }
    }
}

#[test]
fn the_convolution_without_bias_equals_its_definition_for_two_to_seven_taps() {
    for name in ["conv_k2_l5", "conv_k3_l1", "conv_k4_l2", "conv_k4_l40", "conv_k7_l3"] {
        let file = File::open(name);
        let [tokens, channels] = file.shape("in.x")[..] else { panic!("in.x") };
        let taps = file.shape("in.weight")[1];
        let x = file.tensor("in.x", &[tokens, channels]);
        // Taps first, unlike the file.
        let weight = file.tensor("in.weight", &[channels, taps]);
        let weight = &weight.transpose(0, 1).unwrap().contiguous().unwrap();
        for body in BODIES {
            for (what, start) in [
                ("out.y", file.tensor("in.tail", &[taps - 1, channels])),
                ("out.y_from_zero", zeros(&cpu(), &[taps - 1, channels]).unwrap()),
            ] {
                let conv = CausalConv { weight, bias: None, silu: true };
                let mut window = start;
                let out = body.conv(&x, &conv, &[tokens], &mut [&mut window]).unwrap();
                file.check(what, &to_vec(&out).unwrap(), TOLERANCE);
                if what == "out.y" {
                    file.check("out.tail", &to_vec(&window).unwrap(), TOLERANCE);
                }
            }
        }
    }
}

/// Sizes of the small layer below: Hk, Hv, Dk, Dv, taps.
const SIZES: [usize; 5] = [2, 4, 3, 5, 4];
/// Tokens of its two runs in each of two calls.
const CALLS: [[usize; 2]; 2] = [[5, 0], [1, 3]];

/// The parameters of the layer, by name, with their shapes.
fn parameters(by_channel: bool) -> BTreeMap<&'static str, (Vec<usize>, Vec<f32>)> {
    let [key_heads, heads, key_dim, value_dim, taps] = SIZES;
    let tokens = CALLS.iter().flatten().sum::<usize>();
    let channels = 2 * key_heads * key_dim + heads * value_dim;
    let gates = heads * if by_channel { key_dim } else { 1 };
    let shapes = [
        ("x", vec![tokens, channels]),
        ("conv", vec![taps, channels]),
        ("a", vec![tokens, gates]),
        ("b", vec![tokens, heads]),
        ("z", vec![tokens, heads * value_dim]),
        ("a_log", vec![heads]),
        ("dt_bias", vec![gates]),
        ("norm", vec![value_dim]),
        ("first state", vec![heads, key_dim, value_dim]),
        ("second state", vec![heads, key_dim, value_dim]),
    ];
    let mut seed = 1u64;
    let mut float = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let filled = shapes.map(|(name, shape)| {
        let values = (0..shape.iter().product::<usize>()).map(|_| float()).collect();
        (name, (shape, values))
    });
    filled.into_iter().collect()
}

/// The matrix that makes logits of the layer's rows.
fn head() -> Weight<Cpu> {
    let width = SIZES[1] * SIZES[3];
    let bytes: Vec<u8> =
        (0..7 * width).flat_map(|i| (((i * 37) % 19) as f32 / 10.0 - 0.9).to_ne_bytes()).collect();
    let len = bytes.len();
    let bytes = HostBytes::new(Arc::new(bytes), 0..len).unwrap();
    cpu().weight(bytes, DType::F32, &[7, width]).unwrap()
}

/// A layer's way from the convolution to the gated norm, in two calls, and the loss of its rows.
fn layer<C>(
    client: &C,
    by_channel: bool,
    values: &BTreeMap<&'static str, (Vec<usize>, Vec<f32>)>,
    head: &Weight<Cpu>,
) -> Result<f64>
where
    C: DeltaOps<Cpu> + NormOps<Cpu> + CausalConvOps<Cpu> + ActivationOps<Cpu> + LinearOps<Cpu>,
{
    let [key_heads, heads, key_dim, value_dim, taps] = SIZES;
    let new = |name: &'static str| -> Result<Tensor<Cpu>> {
        let (shape, values) = &values[name];
        let x = tensor(client, values, shape)?;
        client.made(Some(name), &x);
        Ok(x)
    };
    let (x, conv, a, b, z) = (new("x")?, new("conv")?, new("a")?, new("b")?, new("z")?);
    let (a_log, dt_bias, norm) = (new("a_log")?, new("dt_bias")?, new("norm")?);
    let mut states = [new("first state")?, new("second state")?];
    let channels = x.shape()[1];
    let mut windows: [Tensor<Cpu>; 2] =
        [zeros(client, &[taps - 1, channels])?, zeros(client, &[taps - 1, channels])?];
    let two = tensor(client, &vec![2.0; heads], &[heads])?;
    let (mut first, mut loss) = (0, 0.0);
    for runs in CALLS {
        let len: usize = runs.iter().sum();
        let part = |x: &Tensor<Cpu>| x.narrow(0, first, len).unwrap();
        let convolution = CausalConv { weight: &conv, bias: None, silu: true };
        let [one, other] = &mut windows;
        let mixed = client.causal_conv1d(&part(&x), &convolution, &runs, &mut [one, other])?;
        let keys = key_heads * key_dim;
        let [q, k] = [0, keys].map(|from| {
            let x = mixed.narrow(1, from, keys).unwrap();
            let x = client.l2norm(&x, key_dim, 1e-6).unwrap();
            split_last(&x, &[key_heads, key_dim]).unwrap()
        });
        let v = split_last(&mixed.narrow(1, 2 * keys, heads * value_dim)?, &[heads, value_dim])?;
        let beta = client.activate(Activation::Sigmoid, &part(&b))?;
        let beta = client.scale_columns(&beta, &two)?;
        let gate = DecayGate { a: &part(&a), a_log: &a_log, dt_bias: &dt_bias };
        let g = client.decay_gate(&gate)?;
        let g = if by_channel { split_last(&g, &[heads, key_dim])? } else { g };
        let input = DeltaInput { q: &q, k: &k, v: &v, g: &g, beta: &beta, scale: 0.6 };
        let [one, other] = &mut states;
        let o = if by_channel {
            client.kda(&input, &runs, &mut [one, other])?
        } else {
            client.gated_delta(&input, &runs, &mut [one, other])?
        };
        let o = o.reshape(&[len, heads * value_dim])?;
        let norm = GatedNorm {
            weight: &norm,
            ngroups: heads,
            eps: 1e-5,
            norm_before_gate: true,
            activation: Activation::Sigmoid,
        };
        let o = client.gated_rmsnorm(&o, &part(&z), &norm)?;
        let targets: Vec<u32> = (0..len).map(|i| ((3 * i + first) % 7) as u32).collect();
        let weights = vec![1.0; len];
        let losses = client.cross_entropy(&o, head, 1.0, (&targets, &weights), false)?;
        loss += to_vec(&losses)?.iter().map(|x| f64::from(*x)).sum::<f64>();
        first += len;
    }
    Ok(loss)
}

#[test]
fn on_the_tape_a_layer_has_the_gradients_that_differences_show() {
    for by_channel in [false, true] {
        let values = parameters(by_channel);
        let tape = Tape::new(cpu(), |_| true);
        let (head, client): (Weight<Cpu>, CpuClient) = (head(), cpu());
        tape.parameter("head", &head);
        let loss = layer(&tape, by_channel, &values, &head).unwrap();
        assert!((loss - layer(&client, by_channel, &values, &head).unwrap()).abs() < 1e-5);
        let gradients = tape.backward().unwrap();
        for (name, (shape, old)) in &values {
            let gradient = &gradients[*name];
            assert_eq!(gradient.len(), old.len(), "{name}");
            // Along its gradient the loss changes by the gradient's length.
            let length = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            assert!(length > 1e-3, "{name}: a gradient of length {length}");
            let along = |step: f64| {
                let moved = old.iter().zip(gradient);
                let moved =
                    moved.map(|(x, g)| (f64::from(*x) + step * f64::from(*g) / length) as f32);
                let mut values = values.clone();
                values.insert(*name, (shape.clone(), moved.collect()));
                layer(&client, by_channel, &values, &head).unwrap()
            };
            let step = 4e-3;
            let near = (along(step) - along(-step)) / (2.0 * step);
            let far = (along(2.0 * step) - along(-2.0 * step)) / (4.0 * step);
            let slope = (4.0 * near - far) / 3.0;
            let error = (slope - length).abs();
            assert!(error <= 2e-3 * (1.0 + length), "{name}: {slope}, not {length}");
        }
    }
}

/// Tokens `first..first + len` of inputs, from a state on: o, and the state after.
fn piece(case: &Rule, first: usize, len: usize, state: &Floats) -> (Vec<f32>, Floats) {
    let inputs = case.inputs(Body::Kernels).map(|x| x.narrow(0, first, len).unwrap());
    let [q, k, v, g, beta] = &inputs;
    let input = DeltaInput { q, k, v, g, beta, scale: case.scale };
    let mut state = state.clone();
    let out = Body::Kernels.delta(&input, case.by_channel, &[len], &mut [&mut state]).unwrap();
    (to_vec(&out).unwrap(), state)
}

impl Rule {
    fn state(&self, run: usize) -> Floats {
        let [_, heads, key_dim, value_dim] = self.sizes;
        tensor(&cpu(), &self.states()[run], &[heads, key_dim, value_dim]).unwrap()
    }
}

#[test]
fn d_13_14_equal_keys_and_strong_gates_equal_the_definition_at_any_cut() {
    for name in [
        "gdn_same_key",
        "gdn_beta_one",
        "gdn_strong_decay",
        "kda_no_decay",
        "kda_strong_decay",
        "kda_mixed_channels",
    ] {
        let case = Rule::open(name);
        let (whole, _) = case.run(Body::Kernels);
        for cut in [1, 3, 16, 64, case.tokens() - 1] {
            let (mut out, state) = piece(&case, 0, cut, &case.state(0));
            let (rest, state) = piece(&case, cut, case.tokens() - cut, &state);
            out.extend(rest);
            assert_eq!(out, whole, "{name} cut at {cut}");
            case.file.check("out.o", &out, TOLERANCE);
            case.file.check("out.final_state", &to_vec(&state).unwrap(), TOLERANCE);
        }
    }
}

#[test]
fn d_5_packed_runs_have_the_bits_of_each_alone() {
    for name in ["gdn_packed", "kda_packed"] {
        let case = Rule::open(name);
        let (out, states) = case.run(Body::Kernels);
        let (row, size) = (out.len() / case.tokens(), states.len() / case.runs.len());
        let mut first = 0;
        for (r, &len) in case.runs.iter().enumerate() {
            let (alone, state) = piece(&case, first, len, &case.state(r));
            assert_eq!(alone, out[first * row..][..len * row], "{name}, run {r}");
            assert_eq!(to_vec(&state).unwrap(), states[r * size..][..size], "{name}, run {r}");
            first += len;
        }
    }
}

#[test]
fn d_15_tokens_after_a_token_do_not_change_its_bits() {
    for name in ["gdn_three_chunks", "kda_three_chunks"] {
        let case = Rule::open(name);
        let [_, heads, key_dim, value_dim] = case.sizes;
        let [q, k, v, g, beta] = case.inputs(Body::Kernels);
        let tokens = case.tokens();
        // The last 30 tokens in another order.
        let other = |x: &Floats| {
            let mut values = to_vec(x).unwrap();
            let row = values.len() / tokens;
            values[(tokens - 30) * row..].rotate_left(7 * row);
            tensor(&cpu(), &values, x.shape()).unwrap()
        };
        let run = |[q, k, v, g, beta]: [&Floats; 5]| {
            let mut state =
                tensor(&cpu(), &case.states()[0], &[heads, key_dim, value_dim]).unwrap();
            let input = DeltaInput { q, k, v, g, beta, scale: case.scale };
            let runs = [tokens];
            let out = Body::Kernels.delta(&input, case.by_channel, &runs, &mut [&mut state]);
            to_vec(&out.unwrap()).unwrap()
        };
        let want = run([&q, &k, &v, &g, &beta]);
        let got = run([&other(&q), &other(&k), &other(&v), &other(&g), &other(&beta)]);
        let same = (tokens - 30) * heads * value_dim;
        assert_eq!(got[..same], want[..same], "{name}");
        assert_ne!(got[same..], want[same..], "{name}");
    }
}

#[test]
fn d_1_a_prompt_token_by_token_leaves_the_same_state_where_keys_and_values_differ_in_width() {
    let case = Rule::open("gdn_wide_values");
    let (out, states) = case.run(Body::Kernels);
    let (row, size) = (out.len() / case.tokens(), states.len() / case.runs.len());
    let mut first = 0;
    for (r, &len) in case.runs.iter().enumerate() {
        let mut state = case.state(r);
        for t in first..first + len {
            let one;
            (one, state) = piece(&case, t, 1, &state);
            assert_eq!(one, out[t * row..][..row]);
        }
        assert_eq!(to_vec(&state).unwrap(), states[r * size..][..size]);
        first += len;
    }
}
