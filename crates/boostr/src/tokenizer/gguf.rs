//! The tokenizer in the metadata of a GGUF file, both ways.
//!
//! | `tokenizer.ggml.model` | the tokenizer | from |
//! |---|---|---|
//! | `gpt2` | byte-level BPE | tokens, merges, and the name of its rules for words |
//! | `gemma4` | BPE on text with byte tokens | tokens, merges |
//! | `llama` | `SentencePiece` BPE with byte tokens | tokens and scores |
//!
//! They become tokenizers of the tokenizers crate, built in memory. The ids are those of llama.cpp, and of
//! the `tokenizer.json` that the metadata was made from, with these differences:
//!
//! - GGUF has no place for a normalizer: no Unicode normalization, as in llama.cpp.
//! - Control tokens (type 3), the unknown token (2) and the usual names for the end of a turn whatever their
//!   type are special; tokens of type 4 are found in any text. Where two overlap, the first one in the text
//!   counts, as in the tokenizers crate; in llama.cpp it is the longer one.
//! - A file that does not name its rules for words has `default` ones, a guess of llama.cpp, and a warning.
//! - A byte token (6) whose name names no byte is refused.
//! - Unused tokens (5, and `[PAD7]` as the name of token 7) have no text, like rows of the weights that no
//!   token has.
//! - No text becomes a control or byte token by merges.
//!
//! `tokenizer.huggingface.json`, a key that the GGUF specification knows, holds a whole `tokenizer.json`. It
//! is used instead if its tokens are those of `tokenizer.ggml.tokens`.

use std::borrow::Cow;
use std::sync::Arc;

use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::{AddedToken, SplitDelimiterBehavior};

use super::growth::Growth;
use super::stream::byte_token;
use super::{Inner, Tokenizer, file, guard};
use crate::checkpoint::gguf::Metadata;
use crate::error::Result;

mod pre;
mod write;

use pre::Pre;

/// Most tokens that are read. The largest published vocabularies have about 2^18.
const MAX_TOKENS: usize = 1 << 21;

/// Longest token that merges may make, in bytes: the time to find them is its square.
const MAX_MERGED: usize = 128;

/// Most ways to cut tokens into two others. Vocabularies have up to four for each token.
const MAX_WAYS: usize = 1 << 21;

/// Characters of a text from the file, and of the tokenizers crate's reason, that a message shows.
const MAX_SHOWN: usize = 60;
const MAX_REASON: usize = 200;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const SCORES: &str = "tokenizer.ggml.scores";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const EOT: &str = "tokenizer.ggml.eot_token_id";
const EOM: &str = "tokenizer.ggml.eom_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
const PADDING: &str = "tokenizer.ggml.padding_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
const ADD_SPACE: &str = "tokenizer.ggml.add_space_prefix";
const HUGGINGFACE: &str = "tokenizer.huggingface.json";

const PAD: &str = "[PAD";

/// Tokens that end a turn or a text, by their names (llama.cpp, `src/llama-vocab.cpp`). Files often give
/// them a wrong type.
const ENDS: [&str; 13] = [
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
];

/// The tokenizer of a GGUF file, and what the file says about its use.
#[derive(Debug, Clone)]
pub struct GgufTokenizer {
    /// Its `encode(text, true)` puts around the text what the file prescribes.
    pub tokenizer: Tokenizer,
    /// The token that starts a text.
    pub bos: Option<u32>,
    /// The token that ends a text.
    pub eos: Option<u32>,
    /// The token for what the vocabulary cannot spell.
    pub unk: Option<u32>,
    /// The token that fills a batch.
    pub pad: Option<u32>,
    /// Generation ends at any of these: the ends of a text, a turn and a message, and tokens that are known
    /// by name to be one. Sorted.
    pub ends: Vec<u32>,
    /// Whether the tokenizer is the one of `tokenizer.huggingface.json`.
    pub is_copy: bool,
}

impl Tokenizer {
    /// The tokenizer in a GGUF file's metadata; `None` if there is none: the file has no
    /// `tokenizer.ggml.tokens`, or says `none` or `no_vocab`. Such a model runs on ids.
    ///
    /// # Errors
    /// [`Error::Config`](crate::error::Error::Config) naming file, key, what was expected and what was
    /// found: for a kind or a rule for words that is not known, for lists that disagree in length, for two
    /// tokens of one name, and for ids without a token. [`Error::Tokenizer`](crate::error::Error::Tokenizer)
    /// if the tokenizers crate refuses what they make.
    ///
    /// ```
    /// use boostr::checkpoint::gguf::Metadata;
    /// use boostr::tokenizer::Tokenizer;
    ///
    /// let mut metadata = Metadata::new("model.gguf");
    /// metadata.set("tokenizer.ggml.model", "gpt2");
    /// metadata.set("tokenizer.ggml.pre", "gpt-2");
    /// metadata.set("tokenizer.ggml.tokens", ["a", "b", "ab"]);
    /// metadata.set("tokenizer.ggml.merges", ["a b"]);
    /// let read = Tokenizer::from_gguf(&metadata)?.expect("the file has tokens");
    /// assert_eq!(read.tokenizer.encode("aba", true)?, [2, 0]);
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn from_gguf(metadata: &Metadata) -> Result<Option<GgufTokenizer>> {
        let tokens = metadata.strings(TOKENS)?;
        let model = metadata.text(MODEL)?;
        let (Some(tokens), false) = (tokens, matches!(model, Some("none" | "no_vocab"))) else {
            return Ok(None);
        };
        let model = Kind::of(metadata, metadata.required(MODEL, model)?)?;
        guard(metadata.path(), "loading", || {
            Vocabulary::read(metadata, model, tokens)?.tokenizer().map(Some)
        })
    }
}

/// What `tokenizer.ggml.model` can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Text is cut into words, these into bytes; merges.
    Bytes,
    /// Merges on text.
    Text,
    /// Scores on text.
    SentencePiece,
}

impl Kind {
    fn of(metadata: &Metadata, model: &str) -> Result<Self> {
        match model {
            "gpt2" => Ok(Self::Bytes),
            "gemma4" => Ok(Self::Text),
            "llama" => Ok(Self::SentencePiece),
            other => Err(metadata.error(
                MODEL,
                format!("{} is not supported; supported: gpt2, gemma4, llama, none", shown(other)),
            )),
        }
    }

    /// The names of tokens that end a turn or a text. `</s>` is an HTML tag to the others.
    fn ends(self) -> &'static [&'static str] {
        match self {
            Self::SentencePiece => &ENDS,
            Self::Bytes | Self::Text => &ENDS[1..],
        }
    }
}

/// What `tokenizer.ggml.token_type` can be, by the numbers of ggml's `llama_token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Type {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl Type {
    fn of(number: i64) -> Self {
        match number {
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => Self::Normal,
        }
    }

    fn number(self) -> i32 {
        match self {
            Self::Normal => 1,
            Self::Unknown => 2,
            Self::Control => 3,
            Self::UserDefined => 4,
            Self::Unused => 5,
            Self::Byte => 6,
        }
    }
}

/// The tokens, by id and by text.
struct Vocabulary<'a> {
    metadata: &'a Metadata,
    model: Kind,
    texts: Vec<Cow<'a, str>>,
    types: Vec<Type>,
    /// All but the unused ones.
    ids: Vocab,
}

impl<'a> Vocabulary<'a> {
    fn read(metadata: &'a Metadata, model: Kind, tokens: Vec<&'a str>) -> Result<Self> {
        let count = tokens.len();
        if count == 0 || count > MAX_TOKENS {
            let reason = format!("expected 1 to {MAX_TOKENS} tokens, found {count}");
            return Err(metadata.error(TOKENS, reason));
        }
        let mut types = match metadata.ints(TYPES)? {
            Some(numbers) => numbers.into_iter().map(Type::of).collect(),
            None => vec![Type::Normal; count],
        };
        same_length(metadata, TYPES, count, types.len())?;
        let ends = model.ends();
        let mut texts = Vec::with_capacity(count);
        let mut ids = Vocab::with_capacity(count);
        for ((id, text), kind) in (0..).zip(tokens).zip(&mut types) {
            // As in llama.cpp: a token without text cannot be found by it.
            let text = match text {
                "" => Cow::Owned(format!("[EMPTY_{id}]")),
                text => Cow::Borrowed(text),
            };
            if ends.contains(&&*text) {
                *kind = Type::Control;
            }
            // Older converters give these, which stand for rows without a token, the type of another.
            if text.starts_with(PAD) && *text == padding(id) {
                *kind = Type::Unused;
            }
            if *kind != Type::Unused
                && let Some(other) = ids.insert(text.clone().into_owned(), id)
            {
                let reason = format!("tokens {other} and {id} are both {}", shown(&text));
                return Err(metadata.error(TOKENS, reason));
            }
            texts.push(text);
        }
        if ids.is_empty() {
            return Err(metadata.error(TYPES, "all tokens are unused"));
        }
        Ok(Self { metadata, model, texts, types, ids })
    }

    /// Ids with the texts and types of their tokens.
    fn iter(&self) -> impl Iterator<Item = (u32, &str, Type)> {
        (0..).zip(&self.texts).zip(&self.types).map(|((id, text), &kind)| (id, &**text, kind))
    }

    /// The id that `key` holds.
    fn id(&self, key: &str) -> Result<Option<u32>> {
        Ok(self.metadata.usize(key, 0..=self.texts.len() - 1)?.map(|id| id as u32))
    }

    /// The same, or `default` if there are so many tokens.
    fn id_or(&self, key: &str, default: u32) -> Result<Option<u32>> {
        let default = Some(default).filter(|&id| (id as usize) < self.texts.len());
        Ok(self.id(key)?.or(default))
    }

    fn tokenizer(self) -> Result<GgufTokenizer> {
        let model = self.model;
        let pre = if model == Kind::Bytes { Some(self.pre()?) } else { None };
        let (bos, eos, unk) = match model {
            Kind::SentencePiece => {
                (self.id_or(BOS, 1)?, self.id_or(EOS, 2)?, self.id_or(UNKNOWN, 0)?)
            }
            Kind::Bytes | Kind::Text => (self.id(BOS)?, self.id(EOS)?, self.id(UNKNOWN)?),
        };
        let pad = self.id(PADDING)?;
        let mut ends: Vec<u32> = self.known_ends();
        ends.extend(eos);
        ends.extend(self.id(EOT)?);
        ends.extend(self.id(EOM)?);
        ends.sort_unstable();
        ends.dedup();

        let add_bos = self.around(ADD_BOS, BOS, bos, pre.is_none_or(|pre| pre.add_bos))?;
        let add_eos = self.around(ADD_EOS, EOS, eos, false)?;

        let copy = self.huggingface()?;
        let is_copy = copy.is_some();
        let is_guessed = model == Kind::Bytes && self.pre_name()?.is_none();
        let mut inner = match copy {
            Some(inner) => inner,
            None => {
                let warning = self.byte_tokens()?;
                let path = self.metadata.path().display();
                let guessed = format!(
                    "`{path}`: `{PRE}` is missing: the rules for words are guessed, and texts may become other tokens \
                     than the model was trained on; convert the model again with a newer converter"
                );
                let mut inner = self.build(pre, unk)?;
                inner.warnings.extend(is_guessed.then_some(guessed));
                inner.warnings.extend(warning);
                inner
            }
        };
        if let Some(bos) = add_bos
            && inner.frame.first() != Some(&bos)
        {
            inner.frame.insert(0, bos);
        }
        if let Some(eos) = add_eos
            && inner.frame.last() != Some(&eos)
        {
            inner.frame.push(eos);
        }
        let tokenizer = Tokenizer { inner: Arc::new(inner) };
        Ok(GgufTokenizer { tokenizer, bos, eos, unk, pad, ends, is_copy })
    }

    /// Refuses byte tokens whose name names no byte. What is wrong with the others, where there are some.
    fn byte_tokens(&self) -> Result<Option<String>> {
        if self.model == Kind::Bytes {
            return Ok(None);
        }
        let mut bytes = 0;
        for (id, text, _) in self.iter().filter(|&(.., kind)| kind == Type::Byte) {
            let byte = byte_token(text).filter(|byte| format!("<0x{byte:02X}>") == text);
            if byte.is_none() {
                let reason = format!(
                    "token {id} is of type {} (byte), but is called {}: expected `<0x00>` to `<0xFF>`",
                    Type::Byte.number(),
                    shown(text)
                );
                return Err(self.metadata.error(TOKENS, reason));
            }
            bytes += 1;
        }
        let names = (0..=255_u8).map(|byte| format!("<0x{byte:02X}>"));
        let missing: Vec<String> = names.filter(|name| !self.ids.contains_key(name)).collect();
        if bytes == 0 || missing.is_empty() {
            return Ok(None);
        }
        let path = self.metadata.path().display();
        Ok(Some(format!("`{path}`: {}", file::missing_bytes(&missing, &[]))))
    }

    /// `id` if the file, or else `default`, says that a text gets it.
    fn around(&self, key: &str, of: &str, id: Option<u32>, default: bool) -> Result<Option<u32>> {
        match (self.metadata.bool(key)?, id) {
            (Some(true), None) => {
                Err(self.metadata.error(key, format!("is true, but `{of}` is missing")))
            }
            (None, id) if default => Ok(id),
            (Some(true), id) => Ok(id),
            _ => Ok(None),
        }
    }

    fn known_ends(&self) -> Vec<u32> {
        // With these two, `<|end|>` only ends a part of an answer.
        let parts = self.ids.contains_key("<|return|>") && self.ids.contains_key("<|call|>");
        let known = self.model.ends().iter().filter(|&&name| !(parts && name == "<|end|>"));
        known.filter_map(|&name| self.ids.get(name).copied()).collect()
    }

    /// What the file calls the rules for words; an empty name is none, as in llama.cpp.
    fn pre_name(&self) -> Result<Option<&'a str>> {
        Ok(self.metadata.text(PRE)?.filter(|name| !name.is_empty()))
    }

    /// The rules for words.
    fn pre(&self) -> Result<&'static Pre> {
        let name = self.pre_name()?.unwrap_or("default");
        Pre::of_name(name).ok_or_else(|| {
            let (name, names) = (shown(name), pre::names());
            self.metadata.error(PRE, format!("{name} is not supported; supported: {names}"))
        })
    }

    /// The `tokenizer.json` that the file holds, if it is one for these tokens.
    fn huggingface(&self) -> Result<Option<Inner>> {
        let Some(json) = self.metadata.text(HUGGINGFACE)? else { return Ok(None) };
        let Ok(inner) = Inner::load(self.metadata.path(), json.as_bytes()) else { return Ok(None) };
        let added = inner.hf.get_added_vocabulary().get_added_tokens_decoder();
        let same = self.iter().all(|(id, text, kind)| match kind {
            Type::Unused => true,
            // Converters spell these as the text that they stand for.
            Type::Control | Type::UserDefined if added.contains_key(&id) => true,
            _ => inner.hf.id_to_token(id).is_some_and(|token| token == text),
        });
        Ok((same && (inner.max_id as usize) < self.texts.len()).then_some(inner))
    }

    fn build(self, pre: Option<&Pre>, unk: Option<u32>) -> Result<Inner> {
        let (metadata, model) = (self.metadata, self.model);
        let refuse = |key: &str, error: tokenizers::Error| {
            metadata.error(key, error.to_string().chars().take(MAX_REASON).collect::<String>())
        };
        let merges = match model {
            Kind::Bytes | Kind::Text => self.listed_merges()?,
            Kind::SentencePiece => self.merges_by_score()?,
        };
        let added: Vec<AddedToken> = self
            .iter()
            .filter_map(|(_, text, kind)| match kind {
                Type::Control | Type::Unknown => Some((text, true)),
                Type::UserDefined => Some((text, false)),
                Type::Normal | Type::Unused | Type::Byte => None,
            })
            .map(|(text, special)| AddedToken::from(text, special).normalized(false))
            .collect();
        file::check_added(None, &added).map_err(|reason| metadata.error(TYPES, reason))?;
        let used = self.iter().filter(|&(_, _, kind)| kind != Type::Unused);
        let max_id = used.map(|(id, ..)| id).last().unwrap_or_default();
        let vocab_size = self.ids.len();

        let mut bpe = BPE::builder().ignore_merges(pre.is_some_and(|pre| pre.ignore_merges));
        let unk = unk.filter(|_| model != Kind::Bytes);
        if let Some(text) = unk.and_then(|id| self.texts.get(id as usize)) {
            bpe = bpe.unk_token(text.to_string()).fuse_unk(true);
        }
        bpe = bpe.byte_fallback(model != Kind::Bytes).vocab_and_merges(self.ids, merges);
        let bpe = bpe.build().map_err(|error| refuse(MERGES, error))?;
        let mut hf = tokenizers::Tokenizer::new(bpe);
        match pre {
            Some(pre) => {
                hf.with_pre_tokenizer(Some(pre.build().map_err(|error| refuse(PRE, error))?));
                hf.with_decoder(Some(ByteLevel::default()));
            }
            None => {
                let space = metadata.bool(ADD_SPACE)?.unwrap_or(model == Kind::SentencePiece);
                let steps = SpacedText { leading: space, lines: model == Kind::Text };
                steps.set(&mut hf).map_err(|error| refuse(MODEL, error))?;
            }
        }
        hf.add_tokens(&added);
        Inner::new(metadata.path(), hf, (vocab_size, max_id), unk, Growth::GGUF)
    }

    /// `tokenizer.ggml.merges`, each two tokens with a space between.
    fn listed_merges(&self) -> Result<Merges> {
        let merges = self.metadata.required(MERGES, self.metadata.strings(MERGES)?)?;
        let pair = |(at, merge): (usize, &str)| {
            // The first token may be a space, or start with one.
            let space = merge.char_indices().skip(1).find(|&(_, c)| c == ' ');
            match space.and_then(|(at, _)| Some((merge.get(..at)?, merge.get(at + 1..)?))) {
                Some((left, right)) => Ok((left.to_owned(), right.to_owned())),
                None => {
                    let expected = "expected two tokens with a space between";
                    let reason = format!("merge {at}: {expected}, found {}", shown(merge));
                    Err(self.metadata.error(MERGES, reason))
                }
            }
        };
        merges.into_iter().enumerate().map(pair).collect()
    }

    /// `SentencePiece` joins the two neighbours that make the token of the highest score. That is BPE
    /// with a merge for each way to cut a token in two, those of a higher score first. Of one score are the
    /// runs of spaces in Llama's file; longer parts first is the order of transformers' converter.
    fn merges_by_score(&self) -> Result<Merges> {
        let scores = self.metadata.required(SCORES, self.metadata.floats(SCORES)?)?;
        same_length(self.metadata, SCORES, self.texts.len(), scores.len())?;
        let is_normal = |text: &str| {
            let id = self.ids.get(text).and_then(|&id| self.types.get(id as usize));
            id == Some(&Type::Normal)
        };
        let mut ways = Vec::new();
        for ((_, text, kind), &score) in self.iter().zip(&scores) {
            if kind != Type::Normal || text.len() > MAX_MERGED {
                continue;
            }
            for (at, _) in text.char_indices().skip(1) {
                let (left, right) = text.split_at(at);
                if is_normal(left) && is_normal(right) {
                    ways.push((score, left, right));
                }
            }
            if ways.len() > MAX_WAYS {
                let reason =
                    format!("tokens can be cut into two others in more than {MAX_WAYS} ways");
                return Err(self.metadata.error(TOKENS, reason));
            }
        }
        let lens = |left: &str, right: &str| (left.chars().count(), right.chars().count());
        ways.sort_by(|&(a, l, r), &(b, left, right)| {
            b.total_cmp(&a).then_with(|| lens(left, right).cmp(&lens(l, r)))
        });
        Ok(ways.into_iter().map(|(_, left, right)| (left.to_owned(), right.to_owned())).collect())
    }
}

/// The name that converters give a row of the weights that no token has.
fn padding(id: u32) -> String {
    format!("{PAD}{id}]")
}

/// The start of a text from the file, for messages.
fn shown(text: &str) -> String {
    let start: String = text.chars().take(MAX_SHOWN).collect();
    format!("`{}`", start.escape_debug())
}

fn same_length(metadata: &Metadata, key: &str, expected: usize, found: usize) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(metadata
        .error(key, format!("expected {expected} elements, one for each token, found {found}")))
}

/// Text whose spaces are written as `▁`.
struct SpacedText {
    /// The text starts with one more.
    leading: bool,
    /// Merges do not cross the ends of lines.
    lines: bool,
}

impl SpacedText {
    fn set(&self, hf: &mut tokenizers::Tokenizer) -> tokenizers::Result<()> {
        let mut normalizers: Vec<NormalizerWrapper> = Vec::new();
        let mut decoders: Vec<DecoderWrapper> =
            vec![Replace::new("▁", " ")?.into(), ByteFallback::new().into(), Fuse::new().into()];
        if self.leading {
            normalizers.push(Prepend::new("▁".to_owned()).into());
            decoders.push(Strip::new(' ', 1, 0).into());
        }
        normalizers.push(Replace::new(" ", "▁")?.into());
        hf.with_normalizer(Some(tokenizers::normalizers::Sequence::new(normalizers)));
        hf.with_decoder(Some(tokenizers::decoders::sequence::Sequence::new(decoders)));
        if self.lines {
            let lines = SplitPattern::Regex(r"[^\n]+|[\n]+".to_owned());
            hf.with_pre_tokenizer(Some(Split::new(
                lines,
                SplitDelimiterBehavior::Isolated,
                false,
            )?));
        }
        Ok(())
    }
}
