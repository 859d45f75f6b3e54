//! The accept loop: connections, their number and their end.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use boostr::backend::Backend;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tower::ServiceExt;

use crate::app::App;
use crate::bare;
use crate::body::Noticed;
use crate::deadline::after;
use crate::io::{Phase, Watched};

/// Longest head that hyper keeps before it gives up, to which [`bare`] gives words; [`guard`](crate::guard) allows less.
const HEAD_BUFFER: usize = 128 << 10;
const HEAD_LINES: usize = 256;
/// For how long, and how much, what a client still sends is read after the answer: else the system would reset the
/// connection, and the answer could be lost.
const LINGER_TIME: Duration = Duration::from_secs(1);
const LINGER_BYTES: usize = 8 << 20;
/// How long a failed accept waits: descriptors may be free again then.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// What goes on failing is in the log once in this time.
const WARN_PAUSE: Duration = Duration::from_mins(1);
/// How often it is looked whether all work is done.
const DRAIN_TICK: Duration = Duration::from_millis(10);
/// For connections whose answers are cut, to say so and end.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Accepts connections until `stop`, then waits for what is running, for [`Limits::drain_time`](crate::Limits::drain_time) at most. Meanwhile new
/// requests are told that the server is about to stop.
pub(crate) async fn serve<B: Backend>(
    app: Arc<App<B>>,
    router: Router,
    listener: TcpListener,
    stop: impl Future<Output = ()>,
) {
    let limits = app.config.limits.clone();
    let all = u32::try_from(limits.connections).unwrap_or(u32::MAX).max(1);
    let free = Arc::new(Semaphore::new(all as usize));
    let (closing, is_closing) = watch::channel(false);
    let accept = async {
        let mut warned: Option<Instant> = None;
        loop {
            let Ok(permit) = free.clone().acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, _)) => {
                    // Tokens are small and wanted at once.
                    let _ = stream.set_nodelay(true);
                    let connection =
                        connection(app.clone(), stream, router.clone(), is_closing.clone());
                    tokio::spawn(async move {
                        connection.await;
                        drop(permit);
                    });
                }
                Err(error) => {
                    if warned.is_none_or(|at| at.elapsed() > WARN_PAUSE) {
                        tracing::warn!(%error, "no connection could be accepted");
                        warned = Some(Instant::now());
                    }
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    };
    let ended = async {
        stop.await;
        tracing::info!("stopping: what is running may end");
        app.drain();
        // Also makes connections that are idle end.
        let _ = closing.send(true);
        let deadline = after(limits.drain_time);
        while !app.is_idle() && Instant::now() < deadline {
            sleep(DRAIN_TICK).await;
        }
        if let Some(loaded) = app.loaded().cloned() {
            // It waits for the end of a step.
            let _ = tokio::task::spawn_blocking(move || loaded.engine.stop()).await;
        }
        deadline
    };
    let deadline = tokio::select! {
        () = accept => Instant::now(),
        deadline = ended => deadline,
    };
    drop(listener);
    // Those too that were accepted meanwhile.
    let _ = closing.send(true);
    // What was cut has to be said, written and committed.
    let rest = async {
        while !app.is_idle() {
            sleep(DRAIN_TICK).await;
        }
        let _ = free.acquire_many(all).await;
    };
    let end = deadline.max(after(LAST_WORDS));
    if timeout_at(end, rest).await.is_err() {
        tracing::warn!("some connections were cut");
    }
}

/// Answers the requests of one connection, until it ends or `closing` says so.
pub(crate) async fn connection<B: Backend>(
    app: Arc<App<B>>,
    stream: impl AsyncRead + AsyncWrite + Unpin,
    router: Router,
    mut closing: watch::Receiver<bool>,
) {
    let phase = Phase::new();
    let watched = phase.clone();
    let limits = app.config.limits.clone();
    let instead = Box::new(move |head: &[u8]| bare::instead_of(&app, head));
    let socket = Watched::new(stream, phase.clone(), &limits, instead);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        phase.busy();
        let phase = phase.clone();
        let answer = router.clone().oneshot(request.map(Body::new));
        Box::pin(async move {
            let response = answer.await?;
            Ok::<_, Infallible>(response.map(|body| Noticed::new(body, move || phase.idle())))
        })
    });
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(None) // `Watched` knows idle connections from slow ones
        .half_close(false)
        .keep_alive(!*closing.borrow_and_update())
        .max_buf_size(HEAD_BUFFER)
        .max_headers(HEAD_LINES)
        .serve_connection(TokioIo::new(socket), service);

    let overdue = watched.overdue(&limits);
    tokio::pin!(overdue);
    let result = loop {
        let ended = tokio::select! {
            result = poll_fn(|cx| connection.poll_without_shutdown(cx)) => Some(result),
            Ok(()) = closing.changed() => None,
            () = &mut overdue => {
                tracing::debug!("a client sent nothing for too long");
                return;
            }
        };
        match ended {
            Some(result) => break result,
            // Ends it when it is idle, and after its answer when it is not.
            None => std::pin::Pin::new(&mut connection).graceful_shutdown(),
        }
    };
    if let Err(error) = &result {
        tracing::debug!(%error, "a connection ended early");
        if is_timeout(error) {
            return;
        }
    }
    let _ =
        timeout(LINGER_TIME, linger(connection.into_parts().io.into_inner().into_inner())).await;
}

/// Reads and forgets what a client still sends, until it closes its side.
async fn linger(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<()> {
    stream.shutdown().await?;
    let mut buffer = vec![0; 16 << 10];
    let mut total = 0;
    while total < LINGER_BYTES {
        match stream.read(&mut buffer).await? {
            0 => break,
            n => total += n,
        }
    }
    Ok(())
}

fn is_timeout(error: &hyper::Error) -> bool {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::TimedOut) {
            return true;
        }
        source = cause.source();
    }
    false
}
