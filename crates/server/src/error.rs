//! What a client is told when something is wrong: a status, and `{"error": {message, type, param, code}}`.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use boostr::error::chain;
use serde::Serialize;
use utoipa::ToSchema;

/// Result of what a handler does.
pub(crate) type Result<T, E = ApiError> = std::result::Result<T, E>;

/// A refusal or a failure, as a client sees it.
#[derive(Debug, Clone)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    /// The field of the request that is wrong.
    pub(crate) param: Option<String>,
    /// A word that programs can look for.
    pub(crate) code: Option<&'static str>,
    /// Seconds after which another try may succeed.
    pub(crate) retry_after: Option<u32>,
}

/// The body of every answer that is no success.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ErrorBody {
    error: ErrorDetail,
}

/// What is wrong.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ErrorDetail {
    /// In words: the thing, what was expected, what was found
    message: String,
    /// The kind of error, such as `invalid_request_error`
    r#type: &'static str,
    /// The field of the request, where one is wrong
    param: Option<String>,
    /// A word for programs
    code: Option<&'static str>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// 400: the request cannot be understood or honoured.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// 400 for a field.
    pub(crate) fn field(param: impl Into<String>, reason: impl AsRef<str>) -> Self {
        let param = param.into();
        let message = format!("`{param}`: {}", reason.as_ref());
        Self { param: Some(param), ..Self::invalid(message) }
    }

    /// 404 for something that has a name.
    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self { code: Some("not_found"), ..Self::new(StatusCode::NOT_FOUND, message) }
    }

    /// 500: our fault. The client gets the request's id, the log what happened.
    pub(crate) fn internal(what: &dyn std::fmt::Display) -> Self {
        tracing::error!(error = %what, "a request failed");
        let message =
            "the server failed; its log says more under the id in the header x-request-id";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// The same for an error of the library or the system, with its causes.
    pub(crate) fn failed(error: &dyn std::error::Error) -> Self {
        Self::internal(&chain(error))
    }

    /// 503: not now.
    pub(crate) fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            code: Some(code),
            retry_after: Some(1),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
        }
    }

    /// The same about a field that goes by another name.
    pub(crate) fn renamed(mut self, from: &str, to: &str) -> Self {
        let rest = self.param.as_deref().and_then(|param| param.strip_prefix(from));
        let Some(rest) = rest.filter(|rest| rest.is_empty() || rest.starts_with(['.', '['])) else {
            return self;
        };
        self.param = Some(format!("{to}{rest}"));
        self.message = self.message.replacen(&format!("`{from}"), &format!("`{to}"), 1);
        self
    }

    pub(crate) fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    pub(crate) fn with_retry_after(self, seconds: u32) -> Self {
        Self { retry_after: Some(seconds), ..self }
    }

    /// An error of the library about what the client sent in `param`; what is no fault of the client becomes 500.
    pub(crate) fn of_input(param: &str, error: &boostr::Error) -> Self {
        match error {
            // Where constraints and biases leave no token it is the client's.
            boostr::Error::Argument { name: "logits", reason }
                if !reason.ends_with("no token is allowed") =>
            {
                Self::failed(error)
            }
            boostr::Error::Argument { reason, .. } => Self::field(param, reason),
            boostr::Error::Context { tokens, limit } => {
                // In the words that clients look for.
                let reason = format!(
                    "this model's maximum context length is {limit} tokens, and the sequence has {tokens}"
                );
                Self::field(param, reason).with_code("context_length_exceeded")
            }
            boostr::Error::Unsupported { .. } => Self::field(param, error.to_string()),
            other => Self::failed(other),
        }
    }

    fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            503 => "unavailable_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    pub(crate) fn body(&self) -> ErrorBody {
        ErrorBody { error: self.detail() }
    }

    pub(crate) fn detail(&self) -> ErrorDetail {
        ErrorDetail {
            message: self.message.clone(),
            r#type: self.kind(),
            param: self.param.clone(),
            code: self.code,
        }
    }

    /// An answer with this status and another body.
    pub(crate) fn with_body(&self, body: &impl Serialize) -> Response {
        let mut response = (self.status, Json(body)).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl IntoResponse for ApiError {
    /// The response knows the error, so that it can be told in other words.
    fn into_response(self) -> Response {
        let mut response = self.with_body(&self.body());
        response.extensions_mut().insert(self);
        response
    }
}
