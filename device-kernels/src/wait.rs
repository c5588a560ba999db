//! Waiting: the only loop that spins.

use crate::platform;
use crate::status::Status;

/// What ends a wait whose condition doesn't come true: the host's abort flag or a time limit. The loop that waits on an endpoint also
/// checks the endpoint's error counter. Only waits call these methods.
pub trait Limit: Copy {
    /// Returns whether the host has raised the abort flag.
    fn aborted(&self) -> bool;
    /// Returns whether a wait's time limit has passed. `began_ns` is the time of its first round, or `u64::MAX` before that.
    #[inline]
    fn has_passed(&self, _began_ns: &mut u64) -> bool {
        false
    }
    /// Lets a software card work in this thread. Returns false if no card needs it.
    #[inline]
    fn progress(&self) -> bool {
        false
    }
    /// Pauses briefly. `round` counts the calls in one wait, from 0.
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
}

/// One wait: the number of its rounds, and when the first began. A wait that is over at once reads no clock.
pub struct Spin<L> {
    limits: L,
    round: u32,
    began_ns: u64,
}

impl<L: Limit> Spin<L> {
    /// Begins a wait.
    #[inline(always)]
    pub fn new(limits: L) -> Self {
        Spin { limits, round: 0, began_ns: u64::MAX }
    }

    /// Pauses briefly. Fails if the wait must end.
    #[inline(always)]
    pub fn pause(&mut self) -> Result<(), Status> {
        let is_aborted = self.limits.aborted();
        if is_aborted | self.limits.has_passed(&mut self.began_ns) {
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

    /// Whether the flag is raised, and after how many rounds the time limit passes; `began_ns` counts them.
    #[derive(Clone, Copy)]
    struct Limits(bool, u64);

    impl Limit for Limits {
        fn aborted(&self) -> bool {
            self.0
        }

        fn has_passed(&self, began_ns: &mut u64) -> bool {
            *began_ns = began_ns.wrapping_add(1);
            *began_ns >= self.1
        }
    }

    #[test]
    fn abort_flag_or_time_limit_ends_wait() {
        for rounds in [0, 9] {
            assert_eq!(Spin::new(Limits(true, rounds)).pause(), Err(Status::Aborted));
        }
        let mut spin = Spin::new(Limits(false, 3));
        let rounds = [(); 4].map(|()| spin.pause());
        assert_eq!(rounds, [Ok(()), Ok(()), Ok(()), Err(Status::Timeout)]);
    }
}
