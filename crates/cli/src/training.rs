//! What `boostr train` and `boostr tune` share: their options, the data, and a run that is followed.

use std::collections::VecDeque;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use boostr::load::OpenOptions;
use boostr::train::data::{DataFile, Encoder, Kind, TokenFile, Truncate};
use boostr::train::{
    Checkpoints, Ended, Event, Method, Metrics, RunConfig, ScheduleKind, TrainFile, TrainRun,
    TrainableModel, has_checkpoints, latest,
};
use clap::{Args, ValueEnum};
use indicatif::ProgressBar;
use serde_json::json;

use crate::exit::{BadModel, Interrupted, usage};
use crate::stream;
use crate::system;
use crate::term::{BYTES, Term, shown};

/// Between two lines of a log that is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// Points of the curve that a terminal shows.
const CURVE: usize = 48;
const TRAIN_TOKENS: &str = "train.tokens";
const VALID_TOKENS: &str = "valid.tokens";

pub const NOTES: &str = "\
The folder of a run is a model: `boostr run DIR` speaks with it as it was last saved. Beside it are metrics.jsonl, loss.svg and \
the last checkpoints, from which --resume goes on to the bit. Ctrl-C, TERM and HUP save and stop; a second Ctrl-C stops at once. \
A .jsonl or .json file has objects, a line each or in one list, with `text`, with `prompt` and `completion` (of which the completion is learnt), with `messages` (of which \
the answers are), or in the forms of ShareGPT (`conversations`) and Alpaca (`instruction`, `output`). A TOML file has tables [model] and [run]; keys and their meaning: docs/training.md.";

/// What is trained on, where to, and how.
#[derive(Debug, Args)]
pub struct TrainingArgs {
    /// Text to train on: .txt, .md, .jsonl, .json; may be given several times
    #[arg(short, long, value_name = "FILE")]
    pub data: Vec<PathBuf>,
    /// Text to measure on the way
    #[arg(long, value_name = "FILE")]
    pub valid: Vec<PathBuf>,
    /// The line between two documents of plain text; an empty one for empty lines
    #[arg(long, value_name = "LINE", conflicts_with = "resume")]
    pub separator: Option<String>,
    /// Folder of the run
    #[arg(short, long, value_name = "DIR", required_unless_present = "resume")]
    pub out: Option<PathBuf>,
    /// Go on with the run in this folder
    #[arg(long, value_name = "DIR", conflicts_with_all = ["out", "data", "valid"])]
    pub resume: Option<PathBuf>,
    /// Settings, as TOML; the options here win
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Steps in all; with --resume, more than the run had let it go on
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
    /// Stop and save after so many seconds
    #[arg(long, value_name = "SECONDS")]
    pub time: Option<u64>,
    /// Peak of the learning rate
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub lr: Option<f64>,
    /// Steps in which the learning rate grows
    #[arg(long, value_name = "N")]
    pub warmup: Option<u64>,
    /// How it falls then
    #[arg(long, value_name = "KIND", value_enum)]
    pub schedule: Option<ScheduleName>,
    /// Rows of a batch
    #[arg(long, value_name = "N")]
    pub batch_size: Option<usize>,
    /// Tokens of a row
    #[arg(long, value_name = "N")]
    pub seq_len: Option<usize>,
    /// Keep less of each layer and run it again on the way back: less memory, more time, the same result
    #[arg(long)]
    pub checkpoint_layers: bool,
    /// Rows go on from the rows before; else documents are packed, each by itself
    #[arg(long)]
    pub carry_state: bool,
    /// What becomes of a document that is longer than a row
    #[arg(long, value_name = "HOW", value_enum, conflicts_with = "carry_state")]
    pub truncate: Option<TruncateName>,
    /// Keep an average of the weights, with this decay
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub ema: Option<f64>,
    /// Of the first parameters and the order of the data
    #[arg(short, long, value_name = "N")]
    pub seed: Option<u64>,
    /// Steps between two checkpoints
    #[arg(long, value_name = "N")]
    pub save_every: Option<u64>,
    /// Steps between two measurements
    #[arg(long, value_name = "N")]
    pub eval_every: Option<u64>,
    /// One JSON object at the end
    #[arg(long)]
    pub json: bool,
}

/// Options that are given, each after the key of the run's file that it sets.
pub type Options = &'static [(&'static str, &'static str)];

impl TrainingArgs {
    /// The options that are given of those that set a key of the run's file: the key, and the option.
    fn given(&self) -> Vec<(&'static str, &'static str)> {
        let all = [
            ("schedule.total_steps", "--steps", self.steps.is_some()),
            ("schedule.lr", "--lr", self.lr.is_some()),
            ("schedule.warmup_steps", "--warmup", self.warmup.is_some()),
            ("schedule.kind", "--schedule", self.schedule.is_some()),
            ("batch_size", "--batch-size", self.batch_size.is_some()),
            ("seq_len", "--seq-len", self.seq_len.is_some()),
            ("carry_state", "--carry-state", self.carry_state),
            ("truncate", "--truncate", self.truncate.is_some()),
            ("optimizer.ema_decay", "--ema", self.ema.is_some()),
            ("seed", "--seed", self.seed.is_some()),
        ];
        let given = all.into_iter().filter(|(.., is_given)| *is_given);
        given.map(|(key, option, _)| (key, option)).collect()
    }

    /// An error about settings, each by the name under which it was given; `own` are more options of the command.
    fn refusal(&self, error: boostr::Error, what: &str, own: Options) -> anyhow::Error {
        let boostr::Error::Argument { name, reason } = error else { return error.into() };
        let given: Vec<_> = self.given().into_iter().chain(own.iter().copied()).collect();
        let is_named = |key: &str| key.rsplit('.').next() == name.rsplit('.').next();
        if let Some((_, option)) = given.iter().find(|(key, _)| is_named(key)) {
            return usage(format!("{option}: {reason}"));
        }
        let mut text = match name {
            // All that differs from a run's, by its own names.
            "config" => reason,
            _ => boostr::Error::Argument { name, reason }.to_string(),
        };
        for (key, option) in given {
            text = text.replace(&format!("`{key}`"), &format!("`{option}`"));
        }
        usage(format!("{what}: {text}"))
    }
}

/// How a learning rate falls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ScheduleName {
    Cosine,
    Linear,
    /// Stays, and falls at the end
    Wsd,
}

/// What becomes of a document that is longer than a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TruncateName {
    /// Cut into parts, each by itself; the default
    Split,
    /// Its first tokens are kept
    KeepStart,
    /// Its last tokens are kept
    KeepEnd,
    /// Left out
    Drop,
    /// An error
    Refuse,
    /// Documents are cut wherever a row ends, so that all rows are full
    Anywhere,
}

pub fn out_of(training: &TrainingArgs) -> Result<PathBuf> {
    training.out.clone().ok_or_else(|| usage("--out DIR: expected a folder for the run"))
}

/// The folder of a new run, which is this process's from here on.
pub fn claim(out: &Path, config: &RunConfig, training: &TrainingArgs) -> Result<Checkpoints> {
    let checkpoints = Checkpoints::open(out, config.keep)
        .map_err(|error| training.refusal(error, "settings", &[]))?;
    if has_checkpoints(out)? {
        let command = latest(out).ok().flatten().map_or_else(
            || resume_command(out, &RunConfig::default()),
            |found| {
                let config = RunConfig::of_checkpoint(&found.checkpoint).unwrap_or_default();
                resume_command(out, &config)
            },
        );
        return Err(usage(format!("`{}` has a run: `{command}` goes on with it", out.display())));
    }
    Ok(checkpoints)
}

/// The path of a model as a run keeps it, so that it is found from wherever boostr or PEFT are run.
pub fn whole(path: &Path) -> String {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf()).display().to_string()
}

/// The command that goes on with a run: that which began it.
fn resume_command(folder: &Path, config: &RunConfig) -> String {
    let name = if config.base.is_empty() { "train" } else { "tune" };
    format!("boostr {name} --resume {}", folder.display())
}

pub fn read_config(training: &TrainingArgs) -> Result<TrainFile> {
    let Some(path) = &training.config else { return Ok(TrainFile::default()) };
    let text = boostr::files::read_text(path, boostr::files::MAX_CONFIG)?;
    toml::from_str(&text).map_err(|error| usage(format!("`{}`: {error}", path.display())))
}

/// The options' own settings.
pub fn set(run: &mut RunConfig, training: &TrainingArgs) {
    let schedule = &mut run.schedule;
    schedule.total_steps = training.steps.unwrap_or(schedule.total_steps);
    schedule.lr = training.lr.unwrap_or(schedule.lr);
    let tenth = schedule.warmup_steps.min(schedule.total_steps / 10);
    schedule.warmup_steps = training.warmup.unwrap_or(tenth);
    if let Some(kind) = training.schedule {
        schedule.kind = match kind {
            ScheduleName::Cosine => ScheduleKind::Cosine,
            ScheduleName::Linear => ScheduleKind::Linear,
            ScheduleName::Wsd => ScheduleKind::WarmupStableDecay,
        };
    }
    run.batch_size = training.batch_size.unwrap_or(run.batch_size);
    run.seq_len = training.seq_len.unwrap_or(run.seq_len);
    run.checkpoint_layers |= training.checkpoint_layers;
    run.carry_state |= training.carry_state;
    if let Some(truncate) = training.truncate {
        run.truncate = match truncate {
            TruncateName::Split => Truncate::Split,
            TruncateName::KeepStart => Truncate::KeepStart,
            TruncateName::KeepEnd => Truncate::KeepEnd,
            TruncateName::Drop => Truncate::Drop,
            TruncateName::Refuse => Truncate::Refuse,
            TruncateName::Anywhere => Truncate::Anywhere,
        };
    }
    run.optimizer.ema_decay = training.ema.unwrap_or(run.optimizer.ema_decay);
    run.seed = training.seed.unwrap_or(run.seed);
    run.save_every = training.save_every.unwrap_or(run.save_every);
    run.eval_every = training.eval_every.unwrap_or(run.eval_every);
}

pub fn files(paths: &[PathBuf], training: &TrainingArgs) -> Result<Vec<DataFile>> {
    let files = paths.iter().map(|path| {
        let mut file = DataFile::new(path)?;
        if let Kind::Text { separator } = &mut file.kind {
            separator.clone_from(&training.separator);
        }
        Ok(file)
    });
    files.collect::<boostr::Result<_>>().map_err(|error| usage(error.to_string()))
}

/// The token files of a run, in its folder.
pub fn prepare(
    checkpoints: &Checkpoints,
    data: &[DataFile],
    valid: &[DataFile],
    encoder: &Encoder,
    term: &Term,
) -> Result<(TokenFile, Option<TokenFile>)> {
    let out = checkpoints.folder();
    let tokens = |name: &str, files: &[DataFile]| -> Result<TokenFile> {
        let bar = term.bar(BYTES).with_message("tokens");
        let file = TokenFile::prepare(&out.join(name), files, encoder, |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        });
        bar.finish_and_clear();
        Ok(file?)
    };
    let valid = if valid.is_empty() { None } else { Some(tokens(VALID_TOKENS, valid)?) };
    Ok((tokens(TRAIN_TOKENS, data)?, valid))
}

/// Makes a new run. `own` are options of the command, as in errors about settings.
pub fn start(
    checkpoints: Checkpoints,
    config: RunConfig,
    model: TrainableModel,
    (train, valid): (TokenFile, Option<TokenFile>),
    training: &TrainingArgs,
    own: Options,
    term: &Term,
) -> Result<()> {
    let out = checkpoints.folder().to_path_buf();
    let about = format!(
        "{} documents, {} tokens",
        system::count(train.documents() as u64),
        system::count(train.tokens() as u64)
    );
    if let Some(note) = longer(&train, &config) {
        term.say(note);
    }
    let run = TrainRun::new(checkpoints, config, model, train, valid)
        .map_err(|error| training.refusal(error, "settings", own))?;
    term.say(format_args!(
        "{}: {} parameters trained on {about}",
        out.display(),
        system::count(
            run.trainer().model().parameters().values().map(|p| p.values.len() as u64).sum()
        )
    ));
    follow(run, &out, training, term)
}

/// What becomes of documents that are longer than a row, if there are any.
fn longer(train: &TokenFile, config: &RunConfig) -> Option<String> {
    let longer = train.longer_than(config.seq_len);
    let becomes = match config.truncate {
        _ if longer == 0 || config.carry_state => return None,
        Truncate::Refuse | Truncate::Anywhere => return None,
        Truncate::Split => "cut into parts, each learnt by itself",
        Truncate::KeepStart => "learnt as far as their first tokens go",
        Truncate::KeepEnd => "learnt from their last tokens",
        Truncate::Drop => "left out",
    };
    Some(format!(
        "{longer} of {} documents are longer than a row of {} tokens (--seq-len): they are {becomes} (--truncate)",
        train.documents(),
        config.seq_len
    ))
}

/// Goes on with the run in a folder, which tunes `model` if one is given.
pub fn resume(
    folder: &Path,
    model: Option<&Path>,
    training: &TrainingArgs,
    term: &Term,
) -> Result<()> {
    let nothing = || usage(format!("`{}` has no checkpoint to go on from", folder.display()));
    if !has_checkpoints(folder)? {
        return Err(nothing());
    }
    // Before the newest one is looked for: nobody adds another meanwhile.
    let checkpoints = Checkpoints::open(folder, usize::MAX)
        .map_err(|error| training.refusal(error, "--resume", &[]))?;
    let Some(found) = latest(folder)? else { return Err(nothing()) };
    for error in &found.broken {
        term.warn(error);
    }
    let saved = found.checkpoint;
    let mut config = RunConfig::of_checkpoint(&saved)?;
    if let Some(model) = model.filter(|&model| whole(model) != config.base) {
        return Err(usage(format!(
            "MODEL: the run in `{}` is of `{}`, found `{}`",
            folder.display(),
            if config.base.is_empty() { "a new model" } else { &config.base },
            model.display()
        )));
    }
    let before = config.schedule.total_steps;
    if training.config.is_some() {
        config =
            RunConfig { method: config.method, base: config.base, ..read_config(training)?.run };
    }
    set_for_resume(&mut config, training);
    let path = match &config.method {
        Method::Full => saved.path.clone(),
        Method::Lora(_) => PathBuf::from(&config.base),
    };
    let model = TrainableModel::open(&path, &OpenOptions::default()).map_err(BadModel::from)?;
    let model = model.on(term.cpu.clone());
    let train = TokenFile::open(&folder.join(TRAIN_TOKENS))?;
    let valid = folder.join(VALID_TOKENS);
    let valid = if valid.exists() { Some(TokenFile::open(&valid)?) } else { None };
    let run = TrainRun::resume(checkpoints, &saved, config, model, train, valid)
        .map_err(|error| training.refusal(error, "--resume", &[]))?;
    let (done, total) = run.steps();
    if done == total {
        term.say(format_args!(
            "{}: all {total} steps are made; more are made with --steps N",
            folder.display()
        ));
        return Ok(());
    }
    if total != before {
        term.say(format_args!(
            "{total} steps in all, {before} until now: the learning rate follows the schedule of {total} from here on"
        ));
    }
    term.say(format_args!("{}: on from step {done} of {total}", folder.display()));
    follow(run, folder, training, term)
}

/// What is asked for anew; what a run cannot change is refused with the names of the settings.
fn set_for_resume(config: &mut RunConfig, training: &TrainingArgs) {
    let warmup = config.schedule.warmup_steps;
    set(config, training);
    config.schedule.warmup_steps = training.warmup.unwrap_or(warmup);
}

/// Trains, and shows how it goes.
fn follow(mut run: TrainRun, folder: &Path, training: &TrainingArgs, term: &Term) -> Result<()> {
    stream::catch_signals();
    run = run.measuring_memory(|| system::memory_in_use().unwrap_or(0));
    let (first, total) = run.steps();
    let mut view = View::new(term, first, total);
    let start = Instant::now();
    let limit = training.time.map(Duration::from_secs);
    let mut last = None;
    let ended = run.run(&mut |event| {
        match event {
            Event::Step(metrics) => {
                view.step(metrics);
                last = Some((*metrics).clone());
            }
            Event::Saved(path) => view.say(&format!("saved {}", path.display())),
            Event::Warning(text) => view.say(&format!("warning: {text}")),
        }
        let is_over = limit.is_some_and(|limit| start.elapsed() >= limit);
        if stream::is_interrupted() || is_over {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    view.finish();
    let ended = ended.with_context(|| match has_checkpoints(folder) {
        Ok(true) => {
            let command = resume_command(folder, run.config());
            format!("the last checkpoint is kept: `{command}` goes on from it")
        }
        _ => format!("no checkpoint of `{}` was saved before", folder.display()),
    })?;
    let (done, total) = run.steps();
    let passed_over = run.passed_over();
    if passed_over > 0 {
        let batches = if passed_over == 1 { "batch" } else { "batches" };
        term.say(format_args!(
            "{passed_over} {batches} had no token to predict: they count 0, and no step was made of them"
        ));
    }
    if let Some(metrics) = &last {
        if training.json {
            term.print_json(&json!({
                "out": folder.display().to_string(),
                "steps": done,
                "of_steps": total,
                "tokens": metrics.tokens,
                "seconds": metrics.seconds,
                "loss": metrics.loss,
                "valid_loss": metrics.valid_loss,
                "bits_per_byte": metrics.bits_per_byte,
                "tokens_per_second": metrics.tokens_per_second,
                "memory": metrics.memory,
                "batches_without_targets": passed_over,
            }))?;
        }
        let measured = metrics.bits_per_byte.map(|bits| format!(", {bits:.4} bits per byte"));
        term.say(format_args!(
            "{}: step {done} of {total}, loss {:.4}{}. Speak with it: boostr run {} -p \"...\"",
            folder.display(),
            metrics.loss,
            measured.unwrap_or_default(),
            folder.display()
        ));
    }
    if ended == Ended::Stopped && stream::is_interrupted() {
        return Err(Interrupted.into());
    }
    Ok(())
}

/// What is seen of a run: a bar with a curve at a terminal, lines elsewhere.
struct View<'a> {
    term: &'a Term,
    bar: Option<ProgressBar>,
    total: u64,
    shown: Option<Instant>,
    losses: VecDeque<f64>,
    /// A point of the curve is a mean of so many losses.
    per_point: u64,
    valid: Option<f64>,
}

impl<'a> View<'a> {
    fn new(term: &'a Term, first: u64, total: u64) -> Self {
        let bar = term.has_bars().then(|| {
            let bar = term.bar("{msg}\n{bar:48} {pos}/{len} steps, {eta} left");
            bar.set_length(total);
            bar.set_position(first);
            bar.reset_eta();
            bar
        });
        let per_point = (total.saturating_sub(first)).div_ceil(CURVE as u64).max(1);
        Self { term, bar, total, shown: None, losses: VecDeque::new(), per_point, valid: None }
    }

    fn step(&mut self, metrics: &Metrics) {
        self.losses.push_back(metrics.loss);
        if self.losses.len() > CURVE * self.per_point as usize {
            self.losses.pop_front();
        }
        self.valid = metrics.valid_loss.or(self.valid);
        let valid = self.valid.map(|loss| format!("  valid {loss:.4}")).unwrap_or_default();
        let line = format!(
            "loss {:.4}{valid}  |g| {:.2}  lr {:.2e}  {} tok/s  {}",
            metrics.loss,
            metrics.grad_norm,
            metrics.lr,
            system::count(metrics.tokens_per_second as u64),
            system::bytes(metrics.memory)
        );
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{}\n{line}", self.curve()));
            bar.set_position(metrics.step);
            return;
        }
        let is_due = self.shown.is_none_or(|shown| shown.elapsed() >= LINE_EVERY);
        if is_due || metrics.step == self.total || metrics.valid_loss.is_some() {
            self.shown = Some(Instant::now());
            self.term.say(format_args!("step {}/{}  {line}", metrics.step, self.total));
        }
    }

    /// The losses so far as a line of blocks, the highest of them full.
    fn curve(&self) -> String {
        const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let losses: Vec<f64> = self.losses.iter().copied().collect();
        let points: Vec<f64> = losses
            .chunks(self.per_point as usize)
            .map(|chunk| chunk.iter().sum::<f64>() / chunk.len() as f64)
            .collect();
        let low = points.iter().copied().fold(f64::INFINITY, f64::min);
        let high = points.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let block = |x: &f64| {
            let share = if high > low { (x - low) / (high - low) } else { 0.0 };
            BLOCKS[(share * 7.0).round() as usize % 8]
        };
        points.iter().map(block).collect()
    }

    fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(shown(text)),
            None => self.term.say(text),
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish();
        }
    }
}
