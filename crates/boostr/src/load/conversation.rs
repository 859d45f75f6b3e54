//! From messages to the ids that a model is given, and where in these messages end.

use std::time::SystemTime;

use serde_json::Value;

use super::LanguageModel;
use crate::backend::Backend;
use crate::chat::{ChatTemplate, Options, Rendered};
use crate::error::Result;

/// Most ends of messages that are looked for, counted from the last: each takes another rendering, and a snapshot there
/// the memory of a state.
pub const MAX_MARKS: usize = 4;

/// The text of a conversation that asks for an answer, and what is needed to encode it.
///
/// ```
/// use boostr::chat::{ChatTemplate, Options};
/// use boostr::{backend, load::LanguageModel};
/// use serde_json::json;
///
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny");
/// let lm = LanguageModel::open(path, &Default::default(), backend::cpu())?;
/// let template = ChatTemplate::plain()?;
/// let messages = ["Hello!", "Who is it?"].map(|text| json!({"role": "user", "content": text}));
/// let conversation = lm.conversation(&template, &messages, &Options::default())?;
/// assert_eq!(conversation.text(), "Hello!\nWho is it?\n");
///
/// let ids = conversation.encode_from(0)?;
/// let marks = conversation.marks(0, &ids, 2)?;
/// assert_eq!(marks, [lm.encode("Hello!\n")?.len()]);
/// # Ok::<(), boostr::Error>(())
/// ```
pub struct Conversation<'a, B: Backend> {
    lm: &'a LanguageModel<B>,
    template: &'a ChatTemplate,
    messages: &'a [Value],
    options: Options,
    rendered: Rendered,
}

impl<B: Backend> LanguageModel<B> {
    /// The text of messages by `template`, the model's or [`ChatTemplate::plain`], which ends with what asks for an answer.
    ///
    /// # Errors
    ///
    /// As [`tokenizer`](Self::tokenizer) and [`ChatTemplate::rendered`].
    pub fn conversation<'a>(
        &'a self,
        template: &'a ChatTemplate,
        messages: &'a [Value],
        options: &Options,
    ) -> Result<Conversation<'a, B>> {
        // One moment for all renderings.
        let now = options.now.or_else(|| Some(SystemTime::now()));
        let options = Options { add_generation_prompt: true, now, ..options.clone() };
        let rendered = template.rendered(self.tokenizer()?, messages, &options)?;
        Ok(Conversation { lm: self, template, messages, options, rendered })
    }
}

impl<B: Backend> Conversation<'_, B> {
    /// The text.
    #[must_use]
    pub fn text(&self) -> &str {
        self.rendered.text()
    }

    /// As [`Rendered::within`].
    #[must_use]
    pub fn within(&self) -> Option<&'static str> {
        self.rendered.within()
    }

    /// The ids of the text from byte `start` on; where no template does, with what the tokenizer puts before all of it.
    ///
    /// # Errors
    ///
    /// As [`ChatTemplate::encode`].
    pub fn encode_from(&self, start: usize) -> Result<Vec<u32>> {
        self.encode(start, usize::MAX)
    }

    fn encode(&self, start: usize, end: usize) -> Result<Vec<u32>> {
        let tokenizer = self.lm.tokenizer()?;
        if !self.template.is_plain() {
            return self.rendered.encode(tokenizer, start, end);
        }
        let part = self.text().get(start..end.min(self.text().len())).unwrap_or_default();
        if start == 0 { self.lm.encode(part) } else { tokenizer.encode(part, false) }
    }

    /// Numbers of `ids`, those of the text from byte `start` on, after which one of the last `count` messages ends, but
    /// at most [`MAX_MARKS`] of them; ascending, above 0 and below all. A later conversation that begins with the same
    /// messages begins with these ids.
    ///
    /// An end has none where the template writes the messages before it otherwise once others follow, and where the
    /// tokenizer makes one token of what is before and after it.
    ///
    /// # Errors
    ///
    /// As [`encode_from`](Self::encode_from).
    pub fn marks(&self, start: usize, ids: &[u32], count: usize) -> Result<Vec<usize>> {
        let all = self.messages.len();
        let first = all.saturating_sub(count.min(MAX_MARKS).saturating_sub(1)).max(1);
        let options =
            Options { add_generation_prompt: false, continue_last: false, ..self.options.clone() };
        let mut marks = Vec::new();
        for messages in (first..=all).filter_map(|count| self.messages.get(..count)) {
            // Templates that refuse a conversation that ends here have no such place.
            let Ok(part) = self.template.rendered(self.lm.tokenizer()?, messages, &options) else {
                continue;
            };
            let end = part.text().len();
            if end <= start || !self.text().starts_with(part.text()) {
                continue;
            }
            let part = self.encode(start, end)?;
            if !part.is_empty() && part.len() < ids.len() && ids.starts_with(&part) {
                marks.push(part.len());
            }
        }
        marks.dedup();
        Ok(marks)
    }
}
