//! Turns of conversations that are kept: one at a time in each session, on disk when the answer ends.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use axum::http::StatusCode;
use boostr::backend::Backend;
use boostr::chat::Options;
use boostr::error::chain;
use boostr::models::State;
use boostr::session::{Assistant, Prompt, Session, SessionError, Sessions};
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::app::Loaded;
use crate::desk::{Room, Taken};
use crate::error::{ApiError, Result};

/// Longest log of a session that goes on, in bytes: of those that are longer nothing is said but what there is, and of
/// those twice as long not even that.
const MAX_LOG: u64 = 32 << 20;
/// Memory that it takes to read a log and to tell of it, for each byte.
const READING: usize = 4;

/// The sessions of a server.
pub(crate) struct Kept<B: Backend> {
    pub(crate) sessions: Arc<Sessions<B>>,
    /// Names of those that are being answered.
    busy: Arc<Mutex<HashSet<String>>>,
}

/// Says that a session is being answered, until it is dropped.
struct Busy {
    name: String,
    all: Arc<Mutex<HashSet<String>>>,
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
    }
}

impl<B: Backend> Kept<B> {
    pub(crate) fn new(sessions: Sessions<B>) -> Self {
        Self { sessions: Arc::new(sessions), busy: Arc::default() }
    }

    /// The session `name`, and the memory to work on it and what needs `more`.
    pub(crate) fn open<'a>(
        &self,
        room: &'a Room,
        name: &str,
        param: &str,
        more: usize,
    ) -> Result<(Session<B>, Taken<'a>)> {
        let size = self.sessions.log_size(name).map_err(|error| refused(&error, param))?;
        if size > 2 * MAX_LOG {
            return Err(full(name, size, param));
        }
        let reading = usize::try_from(size).unwrap_or(usize::MAX).saturating_mul(READING);
        let memory = room.take(reading.saturating_add(more));
        let session = self.sessions.get(name).map_err(|error| refused(&error, param))?;
        Ok((session, memory))
    }

    fn occupy(&self, name: &str) -> Result<Busy> {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        if busy.insert(name.to_owned()) {
            return Ok(Busy { name: name.to_owned(), all: self.busy.clone() });
        }
        let error = ApiError::new(StatusCode::CONFLICT, "the session is being answered");
        Err(error.with_code("session_busy").with_retry_after(1))
    }
}

/// The sessions, if there are any.
pub(crate) fn kept<B: Backend>(loaded: &Loaded<B>) -> Result<&Kept<B>> {
    let none = "this server keeps no sessions; it does when it is started with --sessions FOLDER";
    loaded.sessions.as_ref().ok_or_else(|| ApiError::not_found(none).with_code("no_sessions"))
}

/// A turn that was asked for.
pub(crate) struct Turn<B: Backend> {
    session: Session<B>,
    prompt: Prompt<B>,
    _busy: Busy,
}

/// A turn of a session.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub(crate) struct SessionTurn {
    id: String,
    turn: u32,
}

impl<B: Backend> Turn<B> {
    /// A turn of the session `name` that begins with `messages`, which it takes `memory` to encode; without them, the head's
    /// answer goes on.
    pub(crate) fn begin(
        loaded: &Loaded<B>,
        name: &str,
        messages: Option<&[Value]>,
        options: &Options,
        memory: usize,
    ) -> Result<Self> {
        let kept = kept(loaded)?;
        let busy = kept.occupy(name)?;
        kept.sessions.check_quota().map_err(|error| refused(&error, "session"))?;
        let (session, _memory) = kept.open(&loaded.room, name, "session", memory)?;
        let size = session.log_size();
        if size > MAX_LOG {
            return Err(full(name, size, "session"));
        }
        let assistant = assistant(loaded, "");
        let prompt = match messages {
            Some(messages) => session.prompt(&assistant, messages, options),
            None => session.go_on(&assistant),
        };
        let prompt = prompt.map_err(|error| refused(&error, "messages"))?;
        Ok(Self { session, prompt, _busy: busy })
    }

    /// What is to be computed: ids, how many of them are the answer's, ends of messages, and a state that has seen some.
    pub(crate) fn prompt(&mut self) -> (Vec<u32>, usize, Vec<usize>, Option<State<B>>) {
        let Prompt { ids, begun, marks, state, .. } = &mut self.prompt;
        (ids.clone(), *begun, std::mem::take(marks), state.take())
    }

    /// Takes the answer into the session. It is on disk when this returns.
    pub(crate) fn commit(
        self,
        loaded: &Loaded<B>,
        model: &str,
        answer: Value,
        generated: &[u32],
        state: Option<State<B>>,
        is_cut: bool,
    ) -> Result<SessionTurn> {
        let assistant = assistant(loaded, model);
        let committed = self
            .session
            .commit(&assistant, self.prompt, answer, generated, state, is_cut)
            .map_err(|error| refused(&error, "session"))?;
        if let Some(error) = committed.unsaved {
            let error = chain(&error);
            tracing::warn!(error, "the state of a turn is not on disk: it will be computed again");
        }
        Ok(SessionTurn { id: self.session.name().to_owned(), turn: committed.turn })
    }
}

fn assistant<'a, B: Backend>(loaded: &'a Loaded<B>, name: &'a str) -> Assistant<'a, B> {
    Assistant { lm: &loaded.lm, template: &loaded.template, name }
}

/// The error of a session that has become too long.
fn full(name: &str, size: u64, param: &str) -> ApiError {
    let message = format!(
        "session `{name}` has a log of {size} bytes, expected at most {MAX_LOG}: branch it or begin another"
    );
    let error = ApiError::new(StatusCode::INSUFFICIENT_STORAGE, message).with_code("session_full");
    ApiError { param: Some(param.into()), ..error }
}

/// What a session refuses, to a client whose field `param` is about it.
pub(crate) fn refused(error: &SessionError, param: &str) -> ApiError {
    let with = |status, code, message: String| {
        let error = ApiError::new(status, message).with_code(code);
        ApiError { param: Some(param.into()), ..error }
    };
    let of = |status, code| with(status, code, error.to_string());
    match error {
        SessionError::Name { .. } => of(StatusCode::BAD_REQUEST, "session_name"),
        SessionError::Missing { .. } => of(StatusCode::NOT_FOUND, "session_not_found"),
        SessionError::Exists { .. } => of(StatusCode::CONFLICT, "session_exists"),
        SessionError::Busy { .. } => of(StatusCode::CONFLICT, "session_busy"),
        SessionError::Full { .. } => {
            let error = ApiError::new(StatusCode::INSUFFICIENT_STORAGE, error.to_string());
            error.with_code("too_many_sessions")
        }
        SessionError::Quota { .. } => {
            let error = ApiError::new(StatusCode::INSUFFICIENT_STORAGE, error.to_string());
            error.with_code("sessions_quota")
        }
        SessionError::Turn { .. } => of(StatusCode::NOT_FOUND, "turn_not_found"),
        SessionError::Message { .. } => of(StatusCode::BAD_REQUEST, "message"),
        SessionError::Other(boostr::Error::Format { reason, .. }) if param == "messages" => {
            ApiError::field(param, reason)
        }
        // Its log: the session can be deleted, and no more.
        SessionError::Other(
            boostr::Error::Format { reason, .. } | boostr::Error::Damaged { reason, .. },
        ) => {
            let message = format!("the session is damaged: {reason}");
            with(StatusCode::CONFLICT, "session_damaged", message)
        }
        SessionError::Other(error) => ApiError::of_input(param, error),
        other => ApiError::failed(other),
    }
}
