//! One endpoint: the queue that an operation is posted on.
//!
//! The card, NCCL's device code and other threads use ring, doorbell, counters and cursors too. Only this file accesses them,
//! through raw pointers and atomics.

use crate::constant::{self, Constant};
use crate::platform::in_one_register;
use crate::post::flush::{self, Flush, Outcome};
use crate::post::locked::{self, LockedQueue};
use crate::post::used::UsedSet;
use crate::post::{COUNT_MASK, Gpu, Queue, combining};
use crate::status::Status;
use crate::sync::{AtomicU32, AtomicU64, LoadExternal, Ordering};
use crate::wait::Limit;
use core::mem::offset_of;
use core::ops::Deref;
use core::slice;
use efa_dp_direct::arch;
use efa_dp_direct::queue::{SQ_WQ_OFFSET, WqV0};
use efa_dp_direct::sq;
pub use efa_dp_direct::wqe::RemoteMem as Remote;
pub use efa_dp_direct::wqe::Sge;
use efa_dp_direct::wqe::words::{self, NARROW, WIDE};
use ferrogin_ffi::device::EndpointHandle;
use ferrogin_ffi::ext::{
    ContextExt, EndpointExt, POLICY_LOCKED, RingConfig, VALUE_INLINE, VALUE_NONE, VALUE_POOL, VALUE_STRIDE,
    ValueConfig, used_words,
};

/// The part of a work request that does not depend on its number; the second half of a wide request is zeros.
pub type Request = [u64; NARROW];

/// What a post reads of an endpoint's configuration.
pub trait Ring: Deref<Target = RingConfig> + Copy {}
impl<R: Deref<Target = RingConfig> + Copy> Ring for R {}

/// One endpoint of a context. `R` is what a post reads of the configuration: in memory, or loaded for a post.
#[derive(Clone, Copy)]
pub struct Endpoint<'a, R = &'a RingConfig> {
    ext: &'a EndpointExt,
    ring: R,
}

/// An endpoint for one post.
pub type Poster<'a> = Endpoint<'a, Constant<'a, RingConfig>>;

impl<'a> Endpoint<'a> {
    /// A view of `ext`.
    ///
    /// # Safety
    ///
    /// The host plugin filled `ext`, and keeps it, with all that it points to, for `'a`.
    #[inline(always)]
    pub unsafe fn new(ext: &'a EndpointExt) -> Self {
        Endpoint { ext, ring: &ext.config.ring }
    }

    /// A view of the struct at `ext`.
    ///
    /// # Safety
    ///
    /// As for [`Endpoint::new`].
    #[inline(always)]
    pub(crate) unsafe fn from_ptr(ext: *const EndpointExt) -> Self {
        // SAFETY: the caller vouches for the struct.
        let ext = unsafe { &*ext };
        // SAFETY: the caller vouches for the struct.
        unsafe { Endpoint::new(ext) }
    }

    /// The endpoint for a post.
    #[inline(always)]
    pub fn poster(self) -> Poster<'a> {
        // SAFETY: the plugin keeps the configuration constant as long as the endpoint; its layout has the alignment.
        Endpoint { ext: self.ext, ring: unsafe { constant::load(&raw const self.ext.config.ring) } }
    }

    /// How values take the fast path: `VALUE_*`.
    #[inline(always)]
    pub fn value_path(&self) -> u32 {
        self.ext.config.values.path
    }

    /// The number of this endpoint in its context.
    pub(crate) fn index(&self) -> u32 {
        self.ext.config.index
    }

    /// The address of the struct.
    #[inline(always)]
    pub(crate) fn as_ptr(&self) -> *const EndpointExt {
        self.ext
    }

    /// The context of this endpoint.
    #[inline(always)]
    pub fn context(&self) -> *const ContextExt {
        self.ext.config.context
    }

    /// How this endpoint posts values by either policy: `VALUE_*`, or `VALUE_NONE` if it cannot.
    pub fn takes_values(&self) -> u32 {
        match (self.ext.config.write_inline >= 8, self.ext.config.values.slots != 0) {
            (true, _) => VALUE_INLINE,
            (false, true) => VALUE_POOL,
            (false, false) => VALUE_NONE,
        }
    }

    /// Posts by either policy, in GPU mode; in an `exclusive` mode the `locked` policy takes no lock. With a `pooled` value and
    /// its size, the local side of the request is the value's slot.
    #[inline(never)]
    pub fn post(
        self,
        policy: u32,
        exclusive: bool,
        limits: impl Limit,
        aggregate: bool,
        request: Request,
        pooled: Option<(u64, u32)>,
    ) -> Result<(), Status> {
        let numbered = |idx| match pooled {
            None => request,
            Some((value, bytes)) => words::with_local(request, self.pool_value(idx, value, bytes)),
        };
        if policy == POLICY_LOCKED {
            let place = |idx| self.place_in_batch(numbered(idx));
            locked::post(&self, limits, exclusive, aggregate, place)
        } else {
            combining::post::<Gpu, _>(self, limits, aggregate, |idx| self.place(numbered(idx), idx))
        }
    }

    /// One round of a flush of this endpoint.
    pub fn flush_round(&self, policy: u32, flush: &mut Flush) -> Outcome {
        flush.round::<Gpu, _>(*self, policy == POLICY_LOCKED)
    }

    /// Waits until the flush of this endpoint has ended.
    #[inline(always)]
    pub fn wait_flushed(&self, policy: u32, limits: impl Limit, flush: Flush) -> Outcome {
        flush::wait::<Gpu, _>(*self, policy == POLICY_LOCKED, flush, limits)
    }

    /// Rings deferred posts on this endpoint, for a wait that depends on them. Fails if they can no longer complete.
    pub fn ring_deferred(&self, policy: u32, limits: impl Limit) -> Result<(), Status> {
        if self.failed() {
            return Err(Status::CardError);
        }
        if policy == POLICY_LOCKED { locked::ring_ready(self, limits) } else { combining::ring_ready::<Gpu, _>(*self) }
    }

    /// Puts the value in the slot of request `idx`, and returns the slot.
    #[inline(always)]
    pub fn pool_value(&self, idx: u32, value: u64, bytes: u32) -> Sge {
        self.pool(&self.ext.config.values, idx, value, bytes)
    }

    /// Writes request `idx` into the ring, in the phase of its lap.
    pub(crate) fn place(&self, request: Request, idx: u32) {
        let (slot, phase) = self.slot(idx);
        let [head, rest @ ..] = request;
        slot.put(0, [head | phase]);
        slot.put(1, rest);
        if self.is_wide() {
            slot.pad();
        }
    }

    /// Writes a request into the last slot of the batch, in which `start` made room.
    #[inline(always)]
    fn place_in_batch(&self, request: Request) {
        let (wq, last) = (self.wq(), LockedQueue::pending(self).wrapping_sub(1));
        if self.is_wide() {
            let mut wide = [0; WIDE];
            wide[..NARROW].copy_from_slice(&request);
            // SAFETY: a live queue of 128-byte requests; this thread has the lock and started this request.
            unsafe { sq::place(wq, last, wide) };
        } else {
            // SAFETY: a live queue of 64-byte requests; this thread has the lock and started this request.
            unsafe { sq::place(wq, last, request) };
        }
    }
}

impl<'a, R: Ring> Endpoint<'a, R> {
    /// The endpoint without what was loaded of it.
    #[inline(always)]
    pub fn endpoint(&self) -> Endpoint<'a> {
        Endpoint { ext: self.ext, ring: &self.ext.config.ring }
    }

    /// What posts of values read besides.
    #[inline(always)]
    pub(crate) fn value_config(&self) -> Constant<'a, ValueConfig> {
        // SAFETY: the plugin keeps the configuration constant as long as the endpoint; its layout has the alignment.
        unsafe { constant::load(&raw const self.ext.config.values) }
    }

    #[inline(always)]
    fn wq(&self) -> *mut WqV0 {
        (&raw const self.ext.queue).cast_mut().wrapping_byte_add(SQ_WQ_OFFSET).cast()
    }

    #[inline(always)]
    fn atomic_u64(&self, at: *mut u64) -> &'a AtomicU64 {
        // SAFETY: the caller of `new` vouches that the structs behind the handle live for 'a. Callers of this method pass an
        // 8-aligned word of them (the layouts are asserted), which host and kernels access only atomically while kernels run.
        unsafe { AtomicU64::from_ptr(at) }
    }

    #[inline(always)]
    fn atomic_u32(&self, at: *mut u32) -> &'a AtomicU32 {
        // SAFETY: the caller of `new` vouches that the structs behind the handle live for 'a. Callers of this method pass a
        // 4-aligned word of them (the layouts are asserted), which host and kernels access only atomically while kernels run.
        unsafe { AtomicU32::from_ptr(at) }
    }

    #[inline(always)]
    fn wq_field(&self, offset: usize) -> &'a AtomicU32 {
        self.atomic_u32(self.wq().wrapping_byte_add(offset).cast())
    }

    /// Puts the value in the slot of request `idx`, and returns the slot.
    #[inline(always)]
    pub fn pool(&self, values: &ValueConfig, idx: u32, value: u64, bytes: u32) -> Sge {
        let addr = self.ring.value_base + u64::from(idx.wrapping_mul(VALUE_STRIDE) & values.mask);
        // The store covers the whole slot, whose other bytes are unused.
        self.atomic_u64(addr as *mut u64).store(value, Ordering::Relaxed);
        Sge { addr, lkey: values.lkey, length: bytes }
    }

    /// The slot of request `idx`, and the phase bit of its first word in this lap.
    #[inline(always)]
    pub fn slot(&self, idx: u32) -> (Slot, u64) {
        let ring = &self.ring;
        let phase = u64::from((idx & ring.phase_bit).wrapping_mul(ring.phase_scale));
        let offset = idx.wrapping_mul(ring.wqe_size) & ring.ring_mask;
        (Slot(in_one_register(ring.sq_buf.wrapping_byte_add(offset as usize).cast())), phase)
    }

    /// Returns whether requests have 128 bytes.
    #[inline(always)]
    pub fn is_wide(&self) -> bool {
        self.ring.wqe_size == 128
    }
}

/// The place of a request in the ring.
#[derive(Clone, Copy)]
pub struct Slot(*mut u64);

impl Slot {
    /// Writes words of the request from word `first` on. A post writes each word as soon as it knows it, and so needs few
    /// registers.
    #[inline(always)]
    pub fn put<const N: usize>(self, first: usize, words: [u64; N]) {
        for (i, word) in words.into_iter().enumerate() {
            // SAFETY: the slot lies in the ring, which lives as long as the endpoint and is 8-aligned; the policy
            // admitted its number, so no other poster writes it and the card has fetched what it held. Callers write
            // the words of one request.
            unsafe { arch::mmio_store_u64(self.0.wrapping_add(first + i), word) };
        }
    }

    /// Writes zeros into the second half of a request of 128 bytes.
    #[inline(always)]
    pub fn pad(self) {
        const { assert!(NARROW == 8 && WIDE == 16) };
        // SAFETY: the slot lies in the ring, which lives as long as the endpoint and is 8-aligned; callers have slots of 128
        // bytes; the policy admitted the request's number, so no other poster writes the slot and the card has fetched it.
        unsafe { arch::mmio_zero_second_half(self.0) };
    }
}

impl<R: Ring> Queue for Endpoint<'_, R> {
    #[inline(always)]
    fn completed(&self) -> u32 {
        self.atomic_u64(self.ext.config.completed.cast_mut()).load_external(Ordering::Acquire) as u32 & COUNT_MASK
    }

    #[inline(always)]
    fn failed(&self) -> bool {
        let errors = self.atomic_u64(self.ext.config.errors.cast_mut()).load_external(Ordering::Relaxed);
        // Modulo 2^32: on a GPU a comparison of 64 bits is two.
        errors as u32 != self.ext.config.errors_base as u32
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
        // SAFETY: the endpoint's doorbell, alive for 'a; only the active ringer, or the poster that has the lock, writes it.
        unsafe { arch::mmio_store_u32(self.ring.sq_db, count) };
    }

    /// NCCL's cursors: rung (`wqes_posted`), released (`wqes_completed`) and submitted.
    #[inline(always)]
    fn publish(&self, rung: u32) {
        self.wq_field(offset_of!(WqV0, wqes_posted)).store(rung, Ordering::Relaxed);
        self.wq_field(offset_of!(WqV0, wqes_completed)).store(rung, Ordering::Relaxed);
        self.atomic_u64(self.ring.submitted).store(u64::from(rung), Ordering::Relaxed);
    }

    #[inline(always)]
    fn published(&self) -> u32 {
        self.wq_field(offset_of!(WqV0, wqes_posted)).load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn released(&self) -> u32 {
        self.wq_field(offset_of!(WqV0, wqes_completed)).load(Ordering::Relaxed)
    }

    // On a GPU a call would cost every post registers to save.
    #[cfg_attr(not(target_arch = "nvptx64"), cold, inline(never))]
    #[cfg_attr(target_arch = "nvptx64", inline(always))]
    fn insert_used(&self) {
        // SAFETY: the plugin keeps a context as long as its endpoints.
        used_set(unsafe { &*self.ext.config.context }).insert(self.ext.config.index);
    }
}

/// The endpoints of a context that may have incomplete posts.
#[inline(always)]
pub(crate) fn used_set(context: &ContextExt) -> UsedSet<'_> {
    let (summaries, leaves) = used_words(context.n_endpoints);
    // SAFETY: the plugin made that many words for the context's life, 8-aligned; only this crate accesses them, atomically.
    let words = unsafe { slice::from_raw_parts(context.used.cast::<AtomicU64>(), summaries + leaves) };
    // SAFETY: they are the words of that many endpoints, and a context has endpoints.
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
        // NCCL's device code may have left requests unrung, too.
        if LockedQueue::next(self).wrapping_sub(self.published()) >= self.ext.config.max_batch {
            self.ring();
        }
        let pending = self.pending();
        if pending == 0 {
            // The queue's phase belongs to the slot at `pc`. NCCL's device code moves `pc` without the phase.
            let pc = self.wq_field(offset_of!(WqV0, pc)).load(Ordering::Relaxed);
            let phase = u32::from(pc & self.ext.config.ring.phase_bit != 0);
            self.wq_field(offset_of!(WqV0, phase)).store(phase, Ordering::Relaxed);
        }
        self.wq_field(offset_of!(WqV0, wqes_pending)).store(pending + 1, Ordering::Relaxed);
    }

    #[inline(always)]
    fn ring(&self) {
        let next = LockedQueue::next(self);
        if self.published() == next {
            return;
        }
        if self.pending() != 0 {
            // SAFETY: a live queue; only the thread that has the lock starts and flushes.
            unsafe { sq::flush(self.wq()) };
        } else {
            // SAFETY: the endpoint's doorbell; only the thread that has the lock rings it.
            unsafe { sq::ring(self.ext.config.ring.sq_db, next) };
        }
        self.publish(next);
    }

    #[inline(always)]
    fn take_pending(&self) -> u32 {
        let next = LockedQueue::next(self);
        // `start` computes the phase again for the first request of a batch.
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
