//! An event descriptor for threads that sleep until the card has written a completion.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};

use nix::sys::eventfd::{EfdFlags, EventFd};

/// An event that is raised at most once per arming.
#[derive(Debug)]
pub struct Signal {
    armed: AtomicBool,
    interrupted: AtomicBool,
    target: Target,
}

/// The descriptor that an event makes readable.
#[derive(Debug)]
enum Target {
    Event(EventFd),
    /// A pipe that many signals share. Each event writes its signal's number.
    Pipe(OwnedFd, u64),
}

impl Signal {
    /// # Errors
    /// The system is out of file descriptors.
    pub fn new() -> io::Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self::to(Target::Event(event)))
    }

    /// Creates a signal that writes `number` to a pipe once per event. An event that finds the pipe full is lost, so
    /// the pipe must not block and must have room for every signal that shares it.
    pub fn numbered(pipe: OwnedFd, number: u64) -> Self {
        Self::to(Target::Pipe(pipe, number))
    }

    fn to(target: Target) -> Self {
        Self { armed: AtomicBool::new(false), interrupted: AtomicBool::new(false), target }
    }

    /// Makes the next [`raise`](Self::raise) signal the descriptor. The caller polls for completions once more after
    /// arming.
    pub fn arm(&self) {
        // An earlier event is obsolete, because the caller polls after this call. Events in a pipe stay: the reader
        // counts them.
        if let Target::Event(event) = &self.target
            && !self.interrupted.load(Ordering::Acquire)
        {
            let _ = event.read();
        }
        self.armed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Signals the descriptor if it is armed, and returns whether it was. The caller has already written the
    /// completion.
    pub fn raise(&self) -> bool {
        fence(Ordering::SeqCst);
        let armed = self.armed.load(Ordering::Relaxed) && self.armed.swap(false, Ordering::Relaxed);
        if armed {
            self.notify();
        }
        armed
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
        // The only failure is a full counter or pipe, and then the descriptor is readable already.
        let _ = match &self.target {
            Target::Event(event) => event.write(1),
            Target::Pipe(pipe, number) => nix::unistd::write(pipe, &number.to_ne_bytes()),
        };
    }

    /// Returns the descriptor, which is readable after an event. For a numbered signal, it is the pipe's write end.
    pub fn fd(&self) -> BorrowedFd<'_> {
        match &self.target {
            Target::Event(event) => event.as_fd(),
            Target::Pipe(pipe, _) => pipe.as_fd(),
        }
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

    #[test]
    fn numbered_signals_share_a_pipe() {
        let (reader, writer) = nix::unistd::pipe2(nix::fcntl::OFlag::O_NONBLOCK).unwrap();
        let signals = [7, 9].map(|number| Signal::numbered(writer.try_clone().unwrap(), number));
        signals[0].raise();
        let read = || {
            let mut number = [0; 8];
            nix::unistd::read(&reader, &mut number).map(|_| u64::from_ne_bytes(number))
        };
        assert_eq!(read(), Err(nix::errno::Errno::EAGAIN), "not armed");
        for signal in [&signals[1], &signals[0]] {
            signal.arm();
            signal.raise();
            signal.raise();
        }
        signals[0].arm();
        assert_eq!([read(), read()], [Ok(9), Ok(7)], "arming keeps an earlier event");
        assert_eq!(read(), Err(nix::errno::Errno::EAGAIN));
    }
}
