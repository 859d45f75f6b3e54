//! What every request passes: limits of its head, `Host`, `Origin`, the key; and what every answer gets.

use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use boostr::backend::Backend;
use hyper::body::Body as HttpBody;
use tokio::time::Instant;
use tracing::Instrument;

use crate::api;
use crate::app::App;
use crate::body::Noticed;
use crate::config::Config;
use crate::error::{ApiError, Result};
use crate::page;
use crate::{fields, inflight};

/// Longest head of a request, in bytes of names and values.
const MAX_HEAD: usize = 64 << 10;
const MAX_HEADERS: usize = 100;
pub(crate) const TOO_LARGE: &str = "headers: expected at most 100 and 65536 bytes";
/// Longest id of a request that is taken from the client.
const MAX_ID: usize = 64;

pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The names of fields that a request has and nobody asked for.
const IGNORED: HeaderName = HeaderName::from_static("x-boostr-ignored");
/// Headers of answers that pages of listed origins may read.
const EXPOSED: &str = "x-request-id, x-boostr-ignored, retry-after";
/// What of a request an answer to such a page depends on.
const VARIED: &str = "origin, access-control-request-headers";

/// Beside the files of the page: nothing in them is anyone's.
const PUBLIC: [&str; 2] = ["/openapi.json", "/livez"];
/// What only those of this machine may see without a key.
const PUBLIC_ON_LOOPBACK: [&str; 2] = ["/health", "/metrics"];

/// Lets a request pass or not, and finishes its answer.
pub(crate) async fn guard<B: Backend>(
    State(app): State<Arc<App<B>>>,
    mut request: Request,
    next: Next,
) -> Response {
    let start = Instant::now();
    let id = request_id(request.headers()).unwrap_or_else(|| app.ids.name("req-"));
    let matched = request.extensions().get::<MatchedPath>();
    let route = matched.map_or_else(|| "other".to_owned(), |path| path.as_str().to_owned());
    let method = request.method().clone();
    let origin = request.headers().get(header::ORIGIN).cloned();
    let path = request.uri().path().to_owned();
    // Its files lie in the program.
    let is_page = page::has(&path);
    let span = tracing::info_span!("request", id);

    let mut response = async {
        match check(&app.config, &mut request) {
            Ok(None) => {
                let answer = fields::scope(inflight::scope(next.run(request)));
                caught(&app.metrics.panics, async {
                    let (mut response, ignored) = answer.await;
                    if let Ok(names) = HeaderValue::from_str(&ignored.join(", "))
                        && !ignored.is_empty()
                    {
                        response.headers_mut().insert(IGNORED, names);
                    }
                    response
                })
                .await
            }
            Ok(Some(response)) => response,
            Err(error) => error.into_response(),
        }
    }
    .instrument(span.clone())
    .await;

    let mut held = app.inflight.begin();
    let size = response.body().size_hint().exact().unwrap_or(0);
    // One that is larger than all that there may be is sent alone.
    let size = usize::try_from(size).unwrap_or(usize::MAX).min(app.inflight.most());
    if !is_page && let Err(error) = held.resize(size) {
        response = error.into_response();
    }
    response = api::in_own_form(&path, response);
    let code = response.status().as_u16();
    app.metrics.answered(&route, code);
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&id) {
        headers.insert(REQUEST_ID, id);
    }
    secure(headers);
    if let Some(origin) = origin.filter(|origin| is_listed(&app.config, origin)) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
        headers.insert(header::VARY, HeaderValue::from_static(VARIED));
    }
    if app.is_draining() {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response.map(|body| {
        Body::new(Noticed::new(body, move || {
            drop(held);
            let time = start.elapsed();
            app.metrics.ended(&route, time);
            let ms = time.as_secs_f64() * 1e3;
            tracing::info!(parent: &span, %method, route, code, ms, "answered");
        }))
    })
}

/// Whether a request may pass; some are answered here.
fn check(config: &Config, request: &mut Request) -> Result<Option<Response>> {
    let headers = request.headers();
    let size: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    if headers.len() > MAX_HEADERS || size + request.uri().path().len() > MAX_HEAD {
        return Err(ApiError::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, TOO_LARGE));
    }
    let host = host(request)?;
    check_host(config, host.as_ref())?;
    if let Some(origin) = headers.get(header::ORIGIN) {
        let listed = is_listed(config, origin);
        let preflight = headers.get(header::ACCESS_CONTROL_REQUEST_METHOD);
        if request.method() == Method::OPTIONS && preflight.is_some() && listed {
            return Ok(Some(preflight_answer(headers)));
        }
        let is_safe = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
        if !is_safe && !listed && !is_same(origin, host.as_ref()) {
            let message = "Origin: pages of other sites may not use this server; \
                           one that may is named by --cors-origin";
            return Err(ApiError::new(StatusCode::FORBIDDEN, message).with_code("origin"));
        }
    }
    let path = request.uri().path();
    let is_public = PUBLIC.contains(&path)
        || page::has(path)
        || config.loopback && PUBLIC_ON_LOOPBACK.contains(&path);
    match config.keys.scope(request.headers()) {
        Some(scope) => {
            request.extensions_mut().insert(scope);
        }
        None if is_public => {}
        None => {
            let message = "a key is needed: `Authorization: Bearer KEY` or `x-api-key: KEY`";
            let error = ApiError::new(StatusCode::UNAUTHORIZED, message);
            return Err(error.with_code("invalid_api_key"));
        }
    }
    Ok(None)
}

/// The host and port that the client thinks it talks to.
fn host(request: &Request) -> Result<Option<Authority>> {
    if let Some(authority) = request.uri().authority() {
        return Ok(Some(authority.clone()));
    }
    let mut all = request.headers().get_all(header::HOST).iter();
    match (all.next(), all.next()) {
        (None, _) if request.version() < Version::HTTP_11 => Ok(None),
        (Some(host), None) if !host.is_empty() => {
            let parsed = Authority::try_from(host.as_bytes());
            parsed.map(Some).map_err(|_| ApiError::invalid("Host: expected a name and a port"))
        }
        _ => Err(ApiError::invalid("Host: expected exactly one")),
    }
}

/// Against pages whose name was made to mean this machine: their requests carry that name.
fn check_host(config: &Config, host: Option<&Authority>) -> Result<()> {
    let is_open = !config.loopback && config.keys.is_empty();
    if !config.loopback && !is_open && config.allowed_hosts.is_empty() {
        return Ok(());
    }
    let Some(host) = host else { return Ok(()) };
    let name = host.host();
    // A page's address is a name, which can be made to mean any machine; a number cannot.
    let is_number = || name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
    let is_own = config.loopback
        && ["localhost", "127.0.0.1", "[::1]"].iter().any(|own| own.eq_ignore_ascii_case(name))
        || is_open && (name.eq_ignore_ascii_case("localhost") || is_number());
    let given = |allowed: &String| allowed.eq_ignore_ascii_case(name) || allowed == host.as_str();
    if is_own || config.allowed_hosts.iter().any(given) {
        return Ok(());
    }
    let message = "Host: this server does not go by that name; one that it may go by is named by --allowed-host";
    Err(ApiError::new(StatusCode::FORBIDDEN, message).with_code("host"))
}

fn is_listed(config: &Config, origin: &HeaderValue) -> bool {
    config.cors_origins.iter().any(|listed| listed == "*" || listed.as_bytes() == origin.as_bytes())
}

/// Whether a page came from this server itself.
fn is_same(origin: &HeaderValue, host: Option<&Authority>) -> bool {
    let Some((_, authority)) = origin.to_str().ok().and_then(|origin| origin.split_once("://"))
    else {
        return false;
    };
    host.is_some_and(|host| host.as_str().eq_ignore_ascii_case(authority))
}

/// A page that may use the server may send what headers it likes: clients have some of their own.
fn preflight_answer(asked: &HeaderMap) -> Response {
    let usual = HeaderValue::from_static("authorization, content-type, x-api-key, x-request-id");
    let asked = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let headers = [
        (header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, DELETE")),
        (header::ACCESS_CONTROL_ALLOW_HEADERS, asked.unwrap_or(usual)),
        (header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600")),
    ];
    (StatusCode::NO_CONTENT, headers).into_response()
}

/// The client's own id of a request, if it can be repeated without harm.
fn request_id(headers: &HeaderMap) -> Option<String> {
    let id = headers.get(REQUEST_ID)?.to_str().ok()?;
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    let fits = (1..=MAX_ID).contains(&id.len()) && id.bytes().all(is_plain);
    fits.then(|| id.to_owned())
}

/// What every answer says against harm, beyond that nobody stores it.
pub(crate) const SECURE: [(HeaderName, &str); 4] = [
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

fn secure(headers: &mut HeaderMap) {
    for (name, value) in SECURE {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
}

/// An answer, also when what makes it panics, which is counted.
async fn caught(panics: &AtomicU64, answer: impl Future<Output = Response>) -> Response {
    let mut answer = pin!(answer);
    let result = poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| answer.as_mut().poll(cx))) {
        Ok(poll) => poll.map(Ok),
        Err(_) => std::task::Poll::Ready(Err(())),
    });
    result.await.unwrap_or_else(|()| {
        panics.fetch_add(1, Ordering::Relaxed);
        ApiError::internal(&"a handler panicked").into_response()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn r_f13_a_handler_that_panics_is_a_500_that_is_counted() {
        let panics = AtomicU64::new(0);
        let answer = caught(&panics, async { panic!("as the test wants") }).await;
        assert_eq!(answer.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let answer = caught(&panics, async { StatusCode::OK.into_response() }).await;
        assert_eq!((answer.status(), panics.into_inner()), (StatusCode::OK, 1));
    }
}
