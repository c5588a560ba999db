//! ferrogin's own device state, beside the NCCL-visible structs.
//!
//! `createContext` allocates one block: a [`HandleHeader`], and directly behind it the array of
//! [`DevHandle`](crate::device::DevHandle)s. `ncclNetDeviceHandle->handle` points at the array, so NCCL's device code
//! never sees the header, and ours finds it `size_of::<HandleHeader>()` bytes before. The header leads to one
//! [`ContextExt`] for each context and from there to one [`EndpointExt`] for each endpoint.

use crate::assert_layout;
use core::sync::atomic::{AtomicU32, AtomicU64};

/// `HandleHeader::magic`.
pub const HEADER_MAGIC: u64 = u64::from_le_bytes(*b"ferrogin");
/// `HandleHeader::version`: raised whenever a struct of this module changes.
pub const HEADER_VERSION: u32 = 1;

/// Posting policy: reserve, write and mark in parallel; one poster rings for all that is ready.
pub const POLICY_COMBINING: u32 = 0;
/// Posting policy: the whole post under the endpoint's `sq_lock`.
pub const POLICY_LOCKED: u32 = 1;

/// Lies directly before the array of device handles.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
pub struct HandleHeader {
    /// [`HEADER_MAGIC`].
    pub magic: u64,
    /// [`HEADER_VERSION`].
    pub version: u32,
    /// Entries in the array of device handles and in `contexts`.
    pub n_contexts: u32,
    /// `[n_contexts]`.
    pub contexts: *mut ContextExt,
    /// A word that ends every wait of these contexts when it is not 0; the host writes it when it gives up.
    pub abort_flag: *mut u32,
    /// [`POLICY_COMBINING`] or [`POLICY_LOCKED`].
    pub policy: u32,
    /// Layout of the queue structs: 1 (`efa_cuda_qp_v0`) or 2 (`efa_cuda_qp_v1`).
    pub backend_version: u32,
    /// Zero.
    pub reserved: [u64; 3],
}
assert_layout!(HandleHeader, size 64, align 64, {
    magic @ 0, version @ 8, n_contexts @ 12, contexts @ 16, abort_flag @ 24, policy @ 32, backend_version @ 36,
    reserved @ 40,
});

/// One GIN context, as ferrogin's kernels use it.
///
/// `endpoints` is ordered: data, value, then one for each counter, then one for each signal.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
pub struct ContextExt {
    /// The NCCL-visible half.
    pub dev: *mut crate::device::DevHandle,
    /// `[n_endpoints]`.
    pub endpoints: *mut EndpointExt,
    /// `2 + n_counters + n_signals`.
    pub n_endpoints: u32,
    /// Target slots in `targets`: 1 + the greatest number of signals on any rank.
    pub n_slots: u32,
    /// `[slot * nranks + peer]`; a target that a peer lacks is all zero.
    pub targets: *const Target,
    /// Same word as [`HandleHeader::abort_flag`].
    pub abort_flag: *mut u32,
    /// Same as [`HandleHeader::policy`].
    pub policy: u32,
    /// Largest transfer of one work request, bytes.
    pub max_rdma_size: u32,
    /// Nanoseconds after which a wait of the device API gives up; 0 is never.
    pub wait_timeout_ns: u64,
    /// Zero.
    pub reserved: u64,
}
assert_layout!(ContextExt, size 64, align 64, {
    dev @ 0, endpoints @ 8, n_endpoints @ 16, n_slots @ 20, targets @ 24, abort_flag @ 32, policy @ 40,
    max_rdma_size @ 44, wait_timeout_ns @ 48, reserved @ 56,
});

/// Where a work request goes: the three numbers of its address, in one 8-byte word.
#[repr(C, align(8))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Target {
    /// Address handle number.
    pub ah: u16,
    /// Remote queue pair number.
    pub qpn: u16,
    /// Remote queue key.
    pub qkey: u32,
}
assert_layout!(Target, size 8, align 8, { ah @ 0, qpn @ 2, qkey @ 4 });

/// One endpoint, as ferrogin's kernels use it: what posting reads, then what posting writes, on lines of their own.
///
/// The reservation cursor is not here: it is the queue struct's `pc`, which NCCL's device code reserves from too.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct EndpointExt {
    /// Written by the host before the first kernel, then constant.
    pub cold: EndpointCold,
    /// Written by posters.
    pub hot: EndpointHot,
}
assert_layout!(EndpointExt, size 256, align 128, { cold @ 0, hot @ 128 });

/// The constant half of an [`EndpointExt`].
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy)]
pub struct EndpointCold {
    /// The NCCL-visible half.
    pub handle: *mut crate::device::EndpointHandle,
    /// `efa_cuda_qp` or `efa_cuda_qp_v1`; the send queue's ring struct lies at the same offset in both.
    pub qp: *mut core::ffi::c_void,
    /// Send queue ring.
    pub sq_buf: *mut u8,
    /// Send queue doorbell.
    pub sq_db: *mut u32,
    /// The card's completion counter, wraps at 2^31.
    pub completed: *const u64,
    /// The card's error counter, or null.
    pub errors: *const u64,
    /// First value slot of this endpoint, or 0.
    pub value_base: u64,
    /// Ring entries less one.
    pub sq_mask: u32,
    /// log2 of the ring entries.
    pub sq_shift: u32,
    /// Work requests that may be outstanding at once.
    pub sq_size: u32,
    /// Work requests that may be written and not yet rung.
    pub max_batch: u32,
    /// Value slots of this endpoint; a power of two, or 0 where values travel inline or not at all.
    pub value_slots: u32,
    /// Local key of the value slot pool.
    pub value_lkey: u32,
    /// Bytes from one value slot to the next.
    pub value_stride: u32,
    /// Bytes of one work request: 64 or 128.
    pub wqe_size: u16,
    /// Bytes that a write may carry inline: 0 where it cannot.
    pub write_inline: u16,
    /// What is subtracted from the completion counter: 0 where the cursors begin at the counter's first value.
    pub completed_base: u64,
    /// What the error counter held before the first post.
    pub errors_base: u64,
    /// Zero.
    pub reserved: [u64; 3],
}
assert_layout!(EndpointCold, size 128, align 128, {
    handle @ 0, qp @ 8, sq_buf @ 16, sq_db @ 24, completed @ 32, errors @ 40, value_base @ 48, sq_mask @ 56,
    sq_shift @ 60, sq_size @ 64, max_batch @ 68, value_slots @ 72, value_lkey @ 76, value_stride @ 80, wqe_size @ 84,
    write_inline @ 86, completed_base @ 88, errors_base @ 96, reserved @ 104,
});

/// Where the `combining` policy keeps its 26-bit rung count in [`EndpointHot::state`].
pub const STATE_RUNG_SHIFT: u32 = 38;

/// The changing half of an [`EndpointExt`]. All zero at first, unless the card's counter does not begin at 0: then every
/// cursor begins where the counter does, for posts are compared with completions modulo 2^31.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct EndpointHot {
    /// Posting state of the `combining` policy: see `ferrogin-device`.
    pub state: AtomicU64,
    /// Flush barrier of the `locked` policy: posts from this index on wait until all before it have completed.
    pub barrier: AtomicU32,
    /// Not 0 when a reservation was given up: nothing may be posted any more.
    pub poison: AtomicU32,
    /// Zero.
    pub reserved: [u64; 14],
}
assert_layout!(EndpointHot, size 128, align 128, { state @ 0, barrier @ 8, poison @ 12, reserved @ 16 });
