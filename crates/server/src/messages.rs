//! The messages of a conversation as they come from a client, checked, and as templates expect them.

use serde_json::{Map, Value, json};

use crate::error::{ApiError, Result};
use crate::fields::Fields;

/// Roles become control tokens in many templates, so no others are let through.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];
const MAX_MESSAGES: usize = 4096;
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
    // The name that OpenAI gave to what templates call system.
    let role = if role == "developer" { "system" } else { role };
    let mut out = Map::new();
    out.insert("role".into(), role.into());
    let calls = match fields.list("tool_calls")? {
        Some(calls) if role == "assistant" => {
            let name = fields.name("tool_calls");
            let calls = calls.into_iter().enumerate();
            calls
                .map(|(i, call)| tool_call(&format!("{name}[{i}]"), call))
                .collect::<Result<_>>()?
        }
        Some(_) => {
            let reason = "only the assistant calls tools";
            return Err(ApiError::field(fields.name("tool_calls"), reason));
        }
        None => Vec::new(),
    };
    let path = fields.name("content");
    match fields.take("content") {
        Some(content) => {
            out.insert("content".into(), text(&path, content)?.into());
        }
        // As transformers' templates have it, a call needs no words.
        None if !calls.is_empty() => {
            out.insert("content".into(), "".into());
        }
        None => {
            return Err(ApiError::field(
                path,
                "expected a string or an array of parts, found null",
            ));
        }
    }
    if !calls.is_empty() {
        out.insert("tool_calls".into(), calls.into());
    }
    for name in TEXTS {
        if let Some(text) = fields.text(name)? {
            out.insert(name.into(), text.into());
        }
    }
    fields.finish()?;
    Ok(out.into())
}

/// The text of a content: a string, or parts of which each is text. The texts of parts are joined by newlines.
fn text(path: &str, content: Value) -> Result<String> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => return Err(crate::fields::wrong(path, "a string or an array of parts", &other)),
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (i, part) in parts.into_iter().enumerate() {
        let mut fields = Fields::at(&format!("{path}[{i}]"), part)?;
        let kind = fields.text("type")?;
        match kind.as_deref() {
            Some("text" | "input_text" | "output_text") | None => {
                let text = fields.text("text")?;
                texts.push(fields.required("text", text)?);
            }
            Some(
                kind @ ("image_url" | "input_image" | "image" | "input_audio" | "file"
                | "video_url"),
            ) => {
                let reason = format!("a part of type `{kind}`: this model takes text only");
                return Err(ApiError::field(fields.name("type"), reason));
            }
            Some(_) => {
                return Err(ApiError::field(fields.name("type"), "expected `text`"));
            }
        }
    }
    Ok(texts.join("\n"))
}

/// A call as templates know it: arguments as an object, where the API has their JSON as text.
fn tool_call(path: &str, call: Value) -> Result<Value> {
    let mut fields = Fields::at(path, call)?;
    let id = fields.text("id")?.unwrap_or_default();
    let function = fields.fields("function")?;
    let mut function = fields.required("function", function)?;
    let name = function.text("name")?;
    let name = function.required("name", name)?;
    let arguments = match function.take("arguments") {
        None => json!({}),
        Some(Value::String(text)) if text.trim().is_empty() => json!({}),
        Some(Value::String(text)) => match serde_json::from_str(&text) {
            Ok(value @ Value::Object(_)) => value,
            _ => {
                let reason = "expected a JSON object as text";
                return Err(ApiError::field(function.name("arguments"), reason));
            }
        },
        Some(object @ Value::Object(_)) => object,
        Some(other) => {
            return Err(crate::fields::wrong(&function.name("arguments"), "JSON as text", &other));
        }
    };
    Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}))
}

#[cfg(test)]
mod tests {
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
            (json!([{"role": "user", "content": "x", "tool_calls": []}]), "messages[0].tool_calls"),
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
        assert_eq!(messages[0], json!({"role": "system", "content": "a\nb"}));
        assert_eq!(messages[1]["tool_calls"][0]["function"]["arguments"], json!({"x": 1}));
        assert_eq!(messages[1]["content"], "");
        assert_eq!(messages[2], json!({"role": "tool", "content": "2", "tool_call_id": "c1"}));
    }
}
