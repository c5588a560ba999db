//! Receives: descriptors of the receive queue, what peers send into them, and the completions of both.
#![allow(unsafe_code)]

use efa_dp_direct::cq::{RecvCqe, Sender, Status};
use efa_dp_direct::wire::{CompStatus, RxDesc, SendOp};

use super::complete::OK;
use super::core::Core;
use super::counter::Event;
use super::qp::Token;
use super::request::MAX_SEND_SIZE;
use crate::wire::packet::{Header, Kind};

/// Buffers that one receive may be made of.
const MAX_BUFFERS: usize = 2;
/// Retries of a sender whose peer has no receive: this many mean for ever (as `ibv_qp_attr.rnr_retry`).
pub const RNR_FOR_EVER: u8 = 7;
/// Least and most time before a send that found no receive is tried again.
const RNR_DELAY_US: (u64, u64) = (20, 1280);

/// What the receive queue has for a message.
enum Posted {
    Nothing,
    /// A rule broken at this index.
    Broken(u32, String),
    Receive {
        buffers: [RxDesc; MAX_BUFFERS],
        count: usize,
    },
}

impl Core {
    /// A peer sends.
    pub(crate) fn receive_send(&mut self, at: u32, header: &Header, payload: *const u8) {
        let status = self.place_send(at, header, payload);
        self.answer(at, Header { status: status.raw(), ..Header::new(Kind::Ack, header.token) });
    }

    fn place_send(&mut self, at: u32, header: &Header, payload: *const u8) -> CompStatus {
        let pd = match self.addressed(header, "send") {
            Ok(pd) => pd,
            Err(status) => return status,
        };
        if header.total > MAX_SEND_SIZE {
            return CompStatus::RemoteBadLength;
        }
        let (buffers, count) = match self.next_receive(header.dst_qpn) {
            Posted::Nothing => return CompStatus::RemoteRnr,
            Posted::Broken(index, rule) => {
                self.fail_receives(header.dst_qpn, index, &rule);
                return CompStatus::RemoteBadDestQpn;
            }
            Posted::Receive { buffers, count } => (buffers, count),
        };
        let req_id = buffers[0].req_id;
        let (status, answer) = match self.scatter(pd, &buffers[..count], header, payload) {
            Ok(()) => (CompStatus::Ok, CompStatus::Ok),
            Err(CompStatus::LocalBadLength) => (CompStatus::LocalBadLength, CompStatus::RemoteBadLength),
            Err(status) => (status, CompStatus::RemoteAbort),
        };
        if status != CompStatus::Ok {
            self.say(format_args!(
                "QP {} receive {req_id}: a message of {} bytes does not go where it was posted: {status}",
                header.dst_qpn, header.total
            ));
        }
        self.push_receive(at, header, SendOp::Send, req_id, status);
        self.tick(header.dst_qpn, Event::Recv, status != CompStatus::Ok);
        answer
    }

    /// Takes the next receive out of the ring.
    fn next_receive(&mut self, qpn: u16) -> Posted {
        let Some(qp) = self.qp(qpn) else { return Posted::Nothing };
        let (rung, from) = (qp.rq.rung(), qp.rq_taken);
        let posted = rung.wrapping_sub(from);
        if posted == 0 {
            return Posted::Nothing;
        }
        if posted > qp.rq.entries {
            let rule = format!(
                "the receive doorbell went from {from} to {rung}: the ring has {} entries, and a doorbell never goes back",
                qp.rq.entries
            );
            return Posted::Broken(from, rule);
        }
        let mut buffers = [RxDesc::single(0, 0, 0, 0); MAX_BUFFERS];
        for count in 1..=MAX_BUFFERS {
            let index = from.wrapping_add(count as u32 - 1);
            if count as u32 > posted {
                return Posted::Broken(from, "the last receive has no last buffer".into());
            }
            let desc = qp.rq.fetch_receive(index);
            buffers[count - 1] = desc;
            let control = desc.lkey_ctrl;
            if control.with_lkey(0).with_first(false).with_last(false).0 != 0 {
                return Posted::Broken(index, "a reserved bit of the receive is set".into());
            }
            if control.first() != (count == 1) {
                return Posted::Broken(index, "a receive begins in the middle of another".into());
            }
            if control.last() {
                qp.rq_taken = index.wrapping_add(1);
                return Posted::Receive { buffers, count };
            }
        }
        Posted::Broken(from, format!("a receive of more than {MAX_BUFFERS} buffers"))
    }

    /// Copies a message into the buffers of a receive.
    fn scatter(&self, pd: u32, buffers: &[RxDesc], header: &Header, payload: *const u8) -> Result<(), CompStatus> {
        let room: u64 = buffers.iter().map(|b| u64::from(b.length)).sum();
        if room < u64::from(header.len) {
            return Err(CompStatus::LocalBadLength);
        }
        let mut done = 0;
        for buffer in buffers {
            let len = u32::from(buffer.length).min(header.len - done);
            if len == 0 {
                break;
            }
            let to = self
                .regions
                .local(pd, buffer.lkey_ctrl.lkey(), buffer.addr(), len, true)
                .map_err(|_| CompStatus::LocalInvalidLkey)?;
            // SAFETY: the region holds `len` bytes there, and the payload `header.len` of which `done` are behind us.
            unsafe { to.write(payload.wrapping_add(done as usize), len as usize) }
                .map_err(|_| CompStatus::LocalInvalidLkey)?;
            done += len;
        }
        Ok(())
    }

    /// A write with immediate data arrived, all of it: nothing was posted for it, and it takes nothing.
    pub(crate) fn push_unsolicited(&mut self, at: u32, header: &Header) {
        self.push_receive(at, header, SendOp::RdmaWrite, 0, CompStatus::Ok);
    }

    fn push_receive(&mut self, at: u32, header: &Header, op: SendOp, req_id: u16, status: CompStatus) {
        let from = self.connections.get(at).and_then(|c| c.peer);
        let sender = match from.and_then(|gid| self.handle_of.get(&gid)) {
            Some(ahn) => Sender::Ah(*ahn as u16),
            None => Sender::Gid(from.map(|gid| gid.to_bytes())),
        };
        let cqe = RecvCqe {
            qp_num: header.dst_qpn,
            req_id,
            op: Ok(op),
            status: Status::Known(status),
            length: header.total,
            imm: header.immediate(),
            unsolicited: op == SendOp::RdmaWrite,
            src_qp_num: header.src_qpn,
            sender,
        };
        self.complete_receive(&cqe);
    }

    fn complete_receive(&mut self, cqe: &RecvCqe) {
        let Some(cq) = self.qp(cqe.qp_num).and_then(|qp| qp.recv_cq) else { return };
        if let Some(cq) = self.cqs.get_mut(cq) {
            cq.append(|phase| cqe.emit(phase));
        }
    }

    /// A broken rule of the receive queue: the queue pair goes to the error state.
    fn fail_receives(&mut self, qpn: u16, index: u32, rule: &str) {
        let Some(qp) = self.qp(qpn) else { return };
        let (desc, slot) = (qp.rq.fetch_receive(index), qp.rq.slot_of(index));
        qp.rq_taken = index.wrapping_add(1);
        let [low, high] = desc.to_words().map(u64::swap_bytes);
        self.say(format_args!("QP {qpn} receive slot {slot}: {rule}; receive {index}: {low:016x}{high:016x}"));
        self.complete_receive(&failed_receive(qpn, desc.req_id, CompStatus::LocalQpInternalError));
        self.tick(qpn, Event::Recv, true);
        self.set_error(qpn);
    }

    /// Receives that are posted on a queue pair in error will get nothing.
    pub(crate) fn flush_receives(&mut self, qpn: u16) {
        let Some(qp) = self.qp(qpn) else { return };
        let (from, rung) = (qp.rq_taken, qp.rq.rung());
        qp.rq_taken = rung;
        for n in 0..rung.wrapping_sub(from).min(qp.rq.entries) {
            let Some(desc) = self.qp(qpn).map(|qp| qp.rq.fetch_receive(from.wrapping_add(n))) else { return };
            if desc.lkey_ctrl.first() {
                self.complete_receive(&failed_receive(qpn, desc.req_id, CompStatus::Flushed));
                self.tick(qpn, Event::Recv, true);
            }
        }
    }

    /// The peer had no receive for a send. True when the send is tried again.
    pub(crate) fn retry_send(&mut self, token: Token) -> bool {
        let now = self.clock_us;
        let Some(qp) = self.qp(token.qpn()) else { return false };
        let limit = qp.rnr_retry;
        let Some(entry) = qp.get(token) else { return false };
        if limit < RNR_FOR_EVER && entry.retries >= limit {
            return false;
        }
        (entry.sent, entry.awaiting) = (0, false);
        let delay = (RNR_DELAY_US.0 << entry.retries.min(6)).min(RNR_DELAY_US.1);
        entry.retries = entry.retries.saturating_add(1);
        self.unready.push((now + delay, token));
        true
    }

    /// Sends whose time has come are tried again. True when there were any.
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

/// The status of a peer without a receive.
pub(crate) const NOT_READY: u8 = CompStatus::RemoteRnr.raw();
const _: () = assert!(NOT_READY != OK);
