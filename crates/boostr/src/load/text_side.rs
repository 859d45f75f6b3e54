//! What a model's files say of text: its tokenizer, the ends of its answers, its chat template. No weights are read.

use std::fs;
use std::path::Path;

use super::{Embedded, OpenOptions, adapters, config_file, folder_of, is_gguf, present, read_text};
use crate::chat;
use crate::checkpoint::ConfigFile;
use crate::checkpoint::gguf::Metadata;
use crate::error::{Error, Result};
use crate::generation_config::{GenerationDefaults, SpecialTokens};
use crate::tokenizer::{Beside, Part, Tokenizer, ensure_bos};

/// A model's tokenizer, and how its author meant it to be used.
#[derive(Debug, Clone, Default)]
pub struct TextSide {
    /// Text to ids and back; some releases come without.
    pub tokenizer: Option<Tokenizer>,
    /// `generation_config.json`, or nothing set.
    pub defaults: GenerationDefaults,
    /// Generation ends at any of these: those of `generation_config.json`, else of `config.json`, and the
    /// tokenizer's own; in a GGUF file those of [`GgufTokenizer::ends`](crate::tokenizer::GgufTokenizer::ends).
    pub eos: Vec<u32>,
    /// How a conversation becomes text, for models that were trained on some.
    pub chat_template: Option<chat::Source>,
    /// What is odd about these files, one sentence each, to be shown to people.
    pub warnings: Vec<String>,
    /// What is put before a prompt when the tokenizer does not.
    pub(super) bos: Option<u32>,
    /// Where ends are named by their ids, and these.
    named: (String, Vec<u32>),
}

impl TextSide {
    /// Reads the text side of any model that [`LanguageModel::open`](super::LanguageModel::open) opens, or of a
    /// single `tokenizer.json` and the files beside it.
    ///
    /// # Errors
    ///
    /// Any of [`Error`], naming the file and what to do.
    ///
    /// ```
    /// use boostr::load::TextSide;
    ///
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny");
    /// let text = TextSide::open(path, &Default::default())?;
    /// let ids = text.encode("It is a truth", true)?;
    /// assert_eq!(text.tokenizer.unwrap().decode(&ids, true)?, "It is a truth");
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Self> {
        let path = path.as_ref();
        if adapters::is_adapter(path)? {
            return Self::open(adapters::base_of(path)?, options);
        }
        if is_gguf(path)? {
            let file = options.checkpoint(path)?;
            let Some(metadata) = file.gguf() else {
                return Err(Error::format(path, "expected a GGUF file"));
            };
            let mut text = Self::of_gguf(metadata, options)?;
            text.keep_within(metadata.array_len("tokenizer.ggml.tokens")?.unwrap_or(usize::MAX));
            return Ok(text);
        }
        let folder = folder_of(path)?;
        let mut options = options.clone();
        if path.extension().is_some_and(|ending| ending == "json") && options.tokenizer.is_none() {
            options.tokenizer = Some(path.to_path_buf());
        }
        let has_tokenizer = options.tokenizer.is_some() || present(&folder.join(TOKENIZER))?;
        let config = match config_file(&folder) {
            Ok(config) => Some(config),
            // A tokenizer may stand alone.
            Err(_) if has_tokenizer => None,
            Err(error) => return Err(error),
        };
        let rows = config.as_ref().and_then(|config| rows_of(config, &options));
        let files = TextFiles::read(&folder, &options, rows)?;
        let mut text = Self::of_files(files, &folder, config.as_ref())?;
        text.keep_within(rows.unwrap_or(usize::MAX));
        Ok(text)
    }

    /// Reads the text side of a model that is part of the program.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn embedded(files: &Embedded) -> Result<Self> {
        let folder = Path::new(files.name);
        let config = ConfigFile::parse(folder.join("config.json"), files.config)?;
        Self::of_files(TextFiles::embedded(files)?, folder, Some(&config))
    }

    /// What the files of a folder say, and where they say nothing its configuration.
    pub(super) fn of_files(
        files: TextFiles,
        folder: &Path,
        config: Option<&ConfigFile>,
    ) -> Result<Self> {
        let Special { defaults, eos, bos, named } = files.special(folder, config)?;
        let chat_template = files.chat_template(folder)?;
        let tokenizer = files.tokenizer;
        let text = Self { tokenizer, defaults, eos, chat_template, bos, named, ..Self::default() };
        Ok(text.with_control())
    }

    /// What a GGUF file says.
    pub(super) fn of_gguf(metadata: &Metadata, options: &OpenOptions) -> Result<Self> {
        let read = Tokenizer::from_gguf(metadata);
        // A tokenizer that is not used need not be one that can be.
        let read = if options.tokenizer.is_some() { read.unwrap_or(None) } else { read? };
        let mut defaults = generation_defaults(metadata)?;
        let mut eos = defaults.eos_token_id.clone().unwrap_or_default();
        let path = metadata.path().display();
        let named = (format!("`{path}`: `eos_token_id` in `{GENERATION}`"), eos.clone());
        let (mut tokenizer, mut chat_template) = (None, None);
        if let Some(text) = read {
            let token = |id: Option<u32>| text.tokenizer.token(id?);
            let special = SpecialTokens {
                bos_token: token(text.bos),
                eos_token: token(text.eos),
                pad_token: token(text.pad),
                unk_token: token(text.unk),
                ..SpecialTokens::default()
            };
            chat_template = chat::Source::from_gguf(metadata, special)?;
            eos.extend(text.ends);
            eos.sort_unstable();
            eos.dedup();
            tokenizer = Some(text.tokenizer);
            if metadata.get(GENERATION).is_none() {
                defaults.bos_token_id = text.bos;
            }
        }
        if let Some(path) = &options.tokenizer {
            tokenizer = Some(read_tokenizer(path, None)?);
        }
        let text = Self { tokenizer, defaults, eos, chat_template, named, ..Self::default() };
        Ok(text.with_control())
    }

    /// Makes the ends, and the markers of roles in the template, control tokens.
    fn with_control(mut self) -> Self {
        if let Some(tokenizer) = self.tokenizer.take() {
            let tokenizer = controlled(tokenizer, self.chat_template.as_ref(), &self.eos);
            self.warnings.extend_from_slice(tokenizer.warnings());
            self.tokenizer = Some(tokenizer);
        }
        let fields = self.defaults.not_acted_on.iter();
        let warning = |field| format!("`generation_config.json`: `{field}` is not acted on");
        self.warnings.extend(fields.map(warning));
        self
    }

    /// Takes out the ends that no answer reaches: those without a row in the weights, or without a token.
    pub(super) fn keep_within(&mut self, rows: usize) {
        let known = self.tokenizer.as_ref().map_or(usize::MAX, |t| t.max_id() as usize + 1);
        let limit = rows.min(known);
        let is_within = |id: u32| (id as usize) < limit;
        let reason = if rows <= known {
            format!("the model has {rows} rows, for ids from 0 to {}", rows.saturating_sub(1))
        } else {
            format!("the largest id of a token is {}", known.saturating_sub(1))
        };
        let (place, named) = &self.named;
        for id in self.eos.iter().filter(|&&id| !is_within(id)) {
            let place = if named.contains(id) { place } else { "the tokenizer's end of a text" };
            self.warnings.push(format!("{place}: {id} never ends an answer: {reason}"));
        }
        self.eos.retain(|&id| is_within(id));
        if let Some(id) = self.defaults.bos_token_id.take_if(|id| !is_within(*id)) {
            self.warnings.push(format!("`bos_token_id`: {id} is not used: {reason}"));
        }
        let (suppression, out) = self.defaults.suppression.below(limit);
        if let [id, more @ ..] = out.as_slice() {
            self.defaults.suppression = suppression;
            let more =
                if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
            self.warnings.push(format!(
                "`suppress_tokens`, `begin_suppress_tokens` or `bad_words_ids`: left out {id}{more}: {reason}"
            ));
        }
        if let Err(error) = self.defaults.suppression.check(limit) {
            self.defaults.suppression = Default::default();
            self.warnings.push(format!("{error}: they are not used, as no answer could be given"));
        }
    }

    /// The ids of a prompt, with what the tokenizer puts before it. With `parse_special`, the name of a control token in
    /// it is that token; without, it is text.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when there is no tokenizer, and as [`Tokenizer::encode`].
    pub fn encode(&self, prompt: &str, parse_special: bool) -> Result<Vec<u32>> {
        let Some(tokenizer) = &self.tokenizer else {
            let reason = "expected one: the model came without".to_owned();
            return Err(Error::Argument { name: "tokenizer", reason });
        };
        encoded(tokenizer, &[part_of(prompt, parse_special)], self.bos)
    }
}

/// The tokenizer whose control tokens are also `ends`, and the markers of roles in the templates of `chat`.
pub(super) fn controlled(
    tokenizer: Tokenizer,
    chat: Option<&chat::Source>,
    ends: &[u32],
) -> Tokenizer {
    let templates = chat.into_iter().flat_map(|chat| &chat.templates);
    let markers = templates.flat_map(|(_, text)| tokenizer.markers_in(text));
    let ids: Vec<u32> = ends.iter().copied().chain(markers).collect();
    tokenizer.with_control(&ids)
}

/// A prompt whose names of control tokens are these tokens, with `parse_special`, or text.
pub(super) fn part_of(prompt: &str, parse_special: bool) -> Part<'_> {
    if parse_special { Part::Control(prompt) } else { Part::Text(prompt) }
}

/// The ids of a prompt, with what the tokenizer puts before it, and `bos` where it puts nothing.
pub(super) fn encoded(
    tokenizer: &Tokenizer,
    parts: &[Part<'_>],
    bos: Option<u32>,
) -> Result<Vec<u32>> {
    let mut ids = tokenizer.encode_parts(parts, true)?;
    if let Some(bos) = bos {
        ensure_bos(&mut ids, bos);
    }
    Ok(ids)
}

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const ADDED_TOKENS: &str = "added_tokens.json";
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
const GENERATION_CONFIG: &str = "generation_config.json";

/// The files of a model folder beside its weights and its configuration.
#[derive(Default)]
pub(crate) struct TextFiles {
    pub(crate) tokenizer: Option<Tokenizer>,
    /// The text of `tokenizer_config.json`.
    pub(crate) tokenizer_config: Option<String>,
    /// The text of `special_tokens_map.json`.
    pub(crate) special_tokens_map: Option<String>,
    /// The text of `generation_config.json`.
    pub(crate) generation_config: Option<String>,
    /// Names and texts of the templates that have files of their own.
    pub(crate) chat_templates: Vec<(String, String)>,
}

/// Tokens with a part of their own in generation, and its defaults.
pub(crate) struct Special {
    pub(crate) defaults: GenerationDefaults,
    /// Generation ends at any of these.
    pub(crate) eos: Vec<u32>,
    /// What is put before a prompt when the tokenizer does not.
    pub(crate) bos: Option<u32>,
    /// Where ends are named by their ids, and these.
    named: (String, Vec<u32>),
}

impl TextFiles {
    /// Reads them; `rows` are those of the model's embedding, where they are known.
    pub(crate) fn read(folder: &Path, options: &OpenOptions, rows: Option<usize>) -> Result<Self> {
        let tokenizer_config = read_text(&folder.join(TOKENIZER_CONFIG))?;
        let special_tokens_map = read_text(&folder.join(SPECIAL_TOKENS_MAP))?;
        let own = folder.join(TOKENIZER);
        let tokenizer = match &options.tokenizer {
            Some(path) => Some(read_tokenizer(path, rows)?),
            None if present(&own)? => {
                let texts = [&tokenizer_config, &special_tokens_map];
                Some(tokenizer_beside(&own, texts.map(Option::as_deref), rows)?)
            }
            None => None,
        };
        Ok(Self {
            tokenizer,
            tokenizer_config,
            special_tokens_map,
            generation_config: read_text(&folder.join(GENERATION_CONFIG))?,
            chat_templates: chat_templates(folder)?,
        })
    }

    /// Those that are part of the program.
    pub(super) fn embedded(files: &Embedded) -> Result<Self> {
        let path = Path::new(files.name).join(TOKENIZER);
        Ok(Self {
            tokenizer: Some(Tokenizer::from_bytes(path, files.tokenizer.as_bytes())?),
            tokenizer_config: Some(files.tokenizer_config.into()),
            generation_config: Some(files.generation_config.into()),
            ..Self::default()
        })
    }

    /// The chat templates of the folder: those with files of their own, else those in `tokenizer_config.json`.
    pub(crate) fn chat_template(&self, folder: &Path) -> Result<Option<chat::Source>> {
        let special = self.special_tokens(folder)?;
        if let [(name, _), ..] = self.chat_templates.as_slice() {
            let (path, templates) = (folder.join(template_file(name)), self.chat_templates.clone());
            return Ok(Some(chat::Source { path, templates, special }));
        }
        let Some(json) = &self.tokenizer_config else { return Ok(None) };
        let source = chat::Source::from_json(folder.join(TOKENIZER_CONFIG), json)?;
        Ok(source.map(|source| chat::Source { special, ..source }))
    }

    /// The named tokens of `tokenizer_config.json`, and those that only `special_tokens_map.json` names.
    fn special_tokens(&self, folder: &Path) -> Result<SpecialTokens> {
        let read = |name, text: &Option<String>| match text {
            Some(text) => SpecialTokens::from_json(folder.join(name), text),
            None => Ok(SpecialTokens::default()),
        };
        let own = read(TOKENIZER_CONFIG, &self.tokenizer_config)?;
        let map = read(SPECIAL_TOKENS_MAP, &self.special_tokens_map)?;
        Ok(SpecialTokens {
            bos_token: own.bos_token.or(map.bos_token),
            eos_token: own.eos_token.or(map.eos_token),
            pad_token: own.pad_token.or(map.pad_token),
            unk_token: own.unk_token.or(map.unk_token),
            ..own
        })
    }

    /// What these files say, and where they say nothing the configuration.
    pub(crate) fn special(&self, folder: &Path, config: Option<&ConfigFile>) -> Result<Special> {
        let special = self.special_tokens(folder)?;
        let path = folder.join(GENERATION_CONFIG);
        let defaults = match &self.generation_config {
            Some(text) => GenerationDefaults::from_json(&path, text)?,
            None => GenerationDefaults::default(),
        };
        let token = |name: &Option<String>| self.tokenizer.as_ref()?.id(name.as_deref()?);
        let (file, mut eos) = match (&defaults.eos_token_id, config) {
            (Some(ids), _) => (path.as_path(), ids.clone()),
            (None, Some(config)) => (config.path(), config.ids("eos_token_id")?),
            (None, None) => (path.as_path(), Vec::new()),
        };
        let named = (format!("`{}`: `eos_token_id`", file.display()), eos.clone());
        // A model tuned for conversations may name the end of a turn there alone.
        eos.extend(token(&special.eos_token).filter(|end| !eos.contains(end)));
        let bos = token(&special.bos_token).filter(|_| special.add_bos_token == Some(true));
        Ok(Special { defaults, eos, bos, named })
    }
}

/// A `tokenizer.json`, with the tokens that the files beside it name.
fn read_tokenizer(path: &Path, rows: Option<usize>) -> Result<Tokenizer> {
    let [config, map] =
        [TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP].map(|name| path.with_file_name(name));
    let (config, map) = (read_text(&config)?, read_text(&map)?);
    tokenizer_beside(path, [config.as_deref(), map.as_deref()], rows)
}

/// The same, where the texts of `tokenizer_config.json` and `special_tokens_map.json` are known.
fn tokenizer_beside(
    path: &Path,
    [config, map]: [Option<&str>; 2],
    rows: Option<usize>,
) -> Result<Tokenizer> {
    let parse = |name, text: Option<&str>| {
        text.map(|text| ConfigFile::parse(path.with_file_name(name), text)).transpose()
    };
    let added = read_text(&path.with_file_name(ADDED_TOKENS))?;
    let files = Beside {
        tokenizer_config: parse(TOKENIZER_CONFIG, config)?,
        added_tokens: parse(ADDED_TOKENS, added.as_deref())?,
        special_tokens_map: parse(SPECIAL_TOKENS_MAP, map)?,
    };
    Tokenizer::from_file(path)?.beside(&files, rows)
}

/// Rows of the embedding by a configuration alone, if it is of a known family.
pub(crate) fn rows_of(config: &ConfigFile, options: &OpenOptions) -> Option<usize> {
    Some(options.families.read(config).ok()?.family().frame().padded_vocab())
}

/// The text of `generation_config.json`, in the metadata of a GGUF file: a key of our own.
pub(crate) const GENERATION: &str = "boostr.generation_config";

/// The defaults of generation in a GGUF file: as we keep them, else as llama.cpp does.
fn generation_defaults(metadata: &Metadata) -> Result<GenerationDefaults> {
    if let Some(text) = metadata.text(GENERATION)? {
        return GenerationDefaults::from_json(metadata.path(), text);
    }
    let float = |key, range| metadata.float(key, range);
    let defaults = GenerationDefaults {
        temperature: float("general.sampling.temp", 0.0..=f32::MAX)?,
        top_p: float("general.sampling.top_p", 0.0..=1.0)?,
        min_p: float("general.sampling.min_p", 0.0..=1.0)?,
        top_k: metadata.usize("general.sampling.top_k", 0..=1 << 24)?,
        ..GenerationDefaults::default()
    };
    let samples = defaults != GenerationDefaults::default();
    Ok(GenerationDefaults { do_sample: samples.then_some(true), ..defaults })
}

/// The file of a chat template, in a model's folder.
pub(crate) fn template_file(name: &str) -> String {
    match name {
        "default" => "chat_template.jinja".to_owned(),
        name => format!("additional_chat_templates/{name}.jinja"),
    }
}

/// The chat templates that have files of their own, by name, the `default` one first.
fn chat_templates(folder: &Path) -> Result<Vec<(String, String)>> {
    let more = folder.join("additional_chat_templates");
    let mut names = Vec::new();
    if more.is_dir() {
        for entry in fs::read_dir(&more).map_err(|e| Error::io(&more, e))? {
            let file = entry.map_err(|e| Error::io(&more, e))?.file_name();
            names.extend(file.to_string_lossy().strip_suffix(".jinja").map(str::to_owned));
        }
    }
    names.retain(|name| name != "default");
    names.sort();
    names.insert(0, "default".to_owned());
    let mut templates = Vec::new();
    for name in names {
        if let Some(text) = read_text(&folder.join(template_file(&name)))? {
            templates.push((name, text));
        }
    }
    Ok(templates)
}
