//! The card's view of receive queues: a queue pair's ring, or a list shared by several queue pairs.

use std::sync::Arc;

use mlx5::wire::{DataSeg, INVALID_LKEY, SEGMENT, SrqNextSeg};
use mlx5::wqe::Sge;
use zerocopy::FromBytes;

use super::shared::Shared;

/// A receive that has been taken from its queue.
#[derive(Debug, Clone)]
pub(super) struct Receive {
    pub index: u16,
    pub sges: Vec<Sge>,
}

impl Receive {
    pub(super) fn capacity(&self) -> u64 {
        self.sges.iter().map(|sge| u64::from(sge.length)).sum()
    }
}

/// The order of the descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// One after another in the ring.
    Ring,
    /// Each descriptor names the next; this one is taken next.
    List(u16),
}

#[derive(Debug)]
pub(super) struct ReceiveQueue {
    pub memory: Arc<Shared>,
    /// Offset of the doorbell record.
    pub record: usize,
    /// Offset of the descriptors.
    pub ring: usize,
    pub log_entries: u32,
    pub log_stride: u32,
    pub order: Order,
    /// The number of descriptors taken.
    pub taken: u16,
}

impl ReceiveQueue {
    /// Whether a receive is posted.
    pub(super) fn is_ready(&self) -> bool {
        let posted = (self.memory.record(self.record) as u16).wrapping_sub(self.taken);
        posted != 0 && usize::from(posted) <= 1 << self.log_entries
    }

    /// Takes the next receive.
    pub(super) fn take(&mut self) -> Option<Receive> {
        if !self.is_ready() {
            return None;
        }
        let index = match self.order {
            Order::Ring => self.taken,
            Order::List(head) => head,
        };
        self.taken = self.taken.wrapping_add(1);
        let (slot, stride) = (usize::from(index) & ((1 << self.log_entries) - 1), 1 << self.log_stride);
        let mut bytes = vec![0; stride];
        self.memory.read(self.ring + slot * stride, &mut bytes);
        let mut segments = bytes.chunks_exact(SEGMENT);
        if let Order::List(head) = &mut self.order
            && let Some(Ok(next)) = segments.next().map(SrqNextSeg::read_from_bytes)
        {
            *head = next.next_wqe_index.get();
        }
        let mut sges = Vec::new();
        for segment in segments {
            let Ok(segment) = DataSeg::read_from_bytes(segment) else { break };
            if segment.lkey.get() == INVALID_LKEY {
                break;
            }
            let (addr, length, lkey) = (segment.addr.get(), segment.byte_count.get(), segment.lkey.get());
            if length != 0 {
                sges.push(Sge { addr, length, lkey });
            }
        }
        Some(Receive { index, sges })
    }
}
