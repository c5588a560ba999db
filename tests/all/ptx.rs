//! The device code as PTX and bitcode: the checked-in files match the sources, and the tool prints a module that can be
//! linked.

use ferrogin_ptx::{self as compile, CHECKED_IN, CHECKED_IN_BITCODE, Compiler, bitcode as llvm, inline, kernels};
use ferrogin_test_support::of_process;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn text_of(file: &str) -> String {
    std::fs::read_to_string(root().join(file)).unwrap()
}

fn checked_in() -> String {
    text_of(CHECKED_IN)
}

#[test]
fn checked_in_ptx_has_hash_of_its_sources() {
    compile::check_source_hash(root(), CHECKED_IN, &compile::SOURCES, &checked_in()).unwrap();
    for kernels in [kernels::PROGRAMS, kernels::GIN] {
        compile::check_source_hash(root(), kernels.path, &kernels.sources.concat(), &text_of(kernels.path)).unwrap();
    }
}

fn bitcode() -> Vec<u8> {
    std::fs::read(root().join(CHECKED_IN_BITCODE)).unwrap()
}

#[test]
fn checked_in_bitcode_was_made_with_ptx() {
    let (ptx, mut bitcode) = (checked_in(), bitcode());
    compile::check_bitcode(&ptx, &bitcode).unwrap();
    bitcode[1000] ^= 1;
    compile::check_bitcode(&ptx, &bitcode).unwrap_err();
}

/// Other compilers link the bitcode with their kernels, so it must have every function, and LLVM's magic number.
#[test]
fn bitcode_has_every_function_of_c_header() {
    let bitcode = bitcode();
    assert!(bitcode.starts_with(b"BC\xc0\xde"));
    let functions = functions_of("gin.h");
    assert!(functions.len() >= 12, "{functions:?}");
    for name in functions {
        // Symbol names are stored back to back, without separators.
        assert!(bitcode.windows(name.len()).any(|bytes| bytes == name.as_bytes()), "{name} is not in the bitcode");
    }
}

/// The names of the functions that a C ABI header declares.
fn functions_of(header: &str) -> Vec<String> {
    let text = std::fs::read_to_string(root().join("ffi-headers/include/ferrogin").join(header)).unwrap();
    text.lines().filter_map(|line| Some(line.strip_prefix("FGIN_API int ")?.split('(').next()?.to_owned())).collect()
}

/// The compiler that made the files must produce the same bytes now. Other compilers produce different ones.
#[test]
#[ignore = "make check"]
fn checked_in_ptx_is_what_its_compiler_makes() {
    let file = checked_in();
    let (_, made_by, ptx) = compile::provenance(&file).expect("the file says where it comes from");
    let cargo = std::env::var_os("CARGO").map_or("cargo".into(), PathBuf::from);
    let found = Compiler::all((std::env::var_os("RUSTC").map_or("rustc".into(), PathBuf::from), cargo));
    let reason = match found {
        Ok(compilers) => match compilers.iter().find(|compiler| compiler.version == made_by) {
            Some(compiler) => {
                let work = of_process(env!("CARGO_TARGET_TMPDIR"), "ptx");
                let now = compiler.compile(root(), &work, compile::PACKAGE).unwrap();
                let programs = kernels::programs(compiler, root(), &work).unwrap();
                let difference = now.ptx.lines().zip(ptx.lines()).find(|(now, then)| now != then);
                let refresh = compile::REFRESH;
                assert!(
                    now.ptx == ptx,
                    "{CHECKED_IN} is stale (first difference: {difference:?}); `{refresh}` makes it again"
                );
                if Command::new(llvm::ASSEMBLER).arg("--version").output().is_ok() {
                    let remade = llvm::assemble(&llvm::for_llvm_19(&now.ir)).unwrap();
                    assert!(remade == bitcode(), "{CHECKED_IN_BITCODE} is stale; `{refresh}` makes it again");
                } else {
                    let why = format!("no {} (apt-get install llvm-19)", llvm::ASSEMBLER);
                    ferrogin_test_support::skip(&format!("bytes of {CHECKED_IN_BITCODE}"), format_args!("{why}"));
                }
                let path = kernels::PROGRAMS.path;
                let file = text_of(path);
                let (_, by, then) = compile::provenance(&file).expect("the file says where it comes from");
                assert!(by == made_by && then == programs, "{path} is stale; `{refresh}` makes it again");
                return;
            }
            None => format!("{} is here", compilers[0].version),
        },
        Err(why) => why,
    };
    ferrogin_test_support::skip(
        &format!("bytes of {CHECKED_IN}"),
        format_args!("made by {made_by}, but {reason}; only the hash of its sources was compared"),
    );
}

/// What the LLVM of new Rust compilers writes and LLVM 19 can't read.
const NEWER: &str = "; ModuleID = 'here'
source_filename = \"here\"
define i32 @f(ptr dead_on_return noalias captures(none) %a, ptr captures(address, read_provenance) align 8 %b, i32 %c) {
  %x = alloca [4 x i8], align 4
  call void @llvm.lifetime.start.p0(ptr nonnull %x)
  %less = icmp samesign ult i32 %c, 7
  %n = call i32 @llvm.ctpop.i32(i32 %c)
  call void @llvm.lifetime.end.p0(ptr nonnull %x)
  ret i32 %n
}
declare void @llvm.lifetime.start.p0(ptr captures(none)) #0
declare void @llvm.lifetime.end.p0(ptr captures(none)) #0
declare i32 @llvm.ctpop.i32(i32) #1
attributes #0 = { nounwind }
attributes #1 = { nocallback nocreateundeforpoison nofree }
";

#[test]
fn bitcode_has_no_names_that_llvm_19_does_not_know() {
    let wanted = "define i32 @f(ptr noalias nocapture %a, ptr align 8 %b, i32 %c) {
  %x = alloca [4 x i8], align 4
  call void @llvm.lifetime.start.p0(i64 -1, ptr nonnull %x)
  %less = icmp ult i32 %c, 7
  %n = call i32 @llvm.ctpop.i32(i32 %c)
  call void @llvm.lifetime.end.p0(i64 -1, ptr nonnull %x)
  ret i32 %n
}
declare void @llvm.lifetime.start.p0(i64, ptr nocapture) #0
declare void @llvm.lifetime.end.p0(i64, ptr nocapture) #0
declare i32 @llvm.ctpop.i32(i32) #1
attributes #0 = { nounwind }
attributes #1 = { nocallback nofree }
";
    assert_eq!(llvm::for_llvm_19(NEWER), wanted);
}

#[test]
fn module_that_llvm_19_refuses_is_an_error_with_a_fix() {
    if Command::new(llvm::ASSEMBLER).arg("--version").output().is_err() {
        ferrogin_test_support::skip(
            "assembling bitcode",
            format_args!("no {} (apt-get install llvm-19)", llvm::ASSEMBLER),
        );
        return;
    }
    assert!(llvm::assemble(&llvm::for_llvm_19(NEWER)).unwrap().starts_with(b"BC\xc0\xde"));
    let why = llvm::assemble("declare void @f(ptr no_such_attribute)\n").unwrap_err();
    assert!(why.contains("refuses the module") && why.contains("bitcode.rs"), "{why}");
}

/// The same for the kernels that clang compiles.
#[test]
#[ignore = "make check"]
fn checked_in_calls_of_gin_cuh_are_what_clang_makes() {
    let (path, file) = (kernels::GIN.path, text_of(kernels::GIN.path));
    let (_, made_by, then) = compile::provenance(&file).expect("the file says where it comes from");
    let Some((clang, version)) = kernels::clang() else {
        ferrogin_test_support::skip(
            "gin.cuh by clang",
            "no clang is here (apt-get install clang-22); the hash of the sources was compared",
        );
        return;
    };
    let now = kernels::gin(clang, root()).unwrap();
    if version == made_by {
        assert!(now == then, "{path} is stale; `{}` makes it again", compile::REFRESH);
    } else {
        ferrogin_test_support::skip(
            &format!("bytes of {path}"),
            format_args!("made by {made_by}, but {version} is here, which compiles it"),
        );
    }
}

/// The hash depends on the files' names and contents, and changes with each new file. Line endings, editors' files and
/// test modules don't change it.
#[test]
fn source_hash_depends_only_on_sources() {
    let copy = of_process(env!("CARGO_TARGET_TMPDIR"), "sources");
    let write = |name: &str, text: &str| {
        let path = copy.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    for source in compile::SOURCES {
        write(&if source.ends_with("src") { format!("{source}/lib.rs") } else { source.into() }, "a\nb\n");
    }
    let hash = || compile::source_hash(&copy, &compile::SOURCES).unwrap();
    let before = hash();
    write("device-kernels/src/lib.rs", "a\r\nb\r\n");
    write("device-kernels/src/.lib.rs.swp", "a");
    write("device-kernels/src/post/tests.rs", "a");
    write("device-kernels/src/post/model/checks.rs", "a");
    assert_eq!(hash(), before);
    write("device-kernels/src/lib.rs", "a\nc\n");
    let changed = hash();
    write("device-kernels/src/post/more.rs", "");
    let grown = hash();
    std::fs::rename(copy.join("device-kernels/src/post/more.rs"), copy.join("device-kernels/src/more.rs")).unwrap();
    let moved = hash();
    assert!(before != changed && changed != grown && grown != moved && moved != changed);
}

#[test]
fn inline_functions_are_those_of_checked_in_ptx() {
    let wanted = inline::header(&checked_in()).unwrap();
    let found = std::fs::read_to_string(root().join(inline::HEADER)).unwrap();
    assert!(found == wanted, "{} is stale; `{}` makes it again", inline::HEADER, compile::REFRESH);
}

#[test]
fn ptx_has_calls_behind_fast_path() {
    for name in ["fgin_continue", "fgin_fallback"] {
        assert!(checked_in().contains(&format!(" {name}(\n")), "{name}");
    }
}

#[test]
fn tool_prints_every_function_of_c_header() {
    let output = Command::new(env!("CARGO_BIN_EXE_ferrogin")).arg("ptx").output().unwrap();
    assert!(output.status.success());
    let ptx = String::from_utf8(output.stdout).unwrap();
    let names = functions_of("gin.h");
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
