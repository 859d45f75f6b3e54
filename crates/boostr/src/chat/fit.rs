//! What a template reads, found by trying it, and conversations put in a form that it reads.
//!
//! Templates differ in what they know: some take contents as texts alone, some have never heard of tools. What one
//! does not read would be lost without a word, so it is put in another form first.

use std::time::SystemTime;

use serde_json::{Value, json};

use super::jinja::{Meter, Template};
use super::{ChatTemplate, Options, deep, variables};
use crate::error::{Error, Result};

/// Steps that a trial may take.
const TRIAL_FUEL: u64 = 200_000;

/// Roles whose contents are tried as parts.
const ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

/// Words that no template has.
const WORD: &str = "zq7word";
const TOOL: &str = "zq7tool";
const RESULT: &str = "zq7result";
/// An id that all templates take.
const ID: &str = "zq7callid";

/// How a template reads the arguments of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Calls {
    /// It does not show calls.
    Unread,
    /// As objects.
    Objects,
    /// As JSON in a text.
    Texts,
}

/// What a template reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reads {
    /// Content in parts, by role.
    parts: [bool; ROLES.len()],
    system: bool,
    tools: bool,
    calls: Calls,
    results: bool,
}

impl Reads {
    fn of(template: &Template, special: &serde_json::Map<String, Value>) -> Self {
        let text = |messages: Value, tools: Option<&Value>| {
            let options = Options {
                tools: tools.and_then(Value::as_array).cloned(),
                add_generation_prompt: true,
                ..Options::default()
            };
            let messages = messages.as_array().cloned().unwrap_or_default();
            let variables = variables(special, &messages, &options);
            let meter = Meter::new(TRIAL_FUEL);
            template.render(&variables, SystemTime::UNIX_EPOCH, false, &meter).unwrap_or_default()
        };
        let user = json!({"role": "user", "content": "Hi"});
        let tools = json!([{"type": "function", "function": {"name": TOOL, "description": "d", "parameters":
            {"type": "object", "properties": {"a": {"type": "string", "description": "d"}}, "required": ["a"]}}}]);
        let call = |content: Value, arguments: Value| {
            let call = json!({"id": ID, "type": "function", "function": {"name": TOOL, "arguments": arguments}});
            json!({"role": "assistant", "content": content, "tool_calls": [call]})
        };
        let result = |content: Value| json!({"role": "tool", "tool_call_id": ID, "name": TOOL, "content": content});
        let object = json!({"a": WORD});
        let said = json!({"role": "assistant", "content": "ok"});

        // A list that is shown as a whole has the word in quotes.
        let reads_parts = |text: String| {
            let quoted = [format!("'{WORD}'"), format!("\"{WORD}\""), format!("\\\"{WORD}")];
            text.contains(WORD) && !quoted.iter().any(|quoted| text.contains(quoted))
        };
        let parts = ROLES.map(|role| {
            let content = json!([{"type": "text", "text": WORD}]);
            let message = json!({"role": role, "content": content});
            let messages = match role {
                "system" => json!([message, user]),
                "user" => json!([message]),
                "assistant" => json!([user, message, user]),
                _ => json!([user, call("".into(), json!({"a": "b"})), result(content)]),
            };
            reads_parts(text(messages, (role == "tool").then_some(&tools)))
        });
        let system = json!({"role": "system", "content": WORD});
        let shows = |messages: Value, word: &str| {
            text(messages.clone(), Some(&tools)).contains(word)
                || text(messages, None).contains(word)
        };
        let calls = [(Calls::Objects, object.clone()), (Calls::Texts, object.to_string().into())];
        let calls = calls.into_iter().find(|(_, arguments)| {
            let first = call("".into(), arguments.clone());
            let bare = call(Value::Null, arguments.clone());
            [first, bare].into_iter().any(|call| {
                let messages = json!([user, call, result(RESULT.into()), said, user]);
                let shown = text(messages.clone(), Some(&tools)) + &text(messages, None);
                // A dict that is printed as Python does is none that a model has learned.
                shown.contains(WORD) && !shown.contains(&format!("{{'a': '{WORD}'}}"))
            })
        });
        let calls = calls.map_or(Calls::Unread, |(calls, _)| calls);
        let arguments = if calls == Calls::Texts { object.to_string().into() } else { object };
        let answered = json!([user, call("".into(), arguments), result(RESULT.into())]);
        Self {
            parts,
            system: shows(json!([system, user]), WORD),
            tools: text(json!([user]), Some(&tools)).contains(TOOL)
                || text(json!([system, user]), Some(&tools)).contains(TOOL),
            calls,
            results: shows(answered, RESULT),
        }
    }
}

impl ChatTemplate {
    /// The text of a conversation for a model: as [`render`](Self::render), of a conversation that the template reads.
    ///
    /// - Parts of a content are given as parts to a template that reads parts in messages of this role. For others the
    ///   texts are joined by newlines.
    /// - Tools that the template does not show are put into the system message: JSON lines between `<tools>` and
    ///   `</tools>`, and how to call them. Calls that it does not show become text,
    ///   `<tool_call>{"name": .., "arguments": ..}</tool_call>`; their results then are messages of the user, between
    ///   `<tool_response>` and `</tool_response>`.
    /// - Arguments are objects, or JSON in a text where the template reads that.
    /// - A template that fails over an assistant's missing content gets an empty text; one that fails over arguments
    ///   that are no object gets `{"arguments": TEXT}`.
    ///
    /// # Errors
    ///
    /// As [`render`](Self::render).
    ///
    /// ```
    /// use boostr::chat::{ChatTemplate, Options};
    /// use boostr::generation_config::SpecialTokens;
    /// use serde_json::json;
    ///
    /// let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
    /// let template = ChatTemplate::new("t", source, &SpecialTokens::default())?;
    /// let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    /// let messages = [json!({"role": "user", "content": parts})];
    /// assert_eq!(template.prompt(&messages, &Options::default())?, "<user>a\nb");
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn prompt(&self, messages: &[Value], options: &Options) -> Result<String> {
        let (messages, options) = self.fitted(messages, options)?;
        self.render(&messages, &options).or_else(|error| match repaired(&messages) {
            Some(messages) if is_of_template(&error) => self.render(&messages, &options),
            _ => Err(error),
        })
    }

    fn reads(&self, has_tools: bool) -> Result<Reads> {
        let (name, template) = self.template(has_tools)?;
        let mut known = self.reads.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(reads) = known.get(name) {
            return Ok(*reads);
        }
        let reads = deep(&self.path, || Reads::of(template, &self.special))?;
        known.insert(name, reads);
        Ok(reads)
    }

    /// A conversation in a form that the template reads.
    pub(super) fn fitted(
        &self,
        messages: &[Value],
        options: &Options,
    ) -> Result<(Vec<Value>, Options)> {
        let has = |name: &str| messages.iter().any(|message| message.get(name).is_some());
        let has_parts = messages.iter().any(|m| m.get("content").is_some_and(Value::is_array));
        let has_results = messages.iter().any(|message| role(message) == "tool");
        let has_tools = options.tools.as_ref().is_some_and(|tools| !tools.is_empty());
        let (mut messages, mut options) = (messages.to_vec(), options.clone());
        if has_parts || has("tool_calls") || has_results || has_tools {
            let reads = self.reads(options.tools.is_some())?;
            messages = with_contents(messages, reads);
            messages = with_calls(messages, reads);
            let are_lost = has_tools && !(reads.tools && self.shows_tools(&messages, &options));
            if let Some(tools) = options.tools.take_if(|_| are_lost) {
                messages = with_tools(messages, &tools, reads.system);
            }
        }
        Ok((messages, options))
    }

    /// Whether a template that reads tools shows them in this conversation: some show them with what a user says.
    fn shows_tools(&self, messages: &[Value], options: &Options) -> bool {
        if messages.iter().any(|message| role(message) == "user") {
            return true;
        }
        let without = Options { tools: None, ..options.clone() };
        match (self.render(messages, options), self.render(messages, &without)) {
            (Ok(with), Ok(without)) => with != without,
            // It fails over something else.
            _ => true,
        }
    }

    /// The same, in another form if the template fails over it.
    pub(super) fn tried(
        &self,
        messages: &[Value],
        options: &Options,
    ) -> Result<(Vec<Value>, Options)> {
        let (messages, options) = self.fitted(messages, options)?;
        let fails = || self.render(&messages, &options).is_err_and(|error| is_of_template(&error));
        let repaired = repaired(&messages).filter(|_| fails());
        Ok((repaired.unwrap_or(messages), options))
    }
}

fn role(message: &Value) -> &str {
    message.get("role").and_then(Value::as_str).unwrap_or_default()
}

/// The text of a content.
fn text_of(message: &Value) -> String {
    match message.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().filter_map(|part| part.get("text")?.as_str());
            texts.collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    }
}

/// Parts joined where they are not read.
fn with_contents(mut messages: Vec<Value>, reads: Reads) -> Vec<Value> {
    for message in &mut messages {
        let is_read =
            ROLES.iter().zip(reads.parts).any(|(name, read)| read && *name == role(message));
        let is_text = |part: &Value| part.get("text").is_some_and(Value::is_string);
        let parts = message.get("content").and_then(Value::as_array);
        if !is_read && parts.is_some_and(|parts| parts.iter().all(is_text)) {
            message["content"] = text_of(message).into();
        }
    }
    messages
}

/// Calls and their results as texts where they are not read.
fn with_calls(messages: Vec<Value>, reads: Reads) -> Vec<Value> {
    let mut all: Vec<Value> = Vec::with_capacity(messages.len());
    // Whether the last one holds results.
    let mut in_results = false;
    for mut message in messages {
        let calls = message.get("tool_calls").and_then(Value::as_array).cloned();
        if let (Some(calls), Calls::Unread) = (&calls, reads.calls) {
            let mut text = text_of(&message);
            for call in calls {
                let function = &call["function"];
                let (name, arguments) = (&function["name"], &function["arguments"]);
                text.push_str(if text.is_empty() { "" } else { "\n" });
                text += &format!(
                    "<tool_call>\n{{\"name\": {name}, \"arguments\": {arguments}}}\n</tool_call>"
                );
            }
            message["content"] = text.into();
            if let Some(fields) = message.as_object_mut() {
                fields.shift_remove("tool_calls");
            }
        } else if let (Some(mut calls), Calls::Texts) = (calls, reads.calls) {
            for call in &mut calls {
                if call["function"]["arguments"].is_object() {
                    call["function"]["arguments"] =
                        call["function"]["arguments"].to_string().into();
                }
            }
            message["tool_calls"] = calls.into();
        }
        let is_result =
            role(&message) == "tool" && (reads.calls == Calls::Unread || !reads.results);
        if is_result {
            let text = format!("<tool_response>\n{}\n</tool_response>", text_of(&message));
            match all.last_mut() {
                Some(last) if in_results => {
                    last["content"] = format!("{}\n{text}", text_of(last)).into();
                }
                _ => all.push(json!({"role": "user", "content": text})),
            }
        } else {
            all.push(message);
        }
        in_results = is_result;
    }
    all
}

/// The tools in the system message, or before what the user says first where the template has no such message.
pub(super) fn with_tools(
    mut messages: Vec<Value>,
    tools: &[Value],
    reads_system: bool,
) -> Vec<Value> {
    let lines: Vec<String> = tools.iter().map(Value::to_string).collect();
    let lines = lines.join("\n");
    let text = format!(
        "You can call these functions:\n<tools>\n{lines}\n</tools>\nTo call one, write its name and its arguments as JSON:\n\
         <tool_call>\n{{\"name\": NAME, \"arguments\": {{..}}}}\n</tool_call>"
    );
    let wanted = if reads_system { "system" } else { "user" };
    let found = messages.iter_mut().find(|message| role(message) == wanted);
    match found {
        Some(message) => {
            let own = text_of(message);
            message["content"] = match (reads_system, own.is_empty()) {
                (_, true) => text,
                (true, false) => format!("{own}\n\n{text}"),
                (false, false) => format!("{text}\n\n{own}"),
            }
            .into();
        }
        None => messages.insert(0, json!({"role": wanted, "content": text})),
    }
    messages
}

/// Whether a template failed, or refused a conversation.
fn is_of_template(error: &Error) -> bool {
    matches!(error, Error::Format { .. } | Error::Argument { .. })
}

/// What some templates fail over, in another form: no content of an assistant, arguments that are no object. `None`
/// where there is nothing of the kind.
fn repaired(before: &[Value]) -> Option<Vec<Value>> {
    let mut messages = before.to_vec();
    for message in messages.iter_mut().filter(|message| role(message) == "assistant") {
        if message.get("content").is_none_or(Value::is_null) {
            message["content"] = "".into();
        }
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        for call in calls.into_iter().flatten() {
            let arguments = call.pointer_mut("/function/arguments");
            if let Some(arguments) = arguments.filter(|arguments| arguments.is_string()) {
                let is_object =
                    |text: &str| serde_json::from_str::<Value>(text).is_ok_and(|v| v.is_object());
                if !arguments.as_str().is_some_and(is_object) {
                    *arguments = json!({"arguments": arguments});
                }
            }
        }
    }
    (messages != before).then_some(messages)
}
