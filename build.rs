//! Puts the device code as PTX where the tool embeds it: compiled from the sources if a compiler is there that can, and
//! otherwise the checked-in `device-kernels/ptx/ferrogin_device.ptx`. `FERROGIN_PTX=checked-in` always takes the latter. A checked-in file that was
//! made from other sources is a warning of the build.

use ferrogin_ptx::{self as compile, CHECKED_IN, Compiler};
use std::env;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo::rerun-if-env-changed=FERROGIN_PTX");
    println!("cargo::rerun-if-changed={CHECKED_IN}");
    for source in compile::SOURCES {
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
        _ => compiled(&root, &out),
    };
    let (text, origin) = match compiled {
        Ok(text) => (text, "compiled with the tool".to_string()),
        Err(why) => (checked_in, format!("checked in, for {why}")),
    };
    std::fs::write(out.join("ferrogin_device.ptx"), text).expect("OUT_DIR is writable");
    println!("cargo::rustc-env=FERROGIN_PTX_ORIGIN={}", origin.replace('\n', " "));
}

fn compiled(root: &Path, out: &Path) -> Result<String, String> {
    let tool = |name: &str| PathBuf::from(env::var_os(name).unwrap_or_default());
    let compiler = &Compiler::all((tool("RUSTC"), tool("CARGO")))?[0];
    let module = compiler.compile(root, &out.join("nvptx64"), compile::PACKAGE).inspect_err(|why| {
        println!("cargo::warning=the checked-in PTX is embedded: {why}");
    })?;
    Ok(compile::with_provenance(&module, compile::source_hash(root, &compile::SOURCES)?, &compiler.version))
}
