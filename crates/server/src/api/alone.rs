//! Work outside of the engine, one piece at a time: it takes the processors from those that generate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use boostr::backend::Backend;

use super::blocking;
use crate::app::{App, Loaded};
use crate::desk::late;
use crate::error::Result;

/// Tells work whether anybody waits for it still.
#[derive(Clone, Default)]
pub(crate) struct Waiting(Arc<AtomicBool>);

impl Waiting {
    /// Whether nobody waits any more.
    pub(crate) fn is_over(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Ends the waiting when the handler is dropped.
struct Handler(Waiting);

impl Drop for Handler {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
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
    blocking(app, move || {
        let _held = (turn, guard);
        work(&waiting)
    })
    .await
}
