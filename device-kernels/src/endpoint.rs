//! One endpoint: the queue that an operation is posted on.
//!
//! Ring, doorbell, counters and cursors are memory that the card, NCCL's device code and other threads use too: they
//! are reached through raw pointers and atomics only, and all of that is in this file.

use crate::post::{COUNT_MASK, Queue, combining, locked};
use crate::status::Status;
use crate::wait::Limits;
use core::mem::offset_of;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use efa_dp_direct::arch;
use efa_dp_direct::queue::{QpV0, WqV0};
pub use efa_dp_direct::wqe::RemoteMem as Remote;
use efa_dp_direct::wqe::words::{self, Head, NARROW, WIDE};
use efa_dp_direct::wqe::{Destination, Hints, Sge};
use ferrogin_ffi::device::EndpointHandle;
use ferrogin_ffi::ext::{EndpointCold, EndpointExt, EndpointHot, POLICY_LOCKED, Target};

/// Bytes on this side of a transfer.
#[derive(Debug, Clone, Copy)]
pub enum Local {
    /// Registered memory.
    Memory {
        /// Address of the first byte.
        addr: u64,
        /// Local key.
        lkey: u32,
        /// Bytes.
        bytes: u32,
    },
    /// The value itself, at most 8 bytes, little-endian.
    Value {
        /// The value; bytes beyond `bytes` are not sent.
        value: u64,
        /// 1, 2, 4 or 8.
        bytes: u32,
    },
}

/// Word of an RDMA request with the address of this side's buffer.
const LOCAL_ADDR: usize = 7;

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// RDMA write.
    Write,
    /// RDMA read.
    Read,
}

/// One work request before it has a number.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Write or read.
    pub direction: Direction,
    /// The peer's rank: travels as the request id, by which the host names the peer of a failed request.
    pub peer: u32,
    /// Address of the peer's endpoint.
    pub target: Target,
    /// This side.
    pub local: Local,
    /// The other side.
    pub remote: Remote,
}

/// One endpoint of a context.
#[derive(Clone, Copy)]
pub struct Endpoint<'a> {
    cold: &'a EndpointCold,
    hot: &'a EndpointHot,
    handle: *mut EndpointHandle,
    wq: *mut WqV0,
}

impl<'a> Endpoint<'a> {
    /// A view of `ext`.
    ///
    /// # Safety
    ///
    /// `ext` was filled by the host plugin and stays, with all that it points to, for `'a`.
    #[inline(always)]
    pub unsafe fn new(ext: &'a EndpointExt) -> Self {
        let wq = ext.cold.qp.wrapping_byte_add(offset_of!(QpV0, sq)).cast();
        Endpoint { cold: &ext.cold, hot: &ext.hot, handle: ext.cold.handle, wq }
    }

    /// A value of `bytes` can be posted here: inline, or through the slot pool.
    #[inline(always)]
    pub fn takes_values(&self) -> bool {
        self.cold.value_slots != 0 || self.cold.write_inline >= 8
    }

    /// Posts `request` by `policy`.
    #[inline(always)]
    pub fn post(&self, policy: u32, limits: Limits<'_>, aggregate: bool, request: Request) -> Result<(), Status> {
        let words = self.words(&request);
        if policy == POLICY_LOCKED {
            locked::post(self, self.locked_words(), limits, aggregate, |idx| {
                self.place_in_batch(self.finish(words, &request, idx));
            })
        } else {
            combining::post(self, self.combining_words(), limits, aggregate, |idx| {
                self.place(self.finish(words, &request, idx), idx);
            })
        }
    }

    /// Waits until what was posted here before has completed.
    pub fn flush(&self, policy: u32, limits: Limits<'_>) -> Result<(), Status> {
        if self.failed() {
            return Err(Status::CardError);
        }
        if policy == POLICY_LOCKED {
            locked::flush(self, self.locked_words(), limits)
        } else {
            combining::flush(self, self.combining_words(), limits)
        }
    }

    #[inline(always)]
    fn combining_words(&self) -> combining::Words<'a> {
        let cursor = self.wq.wrapping_byte_add(offset_of!(WqV0, pc)).cast::<u64>();
        combining::Words { cursor: self.atomic_u64(cursor), state: &self.hot.state, poison: &self.hot.poison }
    }

    #[inline(always)]
    fn locked_words(&self) -> locked::Words<'a> {
        let lock = self.handle.wrapping_byte_add(offset_of!(EndpointHandle, sq_lock)).cast();
        locked::Words { lock: self.atomic_u32(lock), barrier: &self.hot.barrier }
    }

    #[inline(always)]
    fn atomic_u64(&self, at: *mut u64) -> &'a AtomicU64 {
        // SAFETY: `new`'s caller vouches that the structs behind the handle live for 'a; every word that is reached
        // this way is 8-aligned (the layouts are asserted) and only ever accessed atomically while kernels run.
        unsafe { AtomicU64::from_ptr(at) }
    }

    #[inline(always)]
    fn atomic_u32(&self, at: *mut u32) -> &'a AtomicU32 {
        // SAFETY: as for `atomic_u64`, with 4-byte alignment.
        unsafe { AtomicU32::from_ptr(at) }
    }

    #[inline(always)]
    fn wq_field(&self, offset: usize) -> &'a AtomicU32 {
        self.atomic_u32(self.wq.wrapping_byte_add(offset).cast())
    }

    /// The work request as far as it does not depend on its number: the rest of a wide one is zeros.
    #[inline(always)]
    fn words(&self, request: &Request) -> [u64; NARROW] {
        let Target { ah, qpn, qkey } = request.target;
        let head = Head {
            hints: Hints::BURST_PPS_SENSITIVE,
            ..Head::new(u64::from(request.peer as u16), Destination { ah, qpn, qkey })
        };
        let sge = match request.local {
            Local::Memory { addr, lkey, bytes } => Sge { addr, lkey, length: bytes },
            Local::Value { value, bytes } if self.inlines(bytes) => {
                return words::write_value(head, request.remote, value, bytes as u8)
                    .first_chunk()
                    .copied()
                    .unwrap_or([0; NARROW]);
            }
            Local::Value { bytes, .. } => Sge { addr: 0, lkey: self.cold.value_lkey, length: bytes },
        };
        match request.direction {
            Direction::Write => words::write(head, request.remote, sge),
            Direction::Read => words::read(head, request.remote, sge),
        }
    }

    #[inline(always)]
    fn inlines(&self, bytes: u32) -> bool {
        u32::from(self.cold.write_inline) >= bytes
    }

    /// Puts the value where the card will find it, and what depends on the number into the work request.
    #[inline(always)]
    fn finish(&self, mut words: [u64; NARROW], request: &Request, idx: u32) -> [u64; NARROW] {
        if let Local::Value { value, bytes } = request.local
            && !self.inlines(bytes)
        {
            let slot = u64::from(idx & (self.cold.value_slots - 1));
            let at = self.cold.value_base + slot * u64::from(self.cold.value_stride);
            // The whole slot: its other bytes are nobody's.
            self.atomic_u64(at as *mut u64).store(value, Ordering::Relaxed);
            words[LOCAL_ADDR] = at;
        }
        words[0] = words::with_phase(words[0], idx >> self.cold.sq_shift & 1 != 0);
        words
    }

    #[inline(always)]
    fn place(&self, words: [u64; NARROW], idx: u32) {
        let wide = self.cold.wqe_size == 128;
        let slot = (idx & self.cold.sq_mask) as usize * if wide { 128 } else { 64 };
        let slot = self.cold.sq_buf.wrapping_byte_add(slot).cast::<u64>();
        for (i, word) in words.into_iter().enumerate() {
            self.store(slot.wrapping_add(i), word);
        }
        if wide {
            for i in NARROW..WIDE {
                self.store(slot.wrapping_add(i), 0);
            }
        }
    }

    /// The slot is the last of the batch that `start` made room in.
    #[inline(always)]
    fn place_in_batch(&self, words: [u64; NARROW]) {
        self.place(words, locked::Batch::next(self).wrapping_sub(1));
    }

    #[inline(always)]
    fn store(&self, at: *mut u64, word: u64) {
        // SAFETY: the slot lies in the ring, which lives for 'a and is 8-aligned; the policy admitted its number, so
        // no other poster writes it and the card has fetched what it held.
        unsafe { arch::mmio_store_u64(at, word) };
    }
}

impl Queue for Endpoint<'_> {
    #[inline(always)]
    fn completed(&self) -> u32 {
        let count = self.atomic_u64(self.cold.completed.cast_mut()).load(Ordering::Acquire);
        count.wrapping_sub(self.cold.completed_base) as u32 & COUNT_MASK
    }

    #[inline(always)]
    fn failed(&self) -> bool {
        !self.cold.errors.is_null()
            && self.atomic_u64(self.cold.errors.cast_mut()).load(Ordering::Relaxed) != self.cold.errors_base
    }

    #[inline(always)]
    fn sq_size(&self) -> u32 {
        self.cold.sq_size
    }

    #[inline(always)]
    fn max_batch(&self) -> u32 {
        self.cold.max_batch
    }

    #[inline(always)]
    fn value_slots(&self) -> u32 {
        self.cold.value_slots
    }

    #[inline(always)]
    fn fence(&self) {
        arch::fence_system();
    }

    #[inline(always)]
    fn doorbell(&self, count: u32) {
        // SAFETY: the endpoint's doorbell, alive for 'a; only the one poster that holds the turn writes it.
        unsafe { arch::mmio_store_u32(self.cold.sq_db, count) };
    }

    /// NCCL's cursors: rung (`wqes_posted`), released (`wqes_completed`) and submitted.
    #[inline(always)]
    fn publish(&self, rung: u32) {
        self.wq_field(offset_of!(WqV0, wqes_posted)).store(rung, Ordering::Relaxed);
        self.wq_field(offset_of!(WqV0, wqes_completed)).store(rung, Ordering::Relaxed);
        let submitted = self.handle.wrapping_byte_add(offset_of!(EndpointHandle, submitted_count)).cast();
        self.atomic_u64(submitted).store(u64::from(rung), Ordering::Relaxed);
    }

    #[inline(always)]
    fn published(&self) -> u32 {
        self.wq_field(offset_of!(WqV0, wqes_posted)).load(Ordering::Relaxed)
    }
}

impl locked::Batch for Endpoint<'_> {
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
        if self.pending() + 1 > self.cold.max_batch {
            self.ring();
        }
        self.wq_field(offset_of!(WqV0, wqes_pending)).store(self.pending() + 1, Ordering::Relaxed);
    }

    /// The holder of the lock alone moves the cursors, so loads and stores need not be one operation.
    #[inline(always)]
    fn ring(&self) {
        if self.pending() == 0 {
            return;
        }
        let rung = self.next();
        self.wq_field(offset_of!(WqV0, pc)).store(rung, Ordering::Relaxed);
        self.wq_field(offset_of!(WqV0, wqes_pending)).store(0, Ordering::Relaxed);
        Queue::fence(self);
        self.doorbell(rung);
        Queue::fence(self);
        self.publish(rung);
    }
}
