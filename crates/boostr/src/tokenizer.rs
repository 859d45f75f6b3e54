//! Text to token ids and back, for any `tokenizer.json`, and for the tokenizers in GGUF files.
//!
//! The work is done by the tokenizers crate; this module fences it. A file and a text come from
//! strangers, so whatever they make that crate do arrives as an [`Error`]: it is called inside
//! `catch_unwind`, and sizes and ids are checked before and after. The message of a caught panic still
//! goes to the process's panic hook, which is not ours to silence.
//!
//! Three things differ from the original on purpose:
//!
//! - **Control tokens in user text are text.** `<|im_end|>` typed by a user is encoded by its characters,
//!   so it cannot end the user's turn. Control tokens are those that the file calls special, and those that
//!   its caller knows as an end or a role ([`Tokenizer::with_control`]). Other added tokens (runs of spaces in
//!   gpt-neox) are still used. [`Part`] says which pieces of a prompt are whose.
//! - **No truncation, padding or dropout**, whatever the file asks for: a prompt is never cut silently, and
//!   the same text always gives the same ids.
//! - **One bad byte costs one character.** The `ByteFallback` decoder turns a whole run of byte tokens into
//!   U+FFFD if any is wrong; here only the wrong bytes become U+FFFD, so that text which was already
//!   streamed stays true.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use tokenizers::models::ModelWrapper;
use tokenizers::tokenizer::{
    AddedToken, AddedVocabulary, Model, NormalizedString, Normalizer, OffsetReferential,
    OffsetType, PreTokenizedString, PreTokenizer, Token,
};

use crate::error::{Error, Result};
use crate::files;

mod beside;
mod file;
mod gguf;
mod growth;
mod stream;

pub use beside::Beside;
use file::Written;
pub use gguf::GgufTokenizer;
use growth::Growth;
use stream::Pieces;
pub use stream::TextStream;

/// Largest `tokenizer.json` that is read, in bytes. The largest published ones have about 35 MB.
pub const MAX_FILE: usize = 128 << 20;

/// Longest text of one call of [`Tokenizer::encode`], in bytes.
///
/// Encoding takes memory of about 60 to 150 times the text, and about a second per megabyte. A file whose
/// regular expressions backtrack can make that quadratic, so a server encodes on a thread that it can spare.
pub const MAX_TEXT: usize = 16 << 20;

/// Longest that the tokenizer's normalizers may make a text, in bytes.
pub const MAX_NORMALIZED: usize = 3 * MAX_TEXT;

/// Longest text that [`Tokenizer::decode`] makes of ids, in bytes.
pub const MAX_DECODED: usize = 256 << 20;

/// Longest piece of text, in bytes, that the tokenizer's own rules do not split (letters without a space
/// for most; all of the text for a `SentencePiece` model without a pre-tokenizer).
pub const MAX_WORD: usize = 4 << 20;

/// Longest sum of a file's regular expressions, in bytes. Compiled, a hostile one takes up to half a megabyte
/// per byte; published files have a few hundred bytes.
pub const MAX_REGEX: usize = 4096;

/// Longest added token, in bytes, as it is looked for in a text: what is built to find it takes the square of
/// its length. Published ones have up to 256.
pub const MAX_ADDED_TOKEN: usize = 1024;

/// Longest sum of the added tokens, in bytes: what is built to find them takes a hundred times as much.
pub const MAX_ADDED: usize = 1 << 20;

/// Largest token id that is accepted. The largest published vocabularies have about 2^18 tokens.
pub const MAX_TOKEN_ID: u32 = (1 << 24) - 1;

/// Stands for the text's ids while the post-processor puts special tokens around it; no token has it.
const TEXT_SLOT: u32 = u32::MAX;

/// A piece of a prompt, by who wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part<'a> {
    /// Written by a user, a tool or a file: everything in it is text.
    Text(&'a str),
    /// Written by the program or the model's author, as a chat template's own words: strings like
    /// `<|im_end|>` are the control tokens they spell.
    Control(&'a str),
}

impl<'a> Part<'a> {
    fn content(self) -> &'a str {
        match self {
            Self::Text(content) | Self::Control(content) => content,
        }
    }
}

/// A loaded `tokenizer.json`. Cloning is cheap: clones share it.
///
/// ```no_run
/// use boostr::tokenizer::{Part, Tokenizer};
///
/// let tokenizer = Tokenizer::from_file("model/tokenizer.json")?;
/// let ids = tokenizer.encode("It is a truth", true)?;
/// assert_eq!(tokenizer.decode(&ids, true)?, "It is a truth");
///
/// let prompt = [Part::Control("<|user|>\n"), Part::Text("hello"), Part::Control("<|end|>\n")];
/// let ids = tokenizer.encode_parts(&prompt, false)?;
/// # Ok::<(), boostr::error::Error>(())
/// ```
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

#[derive(Clone)]
struct Inner {
    path: PathBuf,
    hf: tokenizers::Tokenizer,
    /// The added vocabulary that leaves control tokens in the text.
    text_vocabulary: AddedVocabulary,
    /// The model without its control tokens; made when a user spells one that the model knows as a word.
    text_model: OnceLock<Option<Box<ModelWrapper>>>,
    vocab_size: usize,
    max_id: u32,
    /// What `add_special` puts around the text, with [`TEXT_SLOT`] for the text.
    frame: Vec<u32>,
    /// The same without `add_special`: just the slot, except for odd templates.
    bare_frame: Vec<u32>,
    /// Sorted ids of the special tokens.
    special_ids: Vec<u32>,
    /// Sorted ids of the tokens that no user's text becomes: the special ones, and more.
    control_ids: Vec<u32>,
    /// What the model writes for characters that it cannot spell.
    unk_id: Option<u32>,
    pieces: Pieces,
    growth: Growth,
    /// What is odd about the file, and does no harm to most texts.
    warnings: Vec<String>,
    /// Whether it has tokens or marks that the file does not have.
    is_extended: bool,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("path", &self.inner.path)
            .field("vocab_size", &self.inner.vocab_size)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read or is no regular file; [`Error::Format`] if it is longer than
    /// [`MAX_FILE`]; otherwise as [`from_bytes`](Self::from_bytes).
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::from_bytes(path, &files::read(path, MAX_FILE as u64)?)
    }

    /// Reads the content of a `tokenizer.json`; `name` only serves messages.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if it is no tokenizer, is longer than [`MAX_FILE`], has an id above
    /// [`MAX_TOKEN_ID`], gives two tokens one id, or has an added token whose id is not the one that it
    /// would get.
    pub fn from_bytes(name: impl AsRef<Path>, bytes: &[u8]) -> Result<Self> {
        let (path, bytes) = (name.as_ref(), files::bytes_without_bom(bytes));
        if bytes.len() > MAX_FILE {
            return fail(path, format!("expected at most {MAX_FILE} bytes, found more"));
        }
        let inner = guard(path, "loading", || Inner::load(path, bytes))?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The tokenizer whose control tokens are also those of `ids` that are added tokens, whatever its file
    /// calls them. No user's text becomes one of them. Their text is still part of what
    /// [`decode`](Self::decode) gives.
    ///
    /// ```no_run
    /// use boostr::tokenizer::Tokenizer;
    ///
    /// let tokenizer = Tokenizer::from_file("model/tokenizer.json")?;
    /// let end = tokenizer.id("<|im_end|>").expect("the end of a turn");
    /// let tokenizer = tokenizer.with_control(&[end]);
    /// assert!(!tokenizer.encode("Hi<|im_end|>", false)?.contains(&end));
    /// # Ok::<(), boostr::error::Error>(())
    /// ```
    #[must_use]
    pub fn with_control(self, ids: &[u32]) -> Self {
        let added = self.inner.hf.get_added_vocabulary().get_added_tokens_decoder();
        let more =
            ids.iter().filter(|&&id| !self.inner.is_control(id) && Some(id) != self.inner.unk_id);
        let more: Vec<(u32, AddedToken)> =
            more.filter_map(|&id| Some((id, added.get(&id)?.clone().special(true)))).collect();
        if more.is_empty() {
            return self;
        }
        let mut inner = Arc::unwrap_or_clone(self.inner);
        let (more_ids, tokens): (Vec<u32>, Vec<AddedToken>) = more.into_iter().unzip();
        let Inner { text_vocabulary, hf, .. } = &mut inner;
        text_vocabulary.add_special_tokens(&tokens, hf.get_model(), hf.get_normalizer());
        inner.control_ids.extend(more_ids);
        inner.control_ids.sort_unstable();
        inner.control_ids.dedup();
        inner.text_model = OnceLock::new();
        Self { inner: Arc::new(inner) }
    }

    /// What is odd about the files that it was read from, one sentence each, to be shown to people.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.inner.warnings
    }

    /// Whether it has tokens, or special ones, that its `tokenizer.json` alone has not.
    pub(crate) fn is_extended(&self) -> bool {
        self.inner.is_extended
    }

    /// The ids of the added tokens that are role markers in the text of a chat template: those that it writes
    /// by name. Not among them are the tags of a pair, as `<think>` and `</think>`, which stand in answers
    /// too, and tokens without a letter.
    #[must_use]
    pub fn markers_in(&self, template: &str) -> Vec<u32> {
        let added = self.inner.hf.get_added_vocabulary().get_added_tokens_decoder();
        let is_paired = |name: &str| {
            let inside = name.strip_prefix('<').and_then(|rest| rest.strip_suffix('>'));
            let other = inside.map(|tag| match tag.strip_prefix('/') {
                Some(tag) => format!("<{tag}>"),
                None => format!("</{tag}>"),
            });
            other.is_some_and(|other| self.inner.hf.token_to_id(&other).is_some())
        };
        let is_marker = |name: &str| {
            name.contains(char::is_alphabetic) && template.contains(name) && !is_paired(name)
        };
        let found = added.iter().filter(|(_, token)| is_marker(&token.content));
        found.map(|(&id, _)| id).collect()
    }

    /// Ids of a user's text; control tokens in it are text. `add_special` puts around it what the file
    /// prescribes, usually one token for the start or nothing.
    ///
    /// # Errors
    /// [`Error::Argument`] if the text is longer than [`MAX_TEXT`], normalized than [`MAX_NORMALIZED`], or a word of it
    /// than [`MAX_WORD`];
    /// [`Error::Tokenizer`] if the tokenizer refuses it or could only spell it with a control token.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.encode_parts(&[Part::Text(text)], add_special)
    }

    /// Ids of a text that the program wrote: control tokens in it are parsed. With `add_special`, a text that starts
    /// with the control tokens that go before it does not get them twice.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_control(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.encode_parts(&[Part::Control(text)], add_special)
    }

    /// Ids of a text in parts. They are those of the joined text, unless a user's part holds, or
    /// completes, a control token: then each part is encoded on its own, without a space between them.
    ///
    /// # Errors
    /// As [`encode`](Self::encode); the limits hold for the joined text.
    pub fn encode_parts(&self, parts: &[Part<'_>], add_special: bool) -> Result<Vec<u32>> {
        let len = parts.iter().fold(0_usize, |sum, part| sum.saturating_add(part.content().len()));
        if len > MAX_TEXT {
            let reason = format!("expected at most {MAX_TEXT} bytes, found {len}");
            return Err(Error::Argument { name: "text", reason });
        }
        let inner = &*self.inner;
        guard(&inner.path, "encoding", || {
            inner.check_normalized(parts)?;
            inner.encode_parts(parts, add_special)
        })
    }

    /// Text of `ids`. Ids without a token, such as padding rows of the weights, give no text;
    /// `skip_special` leaves control tokens out too. Bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the file's decoder fails; [`Error::Argument`] if the text is longer than
    /// [`MAX_DECODED`].
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let check = |len: usize| {
            if len <= MAX_DECODED {
                return Ok(());
            }
            let reason = format!("expected ids of at most {MAX_DECODED} bytes of text, found more");
            Err(Error::Argument { name: "ids", reason })
        };
        match self.inner.pieces {
            Pieces::Other => {
                let (mut tokens, mut len) = (Vec::new(), 0);
                for token in ids.iter().filter_map(|&id| self.inner.spoken(id, skip_special)) {
                    len += token.len() * self.inner.growth.token as usize;
                    check(len)?;
                    tokens.push(token);
                }
                self.inner.decode_tokens(tokens)
            }
            Pieces::ByteLevel | Pieces::ByteFallback { .. } => {
                let mut stream = self.stream(skip_special);
                let mut text = String::new();
                for &id in ids {
                    text.push_str(&stream.push(id)?.unwrap_or_default());
                    check(text.len())?;
                }
                text.push_str(&stream.finish()?);
                Ok(text)
            }
        }
    }

    /// Decodes ids one by one as they are generated.
    #[must_use]
    pub fn stream(&self, skip_special: bool) -> TextStream {
        TextStream::new(self.clone(), skip_special)
    }

    /// The tokenizer as the text of a `tokenizer.json`.
    ///
    /// # Errors
    ///
    /// [`Error::Tokenizer`] when the tokenizers crate cannot write it.
    pub fn to_json(&self) -> Result<String> {
        self.inner.hf.to_string(true).or_else(|error| fail(&self.inner.path, error.to_string()))
    }

    /// Number of tokens, added ones included.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.inner.vocab_size
    }

    /// The largest id of a token; [`vocab_size`](Self::vocab_size) - 1 if the ids have no gaps.
    #[must_use]
    pub fn max_id(&self) -> u32 {
        self.inner.max_id
    }

    /// The token of an id, as the file spells it.
    #[must_use]
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.hf.id_to_token(id)
    }

    /// The id of a token, as the file spells it.
    #[must_use]
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.hf.token_to_id(token)
    }

    /// The bytes that a token adds to a text that has begun; `None` for an id without a token. A control token has those of
    /// its name.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if they depend on the tokens around it: with any decoder but that of byte-level BPE and that
    /// of SentencePiece with byte tokens.
    pub fn bytes(&self, id: u32) -> Result<Option<Vec<u8>>> {
        let Some(token) = self.inner.hf.id_to_token(id) else { return Ok(None) };
        self.inner.pieces.bytes(token).map(Some).ok_or_else(|| {
            let path = self.inner.path.display();
            let what = format!(
                "decoder of `{path}` for the bytes of single tokens; ByteLevel and ByteFallback are supported"
            );
            Error::Unsupported { what }
        })
    }

    /// Whether the file calls the token special: control, not text.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.is_special(id)
    }

    /// Whether no user's text becomes the token: special ones, and those of [`with_control`](Self::with_control).
    #[must_use]
    pub fn is_control(&self, id: u32) -> bool {
        self.inner.is_control(id)
    }

    /// Ids of all tokens that no user's text becomes, ascending.
    pub(crate) fn control_ids(&self) -> &[u32] {
        &self.inner.control_ids
    }
}

/// Puts `bos` in front of `ids` unless they start with it: some models need it although their
/// `tokenizer.json` does not say so, and a chat template may have written it already.
///
/// ```
/// let mut ids = vec![5, 6];
/// boostr::tokenizer::ensure_bos(&mut ids, 1);
/// boostr::tokenizer::ensure_bos(&mut ids, 1);
/// assert_eq!(ids, [1, 5, 6]);
/// ```
pub fn ensure_bos(ids: &mut Vec<u32>, bos: u32) {
    if ids.first() != Some(&bos) {
        ids.insert(0, bos);
    }
}

impl Inner {
    fn load(path: &Path, bytes: &[u8]) -> Result<Self> {
        let written = Written::read(path, bytes)?;
        let growth = written.check_memory(path)?;
        let hf = written.parse(path, bytes)?;
        written.check_ids(path, &hf)?;
        Written::check_tokens(path, &hf, growth)?;
        let size = file::check_vocabulary(path, &hf)?;
        let unk_id = written.unk_id(&hf);
        let mut inner = Self::new(path, hf, size, unk_id, growth)?;
        let odd = written.byte_tokens(&inner.hf);
        inner.warnings.extend(odd.map(|what| format!("`{}`: {what}", path.display())));
        Ok(inner)
    }

    /// Takes over a tokenizer with its number of tokens and largest id, which are checked.
    fn new(
        path: &Path,
        mut hf: tokenizers::Tokenizer,
        (vocab_size, max_id): (usize, u32),
        unk_id: Option<u32>,
        growth: Growth,
    ) -> Result<Self> {
        if let Err(error) = hf.with_truncation(None) {
            return fail(path, error.to_string());
        }
        hf.with_padding(None);
        if let ModelWrapper::BPE(bpe) = hf.get_model()
            && bpe.dropout.is_some()
        {
            let mut bpe = bpe.clone();
            bpe.dropout = None;
            hf.with_model(ModelWrapper::BPE(bpe));
        }
        let added = hf.get_added_vocabulary();
        let mut text_vocabulary = added.clone();
        text_vocabulary.set_encode_special_tokens(true);

        let frame = file::frame(path, &hf, true)?;
        let bare_frame = file::frame(path, &hf, false)?;
        let mut special_ids: Vec<u32> = added
            .get_vocab()
            .iter()
            .filter(|&(token, _)| added.is_special_token(token))
            .map(|(_, &id)| id)
            .collect();
        special_ids.sort_unstable();
        let pieces = Pieces::of(hf.get_decoder());
        let path = path.to_path_buf();
        Ok(Self {
            path,
            hf,
            text_vocabulary,
            text_model: OnceLock::new(),
            vocab_size,
            max_id,
            frame,
            bare_frame,
            control_ids: special_ids.clone(),
            special_ids,
            unk_id,
            pieces,
            growth,
            warnings: Vec::new(),
            is_extended: false,
        })
    }

    fn is_special(&self, id: u32) -> bool {
        self.special_ids.binary_search(&id).is_ok()
    }

    /// Refuses a text that the normalizers would make too long, piece by piece where that is possible at all.
    fn check_normalized(&self, parts: &[Part<'_>]) -> Result<()> {
        let most = MAX_NORMALIZED as u64;
        let len: u64 = parts.iter().map(|part| part.content().len() as u64).sum();
        let (Some(normalizer), true) =
            (self.hf.get_normalizer(), len.saturating_mul(self.growth.text) > most)
        else {
            return Ok(());
        };
        let piece = (most / self.growth.text).clamp(4, 1 << 16) as usize;
        let mut sum = 0;
        for part in parts {
            let mut rest = part.content();
            while !rest.is_empty() {
                let (piece, later) = rest.split_at(rest.floor_char_boundary(piece));
                let mut text = NormalizedString::from(piece);
                if let Err(error) = normalizer.normalize(&mut text) {
                    return fail(&self.path, format!("cannot normalize the text: {error}"));
                }
                sum += text.get().len();
                if sum > MAX_NORMALIZED {
                    let reason = format!(
                        "expected at most {MAX_NORMALIZED} bytes once this tokenizer has normalized it, found more"
                    );
                    return Err(Error::Argument { name: "text", reason });
                }
                rest = later;
            }
        }
        Ok(())
    }

    fn encode_parts(&self, parts: &[Part<'_>], add_special: bool) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        if !self.encode_joined(parts, &mut ids)? {
            ids.clear();
            let mut parts = parts.iter().copied().filter(|part| !part.content().is_empty());
            if let Some(first) = parts.next() {
                ids = self.encode_part(first)?;
            }
            for part in parts {
                ids.extend(self.encode_later_part(part)?);
            }
        }
        let mut frame = if add_special { &self.frame[..] } else { &self.bare_frame };
        let before = frame.iter().position(|&id| id == TEXT_SLOT).unwrap_or_default();
        if let (Some(Part::Control(_)), Some((first, rest))) =
            (parts.first(), frame.split_at_checked(before))
            && first.iter().all(|&id| self.is_control(id))
            && ids.starts_with(first)
        {
            frame = rest;
        }
        if let [TEXT_SLOT] = frame[..] {
            return Ok(ids);
        }
        let mut framed = Vec::with_capacity(ids.len() + frame.len());
        for &id in frame {
            match id {
                TEXT_SLOT => framed.extend_from_slice(&ids),
                id => framed.push(id),
            }
        }
        Ok(framed)
    }

    /// The ids of a part on its own.
    fn encode_part(&self, part: Part<'_>) -> Result<Vec<u32>> {
        let (vocabulary, users) = match part {
            Part::Text(content) => (&self.text_vocabulary, Some(0..content.len())),
            Part::Control(_) => (self.hf.get_added_vocabulary(), None),
        };
        let split = vocabulary.extract_and_normalize(self.hf.get_normalizer(), part.content());
        let mut ids = Vec::new();
        self.tokenize(split, users.as_slice(), &mut ids)?;
        Ok(ids)
    }

    /// The same for a part that others stand before: without the space that some tokenizers put before a text. As
    /// transformers does it, the part is encoded after a newline, whose ids are taken off again.
    fn encode_later_part(&self, part: Part<'_>) -> Result<Vec<u32>> {
        let text = format!("\n{}", part.content());
        let after = match part {
            Part::Text(_) => Part::Text(&text),
            Part::Control(_) => Part::Control(&text),
        };
        if let (Ok(newline), Ok(ids)) =
            (self.encode_part(Part::Text("\n")), self.encode_part(after))
            && let Some(own) = ids.strip_prefix(newline.as_slice())
        {
            return Ok(own.to_vec());
        }
        self.encode_part(part)
    }

    /// Encodes the parts as one text with control tokens, or returns `false` if one of these would
    /// touch a user's part.
    fn encode_joined(&self, parts: &[Part<'_>], ids: &mut Vec<u32>) -> Result<bool> {
        if let [Part::Text(_)] = parts {
            return Ok(false);
        }
        let mut joined = String::new();
        let mut users = Vec::new();
        for part in parts {
            let start = joined.len();
            joined.push_str(part.content());
            if let Part::Text(_) = part {
                users.push(start..joined.len());
            }
        }
        let split =
            self.hf.get_added_vocabulary().extract_and_normalize(self.hf.get_normalizer(), &joined);
        let touched = split
            .get_splits(OffsetReferential::Original, OffsetType::Byte)
            .into_iter()
            .any(|(_, (start, end), tokens)| {
                tokens.iter().flatten().any(|token| self.is_control(token.id))
                    && overlaps(&users, start..end)
            });
        if touched {
            return Ok(false);
        }
        self.tokenize(split, &users, ids)?;
        Ok(true)
    }

    /// Appends the ids of a text from which the added tokens are already split off.
    ///
    /// Goes piece by piece rather than through the crate's own `Encoding`, which keeps strings and
    /// offsets of every token of the text at once.
    fn tokenize(
        &self,
        mut text: PreTokenizedString,
        users: &[Range<usize>],
        ids: &mut Vec<u32>,
    ) -> Result<()> {
        let refuse = |error: Box<dyn std::error::Error + Send + Sync>| {
            fail(&self.path, format!("cannot encode the text: {error}"))
        };
        if let Some(pre_tokenizer) = self.hf.get_pre_tokenizer()
            && let Err(error) = pre_tokenizer.pre_tokenize(&mut text)
        {
            return refuse(error);
        }
        let splits = text.get_splits(OffsetReferential::Original, OffsetType::Byte);
        for (word, (start, end), added) in splits {
            if let Some(added) = added {
                ids.extend(added.iter().map(|token| token.id));
                continue;
            }
            if word.len() > MAX_WORD {
                let len = word.len();
                let reason =
                    format!("expected words of at most {MAX_WORD} bytes, found one of {len}");
                return Err(Error::Argument { name: "text", reason });
            }
            let mut tokens = match self.hf.get_model().tokenize(word) {
                Ok(tokens) => tokens,
                Err(error) => return refuse(error),
            };
            // A model that knows whole words may find a control token by itself.
            if let Some(at) = tokens.iter().position(|token| self.is_spelled_control(token, word))
                && overlaps(users, start..end)
            {
                tokens = self.spelled(word, tokens.swap_remove(at))?;
            }
            ids.extend(tokens.iter().map(|token| token.id));
        }
        Ok(())
    }

    /// The tokens of a user's word that holds the name of a control token, `found`, as text.
    fn spelled(&self, word: &str, found: Token) -> Result<Vec<Token>> {
        let model = self.text_model.get_or_init(|| {
            let ids = self.control_ids.iter().chain(&self.unk_id);
            let names = ids.filter_map(|&id| self.hf.id_to_token(id));
            file::without(self.hf.get_model(), &names.collect()).map(Box::new)
        });
        let tokens = model.as_ref().and_then(|model| model.tokenize(word).ok()).unwrap_or_default();
        if tokens.is_empty() || tokens.iter().any(|token| self.is_control(token.id)) {
            let Token { id, value, .. } = found;
            let reason = format!(
                "this tokenizer can only read `{value}` as control token {id}, which a user's text must not hold"
            );
            return fail(&self.path, reason);
        }
        Ok(tokens)
    }

    /// Whether the token of a word is a control token, or the unknown token because its name is spelled there.
    fn is_spelled_control(&self, token: &Token, word: &str) -> bool {
        if Some(token.id) != self.unk_id {
            return self.is_control(token.id);
        }
        self.is_special(token.id)
            && self.hf.id_to_token(token.id).is_some_and(|name| word.contains(&name))
    }

    /// Not to be made of a user's text, and not what the model writes for characters that it cannot spell.
    fn is_control(&self, id: u32) -> bool {
        Some(id) != self.unk_id && self.control_ids.binary_search(&id).is_ok()
    }

    /// The token of `id` if it takes part in decoding.
    fn spoken(&self, id: u32, skip_special: bool) -> Option<String> {
        let added = self.hf.get_added_vocabulary();
        self.hf.id_to_token(id).filter(|token| !skip_special || !added.is_special_token(token))
    }

    /// The file's decoder, for the kinds that [`Pieces`] does not know.
    fn decode_tokens(&self, tokens: Vec<String>) -> Result<String> {
        use tokenizers::tokenizer::Decoder;

        // Some decoders subtract 1 from the number of tokens.
        if tokens.is_empty() {
            return Ok(String::new());
        }
        guard(&self.path, "decoding", || match self.hf.get_decoder() {
            None => Ok(tokens.join(" ")),
            Some(decoder) => match decoder.decode(tokens) {
                Ok(text) => Ok(text),
                Err(error) => fail(&self.path, format!("cannot decode the tokens: {error}")),
            },
        })
    }
}

fn overlaps(users: &[Range<usize>], range: Range<usize>) -> bool {
    users.iter().any(|user| user.start < range.end && range.start < user.end)
}

fn fail<T>(path: &Path, reason: impl Into<String>) -> Result<T> {
    Err(Error::Tokenizer { path: path.to_path_buf(), reason: reason.into() })
}

/// Runs what calls the tokenizers crate; a panic in it becomes an error.
///
/// The caches that it shares are locks that it only tries, so a poisoned one costs time, not truth.
fn guard<T>(path: &Path, doing: &str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let message = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("no message");
        fail(path, format!("{doing} failed inside the tokenizers crate: {message}"))
    })
}
