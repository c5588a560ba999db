//! The memory of a completion queue. The card may write to it at any time, so this module reads it through raw
//! pointers, uses acquire loads for the validity bytes, and never creates a reference to it.

use crate::wire::{Cqe, CqeOpcode, MAX_MINIS, MINI_ARRAY, MiniCqe, OpOwn};
use std::marker::PhantomData;
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};
use zerocopy::big_endian::{U16, U32};

/// A queue's slots; their number is a power of two.
#[derive(Debug)]
pub struct Slots {
    base: NonNull<Cqe>,
    mask: u32,
    log: u32,
}

// SAFETY: the caller of `new` gives the memory to one queue only, so moving the queue moves this process's only access
// to it.
unsafe impl Send for Slots {}

impl Slots {
    /// `1 << log` slots, `log` at most 24.
    ///
    /// # Safety
    /// `base` is aligned to 64 bytes, and all slots stay mapped, readable and writable, while the value lives. Nothing
    /// else but the card writes to them.
    pub const unsafe fn new(base: NonNull<Cqe>, log: u32) -> Self {
        assert!(log <= 24);
        Self { base, mask: (1 << log) - 1, log }
    }

    /// Returns the number of slots.
    #[allow(clippy::len_without_is_empty, reason = "a queue has at least one slot")]
    pub const fn len(&self) -> u32 {
        self.mask + 1
    }

    /// Fills all slots with [`Cqe::INITIAL`]. A device does this before the card may write.
    pub fn initialise(&mut self) {
        for slot in 0..self.len() {
            let at = self.slot(slot).0.cast_mut();
            // SAFETY: `slot` masks the index, so `at` is a slot; the caller of `new` keeps all slots mapped.
            unsafe { at.write_volatile(Cqe::INITIAL) };
        }
    }

    /// Returns the slot of an index. Indices do not wrap at the end of the ring.
    #[inline(always)]
    pub(super) fn slot(&self, index: u32) -> Slot {
        Slot(self.base.as_ptr().wrapping_add((index & self.mask) as usize))
    }

    /// Returns the number of whole laps before `index`.
    #[inline(always)]
    pub(super) fn lap(&self, index: u32) -> u32 {
        index >> self.log
    }

    /// Returns the number of slots from `index` to the end of its lap.
    #[inline(always)]
    pub(super) fn rest_of_lap(&self, index: u32) -> u32 {
        self.len() - (index & self.mask)
    }

    /// Writes the lap mark of its own lap into each of the `count` slots from `index` on, which a block covers, so that
    /// an old mark is never taken for a new one.
    #[inline(always)]
    pub(super) fn mark_covered(&mut self, index: u32, count: u32) {
        let here = self.rest_of_lap(index).min(count);
        self.mark_covered_in_lap(index, here);
        if here != count {
            self.mark_covered_in_lap(index.wrapping_add(here), count - here);
        }
    }

    /// Writes an invalid completion of its own lap into each of the `count` slots from `index` on, so that none is
    /// taken for a new one.
    pub(super) fn mark_empty(&mut self, index: u32, count: u32) {
        for index in (0..count).map(|at| index.wrapping_add(at)) {
            let empty = OpOwn::regular(CqeOpcode::Invalid, self.lap(index) & 1 != 0);
            // SAFETY: `slot` masks the index, so this is a byte of a slot, which the caller of `Slots::new` keeps
            // mapped.
            unsafe { self.slot(index).field::<OpOwn>(offset_of!(Cqe, op_own)).write_volatile(empty) };
        }
    }

    #[inline(always)]
    fn mark_covered_in_lap(&mut self, index: u32, count: u32) {
        let mark = self.lap(index) as u8;
        let first = self.slot(index);
        // A block covers fewer slots than it has mini completions; with a constant bound the loop becomes a row of
        // stores.
        for covered in 0..MAX_MINIS as u32 - 1 {
            if covered == count {
                break;
            }
            // SAFETY: `mark_covered` stops at the end of the lap, so the slot is in the ring, which the caller of
            // `Slots::new` keeps mapped.
            unsafe { first.after(covered).field::<u8>(offset_of!(Cqe, signature)).write_volatile(mark) };
        }
    }
}

/// A pointer to a slot, or to the copy of a title.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot(*const Cqe);

impl Slot {
    /// Returns the slot `slots` further on, which may be past the end of the ring.
    #[inline(always)]
    pub fn after(self, slots: u32) -> Self {
        Self(self.0.wrapping_add(slots as usize))
    }

    /// Returns the number of slots from `first`, which is not after this slot, to this slot.
    #[inline(always)]
    pub fn since(self, first: Self) -> u32 {
        ((self.0.addr() - first.0.addr()) / size_of::<Cqe>()) as u32
    }

    /// Returns the last byte.
    #[inline(always)]
    pub fn op_own(self) -> u8 {
        // SAFETY: callers pass slots of the ring, which `Slots::new`'s caller keeps mapped, or the title copy; the card
        // may write to an atomic at the same time.
        unsafe { AtomicU8::from_ptr(self.field(offset_of!(Cqe, op_own))) }.load(Ordering::Acquire)
    }

    /// Returns the last two bytes: signature (low) and `op_own` (high).
    #[inline(always)]
    pub fn tail(self) -> u16 {
        // SAFETY: callers pass slots of the ring, which `Slots::new`'s caller keeps mapped and aligned, so the offset
        // is even; the card may write to an atomic at the same time.
        u16::from_le(unsafe { AtomicU16::from_ptr(self.field(offset_of!(Cqe, signature))) }.load(Ordering::Acquire))
    }

    /// Returns the first `N` words, read one by one: a wider volatile read would go byte by byte or through the stack.
    #[inline(always)]
    fn words<const N: usize>(self) -> [u64; N] {
        const { assert!(N * size_of::<u64>() <= size_of::<Cqe>()) };
        std::array::from_fn(|word| {
            // SAFETY: the assertion keeps the word inside the slot, which is mapped and aligned to 64 bytes; any bytes
            // are a word.
            unsafe { self.0.cast::<u64>().wrapping_add(word).read_volatile() }
        })
    }

    /// Returns the whole completion.
    #[inline(always)]
    pub fn copy(self) -> Cqe {
        zerocopy::transmute!(self.words::<8>())
    }

    /// Returns the mini completions of an array; in a block of the enhanced layout, all but the last.
    #[inline(always)]
    pub fn minis(self) -> [MiniCqe; MINI_ARRAY] {
        zerocopy::transmute!(self.words::<MINI_ARRAY>())
    }

    #[inline(always)]
    fn field<F>(self, offset: usize) -> *mut F {
        self.0.cast_mut().cast::<u8>().wrapping_add(offset).cast()
    }
}

/// The title of the open block, with the fields that the last mini completion replaced. Completions point to it, so it
/// is on the heap and accessed only by pointer.
#[derive(Debug)]
pub(super) struct TitleCopy(NonNull<Aligned>);

/// The alignment of a slot.
#[derive(Debug)]
#[repr(align(64))]
struct Aligned {
    _cqe: Cqe,
}

// SAFETY: this value owns the allocation, and completions that point to it borrow the queue.
unsafe impl Send for TitleCopy {}

impl TitleCopy {
    pub fn new() -> Self {
        Self(NonNull::from(Box::leak(Box::new(Aligned { _cqe: Cqe::INITIAL }))))
    }

    /// Returns the copy as a slot.
    #[inline(always)]
    pub fn slot(&self) -> Slot {
        Slot(self.0.as_ptr().cast())
    }

    /// Copies the completion in `title`.
    #[inline(always)]
    pub fn set(&mut self, title: Slot) {
        // SAFETY: this value owns the allocation, which is 64 bytes long and aligned.
        unsafe { self.0.as_ptr().cast::<[u64; 8]>().write(title.words()) };
    }

    /// Returns the fields, as a pointer that stays in a register.
    #[inline(always)]
    pub fn fields(&mut self) -> TitleFields<'_> {
        TitleFields { at: self.slot(), title_copy: PhantomData }
    }
}

impl Drop for TitleCopy {
    fn drop(&mut self) {
        // SAFETY: `new` leaked a box, and only this drop frees it.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// The fields of [`TitleCopy`] that mini completions replace.
pub(super) struct TitleFields<'s> {
    at: Slot,
    title_copy: PhantomData<&'s mut TitleCopy>,
}

impl TitleFields<'_> {
    /// Returns the copy as a slot.
    #[inline(always)]
    pub fn slot(&self) -> Slot {
        self.at
    }

    /// Sets the number of received bytes, in the mini completion's byte order.
    #[inline(always)]
    pub fn set_byte_cnt(&mut self, count: U32) {
        // SAFETY: an aligned field of the allocation that `TitleCopy` owns and `self` borrows.
        unsafe { self.at.field::<u32>(offset_of!(Cqe, byte_cnt)).write_volatile(zerocopy::transmute!(count)) };
    }

    /// Sets the index of the work request, in the mini completion's byte order.
    #[inline(always)]
    pub fn set_wqe_counter(&mut self, counter: U16) {
        // SAFETY: an aligned field of the allocation that `TitleCopy` owns and `self` borrows.
        unsafe { self.at.field::<u16>(offset_of!(Cqe, wqe_counter)).write_volatile(zerocopy::transmute!(counter)) };
    }

    /// Sets opcode and owner.
    pub fn set_op_own(&mut self, op_own: OpOwn) {
        // SAFETY: a byte of the allocation that `TitleCopy` owns and `self` borrows.
        unsafe { self.at.field::<OpOwn>(offset_of!(Cqe, op_own)).write_volatile(op_own) };
    }

    /// Sets the operation code of the work request, the high byte of `sop_drop_qpn`.
    #[inline(always)]
    pub fn set_request_opcode(&mut self, opcode: u8) {
        // SAFETY: the first byte of a field of the allocation that `TitleCopy` owns and `self` borrows.
        unsafe { self.at.field::<u8>(offset_of!(Cqe, sop_drop_qpn)).write_volatile(opcode) };
    }
}

/// A completion without error. It borrows the queue, so its fields do not change before the next call on the queue.
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
            // SAFETY: an aligned field of a slot that `Slots::new`'s caller keeps mapped, or of the title copy, both of
            // which the borrow `'q` keeps alive; any bytes are a value.
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
        /// Index of the completed work request: its first block in a send queue, its descriptor in a receive queue.
        wqe_counter: u16 = wqe_counter;
        /// Number of received bytes.
        byte_cnt: u32 = byte_cnt;
        /// Immediate data, or the key that the peer invalidated, depending on [`Completion::opcode`].
        imm_or_key: u32 = imm_inval_pkey;
        /// Shared receive queue number, or the user's index of the queue pair.
        srqn_or_index: u32 = srqn_uidx;
        /// The card's clock; with compression, the title's.
        timestamp: u64 = timestamp;
        /// Operation code (high byte) and queue pair number.
        sop_drop_qpn: u32 = sop_drop_qpn;
        /// Flags and source queue pair of a datagram.
        flags_rqpn: u32 = flags_rqpn;
    }

    /// Returns the queue pair number.
    #[inline(always)]
    pub fn qpn(&self) -> u32 {
        self.sop_drop_qpn() & crate::wire::MAX_24_BITS
    }

    /// Returns the operation code of a send queue's work request; meaningless for receives.
    #[inline(always)]
    pub fn request_opcode(&self) -> u8 {
        (self.sop_drop_qpn() >> 24) as u8
    }

    /// Returns the operation code of the completion.
    #[inline(always)]
    pub fn opcode(&self) -> CqeOpcode {
        OpOwn(self.at.op_own()).opcode()
    }

    /// Returns the whole completion; with compression, the title with the mini completion's fields.
    pub fn to_cqe(&self) -> Cqe {
        self.at.copy()
    }
}
