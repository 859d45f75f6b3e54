//! What there is to say of a session without opening it.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::states;
use super::tree::{Origin, Record, Tree, Turn, TurnId};

/// Most characters of a title.
const MAX_TITLE: usize = 80;

/// A session at a glance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Its name.
    pub id: String,
    /// When it began, in seconds since 1970.
    pub created: u64,
    /// When it last changed.
    pub updated: u64,
    /// Name of the model that answered last; empty at the beginning.
    pub model: String,
    /// What the user said first, in at most 80 characters.
    pub title: String,
    /// Turns from the beginning to the head.
    pub turns: usize,
    /// The turn that the next one goes on from; 0 at the beginning.
    pub head: TurnId,
    /// Tokens of the sequence after it.
    pub position: usize,
    /// Bytes of the file with the state after it; 0 where there is none.
    pub state_bytes: u64,
    /// Where it was branched off.
    pub parent: Option<Origin>,
}

impl Summary {
    pub(super) fn new(name: &str, log: LogSummary, folder: &Path) -> Self {
        let state = fs::metadata(states::path(folder, log.head));
        Self {
            id: name.to_owned(),
            created: log.created,
            updated: log.updated,
            model: log.model,
            title: log.title,
            turns: log.turns,
            head: log.head,
            position: log.position,
            state_bytes: state.map_or(0, |file| file.len()),
            parent: log.parent,
        }
    }
}

/// A summary that each record of a log carries, so that a list of sessions reads the last record alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LogSummary {
    created: u64,
    updated: u64,
    model: String,
    title: String,
    turns: usize,
    head: TurnId,
    position: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    parent: Option<Origin>,
}

impl LogSummary {
    pub(super) fn of(tree: &Tree) -> Self {
        Self::at(tree, tree.head, None, tree.updated)
    }

    /// The same once `record` is taken in.
    pub(super) fn after(tree: &Tree, record: &Record) -> Self {
        let (head, turn, time) = match record {
            Record::Session { created, .. } | Record::System { created, .. } => {
                (tree.head, None, *created)
            }
            Record::Head { created, turn } => (*turn, None, *created),
            Record::Turn(turn) => (turn.parent, Some(turn), turn.created),
        };
        Self::at(tree, head, turn, tree.updated.max(time))
    }

    /// At a turn of the tree, or at one that comes after it.
    fn at(tree: &Tree, turn: TurnId, next: Option<&Turn>, updated: u64) -> Self {
        let path: Vec<&Turn> = next.into_iter().chain(tree.path(turn)).collect();
        let messages = path.iter().rev().flat_map(|turn| &turn.messages);
        let mut said = messages.filter(|message| message["role"] == "user").map(text);
        let head = path.first();
        Self {
            created: tree.created,
            updated,
            model: head.map(|turn| turn.model.clone()).unwrap_or_default(),
            title: said.find(|text| !text.is_empty()).unwrap_or_default(),
            turns: path.len(),
            head: head.map_or(0, |turn| turn.id),
            position: head.map_or(0, |turn| turn.position),
            parent: tree.parent.clone(),
        }
    }
}

/// The beginning of a message's text, in one line.
fn text(message: &Value) -> String {
    let content = message.get("content");
    let whole = content.and_then(Value::as_str).map_or_else(
        || {
            let parts = content.and_then(Value::as_array).into_iter().flatten();
            parts.filter_map(|part| part.get("text")?.as_str()).collect()
        },
        str::to_owned,
    );
    let words: Vec<&str> = whole.split_whitespace().collect();
    words.join(" ").chars().take(MAX_TITLE).collect()
}
