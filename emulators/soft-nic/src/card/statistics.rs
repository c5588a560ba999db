//! What a card counts, as an EFA card does in its `hw_counters` of the same names.

/// What a card has counted since it was opened.
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
