//! Memory that applications and peers write while the card reads it: mappings, copies, and the few atomic accesses.
//!
//! Nothing here makes plain references to such memory: applications, peers and the card access it at the same time.
#![allow(unsafe_code)]

mod copy;

pub use copy::{copy, copy_away};

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::stat::FileStat;

/// Returns the size of a page: 4 KiB on x86-64, up to 64 KiB on aarch64.
pub fn page_size() -> usize {
    let size = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
    // Linux always answers.
    size.map_or(1 << 16, |size| size as usize)
}

/// An owned mapping, shared or private, readable and writable.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    mapped: usize,
    /// Offset of the caller's bytes in the mapping: a file offset need not be a multiple of the page size.
    skip: usize,
}

// SAFETY: a mapping is a range of addresses. Its users access it through raw pointers and follow their own rules.
unsafe impl Send for Mapping {}
// SAFETY: a shared mapping gives out its address, its length and atomic words, and no other reference to its bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of zeroed, page-aligned memory.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        Self::map(len, 0, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    }

    /// Maps `len` bytes of `fd` from `offset` on, shared with other mappings of the file.
    pub fn shared(fd: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        Self::of_range(fd, range(fd, offset, len)?.0, len)
    }

    /// Maps the 8 bytes of `fd` at `offset`, and returns the mapping and the word. The words in one page of a file
    /// share one mapping.
    ///
    /// # Errors
    /// The range is beyond the end of the file or not aligned, or the system is out of memory.
    pub fn word(fd: BorrowedFd<'_>, offset: u64) -> io::Result<(Arc<Self>, *mut u64)> {
        /// By the file's device and inode, and the page's offset. A mapping keeps its file, so no other file gets the
        /// inode meanwhile.
        static PAGES: Mutex<BTreeMap<(u64, u64, u64), Weak<Mapping>>> = Mutex::new(BTreeMap::new());
        const LEN: usize = size_of::<u64>();
        let (at, stat) = range(fd, offset, LEN)?;
        if !at.is_multiple_of(LEN as u64) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let page = at - at % page_size() as u64;
        let key = (stat.st_dev, stat.st_ino, page);
        let mut pages = PAGES.lock().unwrap_or_else(PoisonError::into_inner);
        let known = pages.get(&key).and_then(Weak::upgrade).filter(|_| is_regular(&stat));
        let map = known.map_or_else(|| Self::of_range(fd, page, page_size()).map(Arc::new), Ok)?;
        pages.retain(|_, map| map.strong_count() > 0);
        pages.insert(key, Arc::downgrade(&map));
        let word = map.as_ptr().wrapping_add((at - page) as usize).cast();
        Ok((map, word))
    }

    /// Maps `len` bytes of the file from `at` on, which [`range`] has checked.
    fn of_range(fd: BorrowedFd<'_>, at: u64, len: usize) -> io::Result<Self> {
        let skip = (at % page_size() as u64) as usize;
        let total = len.checked_add(skip).ok_or(io::ErrorKind::InvalidInput)?;
        let start = i64::try_from(at - skip as u64).map_err(|_| io::ErrorKind::InvalidInput)?;
        Self::map(total, skip, libc::MAP_SHARED, fd.as_raw_fd(), start)
    }

    fn map(len: usize, skip: usize, flags: i32, fd: i32, offset: i64) -> io::Result<Self> {
        if len == skip {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: the kernel chooses a free address, so the new mapping replaces no memory in use.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, offset) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, mapped: len, skip })
    }

    /// Returns the address of the caller's first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr().wrapping_add(self.skip)
    }

    /// Returns the address of `len` bytes at `at`.
    ///
    /// # Panics
    /// They are not in the caller's range, or not aligned to `align`.
    #[inline]
    fn place(&self, at: usize, len: usize, align: usize) -> *mut u8 {
        let place = self.as_ptr().wrapping_add(at);
        let inside = at.checked_add(len).is_some_and(|end| end <= self.len());
        assert!(inside && place.addr().is_multiple_of(align), "{len} bytes at {at} of a mapping of {}", self.len());
        place
    }

    /// Returns a 32-bit word, which others may access at the same time.
    ///
    /// # Panics
    /// The word is not in the mapping, or not aligned.
    #[inline]
    pub fn u32_at(&self, at: usize) -> &AtomicU32 {
        // SAFETY: an aligned word of the mapping, which lives as long as `self` and is accessed by atomics only.
        unsafe { AtomicU32::from_ptr(self.place(at, 4, 4).cast()) }
    }

    /// Returns a 64-bit word, which others may access at the same time.
    ///
    /// # Panics
    /// As [`u32_at`](Self::u32_at).
    #[inline]
    pub fn u64_at(&self, at: usize) -> &AtomicU64 {
        // SAFETY: an aligned word of the mapping, which lives as long as `self` and is accessed by atomics only.
        unsafe { AtomicU64::from_ptr(self.place(at, 8, 8).cast()) }
    }

    /// Reads `N` 64-bit words that others write: a work request in its slot.
    ///
    /// # Panics
    /// As [`u32_at`](Self::u32_at).
    #[inline]
    pub fn words_at<const N: usize>(&self, at: usize) -> [u64; N] {
        // SAFETY: aligned words of the mapping.
        unsafe { load_words(self.place(at, 8 * N, 8)) }
    }

    /// Copies bytes from the mapping, which others may write at the same time.
    ///
    /// # Panics
    /// They are not in the mapping.
    pub fn read(&self, at: usize, into: &mut [u8]) {
        // SAFETY: bytes of the mapping, and as many of the slice.
        unsafe { copy(into.as_mut_ptr(), self.place(at, into.len(), 1), into.len()) };
    }

    /// Copies bytes to the mapping, which others may read at the same time.
    ///
    /// # Panics
    /// They are not in the mapping.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        // SAFETY: bytes of the mapping, and as many of the slice.
        unsafe { copy(self.place(at, bytes.len(), 1), bytes.as_ptr(), bytes.len()) };
    }

    /// Sets the first `len` bytes to zero. Nobody else accesses them meanwhile.
    ///
    /// # Panics
    /// They are not in the mapping.
    pub fn clear(&self, len: usize) {
        // SAFETY: bytes of the mapping.
        unsafe { ptr::write_bytes(self.place(0, len, 1), 0, len) };
    }

    /// Returns the length of the caller's range in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.mapped - self.skip
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `map` mapped the range, and this value is its owner. Users of a copy of the pointer keep this value
        // alive.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.mapped) };
    }
}

/// Returns a file's inode, and the place in it of `offset` in the dma-buf that `fd` names.
pub(crate) fn place_in_file(fd: BorrowedFd<'_>, offset: u64) -> io::Result<(u64, u64)> {
    range(fd, offset, 0).map(|(at, stat)| (stat.st_ino, at))
}

/// Returns the place in the file of the `len` bytes of `fd` from `offset` on, and the file's status. A mapping beyond
/// the end of a file would fault, so it is refused here. A device's buffer has no size of its own; its mmap checks the
/// range itself.
fn range(fd: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<(u64, FileStat)> {
    let at = offset.checked_add(exported_start(fd)).ok_or(io::ErrorKind::InvalidInput)?;
    let stat = nix::sys::stat::fstat(fd)?;
    if is_regular(&stat) && at.checked_add(len as u64).is_none_or(|end| end > stat.st_size as u64) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    Ok((at, stat))
}

fn is_regular(stat: &FileStat) -> bool {
    stat.st_mode & libc::S_IFMT == libc::S_IFREG
}

/// Returns the offset in the file where a dma-buf begins. The software GPU exports a part of its memory as a descriptor
/// of a memory file, positioned at the part's first byte. Any other descriptor begins at 0.
fn exported_start(fd: BorrowedFd<'_>) -> u64 {
    // Most descriptors are at 0, which is cheaper to find out than their name. Drivers' dma-bufs have no position.
    let at = nix::unistd::lseek(fd, 0, nix::unistd::Whence::SeekCur).unwrap_or(0);
    if at == 0 {
        return 0;
    }
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap_or_default();
    if name.to_string_lossy().starts_with("/memfd:softgpu-") { at as u64 } else { 0 }
}

/// Checks that a memory file may have `len` bytes. For a longer one, the kernel would kill the process with `SIGXFSZ`.
///
/// # Errors
/// `EFBIG` if the process's file size limit, which covers memory files too, is lower.
pub fn check_file_size(len: usize) -> io::Result<()> {
    let (limit, _) = getrlimit(Resource::RLIMIT_FSIZE)?;
    if len as u64 <= limit { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EFBIG)) }
}

/// Creates a memory file of `len` bytes that cannot shrink under its mappers, and that other users cannot open.
pub fn sealed_memfd(name: &str, len: usize) -> io::Result<OwnedFd> {
    use nix::fcntl::{FcntlArg, SealFlag, fcntl};
    check_file_size(len)?;
    let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
    nix::sys::stat::fchmod(&fd, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR)?;
    nix::unistd::ftruncate(&fd, len as i64)?;
    fcntl(&fd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL))?;
    Ok(fd)
}

/// Whether `fd` is a memory file of exactly `len` bytes that cannot shrink.
pub fn is_sealed_memfd(fd: BorrowedFd<'_>, len: usize) -> bool {
    use nix::fcntl::{FcntlArg, SealFlag, fcntl};
    let sealed = fcntl(fd, FcntlArg::F_GET_SEALS)
        .is_ok_and(|seals| SealFlag::from_bits_truncate(seals).contains(SealFlag::F_SEAL_SHRINK));
    sealed && nix::sys::stat::fstat(fd).is_ok_and(|stat| stat.st_size == len as i64)
}

/// Checks that `len` bytes at `addr` are mapped (and writable, if `write`), and makes them present, as pinning does.
///
/// # Errors
/// `EFAULT` if a page is not mapped, or not writable for `write`.
pub fn populate(addr: usize, len: usize, write: bool) -> io::Result<()> {
    let page = page_size();
    let start = addr & !(page - 1);
    let end = addr.checked_add(len).and_then(|e| e.checked_add(page - 1)).map(|e| e & !(page - 1));
    let Some(end) = end.filter(|_| addr != 0) else {
        return Err(io::Error::from_raw_os_error(libc::EFAULT));
    };
    if len == 0 {
        return Ok(());
    }
    let advice = if write { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    match advise(start, end, advice) {
        Ok(()) => Ok(()),
        // A right is missing, the kernel is old, or the mapping is not ordinary memory.
        Err(libc::EINVAL) => permitted(start, end, write),
        Err(_) => Err(io::Error::from_raw_os_error(libc::EFAULT)),
    }
}

fn advise(start: usize, end: usize, advice: i32) -> Result<(), i32> {
    loop {
        // SAFETY: populating faults pages in and changes no content.
        if unsafe { libc::madvise(start as *mut libc::c_void, end - start, advice) } == 0 {
            return Ok(());
        }
        match io::Error::last_os_error().raw_os_error().unwrap_or(libc::EFAULT) {
            libc::EINTR | libc::EAGAIN => {}
            errno => return Err(errno),
        }
    }
}

/// Checks that the kernel's list of mappings covers the whole range with the needed rights.
fn permitted(start: usize, end: usize, write: bool) -> io::Result<()> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let covered = covered(&maps, start, end, write);
    covered.then_some(()).ok_or_else(|| io::Error::from_raw_os_error(libc::EFAULT))
}

/// `maps` is sorted, one mapping per line: `from-to rwxp ...`.
fn covered(maps: &str, start: usize, end: usize, write: bool) -> bool {
    let mut at = start;
    for line in maps.lines() {
        let Some((range, rights)) = line.split_once(' ') else { continue };
        let Some((from, to)) = range.split_once('-') else { continue };
        let hex = |text| usize::from_str_radix(text, 16);
        let (Ok(from), Ok(to)) = (hex(from), hex(to)) else { continue };
        if to <= at {
            continue;
        }
        let good = rights.starts_with('r') && (!write || rights[1..].starts_with('w'));
        if from > at || !good {
            return false;
        }
        at = to;
        if at >= end {
            return true;
        }
    }
    false
}

/// Reads `N` 8-byte words that another party writes: a work request in its slot.
///
/// # Safety
/// `8 * N` bytes at `src` are mapped and 8-byte aligned.
pub unsafe fn load_words<const N: usize>(src: *const u8) -> [u64; N] {
    std::array::from_fn(|i| {
        let word: *mut u64 = src.cast_mut().wrapping_add(8 * i).cast();
        // SAFETY: this function's caller keeps the range mapped and aligned.
        unsafe { AtomicU64::from_ptr(word) }.load(Ordering::Relaxed)
    })
}

/// Stores a word. Earlier stores in program order become visible no later than this one.
///
/// # Safety
/// 8 bytes at `dst` are mapped and 8-byte aligned.
pub unsafe fn store_release(dst: *mut u64, value: u64) {
    // SAFETY: this function's caller keeps the word mapped and aligned.
    unsafe { AtomicU64::from_ptr(dst) }.store(value, Ordering::Release);
}

/// Loads a counter, as an application reads it.
///
/// # Safety
/// 8 bytes at `src` are mapped and 8-byte aligned.
pub unsafe fn load_acquire(src: *const u64) -> u64 {
    // SAFETY: this function's caller keeps the word mapped and aligned.
    unsafe { AtomicU64::from_ptr(src.cast_mut()) }.load(Ordering::Acquire)
}

/// Loads a doorbell, as the card reads it.
///
/// # Safety
/// 4 bytes at `src` are mapped and 4-byte aligned.
pub unsafe fn load_doorbell(src: *const u32) -> u32 {
    // SAFETY: this function's caller keeps the word mapped and aligned.
    unsafe { AtomicU32::from_ptr(src.cast_mut()) }.load(Ordering::Acquire)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn unmapped_memory_is_found() {
        let map = Mapping::anonymous(3 * page_size()).unwrap();
        let start = map.as_ptr() as usize;
        assert!(populate(start + 5, 2 * page_size(), true).is_ok());
        drop(map);
        // A low address, which nothing maps. By now, another thread may have mapped the old address again.
        let error = populate(page_size(), 8, false).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
        assert!(populate(0, 8, false).is_err());
        assert!(populate(usize::MAX - 4, 64, false).is_err());
    }

    #[test]
    fn memory_without_rights_is_found() {
        let len = 2 * page_size();
        let map = Mapping::anonymous(len).unwrap();
        // SAFETY: the mapping belongs to this test, which does not access it after it took the rights away.
        assert_eq!(unsafe { libc::mprotect(map.as_ptr().cast(), len, libc::PROT_NONE) }, 0);
        assert!(populate(map.as_ptr() as usize, len, false).is_err());
        assert!(populate(map.as_ptr() as usize, len, true).is_err());
    }

    #[test]
    fn adjacent_mappings_cover_range() {
        let maps =
            "1000-3000 rw-p 0 0:0 0 a\n3000-4000 rw-s 0 0:0 0 b\n5000-6000 r--p 0 0:0 0 c\n6000-7000 ---p 0 0:0 0";
        assert!(covered(maps, 0x1000, 0x4000, true) && covered(maps, 0x2000, 0x3000, true));
        assert!(covered(maps, 0x5000, 0x6000, false) && !covered(maps, 0x5000, 0x6000, true));
        for (start, end) in [(0x1000, 0x5000), (0, 0x2000), (0x5000, 0x7000), (0x6000, 0x7000), (0x7000, 0x8000)] {
            assert!(!covered(maps, start, end, false), "{start:#x}");
        }
    }

    #[test]
    fn read_only_memory_is_refused_for_writing() {
        let text = c"constant";
        assert!(populate(text.as_ptr() as usize, 8, false).is_ok());
        assert!(populate(text.as_ptr() as usize, 8, true).is_err());
    }

    #[test]
    fn file_offset_need_not_be_multiple_of_page() {
        let fd = sealed_memfd("softefa test", 8192).unwrap();
        let whole = Mapping::shared(fd.as_fd(), 0, 8192).unwrap();
        let part = Mapping::shared(fd.as_fd(), 4100, 16).unwrap();
        let value = 0x1122_3344_u32;
        whole.write(4100, &value.to_ne_bytes());
        assert_eq!(part.u32_at(0).load(Ordering::Relaxed), value);
        assert_eq!(part.len(), 16);
        assert!(Mapping::shared(fd.as_fd(), 8000, 400).is_err(), "beyond the end");
        assert!(is_sealed_memfd(fd.as_fd(), 8192));
        assert_eq!(nix::sys::stat::fstat(&fd).unwrap().st_mode & 0o777, 0o600);
        assert!(!is_sealed_memfd(fd.as_fd(), 4096));
    }

    #[test]
    fn words_of_one_page_share_one_mapping() {
        let page = page_size();
        let (one, other) =
            (sealed_memfd("softefa test", 2 * page).unwrap(), sealed_memfd("softefa test", page).unwrap());
        let word = |fd: &OwnedFd, offset: usize| Mapping::word(fd.as_fd(), offset as u64).unwrap();
        let (first, last) = (word(&one, 0), word(&one, page - 8));
        assert!(Arc::ptr_eq(&first.0, &last.0) && last.1 as usize == first.1 as usize + page - 8);
        assert!(!Arc::ptr_eq(&first.0, &word(&one, page).0) && !Arc::ptr_eq(&first.0, &word(&other, 0).0));
        last.0.u64_at(page - 8).store(7, Ordering::Relaxed);
        drop((first, last));
        assert_eq!(word(&one, page - 8).0.u64_at(page - 8).load(Ordering::Relaxed), 7, "a new mapping of the page");
        assert!(Mapping::word(one.as_fd(), 2 * page as u64).is_err(), "beyond the end");
        assert!(Mapping::word(one.as_fd(), 4).is_err(), "not aligned");
    }

    #[test]
    fn export_of_software_gpu_begins_at_its_position() {
        for (name, skip) in [("softgpu-memory-0", 4096), ("softefa test", 0)] {
            let fd = sealed_memfd(name, 8192).unwrap();
            let whole = Mapping::shared(fd.as_fd(), 0, 8192).unwrap();
            nix::unistd::lseek(&fd, 4096, nix::unistd::Whence::SeekSet).unwrap();
            let part = Mapping::shared(fd.as_fd(), 8, 16).unwrap();
            let value = 0x1122_3344_u32;
            whole.write(skip + 8, &value.to_ne_bytes());
            assert_eq!(part.u32_at(0).load(Ordering::Relaxed), value, "{name}");
        }
    }
}
