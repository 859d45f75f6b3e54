//! The endpoints.

mod alone;
mod answer;
mod anthropic;
mod beams;
mod chat;
mod completions;
mod conversation;
mod embeddings;
mod models;
mod ollama;
mod prompt;
mod responses;
mod scored;
mod sessions;
mod text;

use std::borrow::Cow;
use std::future::ready;
use std::sync::Arc;

use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use boostr::backend::Backend;
use percent_encoding::percent_decode_str;

use crate::app::App;
use crate::endpoint::{self, Endpoint};
use crate::error::{ApiError, Result};
use crate::form::FormFields;
use crate::guard::guard;
use crate::options::GenerationOptions;
use crate::shape::Shape;

use answer::{ChatChunk, ChatCompletion, TextCompletion};
use anthropic::{Message, MessageEvent, MessageFields, TokenCount};
use chat::ChatFields;
use completions::CompletionFields;
use embeddings::{EmbeddingFields, Embeddings};
use models::{Health, ModelCard, ModelList, Props};
use ollama::{
    OllamaAnswer, OllamaChatFields, OllamaFields, OllamaPromptFields, OllamaShow, OllamaShowFields,
    OllamaTags, OllamaVersion,
};
use responses::{ResponseDeleted, ResponseEvent, ResponseFields, ResponseItems, ResponseObject};
use sessions::{
    BranchFields, Deleted, NewFields, RewindFields, SessionCard, SessionList, SessionTree,
};
use text::{DetokenizeFields, Prompt, TemplateFields, Text, TokenizeFields, Tokens};

/// Where counters are, unless they are turned off.
const METRICS: &str = "/metrics";
/// Where Anthropic's API is, and what begins all paths of Ollama's.
const MESSAGES: &str = "/v1/messages";
const OLLAMA: &str = "/api/";

/// All endpoints. [`endpoint::document`] makes `/openapi.json` of this list.
fn endpoints<B: Backend>() -> Vec<Endpoint<B>> {
    vec![
        Endpoint::post(
            "/v1/chat/completions",
            "The assistant's turn in a conversation",
            chat::complete::<B>,
        )
        .takes::<GenerationOptions>()
        .takes::<ChatFields>()
        .takes::<Shape>()
        .takes::<FormFields>()
        .streams::<ChatCompletion, ChatChunk>(),
        Endpoint::post("/v1/responses", "The assistant's turn, in items", responses::create::<B>)
            .takes::<GenerationOptions>()
            .takes::<ResponseFields>()
            .streams::<ResponseObject, ResponseEvent>(),
        Endpoint::get("/v1/responses/{id}", "A response that is kept", responses::one::<B>)
            .gives::<ResponseObject>(),
        Endpoint::delete("/v1/responses/{id}", "No more of a response", responses::delete::<B>)
            .gives::<ResponseDeleted>(),
        Endpoint::post(
            "/v1/responses/{id}/cancel",
            "The end of a response in the background: there are none",
            responses::cancel::<B>,
        )
        .gives::<ResponseObject>(),
        Endpoint::get(
            "/v1/responses/{id}/input_items",
            "The items of the conversation before a response",
            responses::input_items::<B>,
        )
        .gives::<ResponseItems>(),
        Endpoint::post("/v1/completions", "A text goes on", completions::complete::<B>)
            .takes::<GenerationOptions>()
            .takes::<CompletionFields>()
            .takes::<FormFields>()
            .streams::<TextCompletion, TextCompletion>(),
        Endpoint::post(MESSAGES, "The assistant's turn, in blocks", anthropic::create::<B>)
            .takes::<GenerationOptions>()
            .takes::<MessageFields>()
            .streams::<Message, MessageEvent>(),
        Endpoint::post(
            "/v1/messages/count_tokens",
            "How long a conversation is",
            anthropic::count_tokens::<B>,
        )
        .takes::<MessageFields>()
        .gives::<TokenCount>(),
        Endpoint::post("/v1/embeddings", "Texts as vectors", embeddings::embed::<B>)
            .takes::<EmbeddingFields>()
            .gives::<Embeddings>(),
        Endpoint::get("/v1/models", "What models there are: one", models::list::<B>)
            .gives::<ModelList>(),
        Endpoint::get("/v1/models/{id}", "A model", models::one::<B>).gives::<ModelCard>(),
        Endpoint::get("/v1/sessions", "All sessions", sessions::list::<B>).gives::<SessionList>(),
        Endpoint::post("/v1/sessions", "A new session", sessions::create::<B>)
            .may_take::<NewFields>()
            .creates::<SessionCard>(),
        Endpoint::get("/v1/sessions/{id}", "A session with its turns", sessions::one::<B>)
            .gives::<SessionTree>(),
        Endpoint::delete("/v1/sessions/{id}", "No more of a session", sessions::delete::<B>)
            .gives::<Deleted>(),
        Endpoint::post(
            "/v1/sessions/{id}/branch",
            "A copy of a session, up to a turn",
            sessions::branch::<B>,
        )
        .takes::<BranchFields>()
        .creates::<SessionCard>(),
        Endpoint::post(
            "/v1/sessions/{id}/rewind",
            "Back to an earlier turn",
            sessions::rewind::<B>,
        )
        .takes::<RewindFields>()
        .gives::<SessionCard>(),
        Endpoint::post(
            "/v1/sessions/{id}/save",
            "Where the state of a session is",
            sessions::save::<B>,
        )
        .gives::<SessionCard>(),
        Endpoint::post("/api/chat", "The assistant's turn, in lines", ollama::chat::<B>)
            .takes::<OllamaChatFields>()
            .takes::<OllamaFields>()
            .streams_lines::<OllamaAnswer>(),
        Endpoint::post("/api/generate", "A text goes on, in lines", ollama::generate::<B>)
            .takes::<OllamaPromptFields>()
            .takes::<OllamaFields>()
            .streams_lines::<OllamaAnswer>(),
        Endpoint::get("/api/tags", "What models there are: one", ollama::tags::<B>)
            .gives::<OllamaTags>(),
        Endpoint::post("/api/show", "The properties of a model", ollama::show::<B>)
            .takes::<OllamaShowFields>()
            .gives::<OllamaShow>(),
        Endpoint::get("/api/version", "The version of the server", ollama::version)
            .gives::<OllamaVersion>(),
        Endpoint::post("/tokenize", "The tokens of a text", text::tokenize::<B>)
            .takes::<TokenizeFields>()
            .gives::<Tokens>(),
        Endpoint::post("/detokenize", "The text of tokens", text::detokenize::<B>)
            .takes::<DetokenizeFields>()
            .gives::<Text>(),
        Endpoint::post(
            "/apply-template",
            "The text that a model is given for messages",
            text::apply_template::<B>,
        )
        .takes::<TemplateFields>()
        .gives::<Prompt>(),
        Endpoint::get("/props", "What the model and its defaults are", models::props::<B>)
            .gives::<Props>(),
        Endpoint::get("/health", "Whether requests are answered", models::health::<B>)
            .gives::<Health>()
            .or_not_now::<Health>(),
        Endpoint::get("/livez", "Whether the process is up", models::live).gives::<Health>(),
        Endpoint::get(METRICS, "Counters, for Prometheus", models::metrics::<B>).gives_text(),
    ]
}

/// An answer to a request for `path`: an error is written as the API there writes it.
pub(crate) fn in_own_form(path: &str, response: Response) -> Response {
    let Some(error) = response.extensions().get::<ApiError>() else { return response };
    let after = path.strip_prefix(MESSAGES);
    if after.is_some_and(|after| after.is_empty() || after.starts_with('/')) {
        error.with_body(&anthropic::error(error))
    } else if path.starts_with(OLLAMA) {
        error.with_body(&ollama::error(error))
    } else {
        response
    }
}

/// All paths, behind the guard.
pub(crate) fn router<B: Backend>(app: Arc<App<B>>) -> Router {
    let endpoints = endpoints::<B>();
    let document = endpoint::document(&endpoints);
    let paths: Vec<&'static str> = endpoints.iter().map(|endpoint| endpoint.path).collect();
    let mut router =
        Router::new().route("/openapi.json", get(move || ready(Json(document.clone()))));
    for endpoint in endpoints {
        if endpoint.path != METRICS || app.config.metrics {
            router = router.route(endpoint.path, endpoint.route);
        }
    }
    if app.config.page {
        router = router.merge(crate::page::routes());
    }
    router
        .fallback(move |uri: Uri| ready(unknown_path(uri.path(), &paths)))
        .method_not_allowed_fallback(unknown_method)
        .layer(axum::middleware::from_fn_with_state(app.clone(), guard::<B>))
        .with_state(app)
}

fn unknown_path(path: &str, paths: &[&'static str]) -> ApiError {
    let message = "there is nothing at this path; /openapi.json lists what there is";
    match meant(path, paths) {
        Some(meant) => ApiError::not_found(format!("{message}; perhaps `{meant}` is meant")),
        None => ApiError::not_found(message),
    }
}

/// The endpoint that a path ends like: clients leave out `/v1`, or put something before it.
fn meant(path: &str, paths: &[&'static str]) -> Option<&'static str> {
    let asked: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let is_meant = |known: &&&'static str| {
        let known: Vec<&str> = known.split('/').filter(|part| !part.is_empty()).collect();
        let own = known.strip_prefix(&["v1"]).unwrap_or(&known);
        let fits = |(asked, own): (&&str, &&str)| own.starts_with('{') || asked == own;
        asked.len() >= own.len()
            && asked.iter().rev().zip(own.iter().rev()).all(fits)
            && (asked.len() == own.len() || own.first().is_some_and(|part| !part.starts_with('{')))
    };
    paths.iter().filter(is_meant).max_by_key(|known| known.split('/').count()).copied()
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

/// Which part of a list is wanted: `?limit=N&after=LAST`.
struct Page {
    limit: usize,
    /// The last one of the page before.
    after: Option<String>,
}

const PAGE: usize = 100;
const MAX_PAGE: usize = 1000;

impl<S: Send + Sync> FromRequestParts<S> for Page {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self> {
        let mut page = Self { limit: PAGE, after: None };
        for (name, value) in pairs(&parts.uri)? {
            match &*name {
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| (1..=MAX_PAGE).contains(limit));
                    page.limit = limit.ok_or_else(|| {
                        ApiError::field(
                            "limit",
                            format!("expected an integer from 1 to {MAX_PAGE}"),
                        )
                    })?;
                }
                "after" => page.after = Some(value),
                _ => {}
            }
        }
        Ok(page)
    }
}

/// The pairs of a query, its escapes read: `%2C`, and `+` for a space.
fn pairs(uri: &Uri) -> Result<Vec<(String, String)>> {
    let read = |name: &str, text: &str| {
        let text = text.replace('+', " ");
        let text = percent_decode_str(&text).decode_utf8();
        text.map(Cow::into_owned).map_err(|_| ApiError::field(name, "expected UTF-8 in the query"))
    };
    let pairs = uri.query().into_iter().flat_map(|query| query.split('&'));
    let pairs = pairs.filter_map(|pair| pair.split_once('='));
    pairs.map(|(name, value)| Ok((read("query", name)?, read(name, value)?))).collect()
}

/// Work for what is generated, on a thread that may be busy.
async fn blocking<B: Backend, T: Send + 'static>(
    app: &App<B>,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    app.desks.prompts.blocking(app, work).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_read_with_its_escapes() {
        let uri: Uri = "/x?after=a%3Ab%2F%C3%BC+1&limit=3&bare&empty=".parse().unwrap();
        let own = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        let expected = [("after", "a:b/ü 1"), ("limit", "3"), ("empty", "")].map(own);
        assert_eq!(pairs(&uri).unwrap(), expected);
        let error = pairs(&"/x?after=%FF".parse().unwrap()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("after"));
        assert!(pairs(&"/x".parse().unwrap()).unwrap().is_empty());
    }

    #[test]
    fn a_path_that_is_nearly_one_names_it() {
        let paths =
            ["/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{id}", "/health"];
        for (asked, meant_path) in [
            ("/chat/completions", Some("/v1/chat/completions")),
            ("/v1/v1/chat/completions", Some("/v1/chat/completions")),
            ("/v1/chat/completions/", Some("/v1/chat/completions")),
            ("/openai/v1/completions", Some("/v1/completions")),
            ("/models", Some("/v1/models")),
            ("/v1/models/", Some("/v1/models")),
            ("/models/demo", Some("/v1/models/{id}")),
            ("/v1/health", Some("/health")),
            ("/v1/audio/speech", None),
            ("/favicon.ico", None),
            ("/", None),
        ] {
            assert_eq!(meant(asked, &paths), meant_path, "{asked}");
        }
        assert!(unknown_path("/models", &paths).message.contains("`/v1/models`"));
    }
}
