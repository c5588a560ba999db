//! The receive queue: its descriptors, the messages that peers send into them, and receive completions.
#![allow(unsafe_code)]

use efa_dp_direct::cq::{RecvCqe, Sender, Status};
use efa_dp_direct::wire::{CompStatus, RxDesc, SendOp};

use super::complete::OK;
use super::core::Core;
use super::counter::Event;
use super::qp::{RNR_RETRY_UNLIMITED, Token};
use super::request::MAX_SEND_SIZE;
use crate::address::Gid;
use crate::memory;
use crate::wire::packet::{Header, Kind};

/// Maximum number of a receive's buffers.
const MAX_BUFFERS: usize = 2;
/// Bytes before a datagram in its receive: room for a global routing header, which the card does not write.
pub const DATAGRAM_HEADER: u32 = 40;
/// Length of a message that may be an emulated signal.
const MESSAGE: u32 = 32;
/// Delay before retrying a send that found no receive. Where the card retries forever, each retry doubles it, up to
/// `RNR_DOUBLINGS` times. Where it gives up, the delay doubles in larger steps, `RNR_LAST_DOUBLINGS` times by the last
/// retry. A program that gives up waits much longer itself, so the retries span some 50 ms, however many they are.
const RNR_DELAY_US: u64 = 20;
const RNR_DOUBLINGS: u32 = 6;
const RNR_LAST_DOUBLINGS: u32 = 11;

/// The next entry of a receive queue.
enum Posted {
    Nothing,
    /// The receive at this index violates a rule.
    Violation(u32, String),
    Receive {
        buffers: [RxDesc; MAX_BUFFERS],
        count: usize,
    },
}

impl Core {
    /// Handles a peer's send.
    pub(crate) fn receive_send(&mut self, at: u32, header: &Header, payload: *const u8) {
        let status = self.deliver_send(at, header, payload);
        self.answer(at, Header { status: status.raw(), ..Header::new(Kind::Ack, header.token) });
    }

    fn deliver_send(&mut self, at: u32, header: &Header, payload: *const u8) -> CompStatus {
        let pd = match self.target_domain(header, "send") {
            Ok(pd) => pd,
            Err(status) => return status,
        };
        if header.total > MAX_SEND_SIZE {
            return CompStatus::RemoteBadLength;
        }
        let datagrams = self.qp(header.dst_qpn).is_some_and(|qp| qp.datagrams);
        let (buffers, count) = match self.next_receive(header.dst_qpn) {
            Posted::Nothing if datagrams => {
                self.statistics.rx_drops += 1;
                return CompStatus::Ok;
            }
            Posted::Nothing => return CompStatus::RemoteRnr,
            Posted::Violation(index, rule) => {
                self.fail_receives(header.dst_qpn, index, &rule);
                return CompStatus::RemoteBadDestQpn;
            }
            Posted::Receive { buffers, count } => (buffers, count),
        };
        let index = self.qp(header.dst_qpn).map_or(0, |qp| qp.rq_taken.wrapping_sub(count as u32));
        self.trace_receive(header.dst_qpn, index, &buffers[..count]);
        let req_id = buffers[0].req_id;
        let skip = if datagrams { DATAGRAM_HEADER } else { 0 };
        let (status, answer) = match self.scatter(pd, &buffers[..count], skip, header, payload) {
            Ok(()) => (CompStatus::Ok, CompStatus::Ok),
            // A datagram's sender does not hear of it.
            Err(status) if datagrams => (status, CompStatus::Ok),
            Err(CompStatus::LocalBadLength) => (CompStatus::LocalBadLength, CompStatus::RemoteBadLength),
            Err(status) => (status, CompStatus::RemoteAbort),
        };
        if status != CompStatus::Ok {
            self.log(format_args!(
                "QP {} receive {req_id}: a message of {} bytes cannot be written to the buffers of its receive: {status}",
                header.dst_qpn, header.total
            ));
        }
        if status == CompStatus::Ok && header.total == MESSAGE {
            self.check_message(at, header, || {
                let mut bytes = [0; MESSAGE as usize];
                // SAFETY: the wire keeps `total` payload bytes, which are as many as the array has.
                unsafe { memory::copy(bytes.as_mut_ptr(), payload, bytes.len()) };
                bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
            });
        }
        self.push_receive(at, header, skip, SendOp::Send, Some(req_id), status);
        self.count(Event::Recv, (status == CompStatus::Ok).then_some(header.total));
        self.tick(header.dst_qpn, Event::Recv, status != CompStatus::Ok);
        answer
    }

    /// Takes the next receive from the ring.
    fn next_receive(&mut self, qpn: u16) -> Posted {
        let Some(qp) = self.qp(qpn) else { return Posted::Nothing };
        let (rung, from) = (qp.rq.rung_after(qp.rq_taken), qp.rq_taken);
        let posted = rung.wrapping_sub(from);
        if posted == 0 {
            return Posted::Nothing;
        }
        if posted > qp.rq.entries {
            let rule = format!(
                "the receive doorbell went from {from} to {rung}: the ring has {} entries, and a doorbell never goes backwards",
                qp.rq.entries
            );
            return Posted::Violation(from, rule);
        }
        let mut buffers = [RxDesc::single(0, 0, 0, 0); MAX_BUFFERS];
        for count in 1..=MAX_BUFFERS {
            let index = from.wrapping_add(count as u32 - 1);
            if count as u32 > posted {
                return Posted::Violation(from, "the receive has no last buffer".into());
            }
            let desc = qp.rq.fetch_receive(index);
            buffers[count - 1] = desc;
            let control = desc.lkey_ctrl;
            if control.with_lkey(0).with_first(false).with_last(false).0 != 0 {
                return Posted::Violation(index, "a reserved bit of the receive is set".into());
            }
            if control.first() != (count == 1) {
                return Posted::Violation(index, "a receive begins in the middle of another".into());
            }
            if control.last() {
                qp.rq_taken = index.wrapping_add(1);
                return Posted::Receive { buffers, count };
            }
        }
        Posted::Violation(from, format!("a receive of more than {MAX_BUFFERS} buffers"))
    }

    /// Copies a message into a receive's buffers, after their first `skip` bytes.
    fn scatter(
        &self,
        pd: u32,
        buffers: &[RxDesc],
        mut skip: u32,
        header: &Header,
        payload: *const u8,
    ) -> Result<(), CompStatus> {
        let room: u64 = buffers.iter().map(|b| u64::from(b.length)).sum();
        if room < u64::from(header.len) + u64::from(skip) {
            return Err(CompStatus::LocalBadLength);
        }
        let mut done = 0;
        for buffer in buffers {
            let before = skip.min(buffer.length.into());
            skip -= before;
            let len = (u32::from(buffer.length) - before).min(header.len - done);
            if len == 0 {
                continue;
            }
            let to = self
                .regions
                .local(pd, buffer.lkey_ctrl.lkey(), buffer.addr().wrapping_add(before.into()), len, true)
                .map_err(|_| CompStatus::LocalInvalidLkey)?;
            // SAFETY: `Regions::local` found `len` writable bytes at `to`. The wire keeps `header.len` payload bytes,
            // and `done` of them are copied already.
            unsafe { to.write(payload.wrapping_add(done as usize), len as usize) }
                .map_err(|_| CompStatus::LocalInvalidLkey)?;
            done += len;
        }
        Ok(())
    }

    /// Takes a receive for a write with immediate data, and leaves its buffers alone; `None` if such writes take none.
    pub(crate) fn take_receive_of_write(&mut self, qpn: u16) -> Result<Option<u16>, CompStatus> {
        if self.qp(qpn).is_none_or(|qp| qp.unsolicited_writes) {
            return Ok(None);
        }
        match self.next_receive(qpn) {
            Posted::Nothing => Err(CompStatus::RemoteRnr),
            Posted::Violation(index, rule) => {
                self.fail_receives(qpn, index, &rule);
                Err(CompStatus::RemoteBadDestQpn)
            }
            Posted::Receive { buffers, .. } => Ok(Some(buffers[0].req_id)),
        }
    }

    /// Reports a write with immediate data.
    pub(crate) fn report_write(&mut self, at: u32, header: &Header, receive: Option<u16>) {
        self.check_message(at, header, || header.immediate().map(u64::from).into_iter().collect());
        self.push_receive(at, header, 0, SendOp::RdmaWrite, receive, CompStatus::Ok);
        if receive.is_some() {
            self.tick(header.dst_qpn, Event::Recv, false);
        }
    }

    /// Reports a message in receive `req_id`, or in none.
    fn push_receive(
        &mut self,
        at: u32,
        header: &Header,
        skipped: u32,
        op: SendOp,
        req_id: Option<u16>,
        status: CompStatus,
    ) {
        // The message may be a reply to requests whose completion is held back.
        if self.reorder_buffer.is_some() && self.qp(header.dst_qpn).is_some_and(|qp| qp.recv_cq.is_some()) {
            self.complete_held(header.dst_qpn, at);
        }
        let from = self.connections.get(at).and_then(|c| c.peer);
        let pd = self.qp(header.dst_qpn).map_or(0, |qp| qp.pd);
        let sender = match from.and_then(|gid| self.handle_of.get(&(pd, gid))) {
            Some(ahn) => Sender::Ah(*ahn as u16),
            None => Sender::Gid(from.map(|gid| gid.to_bytes())),
        };
        let cqe = RecvCqe {
            qp_num: header.dst_qpn,
            req_id: req_id.unwrap_or(0),
            op: Ok(op),
            status: Status::Known(status),
            length: header.total + skipped,
            imm: header.immediate(),
            unsolicited: req_id.is_none(),
            src_qp_num: header.src_qpn,
            sender,
        };
        self.complete_receive(from, &cqe);
    }

    fn complete_receive(&mut self, from: Option<Gid>, cqe: &RecvCqe) {
        self.trace_received(from, cqe);
        let cq = self.qp(cqe.qp_num).and_then(|qp| qp.recv_cq);
        if let Some(cq) = cq.and_then(|cq| self.cqs.get_mut(cq)) {
            cq.append(|phase| cqe.emit(phase));
        }
    }

    /// Handles a violation by the receive queue: the queue pair goes to the error state.
    fn fail_receives(&mut self, qpn: u16, index: u32, rule: &str) {
        let Some(qp) = self.qp(qpn) else { return };
        let (desc, slot) = (qp.rq.fetch_receive(index), qp.rq.slot_of(index));
        qp.rq_taken = index.wrapping_add(1);
        let [low, high] = desc.to_words().map(u64::swap_bytes);
        self.log(format_args!("QP {qpn} receive slot {slot}: {rule}; receive {index}: {low:016x}{high:016x}"));
        self.trace_receive(qpn, index, &[desc]);
        self.complete_receive(None, &failed_receive(qpn, desc.req_id, CompStatus::LocalQpInternalError));
        self.tick(qpn, Event::Recv, true);
        self.set_error(qpn);
    }

    /// Flushes the posted receives of a queue pair in error.
    pub(crate) fn flush_receives(&mut self, qpn: u16) {
        let Some(qp) = self.qp(qpn) else { return };
        let (from, rung) = (qp.rq_taken, qp.rq.rung_after(qp.rq_taken));
        qp.rq_taken = rung;
        for n in 0..rung.wrapping_sub(from).min(qp.rq.entries) {
            let index = from.wrapping_add(n);
            let Some(desc) = self.qp(qpn).map(|qp| qp.rq.fetch_receive(index)) else { return };
            if desc.lkey_ctrl.first() {
                self.trace_receive(qpn, index, &[desc]);
                self.complete_receive(None, &failed_receive(qpn, desc.req_id, CompStatus::Flushed));
                self.tick(qpn, Event::Recv, true);
            }
        }
    }

    /// Schedules a retry of a send whose peer had no receive. Returns false if the retries are used up.
    pub(crate) fn retry_send(&mut self, token: Token) -> bool {
        let now = self.clock_us;
        let Some(qp) = self.qp(token.qpn()) else { return false };
        let limit = qp.rnr_retry;
        let Some(entry) = qp.get(token) else { return false };
        if limit < RNR_RETRY_UNLIMITED && entry.retries >= limit {
            return false;
        }
        (entry.sent, entry.awaiting) = (0, false);
        let retries = u32::from(entry.retries);
        let doublings = if limit < RNR_RETRY_UNLIMITED {
            RNR_LAST_DOUBLINGS * (retries + 1) / u32::from(limit)
        } else {
            retries.min(RNR_DOUBLINGS)
        };
        let delay = RNR_DELAY_US << doublings;
        entry.retries = entry.retries.saturating_add(1);
        self.unready.push((now + delay, token));
        true
    }

    /// Queues the sends whose retry is due. Returns true if there were any.
    pub(crate) fn poll_unready(&mut self) -> bool {
        let mut moved = false;
        let mut i = 0;
        while let Some((due, token)) = self.unready.get(i).copied() {
            if due > self.clock_us {
                i += 1;
                continue;
            }
            self.unready.remove(i);
            moved = true;
            let connection = self.outstanding(token).and_then(|entry| entry.connection);
            if let Some(connection) = connection.and_then(|at| self.connections.get_mut(at)) {
                connection.requests.push_back(token);
            }
        }
        moved
    }
}

fn failed_receive(qpn: u16, req_id: u16, status: CompStatus) -> RecvCqe {
    RecvCqe {
        qp_num: qpn,
        req_id,
        op: Ok(SendOp::Send),
        status: Status::Known(status),
        length: 0,
        imm: None,
        unsolicited: false,
        src_qp_num: 0,
        sender: Sender::Gid(None),
    }
}

/// Status of a send whose peer has no receive.
pub(crate) const NOT_READY: u8 = CompStatus::RemoteRnr.raw();
const _: () = assert!(NOT_READY != OK);
