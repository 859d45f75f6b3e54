//! `boostr imatrix`: how much each column of a model's matrices matters, for `boostr quantize`.

use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::Result;
use boostr::convert;
use boostr::files;
use boostr::tokenizer::MAX_TEXT;
use clap::Args;

use crate::exit::{Interrupted, usage};
use crate::model::{Source, bad};
use crate::options::model::ModelArgs;
use crate::stream;
use crate::term::{COUNT, Term, shown};

const EXAMPLES: &str = "\
Examples:
  boostr imatrix ./mamba2-370m --text notes.txt --out notes.imatrix.gguf
  boostr quantize ./mamba2-370m out.gguf -T q4_k_m --imatrix notes.imatrix.gguf";

/// How much each column of a model's matrices matters for a text
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct ImatrixArgs {
    /// The model folder or file, in floats for the best sums
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub path: Option<PathBuf>,
    /// The text to run it through, like those that it is for
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,
    /// The GGUF file to write, as `boostr quantize` and llama.cpp read it
    #[arg(short, long, value_name = "FILE")]
    pub out: PathBuf,
    /// Tokens of a chunk; each starts from an empty state
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub chunk: usize,
    /// At most so many chunks
    #[arg(long, value_name = "N")]
    pub chunks: Option<usize>,
    #[command(flatten)]
    pub model: ModelArgs,
}

pub fn run(args: &ImatrixArgs, term: &Term) -> Result<()> {
    let (source, options) =
        args.model.source(args.path.as_deref().or(args.model.model.as_deref()))?;
    let Source::Path(path) = &source else {
        return Err(usage("imatrix: name a model folder or file; the built-in model has none"));
    };
    if args.chunk == 0 {
        return Err(usage("--chunk: expected at least 1, found 0"));
    }
    let text = files::read_text(&args.text, MAX_TEXT as u64)?;
    let mut ids = source.text_side(&options)?.encode(&text, false)?;
    ids.truncate(args.chunks.map_or(usize::MAX, |chunks| chunks.saturating_mul(args.chunk)));
    if ids.is_empty() {
        return Err(usage("--text: expected a text of one token or more, found none"));
    }
    let bar = term.bar(COUNT).with_message("tokens");
    stream::catch_signals();
    let about = args.text.display().to_string();
    let progress = &mut |done: usize, total: usize| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
        if stream::is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let ids = (&ids[..], about.as_str());
    let collected =
        convert::collect(path, &options, ids, args.chunk, &args.out, &term.cpu, progress);
    bar.finish_and_clear();
    let matrices = collected.map_err(|error| match error {
        boostr::Error::Interrupted { .. } => Interrupted.into(),
        boostr::Error::Argument { .. } => usage(error.to_string()),
        boostr::Error::Io { .. } => error.into(),
        _ => anyhow::Error::from(bad(path, error)),
    })?;
    let out = args.out.display().to_string();
    term.say(format_args!("{}: {matrices} matrices", shown(&out)));
    Ok(())
}
