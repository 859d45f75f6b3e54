//! `POST /v1/chat/completions`: the assistant's turn in a conversation.

use std::sync::Arc;

use axum::extract;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use boostr::backend::Backend;
use boostr::sample::Choice;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::answer::{
    AnswerMessage, ChatChoice, ChatChunk, ChatCompletion, ChatLogprobs, Delta, DeltaChoice,
    Timings, ToolCall, Usage,
};
use super::conversation::{Begun, Conversation, check_free, goes_on};
use crate::app::{App, Loaded, unix_seconds};
use crate::auth::Scope;
use crate::body::JsonBody;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::job::{FinishReason, Piece};
use crate::messages;
use crate::options::{GenerationOptions, MAX_TOP};
use crate::shape::Shape;
use crate::sse::{self, Events, Script};

/// A conversation whose next turn is wanted.
#[derive(Debug, ToSchema)]
pub(crate) struct ChatFields {
    /// What was said; roles are `system`, `developer`, `user`, `assistant`, `tool`
    #[schema(value_type = Vec<Object>, min_items = 1)]
    messages: Vec<Value>,
    /// A session that the messages are added to, and the answer when it ends
    session: Option<String>,
    /// The last answer of the session goes on as if it had not ended; `messages` is empty or left out. Without a session the
    /// last message does, which is the assistant's
    continue_final_message: Option<bool>,
    /// Report the probabilities of the answer's tokens
    logprobs: Option<bool>,
    /// How many of the likeliest tokens are reported with each
    #[schema(minimum = 0, maximum = 20)]
    top_logprobs: Option<usize>,
    /// More variables of the chat template
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// `auto` gives the thought as `reasoning_content`, `none` leaves it in the content with its markers
    #[schema(value_type = Option<String>)]
    reasoning_format: Option<&'static str>,
    #[schema(ignore)]
    shape: Shape,
}

impl ChatFields {
    pub(crate) fn read(fields: &mut Fields) -> Result<Self> {
        let continue_final_message = fields.boolean("continue_final_message")?;
        let session = fields.text("session")?;
        let continues = continue_final_message == Some(true);
        let messages =
            if continues && session.is_some() { none(fields)? } else { messages::read(fields)? };
        let shape = Shape::read(fields)?;
        if continues && session.is_none() {
            check_last(&messages, &shape)?;
        }
        Ok(Self {
            messages,
            session,
            continue_final_message,
            logprobs: fields.boolean("logprobs")?,
            top_logprobs: fields.count("top_logprobs", 0..=MAX_TOP)?,
            chat_template_kwargs: fields.object("chat_template_kwargs")?,
            reasoning_format: fields.word("reasoning_format", &["auto", "none"])?,
            shape,
        })
    }

    /// How many likely tokens to report with each, if any report is wanted.
    fn top(&self) -> Result<Option<usize>> {
        match (self.logprobs, self.top_logprobs) {
            (Some(true), top) => Ok(Some(top.unwrap_or(0))),
            (_, None | Some(0)) => Ok(None),
            _ => Err(ApiError::field("top_logprobs", "it needs `logprobs`: true")),
        }
    }
}

/// Of an answer that goes on there are no new messages.
fn none(fields: &mut Fields) -> Result<Vec<Value>> {
    let messages = fields.list("messages")?.unwrap_or_default();
    if messages.is_empty() {
        return Ok(messages);
    }
    let reason = format!("expected none beside `continue_final_message`, found {}", messages.len());
    Err(ApiError::field("messages", reason))
}

/// Checks that the last message can go on.
fn check_last(messages: &[Value], shape: &Shape) -> Result<()> {
    if !goes_on(messages) {
        let reason =
            "expected a last message of the assistant with some text or a thought, and no calls";
        return Err(ApiError::field("continue_final_message", reason));
    }
    check_free(shape, "continue_final_message")
}

pub(crate) async fn complete<B: Backend>(
    extract::State(app): extract::State<Arc<App<B>>>,
    Extension(scope): Extension<Scope>,
    JsonBody(mut fields): JsonBody,
) -> Result<Response> {
    let options = GenerationOptions::read(&mut fields)?;
    let chat = ChatFields::read(&mut fields)?;
    fields.finish()?;
    let (top, count) = (chat.top()?, options.count());
    let (is_stream, with_usage) = (options.is_stream(), options.includes_usage());
    let continues = chat.continue_final_message == Some(true);
    let conversation = Conversation {
        options,
        messages: chat.messages,
        shape: chat.shape,
        kwargs: chat.chat_template_kwargs.unwrap_or_default(),
        is_divided: chat.reasoning_format.map_or(app.config.divides_thoughts, |it| it != "none"),
        session: chat.session,
        continues,
        top,
    };
    let begun = conversation.begin(&app, scope).await?;
    let head = ChatChunk {
        id: app.ids.name("chatcmpl-"),
        object: "chat.completion.chunk",
        created: unix_seconds(),
        model: app.config.model_name.clone(),
        system_fingerprint: begun.loaded.fingerprint.clone(),
        choices: Vec::new(),
        usage: None,
        timings: None,
        session: None,
    };
    if !is_stream {
        return collect(begun, head, count, top.is_some()).await;
    }
    let script = ChatScript {
        loaded: begun.loaded,
        head,
        count,
        with_usage,
        with_tokens: top.is_some(),
        usage: Usage::default(),
        ended: 0,
    };
    sse::stream(begun.pieces, count, script).await
}

/// The whole answer at once.
async fn collect<B: Backend>(
    begun: Begun<B>,
    head: ChatChunk,
    count: usize,
    with_tokens: bool,
) -> Result<Response> {
    let Begun { loaded, mut pieces, is_forced, .. } = begun;
    let mut choices: Vec<ChatChoice> = (0..count)
        .map(|index| ChatChoice {
            index,
            message: AnswerMessage {
                role: "assistant",
                content: Some(String::new()),
                reasoning_content: None,
                tool_calls: Vec::new(),
            },
            logprobs: with_tokens.then(ChatLogprobs::default),
            finish_reason: FinishReason::Stop.name(),
        })
        .collect();
    let (mut usage, mut timings, mut ended) = (Usage::default(), Timings::default(), 0);
    let mut session = None;
    while ended < count {
        match pieces.recv().await {
            Some(
                ref piece @ (Piece::Text { index, ref text, ref tokens }
                | Piece::Thought { index, ref text, ref tokens }),
            ) => {
                let Some(choice) = choices.get_mut(index) else { continue };
                let message = &mut choice.message;
                let is_thought = matches!(piece, Piece::Thought { .. });
                let said =
                    if is_thought { &mut message.reasoning_content } else { &mut message.content };
                said.get_or_insert_default().push_str(text);
                if let Some(logprobs) = &mut choice.logprobs {
                    logprobs.content.extend(ChatLogprobs::new(&loaded.tokenizer, tokens).content);
                }
            }
            Some(Piece::Call { index, call, .. }) => {
                if let Some(choice) = choices.get_mut(index) {
                    choice.message.tool_calls.push(ToolCall::new(call, None));
                }
            }
            Some(Piece::Finished { index, how }) => {
                usage.add(&how, ended == 0);
                timings = Timings::from(&how);
                session = how.session;
                ended += 1;
                if let Some(choice) = choices.get_mut(index) {
                    choice.finish_reason = how.reason.name();
                    let message = &mut choice.message;
                    if is_forced || !message.tool_calls.is_empty() {
                        message.content.take_if(|content| content.is_empty());
                    }
                }
            }
            Some(Piece::Failed(error)) => return Err(error),
            Some(Piece::Progress { .. } | Piece::Ping) => {}
            None => return Err(ApiError::internal(&"an answer was given up")),
        }
    }
    let ChatChunk { id, created, model, system_fingerprint, .. } = head;
    let object = "chat.completion";
    let answer = ChatCompletion {
        id,
        object,
        created,
        model,
        system_fingerprint,
        choices,
        usage,
        timings,
        session,
    };
    Ok(Json(answer).into_response())
}

/// The answer piece by piece.
struct ChatScript<B: Backend> {
    loaded: Arc<Loaded<B>>,
    head: ChatChunk,
    count: usize,
    with_usage: bool,
    with_tokens: bool,
    usage: Usage,
    ended: usize,
}

impl<B: Backend> ChatScript<B> {
    /// What a piece adds, and its tokens.
    fn said(&self, index: usize, delta: Delta, tokens: &[Choice]) -> ChatChunk {
        let mut chunk = self.chunk(index, delta);
        if self.with_tokens
            && let Some(choice) = chunk.choices.first_mut()
        {
            choice.logprobs = Some(ChatLogprobs::new(&self.loaded.tokenizer, tokens));
        }
        chunk
    }

    fn chunk(&self, index: usize, delta: Delta) -> ChatChunk {
        let choice = DeltaChoice { index, delta, logprobs: None, finish_reason: None };
        ChatChunk { choices: vec![choice], ..self.head.clone() }
    }
}

impl<B: Backend> Script for ChatScript<B> {
    fn begin(&mut self, out: &mut Events) {
        for index in 0..self.count {
            let content = Some(String::new());
            let delta = Delta { role: Some("assistant"), content, ..Delta::default() };
            out.data(&self.chunk(index, delta));
        }
    }

    fn piece(&mut self, piece: Piece, out: &mut Events) {
        match piece {
            Piece::Text { index, text, tokens } => {
                let delta = Delta { content: Some(text), ..Delta::default() };
                out.data(&self.said(index, delta, &tokens));
            }
            Piece::Thought { index, text, tokens } => {
                let delta = Delta { reasoning_content: Some(text), ..Delta::default() };
                out.data(&self.said(index, delta, &tokens));
            }
            Piece::Call { index, number, call } => {
                let tool_calls = Some(vec![ToolCall::new(call, Some(number))]);
                out.data(&self.chunk(index, Delta { tool_calls, ..Delta::default() }));
            }
            Piece::Finished { index, how } => {
                self.usage.add(&how, self.ended == 0);
                self.ended += 1;
                let mut chunk = self.chunk(index, Delta::default());
                if let Some(choice) = chunk.choices.first_mut() {
                    choice.finish_reason = Some(how.reason.name());
                }
                if self.ended == self.count {
                    chunk.timings = Some(Timings::from(&how));
                }
                chunk.session = how.session;
                out.data(&chunk);
            }
            Piece::Progress { .. } | Piece::Ping | Piece::Failed(_) => {}
        }
    }

    fn finish(&mut self, out: &mut Events) {
        if self.with_usage {
            out.data(&ChatChunk { usage: Some(self.usage), ..self.head.clone() });
        }
        out.done();
    }
}
