//! mlx5: ConnectX cards' work requests and completions, field by field.

use ::mlx5::wire::{
    AddressVector, AtomicSeg, Cqe, CqeFormat, CqeOpcode, CtrlSeg, DataSeg, ErrCqe, FmCeSe, INLINE_FLAG, InlineHeader,
    KlmSeg, MAX_MINIS, MiniCqe, MkeyAccess, MkeyContext, MkeyMask, Opcode, RaddrSeg, SEGMENT, UmrCtrlSeg, UmrFlags,
};
use ::mlx5::wqe::{self, Data, Op, Transport};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::fields::{Decoded, screaming};

/// The low bits of the size, which counts 16-byte units.
const DS: u8 = 0x3f;

fn read<T: FromBytes + KnownLayout + Immutable + Unaligned>(bytes: &[u8], at: usize) -> Option<T> {
    T::read_from_prefix(bytes.get(at..)?).ok().map(|(value, _)| value)
}

fn name(code: impl std::fmt::Debug) -> String {
    screaming(&format!("{code:?}"))
}

/// Returns the names of the bits that are set.
fn names<T: Copy>(all: &[(T, &str)], has: impl Fn(T) -> bool) -> String {
    let set: Vec<&str> = all.iter().filter(|(bit, _)| has(*bit)).map(|(_, name)| *name).collect();
    if set.is_empty() { "none".into() } else { set.join(", ") }
}

/// Infers the queue pair's transport, which a work request does not name. A datagram's address vector has a flag where
/// a message buffer over a connection has its address's highest bit, which is never set; inline data may have any bits
/// there.
fn transport(bytes: &[u8], opcode: Opcode) -> Transport {
    let vector: Option<AddressVector> = read(bytes, SEGMENT);
    let vector = vector.filter(|vector| vector.dqp_dct.get() & AddressVector::EXTENDED != 0);
    let Some(vector) = vector.filter(|_| matches!(opcode, Opcode::Send | Opcode::SendImm)) else {
        return Transport::Rc;
    };
    let parses = |transport| wqe::parse(bytes, transport).is_ok();
    let is_datagram = vector.reserved.get() == 0 && parses(Transport::Ud);
    if is_datagram || !parses(Transport::Rc) { Transport::Ud } else { Transport::Rc }
}

/// Decodes a send queue's work request.
pub fn work_request(bytes: &[u8]) -> Decoded {
    let mut out = Decoded::default();
    let Some(ctrl) = read::<CtrlSeg>(bytes, 0) else { return out };
    let opcode = Opcode::from_code(ctrl.opcode());
    control(&mut out, &ctrl, opcode);
    let whole = &bytes[..bytes.len().min(usize::from(ctrl.ds() & DS) * SEGMENT)];
    let transport = transport(whole, opcode);
    let data_at = match opcode {
        Opcode::Send | Opcode::SendImm if transport == Transport::Ud => address_vector(&mut out, whole),
        Opcode::Send | Opcode::SendImm | Opcode::SendInval => Some(SEGMENT),
        Opcode::RdmaWrite | Opcode::RdmaWriteImm | Opcode::RdmaRead => remote(&mut out, whole),
        Opcode::AtomicCs | Opcode::AtomicFa => {
            remote(&mut out, whole).and_then(|at| atomic(&mut out, whole, at, opcode))
        }
        Opcode::Umr => {
            umr(&mut out, whole);
            None
        }
        Opcode::Nop | Opcode::Unknown(_) => None,
    };
    if let Some(at) = data_at {
        data(&mut out, whole, at);
    }
    match wqe::parse(bytes, transport) {
        Ok(wqe) => out.summary = format!("mlx5 work request: {}", operation(&wqe.op)),
        Err(error) => {
            out.summary = "mlx5 work request that a card would refuse".into();
            out.problems.push(error.to_string());
        }
    }
    out
}

fn control(out: &mut Decoded, ctrl: &CtrlSeg, opcode: Opcode) {
    out.hex(0, "opmod", ctrl.opmod(), "operation modifier");
    out.number(1, "index", ctrl.index(), "index of the first block of 64 bytes");
    out.hex(
        3,
        "opcode",
        ctrl.opcode(),
        match opcode {
            Opcode::Unknown(_) => "there is no operation with this code".into(),
            known => name(known),
        },
    );
    out.hex(4, "qpn", ctrl.qpn(), "queue pair");
    out.number(
        7,
        "ds",
        ctrl.ds(),
        format!("size in units of 16 bytes: {} bytes", usize::from(ctrl.ds() & DS) * SEGMENT),
    );
    out.hex(8, "signature", ctrl.signature, "zero on queues without");
    out.number(9, "dci_stream_channel_id", ctrl.dci_stream_channel_id.get(), "zero but on DC initiators");
    let flags = ctrl.fm_ce_se;
    let set = names(&[(FmCeSe::CQ_UPDATE, "completion wanted"), (FmCeSe::SOLICITED, "solicited event")], |flag| {
        flags.has(flag)
    });
    out.hex(11, "fm_ce_se", flags.bits(), format!("{set}; fence: {:?}", flags.fence()));
    out.hex(
        12,
        "imm",
        ctrl.imm.get(),
        match opcode {
            Opcode::SendInval => "the peer's key to invalidate",
            Opcode::Umr => "old key of the window",
            Opcode::SendImm | Opcode::RdmaWriteImm => "immediate data",
            _ => "not used",
        },
    );
}

fn remote(out: &mut Decoded, bytes: &[u8]) -> Option<usize> {
    let segment: RaddrSeg = read(bytes, SEGMENT)?;
    out.hex(
        SEGMENT,
        "raddr.raddr",
        segment.raddr.get(),
        "address in the peer's memory, or offset in a zero-based window",
    );
    out.hex(SEGMENT + 8, "raddr.rkey", segment.rkey.get(), "remote key");
    Some(2 * SEGMENT)
}

fn atomic(out: &mut Decoded, bytes: &[u8], at: usize, opcode: Opcode) -> Option<usize> {
    let segment: AtomicSeg = read(bytes, at)?;
    let swaps = opcode == Opcode::AtomicCs;
    out.hex(at, "atomic.swap_add", segment.swap_add.get(), if swaps { "value to store" } else { "value to add" });
    out.hex(at + 8, "atomic.compare", segment.compare.get(), if swaps { "value to compare with" } else { "not used" });
    Some(at + SEGMENT)
}

fn address_vector(out: &mut Decoded, bytes: &[u8]) -> Option<usize> {
    let at = SEGMENT;
    let av: AddressVector = read(bytes, at)?;
    out.hex(at, "av.qkey", av.qkey.get(), "queue key of the peer");
    let number = av.dqp_dct.get();
    out.hex(
        at + 8,
        "av.dqp_dct",
        number,
        format!("queue pair {:#x} of the peer; bit 31: the vector has 48 bytes", number & !AddressVector::EXTENDED),
    );
    out.hex(at + 12, "av.stat_rate_sl", av.stat_rate_sl, "static rate and service level");
    out.hex(at + 13, "av.fl_mlid", av.fl_mlid, "source path bits");
    out.hex(at + 14, "av.rlid", av.rlid.get(), "LID of the peer, or UDP source port");
    out.bytes(at + 20, "av.rmac", &av.rmac, "MAC address of the peer");
    out.number(at + 26, "av.tclass", av.tclass, "traffic class");
    out.number(at + 27, "av.hop_limit", av.hop_limit, "hop limit");
    out.hex(at + 28, "av.grh_gid_fl", av.grh_gid_fl.get(), "global route header (bit 30), GID index, flow label");
    out.bytes(at + 32, "av.rgid", &av.rgid, "GID of the peer");
    Some(at + size_of::<AddressVector>())
}

/// Adds buffers or inline data, from byte `at` to the end of the work request.
fn data(out: &mut Decoded, bytes: &[u8], at: usize) {
    let Some(rest) = bytes.get(at..) else { return };
    if let Some(header) = read::<InlineHeader>(rest, 0).map(|header| header.byte_count.get())
        && header & INLINE_FLAG != 0
    {
        let length = (header & !INLINE_FLAG) as usize;
        out.number(at, "inline.byte_count", header & !INLINE_FLAG, "bytes of inline data (bit 31 is set)");
        let data = &rest[size_of::<InlineHeader>()..];
        out.bytes(at + size_of::<InlineHeader>(), "inline data", &data[..length.min(data.len())], "");
        return;
    }
    for (n, segment) in rest.chunks_exact(SEGMENT).enumerate() {
        let (Some(segment), at) = (read::<DataSeg>(segment, 0), at + n * SEGMENT) else { return };
        out.number(at, format!("data[{n}].byte_count"), segment.byte_count.get(), "bytes");
        out.hex(at + 4, format!("data[{n}].lkey"), segment.lkey.get(), "local key");
        out.hex(at + 8, format!("data[{n}].addr"), segment.addr.get(), "address");
    }
}

fn umr(out: &mut Decoded, bytes: &[u8]) {
    let (ctrl_at, mkey_at) = (SEGMENT, SEGMENT + size_of::<UmrCtrlSeg>());
    let klm_at = mkey_at + size_of::<MkeyContext>();
    if let Some(ctrl) = read::<UmrCtrlSeg>(bytes, ctrl_at) {
        let flags = [
            (UmrFlags::CHECK_QPN, "only the queue pair that bound the window frees it"),
            (UmrFlags::TRANSLATION_OFFSET, "translation offset is valid"),
            (UmrFlags::CHECK_FREE, "the key must be free"),
            (UmrFlags::CHECK_BOUND, "the key must be bound"),
            (UmrFlags::INLINE, "entries are in the request"),
        ];
        out.hex(ctrl_at, "umr.flags", ctrl.flags.bits(), names(&flags, |flag| ctrl.flags.has(flag)));
        out.number(
            ctrl_at + 4,
            "umr.klm_octowords",
            ctrl.klm_octowords.get(),
            "translation entries in units of 16 bytes, padded to 64",
        );
        out.number(
            ctrl_at + 6,
            "umr.translation_offset",
            ctrl.translation_offset.get(),
            "offset in the translation table",
        );
        let mask = [
            (MkeyMask::LEN, "length"),
            (MkeyMask::START_ADDR, "start address"),
            (MkeyMask::MKEY, "tag"),
            (MkeyMask::QPN, "queue pair"),
            (MkeyMask::ACCESS_LOCAL_WRITE, "local write"),
            (MkeyMask::ACCESS_REMOTE_READ, "remote read"),
            (MkeyMask::ACCESS_REMOTE_WRITE, "remote write"),
            (MkeyMask::ACCESS_ATOMIC, "atomics"),
            (MkeyMask::FREE, "free state"),
        ];
        let mask = names(&mask, |bit| ctrl.mkey_mask.has(bit));
        out.hex(ctrl_at + 8, "umr.mkey_mask", ctrl.mkey_mask.bits(), format!("changes: {mask}"));
    }
    if let Some(mkey) = read::<MkeyContext>(bytes, mkey_at) {
        let freed = mkey.free & MkeyContext::FREE != 0;
        out.hex(mkey_at, "mkey.free", mkey.free, if freed { "the key becomes free" } else { "the key stays in use" });
        let rights = [
            (MkeyAccess::LOCAL_WRITE, "local write"),
            (MkeyAccess::REMOTE_READ, "remote read"),
            (MkeyAccess::REMOTE_WRITE, "remote write"),
            (MkeyAccess::ATOMIC, "atomics"),
        ];
        let rights = names(&rights, |right| mkey.access_flags.has(right));
        out.hex(mkey_at + 2, "mkey.access_flags", mkey.access_flags.bits(), format!("rights: {rights}"));
        let qpn = if mkey.qpn() == MkeyContext::ANY_QPN {
            "any queue pair".into()
        } else {
            format!("queue pair {:#x}", mkey.qpn())
        };
        out.hex(mkey_at + 4, "mkey.qpn_mkey", mkey.qpn_mkey.get(), format!("{qpn}; new tag {:#x}", mkey.tag()));
        out.hex(mkey_at + 16, "mkey.start_addr", mkey.start_addr.get(), "first address of the window");
        out.number(mkey_at + 24, "mkey.len", mkey.len.get(), "bytes of the window");
        out.number(
            mkey_at + 52,
            "mkey.translations_octword_size",
            mkey.translations_octword_size.get(),
            "as klm_octowords, or 0",
        );
        out.number(mkey_at + 59, "mkey.log_page_size", mkey.log_page_size, "0: the entries are KLMs");
    }
    if let Some(klm) = read::<KlmSeg>(bytes, klm_at) {
        out.number(klm_at, "klm.byte_count", klm.byte_count.get(), "bytes");
        out.hex(klm_at + 4, "klm.mkey", klm.mkey.get(), "key of the region below the window");
        out.hex(klm_at + 8, "klm.address", klm.address.get(), "address of the first byte");
    }
}

/// Says what a work request does, in a few words.
fn operation(op: &wqe::Parsed) -> String {
    let bytes = |data: &Data<Vec<wqe::Sge>, Vec<u8>>| match data {
        Data::Sges(sges) => {
            format!("{} bytes in {} buffers", sges.iter().map(|sge| u64::from(sge.length)).sum::<u64>(), sges.len())
        }
        Data::Inline(data) => format!("{} inline bytes", data.len()),
    };
    let there = |remote: &wqe::Remote| format!("rkey {:#x} at {:#x}", remote.rkey, remote.addr);
    match op {
        Op::Nop => "no operation".into(),
        Op::Send { data, with: wqe::With::Nothing } => format!("send of {}", bytes(data)),
        Op::Send { data, with: wqe::With::Imm(imm) } => format!("send of {} with immediate data {imm:#x}", bytes(data)),
        Op::Send { data, with: wqe::With::Invalidate(key) } => {
            format!("send of {} that invalidates key {key:#x}", bytes(data))
        }
        Op::Datagram { to, data, .. } => format!("datagram of {} to queue pair {:#x}", bytes(data), to.qpn),
        Op::Write { remote, data, .. } => format!("write of {} to {}", bytes(data), there(remote)),
        Op::Read { remote, into } => format!("read of {} from {}", bytes(&Data::Sges(into.clone())), there(remote)),
        Op::CompareSwap { remote, .. } => format!("compare and swap at {}", there(remote)),
        Op::FetchAdd { remote, .. } => format!("fetch and add at {}", there(remote)),
        Op::Umr { umr, kind: wqe::UmrKind::Bind } => format!("bind of the window with the old key {:#x}", umr.key),
        Op::Umr { umr, kind: wqe::UmrKind::LocalInv } => match umr.mkey.qpn() {
            MkeyContext::ANY_QPN => format!("invalidation of a key with the tag {:#x}", umr.mkey.tag()),
            qpn => format!("invalidation of a key of queue pair {qpn:#x}"),
        },
    }
}

/// Decodes a 64-byte completion entry.
pub fn completion(bytes: &[u8]) -> Decoded {
    let mut out = Decoded::default();
    let Some(cqe) = read::<Cqe>(bytes, 0) else { return out };
    if cqe.op_own.format() == CqeFormat::Compressed {
        block(&mut out, bytes, &cqe);
        return out;
    }
    let opcode = cqe.op_own.opcode();
    let (qpn, index) = (cqe.sop_drop_qpn.get() & ::mlx5::wire::MAX_24_BITS, cqe.wqe_counter.get());
    match opcode {
        CqeOpcode::ReqErr | CqeOpcode::RespErr => failure(&mut out, bytes, opcode, qpn, index),
        _ => regular(&mut out, &cqe, opcode, qpn, index),
    }
    let sop = (cqe.sop_drop_qpn.get() >> 24) as u8;
    let request = matches!(opcode, CqeOpcode::Req | CqeOpcode::ReqErr);
    out.hex(56, "s_wqe_opcode", sop, if request { name(Opcode::from_code(sop)) } else { "not of a send queue".into() });
    out.hex(57, "qpn", qpn, "queue pair");
    out.number(60, "wqe_counter", index, "index of the work request");
    place(&mut out, &cqe);
    out.hex(
        63,
        "op_own.opcode",
        cqe.op_own.0 >> 4,
        match opcode {
            CqeOpcode::Unknown(_) => "there is no completion with this code".into(),
            known => name(known),
        },
    );
    out
}

/// Adds the lap, the format and the owner, which every entry has.
fn place(out: &mut Decoded, cqe: &Cqe) {
    out.number(
        62,
        "signature",
        cqe.signature,
        "on a compressed queue, the lap's low byte: the entry is valid if it matches",
    );
    out.flag(
        63,
        "op_own.owner",
        cqe.op_own.owner(),
        "without compression, the lap's parity: the entry is valid if it matches",
    );
    out.number(63, "op_own.format", cqe.op_own.0 >> 2 & 3, format!("{:?}", cqe.op_own.format()));
}

fn regular(out: &mut Decoded, cqe: &Cqe, opcode: CqeOpcode, qpn: u32, index: u16) {
    out.number(2, "wqe_id", cqe.wqe_id.get(), "index of a receive descriptor in striding queues");
    out.number(17, "ml_path", cqe.ml_path, "path bits of a datagram");
    out.hex(22, "slid", cqe.slid.get(), "source LID of a datagram");
    out.hex(24, "flags_rqpn", cqe.flags_rqpn.get(), "flags, and the source queue pair of a datagram");
    out.number(32, "srqn_uidx", cqe.srqn_uidx.get(), "shared receive queue, or the user's index");
    out.hex(
        36,
        "imm_inval_pkey",
        cqe.imm_inval_pkey.get(),
        match opcode {
            CqeOpcode::RespSendImm | CqeOpcode::RespWrImm => "immediate data",
            CqeOpcode::RespSendInv => "the key that the message invalidated",
            _ => "not used",
        },
    );
    out.number(44, "byte_cnt", cqe.byte_cnt.get(), "bytes");
    out.number(48, "timestamp", cqe.timestamp.get(), "clock of the card");
    let bytes = cqe.byte_cnt.get();
    out.summary = match opcode {
        CqeOpcode::Req => format!("mlx5 completion: work request {index:#x} of queue pair {qpn:#x} completed"),
        CqeOpcode::RespSend | CqeOpcode::RespSendImm | CqeOpcode::RespSendInv => {
            format!("mlx5 completion: a message of {bytes} bytes for queue pair {qpn:#x}")
        }
        CqeOpcode::RespWrImm => {
            format!("mlx5 completion: a write of {bytes} bytes with immediate data for queue pair {qpn:#x}")
        }
        CqeOpcode::Invalid => "mlx5 completion slot that was never written".into(),
        CqeOpcode::Unknown(code) => {
            out.problems.push(format!("no completion has the code {code}"));
            "mlx5 completion of an unknown kind".into()
        }
        other => format!("mlx5 completion {}", name(other)),
    };
}

fn failure(out: &mut Decoded, bytes: &[u8], opcode: CqeOpcode, qpn: u32, index: u16) {
    let Some(entry) = read::<ErrCqe>(bytes, 0) else { return };
    let syndrome = entry.syndrome();
    out.number(32, "srqn", entry.srqn.get(), "shared receive queue");
    out.hex(54, "vendor_err_synd", entry.vendor_err_synd, "the vendor's code");
    out.hex(55, "syndrome", entry.syndrome, syndrome.to_string());
    let what = if opcode == CqeOpcode::ReqErr { "work request" } else { "receive" };
    out.summary = format!("mlx5 completion: {what} {index:#x} of queue pair {qpn:#x} failed: {syndrome}");
}

/// Decodes a block of mini completions. The block's title entry has the queue pair.
fn block(out: &mut Decoded, bytes: &[u8], cqe: &Cqe) {
    let minis = cqe.op_own.minis();
    for n in 0..minis.min(MAX_MINIS) {
        let at = n * size_of::<MiniCqe>();
        let Some(mini) = read::<MiniCqe>(bytes, at) else { return };
        out.number(
            at,
            format!("mini[{n}].wqe_counter"),
            mini.wqe_counter.get(),
            "index of the work request, of a send queue",
        );
        out.hex(
            at + 2,
            format!("mini[{n}].s_wqe_opcode"),
            mini.s_wqe_opcode,
            name(Opcode::from_code(mini.s_wqe_opcode)),
        );
        out.number(at + 4, format!("mini[{n}].byte_cnt"), mini.byte_cnt.get(), "bytes");
    }
    out.summary =
        format!("mlx5 compressed completions: {minis}, whose other fields are those of the title before them");
    if minis > MAX_MINIS {
        out.problems.push(format!("a block has at most {MAX_MINIS} completions"));
    }
    place(out, cqe);
    out.number(63, "op_own.minis", minis as u64, "completions in the block");
}
