//! One endpoint: the queue an operation is posted on.
//!
//! The card, NCCL's device code and other threads also use the ring, doorbell, counters and cursors. Only this file
//! accesses them, through raw pointers and atomics.

use crate::action::{Flags, Sharing};
use crate::constant;
use crate::post::flush;
use crate::post::locked::{self, LockedQueue};
use crate::post::outcome::Outcome;
use crate::post::used::UsedSet;
use crate::post::{COUNT_MASK, Queue, combining, exclusive};
use crate::status::Status;
use crate::sync::{AtomicU32, AtomicU64, LoadExternal, Ordering};
use crate::wait::Limit;
use core::borrow::Borrow;
use core::mem::offset_of;
use core::slice;
use efa_dp_direct::arch;
use efa_dp_direct::queue::{SQ_WQ_OFFSET, WqV0};
use efa_dp_direct::sq;
pub use efa_dp_direct::wqe::RemoteMem as Remote;
pub use efa_dp_direct::wqe::Sge;
use efa_dp_direct::wqe::words::{self, NARROW, ValueSize, WIDE, WqeTemplate};
use ferrogin_ffi::device::EndpointHandle;
use ferrogin_ffi::ext::{
    ContextExt, EndpointConfig, EndpointExt, POLICY_LOCKED, RingConfig, VALUE_INLINE, VALUE_POOL, VALUE_STRIDE,
    ValueConfig, used_words,
};

/// A work request whose number the policy chooses.
#[derive(Clone, Copy)]
pub struct Wqe {
    /// The part that doesn't depend on the number; the second half of a wide request is zeros.
    words: [u64; NARROW],
    /// The value, if it travels through a slot of the pool.
    pooled: Option<Pooled>,
}

/// A value, and the mask for offsets of its endpoint's slots.
#[derive(Clone, Copy)]
struct Pooled {
    value: u64,
    mask: u32,
}

impl Wqe {
    /// Creates a work request.
    #[inline(always)]
    pub const fn new(words: [u64; NARROW]) -> Self {
        Wqe { words, pooled: None }
    }

    /// Creates a write of the low bytes of `value`, inline or through its slot of the pool.
    #[inline(always)]
    pub fn value(template: WqeTemplate, remote: Remote, value: u64, size: ValueSize, values: ValueConfig) -> Self {
        if values.path == VALUE_INLINE {
            return Wqe::new(template.write_value(remote, value, size));
        }
        let slot = Sge { addr: 0, lkey: values.lkey, length: size.bytes() };
        Wqe { words: template.write(remote, slot), pooled: Some(Pooled { value, mask: values.mask }) }
    }

    /// Returns the same request with immediate data.
    pub const fn with_imm(self, imm: u32) -> Self {
        Wqe { words: words::with_imm(self.words, imm), ..self }
    }
}

/// The part of an endpoint's configuration that a post reads, in memory or loaded for the post.
pub trait Ring: Borrow<RingConfig> + Copy {}
impl<R: Borrow<RingConfig> + Copy> Ring for R {}

/// One endpoint of a context.
#[derive(Clone, Copy)]
pub struct Endpoint<'a, R = &'a RingConfig> {
    ext: &'a EndpointExt,
    ring: R,
}

/// An endpoint whose configuration is loaded for one post.
pub type Poster<'a> = Endpoint<'a, RingConfig>;

impl<'a> Endpoint<'a> {
    /// Returns a view of the struct at `ext`.
    ///
    /// # Safety
    ///
    /// The host plugin filled the struct, and keeps it and everything it points to for `'a`.
    #[inline(always)]
    pub(crate) unsafe fn from_ptr(ext: *const EndpointExt) -> Self {
        // SAFETY: the caller vouches for the struct.
        let ext = unsafe { &*ext };
        Endpoint { ext, ring: &ext.config.ring }
    }

    /// Returns the endpoint with its configuration loaded for a post.
    #[inline(always)]
    pub fn poster(self) -> Poster<'a> {
        // SAFETY: the plugin keeps the configuration constant as long as the endpoint; its layout guarantees the
        // alignment.
        Endpoint { ext: self.ext, ring: unsafe { constant::load(&raw const self.ext.config.ring) } }
    }

    /// Returns this endpoint's context.
    #[inline(always)]
    pub fn context(&self) -> *const ContextExt {
        self.ext.config.context
    }

    /// Returns how values travel, under either policy, or `None` if the endpoint takes none.
    pub(crate) fn values(&self) -> Option<ValueConfig> {
        let EndpointConfig { ring, values, write_inline, .. } = &self.ext.config;
        let path = if *write_inline >= 8 { VALUE_INLINE } else { VALUE_POOL };
        (path == VALUE_INLINE || ring.value_base != 0).then_some(ValueConfig { path, ..*values })
    }

    /// Posts a work request under either policy.
    #[inline(never)]
    pub fn post(self, policy: u32, flags: Flags, limits: impl Limit, aggregate: bool, wqe: Wqe) -> Result<(), Status> {
        let place = |idx| self.place(wqe, idx);
        if policy == POLICY_LOCKED {
            locked::post(self, limits, aggregate, |idx| self.place_in_batch(self.numbered(wqe, idx)))
        } else if flags.mode() == Sharing::Thread {
            exclusive::post(self, limits, aggregate, place)
        } else {
            combining::post(self, limits, aggregate, place)
        }
    }

    /// Runs one round of a flush of this endpoint, which has to reach `at`: see [`flush::round`].
    pub fn flush_round(&self, policy: u32, reports_losses: bool, at: &mut Option<u32>) -> Outcome {
        flush::round(*self, policy == POLICY_LOCKED, reports_losses, at)
    }

    /// Waits until a flush of this endpoint has ended.
    #[inline(always)]
    pub fn flush(&self, policy: u32, at: Option<u32>, limits: impl Limit) -> Outcome {
        flush::flush(*self, policy == POLICY_LOCKED, at, limits)
    }

    /// Rings deferred posts on this endpoint, for a wait that depends on them. Fails if they can no longer complete.
    pub fn ring_deferred(&self, policy: u32, limits: impl Limit) -> Result<(), Status> {
        if self.has_failed() {
            return Err(Status::CardError);
        }
        if policy == POLICY_LOCKED { locked::ring_ready(*self, limits) } else { combining::ring_ready(*self) }
    }

    /// Writes a request into the last slot of the batch, where `start` made room.
    #[inline(always)]
    fn place_in_batch(&self, request: [u64; NARROW]) {
        let (wq, last) = (self.wq(), LockedQueue::pending(self).wrapping_sub(1));
        if self.ext.config.ring.wqe_size == 128 {
            let mut wide = [0; WIDE];
            wide[..NARROW].copy_from_slice(&request);
            // SAFETY: a live queue of 128-byte requests; this thread holds the lock and started this request.
            unsafe { sq::place(wq, last, wide) };
        } else {
            // SAFETY: a live queue of 64-byte requests; this thread holds the lock and started this request.
            unsafe { sq::place(wq, last, request) };
        }
    }
}

impl<'a, R: Ring> Endpoint<'a, R> {
    /// Returns the endpoint without the loaded configuration.
    #[inline(always)]
    pub fn endpoint(&self) -> Endpoint<'a> {
        Endpoint { ext: self.ext, ring: &self.ext.config.ring }
    }

    /// Returns how values travel on the fast path.
    #[inline(always)]
    pub(crate) fn fast_values(&self) -> ValueConfig {
        // SAFETY: the plugin keeps the configuration constant as long as the endpoint; its layout guarantees the
        // alignment.
        unsafe { constant::load(&raw const self.ext.config.values) }
    }

    /// Returns the struct's address.
    #[inline(always)]
    pub(crate) fn as_ptr(&self) -> *const EndpointExt {
        self.ext
    }

    #[inline(always)]
    fn wq(&self) -> *mut WqV0 {
        (&raw const self.ext.queue).cast_mut().wrapping_byte_add(SQ_WQ_OFFSET).cast()
    }

    #[inline(always)]
    fn atomic_u64(&self, at: *mut u64) -> &'a AtomicU64 {
        // SAFETY: the caller of `from_ptr` vouches that the structs behind the handle live for 'a. Callers of this
        // method pass an 8-aligned word of them (the layouts are asserted), which host and kernels access only
        // atomically while kernels run.
        unsafe { AtomicU64::from_ptr(at) }
    }

    #[inline(always)]
    fn atomic_u32(&self, at: *mut u32) -> &'a AtomicU32 {
        // SAFETY: the caller of `from_ptr` vouches that the structs behind the handle live for 'a. Callers of this
        // method pass a 4-aligned word of them (the layouts are asserted), which host and kernels access only
        // atomically while kernels run.
        unsafe { AtomicU32::from_ptr(at) }
    }

    #[inline(always)]
    fn wq_field(&self, offset: usize) -> &'a AtomicU32 {
        self.atomic_u32(self.wq().wrapping_byte_add(offset).cast())
    }

    /// Returns request `idx`, and puts its value, if any, into the value slot of that number.
    #[inline(always)]
    fn numbered(&self, wqe: Wqe, idx: u32) -> [u64; NARROW] {
        let mut words = wqe.words;
        if let Some(Pooled { value, mask }) = wqe.pooled {
            let addr = self.ring.borrow().value_base + u64::from(idx.wrapping_mul(VALUE_STRIDE) & mask);
            // The store covers the whole slot, whose other bytes are unused.
            self.atomic_u64(addr as *mut u64).store(value, Ordering::Relaxed);
            words[NARROW - 1] = addr;
        }
        words
    }

    /// Writes request `idx` into the ring, with its lap's phase.
    #[inline(always)]
    pub(crate) fn place(&self, wqe: Wqe, idx: u32) {
        let ring = self.ring.borrow();
        let phase = u64::from((idx & ring.phase_bit).wrapping_mul(ring.phase_scale));
        let offset = idx.wrapping_mul(ring.wqe_size) & ring.ring_mask;
        let slot = ring.sq_buf.wrapping_byte_add(offset as usize).cast::<u64>();
        let mut words = self.numbered(wqe, idx);
        words[0] |= phase;
        for (i, word) in words.into_iter().enumerate() {
            // SAFETY: the slot lies in the ring, which lives as long as the endpoint and is 8-aligned; the policy
            // admitted its number, so no other poster writes it and the card has fetched what it held.
            unsafe { arch::mmio_store_u64(slot.wrapping_add(i), word) };
        }
        if ring.wqe_size == 128 {
            const { assert!(NARROW == 8 && WIDE == 16) };
            // SAFETY: as above; the slot has 128 bytes.
            unsafe { arch::mmio_zero_second_half(slot) };
        }
    }
}

impl<R: Ring> Queue for Endpoint<'_, R> {
    #[inline(always)]
    fn completed(&self) -> u32 {
        self.atomic_u64(self.ext.config.completed.cast_mut()).load_external(Ordering::Acquire) as u32 & COUNT_MASK
    }

    #[inline(always)]
    fn has_failures(&self) -> bool {
        let errors = self.atomic_u64(self.ext.config.errors.cast_mut()).load_external(Ordering::Relaxed);
        // Modulo 2^32: on a GPU, comparing 64 bits takes two comparisons.
        errors as u32 != self.ext.config.errors_base as u32
    }

    #[inline(always)]
    fn failures(&self) -> u32 {
        let errors = self.atomic_u64(self.ext.config.errors.cast_mut()).load_external(Ordering::Acquire);
        (errors as u32).wrapping_sub(self.ext.config.errors_base as u32) & COUNT_MASK
    }

    #[inline(always)]
    fn acknowledged(&self) -> u32 {
        self.atomic_u32(self.ext.posting.acknowledged.as_ptr()).load_external(Ordering::Relaxed)
    }

    #[inline(always)]
    fn identified(&self) -> u32 {
        self.atomic_u32(self.ext.posting.identified.as_ptr()).load_external(Ordering::Relaxed)
    }

    #[inline(always)]
    fn sq_size(&self) -> u32 {
        self.ext.config.sq_size
    }

    #[inline(always)]
    fn max_batch(&self) -> u32 {
        self.ext.config.max_batch
    }

    #[inline(always)]
    fn value_slots(&self) -> u32 {
        self.ext.config.values.slots
    }

    #[inline(always)]
    fn fence(&self) {
        arch::fence_system();
    }

    #[inline(always)]
    fn doorbell(&self, count: u32) {
        // SAFETY: the endpoint's doorbell, alive for 'a; only the active combiner, or the poster that holds the lock,
        // writes it.
        unsafe { arch::mmio_store_u32(self.ring.borrow().sq_db, count) };
    }

    /// Sets NCCL's cursors: rung (`wqes_posted`), released (`wqes_completed`) and submitted.
    #[inline(always)]
    fn publish(&self, rung: u32) {
        self.wq_field(offset_of!(WqV0, wqes_posted)).store(rung, Ordering::Relaxed);
        self.wq_field(offset_of!(WqV0, wqes_completed)).store(rung, Ordering::Relaxed);
        self.atomic_u64(self.ring.borrow().submitted).store(u64::from(rung), Ordering::Relaxed);
    }

    #[inline(always)]
    fn published(&self) -> u32 {
        self.wq_field(offset_of!(WqV0, wqes_posted)).load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn released(&self) -> u32 {
        self.wq_field(offset_of!(WqV0, wqes_completed)).load(Ordering::Relaxed)
    }

    // Inlined, because a call would make every post save registers.
    #[inline(always)]
    fn insert_used(&self) {
        // SAFETY: the plugin keeps a context as long as its endpoints.
        used_set(unsafe { &*self.ext.config.context }).insert(self.ext.config.index);
    }
}

/// Returns the set of a context's endpoints that may have incomplete posts.
#[inline(always)]
pub(crate) fn used_set(context: &ContextExt) -> UsedSet<'_> {
    let (summaries, leaves) = used_words(context.n_endpoints);
    // SAFETY: the plugin made that many words for the context's lifetime, 8-aligned; only this crate accesses them,
    // atomically.
    let words = unsafe { slice::from_raw_parts(context.used.cast::<AtomicU64>(), summaries + leaves) };
    // SAFETY: they are the words for that many endpoints, and every context has endpoints.
    unsafe { UsedSet::new(words, context.n_endpoints) }
}

impl<R: Ring> combining::CombiningQueue for Endpoint<'_, R> {
    #[inline(always)]
    fn words(&self) -> combining::Words<'_> {
        let posting = &self.ext.posting;
        let cursor = self.wq().wrapping_byte_add(offset_of!(WqV0, pc)).cast::<u64>();
        combining::Words {
            cursor: self.atomic_u64(cursor),
            state: self.atomic_u64(posting.state.as_ptr()),
            bound: self.atomic_u64(posting.bound.as_ptr()),
            poison: self.atomic_u32(posting.poison.as_ptr()),
        }
    }
}

impl LockedQueue for Endpoint<'_> {
    #[inline(always)]
    fn next(&self) -> u32 {
        self.wq_field(offset_of!(WqV0, pc)).load(Ordering::Relaxed).wrapping_add(self.pending())
    }

    #[inline(always)]
    fn pending(&self) -> u32 {
        self.wq_field(offset_of!(WqV0, wqes_pending)).load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn start(&self) {
        let pending = self.pending();
        if pending == 0 {
            // The queue's phase belongs to the slot at `pc`. Neither NCCL's device code nor `take_pending` updates it
            // when moving `pc`.
            let pc = self.wq_field(offset_of!(WqV0, pc)).load(Ordering::Relaxed);
            let phase = u32::from(pc & self.ext.config.ring.phase_bit != 0);
            self.wq_field(offset_of!(WqV0, phase)).store(phase, Ordering::Relaxed);
        }
        self.wq_field(offset_of!(WqV0, wqes_pending)).store(pending + 1, Ordering::Relaxed);
    }

    #[inline(always)]
    fn take_pending(&self) -> u32 {
        let next = LockedQueue::next(self);
        self.wq_field(offset_of!(WqV0, pc)).store(next, Ordering::Relaxed);
        self.wq_field(offset_of!(WqV0, wqes_pending)).store(0, Ordering::Relaxed);
        next
    }

    #[inline(always)]
    fn lock_words(&self) -> locked::Words<'_> {
        let lock = self.ext.config.handle.wrapping_byte_add(offset_of!(EndpointHandle, sq_lock)).cast();
        let posting = &self.ext.posting;
        locked::Words {
            lock: self.atomic_u32(lock),
            barrier: self.atomic_u32(posting.barrier.as_ptr()),
            used: self.atomic_u32(posting.used.as_ptr()),
        }
    }
}
