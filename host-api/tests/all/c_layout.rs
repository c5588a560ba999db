//! `ferrogin/host.h` has the same structs and numbers as the Rust definitions, and the library has every function that
//! the header declares.

use crate::common::{dist, include};
use ferrogin::capi::{CContextOptions, COptions};
use ferrogin::{Memory, Status};
use std::fmt::Write as _;
use std::io::Write as _;
use std::mem::offset_of;
use std::process::{Command, Stdio};

/// `_Static_assert`s for a struct and its fields of the same names.
macro_rules! layout {
    ($text:ident, $c:literal, $ty:ty, { $($field:ident),* }) => {
        writeln!($text, "_Static_assert(sizeof({}) == {}, \"size of {}\");", $c, size_of::<$ty>(), $c).unwrap();
        $(writeln!($text, "_Static_assert(offsetof({}, {}) == {}, \"{}\");", $c, stringify!($field), offset_of!($ty, $field),
            stringify!($field)).unwrap();)*
    };
}

#[test]
fn c_structs_and_numbers_are_those_of_rust() {
    let mut source = String::from("#include <ferrogin/host.h>\n");
    layout!(source, "ferrogin_options", COptions, { size, card, reserved });
    layout!(source, "ferrogin_context_options", CContextOptions, {
        size, contexts, signals, counters, depth, traffic_class, timeout_ms, on_peer_failure, reserved
    });
    for (name, value) in [
        ("FERROGIN_CUDA_ERROR", Status::Cuda as u32),
        ("FERROGIN_SYSTEM_ERROR", Status::System as u32),
        ("FERROGIN_INTERNAL_ERROR", Status::Internal as u32),
        ("FERROGIN_INVALID_ARGUMENT", Status::InvalidArgument as u32),
        ("FERROGIN_INVALID_USAGE", Status::InvalidUsage as u32),
        ("FERROGIN_REMOTE_ERROR", Status::Remote as u32),
        ("FERROGIN_MEMORY_HOST", Memory::Host as u32),
        ("FERROGIN_MEMORY_DEVICE", Memory::Device as u32),
    ] {
        writeln!(source, "_Static_assert({name} == {value}, \"{name}\");").unwrap();
    }
    let mut command = Command::new("cc");
    command.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c", "-I"]).arg(include()).arg("-");
    let child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let Ok(mut child) = child else {
        return ferrogin_test_support::skip("c_structs_and_numbers_are_those_of_rust", "there is no cc");
    };
    child.stdin.take().expect("a pipe").write_all(source.as_bytes()).expect("a compiler that reads");
    let output = child.wait_with_output().expect("the end of the compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn library_has_every_function_of_the_headers() {
    let test = "library_has_every_function_of_the_headers";
    let Some(dist) = dist(test) else { return };
    let library = std::fs::read(dist.join("libferrogin.so")).expect("the library");
    let mut functions = 0;
    for (header, prefix) in [("host.h", "ferrogin_"), ("gin.h", "fgin_")] {
        let text = std::fs::read_to_string(include().join("ferrogin").join(header)).expect("a header");
        // A declaration starts in the first column, and its name ends before the parameters.
        let declarations =
            text.lines().filter(|line| !line.starts_with([' ', '#', '/', '}']) && !line.starts_with("typedef"));
        for line in declarations {
            let Some((before, _)) = line.split_once('(') else { continue };
            let name = before.rsplit([' ', '*']).next().expect("a name");
            assert!(name.starts_with(prefix), "{line}");
            // Exported function names are NUL-terminated strings in the library.
            let symbol = [b"\0", name.as_bytes(), b"\0"].concat();
            assert!(library.windows(symbol.len()).any(|bytes| bytes == symbol), "libferrogin.so has no {name}");
            functions += 1;
        }
    }
    assert!(functions > 30, "{functions} functions are read from the headers");
}
