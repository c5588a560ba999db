//! Compiles the scenarios' kernels (scenarios/scenario-kernels): the programs with rustc, and their calls to gin.cuh
//! with clang.

use crate::{COMPILER_LINE, Compiler, GPU, ISA, REFRESH, SOURCE_LINE, SOURCES, source_hash};
use std::path::Path;
use std::process::{Command, Stdio};

/// A checked-in module of kernels, and what it's made from.
pub struct Kernels {
    /// Path relative to the repository.
    pub path: &'static str,
    /// Lists of files, and of directories with `.rs` files.
    pub sources: &'static [&'static [&'static str]],
}

/// The programs.
pub const PROGRAMS: Kernels = Kernels {
    path: "scenarios/scenario-kernels/ptx/scenarios.ptx",
    sources: &[&["scenarios/scenario-kernels/src", "scenarios/scenario-kernels/Cargo.toml"], &SOURCES],
};

/// The operations of gin.cuh.
pub const GIN: Kernels = Kernels {
    path: "scenarios/scenario-kernels/ptx/gin.ptx",
    sources: &[&[
        "scenarios/scenario-kernels/gin.cu",
        "ffi-headers/include/ferrogin/gin.h",
        "ffi-headers/include/ferrogin/gin.cuh",
        "ffi-headers/include/ferrogin/clang_cuda.h",
        "ffi-headers/include/ferrogin/post.cuh",
        "ffi-headers/include/ferrogin/fast_path.cuh",
        "device-kernels/ptx/src/kernels.rs",
    ]],
};

impl Kernels {
    /// Returns the file's text: where the PTX comes from, then the PTX.
    pub fn file(&self, root: &Path, compiler: &str, ptx: &str) -> Result<String, String> {
        let source = source_hash(root, &self.sources.concat())?;
        Ok(format!(
            "// Kernels of the scenarios (scenarios/scenario-kernels). Made by `{REFRESH}`; `source` is a hash of the sources.\n\
             {SOURCE_LINE}{source:016x}\n{COMPILER_LINE}{compiler}\n//\n{ptx}"
        ))
    }
}

/// Compiles the programs to PTX.
pub fn programs(rustc: &Compiler, root: &Path, work: &Path) -> Result<String, String> {
    Ok(rustc.compile(root, work, "scenario-kernels")?.ptx)
}

/// Finds a clang that compiles CUDA C++ without NVIDIA's headers. Returns its command and version.
pub fn clang() -> Option<(&'static str, String)> {
    ["clang-22", "clang-19", "clang"].into_iter().find_map(|command| {
        let output = Command::new(command).arg("--version").stdin(Stdio::null()).output().ok()?;
        let version = String::from_utf8_lossy(&output.stdout).lines().next()?.to_owned();
        (output.status.success() && !version.is_empty()).then_some((command, version))
    })
}

/// Compiles the operations of gin.cuh to PTX.
pub fn gin(clang: &str, root: &Path) -> Result<String, String> {
    let mut command = Command::new(clang);
    command
        .current_dir(root)
        .stdin(Stdio::null())
        .args(["-x", "cuda", "-std=c++17", "--cuda-device-only", "-nocudainc", "-nocudalib", "-O2", "-S", "-o", "-"])
        .args(["-Wall", "-Wextra", "-Werror", "-Iffi-headers/include", "-include", "ferrogin/clang_cuda.h"])
        .args([&format!("--cuda-gpu-arch={GPU}"), &format!("--cuda-feature=+{ISA}")])
        .arg("scenarios/scenario-kernels/gin.cu");
    let output = command.output().map_err(|error| format!("{clang}: {error}"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("{clang} does not compile gin.cu: {}", text.lines().next().unwrap_or("it says nothing")));
    }
    String::from_utf8(output.stdout).map_err(|error| format!("the PTX is not text: {error}"))
}
