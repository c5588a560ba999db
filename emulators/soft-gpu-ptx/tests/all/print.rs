//! What kernels print, and the source lines in their errors.

use crate::arena::{Arena, run_text};
use soft_gpu_ptx::TrapKind;

const HEAD: &str = ".version 8.2\n.target sm_70\n.address_size 64\n";

/// The text of a kernel that prints by the format at word 8: an int, a double and a string, as compilers pass them. It stores the result of
/// the call in word 0.
fn printing() -> String {
    format!(
        "{HEAD}.extern .func (.param .b32 result) vprintf(.param .b64 format, .param .b64 arguments);
         .visible .entry k(.param .u64 k_out) {{
         .reg .b32 %r<4>; .reg .b64 %d<8>;
         .local .align 8 .b8 stack[32];
         ld.param.u64 %d0, [k_out];
         mov.u64 %d1, stack;
         cvta.local.u64 %d2, %d1;
         mov.u32 %r1, 4294967289;
         st.local.u32 [%d1], %r1;
         mov.u64 %d3, 4609434218613702656;
         st.local.u64 [%d1+8], %d3;
         add.u64 %d4, %d0, 256;
         st.local.u64 [%d1+16], %d4;
         add.u64 %d5, %d0, 64;
         {{ .param .b64 p0; st.param.b64 [p0], %d5; .param .b64 p1; st.param.b64 [p1], %d2; .param .b32 r;
         call.uni (r), vprintf, (p0, p1); ld.param.b32 %r2, [r]; }}
         st.global.u32 [%d0], %r2;
         ret; }}"
    )
}

fn put_text(arena: &Arena, word: usize, text: &str) {
    for (i, bytes) in text.as_bytes().chunks(8).enumerate() {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        arena.set(word + i, u64::from_le_bytes(whole));
    }
}

#[test]
fn kernel_prints_its_arguments() {
    for (format, expected) in [
        ("i=%d f=%.2f s=[%6s] %%\n", "i=-7 f=1.50 s=[   abc] %\n"),
        ("%5i|%-8.3e|%s", "   -7|1.500e+00|abc"),
        ("no argument, and 100 %", "no argument, and 100 %"),
    ] {
        let arena = Arena::new(64);
        put_text(&arena, 8, format);
        put_text(&arena, 32, "abc");
        run_text(&printing(), &arena, 1).expect("an end");
        assert_eq!(arena.printed(), expected);
        assert_eq!(arena.get(0), if format.starts_with("no") { 0 } else { 3 });
    }
}

#[test]
fn fault_names_the_line_of_the_source() {
    let text = format!(
        "{HEAD}.visible .entry k(.param .u64 k_out) {{
         .reg .b64 %d<4>;
         .loc 2 41 7
         mov.u64 %d1, 16;
         .loc 2 42 7, function_name $L_name, inlined_at 1 9 3
         ld.global.u64 %d2, [%d1];
         ret; }}
         .file 1 \"other.cuh\"
         .file 2 \"kernel.cu\""
    );
    let trap = run_text(&text, &Arena::new(1), 1).expect_err("a fault");
    assert_eq!((trap.kind, trap.origin.as_ref()), (TrapKind::Address, Some(&("kernel.cu".to_owned(), 42))));
    assert!(trap.to_string().contains(", source kernel.cu:42"), "{trap}");
}
