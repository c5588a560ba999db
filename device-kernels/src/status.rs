//! The result of a device API operation.

/// Why an operation didn't do what was asked. The numbers are those of `fgin_status` in `ferrogin/gin.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Status {
    /// An argument is out of range: peer, signal, counter, value size, window.
    InvalidArgument = 1,
    /// The handle or the card can't do this: a strong or VA signal where the card counts signals, a value on an
    /// endpoint without slots, or a handle of another version.
    Unsupported = 2,
    /// The host raised the abort flag.
    Aborted = 3,
    /// The deadline passed.
    Timeout = 4,
    /// The card completed a work request on this endpoint in error; the host's log says which.
    CardError = 5,
    /// An earlier operation on this endpoint gave up half-way; the context must be destroyed.
    Poisoned = 6,
    /// In a context that isolates peers: the peer of a post is lost, or a rank is on which a wait could depend, and the
    /// program hasn't acknowledged the loss.
    PeerLost = 7,
}

impl Status {
    /// Returns the status with that number, or `None` for 0 and unknown numbers.
    pub const fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            1 => Status::InvalidArgument,
            2 => Status::Unsupported,
            3 => Status::Aborted,
            4 => Status::Timeout,
            5 => Status::CardError,
            6 => Status::Poisoned,
            7 => Status::PeerLost,
            _ => return None,
        })
    }
}

/// Returns a result as the number that a C function returns.
#[cfg(not(loom))]
#[inline(always)]
pub(crate) fn code(result: Result<(), Status>) -> core::ffi::c_int {
    result.map_or_else(|status| status as core::ffi::c_int, |()| 0)
}

impl core::fmt::Display for Status {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Status::InvalidArgument => "an argument is out of range",
            Status::Unsupported => "not supported by this handle or card",
            Status::Aborted => "aborted by the host",
            Status::Timeout => "the deadline passed",
            Status::CardError => "the card completed a work request in error",
            Status::Poisoned => "the endpoint was given up by an earlier operation",
            Status::PeerLost => "a rank is lost",
        })
    }
}

impl core::error::Error for Status {}
