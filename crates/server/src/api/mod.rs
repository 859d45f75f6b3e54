//! The endpoints.

mod alone;
mod answer;
mod beams;
mod chat;
mod completions;
mod embeddings;
mod models;
mod prompt;
mod sessions;
mod text;

use std::sync::Arc;

use axum::Router;
use axum::extract::{FromRequestParts, Path};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use boostr::backend::Backend;

use crate::app::App;
use crate::error::{ApiError, Result};
use crate::guard::guard;

pub(crate) use answer::{ChatChunk, ChatCompletion, TextCompletion};
pub(crate) use chat::ChatFields;
pub(crate) use completions::CompletionFields;
pub(crate) use embeddings::{EmbeddingFields, Embeddings};
pub(crate) use models::{Health, ModelCard, ModelList, Props};
pub(crate) use sessions::{
    BranchFields, Deleted, NewFields, RewindFields, SessionCard, SessionList, SessionTree,
};
pub(crate) use text::{DetokenizeFields, Prompt, TemplateFields, Text, TokenizeFields, Tokens};

/// All paths, behind the guard.
pub(crate) fn router<B: Backend>(app: Arc<App<B>>) -> Router {
    let mut router = Router::new()
        .route("/v1/chat/completions", post(chat::complete::<B>))
        .route("/v1/completions", post(completions::complete::<B>))
        .route("/v1/embeddings", post(embeddings::embed::<B>))
        .route("/v1/models", get(models::list::<B>))
        .route("/v1/models/{id}", get(models::one::<B>))
        .route("/v1/sessions", get(sessions::list::<B>).post(sessions::create::<B>))
        .route("/v1/sessions/{id}", get(sessions::one::<B>).delete(sessions::delete::<B>))
        .route("/v1/sessions/{id}/branch", post(sessions::branch::<B>))
        .route("/v1/sessions/{id}/rewind", post(sessions::rewind::<B>))
        .route("/v1/sessions/{id}/save", post(sessions::save::<B>))
        .route("/tokenize", post(text::tokenize::<B>))
        .route("/detokenize", post(text::detokenize::<B>))
        .route("/apply-template", post(text::apply_template::<B>))
        .route("/props", get(models::props::<B>))
        .route("/health", get(models::health::<B>))
        .route("/livez", get(models::live))
        .route("/openapi.json", get(crate::openapi::document));
    if app.config.page {
        router = router.merge(crate::page::routes());
    }
    if app.config.metrics {
        router = router.route("/metrics", get(models::metrics::<B>));
    }
    router
        .fallback(unknown_path)
        .method_not_allowed_fallback(unknown_method)
        .layer(axum::middleware::from_fn_with_state(app.clone(), guard::<B>))
        .with_state(app)
}

async fn unknown_path() -> ApiError {
    ApiError::not_found("there is nothing at this path; /openapi.json lists what there is")
}

async fn unknown_method() -> Response {
    let message = "this path does not take that method";
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message).into_response()
}

/// The name in a path.
struct Id(String);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(id)) => Ok(Self(id)),
            Err(_) => Err(ApiError::field("id", "expected UTF-8 in the path")),
        }
    }
}

/// Work of the processor or the disk, on a thread that may be busy, when one is free.
async fn blocking<B: Backend, T: Send + 'static>(
    app: &App<B>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let turn = app.hands.clone().acquire_owned().await;
    let span = tracing::Span::current();
    let result = tokio::task::spawn_blocking(move || {
        let _held = turn;
        span.in_scope(work)
    });
    result.await.unwrap_or_else(|error| Err(ApiError::internal(&error)))
}
