//! A run: a folder in which a model is trained, stopped, and trained on.
//!
//! ```text
//! RUN/config.json, model.safetensors, tokenizer.json, ..   the model as it was when last saved, or its average
//! RUN/step-000500/                                          a checkpoint: that model, the optimizer, the cursor
//! RUN/metrics.jsonl, loss.svg                               what was measured
//! ```

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::data::{Batch, Batches, Cursor, Packing, Pass, TokenFile, Truncate};
use super::lora::LoraConfig;
use super::trainer::Trainer;
use super::{
    AdamWConfig, Checkpoints, Metrics, MetricsLog, Saved, Scale, Schedule, TrainableModel,
    TrainerState, read_metrics, write_loss_svg,
};
use crate::backend::Cpu;
use crate::error::{Error, Result, chain};
use crate::models::Run as Tokens;
use crate::nn::LayerSpec;
use crate::ops::IGNORE;

/// What is trained of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// All parameters.
    Full,
    /// Adapters beside those that stay.
    Lora(LoraConfig),
}

/// How a run goes. The fields are the keys of a configuration file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// Rows of a batch.
    pub batch_size: usize,
    /// Tokens of a row.
    pub seq_len: usize,
    /// Tokens that are run at once; less takes less memory.
    pub tokens_at_once: usize,
    /// A step keeps of each layer only what enters it, and runs the layer again on the way back: less memory
    /// for more time, and the same bits.
    pub checkpoint_layers: bool,
    /// Rows go on from the rows before, with gradients cut there; else documents are packed, each by itself.
    pub carry_state: bool,
    /// What becomes of documents that are longer than a row, where no state is carried.
    pub truncate: Truncate,
    /// Of the parameters and the order of the data.
    pub seed: u64,
    /// Steps between two checkpoints.
    pub save_every: u64,
    /// Checkpoints that are kept.
    pub keep: usize,
    /// Steps between two measurements on the validation data.
    pub eval_every: u64,
    /// Tokens of the validation data that are measured on the way; all at the end.
    pub eval_tokens: usize,
    /// The schedule of the learning rate, and the number of steps.
    pub schedule: Schedule,
    /// How parameters are moved.
    pub optimizer: AdamWConfig,
    /// What is trained.
    pub method: Method,
    /// The model that adapters stand beside.
    pub base: String,
}

impl RunConfig {
    /// Settings for a model that is trained already, which is moved more gently than a new one: the peak of
    /// the learning rate is 5e-5 where all parameters move, and 2e-4 where adapters do.
    ///
    /// ```
    /// use boostr::train::{LoraConfig, Method, RunConfig};
    ///
    /// let config = RunConfig::tuning(Method::Lora(LoraConfig::of_rank(8)));
    /// assert_eq!(config.schedule.lr, 2e-4);
    /// assert_eq!(RunConfig::tuning(Method::Full).schedule.lr, 5e-5);
    /// ```
    #[must_use]
    pub fn tuning(method: Method) -> Self {
        let lr = match method {
            Method::Full => 5e-5,
            Method::Lora(_) => 2e-4,
        };
        Self { schedule: Schedule { lr, ..Schedule::default() }, method, ..Self::default() }
    }

    /// The settings that a checkpoint was made with. What its version did not know is as that version did it.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] naming the checkpoint when they are none.
    pub fn of_checkpoint(saved: &Saved) -> Result<Self> {
        let mut config = saved.state.config.clone();
        if let Some(config) = config.as_object_mut() {
            config.entry("truncate").or_insert_with(|| "anywhere".into());
        }
        serde_json::from_value(config)
            .map_err(|error| Error::format(&saved.path, format!("settings: {error}")))
    }

    fn packing(&self) -> Packing {
        if self.carry_state { Packing::Carried } else { Packing::Documents(self.truncate) }
    }
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            batch_size: 8,
            seq_len: 256,
            tokens_at_once: 2048,
            checkpoint_layers: false,
            carry_state: false,
            truncate: Truncate::Split,
            seed: 0,
            save_every: 500,
            keep: 2,
            eval_every: 250,
            eval_tokens: 32_768,
            schedule: Schedule::default(),
            optimizer: AdamWConfig::default(),
            method: Method::Full,
            base: String::new(),
        }
    }
}

/// Keys of a [`RunConfig`] that may be others when a run goes on. With another number of steps the learning
/// rate follows the schedule of that number from there on.
pub const MAY_CHANGE: [&str; 7] = [
    "save_every",
    "keep",
    "eval_every",
    "eval_tokens",
    "tokens_at_once",
    "checkpoint_layers",
    "schedule.total_steps",
];

/// What happened.
#[derive(Debug)]
pub enum Event<'a> {
    /// A step was made.
    Step(&'a Metrics),
    /// A checkpoint was written.
    Saved(&'a Path),
    /// Something went wrong that does not stop the run.
    Warning(String),
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// All steps were made.
    Done,
    /// The observer stopped it.
    Stopped,
}

/// A loss over a text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Loss {
    /// Sum over the predicted tokens, in nats.
    pub nats: f64,
    /// Predicted tokens.
    pub predicted: usize,
    /// Whether it is of the whole text.
    pub is_whole: bool,
}

impl Loss {
    /// Nats per predicted token.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.nats / self.predicted.max(1) as f64
    }
}

/// A run in its folder. A new model of a text:
///
/// ```
/// use std::ops::ControlFlow;
///
/// use boostr::tokenizer::Tokenizer;
/// use boostr::train::data::{DataFile, Encoder, TokenFile};
/// use boostr::train::{Checkpoints, RunConfig, Schedule, Shape, TrainRun, TrainableModel, bpe};
///
/// # let folder = std::env::temp_dir().join(format!("boostr-doc-run-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// let text = folder.join("text.txt");
/// std::fs::write(&text, "The sea was calm. ".repeat(50))?;
/// let data = [DataFile::new(&text)?];
/// let tokenizer = bpe::train(&data, 270, |_done, _total| {})?;
/// let parsed = Tokenizer::from_bytes("tokenizer.json", tokenizer.as_bytes())?;
/// let end = parsed.id("<|endoftext|>").unwrap_or(0);
/// let encoder = Encoder::new(&parsed, end)?;
/// let tokens = TokenFile::prepare(&folder.join("train.tokens"), &data, &encoder, |_, _| {})?;
///
/// let shape = Shape { d_model: 32, n_layer: 1, d_state: 8, headdim: 16, ..Shape::default() };
/// let config = shape.to_config(parsed.max_id() as usize + 1, end);
/// let model = TrainableModel::new(&config, tokenizer, 0)?;
/// let schedule = Schedule { warmup_steps: 1, total_steps: 3, ..Schedule::default() };
/// let config = RunConfig { batch_size: 2, seq_len: 16, schedule, ..RunConfig::default() };
/// let checkpoints = Checkpoints::open(&folder.join("run"), 2)?;
/// let mut run = TrainRun::new(checkpoints, config, model, tokens, None)?;
/// run.run(&mut |_event| ControlFlow::Continue(()))?;
/// assert_eq!(run.steps(), (3, 3));
/// assert!(folder.join("run/model.safetensors").exists());
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A model that is trained already is tuned, here by adapters:
///
/// ```
/// use std::ops::ControlFlow;
///
/// use boostr::load::{LanguageModel, OpenOptions};
/// use boostr::train::data::TokenFile;
/// use boostr::train::{Checkpoints, LoraConfig, Method, RunConfig, TrainRun, TrainableModel};
/// use boostr::backend;
///
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny");
/// # let folder = std::env::temp_dir().join(format!("boostr-doc-tune-{}", std::process::id()));
/// let options = OpenOptions::default();
/// let lm = LanguageModel::open(path, &options, backend::cpu())?;
/// let documents = [lm.encode("The sea was calm.")?, lm.encode("The wind rose.")?];
/// let data = TokenFile::of_documents(&documents, 0, lm.vocab_limit() as u32)?;
///
/// let mut config = RunConfig::tuning(Method::Lora(LoraConfig::of_rank(8)));
/// config.base = path.into();
/// (config.schedule.warmup_steps, config.schedule.total_steps) = (0, 2);
/// let model = TrainableModel::open(path.as_ref(), &options)?;
/// let checkpoints = Checkpoints::open(&folder, 2)?;
/// let mut run = TrainRun::new(checkpoints, config, model, data, None)?;
/// run.run(&mut |_| ControlFlow::Continue(()))?;
///
/// let tuned = lm.with_adapters(&folder)?;
/// println!("{}", tuned.complete("The sea").max_tokens(8).run()?.text);
/// # std::fs::remove_dir_all(&folder).ok();
/// # Ok::<(), boostr::Error>(())
/// ```
pub struct TrainRun {
    config: RunConfig,
    trainer: Trainer,
    train: TokenFile,
    valid: Option<TokenFile>,
    checkpoints: Checkpoints,
    log: MetricsLog,
    cursor: Option<Cursor>,
    tokens: u64,
    seconds: f64,
    passed_over: u64,
    /// Bytes that the process takes.
    memory: Option<Box<dyn Fn() -> u64 + Send + Sync>>,
}

impl TrainRun {
    /// A new run of `model` in the folder of `checkpoints`, which has none yet.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when there is a run already or a setting is out of range, [`Error::Io`] when the
    /// folder cannot be written.
    pub fn new(
        checkpoints: Checkpoints,
        config: RunConfig,
        mut model: TrainableModel,
        train: TokenFile,
        valid: Option<TokenFile>,
    ) -> Result<Self> {
        let folder = checkpoints.folder();
        if super::has_checkpoints(folder)? {
            let reason = format!(
                "there is a run in `{}`: resume it, or take another folder",
                folder.display()
            );
            return Err(Error::Argument { name: "out", reason });
        }
        match &config.method {
            Method::Full => model.unfreeze(|_| true)?,
            Method::Lora(lora) => model.add_adapters(lora, config.seed)?,
        }
        Batches::new(&train, config.packing(), config.batch_size, config.seq_len, config.seed)?;
        let log = MetricsLog::create(&folder.join("metrics.jsonl"))?;
        Self::with(checkpoints, config, model, (train, valid), log)
    }

    fn with(
        checkpoints: Checkpoints,
        config: RunConfig,
        model: TrainableModel,
        (train, valid): (TokenFile, Option<TokenFile>),
        log: MetricsLog,
    ) -> Result<Self> {
        let checkpoints = checkpoints.keeping(config.keep)?;
        let layers = model.config().family().layers();
        if config.carry_state && layers.iter().any(LayerSpec::grows) {
            let what = "carried states of models with attention: what it keeps grows without end";
            return Err(Error::Unsupported { what: what.into() });
        }
        let trainer = Trainer::new(
            model,
            config.optimizer.clone(),
            config.schedule.clone(),
            config.tokens_at_once,
            config.carry_state,
        )?
        .checkpointing_layers(config.checkpoint_layers);
        Ok(Self {
            config,
            trainer,
            train,
            valid,
            checkpoints,
            log,
            cursor: None,
            tokens: 0,
            seconds: 0.0,
            passed_over: 0,
            memory: None,
        })
    }

    /// Goes on from `saved`, one of `checkpoints`, to the bit as if it had not stopped.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when `config` differs from the run's in more than [`MAY_CHANGE`], has fewer steps than
    /// were made, or the data are others; [`Error::Format`] for a checkpoint that is not whole.
    pub fn resume(
        mut checkpoints: Checkpoints,
        saved: &Saved,
        config: RunConfig,
        mut model: TrainableModel,
        train: TokenFile,
        valid: Option<TokenFile>,
    ) -> Result<Self> {
        let value = to_value(&config)?;
        let own = to_value(&RunConfig::of_checkpoint(saved)?)?;
        saved.check_config_of(&own, &value, &MAY_CHANGE)?;
        let (done, total) = (saved.state.step, config.schedule.total_steps);
        if total < done {
            let reason =
                format!("expected at least the {done} steps that were made, found {total}");
            return Err(Error::Argument { name: "schedule.total_steps", reason });
        }
        let cursor = serde_json::from_value(saved.state.cursor.clone());
        let cursor: Cursor = cursor.map_err(|e| Error::format(&saved.path, e.to_string()))?;
        Batches::new(&train, config.packing(), config.batch_size, config.seq_len, config.seed)?
            .seek(cursor)?;
        match &config.method {
            Method::Full => model.unfreeze(|_| true)?,
            Method::Lora(lora) => {
                model.read_adapters(&saved.path)?;
                model.hold_untargeted(lora);
            }
        }
        checkpoints.forget_after(saved.state.step)?;
        let metrics = checkpoints.folder().join("metrics.jsonl");
        let log = MetricsLog::resume(&metrics, saved.state.step)?;
        let mut run = Self::with(checkpoints, config, model, (train, valid), log)?;
        let (states, own): (Vec<_>, Vec<_>) =
            saved.optimizer()?.into_iter().partition(|tensor| tensor.name.starts_with(CARRIED));
        run.trainer.optimizer_mut().restore(own)?;
        run.trainer.restore_states(&states, CARRIED)?;
        run.cursor = Some(cursor);
        run.tokens = saved.state.tokens;
        run.seconds = saved.state.seconds;
        Ok(run)
    }

    /// The same run; `memory` tells the bytes that the process takes, for [`Metrics::memory`], which else are 0.
    #[must_use]
    pub fn measuring_memory(self, memory: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self { memory: Some(Box::new(memory)), ..self }
    }

    /// The model as it is.
    #[must_use]
    pub fn trainer(&self) -> &Trainer {
        &self.trainer
    }

    /// How it goes.
    #[must_use]
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// Steps made, and to be made in all.
    #[must_use]
    pub fn steps(&self) -> (u64, u64) {
        (self.trainer.steps(), self.config.schedule.total_steps)
    }

    /// Batches in which nothing was to be predicted, since this was made. They count 0: no step is made of them.
    #[must_use]
    pub fn passed_over(&self) -> u64 {
        self.passed_over
    }

    /// Trains until all steps are made or `observe` stops it, and saves.
    ///
    /// # Errors
    ///
    /// When a loss or a gradient is not finite: the last checkpoint is then as it was, nothing is written.
    /// [`Error::Argument`] when no token of the data is to be predicted.
    pub fn run(&mut self, observe: &mut dyn FnMut(&Event<'_>) -> ControlFlow<()>) -> Result<Ended> {
        let packing = self.config.packing();
        let (size, len) = (self.config.batch_size, self.config.seq_len);
        let (_, total) = self.steps();
        let mut speed = Speed::default();
        let mut is_stopped = false;
        while self.trainer.steps() < total && !is_stopped {
            let start = Instant::now();
            // The order of an epoch is made anew where a batch was taken; it is kept by nobody else.
            let mut batches = Batches::new(&self.train, packing, size, len, self.config.seed)?;
            if let Some(cursor) = self.cursor.take() {
                batches.seek(cursor)?;
            }
            loop {
                let began = Instant::now();
                let batch = next(&mut batches, &mut self.trainer, &mut self.passed_over)?;
                let report = self.trainer.step(&batch)?;
                let step = self.trainer.steps();
                self.tokens += report.tokens as u64;
                speed.add(report.tokens, began.elapsed().as_secs_f64());
                let mut metrics = Metrics {
                    step,
                    tokens: self.tokens,
                    seconds: self.seconds + start.elapsed().as_secs_f64(),
                    loss: report.loss,
                    grad_norm: report.grad_norm,
                    lr: report.lr,
                    tokens_per_second: speed.tokens_per_second(),
                    memory: self.memory.as_ref().map_or(0, |memory| memory()),
                    ..Metrics::default()
                };
                let is_last = step >= total;
                if let Some(valid) = &self.valid
                    && (is_last || step.is_multiple_of(self.config.eval_every.max(1)))
                {
                    let most = if is_last { usize::MAX } else { self.config.eval_tokens };
                    let loss = evaluate(self.trainer.model_mut(), valid, most)?;
                    metrics.valid_loss = Some(loss.mean());
                    if loss.is_whole {
                        let bits = loss.nats / std::f64::consts::LN_2;
                        metrics.bits_per_byte = Some(bits / valid.bytes() as f64);
                    }
                }
                if let Err(error) = self.log.append(&metrics) {
                    let _ = observe(&Event::Warning(format!("metrics: {}", chain(&error))));
                }
                is_stopped = observe(&Event::Step(&metrics)).is_break();
                let is_due = step.is_multiple_of(self.config.save_every.max(1));
                if is_due || is_last || is_stopped {
                    let state = TrainerState {
                        step,
                        tokens: self.tokens,
                        seconds: metrics.seconds,
                        seed: self.config.seed,
                        rng: 0,
                        cursor: to_value(&batches.cursor())?,
                        schedule: self.config.schedule.clone(),
                        config: to_value(&self.config)?,
                    };
                    match save(&self.trainer, &mut self.checkpoints, &self.config, &state) {
                        Ok(path) => {
                            let _ = observe(&Event::Saved(&path));
                        }
                        // A full disk is no reason to lose the training.
                        Err(error) if !is_last && !is_stopped => {
                            let _ =
                                observe(&Event::Warning(format!("checkpoint: {}", chain(&error))));
                        }
                        Err(error) => return Err(error),
                    }
                    if let Err(error) = self.plot() {
                        let _ = observe(&Event::Warning(format!("loss.svg: {}", chain(&error))));
                    }
                }
                if is_last || is_stopped {
                    self.seconds = metrics.seconds;
                    self.cursor = Some(batches.cursor());
                    break;
                }
            }
        }
        Ok(if is_stopped { Ended::Stopped } else { Ended::Done })
    }

    fn plot(&self) -> Result<()> {
        let folder = self.checkpoints.folder();
        let metrics = read_metrics(&folder.join("metrics.jsonl"))?;
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        write_loss_svg(&folder.join("loss.svg"), &name, &metrics, Scale::Linear)
    }
}

/// What carried states are called among the optimizer's tensors.
const CARRIED: &str = "carried.";

/// The next batch in which something is to be predicted.
fn next(
    batches: &mut Batches<&TokenFile>,
    trainer: &mut Trainer,
    passed_over: &mut u64,
) -> Result<Batch> {
    for _ in 0..=batches.an_epoch() {
        let batch = batches.next();
        if batch.counted() > 0 {
            return Ok(batch);
        }
        trainer.pass_over(&batch)?;
        *passed_over += 1;
    }
    let reason = "expected tokens to predict, found none in an epoch: all that is to be learnt may stand in what is \
                  left out of documents longer than a row";
    Err(Error::Argument { name: "data", reason: reason.into() })
}

/// Writes a checkpoint, and the model into the run's folder.
fn save(
    trainer: &Trainer,
    checkpoints: &mut Checkpoints,
    config: &RunConfig,
    state: &TrainerState,
) -> Result<PathBuf> {
    let model = trainer.model();
    let mut tensors = trainer.optimizer().tensors();
    tensors.extend(trainer.states(CARRIED)?);
    let written = checkpoints.save(state, &tensors, |to: &Path| match &config.method {
        Method::Full => model.write(to),
        Method::Lora(lora) => model.save_adapters(to, &config.base, lora),
    })?;
    let folder = checkpoints.folder();
    match &config.method {
        // What is run later is the average, where one is kept; what is trained on is in the checkpoint.
        Method::Full => model.write_with(folder, |name| trainer.optimizer().average(name))?,
        Method::Lora(lora) => model.write_adapters(folder, &config.base, lora)?,
    }
    Ok(written.path)
}

fn to_value(x: &impl Serialize) -> Result<serde_json::Value> {
    serde_json::to_value(x).map_err(|e| Error::Argument { name: "config", reason: e.to_string() })
}

/// Tokens per second over the last steps.
#[derive(Default)]
struct Speed(std::collections::VecDeque<(usize, f64)>);

impl Speed {
    fn add(&mut self, tokens: usize, seconds: f64) {
        const STEPS: usize = 20;
        self.0.push_back((tokens, seconds));
        if self.0.len() > STEPS {
            self.0.pop_front();
        }
    }

    fn tokens_per_second(&self) -> f64 {
        let (tokens, seconds) =
            self.0.iter().fold((0, 0.0), |sum, step| (sum.0 + step.0, sum.1 + step.1));
        tokens as f64 / f64::max(seconds, 1e-9)
    }
}

/// The loss of `model` on the first `most` tokens of `file`, each document by itself.
///
/// # Errors
///
/// When a token is none of the model's.
pub fn evaluate(model: &mut TrainableModel, file: &TokenFile, most: usize) -> Result<Loss> {
    const ROWS: usize = 4;
    const LEN: usize = 512;
    let client = model.client().clone();
    model.with_model::<Cpu, _>(client, |model| {
        let mut loss = Loss { nats: 0.0, predicted: 0, is_whole: true };
        let mut states = (0..ROWS).map(|_| model.new_state()).collect::<Result<Vec<_>>>()?;
        for batch in Pass::new(file, Packing::Carried, ROWS.min(file.inputs()), LEN)? {
            if loss.predicted >= most {
                loss.is_whole = false;
                break;
            }
            for piece in &batch.pieces {
                if piece.is_start {
                    states[piece.slot] = model.new_state()?;
                }
                let state = &mut states[piece.slot];
                let mut runs = [Tokens { tokens: &piece.tokens, state }];
                let losses = model.losses(&mut runs, &[&piece.targets], None)?;
                loss.nats += losses[0].iter().map(|&loss| f64::from(loss)).sum::<f64>();
                loss.predicted += piece.targets.iter().filter(|&&id| id != IGNORE).count();
            }
        }
        Ok(loss)
    })
}
