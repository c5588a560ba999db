//! The ring's time limits, all derived from `FERROGIN_TIMEOUT`.

use std::time::{Duration, Instant};

/// How often a rank tells the next one that its process runs.
pub(super) const ALIVE_EVERY: Duration = Duration::from_millis(500);
/// How often a rank that waits in a call says for which rank. A rank that's later than that says so, too.
pub(super) const WARN_EVERY: Duration = Duration::from_secs(60);
/// Minimum time to answer, because a busy machine may stall a process for a while.
const ANSWER_MIN: Duration = Duration::from_secs(2);

/// Returns how long a neighbour in the call may be silent: a quarter of FERROGIN_TIMEOUT. Only the next rank notices
/// the silence, and reports it to all.
pub(super) fn answer_limit(timeout: Duration) -> Duration {
    (timeout / 4).max(ANSWER_MIN)
}

/// Returns how long a peer's host has to answer: half of FERROGIN_TIMEOUT. A peer already listens before it gives out
/// its handle.
pub(super) fn connect_limit(timeout: Duration) -> Duration {
    (timeout / 2).max(ANSWER_MIN)
}

/// A rank's wait for its neighbours in one call.
#[derive(Debug)]
pub(super) struct Wait {
    began: Instant,
    /// When a neighbour was last heard, or this rank began to listen.
    heard: Instant,
    checked: Instant,
    warned: Instant,
}

impl Wait {
    pub fn new(now: Instant) -> Self {
        Self { began: now, heard: now, checked: now, warned: now }
    }

    /// Returns how long the neighbour that this rank waits for has been silent. It was last heard at `heard`.
    pub fn silence(&mut self, now: Instant, heard: Option<Instant>) -> Duration {
        // While this process was stopped it couldn't listen, and whoever stopped it may have stopped all ranks.
        let was_stopped = now > self.checked + 4 * ALIVE_EVERY;
        self.checked = now;
        self.heard = self.heard.max(if was_stopped { now } else { heard.unwrap_or(self.heard) });
        now - self.heard
    }

    /// Returns when the neighbour has been silent for `limit`.
    pub fn ends(&self, limit: Duration) -> Instant {
        self.heard + limit
    }

    /// Returns how long the call has lasted, each time that a warning is due.
    pub fn warning(&mut self, now: Instant) -> Option<Duration> {
        let is_due = now >= self.warned + WARN_EVERY;
        is_due.then(|| {
            self.warned = now;
            now - self.began
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn neighbour_that_is_heard_is_waited_for_with_a_warning_a_minute() {
        let began = Instant::now();
        let mut wait = Wait::new(began);
        let mut warnings = Vec::new();
        for second in 1..=600 {
            let now = began + second * SECOND;
            assert!(wait.silence(now, Some(now - SECOND / 2)) < SECOND);
            warnings.extend(wait.warning(now));
        }
        assert_eq!(warnings, (1..=10).map(|minute| minute * WARN_EVERY).collect::<Vec<_>>());
    }

    #[test]
    fn silence_counts_from_when_the_neighbour_was_last_heard_in_the_call() {
        let began = Instant::now();
        let mut wait = Wait::new(began);
        // Heard long before the call, or never.
        assert_eq!(wait.silence(began + SECOND, Some(began - 100 * SECOND)), SECOND);
        assert_eq!(wait.silence(began + 2 * SECOND, None), 2 * SECOND);
        assert_eq!(wait.silence(began + 3 * SECOND, Some(began + 2 * SECOND)), SECOND);
        assert_eq!(wait.silence(began + 4 * SECOND, Some(began + 2 * SECOND)), 2 * SECOND);
        assert_eq!(wait.ends(9 * SECOND), began + 11 * SECOND);
    }

    #[test]
    fn time_in_which_this_process_was_stopped_is_no_silence() {
        let began = Instant::now();
        let mut wait = Wait::new(began);
        assert_eq!(wait.silence(began + SECOND, None), SECOND);
        assert_eq!(wait.silence(began + 100 * SECOND, Some(began)), Duration::ZERO);
        assert_eq!(wait.silence(began + 101 * SECOND, Some(began)), SECOND);
    }

    #[test]
    fn limits_follow_the_timeout() {
        let seconds = |limit: fn(Duration) -> Duration| [1, 60, 300].map(|timeout| limit(timeout * SECOND).as_secs());
        assert_eq!(seconds(answer_limit), [2, 15, 75]);
        assert_eq!(seconds(connect_limit), [2, 30, 150]);
    }
}
