//! Opening and closing a card's objects.

use std::sync::Arc;
use std::time::Instant;

use efa_dp_direct::wire::CompStatus;

use super::core::{Core, Handle, TCP_LISTENER};
use super::counter::{Counter, EVENTS, Event};
use super::qp::{Qp, State};
use super::queue::{CompletionRing, Watch, WorkQueue};
use super::region::{Keys, Memory};
use crate::address::Gid;

/// Queue pair and handle numbers have 16 bits. 0 is neither, and 0xffff is no handle.
const MAX_NUMBER: u32 = 0xfffe;

/// Why the card refuses a set-up call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// Every queue pair number is in use.
    #[error("the card has no queue pairs left")]
    QueuePairs,
    /// Every address handle number is in use.
    #[error("the card has no address handles left")]
    Handles,
    /// All of the card's counters are in use.
    #[error("the card has {0} completion counters, all in use")]
    Counters(u32),
    /// The system has no memory left for a ring.
    #[error("no memory")]
    Memory,
    /// Something that is open still uses the object.
    #[error("still in use")]
    Busy,
}

impl Core {
    /// Creates a queue pair. The card reads its doorbell after [`enable_qp`](Self::enable_qp).
    ///
    /// # Errors
    /// [`SetupError::QueuePairs`] or [`SetupError::Memory`].
    pub fn open_qp(&mut self, pd: u32, entry_size: u32, sq: u32, rq: u32) -> Result<u16, SetupError> {
        if self.qps.len() as u32 >= MAX_NUMBER {
            return Err(SetupError::QueuePairs);
        }
        if self.qps.bound() == 0 {
            // Number 0 is never given out.
            let queue = || WorkQueue::new(64, 1, 0).map(Arc::new).map_err(|_| SetupError::Memory);
            let reserved = Qp::new(0, 0, u32::MAX, (queue()?, queue()?), 0);
            self.qps.insert(Box::new(reserved));
        }
        let number = self.qps.bound() as u16;
        let queue = |size, n| WorkQueue::new(size, n, number).map(Arc::new).map_err(|_| SetupError::Memory);
        let queues = (queue(entry_size, sq)?, queue(super::queue::RQ_ENTRY_LEN, rq)?);
        let mut qp = Box::new(Qp::new(0, self.random.next_u32() | 1, pd, queues, self.random.next_u32()));
        qp.max_batch = self.config.faults.max_batch.min(sq);
        qp.taken = self.config.faults.cntr_start;
        qp.sq.preset(qp.taken);
        let qpn = self.qps.insert(qp) as u16;
        if let Some(qp) = self.qps.get_mut(u32::from(qpn)) {
            qp.qpn = qpn;
        }
        Ok(qpn)
    }

    /// Starts a queue pair: the card reads its doorbell from now on, and cards on other hosts can connect.
    ///
    /// # Errors
    /// The queue pair, a completion queue or a counter does not exist, or the card cannot listen.
    pub fn enable_qp(
        &mut self,
        qpn: u16,
        send_cq: u32,
        recv_cq: Option<u32>,
        counters: [Vec<u32>; EVENTS],
    ) -> Result<(), SetupError> {
        self.listen()?;
        for id in counters.iter().flatten() {
            self.counters.get_mut(*id).ok_or(SetupError::Busy)?.attached += 1;
        }
        for cq in [Some(send_cq), recv_cq].into_iter().flatten() {
            self.cqs.get_mut(cq).ok_or(SetupError::Busy)?.bound += 1;
        }
        let qp = self.qp(qpn).ok_or(SetupError::QueuePairs)?;
        (qp.send_cq, qp.recv_cq, qp.counters) = (send_cq, recv_cq, counters);
        qp.enabled = true;
        let watch = Watch::new(qpn, qp.sq.clone(), qp.taken);
        self.active.push(watch);
        self.check_queue(qpn);
        Ok(())
    }

    /// Accepts connections from other hosts from now on. A process that only queries its cards never gets here.
    fn listen(&mut self) -> Result<(), SetupError> {
        if !self.listens
            && let Some(listener) = &self.listeners.tcp
        {
            if let Err(error) = listener.listen() {
                self.log(format_args!("cards on other hosts cannot connect: listen: {error}"));
                return Err(SetupError::Memory);
            }
            self.watch(listener.fd(), TCP_LISTENER);
        }
        self.listens = true;
        Ok(())
    }

    /// Attaches a counter to an event of a started queue pair.
    ///
    /// # Errors
    /// The queue pair or the counter does not exist.
    pub fn attach_counter(&mut self, qpn: u16, event: Event, id: u32) -> Result<(), SetupError> {
        let qp = self.qps.get_mut(u32::from(qpn)).filter(|qp| qp.enabled).ok_or(SetupError::QueuePairs)?;
        self.counters.get_mut(id).ok_or(SetupError::Busy)?.attached += 1;
        qp.counters[event as usize].push(id);
        self.check_counter(qpn, event, id);
        Ok(())
    }

    /// Stops taking a queue pair's requests, or resumes with those posted meanwhile (the SQD state).
    pub fn pause_sends(&mut self, qpn: u16, paused: bool) {
        for watch in self.active.iter_mut().filter(|watch| watch.qpn == qpn) {
            watch.paused = paused;
        }
    }

    /// Moves a queue pair to the error state at its owner's request: its requests and receives are flushed.
    pub fn fail_qp(&mut self, qpn: u16) {
        for at in 0..self.connections.bound() {
            self.abort_on(at, qpn);
        }
        let Some(qp) = self.qp(qpn).filter(|qp| qp.enabled) else { return };
        for token in qp.tokens(|_| true) {
            self.retire(token, CompStatus::Flushed.raw());
        }
        self.set_error(qpn);
        self.pause_sends(qpn, false);
    }

    /// Returns a queue pair to its state after creation, with empty rings. Its requests get no completion.
    pub fn reset_qp(&mut self, qpn: u16) {
        self.stop_qp(qpn);
        let (start, serial) = (self.config.faults.cntr_start, self.random.next_u32());
        let Some(qp) = self.qps.get_mut(u32::from(qpn)) else { return };
        qp.sq.clear(start);
        qp.rq.clear(0);
        let mut fresh = Box::new(Qp::new(qpn, qp.qkey, qp.pd, (qp.sq.clone(), qp.rq.clone()), serial));
        (fresh.max_batch, fresh.taken) = (qp.max_batch, start);
        (fresh.datagrams, fresh.unsolicited_writes) = (qp.datagrams, qp.unsolicited_writes);
        let old = std::mem::replace(qp, fresh);
        self.release(&old);
    }

    /// Removes a region and returns its memory, which the caller unmaps. The card takes what is rung first, because
    /// hardware has fetched it by the time the driver's command arrives. Packets no longer reach the memory; requests
    /// that still need it complete in error.
    pub fn close_region(&mut self, keys: Keys) -> Option<Memory> {
        self.poll(Instant::now(), false);
        self.check(|_, card| vec![gin_check::event::Event::RegionGone { card, key: keys.lkey }]);
        self.regions.remove(keys)
    }

    /// Whether a queue pair has rung requests that the wire does not have yet.
    pub(crate) fn has_unsent(&mut self, qpn: u16) -> bool {
        let Some(qp) = self.qp(qpn).filter(|qp| qp.enabled && qp.state == State::Ready) else { return false };
        qp.sq.rung_after(qp.taken) != qp.taken || !qp.tokens(|entry| !entry.awaiting).is_empty()
    }

    /// Whether peers' reads from a queue pair are not answered in full yet.
    pub(crate) fn serves(&self, qpn: u16) -> bool {
        self.dead_since.is_none() && self.connections.iter().any(|(_, connection)| connection.serves(qpn))
    }

    /// Removes a queue pair. Its requests get no completion, and the card refuses packets for it.
    pub fn close_qp(&mut self, qpn: u16) {
        if qpn == 0 {
            return;
        }
        self.stop_qp(qpn);
        if let Some(qp) = self.qps.remove(u32::from(qpn)) {
            self.log_rest_of(&qp);
            self.release(&qp);
        }
    }

    /// Stops all work for a queue pair.
    fn stop_qp(&mut self, qpn: u16) {
        self.active.retain(|watch| watch.qpn != qpn);
        for at in 0..self.connections.bound() {
            self.abort_on(at, qpn);
        }
        if let Some(buffer) = &mut self.reorder_buffer {
            buffer.forget(qpn);
        }
        self.trace_closed(qpn);
        self.check_closed(qpn);
    }

    /// Releases the queues and counters of a queue pair that is gone.
    fn release(&mut self, qp: &Qp) {
        if !qp.enabled {
            return;
        }
        for id in qp.counters.iter().flatten() {
            if let Some(counter) = self.counters.get_mut(*id) {
                counter.attached -= 1;
            }
        }
        for cq in [Some(qp.send_cq), qp.recv_cq].into_iter().flatten() {
            if let Some(cq) = self.cqs.get_mut(cq) {
                cq.bound -= 1;
            }
        }
    }

    /// Adds a counter.
    ///
    /// # Errors
    /// All of the card's counters are in use.
    pub fn open_counter(&mut self, counter: Counter) -> Result<u32, SetupError> {
        let budget = self.config.faults.cntr_budget;
        if self.counters.len() as u32 >= budget {
            return Err(SetupError::Counters(budget));
        }
        Ok(self.counters.insert(counter))
    }

    /// Removes a counter.
    ///
    /// # Errors
    /// [`SetupError::Busy`] while a queue pair uses it.
    pub fn close_counter(&mut self, id: u32) -> Result<Option<Counter>, SetupError> {
        match self.counters.get(id) {
            Some(counter) if counter.attached > 0 => Err(SetupError::Busy),
            _ => Ok(self.counters.remove(id)),
        }
    }

    /// Removes a completion queue.
    ///
    /// # Errors
    /// [`SetupError::Busy`] while a queue pair uses it.
    pub fn close_cq(&mut self, id: u32) -> Result<Option<CompletionRing>, SetupError> {
        match self.cqs.get(id) {
            Some(cq) if cq.bound > 0 => Err(SetupError::Busy),
            _ => Ok(self.cqs.remove(id)),
        }
    }

    /// Returns a protection domain's address handle for a card, creating it if there is none.
    ///
    /// # Errors
    /// No number is left.
    pub fn open_handle(&mut self, pd: u32, gid: Gid) -> Result<u16, SetupError> {
        let gid = if self.inherited_gid == Some(gid) { self.gid } else { gid };
        if let Some(ahn) = self.handle_of.get(&(pd, gid)) {
            if let Some(handle) = self.handles.get_mut(*ahn) {
                handle.uses += 1;
            }
            return Ok(*ahn as u16);
        }
        if self.handles.bound() == 0 {
            // Number 0 is never given out: an empty entry of a target table must name no card.
            self.handles.insert(Handle { pd, gid, uses: 0 });
        }
        if self.handles.len() as u32 > MAX_NUMBER {
            return Err(SetupError::Handles);
        }
        let ahn = self.handles.insert(Handle { pd, gid, uses: 1 });
        self.handle_of.insert((pd, gid), ahn);
        self.remote_cards.entry(gid).or_default().handles += 1;
        self.set_has_handle(&gid);
        Ok(ahn as u16)
    }

    /// Returns an address handle's card.
    pub fn card_of(&self, ahn: u16) -> Option<Gid> {
        self.handles.get(u32::from(ahn)).map(|handle| handle.gid)
    }

    /// Releases an address handle; the last user removes it.
    pub fn close_handle(&mut self, ahn: u16) {
        let Some(handle) = self.handles.get_mut(u32::from(ahn)) else { return };
        handle.uses = handle.uses.saturating_sub(1);
        if handle.uses == 0 && ahn != 0 {
            let (pd, gid) = (handle.pd, handle.gid);
            self.handles.remove(u32::from(ahn));
            self.handle_of.remove(&(pd, gid));
            if let Some(card) = self.remote_cards.get_mut(&gid) {
                card.handles = card.handles.saturating_sub(1);
            }
            self.set_has_handle(&gid);
        }
    }

    /// Whether this card has an address handle for another, in any protection domain.
    pub(crate) fn has_handle(&self, gid: &Gid) -> bool {
        self.remote_cards.get(gid).is_some_and(|card| card.handles > 0)
    }

    /// Records on a peer's connections whether this card has a handle for it: RDMA from a peer needs one, as on
    /// hardware.
    fn set_has_handle(&mut self, gid: &Gid) {
        let has_handle = self.has_handle(gid);
        for at in 0..self.connections.bound() {
            if let Some(connection) = self.connections.get_mut(at).filter(|c| c.peer == Some(*gid)) {
                connection.has_handle = has_handle;
            }
        }
    }
}
