//! The requester: takes requests from the ring, sends them, and completes them in order.

use std::time::Instant;

use mlx5::wire::{Fence, Opcode, Syndrome};
use mlx5::wqe::{Data, Op, Sge, With, Wqe};

use super::connection::Address;
use super::core::{Core, LOOP_OUT};
use super::cq::Completion;
use super::frame::{self, Header, Kind, MAX_PAYLOAD};
use super::qp::{Fetched, Issued, Progress, State};
use super::shared::{copy_from, copy_to};

/// The most outstanding requests per queue pair.
const MAX_IN_FLIGHT: usize = 256;
/// How many bytes may be waiting on a connection before requests have to wait.
pub(super) const BACKLOG: usize = 4 << 20;

/// Why this side refuses a request.
struct Refused(Syndrome, String);

fn total(sges: &[Sge]) -> u64 {
    sges.iter().map(|sge| u64::from(sge.length)).sum()
}

/// Calls `each` for bytes `from..from + len` of a list of buffers, with each part's address and its range within the
/// `len` bytes.
pub(super) fn walk(sges: &[Sge], from: u64, len: usize, mut each: impl FnMut(u64, std::ops::Range<usize>)) {
    let (mut skip, mut done) = (from, 0);
    for sge in sges {
        let length = u64::from(sge.length);
        if skip >= length {
            skip -= length;
            continue;
        }
        let take = ((length - skip) as usize).min(len - done);
        each(sge.addr + skip, done..done + take);
        (skip, done) = (0, done + take);
        if done == len {
            return;
        }
    }
}

impl Core {
    /// Takes posted requests. Returns true if there were any.
    pub(super) fn issue(&mut self, qpn: u32) -> bool {
        let mut moved = false;
        while self.issue_one(qpn).is_some() {
            moved = true;
        }
        moved
    }

    fn issue_one(&mut self, qpn: u32) -> Option<()> {
        let qp = self.qps.get_mut(&qpn)?;
        match qp.state {
            State::New => return None,
            State::Working => {}
            State::Error => return self.flush_one(qpn),
        }
        if qp.issued.len() >= MAX_IN_FLIGHT
            || qp.issued.iter().any(|issued| matches!(issued.progress, Progress::Failed(_)))
        {
            return None;
        }
        let connection = qp.peer.map(|peer| peer.connection);
        if connection
            .and_then(|connection| self.connections.get(&connection))
            .is_some_and(|connection| connection.unsent() > BACKLOG)
        {
            self.qps.get_mut(&qpn)?.blocked = true;
            return None;
        }
        let qp = self.qps.get_mut(&qpn)?;
        let wqe = match qp.fetch(qpn) {
            Fetched::Nothing => {
                qp.blocked = false;
                return None;
            }
            Fetched::Request(wqe) => wqe,
            Fetched::Bad { index, opcode, why } => {
                qp.pass();
                self.log(format_args!("QP {qpn:#x} request {index}: {why}"));
                let progress = Progress::Failed(Syndrome::LocalQpOp);
                self.enqueue(
                    qpn,
                    Issued { index, opcode, signaled: true, token: 0, fetches: false, progress, into: Vec::new() },
                );
                return Some(());
            }
        };
        let fenced = !matches!(wqe.fence, Fence::None);
        let fetching = qp.issued.iter().any(|issued| issued.fetches && matches!(issued.progress, Progress::Waiting));
        if fetching && fenced && wqe.fence != Fence::Small {
            qp.blocked = true;
            return None;
        }
        qp.blocked = false;
        if fenced {
            self.settle(qpn, None);
        }
        let qp = self.qps.get_mut(&qpn)?;
        qp.pass();
        qp.token += 1;
        let token = qp.token;
        let (index, signaled) = (wqe.index, wqe.signaled);
        let code = opcode(&wqe.op);
        let fetches = matches!(wqe.op, Op::Read { .. } | Op::CompareSwap { .. } | Op::FetchAdd { .. });
        let (progress, into) = match self.execute(qpn, token, *wqe) {
            Ok(done) => done,
            Err(Refused(syndrome, why)) => {
                self.log(format_args!("QP {qpn:#x} request {index}: {why}"));
                (Progress::Failed(syndrome), Vec::new())
            }
        };
        self.enqueue(qpn, Issued { index, opcode: code.code(), signaled, token, fetches, progress, into });
        Some(())
    }

    fn enqueue(&mut self, qpn: u32, issued: Issued) {
        if let Some(qp) = self.qps.get_mut(&qpn) {
            qp.issued.push_back(issued);
        }
        self.retire(qpn);
    }

    fn flush_one(&mut self, qpn: u32) -> Option<()> {
        let qp = self.qps.get_mut(&qpn)?;
        let (index, opcode) = qp.next_flushed()?;
        let cq = qp.send_cq;
        self.push_completion(
            cq,
            Completion::Failed { qpn, srqn: 0, index, opcode, syndrome: Syndrome::WrFlush, receive: false },
        );
        Some(())
    }

    /// Carries out key changes: those that are due, or all of them if `now` is `None`.
    pub(super) fn settle(&mut self, qpn: u32, now: Option<Instant>) -> bool {
        let Core { qps, mkeys, .. } = self;
        let Some(qp) = qps.get_mut(&qpn) else { return false };
        let (mut moved, mut broken) = (false, None);
        for issued in &mut qp.issued {
            let Progress::Pending { umr, due } = &issued.progress else { continue };
            if now.is_some_and(|now| *due > now) {
                break;
            }
            moved = true;
            issued.progress = match mkeys.umr(qp.pd, qpn, umr) {
                Ok(()) => Progress::Done { bytes: 0 },
                Err(why) => {
                    broken = Some((issued.index, why));
                    Progress::Failed(Syndrome::MwBind)
                }
            };
        }
        if let Some((index, why)) = broken {
            self.log(format_args!("QP {qpn:#x} request {index}: {why}"));
        }
        if moved {
            self.retire(qpn);
        }
        moved
    }

    fn check_local(&self, pd: u32, sges: &[Sge], write: bool) -> Result<(), Refused> {
        sges.iter().try_for_each(|sge| {
            self.mkeys.local(pd, sge.lkey, sge.addr, u64::from(sge.length), write).map_err(|why| {
                Refused(
                    Syndrome::LocalProt,
                    format!("lkey {:#x}, {} bytes at {:#x}: {why}", sge.lkey, sge.length, sge.addr),
                )
            })
        })
    }

    fn execute(&mut self, qpn: u32, token: u64, wqe: Wqe) -> Result<(Progress, Vec<Sge>), Refused> {
        let Some(qp) = self.qps.get(&qpn) else { return Ok((Progress::Done { bytes: 0 }, Vec::new())) };
        let (pd, rnr_timeout) = (qp.pd, qp.rnr_timeout_ms);
        let waiting = Ok((Progress::Waiting, Vec::new()));
        let solicited = if wqe.solicited { frame::SOLICITED } else { 0 };
        match wqe.op {
            Op::Nop => return Ok((Progress::Done { bytes: 0 }, Vec::new())),
            Op::Umr { umr, .. } => {
                let due = Instant::now() + self.lateness();
                return Ok((Progress::Pending { umr: Box::new(umr), due }, Vec::new()));
            }
            Op::Datagram { to, data, imm } => return self.datagram(qpn, pd, to, data, imm, solicited),
            _ => {}
        }
        let peer = match qp.peer {
            Some(peer) => peer,
            None => return Err(Refused(Syndrome::LocalQpOp, "the queue pair is not connected".into())),
        };
        if !self.connections.contains_key(&peer.connection) {
            return Err(Refused(Syndrome::TransportRetryExceeded, "the connection to the peer is gone".into()));
        }
        let base = |kind| Header::new(kind, qpn, peer.qpn, token);
        match wqe.op {
            Op::Send { data, with } => {
                let (flag, imm) = match with {
                    With::Nothing => (0, 0),
                    With::Imm(imm) => (frame::HAS_IMM, imm),
                    With::Invalidate(key) => (frame::INVALIDATE, key),
                };
                let header = Header {
                    flags: flag | solicited,
                    imm: imm.into(),
                    operand: rnr_timeout.into(),
                    ..base(Kind::Send)
                };
                self.send_frames(pd, peer.connection, header, &data)?;
                waiting
            }
            Op::Write { remote, data, imm } => {
                let header = Header {
                    flags: if imm.is_some() { frame::HAS_IMM | solicited } else { 0 },
                    imm: imm.unwrap_or(0).into(),
                    rkey: remote.rkey.into(),
                    addr: remote.addr.into(),
                    operand: rnr_timeout.into(),
                    ..base(Kind::Write)
                };
                self.send_frames(pd, peer.connection, header, &data)?;
                waiting
            }
            Op::Read { remote, into } => {
                self.check_local(pd, &into, true)?;
                let bytes = total(&into);
                if bytes > 1 << 31 {
                    return Err(Refused(Syndrome::LocalLength, format!("a read of {bytes} bytes")));
                }
                let header = Header {
                    rkey: remote.rkey.into(),
                    addr: remote.addr.into(),
                    total: (bytes as u32).into(),
                    ..base(Kind::Read)
                };
                self.push(peer.connection, &header);
                Ok((Progress::Waiting, into))
            }
            Op::CompareSwap { remote, compare, swap, into } => {
                let into = vec![Sge { addr: into.addr, length: 8, lkey: into.lkey }];
                self.check_local(pd, &into, true)?;
                let header = Header {
                    rkey: remote.rkey.into(),
                    addr: remote.addr.into(),
                    operand: compare.into(),
                    second: swap.into(),
                    ..base(Kind::CompareSwap)
                };
                self.push(peer.connection, &header);
                Ok((Progress::Waiting, into))
            }
            Op::FetchAdd { remote, add, into } => {
                let into = vec![Sge { addr: into.addr, length: 8, lkey: into.lkey }];
                self.check_local(pd, &into, true)?;
                let header = Header {
                    rkey: remote.rkey.into(),
                    addr: remote.addr.into(),
                    operand: add.into(),
                    ..base(Kind::FetchAdd)
                };
                self.push(peer.connection, &header);
                Ok((Progress::Waiting, into))
            }
            Op::Nop | Op::Umr { .. } | Op::Datagram { .. } => Ok((Progress::Done { bytes: 0 }, Vec::new())),
        }
    }

    fn push(&mut self, connection: u32, header: &Header) {
        if let Some(connection) = self.connections.get_mut(&connection) {
            connection.push(header);
        }
    }

    /// Sends a message or write in frames. The source is copied now, so the user may reuse it after the completion.
    fn send_frames(
        &mut self,
        pd: u32,
        connection: u32,
        header: Header,
        data: &Data<Vec<Sge>, Vec<u8>>,
    ) -> Result<(), Refused> {
        let bytes = match data {
            Data::Sges(sges) => {
                self.check_local(pd, sges, false)?;
                total(sges)
            }
            Data::Inline(bytes) => bytes.len() as u64,
        };
        if bytes > 1 << 31 {
            return Err(Refused(Syndrome::LocalLength, format!("a request of {bytes} bytes: the limit is 2^31")));
        }
        let Some(connection) = self.connections.get_mut(&connection) else { return Ok(()) };
        let mut offset = 0;
        loop {
            let len = (bytes - offset).min(MAX_PAYLOAD as u64) as usize;
            let last = offset + len as u64 == bytes;
            connection.push(&Header {
                total: (bytes as u32).into(),
                offset: (offset as u32).into(),
                len: (len as u32).into(),
                flags: header.flags | if last { frame::LAST } else { 0 },
                ..header
            });
            let payload = connection.payload(len);
            match data {
                Data::Sges(sges) => walk(sges, offset, len, |addr, range| copy_from(addr, &mut payload[range])),
                Data::Inline(inline) => payload.copy_from_slice(&inline[offset as usize..][..len]),
            }
            offset += len as u64;
            if last {
                return Ok(());
            }
        }
    }

    /// Sends a datagram, which completes at once. Its loss goes unnoticed.
    fn datagram(
        &mut self,
        qpn: u32,
        pd: u32,
        to: mlx5::wqe::Destination,
        data: Data<Vec<Sge>, Vec<u8>>,
        imm: Option<u32>,
        solicited: u8,
    ) -> Result<(Progress, Vec<Sge>), Refused> {
        let address = Address::from_bytes(&to.av.rgid);
        let connection =
            if address == self.address { Some(LOOP_OUT) } else { self.connection_of.get(&address).copied() };
        let bytes = match &data {
            Data::Sges(sges) => total(sges),
            Data::Inline(inline) => inline.len() as u64,
        };
        if bytes > super::DATAGRAM_MTU as u64 {
            let why = format!("a datagram of {bytes} bytes: at most {} fit", super::DATAGRAM_MTU);
            return Err(Refused(Syndrome::LocalLength, why));
        }
        let header = Header {
            flags: solicited | if imm.is_some() { frame::HAS_IMM } else { 0 },
            imm: imm.unwrap_or(0).into(),
            rkey: to.qkey.into(),
            ..Header::new(Kind::Datagram, qpn, to.qpn, 0)
        };
        match connection {
            Some(connection) => self.send_frames(pd, connection, header, &data)?,
            None => self.log(format_args!("QP {qpn:#x}: a datagram to a card without an address handle")),
        }
        Ok((Progress::Done { bytes: 0 }, Vec::new()))
    }

    /// Handles an answer's bytes.
    pub(super) fn arrived(&mut self, frame: &frame::Frame) {
        let header = &frame.header;
        let (qpn, token) = (header.dst_qpn.get(), header.token.get());
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        let Some(issued) = qp.issued.iter_mut().find(|issued| issued.token == token) else { return };
        if !matches!(issued.progress, Progress::Waiting) {
            return;
        }
        let offset = u64::from(header.offset.get());
        walk(&issued.into, offset, frame.payload.len(), |addr, range| copy_to(addr, &frame.payload[range]));
        if header.has(frame::LAST) {
            issued.progress = Progress::Done { bytes: header.total.get() };
            self.retire(qpn);
        }
    }

    /// Handles an acknowledgement: the peer has executed or refused a request.
    pub(super) fn acknowledged(&mut self, header: &Header) {
        let (qpn, token) = (header.dst_qpn.get(), header.token.get());
        let Some(qp) = self.qps.get_mut(&qpn) else { return };
        let Some(issued) = qp.issued.iter_mut().find(|issued| issued.token == token) else { return };
        if matches!(issued.progress, Progress::Waiting) {
            issued.progress = match header.status {
                0 => Progress::Done { bytes: 0 },
                syndrome => Progress::Failed(Syndrome::from_code(syndrome)),
            };
            self.retire(qpn);
        }
    }

    /// Completes finished requests in order. After a failure, the later ones are flushed.
    pub(super) fn retire(&mut self, qpn: u32) {
        loop {
            let Some(qp) = self.qps.get_mut(&qpn) else { return };
            let cq = qp.send_cq;
            let failed = |issued: &Issued, syndrome| Completion::Failed {
                qpn,
                srqn: 0,
                index: issued.index,
                opcode: issued.opcode,
                syndrome,
                receive: false,
            };
            let Some(head) = qp.issued.front() else { return };
            let completion = match head.progress {
                _ if qp.state == State::Error => Some(failed(head, Syndrome::WrFlush)),
                Progress::Waiting | Progress::Pending { .. } => return,
                Progress::Done { bytes } if head.signaled => {
                    Some(Completion::Sent { qpn, index: head.index, opcode: head.opcode, bytes })
                }
                Progress::Done { .. } => None,
                Progress::Failed(syndrome) => {
                    let completion = failed(head, syndrome);
                    self.fail(qpn, completion);
                    continue;
                }
            };
            qp.issued.pop_front();
            if let Some(completion) = completion {
                self.push_completion(cq, completion);
            }
        }
    }

    /// Completes the request at the head with an error and puts the queue pair into the error state.
    fn fail(&mut self, qpn: u32, completion: Completion) {
        if let Some(qp) = self.qps.get_mut(&qpn) {
            qp.issued.pop_front();
            let cq = qp.send_cq;
            self.push_completion(cq, completion);
        }
        self.break_qp(qpn);
    }
}

fn opcode<S, I>(op: &Op<S, I>) -> Opcode {
    match op {
        Op::Nop => Opcode::Nop,
        Op::Send { with: With::Nothing, .. } | Op::Datagram { imm: None, .. } => Opcode::Send,
        Op::Send { with: With::Imm(_), .. } | Op::Datagram { .. } => Opcode::SendImm,
        Op::Send { with: With::Invalidate(_), .. } => Opcode::SendInval,
        Op::Write { imm: None, .. } => Opcode::RdmaWrite,
        Op::Write { .. } => Opcode::RdmaWriteImm,
        Op::Read { .. } => Opcode::RdmaRead,
        Op::CompareSwap { .. } => Opcode::AtomicCs,
        Op::FetchAdd { .. } => Opcode::AtomicFa,
        Op::Umr { .. } => Opcode::Umr,
    }
}
