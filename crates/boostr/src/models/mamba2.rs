//! Mamba-2 language models (Dao and Gu, 2024, arXiv 2405.21060).
//!
//! Unlike Mamba-1, each head has one scalar decay, b and c come straight from the input projection and
//! are shared by groups of heads, so the sequence is computed by matrix products; and a gated norm
//! stands before the output projection.
//!
//! ```text
//! ids ─ embeddings ─ h ─┬────────────── + ─ ... ─ norm_f ─ lm_head ─ logits
//!                       └ norm ─ mixer ─┘
//!                         n_layer times
//! ```
//!
//! Loads transformers' `Mamba2ForCausalLM`, the layout of mamba_ssm (`state-spaces/mamba2-*`), the
//! original release of Mamba-Codestral, and GGUF; see the tables at the foot of the file.

use crate::backend::{Backend, Tensor};
use crate::checkpoint::gguf::Metadata;
use crate::checkpoint::{Checkpoint, ConfigFile, Dtype};
use crate::error::{Error, Result};
use crate::nn::{
    Linear, Mamba2Mixer, MixerConfig, MixerState, Params, RmsNorm, Tensors, synthetic,
};
use crate::ops::{self, LinearOps, Weight};

/// A forward cuts runs where their position is a multiple of this, so that its memory is bounded.
pub const PIECE: usize = 1024;
/// Rows that a forward computes at once.
const MAX_ROWS: usize = 2048;
/// Largest size that a configuration may name.
const MAX_SIZE: usize = 1 << 24;
/// Most bytes of one sequence's state: twelve times that of the largest published model.
const MAX_STATE: usize = 4 << 30;

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Layers.
    pub n_layer: usize,
    /// Ids that the tokenizer may give; the embedding may have more rows.
    pub vocab_size: usize,
    /// Whether the head is the embedding; `None` when the file does not say.
    pub tie_embeddings: Option<bool>,
    /// Added to the mean of squares of norms.
    pub norm_eps: f32,
    /// Rows of the embedding are a multiple of this.
    pub pad_vocab_size_multiple: usize,
    /// Every layer's mixer.
    pub mixer: MixerConfig,
}

impl Config {
    /// Reads a `config.json` of transformers or mamba_ssm, or a `params.json` of Codestral.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] that names file and field, [`Error::Unsupported`] for another architecture.
    ///
    /// ```
    /// use boostr::checkpoint::ConfigFile;
    /// use boostr::models::mamba2::Config;
    ///
    /// let file = ConfigFile::parse("config.json", r#"{
    ///     "d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"},
    ///     "pad_vocab_size_multiple": 16, "tie_embeddings": true
    /// }"#)?;
    /// let config = Config::read(&file)?;
    /// assert_eq!((config.mixer.nheads, config.mixer.d_in_proj()), (24, 3352));
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn read(file: &ConfigFile) -> Result<Self> {
        let config = match file.text("model_type")? {
            Some("mamba2") => Self::read_hf(file)?,
            None | Some("mamba") if file.has("dim") => Self::read_codestral(file)?,
            None if file.has("ssm_cfg") || file.has("d_model") => Self::read_mamba_ssm(file)?,
            Some(other) => {
                let what = format!(
                    "model_type `{}` in `{}` (supported: mamba2)",
                    other.escape_debug(),
                    file.path().display()
                );
                return Err(Error::Unsupported { what });
            }
            None => return Err(file.error("model_type", "missing (supported: mamba2)")),
        };
        config.check().map_err(|(field, reason)| file.error(field, reason))?;
        Ok(config)
    }

    /// What is impossible about these sizes: the field, and why.
    fn check(&self) -> Result<(), (&'static str, String)> {
        let MixerConfig { d_model, nheads, headdim, ngroups, d_state, d_conv, .. } = self.mixer;
        for (field, size) in [
            ("num_hidden_layers", self.n_layer),
            ("vocab_size", self.vocab_size),
            ("pad_vocab_size_multiple", self.pad_vocab_size_multiple),
            ("hidden_size", d_model),
            ("num_heads", nheads),
            ("head_dim", headdim),
            ("n_groups", ngroups),
            ("state_size", d_state),
            ("conv_kernel", d_conv),
        ] {
            if !(1..=MAX_SIZE).contains(&size) {
                return Err((field, format!("expected 1 to {MAX_SIZE}, found {size}")));
            }
        }
        if !nheads.is_multiple_of(ngroups) {
            return Err(("n_groups", format!("{ngroups} groups do not divide {nheads} heads")));
        }
        let bytes = self.state_bytes();
        if bytes.is_none_or(|bytes| bytes > MAX_STATE) {
            let bytes = bytes.map_or_else(|| "more than can be counted".into(), |b| b.to_string());
            let reason = format!(
                "{nheads} heads of {headdim} x {d_state} in {} layers make a state of {bytes} bytes \
                 for each sequence, at most {MAX_STATE} are supported",
                self.n_layer
            );
            return Err(("state_size", reason));
        }
        Ok(())
    }

    /// Bytes of one sequence's state; `None` when that is more than a `usize` counts.
    fn state_bytes(&self) -> Option<usize> {
        let per_layer = MixerState::<crate::backend::Cpu>::shapes(&self.mixer)
            .iter()
            .map(|shape| shape.iter().try_fold(4usize, |n, &dim| n.checked_mul(dim)))
            .try_fold(0usize, |sum, bytes| sum.checked_add(bytes?))?;
        per_layer.checked_mul(self.n_layer)
    }

    fn read_hf(file: &ConfigFile) -> Result<Self> {
        if let Some(act) = file.text("hidden_act")?.filter(|&act| act != "silu" && act != "swish") {
            return Err(file.error("hidden_act", format!("expected silu, found {act:?}")));
        }
        let size = |keys: &[&str], default| -> Result<usize> {
            Ok(file.usize(keys, 1..=MAX_SIZE)?.unwrap_or(default))
        };
        let d_model = file.required(&["hidden_size", "d_model"], 1..=MAX_SIZE)?;
        let d_inner = d_model.saturating_mul(size(&["expand"], 2)?);
        let headdim = size(&["head_dim"], 64)?;
        let nheads = size(&["num_heads"], d_inner / headdim)?;
        if nheads.saturating_mul(headdim) != d_inner {
            let reason = format!(
                "{nheads} heads of {headdim} are not expand * hidden_size = {d_inner} channels"
            );
            return Err(file.error("num_heads", reason));
        }
        let eps = file.float(&["layer_norm_epsilon", "rms_norm_eps"], f32::MIN_POSITIVE..=1.0)?;
        Ok(Self {
            n_layer: file.required(&["num_hidden_layers", "n_layer"], 1..=10_000)?,
            vocab_size: file.required(&["vocab_size"], 1..=MAX_SIZE)?,
            tie_embeddings: file.bool(&["tie_word_embeddings"])?,
            norm_eps: eps.unwrap_or(1e-5),
            pad_vocab_size_multiple: 1,
            mixer: MixerConfig {
                d_model,
                nheads,
                headdim,
                ngroups: size(&["n_groups"], 8)?,
                d_state: size(&["state_size"], 128)?,
                d_conv: size(&["conv_kernel"], 4)?,
                bias: file.bool(&["use_bias"])?.unwrap_or(false),
                conv_bias: file.bool(&["use_conv_bias"])?.unwrap_or(true),
                dt_limit: limit(file, "time_step_limit")?,
                norm_before_gate: file.bool(&["norm_before_gate"])?.unwrap_or(false),
                norm_eps: eps.unwrap_or(1e-5),
            },
        })
    }

    fn read_mamba_ssm(file: &ConfigFile) -> Result<Self> {
        let ssm = file.object("ssm_cfg")?;
        match ssm.text("layer")? {
            Some("Mamba2") => {}
            other => {
                let found = other.unwrap_or("nothing, which means Mamba1");
                let what = format!(
                    "layer type {} in `{}` (supported: Mamba2)",
                    found.escape_debug(),
                    file.path().display()
                );
                return Err(Error::Unsupported { what });
            }
        }
        if file.list_len("attn_layer_idx")?.unwrap_or(0) > 0 {
            return Err(file.error("attn_layer_idx", "attention layers are not supported"));
        }
        if file.usize(&["d_intermediate"], 0..=MAX_SIZE)?.unwrap_or(0) > 0 {
            return Err(file.error("d_intermediate", "MLP layers are not supported"));
        }
        if file.bool(&["rms_norm"])? == Some(false) {
            return Err(file.error("rms_norm", "layers with LayerNorm are not supported"));
        }
        let size = |keys: &[&str], default| -> Result<usize> {
            Ok(ssm.usize(keys, 1..=MAX_SIZE)?.unwrap_or(default))
        };
        let d_model = file.required(&["d_model"], 1..=MAX_SIZE)?;
        let d_inner = d_model.saturating_mul(size(&["expand"], 2)?);
        if let Some(d_ssm) = ssm.usize(&["d_ssm"], 1..=MAX_SIZE)?.filter(|&d| d != d_inner) {
            let reason = format!("expected expand * d_model = {d_inner}, found {d_ssm}");
            return Err(ssm.error("d_ssm", reason));
        }
        let headdim = size(&["headdim"], 64)?;
        if !d_inner.is_multiple_of(headdim) {
            let reason = format!("heads of {headdim} do not divide {d_inner} channels");
            return Err(ssm.error("headdim", reason));
        }
        Ok(Self {
            n_layer: file.required(&["n_layer"], 1..=10_000)?,
            vocab_size: file.required(&["vocab_size"], 1..=MAX_SIZE)?,
            tie_embeddings: Some(file.bool(&["tie_embeddings"])?.unwrap_or(true)),
            norm_eps: 1e-5,
            pad_vocab_size_multiple: file
                .usize(&["pad_vocab_size_multiple"], 1..=MAX_SIZE)?
                .unwrap_or(8),
            mixer: MixerConfig {
                d_model,
                nheads: d_inner / headdim,
                headdim,
                ngroups: size(&["ngroups"], 1)?,
                d_state: size(&["d_state"], 128)?,
                d_conv: size(&["d_conv"], 4)?,
                bias: ssm.bool(&["bias"])?.unwrap_or(false),
                conv_bias: ssm.bool(&["conv_bias"])?.unwrap_or(true),
                dt_limit: limit(&ssm, "dt_limit")?,
                norm_before_gate: ssm.bool(&["norm_before_gate"])?.unwrap_or(false),
                norm_eps: 1e-5,
            },
        })
    }

    fn read_codestral(file: &ConfigFile) -> Result<Self> {
        let d_model = file.required(&["dim"], 1..=MAX_SIZE)?;
        let (d_inner, headdim) = (d_model.saturating_mul(2), 64);
        if !d_inner.is_multiple_of(headdim) {
            let reason = format!("heads of {headdim} do not divide {d_inner} channels");
            return Err(file.error("dim", reason));
        }
        Ok(Self {
            n_layer: file.required(&["n_layers"], 1..=10_000)?,
            vocab_size: file.required(&["vocab_size"], 1..=MAX_SIZE)?,
            tie_embeddings: Some(file.bool(&["tie_embeddings"])?.unwrap_or(false)),
            norm_eps: 1e-5,
            pad_vocab_size_multiple: file
                .usize(&["pad_vocab_size_multiple"], 1..=MAX_SIZE)?
                .unwrap_or(1),
            mixer: MixerConfig {
                d_model,
                nheads: d_inner / headdim,
                headdim,
                ngroups: file.usize(&["n_groups"], 1..=MAX_SIZE)?.unwrap_or(8),
                d_state: 128,
                d_conv: 4,
                bias: false,
                conv_bias: true,
                dt_limit: (0.0, f32::INFINITY),
                norm_before_gate: false,
                norm_eps: 1e-5,
            },
        })
    }

    /// The tensors of a checkpoint in transformers' names, with an embedding of `rows` rows.
    #[must_use]
    pub fn tensors(&self, rows: usize, with_head: bool) -> Tensors {
        let mut tensors = Tensors::default();
        let width = self.mixer.d_model;
        tensors.add("backbone.embeddings.weight", &[rows, width]);
        for layer in 0..self.n_layer {
            tensors.add(format!("backbone.layers.{layer}.norm.weight"), &[width]);
            self.mixer.expect(&mut tensors, &format!("backbone.layers.{layer}.mixer"));
        }
        tensors.add("backbone.norm_f.weight", &[width]);
        if with_head {
            tensors.add("lm_head.weight", &[rows, width]);
        }
        tensors
    }

    /// Rows of the embedding by this configuration alone.
    #[must_use]
    pub fn padded_vocab(&self) -> usize {
        self.vocab_size.next_multiple_of(self.pad_vocab_size_multiple)
    }
}

/// A pair of bounds in order, the upper one possibly infinite; `(0, infinity)` when missing.
fn limit(file: &ConfigFile, key: &str) -> Result<(f32, f32)> {
    match file.floats(key)?.as_deref() {
        None => Ok((0.0, f32::INFINITY)),
        Some(&[low, high]) if low <= high && low.is_finite() => Ok((low, high)),
        Some(other) => Err(file.error(key, format!("expected [low, high], found {other:?}"))),
    }
}

struct Layer<B: Backend> {
    norm: RmsNorm<B>,
    mixer: Mamba2Mixer<B>,
}

/// What one sequence remembers: constant in size, whatever its length.
///
/// A clone is a fork: it shares memory until one of the two goes on.
#[derive(Debug, Clone)]
pub struct State<B: Backend> {
    layers: Vec<MixerState<B>>,
    position: usize,
}

impl<B: Backend> State<B> {
    /// Tokens that this state has seen.
    #[must_use]
    pub fn position(&self) -> usize {
        self.position
    }

    /// Bytes of all its tensors.
    #[must_use]
    pub fn size_in_bytes(&self) -> usize {
        self.layers.iter().map(|s| 4 * (s.conv.numel() + s.ssm.numel())).sum()
    }

    /// Number of layers.
    #[must_use]
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// One layer's convolution window `[d_conv - 1, conv_dim]`, oldest input first; `None` past the last.
    #[must_use]
    pub fn conv(&self, layer: usize) -> Option<&Tensor<B>> {
        Some(&self.layers.get(layer)?.conv)
    }

    /// One layer's SSM state `[H, P, N]`; `None` past the last.
    #[must_use]
    pub fn ssm(&self, layer: usize) -> Option<&Tensor<B>> {
        Some(&self.layers.get(layer)?.ssm)
    }

    /// Replaces one layer's convolution window.
    ///
    /// # Errors
    ///
    /// When there is no such layer or the shape or type is another.
    pub fn set_conv(&mut self, layer: usize, conv: Tensor<B>) -> Result<()> {
        let state = self.layer_mut(layer)?;
        ops::check_like("conv", &conv, &state.conv)?;
        state.conv = conv;
        Ok(())
    }

    /// Replaces one layer's SSM state.
    ///
    /// # Errors
    ///
    /// When there is no such layer or the shape or type is another.
    pub fn set_ssm(&mut self, layer: usize, ssm: Tensor<B>) -> Result<()> {
        let state = self.layer_mut(layer)?;
        ops::check_like("ssm", &ssm, &state.ssm)?;
        state.ssm = ssm;
        Ok(())
    }

    fn layer_mut(&mut self, layer: usize) -> Result<&mut MixerState<B>> {
        let count = self.layers.len();
        self.layers.get_mut(layer).ok_or_else(|| Error::Argument {
            name: "layer",
            reason: format!("expected less than {count}, found {layer}"),
        })
    }
}

/// The tokens to run one sequence through, and its state.
#[derive(Debug)]
pub struct Run<'a, B: Backend> {
    /// What comes next; at least one token when its logits are asked for.
    pub tokens: &'a [u32],
    /// What came before; moved on by the call.
    pub state: &'a mut State<B>,
}

/// Which rows of logits a forward computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logits {
    /// The last token's of each run: `[runs, V]`.
    Last,
    /// Every token's: `[T, V]`. Takes 4 V bytes of memory for each token.
    All,
    /// None: `[0, V]`.
    None,
}

/// A model's weights. They never change: many sequences may use them at once.
pub struct Mamba2<B: Backend> {
    config: Config,
    client: B::Client,
    /// `[V, d_model]`
    embeddings: Weight<B>,
    layers: Vec<Layer<B>>,
    norm_f: RmsNorm<B>,
    /// `[V, d_model]`; `None` when the embedding serves
    lm_head: Option<Linear<B>>,
}

impl<B: Backend> Mamba2<B> {
    /// Takes the weights of `checkpoint`, where they lie.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] when the checkpoint's tensors are not those of the configuration.
    pub fn load(config: Config, mut checkpoint: Checkpoint, client: B::Client) -> Result<Self> {
        let tied = config.adopt(&mut checkpoint)?;
        let params = Params::<B>::new(&checkpoint, &client);
        let backbone = params.under("backbone");
        let layers = (0..config.n_layer).map(|layer| {
            let params = backbone.under("layers").under(&layer.to_string());
            Ok(Layer {
                norm: RmsNorm::load(&params.under("norm"), config.norm_eps)?,
                mixer: Mamba2Mixer::load(&config.mixer, &params.under("mixer"))?,
            })
        });
        Ok(Self {
            embeddings: backbone.under("embeddings").weight("weight")?,
            layers: layers.collect::<Result<_>>()?,
            norm_f: RmsNorm::load(&backbone.under("norm_f"), config.norm_eps)?,
            lm_head: (!tied).then(|| Linear::load(&params.under("lm_head"), false)).transpose()?,
            client,
            config,
        })
    }

    /// A model of random weights made in memory, for measuring: the same for the same sizes.
    ///
    /// Matrices are of `dtype`; everything that is small is f32.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a type that weights cannot have.
    pub fn synthetic(config: Config, dtype: Dtype, client: B::Client) -> Result<Self> {
        config.check().map_err(|(field, reason)| Error::Config {
            path: "synthetic".into(),
            field: field.into(),
            reason,
        })?;
        let with_head = config.tie_embeddings == Some(false);
        let tensors = config.tensors(config.padded_vocab(), with_head);
        let checkpoint = synthetic::checkpoint(&tensors, dtype)?;
        Self::load(config, checkpoint, client)
    }

    /// Sizes of the model.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// V, the rows of the embedding: the width of logits.
    #[must_use]
    pub fn vocab_rows(&self) -> usize {
        self.embeddings.shape()[0]
    }

    /// Ids below this are tokens; rows from here on are padding of the weights.
    #[must_use]
    pub fn vocab_limit(&self) -> usize {
        self.config.vocab_size.min(self.vocab_rows())
    }

    /// Parameters in all, and without the embedding and the head.
    #[must_use]
    pub fn parameters(&self) -> (usize, usize) {
        let tensors = self.config.tensors(self.vocab_rows(), self.lm_head.is_some());
        let count = |(_, shape): (&str, &[usize])| shape.iter().product::<usize>();
        let total = tensors.iter().map(count).sum();
        let tables = 1 + usize::from(self.lm_head.is_some());
        (total, total - tables * self.vocab_rows() * self.config.mixer.d_model)
    }

    /// Bytes of weights that one token's forward reads.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        let head = self.lm_head.as_ref().map_or(&self.embeddings, |head| head.weight());
        self.layers.iter().map(|l| l.mixer.weight_bytes()).sum::<usize>() + head.size_in_bytes()
    }

    /// The state of a sequence that has seen nothing.
    ///
    /// # Errors
    ///
    /// When memory is short.
    pub fn new_state(&self) -> Result<State<B>> {
        let layer = |_| MixerState::new(&self.config.mixer, &self.client);
        Ok(State {
            layers: (0..self.config.n_layer).map(layer).collect::<Result<_>>()?,
            position: 0,
        })
    }

    /// Runs sequences through the model: prompts, single tokens, pieces of either, all in one call.
    ///
    /// Each run's logits and state are what they would be alone. Long runs are computed piece by
    /// piece, so memory does not grow with their length.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] for a token that the embedding lacks or a run without tokens whose logits
    /// are asked for; [`Error::Shape`] for another model's state. States are then as they were. When
    /// memory runs out in the middle, states are not to be used any more.
    ///
    /// ```
    /// use boostr::models::mamba2::{Config, Logits, Mamba2, Run};
    /// use boostr::{backend, checkpoint::{ConfigFile, Dtype}};
    ///
    /// let config = Config::read(&ConfigFile::parse("config.json", r#"{
    ///     "model_type": "mamba2", "hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4,
    ///     "n_groups": 1, "num_hidden_layers": 1, "vocab_size": 32
    /// }"#)?)?;
    /// let model = Mamba2::<backend::Cpu>::synthetic(config, Dtype::F32, backend::cpu())?;
    /// let mut state = model.new_state()?;
    /// let mut run = [Run { tokens: &[5, 17, 3], state: &mut state }];
    /// let logits = model.forward(&mut run, Logits::Last)?;
    /// assert_eq!(logits.shape(), [1, model.vocab_rows()]);
    /// assert_eq!(state.position(), 3);
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn forward(&self, runs: &mut [Run<'_, B>], logits: Logits) -> Result<Tensor<B>> {
        self.check(runs, logits)?;
        let mut done = vec![0; runs.len()];
        let mut hidden = vec![Vec::new(); runs.len()];
        loop {
            let pass = next_pass(runs, &done);
            if pass.is_empty() {
                break;
            }
            let h = self.pass(runs, &done, &pass)?; // [T, d_model]
            let mut first = 0;
            for &(run, len) in &pass {
                done[run] += len;
                let finished = done[run] == runs[run].tokens.len();
                match logits {
                    Logits::Last if finished => {
                        hidden[run].push(self.client.select_rows(&h, &[first + len - 1])?);
                    }
                    Logits::All => {
                        let rows: Vec<usize> = (first..first + len).collect();
                        hidden[run].push(self.client.select_rows(&h, &rows)?);
                    }
                    _ => {}
                }
                first += len;
            }
        }
        let rows: Vec<Tensor<B>> = hidden.into_iter().flatten().collect();
        self.head(&rows)
    }

    fn check(&self, runs: &[Run<'_, B>], logits: Logits) -> Result<()> {
        let [conv, ssm] = MixerState::<B>::shapes(&self.config.mixer);
        for run in runs {
            if run.tokens.is_empty() && logits == Logits::Last {
                let reason = "expected at least one token in each run, found none".into();
                return Err(Error::Argument { name: "tokens", reason });
            }
            let rows = self.vocab_rows();
            if let Some(id) = run.tokens.iter().find(|&&id| id as usize >= rows) {
                let reason = format!("token id {id} is not below the vocabulary's {rows} rows");
                return Err(Error::Argument { name: "tokens", reason });
            }
            if run.state.layers.len() != self.layers.len() {
                let (expected, got) = (vec![self.layers.len()], vec![run.state.layers.len()]);
                return Err(Error::Shape { name: "state layers".into(), expected, got });
            }
            for layer in &run.state.layers {
                ops::expect("state conv", &layer.conv, &conv)?;
                ops::expect("state ssm", &layer.ssm, &ssm)?;
            }
        }
        Ok(())
    }

    /// One pass of pieces `(run, length)` through all layers.
    fn pass(
        &self,
        runs: &mut [Run<'_, B>],
        done: &[usize],
        pass: &[(usize, usize)],
    ) -> Result<Tensor<B>> {
        let client = &self.client;
        let ids: Vec<u32> = pass
            .iter()
            .flat_map(|&(run, len)| &runs[run].tokens[done[run]..done[run] + len])
            .copied()
            .collect();
        let lengths: Vec<usize> = pass.iter().map(|&(_, len)| len).collect();
        let mut states: Vec<&mut State<B>> = runs
            .iter_mut()
            .enumerate()
            .filter(|(i, _)| pass.iter().any(|(run, _)| run == i))
            .map(|(_, run)| &mut *run.state)
            .collect();

        let mut h = client.embedding(&self.embeddings, &ids)?; // [T, d_model], f32 throughout
        for (i, layer) in self.layers.iter().enumerate() {
            let mut states: Vec<_> = states.iter_mut().map(|s| &mut s.layers[i]).collect();
            let u = layer.norm.forward(client, &h)?;
            h = layer.mixer.forward(client, &u, h, &lengths, &mut states)?;
        }
        for (state, len) in states.into_iter().zip(lengths) {
            state.position += len;
        }
        Ok(h)
    }

    /// Logits of the rows of all `hidden` states.
    fn head(&self, hidden: &[Tensor<B>]) -> Result<Tensor<B>> {
        let client = &self.client;
        let h = match hidden {
            [] => return ops::zeros(client, &[0, self.vocab_rows()]),
            [one] => one.clone(),
            many => ops::concat_rows(client, many)?,
        };
        let h = self.norm_f.forward(client, &h)?;
        match &self.lm_head {
            Some(head) => head.forward(client, &h),
            None => client.linear(&h, &self.embeddings, None, None),
        }
    }
}

/// The next piece of each run that is not done, as `(run, length)` in the order of runs.
///
/// Pieces end at multiples of `PIECE` of the sequence's own positions: where a run is cut depends on
/// nothing but itself.
fn next_pass<B: Backend>(runs: &[Run<'_, B>], done: &[usize]) -> Vec<(usize, usize)> {
    let mut rows = 0;
    let mut pass = Vec::new();
    for (i, (run, &done)) in runs.iter().zip(done).enumerate() {
        let len = (run.tokens.len() - done).min(PIECE - run.state.position % PIECE);
        if len > 0 && (pass.is_empty() || rows + len <= MAX_ROWS) {
            rows += len;
            pass.push((i, len));
        }
    }
    pass
}

/// A head that is stored although it is tied must be the embedding.
fn check_tied(checkpoint: &Checkpoint) -> Result<()> {
    let [head, embedding] =
        ["lm_head.weight", "backbone.embeddings.weight"].map(|name| checkpoint.get(name));
    if let (Some(head), Some(embedding)) = (head, embedding)
        && (head.dtype != embedding.dtype || *head.data != *embedding.data)
    {
        let reason = "the head is tied by the configuration, but `lm_head.weight` is not equal to \
                      `backbone.embeddings.weight`: set tie_word_embeddings to false, or remove one"
            .into();
        return Err(Error::Tensors { path: checkpoint.path().to_path_buf(), reason });
    }
    Ok(())
}

// Layouts of files

impl Config {
    /// Gives the tensors of any supported layout transformers' names and shapes, once they are found to
    /// be all there; returns whether the embedding is the head.
    ///
    /// What stays different is GGUF's `A`, which is `-exp(A_log)`.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] when the tensors are not those of the configuration, [`Error::Config`] when
    /// the configuration is impossible.
    pub fn adopt(&self, checkpoint: &mut Checkpoint) -> Result<bool> {
        self.check().map_err(|(field, reason)| Error::Config {
            path: checkpoint.path().to_path_buf(),
            field: field.into(),
            reason,
        })?;
        let is_gguf = checkpoint.gguf().is_some();
        if !is_gguf {
            checkpoint.rename(hf_name)?;
        }
        let [embedding, head] = if is_gguf {
            ["token_embd.weight", "output.weight"]
        } else {
            ["backbone.embeddings.weight", "lm_head.weight"]
        };
        let rows = match checkpoint.get(embedding).map(|entry| &entry.shape[..]) {
            Some(&[rows, _]) if rows >= self.vocab_size => rows,
            _ => self.padded_vocab(),
        };
        let with_head = checkpoint.get(head).is_some() || self.tie_embeddings == Some(false);
        if let Some(metadata) = checkpoint.gguf() {
            let tokens = metadata.array_len(TOKENS)?.unwrap_or(rows);
            if tokens != rows {
                let reason = format!("{tokens} tokens, but `{embedding}` has {rows} rows");
                return Err(metadata.error(TOKENS, reason));
            }
            let expected = self.gguf_tensors(rows, with_head);
            let without_ones = |shape: &[usize]| -> Vec<usize> {
                shape.iter().copied().filter(|&dim| dim != 1).collect()
            };
            for (name, shape) in expected.iter() {
                let entry = checkpoint.get(name);
                if entry.is_some_and(|e| without_ones(&e.shape) == without_ones(shape)) {
                    checkpoint.reshape(name, shape)?;
                }
            }
            expected.check(checkpoint)?;
            checkpoint.rename(|name| renamed(name, |(gguf, hf)| (gguf, hf)))?;
            for (name, shape) in self.tensors(rows, with_head).iter() {
                checkpoint.reshape(&name.replace("A_log", "A"), shape)?;
            }
        } else {
            self.tensors(rows, with_head).check(checkpoint)?;
        }
        let tied = self.tie_embeddings.unwrap_or(!with_head);
        if with_head && tied {
            check_tied(checkpoint)?;
        }
        Ok(tied)
    }

    /// The tensors of a GGUF file: [`Config::tensors`] with GGUF's names and shapes.
    #[must_use]
    pub fn gguf_tensors(&self, rows: usize, with_head: bool) -> Tensors {
        let mut tensors = Tensors::default();
        for (name, shape) in self.tensors(rows, with_head).iter() {
            let (name, shape) = self.gguf_tensor(name, shape);
            tensors.add(name, &shape);
        }
        tensors
    }

    /// Name and shape in GGUF of a tensor of [`Config::tensors`].
    #[must_use]
    pub fn gguf_tensor(&self, name: &str, shape: &[usize]) -> (String, Vec<usize>) {
        let name = name.replace("A_log", "A");
        let shape = match (name.rsplit_once("mixer.").map(|(_, rest)| rest), shape) {
            (Some("conv1d.weight"), &[channels, _, taps]) => vec![channels, taps],
            (Some("A" | "D"), &[nheads]) => vec![nheads, 1],
            (Some("norm.weight"), &[width]) => {
                vec![self.mixer.ngroups, width / self.mixer.ngroups]
            }
            _ => shape.to_vec(),
        };
        (renamed(&name, |(gguf, hf)| (hf, gguf)).unwrap_or(name), shape)
    }

    /// Reads the metadata of a GGUF file.
    ///
    /// Tokens of type unused at the end of the vocabulary are padding: never sampled.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] that names file and key, [`Error::Unsupported`] for another architecture.
    pub fn read_gguf(metadata: &Metadata) -> Result<Self> {
        let arch = metadata.required(ARCHITECTURE, metadata.text(ARCHITECTURE)?)?;
        if arch != "mamba2" {
            let also = if arch == "mamba" { ", which is Mamba-1," } else { "" };
            let what = format!(
                "architecture `{}`{also} in `{}` (supported: mamba2)",
                arch.escape_debug(),
                metadata.path().display()
            );
            return Err(Error::Unsupported { what });
        }
        let size = |key| metadata.required_usize(key, 1..=MAX_SIZE);
        let (d_inner, nheads) = (size(keys::INNER_SIZE)?, size(keys::TIME_STEP_RANK)?);
        if !d_inner.is_multiple_of(nheads) {
            let reason = format!("{nheads} heads do not divide {d_inner} channels");
            return Err(metadata.error(keys::TIME_STEP_RANK, reason));
        }
        let eps = metadata.float(keys::NORM_EPS, f32::MIN_POSITIVE..=1.0)?.unwrap_or(1e-5);
        let config = Self {
            n_layer: metadata.required_usize(keys::BLOCK_COUNT, 1..=10_000)?,
            vocab_size: vocab_size(metadata)?,
            tie_embeddings: None,
            norm_eps: eps,
            pad_vocab_size_multiple: 1,
            mixer: MixerConfig {
                d_model: size(keys::EMBEDDING_LENGTH)?,
                nheads,
                headdim: d_inner / nheads,
                ngroups: size(keys::GROUP_COUNT)?,
                d_state: size(keys::STATE_SIZE)?,
                d_conv: size(keys::CONV_KERNEL)?,
                bias: false,
                conv_bias: true,
                dt_limit: (0.0, f32::INFINITY),
                norm_before_gate: false,
                norm_eps: eps,
            },
        };
        config.check().map_err(|(field, reason)| metadata.error(field, reason))?;
        Ok(config)
    }

    /// Writes the metadata of a GGUF file, all but the tokenizer's; the embedding has `rows` rows.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for what GGUF has no key for.
    pub fn write_gguf(&self, rows: usize, metadata: &mut Metadata) -> Result<()> {
        let mixer = &self.mixer;
        let lacking = [
            (mixer.bias, "biases of the projections"),
            (!mixer.conv_bias, "convolutions without a bias"),
            (mixer.dt_limit != (0.0, f32::INFINITY), "limits of the steps"),
            (mixer.norm_before_gate, "norms before the gate"),
        ];
        if let Some((_, what)) = lacking.iter().find(|(is_there, _)| *is_there) {
            let what = format!("{what} in GGUF, whose mamba2 has no way to say so");
            return Err(Error::Unsupported { what });
        }
        metadata.set(ARCHITECTURE, "mamba2");
        for (key, size) in [
            (keys::CONTEXT_LENGTH, 1 << 20), // as llama.cpp writes: the state has no limit
            (keys::EMBEDDING_LENGTH, mixer.d_model),
            (keys::FEED_FORWARD_LENGTH, 0),
            (keys::HEAD_COUNT, 0),
            (keys::BLOCK_COUNT, self.n_layer),
            (keys::CONV_KERNEL, mixer.d_conv),
            (keys::INNER_SIZE, mixer.d_inner()),
            (keys::STATE_SIZE, mixer.d_state),
            (keys::TIME_STEP_RANK, mixer.nheads),
            (keys::GROUP_COUNT, mixer.ngroups),
            (keys::VOCAB_SIZE, rows),
        ] {
            metadata.set(key, size as u32);
        }
        metadata.set(keys::NORM_EPS, mixer.norm_eps);
        Ok(())
    }

    /// The `config.json` that transformers reads; the embedding has `rows` rows.
    #[must_use]
    pub fn to_json(&self, rows: usize, tied: bool) -> serde_json::Value {
        let mixer = &self.mixer;
        let high = match mixer.dt_limit.1 {
            high if high.is_finite() => serde_json::json!(high),
            _ => serde_json::json!({ "__float__": "Infinity" }),
        };
        serde_json::json!({
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "hidden_size": mixer.d_model,
            "num_hidden_layers": self.n_layer,
            "num_heads": mixer.nheads,
            "head_dim": mixer.headdim,
            "expand": mixer.d_inner() / mixer.d_model,
            "n_groups": mixer.ngroups,
            "state_size": mixer.d_state,
            "conv_kernel": mixer.d_conv,
            "use_bias": mixer.bias,
            "use_conv_bias": mixer.conv_bias,
            "hidden_act": "silu",
            "layer_norm_epsilon": shortest(mixer.norm_eps),
            "residual_in_fp32": true,
            "rms_norm": true,
            "time_step_limit": [mixer.dt_limit.0, high],
            "norm_before_gate": mixer.norm_before_gate,
            "tie_word_embeddings": tied,
            "vocab_size": rows,
        })
    }
}

/// The double that people write for this float: 1e-5, not 9.999999747378752e-6.
fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or_else(|_| f64::from(x))
}

const ARCHITECTURE: &str = "general.architecture";
const TOKENS: &str = "tokenizer.ggml.tokens";

/// Keys of GGUF metadata.
mod keys {
    pub(super) const CONTEXT_LENGTH: &str = "mamba2.context_length";
    pub(super) const EMBEDDING_LENGTH: &str = "mamba2.embedding_length";
    pub(super) const FEED_FORWARD_LENGTH: &str = "mamba2.feed_forward_length";
    pub(super) const HEAD_COUNT: &str = "mamba2.attention.head_count";
    pub(super) const BLOCK_COUNT: &str = "mamba2.block_count";
    pub(super) const VOCAB_SIZE: &str = "mamba2.vocab_size";
    pub(super) const NORM_EPS: &str = "mamba2.attention.layer_norm_rms_epsilon";
    pub(super) const CONV_KERNEL: &str = "mamba2.ssm.conv_kernel";
    pub(super) const INNER_SIZE: &str = "mamba2.ssm.inner_size";
    pub(super) const STATE_SIZE: &str = "mamba2.ssm.state_size";
    /// The number of heads, for Mamba-2.
    pub(super) const TIME_STEP_RANK: &str = "mamba2.ssm.time_step_rank";
    pub(super) const GROUP_COUNT: &str = "mamba2.ssm.group_count";
}

/// Ids below this are tokens, by a GGUF file's list of tokens or, when it has none, its size.
fn vocab_size(metadata: &Metadata) -> Result<usize> {
    /// A token that only fills up the table.
    const UNUSED: i64 = 5;
    let Some(tokens) = metadata.array_len(TOKENS)? else {
        return metadata.required_usize(keys::VOCAB_SIZE, 1..=MAX_SIZE);
    };
    let types = metadata.ints("tokenizer.ggml.token_type")?.unwrap_or_default();
    let unused = types.iter().rev().take_while(|&&kind| kind == UNUSED).count();
    Ok(if types.len() == tokens { tokens - unused } else { tokens })
}

/// Names of other dialects in transformers' names:
///
/// | dialect | name | here |
/// |---|---|---|
/// | Codestral's release | `model.backbone.*`, `model.lm_head.*` | without `model.` |
/// | saved again by a newer transformers | `model.layers.*`, `model.norm_f.*` | `backbone.*` |
/// | mamba_ssm, older transformers | `backbone.embedding.weight` | `backbone.embeddings.weight` |
fn hf_name(name: &str) -> Option<String> {
    let new = match name.strip_prefix("model.") {
        Some(rest) if rest.starts_with("backbone.") || rest.starts_with("lm_head.") => rest.into(),
        Some(rest) => format!("backbone.{rest}"),
        None => name.to_string(),
    };
    let new = match new.as_str() {
        "backbone.embedding.weight" => "backbone.embeddings.weight".into(),
        _ => new,
    };
    (new != name).then_some(new)
}

/// GGUF's names, and transformers'; `#` is the number of a layer. `A` is `-exp(A_log)`.
const GGUF_NAMES: [(&str, &str); 12] = [
    ("token_embd.weight", "backbone.embeddings.weight"),
    ("output_norm.weight", "backbone.norm_f.weight"),
    ("output.weight", "lm_head.weight"),
    ("blk.#.attn_norm.weight", "backbone.layers.#.norm.weight"),
    ("blk.#.ssm_in.weight", "backbone.layers.#.mixer.in_proj.weight"),
    ("blk.#.ssm_conv1d.weight", "backbone.layers.#.mixer.conv1d.weight"),
    ("blk.#.ssm_conv1d.bias", "backbone.layers.#.mixer.conv1d.bias"),
    ("blk.#.ssm_dt.bias", "backbone.layers.#.mixer.dt_bias"),
    ("blk.#.ssm_a", "backbone.layers.#.mixer.A"),
    ("blk.#.ssm_d", "backbone.layers.#.mixer.D"),
    ("blk.#.ssm_norm.weight", "backbone.layers.#.mixer.norm.weight"),
    ("blk.#.ssm_out.weight", "backbone.layers.#.mixer.out_proj.weight"),
];

/// `name` in the other column of [`GGUF_NAMES`]; `of` takes a row to `(this column, the other)`.
fn renamed(
    name: &str,
    of: fn((&'static str, &'static str)) -> (&'static str, &'static str),
) -> Option<String> {
    GGUF_NAMES.into_iter().map(of).find_map(|(this, other)| {
        let Some((before, after)) = this.split_once('#') else {
            return (name == this).then(|| other.to_owned());
        };
        let layer = name.strip_prefix(before)?.strip_suffix(after)?;
        let is_number = !layer.is_empty() && layer.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| other.replace('#', layer))
    })
}
