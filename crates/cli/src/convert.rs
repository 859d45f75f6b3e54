//! `boostr convert` and `boostr quantize`: the same model in another file, or in fewer bits.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::{Context, Result};
use boostr::Error;
use boostr::backend::Cpu;
use boostr::checkpoint::{Dtype, gguf};
use boostr::convert::{self, Options, Types, Written, kind_of};
use boostr::evaluate::{Score, score};
use boostr::load::LanguageModel;
use serde_json::{Value, json};

use crate::args::{ConvertArgs, FileArgs, QuantizeArgs};
use crate::exit::{Interrupted, usage};
use crate::model::{Source, bad};
use crate::stream;
use crate::system;
use crate::term::{COUNT, Style, Term};

pub fn run(args: &ConvertArgs, term: &Term) -> Result<()> {
    let types = match &args.dtype {
        Some(name) => named(name)?,
        None => Types::kept(),
    };
    let written = write(&args.files, types, term)?;
    report(&args.files, &written, None, term)
}

pub fn quantize(args: &QuantizeArgs, term: &Term) -> Result<()> {
    if !gguf::is_name(&args.files.out) {
        let out = args.files.out.display();
        return Err(usage(format!(
            "`{out}`: a quantized model is a GGUF file: name it {out}.gguf"
        )));
    }
    let types = named(&args.dtype)?;
    let text = args.measure.as_deref().map(read).transpose()?;
    // First, so that nothing is written when it cannot be measured.
    let measured = |path, text: &String, when| measure(path, &args.files, text, when, term);
    let before =
        text.as_ref().map(|text| measured(&args.files.input, text, "before")).transpose()?;
    let written = write(&args.files, types, term)?;
    let after = text.as_ref().map(|text| measured(&args.files.out, text, "after")).transpose()?;
    let change = before.zip(after).map(|(before, after)| Change { before, after });
    report(&args.files, &written, change.as_ref(), term)
}

fn named(name: &str) -> Result<Types> {
    Types::named(name).map_err(|error| usage(error.to_string()))
}

fn read(path: &Path) -> Result<String> {
    let text = fs::read_to_string(path);
    text.with_context(|| format!("`{}` (the text to measure with)", path.display()))
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

fn write(files: &FileArgs, types: Types, term: &Term) -> Result<Vec<Written>> {
    let types = with_options(types, files)?;
    Source::Path(files.input.clone()).check_exists()?;
    let options = Options { open: files.options(), types, overwrite: files.force };
    let bar = term.bar(COUNT).with_message("tensors");
    stream::catch_interrupt();
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
        term.say(format_args!("{} {warning}", term.on_stderr(Style::Careful, "warning:")));
    }
    Ok(converted.tensors)
}

/// What a model gives a text, before and after.
struct Change {
    before: Score,
    after: Score,
}

fn measure(path: &Path, files: &FileArgs, text: &str, when: &str, term: &Term) -> Result<Score> {
    let source = Source::Path(path.to_path_buf());
    let lm: LanguageModel<Cpu> = source.open(&files.options())?;
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

/// Tensors of one kind that went the same way.
#[derive(Default)]
struct Group {
    count: usize,
    bytes: usize,
    squares: f64,
}

fn report(
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
    writeln!(out, "{}", term.on_stdout(Style::Bold, &heading))?;
    let mut groups: BTreeMap<(String, &str, &str), Group> = BTreeMap::new();
    for w in written {
        let name = if files.tensors { w.name.clone() } else { kind_of(&w.name) };
        let group = groups.entry((name, w.from.name(), w.to.name())).or_default();
        group.count += 1;
        group.bytes += w.bytes;
        group.squares += w.error * w.error;
    }
    for ((name, from, to), group) in &groups {
        let times = if group.count > 1 { format!("{} x", group.count) } else { String::new() };
        let error = (group.squares / group.count as f64).sqrt();
        let error =
            if error == 0.0 { "exact".to_owned() } else { format!("{:.3} %", 100.0 * error) };
        let [from, to] = [from, to].map(|name| name.to_lowercase());
        let bytes = system::bytes(group.bytes as u64);
        writeln!(out, "{name:44} {times:>6} {from:>7} -> {to:7} {error:>10} {bytes:>10}")?;
    }
    let [before, after] = [before, after].map(|bytes| system::bytes(bytes as u64));
    writeln!(out, "\n{}: {} tensors, {before} -> {after}", files.out.display(), written.len())?;
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
