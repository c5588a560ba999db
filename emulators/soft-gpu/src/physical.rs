//! Memory of cuMemCreate, which mappings keep.

use std::ffi::c_int;
use std::os::fd::OwnedFd;

use crate::device;

/// Memory of cuMemCreate. It lives until it is released and no mapping has it.
#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) file: OwnedFd,
    pub(crate) bytes: u64,
    pub(crate) device: usize,
    pub(crate) handle_types: c_int,
    pub(crate) rdma: bool,
    /// Memory of another process costs this one's device nothing.
    pub(crate) imported: bool,
}

impl Drop for Physical {
    fn drop(&mut self) {
        if let (false, Ok(device)) = (self.imported, device::by_ordinal(self.device)) {
            device.discharge(self.bytes);
        }
    }
}
