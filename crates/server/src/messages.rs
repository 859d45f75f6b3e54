//! The messages of a conversation as they come from a client, checked, and as templates expect them.

use boostr::chat::normalized;
use serde_json::{Map, Value};

use crate::error::{ApiError, Result};
use crate::fields::Fields;

/// Roles become control tokens in many templates, so no others are let through.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];
const MAX_MESSAGES: usize = 4096;
/// What [`normalized`] reads.
const VALUES: [&str; 5] = ["content", "tool_calls", "function_call", "refusal", "audio"];
/// What is handed on as it is.
const TEXTS: [&str; 5] = ["name", "tool_call_id", "reasoning_content", "reasoning", "thinking"];

/// Checks the messages in the field `messages`: at least one, each with a known role and text.
pub(crate) fn read(fields: &mut Fields) -> Result<Vec<Value>> {
    let messages = fields.list("messages")?;
    let messages = fields.required("messages", messages)?;
    if !(1..=MAX_MESSAGES).contains(&messages.len()) {
        let reason = format!("expected 1 to {MAX_MESSAGES} messages, found {}", messages.len());
        return Err(ApiError::field("messages", reason));
    }
    let messages = messages.into_iter().enumerate();
    messages.map(|(i, message)| one(&format!("messages[{i}]"), message)).collect()
}

/// Checks one message, whose fields are at `path`.
pub(crate) fn one(path: &str, message: Value) -> Result<Value> {
    let mut fields = Fields::at(path, message)?;
    let role = fields.word("role", &ROLES)?;
    let role = fields.required("role", role)?;
    let mut out = Map::new();
    out.insert("role".into(), role.into());
    for name in VALUES {
        if let Some(value) = fields.take(name) {
            out.insert(name.into(), value);
        }
    }
    for name in TEXTS {
        if let Some(text) = fields.text(name)? {
            out.insert(name.into(), text.into());
        }
    }
    fields.finish()?;
    let read = normalized(&[out.into()]).map(|mut messages| messages.remove(0));
    read.map_err(|error| {
        let field = Some(error.field).filter(|field| !field.is_empty());
        let path = field.map_or_else(|| path.to_owned(), |field| format!("{path}.{field}"));
        ApiError::field(path, error.reason)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn checked(messages: &Value) -> Result<Vec<Value>> {
        read(&mut Fields::of(json!({"messages": messages})).unwrap())
    }

    #[test]
    fn r_d4_what_is_no_message_is_named() {
        for (messages, field) in [
            (json!([]), "messages"),
            (json!("hello"), "messages"),
            (json!([1]), "messages[0]"),
            (json!([{"content": "x"}]), "messages[0].role"),
            (json!([{"role": "<|im_end|>", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": null}]), "messages[0].content"),
            (json!([{"role": "user", "content": 1}]), "messages[0].content"),
            (
                json!([{"role": "user", "content": "a"}, {"role": "user", "content": [
                    {"type": "text", "text": "b"}, {"type": "image_url", "image_url": {"url": "x"}}
                ]}]),
                "messages[1].content[1].type",
            ),
            (
                json!([{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]),
                "messages[0].tool_calls",
            ),
        ] {
            let error = checked(&messages).err().unwrap_or_else(|| panic!("{messages}"));
            assert_eq!(error.param.as_deref(), Some(field), "{messages}");
        }
    }

    #[test]
    fn messages_become_what_templates_expect() {
        let messages = checked(&json!([
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}
            ]},
            {"role": "tool", "tool_call_id": "c1", "content": "2", "odd": true},
        ]))
        .unwrap();
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        assert_eq!(messages[0], json!({"role": "system", "content": parts}));
        assert_eq!(messages[1]["tool_calls"][0]["function"]["arguments"], json!({"x": 1}));
        assert_eq!(messages[1].get("content"), None);
        assert_eq!(messages[2], json!({"role": "tool", "content": "2", "tool_call_id": "c1"}));
    }
}
