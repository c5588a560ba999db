//! Memory files, and this process's mappings.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::{Mode, fchmod};

/// In virtual memory management, sizes and addresses are multiples of this, as on hardware.
pub(crate) const GRANULARITY: usize = 2 << 20;

/// Creates a memory file of `len` bytes that can't shrink under its mappers and that other users can't open.
///
/// # Errors
/// The operating system's error; a file beyond the process's file size limit is refused here, because the kernel would
/// kill the process.
pub(crate) fn create(name: &str, len: u64) -> io::Result<OwnedFd> {
    let (limit, _) = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_FSIZE)?;
    if len > limit {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    fchmod(&fd, Mode::S_IRUSR | Mode::S_IWUSR)?;
    nix::unistd::ftruncate(&fd, i64::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?)?;
    fcntl(&fd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL))?;
    Ok(fd)
}

/// Whether the file is sealed against shrinking under its mappers.
pub(crate) fn cannot_shrink(file: &OwnedFd) -> bool {
    let seals = fcntl(file, FcntlArg::F_GET_SEALS).map(SealFlag::from_bits_truncate);
    seals.is_ok_and(|seals| seals.contains(SealFlag::F_SEAL_SHRINK))
}

/// True if the CPU can't touch device memory.
static HIDDEN: AtomicBool = AtomicBool::new(false);
/// If so, device addresses are in the 16 TiB zone of this number, and their bytes at the same place in the next zone.
const ZONE: u64 = 2;
const ZONE_BITS: u32 = 44;

/// Hides device memory that is mapped from now on from the CPU.
pub(crate) fn hide() {
    HIDDEN.store(true, Ordering::Relaxed);
}

pub(crate) fn hidden() -> bool {
    HIDDEN.load(Ordering::Relaxed)
}

/// Returns where this process has the bytes of a device address.
pub(crate) fn backing(address: u64) -> u64 {
    if address >> ZONE_BITS == ZONE && hidden() { address + (1 << ZONE_BITS) } else { address }
}

/// Returns addresses in the device zone that haven't been used before.
fn next_of_zone(len: usize) -> io::Result<usize> {
    static NEXT: AtomicU64 = AtomicU64::new(ZONE << ZONE_BITS);
    let whole = (len as u64).next_multiple_of(GRANULARITY as u64);
    let address = NEXT.fetch_add(whole, Ordering::Relaxed);
    let fits = address.checked_add(whole).is_some_and(|end| end <= (ZONE + 1) << ZONE_BITS);
    if fits { Ok(address as usize) } else { Err(io::ErrorKind::OutOfMemory.into()) }
}

/// Reserves `len` bytes of address space that nothing else is mapped at.
///
/// # Errors
/// The operating system's error.
pub(crate) fn reserve(len: usize) -> io::Result<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    if !hidden() {
        return map(0, len, libc::PROT_NONE, flags, -1, 0);
    }
    let address = next_of_zone(len)?;
    let flags = flags | libc::MAP_FIXED_NOREPLACE;
    map(backing(address as u64) as usize, len, libc::PROT_NONE, flags, -1, 0)?;
    map(address, len, libc::PROT_NONE, flags, -1, 0)
}

/// Allocates zeroed, page-aligned memory.
///
/// # Errors
/// The operating system's error.
pub(crate) fn anonymous(len: usize) -> io::Result<usize> {
    map(0, len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
}

/// Maps `len` bytes of a file from `offset` at `address`, or wherever the kernel chooses if that is 0.
///
/// # Errors
/// The operating system's error.
pub(crate) fn shared(address: usize, len: usize, fd: &OwnedFd, offset: u64) -> io::Result<usize> {
    let address = if address == 0 && hidden() { reserve(len)? } else { address };
    let fixed = if address == 0 { 0 } else { libc::MAP_FIXED };
    let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | fixed;
    let at = backing(address as u64) as usize;
    let mapped = map(at, len, libc::PROT_READ | libc::PROT_WRITE, flags, fd.as_raw_fd(), offset)?;
    Ok(if address == 0 { mapped } else { address })
}

/// If the CPU can't touch device memory, maps a file at a device address itself, for the CPU: host memory that
/// [`shared`] has mapped there. `rights` says whether the CPU may read and write it.
///
/// # Errors
/// The operating system's error.
pub(crate) fn show(address: usize, len: usize, fd: &OwnedFd, rights: [bool; 2]) -> io::Result<()> {
    if !hidden() {
        return Ok(());
    }
    let rights = match rights {
        [false, _] => libc::PROT_NONE,
        [true, false] => libc::PROT_READ,
        [true, true] => libc::PROT_READ | libc::PROT_WRITE,
    };
    map(address, len, rights, libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED, fd.as_raw_fd(), 0).map(drop)
}

/// Unmaps the pages in part of a reservation; the addresses stay reserved.
///
/// # Errors
/// The operating system's error.
pub(crate) fn empty(address: usize, len: usize) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    let at = backing(address as u64) as usize;
    map(at, len, libc::PROT_NONE, flags, -1, 0)?;
    if at == address { Ok(()) } else { map(address, len, libc::PROT_NONE, flags, -1, 0).map(drop) }
}

/// Zeros whole pages of a memory file, in all its mappings.
///
/// # Errors
/// The operating system's error; the bytes are then unchanged.
pub(crate) fn clear(address: usize, len: usize) -> io::Result<()> {
    // SAFETY: the pages belong to one of this library's memory files, which holds no Rust objects; they stay mapped.
    let result = unsafe { libc::madvise(backing(address as u64) as *mut libc::c_void, len, libc::MADV_REMOVE) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn map(address: usize, len: usize, rights: i32, flags: i32, fd: i32, offset: i64) -> io::Result<usize> {
    // SAFETY: the kernel chooses a free address, or the address is in one of this library's reservations, which hold no
    // Rust objects.
    let base = unsafe { libc::mmap(address as *mut libc::c_void, len, rights, flags, fd, offset) };
    if base == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(base as usize) }
}

/// Unmaps memory from [`reserve`] or [`anonymous`].
pub(crate) fn unmap(address: usize, len: usize) {
    // SAFETY: this library made the mapping, and its caller has removed it from the table of ranges, so no new access
    // can start.
    let _ = unsafe { libc::munmap(address as *mut libc::c_void, len) };
    let at = backing(address as u64) as usize;
    if at != address {
        // SAFETY: as above; the backing was mapped together with the address.
        let _ = unsafe { libc::munmap(at as *mut libc::c_void, len) };
    }
}

/// Whether the process has all pages of the range mapped, readable and (if `write`) writable.
///
/// # Errors
/// The list of mappings can't be read: the process is out of descriptors, or there is no `/proc`.
pub(crate) fn mapped(address: u64, len: u64, write: bool) -> io::Result<bool> {
    let Some(end) = address.checked_add(len) else { return Ok(false) };
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mut at = address;
    for line in maps.lines() {
        let Some((range, rights)) = line.split_once(' ') else { continue };
        let Some((from, to)) = range.split_once('-') else { continue };
        let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16)) else { continue };
        if to <= at {
            continue;
        }
        if from > at || !rights.starts_with('r') || (write && !rights[1..].starts_with('w')) {
            return Ok(false);
        }
        at = to;
        if at >= end {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the page size in bytes.
pub(crate) fn page_size() -> u64 {
    let size = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
    // Linux always reports it.
    size.map_or(1 << 16, |size| size as u64)
}
