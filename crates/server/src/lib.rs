//! HTTP over one model: the OpenAI API, sessions, and a web page.
//!
//! ```text
//! socket ─ io ─ hyper ─ guard ─ handler ─ job ─ engine
//!            times      Host, key         text, cancelling
//! ```
//!
//! A server is told everything by its [`Config`]: it reads no environment and has no state but what it is given. It stands on
//! [`boostr::engine`], which knows no text; this crate knows no tensor.

mod api;
mod app;
mod auth;
mod bare;
mod body;
mod config;
mod deadline;
mod desk;
mod endpoint;
mod error;
mod fields;
mod form;
mod guard;
mod hole;
mod ids;
mod inflight;
mod io;
mod job;
mod listen;
mod listener;
mod messages;
mod metrics;
mod options;
mod page;
mod shape;
mod sse;
mod stored;
mod turn;

use std::future::Future;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, header};
use boostr::backend::Backend;
use boostr::checkpoint::PrivateFolder;
use boostr::engine::{Draft, Engine};
use boostr::error::chain;
use boostr::load::LanguageModel;
use boostr::session::{RESPONSES, SessionError, Sessions};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tower::ServiceExt;

pub use auth::Keys;
pub use config::{Config, Limits};

use app::{App, Loaded};

/// A server. A clone is the same server.
pub struct Server<B: Backend> {
    app: Arc<App<B>>,
    router: Router,
}

impl<B: Backend> Clone for Server<B> {
    fn clone(&self) -> Self {
        Self { app: self.app.clone(), router: self.router.clone() }
    }
}

/// Why a server could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model cannot be served.
    #[error(transparent)]
    Model(#[from] boostr::Error),
    /// The folder of answers cannot be used.
    #[error(transparent)]
    Responses(boostr::Error),
    /// Counters could not be made.
    #[error("counters")]
    Metrics(#[from] prometheus::Error),
}

impl<B: Backend> Server<B> {
    /// A server without a model yet: requests are told that it is being loaded.
    ///
    /// # Errors
    ///
    /// [`Error::Metrics`] when its counters cannot be made.
    pub fn new(config: Config) -> Result<Self, Error> {
        let app = Arc::new(App::new(config)?);
        Ok(Self { router: api::router(app.clone()), app })
    }

    /// From now on requests are answered with this model, and conversations kept in `sessions`. `draft` guesses the next
    /// tokens of each answer. A second model is not taken.
    ///
    /// # Errors
    ///
    /// [`Error::Model`] when it has no tokenizer, a chat template that is none, or a draft of another vocabulary;
    /// [`Error::Responses`] when the answers of `/v1/responses` cannot be kept beside the sessions.
    pub fn load(
        &self,
        lm: Arc<LanguageModel<B>>,
        engine: Engine<B>,
        draft: Option<Draft<B>>,
        sessions: Option<Sessions<B>>,
    ) -> Result<(), Error> {
        let Config { max_sessions, sessions_quota, .. } = self.app.config;
        let limited = |sessions: Sessions<B>| sessions.at_most(max_sessions).within(sessions_quota);
        let loaded = Loaded::new(lm, engine, draft, sessions.map(limited))?;
        if let Some(kept) = &loaded.sessions {
            let sessions = Arc::clone(&kept.sessions);
            let path = sessions.folder().join(RESPONSES);
            let folder = match std::fs::symlink_metadata(&path) {
                // What a link leads to is not ours.
                Ok(found) if !found.is_dir() => {
                    let source = std::io::Error::other("expected a folder, found a link or a file");
                    Err(boostr::Error::Io { path, source })
                }
                _ => PrivateFolder::open_of(&path, stored::is_ours),
            };
            if let Ok(Some(why)) = folder.as_ref().map(PrivateFolder::exposed) {
                tracing::warn!("the folder of answers: {why}");
            }
            let left = Box::new(move || {
                let left = sessions.left();
                let say = |error: &SessionError| {
                    tracing::warn!(error = chain(error), "the sessions' disk is not counted");
                };
                left.inspect_err(say).ok()
            });
            let kept = folder.and_then(|folder| self.app.responses.keep_in(folder, left));
            kept.map_err(Error::Responses)?;
        }
        self.app.load(loaded);
        Ok(())
    }

    /// Answers a request of this process, as one that came from this machine: `body`, JSON, to `path`. Returns the status
    /// and the JSON of the answer.
    pub async fn answer(&self, path: &str, body: String) -> (u16, Value) {
        let request = Request::post(path)
            .header(header::HOST, "localhost")
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::CONTENT_LENGTH, body.len())
            .body(Body::from(body));
        let failed = |error: &dyn std::fmt::Display| {
            let error = json!({"message": error.to_string(), "type": "server_error"});
            (500, json!({"error": error}))
        };
        let request = match request {
            Ok(request) => request,
            Err(error) => return failed(&error),
        };
        let response = match self.router.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        let status = response.status().as_u16();
        let body = match response.into_body().collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) => return failed(&error),
        };
        serde_json::from_slice(&body).map_or_else(|error| failed(&error), |json| (status, json))
    }

    /// Answers the requests that come over one connection, as those of a socket are, until it ends.
    pub async fn connection(&self, stream: impl AsyncRead + AsyncWrite + Unpin) {
        // Nobody tells it to close.
        let (_open, closing) = watch::channel(false);
        listen::connection(self.app.clone(), stream, self.router.clone(), closing).await;
    }

    /// Answers what comes to `listener` until `stop`, then lets what is running end: until
    /// [`Limits::drain_time`] is over, when the engine is stopped.
    pub async fn serve(&self, listener: TcpListener, stop: impl Future<Output = ()>) {
        listen::serve(self.app.clone(), self.router.clone(), listener, stop).await;
    }
}
