//! Answers to requests that hyper cannot read: hyper writes a bare status, and here it gets a body.
//!
//! hyper refuses a head that it cannot read, or that is too long, before any handler is called. It
//! takes no instruction about the answer. So the answer is known by its form when it is written to the
//! socket: a head alone, without the id of our answers. Another one is written in its place.

use axum::http::StatusCode;
use boostr::backend::Backend;

use crate::app::App;
use crate::error::ApiError;
use crate::guard;

/// What is written in place of `head`, if that is an answer of hyper's own.
pub(crate) fn instead_of<B: Backend>(app: &App<B>, head: &[u8]) -> Option<Vec<u8>> {
    let status = status_of(head)?;
    let message = match status {
        StatusCode::URI_TOO_LONG => "the path is too long",
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => guard::TOO_LARGE,
        _ => {
            "the head of the request cannot be read: expected a request line of HTTP/1.1 or HTTP/1.0, headers, and \
             at most one length, which is a number"
        }
    };
    app.metrics.answered("other", status.as_u16());
    Some(answer(&ApiError::new(status, message), &app.ids.name("req-")))
}

/// The status of a refusal that is a head alone, and none of ours.
fn status_of(head: &[u8]) -> Option<StatusCode> {
    let head = std::str::from_utf8(head).ok()?;
    let is_alone = head.find("\r\n\r\n")?.checked_add(4)? == head.len();
    let versions = ["HTTP/1.1 ", "HTTP/1.0 "];
    let status = versions.iter().find_map(|version| head.strip_prefix(version))?;
    let (first, headers) = status.split_once("\r\n")?;
    let is_ours = headers.to_ascii_lowercase().contains(guard::REQUEST_ID.as_str());
    let status = StatusCode::from_bytes(first.as_bytes().get(..3)?).ok()?;
    (is_alone && !is_ours && status.is_client_error()).then_some(status)
}

/// An error as it goes over the wire; the connection ends after it.
fn answer(error: &ApiError, id: &str) -> Vec<u8> {
    let body = serde_json::to_string(&error.body()).unwrap_or_default();
    let length = body.len().to_string();
    let mut text = format!("HTTP/1.1 {}\r\n", error.status);
    let (id_name, secure) = (guard::REQUEST_ID, guard::SECURE);
    let own = [
        ("content-type", "application/json"),
        ("content-length", &length),
        ("connection", "close"),
        ("cache-control", "no-store"),
        (id_name.as_str(), id),
    ];
    let secure = secure.iter().map(|(name, value)| (name.as_str(), *value));
    for (name, value) in own.into_iter().chain(secure) {
        text.extend([name, ": ", value, "\r\n"]);
    }
    text.extend(["\r\n", &body]);
    text.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_refusals_that_are_not_ours_are_replaced() {
        let bare = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        for bare in [bare, &bare.replace("1.1", "1.0")] {
            assert_eq!(status_of(bare.as_bytes()), Some(StatusCode::BAD_REQUEST));
        }
        for other in [
            "",
            "HTTP/1.1 400 Bad Request\r\n",
            &bare.replace("400 Bad Request", "200 OK"),
            &bare.replace("400 Bad Request", "100 Continue"),
            &bare.replace("connection", "x-request-id: r\r\nconnection"),
            &format!("{bare}{{}}"),
            &format!("{{}}{bare}"),
        ] {
            assert_eq!(status_of(other.as_bytes()), None, "{other}");
        }
        let own = answer(&ApiError::invalid("no"), "req-1");
        let (head, body) = std::str::from_utf8(&own).unwrap().split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())), "{head}");
        assert_eq!(status_of(&own), None);
    }
}
