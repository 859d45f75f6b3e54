//! Memory of bodies under way: those of requests until what is in them was used, those of long answers until they are
//! sent.
//!
//! ```text
//! bytes come ─ Held grows ─ JSON is read ─ Held is that of its values ─ keep ─ a handler works ─ taken ─ dropped
//! ```
//!
//! The first [`FREE`] bytes of a body are not counted. So small requests are answered while large ones fill the memory,
//! and the number of connections bounds what is not counted.

use std::cell::Cell;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

use crate::error::ApiError;

/// Bytes of each body that are not counted.
pub(crate) const FREE: usize = 64 << 10;

/// What a value of JSON takes at most in a list that grows by doubling, beside its text.
const VALUE: usize = 2 * size_of::<Value>();
/// What a list or an object takes that has a single value.
const NEST: usize = 6 * size_of::<Value>();

tokio::task_local! {
    /// What the body of the request holds that this task answers.
    static OWN: Cell<Option<Held>>;
}

/// How many bytes there may be, and are.
#[derive(Debug)]
pub(crate) struct InFlight {
    most: usize,
    used: Arc<AtomicUsize>,
}

/// Bytes that count until this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    bytes: usize,
    most: usize,
    used: Arc<AtomicUsize>,
}

impl InFlight {
    pub(crate) fn new(most: usize) -> Self {
        Self { most, used: Arc::default() }
    }

    /// Nothing yet.
    pub(crate) fn begin(&self) -> Held {
        Held { bytes: 0, most: self.most, used: self.used.clone() }
    }

    /// Bytes that are counted now.
    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// The most that there may be.
    pub(crate) fn most(&self) -> usize {
        self.most
    }
}

impl Held {
    /// Counts so many bytes from now on, without the first [`FREE`], in place of those before. Where there is no room,
    /// nothing changes.
    pub(crate) fn resize(&mut self, bytes: usize) -> Result<(), ApiError> {
        let bytes = bytes.saturating_sub(FREE);
        let change = |used: usize| {
            let others = used.saturating_sub(self.bytes);
            others.checked_add(bytes).filter(|&sum| sum <= self.most || bytes <= self.bytes)
        };
        let changed = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
        if changed.is_err() {
            let message = format!(
                "bodies of other requests fill the {} bytes of --max-inflight-bytes: try again later",
                self.most
            );
            return Err(ApiError::unavailable("inflight_bytes", message));
        }
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Answers a request: what its body holds is dropped in the end, unless it was [`taken`] before.
pub(crate) async fn scope<T>(answer: impl Future<Output = T>) -> T {
    OWN.scope(Cell::new(None), answer).await
}

/// Keeps what the body of this task's request holds.
pub(crate) fn keep(held: Held) {
    let _ = OWN.try_with(|own| own.set(Some(held)));
}

/// What the body of this task's request holds, for the work that uses up what was in it.
pub(crate) fn taken() -> Option<Held> {
    OWN.try_with(Cell::take).ok().flatten()
}

/// About what the values of a JSON text take, and no less.
pub(crate) fn size_of_values(json: &[u8]) -> usize {
    let (mut size, mut is_text, mut is_escaped) = (json.len(), false, false);
    for byte in json {
        match (is_text, byte) {
            (true, _) if is_escaped => is_escaped = false,
            (true, b'\\') => is_escaped = true,
            (_, b'"') => is_text = !is_text,
            (false, b',') => size += VALUE,
            (false, b'[' | b'{') => size += NEST,
            _ => {}
        }
    }
    size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_and_what_is_dropped_makes_room() {
        let inflight = InFlight::new(1000);
        let (mut a, mut b) = (inflight.begin(), inflight.begin());
        a.resize(FREE + 600).unwrap();
        b.resize(FREE).unwrap();
        assert_eq!(inflight.used(), 600);
        assert_eq!(b.resize(FREE + 401).unwrap_err().code, Some("inflight_bytes"));
        b.resize(FREE + 400).unwrap();
        a.resize(FREE + 100).unwrap();
        b.resize(FREE + 900).unwrap();
        assert_eq!(inflight.used(), 1000);
        drop(b);
        assert_eq!(inflight.used(), 100);
        drop(a);
        assert_eq!(inflight.used(), 0);
    }

    #[test]
    fn values_take_more_than_their_text() {
        assert_eq!(size_of_values(br#"{"a": "x,[{\",\\"}"#), 18 + NEST);
        assert_eq!(size_of_values(b"[1,2,3]"), 7 + NEST + 2 * VALUE);
        assert_eq!(size_of_values(b"[[0],[0]]"), 9 + 3 * NEST + VALUE);
    }
}
