//! Thoughts out of an answer that comes in pieces.

/// What stands around thoughts and answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Markers {
    /// `<think>` and `</think>`.
    #[default]
    Plain,
    /// The tags of Kimi K3.
    Tags,
}

/// What opens an answer in these tags, and what closes it and its message.
const RESPONSE: &str = "<|open|>response<|sep|>";
const ENDS: [&str; 2] = ["<|close|>response<|sep|>", "<|close|>message<|sep|>"];

impl Markers {
    /// What opens a thought.
    pub(super) const fn open(self) -> &'static str {
        match self {
            Self::Plain => "<think>",
            Self::Tags => "<|open|>think<|sep|>",
        }
    }

    /// What closes one.
    pub(super) const fn close(self) -> &'static str {
        match self {
            Self::Plain => "</think>",
            Self::Tags => "<|close|>think<|sep|>",
        }
    }

    /// What stands between a thought and the answer, as templates write it.
    pub(super) const fn end(self) -> &'static str {
        match self {
            Self::Plain => "</think>\n\n",
            Self::Tags => "<|close|>think<|sep|><|open|>response<|sep|>",
        }
    }
}

/// The markers of a thought that a prompt begins at its end.
pub(super) fn opened(prompt: &str) -> Option<Markers> {
    let prompt = prompt.trim_end();
    [Markers::Plain, Markers::Tags].into_iter().find(|markers| prompt.ends_with(markers.open()))
}

/// A prompt without the thought at its end in which nothing is thought: the mark of a model that is not to think.
pub(super) fn without_empty(prompt: &str) -> &str {
    let plain = Markers::Plain;
    match prompt.rsplit_once(plain.open()) {
        Some((before, thought)) if thought.trim() == plain.close() => before,
        _ => prompt,
    }
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// Of the thought before the answer, never empty.
    Thought(String),
    /// Of the answer itself, never empty.
    Text(String),
}

/// Divides an answer into its thought and its text while it comes.
///
/// A thought is what stands between `<think>` and `</think>` at the beginning of an answer. White space around it is
/// dropped, and so are the markers. Later markers are text. A thought without an end is a thought to the end of the answer.
/// After a prompt that ends with a tag of Kimi K3, the markers are its tags, and those around the text are dropped too.
/// How the answer is cut into pieces makes no difference.
///
/// ```
/// use boostr::chat::{Said, Thoughts};
///
/// let mut thoughts = Thoughts::default();
/// assert_eq!(thoughts.push("<think>\nTwo and two.\n</th"), [Said::Thought("Two and two.".to_owned())]);
/// assert_eq!(thoughts.push("ink>\n\nFour"), [Said::Text("Four".to_owned())]);
/// assert_eq!(thoughts.finish(), []);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Thoughts {
    place: Place,
    markers: Markers,
    /// What is not decided yet.
    held: String,
}

/// Where the text so far ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    /// Nothing but white space has come.
    #[default]
    Start,
    /// In a thought, of which nothing but white space has come.
    Opened,
    /// In a thought.
    Thought,
    /// Nothing but white space has come since the thought.
    Closed,
    /// In the text.
    Text,
}

impl Thoughts {
    /// For an answer that follows `prompt`, or the end of one: templates of models that think may end it with the start of
    /// a thought.
    ///
    /// ```
    /// use boostr::chat::{Said, Thoughts};
    ///
    /// let mut thoughts = Thoughts::after("<|assistant|>\n<think>\n");
    /// let said = thoughts.push("Hm.</think>Yes.");
    /// assert_eq!(said, [Said::Thought("Hm.".to_owned()), Said::Text("Yes.".to_owned())]);
    /// ```
    #[must_use]
    pub fn after(prompt: &str) -> Self {
        let held = String::new();
        if let Some(markers) = opened(prompt) {
            return Self { place: Place::Opened, markers, held };
        }
        if prompt.trim_end().ends_with(RESPONSE) {
            return Self { place: Place::Text, markers: Markers::Tags, held };
        }
        Self::default()
    }

    /// For an answer that goes on in a thought that has begun, which `open` opened: white space before what comes is of it.
    ///
    /// ```
    /// use boostr::chat::{Said, Thoughts};
    ///
    /// let mut thoughts = Thoughts::within("<think>");
    /// let said = thoughts.push(" and two.</think>Four.");
    /// assert_eq!(said, [Said::Thought(" and two.".to_owned()), Said::Text("Four.".to_owned())]);
    /// ```
    #[must_use]
    pub fn within(open: &str) -> Self {
        let markers = opened(open).unwrap_or_default();
        Self { place: Place::Thought, markers, held: String::new() }
    }

    /// Takes the next piece of the answer and gives what is now known.
    pub fn push(&mut self, text: &str) -> Vec<Said> {
        self.held.push_str(text);
        let mut said = Vec::new();
        while self.advance(&mut said) {}
        said
    }

    /// The rest, now that no more comes.
    pub fn finish(&mut self) -> Vec<Said> {
        let rest = std::mem::take(&mut self.held);
        let said = match self.place {
            Place::Opened | Place::Thought => thought(rest.trim()),
            // What may have been a tag before the text is the text.
            Place::Closed | Place::Start | Place::Text => text(rest),
        };
        *self = Self::default();
        said.into_iter().collect()
    }

    /// Takes the tags that close the answer out of what is held, and what may be the start of one; returns this.
    fn without_ends(&mut self) -> String {
        let mut kept = String::new();
        let mut rest = &self.held[..];
        // The first of both each time, and what was passed is not looked at again.
        while let Some((at, end)) =
            ENDS.iter().filter_map(|end| Some((rest.find(end)?, end))).min_by_key(|(at, _)| *at)
        {
            kept.push_str(&rest[..at]);
            rest = &rest[at + end.len()..];
        }
        let most = ENDS.iter().map(|end| begun(rest, end)).max().unwrap_or(0);
        let (text, begun) = rest.split_at(rest.len() - most);
        let begun = begun.to_owned();
        kept.push_str(text);
        self.held = kept;
        begun
    }

    /// Decides the next part of what is held; `false` when more has to come first.
    fn advance(&mut self, said: &mut Vec<Said>) -> bool {
        match self.place {
            Place::Start => {
                let rest = self.held.trim_start();
                let open = self.markers.open();
                if let Some(after) = rest.strip_prefix(open) {
                    self.held = after.to_owned();
                    self.place = Place::Opened;
                    return true;
                }
                if open.starts_with(rest) {
                    return false;
                }
                self.place = Place::Text;
                true
            }
            Place::Thought => match self.held.find(self.markers.close()) {
                Some(at) => {
                    let after = self.held.split_off(at + self.markers.close().len());
                    said.extend(thought(self.held[..at].trim_end()));
                    self.held = after;
                    self.place = Place::Closed;
                    true
                }
                None => {
                    let known = self.held.len() - begun(&self.held, self.markers.close());
                    let known = self.held[..known].trim_end().len();
                    let rest = self.held.split_off(known);
                    said.extend(thought(&std::mem::replace(&mut self.held, rest)));
                    false
                }
            },
            // Space after a tag belongs to neither.
            Place::Opened | Place::Closed => {
                self.held.drain(..self.held.len() - self.held.trim_start().len());
                if self.held.is_empty() {
                    return false;
                }
                let is_open = matches!(self.place, Place::Opened);
                if self.markers == Markers::Tags && !is_open {
                    if let Some(answer) = self.held.strip_prefix(RESPONSE) {
                        self.held = answer.to_owned();
                    } else if RESPONSE.starts_with(&self.held) {
                        return false;
                    }
                }
                self.place = if is_open { Place::Thought } else { Place::Text };
                true
            }
            Place::Text => {
                let rest =
                    if self.markers == Markers::Tags { self.without_ends() } else { String::new() };
                said.extend(text(std::mem::replace(&mut self.held, rest)));
                false
            }
        }
    }
}

fn thought(text: &str) -> Option<Said> {
    (!text.is_empty()).then(|| Said::Thought(text.to_owned()))
}

fn text(text: String) -> Option<Said> {
    (!text.is_empty()).then_some(Said::Text(text))
}

/// How many bytes at the end of a text may be the start of a marker.
pub(super) fn begun(text: &str, marker: &str) -> usize {
    (1..marker.len()).rev().find(|&len| text.ends_with(&marker[..len])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Thought and text of an answer in pieces of `size` bytes or a little more.
    fn divided(mut thoughts: Thoughts, answer: &str, size: usize) -> (String, String) {
        let mut all = Vec::new();
        let mut piece = String::new();
        for c in answer.chars() {
            piece.push(c);
            if piece.len() >= size {
                all.extend(thoughts.push(&std::mem::take(&mut piece)));
            }
        }
        all.extend(thoughts.push(&piece));
        all.extend(thoughts.finish());
        let (mut thought, mut text) = (String::new(), String::new());
        for said in all {
            match said {
                Said::Thought(part) => {
                    assert!(text.is_empty() && !part.is_empty());
                    thought.push_str(&part);
                }
                Said::Text(part) => {
                    assert!(!part.is_empty());
                    text.push_str(&part);
                }
            }
        }
        (thought, text)
    }

    #[test]
    fn an_answer_is_divided_however_it_is_cut() {
        for (answer, thought, text) in [
            ("", "", ""),
            ("Yes.", "", "Yes."),
            ("  \n Yes. ", "", "  \n Yes. "),
            ("<think>\n\n</think>\n\nYes.", "", "Yes."),
            ("<think>Hm,  \n so.\n</think>\n\nYes. ", "Hm,  \n so.", "Yes. "),
            (" \n<think>a</thin b</think>c</think>", "a</thin b", "c</think>"),
            ("<think>a</think><think>b</think>", "a", "<think>b</think>"),
            ("<think>gr\u{fc}n \u{1f600}</think>\u{e9}", "gr\u{fc}n \u{1f600}", "\u{e9}"),
            ("<think>a, b  ", "a, b", ""),
            ("<think>a</think", "a</think", ""),
            ("<thin", "", "<thin"),
            ("<thing>", "", "<thing>"),
            ("Is <think> a tag?</think>", "", "Is <think> a tag?</think>"),
            ("</think>x", "", "</think>x"),
            ("  ", "", "  "),
        ] {
            for size in 1..=answer.len() + 1 {
                let found = divided(Thoughts::default(), answer, size);
                assert_eq!(found, (thought.to_owned(), text.to_owned()), "{answer:?} by {size}");
            }
        }
    }

    #[test]
    fn a_prompt_may_open_the_thought() {
        for (prompt, answer, thought, text) in [
            ("<think>\n", "Hm.\n</think>\nYes.", "Hm.", "Yes."),
            ("<think>", "Hm. <think>", "Hm. <think>", ""),
            ("<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
            ("Answer:", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
            (
                Markers::Tags.open(),
                "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.",
                "Hm.",
                "Yes.",
            ),
            (Markers::Tags.open(), "Hm.<|close|>think<|sep|>Yes.", "Hm.", "Yes."),
            (Markers::Tags.open(), "Hm.</think>", "Hm.</think>", ""),
            (Markers::Tags.open(), "Hm.<|close|>think<|sep|><|open|>resp", "Hm.", "<|open|>resp"),
            (RESPONSE, "Yes.<|close|>response<|sep|><|close|>message<|sep|>", "", "Yes."),
            (RESPONSE, "<think>Yes.<|close|>resp", "", "<think>Yes.<|close|>resp"),
            (
                RESPONSE,
                "a<|close|>response<|sep|>b<|close|>tools<|sep|>",
                "",
                "ab<|close|>tools<|sep|>",
            ),
            (
                RESPONSE,
                "<|close|>mess<|close|>response<|sep|>age<|sep|>",
                "",
                "<|close|>message<|sep|>",
            ),
            ("Answer:", "Yes.<|close|>response<|sep|>", "", "Yes.<|close|>response<|sep|>"),
        ] {
            for size in 1..=answer.len() {
                let found = divided(Thoughts::after(prompt), answer, size);
                assert_eq!(found, (thought.to_owned(), text.to_owned()), "{prompt:?} by {size}");
            }
        }
    }
}
