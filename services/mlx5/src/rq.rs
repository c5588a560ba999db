//! The receive queue of one queue pair.
//!
//! [`RecvQueue::post`] writes descriptors; [`RecvQueue::ring`] makes all of them visible to the card through the
//! doorbell record. Receives complete in the order in which they were posted.

use crate::handle::Handle;
use crate::mmio::DoorbellRecord;
use crate::ring::Ring;
use crate::sq::UnknownRequest;
use crate::wire::{DataSeg, INLINE_FLAG, INVALID_LKEY, SEGMENT};
use crate::wqe::{SegmentWriter, Sge};

/// Why a receive was not posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RecvError {
    /// The queue is full.
    #[error("the receive queue is full: all {capacity} descriptors are posted; poll for completions first")]
    Full {
        /// Number of descriptors in the queue.
        capacity: usize,
    },
    /// The receive has more buffers than a descriptor holds.
    #[error("a receive of {count} buffers: a descriptor holds {max}")]
    TooManySges {
        /// Number of buffers in the receive.
        count: usize,
        /// Number of buffers that a descriptor holds.
        max: usize,
    },
    /// The length of a buffer does not fit 31 bits.
    #[error("a buffer of {length} bytes: the limit is 2^31 - 1; split the buffer")]
    SgeTooLong {
        /// The length of the buffer.
        length: u32,
    },
}

/// A receive that was not posted, with its token. Nothing changed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct RecvRejected<T> {
    /// The caller's token.
    pub token: T,
    /// The reason.
    #[source]
    pub error: RecvError,
}

pub(crate) fn check(sges: &[Sge], max: usize) -> Result<(), RecvError> {
    if sges.len() > max {
        return Err(RecvError::TooManySges { count: sges.len(), max });
    }
    match sges.iter().find(|sge| sge.length & INLINE_FLAG != 0) {
        Some(sge) => Err(RecvError::SgeTooLong { length: sge.length }),
        None => Ok(()),
    }
}

/// Writes the buffers from segment `at` on, and a terminating segment if there are fewer than `max`.
pub(crate) fn put(sink: &mut impl SegmentWriter, at: usize, sges: &[Sge], max: usize) {
    let mut place = 0;
    for sge in sges.iter().filter(|sge| sge.length != 0) {
        sink.put(at + place, DataSeg { byte_count: sge.length.into(), lkey: sge.lkey.into(), addr: sge.addr.into() });
        place += 1;
    }
    if place < max {
        sink.put(at + place, DataSeg { lkey: INVALID_LKEY.into(), ..Default::default() });
    }
}

/// The parts of a receive queue, provided by the device.
#[derive(Debug)]
pub struct RecvParts {
    /// The ring: at most 2^15 entries of 16 to 512 bytes; an entry holds as many buffers as segments.
    pub ring: Ring,
    /// The receive queue's word of the doorbell record: the first.
    pub record: DoorbellRecord,
    /// Keeps the queue's memory alive.
    pub keep_alive: Handle,
}

/// A receive queue. `T` is the token that the caller attaches to a receive.
#[derive(Debug)]
pub struct RecvQueue<T> {
    ring: Ring,
    tokens: Box<[Option<T>]>,
    producer: u32,
    consumer: u32,
    record: DoorbellRecord,
    _keep_alive: Handle,
}

impl<T> RecvQueue<T> {
    /// Creates a queue from `parts`; `None` if their sizes are out of range.
    pub fn new(parts: RecvParts) -> Option<Self> {
        let (entries, bytes) = (parts.ring.entries(), parts.ring.entry_size());
        if entries > 1 << 15 || !(SEGMENT..=512).contains(&bytes) {
            return None;
        }
        Some(Self {
            ring: parts.ring,
            tokens: (0..entries).map(|_| None).collect(),
            producer: 0,
            consumer: 0,
            record: parts.record,
            _keep_alive: parts.keep_alive,
        })
    }

    /// Returns the number of buffers that a descriptor holds.
    pub fn max_sge(&self) -> usize {
        self.ring.entry_size() / SEGMENT
    }

    /// Returns the number of outstanding receives.
    pub fn outstanding(&self) -> u32 {
        self.producer.wrapping_sub(self.consumer)
    }

    /// Returns the number of descriptors.
    pub fn capacity(&self) -> usize {
        self.tokens.len()
    }

    /// Writes a descriptor. The card cannot use it before [`Self::ring`].
    pub fn post(&mut self, token: T, sges: &[Sge]) -> Result<(), RecvRejected<T>> {
        let max = self.max_sge();
        let admitted = match check(sges, max) {
            Ok(()) if self.outstanding() as usize == self.tokens.len() => {
                Err(RecvError::Full { capacity: self.tokens.len() })
            }
            other => other,
        };
        if let Err(error) = admitted {
            return Err(RecvRejected { token, error });
        }
        put(&mut self.ring.at(self.producer), 0, sges, max);
        let slot = self.slot(self.producer);
        self.tokens[slot] = Some(token);
        self.producer = self.producer.wrapping_add(1);
        Ok(())
    }

    /// Makes all descriptors visible to the card.
    pub fn ring(&mut self) {
        self.record.set(self.producer & 0xffff);
    }

    /// Returns the token of the receive that a completion names, which must be the oldest.
    pub fn complete(&mut self, wqe_counter: u16) -> Result<T, UnknownRequest> {
        let slot = self.slot(self.consumer);
        if self.outstanding() == 0 || wqe_counter != self.consumer as u16 {
            return Err(UnknownRequest { wqe_counter });
        }
        self.consumer = self.consumer.wrapping_add(1);
        self.tokens[slot].take().ok_or(UnknownRequest { wqe_counter })
    }

    /// Takes the tokens of all outstanding receives, oldest first, for a queue pair that no longer exists.
    pub fn take_outstanding(&mut self) -> impl Iterator<Item = T> {
        let (from, to) = (self.consumer, self.producer);
        self.consumer = to;
        (0..to.wrapping_sub(from)).filter_map(move |at| {
            let slot = self.slot(from.wrapping_add(at));
            self.tokens[slot].take()
        })
    }

    fn slot(&self, index: u32) -> usize {
        index as usize & (self.tokens.len() - 1)
    }
}
