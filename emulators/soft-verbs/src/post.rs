//! Posting: `ibv_post_send`, `ibv_post_recv` and the `ibv_wr_*` calls.

use std::ffi::{c_int, c_uint};

use efa_dp_direct::wire::TX_DESC_INLINE_MAX_SIZE_128;
use efa_dp_direct::wqe::{Destination, Hints, Inline, Operation, RemoteMem, SendData, SendWqe, Sge, WriteData};

use crate::ah::Ah;
use crate::bindings as ib;
use crate::context::MAX_SGE;
use crate::guard::{Errno, entry, status};
use crate::objects::{Efa, Open, call1, call2, call3, call4};
use crate::params::{Length, List, Posted, Request, Requests};
use crate::qp::QueuePair;
use crate::queues::{SendQueue, Session};

impl Request for ib::ibv_send_wr {
    fn next(&self) -> *mut Self {
        self.next
    }

    fn buffers(&self) -> (*const ib::ibv_sge, c_int) {
        (self.sg_list, self.num_sge)
    }
}

impl Request for ib::ibv_recv_wr {
    fn next(&self) -> *mut Self {
        self.next
    }

    fn buffers(&self) -> (*const ib::ibv_sge, c_int) {
        (self.sg_list, self.num_sge)
    }
}

const NOWHERE: Destination = Destination { ah: 0, qpn: 0, qkey: 0 };

/// Checks what every request needs.
fn validate(qp: &QueuePair, flags: c_uint) -> Result<(), Errno> {
    let known = ib::IBV_SEND_SIGNALED | ib::IBV_SEND_INLINE;
    let signaled = qp.signal_all || flags & ib::IBV_SEND_SIGNALED != 0;
    if !matches!(qp.state(), ib::IBV_QPS_RTS | ib::IBV_QPS_SQD) || !signaled || flags & !known != 0 {
        return Err(Errno::INVAL);
    }
    Ok(())
}

/// A request's buffers in the card's form.
#[derive(Default)]
struct Buffers {
    all: [Sge; MAX_SGE as usize],
    len: usize,
}

impl Buffers {
    /// # Errors
    /// `EINVAL` for more than `max` buffers.
    fn of(sges: &[ib::ibv_sge], max: u32) -> Result<Self, Errno> {
        let mut buffers = Self { len: sges.len(), ..Self::default() };
        if sges.len() > buffers.all.len().min(max as usize) {
            return Err(Errno::INVAL);
        }
        for (to, from) in buffers.all.iter_mut().zip(sges) {
            *to = Sge { addr: from.addr, length: from.length, lkey: from.lkey };
        }
        Ok(buffers)
    }

    fn get(&self) -> &[Sge] {
        &self.all[..self.len]
    }
}

/// Copies the program's buffers into inline data.
///
/// # Safety
/// Each buffer is readable during the call.
unsafe fn inline_of(buffers: impl Iterator<Item = (*const u8, usize)>, limit: u32) -> Result<Inline, Errno> {
    let mut bytes = [0; TX_DESC_INLINE_MAX_SIZE_128];
    let mut at = 0;
    for (from, len) in buffers {
        let end = at + len.min(bytes.len() + 1);
        let room = bytes.get_mut(at..end).filter(|_| end <= limit as usize).ok_or(Errno::INVAL)?;
        if len > 0 {
            // SAFETY: this function's caller keeps the buffer readable, and `room` has `len` bytes.
            unsafe { std::ptr::copy_nonoverlapping(from, room.as_mut_ptr(), len) };
        }
        at = end;
    }
    Inline::new(&bytes[..at]).ok_or(Errno::INVAL)
}

/// Sets a request's local side.
fn set_buffers(op: &mut Operation, buffers: &[Sge]) -> Result<(), Errno> {
    match (op, buffers) {
        (Operation::Send { data, .. }, []) => *data = SendData::Empty,
        (Operation::Send { data, .. }, [one]) => *data = SendData::One(*one),
        (Operation::Send { data, .. }, [first, second]) => *data = SendData::Two(*first, *second),
        (Operation::Write { data, .. }, []) => *data = WriteData::Empty,
        (Operation::Write { data, .. }, [one]) => *data = WriteData::One(*one),
        (Operation::Read { into, .. }, []) => *into = None,
        (Operation::Read { into, .. }, [one]) => *into = Some(*one),
        _ => return Err(Errno::INVAL),
    }
    Ok(())
}

fn set_inline(op: &mut Operation, inline: Inline, sq: &SendQueue) -> Result<(), Errno> {
    match op {
        Operation::Send { data, .. } => *data = SendData::Inline(inline),
        Operation::Write { data, .. } if inline.data().is_empty() => *data = WriteData::Empty,
        Operation::Write { data, .. } if sq.has_inline_writes() => *data = WriteData::Inline(inline),
        Operation::Write { .. } | Operation::Read { .. } => return Err(Errno::INVAL),
    }
    Ok(())
}

fn destination(ah: Open<Ah>, qpn: u32, qkey: u32) -> Result<Destination, Errno> {
    Ok(Destination { ah: ah.get()?.number, qpn: qpn as u16, qkey })
}

/// Translates a request from `ibv_post_send`.
fn request(qp: &QueuePair, sq: &SendQueue, wr: Posted<ib::ibv_send_wr>) -> Result<SendWqe, Errno> {
    validate(qp, wr.send_flags)?;
    let imm = match wr.opcode {
        ib::IBV_WR_SEND => None,
        // SAFETY: this operation uses the union member, and any bytes make a valid number.
        ib::IBV_WR_SEND_WITH_IMM => Some(u32::from_be(unsafe { wr.__bindgen_anon_1.imm_data })),
        _ => return Err(Errno::INVAL),
    };
    // SAFETY: UD and SRD requests use this union member.
    let ud = unsafe { wr.wr.ud };
    // SAFETY: the program's request names an open handle.
    let dest = destination(unsafe { Open::at(ud.ah) }, ud.remote_qpn, ud.remote_qkey)?;
    let mut op = Operation::Send { data: SendData::Empty, imm };
    let sges = wr.buffers()?;
    if wr.send_flags & ib::IBV_SEND_INLINE != 0 {
        let buffers = sges.iter().map(|sge| (sge.addr as usize as *const u8, sge.length as usize));
        // SAFETY: the program keeps inline buffers readable during the call.
        set_inline(&mut op, unsafe { inline_of(buffers, sq.max_inline) }?, sq)?;
    } else {
        set_buffers(&mut op, Buffers::of(sges, sq.max_sge)?.get())?;
    }
    Ok(SendWqe::new(wr.wr_id, dest, op))
}

pub(crate) unsafe extern "C" fn post_send(
    raw: Open<QueuePair>,
    requests: Requests<ib::ibv_send_wr>,
    bad: Option<&mut *mut ib::ibv_send_wr>,
) -> c_int {
    status("ibv_post_send", || {
        let qp = raw.get()?;
        qp.turn.begin("ibv_wr_start", "ibv_wr_complete");
        let mut sq = qp.queues.send();
        let done = requests.post_each(bad, |wr| request(qp, &sq, wr).and_then(|request| sq.post(request)));
        sq.ring();
        drop(sq);
        qp.turn.end();
        done
    })
}

pub(crate) unsafe extern "C" fn post_recv(
    raw: Open<QueuePair>,
    requests: Requests<ib::ibv_recv_wr>,
    bad: Option<&mut *mut ib::ibv_recv_wr>,
) -> c_int {
    status("ibv_post_recv", || {
        let qp = raw.get()?;
        let mut rq = qp.queues.recv();
        let done = requests.post_each(bad, |wr| {
            if matches!(qp.state(), ib::IBV_QPS_RESET | ib::IBV_QPS_ERR) {
                return Err(Errno::INVAL);
            }
            let buffers = Buffers::of(wr.buffers()?, rq.max_sge)?;
            rq.post(wr.wr_id, buffers.get())
        });
        rq.ring();
        done
    })
}

/// Sets the functions that the program asked for. The others are null, as on hardware.
pub(crate) fn fill_functions(raw: &mut ib::ibv_qp_ex, ops: u64) {
    let has = |op: u32| ops & u64::from(op) != 0;
    raw.wr_start = Some(call1(wr_start));
    raw.wr_complete = Some(call1(wr_complete));
    raw.wr_abort = Some(call1(wr_abort));
    raw.wr_send = has(ib::IBV_QP_EX_WITH_SEND).then_some(call1(wr_send));
    raw.wr_send_imm = has(ib::IBV_QP_EX_WITH_SEND_WITH_IMM).then_some(call2(wr_send_imm));
    raw.wr_rdma_read = has(ib::IBV_QP_EX_WITH_RDMA_READ).then_some(call3(wr_rdma_read));
    raw.wr_rdma_write = has(ib::IBV_QP_EX_WITH_RDMA_WRITE).then_some(call3(wr_rdma_write));
    raw.wr_rdma_write_imm = has(ib::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM).then_some(call4(wr_rdma_write_imm));
    raw.wr_set_sge = Some(call4(wr_set_sge));
    raw.wr_set_sge_list = Some(call3(wr_set_sge_list));
    raw.wr_set_inline_data = Some(call3(wr_set_inline_data));
    raw.wr_set_inline_data_list = Some(call3(wr_set_inline_data_list));
    raw.wr_set_ud_addr = Some(call4(wr_set_ud_addr));
}

unsafe extern "C" fn wr_start(raw: Open<QueuePair>) {
    entry("ibv_wr_start", (), || {
        let Ok(qp) = raw.get() else { return };
        qp.turn.begin("ibv_wr_start", "ibv_wr_complete");
        *qp.session() = Session::default();
    });
}

unsafe extern "C" fn wr_complete(raw: Open<QueuePair>) -> c_int {
    status("ibv_wr_complete", || {
        let qp = raw.get()?;
        let session = std::mem::take(&mut *qp.session());
        let done = qp.queues.send().post_all(&session);
        qp.turn.end();
        done
    })
}

unsafe extern "C" fn wr_abort(raw: Open<QueuePair>) {
    entry("ibv_wr_abort", (), || {
        let Ok(qp) = raw.get() else { return };
        *qp.session() = Session::default();
        qp.turn.end();
    });
}

/// Adds a request to the session.
fn begin(raw: Open<QueuePair>, op: Operation) {
    entry("ibv_wr", (), || {
        let Ok(qp) = raw.get() else { return };
        let (wr_id, flags) = qp.next_request();
        let room = qp.queues.send().room();
        let mut session = qp.session();
        if session.error.is_some() {
            return;
        }
        match validate(qp, flags) {
            Err(error) => session.error = Some(error),
            Ok(()) if session.requests.len() >= room => session.error = Some(Errno::NOMEM),
            Ok(()) => session.requests.push(SendWqe::new(wr_id, NOWHERE, op)),
        }
    });
}

/// Changes the session's latest request.
fn change(raw: Open<QueuePair>, how: impl FnOnce(&mut SendWqe, &SendQueue) -> Result<(), Errno>) {
    entry("ibv_wr_set", (), || {
        let Ok(qp) = raw.get() else { return };
        let sq = qp.queues.send();
        let mut session = qp.session();
        if session.error.is_some() {
            return;
        }
        let done = session.requests.last_mut().ok_or(Errno::INVAL).and_then(|request| how(request, &sq));
        session.error = done.err();
    });
}

unsafe extern "C" fn wr_send(raw: Open<QueuePair>) {
    begin(raw, Operation::Send { data: SendData::Empty, imm: None })
}

unsafe extern "C" fn wr_send_imm(raw: Open<QueuePair>, imm: u32) {
    begin(raw, Operation::Send { data: SendData::Empty, imm: Some(u32::from_be(imm)) })
}

unsafe extern "C" fn wr_rdma_read(raw: Open<QueuePair>, rkey: u32, addr: u64) {
    begin(raw, Operation::Read { remote: RemoteMem { addr, rkey }, into: None })
}

unsafe extern "C" fn wr_rdma_write(raw: Open<QueuePair>, rkey: u32, addr: u64) {
    let op = Operation::Write { remote: RemoteMem { addr, rkey }, data: WriteData::Empty, imm: None };
    begin(raw, op)
}

unsafe extern "C" fn wr_rdma_write_imm(raw: Open<QueuePair>, rkey: u32, addr: u64, imm: u32) {
    let imm = Some(u32::from_be(imm));
    let op = Operation::Write { remote: RemoteMem { addr, rkey }, data: WriteData::Empty, imm };
    begin(raw, op)
}

unsafe extern "C" fn wr_set_sge(raw: Open<QueuePair>, lkey: u32, addr: u64, length: u32) {
    change(raw, |request, _| set_buffers(&mut request.op, &[Sge { addr, length, lkey }]))
}

unsafe extern "C" fn wr_set_sge_list(raw: Open<QueuePair>, count: Length, sges: List<ib::ibv_sge>) {
    let how = |request: &mut SendWqe, sq: &SendQueue| {
        set_buffers(&mut request.op, Buffers::of(sges.entries(count)?, sq.max_sge)?.get())
    };
    change(raw, how)
}

unsafe extern "C" fn wr_set_inline_data(raw: Open<QueuePair>, data: List<u8>, length: Length) {
    let how = |request: &mut SendWqe, sq: &SendQueue| {
        let data = data.entries(length)?;
        if data.len() > sq.max_inline as usize {
            return Err(Errno::INVAL);
        }
        set_inline(&mut request.op, Inline::new(data).ok_or(Errno::INVAL)?, sq)
    };
    change(raw, how)
}

unsafe extern "C" fn wr_set_inline_data_list(raw: Open<QueuePair>, count: Length, list: List<ib::ibv_data_buf>) {
    let how = |request: &mut SendWqe, sq: &SendQueue| {
        let buffers = list.entries(count)?.iter().map(|buf| (buf.addr.cast_const().cast(), buf.length));
        // SAFETY: the program keeps the data readable during the call.
        let inline = unsafe { inline_of(buffers, sq.max_inline) }?;
        set_inline(&mut request.op, inline, sq)
    };
    change(raw, how)
}

unsafe extern "C" fn wr_set_ud_addr(raw: Open<QueuePair>, ah: Open<Ah>, qpn: u32, qkey: u32) {
    let how = |request: &mut SendWqe, _: &SendQueue| {
        request.dest = destination(ah, qpn, qkey)?;
        Ok(())
    };
    change(raw, how)
}

pub(crate) unsafe extern "C" fn set_hints(dv: Efa<QueuePair>, hints: u32) {
    let how = |request: &mut SendWqe, _: &SendQueue| {
        request.hints = Hints::from_api(hints);
        Ok(())
    };
    change(dv.object(), how)
}
