//! Items of a request as the messages that templates expect, and its tools and format as chat completions name them.

use serde_json::{Map, Value, json};

use crate::error::{ApiError, Result};
use crate::fields::{self, Fields, wrong};
use crate::messages;

const MAX_ITEMS: usize = 4096;

/// `past`, and what `input` adds to it.
pub(super) fn messages(past: &[Value], input: Value) -> Result<Vec<Value>> {
    let items = match input {
        Value::String(text) => vec![json!({"role": "user", "content": text})],
        Value::Array(items) => items,
        other => return Err(wrong("input", "a string or an array of items", &other)),
    };
    if items.is_empty() || items.len() + past.len() > MAX_ITEMS {
        let most = MAX_ITEMS - past.len().min(MAX_ITEMS);
        let reason = format!("expected 1 to {most} items, found {}", items.len());
        return Err(ApiError::field("input", reason));
    }
    let mut all = past.to_vec();
    for (i, item) in items.into_iter().enumerate() {
        add(&mut all, &format!("input[{i}]"), item)?;
    }
    Ok(all)
}

fn add(all: &mut Vec<Value>, path: &str, item: Value) -> Result<()> {
    let mut fields = Fields::at(path, item)?;
    // What the answers here have, and no template.
    for name in ["id", "status", "phase", "encrypted_content"] {
        fields.take(name);
    }
    let kinds = ["message", "function_call", "function_call_output", "reasoning"];
    match fields.word("type", &kinds)?.unwrap_or("message") {
        "function_call" => {
            let id = fields.text("call_id")?;
            let name = fields.text("name")?;
            let name = fields.required("name", name)?;
            let arguments = fields.take("arguments").unwrap_or_else(|| "{}".into());
            let function = json!({"name": name, "arguments": arguments});
            let call = json!({"id": id, "type": "function", "function": function});
            let message = json!({"role": "assistant", "content": "", "tool_calls": [call]});
            let read = messages::one(path, message).map_err(|error| {
                error.renamed(
                    &format!("{path}.tool_calls[0].function.arguments"),
                    &fields.name("arguments"),
                )
            })?;
            // What the assistant says and all that it calls at once is one message.
            let last = all.last_mut().filter(|last| last["role"] == "assistant");
            match (last.and_then(Value::as_object_mut), &read["tool_calls"]) {
                (Some(last), Value::Array(calls)) => {
                    let before = last.entry("tool_calls").or_insert_with(|| json!([]));
                    if let Some(before) = before.as_array_mut() {
                        before.extend(calls.iter().cloned());
                    }
                }
                _ => all.push(read),
            }
        }
        "function_call_output" => {
            let id = fields.text("call_id")?;
            let output = fields.take("output").unwrap_or_else(|| "".into());
            let message = json!({"role": "tool", "tool_call_id": id, "content": output});
            let read = messages::one(path, message)
                .map_err(|error| error.renamed(&fields.name("content"), &fields.name("output")))?;
            all.push(read);
        }
        "reasoning" => {
            let mut thought = String::new();
            for name in ["content", "summary"] {
                let parts = fields.list(name)?.unwrap_or_default();
                if !thought.is_empty() {
                    continue;
                }
                let texts = parts.iter().filter_map(|part| part.get("text")?.as_str());
                thought = texts.collect::<Vec<_>>().join("\n");
            }
            // One that is encrypted is not ours.
            if !thought.is_empty() {
                all.push(json!({"role": "assistant", "content": "", "reasoning_content": thought}));
            }
        }
        _ => {
            let role = fields.take("role");
            let content = fields.take("content");
            let mut message = messages::one(path, json!({"role": role, "content": content}))?;
            // A thought and the words after it are one message.
            if message["role"] == "assistant"
                && let Some(last) = all.last()
                && last["role"] == "assistant"
                && last["content"] == ""
                && last.get("tool_calls").is_none()
            {
                message["reasoning_content"] = last["reasoning_content"].clone();
                all.pop();
            }
            all.push(message);
        }
    }
    fields.finish()?;
    Ok(())
}

/// Tools as chat completions have them. Those that are no functions are left out: nobody here would run them.
pub(super) fn tools(tools: Vec<Value>) -> Result<Vec<Value>> {
    let mut all = Vec::new();
    for (i, tool) in tools.into_iter().enumerate() {
        let mut fields = Fields::at(&format!("tools[{i}]"), tool)?;
        let kind = fields.text("type")?;
        if fields.required("type", kind)? != "function" {
            fields::ignore(vec![format!("tools[{i}]")]);
            continue;
        }
        let function = match fields.object("function")? {
            Some(function) => function,
            None => {
                let of = |name: &str, value: Option<Value>| Some((name.to_owned(), value?));
                let names = ["name", "description", "parameters", "strict"];
                names.iter().filter_map(|name| of(name, fields.take(name))).collect::<Map<_, _>>()
            }
        };
        fields.finish()?;
        all.push(json!({"type": "function", "function": function}));
    }
    Ok(all)
}

/// A choice as chat completions have it.
pub(super) fn tool_choice(choice: Value) -> Value {
    match choice.get("name") {
        Some(name) if choice["type"] == "function" => {
            json!({"type": "function", "function": {"name": name}})
        }
        _ => choice,
    }
}

/// The `format` in `text` as chat completions have it.
pub(super) fn format(text: Option<Map<String, Value>>) -> Result<Option<Value>> {
    let Some(text) = text else { return Ok(None) };
    let mut text = Fields::at("text", text.into())?;
    let Some(format) = text.object("format")? else { return Ok(None) };
    let kind = format.get("type").cloned().unwrap_or_default();
    if kind != "json_schema" {
        return Ok(Some(format.into()));
    }
    let schema = match format.get("json_schema") {
        Some(schema) => schema.clone(),
        None => {
            let names = ["name", "schema", "strict"];
            let of = |name: &&str| Some(((*name).to_owned(), format.get(*name)?.clone()));
            names.iter().filter_map(of).collect::<Map<_, _>>().into()
        }
    };
    Ok(Some(json!({"type": "json_schema", "json_schema": schema})))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_become_messages() {
        let all = messages(
            &[json!({"role": "user", "content": "Hi"})],
            json!([
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "So:", "annotations": []}]},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"x\": 1}"},
                {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
                {"type": "function_call_output", "call_id": "c1", "output": "2"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
                {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Well."}], "encrypted_content": "x"},
                {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"}
            ]),
        )
        .unwrap();
        let call = |id: &str, name: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        assert_eq!(
            Value::from(all),
            json!([
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": [{"type": "text", "text": "So:"}], "reasoning_content": "Hm.",
                 "tool_calls": [call("c1", "f", json!({"x": 1})), call("c2", "g", json!({}))]},
                {"role": "tool", "content": "2", "tool_call_id": "c1"},
                {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "c2"},
                {"role": "user", "content": [{"type": "text", "text": "And?"}]},
                {"role": "assistant", "content": "", "reasoning_content": "Well.",
                 "tool_calls": [call("c3", "f", json!({}))]}
            ])
        );
    }

    #[test]
    fn what_is_no_item_is_named() {
        for (input, field) in [
            (json!(1), "input"),
            (json!([]), "input"),
            (json!([1]), "input[0]"),
            (json!([{"type": "item_reference", "id": "x"}]), "input[0].type"),
            (json!([{"role": "wizard", "content": "x"}]), "input[0].role"),
            (json!([{"role": "user", "content": 1}]), "input[0].content"),
            (
                json!([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
                "input[0].content[0].type",
            ),
            (json!([{"type": "function_call", "call_id": "c"}]), "input[0].name"),
            (json!([{"type": "function_call_output", "output": 1}]), "input[0].output"),
        ] {
            let error = messages(&[], input.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field), "{input}");
        }
    }
}
