//! Detokenization one token at a time.
//!
//! A token's text depends on its neighbours: a character may be cut over several tokens, and decoders trim
//! the first token. Two ways deal with it:
//!
//! - Byte-level BPE and `SentencePiece` with byte fallback, which is what language models ship, are decoded
//!   token by token to bytes; only an unfinished character waits. Exact, and linear in the text.
//! - Any other decoder is run over a window: the tokens of the piece released last, as context, and at most
//!   [`MAX_WAITING`] that wait. What the newer tokens add to the context's text is released once it does not
//!   end in U+FFFD. Linear too, as the window is bounded.

use std::collections::HashMap;
use std::sync::LazyLock;

use tokenizers::decoders::DecoderWrapper;

use super::Tokenizer;
use crate::error::Result;

/// A character has at most four bytes; a few tokens more are held for decoders that look ahead.
const MAX_WAITING: usize = 16;

/// Stands for bytes that are no UTF-8.
const REPLACEMENT: &str = "\u{fffd}";

/// How the text of single tokens makes the text of all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Pieces {
    /// Each character of a token stands for a byte.
    ByteLevel,
    /// Tokens are text but for `<0x00>` to `<0xFF>`, which are bytes.
    ByteFallback {
        /// Replacements within a token, in order: `▁` by a space.
        replace: Vec<(String, String)>,
        /// This many of this character are removed at the start of the text.
        strip: Option<(char, usize)>,
    },
    /// Whatever the file's decoder does.
    Other,
}

impl Pieces {
    pub(super) fn of(decoder: Option<&DecoderWrapper>) -> Self {
        match decoder {
            Some(DecoderWrapper::ByteLevel(_)) => Self::ByteLevel,
            Some(DecoderWrapper::Sequence(sequence)) => {
                Self::of_sequence(sequence.get_decoders()).unwrap_or(Self::Other)
            }
            _ => Self::Other,
        }
    }

    /// `Replace* ByteFallback Fuse Strip?`, the decoder of the Llama and Mistral files.
    fn of_sequence(decoders: &[DecoderWrapper]) -> Option<Self> {
        let mut decoders = decoders.iter().peekable();
        let mut replace = Vec::new();
        while let Some(DecoderWrapper::Replace(decoder)) = decoders.peek() {
            // The fields are private; their JSON is the file format.
            let json = serde_json::to_value(decoder).ok()?;
            let pattern = json.pointer("/pattern/String")?.as_str()?;
            if pattern.is_empty() {
                return None;
            }
            replace.push((pattern.to_owned(), json.get("content")?.as_str()?.to_owned()));
            decoders.next();
        }
        let DecoderWrapper::ByteFallback(_) = decoders.next()? else { return None };
        let DecoderWrapper::Fuse(_) = decoders.next()? else { return None };
        let strip = match decoders.next() {
            None => None,
            Some(DecoderWrapper::Strip(strip)) if strip.stop == 0 => {
                Some((strip.content, strip.start))
            }
            Some(_) => return None,
        };
        decoders.next().is_none().then_some(Self::ByteFallback { replace, strip })
    }

    /// The bytes of a token behind others; `None` where they are not its own.
    pub(super) fn bytes(&self, token: String) -> Option<Vec<u8>> {
        match self {
            Self::ByteLevel => {
                let mut bytes = Vec::new();
                push_byte_level(&mut bytes, &token);
                Some(bytes)
            }
            Self::ByteFallback { replace, .. } => {
                let token = replaced(replace, token);
                Some(byte_token(&token).map_or_else(|| token.into_bytes(), |byte| vec![byte]))
            }
            Self::Other => None,
        }
    }
}

/// Turns a stream of ids into text; see [`Tokenizer::stream`].
///
/// The pieces joined are what [`Tokenizer::decode`] gives for all ids; each consists of whole characters.
///
/// ```no_run
/// # let tokenizer = boostr::tokenizer::Tokenizer::from_file("tokenizer.json")?;
/// # let generated = [1, 2, 3];
/// let mut stream = tokenizer.stream(true);
/// for id in generated {
///     if let Some(text) = stream.push(id)? {
///         print!("{text}");
///     }
/// }
/// print!("{}", stream.finish()?);
/// # Ok::<(), boostr::error::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct TextStream {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// The start of a character whose other bytes have not come; at most three bytes.
    bytes: Vec<u8>,
    /// What may still be removed at the start of the text.
    strip: Option<(char, usize)>,
    /// For [`Pieces::Other`]: tokens of the context, then those that wait.
    window: Vec<String>,
    context: usize,
    /// The text of the context.
    context_text: String,
}

impl TextStream {
    pub(super) fn new(tokenizer: Tokenizer, skip_special: bool) -> Self {
        let strip = match &tokenizer.inner.pieces {
            Pieces::ByteFallback { strip, .. } => *strip,
            Pieces::ByteLevel | Pieces::Other => None,
        };
        Self {
            tokenizer,
            skip_special,
            bytes: Vec::new(),
            strip,
            window: Vec::new(),
            context: 0,
            context_text: String::new(),
        }
    }

    /// Takes the next id and gives the text that is now final, if any.
    ///
    /// # Errors
    /// [`Error::Tokenizer`](crate::error::Error::Tokenizer) if the file's decoder fails.
    pub fn push(&mut self, id: u32) -> Result<Option<String>> {
        let Some(token) = self.tokenizer.inner.spoken(id, self.skip_special) else {
            return Ok(None);
        };
        let text = match &self.tokenizer.inner.pieces {
            Pieces::ByteLevel => {
                push_byte_level(&mut self.bytes, &token);
                // One for each wrong sequence, as in String::from_utf8_lossy.
                take_characters(&mut self.bytes, |_| 1)
            }
            Pieces::ByteFallback { replace, .. } => {
                let token = replaced(replace, token);
                let text = if let Some(byte) = byte_token(&token) {
                    self.bytes.push(byte);
                    // One for each wrong byte, as in the ByteFallback decoder.
                    take_characters(&mut self.bytes, |len| len)
                } else {
                    let unfinished = std::mem::take(&mut self.bytes).len();
                    REPLACEMENT.repeat(unfinished) + &token
                };
                self.strip_start(text)
            }
            Pieces::Other => {
                self.window.push(token);
                self.advance_window(false)?
            }
        };
        Ok((!text.is_empty()).then_some(text))
    }

    /// The rest, now that no id follows: bytes of an unfinished character become U+FFFD. The stream is
    /// then as new.
    ///
    /// # Errors
    /// [`Error::Tokenizer`](crate::error::Error::Tokenizer) if the file's decoder fails.
    pub fn finish(&mut self) -> Result<String> {
        let fresh = Self::new(self.tokenizer.clone(), self.skip_special);
        let mut rest = std::mem::replace(self, fresh);
        match &rest.tokenizer.inner.pieces {
            Pieces::ByteLevel => Ok(String::from_utf8_lossy(&rest.bytes).into_owned()),
            Pieces::ByteFallback { .. } => {
                Ok(rest.strip_start(REPLACEMENT.repeat(rest.bytes.len())))
            }
            Pieces::Other => rest.advance_window(true),
        }
    }

    fn strip_start(&mut self, mut text: String) -> String {
        while let Some((character, count)) = self.strip
            && !text.is_empty()
        {
            if count == 0 || !text.starts_with(character) {
                self.strip = None;
            } else {
                text.remove(0);
                self.strip = Some((character, count - 1));
            }
        }
        text
    }

    fn advance_window(&mut self, last: bool) -> Result<String> {
        let waiting = self.window.len() - self.context;
        if waiting == 0 {
            return Ok(String::new());
        }
        let inner = &self.tokenizer.inner;
        let text = inner.decode_tokens(self.window.clone())?;
        let grown = text.strip_prefix(&self.context_text);
        let is_final = grown.is_some_and(|new| !new.is_empty() && !new.ends_with(REPLACEMENT));
        if !is_final && !last && waiting < MAX_WAITING {
            return Ok(String::new());
        }
        let new = match grown {
            Some(new) => new,
            None => after_common_start(&text, &self.context_text),
        };
        let new = new.to_owned();
        self.window.drain(..self.context);
        self.context = self.window.len();
        self.context_text = inner.decode_tokens(self.window.clone())?;
        Ok(new)
    }
}

/// A token with all replacements made, one after the other.
fn replaced(replace: &[(String, String)], token: String) -> String {
    replace.iter().fold(
        token,
        |token, (from, to)| {
            if token.contains(from) { token.replace(from, to) } else { token }
        },
    )
}

/// What of `text` comes after the characters that it starts with in common with `other`.
fn after_common_start<'a>(text: &'a str, other: &str) -> &'a str {
    let same = text.chars().zip(other.chars()).take_while(|(a, b)| a == b);
    let len = same.map(|(a, _)| a.len_utf8()).sum();
    text.get(len..).unwrap_or_default()
}

/// `<0x0A>` as the byte that it names.
pub(super) fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    // from_str_radix would take a sign too: `<0x+1>` is no byte.
    let is_hex = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    if is_hex { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// Appends the bytes that a byte-level token stands for; one with other characters is taken as it is.
fn push_byte_level(bytes: &mut Vec<u8>, token: &str) {
    let start = bytes.len();
    for character in token.chars() {
        let Some(&byte) = BYTE_OF.get(&character) else {
            bytes.truncate(start);
            bytes.extend_from_slice(token.as_bytes());
            return;
        };
        bytes.push(byte);
    }
}

/// Byte-level BPE writes printable Latin-1 bytes as their character and numbers the others from U+0100.
static BYTE_OF: LazyLock<HashMap<char, u8>> = LazyLock::new(|| {
    let mut others = '\u{100}'..;
    (0..=255_u8)
        .filter_map(|byte| match byte {
            b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => Some((char::from(byte), byte)),
            _ => Some((others.next()?, byte)),
        })
        .collect()
});

/// Removes all of `bytes` but an unfinished character at the end. A wrong sequence of `len` bytes becomes
/// `marks(len)` times U+FFFD.
fn take_characters(bytes: &mut Vec<u8>, marks: impl Fn(usize) -> usize) -> String {
    let mut text = String::new();
    loop {
        match std::str::from_utf8(bytes) {
            Ok(valid) => {
                text.push_str(valid);
                bytes.clear();
                return text;
            }
            Err(error) => {
                let valid: Vec<u8> = bytes.drain(..error.valid_up_to()).collect();
                text.push_str(&String::from_utf8_lossy(&valid));
                let Some(len) = error.error_len() else { return text };
                bytes.drain(..len);
                text.push_str(&REPLACEMENT.repeat(marks(len)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        assert_eq!(BYTE_OF.len(), 256);
        let mut bytes = Vec::new();
        push_byte_level(&mut bytes, "aĠĊ\u{143}é");
        assert_eq!(bytes, [b'a', b' ', b'\n', 0xad, 0xe9]);
    }

    #[test]
    fn a_token_with_other_characters_is_taken_as_it_is() {
        let mut bytes = vec![1];
        push_byte_level(&mut bytes, "Ġ🦙");
        assert_eq!(bytes, [&[1], "Ġ🦙".as_bytes()].concat());
    }

    #[test]
    fn only_two_hexadecimal_digits_are_a_byte() {
        assert_eq!(byte_token("<0x0A>"), Some(10));
        for token in ["<0x-1>", "<0x+1>", "<0x1>", "<0x001>", "<0xé>", "0x01", "<0xGG>"] {
            assert_eq!(byte_token(token), None, "{token}");
        }
    }
}
