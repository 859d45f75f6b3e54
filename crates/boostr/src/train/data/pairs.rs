//! Contexts with their continuations, by which a model is judged: does it find the word that follows?

use std::path::Path;

use serde_json::Value;

use super::documents::{kind_of, text};
use super::encode::Encoder;
use super::lines::{Lines, at};
use crate::error::{Error, Result};

/// A context, and what followed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    /// Ids of the context, at least one.
    pub context: Vec<u32>,
    /// Ids of the continuation, at least one.
    pub continuation: Vec<u32>,
    /// Bytes of the continuation's text.
    pub bytes: usize,
    /// The line of the file, from 1.
    pub line: usize,
}

/// Reads the pairs of a file of JSON, an object a line or a list of objects: `context` and `continuation`, or `prompt` and `completion`, or
/// `text` alone, of which the last word with the white space before it is the continuation (LAMBADA).
///
/// Both texts are tokenized as one, after what the tokenizer puts before a text. The context has the tokens that it
/// would have alone; from the first that is another one, all are the continuation's. So a token across the border
/// belongs to the continuation.
///
/// # Errors
///
/// [`Error::Io`]; [`Error::Format`] naming file and line for what is no such object, when one of the two has no
/// token, or when there is no line.
pub fn read_pairs(path: &Path, encoder: &Encoder) -> Result<Vec<Pair>> {
    let mut lines = Lines::open(path)?;
    let mut pairs = Vec::new();
    while let Some(value) = lines.json(path)? {
        let line = lines.line;
        let pair = pair(value, encoder).map_err(|reason| at(path, line, &reason))?;
        pairs.push(Pair { line, ..pair });
    }
    if pairs.is_empty() {
        return Err(Error::format(path, "expected a JSON object a line, found none"));
    }
    Ok(pairs)
}

fn pair(value: Value, encoder: &Encoder) -> Result<Pair, String> {
    let (context, continuation) = texts(value)?;
    let (mut ids, given) =
        encoder.encode_pair(&context, &continuation).map_err(|error| error.to_string())?;
    let next = ids.split_off(given);
    for (ids, what) in [(&ids, "context"), (&next, "continuation")] {
        if ids.is_empty() {
            return Err(format!("the {what} has no token"));
        }
    }
    Ok(Pair { context: ids, continuation: next, bytes: continuation.len(), line: 0 })
}

/// The two texts of an object.
fn texts(value: Value) -> Result<(String, String), String> {
    let Value::Object(mut object) = value else {
        return Err(format!("expected a JSON object, found {}", kind_of(&value)));
    };
    for (first, second) in [("context", "continuation"), ("prompt", "completion")] {
        if let (Some(context), Some(continuation)) = (object.remove(first), object.remove(second)) {
            return Ok((text(first, context)?, text(second, continuation)?));
        }
    }
    let Some(all) = object.remove("text") else {
        let keys = "`context` with `continuation`, `prompt` with `completion`, or `text`";
        return Err(format!("expected {keys}"));
    };
    let all = text("text", all)?;
    let all = all.trim_end();
    match all.rfind(char::is_whitespace) {
        Some(space) => Ok((all[..space].to_owned(), all[space..].to_owned())),
        None => Err("`text`: expected at least two words".into()),
    }
}
