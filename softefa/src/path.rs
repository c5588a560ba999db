//! An enabled endpoint: where its operations go and where their completions are told.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use efa_dp_direct::cq::RawCqe;
use efa_dp_direct::wqe::Destination;

use super::av::{self, AvTable};
use super::call::{RecvCall, RmaCall, SendCall};
use super::completion::{CqQueue, Entry};
use super::direct::Direct;
use super::guard::Code;
use super::rdm::Rdm;
use ferrogin_libfabric::bindings as fi;
use soft_nic::address::Address;
use soft_nic::card::Card;
use soft_nic::card::counter::{EVENTS, Event};

/// What software counts in addition to the card.
#[derive(Debug, Default)]
pub(super) struct SoftCount {
    pub completions: AtomicU64,
    pub errors: AtomicU64,
}

/// Where completions of one direction go.
#[derive(Default)]
pub(super) struct Port {
    pub queue: Option<Arc<CqQueue>>,
    /// Only those that ask for one get a completion (`FI_SELECTIVE_COMPLETION`).
    pub selective: bool,
}

impl Port {
    /// Whether an operation with these flags gets a completion.
    pub(super) fn wants(&self, flags: u64, silent: bool) -> bool {
        !silent && (!self.selective || flags & fi::FI_COMPLETION != 0)
    }

    /// Keeps room in the ring for a completion.
    pub(super) fn reserve(&self) -> bool {
        self.queue.as_ref().is_none_or(|queue| queue.reserve())
    }

    /// That completion came, or will not.
    pub(super) fn release(&self) {
        if let Some(queue) = &self.queue {
            queue.release();
        }
    }

    fn is_full(&self) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.is_full())
    }
}

/// What every kind of endpoint has.
pub(super) struct Common {
    pub card: Arc<Card>,
    pub pd: u32,
    pub qpn: u16,
    pub address: Address,
    pub av: Arc<AvTable>,
    pub send: Port,
    pub recv: Port,
    pub counts: [Option<Arc<SoftCount>>; EVENTS],
    /// Most bytes that an operation takes along without its buffer.
    pub inject_size: usize,
    /// What was asked for (`FI_DIRECTED_RECV`...).
    pub caps: u64,
}

impl Common {
    /// The peer that an address leads to.
    pub(super) fn target(&self, at: u64) -> Result<av::Entry, Code> {
        self.av.get(at).ok_or(Code::INVAL)
    }

    /// Tells how a send, write or read ended.
    pub(super) fn report_sent(&self, event: Event, wanted: bool, entry: Entry) {
        self.report(&self.send, event, wanted, entry);
    }

    /// Tells what became of a receive.
    pub(super) fn report_received(&self, wanted: bool, entry: Entry) {
        self.report(&self.recv, Event::Recv, wanted, entry);
    }

    fn report(&self, port: &Port, event: Event, wanted: bool, entry: Entry) {
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

/// Where a peer's queue pair is.
pub(super) fn destination(address: &Address, ahn: u16) -> Destination {
    Destination { ah: ahn, qpn: address.qpn, qkey: address.qkey }
}

enum Body {
    Direct(Mutex<Direct>),
    Rdm(Box<Mutex<Rdm>>),
}

pub(super) struct Path {
    pub common: Common,
    pub qpn: u16,
    body: Body,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Path {
    pub(super) fn direct(common: Common, direct: Direct) -> Self {
        Self { qpn: common.qpn, common, body: Body::Direct(Mutex::new(direct)) }
    }

    pub(super) fn rdm(common: Common, rdm: Rdm) -> Self {
        Self { qpn: common.qpn, common, body: Body::Rdm(Box::new(Mutex::new(rdm))) }
    }

    /// # Errors
    /// `EAGAIN` when there is no room now; others for what cannot be.
    pub(super) fn send(&self, call: &SendCall) -> Result<(), Code> {
        if self.common.send.is_full() {
            return Err(Code::AGAIN);
        }
        match &self.body {
            Body::Direct(direct) => self.relieved(|| lock(direct).send(&self.common, call)),
            Body::Rdm(rdm) => lock(rdm).send(&self.common, call),
        }
    }

    /// # Errors
    /// As [`send`](Self::send).
    pub(super) fn recv(&self, call: &RecvCall) -> Result<(), Code> {
        match &self.body {
            Body::Direct(direct) => lock(direct).recv(&self.common, call),
            Body::Rdm(rdm) => lock(rdm).recv(&self.common, call),
        }
    }

    /// # Errors
    /// As [`send`](Self::send).
    pub(super) fn rma(&self, call: &RmaCall) -> Result<(), Code> {
        if self.common.send.is_full() {
            return Err(Code::AGAIN);
        }
        match &self.body {
            Body::Direct(direct) => self.relieved(|| lock(direct).rma(&self.common, call)),
            Body::Rdm(rdm) => lock(rdm).rma(&self.common, call),
        }
    }

    /// Looks at the completion queue when there is no room, because requests that nobody reads of free theirs there.
    fn relieved(&self, post: impl Fn() -> Result<(), Code>) -> Result<(), Code> {
        match (post(), &self.common.send.queue) {
            (Err(Code::AGAIN), Some(queue)) => {
                queue.progress();
                post()
            }
            (done, _) => done,
        }
    }

    /// # Errors
    /// `ENOENT` when no such receive waits, `ENOSYS` when the card has it.
    pub(super) fn cancel(&self, context: *mut c_void) -> Result<(), Code> {
        match &self.body {
            Body::Direct(_) => Err(Code::NOSYS),
            Body::Rdm(rdm) => lock(rdm).cancel(&self.common, context),
        }
    }

    /// Multi-receive buffers with less room than this are given back.
    pub(super) fn set_min_multi_recv(&self, len: usize) {
        if let Body::Rdm(rdm) = &self.body {
            lock(rdm).min_multi_recv = len;
        }
    }

    /// An entry of a ring that belongs to the application's queue.
    pub(super) fn complete(&self, raw: &RawCqe) -> Option<Entry> {
        match &self.body {
            Body::Direct(direct) => lock(direct).complete(&self.common, raw),
            Body::Rdm(_) => None,
        }
    }

    /// Moves on what the card has told already.
    pub(super) fn settle(&self) {
        match &self.body {
            Body::Direct(_) => {
                for queue in [&self.common.send.queue, &self.common.recv.queue].into_iter().flatten() {
                    queue.settle();
                }
            }
            Body::Rdm(rdm) => lock(rdm).progress(&self.common),
        }
    }

    /// The end: what was posted goes out first, if that takes no longer than `limit`.
    pub(super) fn close(&self, limit: std::time::Duration) {
        if let Body::Rdm(rdm) = &self.body {
            let deadline = std::time::Instant::now() + limit;
            while !lock(rdm).is_quiet() && std::time::Instant::now() < deadline {
                self.common.card.look();
                lock(rdm).progress(&self.common);
                std::thread::yield_now();
            }
            lock(rdm).close(&self.common);
        }
        self.common.card.lock().close_qp(self.qpn);
        if let Body::Rdm(rdm) = &self.body {
            lock(rdm).free(&self.common);
        }
    }
}
