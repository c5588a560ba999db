//! The memory of a completion queue. The card writes to it at any time: it is read through raw pointers, validity bytes
//! with acquire loads, and never becomes a reference.

use crate::wire::{Cqe, CqeOpcode, MAX_MINIS, MiniCqe, OpOwn};
use std::marker::PhantomData;
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};
use zerocopy::big_endian::{U16, U32};

/// The slots of a queue, a power of two of them.
#[derive(Debug)]
pub struct Slots {
    base: NonNull<Cqe>,
    mask: u32,
    log: u32,
}

// SAFETY: the memory belongs to one queue, as `new` was promised; the card is no thread.
unsafe impl Send for Slots {}

impl Slots {
    /// `1 << log` slots, `log` at most 24.
    ///
    /// # Safety
    /// `base` is aligned to 64 bytes, and all slots stay mapped, readable and writable, while the value lives. Nothing else
    /// but the card writes to them.
    pub const unsafe fn new(base: NonNull<Cqe>, log: u32) -> Self {
        assert!(log <= 24);
        Self { base, mask: (1 << log) - 1, log }
    }

    /// Slots.
    #[allow(clippy::len_without_is_empty, reason = "a queue has at least one slot")]
    pub const fn len(&self) -> u32 {
        self.mask + 1
    }

    /// Fills all slots with [`Cqe::INITIAL`], as a device must before the card may write.
    pub fn initialise(&mut self) {
        for slot in 0..self.len() {
            let at = self.slot(slot).0.cast_mut();
            // SAFETY: inside the queue's memory.
            unsafe { at.write_volatile(Cqe::INITIAL) };
        }
    }

    /// The slot of an index, which counts on past the end.
    #[inline(always)]
    pub(super) fn slot(&self, index: u32) -> Slot {
        Slot(self.base.as_ptr().wrapping_add((index & self.mask) as usize))
    }

    /// How often the queue was passed before `index`.
    #[inline(always)]
    pub(super) fn lap(&self, index: u32) -> u32 {
        index >> self.log
    }

    /// Slots from `index` to the end of its lap.
    #[inline(always)]
    pub(super) fn rest_of_lap(&self, index: u32) -> u32 {
        self.len() - (index & self.mask)
    }

    /// Gives `count` slots from `index` on, which a block covers, each the mark of its own lap, so that no old mark is
    /// taken for a new one.
    #[inline(always)]
    pub(super) fn mark_covered(&mut self, index: u32, count: u32) {
        let here = self.rest_of_lap(index).min(count);
        self.mark_covered_in_lap(index, here);
        if here != count {
            self.mark_covered_in_lap(index.wrapping_add(here), count - here);
        }
    }

    #[inline(always)]
    fn mark_covered_in_lap(&mut self, index: u32, count: u32) {
        let mark = self.lap(index) as u8;
        let first = self.slot(index);
        // A block covers fewer than its minis; with a constant bound this is a row of stores.
        for covered in 0..MAX_MINIS as u32 - 1 {
            if covered == count {
                break;
            }
            // SAFETY: inside the queue's memory: the slots do not pass the end of the lap.
            unsafe { first.after(covered).field::<u8>(offset_of!(Cqe, signature)).write_volatile(mark) };
        }
    }
}

/// A pointer to a slot, or to a completion of our own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot(*const Cqe);

impl Slot {
    /// The slot `slots` after it, which may be past the end.
    #[inline(always)]
    pub fn after(self, slots: u32) -> Self {
        Self(self.0.wrapping_add(slots as usize))
    }

    /// Slots from `first`, which is not after it, to this.
    #[inline(always)]
    pub fn since(self, first: Self) -> u32 {
        ((self.0.addr() - first.0.addr()) / size_of::<Cqe>()) as u32
    }

    /// Its last byte.
    #[inline(always)]
    pub fn op_own(self) -> u8 {
        // SAFETY: inside the queue's memory; an atomic may be shared with the card.
        unsafe { AtomicU8::from_ptr(self.field(offset_of!(Cqe, op_own))) }.load(Ordering::Acquire)
    }

    /// Its last two bytes: signature (low) and `op_own` (high).
    #[inline(always)]
    pub fn tail(self) -> u16 {
        // SAFETY: inside the queue's memory and even; an atomic may be shared with the card.
        u16::from_le(unsafe { AtomicU16::from_ptr(self.field(offset_of!(Cqe, signature))) }.load(Ordering::Acquire))
    }

    /// The first `N` words. One by one, as a volatile read of more goes byte by byte or through the stack.
    #[inline(always)]
    fn words<const N: usize>(self) -> [u64; N] {
        const { assert!(N * size_of::<u64>() <= size_of::<Cqe>()) };
        std::array::from_fn(|word| {
            // SAFETY: inside the queue's memory and aligned; any bytes are a word.
            unsafe { self.0.cast::<u64>().wrapping_add(word).read_volatile() }
        })
    }

    /// All of it.
    #[inline(always)]
    pub fn copy(self) -> Cqe {
        zerocopy::transmute!(self.words::<8>())
    }

    /// The minis of a compressed completion.
    #[inline(always)]
    pub fn minis(self) -> [MiniCqe; MAX_MINIS] {
        zerocopy::transmute!(self.words::<MAX_MINIS>())
    }

    #[inline(always)]
    fn field<F>(self, offset: usize) -> *mut F {
        self.0.cast_mut().cast::<u8>().wrapping_add(offset).cast()
    }
}

/// A completion of our own, in a place that does not move: the title, with what the last mini replaced. Entries point
/// to it, so it is reached by pointer only.
#[derive(Debug)]
pub(super) struct TitleCopy(NonNull<Aligned>);

/// The alignment of a slot.
#[derive(Debug)]
#[repr(align(64))]
struct Aligned {
    _cqe: Cqe,
}

// SAFETY: the allocation belongs to this value alone.
unsafe impl Send for TitleCopy {}

impl TitleCopy {
    pub fn new() -> Self {
        Self(NonNull::from(Box::leak(Box::new(Aligned { _cqe: Cqe::INITIAL }))))
    }

    /// In place of a slot.
    #[inline(always)]
    pub fn slot(&self) -> Slot {
        Slot(self.0.as_ptr().cast())
    }

    /// Makes the completion in `title` the title.
    #[inline(always)]
    pub fn set(&mut self, title: Slot) {
        // SAFETY: our own allocation, aligned.
        unsafe { self.0.as_ptr().cast::<[u64; 8]>().write(title.words()) };
    }

    /// Its fields, as a pointer that stays in a register.
    #[inline(always)]
    pub fn fields(&mut self) -> TitleFields<'_> {
        TitleFields { at: self.slot(), title_copy: PhantomData }
    }
}

impl Drop for TitleCopy {
    fn drop(&mut self) {
        // SAFETY: it came from a box, and nothing else frees it.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// The fields of [`TitleCopy`] that minis replace.
pub(super) struct TitleFields<'s> {
    at: Slot,
    title_copy: PhantomData<&'s mut TitleCopy>,
}

impl TitleFields<'_> {
    /// In place of a slot.
    #[inline(always)]
    pub fn slot(&self) -> Slot {
        self.at
    }

    /// Bytes that came, as the mini has them.
    #[inline(always)]
    pub fn set_byte_cnt(&mut self, count: U32) {
        // SAFETY: an aligned field of our own allocation.
        unsafe { self.at.field::<u32>(offset_of!(Cqe, byte_cnt)).write_volatile(zerocopy::transmute!(count)) };
    }

    /// The request's index, as the mini has it.
    #[inline(always)]
    pub fn set_wqe_counter(&mut self, counter: U16) {
        // SAFETY: an aligned field of our own allocation.
        unsafe { self.at.field::<u16>(offset_of!(Cqe, wqe_counter)).write_volatile(zerocopy::transmute!(counter)) };
    }

    /// The request's operation code, the high byte of `sop_drop_qpn`.
    #[inline(always)]
    pub fn set_request_opcode(&mut self, opcode: u8) {
        // SAFETY: the first byte of a field of our own allocation.
        unsafe { self.at.field::<u8>(offset_of!(Cqe, sop_drop_qpn)).write_volatile(opcode) };
    }
}

/// A good completion. It borrows the queue: what it shows stays until the queue is touched again.
#[derive(Debug, Clone, Copy)]
pub struct Completion<'q> {
    at: Slot,
    queue: PhantomData<&'q Slots>,
}

macro_rules! fields {
    ($($(#[$attr:meta])* $name:ident: $int:ty = $field:ident;)*) => {$(
        $(#[$attr])*
        #[inline(always)]
        pub fn $name(&self) -> $int {
            const { assert!(offset_of!(Cqe, $field) % align_of::<$int>() == 0) };
            // SAFETY: an aligned field of a completion in the queue's memory or our own; any bytes are a value.
            <$int>::from_be(unsafe { self.at.field::<$int>(offset_of!(Cqe, $field)).read_volatile() })
        }
    )*};
}

impl<'q> Completion<'q> {
    #[inline(always)]
    pub(super) fn new(at: Slot) -> Self {
        Self { at, queue: PhantomData }
    }

    fields! {
        /// Index of the request that is done: its first block in a send queue, its descriptor in a receive queue.
        wqe_counter: u16 = wqe_counter;
        /// Bytes that came.
        byte_cnt: u32 = byte_cnt;
        /// Immediate data, or the key that the peer made invalid: [`Completion::opcode`] tells which.
        imm_or_key: u32 = imm_inval_pkey;
        /// Shared receive queue number, or the user's index of the queue pair.
        srqn_or_index: u32 = srqn_uidx;
        /// The card's clock. Under compression that of the title.
        timestamp: u64 = timestamp;
        /// Operation code (high byte) and queue pair number in one.
        sop_drop_qpn: u32 = sop_drop_qpn;
        /// Flags and source queue pair of a datagram.
        flags_rqpn: u32 = flags_rqpn;
    }

    /// Queue pair number.
    #[inline(always)]
    pub fn qpn(&self) -> u32 {
        self.sop_drop_qpn() & crate::wire::MAX_24_BITS
    }

    /// Operation code of the send queue's request; of no meaning for receives.
    #[inline(always)]
    pub fn request_opcode(&self) -> u8 {
        (self.sop_drop_qpn() >> 24) as u8
    }

    /// What the completion tells.
    #[inline(always)]
    pub fn opcode(&self) -> CqeOpcode {
        OpOwn(self.at.op_own()).opcode()
    }

    /// All of it. Under compression the title's bytes with what the mini replaces.
    pub fn to_cqe(&self) -> Cqe {
        self.at.copy()
    }
}
