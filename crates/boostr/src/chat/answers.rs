//! Which tokens of a conversation are the assistant's: those that training counts.
//!
//! A template may say so by `{% generation %}`. Of others it is found by rendering the conversation as it grows: an
//! answer begins where the text that asks for it ends, and ends where the conversation ends with it.

use std::ops::Range;
use std::time::SystemTime;

use serde_json::Value;

use super::{ChatTemplate, Options, marked, marks};
use crate::error::{Error, Result};
use crate::tokenizer::{Part, Tokenizer};

/// The ids of a conversation, and whose they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answers {
    /// As [`ChatTemplate::encode`] gives them.
    pub ids: Vec<u32>,
    /// Whether the assistant says the token, for each of `ids`.
    pub is_answer: Vec<bool>,
    /// Bytes of the conversation's text.
    pub bytes: usize,
}

/// Which answers are counted.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counted<'a> {
    /// So many messages at the beginning are only read, whoever says them.
    pub(crate) given: usize,
    /// Of each answer whether it is learnt; those that are not listed are.
    pub(crate) learnt: &'a [bool],
}

impl ChatTemplate {
    /// The ids of a conversation as [`encode`](Self::encode) gives them, without a last prompt to answer, and which of
    /// them the assistant says.
    ///
    /// With `{% generation %}` in the template these are the tokens that it encloses. Without, the messages before an
    /// answer are rendered with a generation prompt, and again with the answer. The difference is the answer: its
    /// content and the template's end of a turn.
    ///
    /// A token that lies across the start of an answer belongs to it, one across its end does not.
    ///
    /// Takes time for each answer as for the text up to it.
    ///
    /// # Errors
    ///
    /// As [`encode`](Self::encode); [`Error::Argument`] when a template without `{% generation %}` writes earlier
    /// messages otherwise once others follow, so that the answers are not to be told apart.
    pub fn encode_answers(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Value],
        options: &Options,
    ) -> Result<Answers> {
        self.encode_answers_of(tokenizer, messages, Counted::default(), options)
    }

    /// The same, of the answers that are `counted` alone.
    pub(crate) fn encode_answers_of(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Value],
        counted: Counted<'_>,
        options: &Options,
    ) -> Result<Answers> {
        let Counted { given, learnt } = counted;
        // One moment for all renderings.
        let now = options.now.or_else(|| Some(SystemTime::now()));
        let options = Options { add_generation_prompt: false, now, ..options.clone() };
        let (messages, options) = marked(tokenizer, messages, &options)?;
        let (first, first_options) = self.tried(&messages[..given], &options)?;
        let (messages, options) = self.tried(&messages, &options)?;
        let (_, template) = self.template(options.tools.is_some())?;
        let (text, answers) = if template.marks_answers {
            marks::answers(&self.render_in(&messages, &options, true)?)
        } else {
            let text = self.render(&messages, &options)?;
            let answers = self.answers_by_prefixes(&messages, &options, &text)?;
            (text, answers)
        };
        let before = if given == 0 {
            0
        } else {
            let before = self.render(&first, &first_options)?;
            common_prefix(before.as_bytes(), text.as_bytes())
        };
        if learnt.contains(&false) && answers.len() != learnt.len() {
            let (found, said) = (answers.len(), learnt.len());
            let reason = format!(
                "`weight`: the chat template encloses {found} texts in {{% generation %}}, and the assistant says {said} \
                 messages, so the weight of each is not to be told"
            );
            return Err(Error::Argument { name: "messages", reason });
        }
        let is_learnt = |number: usize| learnt.get(number).copied().unwrap_or(true);
        let answers = answers.into_iter().enumerate();
        let answers =
            answers.filter(|(number, answer)| is_learnt(*number) && answer.start >= before);
        let answers = answers.map(|(_, answer)| answer);

        let encode = |end| tokenizer.encode_parts(&marks::parts(&text[..end]), false);
        let ids = encode(text.len())?;
        let mut is_answer = vec![false; ids.len()];
        for Range { start, end } in answers {
            let first = common_prefix(&encode(start)?, &ids);
            let last =
                if end == text.len() { ids.len() } else { common_prefix(&encode(end)?, &ids) };
            is_answer.iter_mut().take(last).skip(first).for_each(|is_answer| *is_answer = true);
        }
        let parts = marks::parts(&text).into_iter();
        let bytes = parts.map(|(Part::Text(part) | Part::Control(part))| part.len()).sum();
        Ok(Answers { ids, is_answer, bytes })
    }

    /// Where the answers are in `text`, the rendering of `messages`.
    fn answers_by_prefixes(
        &self,
        messages: &[Value],
        options: &Options,
        text: &str,
    ) -> Result<Vec<Range<usize>>> {
        let prompt = Options { add_generation_prompt: true, ..options.clone() };
        let mut answers = Vec::new();
        for (i, message) in messages.iter().enumerate() {
            if message.get("role").and_then(Value::as_str) != Some("assistant") {
                continue;
            }
            let before = self.render(&messages[..i], options)?;
            let asking = self.render(&messages[..i], &prompt)?;
            let with_it = self.render(&messages[..=i], options)?;
            if !text.starts_with(&before) || !text.starts_with(&with_it) {
                let reason = format!(
                    "the chat template writes what comes before and with message {} otherwise once others follow, \
                     so the answer is not to be found: it needs a template with {{% generation %}}",
                    i + 1
                );
                return Err(Error::Argument { name: "messages", reason });
            }
            // What asks for an answer may hold more than is kept of it, like the start of a thought.
            let common = common_prefix(asking.as_bytes(), text.as_bytes());
            let start = text.floor_char_boundary(common).max(before.len());
            answers.push(start.min(with_it.len())..with_it.len());
        }
        Ok(answers)
    }
}

/// How many items two lists have in common at their start.
fn common_prefix<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
