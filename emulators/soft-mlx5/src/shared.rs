//! Memory shared by driver and card (rings, doorbell records, registers), and the user's buffers. All of the mlx5 front
//! end's accesses by raw address are in this file.
#![allow(unsafe_code)]

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::cq_writer::CqMemory;
use mlx5::cq::Slots;
use mlx5::mmio::{ArmRegister, BlueFlame, DoorbellRecord, DoorbellRegister, DoorbellRegisterParts};
use mlx5::ring::Ring;

use super::mkey::Target;
use soft_nic::memory::{self, Mapping};

/// A queue's zeroed, page-aligned memory. Parts that go to the driver come with a handle that keeps the memory mapped.
#[derive(Debug)]
pub struct Shared(Mapping);

impl Shared {
    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// The system is out of memory.
    pub fn new(len: usize) -> io::Result<Self> {
        Mapping::anonymous(len).map(Self)
    }

    fn address(&self, at: usize, len: usize) -> NonNull<u8> {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.0.len()), "offset {at} of a queue's memory");
        // A mapping is never at address 0, so none of its bytes are.
        NonNull::new(self.0.as_ptr().wrapping_add(at)).unwrap_or(NonNull::dangling())
    }

    /// Returns the driver's view of a ring at `at`.
    pub(super) fn ring(&self, at: usize, log_entries: u32, log_entry: u32) -> Ring {
        let base = self.address(at, 1 << (log_entries + log_entry));
        // SAFETY: the ring is in the mapping, and aligned by the queues' layout; only the driver that gets it writes
        // there.
        unsafe { Ring::new(base, log_entries, log_entry) }
    }

    /// Returns the driver's view of a word in a doorbell record.
    pub fn driver_record(&self, at: usize) -> DoorbellRecord {
        let word = self.address(at, 4).cast();
        // SAFETY: the word is in the mapping, and aligned to 4 bytes by the queues' layout.
        unsafe { DoorbellRecord::new(word) }
    }

    /// Returns the driver's view of the doorbell register: two halves of `half` bytes each.
    pub(super) fn register(&self, at: usize, half: usize) -> DoorbellRegister {
        let register = self.address(at, 2 * half).cast();
        // SAFETY: the register is in the mapping, and aligned by the queues' layout; only one queue's driver gets it.
        unsafe {
            DoorbellRegister::new(DoorbellRegisterParts {
                register,
                buf_size: half as u32,
                blueflame: BlueFlame::Inline,
            })
        }
    }

    /// Returns the driver's view of the arm register.
    pub fn arm_register(&self, at: usize) -> ArmRegister {
        let register = self.address(at, 8).cast();
        // SAFETY: the register is in the mapping, and aligned by the queues' layout.
        unsafe { ArmRegister::new(register) }
    }

    /// Returns the driver's view of a completion queue's slots, initialised.
    pub fn slots(&self, at: usize, log: u32) -> Slots {
        let base = self.address(at, 64 << log).cast();
        // SAFETY: the slots are in the mapping, and page-aligned; driver and card write them by the format's rules.
        let mut slots = unsafe { Slots::new(base, log) };
        slots.initialise();
        slots
    }

    /// Returns the card's view of the same slots and the word with the consumer's index.
    pub fn completions(&self, at: usize, log: u32, record: usize) -> CqMemory {
        let (slots, record) = (self.address(at, 64 << log).cast(), self.address(record, 4).cast());
        // SAFETY: the slots are in the mapping, and page-aligned; the completion queue that holds the writer keeps the
        // mapping.
        unsafe { CqMemory::new(slots, log, record) }
    }

    /// Reads a big-endian word of a doorbell record.
    pub(super) fn record(&self, at: usize) -> u32 {
        u32::from_be(self.0.u32_at(at).load(Ordering::Acquire))
    }

    /// Takes the value written to a register since the last call, in memory byte order; 0 for none.
    pub(super) fn take_register(&self, at: usize) -> u64 {
        let word = self.0.u64_at(at);
        if word.load(Ordering::Relaxed) == 0 { 0 } else { word.swap(0, Ordering::Acquire) }
    }

    /// Copies bytes written by the driver.
    pub(super) fn read(&self, at: usize, into: &mut [u8]) {
        self.0.read(at, into);
    }
}

/// Copies from the user's memory at `address`.
pub(super) fn copy_from(address: u64, into: &mut [u8]) {
    // SAFETY: a memory key covers the range, which the caller of `register` keeps mapped until the key is removed.
    unsafe { memory::copy(into.as_mut_ptr(), address as *const u8, into.len()) };
}

/// Copies to the user's memory at `address`.
pub(super) fn copy_to(address: u64, bytes: &[u8]) {
    // SAFETY: a memory key that allows writing covers the range, which the caller of `register` keeps mapped until the
    // key is removed.
    unsafe { memory::copy(address as *mut u8, bytes.as_ptr(), bytes.len()) };
}

/// Executes an atomic on 8 aligned bytes of the user's memory and returns their old value.
pub(super) fn atomic(target: Target, change: impl Fn(u64) -> u64) -> u64 {
    let Target::Address(address) = target else { return 0 };
    // SAFETY: a memory key covers the 8 bytes, and the caller has checked their alignment.
    let word = unsafe { AtomicU64::from_ptr(address as *mut u64) };
    let mut seen = word.load(Ordering::Acquire);
    while let Err(now) = word.compare_exchange_weak(seen, change(seen), Ordering::AcqRel, Ordering::Acquire) {
        seen = now;
    }
    seen
}
