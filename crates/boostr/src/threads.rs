//! Threads that compute, as a handle that models, engines and trainers share, and their binding to processors.

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
        let _ = processors(); // Before a thread is bound to one.
        Ok(Self(Arc::new(pool)))
    }

    /// The same, each thread [bound](pin) to a processor: memory that it wrote first stays near it.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new); [`Error::Unsupported`] and [`Error::Argument`] as [`pin`].
    ///
    /// ```no_run
    /// use boostr::load::OpenOptions;
    /// use boostr::threads::Threads;
    ///
    /// let options = OpenOptions { threads: Some(Threads::pinned(0)?), ..OpenOptions::default() };
    /// # Ok::<(), boostr::Error>(())
    /// ```
    pub fn pinned(count: usize) -> Result<Self> {
        let threads = Self::new(count)?;
        threads.install(pin)?;
        Ok(threads)
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

/// How many processors the process may use: all, or as many as the system allows it (a set of processors, the quota of
/// a control group).
#[must_use]
pub fn processors() -> usize {
    boostr_kernels::parallel::processors()
}

/// Binds each thread of the caller's rayon pool to one processor of those that the process may use: the first thread to
/// the first of them, and from the start again when there are more threads.
///
/// Threads that a bound thread starts are bound as it is. Waits until all threads of the pool have come.
///
/// # Errors
///
/// [`Error::Unsupported`] on other systems than Linux; [`Error::Argument`] when the system refuses.
pub fn pin() -> Result<()> {
    let _ = processors(); // Before a thread is bound to one.
    let allowed = affinity::allowed()?;
    let bound = rayon::broadcast(|thread| affinity::bind(allowed[thread.index() % allowed.len()]));
    bound.into_iter().collect()
}

#[cfg(target_os = "linux")]
mod affinity {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    use crate::error::{Error, Result};

    /// The processors that the calling thread may use, at least one.
    pub(super) fn allowed() -> Result<Vec<usize>> {
        let set = sched_getaffinity(None).map_err(|error| cannot("be read", error))?;
        let all: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&i| set.is_set(i)).collect();
        if all.is_empty() {
            return Err(cannot("be read", "there are none"));
        }
        Ok(all)
    }

    /// Binds the calling thread to a processor.
    pub(super) fn bind(processor: usize) -> Result<()> {
        let mut set = CpuSet::new();
        set.set(processor);
        let text = format!("be bound to processor {processor}");
        sched_setaffinity(None, &set).map_err(|error| cannot(&text, error))
    }

    fn cannot(what: &str, error: impl std::fmt::Display) -> Error {
        Error::Argument {
            name: "pin",
            reason: format!("the threads' processors cannot {what}: {error}"),
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod affinity {
    use crate::error::{Error, Result};

    pub(super) fn allowed() -> Result<Vec<usize>> {
        Err(Error::Unsupported { what: "threads bound to processors on this system".into() })
    }

    pub(super) fn bind(_: usize) -> Result<()> {
        allowed().map(drop)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn pinned_threads_are_bound_to_one_allowed_processor_each_in_turn() {
        let allowed = affinity::allowed().unwrap();
        let threads = Threads::pinned(allowed.len() + 1).unwrap();
        let bound = threads.install(|| rayon::broadcast(|_| affinity::allowed().unwrap()));
        let turns = allowed.iter().chain(&allowed).take(bound.len()).map(|&i| vec![i]);
        assert_eq!(bound, turns.collect::<Vec<_>>());
        // The caller is not.
        assert_eq!(affinity::allowed().unwrap(), allowed);
    }

    #[test]
    fn a_pool_within_a_smaller_set_of_processors_is_bound_to_that() {
        let first = affinity::allowed().unwrap()[0];
        // The set of a thread is that of those that it starts.
        let bound = std::thread::spawn(move || {
            affinity::bind(first).unwrap();
            let threads = Threads::pinned(2).unwrap();
            threads.install(|| rayon::broadcast(|_| affinity::allowed().unwrap()))
        });
        assert_eq!(bound.join().unwrap(), [[first], [first]]);
    }
}
