//! Items of a request as the messages that templates expect, and its format as chat completions name it.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use crate::error::{ApiError, Result};
use crate::fields::{Fields, wrong};
use crate::messages;

use super::tools::{arguments, full_name};

pub(super) const MAX_ITEMS: usize = 4096;
/// Longest id of an item that is kept, in bytes.
const MAX_ID: usize = 64;

/// What the kinds of items are called, what their ids begin with, and what is kept of them.
const KINDS: [(&str, &str, &[&str]); 6] = [
    ("message", "msg_", &["role", "content", "phase"]),
    ("function_call", "fc_", &["call_id", "namespace", "name", "arguments"]),
    ("function_call_output", "fco_", &["call_id", "output"]),
    ("custom_tool_call", "ctc_", &["call_id", "namespace", "name", "input"]),
    ("custom_tool_call_output", "ctco_", &["call_id", "output"]),
    ("reasoning", "rs_", &["summary", "content", "encrypted_content"]),
];

/// The messages of `past` items and of those that `input` adds; the latter come as items too, each with an id.
pub(super) fn read(
    past: &[Value],
    input: Value,
    name: impl Fn(&str) -> String,
) -> Result<(Vec<Value>, Vec<Value>)> {
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
    let mut all = Vec::new();
    for (i, item) in past.iter().enumerate() {
        add(&mut all, &format!("previous[{i}]"), item.clone())?;
    }
    let mut ids: HashSet<String> =
        past.iter().filter_map(|item| item["id"].as_str().map(str::to_owned)).collect();
    let mut clean = Vec::with_capacity(items.len());
    for (i, mut item) in items.into_iter().enumerate() {
        let kind = add(&mut all, &format!("input[{i}]"), item.clone())?;
        // Pages go by ids, so no two are the same, and all can stand in a query.
        let id = item["id"].as_str().filter(|id| is_plain(id) && !ids.contains(*id));
        let prefix = KINDS.iter().find(|(known, ..)| *known == kind).map_or("", |kind| kind.1);
        let id = id.map_or_else(|| name(prefix), str::to_owned);
        ids.insert(id.clone());
        item["id"] = id.into();
        clean.push(kept(kind, item));
    }
    Ok((all, clean))
}

/// The id of another item, where one is only that.
pub(super) fn reference(path: &str, item: &Value) -> Result<Option<String>> {
    let is_bare = || item["type"].is_null() && item["role"].is_null() && item["id"].is_string();
    if item["type"] != "item_reference" && !is_bare() {
        return Ok(None);
    }
    let mut fields = Fields::at(path, item.clone())?;
    fields.take("type");
    let id = fields.text("id")?;
    let id = fields.required("id", id)?;
    fields.finish()?;
    Ok(Some(id))
}

/// Whether an item keeps the id that its client gave it; another is named here.
fn is_plain(id: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:".contains(&byte);
    (1..=MAX_ID).contains(&id.len()) && id.bytes().all(is_plain)
}

/// What is kept of an item that was read, its text in parts.
fn kept(kind: &str, mut item: Value) -> Value {
    let Some((_, _, fields)) = KINDS.iter().find(|(known, ..)| *known == kind) else { return item };
    let mut kept = Map::new();
    kept.insert("id".into(), item["id"].take());
    kept.insert("type".into(), kind.into());
    kept.insert("status".into(), item["status"].as_str().unwrap_or("completed").into());
    for field in *fields {
        match item[*field].take() {
            Value::Null => {}
            Value::String(text) if *field == "content" => {
                let part = if kept.get("role").is_some_and(|role| role == "assistant") {
                    json!({"type": "output_text", "text": text, "annotations": []})
                } else {
                    json!({"type": "input_text", "text": text})
                };
                kept.insert("content".into(), json!([part]));
            }
            value => {
                kept.insert((*field).into(), value);
            }
        }
    }
    kept.into()
}

/// Adds what an item says to the messages; returns its kind.
fn add(all: &mut Vec<Value>, path: &str, item: Value) -> Result<&'static str> {
    let mut fields = Fields::at(path, item)?;
    // What the answers here have, and no template.
    for name in ["id", "status", "phase", "encrypted_content"] {
        fields.take(name);
    }
    let kind = fields.word("type", &KINDS.map(|(kind, ..)| kind))?.unwrap_or("message");
    match kind {
        "function_call" | "custom_tool_call" => {
            let id = fields.text("call_id")?;
            let name = fields.text("name")?;
            let name = fields.required("name", name)?;
            let name = full_name(fields.text("namespace")?.as_deref(), &name);
            let arguments = if kind == "function_call" {
                fields.take("arguments").unwrap_or_else(|| "{}".into())
            } else {
                let input = fields.text("input")?;
                arguments(&fields.required("input", input)?)
            };
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
        "function_call_output" | "custom_tool_call_output" => {
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
    Ok(kind)
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
        let (all, items) = read(
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
                {"type": "function_call", "call_id": "c3", "namespace": "n", "name": "f", "arguments": "{}"},
                {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c4", "name": "patch", "input": "+\"a\"\n"},
                {"type": "custom_tool_call_output", "id": "rs_1", "call_id": "c4", "output": "Done"}
            ]),
            {
                let count = std::cell::Cell::new(0);
                move |prefix| format!("{prefix}new{}", count.replace(count.get() + 1))
            },
        )
        .unwrap();
        let ids: Vec<&str> = items.iter().map(|item| item["id"].as_str().unwrap()).collect();
        let new = [
            "rs_1",
            "msg_1",
            "fc_new0",
            "fc_new1",
            "fco_new2",
            "fco_new3",
            "msg_new4",
            "rs_new5",
            "fc_new6",
            "ctc_1",
            "ctco_new7",
        ];
        assert_eq!(ids, new);
        assert_eq!(
            items[6],
            json!({"id": "msg_new4", "type": "message", "status": "completed", "role": "user", "content": [{"type": "input_text", "text": "And?"}]})
        );
        // They say the same when they are read again.
        let again: Vec<Value> =
            [json!({"role": "user", "content": "Hi"})].into_iter().chain(items).collect();
        let (last, _) =
            read(&again[..again.len() - 1], json!([again.last().unwrap()]), str::to_owned).unwrap();
        assert_eq!(last, all);
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
                 "tool_calls": [call("c3", "n.f", json!({})), call("c4", "patch", json!({"input": "+\"a\"\n"}))]},
                {"role": "tool", "content": "Done", "tool_call_id": "c4"}
            ])
        );
    }

    #[test]
    fn an_item_keeps_its_id_where_that_is_plain() {
        let item = |id: &Value| json!({"id": id, "role": "user", "content": "x"});
        let id_of = |id: &Value| {
            let (_, items) = read(&[], json!([item(id)]), |prefix| format!("{prefix}new")).unwrap();
            items[0]["id"].clone()
        };
        for id in [json!("msg_1"), json!("a.b:c-D"), json!("x".repeat(MAX_ID))] {
            assert_eq!(id_of(&id), id);
        }
        let long = json!("x".repeat(MAX_ID + 1));
        for id in
            [json!(""), json!("a b"), json!("a\u{1b}[2J"), json!("ü"), json!("a&b"), json!(1), long]
        {
            assert_eq!(id_of(&id), "msg_new", "{id}");
        }
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
            (json!([{"type": "custom_tool_call", "name": "f"}]), "input[0].input"),
            (json!([{"type": "custom_tool_call", "name": "f", "input": {}}]), "input[0].input"),
            (json!([{"type": "custom_tool_call_output", "output": 1}]), "input[0].output"),
        ] {
            let error = read(&[], input.clone(), str::to_owned).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field), "{input}");
        }
    }
}
