//! Costs of functions that are short enough to count by hand.

use crate::arena::{Arena, launch, linked};
use soft_gpu_ptx::{Cost, Places, cost};
use std::sync::atomic::AtomicBool;

/// Returns the costs of `threads` threads that call `f` with the arena's address; the doorbell is the arena's word 7.
fn costs(body: &str, threads: u32) -> Vec<Cost> {
    let arena = Arena::new(8);
    let program = linked(&format!(
        ".version 8.2\n.target sm_70\n.address_size 64\n\
         .func (.param .b32 r) f(.param .b64 p)\n{{\n.reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %d<16>;\n\
         ld.param.u64 %d1, [p];\n{body}\nret;\n}}\n\
         .visible .entry k(.param .u64 k_out)\n{{\n.reg .b64 %d<4>;\nld.param.u64 %d1, [k_out];\nld.global.u64 %d2, [%d1];\n\
         {{ .param .b64 p; .param .b32 r; st.param.b64 [p], %d1; call (r), f, (p); }}\nret;\n}}\n"
    ));
    let loaded = program.clone().load(&[]);
    let kernel = program.kernel("k").expect("a kernel k");
    let doorbell = arena.address() + 56;
    // Words 4 to 7 are in the host's memory.
    let gpu = arena.address()..arena.address() + 32;
    let places = Places { doorbells: &[doorbell], gpu: std::slice::from_ref(&gpu) };
    cost(&loaded, kernel, &launch(&arena, 1, threads, 1), &arena, &AtomicBool::new(false), places)
        .unwrap_or_else(|trap| panic!("{trap}"))
}

#[test]
fn chains_and_counts_are_those_by_hand() {
    // Two dependent loads and an independent one; the atomic's operand takes two round trips.
    let post = "ld.global.u64 %d2, [%d1]; add.u64 %d3, %d1, %d2; ld.global.u64 %d4, [%d3]; ld.global.u64 %d5, [%d1+8];\n\
        atom.relaxed.gpu.global.add.u64 %d6, [%d1+16], %d4; st.global.u64 [%d1+24], %d6; fence.acq_rel.sys;\n\
        st.mmio.relaxed.sys.global.u64 [%d1+56], %d5; st.param.b32 [r], 0;";
    let found = costs(post, 1);
    // The fence starts when the atomic has returned, at depth 3, and ends at 4.
    let wanted = Cost {
        instructions: 11,
        loads: 3,
        stores: 2,
        atomics: 1,
        host_reads: 0,
        fences: [0, 0, 1],
        doorbells: 1,
        reservation: Some(2),
        doorbell: Some(4),
        end: 4,
    };
    assert_eq!(found, [wanted]);
}

#[test]
fn reads_of_host_memory_are_counted() {
    let reads = "ld.global.u64 %d2, [%d1+24]; ld.global.v2.u32 {%r1, %r2}, [%d1+32]; ld.relaxed.sys.global.u32 %r3, [%d1+40];\n\
        atom.relaxed.sys.global.add.u32 %r4, [%d1+48], 1; st.global.u32 [%d1+44], %r3; st.param.b32 [r], 0;";
    let [cost] = costs(reads, 1)[..] else { panic!("one thread") };
    assert_eq!((cost.loads, cost.atomics, cost.host_reads), (3, 1, 3));
}

#[test]
fn branches_acquires_releases_and_results_are_in_the_chain() {
    let ends = |body: &str, threads| costs(body, threads).iter().map(|cost| cost.end).collect::<Vec<_>>();
    // The second load comes after a branch on the first; its result is the function's.
    let branch = "ld.global.u64 %d2, [%d1]; setp.eq.u64 %p1, %d2, 1; @%p1 bra $end; ld.global.u32 %r1, [%d1]; st.param.b32 [r], %r1;\n$end:";
    assert_eq!(ends(branch, 1), [2]);
    // Two loads side by side, and two with an acquire between them.
    assert_eq!(ends("ld.global.u32 %r1, [%d1]; ld.global.u32 %r2, [%d1]; st.param.b32 [r], %r2;", 1), [1]);
    assert_eq!(ends("ld.acquire.gpu.global.u32 %r1, [%d1]; ld.global.u32 %r2, [%d1]; st.param.b32 [r], %r2;", 1), [2]);
    // A release waits for the load and takes a round trip; a fence at block scope takes none.
    let release = "ld.global.u32 %r1, [%d1]; atom.release.gpu.global.add.u32 %r2, [%d1+8], 1; st.param.b32 [r], %r2;";
    assert_eq!(ends(release, 1), [3]);
    assert_eq!(ends("ld.global.u32 %r1, [%d1]; fence.acq_rel.cta; st.param.b32 [r], 0;", 1), [1]);
    // A value in local memory keeps its depth.
    let local = ".local .b8 l[8]; ld.global.u32 %r1, [%d1]; st.local.u32 [l], %r1; ld.local.u32 %r2, [l]; st.param.b32 [r], %r2;";
    assert_eq!(ends(local, 1), [1]);
    // Lane 0 loads; all lanes take its value.
    let shuffle = "mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra $meet; ld.global.u32 %r2, [%d1];\n\
        $meet: shfl.sync.idx.b32 %r3, %r2, 0, 31, -1; st.param.b32 [r], %r3;";
    assert_eq!(ends(shuffle, 4), [1; 4]);
}
