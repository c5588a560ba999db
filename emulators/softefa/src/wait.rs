//! Sleeping until something can be read.

use std::ffi::c_int;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use ferrogin_libfabric::bindings as fi;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use super::entry::Command;
use super::guard::Code;
use super::library::refuse_attribute;
use soft_nic::card::pace::shares_a_core;
use soft_nic::card::signal::Signal;

/// A queue's wait object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitObject {
    /// The queue has none.
    None,
    /// Only calls such as `fi_cq_sread` wait.
    Unspecified,
    /// A descriptor.
    Fd,
}

impl WaitObject {
    /// # Errors
    /// `ENOSYS` for objects that this provider lacks.
    pub(super) fn of(call: &str, object: fi::fi_wait_obj::Type) -> Result<Self, Code> {
        match object {
            fi::fi_wait_obj::FI_WAIT_NONE => Ok(Self::None),
            fi::fi_wait_obj::FI_WAIT_UNSPEC | fi::fi_wait_obj::FI_WAIT_YIELD => Ok(Self::Unspecified),
            fi::fi_wait_obj::FI_WAIT_FD => Ok(Self::Fd),
            _ => Err(refuse_attribute(call, Code::NOSYS, format_args!("there is no wait_obj {object} here"))),
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
/// `ENOSYS` for other commands, `ENODATA` for a queue without a descriptor.
pub(super) fn control(object: WaitObject, signal: Option<&Signal>, command: &Command<'_>) -> Result<i32, Code> {
    match command {
        Command::GetWaitObj(variable) => variable.as_ref().ok_or(Code::INVAL)?.write(object.raw()),
        Command::GetWait(variable) => {
            let variable = variable.as_ref().ok_or(Code::INVAL)?;
            let signal = signal.filter(|_| object == WaitObject::Fd).ok_or(Code::NODATA)?;
            variable.write(signal.fd().as_raw_fd());
        }
        _ => return Err(Code::NOSYS),
    }
    Ok(0)
}

/// A waiting call's time limit.
pub(super) struct Sleep {
    deadline: Option<Instant>,
}

impl Sleep {
    /// Starts a time limit of `timeout` milliseconds; a negative one means no limit.
    pub(super) fn until(timeout: c_int) -> Self {
        let deadline = u64::try_from(timeout).ok().map(|ms| Instant::now() + Duration::from_millis(ms));
        Self { deadline }
    }

    /// Whether the time is over.
    pub(super) fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Sleeps until the signal is raised. Returns false if the time is over or the sleep was interrupted.
    pub(super) fn on(&mut self, signal: &Signal) -> bool {
        let rest = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if rest.is_some_and(|rest| rest.is_zero()) {
            return false;
        }
        // Some work raises no signal, such as a ping of a peer, so the caller polls at least this often.
        let rest = rest.unwrap_or(POLL_INTERVAL).min(POLL_INTERVAL);
        let mut fds = [PollFd::new(signal.fd(), PollFlags::POLLIN)];
        // The result is ignored: an interrupted sleep only ends early.
        let _ = ppoll(&mut fds, Some(TimeSpec::from_duration(rest)), None);
        !signal.take_interrupt()
    }
}

/// Reads until there is something or the time is over: `fi_cq_sread` and `fi_eq_sread`. `timeout` is that of
/// [`Sleep::until`]. `read` learns whether this is the last read.
///
/// # Errors
/// Those of `read`; `EAGAIN` if the time is over or the sleep was interrupted.
pub(super) fn read_with_timeout(
    signal: &Signal,
    timeout: c_int,
    may_sleep: impl Fn() -> bool,
    mut read: impl FnMut(bool) -> Result<i32, Code>,
) -> Result<i32, Code> {
    let mut sleep = Sleep::until(timeout);
    loop {
        match read(false) {
            Err(Code::AGAIN) => {}
            done => return done,
        }
        if may_sleep() && !sleep.on(signal) {
            return read(true);
        }
    }
}

/// The longest sleep between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Yields after a read that found nothing, on machines where threads share a core with the engine.
pub(super) fn relax() {
    if shares_a_core() {
        std::thread::yield_now();
    }
}
