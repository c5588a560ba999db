//! Time limits of the ring, all from `FERROGIN_TIMEOUT`.

use std::time::Duration;

/// A neighbour that is silent for this long gets a ping.
pub(super) const PING_AFTER: Duration = Duration::from_millis(500);
/// The least time for an answer, because a busy machine may stop a process for a while.
const ANSWER_MIN: Duration = Duration::from_secs(2);

/// The time that a silent neighbour has for an answer: a quarter of FERROGIN_TIMEOUT. Only the neighbours of a rank notice that
/// it is silent. They report it before the other ranks reach their own deadlines, which would name a wrong rank.
pub(super) fn answer_limit(timeout: Duration) -> Duration {
    (timeout / 4).max(ANSWER_MIN)
}

/// The time after which the neighbours of a silent rank have reported it to all ranks.
pub(super) fn report_limit(timeout: Duration) -> Duration {
    PING_AFTER + answer_limit(timeout) + Duration::from_millis(500)
}

/// The time that a peer has to answer the first connect: half of FERROGIN_TIMEOUT. The peer's endpoint exists before its handle.
pub(super) fn connect_limit(timeout: Duration) -> Duration {
    (timeout / 2).max(ANSWER_MIN)
}
