//! Waiting: the only loop that spins.

use crate::platform;
use crate::status::Status;
use crate::sync::{AtomicU32, Ordering};

/// What ends a wait whose condition does not come true: the host's abort flag, or a time limit. The loop that waits on an
/// endpoint also checks the endpoint's error counter. Only a wait calls these methods.
pub trait Limit: Copy {
    /// Returns whether the host has raised the abort flag.
    fn aborted(&self) -> bool;
    /// Nanoseconds that one wait may take; 0 is no limit.
    fn timeout_ns(&self) -> u64;
    /// Returns whether the time limit of a wait has passed that began at `began_ns`. The first call sets it to the present time where
    /// it is 0.
    #[inline(always)]
    fn has_passed(&self, began_ns: &mut u64) -> bool {
        #[cfg(target_arch = "nvptx64")]
        {
            // No limit, 0, becomes the longest time.
            platform::clock_ns().wrapping_sub(*began_ns) > self.timeout_ns().wrapping_sub(1)
        }
        #[cfg(not(target_arch = "nvptx64"))]
        {
            let timeout_ns = self.timeout_ns();
            if timeout_ns == 0 {
                return false;
            }
            let now = platform::clock_ns();
            if *began_ns == 0 {
                *began_ns = now;
            }
            now.wrapping_sub(*began_ns) > timeout_ns
        }
    }
    /// Lets a software card work in this thread. False when no card needs it.
    #[inline]
    fn progress(&self) -> bool {
        false
    }
    /// Waits a moment; `round` counts the calls of one wait, from 0.
    #[cfg(not(target_arch = "nvptx64"))]
    #[inline]
    fn relax(&self, round: u32) {
        platform::relax(round, || self.progress());
    }
}

/// Limits by value, for tests and programs without a context.
#[derive(Clone, Copy)]
pub struct Limits<'a> {
    /// The abort flag: every wait ends when it is not 0.
    pub abort: Option<&'a AtomicU32>,
    /// Nanoseconds; 0 is no limit.
    pub timeout_ns: u64,
}

impl Limit for Limits<'_> {
    #[inline]
    fn aborted(&self) -> bool {
        self.abort.is_some_and(|abort| abort.load(Ordering::Relaxed) != 0)
    }

    #[inline]
    fn timeout_ns(&self) -> u64 {
        self.timeout_ns
    }
}

/// One wait: the number of its rounds, and when it began.
pub struct Spin<L> {
    limits: L,
    #[cfg(not(target_arch = "nvptx64"))]
    round: u32,
    began_ns: u64,
}

impl<L: Limit> Spin<L> {
    /// Begins a wait. A GPU reads the clock here, a CPU in the first [`Self::pause`].
    #[inline(always)]
    pub fn new(limits: L) -> Self {
        Spin {
            limits,
            #[cfg(not(target_arch = "nvptx64"))]
            round: 0,
            #[cfg(not(target_arch = "nvptx64"))]
            began_ns: 0,
            #[cfg(target_arch = "nvptx64")]
            began_ns: platform::clock_ns(),
        }
    }

    /// Waits a moment. Fails if the wait must end.
    #[cfg_attr(not(target_arch = "nvptx64"), cold, inline(never))]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    pub fn pause(&mut self) -> Result<(), Status> {
        let (ends, status) = self.check();
        if ends {
            return Err(status);
        }
        self.relax();
        Ok(())
    }

    /// Whether the wait must end, and why if it must.
    #[inline(always)]
    pub(crate) fn check(&mut self) -> (bool, Status) {
        let is_aborted = self.limits.aborted();
        let has_passed = self.limits.has_passed(&mut self.began_ns);
        (is_aborted | has_passed, if is_aborted { Status::Aborted } else { Status::Timeout })
    }

    /// Waits a moment, after a check.
    #[inline(always)]
    pub(crate) fn relax(&mut self) {
        #[cfg(target_arch = "nvptx64")]
        platform::relax();
        #[cfg(not(target_arch = "nvptx64"))]
        {
            self.limits.relax(self.round);
            self.round = self.round.saturating_add(1);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn abort_flag_and_deadline_end_wait() {
        let flag = AtomicU32::new(1);
        let mut spin = Spin::new(Limits { abort: Some(&flag), timeout_ns: 0 });
        assert_eq!(spin.pause(), Err(Status::Aborted));
        let mut spin = Spin::new(Limits { abort: None, timeout_ns: 1_000_000 });
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
