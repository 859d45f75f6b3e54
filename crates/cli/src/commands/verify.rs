//! `boostr verify`: says everything that is wrong with a model, not only the first thing.

use std::path::{Path, PathBuf};

use anyhow::Result;
use boostr::backend::{self, Cpu, CpuClient};
use boostr::checkpoint::{Checkpoint, ConfigFile, NotFinite, Summary, gguf, not_finite};
use boostr::error::{Error, chain};
use boostr::generation_config::{GenerationDefaults, SpecialTokens};
use boostr::load::adapters::Adapters;
use boostr::load::{OpenOptions, is_gguf, of_quantized_at, read_text};
use boostr::models::{Config, Logits, Model, Mtp, Run};
use boostr::ops;
use boostr::tokenizer::Tokenizer;
use clap::Args;
use serde_json::json;

use crate::checks::Checks;
use crate::exit::BadModel;
use crate::model::Source;
use crate::system;
use crate::term::Term;

const EXAMPLES: &str = "\
Examples:
  boostr verify ./mamba2-370m --values
  boostr verify model-00001-of-00002.safetensors";

/// Check a model folder or a file of one, and say what is wrong
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct VerifyArgs {
    /// Folder or file to check; the built-in model by default
    #[arg(value_name = "PATH", conflicts_with = "model")]
    pub path: Option<PathBuf>,
    /// Look for NaN and infinity in every weight, and run one token
    #[arg(long)]
    pub values: bool,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
    /// The model [env: BOOSTR_MODEL]
    #[arg(short, long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Read pytorch_model.bin, with a closed list of types and without running it
    #[arg(long)]
    pub allow_pickle: bool,
}

/// Tensors with bad values that are named.
const MAX_NAMED: usize = 5;

pub fn run(args: &VerifyArgs, term: &Term) -> Result<()> {
    let source = Source::of(args.path.as_deref().or(args.model.as_deref()))?;
    let (source, adapter) = source.with_adapter()?;
    let mut checks = check(&source, args.allow_pickle, args.values, &term.cpu)?;
    if let Some(folder) = adapter {
        let options = OpenOptions { adapter: Some(folder.clone()), ..OpenOptions::default() };
        let opened = source.open(&options, &term.cpu);
        let parameters = || Ok::<_, Error>(Adapters::read(&folder)?.parameters());
        let found = opened.and_then(|_| parameters().map_err(BadModel::from));
        checks.record("adapters", found, |count| format!("{count} parameters beside the model"));
    }
    checks.print(args.json, json!({ "model": source.name() }), term)?;
    checks.conclude(true)
}

/// Checks a model, or one file of it.
///
/// # Errors
///
/// When there is nothing at the path.
pub fn check(
    source: &Source,
    allow_pickle: bool,
    values: bool,
    cpu: &CpuClient,
) -> Result<Checks, BadModel> {
    let mut checks = Checks::default();
    source.check_exists()?;
    match source {
        Source::Path(path) if path.to_string_lossy().ends_with(".safetensors.index.json") => {
            let folder = source.folder().unwrap_or(path).to_path_buf();
            check_model(&Source::Path(folder), allow_pickle, values, cpu, &mut checks);
        }
        Source::Path(path) if path.extension().is_some_and(|ending| ending == "json") => {
            check_json(path, &mut checks);
        }
        Source::Path(path)
            if path.is_file() && is_alone(path) && !is_gguf(path).unwrap_or(false) =>
        {
            if let Some(checkpoint) = check_weights(source, allow_pickle, &mut checks) {
                checks.warn("config", "no config.json for this one file: tensors not compared");
                check_values(&checkpoint, values, &mut checks);
            }
        }
        _ => check_model(source, allow_pickle, values, cpu, &mut checks),
    }
    Ok(checks)
}

/// Whether a weight file has no configuration beside it that is for this file.
fn is_alone(path: &Path) -> bool {
    let beside = |name: &str| path.with_file_name(name).exists();
    !(beside("config.json") || beside("params.json")) || beside("model.safetensors.index.json")
}

fn check_model(
    source: &Source,
    allow_pickle: bool,
    values: bool,
    cpu: &CpuClient,
    checks: &mut Checks,
) {
    let checkpoint = check_weights(source, allow_pickle, checks);
    let is_gguf = matches!(source, Source::Path(path) if is_gguf(path).unwrap_or(false));
    if checkpoint.is_none() && is_gguf {
        return; // All the rest is in that file too.
    }
    let config = checks.record("config", source.config(checkpoint.as_ref()), describe_config);
    let rows = config.as_ref().map(|config| config.family().frame().padded_vocab());
    let mut model = None;
    if let Some(config) = config.as_ref().filter(|_| is_gguf) {
        for line in config.gguf_assumes() {
            checks.warn("config", line);
        }
    }
    if let (Some(config), Some(checkpoint)) = (config, &checkpoint) {
        let loaded = Model::<Cpu>::load(config, checkpoint.clone(), cpu.clone());
        let loaded = loaded.map_err(|error| match source {
            Source::Path(path) => of_quantized_at(path, error),
            Source::Embedded => error,
        });
        model = checks.record("tensors", loaded, |_| "those of the configuration".to_owned());
        if let Some(model) = &model {
            match Mtp::load(model, checkpoint.clone()) {
                Ok(None) => {}
                Ok(Some(_)) => checks.ok("draft", "the block for one token more is whole"),
                Err(error @ Error::Unsupported { .. }) => checks.warn("draft", chain(&error)),
                Err(error) => checks.fail("draft", chain(&error)),
            }
        }
    }
    match checkpoint.as_ref().and_then(Checkpoint::gguf) {
        Some(metadata) => check_gguf_text(metadata, checks),
        None => check_text_side(source, model.as_ref().map(Model::vocab_rows).or(rows), checks),
    }
    if checks.passed() {
        check_together(source, checks);
    }
    if let Some(checkpoint) = &checkpoint {
        check_values(checkpoint, values, checks);
        if is_gguf && !values {
            checks.warn("values", "not looked at: --values reads them all");
        }
    }
    if let Some(model) = model.filter(|_| values) {
        match one_token(&model) {
            Ok(()) => checks.ok("one token", "its logits are finite"),
            Err(reason) => checks.fail("one token", reason),
        }
    }
}

fn check_weights(source: &Source, allow_pickle: bool, checks: &mut Checks) -> Option<Checkpoint> {
    checks.record("weights", source.checkpoint(allow_pickle), |checkpoint| {
        let own = source.config(Some(checkpoint)).ok().map(|config| config.own(checkpoint));
        let own = own.as_ref().unwrap_or(checkpoint);
        let Summary { parameters, bytes, dtype, .. } = own.summary();
        let [count, bytes] = [system::count(parameters as u64), system::bytes(bytes as u64)];
        format!("{} tensors, {count} parameters, {dtype}, {bytes}", own.len())
    })
}

/// The tokenizer and the defaults of generation, where there are files of them.
fn check_text_side(source: &Source, rows: Option<usize>, checks: &mut Checks) {
    let Some(folder) = source.folder() else {
        // Files that are part of the program are opened as one.
        let opened = source.open(&Default::default(), &backend::cpu());
        checks.record("tokenizer", opened, |lm| match &lm.tokenizer {
            Some(tokenizer) => describe_tokenizer(tokenizer),
            None => "none".to_owned(),
        });
        return;
    };
    let file = folder.join("tokenizer.json");
    if file.exists() {
        let tokenizer = checks.record("tokenizer", Tokenizer::from_file(&file), describe_tokenizer);
        if let (Some(tokenizer), Some(rows)) = (tokenizer, rows)
            && tokenizer.max_id() as usize >= rows
        {
            let id = tokenizer.max_id();
            checks.fail("tokenizer", format!("id {id} has no row in the weights ({rows} rows)"));
        }
    } else {
        checks.warn("tokenizer", "no tokenizer.json: text needs --tokenizer FILE");
    }
    let names = [
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "generation_config.json",
    ];
    for name in names {
        let file = folder.join(name);
        if file.exists() {
            check_json(&file, checks);
        }
    }
}

/// What the files of text say of each other.
fn check_together(source: &Source, checks: &mut Checks) {
    match source.text_side(&OpenOptions::default()) {
        Ok(text) => text.warnings.into_iter().for_each(|what| checks.warn("text", what)),
        Err(error) => checks.fail("text", chain(&error)),
    }
}

/// The tokenizer in a GGUF file.
fn check_gguf_text(metadata: &gguf::Metadata, checks: &mut Checks) {
    let text = checks.record("tokenizer", Tokenizer::from_gguf(metadata), |text| match text {
        Some(text) => describe_tokenizer(&text.tokenizer),
        None => "none".to_owned(),
    });
    if let Some(None) = text {
        checks.warn("tokenizer", "no tokens in the file: text needs --tokenizer FILE");
    }
}

/// One JSON file of a model, told by its name.
fn check_json(path: &Path, checks: &mut Checks) {
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let text = || {
        let missing = || Error::io(path, std::io::ErrorKind::NotFound.into());
        read_text(path)?.ok_or_else(missing)
    };
    let fine = |_: &_| "readable".to_owned();
    match name.as_ref() {
        "tokenizer.json" => {
            checks.record(name, Tokenizer::from_file(path), describe_tokenizer);
        }
        "tokenizer_config.json" => {
            let special = text().and_then(|text| SpecialTokens::from_json(path, &text));
            checks.record(name, special, |_| "readable".to_owned());
        }
        "special_tokens_map.json" | "added_tokens.json" => {
            let file = text().and_then(|text| ConfigFile::parse(path, &text));
            checks.record(name, file, |_| "readable".to_owned());
        }
        "generation_config.json" => {
            let defaults = text().and_then(|text| GenerationDefaults::from_json(path, &text));
            checks.record(name, defaults, fine);
        }
        "config.json" | "params.json" => {
            let config = text()
                .and_then(|text| ConfigFile::parse(path, &text))
                .and_then(|file| Config::read(&file));
            checks.record(name, config, describe_config);
        }
        _ => checks.fail(
            name,
            "not a file of a model: weights, config.json, params.json, tokenizer.json, \
             tokenizer_config.json, special_tokens_map.json, added_tokens.json and \
             generation_config.json are",
        ),
    }
}

fn describe_config(config: &Config) -> String {
    let family = config.family();
    let (frame, layers) = (family.frame(), family.layers().len());
    let (name, width, vocab) = (family.name(), frame.d_model, frame.vocab_size);
    format!("{name}, {layers} layers of width {width}, vocabulary {vocab}")
}

fn describe_tokenizer(tokenizer: &Tokenizer) -> String {
    format!("{} tokens", tokenizer.vocab_size())
}

fn check_values(checkpoint: &Checkpoint, wanted: bool, checks: &mut Checks) {
    if !wanted {
        return;
    }
    let found = match not_finite(checkpoint, |_| {}) {
        Ok(found) => found,
        Err(error) => return checks.fail("values", chain(&error)),
    };
    let bad: Vec<String> = found
        .into_iter()
        .map(|NotFinite { name, nan, infinite, elements, byte }| {
            let place = match elements.len() {
                1 => format!("at {}", elements.start),
                _ => format!("in the block of values {} to {}", elements.start, elements.end - 1),
            };
            format!(
                "`{}` has {nan} NaN and {infinite} infinite values, the first {place} (byte {byte})",
                name.escape_debug()
            )
        })
        .collect();
    let more = bad.len().saturating_sub(MAX_NAMED);
    if bad.is_empty() {
        checks.ok("values", "all finite");
    }
    for line in bad.into_iter().take(MAX_NAMED) {
        checks.fail("values", line);
    }
    if more > 0 {
        checks.fail("values", format!("and {more} more tensors"));
    }
}

/// Runs one token; an error is a reason.
fn one_token(model: &Model<Cpu>) -> Result<(), String> {
    let run = || -> boostr::Result<Vec<f32>> {
        let mut state = model.new_state()?;
        let logits = model.forward(&mut [Run { tokens: &[0], state: &mut state }], Logits::Last)?;
        ops::to_vec(&logits)
    };
    let logits = run().map_err(|error| chain(&error))?;
    match logits.iter().position(|logit| !logit.is_finite()) {
        Some(id) => Err(format!("the logit of token {id} is {}", logits[id])),
        None => Ok(()),
    }
}
