//! Work outside of the engine, one piece at a time: it takes the processors from those that generate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

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
    /// Tokens of prompts that were computed, and tokens that were generated, which are in no other count.
    computed: AtomicU64,
    generated: AtomicU64,
}

impl Waiting {
    /// Whether nobody waits any more.
    pub(crate) fn is_over(&self) -> bool {
        self.0.is_over.load(Ordering::Relaxed)
    }

    /// Counts tokens of prompts that were computed and are in no other count.
    pub(crate) fn count_computed(&self, tokens: usize) {
        self.0.computed.fetch_add(tokens as u64, Ordering::Relaxed);
    }

    /// The same of tokens that were generated.
    pub(crate) fn count_generated(&self, tokens: usize) {
        self.0.generated.fetch_add(tokens as u64, Ordering::Relaxed);
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
    let metrics = app.metrics.clone();
    blocking(app, move || {
        let _held = (turn, guard);
        let done = work(&waiting);
        // Here, as the handler of a client that is gone goes no further.
        let [computed, generated] = [&waiting.0.computed, &waiting.0.generated];
        let [computed, generated] = [computed, generated].map(|it| it.load(Ordering::Relaxed));
        metrics.beside.fetch_add(computed, Ordering::Relaxed);
        metrics.generated_beside.fetch_add(generated, Ordering::Relaxed);
        if computed > 0 {
            tracing::info!("kept 0 of {computed} tokens");
        }
        done
    })
    .await
}
