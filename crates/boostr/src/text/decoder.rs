//! From ids to the text that may be shown.

use std::collections::VecDeque;

use crate::error::Result;
use crate::sample::{Choice, StopStrings};
use crate::tokenizer::TextStream;

/// Makes text of the tokens of one continuation, up to a stop string.
///
/// ```text
/// ids ─ TextStream ─ whole characters ─ StopStrings ─ text before any stop string
/// ```
///
/// Text that may still become a stop string is held back, and so are the tokens that begin in it.
pub struct TextDecoder {
    stream: TextStream,
    stops: StopStrings,
    is_stopped: bool,
    /// Bytes of text that the tokens have made, and of those that were released.
    made: usize,
    released: usize,
    /// Tokens whose text is not released yet, each with where it begins; `None` when nobody asked for tokens.
    waiting: Option<VecDeque<(usize, Choice)>>,
}

/// What a token, or the end, adds to a text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Whole characters that belong to no stop string.
    pub text: String,
    /// The tokens that begin in it, if they were asked for.
    pub tokens: Vec<Choice>,
}

impl Delta {
    /// Whether nothing is added.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.tokens.is_empty()
    }
}

impl TextDecoder {
    /// A decoder at the beginning of a continuation, which ends before any of `stops`. It hands the tokens on if
    /// `with_tokens`.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`](crate::Error::Argument) when a stop string is empty.
    ///
    /// ```
    /// use boostr::sample::Choice;
    /// use boostr::text::TextDecoder;
    /// use boostr::tokenizer::Tokenizer;
    ///
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny/tokenizer.json");
    /// let tokenizer = Tokenizer::from_file(path)?;
    /// let mut decoder = TextDecoder::new(tokenizer.stream(true), &["ho"], false)?;
    /// let mut text = String::new();
    /// for id in tokenizer.encode("tally-ho!", false)? {
    ///     let choice = Choice { id, logprob: 0.0, top: Vec::new() };
    ///     text += &decoder.push(choice)?.text;
    /// }
    /// text += &decoder.finish()?.text;
    /// assert_eq!((text.as_str(), decoder.is_stopped()), ("tally-", true));
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn new<S: AsRef<str>>(stream: TextStream, stops: &[S], with_tokens: bool) -> Result<Self> {
        let stops = StopStrings::new(stops)?;
        let waiting = with_tokens.then(VecDeque::new);
        Ok(Self { stream, stops, is_stopped: false, made: 0, released: 0, waiting })
    }

    /// Takes the next token.
    ///
    /// # Errors
    ///
    /// When the tokenizer does not know the id.
    pub fn push(&mut self, token: Choice) -> Result<Delta> {
        let (at, id) = (self.made, token.id);
        if let Some(waiting) = &mut self.waiting {
            waiting.push_back((at, token));
        }
        let text = self.next(id)?;
        Ok(self.release(text, false))
    }

    /// Takes the next token of those that a continuation begins with, which is not handed on; gives the text.
    ///
    /// # Errors
    ///
    /// As [`push`](Self::push).
    pub fn begin(&mut self, id: u32) -> Result<String> {
        let text = self.next(id)?;
        Ok(self.release(text, false).text)
    }

    /// The text before any stop string that a token makes known.
    fn next(&mut self, id: u32) -> Result<String> {
        let text = self.stream.push(id)?.unwrap_or_default();
        self.made += text.len();
        let released = self.stops.push(&text);
        self.is_stopped = released.stopped;
        Ok(released.text)
    }

    /// The rest, once no more tokens follow.
    ///
    /// # Errors
    ///
    /// As [`push`](Self::push).
    pub fn finish(&mut self) -> Result<Delta> {
        if self.is_stopped {
            return Ok(Delta::default());
        }
        let rest = self.stream.finish()?;
        self.made += rest.len();
        let released = self.stops.push(&rest);
        self.is_stopped = released.stopped;
        let text = released.text + &self.stops.finish();
        Ok(self.release(text, !self.is_stopped))
    }

    /// Whether a stop string was found. From then on nothing is released.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Text that comes before any stop string, with the tokens that begin in it; at the end with `all` of them.
    fn release(&mut self, text: String, all: bool) -> Delta {
        self.released += text.len();
        let released = self.released;
        let Some(waiting) = &mut self.waiting else { return Delta { text, tokens: Vec::new() } };
        let begun = waiting.iter().take_while(|(at, _)| all || *at < released).count();
        Delta { text, tokens: waiting.drain(..begun).map(|(_, token)| token).collect() }
    }
}
