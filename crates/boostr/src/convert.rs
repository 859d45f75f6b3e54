//! Models from one file layout to another, and from one type of weights to another.
//!
//! ```text
//! folder or GGUF ─ Checkpoint, Config ─ plan: each tensor's name, shape and type in the new file ─ written one by one
//! ```
//!
//! Matrices get the type asked for ([`Types`]). Small tensors (convolutions, decays, biases, norms,
//! routers) stay f32: a few hundred numbers cost no memory, and every token depends on them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;

use crate::chat;
use crate::checkpoint::gguf::{self, Metadata};
use crate::checkpoint::{
    Bytes, Checkpoint, ConfigFile, Dtype, TensorEntry, atomic_write, create_beside, safetensors,
};
use crate::error::{Error, Result};
use crate::files;
use crate::generation_config::SpecialTokens;
use crate::load::{
    GENERATION, OpenOptions, TextFiles, config_file, folder_of, of_quantized_at, rows_of,
    template_file,
};
use crate::models::{Config, Family, LeftOut, mtp};
use crate::nn::{Change, Layout, MixerConfig, Stored, decay_rate, log_of_rate, tiled};
use crate::ops::Format;
use crate::tokenizer::{MAX_FILE, Tokenizer};

mod importance;
mod types;

pub use importance::{Importance, collect};
use types::is_matrix;
pub use types::{Types, type_named};

/// How a model is converted.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// How it is opened.
    pub open: OpenOptions,
    /// The types of the new file; by default each matrix keeps its own.
    pub types: Types,
    /// How much each column of the matrices matters, for the types that are blocks.
    pub importance: Option<Importance>,
    /// Whether a file that is there already may be replaced.
    pub overwrite: bool,
}

/// What was written.
#[derive(Debug, Clone, PartialEq)]
pub struct Converted {
    /// The tensors, by name.
    pub tensors: Vec<Written>,
    /// What the new file cannot say, and so other programs may do otherwise.
    pub warnings: Vec<String>,
}

/// What was written of one tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Written {
    /// Its name in the new file.
    pub name: String,
    /// Its shape there.
    pub shape: Vec<usize>,
    /// The type it had.
    pub from: Dtype,
    /// The type it has now.
    pub to: Dtype,
    /// Bytes in the new file.
    pub bytes: usize,
    /// Root of the mean square of the change, over that of the values.
    pub error: f64,
    /// The same of weighted squares, where columns have weights: as it would be without them, and as it is.
    pub weighted: Option<[f64; 2]>,
}

/// Writes the model at `source` to `out`: a GGUF file when its name ends in `.gguf`, else a new folder
/// as transformers reads it.
///
/// Tensors are written one by one, so memory is that of the largest; `progress` is told
/// `(done, total)` and ends it by `Break`. What is written is there as a whole or not at all. Into a
/// GGUF file go the tokenizer and its `tokenizer.json` too, and `A_log`, of which GGUF only keeps
/// `-exp(A_log)`: so the way back gives equal tensors.
///
/// # Errors
///
/// As [`LanguageModel::open`](crate::load::LanguageModel::open); [`Error::Argument`] when `out` is
/// there already or a rule of `types` fits no matrix; [`Error::Interrupted`] after
/// `Break`; [`Error::Unsupported`] for what the new file cannot say; [`Error::Tensors`] for values
/// that are to change type and are not finite, before or after.
///
/// ```no_run
/// use std::ops::ControlFlow::Continue;
/// use boostr::convert::{Options, Types, convert};
///
/// let options = Options { types: Types::named("q4_k_m")?, ..Options::default() };
/// let written = convert("mamba2-130m".as_ref(), "m.gguf".as_ref(), &options, &mut |_, _| Continue(()))?;
/// println!("{} tensors", written.tensors.len());
/// # Ok::<(), boostr::Error>(())
/// ```
pub fn convert(
    source: &Path,
    out: &Path,
    options: &Options,
    progress: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<Converted> {
    let to_gguf = gguf::is_name(out);
    let mut model = ModelFiles::open(source, &options.open)?;
    check_out(&model.checkpoint, out, to_gguf, options.overwrite)?;
    if !to_gguf {
        model.restore_a_log()?;
    }
    let plan = model.plan(&options.types, to_gguf)?;
    let total = plan.len();
    let mut written = Vec::with_capacity(total);
    let mut last: Option<usize> = None;
    let mut data = |index: usize| -> Result<Bytes> {
        // The one before has been written by now.
        if let Some(last) = last.replace(index) {
            plan[last].parts.iter().for_each(|part| part.data.release());
        }
        let (mut bytes, what) = plan[index].bytes(options.importance.as_ref())?;
        written.push(what);
        if written.len() == total {
            // The last is taken out of its file before the look at all of them.
            bytes = Bytes::new(bytes.to_vec());
            model.checkpoint.check_unchanged()?;
        }
        match progress(written.len(), total) {
            ControlFlow::Continue(()) => Ok(bytes),
            ControlFlow::Break(()) => Err(Error::Interrupted { path: out.to_path_buf() }),
        }
    };
    let tensors: Vec<(&str, Dtype, &[usize])> =
        plan.iter().map(|t| (t.stored.name.as_str(), t.dtype, t.stored.shape.as_slice())).collect();
    let mut warnings = model.left_out.clone();
    if to_gguf {
        let metadata = model.gguf_metadata(&plan, &mut warnings)?;
        gguf::write(out, &metadata, &tensors, &mut data)?;
    } else {
        in_new_folder(out, |folder| {
            for (name, text) in model.folder_files(model.rows())? {
                write_text(folder, &name, &text)?;
            }
            let about = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
            safetensors::write_each(&folder.join("model.safetensors"), &tensors, &about, &mut data)
        })?;
    }
    written.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(importance) = &options.importance {
        let lacks = |w: &&Written| matches!(w.to, Dtype::Block(_)) && w.from != w.to;
        let without: Vec<String> = written
            .iter()
            .filter(lacks)
            .filter(|w| importance.names().all(|name| name != w.name))
            .map(|w| w.name.clone())
            .collect();
        if !without.is_empty() {
            let (count, names) = (without.len(), by_block(&without).join(", "));
            warnings
                .push(format!("the importance matrix has nothing of {count} matrices: {names}"));
        }
    }
    for what in written.iter().filter(|what| what.error > 0.5) {
        let (name, to, lost) = (&what.name, what.to.name(), 100.0 * what.error);
        warnings.push(format!(
            "`{name}` loses {lost:.0} % in {to}: its values are out of the type's range"
        ));
    }
    Ok(Converted { tensors: written, warnings })
}

/// Refuses to write over what is there.
fn check_out(source: &Checkpoint, out: &Path, is_gguf: bool, overwrite: bool) -> Result<()> {
    let refuse = |reason: &str| {
        let reason = format!("`{}` {reason}", out.display());
        Err(Error::Argument { name: "out", reason })
    };
    let Ok(metadata) = fs::symlink_metadata(out) else { return Ok(()) };
    let canonical = fs::canonicalize(out).ok();
    let is_out = |file: &Path| canonical.is_some() && fs::canonicalize(file).ok() == canonical;
    if source.iter().any(|(_, entry)| is_out(&entry.file)) {
        return refuse("is a file of the model itself: name another");
    }
    let is_empty = || fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_none());
    match () {
        () if metadata.is_dir() && is_empty() => Ok(()),
        () if metadata.is_dir() => refuse("is a folder that is not empty: name another"),
        () if is_gguf && overwrite => Ok(()),
        () if is_gguf => refuse("is there already: name another, or allow to replace it (--force)"),
        () => refuse("is a file: name a folder to make, or a file that ends in .gguf"),
    }
}

/// Lets `fill` fill a folder beside `out` and gives it that name, or leaves nothing.
pub(crate) fn in_new_folder(out: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    if out.file_name().is_none() {
        let reason = format!("`{}` names no folder", out.display());
        return Err(Error::Argument { name: "out", reason });
    }
    let io_error = |e| Error::io(out, e);
    let (folder, (), _claim) = create_beside(out, |path| fs::create_dir(path)).map_err(io_error)?;
    let result = fill(&folder).and_then(|()| {
        sync(&folder).map_err(io_error)?;
        // An empty folder of that name yields.
        fs::rename(&folder, out).map_err(io_error)?;
        let parent = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        sync(parent).map_err(io_error)
    });
    result.map_err(|error| {
        let _ = fs::remove_dir_all(&folder);
        match error {
            // By the name that the user knows.
            Error::Io { path, source } => match path.strip_prefix(&folder) {
                Ok(rest) => Error::io(out.join(rest), source),
                Err(_) => Error::Io { path, source },
            },
            other => other,
        }
    })
}

/// Makes the names in a folder survive a power cut, where the system can.
fn sync(folder: &Path) -> io::Result<()> {
    if cfg!(unix) { fs::File::open(folder)?.sync_all() } else { Ok(()) }
}

/// A model's files: tensors in transformers' names, and what belongs to them.
pub(crate) struct ModelFiles {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) config: Config,
    /// Whether the embedding is the head.
    pub(crate) tied: bool,
    /// The parameters of the block that predicts one token more, where there is one.
    next: Option<Checkpoint>,
    /// What of the files is in no new one, one sentence each.
    left_out: Vec<String>,
    /// The model's name, for metadata.
    name: String,
    /// What is beside the weights; a GGUF file has its own.
    files: Option<Files>,
}

/// The files beside the weights of a folder, as they are.
struct Files {
    tokenizer: Option<String>,
    text: TextFiles,
    chat: Option<chat::Source>,
    eos: Vec<u32>,
}

impl ModelFiles {
    /// A model that is new, with the text of its `tokenizer.json`.
    pub(crate) fn new(
        config: Config,
        checkpoint: Checkpoint,
        tied: bool,
        tokenizer: String,
        eos: Vec<u32>,
    ) -> Result<Self> {
        let parsed = Tokenizer::from_bytes("tokenizer.json", tokenizer.as_bytes())?;
        let token = |id: u32| parsed.token(id);
        let about = serde_json::json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": eos.first().and_then(|&id| token(id)),
            "eos_token": eos.first().and_then(|&id| token(id)),
            "add_bos_token": false,
        });
        // A list of none is no list of ends.
        let generation = match &eos[..] {
            [] => serde_json::json!({ "do_sample": true }),
            _ => serde_json::json!({ "eos_token_id": eos, "do_sample": true }),
        };
        let text = TextFiles {
            tokenizer: Some(parsed),
            tokenizer_config: Some(without_nulls(about).to_string()),
            generation_config: Some(generation.to_string()),
            ..TextFiles::default()
        };
        let files = Some(Files { tokenizer: Some(tokenizer), text, eos, chat: None });
        let (next, left_out, name) = (None, Vec::new(), "model".into());
        Ok(Self { checkpoint, config, tied, next, left_out, name, files })
    }

    /// The tokenizer of a folder.
    pub(crate) fn tokenizer(&self) -> Option<&Tokenizer> {
        self.files.as_ref()?.text.tokenizer.as_ref()
    }

    /// Writes the model as a folder, with `tensors` in place of its own.
    pub(crate) fn write_folder(
        &self,
        folder: &Path,
        tensors: BTreeMap<String, TensorEntry>,
    ) -> Result<()> {
        let checkpoint = Checkpoint::from_entries("memory", tensors);
        let plan = self.plan_of(&checkpoint, &Types::default(), false)?;
        let layout: Vec<(&str, Dtype, &[usize])> =
            plan.iter().map(|t| (t.stored.name.as_str(), t.dtype, &t.stored.shape[..])).collect();
        for (name, text) in self.folder_files(self.rows_of(&checkpoint))? {
            write_text(folder, &name, &text)?;
        }
        let about = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let path = folder.join("model.safetensors");
        safetensors::write_each(&path, &layout, &about, &mut |i: usize| -> Result<Bytes> {
            Ok(plan[i].bytes(None)?.0)
        })
    }

    pub(crate) fn open(source: &Path, options: &OpenOptions) -> Result<Self> {
        if options.adapter.is_some() {
            let reason = "expected a model alone: merge them into it first";
            return Err(Error::Argument { name: "adapter", reason: reason.into() });
        }
        let opened = Checkpoint::open_by(source, options.allow_pickle, options.access());
        let of_file = |error| of_quantized_at(source, error);
        let mut checkpoint = opened.map_err(of_file)?;
        let (config, files) = match checkpoint.gguf() {
            Some(_) if options.tokenizer.is_some() => {
                let reason =
                    "a GGUF file has its own: convert it to a folder, and put another there";
                return Err(Error::Argument { name: "tokenizer", reason: reason.into() });
            }
            Some(metadata) => (options.families.read_gguf(&checkpoint, metadata)?, None),
            None => {
                let folder = folder_of(source)?;
                let file = config_file(&folder)?;
                let text = TextFiles::read(&folder, options, rows_of(&file, options))?;
                let path = options.tokenizer.clone().unwrap_or(folder.join("tokenizer.json"));
                let tokenizer = match &text.tokenizer {
                    Some(tokenizer) if tokenizer.is_extended() => Some(tokenizer.to_json()?),
                    Some(_) => Some(read(&path)?),
                    None => None,
                };
                let chat = text.chat_template(&folder)?;
                let eos = text.special(&folder, Some(&file))?.eos;
                (options.families.read(&file)?, Some(Files { tokenizer, text, chat, eos }))
            }
        };
        let (next, left_out) = beside(&config, &checkpoint);
        let tied = config.prepare(&mut checkpoint).map_err(of_file)?;
        let folder = folder_of(source)?;
        let full = fs::canonicalize(&folder).unwrap_or(folder);
        let name = full.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { checkpoint, config, tied, next, left_out, name, files })
    }

    /// The tensors of a file of the model whose embedding has `rows` rows.
    fn layout(&self, rows: usize, to_gguf: bool) -> Result<Layout> {
        let family = self.config.family();
        let mut layout = if to_gguf {
            family.gguf_layout(rows, !self.tied)?
        } else {
            family.hf_layout(rows, !self.tied)?
        };
        if self.next.is_some() {
            layout.0.extend(mtp::layout(&self.config, to_gguf)?.0);
        }
        Ok(layout)
    }

    fn rows(&self) -> usize {
        self.rows_of(&self.checkpoint)
    }

    fn rows_of(&self, checkpoint: &Checkpoint) -> usize {
        let name = format!("{}.weight", self.config.family().frame().names.embeddings);
        let embedding = checkpoint.get(&name);
        embedding.map_or(0, |entry| entry.shape.first().copied().unwrap_or(0))
    }

    /// The tensors of the new file, in its order.
    fn plan(&self, types: &Types, to_gguf: bool) -> Result<Vec<Planned>> {
        self.plan_of(&self.checkpoint, types, to_gguf)
    }

    /// The same of other parameters.
    fn plan_of(
        &self,
        checkpoint: &Checkpoint,
        types: &Types,
        to_gguf: bool,
    ) -> Result<Vec<Planned>> {
        let rows = self.rows_of(checkpoint);
        let mut layout = self.layout(rows, to_gguf)?;
        let gguf = if to_gguf { None } else { self.layout(rows, true).ok() };
        if to_gguf {
            zero_biases(self.config.family(), &mut layout);
        }
        let checkpoint = &self.with_next(checkpoint);
        // Types are chosen by what GGUF calls each parameter of a folder.
        let known = gguf.as_ref().map(Layout::by_parameter).unwrap_or_default();
        let mut plan = Vec::new();
        let mut matrices = Vec::new();
        for mut stored in layout.0 {
            let mut parts = Vec::new();
            for part in &stored.parts {
                if let Some(entry) = tiled(&part.name).and_then(|name| checkpoint.get(&name)) {
                    parts.push(match &gguf {
                        // In the order that the file has anyway.
                        None => entry.clone(),
                        Some(gguf) => in_model_order(gguf, &part.name, entry)?,
                    });
                    stored.order = stored.order.filter(|_| gguf.is_some());
                    continue;
                }
                let (entry, is_rate) = parameter(checkpoint, &part.name, &stored.name)?;
                if is_rate && to_gguf {
                    stored.change = Change::Same;
                }
                parts.push(entry);
            }
            let first = stored.parts.first().map_or(stored.name.as_str(), |part| &part.name);
            let (name, shape) = known.get(first).copied().unwrap_or((&stored.name, &stored.shape));
            let asked = types.of(name, shape);
            if is_matrix(name, shape) {
                matrices.push(name.to_owned());
            }
            let mut dtype = asked.unwrap_or(stored.dtype(&parts));
            if let Dtype::Block(format) = dtype
                && !to_gguf
            {
                dtype = Dtype::F32;
                if asked.is_some() {
                    let what = format!("type {} in a folder (GGUF files have it)", format.name());
                    return Err(Error::Unsupported { what });
                }
            }
            plan.push(Planned { stored, dtype, parts });
        }
        if let Some(pattern) = types.unused(&matrices) {
            let kinds: BTreeSet<String> = matrices.iter().map(|name| kind_of(name)).collect();
            let kinds = kinds.into_iter().collect::<Vec<_>>().join(", ");
            let reason = format!("{pattern:?} fits no matrix; they are {kinds}");
            return Err(Error::Argument { name: "types", reason });
        }
        Ok(plan)
    }

    /// All parameters, with those of the block that predicts one token more.
    fn with_next(&self, checkpoint: &Checkpoint) -> Checkpoint {
        let mut all = checkpoint.clone();
        if let Some(next) = &self.next {
            all.add(next);
        }
        all
    }

    /// Puts `A_log` in place of the `A` of a GGUF file: as it was where the file tells and its A is still
    /// the one, else `ln(-A)`.
    pub(crate) fn restore_a_log(&mut self) -> Result<()> {
        let Some(metadata) = self.checkpoint.gguf() else { return Ok(()) };
        let kept = metadata.floats(A_LOG)?.unwrap_or_default();
        let layout = self.config.family().gguf_layout(self.rows(), !self.tied)?;
        let mut kept = kept.as_slice();
        let mut tensors: BTreeMap<String, TensorEntry> =
            self.checkpoint.iter().map(|(name, entry)| (name.to_owned(), entry.clone())).collect();
        for name in
            by_layer(self.checkpoint.names().filter(|name| name.rsplit('.').next() == Some("A")))
        {
            let a_log = format!("{name}_log");
            let shown = layout.stored_as(&a_log).unwrap_or(&name);
            let (entry, _) = parameter(&self.checkpoint, &a_log, shown)?;
            let rates = entry.to_f32()?;
            let (own, rest) = kept.split_at(rates.len().min(kept.len()));
            kept = rest;
            let is_kept = own.iter().map(|&a_log| decay_rate(a_log)).eq(rates.iter().copied());
            let values = if is_kept {
                own.to_vec()
            } else {
                rates.iter().map(|&rate| log_of_rate(rate)).collect()
            };
            let data = Bytes::new(Dtype::F32.encode(&values)?);
            tensors.remove(&name);
            tensors.insert(a_log, TensorEntry { dtype: Dtype::F32, data, ..entry });
        }
        self.checkpoint.replace(tensors);
        Ok(())
    }

    /// The metadata of the new GGUF file.
    fn gguf_metadata(&self, plan: &[Planned], warnings: &mut Vec<String>) -> Result<Metadata> {
        let rows = self.rows();
        let mut metadata = match self.checkpoint.gguf() {
            Some(metadata) => {
                let mut metadata = metadata.clone();
                metadata.retain(|key| !key.starts_with("split."));
                if metadata.iter().any(|(key, _)| key.ends_with(NEXT)) {
                    metadata.retain(|key| !key.ends_with(NEXT));
                    self.config.family().write_gguf(&mut metadata)?;
                }
                metadata
            }
            None => Metadata::new("metadata"),
        };
        if let Some(files) = &self.files {
            metadata.set("general.type", "model");
            metadata.set("general.name", self.name.as_str());
            let family = self.config.family();
            family.write_gguf(&mut metadata)?;
            metadata.set(format!("{}.vocab_size", family.arch().unwrap_or_default()), rows as u32);
            let mut all = Vec::new();
            for name in by_layer(self.checkpoint.names().filter(|name| name.ends_with(".A_log"))) {
                all.extend(parameter(&self.checkpoint, &name, &name)?.0.to_f32()?);
            }
            if !all.is_empty() {
                metadata.set(A_LOG, all.as_slice());
            }
            warnings.extend(files.write_gguf(rows, &mut metadata)?);
        }
        if self.next.is_some() {
            mtp::write_gguf(&self.config, &mut metadata)?;
        }
        metadata.set("general.file_type", file_type(plan));
        metadata.set("general.quantization_version", 2u32);
        Ok(metadata)
    }

    /// The text files of the new folder, by name.
    fn folder_files(&self, rows: usize) -> Result<Vec<(String, String)>> {
        let family = self.config.family();
        let mut config = family.folder_json()?;
        config["vocab_size"] = rows.into();
        config["tie_word_embeddings"] = self.tied.into();
        if self.next.is_some() {
            config["mtp_num_hidden_layers"] = 1.into();
        }
        let mut out = Vec::new();
        match (&self.files, self.checkpoint.gguf()) {
            (Some(files), _) => {
                match files.eos[..] {
                    [] => {}
                    [eos] => config["eos_token_id"] = eos.into(),
                    ref several => config["eos_token_id"] = serde_json::json!(several),
                }
                let texts = [
                    ("tokenizer.json", &files.tokenizer),
                    ("tokenizer_config.json", &files.text.tokenizer_config),
                    ("generation_config.json", &files.text.generation_config),
                ];
                let texts =
                    texts.into_iter().filter_map(|(name, text)| Some((name, text.clone()?)));
                out.extend(texts.map(|(name, text)| (name.to_owned(), text)));
                let templates = files.text.chat_templates.iter();
                out.extend(templates.map(|(name, text)| (template_file(name), text.clone())));
            }
            (None, Some(metadata)) => {
                if let Some(text) = Tokenizer::from_gguf(metadata)? {
                    config["eos_token_id"] = text.eos.into();
                    config["bos_token_id"] = text.bos.into();
                    config["pad_token_id"] = text.pad.into();
                    let copy = metadata.text("tokenizer.huggingface.json")?;
                    let tokenizer = match copy.filter(|_| text.is_copy) {
                        Some(json) => json.to_owned(),
                        None => text.tokenizer.to_json()?,
                    };
                    out.push(("tokenizer.json".to_owned(), tokenizer));
                    let flag = |key| metadata.bool(key);
                    let token = |id: Option<u32>| id.and_then(|id| text.tokenizer.token(id));
                    let chat = chat::Source::from_gguf(metadata, SpecialTokens::default())?;
                    let about = serde_json::json!({
                        "tokenizer_class": "PreTrainedTokenizerFast",
                        "bos_token": token(text.bos),
                        "eos_token": token(text.eos),
                        "unk_token": token(text.unk),
                        "pad_token": token(text.pad),
                        "add_bos_token": flag("tokenizer.ggml.add_bos_token")?,
                        "add_eos_token": flag("tokenizer.ggml.add_eos_token")?,
                        "chat_template": chat.map(|chat| chat.to_json()),
                    });
                    let about = self.json(&without_nulls(about))?;
                    out.push(("tokenizer_config.json".to_owned(), about));
                    let generation = match metadata.text(GENERATION)? {
                        Some(text) => text.to_owned(),
                        None => self.json(&without_nulls(serde_json::json!({
                            "bos_token_id": text.bos,
                            "eos_token_id": text.ends,
                            "pad_token_id": text.pad,
                        })))?,
                    };
                    out.push(("generation_config.json".to_owned(), generation));
                }
            }
            (None, None) => {}
        }
        out.push(("config.json".to_owned(), self.json(&config)?));
        Ok(out)
    }

    fn json(&self, value: &serde_json::Value) -> Result<String> {
        let text = serde_json::to_string_pretty(value);
        let text = text.map_err(|e| Error::format(self.checkpoint.path(), e.to_string()))?;
        Ok(text + "\n")
    }
}

/// The block of a model's file that predicts one token more, where there is one that can be read; and what no new file
/// has.
fn beside(config: &Config, checkpoint: &Checkpoint) -> (Option<Checkpoint>, Vec<String>) {
    let mut counts: BTreeMap<LeftOut, usize> = BTreeMap::new();
    for of in checkpoint.names().filter_map(|name| config.family().left_out(name)) {
        *counts.entry(of).or_default() += 1;
    }
    let (next, reason) = match mtp::parameters(config, checkpoint.clone()) {
        Ok(next) => (next, String::new()),
        Err(error) => (None, format!(": {error}")),
    };
    if next.is_some() {
        counts.remove(&LeftOut::NextTokens);
    }
    let line = |(of, count): (LeftOut, usize)| {
        let (what, reason) = (of.what(), if of == LeftOut::NextTokens { &reason } else { "" });
        format!("{count} tensors of {what} are left out{reason}")
    };
    (next, counts.into_iter().map(line).collect())
}

/// Adds a bias of zeros to each convolution without a bias: programs that run GGUF files look for one.
fn zero_biases(family: &dyn Family, layout: &mut Layout) {
    for (i, layer) in family.layers().iter().enumerate() {
        let mixer = layer.part::<MixerConfig>();
        if let Some(mixer) = mixer.filter(|mixer| !mixer.conv_bias) {
            let channels = mixer.conv_dim();
            layout.given(format!("blk.{i}.ssm_conv1d.bias"), vec![0.0; channels]);
        }
    }
}

/// The values of a parameter whose columns are in the order of a GGUF file, in the model's.
fn in_model_order(gguf: &Layout, parameter: &str, entry: &TensorEntry) -> Result<TensorEntry> {
    let data = Bytes::new(Dtype::F32.encode(&entry.to_f32()?)?);
    let floats = TensorEntry { dtype: Dtype::F32, data, ..entry.clone() };
    let mut holds = gguf.0.iter().filter(|of| of.parts.iter().any(|part| part.name == parameter));
    holds.next().map_or(Ok(floats.clone()), |stored| stored.in_model_order(&floats))
}

/// A parameter by its name, and whether it is the `A` that GGUF has for `A_log`.
/// An error calls it `shown`.
fn parameter(checkpoint: &Checkpoint, name: &str, shown: &str) -> Result<(TensorEntry, bool)> {
    if let Some(entry) = checkpoint.get(name) {
        return Ok((entry.clone(), false));
    }
    let path = checkpoint.path();
    let Some(entry) = checkpoint.get(&name.replace("A_log", "A")) else {
        let reason = format!("tensor `{name}` is missing");
        return Err(Error::Tensors { path: path.into(), reason });
    };
    let bad = entry.to_f32()?.into_iter().find(|a| !a.is_finite() || *a > 0.0);
    if let Some(bad) = bad {
        let reason = format!("`{shown}` has {bad}: expected -exp(A_log), not above 0");
        return Err(Error::Tensors { path: entry.file.to_path_buf(), reason });
    }
    Ok((entry.clone(), true))
}

/// How many layers of a GGUF file predict more than the next token; some families read none.
const NEXT: &str = ".nextn_predict_layers";
/// The tokens that end a text, a turn and a message.
const EOS: &str = "tokenizer.ggml.eos_token_id";
const EOT: &str = "tokenizer.ggml.eot_token_id";
const EOM: &str = "tokenizer.ggml.eom_token_id";
/// `A_log` of all layers, one after another: a key of our own, for the way back.
const A_LOG: &str = "boostr.mamba2.A_log";

impl Files {
    /// Adds the tokenizer, for an embedding of `rows` rows; returns what other programs will do otherwise.
    fn write_gguf(&self, rows: usize, metadata: &mut Metadata) -> Result<Vec<String>> {
        if let Some(text) = &self.text.generation_config {
            metadata.set(GENERATION, text.as_str());
        }
        let (Some(tokenizer), Some(json)) = (&self.text.tokenizer, &self.tokenizer) else {
            metadata.set("tokenizer.ggml.model", "none");
            return Ok(vec!["no tokenizer.json in the folder: the file has no tokens".to_owned()]);
        };
        let config = match &self.text.tokenizer_config {
            Some(text) => Some(ConfigFile::parse("tokenizer_config.json", text)?),
            None => None,
        };
        let mut lost = tokenizer.to_gguf(json, config.as_ref(), rows, metadata)?;
        if let Some(chat) = &self.chat {
            lost.extend(chat.to_gguf(metadata));
        }
        if let Some(id) = self.eos.iter().find(|&&id| id as usize >= rows) {
            let reason = format!("eos_token_id {id} is not below the {rows} rows of the embedding");
            return Err(Error::Argument { name: "eos_token_id", reason });
        }
        // The tokenizer's own end first: it is what a chat template knows as `eos_token`.
        let own = metadata.usize(EOS, 0..=rows)?.map(|id| id as u32);
        let others = self.eos.iter().copied().filter(|&id| Some(id) != own);
        let ends: Vec<u32> = own.into_iter().chain(others).collect();
        for (&id, key) in ends.iter().zip([EOS, EOT, EOM]) {
            metadata.set(key, id);
        }
        if ends.len() > 3 {
            if self.text.generation_config.is_none() {
                let generation = serde_json::json!({ "eos_token_id": ends });
                metadata.set(GENERATION, generation.to_string());
            }
            lost.push(format!("GGUF has place for three end tokens, the model has {ends:?}"));
        }
        Ok(lost.into_iter().map(|what| format!("tokenizer: {what}")).collect())
    }
}

/// An object without its fields that are null.
fn without_nulls(mut value: serde_json::Value) -> serde_json::Value {
    if let Some(object) = value.as_object_mut() {
        object.retain(|_, field| !field.is_null());
    }
    value
}

/// Writes a text file of a model's new folder, which may be in a folder inside it.
fn write_text(folder: &Path, name: &str, text: &str) -> Result<()> {
    let path = folder.join(name);
    if let Some(inside) = path.parent().filter(|&inside| inside != folder) {
        fs::create_dir_all(inside).map_err(|e| Error::io(inside, e))?;
    }
    atomic_write(&path, |file| file.write_all(text.as_bytes()))
}

fn read(path: &Path) -> Result<String> {
    files::read_text(path, MAX_FILE as u64)
}

/// The name of a tensor without the number of its layer: what all layers have alike.
///
/// ```
/// assert_eq!(boostr::convert::kind_of("blk.12.ssm_in.weight"), "blk.*.ssm_in.weight");
/// ```
#[must_use]
pub fn kind_of(name: &str) -> String {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let parts: Vec<&str> =
        name.split('.').map(|part| if is_number(part) { "*" } else { part }).collect();
    parts.join(".")
}

/// Names of matrices, those of one kind as one with the numbers of their blocks: `blk.{3,4}.attn_k.weight`.
fn by_block(names: &[String]) -> Vec<String> {
    let mut kinds: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for name in names {
        let number = name.split('.').find(|part| part.bytes().all(|b| b.is_ascii_digit()));
        kinds.entry(kind_of(name)).or_default().push(number.unwrap_or_default());
    }
    let named = kinds.into_iter().map(|(kind, numbers)| match &numbers[..] {
        [one] => kind.replacen('*', one, 1),
        all => kind.replacen('*', &format!("{{{}}}", all.join(",")), 1),
    });
    named.collect()
}

/// The number by which `general.file_type` says what most of a file's bytes are (`llama_ftype` of
/// llama.h).
fn file_type(plan: &[Planned]) -> u32 {
    let mut bytes: BTreeMap<Dtype, usize> = BTreeMap::new();
    for planned in plan {
        let size = planned.dtype.bytes_of(&planned.stored.shape).unwrap_or(0);
        *bytes.entry(planned.dtype).or_default() += size;
    }
    let is_mixed = bytes.keys().filter(|dtype| matches!(dtype, Dtype::Block(_))).count() > 1;
    match bytes.into_iter().max_by_key(|&(_, size)| size).map(|(dtype, _)| dtype) {
        Some(Dtype::F16) => 1,
        Some(Dtype::BF16) => 32,
        Some(Dtype::Block(format)) => match format {
            Format::Q4_0 => 2,
            Format::Q4_1 => 3,
            Format::Q8_0 => 7,
            Format::Q5_0 => 8,
            Format::Q5_1 => 9,
            Format::Q2K => 10,
            Format::Q3K => 12,
            Format::Q4K if is_mixed => 15,
            Format::Q4K => 14,
            Format::Q5K if is_mixed => 17,
            Format::Q5K => 16,
            Format::Q6K => 18,
            Format::Iq4Nl => 25,
            Format::Iq4Xs => 30,
            _ => 1024, // guessed
        },
        _ => 0,
    }
}

/// Names in the order of the layers that they have a number of.
fn by_layer<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let layer = |name: &str| name.split('.').find_map(|part| part.parse::<usize>().ok());
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort_by_key(|name| layer(name));
    names
}

/// A tensor of a new file, its type there, and the parameters that its values come from.
#[derive(Debug, Clone)]
struct Planned {
    stored: Stored,
    dtype: Dtype,
    parts: Vec<TensorEntry>,
}

impl Planned {
    /// The tensor's bytes in the new file.
    ///
    /// # Errors
    ///
    /// [`Error::Tensors`] when a value that changes type is not finite, before or after.
    fn bytes(&self, importance: Option<&Importance>) -> Result<(Bytes, Written)> {
        let Stored { name, shape, .. } = &self.stored;
        let from = self.stored.dtype(&self.parts);
        let written = |bytes: usize, error: f64, weighted: Option<[f64; 2]>| Written {
            name: name.clone(),
            shape: shape.clone(),
            from,
            to: self.dtype,
            bytes,
            error,
            weighted,
        };
        if from == self.dtype
            && let Some(bytes) = self.stored.bytes(&self.parts)
        {
            let written = written(bytes.len(), 0.0, None);
            return Ok((bytes, written));
        }
        let values = self.stored.values(&self.parts)?;
        let file: Arc<Path> =
            self.parts.first().map_or(Path::new("").into(), |part| part.file.clone());
        let error = |what: String| Error::Tensors {
            path: file.to_path_buf(),
            reason: format!("`{}`: {what}", name.escape_debug()),
        };
        if let Some(i) = values.iter().position(|x| !x.is_finite()) {
            return Err(error(format!(
                "value {i} is {}: only finite ones can change type",
                values[i]
            )));
        }
        let width = shape.last().copied().unwrap_or(1).max(1);
        let rows_at_once = (1usize << 16).div_ceil(width);
        let importance = importance.filter(|_| matches!(self.dtype, Dtype::Block(_)));
        let decoded = |bytes: Vec<u8>, count: usize| {
            let (dtype, shape, data) = (self.dtype, vec![count], Bytes::new(bytes));
            TensorEntry { dtype, shape, data, file: file.clone() }
        };
        let parts: Vec<(Bytes, Squares, Option<[Squares; 2]>)> = values
            .par_chunks(rows_at_once * width)
            .enumerate()
            .map(|(i, values)| {
                let (first, rows) = (i * rows_at_once, values.len() / width);
                let weights = match importance {
                    Some(importance) => importance.of_rows(name, shape, first, rows)?,
                    None => None,
                };
                let Some(weights) = weights else {
                    let back = decoded(self.dtype.encode(values)?, values.len());
                    let squares = Squares::of(values, &back.to_f32()?, &[]);
                    return Ok((back.data, squares, None));
                };
                let plain = decoded(self.dtype.encode(values)?, values.len()).to_f32()?;
                let back = decoded(self.dtype.encode_weighted(values, &weights)?, values.len());
                let new = back.to_f32()?;
                let weighted = [&plain, &new].map(|back| Squares::of(values, back, &weights));
                Ok((back.data, Squares::of(values, &new, &[]), Some(weighted)))
            })
            .collect::<Result<_>>()?;
        let squares = parts.iter().fold(Squares::default(), |sum, part| sum.and(part.1));
        if !squares.change.is_finite() {
            return Err(error(format!("has values that {} cannot hold", self.dtype.name())));
        }
        let weighted = parts.iter().map(|part| part.2).collect::<Option<Vec<_>>>();
        let weighted = weighted.filter(|parts| !parts.is_empty()).map(|parts| {
            let total = |which: usize| {
                parts.iter().fold(Squares::default(), |sum, part| sum.and(part[which])).ratio()
            };
            [total(0), total(1)]
        });
        let bytes = parts.iter().map(|part| &*part.0).collect::<Vec<_>>().concat();
        let written = written(bytes.len(), squares.ratio(), weighted);
        Ok((Bytes::new(bytes), written))
    }
}

/// Sums of squares: of what values were changed by, and of the values.
#[derive(Debug, Clone, Copy, Default)]
struct Squares {
    change: f64,
    size: f64,
}

impl Squares {
    /// Each times the weight of the value, if there are weights.
    fn of(values: &[f32], back: &[f32], weights: &[f32]) -> Self {
        let square = |x: f32| f64::from(x) * f64::from(x);
        let weight = |i: usize| weights.get(i).map_or(1.0, |&w| f64::from(w));
        let pairs = values.iter().zip(back).enumerate();
        Self {
            change: pairs.map(|(i, (x, y))| weight(i) * square(x - y)).sum(),
            size: values.iter().enumerate().map(|(i, &x)| weight(i) * square(x)).sum(),
        }
    }

    fn and(self, other: Self) -> Self {
        Self { change: self.change + other.change, size: self.size + other.size }
    }

    /// The root of their quotient; 0 where nothing was changed.
    fn ratio(self) -> f64 {
        if self.change == 0.0 { 0.0 } else { (self.change / self.size).sqrt() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_a_tensor_has_no_layer() {
        assert_eq!(kind_of("backbone.layers.12.mixer.D"), "backbone.layers.*.mixer.D");
        assert_eq!(kind_of("lm_head.weight"), "lm_head.weight");
        assert_eq!(kind_of("a..1b"), "a..1b");
    }
}
