//! An event descriptor for threads that sleep until the card has written a completion.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};

use nix::sys::eventfd::{EfdFlags, EventFd};

/// An event that is raised at most once after each arming.
#[derive(Debug)]
pub struct Signal {
    armed: AtomicBool,
    interrupted: AtomicBool,
    event: EventFd,
}

impl Signal {
    /// # Errors
    /// The system has no descriptor left.
    pub fn new() -> io::Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self { armed: AtomicBool::new(false), interrupted: AtomicBool::new(false), event })
    }

    /// Makes the next [`raise`](Self::raise) signal the descriptor. The caller polls for completions once more after it armed.
    pub fn arm(&self) {
        // An earlier event is obsolete, because the caller polls after this call.
        if !self.interrupted.load(Ordering::Acquire) {
            let _ = self.event.read();
        }
        self.armed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Signals the descriptor if it is armed. The caller has written the completion before.
    pub fn raise(&self) {
        fence(Ordering::SeqCst);
        if self.armed.load(Ordering::Relaxed) && self.armed.swap(false, Ordering::Relaxed) {
            self.notify();
        }
    }

    /// Wakes the thread that sleeps on the descriptor, or the next one, without a completion.
    pub fn interrupt(&self) {
        self.interrupted.store(true, Ordering::Release);
        self.notify();
    }

    /// Whether [`interrupt`](Self::interrupt) was called since the last call.
    pub fn take_interrupt(&self) -> bool {
        self.interrupted.swap(false, Ordering::AcqRel)
    }

    fn notify(&self) {
        // The only failure is a full counter, and then the descriptor is readable already.
        let _ = self.event.write(1);
    }

    /// The descriptor: readable after an event.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    fn is_readable(signal: &Signal) -> bool {
        let mut fds = [PollFd::new(signal.fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
    }

    #[test]
    fn armed_signal_is_raised_once() {
        let signal = Signal::new().unwrap();
        signal.raise();
        assert!(!is_readable(&signal), "not armed");
        signal.arm();
        assert!(!is_readable(&signal));
        signal.raise();
        assert!(is_readable(&signal));
        signal.arm();
        assert!(!is_readable(&signal), "arming clears an earlier event");
        signal.interrupt();
        assert!(is_readable(&signal) && signal.take_interrupt() && !signal.take_interrupt());
    }
}
