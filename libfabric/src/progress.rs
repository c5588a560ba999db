//! Manual progress: a thread that waits for memory which a software card writes makes that card progress.
//!
//! A provider offers it as an operations table of its domains, `fi_open_ops(domain, "softefa progress ops")`. Providers of hardware
//! have no such table.

use std::ffi::{CStr, c_void};

/// The name of the table.
pub const OPS: &CStr = c"softefa progress ops";

/// Makes the card of `domain` (a `struct fid_domain *`, open during the call) progress in the calling thread. Returns false when the
/// call did nothing, because the card's engine has a processor of its own. The call returns soon and does not unwind. Any number of
/// threads may call it at once.
pub type ProgressFn = unsafe extern "C" fn(domain: *mut c_void) -> bool;

/// The table.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ProgressOps {
    /// Never null in a provider's table.
    pub progress: Option<ProgressFn>,
}

/// A provider's function and the domain to call it with, from [`Domain::progress`](crate::Domain::progress). The owner calls it only
/// while the domain is open.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// The function, for each round of a wait.
    pub function: ProgressFn,
    /// The domain.
    pub arg: *mut c_void,
}
