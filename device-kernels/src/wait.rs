//! Waiting: the only loop that spins.

use crate::platform;
use crate::status::Status;

/// What ends a wait whose condition does not come true: the host's abort flag, or a time limit. The loop that waits on an
/// endpoint also checks the endpoint's error counter. Only a wait calls these methods.
pub trait Limit: Copy {
    /// Returns whether the host has raised the abort flag.
    fn aborted(&self) -> bool;
    /// Nanoseconds that one wait may take; 0 is no limit.
    fn timeout_ns(&self) -> u64;
    /// Returns whether the time limit of a wait has passed that began at `began_ns`.
    #[inline(always)]
    fn has_passed(&self, began_ns: u64) -> bool {
        // No limit, 0, becomes the longest time.
        platform::clock_ns().wrapping_sub(began_ns) > self.timeout_ns().wrapping_sub(1)
    }
    /// Lets a software card work in this thread. False when no card needs it.
    #[inline]
    fn progress(&self) -> bool {
        false
    }
    /// Waits a moment; `round` counts the calls of one wait, from 0.
    #[inline(always)]
    fn relax(&self, round: u32) {
        platform::relax(round, || self.progress());
    }
}

/// No limits, for tests and programs without a context.
#[derive(Clone, Copy)]
pub struct NoLimits;

impl Limit for NoLimits {
    fn aborted(&self) -> bool {
        false
    }

    fn timeout_ns(&self) -> u64 {
        0
    }
}

/// One wait: the number of its rounds, and when it began.
pub struct Spin<L> {
    limits: L,
    round: u32,
    began_ns: u64,
}

impl<L: Limit> Spin<L> {
    /// Begins a wait.
    #[inline(always)]
    pub fn new(limits: L) -> Self {
        Spin { limits, round: 0, began_ns: platform::clock_ns() }
    }

    /// Waits a moment. Fails if the wait must end.
    #[inline(always)]
    pub fn pause(&mut self) -> Result<(), Status> {
        let is_aborted = self.limits.aborted();
        if is_aborted | self.limits.has_passed(self.began_ns) {
            return Err(if is_aborted { Status::Aborted } else { Status::Timeout });
        }
        self.limits.relax(self.round);
        self.round = self.round.saturating_add(1);
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Whether the flag is raised, and the deadline.
    #[derive(Clone, Copy)]
    struct Limits(bool, u64);

    impl Limit for Limits {
        fn aborted(&self) -> bool {
            self.0
        }

        fn timeout_ns(&self) -> u64 {
            self.1
        }
    }

    #[test]
    fn abort_flag_and_deadline_end_wait() {
        let mut spin = Spin::new(Limits(true, 0));
        assert_eq!(spin.pause(), Err(Status::Aborted));
        let mut spin = Spin::new(Limits(false, 1_000_000));
        let mut rounds = 0u64;
        let end = loop {
            if let Err(status) = spin.pause() {
                break status;
            }
            rounds += 1;
        };
        assert_eq!(end, Status::Timeout);
        assert!(rounds >= 1, "the time begins with the first round");
    }
}
