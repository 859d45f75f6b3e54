//! From the turns of a session and new messages to ids.

use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use serde_json::Value;

use super::tree::{Tree, Turn, TurnId};
use super::{Result, SessionError, states};
use crate::backend::Backend;
use crate::chat::{ChatTemplate, Options};
use crate::error::Error;
use crate::load::LanguageModel;
use crate::models::State;

/// Who may say something. A template may make control tokens of a role, so there are no others.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// Deepest nesting of a message: a log must be read again.
const MAX_DEPTH: usize = 64;

/// Who answers in a session.
pub struct Assistant<'a, B: Backend> {
    /// The model.
    pub lm: &'a LanguageModel<B>,
    /// Its template, or [`ChatTemplate::plain`].
    pub template: &'a ChatTemplate,
    /// Its name, for people.
    pub name: &'a str,
}

/// What is to be run before an answer.
#[derive(Debug)]
pub struct Prompt<B: Backend> {
    /// All ids of the sequence, from its beginning.
    pub ids: Vec<u32>,
    /// Numbers of ids after which a message ends, ascending, above `reused` and below all.
    pub marks: Vec<usize>,
    /// The longest state there is that has seen a beginning of `ids`, not all.
    pub state: Option<State<B>>,
    /// How many of `ids` it has seen; 0 without one.
    pub reused: usize,
    /// How many of `ids`, at the end, are the beginning of the answer.
    pub begun: usize,
    continues: Option<TurnId>,
    messages: Vec<Value>,
    parent: TurnId,
    base: TurnId,
    /// Of `ids`, those of `base`.
    base_len: usize,
    text: String,
}

impl<B: Backend> Prompt<B> {
    /// The turn that it becomes with an answer.
    pub(super) fn into_turn(
        self,
        tree: &Tree,
        assistant: &Assistant<'_, B>,
        answer: Value,
        generated: &[u32],
        is_cut: bool,
        created: u64,
    ) -> Result<Turn> {
        check(&answer, self.messages.len())?;
        let id = tree.last().checked_add(1).ok_or_else(|| Error::Argument {
            name: "session",
            reason: format!("expected fewer than {} turns", TurnId::MAX),
        })?;
        let mut ids = self.ids;
        ids.drain(..self.base_len.min(ids.len()));
        ids.extend_from_slice(generated);
        let generated = self.begun.saturating_add(generated.len()).min(ids.len());
        let answer_ids = ids.get(ids.len().saturating_sub(generated)..).unwrap_or_default();
        let made = assistant.lm.tokenizer()?.decode(answer_ids, false)?;
        let is_content = answer.get("content").and_then(Value::as_str) == Some(&made);
        let mut messages = self.messages;
        messages.push(answer);
        Ok(Turn {
            id,
            parent: self.parent,
            messages,
            position: self.base_len.saturating_add(ids.len()),
            created,
            model: assistant.name.to_owned(),
            fingerprint: fingerprint(assistant),
            base: self.base,
            text: self.text,
            ids,
            generated,
            is_cut,
            continues: self.continues,
            answer: (!is_content).then_some(made),
        })
    }
}

fn fingerprint<B: Backend>(assistant: &Assistant<'_, B>) -> String {
    assistant.lm.model.fingerprint().unwrap_or_default().to_owned()
}

/// The prompt of new messages after the head.
pub(super) fn make<B: Backend>(
    tree: &Tree,
    folder: &Path,
    recent: Option<&(TurnId, State<B>)>,
    assistant: &Assistant<'_, B>,
    new: &[Value],
    options: &Options,
) -> Result<Prompt<B>> {
    for (index, message) in new.iter().enumerate() {
        check(message, index)?;
    }
    let begun = UNIX_EPOCH.checked_add(Duration::from_secs(tree.created));
    let options = Options { now: options.now.or(begun), ..options.clone() };
    let mut messages = tree.messages(tree.head);
    messages.extend_from_slice(new);
    let conversation = assistant.lm.conversation(assistant.template, &messages, &options)?;

    let (base, start) = known(tree, conversation.text(), &fingerprint(assistant));
    let mut ids = tree.ids(base);
    let base_len = ids.len();
    ids.extend(conversation.encode_from(start)?);
    let most = ids.len().saturating_sub(1);
    let state = states::longest(tree, folder, recent, assistant.lm, &ids, most);
    let reused = state.as_ref().map_or(0, State::position);

    let mut marks: Vec<usize> = tree.chain(base).iter().map(|turn| turn.position).collect();
    let ends = ids.get(base_len..).unwrap_or_default();
    // With few new messages, the first of these is where the old ones end.
    let ends = conversation.marks(start, ends, new.len().saturating_add(1))?;
    marks.extend(ends.into_iter().map(|end| base_len.saturating_add(end)));
    marks.retain(|&mark| mark > reused && mark < ids.len());
    marks.dedup();
    let text = conversation.text().get(start..).unwrap_or_default().to_owned();
    let (messages, parent) = (new.to_vec(), tree.head);
    let (begun, continues) = (0, None);
    Ok(Prompt {
        ids,
        marks,
        state,
        reused,
        begun,
        continues,
        messages,
        parent,
        base,
        base_len,
        text,
    })
}

/// The prompt that goes on with the answer of the head: the ids that its model saw and made.
pub(super) fn go_on<B: Backend>(
    tree: &Tree,
    folder: &Path,
    recent: Option<&(TurnId, State<B>)>,
    assistant: &Assistant<'_, B>,
) -> Result<Prompt<B>> {
    let refuse = |reason: &str| Err(SessionError::Message { index: 0, reason: reason.to_owned() });
    let Some(turn) = tree.get(tree.head) else {
        return refuse("expected an answer to go on with, found a session at its beginning");
    };
    if turn.fingerprint != fingerprint(assistant) {
        return refuse("expected the model that began the answer, found another");
    }
    let Some((_, messages)) = turn.messages.split_last().filter(|_| turn.generated > 0) else {
        return refuse("expected an answer to go on with, found one without tokens");
    };
    if turn.messages.last().is_some_and(|answer| answer.get("tool_calls").is_some()) {
        return refuse("expected an answer of text, found one that calls tools");
    }
    let ids = tree.ids(turn.id);
    let most = ids.len().saturating_sub(1);
    let state = states::longest(tree, folder, recent, assistant.lm, &ids, most);
    let reused = state.as_ref().map_or(0, State::position);
    let mut marks: Vec<usize> = tree.chain(turn.base).iter().map(|turn| turn.position).collect();
    marks.push(ids.len().saturating_sub(turn.generated));
    marks.retain(|&mark| mark > reused && mark < ids.len());
    Ok(Prompt {
        ids,
        marks,
        state,
        reused,
        begun: turn.generated,
        continues: Some(turn.id),
        messages: messages.to_vec(),
        parent: turn.parent,
        base: turn.base,
        base_len: tree.position(turn.base),
        text: turn.text.clone(),
    })
}

/// Checks that a value is a message that a log can hold and a template can be given.
fn check(message: &Value, index: usize) -> Result<()> {
    let refuse = |reason: String| Err(SessionError::Message { index, reason });
    let role = message.get("role").and_then(Value::as_str);
    if !role.is_some_and(|role| ROLES.contains(&role)) {
        let found = role.map_or_else(|| "none".to_owned(), |role| format!("{role:?}"));
        let found: String = found.chars().take(80).collect();
        return refuse(format!("role: expected one of {ROLES:?}, found {found}"));
    }
    if !is_shallow(message, MAX_DEPTH) {
        return refuse(format!("expected a nesting of at most {MAX_DEPTH}, found more"));
    }
    Ok(())
}

fn is_shallow(value: &Value, left: usize) -> bool {
    let Some(less) = left.checked_sub(1) else { return false };
    match value {
        Value::Array(items) => items.iter().all(|item| is_shallow(item, less)),
        Value::Object(fields) => fields.values().all(|item| is_shallow(item, less)),
        _ => true,
    }
}

/// The last turn up to which `text` begins with what was rendered and made before, and where in it that ends.
fn known(tree: &Tree, text: &str, fingerprint: &str) -> (TurnId, usize) {
    let (mut base, mut rest) = (0, text);
    for turn in tree.chain(tree.head) {
        let answered = rest
            .strip_prefix(&*turn.text)
            .filter(|_| turn.fingerprint == fingerprint)
            .and_then(|rest| after_answer(rest, turn.answer()));
        let Some(after) = answered else { break };
        (base, rest) = (turn.id, after);
    }
    (base, text.len().saturating_sub(rest.len()))
}

/// What follows an answer; templates may trim it.
fn after_answer<'a>(text: &'a str, answer: &str) -> Option<&'a str> {
    [answer, answer.trim_start(), answer.trim_end(), answer.trim()]
        .into_iter()
        .find_map(|answer| text.strip_prefix(answer))
}
