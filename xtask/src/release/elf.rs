//! Checks of a tarball's ELF files: their processor, what they load, and the oldest glibc that has their symbols.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A version of glibc: 2 and 34 of 2.34.
pub type Glibc = (u32, u32);

/// Libraries that the files may load at start. Everything else, such as libfabric and the CUDA driver, is loaded when it is used.
const LIBRARIES: [&str; 5] =
    ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"];

/// The libraries and the tool of an installed tree, without links.
pub fn files(tree: &Path) -> Result<Vec<PathBuf>, String> {
    let mut files = vec![tree.join("bin/ferrogin")];
    let lib = tree.join("lib");
    for entry in std::fs::read_dir(&lib).map_err(|error| format!("{}: {error}", lib.display()))? {
        let path = entry.map_err(|error| format!("{}: {error}", lib.display()))?.path();
        if path.is_file() && !path.is_symlink() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Checks all ELF files of a tree for processor `arch`. Returns the oldest glibc that they run with.
///
/// # Errors
/// The file and what is wrong with it.
pub fn check(tree: &Path, arch: &str, binutils: &str) -> Result<Glibc, String> {
    let files = files(tree)?;
    if files.len() < 5 {
        return Err(format!("{} has {} libraries and programs, and not 5", tree.display(), files.len()));
    }
    let mut oldest = (2, 0);
    for file in files {
        let mut command = Command::new(format!("{binutils}readelf"));
        // Untranslated.
        command
            .args(["--wide", "--file-header", "--dynamic", "--version-info", "--section-headers"])
            .arg(&file)
            .env("LC_ALL", "C");
        let text = super::output(&mut command)?;
        oldest = oldest.max(check_text(&text, arch).map_err(|why| format!("{}: {why}", file.display()))?);
    }
    Ok(oldest)
}

/// Checks what readelf prints of one file.
fn check_text(text: &str, arch: &str) -> Result<Glibc, String> {
    let machine = if arch == "x86_64" { "X86-64" } else { "AArch64" };
    if !text.lines().any(|line| line.trim_start().starts_with("Machine:") && line.contains(machine)) {
        return Err(format!("it is not for {arch}"));
    }
    if text.contains(".debug_info") || text.contains(".symtab") {
        return Err("it is not stripped".to_owned());
    }
    if text.contains("(RPATH)") || text.contains("(RUNPATH)") {
        return Err("it has a library path of the machine that built it".to_owned());
    }
    for line in text.lines().filter(|line| line.contains("(NEEDED)")) {
        let library = line.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or(line, |(name, _)| name);
        if !LIBRARIES.contains(&library) {
            return Err(format!("it loads {library} at start, which a machine may lack"));
        }
    }
    let mut oldest = None;
    for line in text.lines() {
        // `0x0010:   Name: GLIBC_2.34  Flags: none  Version: 5`. A weak version may be missing.
        let Some((_, rest)) = line.split_once("Name: GLIBC_") else { continue };
        if rest.contains("Flags: WEAK") {
            continue;
        }
        let version = rest.split_whitespace().next().unwrap_or_default();
        oldest = oldest.max(Some(parse(version).ok_or_else(|| format!("GLIBC_{version} is no version"))?));
    }
    oldest.ok_or_else(|| "it has no versions of glibc's symbols".to_owned())
}

/// `2.34` or `2.2.5`.
pub fn parse(version: &str) -> Option<Glibc> {
    let mut parts = version.split('.').map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "  Machine:                           Advanced Micro Devices X86-64
 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]
 0x000000000000000e (SONAME)             Library soname: [libferrogin.so.0]
  0x0010:   Name: GLIBC_2.2.5  Flags: none  Version: 5
  0x0020:   Name: GLIBC_2.34  Flags: none  Version: 4
  0x0030:   Name: GLIBC_2.38  Flags: WEAK  Version: 3
  0x0040:   Name: GCC_3.0  Flags: none  Version: 2
";

    #[test]
    fn oldest_glibc_is_the_newest_version_of_a_strong_symbol() {
        assert_eq!(check_text(GOOD, "x86_64"), Ok((2, 34)));
        assert_eq!(check_text(&GOOD.replace("2.2.5", "2.4"), "x86_64"), Ok((2, 34)), "not as text");
        assert_eq!(check_text(&GOOD.replace("WEAK", "none"), "x86_64"), Ok((2, 38)));
        assert!(check_text(&GOOD.replace("GLIBC_", "MUSL_"), "x86_64").is_err());
        assert!(check_text(&GOOD.replace("2.34", "PRIVATE"), "x86_64").is_err());
    }

    #[test]
    fn file_that_other_machines_cannot_load_is_refused() {
        for (line, why) in [
            ("(NEEDED) Shared library: [libfabric.so.1]", "loads libfabric.so.1 at start"),
            ("(RUNPATH) Library runpath: [/home/x]", "library path"),
            ("[29] .debug_info PROGBITS", "not stripped"),
        ] {
            assert!(check_text(&format!("{GOOD}{line}\n"), "x86_64").unwrap_err().contains(why), "{line}");
        }
        assert_eq!(check_text(GOOD, "aarch64"), Err("it is not for aarch64".to_owned()));
    }
}
