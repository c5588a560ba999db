//! Manual progress: a thread that waits for memory which a software card writes lets that card work meanwhile.
//!
//! A provider offers it as a table of operations of its domains, `fi_open_ops(domain, "softefa progress ops")`. Hardware has no
//! such table.

use std::ffi::{CStr, c_void};

/// The name of the table.
pub const OPS: &CStr = c"softefa progress ops";

/// Lets the card of the domain `domain` (a `struct fid_domain *`, open during the call) work in the calling thread for a moment.
/// Returns false when the call did nothing because the card has a processor of its own. It returns soon, any number of threads
/// may call it at once, and it does not unwind.
pub type ProgressFn = unsafe extern "C" fn(domain: *mut c_void) -> bool;

/// The table.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ProgressOps {
    /// Never null in a provider's table.
    pub progress: Option<ProgressFn>,
}

/// A provider's function and the domain to call it with, which [`Domain::progress`](crate::Domain::progress) gave. Its owner
/// calls it only while the domain is open.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// To be called in each round of a wait.
    pub function: ProgressFn,
    /// The domain.
    pub arg: *mut c_void,
}
