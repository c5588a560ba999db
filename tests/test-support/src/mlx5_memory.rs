//! Poisoned memory that stands in for a device's rings, doorbell records and registers.
#![allow(unsafe_code, missing_docs)]

use mlx5::cq::Slots;
use mlx5::mmio::{ArmRegister, BlueFlame, DoorbellRecord, DoorbellRegister, DoorbellRegisterParts};
use mlx5::ring::Ring;
use mlx5::wire::Cqe;
use std::ptr::NonNull;

/// The content of new memory.
pub const POISON: u8 = 0xa5;

/// Bytes at a stable, page-aligned address, reached by pointer only.
pub struct Memory {
    base: NonNull<u8>,
    layout: std::alloc::Layout,
}

// SAFETY: plain memory without thread affinity; tests that share it between threads synchronize their accesses.
unsafe impl Send for Memory {}
// SAFETY: plain memory without thread affinity; tests that share it between threads synchronize their accesses.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new(bytes: usize) -> Self {
        let layout = std::alloc::Layout::from_size_align(bytes.max(64), 4096).unwrap();
        // SAFETY: the layout has at least 64 bytes.
        let base = NonNull::new(unsafe { std::alloc::alloc(layout) }).expect("memory");
        let memory = Self { base, layout };
        memory.fill(POISON);
        memory
    }

    pub fn size(&self) -> usize {
        self.layout.size()
    }

    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub fn fill(&self, byte: u8) {
        // SAFETY: `base` is an allocation of `size()` bytes, which `self` owns.
        unsafe { self.base.as_ptr().write_bytes(byte, self.size()) };
    }

    pub fn read(&self, offset: usize, bytes: usize) -> Vec<u8> {
        assert!(offset + bytes <= self.size());
        let from = self.base.as_ptr().wrapping_add(offset);
        // SAFETY: the assertion keeps the read inside the allocation; volatile because the code under test writes
        // through its own pointers.
        (0..bytes).map(|at| unsafe { from.wrapping_add(at).read_volatile() }).collect()
    }

    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.size());
        let to = self.base.as_ptr().wrapping_add(offset);
        for (at, byte) in bytes.iter().enumerate() {
            // SAFETY: the assertion keeps the write inside the allocation.
            unsafe { to.wrapping_add(at).write_volatile(*byte) };
        }
    }

    /// Reads bytes that may wrap at the end of the memory.
    pub fn read_wrapped(&self, offset: usize, bytes: usize) -> Vec<u8> {
        let here = bytes.min(self.size() - offset);
        [self.read(offset, here), self.read(0, bytes - here)].concat()
    }

    /// A ring over the whole memory, which must outlive the ring and back no other.
    pub fn ring(&self, log_entry: u32) -> Ring {
        let entries = self.size() >> log_entry;
        assert!(entries.is_power_of_two());
        // SAFETY: the allocation is aligned to 4096 bytes; each test keeps it alive longer than the queue and gives it
        // to one queue.
        unsafe { Ring::new(self.base, entries.trailing_zeros(), log_entry) }
    }

    /// The whole memory as the slots of a completion queue.
    pub fn slots(&self) -> Slots {
        let slots = self.size() / size_of::<Cqe>();
        assert!(slots.is_power_of_two());
        // SAFETY: the allocation is aligned to 4096 bytes; each test keeps it alive longer than the queue and gives it
        // to one queue.
        unsafe { Slots::new(self.base.cast(), slots.trailing_zeros()) }
    }

    /// A doorbell record at the given word.
    pub fn record(&self, word: usize) -> DoorbellRecord {
        assert!(word * 4 < self.size());
        let at = NonNull::new(self.base.as_ptr().wrapping_add(word * 4)).expect("not null");
        // SAFETY: the assertion keeps the word inside the aligned allocation, which each test keeps alive.
        unsafe { DoorbellRecord::new(at.cast()) }
    }

    /// A doorbell register at the start.
    pub fn register(&self, buf_size: u32, blueflame: BlueFlame) -> DoorbellRegister {
        assert!(2 * buf_size as usize <= self.size());
        // SAFETY: the allocation is aligned and at least 64 bytes long; each test keeps it alive longer than the
        // register.
        unsafe { DoorbellRegister::new(DoorbellRegisterParts { register: self.base.cast(), buf_size, blueflame }) }
    }

    /// An arm register at the start.
    pub fn arm_register(&self) -> ArmRegister {
        // SAFETY: the allocation is aligned and at least 64 bytes long; each test keeps it alive longer than the
        // register.
        unsafe { ArmRegister::new(self.base.cast()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the memory with this layout, and only this drop frees it.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) };
    }
}
