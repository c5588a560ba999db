//! Sections `sq` and `sq_long`: calls on a send queue, the cursors and doorbells after each, and the final ring.

#![allow(unsafe_code)]

use crate::common::memory::{Doorbell, Ring};
use crate::common::*;
use efa_dp_direct::queue::{QpAttrs, QpV0, QpV1, WQ_CAPS_64_BIT_REQ_ID, WqV0};
use efa_dp_direct::sq;
use efa_dp_direct::wqe::words::{NARROW, WIDE};
use efa_dp_direct::wqe::{RequestIds, WqeSize};
use serde_json::Value;
use std::cell::UnsafeCell;

/// A queue pair struct in the case's version, with its ring and doorbell.
struct Queue {
    qp: Qp,
    size: WqeSize,
    ring: Ring,
    db: Doorbell,
}

enum Qp {
    V0(Box<UnsafeCell<QpV0>>),
    V1(Box<UnsafeCell<QpV1>>),
}

impl Queue {
    fn new(case: &Value) -> Self {
        let (size, entries) = (wqe_size(case), u32_of(case, "entries"));
        let ring = Ring::new(entries as usize * size.bytes(), 0);
        let db = Doorbell::new(0);
        let attrs = QpAttrs {
            sq_buffer: ring.as_ptr(),
            sq_doorbell: db.as_ptr(),
            sq_num_entries: entries,
            sq_entry_size: size.bytes() as u32,
            sq_max_batch: u32_of(case, "max_batch"),
            rq_num_entries: 8,
            rq_entry_size: 16,
            sq_max_inline_data: size.max_inline() as u32,
            sq_max_rdma_sges: 1,
            sq_caps: WQ_CAPS_64_BIT_REQ_ID,
            ..QpAttrs::ZERO
        };
        let qp = match request_ids(case) {
            RequestIds::Bits16 => Qp::V0(Box::new(UnsafeCell::new(
                QpV0::new(&QpAttrs { sq_caps: 0, ..attrs }).expect("legal attributes"),
            ))),
            RequestIds::Bits64 => Qp::V1(Box::new(UnsafeCell::new(QpV1::new(&attrs).expect("legal attributes")))),
        };
        let queue = Self { qp, size, ring, db };
        let start = &case["start"];
        only_fields(start, &["pc", "phase"]);
        let fresh = queue.wq();
        let wq = WqV0 { pc: u32_of(start, "pc"), phase: u32_of(start, "phase") as i32, ..fresh };
        // SAFETY: nothing else has the struct.
        unsafe { queue.wq_ptr().write(wq) };
        queue
    }

    fn wq_ptr(&self) -> *mut WqV0 {
        match &self.qp {
            // SAFETY: only the field's address is taken.
            Qp::V0(qp) => unsafe { &raw mut (*qp.get()).sq.wq },
            // SAFETY: only the field's address is taken.
            Qp::V1(qp) => unsafe { &raw mut (*qp.get()).sq.wq },
        }
    }

    fn wq(&self) -> WqV0 {
        // SAFETY: only this thread has the struct.
        unsafe { self.wq_ptr().read() }
    }

    /// Returns `[pc, phase, wqes_pending, wqes_posted, wqes_completed]`.
    fn cursors(&self) -> [u32; 5] {
        let wq = self.wq();
        [wq.pc, wq.phase as u32, wq.wqes_pending, wq.wqes_posted, wq.wqes_completed]
    }

    /// Chooses a resting value that the next doorbell can't have.
    fn expect_doorbell(&mut self, value: Option<u32>) {
        self.db.rest_away_from(value);
        let mut wq = self.wq();
        wq.db = self.db.as_ptr();
        // SAFETY: only this thread has the struct.
        unsafe { self.wq_ptr().write(wq) };
    }

    fn start_batch(&self, n: u32) {
        // SAFETY: a live queue that only this thread uses.
        unsafe { sq::start_batch(self.wq_ptr(), n) }
    }

    fn place(&self, index: u32, wqe: &[u8]) {
        match self.size {
            // SAFETY: a live queue that only this thread uses, with requests of this size.
            WqeSize::Narrow => unsafe { sq::place::<NARROW>(self.wq_ptr(), index, words(wqe)) },
            // SAFETY: a live queue that only this thread uses, with requests of this size.
            WqeSize::Wide => unsafe { sq::place::<WIDE>(self.wq_ptr(), index, words(wqe)) },
        }
    }

    fn flush(&self) {
        // SAFETY: a live queue that only this thread uses.
        unsafe { sq::flush(self.wq_ptr()) }
    }
}

fn words<const N: usize>(wqe: &[u8]) -> [u64; N] {
    assert_eq!(wqe.len(), N * 8);
    std::array::from_fn(|i| u64::from_le_bytes(wqe[i * 8..][..8].try_into().expect("eight bytes")))
}

fn check_step(queue: &mut Queue, wqes: &[Vec<u8>], step: &Value, rung: &mut Vec<u32>) {
    match text(step, "call") {
        "start_batch" => {
            only_fields(step, &["call", "n", "ret", "db", "wq"]);
            assert_eq!(i64_of(step, "ret"), 0);
            queue.expect_doorbell(optional(step, "db", |v| as_u64(v) as u32));
            queue.start_batch(u32_of(step, "n"));
        }
        "flush" => {
            only_fields(step, &["call", "db", "wq"]);
            queue.expect_doorbell(optional(step, "db", |v| as_u64(v) as u32));
            queue.flush();
        }
        "place" => {
            only_fields(step, &["call", "index", "ret", "slot", "phase_bit", "wqe"]);
            assert_eq!(i64_of(step, "ret"), 0);
            let mut wqe = wqes[u64_of(step, "wqe") as usize].clone();
            let before = queue.cursors();
            queue.expect_doorbell(None);
            queue.place(u32_of(step, "index"), &wqe);
            wqe[3] = wqe[3] & !1 | u64_of(step, "phase_bit") as u8;
            let slot = u64_of(step, "slot") as usize;
            assert_eq!(hex(&queue.ring.slot(slot, queue.size.bytes())), hex(&wqe), "slot {slot}");
            assert_eq!(queue.cursors(), before, "placing moves no cursor");
            assert_eq!(queue.db.take(), None, "placing rings no doorbell");
            return;
        }
        other => panic!("unknown call {other}"),
    }
    let db = queue.db.take();
    assert_eq!(db, optional(step, "db", |v| as_u64(v) as u32), "doorbell of {step}");
    rung.extend(db);
    assert_eq!(queue.cursors().to_vec(), u32s(step, "wq"), "cursors after {step}");
}

#[test]
fn send_queue_matches_vectors() {
    each_case("sq", |case| {
        only_fields(
            case,
            &["id", "kind", "api", "wqe_size", "entries", "max_batch", "start", "wqes", "steps", "expect", "note"],
        );
        let mut queue = Queue::new(case);
        let wqes: Vec<_> = list(case, "wqes").iter().map(|w| unhex(w.as_str().expect("hex"))).collect();
        let mut rung = Vec::new();
        for step in list(case, "steps") {
            check_step(&mut queue, &wqes, step, &mut rung);
        }
        only_fields(&case["expect"], &["doorbells", "ring"]);
        assert_eq!(rung, u32s(&case["expect"], "doorbells"));
        let ring = &case["expect"]["ring"];
        only_fields(ring, &["bytes", "sha256", "slots"]);
        let bytes = queue.ring.bytes();
        assert!(ring.get("bytes").is_some() || ring.get("sha256").is_some(), "the ring's bytes are given somehow");
        if ring.get("bytes").is_some() {
            assert_eq!(hex(&bytes), text(ring, "bytes"));
        }
        if ring.get("sha256").is_some() {
            assert_eq!(sha256_hex(&bytes), text(ring, "sha256"));
        }
        if let Some(slots) = ring.get("slots") {
            for (slot, want) in slots.as_object().expect("slots by number") {
                let slot: usize = slot.parse().expect("a slot number");
                assert_eq!(hex(&queue.ring.slot(slot, queue.size.bytes())), want.as_str().expect("hex"));
            }
        }
    });
}

/// Returns `template` with request id `id`.
fn with_id(template: &[u8], id: u64, ids: RequestIds) -> Vec<u8> {
    let mut wqe = template.to_vec();
    wqe[..2].copy_from_slice(&id.to_le_bytes()[..2]);
    if ids == RequestIds::Bits64 {
        wqe[26..32].copy_from_slice(&id.to_le_bytes()[2..]);
    }
    wqe
}

#[test]
fn long_send_queue_runs_match_vectors() {
    each_case("sq_long", |case| {
        only_fields(
            case,
            &["id", "kind", "api", "wqe_size", "entries", "max_batch", "start", "template", "ops", "expect"],
        );
        let mut queue = Queue::new(case);
        let (template, ids) = (bytes_of(case, "template"), request_ids(case));
        let (mut placed, mut rung) = (0, Vec::new());
        for op in u32s(case, "ops") {
            let mut expected = None;
            let [pc, _, pending, ..] = queue.cursors();
            if pending > 0 {
                expected = Some(pc.wrapping_add(pending));
            }
            queue.expect_doorbell(expected);
            if op == 0 {
                queue.flush();
            } else {
                queue.start_batch(op);
                let pending = queue.cursors()[2];
                for i in 0..op {
                    queue.place(pending - op + i, &with_id(&template, placed, ids));
                    placed += 1;
                }
            }
            rung.extend(queue.db.take());
        }
        let expect = &case["expect"];
        only_fields(expect, &["doorbells", "wq", "placed", "ring_sha256"]);
        assert_eq!(rung, u32s(expect, "doorbells"));
        assert_eq!(queue.cursors().to_vec(), u32s(expect, "wq"));
        assert_eq!(placed, u64_of(expect, "placed"));
        assert_eq!(sha256_hex(&queue.ring.bytes()), text(expect, "ring_sha256"));
    });
}
