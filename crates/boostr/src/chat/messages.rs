//! Messages as clients and data sets have them, in the one form that templates are given.
//!
//! The server and training read messages by [`normalized`], so that a model learns what it is asked later.

use std::fmt;

use serde_json::{Map, Value, json};

/// What is wrong with a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessageError {
    /// Its number, from 0 on.
    pub index: usize,
    /// The field that is wrong: `content`, `content[1].type`, `tool_calls[0].function.name`.
    pub field: String,
    /// What was expected and found.
    pub reason: String,
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "message {}: `{}`: {}", self.index + 1, self.field, self.reason)
    }
}

impl std::error::Error for MessageError {}

/// Names that reasoning has, the first that is there counts.
const REASONING: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];

type Result<T, E = (String, String)> = std::result::Result<T, E>;

/// Messages in the form that templates know. Fields that are not named here stay as they are.
///
/// | given | becomes |
/// |---|---|
/// | role `developer` | `system` |
/// | `content`: a text, or a list of parts of type `text`, `input_text`, `output_text`, or plain texts | a text, or a list of `{"type": "text", "text"}` |
/// | `content` of a tool: an object | its JSON as text |
/// | parts of type `refusal` | text |
/// | parts of type `thinking`, `reasoning` | `reasoning_content`, unless the message has reasoning |
/// | `content` null or missing, of an assistant or beside calls | no `content`, or the text of `refusal` |
/// | `function_call` | `tool_calls` |
/// | `arguments` of a call: JSON of an object as text | the object |
/// | `arguments` missing, empty or `null` | `{}` |
/// | other `arguments` | the text as it is: the model wrote it |
/// | `audio`, and what is `null` | left out |
///
/// # Errors
///
/// [`MessageError`] for what no template could be given: parts that are no text, a call without a name, content of
/// another type, none of a user.
///
/// ```
/// use boostr::chat::normalized;
/// use serde_json::json;
///
/// let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
/// let messages = normalized(&[json!({"role": "assistant", "content": null, "tool_calls": [call]})]).unwrap();
/// assert_eq!(messages[0]["tool_calls"][0]["function"]["arguments"], json!({"a": 1}));
/// assert!(messages[0].get("content").is_none());
/// ```
pub fn normalized(messages: &[Value]) -> Result<Vec<Value>, MessageError> {
    let messages = messages.iter().enumerate();
    messages
        .map(|(index, message)| {
            one(message).map_err(|(field, reason)| MessageError { index, field, reason })
        })
        .collect()
}

fn wrong<T>(field: impl Into<String>, reason: impl Into<String>) -> Result<T> {
    Err((field.into(), reason.into()))
}

/// What kind of value it is, for messages.
fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

fn one(message: &Value) -> Result<Value> {
    let Some(fields) = message.as_object() else {
        return wrong("", format!("expected an object, found {}", kind_of(message)));
    };
    let mut out: Map<String, Value> = fields
        .iter()
        .filter(|(name, value)| {
            !value.is_null() && !matches!(name.as_str(), "audio" | "refusal" | "function_call")
        })
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    let role = match out.get_mut("role") {
        Some(Value::String(role)) => {
            if role == "developer" {
                "system".clone_into(role);
            }
            role.clone()
        }
        // Some data sets have roles of their own, and templates that know them.
        _ => String::new(),
    };
    let is_assistant = role == "assistant";

    let calls = match (out.get("tool_calls"), fields.get("function_call")) {
        (Some(Value::Array(calls)), None | Some(Value::Null)) => {
            let calls = calls.iter().enumerate();
            calls
                .map(|(i, call)| tool_call(&format!("tool_calls[{i}]"), call))
                .collect::<Result<Vec<_>>>()?
        }
        (None, Some(function @ Value::Object(_))) => {
            vec![json!({"type": "function", "function": called("function_call", function)?})]
        }
        (None, None | Some(Value::Null)) => Vec::new(),
        (Some(Value::Array(calls)), Some(_)) if calls.is_empty() => Vec::new(),
        (Some(Value::Array(_)), Some(_)) => {
            return wrong("function_call", "not together with `tool_calls`");
        }
        (Some(other), _) => {
            return wrong("tool_calls", format!("expected an array, found {}", kind_of(other)));
        }
        (None, Some(other)) => {
            return wrong("function_call", format!("expected an object, found {}", kind_of(other)));
        }
    };
    if !calls.is_empty() && !is_assistant {
        return wrong("tool_calls", "only the assistant calls tools");
    }

    let mut reasoning = None;
    let content = match out.get("content") {
        None => match fields.get("refusal").and_then(Value::as_str) {
            Some(refusal) => Some(refusal.into()),
            None if is_assistant || !calls.is_empty() || role.is_empty() => None,
            None => return wrong("content", "expected a string or an array of parts, found null"),
        },
        Some(Value::String(_)) => out.get("content").cloned(),
        Some(Value::Array(parts)) => {
            let mut texts = Vec::with_capacity(parts.len());
            for (i, part) in parts.iter().enumerate() {
                match read_part(&format!("content[{i}]"), part)? {
                    Part::Text(text) => texts.push(json!({"type": "text", "text": text})),
                    Part::Reasoning(text) => {
                        let all: &mut String = reasoning.get_or_insert_default();
                        all.push_str(if all.is_empty() { "" } else { "\n" });
                        all.push_str(&text);
                    }
                }
            }
            // What was reasoning alone says nothing.
            (!texts.is_empty() || !is_assistant).then(|| texts.into())
        }
        // What a function gives back is often an object.
        Some(object @ Value::Object(_)) if role == "tool" => Some(object.to_string().into()),
        Some(other) => {
            let found = kind_of(other);
            return wrong(
                "content",
                format!("expected a string or an array of parts, found {found}"),
            );
        }
    };
    match content {
        Some(content) => {
            out.insert("content".to_owned(), content);
        }
        None => {
            out.shift_remove("content");
        }
    }
    if calls.is_empty() {
        out.shift_remove("tool_calls");
    } else {
        out.insert("tool_calls".to_owned(), calls.into());
    }
    if let Some(reasoning) =
        reasoning.filter(|_| !REASONING.iter().any(|name| out.contains_key(*name)))
    {
        out.insert(REASONING[0].to_owned(), reasoning.into());
    }
    Ok(out.into())
}

enum Part {
    Text(String),
    Reasoning(String),
}

fn read_part(path: &str, part: &Value) -> Result<Part> {
    if let Value::String(text) = part {
        return Ok(Part::Text(text.clone()));
    }
    if !part.is_object() {
        return wrong(path, format!("expected an object, found {}", kind_of(part)));
    }
    let text = |name: &str| match part.get(name) {
        Some(Value::String(text)) => Ok(text.clone()),
        other => {
            let found = other.map_or("nothing", kind_of);
            wrong(format!("{path}.{name}"), format!("expected a string, found {found}"))
        }
    };
    match part.get("type") {
        None | Some(Value::Null) => text("text").map(Part::Text),
        Some(Value::String(kind)) => match kind.as_str() {
            "text" | "input_text" | "output_text" => text("text").map(Part::Text),
            "refusal" => text("refusal").map(Part::Text),
            "thinking" | "reasoning" | "reasoning_text" | "summary_text" => {
                Ok(Part::Reasoning(reasoning_of(part)))
            }
            // What a model thought and does not show.
            "redacted_thinking" => Ok(Part::Reasoning(String::new())),
            "image_url" | "input_image" | "image" | "input_audio" | "audio" | "file"
            | "input_file" | "video" | "video_url" => wrong(
                format!("{path}.type"),
                format!("a part of type `{kind}`: this model takes text only"),
            ),
            _ => wrong(format!("{path}.type"), "expected `text`"),
        },
        Some(other) => {
            wrong(format!("{path}.type"), format!("expected a string, found {}", kind_of(other)))
        }
    }
}

/// The text of a thought, under the names that it has: a text, or parts with texts.
fn reasoning_of(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().map(reasoning_of).collect::<Vec<_>>().join("\n"),
        Value::Object(fields) => ["thinking", "reasoning", "text", "content", "summary"]
            .iter()
            .find_map(|name| fields.get(*name))
            .map_or_else(String::new, reasoning_of),
        _ => String::new(),
    }
}

fn tool_call(path: &str, call: &Value) -> Result<Value> {
    let Some(function @ Value::Object(_)) = call.get("function") else {
        let found = call.get("function").map_or("nothing", kind_of);
        return wrong(format!("{path}.function"), format!("expected an object, found {found}"));
    };
    let mut out = Map::new();
    match call.get("id") {
        Some(id @ Value::String(_)) => {
            out.insert("id".to_owned(), id.clone());
        }
        None | Some(Value::Null) => {}
        Some(other) => {
            return wrong(
                format!("{path}.id"),
                format!("expected a string, found {}", kind_of(other)),
            );
        }
    }
    out.insert("type".to_owned(), "function".into());
    out.insert("function".to_owned(), called(&format!("{path}.function"), function)?);
    Ok(out.into())
}

/// The name and the arguments of a call.
fn called(path: &str, function: &Value) -> Result<Value> {
    let Some(name) = function.get("name").and_then(Value::as_str) else {
        let found = function.get("name").map_or("nothing", kind_of);
        return wrong(format!("{path}.name"), format!("expected a string, found {found}"));
    };
    let arguments = match function.get("arguments") {
        None | Some(Value::Null) => json!({}),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(object @ Value::Object(_)) => object,
            Ok(Value::Null) => json!({}),
            _ if text.trim().is_empty() => json!({}),
            // Malformed, by another model or cut off: the conversation goes on.
            _ => text.as_str().into(),
        },
        Some(object @ Value::Object(_)) => object.clone(),
        Some(other) => other.to_string().into(),
    };
    Ok(json!({"name": name, "arguments": arguments}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_of(message: Value) -> Value {
        normalized(&[message]).unwrap().remove(0)
    }

    #[test]
    fn what_no_template_could_read_is_named() {
        for (message, field) in [
            (json!([1]), ""),
            (json!({"role": "user"}), "content"),
            (json!({"role": "user", "content": null}), "content"),
            (json!({"role": "assistant", "content": 1}), "content"),
            (json!({"role": "user", "content": [1]}), "content[0]"),
            (json!({"role": "user", "content": ["a", {"type": "text"}]}), "content[1].text"),
            (json!({"role": "user", "content": [{"type": "image_url"}]}), "content[0].type"),
            (json!({"role": "user", "content": [{"type": "odd"}]}), "content[0].type"),
            (
                json!({"role": "user", "content": "x", "tool_calls": [
                {"function": {"name": "f"}}]}),
                "tool_calls",
            ),
            (json!({"role": "assistant", "tool_calls": 1}), "tool_calls"),
            (json!({"role": "assistant", "tool_calls": [{}]}), "tool_calls[0].function"),
            (
                json!({"role": "assistant", "tool_calls": [{"function": {}}]}),
                "tool_calls[0].function.name",
            ),
            (json!({"role": "assistant", "function_call": "f"}), "function_call"),
        ] {
            let error = normalized(&[json!({"role": "user", "content": ""}), message.clone()]);
            let error = error.expect_err(&message.to_string());
            assert_eq!((error.index, error.field.as_str()), (1, field), "{message}: {error}");
        }
    }

    #[test]
    fn p_assistant_null_content_is_no_content_in_all_its_forms() {
        let bare = json!({"role": "assistant"});
        for message in [
            json!({"role": "assistant"}),
            json!({"role": "assistant", "content": null}),
            json!({"role": "assistant", "content": null, "tool_calls": []}),
            json!({"role": "assistant", "content": null, "tool_calls": null, "function_call": null}),
            json!({"role": "assistant", "content": null, "refusal": null, "audio": {"id": "a"}}),
            json!({"role": "assistant", "content": []}),
        ] {
            assert_eq!(one_of(message.clone()), bare, "{message}");
        }
        let reasoned = json!({"role": "assistant", "reasoning_content": "hm"});
        for message in [
            json!({"role": "assistant", "content": null, "reasoning_content": "hm"}),
            json!({"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}),
            json!({"role": "assistant", "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]}),
            json!({"role": "assistant", "content": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}]}),
        ] {
            assert_eq!(one_of(message.clone()), reasoned, "{message}");
        }
        for message in [
            json!({"role": "assistant", "content": null, "refusal": "No."}),
            json!({"role": "assistant", "content": "No.", "refusal": null}),
        ] {
            assert_eq!(
                one_of(message.clone()),
                json!({"role": "assistant", "content": "No."}),
                "{message}"
            );
        }
        let parts =
            json!({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]});
        assert_eq!(one_of(parts)["content"], json!([{"type": "text", "text": "No."}]));
    }

    #[test]
    fn arguments_become_objects_and_malformed_ones_stay_text() {
        let call = |arguments: Value| {
            let call = json!({"id": "1", "function": {"name": "f", "arguments": arguments}});
            let message = one_of(json!({"role": "assistant", "tool_calls": [call]}));
            message["tool_calls"][0]["function"]["arguments"].clone()
        };
        for (given, read) in [
            (json!("{\"b\": 1, \"a\": [2]}"), json!({"b": 1, "a": [2]})),
            (json!({"a": 1}), json!({"a": 1})),
            (json!(""), json!({})),
            (json!(" "), json!({})),
            (json!("null"), json!({})),
            (json!(null), json!({})),
            (json!("[]"), json!("[]")),
            (json!("{\"a\": "), json!("{\"a\": ")),
            (json!("{\"a\": 1} {}"), json!("{\"a\": 1} {}")),
            (json!([1]), json!("[1]")),
        ] {
            assert_eq!(call(given.clone()), read, "{given}");
        }
        let old = json!({"role": "assistant", "content": null, "function_call": {"name": "f", "arguments": "{}"}});
        let new = json!({"role": "assistant", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {}}}]});
        assert_eq!(one_of(old), new);
    }

    #[test]
    fn other_fields_stay() {
        let result = json!({"role": "tool", "content": {"b": 1, "a": null}});
        assert_eq!(one_of(result)["content"], r#"{"b":1,"a":null}"#);
        let message = json!({"role": "developer", "content": [{"type": "input_text", "text": "a", "cache": 1}, "b"], "name": "n", "weight": 0});
        let read = json!({"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n", "weight": 0});
        assert_eq!(one_of(message), read);
        assert_eq!(
            one_of(json!({"from": "human", "value": "x"})),
            json!({"from": "human", "value": "x"})
        );
    }
}
