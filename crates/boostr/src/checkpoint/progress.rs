//! How far the making of a model's weights is.

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Is told how many bytes of a checkpoint's weights were taken, and how many there are. `Break` ends the opening with
/// [`Error::Interrupted`](crate::Error::Interrupted).
///
/// ```
/// use std::ops::ControlFlow;
/// use boostr::backend;
/// use boostr::load::{LanguageModel, OpenOptions, Progress};
///
/// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/mamba2-tiny");
/// let progress = Progress::new(|done, total| {
///     println!("{done} of {total} bytes");
///     ControlFlow::Continue(())
/// });
/// let options = OpenOptions { progress: Some(progress), ..Default::default() };
/// let lm = LanguageModel::open(path, &options, backend::cpu())?;
/// # Ok::<(), boostr::Error>(())
/// ```
#[derive(Clone)]
pub struct Progress {
    tell: Arc<dyn Fn(usize, usize) -> ControlFlow<()> + Send + Sync>,
    done: Arc<AtomicUsize>,
    /// Of all tensors, counted once a time.
    total: Arc<AtomicUsize>,
}

impl Progress {
    /// Tells `tell`, on whichever thread takes a weight.
    pub fn new(tell: impl Fn(usize, usize) -> ControlFlow<()> + Send + Sync + 'static) -> Self {
        Self { tell: Arc::new(tell), done: Arc::default(), total: Arc::default() }
    }

    /// Counts `bytes` of what `total` gives.
    pub(super) fn add(&self, bytes: usize, total: impl FnOnce() -> usize) -> ControlFlow<()> {
        let total = match self.total.load(Ordering::Relaxed) {
            0 => {
                let total = total();
                self.total.store(total, Ordering::Relaxed);
                total
            }
            total => total,
        };
        let done = self.done.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        (self.tell)(done.min(total), total)
    }

    /// Tells of all.
    pub(super) fn finish(&self, total: usize) {
        // There is nothing left to end.
        let _ = (self.tell)(total, total);
    }

    /// Counts from the beginning.
    pub(super) fn restart(&self) {
        self.done.store(0, Ordering::Relaxed);
        self.total.store(0, Ordering::Relaxed);
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress").field("done", &self.done).finish_non_exhaustive()
    }
}
