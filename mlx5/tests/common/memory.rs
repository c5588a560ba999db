//! Memory in place of what a device maps: rings, records and registers, poisoned.
#![allow(unsafe_code)]

use mlx5::cq::Slots;
use mlx5::mmio::{ArmRegister, BlueFlame, DoorbellRecord, DoorbellRegister, DoorbellRegisterParts};
use mlx5::ring::Ring;
use mlx5::wire::Cqe;
use std::ptr::NonNull;

/// What fresh memory holds.
pub const POISON: u8 = 0xa5;

/// Bytes at a stable, page-aligned address, reached by pointer only.
pub struct Memory {
    base: NonNull<u8>,
    layout: std::alloc::Layout,
}

// SAFETY: nothing but plain memory; the tests share it between threads only with their own order.
unsafe impl Send for Memory {}
// SAFETY: the same.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new(bytes: usize) -> Self {
        let layout = std::alloc::Layout::from_size_align(bytes.max(64), 4096).unwrap();
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { std::alloc::alloc(layout) }).expect("memory");
        let memory = Self { base, layout };
        memory.fill(POISON);
        memory
    }

    pub fn len(&self) -> usize {
        self.layout.size()
    }

    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub fn fill(&self, byte: u8) {
        // SAFETY: the whole allocation.
        unsafe { self.base.as_ptr().write_bytes(byte, self.len()) };
    }

    pub fn read(&self, offset: usize, bytes: usize) -> Vec<u8> {
        assert!(offset + bytes <= self.len());
        let from = self.base.as_ptr().wrapping_add(offset);
        // SAFETY: in range, as asserted; volatile because the code under test writes through its own pointers.
        (0..bytes).map(|at| unsafe { from.wrapping_add(at).read_volatile() }).collect()
    }

    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len());
        let to = self.base.as_ptr().wrapping_add(offset);
        for (at, byte) in bytes.iter().enumerate() {
            // SAFETY: in range, as asserted.
            unsafe { to.wrapping_add(at).write_volatile(*byte) };
        }
    }

    /// Reads on from the start where the end is reached.
    pub fn read_wrapped(&self, offset: usize, bytes: usize) -> Vec<u8> {
        let here = bytes.min(self.len() - offset);
        [self.read(offset, here), self.read(0, bytes - here)].concat()
    }

    /// A ring over all of it. The memory must outlive the ring, and be used by one only.
    pub fn ring(&self, log_entry: u32) -> Ring {
        let entries = self.len() >> log_entry;
        assert!(entries.is_power_of_two());
        // SAFETY: 64-byte aligned, and the tests keep it alive and give it to one queue.
        unsafe { Ring::new(self.base, entries.trailing_zeros(), log_entry) }
    }

    /// All of it as the slots of a completion queue.
    pub fn slots(&self) -> Slots {
        let slots = self.len() / size_of::<Cqe>();
        assert!(slots.is_power_of_two());
        // SAFETY: 64-byte aligned, and the tests keep it alive and give it to one queue.
        unsafe { Slots::new(self.base.cast(), slots.trailing_zeros()) }
    }

    /// A record at a word.
    pub fn record(&self, word: usize) -> DoorbellRecord {
        assert!(word * 4 < self.len());
        let at = NonNull::new(self.base.as_ptr().wrapping_add(word * 4)).expect("not null");
        // SAFETY: aligned and inside; the tests keep it alive.
        unsafe { DoorbellRecord::new(at.cast()) }
    }

    /// A doorbell register at the start.
    pub fn register(&self, buf_size: u32, blueflame: BlueFlame) -> DoorbellRegister {
        assert!(2 * buf_size as usize <= self.len());
        // SAFETY: aligned, long enough, kept alive by the tests.
        unsafe { DoorbellRegister::new(DoorbellRegisterParts { register: self.base.cast(), buf_size, blueflame }) }
    }

    /// An arm register at the start.
    pub fn arm_register(&self) -> ArmRegister {
        // SAFETY: aligned, long enough, kept alive by the tests.
        unsafe { ArmRegister::new(self.base.cast()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) };
    }
}
