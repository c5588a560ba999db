//! Why a connection to another card could not be made or kept.

use std::io;

use ferrogin_rendezvous::proof::ProofError;

#[derive(Debug, thiserror::Error)]
pub enum WireError {
    #[error("no card listens there")]
    Absent,
    #[error("no card of this host and network namespace has this GID; set SOFTEFA_IFADDR for cards of several hosts")]
    NotHere,
    #[error("its GID has no address for SOFTEFA_WIRE=tcp: use the same SOFTEFA_WIRE on both sides")]
    NoAddress,
    #[error("the peer card disconnected")]
    Gone,
    #[error(transparent)]
    Proof(#[from] ProofError),
    #[error("the process at the other end belongs to user {0}, and this card accepts only its own user and root")]
    Foreign(u32),
    #[error("{0}: {1}{hint}", hint = hint(.1))]
    System(&'static str, io::Error),
}

impl WireError {
    /// Whether the process or the system is out of descriptors or memory for another connection.
    pub fn is_exhaustion(&self) -> bool {
        matches!(self, Self::System(_, error) if error.raw_os_error().is_some_and(is_exhaustion))
    }
}

/// Whether the error means that the process or the system is out of descriptors or memory.
pub fn is_exhaustion(errno: i32) -> bool {
    matches!(errno, libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM | libc::EFBIG)
}

/// Returns what to do about a failed system call.
fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EMFILE) => "; raise the process's limit of open files (ulimit -n)",
        Some(libc::ENFILE) => "; raise the system's limit of open files (sysctl fs.file-max)",
        Some(libc::ENOBUFS | libc::ENOMEM) => {
            "; raise the process's memory limit (ulimit -v), or free memory on this machine"
        }
        Some(libc::EFBIG) => "; raise the process's limit of file sizes (ulimit -f), which bounds shared memory",
        _ => "",
    }
}

/// Makes errors of the system call `call`.
pub(super) fn system<E: Into<io::Error>>(call: &'static str) -> impl Fn(E) -> WireError {
    move |error| WireError::System(call, error.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exhaustion_names_its_fix() {
        for (errno, fix) in [
            (libc::EMFILE, "ulimit -n"),
            (libc::ENFILE, "fs.file-max"),
            (libc::ENOMEM, "ulimit -v"),
            (libc::EFBIG, "ulimit -f"),
        ] {
            let error = system("accept4")(io::Error::from_raw_os_error(errno));
            assert!(error.is_exhaustion() && error.to_string().contains(fix), "{error}");
        }
    }
}
