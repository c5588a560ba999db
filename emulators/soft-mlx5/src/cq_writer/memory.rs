//! The card's view of a completion queue's memory.

use mlx5::wire::Cqe;
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use zerocopy::IntoBytes;

/// Slots to write, and the consumer index to read.
#[derive(Debug)]
pub struct CqMemory {
    slots: NonNull<Cqe>,
    log: u32,
    record: NonNull<AtomicU32>,
}

// SAFETY: only this value writes the slots, and it accesses the record as an atomic.
unsafe impl Send for CqMemory {}

/// Offset of the last two bytes, which make a completion valid and are stored separately.
const TAIL: usize = offset_of!(Cqe, signature);

impl CqMemory {
    /// Makes a view of `1 << log` slots and the first word of the queue's doorbell record.
    ///
    /// # Safety
    /// `slots` is aligned to 64 bytes and `record` to 4; both stay mapped, and the slots writable, while the value
    /// lives; nothing else but the queue's driver uses them.
    pub const unsafe fn new(slots: NonNull<Cqe>, log: u32, record: NonNull<u32>) -> Self {
        Self { slots, log, record: record.cast() }
    }

    /// Returns the base-2 logarithm of the number of slots.
    pub fn log(&self) -> u32 {
        self.log
    }

    /// Returns the driver's consumer index, 24 bits.
    pub fn consumer(&self) -> u32 {
        // SAFETY: the caller of `new` keeps the word mapped and aligned; the driver may write to it as an atomic at the
        // same time.
        u32::from_be(unsafe { self.record.as_ref() }.load(Ordering::Acquire)) & mlx5::wire::MAX_24_BITS
    }

    /// Writes a slot, ending with the two bytes that make it valid.
    pub fn write(&mut self, index: u32, cqe: &Cqe) {
        let slot = index as usize & ((1 << self.log) - 1);
        let to = self.slots.as_ptr().wrapping_add(slot).cast::<u8>();
        for (at, byte) in cqe.as_bytes().iter().take(TAIL).enumerate() {
            // SAFETY: the bytes are in the slot, and the driver doesn't read them until the tail is valid.
            unsafe { to.wrapping_add(at).write_volatile(*byte) };
        }
        let tail = u16::from_le_bytes([cqe.signature, cqe.op_own.0]).to_le();
        // SAFETY: the address is in the slot and even; the driver may read it as an atomic at the same time.
        unsafe { AtomicU16::from_ptr(to.wrapping_add(TAIL).cast()) }.store(tail, Ordering::Release);
    }
}
