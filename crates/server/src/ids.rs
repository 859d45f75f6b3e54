//! Names that are not given twice: of requests, answers, sessions; and seeds.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers that differ from call to call and from process to process. They are no secrets.
#[derive(Debug)]
pub(crate) struct Ids {
    random: RandomState,
    next: AtomicU64,
}

impl Ids {
    pub(crate) fn new() -> Self {
        Self { random: RandomState::new(), next: AtomicU64::new(0) }
    }

    pub(crate) fn number(&self) -> u64 {
        self.random.hash_one(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// `PREFIX` and 16 hexadecimal digits.
    pub(crate) fn name(&self, prefix: &str) -> String {
        format!("{prefix}{:016x}", self.number())
    }
}
