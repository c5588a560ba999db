//! Makes the PTX of the device code that the tool embeds: compiled from the sources if there is a suitable compiler,
//! and otherwise the checked-in `device-kernels/ptx/ferrogin_device.ptx`, with a line in the build output that says so.
//! `FERROGIN_PTX=checked-in` always takes the checked-in file. The build warns if that file was made from other
//! sources.
//!
//! If NVCC (the path of nvcc) or CUDA_HOME (its directory) is set, also makes the objects that nvcc links with kernels,
//! one per architecture, in `cuda/` of the build directory; `make build` copies them to dist/cuda/. No build looks for
//! nvcc anywhere else.

use ferrogin_ptx::{self as compile, CHECKED_IN, Compiler};
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The script that assembles the objects.
const OBJECTS: &str = "tests/cuda/objects.sh";

fn main() {
    for variable in ["FERROGIN_PTX", "NVCC", "CUDA_HOME"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    for source in [CHECKED_IN, OBJECTS].into_iter().chain(compile::SOURCES) {
        println!("cargo::rerun-if-changed={source}");
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let checked_in = std::fs::read_to_string(root.join(CHECKED_IN)).expect("the checked-in PTX is readable");
    if let Err(stale) = compile::check_source_hash(&root, CHECKED_IN, &compile::SOURCES, &checked_in) {
        println!("cargo::warning={stale}");
    }
    let compiled = match env::var("FERROGIN_PTX").as_deref() {
        Ok("checked-in") => Err("FERROGIN_PTX says so".to_string()),
        _ => compiled(&root, &out).inspect_err(|why| println!("cargo::warning=the checked-in PTX is embedded: {why}")),
    };
    let (text, origin) = match compiled {
        Ok(text) => (text, "compiled with the tool".to_string()),
        Err(why) => (checked_in, format!("checked in, for {why}")),
    };
    let ptx = out.join("ferrogin_device.ptx");
    std::fs::write(&ptx, text).expect("OUT_DIR is writable");
    println!("cargo::rustc-env=FERROGIN_PTX_ORIGIN={}", origin.replace('\n', " "));
    if let Err(why) = objects(&root, &ptx, &out) {
        println!("cargo::warning=no objects of the device code: {why}");
    }
}

fn compiled(root: &Path, out: &Path) -> Result<String, String> {
    let tool = |name: &str| PathBuf::from(env::var_os(name).unwrap_or_default());
    watch(&tool("RUSTC"));
    let compiler = &Compiler::all((tool("RUSTC"), tool("CARGO")))?[0];
    let module = compiler.compile(root, &out.join("nvptx64"), compile::PACKAGE)?;
    Ok(compile::with_provenance(&module.ptx, None, compile::source_hash(root, &compile::SOURCES)?, &compiler.version))
}

/// Has cargo rerun this script when a compiler that can build the PTX appears or goes away: rustup's rust-src
/// component, or Debian's Rust.
fn watch(rustc: &Path) {
    let sysroot = Command::new(rustc).args(["--print", "sysroot"]).output();
    let sysroot = sysroot.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    for sysroot in [sysroot.unwrap_or_default().as_str(), "/usr"].map(Path::new) {
        let libraries = sysroot.join("lib/rustlib");
        let core = libraries.join("src/rust/library/core/src/lib.rs");
        // Watching a missing path would rerun this script in every build. Its nearest existing directory changes when
        // the path appears.
        let found = core.ancestors().take_while(|path| path.starts_with(&libraries)).find(|path| path.exists());
        let found = found.map_or_else(|| sysroot.join("bin"), Path::to_path_buf);
        if found.exists() {
            println!("cargo::rerun-if-changed={}", found.display());
        }
    }
}

/// Makes the objects if NVCC or CUDA_HOME names a compiler.
fn objects(root: &Path, ptx: &Path, out: &Path) -> Result<(), String> {
    let named = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let (cuda, name) = match (named("NVCC"), named("CUDA_HOME")) {
        // The linker and the assembler are next to nvcc.
        (Some(nvcc), _) => (nvcc.parent().and_then(Path::parent).map(Path::to_path_buf).unwrap_or_default(), "NVCC"),
        (None, Some(cuda)) => (cuda, "CUDA_HOME"),
        (None, None) => return Ok(()),
    };
    let nvcc = cuda.join("bin/nvcc");
    if !nvcc.is_file() {
        return Err(format!(
            "{name} names {}, which has no bin/nvcc: set it to a CUDA toolkit, or unset it",
            cuda.display()
        ));
    }
    println!("cargo::rerun-if-changed={}", nvcc.display());
    // OUT_DIR is build/PACKAGE/out in the directory that will hold the tool.
    let to = out.ancestors().nth(3).ok_or("OUT_DIR is not in a build's directory")?.join("cuda");
    let output = Command::new("bash").arg(root.join(OBJECTS)).args([cuda.as_path(), ptx, &to]).output();
    let output = output.map_err(|error| format!("bash: {error}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("{}: {}", nvcc.display(), text.lines().next().unwrap_or("it failed without a message")))
    }
}
