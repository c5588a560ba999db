//! Weak memory: whatever it may do happens with some seed; what fences forbid never happens.

use crate::arena::{Arena, kernel, launch, linked, start};
use ferrogin_test_support::repetitions;
use std::collections::BTreeSet;

/// Runs `body` with these blocks and threads under many seeds. Returns the results found in words 8 to 10 of the arena.
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

/// Passes a message: the first thread writes data and a flag, the second waits for the flag and reads the data.
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
    // The reader has read the data before, as polling threads do.
    let read = format!("ld.global.u64 %d2, [%out]; ld.global.u64 %d3, [%out+32];\n{WAIT}");
    let write = "fence.acq_rel.sys; st.release.sys.global.u64 [%out+256], 1;";
    let found = message(2, 1, write, &read.replace("ORDER", "relaxed.gpu"));
    assert!(found.len() > 1, "{found:?}");
    let found = message(2, 1, write, &read.replace("ORDER", "acquire.gpu"));
    assert_eq!(found, BTreeSet::from([[1, 2, 0]]));
}

/// A litmus test: each thread's code, the number of threads per block, and an outcome.
///
/// Threads share the words `[x]` and `[y]`, and write what they saw to `[r0]` to `[r3]`. The outcome lists `r0` to
/// `r3`, then the final `x` and `y`; `_` is any value.
struct Litmus {
    name: &'static str,
    block: u32,
    threads: &'static [&'static str],
    outcome: &'static str,
    allowed: bool,
}

const fn case(
    name: &'static str,
    block: u32,
    threads: &'static [&'static str],
    outcome: &'static str,
    allowed: bool,
) -> Litmus {
    Litmus { name, block, threads, outcome, allowed }
}

/// The litmus tests, in short forms: `W x 1` stores, `R x 0` loads into `r0`; `Wrel` and `Racq` are at GPU scope,
/// `WrelC` and `RacqC` at block scope; `D x 0` stores a value that depends on `r0`, and `C x 0` stores 1 if `r0` is not
/// 0, with a branch.
const LITMUS: &[Litmus] = &[
    case("MP", 1, &["W x 1; W y 1", "R y 0; R x 1"], "1 0 _ _ _ _", true),
    case("MP, the writer orders", 1, &["W x 1; Wrel y 1", "R y 0; R x 1"], "1 0 _ _ _ _", true),
    case("MP, the reader orders", 1, &["W x 1; W y 1", "Racq y 0; R x 1"], "1 0 _ _ _ _", true),
    case("MP, both order", 1, &["W x 1; Wrel y 1", "Racq y 0; R x 1"], "1 0 _ _ _ _", false),
    case("MP, fences", 1, &["W x 1; F; W y 1", "R y 0; F; R x 1"], "1 0 _ _ _ _", false),
    case("MP, the block's release", 1, &["W x 1; WrelC y 1", "Racq y 0; R x 1"], "1 0 _ _ _ _", true),
    case("MP, the block's acquire", 1, &["W x 1; Wrel y 1", "RacqC y 0; R x 1"], "1 0 _ _ _ _", true),
    case("MP in a block", 2, &["W x 1; WrelC y 1", "RacqC y 0; R x 1"], "1 0 _ _ _ _", false),
    case("MP, a release of an atomic", 1, &["W x 1; Arel y", "Aacq y 0; R x 1"], "1 0 _ _ _ _", false),
    case("MP, relaxed atomics", 1, &["W x 1; A y", "Aacq y 0; R x 1"], "1 0 _ _ _ _", true),
    case("MP, the acquire follows a load", 1, &["W x 1; Wrel y 1", "R y 0; Racq x 1"], "1 0 _ _ _ _", true),
    case("SB", 1, &["W x 1; R y 0", "W y 1; R x 1"], "0 0 _ _ _ _", true),
    case("SB, fences", 1, &["W x 1; F; R y 0", "W y 1; F; R x 1"], "0 0 _ _ _ _", true),
    case("SB, fences of sequence", 1, &["W x 1; S; R y 0", "W y 1; S; R x 1"], "0 0 _ _ _ _", false),
    case("SB, one fence of sequence", 1, &["W x 1; S; R y 0", "W y 1; R x 1"], "0 0 _ _ _ _", true),
    case("LB", 1, &["R x 0; W y 1", "R y 1; W x 1"], "1 1 _ _ _ _", true),
    case("LB, one thread orders", 1, &["R x 0; F; W y 1", "R y 1; W x 1"], "1 1 _ _ _ _", true),
    case("LB, fences", 1, &["R x 0; F; W y 1", "R y 1; F; W x 1"], "1 1 _ _ _ _", false),
    case("LB, acquires", 1, &["Racq x 0; W y 1", "Racq y 1; W x 1"], "1 1 _ _ _ _", false),
    case("LB, releases", 1, &["R x 0; Wrel y 1", "R y 1; Wrel x 1"], "1 1 _ _ _ _", false),
    case("LB, one value depends", 1, &["R x 0; D y 0", "R y 1; W x 1"], "1 1 _ _ _ _", true),
    case("LB, values depend", 1, &["R x 0; D y 0", "R y 1; D x 1"], "1 1 _ _ _ _", false),
    case("LB, branches depend", 1, &["R x 0; C y 0", "R y 1; C x 1"], "1 1 _ _ _ _", false),
    case("LB, relaxed atomics", 1, &["A x 0; W y 1", "A y 1; W x 1"], "1 1 _ _ _ _", true),
    case("LB, atomics with an acquire", 1, &["Aacq x 0; W y 1", "Aacq y 1; W x 1"], "1 1 _ _ _ _", false),
    case("S", 1, &["W x 2; Wrel y 1", "R y 0; W x 1"], "1 _ _ _ 2 _", true),
    case("S, both order", 1, &["W x 2; Wrel y 1", "Racq y 0; W x 1"], "1 _ _ _ 2 _", false),
    case("S, a branch depends", 1, &["W x 2; Wrel y 1", "R y 0; C x 0"], "1 _ _ _ 2 _", false),
    case("R", 1, &["W x 1; W y 1", "W y 2; R x 0"], "0 _ _ _ _ 2", true),
    case("R, fences", 1, &["W x 1; F; W y 1", "W y 2; F; R x 0"], "0 _ _ _ _ 2", true),
    case("R, fences of sequence", 1, &["W x 1; S; W y 1", "W y 2; S; R x 0"], "0 _ _ _ _ 2", false),
    case("2+2W", 1, &["W x 1; W y 2", "W y 1; W x 2"], "_ _ _ _ 1 1", true),
    case("2+2W, fences of sequence", 1, &["W x 1; S; W y 2", "W y 1; S; W x 2"], "_ _ _ _ 1 1", false),
    case("IRIW", 1, &["W x 1", "R x 0; R y 1", "W y 1", "R y 2; R x 3"], "1 0 1 0 _ _", true),
    case(
        "IRIW in two blocks, acquires",
        2,
        &["W x 1", "Racq x 0; Racq y 1", "W y 1", "Racq y 2; Racq x 3"],
        "1 0 1 0 _ _",
        true,
    ),
    case(
        "IRIW in two blocks, fences",
        2,
        &["W x 1", "R x 0; F; R y 1", "W y 1", "R y 2; F; R x 3"],
        "1 0 1 0 _ _",
        true,
    ),
    case(
        "IRIW in two blocks, fences of sequence",
        2,
        &["W x 1", "R x 0; S; R y 1", "W y 1", "R y 2; S; R x 3"],
        "1 0 1 0 _ _",
        false,
    ),
    case("WRC", 1, &["W x 1", "R x 0; Wrel y 1", "R y 1; R x 2"], "1 1 0 _ _ _", true),
    case("WRC, all order", 2, &["W x 1", "R x 0; Wrel y 1", "Racq y 1; R x 2"], "1 1 0 _ _ _", false),
    case("CoRR", 1, &["W x 1; W x 2", "R x 0; R x 1"], "2 1 _ _ _ _", false),
    case("CoWR", 1, &["W x 1; R x 0", "W x 2"], "0 _ _ _ _ _", false),
    case("CoRW", 1, &["R x 0; W x 1"], "1 _ _ _ _ _", false),
    case("atomics of the block in two blocks", 1, &["AcqC x 0", "AcqC x 1"], "0 0 _ _ _ _", true),
    case("atomics of the block in one block", 2, &["AcqC x 0", "AcqC x 1"], "0 0 _ _ _ _", false),
    case("atomics of the GPU", 1, &["Aacq x 0", "Aacq x 1"], "0 0 _ _ _ _", false),
];

/// Returns the PTX for a short form.
fn form(thread: usize, number: usize, words: &[&str]) -> String {
    let word = |name: &str| format!("[%out+{}]", if name == "x" { 0 } else { 256 });
    let result = |at: &str| format!("%d{}", 10 + at.parse::<usize>().expect("a number"));
    let label = format!("$skip{thread}_{number}");
    match *words {
        ["W", to, value] => format!("st.relaxed.gpu.global.u64 {}, {value};", word(to)),
        ["Wrel", to, value] => format!("st.release.gpu.global.u64 {}, {value};", word(to)),
        ["WrelC", to, value] => format!("st.release.cta.global.u64 {}, {value};", word(to)),
        ["R", from, at] => format!("ld.relaxed.gpu.global.u64 {}, {};", result(at), word(from)),
        ["Racq", from, at] => format!("ld.acquire.gpu.global.u64 {}, {};", result(at), word(from)),
        ["RacqC", from, at] => format!("ld.acquire.cta.global.u64 {}, {};", result(at), word(from)),
        ["A", to] => format!("atom.relaxed.gpu.global.add.u64 %d9, {}, 1;", word(to)),
        ["A", to, at] => format!("atom.relaxed.gpu.global.add.u64 {}, {}, 0;", result(at), word(to)),
        ["Arel", to] => format!("atom.release.gpu.global.add.u64 %d9, {}, 1;", word(to)),
        ["Aacq", to, at] => format!("atom.acquire.gpu.global.add.u64 {}, {}, 1;", result(at), word(to)),
        ["AcqC", to, at] => format!("atom.acq_rel.cta.global.add.u64 {}, {}, 1;", result(at), word(to)),
        ["D", to, at] => format!("mul.lo.u64 %d9, {0}, 1; st.relaxed.gpu.global.u64 {1}, %d9;", result(at), word(to)),
        ["C", to, at] => format!(
            "setp.eq.u64 %p2, {}, 0; @%p2 bra {label}; st.relaxed.gpu.global.u64 {}, 1;\n{label}:",
            result(at),
            word(to)
        ),
        ["F"] => "fence.acq_rel.gpu;".into(),
        ["S"] => "fence.sc.gpu;".into(),
        _ => panic!("{words:?}"),
    }
}

/// Returns a litmus test's kernel. Each thread first loads both words, as polling threads do, and pauses between its
/// instructions.
fn litmus(threads: &[&str], pause: &str) -> String {
    let mut body = String::from(
        "mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ntid.x; mov.u32 %r6, %tid.x; mad.lo.u32 %r4, %r4, %r5, %r6;\n\
         ld.relaxed.gpu.global.u64 %d8, [%out]; ld.relaxed.gpu.global.u64 %d7, [%out+256]; add.u64 %d8, %d8, %d7;\nfence.acq_rel.gpu;\n",
    );
    for (thread, code) in threads.iter().enumerate() {
        let lines = code.split("; ").enumerate();
        let lines: Vec<String> =
            lines.map(|(number, line)| form(thread, number, &line.split(' ').collect::<Vec<_>>())).collect();
        let code = lines.join(pause);
        body += &format!("setp.ne.u32 %p1, %r4, {thread}; @%p1 bra $T{thread};\n{code}\n");
        for at in (0..4).filter(|at| code.contains(&format!("%d1{at}, [%out"))) {
            body += &format!("st.global.u64 [%out+{}], %d1{at};\n", 64 + at * 8);
        }
        body += &format!("$T{thread}:\n");
    }
    kernel("", &body)
}

#[test]
fn litmus_tests_have_the_outcomes_that_the_model_allows() {
    let mut wrong = Vec::new();
    for Litmus { name, block, threads, outcome, allowed } in LITMUS {
        let programs = ["\n", "\nnanosleep.u32 1;\n"].map(|pause| linked(&litmus(threads, pause)));
        let expected: Vec<Option<u64>> = outcome.split(' ').map(|word| word.parse().ok()).collect();
        let blocks = threads.len().div_ceil(*block as usize) as u32;
        let shows = |seed: u64| {
            let arena = Arena::new(64);
            let mut launch = launch(&arena, blocks, *block, seed);
            launch.weak = true;
            let program = &programs[seed as usize % programs.len()];
            start(program, &launch, &arena).unwrap_or_else(|trap| panic!("{name}, seed {seed}: {trap}"));
            let found = [8, 9, 10, 11, 0, 32].map(|word| arena.get(word));
            found.iter().zip(&expected).all(|(found, expected)| expected.is_none_or(|expected| expected == *found))
        };
        let seeds = repetitions("SOFTGPU_SEEDS", if *allowed { 50_000 } else { 2_000 }, 200_000);
        let first = (0..seeds).find(|&seed| shows(seed));
        println!("{name}: {outcome} {}", first.map_or("never".into(), |seed| format!("with seed {seed}")));
        if first.is_some() != *allowed {
            wrong.push(format!("{name}: {outcome}, seed {first:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
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
    // While the kernel waits, the host reads the flag and then the data: it sees memory, not the GPU.
    let host = |arena: &Arena| {
        if arena.get(32) != 0 && arena.get(33) == 0 {
            arena.set(34, 1 + arena.get(0));
            arena.set(33, 1);
        }
    };
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
                let arena = Arena::with_host(64, host);
                let mut launch = launch(&arena, 1, 1, seed);
                launch.weak = true;
                start(&program, &launch, &arena).unwrap_or_else(|trap| panic!("seed {seed}: {trap}"));
                arena.get(34) == 1
            })
            .count()
    };
    assert!(missing("gpu") > 0);
    assert_eq!(missing("sys"), 0);
}
