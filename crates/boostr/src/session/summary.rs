//! What there is to say of a session without opening it.

use std::fs;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::states;
use super::tree::{Origin, Tree, Turn, TurnId};

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
    pub(super) fn of(name: &str, tree: &Tree, folder: &Path) -> Self {
        let path: Vec<&Turn> = tree.path(tree.head).collect();
        let messages = path.iter().rev().flat_map(|turn| &turn.messages);
        let mut said = messages.filter(|message| message["role"] == "user").map(text);
        Self {
            id: name.to_owned(),
            created: tree.created,
            updated: tree.updated,
            model: path.first().map(|turn| turn.model.clone()).unwrap_or_default(),
            title: said.find(|text| !text.is_empty()).unwrap_or_default(),
            turns: path.len(),
            head: tree.head,
            position: tree.position(tree.head),
            state_bytes: fs::metadata(states::path(folder, tree.head)).map_or(0, |file| file.len()),
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
