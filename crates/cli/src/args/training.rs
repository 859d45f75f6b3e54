//! The options of `boostr train`, `tune` and `eval`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::ModelArgs;

pub const TRAIN_EXAMPLES: &str = "\
Examples:
  boostr train --data book.txt --out runs/a --preset tiny --steps 500
  boostr train --resume runs/a";

pub const TRAIN_NOTES: &str = "\
The folder of a run is a model: `boostr run DIR` speaks with it as it was last saved. Beside it are metrics.jsonl, loss.svg and \
the last checkpoints, from which --resume goes on to the bit. Ctrl-C saves and stops; a second one stops at once. A .jsonl \
file has objects with `text`, with `prompt` and `completion` (of which the completion is learnt), or with `messages` (of which the \
answers are). A TOML file has tables [model] and [run]; keys and their meaning: docs/training.md.";

pub const TUNE_EXAMPLES: &str = "\
Examples:
  boostr tune ./mamba2-130m --data notes.txt --out runs/b --lora 8 --steps 200
  boostr tune ./mamba2-130m --merge runs/b --out ./mamba2-130m-notes";

pub const EVAL_EXAMPLES: &str = "\
Examples:
  boostr eval runs/a --data valid.txt
  boostr eval runs/a --data lambada.jsonl --json";

/// What is trained on, where to, and how.
#[derive(Debug, Args)]
pub struct TrainingArgs {
    /// Text to train on: .txt, .md, .jsonl; may be given several times
    #[arg(short, long, value_name = "FILE")]
    pub data: Vec<PathBuf>,
    /// Text to measure on the way
    #[arg(long, value_name = "FILE")]
    pub valid: Vec<PathBuf>,
    /// The line between two documents of plain text; an empty one for empty lines
    #[arg(long, value_name = "LINE")]
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
    /// Steps in all
    #[arg(long, value_name = "N")]
    pub steps: Option<u64>,
    /// Stop and save after so many seconds
    #[arg(long, value_name = "SECONDS")]
    pub time: Option<u64>,
    /// Peak of the learning rate
    #[arg(long, value_name = "X")]
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
    /// Keep an average of the weights, with this decay
    #[arg(long, value_name = "X")]
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

/// How a learning rate falls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ScheduleName {
    Cosine,
    Linear,
    /// Stays, and falls at the end
    Wsd,
}

#[derive(Debug, Args)]
pub struct TrainArgs {
    #[command(flatten)]
    pub training: TrainingArgs,
    /// Sizes of the new model
    #[arg(long, value_name = "NAME", value_parser = ["tiny", "small", "medium"])]
    pub preset: Option<String>,
    /// A config.json of any supported family, in place of sizes
    #[arg(long, value_name = "FILE", conflicts_with = "preset")]
    pub model_config: Option<PathBuf>,
    /// Width of the model
    #[arg(long, value_name = "N")]
    pub d_model: Option<usize>,
    /// Layers of the model
    #[arg(long, value_name = "N")]
    pub n_layer: Option<usize>,
    /// Width of its states
    #[arg(long, value_name = "N")]
    pub d_state: Option<usize>,
    /// A tokenizer.json to use; else one is trained on the text
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Tokens of the tokenizer that is trained
    #[arg(long, value_name = "N", conflicts_with = "tokenizer")]
    pub vocab_size: Option<usize>,
}

#[derive(Debug, Args)]
pub struct TuneArgs {
    /// Folder, weight file or GGUF file of the model
    #[arg(value_name = "MODEL", required_unless_present = "resume")]
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub training: TrainingArgs,
    /// Train adapters of this rank beside the model, which stays as it is
    #[arg(long, value_name = "R")]
    pub lora: Option<usize>,
    /// Their factor is ALPHA / R; twice R by default
    #[arg(long, value_name = "ALPHA", requires = "lora")]
    pub alpha: Option<f64>,
    /// Layers that get adapters, like in_proj,q_proj, or rows of in_proj (in_proj.x, in_proj.dt); by default
    /// the projections of mixers, attention and feed-forward layers
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', requires = "lora")]
    pub targets: Vec<String>,
    /// Write the model with these adapters merged into it to --out, and train nothing
    #[arg(long, value_name = "DIR", conflicts_with_all = ["data", "resume", "lora"])]
    pub merge: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct EvalArgs {
    /// Folder, weight file or GGUF file; the built-in model by default
    #[arg(value_name = "MODEL")]
    pub path: Option<PathBuf>,
    /// Text (.txt, .md), or .jsonl with context and continuation
    #[arg(short, long, value_name = "FILE", required = true)]
    pub data: PathBuf,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelArgs,
}
