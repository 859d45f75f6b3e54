//! Moments in the future.

use std::time::Duration;

use tokio::time::Instant;

/// What is as good as never: thirty years.
const FAR: Duration = Duration::from_hours(30 * 365 * 24);

/// The moment after so much time from now, by the clock that is never set; after no more than thirty years, for the clock
/// cannot tell all that a [`Duration`] can.
pub(crate) fn after(time: Duration) -> Instant {
    Instant::now() + time.min(FAR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_f12_no_time_is_too_long_to_wait_for() {
        let now = Instant::now();
        assert!(after(Duration::MAX) >= now + FAR);
        let soon = after(Duration::from_secs(5));
        assert!((5..10).contains(&(soon - now).as_secs()));
        assert!(after(Duration::ZERO) >= now);
    }
}
