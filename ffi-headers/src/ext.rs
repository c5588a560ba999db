//! ferrogin's own device state, which lies beside the structs that NCCL sees.
//!
//! `createContext` allocates one block: a [`HandleHeader`], and directly behind it the array of
//! [`DevHandle`](crate::device::DevHandle)s. `ncclNetDeviceHandle->handle` points at the array, so NCCL's device code
//! never sees the header, and ours finds it `size_of::<HandleHeader>()` bytes before. The header leads to one
//! [`ContextExt`] for each context and from there to one [`EndpointExt`] for each endpoint.

use crate::assert_layout;
use core::ffi::c_void;
use core::mem::size_of;
use core::sync::atomic::{AtomicU32, AtomicU64};

/// `HandleHeader::magic`.
pub const HEADER_MAGIC: u64 = u64::from_le_bytes(*b"ferrogin");
/// `HandleHeader::version`: raised whenever a struct of this module changes.
pub const HEADER_VERSION: u32 = 4;

/// Lets a software card work in the calling CPU thread for a moment; its argument is [`ContextExt::progress_arg`]. Returns
/// false when the call did nothing because the card has a processor of its own. It returns soon, any number of threads may
/// call it at once, and it does not unwind.
pub type ProgressFn = unsafe extern "C" fn(arg: *mut c_void) -> bool;

/// Posting policy: posters reserve, write and mark in parallel; one of them rings for all ready requests.
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
    /// A word that ends every wait of these contexts when it is not 0; the host writes it to abort.
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

/// One GIN context, as ferrogin's kernels use it: the fields that every post reads, then the others.
///
/// `endpoints` is ordered: data, value, then one for each counter, then one for each signal. Some numbers are also in the
/// struct that NCCL sees; they are repeated here so that a post reads one cache line.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy)]
pub struct ContextExt {
    /// `[n_endpoints]`.
    pub endpoints: *mut EndpointExt,
    /// The value endpoint: `endpoints` plus one.
    pub values: *mut EndpointExt,
    /// `[slot * nranks + peer]`; all zero where a peer has no such target.
    pub targets: *const TargetWords,
    /// Ranks of the communicator.
    pub nranks: u32,
    /// Target slots in `targets`: 1 + the greatest number of signals on any rank.
    pub n_slots: u32,
    /// Counters of this context.
    pub n_counters: u32,
    /// Signals of this context.
    pub n_signals: u32,
    /// Longest put or get that takes the fast path: `max_rdma_size`, or 0 with the `locked` policy, which has no fast path.
    pub fast_put_limit: u64,
    /// Index into a window's array of per-rail memory handles.
    pub rail_id: u32,
    /// Local key of the scratch buffer.
    pub scratch_lkey: u32,
    /// Same as [`HandleHeader::policy`].
    pub policy: u32,
    /// [`EndpointConfig::value_path`] of the value endpoint.
    pub value_path: u32,
    /// Scratch buffer: source of writes that carry no bytes.
    pub scratch_local_addr: u64,
    /// The device handle, which NCCL sees.
    pub dev: *mut crate::device::DevHandle,
    /// `2 + n_counters + n_signals`.
    pub n_endpoints: u32,
    /// Largest transfer of one work request, bytes.
    pub max_rdma_size: u32,
    /// Same word as [`HandleHeader::abort_flag`].
    pub abort_flag: *mut u32,
    /// Nanoseconds after which a wait of the device API gives up; 0 is never. Kernels may change the word.
    pub timeout_ns: *mut u64,
    /// The function that a CPU thread calls in each round of a wait on this context. Null on a GPU, and where the provider makes
    /// progress by itself. It may be called until the context is destroyed.
    pub progress: Option<ProgressFn>,
    /// The argument of `progress`.
    pub progress_arg: *mut c_void,
    /// The set of endpoints that a flush looks at: the summary words of [`used_words`], then the leaf words. Zero at first.
    pub used: *mut u64,
}
assert_layout!(ContextExt, size 128, align 128, {
    endpoints @ 0, values @ 8, targets @ 16, nranks @ 24, n_slots @ 28, n_counters @ 32, n_signals @ 36, fast_put_limit @ 40,
    rail_id @ 48, scratch_lkey @ 52, policy @ 56, value_path @ 60, scratch_local_addr @ 64, dev @ 72, n_endpoints @ 80,
    max_rdma_size @ 84, abort_flag @ 88, timeout_ns @ 96, progress @ 104, progress_arg @ 112, used @ 120,
});

/// Bits of one word of [`ContextExt::used`]: its low half. The high half counts insertions.
pub const USED_BITS: u32 = 32;

/// Summary words and leaf words of [`ContextExt::used`].
#[inline(always)]
pub const fn used_words(n_endpoints: u32) -> (usize, usize) {
    let leaves = n_endpoints.div_ceil(USED_BITS);
    (leaves.div_ceil(USED_BITS) as usize, leaves as usize)
}

/// The address of a work request: three numbers.
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

/// What the work requests to one [`Target`] have in common, in the form that a post copies: the fields of
/// `efa_dp_direct::wqe::words::WqeTemplate`. All zero where a peer has no such target.
#[repr(C, align(16))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TargetWords {
    /// First word of a write of one buffer, in phase 0; its request id is the peer's rank.
    pub head: u64,
    /// Upper half of the second word.
    pub second: u32,
    /// Lower half of the third word.
    pub third: u32,
}
assert_layout!(TargetWords, size 16, align 16, { head @ 0, second @ 8, third @ 12 });

/// One endpoint, as ferrogin's kernels use it: the fields that a post reads and those that it writes, on separate cache lines.
///
/// The reservation cursor is the queue struct's `pc`, because NCCL's device code reserves from it too.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct EndpointExt {
    /// Written by the host before the first kernel, then constant.
    pub config: EndpointConfig,
    /// Written by posters.
    pub posting: PostingState,
    /// The queue pair that NCCL sees, which [`EndpointHandle::qp`](crate::device::EndpointHandle::qp) points at.
    pub queue: QueueMemory,
}
assert_layout!(EndpointExt, size 384, align 128, { config @ 0, posting @ 128, queue @ 192 });

/// Room for `efa_cuda_qp` or `efa_cuda_qp_v1`. ferrogin's and NCCL's posts change its cursors.
#[repr(C, align(8))]
#[derive(Debug)]
pub struct QueueMemory(pub [AtomicU64; 18]);
const _: () = assert!(size_of::<QueueMemory>() == 144);

/// [`EndpointConfig::value_path`]: no fast path. The policy has none, or the endpoint takes no values.
pub const VALUE_NONE: u32 = 0;
/// [`EndpointConfig::value_path`]: values travel through the slot pool.
pub const VALUE_POOL: u32 = 1;
/// [`EndpointConfig::value_path`]: values travel inline.
pub const VALUE_INLINE: u32 = 2;

/// Bytes from one value slot to the next.
pub const VALUE_STRIDE: u32 = 8;

/// The constant half of an [`EndpointExt`]: fields that every post reads, then those that waits and values need.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy)]
pub struct EndpointConfig {
    /// The endpoint handle, which NCCL sees.
    pub handle: *mut crate::device::EndpointHandle,
    /// Send queue ring.
    pub sq_buf: *mut u8,
    /// Send queue doorbell.
    pub sq_db: *mut u32,
    /// Bytes of the ring less one; the ring has a power of two of them.
    pub ring_mask: u32,
    /// Bytes of one work request: 64 or 128.
    pub wqe_size: u32,
    /// Entries of the ring. As a mask it selects the bit of a request's number that is its phase.
    pub phase_bit: u32,
    /// The factor that turns `phase_bit` into the phase bit of a request's first word.
    pub phase_scale: u32,
    /// First value slot of this endpoint, or 0.
    pub value_base: u64,
    /// Value slots less one.
    pub value_mask: u32,
    /// Local key of the value slot pool.
    pub value_lkey: u32,
    /// One of [`VALUE_NONE`], [`VALUE_POOL`], [`VALUE_INLINE`].
    pub value_path: u32,
    /// Value slots of this endpoint; a power of two, or 0 where values travel inline or not at all.
    pub value_slots: u32,
    /// Work requests that may be outstanding at once.
    pub sq_size: u32,
    /// Work requests that may be written and not yet rung.
    pub max_batch: u32,
    /// The card's completion counter, wraps at 2^31. The cursors begin at its first value.
    pub completed: *const u64,
    /// The card's error counter, or null.
    pub errors: *const u64,
    /// The error counter's value before the first post.
    pub errors_base: u64,
    /// Bytes that a write may carry inline; 0 without inline writes.
    pub write_inline: u32,
    /// The number of this endpoint in its context.
    pub index: u32,
    /// The context of this endpoint.
    pub context: *const ContextExt,
    /// Zero.
    pub reserved: u64,
}
assert_layout!(EndpointConfig, size 128, align 128, {
    handle @ 0, sq_buf @ 8, sq_db @ 16, ring_mask @ 24, wqe_size @ 28, phase_bit @ 32, phase_scale @ 36,
    value_base @ 40, value_mask @ 48, value_lkey @ 52, value_path @ 56, value_slots @ 60, sq_size @ 64, max_batch @ 68,
    completed @ 72, errors @ 80, errors_base @ 88, write_inline @ 96, index @ 100, context @ 104,
    reserved @ 112,
});

/// The lowest bit of the `combining` policy's rung count in [`PostingState::state`].
pub const STATE_RUNG_SHIFT: u32 = 32;

/// The changing part of an [`EndpointExt`]. Every cursor begins at the card's counter, which is 0 on hardware, because posts are
/// compared with completions modulo 2^31.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct PostingState {
    /// Posting state of the `combining` policy: see `ferrogin-device`.
    pub state: AtomicU64,
    /// `combining`: posts up to this number are admitted, as long as the flush barrier is the one beside it. It begins with
    /// the barrier one lower than the first, so that the first post inserts its endpoint into [`ContextExt::used`].
    pub bound: AtomicU64,
    /// Flush barrier of the `locked` policy: posts from this index on wait until all before it have completed.
    pub barrier: AtomicU32,
    /// Not 0 after a reservation was given up; every later post fails.
    pub poison: AtomicU32,
    /// `locked`: not 0 while the endpoint is in [`ContextExt::used`].
    pub used: AtomicU32,
    /// Zero.
    pub reserved: [u32; 9],
}
assert_layout!(PostingState, size 64, align 64, { state @ 0, bound @ 8, barrier @ 16, poison @ 20, used @ 24, reserved @ 28 });
