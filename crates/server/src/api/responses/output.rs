//! A response in the making: its items, and the events that tell of them.

use std::sync::Arc;

use boostr::backend::Backend;
use boostr::chat::tools::ToolFormat;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::app::{App, unix_seconds};
use crate::auth::Scope;
use crate::error::ApiError;
use crate::job::{FinishReason, Finished, Piece};
use crate::shape::Called;
use crate::sse::{Events, Script};
use crate::stored::Stored;

use super::tools::{Offer, arguments};

/// The status of an item of which nothing was said.
const BEGUN: &str = "in_progress";

/// A response. It repeats the fields of its request.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes an answer")]
pub(crate) struct ResponseObject {
    id: String,
    /// `response`
    object: String,
    created_at: u64,
    model: String,
    /// `completed`, `incomplete`, `failed` or `in_progress`
    status: String,
    /// Items of types `reasoning`, `message`, `function_call` and `custom_tool_call`
    #[schema(value_type = Vec<Object>)]
    output: Vec<Value>,
    /// `{"reason": "max_output_tokens"}` where the answer was cut off
    #[schema(value_type = Option<Object>)]
    incomplete_details: Value,
    #[schema(value_type = Option<Object>)]
    error: Value,
    /// `input_tokens`, `output_tokens`, `total_tokens` and their details
    #[schema(value_type = Option<Object>)]
    usage: Value,
}

/// An event, of the type that its line `event` names too.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes an event")]
pub(crate) struct ResponseEvent {
    /// `response.created`, `response.output_text.delta`, `response.completed` and so on
    r#type: String,
    /// 0 for the first event
    sequence_number: u64,
}

/// Writes a response.
pub(crate) struct ResponseScript<B: Backend> {
    app: Arc<App<B>>,
    scope: Scope,
    /// The items before the answer, of one that is to be kept.
    before: Option<Vec<Value>>,
    offer: Offer,
    /// The id of a call whose input is the answer.
    call_id: String,
    pub(super) response: Value,
    /// It has calls of tools and no words.
    is_forced: bool,
    /// Items that are done.
    items: Vec<Value>,
    /// The item that is being said.
    open: Option<Open>,
    sequence: u64,
}

/// An item of text in the making.
struct Open {
    says: Says,
    id: String,
    text: String,
}

/// What the id of a response begins with.
const RESPONSE: &str = "resp_";

/// The id of the response that an item with this id is of.
pub(super) fn response_of(item: &str) -> Option<String> {
    let (own, number) = item.split_once('_')?.1.split_once('_')?;
    number.parse::<usize>().ok()?;
    Some(format!("{RESPONSE}{own}"))
}

/// Whose text it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Says {
    Thought,
    Words,
    /// The input of the custom tool that has to be called.
    Input,
}

impl Says {
    /// What the id of an item begins with, and the events of its text.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Thought => ("rs_", "response.reasoning_text"),
            Self::Words => ("msg_", "response.output_text"),
            Self::Input => ("ctc_", "response.custom_tool_call_input"),
        }
    }
}

impl Open {
    /// The one part of its content.
    fn part(&self) -> Option<Value> {
        match self.says {
            Says::Thought => Some(json!({"type": "reasoning_text", "text": self.text})),
            Says::Words => Some(
                json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}),
            ),
            Says::Input => None,
        }
    }
}

impl<B: Backend> ResponseScript<B> {
    /// A response with the fields in `echo` and calls of what is on `offer`, kept after the items `before` if there are any.
    pub(super) fn new(
        app: &Arc<App<B>>,
        scope: Scope,
        echo: Value,
        offer: Offer,
        before: Option<Vec<Value>>,
    ) -> Self {
        let mut response = json!({
            "id": app.ids.name(RESPONSE), "object": "response", "created_at": unix_seconds(),
            "model": app.config.model_name, "status": "in_progress", "background": false, "error": null,
            "incomplete_details": null, "output": [], "truncation": "disabled", "usage": null
        });
        if let (Some(response), Value::Object(echo)) = (response.as_object_mut(), echo) {
            response.extend(echo);
        }
        let format = app.loaded().and_then(|loaded| loaded.tool_format);
        let call_id = format.unwrap_or(ToolFormat::Hermes).call_id(app.ids.number());
        let (app, items) = (app.clone(), Vec::new());
        let (is_forced, open, sequence) = (false, None, 0);
        Self { app, scope, before, offer, call_id, response, is_forced, items, open, sequence }
    }

    pub(super) fn answering(self, is_forced: bool) -> Self {
        Self { is_forced, ..self }
    }

    /// The id of the next item. It tells the response, so that one that is kept is found by it.
    fn item_id(&self, prefix: &str) -> String {
        let own = self.response["id"].as_str().unwrap_or_default();
        format!("{prefix}{}_{}", own.trim_start_matches(RESPONSE), self.items.len())
    }

    /// Writes an event of a type with these fields.
    fn tell(&mut self, kind: &str, fields: Value, out: &mut Events) {
        let mut event = Map::new();
        event.insert("type".into(), kind.into());
        event.insert("sequence_number".into(), self.sequence.into());
        if let Value::Object(fields) = fields {
            event.extend(fields);
        }
        self.sequence += 1;
        out.event(kind, &event);
    }

    /// An event of the open item, about its text.
    fn tell_of_text(&mut self, kind: &str, (name, value): (&str, Value), out: &mut Events) {
        let Some(open) = &self.open else { return };
        let mut fields = json!({"item_id": open.id, "output_index": self.items.len()});
        if open.says != Says::Input {
            fields["content_index"] = 0.into();
        }
        fields[name] = value;
        if open.says == Says::Words && name != "part" {
            fields["logprobs"] = json!([]);
        }
        self.tell(kind, fields, out);
    }

    fn tell_of_item(&mut self, kind: &str, item: &Value, out: &mut Events) {
        self.tell(kind, json!({"output_index": self.items.len(), "item": item}), out);
    }

    /// The open item; one that has just begun has no content.
    fn item(&self, open: &Open, status: &str) -> Value {
        let content: Vec<Value> =
            if status == BEGUN { Vec::new() } else { open.part().into_iter().collect() };
        match open.says {
            Says::Thought => json!({
                "type": "reasoning", "id": open.id, "status": status, "summary": [], "content": content
            }),
            Says::Words => json!({
                "type": "message", "id": open.id, "status": status, "role": "assistant", "content": content
            }),
            Says::Input => {
                let name = self.offer.answer.as_deref().unwrap_or_default();
                let input = arguments(&open.text).to_string();
                let mut item = self.offer.item(name, &input, &self.call_id);
                item.insert("id".into(), open.id.as_str().into());
                item.insert("status".into(), status.into());
                item.into()
            }
        }
    }

    fn open(&mut self, says: Says, out: &mut Events) {
        if self.open.as_ref().is_some_and(|open| open.says == says) {
            return;
        }
        self.close("completed", out);
        let id = self.item_id(says.names().0);
        let open = Open { says, id, text: String::new() };
        let (item, part) = (self.item(&open, BEGUN), open.part());
        self.open = Some(open);
        self.tell_of_item("response.output_item.added", &item, out);
        if let Some(part) = part {
            self.tell_of_text("response.content_part.added", ("part", part), out);
        }
    }

    fn say(&mut self, says: Says, text: &str, out: &mut Events) {
        if text.is_empty() {
            return;
        }
        self.open(says, out);
        if let Some(open) = &mut self.open {
            open.text.push_str(text);
        }
        self.tell_of_text(&format!("{}.delta", says.names().1), ("delta", text.into()), out);
    }

    fn close(&mut self, status: &str, out: &mut Events) {
        let Some(open) = &self.open else { return };
        let (part, text, says) = (open.part(), Value::from(open.text.as_str()), open.says);
        let item = self.item(open, status);
        let name = if says == Says::Input { "input" } else { "text" };
        self.tell_of_text(&format!("{}.done", says.names().1), (name, text), out);
        if let Some(part) = part {
            self.tell_of_text("response.content_part.done", ("part", part), out);
        }
        self.tell_of_item("response.output_item.done", &item, out);
        self.items.push(item);
        self.open = None;
    }

    fn call(&mut self, call: &Called, out: &mut Events) {
        self.close("completed", out);
        let mut item = self.offer.item(&call.name, &call.arguments, &call.id);
        let (prefix, field, events) = if item.contains_key("input") {
            ("ctc_", "input", "response.custom_tool_call_input")
        } else {
            ("fc_", "arguments", "response.function_call_arguments")
        };
        let id = self.item_id(prefix);
        item.insert("id".into(), id.as_str().into());
        let text = item.insert(field.into(), "".into()).unwrap_or_default();
        item.insert("status".into(), BEGUN.into());
        self.tell_of_item("response.output_item.added", &item.clone().into(), out);
        let place = self.items.len();
        let fields = json!({"item_id": id, "output_index": place, "delta": text});
        self.tell(&format!("{events}.delta"), fields, out);
        let mut fields = json!({"item_id": id, "output_index": place});
        if field == "arguments" {
            fields["name"] = item["name"].clone();
        }
        fields[field] = text.clone();
        self.tell(&format!("{events}.done"), fields, out);
        item.insert(field.into(), text);
        item.insert("status".into(), "completed".into());
        let item = item.into();
        self.tell_of_item("response.output_item.done", &item, out);
        self.items.push(item);
    }

    /// What a text without a mark is.
    fn words(&self) -> Says {
        if self.offer.answer.is_some() { Says::Input } else { Says::Words }
    }

    fn end(&mut self, how: &Finished, out: &mut Events) {
        let is_cut = how.reason == FinishReason::Length;
        let status = if is_cut { "incomplete" } else { "completed" };
        // A thought alone is no answer of one who had to call a tool.
        let says = self.open.as_ref().map(|open| open.says);
        let has_to_call = self.offer.answer.is_some() && says != Some(Says::Input);
        if has_to_call || self.items.is_empty() && says.is_none() && !self.is_forced {
            self.open(self.words(), out);
        }
        self.close(status, out);
        self.response["output"] = std::mem::take(&mut self.items).into();
        self.response["status"] = status.into();
        if is_cut {
            self.response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        self.response["usage"] = json!({
            "input_tokens": how.prompt_tokens,
            "input_tokens_details": {"cached_tokens": how.cached_tokens},
            "output_tokens": how.tokens,
            "output_tokens_details": {"reasoning_tokens": how.thought_tokens},
            "total_tokens": how.prompt_tokens + how.tokens
        });
        self.keep();
        self.tell(&format!("response.{status}"), json!({"response": self.response}), out);
    }

    /// Keeps the response with the conversation that it ends.
    fn keep(&mut self) {
        let Some(input) = self.before.take() else { return };
        let id = self.response["id"].as_str().unwrap_or_default();
        let stored = Stored { response: self.response.clone(), input };
        self.app.responses.put(self.scope, id, stored, || self.app.begin_work());
    }
}

impl<B: Backend> Script for ResponseScript<B> {
    fn begin(&mut self, out: &mut Events) {
        for kind in ["response.created", "response.in_progress"] {
            self.tell(kind, json!({"response": self.response}), out);
        }
    }

    fn piece(&mut self, piece: Piece, out: &mut Events) {
        match piece {
            Piece::Text { text, .. } => self.say(self.words(), &text, out),
            Piece::Thought { text, .. } => self.say(Says::Thought, &text, out),
            Piece::Call { call, .. } => self.call(&call, out),
            Piece::Finished { how, .. } => self.end(&how, out),
            Piece::Progress { .. } | Piece::Ping | Piece::Failed(_) => {}
        }
    }

    fn finish(&mut self, _: &mut Events) {}

    fn fail(&mut self, error: &ApiError, out: &mut Events) {
        self.close("incomplete", out);
        self.response["output"] = std::mem::take(&mut self.items).into();
        self.response["status"] = "failed".into();
        let code = error.code.unwrap_or("server_error");
        self.response["error"] = json!({"code": code, "message": error.message});
        self.tell("response.failed", json!({"response": self.response}), out);
    }
}
