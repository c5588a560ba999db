//! The responder: executes peers' requests, in order for each queue pair.

use std::time::Instant;

use mlx5::wire::{CqeOpcode, Syndrome};

use super::core::Core;
use super::cq::Completion;
use super::frame::{self, Frame, Header, Kind, MAX_PAYLOAD};
use super::mkey::{Right, Target};
use super::qp::{Incoming, State};
use super::receive::Receive;
use super::requester::{BACKLOG, walk};
use super::shared::{atomic, copy_from, copy_to};

/// The state of the request at the head of the inbox.
enum Outcome {
    /// The request is finished; the status is for the answer, if it gets one.
    Finished(Option<u8>),
    /// More of the answer has yet to be sent.
    Continues,
    /// The request waits for a receive, or for room on the connection.
    Waits,
}

/// Bytes of the header that precedes a datagram's data in a receive.
const GRH: u64 = 40;
/// The RNR timeout of a peer that waits indefinitely.
pub(super) const ENDLESS_MS: u64 = u64::MAX;

impl Core {
    /// Handles the frames that have arrived for a queue pair. Returns true if there was work.
    pub(super) fn respond(&mut self, qpn: u32) -> bool {
        let mut moved = false;
        loop {
            let Some(qp) = self.qps.get_mut(&qpn) else { return moved };
            if qp.state == State::Error {
                qp.inbox.clear();
                return moved;
            }
            let Some((connection, frame)) = qp.inbox.pop_front() else { return moved };
            match self.serve(qpn, connection, &frame) {
                Outcome::Finished(status) => {
                    moved = true;
                    if let Some(status) = status {
                        self.answer(connection, &frame.header, status);
                    }
                }
                Outcome::Continues => {
                    moved = true;
                    self.put_back(qpn, connection, frame);
                }
                Outcome::Waits => {
                    self.put_back(qpn, connection, frame);
                    return moved;
                }
            }
        }
    }

    fn put_back(&mut self, qpn: u32, connection: u32, frame: Frame) {
        if let Some(qp) = self.qps.get_mut(&qpn) {
            qp.inbox.push_front((connection, frame));
        }
    }

    fn answer(&mut self, connection: u32, asked: &Header, status: u8) {
        if let Some(connection) = self.connections.get_mut(&connection) {
            let (src, dst) = (asked.dst_qpn.get(), asked.src_qpn.get());
            connection.push(&Header { status, ..Header::new(Kind::Ack, src, dst, asked.token.get()) });
        }
    }

    /// Refuses a request: the peer gets a negative acknowledgement, and this queue pair goes to the error state.
    fn refuse(&mut self, qpn: u32, frame: &Frame, syndrome: Syndrome, why: &str) -> Outcome {
        let header = &frame.header;
        self.log(format_args!(
            "QP {qpn:#x}: {:?} of {} bytes at {:#x} with rkey {:#x} from QP {:#x}: {why}",
            frame.kind,
            header.total.get(),
            header.addr.get(),
            header.rkey.get(),
            header.src_qpn.get()
        ));
        self.break_qp(qpn);
        Outcome::Finished(Some(syndrome.code()))
    }

    fn serve(&mut self, qpn: u32, connection: u32, frame: &Frame) -> Outcome {
        let Some(qp) = self.qps.get(&qpn) else { return Outcome::Finished(None) };
        let from = frame.header.src_qpn.get();
        match (frame.kind, qp.peer) {
            (Kind::Datagram, _) => return self.take_datagram(qpn, frame),
            // The peer has connected before this side.
            (_, None) => return Outcome::Waits,
            (_, Some(peer)) if peer.qpn != from => {
                self.log(format_args!("QP {qpn:#x}: a request from QP {from:#x}, to which it is not connected"));
                return Outcome::Finished(Some(Syndrome::TransportRetryExceeded.code()));
            }
            _ => {}
        }
        match frame.kind {
            Kind::Send => self.take_message(qpn, frame),
            Kind::Write => self.take_write(qpn, frame),
            Kind::Read => self.take_read(qpn, connection, frame),
            Kind::CompareSwap | Kind::FetchAdd => self.take_atomic(qpn, connection, frame),
            Kind::Hello | Kind::Ack | Kind::Data | Kind::Datagram => Outcome::Finished(None),
        }
    }

    /// Waits for a receive until the peer's RNR timeout.
    fn without_receive(&mut self, qpn: u32, frame: &Frame) -> Outcome {
        let rnr_timeout = frame.header.operand.get();
        let Some(qp) = self.qps.get_mut(&qpn) else { return Outcome::Finished(None) };
        let since = *qp.unready.get_or_insert_with(Instant::now);
        if rnr_timeout == ENDLESS_MS || since.elapsed().as_millis() < u128::from(rnr_timeout) {
            return Outcome::Waits;
        }
        self.refuse(qpn, frame, Syndrome::RnrRetryExceeded, "no receive was posted in time")
    }

    fn take_message(&mut self, qpn: u32, frame: &Frame) -> Outcome {
        let header = &frame.header;
        if header.offset.get() == 0 {
            let Some(receive) = self.take_receive(qpn) else { return self.without_receive(qpn, frame) };
            if let Some(qp) = self.qps.get_mut(&qpn) {
                qp.unready = None;
                qp.incoming = Some(Incoming { receive: Some(receive), target: None });
            }
        }
        let incoming = self.qps.get(&qpn).and_then(|qp| qp.incoming.as_ref());
        let Some(receive) = incoming.and_then(|incoming| incoming.receive.clone()) else {
            return Outcome::Finished(None);
        };
        if header.offset.get() == 0
            && let Err((local, remote, why)) = self.check_receive(qpn, &receive, u64::from(header.total.get()))
        {
            self.receive_failed(qpn, &receive, local);
            return self.refuse(qpn, frame, remote, why);
        }
        let offset = u64::from(header.offset.get());
        walk(&receive.sges, offset, frame.payload.len(), |addr, range| copy_to(addr, &frame.payload[range]));
        if !header.has(frame::LAST) {
            return Outcome::Finished(None);
        }
        let imm = header.imm.get();
        let how = if header.has(frame::INVALIDATE) {
            let pd = self.qps.get(&qpn).map_or(0, |qp| qp.pd);
            if let Err(why) = self.mkeys.invalidate(pd, qpn, imm) {
                self.receive_failed(qpn, &receive, Syndrome::RemoteInvalReq);
                let why = format!("invalidation of key {imm:#x}: {why}");
                return self.refuse(qpn, frame, Syndrome::RemoteOp, &why);
            }
            CqeOpcode::RespSendInv
        } else if header.has(frame::HAS_IMM) {
            CqeOpcode::RespSendImm
        } else {
            CqeOpcode::RespSend
        };
        self.received(qpn, receive.index, how, header);
        Outcome::Finished(Some(0))
    }

    /// Checks a receive's keys and its length for `bytes`. An error has the syndromes for this side and the peer.
    fn check_receive(&self, qpn: u32, receive: &Receive, bytes: u64) -> Result<(), (Syndrome, Syndrome, &'static str)> {
        let pd = self.qps.get(&qpn).map_or(0, |qp| qp.pd);
        if bytes > receive.capacity() {
            let why = "the message is longer than the receive";
            return Err((Syndrome::LocalLength, Syndrome::RemoteInvalReq, why));
        }
        for sge in &receive.sges {
            let checked = self.mkeys.local(pd, sge.lkey, sge.addr, u64::from(sge.length), true);
            checked.map_err(|why| (Syndrome::LocalProt, Syndrome::RemoteOp, why))?;
        }
        Ok(())
    }

    fn receive_failed(&mut self, qpn: u32, receive: &Receive, syndrome: Syndrome) {
        if let Some(qp) = self.qps.get(&qpn) {
            let (cq, srqn) = (qp.recv_cq, qp.srqn(qpn));
            self.push_completion(
                cq,
                Completion::Failed { qpn, srqn, index: receive.index, opcode: 0, syndrome, receive: true },
            );
        }
    }

    fn received(&mut self, qpn: u32, index: u16, how: CqeOpcode, header: &Header) {
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        qp.incoming = None;
        let (cq, srqn) = (qp.recv_cq, qp.srqn(qpn));
        let (imm, bytes, solicited) = (header.imm.get(), header.total.get(), header.has(frame::SOLICITED));
        self.push_completion(cq, Completion::Received { qpn, srqn, index, how, imm, bytes, solicited });
    }

    fn target(&self, qpn: u32, header: &Header, bytes: u32, right: Right) -> Result<Target, &'static str> {
        let pd = self.qps.get(&qpn).map_or(0, |qp| qp.pd);
        if bytes == 0 && right != Right::Atomic {
            return Ok(Target::Untranslated);
        }
        self.mkeys.remote(pd, qpn, header.rkey.get(), header.addr.get(), u64::from(bytes), right)
    }

    fn take_write(&mut self, qpn: u32, frame: &Frame) -> Outcome {
        let header = &frame.header;
        let (last, imm) = (header.has(frame::LAST), header.has(frame::HAS_IMM));
        if last && imm && !self.has_receive(qpn) {
            return self.without_receive(qpn, frame);
        }
        if header.offset.get() == 0 {
            let target = match self.target(qpn, header, header.total.get(), Right::Write) {
                Ok(target) => target,
                Err(why) => return self.refuse(qpn, frame, Syndrome::RemoteAccess, why),
            };
            if let Some(qp) = self.qps.get_mut(&qpn) {
                qp.incoming = Some(Incoming { receive: None, target: Some(target) });
            }
        }
        let Some(qp) = self.qps.get_mut(&qpn) else { return Outcome::Finished(None) };
        if let Some(Target::Address(address)) = qp.incoming.as_ref().and_then(|incoming| incoming.target) {
            copy_to(address + u64::from(header.offset.get()), &frame.payload);
        }
        if !last {
            return Outcome::Finished(None);
        }
        qp.unready = None;
        if imm && let Some(receive) = self.take_receive(qpn) {
            self.received(qpn, receive.index, CqeOpcode::RespWrImm, header);
        }
        Outcome::Finished(Some(0))
    }

    fn take_read(&mut self, qpn: u32, connection: u32, frame: &Frame) -> Outcome {
        let header = &frame.header;
        let total = header.total.get();
        let target = match self.target(qpn, header, total, Right::Read) {
            Ok(target) => target,
            Err(why) => return self.refuse(qpn, frame, Syndrome::RemoteAccess, why),
        };
        let (Some(qp), Some(connection)) = (self.qps.get_mut(&qpn), self.connections.get_mut(&connection)) else {
            return Outcome::Finished(None);
        };
        if connection.unsent() > BACKLOG {
            return Outcome::Waits;
        }
        let offset = qp.answered;
        let len = match target {
            Target::Address(_) => (total - offset).min(MAX_PAYLOAD as u32),
            // No bytes move, and no error is reported.
            Target::Untranslated => 0,
        };
        let last = matches!(target, Target::Untranslated) || offset + len == total;
        connection.push(&Header {
            total: total.into(),
            offset: offset.into(),
            len: len.into(),
            flags: if last { frame::LAST } else { 0 },
            ..Header::new(Kind::Data, qpn, header.src_qpn.get(), header.token.get())
        });
        if let Target::Address(address) = target {
            copy_from(address + u64::from(offset), connection.payload(len as usize));
        }
        qp.answered = if last { 0 } else { offset + len };
        if last { Outcome::Finished(None) } else { Outcome::Continues }
    }

    fn take_atomic(&mut self, qpn: u32, connection: u32, frame: &Frame) -> Outcome {
        let header = &frame.header;
        if !header.addr.get().is_multiple_of(8) {
            return self.refuse(qpn, frame, Syndrome::RemoteInvalReq, "an atomic on an address that is not 8-aligned");
        }
        let target = match self.target(qpn, header, 8, Right::Atomic) {
            Ok(Target::Address(address)) if address % 8 != 0 => {
                return self.refuse(qpn, frame, Syndrome::RemoteInvalReq, "the word under the window is not 8-aligned");
            }
            Ok(target) => target,
            Err(why) => return self.refuse(qpn, frame, Syndrome::RemoteAccess, why),
        };
        let (first, second) = (header.operand.get(), header.second.get());
        let before = match frame.kind {
            Kind::CompareSwap => atomic(target, |now| if now == first { second } else { now }),
            _ => atomic(target, |now| now.wrapping_add(first)),
        };
        if let Some(connection) = self.connections.get_mut(&connection) {
            connection.push(&Header {
                total: 8.into(),
                len: 8.into(),
                flags: frame::LAST,
                ..Header::new(Kind::Data, qpn, header.src_qpn.get(), header.token.get())
            });
            connection.payload(8).copy_from_slice(&before.to_ne_bytes());
        }
        Outcome::Finished(None)
    }

    /// Receives a datagram if it fits, and drops it otherwise.
    fn take_datagram(&mut self, qpn: u32, frame: &Frame) -> Outcome {
        let header = &frame.header;
        let done = Outcome::Finished(None);
        let Some(qp) = self.qps.get(&qpn) else { return done };
        if qp.qkey != header.rkey.get() || !header.has(frame::LAST) {
            return done;
        }
        let Some(receive) = self.take_receive(qpn) else { return done };
        let bytes = header.total.get() + GRH as u32;
        if let Err((local, _, why)) = self.check_receive(qpn, &receive, u64::from(bytes)) {
            self.log(format_args!("QP {qpn:#x}: a datagram of {} bytes: {why}", header.total.get()));
            self.receive_failed(qpn, &receive, local);
            self.break_qp(qpn);
            return done;
        }
        walk(&receive.sges, GRH, frame.payload.len(), |addr, range| copy_to(addr, &frame.payload[range]));
        let how = if header.has(frame::HAS_IMM) { CqeOpcode::RespSendImm } else { CqeOpcode::RespSend };
        self.received(qpn, receive.index, how, &Header { total: bytes.into(), ..*header });
        done
    }
}
