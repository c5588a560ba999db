//! Instructions a second: `cargo bench -p soft-gpu-ptx --bench interpreter [-- --check]`.
//!
//! One processor runs each kernel; the time is the processor's, not the clock's. With `--check` the program prints PASS or FAIL for each row, and fails below the budget.
#![allow(unsafe_code)]

use nix::time::{ClockId, clock_gettime};
use soft_gpu_ptx::{Launch, Memory, Module, Program, Range, run};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

/// Instructions a second that each row reaches.
const BUDGET: f64 = 20e6;

/// Kernels: blocks, threads of a block, weak memory, and the loop's body.
const ROWS: &[(&str, u32, u32, bool, &str)] = &[
    (
        "registers, 1 thread",
        1,
        1,
        false,
        "add.u64 %d1, %d1, %d2; xor.b64 %d2, %d1, %d3; shl.b32 %r2, %r1, 3; mad.lo.u32 %r3, %r2, 5, %r1; and.b64 %d4, %d1, 255;",
    ),
    (
        "registers, 128 threads",
        1,
        128,
        false,
        "add.u64 %d1, %d1, %d2; xor.b64 %d2, %d1, %d3; shl.b32 %r2, %r1, 3; mad.lo.u32 %r3, %r2, 5, %r1; and.b64 %d4, %d1, 255;",
    ),
    (
        "loads and stores, 128 threads",
        1,
        128,
        false,
        "ld.global.u64 %d1, [%own]; add.u64 %d1, %d1, 1; st.global.u64 [%own+8], %d1; st.global.v2.u64 [%own+16], {%d1, %d1};",
    ),
    (
        "atomics and fences, 128 threads",
        1,
        128,
        false,
        "atom.acq_rel.gpu.global.add.u64 %d1, [%out], 1; fence.acq_rel.sys; ld.relaxed.gpu.global.u64 %d2, [%out]; setp.eq.u64 %p2, %d1, %d2;",
    ),
    (
        "warp instructions, 128 threads",
        1,
        128,
        false,
        "shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; add.u32 %r2, %r2, 1; xor.b32 %r3, %r2, %r1; and.b32 %r3, %r3, 7; setp.eq.u32 %p2, %r3, 0;",
    ),
    (
        "registers, 132 blocks of 128 threads",
        132,
        128,
        false,
        "add.u64 %d1, %d1, %d2; xor.b64 %d2, %d1, %d3; shl.b32 %r2, %r1, 3; mad.lo.u32 %r3, %r2, 5, %r1; and.b64 %d4, %d1, 255;",
    ),
    (
        "loads and stores, weak memory, 128 threads",
        1,
        128,
        true,
        "ld.global.u64 %d1, [%own]; add.u64 %d1, %d1, 1; st.global.u64 [%own+8], %d1; st.global.v2.u64 [%own+16], {%d1, %d1};",
    ),
];

/// Words of memory.
struct Words(Vec<AtomicU64>, AtomicU64);

// SAFETY: the words live as long as this value, and are atomics, to which references may exist.
unsafe impl Memory for Words {
    fn generation(&self) -> &AtomicU64 {
        &self.1
    }

    fn range(&self, address: u64) -> Option<Range> {
        let start = self.0.as_ptr() as u64;
        let range = Range { start, end: start + 8 * self.0.len() as u64, writable: true };
        (range.start..range.end).contains(&address).then_some(range)
    }
}

/// The processor time of this thread.
fn now() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).expect("the clock of a thread")
}

fn main() -> ExitCode {
    let check = std::env::args().any(|argument| argument == "--check");
    let memory = Words((0..132 * 128 * 4 + 4).map(|_| AtomicU64::new(0)).collect(), AtomicU64::new(0));
    let mut failed = 0;
    for &(name, grid, block, weak, body) in ROWS {
        let rounds = 2_000_000 / (grid * block);
        let text = format!(
            ".version 8.2\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 out) {{\n\
             .reg .pred %p<4>; .reg .b32 %r<8>; .reg .b64 %d<8>; .reg .b64 %out; .reg .b64 %own;\n\
             ld.param.u64 %out, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r2, %r2, {block}, %r1;\n\
             mad.wide.u32 %own, %r2, 32, %out; add.u64 %own, %own, 16; mov.u32 %r7, 0;\n\
             $L: {body} add.u32 %r7, %r7, 1; setp.lt.u32 %p1, %r7, {rounds}; @%p1 bra $L;\nret; }}\n"
        );
        let program = Module::parse(name, &text).and_then(|module| Program::link(vec![module]));
        let program = Arc::new(program.unwrap_or_else(|error| panic!("{error}")));
        let loaded = program.clone().load(&[]);
        let kernel = program.kernel("k").expect("the kernel");
        let address = (memory.0.as_ptr() as u64).next_multiple_of(16);
        let mut launch = Launch::new([grid, 1, 1], [block, 1, 1], address.to_le_bytes().to_vec());
        launch.weak = weak;
        // Other programs share the caches: the best of three is the interpreter's.
        let mut best = 0f64;
        for _ in 0..3 {
            let begun = now();
            let statistics =
                run(&loaded, kernel, &launch, &memory, &AtomicBool::new(false)).unwrap_or_else(|trap| panic!("{trap}"));
            best = best.max(statistics.instructions as f64 / (now() - begun).as_secs_f64());
        }
        let verdict = match (check, best >= BUDGET) {
            (false, _) => "",
            (true, true) => "PASS ",
            (true, false) => {
                failed += 1;
                "FAIL "
            }
        };
        println!("{verdict}{name}: {:.1} M instructions/s", best / 1e6);
    }
    println!("interpreter: {} passed, {failed} failed, 0 skipped", ROWS.len() - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
