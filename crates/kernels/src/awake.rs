//! Threads that do not fall asleep between the short steps of a computation.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use crate::parallel::processors;

/// Looks for work between two offers of the processor to other programs.
const ROUNDS: usize = 64;

/// Runs `work`, while the other threads of its rayon pool look for parts of it without falling asleep.
///
/// One token's pass through a model is hundreds of steps of some microseconds; to wake a thread for each
/// takes longer than the step. As many threads look as there are processors; more would take the
/// processors from those that compute, so they sleep until `work` ends. Must be called from a thread of the
/// pool to have an effect, and `work` must not wait for something that only a sleeping thread can do.
///
/// ```
/// let sum = boostr_kernels::awake(|| (1..=10).sum::<u32>());
/// assert_eq!(sum, 55);
/// ```
pub fn awake<R>(work: impl FnOnce() -> R) -> R {
    awake_on(processors(), work)
}

fn awake_on<R>(processors: usize, work: impl FnOnce() -> R) -> R {
    /// Ends the others' search, also when `work` panics.
    struct End<'a>(&'a Done);

    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.set();
        }
    }

    let Some(this) = rayon::current_thread_index() else {
        return work();
    };
    let (done, looking) = (Done::default(), AtomicUsize::new(1));
    rayon::in_place_scope(|scope| {
        for _ in 1..rayon::current_num_threads() {
            scope.spawn(|_| {
                // This thread may come upon the search while it waits for a part: the work itself would
                // then never go on.
                if rayon::current_thread_index() == Some(this) || done.is_set() {
                    return;
                }
                if looking.fetch_add(1, Ordering::Relaxed) >= processors {
                    return done.wait();
                }
                while !done.is_set() {
                    search(&done);
                }
            });
        }
        let _end = End(&done);
        work()
    })
}

/// Whether the work has ended.
#[derive(Default)]
struct Done {
    flag: AtomicBool,
    /// The same for those that sleep.
    slept: Mutex<bool>,
    ended: Condvar,
}

impl Done {
    fn is_set(&self) -> bool {
        self.flag.load(Ordering::Acquire)
    }

    fn set(&self) {
        self.flag.store(true, Ordering::Release);
        *self.slept.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.ended.notify_all();
    }

    fn wait(&self) {
        let slept = self.slept.lock().unwrap_or_else(PoisonError::into_inner);
        let _ended = self.ended.wait_while(slept, |ended| !*ended);
    }
}

fn search(done: &Done) {
    for _ in 0..ROUNDS {
        if done.is_set() {
            return;
        }
        if rayon::yield_now() != Some(rayon::Yield::Executed) {
            std::hint::spin_loop();
        }
    }
    std::thread::yield_now();
}

#[cfg(test)]
mod tests {
    use rayon::prelude::*;

    use super::*;

    #[test]
    fn work_runs_to_its_end_on_any_number_of_threads_and_processors_and_nested() {
        for (threads, processors) in [(1, 1), (2, 2), (2, 1), (3, 8), (7, 2), (7, 1)] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let sum: usize = pool.install(|| {
                awake_on(processors, || {
                    let of = |n: usize| (0..n).into_par_iter().map(|i| i % 7).sum::<usize>();
                    (0..200).map(of).sum::<usize>() + awake_on(processors, || of(10))
                })
            });
            let of = |n: usize| (0..n).map(|i| i % 7).sum::<usize>();
            let text = format!("{threads} threads, {processors} processors");
            assert_eq!(sum, (0..200).map(of).sum::<usize>() + of(10), "{text}");
        }
        assert_eq!(awake(|| 5), 5);
    }

    #[test]
    fn a_panic_in_the_work_comes_through() {
        for processors in [1, 2] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
            let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                pool.install(|| awake_on(processors, || panic!("in the work")));
            }));
            assert!(caught.is_err());
            assert_eq!(pool.install(|| awake(|| 1)), 1);
        }
    }
}
