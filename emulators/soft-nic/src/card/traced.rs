//! The card's records in the trace: what it takes, completes and counts.

use efa_dp_direct::cq::{RawCqe, RecvCqe, Sender};
use efa_dp_direct::wire::{RxDesc, SendOp, TxCdesc, TxMetaDesc};
use zerocopy::IntoBytes;

use super::complete::{Completed, OK, cqe_of, event_of};
use super::core::Core;
use super::counter::Event;
use super::qp::Token;
use super::queue::CompletionRing;
use super::request;
use crate::address::Gid;
use crate::trace::{Kind, Record, flags};
use crate::wire::packet::Header;

impl Core {
    /// Writes the latest poll's records to the file.
    #[inline(always)]
    pub(crate) fn flush_trace(&mut self) {
        if let Some(trace) = &mut self.trace
            && let Err(error) = trace.flush()
        {
            self.end_trace(&error);
        }
    }

    /// Records a work request that the card took.
    #[inline(always)]
    pub(crate) fn trace_request(&mut self, qpn: u16, index: u32, bytes: &[u8; 128]) {
        if self.trace.is_some() {
            self.add_request(qpn, index, bytes);
        }
    }

    /// Records an outstanding work request that is about to complete.
    #[inline(always)]
    pub(crate) fn trace_retired(&mut self, token: Token, status: u8) {
        if self.trace.is_some() {
            self.add_retired(token, status);
        }
    }

    /// Records a work request that is about to complete but was never outstanding.
    #[inline(always)]
    pub(crate) fn trace_completion(&mut self, qpn: u16, meta: &TxMetaDesc, done: &Completed) {
        if self.trace.is_some() {
            self.add_completion(qpn, meta, done);
        }
    }

    /// Records a receive that the card took.
    #[inline(always)]
    pub(crate) fn trace_receive(&mut self, qpn: u16, index: u32, buffers: &[RxDesc]) {
        if self.trace.is_some() {
            self.add_receive(qpn, index, buffers);
        }
    }

    /// Records a receive that is about to complete, or a write with immediate data that arrived.
    #[inline(always)]
    pub(crate) fn trace_received(&mut self, from: Option<Gid>, cqe: &RecvCqe) {
        if self.trace.is_some() {
            self.add_received(from, cqe);
        }
    }

    /// Records a peer's write or read that raised one of a queue pair's counters but wrote no completion entry.
    #[inline(always)]
    pub(crate) fn trace_counted(&mut self, at: u32, header: &Header, event: Event) {
        if self.trace.is_some() {
            self.add_counted(at, header, event);
        }
    }

    /// Records the peer's read at the front of those that a connection answers, once its last packet is sent.
    #[inline(always)]
    pub(crate) fn trace_served(&mut self, at: u32) {
        if self.trace.is_some() {
            self.add_served(at);
        }
    }

    /// Records that a queue pair closed, so its outstanding requests get no completion. The process may end before the
    /// next poll.
    pub(crate) fn trace_closed(&mut self, qpn: u16) {
        if self.trace.is_some() {
            self.add(Record::new(Kind::Closed, qpn));
            self.flush_trace();
        }
    }

    #[cold]
    fn end_trace(&mut self, error: &std::io::Error) {
        let Some(trace) = self.trace.take() else { return };
        let path = trace.path().display();
        self.log(format_args!(
            "SOFTEFA_TRACE={path} cannot be written: {error}. The trace ends here, and the card continues"
        ));
    }

    #[cold]
    fn add(&mut self, record: Record) {
        if let Some(trace) = &mut self.trace
            && let Err(error) = trace.add(record)
        {
            self.end_trace(&error);
        }
    }

    #[cold]
    fn add_request(&mut self, qpn: u16, index: u32, bytes: &[u8; 128]) {
        let meta = request::meta_of(bytes);
        let peer = self.card_of(meta.ah).filter(|_| meta.ah != 0);
        let Some(qp) = self.qp(qpn) else { return };
        let mut record = Record::new(Kind::Request, qpn);
        record.op = meta.ctrl1.op_type();
        (record.index, record.slot) = (index.into(), qp.sq.slot_of(index).into());
        record.request_id = meta.req_id_ex.wr_id(meta.req_id).into();
        (record.ah, record.peer_qpn) = (meta.ah.into(), meta.dest_qp_num.into());
        record.set_bytes(&bytes[..qp.sq.entry_size as usize]);
        if let Some(gid) = peer {
            record.set_peer(&gid);
        }
        self.add(record);
    }

    #[cold]
    fn add_retired(&mut self, token: Token, status: u8) {
        let Some(entry) = self.outstanding(token) else { return };
        let (meta, index, length) = (entry.request.meta, entry.index, entry.request.len);
        let event = event_of(meta.ctrl1.op_type());
        self.add_completion(token.qpn(), &meta, &Completed { index, status, length, event });
    }

    #[cold]
    fn add_completion(&mut self, qpn: u16, meta: &TxMetaDesc, done: &Completed) {
        let Some(qp) = self.qp(qpn) else { return };
        let cqe = cqe_of(qpn, meta, done.status);
        let mut record = Record::new(Kind::Completion, qpn);
        (record.op, record.status) = (meta.ctrl1.op_type(), done.status);
        (record.index, record.slot) = (done.index.into(), qp.sq.slot_of(done.index).into());
        (record.request_id, record.length) = (cqe.wr_id.into(), done.length.into());
        let counts = |event: Event| !qp.counters[event as usize].is_empty();
        if done.event.map_or_else(|| [Event::Send, Event::Write, Event::Read].into_iter().any(counts), counts) {
            record.flags |= flags::COUNTED;
        }
        let signaled = done.status != OK || meta.ctrl2.comp_req();
        let cq = Some(qp.send_cq).filter(|_| signaled).and_then(|cq| self.cqs.get(cq));
        if let Some(phase) = cq.map(CompletionRing::next_phase) {
            record.flags |= flags::ENTRY;
            record.set_bytes(&cqe.emit(phase).0[..TxCdesc::SIZE]);
        }
        self.add(record);
    }

    #[cold]
    fn add_receive(&mut self, qpn: u16, index: u32, buffers: &[RxDesc]) {
        let Some(qp) = self.qp(qpn) else { return };
        let mut record = Record::new(Kind::Receive, qpn);
        (record.index, record.slot) = (index.into(), qp.rq.slot_of(index).into());
        record.request_id = buffers.first().map_or(0, |first| u64::from(first.req_id)).into();
        record.length = buffers.iter().map(|buffer| u32::from(buffer.length)).sum::<u32>().into();
        let words: Vec<u64> = buffers.iter().flat_map(|buffer| buffer.to_words()).map(u64::to_le).collect();
        record.set_bytes(words.as_bytes());
        self.add(record);
    }

    #[cold]
    fn add_received(&mut self, from: Option<Gid>, cqe: &RecvCqe) {
        let Some(qp) = self.qp(cqe.qp_num) else { return };
        let mut record = Record::new(Kind::Received, cqe.qp_num);
        record.op = cqe.op.map_or_else(|raw| raw, SendOp::raw);
        (record.status, record.length) = (cqe.status.raw(), cqe.length.into());
        (record.request_id, record.peer_qpn) = (u64::from(cqe.req_id).into(), cqe.src_qp_num.into());
        let event = if cqe.unsolicited { Event::RemoteWrite } else { Event::Recv };
        if !qp.counters[event as usize].is_empty() {
            record.flags |= flags::COUNTED;
        }
        if let Some(imm) = cqe.imm {
            record.flags |= flags::IMM;
            record.imm = imm.into();
        }
        if let Sender::Ah(ah) = cqe.sender {
            record.ah = ah.into();
        }
        if let Some(phase) = qp.recv_cq.and_then(|cq| self.cqs.get(cq)).map(CompletionRing::next_phase) {
            record.flags |= flags::ENTRY;
            // For a sender without an address handle, the entry holds its GID, which includes its card's secret.
            let sender = match cqe.sender {
                Sender::Gid(Some(_)) => Sender::Gid(from.map(|gid| Gid { secret: [0; 8], ..gid }.to_bytes())),
                sender => sender,
            };
            let RawCqe(bytes) = RecvCqe { sender, ..*cqe }.emit(phase);
            record.set_bytes(&bytes);
        }
        if let Some(gid) = from {
            record.set_peer(&gid);
        }
        self.add(record);
    }

    #[cold]
    fn add_served(&mut self, at: u32) {
        let front = self.connections.get(at).and_then(|connection| connection.serving.front());
        if let Some(header) = front.map(|serving| serving.header) {
            self.add_counted(at, &header, Event::RemoteRead);
        }
    }

    #[cold]
    fn add_counted(&mut self, at: u32, header: &Header, event: Event) {
        let from = self.connections.get(at).and_then(|connection| connection.peer);
        let counted = self.qp(header.dst_qpn).is_some_and(|qp| !qp.counters[event as usize].is_empty());
        if !counted {
            return;
        }
        let mut record = Record::new(Kind::Counted, header.dst_qpn);
        record.op = if event == Event::RemoteRead { SendOp::RdmaRead } else { SendOp::RdmaWrite }.raw();
        (record.flags, record.length, record.peer_qpn) = (flags::COUNTED, header.total.into(), header.src_qpn.into());
        if let Some(gid) = from {
            record.set_peer(&gid);
        }
        self.add(record);
    }
}
