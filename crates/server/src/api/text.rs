//! Text to tokens and back, and messages to text.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use boostr::backend::Backend;
use boostr::chat;
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::prompt;
use crate::app::App;
use crate::body::JsonBody;
use crate::error::{ApiError, Result};
use crate::fields::wrong;
use crate::messages;
use crate::options::token_ids;

/// A text whose tokens are wanted.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes a body")]
pub(crate) struct TokenizeFields {
    content: Option<String>,
    /// The name of the same in vLLM
    prompt: Option<String>,
    /// Put around it what the model expects around a text
    add_special: Option<bool>,
    /// Whether names of control tokens in it are those tokens; true unless said otherwise
    parse_special: Option<bool>,
}

/// Tokens of a text.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Tokens {
    tokens: Vec<u32>,
    count: usize,
}

/// Tokens whose text is wanted.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes a body")]
pub(crate) struct DetokenizeFields {
    tokens: Vec<u32>,
}

/// The text of tokens.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Text {
    content: String,
}

/// Messages whose text is wanted.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes a body")]
pub(crate) struct TemplateFields {
    #[schema(value_type = Vec<Object>, min_items = 1)]
    messages: Vec<Value>,
    /// End with what begins an answer; true unless said otherwise
    add_generation_prompt: Option<bool>,
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Value>>,
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
}

/// The text that a model is given.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Prompt {
    prompt: String,
}

pub(crate) async fn tokenize<B: Backend>(
    State(app): State<Arc<App<B>>>,
    JsonBody(mut fields): JsonBody,
) -> Result<Json<Tokens>> {
    let loaded = app.ready()?;
    let text = fields.text("content")?.or(fields.text("prompt")?);
    let text = fields.required("content", text)?;
    let add_special = fields.boolean("add_special")?.unwrap_or(false);
    let parse_special = fields.boolean("parse_special")?.unwrap_or(true);
    fields.finish()?;
    let most = app.config.limits.max_prompt;
    let work = move || {
        let _memory = prompt::memory(&loaded, text.len(), most, "content")?;
        let ids = match (add_special, parse_special) {
            (true, _) => loaded.lm.encode_prompt(&text, parse_special),
            (false, true) => loaded.tokenizer.encode_control(&text, false),
            (false, false) => loaded.tokenizer.encode(&text, false),
        };
        let tokens = ids.map_err(|error| ApiError::of_input("content", &error))?;
        Ok(Json(Tokens { count: tokens.len(), tokens }))
    };
    app.desks.texts.blocking(&app, work).await
}

pub(crate) async fn detokenize<B: Backend>(
    State(app): State<Arc<App<B>>>,
    JsonBody(mut fields): JsonBody,
) -> Result<Json<Text>> {
    let loaded = app.ready()?;
    let value = fields.take("tokens");
    let value = fields.required("tokens", value)?;
    let tokens =
        token_ids(&value).ok_or_else(|| wrong("tokens", "an array of token ids", &value))?;
    fields.finish()?;
    app.desks
        .texts
        .blocking(&app, move || {
            let text = loaded.tokenizer.decode(&tokens, false);
            let content = text.map_err(|error| ApiError::of_input("tokens", &error))?;
            Ok(Json(Text { content }))
        })
        .await
}

pub(crate) async fn apply_template<B: Backend>(
    State(app): State<Arc<App<B>>>,
    JsonBody(mut fields): JsonBody,
) -> Result<Json<Prompt>> {
    let loaded = app.ready()?;
    let messages = messages::read(&mut fields)?;
    let options = chat::Options {
        add_generation_prompt: fields.boolean("add_generation_prompt")?.unwrap_or(true),
        tools: fields.list("tools")?,
        kwargs: fields.object("chat_template_kwargs")?.unwrap_or_default(),
        ..chat::Options::default()
    };
    fields.finish()?;
    app.desks
        .texts
        .blocking(&app, move || {
            Ok(Json(Prompt { prompt: prompt::render(&loaded, &messages, &options)? }))
        })
        .await
}
