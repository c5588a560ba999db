//! A receive queue that several queue pairs share.
//!
//! The descriptors form a linked list that the card walks. Completions name the descriptors in any order; a completed
//! descriptor moves to the end of the list.

use crate::handle::Handle;
use crate::mmio::DoorbellRecord;
use crate::ring::Ring;
use crate::rq::{RecvError, RecvRejected, check, put};
use crate::sq::UnknownRequest;
use crate::wire::{SEGMENT, SrqNextSeg};
use crate::wqe::{SegmentWriter, Sge};

/// The parts of a shared receive queue, provided by the device.
#[derive(Debug)]
pub struct SrqParts {
    /// The ring: 2 to 2^15 entries of 32 to 512 bytes; the first segment of an entry is the link, each other one a
    /// buffer.
    pub ring: Ring,
    /// The doorbell record.
    pub record: DoorbellRecord,
    /// Number of the queue.
    pub srqn: u32,
    /// The device's handle of the queue, which keeps its memory alive.
    pub keep_alive: Handle,
}

/// A shared receive queue. `T` is the token that the caller attaches to a receive.
#[derive(Debug)]
pub struct SharedRecvQueue<T> {
    ring: Ring,
    tokens: Box<[Option<T>]>,
    /// The successor of each descriptor: a copy of the links, because the ring is not read back.
    next: Box<[u16]>,
    /// The descriptor that the next post fills.
    head: u16,
    /// The last descriptor of the list. It stays empty, so the list never ends while the card walks it.
    tail: u16,
    posted: u32,
    record: DoorbellRecord,
    srqn: u32,
    keep_alive: Handle,
}

/// Number of segments before the buffers.
const FIRST_BUFFER: usize = 1;

impl<T> SharedRecvQueue<T> {
    /// Creates a queue from `parts`, writing the list into the ring; `None` if their sizes are out of range.
    pub fn new(parts: SrqParts) -> Option<Self> {
        let (entries, bytes) = (parts.ring.entries(), parts.ring.entry_size());
        if !(2..=1 << 15).contains(&entries) || !(2 * SEGMENT..=512).contains(&bytes) {
            return None;
        }
        let mut queue = Self {
            ring: parts.ring,
            tokens: (0..entries).map(|_| None).collect(),
            next: vec![0; entries].into(),
            head: 0,
            // At most 2^15 entries, checked above.
            tail: (entries - 1) as u16,
            posted: 0,
            record: parts.record,
            srqn: parts.srqn,
            keep_alive: parts.keep_alive,
        };
        for index in 0..entries {
            queue.link(index as u16, ((index + 1) % entries) as u16);
        }
        Some(queue)
    }

    /// Returns the number of the queue.
    pub fn srqn(&self) -> u32 {
        self.srqn
    }

    /// Returns the device's handle of the queue.
    pub fn handle(&self) -> &Handle {
        &self.keep_alive
    }

    /// Returns the number of buffers that a descriptor holds.
    pub fn max_sge(&self) -> usize {
        self.ring.entry_size() / SEGMENT - FIRST_BUFFER
    }

    /// Returns the number of receives that can be posted at a time: one less than the ring's entries.
    pub fn capacity(&self) -> usize {
        self.tokens.len() - 1
    }

    /// Writes a descriptor. The card cannot use it before [`Self::ring`].
    pub fn post(&mut self, token: T, sges: &[Sge]) -> Result<(), RecvRejected<T>> {
        let max = self.max_sge();
        let admitted = match check(sges, max) {
            Ok(()) if self.head == self.tail => Err(RecvError::Full { capacity: self.capacity() }),
            other => other,
        };
        if let Err(error) = admitted {
            return Err(RecvRejected { token, error });
        }
        let at = self.head;
        put(&mut self.ring.at(at as u32), FIRST_BUFFER, sges, max);
        self.tokens[at as usize] = Some(token);
        self.head = self.next[at as usize];
        self.posted = self.posted.wrapping_add(1);
        Ok(())
    }

    /// Makes all descriptors visible to the card.
    pub fn ring(&mut self) {
        self.record.set(self.posted & 0xffff);
    }

    /// Returns the token of the receive that a completion names. Its descriptor can be posted again.
    pub fn complete(&mut self, wqe_counter: u16) -> Result<T, UnknownRequest> {
        let token = self.tokens.get_mut(wqe_counter as usize).and_then(Option::take);
        let token = token.ok_or(UnknownRequest { wqe_counter })?;
        self.link(self.tail, wqe_counter);
        self.tail = wqe_counter;
        Ok(token)
    }

    fn link(&mut self, from: u16, to: u16) {
        self.next[from as usize] = to;
        self.ring.at(from as u32).put(0, SrqNextSeg { next_wqe_index: to.into(), ..Default::default() });
    }
}
