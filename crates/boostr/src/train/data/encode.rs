//! A document as ids, and which of them count.

use std::time::SystemTime;

use serde_json::Value;

use super::documents::{Content, pieces, weight};
use crate::chat::{self, ChatTemplate, Counted, normalized};
use crate::checkpoint::Fnv;
use crate::error::{Error, Result};
use crate::tokenizer::{Part, Tokenizer};

/// Another text whenever documents are read in another way.
const FORMS: &str = "3";

/// Makes ids of documents.
///
/// | document | ids | count |
/// |---|---|---|
/// | text | the start, the text's | the text's |
/// | `prompt` and `completion` | the start, those of both as one text | from the first that is not as in the prompt alone |
/// | `messages` | those of the chat template's text | the assistant's, see [`ChatTemplate::encode_answers`] |
///
/// A token counts when it is to be predicted; the others are only read. Control tokens that stand in a document are
/// text. The start is what the tokenizer puts before a text: one token, or nothing. [`TokenFile`](super::TokenFile)
/// adds the end-of-text token, which counts when the last token does; documents that end with it get no second one.
///
/// A text longer than [`PIECE`](super::PIECE) is tokenized in pieces. They are cut before spaces
/// between letters if there are any. Elsewhere the tokens at a cut may differ from those of the
/// whole.
#[derive(Debug)]
pub struct Encoder {
    tokenizer: Tokenizer,
    start: Vec<u32>,
    end: u32,
    chat: Option<Chat>,
}

#[derive(Debug)]
struct Chat {
    source: chat::Source,
    template: ChatTemplate,
    options: chat::Options,
}

/// The ids of a document, or of a piece of one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// The ids, without the end of the text.
    pub ids: Vec<u32>,
    /// Whether they are to be predicted, for each of `ids`.
    pub counts: Vec<bool>,
    /// Bytes of text that they were made of.
    pub bytes: usize,
}

impl Encoder {
    /// Documents by this tokenizer, each ended by the token `end`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when `end` is no token; [`Error::Tokenizer`] when the tokenizer fails.
    pub fn new(tokenizer: &Tokenizer, end: u32) -> Result<Self> {
        if tokenizer.token(end).is_none() {
            let reason =
                format!("expected the id of the end-of-text token, found {end}, which is no token");
            return Err(Error::Argument { name: "end", reason });
        }
        // What is put before a text, but not what is put after it.
        let (bare, mut start) = (tokenizer.encode("a", false)?, tokenizer.encode("a", true)?);
        let text = start.windows(bare.len().max(1)).position(|ids| ids == bare);
        start.truncate(text.unwrap_or(0));
        Ok(Self { tokenizer: tokenizer.clone(), start, end, chat: None })
    }

    /// Other ids before each text; conversations start as their template says.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when one is no token.
    pub fn with_start(mut self, start: Vec<u32>) -> Result<Self> {
        if let Some(id) = start.iter().find(|&&id| self.tokenizer.token(id).is_none()) {
            let reason = format!("expected ids of tokens, found {id}, which is none");
            return Err(Error::Argument { name: "start", reason });
        }
        self.start = start;
        Ok(self)
    }

    /// Renders conversations by this chat template. Where `options` give no moment to tell, it is 1970: ids depend
    /// on no clock.
    ///
    /// # Errors
    ///
    /// When the template is wrong, as [`chat::Source::compile`].
    pub fn with_chat(mut self, source: &chat::Source, options: chat::Options) -> Result<Self> {
        let (source, template) = (source.clone(), source.compile()?);
        let now = options.now.or(Some(SystemTime::UNIX_EPOCH));
        self.chat = Some(Chat { source, template, options: chat::Options { now, ..options } });
        Ok(self)
    }

    /// The token that ends a document.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// Ids are below it.
    pub fn vocab_size(&self) -> u32 {
        self.tokenizer.max_id() + 1
    }

    /// The ids of a document.
    ///
    /// # Errors
    ///
    /// As [`Tokenizer::encode`] and [`ChatTemplate::encode_answers`]; [`Error::Argument`] for a conversation without a
    /// chat template, or one in which nothing counts.
    pub fn encode(&self, content: &Content) -> Result<Encoded> {
        match content {
            Content::Text { text, is_first, .. } => {
                let mut ids = if *is_first { self.start.clone() } else { Vec::new() };
                let mut counts = vec![false; ids.len()];
                for piece in pieces(text) {
                    ids.extend(self.tokenizer.encode(piece, false)?);
                }
                counts.resize(ids.len(), true);
                Ok(Encoded { ids, counts, bytes: text.len() })
            }
            Content::Completion { prompt, completion } => {
                let (ids, given) = self.encode_pair(prompt, completion)?;
                if given == ids.len() {
                    let reason = "it has no token of its own, so nothing to learn".into();
                    return Err(Error::Argument { name: "completion", reason });
                }
                let counts = (0..ids.len()).map(|i| i >= given).collect();
                Ok(Encoded { ids, counts, bytes: prompt.len() + completion.len() })
            }
            Content::Messages { messages, given, tools, kwargs } => {
                let Some(Chat { template, options, .. }) = &self.chat else {
                    let reason =
                        "conversations need a chat template, and the model has none".into();
                    return Err(Error::Argument { name: "messages", reason });
                };
                let mut options = options.clone();
                options.tools = tools.clone().or(options.tools);
                options.kwargs.extend(kwargs.clone());
                let refuse = |reason| Error::Argument { name: "messages", reason };
                let learnt = messages.iter().filter(|message| message["role"] == "assistant");
                let learnt = learnt.map(weight).collect::<Result<Vec<_>, _>>().map_err(refuse)?;
                let mut messages = messages.clone();
                for message in messages.iter_mut().filter_map(Value::as_object_mut) {
                    message.shift_remove("weight");
                }
                let messages = normalized(&messages).map_err(|error| refuse(error.to_string()))?;
                let counted = Counted { given: *given, learnt: &learnt };
                let answers =
                    template.encode_answers_of(&self.tokenizer, &messages, counted, &options)?;
                if !answers.is_answer.contains(&true) {
                    let reason = "no message of the assistant that is to be learnt".into();
                    return Err(Error::Argument { name: "messages", reason });
                }
                Ok(Encoded { ids: answers.ids, counts: answers.is_answer, bytes: answers.bytes })
            }
        }
    }

    /// The start and the ids of two texts as one, and how many of these are as those of the first text alone.
    pub(super) fn encode_pair(&self, first: &str, second: &str) -> Result<(Vec<u32>, usize)> {
        let encode = |parts: &[Part<'_>]| -> Result<Vec<u32>> {
            let ids = self.tokenizer.encode_parts(parts, false)?;
            Ok(self.start.iter().copied().chain(ids).collect())
        };
        let alone = encode(&[Part::Text(first)])?;
        let both = encode(&[Part::Text(&[first, second].concat())])?;
        let same = alone.iter().zip(&both).take_while(|(a, b)| a == b).count();
        Ok((both, same))
    }

    /// Differs when ids may differ.
    pub(super) fn fingerprint(&self) -> Result<u64> {
        let mut hash = Fnv::default();
        hash.text(FORMS);
        hash.text(&self.tokenizer.to_json()?);
        hash.text(&format!("{:?} {}", self.start, self.end));
        if let Some(Chat { source, options, .. }) = &self.chat {
            hash.text(&format!("{:?} {:?} {options:?}", source.templates, source.special));
        }
        Ok(hash.0)
    }
}
