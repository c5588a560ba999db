//! Bad texts, links and launches, and kernels that go wrong: each is an error with its line and cause.

use crate::arena::{Arena, kernel, launch, linked, run_text, start};
use ferrogin_test_support::wait::wait_until;
use soft_gpu_ptx::{Kind, Module, Program, Time, TrapKind, run};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const HEAD: &str = ".version 8.2\n.target sm_70\n.address_size 64\n";

/// Texts, whole or (if they start with a newline) after the usual header, and their errors: the kind, the line and part
/// of the cause.
const TEXTS: &[(&str, Kind, u32, &str)] = &[
    ("", Kind::Syntax, 1, "begins with .version"),
    ("hello", Kind::Syntax, 1, "begins with .version"),
    ("\u{1F600}", Kind::Syntax, 1, "not a character of PTX"),
    (".version", Kind::Syntax, 1, "an integer"),
    (".version 8", Kind::Syntax, 1, "within a statement"),
    (".version 5.0\n.target sm_70", Kind::Version, 1, "PTX 6.0 to 9.x"),
    (".version 99.1\n.target sm_70", Kind::Version, 1, "PTX 6.0 to 9.x"),
    (".version 8.2\n.target gfx90a", Kind::Target, 2, "sm_30 to sm_129"),
    (".version 8.2\n.target sm_70\n.address_size 32", Kind::Target, 3, "64 bits"),
    (".version 8.2\n.target sm_70\n.func f() {}", Kind::Syntax, 3, "begins with .version"),
    ("\n.visible", Kind::Syntax, 5, "a directive"),
    ("\n.tex .u64 t;", Kind::Form, 5, "does not support this directive"),
    ("\n.global .b8 x", Kind::Syntax, 5, "`;`"),
    ("\n.global .b8 x[2] = {1,2,3};", Kind::Syntax, 5, "larger than the variable"),
    ("\n.global .align 3 .b8 x;", Kind::Syntax, 5, "power of two"),
    ("\n.global .b8 x; .global .b8 x;", Kind::Duplicate, 5, "also defines the variable"),
    ("\n.global .u64 x = y;", Kind::Symbol, 5, "no declaration"),
    ("\n.global .b8 x[99999999999];", Kind::Limit, 5, "at most"),
    ("\n.global .u32 x = 12junk;", Kind::Syntax, 5, "not a number"),
    ("\n/* no end", Kind::Syntax, 5, "not closed"),
    ("\n.file 1 \"no end", Kind::Syntax, 5, "does not end on its line"),
    ("\n.func f {", Kind::Syntax, 5, "within a statement"),
    ("\n.func f { ret; } .func f { ret; }", Kind::Duplicate, 5, "also defines the function"),
    ("\n.func f; .func f(.param .b64 x) { ret; }", Kind::Signature, 5, "parameters differ"),
    ("\n.func f {\n ret }", Kind::Syntax, 6, "an operand"),
    ("\n.func f {\n frobnicate.u32 %r1, %r2; }", Kind::Form, 6, "does not support this form"),
    ("\n.func f {\n add.u128 %r1, %r1, %r1; }", Kind::Form, 6, "does not support this form"),
    ("\n.func f {\n ld.global.v8.b32 %r1, [%r2]; }", Kind::Form, 6, "does not support this form"),
    ("\n.func f {\n st.acquire.sys.u32 [%r1], 1; }", Kind::Form, 6, "does not support this form"),
    (
        "\n.func f {\n .reg .b32 %r<4>; .reg .pred %p; setp.lo.s32 %p, %r1, 0; }",
        Kind::Form,
        6,
        "does not support this form",
    ),
    (
        "\n.func f {\n .reg .f32 %f; .reg .pred %p; setp.hs.f32 %p, %f, %f; }",
        Kind::Form,
        6,
        "does not support this form",
    ),
    ("\n.func f {\n .reg .b32 %r<4>; popc.u32 %r1, %r2; }", Kind::Form, 6, "does not support this form"),
    ("\n.func f {\n .reg .b32 %r<4>; add.b32 %r1, %r2, %r2; }", Kind::Form, 6, "does not support this form"),
    ("\n.func f {\n .reg .b32 %r<4>; set.lt.b32.s32 %r1, %r2, %r2; }", Kind::Form, 6, "does not support this form"),
    ("\n.func f {\n .reg .b32 %r<4>; redux.sync.add.b32 %r1, %r2, -1; }", Kind::Form, 6, "does not support this form"),
    ("\n.func f {\n .reg .b32 %r<4>; mov.u32 %r1, 8/(2-2); }", Kind::Syntax, 6, "divides by zero"),
    ("\n.func f {\n .reg .b32 %r<4>; mov.u32 %r1, (1+2; }", Kind::Syntax, 6, "`)` is expected"),
    ("\n.func f {\n fence.proxy.tensormap; }", Kind::Form, 6, "does not support this form"),
    ("\n.func f {\n .reg .b32 %r<4>; add.u32 %r1, %r2, %r9; }", Kind::Symbol, 6, "no register"),
    ("\n.func f {\n .reg .b32 %r<4>; .reg .b64 %d<4>;\n add.u32 %r1, %r2, %d1; }", Kind::Operand, 7, "64 bits"),
    ("\n.func f {\n .reg .b32 %r<4>; add.u32 %r1, %r2; }", Kind::Operand, 6, "3 operands"),
    ("\n.func f {\n .reg .b32 %r<4>; mov.u32 5, %r2; }", Kind::Operand, 6, "needs a register"),
    ("\n.func f {\n .reg .b32 %r<4>; ld.global.u32 %r2, [%r1]; }", Kind::Operand, 6, "an address has 64"),
    ("\n.func f {\n .reg .b32 %r<4>; mov.u32 %r1, %tid.w; }", Kind::Symbol, 6, "no special register"),
    ("\n.func f {\n .reg .b32 %r<4>; @%r1 ret; }", Kind::Operand, 6, "predicate"),
    ("\n.func f {\n\n bra $nowhere; }", Kind::Symbol, 7, "no such label"),
    ("\n.func f {\n $a: $a: ret; }", Kind::Duplicate, 6, "twice"),
    ("\n.func f {\n { $a: ret; }\n bra $a; }", Kind::Symbol, 7, "no such label"),
    ("\n.func f {\n call g; }", Kind::Symbol, 6, "no function"),
    ("\n.func f {\n .reg .b64 %d; call %d, (), p; }", Kind::Operand, 6, "no .callprototype"),
    ("\n.func f {\n .reg .b64 %d; call %d; }", Kind::Operand, 6, "takes a .callprototype"),
    ("\n.func f {\n p: .calltargets f; }", Kind::Form, 6, "takes a .callprototype"),
    (
        "\n.func f {\n .reg .b64 %d; p: .callprototype _ (.param .b64 _); call %d, p; }",
        Kind::Operand,
        6,
        "1 arguments, not 0",
    ),
    ("\n.func f {\n .reg .b32 %r; p: .callprototype ()_ (); call %r, p; }", Kind::Operand, 6, "32 bits"),
    ("\n.func g; .func f {\n .reg .b32 %r; mov.u32 %r, g; }", Kind::Operand, 6, "has 64 bits"),
    ("\n.func g; .func f {\n .reg .b64 %d; ld.global.b64 %d, [g]; }", Kind::Operand, 6, "not memory"),
    ("\n.entry k { ret; } .func f {\n .reg .b64 %d; mov.u64 %d, k; }", Kind::Operand, 6, "aren't kernels"),
    ("\n.entry k { ret; } .const .u64 t[1] = {k};", Kind::Form, 5, "addresses of global variables and of functions"),
    ("\n.func f {\n .reg .b128 %q; mov.b64 %q, 5; }", Kind::Operand, 6, "128 bits"),
    ("\n.func f {\n .reg .b128 %q; .reg .b64 %d; st.b64 [%d], %q; }", Kind::Operand, 6, "128 bits"),
    ("\n.func f {\n .reg .b64 %d; ld.b128 %d, [%d]; }", Kind::Operand, 6, "no register of 128 bits"),
    ("\n.func f {\n .reg .b128 %q; .reg .b64 %d; ld.v2.b128 {%q, %q}, [%d]; }", Kind::Form, 6, "does not support"),
    ("\n.func g(.param .b64 x); .func f {\n call g; }", Kind::Operand, 6, "1 arguments, not 0"),
    ("\n.func g(.param .b64 x); .func f {\n .param .b32 y; call g, (y); }", Kind::Operand, 6, "8 bytes, not 4"),
    ("\n.entry k { ret; } .func f {\n call k; }", Kind::Operand, 6, "a kernel"),
    ("\n.func f {\n .reg .b32 %r<70000>; }", Kind::Limit, 6, "at most"),
    ("\n.func f {\n .local .b8 x[600000]; }", Kind::Limit, 6, "at most"),
    ("\n.func f(.param .b8 x[70000]) { }", Kind::Limit, 5, "at most"),
    ("\n.entry k .maxntid 2000, 1, 1 { }", Kind::Limit, 5, "at most 1024"),
];

#[test]
fn a_bad_text_is_an_error_with_its_line_and_its_cause() {
    for &(text, kind, line, cause) in TEXTS {
        let whole = if text.starts_with('\n') { format!("{HEAD}{text}") } else { text.to_owned() };
        let error = match Module::parse("bad.ptx", &whole) {
            Ok(module) => panic!("{text:?} is no error: {module:?}"),
            Err(error) => error,
        };
        assert_eq!((error.kind, error.line), (kind, line), "{text:?}: {error}");
        let message = error.to_string();
        assert!(message.contains(cause) && message.starts_with("bad.ptx:"), "{text:?}: {message}");
    }
}

/// Modules, and the error that linking them gives.
const LINKS: &[(&[&str], Kind, &str)] = &[
    (&[".extern .func f; .entry k { call f; }"], Kind::Symbol, "no module defines the function"),
    (
        &[".extern .global .u64 x; .entry k { .reg .u64 d; mov.u64 d, x; }"],
        Kind::Symbol,
        "no module defines the variable",
    ),
    (&[".visible .func f { ret; }", ".visible .func f { ret; }"], Kind::Duplicate, "0:5 also defines the name"),
    (&[".visible .entry k { ret; }", ".visible .entry k { ret; }"], Kind::Duplicate, "also defines the name"),
    (&[".visible .global .u64 x;", ".visible .global .u64 x;"], Kind::Duplicate, "also defines the name"),
    (
        &[".visible .func f(.param .b64 x) { ret; }", ".extern .func f; .entry k { call f; }"],
        Kind::Signature,
        "parameters differ",
    ),
    (
        &[".visible .const .u64 x;", ".extern .global .u64 x; .entry k { .reg .u64 d; mov.u64 d, x; }"],
        Kind::Signature,
        "another state space",
    ),
    (&[".func f; .entry k { call f; }"], Kind::Symbol, "no body"),
];

fn modules(texts: &[&str]) -> Vec<Module> {
    let parse = |(index, text): (usize, &&str)| {
        Module::parse(&index.to_string(), &format!("{HEAD}\n{text}")).unwrap_or_else(|error| panic!("{error}"))
    };
    texts.iter().enumerate().map(parse).collect()
}

#[test]
fn a_bad_link_is_an_error_with_the_name_and_its_cause() {
    for &(texts, kind, cause) in LINKS {
        let error = match Program::link(modules(texts)) {
            Ok(program) => panic!("{texts:?} link: {program:?}"),
            Err(error) => error,
        };
        assert_eq!((error.kind, error.line), (kind, 5), "{texts:?}: {error}");
        assert!(error.to_string().contains(cause), "{texts:?}: {error}");
    }
}

#[test]
fn a_strong_definition_replaces_weak_ones_and_local_names_do_not_meet() {
    let function = |linkage: &str, name: &str, value: u32| {
        format!("{linkage} .func (.param .b64 r) {name} {{ st.param.b64 [r], {value}; ret; }}")
    };
    let call = |name: &str, at: u32| {
        format!("{{ .param .b64 r; call (r), {name}; ld.param.b64 %d2, [r]; st.global.b64 [%d1+{at}], %d2; }}")
    };
    let main = format!(
        ".extern .func (.param .b64 r) f; .extern .global .u64 table[2];\n{}\n\
         .visible .entry k(.param .u64 out) {{ .reg .b64 %d<4>; ld.param.u64 %d1, [out]; {} {}\n\
         ld.global.u64 %d2, [table+8]; sub.u64 %d2, %d2, table; st.global.u64 [%d1+16], %d2; }}",
        function("", "own", 7),
        call("f", 0),
        call("own", 8)
    );
    let weak = format!("{}\n{}", function(".weak", "f", 1), function("", "own", 2));
    let strong = format!(
        "{}\n.global .u64 base = 5;\n.visible .global .u64 table[2] = {{ 5, generic(base)+24 }};",
        function(".visible", "f", 3)
    );
    for texts in [[&main, &weak, &strong], [&strong, &main, &weak], [&weak, &strong, &main]] {
        let texts: Vec<&str> = texts.iter().map(|text| text.as_str()).collect();
        let texts = modules(&texts);
        let program = Arc::new(Program::link(texts).unwrap_or_else(|error| panic!("{error}")));
        let arena = Arena::new(16);
        let addresses = [arena.address() + 48, arena.address() + 64];
        for (word, bytes) in program.initial(1, &addresses).chunks(8).enumerate() {
            arena.set(8 + word, u64::from_le_bytes(bytes.try_into().unwrap()));
        }
        let loaded = program.clone().load(&addresses);
        run(&loaded, program.kernel("k").unwrap(), &launch(&arena, 1, 1, 0), &arena, &AtomicBool::new(false))
            .unwrap_or_else(|trap| panic!("{trap}"));
        assert_eq!([arena.get(0), arena.get(1), arena.get(2)], [3, 7, 8]);
        assert_eq!(loaded.global("table"), Some((addresses[1], 16)));
    }
}

/// Kernels that go wrong: the number of threads, the body, and the trap. The body's first line is line 9.
const TRAPS: &[(u32, &str, TrapKind, u32, &str)] = &[
    (1, "\ntrap;", TrapKind::Trap, 10, "`trap`"),
    (1, "brkpt;", TrapKind::Trap, 9, "`brkpt`"),
    (1, "mov.u64 %d1, 64; ld.global.u64 %d2, [%d1];", TrapKind::Address, 9, "8 bytes at 0x40"),
    (1, "ld.global.u64 %d2, [%out+-8];", TrapKind::Address, 9, "load of 8 bytes"),
    (1, "st.global.u64 [%out+512], 1;", TrapKind::Address, 9, "store of 8 bytes"),
    (1, "atom.global.add.u64 %d1, [%out+512], 1;", TrapKind::Address, 9, "atomic of 8 bytes"),
    (1, "ld.global.u64 %d2, [%out+4];", TrapKind::Misaligned, 9, "not a multiple of 8"),
    (
        1,
        "st.global.v2.u64 [%out+8], {%d1, %d1}; st.global.v2.u64 [%out+16], {%d1, %d1};",
        TrapKind::Misaligned,
        9,
        "not a multiple of 16",
    ),
    (1, "ld.shared.u32 %r1, [room+64];", TrapKind::Address, 9, "outside its 64 bytes"),
    (1, "ld.local.u32 %r1, [spot+16];", TrapKind::Address, 9, "outside its 16 bytes"),
    (
        1,
        "mov.u64 %d1, spot; cvta.local.u64 %d1, %d1; atom.add.u32 %r1, [%d1], 1;",
        TrapKind::AddressSpace,
        9,
        "local memory",
    ),
    (
        2,
        "mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; @%p1 exit;\n bar.warp.sync 3;",
        TrapKind::Convergence,
        0,
        "exited|exits",
    ),
    (2, "bar.warp.sync 0;", TrapKind::Convergence, 9, "not in its own mask"),
    (
        32,
        "mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0;\n@%p1 exit;\n bar.sync 0;",
        TrapKind::Convergence,
        0,
        "waits for 32 threads, and 31 have arrived",
    ),
    (32, "bar.sync 16;", TrapKind::Convergence, 9, "barriers 0 to 15"),
    (64, "bar.sync 0, 33;", TrapKind::Convergence, 9, "multiple of 32"),
    (64, "bar.sync 0, 96;", TrapKind::Convergence, 9, "the block has 64"),
    (
        64,
        "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bar.sync 0, 32; @%p1 ret; bar.sync 0, 64;",
        TrapKind::Convergence,
        0,
        "waits|wait",
    ),
    (
        2,
        "mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; @%p1 shfl.sync.idx.b32 %r2, %r1, 0, 31, 3; @!%p1 vote.sync.any.pred %p2, %p1, 3;",
        TrapKind::Convergence,
        9,
        "another instruction",
    ),
    (
        2,
        "mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; @%p1 bar.warp.sync 3; @!%p1 bar.warp.sync 2; @!%p1 bar.warp.sync 2; @!%p1 bar.sync 0;",
        TrapKind::Convergence,
        9,
        "no thread of the block",
    ),
];

#[test]
fn a_kernel_that_goes_wrong_is_a_trap_with_thread_line_and_cause() {
    for &(threads, body, kind, line, causes) in TRAPS {
        let text = kernel(".local .align 8 .b8 spot[16]; .shared .align 8 .b8 room[64];", body);
        let trap = run_text(&text, &Arena::new(64), threads).expect_err(body);
        assert_eq!(trap.kind, kind, "{body}: {trap}");
        assert!(line == 0 || trap.line == line, "{body}: {trap}");
        let message = trap.to_string();
        assert!(causes.split('|').any(|cause| message.contains(cause)), "{body}: {message}");
        assert!(message.starts_with("kernel k, block (0, 0, 0), thread (") && message.contains(" in k: "), "{message}");
    }
}

#[test]
fn a_recursion_without_end_is_a_trap() {
    let text = ".version 7.0\n.target sm_80\n.address_size 64\n.func f {\n call f; ret; }\n.visible .entry k(.param .u64 out) { call f; ret; }";
    let trap = run_text(text, &Arena::new(1), 1).expect_err("no end");
    assert_eq!((trap.kind, trap.line, trap.function.as_str()), (TrapKind::Recursion, 5, "f"), "{trap}");
    let text = text.replace("{\n call", "{ .local .b8 big[100000];\n call");
    let trap = run_text(&text, &Arena::new(1), 1).expect_err("no end");
    assert_eq!(trap.kind, TrapKind::Resources, "{trap}");
}

#[test]
fn a_kernel_without_end_stops_at_the_watchdog_or_the_callers_stop() {
    for body in [
        "$L: bra $L;",
        "$L: ld.global.u64 %d1, [%out]; bra $L;",
        "$L: nanosleep.u32 100; bra $L;",
        "$L: add.u64 %d1, %d1, 1; st.global.u64 [%out], %d1; bra $L;",
    ] {
        let body = format!("st.global.u64 [%out+8], 1; {body}");
        let (arena, program) = (Arena::new(2), linked(&kernel("", &body)));
        let mut launch = launch(&arena, 1, 40, 3);
        (launch.time, launch.watchdog) = (Time::Instructions, Some(Duration::from_micros(30)));
        let trap = start(&program, &launch, &arena).expect_err("no end");
        assert_eq!((trap.kind, trap.line), (TrapKind::Watchdog, 9), "{trap}");

        (launch.time, launch.watchdog) = (Time::System, None);
        arena.set(1, 0);
        let stop = AtomicBool::new(false);
        let loaded = program.clone().load(&[]);
        let trap = std::thread::scope(|scope| {
            scope.spawn(|| {
                wait_until("start of the kernel", || arena.get(1) != 0);
                stop.store(true, Ordering::Relaxed);
            });
            run(&loaded, program.kernel("k").unwrap(), &launch, &arena, &stop).expect_err("no end")
        });
        assert_eq!(trap.kind, TrapKind::Stopped, "{trap}");
    }
}

#[test]
fn an_impossible_launch_is_an_error() {
    let program = linked(&kernel(".shared .align 8 .b8 room[64];", "st.shared.u32 [room], 1;"));
    let arena = Arena::new(1);
    for (grid, block, shared, bytes, kind, cause) in [
        ([0, 1, 1], [1, 1, 1], 0, 8, TrapKind::Launch, "a grid of 0"),
        ([1, 70000, 1], [1, 1, 1], 0, 8, TrapKind::Launch, "a grid of 1 x 70000"),
        ([1, 1, 1], [1025, 1, 1], 0, 8, TrapKind::Launch, "a block of 1025"),
        ([1, 1, 1], [1, 1, 65], 0, 8, TrapKind::Launch, "at most 64 in z"),
        ([1, 1, 1], [0, 1, 1], 0, 8, TrapKind::Launch, "a block of 0"),
        ([1, 1, 1], [1, 1, 1], 300 << 10, 8, TrapKind::Resources, "shared memory"),
        ([1, 1, 1], [1, 1, 1], 0, 7, TrapKind::Launch, "7 bytes of parameters"),
    ] {
        let mut launch = launch(&arena, 1, 1, 0);
        (launch.grid, launch.block, launch.shared) = (grid, block, shared);
        launch.parameters.resize(bytes, 0);
        let trap = start(&program, &launch, &arena).expect_err("an impossible launch");
        assert!(trap.kind == kind && trap.to_string().contains(cause), "{trap}");
    }
}
