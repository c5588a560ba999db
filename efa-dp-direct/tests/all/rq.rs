//! Section `rq`: calls on a receive queue.

#![allow(unsafe_code)]

use crate::common::memory::{Doorbell, Ring};
use crate::common::*;
use efa_dp_direct::queue::{QpAttrs, QpV0, WqV0};
use efa_dp_direct::rq;
use efa_dp_direct::wire::RxDesc;
use std::cell::UnsafeCell;

#[test]
fn receive_queue_matches_vectors() {
    each_case("rq", |case| {
        only_fields(case, &["id", "kind", "api", "entries", "max_batch", "start", "steps", "expect"]);
        request_ids(case);
        let entries = u32_of(case, "entries");
        let ring = Ring::new(entries as usize * RxDesc::SIZE, 0xee);
        let mut db = Doorbell::new(0);
        let attrs = QpAttrs {
            rq_buffer: ring.as_ptr(),
            rq_doorbell: db.as_ptr(),
            rq_num_entries: entries,
            rq_entry_size: RxDesc::SIZE as u32,
            sq_num_entries: 8,
            sq_entry_size: 64,
            ..QpAttrs::ZERO
        };
        only_fields(&case["start"], &["pc", "phase"]);
        let wq = UnsafeCell::new(WqV0 {
            max_batch: u32_of(case, "max_batch"),
            pc: u32_of(&case["start"], "pc"),
            phase: u32_of(&case["start"], "phase") as i32,
            ..QpV0::new(&attrs).expect("legal attributes").rq.wq
        });
        let mut rung = Vec::new();
        for step in list(case, "steps") {
            let want_db = optional(step, "db", |v| as_u64(v) as u32);
            db.rest_away_from(want_db);
            // SAFETY: only this thread has the struct.
            unsafe { (*wq.get()).db = db.as_ptr() };
            match text(step, "call") {
                "post_recv" => {
                    only_fields(step, &["call", "req_id", "addr", "length", "lkey", "ret", "slot", "desc", "db", "wq"]);
                    assert_eq!(i64_of(step, "ret"), 0);
                    let (addr, lkey) = (u64_of(step, "addr"), u32_of(step, "lkey"));
                    let length = rq::device_length(u32_of(step, "length"));
                    let desc = RxDesc::single(u16_of(step, "req_id"), addr, length, lkey);
                    assert_eq!(hex(&desc.to_bytes()), text(step, "desc"));
                    assert_eq!(RxDesc::from_bytes(&desc.to_bytes()), desc);
                    // SAFETY: a live queue that only this thread uses.
                    unsafe { rq::post(wq.get(), &desc) };
                    let slot = u64_of(step, "slot") as usize;
                    assert_eq!(hex(&ring.slot(slot, RxDesc::SIZE)), text(step, "desc"), "slot {slot}");
                }
                "flush" => {
                    only_fields(step, &["call", "db", "wq"]);
                    // SAFETY: a live queue that only this thread uses.
                    unsafe { rq::flush(wq.get()) };
                }
                other => panic!("unknown call {other}"),
            }
            let got = db.take();
            assert_eq!(got, want_db, "doorbell of {step}");
            rung.extend(got);
            // SAFETY: only this thread has the struct.
            let now = unsafe { wq.get().read() };
            let cursors = [now.pc, now.phase as u32, now.wqes_pending, now.wqes_posted, now.wqes_completed];
            assert_eq!(cursors.to_vec(), u32s(step, "wq"), "cursors after {step}");
        }
        only_fields(&case["expect"], &["doorbells", "ring"]);
        assert_eq!(rung, u32s(&case["expect"], "doorbells"));
        assert_eq!(hex(&ring.bytes()), text(&case["expect"], "ring"));
    });
}

#[test]
fn receive_lengths_follow_their_convention() {
    assert_eq!((rq::device_length(65_536), rq::host_length(65_536)), (0, 65_535));
    assert_eq!((rq::device_length(8192), rq::host_length(8192)), (8192, 8192));
}
