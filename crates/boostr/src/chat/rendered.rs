//! The text of a conversation, which remembers whose its control tokens are.

use super::marks;
use crate::error::Result;
use crate::tokenizer::{Part, Tokenizer};

/// What a template made of a conversation, and which of its text strangers wrote.
#[derive(Debug, Clone)]
pub struct Rendered {
    /// With marks around the control tokens of strangers.
    marked: String,
    text: String,
    /// What opens the thought in which it ends, where an answer goes on in one that has begun.
    within: Option<&'static str>,
}

impl Rendered {
    pub(super) fn new(marked: String) -> Self {
        let parts = marks::parts(&marked);
        let text = parts.iter().map(|(Part::Text(text) | Part::Control(text))| *text).collect();
        Self { marked, text, within: None }
    }

    /// It as one that ends in a thought, which `open` opened.
    pub(super) fn in_thought(self, open: &'static str) -> Self {
        Self { within: Some(open), ..self }
    }

    /// What opens the thought in which the text ends, where an answer goes on in one that has begun: see
    /// [`Thoughts::within`](super::Thoughts::within).
    #[must_use]
    pub fn within(&self) -> Option<&'static str> {
        self.within
    }

    /// The text.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The ids of the text from byte `start` on, as [`ChatTemplate::encode`](super::ChatTemplate::encode) has them for
    /// all of it; none when there is no character at `start`.
    ///
    /// # Errors
    ///
    /// As [`Tokenizer::encode_parts`].
    pub fn encode_from(&self, tokenizer: &Tokenizer, start: usize) -> Result<Vec<u32>> {
        self.encode(tokenizer, start, usize::MAX)
    }

    /// The ids of the text from byte `start` to byte `end` alone, or to its own.
    ///
    /// # Errors
    ///
    /// As [`encode_from`](Self::encode_from).
    pub fn encode(&self, tokenizer: &Tokenizer, start: usize, end: usize) -> Result<Vec<u32>> {
        tokenizer.encode_parts(&self.parts(start, end), false)
    }

    /// The parts that lie between two bytes, the first and the last of them cut there.
    fn parts(&self, start: usize, end: usize) -> Vec<Part<'_>> {
        let mut at = 0;
        let mut parts = Vec::new();
        for part in marks::parts(&self.marked) {
            if at >= end {
                break;
            }
            let (Part::Text(text) | Part::Control(text)) = part;
            let range = start.saturating_sub(at)..end.saturating_sub(at).min(text.len());
            at += text.len();
            // An empty part between two others keeps these apart.
            if let Some(text) = text.get(range).filter(|_| at > start) {
                parts.push(match part {
                    Part::Text(_) => Part::Text(text),
                    Part::Control(_) => Part::Control(text),
                });
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_keeps_whose_the_parts_are() {
        use Part::{Control, Text};

        let rendered = Rendered::new("<a>x\u{fdd0}<b>\u{fdd1}y<c>é".into());
        assert_eq!(rendered.text(), "<a>x<b>y<c>é");
        let all = usize::MAX;
        assert_eq!(rendered.parts(0, all), [Control("<a>x"), Text("<b>"), Control("y<c>é")]);
        assert_eq!(rendered.parts(3, 5), [Control("x"), Text("<")]);
        assert_eq!(rendered.parts(5, all), [Text("b>"), Control("y<c>é")]);
        assert_eq!(rendered.parts(7, 8), [Control("y")]);
        assert_eq!(rendered.parts(99, all), []);
    }
}
