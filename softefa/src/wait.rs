//! Sleeping until something can be read.

use std::ffi::{c_int, c_void};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use ferrogin_libfabric::bindings as fi;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use super::guard::Code;
use soft_nic::card::pace::shares_a_core;
use soft_nic::card::signal::Signal;

/// How an application wants to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitObject {
    /// Not at all.
    None,
    /// In the calls that wait.
    Unspecified,
    /// On a descriptor.
    Fd,
}

impl WaitObject {
    /// # Errors
    /// `ENOSYS` for objects that are not offered.
    pub(super) fn of(object: fi::fi_wait_obj::Type) -> Result<Self, Code> {
        match object {
            fi::fi_wait_obj::FI_WAIT_NONE => Ok(Self::None),
            fi::fi_wait_obj::FI_WAIT_UNSPEC | fi::fi_wait_obj::FI_WAIT_YIELD => Ok(Self::Unspecified),
            fi::fi_wait_obj::FI_WAIT_FD => Ok(Self::Fd),
            _ => Err(Code::NOSYS),
        }
    }

    fn raw(self) -> fi::fi_wait_obj::Type {
        match self {
            Self::None => fi::fi_wait_obj::FI_WAIT_NONE,
            Self::Unspecified => fi::fi_wait_obj::FI_WAIT_UNSPEC,
            Self::Fd => fi::fi_wait_obj::FI_WAIT_FD,
        }
    }
}

/// `FI_GETWAIT` and `FI_GETWAITOBJ`.
///
/// # Errors
/// `ENOSYS` for other commands, `ENODATA` where there is no descriptor to give.
///
/// # Safety
/// `arg` is null or has room for what the command gives.
pub(super) unsafe fn control(
    object: WaitObject,
    signal: Option<&Signal>,
    command: c_int,
    arg: *mut c_void,
) -> Result<i32, Code> {
    let is = |name: u32| c_int::try_from(name).is_ok_and(|name| name == command);
    if !is(fi::FI_GETWAIT) && !is(fi::FI_GETWAITOBJ) {
        return Err(Code::NOSYS);
    }
    if arg.is_null() {
        return Err(Code::INVAL);
    }
    if is(fi::FI_GETWAITOBJ) {
        // SAFETY: not null, and a variable of the application of the type that the command asks (`fi_control(3)`).
        unsafe { arg.cast::<fi::fi_wait_obj::Type>().write(object.raw()) };
        return Ok(0);
    }
    let signal = signal.filter(|_| object == WaitObject::Fd).ok_or(Code::NODATA)?;
    // SAFETY: not null, and a variable of the application of the type that the command asks (`fi_control(3)`).
    unsafe { arg.cast::<c_int>().write(signal.fd().as_raw_fd()) };
    Ok(0)
}

/// The time that a call may wait.
pub(super) struct Sleep {
    deadline: Option<Instant>,
}

impl Sleep {
    /// `timeout` in milliseconds; negative: for ever.
    pub(super) fn until(timeout: c_int) -> Self {
        let deadline = u64::try_from(timeout).ok().map(|ms| Instant::now() + Duration::from_millis(ms));
        Self { deadline }
    }

    /// The time is over.
    pub(super) fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Sleeps until the signal is raised. False when the time is over or the sleep was interrupted.
    pub(super) fn on(&mut self, signal: &Signal) -> bool {
        let rest = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if rest.is_some_and(|rest| rest.is_zero()) {
            return false;
        }
        // Some work raises no signal, such as a ping of a peer: poll now and then.
        let rest = rest.unwrap_or(LOOK).min(LOOK);
        let mut fds = [PollFd::new(signal.fd(), PollFlags::POLLIN)];
        // An interrupted sleep is a short one.
        let _ = ppoll(&mut fds, Some(TimeSpec::from_duration(rest)), None);
        !signal.take_interrupt()
    }
}

/// The longest sleep between two polls.
const LOOK: Duration = Duration::from_millis(200);

/// Nothing was there: lets others run where cores are few, for those who look for completions have the card's.
pub(super) fn relax() {
    if shares_a_core() {
        std::thread::yield_now();
    }
}
