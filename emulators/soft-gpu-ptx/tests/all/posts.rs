//! The check of posts names threads that post on one queue at the same time without sharing it.

use crate::arena::{Arena, kernel, launch, linked, start};
use soft_gpu_ptx::{Trap, TrapKind};

/// Takes the next slot as the only thread would; the cursor is word 0.
const THREAD: &str =
    "ld.relaxed.gpu.global.u64 %d1, [%out]; add.u64 %d2, %d1, 1; st.relaxed.gpu.global.u64 [%out], %d2;";
/// Takes it as the only block would.
const BLOCK: &str = "atom.relaxed.cta.global.add.u64 %d1, [%out], 1;";
/// Writes the slot, from word 8 on, and rings the doorbell, word 1.
const WRITE: &str =
    "shl.b64 %d4, %d1, 3; add.u64 %d4, %d4, %out; st.mmio.relaxed.sys.global.u64 [%d4+64], %d1; fence.acq_rel.sys;";
const RING: &str = "cvt.u32.u64 %r1, %d1; add.u32 %r1, %r1, 1; st.mmio.relaxed.sys.global.u32 [%out+8], %r1;";

/// Runs the body in two blocks of two threads with many seeds. Returns the traps.
fn traps(body: &str, (weak, checks_posts): (bool, bool)) -> Vec<Trap> {
    let program = linked(&kernel("", body));
    let run = |seed| {
        let arena = Arena::new(64);
        let mut launch = launch(&arena, 2, 2, seed);
        (launch.weak, launch.checks_posts) = (weak, checks_posts);
        start(&program, &launch, &arena).err().map(|trap| *trap)
    };
    (0..40).filter_map(run).collect()
}

/// All traps name the kernel and two threads, in different blocks if `apart`.
fn name_two_posters(traps: &[Trap], apart: bool) {
    assert!(!traps.is_empty());
    for trap in traps {
        let text = trap.to_string();
        assert_eq!(trap.kind, TrapKind::Trap, "{text}");
        assert!(text.starts_with("kernel k, block (") && text.contains("in k: block ("), "{text}");
        assert!(text.contains("use a wider mode, or let one of them post"), "{text}");
        let own = format!("block ({}, 0, 0), thread ({}, 0, 0)", trap.block[0], trap.thread[0]);
        assert_eq!(text.matches(&own).count(), 1, "the other thread is another one: {text}");
        assert!(!apart || text.matches(&format!("block ({}, ", trap.block[0])).count() == 1, "{text}");
    }
}

#[test]
fn threads_that_take_the_same_slot_are_named() {
    let traps = traps(&format!("{THREAD}{WRITE}{RING}"), (false, true));
    name_two_posters(&traps, false);
    let text = traps.iter().map(Trap::to_string).collect::<Vec<_>>().join("\n");
    assert!(text.contains("wrote the same slot of a queue before any doorbell was rung"), "{text}");
    assert!(text.contains("rang the same doorbell for the same slot, or a later one"), "{text}");
}

#[test]
fn threads_that_leave_the_doorbell_to_a_flush_are_named() {
    name_two_posters(&traps(&format!("{THREAD}{WRITE}"), (false, true)), false);
}

#[test]
fn blocks_that_take_the_same_slot_are_named_under_weak_memory() {
    // Within a block, the threads share the cursor.
    let body = format!("{BLOCK}{WRITE}");
    name_two_posters(&traps(&body, (true, true)), true);
    assert_eq!(traps(&body, (false, true)), [], "under strong memory, all blocks share it");
}

#[test]
fn threads_that_share_a_queue_are_not_named() {
    let lock = "$lock: atom.acquire.gpu.global.cas.b64 %d3, [%out+16], 0, 1; setp.ne.u64 %p1, %d3, 0; @%p1 bra $lock;";
    let unlock = "atom.release.gpu.global.exch.b64 %d3, [%out+16], 0;";
    // A flush rings again for what is rung.
    for body in [format!("{THREAD}{WRITE}{RING}"), format!("{THREAD}{WRITE}{RING}{RING}")] {
        let body = format!("{lock}{body}{unlock}");
        for weak in [false, true] {
            assert_eq!(traps(&body, (weak, true)), []);
        }
    }
    assert_eq!(traps(&format!("{THREAD}{WRITE}{RING}"), (false, false)), [], "the check is off");
}
