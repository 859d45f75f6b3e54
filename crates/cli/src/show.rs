//! `boostr show`: what a model is made of, from its header and configuration alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use anyhow::Result;
use boostr::checkpoint::{Checkpoint, TensorEntry};
use boostr::convert::kind_of;
use boostr::models::mamba2::Config;
use serde_json::{Value, json};

use crate::args::ShowArgs;
use crate::model::{Source, Summary};
use crate::system;
use crate::term::{Style, Term};

/// Tokens of a long prompt that are computed at once, for the estimate of memory.
const PIECE: usize = 960;

pub fn run(args: &ShowArgs, term: &Term) -> Result<()> {
    let source = Source::of(args.path.as_deref().or(args.model.as_deref()))?;
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
    let facts = Facts::gather(&source, &checkpoint, config);
    if args.json {
        return term.print_json(&facts.json(&checkpoint, args.tensors));
    }
    let mut out = io::stdout().lock();
    writeln!(out, "{}", term.on_stdout(Style::Bold, &facts.name))?;
    for (label, value) in facts.lines() {
        writeln!(out, "  {label:16}{value}")?;
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
    summary: Summary,
    file_bytes: u64,
    vocab_rows: Option<usize>,
    embedding_parameters: usize,
    /// One tensor of each kind, and how many layers have it.
    kinds: BTreeMap<String, (&'a TensorEntry, usize)>,
}

impl<'a> Facts<'a> {
    fn gather(source: &Source, checkpoint: &'a Checkpoint, config: Option<Config>) -> Self {
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
        let ends = |ending: &str| checkpoint.iter().find(|(name, _)| name.ends_with(ending));
        let any = |endings: [&str; 3]| endings.into_iter().find_map(ends);
        let embedding = any(["embeddings.weight", "embedding.weight", "token_embd.weight"]);
        let head =
            ends("lm_head.weight").or_else(|| checkpoint.iter().find(|t| t.0 == "output.weight"));
        let elements =
            |entry: Option<(&str, &TensorEntry)>| entry.map_or(0, |(_, e)| count(&e.shape));
        let files: BTreeSet<&Path> = checkpoint.iter().map(|(_, entry)| &*entry.file).collect();
        let sizes = files.iter().filter_map(|file| Some(fs::metadata(file).ok()?.len()));
        let file_bytes = match source {
            #[cfg(feature = "demo")]
            Source::Embedded => crate::model::demo::FILES.weights.len() as u64,
            _ => sizes.sum(),
        };
        Self {
            name: source.name(),
            path: match source {
                Source::Embedded => None,
                Source::Path(path) => Some(path.display().to_string()),
            },
            config,
            summary: Summary::of(checkpoint),
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
        if let Some(config) = &self.config {
            let mixer = &config.mixer;
            let rows = self.vocab_rows.unwrap_or_else(|| config.padded_vocab());
            lines.push(("architecture", "mamba2".to_owned()));
            lines.push(("layers", config.n_layer.to_string()));
            lines.push(("width", format!("{} (d_model)", mixer.d_model)));
            lines.push(("heads", format!("{} of {}", mixer.nheads, mixer.headdim)));
            lines.push(("groups", mixer.ngroups.to_string()));
            lines.push(("state width", mixer.d_state.to_string()));
            lines.push(("convolution", format!("{} taps", mixer.d_conv)));
            lines.push(("vocabulary", format!("{} ids, {rows} rows", config.vocab_size)));
            lines.push(("head", tied(config.tie_embeddings).to_owned()));
        }
        let total = self.summary.parameters as u64;
        let rest = total - self.embedding_parameters as u64;
        let [short, short_rest] = [total, rest].map(system::count);
        lines.push(("parameters", format!("{short} ({total}), without embedding {short_rest}")));
        lines.push(("type", self.summary.dtype.clone()));
        lines.push(("file size", system::bytes(self.file_bytes)));
        if let Some(memory) = self.memory() {
            let [state, work] = [memory.state, memory.state + memory.work].map(system::bytes);
            let weights = system::bytes(self.summary.bytes as u64);
            let all = system::bytes(memory.total(self.summary.bytes));
            lines.push(("state", format!("{state} per sequence, constant (f32)")));
            lines.push((
                "memory needed",
                format!("about {all} (weights {weights}, work {work}, the program itself)"),
            ));
        }
        lines
    }

    fn memory(&self) -> Option<Memory> {
        let config = self.config.as_ref()?;
        let mixer = &config.mixer;
        let rows = self.vocab_rows.unwrap_or_else(|| config.padded_vocab());
        let ssm = mixer.nheads * mixer.headdim * mixer.d_state;
        let conv = (mixer.d_conv - 1) * mixer.conv_dim();
        let widths = 3 * mixer.d_model + mixer.d_in_proj() + mixer.conv_dim() + 2 * mixer.d_inner();
        Some(Memory {
            state: 4 * (config.n_layer * (ssm + conv)) as u64,
            work: 4 * (PIECE * widths + rows) as u64,
        })
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
            "metadata": checkpoint.metadata(),
            "kinds": kinds,
        });
        if let (Some(config), Some(memory)) = (&self.config, self.memory()) {
            let mixer = &config.mixer;
            let sizes = json!({
                "architecture": "mamba2",
                "n_layer": config.n_layer,
                "d_model": mixer.d_model,
                "d_inner": mixer.d_inner(),
                "nheads": mixer.nheads,
                "headdim": mixer.headdim,
                "ngroups": mixer.ngroups,
                "d_state": mixer.d_state,
                "d_conv": mixer.d_conv,
                "vocab_size": config.vocab_size,
                "vocab_rows": self.vocab_rows.unwrap_or_else(|| config.padded_vocab()),
                "tie_embeddings": config.tie_embeddings,
                "state_bytes": memory.state,
                "memory_bytes": memory.total(self.summary.bytes),
            });
            if let (Value::Object(object), Value::Object(sizes)) = (&mut object, sizes) {
                object.extend(sizes);
            }
        }
        if with_tensors {
            object["tensors"] =
                checkpoint.iter().map(|(name, entry)| tensor_json(name, entry)).collect();
        }
        object
    }
}

/// Bytes that the program takes for itself, a tokenizer of usual size included.
const PROGRAM: u64 = 24 << 20;

/// Bytes that a run needs beside the weights.
struct Memory {
    state: u64,
    work: u64,
}

impl Memory {
    fn total(&self, weights: usize) -> u64 {
        weights as u64 + self.state + self.work + PROGRAM
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
