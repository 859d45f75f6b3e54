//! What is there and how it does: models, properties, health, metrics.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use boostr::backend::Backend;
use serde::Serialize;
use utoipa::ToSchema;

use super::Id;
use crate::app::{App, moment};
use crate::error::{ApiError, ErrorDetail, Result};
use crate::options::unknown_model;

/// The models of a server: one.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelList {
    /// `list`
    object: &'static str,
    data: Vec<ModelCard>,
    /// The first and the last of them, and that there are no more, as Anthropic's clients read it
    first_id: String,
    last_id: String,
    has_more: bool,
}

/// A model.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelCard {
    id: String,
    /// `model`
    object: &'static str,
    /// When it was loaded, in seconds since 1970
    created: u64,
    owned_by: &'static str,
    /// `model`, by Anthropic's name
    #[serde(rename = "type")]
    kind: &'static str,
    display_name: String,
    /// When it was loaded, in the form of RFC 3339
    created_at: String,
    /// Tokens that a sequence may have, or for which the model was made; by vLLM's name
    #[serde(skip_serializing_if = "Option::is_none")]
    max_model_len: Option<usize>,
    meta: ModelMeta,
}

/// More of a model, by llama.cpp's names.
#[derive(Debug, Serialize, ToSchema)]
#[expect(clippy::struct_field_names, reason = "the names are llama.cpp's")]
struct ModelMeta {
    n_vocab: usize,
    /// Tokens that the model was made for, if its file says so
    n_ctx_train: Option<usize>,
    n_embd: usize,
    n_params: usize,
}

/// What a page has to know.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Props {
    model: String,
    parameters: usize,
    /// What a sequence that has seen nothing takes; with attention it grows
    state_bytes: usize,
    has_chat_template: bool,
    vocab: usize,
    defaults: Defaults,
    version: &'static str,
    /// Whether conversations are kept
    sessions: bool,
}

/// What a request gets that does not choose.
#[derive(Debug, Serialize, ToSchema)]
struct Defaults {
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
    max_tokens: usize,
}

/// Whether requests are answered.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Health {
    /// `ok`, `loading` or `draining`
    status: &'static str,
    /// For how long the server has been loading its model
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<u64>,
    /// Where requests are not answered, why: what they are told too
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorDetail>,
}

const OK: Health = Health { status: "ok", seconds: None, error: None };

fn card<B: Backend>(app: &App<B>) -> Result<ModelCard> {
    let loaded = app.ready()?;
    let (created, model) = (loaded.created, &loaded.lm.model);
    let trained = model.trained_length();
    Ok(ModelCard {
        max_model_len: model.context_limit().or(trained),
        meta: ModelMeta {
            n_vocab: model.vocab_rows(),
            n_ctx_train: trained,
            n_embd: model.width(),
            n_params: model.parameters().0,
        },
        id: app.config.model_name.clone(),
        object: "model",
        kind: "model",
        display_name: app.config.model_name.clone(),
        created_at: moment(created),
        created,
        owned_by: "boostr",
    })
}

pub(crate) async fn list<B: Backend>(State(app): State<Arc<App<B>>>) -> Result<Json<ModelList>> {
    let card = card(&app)?;
    let (first_id, last_id) = (card.id.clone(), card.id.clone());
    Ok(Json(ModelList { object: "list", data: vec![card], first_id, last_id, has_more: false }))
}

pub(crate) async fn one<B: Backend>(
    State(app): State<Arc<App<B>>>,
    Id(id): Id,
) -> Result<Json<ModelCard>> {
    let card = card(&app)?;
    if id == card.id { Ok(Json(card)) } else { Err(unknown_model(&card.id)) }
}

pub(crate) async fn props<B: Backend>(State(app): State<Arc<App<B>>>) -> Result<Json<Props>> {
    let loaded = app.ready()?;
    let lm = &loaded.lm;
    let options = crate::options::GenerationOptions::default();
    let sampler = options.sampler(&lm.defaults, lm.vocab_limit(), 0)?;
    Ok(Json(Props {
        model: app.config.model_name.clone(),
        parameters: lm.model.parameters().0,
        state_bytes: loaded.state_bytes,
        has_chat_template: !loaded.template.is_plain(),
        vocab: lm.vocab_limit(),
        defaults: Defaults {
            temperature: sampler.temperature,
            top_k: sampler.top_k,
            top_p: sampler.top_p,
            min_p: sampler.min_p,
            max_tokens: options.tokens(&lm.defaults, &app.config.limits),
        },
        version: env!("CARGO_PKG_VERSION"),
        sessions: loaded.sessions.is_some(),
    }))
}

pub(crate) async fn health<B: Backend>(State(app): State<Arc<App<B>>>) -> Response {
    let Err(error) = app.ready() else { return Json(OK).into_response() };
    let loading = (!app.is_draining()).then(|| app.begun.elapsed().as_secs());
    let status = if loading.is_some() { "loading" } else { "draining" };
    let health = Health { status, seconds: loading, error: Some(error.detail()) };
    error.with_body(&health)
}

/// Whether the process is up, whatever it is doing.
pub(crate) async fn live() -> Json<Health> {
    Json(OK)
}

pub(crate) async fn metrics<B: Backend>(State(app): State<Arc<App<B>>>) -> Result<Response> {
    let stats = app.loaded().map(|loaded| loaded.engine.stats());
    let (desks, waits) = (&app.desks, "Requests that wait for a hand");
    let gauges = [
        ("inflight_bytes", "Memory of bodies under way", app.inflight.used()),
        ("waiting_prompts", waits, desks.prompts.waiting()),
        ("waiting_texts", waits, desks.texts.waiting()),
        ("waiting_sessions", waits, desks.sessions.waiting()),
    ];
    let text = app.metrics.text(stats, &gauges).map_err(|error| ApiError::failed(&error))?;
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response())
}
