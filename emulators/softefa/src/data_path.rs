//! An enabled endpoint's data path: its operations go to the card, or to the `efa` fabric's protocol.

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use efa_dp_direct::cq::RawCqe;

use super::bindings::Bindings;
use super::call::{RecvCall, RmaCall, SendCall};
use super::completion::{Completer, Entry};
use super::direct::Direct;
use super::guard::Code;
use super::rdm::Rdm;

enum Body {
    Direct(Mutex<Direct>),
    Rdm(Box<Mutex<Rdm>>),
}

pub(super) struct DataPath {
    pub bindings: Bindings,
    pub qpn: u16,
    body: Body,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DataPath {
    pub(super) fn direct(bindings: Bindings, direct: Direct) -> Self {
        Self { qpn: bindings.qpn, bindings, body: Body::Direct(Mutex::new(direct)) }
    }

    pub(super) fn rdm(bindings: Bindings, rdm: Rdm) -> Self {
        Self { qpn: bindings.qpn, bindings, body: Body::Rdm(Box::new(Mutex::new(rdm))) }
    }

    /// # Errors
    /// `EAGAIN` if there is no room now, and other codes for invalid calls.
    pub(super) fn send(&self, call: &SendCall) -> Result<(), Code> {
        if self.bindings.send.is_full() {
            return Err(Code::AGAIN);
        }
        match &self.body {
            Body::Direct(direct) => self.post_with_progress(|| lock(direct).send(&self.bindings, call)),
            Body::Rdm(rdm) => lock(rdm).send(&self.bindings, call),
        }
    }

    /// # Errors
    /// Those of [`send`](Self::send).
    pub(super) fn recv(&self, call: &RecvCall) -> Result<(), Code> {
        match &self.body {
            Body::Direct(direct) => lock(direct).recv(&self.bindings, call),
            Body::Rdm(rdm) => lock(rdm).recv(&self.bindings, call),
        }
    }

    /// # Errors
    /// Those of [`send`](Self::send).
    pub(super) fn rma(&self, call: &RmaCall) -> Result<(), Code> {
        if self.bindings.send.is_full() {
            return Err(Code::AGAIN);
        }
        match &self.body {
            Body::Direct(direct) => self.post_with_progress(|| lock(direct).rma(&self.bindings, call)),
            Body::Rdm(rdm) => lock(rdm).rma(&self.bindings, call),
        }
    }

    /// Posts. If there is no room, polls the completion queue, which frees the room of completed requests, and posts
    /// once more.
    fn post_with_progress(&self, post: impl Fn() -> Result<(), Code>) -> Result<(), Code> {
        match (post(), &self.bindings.send.queue) {
            (Err(Code::AGAIN), Some(queue)) => {
                queue.progress();
                post()
            }
            (done, _) => done,
        }
    }

    /// # Errors
    /// `ENOENT` if no such receive waits, `ENOSYS` if the card already has it.
    pub(super) fn cancel(&self, context: *mut c_void) -> Result<(), Code> {
        match &self.body {
            Body::Direct(_) => Err(Code::NOSYS),
            Body::Rdm(rdm) => lock(rdm).cancel(&self.bindings, context),
        }
    }

    /// Sets how much room a multi-receive buffer needs to take another message.
    pub(super) fn set_min_multi_recv(&self, len: usize) {
        if let Body::Rdm(rdm) = &self.body {
            lock(rdm).min_multi_recv = len;
        }
    }

    /// Closes the endpoint. Posted requests are sent first, if that takes no longer than `limit`.
    pub(super) fn close(&self, limit: std::time::Duration) {
        if let Body::Rdm(rdm) = &self.body {
            let deadline = std::time::Instant::now() + limit;
            while !lock(rdm).is_quiet() && std::time::Instant::now() < deadline {
                self.bindings.card.poll();
                lock(rdm).progress(&self.bindings);
                std::thread::yield_now();
            }
            lock(rdm).close(&self.bindings);
        }
        self.bindings.card.close_qp(self.qpn);
        if let Body::Rdm(rdm) = &self.body {
            lock(rdm).free(&self.bindings);
        }
    }

    /// Returns the room in the completion queues that a closed endpoint's requests still hold.
    pub(super) fn release(&self) {
        if let Body::Direct(direct) = &self.body {
            lock(direct).release(&self.bindings);
        }
    }
}

impl Completer for DataPath {
    fn qpn(&self) -> u16 {
        self.qpn
    }

    fn poll_card(&self) {
        self.bindings.card.poll();
    }

    fn complete(&self, raw: &RawCqe) -> Option<Entry> {
        match &self.body {
            Body::Direct(direct) => lock(direct).complete(&self.bindings, raw),
            Body::Rdm(_) => None,
        }
    }

    fn settle(&self) {
        match &self.body {
            Body::Direct(_) => {
                for queue in [&self.bindings.send.queue, &self.bindings.recv.queue].into_iter().flatten() {
                    queue.settle();
                }
            }
            Body::Rdm(rdm) => lock(rdm).progress(&self.bindings),
        }
    }
}
