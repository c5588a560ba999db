//! Sleeping until a descriptor is readable or another thread gives a signal.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::time::Duration;

/// An eventfd.
pub(crate) struct EventFd(File);

impl EventFd {
    pub fn new() -> io::Result<Self> {
        // SAFETY: the call takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call above opened the descriptor, and nothing else owns it.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// Ends the present or the next [`EventFd::wait`].
    pub fn signal(&self) {
        // A full counter is a signal too.
        let _ = (&self.0).write(&1u64.to_ne_bytes());
    }

    /// Sleeps until a signal, until `fd` is readable, or for `limit`.
    pub fn wait(&self, fd: Option<RawFd>, limit: Duration) {
        let watch = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // The call ignores a negative descriptor.
        let mut fds = [watch(self.0.as_raw_fd()), watch(fd.unwrap_or(-1))];
        let limit = libc::timespec {
            tv_sec: limit.as_secs().min(3600) as libc::time_t,
            tv_nsec: libc::c_long::from(limit.subsec_nanos()),
        };
        // SAFETY: both pointers are to locals that live over the call, with two entries in `fds`; no signal mask is passed.
        unsafe { libc::ppoll(fds.as_mut_ptr(), 2, &limit, std::ptr::null()) };
        if fds[0].revents != 0 {
            let _ = (&self.0).read(&mut [0; 8]);
        }
    }
}
