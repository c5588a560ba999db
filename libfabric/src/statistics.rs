//! A software card's statistics, which a provider offers as an operations table of its domains: `fi_open_ops(domain,
//! "softefa statistics ops")`. Hardware providers have no such table; a driver reports a card's statistics in sysfs.

use std::ffi::{CStr, c_int, c_void};

/// The table's name.
pub const OPS: &CStr = c"softefa statistics ops";

/// What a card has counted since it was opened. The fields match an EFA card's `hw_counters` of the same names.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// This side's writes that completed without error.
    pub rdma_write_wrs: u64,
    /// Bytes in those writes.
    pub rdma_write_bytes: u64,
    /// This side's writes that completed in error.
    pub rdma_write_wr_err: u64,
    /// Bytes that peers wrote into this side's memory.
    pub rdma_write_recv_bytes: u64,
    /// This side's reads that completed without error.
    pub rdma_read_wrs: u64,
    /// Bytes in those reads.
    pub rdma_read_bytes: u64,
    /// This side's reads that completed in error.
    pub rdma_read_wr_err: u64,
    /// Bytes that peers read from this side's memory.
    pub rdma_read_resp_bytes: u64,
}

/// Writes the first `size` bytes of the [`Statistics`] of `domain`'s card (a `struct fid_domain *`, open during the
/// call) to `out`. Later providers may have more fields at the end. Returns 0 or a negative error code, and doesn't
/// unwind.
pub type ReadFn = unsafe extern "C" fn(domain: *mut c_void, out: *mut Statistics, size: usize) -> c_int;

/// The table.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StatisticsOps {
    /// Never null in a provider's table.
    pub read: Option<ReadFn>,
}
