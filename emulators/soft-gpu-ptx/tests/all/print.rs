//! What kernels print, and source lines in their errors.

use crate::arena::{Arena, run_text};
use soft_gpu_ptx::{Module, Program, SourceLine, TrapKind};

const HEAD: &str = ".version 8.2\n.target sm_70\n.address_size 64\n";

/// Returns the text of a kernel that prints an int, a double and a string, passed as compilers do, with the format at
/// word 8. It stores the call's result in word 0.
fn printing(double: f64) -> String {
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
         mov.u64 %d3, {};
         st.local.u64 [%d1+8], %d3;
         add.u64 %d4, %d0, 256;
         st.local.u64 [%d1+16], %d4;
         add.u64 %d5, %d0, 64;
         {{ .param .b64 p0; st.param.b64 [p0], %d5; .param .b64 p1; st.param.b64 [p1], %d2; .param .b32 r;
         call.uni (r), vprintf, (p0, p1); ld.param.b32 %r2, [r]; }}
         st.global.u32 [%d0], %r2;
         ret; }}",
        double.to_bits()
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
    for (format, double, expected) in [
        ("i=%d f=%.2f s=[%6s] %%\n", 1.5, "i=-7 f=1.50 s=[   abc] %\n"),
        ("%5i|%-8.3e|%s", 1.5, "   -7|1.500e+00|abc"),
        ("%x|%f|%-5s|", 1.5, "fffffff9|1.500000|abc  |"),
        ("%#x %.2f", -2.345, "0xfffffff9 -2.35"),
        ("%d%8.1f", 3.125, "-7     3.1"),
        ("%d %-8.1f|", 3.125, "-7 3.1     |"),
        ("%06d %08.1f", -3.125, "-00007 -00003.1"),
        ("%+d %+e", 1500.0, "-7 +1.500000e+03"),
        ("%d %.3E", 0.0001, "-7 1.000E-04"),
        ("%d %g", 100_000.0, "-7 100000"),
        ("%d %g", 1e6, "-7 1e+06"),
        ("%d %g", 0.5, "-7 0.5"),
        ("%d %f", f64::INFINITY, "-7 inf"),
        ("%*.1f|", 1.5, "1.5    |"),
        ("no argument, and 100 %", 1.5, "no argument, and 100 %"),
    ] {
        let arena = Arena::new(64);
        put_text(&arena, 8, format);
        put_text(&arena, 32, "abc");
        run_text(&printing(double), &arena, 1).expect("an end");
        assert_eq!(arena.printed(), expected, "{format:?}");
        let arguments = format.matches(['%', '*']).count() - 2 * format.matches("%%").count();
        let printed = if format.starts_with("no argument") { 0 } else { arguments as u64 };
        assert_eq!(arena.get(0), printed, "{format:?}");
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
         .file 2 \"kernel.cu\"
         .section .debug_info {{ .b8 0 }}
         $L__sec_end0:
         .section .debug_aranges {{ .b64 $L__sec_end0 }}"
    );
    let trap = run_text(&text, &Arena::new(1), 1).expect_err("a fault");
    assert_eq!((trap.kind, trap.origin.as_ref()), (TrapKind::Address, Some(&("kernel.cu".to_owned(), 42))));
    assert!(trap.to_string().contains(", source kernel.cu:42"), "{trap}");
}

/// Compilers' comments name files relative to where they ran; two files may then have the same name.
#[test]
fn comments_about_inlining_name_files_in_full_where_only_one_can_be_meant() {
    let text = format!(
        "{HEAD}.visible .entry k() {{
         .loc 1 5 7 // src/post.rs:5:7 @[ src/put.rs:6:7 @[ src/lib.rs:7:7 ] ]
         ret; }}
         .file 1 \"/gin/src/post.rs\"
         .file 2 \"/gin/src/put.rs\"
         .file 3 \"/gin/src/lib.rs\"
         .file 4 \"/kernels/src/lib.rs\""
    );
    let program = Program::link(vec![Module::parse("k", &text).expect("a module")]).expect("a program");
    let lines = program.origins().next().expect("an instruction").lines;
    let expected = [("/gin/src/post.rs", 5), ("/gin/src/put.rs", 6), ("src/lib.rs", 7)];
    assert_eq!(lines, expected.map(|(file, line)| SourceLine { file: file.to_owned(), line }));
}
