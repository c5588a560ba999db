//! `cargo xtask ptx`: regenerates the checked-in PTX, its bitcode, the header of its inline functions, and the
//! scenarios' kernels.

use ferrogin_ptx::{self as compile, CHECKED_IN, CHECKED_IN_BITCODE, Compiler, bitcode, inline, kernels};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Compiles with the compiler that made the previous file, or else Debian's, or else the caller's own.
pub fn refresh(root: &Path) -> ExitCode {
    match try_refresh(root) {
        Ok(version) => {
            let header = inline::HEADER;
            println!(
                "ptx: {CHECKED_IN}, {CHECKED_IN_BITCODE}, {header}, {} and {} are those of the sources now, made by {version}",
                kernels::PROGRAMS.path,
                kernels::GIN.path
            );
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("ptx: not all files are those of the sources: {why}");
            ExitCode::FAILURE
        }
    }
}

fn try_refresh(root: &Path) -> Result<String, String> {
    let own = |name: &str, command: &str| std::env::var_os(name).map_or(command.into(), PathBuf::from);
    let mut compilers = Compiler::all((own("RUSTC", "rustc"), own("CARGO", "cargo")))?;
    let before = std::fs::read_to_string(root.join(CHECKED_IN)).unwrap_or_default();
    let made_by = compile::provenance(&before).map_or("", |(_, made_by, _)| made_by);
    let chosen = compilers.iter().position(|compiler| compiler.version == made_by).unwrap_or(compilers.len() - 1);
    let compiler = compilers.swap_remove(chosen);
    let target = root.join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or("target".into()));
    let module = compiler.compile(root, &target.join("ptx"), compile::PACKAGE)?;
    let header = inline::header(&module.ptx)?;
    let bitcode = bitcode::assemble(&bitcode::for_llvm_19(&module.ir))?;
    let write = |file: &str, bytes: &[u8]| {
        std::fs::write(root.join(file), bytes).map_err(|error| format!("{file} cannot be written: {error}"))
    };
    write(inline::HEADER, header.as_bytes())?;
    write(CHECKED_IN_BITCODE, &bitcode)?;
    let source = compile::source_hash(root, &compile::SOURCES)?;
    let ptx = compile::with_provenance(&module.ptx, Some(&bitcode), source, &compiler.version);
    write(CHECKED_IN, ptx.as_bytes())?;
    let ptx = kernels::programs(&compiler, root, &target.join("ptx"))?;
    write(kernels::PROGRAMS.path, kernels::PROGRAMS.file(root, &compiler.version, &ptx)?.as_bytes())?;
    let Some((clang, version)) = kernels::clang() else {
        return Err(format!("{} needs clang (apt-get install clang-22)", kernels::GIN.path));
    };
    write(kernels::GIN.path, kernels::GIN.file(root, &version, &kernels::gin(clang, root)?)?.as_bytes())?;
    Ok(format!("{} and {version}", compiler.version))
}
