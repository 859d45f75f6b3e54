//! From messages to ids.

use std::slice;

use boostr::backend::Backend;
use boostr::chat::Options;
use serde_json::Value;

use crate::app::Loaded;
use crate::desk::Taken;
use crate::error::{ApiError, Result};

/// Memory that encoding takes, for each byte of a text.
pub(crate) const ENCODING: usize = 150;
/// Texts with more bytes than this for each token that a prompt may have are refused before they are encoded.
const TOKEN_BYTES: usize = 8;
/// A text that is not refused for its bytes, however few tokens a prompt may have.
const SHORT: usize = 1 << 20;

/// A conversation as the engine takes it.
pub(crate) struct Encoded {
    pub(crate) ids: Vec<u32>,
    /// After how many of them messages end: where a later conversation may part from it.
    pub(crate) marks: Vec<usize>,
    /// What opens the thought in which it ends, where an answer goes on in one that has begun.
    pub(crate) within: Option<&'static str>,
}

/// Renders and encodes a conversation.
pub(crate) fn encode<B: Backend>(
    loaded: &Loaded<B>,
    messages: &[Value],
    options: &Options,
    most: usize,
) -> Result<Encoded> {
    let of = |error| refused(&error);
    let conversation = loaded.lm.conversation(&loaded.template, messages, options).map_err(of)?;
    let _memory = memory(loaded, conversation.text().len(), most, "messages")?;
    let ids = conversation.encode_from(0).map_err(of)?;
    check_context(loaded, &ids, most, "messages")?;
    let marks = conversation.marks(0, &ids, messages.len()).map_err(of)?;
    Ok(Encoded { ids, marks, within: conversation.within() })
}

/// The text of a conversation.
pub(crate) fn render<B: Backend>(
    loaded: &Loaded<B>,
    messages: &[Value],
    options: &Options,
) -> Result<String> {
    loaded.template.prompt(messages, options).map_err(|error| refused(&error))
}

/// What a template fails over is what the client sent.
pub(crate) fn refused(error: &boostr::Error) -> ApiError {
    match error {
        boostr::Error::Format { reason, .. } => ApiError::field("messages", reason),
        other => ApiError::of_input("messages", other),
    }
}

/// Bytes of text in messages.
pub(crate) fn text_bytes(messages: &[Value]) -> usize {
    let bytes = |value: &Value| match value {
        Value::String(text) => text.len(),
        Value::Array(values) => text_bytes(values),
        Value::Object(fields) => fields.values().map(|v| text_bytes(slice::from_ref(v))).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    };
    messages.iter().map(bytes).sum()
}

/// Waits for the memory to encode a text of so many bytes, of which at most `most` tokens are wanted.
pub(crate) fn memory<'a, B: Backend>(
    loaded: &'a Loaded<B>,
    bytes: usize,
    most: usize,
    param: &str,
) -> Result<Taken<'a>> {
    Ok(loaded.room.take(needed(bytes, most, param)?))
}

/// That memory, in bytes. Who waits for other memory too waits for both at once.
pub(crate) fn needed(bytes: usize, most: usize, param: &str) -> Result<usize> {
    let limit = most.saturating_mul(TOKEN_BYTES).max(SHORT);
    if bytes > limit {
        let reason = format!(
            "expected a text of at most {limit} bytes, {TOKEN_BYTES} for each of the {most} tokens of a prompt \
             (--max-prompt of the server), found {bytes}"
        );
        return Err(ApiError::field(param, reason).with_code("context_length_exceeded"));
    }
    Ok(bytes.saturating_mul(ENCODING))
}

/// Checks how long a prompt is, by a server's limit and by the model's context.
pub(crate) fn check_context<B: Backend>(
    loaded: &Loaded<B>,
    ids: &[u32],
    most: usize,
    param: &str,
) -> Result<()> {
    check_length(ids, most, param)?;
    let room = loaded.lm.model.room_after(ids.len());
    room.map(drop).map_err(|error| ApiError::of_input(param, &error))
}

/// Checks how long a prompt is, by a server's limit.
pub(crate) fn check_length(ids: &[u32], most: usize, param: &str) -> Result<()> {
    match ids.len() {
        0 => Err(ApiError::field(param, "expected at least one token, found none")),
        n if n > most => {
            let reason = format!("the prompt has {n} tokens, expected at most {most}");
            Err(ApiError::field(param, reason).with_code("context_length_exceeded"))
        }
        _ => Ok(()),
    }
}
