//! `boostr train` and `boostr tune`: a model from text, or changed by it.

use std::collections::VecDeque;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use boostr::load::OpenOptions;
use boostr::tokenizer::Tokenizer;
use boostr::train::data::{DataFile, Encoder, Kind, TokenFile};
use boostr::train::{
    Ended, Event, LoraConfig, Method, Metrics, RunConfig, ScheduleKind, Shape, TrainFile, TrainRun,
    TrainableModel, bpe, latest,
};
use indicatif::ProgressBar;
use serde_json::json;

use crate::args::training::{ScheduleName, TrainArgs, TrainingArgs, TuneArgs};
use crate::exit::{Interrupted, usage};
use crate::stream;
use crate::system;
use crate::term::{BYTES, Style, Term};

/// Between two lines of a log that is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// Points of the curve that a terminal shows.
const CURVE: usize = 48;
const TRAIN_TOKENS: &str = "train.tokens";
const VALID_TOKENS: &str = "valid.tokens";

pub fn run(args: &TrainArgs, term: &Term) -> Result<()> {
    let training = &args.training;
    if let Some(folder) = &training.resume {
        return resume(folder, training, term);
    }
    let out = out_of(training)?;
    let mut file = read_config(training)?;
    if let Some(name) = &args.preset {
        let preset = Shape::preset(name);
        file.model = preset.ok_or_else(|| usage(format!("--preset {name}: no such preset")))?;
    }
    let shape = &mut file.model;
    let sizes = [
        (&args.d_model, &mut shape.d_model),
        (&args.n_layer, &mut shape.n_layer),
        (&args.d_state, &mut shape.d_state),
        (&args.vocab_size, &mut shape.vocab_size),
    ];
    for (given, size) in sizes {
        *size = given.unwrap_or(*size);
    }
    set(&mut file.run, training);
    let data = files(&training.data, training)?;
    if data.is_empty() {
        return Err(usage("--data FILE: expected text to train on"));
    }
    refuse_old(&out)?;
    let tokenizer = match &args.tokenizer {
        Some(path) => fs::read_to_string(path).with_context(|| format!("`{}`", path.display()))?,
        None => {
            let bar = term.bar(BYTES).with_message("tokenizer");
            let text = bpe::train(&data, file.model.vocab_size, |done, total| {
                bar.set_length(total);
                bar.set_position(done);
            });
            bar.finish_and_clear();
            text?
        }
    };
    let parsed = Tokenizer::from_bytes("tokenizer.json", tokenizer.as_bytes())?;
    let end = parsed.id("<|endoftext|>").or_else(|| parsed.id("</s>")).unwrap_or(0);
    let encoder = Encoder::new(&parsed, end)?;
    let config = match &args.model_config {
        Some(path) => {
            let text = fs::read_to_string(path).with_context(|| format!("`{}`", path.display()))?;
            serde_json::from_str(&text).with_context(|| format!("`{}`", path.display()))?
        }
        None => file.model.to_config(parsed.max_id() as usize + 1, end),
    };
    let model = TrainableModel::new(&config, tokenizer, file.run.seed)?;
    let tokens = prepare(&out, &data, &files(&training.valid, training)?, &encoder, term)?;
    start(&out, file.run, model, tokens, training, term)
}

pub fn tune(args: &TuneArgs, term: &Term) -> Result<()> {
    let training = &args.training;
    if let Some(folder) = &training.resume {
        return resume(folder, training, term);
    }
    let out = out_of(training)?;
    let Some(path) = &args.model else { return Err(usage("expected a model to tune")) };
    crate::model::Source::Path(path.clone()).check_exists()?;
    let model = TrainableModel::open(path, &OpenOptions::default())?;
    if let Some(adapters) = &args.merge {
        return merge(model, adapters, &out, term);
    }
    let mut file = read_config(training)?;
    if training.lr.is_none() && training.config.is_none() {
        // A model that is trained already is moved more gently than a new one.
        file.run.schedule.lr = if args.lora.is_some() { 2e-4 } else { 5e-5 };
    }
    set(&mut file.run, training);
    if let Some(r) = args.lora {
        let alpha = args.alpha.unwrap_or(2.0 * r as f64);
        file.run.method = Method::Lora(LoraConfig { r, alpha, targets: args.targets.clone() });
    }
    // Found again wherever boostr or PEFT are run.
    file.run.base = fs::canonicalize(path).unwrap_or_else(|_| path.clone()).display().to_string();
    let data = files(&training.data, training)?;
    if data.is_empty() {
        return Err(usage("--data FILE: expected text to train on"));
    }
    refuse_old(&out)?;
    let lm: boostr::load::LanguageModel<boostr::backend::Cpu> =
        crate::model::Source::Path(path.clone()).open(&OpenOptions::default())?;
    let tokenizer = lm.tokenizer()?;
    let end = lm.eos.first().copied();
    let end = end.ok_or_else(|| usage("the model names no token that ends a text"))?;
    let mut encoder = Encoder::new(tokenizer, end)?;
    if let Some(template) = &lm.chat_template {
        encoder = encoder.with_chat(template, boostr::chat::Options::default())?;
    }
    drop(lm);
    let tokens = prepare(&out, &data, &files(&training.valid, training)?, &encoder, term)?;
    start(&out, file.run, model, tokens, training, term)
}

fn merge(mut model: TrainableModel, adapters: &Path, out: &Path, term: &Term) -> Result<()> {
    if out.exists() {
        return Err(usage(format!("`{}` is there already", out.display())));
    }
    let config = model.read_adapters(adapters)?;
    model.merge_adapters()?;
    model.write_new(out)?;
    term.say(format_args!("{}: adapters of rank {} merged", out.display(), config.r));
    Ok(())
}

fn out_of(training: &TrainingArgs) -> Result<PathBuf> {
    training.out.clone().ok_or_else(|| usage("--out DIR: expected a folder for the run"))
}

fn refuse_old(out: &Path) -> Result<()> {
    if latest(out)?.is_some() {
        let out = out.display();
        return Err(usage(format!(
            "`{out}` has a run: `boostr train --resume {out}` goes on with it"
        )));
    }
    Ok(())
}

fn read_config(training: &TrainingArgs) -> Result<TrainFile> {
    let Some(path) = &training.config else { return Ok(TrainFile::default()) };
    let text = fs::read_to_string(path).with_context(|| format!("`{}`", path.display()))?;
    toml::from_str(&text).map_err(|error| usage(format!("`{}`: {error}", path.display())))
}

/// The options' own settings.
fn set(run: &mut RunConfig, training: &TrainingArgs) {
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
    run.optimizer.ema_decay = training.ema.unwrap_or(run.optimizer.ema_decay);
    run.seed = training.seed.unwrap_or(run.seed);
    run.save_every = training.save_every.unwrap_or(run.save_every);
    run.eval_every = training.eval_every.unwrap_or(run.eval_every);
}

fn files(paths: &[PathBuf], training: &TrainingArgs) -> Result<Vec<DataFile>> {
    let files = paths.iter().map(|path| {
        let mut file = DataFile::new(path)?;
        if let Kind::Text { separator } = &mut file.kind {
            separator.clone_from(&training.separator);
        }
        Ok(file)
    });
    files.collect::<boostr::Result<_>>().map_err(|error| usage(error.to_string()))
}

/// The token files of a run.
fn prepare(
    out: &Path,
    data: &[DataFile],
    valid: &[DataFile],
    encoder: &Encoder,
    term: &Term,
) -> Result<(TokenFile, Option<TokenFile>)> {
    fs::create_dir_all(out).with_context(|| format!("`{}`", out.display()))?;
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

fn start(
    out: &Path,
    config: RunConfig,
    model: TrainableModel,
    (train, valid): (TokenFile, Option<TokenFile>),
    training: &TrainingArgs,
    term: &Term,
) -> Result<()> {
    let about = format!(
        "{} documents, {} tokens",
        system::count(train.documents() as u64),
        system::count(train.tokens() as u64)
    );
    let run = TrainRun::new(out, config, model, train, valid)
        .map_err(|error| usage_of(error, "settings"))?;
    term.say(format_args!(
        "{}: {} parameters trained on {about}",
        out.display(),
        system::count(
            run.trainer().model().parameters().values().map(|p| p.values.len() as u64).sum()
        )
    ));
    follow(run, out, training, term)
}

fn resume(folder: &Path, training: &TrainingArgs, term: &Term) -> Result<()> {
    let Some(found) = latest(folder)? else {
        return Err(usage(format!("`{}` has no checkpoint to go on from", folder.display())));
    };
    for error in &found.broken {
        term.say(format_args!("{} {error}", term.on_stderr(Style::Careful, "warning:")));
    }
    let saved = found.checkpoint;
    let mut config: RunConfig =
        serde_json::from_value(saved.state.config.clone()).context("the checkpoint's settings")?;
    if training.config.is_some() {
        config =
            RunConfig { method: config.method, base: config.base, ..read_config(training)?.run };
    }
    set_for_resume(&mut config, training);
    let path = match &config.method {
        Method::Full => saved.path.clone(),
        Method::Lora(_) => PathBuf::from(&config.base),
    };
    let model = TrainableModel::open(&path, &OpenOptions::default())?;
    let train = TokenFile::open(&folder.join(TRAIN_TOKENS))?;
    let valid = folder.join(VALID_TOKENS);
    let valid = if valid.exists() { Some(TokenFile::open(&valid)?) } else { None };
    let run = TrainRun::resume(folder, &saved, config, model, train, valid)
        .map_err(|error| usage_of(error, "resume"))?;
    let (done, total) = run.steps();
    term.say(format_args!("{}: on from step {done} of {total}", folder.display()));
    follow(run, folder, training, term)
}

/// What is asked for anew; what a run cannot change is refused with the names of the settings.
fn set_for_resume(config: &mut RunConfig, training: &TrainingArgs) {
    let warmup = config.schedule.warmup_steps;
    set(config, training);
    config.schedule.warmup_steps = training.warmup.unwrap_or(warmup);
}

fn usage_of(error: boostr::Error, what: &str) -> anyhow::Error {
    match error {
        boostr::Error::Argument { .. } => usage(format!("{what}: {error}")),
        other => other.into(),
    }
}

/// Trains, and shows how it goes.
fn follow(mut run: TrainRun, folder: &Path, training: &TrainingArgs, term: &Term) -> Result<()> {
    stream::catch_interrupt();
    let (first, total) = run.steps();
    let mut view = View::new(term, first, total);
    let start = Instant::now();
    let limit = training.time.map(Duration::from_secs);
    let mut last = None;
    let ended = run.run(|| system::memory_in_use().unwrap_or(0), &mut |event| {
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
    let ended = ended.with_context(|| {
        format!("`{}` keeps the last checkpoint: --resume goes on from it", folder.display())
    })?;
    let (done, total) = run.steps();
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
        let bar = (term.stderr_tty && !term.quiet).then(|| {
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
            Some(bar) => bar.println(text),
            None => self.term.say(text),
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish();
        }
    }
}
