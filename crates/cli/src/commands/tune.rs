//! `boostr tune`: a model changed by text, all of it or by adapters beside it.

use std::path::{Path, PathBuf};

use anyhow::Result;
use boostr::load::OpenOptions;
use boostr::train::data::Encoder;
use boostr::train::{LoraConfig, Method, RunConfig, TrainableModel};
use clap::Args;

use crate::exit::{BadModel, usage};
use crate::model::Source;
use crate::term::Term;
use crate::training::{
    NOTES, Options, TrainingArgs, claim, files, out_of, prepare, read_config, resume, set, start,
    whole,
};

const EXAMPLES: &str = "\
Examples:
  boostr tune ./mamba2-130m --data notes.txt --out runs/b --lora 8 --steps 200
  boostr tune ./mamba2-130m --merge runs/b --out ./mamba2-130m-notes";

/// Options of training, beside which nothing is merged.
const MERGE_ALONE: [&str; 21] = [
    "data",
    "valid",
    "separator",
    "resume",
    "config",
    "steps",
    "time",
    "lr",
    "warmup",
    "schedule",
    "batch_size",
    "seq_len",
    "checkpoint_layers",
    "carry_state",
    "truncate",
    "ema",
    "seed",
    "save_every",
    "eval_every",
    "json",
    "lora",
];

/// Options of adapters.
const ADAPTERS: [(&str, &str); 3] =
    [("lora.r", "--lora"), ("lora.alpha", "--alpha"), ("lora.targets", "--targets")];

/// A model changed by text: all of it, or adapters beside it
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, after_help = NOTES)]
pub struct TuneArgs {
    /// Folder, weight file or GGUF file of the model
    #[arg(value_name = "MODEL", required_unless_present = "resume")]
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub training: TrainingArgs,
    /// Train adapters of this rank beside the model, which stays as it is
    #[arg(long, value_name = "R", conflicts_with = "resume")]
    pub lora: Option<usize>,
    /// Their factor is ALPHA / R; twice R by default
    #[arg(long, value_name = "ALPHA", requires = "lora", allow_negative_numbers = true)]
    pub alpha: Option<f64>,
    /// Layers that get adapters, like in_proj,q_proj, or rows of in_proj (in_proj.x, in_proj.dt); by default
    /// the projections of mixers, attention and feed-forward layers
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', requires = "lora")]
    pub targets: Vec<String>,
    /// Write the model with these adapters merged into it to --out, and train nothing
    #[arg(long, value_name = "DIR", conflicts_with_all = MERGE_ALONE)]
    pub merge: Option<PathBuf>,
}

pub fn run(args: &TuneArgs, term: &Term) -> Result<()> {
    let training = &args.training;
    if let Some(folder) = &training.resume {
        return resume(folder, args.model.as_deref(), training, term);
    }
    let out = out_of(training)?;
    let Some(path) = &args.model else { return Err(usage("expected a model to tune")) };
    Source::Path(path.clone()).check_exists()?;
    let model = TrainableModel::open(path, &OpenOptions::default()).map_err(BadModel::from)?;
    let model = model.on(term.cpu.clone());
    if let Some(adapters) = &args.merge {
        return merge(model, adapters, &out, term);
    }
    let mut file = read_config(training)?;
    if let Some(r) = args.lora {
        let alpha = args.alpha.unwrap_or(LoraConfig::of_rank(r).alpha);
        file.run.method = Method::Lora(LoraConfig { r, alpha, targets: args.targets.clone() });
    }
    if training.config.is_none() {
        file.run = RunConfig::tuning(file.run.method);
    }
    set(&mut file.run, training);
    file.run.base = whole(path);
    let data = files(&training.data, training)?;
    if data.is_empty() {
        return Err(usage("--data FILE: expected text to train on"));
    }
    let valid = files(&training.valid, training)?;
    let checkpoints = claim(&out, &file.run, training)?;
    let lm: boostr::load::LanguageModel<boostr::backend::Cpu> =
        Source::Path(path.clone()).open(&OpenOptions::default(), &term.cpu)?;
    term.warn_all(&lm.warnings);
    let tokenizer = lm.tokenizer().map_err(BadModel::from)?;
    let end = lm.eos.first().copied();
    let end = end.ok_or_else(|| usage("the model names no token that ends a text"))?;
    let mut encoder = Encoder::new(tokenizer, end)?;
    if let Some(template) = &lm.chat_template {
        encoder = encoder.with_chat(template, boostr::chat::Options::default())?;
    }
    drop(lm);
    let tokens = prepare(&checkpoints, &data, &valid, &encoder, term)?;
    let own: Options = if args.lora.is_some() { &ADAPTERS } else { &[] };
    start(checkpoints, file.run, model, tokens, training, own, term)
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
