//! Sleeping until a descriptor is readable or another thread rings.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::time::Duration;

/// An eventfd.
pub(super) struct Wake(File);

impl Wake {
    pub fn new() -> io::Result<Self> {
        // SAFETY: a plain system call.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh descriptor that nobody else knows.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// Ends the sleep of [`Wake::wait`], or the next one.
    pub fn ring(&self) {
        // A full counter rings too.
        let _ = (&self.0).write(&1u64.to_ne_bytes());
    }

    /// Sleeps until somebody rings, `fd` is readable, or `limit` is over.
    pub fn wait(&self, fd: Option<RawFd>, limit: Duration) {
        let watch = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // A negative descriptor is not looked at.
        let mut fds = [watch(self.0.as_raw_fd()), watch(fd.unwrap_or(-1))];
        let limit = libc::timespec {
            tv_sec: limit.as_secs().min(3600) as libc::time_t,
            tv_nsec: libc::c_long::from(limit.subsec_nanos()),
        };
        // SAFETY: two live entries and a live time; no signal mask. Every way in which it returns ends the sleep.
        unsafe { libc::ppoll(fds.as_mut_ptr(), 2, &limit, std::ptr::null()) };
        if fds[0].revents != 0 {
            let _ = (&self.0).read(&mut [0; 8]);
        }
    }
}
