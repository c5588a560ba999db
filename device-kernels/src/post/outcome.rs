//! The result of a look at an endpoint in a flush.

use crate::status::Status;

/// What a flush of an endpoint has come to: one number, because a kernel that has the flush inline needs instructions for every other
/// form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Outcome(u32);

impl Outcome {
    /// Every earlier post has completed.
    pub const COMPLETED: Outcome = Outcome(0);
    /// The same, and there was no post since the last flush: the endpoint can leave the set of used endpoints.
    pub const UNUSED: Outcome = Outcome(u32::MAX);
    /// The flush goes on.
    pub const WAITS: Outcome = Outcome(u32::MAX - 1);

    /// The flush has failed.
    #[inline(always)]
    pub const fn failed(status: Status) -> Self {
        Outcome(status as u32)
    }

    /// Whether a flush that has ended has failed.
    #[inline(always)]
    pub const fn has_failed(self) -> bool {
        self.0.wrapping_add(1) > 1
    }

    /// The bits, if a flush that has not failed found its endpoint unused, or 0.
    #[inline(always)]
    pub const fn if_unused(self, bits: u32) -> u32 {
        bits & self.0
    }

    /// The number of the status of a flush that has failed, or 0.
    #[inline(always)]
    pub const fn failure(self) -> u32 {
        if self.0 >= Self::WAITS.0 { 0 } else { self.0 }
    }
}

impl From<Outcome> for Result<(), Status> {
    /// Why the flush has failed, if it has.
    #[inline(always)]
    fn from(outcome: Outcome) -> Self {
        Status::from_number(outcome.failure()).map_or(Ok(()), Err)
    }
}
