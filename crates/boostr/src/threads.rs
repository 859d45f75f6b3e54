//! Threads that compute, as a handle that models, engines and trainers share.

use std::sync::Arc;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};

/// A pool of threads. A clone is the same pool; it ends with the last clone.
///
/// No result depends on the number of threads. Give one pool to a model and to its engine: two pools would compete for the
/// same processors. Training runs on the pool of its caller: `threads.install(|| trainer.step(&batch))`.
///
/// ```
/// use boostr::threads::Threads;
///
/// let threads = Threads::new(2)?;
/// assert_eq!(threads.count(), 2);
/// assert_eq!(threads.install(|| 20 + 3), 23);
/// # Ok::<(), boostr::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Threads(Arc<ThreadPool>);

impl Threads {
    /// A new pool of `count` threads; 0 for as many as there are processors.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when threads cannot be started.
    pub fn new(count: usize) -> Result<Self> {
        let pool =
            ThreadPoolBuilder::new().num_threads(count).thread_name(|i| format!("boostr-{i}"));
        let pool = pool.build().map_err(|error| cannot_start(&error))?;
        Ok(Self(Arc::new(pool)))
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.current_num_threads()
    }

    /// Whether the other is the same pool.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Runs `work` on one of the threads; parts of it run on the others. Waits for its end.
    pub fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.0.install(work)
    }

    /// Runs `work` on `threads`, or where the caller is if there are none.
    pub(crate) fn install_on<R: Send>(
        threads: Option<&Self>,
        work: impl FnOnce() -> R + Send,
    ) -> R {
        match threads {
            Some(threads) => threads.install(work),
            None => work(),
        }
    }
}

/// The error of threads that the system refuses.
pub(crate) fn cannot_start(error: &dyn std::fmt::Display) -> Error {
    Error::Argument { name: "threads", reason: format!("cannot start them: {error}") }
}
