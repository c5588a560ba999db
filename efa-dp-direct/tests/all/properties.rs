//! Properties with an oracle: requests and completions survive a round trip through bytes, no bytes make a parser
//! panic, and rings keep their arithmetic at every wrap.

#![allow(unsafe_code)]

use crate::common::memory::{Doorbell, Ring};
use crate::common::{as_sent, from_template};
use efa_dp_direct::cq::{self, Cqe, RawCqe, RecvCqe, SendCqe, Sender, Status, reader};
use efa_dp_direct::host::{Flavour, HostSq};
use efa_dp_direct::queue::{CqAttrs, CqV0, QpAttrs, QpV1, WQ_CAPS_64_BIT_REQ_ID, WqV0};
use efa_dp_direct::sq;
use efa_dp_direct::wire::*;
use efa_dp_direct::wqe::words::{self, NARROW, WIDE};
use efa_dp_direct::wqe::{
    Destination, Geometry, Hints, Inline, Operation, RemoteMem, RequestIds, SendData, SendWqe, Sge, WqeSize, WriteData,
    parse,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use std::cell::UnsafeCell;

fn geometry() -> impl Strategy<Value = Geometry> {
    prop_oneof![
        Just(Geometry::V0),
        (0..=32u32).prop_map(|max_inline| Geometry { max_inline, ..Geometry::NARROW }),
        (0..=80u32).prop_map(|max_inline| Geometry { max_inline, ..Geometry::WIDE }),
    ]
}

fn any_sge() -> impl Strategy<Value = Sge> {
    any::<(u64, u32, u32)>().prop_map(|(addr, length, lkey)| Sge { addr, length, lkey })
}

fn any_remote() -> impl Strategy<Value = RemoteMem> {
    any::<(u64, u32)>().prop_map(|(addr, rkey)| RemoteMem { addr, rkey })
}

fn any_inline() -> impl Strategy<Value = Inline> {
    vec(any::<u8>(), 0..=80).prop_map(|data| Inline::new(&data).expect("80 bytes at most"))
}

fn any_operation() -> impl Strategy<Value = Operation> {
    let send = prop_oneof![
        Just(SendData::Empty),
        any_sge().prop_map(SendData::One),
        (any_sge(), any_sge()).prop_map(|(first, second)| SendData::Two(first, second)),
        any_inline().prop_map(SendData::Inline),
    ];
    let write = prop_oneof![
        Just(WriteData::Empty),
        any_sge().prop_map(WriteData::One),
        any_inline().prop_map(WriteData::Inline)
    ];
    prop_oneof![
        (send, option::of(any::<u32>())).prop_map(|(data, imm)| Operation::Send { data, imm }),
        (any_remote(), write, option::of(any::<u32>())).prop_map(|(remote, data, imm)| Operation::Write {
            remote,
            data,
            imm
        }),
        (any_remote(), option::of(any_sge())).prop_map(|(remote, into)| Operation::Read { remote, into }),
    ]
}

fn any_wqe() -> impl Strategy<Value = SendWqe> {
    let dest = any::<(u16, u16, u32)>().prop_map(|(ah, qpn, qkey)| Destination { ah, qpn, qkey });
    (any::<(u64, u32, bool, bool)>(), dest, any_operation()).prop_map(
        |((wr_id, hints, phase, completion), dest, op)| SendWqe {
            phase,
            completion,
            hints: Hints::from_api(hints),
            ..SendWqe::new(wr_id, dest, op)
        },
    )
}

/// Returns the length of the inline data, if any.
fn inline_length(op: &Operation) -> Option<usize> {
    match op {
        Operation::Send { data: SendData::Inline(data), .. }
        | Operation::Write { data: WriteData::Inline(data), .. } => Some(data.data().len()),
        _ => None,
    }
}

proptest! {
    #[test]
    fn emitted_requests_parse_to_themselves(geometry in geometry(), mut wqe in any_wqe()) {
        if geometry.request_ids == RequestIds::Bits16 {
            wqe.wr_id &= 0xffff;
        }
        let size = geometry.wqe_size;
        let (mut out, mut other) = (vec![0xa5; size.bytes()], vec![0x5a; size.bytes()]);
        let outcome = wqe.emit(&geometry, &mut out);
        prop_assert_eq!(wqe.emit(&geometry, &mut other), outcome);
        prop_assert_eq!(&out, &other, "every byte is written");

        let inline = inline_length(&wqe.op);
        let inline_write = inline.is_some() && matches!(wqe.op, Operation::Write { .. });
        let legal = inline.is_none_or(|n| n <= geometry.max_inline as usize)
            && !(inline_write && size == WqeSize::Narrow);
        prop_assert_eq!(outcome.is_ok(), legal);
        if legal {
            prop_assert_eq!(parse(&out, &geometry), Ok(as_sent(wqe)));
        }
    }

    /// A post copies its peer's template; the bytes must be the same as `emit` writes.
    #[test]
    fn requests_from_templates_have_same_bytes(
        wqe in any_wqe(),
        data in prop_oneof![vec(any::<u8>(), words::SEND_BYTES), vec(any::<u8>(), 8), vec(any::<u8>(), 1)],
        wide: bool,
    ) {
        let geometry = if wide { Geometry::WIDE } else { Geometry::NARROW };
        let mut wqe = SendWqe { wr_id: wqe.wr_id & 0xffff, completion: true, ..wqe };
        match &mut wqe.op {
            Operation::Send { data: SendData::Inline(inline), .. } | Operation::Write { data: WriteData::Inline(inline), .. } => {
                *inline = Inline::new(&data).expect("80 bytes at most");
            }
            Operation::Write { data: WriteData::One(sge), .. } | Operation::Read { into: Some(sge), .. } => sge.lkey &= 0xff_ffff,
            _ => {}
        }
        let mut out = vec![0xa5; geometry.wqe_size.bytes()];
        if wqe.emit(&geometry, &mut out).is_ok() && let Some(words) = from_template(&wqe, geometry.wqe_size) {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            prop_assert_eq!(out, bytes);
            prop_assert_eq!(words::phase_of(words[0]), wqe.phase);
        }
    }

    #[test]
    fn parse_of_any_bytes_does_not_panic(geometry in geometry(), bytes in vec(any::<u8>(), 0..200)) {
        let _ = parse(&bytes, &geometry);
    }

    /// Near a legal request most bytes matter: a request that parses keeps everything that its head says.
    #[test]
    fn parsed_requests_emit_same_bytes(
        geometry in geometry(),
        wqe in any_wqe(),
        damage in vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let mut bytes = vec![0; geometry.wqe_size.bytes()];
        let _ = wqe.emit(&geometry, &mut bytes);
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(parsed) = parse(&bytes, &geometry) {
            let mut again = vec![0xa5; bytes.len()];
            prop_assert_eq!(parsed.emit(&geometry, &mut again), Ok(()));
            prop_assert_eq!(parse(&again, &geometry), Ok(parsed));
            // Immediate data without its flag means nothing; everything else in the head means something.
            prop_assert_eq!(&bytes[..8], &again[..8]);
            prop_assert_eq!(&bytes[12..32], &again[12..32]);
        }
    }

    #[test]
    fn request_of_wrong_size_is_refused(geometry in geometry(), bytes in vec(any::<u8>(), 0..200)) {
        prop_assume!(bytes.len() != geometry.wqe_size.bytes());
        prop_assert!(parse(&bytes, &geometry).is_err());
    }

    #[test]
    fn completions_parse_to_themselves(
        (qp_num, wr_id, op, status, phase) in any::<(u16, u64, u8, u8, bool)>(),
        (length, imm, unsolicited, src_qp_num, ah, gid) in any::<(u32, Option<u32>, bool, u16, u16, [u8; 16])>(),
    ) {
        let op = SendOp::from_raw(op & 7).ok_or(op & 7);
        let status = Status::from_raw(status);
        let send = Cqe::Send(SendCqe { qp_num, wr_id, op, status });
        let raw = send.emit(phase);
        prop_assert_eq!(raw.phase(), phase);
        prop_assert_eq!(Cqe::parse(&raw, RequestIds::Bits64), Ok(send));
        prop_assert_eq!(reader::device(&raw, RequestIds::Bits16).req_id, wr_id & 0xffff);

        let is_write = op == Ok(SendOp::RdmaWrite);
        let recv = Cqe::Recv(RecvCqe {
            qp_num,
            req_id: wr_id as u16,
            op,
            status,
            length: if is_write { length } else { length & 0xffff },
            imm,
            unsolicited,
            src_qp_num,
            sender: if ah == UNKNOWN_AH || ah % 4 == 0 { Sender::Gid((!is_write).then_some(gid)) } else { Sender::Ah(ah) },
        });
        let raw = recv.emit(phase);
        prop_assert_eq!(raw.phase(), phase);
        prop_assert_eq!(Cqe::parse(&raw, RequestIds::Bits64), Ok(recv));
    }

    #[test]
    fn readers_take_any_bytes(bytes in any::<[u8; 32]>()) {
        let raw = RawCqe(bytes);
        let known = QueueType::from_raw(raw.common().flags.q_type()).is_some();
        prop_assert_eq!(Cqe::parse(&raw, RequestIds::Bits64).is_ok(), known);
        prop_assert_eq!(Cqe::parse(&raw, RequestIds::Bits16).is_ok(), known);
        reader::device(&raw, RequestIds::Bits16);
        reader::host(&raw);
    }

    #[test]
    fn wire_structs_hold_any_bytes(bytes in any::<[[u8; 32]; 4]>()) {
        let bytes = bytes.as_flattened();
        macro_rules! same_bytes {
            ($($ty:ident),*) => {$(
                let part: &[u8; $ty::SIZE] = bytes[..$ty::SIZE].try_into().expect("long enough");
                prop_assert_eq!(&$ty::from_bytes(part).to_bytes(), part);
            )*};
        }
        same_bytes!(
            TxMetaDesc, TxBufDesc, RemoteMemAddr, RdmaReq, RdmaReq128, TxData, TxData128,
            TxWqe, TxWqe128, RxDesc, CdescCommon, TxCdescV0, TxCdesc, RxCdesc, RxCdescRdmaWrite, RxExtra, RxCdescEx,
            ReqIdEx
        );
        let meta = TxMetaDesc { reserved: 0, reserved2: [0; 6], ..TxWqe::from_bytes(bytes[..64].try_into().unwrap()).meta };
        let words: Vec<u8> = meta.to_words().iter().flat_map(|w| w.to_le_bytes()).collect();
        prop_assert_eq!(&words[..], &meta.to_bytes()[..], "the head in words");
        let desc = RxDesc::from_bytes(bytes[..16].try_into().unwrap());
        let words: Vec<u8> = desc.to_words().iter().flat_map(|w| w.to_le_bytes()).collect();
        prop_assert_eq!(&words[..], &desc.to_bytes()[..], "a receive in words");
    }

    #[test]
    fn bit_fields_are_independent((a, b) in any::<(u8, u8)>(), (c, d) in any::<(u32, u32)>()) {
        let flags = CdescFlags(a);
        prop_assert_eq!(flags.with_q_type(b).q_type(), b & 3);
        prop_assert_eq!(flags.with_q_type(b).with_q_type(flags.q_type()), flags);
        prop_assert_eq!(flags.with_op_type(b).op_type(), b & 7);
        prop_assert_eq!(flags.with_op_type(b).with_op_type(flags.op_type()), flags);
        prop_assert_eq!(flags.with_phase(b & 1 != 0).with_phase(flags.phase()), flags);
        prop_assert_eq!(CdescFlags::RESERVED, 0);
        prop_assert_eq!(Ctrl2::RESERVED, 0xe2);
        prop_assert_eq!(Ctrl3::RESERVED, 0xfc);
        prop_assert_eq!(LkeyCtrl(c).with_lkey(d).lkey(), d & 0xff_ffff);
        prop_assert_eq!(LkeyCtrl(c).with_lkey(d).0 >> 24, c >> 24);
    }

    #[test]
    fn unknown_codes_stay_unknown(raw in any::<u8>()) {
        prop_assert_eq!(CompStatus::from_raw(raw).is_some(), raw <= 15 || raw == 18);
        prop_assert_eq!(SendOp::from_raw(raw).is_some(), raw <= 4);
        prop_assert_eq!(QueueType::from_raw(raw).is_some(), raw == 1 || raw == 2);
        prop_assert_eq!(CompStatus::from_raw(raw).map_or(raw, CompStatus::raw), raw);
        prop_assert_eq!(Status::from_raw(raw).raw(), raw);
        prop_assert_eq!(Status::from_raw(raw).is_ok(), raw == 0);
    }
}

/// Returns counts near every wrap, and elsewhere.
fn start() -> impl Strategy<Value = u64> {
    let near = |at: u64| (at - 70..at + 70).boxed();
    prop_oneof![0..200u64, near(1 << 16), near(1 << 31), near(1 << 32), near(3 << 31), any::<u32>().prop_map(u64::from)]
}

/// Returns a request whose bytes hold its number.
fn numbered<const N: usize>(number: u64) -> [u64; N] {
    let mut wqe = [number; N];
    wqe[0] = words::with_phase(number & 0xffff, false);
    wqe
}

fn check_sq<const N: usize>(
    start: u64,
    log_entries: u32,
    max_batch: u32,
    ops: &[(u32, bool)],
) -> Result<(), TestCaseError> {
    let entries = 1u64 << log_entries;
    let ring = Ring::new(entries as usize * N * 8, 0xa5);
    // Ringing this value would take more posts than a test makes.
    let db = Doorbell::new((start as u32).wrapping_sub(1));
    let attrs = QpAttrs {
        sq_buffer: ring.as_ptr(),
        sq_doorbell: db.as_ptr(),
        sq_num_entries: entries as u32,
        sq_entry_size: N as u32 * 8,
        sq_max_batch: max_batch,
        rq_num_entries: 1,
        sq_caps: WQ_CAPS_64_BIT_REQ_ID,
        ..QpAttrs::ZERO
    };
    let phase_of = |number: u64| (number >> log_entries) & 1 != 0;
    let qp = QpV1::new(&attrs).expect("legal attributes");
    let wq = UnsafeCell::new(WqV0 { pc: start as u32, phase: phase_of(start).into(), ..qp.sq.wq });
    let (mut placed, mut rung, mut unrung) = (start, start, 0u32);
    let mut oracle = vec![None; entries as usize];
    for &(n, flush) in ops {
        let n = n.min(max_batch);
        if unrung + n > max_batch {
            (rung, unrung) = (placed, 0);
        }
        // SAFETY: a live queue that only this thread uses.
        unsafe { sq::start_batch(wq.get(), n) };
        for _ in 0..n {
            // SAFETY: the batch is open and this index was started.
            unsafe { sq::place::<N>(wq.get(), unrung, numbered(placed)) };
            oracle[(placed % entries) as usize] = Some(placed);
            placed += 1;
            unrung += 1;
        }
        if flush {
            // SAFETY: a live queue that only this thread uses.
            unsafe { sq::flush(wq.get()) };
            (rung, unrung) = (placed, 0);
        }
        if let Some(doorbell) = db.take() {
            prop_assert_eq!(doorbell, rung as u32);
        }
        // SAFETY: only this thread has the struct.
        let now = unsafe { wq.get().read() };
        prop_assert_eq!((now.pc, now.wqes_pending), (rung as u32, unrung));
        prop_assert_eq!(now.phase & 1 != 0, phase_of(rung));
    }
    for (slot, number) in oracle.into_iter().enumerate() {
        let bytes = ring.slot(slot, N * 8);
        let first = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
        match number {
            None => prop_assert!(bytes.iter().all(|&b| b == 0xa5), "slot {} was not posted", slot),
            Some(number) => {
                prop_assert_eq!(words::phase_of(first), phase_of(number));
                prop_assert_eq!(words::with_phase(first, false), numbered::<N>(number)[0]);
                prop_assert!(bytes[8..].chunks_exact(8).all(|w| w == number.to_le_bytes()));
            }
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn send_rings_keep_count(
        start in start(),
        log_entries in 0..8u32,
        max_batch in 1..=16u32,
        ops in vec((0..=16u32, any::<bool>()), 0..60),
        wide in any::<bool>(),
    ) {
        let check = if wide { check_sq::<WIDE> } else { check_sq::<NARROW> };
        check(start, log_entries, max_batch.min(1 << log_entries), &ops)?;
    }

    #[test]
    fn host_rings_keep_count(
        start in start(),
        log_entries in 0..8u32,
        max_batch in 1..=16u32,
        lists in vec(0..40u64, 0..12),
        libfabric in any::<bool>(),
    ) {
        let entries = 1u64 << log_entries;
        let ring = Ring::new(entries as usize * 64, 0xa5);
        let db = Doorbell::new(u32::MAX);
        let flavour = if libfabric { Flavour::Libfabric } else { Flavour::RdmaCore };
        let phase_of = |number: u64| (number >> log_entries) & 1 != 0;
        let (pc, phase) = (start as u16, phase_of(start).into());
        // SAFETY: the ring and the doorbell outlive the queue, and nothing else writes to them.
        let queue = unsafe { HostSq::<NARROW>::new(ring.as_ptr(), db.as_ptr(), entries as u32, max_batch, flavour, pc, phase) };
        let mut queue = queue.expect("legal sizes");
        let mut placed = start;
        for n in lists {
            let mut rung = Vec::new();
            let end = placed + n;
            let first = placed;
            queue.post(std::iter::from_fn(|| {
                rung.extend(db.take());
                (placed < end).then(|| { placed += 1; numbered(placed - 1) })
            }));
            rung.extend(db.take());
            let mut want: Vec<u32> = (first..end).skip(max_batch as usize).step_by(max_batch as usize).map(|n| n as u16 as u32).collect();
            if end > first {
                want.push(end as u16 as u32);
            }
            prop_assert_eq!(rung, want);
            prop_assert_eq!((queue.pc(), queue.phase() & 1 != 0), (end as u16, phase_of(end)));
        }
        for number in placed.saturating_sub(entries).max(start)..placed {
            let bytes = ring.slot((number % entries) as usize, 64);
            let first = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
            prop_assert_eq!(words::phase_of(first), phase_of(number));
            prop_assert_eq!(words::with_phase(first, false), numbered::<NARROW>(number)[0]);
        }
    }

    /// The card writes, and the host polls and pops: the host must see each entry once, in order, and no other entry.
    #[test]
    fn completion_rings_keep_count(
        start in start(),
        log_entries in 0..7u32,
        wide in any::<bool>(),
        ops in vec((0..80u64, 0..80u64), 0..40),
    ) {
        let entries = 1u64 << log_entries;
        let entry_size = if wide { 32 } else { 16 };
        let ring = Ring::new((entries * entry_size) as usize, 0);
        // The card's phase is 1 on the first lap.
        let phase_of = |number: u64| (number >> log_entries) & 1 == 0;
        let entry = |number: u64| {
            let cqe = SendCqe { qp_num: 7, wr_id: number, op: Ok(SendOp::RdmaWrite), status: Status::from_raw(0) };
            Cqe::Send(cqe).emit(phase_of(number))
        };
        let write = |number: u64| {
            ring.write((number % entries * entry_size) as usize, &entry(number).0[..entry_size as usize]);
        };
        // The ring still holds the previous lap's entries.
        for number in start.saturating_sub(entries)..start {
            write(number);
        }
        let buffer = ring.as_ptr();
        let attrs =
            CqAttrs { comp_mask: 0, flags: 0, buffer, num_entries: entries as u32, entry_size: entry_size as u32 };
        let fresh = CqV0::new(&attrs).expect("legal attributes");
        let cq = UnsafeCell::new(CqV0 { cc: start as u32, phase: phase_of(start).into(), ..fresh });
        let (mut written, mut popped) = (start, start);
        for (produce, consume) in ops {
            for _ in 0..produce.min(popped + entries - written) {
                write(written);
                written += 1;
            }
            for ahead in 0..entries {
                // SAFETY: a live queue that only this thread uses.
                let slot = unsafe { cq::poll(cq.get(), ahead as u32) };
                let there = popped + ahead < written;
                prop_assert_eq!(slot, there.then_some(((popped + ahead) % entries) as u32));
                if let Some(slot) = slot {
                    // SAFETY: a live queue that only this thread uses, and a slot that poll returned.
                    prop_assert_eq!(unsafe { cq::read(cq.get(), slot) }, entry(popped + ahead));
                }
            }
            let amount = consume.min(written - popped);
            // SAFETY: a live queue that only this thread uses.
            unsafe { cq::pop(cq.get(), amount as u32) };
            popped += amount;
        }
    }
}
