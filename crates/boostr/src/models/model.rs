//! The frame of every family: ids to rows, pieces of runs through the layers, rows to logits.
//!
//! ```text
//! ids ─ embeddings ─ h ─ layers of the family ─ norm ─ head ─ logits
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;

use super::fingerprint::Fingerprint;
use super::{Config, Family, Frame, State};
use crate::backend::{Backend, Tensor, Weight};
use crate::checkpoint::{Checkpoint, Dtype};
use crate::error::{Error, Result};
use crate::nn::{
    Batch, Kept, Layer, Layout, Linear, Packs, Params, RmsNorm, SharedWeights, Slot, Stored,
    synthetic,
};
use crate::ops::{self, ActivationOps, AttentionOps, Client, KvType, LinearOps};
use crate::threads::Threads;

/// A forward computes so many tokens of a run at once, so that its memory is bounded.
pub const PIECE: usize = 512;
/// Rows that a forward computes at once.
const MAX_ROWS: usize = 2048;

/// A model is its own, so that what asks for one takes it bare or as part of something.
impl<B: Backend> AsRef<Self> for Model<B> {
    fn as_ref(&self) -> &Self {
        self
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

/// How long a sequence may be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Context {
    /// As long as the model was made for, where its attention keeps all tokens.
    #[default]
    Model,
    /// So many tokens.
    Tokens(usize),
    /// As long as memory lasts.
    Unlimited,
}

/// A model's weights. They never change: many sequences may use them at once.
pub struct Model<B: Backend> {
    config: Config,
    frame: Frame,
    /// What a sequence remembers of each layer.
    slots: Vec<Arc<[Slot]>>,
    client: B::Client,
    /// `[V, d_model]`
    embeddings: Weight<B>,
    layers: Vec<Arc<Layer<B>>>,
    norm: RmsNorm<B>,
    /// `[V, d_model]`; `None` when the embedding serves
    head: Option<Linear<B>>,
    precise_head: bool,
    kv_type: KvType,
    context: Context,
    threads: Option<Threads>,
    fingerprint: Option<Fingerprint>,
    placed: [usize; 2],
    packs: Option<Arc<Packs>>,
}

impl<B: Backend> Model<B> {
    /// Takes the weights of `checkpoint`, where they lie.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] when the checkpoint's tensors are not those of the configuration.
    pub fn load(
        config: impl Into<Config>,
        mut checkpoint: Checkpoint,
        client: B::Client,
    ) -> Result<Self> {
        let config = config.into();
        let tied = config.prepare(&mut checkpoint)?;
        Self::from_parameters(config, &checkpoint, tied, client)
    }

    /// Takes weights that have the model's own names ([`Config::prepare`]), `tied` where the embedding is the
    /// head.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] when one is missing or of a type that it cannot have.
    pub fn from_parameters(
        config: impl Into<Config>,
        checkpoint: &Checkpoint,
        tied: bool,
        client: B::Client,
    ) -> Result<Self> {
        Self::sharing(config.into(), checkpoint, tied, client, (None, None))
    }

    /// The same; weights that are in `shared` are taken from there, others put there. Experts that are in a file of
    /// packed ones are taken from that.
    pub(crate) fn sharing(
        config: Config,
        checkpoint: &Checkpoint,
        tied: bool,
        client: B::Client,
        (shared, packs): (Option<&SharedWeights<B>>, Option<Arc<Packs>>),
    ) -> Result<Self> {
        let fingerprint = Fingerprint::new(&config, checkpoint, tied);
        let model = Self::of_params(config, checkpoint, tied, client, (shared, packs.as_deref()))?;
        Ok(Self { fingerprint: Some(fingerprint), packs, ..model })
    }

    /// The same without a fingerprint, as for weights that are borrowed to be trained.
    ///
    /// # Errors
    ///
    /// As [`from_parameters`](Self::from_parameters).
    pub(crate) fn of_params(
        config: Config,
        checkpoint: &Checkpoint,
        tied: bool,
        client: B::Client,
        (shared, packs): (Option<&SharedWeights<B>>, Option<&Packs>),
    ) -> Result<Self> {
        let params = Params::<B>::new(checkpoint, &client).sharing(shared).packed_in(packs);
        let frame = config.family().frame();
        let specs = config.family().layers();
        let slots: Vec<Arc<[Slot]>> = specs.iter().map(|layer| layer.slots().into()).collect();
        // Outliers of the stream, which attention makes, would round the rest of a row away.
        let precise_head = slots.iter().any(|slots| slots.iter().any(Slot::grows));
        let embeddings = params.under(frame.names.embeddings);
        let rows = embeddings.shape("weight")?.first().copied().unwrap_or(0);
        let table = [rows, frame.d_model];
        let head = (!tied).then(|| {
            let head = Linear::load(&params.under(frame.names.head), table, false)?;
            Ok::<_, Error>(if precise_head { head.precise() } else { head })
        });
        Ok(Self {
            slots,
            precise_head,
            embeddings: embeddings.weight("weight", table)?,
            layers: config.load(&params)?.into_iter().map(Arc::new).collect(),
            norm: frame.load_norm(&params)?,
            head: head.transpose()?,
            kv_type: KvType::F32,
            context: Context::Model,
            threads: None,
            fingerprint: None,
            placed: params.placed(),
            packs: None,
            client,
            config,
            frame,
        })
    }

    /// A model of random weights made in memory, for measuring: the same for the same sizes.
    ///
    /// Matrices are of `dtype`; everything that is small is f32.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a type that weights cannot have.
    pub fn synthetic(config: impl Into<Config>, dtype: Dtype, client: B::Client) -> Result<Self> {
        let config = config.into();
        let [layout, _] = layouts(&config)?;
        Self::load(config, synthetic::checkpoint(&layout.tensors(), dtype)?, client)
    }

    /// The same; `types` says which type a tensor has by its name and shape in GGUF, or in a folder for families that
    /// GGUF has no architecture for.
    ///
    /// # Errors
    ///
    /// As [`synthetic`](Self::synthetic).
    pub fn synthetic_as(
        config: impl Into<Config>,
        types: impl Fn(&str, &[usize]) -> Dtype,
        client: B::Client,
    ) -> Result<Self> {
        let config = config.into();
        let [layout, gguf] = layouts(&config)?;
        let known = gguf.by_parameter();
        let of = |stored: &Stored| {
            let part = stored.parts.first().and_then(|part| known.get(&*part.name)).copied();
            let (name, shape) = part.unwrap_or((&stored.name, &stored.shape));
            (stored.name.clone(), types(name, shape))
        };
        let dtypes: BTreeMap<String, Dtype> = layout.0.iter().map(of).collect();
        let dtype = |name: &str, _: &[usize]| dtypes.get(name).copied().unwrap_or(Dtype::F32);
        let checkpoint = synthetic::checkpoint_as(&layout.tensors(), dtype)?;
        Self::load(config, checkpoint, client)
    }

    /// The same model, whose new states keep keys and values as `kind`.
    ///
    /// Less than f32 halves the growing part of a state or more, at some loss.
    #[must_use]
    pub fn with_kv_type(mut self, kind: KvType) -> Self {
        self.kv_type = kind;
        self
    }

    /// The same model, whose forwards run on `threads`; on the caller's rayon pool when `None`.
    #[must_use]
    pub fn with_threads(mut self, threads: Option<Threads>) -> Self {
        self.threads = threads;
        self
    }

    /// The threads that its forwards run on, if they are its own.
    #[must_use]
    pub fn threads(&self) -> Option<&Threads> {
        self.threads.as_ref()
    }

    /// Runs `work` on the model's threads, kept awake between its steps.
    pub(super) fn awake<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        Threads::install_on(self.threads.as_ref(), || boostr_kernels::awake(work))
    }

    /// What its new states keep keys and values as.
    #[must_use]
    pub fn kv_type(&self) -> KvType {
        self.kv_type
    }

    /// Sizes of the model.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Tokens of the longest context that the model was made for, if its file says so:
    /// [`Config::trained_length`].
    #[must_use]
    pub fn trained_length(&self) -> Option<usize> {
        self.config.trained_length()
    }

    /// The same model, in which a sequence may be as long as `context` says.
    #[must_use]
    pub fn with_context(mut self, context: Context) -> Self {
        self.set_context(context);
        self
    }

    /// From now on a sequence may be as long as `context` says.
    pub fn set_context(&mut self, context: Context) {
        self.context = context;
    }

    /// Tokens that a sequence may have, if there is a limit: [`Config::context_limit`] unless another was
    /// [set](Self::with_context). An engine holds requests to it.
    #[must_use]
    pub fn context_limit(&self) -> Option<usize> {
        match self.context {
            Context::Model => self.config.context_limit(),
            Context::Tokens(tokens) => Some(tokens),
            Context::Unlimited => None,
        }
    }

    /// How many tokens may follow a sequence of so many.
    ///
    /// # Errors
    ///
    /// [`Error::Context`] if it is longer than the [limit](Self::context_limit) itself.
    pub fn room_after(&self, tokens: usize) -> Result<usize> {
        let Some(limit) = self.context_limit() else { return Ok(usize::MAX) };
        limit.checked_sub(tokens).ok_or(Error::Context { tokens, limit })
    }

    /// What the family says of itself.
    #[must_use]
    pub fn family(&self) -> &dyn Family {
        self.config.family()
    }

    /// Whether it has a head of its own that its configuration takes for the embedding.
    pub(crate) fn has_head_under_tie(&self) -> bool {
        self.head.is_some() && self.frame.tie_embeddings == Some(true)
    }

    /// V, the rows of the embedding: the width of logits.
    #[must_use]
    pub fn vocab_rows(&self) -> usize {
        self.embeddings.shape()[0]
    }

    /// Width of the hidden states.
    #[must_use]
    pub fn width(&self) -> usize {
        self.frame.d_model
    }

    /// Ids below this are tokens; rows from here on are padding of the weights.
    #[must_use]
    pub fn vocab_limit(&self) -> usize {
        self.frame.vocab_size.min(self.vocab_rows())
    }

    /// Parameters in all, and without the embedding and the head.
    #[must_use]
    pub fn parameters(&self) -> (usize, usize) {
        let layout = self.family().hf_layout(self.vocab_rows(), self.head.is_some());
        let tensors = layout.map(|layout| layout.tensors()).unwrap_or_default();
        let count = |(_, shape): (&str, &[usize])| shape.iter().product::<usize>();
        let total = tensors.iter().map(count).sum();
        let tables = 1 + usize::from(self.head.is_some());
        (total, total - tables * self.vocab_rows() * self.frame.d_model)
    }

    /// Bytes of weights that one token's forward reads.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        let head = self.head.as_ref().map_or(&self.embeddings, |head| head.weight());
        self.layers.iter().map(|layer| layer.weight_bytes()).sum::<usize>() + head.size_in_bytes()
    }

    /// Bytes of the matrices that lie in files, which the system reads where they are touched and may give back, and of
    /// those that are in memory.
    #[must_use]
    pub fn placed(&self) -> [usize; 2] {
        self.placed
    }

    /// What runs the model's operations.
    #[must_use]
    pub fn client(&self) -> &B::Client {
        &self.client
    }

    /// Tells this model from others, in 16 hexadecimal digits: the same each time its file is opened, another for
    /// other sizes, options, types, or values of weights. `None` for weights that are being trained.
    ///
    /// Of a matrix two parts are looked at, so one that differs in a few elements may have the same. The first call
    /// reads them.
    #[must_use]
    pub fn fingerprint(&self) -> Option<&str> {
        self.fingerprint.as_ref().map(Fingerprint::text)
    }

    /// Name, length and time of modification of each file with weights, as it was when they were loaded.
    pub(crate) fn files(&self) -> &str {
        self.fingerprint.as_ref().map_or("", Fingerprint::files)
    }

    /// Checks that a state is one for this model.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] or [`Error::Unsupported`] when layers keep something else, [`Error::Argument`] when a
    /// window has forgotten what a layer of this model sees.
    pub fn check_state(&self, state: &State<B>) -> Result<()> {
        state.check(&self.slots)?;
        state.slots().try_for_each(|(_, _, kept)| match kept {
            Kept::Rows(cache) => self.client.check_cache(cache),
            Kept::Tensor(_) => Ok(()),
        })
    }

    /// The state of a sequence that has seen nothing.
    ///
    /// # Errors
    ///
    /// When memory is short.
    pub fn new_state(&self) -> Result<State<B>> {
        State::new(&self.slots, self.kv_type, &self.client)
    }

    /// Runs sequences through the model: prompts, single tokens, pieces of either, all in one call.
    ///
    /// Each run's logits and state are what they would be alone, and however its tokens were shared out among
    /// calls: on the CPU to the bit. Long runs are computed piece by piece, so memory does not grow with their length.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] for a token that the embedding lacks or a run without tokens whose logits
    /// are asked for; [`Error::Shape`] or [`Error::Unsupported`] for another model's state. States are
    /// then as they were. When memory runs out in the middle, states are not to be used any more.
    ///
    /// ```
    /// use boostr::models::{Config, Logits, Model, Run};
    /// use boostr::{backend, checkpoint::{ConfigFile, Dtype}};
    ///
    /// let config = Config::read(&ConfigFile::parse("config.json", r#"{
    ///     "model_type": "mamba2", "hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4,
    ///     "n_groups": 1, "num_hidden_layers": 1, "vocab_size": 32
    /// }"#)?)?;
    /// let model = Model::<backend::Cpu>::synthetic(config, Dtype::F32, backend::cpu())?;
    /// let mut state = model.new_state()?;
    /// let mut run = [Run { tokens: &[5, 17, 3], state: &mut state }];
    /// let logits = model.forward(&mut run, Logits::Last)?;
    /// assert_eq!(logits.shape(), [1, model.vocab_rows()]);
    /// assert_eq!(state.position(), 3);
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn forward(&self, runs: &mut [Run<'_, B>], logits: Logits) -> Result<Tensor<B>> {
        self.check(runs, logits)?;
        let wanted = runs.iter().map(|run| match logits {
            Logits::Last => 1,
            Logits::All => run.tokens.len(),
            Logits::None => 0,
        });
        let wanted: Vec<usize> = wanted.collect();
        self.awake(|| self.compute(runs, &wanted))
    }

    /// The same with the logits of each run's last tokens, as many as `wanted` says of it:
    /// `[sum of wanted, V]`, in the order of runs.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward); [`Error::Argument`] when `wanted` is not one number for each run, or more
    /// than its tokens.
    pub fn forward_wanted(&self, runs: &mut [Run<'_, B>], wanted: &[usize]) -> Result<Tensor<B>> {
        self.check(runs, Logits::None)?;
        let lengths: Vec<usize> = runs.iter().map(|run| run.tokens.len()).collect();
        if wanted.len() != runs.len() || wanted.iter().zip(&lengths).any(|(want, len)| want > len) {
            let reason = format!("expected at most {lengths:?} rows of logits, found {wanted:?}");
            return Err(Error::Argument { name: "wanted", reason });
        }
        self.awake(|| self.compute(runs, wanted))
    }

    /// The normed hidden states of all tokens of the runs: what the head makes logits of. `[T, d_model]`, f32, in
    /// the order of runs.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    ///
    /// ```
    /// # use boostr::models::{Config, Model, Run};
    /// # use boostr::{backend, checkpoint::{ConfigFile, Dtype}};
    /// # let config = Config::read(&ConfigFile::parse("config.json", r#"{
    /// #     "model_type": "mamba2", "hidden_size": 8, "num_heads": 2, "head_dim": 8, "state_size": 4,
    /// #     "n_groups": 1, "num_hidden_layers": 1, "vocab_size": 32
    /// # }"#)?)?;
    /// # let model = Model::<backend::Cpu>::synthetic(config, Dtype::F32, backend::cpu())?;
    /// let mut state = model.new_state()?;
    /// let hidden = model.hidden(&mut [Run { tokens: &[5, 17, 3], state: &mut state }])?;
    /// assert_eq!(hidden.shape(), [3, model.width()]);
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn hidden(&self, runs: &mut [Run<'_, B>]) -> Result<Tensor<B>> {
        self.check(runs, Logits::All)?;
        let all: Vec<usize> = runs.iter().map(|run| run.tokens.len()).collect();
        match self.awake(|| self.normed(runs, &all))? {
            Some(rows) => Ok(rows),
            None => ops::zeros(&self.client, &[0, self.width()]),
        }
    }

    /// The logits of [`forward_wanted`](Self::forward_wanted), and the [hidden](Self::hidden) states of each run's last
    /// tokens, as many as `kept` says: at least as many as are wanted.
    ///
    /// # Errors
    ///
    /// As [`forward_wanted`](Self::forward_wanted).
    pub(crate) fn forward_kept(
        &self,
        runs: &mut [Run<'_, B>],
        wanted: &[usize],
        kept: &[usize],
    ) -> Result<[Tensor<B>; 2]> {
        self.check(runs, Logits::None)?;
        self.awake(|| {
            let Some(hidden) = self.normed(runs, kept)? else {
                let empty = |width| ops::zeros(&self.client, &[0, width]);
                return Ok([empty(self.vocab_rows())?, empty(self.width())?]);
            };
            let mut end = 0;
            let rows = wanted.iter().zip(kept).flat_map(|(&wanted, &kept)| {
                end += kept;
                end - wanted..end
            });
            let rows: Vec<usize> = rows.collect();
            let logits = match rows.len() {
                0 => ops::zeros(&self.client, &[0, self.vocab_rows()])?,
                _ => self.logits(&self.client.select_rows(&hidden, &rows)?)?,
            };
            Ok([logits, hidden])
        })
    }

    fn compute(&self, runs: &mut [Run<'_, B>], wanted: &[usize]) -> Result<Tensor<B>> {
        match self.normed(runs, wanted)? {
            Some(rows) => self.logits(&rows),
            None => ops::zeros(&self.client, &[0, self.vocab_rows()]),
        }
    }

    /// What enters the first layer for each of `ids`, below [`vocab_rows`](Self::vocab_rows): `[T, d_model]`, f32.
    pub(super) fn embed(&self, ids: &[u32]) -> Result<Tensor<B>> {
        let h = self.client.embedding(&self.embeddings, ids)?;
        scaled::<B>(&self.client, h, self.frame.embedding_scale)
    }

    /// The normed hidden states of each run's last tokens, as many as `wanted` says; `None` when that is none.
    fn normed(&self, runs: &mut [Run<'_, B>], wanted: &[usize]) -> Result<Option<Tensor<B>>> {
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
                let unwanted = runs[run].tokens.len() - wanted[run];
                let rows = done[run].saturating_sub(unwanted).min(len);
                if rows > 0 {
                    let rows: Vec<usize> = (first + len - rows..first + len).collect();
                    hidden[run].push(self.client.select_rows(&h, &rows)?);
                }
                first += len;
            }
        }
        let mut rows: Vec<Tensor<B>> = hidden.into_iter().flatten().collect();
        let h = match rows.len() {
            0 => return Ok(None),
            1 => rows.remove(0),
            _ => self.client.concat_rows(&rows)?,
        };
        self.norm.forward(&self.client, &h).map(Some)
    }

    /// What each token of the runs loses on its target, in nats: `-ln p(target)` of the model's prediction
    /// after the token, 0 where the target is [`IGNORE`](ops::IGNORE). Logits of one piece of a vocabulary
    /// are there at a time.
    ///
    /// On a backend that records, gradients are those of the sum over all tokens of weight times loss;
    /// `weights` are 1 where none are given.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward); [`Error::Argument`] when there are not as many targets or weights as
    /// tokens, or a target is no row of the head.
    pub fn losses(
        &self,
        runs: &mut [Run<'_, B>],
        targets: &[&[u32]],
        weights: Option<&[&[f32]]>,
    ) -> Result<Vec<Vec<f32>>> {
        self.check(runs, Logits::All)?;
        let lengths: Vec<usize> = runs.iter().map(|run| run.tokens.len()).collect();
        let is_alike = |of: Vec<usize>| of == lengths;
        if !is_alike(targets.iter().map(|of| of.len()).collect())
            || !weights.is_none_or(|of| is_alike(of.iter().map(|of| of.len()).collect()))
        {
            let reason = format!("expected one for each token of runs of {lengths:?}");
            return Err(Error::Argument { name: "targets", reason });
        }
        self.awake(|| {
            let mut losses = vec![Vec::new(); runs.len()];
            let mut done = vec![0; runs.len()];
            loop {
                let pass = next_pass(runs, &done);
                if pass.is_empty() {
                    return Ok(losses);
                }
                let h = self.pass(runs, &done, &pass)?; // [T, d_model]
                let h = self.norm.forward(&self.client, &h)?;
                let (mut of_rows, mut factors) = (Vec::new(), Vec::new());
                for &(run, len) in &pass {
                    let rows = done[run]..done[run] + len;
                    of_rows.extend_from_slice(&targets[run][rows.clone()]);
                    match weights {
                        Some(weights) => factors.extend_from_slice(&weights[run][rows]),
                        None => factors.resize(of_rows.len(), 1.0),
                    }
                }
                let scale = self.frame.logits_scale;
                let head = self.head.as_ref().map_or(&self.embeddings, |head| head.weight());
                let all = self.client.cross_entropy(
                    &h,
                    head,
                    scale,
                    (&of_rows, &factors),
                    self.precise_head,
                )?;
                let mut all = &ops::to_vec(&all)?[..];
                for &(run, len) in &pass {
                    let (own, rest) = all.split_at(len);
                    losses[run].extend_from_slice(own);
                    done[run] += len;
                    all = rest;
                }
            }
        })
    }

    fn check(&self, runs: &[Run<'_, B>], logits: Logits) -> Result<()> {
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
            self.check_state(run.state)?;
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
        if let Some(packs) = &self.packs {
            packs.look();
        }
        let ids: Vec<u32> = pass
            .iter()
            .flat_map(|&(run, len)| &runs[run].tokens[done[run]..done[run] + len])
            .copied()
            .collect();
        let mut states: Vec<&mut State<B>> = runs
            .iter_mut()
            .enumerate()
            .filter(|(i, _)| pass.iter().any(|(run, _)| run == i))
            .map(|(_, run)| &mut *run.state)
            .collect();
        let mut h = self.embed(&ids)?; // [T, d_model], f32 throughout
        let lengths: Vec<usize> = pass.iter().map(|&(_, len)| len).collect();
        let positions: Vec<usize> = states.iter().map(|state| state.position()).collect();
        let mut batch = Batch::new(&lengths, &positions, h.clone());
        for (i, layer) in self.layers.iter().enumerate() {
            swap(i, &mut batch, &mut states);
            let layer = layer.clone();
            (h, batch) = client.segment((h, batch), move |client, (h, mut batch)| {
                let h = layer.forward(client, h, &mut batch)?;
                Ok((h, batch))
            })?;
            swap(i, &mut batch, &mut states);
        }
        for (state, len) in states.into_iter().zip(lengths) {
            state.set_position(state.position() + len);
        }
        Ok(h)
    }

    /// Logits of [hidden](Self::hidden) states `[T, d_model]`: `[T, V]`.
    ///
    /// # Errors
    ///
    /// When the width disagrees or memory is short.
    pub fn logits(&self, h: &Tensor<B>) -> Result<Tensor<B>> {
        let client = &self.client;
        let logits = match &self.head {
            Some(head) => head.forward(client, h)?,
            None if self.precise_head => client.linear_precise(h, &self.embeddings, None, None)?,
            None => client.linear(h, &self.embeddings, None, None)?,
        };
        scaled::<B>(client, logits, self.frame.logits_scale)
    }
}

/// The tensors of a folder and of a GGUF file of a model that has none; no tensors where GGUF has no architecture.
fn layouts(config: &Config) -> Result<[Layout; 2]> {
    config.check(|field, reason| Error::Config { path: "synthetic".into(), field, reason })?;
    let family = config.family();
    let frame = family.frame();
    let (rows, with_head) = (frame.padded_vocab(), frame.tie_embeddings == Some(false));
    let gguf = family.gguf_layout(rows, with_head).unwrap_or_default();
    Ok([family.hf_layout(rows, with_head)?, gguf])
}

/// Brings in what `states` remember of `layer`, or takes it back to them.
fn swap<B: Backend>(layer: usize, batch: &mut Batch<B>, states: &mut [&mut State<B>]) {
    for (slots, state) in batch.slots_mut().iter_mut().zip(states) {
        state.swap(layer, slots);
    }
}

/// `x` times `factor`.
fn scaled<B: Backend>(client: &B::Client, x: Tensor<B>, factor: f32) -> Result<Tensor<B>> {
    if factor == 1.0 {
        return Ok(x);
    }
    client.add_scaled(ops::zeros(client, x.shape())?, &x, factor)
}

/// The next piece of each run that is not done, as `(run, length)` in the order of runs.
fn next_pass<B: Backend>(runs: &[Run<'_, B>], done: &[usize]) -> Vec<(usize, usize)> {
    let mut rows = 0;
    let mut pass = Vec::new();
    for (i, (run, &done)) in runs.iter().zip(done).enumerate() {
        let len = (run.tokens.len() - done).min(PIECE);
        if len > 0 && (pass.is_empty() || rows + len <= MAX_ROWS) {
            rows += len;
            pass.push((i, len));
        }
    }
    pass
}
