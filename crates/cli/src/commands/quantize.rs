//! `boostr quantize`: a model in fewer bits, and what that changes.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use boostr::backend::Cpu;
use boostr::checkpoint::gguf;
use boostr::convert::Importance;
use boostr::evaluate::{Score, score};
use boostr::files;
use boostr::load::LanguageModel;
use boostr::tokenizer::MAX_TEXT;
use clap::Args;

use super::convert::{Change, FileArgs, NOTES, named, report, write};
use crate::exit::usage;
use crate::model::Source;
use crate::term::{COUNT, Term};

const EXAMPLES: &str = "\
Examples:
  boostr quantize ./mamba2-370m mamba2-370m-q4_k_m.gguf --measure notes.txt
  boostr quantize ./mamba2-370m out.gguf -T q4_0 --tensor-type ssm_in=q8_0 --embedding q6_k";

/// A model in fewer bits, and what that changes
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, after_help = NOTES)]
pub struct QuantizeArgs {
    #[command(flatten)]
    pub files: FileArgs,
    /// Type of the matrices, or a mix
    #[arg(short = 'T', long = "type", value_name = "TYPE", default_value = "q4_k_m")]
    pub dtype: String,
    /// How much each column matters: an importance matrix of llama.cpp, as GGUF or in the older form (.dat, .imatrix)
    #[arg(long, value_name = "FILE")]
    pub imatrix: Option<PathBuf>,
    /// Tell how many bits a byte of this text takes, before and after
    #[arg(long, value_name = "FILE")]
    pub measure: Option<PathBuf>,
}

pub fn run(args: &QuantizeArgs, term: &Term) -> Result<()> {
    if !gguf::is_name(&args.files.out) {
        let out = args.files.out.display();
        return Err(usage(format!(
            "`{out}`: a quantized model is a GGUF file: name it {out}.gguf"
        )));
    }
    let types = named(&args.dtype)?;
    let importance = args.imatrix.as_deref().map(Importance::read).transpose()?;
    let text = args.measure.as_deref().map(read).transpose()?;
    // First, so that nothing is written when it cannot be measured.
    let measured = |path, text: &String, when| measure(path, &args.files, text, when, term);
    let before =
        text.as_ref().map(|text| measured(&args.files.input, text, "before")).transpose()?;
    let written = write(&args.files, types, importance, term)?;
    let after = text.as_ref().map(|text| measured(&args.files.out, text, "after")).transpose()?;
    let change = before.zip(after).map(|(before, after)| Change { before, after });
    report(&args.files, &written, change.as_ref(), term)
}

fn read(path: &Path) -> Result<String> {
    let text = files::read_text(path, MAX_TEXT as u64);
    text.with_context(|| format!("`{}` (the text to measure with)", path.display()))
}

fn measure(path: &Path, files: &FileArgs, text: &str, when: &str, term: &Term) -> Result<Score> {
    let source = Source::Path(path.to_path_buf());
    let lm: LanguageModel<Cpu> = source.open(&files.options(), &term.cpu)?;
    let ids = lm.encode(text)?;
    if ids.len() < 2 {
        let found = ids.len();
        return Err(usage(format!(
            "--measure: expected a text of two tokens or more, found {found}"
        )));
    }
    let bar = term.bar(COUNT).with_message(format!("tokens {when}"));
    let score = score(&lm.model, &ids, text.len(), |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    Ok(score?)
}
