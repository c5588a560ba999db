//! Statistics of a software card, which a provider offers as an operations table of its domains,
//! `fi_open_ops(domain, "softefa statistics ops")`. Providers of hardware have no such table: a driver has a card's statistics in sysfs.

use std::ffi::{CStr, c_int, c_void};

/// The name of the table.
pub const OPS: &CStr = c"softefa statistics ops";

/// What a card has counted since it was opened. The fields are those of an EFA card's `hw_counters` of the same names.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Writes of this side that completed without error.
    pub rdma_write_wrs: u64,
    /// Bytes of these writes.
    pub rdma_write_bytes: u64,
    /// Writes of this side that completed in error.
    pub rdma_write_wr_err: u64,
    /// Bytes of peers' writes into memory of this side.
    pub rdma_write_recv_bytes: u64,
    /// Reads of this side that completed without error.
    pub rdma_read_wrs: u64,
    /// Bytes of these reads.
    pub rdma_read_bytes: u64,
    /// Reads of this side that completed in error.
    pub rdma_read_wr_err: u64,
    /// Bytes that peers have read from memory of this side.
    pub rdma_read_resp_bytes: u64,
}

/// Writes the first `size` bytes of the [`Statistics`] of the card of `domain` (a `struct fid_domain *`, open during the call) to `out`.
/// A later provider has more fields at the end. The call returns 0 or a negative error code, and does not unwind.
pub type ReadFn = unsafe extern "C" fn(domain: *mut c_void, out: *mut Statistics, size: usize) -> c_int;

/// The table.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StatisticsOps {
    /// Never null in a provider's table.
    pub read: Option<ReadFn>,
}
