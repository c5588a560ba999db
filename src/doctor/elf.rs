//! Checks a library's file without loading it: a broken file can hang or crash the process that loads it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A library's defect, and its fix.
#[derive(Debug, PartialEq, Eq)]
pub struct Defect {
    pub what: String,
    pub fix: &'static str,
}

const INSTALL: &str =
    "reinstall ferrogin (make build, make install, or the release's archive), with all files from one release";
const OTHER_MACHINE: &str = "install the ferrogin for this machine's architecture";

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;

const HEADER: usize = 64;
const SEGMENT: usize = 56;
/// More segments than any library has.
const SEGMENTS_MAX: u16 = 256;
const LOAD: u32 = 1;

/// Returns the defect of the file at `path`, if it has one that shows without loading it.
pub fn defect(path: &Path) -> Option<Defect> {
    let broken = |what: String, fix| Some(Defect { what: format!("{} {what}", path.display()), fix });
    let meta = match path.metadata() {
        Ok(meta) => meta,
        Err(error) => return broken(format!("cannot be read: {error}"), INSTALL),
    };
    // Opening a FIFO or a device could wait forever.
    if !meta.is_file() {
        let kind = if meta.is_dir() { "is a directory" } else { "is not a regular file (a FIFO, device or socket)" };
        return broken(format!("{kind}, not a library"), INSTALL);
    }
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) => return broken(format!("cannot be opened: {error}"), "give this user the right to read it"),
    };
    let mut header = [0; HEADER];
    if file.read_exact_at(&mut header, 0).is_err() || header[..4] != *b"\x7fELF" {
        return broken(format!("is not an ELF library ({} bytes)", meta.len()), INSTALL);
    }
    // A 64-bit little-endian file, as on every machine that ferrogin supports.
    let machine = u16_at(&header, 18);
    if header[4] != 2 || header[5] != 1 || machine != MACHINE {
        let what = format!(
            "is for another architecture (ELF class {}, machine {machine}; this is class 2, machine {MACHINE})",
            header[4]
        );
        return broken(what, OTHER_MACHINE);
    }
    let (table, count) = (u64_at(&header, 32), u16_at(&header, 56));
    if count > SEGMENTS_MAX || usize::from(u16_at(&header, 54)) != SEGMENT {
        return broken("has an invalid segment table".into(), INSTALL);
    }
    for number in 0..u64::from(count) {
        let mut segment = [0; SEGMENT];
        let at = number.checked_mul(SEGMENT as u64).and_then(|offset| offset.checked_add(table));
        if at.is_none_or(|at| file.read_exact_at(&mut segment, at).is_err()) {
            return broken(format!("is truncated: it has {} bytes", meta.len()), INSTALL);
        }
        let end = u64_at(&segment, 8).saturating_add(u64_at(&segment, 32));
        if u32::from_le_bytes([segment[0], segment[1], segment[2], segment[3]]) == LOAD && end > meta.len() {
            return broken(
                format!("is truncated: it has {} bytes, but its code and data end at {end}", meta.len()),
                INSTALL,
            );
        }
    }
    None
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_executable_passes_and_other_files_fail() {
        assert_eq!(defect(&std::env::current_exe().unwrap()), None);
        for (path, part) in
            [("/nonexistent", "cannot be read"), ("/dev/zero", "not a regular file"), ("/", "a directory")]
        {
            let found = defect(Path::new(path)).unwrap_or_else(|| panic!("{path}"));
            assert!(found.what.contains(part), "{found:?}");
        }
    }
}
