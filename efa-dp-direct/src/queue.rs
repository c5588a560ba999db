//! The queue structs that the host fills and device code reads.
//!
//! Source: `efa_cuda_dp_types.h` of efa-dp-direct 0.0.1 (layout v0, NCCL 2.31) and 1.1.0 (v0 and v1, NCCL 2.32). Pointers
//! are device addresses. The send ring lies at the same offset of both queue pair structs.

use crate::assert_layout;

/// `efa_cuda_wq_v0`: a ring and its cursors.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WqV0 {
    /// Buffers of one request; not used.
    pub max_sge: u32,
    /// Entries.
    pub max_wqes: u32,
    /// Entries less one.
    pub queue_mask: u32,
    /// log2 of the entries.
    pub queue_size_shift: u32,
    /// Requests that may be written and not yet rung.
    pub max_batch: u32,
    /// Requests in the open batch.
    pub wqes_pending: u32,
    /// NCCL: requests that were rung.
    pub wqes_posted: u32,
    /// NCCL: requests that were handed off.
    pub wqes_completed: u32,
    /// Producer counter.
    pub pc: u32,
    /// Phase of the current lap. ferrogin's `combining` policy keeps its flush barrier here: the phase follows from `pc`.
    pub phase: i32,
    /// Ring.
    pub buf: *mut u8,
    /// Doorbell.
    pub db: *mut u32,
}
assert_layout!(WqV0, size 56, align 8, {
    max_sge @ 0, max_wqes @ 4, queue_mask @ 8, queue_size_shift @ 12, max_batch @ 16, wqes_pending @ 20,
    wqes_posted @ 24, wqes_completed @ 28, pc @ 32, phase @ 36, buf @ 40, db @ 48,
});

/// `efa_cuda_rq_v0`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RqV0 {
    /// The ring.
    pub wq: WqV0,
}
assert_layout!(RqV0, size 56, align 8, { wq @ 0 });

/// `efa_cuda_sq_v0`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SqV0 {
    /// The ring.
    pub wq: WqV0,
    /// Bytes that a request can carry inline.
    pub max_inline_data: u32,
    /// Local buffers of an RDMA request.
    pub max_rdma_sges: u32,
}
assert_layout!(SqV0, size 64, align 8, { wq @ 0, max_inline_data @ 56, max_rdma_sges @ 60 });

/// `efa_cuda_qp_v0`: a queue pair of 64-byte requests.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpV0 {
    /// Zero.
    pub comp_mask: u64,
    /// Send queue.
    pub sq: SqV0,
    /// Receive queue.
    pub rq: RqV0,
}
assert_layout!(QpV0, size 128, align 8, { comp_mask @ 0, sq @ 8, rq @ 72 });

/// `efa_cuda_wr_ctx_v0`: where things are in a request of this queue.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrCtxV0 {
    /// Remote buffer of an RDMA request.
    pub remote_mem_offset: u8,
    /// Local buffer of an RDMA request.
    pub local_mem_offset: u8,
    /// Buffers of a send.
    pub sgl_offset: u8,
    /// Inline data of a send.
    pub send_inline_data_offset: u8,
    /// Inline data of an RDMA write; 0 where it can have none.
    pub write_inline_data_offset: u8,
    /// Bytes that a request can carry inline.
    pub max_inline_data: u32,
    /// Local buffers of an RDMA request.
    pub max_rdma_sges: u32,
    /// Bytes of a request: 64 or 128.
    pub wqe_size: u16,
}
assert_layout!(WrCtxV0, size 20, align 4, {
    remote_mem_offset @ 0, local_mem_offset @ 1, sgl_offset @ 2, send_inline_data_offset @ 3,
    write_inline_data_offset @ 4, max_inline_data @ 8, max_rdma_sges @ 12, wqe_size @ 16,
});

/// `efa_cuda_sq_v1`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SqV1 {
    /// The ring.
    pub wq: WqV0,
    /// Geometry of its requests.
    pub wr_ctx: WrCtxV0,
}
assert_layout!(SqV1, size 80, align 8, { wq @ 0, wr_ctx @ 56 });

/// `efa_cuda_qp_v1`: a queue pair of 64- or 128-byte requests.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpV1 {
    /// Zero.
    pub comp_mask: u64,
    /// Send queue.
    pub sq: SqV1,
    /// Receive queue.
    pub rq: RqV0,
}
assert_layout!(QpV1, size 144, align 8, { comp_mask @ 0, sq @ 8, rq @ 88 });

/// `efa_cuda_cq_v0`: a completion queue.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CqV0 {
    /// Zero.
    pub comp_mask: u64,
    /// Bytes of an entry.
    pub entry_size: u32,
    /// Entries.
    pub num_entries: u32,
    /// Entries less one.
    pub queue_mask: u32,
    /// log2 of the entries.
    pub queue_size_shift: u32,
    /// Consumer counter.
    pub cc: u32,
    /// Phase of the current lap: 1 in the first.
    pub phase: i32,
    /// Ring.
    pub buf: *mut u8,
    /// Doorbell, or null.
    pub db: *mut u32,
}
assert_layout!(CqV0, size 48, align 8, {
    comp_mask @ 0, entry_size @ 8, num_entries @ 12, queue_mask @ 16, queue_size_shift @ 20, cc @ 24, phase @ 28,
    buf @ 32, db @ 40,
});
