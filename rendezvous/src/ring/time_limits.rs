//! The ring's time limits, all derived from `FERROGIN_TIMEOUT`.

use std::time::Duration;

/// How often a rank that waits in a call says so.
pub(super) const WAITING_EVERY: Duration = Duration::from_millis(500);
/// Minimum time to answer, because a busy machine may stall a process for a while.
const ANSWER_MIN: Duration = Duration::from_secs(2);

/// Returns how long a neighbour in the call may be silent: a quarter of FERROGIN_TIMEOUT. Only a rank's neighbours notice its
/// silence. They report it before the other ranks reach their own deadlines, when they would name the wrong rank.
pub(super) fn answer_limit(timeout: Duration) -> Duration {
    (timeout / 4).max(ANSWER_MIN)
}

/// Returns how long it takes until a silent rank's neighbours have reported it to all ranks.
fn report_limit(timeout: Duration) -> Duration {
    WAITING_EVERY + answer_limit(timeout) + WAITING_EVERY
}

/// Returns the limit of an allgather of `nranks` ranks. With more than two, the previous rank may be late because it waits for another
/// one that is silent or missed its own limit. That one's neighbours report it, even if it fell silent just before this rank's timeout.
pub(super) fn allgather_limit(nranks: usize, timeout: Duration) -> Duration {
    if nranks > 2 { timeout + report_limit(timeout) } else { timeout }
}

/// Returns how long a peer's host has to answer: half of FERROGIN_TIMEOUT. A peer already listens before it gives out its handle.
pub(super) fn connect_limit(timeout: Duration) -> Duration {
    (timeout / 2).max(ANSWER_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Before it gives up on a neighbour, a rank learns which rank that neighbour waits for.
    #[test]
    fn silent_ranks_are_reported_before_other_ranks_reach_their_limits() {
        for timeout in [1, 4, 12, 60, 300].map(Duration::from_secs) {
            let silence_ends = WAITING_EVERY + answer_limit(timeout);
            assert_eq!(allgather_limit(2, timeout), timeout);
            assert!(allgather_limit(3, timeout) > timeout + silence_ends);
            assert!(connect_limit(timeout) >= answer_limit(timeout));
        }
    }
}
