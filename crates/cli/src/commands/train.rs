//! `boostr train`: a new model from text.

use std::path::PathBuf;

use anyhow::{Context, Result};
use boostr::files;
use boostr::tokenizer::{MAX_FILE, Tokenizer};
use boostr::train::data::Encoder;
use boostr::train::{Shape, TrainableModel, bpe};
use clap::Args;

use crate::exit::usage;
use crate::term::{BYTES, Term};
use crate::training::{
    NOTES, TrainingArgs, claim, files, out_of, prepare, read_config, resume, set, start,
};

const EXAMPLES: &str = "\
Examples:
  boostr train --data book.txt --out runs/a --preset tiny --steps 500
  boostr train --resume runs/a";

/// A new model from text, or on with one that was stopped
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, after_help = NOTES)]
pub struct TrainArgs {
    #[command(flatten)]
    pub training: TrainingArgs,
    /// Sizes of the new model
    #[arg(long, value_name = "NAME", value_parser = ["tiny", "small", "medium"])]
    #[arg(conflicts_with = "resume")]
    pub preset: Option<String>,
    /// A config.json of any supported family, in place of sizes
    #[arg(long, value_name = "FILE")]
    #[arg(conflicts_with_all = ["resume", "preset", "d_model", "n_layer", "d_state"])]
    pub model_config: Option<PathBuf>,
    /// Width of the model
    #[arg(long, value_name = "N", conflicts_with = "resume")]
    pub d_model: Option<usize>,
    /// Layers of the model
    #[arg(long, value_name = "N", conflicts_with = "resume")]
    pub n_layer: Option<usize>,
    /// Width of its states
    #[arg(long, value_name = "N", conflicts_with = "resume")]
    pub d_state: Option<usize>,
    /// A tokenizer.json to use; else one is trained on the text
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    pub tokenizer: Option<PathBuf>,
    /// Tokens of the tokenizer that is trained
    #[arg(long, value_name = "N", conflicts_with_all = ["resume", "tokenizer"])]
    pub vocab_size: Option<usize>,
}

impl TrainArgs {
    /// An error about sizes of the model, each by the name under which it was given.
    fn refusal(&self, error: boostr::Error) -> anyhow::Error {
        let boostr::Error::Argument { name, reason } = error else { return error.into() };
        let option = match name {
            "d_model" if self.d_model.is_some() => "--d-model",
            "n_layer" if self.n_layer.is_some() => "--n-layer",
            "d_state" if self.d_state.is_some() => "--d-state",
            "vocab_size" if self.vocab_size.is_some() => "--vocab-size",
            "files" => "--data",
            _ => return usage(format!("settings: {}", boostr::Error::Argument { name, reason })),
        };
        usage(format!("{option}: {reason}"))
    }
}

pub fn run(args: &TrainArgs, term: &Term) -> Result<()> {
    let training = &args.training;
    if let Some(folder) = &training.resume {
        return resume(folder, None, training, term);
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
    if args.model_config.is_none() {
        file.model.validate().map_err(|error| args.refusal(error))?;
    }
    set(&mut file.run, training);
    let data = files(&training.data, training)?;
    if data.is_empty() {
        return Err(usage("--data FILE: expected text to train on"));
    }
    let valid = files(&training.valid, training)?;
    let checkpoints = claim(&out, &file.run, training)?;
    let tokenizer = match &args.tokenizer {
        Some(path) => files::read_text(path, MAX_FILE as u64)?,
        None => {
            let bar = term.bar(BYTES).with_message("tokenizer");
            let text = bpe::train(&data, file.model.vocab_size, |done, total| {
                bar.set_length(total);
                bar.set_position(done);
            });
            bar.finish_and_clear();
            text.map_err(|error| args.refusal(error))?
        }
    };
    let parsed = Tokenizer::from_bytes("tokenizer.json", tokenizer.as_bytes())?;
    let end = parsed.id("<|endoftext|>").or_else(|| parsed.id("</s>")).unwrap_or(0);
    let encoder = Encoder::new(&parsed, end)?;
    let config = match &args.model_config {
        Some(path) => {
            let text = files::read_text(path, files::MAX_CONFIG)?;
            serde_json::from_str(&text).with_context(|| format!("`{}`", path.display()))?
        }
        None => file.model.to_config(parsed.max_id() as usize + 1, end),
    };
    let model = TrainableModel::new(&config, tokenizer, file.run.seed)?.on(term.cpu.clone());
    let tokens = prepare(&checkpoints, &data, &valid, &encoder, term)?;
    start(checkpoints, file.run, model, tokens, training, &[], term)
}
