//! From messages to ids.

use boostr::backend::Backend;
use boostr::chat::Options;
use serde_json::Value;

use crate::app::Loaded;
use crate::error::{ApiError, Result};

/// The ids of a conversation.
pub(crate) fn encode<B: Backend>(
    loaded: &Loaded<B>,
    messages: &[Value],
    options: &Options,
) -> Result<Vec<u32>> {
    let ids = if loaded.template.is_plain() {
        loaded.lm.encode(&render(loaded, messages, options)?)
    } else {
        loaded.template.encode(&loaded.tokenizer, messages, options)
    };
    ids.map_err(|error| refused(&error))
}

/// The same as text.
pub(crate) fn render<B: Backend>(
    loaded: &Loaded<B>,
    messages: &[Value],
    options: &Options,
) -> Result<String> {
    loaded.template.render(messages, options).map_err(|error| refused(&error))
}

/// What a template fails over is what the client sent.
pub(crate) fn refused(error: &boostr::Error) -> ApiError {
    match error {
        boostr::Error::Format { reason, .. } => ApiError::field("messages", reason),
        other => ApiError::of_input("messages", other),
    }
}

/// Checks how long a prompt is.
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
