//! `boostr show`: what a model is made of, from its header and configuration alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use boostr::Error;
use boostr::checkpoint::{Checkpoint, ConfigFile, Dtype, Summary, TensorEntry};
use boostr::convert::kind_of;
use boostr::error::chain;
use boostr::load::adapters::Adapters;
use boostr::load::{OpenOptions, of_quantized_at, placed, read_text};
use boostr::models::{self, Config, Family, LeftOut, PIECE};
use boostr::nn::{AttentionConfig, LayerSpec, Part, SlotSize};
use boostr::ops::{KvType, Level};
use clap::Args;
use serde_json::{Value, json};

use crate::model::{Source, bad};
use crate::system;
use crate::term::{Style, Term, shown};

const EXAMPLES: &str = "\
Examples:
  boostr show ./mamba2-370m --tensors
  boostr show --json | jq .parameters";

/// Layers, sizes, types and memory of a model
#[derive(Debug, Args)]
#[command(alias = "inspect", before_help = EXAMPLES)]
pub struct ShowArgs {
    /// The model; the built-in one by default
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub path: Option<PathBuf>,
    /// List every tensor with type, shape and bytes
    #[arg(long)]
    pub tensors: bool,
    /// Tokens of a sequence, for the memory that its state needs
    #[arg(long, value_name = "TOKENS", default_value_t = 4096)]
    pub context: usize,
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

pub fn run(args: &ShowArgs, term: &Term) -> Result<()> {
    let source = Source::of(args.path.as_deref().or(args.model.as_deref()))?;
    let (source, adapter) = source.with_adapter()?;
    let adapter = match adapter {
        Some(folder) => Some(Adapters::read(&folder).map_err(|error| bad(&folder, error))?),
        None => None,
    };
    let checkpoint = source.checkpoint(args.allow_pickle)?;
    // A weight file on its own can be looked into as well.
    let is_file = matches!(&source, Source::Path(path) if !path.is_dir());
    let has_config = |folder: &Path| {
        ["config.json", "params.json"].iter().any(|name| folder.join(name).exists())
    };
    let config = match source.folder() {
        Some(folder) if is_file && checkpoint.gguf().is_none() && !has_config(folder) => None,
        _ => Some(source.config(Some(&checkpoint))?),
    };
    let (context, level) = (args.context, term.cpu.level());
    let facts = Facts::gather(&source, &checkpoint, config, adapter, context, level);
    // What is wrong with these files is what `verify` tells.
    let text = source.text_side(&OpenOptions::default()).map(|text| text.warnings);
    let mut warnings = text.unwrap_or_default();
    if let Some(config) = facts.config.as_ref().filter(|_| checkpoint.gguf().is_some()) {
        warnings.extend(config.gguf_assumes());
    }
    if let (Source::Path(path), Some(config)) = (&source, &facts.config) {
        let error = unloadable(path, config, &checkpoint);
        warnings.extend(error.map(|error| format!("it does not load: {error}")));
    }
    if args.json {
        let mut json = facts.json(&checkpoint, args.tensors);
        json["warnings"] = json!(warnings);
        return term.print_json(&json);
    }
    term.warn_all(&warnings);
    let mut out = io::stdout().lock();
    writeln!(out, "{}", term.on_stdout(Style::Bold, &facts.name))?;
    for (label, value) in facts.lines() {
        writeln!(out, "  {label:16}{}", shown(&value))?;
    }
    writeln!(out)?;
    if args.tensors {
        for (name, entry) in checkpoint.iter() {
            tensor_line(&mut out, &name.escape_debug().to_string(), entry, 1)?;
        }
    } else {
        for (name, (entry, count)) in &facts.kinds {
            tensor_line(&mut out, &name.escape_debug().to_string(), entry, *count)?;
        }
    }
    Ok(())
}

/// What keeps a model from being loaded: its types, or the way in which it is quantized.
fn unloadable(path: &Path, config: &Config, checkpoint: &Checkpoint) -> Option<Error> {
    if checkpoint.gguf().is_some() {
        return None;
    }
    let codes = |(_, entry): &(&str, &TensorEntry)| {
        let is_code = matches!(entry.dtype, Dtype::U8 | Dtype::I8 | Dtype::I32 | Dtype::U32);
        is_code && entry.shape.len() > 1
    };
    let error = match (config.prepare(&mut checkpoint.clone()), checkpoint.iter().find(codes)) {
        (Err(error), _) => error,
        (Ok(_), Some((name, _))) => {
            // A folder that does not say how it is quantized may have others than weights.
            let what = format!("`{}`", name.escape_debug());
            let error = of_quantized_at(path, Error::Unsupported { what: what.clone() });
            return (error.to_string() != Error::Unsupported { what }.to_string()).then_some(error);
        }
        (Ok(_), None) => return None,
    };
    Some(of_quantized_at(path, error))
}

/// Whether the file has its block for one token more, whole; `None` where it has none.
fn next_block(config: &Config, checkpoint: &Checkpoint) -> Option<Result<(), String>> {
    match models::next_block(config, checkpoint) {
        Ok(is_there) => is_there.then_some(Ok(())),
        Err(error) => Some(Err(chain(&error))),
    }
}

/// The window that a `config.json` does not state, and that transformers' class has.
fn class_window(source: &Source, config: &Config) -> Option<usize> {
    let path = source.folder()?.join("config.json");
    let file = ConfigFile::parse(&path, &read_text(&path).ok()??).ok()?;
    let layers = config.family().layers();
    let window = layers.iter().find_map(|layer| layer.part::<AttentionConfig>()?.window)?;
    (!file.states("sliding_window")).then_some(window)
}

fn tensor_line(out: &mut impl Write, name: &str, entry: &TensorEntry, count: usize) -> Result<()> {
    let times = if count > 1 { format!("{count} x ") } else { String::new() };
    let shape = format!("{:?}", entry.shape);
    let bytes = system::bytes((entry.data.len() * count) as u64);
    let dtype = entry.dtype.name();
    Ok(writeln!(out, "  {name:44} {times:>6}{dtype:5} {shape:18} {bytes:>9}")?)
}

/// What there is to say about a model.
struct Facts<'a> {
    name: String,
    path: Option<String>,
    config: Option<Config>,
    adapter: Option<Adapters>,
    /// The window that the class of transformers has, and the file does not state.
    class_window: Option<usize>,
    /// Tokens of a sequence.
    context: usize,
    /// The instruction set that pages of keys and values are for.
    level: Level,
    summary: Summary,
    /// Tensors of the files that the model does without, and their bytes.
    left_out: BTreeMap<LeftOut, (usize, usize)>,
    /// Whether the block for one token more is whole, or why not; `None` where there is none.
    next_block: Option<Result<(), String>>,
    file_bytes: u64,
    /// Bytes of weights that stay in files, and of those that take memory, once the model is open.
    placed: Option<[usize; 2]>,
    vocab_rows: Option<usize>,
    embedding_parameters: usize,
    /// One tensor of each kind, and how many layers have it.
    kinds: BTreeMap<String, (&'a TensorEntry, usize)>,
}

impl<'a> Facts<'a> {
    fn gather(
        source: &Source,
        checkpoint: &'a Checkpoint,
        config: Option<Config>,
        adapter: Option<Adapters>,
        context: usize,
        level: Level,
    ) -> Self {
        let mut kinds: BTreeMap<String, (&TensorEntry, usize)> = BTreeMap::new();
        for (name, entry) in checkpoint.iter() {
            let kind = kind_of(name);
            // Layers may differ in type or shape; each variant is a kind of its own.
            let same = |(known, _): &(&TensorEntry, usize)| {
                known.dtype == entry.dtype && known.shape == entry.shape
            };
            match kinds.get_mut(&kind) {
                Some(slot) if same(slot) => slot.1 += 1,
                Some(_) => drop(kinds.insert(name.to_owned(), (entry, 1))),
                None => drop(kinds.insert(kind, (entry, 1))),
            }
        }
        let is_own = |name: &str| {
            config.as_ref().is_none_or(|config| config.family().left_out(name).is_none())
        };
        let own = || checkpoint.iter().filter(|(name, _)| is_own(name));
        let ends = |ending: &str| own().find(|(name, _)| name.ends_with(ending));
        let any = |endings: [&str; 4]| endings.into_iter().find_map(ends);
        let embedding = any([
            "embeddings.weight",
            "embedding.weight",
            "embed_tokens.weight",
            "token_embd.weight",
        ]);
        let head = ends("lm_head.weight").or_else(|| own().find(|t| t.0 == "output.weight"));
        let elements =
            |entry: Option<(&str, &TensorEntry)>| entry.map_or(0, |(_, e)| count(&e.shape));
        let files: BTreeSet<&Path> = checkpoint.iter().map(|(_, entry)| &*entry.file).collect();
        let sizes = files.iter().filter_map(|file| Some(fs::metadata(file).ok()?.len()));
        let file_bytes = match source {
            #[cfg(feature = "demo")]
            Source::Embedded => crate::model::demo::FILES.weights.len() as u64,
            _ => sizes.sum(),
        };
        let own_tensors = config.as_ref().map(|config| config.own(checkpoint));
        let summary = own_tensors.as_ref().unwrap_or(checkpoint).summary();
        let mut left_out: BTreeMap<LeftOut, (usize, usize)> = BTreeMap::new();
        if let Some(config) = &config {
            let family = config.family();
            for (name, entry) in checkpoint.iter() {
                if let Some(of) = family.left_out(name) {
                    let (count, bytes) = left_out.entry(of).or_default();
                    *count += 1;
                    *bytes += entry.data.len();
                }
            }
        }
        let next_block = config.as_ref().and_then(|config| next_block(config, checkpoint));
        Self {
            name: source.name(),
            path: match source {
                Source::Embedded => None,
                Source::Path(path) => Some(path.display().to_string()),
            },
            placed: config.as_ref().and_then(|config| placed(config, checkpoint).ok()),
            class_window: match (&config, checkpoint.gguf()) {
                (Some(config), None) => class_window(source, config),
                _ => None,
            },
            config,
            adapter,
            context,
            level,
            summary,
            left_out,
            next_block,
            file_bytes,
            vocab_rows: embedding.and_then(|(_, entry)| entry.shape.first().copied()),
            embedding_parameters: elements(embedding) + elements(head),
            kinds,
        }
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        let mut lines = Vec::new();
        if let Some(path) = &self.path {
            lines.push(("path", path.clone()));
        }
        if let Some(adapter) = &self.adapter {
            let (r, alpha) = adapter.rank();
            let layers = adapter.layers();
            let layers: Vec<String> =
                layers.iter().map(|(name, count)| format!("{count} {name}")).collect();
            let [path, layers] = [adapter.path().display().to_string(), layers.join(", ")];
            let count = system::count(adapter.parameters() as u64);
            let what =
                format!("{path}: rank {r}, alpha {alpha}, {count} parameters beside {layers}");
            lines.push(("adapters", what));
        }
        if let Some(config) = &self.config {
            let family = config.family();
            let (frame, layers) = (family.frame(), family.layers());
            let rows = self.vocab_rows.unwrap_or_else(|| frame.padded_vocab());
            lines.push(("architecture", family.name().to_owned()));
            lines.push(("layers", layer_kinds(&layers)));
            lines.push(("width", format!("{} (d_model)", frame.d_model)));
            for part in kinds_of_part(&layers) {
                lines.extend(part.describe());
            }
            if let Some(window) = self.class_window {
                let of = "of transformers' class; the file has no `sliding_window`";
                lines.push(("window", format!("{window} tokens, {of}")));
            }
            lines.push(("vocabulary", format!("{} ids, {rows} rows", frame.vocab_size)));
            lines.push(("head", tied(frame.tie_embeddings).to_owned()));
            if let Some(trained) = config.trained_length() {
                let limit = match config.context_limit() {
                    None => "no limit: no layer keeps keys of all positions".to_owned(),
                    Some(limit) if limit == trained => "the limit of a sequence".to_owned(),
                    Some(limit) => format!("scaled to {limit}, the limit of a sequence"),
                };
                lines.push(("context", format!("{trained} tokens trained, {limit}")));
            }
        }
        let total = self.summary.parameters as u64;
        let rest = total - self.embedding_parameters as u64;
        let [short, short_rest] = [total, rest].map(system::count);
        lines.push(("parameters", format!("{short} ({total}), without embedding {short_rest}")));
        let types = self.summary.by_dtype.iter();
        let types: Vec<String> =
            types.map(|(name, sum)| format!("{name} {}", system::bytes(*sum as u64))).collect();
        lines.push(("types", types.join(", ")));
        lines.push(("file size", system::bytes(self.file_bytes)));
        for (of, (count, bytes)) in &self.left_out {
            let (what, bytes) = (of.what(), system::bytes(*bytes as u64));
            let how = match (of, &self.next_block) {
                (LeftOut::Pictures, _) => ": text only".to_owned(),
                (LeftOut::NextTokens, Some(Ok(()))) => ": --draft mtp reads it".to_owned(),
                (LeftOut::NextTokens, Some(Err(why))) => format!(": --draft mtp cannot: {why}"),
                (LeftOut::NextTokens, None) => String::new(),
            };
            lines.push(("not read", format!("{count} tensors of {what}, {bytes}{how}")));
        }
        if let Some([in_files, in_memory]) = self.placed.filter(|placed| placed[0] > 0) {
            let [in_files, in_memory] = [in_files, in_memory].map(|n| system::bytes(n as u64));
            let what =
                format!("{in_files} stay in files, read where they are used, {in_memory} do not");
            lines.push(("mapped", what));
        }
        if let Some(memory) = self.memory() {
            let constant = system::bytes(memory.constant);
            let mut growing = format!("{} for each token", system::bytes(memory.per_token));
            if memory.windowed == memory.per_token {
                growing.push_str(" of the window");
            } else if memory.windowed > 0 {
                let windowed = system::bytes(memory.windowed);
                growing.push_str(&format!(", {windowed} of it only within the window"));
            }
            let state = match (memory.constant, memory.per_token) {
                (_, 0) => format!("{constant} per sequence, constant (f32)"),
                (0, _) => format!("{growing} (f32)"),
                _ => format!("{constant} per sequence, and {growing} (f32)"),
            };
            lines.push(("state", state));
            let [state, work] = [memory.state(), memory.work].map(system::bytes);
            let weights = system::bytes(self.summary.bytes as u64);
            let all = system::bytes(memory.total(self.summary.bytes));
            let tokens = self.context;
            lines.push((
                "memory needed",
                format!(
                    "about {all} (weights {weights}, state {state} at {tokens} tokens, work {work}, the \
                     program itself)"
                ),
            ));
        }
        lines
    }

    fn memory(&self) -> Option<Memory> {
        let family = self.config.as_ref()?.family();
        let (frame, layers) = (family.frame(), family.layers());
        let rows = self.vocab_rows.unwrap_or_else(|| frame.padded_vocab());
        let mut memory = Memory::default();
        let mut widest = 0;
        for layer in &layers {
            let (constant, per_token) = layer.state_bytes(self.level, KvType::F32);
            memory.constant += constant as u64;
            memory.per_token += per_token as u64;
            for slot in layer.slots() {
                if matches!(slot.size(), SlotSize::Rows { window: Some(_), .. }) {
                    memory.windowed += slot.bytes_per_token(Level::detect(), KvType::F32) as u64;
                }
            }
            let growing = layer.kv_bytes(self.level, KvType::F32, self.context);
            memory.growing = memory.growing.saturating_add(growing as u64);
            widest = widest.max(layer.work_width());
        }
        memory.work = 4 * (PIECE * (3 * frame.d_model + widest) + rows) as u64;
        Some(memory)
    }

    fn json(&self, checkpoint: &Checkpoint, with_tensors: bool) -> Value {
        let kinds: Vec<Value> = self
            .kinds
            .iter()
            .map(|(name, (entry, count))| {
                let mut object = tensor_json(name, entry);
                object["count"] = json!(count);
                object["bytes"] = json!(entry.data.len() * count);
                object
            })
            .collect();
        let mut object = json!({
            "model": self.name,
            "path": self.path,
            "parameters": self.summary.parameters,
            "parameters_non_embedding": self.summary.parameters - self.embedding_parameters,
            "dtype": self.summary.dtype,
            "weight_bytes": self.summary.bytes,
            "file_bytes": self.file_bytes,
            "mapped_bytes": self.placed.map(|placed| placed[0]),
            "metadata": checkpoint.metadata(),
            "kinds": kinds,
        });
        let left_out = |(of, (tensors, bytes)): (&LeftOut, &(usize, usize))| json!({ "what": of.what(), "tensors": tensors, "bytes": bytes });
        object["left_out"] = self.left_out.iter().map(left_out).collect();
        object["bytes_by_type"] =
            self.summary.by_dtype.iter().map(|(name, sum)| (name.clone(), json!(sum))).collect();
        if let (Some(config), Some(memory)) = (&self.config, self.memory()) {
            let mut sizes = self.sizes_json(config.family(), &memory);
            sizes["trained_length"] = json!(config.trained_length());
            sizes["context_limit"] = json!(config.context_limit());
            if let (Value::Object(object), Value::Object(sizes)) = (&mut object, sizes) {
                object.extend(sizes);
            }
        }
        if let Some(adapter) = &self.adapter {
            let (r, alpha) = adapter.rank();
            object["adapter"] = json!({
                "path": adapter.path().display().to_string(),
                "r": r,
                "alpha": alpha,
                "parameters": adapter.parameters(),
                "layers": adapter.layers(),
            });
        }
        if with_tensors {
            object["tensors"] =
                checkpoint.iter().map(|(name, entry)| tensor_json(name, entry)).collect();
        }
        object
    }

    fn sizes_json(&self, family: &dyn Family, memory: &Memory) -> Value {
        let (frame, layers) = (family.frame(), family.layers());
        let mut sizes = json!({
            "architecture": family.name(),
            "n_layer": layers.len(),
            "layers": layers.iter().map(LayerSpec::kind).collect::<Vec<_>>(),
            "d_model": frame.d_model,
            "vocab_size": frame.vocab_size,
            "vocab_rows": self.vocab_rows.unwrap_or_else(|| frame.padded_vocab()),
            "tie_embeddings": frame.tie_embeddings,
            "state_bytes": memory.constant,
            "state_bytes_per_token": memory.per_token,
            "context": self.context,
            "memory_bytes": memory.total(self.summary.bytes),
        });
        for part in kinds_of_part(&layers) {
            for (mut name, value) in part.to_json() {
                if sizes.get(&name).is_some() {
                    name = format!("{}_{name}", part.kind());
                }
                sizes[name] = value;
            }
        }
        sizes
    }
}

/// Layers, and how many there are of each kind.
fn layer_kinds(layers: &[LayerSpec]) -> String {
    let mut kinds: Vec<(String, usize)> = Vec::new();
    for kind in layers.iter().map(LayerSpec::kind) {
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind, 1)),
        }
    }
    let kinds: Vec<String> =
        kinds.into_iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    format!("{} ({})", layers.len(), kinds.join(", "))
}

/// The first part of each kind that layers have, those that keep something first.
fn kinds_of_part(layers: &[LayerSpec]) -> Vec<&dyn Part> {
    let mut kinds: Vec<&dyn Part> = Vec::new();
    for part in layers.iter().flat_map(LayerSpec::parts) {
        if kinds.iter().all(|known| known.kind() != part.kind()) {
            kinds.push(part);
        }
    }
    kinds.sort_by_key(|part| part.slots().is_empty());
    kinds
}

/// Bytes that the program takes for itself, a tokenizer of usual size included.
const PROGRAM: u64 = 24 << 20;

/// Bytes that a run needs beside the weights.
#[derive(Default)]
struct Memory {
    /// Of the state: what does not depend on the length of the sequence.
    constant: u64,
    /// Of the state: what each token adds.
    per_token: u64,
    /// Of that: what is forgotten when a window has passed.
    windowed: u64,
    /// Of the state: what the tokens of the context add.
    growing: u64,
    work: u64,
}

impl Memory {
    fn state(&self) -> u64 {
        self.constant.saturating_add(self.growing)
    }

    fn total(&self, weights: usize) -> u64 {
        self.state().saturating_add(weights as u64 + self.work + PROGRAM)
    }
}

fn tensor_json(name: &str, entry: &TensorEntry) -> Value {
    json!({
        "name": name,
        "dtype": entry.dtype.name(),
        "shape": entry.shape,
        "bytes": entry.data.len(),
        "file": entry.file.display().to_string(),
    })
}

fn tied(tie: Option<bool>) -> &'static str {
    match tie {
        Some(true) => "tied: the embedding",
        Some(false) => "lm_head",
        None => "lm_head, or the embedding where there is none",
    }
}

fn count(shape: &[usize]) -> usize {
    shape.iter().product()
}
