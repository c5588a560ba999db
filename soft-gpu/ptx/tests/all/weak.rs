//! Weak memory: what it may do, it does with some seed; what fences forbid, it never does.

use crate::arena::{Arena, kernel, launch, linked, start};
use ferrogin_test_support::repetitions;
use std::collections::BTreeSet;

/// Runs `body` by blocks and threads under many seeds; the results in words 8 to 10 of the arena.
fn outcomes(grid: u32, block: u32, body: &str) -> BTreeSet<[u64; 3]> {
    let head = "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.u32 %r1, %r2, %r3, %r1;\nsetp.eq.u32 %p1, %r1, 0; @!%p1 bra $other;\n";
    let program = linked(&kernel("", &format!("{head}{body}")));
    let seeds = repetitions("SOFTGPU_SEEDS", 400, 20_000);
    (0..seeds)
        .map(|seed| {
            let arena = Arena::new(64);
            let mut launch = launch(&arena, grid, block, seed);
            launch.weak = true;
            start(&program, &launch, &arena).unwrap_or_else(|trap| panic!("seed {seed}: {trap}"));
            [arena.get(8), arena.get(9), arena.get(10)]
        })
        .collect()
}

/// A message: the first thread writes data and a flag, the second waits for the flag and reads the data.
fn message(grid: u32, block: u32, write: &str, read: &str) -> BTreeSet<[u64; 3]> {
    outcomes(
        grid,
        block,
        &format!("st.global.u64 [%out], 1; st.global.u64 [%out+32], 2;\n{write} bra $end;\n$other: {read}\n$end:"),
    )
}

const WAIT: &str = "$L: ld.ORDER.global.u64 %d1, [%out+256]; setp.eq.u64 %p2, %d1, 0; @%p2 bra $L;\n\
    ld.global.u64 %d2, [%out]; ld.global.u64 %d3, [%out+32]; st.global.v2.u64 [%out+64], {%d2, %d3};";

#[test]
fn a_message_without_a_fence_is_sometimes_incomplete() {
    let found = message(2, 1, "st.relaxed.gpu.global.u64 [%out+256], 1;", &WAIT.replace("ORDER", "acquire.gpu"));
    assert!(found.contains(&[1, 2, 0]) && found.len() > 1, "{found:?}");
}

#[test]
fn a_message_with_a_release_and_an_acquire_is_complete() {
    for (write, order) in [
        ("st.release.gpu.global.u64 [%out+256], 1;", "acquire.gpu"),
        ("fence.acq_rel.gpu; st.relaxed.gpu.global.u64 [%out+256], 1;", "acquire.sys"),
        ("atom.release.sys.global.add.u64 %d1, [%out+256], 1;", "acquire.gpu"),
    ] {
        let found = message(2, 1, write, &WAIT.replace("ORDER", order));
        assert_eq!(found, BTreeSet::from([[1, 2, 0]]), "{write}");
    }
}

#[test]
fn a_release_of_the_block_orders_nothing_for_another_block() {
    let read = WAIT.replace("ORDER", "acquire.gpu");
    let found = message(2, 1, "st.release.cta.global.u64 [%out+256], 1;", &read);
    assert!(found.len() > 1, "{found:?}");
    let found = message(1, 2, "st.release.cta.global.u64 [%out+256], 1;", &read);
    assert_eq!(found, BTreeSet::from([[1, 2, 0]]));
}

#[test]
fn a_load_before_an_acquire_may_be_early() {
    // The reader has read the data before, as a thread that polls has.
    let read = format!("ld.global.u64 %d2, [%out]; ld.global.u64 %d3, [%out+32];\n{WAIT}");
    let write = "fence.acq_rel.sys; st.release.sys.global.u64 [%out+256], 1;";
    let found = message(2, 1, write, &read.replace("ORDER", "relaxed.gpu"));
    assert!(found.len() > 1, "{found:?}");
    let found = message(2, 1, write, &read.replace("ORDER", "acquire.gpu"));
    assert_eq!(found, BTreeSet::from([[1, 2, 0]]));
}

#[test]
fn two_threads_may_both_miss_the_others_store_without_a_fence_of_sequence() {
    let body = |fence: &str| {
        format!(
            "st.relaxed.gpu.global.u64 [%out], 1; {fence} ld.relaxed.gpu.global.u64 %d1, [%out+32]; st.global.u64 [%out+64], %d1; bra $end;\n\
             $other: st.relaxed.gpu.global.u64 [%out+32], 1; {fence} ld.relaxed.gpu.global.u64 %d1, [%out]; st.global.u64 [%out+72], %d1;\n$end:"
        )
    };
    assert!(outcomes(2, 1, &body("")).contains(&[0, 0, 0]));
    assert!(!outcomes(2, 1, &body("fence.sc.gpu;")).contains(&[0, 0, 0]));
}

#[test]
fn a_thread_sees_its_own_stores_and_a_location_has_one_order() {
    let found = outcomes(
        2,
        1,
        "mov.u64 %d5, 0;\n$A: add.u64 %d5, %d5, 1; st.global.u64 [%out], %d5; ld.global.u64 %d6, [%out]; setp.ne.u64 %p2, %d5, %d6; @%p2 trap;\n\
         setp.lt.u64 %p2, %d5, 50; @%p2 bra $A; bra $end;\n\
         $other: mov.u64 %d5, 0; mov.u32 %r5, 0;\n$B: ld.relaxed.gpu.global.u64 %d6, [%out]; setp.lt.u64 %p2, %d6, %d5; @%p2 trap; mov.u64 %d5, %d6;\n\
         add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 50; @%p2 bra $B;\n$end:",
    );
    assert_eq!(found, BTreeSet::from([[0, 0, 0]]));
}

#[test]
fn a_fence_of_the_gpu_orders_nothing_for_the_system() {
    // The host looks at the flag while the kernel waits: it sees memory, not the GPU.
    let write = |scope: &str| {
        format!(
            "st.global.u64 [%out], 1; fence.acq_rel.{scope}; st.relaxed.sys.global.u64 [%out+256], 1;\n\
             $L: ld.relaxed.sys.global.u64 %d1, [%out+264]; setp.eq.u64 %p2, %d1, 0; @%p2 bra $L;\n$other:"
        )
    };
    let missing = |scope: &str| {
        let program = linked(&kernel("", &format!("setp.eq.u32 %p1, 0, 0;\n{}", write(scope))));
        (0..repetitions("SOFTGPU_SEEDS", 400, 20_000))
            .filter(|&seed| {
                let arena = Arena::new(64);
                let mut launch = launch(&arena, 1, 1, seed);
                launch.weak = true;
                std::thread::scope(|scope| {
                    let host = scope.spawn(|| {
                        while arena.get(32) == 0 {
                            std::thread::yield_now();
                        }
                        let seen = arena.get(0);
                        arena.set(33, 1);
                        seen == 0
                    });
                    start(&program, &launch, &arena).unwrap_or_else(|trap| panic!("seed {seed}: {trap}"));
                    host.join().expect("the host's thread ends")
                })
            })
            .count()
    };
    assert!(missing("gpu") > 0);
    assert_eq!(missing("sys"), 0);
}
