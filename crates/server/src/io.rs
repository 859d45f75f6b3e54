//! A socket that cuts clients who are too slow.
//!
//! hyper has one timer, for the head of a request, which also runs while a connection is idle. Here
//! each phase of a connection has a time of its own ([`Phase::overdue`]), and so has a client that does
//! not read its answer ([`Watched`]).
//!
//! ```text
//! head ─ first byte of the next request ┐
//!   └─ request is complete ─ busy ─ answer is sent ─ idle
//! ```

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};

use crate::config::Limits;
use crate::deadline::after;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Head,
    Busy,
    Idle,
}

/// What a connection is doing; shared by its socket, the service that it calls, and who watches the time.
#[derive(Debug, Clone)]
pub(crate) struct Phase(Arc<watch::Sender<Step>>);

impl Phase {
    /// A connection that was just accepted: the head of a request has to come.
    pub(crate) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(Step::Head)))
    }

    /// A request is there and is being answered.
    pub(crate) fn busy(&self) {
        self.0.send_replace(Step::Busy);
    }

    /// The answer is sent.
    pub(crate) fn idle(&self) {
        self.0.send_replace(Step::Idle);
    }

    fn get(&self) -> Step {
        *self.0.borrow()
    }

    /// Returns when a client has taken longer for a phase than it may. It needs no reader that is polled: hyper polls
    /// none between an answer and the next request.
    pub(crate) async fn overdue(&self, limits: &Limits) {
        let mut changes = self.0.subscribe();
        loop {
            let time = match *changes.borrow_and_update() {
                Step::Head => limits.header_time,
                Step::Idle => limits.idle_time,
                Step::Busy => Duration::MAX,
            };
            // The sender is in `self`.
            if timeout_at(after(time), changes.changed()).await.is_err() {
                return;
            }
        }
    }
}

/// What is to be written in place of something, if it is not to be written as it is.
pub(crate) type Instead = Box<dyn Fn(&[u8]) -> Option<Vec<u8>> + Send>;

/// A socket that fails with [`io::ErrorKind::TimedOut`] when its client does not read what is written. What is written
/// while no request is being answered may be replaced.
pub(crate) struct Watched<S> {
    socket: S,
    instead: Instead,
    /// What is still to be written in place of something that counts as written.
    replaced: Vec<u8>,
    phase: Phase,
    /// Whether a write is waiting for the client, since when `write_timer` runs.
    stalled: bool,
    write_timer: Pin<Box<Sleep>>,
    write_time: Duration,
}

impl<S> Watched<S> {
    pub(crate) fn new(socket: S, phase: Phase, limits: &Limits, instead: Instead) -> Self {
        Self {
            socket,
            instead,
            replaced: Vec::new(),
            phase,
            stalled: false,
            write_timer: Box::pin(sleep_until(Instant::now())),
            write_time: limits.write_time,
        }
    }

    /// The socket.
    pub(crate) fn into_inner(self) -> S {
        self.socket
    }

    /// Passes on what a write did, unless the client has read nothing for too long.
    fn written<T>(
        &mut self,
        cx: &mut Context<'_>,
        done: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if done.is_ready() {
            self.stalled = false;
            return done;
        }
        if !self.stalled {
            self.stalled = true;
            self.write_timer.as_mut().reset(after(self.write_time));
        }
        match self.write_timer.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.socket).poll_read(cx, buf);
        if read.is_ready() && buf.filled().len() > before && self.phase.get() == Step::Idle {
            self.phase.0.send_replace(Step::Head);
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> Watched<S> {
    /// Writes what replaces something.
    fn write_replaced(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.replaced.is_empty() {
            let done = Pin::new(&mut self.socket).poll_write(cx, &self.replaced);
            match ready!(self.written(cx, done))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                n => drop(self.replaced.drain(..n)),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Whether something is replaced, and so counts as written.
    fn is_replaced(&mut self, buf: &[u8]) -> bool {
        if self.phase.get() == Step::Busy {
            return false;
        }
        let instead = (self.instead)(buf);
        let is_replaced = instead.is_some();
        self.replaced.extend(instead.unwrap_or_default());
        is_replaced
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.write_replaced(cx))?;
        if self.is_replaced(buf) {
            return Poll::Ready(Ok(buf.len()));
        }
        let done = Pin::new(&mut self.socket).poll_write(cx, buf);
        self.written(cx, done)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let [buf] = bufs {
            return self.poll_write(cx, buf);
        }
        ready!(self.write_replaced(cx))?;
        let done = Pin::new(&mut self.socket).poll_write_vectored(cx, bufs);
        self.written(cx, done)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.write_replaced(cx))?;
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.write_replaced(cx))?;
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}
