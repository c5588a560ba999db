//! Bulk copies, mbarriers and clusters.

use crate::arena::{Arena, kernel, launch, linked, run_text, start};
use ferrogin_test_support::repetitions;
use soft_gpu_ptx::TrapKind;

const SHARED: &str = ".shared .align 16 .b8 room[64]; .shared .align 8 .b64 bar;";
/// Initializes the mbarrier for one arrival.
const INIT: &str = "mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster;\n";
/// Copies four words from the arena to shared memory.
const LOAD: &str = "mov.u32 %r1, room; mov.u32 %r2, bar;\n\
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 32;\n\
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r1], [%out], 32, [%r2], %d3;\n";
const WAIT: &str = "$W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0, 10000; @!%p1 bra $W;\n";
/// Copies four words from shared memory to word 8 of the arena.
const STORE: &str = "cp.async.bulk.global.shared::cta.bulk_group [%out+64], [room], 32; cp.async.bulk.commit_group;\n";

fn give(arena: &Arena) {
    (0..4).for_each(|word| arena.set(word, 10 + word as u64));
}

/// Runs `body` with one thread per block under weak memory and many seeds. Returns how often word 16 of the arena isn't
/// `expected`.
fn wrong(blocks: u32, body: &str, expected: u64) -> usize {
    let program = linked(&kernel(SHARED, body));
    let wrong = |seed: &u64| {
        let arena = Arena::new(64);
        give(&arena);
        let mut launch = launch(&arena, blocks, 1, *seed);
        launch.weak = true;
        start(&program, &launch, &arena).unwrap_or_else(|trap| panic!("seed {seed}: {trap}\n{body}"));
        arena.get(16) != expected
    };
    (0..repetitions("SOFTGPU_SEEDS", 200, 20_000)).filter(wrong).count()
}

/// Checks that `body` is right with all seeds, and without `part` wrong with some.
fn needs(blocks: u32, body: &str, part: &str, instead: &str, expected: u64) {
    assert_eq!(wrong(blocks, body, expected), 0, "{body}");
    assert!(body.contains(part), "{body}");
    assert!(wrong(blocks, &body.replacen(part, instead, 1), expected) > 0, "no seed shows that {part:?} is missing");
}

/// Loads, adds the first and last words, and stores the sum in word 16.
fn load() -> String {
    format!(
        "{INIT}{LOAD}{WAIT}ld.shared.u64 %d1, [room]; ld.shared.u64 %d2, [room+24]; add.u64 %d1, %d1, %d2; st.global.u64 [%out+128], %d1;\n\
         cp.async.bulk.wait_group 0; $E: mbarrier.test_wait.parity.shared::cta.b64 %p1, [bar], 0; @!%p1 bra $E;"
    )
}

#[test]
fn copies_move_bytes_in_each_form() {
    let text = kernel(
        SHARED,
        &format!(
            "{INIT}mov.u32 %r1, bar; mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %d1, [%r1], 32;\n\
             cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [room+16], [%out+16], 32, [bar];\n\
             $W: mbarrier.try_wait.shared::cta.b64 %p1, [bar], %d1; @!%p1 bra $W;\n\
             mbarrier.inval.shared::cta.b64 [bar];\n\
             cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%out+64], [room+16], 32, %d1;\n\
             cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"
        ),
    );
    for weak in [false, true] {
        for seed in 0..20 {
            let arena = Arena::new(64);
            give(&arena);
            arena.set(4, 14);
            arena.set(5, 15);
            let mut launch = launch(&arena, 1, 1, seed);
            launch.weak = weak;
            start(&linked(&text), &launch, &arena).unwrap_or_else(|trap| panic!("{trap}"));
            let found: Vec<u64> = (7..13).map(|word| arena.get(word)).collect();
            assert_eq!(found, [0, 12, 13, 14, 15, 0], "weak {weak}, seed {seed}");
        }
    }
}

#[test]
fn loads_need_their_wait() {
    needs(1, &load(), WAIT, "", 23);
}

#[test]
fn loads_need_their_expected_bytes() {
    let part = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 32;";
    // The first wait ends early; the last one then never ends, so it goes, too.
    let body = load().replace(
        "$E: mbarrier.test_wait.parity.shared::cta.b64 %p1, [bar], 0; @!%p1 bra $E;",
        "$E: ld.shared.u64 %d1, [room]; setp.ne.u64 %p1, %d1, 10; @%p1 bra $E;",
    );
    needs(1, &body, part, "mbarrier.arrive.shared::cta.b64 _, [%r2];", 23);
}

#[test]
fn loads_of_stored_words_need_a_proxy_fence() {
    let body = format!("st.global.u64 [%out], 20;\nfence.proxy.async;\n{}", load());
    needs(1, &body, "fence.proxy.async;", "", 33);
    needs(
        1,
        &body.replace("proxy.async;", "proxy.async.global;"),
        "fence.proxy.async.global;",
        "fence.proxy.async.shared::cta;",
        33,
    );
}

/// The first block stores 7 in shared memory, copies it to word 8, and raises a flag; the second one waits for it and
/// reads the word.
fn store() -> String {
    format!(
        "mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra $other;\n\
         st.shared.u64 [room], 5; st.shared.u64 [room+8], 5; st.shared.u64 [room], 7; st.shared.u64 [room+16], 5;\n\
         fence.proxy.async.shared::cta;\n{STORE}cp.async.bulk.wait_group.read 0;\nst.shared.u64 [room], 9;\n\
         cp.async.bulk.wait_group 0;\nst.release.gpu.global.u64 [%out+256], 1; bra $end;\n\
         $other: ld.acquire.gpu.global.u64 %d1, [%out+256]; setp.eq.u64 %p1, %d1, 0; @%p1 bra $other;\n\
         ld.global.u64 %d1, [%out+64]; st.global.u64 [%out+128], %d1;\n$end:"
    )
}

#[test]
fn stores_need_a_proxy_fence() {
    needs(2, &store(), "fence.proxy.async.shared::cta;", "", 7);
    needs(2, &store(), "fence.proxy.async.shared::cta;", "fence.proxy.async.global;", 7);
    needs(2, &store(), "fence.proxy.async.shared::cta;", "fence.acq_rel.cta;", 7);
}

#[test]
fn stores_need_their_wait() {
    needs(2, &store(), "cp.async.bulk.wait_group 0;", "", 7);
    needs(2, &store(), "cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;", 7);
    needs(2, &store(), "cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group 1;", 7);
}

#[test]
fn reuse_of_a_buffer_needs_the_wait_for_its_read() {
    needs(2, &store(), "cp.async.bulk.wait_group.read 0;", "", 7);
}

#[test]
fn a_fence_covers_stores_of_other_threads_before_a_barrier() {
    let body = "mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; setp.ne.u32 %p2, %r1, 40; @!%p2 st.shared.u64 [room], 7;\n\
        bar.sync 0;\n@%p1 bra $end; fence.proxy.async.shared::cta;\n";
    let program = linked(&kernel(SHARED, &format!("{body}{STORE}cp.async.bulk.wait_group 0;\n$end:")));
    for seed in 0..100 {
        let arena = Arena::new(64);
        let mut launch = launch(&arena, 1, 64, seed);
        launch.weak = true;
        start(&program, &launch, &arena).unwrap_or_else(|trap| panic!("{trap}"));
        assert_eq!(arena.get(8), 7, "seed {seed}");
    }
}

#[test]
fn phases_and_states_follow_arrivals() {
    // Each line leaves a result in %p1, which goes to the next bit of word 0.
    let tests = [
        ("mbarrier.init.shared.b64 [bar], 2;", None),
        ("mbarrier.test_wait.parity.shared.b64 %p1, [bar], 1;", Some(true)),
        ("mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0;", Some(false)),
        ("mbarrier.arrive.shared.b64 %d1, [bar];", None),
        ("mbarrier.test_wait.shared.b64 %p1, [bar], %d1;", Some(false)),
        ("mbarrier.arrive.release.cta.shared::cta.b64 %d2, [bar], 1;", None),
        ("mbarrier.try_wait.acquire.cta.shared.b64 %p1, [bar], %d1;", Some(true)),
        ("mbarrier.try_wait.shared.b64 %p1, [bar], %d2, 5;", Some(true)),
        ("mbarrier.try_wait.parity.relaxed.cluster.shared.b64 %p1, [bar], 0;", Some(true)),
        ("mbarrier.try_wait.parity.shared.b64 %p1, [bar], 1;", Some(false)),
        // The second phase also waits for bytes, on generic addresses.
        ("mov.u64 %d3, bar; cvta.shared.u64 %d3, %d3; mbarrier.arrive.b64 %d1, [%d3], 2;", None),
        ("mbarrier.test_wait.b64 %p1, [%d3], %d1;", Some(true)),
        ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 16;", None),
        ("mbarrier.arrive.b64 %d1, [%d3], 2;", None),
        ("mbarrier.test_wait.b64 %p1, [%d3], %d1;", Some(false)),
        ("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [room], [%out+64], 16, [bar];", None),
        ("mbarrier.test_wait.b64 %p1, [%d3], %d1;", Some(true)),
        ("mbarrier.inval.shared.b64 [bar]; mbarrier.init.shared.b64 [bar], 1;", None),
        ("mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0;", Some(false)),
    ];
    let (mut body, mut expected, mut bits) = (String::from("mov.u64 %d9, 0;\n"), 0, 0);
    for (line, result) in tests {
        body += line;
        if let Some(result) = result {
            body += &format!(" selp.b64 %d8, {}, 0, %p1; or.b64 %d9, %d9, %d8;", 1u64 << bits);
            expected |= u64::from(result) << bits;
            bits += 1;
        }
        body.push('\n');
    }
    let arena = Arena::new(64);
    run_text(&kernel(SHARED, &format!("{body}st.global.u64 [%out], %d9;")), &arena, 1)
        .unwrap_or_else(|trap| panic!("{trap}"));
    assert_eq!(arena.get(0), expected);
}

#[test]
fn misuse_is_named() {
    use TrapKind::{Address, AddressSpace, Mbarrier, Misaligned};
    let copy = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [room], [%out], 16, [bar];";
    let cases = [
        ("mbarrier.arrive.shared.b64 _, [bar];".to_owned(), Mbarrier, "is not initialized"),
        ("mbarrier.init.shared.b64 [bar], 0;".into(), Mbarrier, "takes 1 to 1048575"),
        ("mbarrier.init.shared.b64 [bar], 1; mbarrier.init.shared.b64 [bar], 1;".into(), Mbarrier, "initialized again"),
        ("mbarrier.init.shared.b64 [bar], 1; st.shared.u32 [bar], 0; mbarrier.arrive.shared.b64 _, [bar];".into(), Mbarrier, "overwritten"),
        ("mbarrier.init.shared.b64 [bar], 1; mbarrier.inval.shared.b64 [bar]; mbarrier.arrive.shared.b64 _, [bar];".into(), Mbarrier, "invalidated"),
        ("mbarrier.init.shared.b64 [bar], 2; mbarrier.arrive.shared.b64 _, [bar], 3;".into(), Mbarrier, "waits for 2 of 2"),
        ("mbarrier.init.shared.b64 [bar], 1; mbarrier.test_wait.parity.shared.b64 %p1, [bar], 2;".into(), Mbarrier, "the parity 2"),
        ("mbarrier.init.shared.b64 [bar], 1; mbarrier.test_wait.shared.b64 %p1, [bar], 7;".into(), Mbarrier, "neither of its current phase"),
        ("mbarrier.init.shared.b64 [bar], 1; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 0x200000;".into(), Mbarrier, "2097152 bytes"),
        ("mbarrier.init.shared.b64 [bar], 1; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16; mbarrier.inval.shared.b64 [bar];".into(), Mbarrier, "waits for 16 bytes"),
        (format!("{INIT}{copy} mbarrier.inval.shared.b64 [bar];"), Mbarrier, "copies of 16 bytes arrived"),
        ("mbarrier.init.b64 [%out], 1;".into(), AddressSpace, "not shared memory"),
        ("mbarrier.init.shared.b64 [bar+4], 1;".into(), Misaligned, "multiple of 8"),
        (copy.into(), Mbarrier, "is not initialized"),
        (format!("{INIT}{}", copy.replace("16,", "8,")), Misaligned, "a bulk copy of 8 bytes"),
        (format!("{INIT}{}", copy.replace("[%out]", "[%out+8]")), Misaligned, "multiple of 16"),
        (format!("{INIT}{}", copy.replace("[room]", "[room+56]")), Misaligned, "multiple of 16"),
        (format!("{INIT}{}", copy.replace("[room]", "[room+80]")), Address, "outside its 80 bytes"),
        (format!("{INIT}{}", copy.replace("[%out]", "[%out+512]")), Address, "bulk copy of 8 bytes"),
    ];
    for (body, kind, cause) in cases {
        let trap = run_text(&kernel(SHARED, &body), &Arena::new(64), 1).expect_err(&body);
        assert!(trap.kind == kind && trap.cause.contains(cause), "{body}\n{trap}");
    }
}

#[test]
fn weak_memory_names_missing_fences_and_waits() {
    let cases = [
        (load().replacen("fence.mbarrier_init.release.cluster;", "", 1), "execute fence.mbarrier_init"),
        (format!("{INIT}{LOAD}"), "wait for its mbarrier"),
    ];
    for (body, cause) in cases {
        let program = linked(&kernel(SHARED, &body));
        let traps = (0..100).filter_map(|seed| {
            let arena = Arena::new(64);
            let mut launch = launch(&arena, 1, 1, seed);
            launch.weak = true;
            start(&program, &launch, &arena).err()
        });
        let traps: Vec<_> = traps.collect();
        assert!(!traps.is_empty(), "{body}");
        assert!(traps.iter().all(|trap| trap.cause.contains(cause)), "{traps:?}");
    }
}

#[test]
fn blocks_of_a_cluster_know_their_place() {
    let registers = [
        "%cluster_ctaid.x",
        "%cluster_ctaid.y",
        "%clusterid.x",
        "%clusterid.y",
        "%nclusterid.x",
        "%cluster_ctarank",
        "%cluster_nctarank",
    ];
    let mut body = String::from(
        "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %nctaid.x; mad.lo.u32 %r1, %r2, %r3, %r1; mad.wide.u32 %out, %r1, 8, %out;\n",
    );
    for (at, register) in registers.iter().enumerate() {
        body += &format!("mov.u32 %r4, {register}; st.global.u8 [%out+{at}], %r4;\n");
    }
    let program = linked(&kernel("", &body));
    let arena = Arena::new(64);
    let mut launch = launch(&arena, 4, 1, 1);
    launch.grid[1] = 3;
    launch.cluster = Some([2, 3, 1]);
    start(&program, &launch, &arena).unwrap_or_else(|trap| panic!("{trap}"));
    for (x, y) in (0..3).flat_map(|y| (0..4).map(move |x| (x, y))) {
        let expected = [x % 2, y, x / 2, 0, 2, y * 2 + x % 2, 6, 0];
        assert_eq!(arena.get((y * 4 + x) as usize).to_le_bytes(), expected, "block ({x}, {y})");
    }
    launch.cluster = Some([3, 1, 1]);
    let trap = start(&program, &launch, &arena).expect_err("4 blocks aren't whole clusters of 3");
    assert!(trap.kind == TrapKind::Launch && trap.cause.contains("clusters of [3, 1, 1] blocks"), "{trap}");
}

#[test]
fn distributed_shared_memory_is_refused_by_name() {
    for body in [
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1];",
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r2], 16, [%r3];",
    ] {
        let error = soft_gpu_ptx::Module::parse("test", &kernel("", body)).expect_err(body);
        assert!(error.to_string().contains("no distributed shared memory"), "{error}");
    }
}
