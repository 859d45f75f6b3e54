//! A global allocator that counts: bytes now, and the most since the last restart.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[global_allocator]
pub static HEAP: Counting = Counting::new();

/// Held by the test that runs: the others wait, so that what is counted is its own.
pub fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

pub struct Counting {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Counting {
    const fn new() -> Self {
        Self { now: AtomicUsize::new(0), peak: AtomicUsize::new(0) }
    }

    /// Bytes that are allocated.
    pub fn now(&self) -> usize {
        self.now.load(Relaxed)
    }

    /// The most bytes that were allocated at once.
    pub fn peak(&self) -> usize {
        self.peak.load(Relaxed)
    }

    /// Forgets the peak; returns the bytes that are allocated.
    pub fn restart(&self) -> usize {
        self.peak.store(self.now(), Relaxed);
        self.now()
    }

    fn add(&self, size: usize) {
        let now = self.now.fetch_add(size, Relaxed) + size;
        self.peak.fetch_max(now, Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator as it came; only counters are added.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller's promises are the ones that are needed.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller's promises are the ones that are needed.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        self.now.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promises are the ones that are needed.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        self.add(size);
        self.now.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promises are the ones that are needed.
        unsafe { System.realloc(block, layout, size) }
    }
}
