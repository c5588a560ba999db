//! This process's memory, according to /proc/self/statm.
#![allow(unsafe_code)]

/// Resident bytes.
///
/// # Panics
/// If /proc is missing.
pub fn resident_bytes() -> usize {
    statm(1)
}

/// Bytes of address space, which `RLIMIT_AS` limits.
///
/// # Panics
/// If /proc is missing.
pub fn address_space() -> usize {
    statm(0)
}

fn statm(field: usize) -> usize {
    // SAFETY: the call takes no pointers.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let text = std::fs::read_to_string("/proc/self/statm").expect("/proc/self/statm");
    text.split(' ').nth(field).and_then(|pages| pages.parse::<usize>().ok()).expect("a number of pages") * page
}
