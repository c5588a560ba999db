//! Completing requests: completion entries and counters.

use efa_dp_direct::cq::{SendCqe, Status};
use efa_dp_direct::wire::{CompStatus, SendOp, TxMetaDesc};

use super::core::Core;
use super::counter::Event;
use super::qp::Token;
use super::reorder::Step;
use super::request::Operation;

/// Status of a request that succeeded.
pub(crate) const OK: u8 = CompStatus::Ok.raw();

/// A work request that completes.
pub(crate) struct Completed {
    pub index: u32,
    pub status: u8,
    /// Bytes transferred.
    pub length: u32,
    /// The event to count; `None` counts as an error for every event.
    pub event: Option<Event>,
}

pub(crate) fn event_of(op_type: u8) -> Option<Event> {
    Some(match SendOp::from_raw(op_type)? {
        SendOp::Send => Event::Send,
        SendOp::RdmaRead => Event::Read,
        SendOp::RdmaWrite => Event::Write,
        SendOp::FastReg | SendOp::FastInv => return None,
    })
}

impl Core {
    /// Completes a request, at once or, with faults, later.
    pub(crate) fn finish(&mut self, token: Token, status: u8) {
        let now = self.now();
        match &mut self.reorder_buffer {
            Some(buffer) => buffer.push(token, Step::Complete(status), now),
            None => self.retire(token, status),
        }
    }

    /// Completes a request with the other card's answer, or without one. Datagrams are unacknowledged: one is complete
    /// once it is sent, even if no card takes it.
    pub(crate) fn conclude(&mut self, token: Token, status: CompStatus) {
        let datagrams = self.qp(token.qpn()).is_some_and(|qp| qp.datagrams);
        let unknown = datagrams && status != CompStatus::LocalInvalidAh;
        self.finish(token, if unknown { OK } else { status.raw() });
    }

    /// Completes a queue pair's requests that the card at the other end of a connection has answered but faults hold
    /// back.
    pub(crate) fn complete_held(&mut self, qpn: u16, at: u32) {
        let peer_of = |core: &Self, at: u32| core.connections.get(at).and_then(|connection| connection.peer);
        let from = peer_of(self, at);
        self.retire_held(qpn, |core, at| peer_of(core, at) == from);
    }

    /// Completes the requests that were answered on a connection but that faults hold back. They would fail with the
    /// connection.
    pub(crate) fn complete_answered_on(&mut self, at: u32) {
        for qpn in 0..self.qps.bound() {
            self.retire_held(qpn as u16, |_, connection| connection == at);
        }
    }

    /// Completes a queue pair's requests that faults hold back and whose connection is `wanted`.
    fn retire_held(&mut self, qpn: u16, wanted: impl Fn(&Self, u32) -> bool) {
        let Some(mut buffer) = self.reorder_buffer.take() else { return };
        let qp = self.qps.get(u32::from(qpn));
        let connection_of = |token| qp.and_then(|qp| qp.find(token)).and_then(|entry| entry.connection);
        let held = buffer.take_completions(qpn, |token| connection_of(token).is_some_and(|at| wanted(self, at)));
        self.reorder_buffer = Some(buffer);
        for (token, status) in held {
            self.retire(token, status);
        }
    }

    /// Writes a request's completion and removes the request.
    pub(crate) fn retire(&mut self, token: Token, status: u8) {
        let qpn = token.qpn();
        self.trace_retired(token, status);
        let Some(qp) = self.qp(qpn) else { return };
        let Some(entry) = qp.take(token) else { return };
        let (meta, connection, len) = (entry.request.meta, entry.connection, entry.request.len);
        let event = match entry.request.operation {
            Operation::Send => Event::Send,
            Operation::Write => Event::Write,
            Operation::Read => Event::Read,
        };
        qp.outstanding -= 1;
        if let Some(connection) = connection.and_then(|at| self.connections.get_mut(at)) {
            connection.waiting = connection.waiting.saturating_sub(1);
        }
        if status != OK || meta.ctrl2.comp_req() {
            self.push_completion(qpn, &meta, status);
        }
        self.count(event, (status == OK).then_some(len));
        self.tick(qpn, event, status != OK);
        self.check_retired(token, event, status != OK);
    }

    /// Counts a completed request in the card's statistics, with its bytes if it succeeded. This comes before the queue
    /// pair's counters, so that statistics read after a counter include its requests.
    pub(crate) fn count(&mut self, event: Event, bytes: Option<u32>) {
        let all = &mut self.statistics;
        let (requests, total, errors) = match event {
            Event::Write => (&mut all.rdma_write_wrs, &mut all.rdma_write_bytes, Some(&mut all.rdma_write_wr_err)),
            Event::Read => (&mut all.rdma_read_wrs, &mut all.rdma_read_bytes, Some(&mut all.rdma_read_wr_err)),
            Event::Send => (&mut all.send_wrs, &mut all.send_bytes, None),
            Event::Recv => (&mut all.recv_wrs, &mut all.recv_bytes, None),
            Event::RemoteWrite | Event::RemoteRead => return,
        };
        match (bytes, errors) {
            (Some(bytes), _) => {
                *requests += 1;
                *total += u64::from(bytes);
            }
            (None, Some(errors)) => *errors += 1,
            (None, None) => {}
        }
    }

    /// Completes, in error, a request that never entered the table.
    pub(crate) fn complete_rejected(&mut self, qpn: u16, index: u32, meta: &TxMetaDesc, status: CompStatus) {
        let fatal = matches!(status, CompStatus::LocalQpInternalError | CompStatus::Flushed);
        let event = event_of(meta.ctrl1.op_type()).filter(|_| !fatal);
        self.trace_completion(qpn, meta, &Completed { index, status: status.raw(), length: 0, event });
        self.push_completion(qpn, meta, status.raw());
        if let Some(event) = event_of(meta.ctrl1.op_type()) {
            self.count(event, None);
        }
        match event {
            Some(event) => self.tick(qpn, event, true),
            // The operation is unknown or the queue pair is in error: all of the queue pair's counters count the error.
            None => self.tick_all_errors(qpn),
        }
    }

    fn tick_all_errors(&mut self, qpn: u16) {
        let Some(qp) = self.qp(qpn) else { return };
        let events = [Event::Send, Event::Write, Event::Read];
        let mut ids: Vec<u32> = events.iter().flat_map(|event| qp.counters[*event as usize].iter().copied()).collect();
        ids.sort_unstable();
        ids.dedup();
        for id in ids {
            if let Some(counter) = self.counters.get_mut(id) {
                counter.errors.add(1);
            }
        }
    }

    fn push_completion(&mut self, qpn: u16, meta: &TxMetaDesc, status: u8) {
        let cqe = cqe_of(qpn, meta, status);
        let Some(cq) = self.qp(qpn).map(|qp| qp.send_cq) else { return };
        if let Some(cq) = self.cqs.get_mut(cq) {
            cq.append(|phase| cqe.emit(phase));
        }
    }
}

/// Builds a request's completion.
#[inline(always)]
pub(crate) fn cqe_of(qpn: u16, meta: &TxMetaDesc, status: u8) -> SendCqe {
    let raw = meta.ctrl1.op_type() & 0x7;
    SendCqe {
        qp_num: qpn,
        wr_id: meta.req_id_ex.wr_id(meta.req_id),
        op: SendOp::from_raw(raw).ok_or(raw),
        status: Status::from_raw(status),
    }
}
