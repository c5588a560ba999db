//! A bell for those who sleep until the card has written a completion.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};

use nix::sys::eventfd::{EfdFlags, EventFd};

/// Rung once for each time that it was armed.
#[derive(Debug)]
pub struct Signal {
    armed: AtomicBool,
    interrupted: AtomicBool,
    bell: EventFd,
}

impl Signal {
    /// # Errors
    /// No descriptor can be had.
    pub fn new() -> io::Result<Self> {
        let bell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self { armed: AtomicBool::new(false), interrupted: AtomicBool::new(false), bell })
    }

    /// From now on the next [`raise`](Self::raise) rings. Look for completions once more after this.
    pub fn arm(&self) {
        // An old ring is of no interest any more: what it announced is there to be seen.
        if !self.interrupted.load(Ordering::Acquire) {
            let _ = self.bell.read();
        }
        self.armed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// There is something to see. Call it after that was written.
    pub fn raise(&self) {
        fence(Ordering::SeqCst);
        if self.armed.load(Ordering::Relaxed) && self.armed.swap(false, Ordering::Relaxed) {
            self.ring();
        }
    }

    /// Wakes whoever sleeps, or will next, though there is nothing to see.
    pub fn interrupt(&self) {
        self.interrupted.store(true, Ordering::Release);
        self.ring();
    }

    /// Whether somebody was interrupted, once.
    pub fn take_interrupt(&self) -> bool {
        self.interrupted.swap(false, Ordering::AcqRel)
    }

    fn ring(&self) {
        // The only failure is a counter that is full, and then it rings already.
        let _ = self.bell.write(1);
    }

    /// Readable while it rings.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    fn rings(signal: &Signal) -> bool {
        let mut fds = [PollFd::new(signal.fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
    }

    #[test]
    fn it_rings_when_armed_and_once() {
        let signal = Signal::new().unwrap();
        signal.raise();
        assert!(!rings(&signal), "nobody waits");
        signal.arm();
        assert!(!rings(&signal));
        signal.raise();
        assert!(rings(&signal));
        signal.arm();
        assert!(!rings(&signal), "arming forgets");
        signal.interrupt();
        assert!(rings(&signal) && signal.take_interrupt() && !signal.take_interrupt());
    }
}
