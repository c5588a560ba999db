//! Waiting: the only loop that spins.

use crate::platform;
use crate::status::Status;
use ferrogin_ffi::ext::STOP_LOST;

/// What ends a wait whose condition doesn't come true: the host's word or a time limit. The loop that waits on an
/// endpoint also checks the endpoint's error counter. Only waits call these methods.
pub trait Limit: Copy {
    /// Returns the host's word: 0 for none, [`STOP_LOST`], or another one for an abort.
    fn stop_word(&self) -> u32;
    /// Returns whether a wait reports lost ranks. A wait within an operation doesn't, as other peers still need the
    /// rest of it.
    #[inline(always)]
    fn reports_losses(&self) -> bool {
        true
    }
    /// Returns whether a wait's time limit has passed. `began_ns` is the time of its first round, or `u64::MAX` before
    /// that.
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
    fn stop_word(&self) -> u32 {
        0
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
        if let Some(status) = self.check() {
            return Err(status);
        }
        self.relax();
        Ok(())
    }

    /// Returns why the wait must end, if it must. A loop that checks and then [relaxes](Self::relax) costs a kernel
    /// fewer instructions than one that [pauses](Self::pause).
    #[inline(always)]
    pub fn check(&mut self) -> Option<Status> {
        let word = self.limits.stop_word();
        let stop = if self.limits.reports_losses() || word != STOP_LOST { word } else { 0 };
        if (stop != 0) | self.limits.has_passed(&mut self.began_ns) {
            let ended = if stop == STOP_LOST { Status::PeerLost } else { Status::Aborted };
            return Some(if stop == 0 { Status::Timeout } else { ended });
        }
        None
    }

    /// Pauses like [`pause`](Self::pause) in a post, which no loss ends and, in a context that `isolates` peers, no
    /// time limit: the card gives up on a lost peer's requests, and a reservation given up would end the posts to all
    /// peers.
    #[inline(always)]
    pub fn pause_post(&mut self, isolates: impl FnOnce() -> bool) -> Result<(), Status> {
        let word = self.limits.stop_word();
        if (word != 0) & (word != STOP_LOST) {
            return Err(Status::Aborted);
        }
        if self.limits.has_passed(&mut self.began_ns) && !isolates() {
            return Err(Status::Timeout);
        }
        self.relax();
        Ok(())
    }

    /// Pauses briefly.
    #[inline(always)]
    pub fn relax(&mut self) {
        self.limits.relax(self.round);
        self.round = self.round.saturating_add(1);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The host's word, and after how many rounds the time limit passes; `began_ns` counts them.
    #[derive(Clone, Copy)]
    struct Limits(u32, u64);

    impl Limit for Limits {
        fn stop_word(&self) -> u32 {
            self.0
        }

        fn has_passed(&self, began_ns: &mut u64) -> bool {
            *began_ns = began_ns.wrapping_add(1);
            *began_ns >= self.1
        }
    }

    #[test]
    fn host_or_time_limit_ends_wait() {
        for rounds in [0, 9] {
            assert_eq!(Spin::new(Limits(1, rounds)).pause(), Err(Status::Aborted));
            assert_eq!(Spin::new(Limits(1, rounds)).pause_post(|| true), Err(Status::Aborted));
            assert_eq!(Spin::new(Limits(STOP_LOST, rounds)).pause(), Err(Status::PeerLost));
        }
        let mut spin = Spin::new(Limits(0, 3));
        let rounds = [(); 4].map(|()| spin.pause());
        assert_eq!(rounds, [Ok(()), Ok(()), Ok(()), Err(Status::Timeout)]);
        let mut spin = Spin::new(Limits(STOP_LOST, 0));
        assert_eq!(
            [true, true, false].map(|isolates| spin.pause_post(|| isolates)),
            [Ok(()), Ok(()), Err(Status::Timeout)]
        );
    }
}
