//! A kernel whose threads execute lists of steps.

use super::work::{END, LOAD, STEP, STORE};
use crate::native::{BEHIND, BEHIND_PARAMETERS, CONTINUATION, FUNCTIONS, Source, continuation};
use std::fmt::Write;

fn list(parameters: &[u32], of: impl Fn(usize, u32) -> String) -> String {
    parameters.iter().enumerate().map(|(at, &bits)| of(at, bits)).collect::<Vec<_>>().join(", ")
}

/// Returns the kernel's text.
pub fn text() -> String {
    let mut text = String::from(".version 8.2\n.target sm_70\n.address_size 64\n");
    let mut calls = String::new();
    let load = |at: usize, bits: u32, from: usize| {
        let register = if bits == 64 { "%d" } else { "%s" };
        format!(
            ".param .b{bits} a{at}; ld.global.b{bits} {register}, [%w+{}]; st.param.b{bits} [a{at}], {register};\n",
            from * 8 + 8
        )
    };
    for (kind, function) in FUNCTIONS.iter().enumerate() {
        let (name, parameters) = (function.name, function.parameters);
        let result = match function.result {
            CONTINUATION => ".param .align 8 .b8 r[48]",
            64 => ".param .b64 r",
            _ => ".param .b32 r",
        };
        let names = list(parameters, |at, _| format!("a{at}"));
        let _ = writeln!(
            text,
            ".extern .func ({result}) {name}({});",
            list(parameters, |at, bits| format!(".param .b{bits} a{at}"))
        );
        let _ = writeln!(calls, "setp.ne.u64 %p, %k, {kind}; @%p bra $not{kind};\n{{\n{result};");
        parameters.iter().enumerate().for_each(|(at, &bits)| calls += &load(at, bits, at));
        let _ = writeln!(calls, "call (r), {name}, ({names});");
        if function.result == CONTINUATION {
            // The call behind it does the rest.
            calls += "ld.param.b64 %a, [r]; st.global.b64 [%w+128], %a;\nsetp.eq.u64 %p, %a, 0; @%p bra $next;\n{\n.param .b32 c;\n";
            for (at, (&bits, source)) in BEHIND_PARAMETERS.iter().zip(continuation(name)).enumerate() {
                let register = if bits == 64 { "%d" } else { "%s" };
                let from = match source {
                    Source::Result(word) => format!("ld.param.b{bits} {register}, [r+{}]", word * 8),
                    Source::Zero => format!("mov.b{bits} {register}, 0"),
                    Source::Argument(at) => format!("ld.global.b{bits} {register}, [%w+{}]", at * 8 + 8),
                };
                let _ = writeln!(calls, ".param .b{bits} a{at}; {from}; st.param.b{bits} [a{at}], {register};");
            }
            let names = list(&BEHIND_PARAMETERS, |at, _| format!("a{at}"));
            let [finish, fallback] = BEHIND;
            let _ = writeln!(
                calls,
                "and.b64 %a, %a, 7; setp.gt.u64 %p, %a, 4; @%p bra $fallback{kind};\n\
                 call (c), {finish}, ({names}); bra $called{kind};\n\
                 $fallback{kind}: call (c), {fallback}, ({names});\n\
                 $called{kind}: ld.param.b32 %s, [c]; cvt.u64.u32 %d, %s; st.global.b64 [%w+128], %d;\n}}"
            );
        } else {
            let (bits, register) = if function.result == 64 { (64, "%d") } else { (32, "%s") };
            let _ = writeln!(calls, "ld.param.b{bits} {register}, [r]; st.global.b{bits} [%w+128], {register};");
        }
        let _ = writeln!(calls, "}}\nbra $next;\n$not{kind}:");
    }
    let _ = write!(
        text,
        ".visible .entry work(.param .u64 lists)\n{{\n.reg .pred %p; .reg .b64 %w; .reg .b64 %d; .reg .b64 %a; .reg .b64 %k; .reg .b32 %s; .reg .b32 %t; .reg .b32 %u;\n\
         mov.u32 %s, %tid.x; mov.u32 %t, %ctaid.x; mov.u32 %u, %ntid.x; mad.lo.u32 %s, %t, %u, %s; mul.wide.u32 %d, %s, 8;\n\
         ld.param.u64 %w, [lists]; add.u64 %w, %w, %d; ld.global.b64 %w, [%w];\n\
         $step: ld.global.b64 %k, [%w];\n\
         setp.eq.u64 %p, %k, {END}; @%p bra $end;\n\
         setp.ne.u64 %p, %k, {LOAD}; @%p bra $noload; ld.global.b64 %a, [%w+8]; ld.global.b64 %d, [%a]; st.global.b64 [%w+128], %d; bra $next;\n\
         $noload: setp.ne.u64 %p, %k, {STORE}; @%p bra $nostore; ld.global.b64 %a, [%w+8]; ld.global.b64 %d, [%w+16]; st.global.b64 [%a], %d; bra $next;\n\
         $nostore:\n{calls}\ntrap;\n$next: add.u64 %w, %w, {}; bra $step;\n$end: ret;\n}}\n",
        STEP * 8
    );
    text
}
