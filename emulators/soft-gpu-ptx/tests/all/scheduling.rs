//! Warps, barriers, divergence, and thread order.

use crate::arena::{Arena, kernel, launch, linked, run_text, start};
use ferrogin_test_support::wait::wait_until;
use soft_gpu_ptx::Time;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Runs `body` with one block, where `%r1` is the thread and `%d1` the address of its word. Returns the threads' words.
fn threads(count: u32, body: &str) -> Vec<u64> {
    let arena = Arena::new(count as usize);
    let text = kernel(
        ".shared .align 8 .b8 room[1024];",
        &format!("mov.u32 %r1, %tid.x; mad.wide.u32 %d1, %r1, 8, %out;\n{body}"),
    );
    for seed in 0..20 {
        start(&linked(&text), &launch(&arena, 1, count, seed), &arena).unwrap_or_else(|trap| panic!("{trap}"));
    }
    arena.all()
}

#[test]
fn shuffles_take_the_value_of_the_lane_that_the_specification_says() {
    let shuffle =
        |form: &str| threads(32, &format!("shfl.sync.{form}; cvt.u64.u32 %d2, %r2; st.global.u64 [%d1], %d2;"));
    assert_eq!(shuffle("idx.b32 %r2, %r1, 5, 31, -1"), [5; 32]);
    assert_eq!(shuffle("idx.b32 %r2, %r1, 2, 0x181f, -1"), (0..32).map(|lane| lane / 8 * 8 + 2).collect::<Vec<u64>>());
    assert_eq!(
        shuffle("up.b32 %r2, %r1, 1, 0, -1"),
        (0..32).map(|lane: u64| lane.saturating_sub(1)).collect::<Vec<_>>()
    );
    assert_eq!(
        shuffle("down.b32 %r2, %r1, 3, 31, -1"),
        (0..32).map(|lane| if lane < 29 { lane + 3 } else { lane }).collect::<Vec<u64>>()
    );
    assert_eq!(shuffle("bfly.b32 %r2, %r1, 16, 31, -1"), (0..32).map(|lane| lane ^ 16).collect::<Vec<u64>>());
    let valid =
        threads(32, "shfl.sync.down.b32 %r2|%p1, %r1, 3, 31, -1; selp.b64 %d2, 1, 0, %p1; st.global.u64 [%d1], %d2;");
    assert_eq!(valid, (0..32).map(|lane| u64::from(lane < 29)).collect::<Vec<_>>());
}

#[test]
fn votes_and_matches_are_over_the_mask_in_both_branches_of_a_divergence() {
    let words = threads(
        32,
        "and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0; setp.lt.u32 %p2, %r1, 8; @%p1 bra $even;\n\
         vote.sync.ballot.b32 %r3, %p2, 0xaaaaaaaa; bra $end;\n\
         $even: vote.sync.ballot.b32 %r3, !%p2, 0x55555555;\n\
         $end: cvt.u64.u32 %d2, %r3; st.global.u64 [%d1], %d2;",
    );
    assert_eq!(words, (0..32).map(|lane| if lane % 2 == 1 { 0xaa } else { 0x5555_5500 }).collect::<Vec<_>>());
    let words = threads(
        32,
        "shr.u32 %r2, %r1, 3; match.any.sync.b32 %r3, %r2, -1; cvt.u64.u32 %d2, %r3; st.global.u64 [%d1], %d2;",
    );
    assert_eq!(words, (0..32).map(|lane| 0xff << (lane / 8 * 8)).collect::<Vec<_>>());
    let words = threads(8, "match.all.sync.b32 %r3|%p1, %r1, 0xff; selp.b64 %d2, 1, 0, %p1; st.global.u64 [%d1], %d2;");
    assert_eq!(words, [0; 8]);
    let words = threads(8, "redux.sync.max.s32 %r3, %r1, 0xff; cvt.u64.u32 %d2, %r3; st.global.u64 [%d1], %d2;");
    assert_eq!(words, [7; 8]);
}

#[test]
fn active_masks_part_a_warp_into_groups() {
    let arena = Arena::new(32);
    let program = linked(&kernel(
        "",
        "mov.u32 %r1, %tid.x; mad.wide.u32 %d1, %r1, 8, %out;\nactivemask.b32 %r2;\nbar.warp.sync %r2; cvt.u64.u32 %d2, %r2; st.global.u64 [%d1], %d2;",
    ));
    let mut whole = 0;
    let mut parted = 0;
    for seed in 0..200 {
        start(&program, &launch(&arena, 1, 32, seed), &arena).unwrap_or_else(|trap| panic!("{trap}"));
        let masks = arena.all();
        for (lane, &mask) in masks.iter().enumerate() {
            assert!(mask >> lane & 1 == 1 && mask <= u64::from(u32::MAX), "lane {lane}: {mask:#x}");
            let members = (0..32).filter(|other| mask >> other & 1 == 1);
            members.for_each(|other| assert_eq!(masks[other], mask, "lanes {lane} and {other}"));
        }
        if masks[0] == u64::from(u32::MAX) { whole += 1 } else { parted += 1 }
    }
    assert!(whole > 0 && parted > 0, "{whole} whole warps, {parted} parted ones");
}

#[test]
fn barriers_part_a_block_into_phases() {
    // In each phase, every thread takes its neighbour's word from the previous phase.
    let words = threads(
        100,
        "mov.u64 %d20, room; mad.wide.u32 %d2, %r1, 8, %d20; cvt.u64.u32 %d9, %r1; st.shared.u64 [%d2], %d9;\n\
         add.u32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 100; selp.b32 %r2, 0, %r2, %p1; mad.wide.u32 %d3, %r2, 8, %d20;\n\
         mov.u32 %r5, 0;\n\
         $L: bar.sync 0; ld.shared.u64 %d4, [%d3]; barrier.sync 3; st.shared.u64 [%d2], %d4;\n\
         add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 7; @%p1 bra $L;\n\
         st.global.u64 [%d1], %d4;",
    );
    assert_eq!(words, (0..100).map(|thread| (thread + 7) % 100).collect::<Vec<u64>>());
}

#[test]
fn a_producer_warp_arrives_and_a_consumer_warp_waits() {
    let words = threads(
        64,
        "mov.u32 %r9, room; setp.lt.u32 %p1, %r1, 32; @%p1 bra $produce;\n\
         bar.sync 1, 64; sub.u32 %r2, %r1, 32; mad.lo.u32 %r2, %r2, 8, %r9; ld.shared.u64 %d2, [%r2]; bra $end;\n\
         $produce: mad.lo.u32 %r2, %r1, 8, %r9; mul.wide.u32 %d2, %r1, 3; st.shared.u64 [%r2], %d2; bar.arrive 1, 64;\n\
         $end: st.global.u64 [%d1], %d2;",
    );
    assert_eq!(words, (0..64).map(|thread| thread % 32 * 3).collect::<Vec<u64>>());
    let words = threads(
        40,
        "setp.lt.u32 %p1, %r1, 3; bar.red.popc.u32 %r2, 0, %p1; bar.red.and.pred %p2, 0, %p1; bar.red.or.pred %p3, 0, !%p1;\n selp.b32 %r3, 100, 0, %p2; selp.b32 %r4, 1000, 0, %p3; add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r4; cvt.u64.u32 %d2, %r2; st.global.u64 [%d1], %d2;",
    );
    assert_eq!(words, [1003; 40]);
}

#[test]
fn threads_of_one_warp_can_hold_a_lock_in_turn() {
    // Without independent thread scheduling, the lane that holds the lock would wait for lanes that spin on it.
    let body = "$L: atom.acquire.gpu.global.cas.b32 %r2, [%out], 0, 1; setp.ne.u32 %p1, %r2, 0; @%p1 bra $L;\n\
        ld.global.u64 %d2, [%out+8]; nanosleep.u32 10; add.u64 %d2, %d2, 1; st.global.u64 [%out+8], %d2;\n\
        fence.acq_rel.gpu; atom.release.gpu.global.exch.b32 %r2, [%out], 0;";
    for weak in [false, true] {
        let arena = Arena::new(2);
        let mut launch = launch(&arena, 3, 96, 5);
        launch.weak = weak;
        start(&linked(&kernel("", body)), &launch, &arena).unwrap_or_else(|trap| panic!("{trap}"));
        assert_eq!(arena.all(), [0, 288], "weak {weak}");
    }
}

#[test]
fn the_seed_gives_the_order_and_the_same_seed_the_same_order() {
    // 64 threads in two blocks take tickets; the seed decides their order.
    let program = linked(&kernel(
        "",
        "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r1, %r2, 32, %r1; cvt.u64.u32 %d1, %r1;\n\
         atom.global.add.u64 %d2, [%out], 1; mad.lo.u64 %d3, %d2, 8, %out; st.global.u64 [%d3+8], %d1;",
    ));
    let order = |seed| {
        let arena = Arena::new(65);
        let statistics = start(&program, &launch(&arena, 2, 32, seed), &arena).unwrap_or_else(|trap| panic!("{trap}"));
        (arena.all(), statistics)
    };
    let orders: Vec<_> = (0..8).map(order).collect();
    for (seed, first) in orders.iter().enumerate() {
        assert_eq!(*first, order(seed as u64), "seed {seed}");
        let mut sorted = first.0[1..].to_vec();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..64).collect::<Vec<u64>>());
    }
    assert!(orders.windows(2).all(|pair| pair[0].0 != pair[1].0));
}

#[test]
fn a_grid_has_all_its_threads_once() {
    let text = kernel(
        "",
        "mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ctaid.y; mov.u32 %r6, %ctaid.z;\n\
         mov.u32 %r7, %nctaid.x; mov.u32 %r8, %nctaid.y; mad.lo.u32 %r9, %r6, %r8, %r5; mad.lo.u32 %r9, %r9, %r7, %r4;\n\
         mov.u32 %r10, %ntid.x; mov.u32 %r11, %ntid.y; mov.u32 %r12, %ntid.z; mad.lo.u32 %r13, %r3, %r11, %r2; mad.lo.u32 %r13, %r13, %r10, %r1;\n\
         mul.lo.u32 %r14, %r10, %r11; mul.lo.u32 %r14, %r14, %r12; mad.lo.u32 %r15, %r9, %r14, %r13;\n\
         mad.wide.u32 %d1, %r15, 8, %out; atom.global.add.u64 %d2, [%d1], 1;",
    );
    let arena = Arena::new(500 * 8 * 7);
    let mut launch = launch(&arena, 1, 1, 9);
    (launch.grid, launch.block) = ([50, 5, 2], [7, 4, 2]);
    let statistics = start(&linked(&text), &launch, &arena).unwrap_or_else(|trap| panic!("{trap}"));
    assert_eq!((statistics.threads, statistics.atomics), (28000, 28000));
    assert!(arena.all().iter().all(|&count| count == 1));
}

#[test]
fn a_kernel_that_waits_for_the_host_leaves_it_the_processor() {
    let arena = Arena::new(2);
    let program = linked(&kernel(
        "",
        "$L: ld.acquire.sys.global.u64 %d1, [%out]; setp.eq.u64 %p1, %d1, 0; @%p1 bra $L; atom.global.add.u64 %d2, [%out+8], %d1;",
    ));
    let done = AtomicBool::new(false);
    let statistics = std::thread::scope(|scope| {
        scope.spawn(|| {
            wait_until("idle kernel", || arena.idle_rounds() != 0 || done.load(Ordering::Relaxed));
            arena.set(0, 3);
        });
        let statistics = start(&program, &launch(&arena, 4, 64, 1), &arena).unwrap_or_else(|trap| panic!("{trap}"));
        done.store(true, Ordering::Relaxed);
        statistics
    });
    assert_eq!(arena.get(1), 3 * 256);
    assert!(statistics.idle > 0);
}

#[test]
fn time_that_counts_instructions_is_the_same_on_every_run_of_a_seed() {
    let of_threads = "mov.u32 %r1, %tid.x; mad.wide.u32 %d1, %r1, 8, %out;\n";
    let waits = of_threads.to_string()
        + "mov.u64 %d2, %globaltimer; $L: atom.global.add.u64 %d3, [%d1], 1; mov.u64 %d4, %globaltimer;\n\
           sub.u64 %d4, %d4, %d2; setp.lt.u64 %p1, %d4, 20000; @%p1 bra $L;";
    let endless = of_threads.to_string() + "$L: atom.global.add.u64 %d3, [%d1], 1; bra $L;";
    let run = |body: &str, seed: u64| {
        let arena = Arena::new(4);
        let mut launch = launch(&arena, 1, 4, seed);
        launch.time = Time::Instructions;
        launch.watchdog = Some(Duration::from_micros(100));
        let ended = start(&linked(&kernel("", body)), &launch, &arena).map_err(|trap| trap.to_string());
        (ended, arena.all())
    };
    assert_eq!(run(&waits, 1), run(&waits, 1));
    assert_ne!(run(&waits, 1).1, run(&waits, 2).1);
    assert!(run(&waits, 1).0.is_ok());
    assert_eq!(run(&endless, 1), run(&endless, 1));
    assert!(run(&endless, 1).0.is_err_and(|trap| trap.contains("watchdog")));
}

#[test]
fn dynamic_shared_memory_is_behind_the_static_one() {
    let text = ".version 7.0\n.target sm_80\n.address_size 64\n.extern .shared .align 16 .b8 more[];\n\
        .visible .entry k(.param .u64 out) { .reg .b64 %d<8>; .reg .b32 %r<8>; .shared .align 4 .b8 own[20];\n\
        ld.param.u64 %d1, [out]; mov.u32 %r1, more; mov.u32 %r2, own; mov.u32 %r3, %dynamic_smem_size; mov.u32 %r4, %total_smem_size;\n\
        st.global.v4.u32 [%d1], {%r1, %r2, %r3, %r4}; st.shared.u64 [more+8], 9; ret; }";
    let arena = Arena::new(2);
    let program = linked(text);
    assert_eq!(program.kernel("k").unwrap().shared, 32);
    let mut with = launch(&arena, 1, 1, 0);
    with.shared = 16;
    start(&program, &with, &arena).unwrap_or_else(|trap| panic!("{trap}"));
    assert_eq!(arena.all(), [32, 16 | 48 << 32]);
    let trap = run_text(text, &arena, 1).expect_err("no dynamic shared memory");
    assert!(trap.to_string().contains("outside its 32 bytes"), "{trap}");
}
