//! A message in the making: its blocks, and the events that tell of them.

use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::job::{FinishReason, Finished, Piece};
use crate::shape::Called;
use crate::sse::{Events, Script};

/// The assistant's message.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes an answer")]
pub(crate) struct Message {
    id: String,
    /// `message`
    r#type: String,
    role: String,
    model: String,
    /// Blocks of types `thinking`, `text` and `tool_use`
    #[schema(value_type = Vec<Object>)]
    content: Vec<Value>,
    /// `end_turn`, `max_tokens`, `stop_sequence` or `tool_use`
    stop_reason: Option<String>,
    stop_sequence: Option<String>,
    /// `input_tokens` without those of `cache_read_input_tokens`, and `output_tokens`
    #[schema(value_type = Object)]
    usage: Value,
}

/// An event, of the type that its line `event` names too.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes an event")]
pub(crate) struct MessageEvent {
    /// `message_start`, `content_block_delta`, `message_stop` and so on
    r#type: String,
}

/// An error as Anthropic writes it.
pub(crate) fn error(error: &ApiError) -> impl Serialize + use<> {
    let kind = match error.status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.message}})
}

/// Writes a message.
pub(crate) struct MessageScript {
    pub(super) message: Value,
    /// It has calls of tools and no words.
    is_forced: bool,
    /// Blocks that are done.
    blocks: Vec<Value>,
    /// The block of text that is being said: whether it is a thought, and its text.
    open: Option<(bool, String)>,
}

impl MessageScript {
    pub(super) fn new(id: &str, model: &str, prompt_tokens: usize, is_forced: bool) -> Self {
        let message = json!({
            "id": id, "type": "message", "role": "assistant", "model": model, "content": [],
            "stop_reason": null, "stop_sequence": null, "usage": usage(prompt_tokens, 0, 0)
        });
        Self { message, is_forced, blocks: Vec::new(), open: None }
    }

    /// An event of the block that is not done.
    fn tell_of_block(&self, kind: &str, name: &str, value: Value, out: &mut Events) {
        let mut fields = json!({"index": self.blocks.len()});
        fields[name] = value;
        tell(kind, fields, out);
    }

    fn block(is_thought: bool, text: &str) -> Value {
        if is_thought {
            json!({"type": "thinking", "thinking": text, "signature": ""})
        } else {
            json!({"type": "text", "text": text})
        }
    }

    fn open(&mut self, is_thought: bool, out: &mut Events) {
        if self.open.as_ref().is_some_and(|(before, _)| *before == is_thought) {
            return;
        }
        self.close(out);
        let block = Self::block(is_thought, "");
        self.tell_of_block("content_block_start", "content_block", block, out);
        self.open = Some((is_thought, String::new()));
    }

    fn say(&mut self, is_thought: bool, text: &str, out: &mut Events) {
        if text.is_empty() {
            return;
        }
        self.open(is_thought, out);
        if let Some((_, all)) = &mut self.open {
            all.push_str(text);
        }
        let delta = if is_thought {
            json!({"type": "thinking_delta", "thinking": text})
        } else {
            json!({"type": "text_delta", "text": text})
        };
        self.tell_of_block("content_block_delta", "delta", delta, out);
    }

    fn close(&mut self, out: &mut Events) {
        let Some((is_thought, text)) = self.open.take() else { return };
        tell("content_block_stop", json!({"index": self.blocks.len()}), out);
        self.blocks.push(Self::block(is_thought, &text));
    }

    fn call(&mut self, call: &Called, out: &mut Events) {
        self.close(out);
        let block = |input: Value| json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input});
        self.tell_of_block("content_block_start", "content_block", block(json!({})), out);
        let delta = json!({"type": "input_json_delta", "partial_json": call.arguments});
        self.tell_of_block("content_block_delta", "delta", delta, out);
        tell("content_block_stop", json!({"index": self.blocks.len()}), out);
        let input = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
        self.blocks.push(block(input));
    }

    fn end(&mut self, how: &Finished, out: &mut Events) {
        if self.blocks.is_empty() && self.open.is_none() && !self.is_forced {
            self.open(false, out);
        }
        self.close(out);
        let reason = match how.reason {
            FinishReason::ToolCalls => "tool_use",
            FinishReason::Length => "max_tokens",
            FinishReason::Stop if how.stop.is_some() => "stop_sequence",
            FinishReason::Stop => "end_turn",
        };
        let usage = usage(how.prompt_tokens, how.cached_tokens, how.tokens);
        let delta = json!({"stop_reason": reason, "stop_sequence": how.stop});
        tell("message_delta", json!({"delta": delta, "usage": usage}), out);
        self.message["content"] = std::mem::take(&mut self.blocks).into();
        self.message["stop_reason"] = reason.into();
        self.message["stop_sequence"] = how.stop.clone().into();
        self.message["usage"] = usage;
        tell("message_stop", json!({}), out);
    }
}

/// Writes an event of a type with these fields.
fn tell(kind: &str, mut fields: Value, out: &mut Events) {
    fields["type"] = kind.into();
    out.event(kind, &fields);
}

/// Tokens that were read are not among those that were computed.
fn usage(prompt: usize, cached: usize, output: usize) -> Value {
    json!({
        "input_tokens": prompt.saturating_sub(cached), "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached, "output_tokens": output
    })
}

impl Script for MessageScript {
    fn begin(&mut self, out: &mut Events) {
        tell("message_start", json!({"message": self.message}), out);
        self.ping(out);
    }

    fn piece(&mut self, piece: Piece, out: &mut Events) {
        match piece {
            Piece::Text { text, .. } => self.say(false, &text, out),
            Piece::Thought { text, .. } => self.say(true, &text, out),
            Piece::Call { call, .. } => self.call(&call, out),
            Piece::Finished { how, .. } => self.end(&how, out),
            Piece::Progress { .. } | Piece::Ping | Piece::Failed(_) => {}
        }
    }

    fn finish(&mut self, _: &mut Events) {}

    fn fail(&mut self, error: &ApiError, out: &mut Events) {
        out.event("error", &self::error(error));
    }

    fn ping(&mut self, out: &mut Events) {
        tell("ping", json!({}), out);
    }
}
