//! The device handles that NCCL's EFA device code and ferrogin's kernels read.
//!
//! Source: `nccl_device/gin/efa_gda/gin_efa_gda_dev.h`, identical in NCCL 2.31.2 and 2.32.3. All pointers are
//! device addresses. Tables are indexed `[slot * nranks + peer]`: slot 0 is the peer's data endpoint, slot `1 + s`
//! its endpoint for signal `s`. The entry is 0 where the peer has no such endpoint.

use crate::assert_layout;
use core::ffi::c_void;

/// `nccl_ofi_gin_gdaki_dev_endpoint_handle`: one queue pair that kernels post on.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct EndpointHandle {
    /// `efa_cuda_qp` (backend version 0 or 1) or `efa_cuda_qp_v1` (backend version 2).
    pub qp: *mut c_void,
    /// `efa_cuda_cq`.
    pub cq: *mut c_void,
    /// Address handle numbers, `[slots * nranks]`.
    pub target_address_handles: *mut u16,
    /// Remote queue pair numbers, `[slots * nranks]`.
    pub target_remote_qpns: *mut u16,
    /// Remote queue keys, `[slots * nranks]`.
    pub target_qkey: *mut u32,
    /// Spin lock that posters hold for a whole post; 0 while it's free.
    pub sq_lock: u32,
    /// The card's completion counter for this queue pair; it wraps at 2^31.
    pub local_cntr_value: *mut u64,
    /// Work requests whose doorbell has been rung.
    pub submitted_count: u64,
    /// Work requests that may be outstanding at once.
    pub sq_size: u32,
    /// Padding.
    pub putvalue_pad: u32,
    /// First byte of this endpoint's slice of the value slot pool, or 0.
    pub putvalue_slice_base: u64,
}
assert_layout!(EndpointHandle, size 80, align 8, {
    qp @ 0, cq @ 8, target_address_handles @ 16, target_remote_qpns @ 24, target_qkey @ 32, sq_lock @ 40,
    local_cntr_value @ 48, submitted_count @ 56, sq_size @ 64, putvalue_pad @ 68, putvalue_slice_base @ 72,
});

/// `nccl_ofi_gin_gdaki_dev_counter_handle`: an endpoint and the counter that users read through it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CounterHandle {
    /// The endpoint that posts puts naming this counter, or that receives this signal.
    pub base: EndpointHandle,
    /// The card's counter: completed writes (counter) or received writes (signal).
    pub cntr_value: *mut u64,
    /// What reads and waits subtract. A reset changes this, because only the card writes the counter.
    pub cntr_offset: u64,
}
assert_layout!(CounterHandle, size 96, align 8, { base @ 0, cntr_value @ 80, cntr_offset @ 88 });

/// `nccl_ofi_gin_gdaki_dev_handle`: one GIN context; `ncclNetDeviceHandle->handle` points to an array of them.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DevHandle {
    /// Endpoint for puts, gets and signals that name no counter.
    pub data: EndpointHandle,
    /// Endpoint for values.
    pub pvdata: EndpointHandle,
    /// `[n_counters]`, or null.
    pub counter_handles: *mut *mut CounterHandle,
    /// `[n_signals]`, or null.
    pub signal_handles: *mut *mut CounterHandle,
    /// Counters of this context.
    pub n_counters: i32,
    /// Signals of this context.
    pub n_signals: i32,
    /// Ranks of the communicator.
    pub nranks: i32,
    /// This rank.
    pub rank: i32,
    /// Index into a window's array of per-rail memory handles.
    pub rail_id: u32,
    /// Local key of the scratch buffer.
    pub scratch_lkey: u32,
    /// Padding for NCCL. ferrogin's backend for NCCL's device API sets it to 1 while requests may have left doorbells
    /// to a later one.
    pub scratch_pad: u32,
    /// Scratch buffer: source of writes that carry no bytes.
    pub scratch_local_addr: u64,
    /// Peers' scratch addresses, `[nranks]`.
    pub scratch_remote_addrs: *mut u64,
    /// Peers' scratch keys, `[nranks]`.
    pub scratch_remote_rkeys: *mut u32,
    /// Local key of the value slot pool.
    pub putvalue_lkey: u32,
    /// Bytes from one value slot to the next.
    pub putvalue_slot_size: u32,
}
assert_layout!(DevHandle, size 240, align 8, {
    data @ 0, pvdata @ 80, counter_handles @ 160, signal_handles @ 168, n_counters @ 176, n_signals @ 180,
    nranks @ 184, rank @ 188, rail_id @ 192, scratch_lkey @ 196, scratch_pad @ 200, scratch_local_addr @ 208,
    scratch_remote_addrs @ 216, scratch_remote_rkeys @ 224, putvalue_lkey @ 232, putvalue_slot_size @ 236,
});

/// `nccl_ofi_gin_gdaki_mr_peer`: a peer's part of a window.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MrPeer {
    /// Address of the window's first byte, as the peer's card knows it.
    pub remote_addr: u64,
    /// The peer's remote key.
    pub rkey: u32,
    /// Padding.
    pub pad: u32,
}
assert_layout!(MrPeer, size 16, align 8, { remote_addr @ 0, rkey @ 8, pad @ 12 });

/// `nccl_ofi_gin_gdaki_mr_handle`: a window on one rail. `nranks` entries of [`MrPeer`] follow.
///
/// A kernel's `ncclGinWindow_t` is the address of an array of pointers to these, one per rail. They follow the array:
/// [`window_handle_offset`](crate::ext::window_handle_offset).
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MrHandle {
    /// Local key.
    pub lkey: u32,
    /// Entries in `peers`.
    pub nranks: i32,
    /// Address of the window's first byte on this rank.
    pub local_addr: u64,
    /// Flexible array.
    pub peers: [MrPeer; 0],
}
assert_layout!(MrHandle, size 16, align 8, { lkey @ 0, nranks @ 4, local_addr @ 8, peers @ 16 });
