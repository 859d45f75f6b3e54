//! Small models of random weights, checkpoints made of others, and the model's definition in f64.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::fs;
use std::path::{Path, PathBuf};

use boostr::Error;
use boostr::backend::Cpu;
use boostr::checkpoint::{Bytes, Checkpoint, ConfigFile, Dtype, TensorEntry, safetensors};
use boostr::models::mamba2::Config;
use boostr::models::{self, Family, Logits, Model, Run, State};
use boostr::nn::{MixerConfig, Tensors};
use boostr::ops::to_vec;
use half::{bf16, f16};
use serde_json::{Value, json};

use crate::common::{Folder, Random, cpu};

/// The model of most `case_` tests: two groups, so that a head of the wrong group shows.
const M: &str = r#""model_type": "mamba2", "hidden_size": 64, "num_heads": 4, "head_dim": 32,
    "state_size": 16, "n_groups": 2, "conv_kernel": 4, "num_hidden_layers": 2, "vocab_size": 80"#;

/// Between f32 and the definition in f64, for logits and states of about 1.
pub const F32: f64 = 1e-5;

/// The configuration of a fixture with `changes`; null takes a field away.
pub fn config_with(name: &str, changes: Value) -> Value {
    let text = fs::read_to_string(fixture(name).join("config.json")).unwrap();
    let mut json: Value = serde_json::from_str(&text).unwrap();
    let Value::Object(changes) = changes else { panic!("no object: {changes}") };
    for (key, value) in changes {
        match value {
            Value::Null => drop(json.as_object_mut().unwrap().remove(&key)),
            value => drop(json.as_object_mut().unwrap().insert(key, value)),
        }
    }
    json
}

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

/// An error with its causes.
pub fn message(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

pub fn config(text: &str) -> Config {
    let config = models::Config::read(&ConfigFile::parse("config.json", text).unwrap()).unwrap();
    config.get::<Config>().unwrap_or_else(|| panic!("{config:?}")).clone()
}

/// The configuration M with `changes`, which begin with a comma or are empty.
pub fn m(changes: &str) -> Config {
    config(&format!("{{{M}{changes}}}"))
}

/// Uniform in -1..1.
pub fn float(random: &mut Random) -> f32 {
    (random.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
}

pub fn floats(random: &mut Random, count: usize) -> Vec<f32> {
    (0..count).map(|_| float(random)).collect()
}

pub fn tokens(seed: u64, count: usize, vocab: usize) -> Vec<u32> {
    let mut random = Random(seed);
    (0..count).map(|_| random.below(vocab) as u32).collect()
}

/// Random weights of a Mamba-2 model.
pub fn checkpoint(config: &Config, seed: u64) -> Checkpoint {
    let with_head = config.tie_embeddings == Some(false);
    random(&config.parameters(config.frame().padded_vocab(), with_head).unwrap(), seed)
}

/// Random weights in which nothing is the value that a lazy loader would guess: D and norms are not 1.
pub fn random(tensors: &Tensors, seed: u64) -> Checkpoint {
    let mut random = Random(seed);
    let entries = tensors.iter().map(|(name, shape)| {
        let (center, spread) = match (name.rsplit('.').next().unwrap(), shape) {
            ("A_log", _) => (1.0, 1.5),
            ("dt_bias", _) => (-2.0, 2.0),
            ("bias", _) => (0.0, 0.3),
            (_, [_, columns] | [_, _, columns]) => (0.0, (3.0 / *columns as f32).sqrt()),
            _ => (1.0, 0.5),
        };
        let count = shape.iter().product();
        let values: Vec<f32> =
            floats(&mut random, count).iter().map(|x| center + spread * x).collect();
        (name.to_string(), entry(Dtype::F32, shape, &values))
    });
    Checkpoint::from_entries("random", entries.collect())
}

pub fn entry(dtype: Dtype, shape: &[usize], values: &[f32]) -> TensorEntry {
    let bytes: Vec<u8> = match dtype {
        Dtype::BF16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        Dtype::F64 => values.iter().flat_map(|&x| f64::from(x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|&x| x.to_le_bytes()).collect(),
    };
    TensorEntry {
        dtype,
        shape: shape.to_vec(),
        data: Bytes::new(bytes),
        file: Path::new("memory").into(),
    }
}

/// A checkpoint with other tensors; `None` leaves one out.
pub fn edited(
    checkpoint: &Checkpoint,
    edit: impl Fn(&str, &TensorEntry) -> Option<TensorEntry>,
) -> Checkpoint {
    let entries =
        checkpoint.iter().filter_map(|(name, entry)| Some((name.to_string(), edit(name, entry)?)));
    Checkpoint::from_entries("edited", entries.collect())
}

/// The same with all elements of the tensors that end in `suffix` set by `value(old)`.
pub fn with(checkpoint: &Checkpoint, suffix: &str, value: impl Fn(f32) -> f32) -> Checkpoint {
    edited(checkpoint, |name, old| {
        if !name.ends_with(suffix) {
            return Some(old.clone());
        }
        let values: Vec<f32> = old.to_f32().unwrap().into_iter().map(&value).collect();
        Some(entry(Dtype::F32, &old.shape, &values))
    })
}

/// All tensors rounded to `dtype`.
pub fn converted(checkpoint: &Checkpoint, dtype: Dtype) -> Checkpoint {
    edited(checkpoint, |_, old| Some(entry(dtype, &old.shape, &old.to_f32().unwrap())))
}

pub fn renamed(checkpoint: &Checkpoint, new_name: impl Fn(&str) -> String) -> Checkpoint {
    let mut checkpoint = checkpoint.clone();
    checkpoint.rename(|name| Some(new_name(name))).unwrap();
    checkpoint
}

pub fn save(path: &Path, checkpoint: &Checkpoint) {
    let tensors: Vec<_> =
        checkpoint.iter().map(|(name, t)| (name, t.dtype, &t.shape[..], &*t.data)).collect();
    safetensors::write(path, &tensors, checkpoint.metadata()).unwrap();
}

/// A model with the checkpoint that it came from.
pub struct Tiny {
    pub model: Model<Cpu>,
    pub config: Config,
    pub checkpoint: Checkpoint,
}

impl Tiny {
    pub fn new(config: Config, checkpoint: Checkpoint) -> Self {
        let model = Model::load(config.clone(), checkpoint.clone(), cpu()).unwrap();
        Self { model, config, checkpoint }
    }

    /// M with `changes` and random weights.
    pub fn m(changes: &str) -> Self {
        let config = m(changes);
        let checkpoint = checkpoint(&config, 0x5eed);
        Self::new(config, checkpoint)
    }

    pub fn state(&self) -> State<Cpu> {
        self.model.new_state().unwrap()
    }

    /// Logits of every token, fed in pieces.
    pub fn run(&self, tokens: &[u32], pieces: &[usize], state: &mut State<Cpu>) -> Vec<f32> {
        run(&self.model, tokens, pieces, state)
    }

    /// The same by definition, with the state that follows.
    pub fn oracle(&self, tokens: &[u32]) -> (Vec<f64>, Vec<f64>) {
        let mut oracle = Oracle::new(&self.config, &self.checkpoint);
        let logits = tokens.iter().flat_map(|&id| oracle.step(id)).collect();
        (logits, oracle.layers.into_iter().flatten().flatten().collect())
    }
}

pub fn run(
    model: &Model<Cpu>,
    tokens: &[u32],
    pieces: &[usize],
    state: &mut State<Cpu>,
) -> Vec<f32> {
    assert_eq!(pieces.iter().sum::<usize>(), tokens.len());
    let (start, mut first) = (state.position(), 0);
    let mut logits = Vec::new();
    for &len in pieces {
        let mut run = [Run { tokens: &tokens[first..first + len], state }];
        logits.extend(to_vec(&model.forward(&mut run, Logits::All).unwrap()).unwrap());
        first += len;
        assert_eq!(state.position(), start + first);
    }
    logits
}

/// All of a state: each layer's window, then its SSM state.
pub fn states(state: &State<Cpu>) -> Vec<f32> {
    (0..state.n_layer())
        .flat_map(|i| [state.conv(i).unwrap(), state.ssm(i).unwrap()])
        .flat_map(|x| to_vec(x).unwrap())
        .collect()
}

/// Asserts `|got - want| <= tolerance * max(1, max |want|)` for every element.
#[track_caller]
pub fn close(got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "lengths");
    let bound = tolerance * want.iter().fold(1.0f64, |m, w| m.max(w.abs()));
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(error <= bound, "element {i}: {got} is not {want} within {bound:e}");
    }
}

pub fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

pub fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

pub fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// The Mamba-2 model as its paper has it: one token after another, in f64.
pub struct Oracle<'a> {
    config: &'a Config,
    weights: BTreeMap<&'a str, Vec<f64>>,
    /// Window `[d_conv - 1, conv_dim]` and SSM state `[H, P, N]` of each layer.
    pub layers: Vec<[Vec<f64>; 2]>,
}

impl<'a> Oracle<'a> {
    pub fn new(config: &'a Config, checkpoint: &'a Checkpoint) -> Self {
        let weights = checkpoint.iter().map(|(name, t)| (name, widened(&t.to_f32().unwrap())));
        let mixer = &config.mixer;
        let zeros = [
            vec![0.0; (mixer.d_conv - 1) * mixer.conv_dim()],
            vec![0.0; mixer.d_inner() * mixer.d_state],
        ];
        Self { config, weights: weights.collect(), layers: vec![zeros; config.n_layer] }
    }

    /// Logits after one more token.
    pub fn step(&mut self, id: u32) -> Vec<f64> {
        let Self { config, weights, layers } = self;
        let eps = config.norm_eps.into();
        let width = config.mixer.d_model;
        let embeddings = &weights["backbone.embeddings.weight"];
        let mut h = embeddings[id as usize * width..][..width].to_vec();
        for (i, state) in layers.iter_mut().enumerate() {
            let weight = |name: &str| weights.get(format!("backbone.layers.{i}.{name}").as_str());
            let u = norm(&h, weight("norm.weight").unwrap(), 1, eps);
            let y = mixer(&config.mixer, |name| weight(&format!("mixer.{name}")), state, &u);
            h.iter_mut().zip(y).for_each(|(h, y)| *h += y);
        }
        let h = norm(&h, &weights["backbone.norm_f.weight"], 1, eps);
        linear(weights.get("lm_head.weight").unwrap_or(embeddings), None, &h)
    }
}

pub fn linear(weight: &[f64], bias: Option<&Vec<f64>>, x: &[f64]) -> Vec<f64> {
    let dot = |row: &[f64]| row.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
    let rows = weight.chunks_exact(x.len()).map(dot);
    rows.enumerate().map(|(i, y)| y + bias.map_or(0.0, |bias| bias[i])).collect()
}

pub fn norm(x: &[f64], weight: &[f64], ngroups: usize, eps: f64) -> Vec<f64> {
    let group = x.len() / ngroups;
    let scale = |i: usize| {
        let part = &x[i / group * group..][..group];
        (part.iter().map(|x| x * x).sum::<f64>() / group as f64 + eps).sqrt().recip()
    };
    x.iter().zip(weight).enumerate().map(|(i, (x, w))| x * scale(i) * w).collect()
}

pub fn mixer<'a>(
    config: &MixerConfig,
    weight: impl Fn(&str) -> Option<&'a Vec<f64>>,
    [window, ssm]: &mut [Vec<f64>; 2],
    u: &[f64],
) -> Vec<f64> {
    let &MixerConfig { nheads, headdim, ngroups, d_state, d_conv, dt_limit: (low, high), .. } =
        config;
    let (d_inner, channels) = (config.d_inner(), config.conv_dim());
    let [a_log, d, dt_bias] = ["A_log", "D", "dt_bias"].map(|name| weight(name).unwrap());

    let zxbcdt = linear(weight("in_proj.weight").unwrap(), weight("in_proj.bias"), u);
    let (z, dt) = (&zxbcdt[..d_inner], &zxbcdt[d_inner + channels..]);
    window.extend(&zxbcdt[d_inner..d_inner + channels]);
    let (taps, bias) = (weight("conv1d.weight").unwrap(), weight("conv1d.bias"));
    let convolved = |c: usize| {
        let sum = (0..d_conv).map(|k| taps[c * d_conv + k] * window[k * channels + c]).sum::<f64>();
        silu(sum + bias.map_or(0.0, |bias| bias[c]))
    };
    let xbc: Vec<f64> = (0..channels).map(convolved).collect();
    window.drain(..channels);

    let mut y = vec![0.0; d_inner];
    for head in 0..nheads {
        let step = softplus(dt[head] + dt_bias[head]).max(low.into()).min(high.into());
        let decay = (step * -a_log[head].exp()).exp();
        let group = head / (nheads / ngroups);
        let b = &xbc[d_inner + group * d_state..][..d_state];
        let c = &xbc[d_inner + (ngroups + group) * d_state..][..d_state];
        for channel in head * headdim..(head + 1) * headdim {
            let x = xbc[channel];
            y[channel] = d[head] * x;
            for n in 0..d_state {
                let s = &mut ssm[channel * d_state + n];
                *s = decay * *s + step * x * b[n];
                y[channel] += *s * c[n];
            }
        }
    }
    let (gate, eps) = (|(y, z): (&f64, &f64)| y * silu(*z), config.norm_eps.into());
    let weight_of_norm = weight("norm.weight").unwrap();
    let y: Vec<f64> = if config.norm_before_gate {
        norm(&y, weight_of_norm, ngroups, eps).iter().zip(z).map(gate).collect()
    } else {
        norm(&y.iter().zip(z).map(gate).collect::<Vec<_>>(), weight_of_norm, ngroups, eps)
    };
    linear(weight("out_proj.weight").unwrap(), weight("out_proj.bias"), &y)
}

/// A folder of a Qwen3.5 of two layers of width 256, whose value heads of 128 share blocks of 256 in pairs.
pub fn wide(folder: &Folder) -> PathBuf {
    let source = fixture("qwen3_5-tiny");
    let text = fs::read_to_string(source.join("config.json")).unwrap();
    let mut config = serde_json::from_str::<Value>(&text).unwrap()["text_config"].take();
    let changes = json!({
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2,
        "head_dim": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    });
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    let file = ConfigFile::parse("config.json", &config.to_string()).unwrap();
    let read = models::Config::read(&file).unwrap();
    let tensors = read.family().parameters(512, false).unwrap();
    let out = folder.path().join("wide");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("config.json"), config.to_string()).unwrap();
    fs::copy(source.join("tokenizer.json"), out.join("tokenizer.json")).unwrap();
    save(&out.join("model.safetensors"), &random(&tensors, 77));
    out
}
