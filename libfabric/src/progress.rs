//! Manual progress: a thread that waits for a software card to write memory makes that card progress.
//!
//! A provider offers it as an operations table of its domains: `fi_open_ops(domain, "softefa progress ops")`. Hardware
//! providers have no such table.

use std::ffi::{CStr, c_void};

/// The table's name.
pub const OPS: &CStr = c"softefa progress ops";

/// Makes the card of `domain` (a `struct fid_domain *`, open during the call) progress in the calling thread. Returns
/// false if the call did nothing because the card's engine has a CPU core to itself. The call returns soon and doesn't
/// unwind. Any number of threads may make it at once.
pub type ProgressFn = unsafe extern "C" fn(domain: *mut c_void) -> bool;

/// The table.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ProgressOps {
    /// Never null in a provider's table.
    pub progress: Option<ProgressFn>,
}

/// A provider's function and the domain to call it with, from [`Domain::progress`](crate::Domain::progress). The owner
/// only calls it while the domain is open.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// The function to call in each round of a wait.
    pub function: ProgressFn,
    /// The domain.
    pub arg: *mut c_void,
}
