//! `/v1/messages`: Anthropic's API for the same conversations.

mod input;
mod output;

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use axum::{Extension, Json};
use boostr::backend::Backend;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::conversation::{Conversation, answer, check_free, goes_on, instructed};
use crate::app::App;
use crate::auth::Scope;
use crate::body::JsonBody;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::options::GenerationOptions;
use crate::shape::Shape;

use output::MessageScript;
pub(crate) use output::{Message, MessageEvent, error};

/// A conversation whose next turn is wanted.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes a body")]
pub(crate) struct MessageFields {
    /// Messages of `user` and `assistant`: a text, or blocks of types `text`, `thinking`, `tool_use`, `tool_result`; the answer
    /// goes on with the text of an assistant's message at the end
    #[schema(value_type = Vec<Object>, min_items = 1)]
    messages: Vec<Value>,
    /// What the model is told before everything: a text, or blocks of type `text`
    #[schema(value_type = Option<Value>)]
    system: Option<Value>,
    /// The answer ends before any of these
    stop_sequences: Option<Vec<String>>,
    /// `{"name", "description", "input_schema"}`; tools that only Anthropic runs are left out
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Value>>,
    /// `{"type": "auto"}`, `any`, `none`, or `tool` with a `name`
    #[schema(value_type = Option<Object>)]
    tool_choice: Option<Value>,
    /// `enabled` and `disabled` set the template's variable `enable_thinking`
    #[schema(value_type = Option<Object>)]
    thinking: Option<Value>,
    /// `{"format": {"type": "json_schema", "schema"}}`
    #[schema(value_type = Option<Object>)]
    output_config: Option<Value>,
    /// More variables of the chat template
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
}

/// How long a conversation is.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TokenCount {
    input_tokens: usize,
}

/// Reads what is asked; an error names the field by its name here.
fn read(mut fields: Fields) -> Result<(Conversation, bool)> {
    let stops = fields.get("stop_sequences", "an array of strings", |value| {
        value.as_array()?.iter().all(Value::is_string).then(|| value.clone())
    })?;
    let mut options = GenerationOptions::read(&mut fields)?;
    if options.count() > 1 {
        return Err(ApiError::field("n", "a message has one answer"));
    }
    if let Some(stops) = stops {
        // White space alone is refused by Anthropic, and ends answers here as any text does.
        let mut stop = Fields::of(json!({"stop": stops}))?;
        let read = GenerationOptions::read(&mut stop);
        options.stop = read.map_err(|error| error.renamed("stop", "stop_sequences"))?.stop;
    }
    let system = fields.take("system").map(|system| input::text("system", system)).transpose()?;
    let messages = fields.list("messages")?;
    let messages = input::messages(fields.required("messages", messages)?)?;
    let mut kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
    if let Some(mut thinking) = fields.fields("thinking")? {
        let kind = thinking.word("type", &["enabled", "disabled", "adaptive"])?;
        match thinking.required("type", kind)? {
            "enabled" => kwargs.entry("enable_thinking").or_insert(true.into()),
            "disabled" => kwargs.entry("enable_thinking").or_insert(false.into()),
            _ => &mut Value::Null,
        };
        thinking.take("budget_tokens");
        thinking.finish()?;
    }
    let tools = fields.list("tools")?.unwrap_or_default();
    let (choice, parallel) = input::tool_choice(fields.fields("tool_choice")?)?;
    let mut shape = json!({
        "tools": input::tools(tools)?, "tool_choice": choice, "parallel_tool_calls": parallel
    });
    if let Some(mut config) = fields.fields("output_config")?
        && let Some(mut format) = config.fields("format")?
    {
        let kind = format.word("type", &["json_schema"])?;
        format.required("type", kind)?;
        let schema = format.object("schema")?;
        let schema = json!({"schema": format.required("schema", schema)?});
        shape["response_format"] = json!({"type": "json_schema", "json_schema": schema});
    }
    for name in ["metadata", "service_tier"] {
        fields.take(name);
    }
    fields.finish()?;
    let is_stream = options.is_stream();
    let shape = Shape::read(&mut Fields::of(shape)?)?;
    let continues = goes_on(&messages);
    if continues {
        check_free(&shape, "messages")?;
    }
    let conversation = Conversation {
        options,
        messages: instructed(messages, system),
        shape,
        kwargs,
        is_divided: true,
        session: None,
        continues,
        top: None,
    };
    Ok((conversation, is_stream))
}

fn renamed(error: ApiError) -> ApiError {
    error.renamed("response_format", "output_config.format")
}

pub(crate) async fn create<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(scope): Extension<Scope>,
    JsonBody(fields): JsonBody,
) -> Result<Response> {
    let (conversation, is_stream) = read(fields).map_err(renamed)?;
    let begun = conversation.begin(&app, scope).await.map_err(renamed)?;
    let (id, model) = (app.ids.name("msg_"), &app.config.model_name);
    let script = MessageScript::new(&id, model, begun.prompt_tokens, begun.is_forced);
    answer(begun, is_stream, script, |script| script.message).await
}

pub(crate) async fn count_tokens<B: Backend>(
    State(app): State<Arc<App<B>>>,
    JsonBody(fields): JsonBody,
) -> Result<Json<TokenCount>> {
    let (conversation, _) = read(fields).map_err(renamed)?;
    let input_tokens = conversation.count(&app).await.map_err(renamed)?;
    Ok(Json(TokenCount { input_tokens }))
}
