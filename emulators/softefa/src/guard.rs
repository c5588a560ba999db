//! The boundary between C and this library: no panic unwinds into a caller, and errors become codes.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ferrogin_libfabric::bindings as fi;

use soft_nic::log;

/// A libfabric error: the positive number in its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Code(pub i32);

impl Code {
    pub(super) const INVAL: Self = Self(fi::FI_EINVAL);
    pub(super) const NOMEM: Self = Self(fi::FI_ENOMEM);
    pub(super) const BUSY: Self = Self(fi::FI_EBUSY);
    pub(super) const NODATA: Self = Self(fi::FI_ENODATA);
    pub(super) const NOSYS: Self = Self(fi::FI_ENOSYS);
    pub(super) const UNSUPPORTED: Self = Self(fi::FI_EOPNOTSUPP);
    pub(super) const STATE: Self = Self(fi::FI_EOPBADSTATE);
    pub(super) const AGAIN: Self = Self(fi::FI_EAGAIN);
    pub(super) const MSGSIZE: Self = Self(fi::FI_EMSGSIZE);
    pub(super) const BADFLAGS: Self = Self(fi::FI_EBADFLAGS);
    pub(super) const OTHER: Self = Self(fi::FI_EOTHER);

    /// Returns the negative number that the interface's functions return.
    pub(super) fn negative(self) -> i32 {
        -self.0
    }
}

impl From<std::io::Error> for Code {
    fn from(error: std::io::Error) -> Self {
        Self(error.raw_os_error().map_or(fi::FI_EIO, |code| code))
    }
}

impl From<soft_nic::card::SetupError> for Code {
    fn from(error: soft_nic::card::SetupError) -> Self {
        use soft_nic::card::SetupError as E;
        match error {
            E::QueuePairs | E::Handles | E::Counters(_) => Self(fi::FI_ENOSPC),
            E::Memory => Self::NOMEM,
            E::Busy => Self::BUSY,
        }
    }
}

/// Runs the body of an entry point and returns its result or a negative code.
pub(super) fn entry(call: &str, body: impl FnOnce() -> Result<i32, Code>) -> i32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => value,
        Ok(Err(code)) => code.negative(),
        Err(_) => {
            report(call);
            Code::OTHER.negative()
        }
    }
}

/// Does the same for entry points whose result is not a code: a failed call returns `otherwise`.
pub(super) fn entry_or<T>(call: &str, otherwise: T, body: impl FnOnce() -> Result<T, Code>) -> T {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result.unwrap_or(otherwise),
        Err(_) => {
            report(call);
            otherwise
        }
    }
}

fn report(call: &str) {
    log::line(format_args!("softefa: {call} failed inside the provider: this is a bug in softefa"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_does_not_cross_abi() {
        assert_eq!(entry("test", || panic!("inside")), -256);
        assert_eq!(entry_or("test", 7, || panic!("inside")), 7);
        assert_eq!(entry("test", || Ok(3)), 3);
        assert_eq!(entry("test", || Err(Code::BUSY)), -16);
    }
}
