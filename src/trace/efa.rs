//! EFA: work requests, receive descriptors and completions, field by field.

use efa_dp_direct::cq::{Cqe, RawCqe, RecvCqe, SendCqe, Sender, Status};
use efa_dp_direct::wire::{
    CdescCommon, CompStatus, Ctrl1, Ctrl2, Ctrl3, Lkey, QueueType, RdmaReq, RxDesc, SendOp, TxBufDesc, TxMetaDesc,
    TxWqe, TxWqe128, UNKNOWN_AH,
};
use efa_dp_direct::wqe::{self, Geometry, Operation, RequestIds, SendData, SendWqe, Sge, WqeSize, WriteData};

use super::fields::{Decoded, hex, screaming};

/// First byte of the operation-specific part of a work request.
const BODY: usize = TxMetaDesc::SIZE;
const LOCAL: usize = BODY + 16;

/// Describes a status: its number, its name and its meaning.
pub fn status(raw: u8) -> String {
    match Status::from_raw(raw) {
        Status::Known(known) => format!("{raw} {}: {known}", screaming(&format!("{known:?}"))),
        unknown => unknown.to_string(),
    }
}

/// Returns a status in one word.
pub fn status_name(raw: u8) -> String {
    CompStatus::from_raw(raw).map_or_else(|| "unknown".into(), |known| screaming(&format!("{known:?}")))
}

/// Returns the name of an operation code.
pub fn operation(raw: u8) -> String {
    match SendOp::from_raw(raw) {
        Some(SendOp::Send) => "send".into(),
        Some(SendOp::RdmaRead) => "read".into(),
        Some(SendOp::RdmaWrite) => "write".into(),
        Some(SendOp::FastReg) => "fast-reg".into(),
        Some(SendOp::FastInv) => "fast-inv".into(),
        None => format!("op-{raw}"),
    }
}

fn geometry(bytes: usize) -> Option<Geometry> {
    match WqeSize::from_bytes(bytes)? {
        WqeSize::Narrow => Some(Geometry::NARROW),
        WqeSize::Wide => Some(Geometry::WIDE),
    }
}

/// Parses the request in 64 or 128 bytes, as a card reads it.
pub fn parse(bytes: &[u8]) -> Option<Result<SendWqe, wqe::WqeError>> {
    geometry(bytes.len()).map(|geometry| wqe::parse(bytes, &geometry))
}

/// Returns the bytes of the transfer.
pub fn length(wqe: &SendWqe) -> u64 {
    match &wqe.op {
        Operation::Send { data, .. } => data.len(),
        Operation::Write { data, .. } => data.len().into(),
        Operation::Read { into, .. } => into.map_or(0, |sge| sge.length.into()),
    }
}

fn sge_text(sge: &Sge) -> String {
    format!("lkey {:#x} at {:#x}+{}", sge.lkey, sge.addr, sge.length)
}

/// Returns a request's memory and immediate data, in one line.
pub fn details(wqe: &SendWqe) -> String {
    let mut parts = Vec::new();
    match &wqe.op {
        Operation::Send { data: SendData::Inline(data), .. }
        | Operation::Write { data: WriteData::Inline(data), .. } => {
            parts.push(format!("inline {}", hex(data.data())));
        }
        Operation::Send { data: SendData::One(sge), .. }
        | Operation::Write { data: WriteData::One(sge), .. }
        | Operation::Read { into: Some(sge), .. } => parts.push(sge_text(sge)),
        Operation::Send { data: SendData::Two(first, second), .. } => {
            parts.push(format!("{} and {}", sge_text(first), sge_text(second)));
        }
        Operation::Send { data: SendData::Empty, .. }
        | Operation::Write { data: WriteData::Empty, .. }
        | Operation::Read { into: None, .. } => {}
    }
    match &wqe.op {
        Operation::Write { remote, .. } | Operation::Read { remote, .. } => {
            let arrow = if matches!(wqe.op, Operation::Read { .. }) { "<-" } else { "->" };
            parts.push(format!("{arrow} rkey {:#x} at {:#x}", remote.rkey, remote.addr));
        }
        Operation::Send { .. } => {}
    }
    if let Some(imm) = wqe.op.imm() {
        parts.push(format!("imm {imm:#x}"));
    }
    if !wqe.completion {
        parts.push("unsignaled".into());
    }
    parts.join(" ")
}

/// Decodes a send queue's work request: 64 or 128 bytes.
pub fn work_request(bytes: &[u8]) -> Decoded {
    let mut out = Decoded::default();
    let (meta, sgl, body) = match bytes.len() {
        64 => {
            let Ok(bytes) = bytes.try_into() else { return out };
            let wqe = TxWqe::from_bytes(bytes);
            (wqe.meta, wqe.data.sgl(), wqe.data.rdma_req())
        }
        _ => {
            let Ok(bytes) = bytes.try_into() else { return out };
            let wqe = TxWqe128::from_bytes(bytes);
            let wide = wqe.data.rdma_req();
            let body = RdmaReq { remote_mem: wide.remote_mem, local_mem: wide.local_mem() };
            (wqe.meta, wqe.data.sgl(), body)
        }
    };
    meta_fields(&mut out, &meta);
    body_fields(&mut out, bytes, &meta, &sgl, &body);
    match parse(bytes) {
        Some(Ok(wqe)) => {
            let size = if bytes.len() == 64 { "narrow" } else { "wide" };
            out.summary =
                format!("EFA work request ({size}): {} of {} bytes", operation(wqe.op.op().raw()), length(&wqe));
            let details = details(&wqe);
            if !details.is_empty() {
                out.summary += &format!(", {details}");
            }
        }
        Some(Err(error)) => {
            out.summary = "EFA work request that a card would refuse".into();
            out.problems = vec![format!("{error}; the card completes it with status {}", status(error.status().raw()))];
        }
        None => {}
    }
    out
}

fn meta_fields(out: &mut Decoded, meta: &TxMetaDesc) {
    let (c1, c2, c3) = (meta.ctrl1, meta.ctrl2, meta.ctrl3);
    out.hex(
        0,
        "req_id",
        meta.req_id,
        format!("low 16 bits of the request id {:#x}", meta.req_id_ex.wr_id(meta.req_id)),
    );
    out.number(
        2,
        "ctrl1.op_type",
        c1.op_type(),
        match SendOp::from_raw(c1.op_type()) {
            Some(op) => screaming(&format!("{op:?}")),
            None => "there is no operation with this code".into(),
        },
    );
    out.flag(2, "ctrl1.has_imm", c1.has_imm(), "immediate_data is valid");
    out.flag(2, "ctrl1.inline_msg", c1.inline_msg(), "the data are in the request, and length counts bytes");
    out.flag(2, "ctrl1.meta_extension", c1.meta_extension(), "must be 0");
    out.flag(2, "ctrl1.meta_desc", c1.meta_desc(), "must be 1: the slot was written");
    out.flag(3, "ctrl2.phase", c2.phase(), "0 in the first lap of the ring, and flips with each lap");
    out.flag(3, "ctrl2.first", c2.first(), "must be 1");
    out.flag(3, "ctrl2.last", c2.last(), "must be 1");
    out.flag(3, "ctrl2.comp_req", c2.comp_req(), "a completion entry is wanted");
    out.number(4, "dest_qp_num", meta.dest_qp_num, "queue pair of the peer");
    let counts = if c1.inline_msg() { "bytes of inline data" } else { "buffers" };
    out.number(6, "length", meta.length, counts);
    out.hex(
        8,
        "immediate_data",
        meta.immediate_data,
        if c1.has_imm() { "for the peer's completion" } else { "not valid" },
    );
    out.number(12, "ah", meta.ah, "address handle of the peer");
    out.number(
        14,
        "ctrl3.processing_hints",
        c3.processing_hints(),
        "bit 0: the burst's rate matters more than its latency",
    );
    out.hex(16, "qkey", meta.qkey, "queue key of the peer");
    out.bytes(26, "req_id_ex", &meta.req_id_ex.to_bytes(), "high 48 bits of the request id");
    for (at, name, bits) in [
        (2, "reserved bits of ctrl1", c1.0 & Ctrl1::RESERVED),
        (3, "reserved bits of ctrl2", c2.0 & Ctrl2::RESERVED),
        (14, "reserved bits of ctrl3", c3.0 & Ctrl3::RESERVED),
        (15, "reserved", meta.reserved),
    ] {
        out.zero(at, name, &[bits]);
    }
    out.zero(20, "reserved2", &meta.reserved2);
}

fn body_fields(out: &mut Decoded, bytes: &[u8], meta: &TxMetaDesc, sgl: &[TxBufDesc], body: &RdmaReq) {
    let inline = |out: &mut Decoded, at: usize| {
        let end = (at + usize::from(meta.length)).min(bytes.len());
        out.bytes(at, "inline data", &bytes[at..end], "");
    };
    match SendOp::from_raw(meta.ctrl1.op_type()) {
        Some(SendOp::Send) if meta.ctrl1.inline_msg() => inline(out, BODY),
        Some(SendOp::Send) => {
            for (n, desc) in sgl.iter().enumerate().take(meta.length.into()) {
                buffer(out, BODY + n * TxBufDesc::SIZE, &format!("sgl[{n}]"), desc);
            }
        }
        Some(SendOp::RdmaRead | SendOp::RdmaWrite) => {
            let remote = &body.remote_mem;
            out.number(BODY, "remote_mem.length", remote.length, "bytes");
            out.hex(BODY + 4, "remote_mem.rkey", remote.rkey, "remote key");
            out.hex(BODY + 8, "remote_mem.buf_addr", remote.addr(), "address in the peer's memory");
            if meta.ctrl1.inline_msg() {
                inline(out, LOCAL);
            } else if meta.length > 0 {
                buffer(out, LOCAL, "local_mem[0]", &body.local_mem[0]);
            }
        }
        Some(SendOp::FastReg | SendOp::FastInv) | None => out.bytes(BODY, "operation's part", &bytes[BODY..], ""),
    }
}

fn buffer(out: &mut Decoded, at: usize, name: &str, desc: &TxBufDesc) {
    out.number(at, format!("{name}.length"), desc.length, "bytes");
    out.hex(at + 4, format!("{name}.lkey"), desc.lkey.lkey(), "local key");
    out.hex(at + 8, format!("{name}.buf_addr"), desc.addr(), "address");
    out.zero(at + 7, "reserved bits of lkey", &[(desc.lkey.0 & Lkey::RESERVED).to_le_bytes()[3]]);
}

/// Decodes a receive's descriptors: 16 bytes each.
pub fn receive(bytes: &[u8]) -> Decoded {
    let mut out = Decoded::default();
    let (descs, _) = bytes.as_chunks::<{ RxDesc::SIZE }>();
    let mut room = 0;
    for (n, desc) in descs.iter().map(RxDesc::from_bytes).enumerate() {
        let (at, control) = (n * RxDesc::SIZE, desc.lkey_ctrl);
        out.hex(at, "buf_addr", desc.addr(), "address");
        out.number(at + 8, "req_id", desc.req_id, "request id");
        out.number(at + 10, "length", desc.length, "bytes");
        out.hex(at + 12, "lkey", control.lkey(), "local key");
        out.flag(at + 15, "first", control.first(), "first buffer of the receive");
        out.flag(at + 15, "last", control.last(), "last buffer of the receive");
        out.zero(
            at + 15,
            "reserved bits",
            &[control.with_lkey(0).with_first(false).with_last(false).0.to_le_bytes()[3]],
        );
        room += u64::from(desc.length);
        if control.first() != (n == 0) {
            out.problems.push("a receive begins with its first buffer, and no other buffer is a first one".into());
        }
        if control.last() != (n + 1 == descs.len()) {
            out.problems.push("a receive ends with its last buffer, and no other buffer is a last one".into());
        }
    }
    out.summary = format!("EFA receive of up to {room} bytes");
    out
}

/// Decodes a completion entry: 16 or 32 bytes.
pub fn completion(bytes: &[u8]) -> Decoded {
    let mut out = Decoded::default();
    let mut raw = RawCqe::ZERO;
    let size = bytes.len().min(raw.0.len());
    raw.0[..size].copy_from_slice(&bytes[..size]);
    let CdescCommon { req_id, status: code, flags, qp_num } = raw.common();
    out.hex(0, "req_id", req_id, "request id, or its low 16 bits");
    out.number(2, "status", code, status(code));
    out.flag(3, "flags.phase", flags.phase(), "1 in the first lap of the completion queue, and flips with each lap");
    let queue = QueueType::from_raw(flags.q_type());
    out.number(
        3,
        "flags.q_type",
        flags.q_type(),
        match queue {
            Some(QueueType::Send) => "of a send queue",
            Some(QueueType::Recv) => "of a receive queue",
            None => "neither a send queue (1) nor a receive queue (2)",
        },
    );
    out.flag(3, "flags.has_imm", flags.has_imm(), "imm is valid");
    let op = SendOp::from_raw(flags.op_type());
    let name = op.map_or_else(|| "there is no operation with this code".into(), |op| screaming(&format!("{op:?}")));
    out.number(3, "flags.op_type", flags.op_type(), name);
    out.flag(3, "flags.unsolicited", flags.unsolicited(), "no receive was consumed");
    out.number(4, "qp_num", qp_num, "local queue pair");
    if CompStatus::from_raw(code).is_none() || op.is_none() {
        out.problems.push("the status or the operation has a code that no release names".into());
    }
    match Cqe::parse(&raw, RequestIds::Bits64) {
        Ok(Cqe::Send(SendCqe { wr_id, op, status, .. })) => {
            let entry = raw.tx();
            out.bytes(
                6,
                "req_id_ex",
                &entry.req_id_ex.to_bytes(),
                format!("high 48 bits of the request id {wr_id:#x}"),
            );
            out.zero(12, "reserved", &entry.reserved);
            let op = op.map_or_else(operation, |op| operation(op.raw()));
            out.summary = format!("EFA completion: {op} of queue pair {qp_num}, request id {wr_id:#x}: {status}");
        }
        Ok(Cqe::Recv(cqe)) => received(&mut out, &raw, &cqe, size == 32),
        Err(error) => {
            out.summary = "EFA completion of an unknown queue type".into();
            out.problems.push(error.to_string());
        }
    }
    out
}

fn received(out: &mut Decoded, raw: &RawCqe, cqe: &RecvCqe, long: bool) {
    let entry = raw.rx();
    out.number(6, "length", entry.base.length, "low 16 bits of the length");
    out.number(
        8,
        "ah",
        entry.base.ah,
        if entry.base.ah == UNKNOWN_AH { "no address handle has the sender" } else { "address handle of the sender" },
    );
    out.number(10, "src_qp_num", entry.base.src_qp_num, "queue pair of the sender");
    out.hex(12, "imm", entry.base.imm, if cqe.imm.is_some() { "immediate data" } else { "not valid" });
    if long {
        match cqe.sender {
            _ if cqe.op == Ok(SendOp::RdmaWrite) => {
                let high = entry.extra.rdma_write().length_hi;
                out.number(16, "length_hi", high, format!("high 16 bits of the length {}", cqe.length));
            }
            Sender::Gid(_) => out.bytes(16, "src_addr", entry.extra.src_addr(), "GID of the sender"),
            Sender::Ah(_) => {}
        }
    }
    let what = if cqe.op == Ok(SendOp::RdmaWrite) { "write with immediate data" } else { "message" };
    out.summary = format!(
        "EFA completion: {what} of {} bytes for queue pair {}, request id {:#x}: {}",
        cqe.length, cqe.qp_num, cqe.req_id, cqe.status
    );
}
