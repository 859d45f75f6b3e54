//! Threads that do not fall asleep between the short steps of a computation.

use std::sync::atomic::{AtomicBool, Ordering};

/// Looks for work between two offers of the processor to other programs.
const ROUNDS: usize = 64;

/// Runs `work`, while the other threads of its rayon pool look for parts of it without falling asleep.
///
/// One token's pass through a model is hundreds of steps of some microseconds; to wake a thread for each
/// takes longer than the step. Must be called from a thread of the pool to have an effect.
///
/// ```
/// let sum = boostr_kernels::awake(|| (1..=10).sum::<u32>());
/// assert_eq!(sum, 55);
/// ```
pub fn awake<R>(work: impl FnOnce() -> R) -> R {
    /// Ends the others' search, also when `work` panics.
    struct End<'a>(&'a AtomicBool);

    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Release);
        }
    }

    let Some(this) = rayon::current_thread_index() else {
        return work();
    };
    let is_done = AtomicBool::new(false);
    rayon::in_place_scope(|scope| {
        for _ in 1..rayon::current_num_threads() {
            scope.spawn(|_| {
                // This thread may come upon the search while it waits for a part: the work itself would
                // then never go on.
                while rayon::current_thread_index() != Some(this)
                    && !is_done.load(Ordering::Acquire)
                {
                    search(&is_done);
                }
            });
        }
        let _end = End(&is_done);
        work()
    })
}

fn search(is_done: &AtomicBool) {
    for _ in 0..ROUNDS {
        if is_done.load(Ordering::Acquire) {
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
    fn work_runs_to_its_end_on_any_number_of_threads_and_nested() {
        for threads in [1, 2, 3, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let sum: usize = pool.install(|| {
                awake(|| {
                    let of = |n: usize| (0..n).into_par_iter().map(|i| i % 7).sum::<usize>();
                    (0..200).map(of).sum::<usize>() + awake(|| of(10))
                })
            });
            let of = |n: usize| (0..n).map(|i| i % 7).sum::<usize>();
            assert_eq!(sum, (0..200).map(of).sum::<usize>() + of(10), "{threads} threads");
        }
        assert_eq!(awake(|| 5), 5);
    }

    #[test]
    fn a_panic_in_the_work_comes_through() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.install(|| awake(|| panic!("in the work")));
        }));
        assert!(caught.is_err());
        assert_eq!(pool.install(|| awake(|| 1)), 1);
    }
}
