//! The body of an answer that comes piece by piece: server-sent events, or lines of JSON.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use hyper::body::{Body as HttpBody, Frame};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::error::{ApiError, Result};
use crate::job::Piece;

/// Writes the events of an answer.
pub(crate) trait Script: Send + Unpin + 'static {
    /// Whether it writes lines of JSON in place of events. These have no comments.
    const IS_LINES: bool = false;
    /// What comes before everything.
    fn begin(&mut self, out: &mut Events);
    /// A piece; not of those that [`stream`] writes itself.
    fn piece(&mut self, piece: Piece, out: &mut Events);
    /// What comes after the last piece.
    fn finish(&mut self, out: &mut Events);
    /// What a failure looks like when there is no status any more. Nothing follows.
    fn fail(&mut self, error: &ApiError, out: &mut Events) {
        out.data(&error.body());
    }
    /// What tells that the answer is still being made.
    fn ping(&mut self, out: &mut Events) {
        out.comment("ping");
    }
}

/// Text of events that is not sent yet.
#[derive(Debug, Default)]
pub(crate) struct Events(String);

impl Events {
    /// An event with this as JSON.
    pub(crate) fn data(&mut self, value: &impl Serialize) {
        self.write("data: ", value, "\n\n");
    }

    /// The same with a name.
    pub(crate) fn event(&mut self, name: &str, value: &impl Serialize) {
        self.write(&format!("event: {name}\ndata: "), value, "\n\n");
    }

    /// A line with this as JSON.
    pub(crate) fn line(&mut self, value: &impl Serialize) {
        self.write("", value, "\n");
    }

    /// The mark of the end, as OpenAI's first streams have it.
    pub(crate) fn done(&mut self) {
        self.0.push_str("data: [DONE]\n\n");
    }

    fn write(&mut self, before: &str, value: &impl Serialize, after: &str) {
        match serde_json::to_string(value) {
            Ok(json) => self.0.extend([before, &json, after]),
            Err(error) => tracing::error!(%error, "an event could not be written"),
        }
    }

    fn comment(&mut self, text: &str) {
        self.0.push_str(&format!(": {text}\n\n"));
    }
}

/// When a comment may be sent: at most one a second, and fewer the longer a stream has no data. Readers give up after some
/// hundred lines without any.
struct Pace {
    /// When there was data.
    data: Instant,
    /// When there may be a comment.
    next: Instant,
}

impl Pace {
    const LEAST: Duration = Duration::from_secs(1);
    const MOST: Duration = Duration::from_secs(15);

    fn new(now: Instant) -> Self {
        Self { data: now, next: now }
    }

    /// Whether there may be a comment now, which there is then.
    fn takes(&mut self, now: Instant) -> bool {
        if now < self.next {
            return false;
        }
        self.next = now + ((now - self.data) / 10).clamp(Self::LEAST, Self::MOST);
        true
    }
}

/// The response to a stream of `count` continuations, once the first of `pieces` is there: that may still be an error
/// with a status of its own.
pub(crate) async fn stream<S: Script>(
    mut pieces: mpsc::Receiver<Piece>,
    count: usize,
    script: S,
) -> Result<Response> {
    let first = match pieces.recv().await {
        Some(Piece::Failed(error)) => return Err(error),
        Some(first) => first,
        None => return Err(ApiError::internal(&"an answer was given up")),
    };
    let body = SseBody {
        first: VecDeque::from([first]),
        pieces,
        running: count,
        script,
        pace: Pace::new(Instant::now()),
        has_begun: false,
        is_over: false,
    };
    let kind = if S::IS_LINES { "application/x-ndjson" } else { "text/event-stream" };
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    Ok((headers, Body::new(body)).into_response())
}

struct SseBody<S> {
    first: VecDeque<Piece>,
    pieces: mpsc::Receiver<Piece>,
    /// Continuations that have not ended.
    running: usize,
    script: S,
    pace: Pace,
    has_begun: bool,
    is_over: bool,
}

impl<S: Script> SseBody<S> {
    fn write(&mut self, piece: Option<Piece>) -> String {
        let (mut out, now) = (Events::default(), Instant::now());
        if !self.has_begun {
            self.has_begun = true;
            self.script.begin(&mut out);
        }
        match piece {
            Some(Piece::Progress { .. } | Piece::Ping) if S::IS_LINES => {}
            Some(Piece::Progress { done, total }) => {
                if self.pace.takes(now) {
                    out.comment(&format!("prefill {done}/{total}"));
                }
            }
            Some(Piece::Ping) => {
                if self.pace.takes(now) {
                    self.script.ping(&mut out);
                }
            }
            Some(Piece::Failed(error)) => self.fail(&error, &mut out),
            Some(piece) => {
                self.pace.data = now;
                let ended = matches!(piece, Piece::Finished { .. });
                self.script.piece(piece, &mut out);
                self.running -= usize::from(ended && self.running > 0);
                if self.running == 0 {
                    self.script.finish(&mut out);
                    self.is_over = true;
                }
            }
            None => self.fail(&ApiError::internal(&"an answer was given up"), &mut out),
        }
        out.0
    }

    fn fail(&mut self, error: &ApiError, out: &mut Events) {
        self.script.fail(error, out);
        self.is_over = true;
    }
}

impl<S: Script> HttpBody for SseBody<S> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        loop {
            let piece = match self.first.pop_front() {
                Some(first) => Some(first),
                None => std::task::ready!(self.pieces.poll_recv(cx)),
            };
            let text = self.write(piece);
            if !text.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(text.into()))));
            }
            if self.is_over {
                return Poll::Ready(None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use serde_json::json;

    use super::*;

    /// Lines without data in a row after which readers give up, go-openai's among them.
    const TOO_MANY: usize = 300;

    struct Plain;

    impl Script for Plain {
        fn begin(&mut self, out: &mut Events) {
            out.data(&json!({"role": "assistant"}));
        }
        fn piece(&mut self, piece: Piece, out: &mut Events) {
            if let Piece::Text { text, .. } = piece {
                out.data(&json!({"content": text}));
            }
        }
        fn finish(&mut self, _: &mut Events) {}
    }

    /// The longest row of lines without data.
    fn longest_row(text: &str) -> usize {
        let rows = text.split_inclusive('\n').scan(0, |row, line| {
            *row = if line.starts_with("data:") { 0 } else { *row + 1 };
            Some(*row)
        });
        rows.max().unwrap_or(0)
    }

    #[tokio::test]
    async fn p_sse_progress_comments_a_fast_prefill_has_few_comments() {
        let (sender, pieces) = mpsc::channel(2000);
        for done in 0..1000 {
            sender.send(Piece::Progress { done: done * 128, total: 128_000 }).await.unwrap();
        }
        let text = Piece::Text { index: 0, text: "x".into(), tokens: Vec::new() };
        sender.send(text).await.unwrap();
        drop(sender);
        let response = stream(pieces, 1, Plain).await.unwrap();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let body = std::str::from_utf8(&body).unwrap();
        assert!(longest_row(body) < 20, "{body}");
        assert!(
            body.contains(": prefill 0/128000\n\n") && body.contains("data: {\"content\":\"x\"}")
        );
    }

    #[test]
    fn p_sse_progress_comments_come_at_most_once_a_second_and_never_too_many() {
        let start = Instant::now();
        let (mut pace, mut last, mut count) = (Pace::new(start), None, 0);
        for tick in 0..(30 * 60 * 100) {
            let now = start + Duration::from_millis(10) * tick;
            if pace.takes(now) {
                if let Some(last) = last {
                    let gap = now - last;
                    assert!(gap >= Pace::LEAST && gap <= Pace::MOST + Pace::LEAST, "{gap:?}");
                }
                (last, count) = (Some(now), count + 1);
            }
        }
        // Each is a line and an empty one.
        assert!((30..TOO_MANY / 2).contains(&count), "{count}");
    }
}
