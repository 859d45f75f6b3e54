//! A response in the making: its items, and the events that tell of them.

use std::sync::Arc;

use boostr::backend::Backend;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::app::{App, unix_seconds};
use crate::auth::Scope;
use crate::error::ApiError;
use crate::job::{FinishReason, Finished, Piece};
use crate::shape::Called;
use crate::sse::{Events, Script};
use crate::stored::Stored;

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
    /// Items of types `reasoning`, `message` and `function_call`
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
    /// The conversation before the answer, of one that is to be kept.
    before: Option<Vec<Value>>,
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
    is_thought: bool,
    id: String,
    text: String,
}

impl Open {
    fn part(&self) -> Value {
        if self.is_thought {
            json!({"type": "reasoning_text", "text": self.text})
        } else {
            json!({"type": "output_text", "text": self.text, "annotations": [], "logprobs": []})
        }
    }

    fn item(&self, status: &str, content: &[Value]) -> Value {
        if self.is_thought {
            json!({
                "type": "reasoning", "id": self.id, "status": status, "summary": [], "content": content
            })
        } else {
            json!({
                "type": "message", "id": self.id, "status": status, "role": "assistant", "content": content
            })
        }
    }
}

impl<B: Backend> ResponseScript<B> {
    /// A response with the fields in `echo`, kept after the conversation `before` if there is one.
    pub(super) fn new(
        app: &Arc<App<B>>,
        scope: Scope,
        echo: Value,
        before: Option<Vec<Value>>,
    ) -> Self {
        let mut response = json!({
            "id": app.ids.name("resp_"), "object": "response", "created_at": unix_seconds(),
            "model": app.config.model_name, "status": "in_progress", "background": false, "error": null,
            "incomplete_details": null, "output": [], "truncation": "disabled", "usage": null
        });
        if let (Some(response), Value::Object(echo)) = (response.as_object_mut(), echo) {
            response.extend(echo);
        }
        let app = app.clone();
        let (items, open) = (Vec::new(), None);
        Self { app, scope, before, response, is_forced: false, items, open, sequence: 0 }
    }

    pub(super) fn answering(self, is_forced: bool) -> Self {
        Self { is_forced, ..self }
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

    /// An event of the open item, about its one part.
    fn tell_of_part(&mut self, kind: &str, more: (&str, Value), out: &mut Events) {
        let Some(open) = &self.open else { return };
        let place = self.items.len();
        let mut fields = json!({"item_id": open.id, "output_index": place, "content_index": 0});
        fields[more.0] = more.1;
        self.tell(kind, fields, out);
    }

    fn tell_of_item(&mut self, kind: &str, item: &Value, out: &mut Events) {
        self.tell(kind, json!({"output_index": self.items.len(), "item": item}), out);
    }

    fn open(&mut self, is_thought: bool, out: &mut Events) {
        if self.open.as_ref().is_some_and(|open| open.is_thought == is_thought) {
            return;
        }
        self.close("completed", out);
        let id = self.app.ids.name(if is_thought { "rs_" } else { "msg_" });
        let open = Open { is_thought, id, text: String::new() };
        let (item, part) = (open.item("in_progress", &[]), open.part());
        self.open = Some(open);
        self.tell_of_item("response.output_item.added", &item, out);
        self.tell_of_part("response.content_part.added", ("part", part), out);
    }

    fn say(&mut self, is_thought: bool, text: &str, out: &mut Events) {
        if text.is_empty() {
            return;
        }
        self.open(is_thought, out);
        if let Some(open) = &mut self.open {
            open.text.push_str(text);
        }
        if is_thought {
            self.tell_of_part("response.reasoning_text.delta", ("delta", text.into()), out);
        } else {
            let Some(open) = &self.open else { return };
            let place = self.items.len();
            let fields = json!({
                "item_id": open.id, "output_index": place, "content_index": 0, "delta": text, "logprobs": []
            });
            self.tell("response.output_text.delta", fields, out);
        }
    }

    fn close(&mut self, status: &str, out: &mut Events) {
        let Some(open) = &self.open else { return };
        let (part, text) = (open.part(), Value::from(open.text.as_str()));
        let item = open.item(status, std::slice::from_ref(&part));
        if open.is_thought {
            self.tell_of_part("response.reasoning_text.done", ("text", text), out);
        } else {
            let fields = json!({
                "item_id": open.id, "output_index": self.items.len(), "content_index": 0, "text": text,
                "logprobs": []
            });
            self.tell("response.output_text.done", fields, out);
        }
        self.tell_of_part("response.content_part.done", ("part", part), out);
        self.tell_of_item("response.output_item.done", &item, out);
        self.items.push(item);
        self.open = None;
    }

    fn call(&mut self, call: &Called, out: &mut Events) {
        self.close("completed", out);
        let id = self.app.ids.name("fc_");
        let item = |status: &str, arguments: &str| {
            json!({
                "type": "function_call", "id": id, "status": status, "call_id": call.id, "name": call.name,
                "arguments": arguments
            })
        };
        let place = self.items.len();
        self.tell_of_item("response.output_item.added", &item("in_progress", ""), out);
        let fields = json!({"item_id": id, "output_index": place, "delta": call.arguments});
        self.tell("response.function_call_arguments.delta", fields, out);
        let fields = json!({
            "item_id": id, "output_index": place, "name": call.name, "arguments": call.arguments
        });
        self.tell("response.function_call_arguments.done", fields, out);
        let item = item("completed", &call.arguments);
        self.tell_of_item("response.output_item.done", &item, out);
        self.items.push(item);
    }

    fn end(&mut self, how: &Finished, out: &mut Events) {
        let is_cut = how.reason == FinishReason::Length;
        let status = if is_cut { "incomplete" } else { "completed" };
        if self.items.is_empty() && self.open.is_none() && !self.is_forced {
            self.open(false, out);
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
        let Some(before) = self.before.take() else { return };
        let output = self.response["output"].clone();
        // What was just made can be read again; with nothing in it there is nothing to go on from.
        let messages = super::input::messages(&before, output).unwrap_or(before);
        let id = self.response["id"].as_str().unwrap_or_default();
        let response = self.response.clone();
        self.app.responses.put(self.scope, id, Stored { response, messages });
    }

    /// Takes a piece of the answer.
    pub(super) fn take(&mut self, piece: Piece, out: &mut Events) {
        match piece {
            Piece::Text { text, .. } => self.say(false, &text, out),
            Piece::Thought { text, .. } => self.say(true, &text, out),
            Piece::Call { call, .. } => self.call(&call, out),
            Piece::Finished { how, .. } => self.end(&how, out),
            Piece::Progress { .. } | Piece::Ping | Piece::Failed(_) => {}
        }
    }
}

impl<B: Backend> Script for ResponseScript<B> {
    fn begin(&mut self, out: &mut Events) {
        for kind in ["response.created", "response.in_progress"] {
            self.tell(kind, json!({"response": self.response}), out);
        }
    }

    fn piece(&mut self, piece: Piece, out: &mut Events) {
        self.take(piece, out);
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
