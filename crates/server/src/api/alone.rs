//! Work outside of the engine, one piece at a time: it takes the processors from those that generate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use boostr::backend::Backend;

use super::blocking;
use crate::app::{App, Loaded};
use crate::desk::late;
use crate::error::Result;

/// What work and its handler tell each other.
#[derive(Clone, Default)]
pub(crate) struct Waiting(Arc<Told>);

#[derive(Default)]
struct Told {
    is_over: AtomicBool,
    tokens: AtomicUsize,
}

impl Waiting {
    /// Whether nobody waits any more.
    pub(crate) fn is_over(&self) -> bool {
        self.0.is_over.load(Ordering::Relaxed)
    }

    /// Counts tokens of prompts that were computed and are in no other count.
    pub(crate) fn count(&self, tokens: usize) {
        self.0.tokens.fetch_add(tokens, Ordering::Relaxed);
    }
}

/// Ends the waiting when the handler is dropped.
struct Handler(Waiting);

impl Drop for Handler {
    fn drop(&mut self) {
        self.0.0.is_over.store(true, Ordering::Relaxed);
    }
}

/// Does `work` when its turn has come.
pub(crate) async fn alone<B: Backend, T: Send + 'static>(
    app: &App<B>,
    loaded: &Loaded<B>,
    work: impl FnOnce(&Waiting) -> Result<T> + Send + 'static,
) -> Result<T> {
    let turn = loaded.alone.clone().acquire_owned();
    let Ok(Ok(turn)) = tokio::time::timeout(app.config.limits.queue_time, turn).await else {
        return Err(late());
    };
    let waiting = Waiting::default();
    let _handler = Handler(waiting.clone());
    let guard = app.begin_work();
    let told = waiting.clone();
    let done = blocking(app, move || {
        let _held = (turn, guard);
        work(&waiting)
    })
    .await;
    let tokens = told.0.tokens.load(Ordering::Relaxed);
    if tokens > 0 {
        app.metrics.beside.fetch_add(tokens as u64, Ordering::Relaxed);
        tracing::info!("kept 0 of {tokens} tokens");
    }
    done
}
