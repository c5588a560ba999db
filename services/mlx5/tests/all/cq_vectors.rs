//! `mlx5_cqe_zip.json`: ring images, and the completions that a consumer must return.

use crate::common::*;
use ferrogin_test_support::mlx5_memory::Memory;
use mlx5::cq::{CompletionError, CompletionQueue, CqParts, Layout, Polled, Side};
use mlx5::device::Handle;
use mlx5::wire::{Cqe, CqeOpcode};
use serde_json::Value;
use zerocopy::IntoBytes;

const SLOT: usize = 64;

struct Bench {
    queue: CompletionQueue,
    slots: Memory,
    record: Memory,
    _arm: Memory,
}

fn bench(case: &Value) -> Bench {
    let log = u32_of(case, "cq_len_log");
    let slots = Memory::new(SLOT << log);
    let record = Memory::new(8);
    let arm = Memory::new(8);
    let mut ring = slots.slots();
    ring.initialise();
    let parts = CqParts {
        slots: ring,
        record: record.record(0),
        arm_record: record.record(1),
        arm: arm.arm_register(),
        cqn: 1,
        layout: if bool_of(case, "zip") { Layout::Enhanced } else { Layout::Plain },
        start_index: u32_of(case, "start_ci"),
        keep_alive: Handle::new(()),
    };
    Bench { queue: CompletionQueue::new(parts), slots, record, _arm: arm }
}

const FIELDS: &[&str] = &[
    "index",
    "kind",
    "opcode",
    "wqe_counter",
    "byte_cnt",
    "qpn",
    "signature",
    "sop_drop_qpn",
    "s_wqe_opcode",
    "hex",
    "syndrome",
    "vendor_err",
];

fn check_completion(want: &Value, got: &mlx5::cq::Completion<'_>) {
    assert_eq!(hex(got.to_cqe().as_bytes()), text(want, "hex"));
    assert_eq!(got.opcode().code(), u8_of(want, "opcode"));
    assert!(!matches!(got.opcode(), CqeOpcode::Unknown(_)));
    assert_eq!(got.wqe_counter(), u16_of(want, "wqe_counter"));
    assert_eq!(Some(got.byte_cnt()), optional(want, "byte_cnt", |v| as_u64(v) as u32));
    assert_eq!(got.qpn(), u32_of(want, "qpn"));
    assert_eq!(got.to_cqe().signature, u8_of(want, "signature"));
    assert_eq!(got.sop_drop_qpn(), u32_of(want, "sop_drop_qpn"));
    assert_eq!(got.request_opcode(), u8_of(want, "s_wqe_opcode"));
}

fn check_error(want: &Value, got: &CompletionError) {
    assert_eq!(hex(got.cqe.as_bytes()), text(want, "hex"));
    let side = match got.side {
        Side::Requester => CqeOpcode::ReqErr,
        Side::Responder => CqeOpcode::RespErr,
    };
    assert_eq!(side.code(), u8_of(want, "opcode"));
    assert_eq!(got.syndrome.code(), u8_of(want, "syndrome"));
    assert_eq!(got.vendor, u8_of(want, "vendor_err"));
    assert_eq!(got.wqe_counter, u16_of(want, "wqe_counter"));
    assert_eq!(got.qpn, u32_of(want, "qpn"));
    assert_eq!(got.request_opcode, u8_of(want, "s_wqe_opcode"));
    assert_eq!(got.cqe.signature, u8_of(want, "signature"));
    assert_eq!(got.cqe.sop_drop_qpn.get(), u32_of(want, "sop_drop_qpn"));
    assert_eq!(optional(want, "byte_cnt", as_u64), None);
    assert!(!got.to_string().contains("unknown"), "{got}");
}

impl Bench {
    fn write(&self, slot: &Value) {
        only_fields(slot, &["slot", "hex"]);
        let bytes: [u8; SLOT] = array_of(slot, "hex");
        self.slots.write(u64_of(slot, "slot") as usize * SLOT, &bytes);
    }

    /// Polls and releases at once, as the vectors require.
    fn poll(&mut self, want: &Value) {
        let index = self.queue.consumer();
        let polled = self.queue.poll().expect("a valid completion");
        if want.is_null() {
            assert!(matches!(polled, Polled::Empty), "nothing expected at {index}, got {polled:?}");
            assert_eq!(self.queue.consumer(), index, "an empty poll stays");
            return;
        }
        only_fields(want, FIELDS);
        assert_eq!(index, u32_of(want, "index"), "index");
        match (text(want, "kind"), polled) {
            ("regular" | "mini", Polled::Done(entry)) => check_completion(want, &entry),
            ("error", Polled::Failed(failure)) => check_error(want, &failure),
            (other, polled) => panic!("{other} expected at {index}, got {polled:?}"),
        }
        assert_eq!(self.queue.consumer(), index.wrapping_add(1));
        self.queue.release();
        let record = u32::from_be_bytes(self.record.read(0, 4).try_into().expect("4 bytes"));
        assert_eq!(record, index.wrapping_add(1) & 0xff_ffff, "consumer index in the doorbell record");
    }

    /// Drains consecutive entries in one call.
    fn drain(&mut self, wants: &[Value]) {
        let mut at = 0;
        let mut next = self.queue.consumer();
        let taken = self.queue.drain(wants.len() as u32, |one| {
            let want = &wants[at];
            assert!(!want.is_null(), "nothing expected at {next}");
            assert_eq!(next, u32_of(want, "index"), "index");
            match one {
                Ok(entry) => {
                    assert_ne!(text(want, "kind"), "error");
                    check_completion(want, &entry);
                }
                Err(failure) => check_error(want, &failure),
            }
            at += 1;
            next = next.wrapping_add(1);
        });
        let taken = taken.expect("a valid completion") as usize;
        assert!(wants[taken..].iter().all(Value::is_null), "{taken} taken of {}", wants.len());
    }
}

fn each_step(case: &Value, poll: impl Fn(&mut Bench, &[Value])) {
    only_fields(case, &["name", "cq_len_log", "zip", "start_ci", "steps"]);
    let mut bench = bench(case);
    let steps = list(case, "steps");
    assert!(steps.iter().any(|step| !step["poll"].is_null()), "a case without polls");
    for step in steps {
        only_fields(step, &["write", "poll"]);
        if step.get("write").is_some() {
            list(step, "write").iter().for_each(|slot| bench.write(slot));
        }
        if step.get("poll").is_some() {
            poll(&mut bench, list(step, "poll"));
        }
    }
}

#[test]
fn polling_one_by_one_matches_vectors() {
    each_case("mlx5_cqe_zip.json", |case| {
        each_step(case, |bench, wants| wants.iter().for_each(|want| bench.poll(want)));
    });
}

/// Turns all polls of a step into one call, which takes the title from its slot instead of from the copy.
#[test]
fn draining_matches_vectors() {
    each_case("mlx5_cqe_zip.json", |case| each_step(case, Bench::drain));
}

#[test]
fn new_slot_has_initial_bytes() {
    let initial = Cqe::INITIAL;
    assert_eq!((initial.as_bytes()[62], initial.as_bytes()[63]), (0xff, 0xf1));
    assert!(initial.as_bytes()[..62].iter().all(|byte| *byte == 0));
}
