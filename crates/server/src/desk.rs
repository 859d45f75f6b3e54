//! Work of the processor or the disk outside of the engine, in queues: what one kind of request asks for never keeps
//! another kind waiting.
//!
//! ```text
//! prompts    4 at once   what is generated from: conversations to ids, grammars
//! texts      1 at once   /tokenize, /detokenize, /apply-template
//! sessions   2 at once   all that opens a session, turns too
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use axum::http::StatusCode;
use boostr::backend::Backend;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::app::App;
use crate::config::Limits;
use crate::error::{ApiError, Result};
use crate::inflight;

/// The queues of a server.
pub(crate) struct Desks {
    pub(crate) prompts: Desk,
    pub(crate) texts: Desk,
    pub(crate) sessions: Desk,
}

impl Desks {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            prompts: Desk::new(4, limits.waiting_prompts),
            texts: Desk::new(1, limits.waiting_texts),
            sessions: Desk::new(2, limits.waiting_sessions),
        }
    }
}

/// A queue with a bound.
pub(crate) struct Desk {
    hands: Arc<Semaphore>,
    waiting: AtomicUsize,
    most: usize,
}

/// One that waits, until it is dropped.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Desk {
    fn new(hands: usize, most: usize) -> Self {
        Self { hands: Arc::new(Semaphore::new(hands)), waiting: AtomicUsize::new(0), most }
    }

    /// How many wait.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    async fn turn(&self, time: Duration) -> Result<OwnedSemaphorePermit> {
        if let Ok(turn) = self.hands.clone().try_acquire_owned() {
            return Ok(turn);
        }
        let waiting = self.waiting.fetch_add(1, Ordering::Relaxed);
        let _waiting = Waiting(&self.waiting);
        if waiting >= self.most {
            let message = format!("too many requests of this kind: {waiting} wait already");
            let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, message);
            return Err(error.with_code("queue_full").with_retry_after(1));
        }
        match timeout(time, self.hands.clone().acquire_owned()).await {
            Ok(Ok(turn)) => Ok(turn),
            _ => Err(late()),
        }
    }

    /// Does `work` on a thread that may be busy, when its turn has come. What the body of the request holds is dropped
    /// with it.
    pub(crate) async fn blocking<B: Backend, T: Send + 'static>(
        &self,
        app: &App<B>,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let turn = self.turn(app.config.limits.queue_time).await;
        let turn = turn.inspect_err(|error| app.metrics.rejected(error.code.unwrap_or("other")))?;
        let span = tracing::Span::current();
        let held = inflight::taken();
        let result = tokio::task::spawn_blocking(move || {
            let _held = (turn, held);
            span.in_scope(work)
        });
        result.await.unwrap_or_else(|error| Err(ApiError::failed(&error)))
    }
}

/// The error of a request whose turn did not come.
pub(crate) fn late() -> ApiError {
    ApiError::unavailable("queue_time", "the request waited too long for its turn")
}

/// Memory for texts that are being worked on, by threads that wait for it in the order in which they came.
pub(crate) struct Room {
    most: usize,
    state: Mutex<RoomState>,
    freed: Condvar,
}

#[derive(Default)]
struct RoomState {
    used: usize,
    /// The numbers of the next to come and of the next to be served.
    next: u64,
    serving: u64,
}

/// Memory that is in use until this is dropped.
pub(crate) struct Taken<'a> {
    room: &'a Room,
    bytes: usize,
}

impl Room {
    pub(crate) fn new(most: usize) -> Self {
        Self { most, state: Mutex::default(), freed: Condvar::new() }
    }

    /// Waits for so many bytes; who needs more than there are has them alone.
    pub(crate) fn take(&self, bytes: usize) -> Taken<'_> {
        let bytes = bytes.min(self.most);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let number = state.next;
        state.next += 1;
        while state.serving != number || state.used + bytes > self.most {
            state = self.freed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.serving += 1;
        state.used += bytes;
        drop(state);
        self.freed.notify_all();
        Taken { room: self, bytes }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.room.state.lock().unwrap_or_else(PoisonError::into_inner).used -= self.bytes;
        self.room.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[tokio::test]
    async fn a_full_queue_refuses_and_a_free_hand_serves() {
        let desk = Desk::new(1, 1);
        let first = desk.turn(Duration::ZERO).await.unwrap();
        let late = desk.turn(Duration::from_millis(1)).await.unwrap_err();
        assert_eq!((late.code, desk.waiting()), (Some("queue_time"), 0));
        let mut second = Box::pin(desk.turn(Duration::from_secs(5)));
        assert!(timeout(Duration::from_millis(1), &mut second).await.is_err());
        let full = desk.turn(Duration::from_secs(5)).await.unwrap_err();
        assert_eq!((full.status.as_u16(), full.code), (429, Some("queue_full")));
        drop(first);
        drop(second.await.unwrap());
        assert_eq!(desk.waiting(), 0);
    }

    #[test]
    fn a_large_text_waits_for_small_ones_and_keeps_later_ones_waiting() {
        let room = Room::new(10);
        let (tell, told) = mpsc::channel();
        thread::scope(|scope| {
            let small = room.take(4);
            let begin = |name, bytes| {
                let (room, tell) = (&room, tell.clone());
                let before = room.state.lock().unwrap().next;
                scope.spawn(move || {
                    let taken = room.take(bytes);
                    tell.send(name).unwrap();
                    drop(taken);
                });
                while room.state.lock().unwrap().next == before {
                    thread::yield_now();
                }
            };
            begin("more than all", 100);
            begin("small", 1);
            assert!(told.try_recv().is_err());
            drop(small);
            assert_eq!(told.recv(), Ok("more than all"));
            assert_eq!(told.recv(), Ok("small"));
        });
        assert_eq!(room.state.lock().unwrap().used, 0);
    }
}
