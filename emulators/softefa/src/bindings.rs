//! The objects bound to an enabled endpoint: its card, address vector, completion queues and counters.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use efa_dp_direct::wqe::Destination;
use ferrogin_libfabric::bindings as fi;

use super::av::{self, AvTable};
use super::completion::{CqQueue, Entry};
use super::guard::Code;
use soft_nic::address::Address;
use soft_nic::card::Card;
use soft_nic::card::counter::{EVENTS, Event};

/// Events that the protocol counts in addition to the card.
#[derive(Debug, Default)]
pub(super) struct SoftCount {
    pub completions: AtomicU64,
    pub errors: AtomicU64,
}

/// One direction's completion queue.
#[derive(Default)]
pub(super) struct CqBinding {
    pub queue: Option<Arc<CqQueue>>,
    /// Only operations with `FI_COMPLETION` get a completion (`FI_SELECTIVE_COMPLETION`).
    pub selective: bool,
}

impl CqBinding {
    /// Whether an operation with these flags gets a completion.
    pub(super) fn wants(&self, flags: u64, silent: bool) -> bool {
        !silent && (!self.selective || flags & fi::FI_COMPLETION != 0)
    }

    /// Reserves room in the ring for a completion. Returns false if there is none.
    pub(super) fn reserve(&self) -> bool {
        self.queue.as_ref().is_none_or(|queue| queue.reserve())
    }

    /// Releases a completion's room: the application read it, or none will be written.
    pub(super) fn release(&self) {
        if let Some(queue) = &self.queue {
            queue.release();
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.is_full())
    }
}

/// An endpoint's bindings.
pub(super) struct Bindings {
    pub card: Arc<Card>,
    pub pd: u32,
    pub qpn: u16,
    pub address: Address,
    pub av: Arc<AvTable>,
    pub send: CqBinding,
    pub recv: CqBinding,
    pub counts: [Option<Arc<SoftCount>>; EVENTS],
    /// Maximum number of bytes that an operation copies, so that its buffer is free at once.
    pub inject_size: usize,
    /// Capabilities that the application asked for (`FI_DIRECTED_RECV`...).
    pub caps: u64,
}

impl Bindings {
    /// Returns an address's peer.
    pub(super) fn target(&self, at: u64) -> Result<av::Entry, Code> {
        self.av.get(at).ok_or(Code::INVAL)
    }

    /// Reports the completion of a send, write or read.
    pub(super) fn report_sent(&self, event: Event, wanted: bool, entry: Entry) {
        self.report(&self.send, event, wanted, entry);
    }

    /// Reports the completion of a receive.
    pub(super) fn report_received(&self, wanted: bool, entry: Entry) {
        self.report(&self.recv, Event::Recv, wanted, entry);
    }

    fn report(&self, port: &CqBinding, event: Event, wanted: bool, entry: Entry) {
        let failed = entry.failure.is_some();
        if let Some(queue) = port.queue.as_ref().filter(|_| wanted || failed) {
            queue.push(entry);
        }
        if let Some(count) = &self.counts[event as usize] {
            let count = if failed { &count.errors } else { &count.completions };
            count.fetch_add(1, Ordering::Release);
        }
    }
}

/// Returns a peer's queue pair, as a work request names it.
pub(super) fn destination(address: &Address, ahn: u16) -> Destination {
    Destination { ah: ahn, qpn: address.qpn, qkey: address.qkey }
}
