//! The data path of `efa-direct`: each call is one request to the card, and each completion one entry in its ring.

use std::ffi::c_void;

use efa_dp_direct::cq::{Cqe, RawCqe, Sender};
use efa_dp_direct::rq::host_length;
use efa_dp_direct::wire::{RxDesc, SendOp};
use efa_dp_direct::wqe::{Destination, Inline, Operation, RemoteMem, RequestIds, SendData, Sge, WriteData};
use ferrogin_libfabric::bindings as fi;

use super::bindings::{Bindings, destination};
use super::call::{Buffers, RecvCall, RmaCall, Segment, SendCall};
use super::completion::{Entry, Failure};
use super::guard::Code;
use super::library;
use super::queue_pair::QueuePair;
use super::requests::Requests;
use soft_nic::card::{MAX_RDMA_SIZE, MAX_SEND_SIZE};

/// A request in flight.
#[derive(Debug)]
struct Sent {
    context: *mut c_void,
    flags: u64,
    len: usize,
    wanted: bool,
}

/// A posted receive.
#[derive(Debug)]
struct Posted {
    context: *mut c_void,
    buf: *mut c_void,
    wanted: bool,
    descs: u32,
}

pub(super) struct Direct {
    queue_pair: QueuePair<Sent>,
    receives: Requests<Posted>,
    /// Free entries in the receive queue.
    descs: u32,
}

// SAFETY: the pointers are the application's contexts and buffers, which this provider only returns to it.
unsafe impl Send for Direct {}

impl Direct {
    pub(super) fn new(queue_pair: QueuePair<()>) -> Self {
        let descs = queue_pair.receives();
        // A receive's id has 16 bits.
        let receives = Requests::new(descs.min(u16::MAX.into()));
        Self { queue_pair: queue_pair.with_requests(), receives, descs }
    }

    pub(super) fn send(&mut self, bindings: &Bindings, call: &SendCall) -> Result<(), Code> {
        if call.tag.is_some() {
            return Err(Code::NOSYS);
        }
        let target = bindings.target(call.to)?;
        let len = call.buffers.len();
        if len > MAX_SEND_SIZE as usize {
            return Err(Code::MSGSIZE);
        }
        let data = if call.flags & fi::FI_INJECT != 0 {
            SendData::Inline(inline(&call.buffers, self.queue_pair.max_inline())?)
        } else {
            let mut sges = [Sge::default(); 2];
            match gather("fi_send", &call.buffers, &mut sges)? {
                0 => SendData::Empty,
                1 => SendData::One(sges[0]),
                _ => SendData::Two(sges[0], sges[1]),
            }
        };
        let op = Operation::Send { data, imm: immediate(call.data) };
        let sent = Sent {
            context: call.context,
            flags: fi::FI_SEND | fi::FI_MSG,
            len,
            wanted: bindings.send.wants(call.flags, call.silent),
        };
        self.post(bindings, destination(&target.address, target.ahn), op, sent)
    }

    pub(super) fn rma(&mut self, bindings: &Bindings, call: &RmaCall) -> Result<(), Code> {
        let target = bindings.target(call.peer)?;
        let len = call.buffers.len();
        if len > MAX_RDMA_SIZE as usize {
            return Err(Code::MSGSIZE);
        }
        let rkey = u32::try_from(call.remote.key).map_err(|_| Code::INVAL)?;
        let remote = RemoteMem { addr: call.remote.addr, rkey };
        let mut sges = [Sge::default(); 1];
        let (op, flags) = if call.read {
            let into = (gather("fi_read", &call.buffers, &mut sges)? > 0).then_some(sges[0]);
            (Operation::Read { remote, into }, fi::FI_RMA | fi::FI_READ)
        } else {
            let data = if call.flags & fi::FI_INJECT != 0 && len > 0 {
                WriteData::Inline(inline(&call.buffers, self.queue_pair.max_inline_write())?)
            } else if gather("fi_write", &call.buffers, &mut sges)? == 0 {
                WriteData::Empty
            } else {
                WriteData::One(sges[0])
            };
            (Operation::Write { remote, data, imm: immediate(call.data) }, fi::FI_RMA | fi::FI_WRITE)
        };
        let wanted = bindings.send.wants(call.flags, call.silent);
        let sent = Sent { context: call.context, flags, len, wanted };
        self.post(bindings, destination(&target.address, target.ahn), op, sent)
    }

    fn post(&mut self, bindings: &Bindings, to: Destination, op: Operation, sent: Sent) -> Result<(), Code> {
        if self.queue_pair.room() == 0 || !bindings.send.reserve() {
            return Err(Code::AGAIN);
        }
        if self.queue_pair.post(to, op, sent).is_none() {
            bindings.send.release();
            return Err(Code::INVAL);
        }
        self.queue_pair.ring();
        Ok(())
    }

    pub(super) fn recv(&mut self, bindings: &Bindings, call: &RecvCall) -> Result<(), Code> {
        if call.tag.is_some() {
            return Err(Code::NOSYS);
        }
        let mut sges = [Sge::default(); 2];
        let count = gather("fi_recv", &call.buffers, &mut sges)?.max(1);
        if self.descs < count as u32 {
            return Err(Code::AGAIN);
        }
        if !bindings.recv.reserve() {
            return Err(Code::AGAIN);
        }
        let posted = Posted {
            context: call.context,
            buf: call.buffers.start(),
            wanted: bindings.recv.wants(call.flags, false),
            descs: count as u32,
        };
        let Some(id) = self.receives.insert(posted) else {
            bindings.recv.release();
            return Err(Code::AGAIN);
        };
        let mut descs = sges.map(|sge| RxDesc::single(id as u16, sge.addr, host_length(sge.length), sge.lkey));
        for (i, desc) in descs.iter_mut().enumerate().take(count) {
            desc.lkey_ctrl = desc.lkey_ctrl.with_first(i == 0).with_last(i + 1 == count);
        }
        self.descs -= count as u32;
        self.queue_pair.post_receive(&descs[..count]);
        self.queue_pair.ring_receives();
        Ok(())
    }

    /// Returns the room of requests and receives that won't complete, because the queue pair is closed.
    pub(super) fn release(&self, bindings: &Bindings) {
        (0..self.queue_pair.outstanding()).for_each(|_| bindings.send.release());
        (0..self.receives.len()).for_each(|_| bindings.recv.release());
    }

    /// Returns the application's completion for a ring entry, if it gets one.
    pub(super) fn complete(&mut self, bindings: &Bindings, raw: &RawCqe) -> Option<Entry> {
        match Cqe::parse(raw, RequestIds::Bits64).ok()? {
            Cqe::Send(cqe) => {
                let sent = self.queue_pair.complete(cqe.wr_id)?;
                bindings.send.release();
                let failure = (!cqe.status.is_ok()).then(|| Failure::of_status(cqe.status.raw()));
                let entry = Entry { len: sent.len, failure, ..Entry::new(sent.context, sent.flags) };
                (sent.wanted || failure.is_some()).then_some(entry)
            }
            Cqe::Recv(cqe) => {
                let source = match cqe.sender {
                    Sender::Ah(ahn) => bindings.av.reverse(ahn, cqe.src_qp_num),
                    Sender::Gid(_) => None,
                };
                let source = source.unwrap_or(fi::FI_ADDR_NOTAVAIL);
                let (data_flag, data) = cqe.imm.map_or((0, 0), |imm| (fi::FI_REMOTE_CQ_DATA, u64::from(imm)));
                let len = cqe.length as usize;
                if cqe.unsolicited && cqe.op == Ok(SendOp::RdmaWrite) {
                    let flags = fi::FI_RMA | fi::FI_REMOTE_WRITE | data_flag;
                    return Some(Entry { len, data, source, ..Entry::new(std::ptr::null_mut(), flags) });
                }
                let posted = self.receives.take(u64::from(cqe.req_id))?;
                bindings.recv.release();
                self.descs += posted.descs;
                let failure = (!cqe.status.is_ok()).then(|| Failure::of_status(cqe.status.raw()));
                let flags = match cqe.op {
                    Ok(SendOp::RdmaWrite) => fi::FI_RMA | fi::FI_REMOTE_WRITE,
                    _ => fi::FI_RECV | fi::FI_MSG,
                };
                let entry = Entry::new(posted.context, flags | data_flag);
                let entry = Entry { len, data, source, failure, buf: posted.buf, ..entry };
                (posted.wanted || failure.is_some()).then_some(entry)
            }
        }
    }
}

/// Immediate data has 32 bits: the domain's `cq_data_size`.
fn immediate(data: Option<u64>) -> Option<u32> {
    data.map(|data| data as u32)
}

/// Returns the buffers' bytes as a request's inline data.
fn inline(buffers: &Buffers, limit: usize) -> Result<Inline, Code> {
    let mut bytes = [0; efa_dp_direct::wire::TX_DESC_INLINE_MAX_SIZE_128];
    let len = buffers.len();
    let room = bytes.get_mut(..len).filter(|_| len <= limit).ok_or(Code::INVAL)?;
    // SAFETY: the application keeps the buffers of a call readable until the call returns (`fi_msg(3)`).
    unsafe { buffers.gather(room) };
    Inline::new(room).ok_or(Code::INVAL)
}

/// Writes the non-empty buffers as scatter-gather entries, and returns how many there are.
fn gather<const N: usize>(call: &str, buffers: &Buffers, sges: &mut [Sge; N]) -> Result<usize, Code> {
    let mut count = 0;
    for segment in buffers.segments().iter().filter(|s| s.len > 0) {
        let Segment { addr, len, lkey } = *segment;
        let no_descriptor = || {
            let why = "efa-direct needs registered local memory (FI_MR_LOCAL): register the buffer with fi_mr_reg and pass fi_mr_desc() as desc";
            library::refuse(call, format_args!("a buffer of {len} bytes has no descriptor; {why}"))
        };
        let (lkey, length) = (lkey.ok_or_else(no_descriptor)?, u32::try_from(len).map_err(|_| Code::MSGSIZE)?);
        *sges.get_mut(count).ok_or(Code::INVAL)? = Sge { addr: addr as u64, length, lkey };
        count += 1;
    }
    Ok(count)
}
