//! `/v1/responses`: OpenAI's newer API for the same conversations.

mod input;
mod output;

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use boostr::backend::Backend;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::Id;
use super::conversation::{Conversation, instructed};
use crate::app::App;
use crate::auth::Scope;
use crate::body::JsonBody;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::options::GenerationOptions;
use crate::shape::Shape;
use crate::sse;

use output::ResponseScript;
pub(crate) use output::{ResponseEvent, ResponseObject};

/// Longest id of a response, in bytes.
const MAX_ID: usize = 64;

/// A conversation whose next turn is wanted.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes a body")]
pub(crate) struct ResponseFields {
    /// A text of the user, or items of types `message`, `function_call`, `function_call_output`, `reasoning`
    #[schema(value_type = Value)]
    input: Value,
    /// What the model is told before everything; not taken over by later requests
    instructions: Option<String>,
    /// A response that is kept, which this one goes on from
    previous_response_id: Option<String>,
    /// Keep the response; true unless said otherwise
    store: Option<bool>,
    /// Most tokens of the answer; 512 unless the model says, at most 8192
    #[schema(minimum = 0)]
    max_output_tokens: Option<usize>,
    /// `{"format": {"type": "text"}}`, `json_object`, or `json_schema` with `name` and `schema`
    #[schema(value_type = Option<Object>)]
    text: Option<Value>,
    /// Functions that may be called: `{"type": "function", "name", "parameters"}`; tools of other types are left out
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Value>>,
    /// `auto`, `none`, `required`, or `{"type": "function", "name"}`
    tool_choice: Option<Value>,
    /// Whether several functions may be called at once
    parallel_tool_calls: Option<bool>,
    /// `effort` is the template's variable `reasoning_effort`; `none` sets `enable_thinking` to false
    #[schema(value_type = Option<Object>)]
    reasoning: Option<Value>,
    /// More variables of the chat template
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// Given back as it is
    #[schema(value_type = Option<Object>)]
    metadata: Option<Value>,
}

/// A response is no more.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ResponseDeleted {
    id: String,
    /// `response`
    object: &'static str,
    deleted: bool,
}

/// What is asked, read.
struct Asked {
    options: GenerationOptions,
    shape: Shape,
    kwargs: Map<String, Value>,
    input: Value,
    instructions: Option<String>,
    previous: Option<String>,
    is_stored: bool,
    /// The fields of the response that repeat the request.
    echo: Value,
}

impl Asked {
    fn read(mut fields: Fields) -> Result<Self> {
        let most = fields.count("max_output_tokens", 0..=i32::MAX as usize)?;
        let mut options = GenerationOptions::read(&mut fields)?;
        if options.count() > 1 {
            return Err(ApiError::field("n", "a response has one answer"));
        }
        options.max_tokens = most.or(options.max_tokens);
        if fields.boolean("background")? == Some(true) {
            return Err(ApiError::field("background", "answers are given at once"));
        }
        if fields.take("conversation").is_some() {
            let reason = "none are kept here; `previous_response_id` goes on from a response";
            return Err(ApiError::field("conversation", reason));
        }
        let input = fields.take("input");
        let input = fields.required("input", input)?;
        let instructions = fields.text("instructions")?;
        let previous = fields.text("previous_response_id")?;
        let is_stored = fields.boolean("store")?.unwrap_or(true);
        let tools = fields.list("tools")?.unwrap_or_default();
        let choice = fields.take("tool_choice").unwrap_or_else(|| "auto".into());
        let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
        let text = fields.object("text")?;
        let mut kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
        let reasoning = fields.object("reasoning")?;
        let effort = reasoning.as_ref().and_then(|reasoning| reasoning.get("effort")?.as_str());
        if let Some(effort) = effort {
            if effort == "none" {
                kwargs.entry("enable_thinking").or_insert(false.into());
            }
            kwargs.entry("reasoning_effort").or_insert(effort.into());
        }
        let metadata = fields.object("metadata")?.unwrap_or_default();
        // What matters to accounts and caches alone.
        for name in ["prompt_cache_key", "safety_identifier", "client_metadata"] {
            fields.take(name);
        }
        fields.finish()?;
        let echo = json!({
            "instructions": instructions, "previous_response_id": previous, "store": is_stored,
            "max_output_tokens": options.max_tokens, "temperature": options.temperature,
            "top_p": options.top_p, "tools": tools, "tool_choice": choice,
            "parallel_tool_calls": parallel, "metadata": metadata,
            "text": text.clone().unwrap_or_else(|| json!({"format": {"type": "text"}}).as_object().cloned().unwrap_or_default()),
            "reasoning": {"effort": effort, "summary": null}
        });
        let mut shape = json!({
            "tools": input::tools(tools)?, "tool_choice": input::tool_choice(choice),
            "parallel_tool_calls": parallel
        });
        if let Some(format) = input::format(text)? {
            shape["response_format"] = format;
        }
        let shape = Shape::read(&mut Fields::of(shape)?)?;
        Ok(Self { options, shape, kwargs, input, instructions, previous, is_stored, echo })
    }
}

pub(crate) async fn create<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(scope): Extension<Scope>,
    JsonBody(fields): JsonBody,
) -> Result<Response> {
    answer(app, scope, fields).await.map_err(|error| {
        error.renamed("messages", "input").renamed("response_format", "text.format")
    })
}

async fn answer<B: Backend>(app: Arc<App<B>>, scope: Scope, fields: Fields) -> Result<Response> {
    let asked = Asked::read(fields)?;
    let past = match &asked.previous {
        None => None,
        Some(id) => Some(app.responses.get(scope, id).ok_or_else(|| {
            let reason = "there is no such response here; the least recently used are dropped";
            let error = ApiError::field("previous_response_id", reason);
            ApiError { status: axum::http::StatusCode::NOT_FOUND, ..error }
                .with_code("previous_response_not_found")
        })?),
    };
    let past = past.as_ref().map_or(&[][..], |stored| &stored.messages);
    let messages = input::messages(past, asked.input)?;
    let is_stream = asked.options.is_stream();
    let script =
        ResponseScript::new(&app, scope, asked.echo, asked.is_stored.then(|| messages.clone()));
    let conversation = Conversation {
        messages: instructed(messages, asked.instructions),
        options: asked.options,
        shape: asked.shape,
        kwargs: asked.kwargs,
        is_divided: true,
        session: None,
        continues: false,
        top: None,
    };
    let begun = conversation.begin(&app, scope).await?;
    let mut script = script.answering(begun.is_forced);
    if is_stream {
        return sse::stream(begun.pieces, 1, script).await;
    }
    begun.read(|piece| script.take(piece, &mut sse::Events::default())).await?;
    Ok(Json(script.response).into_response())
}

fn missing() -> ApiError {
    let reason = "there is no such response here; the least recently used are dropped";
    let error = ApiError::not_found(reason).with_code("response_not_found");
    ApiError { param: Some("id".into()), ..error }
}

pub(crate) async fn one<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(scope): Extension<Scope>,
    Id(id): Id,
) -> Result<Json<Value>> {
    let stored = (id.len() <= MAX_ID).then(|| app.responses.get(scope, &id)).flatten();
    stored.map(|stored| Json(stored.response.clone())).ok_or_else(missing)
}

pub(crate) async fn delete<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(scope): Extension<Scope>,
    Id(id): Id,
) -> Result<Json<ResponseDeleted>> {
    if id.len() > MAX_ID || !app.responses.delete(scope, &id) {
        return Err(missing());
    }
    Ok(Json(ResponseDeleted { id, object: "response", deleted: true }))
}
