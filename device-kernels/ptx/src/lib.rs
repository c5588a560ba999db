//! Compiles the device code, or kernels that use it, into one module, as PTX and as LLVM bitcode.

pub mod bitcode;
pub mod inline;
pub mod kernels;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The oldest GPU with the required instructions (`st.mmio`, scoped fences): ptxas accepts such PTX for every later
/// one.
pub const GPU: &str = "sm_70";
/// The first PTX ISA with `st.mmio`.
pub const ISA: &str = "ptx82";

/// The checked-in module, relative to the repository.
pub const CHECKED_IN: &str = "device-kernels/ptx/ferrogin_device.ptx";
/// The same module as LLVM bitcode, for compilers that inline it. The PTX file names its hash.
pub const CHECKED_IN_BITCODE: &str = "device-kernels/ptx/ferrogin_device.bc";
/// The command that regenerates the checked-in files.
pub const REFRESH: &str = "cargo xtask ptx";

/// The package of the device code.
pub const PACKAGE: &str = "ferrogin-device-kernels";
/// What the PTX is made from, relative to the repository: files, and directories with `.rs` files.
pub const SOURCES: [&str; 7] = [
    "device-kernels/src",
    "device-kernels/Cargo.toml",
    "efa-dp-direct/src",
    "efa-dp-direct/Cargo.toml",
    "ffi-headers/src",
    "ffi-headers/Cargo.toml",
    "device-kernels/ptx/src/lib.rs",
];

/// The device code, compiled.
pub struct Module {
    /// As text.
    pub ptx: String,
    /// As LLVM's text form.
    pub ir: String,
}

/// A Rust compiler that can compile `core` for nvptx64 because the standard library's source is installed beside it.
pub struct Compiler {
    rustc: PathBuf,
    cargo: PathBuf,
    /// The output of `rustc --version`.
    pub version: String,
}

impl Compiler {
    /// Returns those of `own` (rustc, cargo) and Debian's that can compile the module, in this order.
    ///
    /// # Errors
    /// If none can: why `own` can't.
    pub fn all(own: (PathBuf, PathBuf)) -> Result<Vec<Compiler>, String> {
        let own = Self::try_new(own.0, own.1);
        let debian = Self::try_new("/usr/bin/rustc".into(), "/usr/bin/cargo".into());
        match (own, debian) {
            (Err(why), Err(_)) => Err(why),
            (own, debian) => Ok(own.into_iter().chain(debian).collect()),
        }
    }

    fn try_new(rustc: PathBuf, cargo: PathBuf) -> Result<Compiler, String> {
        let output = |program: &Path, args: &[&str]| {
            let output = Command::new(program).args(args).stdin(Stdio::null()).output();
            let output = output.map_err(|error| format!("{}: {error}", program.display()))?;
            Ok::<_, String>(String::from_utf8_lossy(&output.stdout).trim().to_string())
        };
        let version = output(&rustc, &["--version"])?;
        output(&cargo, &["--version"])?;
        let sysroot = output(&rustc, &["--print", "sysroot"])?;
        let core = Path::new(&sysroot).join("lib/rustlib/src/rust/library/core/src/lib.rs");
        if core.is_file() {
            Ok(Compiler { rustc, cargo, version })
        } else {
            Err(format!("{version} has no standard library source (rustup component rust-src, Debian rust-web-src)"))
        }
    }

    /// Compiles the module of a package that has a `ptx` feature, with `work` as the build directory. [`bitcode`] makes
    /// bitcode of its text form.
    ///
    /// Link-time optimisation makes it one module with nothing undefined, so the linker that rustc would run next isn't
    /// needed.
    pub fn compile(&self, root: &Path, work: &Path, package: &str) -> Result<Module, String> {
        let mut command = Command::new(&self.cargo);
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("CARGO") && text != "CARGO_HOME" && !text.starts_with("CARGO_NET") {
                command.env_remove(&name);
            }
        }
        for name in ["RUSTFLAGS", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER", "RUSTDOC", "TARGET", "HOST"] {
            command.env_remove(name);
        }
        command
            .current_dir(root)
            .stdin(Stdio::null())
            .env("RUSTC", &self.rustc)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_TARGET_NVPTX64_NVIDIA_CUDA_LINKER", "true")
            .args(["rustc", "--locked", "--quiet", "--package", package, "--lib", "--crate-type", "cdylib"])
            .args(["--no-default-features", "--features", "ptx", "--profile", "release"])
            .args(["--target", "nvptx64-nvidia-cuda", "-Zbuild-std=core", "--target-dir"])
            .arg(work)
            .args(["--config", "profile.release.lto=\"fat\"", "--config", "profile.release.codegen-units=1"])
            .args(["--config", "profile.release.debug=false", "--config", "profile.release.panic=\"abort\""])
            .args(["--", "--emit=asm,llvm-ir", "-Zfewer-names=yes", "-Zlocation-detail=none", "-Cjump-tables=off"])
            .arg(format!("-Ctarget-cpu={GPU}"))
            .arg(format!("-Ctarget-feature=+{ISA}"));
        let deps = work.join("nvptx64-nvidia-cuda/release/deps");
        // Remove what an earlier build left: there must be exactly one result.
        for old in ["s", "ll"].iter().flat_map(|extension| files_in(&deps, extension)) {
            std::fs::remove_file(&old).map_err(|error| format!("{}: {error}", old.display()))?;
        }
        let output = command.output().map_err(|error| format!("{}: {error}", self.cargo.display()))?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            let error = text.lines().find(|line| line.starts_with("error")).unwrap_or("cargo failed");
            return Err(format!("{} does not compile it: {error}", self.version));
        }
        let result = |extension: &str| match &files_in(&deps, extension)[..] {
            [file] => std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display())),
            _ => Err(format!("{}: not one .{extension} file", deps.display())),
        };
        Ok(Module { ptx: without_crate_hashes(&result("s")?), ir: without_crate_hashes(&result("ll")?) })
    }
}

fn files_in(directory: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_some_and(|found| found == extension)).collect()
}

/// Returns `module` with the crate hashes removed from its symbols: they depend on where the repository is.
fn without_crate_hashes(module: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(module.len()), module);
    while let Some(at) = rest.find("Cs") {
        let (before, hash) = (&rest[..at], &rest[at + 2..]);
        let end = hash.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(hash.len());
        out.push_str(before);
        // In a symbol, `Cs<hash>_` stands before the length of the crate's name.
        let follows = hash[end..].strip_prefix('_').is_some_and(|name| name.starts_with(|c: char| c.is_ascii_digit()));
        if follows {
            out.push('C');
            rest = &hash[end + 1..];
        } else {
            out.push_str("Cs");
            rest = hash;
        }
    }
    out + rest
}

/// Hashes (FNV-1a) the paths and contents of the sources, with Unix line endings.
pub fn source_hash(root: &Path, sources: &[&str]) -> Result<u64, String> {
    let mut files = Vec::new();
    for source in sources {
        collect(&root.join(source), &mut files).map_err(|error| format!("{source}: {error}"))?;
    }
    files.sort();
    let mut hash = FNV_START;
    for file in files {
        let name = file.strip_prefix(root).unwrap_or(&file).to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        hash = fnv(hash, name.bytes().chain([0]).chain(text.replace("\r\n", "\n").bytes()).chain([0]));
    }
    Ok(hash)
}

const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;

fn fnv(start: u64, bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Adds `path`, or the `.rs` files below it except test modules, which no PTX contains.
fn collect(path: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    if path.is_file() {
        files.push(path.to_path_buf());
        return Ok(());
    }
    for entry in std::fs::read_dir(path)? {
        let path = entry?.path();
        let of_tests = path.file_stem().is_some_and(|name| name == "tests" || name == "model");
        if !of_tests && (path.is_dir() || path.extension().is_some_and(|extension| extension == "rs")) {
            collect(&path, files)?;
        }
    }
    Ok(())
}

/// Prefix of the line with the sources' hash.
pub const SOURCE_LINE: &str = "// source: ";
const BITCODE_LINE: &str = "// bitcode: ";
/// Prefix of the line with the compiler.
pub const COMPILER_LINE: &str = "// compiler: ";

/// Returns the PTX as a file: where it comes from and the hash of the bitcode that was made with it, if any; then the
/// PTX.
pub fn with_provenance(ptx: &str, bitcode: Option<&[u8]>, source: u64, compiler: &str) -> String {
    let bitcode = bitcode
        .map_or(String::new(), |bitcode| format!("{BITCODE_LINE}{:016x}\n", fnv(FNV_START, bitcode.iter().copied())));
    format!(
        "// ferrogin device code: the functions of ferrogin/gin.h, for {GPU} and later.\n\
         // Made from device-kernels, efa-dp-direct and ffi-headers by `{REFRESH}`; `source` is a hash of them.\n\
         {SOURCE_LINE}{source:016x}\n{bitcode}{COMPILER_LINE}{compiler}\n//\n{ptx}"
    )
}

/// Parses what [`with_provenance`] wrote: the source hash, the compiler, the PTX.
pub fn provenance(file: &str) -> Option<(u64, &str, &str)> {
    let field = |name: &str| file.lines().take(8).find_map(|line| line.strip_prefix(name));
    let source = u64::from_str_radix(field(SOURCE_LINE)?, 16).ok()?;
    let compiler = field(COMPILER_LINE)?;
    let body = file.split_once(&format!("{COMPILER_LINE}{compiler}\n//\n"))?.1;
    Some((source, compiler, body))
}

/// Compares the hash in `text`, the contents of the file `name`, with that of its sources under `root`.
///
/// # Errors
/// If they differ: the file, both hashes and the fix.
pub fn check_source_hash(root: &Path, name: &str, sources: &[&str], text: &str) -> Result<(), String> {
    let now = source_hash(root, sources)?;
    match provenance(text) {
        Some((then, ..)) if then == now => Ok(()),
        Some((then, ..)) => Err(format!(
            "{name} is stale: it was made from sources with the hash {then:016x}, and theirs is {now:016x} now; \
             `{REFRESH}` makes it again"
        )),
        None => Err(format!("{name} does not say what it was made from; `{REFRESH}` makes it again")),
    }
}

/// Compares the hash of `bitcode` with the one in `checked_in`, the PTX that was made with it.
///
/// # Errors
/// If they differ: the file and the fix.
pub fn check_bitcode(checked_in: &str, bitcode: &[u8]) -> Result<(), String> {
    let now = format!("{BITCODE_LINE}{:016x}", fnv(FNV_START, bitcode.iter().copied()));
    match checked_in.lines().take(8).any(|line| line == now) {
        true => Ok(()),
        false => Err(format!("{CHECKED_IN_BITCODE} was not made with {CHECKED_IN}; `{REFRESH}` makes both again")),
    }
}
