//! Messages of blocks as the messages that templates expect, and tools as chat completions name them.

use serde_json::{Map, Value, json};

use crate::error::{ApiError, Result};
use crate::fields::{self, Fields, wrong};
use crate::messages;

const MAX_MESSAGES: usize = 4096;

/// The text of a text or of blocks of texts.
pub(super) fn text(path: &str, content: Value) -> Result<String> {
    let blocks = match content {
        Value::String(text) => return Ok(text),
        Value::Array(blocks) => blocks,
        other => return Err(wrong(path, "a string or an array of blocks", &other)),
    };
    let mut texts = Vec::with_capacity(blocks.len());
    for (i, block) in blocks.into_iter().enumerate() {
        let mut fields = Fields::at(&format!("{path}[{i}]"), block)?;
        let kind = fields.text("type")?;
        match fields.required("type", kind)?.as_str() {
            "text" => {
                let text = fields.text("text")?;
                texts.push(fields.required("text", text)?);
            }
            kind @ ("image" | "document") => {
                let reason = format!("a block of type `{kind}`: this model takes text only");
                return Err(ApiError::field(fields.name("type"), reason));
            }
            _ => return Err(ApiError::field(fields.name("type"), "expected `text`")),
        }
    }
    Ok(texts.join("\n"))
}

pub(super) fn messages(given: Vec<Value>) -> Result<Vec<Value>> {
    if !(1..=MAX_MESSAGES).contains(&given.len()) {
        let reason = format!("expected 1 to {MAX_MESSAGES} messages, found {}", given.len());
        return Err(ApiError::field("messages", reason));
    }
    let mut all = Vec::with_capacity(given.len());
    for (i, message) in given.into_iter().enumerate() {
        let path = format!("messages[{i}]");
        let mut fields = Fields::at(&path, message)?;
        let role = fields.word("role", &["user", "assistant", "system"])?;
        let role = fields.required("role", role)?;
        let name = fields.name("content");
        let content = fields.take("content");
        let content = fields.required("content", content)?;
        fields.finish()?;
        match content {
            Value::Array(blocks) if role == "assistant" => all.push(said(&name, blocks)?),
            Value::Array(blocks) if role == "user" => given_back(&mut all, &name, blocks)?,
            content => {
                let content = text(&name, content)?;
                all.push(messages::one(&path, json!({"role": role, "content": content}))?);
            }
        }
    }
    Ok(all)
}

/// What the assistant said: one message.
fn said(path: &str, blocks: Vec<Value>) -> Result<Value> {
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (i, block) in blocks.into_iter().enumerate() {
        let mut fields = Fields::at(&format!("{path}[{i}]"), block)?;
        let kinds = ["text", "thinking", "redacted_thinking", "tool_use"];
        let kind = fields.word("type", &kinds)?;
        match fields.required("type", kind)? {
            "text" => {
                let text = fields.text("text")?;
                texts.push(fields.required("text", text)?);
            }
            "thinking" => thoughts.extend(fields.text("thinking")?),
            "tool_use" => {
                let (id, name) = (fields.text("id")?, fields.text("name")?);
                let name = fields.required("name", name)?;
                let input = fields.object("input")?.unwrap_or_default();
                let function = json!({"name": name, "arguments": input});
                calls.push(json!({"id": id, "type": "function", "function": function}));
            }
            // Only its maker can read it.
            _ => {}
        }
    }
    let mut message = json!({"role": "assistant", "content": texts.join("\n")});
    if !thoughts.is_empty() {
        message["reasoning_content"] = thoughts.join("\n").into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    let path = path.strip_suffix(".content").unwrap_or(path);
    messages::one(path, message)
}

/// What a user says and what tools gave, in their order.
fn given_back(all: &mut Vec<Value>, path: &str, blocks: Vec<Value>) -> Result<()> {
    let mut texts: Vec<Value> = Vec::new();
    // Parts stay parts: the template may read them.
    let user = |texts: &mut Vec<Value>| {
        let content = match std::mem::take(texts).as_mut_slice() {
            [] => return None,
            [one] => one["text"].take(),
            parts => Value::from(parts.to_vec()),
        };
        Some(json!({"role": "user", "content": content}))
    };
    let is_empty = blocks.is_empty();
    for (i, block) in blocks.into_iter().enumerate() {
        if block["type"] != "tool_result" {
            // Checked one by one, so that an error names the block.
            let path = format!("{path}[{i}]");
            let of = |error: ApiError| error.renamed(&format!("{path}[0]"), &path);
            let text = text(&path, json!([block])).map_err(of)?;
            texts.push(json!({"type": "text", "text": text}));
            continue;
        }
        all.extend(user(&mut texts));
        let mut fields = Fields::at(&format!("{path}[{i}]"), block)?;
        let id = fields.text("tool_use_id")?;
        let id = fields.required("tool_use_id", id)?;
        let name = fields.name("content");
        let content = fields.take("content").map(|content| text(&name, content)).transpose()?;
        let content = content.unwrap_or_default();
        all.push(json!({"role": "tool", "tool_call_id": id, "content": content}));
    }
    if is_empty {
        texts.push(json!({"type": "text", "text": ""}));
    }
    all.extend(user(&mut texts));
    Ok(())
}

/// Tools as chat completions have them. Those that only Anthropic runs are left out.
pub(super) fn tools(tools: Vec<Value>) -> Result<Vec<Value>> {
    let mut all = Vec::new();
    for (i, tool) in tools.into_iter().enumerate() {
        let mut fields = Fields::at(&format!("tools[{i}]"), tool)?;
        let kind = fields.text("type")?;
        if kind.is_some_and(|kind| kind != "custom") {
            fields::ignore(vec![format!("tools[{i}]")]);
            continue;
        }
        let name = fields.text("name")?;
        let schema = fields.object("input_schema")?;
        let mut function = Map::new();
        function.insert("name".into(), fields.required("name", name)?.into());
        if let Some(description) = fields.text("description")? {
            function.insert("description".into(), description.into());
        }
        fields.take("cache_control");
        function.insert("parameters".into(), fields.required("input_schema", schema)?.into());
        fields.finish()?;
        all.push(json!({"type": "function", "function": function}));
    }
    Ok(all)
}

/// A choice as chat completions have it, and whether several tools may be called at once.
pub(super) fn tool_choice(choice: Option<Fields>) -> Result<(Value, bool)> {
    let Some(mut fields) = choice else { return Ok(("auto".into(), true)) };
    let kind = fields.word("type", &["auto", "any", "none", "tool"])?;
    let choice = match fields.required("type", kind)? {
        "any" => "required".into(),
        "tool" => {
            let name = fields.text("name")?;
            let name = fields.required("name", name)?;
            json!({"type": "function", "function": {"name": name}})
        }
        other => other.into(),
    };
    let is_single = fields.boolean("disable_parallel_tool_use")?.unwrap_or(false);
    fields.finish()?;
    Ok((choice, !is_single))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(given: &Value) -> Result<Vec<Value>> {
        messages(given.as_array().unwrap().clone())
    }

    #[test]
    fn blocks_become_messages() {
        let all = read(&json!([
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "So:"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                {"type": "tool_use", "id": "t2", "name": "g", "input": {}}
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "2"},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": true, "content": [
                    {"type": "text", "text": "3"}
                ]},
                {"type": "text", "text": "And", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "now?"}
            ]}
        ]))
        .unwrap();
        let call = |id: &str, name: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        assert_eq!(
            Value::from(all),
            json!([
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "So:", "reasoning_content": "Hm.",
                 "tool_calls": [call("t1", "f", json!({"x": 1})), call("t2", "g", json!({}))]},
                {"role": "tool", "content": "2", "tool_call_id": "t1"},
                {"role": "tool", "content": "3", "tool_call_id": "t2"},
                {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "now?"}]}
            ])
        );
    }

    #[test]
    fn what_is_no_message_is_named() {
        for (given, field) in [
            (json!([]), "messages"),
            (json!([1]), "messages[0]"),
            (json!([{"role": "tool", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": 1}]), "messages[0].content"),
            (json!([{"role": "user", "content": [1]}]), "messages[0].content[0]"),
            (
                json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]),
                "messages[0].content[1].type",
            ),
            (
                json!([{"role": "user", "content": [{"type": "tool_result"}]}]),
                "messages[0].content[0].tool_use_id",
            ),
            (
                json!([{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]),
                "messages[0].content[0].name",
            ),
        ] {
            let error = read(&given).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field), "{given}");
        }
    }
}
