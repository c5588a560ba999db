//! Time limits of the ring, all from `FERROGIN_TIMEOUT`.

use std::time::Duration;

/// A rank that waits in a call says so that often.
pub(super) const WAITING_EVERY: Duration = Duration::from_millis(500);
/// The least time for an answer, because a busy machine may stop a process for a while.
const ANSWER_MIN: Duration = Duration::from_secs(2);

/// The time for which a neighbour in the call may be silent: a quarter of FERROGIN_TIMEOUT. Only the neighbours of a rank notice that
/// it is silent. They report it before the other ranks reach their own deadlines, which would name a wrong rank.
pub(super) fn answer_limit(timeout: Duration) -> Duration {
    (timeout / 4).max(ANSWER_MIN)
}

/// The time after which the neighbours of a silent rank have reported it to all ranks.
fn report_limit(timeout: Duration) -> Duration {
    WAITING_EVERY + answer_limit(timeout) + WAITING_EVERY
}

/// The limit of an allgather of `nranks` ranks. With more than two, the previous rank may be late because it waits for another one that is
/// silent or that missed its own limit. The neighbours of that one report it, also if it fell silent when this rank had waited for the timeout.
pub(super) fn allgather_limit(nranks: usize, timeout: Duration) -> Duration {
    if nranks > 2 { timeout + report_limit(timeout) } else { timeout }
}

/// The time that a peer's host has to answer: half of FERROGIN_TIMEOUT. The peer listens before it has a handle.
pub(super) fn connect_limit(timeout: Duration) -> Duration {
    (timeout / 2).max(ANSWER_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank that waits for a neighbour learns first which rank the neighbour waits for.
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
