//! Memory from cuMemCreate, which its mappings keep alive.

use std::ffi::c_int;
use std::os::fd::OwnedFd;

use crate::device::Device;
use crate::place::Place;

/// Memory from cuMemCreate or another process. It lives until it is released and unmapped.
#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) handle: u64,
    pub(crate) file: OwnedFd,
    pub(crate) bytes: u64,
    pub(crate) place: Place,
    pub(crate) handle_types: c_int,
    pub(crate) rdma: bool,
    /// The device on which the memory counts as used: none for host memory, and for another process's.
    pub(crate) charged: Option<&'static Device>,
}

impl Drop for Physical {
    fn drop(&mut self) {
        if let Some(device) = self.charged {
            device.discharge(self.bytes);
        }
    }
}
