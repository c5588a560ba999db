//! Fences, doorbell records and doorbell registers.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

/// Orders earlier stores to memory before later ones, as the card sees them (`udma_to_device_barrier`).
#[inline(always)]
pub fn publish() {
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the barrier instruction has no operands and accesses no memory.
    unsafe {
        core::arch::asm!("dmb oshst", options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "aarch64"))]
    std::sync::atomic::fence(Ordering::Release);
}

/// Orders earlier stores to memory before later stores to a write-combining register, and stores to such a register
/// before all later accesses (`mmio_wc_start`, `mmio_flush_writes`).
#[inline(always)]
pub fn mmio_barrier() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has SSE; the fence has no operands.
    unsafe {
        core::arch::x86_64::_mm_sfence();
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the barrier instruction has no operands and accesses no memory.
    unsafe {
        core::arch::asm!("dsb st", options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    std::sync::atomic::fence(Ordering::SeqCst);
}

/// Stores a block into a register, in ascending order.
///
/// # Safety
/// `to` is 8-byte aligned and writable for 64 bytes.
#[inline(always)]
unsafe fn store_block(to: *mut u64, block: &[u64; 8]) {
    // In one instruction, like rdma-core's `mmio_memcpy_x64`, so that the card gets one 64-byte packet. The loads
    // interleave the words the way the stores do.
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: this function's caller keeps 64 bytes at `to` writable and aligned, and the block is as long; NEON is
    // part of this target.
    unsafe {
        core::arch::asm!(
            "ld4 {{v0.2d, v1.2d, v2.2d, v3.2d}}, [{from}]",
            "st4 {{v0.2d, v1.2d, v2.2d, v3.2d}}, [{to}]",
            from = in(reg) block, to = in(reg) to,
            out("v0") _, out("v1") _, out("v2") _, out("v3") _,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(not(all(target_arch = "aarch64", not(miri))))]
    for (i, &word) in block.iter().enumerate() {
        // SAFETY: this function's caller keeps all eight words at `to` writable and aligned.
        unsafe { to.wrapping_add(i).write_volatile(word) };
    }
}

/// One big-endian word that the card reads and the driver only writes.
#[derive(Debug)]
pub struct DoorbellRecord(NonNull<AtomicU32>);

// SAFETY: every access to the word is an atomic store.
unsafe impl Send for DoorbellRecord {}

impl DoorbellRecord {
    /// Returns the doorbell record at `word`.
    ///
    /// # Safety
    /// `word` is 4-byte aligned and stays mapped, readable and writable, while the value lives.
    pub const unsafe fn new(word: NonNull<u32>) -> Self {
        Self(word.cast())
    }

    /// Stores a value, after all earlier stores.
    #[inline(always)]
    pub fn set(&self, value: u32) {
        publish();
        // SAFETY: the caller of `new` keeps the word mapped and aligned; the card may read an atomic at the same time.
        unsafe { self.0.as_ref() }.store(value.to_be(), Ordering::Release);
    }
}

/// Which work requests are copied into the register as a whole, instead of only their first 8 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlueFlame {
    /// None: the page is not write-combining, or the user disabled BlueFlame.
    Never,
    /// A work request that is rung alone and has inline data.
    Inline,
    /// Every work request that is rung alone.
    Single,
}

/// A doorbell register's address and use.
#[derive(Debug, Clone, Copy)]
pub struct DoorbellRegisterParts {
    /// The register: two halves of `buf_size` bytes.
    pub register: NonNull<u64>,
    /// Size of a half in bytes; 0 if the register is only an 8-byte doorbell.
    pub buf_size: u32,
    /// Which work requests are copied as a whole.
    pub blueflame: BlueFlame,
}

/// The doorbell register of a send queue. Writes alternate between its two halves.
#[derive(Debug)]
pub struct DoorbellRegister {
    /// The half for the next write. The other half is `buf_size` bytes away; the register is aligned to `2 * buf_size`.
    at: *mut u64,
    buf_size: usize,
    /// Size in bytes of the largest work request that is copied as a whole, without and with inline data; 0 if none is.
    copied: [usize; 2],
}

// SAFETY: the caller of `new` gives the register to one queue only; a register may be written from any thread.
unsafe impl Send for DoorbellRegister {}

impl DoorbellRegister {
    /// Returns the doorbell register that `parts` describes.
    ///
    /// # Panics
    /// If `buf_size` is neither 0 nor a power of two of at least 64, or `register` is not aligned to twice that and to
    /// 8.
    ///
    /// # Safety
    /// `register` stays mapped and writable for twice `buf_size` bytes, at least 8, while the value lives. No other
    /// queue uses the register.
    pub unsafe fn new(parts: DoorbellRegisterParts) -> Self {
        let buf_size = parts.buf_size as usize;
        let legal = buf_size == 0 || buf_size.is_power_of_two() && buf_size >= crate::wire::BLOCK;
        let aligned = parts.register.addr().get().is_multiple_of((2 * buf_size).max(align_of::<u64>()));
        assert!(legal && aligned, "a doorbell register of {buf_size} bytes cannot be at {:p}", parts.register);
        let copied = match parts.blueflame {
            BlueFlame::Never => [0, 0],
            BlueFlame::Inline => [0, buf_size],
            BlueFlame::Single => [buf_size, buf_size],
        };
        Self { at: parts.register.as_ptr(), buf_size, copied }
    }

    /// Returns whether a work request of `blocks` blocks that is rung alone is copied as a whole.
    #[inline(always)]
    pub fn copies(&self, blocks: u32, inline: bool) -> bool {
        blocks as usize * crate::wire::BLOCK <= self.copied[inline as usize]
    }

    /// Writes the first 8 bytes of a work request, in memory order.
    #[inline(always)]
    pub fn ring(&mut self, first: u64) {
        mmio_barrier();
        // SAFETY: `at` is the start of one of the halves, which the caller of `new` keeps mapped.
        unsafe { self.at.write_volatile(first) };
        self.turn();
    }

    /// Copies whole blocks, at most `buf_size` bytes in total.
    #[inline(never)]
    pub fn copy(&mut self, blocks: impl Iterator<Item = [u64; 8]>) {
        mmio_barrier();
        let mut at = self.at;
        for block in blocks {
            // SAFETY: the callers, in `sq`, copy only what `copies` allows, at most `buf_size` bytes, so the block is
            // inside the half.
            unsafe { store_block(at, &block) };
            at = at.wrapping_add(block.len());
        }
        self.turn();
    }

    #[inline(always)]
    fn turn(&mut self) {
        mmio_barrier();
        self.at = self.at.map_addr(|at| at ^ self.buf_size);
    }
}

/// The register that arms completion queues: `MLX5_CQ_DOORBELL` of the user page.
#[derive(Debug)]
pub struct ArmRegister(NonNull<u64>);

// SAFETY: every access is one volatile store of 8 bytes.
unsafe impl Send for ArmRegister {}

impl ArmRegister {
    /// Returns the arm register at `register`.
    ///
    /// # Safety
    /// `register` is 8-byte aligned and stays mapped writable while the value lives.
    pub const unsafe fn new(register: NonNull<u64>) -> Self {
        Self(register)
    }

    /// Writes a 64-bit value, big endian.
    pub fn set(&self, value: u64) {
        mmio_barrier();
        // SAFETY: the caller of `new` keeps the register mapped and aligned.
        unsafe { self.0.as_ptr().write_volatile(value.to_be()) };
        mmio_barrier();
    }
}
