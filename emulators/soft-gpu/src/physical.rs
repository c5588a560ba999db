//! Memory from cuMemCreate, which its mappings keep alive.

use std::ffi::c_int;
use std::os::fd::OwnedFd;

use crate::device;

/// Memory from cuMemCreate. It lives until it is released and unmapped.
#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) file: OwnedFd,
    pub(crate) bytes: u64,
    pub(crate) device: usize,
    pub(crate) handle_types: c_int,
    pub(crate) rdma: bool,
    /// The memory comes from another process, and doesn't count as used on this one's device.
    pub(crate) imported: bool,
}

impl Drop for Physical {
    fn drop(&mut self) {
        if let (false, Ok(device)) = (self.imported, device::by_ordinal(self.device)) {
            device.discharge(self.bytes);
        }
    }
}
