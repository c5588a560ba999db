//! Remote memory: each of the application's calls becomes one or more requests to the card.

use std::ffi::c_void;

use efa_dp_direct::wqe::{Destination, Operation, RemoteMem, Sge, WriteData};
use ferrogin_libfabric::bindings as fi;

use super::super::bindings::{Bindings, destination};
use super::super::call::RmaCall;
use super::super::completion::{Entry, Failure};
use super::super::guard::Code;
use super::pool::{self, BUFFER_LEN};
use super::{Rdm, Request};
use soft_nic::card::MAX_RDMA_SIZE;
use soft_nic::card::counter::Event;
use soft_nic::card::region::{Access, Keys};

/// An outstanding call.
#[derive(Debug)]
pub(super) struct Rma {
    context: *mut c_void,
    flags: u64,
    len: usize,
    wanted: bool,
    event: Event,
    pub keys: Vec<Keys>,
    buffer: Option<u16>,
    /// Outstanding requests.
    parts: u32,
    /// Data for the peer's completion, sent after all parts.
    tail: Option<(Destination, RemoteMem, u32)>,
    failure: Option<Failure>,
}

/// A stretch of local memory for one request.
struct Part {
    offset: u64,
    sge: Sge,
}

impl Rdm {
    pub(in super::super) fn rma(&mut self, bindings: &Bindings, call: &RmaCall) -> Result<(), Code> {
        let target = bindings.target(call.peer)?;
        let len = call.buffers.len();
        let inject = call.flags & fi::FI_INJECT != 0;
        if inject && (len > bindings.inject_size || call.read) {
            return Err(Code::INVAL);
        }
        let rkey = u32::try_from(call.remote.key).map_err(|_| Code::INVAL)?;
        let remote = RemoteMem { addr: call.remote.addr, rkey };
        let whole = |segment: &super::super::call::Segment| segment.len.div_ceil(MAX_RDMA_SIZE as usize);
        let needed = call.buffers.segments().iter().map(whole).sum::<usize>() + 1;
        if needed > super::REQUESTS as usize / 2 {
            return Err(Code::MSGSIZE);
        }
        if self.room(bindings) < needed {
            return Err(Code::AGAIN);
        }
        let to = destination(&target.address, target.ahn);
        let mut rma = Rma {
            context: call.context,
            flags: fi::FI_RMA | if call.read { fi::FI_READ } else { fi::FI_WRITE },
            len,
            wanted: bindings.send.wants(call.flags, call.silent),
            event: if call.read { Event::Read } else { Event::Write },
            keys: Vec::new(),
            buffer: None,
            parts: 0,
            tail: None,
            failure: None,
        };
        let known = call.buffers.segments().iter().all(|segment| segment.lkey.is_some() || segment.len == 0);
        let parts = if !call.read && len > 0 && len <= BUFFER_LEN && (inject || !known) {
            vec![self.copied(call, &mut rma)?]
        } else {
            match in_place(bindings, call, &mut rma.keys) {
                Ok(parts) => parts,
                Err(code) => {
                    self.release(bindings, &rma.keys);
                    return Err(code);
                }
            }
        };
        let mut imm = call.data.map(|data| data as u32);
        if let Some(data) = imm.filter(|_| parts.len() > 1) {
            (rma.tail, imm) = (Some((to, remote, data)), None);
        }
        rma.parts = parts.len().max(1) as u32;
        let at = self.rmas.insert(rma);
        let mut post = |op| self.queue_pair.post(to, op, Request::Rma(at));
        let mut posted = true;
        if parts.is_empty() {
            posted = post(operation(call.read, remote, None, imm)).is_some();
        }
        for part in parts {
            let remote = RemoteMem { addr: remote.addr.wrapping_add(part.offset), rkey };
            posted &= post(operation(call.read, remote, Some(part.sge), imm)).is_some();
        }
        self.queue_pair.ring();
        // `room` checked that there is a free buffer.
        if posted { Ok(()) } else { Err(Code::OTHER) }
    }

    /// Copies a short write's bytes into one of the provider's buffers.
    fn copied(&mut self, call: &RmaCall, rma: &mut Rma) -> Result<Part, Code> {
        let buffer = self.packets.take().ok_or(Code::AGAIN)?;
        rma.buffer = Some(buffer);
        // SAFETY: the buffer was just taken from the free ones, so the card does not read it.
        let room = unsafe { self.packets.fill(buffer, rma.len) };
        // SAFETY: the application keeps the buffers of a call readable until the call returns (`fi_msg(3)`).
        unsafe { call.buffers.gather(room) };
        let addr = self.packets.at(buffer) as u64;
        Ok(Part { offset: 0, sge: Sge { addr, length: rma.len as u32, lkey: self.packets.lkey() } })
    }

    /// Handles the end of one of a call's requests.
    pub(super) fn rma_done(&mut self, bindings: &Bindings, at: u32, failure: Option<Failure>) {
        let Some(rma) = self.rmas.get_mut(at) else { return };
        rma.parts -= 1;
        rma.failure = rma.failure.or(failure);
        if rma.parts > 0 {
            return;
        }
        let tail = rma.tail.take().filter(|_| rma.failure.is_none());
        if let Some((to, remote, data)) = tail {
            rma.parts = 1;
            let op = operation(false, remote, None, Some(data));
            // The requests that just ended left room.
            if self.queue_pair.post(to, op, Request::Rma(at)).is_some() {
                self.queue_pair.ring();
                return;
            }
        }
        let Some(rma) = self.rmas.remove(at) else { return };
        self.release(bindings, &rma.keys);
        if let Some(buffer) = rma.buffer {
            self.packets.give(buffer);
        }
        let entry = Entry { len: rma.len, failure: rma.failure, ..Entry::new(rma.context, rma.flags) };
        bindings.report_sent(rma.event, rma.wanted, entry);
    }
}

/// Splits the application's memory into parts, and registers it if it is not yet.
fn in_place(bindings: &Bindings, call: &RmaCall, keys: &mut Vec<Keys>) -> Result<Vec<Part>, Code> {
    let access = Access { local_write: call.read, ..Access::default() };
    let mut parts = Vec::with_capacity(1);
    let mut offset = 0u64;
    for segment in call.buffers.segments().iter().filter(|s| s.len > 0) {
        let lkey = match segment.lkey {
            Some(lkey) => lkey,
            None => {
                let new = pool::register(&bindings.card, bindings.pd, segment.addr, segment.len, access)?;
                keys.push(new);
                new.lkey
            }
        };
        let (mut addr, mut left) = (segment.addr as u64, segment.len as u64);
        while left > 0 {
            let length = left.min(MAX_RDMA_SIZE.into()) as u32;
            parts.push(Part { offset, sge: Sge { addr, length, lkey } });
            (addr, left, offset) = (addr + u64::from(length), left - u64::from(length), offset + u64::from(length));
        }
    }
    Ok(parts)
}

fn operation(read: bool, remote: RemoteMem, local: Option<Sge>, imm: Option<u32>) -> Operation {
    if read {
        return Operation::Read { remote, into: local };
    }
    Operation::Write { remote, data: local.map_or(WriteData::Empty, WriteData::One), imm }
}
