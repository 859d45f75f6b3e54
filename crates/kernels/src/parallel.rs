//! Where kernels go parallel: the tasks of one step, shared out among the threads of the rayon pool.
//!
//! A *region* begins when tasks are shared out and ends when all are done: a fork and a barrier. What
//! one core does sooner than others could join in stays on it, and is no region.
//!
//! Each thread of the pool has a *share*: neighbouring tasks, the same ones each time that a step of the
//! same size runs on as many threads. It computes its own share first, then what others have not begun.
//! So weights stay with the core that reads them, and nobody waits for a thread that does not run.
//!
//! Results never depend on who computed what.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rayon::prelude::*;

/// Nanoseconds of one core's work from which others are asked to join in.
const WORTH: usize = 10_000;
/// Nanoseconds of work that are worth a task of their own.
const PIECE: usize = 2_500;
/// Most tasks of a share: what is left of a slow thread's share is taken by others.
pub(crate) const PIECES: usize = 4;

thread_local! {
    /// What [`steps`] collects on this thread.
    static STEPS: RefCell<Option<Vec<Step>>> = const { RefCell::new(None) };
}

/// A step of a computation, as [`steps`] saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// How many tasks it was cut in.
    pub tasks: usize,
    /// Whether they were shared out among threads: a region.
    pub is_region: bool,
    /// From its begin to its end.
    pub took: Duration,
}

/// Runs `run`, and tells which steps the calling thread began meanwhile, in their order; not those that are never
/// worth a task more.
///
/// ```
/// use boostr_kernels::{Level, Rows, Weights, linear, parallel};
///
/// let mut out = [0.0];
/// let (x, w) = ([2.0], Weights::F32(&[3.0]));
/// let ((), steps) = parallel::steps(|| linear(Level::detect(), Rows::dense(&x, 1), w, &mut out));
/// assert_eq!(steps.len(), 1);
/// assert!(!steps[0].is_region); // too little to share
/// ```
pub fn steps<R>(run: impl FnOnce() -> R) -> (R, Vec<Step>) {
    let before = STEPS.replace(Some(Vec::new()));
    let result = run();
    (result, STEPS.replace(before).unwrap_or_default())
}

/// How many processors the process may use, as the first caller found it: less than the machine has
/// where a set of processors or a quota is given. A thread that is bound to one processor is to ask later
/// than another.
#[must_use]
pub fn processors() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    if cfg!(test) {
        return usize::MAX; // Tests share out among more threads than a small machine has.
    }
    *COUNT.get_or_init(|| std::thread::available_parallelism().map_or(usize::MAX, usize::from))
}

/// Part `i` of `count` things that are cut in `parts`: neighbours, as many as the others have or one more.
pub(crate) fn share(count: usize, parts: usize, i: usize) -> Range<usize> {
    i * count / parts..(i + 1) * count / parts
}

/// In how many parts each of `count` tasks is cut where threads are more: a power of 2 up to 4, for which `can_cut`.
pub(crate) fn parts(count: usize, can_cut: impl Fn(usize) -> bool) -> usize {
    let threads = rayon::current_num_threads();
    let mut parts = 1;
    while threads > 1 && parts < 4 && count * parts < 2 * threads && can_cut(2 * parts) {
        parts *= 2;
    }
    parts
}

/// How many tasks are made of work that takes one core `ns` nanoseconds.
pub(crate) fn pieces(ns: usize) -> usize {
    let threads = rayon::current_num_threads();
    if threads == 1 || ns < WORTH { 1 } else { (ns / PIECE).clamp(1, PIECES * threads) }
}

/// Runs all tasks, which take one core about `ns` nanoseconds: in parallel where that is worth it. `init`
/// makes what a thread keeps from task to task.
pub fn for_each<T: Send, S>(
    tasks: Vec<T>,
    ns: usize,
    init: impl Fn() -> S + Sync,
    run: impl Fn(&mut S, T) + Sync,
) {
    let count = tasks.len();
    for_each_of(tasks, |threads, i| share(count, threads, i), ns, init, run);
}

/// The same, with the tasks `of(threads, i)` as the share of thread `i`; shares are one after another.
pub(crate) fn for_each_of<T: Send, S>(
    tasks: Vec<T>,
    of: impl Fn(usize, usize) -> Range<usize>,
    ns: usize,
    init: impl Fn() -> S + Sync,
    run: impl Fn(&mut S, T) + Sync,
) {
    /// What is left of a thread's tasks.
    struct Share {
        next: AtomicUsize,
        end: usize,
    }

    impl Share {
        fn claim(&self) -> Option<usize> {
            if self.next.load(Ordering::Relaxed) >= self.end {
                return None;
            }
            Some(self.next.fetch_add(1, Ordering::Relaxed)).filter(|&i| i < self.end)
        }
    }

    let threads = rayon::current_num_threads();
    let is_region = threads > 1 && tasks.len() > 1 && ns >= WORTH;
    let _step = Watch::new(tasks.len(), is_region);
    if !is_region {
        let mut kept = init();
        for task in tasks {
            run(&mut kept, task);
        }
        return;
    }
    let shares = (0..threads).map(|i| of(threads, i));
    let shares: Vec<Share> =
        shares.map(|of| Share { next: AtomicUsize::new(of.start), end: of.end }).collect();
    // More threads than processors would only take turns. Those that come late find nothing left.
    let active = threads.min(processors()).min(tasks.len());
    let tasks: Vec<Mutex<Option<T>>> = tasks.into_iter().map(|x| Mutex::new(Some(x))).collect();
    let take = |i: usize| tasks[i].lock().unwrap_or_else(PoisonError::into_inner).take();
    (0..active).into_par_iter().with_max_len(1).for_each(|_| {
        let mut kept = None;
        let own = rayon::current_thread_index().unwrap_or(0);
        for i in 0..threads {
            let share = &shares[(own + i) % threads];
            while let Some(task) = share.claim().and_then(take) {
                run(kept.get_or_insert_with(&init), task);
            }
        }
    });
}

/// Tells [`steps`] of a step when it ends.
struct Watch(Option<(Step, Instant)>);

impl Watch {
    fn new(tasks: usize, is_region: bool) -> Self {
        let step = Step { tasks, is_region, took: Duration::ZERO };
        let is_asked = STEPS.with_borrow(Option::is_some);
        Self(is_asked.then(|| (step, Instant::now())))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Some((step, begun)) = self.0 else { return };
        STEPS.with_borrow_mut(|steps| {
            if let Some(steps) = steps {
                steps.push(Step { took: begun.elapsed(), ..step });
            }
        });
    }
}

/// Cuts `out` `[rows, width]` in blocks of rows and runs `block` with the number of each one's first row; an
/// element takes one core `ps` picoseconds.
pub(crate) fn for_rows(
    out: &mut [f32],
    width: usize,
    ps: usize,
    block: impl Fn(usize, &mut [f32]) + Sync,
) {
    if out.is_empty() {
        return;
    }
    let rows = out.len() / width;
    let ns = out.len().saturating_mul(ps) / 1000;
    let tasks = pieces(ns).min(rows);
    if tasks == 1 {
        return block(0, out);
    }
    let many = rows.div_ceil(tasks);
    let tasks = out.chunks_mut(many * width).enumerate().collect();
    for_each(tasks, ns, || (), |(), (i, out)| block(i * many, out));
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    fn pool(threads: usize) -> rayon::ThreadPool {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
    }

    #[test]
    fn shares_are_all_things_once_in_their_order() {
        for (count, parts) in [(0, 3), (1, 4), (7, 7), (10, 4), (160, 64), (1000, 3)] {
            let all: Vec<usize> = (0..parts).flat_map(|i| share(count, parts, i)).collect();
            assert_eq!(all, (0..count).collect::<Vec<_>>());
            let sizes = || (0..parts).map(|i| share(count, parts, i).len());
            assert!(sizes().max().unwrap() - sizes().min().unwrap() <= 1, "{count} in {parts}");
        }
    }

    #[test]
    fn every_task_runs_once_on_any_number_of_threads() {
        for threads in [1, 2, 3, 7] {
            for count in [0, 1, 2, 5, 100] {
                let mut done = vec![0; count];
                pool(threads).install(|| {
                    let tasks = done.iter_mut().enumerate().collect();
                    for_each(tasks, WORTH, || (), |(), (i, x): (usize, &mut usize)| *x += i + 1);
                });
                assert_eq!(done, (1..=count).collect::<Vec<_>>(), "{threads} threads");
            }
        }
    }

    #[test]
    fn threads_that_all_run_compute_their_own_shares() {
        let threads = 5;
        let (all_here, seen) = (Barrier::new(threads), Mutex::new(Vec::new()));
        pool(threads).install(|| {
            // Whoever has begun a task waits for the others: nobody can take two first ones.
            for_each(
                (0..threads).collect(),
                WORTH,
                || (),
                |(), i: usize| {
                    all_here.wait();
                    seen.lock().unwrap().push((i, rayon::current_thread_index().unwrap()));
                },
            );
        });
        assert!(seen.into_inner().unwrap().iter().all(|(task, thread)| task == thread));
    }

    #[test]
    fn the_share_of_a_thread_that_does_not_come_is_computed_by_others() {
        let pool = pool(3);
        let (begun, end) = (Barrier::new(2), Barrier::new(2));
        let count = AtomicUsize::new(0);
        pool.in_place_scope(|scope| {
            scope.spawn(|_| {
                begun.wait();
                end.wait();
            });
            begun.wait();
            pool.install(|| {
                for_each(
                    (0..30).collect(),
                    WORTH,
                    || (),
                    |(), _: usize| {
                        count.fetch_add(1, Ordering::Relaxed);
                    },
                );
            });
            end.wait();
        });
        assert_eq!(count.into_inner(), 30);
    }

    #[test]
    fn little_work_and_single_tasks_are_no_region() {
        pool(2).install(|| {
            let run = |count: usize, ns| {
                let ((), steps) = steps(|| {
                    for_each((0..count).collect(), ns, || (), |(), _: usize| ());
                });
                steps.iter().map(|step| (step.tasks, step.is_region)).collect::<Vec<_>>()
            };
            assert_eq!(run(8, WORTH - 1), [(8, false)]);
            assert_eq!(run(1, usize::MAX), [(1, false)]);
            assert_eq!(run(8, WORTH), [(8, true)]);
        });
    }

    #[test]
    fn blocks_of_rows_are_all_rows_once() {
        for rows in [1, 2, 5, 64, 1000] {
            for ps in [0, 100_000] {
                let mut out = vec![0.0; rows * 3];
                pool(3).install(|| {
                    for_rows(&mut out, 3, ps, |first, out| {
                        for (i, row) in out.chunks_exact_mut(3).enumerate() {
                            row.fill((first + i) as f32);
                        }
                    });
                });
                let want: Vec<f32> = (0..rows).flat_map(|i| [i as f32; 3]).collect();
                assert_eq!(out, want);
            }
        }
    }

    #[test]
    #[should_panic(expected = "in a task")]
    fn a_panic_in_a_task_comes_through() {
        pool(2).install(|| {
            for_each(vec![0, 1, 2], WORTH, || (), |(), i| assert!(i != 1, "in a task"));
        });
    }
}
