//! The host side of a queue pair: it writes work requests into the rings, as a driver does, and reads completions.

use std::sync::Arc;

use efa_dp_direct::cq::RawCqe;
use efa_dp_direct::wire::RxDesc;
use efa_dp_direct::wqe::{Destination, Geometry, Operation, SendWqe};

use super::requests::Requests;
use soft_nic::card::queue::{CQ_ENTRY_LEN, RQ_ENTRY_LEN, WorkQueue};
use soft_nic::memory;

/// Both work queues of a queue pair, with a `T` for each request in flight.
#[derive(Debug)]
pub(super) struct QueuePair<T> {
    sq: Arc<WorkQueue>,
    rq: Arc<WorkQueue>,
    geometry: Geometry,
    max_batch: u32,
    /// Producer count, and how many written requests are not rung.
    pc: u32,
    unrung: u32,
    requests: Requests<T>,
    rq_pc: u32,
}

impl<T> QueuePair<T> {
    /// Takes the queues of a new queue pair, whose send queue begins at `start`.
    pub(super) fn new(sq: Arc<WorkQueue>, rq: Arc<WorkQueue>, max_batch: u32, start: u32) -> Self {
        let geometry = if sq.entry_size == 128 { Geometry::WIDE } else { Geometry::NARROW };
        let entries = sq.entries;
        Self { sq, rq, geometry, max_batch, pc: start, unrung: 0, requests: Requests::new(entries), rq_pc: 0 }
    }

    /// Returns the same queues for requests of another type. No request may be in flight.
    pub(super) fn with_requests<U>(self) -> QueuePair<U> {
        let Self { sq, rq, max_batch, pc, .. } = self;
        QueuePair::new(sq, rq, max_batch, pc)
    }

    /// Returns how many requests can be posted now.
    pub(super) fn room(&self) -> usize {
        self.requests.room()
    }

    /// Returns how many requests are in flight.
    pub(super) fn outstanding(&self) -> usize {
        self.requests.len()
    }

    /// Returns how many bytes a send carries inline.
    pub(super) fn max_inline(&self) -> usize {
        self.geometry.max_inline as usize
    }

    /// Returns how many bytes a write carries inline.
    pub(super) fn max_inline_write(&self) -> usize {
        if self.geometry == Geometry::WIDE { self.max_inline() } else { 0 }
    }

    /// Writes a request, which the card takes at the next [`ring`](Self::ring). `None` if there is no room or the
    /// request is too long.
    pub(super) fn post(&mut self, to: Destination, op: Operation, request: T) -> Option<()> {
        let id = self.requests.next_id()?;
        let mut wqe = SendWqe::new(u64::from(id), to, op);
        wqe.phase = self.sq.phase_of(self.pc) != 0;
        let mut bytes = [0; 128];
        let len = self.geometry.wqe_size.bytes();
        wqe.emit(&self.geometry, &mut bytes[..len]).ok()?;
        if self.unrung == self.max_batch {
            self.ring();
        }
        self.requests.insert(request)?;
        self.sq.store(self.pc, &bytes[..len]);
        self.pc = self.pc.wrapping_add(1);
        self.unrung += 1;
        Some(())
    }

    /// Rings the doorbell for the written requests.
    pub(super) fn ring(&mut self) {
        if self.unrung > 0 {
            self.unrung = 0;
            self.sq.ring(self.pc);
        }
    }

    /// Removes a completed request and returns it.
    pub(super) fn complete(&mut self, id: u64) -> Option<T> {
        self.requests.take(id)
    }

    /// Writes the descriptors of one receive. The caller checks that the ring has room.
    pub(super) fn post_receive(&mut self, buffers: &[RxDesc]) {
        for desc in buffers {
            let [addr, rest] = desc.to_words();
            let mut bytes = [0; RQ_ENTRY_LEN as usize];
            bytes[..8].copy_from_slice(&addr.to_ne_bytes());
            bytes[8..].copy_from_slice(&rest.to_ne_bytes());
            self.rq.store(self.rq_pc, &bytes);
            self.rq_pc = self.rq_pc.wrapping_add(1);
        }
    }

    /// Returns the number of entries in the receive queue.
    pub(super) fn receives(&self) -> u32 {
        self.rq.entries
    }

    /// Rings the receive queue's doorbell.
    pub(super) fn ring_receives(&mut self) {
        self.rq.ring(self.rq_pc);
    }
}

/// The reader of a completion ring.
#[derive(Debug)]
pub(super) struct RingReader {
    buffer: *const u8,
    entries: u32,
    next: u32,
}

// SAFETY: the caller of `new` keeps the ring mapped; this value only reads it, atomically.
unsafe impl Send for RingReader {}

impl RingReader {
    /// # Safety
    /// `buffer` holds `entries` (a power of two) entries of [`CQ_ENTRY_LEN`] bytes, 8-byte aligned, as long as
    /// [`next`](Self::next) is called.
    pub(super) unsafe fn new(buffer: *const u8, entries: u32) -> Self {
        Self { buffer, entries, next: 0 }
    }

    pub(super) fn entries(&self) -> u32 {
        self.entries
    }

    /// Returns the next entry, if the card has written it.
    pub(super) fn next(&mut self) -> Option<RawCqe> {
        let slot = self.buffer.wrapping_add((self.next & (self.entries - 1)) as usize * CQ_ENTRY_LEN as usize);
        let word = |i: usize| {
            // SAFETY: the caller of `new` keeps the ring mapped, and the slot lies in it; acquire orders the first word
            // before the others.
            unsafe { memory::load_acquire(slot.wrapping_add(8 * i).cast()) }
        };
        let first = RawCqe::from_words([word(0), 0, 0, 0]);
        let expected = (self.next >> self.entries.trailing_zeros()) & 1 == 0;
        if first.phase() != expected {
            return None;
        }
        self.next = self.next.wrapping_add(1);
        Some(RawCqe::from_words(std::array::from_fn(word)))
    }
}
