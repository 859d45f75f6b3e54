//! The web page, whose files are part of the program.

use axum::Router;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::IntoResponse;
use axum::routing::get;

/// Nothing but what this server gives, and no code but that of its files: what a model writes stays text.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The paths of the page.
pub(crate) fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let file = |kind: &'static str, text: &'static str| {
        get(move || async move {
            let headers: [(HeaderName, HeaderValue); 3] = [
                (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
                (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
                (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
            ];
            (headers, text).into_response()
        })
    };
    Router::new()
        .route("/", file("text/html; charset=utf-8", include_str!("../page/index.html")))
        .route("/app.js", file("text/javascript; charset=utf-8", include_str!("../page/app.js")))
        .route("/style.css", file("text/css; charset=utf-8", include_str!("../page/style.css")))
        .route("/icon.svg", file("image/svg+xml", include_str!("../page/icon.svg")))
}
