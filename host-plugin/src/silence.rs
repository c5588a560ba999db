//! The time limit of a wait at the end of a context.

use std::time::{Duration, Instant};

/// The most that the time between two checks counts for: if it's longer, as in a stopped process, the card didn't run
/// either.
const MAX_STEP: Duration = Duration::from_millis(50);

/// The time since the last progress.
#[derive(Debug)]
pub(crate) struct Silence {
    limit: Duration,
    last_check: Instant,
    silent: Duration,
}

impl Silence {
    /// Begins a wait that ends after `limit` without progress.
    pub fn new(now: Instant, limit: Duration) -> Self {
        Self { limit, last_check: now, silent: Duration::ZERO }
    }

    /// Returns whether the wait is over. `has_progressed`: something has happened since the last check.
    pub fn is_over(&mut self, has_progressed: bool, now: Instant) -> bool {
        let step = now.duration_since(self.last_check).min(MAX_STEP);
        self.silent = if has_progressed { Duration::ZERO } else { self.silent + step };
        self.last_check = now;
        self.silent > self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_ends_after_its_limit_without_progress() {
        let mut now = Instant::now();
        let mut silence = Silence::new(now, Duration::from_secs(10));
        let mut is_over = |step, has_progressed| {
            now += step;
            silence.is_over(has_progressed, now)
        };
        assert!(!is_over(Duration::from_secs(3600), false), "the process was stopped");
        assert!((0..199).all(|_| !is_over(MAX_STEP, false)));
        assert!(!is_over(MAX_STEP, true), "progress");
        assert!((0..200).all(|_| !is_over(MAX_STEP, false)), "10 s");
        assert!(is_over(Duration::from_millis(1), false));
    }
}
