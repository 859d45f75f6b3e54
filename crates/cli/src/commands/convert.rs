//! `boostr convert`: the same model in another file; its steps serve `boostr quantize` too.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::Result;
use boostr::Error;
use boostr::checkpoint::Dtype;
use boostr::convert::{self, Importance, Options, Types, Written, kind_of};
use boostr::evaluate::Score;
use boostr::load::OpenOptions;
use clap::Args;
use serde_json::{Value, json};

use crate::exit::{Interrupted, usage};
use crate::model::{Source, bad};
use crate::stream;
use crate::system;
use crate::term::{COUNT, Style, Term, shown};

const EXAMPLES: &str = "\
Examples:
  boostr convert ./mamba2-370m mamba2-370m.gguf
  boostr convert mamba2-370m-q4_k_m.gguf ./mamba2-370m-again --type bf16";

pub(super) const NOTES: &str = "\
Types: f32, f16, bf16; q8_0, q4_0, q4_1, q5_0, q5_1, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs; mixes \
q4_k_m, q5_k_m. Only matrices change type: convolutions, A, D, dt_bias, norms and all vectors are written as f32. A matrix \
whose rows are not whole blocks of a type gets the next wider one that fits; the table says so. \
--tensor-type goes by the names in GGUF files; the first that fits a name counts.";

/// A model in another file: folder to GGUF, GGUF to folder
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, after_help = NOTES)]
pub struct ConvertArgs {
    #[command(flatten)]
    pub files: FileArgs,
    /// Type of the matrices; by default each keeps its own, in a folder as f32 if it is quantized
    #[arg(short = 'T', long = "type", value_name = "TYPE")]
    pub dtype: Option<String>,
}

/// What is converted to what.
#[derive(Debug, Args)]
pub struct FileArgs {
    /// Model folder, weight file in one, or GGUF file
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// The file to write, ending in .gguf, or the folder to make
    #[arg(value_name = "OUT")]
    pub out: PathBuf,
    /// Type of the matrices whose name the regular expression finds; may be given several times
    #[arg(long, value_name = "REGEX=TYPE")]
    pub tensor_type: Vec<String>,
    /// Type of the table of token embeddings
    #[arg(long, value_name = "TYPE")]
    pub embedding: Option<String>,
    /// Type of the head, where it is not the embedding
    #[arg(long, value_name = "TYPE")]
    pub head: Option<String>,
    /// Use this tokenizer.json in place of the model's
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Read pytorch_model.bin, with a closed list of types and without running it
    #[arg(long)]
    pub allow_pickle: bool,
    /// Replace OUT when it is a file that is there already
    #[arg(long)]
    pub force: bool,
    /// A line for each tensor, not for each kind
    #[arg(long)]
    pub tensors: bool,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
}

impl FileArgs {
    /// What the library needs to know to open the model.
    pub fn options(&self) -> OpenOptions {
        let (allow_pickle, tokenizer) = (self.allow_pickle, self.tokenizer.clone());
        OpenOptions { allow_pickle, tokenizer, ..OpenOptions::default() }
    }
}

pub fn run(args: &ConvertArgs, term: &Term) -> Result<()> {
    let types = match &args.dtype {
        Some(name) => named(name)?,
        None => Types::kept(),
    };
    let written = write(&args.files, types, None, term)?;
    report(&args.files, &written, None, term)
}

pub(super) fn named(name: &str) -> Result<Types> {
    Types::named(name).map_err(|error| usage(error.to_string()))
}

/// The options' own types, most special last.
fn with_options(mut types: Types, files: &FileArgs) -> Result<Types> {
    let tables = [("^output\\.weight$", &files.head), ("^token_embd\\.weight$", &files.embedding)];
    for (pattern, name) in tables {
        if let Some(name) = name {
            types = types.with(pattern, one_type(name)?)?;
        }
    }
    for rule in files.tensor_type.iter().rev() {
        let Some((pattern, name)) = rule.rsplit_once('=') else {
            return Err(usage(format!(
                "--tensor-type {rule}: expected REGEX=TYPE, as ssm_in=q8_0"
            )));
        };
        let types_with = types.with(pattern, one_type(name)?);
        types = types_with.map_err(|error| usage(format!("--tensor-type: {error}")))?;
    }
    Ok(types)
}

fn one_type(name: &str) -> Result<Dtype> {
    convert::type_named(name).map_err(|error| usage(error.to_string()))
}

pub(super) fn write(
    files: &FileArgs,
    types: Types,
    importance: Option<Importance>,
    term: &Term,
) -> Result<Vec<Written>> {
    let types = with_options(types, files)?;
    Source::Path(files.input.clone()).check_exists()?;
    let options = Options { open: files.options(), types, importance, overwrite: files.force };
    let bar = term.bar(COUNT).with_message("tensors");
    stream::catch_signals();
    let converted = convert::convert(&files.input, &files.out, &options, &mut |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
        if stream::is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    bar.finish_and_clear();
    let converted = converted.map_err(|error| match error {
        Error::Argument { .. } => usage(error.to_string()),
        Error::Interrupted { .. } => Interrupted.into(),
        Error::Io { ref path, .. } if !path.starts_with(&files.input) => error.into(),
        _ => bad(&files.input, error).into(),
    })?;
    for warning in converted.warnings {
        term.warn(warning);
    }
    Ok(converted.tensors)
}

/// What a model gives a text, before and after.
pub(super) struct Change {
    pub before: Score,
    pub after: Score,
}

/// Tensors of one kind that went the same way.
#[derive(Default)]
struct Group {
    count: usize,
    bytes: usize,
    squares: f64,
    /// Of weighted errors, without weights in the choice and with.
    weighted: [f64; 2],
}

pub(super) fn report(
    files: &FileArgs,
    written: &[Written],
    change: Option<&Change>,
    term: &Term,
) -> Result<()> {
    let before: usize = written.iter().map(|w| w.from.bytes_of(&w.shape).unwrap_or(0)).sum();
    let after: usize = written.iter().map(|w| w.bytes).sum();
    if files.json {
        return term.print_json(&as_json(files, written, before, after, change));
    }
    let mut out = io::stdout().lock();
    let heading = format!(
        "{:44} {:>6} {:>7}    {:7} {:>10} {:>10}",
        "tensor", "", "from", "to", "error", "size"
    );
    let weighted = if written.iter().any(|w| w.weighted.is_some()) {
        "  weighted error, without -> with"
    } else {
        ""
    };
    writeln!(out, "{}", term.on_stdout(Style::Bold, &format!("{heading}{weighted}")))?;
    let mut groups: BTreeMap<(String, &str, &str), Group> = BTreeMap::new();
    for w in written {
        let name = if files.tensors { w.name.clone() } else { kind_of(&w.name) };
        let group = groups.entry((name, w.from.name(), w.to.name())).or_default();
        group.count += 1;
        group.bytes += w.bytes;
        group.squares += w.error * w.error;
        for (sum, error) in group.weighted.iter_mut().zip(w.weighted.into_iter().flatten()) {
            *sum += error * error;
        }
    }
    for ((name, from, to), group) in &groups {
        let times = if group.count > 1 { format!("{} x", group.count) } else { String::new() };
        let error = (group.squares / group.count as f64).sqrt();
        let error =
            if error == 0.0 { "exact".to_owned() } else { format!("{:.3} %", 100.0 * error) };
        let [from, to] = [from, to].map(|name| name.to_lowercase());
        let bytes = system::bytes(group.bytes as u64);
        let name = shown(name);
        write!(out, "{name:44} {times:>6} {from:>7} -> {to:7} {error:>10} {bytes:>10}")?;
        if group.weighted != [0.0; 2] {
            let percent = |sum: f64| 100.0 * (sum / group.count as f64).sqrt();
            let [without, with] = group.weighted.map(percent);
            write!(out, "  {without:.3} % -> {with:.3} %")?;
        }
        writeln!(out)?;
    }
    let [before, after] = [before, after].map(|bytes| system::bytes(bytes as u64));
    let path = files.out.display().to_string();
    writeln!(out, "\n{}: {} tensors, {before} -> {after}", shown(&path), written.len())?;
    if let Some(Change { before, after }) = change {
        let [old, new] = [before.bits_per_byte(), after.bits_per_byte()];
        writeln!(
            out,
            "bits per byte on {} tokens: {old:.4} -> {new:.4} ({:+.2} %)",
            after.tokens,
            100.0 * (new / old - 1.0)
        )?;
    }
    Ok(out.flush()?)
}

fn as_json(
    files: &FileArgs,
    written: &[Written],
    before: usize,
    after: usize,
    change: Option<&Change>,
) -> Value {
    let tensors: Vec<Value> = written
        .iter()
        .map(|w| {
            json!({
                "name": w.name,
                "shape": w.shape,
                "from": w.from.name().to_lowercase(),
                "to": w.to.name().to_lowercase(),
                "bytes": w.bytes,
                "relative_rms_error": w.error,
                "weighted_rms_error_before": w.weighted.map(|[before, _]| before),
                "weighted_rms_error": w.weighted.map(|[_, after]| after),
            })
        })
        .collect();
    let mut object = json!({
        "out": files.out.display().to_string(),
        "bytes_before": before,
        "bytes": after,
        "tensors": tensors,
    });
    if let Some(Change { before, after }) = change {
        object["measured"] = json!({
            "tokens": after.tokens,
            "bytes": after.bytes,
            "bits_per_byte_before": before.bits_per_byte(),
            "bits_per_byte": after.bits_per_byte(),
        });
    }
    object
}
