//! The boundary between C and this library: panics don't unwind into the caller, and errors become errno values.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use soft_nic::card::SetupError;
use soft_nic::log;

/// An errno value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Errno(pub c_int);

impl Errno {
    pub(crate) const INVAL: Self = Self(libc::EINVAL);
    pub(crate) const PERM: Self = Self(libc::EPERM);
    pub(crate) const BUSY: Self = Self(libc::EBUSY);
    pub(crate) const NOMEM: Self = Self(libc::ENOMEM);
    pub(crate) const UNSUPPORTED: Self = Self(libc::EOPNOTSUPP);

    /// Sets this thread's errno.
    pub(crate) fn set(self) {
        nix::errno::Errno::set_raw(self.0);
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl From<nix::errno::Errno> for Errno {
    fn from(error: nix::errno::Errno) -> Self {
        Self(error as c_int)
    }
}

impl From<SetupError> for Errno {
    fn from(error: SetupError) -> Self {
        match error {
            SetupError::QueuePairs | SetupError::Handles | SetupError::Counters(_) | SetupError::Memory => Self::NOMEM,
            SetupError::Busy => Self::BUSY,
        }
    }
}

/// Silences the log. The fuzz harness sets it, since most of its calls are refused.
pub static QUIET: AtomicBool = AtomicBool::new(false);

/// Logs why a call is refused, and returns `errno`.
pub(crate) fn refuse(call: &str, errno: Errno, why: std::fmt::Arguments<'_>) -> Errno {
    if !cfg!(test) && !QUIET.load(Ordering::Relaxed) {
        log::line(format_args!("softefa: {call}: {why}"));
    }
    errno
}

/// Runs an entry point's body; if it panics, returns `otherwise`.
pub(crate) fn entry<T>(call: &str, otherwise: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        log::line(format_args!("softefa: {call} failed inside the software card: this is a bug in soft-verbs"));
        otherwise
    })
}

/// Runs an entry point that returns 0 or an errno value.
pub(crate) fn status(call: &str, body: impl FnOnce() -> Result<(), Errno>) -> c_int {
    match entry(call, Err(Errno(libc::EIO)), body) {
        Ok(()) => 0,
        Err(errno) => {
            errno.set();
            errno.0
        }
    }
}

/// Runs an entry point that returns an object, or sets errno and returns null.
pub(crate) fn object<T>(call: &str, body: impl FnOnce() -> Result<*mut T, Errno>) -> *mut T {
    entry(call, Err(Errno(libc::EIO)), body).unwrap_or_else(|errno| {
        errno.set();
        ptr::null_mut()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_does_not_cross_abi() {
        assert_eq!(status("test", || panic!("inside")), libc::EIO);
        assert!(object::<u8>("test", || panic!("inside")).is_null());
        assert_eq!(nix::errno::Errno::last_raw(), libc::EIO);
        assert_eq!(entry("test", 7, || panic!("inside")), 7);
        assert_eq!(status("test", || Ok(())), 0);
        assert_eq!(status("test", || Err(Errno::BUSY)), libc::EBUSY);
    }
}
