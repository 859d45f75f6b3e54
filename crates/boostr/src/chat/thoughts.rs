//! Thoughts out of an answer that comes in pieces.

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

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
        let is_open = prompt.trim_end().ends_with(OPEN);
        Self { place: if is_open { Place::Opened } else { Place::Start }, held: String::new() }
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
            Place::Closed => None,
            Place::Start | Place::Text => text(rest),
        };
        *self = Self::default();
        said.into_iter().collect()
    }

    /// Decides the next part of what is held; `false` when more has to come first.
    fn advance(&mut self, said: &mut Vec<Said>) -> bool {
        match self.place {
            Place::Start => {
                let rest = self.held.trim_start();
                if let Some(after) = rest.strip_prefix(OPEN) {
                    self.held = after.to_owned();
                    self.place = Place::Opened;
                    return true;
                }
                if OPEN.starts_with(rest) {
                    return false;
                }
                self.place = Place::Text;
                true
            }
            Place::Thought => match self.held.find(CLOSE) {
                Some(at) => {
                    let after = self.held.split_off(at + CLOSE.len());
                    said.extend(thought(self.held[..at].trim_end()));
                    self.held = after;
                    self.place = Place::Closed;
                    true
                }
                None => {
                    let known = self.held.len() - begun(&self.held);
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
                self.place = if is_open { Place::Thought } else { Place::Text };
                true
            }
            Place::Text => {
                said.extend(text(std::mem::take(&mut self.held)));
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

/// How many bytes at the end of a text may be the start of the closing marker.
fn begun(text: &str) -> usize {
    let possible = (1..CLOSE.len()).rev();
    let mut starts = possible.filter(|&len| text.ends_with(&CLOSE[..len]));
    starts.next().unwrap_or(0)
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
        ] {
            for size in 1..=answer.len() {
                let found = divided(Thoughts::after(prompt), answer, size);
                assert_eq!(found, (thought.to_owned(), text.to_owned()), "{prompt:?} by {size}");
            }
        }
    }
}
