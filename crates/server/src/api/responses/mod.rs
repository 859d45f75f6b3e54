//! `/v1/responses`: OpenAI's newer API for the same conversations.

mod input;
mod output;
mod tools;

use std::collections::HashSet;
use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use axum::{Extension, Json};
use boostr::backend::Backend;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::conversation::{self, Conversation, instructed};
use super::{Id, pairs, prompt};
use crate::app::App;
use crate::auth::Scope;
use crate::body::JsonBody;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::options::{GenerationOptions, or_all};
use crate::shape::Shape;
use crate::stored::Stored;

use output::ResponseScript;
pub(crate) use output::{ResponseEvent, ResponseObject};
use tools::Offer;

/// Items of a page, and most of them.
const PAGE: usize = 20;
const MAX_PAGE: usize = 100;

/// A conversation whose next turn is wanted.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes a body")]
pub(crate) struct ResponseFields {
    /// A text of the user, or items of types `message`, `function_call`, `function_call_output`, `custom_tool_call`,
    /// `custom_tool_call_output`, `reasoning`, and `item_reference` to one of a response that is kept
    #[schema(value_type = Value)]
    input: Value,
    /// What the model is told before everything; not taken over by later requests
    instructions: Option<String>,
    /// A response that is kept, which this one goes on from
    previous_response_id: Option<String>,
    /// Keep the response; true unless said otherwise
    store: Option<bool>,
    /// Most tokens of the answer; 512 unless the model says, at most 8192; -1 for no other limit
    #[schema(minimum = -1)]
    max_output_tokens: Option<usize>,
    /// `{"format": {"type": "text"}}`, `json_object`, or `json_schema` with `name` and `schema`
    #[schema(value_type = Option<Object>)]
    text: Option<Value>,
    /// Functions that may be called: `{"type": "function", "name", "parameters"}`; those of type `custom` have a text as input,
    /// and perhaps its `format`; those of type `namespace` have `tools`; tools of other types are left out
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Value>>,
    /// `auto`, `none`, `required`, `{"type": "function", "name"}`, `{"type": "custom", "name"}`, or `allowed_tools`
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

/// Items of the conversation before a response.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ResponseItems {
    /// `list`
    object: &'static str,
    #[schema(value_type = Vec<Object>)]
    data: Vec<Value>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
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
    offer: Offer,
}

impl Asked {
    fn read(mut fields: Fields) -> Result<Self> {
        let most = or_all(&mut fields, "max_output_tokens", i32::MAX as usize, usize::MAX)?;
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
            "max_output_tokens": options.max_tokens.filter(|&most| most < usize::MAX), "temperature": options.temperature,
            "top_p": options.top_p, "tools": tools, "tool_choice": choice,
            "parallel_tool_calls": parallel, "metadata": metadata,
            "text": text.clone().unwrap_or_else(|| json!({"format": {"type": "text"}}).as_object().cloned().unwrap_or_default()),
            "reasoning": {"effort": effort, "summary": null}
        });
        let mut offer = Offer::read(tools, choice)?;
        let mut shape = json!({
            "tools": std::mem::take(&mut offer.functions), "tool_choice": offer.choice.take(),
            "parallel_tool_calls": parallel
        });
        if let Some(format) = input::format(text)? {
            shape["response_format"] = format;
        }
        let mut shape = Shape::read(&mut Fields::of(shape)?)?;
        if offer.answer.is_some() {
            shape = shape.with_input(offer.form.take())?;
        }
        Ok(Self { options, shape, kwargs, input, instructions, previous, is_stored, echo, offer })
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
        None => Vec::new(),
        Some(id) => {
            let found = find(&app, scope, id, Stored::items).await?;
            found.map_err(|reason| {
                let error = ApiError::field("previous_response_id", reason);
                ApiError { status: StatusCode::NOT_FOUND, ..error }
                    .with_code("previous_response_not_found")
            })?
        }
    };
    let mut input = asked.input;
    refer(&app, scope, &past, &mut input).await?;
    let (messages, new) = input::read(&past, input, |prefix| app.ids.name(prefix))?;
    let is_stream = asked.options.is_stream();
    let before = asked.is_stored.then(|| past.into_iter().chain(new).collect());
    let script = ResponseScript::new(&app, scope, asked.echo, asked.offer, before);
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
    let script = script.answering(begun.is_forced);
    conversation::answer(begun, is_stream, script, |script| script.response).await
}

/// Puts the items of responses that are kept in the place of references to them, each once.
async fn refer<B: Backend>(
    app: &Arc<App<B>>,
    scope: Scope,
    past: &[Value],
    input: &mut Value,
) -> Result<()> {
    let items = input.as_array_mut().filter(|items| items.len() <= input::MAX_ITEMS);
    let mut seen: HashSet<String> =
        past.iter().filter_map(|item| item["id"].as_str().map(str::to_owned)).collect();
    let mut bytes = 0_usize;
    for (i, item) in items.into_iter().flatten().enumerate() {
        let Some(id) = input::reference(&format!("input[{i}]"), item)? else { continue };
        let refuse = |reason: String| ApiError::field(format!("input[{i}].id"), reason);
        if !seen.insert(id.clone()) {
            return Err(refuse(format!("item `{id}` is there already")));
        }
        let found = match output::response_of(&id) {
            Some(response) => {
                let of = move |stored: &Stored| stored.output(&id);
                find(app, scope, &response, of).await?.ok().flatten()
            }
            None => None,
        };
        let missing = || {
            let reason = "there is no such item here; items of the least recently used responses are dropped";
            ApiError { status: StatusCode::NOT_FOUND, ..refuse(reason.into()) }
                .with_code("item_not_found")
        };
        *item = found.ok_or_else(missing)?;
        bytes = bytes.saturating_add(prompt::text_bytes(std::slice::from_ref(item)));
        prompt::needed(bytes, app.config.limits.max_prompt, "input")?;
    }
    Ok(())
}

/// A part of a response that is kept, or why there is none.
async fn find<B: Backend, T: Send + 'static>(
    app: &Arc<App<B>>,
    scope: Scope,
    id: &str,
    part: impl FnOnce(&Stored) -> T + Send + 'static,
) -> Result<Result<T, String>> {
    let (all, name) = (app.clone(), id.to_owned());
    let find = move || match all.responses.get(scope, &name) {
        Ok(Some(stored)) => Ok(part(&stored)),
        Ok(None) => {
            Err("there is no such response here; the least recently used are dropped".into())
        }
        Err(reason) => Err(reason),
    };
    if app.responses.is_on_disk() {
        return app.desks.sessions.blocking(app, move || Ok(find())).await;
    }
    Ok(find())
}

fn missing(reason: String) -> ApiError {
    let error = ApiError::not_found(reason).with_code("response_not_found");
    ApiError { param: Some("id".into()), ..error }
}

pub(crate) async fn one<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(scope): Extension<Scope>,
    Id(id): Id,
    uri: Uri,
) -> Result<Json<Value>> {
    if pairs(&uri)?.iter().any(|(name, value)| name == "stream" && value == "true") {
        return Err(ApiError::field("stream", "a response that is kept comes at once"));
    }
    let response = find(&app, scope, &id, |stored| stored.response.clone()).await?;
    response.map(Json).map_err(missing)
}

pub(crate) async fn delete<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(scope): Extension<Scope>,
    Id(id): Id,
) -> Result<Json<ResponseDeleted>> {
    let (all, name) = (app.clone(), id.clone());
    let delete = move || {
        let failed = |reason| {
            let error = ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, reason);
            ApiError { param: Some("id".into()), ..error.with_code("response_not_deleted") }
        };
        all.responses.delete(scope, &name).map_err(failed)
    };
    if !app.desks.sessions.blocking(&app, delete).await? {
        return Err(missing("there is no such response here".into()));
    }
    Ok(Json(ResponseDeleted { id, object: "response", deleted: true }))
}

/// Only answers that are made in the background can be cancelled, and there are none: who closes the connection cancels.
pub(crate) async fn cancel<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(scope): Extension<Scope>,
    Id(id): Id,
) -> Result<Json<Value>> {
    find(&app, scope, &id, |_| ()).await?.map_err(missing)?;
    let reason =
        "a response that is kept is whole; one under way ends when its connection is closed";
    let error = ApiError::invalid(reason).with_code("response_not_cancellable");
    Err(ApiError { param: Some("id".into()), ..error })
}

pub(crate) async fn input_items<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Extension(scope): Extension<Scope>,
    Id(id): Id,
    uri: Uri,
) -> Result<Json<ResponseItems>> {
    let (mut limit, mut after, mut is_ascending) = (PAGE, None, false);
    for (name, value) in pairs(&uri)? {
        match &*name {
            "limit" => {
                let read = value.parse().ok().filter(|limit| (1..=MAX_PAGE).contains(limit));
                let reason = format!("expected an integer from 1 to {MAX_PAGE}");
                limit = read.ok_or_else(|| ApiError::field("limit", reason))?;
            }
            "order" => {
                is_ascending = value == "asc";
                if !is_ascending && value != "desc" {
                    return Err(ApiError::field("order", "expected `asc` or `desc`"));
                }
            }
            "after" => after = Some(value),
            _ => {}
        }
    }
    let mut items =
        find(&app, scope, &id, |stored| stored.input.clone()).await?.map_err(missing)?;
    if !is_ascending {
        items.reverse();
    }
    let start = match &after {
        None => 0,
        Some(id) => {
            let place = items.iter().position(|item| item["id"] == id.as_str());
            place.ok_or_else(|| ApiError::field("after", "there is no item of this id"))? + 1
        }
    };
    let data: Vec<Value> = items.iter().skip(start).take(limit).cloned().collect();
    let id = |item: Option<&Value>| item.and_then(|item| item["id"].as_str()).map(str::to_owned);
    Ok(Json(ResponseItems {
        object: "list",
        first_id: id(data.first()),
        last_id: id(data.last()),
        has_more: start + data.len() < items.len(),
        data,
    }))
}
