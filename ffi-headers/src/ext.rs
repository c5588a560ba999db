//! ferrogin's own device state, next to the structs that NCCL sees.
//!
//! `createContext` allocates one block: a [`HandleHeader`], directly followed by the array of
//! [`DevHandle`](crate::device::DevHandle)s. `ncclNetDeviceHandle->handle` points to the array, so NCCL's device code
//! never sees the header, and ours finds it `size_of::<HandleHeader>()` bytes before. The header points to one
//! [`ContextExt`] per context, and each of those to one [`EndpointExt`] per endpoint.

use crate::assert_layout;
use crate::device::{MrHandle, MrPeer};
use core::ffi::c_void;
use core::mem::size_of;
use core::sync::atomic::{AtomicU32, AtomicU64};

/// `HandleHeader::magic`.
pub const HEADER_MAGIC: u64 = u64::from_le_bytes(*b"ferrogin");
/// `HandleHeader::version`: raised whenever a struct in this module changes.
pub const HEADER_VERSION: u32 = 10;

/// Runs a software card in the calling CPU thread for a moment; its argument is [`ContextExt::progress_arg`]. Returns
/// false if the call did nothing because the card has a CPU core to itself. It returns soon, any number of threads may
/// call it at once, and it doesn't unwind.
pub type ProgressFn = unsafe extern "C" fn(arg: *mut c_void) -> bool;

/// Posting policy: posters reserve, write and mark in parallel, and one of them rings for all ready requests.
pub const POLICY_COMBINING: u32 = 0;
/// Posting policy: the whole post runs under the endpoint's `sq_lock`.
pub const POLICY_LOCKED: u32 = 1;

/// The host's word to all waits: a failure has ended the context.
pub const STOP_ABORT: u32 = 1;
/// The host's word to all waits: a rank is lost, and the program hasn't acknowledged that. Posts go on. The number of
/// `FGIN_PEER_LOST`.
pub const STOP_LOST: u32 = 7;

/// The header directly before the array of device handles.
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
    /// A nonzero word ends every wait on these contexts; the host writes it: [`STOP_ABORT`] or [`STOP_LOST`].
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

/// What a post reads from its context, in 16-byte loads that are issued together.
///
/// `endpoints` holds data, value, then one per counter, then one per signal. Some fields repeat those of the struct
/// that NCCL sees, so that a post reads a single cache line.
#[repr(C, align(16))]
#[derive(Debug, Clone, Copy)]
pub struct Routes {
    /// `[n_endpoints]`.
    pub endpoints: *mut EndpointExt,
    /// `[slot * nranks + peer]`; all zero where a peer has no such target. Fewer than [`MAX_TARGETS`] entries.
    pub targets: *const TargetWords,
    /// Ranks of the communicator.
    pub nranks: u32,
    /// The largest number of signals on any rank, which is also the last target slot.
    pub last_slot: u32,
    /// Counters of this context.
    pub n_counters: u32,
    /// Signals of this context.
    pub n_signals: u32,
    /// Longest put or get that takes the fast path: `max_rdma_size`, or 0 with the `locked` policy, which has no fast
    /// path.
    pub fast_put_limit: u64,
    /// Bytes from a window to its peer entries on the context's rail; they follow the handle at
    /// [`window_handle_offset`].
    pub window_peers: u64,
    /// Scratch memory of this rank and its peers, laid out like a window's handle: source and target of empty writes.
    pub scratch: *const MrHandle,
    /// The device handle that NCCL sees.
    pub dev: *mut crate::device::DevHandle,
}
assert_layout!(Routes, size 64, align 16, {
    endpoints @ 0, targets @ 8, nranks @ 16, last_slot @ 20, n_counters @ 24, n_signals @ 28, fast_put_limit @ 32,
    window_peers @ 40, scratch @ 48, dev @ 56,
});

/// An exclusive limit on a context's targets; a table of this size would take 1 GiB.
pub const MAX_TARGETS: usize = 1 << 26;

/// Returns the bytes from a window to its [`MrHandle`] on a rail. A window is the address of an array of `rails`
/// pointers, and the handles follow it, so a post can compute the address that NCCL's device code loads from the array.
pub const fn window_handle_offset(rails: usize, rail: usize, nranks: usize) -> usize {
    let array = (rails * size_of::<*const MrHandle>()).next_multiple_of(16);
    array + rail * (size_of::<MrHandle>() + nranks * size_of::<MrPeer>())
}

/// One GIN context, as ferrogin's kernels see it.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy)]
pub struct ContextExt {
    /// What every post reads.
    pub routes: Routes,
    /// Same as [`HandleHeader::policy`].
    pub policy: u32,
    /// `2 + n_counters + n_signals`.
    pub n_endpoints: u32,
    /// Largest transfer of one work request, bytes.
    pub max_rdma_size: u32,
    /// Bytes from the abort flag to the address of the first failure's [`Record`](crate::failure::Record), which is
    /// initially 0: the flag is in the kernels' memory, and the record in the host's. An offset of 0: no record.
    pub failure_offset: u32,
    /// Same word as [`HandleHeader::abort_flag`].
    pub abort_flag: *mut u32,
    /// Nanoseconds after which a device API wait gives up; 0 means never. Kernels may change the word.
    pub timeout_ns: *mut u64,
    /// The function that a CPU thread calls in each round of a wait on this context, until the context is destroyed.
    /// Null on a GPU, and where the provider makes progress by itself.
    pub progress: Option<ProgressFn>,
    /// The argument of `progress`.
    pub progress_arg: *mut c_void,
    /// The set of endpoints that a flush visits: the summary words, then the leaf words ([`used_words`]). Initially
    /// zero.
    pub used: *mut u64,
    /// Null where the card counts signals.
    pub emulated: *const EmulatedSignals,
}
assert_layout!(ContextExt, size 128, align 128, {
    routes @ 0, policy @ 64, n_endpoints @ 68, max_rdma_size @ 72, failure_offset @ 76, abort_flag @ 80, timeout_ns @ 88,
    progress @ 96, progress_arg @ 104, used @ 112, emulated @ 120,
});

/// A context's emulated signals: words of memory to which the receiver's signal proxy adds. The context then has no
/// signal endpoints: [`Routes::n_signals`] and [`Routes::last_slot`] are 0, and all requests go to the peer's inbox, a
/// receive-only queue pair.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
pub struct EmulatedSignals {
    /// `[n_signals]` of this rank. The signal proxy adds to them; the owner stores to them to reset.
    pub words: *mut u64,
    /// `[nranks]`.
    pub peers: *const EmulatedPeer,
    /// Indexed signals of this rank's context.
    pub n_signals: u32,
    /// This rank.
    pub rank: u32,
    /// Zero.
    pub reserved: [u64; 5],
}
assert_layout!(EmulatedSignals, size 64, align 64, { words @ 0, peers @ 8, n_signals @ 16, rank @ 20, reserved @ 24 });

/// What a sender of emulated signals knows about a peer.
#[repr(C, align(8))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EmulatedPeer {
    /// Indexed signals of the peer's context; valid ids are below this.
    pub n_signals: u32,
    /// The number of the peer's context, modulo 2^16.
    pub generation: u32,
}
assert_layout!(EmulatedPeer, size 8, align 8, { n_signals @ 0, generation @ 4 });

/// Usable bits per word of [`ContextExt::used`]: the low half. The high half counts insertions.
pub const USED_BITS: u32 = 32;

/// Returns how many summary words and leaf words [`ContextExt::used`] has.
#[inline(always)]
pub const fn used_words(n_endpoints: u32) -> (usize, usize) {
    let leaves = n_endpoints.div_ceil(USED_BITS);
    (leaves.div_ceil(USED_BITS) as usize, leaves as usize)
}

/// Where a work request goes: three numbers.
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

/// The template that a post to one [`Target`] copies: the fields of `efa_dp_direct::wqe::words::WqeTemplate`. All zero
/// where a peer has no such target.
#[repr(C, align(16))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TargetWords {
    /// First word of a write of one buffer, in phase 0; its request id is the peer's rank, with [`RANK_ID`] if the
    /// context isolates peers.
    pub head: u64,
    /// Upper half of the second word.
    pub second: u32,
    /// Lower half of the third word.
    pub third: u32,
}
assert_layout!(TargetWords, size 16, align 16, { head @ 0, second @ 8, third @ 12 });

/// The bit of a request's id that marks the rest of it as the peer's rank. In a context that isolates peers, this
/// device code's requests have it. NCCL's device code uses the number of a thread, of which a block has fewer.
pub const RANK_ID: u16 = 1 << 15;

/// The bit of [`TargetWords::head`] that the host sets once the peer is lost, in a context that isolates peers.
pub const LOST_TARGET: u64 = 1 << 63;

/// One endpoint, as ferrogin's kernels see it: what a post reads and what it writes are on separate cache lines.
///
/// The reservation cursor is the queue struct's `pc`, because NCCL's device code reserves from it too.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct EndpointExt {
    /// Written by the host before the first kernel, then constant.
    pub config: EndpointConfig,
    /// Written by posters.
    pub posting: PostingState,
    /// The queue pair that NCCL sees; [`EndpointHandle::qp`](crate::device::EndpointHandle::qp) points to it.
    pub queue: QueueMemory,
}
assert_layout!(EndpointExt, size 384, align 128, { config @ 0, posting @ 128, queue @ 192 });

/// Room for `efa_cuda_qp` or `efa_cuda_qp_v1`. ferrogin's and NCCL's posts change its cursors.
#[repr(C, align(8))]
#[derive(Debug)]
pub struct QueueMemory(pub [AtomicU64; 18]);
const _: () = assert!(size_of::<QueueMemory>() == 144);

/// [`ValueConfig::path`]: no fast path, because the policy has none or the endpoint takes no values.
pub const VALUE_NONE: u32 = 0;
/// [`ValueConfig::path`]: values travel through the slot pool.
pub const VALUE_POOL: u32 = 1;
/// [`ValueConfig::path`]: values travel inline.
pub const VALUE_INLINE: u32 = 2;

/// Bytes from one value slot to the next.
pub const VALUE_STRIDE: u32 = 8;

/// What every post on an endpoint reads, in 16-byte loads that are issued together.
#[repr(C, align(16))]
#[derive(Debug, Clone, Copy)]
pub struct RingConfig {
    /// Send queue ring.
    pub sq_buf: *mut u8,
    /// Send queue doorbell.
    pub sq_db: *mut u32,
    /// The ring's size in bytes, a power of two, minus one.
    pub ring_mask: u32,
    /// Size of a work request in bytes: 64 or 128.
    pub wqe_size: u32,
    /// Entries in the ring. As a mask, it selects the phase bit of a request's number.
    pub phase_bit: u32,
    /// The factor that turns `phase_bit` into the phase bit of a request's first word.
    pub phase_scale: u32,
    /// [`EndpointHandle::submitted_count`](crate::device::EndpointHandle::submitted_count) of `handle`.
    pub submitted: *mut u64,
    /// First value slot of this endpoint, or 0.
    pub value_base: u64,
}
assert_layout!(RingConfig, size 48, align 16, {
    sq_buf @ 0, sq_db @ 8, ring_mask @ 16, wqe_size @ 20, phase_bit @ 24, phase_scale @ 28, submitted @ 32, value_base @ 40,
});

/// What a post of a value reads in addition.
#[repr(C, align(16))]
#[derive(Debug, Clone, Copy)]
pub struct ValueConfig {
    /// Mask for the offsets of value slots: [`VALUE_STRIDE`] times (`slots` - 1).
    pub mask: u32,
    /// Local key of the value slot pool.
    pub lkey: u32,
    /// One of [`VALUE_NONE`], [`VALUE_POOL`], [`VALUE_INLINE`].
    pub path: u32,
    /// Value slots of this endpoint; a power of two, or 0 where values travel inline or not at all.
    pub slots: u32,
}
assert_layout!(ValueConfig, size 16, align 16, { mask @ 0, lkey @ 4, path @ 8, slots @ 12 });

/// The constant half of an [`EndpointExt`]: fields that every post reads, then those that waits need.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy)]
pub struct EndpointConfig {
    /// What every post reads.
    pub ring: RingConfig,
    /// What posts of values read.
    pub values: ValueConfig,
    /// The endpoint handle that NCCL sees.
    pub handle: *mut crate::device::EndpointHandle,
    /// Work requests that may be outstanding at once.
    pub sq_size: u32,
    /// Work requests that may be written before the doorbell is rung.
    pub max_batch: u32,
    /// The card's completion counter, which wraps at 2^31. The cursors start at its initial value.
    pub completed: *const u64,
    /// The card's error counter.
    pub errors: *const u64,
    /// The error counter's value before the first post.
    pub errors_base: u64,
    /// Bytes that a write may carry inline; 0 if the card has no inline writes.
    pub write_inline: u32,
    /// This endpoint's index in its context.
    pub index: u32,
    /// This endpoint's context.
    pub context: *const ContextExt,
    /// Zero.
    pub reserved: u64,
}
assert_layout!(EndpointConfig, size 128, align 128, {
    ring @ 0, values @ 48, handle @ 64, sq_size @ 72, max_batch @ 76, completed @ 80, errors @ 88, errors_base @ 96,
    write_inline @ 104, index @ 108, context @ 112, reserved @ 120,
});

/// The lowest bit of the `combining` policy's rung count in [`PostingState::state`].
pub const STATE_RUNG_SHIFT: u32 = 32;

/// The mutable part of an [`EndpointExt`]. Every cursor starts at the card's counter (0 on hardware), because posts are
/// compared with completions modulo 2^31.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct PostingState {
    /// Posting state of the `combining` policy: see `ferrogin-device-kernels`.
    pub state: AtomicU64,
    /// `combining`: posts up to this number are admitted while the flush barrier equals the one stored with it. That
    /// starts one below the first barrier, so that the first post inserts its endpoint into [`ContextExt::used`].
    pub bound: AtomicU64,
    /// Flush barrier of the `locked` policy: posts from this index on wait until all earlier ones have completed.
    pub barrier: AtomicU32,
    /// Nonzero once a reservation has been abandoned; every later post fails.
    pub poison: AtomicU32,
    /// `locked`: nonzero while the endpoint is in [`ContextExt::used`].
    pub used: AtomicU32,
    /// Zero.
    pub zero: u32,
    /// The host's [`Losses::acknowledged`].
    pub acknowledged: AtomicU32,
    /// The host's [`Losses::identified`].
    pub identified: AtomicU32,
    /// Zero.
    pub reserved: [u32; 6],
}
assert_layout!(PostingState, size 64, align 64, {
    state @ 0, bound @ 8, barrier @ 16, poison @ 20, used @ 24, zero @ 28, acknowledged @ 32, identified @ 36,
    reserved @ 40,
});

/// What the host says of an endpoint's failed requests, which are counted modulo 2^31 like everything that a card
/// counts. Each half is read on its own. In a context that doesn't isolate peers, both are 0, and any failure ends the
/// waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C, align(8))]
pub struct Losses {
    /// How many failures the program has acknowledged, with [`Losses::ISOLATES`].
    pub acknowledged: u32,
    /// Of how many the host has identified the peers as lost, with [`Losses::ISOLATES`].
    pub identified: u32,
}
assert_layout!(Losses, size 8, align 8, { acknowledged @ 0, identified @ 4 });

impl Losses {
    /// The bit of both halves in a context that isolates peers.
    pub const ISOLATES: u32 = 1 << 31;

    /// Describes an endpoint of a context that isolates peers.
    pub const fn new(identified: u32, acknowledged: u32) -> Self {
        Self { acknowledged: acknowledged | Self::ISOLATES, identified: identified | Self::ISOLATES }
    }
}
