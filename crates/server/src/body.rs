//! Bodies of requests, with limits of size and time, and bodies of answers, whose end is noticed.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use boostr::backend::Backend;
use boostr::files::bytes_without_bom;
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use crate::app::App;
use crate::config::Limits;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::inflight::{self, FREE, Held, size_of_values};

/// Bytes that a body must bring each second, once [`GRACE`] is over.
const MIN_RATE: u64 = 1024;
const GRACE: Duration = Duration::from_secs(5);

/// The fields of a JSON object that came as a body.
pub(crate) struct JsonBody(pub(crate) Fields);

impl<B: Backend> FromRequest<Arc<App<B>>> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App<B>>) -> Result<Self> {
        let (head, body) = request.into_parts();
        let most = check(&head.headers, &app.config.limits)?;
        let mut held = app.inflight.begin();
        let bytes = read(body, most, &app.config.limits, &mut held).await?;
        if bytes.is_empty() {
            return Err(ApiError::invalid("body: expected a JSON object, found nothing"));
        }
        let size = size_of_values(&bytes);
        if size.saturating_sub(FREE) > app.inflight.most() {
            let message =
                format!("body: its JSON would take {size} bytes of memory, which is too much");
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message));
        }
        held.resize(size)?;
        inflight::keep(held);
        let value: Value = serde_json::from_slice(bytes_without_bom(&bytes))
            .map_err(|error| ApiError::invalid(format!("body: not JSON: {error}")))?;
        Fields::of(value).map(|fields| Self(fields.strict(app.config.strict_fields)))
    }
}

/// The same whatever the content type says, as Ollama's clients and examples have it. A page of another site always says
/// its origin, and then the type counts.
pub(crate) struct UntypedJson(pub(crate) Fields);

impl<B: Backend> FromRequest<Arc<App<B>>> for UntypedJson {
    type Rejection = ApiError;

    async fn from_request(mut request: Request, app: &Arc<App<B>>) -> Result<Self> {
        let headers = request.headers_mut();
        if !headers.contains_key(header::ORIGIN) {
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        JsonBody::from_request(request, app).await.map(|JsonBody(fields)| Self(fields))
    }
}

/// The same for requests whose body may be left out.
pub(crate) struct OptionalJson(pub(crate) Fields);

impl<B: Backend> FromRequest<Arc<App<B>>> for OptionalJson {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App<B>>) -> Result<Self> {
        if request.body().size_hint().exact() == Some(0) {
            return Fields::of(Value::Object(Default::default())).map(Self);
        }
        JsonBody::from_request(request, app).await.map(|JsonBody(fields)| Self(fields))
    }
}

/// What can be said of a body before it is read; the bytes that it has at most.
fn check(headers: &HeaderMap, limits: &Limits) -> Result<usize> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or_default().trim());
    if let Some(encoding) = text(header::CONTENT_ENCODING)
        && !encoding.eq_ignore_ascii_case("identity")
    {
        let message = "Content-Encoding: bodies are taken as they are, not compressed";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    let kind = text(header::CONTENT_TYPE).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if !kind.eq_ignore_ascii_case("application/json") {
        // Also keeps forms of other pages out, which browsers send without asking.
        let message = "Content-Type: expected application/json";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    match text(header::CONTENT_LENGTH) {
        Some(length) => match length.parse() {
            Ok(length) if length <= limits.max_body => Ok(length),
            _ => Err(too_large(limits)),
        },
        None if headers.contains_key(header::TRANSFER_ENCODING) => Ok(limits.max_body),
        None => {
            let message = "a request with a body says its Content-Length, or is chunked";
            Err(ApiError::new(StatusCode::LENGTH_REQUIRED, message))
        }
    }
}

fn too_large(limits: &Limits) -> ApiError {
    let message = format!("body: expected at most {} bytes, found more", limits.max_body);
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
}

/// Reads a body of at most `most` bytes.
async fn read(mut body: Body, most: usize, limits: &Limits, held: &mut Held) -> Result<Bytes> {
    let start = Instant::now();
    let mut all = Vec::new();
    loop {
        let earned = Duration::from_secs(all.len() as u64 / MIN_RATE);
        let deadline = start + earned.max(GRACE).min(limits.body_time);
        match timeout_at(deadline, body.frame()).await {
            Ok(Some(Ok(frame))) => {
                let Some(data) = frame.data_ref() else { continue };
                if all.len() + data.len() > limits.max_body {
                    return Err(too_large(limits));
                }
                let size = all.len() + data.len();
                held.resize(size)?;
                if size > all.capacity() {
                    all.reserve_exact((2 * size).min(most.max(size)) - all.len());
                }
                all.extend_from_slice(data);
            }
            Ok(Some(Err(_))) => {
                return Err(ApiError::invalid("body: it ended before all of it had come"));
            }
            Ok(None) => return Ok(all.into()),
            Err(_) => {
                let message = "body: it came too slowly";
                return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message));
            }
        }
    }
}

/// A body that calls `ended` when it was sent or given up.
pub(crate) struct Noticed<F: FnOnce() + Unpin> {
    body: Body,
    ended: Option<F>,
}

impl<F: FnOnce() + Unpin> Noticed<F> {
    pub(crate) fn new(body: Body, ended: F) -> Self {
        Self { body, ended: Some(ended) }
    }
}

impl<F: FnOnce() + Unpin> Drop for Noticed<F> {
    fn drop(&mut self) {
        if let Some(ended) = self.ended.take() {
            ended();
        }
    }
}

impl<F: FnOnce() + Unpin> HttpBody for Noticed<F> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
