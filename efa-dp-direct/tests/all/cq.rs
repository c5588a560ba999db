//! Sections `cqe` and `cq`: what completion entries mean, and polling a completion queue.

#![allow(unsafe_code)]

use crate::common::memory::Ring;
use crate::common::*;
use efa_dp_direct::cq::reader::{self, DeviceWc, HostDetail};
use efa_dp_direct::cq::{self, Cqe, RawCqe, Sender};
use efa_dp_direct::queue::{CqAttrs, CqV0};
use efa_dp_direct::wire::{CdescFlags, QueueType, WcOpcode};
use efa_dp_direct::wqe::RequestIds;
use serde_json::{Value, json};
use std::cell::UnsafeCell;

const fn opcode_name(opcode: WcOpcode) -> &'static str {
    match opcode {
        WcOpcode::Send => "send",
        WcOpcode::RdmaWrite => "rdma_write",
        WcOpcode::RdmaRead => "rdma_read",
        WcOpcode::Recv => "recv",
        WcOpcode::RecvRdmaWithImm => "recv_rdma_with_imm",
    }
}

fn device_json(wc: &DeviceWc) -> Value {
    json!({
        "opcode": wc.opcode.raw(), "opcode_name": opcode_name(wc.opcode), "unsolicited": wc.unsolicited,
        "req_id": format!("{:#x}", wc.req_id), "vendor_err": wc.vendor_err, "has_imm": wc.has_imm,
        "imm_data": wc.imm_data, "byte_len": wc.byte_len, "qp_num": wc.qp_num, "src_qp": wc.src_qp, "slid": wc.slid,
    })
}

fn host_json(raw: &RawCqe) -> Value {
    let wc = reader::host(raw);
    let mut all = json!({
        "status": wc.status.name(), "opcode": opcode_name(wc.opcode), "vendor_err": wc.vendor_err,
    });
    match wc.detail {
        HostDetail::Send { wr_id } => all["wr_id"] = json!(format!("{wr_id:#x}")),
        HostDetail::Recv { byte_len, src_qp, slid, imm_data, unsolicited, src_addr } => {
            all["byte_len"] = json!(byte_len);
            all["src_qp"] = json!(src_qp);
            all["slid"] = json!(slid);
            all["with_imm"] = json!(imm_data.is_some());
            all["unsolicited"] = json!(unsolicited);
            all["src_addr"] = json!(src_addr.map(|gid| hex(&gid)));
            if let Some(imm) = imm_data {
                all["imm_data"] = json!(imm);
            }
        }
    }
    all
}

/// Checks that the meaning agrees with the readers, and that it emits the same bytes if it covers all of them.
fn check_meaning(raw: &RawCqe, device: &DeviceWc) {
    match Cqe::parse(raw, RequestIds::Bits64).expect("a send or receive queue's") {
        Cqe::Send(send) => {
            assert_eq!((send.wr_id, u32::from(send.qp_num)), (device.req_id, device.qp_num));
            assert_eq!(u32::from(send.status.raw()), device.vendor_err);
            let flags = raw.common().flags;
            let says_all = raw.0[12..] == [0; 20] && !flags.has_imm() && !flags.unsolicited();
            if says_all {
                assert_eq!(Cqe::Send(send).emit(raw.phase()), *raw);
            }
        }
        Cqe::Recv(recv) => {
            assert_eq!((recv.length, recv.imm.is_some()), (device.byte_len, device.has_imm));
            assert_eq!((recv.unsolicited, u32::from(recv.src_qp_num)), (device.unsolicited, device.src_qp));
            if let Some(imm) = recv.imm {
                assert_eq!(imm, device.imm_data);
            }
            match recv.sender {
                Sender::Ah(ah) => assert_eq!(u32::from(ah), device.slid),
                Sender::Gid(_) => assert_eq!(device.slid, 0xffff),
            }
            let again = Cqe::parse(&Cqe::Recv(recv).emit(raw.phase()), RequestIds::Bits64);
            assert_eq!(again, Ok(Cqe::Recv(recv)));
        }
    }
}

#[test]
fn completions_are_read_as_in_vectors() {
    each_case("cqe", |case| {
        only_fields(case, &["id", "kind", "entry_size", "entry", "next_entry", "fields", "expect"]);
        let mut bytes = bytes_of(case, "entry");
        assert_eq!(bytes.len(), u64_of(case, "entry_size") as usize);
        match bytes.len() {
            32 => assert!(case.get("next_entry").is_none()),
            16 => bytes.extend(bytes_of(case, "next_entry")),
            other => panic!("unknown entry size {other}"),
        }
        let raw = RawCqe(bytes.try_into().expect("32 bytes"));

        let fields = &case["fields"];
        only_fields(fields, &["phase", "q_type", "has_imm", "op_type", "unsolicited", "status"]);
        let flags = CdescFlags(0)
            .with_phase(u64_of(fields, "phase") != 0)
            .with_q_type(u64_of(fields, "q_type") as u8)
            .with_has_imm(u64_of(fields, "has_imm") != 0)
            .with_op_type(u64_of(fields, "op_type") as u8)
            .with_unsolicited(u64_of(fields, "unsolicited") != 0);
        assert_eq!(raw.common().flags, flags);
        assert_eq!(u64::from(raw.common().status), u64_of(fields, "status"));

        let expect = &case["expect"];
        only_fields(expect, &["v0", "v1", "host"]);
        let device = reader::device(&raw, RequestIds::Bits64);
        assert_eq!(device_json(&reader::device(&raw, RequestIds::Bits16)), expect["v0"]);
        assert_eq!(device_json(&device), expect["v1"]);
        if let Some(host) = expect.get("host") {
            assert_eq!(&host_json(&raw), host);
        } else {
            assert_eq!(u64_of(case, "entry_size"), 16, "only 16-byte entries have no host reader");
        }
        if QueueType::from_raw(flags.q_type()).is_some() {
            check_meaning(&raw, &device);
        } else {
            assert!(Cqe::parse(&raw, RequestIds::Bits64).is_err());
        }
    });
}

#[test]
fn polling_matches_vectors() {
    each_case("cq", |case| {
        only_fields(case, &["id", "kind", "api", "entries", "entry_size", "start", "steps", "initial_ring", "note"]);
        request_ids(case);
        let (entries, entry_size) = (u32_of(case, "entries"), u32_of(case, "entry_size"));
        let size = (entries * entry_size) as usize;
        let ring = match case.get("initial_ring") {
            None | Some(Value::Null) => Ring::new(size, 0),
            Some(_) => Ring::holding(&bytes_of(case, "initial_ring")),
        };
        assert_eq!(ring.bytes().len(), size);
        let attrs = CqAttrs { comp_mask: 0, flags: 0, buffer: ring.as_ptr(), num_entries: entries, entry_size };
        only_fields(&case["start"], &["cc", "phase"]);
        let cq = UnsafeCell::new(CqV0 {
            cc: u32_of(&case["start"], "cc"),
            phase: u32_of(&case["start"], "phase") as i32,
            ..CqV0::new(&attrs).expect("legal attributes")
        });
        for step in list(case, "steps") {
            match text(step, "call") {
                "poll" => {
                    only_fields(step, &["call", "position", "slot"]);
                    // SAFETY: a live queue that only this thread uses.
                    let slot = unsafe { cq::poll(cq.get(), u32_of(step, "position")) };
                    assert_eq!(slot, optional(step, "slot", |v| as_u64(v) as u32), "{step}");
                    if let Some(slot) = slot {
                        // SAFETY: a live queue that only this thread uses, and a slot that poll returned.
                        let raw = unsafe { cq::read(cq.get(), slot) };
                        let mut want = ring.slot(slot as usize, entry_size as usize);
                        want.resize(32, 0);
                        assert_eq!(hex(&raw.0), hex(&want));
                    }
                }
                "pop" => {
                    only_fields(step, &["call", "amount", "cc", "phase"]);
                    // SAFETY: a live queue that only this thread uses.
                    unsafe { cq::pop(cq.get(), u32_of(step, "amount")) };
                    // SAFETY: only this thread has the struct.
                    let now = unsafe { cq.get().read() };
                    assert_eq!((now.cc, now.phase as u32), (u32_of(step, "cc"), u32_of(step, "phase")), "{step}");
                }
                "device_write" => {
                    only_fields(step, &["call", "slot", "entry"]);
                    let entry = bytes_of(step, "entry");
                    assert_eq!(entry.len(), entry_size as usize);
                    ring.write(u64_of(step, "slot") as usize * entry.len(), &entry);
                }
                other => panic!("unknown call {other}"),
            }
        }
    });
}
