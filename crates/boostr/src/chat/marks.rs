//! Control tokens in what strangers wrote: found before a template runs, and known again in its text.
//!
//! Each is put between two characters that no text has (Unicode's noncharacters U+FDD0 and U+FDD1). A template passes
//! them on like letters; what stands between them in its text is then encoded as text. transformers 5.24 does the
//! same under the name `sanitize_control_tokens`. Two more (U+FDD2 and U+FDD3) mark what the assistant says.

use std::cmp::Reverse;
use std::ops::Range;

use serde_json::Value;

use crate::error::{Error, Result};
use crate::tokenizer::{Part, Tokenizer};

const START: char = '\u{fdd0}';
const END: char = '\u{fdd1}';

/// Around what a template says that the assistant says, where it is asked for.
const ANSWER: char = '\u{fdd2}';
const END_ANSWER: char = '\u{fdd3}';

/// The control tokens of a tokenizer.
pub(super) struct Marks {
    tokens: Vec<String>,
}

impl Marks {
    pub(super) fn of(tokenizer: &Tokenizer) -> Self {
        let tokens = tokenizer.control_ids().iter().filter_map(|&id| tokenizer.token(id));
        Self { tokens: tokens.filter(|token| !token.is_empty()).collect() }
    }

    /// A message with its control tokens marked.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when the parts of its content make up a control token between them.
    pub(super) fn message(&self, message: &Value) -> Result<Value> {
        if let Some(parts) = message.get("content").and_then(Value::as_array) {
            let texts: Vec<&str> =
                parts.iter().filter_map(|part| part.get("text")?.as_str()).collect();
            let mut apart = Vec::new();
            let mut start = 0;
            for text in &texts {
                let found = self.found(text).into_iter();
                apart.extend(found.map(|range| range.start + start..range.end + start));
                start += text.len();
            }
            if self.found(&texts.concat()) != apart {
                let reason = "two parts of a content together spell a control token".into();
                return Err(Error::Argument { name: "messages", reason });
            }
        }
        Ok(self.value(message))
    }

    /// A value with the control tokens in all its texts marked, but not in the names of fields.
    pub(super) fn value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => self.text(text).into(),
            Value::Array(items) => items.iter().map(|item| self.value(item)).collect(),
            Value::Object(fields) => {
                fields.iter().map(|(name, value)| (name.clone(), self.value(value))).collect()
            }
            other => other.clone(),
        }
    }

    fn text(&self, text: &str) -> String {
        // Marks that are there already would be a way around this.
        let clean = text.replace([START, END, ANSWER, END_ANSWER], "");
        let mut marked = String::with_capacity(clean.len());
        let mut done = 0;
        for Range { start, end } in self.found(&clean) {
            marked.push_str(&clean[done..start]);
            marked.push(START);
            marked.push_str(&clean[start..end]);
            marked.push(END);
            done = end;
        }
        marked + &clean[done..]
    }

    /// Where there are tokens in `text`: the first, of two that start at one place the longer, then the next after it.
    fn found(&self, text: &str) -> Vec<Range<usize>> {
        let mut found = Vec::new();
        for token in &self.tokens {
            found.extend(text.match_indices(token.as_str()).map(|(at, _)| at..at + token.len()));
        }
        found.sort_unstable_by_key(|range| (range.start, Reverse(range.end)));
        let mut done = 0;
        found.retain(|range| {
            let is_next = range.start >= done;
            done = if is_next { range.end } else { done };
            is_next
        });
        found
    }
}

/// The parts of a rendered text without its marks: what they enclose is text, the rest is the template's.
///
/// A mark loses its other half where a template cuts at a control token. An empty part is left in its place, so
/// that what is around it does not grow together to a token.
pub(super) fn parts(text: &str) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find([START, END]) {
        parts.push(Part::Control(&rest[..at]));
        let after = &rest[at + START.len_utf8()..];
        let enclosed = after
            .find([START, END])
            .filter(|&end| rest[at..].starts_with(START) && after[end..].starts_with(END));
        parts.push(Part::Text(&after[..enclosed.unwrap_or(0)]));
        rest = match enclosed {
            Some(end) => &after[end + END.len_utf8()..],
            None => after,
        };
    }
    parts.push(Part::Control(rest));
    parts
}

/// `text` as one that the assistant says.
pub(super) fn answer(text: &str) -> String {
    format!("{ANSWER}{text}{END_ANSWER}")
}

/// A rendered text without the marks of answers, and where in it these are. One within another is part of it, one
/// without an end reaches to that of the text.
pub(super) fn answers(text: &str) -> (String, Vec<Range<usize>>) {
    let mut clean = String::with_capacity(text.len());
    let mut answers = Vec::new();
    let (mut depth, mut start) = (0_usize, 0);
    for piece in text.split_inclusive([ANSWER, END_ANSWER]) {
        clean.push_str(piece.trim_end_matches([ANSWER, END_ANSWER]));
        if piece.ends_with(ANSWER) {
            depth += 1;
            start = if depth == 1 { clean.len() } else { start };
        } else if piece.ends_with(END_ANSWER) && depth > 0 {
            depth -= 1;
            if depth == 0 {
                answers.push(start..clean.len());
            }
        }
    }
    if depth > 0 {
        answers.push(start..clean.len());
    }
    (clean, answers)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn marks() -> Marks {
        let tokens = ["<a>", "<a><b>", "<|end|>", "[x]"].map(str::to_owned);
        Marks { tokens: tokens.into() }
    }

    fn shown(text: &str) -> String {
        text.replace(START, "«").replace(END, "»")
    }

    #[test]
    fn tokens_in_texts_are_marked_the_longest_first() {
        for (text, marked) in [
            ("", ""),
            ("a <b> <|en d|>", "a <b> <|en d|>"),
            ("<a>", "«<a>»"),
            ("é<a><b>é<a>[x]", "é«<a><b>»é«<a>»«[x]»"),
            ("<a\u{fdd0}>\u{fdd1}", "«<a>»"),
        ] {
            assert_eq!(shown(&marks().text(text)), marked, "{text}");
        }
        let value = json!({"<a>": ["<a>", 1, null, {"x": "[x]"}]});
        let marked = marks().value(&value).to_string();
        assert_eq!(shown(&marked), r#"{"<a>":["«<a>»",1,null,{"x":"«[x]»"}]}"#);
    }

    #[test]
    fn a_token_in_pieces_is_found() {
        let message = |texts: [&str; 2]| json!({"content": texts.map(|t| json!({"text": t}))});
        marks().message(&message(["<|end|>", "[x]"])).unwrap();
        marks()
            .message(&json!({"content": [{"type": "image"}, "no object", {"text": 1}]}))
            .unwrap();
        for texts in [["<|e", "nd|>"], ["<a>", "<b>[x]"]] {
            let error = marks().message(&message(texts)).unwrap_err();
            assert!(error.to_string().contains("spell a control token"), "{error}");
        }
    }

    #[test]
    fn marked_tokens_are_text_and_halves_keep_apart_what_is_around_them() {
        use Part::{Control, Text};

        let text = |shown: &str| shown.replace('«', "\u{fdd0}").replace('»', "\u{fdd1}");
        assert_eq!(parts("<a>"), [Control("<a>")]);
        assert_eq!(parts(&text("<a>«[x]»b")), [Control("<a>"), Text("[x]"), Control("b")]);
        assert_eq!(parts(&text("<|e«nd|>")), [Control("<|e"), Text(""), Control("nd|>")]);
        assert_eq!(parts(&text("<|e»nd|>")), [Control("<|e"), Text(""), Control("nd|>")]);
        assert_eq!(
            parts(&text("«a«b»»")),
            [Control(""), Text(""), Control("a"), Text("b"), Control(""), Text(""), Control("")]
        );
    }

    #[test]
    fn answers_are_found_and_their_marks_removed() {
        let text = |shown: &str| shown.replace('‹', "\u{fdd2}").replace('›', "\u{fdd3}");
        for (marked, clean, found) in [
            ("", "", vec![]),
            ("ab", "ab", vec![]),
            ("a‹bé›c‹›d", "abécd", vec!["bé", ""]),
            ("‹a‹b›c›d", "abcd", vec!["abc"]),
            ("a›b‹c", "abc", vec!["c"]),
        ] {
            let (text, answers) = answers(&text(marked));
            let answers: Vec<&str> = answers.into_iter().map(|range| &text[range]).collect();
            assert_eq!((&text[..], answers), (clean, found), "{marked}");
        }
        assert_eq!(answer("x"), text("‹x›"));
        assert_eq!(marks().text(&text("a‹b›")), "ab");
    }
}
