//! The result of looking at an endpoint during a flush.

use crate::status::Status;

/// How far the flush of an endpoint has got. It's a single number because any other form would cost instructions in a
/// kernel with the flush inlined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Outcome(u32);

impl Outcome {
    /// Every earlier post has completed.
    pub const COMPLETED: Outcome = Outcome(0);
    /// The same, and nothing was posted since the last flush: the endpoint can leave the set of used endpoints.
    pub const UNUSED: Outcome = Outcome(u32::MAX);
    /// The flush hasn't ended.
    pub const WAITS: Outcome = Outcome(u32::MAX - 1);

    /// Returns the outcome of a failed flush.
    #[inline(always)]
    pub const fn failed(status: Status) -> Self {
        Outcome(status as u32)
    }

    /// Returns whether a flush that has ended failed.
    #[inline(always)]
    pub const fn has_failed(self) -> bool {
        self.0.cast_signed() > 0
    }

    /// Returns `bits` if a flush that hasn't failed found its endpoint unused, or 0 otherwise.
    #[inline(always)]
    pub const fn if_unused(self, bits: u32) -> u32 {
        bits & self.0
    }

    /// Returns the number of a failed flush's status, or 0.
    #[inline(always)]
    pub const fn failure(self) -> u32 {
        if self.0.cast_signed() > 0 { self.0 } else { 0 }
    }
}

impl From<Outcome> for Result<(), Status> {
    /// Returns why the flush failed, if it did.
    #[inline(always)]
    fn from(outcome: Outcome) -> Self {
        Status::from_number(outcome.failure()).map_or(Ok(()), Err)
    }
}
