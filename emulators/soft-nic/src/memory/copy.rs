//! Copies of bytes that other threads, processes and devices may read or write at the same time.
//!
//! A plain copy of such bytes would be a data race, which is undefined behaviour in Rust. Every access here is a
//! relaxed atomic ([`words`]) or an instruction in an assembly block ([`blocks`]). The compiler treats an assembly
//! block as relaxed atomic accesses to both ranges in unknown order, so a race with them yields mixed bytes and nothing
//! worse. Other processors and Miri use [`words`] for blocks too.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Bytes that an assembly block copies at once.
const BLOCK: usize = 16;

/// Size of a cache line in bytes.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const LINE: usize = 64;

/// From this many bytes on, [`copy_away`] bypasses the cache, and [`copy`] uses the processor's own copy loop.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const LONG: usize = 2048;

/// Copies between memory that others may access at the same time.
///
/// Naturally aligned values of 1, 2, 4 or 8 bytes are copied whole, as a card's writes are.
///
/// # Safety
/// Both ranges are mapped, `src` readable and `dst` writable. They may overlap: a work request may write to its own
/// source.
pub unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) {
    if (dst as usize).wrapping_sub(src as usize) >= len {
        // SAFETY: this function's caller keeps both ranges mapped, and `dst` does not begin within `src`.
        unsafe { ascending(dst, src, len) };
    } else {
        // SAFETY: this function's caller keeps both ranges mapped.
        unsafe { descending(dst, src, len) };
    }
}

/// Copies to memory that a thread on another core reads next and this core does not: `dst` and `src` do not overlap.
///
/// Between cores that share no cache, a line that another core has written costs several times as much as memory, so a
/// long copy leaves no lines in the cache.
///
/// # Safety
/// The conditions of [`copy`].
pub unsafe fn copy_away(dst: *mut u8, src: *const u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if len >= LONG {
        let head = (dst as usize).wrapping_neg() % LINE;
        let count = (len - head) / LINE * (LINE / BLOCK);
        let done = head + count * BLOCK;
        // SAFETY: this function's caller keeps both ranges mapped; the head is shorter than a line, so it lies in them.
        unsafe { ascending(dst, src, head) };
        // SAFETY: the lines after the head lie in both ranges, there is at least one, and `dst` is now on a line.
        unsafe { blocks::stream(dst.wrapping_add(head), src.wrapping_add(head), count) };
        // SAFETY: these are the bytes of both ranges after `done`, which this function's caller keeps mapped.
        unsafe { ascending(dst.wrapping_add(done), src.wrapping_add(done), len - done) };
        return;
    }
    // SAFETY: this function's caller keeps `len` bytes of both ranges mapped.
    unsafe { ascending(dst, src, len) };
}

/// Copies from the first byte to the last.
///
/// # Safety
/// The conditions of [`copy`], and `dst` does not begin within `src`.
unsafe fn ascending(dst: *mut u8, src: *const u8, len: usize) {
    let count = len / BLOCK;
    let done = count * BLOCK;
    if count > 0 {
        // SAFETY: this many blocks lie in both ranges, which this function's caller keeps mapped.
        unsafe { blocks::copy(dst, src, count) };
    }
    // SAFETY: these are the bytes of both ranges after `done`, which this function's caller keeps mapped.
    unsafe { words(dst.wrapping_add(done), src.wrapping_add(done), len - done) };
}

/// Copies from the last bytes to the first, through a buffer.
///
/// # Safety
/// The conditions of [`copy`].
unsafe fn descending(dst: *mut u8, src: *const u8, len: usize) {
    let mut buffer = [0u8; 2048];
    let mut left = len;
    while left > 0 {
        let part = left.min(buffer.len());
        left -= part;
        // SAFETY: `part` bytes from `left` on lie in the source, and the buffer has as many.
        unsafe { ascending(buffer.as_mut_ptr(), src.wrapping_add(left), part) };
        // SAFETY: `part` bytes from `left` on lie in the destination. Source bytes that the copy overwrites are in the
        // buffer or were copied before.
        unsafe { ascending(dst.wrapping_add(left), buffer.as_ptr(), part) };
    }
}

/// Copies from the first byte to the last, always the largest word to which both sides are aligned.
///
/// # Safety
/// The conditions of [`ascending`].
unsafe fn words(dst: *mut u8, src: *const u8, len: usize) {
    macro_rules! word {
        ($atomic:ty, $at:expr) => {{
            // SAFETY: the word lies in the source, which this function's caller keeps mapped; the match below checked
            // the alignment.
            let from = unsafe { <$atomic>::from_ptr(src.wrapping_add($at).cast_mut().cast()) };
            // SAFETY: the word lies in the destination, which this function's caller keeps mapped; the match below
            // checked the alignment.
            let to = unsafe { <$atomic>::from_ptr(dst.wrapping_add($at).cast()) };
            to.store(from.load(Relaxed), Relaxed);
            size_of::<$atomic>()
        }};
    }
    let mut at = 0;
    while at < len {
        let aligned = ((dst as usize).wrapping_add(at) | (src as usize).wrapping_add(at)).trailing_zeros();
        at += match aligned.min((len - at).ilog2()) {
            0 => word!(AtomicU8, at),
            1 => word!(AtomicU16, at),
            2 => word!(AtomicU32, at),
            _ => word!(AtomicU64, at),
        };
    }
}

/// Whole blocks, from the first to the last.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod blocks {
    use std::arch::asm;

    /// # Safety
    /// The conditions of [`super::ascending`], for `count` blocks, at least 1.
    pub(super) unsafe fn copy(dst: *mut u8, src: *const u8, count: usize) {
        if count >= super::LONG / super::BLOCK {
            // SAFETY: this function's caller keeps `count` blocks of both ranges mapped. The copy has the effect of one
            // byte by byte, so `dst` may begin before `src` and overlap it.
            unsafe {
                asm!(
                    "rep movsb",
                    inout("rsi") src => _, inout("rdi") dst => _, inout("rcx") count * super::BLOCK => _,
                    options(nostack, preserves_flags)
                );
            };
            return;
        }
        // SAFETY: this function's caller keeps `count` blocks of both ranges mapped. A block is read whole before it is
        // written, so `dst` may begin before `src` and overlap it. SSE is part of every x86-64.
        unsafe {
            asm!(
                "2:",
                "movups {block}, [{src}]",
                "movups [{dst}], {block}",
                "add {src}, 16",
                "add {dst}, 16",
                "dec {count}",
                "jnz 2b",
                src = inout(reg) src => _, dst = inout(reg) dst => _, count = inout(reg) count => _,
                block = out(xmm_reg) _,
                options(nostack)
            );
        };
    }

    /// Copies blocks, bypassing the cache.
    ///
    /// # Safety
    /// The conditions of [`copy`], and `dst` is 16-byte aligned.
    pub(super) unsafe fn stream(dst: *mut u8, src: *const u8, count: usize) {
        // SAFETY: this function's caller keeps `count` blocks of both ranges mapped, and `dst` aligned; SSE2 is part of
        // every x86-64. A release store does not wait for such stores, so the block ends with a fence that does.
        unsafe {
            asm!(
                "2:",
                "movups {block}, [{src}]",
                "movntps [{dst}], {block}",
                "add {src}, 16",
                "add {dst}, 16",
                "dec {count}",
                "jnz 2b",
                "sfence",
                src = inout(reg) src => _, dst = inout(reg) dst => _, count = inout(reg) count => _,
                block = out(xmm_reg) _,
                options(nostack)
            );
        };
    }
}

/// Whole blocks, from the first to the last.
#[cfg(all(target_arch = "aarch64", not(miri)))]
mod blocks {
    use std::arch::asm;

    /// # Safety
    /// The conditions of [`super::ascending`], for `count` blocks, at least 1.
    pub(super) unsafe fn copy(dst: *mut u8, src: *const u8, count: usize) {
        // SAFETY: this function's caller keeps `count` blocks of both ranges mapped. A block is read whole before it is
        // written, so `dst` may begin before `src` and overlap it. Ordinary memory needs no alignment for these loads
        // and stores.
        unsafe {
            asm!(
                "2:",
                "ldr {block:q}, [{src}], 16",
                "str {block:q}, [{dst}], 16",
                "subs {count}, {count}, 1",
                "b.ne 2b",
                src = inout(reg) src => _, dst = inout(reg) dst => _, count = inout(reg) count => _,
                block = out(vreg) _,
                options(nostack)
            );
        };
    }
}

/// Whole blocks, from the first to the last.
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod blocks {
    /// # Safety
    /// The conditions of [`super::ascending`], for `count` blocks.
    pub(super) unsafe fn copy(dst: *mut u8, src: *const u8, count: usize) {
        // SAFETY: this function's caller keeps `count` blocks of both ranges mapped.
        unsafe { super::words(dst, src, count * super::BLOCK) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// Lengths around every limit: of [`words`], blocks, lines, the buffer of [`descending`] and long copies.
    fn lengths() -> impl Iterator<Item = usize> {
        (0..=193).chain([2047, 2048, 2049, 2111, 2112, 2113, 4095, 4096, 6000])
    }

    fn pattern() -> Vec<u8> {
        (0..8192u32).map(|i| (i * 7 + i / 256) as u8).collect()
    }

    const LINE: usize = 64;

    /// Copies with `copy` between buffers at each offset within a line. No other byte of the target may change.
    fn check(copy: unsafe fn(*mut u8, *const u8, usize), steps: (usize, usize)) {
        let source = pattern();
        let from_line = source.as_ptr().align_offset(LINE);
        let mut target = vec![0xa5u8; 8192];
        let to_line = target.as_ptr().align_offset(LINE);
        for to in (0..LINE).step_by(steps.0) {
            for from in (0..LINE).step_by(steps.1) {
                for len in lengths() {
                    let (to, from) = (to_line + to, from_line + from);
                    // SAFETY: both ranges lie in their vectors, which have a line for the alignment, one for the
                    // offset, and `len` bytes.
                    unsafe { copy(target.as_mut_ptr().wrapping_add(to), source.as_ptr().wrapping_add(from), len) };
                    assert!(target[to..][..len] == source[from..][..len], "{len} bytes from {from} to {to}");
                    target[to..][..len].fill(0xa5);
                    let around = target[to.saturating_sub(LINE)..].iter().take(len + 2 * LINE);
                    assert!(around.into_iter().all(|byte| *byte == 0xa5), "around {len} bytes from {from} to {to}");
                }
            }
        }
    }

    #[test]
    fn copy_of_every_length_and_alignment() {
        check(copy, (1, 1));
    }

    #[test]
    fn copy_away_of_every_length_and_alignment() {
        check(copy_away, (1, 1));
    }

    #[test]
    fn portable_words_of_every_length_and_alignment() {
        check(words, (3, 5));
    }

    #[test]
    fn overlapping_copy_keeps_source_bytes() {
        for distance in [0, 1, 3, 8, 16, 63, 64, 65, 100, 2047, 2048, 2049] {
            for len in lengths() {
                for (to, from) in [(distance, 0), (0, distance)] {
                    let mut bytes = pattern()[..6000 + 2049 + 1].to_vec();
                    let mut expected = bytes.clone();
                    expected.copy_within(from..from + len, to);
                    let start = bytes.as_mut_ptr();
                    // SAFETY: both ranges lie in the vector, because they have at most 2049 + 6000 bytes.
                    unsafe { copy(start.wrapping_add(to), start.wrapping_add(from), len) };
                    assert!(bytes == expected, "{len} bytes from {from} to {to}");
                }
            }
        }
    }

    /// While another thread writes the source, an aligned value arrives as one of the written values.
    #[test]
    fn aligned_values_are_never_torn() {
        macro_rules! race {
            ($atomic:ty, $value:ty) => {
                let (shared, done) = (<$atomic>::new(0), AtomicBool::new(false));
                let torn = std::thread::scope(|scope| {
                    scope.spawn(|| {
                        while !done.load(Relaxed) {
                            shared.store(<$value>::MAX, Relaxed);
                            shared.store(0, Relaxed);
                        }
                    });
                    let torn = (0..20_000).any(|_| {
                        let mut seen: $value = 0;
                        // SAFETY: both are values of this size.
                        unsafe { copy((&raw mut seen).cast(), shared.as_ptr().cast(), size_of::<$value>()) };
                        seen != 0 && seen != <$value>::MAX
                    });
                    done.store(true, Relaxed);
                    torn
                });
                assert!(!torn, "a value of {} bytes", size_of::<$value>());
            };
        }
        race!(AtomicU64, u64);
        race!(AtomicU32, u32);
        race!(AtomicU16, u16);
    }
}
