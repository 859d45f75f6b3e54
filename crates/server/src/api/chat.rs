//! `POST /v1/chat/completions`: the assistant's turn in a conversation.

use std::sync::Arc;

use axum::extract;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use boostr::backend::Backend;
use boostr::chat;
use boostr::engine::Request;
use boostr::models::State;
use boostr::sample::Constraint;
use serde_json::{Map, Value};
use tokio::sync::mpsc;
use utoipa::ToSchema;

use super::answer::{
    AnswerMessage, ChatChoice, ChatChunk, ChatCompletion, ChatLogprobs, Delta, DeltaChoice,
    Timings, ToolCall, Usage,
};
use super::prompt;
use crate::app::{App, Loaded, unix_seconds};
use crate::auth::Scope;
use crate::body::JsonBody;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::job::{self, FinishReason, Job, Piece};
use crate::messages;
use crate::options::{GenerationOptions, MAX_TOP};
use crate::shape::{Finder, Shape};
use crate::sse::{self, Events, Script};
use crate::turn::Turn;

/// A conversation whose next turn is wanted.
#[derive(Debug, ToSchema)]
pub(crate) struct ChatFields {
    /// What was said; roles are `system`, `developer`, `user`, `assistant`, `tool`
    #[schema(value_type = Vec<Object>, min_items = 1)]
    messages: Vec<Value>,
    /// A session that the messages are added to, and the answer when it ends
    session: Option<String>,
    /// Report the probabilities of the answer's tokens
    logprobs: Option<bool>,
    /// How many of the likeliest tokens are reported with each
    #[schema(minimum = 0, maximum = 20)]
    top_logprobs: Option<usize>,
    /// More variables of the chat template
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    #[schema(ignore)]
    shape: Shape,
}

impl ChatFields {
    pub(crate) fn read(fields: &mut Fields) -> Result<Self> {
        Ok(Self {
            messages: messages::read(fields)?,
            session: fields.text("session")?,
            logprobs: fields.boolean("logprobs")?,
            top_logprobs: fields.count("top_logprobs", 0..=MAX_TOP)?,
            chat_template_kwargs: fields.object("chat_template_kwargs")?,
            shape: Shape::read(fields)?,
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

    fn template_options(&self) -> chat::Options {
        chat::Options {
            add_generation_prompt: true,
            tools: self.shape.template_tools(),
            kwargs: self.chat_template_kwargs.clone().unwrap_or_default(),
            ..chat::Options::default()
        }
    }
}

/// What the engine is asked for a conversation.
struct Asked<B: Backend> {
    ids: Vec<u32>,
    marks: Vec<usize>,
    state: Option<State<B>>,
    constraint: Option<Box<dyn Constraint>>,
    finder: Option<Finder>,
    turn: Option<Turn<B>>,
}

impl<B: Backend> Asked<B> {
    fn new(loaded: &Loaded<B>, chat: &ChatFields, most: usize) -> Result<Self> {
        let template = chat.template_options();
        let (ids, marks, state, turn) = match &chat.session {
            Some(name) => {
                let mut turn = Turn::begin(loaded, name, &chat.messages, &template)?;
                let (ids, marks, state) = turn.prompt();
                prompt::check_context(loaded, &ids, most, "messages")?;
                (ids, marks, state, Some(turn))
            }
            None => {
                let (ids, marks) = prompt::encode(loaded, &chat.messages, &template, most)?;
                (ids, marks, None, None)
            }
        };
        let (constraint, finder) =
            (chat.shape.constraint(loaded)?, chat.shape.finder(loaded, &ids));
        Ok(Self { ids, marks, state, constraint, finder, turn })
    }
}

pub(crate) async fn complete<B: Backend>(
    extract::State(app): extract::State<Arc<App<B>>>,
    Extension(scope): Extension<Scope>,
    JsonBody(mut fields): JsonBody,
) -> Result<Response> {
    let loaded = app.ready()?;
    let options = GenerationOptions::read(&mut fields)?;
    let chat = ChatFields::read(&mut fields)?;
    fields.finish()?;
    options.check_model(&app.config.model_name)?;
    let sampler =
        options.sampler(&loaded.lm.defaults, loaded.lm.vocab_limit(), app.ids.number())?;
    let (top, count) = (chat.top()?, options.count());
    if chat.session.is_some() && count > 1 {
        return Err(ApiError::field("n", "a session has one answer to each turn"));
    }
    let asked = {
        let (loaded, most) = (loaded.clone(), app.config.limits.max_prompt);
        let desk = if chat.session.is_some() { &app.desks.sessions } else { &app.desks.prompts };
        desk.blocking(&app, move || Asked::new(&loaded, &chat, most)).await?
    };
    let request = Request {
        state: asked.state,
        marks: asked.marks,
        logprobs: top,
        constraint: asked.constraint,
        ..options.request(&loaded, &app.config.limits, scope, sampler, asked.ids)
    };
    let is_forced = asked.finder.as_ref().is_some_and(|finder| finder.is_forced);
    let stops = options.stop.clone().unwrap_or_default();
    let (sender, mut pieces) = job::channel();
    let job = Job { request, stops, first_index: 0, finder: asked.finder, turn: asked.turn };
    job::start(&app, &loaded, job, sender)?;

    let head = ChatChunk {
        id: app.ids.name("chatcmpl-"),
        object: "chat.completion.chunk",
        created: unix_seconds(),
        model: app.config.model_name.clone(),
        system_fingerprint: loaded.fingerprint.clone(),
        choices: Vec::new(),
        usage: None,
        timings: None,
        session: None,
    };
    if !options.is_stream() {
        return collect(&loaded, head, count, top.is_some(), is_forced, &mut pieces).await;
    }
    let script = ChatScript {
        loaded,
        head,
        count,
        with_usage: options.includes_usage(),
        with_tokens: top.is_some(),
        usage: Usage::default(),
        ended: 0,
    };
    sse::stream(pieces, count, script).await
}

/// The whole answer at once; one that `is_forced` to call tools has no words.
async fn collect<B: Backend>(
    loaded: &Loaded<B>,
    head: ChatChunk,
    count: usize,
    with_tokens: bool,
    is_forced: bool,
    pieces: &mut mpsc::Receiver<Piece>,
) -> Result<Response> {
    let mut choices: Vec<ChatChoice> = (0..count)
        .map(|index| ChatChoice {
            index,
            message: AnswerMessage {
                role: "assistant",
                content: Some(String::new()),
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
            Some(Piece::Text { index, text, tokens }) => {
                let Some(choice) = choices.get_mut(index) else { continue };
                choice.message.content.get_or_insert_default().push_str(&text);
                if let Some(logprobs) = &mut choice.logprobs {
                    logprobs.content.extend(ChatLogprobs::new(&loaded.tokenizer, &tokens).content);
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
    fn chunk(&self, index: usize, delta: Delta) -> ChatChunk {
        let choice = DeltaChoice { index, delta, logprobs: None, finish_reason: None };
        ChatChunk { choices: vec![choice], ..self.head.clone() }
    }
}

impl<B: Backend> Script for ChatScript<B> {
    fn begin(&mut self, out: &mut Events) {
        for index in 0..self.count {
            let content = Some(String::new());
            let delta = Delta { role: Some("assistant"), content, tool_calls: None };
            out.data(&self.chunk(index, delta));
        }
    }

    fn piece(&mut self, piece: Piece, out: &mut Events) {
        match piece {
            Piece::Text { index, text, tokens } => {
                let mut chunk =
                    self.chunk(index, Delta { content: Some(text), ..Delta::default() });
                if self.with_tokens
                    && let Some(choice) = chunk.choices.first_mut()
                {
                    choice.logprobs = Some(ChatLogprobs::new(&self.loaded.tokenizer, &tokens));
                }
                out.data(&chunk);
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
    }
}
