//! A language model with what belongs to it: weights, tokenizer, and its author's defaults.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::backend::{Backend, Device};
use crate::chat;
use crate::checkpoint::gguf;
use crate::checkpoint::{Access, Checkpoint, ConfigFile, Dtype, Summary, snapshots};
use crate::error::{Error, Result, chain};
use crate::files;
use crate::generation_config::GenerationDefaults;
use crate::models::{Config, Context, Families, Fingerprint, LeftOut, Model, Mtp, mtp};
use crate::nn::{Notices, Pack, Packs, SharedWeights};
use crate::ops::KvType;
use crate::threads::Threads;
use crate::tokenizer::{Part, Tokenizer};

pub mod adapters;
mod conversation;
mod text_side;

use adapters::Adapters;

pub use crate::checkpoint::Progress;
pub use conversation::{Conversation, MAX_MARKS};
pub use text_side::TextSide;
pub(crate) use text_side::{GENERATION, TextFiles, rows_of, template_file};
use text_side::{controlled, encoded, part_of};

/// How to open a model.
#[derive(Debug, Clone, Default)]
pub struct OpenOptions {
    /// Read `pytorch_model.bin`, with a closed list of types and without running it.
    pub allow_pickle: bool,
    /// A `tokenizer.json` to use in place of the folder's.
    pub tokenizer: Option<PathBuf>,
    /// What attention keeps keys and values as; f32 when `None`.
    pub kv_type: Option<KvType>,
    /// Decode quantized weights to f32 first, and so round no activations: exact for the weights as they
    /// are, in four to eight times the memory.
    pub exact: bool,
    /// Read all files into memory, however large, so that nothing that becomes of them matters once the model is open.
    /// While quantized weights are loaded they are then in memory twice.
    pub no_mmap: bool,
    /// Keep the quantized experts of a large mixture in memory in the order of products. Otherwise they are written in it
    /// to a file beside the model, once, and mapped.
    pub no_pack_cache: bool,
    /// How long a sequence may be.
    pub context: Context,
    /// A folder of low-rank adapters, as PEFT or `boostr tune` writes them, to put beside the model.
    pub adapter: Option<PathBuf>,
    /// Is told how far opening is, and may end it.
    pub progress: Option<Progress>,
    /// Threads that prepare the weights and compute every forward; the caller's rayon pool when `None`.
    pub threads: Option<Threads>,
    /// The families that the files may be of; the built-in ones by default.
    pub families: Families,
}

/// The files of a model that is part of the program.
#[derive(Debug, Clone, Copy)]
pub struct Embedded {
    /// Stands for its folder in messages.
    pub name: &'static str,
    /// `config.json`
    pub config: &'static str,
    /// `model.safetensors`
    pub weights: &'static [u8],
    /// `tokenizer.json`
    pub tokenizer: &'static str,
    /// `tokenizer_config.json`
    pub tokenizer_config: &'static str,
    /// `generation_config.json`
    pub generation_config: &'static str,
}

impl OpenOptions {
    pub(crate) fn access(&self) -> Access {
        if self.no_mmap { Access::Read } else { Access::Map }
    }

    /// The weights at `path`, which tell of their progress while a model is made of them.
    fn checkpoint(&self, path: &Path) -> Result<Checkpoint> {
        let checkpoint = Checkpoint::open_by(path, self.allow_pickle, self.access())?;
        Ok(match &self.progress {
            Some(progress) => checkpoint.with_progress(progress.clone()),
            None => checkpoint,
        })
    }
}

/// A model, its tokenizer, and how its author meant it to be used.
pub struct LanguageModel<B: Backend> {
    /// Where it came from.
    pub path: PathBuf,
    /// What its files hold of weights.
    pub files: Summary,
    /// The weights. Engines, drafts and models with adapters share them.
    pub model: Arc<Model<B>>,
    /// Text to ids and back; some releases come without.
    pub tokenizer: Option<Tokenizer>,
    /// `generation_config.json`, or nothing set.
    pub defaults: GenerationDefaults,
    /// Generation ends at any of these: those of `generation_config.json`, else of `config.json`, and the
    /// tokenizer's own; in a GGUF file those of [`GgufTokenizer::ends`](crate::tokenizer::GgufTokenizer::ends).
    pub eos: Vec<u32>,
    /// How a conversation becomes text, for models that were trained on some.
    pub chat_template: Option<chat::Source>,
    /// What is odd about the files of text, one sentence each, to be shown to people.
    pub warnings: Vec<String>,
    bos: Option<u32>,
    base: Arc<Base<B>>,
}

/// A model, and what others with other adapters are made of.
struct Opened<B: Backend> {
    model: Arc<Model<B>>,
    base: Arc<Base<B>>,
    warning: Option<String>,
}

/// What models with other adapters are made of.
struct Base<B: Backend> {
    /// The weights that are made.
    weights: SharedWeights<B>,
    /// Of the model without adapters.
    fingerprint: Fingerprint,
    options: OpenOptions,
    /// The weights' file, if it is part of the program.
    embedded: Option<Checkpoint>,
    /// The file of packed experts.
    packs: Option<Arc<Packs>>,
    /// What went wrong with files since.
    notices: Arc<Notices>,
}

/// What takes a model takes it with what belongs to it.
impl<B: Backend> AsRef<Model<B>> for LanguageModel<B> {
    fn as_ref(&self) -> &Model<B> {
        &self.model
    }
}

impl<B: Backend> LanguageModel<B> {
    /// Opens a model folder: `config.json` (or Codestral's `params.json`), weights as
    /// [`Checkpoint::open`] finds them, and where they are there `tokenizer.json`,
    /// `tokenizer_config.json` and `generation_config.json`. A path to a weight file stands for its
    /// folder, with that file as weights.
    ///
    /// A GGUF file, or a folder with one and no `config.json`, holds all that in itself. A folder of adapters
    /// stands for the model that they are of, with them beside it.
    ///
    /// # Errors
    ///
    /// Any of [`Error`], naming the file and what to do.
    ///
    /// ```no_run
    /// use boostr::{backend, load::LanguageModel};
    ///
    /// let lm = LanguageModel::open("models/mamba2-130m", &Default::default(), backend::cpu())?;
    /// println!("{} layers", lm.model.family().layers().len());
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn open<C>(path: impl AsRef<Path>, options: &OpenOptions, client: C) -> Result<Self>
    where
        C: Device<Backend = B>,
        B: Backend<Client = C>,
    {
        let path = path.as_ref();
        Threads::install_on(options.threads.as_ref(), || Self::open_at(path, options, client))
    }

    fn open_at(path: &Path, options: &OpenOptions, client: B::Client) -> Result<Self> {
        if adapters::is_adapter(path)? {
            if let Some(other) = &options.adapter {
                let reason = format!("one more (`{}`) beside those of a folder", other.display());
                return Err(Error::format(
                    path,
                    format!("expected a model, found adapters, {reason}"),
                ));
            }
            let options = OpenOptions { adapter: Some(path.into()), ..options.clone() };
            return Self::open_at(&adapters::base_of(path)?, &options, client);
        }
        let folder = folder_of(path)?;
        if !is_gguf(path)? {
            // Before the weights: a folder without it is no model.
            let config = config_file(&folder)?;
            let files = TextFiles::read(&folder, options, rows_of(&config, options))?;
            let adapter = adapters_of(options)?;
            let checkpoint = options.checkpoint(path);
            let model = checkpoint.and_then(|checkpoint| {
                let weights = Weights { checkpoint, adapter, options, is_embedded: false };
                Self::assemble(path, &config, files, weights, client)
            });
            return model.map_err(|error| of_quantized(&config, error));
        }
        let file = options.checkpoint(path)?;
        let mut checkpoint = file.clone();
        if options.exact {
            checkpoint.decode()?;
        }
        let Some(metadata) = checkpoint.gguf() else {
            return Err(Error::format(path, "expected a GGUF file"));
        };
        let config = options.families.read_gguf(&checkpoint, metadata)?;
        let adapter = adapters_of(options)?;
        let weights =
            Weights { checkpoint: checkpoint.clone(), adapter, options, is_embedded: false };
        let (summary, assumed) = (config.own(&file).summary(), config.gguf_assumes());
        // A large vocabulary takes as long as the weights.
        let (text, opened) =
            rayon::join(|| TextSide::of_gguf(metadata, options), || weights.open(config, client));
        let (mut text, opened) = (text?, opened?);
        text.warnings.extend(assumed);
        file.check_unchanged()?;
        Ok(Self::new(path, summary, text, opened))
    }

    /// The parts, put together.
    fn new(path: &Path, files: Summary, mut text: TextSide, opened: Opened<B>) -> Self {
        let Opened { model, base, warning } = opened;
        text.warnings.extend(warning);
        text.keep_within(model.vocab_rows());
        if model.has_head_under_tie() {
            let warning = "`tie_word_embeddings` is true, but the file has a head of other values: it is used";
            text.warnings.push(warning.to_owned());
        }
        let TextSide { tokenizer, defaults, eos, chat_template, warnings, bos, .. } = text;
        let path = path.to_path_buf();
        Self { path, files, model, tokenizer, defaults, eos, chat_template, warnings, bos, base }
    }

    /// Loads a model that is part of the program.
    ///
    /// # Errors
    ///
    /// As [`LanguageModel::open`].
    pub fn embedded(files: Embedded, client: B::Client) -> Result<Self> {
        let folder = Path::new(files.name);
        let config = ConfigFile::parse(folder.join("config.json"), files.config)?;
        let text = TextFiles::embedded(&files)?;
        let checkpoint = Checkpoint::from_safetensors(files.name, files.weights)?;
        let options = &OpenOptions::default();
        let weights = Weights { checkpoint, adapter: None, options, is_embedded: true };
        Self::assemble(folder, &config, text, weights, client)
    }

    fn assemble(
        path: &Path,
        file: &ConfigFile,
        files: TextFiles,
        weights: Weights<'_>,
        client: B::Client,
    ) -> Result<Self> {
        let folder = file.path().parent().unwrap_or(Path::new(""));
        let mut text = TextSide::of_files(files, folder, Some(file))?;
        let config = weights.options.families.read(file)?;
        let of_pictures = |name: &&str| config.family().left_out(name) == Some(LeftOut::Pictures);
        let count = weights.checkpoint.names().filter(of_pictures).count();
        if count > 0 {
            let what = LeftOut::Pictures.what();
            text.warnings.push(format!("{count} tensors of {what} are not read: text only"));
        }
        let summary = config.own(&weights.checkpoint).summary();
        let opened = weights.open(config, client)?;
        Ok(Self::new(path, summary, text, opened))
    }

    /// The block of the model's file that predicts one token more; `None` when it has none. Its weights are read here,
    /// without adapters.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn mtp(&self) -> Result<Option<Mtp<B>>> {
        let options = OpenOptions { progress: None, ..self.base.options.clone() };
        if self.base.embedded.is_some() || self.model.family().next_block().is_none() {
            return Ok(None);
        }
        Threads::install_on(options.threads.as_ref(), || {
            let mut checkpoint = options.checkpoint(&self.path)?;
            if options.exact && checkpoint.gguf().is_some() {
                checkpoint.decode()?;
            }
            let block = mtp::parameters(self.model.config(), checkpoint)?;
            let Some(block) = block else { return Ok(None) };
            let list = Mtp::packs(&self.model, &block)?;
            let base = &*self.base;
            let made = Experts { list, kind: "-mtp", checkpoint: &block, options: &options };
            let (packs, warning) =
                made.packs::<B>(self.model.client(), &base.fingerprint, &base.notices)?;
            if let Some(line) = warning {
                base.notices.add(line);
            }
            Mtp::of(&self.model, &block, packs).map(Some)
        })
    }

    /// The same model with the low-rank adapters of a folder beside it, in place of others if it has some. Its weights are
    /// shared, so that it takes the memory of the adapters alone, and of layers that quantized weights are joined in.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open); [`Error::Damaged`] when the weights are no more those that were opened.
    ///
    /// ```
    /// use boostr::load::{LanguageModel, OpenOptions};
    /// use boostr::train::data::{Batches, Packing, TokenFile, Truncate};
    /// use boostr::train::{AdamWConfig, LoraConfig, Schedule, Trainer, TrainableModel};
    /// use boostr::backend;
    ///
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny");
    /// # let folder = std::env::temp_dir().join(format!("boostr-doc-tune-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder)?;
    /// let (options, lora) = (OpenOptions::default(), LoraConfig::default());
    /// let lm = LanguageModel::open(path, &options, backend::cpu())?;
    /// let documents = [lm.encode("The sea was calm.")?, lm.encode("The wind rose.")?];
    /// let data = TokenFile::of_documents(&documents, 0, lm.vocab_limit() as u32)?;
    /// let mut batches = Batches::new(&data, Packing::Documents(Truncate::Split), 2, 32, 0)?;
    ///
    /// let mut model = TrainableModel::open(path.as_ref(), &options)?;
    /// model.add_adapters(&lora, 0)?;
    /// let schedule =
    ///     Schedule { lr: 2e-4, warmup_steps: 0, total_steps: 3, ..Schedule::default() };
    /// let mut trainer = Trainer::new(model, AdamWConfig::default(), schedule, 2048, false)?;
    /// for _ in 0..3 {
    ///     trainer.step(&batches.next())?;
    /// }
    /// trainer.model().write_adapters(&folder, path, &lora)?;
    ///
    /// let tuned = lm.with_adapters(&folder)?;
    /// println!("{}", tuned.complete("The sea").max_tokens(8).run()?.text);
    /// # std::fs::remove_dir_all(&folder)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn with_adapters(&self, folder: impl AsRef<Path>) -> Result<Self> {
        let options = OpenOptions {
            adapter: Some(folder.as_ref().to_path_buf()),
            progress: None,
            ..self.base.options.clone()
        };
        let adapter = adapters_of(&options)?;
        let config = self.model.config().clone();
        let client = self.model.client().clone();
        let model = Threads::install_on(options.threads.as_ref(), || {
            let mut checkpoint = match &self.base.embedded {
                Some(embedded) => embedded.clone(),
                None => options.checkpoint(&self.path)?,
            };
            if options.exact && checkpoint.gguf().is_some() {
                checkpoint.decode()?;
            }
            let files = checkpoint.clone();
            let mut weights =
                Weights { checkpoint, adapter, options: &options, is_embedded: false };
            let (tied, fingerprint) = weights.prepare(&config)?;
            if fingerprint.text() != self.base.fingerprint.text() {
                let reason = "the weights were changed since they were opened";
                return Err(Error::damaged(&self.path, reason));
            }
            let made = (&self.base.weights, self.base.packs.clone());
            weights.model(config, tied, client, made, &files)
        })?;
        Ok(Self {
            path: self.path.clone(),
            files: self.files.clone(),
            model: Arc::new(model),
            tokenizer: self.tokenizer.clone(),
            defaults: self.defaults.clone(),
            eos: self.eos.clone(),
            chat_template: self.chat_template.clone(),
            warnings: self.warnings.clone(),
            bos: self.bos,
            base: self.base.clone(),
        })
    }

    /// Lines about what went wrong with the model's files since it was opened, and what was done about it. Each is given
    /// once.
    #[must_use]
    pub fn notices(&self) -> Vec<String> {
        self.base.notices.take()
    }

    /// The tokenizer.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] when the model came without, with the way to give one.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        let reason = "no tokenizer.json in this folder, no tokens in this GGUF file: give one with \
                      --tokenizer FILE (the state-spaces/mamba2 models use that of \
                      EleutherAI/gpt-neox-20b), or give ids with --tokens";
        self.tokenizer.as_ref().ok_or_else(|| Error::format(&self.path, reason))
    }

    /// The ids of a prompt: text as text, with what the tokenizer puts before it.
    ///
    /// # Errors
    ///
    /// When there is no tokenizer or it refuses the text.
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>> {
        self.encode_parts(&[Part::Text(prompt)])
    }

    /// The same of a prompt in parts, some of which the program wrote.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode).
    pub fn encode_parts(&self, parts: &[Part<'_>]) -> Result<Vec<u32>> {
        encoded(self.tokenizer()?, parts, self.bos)
    }

    /// Puts another chat template in place of the model's. The role markers that it writes are control tokens too.
    pub fn set_chat_template(&mut self, source: chat::Source) {
        let of = |tokenizer| controlled(tokenizer, Some(&source), &[]);
        self.tokenizer = self.tokenizer.take().map(of);
        self.chat_template = Some(source);
    }

    /// The ids of a prompt that is gone on with as it is. With `parse_special`, the name of a control token in it is that
    /// token, as in what a chat template writes; without, it is text, as in [`encode`](Self::encode).
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode).
    pub fn encode_prompt(&self, prompt: &str, parse_special: bool) -> Result<Vec<u32>> {
        self.encode_parts(&[part_of(prompt, parse_special)])
    }

    /// Ids below this may be sampled: the weights have a row for them and the tokenizer a text.
    #[must_use]
    pub fn vocab_limit(&self) -> usize {
        let known = self.tokenizer.as_ref().map_or(usize::MAX, |t| t.max_id() as usize + 1);
        self.model.vocab_limit().min(known)
    }
}

/// The adapters that are to be put beside the model.
fn adapters_of(options: &OpenOptions) -> Result<Option<Adapters>> {
    let read = |folder| Adapters::read_by(folder, options.access());
    options.adapter.as_deref().map(read).transpose()
}

/// What a model is made of.
struct Weights<'a> {
    checkpoint: Checkpoint,
    adapter: Option<Adapters>,
    options: &'a OpenOptions,
    /// Whether they are part of the program, not of a file.
    is_embedded: bool,
}

impl Weights<'_> {
    /// The model, and what others with other adapters are made of.
    fn open<B: Backend>(mut self, config: Config, client: B::Client) -> Result<Opened<B>> {
        let (files, options) = (self.checkpoint.clone(), self.options.clone());
        let embedded = self.is_embedded.then(|| files.clone());
        let (tied, fingerprint) = self.prepare(&config)?;
        let (weights, notices) = (SharedWeights::default(), Arc::default());
        let list = config.packs::<B>(&self.checkpoint, &client, None)?;
        let experts = Experts { list, kind: "", checkpoint: &self.checkpoint, options: &options };
        let (packs, warning) = experts.packs::<B>(&client, &fingerprint, &notices)?;
        let model = self.model(config, tied, client, (&weights, packs.clone()), &files)?;
        let base = Base { weights, fingerprint, options, embedded, packs, notices };
        let base = Arc::new(base);
        Ok(Opened { model: Arc::new(model), base, warning })
    }

    /// Gives the weights the model's own names. Whether the embedding is the head, and the fingerprint without adapters.
    fn prepare(&mut self, config: &Config) -> Result<(bool, Fingerprint)> {
        let tied = config.prepare(&mut self.checkpoint)?;
        let fingerprint = Fingerprint::new(config, &self.checkpoint, tied);
        Ok((tied, fingerprint))
    }

    /// The model, with the adapters beside it, and what is odd about it. No file was written to while it was loaded.
    fn model<B: Backend>(
        self,
        config: Config,
        tied: bool,
        client: B::Client,
        (shared, packs): (&SharedWeights<B>, Option<Arc<Packs>>),
        files: &Checkpoint,
    ) -> Result<Model<B>> {
        let Self { mut checkpoint, adapter, options, .. } = self;
        if let Some(adapters) = &adapter {
            adapters.put_beside(&config, &mut checkpoint)?;
        }
        let made = (Some(shared), packs);
        let model = Model::sharing(config, &checkpoint, tied, client, made)?;
        checkpoint.all_taken();
        files.check_unchanged()?;
        adapter.as_ref().map_or(Ok(()), Adapters::check_unchanged)?;
        let model = model.with_kv_type(options.kv_type.unwrap_or(KvType::F32));
        Ok(model.with_context(options.context).with_threads(options.threads.clone()))
    }
}

/// Experts' blocks that are to be packed.
struct Experts<'a> {
    list: Vec<Pack>,
    /// What the file's name says of them beside the model and the order.
    kind: &'a str,
    checkpoint: &'a Checkpoint,
    options: &'a OpenOptions,
}

impl Experts<'_> {
    /// The file of packed experts, made if it is not there; and why there is none, though there should be.
    fn packs<B: Backend>(
        &self,
        client: &B::Client,
        fingerprint: &Fingerprint,
        notices: &Arc<Notices>,
    ) -> Result<(Option<Arc<Packs>>, Option<String>)> {
        let Self { list, kind, checkpoint, options } = self;
        if options.no_mmap || options.no_pack_cache {
            return Ok((None, None));
        }
        let name = || fingerprint.text().to_owned();
        let Some(path) = Packs::path_for::<B>(list, client, kind, name) else {
            return Ok((None, None));
        };
        if let Some(packs) = Packs::open(&path, list, notices) {
            return Ok((Some(Arc::new(packs)), None));
        }
        let written = Packs::write::<B>(&path, list, client, |part| checkpoint.taken(part));
        match (written, Packs::open(&path, list, notices)) {
            (Err(interrupted @ Error::Interrupted { .. }), _) => Err(interrupted),
            (Err(error), _) => {
                let why = chain(&error);
                let warning =
                    format!("experts are packed in memory: the packed file was not written: {why}");
                Ok((None, Some(warning)))
            }
            (Ok(()), packs) => {
                let size = fs::metadata(&path).map_or(0, |file| file.len() >> 20);
                let path = path.display();
                Ok((
                    packs.map(Arc::new),
                    Some(format!("packed experts are written to `{path}`: {size} MiB")),
                ))
            }
        }
    }
}

/// Bytes of the weights of a checkpoint that stay in its files when it is opened by default, and of those that take
/// memory. Experts that are packed in a file beside the model stay too.
///
/// # Errors
///
/// As [`Config::prepare`].
pub fn placed(config: &Config, checkpoint: &Checkpoint) -> Result<[usize; 2]> {
    let mut checkpoint = checkpoint.clone();
    config.prepare(&mut checkpoint)?;
    let client = crate::backend::cpu();
    let list = config.packs::<crate::backend::Cpu>(&checkpoint, &client, None)?;
    let are_packed =
        Packs::path_for::<crate::backend::Cpu>(&list, &client, "", String::new).is_some();
    let packed = if are_packed { list.iter().map(Pack::blocks).sum() } else { 0 };
    let mut placed = [packed, 0];
    for (_, entry) in checkpoint.iter() {
        let size = match entry.dtype {
            Dtype::F32 => 4,
            Dtype::BF16 | Dtype::F16 => 2,
            _ => usize::MAX,
        };
        let stays = entry.data.is_mapped() && (entry.data.as_ptr() as usize).is_multiple_of(size);
        placed[usize::from(!stays)] += entry.data.len();
    }
    placed[1] -= packed;
    Ok(placed)
}

/// The configuration of the model at `path`, whose weights are `checkpoint` if they could be opened: a
/// GGUF file has its own, others lie in a folder with `config.json` or `params.json`.
///
/// # Errors
///
/// [`Error::Format`] when there is none, and whatever is wrong with it.
pub fn read_config(path: &Path, checkpoint: Option<&Checkpoint>) -> Result<Config> {
    match checkpoint.and_then(|checkpoint| Some((checkpoint, checkpoint.gguf()?))) {
        Some((checkpoint, metadata)) => Config::read_gguf(checkpoint, metadata),
        None => Config::read(&config_file(&folder_of(path)?)?),
    }
}

/// Whether the model is in GGUF: a file by its first bytes or its name, a folder by what it lacks and has.
///
/// # Errors
///
/// [`Error::Io`] when it cannot be looked at.
pub fn is_gguf(path: &Path) -> Result<bool> {
    let metadata = fs::metadata(path).map_err(|e| Error::io(path, e))?;
    if metadata.is_dir() {
        if present(&path.join("config.json"))? || present(&path.join("params.json"))? {
            return Ok(false);
        }
        let entries = fs::read_dir(path).map_err(|e| Error::io(path, e))?;
        return Ok(entries.flatten().any(|entry| gguf::is_name(&entry.path())));
    }
    if !metadata.is_file() {
        return Ok(false);
    }
    let mut magic = [0; 4];
    let mut file = fs::File::open(path).map_err(|e| Error::io(path, e))?;
    Ok(file.read_exact(&mut magic).is_ok() && magic == *b"GGUF" || gguf::is_name(path))
}

/// The folder that `path` is, or is in.
pub(crate) fn folder_of(path: &Path) -> Result<PathBuf> {
    let is_folder = fs::metadata(path).map_err(|e| Error::io(path, e))?.is_dir();
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok(if is_folder { path } else { parent }.to_path_buf())
}

/// An error about a model's weights, or the way in which they are quantized, where the configuration says that they are:
/// none of these ways is read.
pub(crate) fn of_quantized(config: &ConfigFile, error: Error) -> Error {
    if !matches!(error, Error::Tensors { .. } | Error::Format { .. } | Error::Unsupported { .. }) {
        return error;
    }
    for key in ["quantization_config", "quantization", "compression_config"] {
        let Ok(about) = config.object(key) else { continue };
        let bits = about.usize(&["bits"], 1..=64).ok().flatten();
        let way = match (about.text("quant_method"), bits) {
            (Ok(Some(method)), _) => format!("`{}`", method.escape_debug()),
            (_, Some(bits)) => format!("MLX, {bits} bits"),
            _ => continue,
        };
        let path = config.path().display();
        let what = format!(
            "weights quantized by {way} (`{key}` in `{path}`): take the model as its author trained it, or its GGUF file"
        );
        return Error::Unsupported { what };
    }
    error
}

/// The same, by the configuration of the folder that `path` is, or is in.
pub fn of_quantized_at(path: &Path, error: Error) -> Error {
    match folder_of(path).and_then(|folder| config_file(&folder)) {
        Ok(config) => of_quantized(&config, error),
        Err(_) => error,
    }
}

/// The configuration file of a model folder.
pub(crate) fn config_file(folder: &Path) -> Result<ConfigFile> {
    for name in ["config.json", "params.json"] {
        let path = folder.join(name);
        if let Some(text) = read_text(&path)? {
            return ConfigFile::parse(path, &text);
        }
    }
    let cached = snapshots(folder);
    let reason = if adapters::is_adapter(folder)? {
        "adapters beside a model, no model: `boostr tune MODEL --merge ADAPTERS --out NEW` makes one"
            .to_owned()
    } else if cached.is_empty() {
        "no config.json (or params.json) in this folder: a model needs one beside its weights; take \
         it from where the weights came from"
            .to_owned()
    } else {
        format!("no config.json in this folder{cached}")
    };
    Err(Error::format(folder, reason))
}

/// Whether there is such a file; a link to nothing is an error.
fn present(path: &Path) -> Result<bool> {
    match path.try_exists() {
        Ok(false) if fs::symlink_metadata(path).is_ok() => {
            Err(Error::format(path, "incomplete download: the link leads to no file"))
        }
        found => found.map_err(|e| Error::io(path, e)),
    }
}

/// The text of a small file of a model folder, without a byte order mark; `None` when there is no such file.
///
/// # Errors
///
/// [`Error::Io`] or [`Error::Format`] when it is no regular file, longer than 16 MiB, not UTF-8, a link
/// to nothing, or cannot be read.
pub fn read_text(path: &Path) -> Result<Option<String>> {
    if !present(path)? {
        return Ok(None);
    }
    files::read_text(path, files::MAX_CONFIG).map(Some)
}
