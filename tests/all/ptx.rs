//! The device code as PTX: the checked-in file is made from the sources, and the tool prints a module that can be linked.

#[path = "../../ptx/compile.rs"]
#[allow(dead_code)]
mod compile;
#[path = "../../ptx/inline.rs"]
mod inline;

use compile::Compiler;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn checked_in() -> PathBuf {
    root().join("ptx/ferrogin_device.ptx")
}

/// Functions that the C++ headers have inline begin with this prefix.
const INLINE_PREFIX: &str = "fgin_fast_";

fn inline_header() -> PathBuf {
    root().join("ffi-headers/include/ferrogin/fast_path.cuh")
}

fn refreshing() -> bool {
    std::env::var_os("FERROGIN_REFRESH").is_some()
}

fn compiler() -> Result<Compiler, String> {
    let cargo = std::env::var_os("CARGO").map_or("cargo".into(), PathBuf::from);
    Compiler::find((std::env::var_os("RUSTC").map_or("rustc".into(), PathBuf::from), cargo))
}

/// With the compiler that made the file, the file has to equal what that compiler makes now. With another compiler, or none, the
/// sources have to be those that the file was made from; if they are not, the test cannot tell whether that matters.
#[test]
fn checked_in_ptx_matches_sources() {
    let sources = compile::source_hash(root()).unwrap();
    let compiler = compiler();
    // The build directory of build.rs, which has `core` already.
    let compiled = |compiler: &Compiler| compiler.compile(root(), &Path::new(env!("OUT_DIR")).join("nvptx64"));
    if refreshing() {
        let compiler = compiler.as_ref().expect("refreshing needs a compiler");
        let ptx = compiled(compiler).unwrap();
        std::fs::write(checked_in(), compile::with_provenance(&ptx, sources, &compiler.version)).unwrap();
        std::fs::write(inline_header(), inline::header(&ptx, INLINE_PREFIX).unwrap()).unwrap();
        return;
    }
    let file = std::fs::read_to_string(checked_in()).unwrap();
    let (source, made_by, ptx) = compile::provenance(&file).expect("the file says where it comes from");
    match compiler {
        Ok(compiler) if compiler.version == made_by => {
            let now = compiled(&compiler).unwrap();
            let difference = now.lines().zip(ptx.lines()).find(|(now, then)| now != then);
            assert!(
                now == ptx,
                "ptx/ferrogin_device.ptx is stale (first difference: {difference:?}): \
                 FERROGIN_REFRESH=1 cargo test -p ferrogin --test all ptx"
            );
        }
        _ if source == sources => {}
        Ok(other) => println!("SKIP stale PTX: made by {made_by}, and {} is here", other.version),
        Err(why) => println!("SKIP stale PTX: the sources have changed, and {why}"),
    }
}

#[test]
fn inline_functions_match_checked_in_ptx() {
    if refreshing() {
        return;
    }
    let wanted = inline::header(&std::fs::read_to_string(checked_in()).unwrap(), INLINE_PREFIX).unwrap();
    let found = std::fs::read_to_string(inline_header()).unwrap();
    assert!(
        found == wanted,
        "ferrogin/fast_path.cuh is stale: FERROGIN_REFRESH=1 cargo test -p ferrogin --test all ptx"
    );
}

/// The PTX has the functions that post.cuh declares beyond gin.h.
#[test]
fn ptx_has_every_continuation_function() {
    if refreshing() {
        return;
    }
    let header = std::fs::read_to_string(root().join("ffi-headers/include/ferrogin/post.cuh")).unwrap();
    let ptx = std::fs::read_to_string(checked_in()).unwrap();
    let names: Vec<&str> =
        header.lines().filter_map(|line| line.strip_prefix("FGIN_API int ")?.split('(').next()).collect();
    assert_eq!(names.len(), 3, "{names:?}");
    for name in names {
        assert!(ptx.contains(&format!(" {name}(\n")), "{name} is not in the PTX");
    }
}

#[test]
fn tool_prints_every_function_of_c_header() {
    let output = Command::new(env!("CARGO_BIN_EXE_ferrogin")).arg("ptx").output().unwrap();
    assert!(output.status.success());
    let ptx = String::from_utf8(output.stdout).unwrap();
    let header = std::fs::read_to_string(root().join("ffi-headers/include/ferrogin/gin.h")).unwrap();
    let names: Vec<&str> =
        header.lines().filter_map(|line| line.strip_prefix("FGIN_API int ")?.split('(').next()).collect();
    assert!(names.len() >= 12, "{names:?}");
    for name in names {
        let defined = format!(".visible .func  (.param .b32 func_retval0) {name}(");
        assert!(ptx.contains(&defined), "{name} is not in the PTX");
    }
    assert!(!ptx.contains(".extern"), "something is undefined");
    assert!(ptx.contains(&format!(".target {}\n", compile::GPU)));
    assert!(compile::provenance(&ptx).is_some());
}

#[test]
fn tool_names_source_and_compiler_of_its_ptx() {
    let output = Command::new(env!("CARGO_BIN_EXE_ferrogin")).args(["ptx", "--about"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("compiler: rustc ") && text.contains("source: "), "{text}");
    assert!(text.contains("compiled with the tool") || text.contains("checked in, for "), "{text}");
}
