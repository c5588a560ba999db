//! What the process has run out of when a call fails: descriptors, memory, room for shared memory, or threads.
//!
//! A failure at a limit often has another code or none: libfabric reports a provider that doesn't load as no provider,
//! the dynamic linker gives only text, and a peer that can't be accepted is silent. So if no code names the limit, the
//! limits are probed.
#![allow(unsafe_code)]

use crate::device::DeviceError;
use crate::error::Error;
use ferrogin_rendezvous::interface::InterfaceError;
use ferrogin_rendezvous::ring::RingError;
use nix::sys::resource::{Resource, getrlimit};
use std::fmt;

/// Descriptors that a failed call may have held and closed again.
const DESCRIPTORS: usize = 32;
/// Bytes that a failed call may have mapped and unmapped again: libfabric with its providers, an endpoint's packet
/// buffers, or the heap that the allocator reserves for a thread.
const MEMORY: usize = 128 << 20;
/// More than the size of the memory file between two software cards on one host.
const SHARED_MEMORY: u64 = 2 << 20;

/// `CUDA_ERROR_OUT_OF_MEMORY` and `CUDA_ERROR_OPERATING_SYSTEM`.
const OUT_OF_MEMORY: u32 = 2;
const OPERATING_SYSTEM: u32 = 304;

/// What the process lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shortage {
    /// Descriptors.
    Descriptors,
    /// Descriptors of the whole system.
    SystemDescriptors,
    /// Memory, or addresses for it.
    Memory,
    /// The file size limit, which also limits shared memory.
    FileSize,
    /// Threads.
    Threads,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Descriptors => "this process has too many open files: raise `ulimit -n`",
            Self::SystemDescriptors => "this machine has too many open files: raise fs.file-max (sysctl)",
            Self::Memory => {
                "the system gave this process no memory: raise its limits of address space and locked memory \
                 (`ulimit -v`, `ulimit -l`), or free memory on this machine"
            }
            Self::FileSize => "this process's limit of file sizes is below what shared memory needs: raise `ulimit -f`",
            Self::Threads => {
                "the system gave this process no thread: raise its limit of processes (`ulimit -u`), or the container's (pids.max)"
            }
        })
    }
}

/// Returns the shortage that caused an error, if one did.
pub fn of(error: &Error) -> Option<Shortage> {
    let of_code = |code: Option<i32>| match code {
        Some(libc::EMFILE) => Some(Shortage::Descriptors),
        Some(libc::ENFILE) => Some(Shortage::SystemDescriptors),
        Some(libc::ENOMEM) => Some(Shortage::Memory),
        Some(libc::EFBIG) => Some(Shortage::FileSize),
        // A thread that gets no memory for its stack fails with this code too.
        Some(libc::EAGAIN) => now().or(Some(Shortage::Threads)),
        _ => now(),
    };
    match error {
        Error::Fabric { source, .. } => of_code(source.code()),
        Error::System { source, .. } | Error::Device(DeviceError::System { source, .. }) => {
            of_code(source.raw_os_error())
        }
        Error::Control(
            RingError::Socket { source, .. }
            | RingError::Listen { source, .. }
            | RingError::Interface(InterfaceError::System(source)),
        ) => of_code(source.raw_os_error()),
        // The driver needs this process's descriptors and address space too, and says only that it got none.
        Error::Device(DeviceError::Cuda { code: OUT_OF_MEMORY | OPERATING_SYSTEM, .. }) => now().or_else(file_size),
        // The CUDA driver is a library too, and may fail to load.
        Error::Device(DeviceError::NoGpu { .. }) => now(),
        // Without descriptors, this process can't accept peers, so the ring's connections fail on either side.
        Error::Control(RingError::Unreachable { .. } | RingError::Timeout { .. } | RingError::PeerClosed { .. }) => {
            descriptors()
        }
        _ => None,
    }
}

/// Returns what the process lacks right now.
pub fn now() -> Option<Shortage> {
    descriptors().or_else(memory)
}

/// Returns what this process's software card lacks right now to connect to another.
pub fn of_software_card() -> Option<Shortage> {
    now().or_else(file_size)
}

fn descriptors() -> Option<Shortage> {
    let files: Vec<_> = (0..DESCRIPTORS).map(|_| std::fs::File::open("/dev/null")).collect();
    files.iter().find_map(|file| match file.as_ref().err()?.raw_os_error()? {
        libc::EMFILE => Some(Shortage::Descriptors),
        libc::ENFILE => Some(Shortage::SystemDescriptors),
        _ => None,
    })
}

fn memory() -> Option<Shortage> {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: the kernel chooses the address, so the mapping replaces no other.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), MEMORY, access, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Some(Shortage::Memory);
    }
    // SAFETY: the mapping was made above, and no other code has its address.
    unsafe { libc::munmap(at, MEMORY) };
    None
}

fn file_size() -> Option<Shortage> {
    let limit = getrlimit(Resource::RLIMIT_FSIZE).map_or(u64::MAX, |(soft, _)| soft);
    (limit < SHARED_MEMORY).then_some(Shortage::FileSize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_name_their_shortage() {
        for (code, fix) in [(libc::EMFILE, "ulimit -n"), (libc::ENOMEM, "ulimit -v"), (libc::EFBIG, "ulimit -f")] {
            let source = std::io::Error::from_raw_os_error(code);
            let shortage = of(&Error::System { call: "call", source }).expect("a shortage");
            assert!(shortage.to_string().contains(fix), "{shortage}");
        }
        assert_eq!(of(&Error::Null("ctx")), None);
        assert_eq!(of_software_card(), None);
    }
}
